"""Medusa heads: how they begin, and the files of the reference implementation."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ligermodels.errors import CheckpointError, InputError
from ligermodels.training import add_medusa, load_medusa, save_medusa
from tests.recipes import losses


def with_heads(family="Llama", heads=3, layers=1, *, freeze=True, **changes):
    """A model in fp64 with heads that are drawn at random."""
    model = losses.model(family, **changes)
    torch.manual_seed(2)
    for parameter in add_medusa(model, heads, layers, freeze=freeze).parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def test_new_heads_are_the_models_own():
    model = losses.model("Gemma2").eval()
    ids = torch.arange(12)[None]
    expected = model(ids).logits
    heads = add_medusa(model, 2, 2)
    x = model(ids, return_logits=False).last_hidden_state
    for logits in heads(x):
        torch.testing.assert_close(logits, expected)
    assert not any(p.requires_grad for name, p in model.named_parameters() if "medusa" not in name)
    with pytest.raises(InputError, match="has heads already"):
        add_medusa(model)
    with pytest.raises(InputError, match="heads=0"):
        add_medusa(losses.model(), 0)


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.linear, self.act = nn.Linear(size, size), nn.SiLU()

    def forward(self, x):
        return x + self.act(self.linear(x))


def reference(size, vocab, heads, layers):
    """As the reference implementation builds `medusa_head`: the blocks of a head are one."""
    return nn.ModuleList(
        nn.Sequential(*[Block(size)] * layers, nn.Linear(size, vocab, bias=False)) for _ in range(heads)
    ).double()


@pytest.mark.parametrize("layers", [1, 2])
def test_files_are_those_of_the_reference(tmp_path, layers):
    """Ours in its modules, and its .pt in ours: the same logits."""
    model, x = with_heads(layers=layers), torch.randn(5, 32, dtype=torch.float64)
    if layers == 2:
        for head in model.medusa:
            head[1].load_state_dict(head[0].state_dict())  # which the reference cannot tell apart
    save_medusa(model, tmp_path / "ours", base="some/model")
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config == {"medusa_num_heads": 3, "medusa_num_layers": layers, "base_model_name_or_path": "some/model"}
    theirs, tensors = reference(32, 61, 3, layers), load_file(tmp_path / "ours" / "medusa_lm_head.safetensors")
    assert tensors["0.0.linear.weight"].shape == (32, 32) and tensors[f"2.{layers}.weight"].shape == (61, 32)
    theirs.load_state_dict(tensors)
    for ours, head in zip(load_medusa(model, tmp_path / "ours")(x), theirs, strict=True):
        torch.testing.assert_close(ours, head(x))
    shutil.copytree(tmp_path / "ours", tmp_path / "theirs")
    (tmp_path / "theirs" / "medusa_lm_head.safetensors").unlink()
    drawn = reference(32, 61, 3, layers)
    torch.save(drawn.state_dict(), tmp_path / "theirs" / "medusa_lm_head.pt")
    with pytest.raises(CheckpointError, match="allow_pickle=True"):
        load_medusa(model, tmp_path / "theirs")
    for ours, head in zip(load_medusa(model, tmp_path / "theirs", allow_pickle=True)(x), drawn, strict=True):
        torch.testing.assert_close(ours, head(x))
    with pytest.raises(CheckpointError, match=r"heads of another model: 0.0.linear.bias is \(32,\), and .* \(16,\)"):
        load_medusa(losses.model(hidden_size=16), tmp_path / "ours")
    with pytest.raises(CheckpointError, match="lacks medusa_num_heads"):
        load_medusa(model, tmp_path)
