"""Prints what a model writes, token by token, and reuses its KV cache for the next prompt."""

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ligermodels.cli.output import say

if TYPE_CHECKING:
    from torch import Tensor

    from ligermodels.arch import CausalLM
    from ligermodels.layers.cache import KVCache
    from ligermodels.text import Tokenizer

CHUNK = 1024
"""Tokens of a long prompt that are computed at once."""


class Writer:
    """Prints how the model continues a prompt. What the last prompt and its continuation begin with is not recomputed.

    `ids` are the tokens in the KV cache, `images` what they show, up to the token `images_end`.
    """

    def __init__(self, model: "CausalLM", tokenizer: "Tokenizer", args: argparse.Namespace):
        self.model, self.tokenizer, self.args = model, tokenizer, args
        self.cache: KVCache | None = None
        self.ids: list[int] = []
        self.images: tuple[Any, ...] = ()
        self.images_end = 0

    def write(
        self,
        ids: list[int],
        stop_ids: Sequence[int],
        *,
        after: Sequence[int] = (),
        images: tuple[Any, ...] = (),
        inputs: Mapping[str, Any] | None = None,
        interruptible: bool = False,
    ) -> str:
        """Prints the text that continues `ids` as it comes, and its speed on stderr; returns the text.

        after: the ids that the text continues; () for an answer, which starts a text of its own. images: those of the
        prompt, in order; inputs: what they are for the model.
        """
        import torch

        from ligermodels.generation import generate_iter
        from ligermodels.text import StopStrings, StreamDecoder

        args, length = self.args, self.args.max_new_tokens
        if length is None:
            left = self.model.config.max_position_embeddings - len(ids)
            length = min(args.usual_length, left) if left > 0 else args.usual_length
        if self.cache is None:
            self.cache = self.model.new_cache(1, len(ids) + length, kv_cache_dtype=args.kv_cache_dtype)
        self._crop(ids, images)
        cached = self.cache.length
        if not cached:
            self.images_end = len(ids) if images else 0
        prompt = torch.tensor([ids], dtype=torch.int64, device=self.model.device)
        decoder, stops = StreamDecoder(self.tokenizer, after=after), StopStrings(args.stop)
        tokens = generate_iter(
            self.model,
            prompt,
            attention_mask=torch.ones_like(prompt),  # a pad token that the user typed is a token
            past_key_values=self.cache,
            max_new_tokens=length,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            min_p=args.min_p,
            repetition_penalty=args.repetition_penalty,
            seed=args.seed,
            eos_token_id=stop_ids,
            **({} if cached or inputs is None else inputs),
        )
        text, new_ids, times = "", [], [time.perf_counter()]
        try:
            if cached or not inputs:
                self._prefill(prompt)
            for (token,) in tokens:
                times.append(time.perf_counter())
                new_ids.append(int(token))
                new, stopped = stops.put(decoder.put(new_ids[-1]))
                print(new, end="", flush=True)
                text += new
                if stopped:
                    break
            else:
                new, stopped = stops.put(decoder.flush())
                new += "" if stopped else stops.flush()
                print(new, end="")
                text += new
            self.ids, self.images = [*ids, *new_ids[:-1]], images
        except KeyboardInterrupt:
            if not interruptible:
                raise
            self.cache, self.ids = None, []  # some layers may hold a token that others lack
            say(" (stopped)", end="")
        print()
        say(_speed(len(ids), cached, times))
        return text

    def _crop(self, ids: list[int], images: tuple[Any, ...]) -> None:
        """Leaves in the cache the tokens that `ids` begins with, but the last, whose logits are needed."""
        assert self.cache is not None
        same = 0
        for held, wanted in zip(self.ids, ids[:-1], strict=False):
            if held != wanted:
                break
            same += 1
        rotary, longest = self.model.decoder.rotary_emb, max(len(self.ids), len(ids))
        # Keys of a longer text have other frequencies (longrope), as those of a shorter one have.
        if rotary.needs_recompute(same, longest) or images != self.images or same < self.images_end:
            same = 0
        self.cache.crop(same)

    def _prefill(self, prompt: "Tensor") -> None:
        """Computes a long prompt in chunks, all but the last of them, and shows on a terminal how far it is."""
        import torch
        from tqdm import tqdm

        assert self.cache is not None
        cached, length = self.cache.length, prompt.shape[1]
        if length - cached <= CHUNK or self.model.decoder.rotary_emb.rope_type in ("dynamic", "longrope"):
            return  # the frequencies of these types depend on the longest position of a call
        with (
            torch.no_grad(),
            tqdm(desc="reading", initial=cached, total=length, unit=" tokens", leave=False, disable=None) as bar,
        ):
            for start in range(cached, length - CHUNK, CHUNK):
                chunk = prompt[:, start : start + CHUNK]
                self.model(chunk, past_key_values=self.cache, use_cache=True, return_logits=False)
                bar.update(CHUNK)


def _speed(prompt_tokens: int, cached: int, times: list[float]) -> str:
    """The last line of a command. cached: how many prompt tokens. times: the start, and when each token came."""
    count = len(times) - 1
    if count == 0:
        return "(no tokens)"
    known = f", {cached} of them cached" if cached else ""
    line = f"({prompt_tokens} prompt tokens{known}, first token after {times[1] - times[0]:.2f} s"
    if count > 1:
        line += f", then {(count - 1) / (times[-1] - times[1]):.1f} tokens/s"
    return f"{line}; {count} tokens)"
