"""A captured step trains as the loop that it stands for, and refuses what its graph would get wrong."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import ligermodels
from ligermodels.errors import InputError
from ligermodels.kernels._triton import as_if_capturing
from ligermodels.training import capture, count_expert_loads
from ligermodels.training.adamw import AdamW
from ligermodels.training.capture import CapturedStep
from tests.kernels.on_gpu import never_waits
from tests.parallel.train import CONFIG


class Noisy(nn.Module):
    """Has what a language model lacks: a buffer that a step changes, random numbers, a parameter without a gradient."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, scale=None, power=2):
        self.calls += 1
        y = nn.functional.dropout(self.linear(x) + self.frozen, 0.5) ** power
        return (y if scale is None else y * scale).sum()


def noisy(device="cpu", **options):
    torch.manual_seed(1)
    model = Noisy().to(device)
    lr = torch.tensor(0.1, device=device) if device == "cuda" else 0.1
    return model, torch.optim.AdamW(model.parameters(), lr, capturable=device == "cuda", **options)


def rows(steps, size=3):
    return torch.randn(steps, size, 8, generator=torch.Generator().manual_seed(2))


def loop(model, optimizer, batches, accumulate=1, max_grad_norm=None, divide=True):
    """What CapturedStep stands for."""
    losses = []
    for i, inputs in enumerate(batches):
        output = model(**inputs)
        loss = output if isinstance(output, torch.Tensor) else output.loss
        (loss / accumulate if divide and accumulate > 1 else loss).backward()
        losses.append(loss.detach().clone())
        if (i + 1) % accumulate == 0:
            if max_grad_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
            optimizer.step()
            model.zero_grad()
    return losses


def assert_same(step, losses, model, expected_losses, expected):
    assert torch.equal(torch.stack(losses), torch.stack(expected_losses))
    for (name, a), b in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert all(p.grad is None for p in model.parameters()) or step._done % len(step._calls)


@pytest.mark.parametrize("options", [{"accumulate": 3}, {"max_grad_norm": 0.05}], ids=str)
def test_is_the_loop(options, device):
    x = rows(6).to(device)
    expected, optimizer = noisy(device)
    expected_losses = loop(expected, optimizer, [{"x": row} for row in x], **options)
    model, optimizer = noisy(device)
    step = CapturedStep(model, optimizer, x=torch.zeros(3, 8), **options)
    assert_same(step, [step(x=row) for row in x], model, expected_losses, expected)
    if "max_grad_norm" in options:
        assert step.grad_norm > 0.05


def test_micro_batches_with_a_count_are_not_divided():
    model = ligermodels.Llama.from_config(CONFIG, device="cpu", seed=0)
    expected = copy.deepcopy(model)
    ids, count = torch.randint(96, (4, 2, 7)), torch.tensor(24)
    batches = [{"input_ids": row, "labels": row, "num_items_in_batch": count} for row in ids]
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.5)
    expected_losses = loop(expected, optimizer, batches, accumulate=2, divide=False)
    step = CapturedStep(model, torch.optim.SGD(model.parameters(), lr=0.5), accumulate=2, **batches[0])
    assert_same(step, [step(**batch) for batch in batches], model, expected_losses, expected)


def test_inputs_unlike_the_example_are_refused():
    model, optimizer = noisy()
    step = CapturedStep(model, optimizer, x=torch.ones(3, 8), scale=None, power=2)
    for inputs, message in [
        ({"x": torch.ones(4, 8)}, r"x is torch.float32 \[4, 8\], the example's torch.float32 \[3, 8\]"),
        ({"scale": torch.ones(())}, r"scale is torch.float32 \[\], the example's NoneType"),
        ({"power": 3}, "power is 3, the example's 2"),
        ({"mask": None}, "the inputs are .*mask.*, the example's"),
    ]:
        with pytest.raises(InputError, match=message):
            step(**{"x": torch.ones(3, 8), "scale": None, "power": 2, **inputs})
    assert model.calls == 0
    step(x=torch.ones(3, 8), scale=None, power=2)


