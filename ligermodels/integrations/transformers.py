"""ligermodels inside transformers: a real `PreTrainedModel` around our modules, and our model over their parameters.

    from ligermodels.integrations.transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B", device_map="auto")

It is for tools that check the type: Trainer's saving, pipeline, GRPO, RewardTrainer, device maps, quantisers. The class
of such a model inherits from our class and from transformers' class of the same name. Modules, `forward`, `generate`
and activation checkpointing are ours; config, loading, tying, adapters, resizing and saving are transformers'. Both
classes have the same parameter names, so transformers' loader can fill our modules.

- `generate` takes transformers' generation_config and options, and raises for beams.
- A tied `lm_head.weight` is the embedding's Parameter under a second name, as in transformers.

`register()` makes transformers' own auto classes give these models, for scripts that one does not edit.

`from_transformers(model)` makes a plain model of ours over the Parameters of a model of transformers.

Written against modeling_utils.py and models/auto/auto_factory.py of transformers 5.23, and run with 5.24.
"""

import functools
import inspect
import json
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.utils._pytree as pytree
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.models.auto import modeling_auto
from transformers.models.auto.auto_factory import _BaseAutoModelClass, _LazyAutoMapping

from ligermodels.arch import ARCHS
from ligermodels.arch.base import CausalLM, CausalLMOutput
from ligermodels.arch.config import ModelConfig
from ligermodels.arch.output import GenerationConfig
from ligermodels.arch.trainers import TrainerInterface
from ligermodels.checkpoint.weights import Rearranged, named_weights
from ligermodels.errors import CheckpointError, InputError
from ligermodels.layers import LMHead
from ligermodels.layers.linear import JointProjections

_CAUSAL = {arch.config_class.architecture: arch for arch in ARCHS.values()}
_TEXT = {name: arch for name, arch in _CAUSAL.items() if name.endswith("ForCausalLM")}
_IMAGES = {name: arch for name, arch in _CAUSAL.items() if name not in _TEXT}


def _named(names: Mapping[str, Any], archs: Mapping[str, type[CausalLM]]) -> dict[str, type[CausalLM]]:
    """{name of a class of transformers, and of the class made here: our class for its model_type}. names: those of
    transformers by model_type, which lacks some, such as a classifier of Qwen3.5 with experts."""
    return {names[kind]: arch for arch in archs.values() if (kind := arch.config_class.model_type) in names}


_BASE = _named(modeling_auto.MODEL_MAPPING_NAMES, _CAUSAL)
_SCORED = _named(modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, _TEXT)
_TAGGED = _named(modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES, _TEXT)

_OURS = {
    "activation_checkpointing_disable", "activation_checkpointing_enable", "device", "forward", "generate",
    "generate_batch", "get_decoder", "get_input_embeddings", "gradient_checkpointing",
    "gradient_checkpointing_disable", "gradient_checkpointing_enable", "is_gradient_checkpointing",
    "prepare_inputs_for_generation", "set_input_embeddings", "_no_split_modules",
}  # fmt: skip
"""Members that both classes have and that come from ours. All other common members come from transformers' class."""

_OF_QUANTISERS = {"hf_quantizer", "is_loaded_in_4bit", "is_loaded_in_8bit", "is_quantized", "quantization_method"}
"""Attributes that transformers' quantisers set on a model, and that PEFT and Trainer read."""


