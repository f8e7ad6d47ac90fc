"""The options of `generate`: names, defaults and precedence of transformers' GenerationConfig (read by duck typing)."""

import dataclasses
import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Self

from ligermodels.errors import InputError

DEFAULT_NEW_TOKENS = 20
DRAFTERS = ("prompt_lookup_num_tokens", "medusa", "use_mtp")
"""The options that choose a drafter."""
MAX_GUESSES = 128
"""The maximum number of tokens that a drafter proposes at once: a verifying step has a row for each."""
CACHE_ALIAS = {"cache": "past_key_values"}
"""The name that transformers has since 5.24, and the older one, which is the key of our outputs."""
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
SAMPLING_OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""{sampling option, which greedy decoding ignores: the value that switches it off}."""

BY_TRANSFORMERS = {
    "bad_words_ids": "logits_processor=NoBadWordsLogitsProcessor",
    "epsilon_cutoff": "logits_processor=EpsilonLogitsWarper",
    "eta_cutoff": "logits_processor=EtaLogitsWarper",
    "exponential_decay_length_penalty": "logits_processor=ExponentialDecayLengthPenalty",
    "forced_eos_token_id": "logits_processor=ForcedEOSTokenLogitsProcessor",
    "max_time": "stopping_criteria=MaxTimeCriteria",
    "prefix_allowed_tokens_fn": "logits_processor=PrefixConstrainedLogitsProcessor",
    "sequence_bias": "logits_processor=SequenceBiasLogitsProcessor",
    "typical_p": "logits_processor=TypicalLogitsWarper",
}
"""{option that generate does not have: the argument and the class of transformers that replace it}."""
UNSUPPORTED = frozenset(BY_TRANSFORMERS) | frozenset("""
    assistant_early_exit assistant_model cache_config compile_config constraints custom_generate diversity_penalty
    dola_layers encoder_no_repeat_ngram_size encoder_repetition_penalty force_words_ids forced_bos_token_id
    guidance_scale negative_prompt_attention_mask negative_prompt_ids num_beam_groups num_beams output_attentions
    output_hidden_states penalty_alpha remove_invalid_values speculation_type token_healing
    top_h watermarking_config
""".split())  # fmt: skip  # noqa: SIM905
"""Options of transformers that would change the result, also in a checkpoint's generation_config.json: an error, unless
the value is None, False, or 0 (for those in _OFF_IS_ONE: 1)."""
_OFF_IS_ONE = ("encoder_repetition_penalty", "guidance_scale", "num_beam_groups", "num_beams", "typical_p")
IGNORED = frozenset("""
    assistant_confidence_threshold assistant_ensemble_weight assistant_lookbehind assistant_tokenizer
    cache_implementation continuous_batching_config decoder_start_token_id early_stopping is_assistant labels
    length_penalty low_memory max_cache_len num_assistant_tokens_schedule target_lookbehind trust_remote_code
