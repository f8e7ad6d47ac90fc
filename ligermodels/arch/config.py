"""config.json, read and written in both of its generations.

transformers 4 has `rope_theta` with `rope_scaling` beside it, and the dtype as `torch_dtype`; transformers 5 has
`rope_parameters` and `dtype`. Either is read, and both are written: a reader that knows one spelling alone would
otherwise use a wrong base without an error.
A field that is missing, of the wrong type, or has an unsupported value raises ConfigError. Other keys are kept for
saving; one warning names those that are not known to be harmless.
Source: configuration_utils.py and modeling_rope_utils.py of transformers 4.45, 4.57 and 5.23.
"""

import dataclasses
import json
import math
import types
import typing
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from ligermodels.checkpoint import dtypes, files, hub
from ligermodels.errors import ConfigError
from ligermodels.generation.options import KNOWN_NAMES

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""config.json's name of an activation -> ours."""

LAYER_TYPES = ("full_attention", "sliding_attention")
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
_NEEDS_ORIGINAL_LENGTH = ("llama3", "yarn", "longrope")
_DROPOUTS = ("attention_dropout", "resid_pdrop", "embd_pdrop", "dropout")
_MAY_BE_ZERO = (
    "max_window_layers", "first_k_dense_replace", "hidden_size_per_layer_input", "num_kv_shared_layers",
)  # fmt: skip

_DROPPED = frozenset("""
    _attn_implementation_autoset _name_or_path architectures auto_map model_type original_max_position_embeddings
    partial_rotary_factor rope_scaling rope_theta torch_dtype transformers_version
""".split())  # fmt: skip  # noqa: SIM905
"""Keys without effect on the model, or read under another name; not written back."""
KNOWN_WITHOUT_EFFECT = (KNOWN_NAMES - {"use_cache"}) | frozenset("""
    _attn_implementation _attn_implementation_internal _auto_class _commit_hash _experts_implementation
    _experts_implementation_internal _flash_attn_2_enabled _from_model_config _is_quantized _name_or_path
    _output_attentions add_cross_attention architectures attn_implementation base_model_ep_plan base_model_fsdp_plan
    base_model_pp_plan base_model_tp_plan chunk_size_feed_forward cls_token_id cross_attention_hidden_size
    distributed_config dtype experts_implementation finetuning_task gradient_checkpointing id2label
    ignore_keys_at_rope_validation is_decoder is_encoder_decoder label2id mask_token_id model_type num_labels prefix
    pretraining_tp problem_type pruned_heads return_dict sep_token_id task_specific_params tf_legacy_loss
    tie_encoder_decoder tie_word_embeddings tokenizer_class torch_dtype torchscript transformers_version unk_token_id
    use_bfloat16

    _model_name_or_path is_llama_config transformers.js_config unsloth_fixed unsloth_version

    layer_types quantization_config rope_interleaved
""".split())  # fmt: skip  # noqa: SIM905
"""Keys from which no model here computes anything: options of generate, which transformers 4 saved in config.json; and
in three paragraphs: what transformers writes in any config (the attributes and internal keys of PreTrainedConfig, 4.x
and 5.23); what other tools write (nanotron's converter for SmolLM2, transformers.js, Unsloth); and what is refused
where its value would change the output."""


@dataclass(kw_only=True)
class CheckedFields:
    """Fields under config.json's own names, checked against their annotations; `extra` has the unknown keys.

    An int is a size, 1 or more; a float is finite, 0 or more. Raises ConfigError.
    """

    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def label(cls) -> str:
        """The name of the object in error messages."""
        raise NotImplementedError

    @classmethod
    def field_names(cls) -> set[str]:
        return {f.name for f in dataclasses.fields(cls)} - {"extra"}

    def values(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "extra"}

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for name, value in self.values().items():
            self._check_type(name, value, hints[name])

    def _check_type(self, name: str, value: Any, hint: Any) -> None:
        allowed = _classes(hint)
        # A field whose default is None follows from others, or is not there.
        may_be_absent = any(vars(cls).get(name, ...) is None for cls in type(self).__mro__)
        if value is None and (type(None) in allowed or may_be_absent):
            return
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if hint is int or (name == "sliding_window" and value is not None):
            least = 0 if name in _MAY_BE_ZERO else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise self._error(name, f"must be {'an integer, zero or more' if least == 0 else 'a positive integer'}")
        elif float in allowed:
            if not number or not 0 <= value < math.inf:
                raise self._error(name, "must be a finite number, zero or more")
        elif not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in allowed)
            raise self._error(name, f"must be {names}")

    def _check_choice(self, name: str, choices: Iterable[str]) -> None:
        if getattr(self, name) not in (*choices,):
            raise self._error(name, f"is not supported; supported: {', '.join(choices)}")

    def _error(self, name: str, problem: str) -> ConfigError:
        return ConfigError(f"{self.label()}: {name}={getattr(self, name)!r} {problem}")


