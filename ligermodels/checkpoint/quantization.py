"""Models with quantised linear modules, of bitsandbytes, torchao or our own (nf4.py, weight_only.py): loaded, and
but for those of weight_only.py trained under adapters and saved again.

A quantiser replaces `nn.Linear` modules (bitsandbytes) or their weights (torchao), one after the other, as a checkpoint
is read. The head, which is no `nn.Linear` here, stays as it is. config.json and the tensors on disk are those that
transformers writes for the same settings, so that either loads what the other saved. The libraries are imported on
demand. Trainers read a quantiser as `hf_quantizer` and as `quantization_config`.
"""

import dataclasses
import importlib
import json
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ligermodels.checkpoint import weights
from ligermodels.errors import CheckpointError, ConfigError, InputError

Parts = Mapping[str, Tensor]
"""{what follows the module's name on disk: tensor}, of one quantised linear module."""


class Quantizer:
    """The settings of one library, and what they do to a linear module."""

    quant_method: ClassVar[str]
    """In config.json; also the library's name."""
    is_qat_trainable: ClassVar[bool] = False
    flags: Mapping[str, bool]
    """Attributes by which tools know such a model."""
    skipped: Iterable[str]
    """Names of modules that stay as they are."""
    _without: ClassVar[str] = ""
    """What to do instead of installing the library."""

    @property
    def quantization_config(self) -> Self:
        return self

    @property
    def element(self) -> Any:
        """What accelerate calls the dtype of a quantised weight."""
        return torch.int8

    def default_device(self, device: torch.device) -> torch.device:
        """Where the model goes if the call does not say; `device` is torch's default."""
        return device

    def convert(self, linear: nn.Linear, weight: Tensor, bias: Tensor | None, device: torch.device) -> nn.Module:
        """The quantised module, on `device`, for `linear` on meta. weight and bias may be mapped from a file."""
        raise NotImplementedError

    def finish(self, model: nn.Module) -> None:
        """What comes after the last module."""

    def is_quantized(self, module: nn.Module) -> bool:
        """Whether `convert` has made it, and nothing has been wrapped around it."""
        raise NotImplementedError

    def parts(self, module: nn.Module, name: str) -> tuple[Parts, dict[str, str]]:
        """What to save of a quantised module with that name, and what belongs in the header of the files."""
        raise NotImplementedError

    def restore(self, linear: nn.Linear, parts: Parts, name: str, metadata: Mapping[str, str]) -> nn.Module:
        """The module that was saved as `parts`, on their device. Raises ValueError where they do not fit."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """The quantization_config of config.json."""
        names = [field.name for field in dataclasses.fields(METHODS[self.quant_method])]
        return {"quant_method": self.quant_method, **{name: getattr(self, name) for name in names}}

    def _library(self, module: str = "") -> Any:
        """The library, or a module of it. Raises InputError where it is not installed or too old."""
        try:
            return importlib.import_module(self.quant_method + module)
        except ImportError as error:
            raise InputError(
                f"quantization_config asks for {self.quant_method}, which cannot be imported: {error}.\n"
                f"  Next: `pip install -U {self.quant_method}`.{self._without}"
            ) from error


@dataclass(kw_only=True)
class BitsAndBytes(Quantizer):
    """The settings of transformers' BitsAndBytesConfig."""

    quant_method = "bitsandbytes"
    is_trainable: ClassVar[bool] = True
    """Whether adapters can be trained over it, as Trainer asks."""
    _without = ' Weights in nf4 also load without it: quantization_config="nf4".'

    load_in_4bit: bool = False
    load_in_8bit: bool = False
    llm_int8_threshold: float = 6.0
    llm_int8_skip_modules: list[str] | None = None
    llm_int8_enable_fp32_cpu_offload: bool = False
    llm_int8_has_fp16_weight: bool = False
    bnb_4bit_compute_dtype: Any = torch.float32
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_quant_storage: Any = torch.uint8

    def __post_init__(self) -> None:
        if bool(self.load_in_4bit) == bool(self.load_in_8bit):
            raise InputError("quantization_config of bitsandbytes: one of load_in_4bit and load_in_8bit must be True")
        for name in ("llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight"):
            if getattr(self, name):
                raise InputError(f"quantization_config: {name}=True is not supported; leave it out")
        if self.bnb_4bit_quant_type not in ("nf4", "fp4"):
            raise InputError(f"quantization_config: bnb_4bit_quant_type={self.bnb_4bit_quant_type!r} is not nf4 or fp4")
        self.bnb_4bit_compute_dtype = _dtype("bnb_4bit_compute_dtype", self.bnb_4bit_compute_dtype, torch.float32)
        self.bnb_4bit_quant_storage = _dtype("bnb_4bit_quant_storage", self.bnb_4bit_quant_storage, torch.uint8)
        self.flags = {"is_loaded_in_4bit": self.load_in_4bit, "is_loaded_in_8bit": self.load_in_8bit}
        self.skipped = self.llm_int8_skip_modules or ()
        self._library()

    def default_device(self, device: torch.device) -> torch.device:
        """The GPU where there is one, as transformers has it."""
        gpu = device.type == "cpu" and torch.cuda.is_available()
        return torch.device("cuda", torch.cuda.current_device()) if gpu else device

    @property
    def element(self) -> Any:
        return torch.int8 if self.load_in_8bit else importlib.import_module("accelerate.utils").CustomDtype.INT4

    def convert(self, linear: nn.Linear, weight: Tensor, bias: Tensor | None, device: torch.device) -> nn.Module:
        bnb, made = self._library(), self._empty(linear)
        if self.load_in_8bit:  # quantised on the way from the CPU to the device
            made.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False).to(device)
        else:
            made.weight = bnb.nn.Params4bit(
                weight.to(device), requires_grad=False, module=made, **self._options_4bit
            ).to(device)
        return _with_bias(made, bias, device, requires_grad=False)

    def is_quantized(self, module: nn.Module) -> bool:
        return type(module).__module__.startswith("bitsandbytes.")

    def parts(self, module: nn.Module, name: str) -> tuple[Parts, dict[str, str]]:
        return module.state_dict(), {}

    def restore(self, linear: nn.Linear, parts: Parts, name: str, metadata: Mapping[str, str]) -> nn.Module:
        bnb, made, parts = self._library(), self._empty(linear), dict(parts)
        weight, bias = parts.pop("weight"), parts.pop("bias", None)
        if self.load_in_8bit:
            scale, by_rows = parts["SCB"], parts["weight_format"].item() == 0
            if not by_rows or weight.dtype != torch.int8 or weight.shape != linear.weight.shape:
                raise ValueError(f"its weight is {weight.dtype} {list(weight.shape)}, or not stored by rows")
            if scale.shape != weight.shape[:1]:
                raise ValueError(f"its SCB is {list(scale.shape)}")
            made.weight = bnb.nn.Int8Params(weight, requires_grad=False, SCB=scale).to(weight.device)
        else:
            made.weight = bnb.nn.Params4bit.from_prequantized(weight, parts, device=weight.device, module=made)
            state = made.weight.quant_state
            if tuple(state.shape) != linear.weight.shape or 2 * weight.nbytes < linear.weight.numel():
                raise ValueError(f"its weight holds {weight.nbytes} bytes for {list(state.shape)}")
        return _with_bias(made, bias, weight.device, requires_grad=False)

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()
        for name in ("bnb_4bit_compute_dtype", "bnb_4bit_quant_storage"):
            values[name] = str(values[name]).removeprefix("torch.")
        return values

    def _empty(self, linear: nn.Linear) -> Any:
        """The module that takes the place of `linear`, without memory."""
        bnb, sizes = self._library(), (linear.in_features, linear.out_features, linear.bias is not None)
        if self.load_in_8bit:
            options = dict(has_fp16_weights=False, threshold=self.llm_int8_threshold)
            return bnb.nn.Linear8bitLt(*sizes, **options, device="meta")
        return bnb.nn.Linear4bit(*sizes, self.bnb_4bit_compute_dtype, **self._options_4bit, device="meta")

    @property
    def _options_4bit(self) -> dict[str, Any]:
        return dict(
            compress_statistics=self.bnb_4bit_use_double_quant,
            quant_type=self.bnb_4bit_quant_type,
            quant_storage=self.bnb_4bit_quant_storage,
        )


