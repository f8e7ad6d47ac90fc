"""The options of a call of `generate`, merged from its keywords, its generation_config and the model's.

Names, defaults and precedence are those of transformers' GenerationConfig, which is read by duck typing.
"""

import dataclasses
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Self

from ligermodels.errors import InputError

DEFAULT_NEW_TOKENS = 20
_LEAST, _MOST = 1e-20, 1e20
"""What logits are divided by, so that fp32 holds the quotient."""

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_SAMPLING_ONLY = {"temperature": (0, 1), "top_k": (0, 50), "top_p": (1,), "min_p": (0,)}
"""Option -> the values that cause no warning in greedy decoding, which ignores it."""

_BEAMS, _CONSTRAINED = "beam search", "constrained decoding (pass a logits_processor)"
_ASSISTED, _CACHES = "assisted decoding", "a cache of that kind"
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_beams": ((1,), _BEAMS),
    "num_beam_groups": ((1,), _BEAMS),
    "diversity_penalty": ((0,), _BEAMS),
    "constraints": ((), _BEAMS),
    "force_words_ids": ((), _BEAMS),
    "penalty_alpha": ((0,), "contrastive search"),
    "dola_layers": ((), "DoLa"),
    "assistant_model": ((), _ASSISTED),
    "assistant_early_exit": ((), _ASSISTED),
    "prompt_lookup_num_tokens": ((), _ASSISTED),
    "use_mtp": ((False,), _ASSISTED),
    "speculation_type": ((), _ASSISTED),
    "guidance_scale": ((1,), "classifier-free guidance"),
    "negative_prompt_ids": ((), "classifier-free guidance"),
    "negative_prompt_attention_mask": ((), "classifier-free guidance"),
    "typical_p": ((1,), "typical sampling"),
    "epsilon_cutoff": ((0, 1), "epsilon sampling"),
    "eta_cutoff": ((0, 1), "eta sampling"),
    "top_h": ((), "top-h sampling"),
    "encoder_repetition_penalty": ((1,), "a penalty on tokens outside the prompt"),
    "encoder_no_repeat_ngram_size": ((0,), "a ban of the prompt's n-grams"),
    "bad_words_ids": ((), _CONSTRAINED),
    "sequence_bias": ((), _CONSTRAINED),
    "forced_bos_token_id": ((), _CONSTRAINED),
    "forced_eos_token_id": ((), _CONSTRAINED),
    "prefix_allowed_tokens_fn": ((), _CONSTRAINED),
    "exponential_decay_length_penalty": ((), _CONSTRAINED),
    "watermarking_config": ((), "watermarking"),
    "remove_invalid_values": ((False,), "replacing NaN logits"),
    "token_healing": ((False,), "token healing"),
    "max_time": ((), "a time limit (pass stopping_criteria)"),
    "output_attentions": ((False,), "returning attention weights, which are never in memory,"),
    "output_hidden_states": ((False,), "returning hidden states (call the model on the sequences)"),
    "cache_implementation": (("dynamic", "static", "hybrid", "sliding_window", "hybrid_chunked"), _CACHES),
    "cache_config": ((), _CACHES),
    "prefill_chunk_size": ((), "chunked prefill"),
    "compile_config": ((), "compiling the forward"),
    "synced_gpus": ((False,), "waiting for other ranks"),
    "custom_generate": ((), "another decoding method"),
    "inputs_embeds": ((), "a prompt of embeddings instead of input_ids"),
}
"""Option -> (the values besides None that mean "off", what the others ask for)."""

