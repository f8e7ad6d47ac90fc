"""MuonAdamW beside torch.optim.Muon and AdamW, its states, and what it refuses."""

import copy

import pytest
import torch
from torch import nn

from ligermodels import InputError
from ligermodels.training import AdamW, MuonAdamW, matrices_of
from tests.recipes import losses


def groups(matrices, others, **options):
    return [dict(params=others, **options), dict(params=matrices, muon=True, **options)]


def net(dtype=torch.float32):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, 20), nn.LayerNorm(20), nn.Linear(20, 8)).to(dtype)


def split(model):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    return matrices, [p for p in model.parameters() if p.dim() != 2]


def gradients(model, step):
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def test_steps_are_those_of_torch():
    """With clipping: the norm is that of all gradients, matrices or not."""
    ours, theirs = net(), net()
    optimizer = MuonAdamW(groups(*split(ours), weight_decay=0.1), lr=0.01, max_grad_norm=1.0)
    matrices, others = split(theirs)
    muon = torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, lr=0.01, weight_decay=0.1)
    for step in range(5):
        gradients(ours, step), gradients(theirs, step)
        for group in (*optimizer.param_groups, *muon.param_groups, *adamw.param_groups):
            group["lr"] = 0.01 / (1 + step)
        before = [p.grad.clone() for p in ours.parameters()]
        optimizer.step()
        assert all(torch.equal(p.grad, grad) for p, grad in zip(ours.parameters(), before, strict=True))
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        muon.step(), adamw.step()
        torch.testing.assert_close(optimizer.grad_norm, norm)
    for x, y in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)  # Newton-Schulz in bf16 amplifies the factor's last bit
    assert any((x - y).abs().max() > 0.01 for x, y in zip(ours.parameters(), net().parameters(), strict=True))


def test_weights_in_bf16_have_fp32_values_that_keep_small_steps():
    model, exact = net(torch.bfloat16), net(torch.bfloat16).float()
    optimizer = MuonAdamW(groups(*split(model), weight_decay=0.0), lr=1e-5, master_weights=True)
    reference = MuonAdamW(groups(*split(exact), weight_decay=0.0), lr=1e-5)
    for step in range(8):
        gradients(model, step)
        for p, q in zip(exact.parameters(), model.parameters(), strict=True):
            p.grad = q.grad.float()
        optimizer.step(), reference.step()
    for p, q in zip(*map(lambda x: split(x)[0], (model, exact)), strict=True):
        assert torch.equal(optimizer.master(p), q) and torch.equal(p, q.bfloat16())
        assert sum(x.nbytes for x in optimizer.state[p].values()) == 8 * p.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_state_continues_with_the_same_bits(dtype):
    one = net(dtype)
    optimizer = MuonAdamW(groups(*split(one)), lr=0.01, max_grad_norm=1.0, master_weights=True)
    for step in range(6):
        if step == 3:
            other, state = copy.deepcopy(one), copy.deepcopy(optimizer.state_dict())
        gradients(one, step)
        optimizer.step()
    again = MuonAdamW(groups(*split(other)), lr=0.5, max_grad_norm=1.0, master_weights=True)
    again.load_state_dict(state)
    for step in range(3, 6):
        gradients(other, step)
        again.step()
    assert all(torch.equal(x, y) for x, y in zip(one.parameters(), other.parameters(), strict=True))


def test_which_weights_are_matrices():
    """Not the embedding, the head, norms, routers and stacked experts, nor what is frozen."""
    model = losses.model("Qwen3Moe")  # its block 0 is dense
    model.decoder.layers[0].mlp.up_proj.weight.requires_grad_(False)
    names = {id(p): name for name, p in model.named_parameters()}
    found = {names[id(p)].removeprefix("model.layers.") for p in matrices_of(model)}
    attention = {f"{i}.self_attn.{x}_proj.weight" for i in range(len(model.decoder.layers)) for x in "qkvo"}
    assert found == attention | {"0.mlp.gate_proj.weight", "0.mlp.down_proj.weight"}


def test_what_is_refused():
    model = net()
    matrices, others = split(model)
    with pytest.raises(InputError, match=r"a weight of shape \(20,\), torch.float32, is no matrix"):
        MuonAdamW([dict(params=others, muon=True)])
    for name in ("capturable", "step_in_backward"):
        with pytest.raises(InputError, match=f"{name}=True is AdamW's alone"):
            MuonAdamW(groups(matrices, others), **{name: True})
    optimizer, plain = MuonAdamW(groups(matrices, others)), AdamW(model.parameters())
    gradients(model, 0)
    optimizer.step(), plain.step()
    with pytest.raises(InputError, match="expected momentum_buffer"):
        state = optimizer.state_dict()
        key = state["param_groups"][1]["params"][0]
        optimizer.load_state_dict({**state, "state": {**state["state"], key: {"exp_avg": torch.ones(1)}}})
    with pytest.raises(InputError, match="expected step, exp_avg and exp_avg_sq"):
        plain.load_state_dict(
            {"state": optimizer.state_dict()["state"], "param_groups": plain.state_dict()["param_groups"]}
        )
