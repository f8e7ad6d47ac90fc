"""What the recipes of preferences share: rows into sequences and batches, their log probabilities, and the reference.

A row becomes the sequences of its answers, each the prompt and an answer. As in TRL, prompt, and prompt with answer are
tokenised, and the answer is what follows the tokens that they have in common: with it is trained what the chat template
writes after it. A batch holds the chosen sequences, then the rejected ones, packed or padded.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ligermodels.arch.inputs import Targets
from ligermodels.checkpoint.files import write_errors
from ligermodels.errors import InputError
from ligermodels.layers.preference import sum_per_sequence
from ligermodels.processes import Processes
from ligermodels.recipes import masking
from ligermodels.recipes.batches import Batches
from ligermodels.recipes.data import Data
from ligermodels.recipes.formats import Format, Pair, Unpaired, detect, normalise
from ligermodels.recipes.loop import Batch, Sums, checked, on_device
from ligermodels.recipes.masking import IGNORED, Example
from ligermodels.recipes.options import ReferenceOptions
from ligermodels.recipes.packing import packed_batch, padded_batch
from ligermodels.recipes.report import say
from ligermodels.recipes.rows import Rows
from ligermodels.text import Tokenizer

# ---- rows ----

_ANSWERS = ("chosen", "rejected", "completion")


@dataclasses.dataclass(frozen=True)
class Answers:
    """Sequences that begin with the same prompt: chosen and rejected, or one with a label, whether it is good."""

    sequences: tuple[Example, ...]
    prompt: int  # tokens
    label: bool | None = None

    @property
    def size(self) -> int:
        return sum(sequence.size for sequence in self.sequences)

    @property
    def trained(self) -> int:
        """The tokens that are trained; 0 where an answer has none, which then cannot be compared."""
        counts = [sequence.trained for sequence in self.sequences]
        return sum(counts) if all(counts) else 0

    @property
    def ends(self) -> bool:
        return any(sequence.ends for sequence in self.sequences)

    def cut(self, length: int) -> "Answers":
        return dataclasses.replace(self, sequences=tuple(sequence.cut(length) for sequence in self.sequences))


@dataclasses.dataclass(frozen=True)
class Encoder:
    """Makes Answers of rows. The options are those of `encode`."""

    tokenizer: Tokenizer
    format: Format
    chat_template: str | None = None
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __call__(self, row: Mapping[str, Any]) -> Answers:
        item = normalise(row, self.format)
        assert isinstance(item, Pair | Unpaired), "the format was checked"
        return encode(item, self.tokenizer, chat_template=self.chat_template, variables=self.variables)


def encode(
    item: Pair | Unpaired,
    tokenizer: Tokenizer,
    *,
    chat_template: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> Answers:
    """The sequences of the item's answers. Messages are rendered by the chat template; texts get the eos token.

    Raises InputError, TokenizerError.
    """
    answers: dict[str, Any] = {key: value for key, value in vars(item).items() if key in _ANSWERS}
    if isinstance(item.prompt, str):
        prompt, wholes, stops = _text_ids(item.prompt, list(answers.values()), tokenizer)
    else:
        for key, messages in answers.items():
            _check_answer(key, messages)
        options = {"tools": item.tools, "chat_template": chat_template, **(variables or {})}
        prompt, wholes, stops = _chat_ids(item.prompt, list(answers.values()), tokenizer, options)
    start = min(_shared(prompt, whole) for whole in wholes)
    sequences = []
    for whole in wholes:
        labels = [IGNORED] * max(1, start) + whole[max(1, start) :]  # nothing predicts the first token
        sequences.append(Example(whole, labels, stops))
    return Answers(tuple(sequences), start, item.label if isinstance(item, Unpaired) else None)


def _text_ids(prompt: str, answers: list[str], tokenizer: Tokenizer) -> tuple[list[int], list[list[int]], Any]:
    eos = tokenizer.eos_token_id
    if eos is None:
        raise InputError("the tokenizer names no eos token, so that the model would not learn where an answer ends")
    wholes = [tokenizer.encode(prompt + answer) for answer in answers]
    wholes = [ids if ids[-1:] == [eos] else [*ids, eos] for ids in wholes]
    return tokenizer.encode(prompt), wholes, tokenizer.eos_token_ids


def _chat_ids(
    prompt: Any, answers: list[Any], tokenizer: Tokenizer, options: Mapping[str, Any]
) -> tuple[list[int], list[list[int]], Any]:
    prompt = [{key: value for key, value in message.items() if key != "train"} for message in prompt]
    asked = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True, **options)
    texts = [tokenizer.apply_chat_template(prompt + answer, tokenize=False, **options) for answer in answers]
    begin = masking.NO_THOUGHT.sub("", asked)
    if not all(text.startswith(begin) for text in texts):
        raise InputError(
            "prompt: the chat template writes it otherwise once there is an answer, so that the tokens to train are "
            "not known. Next step: --chat-template FILE, one that only adds to what it wrote before"
        )
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in (asked, *texts)]
    return ids[0], ids[1:], tokenizer.chat_stop_ids


def _check_answer(key: str, messages: Any) -> None:
    """Raises InputError for an answer with messages that the model does not write."""
    for n, message in enumerate(messages):
        if message["role"] != "assistant":
            raise InputError(
                f"{key}: message {n + 1} after the prompt is of {message['role']!r}; an answer is what the assistant "
                "says, and all of it is compared. Next step: move what is before the last answer into the prompt"
            )
        if not message.get("train", True):
            raise InputError(f"{key}: message {n + 1} after the prompt is not to be trained, but answers are compared")


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    """The number of ids that both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(first), len(second)))


