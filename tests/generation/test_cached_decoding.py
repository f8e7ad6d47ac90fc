"""Windows and every rope type: a step with the cache gives the logits of the full forward."""

import pytest
import torch
import torch.nn.functional as F

from tests.generation.models import ROPES, llama, padded


def cached_logits(model, ids, mask, steps):
    """What generate saw at every step: (ids [B, S + steps], logits [B, steps, V])."""
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=steps, return_dict_in_generate=True, output_logits=True
    )
    return out.sequences, torch.stack(out.logits, 1)


def full_logits(model, ids, mask):
    mask = F.pad(mask.long(), (0, ids.shape[1] - mask.shape[1]), value=1)
    return model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits


@pytest.mark.parametrize("windows, rope, lengths, extra", [
    # Prompts shorter than, as long as and longer than the window, past many turns of the ring.
    *((windows, "default", *rows) for windows in [(4, None), (1, 9), (30, 10)] for rows in [([9], 0), ([9, 9, 3], 4)]),
    *(((6, None), rope, [12, 3], 9) for rope in sorted(ROPES.keys() - {"default", "dynamic", "longrope"})),
    # Below, at and past 16, the original length; with padding it switches by positions, not columns.
    *(((6, None), "longrope", *rows) for rows in [([15], 0), ([16], 0), ([17], 0), ([12, 3], 9), ([16, 4], 1)]),
], ids=str)  # fmt: skip
def test_cached_decoding_is_the_full_forward(windows, rope, lengths, extra):
    model, (ids, mask), steps = llama(windows, rope), padded(lengths, extra), 25 if rope == "default" else 12
    width = ids.shape[1]
    out, logits = cached_logits(model, ids, mask, steps)
    if rope == "longrope":  # each call has its own tables
        ends = range(width, width + steps)
        full = torch.stack([full_logits(model, out[:, :end], mask)[:, -1] for end in ends], 1)
    else:
        full = full_logits(model, out, mask)[:, width - 1 : -1]
    torch.testing.assert_close(logits, full, rtol=1e-4, atol=1e-4)  # fp32 sums in another order; logits are ~1
    assert torch.equal(out[:, width:], full.argmax(-1))
    assert out[:, width:].unique().numel() > 4, "a model that repeats itself proves little"
    other = llama(rope=rope) if rope == "default" else llama(windows)
    assert not torch.allclose(full_logits(other, out, mask), full_logits(model, out, mask), atol=0.01)


@pytest.mark.filterwarnings("ignore:prompt and new tokens may reach")
@pytest.mark.parametrize("lengths", [[20], [12, 5, 3]], ids=str)
def test_dynamic_keeps_its_keys_past_the_trained_length_as_transformers_does(lengths, tmp_path):
    from transformers import LlamaForCausalLM

    ours, (ids, mask) = llama(rope="dynamic", positions=16), padded(lengths)
    theirs = LlamaForCausalLM.from_pretrained(ours.save_pretrained(tmp_path / "model"))
    out, logits = cached_logits(ours, ids, mask, 24)
    expected = theirs.generate(
        ids, attention_mask=mask.long(), max_new_tokens=24, do_sample=False, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    assert torch.equal(out, expected.sequences)
    torch.testing.assert_close(logits, torch.stack(expected.logits, 1), rtol=1e-4, atol=1e-4)  # as above
    last = full_logits(ours, out[:, :-1], mask)[:, -1]
    assert not torch.allclose(logits[:, -1], last, atol=0.01), "the full forward would rotate the keys otherwise"
