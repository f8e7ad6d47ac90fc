import copy
import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ligermodels.checkpoint.weights import same_bits
from ligermodels.errors import InputError
from ligermodels.training.adamw import AdamW

BF16 = dict(dtype=torch.bfloat16)
EXACT = dict(master_weights=True, state_dtype=torch.float32)
EIGHT_BITS = dict(state_dtype=torch.uint8)


class Net(nn.Module):
    """Two blocks under checkpointing between a table and a head that are one parameter, and a weight never used."""

    def __init__(self, device, dtype=torch.float32, width=6, inner=9):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, inner), nn.Tanh(), nn.Linear(inner, width))
            for _ in "12"
        )
        self.idle = nn.Parameter(torch.ones(3))
        self.to(device, dtype)

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        logits = x @ self.table.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.roll(-1, 1).flatten())


def batches(device, count, seed=1):
    return torch.randint(11, (count, 4, 7), generator=torch.Generator().manual_seed(seed)).to(device)


def train(model, optimizer, ids, clip=None):
    for batch in ids:
        model(batch).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return model


def assert_same(a, b, *, ulps=0):
    """Parameters of two models, and what two optimizers hold."""
    for x, y in zip(a.parameters(), b.parameters(), strict=True):
        if ulps:
            torch.testing.assert_close(x, y, rtol=ulps * torch.finfo(x.dtype).eps, atol=ulps * torch.finfo(x.dtype).eps)
        else:
            assert torch.equal(x, y)


def groups(model):
    """Two groups with options of their own."""
    norms = [p for p in model.parameters() if p.dim() == 1]
    return [
        dict(params=[p for p in model.parameters() if p.dim() > 1], lr=3e-3, betas=(0.8, 0.95)),
        dict(params=norms, weight_decay=0.0, eps=1e-5),
    ]


@pytest.mark.parametrize("dtype, clip", [(torch.float32, 0.3), (torch.float64, None)])
def test_it_trains_as_torch_does(device, dtype, clip):
    ours, theirs = Net(device, dtype), Net(device, dtype)
    optimizer = AdamW(groups(ours), lr=1e-2, weight_decay=0.1, max_grad_norm=clip)
    other = torch.optim.AdamW(groups(theirs), lr=1e-2, weight_decay=0.1)
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(o, 1e-2, total_steps=9, cycle_momentum=True) for o in (optimizer, other)
    ]
    for batch in batches(device, 8):
        train(ours, optimizer, [batch])
        train(theirs, other, [batch], clip=clip)
        for scheduler in schedulers:
            scheduler.step()
    # Rounded elsewhere in a step, which eight steps carry on; a GPU's sums in the backward run in other orders as well.
    assert_same(ours, theirs, ulps=8 if device == "cpu" else 2000)
    assert ours.idle not in optimizer.state


def test_the_norm_of_the_last_step(device):
    model = Net(device, torch.bfloat16)
    model(batches(device, 1)[0]).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    exact = torch.stack([g.double().norm() for g in grads]).norm()
    optimizer = AdamW(model.parameters(), max_grad_norm=float("inf"))
    before = [g.clone() for g in grads]
    optimizer.step()
    assert all(map(torch.equal, before, grads))
    assert optimizer.grad_norm.dtype == torch.float32 and optimizer.grad_norm.device == grads[0].device
    assert optimizer.grad_norm.item() == pytest.approx(exact.item(), rel=1e-6)  # in bf16 it would be off by 1e-3
    model.table.weight.grad = torch.full_like(model.table.weight, float("inf"))
    model.table.weight.grad[0] = 1.0
    optimizer.max_grad_norm = 1.0
    optimizer.step()
    assert optimizer.grad_norm.isinf()
    assert model.table.weight[1:].isnan().all() and model.table.weight[0].isfinite().all()  # as clip_grad_norm_ does


def test_master_weights_are_fp32_training(device):
    """The same gradients: masters and moments are those of fp32 weights, to the bit."""
    low, full = Net(device, torch.bfloat16), Net(device, torch.bfloat16).float()
    a, b = AdamW(low.parameters(), 1e-2, **EXACT), AdamW(full.parameters(), 1e-2)
    for batch in batches(device, 4):
        low(batch).backward()
        for p, q in zip(low.parameters(), full.parameters(), strict=True):
            q.grad = None if p.grad is None else p.grad.float()
        a.step(), b.step(), a.zero_grad()
    for p, q in zip(low.parameters(), full.parameters(), strict=True):
        assert torch.equal(a.master(p), q) and torch.equal(p, q.bfloat16())
        assert p is low.idle or not torch.equal(a.master(p), p.float())


def test_checkpoints_of_torch_go_both_ways(device):
    ids = batches(device, 6)
    whole = Net(device)
    train(whole, torch.optim.AdamW(groups(whole), lr=1e-2), ids)
    model = Net(device)
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
    train(model, optimizer, ids[:2])
    for cls, piece in ((AdamW, ids[2:4]), (torch.optim.AdamW, ids[4:])):
        state = copy.deepcopy(optimizer.state_dict())
        optimizer = cls([dict(params=group["params"]) for group in groups(model)])
        optimizer.load_state_dict(state)
        train(model, optimizer, piece)
    assert_same(whole, model, ulps=8 if device == "cpu" else 2000)


