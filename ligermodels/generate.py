"""Prefill and decode: one loop, `_decode`, of which `generate` makes whole rows and `generate_iter` a stream.

The prompt runs once and only its last position gets logits; then one token a row and step, over a KV cache
sized for the whole request. Where cached keys no longer fit the rotary tables (longrope past its original
length, counted in tokens of the longest row), the cache is emptied and the whole text runs once more. Choosing
the next token happens on the model's device. The host reads one small tensor a step where something has to be
decided or shown there (stop ids, stop strings, streaming), and nothing at all before the end otherwise.

The order and the meaning of the sampling options are those of transformers' `GenerationMixin`:
repetition penalty, the caller's processor, temperature, top_k, top_p, min_p.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.text import StopStrings, StreamDecoder

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]

_LONGEST = 2**24
"""Tokens of prompt and continuation: from there on fp32, in which positions are turned, does not tell them apart."""
_LEAST, _MOST = 1e-20, 1e20
"""What logits are divided by, so that fp32 holds the quotient."""


class Streamer(Protocol):
    """What `generate(streamer=...)` calls, with CPU tensors: put(prompt [B, S]), put(ids [B]) a step, end().

    The prompt comes first, as in transformers, so that its `TextStreamer(skip_prompt=True)` works here.
    """

    def put(self, value: Tensor) -> None: ...

    def end(self) -> None: ...


def generate(
    model: nn.Module,
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    stop_strings: str | Sequence[str] | None = None,
    tokenizer: Any = None,
    streamer: Streamer | None = None,
    logits_processor: LogitsProcessor | None = None,
    **inputs: Any,
) -> Tensor:
    """Continues each row of `input_ids` until a stop id, a stop string or `max_new_tokens`.

    Of the checkpoint's generation_config only the eos and pad ids are applied: its temperature, top_p and so
    on are not, so that the call says all that shapes the text. The default is greedy.

    Args:
        input_ids: [B, S] int64 or int32, on the model's device. Rows of unequal length: pad on the left.
        attention_mask: [B, S], 1 for a token and 0 for padding. None: no padding.
        max_new_tokens: the most tokens added to a row, at least 1.
        temperature: 0 takes the likeliest token; otherwise logits are divided by it and a token is drawn.
        top_k: draw among the k likeliest (ties with the k-th included); None or 0: all.
        top_p: draw among the fewest likeliest tokens whose probabilities reach top_p, in (0, 1].
        min_p: draw among tokens at least min_p times as likely as the likeliest, in [0, 1].
        repetition_penalty: > 1 makes every token of the row so far, prompt included, less likely
            (https://arxiv.org/abs/1909.05858). Greedy decoding obeys it too.
        seed: draws come from a generator of their own; None: from torch's global one.
        eos_token_id: stop ids, of which those outside the vocabulary never come; None: those of
            model.generation_config and model.config together; (): none.
        pad_token_id: fills rows that finished early; None: the checkpoint's, else the first stop id.
        stop_strings: a row ends when its new text contains one; needs `tokenizer`. The ids keep the string.
        streamer: receives ids as they come, see `Streamer`.
        logits_processor: (ids [B, S + step], logits [B, V] fp32) -> logits, before temperature and cuts.
        inputs: what else the model's forward takes, for the prompt: pixel_values and the like.

    Returns:
        [B, S + new] ids, prompt included; new is the length of the longest row. They are ordinary tensors,
        which may be trained on.

    Raises:
        InputError: arguments out of range or that do not fit, padding on the right, ids outside the
            vocabulary, NaN logits.
    """
    request = _Request.checked(
        model, input_ids, attention_mask, max_new_tokens,
        _Sampler(temperature, top_k, top_p, min_p, repetition_penalty, seed),
        eos_token_id, pad_token_id, stop_strings, tokenizer, logits_processor, inputs,
    )  # fmt: skip
    if streamer is not None:
        if not callable(getattr(streamer, "put", None)) or not callable(getattr(streamer, "end", None)):
            raise InputError(f"streamer is a {type(streamer).__name__}; it must have put and end, see Streamer")
        streamer.put(input_ids.cpu())
    to_host = streamer is not None or bool(request.eos_ids or request.stop_strings)
    ids = input_ids
    for step in _decode(request, to_host=to_host):
        ids = step.ids
        if streamer is not None:
            assert step.new is not None, "streaming reads every step"
            streamer.put(step.new)
    if streamer is not None:
        streamer.end()
    return ids.clone()  # a view of a buffer that is longer where rows stopped early


def generate_iter(
    model: nn.Module,
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    stop_strings: str | Sequence[str] | None = None,
    tokenizer: Any = None,
    logits_processor: LogitsProcessor | None = None,
    **inputs: Any,
) -> Iterator[Tensor]:
    """`generate` as an iterator: yields the new ids [B] of each step, on the CPU, pad ids for finished rows.

    Arguments and errors are those of `generate`; they are checked by the call, before the first step.
    Leaving the loop early is the way to stop.
    """
    request = _Request.checked(
        model, input_ids, attention_mask, max_new_tokens,
        _Sampler(temperature, top_k, top_p, min_p, repetition_penalty, seed),
        eos_token_id, pad_token_id, stop_strings, tokenizer, logits_processor, inputs,
    )  # fmt: skip
    return (step.new for step in _decode(request, to_host=True) if step.new is not None)


def penalize_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divides positive and multiplies negative logits [B, V] by `penalty` where seen [B, V] is True."""
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Logits [B, V] with all below the k-th largest of their row at -inf."""
    kth = logits.topk(min(k, logits.shape[-1]), dim=-1).values[..., -1:]
    return logits.masked_fill(logits < kth, -math.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Logits [B, V] with all but the fewest largest whose probabilities sum to p or more at -inf."""
    ordered, order = logits.sort(dim=-1, descending=True)
    probabilities = ordered.softmax(-1)
    # a token goes if the likelier ones reach p without it: never the first, which has exactly 0 before it
    drop = probabilities.cumsum(-1) - probabilities >= p
    return logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -math.inf)


