"""Runs an op, its eager code and its reference in fp64 on one case, and judges how exact the op is."""

import contextlib
import random
from collections.abc import Callable

import torch
from torch import Tensor

from tests.kernels.cases import Case, Maker
from tests.kernels.ops import OPS
from tests.kernels.oracle import assert_as_exact

ON_GPU = torch.cuda.is_available()
DRAWS, ENOUGH = (32, 256) if ON_GPU else (2, 8)
DTYPES = [torch.bfloat16, torch.float16, torch.float32] if ON_GPU else [torch.float16, torch.float32]
FP32_INTERPRETED = 4.0
"""Of eager's error in fp32 when interpreted: numpy's exp is good to 2 ulp where torch's is to a half, and sums one by
one where torch adds in parts, whose roundings grow less. A GPU is asked for 1.0, and half precision hides it."""
TF32 = 4.0
"""Of eager's error in fp32, where an op multiplies in tf32x3 on a GPU and eager in fp32: up to 2.9 was seen on an H200,
where eager's sums are short."""


def as_dtype(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}


def leaves_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same memory, as new leaves."""
    return {name: t.detach().requires_grad_(t.requires_grad) for name, t in tensors.items()}


def outputs_of(call: Callable, tensors: dict[str, Tensor], options: dict) -> dict[str, Tensor]:
    outputs = call(**tensors, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return {f"output {i}": y for i, y in enumerate(outputs) if y is not None}


def run(call: Callable, case: Case, upstream: dict[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """All outputs, and the gradients of the tensors that require grad, by name.

    upstream: the gradient of each output that is used; filled with random numbers where it is empty. That of a loss is
    1 or, as where losses are weighed, no power of two.
    """
    tensors = {n: t.detach() if dtype is None else as_dtype({n: t.detach()}, dtype)[n] for n, t in case.tensors.items()}
    tensors = {n: t.requires_grad_(case.tensors[n].requires_grad) for n, t in tensors.items()}
    results = outputs_of(call, tensors, case.options)
    judged = {name: y for name, y in results.items() if y.requires_grad}
    trained = {name: t for name, t in tensors.items() if t.requires_grad}
    if not upstream:
        weight = 1.0 if torch.rand(()) < 0.5 else 0.37
        upstream |= {n: torch.full_like(y, weight) if y.dim() == 0 else torch.randn_like(y) for n, y in judged.items()}
    used = [(y, upstream[name].to(y.dtype)) for name, y in judged.items() if name in upstream]
    if used:
        wanted, grads = zip(*used, strict=True)
        found = torch.autograd.grad(wanted, list(trained.values()), grads, allow_unused=True)
        results |= {
            f"d_{n}": torch.zeros_like(t) if g is None else g for (n, t), g in zip(trained.items(), found, strict=True)
        }
    return {name: t.detach() for name, t in results.items()}


def judge(
    name: str, make: Callable[[Maker], Case], seed: int, dtype: torch.dtype, device: str, *, strided: bool = True
) -> None:
    """The op is as exact as eager on this case, writes over none of its inputs, and has the dtypes of its inputs.

    A case of few numbers is drawn several times and judged as one: few errors have no reliable rms.
    """
    draws = []
    torch.manual_seed(seed)
    for _ in range(DRAWS):
        case = make(Maker(random.Random(seed), dtype, device, strided=strided))
        draws.append(run_all(name, case))
        shared = {what: case.shared if t.dim() > 1 else 1 for what, t in draws[0][0].items()}
        if len(draws) * max(t.numel() for t in draws[0][0].values()) >= 2**21:
            break  # each of these takes 80 bytes of every draw
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
    op, upstream = OPS[name], {}
    with inputs_stay(case):
        actual = run(op.call, case, upstream)
    for n, t in case.tensors.items():
        assert f"d_{n}" not in actual or actual[f"d_{n}"].dtype == t.dtype, f"d_{n} is {actual[f'd_{n}'].dtype}"
    reference = op.exact if ON_GPU and op.exact else op.reference
    exact, allowed = run(reference, case, upstream, torch.float64), run(op.eager, case, upstream)
    assert actual.keys() == exact.keys() == allowed.keys()
    in_fp32 = all(t.dtype == torch.float32 for t in case.tensors.values() if t.is_floating_point())
    factor = (TF32 if op.tf32 and in_fp32 else 1.0) if ON_GPU else FP32_INTERPRETED
    for what, value in allowed.items():
        if value.is_floating_point() and value.dtype == torch.float32:
            allowed[what] = exact[what] + factor * (value.double() - exact[what])
    given = list(upstream.values())
    for what, noise in op.noise(case, given).items() if any(t.numel() for t in given) else ():
        if what not in allowed:
            continue
        error = torch.maximum((allowed[what].double() - exact[what]).abs(), noise.abs())
        allowed[what] = exact[what] + error
    return actual, allowed, exact


@contextlib.contextmanager
def inputs_stay(case: Case):
    before = {n: (t._version, t.detach().clone()) for n, t in case.tensors.items()}
    yield
    for n, (version, values) in before.items():
        t = case.tensors[n]
        assert t._version == version and (t == values).logical_or(t.isnan()).all(), f"{n} was overwritten"


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


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], rtol: float, atol: float) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value.to(actual[name].device), rtol=rtol, atol=atol, check_dtype=False, equal_nan=True,
            msg=lambda m, name=name: f"{name}: {m}",
        )  # fmt: skip


def assert_equal_but_for_rounding(actual: dict[str, Tensor], exact: dict[str, Tensor], eps: float) -> None:
    assert actual.keys() == exact.keys()
    for what, value in exact.items():
        value = value if actual[what].is_floating_point() else value.round()
        scale = value.abs().max().item() if value.numel() and value.is_floating_point() else 1.0
        scale = scale if scale < float("inf") else 1.0
        torch.testing.assert_close(
            actual[what], value.to(actual[what].dtype), rtol=2**12 * eps, atol=2**10 * eps * max(scale, 1.0),
            equal_nan=True, msg=lambda m, w=what: f"{w}: {m}",
        )  # fmt: skip