class _Model:
    """The differences from transformers' own models, for all kinds of heads. The first base of each model class."""

    arch: ClassVar[type[CausalLM]]

    @classmethod
    def from_pretrained(cls, *args: Any, **options: Any) -> Any:
        """`PreTrainedModel.from_pretrained`; then the weights of q, k, v and of gate, up are joined."""
        for name in ("distributed_config", "tp_plan", "tp_size"):
            if options.get(name) is not None:
                raise InputError(f"{name} is for transformers' layers; load the model, then shard it by other means")
        for name in ("fusion_config", "kernel_config", "use_kernels"):
            _ignore(name, options.pop(name, None) or None)
        loaded = PreTrainedModel.from_pretrained.__func__(cls, *args, **options)  # type: ignore[attr-defined]
        _join_weights(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded

    from_hub = from_pretrained

    @classmethod
    def from_config(cls: Any, config: PreTrainedConfig, **options: Any) -> Any:
        return cls._from_config(config, **options)

    @classmethod
    def is_custom_code(cls) -> bool:
        """False, so that transformers applies its conversions of names on disk, which suit our modules too."""
        return False

    def _build(self, config: PreTrainedConfig) -> CausalLM:
        """Builds our model, whose modules this one takes, in torch's default dtype and on its default device.

        The weights are initialised, except on the meta device, where transformers builds a model before loading it.
        """
        if is_deepspeed_zero3_enabled():
            raise InputError("ZeRO-3 would shard this model while it is built; load it with ligermodels.load instead")
        _check_order(self.arch)
        return self.arch.from_config(_config_of(config), dtype=torch.get_default_dtype(), device=torch.empty(0).device)

    def train(self: Any, mode: bool = True) -> Any:
        """Raises InputError after `use_liger_kernel=True`, which replaces forwards as if they were transformers'."""
        forwards = (vars(module).get("forward") for module in self.modules())
        if any(str(getattr(forward, "__module__", None)).startswith("liger_kernel.") for forward in forwards):
            raise InputError(
                "use_liger_kernel=True has put Liger's code for transformers' layers into this model, which has fused "
                "layers of its own: leave use_liger_kernel out, and load the model again"
            )
        return nn.Module.train(self, mode)

    def initialize_weights(self: Any) -> None:
        """Initialises the weights that a checkpoint lacks; without a checkpoint `_build` did it."""
        if any(getattr(parameter, "_is_hf_initialized", False) for parameter in self.parameters()):
            PreTrainedModel.initialize_weights(self)

    def _adjust_missing_and_unexpected_keys(self: Any, loading_info: Any) -> None:
        """Raises CheckpointError where transformers would use random weights, except for a classifier's head."""
        PreTrainedModel._adjust_missing_and_unexpected_keys(self, loading_info)
        lacking = loading_info.missing_keys | {name for name, *_ in loading_info.mismatched_keys}
        if lacking := sorted(lacking - {"score.weight", "score.bias"}):
            raise CheckpointError(
                f"{type(self).__name__} has {len(lacking)} parameters that the checkpoint lacks or has in another "
                f"shape: {_some(lacking)}. Is it a partial copy, or without its head?"
            )

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *_: Any, **__: Any) -> str:
        _ignore("attn_implementation", attn_implementation, "sdpa")
        return "sdpa"

    def _check_and_adjust_experts_implementation(self, experts_implementation: str | None) -> str:
        _ignore("experts_implementation", experts_implementation, "eager")
        return "eager"


class _LMHead(LMHead, nn.Linear):  # type: ignore[misc, override]
    """Also an nn.Linear, which PEFT needs for LoRA on the head. transformers keeps quantisers away from heads."""


class _CausalLM(_Model):
    def __init__(self: Any, config: PreTrainedConfig):
        PreTrainedModel.__init__(self, config)
        built = self._build(config)
        self.model, self.lm_head, self.mtp, self.kept_caches = built.model, built.lm_head, None, built.kept_caches
        self.lm_head.__class__ = _LMHead
        self.vocab_size = config.get_text_config().vocab_size
        self.post_init()

    def _get_resized_lm_head(self: Any, head: Any, *args: Any, **options: Any) -> Any:
        """Lets transformers resize an nn.Linear with the weights of our head, and takes the result."""
        plain = nn.Linear(head.in_features, head.out_features, bias=False, device="meta")
        plain.weight, plain.bias = head.weight, head.bias
        plain = PreTrainedModel._get_resized_lm_head(self, plain, *args, **options)
        head.weight, head.bias, head.out_features = plain.weight, plain.bias, plain.out_features
        return head

    def _loss(self: Any, x: Tensor, *args: Any, with_logits: bool, **options: Any) -> dict[str, Any]:
        computed = self.arch._loss(self, x, *args, with_logits=with_logits, **options)
        return computed if with_logits or self.parallel is not None else {**computed, "head_input": x}

    def init_continuous_batching(self, *_: Any, **__: Any) -> Any:
        raise InputError("continuous batching runs on transformers' attention layers only; use generate")


