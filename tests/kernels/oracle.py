"""How exact a kernel must be: as exact as the eager op of the same dtype, both judged against fp64."""

import math

import torch
from torch import Tensor


def assert_as_exact(
    actual: Tensor, eager: Tensor, exact: Tensor, what: str = "output", *, shared: int = 1, terms: int = 1
) -> None:
    """`actual` errs no more than `eager`, both against `exact` (fp64): rms 1.0x, max 1.25x + 1 ulp.

    Rounding an exact result to the dtype already errs by up to half an ulp, so below that floor eager is
    lucky rather than better, and is not asked for. In fp32, whose accumulators are fp32 too, every
    operation rounds, and the floor is one ulp. Nor are two equally exact results equally far off: over n independent
    errors their rms differs by chance, by about 1 / sqrt(n); four times that is allowed for. `shared` elements have
    one error in common, as those of a row that is divided by one number, so that n is the number of elements over
    that. The largest of n normal errors scatters by 1.28 / (2 ln n) of itself, and that of two such by 1.41 times that;
    four times that is allowed for in the maximum. `terms` is how many products a matrix product adds to one element: a
    sum of K random terms of fp32, one after the other, errs by sqrt(K / 24) ulp, less if a library adds it in parts,
    which is the library's choice for either. Where eager is not finite and the exact result is, eager sets no bar, and
    the floor is asked for; where neither is, as after an intermediate result overflowed, nothing is asked for.
    """
    assert actual.shape == exact.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
    if exact.numel() == 0:
        return
    exact = exact.to(actual.device, torch.float64)
    rounded = exact.to(actual.dtype)
    finite = rounded.isfinite()
    overflow = ~finite & exact.isfinite()  # a last rounding upwards overflows, one downwards does not
    same = (actual == rounded) | (actual.isnan() & rounded.isnan()) | (overflow & (actual.abs() >= _largest(actual)))
    assert (actual.isfinite() | ~finite).all(), f"{what}: not finite where it should be"
    assert (finite | same | ~eager.isfinite()).all(), (
        f"{what}: finite, or of another sign, where it should be {rounded[~finite][0]}"
    )
    eps, tiny = torch.finfo(actual.dtype).eps, torch.finfo(actual.dtype).tiny
    if actual.dtype == torch.float16:
        tiny *= eps  # its subnormals are kept, and in use; those of fp32 and bf16 may be flushed to zero
    exact = exact.where(finite, 0)
    error = (actual.double() - exact).where(finite, 0).abs()
    allowed = (eager.double() - exact).where(finite & eager.isfinite(), 0).abs()
    rms_error, rms_allowed = error.square().mean().sqrt(), allowed.square().mean().sqrt()
    ulps = max(1.0, (terms / 24) ** 0.5) if actual.dtype == torch.float32 else 0.5
    rms_floor = ulps * eps * exact.square().mean().sqrt() + tiny
    independent = max(2.0, exact.numel() / shared)
    chance, peak = 1 + 4 / independent**0.5, 1 + 4 * 1.28 * 1.41 / (2 * math.log(independent))
    assert rms_error <= torch.maximum(rms_allowed * chance, rms_floor), (
        f"{what}: rms error {rms_error:.3e} against eager's {rms_allowed:.3e} x {chance:.3f} (floor {rms_floor:.3e})"
    )
    ulp = max(1.0, ulps) * eps * exact.abs().max() + tiny
    assert error.max() <= 1.25 * peak * allowed.max() + ulp, (
        f"{what}: max error {error.max():.3e} against eager's {allowed.max():.3e} x {peak:.3f} + 1 ulp {ulp:.3e}"
    )


def _largest(x: Tensor) -> float:
    return torch.finfo(x.dtype).max
