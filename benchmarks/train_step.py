"""Training of a whole model: tokens/s and peak memory of ours beside transformers, Liger, PEFT, torch.compile.

    python -m benchmarks.train_step --case llama-1b,llama-8b --out result.json
    python -m benchmarks.train_step --case gemma-2-2b --baselines ligermodels,hf+liger:none
    python -m benchmarks.train_step --case llama-8b-lora,llama-8b-qlora --scratch /dev/shm
    python -m benchmarks.train_step --longest 24 --recompute block     # the longest sequence that trains in 24 GiB
    python -m benchmarks.train_step --case gemma-2-2b --dry

A baseline is `ligermodels` with any of +adamw (our AdamW in place of torch's), +in_backward (our AdamW, stepping in the
backward), +8bit_moments (of our AdamW), +captured (the step is one CUDA graph), +in_place (micro-batches add to the
gradients in the GEMM), +offload (what is saved for backward goes to the host), and +rowwise, +tensorwise or
+rowwise_bf16_dw (products in FP8 by that recipe), or `hf`, which is transformers, with any of +liger, +compile (the
whole model) or +compile_blocks (each block and the loss, so that one block is compiled), and +ao_rowwise,
+ao_tensorwise or +ao_rowwise_with_gw_hp (torchao's FP8); with +flex its attention is flex_attention. Its gated delta
rule is PyTorch's, or with +fla that of fla in Triton, with +tilelang in Triton and TileLang, with +flashqla FlashQLA's.
Or it is `unsloth`, with its own recomputation, `unsloth:block`, whose inputs go to the host with
`unsloth+offload:block`; see benchmarks/train_unsloth.py.

Each takes +lora, adapters of rank 16 on all linear modules of a frozen model, or +nf4, the same on a model in 4 bits
(QLoRA): ours by `load_adapter`, or with +peft by PEFT, `hf`'s by PEFT and bitsandbytes, unsloth's by its own functions,
from one file that PEFT wrote. +mxfp4 is ours over experts in MXFP4, and the rest in bf16; +lora+fp8 over a base in FP8.
Around peers PEFT runs as in TRL: under autocast to bf16, adapters in fp32; on 4 bits bf16. Recomputation other than the
case's stands after a colon: `ligermodels:mlp`, `hf+liger:none`, `ligermodels:block*27`, which is that of the first 27
blocks.

Every baseline runs in a fresh process, so that neither patches nor memory leak from one to the next, and loads the same
checkpoint, which transformers wrote; a large one that none must read from files is drawn by each, on the device, from
seeds that are the names of its tensors. Before it is timed it must agree with transformers in fp32 on a shallow model
of the same widths: logits, loss and gradient norm. One that does not agree gets no figures; if it is ours, the exit
status is 1. The steps are on random tokens, the same for all, and loss and gradient norm of the first must agree as
well.
What is in FP8 may err by FP8_FACTOR times as much.
"error / bf16's" is the error of the shallow model's logits over that of transformers in bf16. "kept KiB a token": what
a forward keeps for the backward, where adapters are trained.
"""

import argparse
import copy
import dataclasses
import importlib.util
import itertools
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from benchmarks import harness, train_unsloth
from benchmarks.harness import GIB, Record, Row
from benchmarks.train_cases import ALPHA, CASES, MODELS, RANK, Case, batches_of, changed, theirs

LEARNING_RATE, WARMUP = 1e-5, 3
ADAPTERS = ("lora", "nf4", "mxfp4")
FP8 = ("rowwise", "tensorwise", "rowwise_bf16_dw", "fp8")
TORCHAO = ("ao_rowwise", "ao_tensorwise", "ao_rowwise_with_gw_hp")
FP8_FACTOR = 32
"""Numbers in e4m3 have 4 bits less than those in bf16, 16 times the error; both operands of each product are rounded,
where the inputs of a bf16 product are exact: 1.4 times that; and a quarter more for the gradients in e5m2."""
DELTA_RULES = ("fla", "tilelang", "flashqla")
OPTIONS = {
    "ligermodels": ("adamw", "in_backward", "8bit_moments", "captured", "in_place", "offload", "peft", *FP8, *ADAPTERS),
    "hf": ("liger", "compile", "compile_blocks", "flex", *TORCHAO, *DELTA_RULES, "lora", "nf4"),
    "unsloth": ("offload", "lora", "nf4"),
}
NEEDS_GPU = {"unsloth", "liger", "compile", "compile_blocks", "flex", "captured", *TORCHAO, *DELTA_RULES}
EXPERTS = "gate_up_proj", "down_proj"
"""Stacked weights of `mlp.experts` in transformers, to which PEFT adds adapters too."""
UNSCALED = ("gemma4_text",)
"""Model types that norm q and k and do not scale their products. With the weights of a new model, 1, a score then has a
deviation of sqrt(D), and a softmax that all but chooses one key, whose gradient bf16 rounds by percents."""
ADAPTER_B = 0.1
"""Standard deviation of B. PEFT sets it to 0: parity would not see the adapters, nor A get a gradient."""