def keep_min_p(logits: Tensor, p: float) -> Tensor:
    """Logits [B, V] with all less than p times as likely as the likeliest of their row at -inf."""
    probabilities = logits.softmax(-1)
    return logits.masked_fill(probabilities < p * probabilities.amax(-1, keepdim=True), -math.inf)


@dataclass(frozen=True)
class _Sampler:
    """The next token from the logits; checked when made."""

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float
    seed: int | None

    def __post_init__(self):
        if not _is_number(self.temperature) or not (self.temperature == 0 or _LEAST <= self.temperature < math.inf):
            raise InputError(
                f"temperature={self.temperature!r} must be 0 (greedy) or a finite positive number, from {_LEAST:g} up"
            )
        if self.top_k is not None and (not _is_int(self.top_k) or self.top_k < 0):
            raise InputError(f"top_k={self.top_k!r} must be a positive integer, or 0 or None for no limit")
        if self.top_p is not None and (not _is_number(self.top_p) or not 0 < self.top_p <= 1):
            raise InputError(f"top_p={self.top_p!r} must be above 0 and at most 1; 1 or None keeps every token")
        if self.min_p is not None and (not _is_number(self.min_p) or not 0 <= self.min_p <= 1):
            raise InputError(f"min_p={self.min_p!r} must be from 0 to 1; 0 or None keeps every token")
        if not _is_number(self.repetition_penalty) or not _LEAST <= self.repetition_penalty <= _MOST:
            raise InputError(
                f"repetition_penalty={self.repetition_penalty!r} must be finite and positive, from {_LEAST:g} to "
                f"{_MOST:g}; 1 is no penalty"
            )
        if self.seed is not None and (not _is_int(self.seed) or not -(2**63) <= self.seed < 2**64):
            raise InputError(f"seed={self.seed!r} must be an integer of 64 bits, or None for torch's own generator")
        if self.temperature == 0 and (self.top_k or self.min_p or (self.top_p is not None and self.top_p < 1)):
            warnings.warn(
                "top_k, top_p and min_p change nothing at temperature=0, which always takes the likeliest "
                "token; pass temperature=1.0 (or any positive number) to draw tokens",
                stacklevel=5,
            )

    def generator(self, device: torch.device) -> torch.Generator | None:
        return None if self.seed is None else torch.Generator(device).manual_seed(int(self.seed))

    def pick(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        """Token ids [B] from logits [B, V] fp32."""
        if self.temperature == 0:
            return logits.argmax(-1)
        if self.temperature != 1:
            logits = logits / self.temperature
        if self.top_k:
            logits = keep_top_k(logits, int(self.top_k))
        if self.top_p is not None and self.top_p < 1:
            logits = keep_top_p(logits, self.top_p)
        if self.min_p:
            logits = keep_min_p(logits, self.min_p)
        # the draw of torch.multinomial(logits.softmax(-1), 1) from the same random numbers, without its host
        # sync: argmax p / E with E exponential is argmax logits - log E
        return (logits - torch.empty_like(logits).exponential_(generator=generator).log_()).argmax(-1)


@dataclass(frozen=True, kw_only=True)
class _Request:
    """A call of generate whose arguments have been checked against the model and each other."""

    model: Any
    input_ids: Tensor  # [B, S]
    mask: Tensor | None  # [B, S] bool; None: no padding
    longest: int  # tokens of the longest row, padding left out
    max_new_tokens: int
    sampler: _Sampler
    eos_ids: tuple[int, ...]
    pad_id: int  # 0 where nothing can be padded
    stop_strings: tuple[str, ...]
    tokenizer: Any
    logits_processor: LogitsProcessor | None
    inputs: dict[str, Any]  # of the prompt, besides ids and mask

    @classmethod
    def checked(
        cls,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        max_new_tokens: int,
        sampler: _Sampler,
        eos_token_id: int | Sequence[int] | None,
        pad_token_id: int | None,
        stop_strings: str | Sequence[str] | None,
        tokenizer: Any,
        logits_processor: LogitsProcessor | None,
        inputs: dict[str, Any],
    ) -> "_Request":
        if not _is_int(max_new_tokens) or max_new_tokens < 1:
            raise InputError(f"max_new_tokens={max_new_tokens!r} must be an integer of at least 1")
        mask, longest = _checked_prompt(model, input_ids, attention_mask)
        if inputs and (unknown := inputs.keys() - model.extra_inputs):
            raise InputError(
                f"{', '.join(sorted(unknown))}: neither an option of generate nor an input of {type(model).__name__}; "
                f"inputs of its own: {', '.join(sorted(model.extra_inputs)) or 'none, it reads text only'}"
            )

        if input_ids.shape[1] + max_new_tokens > _LONGEST:
            raise InputError(
                f"max_new_tokens={max_new_tokens} is too large: with the prompt at most {_LONGEST} tokens. Memory is "
                "set aside for all of them"
            )
        if logits_processor is not None and not callable(logits_processor):
            raise InputError(f"logits_processor is a {type(logits_processor).__name__}; it must be callable")

        if not isinstance(stop_strings, str | Sequence | None) or isinstance(stop_strings, bytes):
            raise InputError(f"stop_strings is a {type(stop_strings).__name__}; it must be a string or a list of them")
        strings = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings or ())
        if not all(isinstance(string, str) for string in strings):
            raise InputError(f"stop_strings holds {strings!r:.200}; they must be strings")
        if not all(strings):
            raise InputError("stop_strings holds an empty string, which every text contains; leave it out")
        if strings and tokenizer is None:
            raise InputError("stop_strings are searched for in the text: pass tokenizer=Tokenizer.from_hub(...) too")

        def saved(name: str) -> list[Any]:
            return [model.generation_config.get(name), getattr(model.config, name, None)]

        vocabulary = range(model.config.vocab_size)
        eos_ids = tuple(dict.fromkeys(_flat_ids(saved("eos_token_id") if eos_token_id is None else eos_token_id)))
        if pad_token_id is not None and (not _is_int(pad_token_id) or pad_token_id not in vocabulary):
            raise InputError(f"pad_token_id={pad_token_id!r} is outside the vocabulary (0 to {len(vocabulary) - 1})")
        if eos_token_id is None:  # some checkpoints write -1 for "none"
            eos_ids = tuple(i for i in eos_ids if i in vocabulary)
        pad_ids = [pad_token_id, *_flat_ids(saved("pad_token_id")), *eos_ids]
        pad_id = next((i for i in pad_ids if i is not None and i in vocabulary), None)
        if pad_id is None and (strings or eos_ids) and input_ids.shape[0] > 1:
            raise InputError(
                "a row that stops before the others must be filled up, and this checkpoint names no pad id "
                "within its vocabulary: pass pad_token_id"
            )

        if strings and not callable(getattr(tokenizer, "decode", None)):
            raise InputError(f"tokenizer is a {type(tokenizer).__name__}; stop_strings need a ligermodels.Tokenizer")

        limit = getattr(model.config, "max_position_embeddings", None)
        length = longest + int(max_new_tokens)
        if limit is not None and length > limit:
            warnings.warn(
                f"prompt and new tokens may reach {length} positions, and the model is made for {limit} "
                "(max_position_embeddings): text beyond tends to be poor; shorten prompt or max_new_tokens",
                stacklevel=3,
            )
        return cls(
            model=model, input_ids=input_ids, mask=mask, longest=longest, max_new_tokens=int(max_new_tokens),
            sampler=sampler, eos_ids=eos_ids, pad_id=pad_id or 0, stop_strings=strings, tokenizer=tokenizer,
            logits_processor=logits_processor, inputs={k: v for k, v in inputs.items() if v is not None},
        )  # fmt: skip


