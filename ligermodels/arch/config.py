"""config.json, read and written in both of its generations.

transformers 4 spells the rotary base `rope_theta` with `rope_scaling` beside it and the dtype `torch_dtype`;
transformers 5 spells them `rope_parameters` and `dtype`. Either is read, both are written: a reader that knows
one spelling only would otherwise fall back to a wrong base without a word.
Silence is how wrong logits ship, so a field that is missing, of the wrong kind, or asks for something that is
not computed raises ConfigError. Keys that nobody here knows are kept for saving and named in one warning.
Source: configuration_utils.py and modeling_rope_utils.py of transformers 4.45, 4.57 and 5.23.
"""

import dataclasses
import json
import math
import reprlib
import typing
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from ligermodels.checkpoint import hub, reading
from ligermodels.errors import ConfigError

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""config.json's word for an activation -> ours."""

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}

LAYER_TYPES = ("full_attention", "sliding_attention")
_DROPOUTS = ("attention_dropout", "resid_pdrop", "embd_pdrop")
_MAY_BE_ZERO = ("max_window_layers",)
_MAY_BE_ABSENT = ("num_key_value_heads", "head_dim", "layer_types")  # follow from the others, once these are known

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_NEEDS_ORIGINAL_LENGTH = ("llama3", "yarn", "longrope")

# Largest values of a size: a few times those of any model, and such that no product of them leaves 63 bits.
_MOST = {
    "vocab_size": 2**28,
    "num_hidden_layers": 2**10,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**16,
    "num_local_experts": 2**12,
    "max_position_embeddings": 2**48,
    "original_max_position_embeddings": 2**48,
    "max_window_layers": 2**48,
    "sliding_window": 2**48,
}
_MOST_OTHERS = 2**20
_MOST_EXPERTS_IN_ALL = 2**13  # the largest of the zoo has 448
_LEAST_FLOAT = 1e-30
"""Above zero, and fp32 can divide by it."""
_DEEPEST = 32
"""Objects and lists within each other in a config.json; real ones have four."""
_ROPE_NUMBERS, _ROPE_KEYS, _ROPE_LIST = (1e-9, 1e15), 32, 2**12
_NAME = 200
"""Characters of a key that messages may show."""

# Carried by files but without a say in what is computed; not written back.
_DROPPED = {"auto_map", "model_type", "architectures", "transformers_version", "torch_dtype", "rope_theta"}
_DROPPED |= {
    "rope_scaling",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "_name_or_path",
    "_attn_implementation_autoset",
}
# Known to transformers, of no consequence here; written back as found.
_KEPT = {"pretraining_tp", "cache_implementation", "return_dict", "output_attentions", "output_hidden_states"}
_KEPT |= {
    "id2label",
    "label2id",
    "problem_type",
    "chunk_size_feed_forward",
    "is_encoder_decoder",
    "task_specific_params",
}


