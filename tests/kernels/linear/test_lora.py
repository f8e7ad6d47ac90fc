"""Frozen layers with adapters: outputs and gradients of the formula in fp64, what is saved, and in how many matmuls.

W is dense or of 4 bits, and then dequantised in the formula. tests/training has whole models.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ligermodels import InputError
from ligermodels.kernels import dequantize_nf4_reference, quantize_nf4
from ligermodels.kernels.linear._split import split
from ligermodels.kernels.linear.gated_mlp import mlp_of
from ligermodels.kernels.linear.joint import make_joint
from ligermodels.kernels.linear.linear import linears
from ligermodels.kernels.linear.nf4 import NF4Weight
from ligermodels.kernels.linear.operand import Adapter, LinearOperand
from ligermodels.kernels.norm.rms_norm import add_rms_norm
from tests.kernels.interpreter import CHUNK
from tests.kernels.seen import Seen, saved_by

HIDDEN, INNER, OUT, R = 16, 24, 12, 4
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 2e-2}
"""Relative to the largest element: some hundred sums of about 30 terms of like size, one after the other."""
WHICH = {"all": (1, 1, 1), "second": (0, 1, 0), "last": (0, 0, 1), "two": (1, 0, 1)}
MODES = {"saved": {}, "recomputed": {"recompute": True}, "tiles": {"recompute": True, "workspace_bytes": 1}}


def close(found, expected, dtype):
    assert (found is None) == (expected is None)
    if found is not None:
        error = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
        assert found.dtype == expected.dtype or dtype != torch.float64
        assert error <= TOLERANCE[dtype], f"{error:.1e}"


def make(device, dtype, sizes, which, *, kind="joint", ranks=(R, R + 1, R)):
    """Frozen weights and biases of the sizes (out, in), and fp32 (fp64) adapters for those in `which`. kind: with "nf4"
    weights are of 4 bits, with "mixed" all but the second; their biases are fp32."""
    weights = [nn.Parameter(torch.randn(n, k, device=device).to(dtype) * k**-0.5, False) for n, k in sizes]
    biases = [nn.Parameter(torch.randn(n, device=device).to(dtype), False) for n, _ in sizes]
    for i in () if kind in ("joint", "separate") else range(0, len(sizes), 2 if kind == "mixed" else 1):
        weights[i] = quantize_nf4(weights[i].detach().float(), block=32)
        biases[i] = nn.Parameter(biases[i].float(), False)
    if kind == "joint":
        make_joint(weights[:2])
        make_joint(biases[:2])
    master = torch.promote_types(dtype, torch.float32)
    adapters = []
    for (n, k), r, one in zip(sizes, ranks, which, strict=False):
        a = torch.randn(r, k, device=device, dtype=master).mul_(k**-0.5).requires_grad_()
        b = torch.randn(n, r, device=device, dtype=master).mul_(r**-0.5).requires_grad_()
        adapters.append(Adapter(a, b, 0.75) if one else None)
    return weights, biases, adapters


def exact(adapters):
    """In fp64, as leaves of their own."""
    double = [None if one is None else [t.detach().double().requires_grad_() for t in one[:2]] for one in adapters]
    return [None if one is None else Adapter(*one, 0.75) for one in double]


def dense(weight, dtype=torch.float64):
    """The weight, dequantised where it is of 4 bits."""
    return dequantize_nf4_reference(weight, dtype) if isinstance(weight, NF4Weight) else weight.to(dtype)


def formula(x, weight, bias, adapter):
    y = x @ dense(weight).t() + bias.double()
    return y if adapter is None else y + adapter.scale * (x @ adapter.a.t() @ adapter.b.t())


def layers(*parts):
    """The operands of weights, biases and adapters."""
    return [LinearOperand(*one) for one in zip(*parts, strict=False)]


def mlp(x, *parts, gated=True, activation="silu", **mode):
    *first, last = layers(*parts)
    return mlp_of(x, first, last, gated=gated, activation=activation, **mode)


def leaves(adapters):
    return [t for one in adapters if one is not None for t in one[:2]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("kind", ["joint", "separate", "nf4", "mixed"])
@pytest.mark.parametrize("which", WHICH)
def test_layers_side_by_side(device, poison, dtype, kind, which):
    sizes = [(OUT, HIDDEN), (OUT // 2, HIDDEN), (OUT, HIDDEN)]
    weights, biases, adapters = make(device, dtype, sizes, WHICH[which], kind=kind)
    x = torch.randn(2, 5, HIDDEN, device=device).to(dtype).requires_grad_()
    y = linears(x, layers(weights, biases, adapters))
    dy = torch.randn_like(y)
    found = torch.autograd.grad(y, [x, *leaves(adapters)], dy)
    copies = exact(adapters)
    x64 = x.detach().double().requires_grad_()
    y64 = torch.cat([formula(x64, *one) for one in zip(weights, biases, copies, strict=True)], -1)
    expected = torch.autograd.grad(y64, [x64, *leaves(copies)], dy.double())
    for one, other in zip((y, *found), (y64, *expected), strict=True):
        close(one, other, dtype)
    with torch.no_grad():
        close(linears(x, layers(weights, biases, adapters)), y64, dtype)


def test_products_of_split_matrices_are_those_of_fp32(device, poison):
    """Each element to 2^-21, for a with parts side by side, b with parts below each other, and a sum of three parts."""
    a, b = torch.randn(40, 1, device=device), torch.randn(1, 30, device=device)
    exact = a.double() @ b.double()
    left, right = split(a, is_left=True), split(b, is_left=False, rows=True)
    assert ((left.double() @ right.double() - exact).abs() <= 2**-21 * exact.abs()).all()
    product = split(left[:, 2:3].float() @ right[:, :1].t().float(), is_left=True, summed=True)  # a1 b
    parts = left[:, 2:3].double() @ b[:, :1].double()
    assert ((product[:, 2:5].double().sum(1, keepdim=True) - parts).abs() <= 2**-21 * parts.abs()).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["joint", "nf4"])
def test_adapters_compute_in_their_own_dtype(device, poison, kind, dtype):
    """In fp32 beside layers of 16 bits: y and dx are rounded once, gradients of adapters are those of fp32."""
    sizes = [(OUT, HIDDEN), (OUT // 2, HIDDEN)]
    weights, _, adapters = make(device, dtype, sizes, (1, 1), kind=kind)
    weights = [nn.Parameter(w.detach() * 0, False) if kind == "joint" else w for w in weights]
    adapters = [adapter._replace(dtype=torch.float32) for adapter in adapters]
    x = torch.randn(3, 7, HIDDEN, device=device).to(dtype).requires_grad_()
    y = linears(x, layers(weights, [None, None], adapters))
    dy = torch.randn_like(y)
    found = torch.autograd.grad(y, [x, *leaves(adapters)], dy)
    copies, x64 = exact(adapters), x.detach().double().requires_grad_()
    nothing = [torch.zeros(n, device=device) for n, _ in sizes]
    y64 = torch.cat([formula(x64, *one) for one in zip(weights, nothing, copies, strict=True)], -1)
    expected = torch.autograd.grad(y64, [x64, *leaves(copies)], dy.double())
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert one.dtype == torch.float32 and (one - other).abs().max() <= 3e-6 * other.abs().max()
    if kind == "joint":  # all that is rounded to 16 bits is the adapters' part
        for one, other in ((y, y64), (found[0], expected[0])):
            assert ((one.double() - other).abs() <= torch.finfo(dtype).eps / 2 * other.abs() + 2e-6).all()


@pytest.mark.parametrize("need_x", [True, False], ids=["", "x frozen"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize(
    ("kind", "which"), [*(("dense", which) for which in WHICH), ("nf4", "two"), ("mixed", "all"), ("mixed", "last")]
)
def test_mlp(device, poison, kind, gated, which, mode, need_x):
    dtype = torch.float64
    if not gated:
        sizes, chosen = [(INNER, HIDDEN), (OUT, INNER)], WHICH[which][1:]
    else:
        sizes, chosen = [(INNER, HIDDEN), (INNER, HIDDEN), (OUT, INNER)], WHICH[which]
    kind = ("joint" if gated else "separate") if kind == "dense" else kind
    weights, biases, adapters = make(device, dtype, sizes, chosen, kind=kind)
    x = torch.randn(3, CHUNK, HIDDEN, device=device, dtype=dtype, requires_grad=need_x)
    if gated:
        y = mlp(x, weights, biases, adapters, **MODES[mode])
    else:
        y = mlp(x, weights, biases, adapters, gated=False, activation="gelu", **MODES[mode])
    dy = torch.randn_like(y)
    wanted = [*([x] if need_x else []), *leaves(adapters)]
    found = torch.autograd.grad(y, wanted, dy)
    z = [formula(x, *one) for one in zip(weights[:-1], biases[:-1], adapters[:-1], strict=True)]
    h = F.silu(z[0]) * z[1] if gated else F.gelu(z[0])
    y64 = formula(h, weights[-1], biases[-1], adapters[-1])
    for one, other in zip((y, *found), (y64, *torch.autograd.grad(y64, wanted, dy)), strict=True):
        close(one, other, dtype)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["joint", "separate", "mixed"])
@pytest.mark.parametrize("op", ["layers", "mlp"])
def test_weights_and_biases_are_trained_beside_adapters_and_few_bits(device, poison, op, kind, mode):
    """Of layers with an adapter, of others, and the bias of a weight of 4 bits; and only one of all of them."""
    dtype, sizes = torch.float64, [(INNER, HIDDEN), (INNER, HIDDEN), (OUT, INNER if op == "mlp" else HIDDEN)]
    weights, biases, adapters = make(device, dtype, sizes, (1, 0, 1), kind=kind)
    biases = [nn.Parameter(bias.to(dtype)) for bias in biases]
    dense_weights = [weight.requires_grad_() for weight in weights if isinstance(weight, torch.Tensor)]
    x = torch.randn(CHUNK + 3, HIDDEN, device=device, dtype=dtype).requires_grad_()
    parameters = [*dense_weights, *biases, *leaves(adapters)]

    def run():
        if op == "layers":
            return linears(x, layers(weights, biases, adapters))
        return mlp(x, weights, biases, adapters, **MODES[mode])

    def expected():
        z = [formula(x, *one) for one in zip(weights[:2], biases, adapters, strict=False)]
        last = F.silu(z[0]) * z[1] if op == "mlp" else x
        y = formula(last, weights[2], biases[2], adapters[2])
        return y if op == "mlp" else torch.cat([*z, y], -1)

    for trained in ([x, *parameters], parameters, *([one] for one in (dense_weights[0], biases[0], biases[2]))):
        for parameter in (x, *parameters):
            parameter.requires_grad_(any(parameter is one for one in trained))
        y, y64 = run(), expected()
        dy = torch.randn_like(y)
        found, wanted = (torch.autograd.grad(one, trained, dy) for one in (y, y64))
        for one, other in zip((y, *found), (y64, *wanted), strict=True):
            close(one, other, dtype)


@pytest.mark.parametrize("kind", ["joint", "nf4"])
def test_what_is_saved(device, kind):
    """After a norm: its inputs, and H; of an MLP gate and up too, unless they are recomputed. No copy of x, no h, and
    no dequantised weight."""
    sizes = [(INNER, HIDDEN), (INNER, HIDDEN), (OUT, INNER)]
    weights, biases, adapters = make(device, torch.float32, sizes, (1, 1, 1), kind=kind)
    x, residual = torch.randn(2, 7, 9, HIDDEN, device=device).requires_grad_().unbind()
    norm = torch.randn(HIDDEN, device=device).requires_grad_()
    given = [*biases, *leaves(adapters), norm]
    for weight in weights:
        given += [weight] if kind == "joint" else [t for t in weight.tensors if t is not None]
    y, total = add_rms_norm(x, residual, norm)
    _, saved = saved_by(lambda: linears(y, layers(weights[:2], biases, adapters)), *given, total)
    assert sorted(tuple(t.shape) for t in saved if t.dim() > 1) == [(63, R + R + 1)]

    def op(**mode):
        return mlp(y, weights, biases, adapters, **mode)

    for mode, kept in ((MODES["saved"], [(7, 9, 2 * INNER)]), (MODES["tiles"], [])):
        _, saved = saved_by(lambda mode=mode: op(**mode), *given, total)
        assert [tuple(t.shape) for t in saved if t.dim() > 1] == kept


@pytest.mark.parametrize("kind", ["joint", "nf4"])
def test_in_how_many_matmuls(device, kind):
    """One for all W and one for all A; none of the shape of a weight's gradient."""
    sizes = [(OUT, HIDDEN), (OUT, HIDDEN)]
    weights, biases, adapters = make(device, torch.float32, sizes, (1, 1), kind=kind, ranks=(R, R))
    x = torch.randn(50, HIDDEN, device=device).requires_grad_()
    with Seen() as seen:
        y = linears(x, layers(weights, [None, None], adapters))
        y.backward(torch.ones_like(y))
    assert [one for one in seen.matmuls if HIDDEN in one] == [
        (50, HIDDEN, 2 * OUT), (50, HIDDEN, 2 * R), (2 * R, 50, HIDDEN), (50, 2 * OUT, HIDDEN), (50, 2 * R, HIDDEN),
    ]  # fmt: skip
    with Seen() as seen, torch.no_grad():
        linears(x, layers(weights, biases, adapters))
    assert (50, HIDDEN, 2 * OUT) in seen.matmuls  # with the biases of weights of 4 bits too, which are separate


