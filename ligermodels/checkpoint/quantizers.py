"""The quantisers of linear modules and experts: bitsandbytes, torchao, and ours, NF4, MXFP4 and WeightOnly.

    model = ligermodels.load("meta-llama/Llama-3.1-8B", quantization_config="nf4", device="cuda")

A quantiser replaces `nn.Linear` modules or, with torchao, their weights, as they are read from a checkpoint. Those of
libraries write the config.json and tensors that transformers writes for the same settings, so that either loads what
the other saved; NF4 reads and writes those of bitsandbytes, MXFP4 those of the released gpt-oss. Libraries are imported
on demand. Trainers read a quantiser as `hf_quantizer` and as `quantization_config`.
"""

import dataclasses
import importlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from ligermodels.errors import CheckpointError, ConfigError, InputError
from ligermodels.kernels.linear.fp8 import OTHER_KINDS, check_e4m3
from ligermodels.kernels.linear.nf4 import CODE, NESTED_BLOCK
from ligermodels.kernels.linear.quantized import FORMATS
from ligermodels.layers.linear import JointProjections
from ligermodels.layers.quantized import QuantizedLinear

_NF4_STATE = "weight.quant_state.bitsandbytes__nf4"

Parts = Mapping[str, Tensor]
"""{name on disk, after the module's: tensor}, of one quantised linear module."""


