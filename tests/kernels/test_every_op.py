"""Tests of every op in the table of `ops`: exactness, autograd, autocast, compilation, CUDA graphs.

On a GPU over up to 240 shapes per op; interpreted over a few, without bf16, which the interpreter truncates. Without a
GPU what a CPU user runs is judged as well: PyTorch in place of the kernels.
"""

import contextlib
import dataclasses
import functools
import itertools
import random

import pytest
import torch
from torch import Tensor

from ligermodels.errors import InputError
from tests.kernels.cases import LAYOUTS, Case, Maker, drawn, pairwise
from tests.kernels.interpreter import CHUNK
from tests.kernels.judge import (
    DTYPES,
    ON_GPU,
    as_dtype,
    assert_equal_but_for_rounding,
    failures,
    inputs_stay,
    judge,
    judge_again,
    leaves_of,
    outputs_of,
    run,
)
from tests.kernels.on_gpu import assert_captures, assert_compiles, assert_never_waits, large
from tests.kernels.ops import OPS, complete, medium, public_ops
from tests.kernels.seen import adding_in_place

BLOCKS, PARTS = 8, 6
each_op = pytest.mark.parametrize("name", OPS)
each_on_a_cpu = pytest.mark.parametrize(
    "name",
    [name for name in OPS if not name.startswith(("flash_attention", "unfused_attention"))],  # which are kernels alone
)


def some_in_turn(count: int) -> list:
    """0 to count - 1, of which all but the first are slow when interpreted."""
    return [pytest.param(i, marks=[pytest.mark.slow] * (i > 0 and not ON_GPU)) for i in range(count)]


@pytest.fixture(autouse=True)
def sums_of_matmuls():
    """cuBLAS may not add the parts of a sum in half precision: which sums it splits is its choice, for either side."""
    if not ON_GPU:
        yield
        return
    settings = torch.backends.cuda.matmul
    names = [f"allow_{kind}_reduced_precision_reduction" for kind in ("bf16", "fp16")]
    before = [getattr(settings, name) for name in names]
    for name in names:
        setattr(settings, name, False)
    yield
    for name, value in zip(names, before, strict=True):
        setattr(settings, name, value)


# As exact as eager.


def test_the_table_is_complete():
    """Every public op has an entry."""
    assert public_ops() <= {getattr(op.call, "__name__", "") for op in OPS.values()}


@each_op
@pytest.mark.parametrize("block", some_in_turn(BLOCKS))
def test_as_exact_as_eager(device, poison, name, block):
    with failures() as failed:
        for variant, seed, chosen, rows, dtype in drawn(name, OPS[name], interpreted=not ON_GPU):
            if variant % BLOCKS == block:
                with failed(f"{name} {dtype} rows={rows} {chosen} seed={seed}"):
                    make = functools.partial(OPS[name].make, rows=rows, **chosen)
                    judge_again(name, make, seed, dtype, device)


@pytest.mark.skipif(ON_GPU, reason="judges what a CPU runs")
@each_on_a_cpu
def test_as_exact_as_eager_without_kernels(without_triton, name):
    dtypes = torch.bfloat16, torch.float16, torch.float32
    with failures() as failed:
        for variant, seed, chosen, rows, _ in drawn(name, OPS[name], interpreted=True):
            dtype = dtypes[variant % 3]
            if dtype in OPS[name].dtypes:
                with failed(f"{name} {dtype} rows={rows} {chosen} seed={seed}"):
                    make = functools.partial(OPS[name].make, rows=rows, **chosen)
                    judge_again(name, make, seed, dtype, "cpu")


@each_op
@pytest.mark.parametrize("part", some_in_turn(PARTS))
def test_adversarial_values(device, poison, name, part):
    op = OPS[name]
    cases = list(itertools.product([d for d in DTYPES if d in op.dtypes], op.edges.items()))
    with failures() as failed:
        for dtype, (what, make) in cases[part::PARTS]:
            with failed(f"{name} {dtype} {what}"):
                judge(name, make, 0, dtype, device, strided=False)


# The reference, in fp64.


def frozen(case: Case, draw: random.Random) -> Case:
    """The same, with some of the trained tensors frozen, or none."""
    trained = [n for n, t in case.tensors.items() if t.requires_grad]
    kept = trained if draw.random() < 0.5 else draw.sample(trained, draw.randint(0, len(trained)))
    return dataclasses.replace(case, tensors={n: t.detach().requires_grad_(n in kept) for n, t in case.tensors.items()})


