"""From the model's logits to the next token: penalties, bans and cuts in the order of transformers, and the draw.

Each step is a `LogitsProcessor`: (ids [B, S] so far, logits [B, V] fp32) -> logits. None of them synchronises.
"""

import functools
import math
from collections.abc import Callable, Sequence

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

    mask: [B, at least S], True at tokens; None: no padding. stop_ids: within the vocabulary.
    """

    def ban(banned: Sequence[int], below: float = math.inf) -> LogitsProcessor:
        ids = torch.tensor(banned, dtype=torch.int64, device=device)
        return functools.partial(ban_tokens, banned=ids, below=below)

    made: list[LogitsProcessor] = []
    if options.repetition_penalty is not None and options.repetition_penalty != 1:
        made.append(functools.partial(penalize_repetition, penalty=options.repetition_penalty, mask=mask))
    if options.no_repeat_ngram_size:
        made.append(functools.partial(ban_repeated_ngrams, size=int(options.no_repeat_ngram_size)))
    shortest = options.shortest(prompt_length)
    if stop_ids and shortest > prompt_length:
        made.append(ban(stop_ids, below=shortest))
    if options.suppress_tokens:
        made.append(ban(options.suppress_tokens))
    if options.begin_suppress_tokens:
        made.append(ban(options.begin_suppress_tokens, below=prompt_length + 1))
    made += [functools.partial(_checked, processor) for processor in custom]
    temperature = 1 if options.temperature is None else options.temperature
    if options.do_sample:
        if temperature != 1:
            made.append(lambda ids, logits: logits / temperature)
        if options.top_k:
            made.append(functools.partial(keep_top_k, k=int(options.top_k)))
        if options.top_p is not None and options.top_p != 1:
            made.append(functools.partial(keep_top_p, p=options.top_p))
        if options.min_p:
            made.append(functools.partial(keep_min_p, p=options.min_p))
    if options.renormalize_logits:
        made.append(lambda ids, logits: logits.log_softmax(-1))
    return made


def penalize_repetition(ids: Tensor, logits: Tensor, penalty: float, mask: Tensor | None = None) -> Tensor:
    """Divides positive and multiplies negative logits of the tokens that a row holds (https://arxiv.org/abs/1909.05858).

    Tokens where `mask` [B, at least S] is False do not count.
    """
    tokens = ids if mask is None else ids.masked_fill(~mask[:, : ids.shape[1]], logits.shape[-1])
    penalized = torch.where(logits < 0, logits * penalty, logits / penalty)
    return torch.where(_holds(tokens, logits.shape[-1]), penalized, logits)


def ban_tokens(ids: Tensor, logits: Tensor, banned: Tensor, below: float = math.inf) -> Tensor:
    """Sets the logits of `banned` ids to -inf, while a row has fewer than `below` columns."""
    return logits.index_fill(1, banned, -math.inf) if ids.shape[1] < below else logits


def ban_repeated_ngrams(ids: Tensor, logits: Tensor, size: int) -> Tensor:
    """Sets the logits of tokens to -inf that would complete `size` tokens which the row has already, in order."""
    if ids.shape[1] < size:
        return logits
    windows = ids.unfold(1, size, 1)  # [B, n, size]
    repeated = (windows[..., :-1] == ids[:, None, ids.shape[1] + 1 - size :]).all(-1)
    vocab_size = logits.shape[-1]
    return logits.masked_fill(_holds(windows[..., -1].masked_fill(~repeated, vocab_size), vocab_size), -math.inf)


def keep_top_k(ids: Tensor, logits: Tensor, k: int) -> Tensor:
    """Sets all logits below the k-th largest of their row to -inf."""
    kth = logits.topk(min(k, logits.shape[-1]), dim=-1).values[..., -1:]
    return logits.masked_fill(logits < kth, -math.inf)


def keep_top_p(ids: Tensor, logits: Tensor, p: float) -> Tensor:
    """Sets all logits but the fewest largest whose probabilities sum to p or more to -inf."""
    ordered, order = logits.sort(dim=-1, descending=True)
    probabilities = ordered.softmax(-1)
    # A token goes if the likelier ones reach p without it: never the first, which has exactly 0 before it.
    drop = probabilities.cumsum(-1) - probabilities >= p
    return logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -math.inf)


def keep_min_p(ids: Tensor, logits: Tensor, p: float) -> Tensor:
    """Sets the logits of tokens less than p times as likely as the likeliest of their row to -inf."""
    probabilities = logits.softmax(-1)
    return logits.masked_fill(probabilities < p * probabilities.amax(-1, keepdim=True), -math.inf)


def draw(logits: Tensor, generator: torch.Generator | None) -> Tensor:
    """A token id for each row of logits [B, V], drawn with the probabilities softmax(logits).

    The draw of torch.multinomial(logits.softmax(-1), 1) from the same random numbers, without its synchronisation:
    argmax p / E with E exponential is argmax logits - log E.
    """
    return (logits - torch.empty_like(logits).exponential_(generator=generator).log_()).argmax(-1)


def _holds(ids: Tensor, vocab_size: int) -> Tensor:
    """[B, V] bool: whether a row of ids [B, S] holds a token. Ids beyond the vocabulary (images) do not count."""
    held = torch.zeros(len(ids), vocab_size + 1, dtype=torch.bool, device=ids.device)
    return held.scatter_(1, ids.clamp(max=vocab_size), True)[:, :vocab_size]


def _checked(processor: LogitsProcessor, ids: Tensor, logits: Tensor) -> Tensor:
    shape = logits.shape
    logits = processor(ids, logits)
    if not isinstance(logits, Tensor) or logits.shape != shape:
        raise InputError(f"logits_processor must return logits of shape {list(shape)}")
    return logits
