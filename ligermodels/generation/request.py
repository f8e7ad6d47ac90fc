"""A call of `generate`, checked against the model before the first step."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.generation.options import Options, is_int
from ligermodels.generation.processors import LogitsProcessor
from ligermodels.generation.stopping import StoppingCriterion
from ligermodels.layers.cache import KVCache, as_kv_cache

_LONGEST = 2**24
"""Tokens of prompt and continuation: from there on fp32, in which positions are turned, does not tell them apart."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the loop needs to know; all parts fit together."""

    model: Any
    options: Options
    input_ids: Tensor  # [B, S]
    mask: Tensor | None  # [B, S] bool; None: no padding
    longest: int  # tokens of the longest row, padding left out
    max_new_tokens: int
    copies: int  # of each row
    eos_ids: tuple[int, ...]
    pad_id: int  # 0 where nothing can be padded
    seed: int | None
    stop_strings: tuple[str, ...]
    tokenizer: Any
    processors: Sequence[LogitsProcessor]
    criteria: Sequence[StoppingCriterion]
    cache: KVCache | None  # of a part of the prompt
    inputs: dict[str, Any]  # of the prompt, besides ids and mask

    @classmethod
    def checked(
        cls,
        model: Any,
        input_ids: Tensor | None,
        generation_config: Any,
        logits_processor: Any,
        stopping_criteria: Any,
        *,
        attention_mask: Tensor | None,
        past_key_values: Any,
        tokenizer: Any,
        seed: int | None,
        inputs: dict[str, Any],
    ) -> Self:
        """Returns the request, or raises InputError. inputs: the other keywords, options and model inputs."""
        options, explicit = Options.merged(inputs, generation_config, model)
        inputs = {name: value for name, value in inputs.items() if value is not None}
        vocabulary = range(model.config.get_text_config().vocab_size)
        eos_ids = tuple(dict.fromkeys(_flat_ids(options.eos_token_id)))
        if "eos_token_id" not in explicit:  # some checkpoints write -1 for "none"
            eos_ids = tuple(i for i in eos_ids if i in vocabulary)
        pad_id = _pad_id(options.pad_token_id, vocabulary, explicit="pad_token_id" in explicit)

        if input_ids is None:
            input_ids = _only_bos(model, options.bos_token_id, attention_mask)
        mask, longest = _checked_prompt(model, input_ids, attention_mask, None if pad_id in eos_ids else pad_id)
        rows, length = input_ids.shape
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        max_new_tokens = options.longest(length, limit, explicit)
        if inputs and (unknown := inputs.keys() - model.extra_inputs):
            raise InputError(
                f"{', '.join(sorted(unknown))}: neither an option of generate nor an input of {type(model).__name__}; "
                f"inputs of its own: {', '.join(sorted(model.extra_inputs)) or 'none, it reads text only'}"
            )
        if inputs and options.use_cache is False:
            raise InputError(
                f"use_cache=False with {', '.join(sorted(inputs))} is not supported: images are only read with the "
                "prompt; leave use_cache out"
            )
        if length + max_new_tokens > _LONGEST:
            raise InputError(
                f"max_new_tokens={max_new_tokens} is too large: with the prompt at most {_LONGEST} tokens. Memory is "
                "set aside for all of them"
            )
        if options.shortest(length) > length + max_new_tokens:
            warnings.warn(
                f"min_new_tokens or min_length ask for {options.shortest(length)} tokens with the prompt, and at most "
                f"{length + max_new_tokens} may come",
                stacklevel=3,
            )
        for name in ("suppress_tokens", "begin_suppress_tokens"):
            ids = getattr(options, name)
            if ids is not None and (isinstance(ids, str) or not all(is_int(i) and i in vocabulary for i in ids)):
                raise InputError(f"{name}={ids!r:.200} must be a list of token ids below {len(vocabulary)}")
        if seed is not None and (not is_int(seed) or not -(2**63) <= seed < 2**64):
            raise InputError(f"seed={seed!r} must be an integer of 64 bits, or None for torch's own generator")
        strings = _strings(options.stop_strings, tokenizer)
        criteria = _callables(stopping_criteria, "stopping_criteria")

        pad_ids = [pad_id, *eos_ids]
        pad_id = next((i for i in pad_ids if i is not None and i in vocabulary), None)
        copies = int(options.num_return_sequences or 1)
        if pad_id is None and (strings or eos_ids or criteria) and rows * copies > 1:
            raise InputError(
                "a row that stops before the others must be filled up, and this checkpoint names no pad id "
                "within its vocabulary: pass pad_token_id"
            )
        if strings and not callable(getattr(tokenizer, "decode", None)):
            raise InputError(f"tokenizer is a {type(tokenizer).__name__}; stop_strings need one with a decode method")
        if limit is not None and longest + max_new_tokens > limit:
            warnings.warn(
                f"prompt and new tokens may reach {longest + max_new_tokens} positions, and the model is made for "
                f"{limit} (max_position_embeddings): text beyond tends to be poor; shorten prompt or max_new_tokens",
                stacklevel=3,
            )
        return cls(
            model=model, options=options, input_ids=input_ids, mask=mask, longest=longest, copies=copies,
            max_new_tokens=max_new_tokens, eos_ids=eos_ids, pad_id=pad_id or 0, seed=seed, stop_strings=strings,
            tokenizer=tokenizer, processors=_callables(logits_processor, "logits_processor"), criteria=criteria,
            cache=_checked_cache(model, past_key_values, rows, length, options), inputs=inputs,
        )  # fmt: skip