@dataclasses.dataclass(frozen=True)
class Settings(Case):
    """A case as it runs: with the options of the command line.

    longest: GiB, for the longest sequence in them, of which `least` tokens are tried first. folder: for checkpoints.
    unsloth_path: the folder of unsloth's packages, or "" if they are installed.
    """

    dry: bool = False
    longest: float | None = None
    least: int = 0
    folder: str = ""
    unsloth_path: str = ""

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    @property
    def config(self) -> dict[str, Any]:
        found = changed(MODELS[self.model].config, MODELS[self.model].tiny if self.dry else {})
        if self.longest is not None:  # the angles of no model here depend on where it says that it ends
            found = {**found, "max_position_embeddings": 2**22}
        return found


@dataclasses.dataclass(frozen=True)
class Baseline:
    """A baseline, read from its name. base: a key of OPTIONS. blocks: the first, which are recomputed, or all."""

    base: str
    options: frozenset[str]
    recompute: str
    blocks: int | None

    @property
    def ours(self) -> bool:
        return self.base == "ligermodels"

    @property
    def adapters(self) -> str:
        """What is trained: "lora", "nf4" or "mxfp4", adapters on a model in bf16, in 4 bits, or with experts in 4 bits;
        or "", all weights."""
        return max(self.options & {*ADAPTERS}, default="", key=ADAPTERS.index)  # 4 bits before "lora"

    @property
    def reads_files(self) -> bool:
        """Whether it loads a checkpoint from files alone."""
        in_4_bits = self.adapters == "nf4" and not self.ours
        return self.base == "unsloth" or in_4_bits or bool(self.options & {*FP8})

    @property
    def fp8_factor(self) -> int:
        """How many times the errors of bf16 are allowed."""
        return FP8_FACTOR if self.options & {*FP8, *TORCHAO} else 1

    @classmethod
    def of(cls, name: str, settings: Case) -> Self:
        """Raises ValueError for a name that is unknown, or that the case cannot run."""
        kind, _, own = name.partition(":")
        base, *options = kind.split("+")
        policies = ("none", "block", "mlp") if base == "ligermodels" else ("none", "block")
        recompute, _, blocks = (own or settings.recompute).partition("*")
        fits = base in OPTIONS and set(options) <= set(OPTIONS[base]) and recompute in policies
        if not fits or (blocks and base != "ligermodels"):
            known = "; ".join(f"{base} with any of +{', +'.join(known)}" for base, known in OPTIONS.items())
            raise ValueError(f"unknown baseline {name!r}; known: {known}; and :none, :block, or of ours :mlp after it")
        if len({*options} & {*FP8, *TORCHAO}) > 1 or ("fp8" in options and "lora" not in options):
            raise ValueError(f"{name}: one recipe of FP8, or +lora+fp8")
        found = cls(base, frozenset(options), recompute, int(blocks) if blocks else None)
        if base == "unsloth" and "offload" in options and recompute != "block":
            raise ValueError(f"{name}: what unsloth offloads is what it recomputes blocks from: unsloth+offload:block")
        if found.adapters == "nf4" and MODELS[settings.model].config["model_type"] == "gpt_oss":
            raise ValueError(f"{name}: there is no reference of these experts in NF4, whose order is another on disk")
        return found


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--case", type=harness.names(*CASES), default="llama-1b", help=f"all, or of {', '.join(CASES)}")
    parser.add_argument("--baselines", help="with commas between them; default the case's")
    parser.add_argument("--recompute", choices=("none", "block"), help="of all who do not name their own")
    parser.add_argument("--steps", type=int, help="timed steps, of which the median counts")
    parser.add_argument("--accumulation", type=int, help="micro-batches a step")
    parser.add_argument("--longest", type=float, metavar="GIB", help="measure the longest sequence that trains in GIB")
    parser.add_argument("--least", type=int, default=0, help="tokens that --longest tries first")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that a baseline may take")
    parser.add_argument("--scratch", help="where checkpoints are written for the run, e.g. /dev/shm")
    parser.add_argument(
        "--unsloth-path", metavar="FOLDER", help="with the packages of unsloth, for its baselines alone"
    )


