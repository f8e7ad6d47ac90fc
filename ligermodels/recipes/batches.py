"""Training batches, endless, in an order that a seed gives, which go on exactly where a checkpoint left off.

An epoch is a permutation of the rows, made anew from (seed, epoch). It is cut into windows of rows; a window is encoded
and its examples are made into batches, which are dealt out to the ranks. The position is therefore three integers:
epoch, the place in the permutation where the window begins, and the batches of it that are done. Going on encodes the
window once more. All ranks encode all rows: none needs to ask another how many batches there are.
"""

import collections
import copy
import dataclasses
import functools
import itertools
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from ligermodels.errors import InputError, LigermodelsError, TokenizerError
from ligermodels.recipes.masking import IGNORED, Example
from ligermodels.recipes.packing import Batch, best_fit, packed_batch, padded_batch, spread


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


_Outcome = tuple[list[Any], collections.Counter[str]]
"""Of a row: the samples, and what is to be counted."""
Collate = Callable[[Sequence[Any], int, int], Batch]
"""(samples, pad id, what T is a multiple of): their batch; of none, a batch without a label."""


class _Measured(NamedTuple):
    """In place of a sample whose tokens nobody needs."""

    size: int


@dataclasses.dataclass(frozen=True)
class _Window:
    """batches: this rank's. next_row: where the next window begins. counts: of its rows, all ranks together."""

    epoch: int
    row: int
    next_row: int
    batches: list[list[Any]]
    counts: Mapping[str, int]


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
    workers: processes, forked at the first batch, in which rows are encoded: a thread that encodes holds up the one
    that launches kernels. The batches are the same.
    digest: of what the rows are read from; with another one, a state does not load.
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
        self._rows, self._encoder, self._length, self._packing = rows, encoder, length, packing
        self._seed, self._rank, self._ranks, self._window_rows, self._digest = seed, rank, ranks, window, digest
        self._multiple, self._pad_id, self._epochs, self._shuffle = multiple, pad_id, epochs, shuffle
        self._long, self._skip_bad, self._max_untrained = long, skip_bad, max_untrained
        self._collate: Collate = collate or (packed_batch if packing else padded_batch)
        self._executor = ThreadPoolExecutor(1, "encode") if prefetch else None
        self._ahead: tuple[tuple[int, int], Future[_Window]] | None = None  # (epoch, row) and the window there
        self._order: tuple[int, Any] = (-1, None)
        self._counts: collections.Counter[str] = collections.Counter()
        self._idle_rows = 0  # rows since the last window that had a batch
        self._workers = workers
        self._forked: _Forked | None = None
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

        workers: processes in which rows are encoded; they are forked. The number does not depend on them.
        """
        number, position = 0, (0, 0)
        if workers:
            self._forked = _Forked(self, 0, 0, workers, sizes_only=True)
        try:
            while position[0] == 0:
                window = self._encode_window(*position)
                self._check(window)
                number += len(window.batches)
                position = self._after(window)
        finally:
            self._forked = None
        return number

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
        if self._workers and self._forked is None:  # here, since a fork is safest in the main thread
            self._forked = _Forked(self, *key, self._workers)
        if self._ahead is not None and self._ahead[0] == key:
            window = self._ahead[1].result()
        elif self._executor is not None:
            window = self._executor.submit(self._encode_window, *key).result()
        else:
            window = self._encode_window(*key)
        self._window = window
        self._check(window)
        following = self._after(window)
        self._ahead = None
        if self._executor is not None and (self._epochs is None or following[0] < self._epochs):
            self._ahead = following, self._executor.submit(self._encode_window, *following)

    def _check(self, window: _Window) -> None:
        """Adds to the counts. Raises InputError if too few rows are trained, or no stop token."""
        counts = self._counts
        counts.update(window.counts)
        left_out = counts["untrained"] + counts["cut_away"]
        if left_out > self._max_untrained * (counts["rows"] - counts["bad"]):
            raise InputError(
                f"{left_out} of {counts['rows']} rows have no token to train: in {counts['untrained']} there is none, "
                f"in {counts['cut_away']} none before length={self._length}, where they are cut. Next step: "
                "--dry-run --show 3 shows what is trained; raise --length, or mend the rows"
            )
        if counts["asked"] and not counts["ends"]:
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

    # ---- state ----

    def state_dict(self) -> dict[str, int]:
        """The position after the last batch that was handed out, and the settings for which it means the same."""
        return {"epoch": self._epoch, "row": self._row, "batch": self._batch, **self._settings()}

    def _settings(self) -> dict[str, int]:
        return {
            "ranks": self._ranks,
            "rows": len(self._rows),
            "seed": self._seed,
            "length": self._length,
            "batch_size": self._capacity if self._packing else self._batch_rows,
            "packing": int(self._packing),
            "window": self._window_rows,
            "shuffle": int(self._shuffle),
            "split": int(self._long == "split"),
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
                f"the data cannot go on where the checkpoint left off: {changes}. Next step: as before, or a new run"
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
        if self._ahead is not None:
            self._ahead[1].exception()  # it may be reading from the processes
        self._idle_rows, self._ahead, self._forked = 0, None, None
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
        order, end = self._permutation(epoch), row
        outcomes: list[_Outcome] = []
        needed = 1 if self._packing else self._batch_rows * self._ranks
        while end < len(order) and (end == row or sum(len(found) for found, _ in outcomes) < needed):
            begin, end = end, min(end + self._window_rows, len(order))
            outcomes += [self._outcome(epoch, place) for place in range(begin, end)]
        if self._packing:
            examples = [example for found, _ in outcomes for example in found]
            bins = best_fit([example.size for example in examples], self._capacity)
            if self._shuffle:
                bins = [bins[n] for n in self._random(epoch, row + 1).permutation(len(bins))]
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
        for _, count in outcomes:
            counts.update(count)
        own = [[examples[n] for n in bin] for bin in bins[self._rank :: self._ranks]]
        return _Window(epoch, row, end, own, counts)

    def _outcome(self, epoch: int, place: int) -> _Outcome:
        """What the row at this place of the epoch's order gives."""
        if self._forked is not None and (epoch, place) == self._forked.next:
            return self._forked.take()
        return self._encode_row(int(self._permutation(epoch)[place]))  # a window may begin with rows of the one before

    def _encode_row(self, index: int) -> _Outcome:
        """The examples of a row, none or one, or several of a long one, and what is to be counted."""
        counts: collections.Counter[str] = collections.Counter(rows=1)
        try:
            example = self._encoder(self._rows[index])
            cut = example.cut(self._length)
        except (InputError, TokenizerError) as error:
            if not self._skip_bad:
                text = f"{self._rows.where(index)}: {error}".removesuffix(".")
                raise InputError(f"{text}. (--skip-bad leaves such rows out)") from error
            counts["bad"] += 1
            return [], counts
        counts.update(asked=int(example.ends is not None and example.trained > 0), ends=int(bool(example.ends)))
        if not example.trained:
            counts["untrained"] += 1
            return [], counts
        found = self._pieces(example) if self._long == "split" else [cut]
        if self._long == "cut" and (over := example.size - found[0].size):
            counts.update(truncated=1, tokens_cut=over)
        if not (found := [piece for piece in found if piece.trained]):
            counts["cut_away"] += 1
        counts.update(tokens=sum(e.size for e in found), trained=sum(e.trained for e in found))
        return found, counts

    def _pieces(self, example: Any) -> list[Sample]:
        """All of a long text, piece by piece; images, which no cut goes through, belong to the first."""
        parts = [slice(start, start + self._length) for start in range(0, example.size, self._length)]
        pieces = [Example(example.ids[part], [IGNORED, *example.labels[part][1:]], example.ends) for part in parts]
        return [dataclasses.replace(pieces[0], images=example.images), *pieces[1:]]

    def _permutation(self, epoch: int) -> Any:
        if self._order[0] != epoch:
            self._order = epoch, self._permuted(epoch)
        return self._order[1]

    def _permuted(self, epoch: int) -> Any:
        size = len(self._rows)
        return self._random(epoch, 0).permutation(size) if self._shuffle else np.arange(size)

    def _random(self, epoch: int, part: int) -> np.random.RandomState:
        """RandomState, because its streams never change with numpy's version: a run may go on after an update."""
        return np.random.RandomState([self._seed % 2**32, epoch, part])