def unused(upstream: dict[str, Tensor], draw: random.Random) -> dict[str, Tensor]:
    """The gradients of the outputs, in any layout; one of several is left out now and then."""
    given = {n: LAYOUTS[draw.choice(list(LAYOUTS))](g) if g.dim() else g for n, g in upstream.items()}
    if len(given) > 1 and draw.random() < 0.3:
        del given[draw.choice(list(given))]
    return given


@pytest.mark.skipif(ON_GPU, reason="no GPU multiplies tiles of fp64")
@each_op
def test_every_option(poison, name):
    """Pairs of options, shapes and layouts, of frozen inputs and unused outputs, against the reference in fp64."""
    judge_every_option(name)


@pytest.mark.skipif(ON_GPU, reason="judges what a CPU runs")
@each_on_a_cpu
def test_every_option_without_kernels(without_triton, name):
    """What the public function hands to the reference is what it was called with."""
    judge_every_option(name)


def judge_every_option(name: str) -> None:
    op = OPS[name]
    choices = op.distinct()
    for option, values in op.more.items():
        choices[option] = list(dict.fromkeys([*choices.get(option, []), *values]))
    cases = pairwise(choices | {"rows": list(op.few_rows)}, op.fits, name)
    with failures() as failed:
        for seed, chosen in enumerate(cases):
            with failed(f"{name} {chosen} seed={seed}"):
                torch.manual_seed(seed)
                draw = random.Random(seed)
                case = frozen(op.make(Maker(draw, torch.float64, "cpu"), **chosen), draw)
                upstream: dict[str, Tensor] = {}
                run(op.reference, case, upstream, torch.float64)
                upstream = unused(upstream, draw)
                expected = run(op.reference, case, upstream, torch.float64)
                with inputs_stay(case):
                    actual = run(op.call, case, upstream)
                assert_equal_but_for_rounding(actual, expected, torch.finfo(torch.float64).eps)


@each_op
@pytest.mark.parametrize("rows", [1, 5])
def test_every_layout(device, poison, name, rows):
    """Without gradients, as in decoding, each operand may have any strides, in a dtype that the kernels take."""
    op = OPS[name]
    dtype = torch.float32 if torch.float32 in op.dtypes else torch.float16
    with failures() as failed, torch.no_grad():
        for i, (layout, lay) in enumerate(list(LAYOUTS.items())[1:]):  # the first is contiguous
            torch.manual_seed(0)
            case = complete(name, Maker(random.Random(0), dtype, device), rows)
            # All operands, and single ones in turn.
            for laid_out in (list(case.tensors), *([n] for j, n in enumerate(case.tensors) if (i + j + rows) % 4 == 0)):
                tensors = {n: (lay(t) if n in laid_out and t.dim() else t).detach() for n, t in case.tensors.items()}
                with failed(f"{name} {layout} {laid_out}"):
                    changed = dataclasses.replace(case, tensors=tensors)
                    exact = run(op.reference, changed, {}, torch.float64)
                    assert_equal_but_for_rounding(run(op.call, changed, {}), exact, torch.finfo(dtype).eps)


@each_op
def test_the_reference_is_eagers_formula(name):
    op = OPS[name]
    for seed, chosen in enumerate(pairwise(op.distinct(), op.fits, name)):
        torch.manual_seed(seed)
        case = op.make(Maker(random.Random(seed), torch.float64, "cpu", strided=False), 64, **chosen)
        upstream: dict[str, Tensor] = {}
        expected = run(op.reference, case, upstream, torch.float64)
        assert_equal_but_for_rounding(run(op.eager, case, upstream), expected, torch.finfo(torch.float64).eps)


# How an op behaves under autograd.


