"""The divergence modules: torch's interface where torch has one, and every option handed on."""

import inspect

import pytest
import torch

from ligermodels.kernels.jsd import jsd
from ligermodels.kernels.kl_div import kl_div
from ligermodels.kernels.linear_jsd import linear_jsd
from ligermodels.layers.losses import JSDLoss, KLDivLoss, LinearJSDLoss


def log_probabilities():
    return [torch.randn(4, 7).log_softmax(-1) for _ in range(2)]


def heads(dtype=torch.float32):
    """student_x, student_weight, teacher_x, teacher_weight, labels."""
    tensors = [torch.randn(5, 6), torch.randn(9, 6), torch.randn(5, 3), torch.randn(11, 3)]
    return [t.to(dtype).requires_grad_(i < 2) for i, t in enumerate(tensors)] + [torch.tensor([1, -100, 8, 0, 3])]


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("reduction", ["none", "mean", "batchmean", "sum"])
@pytest.mark.parametrize("log_target", [False, True])
def test_kl_div_loss_takes_the_place_of_torchs(reduction, log_target):
    x, t = log_probabilities()
    t = t if log_target else t.exp()
    x.requires_grad_()
    ours, torchs = KLDivLoss(reduction, log_target), torch.nn.KLDivLoss(reduction=reduction, log_target=log_target)
    upstream = torch.rand_like(torchs(x, t))
    for actual, expected in zip(
        (ours(x, t), *torch.autograd.grad(ours(x, t), x, upstream)),
        (torchs(x, t), *torch.autograd.grad(torchs(x, t), x, upstream)),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected)
    assert KLDivLoss()._options == {"reduction": torch.nn.KLDivLoss().reduction, "log_target": False}


def test_jsd_loss_hands_its_options_on():
    x, t = log_probabilities()
    labels = torch.tensor([1, 2, 6, 2])
    options = {"beta": 0.2, "ignore_index": 2, "reduction": "none"}
    loss = JSDLoss(0.2, ignore_index=2, reduction="none")(x, t, labels)
    assert torch.equal(loss, jsd(x, t, labels=labels, **options)) and loss.tolist()[1] == loss.tolist()[3] == 0
    assert torch.equal(JSDLoss()(x, t), jsd(x, t))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"beta": 0.1, "temperature": 2.0, "weight_hard": 0.3, "weight_soft": 0.7, "reduction": "sum"},
        {
            "ignore_index": 8,
            "weight_hard": 1.0,
            "return_soft_hard_loss": True,
            "accum_dtype": None,
            "workspace_bytes": 9,
        },
    ],
)
def test_linear_jsd_loss_hands_its_options_on(options):
    *tensors, labels = heads()
    labels = labels.where(labels >= 0, 8) if "ignore_index" in options else labels
    biases = {"student_bias": torch.randn(9), "teacher_bias": torch.randn(11)}
    actual = LinearJSDLoss(**options)(*tensors, labels, **biases, num_valid=5)
    expected = linear_jsd(*tensors, labels=labels, **biases, num_valid=5, **options)
    assert type(actual) is type(expected)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    changed = LinearJSDLoss(**options)(*tensors, labels)
    assert not torch.equal(changed[0] if isinstance(changed, tuple) else changed, torch.as_tensor(actual[0])
                           if isinstance(actual, tuple) else actual)  # fmt: skip


@pytest.mark.parametrize(("module", "function"), [(KLDivLoss, kl_div), (JSDLoss, jsd), (LinearJSDLoss, linear_jsd)])
def test_defaults_are_those_of_the_function(module, function):
    """Every option of the function is one of the module's constructor or of its forward, with the same default."""
    options = inspect.signature(function).parameters.values()
    options = {p.name: p.default for p in options if p.kind is p.KEYWORD_ONLY}
    offered = inspect.signature(module).parameters | inspect.signature(module.forward).parameters
    assert options == {name: offered[name].default for name in options}
