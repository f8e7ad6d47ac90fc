"""Training data: rows, processed by a recipe and made into batches, in an order that a seed gives.

An epoch is a permutation of the rows, drawn from (seed, epoch). It is cut into windows; the rows of a window are
processed, and their examples packed into batches. So the position in the data is three integers: epoch, the place in
the permutation where the window begins, and the batches of it that were taken. Resuming processes the window again; the
counts of the rows before it are in the state too. All ranks process all rows, and each takes its own batches: none
needs to ask another how many there are.
"""

import collections
import contextlib
import hashlib
import itertools
import os
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ligermodels.checkpoint.files import takes_images
from ligermodels.errors import InputError, TokenizerError
from ligermodels.recipes.data.examples import best_fit
from ligermodels.recipes.data.formats import format_of, label_of
from ligermodels.recipes.data.rows import JoinedRows, Rows, held_out, open_rows, open_sources
from ligermodels.recipes.data.workers import map_ahead
from ligermodels.text.chat import TemplateError

WINDOW, WINDOW_OF_IMAGES = 1000, 64
"""Rows that are processed and packed at a time: an image of a million pixels takes 24 MB."""
CHUNKS = 20
"""Parts of a window, each of which a worker process gets at a time."""
MAX_UNTRAINED = 0.1
"""The share of rows without a trained token above which the data is refused."""
WARNINGS = {
    "cut": "rows are cut at --max-length {length}, or dropped",
    "bad": "rows that cannot be read are left out (--skip-bad)",
    "empty": "{number} of {rows} rows have an empty answer, which teaches the model to say nothing",
    "joined": "{number} of {rows} rows have a prompt that is split into other tokens before an answer than alone, as "
    "the model gets it (does the prompt, or the chat template, end with a space?)",
}
"""What a run warns of, once each, with the first rows that it is true of."""
_SHOWN = 3
"""Rows that a warning or an error shows."""
_ROWS_TO_STOP = 100
"""Rows after which it is an error if none of them trains a stop token."""


class BadRowError(InputError):
    """A row that cannot be read or processed, which --skip-bad leaves out."""


# ---- rows ----


class Outcome(NamedTuple):
    """What a row gives: examples (several of a long text that is split), counts by name, notes for `WARNINGS`."""

    examples: list[Any]
    counts: Mapping[str, int]
    notes: Mapping[str, str]


@dataclass(frozen=True)
class Outcomes:
    """Turns rows, given by their indices, into examples and counts. It is sent to worker processes.

    process: turns a row into an example. format: of all rows, as `formats.detect` finds it; None for any. split: a
    text that is longer than `length` becomes several examples; else it is cut.
    """

    rows: Rows
    process: Callable[[Mapping[str, Any]], Any]
    length: int
    format: tuple[str, str] | None = None
    split: bool = False
    skip_bad: bool = False

    def __call__(self, indices: Sequence[int]) -> list[Outcome]:
        """Raises BadRowError, which names the row."""
        return [self._outcome(index) for index in indices]

    def parts(self, index: int) -> tuple[Any, list[Any]]:
        """The example of a row, and what fits into `length`: its first tokens, or several. Raises BadRowError."""
        try:
            row = self.rows[index]
            if self.format is not None and (name := format_of(row)) != self.format[0]:
                raise InputError(
                    f"the row is in the format {name!r}, but {self.format[1]} is in {self.format[0]!r}; train on rows "
                    "of one format"
                )
            example = self.process(row)
            return example, example.split(self.length) if self.split else [example.cut(self.length)]
        except (InputError, TokenizerError) as error:
            advice = "" if self.skip_bad or isinstance(error, TemplateError) else " (--skip-bad drops such rows)"
            raise BadRowError(f"{self.rows.where(index)}: {error}".removesuffix(".") + f".{advice}") from error

    def _outcome(self, index: int) -> Outcome:
        try:
            example, parts = self.parts(index)
        except BadRowError as error:
            if self.skip_bad:
                return Outcome([], {"rows": 1, "bad": 1}, {"bad": str(error)})
            raise
        kept = [part for part in parts if part.trained]
        counts, note = {"rows": 1, "tokens": sum(part.size for part in kept)}, ""
        counts["trained"] = sum(part.trained for part in kept)
        if not example.trained:
            counts["untrained"] = 1
            note = f"dropped: it has no trained tokens ({_why_untrained(self.rows[index])})"
        elif not kept:
            counts["cut_away"] = 1
            note = f"dropped: it has {example.size:,} tokens, and --max-length {self.length} cuts it before the answer"
        elif tokens_cut := example.size - sum(part.size for part in parts):
            counts |= {"truncated": 1, "tokens_cut": tokens_cut}
            note = f"cut, it has {example.size:,} tokens"
        if kept and example.ends is not None:
            counts |= {"with_end": 1, "ends": int(any(part.ends for part in kept))}
        notes = {"cut": note} if note else getattr(example, "doubts", {})
        return Outcome(kept, counts, {name: f"{self.rows.where(index)}: {text}" for name, text in notes.items()})