@dataclass(kw_only=True)
class ModelConfig:
    """The fields that every text architecture shares, under config.json's own names.

    Not frozen, since trainers assign `use_cache` and `pad_token_id`. `rope_parameters` always holds `rope_type`
    and `rope_theta`; `extra` holds the keys of config.json that are not ours.
    """

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    """The class name by which readers of the saved config.json find the model."""
    default_rope_theta: ClassVar[float] = 10000.0
    partial_rotary: ClassVar[bool] = False
    """Whether transformers honours `partial_rotary_factor` for this architecture."""
    rope_aliases: ClassVar[Mapping[str, str]] = {}
    """What this architecture's files call a rope type -> its name."""
    unused: ClassVar[frozenset[str]] = frozenset()
    """Keys that this architecture's files carry and no implementation reads."""
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    _attn_implementation: ClassVar[str] = "sdpa"
    num_labels: ClassVar[int] = 2
    """transformers' default, for a causal model too; TRL's RewardTrainer refuses a model by it."""
    _name_or_path = ""
    """What the model was loaded by, a repository or a folder; trainers and adapters write it down. Not saved."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = None  # type: ignore[assignment]  # absent or null: as many as query heads
    head_dim: int = None  # type: ignore[assignment]  # absent or null: hidden_size // num_attention_heads
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any] = field(default_factory=dict)
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    dtype: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """A config from the contents of a config.json of either generation.

        Raises ConfigError: another model_type, a missing field, a value of the wrong kind, a value that is not
        computed, the two spellings of a field at odds, or a quantised checkpoint.
        """
        if not isinstance(config, Mapping):
            raise ConfigError(f"{cls.model_type}: config.json holds a {type(config).__name__}, expected an object")
        _check_tree(f"{cls.model_type}: config.json", config)
        model_type = config.get("model_type", cls.model_type)
        if model_type != cls.model_type:
            raise ConfigError(
                f"config.json has model_type {short(model_type)}, but {cls.architecture} reads {cls.model_type!r}. "
                "ligermodels.load() picks the class by model_type."
            )
        if config.get("quantization_config"):
            quantization = config["quantization_config"]
            method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
            raise ConfigError(
                f"{cls.model_type}: quantization_config (quant_method {short(method or 'unknown')}) is not supported: "
                "weights are read as float32, float16 or bfloat16. Use the unquantised checkpoint."
            )
        known = {f.name for f in dataclasses.fields(cls)} - {"extra", "rope_parameters", "dtype"}
        values = {key: value for key, value in config.items() if key in known}
        values["dtype"] = _one_spelling(cls, config, "dtype", "torch_dtype")
        values["rope_parameters"] = cls._rope_from_hf(config)
        values["extra"] = {
            key: value for key, value in config.items()
            if key not in known and key not in _DROPPED and key not in ("dtype", "rope_parameters")
        }  # fmt: skip
        missing = [
            f.name for f in dataclasses.fields(cls)
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING and f.name not in values
        ]  # fmt: skip
        if missing:
            nested = isinstance(config.get("text_config"), Mapping)
            hint = (
                "It has a text_config: a model of more than text, which is not in the zoo."
                if nested
                else ("Is it the config.json of the model itself, rather than of an adapter or a tokenizer?")
            )
            raise ConfigError(f"{cls.model_type}: config.json lacks {', '.join(missing)}. {hint}")
        unknown = sorted(set(values["extra"]) - _KEPT - cls.unused)
        if unknown:
            warnings.warn(
                f"{cls.model_type}: config.json has keys that are not used here: {_names(unknown)}. They are kept "
                "for saving. If one of them changes what the model computes, do not trust its output.",
                stacklevel=3,
            )
        return cls(**values)

    @classmethod
    def from_pretrained(cls, id_or_folder: str | Path) -> Self:
        """The config in the config.json of a folder or repository: PEFT compares the vocabulary's size with it.

        Raises ConfigError as `from_hf` does, and HubError.
        """
        folder = hub.resolve(id_or_folder, weights=False)
        return cls.from_hf(reading.read_json(folder / "config.json"))

    @classmethod
    def _rope_from_hf(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """`rope_parameters` with `rope_type` and `rope_theta`, from either spelling."""
        old, new = ({} if config.get(name) is None else config[name] for name in ("rope_scaling", "rope_parameters"))
        for name, value in (("rope_scaling", old), ("rope_parameters", new)):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{cls.model_type}: {name} is {short(value)}, expected an object or null")
            if len(value) > _ROPE_KEYS:
                raise ConfigError(f"{cls.model_type}: {name} has {len(value)} keys; a rope type has at most nine")
            _check_names(f"{cls.model_type}: {name} of config.json", value)
        top_level = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if config.get(key) is not None}
        rope: dict[str, Any] = {}
        for spelling in (cls._plain_rope(old), cls._plain_rope(new), top_level):
            for key, value in spelling.items():
                if rope.setdefault(key, value) != value:
                    both = f"{short(rope[key])} and as {short(value)}"
                    raise ConfigError(
                        f"{cls.model_type}: config.json gives {key} twice, as {both}. The two "
                        "generations of the file disagree; remove the wrong one."
                    )
        rope.setdefault("rope_type", "default")
        rope.setdefault("rope_theta", cls.default_rope_theta)
        if rope["rope_type"] in _NEEDS_ORIGINAL_LENGTH:
            length = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
            rope["original_max_position_embeddings"] = length or config.get("max_position_embeddings")
        return rope

    @classmethod
    def _plain_rope(cls, rope: Mapping[str, Any]) -> dict[str, Any]:
        """`rope` with its type, where it has one, under the newer key and its own name."""
        rope_type = rope.get("type") if rope.get("rope_type") is None else rope["rope_type"]
        if rope_type is not None and (not isinstance(rope_type, str) or not rope_type):
            raise ConfigError(f"{cls.model_type}: rope_type is {short(rope_type)}, expected a string")
        named = {} if rope_type is None else {"rope_type": cls.rope_aliases.get(rope_type, rope_type)}
        return {**{key: value for key, value in rope.items() if key not in ("rope_type", "type")}, **named}

    def __post_init__(self) -> None:
        if not self.rope_parameters:
            self.rope_parameters = {"rope_type": "default", "rope_theta": self.default_rope_theta}
        kinds = typing.get_type_hints(type(self))
        for name in (f.name for f in dataclasses.fields(self) if f.name != "extra"):
            self._check_kind(name, getattr(self, name), kinds[name])
        heads = self.num_attention_heads
        if self.head_dim is None:
            if self.hidden_size % heads:
                raise self._error(
                    "num_attention_heads", f"must divide hidden_size {self.hidden_size}; or give head_dim"
                )
            self.head_dim = self.hidden_size // heads
        if self.num_key_value_heads is None:
            self.num_key_value_heads = heads
        if heads % self.num_key_value_heads:
            raise self._error("num_key_value_heads", f"must divide num_attention_heads {heads}")
        if self.head_dim % 2:
            raise self._error("head_dim", "must be even: the rotary embedding turns pairs of dimensions")
        if self.hidden_act not in ACTIVATIONS:
            raise self._error("hidden_act", f"is not supported; supported: {', '.join(ACTIVATIONS)}")
        for name in _DROPOUTS:
            if getattr(self, name, 0.0):
                raise self._error(name, "is not supported; set it to 0.0 if it does not matter to you")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise self._error("dtype", f"is not supported; supported: {', '.join(DTYPES)}")
        rope_type, theta = self.rope_parameters.get("rope_type"), self.rope_parameters.get("rope_theta")
        if rope_type not in ROPE_TYPES:
            raise ConfigError(
                f"{self.model_type}: rope_type {short(rope_type)} is not supported; supported: {', '.join(ROPE_TYPES)}"
            )
        if isinstance(theta, bool) or not isinstance(theta, int | float) or not 0 < theta < math.inf:
            raise ConfigError(f"{self.model_type}: rope_theta is {short(theta)}, expected a positive number")
        for name, value in self.rope_parameters.items():
            self._check_rope_value(name, value)
        original = self.rope_parameters.get("original_max_position_embeddings")
        if rope_type == "longrope" and original is not None and original <= 1:
            raise ConfigError(
                f"{self.model_type}: original_max_position_embeddings is {short(original)}; longrope divides by its "
                "logarithm, so that it must be above 1"
            )
        partial = self.rope_parameters.get("partial_rotary_factor", 1.0)
        if (partial != 1.0 or isinstance(partial, bool)) and not self.partial_rotary:
            raise ConfigError(
                f"{self.model_type}: partial_rotary_factor {short(partial)} is not supported; supported: 1.0"
            )

    def _check_rope_value(self, name: str, value: Any) -> None:
        """Numbers that the tables can be made of, lists of them, strings and null; `layers.RotaryEmbedding` checks
        the rest."""
        low, high = _ROPE_NUMBERS
        many = isinstance(value, list | tuple)
        most = _ROPE_LIST if name in ("short_factor", "long_factor") else _ROPE_KEYS
        if many and len(value) > most:
            raise ConfigError(
                f"{self.model_type}: {name} of the rope dict is a list of {len(value)}; read are at most {most} numbers"
            )
        if isinstance(value, str) and len(value) > _NAME:
            raise ConfigError(f"{self.model_type}: {name} of the rope dict is {short(value)}, no number")
        for item in value if many else [value]:
            number = isinstance(item, int | float)
            if not number and (item is not value or not isinstance(value, str | None)):
                raise ConfigError(f"{self.model_type}: {name} of the rope dict is or holds {short(item)}, no number")
            if number and item and not low <= abs(item) <= high:
                raise ConfigError(
                    f"{self.model_type}: {name} of the rope dict is or holds {short(item)}; numbers from {low:g} to "
                    f"{high:g} can be computed with"
                )

    def _check_layer_types(self, layer_types: list[str]) -> None:
        """One known type for each block."""
        if len(layer_types) != self.num_hidden_layers or any(kind not in LAYER_TYPES for kind in layer_types):
            raise self._error(
                "layer_types", f"must name one of {', '.join(LAYER_TYPES)} for each of {self.num_hidden_layers} blocks"
            )

    def _check_kind(self, name: str, value: Any, kind: Any) -> None:
        """Sizes are positive integers, the rest is of its declared kind; null where the declaration allows it."""
        if value is None:
            if name in _MAY_BE_ABSENT or type(None) in typing.get_args(kind):
                return
            raise self._error(name, f"must be {_words(kind)}")
        if kind is int:
            least = 0 if name in _MAY_BE_ZERO else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise self._error(name, f"must be a{' positive' * least} integer{', zero or more' * (1 - least)}")
            if value > (most := _MOST.get(name, _MOST_OTHERS)):
                raise self._error(name, f"is too large to be meant: at most {most}. Is the file damaged?")
        elif float in _plain(kind):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**63:
                raise self._error(name, "must be a finite number, zero or more")
            if 0 < value < _LEAST_FLOAT:
                raise self._error(name, f"is too small to be meant; fp32 can compute with {_LEAST_FLOAT:g} and more")
            if name == "rms_norm_eps" and value > 1:
                raise self._error(name, "is too large to be meant: at most 1. It would drown what is normed")
        elif name == "sliding_window":
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST[name]:
                raise self._error(name, "must be a positive number of tokens, at most 2^48, or null for no window")
        elif not isinstance(value, _plain(kind)) or (isinstance(value, bool) and bool not in _plain(kind)):
            raise self._error(name, f"must be {_words(kind)}")
        elif name.endswith("_token_id") and not all(map(_is_id, value if isinstance(value, list) else [value])):
            raise self._error(name, f"must be {_words(kind)}, all of them ids")

    def _error(self, name: str, problem: str) -> ConfigError:
        return ConfigError(f"{self.model_type}: {name}={short(getattr(self, name))} {problem}")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype that the checkpoint was written in; float32 if config.json does not say."""
        return DTYPES[self.dtype or "float32"]

    @property
    def padding_idx(self) -> int | None:
        """The row of the embedding that takes no gradient, as in transformers: `pad_token_id` where that is a row."""
        pad = self.pad_token_id
        return pad if pad is not None and 0 <= pad < self.vocab_size else None

    def to_hf(self) -> dict[str, Any]:
        """The contents of a config.json that both generations of transformers read alike."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "extra"}
        rope = self.rope_parameters
        scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **self.extra,
            **values,
            "torch_dtype": self.dtype,
            **{key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope},
            "rope_scaling": None if rope["rope_type"] == "default" else scaling,
            # Where transformers 4 looks for longrope's.
            **{key: rope[key] for key in ("original_max_position_embeddings",) if rope["rope_type"] == "longrope"},
        }

    def to_dict(self) -> dict[str, Any]:
        """`to_hf` and what the model was loaded by, for those who log a run."""
        return {**self.to_hf(), "_name_or_path": self._name_or_path}

    def to_json_string(self, use_diff: bool = True) -> str:
        """`to_dict` as JSON, for Trainer's TensorBoard callback. Every field is in it, whatever `use_diff` says."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"

    def window(self, layer: int) -> int | None:
        """Tokens that a query of block `layer` sees, counting itself; None where it sees all before it."""
        return None

    @property
    def per_layer_config(self) -> list[Self]:
        """This config once a block, by the name under which transformers' caches look for what differs among blocks."""
        return [self] * self.num_hidden_layers

    def get_text_config(self, decoder: bool = True) -> Self:
        """The part that describes the language model: all of it."""
        return self