@dataclass(kw_only=True)
class TorchAO(Quantizer):
    """The settings of transformers' TorchAoConfig.

    quant_type: a config object of torchao, such as `torchao.quantization.Int8WeightOnlyConfig()`.
    """

    quant_method = "torchao"

    quant_type: Any
    modules_to_not_convert: list[str] | None = None
    include_input_output_embeddings: bool = False
    untie_embedding_weights: bool = False

    def __post_init__(self) -> None:
        self.flags, self.skipped = {}, self.modules_to_not_convert or ()
        if isinstance(self.quant_type, Mapping):  # config.json's
            if self.quant_type.keys() != {"default"}:
                raise ConfigError("quantization_config of torchao: quant_type must hold one entry, 'default'")
            self.quant_type = self._library(".core.config").config_from_dict(self.quant_type["default"])
        if not _is_of_torchao(self.quant_type):
            raise InputError(
                f"quantization_config: quant_type is {self.quant_type!r}, expected a config object of torchao, such as "
                "torchao.quantization.Int8WeightOnlyConfig()"
            )
        if "Fqn" in type(self.quant_type).__name__:
            raise InputError(
                f"{type(self.quant_type).__name__} is not supported at load: load the model without "
                "quantization_config, then call torchao.quantize_(model, config, filter_fn=None)"
            )
        for name in ("include_input_output_embeddings", "untie_embedding_weights"):
            if getattr(self, name):
                raise InputError(f"quantization_config: {name}=True is not supported: embedding and head stay plain")

    @property
    def is_trainable(self) -> bool:
        """Whether adapters can be trained over it, as Trainer asks: over 8-bit weights."""
        return "8weight" in type(self.quant_type).__name__.lower()

    def get_apply_tensor_subclass(self) -> Any:
        """`quant_type`, by the name that PEFT has for it."""
        return self.quant_type

    def convert(self, linear: nn.Linear, weight: Tensor, bias: Tensor | None, device: torch.device) -> nn.Module:
        linear.weight = nn.Parameter(weight.to(device, copy=True), requires_grad=False)
        made = _with_bias(linear, bias, device)
        self._library().quantization.quantize_(made, self.quant_type)
        return made

    def is_quantized(self, module: nn.Module) -> bool:
        return type(module) is nn.Linear and type(module.weight).__module__.startswith("torchao.")

    def parts(self, module: nn.Module, name: str) -> tuple[Parts, dict[str, str]]:
        state = {f"{name}.{key}": tensor for key, tensor in module.state_dict().items()}
        flat, metadata = self._library(".prototype.safetensors.safetensors_support").flatten_tensor_state_dict(state)
        del metadata["tensor_names"]
        return {key.removeprefix(f"{name}."): tensor for key, tensor in flat.items()}, metadata

    def restore(self, linear: nn.Linear, parts: Parts, name: str, metadata: Mapping[str, str]) -> nn.Module:
        parts, key = dict(parts), f"{name}.weight"
        bias = parts.pop("bias", None)
        header = {key: metadata[key], "tensor_names": json.dumps([key])}
        held = {f"{name}.{part}": tensor for part, tensor in parts.items()}
        found, left = self._library(".prototype.safetensors.safetensors_support").unflatten_tensor_state_dict(
            held, header
        )
        if left or found[key].shape != linear.weight.shape:
            raise ValueError(f"it holds {', '.join(parts)}")
        linear.weight = nn.Parameter(found[key], requires_grad=False)
        return _with_bias(linear, bias, found[key].device)

    def to_dict(self) -> dict[str, Any]:
        quant_type = {"default": self._library(".core.config").config_to_dict(self.quant_type)}
        return {**super().to_dict(), "quant_type": quant_type}


