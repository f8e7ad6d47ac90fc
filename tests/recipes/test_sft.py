"""The losses of sft beside plain formulas."""

import pytest
import torch
import torch.nn.functional as F

from ligermodels.errors import InputError
from ligermodels.recipes.sft import dft_loss
from tests.recipes import losses
from tests.recipes.runs import FEW, metrics, train


def test_dft_is_cross_entropy_times_the_probability():
    """The probability gets no gradient. An evaluation gives the cross entropy."""
    for family in ("Llama", "Gemma2"):
        model = losses.model(family)
        packed, padded = losses.batches(9, 14, 5)
        count, labels = torch.tensor(7.0), padded["labels"][:, 1:].flatten()
        logits = model(padded["input_ids"], attention_mask=padded["attention_mask"]).logits[:, :-1].flatten(0, 1)
        each = F.cross_entropy(logits, labels, reduction="none")
        expected = (each * (-each.detach()).exp() * (labels != -100)).sum() / 7
        gradients = losses.gradients(model, expected)
        for batch in (packed, padded):
            loss = dft_loss(model, batch, count)
            torch.testing.assert_close(loss, expected)
            losses.assert_same(losses.gradients(model, loss), gradients)
        model.eval()
        with torch.no_grad():
            evaluated = dft_loss(model, packed | {"return_logits": False}, count)
        torch.testing.assert_close(evaluated, each.sum().detach() / 7)


def test_a_loss_function_that_cannot_be_called_is_refused():
    model, ids = losses.model(), torch.arange(9)[None]
    for given in ({}, {"labels": ids, "return_logits": True}, {"labels": ids, "return_logprobs": True}):
        with pytest.raises(InputError, match="loss_function needs labels, neither logits"):
            model(ids, loss_function=print, **given)
    model.lm_head = torch.nn.Linear(32, 61).double()
    with pytest.raises(InputError, match="a head that no adapter wraps"):
        model(ids, labels=ids, loss_function=print)


def test_a_run_with_dft(home):
    for out, more in (("nll", ()), ("dft", ("--loss-type", "dft"))):
        assert train(home, out, *FEW, *more) == 0
    first = [metrics(home / out, "eval_loss")[0] for out in ("nll", "dft")]
    assert first[0] == first[1]
    assert metrics(home / "dft")[1] < 0.5 * metrics(home / "nll")[1]
    evaluated = metrics(home / "dft", "eval_loss")
    assert evaluated[6] < evaluated[0]
