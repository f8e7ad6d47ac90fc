"""Every row once an epoch, on one rank; the same batches after a resume, with and without the thread."""

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
from ligermodels.recipes.batches import Batches
from ligermodels.recipes.formats import detect
from ligermodels.recipes.masking import IGNORED, Encoder, Example
from ligermodels.recipes.rows import open_rows

pytestmark = pytest.mark.filterwarnings("ignore:rows are left out", "ignore:rows are cut at --max-length")


class Lengths:
    """Rows of given lengths. Row n has n + 1 as all of its ids; 0 is padding."""

    def __init__(self, lengths):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return {"id": index + 1, "length": self.lengths[index]}

    def where(self, index):
        return f"lengths:{index + 1}"


def encode(row):
    """A row of one token has nothing to train; one of no token is bad."""
    if not row["length"]:
        raise InputError("length: it is 0")
    ids = [row["id"]] * row["length"]
    return Example(ids, [IGNORED, *ids[1:]], (row["id"],))


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
    ranks=st.integers(1, 4),
    window=st.integers(1, 30),
    per_batch=st.integers(1, 4),
    multiple=st.sampled_from([1, 2, 4]),
    shuffle=st.booleans(),
    long=st.sampled_from(["cut", "split"]),
)
def test_every_row_once_an_epoch(sizes, packing, ranks, window, per_batch, multiple, shuffle, long):
    long = long if packing else "cut"
    rows, length = Lengths(sizes), 8
    if max(sizes) < 2:
        return
    options = dict(
        length=length, rows_per_batch=per_batch, packing=packing, ranks=ranks, window=window, multiple=multiple,
        shuffle=shuffle, long=long, epochs=2, skip_bad=True, max_untrained=1.0, prefetch=False,
    )  # fmt: skip
    expected = collections.Counter()
    for n, size in enumerate(sizes, 1):
        if size >= 2:
            pieces = (
                [min(length, size - at) for at in range(0, size, length)] if long == "split" else [min(size, length)]
            )
            expected.update((n, piece) for piece in pieces if piece > 1)
    steps = set()
    epochs = [collections.Counter(), collections.Counter()]
    for rank in range(ranks):
        batches = Batches(rows, encode, rank=rank, **options)
        number = 0
        for batch in batches:
            number += 1
            epochs[batches.epoch].update(documents(batch))
            assert batch["input_ids"].shape[1] % multiple == 0
            if packing:
                assert batch["input_ids"].shape[1] <= length * per_batch
                assert (batch["labels"][0, batch["cu_seqlens"][:-1].long()] == IGNORED).all()
            else:
                assert batch["input_ids"].shape[0] <= per_batch and batch["input_ids"].shape[1] <= length
            real = batch["labels"] != IGNORED
            assert (batch["labels"] == batch["input_ids"])[real].all()
            assert real.sum() == sum(size - 1 for _, size in documents(batch))
        steps.add(number)
        report = batches.report()
        assert report["rows"] == 2 * len(sizes) and report["bad"] == 2 * sizes.count(0)
        assert report["untrained"] == 2 * sizes.count(1)
        assert report["tokens"] == 2 * sum(size * count for (_, size), count in expected.items())
        assert report["trained"] == 2 * sum((size - 1) * count for (_, size), count in expected.items())
        assert batches.epoch == 2
    assert len(steps) == 1  # no rank waits for another
    assert epochs == [expected, expected]