class Quantizer:
    """The settings of one method, and how it converts, saves and restores a linear module."""

    quant_method: ClassVar[str]
    """The name in config.json, and of the library."""
    is_trainable: Any = True
    """Whether adapters can be trained over it, as Trainer asks."""
    is_qat_trainable: ClassVar[bool] = False
    flags: Mapping[str, bool] = {}
    """Attributes by which other tools recognise such a model."""
    quantizes_linears: ClassVar[bool] = True
    """Whether it quantises linear modules."""
    quantizes_experts: ClassVar[bool] = False
    """Whether it quantises stacked experts as well, each matrix by itself."""
    skip_field: ClassVar[str] = "skip_modules"
    """The field that names modules to leave as they are."""

    @property
    def quantization_config(self) -> Self:
        return self

    @property
    def skipped(self) -> Iterable[str]:
        """Names of modules that are not quantised."""
        return getattr(self, self.skip_field) or ()

    @property
    def element(self) -> Any:
        """The dtype of a quantised weight, for accelerate's estimate of memory."""
        return torch.int8

    def default_device(self, device: torch.device) -> torch.device:
        """The model's device if the call names none; `device` is torch's default."""
        return device

    def check_device(self, device: torch.device) -> None:
        """Raises InputError for a device on which the quantised modules cannot compute."""

    def convert(self, linear: nn.Linear, weight: Tensor, bias: Tensor | None, device: torch.device) -> nn.Module:
        """The quantised module on `device`; `linear` is on meta, weight and bias may be mapped from a file."""
        raise NotImplementedError

    def finish(self, model: nn.Module) -> None:
        """Runs after the last module."""

    def is_quantized(self, module: nn.Module) -> bool:
        """Whether `convert` made the module, and nothing wraps it."""
        raise NotImplementedError

    def parts(self, module: nn.Module, name: str) -> tuple[Parts, dict[str, str]]:
        """(the tensors of a quantised module to save, its entries in the header of the files)."""
        raise NotImplementedError

    def restore(self, linear: nn.Linear, parts: Parts, name: str, metadata: Mapping[str, str]) -> nn.Module:
        """The module that was saved as `parts`, on their device. Raises ValueError if they do not fit."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """The quantization_config of config.json."""
        values: dict[str, Any] = {"quant_method": self.quant_method}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            value = getattr(self, field.name)
            values[field.name] = str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
        return values

    def _library(self, module: str = "") -> Any:
        """The library, or a module of it. Raises InputError where it is not installed or too old."""
        try:
            return importlib.import_module(self.quant_method + module)
        except ImportError as error:
            without = ' Weights in nf4 also load without it: quantization_config="nf4".'
            raise InputError(
                f"quantization_config asks for {self.quant_method}, which cannot be imported: {error}.\n"
                f"  Next: `pip install -U {self.quant_method}`.{without * (self.quant_method == 'bitsandbytes')}"
            ) from error

    def _refuse(self, reason: str, *names: str) -> None:
        """Raises InputError if one of these fields is set."""
        for name in names:
            if getattr(self, name):
                raise InputError(f"quantization_config: {name}=True is not supported{reason}")


@dataclass(kw_only=True)
class BitsAndBytes(Quantizer):
    """The settings of transformers' BitsAndBytesConfig."""

    quant_method = "bitsandbytes"
    skip_field = "llm_int8_skip_modules"

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
        self._refuse("; leave it out", "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight")
        if self.bnb_4bit_quant_type not in ("nf4", "fp4"):
            raise InputError(f"quantization_config: bnb_4bit_quant_type={self.bnb_4bit_quant_type!r} is not nf4 or fp4")
        for name, default in (("bnb_4bit_compute_dtype", torch.float32), ("bnb_4bit_quant_storage", torch.uint8)):
            setattr(self, name, dtype_of(name, getattr(self, name), default))
        self.flags = {"is_loaded_in_4bit": self.load_in_4bit, "is_loaded_in_8bit": self.load_in_8bit}
        self._library()

    def default_device(self, device: torch.device) -> torch.device:
        """The GPU if there is one, as in transformers."""
        gpu = device.type == "cpu" and torch.cuda.is_available()
        return torch.device("cuda", torch.cuda.current_device()) if gpu else device

    @property
    def element(self) -> Any:
        return torch.int8 if self.load_in_8bit else importlib.import_module("accelerate.utils").CustomDtype.INT4

    def convert(self, linear: nn.Linear, weight: Tensor, bias: Tensor | None, device: torch.device) -> nn.Module:
        nn_, module = self._library().nn, self._empty(linear)
        if self.load_in_8bit:  # quantised on the way from the CPU to the device
            module.weight = nn_.Int8Params(weight, requires_grad=False, has_fp16_weights=False).to(device)
        else:
            options = dict(requires_grad=False, module=module, **self._options_4bit)
            module.weight = nn_.Params4bit(weight.to(device), **options).to(device)
        return _with_bias(module, bias, device, requires_grad=False)

    def is_quantized(self, module: nn.Module) -> bool:
        return type(module).__module__.startswith("bitsandbytes.")

    def parts(self, module: nn.Module, name: str) -> tuple[Parts, dict[str, str]]:
        return module.state_dict(), {}

    def restore(self, linear: nn.Linear, parts: Parts, name: str, metadata: Mapping[str, str]) -> nn.Module:
        nn_, module, parts = self._library().nn, self._empty(linear), dict(parts)
        weight, bias = parts.pop("weight"), parts.pop("bias", None)
        if self.load_in_8bit:
            scale, by_rows = parts["SCB"], parts["weight_format"].item() == 0
            if not by_rows or weight.dtype != torch.int8 or weight.shape != linear.weight.shape:
                raise ValueError(f"its weight is {weight.dtype} {list(weight.shape)}, or not stored by rows")
            if scale.shape != weight.shape[:1]:
                raise ValueError(f"its SCB is {list(scale.shape)}")
            module.weight = nn_.Int8Params(weight, requires_grad=False, SCB=scale).to(weight.device)
        else:
            module.weight = nn_.Params4bit.from_prequantized(weight, parts, device=weight.device, module=module)
            state = module.weight.quant_state
            if tuple(state.shape) != linear.weight.shape or 2 * weight.nbytes < linear.weight.numel():
                raise ValueError(f"its weight holds {weight.nbytes} bytes for {list(state.shape)}")
        return _with_bias(module, bias, weight.device, requires_grad=False)

    def _empty(self, linear: nn.Linear) -> Any:
        """The module that replaces `linear`, without memory."""
        nn_, sizes = self._library().nn, (linear.in_features, linear.out_features, linear.bias is not None)
        if self.load_in_8bit:
            return nn_.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=self.llm_int8_threshold, device="meta")
        return nn_.Linear4bit(*sizes, self.bnb_4bit_compute_dtype, **self._options_4bit, device="meta")

    @property
    def _options_4bit(self) -> dict[str, Any]:
        options = {"compress_statistics": self.bnb_4bit_use_double_quant, "quant_type": self.bnb_4bit_quant_type}
        return {**options, "quant_storage": self.bnb_4bit_quant_storage}


