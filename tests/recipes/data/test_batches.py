"""Every row once an epoch; the same batches after a resume, and with worker processes."""

import collections
import functools
import itertools
import json
import random
import warnings
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings, strategies as st

from ligermodels.errors import InputError
from ligermodels.processes import Processes
from ligermodels.recipes.data.batches import MAX_UNTRAINED, Batches
from ligermodels.recipes.data.examples import IGNORED, Example, packed_batch
from ligermodels.recipes.data.formats import read
from ligermodels.recipes.data.rows import JoinedRows, Rows, held_out, open_rows, open_sources
from tests.recipes.runs import data_of, recipe_of

pytestmark = pytest.mark.filterwarnings("ignore:rows are cut")


@pytest.fixture(autouse=True, scope="module")
def any_share():
    """Rows without a trained token are counted, however many they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ligermodels.recipes.data.batches.MAX_UNTRAINED", 1.0)
        yield


def rows_of(lengths):
    """Rows of given lengths. Row n has n + 1 as all of its ids; 0 is padding."""
    return Rows([{"id": n, "length": length} for n, length in enumerate(lengths, 1)], "lengths:", None)


def encode(row, first=1, end=None):
    """A row of one token has nothing to train; one of no token is bad. first: the first label; end: a stop token."""
    if not row["length"]:
        raise InputError("length: it is 0")
    ids = [row["id"]] * row["length"] + [end] * (end is not None)
    return Example(ids, [IGNORED] * first + ids[first:], (end or row["id"],))


def batches_of(lengths, process=encode, *, length, per_batch=1, split=False, skip_bad=False, seed=0, rank=0, **how):
    """per_batch: the maximum tokens of a batch, in multiples of `length`."""
    recipe = SimpleNamespace(
        options=SimpleNamespace(max_length=length, skip_bad=skip_bad, seed=seed), process=process, splits=split,
        capacity=length * per_batch, processes=Processes(rank=rank),
    )  # fmt: skip
    return Batches(recipe, rows_of(lengths), **how)


def lengths(number, low=1, high=12, seed=0):
    draw = random.Random(seed)
    return [draw.randint(low, high) for _ in range(number)]


def documents(batch):
    """The (id, length) of each example of a batch."""
    assert all(len(set(one.ids)) == 1 for one in batch)
    return [(one.ids[0], one.size) for one in batch]


def reported(batches):
    """What was counted, without zeros."""
    return {name: n for name, n in batches.counts.numbers.items() if n and name not in ("ends", "with_end")}


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.builds(lengths, st.integers(1, 80), st.integers(0, 5), st.integers(5, 15), st.integers(0, 99)),
    window=st.integers(1, 30), per_batch=st.integers(1, 4), shuffle=st.booleans(),
    split=st.booleans(),
)  # fmt: skip
def test_every_row_once_an_epoch(sizes, window, per_batch, shuffle, split):
    length = 8
    if max(sizes) < 2:
        return
    expected = collections.Counter()
    for n, size in enumerate(sizes, 1):
        parts = [min(length, size - at) for at in range(0, size, length)] if split else [min(size, length)]
        expected.update((n, part) for part in parts if size >= 2 and part > 1)
    epochs = [collections.Counter(), collections.Counter()]
    how = dict(per_batch=per_batch, window=window, shuffle=shuffle, split=split)
    batches = batches_of(sizes, length=length, epochs=2, skip_bad=True, **how)
    for batch in batches:
        epoch, found = batches.state_dict()["epoch"], documents(batch)
        epochs[epoch].update(found)
        batch = packed_batch(batch)
        assert batch["input_ids"].shape[1] <= length * per_batch
        assert (batch["labels"][0, batch["cu_seqlens"][:-1].long()] == IGNORED).all()
        real = batch["labels"] != IGNORED
        assert (batch["labels"] == batch["input_ids"])[real].all()
        assert real.sum() == sum(size - 1 for _, size in found)
    assert epochs == [expected, expected]
    report = batches.counts.numbers
    assert [report[name] for name in ("rows", "bad", "untrained", "tokens", "trained")] == [
        2 * len(sizes), 2 * sizes.count(0), 2 * sizes.count(1),
        *(2 * sum((size - less) * count for (_, size), count in expected.items()) for less in (0, 1)),
    ]  # fmt: skip


def test_resume_at_any_point_and_worker_processes_change_nothing():
    """Over the ends of windows, of chunks that a process gets, and of epochs."""
    sizes, how = lengths(117, low=0), dict(length=10, per_batch=2, window=15, seed=3, skip_bad=True)
    here, there = (batches_of(sizes, epochs=3, workers=workers, **how) for workers in (0, 2))
    states, expected = [here.state_dict()], []
    for mine, theirs in zip(here, there, strict=True):
        expected.append(mine)
        states.append(here.state_dict())
        assert theirs == mine and there.state_dict() == states[-1]
    counted = reported(here)
    assert counted == reported(there) and counted["rows"] == 3 * 117 and states[-1]["epoch"] == 2
    for at in range(0, len(expected), 7):
        for resumed in (here, batches_of(sizes, epochs=3, **how)):
            resumed.load_state_dict(json.loads(json.dumps(states[at])))
            assert resumed.state_dict() == states[at]
            assert list(itertools.islice(resumed, 4)) == expected[at : at + 4]
    there.load_state_dict(states[20])
    assert list(there) == expected[20:]
    assert reported(there) == counted  # of the rows before the state, too, and each once
    with pytest.raises(InputError, match="the rows have changed"):  # more in test_bad_inputs.py
        there.load_state_dict(states[20] | {"batch": 99})


def test_the_order_is_drawn_from_seed_and_epoch():
    def order(seed, epochs=2, **how):
        batches = batches_of([4] * 12, length=4, window=1, seed=seed, epochs=epochs, **how)
        return [documents(batch)[0][0] for batch in batches]

    assert order(7)[:12] == [3, 8, 2, 4, 6, 11, 10, 7, 1, 5, 12, 9]  # in all versions of all libraries
    assert order(7)[12:] != order(7)[:12] != order(0)[:12] and sorted(order(7)[12:]) == [*range(1, 13)]
    assert order(5, 1, shuffle=False) == [*range(1, 13)]


def test_packed_windows_are_full():
    batches = batches_of(lengths(3000, 10, 600), length=600, per_batch=3, epochs=1)
    sizes = [sum(example.size for example in batch) for batch in batches]
    assert sum(sizes) / len(sizes) > 0.98 * 1800 and max(sizes) <= 1800


def test_a_long_row_is_cut_or_split():
    cut = batches_of([10], length=4, epochs=1)
    text = "rows are cut at --max-length 4, or dropped:\n  lengths:1: cut, it has 10 tokens"
    with pytest.warns(UserWarning, match=text) as warned:
        assert [documents(batch) for batch in cut] == [[(1, 4)]]
    assert len(warned) == 1 and reported(cut) == dict(rows=1, tokens=4, trained=3, truncated=1, tokens_cut=6)
    split = batches_of([10], length=4, per_batch=3, split=True, epochs=1)
    assert [documents(batch) for batch in split] == [[(1, 4), (1, 4), (1, 2)]]
    assert reported(split) == dict(rows=1, tokens=10, trained=7)


LATE, STOPS = functools.partial(encode, first=5), functools.partial(encode, end=999)
UNTRAINED = "".join(rf"\n  lengths:{n}: dropped: it has no trained tokens \(no answer[^\n]*" for n in (90, 91, 92))
CUT = r"trains a token that stops the model.*cut before it.*lengths:1: cut, it has 8 tokens"
TOO_LITTLE = {  # sizes, process, length, the error or None
    "10 of 100": ([5] * 89 + [1] * 10 + [5], encode, 8, None),
    "11 of 100": ([5] * 89 + [1] * 11, encode, 8, f"^11 of 100 rows [a-z ]*[.]{UNTRAINED}\n  Ne.*skip-bad tr"),
    "11 of 100, skipped": ([5] * 89 + [1] * 11, encode, 8, None),
    "all, skipped": ([1] * 9 + [0], encode, 8, "9 of 10 rows have no trained tokens"),
    "cut away": ([9, 9], LATE, 5, r"2 of 2 rows .*--max-length 5 truncates 2 before.*\n  lengths:1: dropped: it"),
    "cut": ([9] * 19 + [6], LATE, 7, None),
    "no stop": ([5, 5], lambda row: Example([1, 2], [IGNORED, 2], (9,)), 8, "none of 2 rows trains a token that stops"),
    "one stop": ([5, 5], lambda row: Example([1, 2], [IGNORED, 2], (row["id"] + 1,)), 8, None),
    "ids of the author's own": ([9, 9], lambda row: Example([1, 2], [IGNORED, 2]), 8, None),
    "stops cut": ([7] * 299 + [6], STOPS, 7, f"none of 100 rows {CUT}"),
    "stops of few cut": ([7] * 8, STOPS, 7, f"none of 8 rows {CUT}"),
    "a stop in a later window": ([7] * 50 + [6] + [7] * 249, STOPS, 7, None),
    "only bad": ([0, 0], encode, 5, "none of the 2 rows can be read; without --skip-bad"),
}  # fmt: skip


@pytest.mark.parametrize("case", TOO_LITTLE)
def test_too_little_to_train(case, monkeypatch):
    (sizes, process, length, error), skip_bad = TOO_LITTLE[case], "skipped" in case or case == "only bad"
    monkeypatch.setattr("ligermodels.recipes.data.batches.MAX_UNTRAINED", MAX_UNTRAINED)
    for use in (list, Batches.count):
        batches = batches_of(sizes, process, length=length, window=50, shuffle=False, skip_bad=skip_bad, epochs=1)
        if error is None:
            use(batches)
        else:
            with pytest.raises(InputError, match=f"(?s){error}"):
                use(batches)


def shown(data):
    """The warnings of a pass over the data."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        collections.deque(data.batches(epochs=1), 0)
    return [str(warning.message) for warning in said]


