"""What the ops of a training step must cost at least: operations of products, bytes of everything else.

T tokens of B sequences of S; H hidden_size, I intermediate_size, k experts of a token (1 without experts), q and kv
the widths of all query and key heads, D of one, V vocabulary; bf16, of which an element is 2 bytes.

| op | at least, per block and token |
|---|---|
| products | 6 operations per weight: forward, dX, dW |
| attention | pairs of query and key in sight, 4 D operations per head forward, 10 D backward |
| norms, each | 8H bytes forward (x, residual -> sum, y), 8H backward, 2H to make y anew for dW |
| rope | 4(q + kv) bytes forward, as many backward |
| gated unit | 6Ik bytes forward (gate, up -> h), 12Ik backward (dh, gate, up -> d gate, d up; h anew) |
| cross entropy rows | 4V bytes per token: logits read, gradient written in their place |
| embedding | 6H bytes per token, and 2VH where the head has a table of its own |
| optimizer | weights and states read and written, gradients read: counted on the tensors themselves |
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True)
class Sizes:
    """The numbers of a text model's config.json that costs depend on. windows: of each block, None sees all."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int
    chosen: int
    norms: int
    tied: bool
    windows: tuple[int | None, ...]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        heads, blocks = config["num_attention_heads"], config["num_hidden_layers"]
        window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
        every_second = config["model_type"] == "gemma2"
        return cls(
            config["hidden_size"],
            config["intermediate_size"],
            heads,
            config["num_key_value_heads"],
            config.get("head_dim") or config["hidden_size"] // heads,
            config["vocab_size"],
            config.get("num_local_experts", 1),
            config.get("num_experts_per_tok", 1),
            4 if every_second else 2,
            config["tie_word_embeddings"],
            tuple(window if not every_second or i % 2 == 0 else None for i in range(blocks)),
        )

    @property
    def q(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def weights(self) -> int:
        """That a token is multiplied with, in blocks and head."""
        block = self.hidden * (2 * self.q + 2 * self.kv) + 3 * self.hidden * self.intermediate * self.chosen
        router = self.hidden * self.experts if self.experts > 1 else 0
        return len(self.windows) * (block + router) + self.vocab * self.hidden

    def pairs(self, length: int) -> int:
        """Of query and key in sight, in all blocks, of one sequence."""
        windows = [min(window or length, length) for window in self.windows]
        return sum(w * (w + 1) // 2 + (length - w) * w for w in windows)


def operations(sizes: Sizes, batch: int, length: int) -> dict[str, float]:
    """op -> floating point operations of a step that cannot be left out."""
    pairs = batch * sizes.pairs(length) * sizes.q
    return {
        "products": 6.0 * sizes.weights * batch * length,
        "attention forward": 4.0 * pairs,
        "attention backward": 10.0 * pairs,
    }


def traffic(sizes: Sizes, batch: int, length: int, optimizer_bytes: int) -> dict[str, float]:
    """op -> bytes of a step that cannot be left out."""
    tokens, blocks = batch * length, len(sizes.windows)
    rows = tokens * blocks
    return {
        "norms": 18.0 * sizes.hidden * (rows * sizes.norms + tokens),
        "rope": 8.0 * (sizes.q + sizes.kv) * rows,
        "gated units": 18.0 * sizes.intermediate * sizes.chosen * rows,
        "cross entropy rows": 4.0 * sizes.vocab * tokens,
        "embedding": 6.0 * sizes.hidden * tokens + (0 if sizes.tied else 2.0 * sizes.vocab * sizes.hidden),
        "optimizer": float(optimizer_bytes),
    }


def floors_ms(
    sizes: Sizes, batch: int, length: int, optimizer_bytes: int, ceilings: Mapping[str, float]
) -> dict[str, float]:
    """op -> milliseconds at the ceilings that were measured on this device."""
    rate, bandwidth = ceilings["matmul_bf16_tflop_per_s"] * 1e9, ceilings["copy_tb_per_s"] * 1e9
    work = {op: n / rate for op, n in operations(sizes, batch, length).items()}
    return {**work, **{op: n / bandwidth for op, n in traffic(sizes, batch, length, optimizer_bytes).items()}}


def kept_bytes(sizes: Sizes, checkpointing: str) -> float:
    """Per block and token, what the leanest backward without another product keeps: the residual before each norm,
    q, k, v, the attention's output and its row sums (fp32), gate and up; with "mlp" not gate and up; with "block" the
    block's input alone."""
    if checkpointing == "block":
        return 2.0 * sizes.hidden
    attention = 2.0 * sizes.hidden * sizes.norms + 2 * (sizes.q + 2 * sizes.kv) + 2 * sizes.q + 4 * sizes.heads
    return attention + (0 if checkpointing == "mlp" else 4 * sizes.intermediate * sizes.chosen)