OURS = ("nf4", "int8", "fp8", "int4")
METHODS: dict[str, Any] = {"bitsandbytes": BitsAndBytes, "torchao": TorchAO}
"""quant_method of config.json -> the class that holds its settings."""


def _ours() -> dict[str, Any]:
    """The classes of our own modules; importing them imports the kernels."""
    from ligermodels.checkpoint.nf4 import NF4
    from ligermodels.checkpoint.weight_only import WeightOnly

    return {"nf4": NF4, **dict.fromkeys(OURS[1:], WeightOnly)}


def quantizer_of(config: Any) -> Quantizer:
    """The quantiser for a name of OURS, a config of transformers (BitsAndBytesConfig, TorchAoConfig) or of torchao, or
    a dict.

    "nf4" is our own `NF4` with its defaults, and "int8", "fp8" and "int4" are `WeightOnly`, for inference;
    {"quant_method": "nf4", ...} sets the fields. Other dicts: the fields of BitsAndBytesConfig or, with quant_method, a
    quantization_config of config.json.
    Raises InputError for other methods, unknown fields and settings that are not supported, and where the library is
    not installed.
    """
    config = getattr(config, "quantization_config", config)  # of what transformers hangs on a model as hf_quantizer
    if isinstance(config, Quantizer):
        return config
    if _is_of_torchao(config):
        return TorchAO(quant_type=config)
    config = {"quant_method": config} if isinstance(config, str) and config in OURS else config
    read = config.to_dict() if hasattr(config, "to_dict") else config if isinstance(config, Mapping) else {}
    values = {key: value for key, value in read.items() if not key.startswith("_")}
    method = values.pop("quant_method", "bitsandbytes" if {"load_in_4bit", "load_in_8bit"} & values.keys() else None)
    method = getattr(method, "value", method)  # transformers has an enum of them
    methods = {**METHODS, **_ours()} if method in OURS else METHODS
    if method not in methods:
        given = repr(config) if isinstance(config, str) else f"a {type(config).__name__} with quant_method {method!r}"
        raise InputError(
            f"quantization_config is {given}; supported: {', '.join(map(repr, OURS))}, BitsAndBytesConfig, "
            "TorchAoConfig, a dict of their fields, or a config object of torchao"
        )
    known = [field.name for field in dataclasses.fields(methods[method])]
    if unknown := values.keys() - set(known):
        raise InputError(f"quantization_config of {method} has no {min(unknown)!r}; it has {', '.join(known)}")
    return methods[method](**values, **({"quant_method": method} if "quant_method" in known else {}))


