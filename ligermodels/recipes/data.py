"""The data of a run: rows of a file, those held out, and the batches that are made of them."""

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ligermodels.errors import InputError
from ligermodels.recipes import masking
from ligermodels.recipes.batches import Batches
from ligermodels.recipes.formats import detect
from ligermodels.recipes.loop import Batch, Processes
from ligermodels.recipes.options import TrainOptions
from ligermodels.recipes.rows import Rows, open_rows
from ligermodels.text import Tokenizer


class Part(Rows):
    """Some of the rows."""

    def __init__(self, rows: Rows, indices: Sequence[int]):
        self._rows, self._indices = rows, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rows[self._indices[index]]

    def where(self, index: int) -> str:
        return self._rows.where(self._indices[index])


class Data:
    """The batches of a run. train: endless; the ranks of `processes` share them out."""

    def __init__(self, options: TrainOptions, tokenizer: Tokenizer, processes: Processes):
        self._options, self._processes = options, processes
        rows = open_rows(options.data)
        self._eval: Rows | None = None if options.eval_data is None else open_rows(options.eval_data)
        if options.eval_share:
            rows, self._eval = held_out(rows, options.eval_share, options.seed)
        self._rows, self._encoder = rows, masking.Encoder(tokenizer, detect(rows))
        self.train = self._batches(rows, processes.batch_rank, processes.batch_ranks)

    @property
    def summary(self) -> str:
        return f"{len(self._rows):,} rows of {self._encoder.format.name}"

    @property
    def evaluation_summary(self) -> str:
        if self._eval is None:
            return ""
        return f"{len(self._eval):,} rows" + (f" of {self._options.eval_data}" if self._options.eval_data else "")

    def _batches(self, rows: Rows, rank: int = 0, ranks: int = 1) -> Any:
        o = self._options
        assert o.length is not None
        return Batches(
            rows, self._encoder, length=o.length, tokens_per_batch=o.batch_tokens, packing=o.packing, seed=o.seed,
            rank=rank, ranks=ranks,
        )  # fmt: skip

    def count(self) -> dict[str, int]:
        """Batches, tokens and trained tokens of one pass."""
        found = dict(batches=0, tokens=0, trained=0)
        for batch in first_pass(self._batches(self._rows)):
            found["batches"] += 1
            found["tokens"] += batch["input_ids"].numel()
            found["trained"] += int((batch["labels"] != masking.IGNORED).sum())
        return found

    def evaluation(self) -> list[Batch]:
        """The batches of one pass over what is evaluated on, the same on all ranks."""
        return [] if self._eval is None else list(first_pass(self._batches(self._eval)))

    def examples(self, number: int, *, colour: bool) -> Iterator[str]:
        """The text of the first rows, with what is trained marked."""
        for index in range(min(number, len(self._rows))):
            example = self._encoder(self._rows[index])
            yield f"{self._rows.where(index)}:\n{masking.show(example, self._encoder.tokenizer, colour)}"

    def counts(self) -> Mapping[str, Any]:
        """What the batches that were made had, for the report."""
        return self.train.report()


open_data = Data


def held_out(rows: Rows, share: float, seed: int) -> tuple[Rows, Rows]:
    """Rows to train on, and a share of them to evaluate on, drawn by the seed. Raises InputError."""
    number = round(share * len(rows))
    if not 0 < number < len(rows):
        raise InputError(f"eval_share={share:g} of {len(rows)} rows leaves none to evaluate on, or none to train on")
    chosen = set(random.Random(seed).sample(range(len(rows)), number))
    return (
        Part(rows, [index for index in range(len(rows)) if index not in chosen]),
        Part(rows, sorted(chosen)),
    )


def first_pass(batches: Any) -> Iterator[Batch]:
    """The batches of one pass over the rows."""
    for number, batch in enumerate(batches):
        if number and batches.epoch > 0:
            return
        yield batch
