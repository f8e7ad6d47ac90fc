"""BitNet b1.58: ternary weights times int8 activations, as kernels and as linear layers.

Experimental: no architecture of the package is built from these. The checkpoint layout is that of transformers.
"""

from ligermodels.experimental.bitnet.int2_matmul import int2_matmul, int2_matmul_reference, pack_int2, unpack_int2
from ligermodels.experimental.bitnet.layers import BitLinear, PackedBitLinear
from ligermodels.experimental.bitnet.quantize import quantize_int8, quantize_int8_reference

__all__ = [
    "BitLinear",
    "PackedBitLinear",
    "int2_matmul",
    "int2_matmul_reference",
    "pack_int2",
    "quantize_int8",
    "quantize_int8_reference",
    "unpack_int2",
]
