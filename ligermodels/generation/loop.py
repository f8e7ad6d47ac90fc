"""`generate` and `generate_iter`: one loop, `_decode`; the first returns whole rows, the second yields each token.

The prompt runs once, and only its last position gets logits. Then each step computes one token per row, over a KV cache
that is allocated for the whole request. The next token is chosen on the model's device. The host reads one small tensor
per step where it has to decide or show something (stop ids, stop strings, criteria, streaming); otherwise it reads
nothing before the end.

On CUDA a step is a graph (graph.py), and the host reads a token while the model computes the next logits. These are
launched before the host knows whether a row continues; if none does, the cache drops that token again. No token is
drawn ahead.

With speculation (speculation.py), the logits of a step may be known before its token is; the loop is the same.
"""

import contextlib
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.generation import engine
from ligermodels.generation.options import Attributes
from ligermodels.generation.processors import counted_by_columns, draw, make_processors
from ligermodels.generation.request import ADAPTED, Request, is_adapted
from ligermodels.generation.stopping import StopText, ask_criteria
from ligermodels.kernels.argmax import argmax
from ligermodels.layers.state import Cache, TransformersCache, as_cache


class Streamer(Protocol):
    """The interface of `generate(streamer=...)`, with CPU tensors: put(prompt [B, S]), put(ids [B]) each step, end().

    The prompt comes first, as in transformers, so that its `TextStreamer(skip_prompt=True)` works here.
    """

    def put(self, value: Tensor) -> None: ...

    def end(self) -> None: ...


class GenerateOutput(Attributes):
    """The result of `generate(return_dict_in_generate=True)`: a dict whose fields are attributes too, None if absent.

    sequences: [B * num_return_sequences, S + new]. scores, with output_scores: the logits of each step after all
    processing. logits, with output_logits: the model's own. Both are tuples of [rows, V] fp32. past_key_values: the
    cache of all tokens but the last.
    """

    fields = frozenset(("sequences", "scores", "logits", "past_key_values", "attentions", "hidden_states"))


