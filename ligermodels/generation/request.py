"""A call of `generate`, checked against the model before the first step."""

import dataclasses
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Self

import torch
from torch import Tensor, nn

from ligermodels.errors import InputError, did_you_mean
from ligermodels.generation.options import KNOWN_NAMES, MAX_GUESSES, OPTION_NAMES, Options
from ligermodels.generation.stopping import StoppingCriterion
from ligermodels.layers.state import Cache, TransformersCache, as_cache

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]
"""(ids [B, S] so far, logits [B, V] fp32) -> logits."""

ADAPTED = "another object, such as a PEFT model, prepares the inputs of each step"
_CALL_INSIDE = "call generate of the model inside (PEFT's `get_base_model()`, whose layers keep their LoRA)"


@dataclass(frozen=True, kw_only=True)
class Request:
    """A checked call: the inputs of the loop."""

    model: Any
    options: Options
    input_ids: Tensor  # [B, S]; 0 where only embeddings were given
    embeds: Tensor | None  # [B, S, hidden_size], in place of the ids
    without_ids: int  # number of columns without ids: S where only embeddings were given, else 0
    mask: Tensor | None  # [B, S] bool; None: no padding
    longest: int  # tokens of the longest row, without padding
    pads_left: bool  # no row has a gap between tokens
    max_new_tokens: int
    copies: int  # num_return_sequences
    eos_ids: tuple[int, ...]
    pad_id: int  # 0 if nothing can be padded
    stop_strings: tuple[str, ...]
    tokenizer: Any
    processors: Sequence[LogitsProcessor]
    criteria: Sequence[StoppingCriterion]
    cache: Cache | None  # the caller's, with the first tokens of the prompt
    inputs: dict[str, Any]  # inputs of the prompt besides ids and mask, such as pixel_values

    @property
    def can_stop(self) -> bool:
        """Whether a row may end before max_new_tokens."""
        return bool(self.eos_ids or self.stop_strings or self.criteria)

    @classmethod
    def checked(
        cls,
        model: Any,
        inputs: Tensor | None = None,
        generation_config: Any = None,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        *,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        tokenizer: Any = None,
        **keywords: Any,
    ) -> Self:
        """The request of a call with the arguments of `generate`. Raises InputError."""
        given = {name: value for name, value in keywords.items() if name in KNOWN_NAMES}
        options, explicit = Options.merged(given, generation_config, model)
        model_inputs = {
            name: value for name, value in keywords.items() if name not in KNOWN_NAMES and value is not None
        }
        shown = ", ".join(sorted(model_inputs))
        if unknown := sorted(model_inputs.keys() - model.extra_inputs):
            raise InputError(
                f"{unknown[0]}: neither an option of generate nor an input of {type(model).__name__}"
                + did_you_mean(unknown[0], [*OPTION_NAMES, *model.extra_inputs, "attention_mask", "input_ids"])
            )
        if model_inputs and options.use_cache is False:
            raise InputError(f"use_cache=False with {shown}: images are read once, with the prompt; leave it out")
        if options.prefill_chunk_size is not None:
            problem = None
            if options.use_cache is False:
                problem = "needs the KV cache: leave use_cache=False out"
            elif model_inputs:
                problem = f"does not work with {shown}, which are read with the whole prompt"
            elif is_adapted(model):
                problem = f"does not work where {ADAPTED}: {_CALL_INSIDE}"
            if problem is not None:
                raise InputError(f"prefill_chunk_size {problem}")

        config = model.config.get_text_config()
        vocabulary = range(config.vocab_size)
        eos_ids = tuple(dict.fromkeys(_token_ids(options.eos_token_id)))
        if "eos_token_id" not in explicit:  # some checkpoints write -1 for "none"
            eos_ids = tuple(i for i in eos_ids if i in vocabulary)
        if "pad_token_id" in explicit and options.pad_token_id not in vocabulary:
            raise InputError(
                f"pad_token_id={options.pad_token_id!r:.80} is outside the vocabulary (0 to {len(vocabulary) - 1})"
            )
        pad_id = next((i for i in _token_ids(options.pad_token_id) if i in vocabulary), None)
        for name in ("suppress_tokens", "begin_suppress_tokens"):
            ids = getattr(options, name)
            if ids is not None and not all(i in vocabulary for i in ids):
                raise InputError(f"{name}={ids!r:.200} must be a list of token ids below {len(vocabulary)}")
        options = _with_checked_sequences(options, vocabulary)
        if options.exponential_decay_length_penalty is not None and not any(i in vocabulary for i in eos_ids):
            raise InputError(
                "exponential_decay_length_penalty makes stop ids likelier, and there are none: pass eos_token_id"
            )

        if inputs is not None and input_ids is not None:
            raise InputError("inputs and input_ids are two names for the prompt; pass one of them")
        prompt = input_ids if inputs is None else inputs
        without_ids, pad_in_prompt = 0, None if pad_id in eos_ids else pad_id
        if inputs_embeds is not None:
            _check_embeds(model, inputs_embeds, prompt, model_inputs)
            if prompt is None:
                prompt = torch.zeros(inputs_embeds.shape[:2], dtype=torch.int64, device=inputs_embeds.device)
                without_ids, pad_in_prompt = prompt.shape[1], None
        if prompt is None:
            bos_ids = _token_ids(options.bos_token_id)
            if len(bos_ids) != 1 or attention_mask is not None:
                raise InputError("no prompt: pass input_ids; without them, generate needs a bos token and no mask")
            prompt = torch.tensor([bos_ids], device=model.device)
        mask, longest, pads_left = checked_prompt(model, prompt, attention_mask, pad_in_prompt)
        rows, length = prompt.shape
        limit = getattr(config, "max_position_embeddings", None)
        max_new_tokens = options.new_tokens(length, limit, explicit)
        if options.min_columns(length) > length + max_new_tokens:
            warnings.warn(
                f"min_new_tokens or min_length require {options.min_columns(length)} tokens with the prompt, and at "
                f"most {length + max_new_tokens} are allowed",
                stacklevel=3,
            )
        if limit is not None and longest + max_new_tokens > limit:
            warnings.warn(
                f"prompt and new tokens may reach {longest + max_new_tokens} positions, and the model is made for "
                f"{limit} (max_position_embeddings): text beyond them tends to be poor; shorten prompt or "
                "max_new_tokens",
                stacklevel=3,
            )

        strings = options.stop_strings
        strings = (strings,) if isinstance(strings, str) else tuple(strings or ())
        if not all(isinstance(string, str) and string for string in strings):
            raise InputError(f"stop_strings must be non-empty strings, not {strings!r:.200}")
        if strings and not callable(getattr(tokenizer, "decode", None)):
            raise InputError(
                f"stop_strings are searched in the text, and tokenizer is a {type(tokenizer).__name__}: "
                "pass tokenizer=Tokenizer.from_hub(...), or another one with a decode method"
            )
        criteria = _as_list(stopping_criteria)
        copies = int(options.num_return_sequences or 1)
        pad_id = next((i for i in (pad_id, *eos_ids) if i is not None and i in vocabulary), None)
        if pad_id is None and (strings or eos_ids or criteria) and rows * copies > 1:
            raise InputError(
                "a row that stops before the others is filled with the pad id, and this checkpoint has none in its "
                "vocabulary: pass pad_token_id"
            )
        cache = _checked_cache(model, past_key_values, rows, length, options)
        _check_speculation(model, options, rows * copies, mask, cache, inputs_embeds)
        if options.max_time is not None:
            end = time.monotonic() + options.max_time
            criteria = [*criteria, lambda ids, scores: time.monotonic() > end]
        return cls(
            model=model, options=options, input_ids=prompt, embeds=inputs_embeds, without_ids=without_ids, mask=mask,
            longest=longest, pads_left=pads_left, copies=copies, max_new_tokens=max_new_tokens, eos_ids=eos_ids,
            pad_id=pad_id or 0, stop_strings=strings, tokenizer=tokenizer, processors=_as_list(logits_processor),
            criteria=criteria, cache=cache, inputs=model_inputs,
        )  # fmt: skip


