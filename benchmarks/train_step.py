"""A training step of a whole model: tokens/s and peak memory of ours beside transformers, Liger and torch.compile.

Every baseline runs in a fresh process, so that neither patches nor memory leak from one to the next, and loads the same
checkpoint, which transformers wrote. Before it is timed it must agree with transformers in fp32 on a shallow model of
the same widths: logits, loss and gradient norm. One that does not agree gets no figures; if it is ours, the exit code
is 1. The steps are on random tokens, the same for all, and loss and gradient norm of the first must agree as well.

    python -m benchmarks.train_step --case llama-1b,llama-8b --out benchmarks/results
    python -m benchmarks.train_step --case gemma-2-2b --baselines ligermodels,hf+liger:none
    python -m benchmarks.train_step --case llama-8b-lora,llama-8b-qlora --scratch /dev/shm
    python -m benchmarks.train_step --longest 24 --recompute block     # the longest sequence that trains in 24 GiB
    python -m benchmarks.train_step --render benchmarks/results/step-llama-1b.json
    python -m benchmarks.train_step --case gemma-2-2b --dry            # a tiny model on the CPU: does everything run?

A baseline is `ligermodels` with any of +adamw (our AdamW in place of torch's), +in_backward (our AdamW, stepping in the
backward), +captured (the step is one CUDA graph) and +offload (what is saved for backward goes to the host), or `hf`,
which is transformers, with any of +liger, +compile and +loop (over experts, in place of its grouped matmuls).
Either takes +lora, adapters of rank 16 on all linear modules of a frozen model, or +nf4, the same on a model in 4 bits
(QLoRA): ours by `load_adapter`, theirs by PEFT and bitsandbytes, from one file of adapters that PEFT wrote. PEFT runs
as TRL runs it: under autocast to bf16, its adapters in fp32, and in bf16 on 4 bits.
Its recomputation stands after a colon where it is not the case's: `ligermodels:mlp`, `hf+liger:none`.
"""

import argparse
import copy
import dataclasses
import gc
import importlib.util
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from benchmarks.common import environment, heading, table, write_json
from benchmarks.train_cases import CASES, MODELS, Case, Model, changed, model_inputs

ROOT = Path(__file__).parent.parent
GIB = 2**30
LEARNING_RATE, WARMUP = 1e-5, 3
ADAPTERS = ("lora", "nf4")
OURS, THEIRS = ("adamw", "in_backward", "captured", "offload", *ADAPTERS), ("liger", "compile", "loop", *ADAPTERS)
RANK, ALPHA, ADAPTER_B = 16, 32, 0.1
"""ADAPTER_B: standard deviation of B. PEFT sets it to 0: parity would not see the adapters, nor A get a gradient."""