@dataclass(kw_only=True)
class RoutedConfig(ModelConfig):
    """The fields that every mixture of experts shares: what the loss that balances its experts needs."""

    num_experts_per_tok: int = 2
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001

    def __post_init__(self) -> None:
        super().__post_init__()
        experts = getattr(self, "num_local_experts", 1)
        if experts * self.num_hidden_layers > _MOST_EXPERTS_IN_ALL:
            raise self._error(
                "num_local_experts",
                f"in each of {self.num_hidden_layers} blocks are too many to be meant: at most "
                f"{_MOST_EXPERTS_IN_ALL} in all. Is the file damaged?",
            )


def _one_spelling(cls: type[ModelConfig], config: Mapping[str, Any], new: str, old: str) -> Any:
    """The value of a field with two names, which must not contradict each other."""
    a, b = (
        value.removeprefix("torch.") if isinstance(value, str) else value
        for value in (config.get(new), config.get(old))
    )
    if a is not None and b is not None and a != b:
        raise ConfigError(
            f"{cls.model_type}: config.json has {new}={short(a)} and {old}={short(b)}; remove the wrong one"
        )
    return b if a is None else a


def _plain(kind: Any) -> tuple[type, ...]:
    """The classes that isinstance can check for an annotation such as `int | list[int] | None`."""
    parts = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, type(int | str)) else (kind,)
    return tuple(typing.get_origin(part) or part for part in parts)


