"""Training examples (token ids and labels, which say what the loss counts), and packed batches of them.

The tokenizer's chat template renders the whole conversation, which is tokenised once. The assistant's text in it is
found in one of two ways:
- by the template's own marks, {% generation %} ... {% endgeneration %}, if it has them;
- else by prefix difference: the conversation up to an assistant's message, with the beginning of its turn
  (add_generation_prompt), must be a prefix of the whole. All text that the message adds is trained, as in TRL, with the
  token that ends its turn and the line break that many templates write after it. The offsets of the tokens map
  characters to tokens.
Three kinds of templates render text that is no prefix of the whole, and are handled: an end of text after the last
message only (Phi 3, gpt-oss), reasoning that only the messages after the last question have (Qwen 3, gpt-oss), and the
header of a next answer at the end of every text (old Llama 3), which is not trained. Any other rewriting of earlier
turns is an error, and so is a template that leaves out tools, tool calls or reasoning. gpt-oss' template ends the last
answer with <|return|>, which is trained, and earlier ones with <|end|>, which is not: a model that learned to end an
answer with that would go on. Answers in preference tuning are masked in the same way as the completion of a prompt.
"""

import contextlib
import dataclasses
import functools
import math
import re
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from ligermodels.errors import InputError, TokenizerError
from ligermodels.recipes.data import images as of_images
from ligermodels.recipes.data.formats import REASONING, Answers, Conversation, Text, Tokens
from ligermodels.text import Tokenizer, sandbox
from ligermodels.text.batch import mask_of
from ligermodels.text.chat import ChatTemplates

IGNORED = -100
Batch = dict[str, Any]
"""The arguments of a model's forward."""
_THOUGHT = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)
_THOUGHTS = re.compile(r"(<think>.*?</think>)", re.DOTALL)
_NO_THOUGHT = re.compile(r"<think>\s*(</think>\s*)?\Z")


class Trainable(Protocol):
    """What a run asks of the example that a recipe's `process` makes of a row. `collate` may ask for more."""

    size: int  # its tokens
    space: float  # what it takes of `Recipe.capacity` in a batch
    trained: int  # what the loss counts of it; a row without any is dropped
    ends: bool | None  # whether a token that stops the model is trained, which some row must; None if none need be

    def cut(self, length: int) -> Any: ...  # the example with its first `length` tokens
    def split(self, length: int) -> list[Any]: ...  # several examples, if the recipe has splits = True


