"""Every row once an epoch; the same batches after a resume, and with worker processes."""

import collections
import functools
import itertools
import json
import os
import random
import signal
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ligermodels.errors import InputError, TrainingError
from ligermodels.recipes.data import Batches, Encoder, mixed_rows
from ligermodels.recipes.masking import IGNORED, Example
from ligermodels.recipes.packing import packed_batch, padded_batch
from ligermodels.recipes.rows import Row, open_rows
from tests.recipes.runs import data_of, recipe_of

pytestmark = pytest.mark.filterwarnings("ignore:rows are left out", "ignore:rows are cut at --max-length")


class Lengths:
    """Rows of given lengths. Row n has n + 1 as all of its ids; 0 is padding."""

    def __init__(self, lengths):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return Row({"id": index + 1, "length": self.lengths[index]}, self.where(index))

    def where(self, index):
        return f"lengths:{index + 1}"


def encode(row):
    """A row of one token has nothing to train; one of no token is bad."""
    if not row["length"]:
        raise InputError("length: it is 0")
    ids = [row["id"]] * row["length"]
    return Example(ids, [IGNORED, *ids[1:]], (row["id"],))


def batches_of(rows, process=encode, *, length, packing=True, per_batch=1, split=False, skip_bad=False, **options):
    """per_batch: rows of a batch, or of a packed one so many times the length."""
    encoder = Encoder(rows, process, length, split=split, skip_bad=skip_bad)
    capacity = length * per_batch if packing else per_batch
    collate = packed_batch if packing else padded_batch
    return Batches(encoder, collate, capacity=capacity, packing=packing, **options)


def lengths(number, low=1, high=12, seed=0):
    draw = random.Random(seed)
    return [draw.randint(low, high) for _ in range(number)]


def plain(batch):
    return {name: x.tolist() if isinstance(x, torch.Tensor) else x for name, x in batch.items()}


def documents(batch):
    """The (id, length) of each document of a batch, without padding."""
    if "cu_seqlens" in batch:
        ids, edges = batch["input_ids"][0].tolist(), batch["cu_seqlens"].tolist()
        rows = [ids[start:end] for start, end in itertools.pairwise(edges)]
    else:
        rows = [
            row[mask.bool()].tolist() for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        ]
    assert all(len(set(row)) == 1 for row in rows)
    return [(row[0], len(row)) for row in rows if row[0]]


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.builds(lengths, st.integers(1, 80), st.integers(0, 5), st.integers(5, 15), st.integers(0, 99)),
    packing=st.booleans(),
    window=st.integers(1, 30),
    per_batch=st.integers(1, 4),
    shuffle=st.booleans(),
    split=st.booleans(),
)
def test_every_row_once_an_epoch(sizes, packing, window, per_batch, shuffle, split):
    rows, length, split = Lengths(sizes), 8, split and packing
    if max(sizes) < 2:
        return
    expected = collections.Counter()
    for n, size in enumerate(sizes, 1):
        parts = [min(length, size - at) for at in range(0, size, length)] if split else [min(size, length)]
        expected.update((n, part) for part in parts if size >= 2 and part > 1)
    epochs = [collections.Counter(), collections.Counter()]
    batches = batches_of(
        rows, length=length, packing=packing, per_batch=per_batch, window=window, shuffle=shuffle, split=split,
        epochs=2, skip_bad=True, max_untrained=1.0,
    )  # fmt: skip
    for batch in batches:
        epochs[batches.state_dict()["epoch"]].update(documents(batch))
        if packing:
            assert batch["input_ids"].shape[1] <= length * per_batch
            assert (batch["labels"][0, batch["cu_seqlens"][:-1].long()] == IGNORED).all()
        else:
            assert batch["input_ids"].shape[0] <= per_batch and batch["input_ids"].shape[1] <= length
        real = batch["labels"] != IGNORED
        assert (batch["labels"] == batch["input_ids"])[real].all()
        assert real.sum() == sum(size - 1 for _, size in documents(batch))
    report = batches.report()
    assert (report["rows"], report["bad"], report["untrained"]) == (
        2 * len(sizes),
        2 * sizes.count(0),
        2 * sizes.count(1),
    )
    assert report["tokens"] == 2 * sum(size * count for (_, size), count in expected.items())
    assert report["trained"] == 2 * sum((size - 1) * count for (_, size), count in expected.items())
    assert epochs == [expected, expected]