def measure(options: argparse.Namespace, record: Record) -> None:
    chosen = {name: settings_of(name, options) for name in options.case}
    record["red"] = red = []
    with tempfile.TemporaryDirectory(dir=options.scratch, prefix="train_step-") as scratch:
        for name, settings in chosen.items():
            # the checkpoint of a model is written once for cases in a row
            folder = Path(scratch, settings.model)
            for other in set(Path(scratch).iterdir()) - {folder}:
                shutil.rmtree(other)
            folder.mkdir(exist_ok=True)
            settings = dataclasses.replace(settings, folder=str(folder))
            what = f"in {settings.longest:g} GiB" if settings.longest else f"{settings.batch} x {settings.seq}"
            record[f"{name}: {settings.model}, {what}"] = rows = list[Row]()
            measure_case(settings, options.timeout, rows)
            figure = "length" if settings.longest else "tokens/s"
            names = [Baseline.of(row["baseline"], settings) for row in rows]
            for row, named in zip(rows, names, strict=True):
                alike = [other for other, n in zip(rows, names, strict=True) if n.ours and n.adapters == named.adapters]
                if figure in row and alike and figure in alike[0]:
                    row["ours is"] = f"{alike[0][figure] / row[figure]:.2f}x"
                if named.ours and "note" in row:
                    red.append(f"{name}, {row['baseline']}: {row['note']}")


def settings_of(name: str, options: argparse.Namespace) -> Settings:
    """The case with the options of the command line. Raises ValueError for an unknown baseline."""
    passed = ("recompute", "steps", "accumulation", "longest", "least", "dry", "unsloth_path")
    given = {key: getattr(options, key) for key in passed}
    if options.dry:
        given |= {"batch": 2, "seq": 64, "steps": 2}
    if options.baselines:
        given["baselines"] = tuple(options.baselines.split(","))
    given = {**dataclasses.asdict(CASES[name]), **{key: value for key, value in given.items() if value is not None}}
    settings = Settings(**given)
    named = {baseline: Baseline.of(baseline, settings) for baseline in settings.baselines}
    left_out = {*(NEEDS_GPU if options.dry else ()), *(() if settings.longest is None else ("unsloth",))}
    if not options.baselines:
        named = {name: known for name, known in named.items() if not left_out & {known.base, *known.options}}
    elif settings.longest is not None and any(known.base == "unsloth" for known in named.values()):
        raise ValueError("--longest: unsloth cuts off what is longer than the length that it was loaded for")
    return dataclasses.replace(settings, baselines=tuple(named))


def measure_case(settings: Settings, timeout: float, rows: list[Row]) -> None:
    """Adds the rows of a case: every baseline in a process of its own, one after the other."""
    # for everyone, where the longest sequence counts: what is lost between tensors would decide otherwise
    if settings.longest:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    for baseline in ("prepare", *settings.baselines):
        job = {"baseline": baseline, **dataclasses.asdict(settings)}
        is_unsloth = baseline.startswith("unsloth")
        variables = train_unsloth.variables(settings.unsloth_path, settings.folder) if is_unsloth else {}
        row = {"baseline": baseline, **harness.spawn("train_step", job, timeout, **variables)}
        if baseline != "prepare":
            rows.append(row)
            harness.announce(row)
        elif "note" in row:
            raise SystemExit(f"transformers could not write the checkpoint: {row['note']}")
    compare_first_steps(rows, settings)


def work(job: dict[str, Any]) -> Row:
    """In the process of one baseline, or of "prepare"."""
    name = job.pop("baseline")
    settings = Settings(**job)
    choose_delta_rule(set(name.split(":")[0].split("+")))
    if name == "prepare":
        prepare(settings)
        return {}
    baseline = Baseline.of(name, settings)
    row: Row = {"recompute": baseline.recompute}
    if baseline.base == "unsloth":
        if not train_unsloth.is_installed():
            return {**row, "note": "unsloth is not installed"}
        row["versions"] = train_unsloth.versions()
    if not baseline.ours and baseline.adapters == "nf4" and importlib.util.find_spec("bitsandbytes") is None:
        return {**row, "note": "bitsandbytes is not installed"}
    wrong, row["error / bf16's"] = parity(baseline, settings)
    if wrong:
        return {**row, "note": "; ".join(wrong)}
    model = build(baseline, settings, Path(settings.folder, "model"))
    optimizer = optimizer_of(baseline, model)
    if settings.longest is None:
        return row | time_steps(baseline, settings, model, optimizer)
    return row | longest(baseline, settings, model, optimizer)


# The baselines


def choose_delta_rule(options: set[str]) -> None:
    """Lets transformers find the gated delta rule that a baseline names, or none but its own, and fla its backend.

    Before transformers is imported, which looks for fla then. unsloth brings its own copy of fla.
    """
    os.environ["FLA_TILELANG"] = str(int("tilelang" in options))
    os.environ["FLA_FLASH_QLA"] = str(int("flashqla" in options))
    if options & {*DELTA_RULES}:
        importlib.import_module("fla.ops.gated_delta_rule")  # transformers would take its own without a word
    elif "unsloth" not in options:
        sys.modules["fla"] = None  # type: ignore[assignment]  # an import raises


