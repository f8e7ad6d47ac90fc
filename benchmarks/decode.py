"""Greedy decoding, the time to the first token, and GRPO rollouts, beside transformers and TRL.

    python -m benchmarks.decode --out benchmarks/results/decode.json
    python -m benchmarks.decode --models llama-3.1-8b --weights bf16,int8,fp8,int4 --cases 1x128+256,8x128+256
    python -m benchmarks.decode --cases 1x32768+64,8x8192+64 --baselines captured,captured-fp8    # the KV cache in fp8
    python -m benchmarks.decode --first-token 4096 --baselines captured,host,hf
    python -m benchmarks.decode --rollout 64x8x128+256 --models llama-3.2-1b                      # beside TRL
    python -m benchmarks.decode --mtp 1,2 --accepted 0.75 --models qwen3.5-4b
    python -m benchmarks.decode --cases 1x128+256 --kernels                                       # where the time goes
    python -m benchmarks.decode --dry

A case is BATCHxPROMPT+NEW. Weights are random, of the config's sizes. Baselines: `captured` decodes as a CUDA graph,
`captured-fp8` too with keys and values in fp8, `host` without a graph; `hf` is transformers' `generate`, `hf-static`
the same with a static cache and torch.compile. Each row runs twice and the second run counts. "first token ms" is the
prompt's time. "tokens/s" counts all tokens after the first, of all rows together; the host reads every token and looks
for a stop id. "of limit": the share of the tokens/s at which "weights GB" and "state MiB a row", keys and values of the
mean length and twice the recurrent states, could be moved at the bandwidth of a copy, which is measured first. "weights
GB" are those that a step reads: of a table of embeddings the rows that are looked up, or all for a tied head; of E
experts, of which each of B rows chooses k, those that are expected to be chosen if all are equally likely, E (1 - (1 -
k/E)^B).

Parity comes first; a model that fails it gets no figures, and the exit status is 1. In fp32, a shallow model must write
the same ids with and without a graph, for rows padded to different lengths. In bf16 two ids may be equally likely to
within its rounding. There, for 200 prompts (56 for a model above 20B), each id that the graph wrote must be the one
that the host would choose after the same text, or tie with it; ties are counted.

--kernels: the kernels of a captured step of each case, by torch's profiler: launches and microseconds of each. Those of
kernels that overlap are counted twice; "busy" is when any runs, "idle" the rest of the step.

--first-token: prompts of one row and the given number of tokens; the median of ten calls. "host" and "hf" are
`generate` with max_new_tokens=1, from the call to its return; "captured" is the first of several tokens of
`generate_iter`. "matmuls ms" is the time of the prompt's matmuls alone, by cuBLAS: in each block q, k and v as one,
gate and up as one, the output and down projections and those of Gemma 4's per-layer embeddings, and the head of the
last token. Blocks that read the keys of others have them for the last token alone. All take turns in one process.
Parity: in fp32, the first ids of a shallow model, and of transformers with the same weights, must be those of one
forward pass.

--mtp: turns of the given numbers of tokens, proposed by a layer for multi-token prediction. Random weights accept none,
so each proposal, once drafted, is made right with the probability --accepted, or wrong. Parity: in fp32, a shallow
model must write the text of plain decoding, whether proposals are its own or so made.

--rollout PROMPTSxGROUPxPROMPT+NEW: a step of GRPO; see benchmarks/rollout.py.
"""

import argparse
import collections
import contextlib
import itertools
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks import harness
from benchmarks.harness import Record, Row, covered, synchronize
from benchmarks.kernels import ceilings
from benchmarks.train_cases import MODELS, changed, ours, theirs
from ligermodels.checkpoint import quantization
from ligermodels.checkpoint.weights import export
from ligermodels.cli.bench import weights_read
from ligermodels.generation import drafters, generate_iter, graphs
from ligermodels.layers import Embedding
from ligermodels.layers.linear import JointProjections
from ligermodels.layers.state import RecurrentState
from ligermodels.training import add_mtp

