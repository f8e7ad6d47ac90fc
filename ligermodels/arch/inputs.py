"""What a forward pass refuses before it computes, so that no input ends in a raw error, a crash or a wrong number.

Kinds, dtypes, shapes and devices are looked at everywhere. Values are read where that is free: of tensors on the CPU,
outside of torch.compile. On a device reading them would wait for it; there, ids and labels outside the vocabulary end
in its own assertion, and the values of a mask, positions and cu_seqlens are taken as given.
"""

import itertools
import operator
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.cache import KVCache
from ligermodels.errors import InputError
from ligermodels.layers.losses import check_count

_IDS = (torch.int64, torch.int32)
FARTHEST = 2**24
"""Positions are turned into angles in fp32, which cannot tell this one from the next."""


def check_inputs(
    model: nn.Module,
    *,
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    labels: Tensor | None,
    past_key_values: KVCache | None,
    num_items_in_batch: Tensor | int | None,
    logits_to_keep: int,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
) -> None:
    """Raises InputError for arguments of `CausalLM.forward` that cannot be meant; shapes that do not match each
    other are left to it."""
    given = {
        "input_ids": input_ids, "inputs_embeds": inputs_embeds, "attention_mask": attention_mask,
        "position_ids": position_ids, "labels": labels, "cu_seqlens": cu_seqlens,
    }  # fmt: skip
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            kind = tensor.layout if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InputError(f"{name} is a {kind}; it must be a dense torch.Tensor: torch.tensor(...)")
    x_name, x = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if tensor.device != x.device:
            raise InputError(f"{name} is on {tensor.device}, {x_name} on {x.device}; move one of them: .to(...)")
        if name in ("position_ids", "labels", "input_ids") and tensor.dtype not in _IDS:
            raise InputError(f"{name} are {tensor.dtype}; they must be torch.int64 or torch.int32")
    if attention_mask is not None and attention_mask.is_complex():
        raise InputError(f"attention_mask is {attention_mask.dtype}; it must be 1 at tokens and 0 at padding")
    if x.numel() == 0:
        raise InputError(f"{x_name} has shape {list(x.shape)}, which holds no token; leave empty batches out")
    if inputs_embeds is not None:
        _check_embeds(model, inputs_embeds)
    _check_cache(model, past_key_values)
    if num_items_in_batch is not None:
        check_count(num_items_in_batch)
    if isinstance(logits_to_keep, bool) or not isinstance(logits_to_keep, int) or logits_to_keep < 0:
        raise InputError(f"logits_to_keep={logits_to_keep!r} must be a number of positions, or 0 for all")
    if logits_to_keep and labels is not None:
        raise InputError("labels need the logits of all positions: leave logits_to_keep out")
    if cu_seqlens is None and max_seqlen is not None:
        raise InputError(f"max_seqlen={max_seqlen} says something of packed sequences only; give cu_seqlens too")
    if cu_seqlens is not None:
        _check_packing(cu_seqlens, max_seqlen, x.shape[:2].numel())
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_values(attention_mask, position_ids)


def same_bounds(cu_seq_lens_q: Tensor | None, cu_seq_lens_k: Tensor | None) -> Tensor:
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
