"""Phi-3: LongRoPE on both sides of the original length, partial rotation, windows, and the released sizes."""

import pytest
import torch

import ligermodels
from ligermodels.arch.phi3 import Phi3Config
from tests.arch.suite import (
    LOGITS,
    Suite,
    edit_config,
    relative,
    theirs,
    tiny_config,
    write_checkpoint,
)

SHORT, LONG = [1.0, 1.1, 1.2, 1.3], [1.0, 2.0, 4.0, 7.5]


def tiny(**changes):
    own = dict(original_max_position_embeddings=16, pad_token_id=0, eos_token_id=2, rope_parameters=rope("default"))
    return tiny_config("phi3", **{**own, **changes})


def rope(rope_type, **values):
    return {"rope_type": rope_type, "rope_theta": 500.0, "partial_rotary_factor": 1.0, **values}


def longrope(dims=4, **values):
    factors = dict(short_factor=SHORT[:dims], long_factor=LONG[:dims])
    return rope("longrope", **factors, original_max_position_embeddings=16, **values)


class TestPhi3(Suite):
    arch = ligermodels.Phi3
    TINY = {
        "plain": tiny(num_key_value_heads=None),
        "window": tiny(sliding_window=6),
        "half_of_a_head_rotates": tiny(rope_parameters=rope("default", partial_rotary_factor=0.5)),
        "phi4": tiny(
            original_max_position_embeddings=128,
            rope_parameters={"rope_type": "default", "rope_theta": 250000, "partial_rotary_factor": 1.0},
        ),
        "longrope": tiny(num_key_value_heads=4, rope_parameters=longrope()),
        "longrope_in_a_window": tiny(sliding_window=9, rope_parameters=longrope()),
        "longrope_partial_tied": tiny(
            num_key_value_heads=1, tie_word_embeddings=True, rope_parameters=longrope(3, partial_rotary_factor=0.75)
        ),
        "longrope_with_an_attention_factor": tiny(rope_parameters=longrope(attention_factor=1.7)),
    }
    ALSO = ("longrope", "longrope_partial_tied")
    # Sizes and counts are exact; fields without a say in them (special ids, some factor lists) may differ.
    REAL = {
        "Phi-3-mini-4k-instruct": 3_821_079_552,
        "Phi-3-mini-128k-instruct": 3_821_079_552,
        "Phi-3-medium-4k-instruct": 13_960_238_080,
        "Phi-3-medium-128k-instruct": 13_960_238_080,
        "Phi-3.5-mini-instruct": 3_821_079_552,
        "phi-4": 14_659_507_200,
        "Phi-4-mini-instruct": 3_836_021_760,
    }

    def earlier_generation(self, config):
        """As transformers 4 wrote it: `type` and the lists in rope_scaling, the rest at the top level."""
        config = dict(config)
        scaling = dict(config.pop("rope_parameters"))
        config["rope_theta"] = scaling.pop("rope_theta")
        partial = scaling.pop("partial_rotary_factor", 1.0)
        config.pop("partial_rotary_factor", None)
        if partial != 1.0:  # a key of the later 4.x
            config["partial_rotary_factor"] = partial
        config["torch_dtype"] = config.pop("dtype", "float32")
        scaling.pop("original_max_position_embeddings", None)
        rope_type = scaling.pop("rope_type")
        config["rope_scaling"] = None if rope_type == "default" else {"type": "longrope", **scaling}
        return config

    def test_cached_decoding_equals_the_full_forward(self, model, ids):
        """On either side of the original length, where LongRoPE has one; across it, see below."""
        for length, split in ((16, [9, 3, 1, 1, 1, 1]), (24, [17, 3, 1, 1, 1, 1])):
            cache = model.new_cache(2, 24)
            parts = ids[:, :length].split(split, dim=1)
            steps = [model(part, past_key_values=cache).logits for part in parts]
            assert relative(torch.cat(steps, dim=1), model(ids[:, :length]).logits) < LOGITS

    def test_packed_equals_separate(self, model, ids):
        """Sequences of one row on the same side of the original length: that of the longest one counts for all."""
        if model.config.rope_parameters["rope_type"] == "default":
            return super().test_packed_equals_separate(model, ids)
        for first, second, longest in ((10, 14, 14), (20, 28, 28)):
            text = torch.cat([ids, ids.flip(1)], dim=1)
            parts = [text[:1, :first], text[1:, :second]]
            packed, positions = torch.cat(parts, dim=1), torch.cat([torch.arange(first), torch.arange(second)])[None]
            bounds = torch.tensor([0, first, first + second], dtype=torch.int32)
            expected = torch.cat([model(part).logits for part in parts], dim=1)
            assert relative(model(packed, position_ids=positions).logits, expected) < LOGITS
            assert relative(model(packed, cu_seqlens=bounds, max_seqlen=longest).logits, expected) < LOGITS


@pytest.fixture
def ids():
    return torch.randint(3, 97, (2, 40))


def load(folder):
    return ligermodels.Phi3.from_hub(folder, progress=False)


@pytest.mark.parametrize(("prompt", "window"), [(9, None), (16, None), (15, 6), (17, 6)])
def test_generation_across_the_original_length(tmp_path, ids, prompt, window):
    """The tokens are those of transformers, and are those of a full forward for each of them."""
    folder = write_checkpoint(tiny(sliding_window=window, rope_parameters=longrope()), tmp_path)
    model, text = load(folder), ids[:, :prompt]
    generated = model.generate(text, max_new_tokens=14, eos_token_id=[])
    options = dict(max_new_tokens=14, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(generated, theirs(folder).generate(text, **options))
    for length in range(prompt, generated.shape[1]):
        assert torch.equal(model(generated[:, :length]).logits[:, -1].argmax(-1), generated[:, length])


def test_the_original_length_is_read_at_the_top_level(written, ids):
    folder = written(tiny(rope_parameters=longrope()))
    expected = load(folder)(ids[:, :12]).logits
    nested = longrope()
    del nested["original_max_position_embeddings"]
    edit_config(folder, rope_parameters=nested)
    assert torch.equal(load(folder)(ids[:, :12]).logits, expected)
    edit_config(folder, original_max_position_embeddings=8)
    assert relative(load(folder)(ids[:, :12]).logits, expected) > 100 * LOGITS
    missing = tiny(rope_parameters=nested)  # 4096, whatever the longest text is
    del missing["original_max_position_embeddings"]
    assert Phi3Config.from_hf(missing).rope_parameters["original_max_position_embeddings"] == 4096
