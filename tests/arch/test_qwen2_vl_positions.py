"""Positions of Qwen2-VL's tokens: against transformers, packed, and made by a data loader."""

import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

import ligermodels
from ligermodels.arch.qwen2_vl import Qwen2VLConfig
from tests.arch.qwen2_vl import IMAGE, image, inputs, load, tiny, token_mask, video
from tests.arch.suite import GRADIENTS, LOGITS, relative


@pytest.fixture
def model(written):
    return load(written(tiny(num_key_value_heads=4)))


PARTS = st.one_of(
    st.integers(1, 5),
    st.tuples(st.just("image"), st.tuples(st.just(1), st.integers(1, 4), st.integers(1, 4))),
    st.tuples(st.just("video"), st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 3))),
)


def theirs_positions(batch):
    """get_rope_index of transformers, which needs of its model but these."""
    stub = types.SimpleNamespace(
        config=types.SimpleNamespace(vision_config=types.SimpleNamespace(spatial_merge_size=2)),
        get_vision_position_ids=lambda *args, **options: Qwen2VLModel.get_vision_position_ids(None, *args, **options),
    )
    known = {"input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw", "attention_mask"}
    return Qwen2VLModel.get_rope_index(stub, **{name: value for name, value in batch.items() if name in known})


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.lists(PARTS, min_size=1, max_size=5), min_size=1, max_size=3), st.sampled_from(["left", "right"]))
def test_positions_of_any_text(rows, pad):
    batch, config = inputs(rows, pad=pad), Qwen2VLConfig.from_hf(tiny())
    tokens = token_mask(batch)
    batch["input_ids"][~tokens] = IMAGE  # which counts for nothing there
    known = {name: value for name, value in batch.items() if "pixel" not in name and name != "mm_token_type_ids"}
    positions, deltas = config.get_rope_index(**known, video_rule="5.x")
    expected, expected_deltas = theirs_positions(batch)
    assert torch.equal(positions, expected) and torch.equal(deltas, expected_deltas)
    # the same rows without their padding, packed into one
    texts = [batch["input_ids"][row, tokens[row]] for row in range(len(rows))]
    bounds = torch.tensor([0, *map(len, texts)]).cumsum(0, dtype=torch.int32)
    sizes = {name: value for name, value in known.items() if "grid" in name}
    packed, _ = config.get_rope_index(torch.cat(texts)[None], **sizes, cu_seqlens=bounds, video_rule="5.x")
    assert torch.equal(packed[:, 0], torch.cat([positions[:, row, tokens[row]] for row in range(len(rows))], dim=1))


def test_the_rules_differ_after_long_videos():
    """Text after 5 frames of 2 x 1 tokens that began at 9 continues at 14 or at 11: with get_rope_index of transformers
    4.57 and of 5.23."""
    batch, config = inputs([[8, video(5, 2, 1), 2]]), Qwen2VLConfig.from_hf(tiny())
    for rule, then, delta in (("4.x", 14, -5), ("5.x", 11, -8)):
        positions, deltas = config.get_rope_index(batch["input_ids"], None, batch["video_grid_thw"], video_rule=rule)
        assert positions[:, 0, 19].tolist() == [then] * 3 and deltas.item() == delta
    assert config.video_rule == "4.x" and "video_rule" not in config.to_hf()
    other = Qwen2VLConfig.from_hf(tiny(video_rule="5.x"))
    assert other.to_hf()["video_rule"] == "5.x" and Qwen2VLConfig.from_hf(other.to_hf()) == other
    model = ligermodels.Qwen2VL.from_config(tiny(initializer_range=0.3), dtype=torch.float32)
    earlier = model(**batch).logits
    model.config.video_rule = "5.x"
    later = model(**batch).logits
    assert relative(earlier[:, :19], later[:, :19]) < LOGITS < 100 * LOGITS < relative(earlier[:, 19:], later[:, 19:])


def test_packed_rows_equal_separate_ones(model):
    torch.manual_seed(3)
    parts = [inputs([[3, image(2, 3), 2]]), inputs([[7]]), inputs([[1, video(3, 1, 1), image(2, 2), 4]])]
    ids = torch.cat([part["input_ids"] for part in parts], dim=1)
    rest = {
        name: torch.cat([part[name] for part in parts if name in part])
        for name in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
    }
    lengths = [part["input_ids"].shape[1] for part in parts]
    bounds = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    text = torch.cat([torch.arange(length) for length in lengths])[None]
    positions, _ = model.config.get_rope_index(ids, rest["image_grid_thw"], rest["video_grid_thw"], cu_seqlens=bounds)
    expected = torch.cat([model(**part).logits for part in parts], dim=1)
    for options in (
        dict(cu_seqlens=bounds, max_seqlen=max(lengths)),
        dict(cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=99, max_length_k=99),
        dict(position_ids=text),
        dict(position_ids=positions, cu_seqlens=bounds),
        dict(position_ids=torch.cat([text[None], positions])),
    ):
        assert relative(model(ids, **rest, **options).logits, expected) < LOGITS
    assert relative(model(ids, **rest).logits, expected) > 100 * LOGITS

    def gradients(calls):
        model.zero_grad()
        losses = [model(**call, labels=call["input_ids"], num_items_in_batch=10).loss for call in calls]
        sum(losses).backward()
        return sum(losses).detach(), {name: p.grad.clone() for name, p in model.named_parameters()}

    loss, found = gradients([dict(input_ids=ids, **rest, position_ids=positions, cu_seqlens=bounds)])
    total, wanted = gradients(parts)
    assert abs(loss - total) < LOGITS * total
    assert all(relative(found[name], wanted[name]) < GRADIENTS for name in wanted)
