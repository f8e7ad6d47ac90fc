"""What holds for every op: one place to look. The table is in `ops.py`; what is special to an op is in its own file.

On a GPU over at least 200 shapes per op; interpreted over a few, without bf16, which the interpreter truncates.
"""

import contextlib
import dataclasses
import functools
import itertools
import random
import re
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ligermodels.errors import InputError
from tests.kernels.on_gpu import assert_captures, assert_compiles, assert_never_waits
from tests.kernels.ops import OPS, Case, Maker, complete, drawn, every, medium, public_ops
from tests.kernels.oracle import assert_as_exact

ON_GPU = torch.cuda.is_available()
BLOCKS = 8 if ON_GPU else 1
DRAWS, ENOUGH = (32, 256) if ON_GPU else (2, 8)
DTYPES = [torch.bfloat16, torch.float16, torch.float32] if ON_GPU else [torch.float16, torch.float32]
FP32_INTERPRETED = 4.0
"""Of eager's error in fp32 when interpreted: numpy's exp is good to 2 ulp where torch's is to a half, and sums one by
one where torch adds in parts, whose roundings grow less. A GPU is asked for 1.0, and half precision hides it."""
each_op = pytest.mark.parametrize("name", OPS)


@pytest.fixture(autouse=True)
def sums_of_products():
    """cuBLAS may not add the parts of a sum in half precision: which sums it splits is its choice, for either side."""
    if not ON_GPU:
        yield
        return
    settings, names = (
        torch.backends.cuda.matmul,
        [f"allow_{kind}_reduced_precision_reduction" for kind in ("bf16", "fp16")],
    )
    before = [getattr(settings, name) for name in names]
    for name in names:
        setattr(settings, name, False)
    yield
    for name, value in zip(names, before, strict=True):
        setattr(settings, name, value)


def as_dtype(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}


