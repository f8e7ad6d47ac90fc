"""A mixer with a state of its own decodes as the full forward: a model of recurrent and attention layers.

The recurrent mixer is h = a * h + x, whose state [rows, hidden] is not keys and values, and cannot go back.
"""

import random

import pytest
import torch
from torch import nn

import ligermodels
from ligermodels.arch.block import ResidualBlock
from ligermodels.errors import InputError
from ligermodels.generation import generate, generate_iter, generate_many, graphs
from ligermodels.generation.drafters import PromptLookup
from ligermodels.layers import Attention, Batch, GatedDeltaNet, GatedMLP, RMSNorm
from ligermodels.layers.state import Cache
from tests.generation.models import config, padded, prompt, with_large_weights


class RecurrentState:
    """h [rows, H] after the last token."""

    def __init__(self, rows, size, dtype, device):
        self.h = torch.zeros(rows, size, dtype=dtype, device=device)

    def reset(self):
        self.h.zero_()

    def reserve(self, length, past, tokens=1):
        pass

    def crop(self, length, cache):
        return length == cache.length

    def reorder(self, rows):
        self.h = self.h[rows]

    def copy_rows_from(self, other, rows, into, length):
        self.h[into] = other.h[rows]

    def tensors(self):
        return [self.h]


class Recurrent(nn.Module):
    def __init__(self, size, a):
        super().__init__()
        self.size, self.a, self.in_proj = size, a, nn.Linear(size, size, bias=False)

    def new_state(self, rows, max_length, *, whole, kv_cache_dtype, dtype, device):
        return RecurrentState(rows, self.size, dtype, device)

    def forward(self, x, batch, state=None):
        x, mask = self.in_proj(x), batch.key_mask
        if mask is not None:
            x = x * mask[:, -x.shape[1] :, None]
        if consecutive := state is not None and len(x) > len(state.h):  # a step that verifies proposed tokens
            x = x.transpose(0, 1)
        h, found = torch.zeros_like(x[:, 0]) if state is None else state.h, []
        for new in x.unbind(1):
            h = self.a * h + new
            found.append(h)
        out = torch.stack(found, 1)
        if state is not None:
            state.h.copy_(h)
        return out.transpose(0, 1) if consecutive else out


class HybridBlock(ResidualBlock):
    def __init__(self, config, layer):
        super().__init__()
        size = config.hidden_size
        self.mixer = Recurrent(size, 0.8) if layer % 2 == 0 else Attention(
            size, num_heads=4, num_kv_heads=2, head_dim=8, window=6)  # fmt: skip
        self.mlp = GatedMLP(size, config.intermediate_size)
        self.mixer_norm, self.mlp_norm = RMSNorm(size), RMSNorm(size)

    def forward(self, x, residual, batch, cache=None):
        x, residual = self.mixer_norm(x, residual)
        x, residual = self.mlp_norm(self.mixer(x, batch, cache), residual)
        return self.mlp(x), residual


class Hybrid(ligermodels.Llama):
    block_class = HybridBlock


def qwen3_5():
    linear = dict(linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4)
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    changes = dict(model_type="qwen3_5_text", num_hidden_layers=3, layer_types=kinds, head_dim=16, **linear)
    return ligermodels.Qwen3_5.from_config(config(**changes), seed=0)


@pytest.fixture(params=[False, True], ids=["by host", "as a graph would"])
def by_graph(request, monkeypatch):
    monkeypatch.setattr(graphs, "DEVICES", {"cpu", "cuda"} if request.param else set())
    monkeypatch.setattr(graphs, "obstacle_to_capture", lambda model: None)  # the classes of this file


@pytest.fixture(
    params=[lambda: Hybrid.from_config(config(num_hidden_layers=3), seed=0), qwen3_5], ids=["toy", "qwen3_5"]
)
def model(request, by_graph):
    return with_large_weights(request.param()).requires_grad_(False)


def by_full_forward(model, ids, mask, steps=20):
    with torch.no_grad():
        for _ in range(steps):
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    return ids


def test_generate(model):
    ids, mask = padded([9, 4, 13])
    expected = by_full_forward(model, ids, mask)
    assert expected[:, 13:].unique().numel() > 10, "a model that repeats itself proves little"
    for options in ({}, dict(prefill_chunk_size=4), dict(use_cache=False)):
        assert torch.equal(generate(model, ids, attention_mask=mask, max_new_tokens=20, **options), expected)
    options = dict(attention_mask=mask, max_new_tokens=20, do_sample=True, seed=1, num_return_sequences=2)
    assert torch.equal(generate(model, ids, top_k=1, **options), expected.repeat_interleave(2, 0))