class _LossOutput(CausalLMOutput):
    """An output with a loss and without logits, which are computed when they are first read.

    They are read by name or position, not by iterating. Copies have none, such as those of accelerate's autocast.
    """

    def __init__(self, values: Mapping[str, Any], compute_logits: Callable[[], Tensor] | None = None):
        super().__init__(values)
        vars(self)["_compute_logits"] = compute_logits

    def __getattr__(self, name: str) -> Any:
        if name == "logits":
            self._add_logits()
        return super().__getattr__(name)

    def __getitem__(self, key: Any) -> Any:
        if key == "logits" or (isinstance(key, int | slice) and key not in (0, slice(1))):
            self._add_logits()
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        if key == "logits":
            self._add_logits()
        return super().get(key, default)

    def _add_logits(self) -> None:
        """Computes the logits once, and puts them after the loss."""
        compute = vars(self).pop("_compute_logits", None)
        if compute is not None:
            others = {name: value for name, value in self.items() if name != "loss"}
            values = {"loss": dict.__getitem__(self, "loss"), "logits": compute(), **others}
            self.clear()
            self.update(values)


pytree.register_pytree_node(
    _LossOutput,
    lambda output: (list(output.values()), list(output)),
    lambda values, keys: CausalLMOutput(zip(keys, values, strict=True)),
    serialized_type_name="ligermodels.integrations.LossOutput",
)


def _with_logits_to_read(forward: Any) -> Any:
    """Wraps the forward of a causal model: the head's input, kept by `_CausalLM._loss`, gives logits when read."""

    @functools.wraps(forward)
    def wrapped(self: Any, *args: Any, **inputs: Any) -> CausalLMOutput:
        output = forward(self, *args, **inputs)
        x = output.pop("head_input", None)
        if x is None or torch.compiler.is_compiling():
            return output
        return _LossOutput(output, functools.partial(_logits, self, x))

    return wrapped


def _logits(model: Any, x: Tensor) -> Tensor:
    """The logits of the head's input x, after a forward."""
    if hasattr(getattr(model.lm_head, "weight", None), "full_tensor"):
        raise InputError(
            "logits beside a loss are computed when they are read, and by now the head's weight is sharded again; call "
            "the model with return_logits=True"
        )
    return model.logits_of(x)


class _SequenceClassifier(_Model):
    has_bias: ClassVar[bool] = False

    def __init__(self: Any, config: Any):
        PreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = self._build(config).model
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=self.has_bias)
        nn.init.normal_(self.score.weight, std=config.initializer_range)
        if self.has_bias:
            nn.init.zeros_(self.score.bias)
        self.post_init()

    @property
    def decoder(self: Any) -> nn.Module:
        return self.model

    @classmethod
    def can_generate(cls) -> bool:
        return False


class _TokenClassifier(_SequenceClassifier):
    has_bias = True

    def __init__(self: Any, config: Any):
        super().__init__(config)
        rates = [getattr(config, name, None) for name in ("classifier_dropout", "hidden_dropout")]
        self.dropout = nn.Dropout(next((rate for rate in rates if rate is not None), 0.1))


class _Base(_Model):
    """A model without a head. It has the modules of a base model of ours, `_inner`, which runs them."""

    def __init__(self: Any, config: Any):
        PreTrainedModel.__init__(self, config)
        vars(self)["_inner"] = inner = self._build(config).model
        for name in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            vars(self)[name] = vars(inner)[name]
        self.post_init()

    @property
    def decoder(self: Any) -> nn.Module:
        return getattr(self._inner, "language_model", self._inner)

    @property
    def base_model(self: Any) -> nn.Module:
        return self

    @classmethod
    def can_generate(cls) -> bool:
        return False

    def _set_checkpointing(self: Any, settings: str | Mapping[str, Any]) -> None:
        owner: Any = types.SimpleNamespace(model=self._inner, decoder=self.decoder)  # what this reads of a model
        TrainerInterface._set_checkpointing(owner, settings)

    def train(self: Any, mode: bool = True) -> Any:
        self._inner.training = mode
        return super().train(mode)

    def forward(self: Any, *args: Any, **inputs: Any) -> CausalLMOutput:
        """`BaseModel.forward`."""
        return self._inner(*args, **inputs)