def leaves_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same memory, as new leaves."""
    return {name: t.detach().requires_grad_(t.requires_grad) for name, t in tensors.items()}


def run(call, case: Case, upstream: list[Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """All outputs, and the gradients of the tensors that require grad, by name.

    upstream: one gradient for each output that has one; filled with random numbers where it is empty. That of a loss is
    1 or, as where losses are weighed, no power of two.
    """
    tensors = {n: t.detach() if dtype is None else as_dtype({n: t.detach()}, dtype)[n] for n, t in case.tensors.items()}
    tensors = {n: t.requires_grad_(case.tensors[n].requires_grad) for n, t in tensors.items()}
    outputs = call(**tensors, **case.options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    results = {f"output {i}": y for i, y in enumerate(outputs) if y is not None}
    judged = [y for y in results.values() if y.requires_grad]
    trained = {name: t for name, t in tensors.items() if t.requires_grad}
    if not upstream:
        weight = 1.0 if torch.rand(()) < 0.5 else 0.37
        upstream += [torch.full_like(y, weight) if y.dim() == 0 else torch.randn_like(y) for y in judged]
    if judged:
        grads = [g.to(y.dtype) for g, y in zip(upstream, judged, strict=True)]
        found = torch.autograd.grad(judged, list(trained.values()), grads, allow_unused=True)
        results |= {
            f"d_{n}": torch.zeros_like(t) if g is None else g for (n, t), g in zip(trained.items(), found, strict=True)
        }
    return {name: t.detach() for name, t in results.items()}


def judge(
    name: str, make: Callable[[Maker], Case], seed: int, dtype: torch.dtype, device: str, *, strided: bool = True
) -> None:
    """The op is as exact as eager on this case, writes over none of its inputs, and has the dtypes of its inputs.

    A case of few numbers is drawn several times and judged as one: from a few errors no rms can be told.
    """
    draws = []
    torch.manual_seed(seed)
    for _ in range(DRAWS):
        case = make(Maker(random.Random(seed), dtype, device, strided=strided))
        draws.append(run_all(name, case))
        shared = {what: case.shared if t.dim() > 1 else 1 for what, t in draws[0][0].items()}
        if len(draws) * max(t.numel() for t in draws[0][0].values()) >= 2**21:
            break  # what is held of the draws before it is 80 bytes for each of these
        if all(t.numel() == 0 or t.numel() * len(draws) >= ENOUGH * shared[n] for n, t in draws[0][0].items()):
            break
    for what in draws[0][0]:
        actual, allowed, exact = (torch.stack([one[i][what] for one in draws]) for i in range(3))
        if exact.is_floating_point() and not actual.is_floating_point():
            actual, allowed = actual.float(), allowed.float()
        if actual.is_floating_point():
            assert_as_exact(actual, allowed, exact, what, shared=shared[what], terms=case.terms)
        else:
            assert torch.equal(actual, exact.to(actual.dtype)), f"{what}: other integers than the reference's"


def judge_again(name: str, make: Callable[[Maker], Case], seed: int, dtype: torch.dtype, device: str) -> None:
    """`judge`; what fails once is judged on two other draws, and must pass both: of the ten thousands of comparisons
    that the shapes make, eager is far luckier than it mostly is in some."""
    try:
        judge(name, make, seed, dtype, device)
    except AssertionError:
        for other in (1, 2):
            judge(name, make, seed + other * 10**6, dtype, device)


def run_all(name: str, case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """What the op gives, what eager gives, and the exact results."""
    op, upstream = OPS[name], []
    before = {n: (t._version, t.detach().clone()) for n, t in case.tensors.items()}
    actual = run(op.call, case, upstream)
    for n, (version, values) in before.items():
        t = case.tensors[n]
        assert t._version == version and (t == values).logical_or(t.isnan()).all(), f"{n} was overwritten"
        assert f"d_{n}" not in actual or actual[f"d_{n}"].dtype == t.dtype, f"d_{n} is {actual[f'd_{n}'].dtype}"
    exact, allowed = run(op.reference, case, upstream, torch.float64), run(op.eager, case, upstream)
    assert actual.keys() == exact.keys() == allowed.keys()
    for what, value in allowed.items():
        if value.is_floating_point() and value.dtype == torch.float32 and not ON_GPU:
            allowed[what] = exact[what] + FP32_INTERPRETED * (value.double() - exact[what])
    for what, noise in op.noise(case, upstream).items() if any(t.numel() for t in upstream) else ():
        if what not in allowed:
            continue
        error = torch.maximum((allowed[what].double() - exact[what]).abs(), noise.abs())
        allowed[what] = exact[what] + error
    return actual, allowed, exact


@contextlib.contextmanager
def failures():
    """Gathers what fails inside `with failed(what)`, and fails once at the end, naming all."""
    found = []

    @contextlib.contextmanager
    def failed(what: str):
        try:
            yield
        except Exception as error:
            if "CUDA error" in str(error):
                raise
            found.append(f"{what}: {type(error).__name__}: {str(error).splitlines()[0]}")

    yield failed
    assert not found, f"{len(found)} failures:\n" + "\n".join(found[:40])


def test_the_table_is_complete():
    """Every public op has an entry."""
    assert public_ops() <= {op.call.__name__ for op in OPS.values()}


@each_op
def test_over_200_shapes(name):
    shapes = {
        (str({n: v for n, v in sizes.items() if isinstance(v, int | str)}), rows)
        for _, _, sizes, rows, _ in drawn(name, interpreted=False)
    }
    assert len(shapes) >= 200


@each_op
@pytest.mark.parametrize("block", range(BLOCKS))
def test_as_exact_as_eager(device, poison, name, block):
    with failures() as failed:
        for variant, seed, sizes, rows, dtype in drawn(name, interpreted=not ON_GPU):
            if variant % BLOCKS == block:
                with failed(f"{name} {dtype} rows={rows} {sizes} seed={seed}"):
                    make = functools.partial(OPS[name].make, rows=rows, **sizes)
                    judge_again(name, make, seed, dtype, device)


@each_op
def test_adversarial_values(device, poison, name):
    """On a GPU in every dtype; interpreted a third of them, in turn."""
    op = OPS[name]
    cases = list(itertools.product([d for d in DTYPES if d in op.dtypes], op.edges.items()))
    with failures() as failed:
        for dtype, (what, make) in cases if ON_GPU else cases[::3]:
            with failed(f"{name} {dtype} {what}"):
                judge(name, make, 0, dtype, device, strided=False)


def overwrites(x, **options):
    y = OPS["rms_norm"].reference(x, **options)
    x.detach().add_(1)
    return y


@pytest.mark.parametrize(
    "broken, why",
    [
        (lambda x, **o: OPS["rms_norm"].reference(x, **o) * (1 + 2**-9), "error"),
        (lambda x, **o: OPS["rms_norm"].reference(x.roll(1, 0), **o), "error"),
        (lambda x, **o: OPS["rms_norm"].reference(x, **o).clamp(max=1.0), "error"),
        (lambda x, **o: OPS["rms_norm"].reference(x, **o) / (x.abs() < 100), "not finite"),
        (overwrites, "overwritten"),
    ],
)
def test_what_is_wrong_is_found(monkeypatch, device, broken, why):
    """Negative control: a result that is off by an ulp, of another row, cut off, infinite, or bought with the input."""
    monkeypatch.setitem(OPS, "broken", dataclasses.replace(OPS["rms_norm"], call=broken))
    make = functools.partial(OPS["rms_norm"].make, rows=40, width=64)
    judge("rms_norm", make, 0, torch.float16, device)
    with pytest.raises(AssertionError, match=why):
        judge("broken", lambda m: make(m, values=torch.randn(40, 64, device=device) * 40), 0, torch.float16, device)


@each_op
def test_one_input_trained(device, poison, name):
    """Each input alone gets the gradient that it gets among all, and the others get none."""
    op = OPS[name]
    dtype = torch.float32 if torch.float32 in op.dtypes else torch.float16
    case = complete(name, Maker(random.Random(0), dtype, device))
    upstream: list[Tensor] = []
    whole = run(op.call, case, upstream)
    trained = [n for n, t in case.tensors.items() if t.requires_grad]
    if "output 0" in whole and not trained:
        pytest.skip("no input has a gradient")
    for one in trained:
        alone = Case({n: t.detach().requires_grad_(n == one) for n, t in case.tensors.items()}, case.options)
        outputs = op.call(**alone.tensors, **alone.options)
        outputs = [y for y in (outputs if isinstance(outputs, tuple) else (outputs,)) if y is not None]
        judged = [(y, g) for y, g in zip([y for y in outputs if y.is_floating_point()], upstream, strict=False)]
        judged = [(y, g) for y, g in judged if y.requires_grad]
        torch.autograd.backward([y for y, _ in judged], [g for _, g in judged])
        for n, t in alone.tensors.items():
            if n == one:
                # Another specialisation of the kernel: the compiler may contract its multiply-adds otherwise.
                scale = whole[f"d_{n}"].abs().max().item()
                torch.testing.assert_close(t.grad, whole[f"d_{n}"], rtol=1e-3, atol=1e-5 * scale + 1e-7)
            else:
                assert t.grad is None, f"{n} is frozen"


@each_op
def test_20_repeats_give_the_same_bits(device, name):
    op, upstream = OPS[name], []
    for choice, dtype in enumerate([d for d in DTYPES if d in op.dtypes]):
        case = medium(name, Maker(random.Random(choice), dtype, device), choice)
        with torch.no_grad() if not op.ordered else contextlib.nullcontext():
            upstream.clear()
            first = run(op.call, case, upstream)
            for _ in range(19 if ON_GPU else 2):
                for what, value in run(op.call, case, upstream).items():
                    assert torch.equal(value, first[what]), f"{dtype} {what}: other bits"


@pytest.mark.skipif(ON_GPU, reason="in fp64, which our kernels' products of tiles know only interpreted")
@each_op
def test_gradcheck(name):
    case = complete(name, Maker(random.Random(0), torch.float64, "cpu"))
    tensors = as_dtype({n: t.detach() for n, t in case.tensors.items()}, torch.float64)
    trained = {n: t.requires_grad_() for n, t in tensors.items() if case.tensors[n].requires_grad}
    if not trained:
        pytest.skip("no input has a gradient")

    def op(*leaves):
        outputs = OPS[name].call(**(tensors | dict(zip(trained, leaves, strict=True))), **case.options)
        return [y for y in (outputs if isinstance(outputs, tuple) else (outputs,)) if y is not None and y.requires_grad]

    assert torch.autograd.gradcheck(lambda *leaves: tuple(op(*leaves)), list(trained.values()), fast_mode=True)


FREE = {
    ("glu", "gate_up", "device"), ("activate", "x", "device"), ("quantize_int8", "x", "device"),
    ("route", "logits", "device"),  # there is nothing else that it must lie with
    ("activate", "x", "shape"), ("quantize_int8", "x", "shape"), ("route", "logits", "shape"),
    ("embedding", "ids", "shape"), ("embedding", "weight", "shape"),  # any width will do
    ("int2_matmul", "scale_a", "dtype"), ("int2_matmul", "scale_w", "dtype"), ("int2_matmul", "bias", "dtype"),  # cast
}  # fmt: skip
"""What an op takes as it is."""


def refused(call, case: Case, change: dict, *shown: str) -> str | None:
    """Why the InputError that `change` of an argument should raise is not as it should be, if so.

    shown: what it must name: the argument, and what it was in any of these forms.
    """
    argument = next(iter(change))
    tensors = {n: t.detach() for n, t in case.tensors.items()}
    try:
        call(**(tensors | case.options | change))
    except InputError as error:
        words = rf"\b{argument}\b|\b{argument.replace('_', ': .*')}\b"  # "student: x ..." is student_x
        if not re.search(words, str(error)):
            return f"does not name {argument}: {error}"
        return None if any(form in str(error) for form in shown) else f"does not show {shown[0]}: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


@each_op
def test_wrong_tensors_raise(device, name):
    """Each tensor argument in turn is of another dtype, a narrower shape, or on another device."""
    op, case = OPS[name], complete(name, Maker(random.Random(0), torch.float32, device))
    if torch.float32 not in op.dtypes:
        case.tensors |= as_dtype(case.tensors, torch.float16)
    op.call(**case.tensors, **case.options)
    found = []
    for argument, t in ((n, t.detach()) for n, t in case.tensors.items()):
        other = t.long() if t.is_floating_point() else t.float()
        narrow, elsewhere = t[..., :-1], t.to("meta")
        for kind, wrong, *shown in (
            ("dtype", other, str(other.dtype)),
            ("shape", narrow, *(str(f(size)) for f in (tuple, list) for size in (narrow.shape, narrow.shape[-1:]))),
            ("device", elsewhere, str(elsewhere.device)),
        ):
            if (name, argument, kind) not in FREE:
                why = refused(op.call, case, {argument: wrong}, *shown)
                found += [f"{argument}, {kind}: {why}"] if why else []
    assert not found, "\n".join(found)


WRONG = {
    "rope": {"num_heads": 7},
    "glu": {"activation": "relu"},
    "glu of two tensors": {"activation": "relu"},
    "glu_linear": {"activation": "relu"},
    "glu_linear of two tensors": {"activation": "relu"},
    "activate": {"activation": "relu"},
    "activation_linear": {"activation": "relu"},
    "gated_mlp": {"activation": "relu", "workspace_bytes": 0},
    "gated_mlp of two weights": {"activation": "relu", "workspace_bytes": 0},
    "mlp": {"activation": "relu", "workspace_bytes": 0},
    "attention": {"window": 0, "softcap": -1.0},
    "cross_entropy": {"reduction": "avg", "label_smoothing": 1.5, "softcap": 0.0},
    "linear_cross_entropy": {"reduction": "avg", "label_smoothing": 1.5, "softcap": 0.0, "workspace_bytes": 0,
                             "num_valid": -1, "accum_dtype": torch.float16},
    "linear_logprobs": {"temperature": 0.0, "softcap": 0.0, "workspace_bytes": 0, "num_valid": -1,
                        "accum_dtype": torch.float16},
    "kl_div": {"reduction": "avg"},
    "jsd": {"reduction": "batchmean", "beta": 1.5},
    "linear_jsd": {"reduction": "batchmean", "beta": -0.5, "temperature": 0.0, "workspace_bytes": 0, "num_valid": -1,
                   "accum_dtype": torch.float16},
    "embedding": {"padding_idx": 7},
    "int2_matmul": {"out_features": 13, "out_dtype": torch.int64},
    "route": {"top_k": 6},
    "moe_experts": {"activation": "relu"},
}  # fmt: skip
"""Options that no call takes."""


@pytest.mark.parametrize("name, option", [(n, o) for n, options in WRONG.items() for o in options], ids=str)
def test_wrong_options_raise(device, name, option):
    case = complete(name, Maker(random.Random(0), torch.float16, device))
    assert not refused(OPS[name].call, case, {option: WRONG[name][option]}, str(WRONG[name][option]))


IDS = {
    "cross_entropy": "labels", "linear_cross_entropy": "labels", "linear_logprobs": "labels", "jsd": "labels",
    "linear_jsd": "labels", "embedding": "ids", "moe_experts": "experts", "rope": "position_ids",
    "rope_qk": "position_ids",
}  # fmt: skip


@pytest.mark.parametrize("bad", [-7, 5000])
@pytest.mark.parametrize("name", IDS)
def test_ids_out_of_range(monkeypatch, name, bad):
    """On the CPU they raise InputError, which names them. What a GPU does with them is in each op's docstring."""
    op, argument = OPS[name], IDS[name]
    monkeypatch.setattr(sys.modules[op.call.__module__], "use_triton", lambda x: False)
    case = complete(name, Maker(random.Random(0), torch.float32, "cpu"))
    ids = case.tensors[argument].clone()
    ids.view(-1)[3] = bad
    assert not refused(op.call, case, {argument: ids}, str(bad))


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [-7, 5000])
@pytest.mark.parametrize("name", IDS)
def test_ids_out_of_range_on_a_gpu(name, bad):
    """Nothing waits for the device: what such an id decides is NaN, and what it does not is as it was."""
    op, argument = OPS[name], IDS[name]
    case = complete(name, Maker(random.Random(0), torch.float32, "cuda"))
    right, upstream = case.tensors[argument], []
    expected = run(op.call, case, upstream)
    case.tensors[argument] = right.clone()
    case.tensors[argument].view(-1)[3] = bad
    actual = run(op.call, case, upstream)
    first, other = actual["output 0"], expected["output 0"]
    if first.dim() == 0:
        assert first.isnan()
    else:
        first, other = (y.flatten(0, len(right.shape) - 1 if name != "moe_experts" else 0) for y in (first, other))
        at = 3 if name != "moe_experts" else 3 // right.shape[1]
        rest = torch.arange(len(first), device="cuda") != at
        assert first[at].isnan().all() and torch.equal(first[rest], other[rest])