@dataclass(kw_only=True)
class ModelConfig(CheckedFields):
    """The fields that every text architecture shares.

    Not frozen, since trainers assign `use_cache` and `pad_token_id`. `rope_parameters` always has `rope_type` and
    `rope_theta`.
    """

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    """The class name by which readers of the saved config.json find the model."""
    default_rope_theta: ClassVar[float] = 10000.0
    partial_rotary: ClassVar[bool] = False
    """Whether this architecture reads `partial_rotary_factor`."""
    default_ropes: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Of an architecture with a rope for each layer type: {layer type: its settings where config.json has none}. Its
    `rope_parameters` are then by layer type."""
    rope_aliases: ClassVar[Mapping[str, str]] = {}
    """Names of rope types in this architecture's files -> ours."""
    aliases: ClassVar[Mapping[str, str]] = {}
    """Other keys of this architecture's files -> the field that is read from them."""
    dropped: ClassVar[frozenset[str]] = frozenset()
    """Keys of this architecture's files that are read under another name or by nobody; not written back."""
    unused: ClassVar[frozenset[str]] = frozenset()
    """Keys that this architecture's files carry and no implementation reads."""
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    _attn_implementation: ClassVar[str] = "sdpa"
    is_encoder_decoder: ClassVar[bool] = False
    num_labels: ClassVar[int] = 2
    """transformers' default, for a causal model too; TRL's RewardTrainer refuses a model by it."""
    _name_or_path = ""
    """The repository or folder that the model was loaded from, for trainers and adapters. Not saved."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # None is the default of families whose blocks need no dense MLP
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

    @classmethod
    def label(cls) -> str:
        return cls.model_type

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """A config from the contents of a config.json of either generation.

        Raises ConfigError for another model_type, a missing field, a value of the wrong type or not supported, two
        spellings of a field that disagree, or a quantised checkpoint.
        """
        model_type = config.get("model_type", cls.model_type)
        if model_type != cls.model_type:
            raise ConfigError(
                f"config.json has model_type {model_type!r}, but {cls.architecture} reads {cls.model_type!r}. "
                "ligermodels.load() picks the class by model_type."
            )
        if quantization := config.get("quantization_config"):
            method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
            raise ConfigError(
                f"{cls.model_type}: quantization_config (quant_method {method!r}) is not supported: weights are read "
                "as float32, float16 or bfloat16. Use the unquantised checkpoint."
            )
        config = cls._without_aliases(config)
        known = cls.field_names() - {"rope_parameters", "dtype"}
        values = {key: value for key, value in config.items() if key in known}
        missing = [
            f.name for f in dataclasses.fields(cls)
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING and f.name not in values
        ]  # fmt: skip
        if missing:
            raise ConfigError(
                f"{cls.model_type}: config.json lacks {', '.join(missing)}. Is it the config.json of an adapter, a "
                "tokenizer, or a model with a text_config that is not in the zoo?"
            )
        values["dtype"] = cls._dtype_from_hf(config)
        values["rope_parameters"] = cls._rope_from_hf(config)
        others = {key: value for key, value in config.items() if key not in known | _DROPPED | cls.dropped}
        values["extra"] = {key: value for key, value in others.items() if key not in ("dtype", "rope_parameters")}
        if unknown := _unknown(values["extra"], cls.unused):
            warnings.warn(
                f"{cls.model_type}: config.json has keys that are not used here: {', '.join(unknown)}. They are kept "
                "for saving. If one of them changes what the model computes, do not trust its output.",
                stacklevel=3,
            )
        return cls(**values)

    @classmethod
    def from_pretrained(cls, id_or_folder: str | Path) -> Self:
        """The config of a folder or repository. PEFT compares the vocabulary's size with it.

        Raises ConfigError as `from_hf` does, and HubError.
        """
        folder = hub.resolve(id_or_folder, weights=False)
        return cls.from_hf(files.read_json(folder / "config.json"))

    @classmethod
    def _without_aliases(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        values = dict(config)
        for alias, name in cls.aliases.items():
            if (value := values.pop(alias, None)) is None:
                continue
            if values.get(name, value) not in (None, value):
                raise ConfigError(
                    f"{cls.model_type}: config.json has {name}={values[name]!r} and {alias}={value!r}; remove one"
                )
            values[name] = value
        return values

    @classmethod
    def _dtype_from_hf(cls, config: Mapping[str, Any]) -> Any:
        new, old = (
            value.removeprefix("torch.") if isinstance(value, str) else value
            for value in (config.get("dtype"), config.get("torch_dtype"))
        )
        if new is not None and old is not None and new != old:
            raise ConfigError(f"{cls.model_type}: config.json has dtype={new!r} and torch_dtype={old!r}; remove one")
        return old if new is None else new

    @classmethod
    def _rope_from_hf(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """`rope_parameters` with `rope_type` and `rope_theta`, from either spelling, or these by layer type.

        By layer type, `rope_theta` and `rope_scaling` are the older spelling of the rope of full_attention, and
        `rope_local_base_freq` is that of sliding_attention's base.
        """
        if not cls.default_ropes:
            return cls._one_rope_from_hf(config, {"rope_type": "default", "rope_theta": cls.default_rope_theta})
        by_type = config.get("rope_parameters") or {}
        if not isinstance(by_type, Mapping) or by_type.keys() - cls.default_ropes.keys():
            expected = f"expected an object by layer type: {', '.join(cls.default_ropes)}"
            raise ConfigError(f"{cls.model_type}: rope_parameters is {by_type!r:.80}, {expected}")
        local = {"rope_theta": config.get("rope_local_base_freq"), "rope_scaling": None}
        older = {"full_attention": config, "sliding_attention": {**config, **local}}
        return {
            name: cls._one_rope_from_hf({**older[name], "rope_parameters": by_type.get(name)}, default)
            for name, default in cls.default_ropes.items()
        }

    @classmethod
    def _one_rope_from_hf(cls, config: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, Any]:
        nested = []
        for name in ("rope_scaling", "rope_parameters"):
            value = {} if config.get(name) is None else config[name]
            if not isinstance(value, Mapping):
                raise ConfigError(f"{cls.model_type}: {name} is {value!r}, expected an object or null")
            nested.append(cls._with_rope_type(value))
        top_level = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if config.get(key) is not None}
        rope: dict[str, Any] = {}
        for spelling in (*nested, top_level):
            for key, value in spelling.items():
                if rope.setdefault(key, value) != value:
                    raise ConfigError(
                        f"{cls.model_type}: config.json gives {key} twice, as {rope[key]!r} and as {value!r}. The two "
                        "generations of the file disagree; remove the wrong one."
                    )
        rope = rope or dict(default)
        rope.setdefault("rope_type", "default")
        rope.setdefault("rope_theta", default["rope_theta"])
        if rope["rope_type"] in _NEEDS_ORIGINAL_LENGTH:
            length = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
            rope["original_max_position_embeddings"] = length or config.get("max_position_embeddings")
        return rope

    @classmethod
    def _with_rope_type(cls, rope: Mapping[str, Any]) -> dict[str, Any]:
        """`rope` with its type under the newer key and our name."""
        rope_type = rope.get("type") if rope.get("rope_type") is None else rope["rope_type"]
        if not isinstance(rope_type, str | None):
            raise ConfigError(f"{cls.model_type}: rope_type is {rope_type!r}, expected a string")
        named = {} if rope_type is None else {"rope_type": cls.rope_aliases.get(rope_type, rope_type)}
        return {**{key: value for key, value in rope.items() if key not in ("rope_type", "type")}, **named}

    def __post_init__(self) -> None:
        if not self.rope_parameters:
            self.rope_parameters = self._rope_from_hf({})
        super().__post_init__()
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
            raise self._error("head_dim", "must be even: the rotary embedding rotates pairs of dimensions")
        self._check_choice("hidden_act", ACTIVATIONS)
        for name in _DROPOUTS:
            if getattr(self, name, 0.0):
                raise self._error(name, "is not supported; set it to 0.0 if it does not matter to you")
        if self.dtype is not None:
            self._check_choice("dtype", dtypes.NAMES)
        if self.extra.get("rope_interleaved"):
            raise ConfigError(f"{self.model_type}: rope_interleaved is set, but halves of a head are rotated here")
        if (layer_types := self.extra.get("layer_types")) is not None:
            computed = "full_attention" if self.window(0) is None else "sliding_attention"
            if layer_types != [computed] * self.num_hidden_layers:
                raise ConfigError(
                    f"{self.model_type}: layer_types is {layer_types!r}, but every block is {computed} here"
                )
        self._check_rope()

    def _check_rope(self) -> None:
        """The rope type and base; `layers.RotaryEmbedding` checks the numbers of a type when the model is built."""
        for rope in self.ropes.values():
            self._check_one_rope(rope)

    def _check_one_rope(self, rope: Mapping[str, Any]) -> None:
        if rope.get("rope_type") not in ROPE_TYPES:
            rope_type, supported = rope.get("rope_type"), ", ".join(ROPE_TYPES)
            raise ConfigError(f"{self.model_type}: rope_type {rope_type!r} is not supported; supported: {supported}")
        for name in ("rope_theta", "partial_rotary_factor"):
            value = rope.get(name, 1.0)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigError(f"{self.model_type}: {name} is {value!r}, expected a positive number")
        if rope.get("partial_rotary_factor", 1.0) != 1.0 and not self.partial_rotary:
            factor = rope["partial_rotary_factor"]
            raise ConfigError(f"{self.model_type}: partial_rotary_factor {factor!r} is not supported; supported: 1.0")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype that the checkpoint was written in; float32 if config.json does not say."""
        return getattr(torch, self.dtype or "float32")

    @property
    def padding_idx(self) -> int | None:
        """The row of the embedding that takes no gradient, as in transformers: `pad_token_id` where that is a row."""
        pad = self.pad_token_id
        return pad if pad is not None and 0 <= pad < self.vocab_size else None

    def to_hf(self) -> dict[str, Any]:
        """The contents of a config.json for both generations of transformers."""
        rope = self.rope_parameters
        whole = {"architectures": [self.architecture], "model_type": self.model_type, **self.extra, **self.values()}
        if self.intermediate_size is None:  # transformers reads no null there
            del whole["intermediate_size"]
        if "rope_type" not in rope:  # by layer type, which the newer generation has
            return {**whole, "torch_dtype": self.dtype}
        scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
        at_the_top = ["rope_theta", "partial_rotary_factor"]
        if rope["rope_type"] == "longrope":  # where transformers 4 looks for it
            at_the_top.append("original_max_position_embeddings")
        return {
            **whole,
            "torch_dtype": self.dtype,
            "rope_scaling": None if rope["rope_type"] == "default" else scaling,
            **{key: rope[key] for key in at_the_top if key in rope},
        }

    def to_dict(self) -> dict[str, Any]:
        """`to_hf` and the name that the model was loaded from, for logging a run."""
        return {**self.to_hf(), "_name_or_path": self._name_or_path}

    def to_json_string(self, use_diff: bool = True) -> str:
        """`to_dict` as JSON, for Trainer's TensorBoard callback; always with every field."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"

    def window(self, layer: int) -> int | None:
        """Tokens that a query of block `layer` sees, itself included; None where it sees all before it."""
        return None

    def layer(self, layer: int) -> Self:
        """The config of block `layer`: this one, or a copy with other heads, head_dim or intermediate_size."""
        return self

    def rope(self, layer: int) -> str:
        """The name of the rope that block `layer` reads, a key of `ropes`."""
        return "full"

    @property
    def ropes(self) -> dict[str, dict[str, Any]]:
        """The settings of each rope by name: "full", and where `rope_parameters` are by layer type "sliding" too."""
        rope = self.rope_parameters
        return {"full": rope} if "rope_type" in rope else {name.removesuffix("_attention"): rope[name] for name in rope}

    @property
    def per_layer_config(self) -> list[Self]:
        """The config of each block, as transformers' caches read it."""
        return [self.layer(layer) for layer in range(self.num_hidden_layers)]

    def get_text_config(self, decoder: bool = True) -> Self:
        """The config of the language model, as transformers names it."""
        return self


