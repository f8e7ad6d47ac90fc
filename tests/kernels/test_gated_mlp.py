import functools
import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from ligermodels.errors import InputError
from ligermodels.kernels._gradients import MARK
from ligermodels.kernels._math import ACTIVATIONS
from ligermodels.kernels.gated_mlp import gated_mlp, gated_mlp_reference, mlp, mlp_reference
from ligermodels.kernels.linear import joint, lay_together
from ligermodels.kernels.rms_norm import add_rms_norm
from tests.kernels.on_gpu import assert_captures, assert_compiles, assert_never_waits
from tests.kernels.oracle import assert_as_exact, dtypes

module = importlib.import_module("ligermodels.kernels.gated_mlp")
kernels = importlib.import_module("ligermodels.kernels.glu")
linear = importlib.import_module("ligermodels.kernels.linear")

HIDDEN, INNER, OUT = 6, 20, 5
MODES = {"kept": {}, "one tile": {"recompute": True}, "tiles": {"recompute": True, "workspace_bytes": 1}}
"""The last: 128 tokens at a time, which is the least."""
ALMOST_FP64 = dict(rtol=1e-12, atol=1e-12)
"""Two fp64 evaluations of one formula in another order; a thousandth of what fp32 can reach."""
FP32_SLACK = 1.5
"""Of eager's rms error, in fp32: exp is the hardware's, or numpy's when interpreted, whose error is 1 to 2 ulp
where libm's is 0.5. In half precision the last rounding hides that."""
FP32_SUMS = dict(rtol=1e-5, atol=5e-5)
"""Of 130 terms, added in another order: 130 roundings of either sign by half an ulp of numbers below 32, four times."""
each_mode = pytest.mark.parametrize("mode", MODES)
each_unit = pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])


def unit(gated, **options):
    options = {"activation": "silu" if gated else "quick_gelu", **options}
    op, reference = (gated_mlp, gated_mlp_reference) if gated else (mlp, mlp_reference)
    return functools.partial(op, **options), functools.partial(reference, activation=options["activation"])


def eager(x, w1, w2, b1=None, b2=None, *, gated):
    """As transformers writes it, every operation in the dtype of its input."""
    h = F.linear(x, w1, b1)
    if gated:
        gate, up = h.chunk(2, -1)
        return F.linear(F.silu(gate) * up, w2, b2)
    return F.linear(ACTIVATIONS["quick_gelu"](h), w2, b2)


def make(device, gated, *lead, dtype=torch.float32, bias=True, hidden=HIDDEN, inner=INNER, out=OUT):
    """x, both weights and both biases, and dy; values as a trained model's, so that nothing overflows in fp16."""
    width = (1 + gated) * inner
    inputs = [
        torch.randn(*lead, hidden), torch.randn(width, hidden) * hidden**-0.5, torch.randn(out, inner) * inner**-0.5,
        torch.randn(width) if bias else None, torch.randn(out) if bias else None,
    ]  # fmt: skip
    inputs = [None if t is None else t.to(device, dtype) for t in inputs]
    return inputs, torch.randn(*lead, out).to(device, dtype)


def run(op, inputs, dy):
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in inputs]
    y = op(*leaves)
    return [y, *torch.autograd.grad(y, [t for t in leaves if t is not None], dy)]


@each_mode
@each_unit
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
def test_output_and_every_gradient(device, poison, dtype, bias, gated, mode):
    lead = (2, 131) if mode == "tiles" else (3, 7)  # tiles of 128, 128 and 6 tokens
    inputs, dy = make(device, gated, *lead, dtype=dtype, bias=bias)
    op, reference = unit(gated, **MODES[mode])
    actual, allowed = run(op, inputs, dy), run(functools.partial(eager, gated=gated), inputs, dy)
    exact = run(reference, [None if t is None else t.double() for t in inputs], dy.double())
    names = ["y", "dx", "dw1", "dw2", "db1", "db2"]
    for name, a, b, c in zip(names, actual, allowed, exact, strict=False):
        assert a.dtype == dtype
        if dtype == torch.float64:
            torch.testing.assert_close(a, c, **ALMOST_FP64, msg=lambda m, name=name: f"{name}: {m}")
        else:
            slack = FP32_SLACK if dtype == torch.float32 else 1.0
            assert_as_exact(a, c + slack * (b.double() - c), c, name, terms=dy[..., 0].numel())


