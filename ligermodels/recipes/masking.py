"""Ids and labels of a training example: which tokens the loss counts.

A conversation is rendered once, whole, by the tokenizer's chat template, and tokenised once. What the assistant says
in it is told
- by the template's own marks, {% generation %} ... {% endgeneration %}, where it has them;
- else by prefix difference: the conversation up to an assistant's message, with the beginning of its turn
  (add_generation_prompt), must be what the whole begins with; what the message adds to it is trained, as in TRL: the
  token that ends its turn, and the line break that many templates write after that. So do the recipes of preferences.
  The offsets of the tokens map characters to tokens.
Two habits of templates are known to the second way, because the whole does not begin with what they render: an end of
text after the last message only (Phi 3), and reasoning that is left out of all turns but the last (Qwen 3). A template
that rewrites earlier turns otherwise is an error.
"""

import dataclasses
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal

from ligermodels.errors import InputError, TokenizerError
from ligermodels.recipes.formats import Conversation, Format, Item, Text, Tokens, normalise
from ligermodels.recipes.images import Images, add, processor_of, shortened
from ligermodels.text import Tokenizer, sandbox
from ligermodels.text.chat import ChatTemplates

IGNORED = -100
TrainOn = Literal["assistant", "last", "all"]
_THOUGHT = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)
NO_THOUGHT = re.compile(r"<think>\s*</think>\s*\Z")


@dataclasses.dataclass(frozen=True)
class Example:
    """ids and labels of one document, each label the id itself or -100. Labels are not shifted.

    The first label is -100: nothing predicts the first token.
    stops: the ids that stop the model, of which one is to be trained; None of a plain text, and where the author of
    the ids decides that.
    """

    ids: list[int]
    labels: list[int]
    stops: tuple[int, ...] | None = None
    images: Images | None = None

    @property
    def size(self) -> int:
        return len(self.ids)

    @property
    def trained(self) -> int:
        """The number of tokens that the loss counts."""
        return len(self.labels) - self.labels.count(IGNORED)

    @property
    def ends(self) -> bool | None:
        """Whether a token that stops the model is trained; None where that is not asked."""
        return None if self.stops is None else any(stop in self.labels for stop in self.stops)

    def cut(self, length: int) -> "Example":
        """The first tokens. Raises InputError where that would cut an image."""
        if self.size <= length:
            return self
        if self.images is not None and self.images.token in self.ids[length:]:
            raise InputError(
                f"the row has {self.size} tokens, and max_length={length} would cut its images. Next step: a larger "
                "--max-length, or a smaller max_pixels in the model's preprocessor_config.json"
            )
        return Example(self.ids[:length], self.labels[:length], self.stops, self.images)


@dataclasses.dataclass(frozen=True)
class Encoder:
    """Makes Examples of rows: `Encoder(tokenizer, detect(rows))(rows[0])`. The options are those of `encode`."""

    tokenizer: Tokenizer
    format: Format
    train_on: TrainOn = "assistant"
    chat_template: str | None = None
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __call__(self, row: Mapping[str, Any]) -> Example:
        return encode(
            normalise(row, self.format),
            self.tokenizer,
            train_on=self.train_on,
            chat_template=self.chat_template,
            variables=self.variables,
        )


