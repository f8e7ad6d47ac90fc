"""What is special to quantize_int8: ties, edges, and bit for bit the reference."""

import pytest
import torch
from transformers.integrations import bitnet

from ligermodels.experimental.bitnet.quantize import ABSMAX_EPS, quantize_int8, quantize_int8_reference


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


def test_quantize_at_the_edges(device, poison):
    x = torch.randn(6, 9, device=device)
    x[0], x[1, 3], x[2, 4], x[3, 5], x[4] = 0, float("nan"), float("inf"), float("-inf"), ABSMAX_EPS / 2
    for op in (quantize_int8, quantize_int8_reference):
        q, scale = op(x)
        assert scale[1:4].isnan().all()
        assert not q[0].any()
        torch.testing.assert_close(scale[[0, 4]], torch.full((2,), ABSMAX_EPS / 127, device=device))
        assert (q[4] == 64).all()  # 63.5, to the even
    assert quantize_int8(x[:, ::2].expand(2, 6, 5))[0].shape == (2, 6, 5)
    assert quantize_int8(x[:0])[0].shape == (0, 9)
