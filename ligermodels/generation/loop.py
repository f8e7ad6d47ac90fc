"""One loop, `_decode`, of which `generate` makes whole rows and `generate_iter` a stream.

The prompt runs once and only its last position gets logits; then one token a row and step, over a KV cache
sized for the whole request. For num_return_sequences the cache is copied after the prompt has run. Where cached
keys no longer fit the rotary tables (longrope past its original length, counted in tokens of the longest row), the
cache is emptied and the whole text runs once more. The next token is chosen on the model's device. The host
reads one small tensor a step where it has to decide or show something (stop ids, stop strings, criteria,
streaming), and nothing before the end otherwise.
"""

import math
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.generation.processors import draw, make_processors
from ligermodels.generation.request import Request, is_adapted
from ligermodels.generation.stopping import StopText, ask_criteria
from ligermodels.layers.cache import BorrowedCache, as_kv_cache


class Streamer(Protocol):
    """What `generate(streamer=...)` calls, with CPU tensors: put(prompt [B, S]), put(ids [B]) a step, end().

    The prompt comes first, as in transformers, so that its `TextStreamer(skip_prompt=True)` works here.
    """

    def put(self, value: Tensor) -> None: ...

    def end(self) -> None: ...


class GenerateOutput(dict):
    """What `generate(return_dict_in_generate=True)` returns: a dict whose fields are attributes too, None where absent.

    sequences: [B * num_return_sequences, S + new]. scores, with output_scores: the logits of each step after all
    processing. logits, with output_logits: the model's own. Both are tuples of [rows, V] fp32. past_key_values: the
    cache, which holds all but the last token.
    """

    fields: ClassVar = frozenset({
        "sequences", "scores", "logits", "past_key_values", "attentions", "hidden_states"
    })  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        if name in self.fields:
            return self.get(name)
        raise AttributeError(f"GenerateOutput has no field {name!r}")