def test_generate_many(model):
    texts = [prompt(length=length)[0] for length in (9, 4, 13, 1, 6)]
    for chunk in (None, 4):
        found = generate_many(model, texts, max_new_tokens=20, batch_size=2, prefill_chunk_size=chunk)
        for ids, new in zip(texts, found, strict=True):
            expected = by_full_forward(model, ids[None], torch.ones_like(ids)[None])
            assert torch.equal(new, expected[0, len(ids) :])


def test_rows_move_and_a_cache_continues(model):
    ids, order = prompt(3, 12), torch.tensor([2, 0, 0, 1])
    cache = model.new_cache(3, 20)
    model(ids, past_key_values=cache)
    cache.reorder(order)
    assert {x.shape[0] for state in cache for x in state.tensors() if x.dim() > 1} == {4}
    text = torch.cat([ids[order], prompt(4, 3)], 1)
    found = generate(model, text, attention_mask=torch.ones_like(text), past_key_values=cache, max_new_tokens=20)
    assert torch.equal(found, by_full_forward(model, text, torch.ones_like(text)))


def test_a_cache_after_a_row_that_ended_early_continues_without_its_pad_ids(by_graph):
    """A recurrent state, which has read them, is emptied; a mask, which attention takes, is refused."""
    model, (ids, _) = with_large_weights(qwen3_5()), padded([9, 9])
    plain = generate(model, ids, attention_mask=torch.ones_like(ids), max_new_tokens=8)
    stop = plain[0, 11].item()
    assert stop not in plain[1]
    own = dict(eos_token_id=stop, pad_token_id=0, return_dict_in_generate=True)
    first = generate(model, ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, **own)
    more, mask = prompt(2, 3), torch.arange(20) >= torch.tensor([[5], [0]])
    text = torch.stack([torch.cat([ids[0, :5] * 0, plain[0, :12], more[0]]), torch.cat([plain[1], more[1]])])
    options = dict(attention_mask=mask, max_new_tokens=6)
    expected = generate(model, text, **options)
    assert torch.equal(generate(model, text, past_key_values=first.past_key_values, **options), expected)
    with_gap = torch.cat([first.sequences, more], 1)
    options["attention_mask"] = torch.cat([first.sequences != 0, more != 0], 1)
    for cached in ({}, dict(past_key_values=model.new_cache(2, 1))):
        with pytest.raises(InputError, match="no padding between tokens"):
            generate(model, with_gap, **cached, **options)


def test_a_gap_in_the_mask_of_cached_tokens_is_taken():
    """A text that was padded on the right when it was cached."""
    model, ids, mask = with_large_weights(qwen3_5()), prompt(2, 9), torch.arange(9) < torch.tensor([[6], [9]])
    cache, more = model.new_cache(2, 20), prompt(2, 3)
    model(ids, mask, (mask.cumsum(1) - 1), past_key_values=cache)
    mask = torch.nn.functional.pad(mask, (0, 3), value=True)
    found = generate(model, torch.cat([ids, more], 1), attention_mask=mask, past_key_values=cache, max_new_tokens=6)
    text = torch.cat([ids[:1, :6], more[:1]], 1)
    assert torch.equal(found[0, 12:], generate(model, text, max_new_tokens=6)[0, 9:])


def guess(monkeypatch, text, rate):
    """Prompt lookup guesses the tokens of `text`, each with this probability, else another one."""

    def foresee(self, tokens, states):
        draw, ahead = random.Random(len(tokens)), text[len(tokens) :][: self.count]
        return [token if draw.random() < rate else (token + 1) % 90 for token in ahead]

    monkeypatch.setattr(PromptLookup, "propose", foresee)