@each_unit
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck(device, gated, activation):
    inputs, _ = make(device, gated, 3, dtype=torch.float64, hidden=2, inner=3, out=2)
    leaves = [t.requires_grad_() for t in inputs]
    for options in MODES.values():
        op, reference = unit(gated, activation=activation, **options)
        assert torch.autograd.gradcheck(op, leaves, fast_mode=True)
        torch.testing.assert_close(op(*leaves), reference(*leaves), **ALMOST_FP64)


@each_mode
@each_unit
def test_behind_a_norm(device, poison, gated, mode):
    """x is made again: the same bits as of an x that is kept. Of nothing that others see is a bit changed."""
    inputs, dy = make(device, gated, 2, 70)
    x, residual, weight = torch.randn(2, 70, 6, device=device), torch.randn(2, 70, 6, device=device), inputs[0][0, 0]
    op, _ = unit(gated, **MODES[mode])

    def block(forgets, x, residual, weight, *parameters):
        y, total = add_rms_norm(x, residual, weight)
        return op(y.view_as(y) if forgets else y, *parameters) + (total.mean(-1, keepdim=True))

    tensors = [x, residual, weight, *inputs[1:]]
    before = [t.clone() for t in (*tensors, dy)]
    for a, b in zip(*(run(functools.partial(block, forgets), tensors, dy) for forgets in (True, False)), strict=True):
        assert torch.equal(a, b)
    for a, b in zip((*tensors, dy), before, strict=True):
        assert torch.equal(a, b)


def kept_by(op, *inputs):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = op(*inputs)
    return y, saved


@each_unit
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("mode", ["kept", "one tile"])
def test_what_is_kept(device, gated, normed, mode):
    """Of the activations: x, or what the norm keeps anyway; and z, unless it is made again. Never h."""
    (x, *parameters), _ = make(device, gated, 3, 7)
    x, norm, *parameters = (t.requires_grad_() for t in (x, torch.randn(HIDDEN, device=device), *parameters))
    residual = torch.randn(3, 7, HIDDEN, device=device)
    op, _ = unit(gated, **MODES[mode])
    y, total = add_rms_norm(x, residual, norm) if normed else (x, x)
    _, saved = kept_by(op, y, *parameters)
    known = {t.data_ptr() for t in (*parameters, norm)}
    assert known >= {t.data_ptr() for t in saved if t.dim() == 1}
    activations = [t for t in saved if t.data_ptr() not in known]
    assert sum(t.data_ptr() == total.data_ptr() for t in activations) == 1
    others = [tuple(t.shape) for t in activations if t.data_ptr() != total.data_ptr()]
    assert others == ([(3, 7, (1 + gated) * INNER)] if mode == "kept" else [])


class Products(TorchDispatchMode):
    """Counts matrix products, and keeps the bytes of the largest tensor that is made."""

    def __init__(self):
        super().__init__()
        self.count = self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.nbytes)
        return result


TRAINED = {
    (0,): (2, ["z"]), (1,): (2, ["x", "z"]), (2,): (1, ["z"]), (3,): (1, ["z"]), (4,): (0, []), (0, 4): (2, ["z"]),
    (0, 2): (3, ["z"]), (1, 2): (3, ["x", "z"]), (0, 1): (3, ["x", "z"]), (3, 4): (1, ["z"]),
    (0, 1, 2, 3, 4): (4, ["x", "z"]),
}  # fmt: skip
"""By which of x, w1, w2, b1, b2 are trained: the products of the backward, and what is kept beside parameters."""


@each_mode
@each_unit
@pytest.mark.parametrize("trained", TRAINED, ids=str)
def test_what_is_frozen_costs_nothing(device, poison, gated, mode, trained):
    inputs, dy = make(device, gated, 130)
    whole = run(unit(gated, **MODES[mode])[0], inputs, dy)
    inputs = [t.requires_grad_(i in trained) for i, t in enumerate(inputs)]
    y, saved = kept_by(unit(gated, **MODES[mode])[0], *inputs)
    with Products() as backward:
        grads = torch.autograd.grad(y, [inputs[i] for i in trained], dy)
    for i, grad in zip(trained, grads, strict=True):
        torch.testing.assert_close(grad, whole[1 + i], **FP32_SUMS)
    products, kept = TRAINED[trained]
    if mode != "kept":
        products, kept = (products + 1 if kept else 0), (["x"] if kept else [])
    assert backward.count == products * (2 if mode == "tiles" else 1)
    kinds = {(130, HIDDEN): "x", (130, (1 + gated) * INNER): "z"}
    assert sorted(kinds[tuple(t.shape)] for t in saved if tuple(t.shape) in kinds) == kept


