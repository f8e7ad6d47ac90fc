"""generate against transformers' own loop and processors, on a model small enough to think about."""

import itertools
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ligermodels
from ligermodels.cache import KVCache
from ligermodels.errors import InputError
from ligermodels.generate import (
    generate,
    generate_iter,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalize_repetition,
)
from tests.text import folders

VOCAB = 31


class _Cache:
    """Remembers hidden states, as a KV cache remembers keys: enough for attention over everything before."""

    def __init__(self):
        self.x = None

    def extend(self, x):
        self.x = x if self.x is None else torch.cat([self.x, x], 1)
        return self.x

    def reset(self):
        self.x = None


class Tiny(nn.Module):
    """One attention layer with learned positions, called as every model of the zoo is."""

    def __init__(self, positions: int = 64):
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, 16), nn.Embedding(positions, 16)
        self.head = nn.Linear(16, VOCAB, bias=False)
        for p in self.parameters():
            nn.init.normal_(p, generator=torch.Generator().manual_seed(p.numel()))
        self.config = SimpleNamespace(
            vocab_size=VOCAB, eos_token_id=None, pad_token_id=None, max_position_embeddings=positions
        )
        self.generation_config = {}
        self.calls = []
        self.rotary = SimpleNamespace(switches=lambda past, length: past == self.switches_at)
        self.switches_at = None

    @property
    def device(self):
        return self.embed.weight.device

    def get_input_embeddings(self):
        return self.embed

    def new_cache(self, batch_size, max_length):
        return _Cache()

    def forward(
        self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=False,
        logits_to_keep=0,
    ):  # fmt: skip
        self.calls.append((tuple(input_ids.shape), logits_to_keep))
        past = 0 if past_key_values is None or past_key_values.x is None else past_key_values.x.shape[1]
        total = past + input_ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(past, total, device=self.device)[None]
        x = self.embed(input_ids) + 2 * self.place(position_ids)
        keys = x if past_key_values is None else past_key_values.extend(x)
        visible = torch.ones(x.shape[1], total, dtype=torch.bool, device=self.device).tril(past)[None]
        if attention_mask is not None:
            assert attention_mask.shape == (len(x), total)
            visible = visible & attention_mask.bool()[:, None]
        scores = (x @ keys.mT / 16).masked_fill(~visible, -1e9)
        logits = self.head(scores.softmax(-1) @ keys + x)
        return SimpleNamespace(logits=logits[:, -logits_to_keep:] if logits_to_keep else logits)


@pytest.fixture
def model():
    return Tiny().requires_grad_(False)


def _prompt(rows=1, length=5):
    return torch.randint(0, VOCAB, (rows, length))


def _greedy_by_hand(model, ids, steps):
    for _ in range(steps):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    return ids


# ---- the loop ----


def test_greedy_equals_the_full_forward_at_every_step(model):
    prompt = _prompt(rows=3)
    ids = generate(model, prompt, max_new_tokens=20)
    torch.testing.assert_close(ids, _greedy_by_hand(model, prompt, 20))
    assert len(set(ids[0, 5:].tolist())) > 3, "a model that repeats itself proves little"


def test_prefill_once_then_one_token_a_step_and_one_logit_row(model):
    generate(model, _prompt(rows=2), max_new_tokens=4)
    assert model.calls == [((2, 5), 1), ((2, 1), 1), ((2, 1), 1), ((2, 1), 1)]


def test_left_padding_changes_nothing(model):
    prompts = [_prompt(length=n) for n in (3, 7, 5)]
    ids, mask = torch.zeros(3, 7, dtype=torch.int64), torch.zeros(3, 7, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, 7 - prompt.shape[1] :], mask[row, 7 - prompt.shape[1] :] = prompt[0], 1
    together = generate(model, ids, attention_mask=mask, max_new_tokens=12, repetition_penalty=1.3)
    for row, prompt in enumerate(prompts):
        alone = generate(model, prompt, max_new_tokens=12, repetition_penalty=1.3)
        torch.testing.assert_close(together[row, 7:], alone[0, prompt.shape[1] :])
    assert not torch.equal(generate(model, ids, max_new_tokens=12), together), "the mask must matter"


