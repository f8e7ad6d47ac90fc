"""generate against transformers' own loop and processors, on a model small enough to think about."""

import contextlib
import copy
import dataclasses
import functools
import itertools
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ligermodels
from ligermodels.errors import InputError
from ligermodels.generation import generate, generate_iter
from ligermodels.generation.options import UNSUPPORTED, WITHOUT_EFFECT, Options
from ligermodels.generation.processors import (
    penalize_repetition,
    ban_repeated_ngrams,
    draw,
    keep_min_p,
    keep_top_k,
    keep_top_p,
)
from ligermodels.generation.stopping import StopText
from ligermodels.layers.cache import KVCache
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
        self.config.get_text_config = lambda: self.config
        self.generation_config = {}
        self.calls, self.images = [], []
        self.extra_inputs = {"image"}
        self.rotary = SimpleNamespace(switches=lambda past, length: past == self.switches_at)
        self.decoder = SimpleNamespace(rotary_emb=self.rotary)
        self.switches_at = None

    @property
    def device(self):
        return self.embed.weight.device

    def get_input_embeddings(self):
        return self.embed

    def new_cache(self, batch_size, max_length):
        return _Cache()

    def prepare_inputs_for_generation(self, input_ids, **inputs):
        return {"input_ids": input_ids, **inputs}

    def forward(
        self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=False,
        logits_to_keep=0, image=None,
    ):  # fmt: skip
        self.calls.append((tuple(input_ids.shape), logits_to_keep))
        self.images.append(image)
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
    options = dict(attention_mask=torch.ones(3, 5), eos_token_id=[eos, other], pad_token_id=9)
    ids = generate(model, prompt, max_new_tokens=16, **options)[:, 5:]
    assert ids.shape[1] == max(first) + 1 and len(set(first)) > 1
    for row, end in enumerate(first):
        assert ids[row, : end + 1].tolist() == free[row, : end + 1].tolist()
        assert (ids[row, end + 1 :] == 9).all()


def test_stop_ids_are_those_of_the_call_or_else_of_a_generation_config_or_else_of_the_config(model):
    prompt = _prompt()
    free = generate(model, prompt, max_new_tokens=16)[0, 5:].tolist()
    second, third, fifth = free[1], free[3], free[5]

    def new_tokens(**options):
        return generate(model, prompt, max_new_tokens=16, **options).shape[1] - 5

    model.config.eos_token_id = second
    assert new_tokens() == free.index(second) + 1
    model.generation_config["eos_token_id"] = [fifth]
    assert new_tokens() == free.index(fifth) + 1
    assert new_tokens(generation_config={"eos_token_id": third}) == free.index(third) + 1
    assert new_tokens(generation_config={"eos_token_id": third}, eos_token_id=second) == free.index(second) + 1
    assert (
        new_tokens(generation_config={"eos_token_id": None}) == new_tokens(eos_token_id=None) == free.index(fifth) + 1
    )
    assert new_tokens(eos_token_id=()) == 16
    assert len({second, third, fifth}) == 3


@pytest.mark.parametrize("saved", [None, -1, 7])
def test_pads_with_the_saved_pad_id_or_else_the_first_stop_id(model, saved):
    model.generation_config["pad_token_id"] = saved
    prompt = torch.tensor([[1, 2, 3, 4, 5], [6, 8, 9, 10, 11]])
    first, second = generate(model, prompt, max_new_tokens=6)[:, 5:].tolist()
    stop = next(i for i in first[:-1] if i not in second)
    ids = generate(model, prompt, max_new_tokens=6, eos_token_id=[stop])[:, 5:]
    assert ids[1].tolist() == second and ids[0, -1] == (saved if saved == 7 else stop)


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
    from ligermodels.generation.loop import _decode
    from ligermodels.generation.request import Request

    options = dict(
        max_new_tokens=8, temperature=0.8, top_k=5, top_p=0.9, min_p=0.01, repetition_penalty=1.1,
        no_repeat_ngram_size=3, suppress_tokens=[3], begin_suppress_tokens=[4], min_new_tokens=2,
    )  # fmt: skip
    request = Request.checked(
        model, _prompt(rows=2).to(device), None, None, None, attention_mask=None, past_key_values=None, tokenizer=None,
        seed=0, inputs=options,
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
    torch.testing.assert_close(keep_top_k(None, logits, k), TopKLogitsWarper(k)(None, logits), rtol=0, atol=0)


@pytest.mark.parametrize("p", [1e-6, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.01, 3.0, 30.0])
def test_top_p_is_transformers(p, spread):
    from transformers import TopPLogitsWarper

    logits = _logits(spread=spread)
    logits[0, 7:] = -torch.inf  # as top_k leaves them
    torch.testing.assert_close(keep_top_p(None, logits, p), TopPLogitsWarper(p)(None, logits), rtol=0, atol=0)


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    for p, kept in [(0.4, 1), (0.5, 1), (0.51, 2), (0.75, 2), (0.8, 3), (1e-9, 1)]:
        assert keep_top_p(None, logits, p).isfinite().sum() == kept, p


@pytest.mark.parametrize("p", [0.0, 0.01, 0.5, 1.0])
def test_min_p_is_transformers(p):
    from transformers import MinPLogitsWarper

    logits = _logits()
    torch.testing.assert_close(keep_min_p(None, logits, p), MinPLogitsWarper(p)(None, logits), rtol=0, atol=0)


@pytest.mark.parametrize("penalty", [0.5, 1.3])
def test_repetition_penalty_is_transformers(penalty):
    from transformers import RepetitionPenaltyLogitsProcessor

    logits, ids = _logits(), torch.randint(0, 200, (8, 30))
    expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits)
    penalize = functools.partial(penalize_repetition, penalty=penalty)
    penalize(ids[:, :29], logits)  # a step, whose token is the last of ids
    torch.testing.assert_close(penalize(ids, logits), expected, rtol=0, atol=0)


