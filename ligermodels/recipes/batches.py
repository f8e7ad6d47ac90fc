"""Training batches, endless, in an order that a seed gives, which go on exactly where a checkpoint left off.

An epoch is a permutation of the rows, made anew from (seed, epoch). It is cut into windows of rows; a window is encoded
and its examples are made into batches, which are dealt out to the ranks. The position is therefore three integers:
epoch, the place in the permutation where the window begins, and the batches of it that are done. Going on encodes the
window once more. All ranks encode all rows: none needs to ask another how many batches there are.
"""

import collections
import dataclasses
import functools
import itertools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, NamedTuple, Protocol, Self

import numpy as np

from ligermodels.errors import InputError, LigermodelsError, TokenizerError
from ligermodels.recipes.masking import IGNORED, Example
from ligermodels.recipes.packing import Batch, best_fit, packed_batch, padded_batch, spread
from ligermodels.recipes.workers import Workers
from ligermodels.text.chat import TemplateError


class HasRows(Protocol):
    """`recipes.rows.Rows`, or whatever has its three methods."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, Any]: ...

    def where(self, index: int, /) -> str: ...


class Sample(Protocol):
    """What an encoder makes of a row: a `masking.Example`, or several sequences that stay together."""

    @property
    def size(self) -> int:
        """Tokens."""

    @property
    def trained(self) -> int:
        """Tokens with a label; 0 for what cannot be trained."""

    @property
    def ends(self) -> bool | None: ...

    def cut(self, length: int, /) -> Self:
        """With at most so many tokens in a sequence; raises InputError where that cannot be."""


_NAMED = 3
"""Rows that are named of those with the same trouble."""
_ENOUGH = 100
"""Rows after which it is an error if none of them trains a stop token."""
_Outcome = tuple[list[Any], collections.Counter[str]]
"""Of a row: the samples, and what is to be counted."""
Collate = Callable[[Sequence[Any], int, int], Batch]
"""(samples, pad id, what T is a multiple of): their batch; of none, a batch without a label."""


class BadRowError(InputError):
    """A row that cannot be read or encoded, which skip_bad leaves out."""


class _Measured(NamedTuple):
    """In place of a sample whose tokens nobody needs."""

    size: int


@dataclasses.dataclass(frozen=True)
class _Window:
    """batches: this rank's. next_row: where the next window begins. counts: of its rows, all ranks together.

    named: by what is counted, the first rows that were, with their tokens.
    """

    epoch: int
    row: int
    next_row: int
    batches: list[list[Any]]
    counts: Mapping[str, int]
    named: Mapping[str, list[tuple[int, int]]]


class Batches(Iterator[Batch]):
    """Batches of CPU tensors for model(**batch): `packing.packed_batch`, or `packing.padded_batch` without packing.

    encoder: makes a Sample of a row, such as `masking.Encoder`. collate: makes a batch of samples, in place of these.
    sequences: of a sample, each of which has up to `length` tokens.
    length: the most tokens of an example. long: a longer one is cut at its end ("cut"), or "split" into several.
    tokens_per_batch, or rows_per_batch (default 1): a packed batch has at most so many tokens, or `length` times so
    many; a padded one has so many rows.
    rank, ranks: which of the batches are this rank's. All ranks have equally many; where examples do not suffice, a
    batch is padding only, without a label.
    window: rows that are encoded and packed at a time.
    multiple: T is a multiple of it (cp x tp need that).
    epochs: after so many the iteration ends. shuffle: False for the order of the rows.
    skip_bad: rows that cannot be read or encoded are counted, not an error. max_untrained: the share of rows without a
    trained token above which InputError is raised.
    prefetch: makes the next window in a thread meanwhile. The batches are the same.
    workers: processes, started at the first batch, in which rows are encoded: a thread that encodes holds up the one
    that launches kernels. The batches are the same. Rows and encoder must be picklable, and a script must start its
    work under `if __name__ == "__main__":` (see workers.py).
    digest: of what the rows are read from; with another one, a state does not load.
    look: called once with the batches of samples of the first window, to warn of what is odd in them.
    """

    def __init__(
        self,
        rows: HasRows,
        encoder: Callable[[dict[str, Any]], Sample],
        *,
        length: int,
        tokens_per_batch: int | None = None,
        rows_per_batch: int | None = None,
        packing: bool = True,
        seed: int = 0,
        rank: int = 0,
        ranks: int = 1,
        window: int = 1000,
        multiple: int = 1,
        pad_id: int = 0,
        epochs: int | None = None,
        shuffle: bool = True,
        long: Literal["cut", "split"] = "cut",
        skip_bad: bool = False,
        max_untrained: float = 0.1,
        prefetch: bool = True,
        workers: int = 0,
        sequences: int = 1,
        collate: Collate | None = None,
        digest: int = 0,
        look: Callable[[Sequence[Sequence[Any]]], None] | None = None,
    ) -> None:
        if tokens_per_batch is not None and rows_per_batch is not None:
            raise InputError("tokens_per_batch and rows_per_batch are two ways to say the same; give one")
        if not len(rows):
            raise InputError("there are no rows to train on")
        sizes = {"length": length, "window": window, "ranks": ranks, "multiple": multiple}
        for name, size in {**sizes, "tokens_per_batch": tokens_per_batch, "rows_per_batch": rows_per_batch}.items():
            if size is not None and size < 1:
                raise InputError(f"{name} is at least 1, not {size}")
        if length < 2:
            raise InputError("length is at least 2: the first token of an example is never trained")
        if not 0 <= rank < ranks:
            raise InputError(f"rank is 0 to {ranks - 1}, not {rank}")
        if long not in ("cut", "split") or (long == "split" and not packing):
            raise InputError(f"long is 'cut', or 'split' with packing, not {long!r}")
        longest = length * sequences
        self._capacity = tokens_per_batch or longest * (rows_per_batch or 1)
        self._batch_rows = rows_per_batch or max(1, (tokens_per_batch or 1) // longest)
        if packing and self._capacity < longest:
            each = f"{sequences} x " * (sequences > 1)
            raise InputError(f"tokens_per_batch={tokens_per_batch} holds no example of {each}length={length}")
        if length % multiple or self._capacity % multiple:
            raise InputError(f"length={length} and tokens_per_batch must be multiples of {multiple} (cp x tp)")
        self._rows, self._length, self._packing, self._sequences = rows, length, packing, sequences
        self._encode_row = _RowEncoder(rows, encoder, length, long, skip_bad)
        self._order, self._permutation = _Order(len(rows), seed, shuffle), (-1, np.arange(0))
        self._rank, self._ranks, self._window_rows, self._digest = rank, ranks, window, digest
        self._multiple, self._pad_id, self._epochs, self._max_untrained = multiple, pad_id, epochs, max_untrained
        self._collate: Collate = collate or (packed_batch if packing else padded_batch)
        self._executor = ThreadPoolExecutor(1, "encode") if prefetch else None
        self._ahead: tuple[tuple[int, int], Future[_Window]] | None = None  # (epoch, row) and the window there
        self._counts: collections.Counter[str] = collections.Counter()
        self._named: dict[str, list[tuple[str, int]]] = {}  # the first rows of what is counted, and their tokens
        self._warned: set[str] = set()
        self._idle_rows = 0  # rows since the last window that had a batch
        self._workers, self._look = workers, look
        self._encoded: _Encoded | None = None
        self._go_to(0, 0, 0)

    # ---- iteration ----

    def __next__(self) -> Batch:
        while self._window is None or self._batch == len(self._window.batches):
            if self._window is not None:
                self._go_to(*self._after(self._window), 0)
            if self._epochs is not None and self._epoch >= self._epochs:
                raise StopIteration
            self._enter()
        examples = self._window.batches[self._batch]
        self._batch += 1
        return self._collate(examples, self._pad_id, self._multiple)

    @property
    def epoch(self) -> int:
        """The epoch, from 0, of the batch that was handed out last; the number of epochs after the end."""
        return self._epoch

    def report(self) -> dict[str, int]:
        """Counts of the windows that were begun since this object was made or resumed, all ranks together.

        rows; tokens and trained (those with a label) of what goes into batches; truncated rows and the tokens cut off
        them; untrained: rows left out because no token of them is trained, cut_away: those of which truncation left
        none; bad: rows skipped by skip_bad.
        """
        names = ("rows", "tokens", "trained", "truncated", "tokens_cut", "untrained", "cut_away", "bad")
        return {name: self._counts[name] for name in names}

    def count(self, workers: int = 0) -> int:
        """The number of this rank's batches of the first epoch, of which none is made; `report` tells of its rows.

        workers: processes in which rows are encoded. The number does not depend on them.
        """
        number, position = 0, (0, 0)
        if workers:
            self._encoded = _Encoded(self._encode_row, self._order, 0, 0, 1, workers, sizes_only=True)
        try:
            while position[0] == 0:
                window = self._encode_window(*position)
                self._check(window)
                number += len(window.batches)
                position = self._after(window)
        finally:
            self._stop_workers()
        return number

    def _stop_workers(self) -> None:
        if self._encoded is not None:
            self._encoded.close()
        self._encoded = None

    def _after(self, window: _Window) -> tuple[int, int]:
        """(epoch, row) of the window after this one."""
        ends = window.next_row >= len(self._rows)
        return (window.epoch + 1, 0) if ends else (window.epoch, window.next_row)

    def _go_to(self, epoch: int, row: int, batch: int) -> None:
        self._epoch, self._row, self._batch = epoch, row, batch
        self._window: _Window | None = None

    def _enter(self) -> None:
        """Encodes the window at (epoch, row), or takes it from the thread, which then goes on with the next."""
        key = self._epoch, self._row
        if self._workers and self._encoded is None:
            self._encoded = _Encoded(self._encode_row, self._order, *key, self._epochs, self._workers)
        if self._ahead is not None and self._ahead[0] == key:
            window = self._ahead[1].result()
        elif self._executor is not None:
            window = self._executor.submit(self._encode_window, *key).result()
        else:
            window = self._encode_window(*key)
        self._window = window
        self._check(window)
        self._warn()
        following = self._after(window)
        self._ahead = None
        if self._executor is not None and (self._epochs is None or following[0] < self._epochs):
            self._ahead = following, self._executor.submit(self._encode_window, *following)

    def _check(self, window: _Window) -> None:
        """Adds to the counts. Raises InputError if too few rows are trained, or no stop token."""
        counts = self._counts
        counts.update(window.counts)
        for what, rows in window.named.items():
            names = self._named.setdefault(what, [])
            names += [(self._rows.where(index), tokens) for index, tokens in rows[: _NAMED - len(names)]]
        left_out = counts["untrained"] + counts["cut_away"]
        if left_out > self._max_untrained * (counts["rows"] - counts["bad"]):
            raise InputError(
                f"{left_out} of {counts['rows']} rows have no token to train: in {counts['untrained']} there is none, "
                f"in {counts['cut_away']} none before --max-length {self._length}, where they are cut."
                f"{self._left_out()}\n"
                "  Next: --dry-run --show 3 shows what is trained; raise --max-length, or mend the rows"
            )
        if counts["asked"] and not counts["ends"] and counts["rows"] >= min(_ENOUGH, len(self._rows)):
            if counts["ends_cut"]:
                raise InputError(
                    f"none of {counts['asked']} rows trains a token that stops the model, which would never stop: "
                    f"{counts['ends_cut']} have one, and are cut before it at --max-length {self._length}. Next step: "
                    f"raise --max-length. {self._cut_rows()}".removesuffix(". ")
                )
            raise InputError(
                f"none of {counts['asked']} rows trains a token that stops the model, which would never stop. Likely "
                "cause: the chat template's {% generation %} ends before the end of the turn, or the template ends "
                "turns with a token that is none of the model's eos tokens. Next step: --chat-template FILE, one "
                "that has it"
            )
        self._idle_rows = 0 if window.batches else self._idle_rows + window.next_row - window.row
        if self._idle_rows >= len(self._rows):
            raise InputError(
                f"none of the {len(self._rows)} rows can be trained: {counts['bad']} cannot be read, {left_out} have "
                "no token to train. Next step: without --skip-bad the first of them is named"
            )

    def _left_out(self) -> str:
        """The first rows that are left out, and why; "" without any."""
        why = {
            "untrained": "nothing in it is to be trained (no answer, an empty one, or train false)",
            "cut_away": f"nothing before --max-length {self._length}, where it is cut, is to be trained",
        }
        return "".join(f"\n  {row}: {why[what]}" for what in why for row, _ in self._named.get(what, ()))

    def _cut_rows(self) -> str:
        """The first rows that are cut, with their tokens; "" without any."""
        each = f" in {self._sequences} sequences" * (self._sequences > 1)
        return ", ".join(f"{row} has {tokens:,} tokens{each}" for row, tokens in self._named.get("truncated", ()))

    def _warn(self) -> None:
        """Warns once of rows that are cut, once of rows that are left out, and calls `look`; on rank 0 alone."""
        if self._rank or int(os.environ.get("RANK", "0")):
            return
        found = {}
        if rows := self._cut_rows():
            found["cut"] = (
                f"rows are cut at --max-length {self._length}, such as: {rows}. What comes after is not trained, "
                "nor the token that ends the answer. To train them whole, raise --max-length"
            )
        if rows := self._left_out():
            found["left out"] = f"rows are left out, since no token of them is trained, such as{rows}"
        for what in found.keys() - self._warned:
            warnings.warn(found[what], stacklevel=4)
        self._warned |= found.keys()
        if self._look is not None and self._window is not None:
            self._look(self._window.batches)
            self._look = None

    # ---- state ----

    def state_dict(self) -> dict[str, int]:
        """The position after the last batch that was handed out, and the settings for which it means the same."""
        return {"epoch": self._epoch, "row": self._row, "batch": self._batch, **self._settings()}

    def _settings(self) -> dict[str, int]:
        return {
            "ranks": self._ranks,
            "rows": len(self._rows),
            "seed": self._order.seed,
            "length": self._length,
            "batch_size": self._capacity if self._packing else self._batch_rows,
            "packing": int(self._packing),
            "window": self._window_rows,
            "shuffle": int(self._order.shuffle),
            "split": int(self._encode_row.long == "split"),
            "digest": self._digest,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on after the batch after which `state_dict` was called.

        With another number of ranks the window is begun once more: some of its rows are seen twice. Raises InputError
        if other settings differ.
        """
        own = self._settings()
        if missing := sorted({"epoch", "row", "batch", *own} - state.keys()):
            raise InputError(f"this is no state of Batches: it lacks {missing}")
        if differ := [name for name in own if name != "ranks" and own[name] != state[name]]:
            told = (f"{name} was {state[name]}, now it is {own[name]}" for name in differ if name != "digest")
            changes = ", ".join(told) or "the contents of its files have changed"
            raise InputError(
                f"the data cannot go on where the checkpoint left off: {changes}. Next step: restore what was before "
                "(rows that cannot be read are left out with --skip-bad), or start a new run with another --output-dir"
            )
        batch = int(state["batch"])
        if batch and state["ranks"] != self._ranks:
            warnings.warn(
                f"the checkpoint is of {state['ranks']} ranks, now there are {self._ranks}: up to {self._window_rows} "
                "rows are seen twice in this epoch",
                stacklevel=2,
            )
            batch = 0
        if not 0 <= state["row"] < len(self._rows) or batch < 0 or state["epoch"] < 0:
            raise InputError(f"this is no position in {len(self._rows)} rows: {dict(state)}")
        self._counts.clear()
        self._named.clear()
        if self._ahead is not None:
            self._ahead[1].exception()  # it may be reading from the processes
        self._idle_rows, self._ahead = 0, None
        self._stop_workers()
        self._go_to(int(state["epoch"]), int(state["row"]), 0)
        if batch:
            self._enter()
            assert self._window is not None
            if batch > len(self._window.batches):
                raise InputError("the rows have changed since the checkpoint: there are fewer batches of them")
            self._batch = batch

    # ---- encoding ----

    def _encode_window(self, epoch: int, row: int) -> _Window:
        """The window that begins at `row` of the epoch. Changes nothing but a memo: it runs in the thread."""
        if self._permutation[0] != epoch:
            self._permutation = epoch, self._order.of(epoch)
        order, end = self._permutation[1], row
        outcomes: list[_Outcome] = []
        needed = 1 if self._packing else self._batch_rows * self._ranks
        while end < len(order) and (end == row or sum(len(found) for found, _ in outcomes) < needed):
            begin, end = end, min(end + self._window_rows, len(order))
            outcomes += [self._outcome(epoch, place, int(order[place])) for place in range(begin, end)]
        if self._packing:
            examples = [example for found, _ in outcomes for example in found]
            bins = best_fit([example.size for example in examples], self._capacity)
            if self._order.shuffle:
                bins = [bins[n] for n in self._order.random(epoch, row + 1).permutation(len(bins))]
            bins = spread(bins, self._ranks)
        else:
            places = [n for n, (found, _) in enumerate(outcomes) if found]
            examples = [outcomes[n][0][0] for n in places]
            full = len(examples) - len(examples) % needed
            bins = [list(range(n, n + self._batch_rows)) for n in range(0, full, self._batch_rows)]
            if end < len(order) and full < len(examples):  # the next window begins with the examples that are over
                outcomes = outcomes[: places[full]]
                end = row + len(outcomes)
            elif full < len(examples):
                bins += [list(range(full + rank, len(examples), self._ranks)) for rank in range(self._ranks)]
        counts: collections.Counter[str] = collections.Counter()
        named: dict[str, list[tuple[int, int]]] = {}
        for n, (_, count) in enumerate(outcomes):
            counts.update(count)
            for what in ("untrained", "cut_away", "truncated"):
                if count[what] and counts[what] <= _NAMED:
                    tokens = count["tokens"] + count["tokens_cut"]
                    named.setdefault(what, []).append((int(order[row + n]), tokens))
                    break
        own = [[examples[n] for n in bin] for bin in bins[self._rank :: self._ranks]]
        return _Window(epoch, row, end, own, counts, named)

    def _outcome(self, epoch: int, place: int, index: int) -> _Outcome:
        """What the row of this index, at this place of the epoch's order, gives."""
        if self._encoded is not None and (epoch, place) == self._encoded.next:
            return self._encoded.take()
        return self._encode_row(index)  # a window may begin with rows of the one before


