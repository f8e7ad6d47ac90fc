"""ligermodels inside transformers: a real `PreTrainedModel` around our modules, and our model over their parameters.

    from ligermodels.integrations.transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B", device_map="auto")

For tools that check the type (Trainer's saving, pipeline, GRPO, RewardTrainer). The class of the model is made from
three: it inherits from ours (forward, generate, activation checkpointing) and from transformers' own class of the same
name (config, loading, quantisers, device maps, adapters, saving, resizing). Parameter names are equal, so that
transformers' loader fills our modules as it fills its own, and folders are the same either way. Only transformers'
way of tying differs from ours, and is kept here: a tied `lm_head.weight` is the Parameter of the embedding.

`from_transformers(model)` needs no class of its own: it is our model over the Parameters of a transformers model.

Written against modeling_utils.py and models/auto/auto_factory.py of transformers 5.23.
"""

import functools
import inspect
import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.models.auto.auto_factory import _BaseAutoModelClass

from ligermodels.arch import ARCHS
from ligermodels.arch.base import CausalLM
from ligermodels.arch.config import ModelConfig
from ligermodels.arch.trainers import TrainerInterface
from ligermodels.errors import CheckpointError, InputError

_OURS = (
    "activation_checkpointing_disable",
    "activation_checkpointing_enable",
    "forward",
    "generate",
    "get_decoder",
    "get_input_embeddings",
    "gradient_checkpointing",
    "gradient_checkpointing_disable",
    "gradient_checkpointing_enable",
    "is_gradient_checkpointing",
    "prepare_inputs_for_generation",
    "set_input_embeddings",
    "_no_split_modules",
)
"""Of the names that both our class and transformers' have, those that are ours; the others are transformers'."""


class _Model:
    """What differs from a transformers model that was built from transformers' modules."""

    arch: ClassVar[type[CausalLM]]

    @classmethod
    def from_pretrained(cls, *args: Any, **options: Any) -> Any:
        """As transformers' `from_pretrained`, with all of its arguments; q, k and v then lie in one storage."""
        loaded = PreTrainedModel.from_pretrained.__func__(cls, *args, **options)  # type: ignore[attr-defined]
        _lay_weights_together(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded

    @classmethod
    def from_config(cls, config: PreTrainedConfig, **options: Any) -> Any:
        """A model with random weights, drawn as `CausalLM.init_weights` does."""
        return cls._from_config(config, **options)  # type: ignore[attr-defined]

    @classmethod
    def is_custom_code(cls) -> bool:
        """False: names on disk are converted as for transformers' own class."""
        return False

    def _make(self, config: PreTrainedConfig) -> CausalLM:
        """Our model of `config`, in the dtype and on the device that are torch's defaults now."""
        if is_deepspeed_zero3_enabled():
            raise InputError(
                "ZeRO-3 cannot split this model while it is built. Load it by ligermodels.load before the "
                "TrainingArguments with the DeepSpeed config are made; DeepSpeed then splits the finished model"
            )
        device = torch.empty(0).device  # of `with torch.device(...)` too, under which transformers builds on meta
        seed = 0 if device.type == "meta" else int(torch.randint(2**31, (), device="cpu"))
        return self.arch.from_config(_config_of(config), dtype=torch.get_default_dtype(), device=device, seed=seed)

    def initialize_weights(self) -> None:
        """Draws what a checkpoint lacks; where nothing was loaded, `_make` has drawn everything."""
        if any(getattr(parameter, "_is_hf_initialized", False) for parameter in self.parameters()):  # type: ignore
            PreTrainedModel.initialize_weights(self)  # type: ignore[arg-type]

    def _adjust_missing_and_unexpected_keys(self, loading_info: Any) -> None:
        PreTrainedModel._adjust_missing_and_unexpected_keys(self, loading_info)  # type: ignore[arg-type]
        missing = {*loading_info.missing_keys, *(name for name, *_ in loading_info.mismatched_keys)}
        if missing := sorted(missing - {"score.weight"}):
            names = f"{', '.join(missing[:3])}{', ...' * (len(missing) > 3)}"
            raise CheckpointError(
                f"The checkpoint has no weights of the right shape for {len(missing)} parameters of "
                f"{type(self).__name__}: {names}. transformers would have drawn them at random"
            )

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **options: Any) -> str:
        return _ignored("attn_implementation", attn_implementation, "sdpa")

    def _check_and_adjust_experts_implementation(self, experts_implementation: str | None) -> str:
        return _ignored("experts_implementation", experts_implementation, "eager")