def split(values: Any, asked: Any = None) -> tuple[Any, Quantizer | None]:
    """A config without its quantization_config where that is of a method known here, and the quantiser that it names.

    asked: what the call passes as quantization_config; "nf4" has our own modules hold the weights of bitsandbytes.
    Raises ConfigError where the settings are not supported or the library is not installed.
    """
    saved = values.get("quantization_config") if isinstance(values, Mapping) else None
    method = saved.get("quant_method") if isinstance(saved, Mapping) else None
    if not isinstance(method, str) or method not in METHODS:
        return values, None
    try:
        quantizer = (
            _ours()["nf4"].of_saved(saved) if _asks_nf4(asked) and method == "bitsandbytes" else quantizer_of(saved)
        )
    except (InputError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{values.get('model_type')}: the checkpoint is quantised by {method}: {error}") from error
    return {key: value for key, value in values.items() if key != "quantization_config"}, quantizer


def _asks_nf4(asked: Any) -> bool:
    method = asked.get("quant_method") if isinstance(asked, Mapping) else getattr(asked, "quant_method", asked)
    return method == "nf4"


def choose(asked: Any, saved: Quantizer | None) -> Quantizer | None:
    """The quantiser of a load: the checkpoint's own, where it is quantised, else what the call asks for."""
    if saved is None or asked is None:
        return saved if asked is None else quantizer_of(asked)
    if asked == "nf4" == saved.quant_method:  # no settings that could differ
        return saved
    if type(quantizer_of(asked)) is not type(saved):
        raise InputError(f"the checkpoint is quantised by {saved.quant_method} already; leave quantization_config out")
    warnings.warn("the checkpoint is quantised already: its own settings count, not quantization_config", stacklevel=3)
    return saved


def sizes(model: nn.Module, quantizer: Quantizer | None) -> dict[str, Any]:
    """What accelerate takes to know how much memory the weights of `model` will need; nothing if none is quantised."""
    if quantizer is None:
        return {}
    chosen = linears(model, quantizer)
    plain = {name: tensor.dtype for name, tensor in model.named_parameters() if name.rpartition(".")[0] not in chosen}
    return {"dtype": quantizer.element, "special_dtypes": plain}


def linears(model: nn.Module, quantizer: Quantizer) -> dict[str, nn.Linear]:
    """{name: module} of the plain linear modules that are not skipped.

    An entry of `skipped` counts as in transformers: a pattern for the beginning of a module's name, or its end.
    """
    boundary = r"(?:(?<=\.)|(?=\.|$))"
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and not any(re.match(f"(?:{key}){boundary}", name) or name.endswith(key) for key in quantizer.skipped)
    }


