"""Cuts against those of transformers, and the draw; test_transformers.py has the other processors."""

import pytest
import torch

from ligermodels.generation import generate
from ligermodels.generation.options import Options
from ligermodels.generation.processors import filter_logits
from tests.generation.models import llama, prompt

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("name, theirs, values", [
    ("temperature", transformers.TemperatureLogitsWarper, [0.3, 7.0]),
    ("top_k", transformers.TopKLogitsWarper, [1, 2, 50, 200, 999]),
    ("top_p", transformers.TopPLogitsWarper, [1e-6, 0.1, 0.5, 0.9, 0.999]),
    ("min_p", transformers.MinPLogitsWarper, [0.0, 0.05, 0.5, 1.0]),
])  # fmt: skip
@pytest.mark.parametrize("spread", [0.01, 3.0, 30.0])
def test_cuts_are_those_of_transformers(name, theirs, values, spread):
    logits = torch.randn(8, 200) * spread
    logits = logits.round(decimals=2)  # ties
    logits[:, 3:9] = -torch.inf  # banned before
    exact = torch.zeros(1, 256)  # probabilities whose sums have no rounding, and meet the cuts
    for value in values:
        for given in (logits, exact):
            options = Options(**{"do_sample": True, "top_k": 0, name: value})
            assert torch.equal(filter_logits(None, given, options), theirs(value)(None, given))


def test_a_seed_repeats_and_leaves_the_global_generator_alone():
    model, ids, state = llama(), prompt(), torch.get_rng_state()
    a, b, c = (generate(model, ids, max_new_tokens=20, temperature=2.0, seed=s) for s in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert torch.equal(state, torch.get_rng_state())
