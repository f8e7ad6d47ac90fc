"""Rollouts: prompts of a file, completions that the model in training samples, their rewards and batches.

The model samples by its own `generate`, over the parameters that the optimizer updates in place: there is no second
engine and no copy of the weights. What is drawn depends on the seed, the number of the rollout, and the rank.
"""

import dataclasses
import itertools
import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from ligermodels.processes import Processes
from ligermodels.recipes.batches import Batches
from ligermodels.recipes.data import Data
from ligermodels.recipes.formats import Conversation, Format, normalise
from ligermodels.recipes.loop import Batch, Feed, checked, on_device
from ligermodels.recipes.masking import IGNORED, Example
from ligermodels.recipes.options import GRPOOptions, RolloutOptions
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
    own: Example | None = None  # the row's own completion, behind its prompt

    @property
    def size(self) -> int:
        return len(self.ids)

    @property
    def trained(self) -> int:
        return len(self.ids) if self.own is None else self.own.trained

    @property
    def ends(self) -> bool | None:
        return None if self.own is None else self.own.ends

    def cut(self, length: int) -> "Prompt":
        """With its own completion cut. Raises InputError where one has no room: a question cut short is another."""
        if self.size + self.room > length:
            raise InputError(
                f"prompt: it has {self.size} tokens, and with max_completion_length={self.room} more than "
                f"max_length={length}"
            )
        return self if self.own is None else dataclasses.replace(self, own=self.own.cut(length))


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

    _options: RolloutOptions

    def _encoder_of(self, rows: Rows, tokenizer: Tokenizer) -> Any:
        first = rows[0]
        if not isinstance(first.get("prompt"), str | list):
            raise InputError(
                f"{rows.where(0)}: the row has no prompt; expected a text or messages under `prompt`, and any other "
                f"columns for the reward functions. It has {', '.join(first) or 'nothing'}"
            )
        chat = isinstance(first["prompt"], list)
        return self._that_ends(PromptEncoder(tokenizer, chat, self._options.max_completion_length))

    def _that_ends(self, encoder: PromptEncoder) -> PromptEncoder:
        """The encoder. Raises InputError where completions would not begin or end."""
        if encoder.chat and not encoder.tokenizer.files.templates:
            raise InputError(
                f"{self._options.model} has no chat template, and prompts of messages need one; give texts"
            )
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
            "samples": f"{o.copies} of each prompt, of at most {o.max_completion_length:,} tokens, at temperature "
            f"{o.drawn_at:g}",
            "steps": f"{o.num_iterations} for each rollout of {o.prompts} prompts, in forwards of at most "
            f"{o.batch_tokens:,} tokens",
        }

    def _batches(self, rows: Rows, **options: Any) -> Batches:
        o = self._options
        assert o.max_length is not None
        number = o.rows_at_once if rows is self._eval else 1
        return Batches(
            _Located(rows), self._encoders[id(rows)], length=o.max_length, rows_per_batch=number, packing=False,
            seed=o.seed, skip_bad=o.skip_bad, collate=_prompts, digest=self._digest, **options,
        )  # fmt: skip

    def _show(self, example: Any, *, colour: bool) -> str:
        return self._encoder.tokenizer.decode(example.ids)


def cache_size(options: RolloutOptions, sketch: Any) -> int:
    """Elements of the KV cache of a rollout of all GPUs."""
    config = sketch.config.get_text_config()
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert options.max_length is not None
    return int(options.rows_at_once * options.max_length * per_token)


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

    @property
    def size(self) -> int:
        return self.prompt.size + len(self.ids)

    @property
    def example(self) -> Example:
        return Example(self.prompt.ids + self.ids, [IGNORED] * self.prompt.size + self.ids)


