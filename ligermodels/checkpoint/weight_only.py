"""Weights in few bits for inference, without a library: `QuantizedLinear` modules, made as a checkpoint is read.

model = ligermodels.load("meta-llama/Llama-3.1-8B", quantization_config="int4", device="cuda")
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ligermodels.checkpoint.quantizers import Parts, Quantizer
from ligermodels.errors import CheckpointError, InputError
from ligermodels.kernels.quantized import FORMATS
from ligermodels.layers.linear import JointProjections
from ligermodels.layers.quantized import QuantizedLinear


@dataclass(kw_only=True)
class WeightOnly(Quantizer):
    """int8, fp8 or int4 for each weight of a linear module; embedding, head, norms, routers and packed experts stay.

    quant_method: which of them. skip_modules: names as in BitsAndBytesConfig's llm_int8_skip_modules.
    """

    is_trainable: ClassVar[bool] = False

    quant_method: str  # type: ignore[misc]  # of a module's class elsewhere
    skip_modules: list[str] | None = None

    def __post_init__(self) -> None:
        if self.quant_method not in FORMATS:
            raise InputError(f"WeightOnly: quant_method={self.quant_method!r}; expected one of {', '.join(FORMATS)}")
        self.flags, self.skipped = {}, self.skip_modules or ()

    @property
    def element(self) -> Any:
        from accelerate.utils import CustomDtype

        return {"int4": CustomDtype.INT4, "fp8": CustomDtype.FP8}.get(self.quant_method, torch.int8)

    def convert(self, linear: nn.Linear, weight: Tensor, bias: Tensor | None, device: torch.device) -> nn.Module:
        bias = None if bias is None else bias.to(device, copy=True)
        return QuantizedLinear.from_weight(weight.to(device), bias, kind=self.quant_method)

    def finish(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, JointProjections):
                module.lay_together()

    def is_quantized(self, module: nn.Module) -> bool:
        return type(module) is QuantizedLinear

    def parts(self, module: nn.Module, name: str) -> tuple[Parts, dict[str, str]]:
        raise CheckpointError(
            f"{name} is {self.quant_method}, for which there is no format on disk: weights are quantised as they are "
            "read. Next: keep the folder that the model was loaded from, or load it without quantization_config and "
            'save that; quantization_config="nf4" can be saved.'
        )
