"""Quantised weights and KV caches: what they cost in perplexity, and how fast matmuls of a few rows are.

    python -m benchmarks.quantized --perplexity SmolLM2-135M-Instruct.Q4_1.gguf     # a folder or file; a CPU does
    python -m benchmarks.quantized --perplexity FILE --kinds bf16 --caches auto,fp8 # the KV cache
    python -m benchmarks.quantized --rows 1,8,16,64                                 # the matmuls of an 8B

--perplexity: of the first --tokens tokens of Python's own reference (pydoc_data.topics), in windows of 1024, computed
in fp32. With a cache in fp8, every token but the first of a window reads it, as in decoding.
--rows: each matmul reads its weight from memory: as many copies as are twice the L2 cache are read in turn in one CUDA
graph; "GB/s" counts the bytes of the weight and its scales. Before that, each result is compared with fp64: a kind that
is wrong gets no figures, and the exit status is 1.

Decoding with such weights and caches is timed by benchmarks.decode.
"""

import argparse
import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import ligermodels
from benchmarks import harness
from benchmarks.harness import Record, Row
from benchmarks.kernels import milliseconds
from ligermodels.kernels.linear import _gemv as gemv, quantized

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate, up": (14336, 4096), "down": (4096, 14336)}
COPIES = 100 * 2**20
"""Bytes of weights that are read in turn: twice the L2 cache of an H200."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--perplexity", metavar="MODEL")
    parser.add_argument("--tokens", type=int, default=8192)
    kinds = harness.names("bf16", "int8", "fp8", "int4", "nf4")
    parser.add_argument("--kinds", type=kinds, default="all", help="bf16 stands for weights as they are")
    parser.add_argument("--caches", type=harness.names("auto", "fp8"), default="auto", help="of --perplexity")
    parser.add_argument("--rows", type=harness.numbers, default="", help="rows of the input of the matmuls")


def measure(options: argparse.Namespace, record: Record) -> None:
    if options.perplexity:
        model, tokens = options.perplexity, options.tokens
        record["perplexity"] = perplexities(model, tokens, options.kinds, options.caches, options.device)
    record["matmuls"], record["red"] = [], []
    for rows in options.rows:
        job = {"rows": rows, "kinds": options.kinds, "device": options.device}
        interpreted = {"TRITON_INTERPRET": "1"} if options.device == "cpu" else {}  # the kernels have no other CPU path
        found = harness.spawn("quantized", job, timeout=300.0, **interpreted)
        record["matmuls"] += found.get("matmuls", [])
        record["red"] += [*found.get("red", []), *filter(None, [found.get("note")])]


def work(job: dict[str, Any]) -> Row:
    """The matmuls of one number of rows."""
    found: Row = {"matmuls": [], "red": []}
    kinds = [kind for kind in job["kinds"] if kind in quantized.FORMATS]
    shapes = SHAPES if job["device"] == "cuda" else {name: (48, 256) for name in SHAPES}
    matmuls(kinds, job["rows"], shapes, job["device"], found)
    return found


@torch.no_grad()
def perplexities(source: str, tokens: int, kinds: Sequence[str], caches: Sequence[str], device: str) -> list[Row]:
    from pydoc_data import topics

    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    ids = torch.tensor(ligermodels.Tokenizer.from_hub(source)(text[: 8 * tokens])["input_ids"][:tokens], device=device)
    rows: list[Row] = []
    for kind in kinds:
        options = {} if kind == "bf16" else {"quantization_config": kind}
        model = ligermodels.load(source, dtype=torch.float32, device=device, progress=False, **options).eval()
        for cache in caches:
            losses = [loss(model, part, cache) for part in ids.split(1024)]
            counted = len(ids) - len(losses)
            value = (torch.stack(losses).sum() / counted).exp().item()
            first = rows[0]["perplexity"] if rows else value
            weights = "plain" if kind == "bf16" else kind
            rows.append({"weights": weights, "cache": cache, "perplexity": value, "ratio": value / first})
            harness.announce(rows[-1])
    return rows


def loss(model: Any, ids: Tensor, kv_cache_dtype: str) -> Tensor:
    """The sum of the losses of ids [N] after the first, in fp64."""
    if kv_cache_dtype == "auto":
        return model(ids[None], labels=ids[None]).loss.double() * (len(ids) - 1)
    cache = model.new_cache(1, len(ids), kv_cache_dtype=kv_cache_dtype)
    # The first call reads its own keys as they are: all calls after it read what is in the cache.
    logits = torch.cat([model(part, past_key_values=cache).logits for part in (ids[None, :1], ids[None, 1:])], 1)
    return F.cross_entropy(logits[0, :-1].double(), ids[1:], reduction="sum")


@torch.no_grad()
def matmuls(kinds: Sequence[str], number: int, shapes: dict[str, tuple[int, int]], device: str, record: Record) -> None:
    """Adds the rows of `number` rows of x. Of one row, gate, up and activation are one launch; of several, gate and up
    are one matmul."""
    for shape, (n, k) in shapes.items():
        dtype = torch.bfloat16 if device == "cuda" else torch.float32  # the interpreter has no matmul in bf16
        x, both = torch.randn(number, k, device=device, dtype=dtype), shape == "gate, up"
        glu, n = both and number == 1, n * (1 + (both and number > 1))
        plain = [torch.randn(n, k, device=device, dtype=dtype) * k**-0.5 for _ in range(2 if glu else 1)]
        row = {"matmul": shape, "rows": number}
        record["matmuls"].append({**row, "weights": "bf16", **timed(x, plain)})
        for kind in kinds:
            weights = [quantized.quantize(weight, kind) for weight in plain]
            exact = [x.double() @ w.dequantize(torch.float64).t() for w in weights]
            wanted = F.silu(exact[0]) * exact[1] if glu else exact[0]
            error = (apply(x, weights).double() - wanted).abs().max() / wanted.abs().max()
            if not error < 2**-7:
                record["red"].append(f"{kind} {shape} is off by {error:.2g} of its largest")
                continue
            record["matmuls"].append({**row, "weights": kind, **timed(x, weights)})
            harness.announce(record["matmuls"][-1])


def apply(x: Tensor, weights: Sequence[Any]) -> Tensor:
    if not isinstance(weights[0], quantized.QuantizedWeight):
        if len(x) > 1:
            return F.linear(x, weights[0])
        return gemv.gemv(x, weights[0], up=weights[1] if len(weights) > 1 else None, activation="silu")
    if len(weights) > 1:
        return quantized.quantized_glu(x, *weights, None, None, activation="silu")
    return quantized.quantized_linear(x, *weights)


def timed(x: Tensor, weights: Sequence[Any]) -> Row:
    """Time of a matmul and bytes of weights read in it, over copies that do not all fit into the cache."""
    size = sum(nbytes(weight) for weight in weights)
    copies = [[copied(weight) for weight in weights] for _ in range(-(-COPIES // size) if x.is_cuda else 1)]
    ms, _ = milliseconds([functools.partial(apply, x, one) for one in copies], x.device.type)
    return {"us": ms * 1e3, "GB/s": size / ms / 1e6}


def nbytes(weight: Any) -> int:
    return weight.nbytes if isinstance(weight, Tensor) else weight.packed.nbytes + weight.scale.nbytes


def copied(weight: Any) -> Any:
    if isinstance(weight, Tensor):
        return weight.clone()
    return type(weight)(*weight.options, *[tensor.clone() for tensor in weight.tensors])


def main(arguments: Sequence[str] | None = None) -> int:
    return harness.main(__doc__, arguments, add_options, measure, work, needs_gpu=False)


if __name__ == "__main__":
    sys.exit(main())