@dataclasses.dataclass(frozen=True)
class Example:
    """ids and labels of one document. Each label is the id itself or -100; labels are not shifted.

    The first label is -100, since nothing predicts the first token.
    stops: the ids that stop the model, of which one should be trained; None for plain texts and for rows of ids.
    doubts: what a run warns of, by the names of `batches.WARNINGS`.
    """

    ids: list[int]
    labels: list[int]
    stops: tuple[int, ...] | None = None
    images: of_images.Images | None = None
    doubts: dict[str, str] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def size(self) -> int:
        return len(self.ids)

    @property
    def space(self) -> float:
        """The tokens of a batch that the example takes; infinity if it must be alone in a batch."""
        return math.inf if self.images is not None and self.images.is_alone else self.size

    @property
    def trained(self) -> int:
        """The number of tokens that the loss counts."""
        return len(self.labels) - self.labels.count(IGNORED)

    @property
    def ends(self) -> bool | None:
        """Whether a token that stops the model is trained; None if the example needs none."""
        return None if self.stops is None else any(stop in self.labels for stop in self.stops)

    def cut(self, length: int) -> "Example":
        """The example with its first `length` tokens alone. Raises InputError if that would cut an image."""
        if self.size <= length:
            return self
        if self.images is not None and self.images.token in self.ids[length:]:
            raise InputError(
                f"the row has {self.size} tokens, and max_length={length} would cut its images. Next step: a larger "
                "--max-length, or a smaller max_pixels in the model's preprocessor_config.json"
            )
        return dataclasses.replace(self, ids=self.ids[:length], labels=self.labels[:length])

    def split(self, length: int) -> "list[Example]":
        """Examples of at most `length` tokens each. Images, which are never cut, belong to the first."""
        return [
            dataclasses.replace(
                self,
                ids=self.ids[start : start + length],
                labels=[IGNORED, *self.labels[start + 1 : start + length]],
                images=None if start else self.images,
            )
            for start in range(0, self.size, length)
        ]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Sequences with the same prompt: chosen and rejected, or a single one, whose `label` says whether it is good."""

    sequences: tuple[Example, ...]
    label: bool | None = None

    @property
    def prompt(self) -> int:
        """The number of tokens of the prompt."""
        labels = [[label != IGNORED for label in sequence.labels] for sequence in self.sequences]
        return min(trained.index(True) if any(trained) else len(trained) for trained in labels)

    @property
    def size(self) -> int:
        return sum(sequence.size for sequence in self.sequences)

    space = size

    @property
    def trained(self) -> int:
        """The number of tokens of the answers; 0 if one of them has none, since it then cannot be compared."""
        counts = [sequence.trained for sequence in self.sequences]
        return sum(counts) if all(counts) else 0

    @property
    def ends(self) -> bool | None:
        ends = [sequence.ends for sequence in self.sequences if sequence.ends is not None]
        return any(ends) if ends else None

    @property
    def doubts(self) -> dict[str, str]:
        return {name: text for sequence in self.sequences for name, text in sequence.doubts.items()}

    def cut(self, length: int) -> "Comparison":
        return dataclasses.replace(self, sequences=tuple(sequence.cut(length) for sequence in self.sequences))


def encode_answers(item: Answers, tokenizer: Tokenizer) -> Comparison:
    """The answers as sequences, each after the prompt. Raises InputError, TokenizerError."""
    return Comparison(tuple(encode(sequence, tokenizer) for sequence in item.sequences), item.label)


def encode(
    item: Conversation | Text | Tokens, tokenizer: Tokenizer, *, every_token: bool = False, template: str | None = None
) -> Example:
    """The ids and labels of a conversation, a text or tokens. Raises InputError, TokenizerError.

    every_token: train all tokens of a conversation, or of prompt and completion; else only the assistant's text, or the
    completion. template: replaces the tokenizer's chat template. A text ends with the tokenizer's eos token.
    """
    if isinstance(item, Tokens):
        if wrong := [index for index in item.ids if not 0 <= index < tokenizer.vocab_size]:
            raise InputError(f"input_ids: {wrong[0]} is not an id of the tokenizer, which has {tokenizer.vocab_size}")
        return Example(item.ids, [IGNORED, *item.labels[1:]])
    if isinstance(item, Text):
        ids, mask, doubts = _encode_text(item, tokenizer, every_token)
        return _example(ids, mask, tokenizer.eos_token_ids if item.prompt else None, doubts)
    return _encode_conversation(item, tokenizer, every_token, template)


def _example(
    ids: list[int], mask: Sequence[int], stops: tuple[int, ...] | None, doubts: dict[str, str],
    images: of_images.Images | None = None,
) -> Example:  # fmt: skip
    labels = [index if trained else IGNORED for index, trained in zip(ids, mask, strict=True)]
    labels[:1] = [IGNORED] * len(labels[:1])
    if stops is not None and any(b in stops and a == IGNORED for a, b in pairwise(labels)):
        doubts = doubts | {"empty": "an answer is empty"}
    return Example(ids, labels, stops, images, doubts)


def _encode_text(item: Text, tokenizer: Tokenizer, every_token: bool) -> tuple[list[int], list[int], dict[str, str]]:
    eos, whole, doubts = tokenizer.eos_token_id, item.prompt + item.text, dict[str, str]()
    if eos is None:
        raise InputError("the tokenizer has no eos token, so the model would not learn where a text ends")
    if item.prompt and not every_token:
        spans = [(len(item.prompt), len(whole))]
        ids, mask, doubts = _tokenise(whole, spans, tokenizer, add_special_tokens=True)
    else:
        ids = tokenizer.encode(whole)
        mask = [1] * len(ids)
    if ids[-1:] == [eos]:
        mask[-1] = 1  # an eos that the tokenizer itself adds has no characters
        return ids, mask, doubts
    return [*ids, eos], [*mask, 1], doubts


def _tokenise(
    text: str, spans: list[tuple[int, int]], tokenizer: Tokenizer, add_special_tokens: bool = False
) -> tuple[list[int], list[int], dict[str, str]]:
    """The ids of the text, a mask: 1 for tokens with a character in one of the spans, and doubts about the first."""
    encoded = tokenizer(text, add_special_tokens=add_special_tokens, return_offsets_mapping=True)
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    mask, doubts = mask_of(offsets, spans), dict[str, str]()
    first = mask.index(1) if 1 in mask else 0
    if first and offsets[first][0] < spans[0][0]:  # the token has characters of the prompt
        alone = tokenizer.encode(text[: spans[0][0]], add_special_tokens=False)
        names = [tokenizer.convert_ids_to_tokens(part) for part in (alone[-2:], ids[first - 1 : first + 1])]
        doubts["joined"] = f"the prompt ends with {names[0]}, and with an answer after it with {names[1]}"
    return ids, mask, doubts


# ---- conversations ----


def _encode_conversation(item: Conversation, tokenizer: Tokenizer, every_token: bool, template: str | None) -> Example:
    processor = of_images.processor_of(tokenizer.files.folder) if item.images else None
    if processor is not None and template is None:
        template = processor.chat_template
    said = [n for n, message in enumerate(item.messages) if message["role"] == "assistant"]
    trained = [n for n in said if item.messages[n].get("train", True)]
    messages = [{key: value for key, value in message.items() if key != "train"} for message in item.messages]
    apply = functools.partial(tokenizer.apply_chat_template, tools=item.tools, chat_template=template)
    render = functools.partial(apply, tokenize=False)
    check_rendered(messages, trained, item.tools, render)
    text, marks = render(messages), None
    if every_token and trained != said:
        raise InputError("every token is trained (--no-assistant-only-loss), but a message has train false")
    if not every_token and _has_marks(tokenizer, template, item.tools is not None):
        marks = apply(messages, return_dict=True, return_assistant_tokens_mask=True)["assistant_masks"]
    spans = [(0, len(text))]
    if not every_token and (marks is None or trained != said):
        spans = _spans(text, messages, trained, render, tokenizer)
    ids, mask, doubts = _tokenise(text, spans, tokenizer)
    mask = mask if marks is None else [mark & bit for mark, bit in zip(marks, mask, strict=True)]
    images = None
    if processor is not None:
        ids, mask, images = of_images.add(text, mask, item.images, processor)
    return _example(ids, mask, tokenizer.chat_stop_ids, doubts, images)


def _has_marks(tokenizer: Tokenizer, template: str | None, has_tools: bool) -> bool:
    templates = ChatTemplates(tokenizer.files.templates, {}, tokenizer.files.folder)
    source = templates.choose(template, has_tools).source
    try:
        return sandbox.compile_template(source).has_generation
    except Exception:  # rendering raises the error for it
        return False


def check_rendered(
    messages: Sequence[dict[str, Any]], trained: Sequence[int], tools: Sequence[dict[str, Any]] | None,
    render: Callable[..., str],
) -> None:  # fmt: skip
    """Raises InputError if the chat template leaves out all of the tools, a tool call, or reasoning.

    Rows that have some are rendered once more, with marks in place of names and reasoning. Templates leave out earlier
    reasoning on purpose: the last that is trained is looked for, as if no message followed it.
    """
    calls, schemas = dict[str, str](), [_renamed(tool, f"tool-{n}-end") for n, tool in enumerate(tools or ())]
    marked = [{"content": "", **message} for message in messages]
    for n, message in enumerate(marked):
        if message.get("tool_calls"):
            marks = {f"call-{n}-{at}-end": call for at, call in enumerate(message["tool_calls"])}
            message["tool_calls"] = [_renamed(call, mark) for mark, call in marks.items()]
            calls |= {mark: f"messages[{n}].tool_calls: {call['function']['name']}" for mark, call in marks.items()}
    thoughts = [(n, key) for n in trained for key in REASONING if messages[n].get(key)]
    missing: list[str] = []
    with contextlib.suppress(TokenizerError):  # the rendering without marks raises it too, or does not need them
        if calls or schemas:
            text = render(marked, tools=schemas or None)
            missing = [call for mark, call in calls.items() if mark not in text]
            if schemas and not re.search(r"tool-\d+-end", text):
                missing.append(f"tools: {', '.join(str(_function(tool).get('name')) for tool in tools or ())}")
        if thoughts:
            n, key = thoughts[-1]
            last = marked[n] | {name: "reasoning-end" for at, name in thoughts if at == n}
            if "reasoning-end" not in render([*marked[:n], last]):
                missing.append(f"messages[{n}].{key}")
    if missing:
        raise InputError(
            f"the chat template leaves out {missing[0]}, so the model would not see it. Next step: a template that "
            "writes it (--chat-template FILE), or rows without it"
        )


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The function of a tool or of a call; some have it, or its fields, at the top."""
    return tool["function"] if isinstance(tool.get("function"), Mapping) else tool