def test_tiles_bound_what_exists_at_once(device):
    """With recompute no tensor of all tokens is as wide as z or h, forward or backward."""
    tokens, inner = 768, 100
    inputs, dy = make(device, True, tokens, inner=inner)
    leaves = [t.requires_grad_() for t in inputs]
    workspace = 256 * 2 * inner * 4
    with Products() as seen:
        torch.autograd.grad(gated_mlp(*leaves, recompute=True, workspace_bytes=workspace), leaves, dy)
    assert seen.largest == workspace
    assert seen.count == 3 * (2 + 5)


@each_mode
def test_tiles_are_deterministic_and_equal(device, poison, mode):
    """Sums in another order: of fp32 rounding apart; and the same bits each time."""
    inputs, dy = make(device, True, 130)
    expected, first, second = (
        run(functools.partial(gated_mlp, **options), inputs, dy) for options in ({}, MODES[mode], MODES[mode])
    )
    for a, b, c in zip(expected, first, second, strict=True):
        torch.testing.assert_close(b, a, **FP32_SUMS)
        assert torch.equal(b, c)


@pytest.mark.parametrize("workspace", [1, 150 * 160 - 1, 150 * 160, 10**9])
def test_one_tile_where_it_fits_twice(device, workspace):
    inputs, _ = make(device, True, 300, bias=False)
    with Products() as forward:
        gated_mlp(*inputs, recompute=True, workspace_bytes=workspace)
    assert forward.count == 2 * (3 if workspace < 150 * 160 else 1)  # rows of z take 160 bytes


@each_unit
@pytest.mark.parametrize("mode", ["kept", "one tile"])
@pytest.mark.parametrize("early_stop", [True, False])
def test_checkpointed(device, poison, gated, mode, early_stop):
    """The second run ends with what the unit keeps, of which the down product is not, unless it is told to go on."""
    inputs, dy = make(device, gated, 2, 9)
    inputs.append(torch.randn(HIDDEN, HIDDEN, device=device))
    op, _ = unit(gated, **MODES[mode])

    def block(x, *parameters):
        return op(F.linear(x, parameters[-1]), *parameters[:-1])

    expected = run(block, inputs, dy)
    leaves = [t.clone().requires_grad_() for t in inputs]
    with Products() as forward, set_checkpoint_early_stop(early_stop):
        y = checkpoint(block, *leaves, use_reentrant=False)
    with Products() as backward:
        grads = torch.autograd.grad(y, leaves, dy)
    for a, b in zip([y, *grads], expected, strict=True):
        assert torch.equal(a, b)
    # Each of the three layers has two products in the backward. To them, again: the first layer and, once, z.
    again = 2 if early_stop else 3 + (mode != "kept")
    assert (forward.count, backward.count) == (3, 6 + again)