CACHES = {"captured": "auto", "captured-fp8": "fp8", "host": "auto"}
"""Our baselines, and the format of their keys and values."""
FORMATS = "bf16", "int8", "fp8", "int4", "nf4", "mxfp4"
"""Of linear weights and experts; mxfp4 is one of experts alone."""
BATCHES, SMALL_BATCHES = (8, 64, 64, 64), (8, 16, 16, 16)
"""Of 200 prompts; of 56 where a model in fp32 leaves little memory for their states, and a step takes long."""
TIE = 8
"""Two ids tie if their logits differ by at most this many bf16 errors of a logit, which is the rms difference of a
row's logits from those in fp32. Two logits, each rounded in two ways, differ by 2 errors; 4 times that happens once in
10,000."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", type=harness.names(*MODELS), default="llama-3.2-1b,llama-3.1-8b")
    parser.add_argument("--cases", help="with commas between them", default="")
    parser.add_argument("--baselines", type=harness.names(*CACHES, "hf", "hf-static"), default="captured,host")
    parser.add_argument("--weights", type=harness.names(*FORMATS), default="bf16")
    parser.add_argument("--kernels", action="store_true", help="time of each kernel of a step")
    parser.add_argument("--first-token", type=harness.numbers, default="", metavar="TOKENS", help="lengths of prompts")
    parser.add_argument("--mtp", type=harness.numbers, default="", metavar="TOKENS", help="numbers of proposed tokens")
    parser.add_argument("--accepted", type=float, default=0.75, help="of proposed tokens, with --mtp")
    parser.add_argument("--rollout", metavar="CASE", help="a step of GRPO")
    parser.add_argument("--tokens", type=int, default=12288, help="of a forward in the update of --rollout")


def measure(options: argparse.Namespace, record: Record) -> None:
    record["red"] = red = []
    if options.rollout:
        from benchmarks.rollout import steps

        record["rows"] = steps(options)
        return
    with on(options.device):
        for name in options.models if options.first_token else ():
            record.setdefault("first token", []).extend(first_tokens(name, options, red))
            harness.free(options.device)
        for name in options.models if options.mtp else ():
            record.setdefault("drafted", []).extend(drafted(name, options, red))
            harness.free(options.device)
        default = "" if options.first_token or options.mtp else "1x128+256,8x128+256,64x128+256,1x32768+64"
        cases = [tuple(map(int, re.split(r"[x+]", case))) for case in (options.cases or default).split(",") if case]
        if options.dry:
            cases = [(min(batch, 2), min(prompt, 16), min(new, 8)) for batch, prompt, new in cases]
        for name, weights in itertools.product(options.models, options.weights) if cases else ():
            if not same_ids(name, weights, options):
                red.append(f"{name}, {weights}: the ids with a graph are not those without")
                continue
            model = make(name, weights, options)
            found = choices(
                model, (2, 3) if options.dry else BATCHES if model.num_parameters() < 2e10 else SMALL_BATCHES
            )
            record.setdefault("ids", []).append({"model": name, "weights": weights, **found})
            if found["wrong"]:
                red.append(f"{name}, {weights}: with a graph, {found['wrong']} ids are less likely to the host")
                continue
            if "ceilings" not in record:
                record["ceilings"] = ceilings(options.device)
            copy = record["ceilings"]["copy TB/s"] * 1e12
            of = {"model": name, "weights": weights}
            record.setdefault("rows", []).extend(speeds(model, of, cases, copy, options))
            for batch, prompt, _ in cases if options.kernels else ():
                record.setdefault("kernels", []).extend(kernels_of_step(model, of, batch, prompt))
            model.release()
            del model
            harness.free(options.device)
        for name, baseline in itertools.product(options.models, options.baselines):
            if baseline.startswith("hf") and "rows" in record:
                record["rows"] += of_transformers(name, baseline, cases, options)


@contextlib.contextmanager
def on(device: str) -> Iterator[None]:
    """Lets a CPU run the steps of a graph, uncaptured."""
    with mock.patch.object(graphs, "DEVICES", graphs.DEVICES | {device}):
        yield


def make(name: str, weights: str, options: argparse.Namespace, dtype: torch.dtype | None = None, **changes: Any) -> Any:
    """Our model. weights: one of FORMATS, quantised as `load(quantization_config=)` does."""
    dtype = dtype or (torch.float32 if options.dry else torch.bfloat16)
    model = ours(name, options.device, dtype, tiny=options.dry, **changes)
    if weights != "bf16":
        quantise(model, weights)
    return model


@torch.no_grad()
def quantise(model: Any, weights: str) -> None:
    """Quantises linear weights and experts in place. Raises ValueError for a model that has none in this format."""
    quantizer, device = quantization.quantizer_of(weights), model.device
    linears, experts = quantization.linears(model, quantizer), quantization.experts(model, quantizer)
    if not linears and not experts:
        raise ValueError(f"--weights {weights} quantises experts, of which {type(model).__name__} has none")
    for place, linear in linears.items():
        bias = None if linear.bias is None else linear.bias.detach()
        model.set_submodule(place, quantizer.convert(linear, linear.weight.detach(), bias, device))
    for stacked in experts.values():
        matrices = getattr(stacked.experts, stacked.weight).detach().flatten(0, -2).split(stacked.matrix.out_features)
        converted = [quantizer.convert(stacked.matrix, matrix, None, device) for matrix in matrices]
        stacked.experts.set_quantized(stacked.weight, converted)
    quantizer.finish(model)
    quantization.mark(model, quantizer)


def same_ids(name: str, weights: str, options: argparse.Namespace) -> bool:
    """Whether a shallow model in fp32 writes the same with a graph and without, for one row and for several."""
    kinds = sorted({"auto", *(CACHES[baseline] for baseline in options.baselines if baseline in CACHES)})
    model = make(name, weights, options, torch.float32, **MODELS[name].shallow)
    device, same = options.device, True
    for lengths, kind in itertools.product(([40], [60, 33, 1, 7, 60, 12, 59, 20]), kinds):
        width = max(lengths)
        ids = random_ids(model, len(lengths), width)
        mask = torch.arange(width, device=device) >= width - torch.tensor(lengths, device=device)[:, None]
        how = dict(attention_mask=mask, max_new_tokens=80, do_sample=False, eos_token_id=(), kv_cache_dtype=kind)
        same &= torch.equal(*(model.generate(ids, disable_compile=off, **how) for off in (False, True)))
    model.release()
    return same


def random_ids(model: Any, rows: int, length: int, **options: Any) -> Tensor:
    return torch.randint(3, model.config.vocab_size, (rows, length), device=model.device, **options)


def choices(model: Any, batches: Sequence[int], new: int = 32) -> Row:
    """How many of the ids that a graph writes are the host's choice after the same text, tie with it, or are wrong.

    "largest distance": by how much the host's choice is likelier than what was written, in the unit of TIE.
    """
    device = model.device
    counts, largest = torch.zeros(3, dtype=torch.int64, device=device), torch.zeros((), device=device)
    generator = torch.Generator(device).manual_seed(0)
    runs = []
    for rows in batches:
        ids = random_ids(model, rows, 64, generator=generator)
        lengths = torch.randint(1, 65, (rows, 1), device=device, generator=generator)
        mask = torch.arange(64, device=device) >= 64 - lengths
        how: dict[str, Any] = dict(attention_mask=mask, max_new_tokens=new, do_sample=False, eos_token_id=())
        written = model.generate(ids, **how)

        def follow(text: Tensor, logits: Tensor, written: Tensor = written) -> Tensor:
            return torch.full_like(logits, -torch.inf).scatter_(1, written[:, text.shape[1], None], 0.0)

        how |= dict(logits_processor=follow, disable_compile=True, output_logits=True, return_dict_in_generate=True)
        runs.append((ids, how, written, model.generate(ids, **how).logits))
    model.release()
    with precise(model):
        for ids, how, written, host in runs:
            exact = model.generate(ids, **how).logits
            for id, logits, exact_logits in zip(written[:, 64:].split(1, 1), host, exact, strict=True):
                best, choice = logits.max(-1, keepdim=True)
                rounding = (logits - exact_logits).square().mean(-1, keepdim=True).sqrt()
                same, distance = id == choice, (best - logits.gather(1, id)) / rounding
                tie = distance <= TIE
                counts += torch.cat([same, tie & ~same, ~(tie | same)], 1).sum(0)
                largest = torch.maximum(largest, distance.max())
        model.release()
    found = dict(zip(("the host's", "ties", "wrong"), counts.tolist(), strict=True))
    return {**found, "largest distance": largest.item()}


@contextlib.contextmanager
def precise(model: Any) -> Iterator[None]:
    """The model in fp32, or in fp64 if it is in fp32, and afterwards as it was. A GPU may not hold it twice."""
    dtype = model.dtype
    model.to(torch.float64 if dtype == torch.float32 else torch.float32)
    try:
        yield
    finally:
        model.to(dtype)


# Tokens per second


def stream(model: Any, ids: Tensor, new: int, **options: Any) -> tuple[list[float], list[int]]:
    """(seconds from the call to each token, the first row's tokens)."""
    synchronize(ids.device.type)
    start, times, text = time.perf_counter(), [], []
    for tokens in generate_iter(
        model, ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0,
        eos_token_id=model.config.vocab_size + 7, **options,
    ):  # fmt: skip
        times.append(time.perf_counter() - start)
        text.append(int(tokens[0]))
    return times, text


def speeds(
    model: Any, of: Row, cases: Sequence[tuple[int, ...]], copy: float, options: argparse.Namespace
) -> list[Row]:
    """copy: bytes/s of a copy."""
    rows: list[Row] = []
    for batch, prompt, new in cases:
        ids, nbytes = random_ids(model, batch, prompt), weights_read(model, batch)
        for baseline in [name for name in options.baselines if name in CACHES]:
            kind = CACHES[baseline]
            cache = model.new_cache(1, prompt + new // 2, kv_cache_dtype=kind)
            recurrent = sum(x.nbytes for state in cache if isinstance(state, RecurrentState) for x in state.buffers)
            states = recurrent + cache.nbytes  # recurrent ones twice
            limit = copy * batch / (nbytes + batch * states)
            # Twice as many tokens take the host twice as long, and are as fast.
            steps = min(new, 64) if baseline == "host" else new
            how = {"disable_compile": baseline == "host", "kv_cache_dtype": kind}
            (first, _), (times, _) = (stream(model, ids, steps, **how) for _ in range(2))
            speed = batch * (steps - 1) / (times[-1] - times[0])
            row = {
                **of, "case": f"{batch}x{prompt}+{steps}", "baseline": baseline, "first call s": first[0] - times[0],
                "first token ms": times[0] * 1e3, "tokens/s": speed, "limit": limit,
                "of limit": speed / limit, "weights GB": nbytes / 1e9,
                "state MiB a row": states / 2**20, "recurrent MiB": recurrent / 2**20,
            }  # fmt: skip
            rows.append(row)
            harness.announce(row)
    return rows


def kernels_of_step(model: Any, of: Row, batch: int, prompt: int, steps: int = 8) -> list[Row]:
    """A row for each kernel of a captured step (on a CPU each op), those that take longest first, and one for all."""
    ids = random_ids(model, batch, prompt)
    tokens = generate_iter(
        model, ids, attention_mask=torch.ones_like(ids), max_new_tokens=2 * steps + 1, do_sample=False, pad_token_id=0,
        eos_token_id=model.config.vocab_size + 7,
    )  # fmt: skip
    for _ in range(steps):
        next(tokens)
    device = "CUDA" if ids.is_cuda else "CPU"
    with torch.profiler.profile(activities=[getattr(torch.profiler.ProfilerActivity, device)]) as profile:
        for _ in range(steps):
            next(tokens)
        synchronize(ids.device.type)
    times = collections.defaultdict[str, list[tuple[float, float]]](list)
    for event in profile.events():
        if event.device_type == getattr(torch.autograd.DeviceType, device):
            times[event.name].append((event.time_range.start, event.time_range.end))
    every = [span for spans in times.values() for span in spans]
    busy = covered(every)
    length = max((end for _, end in every), default=0.0) - min((start for start, _ in every), default=0.0)
    case = {**of, "case": f"{batch}x{prompt}"}
    rows: list[Row] = [
        {**case, "kernel": name[:60], "launches": len(spans) / steps, "us": sum(b - a for a, b in spans) / steps}
        for name, spans in times.items()
    ]
    rows.sort(key=lambda row: -row["us"])
    whole = {"busy": busy / steps, "idle": (length - busy) / steps}
    return rows + [{**case, "kernel": name, "us": us} for name, us in whole.items()]


def of_transformers(
    name: str, baseline: str, cases: Sequence[tuple[int, ...]], options: argparse.Namespace
) -> list[Row]:
    """Rows of transformers, whose time after the first token is the difference of two calls."""
    model, rows = peer(name, options), []
    for batch, prompt, new in cases:
        ids = random_ids(model, batch, prompt)
        seconds = [first_call(model, ids, steps, baseline)[1] for steps in (new, new, 1, 1)]
        rows.append({
            "model": name, "case": f"{batch}x{prompt}+{new}", "baseline": baseline,
            "first call s": seconds[0] - seconds[1], "first token ms": seconds[3] * 1e3,
            "tokens/s": batch * (new - 1) / (seconds[1] - seconds[3]),
        })  # fmt: skip
        harness.announce(rows[-1])
    return rows


def peer(name: str, options: argparse.Namespace, dtype: torch.dtype | None = None, **changes: Any) -> Any:
    config = changed(MODELS[name].config, {**(MODELS[name].tiny if options.dry else {}), **changes})
    return theirs(name, options.device, dtype or (torch.float32 if options.dry else torch.bfloat16), config).eval()


def first_call(model: Any, ids: Tensor, new: int = 1, baseline: str = "host") -> tuple[int, float]:
    """(the last id, seconds) of `generate` of the first row, by our model or by transformers'."""
    if baseline.startswith("captured"):
        times, text = stream(model, ids, 8, kv_cache_dtype=CACHES[baseline])
        return text[0], times[0]
    how: dict[str, Any] = dict(max_new_tokens=new, do_sample=False, pad_token_id=0)
    if baseline.startswith("hf"):
        how["min_new_tokens"] = new
    else:
        how["eos_token_id"] = model.config.vocab_size + 7
    if baseline == "hf-static":
        how["cache_implementation"] = "static"
    call = lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **how)  # noqa: E731
    seconds, found = harness.timed(call, ids.device.type)
    return int(found[0, -1]), seconds


# The first token


def first_tokens(name: str, options: argparse.Namespace, red: list[str]) -> list[Row]:
    """A row for each prompt and baseline; none, and a line in `red`, where the first tokens differ."""
    lengths, runs = ([16], 2) if options.dry else (options.first_token, 10)
    shallow = MODELS[name].shallow
    model = make(name, "bf16", options, torch.float32, **shallow)
    calls = first_calls(name, model, options, **shallow)
    for length in itertools.chain.from_iterable([length] * 4 for length in lengths):
        ids = random_ids(model, 1, length)
        with torch.no_grad():
            expected = model(ids, logits_to_keep=1, use_cache=False).logits[0, -1].argmax().item()
        if wrong := {baseline: id for baseline, call in calls.items() if (id := call(ids)[0]) != expected}:
            red.append(f"{name}, {length} tokens: the first token is {expected}, and that of {wrong}")
            return []
    model.release()
    del calls, model
    harness.free(options.device)

    model, rows = make(name, "bf16", options), []
    calls = first_calls(name, model, options)
    for length in lengths:
        ids = random_ids(model, 1, length)
        clocks: dict[str, Callable[[], float]] = {
            "matmuls": matmuls(model, length),
            **{baseline: lambda call=call, ids=ids: call(ids)[1] for baseline, call in calls.items()},
        }  # fmt: skip
        turns = [{what: seconds() for what, seconds in clocks.items()} for _ in range(3 + runs)]  # three to warm up
        ms = {what: statistics.median(turn[what] for turn in turns[3:]) * 1e3 for what in clocks}
        for baseline in calls:
            rows.append({
                "model": name, "prompt": length, "baseline": baseline, "first token ms": ms[baseline],
                "matmuls ms": ms["matmuls"], "of matmuls": ms[baseline] / ms["matmuls"],
            })  # fmt: skip
            harness.announce(rows[-1])
    model.release()
    return rows


def first_calls(
    name: str, model: Any, options: argparse.Namespace, **changes: Any
) -> dict[str, Callable[[Tensor], tuple[int, float]]]:
    """{baseline: a call of ids [1, T] that returns the first token after them, and the seconds until it was there}.

    changes: of the config, with which the model was made.
    """
    calls: dict[str, Callable[[Tensor], tuple[int, float]]] = {}
    for baseline in options.baselines:
        owner = model
        if baseline.startswith("hf"):
            owner = peer(name, options, model.dtype, **changes)
            state = dict(export(model, model.names_on_disk))
            missing, unexpected = owner.load_state_dict(state, strict=False)
            ignored = [re.compile(pattern) for pattern in model.names_on_disk.ignore]  # keys that no block reads
            lost = [name for name in missing if not any(pattern.search(name) for pattern in ignored)]
            assert not unexpected and set(lost) <= {"lm_head.weight"}, (lost, unexpected)  # a tied head
        calls[baseline] = lambda ids, owner=owner, baseline=baseline: first_call(owner, ids, 1, baseline)
    return calls


def matmuls(model: Any, length: int) -> Callable[[], float]:
    """A call that returns the seconds of the matmuls of `length` tokens, one after the other, by torch.mm."""
    decoder, head = model.decoder, model.lm_head.weight.detach()
    first_reader = len(decoder.layers) if decoder.first_reader is None else decoder.first_reader
    at = [(name, module, 1 if number(name) >= first_reader else length) for name, module in decoder.named_modules()]
    matrices, joined = list[tuple[Tensor, int]](), set[str]()
    for name, layer, rows in at:
        if isinstance(layer, JointProjections):
            joint: list[Any] = layer.joint_modules
            matrices += [(torch.cat([module.weight.detach() for module in joint]), rows)]
            matrices += [(layer.output_module.weight.detach(), rows)]
            joined |= {f"{name}.{part}" for part in (*layer.joint_names, layer.output_name)}
    matrices += [(x.weight.detach(), rows) for name, x, rows in at if isinstance(x, nn.Linear) and name not in joined]
    tables = sum(x.weight.numel() for _, x, _ in at if isinstance(x, Embedding))
    there = sum(parameter.numel() for parameter in decoder.parameters() if parameter.dim() > 1) - tables
    assert sum(x.numel() for x, _ in matrices) == there, f"{type(model).__name__} has matmuls of no linear module"
    matrices.append((head, 1))

    def operand(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=model.dtype, device=model.device)

    inputs = {(rows, x.shape[1]): operand(rows, x.shape[1]) for x, rows in matrices}
    outputs = {(rows, x.shape[0]): operand(rows, x.shape[0]) for x, rows in matrices}

    def run() -> None:
        for matrix, rows in matrices:
            torch.mm(inputs[rows, matrix.shape[1]], matrix.t(), out=outputs[rows, matrix.shape[0]])

    return lambda: harness.timed(torch.no_grad()(run), model.device.type)[0]


def number(name: str) -> int:
    """That of the layer in which the module of this name is, or -1."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "layers" and len(parts) > 1 else -1


# Multi-token prediction


def imposing(text: Tensor, wrong: Tensor, turns: list[int]) -> Any:
    """After the real draft, proposal i of turn t is the next token of `text`, or another where wrong[t, i] is 1."""
    draft = drafters.MultiToken.draft

    def draft_and_replace(self: Any) -> Tensor:
        draft(self)
        turns.append(self.count)
        at = 1 + self.step.ends[self.step.last] + torch.arange(self.count, device=text.device)
        return (text[at.clamp(max=len(text) - 1)] + wrong[len(turns) - 1]) % self.model.config.vocab_size

    return mock.patch.object(drafters.MultiToken, "draft", draft_and_replace)


def drafted(name: str, options: argparse.Namespace, red: list[str]) -> list[Row]:
    """A row for plain decoding and for each --mtp; none, and a line in `red`, where their texts differ in fp32."""
    prompt, new = (12, 16) if options.dry else (128, 257)
    for dtype, changes in ((torch.float32, MODELS[name].shallow), (None, {})):
        model, rows, texts = make(name, "bf16", options, dtype, **changes), list[Row](), list[list[int]]()
        add_mtp(model)
        ids = random_ids(model, 1, prompt)
        for count in (0, *options.mtp):
            how = dict(use_mtp=True, num_assistant_tokens=count) if count else {}
            _, text = stream(model, ids, new, **how)  # in bf16 verification rounds otherwise than plain decoding
            draw, turns = torch.Generator().manual_seed(0), list[int]()
            wrong = (torch.rand(new, count, generator=draw) >= options.accepted).to(ids)
            with imposing(torch.cat([ids[0], torch.tensor(text).to(ids)]), wrong, turns):
                times, found = stream(model, ids, new, **how)
            texts += [text, found]
            steps, seconds = len(turns) or new - 1, times[-1] - times[0]
            row = {"model": name, "case": f"1x{prompt}+{new}", "proposals": count, "tokens a turn": (new - 1) / steps}
            rows.append(row | {"ms a turn": seconds / steps * 1e3, "tokens/s": (new - 1) / seconds})
        model.release()
        if dtype and any(text != texts[0] for text in texts):
            red.append(f"{name}: with --mtp the text is not that of plain decoding")
            return []
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    return harness.main(__doc__, arguments, add_options, measure, needs_gpu=False)


if __name__ == "__main__":
    sys.exit(main())