def _is_int(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _flat_ids(ids: Any, depth: int = 0) -> list[int]:
    """Ids from an int, None, a tensor, or lists of those within each other, as config files have them."""
    if ids is None:
        return []
    if isinstance(ids, Tensor):
        ids = ids.tolist()
    if _is_int(ids) and abs(ids) < 2**63:
        return [int(ids)]
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes) or depth > 3:
        raise InputError(f"eos and pad ids must be integers of 64 bits or lists of them, not {ids!r:.200}")
    return [i for part in ids for i in _flat_ids(part, depth + 1)]


def _checked_prompt(model: Any, input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor | None, int]:
    """Raises InputError for a prompt that cannot be continued.

    Returns the mask as bool, None if all True, and the number of tokens in the longest row.
    """
    if not isinstance(input_ids, Tensor):
        raise InputError(
            f"input_ids is a {type(input_ids).__name__}; it must be a tensor of token ids: "
            "torch.tensor([tokenizer.encode(text)])"
        )
    if input_ids.dim() != 2:
        raise InputError(
            f"input_ids has shape {list(input_ids.shape)}; it must be [batch, length]"
            + (": pass input_ids[None] for one prompt" if input_ids.dim() == 1 else "")
        )
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise InputError(f"input_ids are {input_ids.dtype}; token ids must be torch.int64 or torch.int32")
    if input_ids.numel() == 0:
        raise InputError(
            f"input_ids has shape {list(input_ids.shape)}: an empty prompt has nothing to continue; "
            "start with the bos token (Tokenizer.encode adds it where the model has one)"
        )
    if attention_mask is not None and (not isinstance(attention_mask, Tensor) or attention_mask.is_complex()):
        kind = attention_mask.dtype if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise InputError(f"attention_mask is a {kind}; it must be a tensor, 1 at tokens and 0 at padding")
    if model.device.type == "meta":
        raise InputError("the model is on the meta device: it has shapes and no weights; load or initialise it")
    for name, tensor in (("input_ids", input_ids), ("attention_mask", attention_mask)):
        if tensor is not None and tensor.device != model.device:
            raise InputError(f"{name} is on {tensor.device}, the model on {model.device}: use .to(model.device)")
    low, high = torch.stack(input_ids.aminmax()).tolist()
    rows = model.get_input_embeddings().num_embeddings  # more than vocab_size where the head has none for pictures
    if low < 0 or high >= rows:
        raise InputError(
            f"input_ids reach from {low} to {high}, the vocabulary from 0 to {rows - 1}; "
            "likely the tokenizer of another model, or a label value such as -100"
        )
    if attention_mask is None:
        return None, input_ids.shape[1]
    if attention_mask.shape != input_ids.shape:
        raise InputError(
            f"attention_mask has shape {list(attention_mask.shape)}, input_ids {list(input_ids.shape)}; "
            "they must be equal"
        )
    mask = attention_mask != 0
    tokens = mask.sum(1)
    plain = (mask == attention_mask).all()
    shortest, longest, ends_in_token, is_plain = torch.stack([*tokens.aminmax(), mask[:, -1].all(), plain]).tolist()
    if not is_plain:
        raise InputError("attention_mask must be 1 at tokens and 0 at padding, and it holds something else")
    if not ends_in_token:
        row = int((~mask[:, -1]).nonzero()[0])
        raise InputError(
            f"row {row} of attention_mask ends in padding, which would tear continuation and prompt apart: "
            "pad on the left (zeros first in attention_mask), as Tokenizer.encode_batch does by default"
        )
    return None if shortest == mask.shape[1] else mask, longest


