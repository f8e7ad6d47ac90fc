"""Checks of the arguments of a forward pass, and the targets of the loss.

Types, dtypes and shapes are always checked. Values are checked for tensors on the CPU, outside of torch.compile.
Reading values on a GPU would synchronise: there, ids and labels outside the vocabulary end in a device-side assertion,
and the values of a mask and of cu_seqlens are trusted.
"""

import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.errors import InputError, did_you_mean
from ligermodels.kernels._check import check_bounds
from ligermodels.layers.async_copy import AsyncToHost
from ligermodels.layers.batch import MovableInputs
from ligermodels.layers.head import takes_labels, unwrapped
from ligermodels.layers.losses import check_count
from ligermodels.layers.parallel import MeshGroup
from ligermodels.layers.state import Cache, as_cache, one_cache
from ligermodels.training.recompute import is_captured, must_not_sync

IGNORE_INDEX = -100
_IDS = (torch.int64, torch.int32)
_EXPERTS = (torch.int64, torch.int32, torch.int16)
NO_EFFECT = frozenset("""
    length logits_to_keep num_items_in_batch offset_mapping overflow_to_sample_mapping seq_idx skip_logits
    special_tokens_mask token_type_ids
""".split())  # fmt: skip  # noqa: SIM905
"""Arguments that every forward takes without effect: what tokenizers and collators return beside the ids, and of the
base model what asks its head for less."""
_OF_THE_HEAD = frozenset(
    ("ignore_index", "labels", "loss_function", "return_logits", "return_logprobs", "shift_labels")
)
"""Arguments of `CausalLM.forward` that ask the head for more or something else; the others are in NO_EFFECT."""


@dataclass(frozen=True, kw_only=True)
class TextInputs(MovableInputs):
    """The checked inputs of a text model for one forward pass; see `CausalLM.forward`.

    cache: the Cache to read and extend, or None. cu_seqlens, max_seqlen: the packed sequences, whichever argument
    marked them; None where nothing is packed. decode_step: (starts, ends), int32 [B] each, in a decoding step of one
    token a row: the columns of the row's first token and past its new one. The caller counts the token. experts:
    integers [L, T, K], the experts that the T tokens take in each block, -1 for the router's choice; blocks without a
    router ignore theirs. last: the number of last positions of each row whose last hidden states are wanted; 0: of all.
    images: what the text model of a family reads of images, by name; empty without.
    """

    input_ids: Tensor | None
    inputs_embeds: Tensor | None
    attention_mask: Tensor | None
    position_ids: Tensor | None
    cache: Cache | None
    cu_seqlens: Tensor | None
    max_seqlen: int | None
    decode_step: tuple[Tensor, Tensor] | None = None
    experts: Tensor | None = None
    last: int = 0
    images: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> Tensor:
        """The ids [B, S], or the embeddings [B, S, hidden_size]."""
        return self.input_ids if self.inputs_embeds is None else self.inputs_embeds  # type: ignore[return-value]

    @property
    def past_length(self) -> int:
        """The number of tokens in the cache."""
        return 0 if self.cache is None else self.cache.length

    def check_own_cache(self) -> None:
        """Raises InputError for a cache of transformers, which cannot store the state of a model with images."""
        if self.cache is not None and self.cache.foreign is not None:
            raise InputError(
                f"past_key_values is a {type(self.cache.foreign).__name__}; a model that reads images needs a Cache: "
                "model.new_cache makes one"
            )


