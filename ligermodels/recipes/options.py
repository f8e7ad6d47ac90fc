"""The options of `ligermodels train`: a dataclass for all recipes, from which each recipe derives its own.

The flags of the command line, the keys of --config, the checks and DIR/options.yaml are all derived from the fields.
The command line wins over the file, and the file over the defaults. Nothing here imports torch.
"""

import argparse
import dataclasses
import difflib
import functools
import json
import math
import operator
import os
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from ligermodels.errors import InputError, page
from ligermodels.recipes import other_tools

_BOUNDS = {
    "least": (operator.ge, "{:g} or more"), "above": (operator.gt, "more than {:g}"),
    "below": (operator.lt, "less than {:g}"), "most": (operator.le, "{:g} or less"),
}  # fmt: skip


def option(default: Any, help: str, *, fixed_on_resume: bool = True, **rules: Any) -> Any:
    """A field of options, with its checks.

    fixed_on_resume: resuming a run with another value raises. rules, all optional: `choices`, the valid texts; `least`,
    `above`, `below` and `most`, bounds of a number; `required`; `repeated`: the flag of a list is given once for each
    item; `once`: giving the flag twice is an error; `needs`: an option that must be given with this one; `excludes`:
    options that must not be given with it, and `instead`, what to do in place of that; `group`: the title of a group of
    flags, which begins with this one; `metavar`: the value in --help.
    """
    return dataclasses.field(default=default, metadata={"help": help, "fixed_on_resume": fixed_on_resume, **rules})


IN_MEMORY = "in memory: "
"""The beginning of the value of an option in place of which Python gave an object."""

free_option = functools.partial(option, fixed_on_resume=False)
"""An option that may have another value when a run is resumed."""


