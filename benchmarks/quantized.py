"""int8, fp8 and int4 weights and fp8 KV caches: what they cost in perplexity, and weights buy in tokens per second.

    python -m benchmarks.quantized --perplexity SmolLM2-135M-Instruct.Q4_1.gguf     # a folder or file; a CPU does
    python -m benchmarks.quantized --perplexity FILE --kinds bf16 --caches auto,fp8 # the KV cache
    python -m benchmarks.quantized --kernels --rows 1,8,16,64                       # products of the 8B, all tiles
    python -m benchmarks.quantized --decode llama-3.1-8b --kinds bf16,int8,fp8,int4 # greedy, prompt 128, 256 new
    python -m benchmarks.quantized --decode llama-3.1-8b --dry                      # a tiny model, also on a CPU

--perplexity: of the first --tokens of Python's own reference (pydoc_data.topics), in windows of 1024, computed in fp32.
With a cache in fp8, every token but the first of a window reads it, as in decoding.
--kernels: each product reads its weight from memory, as many copies as are twice the L2 cache are read in turn in one
CUDA graph; "GB/s" counts the bytes of the weight and its scales. For each shape the tiles are printed, the best first;
"(default)" is the one that the library takes. Before that, each result is compared with fp64. torchao's rows are its
weight-only int8 and int4, where it is installed.
--decode: weights are random, of the config's sizes, and are quantised on the device.
"""