@dataclasses.dataclass(frozen=True)
class _Order:
    """The order of the rows, which is another one in each epoch."""

    size: int
    seed: int
    shuffle: bool

    def of(self, epoch: int) -> Any:
        return self.random(epoch, 0).permutation(self.size) if self.shuffle else np.arange(self.size)

    def random(self, epoch: int, part: int) -> np.random.RandomState:
        """RandomState, because its streams never change with numpy's version: a run may go on after an update."""
        return np.random.RandomState([self.seed % 2**32, epoch, part])


@dataclasses.dataclass(frozen=True)
class _RowEncoder:
    """What rows give, by their indices. It is sent to processes."""

    rows: HasRows
    encoder: Callable[[dict[str, Any]], Sample]
    length: int
    long: Literal["cut", "split"]
    skip_bad: bool

    def __call__(self, index: int) -> _Outcome:
        """The examples of a row, none or one, or several of a long one, and what is to be counted."""
        counts: collections.Counter[str] = collections.Counter(rows=1)
        try:
            example = self.encoder(self.rows[index])
            cut = example.cut(self.length)
        except (InputError, TokenizerError) as error:
            if not self.skip_bad:
                text = f"{self.rows.where(index)}: {error}".removesuffix(".") + "."
                advice = " (--skip-bad leaves such rows out)" * (not isinstance(error, TemplateError))
                raise BadRowError(text + advice) from error
            counts["bad"] += 1
            return [], counts
        if not example.trained:
            counts["untrained"] += 1
            return [], counts
        found = self._pieces(example) if self.long == "split" else [cut]
        if self.long == "cut" and (over := example.size - found[0].size):
            counts.update(truncated=1, tokens_cut=over)
        if not (found := [piece for piece in found if piece.trained]):
            counts["cut_away"] += 1
            return [], counts
        if example.ends is not None:
            ends = bool(example.ends if self.long == "split" else cut.ends)
            counts.update(asked=1, ends=int(ends), ends_cut=int(example.ends and not ends))
        counts.update(tokens=sum(e.size for e in found), trained=sum(e.trained for e in found))
        return found, counts

    def _pieces(self, example: Any) -> list[Sample]:
        """All of a long text, piece by piece; images, which no cut goes through, belong to the first."""
        parts = [slice(start, start + self.length) for start in range(0, example.size, self.length)]
        pieces = [Example(example.ids[part], [IGNORED, *example.labels[part][1:]], example.stops) for part in parts]
        return [dataclasses.replace(pieces[0], images=example.images), *pieces[1:]]


