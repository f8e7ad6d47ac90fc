"""Frozen 4-bit bases without bitsandbytes: `NF4Linear` modules, in the folders that transformers writes with it.

    model = ligermodels.load("meta-llama/Llama-3.1-8B", quantization_config="nf4", device="cuda")

Each weight is quantised as it is read. A folder that holds the 4-bit weights of bitsandbytes, as many published ones
do, is loaded as it is by the same argument.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from ligermodels.checkpoint.quantizers import BitsAndBytes, Parts, Quantizer, dtype_of
from ligermodels.errors import InputError
from ligermodels.kernels._triton import cdiv
from ligermodels.kernels.nf4 import BLOCKS, CODE, NESTED_BLOCK, NF4State
from ligermodels.layers.nf4 import NF4Linear

_STATE = "weight.quant_state.bitsandbytes__nf4"


@dataclass(kw_only=True)
class NF4(Quantizer):
    """4 bits for each weight of a linear module; embedding, head, norms, routers and packed experts stay as they are.

    double: absmax is quantised too, 4.127 bits per weight instead of 4.5.
    skip_modules: names as in BitsAndBytesConfig's llm_int8_skip_modules.
    compute_dtype: what config.json tells bitsandbytes to compute in. Here a layer computes in the dtype of its input.
    """

    quant_method = "nf4"
    is_trainable: ClassVar[bool] = True

    double: bool = True
    skip_modules: list[str] | None = None
    compute_dtype: Any = torch.bfloat16

    def __post_init__(self) -> None:
        self.compute_dtype = dtype_of("compute_dtype", self.compute_dtype, torch.bfloat16)
        self.flags, self.skipped = {}, self.skip_modules or ()

    @classmethod
    def of_saved(cls, saved: Mapping[str, Any]) -> Self:
        """The settings of a folder whose config.json names bitsandbytes. Raises InputError unless they are nf4's."""
        kind = saved.get("bnb_4bit_quant_type", "fp4")
        if not saved.get("load_in_4bit") or kind != "nf4":
            raise InputError(
                f"its weights are in {kind if saved.get('load_in_4bit') else '8 bits'}, and quantization_config='nf4' "
                "reads nf4 alone; leave quantization_config out, so that bitsandbytes loads it"
            )
        return cls(
            double=bool(saved.get("bnb_4bit_use_double_quant", False)),
            skip_modules=saved.get("llm_int8_skip_modules"),
            compute_dtype=saved.get("bnb_4bit_compute_dtype") or torch.float32,
        )

    @property
    def element(self) -> Any:
        from accelerate.utils import CustomDtype

        return CustomDtype.INT4

    def convert(self, linear: nn.Linear, weight: Tensor, bias: Tensor | None, device: torch.device) -> nn.Module:
        bias = None if bias is None else bias.to(device, copy=True)
        return NF4Linear.from_weight(weight.to(device), bias, double=self.double)

    def is_quantized(self, module: nn.Module) -> bool:
        return type(module) is NF4Linear

    def parts(self, module: Any, name: str) -> tuple[Parts, dict[str, str]]:
        state = module.state
        values = {
            "quant_type": "nf4",
            "blocksize": state.block,
            "dtype": str(state.dtype).removeprefix("torch."),
            "shape": tuple(state.shape),
        }
        found = {
            "weight": module.weight.detach(),
            "weight.absmax": state.absmax.detach(),
            "weight.quant_map": state.code,
        }
        if state.nested_absmax is not None:
            found |= {"weight.nested_absmax": state.nested_absmax, "weight.nested_quant_map": state.nested_code}
            values |= {
                "nested_blocksize": NESTED_BLOCK,
                "nested_dtype": "float32",
                "nested_offset": state.offset.item(),
            }
        found[_STATE] = torch.tensor(list(json.dumps(values).encode()), dtype=torch.uint8)
        if module.bias is not None:
            found["bias"] = module.bias.detach()
        return found, {}

    def restore(self, linear: nn.Linear, parts: Parts, name: str, metadata: Mapping[str, str]) -> nn.Module:
        values = json.loads(bytes(parts[_STATE].tolist()))
        shape, block = tuple(values["shape"]), values["blocksize"]
        packed = parts["weight"].reshape(-1, 1).view(torch.uint8).reshape(-1, 1)  # of any bnb_4bit_quant_storage
        size = linear.weight.numel()
        blocks = cdiv(size, block) if block in BLOCKS else 0
        code, absmax = parts["weight.quant_map"], parts["weight.absmax"]
        nested: tuple[Tensor, ...] = ()
        wanted = {"weight": (packed, torch.uint8, cdiv(size, 2)), "quant_map": (code, torch.float32, 16)}
        if "nested_blocksize" in values:
            offset = torch.tensor(float(values["nested_offset"]), device=packed.device)
            nested = parts["weight.nested_absmax"], parts["weight.nested_quant_map"], offset
            wanted["absmax"] = absmax, torch.uint8, blocks
            wanted["nested_absmax"] = nested[0], torch.float32, cdiv(blocks, NESTED_BLOCK)
            wanted["nested_quant_map"] = nested[1], torch.float32, 256
        else:
            wanted["absmax"] = absmax, torch.float32, blocks
        for part, (tensor, dtype, count) in wanted.items():
            if tensor.dtype != dtype or tensor.numel() != count:
                raise ValueError(f"its {part} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} [{count}]")
        if values["quant_type"] != "nf4" or not torch.allclose(code.cpu(), torch.tensor(CODE), atol=1e-6):
            raise ValueError(f"its quant_type is {values['quant_type']}, or its quant_map another")
        if shape != linear.weight.shape or values.get("nested_blocksize", NESTED_BLOCK) != NESTED_BLOCK:
            raise ValueError(f"it holds a weight {list(shape)}, nested in blocks of {values.get('nested_blocksize')}")
        dtype = dtype_of("dtype", values["dtype"], torch.float32)
        return NF4Linear.from_packed(packed, NF4State(absmax, code, shape, dtype, block, *nested), parts.get("bias"))

    def to_dict(self) -> dict[str, Any]:
        """That of bitsandbytes, whose folder it is."""
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