def _renamed(tool: Mapping[str, Any], name: str) -> dict[str, Any]:
    function = {**_function(tool), "name": name}
    return {**tool, "function": function} if isinstance(tool.get("function"), Mapping) else function


def _spans(
    text: str, messages: list[dict[str, Any]], trained: list[int], render: Callable[..., str], tokenizer: Tokenizer
) -> list[tuple[int, int]]:
    """(start, end) of the text that each trained message of the assistant adds."""
    spans, eos = [], tokenizer.eos_token or ""
    stops = [stop for stop in map(tokenizer.convert_ids_to_tokens, tokenizer.chat_stop_ids) if stop]
    for n in trained:
        if n == 0:
            raise InputError("messages[0]: the first message is the assistant's; start with a user message")
        what, length = f"the conversation before messages[{n}] once that message follows", None
        for before, message in _ways_to_begin(messages[: n + 1]):
            prompt = render(before, add_generation_prompt=True)
            if (start := _end_of_prompt(prompt, text)) is None:
                prompt = _NO_THOUGHT.sub("", prompt)  # a turn may begin so, and lose it once there are later ones
                start = _end_of_prompt(prompt, text)
            if start is None:
                continue
            what = f"messages[{n}] once there are messages after it"
            upto = text if n == len(messages) - 1 else render([*before, message])
            if (begin := _end_of_prompt(prompt, upto)) is not None:
                turn = _without_header(upto[begin:], prompt, stops)
                if (length := _length_of_turn(turn, text[start:], eos)) is not None:
                    break
        if start is None or length is None:
            raise InputError(
                f"the chat template changes {what}, so the tokens to train are unknown. Likely cause: a template that "
                "writes only some of the messages, or a system prompt or tools, which some write beside the last "
                "message only. Next step: put the system prompt into the first message, or give a template that marks "
                "the assistant's text by {% generation %} ... {% endgeneration %} (--chat-template FILE)"
            )
        spans.append((start, start + length))
    return spans