def _why_untrained(row: Mapping[str, Any]) -> str:
    messages = row.get("messages")
    roles = {str(message["role"]) for message in messages if "role" in message} if isinstance(messages, list) else set()
    if roles and "assistant" not in roles:
        return f"no message has the role assistant; the roles are {', '.join(sorted(roles))}"
    return "no answer, an empty answer, or train false"


class Counts:
    """What became of the rows: numbers by name, and notes of the first rows that are cut or dropped.

    A row counts in each epoch, from when the window that it is in is read.
    rows. tokens, trained: all tokens, and those with a label, that go into batches. truncated: rows that are cut;
    tokens_cut: the tokens cut off. untrained: rows dropped without trained tokens; cut_away: rows dropped since they
    are truncated before the answer. bad: rows that --skip-bad dropped. with_end: rows that should train a token that
    stops the model; ends: those that do. With skip_bad, rows without trained tokens may be many. warns: whether this
    process shows warnings.
    """

    def __init__(self, rows: int, length: int, skip_bad: bool, warns: bool) -> None:
        self.total, self.length, self.skip_bad, self.warns = rows, length, skip_bad, warns
        self.warned: dict[str, str] = {}  # by name, the rows that were shown
        self.numbers = collections.Counter[str]()

    def add(self, outcomes: Sequence[Outcome]) -> None:
        """Warns of the first rows of each kind. Raises InputError if too few rows train, or none a stop token."""
        n = self.numbers
        for outcome in outcomes:
            n.update(outcome.counts)
        good, dropped = n["rows"] - n["bad"], n["untrained"] + n["cut_away"]
        is_too_little = dropped > MAX_UNTRAINED * good
        if self.skip_bad:
            is_too_little = n["rows"] >= self.total and dropped == good > 0
        never_stops = n["with_end"] and not n["ends"] and n["rows"] >= min(_ROWS_TO_STOP, self.total)
        for name, text in WARNINGS.items():
            notes = [outcome.notes[name] for outcome in outcomes if name in outcome.notes]
            if notes and name not in self.warned:
                text = text.format(length=self.length, number=len(notes), rows=len(outcomes))
                self.warned[name] = lines = "".join(f"\n  {note}" for note in notes[:_SHOWN])
                if self.warns and not (name == "cut" and (is_too_little or never_stops)):  # the error has the lines
                    warnings.warn(f"{text}:{lines}", stacklevel=2)
        lines = self.warned.get("cut", "")
        if is_too_little:
            cut, longer, skip = "", "", "" if self.skip_bad else "; --skip-bad trains on the others"
            if n["cut_away"]:
                cut = f", of which --max-length {self.length} truncates {n['cut_away']} before the answer"
                longer = "raise --max-length, or "
            raise InputError(
                f"{dropped} of {n['rows']} rows have no trained tokens{cut}.{lines}\n  Next: {longer}correct the "
                f"rows{skip}; --dry-run --show 3 shows what is trained"
            )
        if n["rows"] == n["bad"] >= self.total:
            raise InputError(f"none of the {self.total} rows can be read; without --skip-bad the error names the first")
        if never_stops:
            raise InputError(
                f"none of {n['with_end']} rows trains a token that stops the model, so it would never stop: rows are "
                "cut before it, or the chat template ends turns without a trained token that is one of the model's eos "
                f"tokens.{lines}\n  Next: raise --max-length, or give --chat-template FILE"
            )


# ---- batches ----