@dataclass(kw_only=True)
class TrainOptions:
    """The options of every recipe. Values are checked when an instance is made; raises InputError."""

    recipe: ClassVar[str]
    sequences: ClassVar[int] = 1
    """Sequences per example, each of at most `max_length` tokens."""
    examples: ClassVar[int] = 1
    """Examples that a forward has space for, where --batch-tokens is not given."""
    default_rates: ClassVar[tuple[float, float]] = (2e-5, 2e-4)
    """The learning rates of all weights, and of adapters."""
    unsupported: ClassVar[Mapping[str, str]] = {}
    """Options that the recipe refuses, and why."""
    compares: ClassVar[bool] = False
    """The loss compares the model with what it was before the run, its reference."""
    # fmt: off
    model: str = option("", "repository on the Hub, folder of a checkpoint, or GGUF file", required=True, group="model")
    output_dir: str = free_option("", "a new folder for all that the run writes", required=True, metavar="DIR")
    text_only: bool = option(False, "train and save the text of a model that reads images, without its vision tower")
    chat_template: str | None = option(
        None, "a file, in place of the model's own; saved with what is tuned", metavar="FILE")
    merge: bool = free_option(False, "also write the model with its adapters", needs="lora_r")

    data: tuple[str, ...] = option(
        (), "files, folders, or OWNER/NAME[:SPLIT] of the Hub; repeat for several; 'FILE*0.5' samples half",
        repeated=True, required=True, group="data")
    max_samples: int | None = option(None, "rows that are used: the first, or each set's share of several", least=1)
    system_prompt: str | None = option(None, "a system message for chats that begin without one")
    eval_data: str | None = option(
        None, "one file, folder, or OWNER/NAME[:SPLIT] of the Hub, to evaluate on", excludes=("eval_share",),
        once=True, metavar="FILE")
    eval_share: float = option(0.0, "fraction of --data that is held out to evaluate on", least=0, below=1)
    max_length: int | None = option(None, "tokens of a sequence (default 4096, or the model's context)", least=2)
    skip_bad: bool = free_option(False, "leave out rows that cannot be read or train nothing, and count them")
    show: int = free_option(1, "number of examples to print, with what is trained marked", least=0)
    seed: int = option(0, "seed for shuffling and sampling", least=0, below=2**63)
    deterministic: bool = free_option(
        False, "the same bits in each run on the same GPUs, for some 9 % of the speed (of a 1B)")

    num_train_epochs: float | None = free_option(
        None, "passes over the data (default 1)", above=0, group="length of the run")
    max_steps: int | None = free_option(None, "optimizer steps", least=1, excludes=("num_train_epochs",))
    batch_tokens: int | None = option(None, "tokens of a forward pass on one GPU (default: --max-length)", least=2)
    accumulation: int | None = option(
        None, "forward passes per step, over all GPUs (default 8, or fewer for runs of under 20 steps)", least=1)

    learning_rate: float | None = free_option(
        None, "peak learning rate (default {:g}, with --lora-r {:g})", above=0, group="optimizer")
    lr_scheduler_type: str = free_option(
        "cosine", "learning-rate schedule", choices=("cosine", "linear", "wsd", "constant_with_warmup"))
    warmup_steps: float = free_option(0.03, "steps, or a fraction of all steps if below 1", least=0)
    decay: float = free_option(0.2, "wsd: steps of the decay, or a fraction if below 1", least=0)
    final_lr: float = free_option(0.0, "final learning rate, as a fraction of the peak", least=0)
    optim: str = option(
        "adamw", "adamw8bit: AdamW with moments in 8 bits; muon: torch.optim.Muon for the matrices of blocks, on one "
        "GPU, and AdamW for all else", choices=("adamw", "adamw8bit", "muon"))
    weight_decay: float = option(0.0, "weight decay of matrices; norms and biases have none", least=0)
    adam_beta1: float = option(0.9, "beta1 of AdamW", least=0, below=1)
    adam_beta2: float = option(0.999, "beta2 of AdamW", least=0, below=1)
    max_grad_norm: float = free_option(1.0, "maximum gradient norm; 0: no limit", least=0)
    router_bias_rate: float = free_option(
        0.0, "balance the experts of a model whose routers have a correction bias: after each step it changes by this, "
        "such as 0.001", least=0, excludes=("lora_r", "capture"))

    precision: str = option(
        "auto", "of the weights on GPUs; bf16-masters: bf16, with 16 more bits in the optimizer; auto: that, or bf16 "
        "where it does not fit",
        choices=("auto", "fp32", "bf16-masters", "bf16"), group="memory")
    activations: str = free_option(
        "auto", "what the backward recomputes (gradient checkpointing); auto: the least that fits",
        choices=("auto", "none", "mlp", "block"))
    fp8: str = option(
        "none", "multiply in FP8 in the blocks of the text, by scales of rows or of tensors, or with the gradients of "
        "weights in bf16; for Ada, Hopper and later", choices=("none", "rowwise", "tensorwise", "rowwise-bf16-dw"),
        excludes=("tp", "quantize"))
    lora_r: int = option(0, "train LoRA adapters of this rank; 0: all weights", least=0, excludes=("tp",))
    lora_alpha: float = option(32.0, "LoRA alpha: adapters are scaled by alpha / rank", above=0)
    lora_target_modules: tuple[str, ...] = option((), "such as q_proj,v_proj (default: all linear)", needs="lora_r")
    lora_target_parameters: tuple[str, ...] = option(
        (), "experts and routers that get adapters, such as experts.down_proj,mlp.gate.weight", needs="lora_r",
        excludes=("lora_dropout", "use_dora"))
    lora_dropout: float = option(0.0, "dropout of the inputs of adapters", least=0, below=1, needs="lora_r")
    use_rslora: bool = option(False, "scale adapters by alpha / sqrt(rank)", needs="lora_r")
    use_dora: bool = option(False, "train the magnitudes of weights too (DoRA)", needs="lora_r", excludes=("fp8",))
    lora_modules_to_save: tuple[str, ...] = option((), "modules trained whole, such as lm_head", needs="lora_r")
    quantize: str = option(
        "none", "nf4: frozen weights in 4 bits (QLoRA), mxfp4: experts alone, fp8: in 8 bits, multiplied in FP8; these "
        "cannot be merged without requantising",
        choices=("none", "nf4", "mxfp4", "fp8"), needs="lora_r", excludes=("merge",),
        instead="merge later: `ligermodels convert MODEL DST --adapter DIR/adapter`")

    dp_replicate: int = free_option(1, "replicas of the sharded model (HSDP)", least=1, group="parallel")
    ep: int = free_option(
        1, "expert-parallel degree: GPUs over which the experts of a mixture are spread", least=1,
        excludes=("cp", "tp", "capture", "quantize"))
    cp: int = free_option(1, "context-parallel degree: GPUs that share each row", least=1)
    tp: int = free_option(1, "tensor-parallel degree: GPUs that share each layer", least=1)

    save_steps: int = free_option(
        100, "steps between checkpoints; 0: only at the end", least=0, group="checkpoints and logs")
    save_total_limit: int = free_option(2, "number of newest checkpoints to keep", least=1)
    eval_steps: int = free_option(100, "steps between evaluations; 0: only at the end", least=0)
    early_stopping_patience: int | None = free_option(
        None, "end the run after so many evaluations in a row that are not the best so far", least=1)
    resume: bool = free_option(False, "continue the run in --output-dir")
    report_to: str = free_option("none", "beside metrics.jsonl", choices=("none", "tensorboard", "wandb"))
    run_name: str | None = free_option(
        None, "name of the run, for --report-to wandb and the card (default: that of --output-dir)", metavar="NAME")
    push_to_hub: bool = free_option(False, "upload the result to the Hub, at the end")
    hub_model_id: str | None = free_option(
        None, "its repository (default: the name of --output-dir, under your account)", needs="push_to_hub",
        metavar="OWNER/NAME")
    hub_private_repo: bool = free_option(True, "make the repository private", needs="push_to_hub")
    dry_run: bool = free_option(False, "print the plan and the options, and stop")
    # fmt: on

    objects: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)
    """What Python gave in place of names: `model`, `tokenizer`, `data`, `eval_data`, `rewards`. It is no option: it has
    no flag and is not saved."""

    # Options of some recipes alone, which are last in their --help too.
    capture: ClassVar[bool] = False
    neftune_noise_alpha: ClassVar[float] = 0.0
    mtp_loss_weight: ClassVar[float] = 0.0
    scratch: ClassVar[bool] = False

    def __post_init__(self) -> None:
        fields = fields_of(self)
        vars(self).update(typed(type(self), {name: getattr(self, name) for name in fields}))
        self.output_dir = os.path.expanduser(self.output_dir)  # once: all that reads it agrees, and options.yaml too
        self.learning_rate = self.default_rate if self.learning_rate is None else self.learning_rate
        changed = {name: shown(getattr(self, name)) for name in fields if getattr(self, name) != fields[name].default}
        for name, field in fields.items():
            if field.metadata.get("required") and name not in changed:
                raise InputError(f"{name} is missing: give {flag(name)} on the command line, or `{name}:` in a file")
        for name, value in changed.items():
            if name in self.unsupported:
                raise InputError(f"{name}={value}: {self.unsupported[name]}; leave {flag(name)} out")
            for other in changed.keys() & fields[name].metadata.get("excludes", ()):
                more = f", or {instead}" if (instead := fields[name].metadata.get("instead")) else ""
                raise InputError(f"{name}={value} and {other}={changed[other]}: give one of the two{more}")
            needed = fields[name].metadata.get("needs")
            if needed in fields and not getattr(self, needed):
                raise InputError(f"{name}={value} needs {needed}: add {flag(needed)}, or leave {flag(name)} out")
        if self.use_dora and self.quantize in ("nf4", "fp8"):  # experts, which mxfp4 is for, get no DoRA
            raise InputError(
                f"use_dora=True and quantize={self.quantize}: DoRA needs the norms of weights in 16 bits; give one of "
                "the two"
            )
        if self.early_stopping_patience and not (self.eval_data or self.eval_share):
            raise InputError(
                f"early_stopping_patience={self.early_stopping_patience} needs evaluations: add --eval-share 0.1 or "
                "--eval-data FILE, or leave --early-stopping-patience out"
            )
        if self.early_stopping_patience and not self.eval_steps:
            raise InputError("early_stopping_patience: eval_steps=0 evaluates at the end alone; give --eval-steps N")
        if self.optim == "muon":
            for other in changed.keys() & {"lora_r", "quantize", "capture", "ep", "cp", "tp", "dp_replicate"}:
                raise InputError(f"optim=muon and {other}={changed[other]}: give one of the two")
            if self.precision == "bf16":
                raise InputError("optim=muon and precision=bf16: Muon steps fp32 values; give --precision bf16-masters")
        if self.batch_tokens is not None and self.max_length and self.batch_tokens < self.sequences * self.max_length:
            raise InputError(
                f"batch_tokens={self.batch_tokens} is less than an example, {self.sequences} x max_length="
                f"{self.max_length}; lower --max-length as well"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Worker processes get the options alone."""
        return vars(self) | {"objects": {}}

    @property
    def frozen_copies(self) -> int:
        """Models of the same size in memory beside the one that is trained. With LoRA that is the reference itself."""
        return int(self.compares and not self.lora_r)

    @property
    def default_rate(self) -> float:
        return self.default_rates[self.lora_r > 0]

    @classmethod
    def merged(
        cls, flags: Mapping[str, Any], file: str | Path | None = None, objects: Mapping[str, Any] | None = None
    ) -> Self:
        """Options from flags, over those of a YAML file, over the defaults. objects: see there. Raises InputError."""
        return cls(**typed(cls, {**({} if file is None else cls.load(file)), **flags}), objects=objects or {})

    @classmethod
    def load(cls, file: str | Path) -> dict[str, Any]:
        """The options in a YAML file. Raises InputError for an unknown key, and for a file of another recipe."""
        values = _read_yaml(Path(os.path.expanduser(file)))
        if (recipe := values.pop("recipe", cls.recipe)) != cls.recipe:
            raise InputError(
                f"{file} is of `train {recipe}`, and this is `train {cls.recipe}`; run that, or give another "
                "--output-dir"
            )
        try:
            return typed(cls, values)
        except InputError as error:
            raise InputError(f"{file}: {error}") from None

    def dump(self) -> str:
        """These options as YAML, each value as JSON, which YAML includes; without the flags of a single run."""
        values = {name: getattr(self, name) for name in ("recipe", *fields_of(self)) if name not in _OF_ONE_RUN}
        lines = [f"{name}: {json.dumps(value, ensure_ascii=False)}\n" for name, value in values.items()]
        return f"# ligermodels train {self.recipe} --config THIS_FILE, and --resume to continue\n{''.join(lines)}"

    def check_resumed(self, before: Mapping[str, Any]) -> list[str]:
        """The options that differ from those `before`. Raises InputError where that would make it another run."""
        fields, values = fields_of(self), {name: getattr(self, name) for name in fields_of(self)}
        differ = {
            name: (shown(before[name]), shown(new)) for name, new in values.items() if before.get(name, new) != new
        }
        if fixed := [name for name in differ if fields[name].metadata["fixed_on_resume"]]:
            had, has = (", ".join(f"{name}={differ[name][at]}" for name in fixed) for at in (0, 1))
            raise InputError(
                f"the run in {self.output_dir} had {had}, and this has {has}; resume with --config "
                f"{Path(self.output_dir) / 'options.yaml'}, or give another folder"
            )
        return [f"{name} {old} -> {new}" for name, (old, new) in differ.items()]


_OF_ONE_RUN = ("resume", "dry_run")


@dataclass(kw_only=True)
class TextOptions(TrainOptions):
    """The options of recipes whose steps can be CUDA graphs: forwards and backwards of packed rows alone."""

    # fmt: off
    capture: bool = free_option(  # type: ignore[misc]
        False, "run each step as a CUDA graph, its forwards padded to --batch-tokens: faster when the CPU is the "
        "bottleneck (small models or batches)", group="CUDA graphs and multi-token prediction")
    mtp_loss_weight: float = option(  # type: ignore[misc]
        0.0, "train the model's layer for multi-token prediction too, such as mtp.* of Qwen3.5, with this weight of "
        "its loss, such as 0.1; 0: it is copied into the result", least=0, excludes=("lora_r",))
    # fmt: on


# The command line


class _Once(argparse.Action):
    """A flag of one value that is an error when it is given twice; of others the last one counts."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if hasattr(namespace, self.dest):
            before = getattr(namespace, self.dest)
            raise argparse.ArgumentError(self, f"given twice, as {before} and as {values}, and takes one value")
        setattr(namespace, self.dest, values)


def add_flags(parser: argparse.ArgumentParser, options: type[TrainOptions]) -> None:
    """Adds a flag for each field. Only flags that are given get into the namespace."""
    hints, metavars = typing.get_type_hints(options), {int: "N", float: "X", str: "TEXT"}
    group: Any = parser
    for name, field in fields_of(options).items():
        kind, rules = _kind(hints[name]), field.metadata
        group = parser.add_argument_group(rules["group"]) if "group" in rules else group
        help, choices = rules["help"], rules.get("choices")
        if name == "learning_rate":
            help = help.format(*options.default_rates)
        if field.default not in (None, "", ()) and kind is not bool:
            help += f" (default {shown(field.default)})"
        how: dict[str, Any] = dict(default=argparse.SUPPRESS, help=help.replace("%", "%%"))
        if name == "model":
            group.add_argument("model", nargs="?", metavar="MODEL", **how)
            continue
        if kind is bool:
            how |= dict(action=argparse.BooleanOptionalAction)
        elif rules.get("repeated"):
            how |= dict(metavar="FILE", action="append")
        elif typing.get_origin(kind) is tuple:  # given twice, it has the items of both
            how |= dict(metavar="A,B", action="extend", type=_items)
        else:
            how |= dict(metavar=f"{{{','.join(choices)}}}" if choices else rules.get("metavar", metavars[kind]))
        if rules.get("once"):
            how |= dict(action=_Once)
        group.add_argument(flag(name), dest=name, **how)


def fields_of(options: Any) -> dict[str, Any]:
    """The fields of options by name, but for `objects`."""
    return {field.name: field for field in dataclasses.fields(options) if "help" in field.metadata}


def check_named(value: str, name: str) -> None:
    """Raises InputError for the value of an option that stands for an object, which this process does not have."""
    if value.startswith(IN_MEMORY):
        raise InputError(
            f"{name}={value!r}: this was a Python object, which a file of options does not hold. Next: call "
            f"ligermodels.train in Python with the same {name} and resume=True, or give a file or folder"
        )


def flag(name: str) -> str:
    """An option as it is given on the command line."""
    return "MODEL" if name == "model" else "--" + name.replace("_", "-")


def shown(value: Any) -> str:
    """A value as it is given on the command line."""
    if isinstance(value, tuple | list):
        return ",".join(map(shown, value))
    return "default" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def unknown(options: type[TrainOptions], name: str) -> str:
    """The error for an option that a recipe does not have, as it was given: a flag, or a key of a file."""
    if (meaning := other_tools.meaning(name)) is not None:
        return f"{options.recipe} has no option {name}; {meaning}"
    near = nearest(name, [flag(field) for field in fields_of(options)])
    every = f"`ligermodels train {options.recipe} --help` lists all, and {page('options.md')} those of other tools"
    advice = f"did you mean {near}?" if near else every
    return f"{options.recipe} has no option {name}; {advice}"


def nearest(name: str, flags: Sequence[str]) -> str:
    """The flags that are meant by an unknown one, or "": one of nearly the same letters, else at most four whose words
    begin with its words, or that it abbreviates, as --lr abbreviates --learning-rate."""
    words = name.strip("-").replace("_", "-").split("-")
    if close := difflib.get_close_matches("--" + "-".join(words), flags, 1, 0.8):
        return close[0]

    def is_meant(flag: str) -> bool:
        parts = flag.strip("-").split("-")
        begins = all(any(part.startswith(word) for part in parts) for word in words if word)
        return begins or [part[:1] for part in parts] == [*"".join(words)]

    return " or ".join([flag for flag in flags if is_meant(flag)][:4])


# Values


def typed(options: type[TrainOptions], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values in the types of their options; texts, of flags, are parsed. Raises InputError."""
    fields, hints = fields_of(options), typing.get_type_hints(options)
    if others := [str(name) for name in values if name not in fields]:
        raise InputError("\n".join(unknown(options, name) for name in others))
    return {name: _typed(fields[name], value, hints[name]) for name, value in values.items()}


def _kind(hint: Any) -> Any:
    """The type of an option, without None."""
    return typing.get_args(hint)[0] if isinstance(hint, types.UnionType) else hint


def _items(text: str) -> list[str]:
    return [item for item in text.split(",") if item]


def _typed(field: "dataclasses.Field[Any]", value: Any, hint: Any) -> Any:
    kind, rules, choices = _kind(hint), field.metadata, field.metadata.get("choices")
    wanted = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}.get(kind, "a list")
    wrong = InputError(f"{field.name}={value!r}: expected {wanted}")
    if value is None and kind is not hint:
        return None
    if typing.get_origin(kind) is tuple:
        if isinstance(value, str | Path):
            value = [value] if rules.get("repeated") else _items(str(value))
        if not isinstance(value, list | tuple):
            raise wrong
        return tuple(_typed(field, item, typing.get_args(kind)[0]) for item in value)
    if kind in (bool, str):
        value = str(value) if isinstance(value, Path) else value
        if not isinstance(value, kind) or (kind is str and "\0" in value):
            raise wrong
        if choices and value not in choices:
            near = " or ".join(choice for choice in choices if value and choice.startswith(value[:5]))
            hint = f"; did you mean {near}?" if near else ""
            raise InputError(f"{field.name}={value!r}: expected one of {', '.join(choices)}{hint}")
        return value
    try:
        number = kind(value)
        if isinstance(value, bool) or not math.isfinite(number) or (isinstance(value, float) and number != value):
            raise wrong
    except (TypeError, ValueError, OverflowError):
        raise wrong from None
    for name, (holds, words) in _BOUNDS.items():
        if name in rules and not holds(number, rules[name]):
            raise InputError(f"{field.name}={value}: expected {words.format(rules[name])}")
    return number


def _read_yaml(file: Path) -> dict[Any, Any]:
    if not os.path.isfile(file):  # False for a name that is too long, too
        raise InputError(f"there is no file {file}; give --config a YAML file of options")
    try:
        import yaml

        text = file.read_text("utf-8")
        node, values = yaml.compose(text, yaml.SafeLoader), yaml.safe_load(text)
    except ImportError:
        raise InputError("--config needs PyYAML: pip install 'ligermodels[train]'") from None
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read as YAML: {' '.join(str(error).split())}") from None
    except ValueError as error:  # of a text that looks like a date
        raise InputError(f"{file} cannot be read as YAML: {error}; put text that looks like a date in quotes") from None
    if not isinstance(values, dict):
        raise InputError(f"{file} has no options; expected lines such as `learning_rate: 1e-5`")
    names = [key.value.replace("-", "_") for key, _ in node.value]
    if twice := {name for name in names if names.count(name) > 1}:
        raise InputError(f"{file}: {min(twice)} is there twice")
    return {str(key).replace("-", "_"): value for key, value in values.items()}