@each_mode
def test_runs_twice(device, poison, mode):
    """As long as the graph is retained, nothing that is kept changes; the last run writes over z, and none follows."""
    inputs, dy = make(device, True, 2, 70)
    leaves = [t.requires_grad_() for t in inputs]
    before = [t.detach().clone() for t in (*leaves, dy)]
    y, saved = kept_by(unit(True, **MODES[mode])[0], *leaves)
    copies, value = [t.detach().clone() for t in saved], y.detach().clone()
    first, second = (torch.autograd.grad(y, leaves, dy, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(saved, copies, strict=True))
    last = torch.autograd.grad(y, leaves, dy)
    for a, b, c in zip(first, second, last, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
    for a, b in zip((*leaves, dy, y), (*before, value), strict=True):
        assert torch.equal(a, b)
    changed = [tuple(a.shape) for a, b in zip(saved, copies, strict=True) if not torch.equal(a, b)]
    assert changed == ([(2, 70, 2 * INNER)] if mode == "kept" else [])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, leaves, dy)


def test_double_backward_raises(device):
    inputs, _ = make(device, True, 3)
    x = inputs[0].requires_grad_()
    (grad,) = torch.autograd.grad(gated_mlp(*inputs).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        grad.sum().backward()


@each_mode
def test_adds_to_the_gradient_in_place(device, poison, monkeypatch, mode):
    """Of weights that ask for it; several micro-batches give their sum, and autograd is given nothing to add."""
    inputs, dy = make(device, True, 130)
    x, *parameters = inputs
    parameters = [nn.Parameter(t) for t in parameters]
    for weight in parameters[:2]:
        setattr(weight, MARK, True)
    expected = run(gated_mlp, inputs, dy)[2:]
    given: list = []
    owner, name = (module, "accumulate_grad") if mode == "tiles" else (linear, "weight_gradient")
    real = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args: given.append(real(*args)) or given[-1])
    for _ in range(2):
        gated_mlp(x, *parameters, **MODES[mode]).backward(dy)
    assert given == [None] * 4
    for t, grad in zip(parameters, expected, strict=True):
        torch.testing.assert_close(t.grad, 2 * grad, **FP32_SUMS)


LAYOUTS = {
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "part of wider rows": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "expanded rows": lambda t: t[:1, :1].expand_as(t),
    "one expanded number": lambda t: t[0, 0, 0].expand_as(t),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@each_mode
def test_layouts(device, poison, mode, layout):
    inputs, dy = make(device, True, 3, 50)
    lay, op = LAYOUTS[layout], functools.partial(gated_mlp, **MODES[mode])
    inputs = [lay(t) if t.dim() == 3 else lay(t[None].expand(2, -1, -1))[0] if t.dim() == 2 else t for t in inputs]
    leaves = [t.detach().requires_grad_() for t in inputs]
    y = op(*leaves)
    expected = run(op, [t.contiguous() for t in inputs], lay(dy).contiguous())
    for a, b in zip([y, *torch.autograd.grad(y, leaves, lay(dy))], expected, strict=True):
        torch.testing.assert_close(a, b)  # a GEMM on other strides may add in another order


@each_mode
@each_unit
def test_few_rows(device, poison, gated, mode):
    op, reference = unit(gated, **MODES[mode])
    for lead in ((), (1,), (0,), (2, 0)):
        inputs, dy = make(device, gated, *lead, dtype=torch.float64)
        for a, b in zip(run(op, inputs, dy), run(reference, inputs, dy), strict=True):
            torch.testing.assert_close(a, b, **ALMOST_FP64)


@each_mode
@pytest.mark.parametrize("triton_path", [True, False])
def test_under_autocast(device, monkeypatch, mode, triton_path):
    """Weights stay fp32; results and gradients are of the dtypes that F.linear gives, whatever x's is."""
    if not triton_path:
        monkeypatch.setattr(module, "use_triton", lambda x: False)
    inputs, dy = make(device, True, 130 if mode == "tiles" else 9)

    def under_autocast(op, *inputs):
        with torch.autocast(device, dtype=torch.float16):
            return op(*inputs)

    for dtype in (torch.float32, torch.float16):
        inputs[0] = inputs[0].to(dtype)
        actual, expected = (
            run(functools.partial(under_autocast, op), inputs, dy.half())
            for op in (functools.partial(gated_mlp, **MODES[mode]), gated_mlp_reference)
        )
        exact = run(gated_mlp_reference, [t.double() for t in inputs], dy.double())
        for a, b, c in zip(actual, expected, exact, strict=True):
            assert a.dtype == b.dtype
            # Half precision GEMMs of at most 130 terms, on inputs rounded to half: some ulp of the largest sums.
            torch.testing.assert_close(a.double(), c, rtol=1e-2, atol=1e-2 * c.abs().max().item())


@each_unit
def test_reference_path_makes_z_again(monkeypatch, gated):
    monkeypatch.setattr(module, "use_triton", lambda x: False)
    inputs, dy = make("cpu", gated, 3, 7)
    leaves = [t.requires_grad_() for t in inputs]
    results = []
    for recompute in (True, False):
        y, saved = kept_by(unit(gated, recompute=recompute)[0], *leaves)
        results.append([y, *torch.autograd.grad(y, leaves, dy)])
        assert any(t.shape[-1] == INNER for t in saved if t.dim() == 3) is not recompute
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    with torch.no_grad():
        assert torch.equal(gated_mlp(*leaves, recompute=True) if gated else y, y)


def plain_unit(x, up, packed, activation, *, dtype=None):
    gate, up = x.chunk(2, -1) if packed else (x, 1.0)
    return (ACTIVATIONS[activation](gate) * up).to(dtype or x.dtype)


def plain_unit_backward(dh, x, up, packed, activation, *, need_x, need_up, emit, over):
    """What the kernel does to x = [gate | up], in PyTorch, for silu."""
    (gate, up), slope = x.chunk(2, -1), torch.sigmoid(x.chunk(2, -1)[0])
    dx = torch.cat([dh * up * slope * (1 + gate * (1 - slope)), dh * gate * slope], -1)
    dh.copy_((gate * slope * up).view(dh.shape) if emit else dh)
    assert not (over and torch.compiler.is_compiling())  # a kernel that is given one tensor twice is not safe there
    return (x.copy_(dx) if over else dx), None


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("triton_path", [True, False])
def test_compiles_whole(monkeypatch, triton_path, recompute):
    """The Function, with PyTorch in place of its kernels, and the reference."""
    monkeypatch.setattr(module, "use_triton", lambda x: triton_path)
    for owner in (module, kernels):
        monkeypatch.setattr(owner, "glu_forward", plain_unit)
    monkeypatch.setattr(kernels, "unit_backward", plain_unit_backward)
    inputs, dy = make("cpu", True, 3, 7)
    op = functools.partial(gated_mlp, recompute=recompute)
    assert_compiles(op, [t.requires_grad_() for t in inputs], [dy], backend="aot_eager")


@each_unit
def test_bad_inputs(device, gated):
    op, _ = unit(gated)
    (x, w1, w2, b1, b2), _ = make(device, gated, 3)
    first, second = ("gate_up_", "down_") if gated else ("fc1_", "fc2_")
    for message, call in {
        "activation='relu'; supported are 'silu'": lambda: op(x, w1, w2, activation="relu"),
        r"x has shape \(3, 6\) and dtype torch.int64": lambda: op(x.long(), w1, w2),
        rf"{first}weight .* does not take x \(3, 6\).*expected \[N, 6\]": lambda: op(x, w1[:, :5], w2),
        rf"{first}bias \(3,\)": lambda: op(x, w1, w2, b1[:3]),
        rf"{first}weight torch.float64": lambda: op(x, w1.double(), w2),
        rf"{second}weight \(5, 19\).*expected \[N, 20\]": lambda: op(x, w1, w2[:, :19]),
        rf"{second}bias \(2,\)": lambda: op(x, w1, w2, b1, b2[:2]),
        rf"{second}weight torch.float64": lambda: op(x, w1, w2.double()),
        rf"{second}weight .*on meta": lambda: op(x, w1, w2.to("meta")),
        rf"{first}weight has 0 rows": lambda: op(x, w1[:0], w2),
        "workspace_bytes is 0; expected .* positive": lambda: op(x, w1, w2, workspace_bytes=0),
    }.items():
        with pytest.raises(InputError, match=message):
            call()
    if gated:
        with pytest.raises(InputError, match=r"gate_up_weight has 39 rows.*even number of rows, \[gate \| up\]"):
            gated_mlp(x, w1[:39], w2)


# Gate and up as two weights.

LAID = {"joint": lay_together, "apart": lambda parameters: None}
BIASES = {"none": None, "both": (True, True), "up": (False, True)}
NAMES = ["x", "gate", "up", "down", "gate_bias", "up_bias", "down_bias"]
each_laid = pytest.mark.parametrize("laid", LAID)


def two_weights(device, laid, *lead, dtype=torch.float32, bias="both", **sizes):
    """The tensors of a call by name, and dy; and what `make` has packed, as leaves of their own."""
    inputs, dy = make(device, True, *lead, dtype=dtype, **sizes)
    x, w1, w2, b1, b2 = inputs
    there = BIASES[bias] or (False, False)
    tensors = [x, *w1.chunk(2), w2, *(b if t else None for b, t in zip(b1.chunk(2), there, strict=True)), b2]
    leaves = {n: None if t is None else nn.Parameter(t.clone()) for n, t in zip(NAMES, tensors, strict=True)}
    leaves["x"] = x.clone().requires_grad_()
    LAID[laid]([leaves["gate"], leaves["up"]])
    if bias == "both":
        LAID[laid]([leaves["gate_bias"], leaves["up_bias"]])
    assert (joint([leaves["gate"], leaves["up"]]) is not None) == (laid == "joint")
    return leaves, dy


def call_of_two(op, t, **options):
    biases = None if t["gate_bias"] is None and t["up_bias"] is None else (t["gate_bias"], t["up_bias"])
    return op(t["x"], (t["gate"], t["up"]), t["down"], biases, t["down_bias"], **options)


def run_two(op, t, dy, **options):
    y = call_of_two(op, t, **options)
    trained = {n: leaf for n, leaf in t.items() if leaf is not None and leaf.requires_grad}
    return {"y": y.detach()} | dict(zip(trained, torch.autograd.grad(y, list(trained.values()), dy), strict=True))


def eager_two(x, weights, down, biases, down_bias):
    h = [F.linear(x, w, b) for w, b in zip(weights, biases or (None, None), strict=True)]
    return F.linear(F.silu(h[0]) * h[1], down, down_bias)


@each_mode
@each_laid
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
def test_two_weights(device, poison, dtype, bias, laid, mode):
    lead = (2, 131) if mode == "tiles" else (6, 17)
    t, dy = two_weights(device, laid, *lead, dtype=dtype, bias=bias)
    actual, allowed = run_two(gated_mlp, t, dy, **MODES[mode]), run_two(eager_two, t, dy)
    wide = {n: None if leaf is None else leaf.detach().double().requires_grad_() for n, leaf in t.items()}
    exact = run_two(gated_mlp_reference, wide, dy.double())
    for name, c in exact.items():
        a, b = actual[name], allowed[name]
        assert a.dtype == dtype
        if dtype == torch.float64:
            torch.testing.assert_close(a, c, **ALMOST_FP64, msg=lambda m, name=name: f"{name}: {m}")
        else:
            slack = FP32_SLACK if dtype == torch.float32 else 1.0
            assert_as_exact(a, c + slack * (b.double() - c), c, name, terms=dy[..., 0].numel())


@each_laid
def test_two_weights_of_few_rows(device, laid):
    for lead in ((), (1,), (0,), (2, 0)):
        t, dy = two_weights(device, laid, *lead, dtype=torch.float64)
        for options in MODES.values():
            actual, expected = run_two(gated_mlp, t, dy, **options), run_two(gated_mlp_reference, t, dy)
            for name, value in expected.items():
                torch.testing.assert_close(actual[name], value, **ALMOST_FP64)


@each_laid
def test_two_weights_gradcheck(device, laid):
    t, _ = two_weights(device, laid, 3, dtype=torch.float64, hidden=2, inner=3, out=2)
    for options in MODES.values():
        op = lambda *leaves, o=options: call_of_two(gated_mlp, dict(zip(NAMES, leaves, strict=True)), **o)  # noqa: E731
        assert torch.autograd.gradcheck(op, list(t.values()), fast_mode=True)


FROZEN = [("gate",), ("up",), ("down",), ("x",), ("gate", "up"), ("x", "up"), ("gate_bias",), ("up_bias", "gate"),
          ("x", "gate", "up", "down")]  # fmt: skip


@each_mode
@each_laid
@pytest.mark.parametrize("trained", FROZEN, ids="+".join)
def test_two_weights_frozen(device, poison, laid, mode, trained):
    """A product for z and for dx where they are joint, two where not; one for the gradients of both, or of one."""
    t, dy = two_weights(device, laid, 130)
    whole = run_two(gated_mlp, t, dy, **MODES[mode])
    for name, leaf in t.items():
        leaf.requires_grad_(name in trained)
    with Products() as forward:
        y = call_of_two(gated_mlp, t, **MODES[mode])
    with Products() as backward:
        grads = torch.autograd.grad(y, [t[n] for n in trained], dy)
    for name, grad in zip(trained, grads, strict=True):
        torch.testing.assert_close(grad, whole[name], **FP32_SUMS)
    each = 1 if laid == "joint" else 2
    need_z = any(n != "down" for n in trained)
    count = need_z + ("down" in trained) + each * ("x" in trained) + ("gate" in trained or "up" in trained)
    again = each if mode != "kept" else 0
    tiles = 2 if mode == "tiles" else 1
    assert forward.count == (each + 1) * tiles
    assert backward.count == (count + again) * tiles


@each_mode
@each_laid
def test_two_weights_behind_a_norm(device, poison, laid, mode):
    """x is made again: the same bits as of an x that is kept."""
    t, dy = two_weights(device, laid, 2, 70)
    residual, norm = torch.randn(2, 70, HIDDEN, device=device), torch.randn(HIDDEN, device=device)

    def block(forgets, x, *rest, **options):
        y, total = add_rms_norm(x, residual, norm)
        return gated_mlp(y.view_as(y) if forgets else y, *rest, **options) + total.mean(-1, keepdim=True)

    kept, made = (run_two(functools.partial(block, forgets), t, dy, **MODES[mode]) for forgets in (True, False))
    assert all(torch.equal(kept[name], made[name]) for name in kept)


@each_mode
@each_laid
@pytest.mark.parametrize("some", [("gate", "up"), ("up",)], ids="+".join)
def test_two_weights_add_in_place(device, poison, laid, mode, some):
    t, dy = two_weights(device, laid, 130)
    expected = run_two(gated_mlp, t, dy)
    for name in ("gate", "up", "down"):
        t[name].requires_grad_(name in some)
        setattr(t[name], MARK, True)
    memory: list = []
    for times in (1, 2, 3):
        call_of_two(gated_mlp, t, **MODES[mode]).backward(dy)
        for name in some:
            torch.testing.assert_close(t[name].grad, times * expected[name], **FP32_SUMS)
        memory.append([t[name].grad.data_ptr() for name in some])
    assert memory[0] == memory[1] == memory[2]
    assert len(some) == 1 or joint([t["gate"].grad, t["up"].grad]) is not None


@each_mode
@each_laid
def test_two_weights_run_twice_and_checkpointed(device, poison, laid, mode):
    t, dy = two_weights(device, laid, 2, 70)
    y = call_of_two(gated_mlp, t, **MODES[mode])
    leaves = list(t.values())
    first, second = (torch.autograd.grad(y, leaves, dy, retain_graph=True) for _ in range(2))
    again = checkpoint(call_of_two, gated_mlp, t, use_reentrant=False, **MODES[mode])
    third = torch.autograd.grad(again, leaves, dy)
    for a, b, c in zip(first, second, third, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_two_weights_that_move_before_the_backward(device):
    """As FSDP moves them: the memory in which they were one is gone."""
    for options in MODES.values():
        t, dy = two_weights(device, "joint", 130)
        expected = run_two(gated_mlp, t, dy, **options)["x"]
        y, old = call_of_two(gated_mlp, t, **options), joint([t["gate"], t["up"]]).data
        for name in ("gate", "up"):
            t[name].data = t[name].data.clone()
        old.fill_(torch.nan)
        torch.testing.assert_close(torch.autograd.grad(y, t["x"], dy)[0], expected, **FP32_SUMS)


@each_laid
@pytest.mark.parametrize("mode", ["kept", "one tile"])
@pytest.mark.parametrize("triton_path", [True, False])
def test_two_weights_compile_whole(monkeypatch, triton_path, mode, laid):
    monkeypatch.setattr(module, "use_triton", lambda x: triton_path)
    for owner in (module, kernels):
        monkeypatch.setattr(owner, "glu_forward", plain_unit)
    monkeypatch.setattr(kernels, "unit_backward", plain_unit_backward)
    t, dy = two_weights("cpu", laid, 3, 7)
    op = lambda *leaves: call_of_two(gated_mlp, dict(zip(NAMES, leaves, strict=True)), **MODES[mode])  # noqa: E731
    assert_compiles(op, list(t.values()), [dy], backend="aot_eager")


def test_two_weights_under_autocast(device):
    t, dy = two_weights(device, "joint", 9)

    def under_autocast(op, *args, **options):
        with torch.autocast(device, dtype=torch.float16):
            return op(*args, **options)

    actual, expected = (
        run_two(functools.partial(under_autocast, op), t, dy.half()) for op in (gated_mlp, gated_mlp_reference)
    )
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype
        # Half precision products of at most 20 terms: some ulp of the largest sums.
        torch.testing.assert_close(actual[name], value, rtol=1e-2, atol=1e-2 * value.abs().max().item())


def test_two_weights_that_do_not_fit(device):
    t, _ = two_weights(device, "apart", 3)
    x, gate, up, down, gate_bias, up_bias = (t[n] for n in NAMES[:6])
    for message, call in {
        r"\[\(20, 6\), \(19, 6\)\]": lambda: gated_mlp(x, (gate, up[:19]), down),
        r"\[\(20, 6\)\]": lambda: gated_mlp(x, (gate,), down),
        r"up_weight \(20, 5\).*expected \[N, 6\]": lambda: gated_mlp(x, (gate, up[:, :5]), down),
        r"gate_bias \(3,\)": lambda: gated_mlp(x, (gate, up), down, (gate_bias[:3], up_bias)),
        r"gate_up_bias \(20,\)": lambda: gated_mlp(x, (gate, up), down, gate_bias),
        r"gate_up_bias \[\(20,\)\]": lambda: gated_mlp(x, (gate, up), down, (gate_bias,)),
        r"gate_up_bias \[\(20,\), None\]": lambda: gated_mlp(x, gate, down, (gate_bias, None)),
        "up_weight torch.float64": lambda: gated_mlp(x, (gate, up.double()), down),
        r"down_weight .*expected \[N, 20\]": lambda: gated_mlp(x, (gate, up), down[:, :19]),
    }.items():
        with pytest.raises(InputError, match=message):
            call()


def on_gpu(gated, tokens, *, dtype=torch.bfloat16, hidden=512, inner=1536):
    inputs, dy = make("cuda", gated, tokens, dtype=dtype, hidden=hidden, inner=inner, out=hidden)
    return [t.requires_grad_() for t in inputs], dy


GPU_MODES = {**MODES, "tiles": {"recompute": True, "workspace_bytes": 2**20}}


@pytest.mark.gpu
@each_unit
@pytest.mark.parametrize("mode", GPU_MODES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_triton_path_compiles_whole(gated, mode, dynamic):
    inputs, dy = on_gpu(gated, 70, dtype=torch.float32)
    assert_compiles(unit(gated, **GPU_MODES[mode])[0], inputs, [dy], dynamic=dynamic)


@pytest.mark.gpu
@each_unit
@pytest.mark.parametrize("mode", GPU_MODES)
@pytest.mark.parametrize("check", [assert_captures, assert_never_waits])
def test_captured_and_never_waits(check, mode, gated):
    inputs, dy = on_gpu(gated, 900)
    check(unit(gated, **GPU_MODES[mode])[0], inputs, [dy])


@pytest.mark.gpu
@each_laid
@pytest.mark.parametrize("mode", GPU_MODES)
def test_two_weights_on_a_gpu(mode, laid):
    t, dy = two_weights("cuda", laid, 900, dtype=torch.bfloat16, hidden=512, inner=1536, out=512)
    op = lambda *leaves: call_of_two(gated_mlp, dict(zip(NAMES, leaves, strict=True)), **GPU_MODES[mode])  # noqa: E731
    assert_captures(op, list(t.values()), [dy])
    assert_never_waits(op, list(t.values()), [dy])
    if laid == "apart":  # compiled they always are; one product in the place of two may add in another order
        t, dy = two_weights("cuda", laid, 70, hidden=512, inner=1536, out=512)
        assert_compiles(op, list(t.values()), [dy])


@pytest.mark.gpu
def test_peak_memory():
    """kept: z, dh, and no second z; tiles: neither z nor h of all tokens, and the sums of one weight are rounded behind
    those of the other. Without biases, for whose gradients torch.sum takes 128 MiB of its own."""
    tokens, hidden, inner = 8192, 1024, 8192
    sizes = dict(dtype=torch.bfloat16, bias=False, hidden=hidden, inner=inner, out=hidden)
    (x, w1, w2, *_), dy = make("cuda", True, tokens, **sizes)
    inputs = [t.requires_grad_() for t in (x, w1, w2)]
    z, y, dx = tokens * 2 * inner * 2, dy.nbytes, x.nbytes
    # The most is there while h, in the place of dh and half of z, becomes a part of the second weight's gradient. The
    # first weight's gradient and dx come later; of several tiles both are begun, and the weights' sums are in fp32.
    for options, most in (
        ({}, y + z + z // 2 + w2.nbytes),
        ({"recompute": True, "workspace_bytes": z // 8}, y + dx + z // 8 + z // 16 + 2 * (w1.nbytes + w2.nbytes)),
    ):
        op = functools.partial(gated_mlp, **options)
        for _ in range(2):  # the first compiles, and makes the workspace of cuBLAS
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            grads = torch.autograd.grad(op(*inputs), inputs, dy)
            peak = torch.cuda.max_memory_allocated() - before
            del grads
        assert peak <= most + 2**23  # the allocator may give each of these up to 1 MiB more, six at most