def is_adapted(model: Any) -> bool:
    """Whether another object, such as a PEFT model around this one, prepares the inputs of each step."""
    return getattr(model.prepare_inputs_for_generation, "__self__", model) is not model


def _as_list(value: Any) -> list[Any]:
    """A list of callables, from one of them, a list (transformers' own lists are callable too) or None."""
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _token_ids(value: Any) -> list[int]:
    """The token ids in an int, None, a tensor or a list."""
    try:
        return torch.as_tensor([] if value is None else value).flatten().tolist()
    except (TypeError, ValueError) as error:
        raise InputError(f"eos, bos and pad ids must be integers or lists of them, not {value!r:.200}") from error


def _with_checked_sequences(options: Options, vocabulary: range) -> Options:
    """`options` with sequence_bias as a dict and forced_eos_token_id as a list. Raises InputError for wrong ids."""

    def is_sequence(value: Any) -> bool:
        return isinstance(value, tuple | list) and len(value) > 0 and all(i in vocabulary for i in value)

    bias, words, forced = options.sequence_bias, options.bad_words_ids, options.forced_eos_token_id
    if bias is not None:
        try:
            pairs = list(bias.items()) if isinstance(bias, Mapping) else [(ids, value) for ids, value in bias]
        except (TypeError, ValueError):
            pairs = []
        if not pairs or not all(is_sequence(ids) and isinstance(value, Real) for ids, value in pairs):
            raise InputError(
                f"sequence_bias={bias!r:.200} must be {{tuple of token ids: number, ...}}, or a list of [ids, number], "
                f"with ids below {len(vocabulary)}"
            )
        options = dataclasses.replace(options, sequence_bias={tuple(ids): float(value) for ids, value in pairs})
    if words is not None and not (isinstance(words, tuple | list) and words and all(map(is_sequence, words))):
        raise InputError(
            f"bad_words_ids={words!r:.200} must be a list of lists of token ids below {len(vocabulary)}, none empty"
        )
    if forced is not None:
        forced = _token_ids(forced)
        if not is_sequence(forced):
            raise InputError(
                f"forced_eos_token_id={forced!r:.200} must be a token id below {len(vocabulary)}, or a list of them"
            )
        options = dataclasses.replace(options, forced_eos_token_id=forced)
    return options


