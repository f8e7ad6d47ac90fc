"""Tokens per second of greedy decoding, beside what the bytes allow, and the time to the first token, beside that of
its products: ours as a CUDA graph and from the host, and transformers.

    python -m benchmarks.decode --out benchmarks/results/decode.json
    python -m benchmarks.decode --models llama-3.1-8b --cases 1x128+256 --trace    # the kernels of one step
    python -m benchmarks.decode --baselines captured,hf,hf-static                  # beside transformers, which compiles
    python -m benchmarks.decode --cases 1x32768+64,8x8192+64 --baselines captured,captured-fp8    # the cache in fp8
    python -m benchmarks.decode --cases "" --first-token 4096 --baselines captured,host,hf    # first tokens alone
    python -m benchmarks.decode --dry                                              # tiny models, also on a CPU
    python -m benchmarks.decode --render benchmarks/results/decode-h200.json       # the tables of an earlier run

A case is BATCHxPROMPT+NEW. Weights are random, of the config's sizes, and stay on the GPU. Each row runs twice and the
second run counts: "first token" is the prompt's time, "tokens/s" that of all tokens after the first, of all rows
together; every token is read by the host, which looks for a stop id. "of limit" is the share of the tokens/s at which
the weights, and the keys and values of the mean length, would be read at BANDWIDTH, that of a copy on an H200.

Before any figure the captured ids of a shallow model in fp32, rows padded to different lengths, must be those without a
graph. In bf16 two ids may be equally likely to within its rounding, so there the host reads what the graph wrote, for
200 prompts, and each id must be the host's choice after those before it, or tie with it, which is counted. Else the
exit status is 1.

--first-token: prompts of one row and so many tokens; the median of ten calls. "host" and "hf" are `generate` with
max_new_tokens=1, from the call to its return; "captured" is the first of several tokens of `generate_iter`, behind
which the graph's step is under way. "products" are the matrix products of that prompt alone, by cuBLAS: in each block
q, k and v as one, the output, gate and up as one, and down, and the head of the last token; "attention" are the
attentions alone. All take turns in one process. Before any figure the first ids of a shallow model in fp32 must be
those of one forward pass, and transformers' with the same weights must be too.
"""

import argparse
import contextlib
import copy
import gc
import itertools
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import ligermodels
from benchmarks.common import environment, heading, table, write_json
from benchmarks.train_cases import MODELS, changed
from ligermodels.checkpoint.weights import export
from ligermodels.generation import generate_iter, graph, release_graphs
from ligermodels.kernels.attention import attention
from ligermodels.layers import Attention
from ligermodels.layers.linear import JointProjections