@dataclasses.dataclass(frozen=True)
class Settings(Case):
    """A case as it runs: with the options of the command line. longest: GiB, for the longest sequence in them, of which
    `least` tokens are tried first."""

    case: str = ""
    dry: bool = False
    longest: float | None = None
    least: int = 0

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    @property
    def config(self) -> dict[str, Any]:
        found = MODELS[self.model].config
        if self.dry:
            found = changed(found, MODELS[self.model].tiny)
        if self.longest is not None:  # the angles of no model here depend on where it says that it ends
            found = {**found, "max_position_embeddings": 2**22}
        return found

    @property
    def image(self) -> tuple[int, int] | None:
        return (56, 56) if self.dry and MODELS[self.model].image else MODELS[self.model].image


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="llama-1b", help=f"comma-separated, or all: {', '.join(CASES)}")
    parser.add_argument("--baselines", help="comma-separated; default the case's")
    parser.add_argument("--batch", type=int, help="sequences a step; default the case's, as of the next three")
    parser.add_argument("--seq", type=int, help="tokens a sequence")
    parser.add_argument("--recompute", choices=("none", "block"), help="of all who do not name their own")
    parser.add_argument("--steps", type=int, help="timed steps, of which the median counts")
    parser.add_argument("--longest", type=float, metavar="GIB", help="the longest sequence that trains in so many GiB")
    parser.add_argument("--least", type=int, default=0, help="tokens that --longest tries first")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that a baseline may take")
    parser.add_argument("--scratch", help="where checkpoints are written for the run, e.g. /dev/shm")
    parser.add_argument("--out", type=Path, help="folder for a JSON file for each case")
    parser.add_argument("--render", metavar="FILE.json", help="print an earlier result instead of measuring")
    parser.add_argument("--dry", action="store_true", help="a tiny model on the CPU; the times mean nothing")
    parser.add_argument("--worker", nargs=2, metavar=("BASELINE", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.render:
        print(render(json.loads(Path(options.render).read_text())))
        return 0
    if options.worker:
        work(options.worker[0], Path(options.worker[1]))
        return 0
    names = list(CASES) if options.case == "all" else options.case.split(",")
    if unknown := sorted(set(names) - set(CASES)):
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(CASES)}")
    if not options.dry and not torch.cuda.is_available():
        parser.error("needs a CUDA device; --dry runs a tiny model on the CPU")
    try:
        chosen = [_settings(name, options) for name in names]
    except ValueError as error:
        parser.error(str(error))
    code = 0
    with tempfile.TemporaryDirectory(dir=options.scratch, prefix="train_step-") as scratch:
        for settings in chosen:
            folder = Path(scratch, settings.model)  # the checkpoint of a model is written once for cases in a row
            for other in set(Path(scratch).iterdir()) - {folder}:
                shutil.rmtree(other)
            record = run(settings, options.timeout, folder)
            if options.out:
                write_json(options.out / f"step-{settings.case}{'-longest' if settings.longest else ''}.json", record)
            print(render(record), flush=True)
            ours = [row for row in record["rows"] if row["baseline"].startswith("ligermodels")]
            code |= int(any("note" in row for row in ours))
    return code


def _settings(name: str, options: argparse.Namespace) -> Settings:
    """The case with what the command line says. Raises ValueError for a baseline that there is not."""
    given = {key: getattr(options, key) for key in ("batch", "seq", "recompute", "steps")}
    if options.dry:
        given |= {"batch": 2, "seq": 64, "steps": 2}
    if options.baselines:
        given["baselines"] = tuple(options.baselines.split(","))
    case = dataclasses.replace(CASES[name], **{key: value for key, value in given.items() if value is not None})
    needs_gpu = {"liger", "compile", "captured"} if options.dry and not options.baselines else set()
    baselines = tuple(name for name in case.baselines if not needs_gpu & set(name.split(":")[0].split("+")))
    for baseline in baselines:
        named = Baseline.of(baseline, case.recompute)
        if MODELS[case.model].drawn_in_nf4 and not (named.ours and named.adapters == "nf4"):
            raise ValueError(f"{baseline}: {case.model} has no checkpoint and is drawn in 4 bits: ligermodels+nf4")
    chosen = {**dataclasses.asdict(case), "baselines": baselines}
    return Settings(**chosen, case=name, dry=options.dry, longest=options.longest, least=options.least)


@dataclasses.dataclass(frozen=True)
class Baseline:
    """What a baseline's name says. options: of `OURS` or `THEIRS`."""

    ours: bool
    options: frozenset[str]
    recompute: str

    @property
    def adapters(self) -> str:
        """What is trained: "nf4" or "lora", adapters on a model in 4 bits or in bf16, or "", all weights."""
        return max(self.options & {*ADAPTERS}, default="")  # "nf4" is the later one

    @classmethod
    def of(cls, name: str, recompute: str) -> Self:
        """Raises ValueError for a name that says nothing."""
        kind, _, own = name.partition(":")
        base, *options = kind.split("+")
        known = {"ligermodels": OURS, "hf": THEIRS}.get(base, ())
        policies = ("none", "block", "mlp") if base == "ligermodels" else ("none", "block")
        if not known or not set(options) <= set(known) or (own or recompute) not in policies:
            raise ValueError(
                f"unknown baseline {name!r}; known: ligermodels with any of +{', +'.join(OURS)}, and :none, :mlp or "
                f":block after it; hf with any of +{', +'.join(THEIRS)}, and :none or :block after it"
            )
        return cls(base == "ligermodels", frozenset(options), own or recompute)


def run(settings: Settings, timeout: float, folder: Path) -> dict[str, Any]:
    """The record of a case: every baseline in a process of its own, one after the other. folder: for checkpoints."""
    rows = []
    write_json(folder / "settings.json", dataclasses.asdict(settings))
    for baseline in ("prepare", *settings.baselines):
        started = time.perf_counter()
        error = spawn(baseline, folder, timeout, settings.longest is not None)
        print(f"{baseline}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
        result = folder / "result.json"
        found = json.loads(result.read_text()) if result.exists() else {}
        result.unlink(missing_ok=True)
        if baseline != "prepare":
            rows.append({"baseline": baseline, **found, **({"note": error} if error else {})})
        elif error:
            raise SystemExit(f"transformers could not write the checkpoint: {error}")
    compare_first_steps(rows)
    shown = dataclasses.asdict(settings)
    return {"benchmark": "train_step", "environment": environment(settings.device), "settings": shown, "rows": rows}


def spawn(baseline: str, folder: Path, timeout: float, longest: bool) -> str:
    """Runs a baseline's process. Why it failed, or "". What it found lies in the folder, if it came so far."""
    command = [sys.executable, "-m", "benchmarks.train_step", "--worker", baseline, str(folder)]
    variables = dict(os.environ)
    if longest:  # for everyone: what is lost between tensors would decide otherwise
        variables["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    try:
        done = subprocess.run(command, cwd=ROOT, env=variables, timeout=timeout, stderr=subprocess.PIPE, text=True)
    except subprocess.TimeoutExpired:
        return f"did not finish in {timeout:g} s"
    if done.returncode == 0:
        return ""
    print(done.stderr, file=sys.stderr)
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:160]


def work(name: str, folder: Path) -> None:
    """In the process of one baseline, or of "prepare": writes what it finds to result.json."""
    settings, result = Settings(**json.loads((folder / "settings.json").read_text())), folder / "result.json"
    if name == "prepare":
        prepare(settings, folder)
        return
    baseline = Baseline.of(name, settings.recompute)
    row: dict[str, Any] = {"recompute": baseline.recompute}
    if not baseline.ours and baseline.adapters == "nf4" and importlib.util.find_spec("bitsandbytes") is None:
        write_json(result, {**row, "note": "bitsandbytes is not installed"})
        return
    if wrong := parity(baseline, settings, folder):
        write_json(result, {**row, "note": "; ".join(wrong)})
        return
    model = build(baseline, settings, folder / "model")
    optimizer = optimizer_of(baseline, model)
    if settings.longest is None:
        row |= time_steps(baseline, settings, model, optimizer)
    else:  # a search that runs out of time leaves what it has found
        row |= longest(baseline, settings, model, optimizer, lambda trial: write_json(result, {**row, **trial}))
    write_json(result, row)


# The baselines


def auto_class(model: Model) -> Any:
    import transformers

    return transformers.AutoModelForImageTextToText if model.image else transformers.AutoModelForCausalLM


def build(baseline: Baseline, settings: Settings, folder: Path) -> nn.Module:
    """The baseline's model with the checkpoint's weights in bf16, ready to train."""
    return (build_ours if baseline.ours else build_theirs)(baseline, settings, folder)


def build_ours(baseline: Baseline, settings: Settings, folder: Path) -> nn.Module:
    import ligermodels
    from ligermodels.training import lora

    adapters: Path | None = adapters_of(folder) if baseline.adapters else None
    if MODELS[settings.model].drawn_in_nf4 and folder.name == "model":
        model: Any = drawn_in_nf4(settings)
        lora.add_lora(model, r=RANK, alpha=ALPHA)
        _draw_b(model)
    else:
        options = {"quantization_config": "nf4"} if baseline.adapters == "nf4" else {}
        model = ligermodels.load(folder, dtype=torch.bfloat16, device=settings.device, progress=False, **options)
        if adapters is not None:
            lora.load_adapter(model, adapters)
    if baseline.recompute != "none" or "offload" in baseline.options:
        policy = {"recompute": baseline.recompute, "offload": "offload" in baseline.options}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=policy)
    return model.train()


def build_theirs(baseline: Baseline, settings: Settings, folder: Path) -> nn.Module:
    options: dict[str, Any] = {"attn_implementation": MODELS[settings.model].attention}
    if "loop" in baseline.options:
        options["experts_implementation"] = "eager"
    if baseline.adapters == "nf4":
        from transformers import BitsAndBytesConfig

        kind = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}  # as ours by default
        kind["bnb_4bit_compute_dtype"] = torch.bfloat16
        options["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True, **kind)
        options["device_map"] = {"": "cpu" if settings.dry else 0}
    found = auto_class(MODELS[settings.model]).from_pretrained(folder, dtype=torch.bfloat16, **options)
    model = (found if baseline.adapters == "nf4" else found.to(settings.device)).train()
    model.config.use_cache = False
    if "liger" in baseline.options:
        patches = importlib.import_module("liger_kernel.transformers")
        getattr(patches, f"apply_liger_kernel_to_{model.config.model_type}")(model=model)
    if baseline.recompute == "block":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if baseline.adapters:
        from peft import PeftModel

        if baseline.recompute == "block":
            model.enable_input_require_grads()
        model = as_trl_runs(PeftModel.from_pretrained(model, adapters_of(folder), is_trainable=True), settings)
        for parameter in model.parameters() if baseline.adapters == "nf4" else ():
            if parameter.requires_grad:
                parameter.data = parameter.data.bfloat16()
    if "compile" in baseline.options:
        model.compile(dynamic=False)
    return model


def as_trl_runs(model: nn.Module, settings: Settings) -> nn.Module:
    """PEFT's model, whose adapters are in fp32, under autocast to bf16."""
    model.forward = torch.autocast(settings.device, torch.bfloat16)(model.forward)  # type: ignore[method-assign]
    return model.train()


def adapters_of(folder: Path) -> Path:
    """Where the adapters for the checkpoint in `folder` lie."""
    return folder.with_name(f"{folder.name}-adapters")


@torch.no_grad()
def _draw_b(model: nn.Module) -> None:
    """Draws B of every adapter of a model, PEFT's or ours."""
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.normal_(0, ADAPTER_B)


@torch.no_grad()
def drawn_in_nf4(settings: Settings) -> Any:
    """Our model with random weights on the device in 4 bits, one linear module after the other, where the weights in
    bf16 would fit neither there nor on a disk. It is what `ligermodels.load(..., quantization_config="nf4")` makes."""
    import ligermodels
    from ligermodels.checkpoint import quantization, weights

    device, quantizer = torch.device(settings.device), quantization.quantizer_of("nf4")
    model = ligermodels.ARCHS[settings.config["model_type"]].from_config(
        settings.config, dtype=torch.bfloat16, device="meta"
    )
    chosen = quantization.linears(model, quantizer)
    for name in chosen:
        model.set_submodule(name, nn.Module())  # until the others have memory
    weights.allocate(model, device)
    model.init_weights()
    torch.manual_seed(0)
    for name, linear in chosen.items():
        weight = torch.empty(linear.weight.shape, dtype=torch.bfloat16, device=device)
        weight.normal_(0, model.config.initializer_range)
        model.set_submodule(name, quantizer.convert(linear, weight, None, device))
    quantization.mark(model, quantizer)
    return model


def optimizer_of(baseline: Baseline, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW on what is trained, with states in the weights' dtype."""
    captured, in_backward = "captured" in baseline.options, "in_backward" in baseline.options
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if in_backward or "adamw" in baseline.options:
        from ligermodels.training import AdamW

        return AdamW(trained, lr=LEARNING_RATE, step_in_backward=in_backward, capturable=captured)
    return torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True, capturable=captured)


def step_of(
    baseline: Baseline, model: nn.Module, optimizer: torch.optim.Optimizer, example: Mapping[str, Tensor]
) -> Callable[..., Tensor]:
    """A function of the model's inputs that trains one step on them and returns the loss."""
    if "captured" in baseline.options:
        from ligermodels.training import CapturedStep

        return CapturedStep(model, optimizer, **example)

    def step(**inputs: Tensor) -> Tensor:
        loss = model(**inputs)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def batches(
    settings: Settings, model: nn.Module, steps: int, batch: int, seq: int, seed: int = 0
) -> list[dict[str, Tensor]]:
    """Inputs for each step, the same for everyone on every device, as `model` takes them."""
    config, generator = settings.config, torch.Generator().manual_seed(seed)
    ids = torch.randint(config["vocab_size"], (steps, batch, seq), generator=generator)
    found = []
    for n, rows in enumerate(ids):
        inputs = model_inputs(config, rows, settings.image, seed + n)
        if config["model_type"] == "qwen2_vl" and not type(model).__module__.startswith("ligermodels."):
            inputs["mm_token_type_ids"] = (inputs["input_ids"] == config["image_token_id"]).int()
        found.append({name: x.to(settings.device) for name, x in inputs.items()})
    return found


# Parity

PARITY_LENGTH = 8192
"""At most so many tokens: in fp32, torch's attention with grouped heads holds all scores. No window here is longer."""
PARITY_LOGITS, PARITY_DRAWS = 64, 4
"""Logits are compared at the last positions; so many sequences say what transformers in bf16 errs by."""
SHARP_SCORES = 8.0
"""Standard deviation of the attention scores of the parity model. Those of a model just initialised are below 1: all
keys weigh the same, and neither a window nor a softcap of 50 would be missed."""
LOGITS_FACTOR, PEERS_LOGITS_FACTOR = 1.25, 4.0
"""Error of the logits over that of transformers in bf16. Ours rounds at other places, no more often; a peer may be less
exact and only has to be the same model."""
RELATIVE = 2**-8
"""For loss and gradient norm, beyond three times what transformers in bf16 errs by: one bf16 rounding. Both average
roundings out, and right models agree more closely; a wrong rotation, mask or residual moves the norm by percents."""


def prepare(settings: Settings, folder: Path) -> None:
    """Writes the checkpoints `model` and `parity`, adapters of each where they are asked for, and what transformers
    computes with the latter in fp32. A `model` that an earlier case wrote stays."""
    case = MODELS[settings.model]
    kinds = {Baseline.of(name, settings.recompute).adapters for name in settings.baselines}
    wanted = [folder / "model", *([adapters_of(folder / "model")] if any(kinds) else [])]
    if not case.drawn_in_nf4 and not all(path.exists() for path in wanted):
        model = _initialised(settings.config, settings)
        model.save_pretrained(folder / "model")
        if any(kinds):
            _with_adapters(model, adapters_of(folder / "model"))
        del model
        _free(settings.device)
    model = _initialised(settings.config if settings.dry else changed(settings.config, case.shallow), settings)
    _sharpen(model)
    model.save_pretrained(folder / "parity")
    for kind in sorted(kinds):
        found = copy.deepcopy(model)
        if kind:
            adapted = _with_adapters(found, adapters_of(folder / "parity"))
            if kind == "nf4":
                _round_to_nf4(adapted)
            found = as_trl_runs(adapted, settings)
        draws = batches(settings, found, PARITY_DRAWS, 1, min(settings.seq, PARITY_LENGTH), seed=1)
        in_bf16 = [probe(found.train(), inputs) for inputs in draws]
        found.__dict__.pop("forward", None)  # autocast
        exact = [probe(found.float(), inputs) for inputs in draws]
        pairs = list(zip(in_bf16, exact, strict=True))
        errors = {"logits": statistics.mean(typical_error(a["logits"], b["logits"]) for a, b in pairs)}
        for name in ("loss", "gradient_norm"):
            errors[name] = statistics.mean((a[name] - b[name]) ** 2 for a, b in pairs) ** 0.5
        torch.save([{"exact": one, "errors_in_bf16": errors} for one in exact], folder / f"parity-{kind}.pt")
        del found
        _free(settings.device)


def _with_adapters(model: nn.Module, folder: Path) -> Any:
    """PEFT's model around a model of transformers, with adapters drawn at random, which it writes to `folder`."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    options = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM")
    adapted: Any = get_peft_model(model, options)
    _draw_b(adapted)
    adapted.save_pretrained(folder, save_embedding_layers=False)
    return adapted


@torch.no_grad()
def _round_to_nf4(adapted: nn.Module) -> None:
    """Rounds the weights under the adapters to what 4 bits hold. Ours are bitsandbytes' bytes (tests/test_nf4.py), so
    that a model in bf16 says what QLoRA must compute, whether bitsandbytes is there or not."""
    from ligermodels.kernels.nf4 import dequantize_nf4, quantize_nf4

    for module in adapted.modules():
        if hasattr(module, "base_layer"):
            weight = module.base_layer.weight
            weight.copy_(dequantize_nf4(*quantize_nf4(weight.detach())))


def _initialised(config: Mapping[str, Any], settings: Settings) -> nn.Module:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(0)
    case = MODELS[settings.model]
    found = CONFIG_MAPPING[config["model_type"]].from_dict(config)
    with torch.device(settings.device):
        return auto_class(case).from_config(found, dtype=torch.bfloat16, attn_implementation=case.attention)


@torch.no_grad()
def _sharpen(model: nn.Module) -> None:
    """Draws the weights of q and k so that scores have a deviation of SHARP_SCORES, and all biases."""
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.normal_()
        elif any(f".{part}_proj." in name for part in ("q", "k", "qkv")):
            rows = len(parameter)
            if ".qkv_proj." in name:
                heads, kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
                rows = rows * (heads + kv_heads) // (heads + 2 * kv_heads)
            # Of normed inputs, q and k then have a deviation of SHARP_SCORES ** 0.5, and q k / sqrt(D) its square.
            parameter[:rows].normal_(0, (SHARP_SCORES / parameter.shape[1]) ** 0.5)


def parity(baseline: Baseline, settings: Settings, folder: Path) -> list[str]:
    """What the baseline has wrong with the shallow model, in words; empty if it agrees with transformers in fp32.

    It agrees if it does on more than half of the sequences: the gradient of one in bf16 may lie far off, whoever
    computes it, and what is wrong is so on all of them.
    """
    model = build(baseline, settings, folder / "parity")
    draws = batches(settings, model, PARITY_DRAWS, 1, min(settings.seq, PARITY_LENGTH), seed=1)
    expected = torch.load(folder / f"parity-{baseline.adapters}.pt", map_location=settings.device)
    factor = LOGITS_FACTOR if baseline.ours else PEERS_LOGITS_FACTOR
    found = [disagreement(probe(model, inputs), one, factor) for inputs, one in zip(draws, expected, strict=True)]
    del model
    torch.compiler.reset()
    _free(settings.device)
    wrong = [reasons for reasons in found if reasons]
    return wrong[0] if 2 * len(wrong) >= len(found) else []


def probe(model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
    """Logits of the last positions, loss and gradient norm of one forward and backward."""
    output = model(**inputs)
    output["loss"].backward()
    norms = [p.grad.float().norm() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    logits = output.get("logits")
    if logits is None:  # a fused loss does not make them
        with torch.no_grad():
            logits = model(**{name: x for name, x in inputs.items() if name != "labels"}, use_cache=False).logits
    logits = logits[:, -PARITY_LOGITS:].detach().to(torch.float32, copy=True)  # a view would hold them all
    return {"logits": logits, "loss": output["loss"].item(), "gradient_norm": torch.stack(norms).norm().item()}


def disagreement(found: Mapping[str, Any], expected: Mapping[str, Any], logits_factor: float) -> list[str]:
    """What `found` has wrong beside what `prepare` wrote, in words; empty if it agrees."""
    exact, errors, reasons = expected["exact"], expected["errors_in_bf16"], []
    error, allowed = typical_error(found["logits"], exact["logits"]), logits_factor * errors["logits"]
    if not error <= allowed:
        reasons.append(f"logits err by {error:.3e} against fp32, allowed {allowed:.3e}")
    for name in ("loss", "gradient_norm"):
        allowed = RELATIVE * abs(exact[name]) + 3 * errors[name]
        if not abs(found[name] - exact[name]) <= allowed:
            reasons.append(f"{name} is {found[name]:.6g}, in fp32 {exact[name]:.6g}, allowed {allowed:.2g} off")
    return reasons


def typical_error(logits: Tensor, exact: Tensor) -> float:
    """The rms over the vocabulary, of which the median over positions [1, S, V]: a token that bf16 sends to another
    expert than fp32 does is far off, whoever computes it. NaN if any is."""
    return (logits.double() - exact.double()).square().mean(-1).sqrt().median().item()


def compare_first_steps(rows: Sequence[dict[str, Any]]) -> None:
    """All start from the same weights on the same batch: step 1 at full depth must agree with the plainest peer's too
    that trains the same. A row that does not agree loses its figures and gets a note.
    """
    timed = [(Baseline.of(row["baseline"], "none"), row) for row in rows if "losses" in row]
    for baseline, row in timed:
        theirs = [(peer.options, x) for peer, x in timed if not peer.ours and peer.adapters == baseline.adapters]
        if not theirs:
            continue
        _, reference = min(theirs, key=lambda found: len(found[0]))
        for name, found, expected in (
            ("loss", row["losses"][0], reference["losses"][0]),
            ("gradient norm", row["first_gradient_norm"], reference["first_gradient_norm"]),
        ):
            if not abs(found - expected) <= 2 * RELATIVE * abs(expected):  # both are bf16 and err by one rounding each
                row["note"] = f"{name} of step 1 is {found:.6g}, {reference['baseline']} has {expected:.6g}"
                row.pop("tokens_per_s", None)


def first_gradient_norm(optimizer: torch.optim.Optimizer) -> float:
    """Of the gradients of AdamW's first step, whose first moments are (1 - beta1) gradient.

    The gradients are gone by then, where they are stepped on in the backward, or lie in a graph's memory.
    """
    norms = [
        optimizer.state[p]["exp_avg"].float().norm() / (1 - group["betas"][0])
        for group in optimizer.param_groups
        for p in group["params"]
        if "exp_avg" in optimizer.state[p]
    ]
    return torch.stack(norms).norm().item()


# Measurements


def time_steps(
    baseline: Baseline, settings: Settings, model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Losses, tokens/s from the median of the timed steps, and their peak memory."""
    cuda = settings.device == "cuda"
    inputs = batches(settings, model, WARMUP + settings.steps, settings.batch, settings.seq)
    step = step_of(baseline, model, optimizer, inputs[0])
    losses, marks, row = [], [], {}
    for n, batch in enumerate(inputs):
        if n == WARMUP:
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            marks.append(_mark(cuda))
        losses.append(step(**batch))
        if n == 0:
            row["first_gradient_norm"] = first_gradient_norm(optimizer)
        if n >= WARMUP:
            marks.append(_mark(cuda))
    if cuda:
        torch.cuda.synchronize()
        times = [start.elapsed_time(end) for start, end in itertools.pairwise(marks)]
        row["peak_gib"] = peak_bytes() / GIB
        row["pinned_gib"] = torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0) / GIB
    else:
        times = [(end - start) * 1e3 for start, end in itertools.pairwise(marks)]
    row |= {"losses": torch.stack(losses).tolist(), "step_ms": times}
    row["tokens_per_s"] = settings.batch * settings.seq / statistics.median(times) * 1e3
    return row