class Batches(Iterator[list[Any]]):
    """Batches, each a list of examples, which continue exactly after `load_state_dict`.

    recipe: processes rows. format: that of all rows, or None. epochs: the iteration ends after these. shuffle: False
    for the order of the rows. window: rows that are packed together. workers: processes that process rows; 0: a thread.
    digest: of the files; a state with another one does not load.
    """

    def __init__(
        self, recipe: Any, rows: Rows, format: tuple[str, str] | None = None, *, epochs: int | None = None,
        shuffle: bool = True, window: int = WINDOW, workers: int = 0, digest: int = 0,
    ) -> None:  # fmt: skip
        o, self.rows, self.epochs, self.shuffle, self.workers = recipe.options, rows, epochs, shuffle, workers
        self.outcomes = Outcomes(rows, recipe.process, o.max_length, format, recipe.splits, o.skip_bad)
        self.capacity, self.seed, self.window, self._digest = recipe.capacity, o.seed, window, digest
        self._warns = recipe.processes.is_main
        self._start(0, 0, {})

    def _start(self, epoch: int, row: int, counts: Mapping[str, int]) -> None:
        """Begins with the window at a row of an epoch. counts: the numbers of the rows before it."""
        self.counts = Counts(len(self.rows), self.outcomes.length, self.outcomes.skip_bad, self._warns)
        self.counts.numbers.update(counts)
        self._counts_before = dict(counts)
        self._epoch, self._row, self._batch = epoch, row, 0  # where the window begins; its batch that comes next
        self._window: list[list[Any]] = []  # the batches of the window
        self._windows = self._make_windows(epoch, row)

    def __next__(self) -> list[Any]:
        while self._batch == len(self._window):
            self._next_window()
        self._batch += 1
        return self._window[self._batch - 1]

    def _next_window(self) -> None:
        before = dict(self.counts.numbers)
        (self._epoch, self._row, self._window), self._batch = next(self._windows), 0
        self._counts_before = before

    def close(self) -> None:
        """Ends the thread or the worker processes."""
        self._windows.close()

    def state_dict(self) -> dict[str, Any]:
        """The position after the batch that was taken last, the rows for which it means the same, and their counts."""
        position = {"epoch": self._epoch, "row": self._row, "batch": self._batch}
        return position | {"rows": len(self.rows), "digest": self._digest, "counts": self._counts_before}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues after the batch after which `state_dict` was called. Raises InputError if the rows differ."""
        if (state["rows"], state["digest"]) != (len(self.rows), self._digest):
            raise InputError(
                f"the data cannot continue after the checkpoint: its files have changed ({state['rows']} rows were "
                f"there, now {len(self.rows)}). Next step: restore what was before (rows that cannot be read are left "
                "out with --skip-bad), or start a new run with another --output-dir"
            )
        self.close()
        self._start(state["epoch"], state["row"], state["counts"])
        if state["batch"]:
            self._next_window()
            if state["batch"] > len(self._window):
                raise InputError("the rows have changed since the checkpoint: there are fewer batches of them")
            self._batch = state["batch"]

    def count(self) -> Mapping[str, int]:
        """The counts of a pass over the data, and the number of its "batches"."""
        batches = sum(len(window) for _, _, window in self._windows)
        return collections.Counter(batches=batches, **self.counts.numbers)

    def _make_windows(self, epoch: int, row: int) -> Generator[tuple[int, int, list[list[Any]]]]:
        """The windows from a row of an epoch on: the epoch and the row where each begins, and its batches."""
        indices = self._indices(epoch, row)
        chunks = iter(lambda: list(itertools.islice(indices, -(-self.window // CHUNKS))), [])
        with contextlib.closing(map_ahead(self.outcomes, chunks, CHUNKS, self.workers)) as results:
            outcomes = itertools.chain.from_iterable(results)
            while self.epochs is None or epoch < self.epochs:
                window = list(itertools.islice(outcomes, min(self.window, len(self.rows) - row)))
                self.counts.add(window)
                examples = [example for outcome in window for example in outcome.examples]
                yield epoch, row, self._batches_of(examples, epoch, row)
                row += len(window)
                if row == len(self.rows):
                    epoch, row = epoch + 1, 0

    def _batches_of(self, examples: Sequence[Any], epoch: int, row: int) -> list[list[Any]]:
        """The batches of the examples of a window."""
        bins = best_fit([example.space for example in examples], self.capacity)
        if self.shuffle:
            bins = [bins[n] for n in self._random(epoch, row + 1).permutation(len(bins))]
        return [[examples[n] for n in bin] for bin in bins]

    def _indices(self, epoch: int, row: int) -> Iterator[int]:
        """The rows from a place of an epoch on."""
        for number in itertools.count(epoch):
            if self.epochs is not None and number >= self.epochs:
                return
            order = self._random(number, 0).permutation(len(self.rows)) if self.shuffle else range(len(self.rows))
            yield from map(int, order[row if number == epoch else 0 :])

    def _random(self, epoch: int, part: int) -> np.random.RandomState:
        """RandomState, because its streams never change with numpy's version: a run may be resumed after an update."""
        return np.random.RandomState([self.seed % 2**32, epoch, part])