import argparse
import gc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ligermodels
from benchmarks import decode
from benchmarks.common import environment, heading, table, write_json
from ligermodels.checkpoint import quantization
from ligermodels.generation import release_graphs
from ligermodels.kernels import one_row, quantized

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate, up": (14336, 4096), "down": (4096, 14336)}
TILES = {
    "int4": [(bn, 128 * warps, warps) for warps in (1, 2, 4) for bn in (4, 8, 16)],
    "int8": [(2, 512, 1, 4), (4, 512, 1, 4), (2, 1024, 2, 3), (4, 1024, 2, 3), (8, 1024, 2, 3), (4, 2048, 4, 1)],
    "bf16": [(2, 512, 1, 4), (2, 1024, 4, 1), (2, 1024, 2, 3), (4, 1024, 2, 3), (4, 1024, 4, 3), (4, 2048, 4, 1)],
}
TILES["fp8"] = TILES["int8"]
TILES_OF_ROWS = [
    (16, 4, 4, 3), (32, 4, 4, 2), (32, 4, 4, 3), (32, 8, 8, 2), (32, 1, 2, 3), (64, 1, 4, 3), (64, 1, 4, 5),
    (128, 1, 4, 3),
]  # fmt: skip
COPIES = 100 * 2**20
"""Bytes of weights that are read in turn: twice the L2 cache of an H200."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--perplexity", metavar="MODEL")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--rows", default="1", help="with --kernels: of x, such as 1,8,16,64")
    parser.add_argument("--decode", metavar="NAME", help="a model of benchmarks.decode")
    parser.add_argument("--kinds", default="bf16,int8,fp8,int4,nf4", help="bf16 stands for weights as they are")
    parser.add_argument("--caches", default="auto", help="with --perplexity: of auto, fp8")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--dry", action="store_true", help="with --decode: a tiny model, few tokens, fp32")
    parser.add_argument("--out", help="a JSON file for the figures")
    options = parser.parse_args(arguments)
    device, kinds = "cuda" if torch.cuda.is_available() else "cpu", options.kinds.split(",")
    env, found = environment(device), {}
    print(heading(env))
    if options.perplexity:
        found["perplexity"] = perplexities(options.perplexity, options.tokens, kinds, options.caches.split(","), device)
    if options.kernels:
        found["kernels"] = []
        for rows in map(int, options.rows.split(",")):
            found["kernels"] += products([kind for kind in kinds if kind in quantized.FORMATS], rows)
    if options.decode:
        with decode.on(device):
            batches = [int(batch) for batch in options.batches.split(",")]
            found["decode"] = speeds(options.decode, kinds, batches, device, options.dry)
    for name, rows in found.items():
        print(f"\n{name}\n{table(list(rows[0]), [list(row.values()) for row in rows])}")
    if options.out:
        write_json(options.out, {"environment": env, **found})
    return 0


@torch.no_grad()
def perplexities(
    source: str, tokens: int, kinds: Sequence[str], caches: Sequence[str], device: str
) -> list[dict[str, Any]]:
    from pydoc_data import topics

    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    ids = torch.tensor(ligermodels.Tokenizer.from_hub(source)(text[: 8 * tokens])["input_ids"][:tokens], device=device)
    rows: list[dict[str, Any]] = []
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
            print(rows[-1], flush=True)
    return rows


def loss(model: Any, ids: Tensor, kv_cache_dtype: str) -> Tensor:
    """The sum of ids [N] after the first, in fp64."""
    if kv_cache_dtype == "auto":
        return model(ids[None], labels=ids[None]).loss.double() * (len(ids) - 1)
    cache = model.new_cache(1, len(ids), kv_cache_dtype=kv_cache_dtype)
    # The first call would read its own keys as they are: all calls after it read what the cache holds.
    logits = torch.cat([model(part, past_key_values=cache).logits for part in (ids[None, :1], ids[None, 1:])], 1)
    return F.cross_entropy(logits[0, :-1].double(), ids[1:], reduction="sum")


@torch.no_grad()
def products(kinds: Sequence[str], number: int) -> list[dict[str, Any]]:
    """Of x with so many rows. Of one, gate and up have the activation in the same launch; of several, they are one."""
    rows = []
    for shape, (n, k) in SHAPES.items():
        x, both = torch.randn(number, k, device="cuda").bfloat16(), shape == "gate, up"
        glu, n = both and number == 1, n * (1 + (both and number > 1))
        plain = [torch.randn(n, k, device="cuda").bfloat16() * k**-0.5 for _ in range(2 * glu or 1)]
        rows.append({"product": shape, "rows": number, "weights": "bf16", **timed(x, plain, "bf16")})
        for kind in kinds:
            weights = [quantized.quantize(weight, kind) for weight in plain]
            wide = [x.double() @ w.dequantize(torch.float64).t() for w in weights]
            wanted = F.silu(wide[0]) * wide[1] if glu else wide[0]
            error = (apply(x, weights).double() - wanted).abs().max() / wanted.abs().max()
            if not error < 2**-7:
                raise SystemExit(f"RED: {kind} {shape} is off by {error:.2g} of its largest")
            rows.append({"product": shape, "rows": number, "weights": kind, **timed(x, weights, kind)})
        rows += of_torchao(x, plain[0], shape)
        for row in rows[-1 - len(kinds) :]:
            print(row, flush=True)
    return rows


def apply(x: Tensor, weights: Sequence[Any]) -> Tensor:
    if not isinstance(weights[0], quantized.QuantizedWeight):
        if len(x) > 1:
            return F.linear(x, weights[0])
        glu = len(weights) > 1
        return one_row.one_row_glu(x, *weights, activation="silu") if glu else one_row.one_row_linear(x, weights[0])
    if len(weights) > 1:
        return quantized.quantized_glu(x, *weights, None, None, activation="silu")
    return quantized.quantized_linear(x, weights, [None])


def timed(x: Tensor, weights: Sequence[Any], kind: str) -> dict[str, Any]:
    """The time of the best of all tiles, of the default one, and the three best."""
    size = sum(w.nbytes if isinstance(w, Tensor) else w.packed.nbytes + w.scale.nbytes for w in weights)
    copies = [[copied(w) for w in weights] for _ in range(-(-COPIES // size))]

    def run() -> None:
        for one in copies:
            apply(x, one)

    default = graphed(run) / len(copies)
    found = [(default, "(default)")]
    glu, several = len(weights) > 1, len(x) > 1
    module = quantized if several or kind == "int4" else one_row
    name = "_rows_tile" if several else "_glu_tile" if glu and kind != "int4" else "_tile"
    before = getattr(module, name)
    for tile in TILES[kind] if not several else () if kind == "bf16" else TILES_OF_ROWS:
        setattr(module, name, lambda *_, tile=tile: tile)
        try:
            found.append((graphed(run) / len(copies), str(tile)))
        except Exception as error:  # more registers or shared memory than there are
            print(f"{kind} {tile}: {type(error).__name__}: {error}")
        finally:
            setattr(module, name, before)
    found.sort()
    best = "; ".join(f"{tile} {seconds * 1e6:.1f}" for seconds, tile in found[:4])
    return {"us": default * 1e6, "GB/s": size / default / 1e9, "best GB/s": size / found[0][0] / 1e9, "tiles": best}


def copied(weight: Any) -> Any:
    if isinstance(weight, Tensor):
        return weight.clone()
    tensors, options = weight.apart()
    return type(weight).of([tensor.clone() for tensor in tensors], options)


def graphed(run: Callable[[], Any], replays: int = 20) -> float:
    """Seconds of one run, as a CUDA graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / replays


