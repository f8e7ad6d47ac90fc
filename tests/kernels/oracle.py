"""How exact a kernel must be: as exact as the eager op of the same dtype, both judged against fp64."""

import torch
from torch import Tensor

DTYPES_INTERPRETED = [torch.float32, torch.float16, torch.float64]
"""What the interpreter can judge: it truncates where it rounds fp32 to bf16, so bf16 is judged on a GPU."""


def dtypes() -> list[torch.dtype]:
    return [*DTYPES_INTERPRETED, torch.bfloat16] if torch.cuda.is_available() else DTYPES_INTERPRETED


def assert_as_exact(actual: Tensor, eager: Tensor, exact: Tensor, what: str = "output") -> None:
    """`actual` errs no more than `eager`, both against `exact` (fp64): rms 1.0x, max 1.25x + 1 ulp.

    Rounding an exact result to the dtype already errs by up to half an ulp, so below that floor eager is
    lucky rather than better, and is not asked for. In fp32, whose accumulators are no wider than itself, every
    operation rounds, and the floor is one ulp. Nor are two equally exact results equally far off: over n elements
    their rms errors differ by chance, by about 1 / sqrt(n); four times that is allowed for.
    """
    assert actual.shape == exact.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
    exact = exact.to(actual.device, torch.float64)
    assert actual.isfinite().all() == exact.isfinite().all(), f"{what}: not finite where it should be"
    if exact.numel() == 0:
        return
    eps = torch.finfo(actual.dtype).eps
    error, allowed = (actual.double() - exact).abs(), (eager.double() - exact).abs()
    rms_error, rms_allowed = error.square().mean().sqrt(), allowed.square().mean().sqrt()
    rms_floor = (1.0 if actual.dtype == torch.float32 else 0.5) * eps * exact.square().mean().sqrt() + torch.finfo(
        actual.dtype
    ).tiny
    chance = 1 + 4 / exact.numel() ** 0.5
    assert rms_error <= torch.maximum(rms_allowed * chance, rms_floor), (
        f"{what}: rms error {rms_error:.3e} against eager's {rms_allowed:.3e} x {chance:.3f} (floor {rms_floor:.3e})"
    )
    ulp = eps * exact.abs().max() + torch.finfo(actual.dtype).tiny
    assert error.max() <= 1.25 * allowed.max() + ulp, (
        f"{what}: max error {error.max():.3e} against eager's {allowed.max():.3e} + 1 ulp {ulp:.3e}"
    )