@pytest.mark.parametrize("packing", [True, False])
def test_processes_that_encode_change_nothing(packing):
    """Windows of 15 rows, chunks of 50: over the ends of windows and epochs, and from the middle on."""
    rows = Lengths(lengths(117, low=0))
    options = dict(length=10, rows_per_batch=2, packing=packing, window=15, seed=3, skip_bad=True, max_untrained=1.0)
    here, there = Batches(rows, encode, epochs=3, **options), Batches(rows, encode, epochs=3, workers=2, **options)
    for n, (mine, theirs) in enumerate(zip(here, there, strict=True)):
        assert all(torch.equal(mine[key], theirs[key]) for key in mine if torch.is_tensor(mine[key]))
        assert mine.keys() == theirs.keys() and here.state_dict() == there.state_dict()
        if n == 20:
            state = there.state_dict()
    assert here.report() == there.report() and there._encoded.next == (3, 0)
    there.load_state_dict(state)
    here.load_state_dict(state)
    assert sum(mine["input_ids"].ne(theirs["input_ids"]).sum() for mine, theirs in zip(here, there, strict=True)) == 0


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
    rows, options = Lengths(lengths(60, low=2)), dict(length=30, rows_per_batch=2, epochs=1)
    expected = [plain(batch) for batch in Batches(rows, WithTokenizer(byte_level), **options)]
    found, done = [], threading.Event()

    def busy():
        while not done.is_set():
            byte_level(["the threads exist", "from now on"] * 50)
            torch.ones(64, 64) @ torch.ones(64, 64)

    def work():
        found.extend(plain(batch) for batch in Batches(rows, WithTokenizer(byte_level), workers=2, **options))

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
        (0, r"ended with exit code 7.\n  Likely: an error that it has told above"),
    ],
)
def test_a_process_that_dies_is_named(how, message):
    batches = Batches(Lengths([5] * 60), functools.partial(ends_itself, how=how), length=8, workers=2, shuffle=False)
    with pytest.raises(TrainingError, match=message):
        list(batches)
    assert not any(process.is_alive() for process, _ in batches._encoded._workers._running)


def test_what_cannot_be_sent_to_a_process_is_told():
    with pytest.raises(InputError, match=r"processes need rows and encoder that can be pickled: .*lambda.*workers=0"):
        next(Batches(Lengths([5] * 60), lambda row: encode(row), length=8, workers=2))


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("ranks", [1, 3])
def test_resume_at_any_point(packing, ranks):
    rows = Lengths(lengths(57, low=0))

    def make(prefetch):
        return Batches(
            rows, encode, length=10, rows_per_batch=2, packing=packing, rank=ranks - 1, ranks=ranks, window=20, seed=3,
            skip_bad=True, max_untrained=1.0, prefetch=prefetch,
        )  # fmt: skip

    undisturbed, states, expected = make(False), [], []
    for _ in range(60):
        states.append(undisturbed.state_dict())
        expected.append((plain(next(undisturbed)), undisturbed.epoch))
    assert undisturbed.epoch >= 2
    ahead = make(True)  # the thread is ahead of the state
    for state, (batch, epoch) in zip(states, expected, strict=True):
        assert ahead.state_dict() == state
        assert (plain(next(ahead)), ahead.epoch) == (batch, epoch)
    for at in range(0, 56, 5):
        for resumed in (make(at % 2 == 0), ahead):
            resumed.load_state_dict(json.loads(json.dumps(states[at])))
            assert resumed.state_dict() == states[at]
            assert [plain(next(resumed)) for _ in range(4)] == [batch for batch, _ in expected[at : at + 4]]


def test_epochs_and_seeds_differ_and_repeat():
    rows = Lengths(lengths(50, low=2))

    def order(seed, epoch, **options):
        batches = Batches(rows, encode, length=12, packing=False, seed=seed, epochs=epoch + 1, **options)
        return [documents(batch)[0][0] for batch in batches][50 * epoch :]

    assert sorted(order(0, 0)) == list(range(1, 51))
    assert order(0, 0) == order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)
    assert order(5, 1, shuffle=False) == list(range(1, 51))


def test_the_order_is_the_same_in_all_versions():
    batches = Batches(Lengths([4] * 12), encode, length=4, packing=False, seed=7)
    assert [documents(next(batches))[0][0] for _ in range(12)] == [3, 8, 2, 4, 6, 11, 10, 7, 1, 5, 12, 9]


def test_packed_windows_are_full():
    batches = Batches(Lengths(lengths(3000, 10, 600)), encode, length=600, tokens_per_batch=2048, epochs=1)
    sizes = [batch["input_ids"].shape[1] for batch in batches]
    assert sum(sizes) / len(sizes) > 0.98 * 2048
    assert max(sizes) <= 2048