# Of a GPU alone.


@pytest.mark.gpu
@pytest.mark.parametrize("name", every(of=lambda op: op.past_2_31 is not None))
def test_past_2_31_elements(name):
    """At the start, in the middle and at the end, rows come out as they do without the others."""
    op = OPS[name]
    torch.manual_seed(0)
    case = op.past_2_31(Maker(random.Random(0), torch.bfloat16, "cuda"))
    rows = next(iter(case.tensors.values())).shape[0]
    at = torch.tensor([*range(3), *range(rows // 2, rows // 2 + 3), *range(rows - 3, rows)], device="cuda")
    few = {n: (t.detach()[at] if t.shape[0] == rows else t.detach()) for n, t in case.tensors.items()}
    few = Case({n: t.requires_grad_(case.tensors[n].requires_grad) for n, t in few.items()}, case.options)
    upstream: list[Tensor] = []
    expected = run(op.call, few, upstream)
    wide = []
    for g in upstream:
        wide.append(g.new_zeros(rows, *g.shape[1:]))  # other rows get no gradient, and give none to the weights
        wide[-1][at] = g
    actual = run(op.call, case, wide)
    assert max(t.numel() for t in (*case.tensors.values(), *actual.values())) > 2**31
    for what, value in actual.items():
        value = value[at] if value.shape[0] == rows else value
        # Products of other shapes may sum in another order, which moves a rounding to bf16 by an ulp.
        scale = expected[what].abs().max().item()
        torch.testing.assert_close(
            value, expected[what], rtol=2**-7, atol=2**-8 * scale, equal_nan=True, msg=lambda m, w=what: f"{w}: {m}"
        )


def positional(name: str, dtype: torch.dtype, choice: int = 0):
    """(op, inputs, grads) as `on_gpu` takes them."""
    case = medium(name, Maker(random.Random(choice), dtype, "cuda"), choice)
    names = list(case.tensors)
    upstream: list[Tensor] = []
    run(OPS[name].call, case, upstream)

    def op(*inputs):
        outputs = OPS[name].call(**dict(zip(names, inputs, strict=True)), **case.options)
        return tuple(y for y in outputs if y is not None) if isinstance(outputs, tuple) else outputs

    return op, list(leaves_of(case.tensors).values()), upstream


@pytest.mark.gpu
@each_op
def test_compiles_whole(name):
    assert_compiles(*positional(name, torch.bfloat16))


@pytest.mark.gpu
@each_op
def test_captured_in_a_graph(name):
    for choice in range(2):
        assert_captures(*positional(name, torch.bfloat16, choice), same_bits=OPS[name].ordered)


@pytest.mark.gpu
@each_op
def test_never_waits(name):
    for choice in range(2):
        assert_never_waits(*positional(name, torch.bfloat16, choice))
