"""How flash_attention's kernels are tiled, by head size and GPU."""

import functools

import torch

from ligermodels.kernels._triton import assume_constant_result, next_power_of_2


def config(kernel: str, size: int, itemsize: int, narrow: bool, tma: bool) -> tuple[int, int, int, int]:
    """BLOCK_M, BLOCK_N, warps and stages of a kernel."""
    table = _EXACT if itemsize > 2 else _HOPPER if tma else _PORTABLE
    row = table[next(most for most in table if size <= most)]
    return row.get(kernel + " narrow", row[kernel]) if narrow else row[kernel]


# By the largest head. The fastest of several on an H200; for "narrow" (windows, packed sequences) where that differs.
_HOPPER = {
    64: {"forward": (64, 128, 4, 2), "dq": (64, 64, 4, 3), "dkdv": (64, 64, 4, 3)},
    80: {"forward": (128, 64, 4, 3), "dq": (64, 64, 4, 2), "dkdv": (64, 64, 4, 3)},
    96: {"forward": (128, 64, 8, 3), "forward narrow": (64, 64, 4, 3), "dq": (64, 64, 4, 2), "dkdv": (64, 64, 4, 2)},
    128: {"forward": (64, 64, 4, 3), "dq": (128, 64, 8, 3), "dq narrow": (64, 64, 4, 2), "dkdv": (64, 64, 4, 2)},
    256: {
        "forward": (128, 64, 8, 2),
        "dq": (64, 32, 4, 3),
        "dq narrow": (64, 64, 4, 2),
        "dk": (64, 64, 4, 2),
        "dv": (64, 64, 4, 3),
    },
}
# Not timed: what fits the registers without spills and 100 KiB of shared memory.
_PORTABLE = {
    64: {"forward": (128, 64, 4, 2), "dq": (64, 64, 4, 2), "dkdv": (64, 64, 4, 2)},
    128: {"forward": (128, 32, 4, 2), "dq": (64, 32, 4, 2), "dkdv": (32, 64, 4, 2)},
    256: {"forward": (64, 32, 4, 2), "dq": (32, 32, 4, 2), "dk": (32, 32, 4, 2), "dv": (32, 32, 4, 2)},
}
# fp32, whose tiles are split in two for the tensor cores; and fp64, interpreted.
_EXACT = {
    64: {"forward": (64, 32, 4, 1), "dq": (64, 32, 4, 1), "dkdv": (32, 64, 4, 1)},
    128: {"forward": (64, 32, 4, 1), "dq": (64, 32, 4, 1), "dkdv": (32, 64, 4, 1)},
    256: {"forward": (64, 16, 8, 1), "dq": (32, 16, 4, 1), "dk": (16, 32, 4, 1), "dv": (16, 32, 4, 1)},
}


@assume_constant_result
def data_centre(index: int | None) -> bool:
    """True on NVIDIA's Hopper and Blackwell with a copy engine and more than 200 KiB of shared memory."""
    return _cuda_major(index) in (9, 10)


@functools.cache
def _cuda_major(index: int | None) -> int:
    if torch.version.cuda is None or not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_capability(index)[0]


def head_parts(size: int) -> tuple[int, int]:
    """A head's dims as one tile of a power of two, or, where that would hold much that is not there, as two."""
    whole = max(16, next_power_of_2(size))
    rest = max(16, next_power_of_2(max(1, size - whole // 2)))
    return (whole // 2, rest) if whole > 64 and rest < whole // 2 else (whole, 0)