def sample(
    model: Any, prompts: Sequence[list[int]], copies: int, *, max_new_tokens: int, temperature: float,
    stop_ids: Sequence[int], seeds: Iterator[int], rows: int | None = None, together: bool = False,
    vocab_size: int | None = None,
) -> list[list[int]]:  # fmt: skip
    """Completions, `copies` of each prompt after each other, each up to its first stop id or max_new_tokens.

    They are drawn from softmax(logits / temperature) and nothing else: what the checkpoint's generation_config says
    of top_p, penalties and so on is left out, so that log probabilities are those of what was drawn. temperature 0 is
    greedy.
    rows: so many are sampled at a time; one that has ended makes room for another. together: all ranks take the same
    number of steps, which FSDP needs; they give equally many prompts, and rows that have ended write on.
    vocab_size: ids from it on are not drawn.
    """
    options: dict[str, Any] = dict(max_new_tokens=max_new_tokens, num_return_sequences=copies, pad_token_id=stop_ids[0])
    options |= _PLAIN | dict(do_sample=True, temperature=temperature) if temperature > 0 else _GREEDY
    if vocab_size is not None and vocab_size < model.vocab_size:
        options["suppress_tokens"] = list(range(vocab_size, model.vocab_size))
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


def complete(
    model: Any, prompts: Sequence[Prompt], rollout: int | None, options: RolloutOptions, encoder: PromptEncoder,
    processes: Processes, vocab_size: int | None = None,
) -> list[Completion]:  # fmt: skip
    """`copies` of each prompt; rollout None: one of each, greedily. Called by all ranks at once, each with its prompts,
    of which all have as many."""
    copies, stops = 1 if rollout is None else options.copies, encoder.stop_ids
    found = sample(
        model, [prompt.ids for prompt in prompts], copies, max_new_tokens=options.max_completion_length,
        temperature=0.0 if rollout is None else options.drawn_at, stop_ids=stops,
        seeds=_seeds(options.seed, rollout or 0, processes.batch_rank), rows=options.rollout_rows,
        together=processes.mesh is not None, vocab_size=vocab_size,
    )  # fmt: skip
    decode = encoder.tokenizer.decode
    return [
        Completion(prompts[n // copies], ids, decode(ids, skip_special_tokens=True), ids[-1] not in stops)
        for n, ids in enumerate(found)
    ]


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Completions with their rewards. Called as `complete`."""

    options: GRPOOptions
    encoder: PromptEncoder
    rewards: Rewards
    processes: Processes
    _told: set[str] = dataclasses.field(default_factory=set, init=False)

    def __call__(self, model: Any, prompts: Sequence[Prompt], rollout: int | None) -> list[Completion]:
        """A group of each prompt; rollout None: one of each, greedily. Raises the errors of rewards on all ranks."""
        o, p = self.options, self.processes
        copies = 1 if rollout is None else o.num_generations
        completions = complete(model, prompts, rollout, o, self.encoder, p)
        with p.raise_on_all():
            given = self.judge(completions)
        totals = [self.rewards.total(values) for values in given]
        judged = [
            dataclasses.replace(one, rewards=values, reward=total)
            for one, values, total in zip(completions, given, totals, strict=True)
        ]
        if rollout is None:
            return judged
        rewards = torch.tensor([reward for part in p.gather(totals) for reward in part]).reshape(-1, copies)
        advantages, tied = group_advantages(rewards, o.scale), (rewards == rewards[:, :1]).all(1)
        if p.is_main and bool(tied.all()) and "tied" not in self._told:
            self._told.add("tied")
            warnings.warn(
                "in this step all completions of each prompt have the same reward, so that it teaches nothing, and the "
                "loss is 0. If steps stay so (`tied` in metrics.jsonl): the reward is constant, too hard or too easy, "
                "or the completions are all alike. Next step: look at completions.jsonl; then another reward, other "
                "prompts, a larger --num-generations or a higher --temperature",
                stacklevel=2,
            )
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


def _seeds(*numbers: int) -> Iterator[int]:
    for n in itertools.count():
        yield int(np.random.SeedSequence([*numbers, n]).generate_state(1, np.uint64)[0])


# ---- batches ----


TOLD = ("completion_length", "truncated", "rollout_seconds")


def told_rows(completions: Sequence[Completion], seconds: float | None) -> list[tuple[float, int]]:
    """Of each of TOLD the sum, and the number of what is summed. seconds: of the rollout, told with one batch of it."""
    number = len(completions)
    return [
        (sum(len(one.ids) for one in completions), number),
        (sum(one.truncated for one in completions), number),
        (seconds or 0.0, seconds is not None),
    ]


def forward_of(examples: Sequence[Example], options: RolloutOptions, pad_id: int) -> Batch:
    """A batch, packed or padded."""
    return {**(packed_batch if options.packing else padded_batch)(examples, pad_id)}


def told_names(rewards: Rewards) -> list[str]:
    """The names of the rows of "told" in a batch."""
    return [
        "reward", "reward_std", "tied", *TOLD,
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
    sequences, dropped = [], [one.truncated and options.mask_truncated_completions for one in completions]
    for one, drop in zip(completions, dropped, strict=True):
        sequences.append(dataclasses.replace(one.example, labels=[IGNORED] * one.size) if drop else one.example)
    batch = forward_of(sequences, options, pad_id)
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
        *told_rows(completions, seconds),
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

    def __init__(
        self, feed: Feed, model: Any, options: RolloutOptions,
        sample: Callable[[Any, Sequence[Prompt], int], Sequence[Any]], batch_of: Callable[[Any, float | None], Batch],
    ):  # fmt: skip
        """feed: of prompts. sample: makes Completions, or Examples in a step that samples none, of the model, prompts
        and the number of the rollout. batch_of: makes a forward of some; in the first of a rollout it gets the seconds
        that this took."""
        self.feed, self.model, self._options, self._sample, self._batch_of = feed, model, options, sample, batch_of
        self._prompts, self._rollout, self._left = feed.state_dict(), 0, 0
        self._batches: list[Batch] = []
        self._file = Path(options.output_dir) / "completions.jsonl"
        self._is_trimmed = False

    def take(self) -> list[Batch]:
        if self._left == 0:
            self._batches = self._sampled()
            self._prompts = self.feed.state_dict()  # not before: where a reward fails, they are sampled again
            self._rollout, self._left = self._rollout + 1, self._options.num_iterations
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
            "prompts": self._prompts, "rollout": self._rollout, "left": self._left,
            "batches": batches if self._left else [],
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.feed.load_state_dict(state["prompts"])
        self._prompts, self._rollout, self._left = state["prompts"], state["rollout"], state["left"]
        self._batches = [on_device(batch, self.feed.processes.device) for batch in state["batches"]]

    def _sampled(self) -> list[Batch]:
        o, p = self._options, self.feed.processes
        prompts = [prompt for batch in self.feed.take() for prompt in batch["prompts"]]
        start = time.perf_counter()
        found = self._sample(self.model, prompts, self._rollout)
        seconds = time.perf_counter() - start
        if p.is_main:
            self._write([one for one in found if isinstance(one, Completion)])
        assert o.batch_tokens is not None and o.max_length is not None
        if o.packing:
            bins = best_fit([one.size for one in found], o.batch_tokens)
        else:
            rows = max(1, o.batch_tokens // o.max_length)
            bins = [list(range(len(found)))[n : n + rows] for n in range(0, len(found), rows)]
        if p.mesh is not None:  # a forward is one of all ranks
            number = torch.tensor(len(bins), device=p.device)
            dist.all_reduce(number, dist.ReduceOp.MAX)
            bins = spread(bins, int(number))
        batches = [self._batch_of([found[n] for n in bin], None if at else seconds) for at, bin in enumerate(bins)]
        return [on_device(checked(batch, self.feed.vocab_size), p.device) for batch in batches]

    def _write(self, completions: Sequence[Completion]) -> None:
        """Adds a line to completions.jsonl for each of this rank, and shows those of the first rollout."""
        lines = []
        for one in completions:
            judged = {"reward": one.reward, "rewards": one.rewards, "advantage": one.advantage} if one.rewards else {}
            line = {"rollout": self._rollout, "prompt": one.prompt.prompt, "completion": one.text, **judged,
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
            for one in completions[: self._options.show]:
                reward = f"\nreward {one.reward:g}" if one.rewards else ""
                say(f"\n{one.prompt.where}, sampled:\n{one.text}{reward}")