def test_a_stale_graph_raises():
    for change, message in (
        (lambda model, optimizer: model.double(), "a parameter's place"),
        (lambda model, optimizer: model.frozen.requires_grad_(), "requires_grad"),
        (lambda model, optimizer: model.eval(), "train"),
        (lambda model, optimizer: optimizer.param_groups[0].update(weight_decay=0.5), "option of the optimizer"),
    ):
        model, optimizer = noisy()
        step = CapturedStep(model, optimizer, x=torch.ones(3, 8))
        step(x=torch.ones(3, 8))
        optimizer.param_groups[0].update(lr=0.2, initial_lr=0.1)
        step(x=torch.ones(3, 8))
        change(model, optimizer)
        with pytest.raises(InputError, match=f"{message}.* changed after the capture"):
            step(x=torch.ones(3, 8))


def test_what_cannot_be_captured_is_refused():
    model, optimizer = noisy()
    for options, message in [
        ({"x": [1.0]}, "x is a list"),
        ({"x": torch.ones(3, 8, requires_grad=True)}, "x requires a gradient"),
        ({"x": torch.ones(3, 8), "accumulate": 0}, "accumulate=0"),
    ]:
        with pytest.raises(InputError, match=message):
            CapturedStep(model, optimizer, **options)
    model = ligermodels.Llama.from_config(CONFIG, device="cpu", seed=0)
    step = CapturedStep(model, torch.optim.SGD(model.parameters()), input_ids=torch.ones(1, 3, dtype=torch.int64))
    with pytest.raises(InputError, match="returns no loss, one number; are labels among the inputs"):
        step(input_ids=torch.ones(1, 3, dtype=torch.int64))


def test_a_warm_up_changes_nothing_and_refuses_states_that_do_not_start_at_zero():
    model, optimizer = noisy()
    step, before = CapturedStep(model, optimizer, x=torch.ones(3, 8)), copy.deepcopy(model.state_dict())
    step._warm_up()
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert not any(x.any() for state in optimizer.state.values() for x in state.values())
    momentum = torch.optim.SGD(model.parameters(), momentum=0.9)
    with pytest.raises(InputError, match="the first step of SGD makes a state, momentum_buffer"):
        CapturedStep(model, momentum, x=torch.ones(3, 8))._warm_up()


def test_parameters_that_an_earlier_graph_holds_are_found():
    model = Noisy()
    weight = model.linear.weight
    assert not capture._in_a_graph(weight)
    loss = model(torch.ones(3, 8))
    loss.backward()
    assert capture._in_a_graph(weight)
    step = CapturedStep(model, torch.optim.SGD(model.parameters()), x=torch.ones(3, 8))
    with pytest.raises(InputError, match=r"an output of an earlier forward is still alive.* reads linear\.weight"):
        step._capture()  # which off CUDA nobody else asks for
    del loss
    assert not capture._in_a_graph(weight)


# On a GPU. With a window, attention is a Triton kernel, whose gradients sum in one order, as those of torch's do not.
WINDOWED = {**CONFIG, "model_type": "mistral", "hidden_size": 128, "intermediate_size": 256, "sliding_window": 48}


def windowed():
    return ligermodels.Mistral.from_config(WINDOWED, dtype=torch.bfloat16, device="cuda", seed=1).train()


def as_captured(model):
    """Its forward as it is captured: over all rows of the head, for the host does not ask how many have a label."""
    forward = model.forward

    def run(**inputs):
        with as_if_capturing():
            return forward(**inputs)

    model.forward = run
    return model


