"""What a training loop needs besides the model: an optimizer, captured steps, gradients that add up in place, LoRA."""

from ligermodels.training.adamw import AdamW
from ligermodels.training.capture import CapturedStep
from ligermodels.training.gradients import accumulate_in_place
from ligermodels.training.lora import adapters_off, add_lora, load_adapter, merge_lora, save_adapter

__all__ = [
    "AdamW",
    "CapturedStep",
    "accumulate_in_place",
    "adapters_off",
    "add_lora",
    "load_adapter",
    "merge_lora",
    "save_adapter",
]
