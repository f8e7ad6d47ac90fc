"""FP8: the linear layers of Llama-3.1-8B and what quantising takes, beside bf16 and torchao, with their errors.

    python -m benchmarks.fp8 --out fp8.json
    python -m benchmarks.fp8 --tokens 4096 --baselines bf16,rowwise
    python -m benchmarks.fp8 --block      # one block, beside transformers and torchao under torch.compile
    python -m benchmarks.fp8 --gradients SmolLM2-135M-Instruct.Q4_1.gguf      # of a trained model; a CPU does
    python -m benchmarks.fp8 --dry

layers: forward, dx and dW of one layer with 16,384 tokens. "TFLOP/s" counts 6 T N K. errors of y, dx and dW: relative,
in the mean square, against fp64, with 1,024 tokens. Each of ours must have the errors that its number formats explain;
else nothing of it is timed and the exit status is 1. It is a benchmark beside kernels.py, whose rule is that an op is
as exact as the eager one of its dtype.
block: in place of these, a Llama-3.1-8B of one block without its head, forward and backward of rows of 4,096 tokens:
ours, and transformers' under torch.compile. "error / bf16's": of y and dx against transformers in fp32, over that of
transformers in bf16, the larger of the two; it may be BF16_FACTOR times as large in bf16 and FP8_FACTOR in FP8. "of
bf16": how many times as fast as the same side in bf16.
quantising: each kernel over activations, dy and weights. "TB/s" counts the bytes that have to move.
gradients: in place of these, the gradients of a trained model on the first tokens of Python's own reference
(pydoc_data.topics): the cosine of each weight's with that in fp32, smallest and mean over weights.
torchao, where it is installed: its float8 training, under torch.compile.
"""

