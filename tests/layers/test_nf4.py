"""QuantizedLinear in nf4: a linear layer over the dequantised weight, of which nothing is kept."""

import copy
import io
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ligermodels.errors import InputError
from ligermodels.layers import GatedMLP, QuantizedLinear
from ligermodels.layers.linear import operands_of
from ligermodels.layers.lora import Adapted


def nf4(weight, bias=None, **options):
    return QuantizedLinear.from_weight(weight, bias, kind="nf4", **options)


def make(n=48, k=80, bias=True, device="cpu", dtype=torch.float32, **options):
    weight, bias = torch.randn(n, k, dtype=dtype), torch.randn(n, dtype=dtype) if bias else None
    return nf4(weight.to(device), None if bias is None else bias.to(device), **options)


def expected(layer, x):
    weight, bias = layer.operand.dequantize(x.dtype), layer.bias
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype))


def tensors(layer):
    return dict(layer.state_dict())


@pytest.mark.parametrize("options", [dict(), dict(double=False), dict(block=128, bias=False)], ids=str)
def test_output_and_gradient_are_those_of_the_dequantised_weight(device, options):
    layer = make(device=device, **options)
    for dtype in (torch.float64, torch.float32, torch.float16):
        x = torch.randn(2, 5, 80, device=device, dtype=dtype, requires_grad=True)
        y, wanted = layer(x), expected(layer, x)
        assert torch.equal(y, wanted) and y.dtype == dtype
        dy = torch.randn_like(y)
        torch.testing.assert_close(*(torch.autograd.grad(out, x, dy)[0] for out in (y, wanted)))
        with torch.no_grad():
            assert torch.equal(layer(x), wanted)
            torch.testing.assert_close(layer(x[0, 0]), wanted[0, 0])
    x = torch.randn(3, 80, device=device, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, x)
    assert {name: p.requires_grad for name, p in layer.named_parameters()} == dict.fromkeys(
        ["weight"] + ["absmax"] * options.get("double", True) + ["bias"] * options.get("bias", True), False
    )


def test_neither_input_nor_dequantised_weight_is_kept(device):
    small, large = make(16, 80, device=device), make(80, 80, device=device)
    x = torch.randn(4, 80, device=device, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = small(large(large(x)))
    own = {p.data_ptr() for layer in (small, large) for p in layer.state_dict().values()}
    assert all(t.data_ptr() in own for t in kept)
    (dx,) = torch.autograd.grad(y.sum(), x)
    weights = [layer.operand.dequantize() for layer in (small, large)]
    torch.testing.assert_close(dx, torch.ones_like(y) @ weights[0] @ weights[1] @ weights[1])
    h = x * 2
    seen = weakref.ref(h)
    y = small(h)
    del h
    assert seen() is None and y.requires_grad


@pytest.mark.gpu
def test_a_step_is_captured_in_a_graph():
    layer = make(512, 512, device="cuda")
    x = torch.randn(64, 512, device="cuda", requires_grad=True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.autograd.grad(layer(x).sum(), x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y = layer(x)
        (dx,) = torch.autograd.grad(y.sum(), x)
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    torch.testing.assert_close(y, expected(layer, x))
    torch.testing.assert_close(dx, layer.operand.dequantize().sum(0).expand(64, -1))


def test_autocast_inference_checkpointing_and_compile(device):
    layer, x = make(device=device), torch.randn(4, 80, device=device, requires_grad=True)
    with torch.autocast(device, torch.bfloat16):
        y = layer(x)
        (dx,) = torch.autograd.grad(y.float().sum(), x)
    low = x.to(torch.bfloat16)
    assert y.dtype == torch.bfloat16 and torch.equal(y, expected(layer, low)) and dx.dtype == torch.float32
    with torch.inference_mode():
        assert torch.equal(layer(x), expected(layer, x))
    (wanted,) = torch.autograd.grad(expected(layer, x).square().sum(), x)
    found = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).square().sum(), x)[0]
    torch.testing.assert_close(found, wanted)


def test_compiles_whole(device):
    layer, x = make(device=device), torch.randn(4, 80, device=device, requires_grad=True)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    found, wanted = (torch.autograd.grad(y.square().sum(), x)[0] for y in (compiled(x), expected(layer, x)))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_mlp_with_adapters_compiles_whole(recompute):
    """Module by module, as against one op where it is not compiled."""
    mlp = GatedMLP(32, 48)
    mlp.recompute = recompute
    for name, linear in list(mlp.named_children()):
        adapted = nf4(linear.weight.detach())
        Adapted.of(adapted, r=4, alpha=8, dropout=0.0, rslora=False, dora=False, dtype=torch.float32)
        nn.init.normal_(adapted.lora_A.weight, std=0.1)
        nn.init.normal_(adapted.lora_B.weight, std=0.1)
        setattr(mlp, name, adapted)
    assert operands_of(mlp.children())
    x = torch.randn(2, 4, 32, requires_grad=True)
    wanted = [x, *(p for p in mlp.parameters() if p.requires_grad)]
    torch.compiler.reset()
    outputs = torch.compile(mlp, fullgraph=True, backend="aot_eager")(x), mlp(x)
    for found, expected in zip(*(torch.autograd.grad(y.square().sum(), wanted) for y in outputs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("double", [True, False])
def test_casts_moves_copies_and_state_dicts_keep_every_bit(double):
    layer, x = make(double=double), torch.randn(3, 80)
    before, y = {name: t.clone() for name, t in tensors(layer).items()}, layer(x)
    for change in (lambda m: m.half(), lambda m: m.double(), lambda m: m.to("cpu", torch.bfloat16), nn.Module.float):
        changed = change(copy.deepcopy(layer))
        assert all(torch.equal(t, before[name]) for name, t in tensors(changed).items() if name != "bias")
        assert torch.equal(changed.operand.dequantize(), layer.operand.dequantize())
    assert copy.deepcopy(layer).to("meta").weight.is_meta
    with pytest.raises(RuntimeError, match="floating point"):
        layer.weight.requires_grad_()
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    other = make(double=double)
    other.load_state_dict(layer.state_dict())
    meta = make(double=double, device="meta")
    meta.load_state_dict(layer.state_dict(), assign=True)
    for again in (copy.deepcopy(layer), torch.load(file, weights_only=False), other, meta):
        assert torch.equal(again(x), y)
        assert dict(again.named_parameters()).keys() == dict(layer.named_parameters()).keys()
    assert "kind='nf4'" in repr(layer) and "block=64" in repr(layer)


def test_bad_calls_say_what_is_wrong(device):
    layer, x = make(device=device), torch.randn(3, 80, device=device)
    weight = torch.randn(8, 8)
    for call, message in (
        (lambda: layer(x[:, 1:]), r"does not fit x \(3, 79\)"),
        (lambda: layer(x.int()), "int32"),
        (lambda: layer(x.to("meta")), "meta"),
        (lambda: nf4(nn.Parameter(weight)), "Freeze it first"),
        (lambda: nf4(weight, torch.zeros(7)), r"\(7,\)"),
        (lambda: nf4(weight[0]), r"\(8,\)"),
        (lambda: nf4(weight, block=7), "block=7"),
    ):
        with pytest.raises(InputError, match=message):
            call()
    sharded = make(device=device)
    sharded.weight = nn.Parameter(sharded.weight[:100], requires_grad=False)
    with pytest.raises(InputError, match="gathered"):
        sharded(x)