@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_banned_ngrams_are_those_of_transformers(size):
    from transformers import NoRepeatNGramLogitsProcessor

    logits, banned = _logits(vocab=5), 0
    for length in range(1, 14):
        ids = torch.randint(0, 5, (8, length))
        expected = NoRepeatNGramLogitsProcessor(size)(ids, logits.clone())
        torch.testing.assert_close(ban_repeated_ngrams(ids, logits, size), expected, rtol=0, atol=0)
        banned += expected.isinf().sum()
    assert banned > 0 or size == 9


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
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, -torch.inf]).repeat(20000, 1)
    drawn = draw(logits, torch.Generator().manual_seed(0)).bincount(minlength=5) / 20000
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

    def decode(self, ids):
        return "".join("abcdefghijklmnopqrstuvwxyz .,:!"[i] for i in ids)


def test_text_is_decoded_as_the_tokens_have_it():
    """transformers' tokenizers may take spaces off before punctuation, and others leave special tokens out."""
    seen = []
    stopper = StopText(
        SimpleNamespace(decode=lambda ids, **options: seen.append(options) or "x" * len(ids)), ["xx"], [1]
    )
    assert [stopper.ends_with(2), stopper.ends_with(3)] == [False, True]
    assert all(options == {"skip_special_tokens": False, "clean_up_tokenization_spaces": False} for options in seen)


def test_stop_strings_end_a_row_across_token_borders(model):
    prompt, letters = torch.tensor([[1, 2, 3, 4, 5], [6, 8, 9, 10, 11]]), Letters()
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
        (dict(stop_strings="x", tokenizer=Letters()), "pad_token_id"),
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
    with pytest.warns(UserWarning, match="top_p changes nothing in greedy decoding") as caught:
        generate(model, _prompt(), max_new_tokens=2, top_p=0.9)
    assert caught[0].filename == __file__
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
    for layer, window in zip(getattr(model, "model", model).layers, windows, strict=True):
        getattr(layer, "self_attn", getattr(layer, "attn", None)).window = window
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
    if model.config.rope_parameters["rope_type"] == "longrope":  # each call has its own tables
        full = [_full_logits(model, out[:, :end], mask)[:, -1] for end in range(width, width + steps)]
        full = torch.stack(full, 1)
    else:
        full = _full_logits(model, out, mask)[:, width - 1 : -1]
    torch.testing.assert_close(logits, full, rtol=1e-4, atol=1e-4)  # fp32 sums in another order; logits are ~1
    torch.testing.assert_close(out[:, width:], full.argmax(-1))
    assert out[:, width:].unique().numel() > 4, "a model that repeats itself proves little"
    return out


@pytest.mark.parametrize("slack", [1, 5])
@pytest.mark.parametrize("windows", [(4, None), (None, 4), (1, 9), (10, 10), (30, 200)], ids=str)
@pytest.mark.parametrize("lengths, extra", [([9], 0), ([9, 2, 7], 0), ([9, 9, 3], 4)], ids=str)
def test_windows_decode_as_the_full_forward(windows, slack, lengths, extra, monkeypatch):
    """Prompts shorter than, as long as and longer than the window; past many moves of the buffers."""
    monkeypatch.setattr("ligermodels.layers.cache.SLACK", slack)
    model, (ids, mask) = _llama(windows), _padded(lengths, extra)
    out = _assert_is_full_forward(model, ids, mask, steps=25)
    free = _llama()
    assert not torch.allclose(_full_logits(free, out, mask), _full_logits(model, out, mask), atol=0.01)


def test_a_window_moves_in_its_buffers_as_they_are_in_use():
    model, (ids, mask) = _llama((5, None), positions=1024), _padded([300, 7])
    _assert_is_full_forward(model, ids, mask, steps=600)


@pytest.mark.parametrize("rope", sorted(ROPES.keys() - {"dynamic"}))
@pytest.mark.parametrize("windows", [(None, None), (6, None)], ids=str)
@pytest.mark.parametrize("lengths, extra", [([15], 0), ([16], 0), ([17], 0), ([12, 3], 9), ([16, 4], 1)], ids=str)
def test_rope_types_decode_as_the_full_forward(rope, windows, lengths, extra):
    """Below, at and past 16, the original length; with padding longrope switches by positions, not columns."""
    _assert_is_full_forward(_llama(windows, rope), *_padded(lengths, extra), steps=12)


def test_longrope_runs_the_text_again_once_and_only_across_its_original_length(monkeypatch):
    model, forward, widths = _llama(rope="longrope"), ligermodels.Llama.forward, []
    monkeypatch.setattr(
        ligermodels.Llama, "forward", lambda *a, **k: widths.append(k["input_ids"].shape[1]) or forward(*a, **k)
    )
    for prompt, again in [(14, [17]), (16, [17]), (17, []), (30, [])]:
        widths.clear()
        generate(model, torch.randint(1, 97, (2, prompt)), max_new_tokens=6)
        assert [width for width in widths[1:] if width > 1] == again