def build(baseline: Baseline, settings: Settings, folder: Path) -> nn.Module:
    """The baseline's model with the checkpoint's weights in bf16, ready to train."""
    builders = {"ligermodels": build_ours, "hf": build_theirs, "unsloth": build_unsloth}
    return builders[baseline.base](baseline, settings, folder)


def build_ours(baseline: Baseline, settings: Settings, folder: Path) -> nn.Module:
    import ligermodels
    from ligermodels.training import lora

    adapters: Path | None = adapters_of(folder) if baseline.adapters else None
    in_4_bits = baseline.adapters if baseline.adapters in ("nf4", "mxfp4") else None
    if is_drawn(folder):
        model: Any = drawn_ours(settings, in_4_bits)
    else:
        options: dict[str, Any] = {"quantization_config": in_4_bits}
        if recipe := baseline.options & {*FP8}:
            name = next(iter(recipe)).replace("_", "-")
            options = {"quantization_config": "fp8"} if name == "fp8" else {"fp8": name}
        model = ligermodels.load(folder, dtype=torch.bfloat16, device=settings.device, progress=False, **options)
    if "peft" in baseline.options:
        return importlib.import_module("peft").PeftModel.from_pretrained(model, adapters, is_trainable=True).train()
    if adapters is not None:
        lora.load_adapter(model, adapters)
    if baseline.recompute != "none" or "offload" in baseline.options:
        policy: dict[str, Any] = {"recompute": baseline.recompute, "offload": "offload" in baseline.options}
        if baseline.blocks is not None:
            policy["blocks"] = min(baseline.blocks, model.config.num_hidden_layers)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=policy)
    return model.train()


def build_theirs(baseline: Baseline, settings: Settings, folder: Path) -> nn.Module:
    attention = "flex_attention" if "flex" in baseline.options else MODELS[settings.model].attention
    options: dict[str, Any] = {"attn_implementation": attention}
    if not settings.dry:  # read onto the GPU by accelerate, with no copy of the whole model in the host's memory
        options["device_map"] = {"": 0}
    if baseline.adapters == "nf4":
        from transformers import BitsAndBytesConfig

        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,  # as ours by default
            bnb_4bit_compute_dtype=torch.bfloat16,
        )  # fmt: skip
    from transformers import AutoModelForCausalLM

    if is_drawn(folder):
        model: Any = drawn_theirs(settings, attention).train()
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options).train()
    model.config.use_cache = False
    if "liger" in baseline.options:
        patches = importlib.import_module("liger_kernel.transformers")
        kind = f"apply_liger_kernel_to_{model.config.model_type}"
        (getattr(patches, kind, None) or getattr(patches, kind.removesuffix("_text")))(model=model)
    if recipe := baseline.options & {*TORCHAO}:
        float8 = importlib.import_module("torchao.float8")
        config = float8.Float8LinearConfig.from_recipe_name(next(iter(recipe)).removeprefix("ao_"))
        float8.convert_to_float8_training(
            model, config=config, module_filter_fn=lambda module, name: "lm_head" not in name and "layers" in name
        )
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
    if "compile_blocks" in baseline.options:
        for block in model.model.layers:
            block.compile(dynamic=False)
        model.loss_function = torch.compile(model.loss_function, dynamic=False)
    return model


def build_unsloth(baseline: Baseline, settings: Settings, folder: Path) -> nn.Module:
    checkpointing = "unsloth" if "offload" in baseline.options else baseline.recompute == "block"
    model = train_unsloth.load(
        folder, settings.config, adapters_of(folder) if baseline.adapters else None, baseline.adapters == "nf4",
        settings.seq, checkpointing, settings.device,
    )  # fmt: skip
    return as_trl_runs(model, settings) if baseline.adapters else model.train()


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


class Drawn:
    """A checkpoint, as `weights.Reader` says, that is on no disk: tensors are drawn when they are read, on a device.

    The seed of a tensor is its name's, so that all who read it get the same. Biases are 0, other vectors 1, and all the
    rest has a standard deviation of 0.02. UNSCALED: see `_scale_scores`. model: ours, for names and shapes; it may be
    on meta.
    """

    source = "the drawn checkpoint"

    def __init__(self, model: Any, device: str):
        from ligermodels.checkpoint import weights

        shapes = {name: weight.shape for name, weight in weights.named_weights(model)}
        self.headers = {
            region.source: weights.TensorInfo(torch.bfloat16, region.shape(shapes[region.param]))
            for region in weights.regions(model, model.names_on_disk.table)
        }
        self.generator, self.unscaled = torch.Generator(device), model.config.model_type in UNSCALED

    def read(self, name: str) -> Tensor:
        info, generator = self.headers[name], self.generator
        tensor = torch.empty(info.shape, dtype=info.dtype, device=generator.device)
        if self.unscaled and name.endswith("q_norm.weight"):
            return tensor.fill_(len(tensor) ** -0.5)
        if len(info.shape) == 1:
            return tensor.fill_(0.0 if name.endswith("bias") else 1.0)
        return tensor.normal_(0.0, 0.02, generator=generator.manual_seed(zlib.crc32(name.encode())))


