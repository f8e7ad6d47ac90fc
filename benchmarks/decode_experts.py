"""The experts of a mixture in decoding, with their route: time, and how fast the chosen experts are read.

    python -m benchmarks.decode_experts --out decode-experts.json
    python -m benchmarks.decode_experts --models gpt-oss-20b --rows 1,8,64 --tiles
    python -m benchmarks.decode_experts --dry

Four layers of a model's sizes with random weights and random logits run in turn in one CUDA graph, so that no weight is
in the cache. "MB": of the experts that were chosen, weights, scales and biases. "of copy": the share of the bandwidth
of a copy at which they are read. Before that, the result of a layer is compared with fp64: a layer that is off by more
than bf16's rounding gets no figures, and the exit status is 1.

--tiles: each tile of the kernels of MXFP4 on NVIDIA GPUs, as warps of the first and of the second projection, and the
steps by which weights are loaded before they are multiplied.
"""

import argparse
import functools
import itertools
import sys
from collections.abc import Sequence
from unittest import mock

import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.harness import Record, Row
from benchmarks.kernels import ceilings, milliseconds
from benchmarks.quantized import nbytes
from benchmarks.train_cases import MODELS, changed
from ligermodels import kernels
from ligermodels.kernels.experts import _decode_mxfp4
from ligermodels.kernels.experts._decode import Tile
from ligermodels.kernels.experts.experts import experts_of, experts_reference
from ligermodels.kernels.linear.mxfp4 import quantize_mxfp4
from ligermodels.kernels.linear.operand import LinearOperand

LAYERS = 4
MIXTURES = "qwen3-30b-a3b", "gpt-oss-20b"
WARPS = 1, 2, 4


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", type=harness.names(*MIXTURES), default="all")
    parser.add_argument("--rows", type=harness.numbers, default="1,8,64")
    parser.add_argument("--tiles", action="store_true", help="of the kernels of MXFP4")


@torch.no_grad()
def measure(options: argparse.Namespace, record: Record) -> None:
    record["ceilings"] = ceilings(options.device)
    record["experts"], record["tiles"], record["red"] = [], [], []
    for name in options.models:
        for kind in ("bf16", "mxfp4") if name == "gpt-oss-20b" else ("bf16",):
            mixture = Mixture(name, kind, options.device, dry=options.dry)
            for rows in options.rows:
                row = {"model": name, "weights": kind, "rows": rows}
                error = mixture.error(rows)
                if not error < 2**-7:
                    record["red"].append(f"{name}, {kind}, {rows} rows: off by {error:.2g} of the largest element")
                    continue
                record["experts"].append(row | mixture.speed(rows, record["ceilings"]["copy TB/s"]))
                harness.announce(record["experts"][-1])
                for tiles in itertools.product(WARPS, WARPS, (1, 2)) if options.tiles and kind == "mxfp4" else ():
                    with mock.patch.object(_decode_mxfp4, "_tiles", lambda *args, tiles=tiles: of_warps(*tiles)):
                        found = mixture.speed(rows, record["ceilings"]["copy TB/s"])
                    record["tiles"].append(row | {"tiles": str(tiles), "us": found["us"]})
                    harness.announce(record["tiles"][-1])
            del mixture
            harness.free(options.device)


def of_warps(first: int, last: int, stages: int) -> tuple[Tile, Tile]:
    return Tile(8, 16, 128 * first, first, stages), Tile(8, 16, 128 * last, last, stages)


class Mixture:
    """LAYERS layers of a model's experts. kind: of their weights."""

    def __init__(self, name: str, kind: str, device: str, *, dry: bool):
        config = changed(MODELS[name].config, MODELS[name].tiny if dry else {})
        clamped = "swiglu_limit" in config
        self.count = config.get("num_local_experts") or config["num_experts"]
        self.top_k, self.hidden, self.device = config["num_experts_per_tok"], config["hidden_size"], device
        self.inner = config["intermediate_size" if clamped else "moe_intermediate_size"]
        self.activation = kernels.ClampedSwiGLU(1.702, 7.0) if clamped else "silu"
        torch.manual_seed(0)
        shapes = (2 * self.inner, self.hidden), (self.hidden, self.inner)
        self.layers = [[self.operand(*shape, kind, clamped) for shape in shapes] for _ in range(LAYERS)]

    def operand(self, n: int, k: int, kind: str, with_bias: bool) -> LinearOperand:
        weight = torch.randn(self.count, n, k, device=self.device, dtype=torch.bfloat16) * k**-0.5
        bias = torch.randn(self.count, n, device=self.device, dtype=torch.bfloat16) if with_bias else None
        return LinearOperand(quantize_mxfp4(weight) if kind == "mxfp4" else weight, bias)

    def inputs(self, rows: int) -> list[tuple[Tensor, Tensor]]:
        """x and logits of each layer."""
        torch.manual_seed(rows)
        new = functools.partial(torch.randn, device=self.device, dtype=torch.bfloat16)
        return [(new(rows, self.hidden), new(rows, self.count)) for _ in range(LAYERS)]

    def layer(self, x: Tensor, logits: Tensor, operands: Sequence[LinearOperand]) -> Tensor:
        weights, experts = kernels.route(logits, top_k=self.top_k)
        return experts_of(x, weights, experts, *operands, activation=self.activation)

    def error(self, rows: int) -> float:
        """The largest error of a layer over its largest element."""
        (x, logits), operands = self.inputs(rows)[0], self.layers[0]
        weights, experts = kernels.route(logits, top_k=self.top_k)
        exact = [
            LinearOperand(
                (w if isinstance(w, Tensor) else w.dequantize(torch.float64)).double(),
                None if b is None else b.double(),
            )
            for w, b, _ in operands
        ]
        wanted = experts_reference(x.double(), weights.double(), experts, *exact, activation=self.activation)
        return ((self.layer(x, logits, operands).double() - wanted).abs().max() / wanted.abs().max()).item()

    def speed(self, rows: int, copy: float) -> Row:
        inputs = self.inputs(rows)
        chosen = sum(len(kernels.route(logits, top_k=self.top_k)[1].unique()) for _, logits in inputs) / LAYERS
        whole = sum(nbytes(w) + (0 if b is None else b.nbytes) for w, b, _ in self.layers[0])
        calls = [functools.partial(self.layer, *of, layer) for of, layer in zip(inputs, self.layers, strict=True)]
        ms, _ = milliseconds(calls, self.device)
        read = whole * chosen / self.count
        return {
            "experts": chosen, "MB": read / 1e6, "us": ms * 1e3, "TB/s": read / ms * 1e-9,
            "of copy": read / ms * 1e-9 / copy,
        }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    return harness.main(__doc__, arguments, add_options, measure)


if __name__ == "__main__":
    sys.exit(main())