def test_empty_answers_and_prompts_that_join_an_answer_are_warned_of_once(write):
    tokenizer = recipe_of("sft").tokenizer
    rows = [{"messages": said("Say", answer, "Say", "on")} for answer in ("", "mat", "", "the cat")]
    file = str(write("a.jsonl", rows))
    (text,) = shown(data_of("sft", tokenizer, data=file, batch_tokens=64))
    assert text.startswith("2 of 4 rows have an empty answer") and text.count("a.jsonl:") == 2
    tokenizer.chat_template = "{% for m in messages %}{{ m.role ~ ': \n' ~ m.content ~ eos_token }}{% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}{{ 'assistant: \n' }}{% endif %}"
    file = str(write("b.jsonl", [{"messages": said("Say", "\non")}] * 3))
    (text,) = shown(data_of("sft", tokenizer, data=file))
    assert text.startswith("3 of 3 rows have a prompt")
    assert "b.jsonl:1: the prompt ends with ['Ġ', 'Ċ'], and with an answer after it with ['Ġ', 'ĊĊ']" in text
    texts = [{"prompt": "Say", "completion": "\n\non"}, {"prompt": "Say\n", "completion": "\non"}]
    (text,) = shown(data_of("sft", tokenizer, data=str(write("c.jsonl", texts))))
    assert text.startswith("1 of 2 rows have a prompt") and "c.jsonl:2: the prompt ends with" in text


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_alone_warns(rank):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert len(list(batches_of([4, 9], length=8, epochs=1, rank=rank))) == 2
    assert len(said) == (rank == 0)