def _check_embeds(model: Any, embeds: Any, prompt: Any, model_inputs: Mapping[str, Any]) -> None:
    """Raises InputError for embeddings that are no prompt. The model's forward checks their dtype."""
    size = model.config.get_text_config().hidden_size
    if not isinstance(embeds, Tensor) or embeds.dim() != 3 or embeds.shape[2] != size or not embeds.numel():
        found = f"of shape {list(embeds.shape)}" if isinstance(embeds, Tensor) else f"a {type(embeds).__name__}"
        raise InputError(f"inputs_embeds is {found}; it must be a tensor [batch, length of at least 1, {size}]")
    if embeds.device != model.device:
        raise InputError(f"inputs_embeds is on {embeds.device}, the model on {model.device}: use .to(model.device)")
    if model_inputs:
        raise InputError(f"inputs_embeds contradicts {', '.join(sorted(model_inputs))}: pass input_ids with it")
    if isinstance(prompt, Tensor) and prompt.shape != embeds.shape[:2]:
        raise InputError(
            f"input_ids has shape {list(prompt.shape)} and inputs_embeds {list(embeds.shape)}: input_ids must be the "
            "ids of the same tokens, or be left out"
        )


def _check_speculation(
    model: Any, options: Options, rows: int, mask: Tensor | None, cache: Cache | None, embeds: Tensor | None
) -> None:
    """Raises InputError for a call that asks for speculation and cannot have it."""
    medusa, lookup = options.medusa, options.prompt_lookup_num_tokens is not None
    if medusa is None and not lookup:
        return
    problem = None
    if medusa is not None and lookup:
        problem = "contradicts medusa: one of them guesses"
    elif rows > 1:
        problem = f"guesses for one row, and there are {rows}: call generate for each"
    elif mask is not None:
        problem = "takes a prompt without padding: cut it off"
    elif embeds is not None:
        problem = "takes a prompt of ids: leave inputs_embeds out"
    elif options.use_cache is False:
        problem = "needs the KV cache: leave use_cache=False out"
    elif isinstance(cache, TransformersCache):
        problem = "needs a cache that can forget tokens: pass one of model.new_cache"
    elif is_adapted(model):
        problem = f"does not work where {ADAPTED}"
    elif medusa is not None:
        config = model.config.get_text_config()
        hidden, vocabulary = config.hidden_size, config.vocab_size
        sizes = [p.shape for p in medusa.parameters() if p.dim() == 2] if isinstance(medusa, nn.ModuleList) else []
        if not sizes or any(size[1] != hidden or size[0] not in (hidden, vocabulary) for size in sizes):
            problem = (
                f"is a {type(medusa).__name__} and must be the heads of a model with {hidden} hidden states and "
                f"{vocabulary} tokens: pass training.load_medusa(model, folder), or model.medusa"
            )
        elif any(p.device != model.device for p in medusa.parameters()):
            problem = f"has parameters that are not on {model.device}, where the model is: use .to(model.device)"
        elif len(medusa) > MAX_GUESSES:
            problem = f"has {len(medusa)} heads, and at most {MAX_GUESSES} tokens are guessed"
    if problem is not None:
        raise InputError(f"{'prompt_lookup_num_tokens' if lookup else 'medusa'} {problem}")


