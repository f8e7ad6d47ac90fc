"""From the model's logits to the next token: penalties, bans and cuts in the order of transformers, and the draw.

None of them synchronises with the host.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.generation.options import OFF
from ligermodels.generation.request import LogitsProcessor, Request


def make_processors(request: Request, rows: Sequence[Any], mask: Tensor | None) -> list[LogitsProcessor]:
    """The processors that a call asks for, the caller's among them; the cuts of sampling come last.

    rows: the `Row` of each sequence, None where there is none, as it is when a processor is called. mask: [B, at least
    S], True at tokens; None: no padding.
    """
    options, device = request.options, request.model.device
    vocab_size = request.model.config.get_text_config().vocab_size
    stop_ids = [i for i in request.eos_ids if i < vocab_size]

    def indices(ids: Sequence[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=device)

    def ban(ids: Sequence[int]) -> Callable[..., Tensor]:
        banned = indices(ids)
        return lambda logits, new=None: ban_tokens(logits, banned)

    def where(applies: Callable[[Any], bool], change: Callable[[Tensor, Any], Tensor]) -> LogitsProcessor:
        """`change` (logits [N, V], the rows' new tokens: a number, or fp64 [N, 1]) of the rows where it `applies`."""

        def process(ids: Tensor, logits: Tensor) -> Tensor:
            chosen = [b for b, row in enumerate(rows) if row is not None and applies(row)]
            counts = [rows[b].new for b in chosen]
            if len(chosen) == len(rows) and len(set(counts)) == 1:
                return change(logits, counts[0])
            if not chosen:
                return logits
            index, new = to_device(chosen, device), to_device(counts, device, torch.float64)
            return logits.index_put((index,), change(logits[index], new[:, None]))

        return process

    made: list[LogitsProcessor] = []
    if options.sequence_bias:
        made.append(SequenceBias(options.sequence_bias, device))
    if options.repetition_penalty is not None and options.repetition_penalty != 1:
        # Padding before the first token does not count.
        counts = None if mask is None else mask.cumsum(1) > 0
        made.append(functools.partial(penalize_repetition, penalty=options.repetition_penalty, mask=counts))
    if options.no_repeat_ngram_size:
        made.append(functools.partial(ban_repeated_ngrams, size=int(options.no_repeat_ngram_size)))
    banned = [tuple(ids) for ids in options.bad_words_ids or () if len(ids) > 1 or ids[0] not in stop_ids]
    if banned:
        made.append(SequenceBias(dict.fromkeys(banned, -math.inf), device))
    if stop_ids and (options.min_new_tokens or options.min_length):
        made.append(where(lambda row: row.new < row.least, ban(stop_ids)))
    if options.forced_eos_token_id is not None:
        forced = indices(options.forced_eos_token_id)
        made.append(where(lambda row: row.new == row.most - 1, lambda logits, new: force_tokens(logits, forced)))
    if options.exponential_decay_length_penalty is not None:
        begin, factor = options.exponential_decay_length_penalty
        raised = indices(stop_ids)
        made.append(where(
            lambda row: row.new > begin,
            lambda logits, new: raise_tokens(logits, raised, factor ** (new - begin) - 1),
        ))  # fmt: skip
    if options.suppress_tokens:
        suppress = ban(options.suppress_tokens)
        made.append(lambda ids, logits: suppress(logits))
    if options.begin_suppress_tokens:
        made.append(where(lambda row: row.new == 0, ban(options.begin_suppress_tokens)))
    made += [functools.partial(_checked, processor) for processor in request.processors]
    if options.do_sample:
        temperature = options.temperature
        if temperature is not None and temperature not in OFF["temperature"]:
            made.append(lambda ids, logits: logits / temperature)
        for name, cut in _CUTS.items():
            value = getattr(options, name)
            if value is not None and value not in OFF[name]:
                made.append(functools.partial(cut, value=value))
    if options.renormalize_logits:
        made.append(lambda ids, logits: logits.log_softmax(-1))
    return made


class SequenceBias:
    """Adds a bias to the logit of the last token of each sequence, in rows that end in the tokens before it."""

    def __init__(self, biases: Mapping[tuple[int, ...], float], device: torch.device):
        groups: dict[int, list[tuple[tuple[int, ...], float]]] = {1: []}
        for sequence, bias in biases.items():
            groups.setdefault(len(sequence), []).append((sequence, bias))
        self._groups = [  # of N sequences of one length L: the tokens before [N, L - 1], the last [N], biases [N]
            (
                torch.tensor([sequence[:-1] for sequence, _ in group], dtype=torch.int64, device=device),
                torch.tensor([sequence[-1] for sequence, _ in group], device=device),
                torch.tensor([bias for _, bias in group], dtype=torch.float32, device=device),
            )
            for group in groups.values()
            if group
        ]

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        total, length = torch.zeros_like(logits), ids.shape[1]
        for before, last, biases in self._groups:
            if before.shape[1] <= length:
                matches = (ids[:, None, length - before.shape[1] :] == before).all(-1)
                total.index_add_(1, last, torch.where(matches, biases, 0.0))
        return logits + total


def penalize_repetition(ids: Tensor, logits: Tensor, penalty: float, mask: Tensor | None = None) -> Tensor:
    """Divides positive and multiplies negative logits of the tokens in a row (https://arxiv.org/abs/1909.05858).

    Tokens where `mask` [B, at least S] is False do not count.
    """
    tokens = ids if mask is None else ids.masked_fill(~mask[:, : ids.shape[1]], logits.shape[-1])
    penalized = torch.where(logits < 0, logits * penalty, logits / penalty)
    return torch.where(_occurs(tokens, logits.shape[-1]), penalized, logits)


def ban_tokens(logits: Tensor, banned: Tensor) -> Tensor:
    """Sets the logits of the ids `banned` to -inf."""
    return logits.index_fill(1, banned, -math.inf)


def force_tokens(logits: Tensor, forced: Tensor) -> Tensor:
    """Sets the logits of the ids `forced` to 0 and all others to -inf."""
    return torch.full_like(logits, -math.inf).index_fill_(1, forced, 0.0)


def raise_tokens(logits: Tensor, raised: Tensor, share: float | Tensor) -> Tensor:
    """Adds `share` times their absolute value to the logits of the ids `raised`, except those that are -inf.

    share: a number, or one for each row, [N, 1].
    """
    before = logits[:, raised]
    more = (before.abs() * share).masked_fill(~before.isfinite(), 0.0)
    return logits.index_copy(1, raised, (before + more).to(logits.dtype))


def ban_repeated_ngrams(ids: Tensor, logits: Tensor, size: int) -> Tensor:
    """Sets the logits of tokens that would complete an n-gram of `size` tokens for the second time to -inf."""
    if ids.shape[1] < size:
        return logits
    windows = ids.unfold(1, size, 1)  # [B, n, size]
    repeated = (windows[..., :-1] == ids[:, None, ids.shape[1] + 1 - size :]).all(-1)
    vocab_size = logits.shape[-1]
    return logits.masked_fill(_occurs(windows[..., -1].masked_fill(~repeated, vocab_size), vocab_size), -math.inf)


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


def keep_typical(ids: Tensor, logits: Tensor, value: float) -> Tensor:
    """Keeps the tokens whose information is nearest to the entropy of their row; sets the others' logits to -inf.

    It keeps the fewest whose probabilities sum to `value` or more, and those as near as the last of them (locally
    typical sampling, https://arxiv.org/abs/2202.00666).
    """
    log_probabilities = logits.log_softmax(-1)
    entropy = -(log_probabilities * log_probabilities.exp()).nansum(-1, keepdim=True)
    distances = (-log_probabilities - entropy).abs()
    ordered, order = distances.sort(dim=-1)
    reached = logits.gather(-1, order).softmax(-1).cumsum(-1)
    last = (reached < value).sum(-1, keepdim=True).clamp_(max=logits.shape[-1] - 1)
    return logits.masked_fill(distances > ordered.gather(-1, last), -math.inf)


def keep_epsilon(ids: Tensor, logits: Tensor, value: float | Tensor) -> Tensor:
    """Sets the logits of tokens less likely than `value`, a number or [B, 1], to -inf, except the likeliest's."""
    drop = (logits.softmax(-1) < value) & (logits < logits.amax(-1, keepdim=True))
    return logits.masked_fill(drop, -math.inf)


def keep_eta(ids: Tensor, logits: Tensor, value: float) -> Tensor:
    """`keep_epsilon` by the smaller of `value` and sqrt(value) exp(-entropy) (https://arxiv.org/abs/2210.15191)."""
    log_probabilities = logits.log_softmax(-1)
    entropy = -(log_probabilities * log_probabilities.exp()).nansum(-1, keepdim=True)
    return keep_epsilon(ids, logits, (math.sqrt(value) * (-entropy).exp()).clamp_(max=value))


_CUTS: dict[str, Callable[..., Tensor]] = {
    "top_k": keep_top_k, "top_p": keep_top_p, "min_p": keep_min_p, "typical_p": keep_typical,
    "epsilon_cutoff": keep_epsilon, "eta_cutoff": keep_eta,
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


def _checked(processor: LogitsProcessor, ids: Tensor, logits: Tensor) -> Tensor:
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
