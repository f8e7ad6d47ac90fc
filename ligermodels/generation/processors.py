"""From the model's logits to the next token: penalties, bans and cuts in the order of transformers, and the draw.

Each step is a `LogitsProcessor`: (ids [B, S] so far, logits [B, V] fp32) -> logits. None of them synchronises.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.generation.options import Options

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]


def make_processors(
    options: Options,
    custom: Sequence[LogitsProcessor],
    *,
    prompt_length: int,
    mask: Tensor | None,
    stop_ids: Sequence[int],
    device: torch.device,
) -> list[LogitsProcessor]:
    """The processors that a call asks for, `custom` among them; the cuts of sampling come last.

    mask: [B, S] of the prompt, True at tokens; None: no padding. stop_ids: within the vocabulary.
    """
    made: list[LogitsProcessor] = []
    if options.repetition_penalty is not None and options.repetition_penalty != 1:
        made.append(RepetitionPenalty(options.repetition_penalty, mask))
    if options.no_repeat_ngram_size:
        made.append(functools.partial(ban_repeated_ngrams, size=int(options.no_repeat_ngram_size)))
    shortest = options.shortest(prompt_length)
    if stop_ids and shortest > prompt_length:
        made.append(Ban(stop_ids, device, below=shortest))
    if options.suppress_tokens:
        made.append(Ban(options.suppress_tokens, device))
    if options.begin_suppress_tokens:
        made.append(Ban(options.begin_suppress_tokens, device, below=prompt_length + 1))
    made += [functools.partial(_checked, processor) for processor in custom]
    if options.do_sample:
        cuts = (
            (torch.div, options.temperature, 1), (keep_top_k, options.top_k, 0), (keep_top_p, options.top_p, 1),
            (keep_min_p, options.min_p, 0),
        )  # fmt: skip
        made += [_cut(cut, value) for cut, value, neutral in cuts if value is not None and value != neutral]
    if options.renormalize_logits:
        made.append(lambda ids, logits: logits.log_softmax(-1))
    return made


class RepetitionPenalty:
    """Divides positive and multiplies negative logits of the tokens that a row holds (https://arxiv.org/abs/1909.05858).

    To be called once a step. Padding of the prompt, where `mask` [B, S] is False, does not count.
    """

    def __init__(self, penalty: float, mask: Tensor | None):
        self.penalty, self.mask = penalty, mask
        self.seen: Tensor | None = None  # [B, V + 1] bool; column V takes padding and ids the head has no logit for

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        vocab_size = logits.shape[-1]
        if self.seen is None:
            tokens = ids if self.mask is None else ids.masked_fill(~self.mask, vocab_size)
            self.seen = torch.zeros(len(ids), vocab_size + 1, dtype=torch.bool, device=ids.device)
        else:
            tokens = ids[:, -1:]
        self.seen.scatter_(1, tokens.clamp(max=vocab_size), True)
        penalized = torch.where(logits < 0, logits * self.penalty, logits / self.penalty)
        return torch.where(self.seen[:, :vocab_size], penalized, logits)


class Ban:
    """Sets the logits of `banned` ids to -inf; with `below`, while a row has fewer columns than that."""

    def __init__(self, banned: Sequence[int], device: torch.device, *, below: int | None = None):
        self.banned = torch.tensor(banned, dtype=torch.int64, device=device)
        self.below = below

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        if self.below is not None and ids.shape[1] >= self.below:
            return logits
        return logits.index_fill(1, self.banned, -math.inf)


def ban_repeated_ngrams(ids: Tensor, logits: Tensor, size: int) -> Tensor:
    """Logits [B, V] with the tokens at -inf that would complete `size` tokens which the row has already, in order."""
    if ids.shape[1] < size:
        return logits
    windows = ids.unfold(1, size, 1)  # [B, n, size]
    repeated = (windows[..., :-1] == ids[:, None, ids.shape[1] + 1 - size :]).all(-1)
    vocab_size = logits.shape[-1]
    last = windows[..., -1].clamp(max=vocab_size).masked_fill(~repeated, vocab_size)
    banned = torch.zeros(len(ids), vocab_size + 1, dtype=torch.bool, device=ids.device).scatter_(1, last, True)
    return logits.masked_fill(banned[:, :vocab_size], -math.inf)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Logits [B, V] with all below the k-th largest of their row at -inf."""
    kth = logits.topk(min(int(k), logits.shape[-1]), dim=-1).values[..., -1:]
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


def draw(logits: Tensor, generator: torch.Generator | None) -> Tensor:
    """A token id for each row of logits [B, V], drawn with the probabilities softmax(logits).

    The draw of torch.multinomial(logits.softmax(-1), 1) from the same random numbers, without its synchronisation:
    argmax p / E with E exponential is argmax logits - log E.
    """
    return (logits - torch.empty_like(logits).exponential_(generator=generator).log_()).argmax(-1)


def _cut(cut: Callable[[Tensor, Any], Tensor], value: Any) -> LogitsProcessor:
    return lambda ids, logits: cut(logits, value)


def _checked(processor: LogitsProcessor, ids: Tensor, logits: Tensor) -> Tensor:
    shape = logits.shape
    logits = processor(ids, logits)
    if not isinstance(logits, Tensor) or logits.shape != shape:
        raise InputError(f"logits_processor must return logits of shape {list(shape)}")
    return logits