@pytest.fixture(scope="module")
def phi3(tmp_path_factory):
    """transformers' Phi3 with a window and longrope, and ours of the same checkpoint."""
    from transformers import Phi3Config, Phi3ForCausalLM

    folder = tmp_path_factory.mktemp("phi3")
    Phi3ForCausalLM(Phi3Config(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, original_max_position_embeddings=16, sliding_window=6,
        rope_parameters={"rope_theta": 100.0, "partial_rotary_factor": 1.0, **LONGROPE}, pad_token_id=0,
        bos_token_id=None, eos_token_id=None, initializer_range=0.3,
    )).save_pretrained(folder)  # fmt: skip
    return Phi3ForCausalLM.from_pretrained(folder), ligermodels.load(folder, progress=False)


@pytest.mark.parametrize("lengths", [[12], [16], [17, 5, 3]], ids=str)
def test_longrope_with_a_window_is_phi3_of_transformers(phi3, lengths):
    theirs, ours = phi3
    ids, mask = _padded(lengths)
    expected = theirs.generate(ids, attention_mask=mask.long(), max_new_tokens=16, do_sample=False)
    torch.testing.assert_close(ours.generate(ids, attention_mask=mask, max_new_tokens=16), expected)


@pytest.mark.parametrize("held", [3, 14, 15])
def test_a_cache_of_part_of_the_prompt_is_recomputed_where_longrope_switches(phi3, held):
    ours, (ids, mask) = phi3[1], _padded([18, 7])
    expected = ours.generate(ids, attention_mask=mask, max_new_tokens=4)
    cache = ours.new_cache(2, 8)
    ours(ids[:, :held], attention_mask=mask[:, :held], past_key_values=cache,
         position_ids=(mask[:, :held].cumsum(1) - 1).clamp(min=0))  # fmt: skip
    found = ours.generate(ids, attention_mask=mask, max_new_tokens=4, past_key_values=cache)
    assert torch.equal(found, expected) and cache.length == 21


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


