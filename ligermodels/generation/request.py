"""A call of `generate`, checked against the model before the first step."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ligermodels.errors import InputError, did_you_mean
from ligermodels.generation.options import DEFAULT_NEW_TOKENS, DRAFTERS, KNOWN_NAMES, OPTION_NAMES, Options
from ligermodels.layers.base import Layer
from ligermodels.layers.state import as_cache, one_cache

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]
"""(ids [B, S] so far, logits [B, V] fp32) -> logits."""

ADAPTED = "another object, such as a PEFT model, prepares the inputs of each step"


class Request:
    """The checked arguments of a call of `generate`, which an engine reads. Raises InputError.

    input_ids: [B, S]; zeros where only embeddings were given. embeds: [B, S, hidden_size], read in place of the ids, or
    None. num_embed_columns: columns without ids, S where only embeddings were given, else 0. mask: [B, S] bool; None:
    no padding. longest: tokens of the longest row, without padding. pads_left: all padding is on the left.
    eos_ids, pad_id: from the call or the checkpoint; pad_id is 0 where nothing needs it. cache: the caller's, with the
    first tokens of the prompt, or None. inputs: inputs of the prompt besides ids and mask, such as pixel_values.
    """

    def __init__(
        self, model: Any, inputs: Tensor | None = None, generation_config: Any = None, logits_processor: Any = None,
        stopping_criteria: Any = None, *, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None,
        attention_mask: Tensor | None = None, past_key_values: Any = None, cache: Any = None, tokenizer: Any = None,
        **keywords: Any,
    ):  # fmt: skip
        keyword_options = {name: keywords.pop(name) for name in KNOWN_NAMES & keywords.keys()}
        options, explicit = Options.merged(keyword_options, generation_config, model)
        self.model, self.options, self.tokenizer, self.embeds = model, options, tokenizer, inputs_embeds
        self.processors, self.criteria = _as_list(logits_processor), _as_list(stopping_criteria)
        self.inputs = {name: value for name, value in keywords.items() if value is not None}
        for name in sorted(self.inputs.keys() - model.extra_inputs):
            near = did_you_mean(name, [*OPTION_NAMES, *model.extra_inputs, "attention_mask", "input_ids"])
            raise InputError(f"{name}: neither an option of generate nor an input of {type(model).__name__}{near}")
        if options.stop_strings and not callable(getattr(tokenizer, "decode", None)):
            raise InputError(
                f"stop_strings need a tokenizer with a method `decode`, not {tokenizer!r:.80}: pass tokenizer="
            )

        config = model.config.get_text_config()
        vocabulary, positions = range(config.vocab_size), getattr(config, "max_position_embeddings", None)
        self.vocab_size = len(vocabulary)
        eos_ids = tuple(dict.fromkeys(_token_ids(options.eos_token_id)))
        # Some checkpoints write -1 for "none".
        self.eos_ids = tuple(i for i in eos_ids if "eos_token_id" in explicit or i in vocabulary)
        pad_id = next((i for i in _token_ids(options.pad_token_id) if i in vocabulary), None)
        if "pad_token_id" in explicit and options.pad_token_id not in vocabulary:
            raise InputError(f"pad_token_id={options.pad_token_id!r:.80} is outside the vocabulary, {vocabulary}")

        if inputs is not None and input_ids is not None:
            raise InputError("inputs and input_ids are two names for the prompt; pass one of them")
        prompt: Any = input_ids if inputs is None else inputs
        self.num_embed_columns, pad_in_prompt = 0, None if pad_id in self.eos_ids else pad_id
        if inputs_embeds is not None:
            shape = getattr(inputs_embeds, "shape", (type(inputs_embeds).__name__,))
            wanted = *getattr(prompt, "shape", shape[:2]), config.hidden_size
            if tuple(shape) != wanted or len(shape) != 3 or 0 in shape:
                raise InputError(
                    f"inputs_embeds is {list(shape)}; it must be a tensor [batch, length of at least 1, "
                    f"{config.hidden_size}], of the same tokens as input_ids where both are given"
                )
            check_device(model, inputs_embeds=inputs_embeds)
            if prompt is None:
                prompt = torch.zeros(inputs_embeds.shape[:2], dtype=torch.int64, device=inputs_embeds.device)
                self.num_embed_columns, pad_in_prompt = prompt.shape[1], None
        if prompt is None:
            bos_ids = _token_ids(options.bos_token_id)
            if len(bos_ids) != 1 or attention_mask is not None:
                raise InputError("no prompt: pass input_ids; without them, generate needs a bos token and no mask")
            prompt = torch.tensor([bos_ids], device=model.device)
        self.input_ids = prompt
        self.mask, self.longest, self.pads_left = checked_prompt(model, prompt, attention_mask, pad_in_prompt)
        self.max_new_tokens = options.new_tokens(prompt.shape[1], positions)
        if options.max_new_tokens is None and options.max_length is None:
            warnings.warn(
                f"neither the call nor the checkpoint sets max_new_tokens or max_length: at most {DEFAULT_NEW_TOKENS} "
                "tokens are added; pass max_new_tokens",
                stacklevel=3,
            )
        rows, columns = len(prompt) * options.num_return_sequences, prompt.shape[1] + self.max_new_tokens
        model.decoder.check_cache_size(rows, columns, options.kv_cache_dtype or "auto")
        end = self.longest + self.max_new_tokens
        if positions is not None and end > positions:
            warnings.warn(
                f"prompt and new tokens may reach {end} positions, and the model is made for {positions} "
                "(max_position_embeddings), beyond which text tends to be poor; shorten prompt or max_new_tokens",
                stacklevel=3,
            )

        pad_id = next((i for i in (pad_id, *self.eos_ids) if i is not None and i in vocabulary), None)
        ends_early = options.stop_strings or self.eos_ids or self.criteria
        if pad_id is None and ends_early and rows > 1:
            raise InputError("the checkpoint has no pad id for rows that end before the others: pass pad_token_id")
        self.pad_id = pad_id or 0
        past_key_values = one_cache(past_key_values, cache)
        self.cache = None if past_key_values is None else as_cache(past_key_values, config.num_hidden_layers)
        self._check_combinations()
        self._check_gaps()

    def _check_combinations(self) -> None:
        """Raises InputError for arguments that do not go together."""
        options, cache, kind = self.options, self.cache, self.options.kv_cache_dtype
        (rows, length), copies = self.input_ids.shape, options.num_return_sequences
        is_foreign = cache is not None and cache.foreign is not None
        drafters = [name for name in DRAFTERS if getattr(options, name) not in (None, False)]
        chunks = ["prefill_chunk_size"] * (options.prefill_chunk_size is not None)
        fp8, past = ["kv_cache_dtype='fp8'"] * (kind == "fp8"), ["past_key_values"] * (cache is not None)
        images, embeds = sorted(self.inputs), ["inputs_embeds"] * (self.embeds is not None)
        adapter = f"an adapter: {ADAPTED}; call generate of the model inside, such as PEFT's `get_base_model()`"
        several = {
            "padding in the prompt": self.mask is not None,
            f"a batch of {rows * copies} rows (call generate for each row)": rows * copies > 1,
            "a cache of transformers (model.new_cache makes one of ours)": is_foreign,
            "a model with cross-attention": getattr(self.model.decoder.config, "cross_attention_layers", ()),
        }
        for some, others in (
            (["use_cache=False"] * (not options.use_cache), chunks + fp8 + past + drafters + images),
            (images, chunks + embeds),
            (chunks + fp8 + past + drafters, [adapter] * is_adapted(self.model)),
            (["synced_gpus=True"] * bool(options.synced_gpus), chunks + drafters),
            (drafters, drafters[1:] + embeds + [name for name, there in several.items() if there]),
        ):
            if some and others:
                raise InputError(f"{some[0]} contradicts {others[0]}; leave one of them out")
        if cache is None:
            return
        if kind not in (None, cache.kv_cache_dtype):
            raise InputError(
                f"kv_cache_dtype={kind!r} contradicts past_key_values, which is of {cache.kv_cache_dtype!r}: leave it "
                f"out, or make the cache by model.new_cache(..., kv_cache_dtype={kind!r})"
            )
        if cache.length >= length:
            raise InputError(
                f"past_key_values has {cache.length} tokens and input_ids {length}: pass the whole text, the tokens in "
                "the cache included, and at least one that is new"
            )
        if cache.length and cache.rows != rows:
            raise InputError(f"past_key_values is of {cache.rows} rows, input_ids of {rows}; they must be equal")

    def _check_gaps(self) -> None:
        """Raises InputError for padding between tokens, where a recurrent layer reads the mask: its convolution would
        see zeros in place of the tokens before. Cached columns were read before, by a mask of their own."""
        recurrent = (m for m in self.model.modules() if isinstance(m, Layer) and m.is_recurrent)
        if self.mask is None or self.pads_left or next(recurrent, None) is None:
            return
        gaps = (self.mask.cumsum(1) > 0) & ~self.mask
        if gaps[:, 0 if self.cache is None else self.cache.length :].any():
            raise InputError(
                f"{type(self.model).__name__} has recurrent layers, which take no padding between tokens: pad on the "
                "left alone; without attention_mask, ids equal to pad_token_id are padding"
            )


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


def check_device(model: Any, **tensors: Tensor) -> None:
    for name, x in tensors.items():
        if x.device != model.device:
            raise InputError(f"{name} is on {x.device}, the model on {model.device}: use .to(model.device)")


def checked_prompt(
    model: Any, input_ids: Tensor, attention_mask: Tensor | None, pad_id: int | None
) -> tuple[Tensor | None, int, bool]:
    """(bool mask or None if all True, number of tokens of the longest row, whether only the left is padded). Without a
    mask, ids equal to `pad_id` are padding, as in transformers. Raises InputError for what cannot be continued."""
    tensors = {"input_ids": input_ids} | ({} if attention_mask is None else {"attention_mask": attention_mask})
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise InputError(f"{name} is a {type(x).__name__}; it must be a tensor, such as torch.tensor([ids])")
        if x.shape != input_ids.shape:
            raise InputError(f"{name} has shape {list(x.shape)}, input_ids {list(input_ids.shape)}; they must be equal")
    check_device(model, **tensors)
    if input_ids.dim() != 2 or not input_ids.numel() or input_ids.dtype not in (torch.int64, torch.int32):
        raise InputError(
            f"input_ids are {input_ids.dtype} {list(input_ids.shape)}; they must be torch.int64 or torch.int32 [batch, "
            "length of at least 1]: pass input_ids[None] for one prompt, and the bos token for an empty one"
        )
    source, padded = "attention_mask", attention_mask
    if padded is None:
        source = f"input_ids (pad_token_id={pad_id}, and no attention_mask)"
        padded = input_ids != (-1 if pad_id is None else pad_id)
    mask = padded != 0
    low, high, shortest, longest, ends_in_token, is_binary, pads_left = torch.stack([
        *input_ids.aminmax(), *mask.sum(1).aminmax(), mask[:, -1].all(), (mask == padded).all(),
        (mask[:, 1:] >= mask[:, :-1]).all(),
    ]).tolist()  # fmt: skip
    rows = len(model.get_input_embeddings().weight)  # more than vocab_size where the head has none for images
    if low < 0 or high >= rows:
        raise InputError(
            f"input_ids reach from {low} to {high}, the vocabulary from 0 to {rows - 1}; "
            "likely the tokenizer of another model, or a label value such as -100"
        )
    if not is_binary:
        raise InputError("attention_mask must be 1 at tokens and 0 at padding, and it has other values")
    if not ends_in_token:
        raise InputError(
            f"row {int((~mask[:, -1]).nonzero()[0])} of {source} ends in padding, which would come between the prompt "
            "and its continuation: pad on the left (zeros first in attention_mask; a tokenizer's padding_side='left')"
        )
    return None if shortest == mask.shape[1] else mask, longest, bool(pads_left)
