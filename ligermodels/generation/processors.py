"""From the model's logits to the next token: repetition penalty, banned tokens, temperature and filters, and the draw.

They run in the order of transformers and do not synchronise with the host. Rarer ones are the caller's.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ligermodels.generation.options import Options
from ligermodels.generation.request import LogitsProcessor, Request
from ligermodels.layers.async_copy import to_device


def make_processors(request: Request, rows: Sequence[Any], mask: Tensor | None) -> list[LogitsProcessor]:
    """The processors that a call asks for, the caller's among them; the filters of sampling come last. rows: the `Row`
    of each sequence, None where there is none. mask: [B, at least S], True at tokens; None: no padding."""
    options = request.options
    processors: list[LogitsProcessor] = []
    if options.repetition_penalty != 1:
        # Padding before the first token does not count.
        counts = None if mask is None else mask.cumsum(1) > 0
        processors.append(functools.partial(penalize_repetition, penalty=options.repetition_penalty, mask=counts))
    if options.no_repeat_ngram_size:
        processors.append(functools.partial(ban_repeated, size=options.no_repeat_ngram_size))
    # As in transformers, min_new_tokens replaces min_length.
    min_length = options.min_length if options.min_new_tokens is None else 0
    for ids, name, least in (
        (request.eos_ids, "length", min_length),
        (request.eos_ids, "new", options.min_new_tokens),
        (options.begin_suppress_tokens, "new", 1),
    ):
        if least and len(banned := _ids_of_model(ids, request)):
            early: dict[str, Any] = dict(rows=rows, banned=banned, **{name: least})
            processors.append(functools.partial(enforce_min_tokens, **early))
    if len(banned := _ids_of_model(options.suppress_tokens, request)):
        processors.append(functools.partial(ban, banned=banned))
    processors += request.processors
    if options.do_sample:
        processors.append(functools.partial(filter_logits, options=options))
    if options.renormalize_logits:
        processors.append(lambda ids, logits: logits.log_softmax(-1))
    return processors


def _ids_of_model(ids: Iterable[int], request: Request) -> Tensor:
    """The ids that the vocabulary has, on the model's device."""
    known = [i for i in ids if i in range(request.vocab_size)]
    return torch.tensor(known, dtype=torch.int64, device=request.model.device)


def penalize_repetition(ids: Tensor, logits: Tensor, penalty: float, mask: Tensor | None = None) -> Tensor:
    """Divides positive logits, and multiplies negative ones, of the ids that a row has (arXiv:1909.05858).

    Ids where `mask` [B, at least S] is False do not count, nor do ids beyond the vocabulary, which stand for images.
    """
    vocab_size = logits.shape[-1]
    tokens = ids if mask is None else ids.masked_fill(~mask[:, : ids.shape[1]], vocab_size)
    occurs = torch.zeros(len(ids), vocab_size + 1, dtype=torch.bool, device=ids.device)
    occurs.scatter_(1, tokens.clamp(max=vocab_size), True)
    penalized = torch.where(logits < 0, logits * penalty, logits / penalty)
    return torch.where(occurs[:, :vocab_size], penalized, logits)


def ban_repeated(ids: Tensor, logits: Tensor, size: int) -> Tensor:
    """Sets the logits of ids to -inf that would repeat an n-gram of `size` ids in their row, padding included."""
    if ids.shape[1] < size:
        return logits
    grams, vocab_size = ids.unfold(1, size, 1), logits.shape[-1]
    repeats = (grams[..., :-1] == ids[:, None, ids.shape[1] + 1 - size :]).all(-1)
    after = grams[..., -1].masked_fill(~repeats, vocab_size).clamp(max=vocab_size)
    banned = torch.zeros(len(ids), vocab_size + 1, dtype=torch.bool, device=ids.device).scatter_(1, after, True)
    return logits.masked_fill(banned[:, :vocab_size], -math.inf)


def ban(ids: Tensor, logits: Tensor, banned: Tensor) -> Tensor:
    """Sets the logits of the ids `banned` to -inf."""
    return logits.index_fill(1, banned, -math.inf)


def enforce_min_tokens(
    ids: Tensor, logits: Tensor, rows: Sequence[Any], banned: Tensor, new: float = math.inf, length: float = math.inf
) -> Tensor:
    """`ban` in the rows with fewer than `new` new tokens, and fewer than `length` with the prompt and its padding."""
    early = [
        row is not None and not row.done and len(row.ids) < new and row.prompt + len(row.ids) < length for row in rows
    ]
    if not any(early):
        return logits
    without = ban(ids, logits, banned)
    return without if all(early) else torch.where(to_device(early, ids.device, torch.bool)[:, None], without, logits)


def filter_logits(ids: Tensor, logits: Tensor, options: Options) -> Tensor:
    """Divides the logits by the temperature, then sets them to -inf for tokens that top_k, top_p or min_p drop.

    Each filter sees what the one before left. top_k drops logits below the k-th largest of the row. top_p keeps the
    fewest largest whose probabilities reach it. min_p drops tokens less than min_p times as likely as the likeliest.
    """
    if options.temperature != 1:
        logits = logits / options.temperature
    if options.top_k:
        kth = logits.topk(min(options.top_k, logits.shape[-1]), dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    if options.top_p < 1:
        ordered, order = logits.sort(dim=-1)  # ascending, so that ties are cut as in transformers
        drop = ordered.softmax(-1).cumsum(-1) <= 1 - options.top_p
        drop[:, -1] = False
        logits = logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -math.inf)
    if options.min_p:
        probabilities = logits.softmax(-1)
        logits = logits.masked_fill(probabilities < options.min_p * probabilities.amax(-1, keepdim=True), -math.inf)
    return logits


def draw(logits: Tensor, generator: torch.Generator | None) -> Tensor:
    """A token id for each row of logits [B, V], drawn with the probabilities softmax(logits).

    The draw of torch.multinomial(logits.softmax(-1), 1) from the same random numbers, without its synchronisation:
    argmax p / E with E exponential is argmax logits - log E.
    """
    return (logits - torch.empty_like(logits).exponential_(generator=generator).log_()).argmax(-1)
