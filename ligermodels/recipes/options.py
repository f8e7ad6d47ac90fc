"""The options of each recipe: a dataclass, of which the flags of the command line and the keys of YAML are made.

The command line wins over the file, and the file over the defaults. `dump` writes what a run had, for `load` to read.
Nothing here imports torch.
"""

import argparse
import dataclasses
import difflib
import json
import math
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ligermodels.errors import InputError
from ligermodels.recipes import other_tools

_REQUIRED = ("model", "data", "output_dir")


_SCHEDULES = ("cosine", "linear", "wsd", "constant_with_warmup")


def option(
    default: Any,
    group: str,
    text: str,
    *,
    choices: Iterable[str] = (),
    least: float = -math.inf,
    above: float = -math.inf,
    below: float = math.inf,
    alias: str = "",
) -> Any:
    """A field of options. text: for --help. least, above, below: bounds of a number, of which only least is allowed.

    alias: a second, shorter name, which is read but not written.
    """
    metadata = dict(group=group, text=text, choices=tuple(choices), least=least, above=above, below=below, alias=alias)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(kw_only=True)
class TrainOptions:
    """What every recipe has. Values are checked when one is made; raises InputError."""

    recipe: typing.ClassVar[str]
    sequences: typing.ClassVar[int] = 1
    """Sequences per example, each of at most `max_length` tokens."""
    model: str = option("", "what", "repository on the Hub, or folder of a checkpoint")
    data: str = option(
        "",
        "what",
        "the examples: JSONL, JSON, CSV or Parquet, a folder of them, or OWNER/NAME[:SPLIT] of the Hub",
    )
    output_dir: str = option(
        "", "what", "a new folder for checkpoints, metrics, the report and the tuned model", alias="out"
    )

    eval_data: str | None = option(None, "data", "examples to evaluate on, as --data")
    eval_share: float = option(0.0, "data", "fraction of --data that is held out to evaluate on", least=0, below=1)
    max_length: int | None = option(
        None,
        "data",
        "maximum sequence length in tokens (default 4096, or the model's context where that is less)",
        least=2,
        alias="length",
    )
    chat_template: str | None = option(
        None,
        "data",
        "a file, or the name of one of the model's templates, in place of its own; saved with what is tuned",
    )
    packing: bool = option(True, "data", "pack examples into one sequence, attention kept apart")
    skip_bad: bool = option(False, "data", "leave out rows that cannot be read, and count them, instead of stopping")
    show: int = option(1, "data", "number of examples to print first, with what is trained marked", least=0)

    num_train_epochs: float | None = option(
        None, "length of the run", "passes over the data (default 1)", above=0, alias="epochs"
    )
    max_steps: int | None = option(
        None, "length of the run", "optimizer steps, instead of --num-train-epochs", least=1, alias="steps"
    )
    batch_tokens: int | None = option(
        None,
        "length of the run",
        "maximum tokens per forward pass on one GPU: the batch size in tokens (default: --max-length)",
        least=2,
    )
    accumulation: int | None = option(
        None,
        "length of the run",
        "micro-batches per optimizer step, over all ranks (default 8; fewer, where a run would have under 20 steps)",
        least=1,
    )
    early_stopping_patience: int = option(
        0, "length of the run", "stop after this many evaluations without a better one; 0: never", least=0
    )

    learning_rate: float | None = option(
        None, "optimizer", "peak learning rate (default 2e-5, with --lora-r 2e-4)", above=0, alias="lr"
    )
    lr_scheduler_type: str = option("cosine", "optimizer", "learning-rate schedule", choices=_SCHEDULES)
    warmup_steps: float = option(0.03, "optimizer", "warmup steps, or a fraction of all steps if below 1", least=0)
    decay: float = option(
        0.2, "optimizer", "wsd: steps of the linear decay, or a fraction of all steps if below 1", least=0
    )
    final_lr: float = option(0.0, "optimizer", "final learning rate, as a fraction of --learning-rate", least=0)
    weight_decay: float = option(0.0, "optimizer", "weight decay of matrices; norms and biases have none", least=0)
    adam_beta1: float = option(0.9, "optimizer", "beta1 of AdamW", least=0, below=1)
    adam_beta2: float = option(0.999, "optimizer", "beta2 of AdamW", least=0, below=1)
    max_grad_norm: float = option(1.0, "optimizer", "maximum gradient norm; 0: no limit", least=0)
    seed: int = option(0, "optimizer", "seed for shuffling and sampling", least=0, below=2**63)

    precision: str = option(
        "auto",
        "memory",
        "of the weights: fp32 (computed in bf16 on GPUs), bf16 with fp32 masters, or bf16 alone, rounded "
        "stochastically. auto: the most exact of the last two that fits; on the CPU fp32",
        choices=("auto", "fp32", "bf16-masters", "bf16"),
    )
    activations: str = option(
        "auto",
        "memory",
        "activation (gradient) checkpointing: what is recomputed in the backward; auto: the least that fits",
        choices=("auto", "none", "mlp", "block"),
    )
    lora_r: int = option(0, "memory", "train LoRA adapters of this rank; 0: all weights", least=0, alias="lora")
    lora_alpha: float = option(32.0, "memory", "LoRA alpha: adapters are scaled by alpha / rank", above=0)
    lora_target_modules: tuple[str, ...] = option(
        (), "memory", "target modules of LoRA, such as q_proj,v_proj (default: all projections)"
    )

    quantize: str = option(
        "none", "memory", "with --lora-r: nf4 holds the frozen weights in 4 bits (QLoRA)", choices=("none", "nf4")
    )
    merge: bool = option(False, "memory", "at the end, also write the model with the adapters added to its weights")

    export: str = option(
        "none", "what", "at the end, also write OUT/model.gguf, for llama.cpp", choices=("none", "gguf")
    )

    dp_replicate: int = option(1, "processes", "replicas of the sharded model (HSDP)", least=1)
    cp: int = option(1, "processes", "context-parallel degree: GPUs that share each row", least=1)
    tp: int = option(1, "processes", "tensor-parallel degree: GPUs that share each layer", least=1)

    save_steps: int = option(100, "checkpoints and logs", "steps between checkpoints; 0: only at the end", least=0)
    save_total_limit: int = option(2, "checkpoints and logs", "number of newest checkpoints to keep", least=1)
    eval_steps: int = option(100, "checkpoints and logs", "steps between evaluations; 0: only at the end", least=0)
    resume: bool = option(False, "checkpoints and logs", "go on with the run in --output-dir")
    report_to: str = option(
        "auto",
        "checkpoints and logs",
        "beside metrics.jsonl; auto: tensorboard where it is installed",
        choices=("auto", "none", "tensorboard", "wandb"),
    )
    dry_run: bool = option(False, "checkpoints and logs", "print the plan and the memory that it needs, and stop")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            setattr(self, field.name, _checked(field, getattr(self, field.name), _hints(type(self))[field.name]))
        for name in _REQUIRED:
            if not getattr(self, name):
                raise InputError(f"{name} is missing: give {_flag(name)} on the command line, or `{name}:` in a file")
        if self.max_steps is not None and self.num_train_epochs is not None:
            raise InputError(
                f"max_steps={self.max_steps} and num_train_epochs={self.num_train_epochs:g} both say how long to "
                "train; give one"
            )
        if self.eval_data is not None and self.eval_share:
            raise InputError("eval_data and eval_share both say what to evaluate on; give one")
        if self.early_stopping_patience and not self.evaluates:
            raise InputError("early_stopping_patience needs evaluations: give --eval-data FILE, or --eval-share 0.1")
        if self.batch_tokens is not None and self.max_length and self.batch_tokens < self.sequences * self.max_length:
            row = f"{self.sequences} sequences" if self.sequences > 1 else "a row"
            raise InputError(
                f"batch_tokens={self.batch_tokens} is less than {row} of max_length={self.max_length}; lower "
                "--max-length as well"
            )
        for name in ("lora_target_modules", "merge"):
            if getattr(self, name) and not self.lora_r:
                raise InputError(f"{name} is given, but no rank of adapters: add --lora-r 16")
        if self.quantize != "none" and not self.lora_r:
            raise InputError("quantize=nf4 freezes the weights, and nothing would be trained: add --lora-r 16")
        if self.quantize != "none" and self.merge:
            raise InputError(
                "merge would round the result to 4 bits again: load the base in bf16, load_adapter and merge"
            )
        if self.lora_r and self.tp > 1:
            raise InputError("adapters are not trained under tensor parallelism: leave --tp out, or --lora-r")
        if max(self.tp, self.cp, self.dp_replicate) > 1 and int(os.environ.get("WORLD_SIZE", "1")) == 1:
            raise InputError(
                f"tp={self.tp}, cp={self.cp}, dp_replicate={self.dp_replicate} spread the model over processes, and "
                "there is one: start it by `torchrun --nproc-per-node N -m ligermodels train ...`"
            )

    @property
    def evaluates(self) -> bool:
        return self.eval_data is not None or self.eval_share > 0

    @property
    def peak_lr(self) -> float:
        return self.learning_rate if self.learning_rate is not None else self.default_learning_rate()

    def default_learning_rate(self) -> float:
        return 2e-4 if self.lora_r else 2e-5

    @property
    def frozen_copies(self) -> int:
        """Models in memory beside the one that is trained."""
        return 0

    @classmethod
    def merged(cls, flags: Mapping[str, Any], file: str | Path | None = None) -> Self:
        """Options from flags, over those of a YAML file, over the defaults. Raises InputError."""
        values, given = {} if file is None else cls.load(file), cls._known(flags)
        for one, other in (("max_steps", "num_train_epochs"), ("eval_data", "eval_share")):
            if (one in given) != (other in given):  # which says the same in another way
                values.pop(other if one in given else one, None)
        return cls(**{**values, **given})

    @classmethod
    def load(cls, file: str | Path) -> dict[str, Any]:
        """The options that a YAML file names.

        Raises InputError for a key that is unknown or there twice, and for a file of another recipe.
        """
        values = _read_yaml(Path(file))
        if (recipe := values.pop("recipe", cls.recipe)) != cls.recipe:
            raise InputError(
                f"{file} is of `train {recipe}`, and this is `train {cls.recipe}`; run that, or give another "
                "--output-dir"
            )
        try:
            known = cls._known(values)
            fields = [field for field in dataclasses.fields(cls) if field.name in known]
            return {field.name: _checked(field, known[field.name], _hints(cls)[field.name]) for field in fields}
        except InputError as error:
            raise InputError(f"{file}: {error}") from None

    def dump(self) -> str:
        """These options as YAML, each value as JSON, which YAML includes. Per-run flags are not saved."""
        lines = [
            f"# ligermodels train {self.recipe} --config THIS_FILE, and --resume to go on",
            f"recipe: {self.recipe}",
        ]
        for field in dataclasses.fields(self):
            if field.name not in ("resume", "dry_run"):
                lines.append(f"{field.name}: {json.dumps(getattr(self, field.name), ensure_ascii=False)}")
        return "\n".join(lines) + "\n"

    @classmethod
    def _known(cls, values: Mapping[Any, Any]) -> dict[str, Any]:
        """The values by the names of their fields, of names with dashes or underscores, or aliases."""
        names = {name: field.name for field in dataclasses.fields(cls) for name in _names(field)}
        if others := [key for key in map(_underscored, values) if key not in names]:
            raise InputError(unknown(others, cls))
        found: dict[str, Any] = {}
        given: dict[str, Any] = {}
        for key, value in values.items():
            name = names[_underscored(key)]
            if name in found:
                raise InputError(f"{given[name]} is there twice, also as {key}")
            found[name], given[name] = value, key
        return found


