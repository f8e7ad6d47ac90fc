"""Gated DeltaNet: the linear-attention mixer of Qwen3-Next and Qwen3.5, around the gated delta rule.

    q | k | v = silu(causal_conv(in_proj_qkv(x)))       z = in_proj_z(x)
    beta = sigmoid(in_proj_b(x))                        g = -exp(A_log) * softplus(in_proj_a(x) + dt_bias)
    y = out_proj(RMSNorm(gated_delta_rule(q, k, v, g, beta)) * silu(z)),  one norm weight for all value heads

Its state has one size however long the text is. Convolution and state restart at each packed document. Padding, on
either side, neither writes to the state nor lets it decay: with and without padding the results are the same. Padding
between tokens differs: the convolution sees zeros there, and `generate` refuses it.

Source: Yang et al. 2024, "Gated Delta Networks", https://arxiv.org/abs/2412.06464; models/qwen3_5 of transformers 5.23.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.kernels._triton import use_triton
from ligermodels.kernels.norm.gated_norm import gated_norm
from ligermodels.kernels.recurrent.causal_conv import causal_conv
from ligermodels.kernels.recurrent.delta_gates import delta_gates
from ligermodels.kernels.recurrent.gated_delta_rule import gated_delta_rule
from ligermodels.kernels.recurrent.gated_delta_step import gated_delta_step
from ligermodels.layers.base import REPLICATED, Draw, FusionContext, FusionPart, Layer, Shard, ones
from ligermodels.layers.batch import Batch
from ligermodels.layers.fusion import linears_part
from ligermodels.layers.linear import JointProjections, apply_linear, apply_linears
from ligermodels.layers.parallel import MeshGroup, local_rows, local_shard, replicated
from ligermodels.layers.state import RecurrentState


class GatedRMSNorm(Layer):
    """RMSNorm of each head, times its weight, times silu(z): forward(x, z [..., size]) -> [..., size].

    tp: the ranks over which the heads are sharded.
    """

    def __init__(self, size: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def init_weights(self, draw: Draw) -> None:
        draw(self.weight, ones)

    def shards(self) -> Mapping[str, Shard]:
        return {"weight": REPLICATED}

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return gated_norm(x, z, replicated(self.weight, self.tp), self.eps)


class CausalConv(Layer):
    """Convolution of each channel over the last `size` tokens, then silu.

    forward(x [B, S, C], state=..., cu_seqlens=...) as `causal_conv`; forward(x, step=f) is f(x, weight), for a kernel
    that convolves and does more. A module, so that hooks of offloading and ZeRO-3 bring its weight.
    channels: slices of the channels that x has, in order; None: it has all.
    tp: the ranks over which the channels are sharded, by the parts `row_parts` of them, as the mixer says.
    """

    def __init__(self, channels: int, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, size))
        self.reset_parameters()

    def init_weights(self, draw: Draw) -> None:
        draw(self.weight, row_parts=self.row_parts)

    def forward(
        self,
        x: Tensor,
        *,
        state: Any = None,
        cu_seqlens: Tensor | None = None,
        channels: Sequence[slice] | None = None,
        step: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Tensor:
        weight = local_rows(self.weight, self.tp)
        if channels is not None:
            weight = torch.cat([weight[rows] for rows in channels])
        if step is not None:
            return step(x, weight)
        return causal_conv(x, weight, activation="silu", state=state, cu_seqlens=cu_seqlens)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, {self.weight.shape[2]}"


class GatedDeltaNet(JointProjections):
    """[B, S, hidden_size] -> [B, S, hidden_size].

    forward(x, batch, cache=None): cache is a `RecurrentState`, which the new tokens move on.
    num_value_heads is a multiple of num_key_heads: value head i reads the query and key head i // (their ratio).
    conv_size: the tokens that the convolution sees, the current one included. eps: of the norm at the output.
    joined: the projections are two, in_proj_qkvz and in_proj_ba, with the rows of the four one after the other.
    tp: the ranks over which the heads are sharded (tensor parallel); x is then a rank's shard [B, S/n, hidden_size].
    With `batch.cp` convolution and delta rule compute all tokens of this rank's heads, all else its tokens.
    """

    norm: GatedRMSNorm
    out_proj: nn.Linear
    is_recurrent = True
    keep_bf16 = ("in_proj_a", "in_proj_b", "in_proj_ba")
    output_name = "out_proj"

    def __init__(
        self,
        hidden_size: int,
        *,
        num_key_heads: int,
        num_value_heads: int,
        key_head_dim: int,
        value_head_dim: int,
        conv_size: int = 4,
        eps: float = 1e-6,
        joined: bool = False,
    ):
        super().__init__()
        if num_value_heads % num_key_heads:
            raise InputError(f"num_value_heads={num_value_heads} must be a multiple of num_key_heads={num_key_heads}")
        self.num_key_heads, self.num_value_heads = num_key_heads, num_value_heads
        self.key_head_dim, self.value_head_dim = key_head_dim, value_head_dim
        keys, values = num_key_heads * key_head_dim, num_value_heads * value_head_dim
        self.sizes: tuple[int, ...] = (keys, keys, values)
        channels = sum(self.sizes)
        parts = dict(qkv=self.sizes, z=(values,), b=(num_value_heads,), a=(num_value_heads,))
        if joined:
            parts = dict(qkvz=(*self.sizes, values), ba=(num_value_heads, num_value_heads))
        self.joined, self._parts = joined, {f"in_proj_{name}": sizes for name, sizes in parts.items()}
        self.joint_names = tuple(self._parts)
        self.dt_bias = nn.Parameter(torch.empty(num_value_heads))
        self.A_log = nn.Parameter(torch.empty(num_value_heads))
        self.conv_size = conv_size
        self.conv1d = CausalConv(channels, conv_size)
        inputs = {name: nn.Linear(hidden_size, sum(sizes), bias=False) for name, sizes in self._parts.items()}
        output = dict(norm=GatedRMSNorm(value_head_dim, eps), out_proj=nn.Linear(values, hidden_size, bias=False))
        for name, module in (inputs | output if joined else output | inputs).items():  # transformers' orders
            self.add_module(name, module)
        self.reset_parameters()
        self.join_weights()

    def init_weights(self, draw: Draw) -> None:
        draw(self.A_log, lambda rates, generator: rates.uniform_(0.01, 16, generator=generator).log_())
        draw(self.dt_bias, ones)

    @property
    def heads(self) -> tuple[int, int]:
        return self.num_value_heads, self.num_key_heads

    def shards(self) -> Mapping[str, Shard]:
        split = self.num_key_heads, f"{self.num_key_heads} key heads of linear attention"
        parts = {**self._parts, "conv1d.weight": self.sizes}
        return {
            **{name: Shard("columns", *split, parts=rows if len(rows) > 1 else None) for name, rows in parts.items()},
            **dict.fromkeys(("A_log", "dt_bias"), Shard("columns", *split)),
            self.output_name: Shard("rows", *split),
        }

    def set_tp(self, tp: MeshGroup) -> None:
        super().set_tp(tp)
        self.sizes = tuple(size // tp.size for size in self.sizes)
        self.num_key_heads //= tp.size
        self.num_value_heads //= tp.size

    def fusion_parts(self, at: FusionContext) -> Iterable[FusionPart]:
        yield linears_part(self, self.joint_names, at)
        kernels = use_triton(torch.empty(0, device=at.device))
        yield FusionPart("delta rule", "Triton, chunks of tokens" if kernels else "PyTorch, token by token", kernels)

    def saved_per_token(self, policy: str) -> int:
        """The inputs of the convolution, of the delta rule and of the norm, z, and out_proj's input; a, b and beta of
        each value head."""
        return 2 * sum(self.sizes) + 3 * self.sizes[2] + 3 * self.num_value_heads

    def new_state(self, rows: int, max_length: int, *, dtype: torch.dtype, device: Any, **_: Any) -> RecurrentState:
        """For one token at a time: conv_size inputs of the convolution, and the matrix of each value head in fp32."""
        conv = torch.empty(rows, self.conv_size, sum(self.sizes), dtype=dtype, device=device)
        shape = rows, 1, self.num_value_heads, self.key_head_dim, self.value_head_dim
        return RecurrentState(conv, torch.empty(shape, dtype=torch.float32, device=device))

    def forward(self, x: Tensor, batch: Batch, cache: RecurrentState | None = None) -> Tensor:
        mask, cu_seqlens = batch.token_mask, batch.cu_seqlens
        if cache is not None and not isinstance(cache, RecurrentState):
            raise InputError(
                "GatedDeltaNet keeps its state in a cache of ligermodels: make it with model.new_cache(...)"
            )
        if cache is not None and cu_seqlens is not None:
            raise InputError("packed sequences cannot go into a cache; pad them into a batch instead")
        if cu_seqlens is not None:
            cu_seqlens = cu_seqlens.to(x.device, torch.int32)
        if mask is not None and batch.cp is not None:
            mask = batch.cp.shard(mask, 1)
        if self.tp is not None:
            x = self.tp.all_gather(x, 1)
        if mask is not None:
            x = x * mask[..., None]
        qkv, z, b, a = self._projected(x)
        if batch.cp is not None:
            out = self._over_ranks(qkv, *self._gates(a, b, mask), cu_seqlens, batch.cp)
        elif cache is None:
            qkv = self.conv1d(qkv, cu_seqlens=cu_seqlens)
            out, _ = gated_delta_rule(*self._heads(qkv), *self._gates(a, b, mask), cu_seqlens=cu_seqlens)
        else:
            out = self._continue(qkv, a, b, batch, cache)
        out = self.norm(out, z.unflatten(-1, (-1, self.value_head_dim)))
        y = apply_linear(self.out_proj, out.flatten(2))
        return y if self.tp is None else self.tp.reduce_scatter(y, 1)

    def _projected(self, x: Tensor) -> Sequence[Tensor]:
        """q | k | v, z, b and a of the tokens."""
        projected = apply_linears(self.joint_modules, x)
        if not self.joined:
            return projected
        for name, module in zip(self.joint_names, self.joint_modules, strict=True):
            if type(module).__module__.startswith("peft."):
                raise InputError(
                    f"PEFT would save its adapter of {name} with the rows in the order of memory, which is another on "
                    "disk: use ligermodels.training.add_lora, whose files PEFT loads, or leave it out of target_modules"
                )
        qkvz, ba = projected
        return *qkvz.tensor_split([sum(self.sizes)], -1), *ba.chunk(2, -1)

    def _rates(self) -> tuple[Tensor, Tensor]:
        """A_log and dt_bias of this rank's value heads."""
        return local_shard(self.A_log, self.tp), local_shard(self.dt_bias, self.tp)

    def _gates(self, a: Tensor, b: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """g and beta [B, S, HV], which are 0 at padding: it neither decays nor writes."""
        g, beta = delta_gates(a, b, *self._rates())
        return (g, beta) if mask is None else (g * mask[..., None], beta * mask[..., None])

    def _over_ranks(self, qkv: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None, cp: MeshGroup) -> Tensor:
        """[B, S/n, HV, DV]. By all-to-all a rank gets all tokens of its value heads, and of the key heads they read."""
        parts, channels, first = [], [], 0
        for x, heads in zip(
            qkv.split(self.sizes, -1), (self.num_key_heads, self.num_key_heads, self.num_value_heads), strict=True
        ):
            blocks = min(cp.size, heads)  # fewer key heads than ranks: several ranks read the same one
            rows = x.shape[-1] // blocks
            begin = first + cp.rank * blocks // cp.size * rows
            channels.append(slice(begin, begin + rows))
            parts.append(x.unflatten(-1, (blocks, rows)).repeat_interleave(cp.size // blocks, 2))
            first += x.shape[-1]
        mixed = cp.to_heads(torch.cat(parts, -1)).squeeze(2)
        g, write = cp.to_heads(torch.stack([g, beta.to(g.dtype)], -1)).unbind(-1)
        mixed = self.conv1d(mixed, cu_seqlens=cu_seqlens, channels=channels)
        q_k_v = self._heads(mixed, [part.shape[-1] for part in parts])
        out, _ = gated_delta_rule(*q_k_v, g, write.to(beta.dtype), cu_seqlens=cu_seqlens)
        return cp.to_tokens(out)

    def _heads(self, qkv: Tensor, sizes: Sequence[int] | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """q, k [..., HK, DK] and v [..., HV, DV] of the joint qkv. sizes: of its parts, by default of all heads."""
        q, k, v = qkv.split(list(sizes or self.sizes), -1)
        q, k = (x.unflatten(-1, (-1, self.key_head_dim)) for x in (q, k))
        return q, k, v.unflatten(-1, (-1, self.value_head_dim))

    def _continue(self, qkv: Tensor, a: Tensor, b: Tensor, batch: Batch, cache: RecurrentState) -> Tensor:
        """The tokens after those in the cache, which then has them too; gradients reach the new tokens alone."""
        past, mask, length = batch.past_length, batch.token_mask, qkv.shape[1]
        if past == 0 and batch.next_token is None:  # the empty cache follows the first tokens, as under autocast
            cache.move(qkv)
        conv = cache.buffers[0]
        if conv.dtype != qkv.dtype or conv.device != qkv.device:
            raise InputError(
                f"the state of a GatedDeltaNet is {conv.dtype} on {conv.device}, and the new tokens are {qkv.dtype} on "
                f"{qkv.device}; was the cache made with autocast on and used with autocast off, or for another model?"
            )
        trained = (qkv, a, b, self.conv1d.weight, self.A_log, self.dt_bias)
        trains = torch.is_grad_enabled() and any(x.requires_grad for x in trained)
        if batch.next_token is not None or (mask is None and length <= cache.tokens and not trains):
            return self._step(qkv, a, b, batch, cache)
        before, state = cache.read(past)
        mixed = self.conv1d(qkv, state=before.transpose(1, 2))
        out, state = gated_delta_rule(*self._heads(mixed), *self._gates(a, b, mask), state)
        inputs = torch.cat([before, qkv.detach()], 1)
        if mask is None:
            inputs = inputs[:, length:]
        else:  # those up to the last token of each row, after which there is padding
            last = (mask * torch.arange(1, length + 1, device=mask.device)).amax(1)
            columns = last[:, None] + torch.arange(self.conv_size - 1, device=mask.device)
            inputs = inputs.gather(1, columns[..., None].expand(-1, -1, inputs.shape[2]))
        cache.write(inputs, state.detach(), past + length)
        return out

    def _step(self, qkv: Tensor, a: Tensor, b: Tensor, batch: Batch, cache: RecurrentState) -> Tensor:
        """As `gated_delta_step`. In a cache of one row the tokens [B, 1] of a captured step may follow each other."""
        token, rates, (conv, state) = batch.next_token, self._rates(), cache.buffers
        if token is None:
            ends = torch.full((len(qkv),), batch.past_length + 1, dtype=torch.int32, device=qkv.device)
        else:
            ends = token.ends[: cache.rows]
        if across := token is not None and len(qkv) != cache.rows:
            qkv, a, b = (x.transpose(0, 1) for x in (qkv, a, b))

        def step(x: Tensor, weight: Tensor) -> Tensor:
            return gated_delta_step(x, weight, a, b, *rates, conv, state, ends, rings_are_ready=token is not None)

        out = self.conv1d(qkv, step=step)
        return out.transpose(0, 1) if across else out
