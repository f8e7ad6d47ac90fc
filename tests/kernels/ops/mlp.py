"""Entries of the table of ops: activations, MLPs and linear layers."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels import kernels
from ligermodels.kernels.linear.linear import linears
from ligermodels.kernels.linear.operand import LinearOperand
from tests.kernels.cases import FEW_WIDTHS, WIDTHS, Case, Op, Sizes
from tests.kernels.interpreter import CHUNK
from tests.kernels.ops.elementwise import row_noise

# Activations and MLPs.

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "sigmoid": torch.sigmoid,
}
CLAMPED = kernels.ClampedSwiGLU(1.702, 0.875)
"""The unit of gpt-oss, with a limit that fp16 and bf16 have exactly, and that many numbers are above."""
GATED = ["silu", "gelu", "gelu_tanh"]
PLAIN = ["quick_gelu", "gelu", "gelu_tanh"]


def eager_glu(gate_up, up=None, *, activation="silu"):
    """The MLP of transformers, every step in the dtype of its input."""
    gate, up = gate_up.chunk(2, -1) if up is None else (gate_up, up)
    return eager_unit(gate, up, activation)


def eager_unit(gate, up, activation):
    """Of gpt-oss: GptOssExperts._apply_gate of transformers."""
    if not isinstance(activation, kernels.ClampedSwiGLU):
        return ACTIVATIONS[activation](gate) * up
    gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return (up + 1) * (gate * torch.sigmoid(gate * activation.alpha))


def eager_activate(x, *, activation):
    return ACTIVATIONS[activation](x)


def activation_op(call, reference, eager, *, gated: bool, separate: bool = False) -> Op:
    first, parts = ("gate_up", 2) if gated else ("x", 1)
    names = [*GATED, CLAMPED] if gated else PLAIN

    def make(m, rows, *, width, values=None, **options):
        values = torch.randn(*m.lead(rows), parts * width, device=m.device) * 3 if values is None else values
        tensors = {first: m.of(values)}
        if separate:
            tensors = {first: m.of(values[..., :width]), "up": m.of(values[..., width:])}
        return Case(tensors, options)

    def edge(values, activation):
        def case(m):
            x = torch.tensor(values)[torch.randint(len(values), (9, 50))] * (1 + 0.02 * torch.randn(9, 50))
            x = torch.cat([x, torch.randn(9, 50)], -1) if gated else x
            return make(m, 9, width=50, activation=activation, values=x.to(m.device))

        return case

    def at_the_limits(m):
        """Numbers at a limit pass a gradient; those above one, in fp16, do not."""
        values = torch.tensor([0.875, -0.875, 0.876, -0.876, 0.874, -0.874])
        return make(m, 9, width=50, activation=CLAMPED, values=values[torch.randint(6, (9, 100))].to(m.device))

    def huge(m):
        m.strided, rows, width = False, 2**18 + 9, 8192
        tensors = {first: m.big(rows, parts * width)}
        if separate:
            tensors = {first: m.big(rows, width), "up": m.big(rows, width)}
        return Case(tensors, {"activation": "gelu_tanh"})

    return Op(
        call, reference, eager, make,
        choices={"width": Sizes(WIDTHS[:-2], [*FEW_WIDTHS, 1030]), "activation": names},
        complete={"width": 8, "activation": names[0]},
        row=lambda chosen: parts * chosen["width"],
        more={"activation": [name for name in ACTIVATIONS if name not in names]},
        edges=({"at the limits": at_the_limits} if gated else {})
        | {
            f"{what}, {name}": edge(values, name)
            for name in names
            for what, values in {
                "zeros": [0.0, -0.0],
                "far tails": [-200.0, -100.0, -30.0, 30.0, 100.0, 200.0],
                "near tails": [-13.0, -9.0, -6.0, -5.0, -4.0, -3.0],
                "1e4": [1e4, -1e4, 1.0],
                "near zero": [1e-3, -1e-3, 1e-5, 2e-4],
            }.items()
        },
        past_2_31=huge,
    )  # fmt: skip


def mlp_op(call, reference, eager_activation, *, gated: bool, separate: bool = False) -> Op:
    """An MLP with its linear layers; with recompute, in the smallest chunks. separate: gate and up are two weights."""
    layers = ("gate", "up", "down") if separate else ("gate_up", "down") if gated else ("fc1", "fc2")
    names = GATED if gated else PLAIN

    def plain(op):
        return lambda *, recompute=False, workspace_bytes=0, **rest: op(**rest)

    def eager(x, *, activation, **weights):
        *first, (w2, b2) = ((weights[f"{name}_weight"], weights.get(f"{name}_bias")) for name in layers)
        h = torch.cat([F.linear(x, w1, b1) for w1, b1 in first], -1)
        return F.linear(eager_activation(h, activation=activation), w2, b2)

    def make(m, rows, *, width, inner, activation, out=7, bias=True, tiles=False, scale=2.0):
        tensors = {"x": m(*m.lead(rows), width, scale=scale)}
        first = [(inner, width)] * 2 if separate else [(inner * (1 + gated), width)]
        for name, shape in zip(layers, [*first, (out, inner)], strict=True):
            tensors[f"{name}_weight"] = m(*shape, scale=shape[1] ** -0.5)
            if bias and not (bias == "some" and name == layers[0]):
                tensors[f"{name}_bias"] = m(shape[0], scale=min(scale, 1.0))
        # Errors of z, h and dz, which are rows x inner numbers, are those of all sums over them.
        shared = max(1, width // max(1, min(rows, inner * (1 + gated))), out // max(1, min(rows, inner)))
        options = {"activation": activation} | ({"recompute": True, "workspace_bytes": 1} if tiles else {})
        return Case(tensors, options, shared, max(width, inner * (1 + gated), out, rows))

    def edge(scale, activation):
        return lambda m: make(m, 9, width=33, inner=50, activation=activation, bias=False, scale=scale)

    def huge(m):
        m.strided, rows, width = False, 2**18 + 9, 8192  # x, and all that is made of it
        case = make(m, 2, width=width, inner=4096 * (2 - gated), activation="gelu_tanh")
        return Case({**case.tensors, "x": m.big(rows, width)}, case.options)

    return Op(
        call, plain(reference), plain(eager), make,
        choices={
            "width": Sizes(WIDTHS[:-6], FEW_WIDTHS), "inner": Sizes([1, 7, 64, 300, 1000, 4096], [1, 7, 64]),
            "out": [1, 64, 300], "activation": names, "bias": [False, True], "tiles": [False, True],
        },
        complete={"width": 8, "inner": 4, "activation": names[0]},
        row=lambda chosen: chosen["width"] + chosen["out"] + 3 * chosen["inner"],
        more={"bias": ["some"]} | ({"activation": [CLAMPED]} if gated else {}),
        few_rows=(0, 1, 9, 2 * CHUNK + 5),
        edges={
            f"{what}, {name}": edge(scale, name)
            for name in names
            for what, scale in {"zeros": 0.0, "far tails": 60.0, "near zero": 1e-3}.items()
        },
        past_2_31=huge,
        noise=functools.partial(mlp_noise, gated=gated),
        matmuls=True,
    )  # fmt: skip


def of_two_weights(op):
    """gated_mlp, or its reference, with the two weights and biases as arguments of their own."""

    def call(x, *, gate_weight, up_weight, down_weight, gate_bias=None, up_bias=None, down_bias=None, **options):
        biases = None if gate_bias is None and up_bias is None else (gate_bias, up_bias)
        return op(x, (gate_weight, up_weight), down_weight, biases, down_bias, **options)

    return call


def mlp_noise(case: Case, upstream: list[Tensor], *, gated: bool) -> dict[str, Tensor]:
    """What one rounding of z (the first layer's output), h and their gradients dz and dh costs: of few tokens, or of
    equal ones, eager's roundings may happen to cancel."""
    first, second = ("gate_up", "down") if gated else ("fc1", "fc2")
    t = {name: x.detach().double() for name, x in case.tensors.items()}
    for kind in ("weight", "bias"):
        if f"gate_{kind}" in t:
            t[f"gate_up_{kind}"] = torch.cat([t[f"gate_{kind}"], t[f"up_{kind}"]])
    x, dy = t["x"].flatten(0, -2), upstream[0].double().flatten(0, -2)
    w1, w2 = t[f"{first}_weight"], t[f"{second}_weight"]
    z = F.linear(x, w1, t.get(f"{first}_bias")).requires_grad_()
    h = (kernels.glu_reference if gated else kernels.activate_reference)(z, activation=case.options["activation"])
    (dz,) = torch.autograd.grad(h, z, dy @ w2, create_graph=True)

    def by_z(y: Tensor) -> Tensor:
        """The square of what y, [T, inner], changes by where the numbers of z that it is made of are off by as much as
        they are large."""
        (slope,) = torch.autograd.grad(y.sum(), z, retain_graph=True)
        return ((slope * z.detach()) ** 2).unflatten(1, (-1, y.shape[1])).sum(1)

    squares = torch.finfo(case.tensors["x"].dtype).eps ** 2 / 12  # of a rounding, over the square of its number
    lost_h = squares * (by_z(h) + h.detach() ** 2)
    # dz is off by as much as dh, and by its own rounding.
    lost_dz = squares * (torch.cat([by_z(part) for part in dz.split(h.shape[1], 1)], 1) + 2 * dz.detach() ** 2)
    noise = {"output 0": lost_h @ w2.t() ** 2, f"d_{second}_weight": (dy**2).t() @ lost_h}
    noise |= {"d_x": lost_dz @ w1**2, f"d_{first}_weight": lost_dz.t() @ x**2, f"d_{first}_bias": lost_dz.sum(0)}
    for kind in ("weight", "bias"):
        if f"gate_{kind}" in t:
            noise |= zip((f"d_gate_{kind}", f"d_up_{kind}"), noise[f"d_gate_up_{kind}"].chunk(2), strict=True)
    shapes = {"output 0": upstream[0].shape, "d_x": t["x"].shape}
    return {name: n.sqrt().view(shapes.get(name, n.shape)) for name, n in noise.items()}


# Linear layers: after a norm, whose output is not saved, and several of one input.


def linear_after_norm(op):
    def call(x, norm, weight, bias=None):
        return op(kernels.rms_norm(x, norm), weight, bias)

    return call


def exact_linear_after_norm(x, norm, weight, bias=None):
    return F.linear(kernels.rms_norm_reference(x, norm), weight, bias)


def three_layers(op):
    """joint_linear of three weights as arguments of their own."""

    def call(x, **rest):
        biases = [rest.get(f"bias{i}") for i in range(3)]
        return op(x, [rest[f"weight{i}"] for i in range(3)], None if all(b is None for b in biases) else biases)

    return call


def linear(x, weight, bias=None):
    return linears(x, [LinearOperand(weight, bias)])


def joint_linear(x, weights, biases=None):
    return linears(x, list(map(LinearOperand, weights, biases or [None] * len(weights))))


def one_by_one(x, weights, biases):
    return torch.cat([F.linear(x, w, b) for w, b in zip(weights, biases or [None] * len(weights), strict=True)], -1)


def linear_op(call, reference, eager, *, packed: bool) -> Op:
    def make(m, rows, *, width, out, bias=True):
        tensors = {"x": m(*m.lead(rows), width)}
        if not packed:
            tensors["norm"] = m(width)
        for i, columns in enumerate((out, out + 2, 1) if packed else (out,)):
            suffix = str(i) if packed else ""
            tensors[f"weight{suffix}"] = m(columns, width, scale=width**-0.5)
            if bias and not (bias == "some" and i == 0):
                tensors[f"bias{suffix}"] = m(columns)
        return Case(tensors, {}, width if not packed else 1, max(width, rows, 2 * out))

    return Op(
        call, reference, eager, make,
        choices={
            "width": Sizes(WIDTHS[3:-6], FEW_WIDTHS), "out": Sizes([1, 7, 64, 300, 1024], [1, 7, 64]),
            "bias": [False, True],
        },
        complete={"width": 8, "out": 5},
        row=lambda chosen: chosen["width"] + 2 * chosen["out"],
        more={"bias": ["some"]} if packed else {},
        noise=lambda case, upstream: {} if packed else norm_noise(case, upstream),
        matmuls=True,
        checks=False,
    )  # fmt: skip


def norm_noise(case: Case, upstream: list[Tensor]) -> dict[str, Tensor]:
    """`row_noise` of the gradient of a norm that a linear layer reads."""
    t = {name: x.detach() for name, x in case.tensors.items()}
    dy = upstream[0].double() @ t["weight"].double()
    norm_alone = Case({"x": t["x"], "weight": t["norm"]}, {})
    return {"d_x": row_noise(norm_alone, [dy], layer=False)["d_x"]}