@pytest.mark.parametrize("packing", [True, False])
def test_worker_processes_change_nothing(packing):
    """Windows of 15 rows, chunks of 50: over the ends of windows and epochs, and from the middle on."""
    rows = Lengths(lengths(117, low=0))
    options = dict(length=10, per_batch=2, packing=packing, window=15, seed=3, skip_bad=True, max_untrained=1.0)
    here, there = (batches_of(rows, epochs=3, workers=workers, **options) for workers in (0, 2))
    for n, (mine, theirs) in enumerate(zip(here, there, strict=True)):
        assert plain(mine) == plain(theirs) and here.state_dict() == there.state_dict()
        if n == 20:
            state = there.state_dict()
    assert here.report() == there.report()
    for batches in (here, there):
        batches.load_state_dict(state)
    assert [plain(batch) for batch in here] == [plain(batch) for batch in there]


class WithTokenizer:
    """An encoder whose tokenizer splits many texts at once, in threads where it may."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __call__(self, row):
        example = encode(row)
        ids = self.tokenizer([f"text {row['id']}"] * 50)["input_ids"][-1]
        return Example(example.ids + ids, example.labels + ids, example.stops)


def test_processes_are_started_beside_busy_threads(byte_level, monkeypatch):
    """Of tokenizers and of torch, from a thread: what a fork would die of, or wait for without end."""
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    rows, options = Lengths(lengths(60, low=2)), dict(length=30, per_batch=2, epochs=1)
    expected = [plain(batch) for batch in batches_of(rows, WithTokenizer(byte_level), **options)]
    found, done = [], threading.Event()

    def busy():
        while not done.is_set():
            byte_level(["the threads exist", "from now on"] * 50)
            torch.ones(64, 64) @ torch.ones(64, 64)

    def work():
        found.extend(plain(batch) for batch in batches_of(rows, WithTokenizer(byte_level), workers=2, **options))

    threads = [threading.Thread(target=run, daemon=True) for run in (busy, work)]
    for thread in threads:
        thread.start()
    threads[1].join(60)
    done.set()
    assert found == expected and len(found) > 10


def ends_itself(row, how):
    if row["id"] == 30:
        os.kill(os.getpid(), how) if how else os._exit(7)
    return encode(row)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (signal.SIGKILL, r"process \d+, which encodes rows, ended by signal SIGKILL.\n  Likely: .*memory ran out"),
        (signal.SIGSEGV, r"ended by signal SIGSEGV.\n  Likely: a crash in a library"),
        (0, r"ended with exit code 7.\n  Likely: an error that it has printed above"),
    ],
)
def test_a_process_that_dies_is_named(how, message):
    process = functools.partial(ends_itself, how=how)
    batches = batches_of(Lengths([5] * 60), process, length=8, workers=2, shuffle=False)
    with pytest.raises(TrainingError, match=message):
        list(batches)


def test_rows_that_cannot_be_pickled():
    with pytest.raises(InputError, match=r"must be picklable for worker processes: .*lambda"):
        next(batches_of(Lengths([5] * 60), lambda row: encode(row), length=8, workers=2))


@pytest.mark.parametrize("packing", [True, False])
def test_resume_at_any_point(packing):
    rows = Lengths(lengths(57, low=0))

    def make():
        return batches_of(
            rows, length=10, per_batch=2, packing=packing, window=20, seed=3, skip_bad=True, max_untrained=1.0
        )

    undisturbed, states, expected = make(), [], []
    for _ in range(60):
        states.append(undisturbed.state_dict())
        expected.append(plain(next(undisturbed)))
    assert states[-1]["epoch"] >= 2
    used = make()
    for at in range(0, 56, 5):
        for resumed in (make(), used):
            resumed.load_state_dict(json.loads(json.dumps(states[at])))
            assert resumed.state_dict() == states[at]
            assert [plain(next(resumed)) for _ in range(4)] == expected[at : at + 4]


def test_epochs_and_seeds_differ_and_repeat():
    rows = Lengths(lengths(50, low=2))

    def order(seed, epoch, **options):
        batches = batches_of(rows, length=12, packing=False, seed=seed, epochs=epoch + 1, **options)
        return [documents(batch)[0][0] for batch in batches][50 * epoch :]

    assert sorted(order(0, 0)) == list(range(1, 51))
    assert order(0, 0) == order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)
    assert order(5, 1, shuffle=False) == list(range(1, 51))


def test_the_order_is_the_same_in_all_versions():
    batches = batches_of(Lengths([4] * 12), length=4, packing=False, seed=7)
    assert [documents(next(batches))[0][0] for _ in range(12)] == [3, 8, 2, 4, 6, 11, 10, 7, 1, 5, 12, 9]


def test_packed_windows_are_full():
    batches = batches_of(Lengths(lengths(3000, 10, 600)), length=600, per_batch=3, epochs=1)
    sizes = [batch["input_ids"].shape[1] for batch in batches]
    assert sum(sizes) / len(sizes) > 0.98 * 1800 and max(sizes) <= 1800


def test_cut_and_split():
    cut = batches_of(Lengths([10]), length=4, epochs=1)
    text = "rows are cut at --max-length 4, such as: lengths:1 has 10 tokens. What"
    with pytest.warns(UserWarning, match=text) as warned:
        assert [documents(batch) for batch in cut] == [[(1, 4)]]
    assert len(warned) == 1
    assert {k: v for k, v in cut.report().items() if v} == dict(rows=1, tokens=4, trained=3, truncated=1, tokens_cut=6)
    split = batches_of(Lengths([10]), length=4, per_batch=3, split=True, epochs=1)
    assert [documents(batch) for batch in split] == [[(1, 4), (1, 4), (1, 2)]]
    assert {k: v for k, v in split.report().items() if v} == dict(rows=1, tokens=10, trained=7)


def test_a_row_cut_to_nothing_is_counted():
    def late(row):
        ids = [row["id"]] * row["length"]
        return Example(ids, [IGNORED] * 5 + ids[5:], (row["id"],))

    batches = batches_of(Lengths([9] * 19 + [6]), late, length=7, epochs=1)
    assert sum(len(documents(batch)) for batch in batches) == 20
    batches = batches_of(Lengths([9, 9]), late, length=5, epochs=1)
    with pytest.raises(InputError, match=r"2 of 2 rows have no token to train: in 0 .*in 2 none before --max-length 5"):
        next(batches)
    batches = batches_of(Lengths([9, 9]), late, length=5, epochs=1, max_untrained=1.0)
    with pytest.raises(InputError, match=r"none of the 2 rows can be trained: 0 cannot be read, 2 have no token"):
        next(batches)


def test_a_share_of_rows_without_trained_tokens():
    options = dict(length=8, epochs=1, shuffle=False)
    batches = batches_of(Lengths([5] * 3 + [1] * 10 + [5] * 87), encode, **options)
    named = "".join(rf"\n  lengths:{n}: nothing in it is to be trained \(no answer[^\n]*" for n in (4, 5, 6))
    with pytest.warns(UserWarning, match=f"^rows are left out.*{named}$"):
        assert sum(len(documents(batch)) for batch in batches) == 90 and batches.report()["untrained"] == 10
    with pytest.raises(
        InputError, match=f"11 of 100 rows have no token to train: in 11 there is none.*{named}\n  Next"
    ):
        next(batches_of(Lengths([5] * 3 + [1] * 11 + [5] * 86), encode, **options))


def test_no_stop_token():
    def endless(row):
        return Example([1, 2], [IGNORED, 2], None if row["length"] > 7 else (2 if row["id"] == 3 else 9,))

    with pytest.raises(InputError, match="none of 2 rows trains a token that stops the model"):
        next(batches_of(Lengths([5, 5]), endless, length=8))
    next(batches_of(Lengths([5, 5, 5]), endless, length=8))
    next(batches_of(Lengths([9, 9]), endless, length=8))  # ids of the author's own


def test_every_stop_token_is_cut_away():
    """One row of 300 that is whole is enough, as is its place behind the first window of 10."""

    def late(row):
        ids = [row["id"]] * row["length"]
        return Example([*ids, 999], [IGNORED, *ids[1:], 999], (999,))

    told = (
        r"none of 100 rows trains a token that stops the model.*: 100 have one, and are cut before it at --max-length 7"
    )
    options = dict(length=7, window=10, shuffle=False, epochs=1)
    with pytest.raises(InputError, match=told + r". Next step: raise --max-length. lengths:1 has 8 tokens, lengths:2"):
        list(batches_of(Lengths([7] * 299 + [6]), late, **options))
    list(batches_of(Lengths([7] * 50 + [6] + [7] * 249), late, **options))
    with pytest.raises(InputError, match=r"none of 8 rows .* 8 have one"):
        batches_of(Lengths([7] * 8), late, **options).count()


def test_bad_rows(write):
    recipe = recipe_of("sft")
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    lines = [json.dumps(good)] * 4
    for bad, message in (
        ("{", r"a\.jsonl:3: not valid JSON .*skip-bad"),
        (json.dumps({"text": "a"}), r"a\.jsonl:3: the row is in the format 'text', but .*a\.jsonl:1 is in 'messages'"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', r"a\.jsonl:3: the text has a lone surrogate"),
        ('{"messages": [{"role": "user"}]}', r"a\.jsonl:3: messages\[0\]\.content is missing"),
    ):
        path = write("a.jsonl", "\n".join([*lines[:2], bad, *lines[2:]]))
        for skip_bad in (False, True):
            encoder = Encoder(open_rows(path), recipe.process, 64, ("messages", f"{path}:1"), skip_bad=skip_bad)
            batches = Batches(encoder, recipe.collate, capacity=64, epochs=1)
            if not skip_bad:
                with pytest.raises(InputError, match=message):
                    list(batches)
        assert sum(len(batch["cu_seqlens"]) - 1 for batch in batches) == 4
        assert (batches.report()["rows"], batches.report()["bad"]) == (5, 1)


def test_another_state_is_refused():
    rows = Lengths(lengths(40, low=2))
    batches = batches_of(rows, length=12, per_batch=2)
    next(batches)
    state = batches.state_dict()
    with pytest.raises(InputError, match="rows was 40, now it is 39, length was 12, now it is 11"):
        batches_of(Lengths(lengths(39, low=2)), length=11).load_state_dict(state)
    with pytest.raises(InputError, match=r"lacks \['row'\]"):
        batches.load_state_dict({name: value for name, value in state.items() if name != "row"})
    with pytest.raises(InputError, match="not a position in 40 rows"):
        batches.load_state_dict(state | {"row": 40})
    with pytest.raises(InputError, match="the rows have changed"):
        batches_of(Lengths([2] * 40), length=12, per_batch=2).load_state_dict(state | {"batch": 9})


@pytest.mark.parametrize("options", [{}, {"packing": False, "per_batch": 3}, {"split": True}])
def test_counts_are_those_of_the_batches(options):
    rows, random_numbers = Lengths(lengths(230, low=0, high=30)), torch.get_rng_state()
    options = dict(length=16, epochs=1, skip_bad=True, window=40, seed=3) | options
    made = batches_of(rows, **options)
    number = sum(1 for _ in made)
    for workers in (0, 2):
        assert batches_of(rows, workers=workers, **options).count() == {"batches": number, **made.report()}
    assert torch.equal(torch.get_rng_state(), random_numbers)


def test_counting_names_the_row_that_is_bad():
    rows = Lengths([*[5] * 120, 0, *[5] * 120])
    with pytest.raises(InputError, match="lengths:121: length: it is 0"):
        batches_of(rows, length=8, shuffle=False, workers=2).count()
    with pytest.raises(InputError, match=r"240 of 240 rows have no token to train"):
        batches_of(Lengths([1] * 240), length=8, workers=2).count()


def said(*texts):
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]


def test_several_sets_with_weights(write):
    """a twice, half of b, all of c; the same half for the same seed."""
    for name, number in (("a", 3), ("b", 4), ("c", 1)):
        write(f"{name}.jsonl", [{"text": f"{name}{n}"} for n in range(number)])
    folder = write("c.txt", "c\n\nc").parent
    sources = [f"{folder}/a.jsonl*2", f"{folder}/b.jsonl*0.5", f"{folder}/c.txt"]
    rows = mixed_rows(sources, 0)
    texts = [rows[n]["text"] for n in range(len(rows))]
    assert (
        texts[:6] == ["a0", "a1", "a2"] * 2 and set(texts[6:8]) < {"b0", "b1", "b2", "b3"} and texts[8:] == ["c\n\nc"]
    )
    again = mixed_rows(sources, 0)
    assert [again.where(n) for n in range(9)] == [rows.where(n) for n in range(9)] and rows.where(8).endswith("c.txt:1")
    assert {str(mixed_rows(sources, seed)[6]) for seed in range(9)} > {str(rows[6])}
    with pytest.raises(InputError, match=r"a weight of 0.1 leaves none of its 3 rows"):
        mixed_rows([f"{folder}/a.jsonl*0.1"], 0)
    data = data_of("pretrain", recipe_of("pretrain").tokenizer, data=sources, max_samples=4)
    assert len(data.rows) == 4 and data.rows[3]["text"] == "a0"


def test_system_prompt_and_loss_on_every_token(write):
    given, own = {"messages": said("a", "b")}, {"messages": [{"role": "system", "content": "own"}, *said("a", "b")]}
    recipe = recipe_of("sft", system_prompt="Be brief.", assistant_only_loss=False)
    example = recipe.process(given)
    text = recipe.tokenizer.decode(example.ids)
    assert "Be brief." in text and example.trained == example.size - 1
    assert "Be brief." not in recipe.tokenizer.decode(recipe.process(own).ids)
    pair = {"prompt": said("a"), "chosen": said("c", "b")[1:], "rejected": said("c", "d")[1:]}
    for name, row in (("dpo", pair), ("grpo", {"prompt": said("a")})):
        more = (
            {"reward_funcs": (str(write("r.py", "def reward(completions):\n    return [1.0]")),)}
            if name == "grpo"
            else {}
        )
        found = recipe_of(name, system_prompt="Be brief.", max_completion_length=9, **more) if more else recipe_of(
            name, system_prompt="Be brief."
        )  # fmt: skip
        found.chat = True
        made = found.process(row)
        assert "Be brief." in found.tokenizer.decode(made.ids if more else made.sequences[0].ids)
    with pytest.raises(InputError, match="system_prompt: it is for chats"):
        recipe.process({"text": "a"})