import argparse
import dataclasses
import importlib
import importlib.util
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import ligermodels
from benchmarks import harness
from benchmarks.harness import Record
from benchmarks.kernels import milliseconds
from benchmarks.train_cases import MODELS, changed, theirs
from benchmarks.train_step import FP8_FACTOR
from ligermodels.kernels.linear._fp8_quantize import (
    quantize_both,
    quantize_rows,
    quantize_transposed,
    tensor_scale,
    transposed,
)
from ligermodels.layers.fp8 import RECIPES, FP8Linear

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate, up": (28672, 4096), "down": (4096, 14336)}
"""N and K."""
PEERS = ("bf16", "torchao rowwise", "torchao tensorwise", "torchao rowwise_with_gw_hp")
BASELINES = (*PEERS, *RECIPES)
LENGTH, BF16_FACTOR = 4096, 1.25
CHECKED = 1024
"""Tokens of the comparison with fp64."""
ROUNDINGS = {"e4m3": 0.0275, "e5m2": 0.055, "bf16": 0.0017}
"""Relative rms errors of numbers of a format: 2^-4, 2^-3 and 2^-9 at most, and 0.42 of that in the mean square."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--baselines", type=harness.names(*BASELINES), default="all")
    parser.add_argument("--block", action="store_true", help="one block in place of its linear layers")
    parser.add_argument("--gradients", metavar="MODEL", help="a folder, repository or GGUF file")


def measure(options: argparse.Namespace, record: Record) -> None:
    if options.gradients:
        record["gradients"] = cosines(options.gradients, options.baselines, options.device)
        return
    if options.device == "cpu" and not options.dry:
        raise ValueError("needs a CUDA device, but for --gradients; --dry runs tiny layers on the CPU")
    if options.block:
        record["red"], record["block"] = [], []
        blocks(options, record)
        return
    device, tokens = options.device, 96 if options.dry else options.tokens
    shapes = dict.fromkeys(SHAPES, (96, 64)) if options.dry else SHAPES
    record["layers"], record["quantising"], record["red"] = [], [], []
    for shape, (n, k) in shapes.items():
        weight = torch.randn(n, k, device=device, dtype=torch.bfloat16) * k**-0.5
        for name in options.baselines:
            if name.startswith("torchao") and (options.dry or importlib.util.find_spec("torchao") is None):
                continue
            layer = layer_of(name, weight)
            found = errors(layer, min(tokens, CHECKED))
            row: dict[str, Any] = {"layer": shape, "baseline": name, **found}
            if name in RECIPES and (wrong := unexplained(name, found)):
                record["red"].append(f"{shape}, {name}: {wrong}")
                record["layers"].append({**row, "note": wrong})
                continue
            ms, _ = milliseconds([step(layer, tokens)], device)
            record["layers"].append({**row, "ms": ms, "TFLOP/s": 6e-9 * tokens * n * k / ms})
            harness.announce(record["layers"][-1])
            del layer
            torch.compiler.reset()
            harness.free(device)
        record["quantising"] += quantising(shape, torch.randn(tokens, k, device=device, dtype=torch.bfloat16))
    record["quantising"] += quantising(
        "gate, up: dy", torch.randn(tokens, shapes["gate, up"][0], device=device).bfloat16()
    )


def blocks(options: argparse.Namespace, record: Record) -> None:
    """A row of ours, and of transformers under torch.compile, for each baseline that the side has."""
    device, model = options.device, MODELS["llama-3.1-8b"]
    config = changed(model.config, {**(model.tiny if options.dry else {}), "num_hidden_layers": 1})
    rows, length = (2, 48) if options.dry else (max(1, options.tokens // LENGTH), LENGTH)
    weights = theirs("llama-3.1-8b", device, torch.float32, config).model.state_dict()
    draw = torch.Generator(device).manual_seed(0)
    x, dy = (
        torch.randn(rows, length, config["hidden_size"], generator=draw, device=device).bfloat16() for _ in range(2)
    )

    def peer(name: str, dtype: torch.dtype) -> Any:
        made = theirs("llama-3.1-8b", device, dtype, config).model.train()
        made.load_state_dict(weights)
        if name.startswith("torchao "):
            to_torchao(made.layers, name)
        if device == "cuda" and dtype == torch.bfloat16:
            made.compile(dynamic=False)
        return made

    def ours(name: str) -> Any:
        made = ligermodels.ARCHS["llama"].from_config(config, dtype=torch.bfloat16, device=device).train()
        made.model.load_state_dict(weights)
        if name in RECIPES:
            made.use_fp8(name)
        return made.model

    def of_block(block: Any, dtype: torch.dtype = torch.bfloat16) -> tuple[Callable[[], None], list[Tensor]]:
        """(a forward and a backward, their results)."""
        embeds, results = x.to(dtype).requires_grad_(), list[Tensor]()

        def run() -> None:
            embeds.grad = None
            block.zero_grad(set_to_none=True)
            y = block(inputs_embeds=embeds, use_cache=False).last_hidden_state
            y.backward(dy.to(dtype))
            results[:] = [y.detach(), embeds.grad]  # type: ignore[list-item]

        run()
        return run, results

    exact = [result.double() for result in of_block(peer("", torch.float32), torch.float32)[1]]
    fastest: dict[str, float] = {}
    of_bf16: list[float] = []
    for side, names in (("transformers", PEERS), ("ligermodels", ("bf16", *RECIPES))):
        for name in (name for name in names if name in options.baselines):
            if name.startswith("torchao") and (options.dry or importlib.util.find_spec("torchao") is None):
                continue
            run, results = of_block(peer(name, torch.bfloat16) if side == "transformers" else ours(name))
            errors = [
                ((result.double() - right).norm() / right.norm()).item()
                for result, right in zip(results, exact, strict=True)
            ]
            of_bf16 = of_bf16 or errors
            error = max(one / other for one, other in zip(errors, of_bf16, strict=True))
            row: dict[str, Any] = {"side": side, "baseline": name, "error / bf16's": error}
            if not error <= (BF16_FACTOR if name == "bf16" else FP8_FACTOR):
                row["note"] = f"errs by {error:.2f} times what transformers in bf16 does"
                record["red"] += [f"{name}: {row['note']}"] if side == "ligermodels" else []
            else:
                row["ms"], _ = milliseconds([run], device)
                row["of bf16"] = fastest.setdefault(side, row["ms"]) / row["ms"]
            record["block"].append(row)
            harness.announce(row)
            del run
            torch.compiler.reset()
            harness.free(device)


def to_torchao(layers: nn.Module, name: str, **changes: Any) -> None:
    """torchao's float8 training of the linear modules in `layers`, by the recipe in the name of a baseline."""
    float8 = importlib.import_module("torchao.float8")
    config = float8.Float8LinearConfig.from_recipe_name(name.removeprefix("torchao "))
    float8.convert_to_float8_training(layers, config=dataclasses.replace(config, **changes))


