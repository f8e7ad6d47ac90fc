"""config.json, read and written in both of its generations.

transformers 4 spells the rotary base `rope_theta` with `rope_scaling` beside it and the dtype `torch_dtype`;
transformers 5 spells them `rope_parameters` and `dtype`. Either is read, both are written: a reader that knows
one spelling only would otherwise fall back to a wrong base without a word.
Silence is how wrong logits ship, so a field that is missing, of the wrong kind, or asks for something that is
not computed raises ConfigError. Keys that nobody here knows are kept for saving and named in one warning.
Source: configuration_utils.py and modeling_rope_utils.py of transformers 4.45, 4.57 and 5.23.
"""

import dataclasses
import math
import typing
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch

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
        model_type = config.get("model_type", cls.model_type)
        if model_type != cls.model_type:
            raise ConfigError(
                f"config.json has model_type {model_type!r}, but {cls.architecture} reads {cls.model_type!r}. "
                "ligermodels.load() picks the class by model_type."
            )
        if config.get("quantization_config"):
            method = dict(config["quantization_config"]).get("quant_method", "unknown")
            raise ConfigError(
                f"{cls.model_type}: quantization_config (quant_method {method!r}) is not supported: weights are "
                "read as float32, float16 or bfloat16. Use the unquantised checkpoint."
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
            raise ConfigError(
                f"{cls.model_type}: config.json lacks {', '.join(missing)}. Is it the config.json of the model "
                "itself, rather than of an adapter or a tokenizer?"
            )
        unknown = sorted(set(values["extra"]) - _KEPT - cls.unused)
        if unknown:
            warnings.warn(
                f"{cls.model_type}: config.json has keys that are not used here: {', '.join(unknown)}. They are kept "
                "for saving. If one of them changes what the model computes, do not trust its output.",
                stacklevel=3,
            )
        return cls(**values)

    @classmethod
    def _rope_from_hf(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """`rope_parameters` with `rope_type` and `rope_theta`, from either spelling."""
        old, new = config.get("rope_scaling") or {}, config.get("rope_parameters") or {}
        for name, value in (("rope_scaling", old), ("rope_parameters", new)):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{cls.model_type}: {name} is {value!r}, expected an object or null")
        top_level = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if config.get(key) is not None}
        rope: dict[str, Any] = {}
        for spelling in (cls._plain_rope(old), cls._plain_rope(new), top_level):
            for key, value in spelling.items():
                if rope.setdefault(key, value) != value:
                    raise ConfigError(
                        f"{cls.model_type}: config.json gives {key} twice, as {rope[key]!r} and as {value!r}. The two "
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
        rope_type = rope.get("rope_type") or rope.get("type")
        named = {"rope_type": cls.rope_aliases.get(rope_type, rope_type)} if rope_type else {}
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
                f"{self.model_type}: rope_type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
            )
        if isinstance(theta, bool) or not isinstance(theta, int | float) or not 0 < theta < math.inf:
            raise ConfigError(f"{self.model_type}: rope_theta is {theta!r}, expected a positive number")
        partial = self.rope_parameters.get("partial_rotary_factor", 1.0)
        if partial != 1.0 and not self.partial_rotary:
            raise ConfigError(f"{self.model_type}: partial_rotary_factor {partial!r} is not supported; supported: 1.0")

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
        elif float in _plain(kind):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise self._error(name, "must be a finite number, zero or more")
        elif name == "sliding_window" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise self._error(name, "must be a positive number of tokens, or null for no window")
        elif not isinstance(value, _plain(kind)) or (isinstance(value, bool) and bool not in _plain(kind)):
            raise self._error(name, f"must be {_words(kind)}")

    def _error(self, name: str, problem: str) -> ConfigError:
        return ConfigError(f"{self.model_type}: {name}={getattr(self, name)!r} {problem}")

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

    to_dict = to_hf

    def window(self, layer: int) -> int | None:
        """Tokens that a query of block `layer` sees, counting itself; None where it sees all before it."""
        return None

    def get_text_config(self, decoder: bool = True) -> Self:
        """The part that describes the language model: all of it."""
        return self


@dataclass(kw_only=True)
class RoutedConfig(ModelConfig):
    """The fields that every mixture of experts shares: what the loss that balances its experts needs."""

    num_experts_per_tok: int = 2
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001


def _one_spelling(cls: type[ModelConfig], config: Mapping[str, Any], new: str, old: str) -> Any:
    """The value of a field with two names, which must not contradict each other."""
    a, b = (
        value.removeprefix("torch.") if isinstance(value, str) else value
        for value in (config.get(new), config.get(old))
    )
    if a is not None and b is not None and a != b:
        raise ConfigError(f"{cls.model_type}: config.json has {new}={a!r} and {old}={b!r}; remove the wrong one")
    return b if a is None else a


def _plain(kind: Any) -> tuple[type, ...]:
    """The classes that isinstance can check for an annotation such as `int | list[int] | None`."""
    parts = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, type(int | str)) else (kind,)
    return tuple(typing.get_origin(part) or part for part in parts)


def _words(kind: Any) -> str:
    return " or ".join("null" if part is type(None) else part.__name__ for part in _plain(kind))
