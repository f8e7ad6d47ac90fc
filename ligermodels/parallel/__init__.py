"""Models on many GPUs: FSDP2, tensor parallel with sequence parallel, context parallel, on torch's own engine."""

from ligermodels.parallel.mesh import Parallel, make_mesh
from ligermodels.parallel.parallelize import parallelize

__all__ = ["Parallel", "make_mesh", "parallelize"]