@dataclass(kw_only=True)
class TorchAO(Quantizer):
    """The settings of transformers' TorchAoConfig.

    quant_type: a config object of torchao, such as `torchao.quantization.Int8WeightOnlyConfig()`.
    """

    quant_method = "torchao"
    skip_field = "modules_to_not_convert"

    quant_type: Any
    modules_to_not_convert: list[str] | None = None
    include_input_output_embeddings: bool = False
    untie_embedding_weights: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.quant_type, Mapping):  # config.json's
            if self.quant_type.keys() != {"default"}:
                raise ConfigError("quantization_config of torchao: quant_type must hold one entry, 'default'")
            self.quant_type = self._library(".core.config").config_from_dict(self.quant_type["default"])
        if not is_of_torchao(self.quant_type):
            raise InputError(
                f"quantization_config: quant_type is {self.quant_type!r}, expected a config object of torchao, such as "
                "torchao.quantization.Int8WeightOnlyConfig()"
            )
        if "Fqn" in type(self.quant_type).__name__:
            raise InputError(
                f"{type(self.quant_type).__name__} is not supported at load: load the model without "
                "quantization_config, then call torchao.quantize_(model, config, filter_fn=None)"
            )
        fields = "include_input_output_embeddings", "untie_embedding_weights"
        self._refuse(": embedding and head stay plain", *fields)
        self.is_trainable = "8weight" in type(self.quant_type).__name__.lower()  # over 8-bit weights

    def get_apply_tensor_subclass(self) -> Any:
        """`quant_type`, under PEFT's name."""
        return self.quant_type

    def convert(self, linear: nn.Linear, weight: Tensor, bias: Tensor | None, device: torch.device) -> nn.Module:
        linear.weight = nn.Parameter(weight.to(device, copy=True), requires_grad=False)
        module = _with_bias(linear, bias, device)
        self._library().quantization.quantize_(module, self.quant_type)
        return module

    def is_quantized(self, module: nn.Module) -> bool:
        return type(module) is nn.Linear and type(module.weight).__module__.startswith("torchao.")

    def parts(self, module: nn.Module, name: str) -> tuple[Parts, dict[str, str]]:
        state = {f"{name}.{key}": tensor for key, tensor in module.state_dict().items()}
        flat, metadata = self._library(".prototype.safetensors.safetensors_support").flatten_tensor_state_dict(state)
        del metadata["tensor_names"]
        return {key.removeprefix(f"{name}."): tensor for key, tensor in flat.items()}, metadata

    def restore(self, linear: nn.Linear, parts: Parts, name: str, metadata: Mapping[str, str]) -> nn.Module:
        key, bias = f"{name}.weight", parts.get("bias")
        header = {key: metadata[key], "tensor_names": json.dumps([key])}
        state = {f"{name}.{part}": tensor for part, tensor in parts.items() if part != "bias"}
        files = self._library(".prototype.safetensors.safetensors_support")
        tensors, unread = files.unflatten_tensor_state_dict(state, header)
        if unread or tensors[key].shape != linear.weight.shape:
            raise ValueError(f"it holds {', '.join(parts)}")
        linear.weight = nn.Parameter(tensors[key], requires_grad=False)
        return _with_bias(linear, bias, tensors[key].device)

    def to_dict(self) -> dict[str, Any]:
        quant_type = {"default": self._library(".core.config").config_to_dict(self.quant_type)}
        return {**super().to_dict(), "quant_type": quant_type}