def _callables(value: Any, name: str) -> list[Any]:
    """`value`, a callable or a list of them (transformers' own lists are callable too), as a list."""
    values = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
    for one in values:
        if not callable(one):
            raise InputError(f"{name} is a {type(one).__name__}; it must be callable, or a list of callables")
    return values


def _strings(stop_strings: Any, tokenizer: Any) -> tuple[str, ...]:
    if not isinstance(stop_strings, str | Sequence | None) or isinstance(stop_strings, bytes):
        raise InputError(f"stop_strings is a {type(stop_strings).__name__}; it must be a string or a list of them")
    strings = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings or ())
    if not all(isinstance(string, str) for string in strings):
        raise InputError(f"stop_strings holds {strings!r:.200}; they must be strings")
    if not all(strings):
        raise InputError("stop_strings holds an empty string, which every text contains; leave it out")
    if strings and tokenizer is None:
        raise InputError("stop_strings are searched for in the text: pass tokenizer=Tokenizer.from_hub(...) too")
    return strings


def _pad_id(value: Any, vocabulary: range, *, explicit: bool) -> int | None:
    """Returns the pad id. One outside the vocabulary raises where the caller set it, and is ignored in a checkpoint."""
    if explicit:
        if not is_int(value) or value not in vocabulary:
            raise InputError(f"pad_token_id={value!r} is outside the vocabulary (0 to {len(vocabulary) - 1})")
        return int(value)
    return next((i for i in _flat_ids(value) if i in vocabulary), None)


def _flat_ids(ids: Any, depth: int = 0) -> list[int]:
    """Ids from an int, None, a tensor, or lists of those within each other, as config files have them."""
    if ids is None:
        return []
    if isinstance(ids, Tensor):
        ids = ids.tolist()
    if is_int(ids) and abs(ids) < 2**63:
        return [int(ids)]
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes) or depth > 3:
        raise InputError(f"eos and pad ids must be integers of 64 bits or lists of them, not {ids!r:.200}")
    return [i for part in ids for i in _flat_ids(part, depth + 1)]


def _only_bos(model: Any, bos_token_id: Any, attention_mask: Tensor | None) -> Tensor:
    """[1, 1]: a prompt of the bos token alone."""
    ids = _flat_ids(bos_token_id)
    if len(ids) != 1 or attention_mask is not None:
        raise InputError(
            "no prompt: pass input_ids"
            + ("" if ids else "; this checkpoint names no bos token that a text could begin with")
        )
    return torch.tensor([ids], dtype=torch.int64, device=model.device)


def _checked_cache(model: Any, cache: Any, rows: int, length: int, options: Options) -> KVCache | None:
    """Returns the caller's cache of the first tokens of the prompt. Raises InputError where it does not fit."""
    if cache is None:
        return None
    if options.use_cache is False:
        raise InputError("use_cache=False contradicts past_key_values; leave one of them out")
    if is_adapted(model):
        raise InputError("past_key_values cannot be passed where an adapter adds virtual tokens; leave it out")
    cache = as_kv_cache(cache, model.config.get_text_config().num_hidden_layers)
    if cache.length >= length:
        raise InputError(
            f"past_key_values holds {cache.length} tokens and input_ids {length}: pass the whole text, the tokens in "
            "the cache included, and at least one that is new"
        )
    if cache.length and cache.batch_size != rows:
        raise InputError(f"past_key_values is of {cache.batch_size} rows, input_ids of {rows}; they must be equal")
    return cache


def is_adapted(model: Any) -> bool:
    """Whether another object, such as a PEFT model around this one, prepares the inputs of each step."""
    return getattr(model.prepare_inputs_for_generation, "__self__", model) is not model


def _checked_prompt(
    model: Any, input_ids: Tensor, attention_mask: Tensor | None, pad_id: int | None
) -> tuple[Tensor | None, int]:
    """Raises InputError for a prompt that cannot be continued.

    Without a mask, ids that are `pad_id` are padding, as for transformers.
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
    padding = input_ids == (-1 if pad_id is None else pad_id)
    low, high, is_padded = torch.stack([*input_ids.aminmax(), padding.any()]).tolist()
    rows = len(model.get_input_embeddings().weight)  # more than vocab_size where the head has none for images
    if low < 0 or high >= rows:
        raise InputError(
            f"input_ids reach from {low} to {high}, the vocabulary from 0 to {rows - 1}; "
            "likely the tokenizer of another model, or a label value such as -100"
        )
    source = "attention_mask"
    if attention_mask is None:
        if not is_padded:
            return None, input_ids.shape[1]
        source, attention_mask = f"input_ids (pad_token_id={pad_id}, and no attention_mask)", ~padding
    if attention_mask.shape != input_ids.shape:
        raise InputError(
            f"attention_mask has shape {list(attention_mask.shape)}, input_ids {list(input_ids.shape)}; "
            "they must be equal"
        )
    mask = attention_mask != 0
    tokens = mask.sum(1)
    plain = (mask == attention_mask).all()
    shortest, longest, ends_in_token, is_fusable = torch.stack([*tokens.aminmax(), mask[:, -1].all(), plain]).tolist()
    if not is_fusable:
        raise InputError("attention_mask must be 1 at tokens and 0 at padding, and it holds something else")
    if not ends_in_token:
        row = int((~mask[:, -1]).nonzero()[0])
        raise InputError(
            f"row {row} of {source} ends in padding, which would tear continuation and prompt apart: "
            "pad on the left (zeros first in attention_mask), as Tokenizer.encode_batch does by default"
        )
    return None if shortest == mask.shape[1] else mask, longest