WITHOUT_EFFECT = frozenset({
    "assistant_confidence_threshold", "assistant_ensemble_weight", "assistant_lookbehind", "assistant_tokenizer",
    "continuous_batching_config", "decoder_start_token_id", "disable_compile", "early_stopping", "is_assistant",
    "length_penalty", "low_memory", "max_cache_len", "max_matching_ngram_size", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "target_lookbehind", "trust_remote_code",
})  # fmt: skip
"""Options that are accepted and ignored: they only matter together with those above."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """One value for each option; None is off. All are checked here but token ids, which need the vocabulary."""

    max_new_tokens: int | None = None
    max_length: int | None = None
    min_new_tokens: int | None = None
    min_length: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = 50
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    suppress_tokens: Sequence[int] | None = None
    begin_suppress_tokens: Sequence[int] | None = None
    renormalize_logits: bool | None = None
    num_return_sequences: int | None = None
    use_cache: bool | None = True
    return_dict_in_generate: bool | None = None
    output_scores: bool | None = None
    output_logits: bool | None = None
    bos_token_id: Any = None
    eos_token_id: Any = None
    pad_token_id: Any = None
    stop_strings: Any = None

    @classmethod
    def merged(cls, call: dict[str, Any], config: Any, model: Any) -> tuple[Self, set[str]]:
        """Returns the options and the names of those that the caller set; removes them from `call`, the keywords.

        Precedence: keyword, `config`, model.generation_config, default.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        known = names | UNSUPPORTED.keys() | WITHOUT_EFFECT
        keywords = {name: call.pop(name) for name in known & call.keys()}
        for name in ("do_sample", *_TOKEN_IDS):
            if keywords.get(name) is None:
                keywords.pop(name, None)
        explicit = ({} if config is None else _without_none(_entries(config, "generation_config"))) | keywords
        inherited = _without_none({name: getattr(model.config, name, None) for name in _TOKEN_IDS})
        inherited |= _without_none(_entries(model.generation_config, "model.generation_config"))
        _refuse_unsupported(explicit, inherited)

        temperature = keywords.get("temperature")
        if "do_sample" not in explicit and temperature is not None:  # our short form
            explicit["do_sample"] = not _equals(temperature, 0)
            if explicit["do_sample"] and not inherited.get("do_sample"):
                explicit.setdefault("top_k", inherited.get("top_k"))
        values = inherited | explicit
        if not values.get("do_sample"):  # the checkpoint's settings for sampling may be anything
            values = {name: value for name, value in values.items() if name in explicit or name not in _SAMPLING_ONLY}
        options = cls(**{name: value for name, value in values.items() if name in names})
        ignored = [
            name for name, silent in _SAMPLING_ONLY.items()
            if not options.do_sample and explicit.get(name) is not None and explicit[name] not in silent
        ]  # fmt: skip
        if ignored:
            warnings.warn(
                f"{', '.join(ignored)} changes nothing in greedy decoding, which always takes the likeliest token; "
                "pass do_sample=True to draw tokens, or temperature above 0",
                stacklevel=4,
            )
        return options, set(explicit)

    def __post_init__(self):
        for name in ("max_new_tokens", "max_length", "num_return_sequences"):
            value = getattr(self, name)
            if value is not None and (not is_int(value) or value < 1):
                raise InputError(f"{name}={value!r} must be an integer of at least 1")
        for name in ("min_new_tokens", "min_length", "no_repeat_ngram_size"):
            value = getattr(self, name)
            if value is not None and (not is_int(value) or value < 0):
                raise InputError(f"{name}={value!r} must be an integer of at least 0")
        for name in (
            "do_sample", "renormalize_logits", "use_cache", "return_dict_in_generate", "output_scores", "output_logits",
        ):  # fmt: skip
            if not isinstance(getattr(self, name), bool | None):
                raise InputError(f"{name}={getattr(self, name)!r:.80} must be True or False")
        temperature = self.temperature
        if temperature is not None and (
            not _is_number(temperature) or not (temperature == 0 or _LEAST <= temperature < math.inf)
        ):
            raise InputError(
                f"temperature={temperature!r} must be 0 (greedy) or a finite positive number, from {_LEAST:g} up"
            )
        if self.do_sample and temperature == 0:
            raise InputError(
                "do_sample=True and temperature=0 contradict each other: pass do_sample=False for greedy decoding, "
                "or a temperature above 0"
            )
        if self.top_k is not None and (not is_int(self.top_k) or self.top_k < 0):
            raise InputError(f"top_k={self.top_k!r} must be a positive integer, or 0 or None for no limit")
        if self.top_p is not None and (not _is_number(self.top_p) or not 0 < self.top_p <= 1):
            raise InputError(f"top_p={self.top_p!r} must be above 0 and at most 1; 1 or None keeps every token")
        if self.min_p is not None and (not _is_number(self.min_p) or not 0 <= self.min_p <= 1):
            raise InputError(f"min_p={self.min_p!r} must be from 0 to 1; 0 or None keeps every token")
        penalty = self.repetition_penalty
        if penalty is not None and (not _is_number(penalty) or not _LEAST <= penalty <= _MOST):
            raise InputError(
                f"repetition_penalty={penalty!r} must be finite and positive, from {_LEAST:g} to {_MOST:g}; "
                "1 is no penalty"
            )
        if not self.do_sample and (self.num_return_sequences or 1) > 1:
            raise InputError(
                f"num_return_sequences={self.num_return_sequences} needs do_sample=True: greedy decoding would give "
                "the same sequence each time"
            )

    def longest(self, prompt_length: int, positions: int | None, explicit: set[str]) -> int:
        """Returns how many tokens may be added to a prompt of `prompt_length` columns.

        positions: max_position_embeddings. Raises InputError where max_length leaves no room.
        """
        if self.max_new_tokens is not None:
            if self.max_length is not None and {"max_new_tokens", "max_length"} <= explicit:
                warnings.warn(
                    f"max_new_tokens={self.max_new_tokens} takes precedence over max_length={self.max_length}",
                    stacklevel=4,
                )
            return int(self.max_new_tokens)
        name, end = "max_length", self.max_length
        if end is None:
            end = prompt_length + DEFAULT_NEW_TOKENS
            if positions is not None and end > positions:
                name, end = "max_position_embeddings", positions
            warnings.warn(
                f"neither the call nor the checkpoint sets max_new_tokens or max_length: at most {DEFAULT_NEW_TOKENS} "
                "tokens are added; pass max_new_tokens",
                stacklevel=4,
            )
        if end <= prompt_length:
            raise InputError(
                f"the prompt has {prompt_length} tokens, padding included, and {name}={end} leaves no room for new "
                "ones; pass max_new_tokens, which counts only those"
            )
        return int(end) - prompt_length

    def shortest(self, prompt_length: int) -> int:
        """Returns how many columns, prompt included, a row has before a stop id may come."""
        if self.min_new_tokens is not None:
            return prompt_length + int(self.min_new_tokens)
        return int(self.min_length or 0)


def is_int(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _equals(value: Any, other: Any) -> bool:
    """Compares numbers and strings; anything else, such as a tensor, equals nothing."""
    return isinstance(value, Real | str) and value == other


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _refuse_unsupported(explicit: Mapping[str, Any], inherited: Mapping[str, Any]) -> None:
    for name, (off, what) in UNSUPPORTED.items():
        value = explicit.get(name, inherited.get(name))
        if value is None or any(value is other or _equals(value, other) for other in off):
            continue
        shown = f"{name}={repr(value).splitlines()[0]:.80}: {what} is not supported by generate; leave {name} out"
        if name not in explicit:
            shown = f"model.generation_config sets {shown}, or pass {name}={off[0] if off else None!r}"
        raise InputError(shown)


def _entries(config: Any, name: str) -> Mapping[str, Any]:
    """Returns the values of a generation config: transformers', the model's, or a dict."""
    if isinstance(config, Mapping):
        return config
    if callable(getattr(config, "to_dict", None)):
        return config.to_dict()
    raise InputError(f"{name} is a {type(config).__name__}; it must be a GenerationConfig or a dict")