class _CausalLM(_Model):
    def __init__(self, config: PreTrainedConfig):
        PreTrainedModel.__init__(self, config)  # type: ignore[arg-type]
        made = self._make(config)
        self.model, self.lm_head = made.model, made.lm_head
        self.vocab_size = config.get_text_config().vocab_size
        self.warnings_issued: dict[str, bool] = {}
        self.post_init()  # type: ignore[attr-defined]

    def _get_resized_lm_head(self, head: Any, *args: Any, **options: Any) -> Any:
        plain = nn.Linear(head.in_features, head.out_features, bias=False, device="meta")
        plain.weight, plain.bias = head.weight, head.bias
        plain = PreTrainedModel._get_resized_lm_head(self, plain, *args, **options)  # type: ignore[arg-type]
        head.weight, head.bias, head.out_features = plain.weight, plain.bias, plain.out_features
        return head


class _SequenceClassifier(_Model):
    def __init__(self, config: PreTrainedConfig):
        PreTrainedModel.__init__(self, config)  # type: ignore[arg-type]
        self.num_labels = config.num_labels
        self.model = self._make(config).model
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        nn.init.normal_(self.score.weight, std=config.initializer_range)
        self.post_init()  # type: ignore[attr-defined]

    @property
    def decoder(self) -> nn.Module:
        return self.model

    @classmethod
    def can_generate(cls) -> bool:
        return False


def _class_of(name: str) -> type[PreTrainedModel]:
    """The class that stands for transformers' class `name`."""
    if name not in _classes():
        raise AttributeError(f"there is no {name} of ligermodels; there are {', '.join(_classes())}")
    return _make_class(name)


def _classes() -> dict[str, type[CausalLM]]:
    """{name of a class of transformers: our class for its model_type}."""
    causal = {arch.config_class.architecture: arch for arch in ARCHS.values()}
    suffix = "ForCausalLM"
    scored = {
        f"{name.removesuffix(suffix)}ForSequenceClassification": causal[name]
        for name in causal
        if name.endswith(suffix)
    }
    return causal | scored


@functools.cache
def _make_class(name: str) -> type[PreTrainedModel]:
    arch, theirs = _classes()[name], getattr(transformers, name)
    scores = name.endswith("ForSequenceClassification")
    mixin, ours = (_SequenceClassifier, TrainerInterface) if scores else (_CausalLM, arch)
    of_ours = {
        word for cls in ours.__mro__[: -len(nn.Module.__mro__)] for word in vars(cls) if not word.startswith("__")
    }
    of_theirs = (of_ours & set(dir(theirs))) - set(dir(mixin)) - set(_OURS)
    members = {word: inspect.getattr_static(theirs, word) for word in of_theirs}
    if scores:
        members |= {"_no_split_modules": arch._no_split_modules, "forward": _without_count(theirs.forward)}
    members |= {
        "arch": arch,
        "config_class": theirs.config_class,
        "__module__": __name__,
        "__doc__": f"{name} of ligermodels.",
    }
    return type(name, (mixin, ours, theirs), members)


def _without_count(forward: Any) -> Any:
    """Trainer passes num_items_in_batch, which transformers' classifiers leave to **kwargs, and so to the decoder."""

    @functools.wraps(forward)
    def wrapped(self: Any, *args: Any, num_items_in_batch: Any = None, **inputs: Any) -> Any:
        return forward(self, *args, **inputs)

    return wrapped


def __getattr__(name: str) -> Any:
    return _class_of(name)  # LlamaForCausalLM and the others; pickle looks them up here


class _Mapping(Mapping[type[PreTrainedConfig], type[PreTrainedModel]]):
    """{class of a config: class of a model}, as transformers' auto classes read it."""

    def __init__(self, ending: str):
        self.names = [name for name in _classes() if name.endswith("ForSequenceClassification") == (ending == "score")]

    def __getitem__(self, config_class: type[PreTrainedConfig]) -> type[PreTrainedModel]:
        for name in self.names:
            if _classes()[name].config_class.model_type == config_class.model_type:
                return _class_of(name)
        raise KeyError(config_class)

    def __iter__(self) -> Iterator[type[PreTrainedConfig]]:
        return iter(getattr(transformers, name).config_class for name in self.names)

    def __len__(self) -> int:
        return len(self.names)


class AutoModelForCausalLM(_BaseAutoModelClass):
    """transformers' class of this name, for the architectures of ligermodels; also those that read images.

    `from_pretrained` takes all of transformers' arguments: dtype, device_map, quantization_config, revision and so on,
    and folders of adapters. attn_implementation and experts_implementation change nothing, and say so. `from_config`
    draws the weights. `generate` is ours.
    Raises ConfigError for a config that is not computed, CheckpointError for weights that are missing.
    """

    _model_mapping = _Mapping("head")


