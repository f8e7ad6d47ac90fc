"""How flash_attention's kernels are tiled, by head size and card, and the measurements that chose it."""

import functools

import torch

from ligermodels.kernels._triton import next_power_of_2


def config(kernel: str, size: int, itemsize: int, narrow: bool, tma: bool) -> tuple[int, int, int, int]:
    """BLOCK_M, BLOCK_N, warps and stages of a kernel."""
    table = _EXACT if itemsize > 2 else _HOPPER if tma else _PORTABLE
    row = table[next(most for most in table if size <= most)]
    return row.get(kernel + " narrow", row[kernel]) if narrow else row[kernel]


# By the largest head. Milliseconds on one H200 in one run, the next best beside them. 64: causal, B 8, HQ 32, HK 8,
# S 2048; 80 and 96: not causal, B 4, H 16, S 5476 (backward: with the forward and the other kernel); 128: causal, B 4,
# HQ 32, HK 8, S 4096 (narrow: B 2, S 8192, window 1024); 256: softcap, B 4, HQ 8, HK 4, S 4096.
_HOPPER = {
    64: {
        "forward": (64, 128, 4, 2),  # 0.372; (64, 64, 4, 3) 0.383, (128, 64, 4, 3) 0.400
        "dq": (64, 64, 4, 3),  # 0.397; (64, 64, 4, 2) 0.400, (128, 64, 4, 3) 0.424
        "dkdv": (64, 64, 4, 3),  # 0.674; (128, 64, 4, 2) 0.692, (128, 128, 8, 2) 0.793
    },
    80: {
        "forward": (128, 64, 4, 3),  # 1.450; (64, 64, 4, 3) 1.476, (128, 64, 8, 3) 1.492
        "dq": (64, 64, 4, 2),  # 6.018; (64, 64, 4, 3) 6.027, (128, 64, 8, 3) 6.492
        "dkdv": (64, 64, 4, 3),  # 5.800; (64, 64, 4, 2) 6.018
    },
    96: {
        "forward": (128, 64, 8, 3),  # 1.578; (128, 64, 4, 3) 1.634, (64, 64, 4, 3) 1.815
        "forward narrow": (64, 64, 4, 3),  # B 4, H 32, S 4096, window 2047: 0.885; (128, 64, 8, 3) 1.112
        "dq": (64, 64, 4, 2),  # 6.131; (64, 64, 4, 3) 6.166, (128, 64, 8, 3) 6.652
        "dkdv": (64, 64, 4, 2),  # 6.348; (64, 64, 4, 3) 6.522
    },
    128: {
        "forward": (64, 64, 4, 3),  # 1.079; (128, 64, 4, 2) 1.097, (128, 64, 8, 3) 1.267. Narrow 0.595; 0.629, 0.739
        "dq": (128, 64, 8, 3),  # 1.403; (64, 64, 4, 2) 1.595, (128, 128, 8, 2) 1.585
        "dq narrow": (64, 64, 4, 2),  # 0.771; (128, 64, 8, 3) 0.846, (64, 32, 4, 3) 0.857
        "dkdv": (64, 64, 4, 2),  # 1.939; (64, 128, 8, 3) 2.103. dk and dv apart 2.739
    },
    256: {
        "forward": (128, 64, 8, 2),  # 0.683; (128, 32, 8, 4) 0.706, (64, 32, 4, 2) 0.759
        "dq": (64, 32, 4, 3),  # 1.017; (64, 64, 4, 2) 1.079, (128, 32, 8, 2) 1.179
        "dq narrow": (64, 64, 4, 2),  # HQ 8, HK 4, B 2, S 8192, window 1024: 0.535; (64, 32, 4, 3) 0.566
        "dk": (64, 64, 4, 2),  # 1.227; (32, 128, 8, 3) 1.313. Together with dv: 2.477
        "dv": (64, 64, 4, 3),  # 0.719; (32, 64, 4, 2) 0.768, (64, 128, 8, 2) 0.787
    },
}
# Not timed on such cards: what fits their registers without spills and 100 KiB of shared memory.
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


@torch.compiler.assume_constant_result
def data_centre(index: int | None) -> bool:
    """True on NVIDIA's Hopper and Blackwell with a copy engine and more than 200 KiB of shared memory."""
    return _cuda_major(index) in (9, 10)


@functools.cache
def _cuda_major(index: int | None) -> int:
    if torch.version.cuda is None or not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_capability(index)[0]


# Descriptors cost the host 40 to 60 us in the forward and 250 to 400 us in the backward. Below so many multiplications
# (about 50 us of the forward on an H200) the host is what one waits for; under torch.compile it is not.


def head_parts(size: int) -> tuple[int, int]:
    """A head's dims as one tile of a power of two, or, where that would hold much that is not there, as two."""
    whole = max(16, next_power_of_2(size))
    rest = max(16, next_power_of_2(max(1, size - whole // 2)))
    return (whole // 2, rest) if whole > 64 and rest < whole // 2 else (whole, 0)