@pytest.mark.parametrize("padding", [0, 2])
def test_where_rotation_switches_the_whole_text_runs_again(model, padding):
    """By tokens of the longest row, here 5: columns of padding do not count. Tiny's text stays the same."""
    prompt = F.pad(_prompt(rows=2), (padding, 0))
    mask = torch.ones_like(prompt)
    mask[0, : padding + 1], mask[1, :padding] = 0, 0
    options = dict(attention_mask=mask, max_new_tokens=9, repetition_penalty=1.5)
    expected = generate(model, prompt, **options)
    model.calls.clear()
    model.switches_at = 7
    torch.testing.assert_close(generate(model, prompt, **options), expected)
    shapes = [(2, padding + 5), (2, 1), (2, 1), (2, padding + 8)] + [(2, 1)] * 5
    assert model.calls == [(shape, 1) for shape in shapes]


def test_rows_that_stop_early_are_padded_and_the_longest_ends_the_loop(model):
    prompt = _prompt(rows=3)
    free = generate(model, prompt, max_new_tokens=16)[:, 5:]
    eos, other = free[0, 2].item(), free[1, 6].item()
    first = [min((row.tolist().index(i) for i in (eos, other) if i in row), default=15) for row in free]
    ids = generate(model, prompt, max_new_tokens=16, eos_token_id=[eos, other], pad_token_id=9)[:, 5:]
    assert ids.shape[1] == max(first) + 1 and len(set(first)) > 1
    for row, end in enumerate(first):
        assert ids[row, : end + 1].tolist() == free[row, : end + 1].tolist()
        assert (ids[row, end + 1 :] == 9).all()


def test_stop_ids_are_the_union_of_both_configs(model):
    prompt = _prompt()
    free = generate(model, prompt, max_new_tokens=16)[0, 5:].tolist()
    third, fifth = free[3], free[5]
    model.generation_config["eos_token_id"], model.config.eos_token_id = [fifth], third
    assert generate(model, prompt, max_new_tokens=16).shape[1] == 5 + free.index(third) + 1
    model.config.eos_token_id = None
    assert generate(model, prompt, max_new_tokens=16).shape[1] == 5 + free.index(fifth) + 1
    assert generate(model, prompt, max_new_tokens=16, eos_token_id=()).shape[1] == 5 + 16


@pytest.mark.parametrize("saved", [None, -1, 7])
def test_pads_with_the_saved_pad_id_or_else_the_first_stop_id(model, saved):
    model.generation_config["pad_token_id"] = saved
    prompt = _prompt(rows=2)
    first, second = generate(model, prompt, max_new_tokens=6)[:, 5:].tolist()
    stop = next(i for i in first[:-1] if i not in second)
    ids = generate(model, prompt, max_new_tokens=6, eos_token_id=[stop])[:, 5:]
    assert ids[1].tolist() == second and ids[0, -1] == (saved if saved == 7 else stop)


def test_generation_config_samples_nothing_silently(model):
    prompt = _prompt()
    model.generation_config.update(temperature=5.0, do_sample=True, repetition_penalty=9.0, max_new_tokens=2)
    torch.testing.assert_close(generate(model, prompt, max_new_tokens=9), _greedy_by_hand(model, prompt, 9))


