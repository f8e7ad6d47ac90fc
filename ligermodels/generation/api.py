"""`generate`, `generate_iter`, `generate_many` and `generate_many_iter`: front ends of the engines."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.attr_dict import AttrDict
from ligermodels.errors import InputError
from ligermodels.generation.continuous import ContinuousEngine
from ligermodels.generation.drafters import DraftingEngine
from ligermodels.generation.engine import PaddedEngine
from ligermodels.generation.options import CACHE_ALIAS, DRAFTERS
from ligermodels.generation.request import Request, checked_prompt, is_adapted

_OF_ONE_BATCH = frozenset("""
    attention_mask cache input_ids inputs inputs_embeds logits_processor medusa output_logits output_scores
    past_key_values prompt_lookup_num_tokens return_dict_in_generate stopping_criteria streamer
    synced_gpus use_mtp
""".split())  # fmt: skip  # noqa: SIM905
"""Arguments of `generate` that `generate_many` does not take."""


class GenerateOutput(AttrDict):
    """The result of `generate(return_dict_in_generate=True)`: a dict whose fields are attributes too, None if absent.

    sequences: [B * num_return_sequences, S + new]. scores, with output_scores: the logits of each step after all
    processing. logits, with output_logits: the model's own. Both are tuples of [rows, V] fp32. past_key_values, read as
    `cache` too: the cache of all tokens but the last; empty where a layer has a recurrent state, and a row ended before
    the others. experts, with output_experts: int16 [rows, S + new - 1, layers, top_k], which routers chose for each
    token but the last; what they have at padding means nothing.
    """

    fields = frozenset(("sequences", "scores", "logits", "past_key_values", "experts", "attentions", "hidden_states"))
    aliases = CACHE_ALIAS


def generate(
    model: nn.Module, inputs: Tensor | None = None, generation_config: Any = None, logits_processor: Any = None,
    stopping_criteria: Any = None, *, streamer: Any = None, **options: Any,
) -> Tensor | GenerateOutput:  # fmt: skip
    """Continues each row of the prompt. The same call gives the same text as transformers' `generate`.

    Each option takes its value from the first that sets it: the keyword, `generation_config`, `model.generation_config`
    (the checkpoint's generation_config.json), transformers' default. A checkpoint with do_sample=true is therefore
    sampled with its own temperature, top_k and top_p unless the call sets do_sample=False. A keyword of None switches
    the option off; for do_sample and token ids it means "not set".

    Two things are ours. The keyword `temperature`, where neither the call nor its generation_config sets do_sample,
    decides it: 0 is greedy, above 0 samples (from all tokens if nobody sets top_k and the checkpoint does not sample).
    And `seed`.

    Args:
        inputs, input_ids: [B, S] int64 or int32, on the model's device, under either name. Rows of unequal length:
            pad on the left. None: the bos token.
        inputs_embeds: [B, S, hidden_size] in the model's dtype, read in place of the prompt's ids, which may be passed
            as well; without them the result, and all that reads the text so far, has only new ids.
        generation_config: a GenerationConfig of transformers, or a dict.
        logits_processor: a callable or a list of them, (ids [B, S + step], logits [B, V] fp32) -> logits, such as
            transformers' NoBadWordsLogitsProcessor. They run after the repetition penalty and the bans, and before
            temperature, top_k, top_p and min_p.
        stopping_criteria: a callable or a list of them, (ids, scores) -> bool [B], or one bool; a row is done when
            one returns True for it. scores: None without output_scores.
        attention_mask: [B, S], 1 for a token and 0 for padding. None: ids equal to pad_token_id are padding, unless
            that is a stop id too. A pad_token_id of config.json counts only where there is no generation_config.json.
        past_key_values, cache: a Cache, or a DynamicCache of transformers, with the first tokens of the prompt, under
            either name. The prompt is still passed in full. It is extended in place; a call that fails midway empties a
            Cache.
        labels: ignored, so that `generate(**batch)` takes the batch of a trainer.
        streamer: an object such as transformers' TextStreamer, which gets put(the prompt [B, S]), put(ids [B]) in each
            step, end(). Tensors are on the CPU.
        tokenizer: for stop_strings; any object with `decode(ids, skip_special_tokens=)`.

    Options:
        max_new_tokens: maximum number of new tokens of a row; default 20, with a warning. max_length: the same, with
            the prompt and its padding.
        min_new_tokens: minimum number of new tokens before a stop id is allowed. min_length: the same, with the prompt
            and its padding, where min_new_tokens is not set.
        do_sample: True draws the next token; False, the default, takes the likeliest (greedy).
        temperature: divides the logits; default 1. seed: draws use their own generator; None: torch's global one.
        top_k: draw among the k likeliest (ties with the k-th included); 0 or None: all. Default 50.
        top_p: draw among the likeliest tokens, as few as reach a total probability of top_p.
        min_p: draw among tokens at least min_p times as likely as the likeliest.
        repetition_penalty: > 1 makes every token of the row so far, prompt included, less likely, also if greedy.
        no_repeat_ngram_size: no n-gram of this size is repeated within a row, prompt and padding included.
        suppress_tokens: ids that are never chosen. begin_suppress_tokens: ids that are not chosen first.
        renormalize_logits: the logits, which are returned as scores, become log probabilities after all processing.
        num_return_sequences: continuations of each row, which follow each other in the result; needs sampling.
        eos_token_id: stop ids; (): none. Default: the generation config's, or config.json's where the checkpoint has
            no generation_config.json. pad_token_id: fills rows that finished early; default the first stop id.
        stop_strings: a row ends when its new text contains one; needs `tokenizer`. The ids keep the string.
        use_cache: False runs the model on the whole text at each step.
        kv_cache_dtype: "fp8" stores keys and values in e4m3, in half the memory (docs/operations.md has the error). The
            prompt attends to its own unrounded keys, later tokens to the rounded ones. Default: the model's dtype.
        prefill_chunk_size: tokens of the prompt in one forward pass, which bounds the memory of a long prompt.
        disable_compile: True decodes without a CUDA graph. By default each step on CUDA is one. The graph's memory,
            most of it the KV cache, is kept for the next call; `model.release()` frees it.
        synced_gpus: True where each of several processes generates and weights are sharded (ZeRO-3, FSDP): one that has
            ended runs the model until all have. Do not leave `generate_iter` early then.
        prompt_lookup_num_tokens: K, at most 128: each step verifies up to K proposed tokens, those that followed the
            first occurrence of the last max_matching_ngram_size tokens (default 2). For text that copies, such as
            edited code. One row, use_cache, a Cache or none. The ids, also those drawn with a seed, are the same as
            without it, up to ties: a forward pass of several tokens rounds differently.
        medusa: heads, such as `training.load_medusa(model, folder)`, that propose one token each, verified likewise.
        use_mtp: the model's own layer for multi-token prediction (`training.load_mtp`) proposes num_assistant_tokens
            tokens, by default 2, verified likewise.
        return_dict_in_generate, output_scores, output_logits, output_experts: see `GenerateOutput`.
        Other options of transformers (beam search, contrastive search, assisted decoding, ...) raise. Other keywords
        are inputs of the model's forward for the prompt, such as pixel_values; unknown ones raise.

    Returns:
        [B * num_return_sequences, S + new] ids, prompt included where it has ids; new is the length of the longest row.
        Or a `GenerateOutput`.

    Raises:
        InputError: arguments that are out of range, contradictory or not supported; padding on the right; ids outside
            the vocabulary; NaN logits.
    """
    engine = _engine(Request(model, inputs, generation_config, logits_processor, stopping_criteria, **options))
    if streamer is not None:
        streamer.put(engine.ids[:, engine.first : engine.length].cpu())
    for new in engine.decode():
        if streamer is not None:
            streamer.put(new)
    if streamer is not None:
        streamer.end()
    ids = engine.ids[:, engine.first : engine.length].clone()  # the buffer is longer if rows stopped early
    if not engine.options.return_dict_in_generate:
        return ids
    cache, kept = engine.cache, {"scores": engine.scores, "logits": engine.raw_logits}
    output = GenerateOutput({"sequences": ids} | {name: tuple(x) for name, x in kept.items() if x is not None})
    if cache is not None:
        output["past_key_values"] = cache if cache.foreign is None else cache.foreign
    if engine.options.output_experts:
        output["experts"] = cache.values["experts"][:, : ids.shape[1] - 1].clone()
    return output


def generate_iter(model: nn.Module, *args: Any, **options: Any) -> Iterator[Tensor]:
    """`generate` as an iterator: yields the new ids [B] of each step, on the CPU, pad ids for finished rows. Arguments
    are those of `generate`, without `streamer`, and so are errors, at the call. To stop early, leave the loop."""
    return _engine(Request(model, *args, **options)).decode()


def _engine(request: Request) -> PaddedEngine:
    drafts = any(getattr(request.options, name) not in (None, False) for name in DRAFTERS)
    return DraftingEngine(request) if drafts else PaddedEngine(request)


def generate_many(
    model: nn.Module, prompts: Sequence[Tensor | Sequence[int]], *, batch_size: int = 32, **options: Any
) -> list[Any]:
    """Continues each prompt: the new ids, int64 on the CPU, stop id included, in the order of the prompts.

    Greedy decoding gives the ids of `generate` for each prompt alone, to within rounding. Sampled ids differ from those
    of `generate` but have the same distribution; the same call with the same `seed` gives the same ids.

    Args:
        prompts: the ids of each prompt, a list or a tensor [S] on any device. No id counts as padding.
        batch_size: number of rows that decode together. Each size has a CUDA graph, which is kept for the next call.
        options: those of `generate` but scores, logits and the cache (return_dict_in_generate), the caller's
            processors and criteria, embeddings and images. max_length and min_length count a prompt's own tokens. A
            prompt runs once for all of its continuations (num_return_sequences), which follow each other in the result.
            output_experts: each is (ids, experts), int16 [tokens of prompt and ids but the last, layers, top_k], those
            that the routers chose, on the CPU.

    Raises:
        InputError: arguments out of range or not supported; ids outside the vocabulary; NaN logits; rows that may grow
            beyond the original length, where rotary positions depend on the longest row of a batch ("longrope",
            "dynamic").
    """
    by_index = dict(generate_many_iter(model, prompts, batch_size=batch_size, **options))
    return [by_index[i] for i in range(len(by_index))]


def generate_many_iter(
    model: Any, prompts: Sequence[Tensor | Sequence[int]], *, batch_size: int = 32, **options: Any
) -> Iterator[tuple[int, Any]]:
    """`generate_many` as an iterator: (index in its result, new ids) of each continuation as it ends. Errors are raised
    at the call. The longest prompts run first. To stop early, leave the loop."""
    texts = [_as_ids(i, prompt) for i, prompt in enumerate(prompts)]
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise InputError(f"batch_size={batch_size!r:.80} must be an integer of at least 1")
    if not hasattr(type(model), "new_cache") or is_adapted(model):
        raise InputError(
            f"generate_many needs a model of ligermodels, not a {type(model).__name__} around one or an adapter: pass "
            "the model inside (`.module`, or PEFT's `get_base_model()`, whose layers keep their LoRA)"
        )
    for name in sorted(_OF_ONE_BATCH & options.keys()):
        if options[name] is not None and options[name] is not False:
            raise InputError(
                f"generate_many does not take {name}: prompts and results are lists of ids; use `generate`"
            )
    if options.get("use_cache") is False:
        raise InputError("generate_many needs its cache: leave use_cache out, or use `generate`")
    if not texts:
        return iter(())
    checked_prompt(model, torch.cat(texts)[None].to(model.device), None, None)
    longest = max(texts, key=len)[None].to(model.device)
    # A finished row is not padded, so no pad id is needed. Options in _OF_ONE_BATCH that a config sets are off.
    fixed = dict.fromkeys(_OF_ONE_BATCH) | {"attention_mask": torch.ones_like(longest), "use_cache": True}
    request = Request(model, **{"pad_token_id": 0, **options, **fixed, "input_ids": longest})
    if request.inputs:
        raise InputError(f"generate_many reads text alone: leave {', '.join(sorted(request.inputs))} out")
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    limits = [request.options.new_tokens(len(text), positions) for text in texts]
    rotary, total = model.decoder.rotary_emb, max(len(text) + limit for text, limit in zip(texts, limits, strict=True))
    always_long = rotary.rope_type == "longrope" and min(map(len, texts)) > rotary.original_length
    if rotary.rope_type in ("dynamic", "longrope") and total > rotary.original_length and not always_long:
        raise InputError(
            f"generate_many: rope_type={rotary.rope_type!r} chooses its frequencies by the longest row of a batch, and "
            f"{total} tokens exceed its original length, {rotary.original_length}; call `generate` for each prompt"
        )
    return ContinuousEngine(request, texts, limits, batch_size).continuations()


@dataclass
class BatchOutput:
    """A continuation of `generate_batch`, with the fields of transformers' that callers read."""

    request_id: str
    prompt_ids: list[int]
    generated_tokens: list[int]
    error: str | None = None


def generate_batch(
    model: nn.Module, inputs: Sequence[Sequence[int]], generation_config: Any = None,
    continuous_batching_config: Any = None, progress_bar: bool = False, **options: Any,
) -> dict[str, BatchOutput]:  # fmt: skip
    """`generate_many`, with the arguments and the result of transformers' continuous batching, which TRL calls.

    continuous_batching_config, progress_bar: ignored. options: those of `generate_many`.
    """
    completions = generate_many(model, inputs, generation_config=generation_config, **options)
    copies, names = len(completions) // max(1, len(inputs)), [f"req_{i}" for i in range(len(completions))]
    prompts = (list(prompt) for prompt in inputs for _ in range(copies))
    outputs = zip(names, prompts, (ids.tolist() for ids in completions), strict=True)
    return {output[0]: BatchOutput(*output) for output in outputs}


def _as_ids(index: int, prompt: Any) -> Tensor:
    try:
        ids = torch.as_tensor(prompt).cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"prompt {index} is a {type(prompt).__name__}; it must be a list of token ids") from error
    if ids.dim() != 1 or not len(ids) or ids.dtype not in (torch.int64, torch.int32):
        fault = f"prompt {index} is {list(ids.shape)} of {ids.dtype}"
        raise InputError(f"{fault}; it must be a list of at least one token id, or such a tensor [S] of torch.int64")
    return ids.long()