def layer_of(name: str, weight: Tensor) -> Any:
    """The layer of a baseline, with this weight."""
    n, k = weight.shape
    linear = nn.Linear(k, n, bias=False, device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        linear.weight.copy_(weight)
    if name in RECIPES:
        return FP8Linear.from_linear(linear, RECIPES[name])
    if name.startswith("torchao "):
        layers = nn.Sequential(linear)
        to_torchao(layers, name)
        return torch.compile(layers, dynamic=False)
    return linear


def step(layer: Any, tokens: int) -> Callable[[], None]:
    """A forward and a backward of the layer."""
    weight = next(layer.parameters())
    x = torch.randn(tokens, weight.shape[1], device=weight.device, dtype=weight.dtype, requires_grad=True)
    dy = torch.randn(tokens, weight.shape[0], device=weight.device, dtype=weight.dtype)

    def run() -> None:
        weight.grad = x.grad = None
        layer(x).backward(dy)

    return run


def errors(layer: Any, tokens: int) -> dict[str, float]:
    """The relative errors of y, dx and dW."""
    weight = next(layer.parameters())
    torch.manual_seed(0)
    x = torch.randn(tokens, weight.shape[1], device=weight.device).bfloat16().requires_grad_()
    dy = torch.randn(tokens, weight.shape[0], device=weight.device).bfloat16()
    y = layer(x)
    y.backward(dy)
    of_x, of_dy, of_w = (t.detach().double() for t in (x, dy, weight))
    exact = {"y": of_x @ of_w.t(), "dx": of_dy @ of_w, "dW": of_dy.t() @ of_x}
    found = {"y": y, "dx": x.grad, "dW": weight.grad}
    weight.grad = None
    return {
        f"error of {name}": ((found[name].double() - e).norm() / e.norm()).item()  # type: ignore[union-attr]
        for name, e in exact.items()
    }


def unexplained(name: str, found: dict[str, float]) -> str:
    """The error of ours that is larger than its formats explain, or ""."""
    recipe = RECIPES[name]
    for product, what in (("forward", "y"), ("dx", "dx"), ("dw", "dW")):
        other = "e4m3" if what == "y" else recipe.grad_dtype
        bound = (ROUNDINGS["e4m3"] ** 2 + ROUNDINGS[other] ** 2) ** 0.5
        bound = 1.1 * (bound if getattr(recipe, product) == "fp8" else 2 * ROUNDINGS["bf16"])
        if not found[f"error of {what}"] <= bound:
            return f"the error of {what} is {found[f'error of {what}']:.4f}, more than {bound:.4f}"
    return ""


def quantising(what: str, x: Tensor) -> list[dict[str, Any]]:
    q, scale = quantize_rows(x)[0], tensor_scale([x], "e4m3", False)
    calls: Sequence[tuple[str, int, Callable[[], Any]]] = (
        ("by rows", 3, lambda: quantize_rows(x)),
        ("transposed, by columns", 3, lambda: quantize_transposed(x)),
        ("scale of the tensor", 2, lambda: tensor_scale([x], "e4m3", False)),
        ("by one scale", 3, lambda: quantize_rows(x, scale=scale)),
        ("transposed, by one scale", 3, lambda: quantize_transposed(x, scale=scale)),
        ("both", 4, lambda: quantize_both(x)),
        ("both, by one scale", 4, lambda: quantize_both(x, scale=scale)),
        ("FP8 transposed", 2, lambda: transposed(q)),
    )
    rows = []
    for name, size, call in calls:
        ms, _ = milliseconds([call], x.device.type)
        rows.append({"input": what, "shape": f"{len(x):,} x {x.shape[1]:,}", "kernel": name, "ms": ms,
                     "TB/s": size * x.numel() / ms / 1e9})  # fmt: skip
        harness.announce(rows[-1])
    return rows


def cosines(source: str, names: Sequence[str], device: str) -> list[dict[str, Any]]:
    """Of each baseline: how far its loss is from that in fp32, and the smallest and the mean cosine of the gradients of
    linear layers and of norms. torchao's products are emulated on the CPU."""
    from pydoc_data import topics

    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    ids = torch.tensor(ligermodels.Tokenizer.from_hub(source)(text[:8192])["input_ids"][:512], device=device)
    rows = ids.view(2, -1)

    def gradients(name: str, dtype: torch.dtype = torch.bfloat16) -> tuple[float, dict[str, Tensor]]:
        recipe = name if name in RECIPES else None
        model = ligermodels.load(source, dtype=dtype, device=device, fp8=recipe, progress=False).train()
        if name.startswith("torchao "):
            to_torchao(model.decoder.layers, name, emulate=device == "cpu")
        loss = model(rows, labels=rows).loss
        loss.backward()
        return loss.item(), {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}

    loss, exact = gradients("", torch.float32)
    table: list[dict[str, Any]] = []
    for name in names:
        if name.startswith("torchao") and importlib.util.find_spec("torchao") is None:
            continue
        low, grads = gradients(name)
        row: dict[str, Any] = {"baseline": name, "loss - fp32's": low - loss}
        for kind, part in (("linear layers", "_proj."), ("norms", "layernorm.")):
            values = [
                torch.cosine_similarity(grad.flatten(), exact[weight].flatten(), 0).item()
                for weight, grad in grads.items()
                if part in weight
            ]
            row |= {f"{kind}: smallest": min(values), f"{kind}: mean": statistics.fmean(values)}
        table.append(row)
        harness.announce(row)
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    return harness.main(__doc__, arguments, add_options, measure, needs_gpu=False)


if __name__ == "__main__":
    sys.exit(main())