def test_stream_and_streamer_say_what_generate_returns(model):
    class Log:
        def __init__(self):
            self.ids, self.ended = [], False

        def put(self, value):
            assert value.device.type == "cpu" and not self.ended
            self.ids.append(value)

        def end(self):
            self.ended = True

    log, prompt = Log(), _prompt(rows=2)
    eos = generate(model, prompt, max_new_tokens=9)[0, 8].item()
    ids = generate(model, prompt, max_new_tokens=9, eos_token_id=eos, streamer=log)
    torch.testing.assert_close(log.ids[0], prompt)
    torch.testing.assert_close(torch.stack(log.ids[1:], 1), ids[:, 5:])
    assert log.ended
    steps = list(generate_iter(model, prompt, max_new_tokens=9, eos_token_id=eos))
    torch.testing.assert_close(torch.stack(steps, 1), ids[:, 5:])
    assert len(list(itertools.islice(generate_iter(model, prompt, max_new_tokens=9), 2))) == 2


def test_records_no_gradients_and_leaves_them_on_for_the_caller_of_a_stream():
    def check(ids, logits):
        assert not logits.requires_grad
        return logits

    stream = generate_iter(Tiny(), _prompt(), max_new_tokens=3, logits_processor=check)
    next(stream)
    assert torch.is_grad_enabled()


def test_returned_ids_can_be_trained_on():
    model = Tiny()
    ids = generate(model, _prompt(), max_new_tokens=3)
    model(ids).logits.sum().backward()
    assert model.embed.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("switches_at", [None, 7])
@pytest.mark.parametrize("stops", [False, True])
def test_reads_the_device_once_a_step_and_only_where_needed(model, stops, switches_at, monkeypatch):
    reads, model.switches_at = [], switches_at
    for name in ("cpu", "item", "__bool__", "__int__"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda x, *a, f=original, n=name: (reads.append(n), f(x, *a))[1])
    prompt, steps = _prompt(rows=2), 6
    generate(model, prompt, max_new_tokens=steps, eos_token_id=VOCAB + 5 if stops else (), pad_token_id=0)
    # with stop ids: one copy a step, which brings the NaN verdict along
    assert reads == (["cpu"] * steps if stops else ["__bool__"])


@pytest.mark.gpu
def test_never_waits_for_the_gpu_without_stop_ids(device):
    model = Tiny().to(device)
    stream = generate_iter(model, _prompt().to(device), max_new_tokens=2)  # compiles and allocates
    list(stream)
    from ligermodels.generate import _decode, _Request, _Sampler

    sampler = _Sampler(0.8, 5, 0.9, 0.01, 1.1, 0)
    request = _Request.checked(
        model, _prompt(rows=2).to(device), None, 8, sampler, (), 0, None, None, None, {}
    )  # fmt: skip
    steps = _decode(request, to_host=False)
    next(steps)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(7):
            next(steps)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- sampling ----


def _logits(rows=8, vocab=200, spread=3.0):
    return torch.randn(rows, vocab) * spread


@pytest.mark.parametrize("k", [1, 2, 50, 200, 999])
def test_top_k_is_transformers(k):
    from transformers import TopKLogitsWarper

    logits = _logits().round(decimals=1)  # ties
    torch.testing.assert_close(keep_top_k(logits, k), TopKLogitsWarper(k)(None, logits), rtol=0, atol=0)


@pytest.mark.parametrize("p", [1e-6, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.01, 3.0, 30.0])
def test_top_p_is_transformers(p, spread):
    from transformers import TopPLogitsWarper

    logits = _logits(spread=spread)
    logits[0, 7:] = -torch.inf  # as top_k leaves them
    torch.testing.assert_close(keep_top_p(logits, p), TopPLogitsWarper(p)(None, logits), rtol=0, atol=0)


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    for p, kept in [(0.4, 1), (0.5, 1), (0.51, 2), (0.75, 2), (0.8, 3), (1e-9, 1)]:
        assert keep_top_p(logits, p).isfinite().sum() == kept, p


@pytest.mark.parametrize("p", [0.0, 0.01, 0.5, 1.0])
def test_min_p_is_transformers(p):
    from transformers import MinPLogitsWarper

    logits = _logits()
    torch.testing.assert_close(keep_min_p(logits, p), MinPLogitsWarper(p)(None, logits), rtol=0, atol=0)