def encoding_workers(rows: int, counts: bool = False) -> int:
    """The number of processes that process rows, for a run or to count; 0 where starting them takes longer.

    None during a run on a CPU, whose steps need the cores.
    """
    if rows < 2000 or not (counts or torch.cuda.is_available()):  # one process encodes 2000 in a second
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores //= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(16 if counts else 4, cores) if cores > 1 else 0


# ---- the data of a run ----


class Data:
    """The training and evaluation data of a run. train: the batches, without end."""

    eval_rows: Rows | None = None
    eval_format: tuple[str, str] | None = None

    def __init__(self, options: Any, recipe: Any) -> None:
        self.options, self.recipe = options, recipe
        objects = options.objects
        self.rows = objects.get("data") or open_sources(options.data, options.seed)
        if options.max_samples is not None:
            number, total = min(options.max_samples, len(self.rows)), len(self.rows)
            step = total / number if len(options.data) > 1 else 1.0  # of several sets, each its share
            self.rows = JoinedRows([self.rows], [int(n * step) for n in range(number)])
        if options.eval_data is not None:
            self.eval_rows = objects.get("eval_data") or open_rows(options.eval_data)
        elif options.eval_share:
            self.rows, self.eval_rows = held_out(self.rows, options.eval_share, options.seed)
        self.format = recipe.check_rows(self.rows)
        if self.format is not None and self.format[0] == "unpaired" and recipe.processes.is_main:
            _check_labels(self.rows)
        if self.eval_rows is not None:
            self.eval_format = recipe.evaluation.check_rows(self.eval_rows)
        self._takes_images = takes_images(recipe.tokenizer.files.folder)
        paths = [*self.rows.files, *(() if self.eval_rows is None else self.eval_rows.files)]
        in_memory = [objects[name] for name in ("data", "eval_data") if name in objects]
        self.train = self.batches(workers=encoding_workers(len(self.rows)), digest=digest(paths, in_memory))

    def batches(self, *, workers: int = 0, **how: Any) -> Batches:
        """Batches of the training data. how: arguments of `Batches`."""
        if self._takes_images:
            workers, how["window"] = 0, WINDOW_OF_IMAGES
        return Batches(self.recipe, self.rows, self.format, workers=workers, **how)

    def count(self) -> Mapping[str, int]:
        """The counts of a pass over the training data, as `Batches.count`."""
        return self.batches(epochs=1, workers=encoding_workers(len(self.rows), counts=True)).count()

    def evaluation(self) -> list[list[Any]]:
        """The batches of one pass over the evaluation data, each a list of examples."""
        if self.eval_rows is None:
            return []
        return list(Batches(self.recipe.evaluation, self.eval_rows, self.eval_format, epochs=1, shuffle=False))

    def examples(self, number: int) -> Iterator[str]:
        """The text of the first rows as they are trained, with trained tokens marked.

        Raises BadRowError without --skip-bad.
        """
        for index in range(min(number, len(self.rows))):
            try:
                example, parts = self.train.outcomes.parts(index)
            except BadRowError:
                if not self.options.skip_bad:
                    raise
                yield f"{self.rows.where(index)}: left out, it cannot be read"  # a warning of the run says why
                continue
            shown = parts[0] if parts else example
            more = f"; the first of {len(parts)} examples" * (len(parts) > 1)
            if not more and shown.size < example.size:
                more = f"; cut, the row has {example.size:,} tokens"
            yield f"{self.rows.where(index)}{more}:\n{self.recipe.show(shown)}"


def _check_labels(rows: Rows) -> None:
    """Warns if all rows with a label have the same."""
    labels = set[Any]()
    for n in range(len(rows)):
        with contextlib.suppress(InputError):
            labels.add(label_of(rows[n]))
        if len(labels) > 1:
            return
    for label in labels:
        what = "answers are compared with none of the other kind"
        warnings.warn(f"all {len(rows):,} rows have the label {label}: {what}", stacklevel=2)


def digest(paths: Sequence[Path], rows: Sequence[Rows] = ()) -> int:
    """A digest of the contents of files, and of rows in memory; 0 without any."""
    hasher = hashlib.blake2b(digest_size=7)
    for number, path in enumerate(dict.fromkeys(paths)):
        with path.open("rb") as file:
            hasher.update(b"%d" % number + hashlib.file_digest(file, "blake2b").digest())
    for part in rows:
        hasher.update(part.contents())
    return int.from_bytes(hasher.digest()) if paths or rows else 0
