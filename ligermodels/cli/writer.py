"""Prints a model's text token by token, and reuses its KV cache for the next prompt."""

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ligermodels.cli.models import PASSED_ON, load_drafter
from ligermodels.cli.output import say
from ligermodels.generation.options import SAMPLING_OFF

if TYPE_CHECKING:
    from torch import Tensor

    from ligermodels.arch import CausalLM
    from ligermodels.layers.state import Cache
    from ligermodels.text import Tokenizer

REWIND = 256
"""Last tokens that the next prompt may change without being read as a whole, in layers with a window."""
CHUNK = 1024
"""Tokens per forward pass of a long prompt."""


class Writer:
    """Prints how the model continues prompts. A prefix that a prompt shares with the last one is not computed again.

    ids: the tokens in the KV cache. images: the images of those tokens, up to the token `images_end`.
    """

    def __init__(self, model: "CausalLM", tokenizer: "Tokenizer", args: argparse.Namespace):
        self.model, self.tokenizer, self.args = model, tokenizer, args
        self.cache: Cache | None = None
        self.ids: list[int] = []
        self.images: tuple[Any, ...] = ()
        self.images_end = 0
        self.options = {name: getattr(args, name) for name in PASSED_ON if getattr(args, name) is not None}
        self.options |= load_drafter(model, args)
        samples = model.generation_config.get("do_sample") if args.temperature is None else args.temperature != 0
        if not samples and (names := SAMPLING_OFF.keys() & self.options.keys() - {"temperature"}):
            flags = " and ".join(sorted(f"--{name.replace('_', '-')}" for name in names))
            say(f"note: {flags} without effect, since the likeliest token is taken; --temperature X above 0 samples")
            self.options = {name: value for name, value in self.options.items() if name not in names}

    def write(
        self,
        ids: list[int],
        stop_ids: Sequence[int],
        *,
        after: Sequence[int] = (),
        decoder: Any = None,
        images: tuple[Any, ...] = (),
        inputs: Mapping[str, Any] | None = None,
        interruptible: bool = False,
    ) -> str:
        """Prints the text after `ids` token by token, then its speed on stderr. Returns the text.

        after: the ids that the text continues; () for an answer, which is a new text. decoder: in place of a
        `StreamDecoder`. images: those of the prompt, in order. inputs: the arguments of the model for them.
        interruptible: Ctrl-C ends the text, not the command.
        """
        import torch

        from ligermodels.generation import generate_iter
        from ligermodels.text import StopStrings, StreamDecoder

        args, length = self.args, self.args.max_new_tokens
        if length is None:
            space = self.model.config.max_position_embeddings - len(ids)
            length = min(args.default_length, space) if space > 0 else args.default_length
        if self.cache is None:
            self.cache = self.model.new_cache(1, len(ids) + length, kv_cache_dtype=args.kv_cache_dtype)
            self.cache.reserve(len(ids) + length, REWIND)
        self._crop(ids, images)
        cached = self.cache.length
        if not cached:
            self.images_end = len(ids) if images else 0
        prompt = torch.tensor([ids], dtype=torch.int64, device=self.model.device)
        decoder, stops = decoder or StreamDecoder(self.tokenizer, after=after), StopStrings(args.stop)
        tokens = generate_iter(
            self.model,
            prompt,
            attention_mask=torch.ones_like(prompt),  # a pad token that the user typed is a token
            past_key_values=self.cache,
            max_new_tokens=length,
            **self.options,
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
            self.cache, self.ids = None, []  # some layers may have a token that others lack
            say(" (stopped)", end="")
        print()
        say(_speed(len(ids), cached, times))
        return text

    def _crop(self, ids: list[int], images: tuple[Any, ...]) -> None:
        """Keeps in the cache the prefix that it shares with `ids`, without the last token, whose logits are needed."""
        assert self.cache is not None
        pairs = enumerate(zip(self.ids, ids[:-1], strict=False))
        same = next((at for at, (old, new) in pairs if old != new), min(len(self.ids), len(ids) - 1))
        rotary, longest = self.model.decoder.rotary_emb, max(len(self.ids), len(ids))
        # With longrope, the keys of long texts have other frequencies than those of short ones.
        if rotary.needs_recompute(same, longest) or images != self.images or same < self.images_end:
            same = 0
        if 0 < same <= self.cache.length:
            self.cache.crop(same)
        else:  # `generate` may have emptied it
            self.cache.reset()

    def _prefill(self, prompt: "Tensor") -> None:
        """Computes all chunks of a long prompt but the last, with a progress bar on a terminal."""
        import torch
        from tqdm import tqdm

        assert self.cache is not None
        cached, length = self.cache.length, prompt.shape[1]
        if length - cached <= CHUNK or self.model.decoder.rotary_emb.rope_type in ("dynamic", "longrope"):
            return  # their frequencies depend on the longest position of a call
        with (
            torch.no_grad(),
            tqdm(desc="reading", initial=cached, total=length, unit=" tokens", leave=False, disable=None) as bar,
        ):
            for start in range(cached, length - CHUNK, CHUNK):
                chunk = prompt[:, start : start + CHUNK]
                self.model(chunk, past_key_values=self.cache, use_cache=True, return_logits=False)
                bar.update(CHUNK)


def _speed(prompt_tokens: int, cached: int, times: list[float]) -> str:
    """The last line. cached: the number of cached prompt tokens. times: the start, then the time of each token."""
    count = len(times) - 1
    if count == 0:
        return "(no tokens)"
    known = f", {cached} of them cached" if cached else ""
    prompt = f"{prompt_tokens} prompt token{'s' * (prompt_tokens != 1)}{known}"
    line = f"({prompt}, first token after {times[1] - times[0]:.2f} s"
    if count > 1:
        line += f", then {(count - 1) / (times[-1] - times[1]):.1f} tokens/s"
    return f"{line}; {count} token{'s' * (count != 1)})"
