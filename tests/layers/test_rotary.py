"""Rotary tables: equal to those of transformers to the bit, in fp32 whatever happens to the module."""

import copy

import pytest
import torch

from ligermodels.errors import ConfigError, InputError
from ligermodels.layers import RotaryEmbedding
from tests.kernels.on_gpu import never_waits

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 7 for i in range(16)],
    "long_factor": [1.5 + i * i / 3 for i in range(16)],
    "original_max_position_embeddings": 16,
}


TYPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": DYNAMIC,
    "llama3": LLAMA3 | {"original_max_position_embeddings": 64},
    "yarn": YARN | {"rope_type": "yarn", "original_max_position_embeddings": 64},
    "yarn, options": YARN | {
        "rope_type": "yarn", "original_max_position_embeddings": 64, "beta_fast": 8.0, "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn, not truncated": YARN | {"rope_type": "yarn", "truncate": False},
    "yarn, ramp beyond": YARN | {"rope_type": "yarn", "original_max_position_embeddings": 10**14},
    "yarn, no ramp": YARN | {"rope_type": "yarn", "original_max_position_embeddings": 6},
    "yarn, attention_factor": YARN | {"rope_type": "yarn", "attention_factor": 1.3},
    "yarn, mscale": YARN | {"rope_type": "yarn", "mscale": 0.707, "mscale_all_dim": 1.0},
    "longrope": LONGROPE,
    "longrope, factor": LONGROPE | {"factor": 3.0},
    "longrope, attention_factor": LONGROPE | {"attention_factor": 1.25},
    "proportional": {"rope_type": "proportional"},
    "proportional, factor": {"rope_type": "proportional", "factor": 2.0},
}  # fmt: skip


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("length", [12, 300])
def test_equals_transformers_to_the_bit(name, length):
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = {key: value for key, value in TYPES[name].items() if key != "type"}
    part = 0.3 if name == "proportional" else 1.0
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=128,
        rope_parameters={"rope_theta": 5e5, "partial_rotary_factor": part, **copy.deepcopy(scaling)},
    )
    positions = torch.stack([torch.arange(length), torch.arange(length).flip(0)])
    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    rotary = RotaryEmbedding(32, theta=5e5, scaling=scaling, max_position_embeddings=128, partial_rotary_factor=part)
    for ours, full in zip(rotary(positions), theirs, strict=True):
        assert ours.shape == (2, length, 16) and ours.dtype == torch.float32
        assert torch.equal(torch.cat([ours, ours], -1), full)
    like_theirs = rotary(torch.zeros(1, dtype=torch.bfloat16), position_ids=positions)
    assert all(torch.equal(ours, full.bfloat16()) for ours, full in zip(like_theirs, theirs, strict=True))


@pytest.mark.parametrize("name", TYPES)
def test_needs_recompute_where_the_tables_of_a_longer_call_differ(name):
    """Compares the tables of the first `past` tokens of a call of `past` tokens and of one of `length`."""
    rotary = RotaryEmbedding(32, scaling=TYPES[name], max_position_embeddings=16)
    for past, length in [(15, 16), (16, 17), (2, 17), (3, 40), (17, 18), (17, 40), (2, 16)]:
        before = torch.arange(past)[None]
        cos, after = rotary(before)[0], rotary(torch.arange(length)[None])[0][:, :past]
        if name != "dynamic":
            assert rotary.needs_recompute(past, length) is not torch.equal(cos, after)
        else:  # transformers leaves cached keys as they are, and so must a cache here
            assert not rotary.needs_recompute(past, length)
    assert not rotary.needs_recompute(0, 17), "there are no keys yet"


@pytest.mark.parametrize("change", [
    lambda module: module.to(torch.bfloat16),
    lambda module: module.to("meta").to_empty(device="cpu"),
], ids=["bf16", "to_empty"])  # fmt: skip
@pytest.mark.parametrize("name", ["default", "dynamic", "longrope"])
def test_tables_stay_fp32(name, change):
    positions = torch.arange(20)[None]
    module = torch.nn.ModuleDict({"rotary": RotaryEmbedding(32, scaling=TYPES[name], max_position_embeddings=16)})
    before = module["rotary"](positions)
    after = change(module)["rotary"](positions)
    assert all(map(torch.equal, before, after)) and after[0].dtype == torch.float32
    assert module.state_dict() == {}


@pytest.mark.parametrize("name", ["default", "longrope"])
def test_tables_from_0_on_are_cached(name):
    rotary, cpu = RotaryEmbedding(32, scaling=TYPES[name], max_position_embeddings=16), torch.device("cpu")
    for length in (9, 20, 9):
        tables = rotary.tables(length, cpu)
        assert all(map(torch.equal, tables, rotary(torch.arange(length)[None])))
        assert rotary.tables(length, cpu) is tables


@pytest.mark.gpu
def test_tables_of_a_graph_are_its_own():
    """And the frequencies that it reads stay where they are."""
    rotary, cuda = RotaryEmbedding(32), torch.device("cuda", 0)
    kept, graph = rotary.tables(9, cuda), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = rotary.tables(9, cuda)
    assert captured[0] is not kept[0] and rotary.tables(9, cuda) is kept
    rotary(torch.arange(3)[None])
    rotary.tables(20, cuda)
    spoiled = [torch.full((16,), float("nan"), device="cuda") for _ in range(64)]
    graph.replay()
    assert all(map(torch.equal, captured, kept)), len(spoiled)


@pytest.mark.parametrize("scaling, message", [
    ({"rope_type": "fancy"}, "rope_type='fancy' is not supported; supported: default, linear"),
    ({"factor": 2.0}, "rope_type='default' has no factor"),
    ({"type": "linear", "factor": -2}, "factor=-2 must be a positive number"),
    (DYNAMIC, "rope_type='dynamic' needs max_position_embeddings"),
    (LLAMA3 | {"low_freq_factor": 4.0}, "low_freq_factor=4.0 must be below"),
    (LONGROPE | {"long_factor": [1.0]}, "long_factor=.* must be a list of 16 positive numbers"),
    ({"rope_type": "default", "rope_theta": 5e5}, "rope_theta=500000.0 in the rope dict contradicts 10000.0"),
])  # fmt: skip
def test_bad_scaling_is_named(scaling, message):
    with pytest.raises(ConfigError, match=message):
        RotaryEmbedding(32, scaling=scaling)


@pytest.mark.gpu
@pytest.mark.parametrize("name", TYPES)
def test_on_a_gpu(name):
    rotary = RotaryEmbedding(32, scaling=TYPES[name], max_position_embeddings=16)
    positions = torch.arange(20)[None]
    expected = rotary(positions)
    there = positions.cuda()
    rotary(there)
    torch.cuda.synchronize()
    with never_waits():
        actual = rotary(there)
    # Angles up to 20, and a base that "dynamic" raises on the device: a few ulp of each.
    torch.testing.assert_close([x.cpu() for x in actual], list(expected), rtol=0, atol=1e-5)


def test_positions_and_sizes_that_do_not_fit():
    with pytest.raises(ConfigError, match="rotate 33 dims"):
        RotaryEmbedding(33)
    with pytest.raises(ConfigError, match="sections"):
        RotaryEmbedding(128, sections=(16, 24, 25))
    with pytest.raises(InputError, match=r"\(2, 1, 4\), and this table takes \[B, S\] or \[3, B, S\]"):
        RotaryEmbedding(128, sections=(16, 24, 24))(torch.zeros(2, 1, 4, dtype=torch.long))