OPTIMIZERS = {
    "torch": lambda parameters, lr: torch.optim.AdamW(parameters, lr, fused=True, capturable=True),
    "ours": lambda parameters, lr: AdamW(parameters, lr, capturable=True, max_grad_norm=0.5),
    "8 bits": lambda parameters, lr: AdamW(parameters, lr, capturable=True, state_dtype=torch.uint8),
    "masters": lambda parameters, lr: AdamW(parameters, lr, capturable=True, master_weights=True),
    "in backward": lambda parameters, lr: AdamW(parameters, lr, capturable=True, step_in_backward=True),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name, accumulate", [(name, 1) for name in OPTIMIZERS] + [("torch", 3), ("ours", 3)])
def test_a_graph_trains_as_the_loop(name, accumulate):
    """Bit for bit over 24 calls, with a schedule of lr, one set by hand, and a state that was there before."""
    ids = torch.randint(96, (25, 2, 96), device="cuda")
    batches = [{"input_ids": row, "labels": row} for row in ids]

    def halving(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

    def build():
        model = windowed()
        optimizer = OPTIMIZERS[name](model.parameters(), torch.tensor(0.01, device="cuda"))
        loop(as_captured(model), optimizer, batches[24:])
        return model, optimizer

    expected, optimizer = build()
    schedule, expected_losses = halving(optimizer), []
    for i in range(0, 24, accumulate):
        expected_losses += loop(expected, optimizer, batches[i : i + accumulate], accumulate)
        schedule.step()
        if i == 12:
            optimizer.param_groups[0]["lr"].fill_(0.02)
    model, optimizer = build()
    optimizer.param_groups[0]["lr"] = 0.01
    step = CapturedStep(model, optimizer, accumulate=accumulate, **batches[0])
    schedule, losses = halving(optimizer), []
    for i in range(0, 24, accumulate):
        losses += [step(**batch) for batch in batches[i : i + accumulate]]
        schedule.step()
        if i == 12:
            optimizer.param_groups[0]["lr"] = 0.02
    assert_same(step, losses, model, expected_losses, expected)
    assert not torch.equal(losses[0], losses[1])


@pytest.mark.gpu
@pytest.mark.parametrize("moments", [None, torch.uint8], ids=str)
def test_a_graph_never_waits_and_takes_no_more_memory(moments):
    model = windowed()
    step = CapturedStep(
        model,
        AdamW(model.parameters(), 0.01, capturable=True, max_grad_norm=1.0, state_dtype=moments),
        input_ids=torch.zeros(2, 96, dtype=torch.int64),
        labels=torch.zeros(2, 96, dtype=torch.int64),
    )
    ids = torch.randint(96, (2, 96)).pin_memory()
    first = step(input_ids=ids, labels=ids)
    value, taken = first.item(), torch.cuda.memory_allocated()
    with never_waits():
        losses = [step(input_ids=ids, labels=ids) for _ in range(10)]
    assert first.item() == value != losses[0].item(), "a loss is not the graph's own memory"
    assert torch.cuda.memory_allocated() - taken <= 10 * 512, "a block of the allocator for each loss, and no more"
    with pytest.raises(InputError, match="A graph has one shape"):
        step(input_ids=ids[:, 1:], labels=ids[:, 1:])


@pytest.mark.gpu
def test_a_step_that_waits_is_named(tmp_path):
    """In a process of its own: a capture that failed leaves the CUDA context unusable."""
    code = """
import torch
from torch import nn
from ligermodels.errors import InputError
from ligermodels.training.capture import CapturedStep

class Waits(nn.Linear):
    def forward(self, x):
        y = super().forward(x).sum()
        return y * float(y)

model = Waits(8, 4, device="cuda")
before = model.weight.detach().clone()
adamw = torch.optim.AdamW(model.parameters(), capturable=True)
x = torch.ones(3, 8, device="cuda")
for optimizer in (torch.optim.AdamW(model.parameters()), adamw):
    try:
        CapturedStep(model, optimizer, x=x)
        print("captured")
    except InputError as error:
        print(error)
assert torch.equal(model.weight, before) and model.weight.grad is None
"""
    (tmp_path / "waits.py").write_text(code)
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(tmp_path / "waits.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=paths)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert "build it with capturable=True" in first
    assert "cannot be captured" in second and "return y * float(y)" in second


def test_counts_the_loads_of_experts():
    """As the loop does; counting that begins after the capture would not be in the graph."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = dict(CONFIG, model_type="mixtral", num_local_experts=4)
    model = ligermodels.Mixtral.from_config(config, dtype=torch.float32, device=device, seed=0).train()
    ids, optimizer = torch.randint(97, (2, 16)), torch.optim.AdamW(model.parameters(), capturable=device == "cuda")
    step = CapturedStep(model, optimizer, input_ids=ids, labels=ids)
    count_expert_loads(model)
    with pytest.raises(InputError, match="the counting of experts' loads changed after the capture"):
        step(input_ids=ids, labels=ids)
    step = CapturedStep(model, optimizer, input_ids=ids, labels=ids)
    for _ in range(2):
        step(input_ids=ids, labels=ids)
    assert [int(layer.mlp.expert_loads.sum()) for layer in model.decoder.layers] == [2 * 2 * ids.numel()] * 2