def is_drawn(folder: Path) -> bool:
    """Whether there is no checkpoint in `folder`, so that each baseline draws its weights."""
    return not (folder / "config.json").exists()


def drawn_ours(settings: Settings, quantized: str | None = None) -> Any:
    """Our model of the drawn checkpoint, quantised as `ligermodels.load(quantization_config=quantized)` does."""
    import ligermodels
    from ligermodels.checkpoint import quantization, weights

    arch, options = ligermodels.ARCHS[settings.config["model_type"]], {"dtype": torch.bfloat16, "device": "meta"}
    model = arch.from_config(settings.config, **options)
    reader, device = Drawn(model, settings.device), torch.device(settings.device)
    if quantized is None:
        weights.load(model, model.names_on_disk, reader, device=device, progress=False)
    else:
        quantizer = quantization.quantizer_of(quantized)
        quantization.load(model, model.names_on_disk, reader, quantizer, device=device, progress=False)
    return model


@torch.no_grad()
def drawn_theirs(settings: Settings, attention: str) -> nn.Module:
    """transformers' model of the drawn checkpoint. Raises ValueError where it names its weights otherwise in memory."""
    import ligermodels
    from ligermodels.checkpoint.weights import named_weights

    arch = ligermodels.ARCHS[settings.config["model_type"]]
    reader = Drawn(arch.from_config(settings.config, device="meta"), settings.device)
    model = theirs(settings.model, settings.device, torch.bfloat16, settings.config, attention)
    state = dict(named_weights(model))
    if differ := sorted(state.keys() ^ reader.headers.keys()):
        raise ValueError(f"{settings.model} is drawn by the names on disk, and transformers has others: {differ[0]}")
    for name in reader.headers:
        state[name].copy_(reader.read(name))
    return model


def optimizer_of(baseline: Baseline, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW on what is trained, with states in the weights' dtype."""
    captured, in_backward = "captured" in baseline.options, "in_backward" in baseline.options
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    moments = torch.uint8 if "8bit_moments" in baseline.options else None
    if in_backward or moments or "adamw" in baseline.options:
        from ligermodels.training import AdamW

        options = dict(step_in_backward=in_backward, capturable=captured, state_dtype=moments)
        return AdamW(trained, lr=LEARNING_RATE, **options)
    return torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True, capturable=captured)


def step_of(
    baseline: Baseline, model: nn.Module, optimizer: torch.optim.Optimizer, example: Mapping[str, Tensor],
    accumulation: int,
) -> Callable[..., Tensor]:  # fmt: skip
    """A function of the model's inputs that trains one step on them, `accumulation` times the same, and returns the
    loss."""
    if "captured" in baseline.options:
        from ligermodels.training import CapturedStep

        return CapturedStep(model, optimizer, **example)

    if "in_place" in baseline.options:
        from ligermodels.training import accumulate_in_place

        accumulate_in_place(model)

    def step(**inputs: Tensor) -> Tensor:
        for _ in range(accumulation):
            loss = model(**inputs)["loss"]
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


# Parity

PARITY_LOGITS, PARITY_DRAWS = 64, 4
"""Number of last positions whose logits are compared, and of sequences over which the bf16 error of transformers is
averaged."""
SHARP_SCORES = 8.0
"""Standard deviation of the attention scores of the parity model. In a newly initialised model it is below 1: all keys
weigh the same, so that a missing window or softcap would not show."""
LOGITS_FACTOR, PEERS_LOGITS_FACTOR = 1.25, 4.0
"""Allowed error of the logits, over that of transformers in bf16. Ours rounds at other places, no more often; a peer
may be less exact, and only has to be the same model."""
RELATIVE = 2**-8
"""Allowed relative error of loss and gradient norm, beside three times that of transformers in bf16: one bf16 rounding.
Both average over roundings, so that right models agree more closely; a wrong rotation, mask or residual changes the
norm by percents."""