def check_inputs(
    model: Any,
    *,
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    past_key_values: Any,
    use_cache: bool | None,
    cache: Any = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    cache_position: Tensor | None = None,
    output_attentions: bool | None = None,
    return_dict: bool | None = None,
    decode_step: tuple[Tensor, Tensor] | None = None,
    experts: Tensor | None = None,
    **options: Any,
) -> tuple[TextInputs, dict[str, Any]]:
    """Checks the arguments of a forward pass, and creates the cache where one is asked for.

    model: a `BaseModel`. The arguments are those of `CausalLM.forward`; options: those of `model.run`.
    Returns the inputs of the text model, and the options. Raises InputError for arguments that do not fit together.
    """
    if not options.keys() <= model.run_options:
        options = {name: value for name, value in options.items() if name not in NO_EFFECT}
        for name in sorted(options.keys() - model.run_options):
            _refuse(name, model)
    past_key_values = one_cache(past_key_values, cache)
    _check_transforms()
    if output_attentions:
        raise InputError("output_attentions=True is not supported: the attention weights are never in memory")
    if return_dict is False:
        raise InputError("return_dict=False is not supported: the output is a dict with attributes")
    if (input_ids is None) == (inputs_embeds is None):
        raise InputError("give either input_ids or inputs_embeds, and not both")
    if cu_seqlens is None and (cu_seq_lens_q is not None or cu_seq_lens_k is not None):
        cu_seqlens, max_seqlen = _same_lengths(cu_seq_lens_q, cu_seq_lens_k), max_length_q
    x = _check_tensors(
        input_ids=input_ids, inputs_embeds=inputs_embeds, attention_mask=attention_mask, position_ids=position_ids,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip
    if x.dim() != (2 if inputs_embeds is None else 3):
        ids = x.shape if inputs_embeds is None else x.shape[:-1]
        raise InputError(f"ids have shape {tuple(ids)}, expected [batch, sequence]")
    if x.numel() == 0:
        raise InputError(f"the batch has shape {tuple(x.shape)} and no token; leave empty batches out")
    decoder = getattr(model, "language_model", model)
    batch_size, length = x.shape[:2]
    if inputs_embeds is not None:
        _check_embeds(decoder, inputs_embeds)
    if position_ids is not None:
        _check_position_shape(position_ids, x.shape[:2], decoder.position_axes)
    if cu_seqlens is not None:
        if past_key_values is not None or use_cache or attention_mask is not None:
            raise InputError("packed sequences (cu_seqlens) go with neither attention_mask nor a cache")
        _check_packing(cu_seqlens, max_seqlen, x)
    elif max_seqlen is not None:
        raise InputError(f"max_seqlen={max_seqlen} belongs to packed sequences; give cu_seqlens too")
    elif position_ids is not None and attention_mask is None and past_key_values is None and not use_cache:
        cu_seqlens, max_seqlen = _packed_sequences(position_ids, x)
    cache = None
    if past_key_values is not None:
        cache = _check_cache(past_key_values, decoder.config.num_hidden_layers)
    elif use_cache or (use_cache is None and cu_seqlens is None and _caches_by_default(model, decoder)):
        cache = decoder.new_cache(batch_size, length)
    past = 0 if cache is None else cache.length
    if cache_position is not None:
        _check_cache_position(cache_position, past, length)
    if attention_mask is not None:
        _check_mask(attention_mask, batch_size, past + length)
    if experts is not None:
        _check_experts(decoder, experts, batch_size * length)
    inputs = TextInputs(
        input_ids=input_ids,
        inputs_embeds=inputs_embeds,
        attention_mask=attention_mask,
        position_ids=position_ids,
        cache=cache,
        cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen,
        decode_step=decode_step,
        experts=experts,
    )
    return inputs, options


def _refuse(name: str, model: Any) -> NoReturn:
    """Raises InputError for an argument that forward does not have."""
    if name in _OF_THE_HEAD:
        raise InputError(
            f"{name} is an argument of the head, and {type(model).__name__} has none: call the whole model"
        )
    known = {*inspect.signature(check_inputs).parameters, *model.run_options, *_OF_THE_HEAD, *NO_EFFECT}
    known -= {"model", "options", "decode_step"}
    raise InputError(f"forward has no argument {name!r}" + did_you_mean(name, known))


def _caches_by_default(model: Any, decoder: Any) -> bool:
    """Whether a forward without `use_cache` creates a cache.

    As in transformers: in evaluation, if the config says so, unless the backward recomputes the blocks. Never where a
    cache is not possible: under context and tensor parallelism, and where ranks run a vision tower together.
    """
    if model.training or not model.config.use_cache:
        return False
    recomputes = torch.is_grad_enabled() and decoder.checkpointing.enabled
    runs_tower = model is not decoder and model.always_runs_tower
    return not (recomputes or runs_tower or decoder.cp is not None or decoder.tp is not None)


class ForwardInputs(NamedTuple):
    """The arguments of a call of `CausalLM.forward`: `text`, for the blocks, and those of the head, whose names and
    meanings are there. labels: [B, S], shifted or not."""

    text: TextInputs
    labels: Tensor | None
    num_items_in_batch: Tensor | int | None
    logits_to_keep: int
    ignore_index: int
    return_logits: bool | None
    return_logprobs: bool
    loss_function: Callable[..., Tensor] | None
    output_hidden_states: bool | None

    @property
    def of_decoder(self) -> TextInputs:
        """`text`, which asks the decoder for the last hidden states that are read."""
        return self.text if self.output_hidden_states else replace(self.text, last=self.logits_to_keep)

    def check(self, model: Any) -> None:
        """Raises InputError for arguments of the head that do not fit each other, the text or the `CausalLM`."""
        x, labels, keep, parallel = self.text.tokens, self.labels, self.logits_to_keep, model.parallel
        if type(self.ignore_index) is not int:
            raise InputError(
                f"ignore_index={self.ignore_index!r} must be a whole number: the label that does not count"
            )
        if self.num_items_in_batch is not None:
            check_count(self.num_items_in_batch)
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 0:
            raise InputError(f"logits_to_keep={keep!r} must be a number of positions, or 0 for all")
        if labels is not None:
            if keep:
                raise InputError("labels need the logits of all positions: leave logits_to_keep out")
            _check_tensors(ids=x, labels=labels)
            if labels.shape != x.shape[:2]:
                raise InputError(
                    f"labels have shape {tuple(labels.shape)}, expected that of the ids, {tuple(x.shape[:2])}"
                )
        elif self.return_logprobs:
            raise InputError("return_logprobs=True needs labels: it returns their log probabilities")
        if parallel is not None and parallel.shards > 1:
            headless = labels is None and self.return_logits is False
            if self.text.cache is not None or self.output_hidden_states or keep or self.return_logprobs or headless:
                raise InputError(
                    "a cache, output_hidden_states, logits_to_keep, return_logprobs, and hidden states alone "
                    "(return_logits=False) are not supported under context or tensor parallelism: save the model and "
                    "load it on one GPU, or use a mesh of dp_shard alone"
                )
            rows, length = x.shape[:2]
            parallel.check_length(length if self.text.cu_seqlens is None else rows * length)
        if self.loss_function is not None and (
            labels is None or self.return_logits or self.return_logprobs or not takes_labels(unwrapped(model.lm_head))
        ):
            raise InputError(
                "loss_function needs labels, neither logits nor logprobs, and a head that no adapter wraps"
            )


def _check_tensors(**tensors: Tensor | None) -> Tensor:
    """Returns the first tensor. Raises InputError for another type, a wrong dtype, or tensors on several devices."""
    first: Any = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise InputError(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor")
        first = tensor if first is None else first
        if tensor.device != first.device:
            raise InputError(f"{name} is on {tensor.device}, the ids on {first.device}; move one of them: .to(...)")
        if name in ("position_ids", "labels", "input_ids") and tensor.dtype not in _IDS:
            raise InputError(f"{name} are {tensor.dtype}; they must be torch.int64 or torch.int32")
    return first


def _check_transforms() -> None:
    """Raises InputError inside of torch.func.vmap, whose tensors neither the kernels nor the checks can read."""
    levels = None if torch.compiler.is_compiling() else torch._C._functorch.get_interpreter_stack()
    if levels and any(level.key() == torch._C._functorch.TransformType.Vmap for level in levels):
        raise InputError(
            "torch.func.vmap is not supported: the fused ops take whole batches. For the gradient of each sample, call "
            "torch.autograd.grad for one row after the other"
        )


def _is_readable(x: Tensor) -> bool:
    """Whether reading the values of x costs no synchronisation."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def _same_lengths(q: Tensor | None, k: Tensor | None) -> Tensor:
    """The boundaries of packed sequences, which must be the same for queries and keys. Raises InputError."""
    if not isinstance(q, Tensor) or not isinstance(k, Tensor):
        raise InputError("cu_seq_lens_q and cu_seq_lens_k are given together, as tensors; or give cu_seqlens")
    if q.shape != k.shape or (_is_readable(q) and _is_readable(k) and not torch.equal(q, k)):
        raise InputError("cu_seq_lens_q and cu_seq_lens_k differ; packed sequences attend within themselves")
    return q


def _check_embeds(decoder: Any, embeds: Tensor) -> None:
    size, weight = decoder.config.hidden_size, decoder.embed_tokens.weight
    if not embeds.is_floating_point() or embeds.shape[-1] != size:
        raise InputError(
            f"inputs_embeds are {embeds.dtype} {list(embeds.shape)}; expected floating point [batch, sequence, {size}]"
        )
    # The dtype of a wrapped weight (FSDP's, a quantised one) is not the dtype of the computation; autocast changes it.
    plain = type(weight) is nn.Parameter
    if plain and embeds.dtype != weight.dtype and not torch.is_autocast_enabled(embeds.device.type):
        raise InputError(f"inputs_embeds are {embeds.dtype}, the model {weight.dtype}: use .to(model.dtype)")


def _check_position_shape(position_ids: Tensor, shape: torch.Size, axes: int) -> None:
    """[B or 1, S], or [axes, B or 1, S]; models with several axes also take one more, the text's, before those."""
    leading, rows = position_ids.shape[:-2], position_ids.shape[-2:-1]
    known = [(), (axes,), (axes + 1,)] if axes > 1 else [(), (1,)]
    if tuple(leading) not in known or rows not in ((1,), shape[:1]) or position_ids.shape[-1] != shape[1]:
        expected = f"{tuple(shape)}" + (f" or {(axes, *shape)}" if axes > 1 else "")
        raise InputError(f"position_ids have shape {tuple(position_ids.shape)}, expected {expected}; 1 row is enough")


def _check_mask(mask: Tensor, batch_size: int, length: int) -> None:
    if mask.shape != (batch_size, length):
        raise InputError(
            f"attention_mask has shape {tuple(mask.shape)}, expected [{batch_size}, {length}]: one entry for each "
            "cached and each new token"
        )
    if mask.dtype == torch.bool or not _is_readable(mask):
        return
    if (other := mask[(mask != 0) & (mask != 1)]).numel():
        raise InputError(
            f"attention_mask has the value {other[0].item()}; it must be 1 at tokens and 0 at padding. Additive masks "
            "and the numbers of packed sequences are not supported: see position_ids and cu_seqlens"
        )


def _check_cache(past_key_values: Any, num_layers: int) -> Cache:
    """`given`, or a view of a cache of transformers. Raises InputError for anything else, and for another model's."""
    cache = as_cache(past_key_values, num_layers)
    if len(cache) != num_layers:
        raise InputError(
            f"past_key_values has {len(cache)} layers, the model {num_layers}; was it made for another model? "
            "model.new_cache makes one"
        )
    return cache


def _check_cache_position(positions: Any, past: int, length: int) -> None:
    """Raises InputError unless these are the positions of the new tokens in the cache."""
    is_row = isinstance(positions, Tensor) and positions.shape == (length,)
    if not is_row or (_is_readable(positions) and positions.tolist() != [*range(past, past + length)]):
        raise InputError(
            f"cache_position must be the positions {past} to {past + length - 1} of the new tokens, which follow the "
            "cached ones; leave it out, as it says nothing else"
        )


def _check_experts(decoder: Any, experts: Tensor, tokens: int) -> None:
    """Raises InputError unless these are experts that the tokens can take."""
    config = decoder.config
    top_k = getattr(config, "num_experts_per_tok", 0)  # of `RoutedConfig`: the routers of others do not take experts
    if not top_k:
        raise InputError(f"experts were given, but {config.model_type} has no router that takes them; leave them out")
    if decoder.cp is not None or decoder.tp is not None:
        raise InputError("experts cannot be given under context or tensor parallelism: use a mesh of dp_shard alone")
    shape = config.num_hidden_layers, tokens, top_k
    if experts.shape != shape or experts.dtype not in _EXPERTS:
        raise InputError(
            f"experts are {experts.dtype} {list(experts.shape)}; expected integers {list(shape)}, the experts "
            "that each token takes in each block"
        )
    if _is_readable(experts) and not (experts.min() >= -1 and experts.max() < config.num_experts):
        raise InputError(
            f"experts go from {experts.min()} to {experts.max()}; they must be below {config.num_experts}, or -1 for "
            "the router's choice"
        )


def _check_packing(cu_seqlens: Tensor, max_seqlen: int | None, x: Tensor) -> None:
    check_bounds("forward", cu_seqlens, x.flatten(0, 1)[None])
    if max_seqlen is None or not _is_readable(cu_seqlens):
        return
    if max_seqlen < (longest := _longest(cu_seqlens.tolist())):
        raise InputError(f"max_seqlen={max_seqlen}, but the longest sequence of cu_seqlens has {longest} tokens")


def _longest(bounds: list[int]) -> int:
    return max(end - start for start, end in itertools.pairwise(bounds))


def _packed_sequences(position_ids: Tensor, x: Tensor) -> tuple[Tensor | None, int | None]:
    """(cu_seqlens, max_seqlen) of the packed sequences that position_ids [B or 1, S] mark by restarting.

    (None, None) if none restarts. In [4, B, S] the first axis is the text's; [3, B, S] mark nothing. x: [B, S, ...],
    whose rows follow each other. Synchronises: the number of sequences is read. Raises InputError while a CUDA graph
    is captured, which rules that out.
    """
    if position_ids.dim() == 3 and len(position_ids) == 4:
        position_ids = position_ids[0]
    if position_ids.dim() != 2:
        return None, None
    if is_captured(position_ids):
        raise InputError(
            "position_ids may mark packed sequences, and the host cannot read them while a CUDA graph is captured; "
            "give cu_seqlens and max_seqlen as well, or leave position_ids out where nothing is packed"
        )
    position_ids = position_ids.expand(x.shape[:2])
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    bounds = starts.flatten().nonzero().flatten().tolist()
    if len(bounds) == len(position_ids):
        return None, None
    bounds.append(position_ids.numel())
    return torch.tensor(bounds, dtype=torch.int32, device=position_ids.device), _longest(bounds)


class Targets:
    """The label of the next token at each position, [B, S], and the number of labels that count.

    labels: of the tokens themselves, or with `shifted` of the next tokens. ignore_index: counts as -100 does. The last
    token of a row, and of a packed sequence, has no label. cp: the ranks over which the sequence is split; the
    result has this rank's tokens, `of_all_tokens` those of all. num_items_in_batch, an attribute: what the sum of the
    losses is divided by; None: the number of labels that count.

    The loss drops the rows without a label, and the host needs their number for a GEMM. The number is copied to the
    host during the forward: the copy is queued before the first block, and complete when the head asks for it.
    """

    num_items_in_batch: Tensor | int | None = None

    def __init__(
        self,
        labels: Tensor,
        cu_seqlens: Tensor | None,
        cp: MeshGroup | None = None,
        *,
        shifted: bool = False,
        ignore_index: int = IGNORE_INDEX,
    ):
        if ignore_index != IGNORE_INDEX:
            labels = labels.masked_fill(labels == ignore_index, IGNORE_INDEX)
        targets = labels
        if not shifted:
            # A packed sequence may go on in the next row.
            rows = labels if cu_seqlens is None else labels.reshape(1, -1)
            targets = F.pad(rows[:, 1:], (0, 1), value=IGNORE_INDEX)
            if cu_seqlens is not None:
                targets = targets.index_fill(1, cu_seqlens[1:].long() - 1, IGNORE_INDEX).view_as(labels)
        self.of_all_tokens = targets
        if cp is not None:
            targets = cp.shard(targets if cu_seqlens is None else targets.view(1, -1), 1)
        self.labels = targets
        self._count = None
        if targets.is_cuda and not must_not_sync(targets):  # else all rows are computed
            self._count = AsyncToHost((targets != IGNORE_INDEX).sum())

    def count(self) -> int | None:
        """The number of labels that count; None if it was not copied (on the CPU the caller counts at no cost)."""
        return None if self._count is None else int(self._count.result())
