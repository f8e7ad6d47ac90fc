"""What only a GPU shows of ops outside the table of `ops`: they are captured, never synchronise, and compile whole."""

import functools

import pytest
import torch

from ligermodels.kernels.linear._gemv import gemv
from ligermodels.kernels.linear.glu import glu
from ligermodels.kernels.linear.int2_matmul import int2_matmul, pack_int2
from ligermodels.kernels.linear.linear import linears
from ligermodels.kernels.linear.nf4 import quantize_nf4
from ligermodels.kernels.linear.operand import LinearOperand
from ligermodels.kernels.linear.quantized import FORMATS, quantize, quantized_glu, quantized_linear
from ligermodels.kernels.loss.argmax import argmax
from ligermodels.kernels.norm.rms_norm import rms_norm
from ligermodels.kernels.optimizer.adamw import adamw
from tests.kernels.linear.test_linear import joint_linear, several
from tests.kernels.linear.test_mlp import MODES, of_two, two_weights
from tests.kernels.on_gpu import assert_captures, assert_compiles, assert_never_waits


def random(*shape, dtype=torch.bfloat16, scale=1.0):
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def joint_weights(dtype):
    x, weights, biases, dy = several("cuda", "joint", (2, 300), dtype, columns=(256, 64, 64), width=256)
    return lambda x, *rest: joint_linear(x, rest[:3], rest[3:]), [x, *weights, *biases], [dy]


def mlp_of_joint_weights(dtype, mode):
    inputs, dy = two_weights("cuda", 300, hidden=512, inner=1536, out=512, dtype=dtype)
    return functools.partial(of_two, **MODES[mode]), inputs, [dy]


def int2(dtype):
    a = torch.randint(-128, 128, (40, 256), device="cuda", dtype=torch.int8)
    return int2_matmul, [a, pack_int2(torch.randint(-1, 2, (64, 256), device="cuda"))], []


def greedy(dtype):
    return argmax, [random(2, 128_256)], []


def gemvs(dtype):
    weights = [random(9, 512, scale=0.05), random(9, 512, scale=0.05), random(512, 9, scale=0.3)]
    return (
        lambda x: gemv(gemv(gemv(x, weights[0], up=weights[1], activation="silu"), weights[2]), weights[0]),
        [random(1, 512)],
        [],
    )


def of_few_bits(dtype, kind):
    gate, up, back = (quantize(random(*shape, scale=0.05), kind) for shape in ((512, 1024), (512, 1024), (1024, 512)))

    def op(x, several):
        h = quantized_linear(quantized_glu(x, gate, up, None, None, activation="silu"), back)
        return h, linears(several, [LinearOperand(gate), LinearOperand(up)])

    return op, [random(1, 1024), random(7, 1024)], []


def a_step_of_adamw(dtype, weight):
    """step, lr and factor are on the device, so that a replayed graph reads their values again."""
    w, m, v, grad = (random(5000, dtype=weight) for _ in range(4))
    r = torch.zeros_like(w, dtype=torch.int16) if weight == torch.bfloat16 else None
    step, lr, factor = torch.zeros((), device="cuda"), torch.tensor(1e-3, device="cuda"), torch.ones((), device="cuda")

    def op(w, m, v, grad, factor, lr, step):
        found = [w.clone(), m.clone(), v.clone(), None if r is None else r.clone()]
        options = dict(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, seed=9)
        adamw(found[0], grad, *found[1:], step=step + 3, lr=lr, factor=factor, **options)
        return tuple(x for x in found if x is not None)

    return op, [w, m, v.square(), grad, factor, lr, step], []


def a_step_of_adamw_in_8_bits(dtype):
    w, grad, step = random(80, 64), random(80, 64), torch.zeros((), device="cuda")

    def op(w, grad, step):
        moments = torch.zeros(2, 80, 64, dtype=torch.uint8, device="cuda")
        exponents = torch.zeros(2, 80, 1, dtype=torch.uint8, device="cuda")
        weight, options = w.clone(), dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, seed=9)
        for t in (1, 2):
            adamw(weight, grad, *moments, None, tuple(exponents), step=step + t, **options)
        return weight, moments, exponents

    return op, [w, grad, step], []


def parts_of_heads(dtype):
    def op(joint, weight):
        query, gate = joint[..., : 3 * 128].unflatten(-1, (3, 2, 64)).unbind(3)
        return glu(gate, rms_norm(query, weight), activation="sigmoid")

    inputs = [random(2, 5, 448, dtype=dtype).requires_grad_(), random(64, dtype=dtype).requires_grad_()]
    return op, inputs, [random(2, 5, 3, 64, dtype=dtype)]


def dequantised_nf4(dtype):
    weight = quantize_nf4(random(96, 130))
    return lambda x: x @ weight.dequantize().t(), [random(3, 130)], []


CAPTURES, WAITS, COMPILES = {"captured": assert_captures}, {"waits": assert_never_waits}, {"compiles": assert_compiles}
ALL = CAPTURES | WAITS | COMPILES
CASES = {
    "joint weights": (joint_weights, ALL),
    **{f"mlp, {mode}": (functools.partial(mlp_of_joint_weights, mode=mode), ALL) for mode in MODES},
    "int2": (int2, ALL),
    "argmax": (greedy, CAPTURES | WAITS),
    "gemv": (gemvs, CAPTURES | WAITS),
    **{kind: (functools.partial(of_few_bits, kind=kind), CAPTURES | WAITS) for kind in FORMATS},
    **{
        f"adamw of {weight}": (functools.partial(a_step_of_adamw, weight=weight), CAPTURES)
        for weight in (torch.bfloat16, torch.float32, torch.float64)
    },
    "adamw in 8 bits": (a_step_of_adamw_in_8_bits, CAPTURES),
    "nf4": (dequantised_nf4, COMPILES),
    "parts of heads": (parts_of_heads, ALL),
}


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "check"), [(name, check) for name, (_, checks) in CASES.items() for check in checks])
def test_on_a_gpu(name, check):
    make, checks = CASES[name]
    checks[check](*make(torch.float32 if check == "compiles" else torch.bfloat16))