def load(
    model: nn.Module,
    table: weights.Table,
    reader: Any,
    quantizer: Quantizer,
    *,
    device: torch.device,
    devices: Mapping[str, torch.device] | None = None,
    from_quantized: bool = False,
    progress: bool = True,
    ignore: Iterable[str] = (),
    tied: Mapping[str, str] | None = None,
    also: Iterable[weights.Table] = (),
) -> None:
    """As `weights.load`; linear modules are quantised as their weights are read, one by one.

    devices: {linear module: where it is quantised}, `device` for the rest. Beyond what is quantised already, a device
    holds one weight. from_quantized: the checkpoint holds quantised modules; the others on it are plain here too.
    Raises CheckpointError, also for a weight that holds NaN or infinity.
    """
    chosen = linears(model, quantizer)
    table = weights.layout(model, table, reader.headers, also=also)
    boxes = weights.regions(model, table)
    if from_quantized:
        found = _saved_parts(boxes, reader.headers)
        saved = {name: found[name] for name in chosen if name in found}
        chosen = {name: chosen[name] for name in saved}
        taken = {source for parts in saved.values() for source in parts.values()}
    else:
        weights.check(model, table, reader.headers, ignore=ignore, tied=tied, where=reader.source)
        taken = {box.source for box in boxes if box.param.rpartition(".")[0] in chosen}
        ours = weights.Renamed(model, reader, table, {})
    for name in chosen:
        model.set_submodule(name, nn.Module())  # until the others are loaded
    quantized = f"^({'|'.join(map(re.escape, taken))})$"
    weights.load(model, table, reader, device=device, progress=progress, ignore=(*ignore, quantized), tied=tied)
    for name, linear in tqdm(chosen.items(), "Quantised weights", disable=None if progress else True):
        place = device if devices is None else devices[name]
        if from_quantized:
            read = {part: reader.read(source).to(place, copy=True) for part, source in saved[name].items()}
            made = _restored(quantizer, linear, read, name, reader)
        else:
            values = [ours.read(f"{name}.{key}").to(linear.weight.dtype) for key, _ in linear.named_parameters()]
            if not all(torch.stack(value.aminmax()).isfinite().all() for value in values):
                raise CheckpointError(f"{reader.source}: {name} holds NaN or infinity and cannot be quantised")
            made = quantizer.convert(linear, values[0], values[1] if len(values) > 1 else None, place)
        model.set_submodule(name, made)
    quantizer.finish(model)
    mark(model, quantizer)


