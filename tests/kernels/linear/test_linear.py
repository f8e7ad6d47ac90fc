"""Linear layers: after a norm, whose output is not saved, and several of one input, whose weights may be one matrix."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ligermodels.layers as L
from ligermodels.arch import ARCHS
from ligermodels.kernels.linear.joint import joint, make_joint
from ligermodels.kernels.norm.rms_norm import add_rms_norm, rms_norm
from tests.kernels.ops.mlp import joint_linear, linear, one_by_one
from tests.kernels.seen import Seen, adding_in_place, saved_by

WIDTH, COLUMNS = 12, (5, 3, 4)
each_layout = pytest.mark.parametrize("layout", ["joint", "separate"])


def after_norm(device, shape=(5, WIDTH), columns=6, dtype=torch.float32):
    """x, the norm's weight, the layer's weight and bias, and dy."""
    *rows, width = shape
    shapes = (shape, (width,), (columns, width), (columns,), (*rows, columns))
    x, norm, weight, bias, dy = (torch.randn(s, dtype=dtype, device=device) for s in shapes)
    return [t.requires_grad_() for t in (x, norm, weight, bias)], dy


def normed(x, norm, weight, bias=None, *, op=linear):
    return op(rms_norm(x, norm), weight, bias)


def several(device, layout, lead=(5,), dtype=torch.float32, columns=COLUMNS, width=WIDTH):
    """x, weights, biases and dy; the weights, and the biases, are slices of one tensor if `layout` is "joint"."""
    weights = [nn.Parameter((torch.randn(n, width) * width**-0.5).to(device, dtype)) for n in columns]
    biases = [nn.Parameter(torch.randn(n).to(device, dtype)) for n in columns]
    if layout == "joint":
        make_joint(weights)
        make_joint(biases)
    assert (joint(weights) is not None) == (layout == "joint")
    x, dy = (torch.randn(*lead, n).to(device, dtype) for n in (width, sum(columns)))
    return x.requires_grad_(), weights, biases, dy


def gradients(op, x, weights, biases, dy):
    y = op(x, weights, biases)
    return [y.detach(), *torch.autograd.grad(y, [x, *weights, *biases], dy)]


# What is saved.


def test_the_output_of_a_norm_is_not_saved(device):
    leaves, dy = after_norm(device, (32, 16), 24)
    x, _, weight, _ = leaves
    y, saved = saved_by(lambda: normed(*leaves), *leaves)
    assert [t.numel() for t in saved] == [32]  # a statistic of each row
    expected = torch.autograd.grad(normed(*leaves, op=F.linear), leaves, dy)
    for a, b in zip(torch.autograd.grad(y, leaves, dy), expected, strict=True):
        torch.testing.assert_close(a, b)
    _, saved = saved_by(lambda: linear(add_rms_norm(x, torch.randn_like(x))[0], weight), *leaves)
    assert sorted(t.numel() for t in saved) == [32, 32 * 16]  # the sum, which the norm saves anyway
    for layout in ("joint", "separate"):
        x, weights, biases, _ = several(device, layout, (4, 8))
        _, saved = saved_by(lambda a=(x, weights, biases): joint_linear(rms_norm(a[0]), *a[1:]), x, *weights)
        assert [t.numel() for t in saved] == [4 * 8]


def test_what_happened_to_the_norms_output_counts(device):
    """Changed in place or passed on as another tensor, it is itself saved: the gradient is that of what was read."""
    leaves, dy = after_norm(device, dtype=torch.float64)

    def change(y):
        with torch.no_grad():
            return y.mul_(torch.arange(12.0, device=device))

    def change_view(y):
        y.detach().view(-1)[3:].zero_()
        return y

    for between in (change, change_view, lambda y: y * 3, lambda y: y.view_as(y), lambda y: y.clone()):
        results = []
        for op in (linear, F.linear):
            y = op(between(rms_norm(*leaves[:2])), *leaves[2:])
            results.append([y, *torch.autograd.grad(y, leaves, dy)])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)


class Other(torch.Tensor):
    """A tensor of another type, as quantization and sharding put in the place of a weight."""


# In a block.


def test_what_a_block_saves_per_token(device):
    """4 H for two sums, 2 (q + 2 kv) for q, k and v, 2 q for the attention's output and 4 for each of its heads, 4 I
    for gate and up, and 4 for the statistics of each norm. The tables of the rotation belong to the model."""
    length, hidden, inner = (512, 512, 768) if device == "cuda" else (8, 32, 48)
    q, kv, heads = hidden, hidden // 2, 4
    config = dict(
        vocab_size=9, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=1, num_attention_heads=heads,
        num_key_value_heads=2,
    )  # fmt: skip
    block = ARCHS["llama"].from_config(config, dtype=torch.float16, device=device, seed=0).model.layers[0]
    tables = L.RotaryEmbedding(hidden // heads)(torch.arange(length, device=device)[None])
    batch = L.Batch(rotary={"full": tables})
    x, residual = torch.randn(2, 2, length, hidden, dtype=torch.float16, device=device)
    given = {t.untyped_storage().data_ptr() for t in (*block.parameters(), *tables)}
    _, saved = saved_by(lambda: block(x.requires_grad_(), residual.requires_grad_(), batch))
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    found = sum(size for pointer, size in storages.items() if pointer not in given)
    expected = 2 * length * (4 * hidden + 2 * (q + 2 * kv) + 2 * q + 4 * heads + 4 * inner + 2 * 4)
    # The engine of the attention that torch picks may keep a state of the random numbers, and rows in whole tiles.
    assert expected <= found <= (1.01 if device == "cuda" else 1) * expected


class Sharded(L.RMSNorm):
    """As FSDP and adapters replace a class."""


def test_a_norm_whose_weight_may_be_away_is_not_recomputed(device):
    """Sharded by itself, it fetches its weight for its own backward, which comes after that of the linear layer."""
    weight, x = nn.Parameter(torch.randn(4, 8, device=device)), torch.randn(5, 8, device=device)
    for saved in (1, 2):
        norm = L.RMSNorm(8).to(device)
        if saved == 2:
            norm.__class__ = Sharded
        assert len(saved_by(lambda n=norm: linear(n(x), weight), x, weight, norm.weight)[1]) == saved


# How many matmuls.


@each_layout
@pytest.mark.parametrize("some", [(0, 1, 2), (0, 2)], ids=str)
def test_adds_in_place(device, poison, layout, some):
    """Micro-batch after micro-batch into the same memory, by a matmul for each weight. One more each for y and dx; of
    separate weights, one for the columns of each. Nothing is joined or copied."""
    x, weights, biases, dy = several(device, "separate")
    weights = adding_in_place(*weights)
    if layout == "joint":
        make_joint(weights)
        make_joint(biases)
    expected = (dy.t() @ rms_norm(x).detach()).split(COLUMNS)
    for i, w in enumerate(weights):
        w.requires_grad_(i in some)
    memory: list = []
    for times in (1, 2, 3):
        normed_x, each = rms_norm(x), 1 if layout == "joint" else 3
        with Seen() as forward:
            out = joint_linear(normed_x, weights, biases)
        with Seen() as backward:
            out.backward(dy)
        assert len(forward.matmuls) == each and len(backward.matmuls) == len(some) + each
        assert not {"cat", "copy_", "clone", "_to_copy"} & {*forward.names} and "add" not in backward.names
        for i in some:
            torch.testing.assert_close(weights[i].grad, times * expected[i])
        memory.append([weights[i].grad.data_ptr() for i in some])
    assert memory[0] == memory[1] == memory[2]


# Which weights are one matrix.


def separate_tensors():
    """Pairs of tensors that are not one matrix, by reason."""
    a, base, buffer = torch.randn(6, 4), torch.randn(48), bytearray(96)
    first, second = (torch.frombuffer(buffer, dtype=torch.float32, count=12, offset=o).view(3, 4) for o in (0, 48))
    return {
        "two storages side by side": (first, second),
        "another order": (a[3:], a[:3]),
        "a gap": (a[:2], a[3:]),
        "columns": (a[:, :2], a[:, 2:]),
        "another dtype": (base[:12].view(3, 4), base.view(torch.int32)[12:24].view(3, 4)),
        "another type": (a[:3], a[3:].as_subclass(Other)),
    }  # fmt: skip


@pytest.mark.parametrize("why", separate_tensors())
def test_not_joint(why):
    assert joint(separate_tensors()[why]) is None


def test_joint_parameters_stay_what_they_are(device):
    _, weights, _, _ = several(device, "separate", dtype=torch.float16)
    weights[1].requires_grad_(False)
    with torch.no_grad():
        weights[0][0, :3] = torch.tensor([-0.0, torch.nan, torch.inf])
    weights[0].grad = torch.randn_like(weights[0])
    grad, bits, objects = weights[0].grad, [w.detach().clone().view(torch.int16) for w in weights], list(weights)
    make_joint(weights)
    assert all(a is b for a, b in zip(weights, objects, strict=True)) and joint(weights) is not None
    assert all(torch.equal(w.detach().view(torch.int16), b) for w, b in zip(weights, bits, strict=True))
    assert weights[0].grad is grad and [w.requires_grad for w in weights] == [True, False, True]
    assert weights[0].untyped_storage().nbytes() == sum(w.nbytes for w in weights)


def test_tied_and_shared_parameters_are_not_moved():
    tied, whole = nn.Parameter(torch.randn(3, 4)), torch.randn(9, 4)
    for parameters in ([tied, tied], [nn.Parameter(torch.randn(3, 4)), nn.Parameter(whole[:3])]):
        before = [p.data_ptr() for p in parameters]
        make_joint(parameters)
        assert [p.data_ptr() for p in parameters] == before


def test_made_joint_or_moved_between_forward_and_backward(device):
    """As FSDP moves them: what was one matrix in the forward is several in the backward, and its memory is gone."""
    for layout in ("separate", "joint"):
        x, weights, biases, dy = several(device, layout)
        expected = gradients(one_by_one, x, weights, biases, dy)[1]
        y, old = joint_linear(x, weights, biases), joint(weights)
        if layout == "separate":
            make_joint(weights)
        else:
            for w in weights:
                w.data = w.data.clone()
            old.data.fill_(torch.nan)
        torch.testing.assert_close(torch.autograd.grad(y, x, dy)[0], expected)