@pytest.mark.parametrize("penalty", [0.5, 1.3])
def test_repetition_penalty_is_transformers(penalty):
    from transformers import RepetitionPenaltyLogitsProcessor

    logits, ids = _logits(), torch.randint(0, 200, (8, 30))
    seen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, ids, True)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits)
    torch.testing.assert_close(penalize_repetition(logits, seen, penalty), expected, rtol=0, atol=0)


OPTIONS = [
    dict(temperature=1.0),
    dict(temperature=2.0, top_k=3),
    dict(temperature=1.5, top_p=0.8),
    dict(temperature=2.5, min_p=0.3),
    dict(temperature=3.0, top_k=6, top_p=0.8, min_p=0.1, repetition_penalty=1.4),
    dict(temperature=0.0, repetition_penalty=1.8),
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o))
def test_draws_the_tokens_that_transformers_draws(model, options):
    """Same order of processors and the same random numbers, so the same 24 tokens in 4 rows."""
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    makers = [
        ("repetition_penalty", RepetitionPenaltyLogitsProcessor), ("temperature", TemperatureLogitsWarper),
        ("top_k", TopKLogitsWarper), ("top_p", TopPLogitsWarper), ("min_p", MinPLogitsWarper),
    ]  # fmt: skip
    processors = LogitsProcessorList([make(options[name]) for name, make in makers if options.get(name)])
    ids = prompt = _prompt(rows=4)
    torch.manual_seed(5)
    for _ in range(24):
        logits = processors(ids, model(ids).logits[:, -1])
        token = logits.softmax(-1).multinomial(1) if options["temperature"] else logits.argmax(-1, keepdim=True)
        ids = torch.cat([ids, token], 1)
    torch.testing.assert_close(generate(model, prompt, max_new_tokens=24, seed=5, **options), ids)
    torch.manual_seed(5)
    torch.testing.assert_close(generate(model, prompt, max_new_tokens=24, **options), ids)


def test_a_seed_repeats_and_leaves_the_global_generator_alone(model):
    prompt = _prompt()
    state = torch.get_rng_state()
    a, b, c = (generate(model, prompt, max_new_tokens=20, temperature=2.0, seed=s) for s in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert torch.equal(state, torch.get_rng_state())


def test_draws_follow_the_distribution():
    from ligermodels.generate import _Sampler

    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, -torch.inf]).repeat(20000, 1)
    sampler = _Sampler(1.0, None, None, None, 1.0, 0)
    drawn = sampler.pick(logits, sampler.generator(logits.device)).bincount(minlength=5) / 20000
    expected = logits[0].softmax(-1)
    # 5 standard deviations of a share estimated from 20000 draws
    assert ((drawn - expected).abs() <= 5 * (expected * (1 - expected) / 20000).sqrt()).all()


def test_logits_processor_sees_all_ids_and_comes_after_the_penalty(model):
    lengths = []

    def only_three(ids, logits):
        lengths.append(ids.shape[1])
        return torch.full_like(logits, -torch.inf).index_fill(1, torch.tensor([3]), 0.0)

    ids = generate(model, _prompt(), max_new_tokens=4, temperature=1.0, logits_processor=only_three)
    assert ids[0, 5:].tolist() == [3, 3, 3, 3] and lengths == [5, 6, 7, 8]


# ---- stop strings ----


class Letters:
    """A tokenizer whose ids are letters, so that stop strings fall across tokens where a test says so."""

    def decode(self, ids, skip_special_tokens=True):
        return "".join("abcdefghijklmnopqrstuvwxyz .,:!"[i] for i in ids)


class _Decoder:
    def __init__(self, tokenizer, after):
        self.tokenizer = tokenizer

    def put(self, token):
        return self.tokenizer.decode([token])


