"""Rollouts: completions that the model in training samples for prompts, and the batches made of them.

The model samples by its own engine, over the parameters that the optimizer updates in place: there is no second engine
and no copy of the weights. The samples depend on the seed, the number of the rollout, and the rank.
"""

import dataclasses
import functools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ligermodels.checkpoint.files import write_errors
from ligermodels.errors import InputError
from ligermodels.generation import generate_many
from ligermodels.processes import Processes
from ligermodels.recipes.base import Recipe
from ligermodels.recipes.data import formats
from ligermodels.recipes.data.examples import IGNORED, Batch, Example, best_fit, check_rendered
from ligermodels.recipes.data.rows import Rows
from ligermodels.recipes.memory import Sizes
from ligermodels.recipes.report import say
from ligermodels.recipes.steps import Metrics, StepBatches, check_ids, on_device
from ligermodels.text.harmony import PROMPT_END, HarmonyDecoder

OFF: dict[str, Any] = dict.fromkeys(
    ("top_k", "top_p", "min_p", "repetition_penalty", "no_repeat_ngram_size", "suppress_tokens",
     "begin_suppress_tokens", "min_new_tokens", "min_length", "max_length", "stop_strings")
)  # fmt: skip
"""Options of `generate` that a checkpoint's generation_config may set. None switches each of them off."""


@dataclass(frozen=True, kw_only=True)
class Prompt(Example):
    """prompt: as in the row, a text or messages. columns: the row's other columns. where: names the row in errors."""

    space = 1  # the capacity of a batch is a number of prompts
    prompt: str | list[dict[str, Any]] = ""
    columns: dict[str, Any] = dataclasses.field(default_factory=dict)
    where: str = ""


@dataclass
class Completion:
    """A sampled completion. ids: end with its stop token, unless it is truncated. rewards: by function.

    text: for people. message: of a chat, what reward functions get of it.
    is_tied: all completions of its prompt have the same reward, so they train nothing. trains: its ids are labels.
    experts: int16 [tokens of prompt and completion but the last, layers, top_k], those that the tokens took, if kept.
    """

    prompt: Prompt
    ids: list[int]
    text: str
    truncated: bool
    message: dict[str, Any] | None = None
    rewards: dict[str, float | None] = dataclasses.field(default_factory=dict)
    reward: float = 0.0
    advantage: float = 0.0
    is_tied: bool = False
    trains: bool = True
    experts: Tensor | None = None

    @property
    def example(self) -> Example:
        labels = self.ids if self.trains else [IGNORED] * len(self.ids)
        return Example(self.prompt.ids + self.ids, [IGNORED] * len(self.prompt.ids) + labels)


