import pytest
import torch
from torch import nn
from transformers.integrations import bitnet

from ligermodels.errors import InputError
from ligermodels.experimental.bitnet import BitLinear, PackedBitLinear


@pytest.fixture(autouse=True)
def _eager():
    """transformers' own layer is compiled piece by piece; here it is run as it is written."""
    with torch.compiler.set_stance("force_eager"):
        yield


def make(device="cpu", bias=False, dtype=torch.float32, in_features=52, out_features=30):
    layer = BitLinear(in_features, out_features, bias=bias).to(device, dtype)
    return layer, torch.randn(2, 5, in_features, device=device, dtype=dtype) * 2


@pytest.mark.parametrize("bias", [False, True])
def test_trains_as_the_reference_implementation(device, bias):
    layer, x = make(device, bias)
    theirs = bitnet.AutoBitLinear(52, 30, bias=bias, online_quant=True).to(device)
    theirs.load_state_dict(layer.state_dict())
    dy = torch.randn(2, 5, 30, device=device)
    results = []
    for module in (layer, theirs):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        results.append([y, *torch.autograd.grad(y, [leaf, *module.parameters()], dy)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("out_features", [1, 30, 32])
def test_packed_computes_what_was_trained(device, bias, rows, out_features):
    layer, _ = make(device, bias, out_features=out_features)
    x = torch.randn(rows, 52, device=device)
    before = layer.weight.detach().clone()
    packed = layer.eval().pack()
    assert torch.equal(layer.weight, before) and not packed.training and packed.weight.device == x.device
    with torch.no_grad():
        # The trained layer rounds each product and sum to fp32, of which the packed one is free until the end.
        torch.testing.assert_close(packed(x), layer(x), rtol=1e-5, atol=1e-5)
        assert packed(x).dtype == torch.float32
    assert packed.weight.shape == (-(-out_features // 4), 52) and packed.weight.dtype == torch.uint8
    assert not list(packed.parameters())


@pytest.mark.parametrize("bias", [False, True])
def test_checkpoints_of_transformers_load(bias):
    """The state dict of their packed layer, whose weight_scale divides, and of ours, whose weight_scale multiplies."""
    layer, x = make(bias=bias, out_features=32)
    theirs = bitnet.BitLinear(52, 32, bias=bias, dtype=torch.float32)
    ternary = torch.randint(-1, 2, (32, 52)).to(torch.int8)
    theirs.weight = bitnet.pack_weights(ternary.clone())
    theirs.weight_scale = torch.tensor([17.3])
    if bias:
        theirs.bias = torch.randn(32)
    ours = PackedBitLinear(52, 32, bias=bias, inverse_scale=True)
    ours.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
    packed = layer.pack()
    again = PackedBitLinear(52, 32, bias=bias)
    again.load_state_dict(packed.state_dict())
    assert torch.equal(again(x), packed(x))
    offline = bitnet.AutoBitLinear(52, 32, bias=False)
    offline.weight.data, offline.weight_scale = bitnet.unpack_weights(packed.weight, torch.float32), packed.weight_scale
    if not bias:
        with torch.no_grad():
            torch.testing.assert_close(packed(x), offline(x), rtol=1e-5, atol=1e-5)


def test_a_weight_of_zeros_and_a_row_of_zeros():
    layer, x = make(bias=True)
    x[0] = 0
    torch.testing.assert_close(layer(x)[0], layer.bias.expand(5, 30))
    nn.init.zeros_(layer.weight)
    for module in (layer, layer.pack()):
        assert torch.equal(module(x.detach()), layer.bias.expand(2, 5, 30))


def test_wants_no_gradient():
    layer, x = make()
    packed = layer.pack()
    with pytest.raises(InputError, match="requires a gradient"):
        packed(x.requires_grad_())