def test_stop_strings_end_a_row_across_token_borders(model, monkeypatch):
    monkeypatch.setattr("ligermodels.generate.StreamDecoder", _Decoder)
    prompt, letters = _prompt(rows=2), Letters()
    free = [letters.decode(row.tolist()) for row in generate(model, prompt, max_new_tokens=20)[:, 5:]]
    stop = free[0][3:6]
    ends = [(row + stop).index(stop) + 3 for row in free]
    ids = generate(
        model, prompt, max_new_tokens=20, stop_strings=["zzzzzzzz", stop], tokenizer=letters, pad_token_id=0
    )[:, 5:]  # fmt: skip
    assert ids.shape[1] == min(20, max(ends))
    for row, end in enumerate(ends):
        assert letters.decode(ids[row, :end].tolist()) == free[row][:end]
        assert (ids[row, end:] == 0).all()


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(max_new_tokens=0), "at least 1"),
        (dict(max_new_tokens=2.5), "integer"),
        (dict(temperature=-0.1), "temperature"),
        (dict(temperature=float("nan")), "temperature"),
        (dict(temperature=1.0, top_k=-1), "top_k"),
        (dict(temperature=1.0, top_p=0.0), "top_p"),
        (dict(temperature=1.0, top_p=1.1), "top_p"),
        (dict(temperature=1.0, min_p=-0.1), "min_p"),
        (dict(repetition_penalty=0.0), "repetition_penalty"),
        (dict(stop_strings="x"), "tokenizer="),
        (dict(stop_strings=["x", ""], tokenizer=1), "empty string"),
        (dict(stop_strings="x", tokenizer=1), "pad_token_id"),
        (dict(pad_token_id=VOCAB), "outside the vocabulary"),
        (dict(attention_mask=torch.ones(2, 6)), r"\[2, 6\].*\[2, 5\]"),
        (dict(attention_mask=torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])), "row 1.*pad on the left"),
        (dict(attention_mask=torch.zeros(2, 5)), "row 0"),
    ],
)
def test_arguments_that_cannot_work_say_so(model, options, words):
    with pytest.raises(InputError, match=words):
        generate(model, _prompt(rows=2), **{"max_new_tokens": 3, **options})
    assert not model.calls


@pytest.mark.parametrize(
    "ids, words",
    [
        (torch.zeros(2, 0, dtype=torch.int64), "empty prompt"),
        (torch.zeros(5, dtype=torch.int64), r"input_ids\[None\]"),
        (torch.zeros(1, 5), "float32"),
        ([1, 2, 3], "list"),
        (torch.tensor([[1, VOCAB]]), "another model"),
        (torch.tensor([[1, -100]]), "-100"),
        (torch.zeros(1, 5, dtype=torch.int64, device="meta"), "model on cpu"),
    ],
)
def test_prompts_that_cannot_work_say_so(model, ids, words):
    with pytest.raises(InputError, match=words):
        generate(model, ids, max_new_tokens=3)
    with pytest.raises(InputError, match=words):
        generate_iter(model, ids, max_new_tokens=3)  # at the call, not at the first step


@pytest.mark.parametrize("stream", [False, True])
def test_nan_logits_are_an_error_and_not_token_zero(model, stream):
    model.head.weight[3] = torch.nan
    with pytest.raises(InputError, match="float16 overflow"):
        list(generate_iter(model, _prompt(), max_new_tokens=3)) if stream else generate(
            model, _prompt(), max_new_tokens=3
        )


def test_padding_does_not_count_as_positions():
    model = Tiny(positions=64)
    model.config.max_position_embeddings = 10
    ids, mask = _prompt(rows=2, length=8), torch.ones(2, 8, dtype=torch.int64)
    mask[0, :3], mask[1, :4] = 0, 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(model, ids, attention_mask=mask, max_new_tokens=5)
    with pytest.warns(UserWarning, match="11 positions.*made for 10"):
        generate(model, ids, attention_mask=mask, max_new_tokens=6)