# ---- batches ----

_WANTED = {
    "pairs": 'pairs: {"prompt": ..., "chosen": ..., "rejected": ...}, texts or lists of messages',
    "unpaired": 'single answers: {"prompt": ..., "completion": ..., "label": true or false}',
}
_RECIPES = {"pairs": "dpo, orpo, cpo or simpo", "unpaired": "kto", "text": "pretrain or sft"}


class PreferenceData(Data):
    """Batches of pairs, or for kto of single answers."""

    _rows_a_forward = math.inf  # until they are counted

    def _encoder_of(self, rows: Rows, tokenizer: Tokenizer) -> Encoder:
        found, wanted = detect(rows), "unpaired" if self._options.recipe == "kto" else "pairs"
        if found.name != wanted:
            raise InputError(
                f"{found.where}: the row is in the format {found.name!r}, and {self._options.recipe} takes "
                f"{_WANTED[wanted]}. Next step: train with {_RECIPES.get(found.name, 'sft')}, or make such rows"
            )
        return Encoder(tokenizer, found)

    def _batches(self, rows: Rows, **options: Any) -> Batches:
        collate = collated(
            self._options.packing, mismatched=self._options.recipe == "kto", length=self._options.max_length
        )
        look = self._look if self._options.recipe == "kto" and rows is not self._eval else None
        return super()._batches(rows, sequences=self._options.sequences, collate=collate, look=look, **options)

    def _look(self, batches: Sequence[Sequence[Answers]]) -> None:
        """Warns of answers that KTO learns little from."""
        answers = [answer for batch in batches for answer in batch]
        if self._rows_a_forward == math.inf and (few := self._few(len(answers) / max(1, len(batches)))):
            warnings.warn(few, stacklevel=2)
        if len(labels := {answer.label for answer in answers}) == 1:
            warnings.warn(
                f"all of the first {len(answers):,} answers have label {str(*labels).lower()}, and KTO learns from "
                "good answers beside bad ones. Next step: add rows of the other label, or train good answers with sft",
                stacklevel=2,
            )

    def _few(self, rows: float) -> str:
        """A warning where a forward pass has few rows."""
        o = self._options
        if getattr(o, "loss_type", "") != "kto" or rows >= 4:
            return ""
        assert o.max_length is not None
        return (
            f"a forward pass has {rows:.1f} answers, and KTO compares the answers of a forward pass with each other "
            f"(loss_type=kto). Next step: --batch-tokens {16 * o.max_length} (16 x --max-length) or more, or a lower "
            "--max-length"
        )

    def count(self) -> dict[str, int]:
        counts = super().count()
        self._rows_a_forward = counts["rows"] / max(1, counts["batches"])
        return counts

    @property
    def summary(self) -> str:
        few = self._few(self._rows_a_forward)
        return super().summary + (f"\nwarning: {few}" if few else "")

    def _show(self, example: Answers, *, colour: bool) -> str:
        names = ("chosen", "rejected") if example.label is None else ("good" if example.label else "not good",)
        shown = [masking.show(sequence, self._encoder.tokenizer, colour) for sequence in example.sequences]
        return "\n".join(f"{name}: {text}" for name, text in zip(names, shown, strict=True))


