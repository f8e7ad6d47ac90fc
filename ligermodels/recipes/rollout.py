"""Rollouts: prompts of a file, groups of completions that the model in training samples, their rewards and batches.

The model samples by its own `generate`, over the parameters that the optimizer updates in place: there is no second
engine and no copy of the weights. What is drawn depends on the seed, the number of the rollout, and the rank.
"""

import dataclasses
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ligermodels.checkpoint.files import write_errors
from ligermodels.errors import InputError, LigermodelsError
from ligermodels.generation import generate_many
from ligermodels.layers.policy import group_advantages
from ligermodels.recipes.batches import Batches
from ligermodels.recipes.data import Data
from ligermodels.recipes.formats import Conversation, Format, normalise
from ligermodels.recipes.loop import Batch, Feed, Processes, on_device
from ligermodels.recipes.masking import IGNORED, Example
from ligermodels.recipes.options import GRPOOptions
from ligermodels.recipes.packing import best_fit, packed_batch, padded_batch, spread
from ligermodels.recipes.report import say
from ligermodels.recipes.rewards import Rewards
from ligermodels.recipes.rows import Row, Rows
from ligermodels.text import Tokenizer

# ---- prompts ----


@dataclasses.dataclass(frozen=True)
class Prompt:
    """prompt: as the row has it, a text or messages. columns: the row's others. where: the row, for errors."""

    ids: list[int]
    prompt: str | list[dict[str, Any]]
    columns: dict[str, Any]
    where: str
    room: int  # tokens that a completion may have
    ends: None = None

    @property
    def size(self) -> int:
        return len(self.ids)

    @property
    def trained(self) -> int:
        return len(self.ids)

    def cut(self, length: int) -> "Prompt":
        """Itself. Raises InputError where a completion has no room behind it: a question cut short is another."""
        if self.size + self.room > length:
            raise InputError(
                f"prompt: it has {self.size} tokens, and with max_new_tokens={self.room} more than length={length}"
            )
        return self


@dataclasses.dataclass(frozen=True)
class PromptEncoder:
    """Makes Prompts of rows. chat: prompts are messages, not texts."""

    tokenizer: Tokenizer
    chat: bool
    room: int

    def __call__(self, row: Mapping[str, Any]) -> Prompt:
        prompt = row.get("prompt")
        if not isinstance(prompt, list if self.chat else str) or not prompt:
            raise InputError(
                f"prompt: expected {'messages' if self.chat else 'a text'}, as in the first row, not {prompt!r:.80}"
            )
        columns = {name: value for name, value in row.items() if name != "prompt"}
        where = getattr(row, "where", "")
        if isinstance(prompt, str):
            return Prompt(self.tokenizer.encode(prompt), prompt, columns, where, self.room)
        item = normalise({"messages": prompt, "tools": row.get("tools")}, _MESSAGES)
        assert isinstance(item, Conversation), "that is what messages become"
        if item.images:
            raise InputError("prompt: completions of prompts with images are not sampled; leave the images out")
        if item.messages[-1]["role"] == "assistant":
            raise InputError("prompt: it ends with what the assistant says, which is for the model to say")
        text = self.tokenizer.apply_chat_template(
            item.messages, tools=item.tools, tokenize=False, add_generation_prompt=True
        )
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return Prompt(ids, prompt, columns, where, self.room)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self.tokenizer.chat_stop_ids if self.chat else self.tokenizer.eos_token_ids


_MESSAGES = Format("messages", "")


class _Located(Rows):
    """Rows that know where they are."""

    def __init__(self, rows: Rows):
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = Row(self._rows[index], None)
        row.where = self._rows.where(index)  # type: ignore[attr-defined]
        return row

    def where(self, index: int) -> str:
        return self._rows.where(index)


