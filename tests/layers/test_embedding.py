import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ligermodels.layers as L
from ligermodels.errors import InputError

IDS = torch.tensor([[1, 3, 1], [0, 10, 1]])


@pytest.mark.parametrize("scale", [None, 48**0.5])
@pytest.mark.parametrize("padding_idx", [None, 3, -1])
@pytest.mark.parametrize("ids", [IDS, IDS.int(), IDS[:0], IDS[0, 0]], ids=["int64", "int32", "none", "one"])
def test_is_torch_embedding_times_the_scale(device, scale, padding_idx, ids):
    table = L.Embedding(11, 48, embed_scale=scale, padding_idx=padding_idx).to(device)
    ids, weights = ids.to(device), torch.randn(*ids.shape, 48, device=device)
    y = table(ids)
    (grad,) = torch.autograd.grad((y * weights).sum(), table.weight)
    plain = table.weight.detach().clone().requires_grad_()
    expected = F.embedding(ids, plain, padding_idx) * (1 if scale is None else scale)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(grad, torch.autograd.grad((expected * weights).sum(), plain)[0])


def test_is_an_nn_embedding_with_one_parameter():
    table = L.Embedding(11, 4, padding_idx=3, embed_scale=2.0)
    assert isinstance(table, nn.Embedding) and list(dict(table.named_parameters())) == ["weight"]
    assert (table.weight[3] == 0).all() and 0.005 < L.Embedding(100, 50).weight.std() < 0.05
    assert repr(table) == "Embedding(11, 4, padding_idx=3, embed_scale=2.0)"


def test_a_frozen_table_keeps_nothing(device):
    table = L.Embedding(11, 4).to(device).requires_grad_(False)
    assert not table(IDS.to(device)).requires_grad


def test_a_tied_head_adds_its_gradient(device):
    """The head's part of the gradient falls on every row, the table's on those that were read."""
    table = L.Embedding(11, 4, embed_scale=3.0).to(device)
    owner = torch.nn.Module()
    owner.embed_tokens = table
    head = L.LMHead(table.embedding_dim, table.num_embeddings, tied_to=owner)
    ids = IDS.to(device)
    head(table(ids)).square().sum().backward()
    plain = table.weight.detach().clone().requires_grad_()
    F.linear(F.embedding(ids, plain) * 3.0, plain).square().sum().backward()
    torch.testing.assert_close(table.weight.grad, plain.grad)


def test_a_replaced_weight_is_read():
    table = L.Embedding(3, 4)
    table.weight = nn.Parameter(torch.arange(12.0).view(3, 4))
    assert torch.equal(table(torch.tensor([2, 0])), torch.tensor([[8.0, 9, 10, 11], [0, 1, 2, 3]]))


@pytest.mark.parametrize("ids, message", [([11], "from 11 to 11"), ([-100, 2], "from -100 to 2")])
def test_ids_without_a_row(ids, message):
    with pytest.raises(InputError, match=message):
        L.Embedding(11, 4)(torch.tensor(ids))


@pytest.mark.gpu
def test_ids_without_a_row_are_nan_on_a_gpu():
    table = L.Embedding(11, 4, embed_scale=2.0).cuda()
    y = table(torch.tensor([11, 2], device="cuda"))
    assert y[0].isnan().all() and torch.equal(y[1], table.weight[2] * 2)


@pytest.mark.parametrize("ids", [torch.tensor([1.0]), [1, 2], torch.tensor([1], device="meta")])
def test_what_is_no_id(ids):
    with pytest.raises(InputError, match="ids are"):
        L.Embedding(11, 4)(ids)
