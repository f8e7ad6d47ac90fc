"""The data of a run: rows of a file, those held out, and the batches that are made of them."""

import hashlib
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ligermodels.checkpoint import files
from ligermodels.errors import InputError, LigermodelsError
from ligermodels.recipes import masking
from ligermodels.recipes.batches import Batches, workers_for
from ligermodels.recipes.formats import detect
from ligermodels.recipes.loop import Batch
from ligermodels.recipes.options import TrainOptions
from ligermodels.recipes.rows import Part, Rows, open_rows
from ligermodels.text import Tokenizer

_WINDOW_OF_IMAGES = 64
"""Rows that are encoded ahead: an image of a million pixels takes 24 MB."""


_MOST_WORKERS = 4
"""Processes that encode rows during the run: one encodes some 400,000 tokens a second."""


_ROWS = {"pairs": "preference pairs", "unpaired": "single labelled answers"}
"""What the plan calls the rows of a format; others are rows of the format's name."""


def encoding_workers(rows: int) -> int:
    """Processes that encode rows beside a GPU. The CPU's own steps leave the interpreter free, and need the cores."""
    return workers_for(rows, _MOST_WORKERS) if torch.cuda.is_available() else 0


class Data:
    """The batches of a run. All ranks make the same ones, of which each takes its own."""

    def __init__(self, options: TrainOptions, tokenizer: Tokenizer, multiple: int = 1, *, split: bool = False):
        """multiple: of the tokens of a row. split: texts longer than a row become several, and are not cut."""
        self._options, self._multiple, self._split = options, multiple, split
        rows = open_rows(options.data)
        self._eval: Rows | None = None if options.eval_data is None else open_rows(options.eval_data)
        if options.eval_share:
            rows, self._eval = held_out(rows, options.eval_share, options.seed)
        self._digest = digest((*rows.files, *(() if self._eval is None else self._eval.files)))
        self._rows, self._encoder = rows, self._encoder_of(rows, tokenizer)
        self._encoders = {id(rows): self._encoder}
        if self._eval is not None:
            self._encoders[id(self._eval)] = self._encoder_of(self._eval, tokenizer)
        self.train = self._batches(rows, workers=encoding_workers(len(rows)))

    @property
    def summary(self) -> str:
        name = self._encoder.format.name
        return f"{len(self._rows):,} {_ROWS.get(name, f'rows of {name}')}"

    @property
    def evaluation_summary(self) -> str:
        if self._eval is None:
            return ""
        return f"{len(self._eval):,} rows" + (f" of {self._options.eval_data}" if self._options.eval_data else "")

    def plan(self, counts: Mapping[str, int] | None) -> dict[str, str]:
        """Lines of the plan that this data tells otherwise, by name. counts: those of `count`."""
        return {}

    def _encoder_of(self, rows: Rows, tokenizer: Tokenizer) -> Any:
        format = detect(rows)
        if format.name in ("messages", "sharegpt", "alpaca") and not tokenizer.files.templates:
            raise InputError(
                f"{self._options.model} has no chat template, and rows of {format.name} need one. Likely: a base "
                "model. Next: its instruct model, or --chat-template FILE, or rows of prompt and completion"
            )
        return masking.Encoder(tokenizer, format)

    def _show(self, example: Any, *, colour: bool) -> str:
        return masking.show(example, self._encoder.tokenizer, colour)

    def _batches(self, rows: Rows, **options: Any) -> Batches:
        o, tokenizer = self._options, self._encoder.tokenizer
        assert o.max_length is not None
        pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        config = tokenizer.files.folder / "config.json"
        if config.is_file() and "vision_config" in files.read_json(config):
            options |= {"window": _WINDOW_OF_IMAGES, "workers": 0}
        return Batches(
            rows, self._encoders[id(rows)], length=o.max_length, tokens_per_batch=o.batch_tokens, packing=o.packing,
            seed=o.seed, multiple=self._multiple, pad_id=pad_id, long="split" if self._split and o.packing else "cut",
            skip_bad=o.skip_bad, digest=self._digest, **options,
        )  # fmt: skip

    def count(self) -> dict[str, int]:
        """What a pass over the data has: `Batches.report`, and the number of batches."""
        batches = self._batches(self._rows, epochs=1)
        number = batches.count(workers_for(len(self._rows)))
        return {"batches": number, **batches.report()}

    def once(self) -> Iterator[Batch]:
        """The batches of one pass over all rows, in their order."""
        return itertools.chain(self._batches(self._rows, epochs=1, shuffle=False), self.evaluation())

    def evaluation(self) -> list[Batch]:
        """The batches of one pass over what is evaluated on."""
        return [] if self._eval is None else list(self._batches(self._eval, epochs=1, shuffle=False))

    def examples(self, number: int, *, colour: bool) -> Iterator[str]:
        """The text of the first rows, with what is trained marked."""
        for index in range(min(number, len(self._rows))):
            try:
                example = self._encoder(self._rows[index])
            except LigermodelsError as error:
                yield f"{self._rows.where(index)}: {error}"
                continue
            yield f"{self._rows.where(index)}:\n{self._show(example, colour=colour)}"


def digest(paths: Sequence[Path]) -> int:
    """Of the contents of files; 0 without any."""
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
    return (
        Part(rows, [index for index in range(len(rows)) if index not in chosen]),
        Part(rows, sorted(chosen)),
    )