def mark(model: Any, quantizer: Quantizer) -> None:
    """Says that the model is quantised, under the names by which trainers and adapters ask."""
    model.is_quantized = True
    model.quantization_method = quantizer.quant_method
    model.hf_quantizer = model.config.quantization_config = quantizer
    for name, value in quantizer.flags.items():
        setattr(model, name, value)


def export(
    model: nn.Module,
    shapes: nn.Module,
    table: weights.Table,
    quantizer: Quantizer,
    *,
    tied: Mapping[str, str] | None = None,
) -> tuple[weights.Exported, dict[str, str]]:
    """The tensors under their names on disk, and the metadata of the files. Raises as `weights.export`.

    shapes: the same model as it was before it was quantised, on meta; it is taken apart.
    """
    chosen = {name: model.get_submodule(name) for name in linears(shapes, quantizer)}
    chosen = {name: module for name, module in chosen.items() if quantizer.is_quantized(module)}
    place = {box.param: box.source.rpartition(".")[0] for box in weights.regions(shapes, table)}
    state = {name: tensor for name, tensor in model.named_parameters() if name.rpartition(".")[0] not in chosen}
    metadata = {"format": "pt"}
    quantized: dict[str, Any] = {}
    for name, module in chosen.items():
        parts, described = quantizer.parts(module, name)
        quantized |= {f"{place[f'{name}.weight']}.{part}": (tensor, ()) for part, tensor in parts.items()}
        metadata |= described
        shapes.set_submodule(name, nn.Module())
    if len(metadata) > 1:  # torchao's, which names the plain tensors too
        metadata |= {name: json.dumps({"_type": "Tensor"}) for name in state}
        metadata["tensor_names"] = json.dumps([name for name in metadata if name != "format"])
    plain = weights.export(shapes, table, state, tied=tied)
    return weights.Exported({**plain.boxes, **quantized}), metadata


def _saved_parts(boxes: Iterable[weights.Region], names: Iterable[str]) -> dict[str, dict[str, str]]:
    """{linear module that is quantised on disk: {part: name on disk}}."""
    modules = {box.source.removesuffix(".weight"): box.param.removesuffix(".weight") for box in boxes}
    found: dict[str, dict[str, str]] = {}
    for name in names:
        stored = name.partition(".weight.")[0] if ".weight." in name else name.rpartition(".")[0]
        if stored in modules:
            found.setdefault(modules[stored], {})[name.removeprefix(f"{stored}.")] = name
    return {name: parts for name, parts in found.items() if parts.keys() - {"weight", "bias"}}


def _restored(quantizer: Quantizer, linear: nn.Linear, parts: Parts, name: str, reader: Any) -> nn.Module:
    if (linear.bias is None) != ("bias" not in parts):
        raise CheckpointError(f"{reader.source}: {name} has a bias on disk or in the model, and not in both")
    try:
        return quantizer.restore(linear, parts, name, reader.metadata)
    except (ValueError, KeyError, TypeError, AssertionError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"{reader.source}: {name} is no module that {quantizer.quant_method} has quantised with these settings: "
            f"{error}.\n  Likely: quantization_config in config.json is another checkpoint's, or a newer version's."
        ) from error


def _with_bias(made: Any, bias: Tensor | None, device: torch.device, requires_grad: bool = True) -> Any:
    if bias is not None:
        made.bias = nn.Parameter(bias.to(device, copy=True), requires_grad=requires_grad)
    return made


def _dtype(name: str, value: Any, default: torch.dtype) -> torch.dtype:
    found = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
    if not isinstance(found, torch.dtype | None) or (found is None and value is not None):
        raise InputError(f"quantization_config: {name}={value!r} is no dtype of torch")
    return default if found is None else found


def _is_of_torchao(config: Any) -> bool:
    return type(config).__module__.startswith("torchao.")