class PromptData(Data):
    """A batch of it is one prompt, and one of the evaluation several: "prompts", and their ids as input_ids."""

    _options: GRPOOptions

    def _encoder_of(self, rows: Rows, tokenizer: Tokenizer) -> Any:
        first = rows[0]
        if not isinstance(first.get("prompt"), str | list):
            raise InputError(
                f"{rows.where(0)}: the row has no prompt; expected a text or messages under `prompt`, and any other "
                f"columns for the reward functions. It has {', '.join(first) or 'nothing'}"
            )
        chat = isinstance(first["prompt"], list)
        if chat and not tokenizer.files.templates:
            raise InputError(
                f"{self._options.model} has no chat template, and prompts of messages need one; give texts"
            )
        encoder = PromptEncoder(tokenizer, chat, self._options.max_new_tokens)
        if not encoder.stop_ids:
            raise InputError("the tokenizer names no eos token, so that no completion would end")
        return encoder

    @property
    def encoder(self) -> PromptEncoder:
        return self._encoder

    def first(self) -> Prompt:
        """That of the first row. Raises InputError."""
        row = _Located(self._rows)[0]
        try:
            prompt: Prompt = self._encoder(row)
        except LigermodelsError as error:
            raise InputError(f"{self._rows.where(0)}: {error}") from error
        return prompt

    @property
    def summary(self) -> str:
        return f"{len(self._rows):,} prompts"

    def plan(self, counts: Mapping[str, int] | None) -> dict[str, str]:
        o = self._options
        return {
            "tokens": "" if counts is None else f"{counts['tokens']:,} of prompts a pass",
            "samples": f"{o.group} of each prompt, of at most {o.max_new_tokens:,} tokens, at temperature "
            f"{o.temperature:g}",
            "steps": f"{o.iterations} for each rollout of {o.prompts} prompts, in forwards of at most "
            f"{o.batch_tokens:,} tokens",
        }

    def _batches(self, rows: Rows, **options: Any) -> Batches:
        o = self._options
        assert o.length is not None
        number = o.rows_at_once if rows is self._eval else 1
        return Batches(
            _Located(rows), self._encoders[id(rows)], length=o.length, rows_per_batch=number, packing=False,
            seed=o.seed, skip_bad=o.skip_bad, collate=_prompts, digest=self._digest, **options,
        )  # fmt: skip

    def _show(self, example: Any, *, colour: bool) -> str:
        return self._encoder.tokenizer.decode(example.ids)


def _prompts(prompts: Sequence[Prompt], pad_id: int, multiple: int) -> dict[str, Any]:
    ids, _ = _left_padded([prompt.ids for prompt in prompts], pad_id)
    return {"input_ids": ids, "labels": ids, "prompts": list(prompts)}


