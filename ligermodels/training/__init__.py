"""What a training loop needs besides the model: an optimizer, captured steps, gradients that add up in place, LoRA,
Medusa heads."""

from ligermodels.training.adamw import AdamW
from ligermodels.training.capture import CapturedStep
from ligermodels.training.gradients import accumulate_in_place
from ligermodels.training.lora import adapters_off, add_lora, load_adapter, merge_lora, save_adapter
from ligermodels.training.medusa import add_medusa, load_medusa, save_medusa

__all__ = [
    "AdamW",
    "CapturedStep",
    "accumulate_in_place",
    "adapters_off",
    "add_lora",
    "add_medusa",
    "load_adapter",
    "load_medusa",
    "merge_lora",
    "save_adapter",
    "save_medusa",
]