def test_warns_past_the_positions_and_of_cuts_that_greedy_ignores():
    model = Tiny(positions=64)
    model.config.max_position_embeddings = 10
    with pytest.warns(UserWarning, match="11 positions.*made for 10"):
        generate(model, _prompt(), max_new_tokens=6)
    with pytest.warns(UserWarning, match="temperature=0"):
        generate(model, _prompt(), max_new_tokens=2, top_p=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(model, _prompt(), max_new_tokens=5, top_p=1.0, top_k=0, min_p=0.0)


# ---- windows and every rope type: a cached step is the full forward ----

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.4, 2.5, 5.0, 9.0],
    "original_max_position_embeddings": 16,
    "factor": 8.0,
}
ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "longrope": LONGROPE,
}


def _llama(windows=(None, None), rope="default", positions=512):
    """Two layers, weights large enough that positions and windows decide, each layer with its window."""
    model = ligermodels.Llama.from_config({
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_parameters": {"rope_theta": 100.0, **ROPES[rope]},
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "initializer_range": 0.3,
    }).requires_grad_(False)  # fmt: skip
    for layer, window in zip(model.layers, windows, strict=True):
        layer.attn.window = window
    model.new_cache = lambda rows, length: KVCache(
        2, rows, length, 2, 8, windows=windows, dtype=model.dtype, device="cpu"
    )
    return model


def _padded(lengths, extra=0):
    """(ids, mask) of prompts of these lengths, padded on the left to the longest and `extra` more."""
    width = max(lengths) + extra
    ids = torch.randint(1, 97, (len(lengths), width))
    mask = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    return ids * mask, mask


def _cached_logits(model, ids, mask, steps):
    """What generate saw at every step: (ids [B, S + steps], logits [B, steps, V])."""
    logits = []
    ids = generate(model, ids, attention_mask=mask, max_new_tokens=steps,
                   logits_processor=lambda ids, x: logits.append(x.clone()) or x)  # fmt: skip
    return ids, torch.stack(logits, 1)


def _full_logits(model, ids, mask):
    mask = F.pad(mask.long(), (0, ids.shape[1] - mask.shape[1]), value=1)
    return model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits


def _assert_is_full_forward(model, ids, mask, steps):
    width = ids.shape[1]
    out, logits = _cached_logits(model, ids, mask, steps)
    if model.rotary.rope_type == "longrope":  # each call has its own tables
        full = [_full_logits(model, out[:, :end], mask)[:, -1] for end in range(width, width + steps)]
        full = torch.stack(full, 1)
    else:
        full = _full_logits(model, out, mask)[:, width - 1 : -1]
    torch.testing.assert_close(logits, full, rtol=1e-4, atol=1e-4)  # fp32 sums in another order; logits are ~1
    torch.testing.assert_close(out[:, width:], full.argmax(-1))
    assert out[:, width:].unique().numel() > 8, "a model that repeats itself proves little"
    return out


@pytest.mark.parametrize("slack", [1, 5, 256])
@pytest.mark.parametrize("windows", [(4, None), (None, 4), (1, 9), (8, 9), (10, 10), (30, 200)], ids=str)
@pytest.mark.parametrize("lengths, extra", [([9], 0), ([9, 2, 7], 0), ([9, 9, 3], 4)], ids=str)
def test_windows_decode_as_the_full_forward(windows, slack, lengths, extra, monkeypatch):
    """Prompts shorter than, as long as and longer than the window; past many moves of the buffers."""
    monkeypatch.setattr("ligermodels.cache.SLACK", slack)
    model, (ids, mask) = _llama(windows), _padded(lengths, extra)
    out = _assert_is_full_forward(model, ids, mask, steps=40)
    stream = list(generate_iter(model, ids, attention_mask=mask, max_new_tokens=40))
    torch.testing.assert_close(torch.stack(stream, 1), out[:, ids.shape[1] :])
    free = _llama()
    assert not torch.allclose(_full_logits(free, out, mask), _full_logits(model, out, mask), atol=0.01)


