"""The loss modules beside torch's, and the head that scores labels instead of losing them."""

import inspect

import pytest
import torch
import torch.nn.functional as F

import ligermodels.layers as L
from ligermodels.errors import InputError
from ligermodels.kernels.linear_logprobs import linear_logprobs


def test_order_of_torch():
    """weight, ignore_index, reduction, label_smoothing by position, as in torch without its two retired arguments."""
    torchs = [
        name
        for name in inspect.signature(torch.nn.CrossEntropyLoss.__init__).parameters
        if name not in ("size_average", "reduce")
    ]
    ours = [n for n, p in inspect.signature(L.CrossEntropyLoss.__init__).parameters.items() if p.kind != p.KEYWORD_ONLY]
    assert ours == torchs
    logits, labels, weight = torch.randn(6, 9), torch.tensor([0, 1, 3, 8, 3, 5]), torch.rand(9)
    for reduction in ("mean", "sum", "none"):
        expected = F.cross_entropy(logits, labels, weight, ignore_index=3, reduction=reduction, label_smoothing=0.2)
        torch.testing.assert_close(L.CrossEntropyLoss(weight, 3, reduction, 0.2)(logits, labels), expected)


@pytest.mark.parametrize("tied", [False, True])
def test_head_gives_logprobs(tied):
    """Through the module itself, so that hooks on it see the weight being used; -nll is the same number."""
    owner = torch.nn.Module()
    owner.embed_tokens = L.Embedding(13, 6)
    lm_head = L.LMHead(6, 13, bias=not tied, tied_to=owner if tied else None)
    x, labels = torch.randn(2, 5, 6, requires_grad=True), torch.randint(13, (2, 5))
    labels[0, 1] = -100
    seen = []
    lm_head.register_forward_pre_hook(lambda module, args: seen.append(module))
    wanted = dict(return_logprobs=True, return_entropy=True, return_logits_mean=True)
    out = lm_head(x, labels, softcap=2.0, temperature=0.5, **wanted)
    logits = lm_head(x, softcap=2.0)
    assert seen == [lm_head] * 2
    p = torch.distributions.Categorical(logits=logits / 0.5)
    valid = labels != -100
    torch.testing.assert_close(out.logprobs, p.log_prob(labels.clamp(min=0)).where(valid, 0))
    torch.testing.assert_close(out.entropy, p.entropy().where(valid, 0))
    torch.testing.assert_close(out.logits_mean, logits.mean(-1).where(valid, 0))
    plain = lm_head(x, labels, softcap=2.0, return_logprobs=True)
    torch.testing.assert_close(plain, -lm_head(x, labels, softcap=2.0, reduction="none").view(2, 5))
    options = {"bias": lm_head.bias, "softcap": 2.0}
    torch.testing.assert_close(plain, linear_logprobs(x, lm_head.weight, labels, **options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"return_logprobs": True, "z_loss": 0.1}, "z_loss: options of the loss"),
        ({"return_logprobs": True, "class_weight": torch.ones(13), "reduction": "sum"}, "class_weight, reduction"),
        ({"return_logprobs": True, "num_items_in_batch": 3}, "num_items_in_batch"),
        ({"temperature": 0.5}, "return_logprobs=True"),
        ({"return_logits_mean": True}, "return_logprobs=True"),
    ],
)
def test_options_that_do_not_go_together(options, message):
    with pytest.raises(InputError, match=message):
        L.LMHead(6, 13)(torch.randn(2, 6), torch.tensor([0, 1]), **options)