def collated(
    packing: bool, *, mismatched: bool, length: int | None
) -> Callable[[Sequence[Answers], int, int], dict[str, Any]]:
    """A function that makes a batch of Answers.

    Beside the arguments of a forward, that of pairs has "digests", which tell its sequences apart; that of single
    answers, which are `mismatched`, has "desirable", bool [N], and as "kl_input_ids" and so on each prompt with the
    answer of the row before it, the first with that of the last: their own of a row that is alone.
    """
    make = packed_batch if packing else padded_batch

    def collate(samples: Sequence[Answers], pad_id: int, multiple: int) -> dict[str, Any]:
        nothing = Example([pad_id], [IGNORED])
        samples = samples or [Answers((nothing,) * (1 if mismatched else 2), 0, True if mismatched else None)]
        sequences = [one for same in zip(*(sample.sequences for sample in samples), strict=True) for one in same]
        batch: dict[str, Any] = {**make(sequences, pad_id, multiple)}
        if not mismatched:
            return batch | {"digests": [_digest(one) for one in sequences]}
        others = [_mismatched(sample, samples[n - 1], length) for n, sample in enumerate(samples)]
        batch["desirable"] = torch.tensor([bool(sample.label) for sample in samples])
        return batch | {f"kl_{key}": value for key, value in make(others, pad_id, multiple).items()}

    return collate


def _mismatched(sample: Answers, other: Answers, length: int | None) -> Example:
    """The prompt of one with the answer of another, as TRL makes them, both of single answers."""
    prompt, answer = sample.sequences[0].ids[: sample.prompt], other.sequences[0].ids[other.prompt :]
    ids = prompt + answer
    return Example(ids, [IGNORED] * max(1, len(prompt)) + ids[max(1, len(prompt)) :]).cut(length or len(ids))


def _digest(sequence: Example) -> str:
    tokens = np.array([sequence.ids, sequence.labels], dtype=np.int32)
    return hashlib.blake2b(tokens.tobytes(), digest_size=12).hexdigest()


# ---- log probabilities ----


class Logps(NamedTuple):
    """Of N sequences, [N] each: log probabilities summed over the tokens of the answer, and their number.

    nll, nll_lengths: the same over the tokens of the cross entropy. aux_loss: what the routers of a mixture of experts
    add to the loss, or 0.
    """

    sums: Tensor
    lengths: Tensor
    nll: Tensor
    nll_lengths: Tensor
    aux_loss: Tensor | float

    def averaged(self, sums: Tensor) -> Tensor:
        """Means per token of sums [N]."""
        return sums / self.lengths.clamp(min=1)