def generate(
    model: nn.Module,
    inputs: Tensor | None = None,
    generation_config: Any = None,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    *,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    streamer: Streamer | None = None,
    tokenizer: Any = None,
    seed: int | None = None,
    **options: Any,
) -> Tensor | GenerateOutput:
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
        generation_config: a GenerationConfig of transformers, or a dict.
        logits_processor: a callable or a list of them, (ids [B, S + step], logits [B, V] fp32) -> logits; they come
            after the penalties and before temperature and cuts.
        stopping_criteria: a callable or a list of them, (ids, scores) -> bool [B], or one bool; a row is done when
            one says so. scores: None without output_scores.
        attention_mask: [B, S], 1 for a token and 0 for padding. None: ids equal to pad_token_id are padding, unless
            that is a stop id too.
        past_key_values: a KVCache, or a DynamicCache of transformers, with the first tokens of the prompt. The prompt
            is still passed in full. The cache is extended in place.
        streamer: receives ids as they come, see `Streamer`.
        tokenizer: for stop_strings; anything with `decode`.
        seed: draws come from a generator of their own; None: from torch's global one.

    Options:
        max_new_tokens: the most tokens added to a row; default 20, with a warning. max_length: the same, the prompt
            and its padding included.
        min_new_tokens, min_length: how many tokens there are before a stop id may come.
        do_sample: True draws the next token; False, the default, takes the likeliest (greedy).
        temperature: logits are divided by it; default 1.
        top_k: draw among the k likeliest (ties with the k-th included); 0 or None: all. Default 50.
        top_p: draw among the fewest likeliest tokens whose probabilities reach top_p, in (0, 1].
        min_p: draw among tokens at least min_p times as likely as the likeliest, in [0, 1].
        repetition_penalty: > 1 makes every token of the row so far, prompt included, less likely, in greedy
            decoding too.
        no_repeat_ngram_size: n-grams of this size occur only once in a row, prompt included.
        suppress_tokens, begin_suppress_tokens: ids that are never chosen, or not as the first new one.
        renormalize_logits: scores are log probabilities.
        num_return_sequences: continuations of each row, which follow each other in the result; needs sampling.
        eos_token_id: stop ids; (): none. Default where no generation config sets them: config.json's.
        pad_token_id: fills rows that finished early; default the first stop id.
        stop_strings: a row ends when its new text contains one; needs `tokenizer`. The ids keep the string.
        use_cache: False computes the whole text at each step.
        return_dict_in_generate, output_scores, output_logits: see `GenerateOutput`.
        Other options of transformers (beam search, contrastive search, assisted decoding, ...) raise. Other keywords
        are inputs of the model's forward for the prompt, such as pixel_values.

    Returns:
        [B * num_return_sequences, S + new] ids, prompt included; new is the length of the longest row. They are
        ordinary tensors, which may be trained on. Or a `GenerateOutput`.

    Raises:
        InputError: arguments out of range or that do not fit or are not supported, padding on the right, ids outside
            the vocabulary, NaN logits.
    """
    request = Request.checked(
        model, _prompt(inputs, input_ids), generation_config, logits_processor, stopping_criteria,
        attention_mask=attention_mask, past_key_values=past_key_values, tokenizer=tokenizer, seed=seed, inputs=options,
    )  # fmt: skip
    if streamer is not None:
        if not callable(getattr(streamer, "put", None)) or not callable(getattr(streamer, "end", None)):
            raise InputError(f"streamer is a {type(streamer).__name__}; it must have put and end, see Streamer")
        streamer.put(request.input_ids.repeat_interleave(request.copies, 0).cpu())
    wanted = request.options
    returns_dict = bool(wanted.return_dict_in_generate)
    scores: list[Tensor] | None = [] if returns_dict and wanted.output_scores else None
    logits: list[Tensor] | None = [] if returns_dict and wanted.output_logits else None
    to_host = streamer is not None or bool(request.eos_ids or request.stop_strings or request.criteria)
    for step in _decode(request, to_host=to_host, scores=scores, logits=logits):
        if streamer is not None:
            assert step.new is not None, "streaming reads every step"
            streamer.put(step.new)
    if streamer is not None:
        streamer.end()
    ids = step.ids.clone()  # a view of a buffer that is longer where rows stopped early
    if not returns_dict:
        return ids
    cache = step.cache.cache if isinstance(step.cache, BorrowedCache) else step.cache
    output = {"sequences": ids, "scores": scores, "logits": logits, "past_key_values": cache}
    return GenerateOutput({
        name: tuple(value) if isinstance(value, list) else value for name, value in output.items() if value is not None
    })  # fmt: skip


def generate_iter(
    model: nn.Module,
    inputs: Tensor | None = None,
    generation_config: Any = None,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    *,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    tokenizer: Any = None,
    seed: int | None = None,
    **options: Any,
) -> Iterator[Tensor]:
    """`generate` as an iterator: yields the new ids [B] of each step, on the CPU, pad ids for finished rows.

    Arguments and errors are those of `generate`; they are checked by the call, before the first step.
    Leaving the loop early is the way to stop.
    """
    request = Request.checked(
        model, _prompt(inputs, input_ids), generation_config, logits_processor, stopping_criteria,
        attention_mask=attention_mask, past_key_values=past_key_values, tokenizer=tokenizer, seed=seed, inputs=options,
    )  # fmt: skip
    return (step.new for step in _decode(request, to_host=True) if step.new is not None)


def _prompt(inputs: Tensor | None, input_ids: Tensor | None) -> Tensor | None:
    if inputs is not None and input_ids is not None:
        raise InputError("inputs and input_ids are two names for the prompt; pass one of them")
    return input_ids if inputs is None else inputs


class _Step(NamedTuple):
    ids: Tensor  # [B, S + steps so far], a view of a buffer that later steps extend
    new: Tensor | None  # [B] on the CPU, where the host reads
    cache: Any


@torch.no_grad()
def _decode(
    request: Request, *, to_host: bool, scores: list[Tensor] | None = None, logits: list[Tensor] | None = None
) -> Iterator[_Step]:
    """The one loop. Reads the device where `to_host`, and where not, only after the last step.

    scores, logits: lists that collect those of each step.
    """
    model, options, prompt, copies = request.model, request.options, request.input_ids, request.copies
    rows, start = len(prompt) * copies, prompt.shape[1]
    end = start + request.max_new_tokens
    device = prompt.device
    copied = torch.arange(len(prompt), device=device).repeat_interleave(copies)

    ids = prompt.new_zeros(rows, end, dtype=torch.int64)
    ids[:, :start] = prompt[copied]
    key_mask = positions = None
    if request.mask is not None:
        key_mask = torch.ones(rows, end, dtype=torch.bool, device=device)
        key_mask[:, :start] = request.mask[copied]
    processors = make_processors(
        options, request.processors, prompt_length=start, mask=None if key_mask is None else key_mask[:, :start],
        stop_ids=[i for i in request.eos_ids if i in range(model.config.get_text_config().vocab_size)], device=device,
    )  # fmt: skip
    generator = None if request.seed is None else torch.Generator(device).manual_seed(int(request.seed))

    eos = torch.tensor(request.eos_ids, dtype=torch.int64, device=device)
    can_stop = bool(request.eos_ids or request.stop_strings or request.criteria)
    finished = torch.zeros(rows, dtype=torch.bool, device=device) if can_stop and rows > 1 else None
    done = [False] * rows  # what the host knows of `finished`
    texts = []
    if request.stop_strings:
        texts = [
            StopText(request.tokenizer, request.stop_strings, row) for row in ids[:, max(0, start - 8) : start].tolist()
        ]
    broken = torch.zeros((), dtype=torch.bool, device=device)

    # PEFT's prompt learning puts its own method here. It makes the cache, with virtual tokens before the prompt.
    prepare, adapted = model.prepare_inputs_for_generation, is_adapted(model)
    cached, cache = options.use_cache is not False, request.cache
    past = 0 if cache is None else cache.length  # columns of ids that the cache holds
    virtual = 0  # tokens before them
    if cached and cache is None and not adapted:
        cache = model.new_cache(len(prompt), end)

    for longest, length in enumerate(range(start, end), request.longest):  # longest: tokens of the longest row
        if past and _needs_recompute(model, longest - (length - past) + virtual, longest + virtual):
            past = 0
            if cache is not None and not adapted:
                cache.reset()
            else:
                cache = None
        once = cached and copies > 1 and length == start  # the prompt runs once for all its copies
        part = slice(None, None, copies) if once else slice(None)
        if key_mask is not None:
            if positions is not None and past == length - 1:
                positions = positions[:, -1:] + 1
            else:
                positions = _positions(key_mask[part, :length])[:, past:]
        output = model(
            **prepare(
                ids[part, past:length],
                attention_mask=None if key_mask is None else key_mask[part, :length],
                position_ids=positions,
                past_key_values=cache,
                use_cache=cached,
                logits_to_keep=1,
                **(request.inputs if length == start or past == 0 else {}),
            )
        )
        raw = output.logits[:, -1].float()
        if cached and cache is None:
            cache = as_kv_cache(output.past_key_values, model.config.get_text_config().num_hidden_layers)
            virtual = cache.length - length
        if once and cache is not None:
            cache.reorder(copied)
            raw, positions = raw[copied], None if positions is None else positions[copied]
        past = length if cached else 0

        if logits is not None:
            logits.append(raw.clone())
        processed = raw
        for process in processors:
            processed = process(ids[:, :length], processed)
        if scores is not None:
            scores.append(processed)
        broken = broken | ~(processed.amax(-1) > -math.inf).all()  # NaN is above nothing
        token = draw(processed, generator) if options.do_sample else processed.argmax(-1)
        if finished is not None:
            token = torch.where(finished, request.pad_id, token)
            finished = finished | (token[:, None] == eos).any(1)
        ids[:, length] = token

        new = None
        if to_host:
            asked = []
            if request.criteria:
                seen = None if scores is None else tuple(scores)
                asked = [ask_criteria(request.criteria, ids[:, : length + 1], seen)]
            # the one transfer of the step, with the verdict on its logits
            *values, is_broken = (host := torch.cat([token, *asked, broken[None]]).cpu()).tolist()
            new = host[:rows]
            if is_broken:
                raise _nan_logits()
            stopped = False  # by what the device does not know
            for row, value in enumerate(values[:rows]):
                if done[row]:
                    continue
                done[row] = value in request.eos_ids
                if not done[row] and ((asked and values[rows + row]) or (texts and texts[row].ends_with(value))):
                    done[row] = stopped = True
            if stopped and finished is not None:
                finished = torch.tensor(done, device=device)
        yield _Step(ids[:, : length + 1], new, cache)
        if can_stop and all(done):
            break
    if not to_host and broken:
        raise _nan_logits()


def _needs_recompute(model: Any, past: int, length: int) -> bool:
    """Whether a text of `length` tokens turns the first `past` of them otherwise than they were."""
    return model.decoder.rotary_emb.needs_recompute(past, length)


def _positions(mask: Tensor) -> Tensor:
    """[B, S]: tokens of each row count from 0, and padding stands at 0 or where the last token was."""
    return (mask.cumsum(1) - 1).clamp_(min=0)


def _nan_logits() -> InputError:
    return InputError(
        "the model's logits are NaN (or all -inf), so no token can be chosen; likely float16 overflow or damaged "
        "weights: load with dtype=torch.bfloat16 or torch.float32, and check the weight files and the logits_processor"
    )
