"""Cross entropy: metrics, divisors, ignored labels."""

import pytest
import torch
from torch import Tensor

from ligermodels.kernels import CrossEntropyOutput, cross_entropy, cross_entropy_reference
from tests.kernels.cases import IGNORE
from tests.kernels.judge import assert_same

METRICS = {
    "return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True, "return_entropy": True,
}  # fmt: skip


def some_labels(shape, vocab, device="cpu", ignored=0.3):
    labels = torch.randint(0, vocab, shape, device=device)
    return labels.masked_fill(torch.rand(shape, device=device) < ignored, IGNORE)


def results(output, *inputs: Tensor) -> dict[str, Tensor]:
    """All outputs of a call by name, and the gradient of its loss for each of `inputs`."""
    found = {"loss": output} if isinstance(output, Tensor) else output._asdict()
    found = {name: value for name, value in found.items() if value is not None}
    gradients = torch.autograd.grad(found["loss"].sum(), inputs)
    return found | {f"grad{i}": g for i, g in enumerate(gradients)}


def test_metrics_of_the_reference_by_hand():
    logits = torch.randn(9, 11, dtype=torch.float64, requires_grad=True)
    labels = some_labels((9,), 11)
    valid = labels != IGNORE
    options = dict(softcap=2.0, z_loss=0.1, token_scaling=True, num_items_in_batch=13)
    out = cross_entropy_reference(logits, labels, **options, **METRICS)
    loss, z_part, hits, entropy = 0.0, 0.0, 0, 0.0
    for row, label in zip(logits[valid], labels[valid], strict=True):
        z = 2.0 * torch.tanh(row / 2.0)
        p = torch.softmax(z, 0)[label]
        entropy += torch.distributions.Categorical(logits=z.detach()).entropy() / valid.sum()
        z_part = z_part + p.detach() * 0.1 * torch.log(torch.exp(z).sum()) ** 2 / 13
        loss = loss - p.detach() * torch.log(p) / 13
        hits += int(row.argmax() == label)
    accuracy, predicted = torch.as_tensor(hits / valid.sum()), logits.argmax(-1).where(valid, -1)
    expected = CrossEntropyOutput(loss + z_part, z_part.detach(), accuracy, predicted, entropy)
    assert_same(results(out, logits), results(expected, logits), 1e-12, 1e-14)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ignored_rows(device, poison, reduction):
    """NaN logits at ignored labels reach nothing; when all labels are ignored, the loss is 0."""
    logits = torch.randn(4, 6, device=device)
    logits[1] = torch.nan
    logits.requires_grad_()
    labels = torch.tensor([1, IGNORE, IGNORE, 5], device=device)
    keep = labels != IGNORE
    part = logits.detach()[keep].requires_grad_()
    options = {"reduction": reduction, "z_loss": 0.1, "label_smoothing": 0.1}
    actual = results(cross_entropy(logits, labels, **options), logits)
    expected = results(cross_entropy_reference(part, labels[keep], **options), part)
    assert not actual["grad0"][~keep].any()
    actual["grad0"] = actual["grad0"][keep]
    if reduction == "none":
        assert not actual["loss"][~keep].any()
        actual["loss"] = actual["loss"][keep]
    assert_same(actual, expected, 1e-5, 1e-7)
    nothing, weight = torch.full_like(labels, IGNORE), torch.rand(6, device=device)
    for op in (cross_entropy, cross_entropy_reference):
        found = results(op(logits, nothing, class_weight=weight, **options, **METRICS), logits)
        assert (found.pop("predicted_tokens") == -1).all() and not any(value.any() for value in found.values())


def test_argmax_is_the_first_of_equals(device):
    logits = torch.zeros(3, 70, device=device)
    logits[0, [20, 50]] = 1.0
    logits[1, 69] = 1.0
    out = cross_entropy(logits, torch.tensor([20, 3, 0], device=device), **METRICS)
    assert out.predicted_tokens.tolist() == [20, 69, 0] and out.predicted_tokens.dtype == torch.int64
    several_tiles = cross_entropy(torch.zeros(1, 20000, device=device), torch.tensor([0], device=device), **METRICS)
    assert several_tiles.predicted_tokens.item() == 0
    assert out.token_accuracy.item() == pytest.approx(2 / 3) and out.token_accuracy.dtype == torch.float32