@dataclass(kw_only=True)
class TextOptions(TrainOptions):
    """What recipes share whose steps are forwards and backwards of packed rows, and nothing else."""

    capture: bool = option(
        False,
        "optimizer",
        "run each step as a CUDA graph, its forwards padded to --batch-tokens: pays where these are so few, or the "
        "model so small, that the host is the limit",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.capture and not self.packing:
            raise InputError(
                "capture needs forwards of one shape: leave out --no-packing, which gives many, or --capture"
            )


@dataclass(kw_only=True)
class SFTOptions(TextOptions):
    """Supervised fine-tuning: chats, prompts with completions, instructions."""

    recipe = "sft"

    loss_type: str = option(
        "nll",
        "loss",
        "per-token loss: cross entropy, or dft (weighted by its probability); evaluation reports cross entropy",
        choices=("nll", "dft"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss_type == "dft" and self.tp > 1:
            raise InputError("loss_type=dft is not supported under tensor parallelism: leave --tp out")


@dataclass(kw_only=True)
class PretrainOptions(TextOptions):
    """Next-token prediction on plain text."""

    recipe = "pretrain"

    scratch: bool = option(False, "what", "draw the weights at random, by the config.json of MODEL")
    lr_scheduler_type: str = option("cosine", "optimizer", "learning-rate schedule", choices=_SCHEDULES)
    weight_decay: float = option(0.1, "optimizer", "weight decay of matrices; norms and biases have none", least=0)
    adam_beta2: float = option(0.95, "optimizer", "beta2 of AdamW", least=0, below=1)
    learning_rate: float | None = option(
        None,
        "optimizer",
        "peak learning rate (default 2e-5, with --scratch 3e-4, with --lora-r 2e-4)",
        above=0,
        alias="lr",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scratch and self.lora_r:
            raise InputError("scratch draws all weights at random, and lora_r would freeze them; give one of the two")

    def default_learning_rate(self) -> float:
        return 3e-4 if self.scratch else super().default_learning_rate()


@dataclass(kw_only=True)
class PreferenceOptions(TrainOptions):
    """What the recipes of preferences share. Defaults of the losses are TRL's."""

    learning_rate: float | None = option(
        None, "optimizer", "peak learning rate (default 1e-6, with --lora-r 1e-5)", above=0, alias="lr"
    )
    beta: float = option(
        0.1, "loss", "the scale of the log probabilities, or of their ratios to the reference", above=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if max(self.cp, self.tp) > 1:
            raise InputError(
                f"cp={self.cp}, tp={self.tp}: preferences are trained with whole rows on each GPU; leave both out, and "
                "FSDP shards the model over all processes"
            )

    def default_learning_rate(self) -> float:
        return 1e-5 if self.lora_r else 1e-6


@dataclass(kw_only=True)
class ReferenceOptions(PreferenceOptions):
    """With a reference: the model as it is before the run."""

    reference: str = option(
        "auto",
        "loss",
        "the model as it was: adapter-off (auto with --lora-r), precompute: its log probabilities, before the first "
        "step (auto for dpo), or model: a frozen copy in memory (auto for kto)",
        choices=("auto", "adapter-off", "precompute", "model"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reference == "adapter-off" and not self.lora_r:
            raise InputError("reference=adapter-off needs adapters to switch off: add --lora-r 16, or leave it out")
        if self.reference == "model" and self.lora_r:
            raise InputError("reference=model: the model without its adapters is the same; leave it out")

    @property
    def reference_kind(self) -> str:
        """What "auto" stands for."""
        chosen = "adapter-off" if self.lora_r else "model" if self.recipe == "kto" else "precompute"
        return chosen if self.reference == "auto" else self.reference

    @property
    def frozen_copies(self) -> int:
        return int(self.reference_kind == "model")


_SMOOTHING = "the share of pairs whose order is taken to be wrong"
_SFT = "of the cross entropy of the chosen answers, which is added to the loss"
_PAIRED = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard",
           "apo_zero", "apo_down", "discopop")  # fmt: skip
"""Those of `layers.preference.DPO_LOSS_TYPES` that are a mean over pairs."""


@dataclass(kw_only=True)
class DPOOptions(ReferenceOptions):
    """Direct preference optimisation: pairs of a better and a worse answer, against a reference."""

    recipe = "dpo"
    sequences = 2

    loss_type: str = option("sigmoid", "loss", "of a pair; sigmoid_norm and ipo are per token", choices=_PAIRED)
    label_smoothing: float = option(0.0, "loss", _SMOOTHING, least=0, below=0.5)
    sft_weight: float = option(0.0, "loss", f"{_SFT} (RPO)", least=0)


@dataclass(kw_only=True)
class KTOOptions(ReferenceOptions):
    """Kahneman-Tversky optimisation: single answers, each good or not, against a reference."""

    recipe = "kto"

    loss_type: str = option("kto", "loss", "of an answer", choices=("kto", "apo_zero_unpaired"))
    desirable_weight: float = option(1.0, "loss", "of good answers", least=0)
    undesirable_weight: float = option(1.0, "loss", "of others", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reference == "precompute":
            raise InputError(
                "reference=precompute: KTO also scores answers under the prompts of others, which are drawn anew in "
                "each epoch; leave it out, or train adapters (--lora-r 16), whose reference needs no copy"
            )


@dataclass(kw_only=True)
class ORPOOptions(PreferenceOptions):
    """Odds ratio preference optimisation: fine-tuning and pairs at once, without a reference."""

    recipe = "orpo"
    sequences = 2


@dataclass(kw_only=True)
class CPOOptions(PreferenceOptions):
    """Contrastive preference optimisation: pairs, without a reference."""

    recipe = "cpo"
    sequences = 2

    loss_type: str = option("sigmoid", "loss", "of a pair", choices=("sigmoid", "hinge", "ipo"))
    label_smoothing: float = option(0.0, "loss", _SMOOTHING, least=0, below=0.5)
    sft_weight: float = option(1.0, "loss", _SFT, least=0)


@dataclass(kw_only=True)
class SimPOOptions(PreferenceOptions):
    """SimPO: pairs by their log probabilities per token, without a reference."""

    recipe = "simpo"
    sequences = 2

    simpo_gamma: float = option(0.5, "loss", "how much better the chosen answer is to be", least=0)
    label_smoothing: float = option(0.0, "loss", _SMOOTHING, least=0, below=0.5)
    sft_weight: float = option(0.0, "loss", _SFT, least=0)


@dataclass(kw_only=True)
class RolloutOptions(TrainOptions):
    """What the recipes share whose model samples completions of prompts."""

    prompts: int = option(8, "rollout", "prompts per step, over all ranks", least=1)
    max_completion_length: int = option(256, "rollout", "maximum tokens of a completion", least=1)
    rollout_rows: int | None = option(
        None, "rollout", "completions that are sampled at a time on each GPU (default: all)", least=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.copies:
            return
        if self.accumulation not in (None, self.prompts):
            raise InputError(
                f"accumulation={self.accumulation}: a step that samples has prompts; give --prompts in its place"
            )
        self.accumulation = self.prompts
        if self.max_length is not None and self.max_completion_length >= self.max_length:
            raise InputError(
                f"max_completion_length={self.max_completion_length} leaves no room for a prompt in "
                f"max_length={self.max_length}; give a longer --max-length, or fewer --max-completion-length"
            )
        if max(self.cp, self.tp) > 1:
            raise InputError(
                f"cp={self.cp}, tp={self.tp}: a model that is split so does not sample; leave both out, and FSDP "
                "shards the model over all processes"
            )
        if self.prompts % (size := int(os.environ.get("WORLD_SIZE", "1"))):
            raise InputError(f"prompts={self.prompts} cannot be split over {size} processes; give a multiple of {size}")

    @property
    def copies(self) -> int:
        """Completions of each prompt; 0 where nothing is sampled."""
        raise NotImplementedError

    @property
    def drawn_at(self) -> float:
        """The temperature of sampling."""
        raise NotImplementedError

    @property
    def num_iterations(self) -> int:
        """Steps that train on the same completions."""
        return 1

    @property
    def rows_at_once(self) -> int:
        """Completions that are sampled at a time."""
        return self.rollout_rows or self.prompts * self.copies


@dataclass(kw_only=True)
class DistillOptions(RolloutOptions):
    """Distillation from a larger model of the same tokenizer, on what sft takes or the model's own answers."""

    recipe = "distill"

    teacher: str = option("", "loss", "repository on the Hub, or folder, of the model to learn from")
    beta: float = option(
        1.0, "loss", "of the generalised JSD: 0 forward KL, 1 reverse KL, between them a mixture", least=0
    )
    temperature: float = option(1.0, "loss", "divides the logits of both", above=0)
    hard_weight: float = option(
        0.0, "loss", "the share of the cross entropy of the examples' own tokens in the loss", least=0, below=1
    )
    lmbda: float = option(
        0.0, "rollout", "the share of the steps on completions that the model samples ; the options of "
        "this group are for it. At 1, rows need no completion of their own", least=0,
    )  # fmt: skip
    sampling_temperature: float = option(1.0, "rollout", "divides the logits in sampling; 0: greedy", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.teacher:
            raise InputError("teacher is missing: give --teacher on the command line, or `teacher:` in a file")
        for name in ("beta", "lmbda"):
            if getattr(self, name) > 1:
                raise InputError(f"{name}={getattr(self, name):g}: expected 1 or less")
        if self.tp > 1:
            raise InputError("a teacher is not supported under tensor parallelism: leave --tp out, FSDP shards both")
        if self.lmbda and self.hard_weight:
            raise InputError(
                f"hard_weight={self.hard_weight:g} would teach the model its own samples; leave it out, or --lmbda"
            )
        for field in dataclasses.fields(self):
            if field.metadata["group"] == "rollout" and not self.lmbda and getattr(self, field.name) != field.default:
                raise InputError(f"{field.name} is given, but nothing is sampled: add --lmbda 1")

    @property
    def copies(self) -> int:
        return int(self.lmbda > 0)

    @property
    def drawn_at(self) -> float:
        return self.sampling_temperature


@dataclass(kw_only=True)
class MedusaOptions(TrainOptions):
    """Medusa heads, which guess further tokens ahead, on a frozen model or together with it."""

    recipe = "medusa"

    heads: int = option(4, "loss", "their number; head k guesses the token k + 1 ahead", least=1)
    head_layers: int = option(1, "loss", "residual blocks of each", least=0)
    head_decay: float = option(0.8, "loss", "the k-th head's loss counts this to the power k", least=0)
    train_base: bool = option(False, "loss", "train the model as well, by the cross entropy of its own head (Medusa-2)")
    heads_weight: float = option(0.2, "loss", "with --train-base: of the heads' losses beside the model's", least=0)
    learning_rate: float | None = option(
        None, "optimizer", "peak learning rate (default 1e-3, with --train-base 2e-5)", above=0, alias="lr"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lora_r:
            raise InputError("lora_r: heads are trained on a frozen model, or with all of it (--train-base)")
        if max(self.cp, self.tp) > 1:
            raise InputError(f"cp={self.cp}, tp={self.tp}: heads are trained under FSDP alone; leave both out")
        if self.export != "none" and not self.train_base:
            raise InputError(f"export={self.export} writes a model, and heads alone are trained; leave it out")

    def default_learning_rate(self) -> float:
        return 2e-5 if self.train_base else 1e-3


@dataclass(kw_only=True)
class GRPOOptions(RolloutOptions):
    """Group relative policy optimisation: the model samples completions, which reward functions judge."""

    recipe = "grpo"

    data: str = option(
        "", "what", "the prompts: rows with `prompt`, a text or messages; other columns go to the rewards"
    )
    reward_funcs: tuple[str, ...] = option(
        (), "reward", "FILE.py:FUNCTION, or several; reward(prompts, completions, **columns) gives a list of numbers"
    )
    reward_weights: tuple[float, ...] = option((), "reward", "of each reward in their sum (default 1)")
    scale_rewards: str = option(
        "auto", "reward", "what advantages are divided by: the standard deviation of rewards of the same prompt, of "
        "all of a step, or nothing. auto: nothing for dr_grpo, else group", choices=("auto", "group", "batch", "none"),
    )  # fmt: skip
    num_generations: int = option(
        8, "rollout", "completions of each prompt, which are compared with each other", least=2
    )
    temperature: float = option(1.0, "rollout", "divides the logits, in sampling and in the loss", above=0)
    num_iterations: int = option(1, "rollout", "steps that train on the same completions", least=1)
    mask_truncated_completions: bool = option(
        False, "rollout", "completions that did not end in --max-completion-length train nothing"
    )
    loss_type: str = option(
        "dapo", "loss", "see docs/training.md", choices=("grpo", "bnpo", "dr_grpo", "dapo", "gspo", "cispo")
    )
    beta: float = option(
        0.0, "loss", "of the KL divergence to the model as it was, which is added to the loss", least=0
    )
    epsilon: float | None = option(None, "loss", "ratios below 1 less this are clipped (0.2; gspo 3e-4)", least=0)
    epsilon_high: float | None = option(
        None, "loss", "ratios above 1 and this are clipped (--epsilon; without it 0.2, dapo 0.28, gspo 4e-4); of cispo "
        "those above this (5)", least=0,
    )  # fmt: skip
    learning_rate: float | None = option(
        None, "optimizer", "peak learning rate (default 1e-6, with --lora-r 1e-5)", above=0, alias="lr"
    )
    accumulation: int | None = option(None, "rollout", "the same as --prompts", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.reward_funcs:
            raise InputError(
                "reward_funcs is missing: give --reward-funcs FILE.py:FUNCTION, or `reward_funcs:` in a file"
            )
        if self.reward_weights and len(self.reward_weights) != len(self.reward_funcs):
            raise InputError(
                f"reward_weights: there are {len(self.reward_weights)} for {len(self.reward_funcs)} rewards; give one "
                "each"
            )
        if self.rollout_rows is not None and self.rollout_rows < self.num_generations:
            raise InputError(
                f"rollout_rows={self.rollout_rows} is less than the num_generations={self.num_generations} of a prompt"
            )

    def default_learning_rate(self) -> float:
        return 1e-5 if self.lora_r else 1e-6

    @property
    def frozen_copies(self) -> int:
        return int(self.beta > 0 and not self.lora_r)

    @property
    def scale(self) -> str:
        """What "auto" stands for."""
        chosen = "none" if self.loss_type == "dr_grpo" else "group"
        return chosen if self.scale_rewards == "auto" else self.scale_rewards

    @property
    def low(self) -> float:
        return self.epsilon if self.epsilon is not None else {"gspo": 3e-4}.get(self.loss_type, 0.2)

    @property
    def high(self) -> float:
        if self.epsilon_high is not None:
            return self.epsilon_high
        own = {"gspo": 4e-4, "dapo": 0.28, "cispo": 5.0}.get(self.loss_type, 0.2)
        return self.epsilon if self.epsilon is not None else own

    @property
    def copies(self) -> int:
        return self.num_generations

    @property
    def drawn_at(self) -> float:
        return self.temperature


RECIPES: dict[str, type[TrainOptions]] = {
    cls.recipe: cls
    for cls in (
        SFTOptions,
        PretrainOptions,
        DPOOptions,
        KTOOptions,
        ORPOOptions,
        CPOOptions,
        SimPOOptions,
        DistillOptions,
        MedusaOptions,
        GRPOOptions,
    )
}


# The command line


def add_flags(parser: argparse.ArgumentParser, options: type[TrainOptions]) -> None:
    """Adds a flag for each field. Only those that are given get into the namespace, as text."""
    groups: dict[str, Any] = {}
    for field in dataclasses.fields(options):
        how, hint = field.metadata, _hints(options)[field.name]
        if how["group"] not in groups:
            groups[how["group"]] = parser.add_argument_group(how["group"])
        group = groups[how["group"]]
        text = how["text"]
        if field.default not in (None, "", ()) and not isinstance(field.default, bool) and field.name not in _REQUIRED:
            text += f" (default {_shown(field.default)})"
        common: dict[str, Any] = dict(default=argparse.SUPPRESS, help=text.replace("%", "%%"))
        if field.name == "model":
            group.add_argument("model", nargs="?", metavar="MODEL", **common)
        elif hint is bool:
            group.add_argument(_flag(field.name), action=argparse.BooleanOptionalAction, **common)
        else:
            flags = map(_flag, _names(field))
            metavar = "{" + ",".join(how["choices"]) + "}" if how["choices"] else _metavar(field.name, hint)
            group.add_argument(*flags, metavar=metavar, dest=field.name, **common)


def unknown(names: Sequence[str], options: type[TrainOptions], *, flags: bool = False) -> str:
    """What to say of options that a recipe does not have. flags: they were given on the command line, not in a file."""

    def shown(name: str, value: str = "") -> str:
        return _flag(name) + f" {value}" * bool(value) if flags else name + f": {value}" * bool(value)

    advice = [(shown(name), _advice(name, options, shown)) for name in names]
    if len(advice) == 1:
        return f"{options.recipe} has no option {advice[0][0]}; {advice[0][1]}"
    return f"{options.recipe} does not have these options:" + "".join(f"\n  {name}: {text}" for name, text in advice)


def _advice(name: str, options: type[TrainOptions], shown: Callable[..., str]) -> str:
    names = sorted(name for field in dataclasses.fields(options) for name in _names(field))
    if recipes := _recipes_with(name):
        return f"{_and(recipes)} it"
    for theirs, ours, note in other_tools.OPTIONS:
        if name in theirs.split():
            note = re.sub(r"--([a-z-]+)", lambda found: _renamed(found, shown), note)
            if not ours:
                return note
            option, _, value = ours.partition(" ")
            own = option.removeprefix("--").replace("-", "_").lower()
            use = "use" if own in names else _and(_recipes_with(own))
            return f"{use} {shown(own, value)}" + f" ({note})" * bool(note)
    close = difflib.get_close_matches(name, names, 1, 0.8)
    if near := close or [other for other in names if len(name) > 2 and other.startswith(name)]:
        return f"did you mean {' or '.join(map(shown, near))}?"
    return f"`ligermodels train {options.recipe} --help` lists all"


def _and(recipes: Sequence[str]) -> str:
    return f"{', '.join(recipes)} {'has' if len(recipes) == 1 else 'have'}"


def _renamed(found: "re.Match[str]", shown: Callable[..., str]) -> str:
    """An option in a text as the user would write it; those of other commands stay."""
    name = found[1].replace("-", "_")
    return shown(name) if _recipes_with(name) else found[0]


def _recipes_with(name: str) -> list[str]:
    return [
        recipe for recipe, options in RECIPES.items() if any(name in _names(one) for one in dataclasses.fields(options))
    ]


# Values


def _names(field: "dataclasses.Field[Any]") -> list[str]:
    """The name of an option, and its alias where it has one."""
    return [field.name, *[field.metadata["alias"]] * bool(field.metadata["alias"])]


def _underscored(name: Any) -> str:
    return str(name).replace("-", "_")


def _flag(name: str) -> str:
    return "MODEL" if name == "model" else "--" + name.replace("_", "-")


def _metavar(name: str, hint: Any) -> str:
    if name in ("data", "eval_data", "chat_template"):
        return "FILE"
    return "DIR" if name == "output_dir" else {int: "N", float: "X", str: "NAME"}.get(_kind(hint)[0], "A,B")


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _hints(options: type) -> dict[str, Any]:
    return typing.get_type_hints(options)


def _kind(hint: Any) -> tuple[Any, bool]:
    """The type of an option, without None, and whether None is allowed."""
    if isinstance(hint, types.UnionType):
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        return kinds[0], True
    return hint, False


def _checked(field: "dataclasses.Field[Any]", value: Any, hint: Any) -> Any:
    """The value in the type of its option; text, as of a flag, is read. Raises InputError."""
    kind, may_be_none = _kind(hint)
    if value is None:
        if may_be_none:
            return None
        raise InputError(f"{field.name} has no value; leave it out, or give one")
    if typing.get_origin(kind) is tuple:
        parts = [part for part in value.split(",") if part] if isinstance(value, str) else value
        if not isinstance(parts, list | tuple):
            raise InputError(f"{field.name}={value!r}: expected a list, such as {_shown(field.default) or 'a,b'}")
        inner = typing.get_args(kind)[0]
        return tuple(_one(field, part, inner) for part in parts)
    return _one(field, value, kind)


def _one(field: "dataclasses.Field[Any]", value: Any, kind: type) -> Any:
    name, how = field.name, field.metadata
    is_text, wanted = isinstance(value, str), {int: "a whole number", float: "a number", bool: "true or false"}
    if kind is bool:
        if not isinstance(value, bool):
            raise InputError(f"{name}={value!r}: expected {wanted[bool]}")
        return value
    if kind is str:
        if isinstance(value, Path):
            value = str(value)
        if not isinstance(value, str):
            raise InputError(f"{name}={value!r}: expected text; put it in quotes")
        if how["choices"] and value not in how["choices"]:
            near = [choice for choice in how["choices"] if value and choice.startswith(value)]
            near += difflib.get_close_matches(value, how["choices"], 1, 0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise InputError(f"{name}={value!r}: expected one of {', '.join(how['choices'])}{hint}")
        return value
    try:
        if isinstance(value, bool) or not (is_text or isinstance(value, int | float)):
            raise ValueError
        number = kind(value)
        if not math.isfinite(number) or (not is_text and number != value):
            raise ValueError
    except (ValueError, OverflowError):
        raise InputError(f"{name}={value!r}: expected {wanted[kind]}") from None
    if number < how["least"]:
        raise InputError(f"{name}={value}: expected {how['least']:g} or more")
    if number <= how["above"]:
        raise InputError(f"{name}={value}: expected more than {how['above']:g}")
    if number >= how["below"]:
        raise InputError(f"{name}={value}: expected less than {how['below']:g}")
    return number


def _read_yaml(file: Path) -> dict[Any, Any]:
    try:
        import yaml
    except ImportError:
        raise InputError("--config needs PyYAML: pip install 'ligermodels[train]'") from None

    class Loader(yaml.SafeLoader):
        """Refuses a key that is there twice, of which YAML would take the last."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]  # type: ignore[no-untyped-call]
            for key in keys:
                if keys.count(key) > 1:
                    raise InputError(f"{file}: {key} is there twice")
            return super().construct_mapping(node, deep)

    try:
        values = yaml.load(file.read_text("utf-8"), Loader)
    except OSError as error:
        raise InputError(f"--config {file} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from None
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise InputError(f"{file} holds no options; expected lines such as `learning_rate: 1e-5`")
    return values