@dataclass(kw_only=True)
class VisionConfig(CheckedFields):
    """The vision_config of a config.json."""

    dropped: ClassVar[frozenset[str]] = frozenset({"model_type", "dtype", "torch_dtype"})
    """Keys that the vision tower does not use; not written back."""
    unused: ClassVar[frozenset[str]] = frozenset()
    """Keys that files carry and no implementation reads; written back."""

    @classmethod
    def from_hf(cls, config: Any) -> Self:
        """A config from the vision_config of either generation, where null means absent. Raises ConfigError."""
        if not isinstance(config, Mapping):
            raise ConfigError(f"{cls.label()} is {config!r}, expected an object")
        known = cls.field_names()
        values = {key: value for key, value in config.items() if key in known and value is not None}
        extra = {key: value for key, value in config.items() if key not in known | cls.dropped}
        if unknown := _unknown(extra, cls.unused):
            names = ", ".join(unknown)
            warnings.warn(f"{cls.label()} has keys that are kept for saving, but not used here: {names}", stacklevel=6)
        return cls(**values, extra=extra)

    def to_hf(self) -> dict[str, Any]:
        """The vision_config for both generations of transformers."""
        return self.extra | self.values()

    to_dict = to_hf


@dataclass(kw_only=True)
class NestedFields(CheckedFields):
    """Reads and writes a config.json with a text_config and a vision_config; a mixin before the config of the text.

    root: the unknown keys beside the two objects. Of a field that stands in both places, that of the text holds; of
    tie_word_embeddings that of the root, as in transformers 5, which writes a default into the text.
    """

    text_type: ClassVar[str]
    """model_type of the text_config."""
    vision_class: ClassVar[type[VisionConfig]]
    root_fields: ClassVar[tuple[str, ...]]
    """The fields that stand beside the objects."""

    root: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_hf(cls: Any, config: Mapping[str, Any]) -> Any:
        """A config from the contents of a config.json of either generation. Raises as `ModelConfig.from_hf`."""
        parent: Any = super()
        if config.get("model_type", cls.model_type) != cls.model_type:
            return parent.from_hf(config)
        text, vision = config.get("text_config") or {}, config.get("vision_config") or {}
        for name, value in (("text_config", text), ("vision_config", vision)):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{cls.model_type}: {name} is {value!r:.80}, expected an object")
        if text.get("model_type", cls.text_type) not in (cls.text_type, cls.model_type):
            what = f"the text_config has model_type {text['model_type']!r}"
            raise ConfigError(f"{cls.model_type}: {what}, expected {cls.text_type!r}")
        ids, types = {"bos_token_id", "eos_token_id", "pad_token_id"}, {"dtype", "torch_dtype"}
        quantized = {"quantization_config"} if config.get("quantization_config") else set()  # which is refused
        parts = {"root", "text_config", "vision_config"}
        left_out = KNOWN_WITHOUT_EFFECT - cls.field_names() - types - quantized | parts
        root = {key: value for key, value in config.items() if key not in left_out | ids}
        text = {key: value for key, value in text.items() if key not in left_out | (types & root.keys() and types)}
        tied = root.get("tie_word_embeddings", text.get("tie_word_embeddings")) or False
        config_of_text = parent.from_hf({**root, **text, "vision_config": vision, "tie_word_embeddings": tied})
        config_of_text.root = {
            key: config_of_text.extra.pop(key) for key in root if key in config_of_text.extra and key not in text
        }
        return config_of_text

    def __post_init__(self: Any) -> None:
        if isinstance(self.vision_config, Mapping):
            self.vision_config = self.vision_class.from_hf(self.vision_config)
        super().__post_init__()

    def to_hf(self: Any) -> dict[str, Any]:
        text = super().to_hf()  # type: ignore[misc]  # of the config of the text
        del text["root"]
        shared = ("architectures", "model_type", "dtype", "torch_dtype", *self.root_fields)
        root = {name: text.pop(name) for name in shared}
        vision = text.pop("vision_config").to_hf()
        text |= {"model_type": self.text_type, "dtype": self.dtype, "torch_dtype": self.dtype}
        root["tie_word_embeddings"] = self.tie_word_embeddings
        return {**self.root, **root, "text_config": text, "vision_config": vision}