def _ways_to_begin(messages: list[dict[str, Any]]) -> Iterator[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """The messages before the last, and the last: as they are, then without the reasoning that later ones may end.

    For gpt-oss the content beside tool calls is reasoning, too."""
    yield messages[:-1], messages[-1]
    plain = [*map(_without_reasoning, messages)]
    bare = [{k: v for k, v in m.items() if k != "content"} if m.get("tool_calls") else m for m in plain]
    for shortened in (plain, bare):
        yield messages[:-1], shortened[-1]
        yield shortened[:-1], messages[-1]
        yield shortened[:-1], shortened[-1]


def _without_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message as templates that leave out the reasoning of earlier turns write it."""
    message = {key: value for key, value in message.items() if key not in REASONING}
    if message["role"] == "assistant" and isinstance(message.get("content"), str):
        message["content"] = message["content"].rpartition("</think>")[2].lstrip("\n")
    return message


def _end_of_prompt(prompt: str, text: str) -> int | None:
    """Where the prompt ends in the text that begins with it; None if it does not.

    The text may lack reasoning that the prompt has, as that of messages before its last question.
    """
    end, is_left_out = 0, False
    for n, piece in enumerate(_THOUGHTS.split(prompt)):  # every second one is a thought
        if is_left_out and piece.strip():  # templates leave out the white space around it, too
            piece, end = piece.lstrip(), len(text) - len(text[end:].lstrip())
        if text.startswith(piece, end):
            end, is_left_out = end + len(piece), False
        elif n % 2 == 0:
            return None
        else:
            is_left_out = True
    return end


def _without_header(turn: str, prompt: str, stops: Sequence[str]) -> str:
    """The turn, without the header of a next answer after its stop token. prompt: ends with that header."""
    end = max((turn.rfind(stop) + len(stop) for stop in stops if stop in turn), default=len(turn))
    header = turn[end:].lstrip()
    return turn.removesuffix(header) if header and prompt.endswith(header) else turn


def _length_of_turn(turn: str, rest: str, eos: str) -> int | None:
    """The length of the turn at the beginning of `rest`, or None. turn: the same turn, rendered as the last one."""
    for said in (turn, turn.removesuffix(eos)):
        if said == rest or (said and rest.startswith(said)):
            return len(said)
        said, spaces = _THOUGHT.sub("", said, count=1).lstrip(), len(rest) - len(rest.lstrip())
        if said and rest.startswith(said, spaces):
            return spaces + len(said)
    return None


# ---- an example as text ----


def show(example: Example, tokenizer: Tokenizer) -> str:
    """The example's text with trained tokens in [brackets], and a line of counts."""
    shown, before, end = [], "", 0
    for trained, run in groupby(example.labels, lambda label: label != IGNORED):
        end += len(list(run))
        # Decode from the beginning each time: a run alone may lack the space before it, or a part of a character.
        text = tokenizer.decode(example.ids[:end])
        known = len(before) if text.startswith(before) else len(before.rstrip("\ufffd"))
        piece, before = _printable(text[known:]), text
        shown.append(f"[{piece}]" if trained else piece)
    text = "".join(shown)
    if example.images is not None:
        text = of_images.shorten(text, tokenizer.convert_ids_to_tokens(example.images.token))
    return f"{text}\n({example.trained} of {len(example.ids)} tokens are trained)"


def _printable(text: str) -> str:
    """The text with control characters escaped, since a terminal would act on them."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


# ---- batches ----


def best_fit(lengths: Sequence[float], capacity: int) -> list[list[int]]:
    """Bins of indices whose lengths add up to at most `capacity`, by best fit: longest first, into the fullest bin.

    An index whose length is above the capacity has a bin of its own.
    """
    bins: list[list[int]] = []
    spaces: list[tuple[float, int]] = []  # (space left, bin) in order, of bins that are not full
    for index in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        at = bisect_left(spaces, (lengths[index], -1))
        if at < len(spaces):
            space, bin = spaces.pop(at)
        else:
            space, bin = float(capacity), len(bins)
            bins.append([])
        bins[bin].append(index)
        if space > lengths[index]:
            insort(spaces, (space - lengths[index], bin))
    return bins


def packed_batch(examples: Sequence[Example], pad_id: int = 0, multiple: int = 1) -> Batch:
    """input_ids and labels, int64 [1, T], cu_seqlens, int32 [N + 1], and max_seqlen of N examples.

    Padding up to a multiple of `multiple` is a sequence of its own. Without examples, all tokens are padding. Images
    add their tensors; an example with images for Llama-3.2-Vision is alone, in a batch without cu_seqlens.
    """
    size = sum(example.size for example in examples)
    padding = -size % multiple if size else multiple
    if padding:
        examples = [*examples, Example([pad_id] * padding, [IGNORED] * padding)]
    lengths = [example.size for example in examples]
    input_ids = torch.tensor([[index for example in examples for index in example.ids]])
    batch = {
        "input_ids": input_ids,
        "labels": torch.tensor([[label for example in examples for label in example.labels]]),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int(),
        "max_seqlen": max(lengths),
    }
    images = [example.images for example in examples if example.images is not None]
    if any(item.is_alone for item in images):
        del batch["cu_seqlens"], batch["max_seqlen"]
    return batch | of_images.batch(images, input_ids.shape[1])


def filled_batch(batch: Mapping[str, Any], length: int) -> dict[str, Any]:
    """A packed batch of text, padded to `length` tokens and length + 1 bounds, so that all batches have one shape.

    Each token of padding is a sequence of its own, to which no other token attends. The bounds that are still missing
    belong to empty sequences at the end.
    """
    ids, labels, bounds = (batch[name] for name in ("input_ids", "labels", "cu_seqlens"))
    tokens = ids.shape[1]
    alone = torch.arange(tokens + 1, length + 1, dtype=bounds.dtype, device=bounds.device)
    bounds = torch.cat([bounds, alone])
    return {
        "input_ids": F.pad(ids, (0, length - tokens)),
        "labels": F.pad(labels, (0, length - tokens), value=IGNORED),
        "cu_seqlens": F.pad(bounds, (0, length + 1 - len(bounds)), value=length),
        "max_seqlen": length,
    }