def test_cut_and_split():
    row = Lengths([10])
    cut = Batches(row, encode, length=4, epochs=1)
    with pytest.warns(UserWarning) as told:
        assert [documents(batch) for batch in cut] == [[(1, 4)]]
    assert len(told) == 1 and "rows are cut at --max-length 4, such as: lengths:1 has 10 tokens. What" in str(
        told[0].message
    )
    assert {k: v for k, v in cut.report().items() if v} == dict(rows=1, tokens=4, trained=3, truncated=1, tokens_cut=6)
    split = Batches(row, encode, length=4, rows_per_batch=3, long="split", epochs=1)
    assert [documents(batch) for batch in split] == [[(1, 4), (1, 4), (1, 2)]]
    assert {k: v for k, v in split.report().items() if v} == dict(rows=1, tokens=10, trained=7)


def test_a_row_cut_to_nothing_is_counted():
    def late(row):
        ids = [row["id"]] * row["length"]
        return Example(ids, [IGNORED] * 5 + ids[5:], (row["id"],))

    batches = Batches(Lengths([9] * 19 + [6]), late, length=7, epochs=1)
    assert sum(len(documents(batch)) for batch in batches) == 20
    batches = Batches(Lengths([9, 9]), late, length=5, epochs=1)
    with pytest.raises(InputError, match=r"2 of 2 rows have no token to train: in 0 .*in 2 none before --max-length 5"):
        next(batches)
    batches = Batches(Lengths([9, 9]), late, length=5, epochs=1, max_untrained=1.0)
    with pytest.raises(InputError, match=r"none of the 2 rows can be trained: 0 cannot be read, 2 have no token"):
        next(batches)


def test_a_share_of_rows_without_trained_tokens():
    options = dict(length=8, epochs=1, shuffle=False)
    batches = Batches(Lengths([5] * 3 + [1] * 10 + [5] * 87), encode, **options)
    named = "".join(rf"\n  lengths:{n}: nothing in it is to be trained \(no answer[^\n]*" for n in (4, 5, 6))
    with pytest.warns(UserWarning, match=f"^rows are left out.*{named}$"):
        assert sum(len(documents(batch)) for batch in batches) == 90 and batches.report()["untrained"] == 10
    with pytest.raises(
        InputError, match=f"11 of 100 rows have no token to train: in 11 there is none.*{named}\n  Next"
    ):
        next(Batches(Lengths([5] * 3 + [1] * 11 + [5] * 86), encode, **options))


def test_no_stop_token():
    def endless(row):
        return Example([1, 2], [IGNORED, 2], None if row["length"] > 7 else (2 if row["id"] == 3 else 9,))

    with pytest.raises(InputError, match="none of 2 rows trains a token that stops the model"):
        next(Batches(Lengths([5, 5]), endless, length=8))
    next(Batches(Lengths([5, 5, 5]), endless, length=8))
    next(Batches(Lengths([9, 9]), endless, length=8))  # ids of the author's own


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
        list(Batches(Lengths([7] * 299 + [6]), late, **options))
    list(Batches(Lengths([7] * 50 + [6] + [7] * 249), late, **options))
    with pytest.raises(InputError, match=r"none of 8 rows .* 8 have one"):
        Batches(Lengths([7] * 8), late, **options).count()