""".split())  # fmt: skip  # noqa: SIM905
"""Options of transformers that are accepted without effect. Labels come with the batch of a trainer."""


def _number(kind: Any, low: float, high: float = math.inf, *, off: Any = None, default: Any = None) -> Any:
    """A field with a number from `low` to `high`. off: the value that None becomes. default: None means `off`."""
    metadata = {"kind": kind, "low": low, "high": high, "off": off}
    return field(default=off if default is None else default, metadata=metadata)


@dataclass(kw_only=True)
class Options:
    """The checked options of a call; None becomes the value that switches an option off. `generate` documents them."""

    max_new_tokens: int | None = _number(Integral, 1)
    max_length: int | None = _number(Integral, 1)
    min_new_tokens: int | None = _number(Integral, 0)
    min_length: int = _number(Integral, 0, off=0)
    do_sample: bool | None = None
    # Bounds of 1e-20 and 1e20 keep the quotients of logits within fp32.
    temperature: float = _number(Real, 1e-20, 1e20, off=1.0)  # 0 is greedy
    top_k: int = _number(Integral, 0, off=0, default=50)
    top_p: float = _number(Real, 1e-20, 1, off=1.0)
    min_p: float = _number(Real, 0, 1, off=0.0)
    repetition_penalty: float = _number(Real, 1e-20, 1e20, off=1.0)
    no_repeat_ngram_size: int = _number(Integral, 0, off=0)
    suppress_tokens: Any = None
    begin_suppress_tokens: Any = None
    renormalize_logits: bool | None = None
    num_return_sequences: int = _number(Integral, 1, off=1)
    use_cache: bool = True
    kv_cache_dtype: str | None = None
    return_dict_in_generate: bool | None = None
    output_scores: bool | None = None
    output_logits: bool | None = None
    output_experts: bool | None = None
    bos_token_id: Any = None
    eos_token_id: Any = None
    pad_token_id: Any = None
    stop_strings: str | Sequence[str] | None = None
    prefill_chunk_size: int | None = _number(Integral, 1)
    seed: int | None = _number(Integral, -(2**63), 2**64 - 1)
    disable_compile: bool | None = None
    synced_gpus: bool | None = None
    prompt_lookup_num_tokens: int | None = _number(Integral, 1, MAX_GUESSES)
    max_matching_ngram_size: int = _number(Integral, 1, off=2)
    medusa: Any = None
    use_mtp: bool | None = None
    num_assistant_tokens: int = _number(Integral, 1, MAX_GUESSES, off=2)

    @classmethod
    def merged(cls, keywords: Mapping[str, Any], config: Any, model: Any) -> tuple[Self, set[str]]:
        """(the options of a call, the names that the caller set).

        Precedence: `keywords` of the call, its generation config, model.generation_config, transformers' default.
        config.json's token ids count where model.generation_config has no such entry; an entry of None means none.
        Raises InputError for values out of range and for unsupported options.
        """
        unset = {name for name in ("do_sample", *TOKEN_IDS) if keywords.get(name) is None}
        keywords = {name: value for name, value in keywords.items() if name not in unset}
        explicit = ({} if config is None else _entries(config, "generation_config")) | keywords
        inherited = _entries(model.generation_config, "model.generation_config", model.config)
        _refuse_unsupported(explicit, inherited)

        temperature = keywords.get("temperature")
        if "do_sample" not in explicit and temperature is not None:  # our short form
            explicit["do_sample"] = temperature != 0
            if temperature != 0 and not inherited.get("do_sample"):
                explicit.setdefault("top_k", inherited.get("top_k"))
        values = inherited | explicit
        if not values.get("do_sample"):  # the checkpoint's settings for sampling may be anything
            values = {name: value for name, value in values.items() if name in explicit or name not in SAMPLING_OFF}
        options = cls(**{name: values[name] for name in OPTION_NAMES & values.keys()})
        for name, off in SAMPLING_OFF.items() if not options.do_sample else ():
            if name in explicit and getattr(options, name) not in (off, getattr(cls, name)):
                message = f"{name} changes nothing in greedy decoding; pass do_sample=True to draw tokens"
                warnings.warn(message, stacklevel=4)
        return options, set(explicit)

    def __post_init__(self):
        if self.temperature == 0:
            if self.do_sample:
                raise InputError("do_sample=True and temperature=0 contradict: pass do_sample=False, or a temperature")
            self.temperature = 1.0
        for option in dataclasses.fields(self):
            name, value, rule = option.name, getattr(self, option.name), option.metadata
            if value is None:
                setattr(self, name, rule.get("off"))
            elif rule and (
                not isinstance(value, rule["kind"]) or isinstance(value, bool)
                or not rule["low"] <= value <= rule["high"]
            ):  # fmt: skip
                kind = "an integer" if rule["kind"] is Integral else "a number"
                upper = "" if rule["high"] == math.inf else f" and at most {rule['high']}"
                least = "0, or at least 1e-20" if name == "temperature" else f"at least {rule['low']}"
                raise InputError(f"{name}={value!r:.80} must be {kind} of {least}{upper}")
        if isinstance(self.stop_strings, str):
            self.stop_strings = [self.stop_strings]
        if not all(isinstance(string, str) and string for string in self.stop_strings or ()):
            raise InputError(f"stop_strings must be non-empty strings, not {self.stop_strings!r:.200}")
        self.suppress_tokens = _ids("suppress_tokens", self.suppress_tokens)
        self.begin_suppress_tokens = _ids("begin_suppress_tokens", self.begin_suppress_tokens)
        self.use_cache = self.use_cache is not False
        if self.kv_cache_dtype not in (None, "auto", "fp8"):
            raise InputError(f"kv_cache_dtype={self.kv_cache_dtype!r} must be 'auto', the dtype of the model, or 'fp8'")
        if not self.do_sample and self.num_return_sequences > 1:
            number = f"num_return_sequences={self.num_return_sequences}"
            raise InputError(f"{number} needs do_sample=True: greedy decoding gives the same sequence each time")

    def new_tokens(self, prompt_length: int, positions: int | None) -> int:
        """The maximum number of tokens after a prompt of `prompt_length` columns; of two limits max_new_tokens counts.

        positions: max_position_embeddings. Raises InputError if the prompt is as long as max_length.
        """
        if self.max_new_tokens is not None:
            return int(self.max_new_tokens)
        end = self.max_length or min(prompt_length + DEFAULT_NEW_TOKENS, positions or sys.maxsize)
        if end <= prompt_length:
            number = f"the prompt has {prompt_length} tokens, padding included"
            raise InputError(f"{number}, and max_length={end} leaves none for new ones; pass max_new_tokens")
        return int(end) - prompt_length


OPTION_NAMES = frozenset(field.name for field in dataclasses.fields(Options))
KNOWN_NAMES = OPTION_NAMES | UNSUPPORTED | IGNORED


def _ids(name: str, value: Any) -> list[int]:
    """Token ids as a list. Raises InputError."""
    if callable(getattr(value, "tolist", None)):  # a tensor
        value = value.tolist()
    ids = [] if value is None else value
    if not isinstance(ids, Sequence) or any(not isinstance(i, Integral) or isinstance(i, bool) for i in ids):
        raise InputError(f"{name}={value!r:.80} must be a list of token ids")
    return [int(i) for i in ids]


def _refuse_unsupported(explicit: Mapping[str, Any], inherited: Mapping[str, Any]) -> None:
    for name in sorted(UNSUPPORTED):
        value, off = explicit.get(name, inherited.get(name)), 1 if name in _OFF_IS_ONE else 0
        if value is None or value is False or (isinstance(value, Real) and value == off):
            continue
        setting, instead = f"{name}={repr(value).splitlines()[0]:.80}", f"leave {name} out"
        fault = f"{setting} is not supported by generate"
        if name not in explicit:
            fault = f"model.generation_config sets {setting}, which generate does not support"
            instead = f"pass {name}={off or None}, which switches it off"
        if name in BY_TRANSFORMERS:
            instead += f", and pass {BY_TRANSFORMERS[name]}(...) of transformers"
        raise InputError(f"{fault}; {instead}")


def _entries(config: Any, name: str, of_model: Any = None) -> dict[str, Any]:
    """The values of a generation config (transformers', the model's, or a dict) that are not None.

    of_model: a config.json, whose token ids count where the generation config has no such entry.
    """
    if not isinstance(config, Mapping):
        if not callable(getattr(config, "to_dict", None)):
            raise InputError(f"{name} is a {type(config).__name__}; it must be a GenerationConfig or a dict")
        config = config.to_dict()
    values = {name: getattr(of_model, name, None) for name in TOKEN_IDS} | dict(config)
    return {name: value for name, value in values.items() if value is not None}