# ---- processes ----

_CHUNK = 50
"""Rows that a process encodes at a time."""


def workers_for(rows: int, most: int = 16) -> int:
    """Processes to encode so many rows with, one a core; 0 where starting them takes longer than the rows."""
    if rows < 2000:  # one process encodes as many in a second
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores //= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(most, cores) if cores > 1 else 0


class _Encoded:
    """What rows give, in order, from a place of an epoch on, encoded ahead in processes.

    next: (epoch, place) of what `take` returns. sizes_only: each sample as its size.
    """

    def __init__(
        self, encode: _RowEncoder, order: _Order, epoch: int, place: int, epochs: int | None, workers: int,
        *, sizes_only: bool = False,
    ) -> None:  # fmt: skip
        self.next, self._size = (epoch, place), order.size
        work, modules = functools.partial(_outcomes, encode, sizes_only), (encode.encoder.__module__, "tokenizers")
        self._workers = Workers(work, _chunks(order, epoch, place, epochs), workers, modules)
        self._outcomes = itertools.chain.from_iterable(self._workers)

    def take(self) -> _Outcome:
        epoch, place = self.next
        self.next = (epoch, place + 1) if place + 1 < self._size else (epoch + 1, 0)
        found: _Outcome | LigermodelsError = next(self._outcomes)
        if isinstance(found, LigermodelsError):
            self.close()
            raise found
        return found

    def close(self) -> None:
        """Ends the processes."""
        self._workers.close()


def _chunks(order: _Order, epoch: int, place: int, epochs: int | None) -> Iterator[Any]:
    """The indices of the rows from a place on, some at a time."""
    for number in itertools.count(epoch):
        if epochs is not None and number >= epochs:
            return
        indices = order.of(number)[place if number == epoch else 0 :]
        yield from (indices[start : start + _CHUNK] for start in range(0, len(indices), _CHUNK))


def _outcomes(encode: _RowEncoder, sizes_only: bool, indices: Any) -> list[_Outcome | LigermodelsError]:
    """What rows give, by their indices; an error in place of a row that raises it."""
    found: list[_Outcome | LigermodelsError] = []
    for index in indices:
        try:
            samples, counts = encode(int(index))
        except LigermodelsError as error:
            found.append(error)
        else:
            found.append(([_Measured(sample.size) for sample in samples] if sizes_only else samples, counts))
    return found