class _Step(NamedTuple):
    ids: Tensor  # [B, S + steps so far], a view of a buffer that later steps extend
    new: Tensor | None  # [B] on the CPU, where the host reads


@torch.no_grad()
def _decode(request: _Request, *, to_host: bool) -> Iterator[_Step]:
    """The one loop. Reads the device where `to_host`, and where not, only after the last step."""
    model, prompt, sampler = request.model, request.input_ids, request.sampler
    rows, start = prompt.shape
    end = start + request.max_new_tokens
    device = prompt.device

    ids = prompt.new_zeros(rows, end, dtype=torch.int64)
    ids[:, :start] = prompt
    cache = model.new_cache(rows, end)
    generator = sampler.generator(device)
    key_mask = positions = None
    if request.mask is not None:
        key_mask = torch.ones(rows, end, dtype=torch.bool, device=device)
        key_mask[:, :start] = request.mask
        positions = _positions(request.mask)

    eos = torch.tensor(request.eos_ids, dtype=torch.int64, device=device)
    can_stop = bool(request.eos_ids or request.stop_strings)
    finished = torch.zeros(rows, dtype=torch.bool, device=device) if can_stop and rows > 1 else None
    done = [False] * rows  # what the host knows of `finished`
    texts = []
    if request.stop_strings:
        texts = [
            _StopText(request.tokenizer, request.stop_strings, row)
            for row in ids[:, max(0, start - 8) : start].tolist()
        ]
    seen: Tensor | None = None
    broken = torch.zeros((), dtype=torch.bool, device=device)

    step_ids = ids[:, :start]
    longest = request.longest  # tokens of the longest row, known to the host
    for length in range(start, end):
        if length > start:
            if model.decoder.rotary_emb.switches(longest, longest + 1):
                cache.reset()  # longrope turns the whole text anew
                step_ids = ids[:, :length]
                positions = None if key_mask is None else _positions(key_mask[:, :length])
            longest += 1
        output = model(
            step_ids,
            attention_mask=None if key_mask is None else key_mask[:, :length],
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
            **(request.inputs if step_ids.shape[1] == length else {}),
        )
        logits = output.logits[:, -1].float()
        if sampler.repetition_penalty != 1:
            if seen is None:
                seen = _seen_tokens(ids[:, :start], request.mask, logits.shape[-1])
            else:
                seen.scatter_(1, ids[:, length - 1 : length], True)
            logits = penalize_repetition(logits, seen[:, : logits.shape[-1]], sampler.repetition_penalty)
        if request.logits_processor is not None:
            shape = logits.shape
            logits = request.logits_processor(ids[:, :length], logits)
            if not isinstance(logits, Tensor) or logits.shape != shape:
                raise InputError(f"logits_processor must return logits of shape {list(shape)}")
        broken = broken | ~(logits.amax(-1) > -math.inf).all()  # NaN is above nothing
        token = sampler.pick(logits, generator)
        if finished is not None:
            token = torch.where(finished, request.pad_id, token)
            finished = finished | (token[:, None] == eos).any(1)
        ids[:, length] = token
        step_ids = token[:, None]
        if positions is not None:
            positions = positions[:, -1:] + 1

        new = None
        if to_host:
            # the one transfer of the step, with the verdict on its logits
            *values, is_broken = (host := torch.cat([token, broken[None]]).cpu()).tolist()
            new = host[:rows]
            if is_broken:
                raise _nan_logits()
            stopped_by_text = False
            for row, value in enumerate(values):
                if done[row]:
                    continue
                done[row] = value in request.eos_ids
                if texts and not done[row] and texts[row].ends_with(value):
                    done[row] = stopped_by_text = True
            if stopped_by_text and finished is not None:
                finished = torch.tensor(done, device=device)
        yield _Step(ids[:, : length + 1], new)
        if can_stop and all(done):
            break
    if not to_host and broken:
        raise _nan_logits()