_KINDS: Any = (
    (_CAUSAL, _CausalLM), (_SCORED, _SequenceClassifier), (_TAGGED, _TokenClassifier), (_BASE, _Base),
)  # fmt: skip


@functools.cache
def _class_of(name: str) -> type[PreTrainedModel]:
    """The class made of ours and of transformers' class `name`."""
    arch, first = next((archs[name], first) for archs, first in _KINDS if name in archs)
    theirs = getattr(transformers, name)
    ours = arch if first is _CausalLM else TrainerInterface
    # Ours stands before transformers' class in the order of bases, so its members win unless they are set here.
    defined = {member for cls in ours.__mro__[: -len(nn.Module.__mro__)] for member in vars(cls)}
    common = {member for member in defined & {*dir(theirs)} if not member.startswith("__")}
    members = {member: inspect.getattr_static(theirs, member) for member in common - _OURS - {*dir(first)}}
    members |= {"arch": arch, "config_class": theirs.config_class, "__module__": __name__}
    if first is _CausalLM:
        members["forward"] = _with_logits_to_read(arch.forward)
    else:
        forward = _Base.forward if first is _Base else _without_count(theirs.forward)
        members |= {"forward": forward, "_no_split_modules": arch._no_split_modules}
    return type(name, (first, ours, theirs), members)