@pytest.mark.parametrize("rate", [0.0, 0.6, 1.0])
def test_rejected_tokens_leave_no_trace(model, monkeypatch, rate):
    """The text is the greedy one, and qwen3_5 reads its prompt once: its state goes back, that of the toy cannot."""
    ids, passes = prompt(1, 12), []
    expected = by_full_forward(model, ids, torch.ones_like(ids))
    guess(monkeypatch, expected[0].tolist(), rate)
    hook = model.model.embed_tokens.register_forward_pre_hook(lambda _, inputs: passes.append(inputs[0].numel()))
    for chunk in (None, 5):
        passes.clear()
        options = dict(prompt_lookup_num_tokens=3, max_new_tokens=20, prefill_chunk_size=chunk)
        found = generate(model, ids, return_dict_in_generate=True, **options)
        assert torch.equal(found.sequences, expected)
        if not isinstance(model, Hybrid):
            assert max(passes) <= (chunk or 12) and (chunk or passes.count(12) == 1)
    hook.remove()
    if not isinstance(model, Hybrid):  # the states are to rounding those of the text that was kept
        text, plain = found.sequences[:, : found.past_key_values.length], model.new_cache(1, 40)
        model(text, past_key_values=plain)
        for state, wanted in zip(found.past_key_values, plain, strict=True):
            for x, y in (
                zip(*(s.read(plain.length) for s in (state, wanted)), strict=True) if hasattr(state, "read") else ()
            ):
                torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def test_a_state_goes_back_and_no_further():
    """To the state after each of the last tokens, whatever was dropped, where it is stored."""
    layer = GatedDeltaNet(16, num_key_heads=1, num_value_heads=2, key_head_dim=8, value_head_dim=8)
    layer.requires_grad_(False)
    x, mask = torch.randn(1, 12, 16), torch.ones(1, 4, dtype=torch.bool)

    def run(cache, begin, end, text=x, **options):
        y = layer(text[:, begin:end], Batch(past_length=cache.length, **options), cache[0])
        cache.advance(end - begin)
        return y

    def started(tokens=4):
        cache = Cache([layer.new_state(1, 12, dtype=torch.float32, device="cpu")], 1)
        cache.reserve(12, tokens)
        run(cache, 0, 12)
        cache.reset()
        run(cache, 0, 4)
        return cache

    whole = layer(x, Batch())
    for length in (5, 6, 7, 8):
        others = torch.cat([x[:, :length], torch.randn(1, 12 - length, 16)], 1)
        found = []
        for text in (x, others):
            cache = started()
            run(cache, 4, 8, text)
            cache.crop(length)
            assert cache.length == length
            found.append(run(cache, length, 9))
        assert torch.equal(*found)  # of four tokens the first is one more than the ring has columns
        torch.testing.assert_close(found[0], whole[:, length:9])
    cache = started()
    for end in (5, 6, 7):
        run(cache, end - 1, end)
    cache.crop(5)  # tokens of several passes
    torch.testing.assert_close(run(cache, 5, 8), whole[:, 5:8])
    for tokens, passes in (
        (1, lambda cache: run(cache, 4, 8)),  # nothing is reserved
        (3, lambda cache: run(cache, 4, 8)),  # less than the pass
        (256, lambda cache: run(cache, 4, 8)),  # as chat does for layers with windows
        (4, lambda cache: run(cache, 4, 8, token_mask=mask)),
        (4, lambda cache: [run(cache, i, i + 1) for i in range(4, 11)]),  # too far
        (1, lambda cache: (run(cache, 4, 8), cache.reserve(12, 4))),  # too late
    ):
        cache = started(tokens)
        passes(cache)
        cache.crop(7)
        assert cache.length == 0


def test_an_empty_state_takes_the_dtype_of_the_first_tokens():
    """As under autocast; the matrices stay in fp32."""
    layer = GatedDeltaNet(16, num_key_heads=1, num_value_heads=2, key_head_dim=8, value_head_dim=8)
    for tokens in (1, 4):
        state = layer.new_state(1, 12, dtype=torch.float32, device="cpu")
        state.reserve(12, 0, tokens)
        state.move(torch.zeros(1, dtype=torch.bfloat16))
        assert [x.dtype for x in state.buffers] == [torch.bfloat16, torch.float32]
        assert [x.shape[1] for x in state.buffers] == [3 + tokens, tokens]
        assert not any(x.any() for x in state.buffers)


def test_what_cannot_go_back_is_computed_again(model):
    """After a stream that was left: the states are empty, the text is right."""
    ids = prompt(1, 4).repeat(1, 3)
    expected = by_full_forward(model, ids, torch.ones_like(ids))
    assert torch.equal(generate(model, ids, max_new_tokens=20, prompt_lookup_num_tokens=3), expected)
    cache = model.new_cache(1, 40)
    stream = generate_iter(model, ids, max_new_tokens=20, past_key_values=cache)
    new = [next(stream).item() for _ in range(5)]
    stream.close()
    assert new == expected[0, 12:17].tolist() and cache.length in (0, 16)
    text = expected[:, :18]
    assert torch.equal(generate(model, text, past_key_values=cache, max_new_tokens=14), expected)


@pytest.mark.parametrize("options", [{}, dict(prefill_chunk_size=5), dict(prompt_lookup_num_tokens=3)])
def test_a_pass_that_fails_leaves_no_trace(model, options):
    """As when memory runs out, or at Ctrl-C: the first layers have read tokens that the last one has not."""
    ids = prompt(1, 12)
    expected = by_full_forward(model, ids, torch.ones_like(ids))
    for passes in (1, 2, 4):
        cache, left = model.new_cache(1, 40), iter(range(passes))

        def fail(*_, left=left):
            if next(left, None) is None:
                raise torch.OutOfMemoryError

        hook = model.model.layers[-1].mlp.register_forward_pre_hook(fail)
        with pytest.raises(torch.OutOfMemoryError):
            generate(model, ids, max_new_tokens=20, past_key_values=cache, **options)
        hook.remove()
        found = generate(model, ids, max_new_tokens=20, past_key_values=cache, **options)
        assert torch.equal(found, expected)