class AutoModelForSequenceClassification(_BaseAutoModelClass):
    """transformers' class of this name, for the text architectures: `score` over the last token that is no padding."""

    _model_mapping = _Mapping("score")


def from_transformers(model: PreTrainedModel) -> CausalLM:
    """Our model over the Parameters of a transformers model, which stays as it is: training one trains the other.

    Nothing is copied but the weights of q, k, v and of gate, up, which get one storage for each layer (their
    Parameters, and what an optimizer holds of them, stay): beyond the model, that takes the memory of the largest of
    these for a moment. Linear modules that were quantised or hold an adapter are taken over as modules. Dtypes,
    device, requires_grad, training mode, generation_config and name are those of `model`; activation checkpointing,
    where it is on, is our "block". Hooks on `model` stay there.

    Raises InputError for what is no plain transformers model: wrapped by PEFT, sharded, offloaded, of a class of
    one's own. Raises ConfigError for an architecture or option that is not computed.
    """
    arch = _arch_of(model)
    theirs = dict(model.named_parameters())
    where = {parameter.device for parameter in theirs.values()}
    if len(where) > 1 or torch.device("meta") in where or any(hasattr(p, "full_tensor") for p in theirs.values()):
        raise InputError(
            "the model is sharded, offloaded or spread over devices. Call from_transformers before that; for device_map=, "
            "load by ligermodels.integrations.transformers.AutoModelForCausalLM"
        )
    made = arch._on_meta(_config_of(model.config), model.dtype, "none")
    modules = dict(model.named_modules())
    for name, linear in [*made.named_modules()]:
        if type(linear) is nn.Linear and type(modules.get(name, linear)) is not nn.Linear:
            made.set_submodule(name, modules[name])
    ours = dict(made.named_parameters())
    different = [f"{name} (not in ours)" for name in theirs if name not in ours]
    different += [f"{name} (ours alone)" for name in ours if name not in theirs]
    different += [f"{name} (shape)" for name in ours if name in theirs and ours[name].shape != theirs[name].shape]
    if different:
        raise InputError(
            f"{len(different)} parameters of the {type(model).__name__} are not those of {arch.__name__}: "
            f"{', '.join(different[:5])}{', ...' * (len(different) > 5)}. Was the model changed since it was built?"
        )
    for name, parameter in theirs.items():
        parent, _, leaf = name.rpartition(".")
        made.get_submodule(parent)._parameters[leaf] = parameter
    _lay_weights_together(made)
    made.generation_config.update(model.generation_config.to_diff_dict())
    made.config._name_or_path = made.name_or_path = model.name_or_path
    made.source_folder = Path(model.name_or_path) if Path(model.name_or_path, "config.json").is_file() else None
    for name in _OF_QUANTISERS & vars(model).keys():
        setattr(made, name, getattr(model, name))
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        made.gradient_checkpointing_enable()
    return made.train(model.training)


_OF_QUANTISERS = {"hf_quantizer", "is_loaded_in_4bit", "is_loaded_in_8bit", "is_quantized", "quantization_method"}
"""What transformers' quantisers leave on a model; PEFT and Trainer look for it."""


def _arch_of(model: Any) -> type[CausalLM]:
    """Our class for a model of exactly one of transformers' classes."""
    if not isinstance(model, PreTrainedModel):
        peft = hasattr(model, "peft_config")
        hint = "call from_transformers(model) before get_peft_model" if peft else "pass the model itself, unwrapped"
        raise InputError(f"from_transformers takes a model of transformers, not a {type(model).__name__}: {hint}")
    names = {arch.config_class.architecture: arch for arch in ARCHS.values()}
    arch = names.get(type(model).__name__)
    if arch is None or type(model) is not getattr(transformers, type(model).__name__):
        raise InputError(
            f"from_transformers has no counterpart of {type(model).__module__}.{type(model).__name__}; of transformers' "
            f"own classes there are {', '.join(names)}"
        )
    return arch


def _config_of(config: PreTrainedConfig) -> ModelConfig:
    """Our config. A quantiser has seen to its part of it by now."""
    values = json.loads(config.to_json_string())
    values.pop("quantization_config", None)
    return ARCHS[config.model_type].config_class.from_hf(values)


def _lay_weights_together(model: nn.Module) -> None:
    """Gives the plain weights of each layer's q, k, v and gate, up one storage, so that one matmul serves them."""
    for module in model.modules():
        if hasattr(module, "_lay_together"):
            module._lay_together()


def _ignored(name: str, value: str | None, default: str) -> str:
    if value not in (None, default):
        warnings.warn(f"{name}={value!r} changes nothing: ligermodels has kernels of its own", stacklevel=2)
    return default
