"""What a training loop needs besides the model: an optimizer, captured steps, gradients that add up in place."""

from ligermodels.training.adamw import AdamW
from ligermodels.training.capture import CapturedStep
from ligermodels.training.gradients import accumulate_in_place

__all__ = ["AdamW", "CapturedStep", "accumulate_in_place"]
