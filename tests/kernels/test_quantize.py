"""Activations in int8."""

import pytest
import torch

from ligermodels.experimental.bitnet.quantize import quantize_int8, quantize_int8_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("width", [1, 5, 300, 9000])
def test_quantize(device, poison, dtype, width):
    """Bit for bit the reference: the maximum, one division, one product and one rounding to a whole number."""
    x = torch.randn(2, 3, width, device=device).to(dtype) * 3
    q, scale = quantize_int8(x)
    expected = quantize_int8_reference(x)
    assert q.dtype == torch.int8 and q.shape == x.shape and scale.shape == x.shape[:-1]
    assert torch.equal(q, expected[0])
    assert torch.equal(scale, expected[1])
    assert (q.abs().amax(-1) == 127).all()
    error = (q * scale[..., None].double() - x.double()).abs()
    assert (error <= 0.5001 * scale[..., None]).all()