class TextAlone(CheckedFields):
    """Reads the text of a model that also reads images, too, whose model_type lacks `_text`; a mixin before the config
    of the text."""

    model_type: ClassVar[str]
    left_out: ClassVar[str]
    """What is not read of the whole model, for a warning."""

    @classmethod
    def from_hf(cls: Any, config: Mapping[str, Any]) -> Any:
        """A config from the contents of a config.json of the text or of the whole. Raises as `ModelConfig.from_hf`."""
        parent: Any = super()
        if cls.model_type != (whole := cls.model_type.removesuffix("_text")) == config.get("model_type"):
            text = config.get("text_config")
            if not isinstance(text, Mapping) or text.get("model_type", cls.model_type) != cls.model_type:
                raise ConfigError(f"{whole}: text_config is {text!r:.80}, expected an object of {cls.model_type}")
            outer = {"tie_word_embeddings", "quantization_config"}
            if not text.keys() & {"dtype", "torch_dtype"}:
                outer |= {"dtype", "torch_dtype"}
            config = {**{key: config[key] for key in outer if key in config}, **text, "model_type": cls.model_type}
            warnings.warn(
                f"{whole}: only the text model is read: {cls.left_out} is left out, here and in what is saved",
                stacklevel=2,
            )
        return parent.from_hf(config)


