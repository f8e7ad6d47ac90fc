"""Models on many GPUs: FSDP2, tensor and context parallel on torch's own engine, and checkpoints of a training run."""

from ligermodels.parallel.checkpoints import Checkpoints
from ligermodels.parallel.mesh import Parallel, make_mesh
from ligermodels.parallel.parallelize import parallelize

__all__ = ["Checkpoints", "Parallel", "make_mesh", "parallelize"]
