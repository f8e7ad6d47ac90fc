"""Activations in int8: bit for bit the reference, ties to even."""

import pytest
import torch
from transformers.integrations import bitnet

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


def test_quantize_rounds_half_to_even_as_transformers(device):
    steps = torch.arange(-127, 128, device=device) / 2
    x = torch.cat([steps, torch.tensor([127.0], device=device)])[None]  # absmax 127: the factor is 1
    q, scale = quantize_int8(x)
    assert torch.equal(q.float(), x.round()) and scale.item() == 1
    x = torch.randn(4, 50, device=device)
    with torch.compiler.set_stance("force_eager"):
        theirs, inverse = bitnet.BitLinear.activation_quant(None, x)
    q, scale = quantize_int8(x)
    assert torch.equal(q, theirs)
    torch.testing.assert_close(scale, 1 / inverse[:, 0], rtol=2e-7, atol=0)  # 1 / (127 / m) for m / 127: 2 ulp