@each_op
def test_runs_twice(device, poison, name):
    """A graph that is kept gives the same gradients again, overwrites nothing, and is not twice differentiable."""
    op, case = OPS[name], complete(name, Maker(random.Random(0), torch.float32, device))
    tensors, trained = as_half_if_need_be(name, case), [n for n, t in case.tensors.items() if t.requires_grad]
    if not trained:
        pytest.skip("no input has a gradient")
    leaves = [tensors[n] for n in trained]
    outputs = outputs_of(op.call, tensors, case.options)
    judged = [y for y in outputs.values() if y.requires_grad]
    upstream = [torch.randn_like(y) for y in judged]
    values = [t.detach().clone() for t in (*tensors.values(), *outputs.values(), *upstream)]
    first, second = (torch.autograd.grad(judged, leaves, upstream, retain_graph=True) for _ in range(2))
    for a, b in zip((*tensors.values(), *outputs.values(), *upstream), values, strict=True):
        assert torch.equal(a, b)
    again = [y for y in outputs_of(op.call, tensors, case.options).values() if y.requires_grad]
    third = torch.autograd.grad(again, leaves, upstream)
    for a, b, c in zip(first, second, third, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)  # the second may be made by another kernel
        assert torch.equal(a, c) or not op.ordered
    if name == "attention of torch":
        return
    again = [y for y in outputs_of(op.call, tensors, case.options).values() if y.requires_grad]
    with pytest.raises(InputError, match="has no second derivative"):
        torch.autograd.grad(again, leaves, upstream, create_graph=True)


@pytest.mark.parametrize("small", [False, True], ids=["", "in chunks"])
@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.matmuls or name == "embedding"])
def test_adds_to_the_gradient_in_place(device, poison, name, small):
    """Micro-batches add to the .grad of each weight; who asks for a gradient alone leaves .grad as it was."""
    op, chosen = OPS[name], {}
    if small and not (chosen := {n: v for n, v in {"tiles": True, "workspace_bytes": 1}.items() if n in op.choices}):
        pytest.skip("has no chunks")
    m = Maker(random.Random(0), torch.float32, device)
    complete(name, m)
    chosen = op.complete | chosen | ({"reduction": "mean"} if op.runs_once else {})
    case, upstream = op.make(m, CHUNK + 2, **chosen), {}
    if op.runs_once:
        upstream["output 0"] = torch.tensor(3.0, device=device)
    expected = run(op.reference, case, upstream, torch.float64)
    weights = [n for n, t in case.tensors.items() if t.requires_grad and not n.endswith(("x", "up", "weights"))]
    case.tensors |= zip(weights, adding_in_place(*(case.tensors[n] for n in weights)), strict=True)

    def outputs():
        found = outputs_of(op.call, case.tensors, case.options)
        return [found[n] for n in upstream]

    for times in (1, 2, 3):
        torch.autograd.backward(outputs(), list(upstream.values()))
        for n in weights:
            grad, wanted = case.tensors[n].grad, times * expected[f"d_{n}"]
            # fp32 sums of some hundred terms, in another order
            torch.testing.assert_close(grad.double(), wanted, rtol=1e-4, atol=1e-5 * wanted.abs().max().item())
    before = [case.tensors[n].grad.clone() for n in weights]
    torch.autograd.grad(outputs(), [case.tensors[n] for n in weights], list(upstream.values()))
    assert all(torch.equal(case.tensors[n].grad, grad) for n, grad in zip(weights, before, strict=True))


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.runs_once])
def test_runs_once(device, name):
    case = complete(name, Maker(random.Random(0), torch.float32, device))
    trained = [t for t in case.tensors.values() if t.requires_grad]
    loss = OPS[name].call(**case.tensors, **case.options | {"reduction": "mean"})
    torch.autograd.grad(loss, trained, retain_graph=True)
    with pytest.raises(RuntimeError, match="compute the loss again"):
        torch.autograd.grad(loss, trained)


def as_half_if_need_be(name: str, case: Case) -> dict[str, Tensor]:
    """The tensors of a case as leaves: in fp16 for what our kernels take in half precision alone."""
    half = torch.float32 not in OPS[name].dtypes and OPS[name].checks
    tensors = as_dtype({n: t.detach() for n, t in case.tensors.items()}, torch.float16) if half else case.tensors
    return {n: t.detach().requires_grad_(case.tensors[n].requires_grad) for n, t in tensors.items()}


