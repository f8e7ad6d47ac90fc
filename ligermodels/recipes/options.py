"""The options of `ligermodels train`: one dataclass for all recipes, from which each recipe derives its own.

The flags of the command line, the keys of --config, the checks and DIR/options.yaml are all derived from the fields.
The command line wins over the file, and the file over the defaults. Nothing here imports torch.
"""

import argparse
import dataclasses
import difflib
import inspect
import json
import math
import operator
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from ligermodels.errors import InputError

Field = dataclasses.Field
_BOUNDS: dict[str, tuple[Any, str]] = {
    "least": (operator.ge, "{:g} or more"),
    "above": (operator.gt, "more than {:g}"),
    "below": (operator.lt, "less than {:g}"),
    "most": (operator.le, "{:g} or less"),
}


def option(default: Any, help: str, *, fixed_on_resume: bool = True, **rules: Any) -> Any:
    """A field of options.

    fixed_on_resume: a run that is resumed with another value is refused. rules: `choices` of a text; of a number
    `least`, `above`, `below` and `most`; `alias`, a shorter name, which is read, but not written; `repeated`: the flag
    of a list is given once for each item.
    """
    return dataclasses.field(default=default, metadata={"help": help, "fixed_on_resume": fixed_on_resume, **rules})


def override(options: type, name: str, default: Any = dataclasses.MISSING, help: str = "") -> Any:
    """The field `name` of a base class with another default or help."""
    field = fields_of(options)[name]
    metadata = {**field.metadata, "help": help or field.metadata["help"]}
    return dataclasses.field(default=field.default if default is dataclasses.MISSING else default, metadata=metadata)


# fmt: off
@dataclass(kw_only=True)
class ModelOptions:
    group: ClassVar[str] = "model"
    model: str = option("", "repository on the Hub, or folder of a checkpoint")
    output_dir: str = option(
        "", "a new folder for checkpoints, metrics, the report and the tuned model", alias="out", fixed_on_resume=False)
    text_only: bool = option(
        False, "of a model that reads images, train and save its text alone, without the vision tower (Qwen3.5)")
    chat_template: str | None = option(
        None, "a file, or the name of one of the model's templates, in place of its own; saved with what is tuned")
    merge: bool = option(
        False, "at the end, also write the model with the adapters added to its weights", fixed_on_resume=False)


@dataclass(kw_only=True)
class DataOptions:
    group: ClassVar[str] = "data"
    data: tuple[str, ...] = option(
        (), "the examples: JSONL, JSON, CSV, Parquet or text, a folder of them, or OWNER/NAME[:SPLIT] of the Hub. Of "
        "several, each --data FILE may end with a weight: FILE*0.5 takes half of its rows, FILE*2 all of them twice",
        repeated=True)
    max_samples: int | None = option(None, "number of rows of --data that are used, from the first", least=1)
    system_prompt: str | None = option(
        None, "a system message for chats that begin without one; the reference and samples get it too")
    eval_data: str | None = option(None, "examples to evaluate on, as --data")
    eval_share: float = option(0.0, "fraction of --data that is held out to evaluate on", least=0, below=1)
    max_length: int | None = option(
        None, "maximum sequence length in tokens (default 4096, or the model's context where that is less)", least=2,
        alias="length")
    packing: bool = option(True, "pack examples into one sequence, with separate attention")
    skip_bad: bool = option(
        False, "leave out rows that cannot be read, and count them, instead of stopping", fixed_on_resume=False)
    show: int = option(
        1, "number of examples to print first, with what is trained marked", least=0, fixed_on_resume=False)
    seed: int = option(0, "seed for shuffling and sampling", least=0, below=2**63)


@dataclass(kw_only=True)
class LengthOptions:
    group: ClassVar[str] = "length of the run"
    num_train_epochs: float | None = option(
        None, "passes over the data (default 1)", above=0, alias="epochs", fixed_on_resume=False)
    max_steps: int | None = option(
        None, "optimizer steps, instead of --num-train-epochs", least=1, alias="steps", fixed_on_resume=False)
    batch_tokens: int | None = option(
        None, "maximum tokens per forward pass on one GPU: the batch size in tokens (default: --max-length)", least=2)
    accumulation: int | None = option(
        None, "micro-batches per optimizer step, over all ranks (default 8; fewer, where a run would have under 20 "
        "steps)", least=1)