class Rollouts(StepBatches):
    """The batches of each step. Each rollout samples completions of the next prompts for `num_iterations` steps.

    The state is the position in the prompts and the number of the rollout; between the steps of a rollout also its
    batches, with the log probabilities of the first step. So a resumed run samples the same as an uninterrupted one.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._rollout, self._steps_left = 0, 0
        self._rolled: list[Batch] = []

    def make(self, examples: Sequence[Any]) -> Any:
        """The prompts themselves: `take` samples their completions, from the model as it is then."""
        return examples

    def take(self) -> list[Batch]:
        if self._steps_left == 0:
            self.prefetch()
            assert self._next is not None
            prompts, _, state = self._next
            self._rolled = self._sample([prompt for group in prompts for prompt in group])
            self._next, self._state = None, state  # not before: where a reward fails, the prompts come again
            self._rollout, self._steps_left = self._rollout + 1, self.recipe.options.num_iterations
        self._steps_left -= 1
        return self._rolled

    def prefetch(self) -> None:
        if self._steps_left == 0:
            super().prefetch()

    def state_dict(self) -> dict[str, Any]:
        rolled = [
            {name: x.cpu() if isinstance(x, Tensor) else x for name, x in batch.items()}
            for batch in (self._rolled if self._steps_left else ())
        ]
        state = {"prompts": super().state_dict(), "rollout": self._rollout, "left": self._steps_left}
        return state | {"batches": rolled, "metrics": self.metrics if self._steps_left else {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state["prompts"])
        self._rollout, self._steps_left, self.metrics = state["rollout"], state["left"], state["metrics"]
        self._rolled = [on_device(batch, self.processes.device) for batch in state["batches"]]

    def _sample(self, prompts: Sequence[Prompt]) -> list[Batch]:
        p, start = self.processes, time.perf_counter()
        completions = self.recipe.roll_out(prompts, self._rollout)
        self.metrics = self.recipe.metrics_of(completions) | {"rollout_seconds": (time.perf_counter() - start, 1)}
        if p.is_main:
            self._write(completions)
        bins = best_fit([completion.example.size for completion in completions], self.recipe.options.batch_tokens)
        bins += [[]] * (max(p.gather(len(bins))) - len(bins))  # a forward is one of all ranks
        batches = [self.recipe.batch_of([completions[n] for n in bin]) for bin in bins]
        return [on_device(check_ids(batch, self.vocab_size), p.device) for batch in batches]

    def _write(self, completions: Sequence[Completion]) -> None:
        """Writes the completions of this rank into DIR/completions, and shows some of the first rollout."""
        file = Path(self.recipe.options.output_dir) / "completions" / f"rollout-{self._rollout:06}.jsonl"
        names = ("text", "rewards", "reward", "advantage", "truncated")
        with write_errors(file):
            file.parent.mkdir(exist_ok=True)
            with file.open("w", encoding="utf-8") as lines:
                for completion in completions:
                    prompt = completion.prompt
                    line = {"where": prompt.where, "prompt": prompt.prompt, "tokens": len(completion.ids)}
                    line |= {name: getattr(completion, name) for name in names}
                    lines.write(json.dumps(line, ensure_ascii=False) + "\n")
        if self._rollout == 0:
            for completion in completions[: self.recipe.options.show]:
                reward = f", reward {completion.reward:g}" if completion.rewards else ""  # a teacher gives none
                say(f"\n{completion.prompt.where}, sampled{reward}:\n{completion.text}")


class Sampling(Recipe):
    """The base of recipes that sample: rows are prompts, and each step trains on completions of some prompts."""

    StepBatches = Rollouts
    chat = False
    """Prompts are messages, not texts."""
    keeps_experts = False
    """Completions have the experts that their tokens took."""

    def check_rows(self, rows: Rows) -> tuple[str, str] | None:
        try:
            self.chat = isinstance(_prompt_of(rows[0])[0], list)
        except InputError as error:
            raise InputError(f"{rows.where(0)}: {error}") from None
        if self.chat and not self.tokenizer.files.templates:
            raise InputError(f"{self.options.model} has no chat template, and prompts of messages need one; give texts")
        if not self.stop_ids:
            raise InputError("the tokenizer has no eos token, so that no completion would end")
        return None

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self.tokenizer.chat_stop_ids if self.chat else self.tokenizer.eos_token_ids

    def process(self, row: Mapping[str, Any]) -> Prompt:
        o, (prompt, tools) = self.options, _prompt_of(row)
        if not isinstance(prompt, list if self.chat else str) or not prompt:
            kind = "messages" if self.chat else "a text"
            raise InputError(f"prompt: expected {kind}, as in the first row, not {prompt!r:.80}")
        if isinstance(prompt, str):
            if o.system_prompt is not None:
                raise InputError("system_prompt: it is for chats, and the row has none; leave it out")
            ids = self.tokenizer.encode(prompt)
        else:
            item: Any = self.read({"messages": prompt, "tools": tools})
            if item.images:
                raise InputError("prompt: completions of prompts with images are not sampled; leave the images out")
            if item.messages[-1]["role"] == "assistant":
                raise InputError("prompt: it ends with what the assistant says, which is for the model to say")
            apply = self.tokenizer.apply_chat_template
            check_rendered(item.messages, (), item.tools, functools.partial(apply, tokenize=False))
            ids = apply(item.messages, tools=item.tools, add_generation_prompt=True)
        if len(ids) + o.max_completion_length > o.max_length:
            raise InputError(
                f"prompt: it has {len(ids)} tokens, and with max_completion_length={o.max_completion_length} more than "
                f"max_length={o.max_length}"
            )
        columns = {name: value for name, value in row.items() if name != "prompt"}
        return Prompt(ids, ids, prompt=prompt, columns=columns, where=getattr(row, "where", ""))

    @property
    def capacity(self) -> int:
        return 1

    def show(self, example: Prompt) -> str:
        return self.tokenizer.decode(example.ids)

    def memory(self, sizes: Sizes, sketch: Any) -> Sizes:
        """The sizes of the model, and of the caches of a rollout on all GPUs."""
        sizes, o = super().memory(sizes, sketch), self.options
        row = sketch.decoder.new_cache(1, o.max_length).nbytes
        elements = row // sketch.decoder.compute_dtype.itemsize
        return dataclasses.replace(sizes, frozen=sizes.frozen + o.rows_at_once * elements)

    def plan(self, steps: int) -> dict[str, str]:
        o = self.options
        samples = f"{o.num_generations} of each prompt, at most {o.max_completion_length:,} tokens, temperature "
        iterations = f"{steps:,}; {o.num_iterations} for each rollout of {o.prompts} prompts, in forwards of at most "
        return {"samples": f"{samples}{o.temperature:g}", "steps": f"{iterations}{o.batch_tokens:,} tokens"}

    def setup(self, model: Any, folder: Path, processes: Processes) -> None:
        super().setup(model, folder, processes)
        self.model = model

    def roll_out(self, prompts: Sequence[Prompt], rollout: int | None) -> list[Completion]:
        """The sampled completions of each prompt. rollout: its number; None: one greedy completion of each prompt.

        All ranks call it together, with the same number of prompts.
        """
        o, p, stops = self.options, self.processes, self.stop_ids
        copies, keeps = 1 if rollout is None else o.num_generations, rollout is not None and self.keeps_experts
        sampled = sample(
            self.model, [prompt.ids for prompt in prompts], copies, max_new_tokens=o.max_completion_length,
            temperature=0.0 if rollout is None else o.temperature, stop_ids=stops,
            seed=(o.seed, rollout or 0, p.batch_rank), rows=o.rollout_rows, together=p.mesh is not None,
            output_experts=keeps,
        )  # fmt: skip
        experts = [taken for _, taken in sampled] if keeps else [None] * len(sampled)
        sampled = [ids for ids, _ in sampled] if keeps else sampled
        completions = []
        for n, (ids, taken) in enumerate(zip(sampled, experts, strict=True)):
            prompt = prompts[n // copies]
            text, message = self.said(prompt, ids)
            completions.append(Completion(prompt, ids, text, ids[-1] not in stops, message, experts=taken))
        return completions

    @functools.cached_property
    def _prompt_end(self) -> list[int]:
        return self.tokenizer.encode(PROMPT_END, add_special_tokens=False)

    def said(self, prompt: Prompt, ids: list[int]) -> tuple[str, dict[str, Any]]:
        """(text, message) of a `Completion`. Of an answer in the harmony format: the text of all messages; the message
        has the channel "final" as its content."""
        if not (self.chat and prompt.ids[-len(self._prompt_end) :] == self._prompt_end):
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
            return text, {"role": "assistant", "content": text}
        decoder = HarmonyDecoder(self.tokenizer)
        return "".join(map(decoder.put, ids)) + decoder.flush(), decoder.message

    def batch_of(self, completions: Sequence[Completion]) -> Batch:
        """The packed batch of these completions."""
        return Recipe.collate(self, [completion.example for completion in completions])

    def metrics_of(self, completions: Sequence[Completion]) -> Metrics:
        """Metrics of the completions of a rollout of this rank."""
        number = len(completions)
        return {
            "completion_length": (sum(len(completion.ids) for completion in completions), number),
            "truncated": (sum(completion.truncated for completion in completions), number),
        }


def _prompt_of(row: Mapping[str, Any]) -> tuple[Any, Any]:
    """(prompt, tools) of a row. The prompt, a text or messages, is `prompt`, or the chat without its last answer."""
    if (prompt := row.get("prompt")) is not None:
        return prompt, row.get("tools")
    item = formats.read(row)
    if not isinstance(item, formats.Conversation):
        raise InputError("the row has no prompt to sample completions of: a text or messages under `prompt`, or a chat")
    return item.messages[: -1 if item.messages[-1]["role"] == "assistant" else None], item.tools


def sample(
    model: Any, prompts: Sequence[list[int]], copies: int, *, max_new_tokens: int, temperature: float,
    stop_ids: Sequence[int], seed: Sequence[int], rows: int | None = None, together: bool = False,
    output_experts: bool = False,
) -> list[Any]:  # fmt: skip
    """`copies` completions of each prompt, one prompt after the other, each up to its first stop id or max_new_tokens.

    They are drawn from softmax(logits / temperature). top_p, penalties and other options of the checkpoint's
    generation_config are off, so that log probabilities belong to the distribution that was drawn from. temperature 0
    is greedy. rows: number sampled at a time, at least one prompt's; a finished one is replaced by the next.
    together: all ranks take the same number of steps, which FSDP needs; they give equally many prompts, or one of them
    none, where the others need one batch; rows that have ended are not replaced.
    output_experts: each is (completion, experts), as in `Completion`.
    """
    how = OFF | dict(max_new_tokens=max_new_tokens, num_return_sequences=copies, pad_token_id=stop_ids[0])
    how |= dict(do_sample=True, temperature=temperature) if temperature > 0 else dict(do_sample=False)
    at_once, trains = max(copies, rows or len(prompts) * copies), model.training

    def own_seed(n: int) -> int:
        return int(np.random.SeedSequence((*seed, n)).generate_state(1, np.uint64)[0])

    if output_experts:
        how |= dict(output_experts=True, return_dict_in_generate=together)
    sampled: list[Any] = []
    model.eval()
    try:
        if not together:
            how |= dict(eos_token_id=list(stop_ids), seed=own_seed(0))
            results = generate_many(model, prompts, batch_size=at_once, **how)
            return [(x[0].tolist(), x[1]) if output_experts else x.tolist() for x in results]
        for n, first in enumerate(range(0, max(1, len(prompts)), at_once // copies)):
            part = prompts[first : first + at_once // copies] or [[stop_ids[0]]]  # of no prompt, nothing is returned
            asked = [torch.tensor(prompt) for prompt in part]
            ids = pad_sequence(asked, True, stop_ids[0], "left").to(model.device)
            mask = pad_sequence([torch.ones_like(prompt) for prompt in asked], True, 0, "left").to(model.device)
            ends = dict(eos_token_id=(), stopping_criteria=_AllRanks(stop_ids), seed=own_seed(n))
            out = model.generate(ids, attention_mask=mask, **how, **ends)
            texts = out.sequences if output_experts else out
            for b, row in enumerate(texts[:, ids.shape[1] :].tolist()):
                end = next((n + 1 for n, index in enumerate(row) if index in stop_ids), len(row))
                first, last = ids.shape[1] - len(part[b // copies]), ids.shape[1] + end - 1
                sampled.append((row[:end], out.experts[b, first:last].cpu()) if output_experts else row[:end])
    finally:
        model.train(trains)
    return sampled[: len(prompts) * copies]


class _AllRanks:
    """A stopping criterion: true once every row of every rank has a stop id."""

    def __init__(self, stop_ids: Sequence[int]):
        self._stop_ids = torch.tensor(stop_ids)
        self._ended: Tensor | None = None

    def __call__(self, ids: Tensor, scores: Any) -> bool:
        ends = torch.isin(ids[:, -1], self._stop_ids.to(ids.device))
        self._ended = ends if self._ended is None else self._ended | ends
        every = self._ended.all().int()
        dist.all_reduce(every, dist.ReduceOp.MIN)
        return bool(every)