def of_torchao(x: Tensor, weight: Tensor, shape: str) -> list[dict[str, Any]]:
    """Its weight-only products of the first weight alone."""
    if importlib.util.find_spec("torchao") is None:
        return []
    from torchao import quantization as theirs

    rows = []
    for kind in ("Int8WeightOnlyConfig", "Int4WeightOnlyConfig"):
        try:
            layer = nn.Sequential(nn.Linear(*weight.shape[::-1], bias=False, device="cuda", dtype=weight.dtype))
            layer[0].weight = nn.Parameter(weight.clone())
            copies = [layer]
            theirs.quantize_(layer, getattr(theirs, kind)())
            size = weight.numel() // (2 if "4" in kind else 1)
            for _ in range(-(-COPIES // size) - 1):
                other = nn.Sequential(nn.Linear(*weight.shape[::-1], bias=False, device="cuda", dtype=weight.dtype))
                theirs.quantize_(other, getattr(theirs, kind)())
                copies.append(other)
            seconds = graphed(lambda copies=copies: [one(x) for one in copies]) / len(copies)
            row = {"us": seconds * 1e6, "GB/s": size / seconds / 1e9, "best GB/s": None, "tiles": ""}
            rows.append({"product": shape, "rows": len(x), "weights": f"torchao {kind}", **row})
        except Exception as error:  # a kernel library of its own that is not installed
            print(f"torchao {kind}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    return rows


def speeds(name: str, kinds: Sequence[str], batches: Sequence[int], device: str, dry: bool) -> list[dict[str, Any]]:
    rows = []
    for kind in kinds:
        model = decode.make(name, device, torch.float32 if dry else torch.bfloat16, tiny=dry)
        if kind != "bf16":
            quantize(model, kind, torch.device(device))
        size = sum(p.nbytes for p in (*model.parameters(), *model.buffers()))
        if not model.config.tie_word_embeddings:
            size -= model.decoder.embed_tokens.weight.nbytes
        for batch in batches:
            prompt, new = (16, 8) if dry else (128, 256)
            ids = torch.randint(3, model.config.vocab_size, (batch, prompt), device=device)
            decode.run(model, ids, new, captured=True)
            first, speed = decode.run(model, ids, new, captured=True)
            limit = decode.BANDWIDTH * batch / size
            rows.append({
                "model": name, "weights": kind, "batch": batch, "GB": size / 1e9, "first token ms": first * 1e3,
                "tokens/s": speed, "of limit": speed / limit,
            })  # fmt: skip
            print(rows[-1], flush=True)
        release_graphs(model)
        del model
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    return rows


def quantize(model: Any, kind: str, device: torch.device) -> None:
    """What `load(..., quantization_config=kind)` makes of a checkpoint with these weights."""
    quantizer = quantization.quantizer_of(kind)
    for name, linear in quantization.linears(model, quantizer).items():
        bias = None if linear.bias is None else linear.bias.detach()
        model.set_submodule(name, quantizer.convert(linear, linear.weight.detach(), bias, device))
    quantizer.finish(model)
    quantization.mark(model, quantizer)


if __name__ == "__main__":
    sys.exit(main())