def __getattr__(name: str) -> Any:
    """The classes by name, for pickle and imports."""
    if any(name in archs for archs, _ in _KINDS):
        return _class_of(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _without_count(forward: Any) -> Any:
    """Wraps the forward of a classifier, which passes all keywords to the decoder: drops Trainer's num_items_in_batch,
    and makes no cache unless asked."""

    @functools.wraps(forward)
    def wrapped(self: Any, *args: Any, num_items_in_batch: Any = None, **inputs: Any) -> Any:
        return forward(self, *args, **{"use_cache": False, **inputs})

    return wrapped


class _ByConfig(Mapping[type[PreTrainedConfig], type[PreTrainedModel]]):
    """{class of a config: class of the model}, for transformers' auto classes. Makes a class when it is asked for."""

    def __init__(self, archs: Mapping[str, type[CausalLM]]):
        self._names = {arch.config_class.model_type: name for name, arch in archs.items()}

    def __getitem__(self, config_class: type[PreTrainedConfig]) -> type[PreTrainedModel]:
        return _class_of(self._names[config_class.model_type])

    def __iter__(self) -> Iterator[type[PreTrainedConfig]]:
        return (getattr(transformers, name).config_class for name in self._names.values())

    def __len__(self) -> int:
        return len(self._names)


class AutoModel(_BaseAutoModelClass):
    """transformers' class of this name: a model without its head, whose output has `last_hidden_state`."""

    _model_mapping = _ByConfig(_BASE)  # type: ignore[assignment]


class AutoModelForCausalLM(_BaseAutoModelClass):
    """transformers' class of this name, for the architectures of ligermodels, with and without images.

    `from_pretrained` has transformers' arguments: dtype, device_map, quantization_config, revision, folders of adapters
    and so on. attn_implementation and experts_implementation have no effect and cause a warning. transformers'
    distributed loading raises InputError. `from_config` initialises the weights as `CausalLM.from_config` does.

    Raises ConfigError for a config with unsupported values, CheckpointError for a checkpoint that lacks weights.
    """

    _model_mapping = _ByConfig(_CAUSAL)  # type: ignore[assignment]


class AutoModelForSequenceClassification(_BaseAutoModelClass):
    """transformers' class of this name, for text architectures: `score` of the last token that is not padding."""

    _model_mapping = _ByConfig(_SCORED)  # type: ignore[assignment]


class AutoModelForTokenClassification(_BaseAutoModelClass):
    """transformers' class of this name, for text architectures: `score` of every token."""

    _model_mapping = _ByConfig(_TAGGED)  # type: ignore[assignment]


class AutoModelForImageTextToText(_BaseAutoModelClass):
    """transformers' class of this name: the architectures of `AutoModelForCausalLM` that read images."""

    _model_mapping = _ByConfig(_IMAGES)  # type: ignore[assignment]


_REGISTERED = (
    "AutoModel", "AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM",
    "AutoModelForSequenceClassification", "AutoModelForTokenClassification",
)  # fmt: skip


class _Registered(_LazyAutoMapping):
    """A mapping of transformers from configs to classes, with ours in place of those that have one of the same name."""

    def __init__(self, theirs: _LazyAutoMapping):
        vars(self).update(vars(theirs))  # its dicts are shared: what others register is seen by both
        self.theirs = theirs

    def __getitem__(self, config_class: Any) -> Any:
        theirs = super().__getitem__(config_class)
        name = getattr(theirs, "__name__", "")
        arch = next((archs[name] for archs, _ in _KINDS if name in archs), None)
        if arch is None or theirs is not getattr(transformers, name) or _has_other_order(arch) or _is_for_a_part():
            return theirs
        return _class_of(name)


def register() -> None:
    """Makes transformers' AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM,
    AutoModelForSequenceClassification and AutoModelForTokenClassification give our classes, in this process.

    They have transformers' names and are subclasses of its classes. What they cannot do raises as said in this file;
    `unregister` takes it back. These stay transformers': classes that are not in this file, such as those of other
    families and `QuestionAnswering`; Qwen3-Next and gpt-oss, whose rows have another order here; the parts that a model
    of transformers builds for itself, such as the text model of LLaVA; and a class that is called by its own name, as
    TRL does for a model given as text.
    """
    for auto in (getattr(transformers, name) for name in _REGISTERED):
        if not isinstance(auto._model_mapping, _Registered):
            auto._model_mapping = _Registered(auto._model_mapping)


def unregister() -> None:
    """Undoes `register`: the models that it made stay as they are."""
    for auto in (getattr(transformers, name) for name in _REGISTERED):
        if isinstance(auto._model_mapping, _Registered):
            auto._model_mapping = auto._model_mapping.theirs


def _is_for_a_part() -> bool:
    """True while the constructor of a module of transformers runs, which builds a part of itself by an auto class."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        is_theirs = frame.f_globals.get("__name__", "").startswith("transformers.")
        if is_theirs and frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), nn.Module):
            return True
        frame = frame.f_back
    return False


def from_transformers(model: PreTrainedModel) -> CausalLM:
    """Our model over the Parameters and persistent buffers of a model of transformers: training one trains the other.

    The weights of q, k, v and of gate, up of a layer move into one storage, so that those of one layer exist twice for
    a moment; their Parameters stay, and with them the state of an optimizer. Nothing else is copied. Linear modules
    that are quantised or have an adapter become modules of our model. generation_config, name, training mode and
    activation checkpointing ("block") are copied, hooks on `model` are not.

    From then on `resize_token_embeddings` of either model raises InputError: the other would keep the old size.

    Raises InputError for a model that PEFT or another library wraps, that is sharded, offloaded, of the user's own
    class, of a family whose rows have another order here, or whose parameters are not those of its config;
    ConfigError for a config with unsupported values.
    """
    arch = _arch_of(model)
    _check_order(arch)
    theirs: dict[str, Any] = dict(named_weights(model))
    native: Any = arch._on_meta(_config_of(model.config), model.dtype, "none")
    modules = dict(model.named_modules())
    for path, linear in [*native.named_modules()]:
        if type(linear) is nn.Linear and type(modules.get(path, linear)) is not nn.Linear:
            native.set_submodule(path, modules[path])
    ours = dict(named_weights(native))
    different = [f"{path} is not in {type(native).__name__}" for path in theirs if path not in ours]
    different += [f"{path} is missing" for path in ours if path not in theirs]
    if not different:
        different = [f"{path} has another shape" for path in ours if ours[path].shape != theirs[path].shape]
    if different:
        raise InputError(f"the model's parameters are not those of its config: {_some(different)}")
    for path, weight in theirs.items():
        parent, _, leaf = path.rpartition(".")
        module = native.get_submodule(parent)
        (module._parameters if leaf in module._parameters else module._buffers)[leaf] = weight
    _join_weights(native)
    settings = json.loads(model.generation_config.to_json_string(ignore_metadata=True))
    native.generation_config = GenerationConfig.of_file(settings)
    source = str(model.name_or_path)
    native.config._name_or_path = native.name_or_path = source
    native.source_folder = Path(source) if Path(source, "config.json").is_file() else None
    vars(native).update({name: value for name, value in vars(model).items() if name in _OF_QUANTISERS})
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        native.gradient_checkpointing_enable()
    for owner in (native, model):
        vars(owner)["resize_token_embeddings"] = functools.partial(_keep_size, owner.get_input_embeddings())
    return native.train(model.training)


def _keep_size(table: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, **_: Any) -> Any:
    """`resize_token_embeddings` for a model that shares its Parameters: raises InputError for another size."""
    if pad_to_multiple_of is not None or new_num_tokens not in (None, len(table.weight)):
        raise InputError(
            "this model shares its Parameters with another one (from_transformers), which would keep the old "
            "vocabulary; call resize_token_embeddings of transformers' model before from_transformers"
        )
    return table


def _arch_of(model: Any) -> type[CausalLM]:
    """Our class for a model that `from_transformers` can take; raises InputError for any other."""
    if not isinstance(model, PreTrainedModel):
        peft = hasattr(model, "peft_config")
        hint = "call from_transformers(model) before get_peft_model" if peft else "pass the model itself, unwrapped"
        raise InputError(f"from_transformers takes a model of transformers, not a {type(model).__name__}: {hint}")
    name = type(model).__name__
    if name not in _CAUSAL or type(model) is not getattr(transformers, name):
        raise InputError(
            f"from_transformers takes transformers' own classes {', '.join(_CAUSAL)}, and this is a "
            f"{type(model).__module__}.{name}"
        )
    away = any(parameter.is_meta or hasattr(parameter, "full_tensor") for parameter in model.parameters())
    if away or len({parameter.device for parameter in model.parameters()}) > 1:
        raise InputError(
            "the model is sharded, offloaded or spread over devices. Call from_transformers before that; for a "
            "device_map, load by ligermodels.integrations.transformers.AutoModelForCausalLM"
        )
    return _CAUSAL[name]


def _check_order(arch: type[CausalLM]) -> None:
    """Raises InputError for a family whose rows have another order in memory than in every checkpoint of it."""
    if _has_other_order(arch):
        raise InputError(
            f"the rows of a {arch.__name__} have another order in memory than those of transformers' model: save that "
            "model, and load the folder with ligermodels.load"
        )


def _has_other_order(arch: type[CausalLM]) -> bool:
    tables = arch.DISK_NAMES, *arch.OTHER_LAYOUTS
    return all(any(isinstance(row, Rearranged) for row in table.values()) for table in tables)


def _config_of(config: PreTrainedConfig) -> ModelConfig:
    """Our config, without quantization_config, since transformers has replaced the quantised modules already."""
    values = json.loads(config.to_json_string())
    values.pop("quantization_config", None)
    return ARCHS[config.model_type].config_class.from_hf(values)


def _join_weights(model: nn.Module) -> None:
    """Makes the weights of q, k, v and of gate, up in each layer joint, for one matmul."""
    for module in model.modules():
        if isinstance(module, JointProjections):
            module.join_weights()


def _ignore(name: str, value: Any, default: Any = None) -> None:
    if value not in (None, default):
        warnings.warn(
            f"{name}={value!r} changes nothing: these are the layers and kernels of ligermodels", stacklevel=3
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