def _positions(mask: Tensor) -> Tensor:
    """[B, S]: tokens of each row count from 0, and padding stands at 0 or where the last token was."""
    return (mask.cumsum(1) - 1).clamp_(min=0)


def _seen_tokens(prompt: Tensor, mask: Tensor | None, vocab_size: int) -> Tensor:
    """[B, V + 1] bool: the ids that a row holds. Column V takes padding and ids the head has no logit for."""
    tokens = prompt if mask is None else prompt.masked_fill(~mask, vocab_size)
    seen = torch.zeros(prompt.shape[0], vocab_size + 1, dtype=torch.bool, device=prompt.device)
    return seen.scatter_(1, tokens.clamp(max=vocab_size), True)


def _nan_logits() -> InputError:
    return InputError(
        "the model's logits are NaN (or all -inf), so no token can be chosen; likely float16 overflow or damaged "
        "weights: load with dtype=torch.bfloat16 or torch.float32, and check the weight files and the logits_processor"
    )


class _StopText:
    """Follows the new text of one row, which goes on behind the ids `after`, and says when it holds a stop string."""

    def __init__(self, tokenizer: Any, strings: Sequence[str], after: Sequence[int]):
        self.decoder = StreamDecoder(tokenizer, after=after)
        self.stops = StopStrings(strings)

    def ends_with(self, token: int) -> bool:
        return self.stops.put(self.decoder.put(token))[1]