def prepare(settings: Settings) -> None:
    """Writes the checkpoints `model` and `parity`, their adapters if a baseline needs them, and the results of
    transformers in fp32 on `parity`. A `model` that an earlier case wrote is kept."""
    case, folder, device = MODELS[settings.model], Path(settings.folder), settings.device
    baselines = [Baseline.of(name, settings) for name in settings.baselines]
    kinds = {baseline.adapters for baseline in baselines}
    wanted = [folder / "model", *([adapters_of(folder / "model")] if any(kinds) else [])]
    if case.drawn and not any(baseline.reads_files for baseline in baselines):
        if any(kinds) and not wanted[1].exists():
            _with_adapters(theirs(settings.model, "meta", torch.bfloat16, settings.config), wanted[1])
    elif not all(path.exists() for path in wanted):
        model = theirs(settings.model, device, torch.bfloat16, settings.config)
        _scale_scores(model, 1.0)
        model.save_pretrained(folder / "model", max_shard_size="4GB")  # the host has a copy of one file
        if any(kinds):
            _with_adapters(model, adapters_of(folder / "model"))
        del model
        harness.free(device)
    model = theirs(
        settings.model, device, torch.bfloat16, changed(settings.config, {} if settings.dry else case.shallow)
    )
    _sharpen(model)
    model.save_pretrained(folder / "parity")
    for kind in sorted(kinds):
        found = copy.deepcopy(model)
        if kind:
            adapted = _with_adapters(found, adapters_of(folder / "parity"))
            if kind in ROUNDINGS:
                ROUNDINGS[kind](adapted)
            found = as_trl_runs(adapted, settings)
        draws = parity_inputs(settings)
        in_bf16 = [probe(found.train(), inputs) for inputs in draws]
        found.__dict__.pop("forward", None)  # autocast
        exact = [probe(found.float(), inputs) for inputs in draws]
        pairs = list(zip(in_bf16, exact, strict=True))
        errors = {"logits": statistics.mean(typical_error(a["logits"], b["logits"]) for a, b in pairs)}
        for name in ("loss", "gradient_norm"):
            errors[name] = statistics.mean((a[name] - b[name]) ** 2 for a, b in pairs) ** 0.5
        torch.save([{"exact": one, "errors_in_bf16": errors} for one in exact], folder / f"parity-{kind}.pt")
        del found
        harness.free(device)


def parity_inputs(settings: Settings) -> list[dict[str, Tensor]]:
    return batches_of(
        settings.config,
        PARITY_DRAWS,
        1,
        min(settings.seq, MODELS[settings.model].parity_length),
        settings.device,
        seed=1,
    )


def _with_adapters(model: nn.Module, folder: Path) -> Any:
    """PEFT's model around a model of transformers, with adapters drawn at random, which it writes to `folder`."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    experts = [
        n
        for n in (f"mlp.experts.{weight}" for weight in EXPERTS)
        if f"model.layers.0.{n}" in dict(model.named_parameters())
    ]
    options = LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules="all-linear", target_parameters=experts or None, lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    adapted: Any = get_peft_model(model, options)
    for name, module in adapted.named_modules():
        if ".lora_" in name and isinstance(module, nn.Linear) and module.weight.is_meta:  # as the model is
            module.to_empty(device="cpu").reset_parameters()
    _draw_b(adapted)
    adapted.save_pretrained(folder, save_embedding_layers=False)
    return adapted


@torch.no_grad()
def _round_to_nf4(adapted: nn.Module) -> None:
    """Rounds the weights under the adapters to 4 bits. The result, in bf16, is the reference of QLoRA.

    Our 4-bit bytes are those of bitsandbytes (tests/tools/test_nf4.py), which need not be installed for this.
    """
    from ligermodels.kernels.linear.nf4 import quantize_nf4

    for name, weight in adapted.named_parameters():
        if ".experts." in name and name.endswith(EXPERTS):  # [E, out, in]; gate and up are two matrices
            parts = 2 * len(weight) if "gate_up" in name else len(weight)
            for matrix in weight.view(parts, -1, weight.shape[-1]):
                matrix.copy_(quantize_nf4(matrix.clone()).dequantize())
        elif name.endswith(".base_layer.weight") and not name.endswith(".gate.base_layer.weight"):  # a router stays
            weight.copy_(quantize_nf4(weight.detach()).dequantize())


@torch.no_grad()
def _round_to_mxfp4(adapted: nn.Module) -> None:
    """Rounds the experts under the adapters, [E, in, out], to MXFP4, whose blocks lie along `in`."""
    from ligermodels.kernels.linear.mxfp4 import quantize_mxfp4

    for name, weight in adapted.named_parameters():
        if name.endswith(EXPERTS) and ".experts." in name:
            weight.copy_(quantize_mxfp4(weight.detach().mT.contiguous()).dequantize().mT)


ROUNDINGS = {"nf4": _round_to_nf4, "mxfp4": _round_to_mxfp4}
"""Of the frozen weights, by what is trained."""


@torch.no_grad()
def _sharpen(model: nn.Module) -> None:
    """Draws the weights of q and k so that scores have a deviation of SHARP_SCORES, all biases, and sinks, as large as
    the larger scores."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_()
        elif name.endswith(".sinks"):
            parameter.normal_(2.5 * SHARP_SCORES, SHARP_SCORES)
        elif any(f".{part}_proj." in name for part in ("q", "k", "qkv")):
            rows = len(parameter)
            if ".qkv_proj." in name:
                heads, kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
                rows = rows * (heads + kv_heads) // (heads + 2 * kv_heads)
            # Of normed inputs, q and k then have a deviation of SHARP_SCORES ** 0.5, and q k / sqrt(D) its square.
            parameter[:rows].normal_(0, (SHARP_SCORES / parameter.shape[1]) ** 0.5)
    _scale_scores(model, SHARP_SCORES)