@dataclass(kw_only=True)
class OptimizerOptions:
    group: ClassVar[str] = "optimizer"
    learning_rate: float | None = option(
        None, "peak learning rate (default {:g}, with --lora-r {:g})", above=0, alias="lr", fixed_on_resume=False)
    lr_scheduler_type: str = option(
        "cosine", "learning-rate schedule", choices=("cosine", "linear", "wsd", "constant_with_warmup"),
        fixed_on_resume=False)
    warmup_steps: float = option(
        0.03, "warmup steps, or a fraction of all steps if below 1", least=0, fixed_on_resume=False)
    decay: float = option(
        0.2, "wsd: steps of the linear decay, or a fraction of all steps if below 1", least=0, fixed_on_resume=False)
    final_lr: float = option(
        0.0, "final learning rate, as a fraction of --learning-rate", least=0, fixed_on_resume=False)
    weight_decay: float = option(0.0, "weight decay of matrices; norms and biases have none", least=0)
    adam_beta1: float = option(0.9, "beta1 of AdamW", least=0, below=1)
    adam_beta2: float = option(0.999, "beta2 of AdamW", least=0, below=1)
    max_grad_norm: float = option(1.0, "maximum gradient norm; 0: no limit", least=0, fixed_on_resume=False)


@dataclass(kw_only=True)
class MemoryOptions:
    group: ClassVar[str] = "memory"
    precision: str = option(
        "auto", "of the weights: fp32 (computed in bf16 on GPUs), bf16 with fp32 masters, or bf16 alone, rounded "
        "stochastically. auto: the most exact of the last two that fits; on the CPU fp32",
        choices=("auto", "fp32", "bf16-masters", "bf16"))
    activations: str = option(
        "auto", "activation (gradient) checkpointing: what is recomputed in the backward; auto: the least that fits",
        choices=("auto", "none", "mlp", "block"), fixed_on_resume=False)
    lora_r: int = option(0, "train LoRA adapters of this rank; 0: all weights", least=0, alias="lora")
    lora_alpha: float = option(32.0, "LoRA alpha: adapters are scaled by alpha / rank", above=0)
    lora_target_modules: tuple[str, ...] = option(
        (), "target modules of LoRA, such as q_proj,v_proj (default: all projections)")
    lora_target_parameters: tuple[str, ...] = option(
        (), "stacked weights of experts that get adapters as well, such as experts.gate_up_proj,experts.down_proj")
    lora_dropout: float = option(0.0, "dropout of the inputs of adapters", least=0, below=1)
    use_rslora: bool = option(False, "scale adapters by alpha / sqrt(rank)")
    use_dora: bool = option(False, "train the magnitudes of weights beside LoRA's directions (DoRA)")
    lora_modules_to_save: tuple[str, ...] = option(
        (), "modules that are trained whole beside the adapters, such as lm_head", alias="modules_to_save")
    quantize: str = option(
        "none", "with --lora-r: nf4 stores the frozen weights in 4 bits (QLoRA)", choices=("none", "nf4"))


@dataclass(kw_only=True)
class ParallelOptions:
    group: ClassVar[str] = "parallel"
    dp_replicate: int = option(1, "replicas of the sharded model (HSDP)", least=1, fixed_on_resume=False)
    cp: int = option(1, "context-parallel degree: GPUs that share each row", least=1, fixed_on_resume=False)
    tp: int = option(1, "tensor-parallel degree: GPUs that share each layer", least=1, fixed_on_resume=False)


@dataclass(kw_only=True)
class LoggingOptions:
    group: ClassVar[str] = "checkpoints and logs"
    save_steps: int = option(
        100, "steps between checkpoints; 0: only at the end", least=0, fixed_on_resume=False)
    save_total_limit: int = option(2, "number of newest checkpoints to keep", least=1, fixed_on_resume=False)
    eval_steps: int = option(
        100, "steps between evaluations; 0: only at the end", least=0, fixed_on_resume=False)
    resume: bool = option(False, "continue the run in --output-dir", fixed_on_resume=False)
    report_to: str = option(
        "auto", "beside metrics.jsonl; auto: tensorboard where it is installed",
        choices=("auto", "none", "tensorboard", "wandb"), fixed_on_resume=False)
    dry_run: bool = option(
        False, "print the plan and the memory that it needs, and stop", fixed_on_resume=False)
# fmt: on