# ---- processes ----

_CHUNK = 50
"""Rows that a process encodes at a time."""
_ENDING = {signal.SIGINT, signal.SIGTERM}


def workers_for(rows: int, most: int = 16) -> int:
    """Processes to encode so many rows with, one a core; 0 where starting them takes longer, or cannot be."""
    if sys.platform != "linux" or rows < 500:  # elsewhere, a fork is not safe
        return 0
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(most, cores) if cores > 1 else 0


class _Forked:
    """What the rows of `batches` give, in order, from a place of an epoch on, encoded ahead in forked processes.

    next: (epoch, place) of what `take` returns. sizes_only: each sample as its size, of one epoch.
    """

    def __init__(self, batches: Batches, epoch: int, place: int, workers: int, *, sizes_only: bool = False) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # where nothing is said, tokenizers warns of the fork
        self.next, self._size = (epoch, place), len(batches._rows)
        batches = copy.copy(batches)  # no cycle: what is freed by the collector waits five seconds for its processes
        loader: DataLoader[Any] = DataLoader(
            _Chunks(batches, sizes_only), batch_size=None, sampler=_places(batches, epoch, place, sizes_only),
            num_workers=workers, multiprocessing_context="fork", collate_fn=list,
            generator=torch.Generator(),  # of its own: a run's random numbers stay what they are
            worker_init_fn=functools.partial(_begin, os.getpid()),
        )  # fmt: skip
        # Ctrl-C and a scheduler's SIGTERM come to all processes. This one ends the others when it has finished.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        try:
            self._outcomes: Iterator[Any] = itertools.chain.from_iterable(iter(loader))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def take(self) -> _Outcome:
        epoch, place = self.next
        self.next = (epoch, place + 1) if place + 1 < self._size else (epoch + 1, 0)
        found = next(self._outcomes)
        if isinstance(found, LigermodelsError):
            self._outcomes = iter(())  # ends the processes, which the traceback would keep
            raise found
        return found  # type: ignore[no-any-return]


