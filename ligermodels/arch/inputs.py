"""What a forward pass refuses before it computes, so that no input ends in a raw error, a crash or a wrong number.

Kinds, dtypes, shapes and devices are looked at everywhere. Values are read where that is free: of tensors on the CPU,
outside of torch.compile. On a device reading them would wait for it; there, ids and labels outside the vocabulary end
in its own assertion, and the values of a mask, positions and cu_seqlens are taken as given.
"""

import itertools
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.layers.cache import BorrowedCache, KVCache
from ligermodels.layers.losses import check_count
from ligermodels.training.recompute import is_captured, must_not_sync

IGNORE_INDEX = -100
_IDS = (torch.int64, torch.int32)
FARTHEST = 2**24
"""Positions are turned into angles in fp32, which cannot tell this one from the next."""


def check_inputs(
    decoder: Any,
    *,
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    past_key_values: KVCache | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
) -> None:
    """Raises InputError for arguments of `Decoder.forward` that cannot be meant."""
    if (input_ids is None) == (inputs_embeds is None):
        raise InputError("give either input_ids or inputs_embeds, and not both")
    tensors = _check_tensors(
        input_ids=input_ids, inputs_embeds=inputs_embeds, attention_mask=attention_mask, position_ids=position_ids,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip
    x_name, x = next(iter(tensors.items()))
    if attention_mask is not None and attention_mask.is_complex():
        raise InputError(f"attention_mask is {attention_mask.dtype}; it must be 1 at tokens and 0 at padding")
    if x.numel() == 0:
        raise InputError(f"{x_name} has shape {list(x.shape)}, which holds no token; leave empty batches out")
    if inputs_embeds is not None:
        _check_embeds(decoder, inputs_embeds)
    shape = x.shape[:2]
    if x.dim() != (2 if inputs_embeds is None else 3):
        ids = x.shape if inputs_embeds is None else x.shape[:-1]
        raise InputError(f"ids have shape {tuple(ids)}, expected [batch, sequence]")
    if position_ids is not None:
        _check_position_shape(position_ids, shape, decoder.position_axes)
    _check_cache(decoder, past_key_values)
    if cu_seqlens is None and max_seqlen is not None:
        raise InputError(f"max_seqlen={max_seqlen} says something of packed sequences only; give cu_seqlens too")
    if cu_seqlens is not None:
        if past_key_values is not None or attention_mask is not None:
            raise InputError("packed sequences (cu_seqlens) go with neither attention_mask nor past_key_values")
        _check_packing(cu_seqlens, max_seqlen, shape.numel())
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_values(attention_mask, position_ids)


def check_own_cache(cache: Any) -> None:
    """Raises InputError for a cache of transformers, in which a model with images could not remember them."""
    if cache is not None and (not isinstance(cache, KVCache) or isinstance(cache, BorrowedCache)):
        raise InputError(
            f"past_key_values is a {type(cache).__name__}; a model that reads images needs a KVCache, as "
            "model.new_cache makes"
        )


def check_labels(
    labels: Tensor | None,
    x: Tensor | None,
    num_items_in_batch: Tensor | int | None,
    logits_to_keep: int,
) -> None:
    """Raises InputError for arguments of `CausalLM.forward` that say what is computed of the last hidden state.

    x: input_ids [B, S] or inputs_embeds [B, S, hidden_size].
    """
    if num_items_in_batch is not None:
        check_count(num_items_in_batch)
    if isinstance(logits_to_keep, bool) or not isinstance(logits_to_keep, int) or logits_to_keep < 0:
        raise InputError(f"logits_to_keep={logits_to_keep!r} must be a number of positions, or 0 for all")
    if labels is None:
        return
    if logits_to_keep:
        raise InputError("labels need the logits of all positions: leave logits_to_keep out")
    _check_tensors(labels=labels)
    if isinstance(x, Tensor) and labels.shape != x.shape[:2]:
        raise InputError(f"labels have shape {tuple(labels.shape)}, expected that of the ids, {tuple(x.shape[:2])}")
    if isinstance(x, Tensor) and labels.device != x.device:
        raise InputError(f"labels are on {labels.device}, the ids on {x.device}; move one of them: .to(...)")


def _check_tensors(**given: Tensor | None) -> dict[str, Tensor]:
    """Those that are given; raises InputError where one is no dense tensor, on another device, or of no such dtype."""
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    first_name, first = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            kind = tensor.layout if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InputError(f"{name} is a {kind}; it must be a dense torch.Tensor: torch.tensor(...)")
        if tensor.device != first.device:
            raise InputError(
                f"{name} is on {tensor.device}, {first_name} on {first.device}; move one of them: .to(...)"
            )
        if name in ("position_ids", "labels", "input_ids") and tensor.dtype not in _IDS:
            raise InputError(f"{name} are {tensor.dtype}; they must be torch.int64 or torch.int32")
    return tensors


def check_outputs(output_attentions: bool | None, return_dict: bool | None) -> None:
    """Raises InputError for a form of output that there is not."""
    if output_attentions:
        raise InputError("output_attentions=True is not supported: the attention weights are never in memory")
    if return_dict is False:
        raise InputError("return_dict=False is not supported: the output is a dict with attributes")


def check_cu_seqlens(cu_seq_lens_q: Tensor | None, cu_seq_lens_k: Tensor | None) -> Tensor:
    """The boundaries of packed sequences, of queries and keys alike. Raises InputError where they differ."""
    q, k = cu_seq_lens_q, cu_seq_lens_k
    if not isinstance(q, Tensor) or not isinstance(k, Tensor):
        raise InputError("cu_seq_lens_q and cu_seq_lens_k are given together, as tensors; or give cu_seqlens")
    readable = q.device.type == k.device.type == "cpu" and not torch.compiler.is_compiling()
    if q.shape != k.shape or (readable and not torch.equal(q, k)):
        raise InputError("cu_seq_lens_q and cu_seq_lens_k differ; packed sequences attend within themselves")
    return q


def _check_embeds(model: Any, embeds: Tensor) -> None:
    width = model.config.hidden_size
    if not embeds.is_floating_point() or embeds.shape[-1:] != (width,):
        raise InputError(
            f"inputs_embeds are {embeds.dtype} {list(embeds.shape)}; expected floating point [batch, sequence, {width}]"
        )
    weight = model.embed_tokens.weight
    # A wrapped weight (FSDP's, a quantised one) says nothing of what is computed in, nor does any under autocast.
    plain = type(weight) is nn.Parameter
    if plain and embeds.dtype != weight.dtype and not torch.is_autocast_enabled(embeds.device.type):
        raise InputError(f"inputs_embeds are {embeds.dtype}, the model {weight.dtype}: use .to(model.dtype)")


def _check_position_shape(position_ids: Tensor, shape: torch.Size, axes: int) -> None:
    ahead = () if position_ids.dim() < 3 else (axes,)
    fits = position_ids.dim() == 2 + len(ahead) and position_ids.shape[:-2] == ahead
    if not (fits and position_ids.shape[-2] in (1, shape[0]) and position_ids.shape[-1] == shape[1]):
        raise InputError(
            f"position_ids have shape {tuple(position_ids.shape)}, expected {(*ahead, *shape)} or "
            f"{(*ahead, 1, shape[1])}"
        )


def _check_cache(model: Any, cache: KVCache | None) -> None:
    if cache is None:
        return
    if not isinstance(cache, KVCache):
        raise InputError(f"past_key_values is a {type(cache).__name__}; it must be a KVCache, as model.new_cache makes")
    if len(cache) != model.config.num_hidden_layers:
        raise InputError(
            f"past_key_values has {len(cache)} layers, the model {model.config.num_hidden_layers}; "
            "was it made for another model? model.new_cache makes one"
        )


def _check_packing(cu_seqlens: Tensor, max_seqlen: int | None, tokens: int) -> None:
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise InputError(
            f"cu_seqlens is {cu_seqlens.dtype} {list(cu_seqlens.shape)}; expected torch.int32 [N + 1], N >= 1"
        )
    if torch.compiler.is_compiling():
        return
    try:
        longest = None if max_seqlen is None else operator.index(max_seqlen)
    except TypeError:
        raise InputError(f"max_seqlen={max_seqlen!r} must be the number of tokens of the longest sequence") from None
    if cu_seqlens.device.type != "cpu":
        return
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != tokens or bounds != sorted(bounds):
        raise InputError(
            f"cu_seqlens runs from {bounds[0]} to {bounds[-1]}; it must ascend from 0 to the number of tokens, {tokens}"
        )
    most = max(end - start for start, end in itertools.pairwise(bounds))
    if longest is not None and longest < most:
        raise InputError(f"max_seqlen={longest}, but the longest sequence of cu_seqlens has {most} tokens")


def _check_values(attention_mask: Tensor | None, position_ids: Tensor | None) -> None:
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        odd = attention_mask[(attention_mask != 0) & (attention_mask != 1)]
        if odd.numel():
            raise InputError(
                f"attention_mask holds {odd[0].item()}; it must be 1 at tokens and 0 at padding. An additive mask, or "
                "the numbers of packed sequences, mean something else: see position_ids and cu_seqlens"
            )
    if position_ids is not None and position_ids.numel():
        low, high = position_ids.aminmax()
        if high >= FARTHEST:
            raise InputError(f"position_ids reach {int(high)}; positions from {FARTHEST} on are not told apart in fp32")
        if low < 0:
            before = position_ids < 0
            if attention_mask is not None and attention_mask.shape[-1] >= before.shape[-1]:
                # What stands at padding does not count; -1 there is common.
                seen = attention_mask[..., attention_mask.shape[-1] - before.shape[-1] :].bool()
                before = before & seen if seen.shape[0] in (1, before.shape[-2]) or before.shape[-2] == 1 else before
            if before.any():
                raise InputError(f"position_ids reach down to {int(low)}; positions count from 0")


def text_positions(position_ids: Any, x: Any) -> Tensor | None:
    """The positions of the text among position_ids, [B or 1, S], if they fit x [B, S, ...].

    Those are position_ids with two dims, or the first of several axes where that is one more than a token's own axes,
    as Qwen2-VL's [4, B, S]. None for anything else, which `check_inputs` judges.
    """
    if not isinstance(position_ids, Tensor) or not isinstance(x, Tensor) or position_ids.dtype not in _IDS:
        return None
    if position_ids.dim() == 3 and len(position_ids) == 4:
        position_ids = position_ids[0]
    fits = position_ids.dim() == 2 and x.dim() >= 2 and position_ids.shape[0] in (1, x.shape[0])
    fits = fits and position_ids.device == x.device
    return position_ids if fits and position_ids.shape[1] == x.shape[1] and position_ids.numel() else None


def packed_sequences(position_ids: Tensor | None, x: Tensor) -> tuple[Tensor | None, int | None]:
    """(cu_seqlens, max_seqlen) of the sequences that position_ids [B or 1, S] mark by restarting.

    (None, None) if none restarts, and for positions of several axes. x: [B, S, ...]. Rows are taken one after the
    other. A host synchronisation: the number of sequences is read. Raises InputError
    while a CUDA graph is captured, which cannot wait for it.
    """
    if position_ids is None or position_ids.dim() != 2:
        return None, None
    if is_captured(position_ids):
        raise InputError(
            "position_ids may mark packed sequences, which the host cannot look for while a CUDA graph is captured; "
            "give cu_seqlens and max_seqlen as well, or leave position_ids out where nothing is packed"
        )
    position_ids = position_ids.expand(x.shape[:2])
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    bounds = starts.flatten().nonzero().flatten().tolist()
    if len(bounds) == len(position_ids):
        return None, None
    bounds.append(position_ids.numel())
    longest = max(end - start for start, end in itertools.pairwise(bounds))
    return torch.tensor(bounds, dtype=torch.int32, device=position_ids.device), longest


def pads_only_after(mask: Tensor) -> bool:
    """True if no row of mask [B, S] has a token after a gap. A host synchronisation."""
    return bool((mask[:, 1:] <= mask[:, :-1]).all())


class Targets:
    """`labels` [B, S], the label of the next token at each position, and how many of them count.

    Nothing is to be predicted at the end of a row or of a packed sequence. The loss leaves out the rows without a
    label, and a matrix product needs its size on the host: the number is on its way there while the forward runs.
    The copy is queued before the first block, so that the wait for it ends long before the device runs out of work.
    """

    def __init__(self, labels: Tensor, cu_seqlens: Tensor | None):
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
        if cu_seqlens is not None:
            targets = targets.flatten().index_fill(0, cu_seqlens[1:].long() - 1, IGNORE_INDEX).view_as(labels)
        self.labels = targets
        self._count: Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        if not targets.is_cuda or must_not_sync(targets):  # in the latter case all rows are computed
            return
        count = (targets != IGNORE_INDEX).sum()
        self._count = torch.empty_like(count, device="cpu", pin_memory=True)
        self._count.copy_(count, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record(torch.cuda.current_stream(targets.device))  # which may not be the current device

    def count(self) -> int | None:
        """How many labels count; None where that is not known, or cheaply found out by who asks (on the CPU)."""
        if self._count is None or self._copied is None:
            return None
        self._copied.synchronize()
        return int(self._count)