@dataclass(kw_only=True)
class WindowConfig(ModelConfig):
    """Adds a window to every block."""

    sliding_window: int | None = None

    def window(self, layer: int) -> int | None:
        return self.sliding_window


@dataclass(kw_only=True)
class LayerTypesConfig(WindowConfig):
    """Adds a window to the blocks that `layer_types` names sliding_attention."""

    layer_types: list[str] = None  # type: ignore[assignment]  # absent: `default_layer_type` of each block

    def default_layer_type(self, layer: int) -> str:
        """The type of block `layer` where config.json has no layer_types."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        super().__post_init__()
        blocks = self.num_hidden_layers
        if self.layer_types is None:
            self.layer_types = [self.default_layer_type(layer) for layer in range(blocks)]
        if len(self.layer_types) != blocks or any(kind not in LAYER_TYPES for kind in self.layer_types):
            raise self._error("layer_types", f"must name one of {', '.join(LAYER_TYPES)} for each of {blocks} blocks")
        if self.sliding_window is None and "sliding_attention" in self.layer_types:
            raise self._error(
                "layer_types",
                "names sliding_attention, and there is no window: use_sliding_window is false or sliding_window is "
                "null. Set them, or name full_attention everywhere.",
            )

    def window(self, layer: int) -> int | None:
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    def rope(self, layer: int) -> str:
        name = self.layer_types[layer].removesuffix("_attention")
        return name if name in self.ropes else "full"


@dataclass(kw_only=True)
class LastLayersWindowConfig(LayerTypesConfig):
    """Adds a window to the blocks from `max_window_layers` on, where `use_sliding_window` is set."""

    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28

    def __post_init__(self) -> None:
        if not self.use_sliding_window:
            self.sliding_window = None
        super().__post_init__()

    def default_layer_type(self, layer: int) -> str:
        slides = self.sliding_window is not None and layer >= self.max_window_layers
        return "sliding_attention" if slides else "full_attention"


@dataclass(kw_only=True)
class RoutedConfig(ModelConfig):
    """Adds the fields of mixtures of experts that the load-balancing loss reads. The number of experts and their size
    are fields of the family."""

    num_experts_per_tok: int = 2
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001

    @property
    def num_experts(self) -> int:
        """The experts of a block, by the name that TRL's balancing loss reads; in most families a field."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_experts_per_tok > self.num_experts:
            raise self._error("num_experts_per_tok", f"must be at most the number of experts, {self.num_experts}")


def _unknown(extra: Mapping[str, Any], unused: frozenset[str]) -> list[str]:
    """The keys that may ask for something that is not computed here; null asks for nothing."""
    return sorted(key for key, value in extra.items() if value is not None and key not in KNOWN_WITHOUT_EFFECT | unused)


def _classes(hint: Any) -> tuple[type, ...]:
    """The classes of an annotation such as `int | list[int] | None`."""
    members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return tuple(typing.get_origin(member) or member for member in members)
