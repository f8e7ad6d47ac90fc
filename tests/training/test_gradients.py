"""accumulate_in_place over whole models: marked or not, the gradients are the same."""

import copy

import pytest
import torch
from torch import nn

import ligermodels
from ligermodels.errors import InputError
from ligermodels.kernels._gradients import MARK, is_marked
from ligermodels.training.gradients import accumulate_in_place
from tests.parallel.train import CONFIG


def gradients(model):
    """By name, after some micro-batches."""
    device = model.get_input_embeddings().weight.device
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    for _ in range(3):
        ids = torch.randint(97, (2, 9), device=device)
        (model(ids, labels=ids).loss / 3).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_marks_and_takes_them_back():
    model = ligermodels.Llama.from_config(CONFIG, dtype=torch.float32, seed=0)
    accumulate_in_place(model)
    assert all(is_marked(p) for p in model.parameters())
    assert not any(is_marked(p) for p in copy.deepcopy(model).parameters())
    assert model.state_dict().keys() == ligermodels.Llama.from_config(CONFIG).state_dict().keys()
    accumulate_in_place(model, on=False)
    assert not any(hasattr(p, MARK) for p in model.parameters())


def test_sharded_parameters_are_refused():
    class Shard(nn.Parameter):
        """As a DTensor is, which needs a process group."""

    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    model[1].weight = Shard(torch.randn(2, 3))
    with pytest.raises(InputError, match=r"1\.weight is a Shard.*leave the call out"):
        accumulate_in_place(model)
    assert not any(hasattr(p, MARK) for p in model.parameters())
    model[1].weight.requires_grad_(False)
    accumulate_in_place(model)
    assert is_marked(model[0].weight) and not is_marked(model[1].weight)


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["none", "mlp", "block"])
@pytest.mark.parametrize("tied", [True, False])
def test_on_a_gpu_as_autograd(recompute, tied):
    """fp32, so that what differs is the order of sums: 1e-5 of the largest element of each gradient."""
    model = ligermodels.Llama.from_config(
        {**CONFIG, "tie_word_embeddings": tied}, dtype=torch.float32, device="cuda", seed=0
    )
    expected = {name: grad.clone() for name, grad in gradients(model).items()}
    accumulate_in_place(model)
    if recompute != "none":
        model.gradient_checkpointing_enable({"recompute": recompute})
    for name, grad in gradients(model).items():
        assert (grad - expected[name]).abs().max() <= 1e-5 * expected[name].abs().max(), name