# ---- the same call gives what transformers' own model gives ----


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def pair(request, tmp_path_factory):
    """transformers' model and ours, of a checkpoint that transformers wrote. Their weights make text that varies."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    config, model = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}[request.param]
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp(request.param)
    model(config(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3, bos_token_id=1, eos_token_id=2,
        pad_token_id=0, tie_word_embeddings=False,
    )).save_pretrained(folder)  # fmt: skip
    return model.from_pretrained(folder), ligermodels.load(folder, progress=False)


@contextlib.contextmanager
def _checkpoint_says(pair, **values):
    """As if generation_config.json said these."""
    from transformers import GenerationConfig

    before = [model.generation_config for model in pair]
    values = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **values}
    pair[0].generation_config = GenerationConfig(**values)
    pair[1].generation_config = type(before[1])(values)
    yield
    for model, config in zip(pair, before, strict=True):
        model.generation_config = config


def _rows(*lengths, width=9):
    """(ids, mask): padded on the left with 0; no other token is special."""
    ids = torch.randint(3, 97, (len(lengths), width), generator=torch.Generator().manual_seed(width))
    mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
    return ids * mask, mask


def _same(pair, *args, seed=5, **options):
    """Both results of the call, found equal: ids, and with return_dict_in_generate scores and logits."""
    results = []
    for model in pair:
        torch.manual_seed(seed)
        made = {name: value() if isinstance(value, type) else value for name, value in options.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results.append(model.generate(*args, **made))
    theirs, ours = results
    if isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs), (ours, theirs)
        return ours
    assert torch.equal(ours.sequences, theirs.sequences)
    for name in ("scores", "logits"):
        assert (getattr(ours, name) is None) == (getattr(theirs, name) is None), name
        for found, expected in zip(getattr(ours, name) or (), getattr(theirs, name) or (), strict=True):
            # logits are about 5; fp32 sums in another order
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    return ours


CALLS = {
    "nothing": dict(),
    "new tokens": dict(max_new_tokens=5),
    "length": dict(max_length=15),
    "both": dict(max_length=40, max_new_tokens=5),
    "least": dict(max_new_tokens=30, min_new_tokens=25),
    "least with the prompt": dict(max_new_tokens=30, min_length=30),
    "penalty": dict(repetition_penalty=1.7),
    "n-grams": dict(max_new_tokens=40, no_repeat_ngram_size=2),
    "suppressed": dict(suppress_tokens=[*range(5, 60)], begin_suppress_tokens=[*range(60, 90)]),
    "all of them": dict(
        max_new_tokens=30, min_length=20, no_repeat_ngram_size=3, repetition_penalty=1.3, begin_suppress_tokens=[2]),
    "normalized": dict(renormalize_logits=True, repetition_penalty=1.2),
    "sampling": dict(do_sample=True),
    "sampling, no top_k": dict(do_sample=True, top_k=None),
    "sampling, 0 for top_k": dict(do_sample=True, top_k=0),
    "sampling, cut": dict(do_sample=True, temperature=1.4, top_k=9, top_p=0.9, min_p=0.02),
    "sampling, all off": dict(do_sample=True, temperature=None, top_k=None, top_p=None, min_p=None,
                              repetition_penalty=None),
    "sampling, normalized": dict(do_sample=True, temperature=0.8, renormalize_logits=True),
    "several": dict(do_sample=True, num_return_sequences=3),
    "several, cut and penalized": dict(do_sample=True, num_return_sequences=2, temperature=0.7, top_p=0.8,
                                       repetition_penalty=1.4),
    "several without a cache": dict(do_sample=True, num_return_sequences=2, use_cache=False),
    "greedy": dict(do_sample=False, temperature=None, top_p=None),
    "greedy, cuts of no use": dict(do_sample=False, temperature=0.3, top_k=3, top_p=0.2),
    "without a cache": dict(use_cache=False, repetition_penalty=1.1),
    "another stop id": dict(max_new_tokens=40, eos_token_id=[17, 30, 44]),
    "another pad id": dict(max_new_tokens=40, eos_token_id=[17, 30, 44], pad_token_id=5),
    "what does nothing": dict(
        num_beams=1, num_return_sequences=1, typical_p=1.0, synced_gpus=False, assistant_model=None,
        prefix_allowed_tokens_fn=None, disable_compile=True, length_penalty=1.0, early_stopping=False,
        output_attentions=False, output_hidden_states=False, streamer=None, negative_prompt_ids=None),
}  # fmt: skip
SAID = {
    "nothing": dict(),
    "a sampler": dict(do_sample=True, temperature=0.6, top_k=12, top_p=0.9),
    "a sampler, briefly": dict(do_sample=True),
    "lengths": dict(max_length=21, min_new_tokens=4, repetition_penalty=1.2),
    "new tokens": dict(max_new_tokens=7, eos_token_id=[2, 40]),
    "cuts without sampling": dict(temperature=0.6, top_p=0.5, cache_implementation="hybrid", transformers_version="4"),
}


LLAMA = pytest.mark.parametrize("pair", ["llama"], indirect=True)


@pytest.mark.parametrize("call", CALLS)
def test_a_call_gives_what_it_gives_in_transformers(pair, call):
    ids, mask = _rows(9, 4, 6)
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, **CALLS[call]}
    found = _same(pair, ids, attention_mask=mask, **options)
    assert len(found.sequences[:, 9:].unique()) > 5 or call == "new tokens", "a model that repeats itself proves little"


@LLAMA
@pytest.mark.parametrize("call", ["nothing", "new tokens", "length", "sampling", "sampling, all off", "greedy",
                                  "several, cut and penalized"])  # fmt: skip
@pytest.mark.parametrize("said", list(SAID)[1:])
def test_a_checkpoint_says_what_the_call_does_not(pair, said, call):
    ids, mask = _rows(9, 4, 6)
    options = {"return_dict_in_generate": True, "output_scores": True, **CALLS[call]}
    with _checkpoint_says(pair, **SAID[said]):
        _same(pair, ids, attention_mask=mask, **options)


@LLAMA
@pytest.mark.parametrize("passed", list(SAID)[1:])
@pytest.mark.parametrize("said", ["nothing", "a sampler", "new tokens"])
def test_a_passed_generation_config_wins_over_the_checkpoint_and_loses_to_keywords(pair, said, passed):
    from transformers import GenerationConfig

    theirs, ours = pair
    ids, mask = _rows(9, 4, 6)
    config = GenerationConfig(**SAID[passed])
    for options in ({}, {"max_new_tokens": 4, "do_sample": True}, {"do_sample": False}):
        with _checkpoint_says(pair, **SAID[said]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(1)
            expected = theirs.generate(ids, config, attention_mask=mask, **options)
            assert torch.equal(ours.generate(ids, config, attention_mask=mask, seed=1, **options), expected)
            as_dict = ours.generate(ids, generation_config=SAID[passed], attention_mask=mask, seed=1, **options)
            assert torch.equal(as_dict, expected)


def test_a_temperature_alone_says_whether_to_sample(pair):
    ours, (ids, _) = pair[1], _rows(9)
    options = dict(return_dict_in_generate=True, output_scores=True, max_new_tokens=6, seed=1)

    def kept(**call):
        """How many tokens could have been drawn at the first step, of 97."""
        return int(ours.generate(ids, **options, **call).scores[0].isfinite().sum())

    sampled = ours.generate(ids, do_sample=True, top_k=0, temperature=1.5, **options)
    assert torch.equal(ours.generate(ids, temperature=1.5, **options).sequences, sampled.sequences)
    assert kept(temperature=1.5) == 97 and kept(temperature=1.5, do_sample=True) == 50 and kept(do_sample=True) == 50
    assert kept(temperature=1.5, top_k=4) == 4 and kept(temperature=1.5, generation_config={"top_k": 4}) == 4
    with _checkpoint_says(pair, do_sample=True, top_k=7):
        assert kept() == kept(temperature=1.5) == 7
        greedy = ours.generate(ids, temperature=0, **options).sequences
        assert torch.equal(greedy, ours.generate(ids, do_sample=False, **options).sequences)
    with _checkpoint_says(pair, do_sample=True):
        assert kept() == kept(temperature=1.5) == 50


@LLAMA
def test_greedy_decoding_ignores_what_the_checkpoint_sets_for_sampling(pair):
    """Files have temperature 0 and the like there; nothing is said about it."""
    ids, _ = _rows(9)
    expected = pair[1].generate(ids, max_new_tokens=5)
    with _checkpoint_says(pair, do_sample=False):
        pair[1].generation_config.update(temperature=0, top_p=0.0, top_k=-1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(pair[1].generate(ids, max_new_tokens=5), expected)
        with pytest.raises(InputError, match="temperature=0 contradict"):
            pair[1].generate(ids, max_new_tokens=5, do_sample=True)


def test_all_sequences_of_a_row_come_from_one_run_of_the_prompt(pair):
    ours, shapes, streamed = pair[1], [], []
    ids, mask = _rows(9, 4)
    handle = ours.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    found = ours.generate(
        ids, attention_mask=mask, do_sample=True, num_return_sequences=3, max_new_tokens=3, seed=0,
        streamer=SimpleNamespace(put=streamed.append, end=list),
    )  # fmt: skip
    handle.remove()
    assert shapes == [(2, 9), (6, 1), (6, 1)] and found.shape == (6, 12)
    prompt, *new = streamed
    assert torch.equal(prompt, ids.repeat_interleave(3, 0))
    assert torch.equal(found, torch.cat([prompt, torch.stack(new, 1)], 1)) and len(found[:3].unique(dim=0)) == 3


def test_the_default_length_is_twenty_and_says_so(pair):
    ours, (ids, _) = pair[1], _rows(9)
    with pytest.warns(UserWarning, match="at most 20 tokens are added; pass max_new_tokens") as caught:
        assert ours.generate(ids, eos_token_id=()).shape == (1, 29)
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="at most 20"):  # and no further than the positions of the model
        assert ours.generate(_rows(50, width=50)[0], eos_token_id=()).shape == (1, 64)
    for options in ({"max_new_tokens": 3}, {"max_length": 12}, {"generation_config": {"max_new_tokens": 3}}):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert ours.generate(ids, eos_token_id=(), **options).shape == (1, 12)
    with pytest.warns(UserWarning, match="max_new_tokens=3 takes precedence over max_length=30"):
        ours.generate(ids, max_new_tokens=3, max_length=30)
    with _checkpoint_says(pair, max_length=40), warnings.catch_warnings():
        warnings.simplefilter("error")  # the checkpoint's own value is no mistake of the caller's
        ours.generate(ids, max_new_tokens=3)
    with pytest.warns(UserWarning, match="ask for 19 tokens with the prompt, and at most 12 may come"):
        ours.generate(ids, max_new_tokens=3, min_new_tokens=10)


def test_the_prompt_has_two_names_and_without_one_is_the_bos_token(pair):
    ids, mask = _rows(9, 4)
    first = _same(pair, ids, attention_mask=mask, max_new_tokens=4)
    for options in (dict(inputs=ids), dict(input_ids=ids)):
        assert torch.equal(_same(pair, attention_mask=mask, max_new_tokens=4, **options), first)
    assert _same(pair, max_new_tokens=4)[0, 0] == 1
    assert _same(pair, input_ids=None, attention_mask=None, max_new_tokens=4, bos_token_id=7)[0, 0] == 7
    with pytest.raises(InputError, match="two names"):
        pair[1].generate(ids, input_ids=ids)
    with _checkpoint_says(pair, bos_token_id=None), pytest.raises(InputError, match="pass input_ids"):
        pair[1].config.bos_token_id, saved = None, pair[1].config.bos_token_id
        try:
            pair[1].generate(max_new_tokens=4)
        finally:
            pair[1].config.bos_token_id = saved


def test_padding_without_a_mask_is_what_is_the_pad_id(pair):
    ids, mask = _rows(9, 4)
    found = _same(pair, ids, max_new_tokens=8)
    assert torch.equal(found, _same(pair, ids, attention_mask=mask, max_new_tokens=8))
    unpadded = _same(pair, ids, max_new_tokens=8, eos_token_id=[2, 0])  # a stop id is a token like others
    assert torch.equal(unpadded, _same(pair, ids, attention_mask=torch.ones(2, 9), max_new_tokens=8))
    assert torch.equal(unpadded, _same(pair, ids, max_new_tokens=8, pad_token_id=3))
    assert not torch.equal(found, unpadded)
    with pytest.raises(InputError, match=r"row 1 of input_ids \(pad_token_id=0, and no attention_mask\) ends"):
        pair[1].generate(ids.flip(1), max_new_tokens=8)


# ---- processors, criteria, caches of the caller ----


class _BanOdd:
    def __call__(self, ids, scores):
        scores[:, 1::2] = -torch.inf  # in place, as many write them
        return scores


def test_processors_come_as_one_as_a_list_and_as_transformers_list(pair):
    from transformers import LogitsProcessorList, TemperatureLogitsWarper

    ids, mask = _rows(9, 4)
    options = dict(attention_mask=mask, max_new_tokens=20, do_sample=True, temperature=1.3, repetition_penalty=1.2,
                   return_dict_in_generate=True, output_scores=True, output_logits=True)  # fmt: skip
    processors = [_BanOdd(), TemperatureLogitsWarper(0.5)]
    for value in (processors, LogitsProcessorList(processors)):
        found = _same(pair, ids, logits_processor=value, **options)
        assert (found.sequences[:, 9:] % 2 == 0).all() and found.logits[0].isfinite().all()
    raw = (
        pair[1]
        .generate(ids, logits_processor=_BanOdd(), max_new_tokens=2, return_dict_in_generate=True, output_logits=True)
        .logits
    )
    assert raw[0].isfinite().all()
    only = LogitsProcessorList(processors[:1])
    assert torch.equal(
        _same(pair, ids, logits_processor=only, **options).sequences,
        pair[1].generate(ids, logits_processor=_BanOdd(), seed=5, **options).sequences,
    )
    assert found.attentions is None and found["sequences"] is found.sequences
    with pytest.raises(AttributeError, match="beam_indices"):
        _ = found.beam_indices


class _StopAt:
    """Rows whose last token is one of `ids` are done, in the shapes that transformers and its users return."""

    def __init__(self, ids, form):
        self.ids, self.form, self.seen = ids, form, []

    def __call__(self, ids, scores, **kwargs):
        self.seen.append((ids.shape[1], None if scores is None else len(scores)))
        done = torch.isin(ids[:, -1], torch.tensor(self.ids))
        return {"tensor": done, "bool": bool(done.any()), "one": done.any()}[self.form]


@pytest.mark.parametrize("form", ["tensor", "bool", "one"])
@pytest.mark.parametrize("scores", [False, True])
def test_criteria_end_rows_as_in_transformers(pair, form, scores):
    from transformers import MaxLengthCriteria, StoppingCriteriaList

    ids, mask = _rows(9, 4, 6)
    options = dict(attention_mask=mask, max_new_tokens=30, return_dict_in_generate=scores, output_scores=scores)
    stop, most = _StopAt(range(30, 50) if form == "tensor" else [55, 70], form), MaxLengthCriteria(25)
    found = _same(pair, ids, stopping_criteria=StoppingCriteriaList([stop, most]), **options)
    found = found.sequences if scores else found
    assert 10 < found.shape[1] <= 25 and (form != "tensor" or (found[:, -1] == 0).any())
    calls = len(stop.seen) // 2
    assert stop.seen[:calls] == stop.seen[calls:], "the same arguments"
    ours = pair[1].generate(ids, stopping_criteria=stop, attention_mask=mask, max_new_tokens=16)
    assert torch.equal(ours, found[:, :25])
    with pytest.raises(InputError, match=r"criterion returned \[2\] for 3 rows"):
        pair[1].generate(ids, stopping_criteria=[lambda ids, scores: torch.ones(2)], max_new_tokens=3)
    with pytest.raises(InputError, match="stopping_criteria is a int"):
        pair[1].generate(ids, stopping_criteria=[3], max_new_tokens=3)


@pytest.mark.parametrize("kind", ["ours", "transformers'"])
@pytest.mark.parametrize("copies", [1, 2])
def test_a_cache_of_part_of_the_prompt_goes_on(pair, kind, copies):
    """As for a conversation: what generate returned is given back with the next question behind it."""
    from transformers import DynamicCache

    theirs, ours = pair
    ids, mask = _rows(9, 4)
    more, options = torch.full((2, 3), 33), dict(do_sample=True, num_return_sequences=copies, max_new_tokens=5)
    torch.manual_seed(2)
    first = ours.generate(ids, attention_mask=mask, max_new_tokens=4, eos_token_id=(), return_dict_in_generate=True,
                          past_key_values=DynamicCache() if kind == "transformers'" else None)  # fmt: skip
    assert isinstance(first.past_key_values, DynamicCache if kind == "transformers'" else KVCache)
    assert first.past_key_values.get_seq_length() == 12
    text, mask = torch.cat([first.sequences, more], 1), F.pad(mask, (0, 7), value=1)
    torch.manual_seed(2)
    expected = theirs.generate(text, attention_mask=mask, **options)
    widths = []
    handle = ours.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    torch.manual_seed(2)
    found = ours.generate(text, attention_mask=mask, past_key_values=first.past_key_values, **options)
    handle.remove()
    assert torch.equal(found, expected) and widths[:2] == [(2, 4), (2 * copies, 1)]


@LLAMA
def test_autocast_around_the_forward_alone_works(pair):
    """As accelerate has it, whose users call generate outside: GRPO with bf16=True."""
    ours, (ids, mask) = copy.deepcopy(pair[1]), _rows(9, 4)
    dtypes, forward = [], ours.forward

    def cast(*args, **kwargs):
        with torch.autocast("cpu", torch.bfloat16):
            output = forward(*args, **kwargs)
        dtypes.append(output.past_key_values[0].keys.dtype)
        return output

    ours.forward = cast
    assert ours.generate(ids, attention_mask=mask, max_new_tokens=4, eos_token_id=()).shape == (2, 13)
    assert dtypes == [torch.bfloat16] * 4


def test_caches_that_do_not_fit_are_named(pair):
    from transformers import StaticCache

    theirs, ours = pair
    ids, _ = _rows(9, 4)
    cache = ours(ids, use_cache=True).past_key_values
    with pytest.raises(InputError, match="holds 9 tokens and input_ids 9"):
        ours.generate(ids, past_key_values=cache, max_new_tokens=3)
    with pytest.raises(InputError, match="of 2 rows, input_ids of 1"):
        ours.generate(torch.ones(1, 12, dtype=torch.int64), past_key_values=cache, max_new_tokens=3)
    with pytest.raises(InputError, match="contradicts past_key_values"):
        ours.generate(ids, past_key_values=cache, max_new_tokens=3, use_cache=False)
    with pytest.raises(InputError, match="StaticCache of a fixed size"):
        ours.generate(ids, past_key_values=StaticCache(theirs.config, max_cache_len=30), max_new_tokens=3)
    with pytest.raises(InputError, match="past_key_values is a tuple"):
        ours.generate(ids, past_key_values=((ids, ids),), max_new_tokens=3)


def _prompt_tuned(model):
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=5, token_dim=32, num_attention_heads=4, num_layers=2
    )
    tuned = peft.get_peft_model(copy.deepcopy(model), config)
    nn.init.normal_(tuned.prompt_encoder["default"].embedding.weight, generator=torch.Generator().manual_seed(0))
    return tuned.eval()


@pytest.mark.filterwarnings("ignore:prompt and new tokens may reach")
def test_virtual_tokens_count_where_longrope_switches(phi3):
    """Transformers' own Phi3 leaves them out there: the expectation is the full forward."""
    tuned, ids = _prompt_tuned(phi3[1]), torch.randint(1, 97, (2, 8))
    found = tuned.generate(input_ids=ids, max_new_tokens=12, return_dict_in_generate=True, output_logits=True)
    full = [tuned(input_ids=found.sequences[:, :end]).logits[:, -1] for end in range(8, 20)]
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(full), rtol=1e-4, atol=1e-4)  # fp32 sums