def encode(
    item: Item,
    tokenizer: Tokenizer,
    *,
    train_on: TrainOn = "assistant",
    chat_template: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> Example:
    """The ids and labels of a conversation, a text or tokens.

    train_on: of a conversation, what the assistant says ("assistant"), says last ("last"), or everything ("all").
    chat_template: the name of one of the tokenizer's templates or the text of another; variables: those that it reads,
    such as enable_thinking. A text ends with the tokenizer's eos token; of a prompt and its completion, the completion
    and eos are trained.
    Raises InputError, TokenizerError.
    """
    if train_on not in ("assistant", "last", "all"):
        raise InputError(f"train_on is 'assistant', 'last' or 'all', not {train_on!r}")
    if isinstance(item, Conversation):
        processor = processor_of(tokenizer.files.folder) if item.images else None
        if processor is not None and chat_template is None:
            chat_template = processor.chat_template
        ids, mask = _encode_conversation(item, tokenizer, train_on, chat_template, dict(variables or {}))
        found = None
        if processor is not None:
            ids, mask, found = add(ids, mask, item.images, processor)
        return dataclasses.replace(_example(ids, mask, tokenizer.chat_stop_ids), images=found)
    if isinstance(item, Text):
        ids, mask = _encode_text(item, tokenizer)
        return _example(ids, mask, tokenizer.eos_token_ids if item.prompt else None)
    if isinstance(item, Tokens):
        if wrong := [index for index in item.ids if not 0 <= index < tokenizer.vocab_size]:
            raise InputError(f"input_ids: {wrong[0]} is not an id of the tokenizer, which has {tokenizer.vocab_size}")
        return Example(item.ids, [IGNORED, *item.labels[1:]])
    raise InputError(
        f"the row is a preference ({type(item).__name__.lower()}); it has no single text to train on. Next step: train "
        "with dpo or kto"
    )


def _example(ids: list[int], mask: Sequence[int], stops: tuple[int, ...] | None) -> Example:
    labels = [index if trained else IGNORED for index, trained in zip(ids, mask, strict=True)]
    labels[:1] = [IGNORED] * len(labels[:1])
    return Example(ids, labels, stops)


# ---- texts ----


def _encode_text(item: Text, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    if tokenizer.eos_token_id is None:
        raise InputError("the tokenizer names no eos token, so that the model would not learn where a text ends")
    whole = item.prompt + item.text
    if item.prompt:
        ids, mask = _masked(whole, [(len(item.prompt), len(whole))], tokenizer, add_special_tokens=True)
    else:
        ids = tokenizer(whole)["input_ids"]
        mask = [1] * len(ids)
    if ids[-1:] != [tokenizer.eos_token_id]:
        ids, mask = [*ids, tokenizer.eos_token_id], [*mask, 1]
    elif mask:
        mask[-1] = 1  # eos that the tokenizer itself adds has no characters
    return ids, mask


def _masked(
    text: str, spans: list[tuple[int, int]], tokenizer: Tokenizer, add_special_tokens: bool = False
) -> tuple[list[int], list[int]]:
    """The ids of the text, and 1 for each that has a character of the spans."""
    try:
        found = tokenizer(text, add_special_tokens=add_special_tokens, return_offsets_mapping=True)
        return found["input_ids"], _mask_of(found["offset_mapping"], spans)
    except TokenizerError:
        # SentencePiece knows no offsets of a text that it normalises. The same error comes again if it is another.
        return _masked_by_prefixes(text, spans, lambda t: tokenizer.encode(t, add_special_tokens=add_special_tokens))


def _mask_of(offsets: Sequence[tuple[int, int]], spans: list[tuple[int, int]]) -> list[int]:
    """As text.batch.mask_of, which looks at each token, in half the time: spans are few, and offsets ascend."""
    end = len(offsets)
    while end and offsets[end - 1] == (0, 0):  # special tokens that were added after the text
        end -= 1
    mask = [0] * len(offsets)
    for start, stop in spans:
        first = bisect_right(offsets, start, hi=end, key=lambda token: max(token[1], token[0] + 1))
        last = bisect_left(offsets, stop, hi=end, key=lambda token: token[0])
        mask[first:last] = [1] * (last - first)
    return mask


def _masked_by_prefixes(
    text: str, spans: list[tuple[int, int]], ids_of: Callable[[str], list[int]]
) -> tuple[list[int], list[int]]:
    """As _masked, from the ids of the text up to each edge of a span."""
    ids = ids_of(text)
    mask = [0] * len(ids)
    for edges in spans:
        start, end = (len(_prefix_ids(text, edge, ids, ids_of)) for edge in edges)
        mask[start:end] = [1] * (end - start)
    return ids, mask


def _prefix_ids(text: str, edge: int, ids: list[int], ids_of: Callable[[str], list[int]]) -> list[int]:
    prefix = ids_of(text[:edge])
    if ids[: len(prefix)] != prefix:
        raise InputError(
            f"the tokens of {text[max(0, edge - 20) : edge]!r} change with the text after it, and this tokenizer tells "
            "no offsets: the tokens to train are not known. Next step: take tokenizer.json from the checkpoint's "
            "repository"
        )
    return prefix


# ---- conversations ----


def _encode_conversation(
    item: Conversation, tokenizer: Tokenizer, train_on: TrainOn, chat_template: str | None, variables: dict[str, Any]
) -> tuple[list[int], list[int]]:
    said = [n for n, message in enumerate(item.messages) if message.get("role") == "assistant"]
    trained = [n for n in said if item.messages[n].get("train", True)]
    messages = [{key: value for key, value in message.items() if key != "train"} for message in item.messages]
    options: dict[str, Any] = {"tools": item.tools, "chat_template": chat_template, **variables}

    def render(messages: list[dict[str, Any]], add_generation_prompt: bool = False) -> str:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, **options
        )

    if train_on == "all":
        if trained != said:
            raise InputError("train_on='all' trains every message, but the row has one with train false")
        ids = tokenizer.encode(render(messages), add_special_tokens=False)
        return ids, [1] * len(ids)
    if train_on == "last":
        trained = [n for n in trained if n == said[-1]]
    if _has_marks(tokenizer, chat_template, item.tools is not None):
        found = tokenizer.apply_chat_template(
            messages,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **options,
        )
        ids, mask = found["input_ids"], found["assistant_masks"]
        return ids, mask if trained == said else _only(mask, said, trained)
    text = render(messages)
    spans = _spans(text, messages, trained, render, tokenizer.eos_token or "")
    return _masked(text, spans, tokenizer)


def _has_marks(tokenizer: Tokenizer, chat_template: str | None, has_tools: bool) -> bool:
    templates = ChatTemplates(tokenizer.files.templates, {}, tokenizer.files.folder)
    source = templates.choose(chat_template, has_tools).source
    try:
        return sandbox.compile_template(source).has_generation
    except Exception:  # rendering says what is wrong with it
        return False


def _only(mask: list[int], said: list[int], trained: list[int]) -> list[int]:
    """The mask of the assistant's tokens without those of messages that are not trained."""
    runs = [(value, len(list(run))) for value, run in groupby(mask)]
    if sum(value for value, _ in runs) != len(said):
        raise InputError(
            f"the chat template marks {sum(value for value, _ in runs)} stretches as the assistant's, but it has "
            f"{len(said)} messages: which of them are trained is not known. Next step: leave train and weight out of "
            "the messages"
        )
    owners = iter(said)
    return [bit for value, size in runs for bit in [int(value and next(owners) in trained)] * size]


def _spans(
    text: str,
    messages: list[dict[str, Any]],
    trained: list[int],
    render: Callable[..., str],
    eos: str,
) -> list[tuple[int, int]]:
    """The (start, end) in the text of what each trained message of the assistant adds to it."""
    spans = []
    for n in trained:
        if n == 0:
            raise InputError("messages[0]: the first message is the assistant's; start with a user message")
        prompt = render(messages[:n], add_generation_prompt=True)
        if not text.startswith(prompt):
            prompt = NO_THOUGHT.sub("", prompt)  # with enable_thinking=False, Qwen 3 begins a turn with it
        if not text.startswith(prompt):
            raise _rewritten(n)
        if n == len(messages) - 1:
            spans.append((len(prompt), len(text)))
            continue
        upto = render(messages[: n + 1])
        if not upto.startswith(prompt):
            raise _rewritten(n)
        spans.append((len(prompt), len(prompt) + _said_in(upto[len(prompt) :], text[len(prompt) :], eos, n)))
    return spans


def _said_in(turn: str, rest: str, eos: str, n: int) -> int:
    """The number of characters with which the turn, rendered as the last one, stands at the beginning of the rest."""
    for said in (turn, turn.removesuffix(eos)) if eos else (turn,):
        if said and rest.startswith(said):
            return len(said)
        without_thought = _THOUGHT.sub("", said, count=1).lstrip()
        after_space = rest.lstrip()
        if without_thought and after_space.startswith(without_thought):
            return len(rest) - len(after_space) + len(without_thought)
    raise _rewritten(n)


def _rewritten(n: int) -> InputError:
    return InputError(
        f"the chat template writes the conversation up to messages[{n}] otherwise once there are messages after it, so "
        "that the tokens to train are not known. Likely cause: a system prompt or tools, which some templates write "
        "beside the last message only. Next step: put the system prompt into the first message, or give a template "
        "that marks the assistant's text by {% generation %} ... {% endgeneration %} (--chat-template FILE)"
    )


# ---- what is trained, to look at ----


def show(example: Example, tokenizer: Tokenizer, colour: bool = False) -> str:
    """The example's text with what is trained in [brackets], or in green and the rest dim, and a line of counts."""
    opening, other, closing = ("\x1b[32m", "\x1b[2m", "\x1b[0m") if colour else ("[", "", "]")
    shown, before, end = [], "", 0
    for trained, run in groupby(example.labels, lambda label: label != IGNORED):
        end += len(list(run))
        # From the beginning each time: the text of a run alone may lack the space before it, or a part of a character.
        text = tokenizer.decode(example.ids[:end])
        known = len(before) if text.startswith(before) else len(before.rstrip("\ufffd"))
        piece, before = _printable(text[known:]), text
        shown.append(f"{opening}{piece}{closing}" if trained else f"{other}{piece}{closing if other else ''}")
    text = "".join(shown)
    if example.images is not None:
        text = shortened(text, tokenizer.convert_ids_to_tokens(example.images.token))
    counts = f"{example.trained} of {len(example.ids)} tokens are trained"
    return f"{text}\n({counts})"


def _printable(text: str) -> str:
    """The text with control characters spelled out: a terminal would obey them."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