def _words(kind: Any) -> str:
    return " or ".join("null" if part is type(None) else part.__name__ for part in _plain(kind))


def check_generation_config(where: str, values: Mapping[str, Any]) -> None:
    """Raises ConfigError for the contents of a generation_config.json that generation or saving would trip over.

    where: the file, for messages. Looked at are the ids that `generate` takes from it, which may lie outside the
    vocabulary (some files write -1 for none), and what `from_hf` asks of every key and value.
    """
    _check_tree(where, values)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = values.get(name)
        ids = value if isinstance(value, list) and name == "eos_token_id" else [value]
        if not all(item is None or _is_id(item) for item in ids):
            lists = " or a list of ids" if name == "eos_token_id" else ""
            raise ConfigError(f"{where}: {name}={short(value)} must be a token id{lists}, or null")


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _check_tree(where: str, tree: Mapping[str, Any]) -> None:
    """What could be read and not be shown, compared or written again is refused at once: depth, keys, lone surrogates,
    NaN."""
    level: list[Any] = [tree]
    for _ in range(_DEEPEST):
        for item in level:
            if isinstance(item, Mapping) and not all(isinstance(key, str) for key in item):
                raise ConfigError(f"{where} has keys that are no strings: {short(list(item))}")
            for key, value in item.items() if isinstance(item, Mapping) else enumerate(item):
                for text in (key, value):
                    if isinstance(text, str) and not text.isascii() and not _has_utf8(text):
                        raise ConfigError(f"{where} holds a lone surrogate, which has no UTF-8: {ascii(text)[:80]}")
                if isinstance(value, float) and math.isnan(value):
                    raise ConfigError(f"{where} has {_names([str(key)])}=nan, which must be a finite number")
        parts = (part for item in level for part in (item.values() if isinstance(item, Mapping) else item))
        level = [part for part in parts if isinstance(part, Mapping | list | tuple)]
        if not level:
            return _check_names(where, tree)
    raise ConfigError(f"{where} nests objects or lists more than {_DEEPEST} deep. Is it the file of a model?")


def _has_utf8(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _check_names(where: str, keys: Iterable[str]) -> None:
    """Keys are shown in messages: what moves a terminal's cursor, or fills its screen, is none."""
    for key in keys:
        if not 0 < len(key) <= _NAME or not key.isprintable():
            raise ConfigError(f"{where} has the key {short(key)}, which no model has; do not trust it")


_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother, _REPR.maxlong = 3, 80, 80, 80


def short(value: Any) -> str:
    """`repr`, of a bounded length, for messages."""
    try:
        return _REPR.repr(value)
    except ValueError:  # Python refuses to spell an int of more than 4300 digits
        return "a number of thousands of digits"


def _names(names: list[str]) -> str:
    """The first names of a list that may be endless."""
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return ", ".join(name[:80] if name.isprintable() else ascii(name[:80]) for name in names[:20]) + more