@dataclass(kw_only=True)
class NF4(Quantizer):
    """`QuantizedLinear` modules with 4 bits per weight, to train adapters on (QLoRA); bitsandbytes' format on disk.

    Embedding, head, norms and routers are not quantised. Experts are quantised and saved one by one, each as a linear
    module of bitsandbytes, which transformers 5 does not read; skip_modules=["experts"] leaves them as they are.
    double: quantise absmax too, 4.127 bits per weight instead of 4.5.
    skip_modules: names as in BitsAndBytesConfig's llm_int8_skip_modules.
    compute_dtype: for bitsandbytes, in config.json. Here a layer computes in the dtype of its input.
    """

    quant_method = "nf4"
    quantizes_experts = True

    double: bool = True
    skip_modules: list[str] | None = None
    compute_dtype: Any = torch.bfloat16

    def __post_init__(self) -> None:
        self.compute_dtype = dtype_of("compute_dtype", self.compute_dtype, torch.bfloat16)

    @classmethod
    def of_saved(cls, saved: Mapping[str, Any]) -> Self:
        """The settings from a quantization_config of bitsandbytes. Raises InputError unless it is nf4."""
        kind = saved.get("bnb_4bit_quant_type", "fp4") if saved.get("load_in_4bit") else "8 bits"
        if kind != "nf4":
            raise InputError(
                f"its weights are in {kind}, and quantization_config='nf4' reads nf4 alone; leave quantization_config "
                "out, so that bitsandbytes loads it"
            )
        return cls(
            double=bool(saved.get("bnb_4bit_use_double_quant", False)),
            skip_modules=saved.get("llm_int8_skip_modules"),
            compute_dtype=saved.get("bnb_4bit_compute_dtype") or torch.float32,
        )

    @property
    def element(self) -> Any:
        return importlib.import_module("accelerate.utils").CustomDtype.INT4

    def convert(self, linear: nn.Linear, weight: Tensor, bias: Tensor | None, device: torch.device) -> nn.Module:
        bias = None if bias is None else bias.to(device, copy=True)
        return QuantizedLinear.from_weight(weight.to(device), bias, kind="nf4", double=self.double)

    def is_quantized(self, module: nn.Module) -> bool:
        return type(module) is QuantizedLinear and module.kind == "nf4"

    def parts(self, module: Any, name: str) -> tuple[Parts, dict[str, str]]:
        _, shape, dtype, block = module.options
        values = {"quant_type": "nf4", "blocksize": block, "dtype": str(dtype).removeprefix("torch."), "shape": shape}
        tensors = dict(module.state_dict())
        if module.nested_absmax is not None:
            offset = tensors.pop("nested_offset").item()
            values |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": offset}
        tensors = {key if key in ("weight", "bias") else f"weight.{key}": tensor for key, tensor in tensors.items()}
        tensors[_NF4_STATE] = torch.tensor(list(json.dumps(values).encode()), dtype=torch.uint8)
        return tensors, {}

    def restore(self, linear: nn.Linear, parts: Parts, name: str, metadata: Mapping[str, str]) -> nn.Module:
        values = json.loads(bytes(parts[_NF4_STATE].tolist()))
        if values["quant_type"] != "nf4" or tuple(values["shape"]) != linear.weight.shape:
            raise ValueError(f"it holds a weight {values['shape']}, its quant_type is {values['quant_type']}")
        if values.get("nested_blocksize", NESTED_BLOCK) != NESTED_BLOCK:
            raise ValueError(f"its absmax is in blocks of {values['nested_blocksize']}")
        dtype = dtype_of("dtype", values["dtype"], torch.float32)
        weight = torch.empty(linear.weight.shape, dtype=dtype, device="meta")
        options: Any = dict(block=values["blocksize"], double="nested_blocksize" in values)
        module = QuantizedLinear.from_weight(weight, linear.bias, kind="nf4", **options)
        state = {key.removeprefix("weight."): tensor for key, tensor in parts.items() if key != _NF4_STATE}
        state["weight"] = parts["weight"].reshape(-1, 1).view(torch.uint8).reshape(-1, 1)  # any bnb_4bit_quant_storage
        if "nested_offset" in values:
            state["nested_offset"] = torch.tensor([float(values["nested_offset"])], device=state["weight"].device)
        for key, wanted in module.state_dict().items():
            tensor = state[key]
            if tensor.shape != wanted.shape or (tensor.dtype != wanted.dtype and key != "bias"):
                raise ValueError(
                    f"its {key} is {tensor.dtype} {list(tensor.shape)}, expected {wanted.dtype} {list(wanted.shape)}"
                )
        if not torch.allclose(state["quant_map"].cpu(), torch.tensor(CODE), atol=1e-6):
            raise ValueError("its quant_map is another")
        module.load_state_dict(state, assign=True)
        return module

    def to_dict(self) -> dict[str, Any]:
        """The quantization_config of bitsandbytes, whose format is written."""
        fields = {field.name: field.default for field in dataclasses.fields(BitsAndBytes)}
        return {
            "quant_method": "bitsandbytes",
            **fields,
            "load_in_4bit": True,
            "llm_int8_skip_modules": self.skip_modules,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": self.double,
            "bnb_4bit_compute_dtype": str(self.compute_dtype).removeprefix("torch."),
            "bnb_4bit_quant_storage": "uint8",
        }