def _checked_cache(model: Any, cache: Any, rows: int, length: int, options: Options) -> Cache | None:
    """The caller's cache of the first tokens of the prompt. Raises InputError if it does not fit."""
    kind = options.kv_cache_dtype
    if options.use_cache is False and (cache is not None or kind == "fp8"):
        other = "past_key_values" if cache is not None else "kv_cache_dtype='fp8'"
        raise InputError(f"use_cache=False contradicts {other}; leave one of them out")
    if kind == "fp8" and is_adapted(model):
        raise InputError(f"kv_cache_dtype='fp8' is not possible where {ADAPTED} and makes the cache: {_CALL_INSIDE}")
    if cache is None:
        return None
    if is_adapted(model):
        raise InputError("past_key_values cannot be passed where an adapter adds virtual tokens; leave it out")
    cache = as_cache(cache, model.config.get_text_config().num_hidden_layers)
    if kind not in (None, cache.kv_cache_dtype):
        raise InputError(
            f"kv_cache_dtype={kind!r} contradicts past_key_values, which is of {cache.kv_cache_dtype!r}: leave one of "
            f"them out, or make the cache with model.new_cache(..., kv_cache_dtype={kind!r})"
        )
    if cache.length >= length:
        raise InputError(
            f"past_key_values has {cache.length} tokens and input_ids {length}: pass the whole text, the tokens in "
            "the cache included, and at least one that is new"
        )
    if cache.length and cache.rows != rows:
        raise InputError(f"past_key_values is of {cache.rows} rows, input_ids of {rows}; they must be equal")
    return cache


def checked_prompt(
    model: Any, input_ids: Tensor, attention_mask: Tensor | None, pad_id: int | None
) -> tuple[Tensor | None, int, bool]:
    """(bool mask or None if all True, number of tokens of the longest row, whether only the left is padded).

    Without a mask, ids equal to `pad_id` are padding, as in transformers. Raises InputError for a prompt that cannot
    be continued.
    """
    for name, value in (("input_ids", input_ids), ("attention_mask", attention_mask)):
        if value is not None and not isinstance(value, Tensor):
            raise InputError(f"{name} is a {type(value).__name__}; it must be a tensor, such as torch.tensor([ids])")
        if value is not None and value.device != model.device:
            raise InputError(f"{name} is on {value.device}, the model on {model.device}: use .to(model.device)")
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
            return None, input_ids.shape[1], True
        source, attention_mask = f"input_ids (pad_token_id={pad_id}, and no attention_mask)", ~padding
    if attention_mask.shape != input_ids.shape:
        raise InputError(
            f"attention_mask has shape {list(attention_mask.shape)}, input_ids {list(input_ids.shape)}; "
            "they must be equal"
        )
    mask = attention_mask != 0
    is_binary = (mask == attention_mask).all()
    pads_left = (mask[:, 1:] >= mask[:, :-1]).all()
    shortest, longest, ends_in_token, is_binary, pads_left = torch.stack(
        [*mask.sum(1).aminmax(), mask[:, -1].all(), is_binary, pads_left]
    ).tolist()
    if not is_binary:
        raise InputError("attention_mask must be 1 at tokens and 0 at padding, and it has other values")
    if not ends_in_token:
        row = int((~mask[:, -1]).nonzero()[0])
        raise InputError(
            f"row {row} of {source} ends in padding, which would separate the continuation from its prompt: "
            "pad on the left (zeros first in attention_mask), as a tokenizer does with padding_side='left'"
        )
    return None if shortest == mask.shape[1] else mask, longest, bool(pads_left)