def test_bad_rows(write, byte_level):
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    lines = [json.dumps(good)] * 4
    for bad, message in (
        ("{", r"a\.jsonl:3: not valid JSON .*skip-bad"),
        (json.dumps({"text": "a"}), r"a\.jsonl:3: the row is in the format 'text', but .*a\.jsonl:1 is in 'messages'"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', r"a\.jsonl:3: the text has a lone surrogate"),
        ('{"messages": [{"role": "user"}]}', r"a\.jsonl:3: messages\[0\]\.content is missing"),
    ):
        rows = open_rows(write("a.jsonl", "\n".join([*lines[:2], bad, *lines[2:]])))
        options = dict(length=64, epochs=1)
        for prefetch in (True, False):
            with pytest.raises(InputError, match=message):
                list(Batches(rows, Encoder(byte_level, detect(rows, sample=2)), prefetch=prefetch, **options))
        batches = Batches(rows, Encoder(byte_level, detect(rows, sample=2)), skip_bad=True, **options)
        assert sum(len(batch["cu_seqlens"]) - 1 for batch in batches) == 4
        assert (batches.report()["rows"], batches.report()["bad"]) == (5, 1)


def test_chats_from_file_to_batches(write, byte_level):
    chats = [
        {"messages": [{"role": "user", "content": f"Say {n}"}, {"role": "assistant", "content": "cat " * n}]}
        for n in range(1, 30)
    ]
    rows = open_rows(write("a.jsonl", chats))
    encoder = Encoder(byte_level, detect(rows))
    found = []
    for batch in Batches(rows, encoder, length=100, rows_per_batch=3, epochs=1):
        for start, end in itertools.pairwise(batch["cu_seqlens"].tolist()):
            found.append((batch["input_ids"][0, start:end].tolist(), batch["labels"][0, start:end].tolist()))
    expected = [encoder(rows[n]) for n in range(29)]
    assert sorted(found) == sorted((example.ids, example.labels) for example in expected)


def test_other_settings_cannot_go_on():
    rows = Lengths(lengths(40, low=2))
    batches = Batches(rows, encode, length=12, rows_per_batch=2)
    next(batches)
    state = batches.state_dict()
    with pytest.raises(InputError, match="rows was 40, now it is 39, length was 12, now it is 11"):
        Batches(Lengths(lengths(39, low=2)), encode, length=11, tokens_per_batch=24).load_state_dict(state)
    with pytest.raises(InputError, match=r"lacks \['row'\]"):
        batches.load_state_dict({name: value for name, value in state.items() if name != "row"})
    with pytest.raises(InputError, match="no position in 40 rows"):
        batches.load_state_dict(state | {"row": 40})
    other = Batches(rows, encode, length=12, rows_per_batch=2, ranks=2)
    with pytest.warns(UserWarning, match="of 1 ranks, now there are 2"):
        other.load_state_dict(state)
    assert other.state_dict()["batch"] == 0
    shorter = Batches(Lengths([2] * 40), encode, length=12, rows_per_batch=2)
    with pytest.raises(InputError, match="the rows have changed"):
        shorter.load_state_dict(state | {"batch": 9})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(length=1), "length is at least 2"),
        (dict(length=8, tokens_per_batch=8, rows_per_batch=1), "give one"),
        (dict(length=8, tokens_per_batch=7), "tokens_per_batch=7 holds no example of length=8"),
        (dict(length=8, rank=2, ranks=2), "rank is 0 to 1, not 2"),
        (dict(length=8, window=0), "window is at least 1"),
        (dict(length=8, rows_per_batch=0), "rows_per_batch is at least 1"),
        (dict(length=6, multiple=4), "multiples of 4"),
        (dict(length=8, long="split", packing=False), "'split' with packing"),
        (dict(length=8, long="drop"), "long is 'cut'"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(InputError, match=message):
        Batches(Lengths([4]), encode, **options)


def test_no_rows():
    with pytest.raises(InputError, match="no rows"):
        Batches(Lengths([]), encode, length=8)


@pytest.mark.parametrize("options", [{}, {"packing": False, "rows_per_batch": 3}, {"long": "split"}])
def test_counting_in_processes_tells_what_the_batches_are(options):
    rows, random_numbers = Lengths(lengths(230, low=0, high=30)), torch.get_rng_state()
    options = dict(length=16, epochs=1, skip_bad=True, window=40, seed=3) | options
    made = Batches(rows, encode, **options)
    number = sum(1 for _ in made)
    for workers in (0, 2):
        counted = Batches(rows, encode, **options)
        assert counted.count(workers) == number and counted.report() == made.report()
    assert torch.equal(torch.get_rng_state(), random_numbers)


def test_counting_in_processes_names_the_row_that_is_bad():
    rows = Lengths([*[5] * 120, 0, *[5] * 120])
    with pytest.raises(InputError, match="lengths:121: length: it is 0"):
        Batches(rows, encode, length=8, shuffle=False).count(2)
    with pytest.raises(InputError, match=r"240 of 240 rows have no token to train"):
        Batches(Lengths([1] * 240), encode, length=8).count(2)
