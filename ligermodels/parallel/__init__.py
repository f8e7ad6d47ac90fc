"""Training on many GPUs."""

from ligermodels.parallel.checkpoints import Checkpoints

__all__ = ["Checkpoints"]
