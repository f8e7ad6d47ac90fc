"""The embedding, the head tied to it or not, and the loss modules: torch's interfaces, every option handed on."""

import copy
import inspect
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ligermodels.layers as L
from ligermodels.errors import InputError
from ligermodels.kernels.loss.cross_entropy import CrossEntropyOutput, cross_entropy
from ligermodels.kernels.loss.jsd import jsd
from ligermodels.kernels.loss.linear_cross_entropy import linear_cross_entropy
from ligermodels.kernels.loss.linear_jsd import linear_jsd


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = L.Embedding(13, 6, embed_scale=3.0)
        self.lm_head = L.LMHead(6, 13, tied_to=self)

    def forward(self, ids, labels=None):
        return self.lm_head(self.embed_tokens(ids), labels)


def through_a_file(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def with_another_table(model):
    """As FSDP and loading do: the parameter becomes another, on the module that owns it."""
    model.embed_tokens.weight = nn.Parameter(torch.randn(13, 6))
    return model


@pytest.mark.parametrize("change", [
    lambda model: model,
    copy.deepcopy,
    through_a_file,
    lambda model: model.to("meta").to_empty(device="cpu"),
    with_another_table,
], ids=["as built", "deepcopy", "pickle", "to_empty", "replaced"])  # fmt: skip
def test_a_tie_holds(change):
    model = change(Tied())
    assert list(model.state_dict()) == ["embed_tokens.weight"] == [name for name, _ in model.named_parameters()]
    assert [name for name, _ in model.named_modules()] == ["", "embed_tokens", "lm_head"]
    assert model.lm_head.weight is model.embed_tokens.weight and model.lm_head.bias is None
    nn.init.normal_(model.embed_tokens.weight)
    ids = torch.randint(13, (2, 3))
    table = model.embed_tokens.weight.detach().clone().requires_grad_()
    model(ids).square().sum().backward()
    F.linear(F.embedding(ids, table) * 3.0, table).square().sum().backward()
    torch.testing.assert_close(model.embed_tokens.weight.grad, table.grad)


def test_a_tied_head_without_a_table_says_so():
    model = Tied()
    model.embed_tokens.to("meta")
    with pytest.raises(InputError, match="on the meta device; load the model"):
        model.lm_head(torch.randn(2, 6))
    assert model.lm_head(torch.randn(2, 6, device="meta")).shape == (2, 13)


def make_head(kind):
    return Tied().lm_head if kind == "tied" else L.LMHead(6, 13, bias=kind == "bias")


@pytest.mark.parametrize("kind", ["plain", "bias", "tied"])
@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("given", [False, True])
def test_head_gives_logits_or_the_loss(kind, softcap, given):
    """given: with another weight than its own."""
    lm_head = make_head(kind)
    nn.init.normal_(lm_head.weight)
    weight = torch.randn(13, 6, requires_grad=True) if given else lm_head.weight
    settings = {"softcap": softcap, "weight": weight if given else None}
    x = torch.randn(2, 5, 6, requires_grad=True)
    labels = torch.randint(13, (2, 5))
    labels[0, 1] = -100
    logits = F.linear(x, weight, lm_head.bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    torch.testing.assert_close(lm_head(x, **settings), logits)

    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    leaves = [x, weight] if lm_head.bias is None else [x, weight, lm_head.bias]
    for options, expected in [
        ({}, total / 9),
        ({"num_items_in_batch": 20}, total / 20),
        ({"num_valid": 9}, total / 9),
    ]:
        loss = lm_head(x, labels=labels, **settings, **options)
        torch.testing.assert_close(loss, expected)
        grads = [torch.autograd.grad(y, leaves, retain_graph=True) for y in (loss, expected)]
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("tied", [False, True])
def test_head_gives_logprobs(tied):
    """Through the module itself, so that hooks on it see the weight being used; -nll is the same number."""
    lm_head = make_head("tied" if tied else "bias")
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


def test_options_that_do_not_go_together():
    lm_head, call = L.LMHead(6, 13), (torch.randn(2, 6), torch.tensor([0, 1]))
    with pytest.raises(InputError, match="z_loss are no options of linear_logprobs"):
        lm_head(*call, return_logprobs=True, z_loss=0.1)
    with pytest.raises(InputError, match="num_items_in_batch=-1 must be"):
        lm_head(*call, num_items_in_batch=-1)


def test_cross_entropies_hand_their_options_on():
    """And know all of the op's."""
    x, weight, labels = torch.randn(6, 5), torch.randn(9, 5), torch.tensor([0, 1, 3, 8, 7, 5])
    options = dict(ignore_index=7, label_smoothing=0.1, z_loss=0.01, reduction="sum", token_scaling=True, softcap=5.0)
    options |= {name: True for name in inspect.signature(cross_entropy).parameters if name.startswith("return_")}
    fused, rest = {"accum_dtype": None, "workspace_bytes": 4096}, {"class_weight": torch.rand(9)}
    known = {*options, *fused, *rest, "num_items_in_batch", "num_valid", "bias"}
    assert {"x", "weight", "labels", *known} == set(inspect.signature(linear_cross_entropy).parameters)
    expected = linear_cross_entropy(x, weight, labels, **options, **fused, **rest)
    module = L.LinearCrossEntropyLoss(rest["class_weight"], **options, **fused)
    lm_head, plain = L.LMHead(5, 9), L.CrossEntropyLoss(rest["class_weight"], **options)
    for found in (
        module(x, weight, labels),
        lm_head(x, labels, weight=weight, **options, **fused, **rest),
        plain(F.linear(x, weight), labels),
    ):
        torch.testing.assert_close(tuple(found), tuple(expected))
    options["reduction"] = "mean"
    expected = linear_cross_entropy(x, weight, labels, **options, num_items_in_batch=30)
    found = L.LinearCrossEntropyLoss(**options)(x, weight, labels, num_items_in_batch=30, num_valid=5)
    torch.testing.assert_close(tuple(found), tuple(expected))


def test_cross_entropy_loss_takes_the_place_of_torchs():
    """weight, ignore_index, reduction, label_smoothing by position, as in torch without its two retired arguments."""
    logits, labels, weight = torch.randn(6, 9), torch.tensor([0, 1, 3, 8, 3, 5]), torch.rand(9)
    for reduction in ("mean", "sum", "none"):
        expected = F.cross_entropy(logits, labels, weight, ignore_index=3, reduction=reduction, label_smoothing=0.2)
        torch.testing.assert_close(L.CrossEntropyLoss(weight, 3, reduction, 0.2)(logits, labels), expected)
        linear = L.LinearCrossEntropyLoss(weight, 3, reduction, 0.2)
        torch.testing.assert_close(linear(torch.eye(6), logits.T, labels), expected)
    assert isinstance(L.CrossEntropyLoss(weight=weight, return_token_accuracy=True)(logits, labels), CrossEntropyOutput)


def test_divergences_hand_their_options_on():
    x, t = (torch.randn(4, 7).log_softmax(-1) for _ in range(2))
    for reduction in ("none", "batchmean"):
        torch.testing.assert_close(
            L.KLDivLoss(reduction, True)(x, t), F.kl_div(x, t, reduction=reduction, log_target=True)
        )
    labels = torch.tensor([1, 2, 6, 2])
    options = {"beta": 0.2, "ignore_index": 2, "reduction": "none"}
    loss = L.JSDLoss(**options)(x, t, labels)
    assert torch.equal(loss, jsd(x, t, labels=labels, **options)) and loss.tolist()[1] == loss.tolist()[3] == 0
    heads = torch.randn(4, 6), torch.randn(9, 6), torch.randn(4, 3), torch.randn(11, 3)
    options = {"beta": 0.1, "temperature": 2.0, "weight_hard": 0.3, "weight_soft": 0.7, "reduction": "sum",
               "ignore_index": 2, "return_soft_hard_loss": True, "accum_dtype": None, "workspace_bytes": 9}  # fmt: skip
    rest = {"student_bias": torch.randn(9), "teacher_bias": torch.randn(11), "num_valid": 4}
    actual = L.LinearJSDLoss(**options)(*heads, labels, **rest)
    assert all(map(torch.equal, actual, linear_jsd(*heads, labels=labels, **rest, **options)))
    assert not torch.equal(actual[0], L.LinearJSDLoss()(*heads, labels))
