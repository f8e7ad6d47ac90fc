"""AdamW with moments in 8 bits beside that of bitsandbytes."""

import pytest
import torch
from torch import nn

from ligermodels.training import AdamW

bitsandbytes = pytest.importorskip("bitsandbytes")
SHAPE, STEPS, RATE = (32, 256), 200, 1e-3


def gradients():
    """Noise around slowly changing means; rows and columns have scales of their own, over three decades."""
    torch.manual_seed(0)
    scales = torch.exp(torch.randn(SHAPE[0], 1) + 1.5 * torch.randn(SHAPE[1])) * 1e-3
    mean = torch.randn(SHAPE) * 0.3
    for t in range(STEPS):
        yield (mean * torch.cos(torch.tensor(t / 40)) + torch.randn(SHAPE)) * scales * (10 if t < 20 else 1)


def updates(optimizer_of):
    """Those of all steps, in learning rates, [STEPS, *SHAPE], and the optimizer's state."""
    torch.manual_seed(1)
    p = nn.Parameter(torch.randn(SHAPE))
    optimizer, found = optimizer_of([p]), []
    for grad in gradients():
        before, p.grad = p.detach().clone(), grad
        optimizer.step()
        found.append((p.detach() - before) / RATE)
    return torch.stack(found), optimizer.state[p]


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_updates_are_nearer_to_those_of_fp32_than_bitsandbytes(beta2):
    options = dict(lr=RATE, betas=(0.9, beta2), weight_decay=0.0)
    exact, _ = updates(lambda p: torch.optim.AdamW(p, **options))
    ours, state = updates(lambda p: AdamW(p, state_dtype=torch.uint8, **options))
    theirs, other = updates(lambda p: bitsandbytes.optim.AdamW8bit(p, **options))
    assert {state["exp_avg"].dtype, state["exp_avg_sq"].dtype, other["state1"].dtype} == {torch.uint8}
    errors = [((x - exact).norm() / exact.norm()).item() for x in (ours, theirs)]
    assert errors[0] < 0.12 and errors[0] < errors[1] / 2
    # Errors of single steps cancel: the way that weights go is as near.
    ways = [((x - exact).sum(0).norm() / exact.sum(0).norm()).item() for x in (ours, theirs)]
    assert ways[0] < ways[1] / 1.5, ways