def test_labels_that_are_all_the_same_are_warned_of_once(write, recwarn):
    for name, labels in (("same", [True] * 3), ("both", [True, False]), ("bad", ["x", "1"])):
        rows = [{"prompt": "a", "completion": "b", "label": label} for label in labels]
        data_of("kto", recipe_of("sft").tokenizer, data=str(write(f"{name}.jsonl", rows)), skip_bad=True)
    texts = [str(warning.message) for warning in recwarn]
    assert [text.partition(":")[0] for text in texts] == [f"all {n} rows have the label True" for n in (3, 2)]


@pytest.mark.parametrize("how", [{}, {"per_batch": 3}, {"split": True}])
def test_counts_are_those_of_the_batches(how):
    sizes, random_numbers = lengths(230, low=0, high=30), torch.get_rng_state()
    how = dict(length=16, epochs=1, skip_bad=True, window=40, seed=3) | how
    made = batches_of(sizes, **how)
    expected = collections.Counter(batches=sum(1 for _ in made), **made.counts.numbers)
    for workers in (0, 2):
        assert batches_of(sizes, workers=workers, **how).count() == expected
    assert torch.equal(torch.get_rng_state(), random_numbers)
    with pytest.raises(InputError, match="lengths:121: length: it is 0"):
        batches_of([*[5] * 120, 0, *[5] * 120], length=8, shuffle=False, workers=2, epochs=1).count()