@torch.no_grad()
def _scale_scores(model: nn.Module, deviation: float) -> None:
    """Of UNSCALED, sets the weight of q's norm so that scores have this deviation."""
    for name, parameter in model.named_parameters() if model.config.model_type in UNSCALED else ():
        if name.endswith("q_norm.weight"):
            parameter.fill_(deviation * len(parameter) ** -0.5)


def parity(baseline: Baseline, settings: Settings) -> tuple[list[str], float]:
    """(how the baseline differs from transformers in fp32 on the shallow model, empty if they agree; the error of its
    logits over that of transformers in bf16).

    They must agree on more than half of the sequences: the bf16 gradient of a single sequence may be far off, whoever
    computes it, while a wrong model is wrong on all of them.
    """
    folder = Path(settings.folder)
    model = build(baseline, settings, folder / "parity")
    draws = parity_inputs(settings)
    expected = torch.load(folder / f"parity-{baseline.adapters}.pt", map_location=settings.device)
    factor = LOGITS_FACTOR if baseline.ours else PEERS_LOGITS_FACTOR
    probes = [probe(model, inputs) for inputs in draws]
    times = baseline.fp8_factor
    found = [disagreement(here, one, factor * times, times) for here, one in zip(probes, expected, strict=True)]
    errors = [
        typical_error(here["logits"], one["exact"]["logits"]) / max(one["errors_in_bf16"]["logits"], 1e-30)
        for here, one in zip(probes, expected, strict=True)
    ]
    del model
    torch.compiler.reset()
    harness.free(settings.device)
    wrong = [reasons for reasons in found if reasons]
    return wrong[0] if 2 * len(wrong) >= len(found) else [], statistics.median(errors)