def _left_padded(rows: Sequence[list[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Ids and mask, int64 [B, S]."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad_id] * (width - len(row)) + row for row in rows])
    return ids, torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])


# ---- completions ----


@dataclasses.dataclass(frozen=True)
class Completion:
    """ids: with the token that ended it, unless it was truncated. rewards: by function."""

    prompt: Prompt
    ids: list[int]
    text: str
    truncated: bool
    rewards: dict[str, float | None] = dataclasses.field(default_factory=dict)
    reward: float = 0.0
    advantage: float = 0.0
    is_tied: bool = False  # all of its group have the same reward, and teach nothing
    deviation: float = 0.0  # standard deviation of all rewards of the rollout


def sample(
    model: Any, prompts: Sequence[list[int]], copies: int, *, max_new_tokens: int, temperature: float,
    stop_ids: Sequence[int], seeds: Iterator[int], rows: int | None = None, together: bool = False,
) -> list[list[int]]:  # fmt: skip
    """Completions, `copies` of each prompt after each other, each up to its first stop id or max_new_tokens.

    They are drawn from softmax(logits / temperature) and nothing else: what the checkpoint's generation_config says
    of top_p, penalties and so on is left out, so that log probabilities are those of what was drawn. temperature 0 is
    greedy.
    rows: so many are sampled at a time; one that has ended makes room for another. together: all ranks take the same
    number of steps, which FSDP needs; they give equally many prompts, and rows that have ended write on.
    """
    options: dict[str, Any] = dict(max_new_tokens=max_new_tokens, num_return_sequences=copies, pad_token_id=stop_ids[0])
    options |= _PLAIN | dict(do_sample=True, temperature=temperature) if temperature > 0 else _GREEDY
    at_once = len(prompts) * copies if rows is None else max(copies, rows)
    trains = model.training
    model.eval()
    try:
        if not together:
            found = generate_many(
                model, prompts, batch_size=at_once, seed=next(seeds), eos_token_id=list(stop_ids), **options
            )
            return [row.tolist() for row in found]
        every: list[list[int]] = []
        number = max(1, at_once // copies)
        for first in range(0, len(prompts), number):
            ids, mask = _left_padded(prompts[first : first + number], stop_ids[0])
            out = model.generate(
                ids.to(model.device), attention_mask=mask.to(model.device), seed=next(seeds), eos_token_id=(),
                stopping_criteria=_AllRanks(stop_ids), **options,
            )  # fmt: skip
            every += [_ended(row, stop_ids) for row in out[:, ids.shape[1] :].tolist()]
        return every
    finally:
        model.train(trains)


_GREEDY: dict[str, Any] = {"do_sample": False} | dict.fromkeys(
    ("repetition_penalty", "no_repeat_ngram_size", "suppress_tokens", "begin_suppress_tokens", "min_new_tokens",
     "min_length", "max_length", "stop_strings")
)  # fmt: skip
_PLAIN = _GREEDY | dict.fromkeys(("top_k", "top_p", "min_p"))
"""What a checkpoint may set, switched off."""


def _ended(ids: list[int], stop_ids: Sequence[int]) -> list[int]:
    """Up to the first stop id, which stays."""
    return ids[: next((n + 1 for n, index in enumerate(ids) if index in stop_ids), len(ids))]


class _AllRanks:
    """A stopping criterion: all rows of all ranks have a stop id. Until then those that have write on."""

    def __init__(self, stop_ids: Sequence[int]):
        self._stop_ids = torch.tensor(stop_ids)
        self._ended: Tensor | None = None

    def __call__(self, ids: Tensor, scores: Any) -> bool:
        ends = torch.isin(ids[:, -1], self._stop_ids.to(ids.device))
        self._ended = ends if self._ended is None else self._ended | ends
        every = self._ended.all().int()
        dist.all_reduce(every, dist.ReduceOp.MIN)
        return bool(every)


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Completions with their rewards. Called by all ranks at once, each with its prompts, of which all have as many."""

    options: GRPOOptions
    encoder: PromptEncoder
    rewards: Rewards
    processes: Processes

    def __call__(self, model: Any, prompts: Sequence[Prompt], rollout: int | None) -> list[Completion]:
        """A group of each prompt; rollout None: one of each, greedily. Raises the errors of rewards on all ranks."""
        o, p = self.options, self.processes
        copies, stops = 1 if rollout is None else o.group, self.encoder.stop_ids
        found = sample(
            model, [prompt.ids for prompt in prompts], copies, max_new_tokens=o.max_new_tokens,
            temperature=0.0 if rollout is None else o.temperature, stop_ids=stops,
            seeds=_seeds(o.seed, rollout or 0, p.batch_rank), rows=o.rollout_rows, together=p.mesh is not None,
        )  # fmt: skip
        decode = self.encoder.tokenizer.decode
        completions = [
            Completion(prompts[n // copies], ids, decode(ids, skip_special_tokens=True), ids[-1] not in stops)
            for n, ids in enumerate(found)
        ]
        given: list[dict[str, float | None]] = []
        error: LigermodelsError | None = None
        try:
            given = self.judge(completions)
        except LigermodelsError as found_error:
            error = found_error
        totals = [self.rewards.total(values) for values in given]
        everyone = self._gathered((totals, error))
        for _, other in everyone:
            if other is not None:
                raise other
        judged = [
            dataclasses.replace(one, rewards=values, reward=total)
            for one, values, total in zip(completions, given, totals, strict=True)
        ]
        if rollout is None:
            return judged
        rewards = torch.tensor([reward for part, _ in everyone for reward in part]).reshape(-1, copies)
        advantages, tied = group_advantages(rewards, o.scale), (rewards == rewards[:, :1]).all(1)
        first, deviation = p.batch_rank * len(prompts), float(rewards.std())
        return [
            dataclasses.replace(
                one, advantage=float(advantages[first + n // copies, n % copies]),
                is_tied=bool(tied[first + n // copies]), deviation=deviation,
            )
            for n, one in enumerate(judged)
        ]  # fmt: skip

    def judge(self, completions: Sequence[Completion]) -> list[dict[str, float | None]]:
        """What each reward function gives each. Raises InputError."""
        prompts = [one.prompt for one in completions]
        names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
        columns = {name: [prompt.columns.get(name) for prompt in prompts] for name in names}
        for taken in ("prompts", "completions", "completion_ids", "completion"):
            columns.pop(taken, None)
        texts: list[Any] = [one.text for one in completions]
        if self.encoder.chat:
            texts = [[{"role": "assistant", "content": text}] for text in texts]
        return self.rewards(
            [prompt.prompt for prompt in prompts], texts, [one.ids for one in completions], columns,
            [prompt.where for prompt in prompts],
        )  # fmt: skip

    def _gathered(self, own: Any) -> list[Any]:
        """That of each rank."""
        if self.processes.mesh is None:
            return [own]
        parts = [None] * self.processes.size
        dist.all_gather_object(parts, own)
        return parts


def _seeds(*numbers: int) -> Iterator[int]:
    for n in itertools.count():
        yield int(np.random.SeedSequence([*numbers, n]).generate_state(1, np.uint64)[0])


# ---- batches ----


def told_names(rewards: Rewards) -> list[str]:
    """The names of the rows of "told" in a batch."""
    return [
        "reward", "reward_std", "tied", "completion_length", "truncated", "rollout_seconds",
        *(f"reward_{name}" for name in rewards.functions if len(rewards.functions) > 1),
    ]  # fmt: skip


def policy_batch(
    completions: Sequence[Completion], options: GRPOOptions, rewards: Rewards, pad_id: int, seconds: float | None = None
) -> Batch:
    """A batch of completions behind their prompts, packed or padded, with what `PolicyLoss` reads beside it.

    places [N, C] int64: where in the flat log probabilities of the batch those of the completions are, and mask [N, C]
    bool, whether they count. advantages [N]. counts: those of layers.policy. told [K, 2]: sums, and the number of what
    is summed, for the log. Of no completions, all is padding.
    seconds: of the rollout, told with one of its batches.
    """
    sequences, dropped = [], [one.truncated and options.drop_truncated for one in completions]
    for one, drop in zip(completions, dropped, strict=True):
        labels = [IGNORED] * len(one.ids) if drop else one.ids
        sequences.append(Example(one.prompt.ids + one.ids, [IGNORED] * one.prompt.size + labels))
    make = packed_batch if options.packing else padded_batch
    batch: Batch = {**make(sequences, pad_id)}
    if options.packing:
        starts = batch["cu_seqlens"].tolist()
    else:
        starts = range(0, batch["input_ids"].numel(), batch["input_ids"].shape[1])
    shape = max(1, len(completions)), max((len(one.ids) for one in completions), default=1)
    places, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
    for n, (one, drop) in enumerate(zip(completions, dropped, strict=True)):
        first = starts[n] + one.prompt.size - 1  # the log probability of a token is where it is predicted
        places[n, : len(one.ids)] = torch.arange(first, first + len(one.ids))
        mask[n, : len(one.ids)] = not drop
    batch |= dict(places=places, mask=mask)
    batch["advantages"] = torch.tensor([one.advantage for one in completions] or [0.0])
    batch["counts"] = torch.stack([mask.sum(), torch.tensor(len(completions)), mask.any().long()]).float()
    number = len(completions)
    rows = [
        (sum(one.reward for one in completions), number),
        (sum(one.deviation for one in completions), number),
        (sum(one.is_tied for one in completions), number),
        (sum(len(one.ids) for one in completions), number),
        (sum(one.truncated for one in completions), number),
        (seconds or 0.0, seconds is not None),
    ]
    for name in rewards.functions:
        values = [value for one in completions if (value := one.rewards.get(name)) is not None]
        rows.append((sum(values), len(values)))
    batch["told"] = torch.tensor(rows, dtype=torch.float64)[: len(told_names(rewards))]
    return batch


class Rollouts:
    """The batches of each step: a rollout of the next prompts, which `iterations` steps train on.

    The state is the position in the prompts and the number of the rollout; between the steps of a rollout also its
    batches, with the log probabilities of the first step. So a run that is resumed samples what it would have sampled.
    """

    def __init__(self, feed: Feed, model: Any, sampler: Sampler, pad_id: int):
        """feed: of prompts."""
        self.feed, self.model, self.sampler, self.pad_id = feed, model, sampler, pad_id
        self._rollout, self._left = 0, 0
        self._batches: list[Batch] = []
        self._file = Path(sampler.options.out) / "completions.jsonl"
        self._is_trimmed = False

    def take(self) -> list[Batch]:
        if self._left == 0:
            self._batches = self._sampled()
            self._rollout, self._left = self._rollout + 1, self.sampler.options.iterations
        self._left -= 1
        return self._batches

    def make_next(self) -> None:
        """The next prompts. Their completions are sampled when they are taken, from the model as it is then."""
        if self._left == 0:
            self.feed.make_next()

    def state_dict(self) -> dict[str, Any]:
        batches = [
            {key: x.cpu() if isinstance(x, Tensor) else x for key, x in batch.items()} for batch in self._batches
        ]
        return {
            "prompts": self.feed.state_dict(), "rollout": self._rollout, "left": self._left,
            "batches": batches if self._left else [],
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.feed.load_state_dict(state["prompts"])
        self._rollout, self._left = state["rollout"], state["left"]
        self._batches = [on_device(batch, self.sampler.processes.device) for batch in state["batches"]]

    def _sampled(self) -> list[Batch]:
        sampler, o, p = self.sampler, self.sampler.options, self.sampler.processes
        prompts = [prompt for batch in self.feed.take() for prompt in batch["prompts"]]
        start = time.perf_counter()
        completions = sampler(self.model, prompts, self._rollout)
        seconds = time.perf_counter() - start
        if p.is_main:
            self._write(completions)
        assert o.batch_tokens is not None and o.length is not None
        if o.packing:
            bins = best_fit([one.prompt.size + len(one.ids) for one in completions], o.batch_tokens)
        else:
            rows = max(1, o.batch_tokens // o.length)
            bins = [list(range(len(completions)))[n : n + rows] for n in range(0, len(completions), rows)]
        if p.mesh is not None:  # a forward is one of all ranks
            number = torch.tensor(len(bins), device=p.device)
            dist.all_reduce(number, dist.ReduceOp.MAX)
            bins = spread(bins, int(number))
        return [
            on_device(
                policy_batch(
                    [completions[n] for n in bin], o, sampler.rewards, self.pad_id, seconds if first else None
                ),
                p.device,
            )
            for first, bin in zip(itertools.chain([True], itertools.repeat(False)), bins, strict=False)
        ]

    def _write(self, completions: Sequence[Completion]) -> None:
        """Adds a line to completions.jsonl for each of this rank, and shows those of the first rollout."""
        lines = []
        for one in completions:
            line = {"rollout": self._rollout, "prompt": one.prompt.prompt, "completion": one.text,
                    "reward": one.reward, "rewards": one.rewards, "advantage": one.advantage,
                    "tokens": len(one.ids), "truncated": one.truncated, "where": one.prompt.where}  # fmt: skip
            lines.append(json.dumps(line, ensure_ascii=False) + "\n")
        with write_errors(self._file):
            if not self._is_trimmed:  # of steps after the checkpoint that a run was resumed from
                self._is_trimmed = True
                before = self._file.read_text("utf-8").splitlines(keepends=True) if self._file.is_file() else []
                kept = [line for line in before if line.endswith("\n") and json.loads(line)["rollout"] < self._rollout]
                self._file.write_text("".join(kept), "utf-8")
            with self._file.open("a", encoding="utf-8") as file:
                file.writelines(lines)
        if self._rollout == 0:
            for one in completions[: self.sampler.options.show]:
                say(f"\n{one.prompt.where}, sampled:\n{one.text}\nreward {one.reward:g}")
