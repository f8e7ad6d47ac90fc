"""A call of `generate`, checked against the model before the first step."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ligermodels.errors import InputError, did_you_mean
from ligermodels.generation.options import DRAFTERS, KNOWN_NAMES, OPTION_NAMES, Options
from ligermodels.generation.stopping import StoppingCriterion
from ligermodels.layers.state import Cache, TransformersCache, as_cache

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]
"""(ids [B, S] so far, logits [B, V] fp32) -> logits."""

ADAPTED = "another object, such as a PEFT model, prepares the inputs of each step"


@dataclass(frozen=True, kw_only=True)
class Request:
    """A checked call: the inputs of an engine."""

    model: Any
    options: Options
    vocab_size: int
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
    def drafts(self) -> bool:
        """Whether a drafter proposes tokens."""
        options = self.options
        return bool(options.prompt_lookup_num_tokens or options.medusa is not None or options.use_mtp)

    @classmethod
    def checked(
        cls, model: Any, inputs: Tensor | None = None, generation_config: Any = None, logits_processor: Any = None,
        stopping_criteria: Any = None, *, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None,
        attention_mask: Tensor | None = None, past_key_values: Any = None, tokenizer: Any = None, **keywords: Any,
    ) -> Self:  # fmt: skip
        """The request of a call with the arguments of `generate`. Raises InputError."""
        given = {name: keywords.pop(name) for name in KNOWN_NAMES & keywords.keys()}
        options, explicit = Options.merged(given, generation_config, model)
        model_inputs = {name: value for name, value in keywords.items() if value is not None}
        for name in sorted(model_inputs.keys() - model.extra_inputs):
            raise InputError(
                f"{name}: neither an option of generate nor an input of {type(model).__name__}"
                + did_you_mean(name, [*OPTION_NAMES, *model.extra_inputs, "attention_mask", "input_ids"])
            )
        config = model.config.get_text_config()
        vocabulary, positions = range(config.vocab_size), getattr(config, "max_position_embeddings", None)
        eos_ids = tuple(dict.fromkeys(_token_ids(options.eos_token_id)))
        if "eos_token_id" not in explicit:  # some checkpoints write -1 for "none"
            eos_ids = tuple(i for i in eos_ids if i in vocabulary)
        pad_id = next((i for i in _token_ids(options.pad_token_id) if i in vocabulary), None)
        strings, words = options.stop_strings, options.bad_words_ids
        strings = (strings,) if isinstance(strings, str) else tuple(strings or ())
        _refuse(
            ("pad_token_id" in explicit and options.pad_token_id not in vocabulary,
             f"pad_token_id={options.pad_token_id!r:.80} is outside the vocabulary (0 to {len(vocabulary) - 1})"),
            (not all(i in vocabulary for i in options.suppress_tokens or ()),
             f"suppress_tokens={options.suppress_tokens!r:.200} must be a list of token ids below {len(vocabulary)}"),
            (words is not None and not (words and all(len(ids) and all(i in vocabulary for i in ids) for ids in words)),
             f"bad_words_ids={words!r:.200} must be a list of lists of token ids below {len(vocabulary)}"),
            (not all(isinstance(string, str) and string for string in strings),
             f"stop_strings must be non-empty strings, not {strings!r:.200}"),
            (strings and not callable(getattr(tokenizer, "decode", None)),
             f"stop_strings are searched in the text, and tokenizer is a {type(tokenizer).__name__}: pass "
             "tokenizer=Tokenizer.from_hub(...), or another one with a decode method"),
            (inputs is not None and input_ids is not None,
             "inputs and input_ids are two names for the prompt; pass one of them"),
        )  # fmt: skip

        prompt = input_ids if inputs is None else inputs
        without_ids, pad_in_prompt = 0, None if pad_id in eos_ids else pad_id
        if inputs_embeds is not None:
            _check_embeds(model, inputs_embeds, prompt)
            if prompt is None:
                prompt = torch.zeros(inputs_embeds.shape[:2], dtype=torch.int64, device=inputs_embeds.device)
                without_ids, pad_in_prompt = prompt.shape[1], None
        if prompt is None:
            bos_ids = _token_ids(options.bos_token_id)
            if len(bos_ids) != 1 or attention_mask is not None:
                raise InputError("no prompt: pass input_ids; without them, generate needs a bos token and no mask")
            prompt = torch.tensor([bos_ids], device=model.device)
        mask, longest, pads_left = checked_prompt(model, prompt, attention_mask, pad_in_prompt)
        max_new_tokens = options.new_tokens(prompt.shape[1], positions)
        if positions is not None and longest + max_new_tokens > positions:
            warnings.warn(
                f"prompt and new tokens may reach {longest + max_new_tokens} positions, and the model is made for "
                f"{positions} (max_position_embeddings): text beyond them tends to be poor; shorten prompt or "
                "max_new_tokens",
                stacklevel=3,
            )

        copies, criteria = int(options.num_return_sequences or 1), _as_list(stopping_criteria)
        pad_id = next((i for i in (pad_id, *eos_ids) if i is not None and i in vocabulary), None)
        if pad_id is None and (strings or eos_ids or criteria) and len(prompt) * copies > 1:
            raise InputError(
                "a row that stops before the others is filled with the pad id, and this checkpoint has none in its "
                "vocabulary: pass pad_token_id"
            )
        cache = None if past_key_values is None else as_cache(past_key_values, config.num_hidden_layers)
        request = cls(
            model=model, options=options, vocab_size=len(vocabulary), input_ids=prompt, embeds=inputs_embeds,
            without_ids=without_ids, mask=mask, longest=longest, pads_left=pads_left, copies=copies,
            max_new_tokens=max_new_tokens, eos_ids=eos_ids, pad_id=pad_id or 0, stop_strings=strings,
            tokenizer=tokenizer, processors=_as_list(logits_processor), criteria=criteria, cache=cache,
            inputs=model_inputs,
        )  # fmt: skip
        request._check_combinations()
        return request

    def _check_combinations(self) -> None:
        """Raises InputError for arguments that do not go together."""
        options, cache, kind = self.options, self.cache, self.options.kv_cache_dtype
        rows, length = self.input_ids.shape
        no_cache = options.use_cache is False, "use_cache=False"
        chunks = options.prefill_chunk_size is not None, "prefill_chunk_size"
        fp8 = kind == "fp8", "kv_cache_dtype='fp8'"
        past = cache is not None, "past_key_values"
        foreign = isinstance(cache, TransformersCache), "a cache of transformers (model.new_cache makes one of ours)"
        drafters = [(getattr(options, name) not in (None, False), name) for name in DRAFTERS]
        embeds = self.embeds is not None, "inputs_embeds"
        images = bool(self.inputs), ", ".join(sorted(self.inputs))
        padding = self.mask is not None, "padding in the prompt"
        batch = rows * self.copies > 1, f"a batch of {rows * self.copies} rows (call generate for each row)"
        crosses = getattr(self.model.decoder.config, "cross_attention_layers", ()), "a model with cross-attention"
        adapter = is_adapted(self.model), (
            f"an adapter: {ADAPTED}; call generate of the model inside (PEFT's `get_base_model()`, whose layers "
            "keep their LoRA)"
        )  # fmt: skip
        for one, others in (
            (no_cache, (chunks, fp8, past, *drafters, images)),
            (images, (chunks, embeds)),
            *((one, (*drafters[i + 1 :], embeds, padding, batch, foreign, crosses)) for i, one in enumerate(drafters)),
            *((one, (adapter,)) for one in (chunks, fp8, past, *drafters)),
        ):
            for other in others:
                if one[0] and other[0]:
                    raise InputError(f"{one[1]} contradicts {other[1]}; leave one of them out")
        if cache is not None:
            _refuse(
                (kind not in (None, cache.kv_cache_dtype),
                 f"kv_cache_dtype={kind!r} contradicts past_key_values, which is of {cache.kv_cache_dtype!r}: leave "
                 f"one of them out, or make the cache with model.new_cache(..., kv_cache_dtype={kind!r})"),
                (cache.length >= length,
                 f"past_key_values has {cache.length} tokens and input_ids {length}: pass the whole text, the tokens "
                 "in the cache included, and at least one that is new"),
                (cache.length and cache.rows != rows,
                 f"past_key_values is of {cache.rows} rows, input_ids of {rows}; they must be equal"),
            )  # fmt: skip


def is_adapted(model: Any) -> bool:
    """Whether another object, such as a PEFT model around this one, prepares the inputs of each step."""
    return getattr(model.prepare_inputs_for_generation, "__self__", model) is not model


def _refuse(*problems: tuple[Any, str]) -> None:
    """Raises InputError with the text of the first problem that is there."""
    for problem, text in problems:
        if problem:
            raise InputError(text)


def _as_list(value: Any) -> list[Any]:
    """A list of callables, from one of them, a list (transformers' own lists are callable too) or None."""
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _token_ids(value: Any) -> list[int]:
    """The token ids in an int, None, a tensor or a list."""
    try:
        return torch.as_tensor([] if value is None else value).flatten().tolist()
    except (TypeError, ValueError) as error:
        raise InputError(f"eos, bos and pad ids must be integers or lists of them, not {value!r:.200}") from error


def _check_embeds(model: Any, embeds: Any, prompt: Any) -> None:
    """Raises InputError for embeddings that are no prompt. The model's forward checks their dtype."""
    size = model.config.get_text_config().hidden_size
    if not isinstance(embeds, Tensor) or embeds.dim() != 3 or embeds.shape[2] != size or not embeds.numel():
        found = f"of shape {list(embeds.shape)}" if isinstance(embeds, Tensor) else f"a {type(embeds).__name__}"
        raise InputError(f"inputs_embeds is {found}; it must be a tensor [batch, length of at least 1, {size}]")
    if isinstance(prompt, Tensor) and prompt.shape != embeds.shape[:2]:
        raise InputError(
            f"input_ids has shape {list(prompt.shape)} and inputs_embeds {list(embeds.shape)}: input_ids must be the "
            "ids of the same tokens, or be left out"
        )
    check_device(model, inputs_embeds=embeds)


def check_device(model: Any, **given: Tensor) -> None:
    for name, x in given.items():
        if x.device != model.device:
            raise InputError(f"{name} is on {x.device}, the model on {model.device}: use .to(model.device)")


def checked_prompt(
    model: Any, input_ids: Tensor, attention_mask: Tensor | None, pad_id: int | None
) -> tuple[Tensor | None, int, bool]:
    """(bool mask or None if all True, number of tokens of the longest row, whether only the left is padded).

    Without a mask, ids equal to `pad_id` are padding, as in transformers. Raises InputError for a prompt that cannot
    be continued.
    """
    given = {"input_ids": input_ids} | ({} if attention_mask is None else {"attention_mask": attention_mask})
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise InputError(f"{name} is a {type(x).__name__}; it must be a tensor, such as torch.tensor([ids])")
        if x.shape != input_ids.shape:
            raise InputError(f"{name} has shape {list(x.shape)}, input_ids {list(input_ids.shape)}; they must be equal")
    check_device(model, **given)
    shape, hint = list(input_ids.shape), ": pass input_ids[None] for one prompt" if input_ids.dim() == 1 else ""
    _refuse(
        (len(shape) != 2, f"input_ids has shape {shape}; it must be [batch, length]{hint}"),
        (input_ids.dtype not in (torch.int64, torch.int32),
         f"input_ids are {input_ids.dtype}; token ids must be torch.int64 or torch.int32"),
        (not input_ids.numel(),
         f"input_ids has shape {shape}: an empty prompt has nothing to continue; start with the bos token"),
    )  # fmt: skip
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
    mask = attention_mask != 0
    is_binary = (mask == attention_mask).all()
    pads_left = (mask[:, 1:] >= mask[:, :-1]).all()
    shortest, longest, ends_in_token, is_binary, pads_left = torch.stack(
        [*mask.sum(1).aminmax(), mask[:, -1].all(), is_binary, pads_left]
    ).tolist()
    if not is_binary:
        raise InputError("attention_mask must be 1 at tokens and 0 at padding, and it has other values")
    if not ends_in_token:
        raise InputError(
            f"row {int((~mask[:, -1]).nonzero()[0])} of {source} ends in padding, which would separate the "
            "continuation from its prompt: pad on the left (zeros first in attention_mask), as a tokenizer does with "
            "padding_side='left'"
        )
    return None if shortest == mask.shape[1] else mask, longest, bool(pads_left)
