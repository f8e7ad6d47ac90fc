"""Training data: rows, encoded by a recipe and made into batches, in an order that a seed gives.

An epoch is a permutation of the rows, drawn from (seed, epoch). It is cut into windows; the rows of a window are
encoded, and their examples packed into batches. So the state of the data is three integers: epoch, the place in the
permutation where the window begins, and the batches of it that were taken. Resuming encodes the window again. All ranks
encode all rows, and each takes its own batches: none needs to ask another how many there are.
"""

import collections
import contextlib
import dataclasses
import hashlib
import itertools
import os
import random
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from ligermodels.checkpoint import files
from ligermodels.errors import InputError, LigermodelsError, TokenizerError
from ligermodels.recipes.formats import format_of, mixed
from ligermodels.recipes.masking import IGNORED
from ligermodels.recipes.packing import Batch, best_fit
from ligermodels.recipes.rows import Joined, Rows, open_rows
from ligermodels.recipes.workers import Workers
from ligermodels.text.chat import TemplateError

_WINDOW, _WINDOW_OF_IMAGES = 1000, 64
"""Rows that are encoded and packed at a time: an image of a million pixels takes 24 MB."""
_CHUNK = 50
"""Rows that a worker process encodes at a time."""
_NAMED = 3
"""Rows that a warning or an error names."""
_ENOUGH = 100
"""Rows after which it is an error if none of them trains a stop token."""
_REASONS = ("untrained", "cut_away", "truncated")
_T = TypeVar("_T")


class BadRowError(InputError):
    """A row that cannot be read or encoded, which --skip-bad leaves out."""


class Outcome(NamedTuple):
    """What a row gives: its examples, several for a long text that is split, and what is counted."""

    examples: list[Any]
    counts: Mapping[str, int]


class Size(NamedTuple):
    """In place of an example whose tokens nobody needs."""

    size: int


@dataclasses.dataclass(frozen=True)
class Encoder:
    """Encodes the rows of one data set, by their indices. It is sent to worker processes.

    process: makes an example of a row. format: of all rows, as `formats.detect` finds it; None for any. split: a long
    text becomes several examples; else the example is cut. sizes_only: of each example, only its size.
    """

    rows: Rows
    process: Callable[[Mapping[str, Any]], Any]
    length: int
    format: tuple[str, str] | None = None
    split: bool = False
    skip_bad: bool = False
    sizes_only: bool = False

    def __call__(self, index: int) -> Outcome:
        """Raises BadRowError, which names the row."""
        try:
            row = self.rows[index]
            if self.format is not None and (name := format_of(row)) != self.format[0]:
                raise InputError(mixed(name, self.format))
            example = self.process(row)
            cut = example.cut(self.length)
        except (InputError, TokenizerError) as error:
            if self.skip_bad:
                return Outcome([], {"rows": 1, "bad": 1})
            text = f"{self.rows.where(index)}: {error}".removesuffix(".") + "."
            advice = " (--skip-bad leaves such rows out)" * (not isinstance(error, TemplateError))
            raise BadRowError(text + advice) from error
        if not example.trained:
            return Outcome([], {"rows": 1, "untrained": 1})
        counts = {"rows": 1}
        found = self._split(example) if self.split else [cut]
        if not self.split and example.size > cut.size:
            counts |= {"truncated": 1, "tokens_cut": example.size - cut.size}
        if not (found := [part for part in found if part.trained]):
            return Outcome([], counts | {"cut_away": 1})
        if example.ends is not None:
            ends = bool(example.ends if self.split else cut.ends)
            counts |= {"asked": 1, "ends": int(ends), "ends_cut": int(example.ends and not ends)}
        counts |= {"tokens": sum(one.size for one in found), "trained": sum(one.trained for one in found)}
        return Outcome([Size(one.size) for one in found] if self.sizes_only else found, counts)

    def _split(self, example: Any) -> list[Any]:
        """A long text in parts of at most `length` tokens; images, which are never cut, belong to the first."""
        starts = range(0, example.size, self.length)
        parts = [(example.ids[n : n + self.length], example.labels[n : n + self.length]) for n in starts]
        return [
            dataclasses.replace(example, ids=ids, labels=[IGNORED, *labels[1:]], images=None if n else example.images)
            for n, (ids, labels) in enumerate(parts)
        ]

    def encode_many(self, indices: Sequence[int]) -> list[Outcome | LigermodelsError]:
        """The outcomes of rows; an error in place of a row that raises it."""
        found: list[Outcome | LigermodelsError] = []
        for index in indices:
            try:
                found.append(self(index))
            except LigermodelsError as error:
                found.append(error)
        return found