def logps(model: Any, batch: Batch, *, prefix: str = "", prompts: bool = False) -> Logps:
    """The log probabilities of the batch's answers. prompts: the cross entropy counts those of chosen answers as well.

    prefix: of the names in the batch.
    """
    names = ("input_ids", "attention_mask", "cu_seqlens", "max_seqlen")
    inputs = {name: batch[prefix + name] for name in names if prefix + name in batch}
    labels, bounds = batch[prefix + "labels"], inputs.get("cu_seqlens")
    scored = _with_prompts(batch) if prompts else labels
    answers, every = (Targets(one, bounds).labels != IGNORED for one in (labels, scored))
    output = model(**inputs, labels=scored, return_logprobs=True)
    of_answers = torch.where(answers, output.logprobs, 0)
    sums, lengths = sum_per_sequence(of_answers, bounds), sum_per_sequence(answers, bounds)
    nll, nll_lengths = sum_per_sequence(output.logprobs, bounds), sum_per_sequence(every, bounds)
    aux = 0.0 if output.aux_loss is None else model.config.router_aux_loss_coef * output.aux_loss
    return Logps(sums, lengths, nll, nll_lengths, aux)


def _with_prompts(batch: Batch) -> Tensor:
    """The labels, and those of the prompts of chosen answers; none in a batch that counts nothing."""
    labels, bounds = batch["labels"], batch.get("cu_seqlens")
    if bounds is None:
        chosen = batch["attention_mask"].bool()
        chosen = chosen & (torch.arange(len(labels), device=labels.device) < len(labels) // 2)[:, None]
    else:
        chosen = torch.arange(labels.shape[1], device=labels.device)[None] < bounds[len(bounds) // 2]
    return torch.where(chosen & (labels != IGNORED).any(), batch["input_ids"], labels)


def _lengths(labels: Tensor, bounds: Tensor | None) -> Tensor:
    """The number of labels of each sequence that count."""
    return sum_per_sequence(Targets(labels, bounds).labels != IGNORED, bounds)


def pair_counts(batch: Batch, *, prompts: bool = False) -> Tensor:
    """The divisors of a step: labels, pairs, and labels of the cross entropy of chosen answers."""
    lengths, nll = (
        _lengths(labels, batch.get("cu_seqlens"))
        for labels in (batch["labels"], _with_prompts(batch) if prompts else batch["labels"])
    )
    pairs = len(lengths) // 2
    return torch.stack([lengths.sum(), (lengths[:pairs] > 0).sum(), nll[:pairs].sum()])


def answer_counts(batch: Batch) -> Tensor:
    """The divisors of a step: labels, and answers."""
    lengths = _lengths(batch["labels"], batch.get("cu_seqlens"))
    return torch.stack([lengths.sum(), (lengths > 0).sum()])


def over_ranks(model: Any, loss: Tensor) -> Tensor:
    """The sum of the ranks' losses; the gradient is that of the own one, as `parallelize` has it for a model's loss."""
    return loss if model.parallel is None else model.parallel.data.all_reduce(loss)


def mean_of(values: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """For the log: the sum of the values that count, and their number."""
    return torch.where(counted, values.detach(), 0).sum(), counted.sum()


@dataclasses.dataclass(frozen=True)
class PairLoss:
    """The mean over the pairs of a step, and nll_weight times the mean cross entropy of their chosen answers.

    losses: of log probabilities [B] of chosen and rejected answers, and of the same under the reference, or 0, without
    one; per token or summed. nll_prompts: the cross entropy counts the prompts as well.
    """

    losses: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    beta: float
    reference: "Reference | None" = None
    per_token: bool = False
    nll_weight: float = 0.0
    nll_prompts: bool = False

    def __call__(self, model: Any, batch: Batch, count: Tensor) -> tuple[Tensor, Sums]:
        before = None if self.reference is None else self.reference.logps(batch)
        own = logps(model, batch, prompts=self.nll_prompts)
        before = torch.zeros_like(own.sums) if before is None else before
        means = own.averaged(own.sums), own.averaged(before)
        sums, ref = means if self.per_token else (own.sums, before)
        losses, pairs = self.losses(*sums.chunk(2), *ref.chunk(2)), len(sums) // 2
        counted = own.lengths[:pairs] > 0
        loss = torch.where(counted, losses, 0).sum() / count[1]
        # As TRL tells them: with a reference from sums, whatever the loss compares.
        compared = own.sums - before if self.reference is not None else sums
        chosen, rejected = (self.beta * compared.detach()).chunk(2)
        told = {
            "reward_chosen": mean_of(chosen, counted),
            "reward_rejected": mean_of(rejected, counted),
            "reward_accuracy": mean_of((chosen > rejected).to(chosen.dtype), counted),
        }
        if self.nll_weight:
            nll, number = -own.nll[:pairs].sum(), own.nll_lengths[:pairs].sum()
            loss = loss + self.nll_weight * nll / count[2]
            told["nll_loss"] = nll.detach(), number
        return over_ranks(model, loss) + own.aux_loss, told


# ---- the reference ----


class Reference:
    """The model that a run began with. Called by all ranks at once."""

    def __init__(
        self, options: ReferenceOptions, model: Any, data: Data, processes: Processes, load: Callable[[], Any]
    ):
        """load: makes the frozen copy. Where log probabilities are computed now, they are kept in --output-dir."""
        kind = options.reference_kind
        self._model = load() if kind == "model" else model
        self._off = kind == "adapter-off"
        self._table: dict[str, float] | None = None
        if kind == "precompute":
            self._table = _precomputed(Path(options.output_dir) / "reference.json", model, data, processes)

    def logps(self, batch: Batch, prefix: str = "") -> Tensor:
        """[N], the sums over the tokens of the batch's answers."""
        if self._table is not None:
            try:
                found = [self._table[digest] for digest in batch["digests"]]
            except KeyError:
                raise InputError(
                    "reference.json lacks a sequence of the data, which has changed since the run began. Next step: "
                    "the data as before, or a new --output-dir"
                ) from None
            return torch.tensor(found).to(batch["labels"].device, non_blocking=True)
        with torch.no_grad(), _without_adapters(self._model) if self._off else contextlib.nullcontext():
            return logps(self._model, batch, prefix=prefix).sums


def _without_adapters(model: Any) -> contextlib.AbstractContextManager[Any]:
    from ligermodels.training.lora import adapters_off

    return adapters_off(model)


def _precomputed(file: Path, model: Any, data: Data, processes: Processes) -> dict[str, float]:
    """The log probabilities of all sequences of the data under the model, by their digests; of the file if it is there.

    The model is what is loaded, before a checkpoint is. The file is written whole or not at all.
    """

    def read() -> Any:
        return json.loads(file.read_text("utf-8")) if file.is_file() else None

    if (found := processes.from_main(read)) is not None:
        return dict(found)
    if processes.is_main:
        say("computing the reference's log probabilities of all answers")
    own: dict[str, float] = {}
    for batch in _shared_out(data.once(), processes):
        batch = on_device(checked(batch, model.decoder.config.vocab_size), processes.device)
        with torch.no_grad():  # new adapters change nothing yet
            own.update(zip(batch["digests"], logps(model, batch).sums.tolist(), strict=True))
    if processes.mesh is not None:
        for module in model.modules():
            if hasattr(module, "reshard"):  # FSDP2 has gathered parameters, and optimizers are made of sharded ones
                module.reshard()
    table = {digest: value for part in processes.gather(own) for digest, value in part.items()}

    def write() -> None:
        with write_errors(file):
            whole = file.with_name(file.name + ".new")
            whole.write_text(json.dumps(table), "utf-8")
            whole.replace(file)

    processes.from_main(write)
    return table


def _shared_out(batches: Iterator[Batch], processes: Processes) -> Iterator[Batch]:
    """This rank's part of the batches; each rank gets as many, the last one more than once."""
    while group := list(itertools.islice(batches, processes.batch_ranks)):
        yield group[min(processes.batch_rank, len(group) - 1)]