def _begin(parent: int, worker: int) -> None:
    """In a process: sees that it waits for nobody, and ends with its parent.

    Threads of tokenizers do not live on in a fork, which would wait for them. SIGINT and SIGTERM are blocked, and those
    of the parent end it. Where the parent is gone torch's processes wait for ever, until someone reads what they have
    made.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def watch() -> None:
        while os.getppid() == parent:
            came = signal.sigtimedwait(_ENDING, 0.5)
            if came is not None and came.si_pid == parent:
                break
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def _places(batches: Batches, epoch: int, place: int, one: bool) -> Iterator[Any]:
    """The indices of the rows from a place on, some at a time: of that epoch, or of all that follow."""
    for number in itertools.count(epoch):
        if batches._epochs is not None and number >= batches._epochs:
            return
        order = batches._permuted(number)[place if number == epoch else 0 :]
        yield from (order[start : start + _CHUNK] for start in range(0, len(order), _CHUNK))
        if one:
            return


class _Chunks(Dataset[Any]):
    """What rows give, by their indices; an error in place of a row that raises it."""

    def __init__(self, batches: Batches, sizes_only: bool) -> None:
        self._batches, self._sizes_only = batches, sizes_only

    def __getitem__(self, indices: Any) -> list[_Outcome | LigermodelsError]:
        return [self._outcome(int(index)) for index in indices]

    def _outcome(self, index: int) -> _Outcome | LigermodelsError:
        try:
            found, counts = self._batches._encode_row(index)
        except LigermodelsError as error:
            return error
        return ([_Measured(sample.size) for sample in found] if self._sizes_only else found), counts