@dataclasses.dataclass(frozen=True)
class Window:
    """The batches of some rows, each a list of examples, and where the next window begins.

    named: by reason, the first rows that were cut or left out, with their tokens.
    """

    epoch: int
    row: int
    next_row: int
    batches: list[list[Any]]
    counts: Mapping[str, int]
    named: Mapping[str, list[tuple[int, int]]]


class Batches(Iterator[Batch]):
    """Batches of CPU tensors, the arguments of a model's forward, which continue exactly after `load_state_dict`.

    collate: makes a batch of examples. capacity: tokens of a packed batch; or rows of a batch, without packing.
    sequences: per example, each of up to encoder.length tokens. epochs: after these the iteration ends. shuffle: False
    for the order of the rows. digest: of the files; a state with another one does not load. workers: processes that
    encode rows, started at the first batch. max_untrained: the share of rows without a trained token above which
    InputError is raised. inspect: called once with the batches of the first window, to warn of what is odd in them.
    """

    def __init__(
        self, encoder: Encoder, collate: Callable[[Sequence[Any]], Batch], *, capacity: int, packing: bool = True,
        sequences: int = 1, seed: int = 0, epochs: int | None = None, shuffle: bool = True, window: int = _WINDOW,
        workers: int = 0, digest: int = 0, max_untrained: float = 0.1,
        inspect: Callable[[Sequence[Sequence[Any]]], None] | None = None,
    ) -> None:  # fmt: skip
        self.encoder, self.collate, self.capacity, self.packing = encoder, collate, capacity, packing
        self.sequences, self.seed, self.epochs, self.shuffle = sequences, seed, epochs, shuffle
        self.window, self.workers, self.digest, self.inspect = window, workers, digest, inspect
        self.max_untrained = max_untrained
        self._counts: collections.Counter[str] = collections.Counter()
        self._named: dict[str, list[tuple[str, int]]] = {}
        self._warned: set[str] = set()
        self._rows_without_batch = 0
        self._start(0, 0)

    def _start(self, epoch: int, row: int) -> None:
        self._windows = _Prefetch[Window](self._make_windows(epoch, row))
        self._window = Window(epoch, row, row, [], {}, {})
        self._batch = 0  # of the window, that comes next

    def __next__(self) -> Batch:
        while self._batch == len(self._window.batches):
            self._next_window()
        self._batch += 1
        return self.collate(self._window.batches[self._batch - 1])

    def _next_window(self) -> None:
        window = next(self._windows, None)
        if window is None:
            raise StopIteration
        self._window, self._batch = window, 0
        self._count(window)
        if int(os.environ.get("RANK", "0")) == 0:
            self._warn()

    def close(self) -> None:
        """Ends the worker processes."""
        self._windows.close()

    # ---- state ----

    def state_dict(self) -> dict[str, int]:
        """The position after the batch that was taken last, and the settings for which it means the same."""
        return {"epoch": self._window.epoch, "row": self._window.row, "batch": self._batch, **self._settings()}

    def _settings(self) -> dict[str, int]:
        return {
            "rows": len(self.encoder.rows),
            "seed": self.seed,
            "length": self.encoder.length,
            "batch_size": self.capacity,
            "packing": int(self.packing),
            "window": self.window,
            "digest": self.digest,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continues after the batch after which `state_dict` was called. Raises InputError if a setting differs."""
        own = self._settings()
        if missing := sorted({"epoch", "row", "batch", *own} - state.keys()):
            raise InputError(f"this is not a state of the data: it lacks {missing}")
        if differ := [name for name in own if own[name] != state[name]]:
            changes = [f"{name} was {state[name]}, now it is {own[name]}" for name in differ if name != "digest"]
            raise InputError(
                f"the data cannot continue after the checkpoint: {', '.join(changes) or 'its files have changed'}. "
                "Next step: restore what was before (rows that cannot be read are left out with --skip-bad), or start "
                "a new run with another --output-dir"
            )
        if not 0 <= state["row"] < len(self.encoder.rows) or state["batch"] < 0 or state["epoch"] < 0:
            raise InputError(f"this is not a position in {len(self.encoder.rows)} rows: {dict(state)}")
        self.close()
        self._counts.clear()
        self._named.clear()
        self._rows_without_batch = 0
        self._start(int(state["epoch"]), int(state["row"]))
        if state["batch"]:
            self._next_window()
            if state["batch"] > len(self._window.batches):
                raise InputError("the rows have changed since the checkpoint: there are fewer batches of them")
            self._batch = int(state["batch"])

    # ---- windows ----

    def _make_windows(self, epoch: int, row: int) -> Iterator[Window]:
        """The windows from a row of an epoch on. Runs in a thread."""
        encoder = self.encoder
        indices = self._indices(epoch, row)
        outcomes = iter(_in_processes(encoder, indices, self.workers) if self.workers else map(encoder, indices))
        needed, pending = 1 if self.packing else self.capacity, collections.deque[Outcome]()
        while self.epochs is None or epoch < self.epochs:
            found: list[Outcome] = []
            number, left = 0, len(encoder.rows) - row
            while len(found) < left and (len(found) < self.window or number < needed):
                found.append(pending.popleft() if pending else next(outcomes))
                number += len(found[-1].examples)
            examples = [example for outcome in found for example in outcome.examples]
            if self.packing:
                bins = best_fit([example.size for example in examples], self.capacity)
                if self.shuffle:
                    bins = [bins[n] for n in self._random(epoch, row + 1).permutation(len(bins))]
            else:
                bins = [[*range(n, min(n + needed, number))] for n in range(0, number, needed)]
                if len(found) < left and number % needed:  # the next window begins with the examples of the last bin
                    places = [n for n, outcome in enumerate(found) if outcome.examples]
                    first = places[bins.pop()[0]]
                    pending.extendleft(reversed(found[first:]))
                    found = found[:first]
            yield self._window_of(epoch, row, found, [[examples[n] for n in bin] for bin in bins])
            row += len(found)
            if row == len(encoder.rows):
                epoch, row = epoch + 1, 0

    def _window_of(self, epoch: int, row: int, found: list[Outcome], batches: list[list[Any]]) -> Window:
        counts: collections.Counter[str] = collections.Counter()
        named: dict[str, list[tuple[int, int]]] = {}
        order = self._order(epoch) if any(set(_REASONS) & outcome.counts.keys() for outcome in found) else []
        for n, (_, count) in enumerate(found):
            counts.update(count)
            reason = next((reason for reason in _REASONS if reason in count), None)
            if reason and counts[reason] <= _NAMED:
                tokens = count.get("tokens", 0) + count.get("tokens_cut", 0)
                named.setdefault(reason, []).append((int(order[row + n]), tokens))
        return Window(epoch, row, row + len(found), batches, counts, named)

    def _indices(self, epoch: int, row: int) -> Iterator[int]:
        """The rows from a place of an epoch on."""
        for number in itertools.count(epoch):
            if self.epochs is not None and number >= self.epochs:
                return
            yield from map(int, self._order(number)[row if number == epoch else 0 :])

    def _order(self, epoch: int) -> Any:
        rows = len(self.encoder.rows)
        return self._random(epoch, 0).permutation(rows) if self.shuffle else np.arange(rows)

    def _random(self, epoch: int, part: int) -> np.random.RandomState:
        """RandomState, because its streams never change with numpy's version: a run may be resumed after an update."""
        return np.random.RandomState([self.seed % 2**32, epoch, part])

    # ---- counts, warnings and errors ----

    def report(self) -> dict[str, int]:
        """Counts of the windows since this object was made or resumed.

        rows; tokens and trained (those with a label) of what goes into batches; truncated: rows that are cut, and
        tokens_cut; untrained: rows left out because no token of them is trained, cut_away: because truncation left
        none; bad: rows that --skip-bad left out.
        """
        names = ("rows", "tokens", "trained", "truncated", "tokens_cut", "untrained", "cut_away", "bad")
        return {name: self._counts[name] for name in names}

    def count(self) -> dict[str, int]:
        """The `report` of a pass over the data, and the number of its "batches", none of which is made."""
        number, encoder = 0, self.encoder
        self.encoder = dataclasses.replace(encoder, sizes_only=True)
        windows = _Prefetch[Window](self._make_windows(0, 0))
        try:
            for window in windows:
                if window.epoch:
                    break
                self._count(window)
                number += len(window.batches)
        finally:
            windows.close()
        self.encoder = encoder
        return {"batches": number, **self.report()}

    def _count(self, window: Window) -> None:
        """Adds the counts of a window. Raises InputError if too few rows are trained, or no stop token."""
        counts, length, rows = self._counts, self.encoder.length, self.encoder.rows
        counts.update(window.counts)
        for reason, found in window.named.items():
            names = self._named.setdefault(reason, [])
            names += [(rows.where(index), tokens) for index, tokens in found[: _NAMED - len(names)]]
        left_out = counts["untrained"] + counts["cut_away"]
        if left_out > self.max_untrained * (counts["rows"] - counts["bad"]):
            raise InputError(
                f"{left_out} of {counts['rows']} rows have no token to train: in {counts['untrained']} there is none, "
                f"in {counts['cut_away']} none before --max-length {length}, where they are cut.{self._left_out()}\n"
                "  Next: --dry-run --show 3 shows what is trained; raise --max-length, or mend the rows"
            )
        if counts["asked"] and not counts["ends"] and counts["rows"] >= min(_ENOUGH, len(rows)):
            if counts["ends_cut"]:
                raise InputError(
                    f"none of {counts['asked']} rows trains a token that stops the model, which would never stop: "
                    f"{counts['ends_cut']} have one, and are cut before it at --max-length {length}. Next step: raise "
                    f"--max-length. {self._cut_rows()}".removesuffix(". ")
                )
            raise InputError(
                f"none of {counts['asked']} rows trains a token that stops the model, which would never stop. Likely "
                "cause: the chat template's {% generation %} ends before the end of the turn, or the template ends "
                "turns with a token that is none of the model's eos tokens. Next step: --chat-template FILE, one "
                "that has it"
            )
        self._rows_without_batch = 0 if window.batches else self._rows_without_batch + window.next_row - window.row
        if self._rows_without_batch >= len(rows):
            raise InputError(
                f"none of the {len(rows)} rows can be trained: {counts['bad']} cannot be read, {left_out} have no "
                "token to train. Next step: without --skip-bad the first of them is named"
            )

    def _left_out(self) -> str:
        """The first rows that are left out, and why; "" without any."""
        why = {
            "untrained": "nothing in it is to be trained (no answer, an empty one, or train false)",
            "cut_away": f"nothing before --max-length {self.encoder.length}, where it is cut, is to be trained",
        }
        return "".join(f"\n  {row}: {why[reason]}" for reason in why for row, _ in self._named.get(reason, ()))

    def _cut_rows(self) -> str:
        """The first rows that are cut, with their tokens; "" without any."""
        each = f" in {self.sequences} sequences" * (self.sequences > 1)
        return ", ".join(f"{row} has {tokens:,} tokens{each}" for row, tokens in self._named.get("truncated", ()))

    def _warn(self) -> None:
        """Warns once of rows that are cut, once of rows that are left out, and calls `inspect`."""
        found = {}
        if rows := self._cut_rows():
            found["cut"] = (
                f"rows are cut at --max-length {self.encoder.length}, such as: {rows}. What comes after is not "
                "trained, nor the token that ends the answer. To train them whole, raise --max-length"
            )
        if rows := self._left_out():
            found["left out"] = f"rows are left out, since no token of them is trained, such as{rows}"
        for reason in found.keys() - self._warned:
            warnings.warn(found[reason], stacklevel=4)
        self._warned |= found.keys()
        if self.inspect is not None:
            self.inspect(self._window.batches)
            self.inspect = None


class _Prefetch(Iterator[_T]):
    """The items of a generator, the next of which is made in a thread meanwhile."""

    def __init__(self, items: Any) -> None:
        self._items = items
        self._next: Any = None
        self._executor = ThreadPoolExecutor(1, "encode")

    def __next__(self) -> _T:
        future: Any = self._next or self._executor.submit(next, self._items, None)
        self._next = None
        if (item := future.result()) is None:
            raise StopIteration
        self._next = self._executor.submit(next, self._items, None)
        return item  # type: ignore[no-any-return]

    def close(self) -> None:
        """Ends the thread, and the processes that the generator uses."""
        self._executor.shutdown()
        self._items.close()


# ---- worker processes ----


def workers_for(rows: int, most: int) -> int:
    """The number of processes that encode rows, one per core; 0 where starting them takes longer than the rows."""
    if rows < 2000:  # one process encodes as many in a second
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores //= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(most, cores) if cores > 1 else 0


def encoding_workers(rows: int) -> int:
    """The processes that encode rows during a run: none on a CPU, whose steps need the cores."""
    return workers_for(rows, 4) if torch.cuda.is_available() else 0


def _in_processes(encoder: Encoder, indices: Iterator[int], workers: int) -> Iterator[Outcome]:
    """The outcomes of rows, in their order, encoded ahead in processes. Raises the error of the first row with one."""
    chunks = iter(lambda: list(itertools.islice(indices, _CHUNK)), [])
    recipe = getattr(encoder.process, "__self__", encoder.process)
    modules = (getattr(recipe, "__module__", __name__), "tokenizers")
    with contextlib.closing(Workers(encoder.encode_many, chunks, workers, modules)) as found:
        for outcome in itertools.chain.from_iterable(found):
            if isinstance(outcome, LigermodelsError):
                raise outcome
            yield outcome


# ---- a run's data ----


class Data:
    """The training and evaluation data of a run.

    recipe: checks the rows, encodes and collates them (`base.Recipe`). train: the batches, without end.
    """

    def __init__(self, options: Any, recipe: Any) -> None:
        self.options, self.recipe = options, recipe
        rows, evaluation = mixed_rows(options.data, options.seed), None
        if options.max_samples is not None:
            rows = Joined([rows], range(min(options.max_samples, len(rows))))
        if options.eval_data is not None:
            evaluation = open_rows(options.eval_data)
        elif options.eval_share:
            rows, evaluation = held_out(rows, options.eval_share, options.seed)
        self.rows, self.eval_rows = rows, evaluation
        self.digest = digest([*rows.files, *(() if evaluation is None else evaluation.files)])
        self.format = recipe.check_rows(rows)
        self.eval_format = None if evaluation is None else recipe.check_rows(evaluation, is_evaluation=True)
        self.train = self._batches(workers=encoding_workers(len(rows)))

    def _batches(self, *, evaluates: bool = False, **more: Any) -> Batches:
        o, recipe = self.options, self.recipe
        rows: Any
        rows, format = (self.eval_rows, self.eval_format) if evaluates else (self.rows, self.format)
        packing, capacity = recipe.batch_size(evaluates)
        if not evaluates:
            more |= dict(inspect=recipe.inspect)
        config = recipe.tokenizer.files.folder / "config.json"
        if config.is_file() and "vision_config" in files.read_json(config):
            more |= dict(window=_WINDOW_OF_IMAGES, workers=0)
        split = recipe.splits and o.packing
        process = recipe.process_evaluation if evaluates else recipe.process
        encoder = Encoder(rows, process, o.max_length, format, split, o.skip_bad)
        return Batches(
            encoder, recipe.collate_evaluation if evaluates else recipe.collate, capacity=capacity, packing=packing,
            sequences=recipe.options.sequences, seed=o.seed, digest=self.digest, **more,
        )  # fmt: skip

    def count(self) -> dict[str, int]:
        """The counts of a pass over the training data, as `Batches.count`."""
        return self._batches(epochs=1, workers=workers_for(len(self.rows), 16)).count()

    def evaluation(self) -> list[Batch]:
        """The batches of one pass over the evaluation data."""
        if self.eval_rows is None:
            return []
        return list(self._batches(evaluates=True, epochs=1, shuffle=False))

    def once(self) -> Iterator[Batch]:
        """The batches of one pass over all rows, in their order."""
        return itertools.chain(self._batches(epochs=1, shuffle=False), self.evaluation())

    def examples(self, number: int, *, colour: bool) -> Iterator[str]:
        """The text of the first rows, with trained tokens marked."""
        for index in range(min(number, len(self.rows))):
            try:
                text = "\n" + self.recipe.show(self.recipe.process(self.rows[index]), colour)
            except LigermodelsError as error:
                text = f" {error}"
            yield f"{self.rows.where(index)}:{text}"


def mixed_rows(sources: Sequence[str], seed: int) -> Rows:
    """The rows of several sources. A weight after a source, FILE*1.5, takes all rows once, and half of them again."""
    parts, indices, start = [], list[int](), 0
    for number, source in enumerate(sources):
        found = re.fullmatch(r"(.+)\*(\d+\.?\d*|\.\d+)", source)
        name, weight = (found[1], float(found[2])) if found else (source, 1.0)
        rows = open_rows(name)
        whole, rest = divmod(round(weight * len(rows)), len(rows))
        if not whole and not rest:
            raise InputError(f"data={source}: a weight of {weight:g} leaves none of its {len(rows)} rows")
        again = random.Random(f"{seed} {number}").sample(range(len(rows)), rest)
        indices += [start + n for n in [*range(len(rows))] * whole + sorted(again)]
        parts.append(rows)
        start += len(rows)
    return parts[0] if len(parts) == 1 and len(indices) == start else Joined(parts, indices)


def digest(paths: Sequence[Path]) -> int:
    """A digest of the contents of files; 0 without any."""
    found = hashlib.blake2b(digest_size=7)
    for number, path in enumerate(dict.fromkeys(paths)):
        with path.open("rb") as file:
            found.update(b"%d" % number + hashlib.file_digest(file, "blake2b").digest())
    return int.from_bytes(found.digest()) if paths else 0


def held_out(rows: Rows, share: float, seed: int) -> tuple[Rows, Rows]:
    """Rows to train on, and a share of them to evaluate on, drawn by the seed. Raises InputError."""
    number = round(share * len(rows))
    if not 0 < number < len(rows):
        raise InputError(f"eval_share={share:g} of {len(rows)} rows leaves none to evaluate on, or none to train on")
    chosen = set(random.Random(seed).sample(range(len(rows)), number))
    rest = [index for index in range(len(rows)) if index not in chosen]
    return Joined([rows], rest), Joined([rows], sorted(chosen))
