"""What a training loop needs besides the model: an optimizer, captured steps, gradients that add up in place, LoRA,
Medusa heads, the layer for multi-token prediction."""

from ligermodels.training.adamw import AdamW
from ligermodels.training.capture import CapturedStep
from ligermodels.training.gradients import accumulate_in_place
from ligermodels.training.lora import adapters_off, add_lora, load_adapter, merge_lora, save_adapter
from ligermodels.training.medusa import add_medusa, load_medusa, save_medusa
from ligermodels.training.mtp import add_mtp, load_mtp

__all__ = [
    "AdamW",
    "CapturedStep",
    "accumulate_in_place",
    "adapters_off",
    "add_lora",
    "add_medusa",
    "add_mtp",
    "load_adapter",
    "load_medusa",
    "load_mtp",
    "merge_lora",
    "save_adapter",
    "save_medusa",
]
