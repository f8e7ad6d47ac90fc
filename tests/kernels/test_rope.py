"""Rope: rotation in place."""

import functools
import random

import torch

from ligermodels.kernels.rope import rope, rope_reference
from tests.kernels.cases import Maker
from tests.kernels.ops import complete


def test_inplace_under_a_projection(device):
    """Its normal use: what made qkv needs no part of it again, and trains as if nothing were overwritten."""
    case = complete("rope", Maker(random.Random(0), torch.float32, device))
    qkv, tables = case.tensors["qkv"], {n: case.tensors[n] for n in ("cos", "sin")}
    x, results = torch.randn(*qkv.shape[:2], 8, device=device), []
    for op in (functools.partial(rope, inplace=True), rope_reference):
        torch.manual_seed(1)
        projection = torch.nn.Linear(8, qkv.shape[-1]).to(device)
        q, k, v = op(projection(x), **tables, **case.options)
        ((q.sum(2) * k.sum(2)).sum() + v.square().sum()).backward()
        results.append([p.grad for p in projection.parameters()])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-4)  # sums of 100 numbers of size 10 in fp32