@dataclass(kw_only=True)
class TrainOptions(
    LoggingOptions, ParallelOptions, MemoryOptions, OptimizerOptions, LengthOptions, DataOptions, ModelOptions
):
    """The options of every recipe. Values are checked when an instance is made; raises InputError."""

    recipe: ClassVar[str]
    sequences: ClassVar[int] = 1
    """Sequences per example, each of at most `max_length` tokens."""
    examples: ClassVar[int] = 1
    """Examples that a forward has space for, where --batch-tokens is not given."""
    default_rates: ClassVar[tuple[float, float]] = (2e-5, 2e-4)
    """The learning rates of all weights, and of adapters."""
    whole_rows: ClassVar[str] = ""
    """Why GPUs cannot share rows (--cp) or layers (--tp); "" where they can."""
    compares: ClassVar[bool] = False
    """The loss compares the model with what it was before the run, its reference."""
    capture: ClassVar[bool] = False
    scratch: ClassVar[bool] = False

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for name, field in fields_of(self).items():
            setattr(self, name, _check(field, getattr(self, name), hints[name]))
        for name in ("model", "data", "output_dir"):
            self.require(name)
        if self.max_steps is not None and self.num_train_epochs is not None:
            raise InputError(
                f"max_steps={self.max_steps} and num_train_epochs={self.num_train_epochs:g} both say how long to "
                "train; give one"
            )
        if self.eval_data is not None and self.eval_share:
            raise InputError("eval_data and eval_share both say what to evaluate on; give one")
        if self.batch_tokens is not None and self.max_length and self.batch_tokens < self.sequences * self.max_length:
            row = f"{self.sequences} sequences" if self.sequences > 1 else "a row"
            raise InputError(
                f"batch_tokens={self.batch_tokens} is less than {row} of max_length={self.max_length}; lower "
                "--max-length as well"
            )
        if not self.lora_r:
            adapters = ("lora_target_modules", "lora_target_parameters", "lora_dropout", "use_rslora", "use_dora",
                        "lora_modules_to_save", "merge")  # fmt: skip
            if given := [name for name in adapters if getattr(self, name)]:
                raise InputError(f"{given[0]} is given, but no rank of adapters: add --lora-r 16")
            if self.quantize != "none":
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
        if self.whole_rows and max(self.cp, self.tp) > 1:
            raise InputError(
                f"cp={self.cp}, tp={self.tp}: {self.whole_rows}; leave both out, and FSDP shards the model over all "
                "processes"
            )

    def require(self, name: str, example: str = "") -> None:
        """Raises InputError unless the option has a value."""
        if not getattr(self, name):
            given = f"{flag(name)} {example}".strip()
            raise InputError(f"{name} is missing: give {given} on the command line, or `{name}:` in a file")

    @property
    def frozen_copies(self) -> int:
        """Models of the same size in memory beside the one that is trained. With LoRA that is the reference itself."""
        return int(self.compares and not self.lora_r)

    @property
    def peak_lr(self) -> float:
        return self.default_rates[self.lora_r > 0] if self.learning_rate is None else self.learning_rate

    @classmethod
    def merged(cls, flags: Mapping[str, Any], file: str | Path | None = None) -> Self:
        """Options from flags, over those of a YAML file, over the defaults. Raises InputError."""
        values, given = {} if file is None else cls.load(file), cls._by_field(flags)
        for one, other in (("max_steps", "num_train_epochs"), ("eval_data", "eval_share")):
            if (one in given) != (other in given):  # the flag replaces the file's other way to say the same
                values.pop(other if one in given else one, None)
        return cls(**{**values, **given})

    @classmethod
    def load(cls, file: str | Path) -> dict[str, Any]:
        """The options in a YAML file. Raises InputError for an unknown key, and for a file of another recipe."""
        values = _read_yaml(Path(file))
        if (recipe := values.pop("recipe", cls.recipe)) != cls.recipe:
            raise InputError(
                f"{file} is of `train {recipe}`, and this is `train {cls.recipe}`; run that, or give another "
                "--output-dir"
            )
        fields, hints = fields_of(cls), typing.get_type_hints(cls)
        try:
            return {name: _check(fields[name], value, hints[name]) for name, value in cls._by_field(values).items()}
        except InputError as error:
            raise InputError(f"{file}: {error}") from None

    def dump(self) -> str:
        """These options as YAML, each value as JSON, which YAML includes; without the flags of a single run."""
        lines = [f"# ligermodels train {self.recipe} --config THIS_FILE, and --resume to continue the run"]
        values = {"recipe": self.recipe} | {name: getattr(self, name) for name in fields_of(self)}
        lines += [
            f"{name}: {json.dumps(value, ensure_ascii=False)}"
            for name, value in values.items()
            if name not in ("resume", "dry_run")
        ]
        return "\n".join(lines) + "\n"

    def check_resumed(self, before: Mapping[str, Any]) -> list[str]:
        """The options that differ from those `before`. Raises InputError where that would make it another run."""
        changed = []
        for name, field in fields_of(self).items():
            new = getattr(self, name)
            old = before.get(name, new)
            if old == new:
                continue
            if field.metadata["fixed_on_resume"]:
                raise InputError(
                    f"the run in {self.output_dir} had {name}={old}, and this has {name}={new}; resume with --config "
                    f"{Path(self.output_dir) / 'options.yaml'}, or give another folder"
                )
            old, new = ("default" if value is None else value for value in (old, new))
            changed.append(f"{name} {old} -> {new}")
        return changed

    @classmethod
    def _by_field(cls, values: Mapping[Any, Any]) -> dict[str, Any]:
        """Values by the names of their fields. A key may have dashes, or be an alias."""
        names = {name: field.name for field in dataclasses.fields(cls) for name in names_of(field)}
        keys = {key: str(key).replace("-", "_") for key in values}
        if others := [str(key) for key, name in keys.items() if name not in names]:
            raise InputError("\n".join(unknown(cls, name) for name in others))
        given: dict[str, Any] = {}
        for key in values:
            if (before := given.setdefault(names[keys[key]], key)) is not key:
                raise InputError(f"{before} is there twice, also as {key}")
        return {name: values[key] for name, key in given.items()}