def said(*texts):
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", r"a\.jsonl:3: not valid JSON .*skip-bad"),
        ('{"a": ' + "1" * 4301 + "}", r"a\.jsonl:3: not valid JSON .*4300 digits.*skip-bad"),
        ('{"text": "a"}', r"a\.jsonl:3: the row is in the format 'text', but .*a\.jsonl:1 is in 'messages'"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', r"a\.jsonl:3: the text has a lone surrogate"),
    ],
)
def test_bad_rows_are_named_or_skipped(write, bad, message):
    good = json.dumps({"messages": said("a", "b")})
    path = write("a.jsonl", "\n".join([good, good, bad, good, good]))
    batches, skipping = (
        Batches(recipe_of("sft", skip_bad=skip_bad), open_rows(path), ("messages", f"{path}:1"), epochs=1)
        for skip_bad in (False, True)
    )
    with pytest.raises(InputError, match=message):
        list(batches)
    assert sum(map(len, skipping)) == 4 and (reported(skipping)["rows"], reported(skipping)["bad"]) == (5, 1)


def test_several_sets_with_weights(write):
    """a twice, half of b, all of c; the same half for the same seed."""
    for name, number in (("a", 3), ("b", 4), ("c", 1)):
        write(f"{name}.jsonl", [{"text": f"{name}{n}"} for n in range(number)])
    folder = write("c.txt", "c\n\nc").parent
    sources = [f"{folder}/a.jsonl*2", f"{folder}/b.jsonl*0.5", f"{folder}/c.txt"]
    rows, again = open_sources(sources, 0), open_sources(sources, 0)
    texts = [rows[n]["text"] for n in range(len(rows))]
    assert texts[:6] == ["a0", "a1", "a2"] * 2 and {*texts[6:8]} < {"b0", "b1", "b2", "b3"} and texts[8:] == ["c\n\nc"]
    assert [again.where(n) for n in range(9)] == [rows.where(n) for n in range(9)] and rows.where(8).endswith("c.txt:1")
    assert {str(open_sources(sources, seed)[6]) for seed in range(9)} > {str(rows[6])}
    with pytest.raises(InputError, match=r"a weight of 0.1 leaves none of its 3 rows"):
        open_sources([f"{folder}/a.jsonl*0.1"], 0)
    few = data_of("pretrain", recipe_of("pretrain").tokenizer, data=sources, max_samples=4)
    assert [few.rows[n]["text"] for n in range(4)] == ["a0", "a2", "a1", texts[6]]  # of each set its share
    few = data_of("pretrain", few.recipe.tokenizer, data=sources[:1], max_samples=4)
    assert [few.rows[n]["text"] for n in range(4)] == ["a0", "a1", "a2", "a0"]  # of one set the first


def texts_of(rows):
    return [rows[n]["text"] for n in range(len(rows))]


@pytest.mark.parametrize("seed", range(5))
def test_a_split_without_copies(write, seed):
    """It stays what it was: a run may be resumed after an update."""
    for name in ("a", "b"):
        write(f"{name}.jsonl", [{"text": f"{n}"} for n in range(7)])  # a text that is there twice is no copy
    folder = write("c.txt", "c").parent
    rows = open_sources([f"{folder}/a.jsonl", f"{folder}/b.jsonl*0.5", f"{folder}/c.txt"], seed)
    train, evaluated = held_out(rows, 0.3, seed)
    chosen = set(random.Random(seed).sample(range(len(rows)), round(0.3 * len(rows))))
    for part, is_chosen in ((train, False), (evaluated, True)):
        expected = [rows.where(n) for n in range(len(rows)) if (n in chosen) is is_chosen]
        assert [part.where(n) for n in range(len(part))] == expected