BANDWIDTH = 4.27e12
CASES = "1x128+256,8x128+256,64x128+256,1x32768+64"
COLUMNS = (
    "model",
    "case",
    "baseline",
    "first call s",
    "first token ms",
    "tokens/s",
    "limit",
    "of limit",
)
FIRST_COLUMNS = (
    "model",
    "prompt",
    "baseline",
    "first token ms",
    "products ms",
    "attention ms",
    "of products",
)
CACHES = {"captured": "auto", "captured-fp8": "fp8", "host": "auto"}
"""Our baselines, and what their keys and values are held in."""
BATCHES = 8, 64, 64, 64
TIE = 8
"""By how much the logits of two ids that tie may differ, in errors of a logit in bf16: the rms difference of a row's
from those in fp32. Two logits in two ways of rounding err by 2 together, and 4 times that is once in 10,000."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="llama-3.2-1b,llama-3.1-8b")
    parser.add_argument("--cases", default=CASES, help="comma-separated; empty: none")
    parser.add_argument("--first-token", default="", metavar="TOKENS", help="comma-separated lengths of prompts")
    parser.add_argument("--baselines", default="captured,host", help="of captured, captured-fp8, host, hf, hf-static")
    parser.add_argument("--trace", action="store_true", help="print the kernels of a captured step of each case")
    parser.add_argument("--dry", action="store_true", help="tiny models, few tokens, fp32")
    parser.add_argument("--out", help="a JSON file for the figures")
    parser.add_argument("--render", metavar="FILE.json", help="print an earlier result instead of measuring")
    options = parser.parse_args(arguments)
    if options.render:
        print(render(json.loads(Path(options.render).read_text())))
        return 0
    for baseline in options.baselines.split(","):
        if baseline not in (*CACHES, "hf", "hf-static") or (options.first_token and baseline == "captured-fp8"):
            parser.error(f"--baselines: {baseline!r} is unknown{' to --first-token' if baseline in CACHES else ''}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names, baselines = options.models.split(","), options.baselines.split(",")
    cases = [tuple(map(int, re.split(r"[x+]", case))) for case in options.cases.split(",") if case]
    lengths = [int(length) for length in options.first_token.split(",") if length]
    env = environment(device)
    print(heading(env), flush=True)
    rows: list[dict[str, Any]] = []
    ids: list[dict[str, Any]] = []
    first: list[dict[str, Any]] = []
    with on(device):
        if cases and (red := [name for name in names if not same_ids(name, device, baselines)]):
            print(f"RED: with a graph {', '.join(red)} writes other ids")
            return 1
        for name in names if lengths else ():
            try:
                first += first_tokens(name, lengths, baselines, device, dry=options.dry)
            except DifferentIds as error:
                print(f"RED: {error}")
                return 1
            gc.collect()
        for name in names if cases else ():
            model = make(name, device, torch.float32 if options.dry else torch.bfloat16, tiny=options.dry)
            ids.append({"model": name, **choices(model, (2, 3) if options.dry else BATCHES)})
            print(ids[-1], flush=True)
            rows += measured(name, model, cases, baselines, dry=options.dry, trace=options.trace)
            del model
            gc.collect()
            for baseline in baselines:
                if baseline.startswith("hf"):
                    rows += of_transformers(name, cases, device, static=baseline == "hf-static", dry=options.dry)
    record = {"environment": env, "rows": rows, "ids": ids, "first token": first}
    print("\n" + tables(record))
    if options.out:
        write_json(options.out, record)
    if red := [found["model"] for found in ids if found["wrong"]]:
        print(f"RED: with a graph {', '.join(red)} writes ids that the host finds less likely")
        return 1
    return 0


def render(record: Mapping[str, Any]) -> str:
    return f"{heading(record['environment'])}\n{tables(record)}"


def tables(record: Mapping[str, Any]) -> str:
    found = ((COLUMNS, record["rows"]), (FIRST_COLUMNS, record.get("first token")))
    return "\n\n".join(
        table(columns, [[row.get(column) for column in columns] for row in rows]) for columns, rows in found if rows
    )


@contextlib.contextmanager
def on(device: str) -> Iterator[None]:
    """On a CPU the same steps run, without a graph."""
    before = set(graph.DEVICES)
    graph.DEVICES.add(device)
    try:
        yield
    finally:
        graph.DEVICES.intersection_update(before)


def make(name: str, device: str, dtype: torch.dtype, *, tiny: bool = False, **changes: Any) -> Any:
    model = MODELS[name]
    config = changed(model.config, {**(model.tiny if tiny else {}), **changes})
    torch.manual_seed(0)
    model = ligermodels.ARCHS[config["model_type"]].from_config(config, dtype=dtype, device=device).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # larger than they are drawn, so that the text varies
            if parameter.dim() > 1:
                parameter.mul_(3)
    return model


def same_ids(name: str, device: str, baselines: Sequence[str] = ()) -> bool:
    """Whether a shallow model in fp32 writes the same with a graph and without, for one row and for several."""
    kinds = sorted({"auto", *(CACHES[baseline] for baseline in baselines if baseline in CACHES)})
    model = make(name, device, torch.float32, tiny=device == "cpu", **MODELS[name].shallow)
    vocabulary = model.config.vocab_size
    same = True
    for lengths, kind in itertools.product(([40], [60, 33, 1, 7, 60, 12, 59, 20]), kinds):
        width = max(lengths)
        ids = torch.randint(3, vocabulary, (len(lengths), width), device=device)
        mask = torch.arange(width, device=device) >= width - torch.tensor(lengths, device=device)[:, None]
        options = dict(attention_mask=mask, max_new_tokens=80, do_sample=False, eos_token_id=(), kv_cache_dtype=kind)
        found = [model.generate(ids, disable_compile=off, **options) for off in (False, True)]
        same &= torch.equal(*found)
    release_graphs(model)
    return same


def choices(model: Any, batches: Sequence[int], new: int = 32) -> dict[str, Any]:
    """How many of the ids that a graph writes are the host's choice after the same text, tie with it, or are wrong.

    And how much likelier the host's choice is than what was written, at most, in the unit of TIE.
    """
    device, vocabulary = model.device, model.config.vocab_size
    exact = copy.deepcopy(model).to(torch.float64 if model.dtype == torch.float32 else torch.float32)
    counts, most = torch.zeros(3, dtype=torch.int64, device=device), torch.zeros((), device=device)
    generator = torch.Generator(device).manual_seed(0)
    for rows in batches:
        ids = torch.randint(3, vocabulary, (rows, 64), device=device, generator=generator)
        lengths = torch.randint(1, 65, (rows, 1), device=device, generator=generator)
        options = dict(
            attention_mask=torch.arange(64, device=device) >= 64 - lengths, max_new_tokens=new, do_sample=False,
            eos_token_id=(),
        )  # fmt: skip
        written = model.generate(ids, **options)

        def follow(text: torch.Tensor, logits: torch.Tensor, written: torch.Tensor = written) -> torch.Tensor:
            return torch.full_like(logits, -torch.inf).scatter_(1, written[:, text.shape[1], None], 0.0)

        host, precise = (
            it.generate(
                ids, logits_processor=follow, disable_compile=True, output_logits=True, return_dict_in_generate=True,
                **options,
            ).logits
            for it in (model, exact)
        )  # fmt: skip
        for id, logits, theirs in zip(written[:, 64:].split(1, 1), host, precise, strict=True):
            best, choice = logits.max(-1, keepdim=True)
            rounding = (logits - theirs).square().mean(-1, keepdim=True).sqrt()
            same, apart = id == choice, (best - logits.gather(1, id)) / rounding
            tie = apart <= TIE
            counts += torch.cat([same, tie & ~same, ~(tie | same)], 1).sum(0)
            most = torch.maximum(most, apart.max())
    release_graphs(model)
    return {**dict(zip(("the host's", "ties", "wrong"), counts.tolist(), strict=True)), "apart": most.item()}


def measured(
    name: str, model: Any, cases: Sequence[tuple[int, ...]], baselines: Sequence[str], *, dry: bool, trace: bool
) -> list[dict[str, Any]]:
    dtype, device = model.dtype, model.device.type
    config, rows = model.config, []
    weights = sum(p.nbytes for p in model.parameters())
    if not config.tie_word_embeddings:
        weights -= model.decoder.embed_tokens.weight.nbytes  # of which a row is read
    heads = 2 * config.num_hidden_layers * config.num_key_value_heads
    for batch, prompt, new in cases:
        if dry:
            batch, prompt, new = min(batch, 2), min(prompt, 16), min(new, 8)
        ids = torch.randint(3, config.vocab_size, (batch, prompt), device=device)
        for baseline in baselines:
            if baseline.startswith("hf"):
                continue
            captured, kind = baseline != "host", CACHES[baseline]
            per_token = heads * (config.head_dim + 2 if kind == "fp8" else config.head_dim * dtype.itemsize)
            limit = BANDWIDTH * batch / (weights + batch * (prompt + new / 2) * per_token)
            # Twice as many tokens take the host twice as long, and are as fast.
            steps = new if captured else min(new, 64)
            runs = [run(model, ids, steps, captured=captured, kv_cache_dtype=kind) for _ in range(2)]
            speed = runs[1][1]
            row = {
                "model": name, "case": f"{batch}x{prompt}+{steps}", "baseline": baseline,
                "first call s": runs[0][0] - runs[1][0], "first token ms": runs[1][0] * 1e3, "tokens/s": speed,
                "limit": limit, "of limit": speed / limit,
            }  # fmt: skip
            if baseline == "captured" and trace and device == "cuda":
                print_kernels(model, ids, new, f"{name} {row['case']}")
            rows.append(row)
            print({key: f"{x:.4g}" if isinstance(x, float) else x for key, x in row.items()}, flush=True)
    release_graphs(model)
    return rows


def run(
    model: Any, ids: torch.Tensor, new: int, *, captured: bool, kv_cache_dtype: str = "auto"
) -> tuple[float, float]:
    """Seconds until the first token, and tokens per second after it."""
    never = model.config.vocab_size + 7
    synchronize(ids.device.type)
    start, times = time.perf_counter(), []
    for _ in generate_iter(
        model, ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=never,
        pad_token_id=0, disable_compile=not captured, kv_cache_dtype=kv_cache_dtype,
    ):  # fmt: skip
        times.append(time.perf_counter())
    return times[0] - start, len(ids) * (new - 1) / (times[-1] - times[0])


def print_kernels(model: Any, ids: torch.Tensor, new: int, what: str, steps: int = 8) -> None:
    """The kernels of one captured step, and their share of its time."""
    stream = generate_iter(
        model, ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False,
        eos_token_id=model.config.vocab_size + 7, pad_token_id=0,
    )  # fmt: skip
    for _ in range(4):
        next(stream)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        start = time.perf_counter()
        for _ in range(steps):
            next(stream)
        torch.cuda.synchronize()
        wall = (time.perf_counter() - start) / steps * 1e6
    stream.close()  # type: ignore[attr-defined]
    found = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in found) / steps
    print(f"\n{what}: {wall:.0f} us a step on the clock, {total:.0f} us in kernels")
    columns = ("us a step", "launches", "us each", "kernel")
    print(table(columns, [
        [event.self_device_time_total / steps, event.count / steps, event.self_device_time_total / event.count,
         event.key[:90]] for event in found[:24]
    ]), flush=True)  # fmt: skip


class DifferentIds(Exception):
    """First tokens that should be the same are not."""


def first_tokens(
    name: str, lengths: Sequence[int], baselines: Sequence[str], device: str, *, dry: bool, runs: int = 10
) -> list[dict[str, Any]]:
    """A row for each prompt and baseline. Raises DifferentIds before anything is timed."""
    if dry:
        lengths, runs = [min(length, 16) for length in lengths], 2
    shallow = make(name, device, torch.float32, tiny=dry, **MODELS[name].shallow)
    calls = first_calls(name, shallow, baselines, dry=dry)
    for length in lengths:
        for _ in range(4):
            ids = torch.randint(3, shallow.config.vocab_size, (1, length), device=device)
            with torch.no_grad():
                expected = shallow(ids, logits_to_keep=1, use_cache=False).logits[0, -1].argmax().item()
            found = {baseline: call(ids)[0] for baseline, call in calls.items()}
            if wrong := {baseline: id for baseline, id in found.items() if id != expected}:
                raise DifferentIds(f"{name}, {length} tokens: the first token is {expected}, and that of {wrong}")
    release_graphs(shallow)
    del calls, shallow
    gc.collect()
    print(f"{name}: the first tokens of {', '.join(baselines)} agree in fp32", flush=True)

    model = make(name, device, torch.float32 if dry else torch.bfloat16, tiny=dry)
    calls, rows = first_calls(name, model, baselines, dry=dry), []
    for length in lengths:
        ids = torch.randint(3, model.config.vocab_size, (1, length), device=device)
        timed: dict[str, Callable[[], float]] = {
            "products": products(model, length), "attention": attentions(model, length),
            **{baseline: lambda call=call, ids=ids: call(ids)[1] for baseline, call in calls.items()},
        }  # fmt: skip
        times: dict[str, list[float]] = {what: [] for what in timed}
        for turn in range(3 + runs):  # three to warm up
            for what, seconds in timed.items():
                elapsed = seconds()
                if turn >= 3:
                    times[what].append(elapsed)
        milliseconds = {what: statistics.median(each) * 1e3 for what, each in times.items()}
        for baseline in calls:
            row = {
                "model": name, "prompt": length, "baseline": baseline, "first token ms": milliseconds[baseline],
                "products ms": milliseconds["products"], "attention ms": milliseconds["attention"],
                "of products": milliseconds[baseline] / milliseconds["products"],
            }  # fmt: skip
            rows.append(row)
            print({key: f"{x:.4g}" if isinstance(x, float) else x for key, x in row.items()}, flush=True)
    release_graphs(model)
    return rows


def first_calls(
    name: str, model: Any, baselines: Sequence[str], *, dry: bool
) -> dict[str, Callable[[torch.Tensor], tuple[int, float]]]:
    """{baseline: a call of ids [1, T] that gives the first token after them, and the seconds until it was there}."""
    device, never = model.device.type, model.config.vocab_size + 7
    given: dict[str, Any] = dict(do_sample=False, pad_token_id=0)

    def captured(ids: torch.Tensor) -> tuple[int, float]:
        synchronize(device)
        start = time.perf_counter()
        stream = generate_iter(
            model, ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, eos_token_id=never, **given
        )
        id = next(stream)  # on the host
        elapsed = time.perf_counter() - start
        stream.close()  # type: ignore[attr-defined]
        return int(id[0]), elapsed

    def whole(owner: Any, **options: Any) -> Callable[[torch.Tensor], tuple[int, float]]:
        def call(ids: torch.Tensor) -> tuple[int, float]:
            synchronize(device)
            start = time.perf_counter()
            found = owner.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, **given, **options)
            synchronize(device)
            elapsed = time.perf_counter() - start
            return int(found[0, -1]), elapsed

        return call

    calls: dict[str, Callable[[torch.Tensor], tuple[int, float]]] = {}
    theirs: Any = None
    for baseline in baselines:
        if baseline.startswith("hf"):
            if theirs is None:
                theirs = transformers_model(name, device, model.dtype, dry=dry, layers=model.config.num_hidden_layers)
                state = dict(export(model, type(model).DISK_NAMES))
                missing, unexpected = theirs.load_state_dict(state, strict=False)
                assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)  # a tied head
            static = {"cache_implementation": "static"} if baseline == "hf-static" else {}
            calls[baseline] = whole(theirs, min_new_tokens=1, **static)
        else:
            calls[baseline] = captured if baseline == "captured" else whole(model, eos_token_id=never)
    return calls


def products(model: Any, length: int) -> Callable[[], float]:
    """A call that gives the seconds of the products of `length` tokens, one after the other, by torch.mm."""
    matrices = []
    for layer in model.decoder.modules():
        if isinstance(layer, JointProjections):
            joint: list[Any] = layer.joint_modules
            matrices += [torch.cat([module.weight.detach() for module in joint]), layer.output_module.weight.detach()]
    head = model.lm_head.weight.detach()
    counted = sum(matrix.numel() for matrix in matrices)
    there = sum(parameter.numel() for parameter in model.decoder.layers.parameters() if parameter.dim() > 1)
    assert counted == there, f"{type(model).__name__} has products besides those of attention and gated MLPs"

    def operand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=model.dtype, device=model.device)

    inputs = {size: operand(length, size) for size in {matrix.shape[1] for matrix in matrices}}
    outputs = {size: operand(length, size) for size in {matrix.shape[0] for matrix in matrices}}
    last, logits = operand(1, head.shape[1]), operand(1, head.shape[0])

    def run() -> None:
        for matrix in matrices:
            torch.mm(inputs[matrix.shape[1]], matrix.t(), out=outputs[matrix.shape[0]])
        torch.mm(last, head.t(), out=logits)

    return lambda: seconds_of(run, model.device.type)


def attentions(model: Any, length: int) -> Callable[[], float]:
    """A call that gives the seconds of the attentions of all blocks, whose q, k and v lie side by side."""
    calls = []
    for layer in model.decoder.modules():
        if isinstance(layer, Attention):
            heads = [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads]
            shape = 1, length, sum(heads), layer.head_dim
            if not calls or calls[-1][0][0].shape[2:] != (layer.num_heads, layer.head_dim):
                qkv = torch.randn(shape, dtype=model.dtype, device=model.device).split(heads, 2)
            calls.append((qkv, dict(window=layer.window, softcap=layer.softcap, scale=layer.scale)))

    def run() -> None:
        for (q, k, v), options in calls:
            attention(q, k, v, **options)

    return lambda: seconds_of(run, model.device.type)


@torch.no_grad()
def seconds_of(run: Callable[[], None], device: str) -> float:
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def transformers_model(name: str, device: str, dtype: torch.dtype, *, dry: bool, layers: int | None = None) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = MODELS[name]
    changes = {**(model.tiny if dry else {}), **({} if layers is None else {"num_hidden_layers": layers})}
    config = AutoConfig.for_model(**changed(model.config, changes))
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=model.attention).eval()


def of_transformers(
    name: str, cases: Sequence[tuple[int, ...]], device: str, *, static: bool, dry: bool
) -> list[dict[str, Any]]:
    """The same by transformers, whose time after the first token is the difference of two calls."""
    theirs = transformers_model(name, device, torch.float32 if dry else torch.bfloat16, dry=dry)
    rows = []
    for batch, prompt, new in cases:
        if dry:
            batch, prompt, new = min(batch, 2), min(prompt, 16), min(new, 8)
        ids, times = torch.randint(3, theirs.config.vocab_size, (batch, prompt), device=device), []
        options: dict[str, Any] = {"cache_implementation": "static"} if static else {}
        for steps in (new, new, 1, 1):
            synchronize(device)
            start = time.perf_counter()
            theirs.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=steps, min_new_tokens=steps, do_sample=False,
                pad_token_id=0, **options,
            )  # fmt: skip
            synchronize(device)
            times.append(time.perf_counter() - start)
        rows.append({
            "model": name, "case": f"{batch}x{prompt}+{new}", "baseline": "hf-static" if static else "hf",
            "first call s": times[0] - times[1], "first token ms": times[3] * 1e3,
            "tokens/s": batch * (new - 1) / (times[1] - times[3]),
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
