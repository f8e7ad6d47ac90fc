"""AdamW on DTensors: the bits of one process for every sharding, norms over several meshes, steps in FSDP2's backward.

The processes meet over gloo, on the CPU. tests/parallel/test_checkpoints.py saves and resumes them.
"""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from ligermodels.arch import ARCHS
from ligermodels.checkpoint.weights import same_bits
from ligermodels.errors import InputError
from ligermodels.training.adamw import AdamW
from tests.parallel.ranks import results_of_ranks
from tests.parallel.train import CONFIG, sharded as sharded_model

STEPS = 3
OPTIONS = {
    "rounded": dict(seed=3),
    "with masters": dict(master_weights=True),
    "in 8 bits": dict(state_dtype=torch.uint8, rounding="nearest"),
}

TWO = [
    ((7, 16), (2,), [Shard(0)]),  # uneven rows, in whole groups of eight
    ((13,), (2,), [Shard(0)]),
    ((1, 9), (2,), [Shard(0)]),  # nothing on the second rank
    ((6, 32), (2,), [Shard(1)]),
    ((3, 2, 10, 8), (2,), [Shard(2)]),  # gate and up of experts
    ((4, 5), (2,), [Replicate()]),
    ((7, 5), (2, 1), [Replicate(), Shard(0)]),
    ((7, 10), (1, 2), [Shard(0), Shard(1)]),
    ((65, 64), (2,), [Shard(0)]),  # moments in 8 bits from here on
    ((33, 128), (2,), [Shard(1)]),
]
"""Shapes, meshes and placements."""

FOUR = [
    ((7, 10), (2, 2), [Shard(0), Shard(1)]),
    ((4, 2, 10, 8), (2, 2), [Shard(0), Shard(2)]),
    ((9, 10), (2, 2), [Shard(0), Shard(0)]),
    ((7, 6), (2, 2), [Replicate(), Shard(0)]),
    ((11, 3), (4,), [Shard(0)]),
    ((3, 17, 128), (2, 2), [Shard(0), Shard(2)]),
]

PLANS = [
    ((7, 12), Shard(0)),
    ((5, 97), Shard(1)),
    ((6,), Replicate()),
    ((3, 2, 10, 8), Shard(2)),
    ((67, 128), Shard(1)),
]
"""Shapes, and their placement by tensor parallelism; FSDP2 shards them further."""


def shapes_of(cases):
    return [case[0] for case in cases]


