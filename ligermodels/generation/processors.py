"""From the model's logits to the next token: repetition penalty, banned ids, temperature and cuts, and the draw.

They run in the order of transformers and do not synchronise with the host. Rarer ones are the caller's.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ligermodels.generation.options import Options
from ligermodels.generation.request import LogitsProcessor, Request
from ligermodels.layers.async_copy import to_device


def make_processors(request: Request, rows: Sequence[Any], mask: Tensor | None) -> list[LogitsProcessor]:
    """The processors that a call asks for, the caller's among them; the cuts of sampling come last. rows: the `Row` of
    each sequence, None where there is none. mask: [B, at least S], True at tokens; None: no padding."""
    options = request.options
    made: list[LogitsProcessor] = []
    if options.repetition_penalty != 1:
        # Padding before the first token does not count.
        counts = None if mask is None else mask.cumsum(1) > 0
        made.append(functools.partial(penalize_repetition, penalty=options.repetition_penalty, mask=counts))
    stop_ids = [i for i in request.eos_ids if i < request.vocab_size]
    if stop_ids and options.min_new_tokens:
        banned = torch.tensor(stop_ids, device=request.model.device)
        made.append(functools.partial(ban_early, rows=rows, banned=banned, least=options.min_new_tokens))
    made += request.processors
    if options.do_sample:
        made.append(functools.partial(cut, options=options))
    return made


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


def ban_early(ids: Tensor, logits: Tensor, rows: Sequence[Any], banned: Tensor, least: int) -> Tensor:
    """Sets the logits of the ids `banned` to -inf in the rows with fewer than `least` new tokens."""
    early = [row is not None and not row.done and len(row.ids) < least for row in rows]
    if not any(early):
        return logits
    without = logits.index_fill(1, banned, -math.inf)
    return without if all(early) else torch.where(to_device(early, ids.device, torch.bool)[:, None], without, logits)


def cut(ids: Tensor, logits: Tensor, options: Options) -> Tensor:
    """Divides the logits by the temperature, then sets them to -inf for tokens that top_k, top_p or min_p drop.

    Each cut sees what the one before left. top_k drops logits below the k-th largest of the row. top_p keeps the fewest
    largest whose probabilities reach it. min_p drops tokens less than min_p times as likely as the likeliest.
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