REFUSED = {
    "weight of another width": dict(weight=torch.randn(OUT, HIDDEN + 1)),
    "weight on another device": dict(weight=torch.empty(OUT, HIDDEN, device="meta")),
    "weight of another dtype": dict(weight=torch.randn(OUT, HIDDEN).double()),
    "weight of three dims": dict(weight=torch.randn(1, OUT, HIDDEN)),
    "bias of another size": dict(bias=torch.randn(OUT + 1)),
    "bias of another dtype": dict(bias=torch.randn(OUT).double()),
    "bias on another device": dict(bias=torch.empty(OUT, device="meta")),
    "A of another width": dict(adapter=Adapter(torch.randn(R, HIDDEN + 1), torch.randn(OUT, R), 1.0)),
    "B of another rank": dict(adapter=Adapter(torch.randn(R, HIDDEN), torch.randn(OUT, R + 1), 1.0)),
    "A on another device": dict(adapter=Adapter(torch.empty(R, HIDDEN, device="meta"), torch.randn(OUT, R), 1.0)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_operands_that_do_not_fit_are_refused(case):
    """By dense layers that are trained, beside a layer with an adapter, and by the MLP."""
    right = LinearOperand(torch.randn(OUT, HIDDEN), torch.randn(OUT))
    wrong = right._replace(**REFUSED[case])
    x, adapter = torch.randn(3, HIDDEN), Adapter(torch.randn(R, HIDDEN), torch.randn(OUT, R), 1.0)
    down = torch.randn(HIDDEN, OUT)
    for other in (right, right._replace(adapter=adapter)):
        with pytest.raises(InputError, match=r"weight|bias|adapter"):
            linears(x.requires_grad_(), [other, wrong])
    with pytest.raises(InputError):
        mlp_of(x, [right, wrong], LinearOperand(down), gated=True, activation="silu")


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("adapted", [False, True])
def test_strides_are_free(device, adapted, grad, rows):
    """Of x, weight, bias and both factors: each every second element of a larger tensor."""

    def strided(*shape):
        return torch.randn(*shape[:-1], 2 * shape[-1], device=device)[..., ::2]

    a, b = strided(R, HIDDEN), strided(OUT, R)
    adapter = Adapter(a, b, 0.75) if adapted else None
    layers = [LinearOperand(strided(OUT, HIDDEN), strided(OUT), adapter) for _ in range(2)]
    x = strided(rows, HIDDEN).requires_grad_(grad)
    expected = torch.cat([formula(x.double(), *one[:2], exact([adapter])[0]) for one in layers], -1)
    close(linears(x, layers), expected, torch.float32)


def test_adapters_in_the_other_16_bits_under_autocast(device):
    """Beside one in fp32, as torch.cat refuses them there."""
    weights, biases, adapters = make(device, torch.float16, [(OUT, HIDDEN), (OUT // 2, HIDDEN)], (1, 1))
    other = adapters[0]._replace(a=adapters[0].a.detach().bfloat16(), b=adapters[0].b.detach().bfloat16())
    adapters[0] = other._replace(a=other.a.requires_grad_(), b=other.b.requires_grad_())
    x = torch.randn(3, 7, HIDDEN, device=device).half().requires_grad_()
    with torch.autocast(device, torch.float16):
        y = linears(x, layers(weights, biases, adapters))
    dy = torch.randn_like(y)
    found = torch.autograd.grad(y, [x, *leaves(adapters)], dy)
    copies, x64 = exact(adapters), x.detach().double().requires_grad_()
    y64 = torch.cat([formula(x64, *one) for one in zip(weights, biases, copies, strict=True)], -1)
    expected = torch.autograd.grad(y64, [x64, *leaves(copies)], dy.double())
    for one, wanted in zip((y, *found), (y64, *expected), strict=True):
        close(one, wanted, torch.float16)


def test_four_bits_under_autocast(device):
    """As the dequantised weights, cast."""
    sizes = [(INNER, HIDDEN), (INNER, HIDDEN), (OUT, INNER)]
    weights, biases, adapters = make(device, torch.float32, sizes, (1, 1, 1), kind="nf4")
    low = [dense(w, torch.float16) for w in weights]
    results = []
    for used in (weights, low):
        torch.manual_seed(3)
        x = torch.randn(CHUNK + 4, HIDDEN, device=device).requires_grad_()
        with torch.autocast(device, torch.float16):
            y = linears(x, layers(used[:2], biases, adapters))
            z = mlp(x, used, biases, adapters, **MODES["tiles"])
        results.append((y, z, *torch.autograd.grad(y.float().sum() + z.float().sum(), [x, *leaves(adapters)])))
    for one, other in zip(*results, strict=True):
        assert one.dtype == other.dtype
        close(one, other, torch.float16)
