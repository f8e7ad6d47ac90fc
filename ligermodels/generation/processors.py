"""From the model's logits to the next token: penalties, bans and cuts in the order of transformers, and the draw.

None of them synchronises with the host. What is rarer (typical_p, sequence_bias, ...) is a `logits_processor` of the
caller; those of transformers serve.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.generation.options import OFF
from ligermodels.generation.request import LogitsProcessor, Request


def make_processors(request: Request, rows: Sequence[Any], mask: Tensor | None) -> list[LogitsProcessor]:
    """The processors that a call asks for, the caller's among them; the cuts of sampling come last.

    rows: the `Row` of each sequence, None where there is none, as it is when a processor is called. mask: [B, at least
    S], True at tokens; None: no padding.
    """
    options = request.options
    made: list[LogitsProcessor] = []
    stop_ids = [i for i in request.eos_ids if i < request.vocab_size]

    def add(process: Callable[..., Tensor], **arguments: Any) -> None:
        made.append(functools.partial(process, **arguments))

    def indices(ids: Sequence[Any]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=request.model.device)

    if options.repetition_penalty not in (None, 1):
        # Padding before the first token does not count.
        counts = None if mask is None else mask.cumsum(1) > 0
        add(penalize_repetition, penalty=options.repetition_penalty, mask=counts)
    if options.no_repeat_ngram_size:
        add(ban_repeated_ngrams, size=int(options.no_repeat_ngram_size))
    words = [[*ids] for ids in options.bad_words_ids or () if len(ids) > 1 or ids[0] not in stop_ids]
    if words:
        width = max(2, *map(len, words))
        before, last = indices([[ANY] * (width - len(ids)) + ids for ids in words]).split([width - 1, 1], 1)
        add(ban_words, before=before, last=last[:, 0])
    if stop_ids and (options.min_new_tokens or options.min_length):
        add(ban_early, rows=rows, banned=indices(stop_ids))
    if options.suppress_tokens:
        add(ban_tokens, banned=indices(options.suppress_tokens))
    for processor in request.processors:
        add(_checked, processor=processor)
    for name, cut in _CUTS.items() if options.do_sample else ():
        value = getattr(options, name)
        if value is not None and value not in OFF[name]:
            add(cut, value=value)
    return made


ANY = -1
"""In place of an id: any token, or none."""


def penalize_repetition(ids: Tensor, logits: Tensor, penalty: float, mask: Tensor | None = None) -> Tensor:
    """Divides positive and multiplies negative logits of the tokens in a row (https://arxiv.org/abs/1909.05858).

    Tokens where `mask` [B, at least S] is False do not count.
    """
    tokens = ids if mask is None else ids.masked_fill(~mask[:, : ids.shape[1]], logits.shape[-1])
    penalized = torch.where(logits < 0, logits * penalty, logits / penalty)
    return torch.where(_occurs(tokens, logits.shape[-1]), penalized, logits)


def ban_repeated_ngrams(ids: Tensor, logits: Tensor, size: int) -> Tensor:
    """Sets the logits of tokens that would complete an n-gram of `size` tokens for the second time to -inf."""
    if ids.shape[1] < size:
        return logits
    windows = ids.unfold(1, size, 1)  # [B, n, size]
    repeated = (windows[..., :-1] == ids[:, None, ids.shape[1] + 1 - size :]).all(-1)
    vocab_size = logits.shape[-1]
    return logits.masked_fill(_occurs(windows[..., -1].masked_fill(~repeated, vocab_size), vocab_size), -math.inf)


def ban_words(ids: Tensor, logits: Tensor, before: Tensor, last: Tensor) -> Tensor:
    """Sets the logit of last[n] to -inf in rows that end in before[n], where ANY stands for anything.

    before: [N, L] ids. last: [N].
    """
    end = ids[:, -before.shape[1] :]
    end = F.pad(end, (before.shape[1] - end.shape[1], 0), value=ANY)  # a row shorter than the words
    matches = ((end[:, None] == before) | (before == ANY)).all(-1)
    return logits.masked_fill(torch.zeros_like(logits).index_add_(1, last, matches.to(logits.dtype)) > 0, -math.inf)


def ban_early(ids: Tensor, logits: Tensor, rows: Sequence[Any], banned: Tensor) -> Tensor:
    """`ban_tokens` in the rows that have fewer new tokens than they must."""
    early = [row is not None and row.new < row.least for row in rows]
    if not any(early):
        return logits
    without = ban_tokens(ids, logits, banned)
    return without if all(early) else torch.where(to_device(early, ids.device, torch.bool)[:, None], without, logits)


def ban_tokens(ids: Tensor, logits: Tensor, banned: Tensor) -> Tensor:
    """Sets the logits of the ids `banned` to -inf."""
    return logits.index_fill(1, banned, -math.inf)


def by_temperature(ids: Tensor, logits: Tensor, value: float) -> Tensor:
    return logits / value


def keep_top_k(ids: Tensor, logits: Tensor, value: int) -> Tensor:
    """Sets all logits below the `value`-th largest of their row to -inf."""
    kth = logits.topk(min(value, logits.shape[-1]), dim=-1).values[..., -1:]
    return logits.masked_fill(logits < kth, -math.inf)


def keep_top_p(ids: Tensor, logits: Tensor, value: float) -> Tensor:
    """Keeps the fewest largest logits whose probabilities sum to `value` or more; sets the others to -inf."""
    ordered, order = logits.sort(dim=-1)  # of equally likely tokens, the cut leaves those that transformers leaves
    drop = ordered.softmax(-1).cumsum(-1) <= 1 - value
    drop[:, -1] = False
    return logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -math.inf)


def keep_min_p(ids: Tensor, logits: Tensor, value: float) -> Tensor:
    """Sets the logits of tokens less than `value` times as likely as the likeliest of their row to -inf."""
    probabilities = logits.softmax(-1)
    return logits.masked_fill(probabilities < value * probabilities.amax(-1, keepdim=True), -math.inf)


_CUTS: dict[str, Callable[..., Tensor]] = {
    "temperature": by_temperature, "top_k": keep_top_k, "top_p": keep_top_p, "min_p": keep_min_p,
}  # fmt: skip
"""{option: function}, in the order of transformers."""


def draw(logits: Tensor, generator: torch.Generator | None) -> Tensor:
    """A token id for each row of logits [B, V], drawn with the probabilities softmax(logits).

    The draw of torch.multinomial(logits.softmax(-1), 1) from the same random numbers, without its synchronisation:
    argmax p / E with E exponential is argmax logits - log E.
    """
    return (logits - torch.empty_like(logits).exponential_(generator=generator).log_()).argmax(-1)


def _occurs(ids: Tensor, vocab_size: int) -> Tensor:
    """[B, V] bool: whether a token occurs in a row of ids [B, S]. Ids beyond the vocabulary (images) do not count."""
    found = torch.zeros(len(ids), vocab_size + 1, dtype=torch.bool, device=ids.device)
    return found.scatter_(1, ids.clamp(max=vocab_size), True)[:, :vocab_size]


def _checked(ids: Tensor, logits: Tensor, processor: LogitsProcessor) -> Tensor:
    shape = logits.shape
    logits = processor(ids, logits)
    if not isinstance(logits, Tensor) or logits.shape != shape:
        raise InputError(f"logits_processor must return logits of shape {list(shape)}")
    return logits


def to_device(values: Sequence[Any] | Tensor, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A tensor of host values, copied without waiting for the device."""
    on_host = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda":
        on_host = on_host.pin_memory()
    return on_host.to(device, non_blocking=True)