@dataclass(kw_only=True)
class MXFP4(Quantizer):
    """The settings of transformers' Mxfp4Config: experts in 4.25 bits per weight, to train adapters on.

    Nothing else is quantised. checkpoint/mxfp4.py reads and writes them.
    modules_to_not_convert: names of experts to leave as they are. dequantize: a checkpoint in MXFP4 is read as bf16.
    """

    quant_method = "mxfp4"
    quantizes_linears = False
    quantizes_experts = True
    skip_field = "modules_to_not_convert"

    modules_to_not_convert: list[str] | None = None
    dequantize: bool = False

    @property
    def element(self) -> Any:
        return importlib.import_module("accelerate.utils").CustomDtype.INT4

    def convert(self, linear: nn.Linear, weight: Tensor, bias: Tensor | None, device: torch.device) -> nn.Module:
        return QuantizedLinear.from_weight(weight.to(device), bias, kind="mxfp4")

    def is_quantized(self, module: nn.Module) -> bool:
        return type(module) is QuantizedLinear and module.kind == "mxfp4"

    def to_dict(self) -> dict[str, Any]:
        return {"modules_to_not_convert": self.modules_to_not_convert, "quant_method": self.quant_method}


@dataclass(kw_only=True)
class WeightOnly(Quantizer):
    """`QuantizedLinear` modules with weights in int8, fp8 or int4, for inference. There is no format on disk.

    Embedding, head, norms and routers are not quantised. Experts are dequantised at each forward: all of a
    layer, or for few tokens those that a token chose.
    quant_method: "int8", "fp8" or "int4". skip_modules: names as in BitsAndBytesConfig's llm_int8_skip_modules.
    """

    is_trainable = False
    quantizes_experts = True

    quant_method: str  # type: ignore[misc]  # a ClassVar in the other classes
    skip_modules: list[str] | None = None

    def __post_init__(self) -> None:
        if self.quant_method not in FORMATS:
            raise InputError(f"WeightOnly: quant_method={self.quant_method!r}; expected one of {', '.join(FORMATS)}")

    @property
    def element(self) -> Any:
        dtypes = importlib.import_module("accelerate.utils").CustomDtype
        return {"int4": dtypes.INT4, "fp8": dtypes.FP8}.get(self.quant_method, torch.int8)

    def check_device(self, device: torch.device) -> None:
        if self.quant_method == "fp8":
            check_e4m3(device, 'quantization_config="fp8"', OTHER_KINDS)

    def convert(self, linear: nn.Linear, weight: Tensor, bias: Tensor | None, device: torch.device) -> nn.Module:
        bias = None if bias is None else bias.to(device, copy=True)
        return QuantizedLinear.from_weight(weight.to(device), bias, kind=self.quant_method)

    def finish(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, JointProjections):
                module.join_weights()

    def is_quantized(self, module: nn.Module) -> bool:
        return type(module) is QuantizedLinear

    def parts(self, module: nn.Module, name: str) -> tuple[Parts, dict[str, str]]:
        raise CheckpointError(
            f"{name} is {self.quant_method}, for which there is no format on disk: weights are quantised as they are "
            "read. Next: keep the folder of the model, or load it without quantization_config and "
            'save that; quantization_config="nf4" can be saved.'
        )


def _with_bias(module: Any, bias: Tensor | None, device: torch.device, requires_grad: bool = True) -> Any:
    if bias is not None:
        module.bias = nn.Parameter(bias.to(device, copy=True), requires_grad=requires_grad)
    return module


def dtype_of(name: str, value: Any, default: torch.dtype) -> torch.dtype:
    """The dtype that is a value of the field `name`, or its name; `default` for None. Raises InputError."""
    dtype = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype | None) or (dtype is None and value is not None):
        raise InputError(f"quantization_config: {name}={value!r} is not a dtype of torch")
    return default if dtype is None else dtype


def is_of_torchao(config: Any) -> bool:
    return type(config).__module__.startswith("torchao.")