def test_a_window_moves_in_its_buffers_as_they_are_in_use():
    model, (ids, mask) = _llama((5, None), positions=1024), _padded([300, 7])
    _assert_is_full_forward(model, ids, mask, steps=600)


@pytest.mark.parametrize("rope", sorted(ROPES.keys() - {"dynamic"}))
@pytest.mark.parametrize("windows", [(None, None), (6, None)], ids=str)
@pytest.mark.parametrize("lengths, extra", [
    ([15], 0), ([16], 0), ([17], 0), ([5], 0), ([12, 3], 0), ([12, 3], 9), ([16, 4], 1), ([17, 2], 3),
], ids=str)  # fmt: skip
def test_rope_types_decode_as_the_full_forward(rope, windows, lengths, extra):
    """Below, at and past 16, the original length; with padding longrope switches by positions, not columns."""
    _assert_is_full_forward(_llama(windows, rope), *_padded(lengths, extra), steps=20)


def test_longrope_runs_the_text_again_once_and_only_across_its_original_length(monkeypatch):
    model, forward, widths = _llama(rope="longrope"), ligermodels.Llama.forward, []
    monkeypatch.setattr(ligermodels.Llama, "forward", lambda *a, **k: widths.append(a[1].shape[1]) or forward(*a, **k))
    for prompt, again in [(14, [17]), (16, [17]), (17, []), (30, [])]:
        widths.clear()
        generate(model, torch.randint(1, 97, (2, prompt)), max_new_tokens=6)
        assert [width for width in widths[1:] if width > 1] == again