COPIES = {  # sources, with the numbers of copies of each row of a.jsonl
    "twice": (["a.jsonl*2"], {2}),
    "a half again": (["a.jsonl*1.5"], {1, 2}),
    "given twice": (["a.jsonl", "f/../a.jsonl"], {2}),
    "by its folder, too": (["f/b.jsonl", "f", "a.jsonl*3"], {3}),
}


@pytest.mark.parametrize("sources, numbers", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("max_samples", [None, 1000])
def test_a_row_and_its_copies_are_on_one_side_of_a_split(write, monkeypatch, sources, numbers, max_samples):
    if "f" in sources:
        pytest.importorskip("datasets")
    monkeypatch.chdir(write("a.jsonl", [{"text": f"a {n}"} for n in range(8)]).parent)
    write("f/b.jsonl", [{"text": f"b {n}"} for n in range(8)])
    how = dict(data=sources, eval_share=0.25, seed=1, max_samples=max_samples)
    data = data_of("pretrain", recipe_of("pretrain").tokenizer, **how)
    train, evaluated = texts_of(data.rows), texts_of(data.eval_rows)
    names = {name[0] for name in train}
    assert not {*train} & {*evaluated} and len({*train, *evaluated}) == 8 * len(names)
    assert len(evaluated) == len({*evaluated}) == 2 * len(names)  # a share of the rows without copies
    assert {train.count(text) for text in {*train} if text[0] == "a"} == numbers
    assert train == [text for text in texts_of(open_sources(sources, 1)) if text not in evaluated]


def test_splits_of_one_saved_data_set_are_no_copies(tmp_path):
    datasets = pytest.importorskip("datasets")
    parts = {
        name: datasets.Dataset.from_list([{"text": f"{name} {n}"} for n in range(4)]) for name in ("train", "test")
    }
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "set")
    rows = open_sources([f"{tmp_path}/set", f"{tmp_path}/set:train", f"{tmp_path}/set:test"], 0)
    train, evaluated = map(texts_of, held_out(rows, 0.5, 0))
    assert len({*evaluated}) == len(evaluated) == 4 and not {*train} & {*evaluated}
    assert len({*train, *evaluated}) == 8
    with pytest.raises(InputError, match="of 2 rows leaves none to evaluate on"):
        held_out(JoinedRows([rows], [0, 4, 0, 1]), 0.2, 0)


def test_system_prompts_and_tools(write):
    own = {"messages": [{"role": "system", "content": "own"}, *said("a", "b")]}
    recipe = recipe_of("sft", system_prompt="Be brief.", assistant_only_loss=False)
    example = recipe.process({"messages": said("a", "b")})
    assert "Be brief." in recipe.tokenizer.decode(example.ids) and example.trained == example.size - 1
    assert "Be brief." not in recipe.tokenizer.decode(recipe.process(own).ids)
    pair = {"prompt": said("a"), "chosen": said("c", "b")[1:], "rejected": said("c", "d")[1:]}
    assert {one.messages[0]["content"] for one in read(pair, "Be brief.").sequences} == {"Be brief."}
    rewards = str(write("r.py", "def reward(completions):\n    return [1.0]"))
    sampling = recipe_of("grpo", system_prompt="Be brief.", max_completion_length=9, reward_funcs=(rewards,))
    sampling.chat = True
    assert "Be brief." in recipe.tokenizer.decode(sampling.process({"prompt": said("a")}).ids)
    sampling.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(InputError, match="leaves out tools: find, so the model would not see it"):
        sampling.process({"prompt": said("a"), "tools": [{"type": "function", "function": {"name": "find"}}]})
    with pytest.raises(InputError, match="system_prompt: it is for chats"):
        recipe.process({"text": "a"})
