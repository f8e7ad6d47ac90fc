"""Models on many GPUs: FSDP2, tensor and context parallel on torch's own engine, and checkpoints of a training run."""

from ligermodels.parallel.checkpoints import Checkpoints as Checkpoints
from ligermodels.parallel.mesh import Parallel as Parallel, make_mesh as make_mesh
from ligermodels.parallel.parallelize import parallelize as parallelize