def test_what_a_checkpoint_of_another_run_may_change(device):
    p = nn.Parameter(torch.ones(8, device=device, **BF16))
    p.grad = torch.ones_like(p)
    theirs = torch.optim.AdamW([p], lr=7e-3, fused=True)
    theirs.step()
    lr = torch.tensor(1.0, device=device)
    optimizer = AdamW([p], lr=lr, capturable=True, **EXACT)
    optimizer.load_state_dict(theirs.state_dict())
    state = optimizer.state[p]
    assert lr.item() == pytest.approx(7e-3) and optimizer.param_groups[0]["lr"] is lr
    assert state["exp_avg"].dtype == torch.float32 and state["remainder"].dtype == torch.bfloat16
    assert state["step"].device == p.device and state["step"] == 1 and optimizer.param_groups[0]["capturable"]
    optimizer.step()
    plain = AdamW([p], lr=1.0, state_dtype=torch.float32)
    plain.load_state_dict(optimizer.state_dict())
    assert set(plain.state[p]) == {"step", "exp_avg", "exp_avg_sq"} and plain.state[p]["step"].device.type == "cpu"
    assert torch.equal(plain.state[p]["exp_avg"], state["exp_avg"])  # fp32 all the way
    for wrong, message in (
        (torch.optim.AdamW([p], amsgrad=True), "amsgrad=True"),
        (torch.optim.SGD([p], momentum=0.9), "has momentum_buffer; expected step"),
    ):
        wrong.step()
        with pytest.raises(InputError, match=message):
            plain.load_state_dict(wrong.state_dict())


@pytest.mark.parametrize("options", [{}, dict(capturable=True), EIGHT_BITS], ids=str)
def test_steps_in_the_backward_are_the_same_steps(device, options):
    ids = batches(device, 3)
    one, two = (Net(device, torch.bfloat16, 64, 64) for _ in "12")
    for model in (one, two):
        model.blocks[0][1].weight.requires_grad_(False)
    train(one, AdamW(groups(one), 1e-2, **options), ids)
    optimizer = AdamW(groups(two)[:1], 1e-2, step_in_backward=True, **options)
    optimizer.add_param_group(groups(two)[1])
    alive = []
    for p in two.parameters():
        if p.requires_grad:
            p.register_hook(lambda _: alive.append(sum(q.grad is not None for q in two.parameters())))
    for batch in ids:
        two(batch).backward()
        assert all(p.grad is None for p in two.parameters())
        optimizer.step()
    assert max(alive) == 0  # whenever a gradient comes, all that came before are gone
    assert_same(one, two)


def test_steps_in_the_backward_do_not_hide_mistakes(device):
    model, ids = Net(device), batches(device, 1)[0]
    with pytest.raises(InputError, match="max_grad_norm needs the gradients of all"):
        AdamW(model.parameters(), max_grad_norm=1.0, step_in_backward=True)
    optimizer = AdamW(model.parameters(), step_in_backward=True)
    model(ids).backward()
    with pytest.raises(InputError, match="gets a second gradient"):
        model(ids).backward()
    optimizer.remove_hooks()
    model(ids).backward()
    assert all((p.grad is not None) == (p is not model.idle) for p in model.parameters())


def test_copies_go_on_as_the_original(device):
    model = Net(device, torch.bfloat16)
    optimizer = AdamW(model.parameters(), 1e-2, max_grad_norm=1.0, **EXACT)
    train(model, optimizer, batches(device, 2))
    twin, copied = copy.deepcopy((model, optimizer))  # as pickle does
    for one, its in ((model, optimizer), (twin, copied)):
        train(one, its, batches(device, 2, seed=2))
    assert_same(model, twin)
    assert torch.equal(copied.grad_norm, optimizer.grad_norm)