@pytest.mark.parametrize("low", [False, True], ids=["fp32", "x in half"])
@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.matmuls])
def test_under_autocast(device, name, low):
    """Results and gradients have the dtypes that the reference has, which is F.linear and what follows it."""
    op, half = OPS[name], torch.bfloat16 if ON_GPU else torch.float16
    case, upstream = complete(name, Maker(random.Random(0), torch.float32, device), 9), {}
    case.options |= {"reduction": "mean"} if "reduction" in case.options else {}
    if low:
        case.tensors |= {
            n: t.detach().to(half).requires_grad_(t.requires_grad)
            for n, t in case.tensors.items()
            if n in ("x", "gate_up", "up", "student_x", "teacher_x")
        }
    exact = run(op.reference, case, upstream, torch.float64)

    def under_autocast(call):
        def within(**arguments):
            with torch.autocast(device, dtype=half):
                return call(**arguments)

        return within

    actual, expected = (run(under_autocast(call), case, upstream) for call in (op.call, op.reference))
    for what, value in actual.items():
        assert value.dtype == expected[what].dtype or what.startswith("output"), what
        scale = exact[what].abs().max().item()
        # Inputs, logits and what is between two matmuls are rounded to half precision, some of which cancel.
        torch.testing.assert_close(value.double(), exact[what], rtol=0, atol=16 * torch.finfo(half).eps * scale)


@each_op
def test_repeats_give_the_same_bits(device, name):
    op, upstream = OPS[name], {}
    for choice, dtype in enumerate([d for d in DTYPES if d in op.dtypes]):
        case = medium(name, Maker(random.Random(choice), dtype, device), choice)
        with torch.no_grad() if not op.ordered else contextlib.nullcontext():
            upstream.clear()
            first = run(op.call, case, upstream)
            for _ in range(19 if ON_GPU else 1):
                for what, value in run(op.call, case, upstream).items():
                    assert torch.equal(value, first[what]), f"{dtype} {what}: other bits"


# Of a GPU alone.


@large
@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.past_2_31 is not None])
def test_past_2_31_elements(name):
    """At the start, in the middle and at the end, rows come out as they do without the others."""
    op = OPS[name]
    torch.manual_seed(0)
    case = op.past_2_31(Maker(random.Random(0), torch.bfloat16, "cuda"))
    rows = next(iter(case.tensors.values())).shape[0]
    at = torch.tensor([*range(3), *range(rows // 2, rows // 2 + 3), *range(rows - 3, rows)], device="cuda")
    few = {n: (t.detach()[at] if t.shape[0] == rows else t.detach()) for n, t in case.tensors.items()}
    few = Case({n: t.requires_grad_(case.tensors[n].requires_grad) for n, t in few.items()}, case.options)
    upstream: dict[str, Tensor] = {}
    expected = run(op.call, few, upstream)
    whole = {}
    for output, g in upstream.items():
        whole[output] = g.new_zeros(rows, *g.shape[1:])  # other rows get no gradient, and give none to the weights
        whole[output][at] = g
    actual = run(op.call, case, whole)
    assert max(t.numel() for t in (*case.tensors.values(), *actual.values())) > 2**31
    for what, value in actual.items():
        value = value[at] if value.shape[0] == rows else value
        # Matmuls of other shapes may sum in another order, which moves a rounding to bf16 by an ulp.
        scale = expected[what].abs().max().item()
        torch.testing.assert_close(
            value, expected[what], rtol=2**-7, atol=2**-8 * scale, equal_nan=True, msg=lambda m, w=what: f"{w}: {m}"
        )


def positional(name: str, dtype: torch.dtype, device: str, choice: int = 0):
    """(op, inputs, grads) as `on_gpu` takes them."""
    case = medium(name, Maker(random.Random(choice), dtype, device), choice)
    names = list(case.tensors)
    upstream: dict[str, Tensor] = {}
    run(OPS[name].call, case, upstream)

    def op(*inputs):
        outputs = OPS[name].call(**dict(zip(names, inputs, strict=True)), **case.options)
        return tuple(y for y in outputs if y is not None) if isinstance(outputs, tuple) else outputs

    return op, list(leaves_of(case.tensors).values()), list(upstream.values())


@pytest.mark.gpu
@each_op
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_whole(name, dynamic):
    assert_compiles(*positional(name, torch.bfloat16, "cuda"), dynamic=dynamic)


@pytest.mark.gpu
@each_op
def test_captured_in_a_graph(name):
    for choice in range(2):
        assert_captures(*positional(name, torch.bfloat16, "cuda", choice), same_bits=OPS[name].ordered)


@pytest.mark.gpu
@each_op
def test_never_synchronises(name):
    for choice in range(2):
        assert_never_waits(*positional(name, torch.bfloat16, "cuda", choice))