@pytest.mark.parametrize("padded", [False, True])
def test_prompt_tuning_generates_as_with_transformers(pair, padded):
    """PEFT puts the virtual tokens in through prepare_inputs_for_generation; without it they would be lost."""
    ids, mask = _rows(9, 4 if padded else 9)
    results = []
    for model in pair:
        tuned = _prompt_tuned(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            results.append(tuned.generate(input_ids=ids, attention_mask=mask, max_new_tokens=12, do_sample=True,
                                          num_return_sequences=2))  # fmt: skip
    plain = pair[1].generate(
        ids, attention_mask=mask, max_new_tokens=12, do_sample=True, num_return_sequences=2, seed=0
    )
    with pytest.raises(InputError, match="adapter adds virtual tokens"):
        tuned.generate(input_ids=ids, past_key_values=pair[1].new_cache(2, 9), max_new_tokens=2)
    assert torch.equal(*results) and not torch.equal(results[1][:, : plain.shape[1]], plain)


# ---- what is not supported raises ----


REFUSED = {
    "num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5, "penalty_alpha": 0.6, "typical_p": 0.9,
    "guidance_scale": 1.5, "prompt_lookup_num_tokens": 3, "epsilon_cutoff": 3e-4, "eta_cutoff": 3e-4,
    "constraints": [object()], "force_words_ids": [[1]], "assistant_model": object(), "synced_gpus": True,
    "output_attentions": True, "output_hidden_states": True, "cache_implementation": "quantized",
    "inputs_embeds": torch.zeros(1, 2, 32), "bad_words_ids": [[3]], "prefix_allowed_tokens_fn": print,
    "negative_prompt_ids": torch.ones(2, 2), "max_time": 3.0, "use_mtp": True,
}  # fmt: skip


@LLAMA
@pytest.mark.parametrize("name", [*REFUSED, *(sorted(UNSUPPORTED.keys() - REFUSED.keys()))])
def test_what_is_not_supported_is_refused_by_name_wherever_it_is_said(pair, name):
    ours, (ids, _) = pair[1], _rows(9)
    value = REFUSED.get(name, "something")
    with pytest.raises(InputError, match=f"^{name}=.*not supported by generate; leave {name} out"):
        ours.generate(ids, max_new_tokens=3, **{name: value})
    with pytest.raises(InputError, match=f"^{name}=.*not supported"):
        ours.generate(ids, {name: value}, max_new_tokens=3)
    expected = ours.generate(ids, max_new_tokens=3)
    for nothing in (None, *UNSUPPORTED[name][0]):
        assert torch.equal(ours.generate(ids, max_new_tokens=3, **{name: nothing}), expected)
    ours.generation_config[name] = value
    try:
        with pytest.raises(InputError, match=f"^model.generation_config sets {name}="):
            ours.generate(ids, max_new_tokens=3)
        neutral = next(iter(UNSUPPORTED[name][0]), None)
        assert torch.equal(ours.generate(ids, max_new_tokens=3, **{name: neutral}), expected)
    finally:
        del ours.generation_config[name]


def test_every_option_of_transformers_is_known(pair):
    """One that is new in transformers must not be taken for an input of the model, or pass unseen in a config."""
    from transformers import GenerationConfig

    known = {field.name for field in dataclasses.fields(Options)} | UNSUPPORTED.keys() | WITHOUT_EFFECT
    unknown = {name for name in vars(GenerationConfig()) if not name.startswith("_")} - known
    assert unknown == {"transformers_version"}


@pytest.mark.parametrize("options, words", [
    (dict(num_return_sequences=2), "num_return_sequences=2 needs do_sample=True"),
    (dict(num_return_sequences=0), "num_return_sequences=0 must be an integer of at least 1"),
    (dict(do_sample=True, temperature=0.0), "do_sample=True and temperature=0 contradict"),
    (dict(generation_config={"do_sample": True, "temperature": -1}), "temperature=-1"),
    (dict(generation_config=7), "generation_config is a int"),
    (dict(max_length=9, max_new_tokens=None), "prompt has 9 tokens, padding included, and max_length=9 leaves"),
    (dict(max_length=2.5, max_new_tokens=None), "max_length=2.5 must be an integer"),
    (dict(min_new_tokens=-1), "min_new_tokens=-1 must be an integer of at least 0"),
    (dict(no_repeat_ngram_size="x"), "no_repeat_ngram_size='x'"),
    (dict(suppress_tokens=[97]), r"suppress_tokens=\[97\] must be a list of token ids below 97"),
    (dict(max_new_token=3), "max_new_token: neither an option of generate nor an input of"),
    (dict(logits_processor=[3]), "logits_processor is a int"),
], ids=str)  # fmt: skip
def test_options_that_cannot_work_say_so(pair, options, words):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(InputError, match=words):
            pair[1].generate(_rows(9)[0], **{"max_new_tokens": 3, **options})


def test_inputs_of_the_model_come_with_its_prompt_whenever_that_runs(model):
    model.switches_at = 7
    generate(model, _prompt(), max_new_tokens=5, image=4, token_type_ids=None)
    assert model.images == [4, None, None, 4, None]
    with pytest.raises(InputError, match="use_cache=False with image is not supported"):
        generate(model, _prompt(), max_new_tokens=2, use_cache=False, image=4)


# ---- a real model, against transformers ----


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A Llama whose weights are large enough that its text does not repeat, with a tokenizer."""
    from ligermodels.cli import demo

    folder = tmp_path_factory.mktemp("generate") / "model"
    demo.write_checkpoint(folder)
    model = ligermodels.load(folder, progress=False)
    for parameter in model.parameters():
        parameter.data.mul_(3 if parameter.dim() > 1 else 1)
    model.save_pretrained(folder)
    return folder


def test_streams_through_the_streamer_of_transformers(checkpoint, capsys):
    from transformers import AutoTokenizer, TextStreamer

    tokenizer, model = ligermodels.Tokenizer.from_hub(checkpoint), ligermodels.load(checkpoint, progress=False)
    ids = torch.tensor([tokenizer.encode("The Owl")])
    streamer = TextStreamer(AutoTokenizer.from_pretrained(checkpoint), skip_prompt=True)
    out = model.generate(ids, max_new_tokens=16, streamer=streamer)
    assert capsys.readouterr().out == tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=False) + "\n"


def test_stop_strings_with_the_tokenizers_of_anyone(checkpoint):
    """The expectation is transformers' own search; a special token is text too."""
    import tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs, model = AutoModelForCausalLM.from_pretrained(checkpoint), ligermodels.load(checkpoint, progress=False)
    of_theirs = AutoTokenizer.from_pretrained(checkpoint)
    ids = torch.tensor([of_theirs.encode("The Owl")])
    options = dict(max_new_tokens=40, do_sample=True, temperature=1.0, top_k=0, eos_token_id=model.config.vocab_size)
    torch.manual_seed(0)
    free = theirs.generate(ids, **options)[0, ids.shape[1] :]
    text = of_theirs.decode(free)
    special = of_theirs.all_special_tokens[0]
    forced = [lambda ids, logits: logits.index_fill(1, torch.tensor([0]), 90.0) if ids.shape[1] == 9 else logits]
    assert of_theirs.decode([0]) == special
    for stop, processors in ((text[12:17], []), ([special, "nowhere"], forced), ("nowhere", [])):
        torch.manual_seed(0)
        expected = theirs.generate(ids, stop_strings=stop, tokenizer=of_theirs, logits_processor=processors, **options)
        assert (expected.shape[1] < ids.shape[1] + 40) == (stop != "nowhere")
        ours = ligermodels.Tokenizer.from_hub(checkpoint)
        plain = SimpleNamespace(decode=lambda ids: of_theirs.decode(ids))
        raw = SimpleNamespace(decode=of_theirs.backend_tokenizer.decode)
        for tokenizer in (
            of_theirs,
            ours,
            plain,
            tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json")),
            raw,
        ):
            found = model.generate(
                ids, stop_strings=stop, tokenizer=tokenizer, logits_processor=processors, seed=0, **options
            )
            assert torch.equal(found, expected), (type(tokenizer), stop)


@pytest.mark.parametrize("make", [folders.byte_level, folders.byte_fallback], ids=lambda f: f.__name__)
def test_a_stop_string_is_seen_with_the_token_that_completes_it(make, tmp_path):
    """Whatever a token is, such as a piece of a character. A token of a long text costs no more than of a short one."""
    tokenizer = ligermodels.Tokenizer.from_folder(make(tmp_path / "tokenizer"))
    decoded, total = [], 0

    def decode(ids):
        decoded.append(len(ids))
        return tokenizer.decode(ids)

    for text in folders.TEXTS:
        ids = tokenizer.encode("so it begins " + text, add_special_tokens=False)
        start = len(tokenizer.encode("so it begins", add_special_tokens=False))
        new = ids[start:]
        whole = tokenizer.decode(ids)[len(tokenizer.decode(ids[:start])) :]
        for stop in {whole[i : i + n] for i in range(1, len(whole), 3) for n in (1, 2, 5)}:
            ends = [
                n for n in range(1, len(new) + 1)
                if stop in tokenizer.decode(ids[: start + n])[len(tokenizer.decode(ids[:start])) :]
            ]  # fmt: skip
            stopper = StopText(SimpleNamespace(decode=decode), [stop, "never" * 9], ids[:start][-8:])
            assert next((n for n, token in enumerate(new, 1) if stopper.ends_with(token)), None) == ends[0], (
                text,
                stop,
            )
            total += 1
    assert total > 100 and max(decoded) < 40


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