def test_closures_and_gradient_scalers(device):
    ids = batches(device, 3)
    plain, scaled = Net(device), Net(device)
    optimizer = AdamW(plain.parameters(), 1e-2)

    def closure(batch):
        optimizer.zero_grad()
        loss = plain(batch)
        loss.backward()
        return loss

    assert all(optimizer.step(functools.partial(closure, batch)).item() > 0 for batch in ids)
    optimizer, scaler = AdamW(scaled.parameters(), 1e-2), torch.amp.GradScaler(device, init_scale=1024.0)
    for batch in ids:
        scaler.scale(scaled(batch)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert_same(plain, scaled, ulps=8 if device == "cpu" else 2000)


def test_which_moments_are_in_eight_bits(device):
    shapes = {(64, 64): True, (2, 32, 64): True, (63, 64): False, (64, 65): False, (128, 32): False, (4096,): False}
    params = [nn.Parameter(torch.ones(shape, device=device, **BF16)) for shape in shapes]
    optimizer = AdamW(params, master_weights=True, **EIGHT_BITS)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    for p, expected in zip(params, shapes.values(), strict=True):
        state = optimizer.state[p]
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == (torch.uint8 if expected else torch.float32)
        assert {name for name in state if "exponents" in name} == (
            {"exp_avg_exponents", "exp_avg_sq_exponents"} if expected else set()
        )
        size = sum(x.nbytes for name, x in state.items() if name != "step") / p.numel()
        assert size == (4 + 2 / 64 if expected else 10)


@pytest.mark.parametrize("options", [{}, dict(master_weights=True), dict(rounding="nearest")], ids=str)
def test_moments_in_eight_bits_are_resumed_to_the_bit(device, options):
    model, options = Net(device, torch.bfloat16, 64, 64), {**options, **EIGHT_BITS, "max_grad_norm": 1.0}
    optimizer = AdamW(groups(model), 1e-2, **options)
    train(model, optimizer, batches(device, 3))
    twin, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    other = AdamW(groups(twin), 1.0, **options)
    other.load_state_dict(state)
    for one, its in ((model, optimizer), (twin, other)):
        train(one, its, batches(device, 3, seed=2))
    assert_same(model, twin)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert all(same_bits(x, other.state[q][name]) for name, x in optimizer.state[p].items())


def test_moments_follow_those_in_fp32(device):
    """Gradients of many sizes, which then shrink: second moments have to decay, by a thousandth a step, and do in the
    mean. Rounded to nearest they would not."""
    shape, steps = (40, 128), 1600
    size = 10.0 ** torch.linspace(-7, 0, shape[0], device=device)[:, None].expand(shape)
    p, q = (nn.Parameter(torch.zeros(shape, device=device)) for _ in "12")
    ours, exact = AdamW([p], lr=0.0, **EIGHT_BITS), AdamW([q], lr=0.0)
    for t in range(steps):
        p.grad = q.grad = size * (1.0 if t < 100 else 0.1)
        ours.step(), exact.step()
    plain = AdamW([p], lr=0.0)
    plain.load_state_dict(ours.state_dict())
    for name, spread in (("exp_avg", 0.06), ("exp_avg_sq", 0.2)):
        ratio = plain.state[p][name] / exact.state[q][name]
        assert abs(ratio.mean().item() - 1) < 0.03 and ratio.std() < spread, name


def test_moments_are_loaded_in_other_dtypes(device):
    """torch's become codes, each within half a step of the exact number, and those fp32 numbers again."""
    p = nn.Parameter(torch.randn(64, 64, device=device))
    p.grad = torch.randn_like(p)
    theirs = torch.optim.AdamW([p], fused=True)
    theirs.step()
    exact, kept = theirs.state[p], AdamW([p], **EIGHT_BITS)
    kept.load_state_dict(theirs.state_dict())
    again = AdamW([p])
    again.load_state_dict(kept.state_dict())
    assert again.state[p].keys() == {"step", "exp_avg", "exp_avg_sq"} and again.state[p]["step"] == 1
    assert kept.state[p]["exp_avg"].dtype == torch.uint8 and again.state[p]["exp_avg"].dtype == torch.float32
    for name, levels in (("exp_avg", 127), ("exp_avg_sq", 255)):
        x, y = again.state[p][name], exact[name]
        x, y = (x, y) if levels == 127 else (x.sqrt(), y.sqrt())
        top = y.abs().view(64, 1, 64).amax(2) * 2  # the power of two is less
        assert ((x.abs() / top) ** 0.25 - (y.abs() / top) ** 0.25).abs().max() <= 0.5001 / levels
        assert (x * y >= 0).all() and not torch.equal(x, y)
    state = kept.state_dict()
    del state["state"][0]["exp_avg_sq_exponents"]
    with pytest.raises(InputError, match="expected step, exp_avg, exp_avg_sq, exp_avg_exponents and exp_avg_sq_exp"):
        again.load_state_dict(state)


def test_errors(device):
    p = nn.Parameter(torch.ones(3, device=device))
    for options, message in (
        (dict(lr=-1.0), "lr must be 0 or more"),
        (dict(state_dtype=torch.int8), "state_dtype must be a floating dtype, torch.uint8, or None"),
        (dict(max_grad_norm=0.0), "max_grad_norm=0.0 must be positive"),
    ):
        with pytest.raises(InputError, match=message):
            AdamW([p], **options)
    optimizer = AdamW([p], master_weights=True)
    with pytest.raises(InputError, match="fp16, which is not the upper half"):
        optimizer.add_param_group(dict(params=[nn.Parameter(torch.ones(3, dtype=torch.float16))]))
    assert len(optimizer.param_groups) == 1
    p.grad = torch.ones(3, device=device).to_sparse()
    with pytest.raises(InputError, match="make it dense"):
        optimizer.step()


@pytest.mark.gpu
def test_a_step_without_device_counts_is_not_captured():
    p = nn.Parameter(torch.ones(8, device="cuda"))
    optimizer = AdamW([p])
    p.grad = torch.ones_like(p)
    with pytest.raises(InputError, match="capturable=False"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
