"""No op has a second derivative: asking for one is an error, and whatever asks for first derivatives alone works."""

import importlib
import re
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import ligermodels
from ligermodels import kernels
from ligermodels.errors import InputError
from ligermodels.kernels._triton import once_differentiable
from tests.arch.suite import tiny_config


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return 3 * ctx.saved_tensors[0] ** 2 * dy


def functions() -> dict[str, type]:
    """Every autograd.Function of the package, by name."""
    package = Path(ligermodels.__file__).parent
    for path in package.rglob("*.py"):
        if re.search(r"autograd.*\bFunction\b", path.read_text(encoding="utf-8")):
            importlib.import_module(".".join(path.relative_to(package.parent).with_suffix("").parts))
    classes = [torch.autograd.Function]
    for one in classes:
        classes += one.__subclasses__()
    return {f"{one.__module__}.{one.__name__}": one for one in classes if one.__module__.startswith("ligermodels.")}


def test_every_function_refuses_create_graph():
    """Whatever the incoming gradient requires: a backward runs with gradients on for a second derivative alone."""
    every = functions()
    assert len(every) >= 25
    for name, function in every.items():
        with pytest.raises(InputError, match=f"{name} has no second derivative"):
            function.backward(None, None)


def penalty(model, x, labels):
    """The squared norm of the gradient of the loss in the embedded tokens, whose own gradient is a second one."""
    with sdpa_kernel(SDPBackend.MATH):  # torch's fused attention has no second derivative either
        loss = model(inputs_embeds=x, labels=labels).loss
    return torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()


@pytest.fixture
def llama(device):
    model = ligermodels.Llama.from_config(tiny_config("llama"), device=device, dtype=torch.float64)
    labels = torch.randint(3, 90, (2, 9), device=device)
    return model, model.get_input_embeddings()(labels).detach().requires_grad_(), labels


def test_a_gradient_penalty_raises(llama):
    with pytest.raises(InputError, match="create_graph=True"):
        penalty(*llama)


def test_a_gradient_penalty_trains_on_the_reference_path(llama, without_triton):
    """Its gradient reaches all weights of the blocks, and is that of finite differences."""
    model, *batch = llama
    weights = [p for name, p in model.named_parameters() if "embed" not in name]
    gradients = torch.autograd.grad(penalty(model, *batch), weights)
    for weight, gradient in zip(weights, gradients, strict=True):
        step = 1e-5 * torch.randn_like(weight)
        with torch.no_grad():
            weight += step
            above = penalty_of_values(model, *batch)
            weight -= 2 * step
            below = penalty_of_values(model, *batch)
            weight += step
        torch.testing.assert_close((above - below) / 2, (gradient * step).sum(), rtol=1e-5, atol=1e-12)


@torch.enable_grad()
def penalty_of_values(*arguments):
    return penalty(*arguments).detach()


# First derivatives go on working, however they are asked for.


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_whole(dynamic):
    torch.compiler.reset()
    x, dy = torch.randn(5, requires_grad=True), torch.randn(5)
    compiled = torch.compile(Cube.apply, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    torch.testing.assert_close(torch.autograd.grad(compiled(x), x, dy)[0], 3 * x**2 * dy)


def test_gradcheck(device):
    x, t = (torch.rand(3, 7, dtype=torch.float64, device=device, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda x, t: kernels.kl_div(x, t + 0.5), (x, t))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed(device, use_reentrant):
    x = torch.randn(3, 8, device=device, requires_grad=True)
    expected = torch.autograd.grad(kernels.glu(x).square().sum(), x)[0]
    checkpoint(lambda x: kernels.glu(x).square().sum(), x, use_reentrant=use_reentrant).backward()
    torch.testing.assert_close(x.grad, expected)


def test_transforms_of_torch_func(device):
    """What torch sees, as linear layers, it also differentiates twice; of an op it refuses to."""
    x, weight = (torch.randn(3, 8, device=device, dtype=torch.float64) for _ in range(2))

    def twice(f):
        return torch.func.grad(lambda x: torch.func.grad(lambda x: f(x).pow(3).sum())(x).sum())(x)

    def linear(x):
        return kernels.mlp(x, weight, weight.t(), activation="sigmoid")

    exact = twice(lambda x: kernels.mlp_reference(x, weight, weight.t(), activation="sigmoid"))
    torch.testing.assert_close(twice(linear), exact)
    with pytest.raises(RuntimeError, match="setup_context"):
        twice(kernels.glu)