def generate(
    model: nn.Module,
    inputs: Tensor | None = None,
    generation_config: Any = None,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    *,
    input_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    streamer: Streamer | None = None,
    tokenizer: Any = None,
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
        inputs_embeds: [B, S, hidden_size] in the model's dtype, read in place of the prompt's ids. input_ids may be
            passed with them, for the same tokens; without them the result has only new ids, and penalties, processors
            and criteria see only those.
        generation_config: a GenerationConfig of transformers, or a dict.
        logits_processor: a callable or a list of them, (ids [B, S + step], logits [B, V] fp32) -> logits; they run
            after the penalties and before temperature and cuts.
        stopping_criteria: a callable or a list of them, (ids, scores) -> bool [B], or one bool; a row is done when
            one says so. scores: None without output_scores.
        attention_mask: [B, S], 1 for a token and 0 for padding. None: ids equal to pad_token_id are padding, unless
            that is a stop id too. A pad_token_id of config.json counts only where there is no generation_config.json.
        past_key_values: a Cache, or a DynamicCache of transformers, with the first tokens of the prompt. The prompt
            is still passed in full. The cache is extended in place.
        labels: ignored, so that `generate(**batch)` takes the batch of a trainer.
        streamer: receives each step's ids, see `Streamer`.
        tokenizer: for stop_strings; anything with `decode`.

    Options:
        max_new_tokens: maximum number of new tokens of a row; default 20, with a warning. max_length: the same, with
            the prompt and its padding.
        min_new_tokens, min_length: minimum number of tokens before a stop id is allowed.
        do_sample: True draws the next token; False, the default, takes the likeliest (greedy).
        temperature: logits are divided by it; default 1.
        top_k: draw among the k likeliest (ties with the k-th included); 0 or None: all. Default 50.
        top_p: draw among the fewest likeliest tokens whose probabilities reach top_p, in (0, 1].
        min_p: draw among tokens at least min_p times as likely as the likeliest, in [0, 1].
        typical_p: draw among the tokens whose information is nearest to the entropy, up to typical_p of the
            probability, in (0, 1].
        epsilon_cutoff, eta_cutoff: draw among tokens of at least this probability, and the likeliest; eta_cutoff
            lowers the bound where the entropy is high.
        seed: draws use a generator of their own; None: torch's global one.
        repetition_penalty: > 1 makes every token of the row so far, prompt included, less likely, in greedy
            decoding too.
        no_repeat_ngram_size: n-grams of this size occur only once in a row, prompt included.
        suppress_tokens, begin_suppress_tokens: ids that are never chosen, or not as the first new token.
        bad_words_ids: lists of ids that never follow one another; a stop id alone stays possible.
        sequence_bias: {tuple of ids: bias}, or a list of [ids, bias]; the bias is added to the logit of the last id
            where a row ends in those before it.
        forced_eos_token_id: the last of max_new_tokens (or max_length) is this id, or the likeliest of a list.
        exponential_decay_length_penalty: (n, factor); after n new tokens, the logits of stop ids grow by
            abs(logit) * (factor ** (tokens since) - 1).
        renormalize_logits: scores are log probabilities.
        num_return_sequences: continuations of each row, which follow each other in the result; needs sampling.
        eos_token_id: stop ids; (): none. Default: the generation config's, or config.json's where the checkpoint has
            no generation_config.json.
        pad_token_id: fills rows that finished early; default the first stop id.
        max_time: seconds after which no further token is computed.
        stop_strings: a row ends when its new text contains one; needs `tokenizer`. The ids keep the string.
        use_cache: False computes the whole text at each step.
        kv_cache_dtype: "fp8" stores keys and values in e4m3, in half the memory, with a scale for each token and key
            head (docs/operations.md has the error). The prompt attends to its own unrounded keys, later tokens to the
            rounded ones. None or "auto": the dtype of the model, exactly.
        prefill_chunk_size: tokens of the prompt in one forward pass, which bounds the memory that a long prompt
            needs; None: all of them.
        disable_compile: True decodes without a CUDA graph. By default each step on CUDA is one. The graph's memory,
            most of it the KV cache, is kept for the next call; `model.release()` frees it.
        prompt_lookup_num_tokens: K, at most 128: the model reads K guesses with each token, the tokens that followed
            the first occurrence of the last max_matching_ngram_size tokens (default 2), or fewer of them. For text
            that copies, such as edited code. One row, use_cache, a Cache or none. The ids, also those drawn with a
            seed, are the same as without it, up to ties: a forward pass of several tokens rounds differently, which in
            bf16 decides between tokens that are about equally likely. Each guess reads the cache once more.
        medusa: heads, such as `training.load_medusa(model, folder)`, that guess one token each, verified in that way.
        return_dict_in_generate, output_scores, output_logits: see `GenerateOutput`.
        Other options of transformers (beam search, contrastive search, assisted decoding, ...) raise. Other keywords
        are inputs of the model's forward for the prompt, such as pixel_values; unknown ones raise.

    Returns:
        [B * num_return_sequences, S + new] ids, prompt included where it has ids; new is the length of the longest row.
        Or a `GenerateOutput`.

    Raises:
        InputError: arguments that are out of range, contradictory or not supported; padding on the right; ids outside
            the vocabulary; NaN logits.
    """
    request = Request.checked(
        model, inputs, generation_config, logits_processor, stopping_criteria, input_ids=input_ids,
        inputs_embeds=inputs_embeds, attention_mask=attention_mask, past_key_values=past_key_values,
        tokenizer=tokenizer, **options,
    )  # fmt: skip
    if streamer is not None:
        streamer.put(request.input_ids[:, request.without_ids :].repeat_interleave(request.copies, 0).cpu())
    for step in _decode(request, to_host=streamer is not None or request.can_stop):
        if streamer is not None:
            streamer.put(step.new)  # type: ignore[arg-type]
    if streamer is not None:
        streamer.end()
    ids = step.ids.clone()  # step.ids is a view of a buffer, which is longer if rows stopped early
    if not request.options.return_dict_in_generate:
        return ids
    output = GenerateOutput(sequences=ids)
    if step.scores is not None:
        output["scores"] = tuple(step.scores)
    if step.logits is not None:
        output["logits"] = tuple(step.logits)
    if step.cache is not None:
        output["past_key_values"] = step.cache.cache if isinstance(step.cache, TransformersCache) else step.cache
    return output


def generate_iter(model: nn.Module, *args: Any, **options: Any) -> Iterator[Tensor]:
    """`generate` as an iterator: yields the new ids [B] of each step, on the CPU, pad ids for finished rows.

    Arguments and errors are those of `generate`, without `streamer`. The call checks them, before the first step. To
    stop early, leave the loop.
    """
    return _tokens(Request.checked(model, *args, **options))


def _tokens(request: Request) -> Iterator[Tensor]:
    with contextlib.closing(_decode(request, to_host=True)) as steps:  # rolls the cache back if the caller stops
        for step in steps:
            yield step.new  # type: ignore[misc]


class _Step(NamedTuple):
    ids: Tensor  # [B, S + steps so far], S = 0 if the prompt has no ids; a view of a buffer that later steps extend
    new: Tensor | None  # [B] on the CPU, if the host reads each step
    scores: list[Tensor] | None  # of all steps so far
    logits: list[Tensor] | None
    cache: Any


@torch.no_grad()
def _decode(request: Request, *, to_host: bool) -> Generator[_Step, None, None]:
    """Yields after each token. Reads the device in each step if `to_host`, else only after the last one."""
    options, prompt, copies = request.options, request.input_ids, request.copies
    rows, start = len(prompt) * copies, prompt.shape[1]
    end, shown = start + request.max_new_tokens, request.without_ids  # `shown`: the first column with ids
    device = prompt.device

    ids = prompt.new_zeros(rows, end, dtype=torch.int64)
    ids[:, :start] = prompt.repeat_interleave(copies, 0)
    mask = None
    if request.mask is not None:
        mask = torch.ones(rows, end, dtype=torch.bool, device=device)
        mask[:, :start] = request.mask.repeat_interleave(copies, 0)
    vocab_size = request.model.config.get_text_config().vocab_size
    processors = make_processors(
        options, request.processors, mask=None if shown else mask,
        counted=counted_by_columns(start - shown, options.min_columns(start) - start, request.max_new_tokens),
        stop_ids=[i for i in request.eos_ids if i < vocab_size], device=device,
    )  # fmt: skip
    generator = None if options.seed is None else torch.Generator(device).manual_seed(int(options.seed))
    forward = _Forward(request, end)
    speculation = forward.speculation
    to_host = to_host or speculation is not None
    texts = []
    if request.stop_strings:
        recent = ids[:, max(shown, start - 8) : start].tolist()
        texts = [StopText(request.tokenizer, request.stop_strings, after) for after in recent]
    scores: list[Tensor] | None = [] if options.return_dict_in_generate and options.output_scores else None
    logits: list[Tensor] | None = [] if options.return_dict_in_generate and options.output_logits else None
    broken = ids.new_zeros(rows)  # 1 where no token could be chosen
    done = [False] * rows
    finished: Tensor | None = None  # `done` on the device
    last = 0  # columns that are valid: the cache may have one more

    def compute(length: int) -> Tensor:
        return forward(ids[:, :length], None if mask is None else mask[:, :length])

    try:
        raw = compute(start)
        for length in range(start, end):
            kept = logits is not None or scores is not None or bool(request.processors)  # a processor may keep them
            if kept or processors or options.do_sample:
                raw = raw.to(torch.float32, copy=kept)
            if logits is not None:
                logits.append(raw)
            processed = raw
            for process in processors:
                processed = process(ids[:, shown:length], processed)
            if scores is not None:
                scores.append(processed)
            chosen = argmax(processed)  # [2, B]: the tokens, and 1 where no token is possible
            token = chosen[0]
            if not to_host:
                torch.maximum(broken, chosen[1], out=broken)
            if options.do_sample:
                token.copy_(draw(processed, generator))
            if finished is not None:
                token.masked_fill_(finished, request.pad_id)
            ids[:, length] = token
            last = length

            read = AsyncToHost(chosen) if to_host else None
            ahead = forward.is_captured and speculation is None and length + 1 < end
            if ahead:
                raw = compute(length + 1)
            new = None
            if read is not None:
                new, is_broken = read.result()
                values = new.tolist()
                if any(is_broken.tolist()):
                    raise nan_logits()
                if speculation is not None:
                    speculation.append(values[0])
                asked = [False] * rows
                if request.criteria:
                    seen = None if scores is None else tuple(scores)
                    asked = ask_criteria(request.criteria, ids[:, shown : length + 1], seen).tolist()
                ended = [
                    row
                    for row, value in enumerate(values)
                    if not done[row]
                    and (value in request.eos_ids or asked[row] or (texts and texts[row].ends_with(value)))
                ]
                for row in ended:
                    done[row] = True
                if ended and not all(done):
                    on_host = torch.tensor(done, pin_memory=device.type == "cuda")
                    finished = on_host.to(device, non_blocking=True)
            if all(done) or length + 1 == end:
                forward.rollback(length)
            yield _Step(ids[:, shown : length + 1], new, scores, logits, forward.cache)
            if all(done):
                break
            if not ahead and length + 1 < end:
                raw = compute(length + 1)
    finally:
        forward.rollback(last)
        forward.release_cache()
    if not to_host and broken.any():
        raise nan_logits()


class AsyncToHost:
    """An asynchronous copy of a small tensor to the host; `result` waits for it."""

    def __init__(self, x: Tensor):
        self._values, self._copied = x, None
        if x.is_cuda:
            self._values = torch.empty_like(x, device="cpu", pin_memory=True)
            self._values.copy_(x, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(x.device))  # which may not be the current device

    def result(self) -> Tensor:
        if self._copied is None:
            return self._values.cpu()
        self._copied.synchronize()
        return self._values.clone()  # in memory that is not pinned


class _Forward:
    """Runs the model over the columns that are not cached yet.

    The prompt runs once for all its copies, and then its cache is copied. Where cached keys no longer fit the rotary
    tables (longrope past its original length, counted in tokens of the longest row), the cache is emptied and the
    whole text runs again.
    """

    def __init__(self, request: Request, end: int):
        self.request, self.model, self.end = request, request.model, end
        self.use_cache = request.options.use_cache is not False
        # PEFT's prompt learning replaces this method, and makes a cache with virtual tokens before the prompt.
        self.prepare, self.is_adapted = self.model.prepare_inputs_for_generation, is_adapted(self.model)
        self.cache = request.cache
        self.speculation = request.speculation()
        self.is_captured = self._can_capture()
        self.step: Any = None  # a `Step` that has begun
        self.cache_key: tuple | None = None  # of a cache that is kept for the next call
        self.prompt_cache: Cache | None = None  # one row for all copies of a prompt
        rows, kind = len(request.input_ids), request.options.kv_cache_dtype
        if self.use_cache and self.cache is None and not self.is_adapted:
            if self.is_captured:
                self.cache, self.cache_key = self.model.engine.take(
                    self.model, rows * request.copies, self._capacity, kind
                )
                if request.copies > 1:
                    self.prompt_cache = self.model.new_cache(rows, request.input_ids.shape[1], kv_cache_dtype=kind)
            else:
                self.cache = self.model.new_cache(rows, end, kv_cache_dtype=kind)
        if self.speculation is not None and self.cache is not None:  # a step of several tokens is taken back in part
            self.cache.reserve(self._capacity, 1 + self.speculation.count)
        self.past = 0 if request.cache is None else request.cache.length  # number of cached columns
        self.virtual = 0  # number of virtual tokens before them
        self.positions: Tensor | None = None  # those of the last call, if rows are padded

    def __call__(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        """Logits [B, V] after the last of the ids [B, S] so far, in memory that the next call may overwrite.

        mask: [B, S], True at tokens.
        """
        request, length = self.request, ids.shape[1]
        start = request.input_ids.shape[1]
        longest = request.longest + length - start + self.virtual  # tokens of the longest row
        speculation = self.speculation if length > start else None
        if speculation is not None:
            if (known := speculation.found()) is not None:
                return known
            self.rollback(length - 1)
        rotary = self.model.decoder.rotary_emb
        if self.past and rotary.needs_recompute(longest - (length - self.past), longest):
            self.past = 0
            if self.cache is not None and not self.is_adapted:
                self.cache.reset()
            else:
                self.cache = None
        if speculation is not None:
            speculation.begin(min(self.end - length - 1, rotary.tokens_left(longest)) if self.past else 0)
        if self.is_captured and self.past == length - 1 and length > start:
            found = self._captured(ids, mask)
            if found is not None:
                return found
        self.step = None
        if speculation is not None:
            ids = torch.cat([ids, ids.new_tensor([speculation.tokens[1:]])], 1)
        copies = request.copies if self.use_cache and length == start else 1
        if mask is not None:
            if self.positions is not None and self.past == length - 1:
                self.positions = self.positions[:, -1:] + 1
            else:  # 0, 1, ... at the tokens of each row; padding has the position of the token before it, or 0
                self.positions = (mask[::copies].cumsum(1) - 1).clamp_(min=0)[:, self.past :]
        cache = self.prompt_cache if copies > 1 and self.prompt_cache is not None else self.cache
        embeds = self._embeds(ids, copies) if self.past < start else None
        past, positions = self.past, self.positions

        def inputs_of(begin: int, end: int, **options: Any) -> dict[str, Any]:
            """The inputs of the model for the columns from `begin` to `end`."""
            own = {} if embeds is None else {"inputs_embeds": embeds[:, begin:end]}
            inputs = self.prepare(
                ids[::copies, begin:end],
                attention_mask=None if mask is None else mask[::copies, :end],
                position_ids=None if positions is None else positions[:, begin - past : end - past],
                past_key_values=cache,
                use_cache=self.use_cache,
                **own,
                **options,
            )
            if own and inputs.get("inputs_embeds") is not own["inputs_embeds"]:
                raise InputError("inputs_embeds contradicts an adapter that adds virtual tokens: pass input_ids")
            return {**inputs, "input_ids": None} if own else inputs

        begin, chunk = past, request.options.prefill_chunk_size
        if chunk is not None:
            with rotary.of_length(longest):
                while length - begin > chunk:
                    self.model(**inputs_of(begin, begin + chunk, return_logits=False))
                    begin += chunk
        inputs = inputs_of(
            begin, ids.shape[1], logits_to_keep=1 + ids.shape[1] - length,
            **(request.inputs if length == start or past == 0 else {}),
        )  # fmt: skip
        if self.speculation is not None:
            self.past = ids.shape[1]
            return self.speculation.run(self.model, **inputs)
        output = self.model(**inputs)
        logits = output.logits[:, -1]
        if self.use_cache and self.cache is None:
            self.cache = as_cache(output.past_key_values, self.model.config.get_text_config().num_hidden_layers)
            self.virtual = self.cache.length - length
        if copies > 1:
            copied = torch.arange(len(request.input_ids), device=ids.device).repeat_interleave(copies)
            if self.prompt_cache is not None:
                self.cache.take(self.prompt_cache, copied)  # type: ignore[union-attr]
                self.prompt_cache = None
            else:
                self.cache.reorder(copied)  # type: ignore[union-attr]
            logits = logits[copied]
            self.positions = None if self.positions is None else self.positions[copied]
        self.past = length if self.use_cache else 0
        return logits

    def _embeds(self, ids: Tensor, copies: int) -> Tensor | None:
        """The embeddings of all columns, for every copies-th row; None if the prompt came as ids."""
        embeds = self.request.embeds
        if embeds is None:
            return None
        new = ids[::copies, embeds.shape[1] :]
        embeds = embeds.repeat_interleave(self.request.copies // copies, 0)
        return torch.cat([embeds, self.model.get_input_embeddings()(new).to(embeds.dtype)], 1)

    def _captured(self, ids: Tensor, mask: Tensor | None) -> Tensor | None:
        """Runs the step as a graph. Returns None, with a warning, if the capture fails."""
        cache: Any = self.cache
        speculation = self.speculation
        try:
            if self.step is None:
                if speculation is None:
                    self.step = engine.step_of(cache)
                else:
                    with_hidden = speculation.heads is not None
                    self.step = engine.step_of(cache, 1 + speculation.count, with_hidden=with_hidden)
                self.step.begin(self.model, cache, self._capacity)
                self.step.place(0 if mask is None else mask.int().argmax(1), cache.length)
            if speculation is None:
                self.step.ids.copy_(ids[:, -1:])
                self.step.run(self.model, cache)
                logits = self.step.logits
            else:
                logits = speculation.verify(self.step, self.model, cache)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            engine.warn_uncaptured(f"its step cannot be captured, {engine.first_cause(error)}")
            self.is_captured, self.positions = False, None
            return None
        self.past = cache.length
        return logits

    @property
    def _capacity(self) -> int:
        """Tokens that the cache must have memory for. A captured step writes all of its guesses."""
        return self.end + (0 if self.speculation is None else self.speculation.count)

    def _can_capture(self) -> bool:
        request = self.request
        if (
            self.model.device.type not in engine.DEVICES or not self.use_cache or request.max_new_tokens == 1
            or request.options.disable_compile
        ):  # fmt: skip
            return False
        if self.is_adapted:
            reason: str | None = ADAPTED
        elif isinstance(request.cache, TransformersCache):
            reason = "past_key_values is a cache of transformers; model.new_cache makes one of ours"
        elif not request.pads_left:
            reason = "attention_mask has gaps between tokens"
        elif self.speculation is not None and bool(getattr(self.model.decoder.config, "cross_attention_layers", ())):
            reason = "speculation does not capture cross-attention"
        else:
            reason = engine.obstacle_to_capture(self.model)
        if reason is not None:
            engine.warn_uncaptured(reason)
        return reason is None

    def rollback(self, length: int) -> None:
        """Drops from the cache what was computed ahead of column `length`."""
        if self.past > length and (self.step is not None or self.speculation is not None):
            self.cache.crop(length)  # type: ignore[union-attr]
            self.past = self.cache.length  # type: ignore[union-attr]
            if self.speculation is None:
                self.step = None

    def release_cache(self) -> None:
        """Keeps the cache for the next call, unless it is returned to the caller."""
        if self.cache_key is not None and not self.request.options.return_dict_in_generate:
            self.model.engine.keep(self.cache, self.cache_key)
        self.cache_key = None


def nan_logits() -> InputError:
    return InputError(
        "the model's logits are NaN (or all -inf), so no token can be chosen; likely float16 overflow or damaged "
        "weights: load with dtype=torch.bfloat16 or torch.float32, and check the weight files and the logits_processor"
    )