@pytest.mark.parametrize("lengths", [[12], [16], [17], [12, 5, 3]], ids=str)
def test_longrope_with_a_window_is_phi3_of_transformers(lengths):
    from transformers import Phi3Config, Phi3ForCausalLM

    ours = _llama((6, 6), "longrope", positions=128)
    theirs = Phi3ForCausalLM(Phi3Config(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, original_max_position_embeddings=16, sliding_window=6,
        rope_parameters={"rope_theta": 100.0, "partial_rotary_factor": 1.0, **LONGROPE}, pad_token_id=0,
        bos_token_id=None, eos_token_id=None,
    )).eval()  # fmt: skip
    names = {"attn.": "self_attn.", "attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    for name, parameter in ours.named_parameters():
        for old, new in names.items():
            name = name.replace(old, new)
        theirs.get_parameter(name if name.startswith("lm_head") else f"model.{name}").data.copy_(parameter)
    ids, mask = _padded(lengths)
    expected = theirs.generate(ids, attention_mask=mask.long(), max_new_tokens=24, do_sample=False)
    torch.testing.assert_close(generate(ours, ids, attention_mask=mask, max_new_tokens=24), expected)


@pytest.mark.filterwarnings("ignore:prompt and new tokens may reach")
@pytest.mark.parametrize("lengths", [[5], [20], [12, 5, 3]], ids=str)
def test_dynamic_keeps_its_keys_past_the_trained_length_as_transformers_does(lengths, tmp_path):
    from transformers import LlamaForCausalLM

    ours, (ids, mask) = _llama(rope="dynamic", positions=16), _padded(lengths)
    theirs = LlamaForCausalLM.from_pretrained(ours.save_pretrained(tmp_path / "model"))
    out, logits = _cached_logits(ours, ids, mask, 24)
    expected = theirs.generate(
        ids, attention_mask=mask.long(), max_new_tokens=24, do_sample=False, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    torch.testing.assert_close(out, expected.sequences)
    torch.testing.assert_close(logits, torch.stack(expected.logits, 1), rtol=1e-4, atol=1e-4)  # as above
    last = _full_logits(ours, out[:, :-1], mask)[:, -1]
    assert not torch.allclose(logits[:, -1], last, atol=0.01), "the full forward would turn the keys anew"


# ---- a real model, against transformers ----


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A Llama whose weights are large enough that its text does not repeat, with a tokenizer."""
    from ligermodels import demo

    folder = tmp_path_factory.mktemp("generate") / "model"
    demo.write_checkpoint(folder)
    model = ligermodels.load(folder, progress=False)
    for parameter in model.parameters():
        parameter.data.mul_(3 if parameter.dim() > 1 else 1)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o))
def test_token_for_token_what_transformers_generates(checkpoint, options):
    from transformers import AutoModelForCausalLM

    tokenizer = ligermodels.Tokenizer.from_hub(checkpoint)
    ids, mask = tokenizer.encode_batch(["The Owl", "A fox once found a lantern on the road, and", "It"])
    assert not mask.all()
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint)
    settings = {
        "do_sample": options["temperature"] > 0,
        "top_k": 0,
        **options,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
    if not settings["do_sample"]:
        del settings["temperature"]
    torch.manual_seed(11)
    expected = theirs.generate(ids, attention_mask=mask, max_new_tokens=32, **settings)
    model = ligermodels.load(checkpoint, progress=False)
    got = model.generate(
        ids, attention_mask=mask, max_new_tokens=32, seed=11, pad_token_id=0, eos_token_id=1, **options
    )
    torch.testing.assert_close(got, expected)
    assert len(set(got[1, ids.shape[1] :].tolist())) > 5


def test_streams_through_the_streamer_of_transformers(checkpoint, capsys):
    from transformers import AutoTokenizer, TextStreamer

    tokenizer, model = ligermodels.Tokenizer.from_hub(checkpoint), ligermodels.load(checkpoint, progress=False)
    ids = torch.tensor([tokenizer.encode("The Owl")])
    streamer = TextStreamer(AutoTokenizer.from_pretrained(checkpoint), skip_prompt=True)
    out = model.generate(ids, max_new_tokens=16, streamer=streamer)
    assert capsys.readouterr().out == tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=False) + "\n"


def test_stop_strings_in_real_text(checkpoint):
    tokenizer, model = (
        ligermodels.Tokenizer.from_hub(checkpoint),
        ligermodels.load(checkpoint, progress=False),
    )
    ids = torch.tensor([tokenizer.encode("The Owl")])
    free = model.generate(ids, max_new_tokens=40, temperature=1.0, seed=0)[0, ids.shape[1] :]
    stop = tokenizer.decode(free)[12:17]
    options = dict(max_new_tokens=40, temperature=1.0, seed=0, stop_strings=stop, tokenizer=tokenizer)
    new = model.generate(ids, **options)[0, ids.shape[1] :]
    assert stop in tokenizer.decode(new) and stop not in tokenizer.decode(new[:-1])
    torch.testing.assert_close(new, free[: len(new)])


def test_a_stop_string_may_begin_with_the_space_of_the_first_new_token(tmp_path):
    """The decoder takes the space off the beginning of a text: new text is none."""
    tokenizer = ligermodels.Tokenizer.from_folder(folders.byte_fallback(tmp_path / "tokenizer"))
    prompt, whole = tokenizer.encode("the"), tokenizer.encode("the cat")
    coming = whole[len(prompt) :]
    assert whole[: len(prompt)] == prompt and tokenizer.decode(coming)[0] != " "
    config = dict(vocab_size=1 + max(whole), hidden_size=8, intermediate_size=8, num_hidden_layers=1)
    model = ligermodels.Llama.from_config({**config, "num_attention_heads": 1}, device="cpu")

    def force(ids, logits):
        chosen = (coming + coming)[ids.shape[1] - len(prompt)]
        return torch.full_like(logits, -1e9).index_fill(1, torch.tensor([chosen]), 0.0)

    options = dict(max_new_tokens=2 * len(coming), eos_token_id=[], tokenizer=tokenizer, logits_processor=force)
    first = " " + tokenizer.decode(coming[:1])
    out = model.generate(torch.tensor([prompt]), stop_strings=first, **options)
    assert out[0].tolist() == [*prompt, coming[0]]