@dataclass(kw_only=True)
class TextOptions(TrainOptions):
    """The options of recipes whose steps can be CUDA graphs: forwards and backwards of packed rows alone."""

    group: ClassVar[str] = "capture"
    capture: bool = option(  # type: ignore[misc]
        False,
        "run each step as a CUDA graph, its forwards padded to --batch-tokens: pays where these are so few, or the "
        "model so small, that the host is the limit",
        fixed_on_resume=False,
    )
    mtp_loss_weight: float = option(  # type: ignore[misc]
        0.0,
        "train the model's layer for multi-token prediction too (Qwen3.5's mtp.*), with this weight of its loss, such "
        "as 0.1; 0: it is copied into the result",
        least=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.capture and not self.packing:
            raise InputError(
                "capture needs forwards of one shape: leave out --no-packing, which gives many, or --capture"
            )
        if self.mtp_loss_weight and self.lora_r:
            raise InputError("mtp_loss_weight trains the layer with all weights: leave out --lora-r")


def unknown(options: type[TrainOptions], name: str) -> str:
    """The error for an option that a recipe does not have, as it was given: a flag, or a key of a file."""
    known = [own for field in dataclasses.fields(options) for own in names_of(field)]
    close = difflib.get_close_matches(name.removeprefix("--").replace("-", "_"), known, 1, 0.75)
    advice = f"did you mean {flag(close[0])}?" if close else f"`ligermodels train {options.recipe} --help` lists all"
    return f"{options.recipe} has no option {name}; {advice}"


# The command line


def add_flags(parser: argparse.ArgumentParser, options: type[TrainOptions]) -> None:
    """Adds a flag for each field. Only flags that are given get into the namespace, as text."""
    groups: dict[str, Any] = {}
    fields, hints = fields_of(options), typing.get_type_hints(options)
    for name, title in groups_of(options).items():
        field, hint = fields[name], hints[name]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        help, choices = field.metadata["help"], field.metadata.get("choices")
        if name == "learning_rate":
            help = help.format(*options.default_rates)
        if field.default not in (None, "", ()) and not isinstance(field.default, bool):
            help += f" (default {_shown(field.default)})"
        common: dict[str, Any] = dict(default=argparse.SUPPRESS, help=help.replace("%", "%%"))
        if name == "model":
            groups[title].add_argument("model", nargs="?", metavar="MODEL", **common)
        elif hint is bool:
            groups[title].add_argument(flag(name), action=argparse.BooleanOptionalAction, **common)
        else:
            common["metavar"] = "{" + ",".join(choices) + "}" if choices else _metavar(name, hint)
            common["action"] = "append" if field.metadata.get("repeated") else "store"
            groups[title].add_argument(*map(flag, names_of(field)), dest=name, **common)


def groups_of(options: type[TrainOptions]) -> dict[str, str]:
    """The group of each option: that of the class which declares it first."""
    fields, classes = fields_of(options), reversed(options.__mro__)
    groups: dict[str, str] = {}
    for cls in classes:
        for name in fields.keys() & inspect.get_annotations(cls).keys() - groups.keys():
            groups[name] = cls.group  # type: ignore[attr-defined]
    return {name: groups[name] for name in fields}


def fields_of(options: Any) -> "dict[str, Field[Any]]":
    """The fields of options by name."""
    return {field.name: field for field in dataclasses.fields(options)}


def names_of(field: "Field[Any]") -> list[str]:
    """The name of an option, and its alias if it has one."""
    alias = field.metadata.get("alias")
    return [field.name, alias] if alias else [field.name]


def flag(name: str) -> str:
    """An option as it is given on the command line."""
    return "MODEL" if name == "model" else "--" + name.replace("_", "-")


def _metavar(name: str, hint: Any) -> str:
    if name in ("data", "eval_data", "chat_template"):
        return "FILE"
    if name == "system_prompt":
        return "TEXT"
    return "DIR" if name == "output_dir" else {int: "N", float: "X", str: "NAME"}.get(_kind(hint), "A,B")


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


# Values


def _kind(hint: Any) -> Any:
    """The type of an option, without None."""
    return typing.get_args(hint)[0] if isinstance(hint, types.UnionType) else hint


def _check(field: "Field[Any]", value: Any, hint: Any) -> Any:
    """The value in the type of its option; the text of a flag is parsed. Raises InputError."""
    kind = _kind(hint)
    if value is None:
        if kind is hint:
            raise InputError(f"{field.name} has no value; leave it out, or give one")
        return None
    if typing.get_origin(kind) is tuple:
        if isinstance(value, str | Path):
            repeated = "repeated" in field.metadata
            value = [value] if repeated else [item for item in str(value).split(",") if item]
        if not isinstance(value, list | tuple):
            raise InputError(f"{field.name}={value!r}: expected a list, such as {_shown(field.default) or 'a,b'}")
        return tuple(_check(field, item, typing.get_args(kind)[0]) for item in value)
    if kind is bool:
        if not isinstance(value, bool):
            raise InputError(f"{field.name}={value!r}: expected true or false")
        return value
    return _check_text(field, value) if kind is str else _check_number(field, value, kind)


def _check_text(field: "Field[Any]", value: Any) -> str:
    value, choices = str(value) if isinstance(value, Path) else value, field.metadata.get("choices")
    if not isinstance(value, str):
        raise InputError(f"{field.name}={value!r}: expected text; put it in quotes")
    if choices and value not in choices:
        near = [choice for choice in choices if value and choice.startswith(value)]
        near += difflib.get_close_matches(value, choices, 1, 0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InputError(f"{field.name}={value!r}: expected one of {', '.join(choices)}{hint}")
    return value


def _check_number(field: "Field[Any]", value: Any, kind: type) -> Any:
    try:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError
        number = kind(value)
        if not math.isfinite(number) or (not isinstance(value, str) and number != value):
            raise ValueError
    except (ValueError, OverflowError):
        wanted = "a whole number" if kind is int else "a number"
        raise InputError(f"{field.name}={value!r}: expected {wanted}") from None
    for name, (holds, words) in _BOUNDS.items():
        if name in field.metadata and not holds(number, field.metadata[name]):
            raise InputError(f"{field.name}={value}: expected {words.format(field.metadata[name])}")
    return number


def _read_yaml(file: Path) -> dict[Any, Any]:
    try:
        import yaml
    except ImportError:
        raise InputError("--config needs PyYAML: pip install 'ligermodels[train]'") from None

    try:
        text = file.read_text("utf-8")
        node, values = yaml.compose(text, yaml.SafeLoader), yaml.safe_load(text)
    except OSError as error:
        raise InputError(f"--config {file} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise InputError(f"{file} has no options; expected lines such as `learning_rate: 1e-5`")
    keys = [key.value for key, _ in node.value]  # of a key that is there twice, YAML takes the last
    if twice := [key for key in values if keys.count(key) > 1]:
        raise InputError(f"{file}: {twice[0]} is there twice")
    return values