def _mark(cuda: bool) -> Any:
    """A point in time on the device's own clock: steps stay queued one after another, as in training."""
    if not cuda:
        return time.perf_counter()
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark


def peak_bytes() -> int:
    """The most that was allocated in tensors since the peak was reset, with CUDA graphs counted whole.

    A graph's kernels use memory that its capture took and gave back, which lies in a pool of its own. The allocator's
    figure counts there what is a tensor still, which is next to nothing; here the pool counts.
    """
    pools = [segment for segment in torch.cuda.memory_snapshot() if tuple(segment["segment_pool_id"]) != (0, 0)]
    unseen = sum(segment["total_size"] - segment["allocated_size"] for segment in pools)
    return torch.cuda.max_memory_allocated() + unseen


def longest(
    baseline: Baseline,
    settings: Settings,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tell: Callable[[Mapping[str, Any]], None],
) -> dict[str, Any]:
    """The longest sequence that trains in so many GiB, to within 1024 tokens or a 32nd, and its tokens/s.

    tell: called after each trial, so that a search that runs out of time leaves what it has found.
    """
    cuda = settings.device == "cuda"
    if cuda:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, settings.longest * GIB / total))
    step = step_of(baseline, model, optimizer, {})
    found: dict[str, Any] = {}

    def fits(length: int) -> bool:
        try:
            (inputs,) = batches(settings, model, 1, 1, length)
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            for _ in range(2):  # the second without compiling, and with the optimizer's states in memory
                started = time.perf_counter()
                step(**inputs)
                if cuda:
                    torch.cuda.synchronize()
                seconds = time.perf_counter() - started
                if seconds > 5:  # the second one would tell no more
                    break
        except RuntimeError as error:  # torch.OutOfMemoryError is one, and so are those of cuBLAS and cuDNN
            if not re.search("out of memory|alloc_failed", str(error), re.IGNORECASE):
                raise
            return False
        finally:
            inputs = {}
            optimizer.zero_grad(set_to_none=True)
            _free(settings.device)
        found.update(length=length, tokens_per_s=length / seconds)
        if cuda:
            found["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
        tell(found)
        return True

    grain, most = (1024, 2**21) if cuda else (32, 96)
    search(fits, grain, most, settings.least)
    return found or {"note": f"not even {grain} tokens fit"}


def search(fits: Callable[[int], bool], grain: int, most: int, least: int = 0) -> int:
    """The longest length that fits, to within a grain or a 32nd, at most `most`: doubling from
    `least`, then bisection."""
    low, high = 0, max(grain, least)
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + grain)
    while high - low > max(grain, low // 32):
        middle = (low + high) // 2 // grain * grain
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def _free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def render(record: Mapping[str, Any]) -> str:
    """The table of a result."""
    settings, rows = record["settings"], record["rows"]
    title = f"{settings['case']}: {settings['model']}, {settings['batch']} x {settings['seq']}"
    if settings["longest"]:
        title = f"{settings['case']}: the longest sequence of {settings['model']} in {settings['longest']:g} GiB"
    figure = "length" if settings["longest"] else "tokens_per_s"
    ours = next((row[figure] for row in rows if row["baseline"].startswith("ligermodels") and figure in row), None)
    lines = []
    for row in rows:
        timed = figure in row
        notes = [row.get("note")]
        if row.get("pinned_gib", 0) >= 0.1:
            notes.append(f"{row['pinned_gib']:.1f} GiB of the host")
        lines.append(
            [
                row["baseline"],
                row.get("recompute"),
                row.get("length"),
                round(row["tokens_per_s"]) if "tokens_per_s" in row else None,
                f"{ours / row[figure]:.2f}x" if ours and timed else None,
                row.get("peak_gib"),
                "; ".join(filter(None, notes)),
            ]
        )
    columns = ["baseline", "recomputes", "longest", "tokens/s", "ours is", "peak GiB", "note"]
    return "\n\n".join(
        [
            f"### {title}",
            heading(record["environment"]),
            f"`{record['environment']['command']}`",
            table(columns, lines),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