def values(shapes, seed):
    """A bf16 tensor of each shape."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def sharded(x, mesh, placements):
    """A DTensor of x, of which each rank holds all."""
    return distribute_tensor(x, mesh, placements, src_data_rank=None)


def whole(x):
    return (x.full_tensor() if isinstance(x, DTensor) else x).clone()


def state_of(params, optimizer):
    """All values of the parameters and their states."""
    params = list(params)
    masters = [whole(optimizer.master(p)) for p in params]
    return [
        [whole(p.detach()), x, *map(whole, optimizer.state[p].values())] for p, x in zip(params, masters, strict=True)
    ]


def assert_same(found, expected):
    for i, (some, others) in enumerate(zip(found, expected, strict=True)):
        for x, y in zip(some, others, strict=True):
            assert same_bits(x, y), f"parameter {i}: {(x != y).sum().item()} of {x.numel()} differ"


class Weights(nn.Module):
    """Parameters whose gradients are given to forward."""

    def __init__(self, shapes):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(x) for x in values(shapes, 0))

    def forward(self, grads):
        return sum(
            ((p.to_local() if isinstance(p, DTensor) else p) * g).sum()
            for p, g in zip(self.weights, grads, strict=True)
        )


def step_cases(cases):
    """What DTensors hold after the steps, by options; and the norm of all gradients, beside one of no mesh."""
    meshes = {shape: init_device_mesh("cpu", shape) for _, shape, _ in cases}
    found = []
    for options in OPTIONS.values():
        params = [
            nn.Parameter(sharded(x, meshes[at], plan))
            for x, (_, at, plan) in zip(values(shapes_of(cases), 0), cases, strict=True)
        ]
        optimizer = AdamW(params, 1e-2, weight_decay=0.1, **options)
        for t in range(STEPS):
            for p, grad in zip(params, values(shapes_of(cases), 1 + t), strict=True):
                p.grad = sharded(grad, p.device_mesh, p.placements)
                if p.placements == (Replicate(),):  # as if each rank had seen a part of the tokens
                    p.grad = DTensor.from_local(grad / p.device_mesh.size(), p.device_mesh, [Partial()])
            optimizer.step()
        found.append(state_of(params, optimizer))
    plain = nn.Parameter(torch.ones(3))
    plain.grad = torch.full_like(plain, 2.0)
    optimizer = AdamW([*params, plain], max_grad_norm=float("inf"))
    optimizer.step()
    return found, optimizer.grad_norm, refused(meshes)


def refused(meshes):
    """Pieces that are not evenly spaced runs."""
    mesh = next(iter(meshes.values()))
    cuts = [_StridedShard(0, split_factor=2)] if mesh.ndim == 1 else [Shard(1), Shard(3)]
    shape = (2,) if mesh.ndim == 1 else (2, 2, 3, 2)
    p = nn.Parameter(DTensor.from_local(torch.ones(shape).bfloat16(), mesh, cuts))
    p.grad = torch.ones_like(p)
    AdamW([p], rounding="nearest").step()
    with pytest.raises(InputError, match=r"AdamW: (the position of )?a shard of a parameter of shape"):
        AdamW([p]).step()
    p = nn.Parameter(sharded(torch.ones(64, 64), mesh, [Replicate()] * (mesh.ndim - 1) + [Shard(1)]))
    with pytest.raises(InputError, match=r"\(64, 64\) has shards of 32 columns, and moments in 8 bits are in blocks"):
        AdamW([p], state_dtype=torch.uint8)
    return True


def whole_steps(shapes, options):
    """The parameters and optimizer of one process after the steps."""
    params = [nn.Parameter(x) for x in values(shapes, 0)]
    optimizer = AdamW(params, 1e-2, weight_decay=0.1, **options)
    for t in range(STEPS):
        for p, grad in zip(params, values(shapes, 1 + t), strict=True):
            p.grad = grad
        optimizer.step()
    return params, optimizer


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_bits_do_not_depend_on_the_sharding(tmp_path, size):
    cases = TWO if size == 2 else FOUR
    results = results_of_ranks(tmp_path, lambda: step_cases(cases), size)
    for k, options in enumerate(OPTIONS.values()):
        params, optimizer = whole_steps(shapes_of(cases), options)
        for found, _, _ in results:
            assert_same(found[k], state_of(params, optimizer))
    exact = torch.cat([torch.full((3,), 2.0), *(p.grad.flatten() for p in params)]).double().norm().item()
    assert results[0][1].item() == pytest.approx(exact, rel=1e-6)
    assert len({norm.item() for _, norm, _ in results}) == 1


def step_fsdp(dims):
    """What FSDP2's parameters hold after the steps. dims: of a mesh, by name."""
    mesh = init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))
    data, found = mesh[tuple(name for name in dims if name != "tp")], []
    for options in OPTIONS.values():
        model = Weights(shapes_of(PLANS))
        if "tp" in dims:
            for i, (p, (_, plan)) in enumerate(zip(list(model.weights), PLANS, strict=True)):
                model.weights[i] = nn.Parameter(sharded(p.detach(), mesh["tp"], [plan]))
        fully_shard(model, mesh=data)
        model.set_gradient_divide_factor(1.0)  # gradients are summed, which gloo can do only as a plain sum
        model.set_force_sum_reduction_for_comms(True)
        optimizer = AdamW(model.parameters(), 1e-2, weight_decay=0.1, **options)
        for t in range(STEPS):
            grads = [grad / data.size() for grad in values(shapes_of(PLANS), 1 + t)]  # a power of two: exact parts
            if "tp" in dims:
                grads = [sharded(g, mesh["tp"], [plan]).to_local() for g, (_, plan) in zip(grads, PLANS, strict=True)]
            model(grads).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(state_of(model.parameters(), optimizer))
    return found


@pytest.mark.parametrize(
    "dims",
    [dict(dp=2), *(pytest.param(d, marks=pytest.mark.slow) for d in (dict(dp=2, tp=2), dict(dp_replicate=2, dp=2)))],
    ids=str,
)
def test_fsdp_over_tensor_parallel_and_replicas(tmp_path, dims):
    results = results_of_ranks(tmp_path, lambda: step_fsdp(dims), math.prod(dims.values()))
    for k, options in enumerate(OPTIONS.values()):
        expected = state_of(*whole_steps(shapes_of(PLANS), options))
        for found in results:
            assert_same(found[k], expected)


def step_llama(tied, step_in_backward):
    """A tiny Llama's weights and states after the steps."""
    config = dict(CONFIG, tie_word_embeddings=tied)
    model = sharded_model(ARCHS["llama"].from_config(config, dtype=torch.bfloat16, device="cpu", seed=0))
    optimizer = AdamW(model.parameters(), 1e-2, step_in_backward=step_in_backward, seed=7)
    for t in range(STEPS):
        ids = torch.randint(97, (2, 8), generator=torch.Generator().manual_seed(t))[[dist.get_rank()]]
        model(ids, labels=ids).loss.backward()
        assert all((p.grad is None) == step_in_backward for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return state_of(model.parameters(), optimizer)


def test_steps_in_the_backward_are_the_same_steps(tmp_path):
    for models in results_of_ranks(
        tmp_path, lambda: [[step_llama(tied, early) for early in (False, True)] for tied in (False, True)]
    ):
        for late, early in models:
            assert_same(early, late)