def probe(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Logits of the last positions, loss and gradient norm of one forward and backward."""
    output = model(**inputs)
    output["loss"].backward()
    norms = [p.grad.float().norm() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    logits = output.get("logits")
    if not isinstance(logits, Tensor) or not logits.numel():  # a fused loss does not make them
        with torch.no_grad():
            logits = model(**{name: x for name, x in inputs.items() if name != "labels"}, use_cache=False).logits
    logits = logits[:, -PARITY_LOGITS:].detach().to(torch.float32, copy=True)  # a view would hold them all
    return {"logits": logits, "loss": output["loss"].item(), "gradient_norm": torch.stack(norms).norm().item()}


def disagreement(
    found: Mapping[str, Any], expected: Mapping[str, Any], logits_factor: float, times: int = 1
) -> list[str]:  # fmt: skip
    """How the results `found` differ from those that `prepare` wrote; empty if they agree. times: how many times the
    errors of bf16 loss and gradient norm may have."""
    exact, errors, reasons = expected["exact"], expected["errors_in_bf16"], []
    error, allowed = typical_error(found["logits"], exact["logits"]), logits_factor * errors["logits"]
    if not error <= allowed:
        reasons.append(f"logits err by {error:.3e} against fp32, allowed {allowed:.3e}")
    for name in ("loss", "gradient_norm"):
        allowed = times * (RELATIVE * abs(exact[name]) + 3 * errors[name])
        if not abs(found[name] - exact[name]) <= allowed:
            reasons.append(f"{name} is {found[name]:.6g}, in fp32 {exact[name]:.6g}, allowed {allowed:.2g} off")
    return reasons


def typical_error(logits: Tensor, exact: Tensor) -> float:
    """The rms error over the vocabulary, and of that the median over positions [1, S, V]; NaN if any is NaN.

    The median, because a token that bf16 sends to another expert than fp32 does is far off, whoever computes it.
    """
    return (logits.double() - exact.double()).square().mean(-1).sqrt().median().item()


def compare_first_steps(rows: Sequence[Row], settings: Case) -> None:
    """Compares step 1 at full depth with that of the plainest `hf` that trains the same parameters.

    Both have the same weights and batch. A row that does not agree loses its figures and gets a note.
    """
    timed = [(Baseline.of(row["baseline"], settings), row) for row in rows if "losses" in row]
    for baseline, row in timed:
        peers = [(peer.options, x) for peer, x in timed if peer.base == "hf" and peer.adapters == baseline.adapters]
        if not peers:
            continue
        _, reference = min(peers, key=lambda found: len(found[0]))
        for name, found, expected in (
            ("loss", row["losses"][0], reference["losses"][0]),
            ("gradient norm", row["first gradient norm"], reference["first gradient norm"]),
        ):
            if not abs(found - expected) <= 2 * RELATIVE * baseline.fp8_factor * abs(
                expected
            ):  # both are bf16 and err by one rounding each
                row["note"] = f"{name} of step 1 is {found:.6g}, {reference['baseline']} has {expected:.6g}"
                row.pop("tokens/s", None)


def first_gradient_norm(optimizer: torch.optim.Optimizer) -> float:
    """Of the gradients of AdamW's first step, whose first moments are (1 - beta1) gradient.

    The gradients are gone by then, where they are stepped on in the backward, or lie in a graph's memory.
    """
    norms = []
    for group in optimizer.param_groups:
        for state in (optimizer.state[p] for p in group["params"] if "exp_avg" in optimizer.state[p]):
            moment = state["exp_avg"]
            if moment.dtype == torch.uint8:
                from ligermodels.kernels.optimizer import eight_bits

                moment = eight_bits.decode(moment, state["exp_avg_exponents"], eight_bits.MOMENT)
            norms.append(moment.float().norm() / (1 - group["betas"][0]))
    return torch.stack(norms).norm().item()


# Measurements


def time_steps(baseline: Baseline, settings: Settings, model: nn.Module, optimizer: torch.optim.Optimizer) -> Row:
    """Losses, tokens/s from the median of the timed steps, and their peak memory."""
    device = settings.device
    inputs = batches_of(settings.config, WARMUP + settings.steps, settings.batch, settings.seq, device)
    row: Row = {}
    if baseline.adapters and "offload" not in baseline.options and device == "cuda":
        model(**inputs[0])  # which may make lasting buffers
        before = torch.cuda.memory_allocated()
        loss: Any = model(**inputs[0])["loss"]
        row["kept KiB a token"] = (torch.cuda.memory_allocated() - before) / inputs[0]["input_ids"].numel() / 1024
        del loss
    step = step_of(baseline, model, optimizer, inputs[0], settings.accumulation)
    losses, marks, first_norm = [], [], 0.0
    for n, batch in enumerate(inputs):
        if n == WARMUP:
            harness.reset_peak(device)
            marks.append(_mark(device))
        losses.append(step(**batch))
        if n == 0:
            first_norm = first_gradient_norm(optimizer)
        if n >= WARMUP:
            marks.append(_mark(device))
    harness.synchronize(device)
    if device == "cuda":
        times = [start.elapsed_time(end) for start, end in itertools.pairwise(marks)]
    else:
        times = [(end - start) * 1e3 for start, end in itertools.pairwise(marks)]
    tokens = settings.batch * settings.seq * settings.accumulation
    row |= {
        "tokens/s": tokens / statistics.median(times) * 1e3, "peak GiB": harness.peak_gib(device),
        "first gradient norm": first_norm, "losses": torch.stack(losses).tolist(), "ms a step": times,
    }  # fmt: skip
    if device == "cuda" and (pinned := torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0) / GIB) > 0.1:
        row["pinned GiB of the host"] = pinned
    return row


def _mark(device: str) -> Any:
    """A point in time on the device's clock, without a synchronisation: steps stay queued, as in training."""
    if device != "cuda":
        return time.perf_counter()
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark


def longest(baseline: Baseline, settings: Settings, model: nn.Module, optimizer: torch.optim.Optimizer) -> Row:
    """The longest sequence that trains in settings.longest GiB, to within 1024 tokens or a 32nd, and its tokens/s.

    Each trial is reported, so that the result so far is known if the search runs out of time.
    """
    device = settings.device
    if device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (settings.longest or 0.0) * GIB / total))
    step = step_of(baseline, model, optimizer, {}, 1)
    found: Row = {}

    def fits(length: int) -> bool:
        try:
            (inputs,) = batches_of(settings.config, 1, 1, length, device)
            harness.reset_peak(device)
            for _ in range(2):  # the second without compiling, and with the optimizer's states in memory
                seconds, _ = harness.timed(lambda inputs=inputs: step(**inputs), device)
                if seconds > 5:  # a second one says no more
                    break
        except RuntimeError as error:  # torch.OutOfMemoryError is one, and so are those of cuBLAS and cuDNN
            if not re.search("out of memory|alloc_failed", str(error), re.IGNORECASE):
                raise
            return False
        finally:
            inputs = {}
            optimizer.zero_grad(set_to_none=True)
            harness.free(device)
        found.update({"length": length, "tokens/s": length / seconds, "peak GiB": harness.peak_gib(device)})
        harness.report(found)
        return True

    grain, most = (1024, 2**21) if device == "cuda" else (32, 96)
    low, high = 0, max(grain, settings.least)
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + grain)
    while high - low > max(grain, low // 32):
        middle = (low + high) // 2 // grain * grain
        low, high = (middle, high) if fits(middle) else (low, middle)
    return found or {"note": f"not even {grain} tokens fit"}


def main(arguments: Sequence[str] | None = None) -> int:
    return harness.main(__doc__, arguments, add_options, measure, work)


if __name__ == "__main__":
    sys.exit(main())
