"""Stop strings in the text of a row, and the caller's stopping criteria."""

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.text import StreamDecoder

StoppingCriterion = Callable[..., Tensor | bool]
"""(ids [B, S + new], scores of the steps or None) -> bool [B], True where a row is done; or one bool for all rows."""


def apply_stopping_criteria(
    criteria: Sequence[StoppingCriterion], ids: Tensor, scores: tuple[Tensor, ...] | None
) -> Tensor:
    """[B] bool, True where one of `criteria` says that the row is done."""
    done = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    for criterion in criteria:
        verdict = torch.as_tensor(criterion(ids, scores), dtype=torch.bool, device=ids.device)
        if verdict.numel() not in (1, len(ids)):
            raise InputError(
                f"a stopping criterion returned {list(verdict.shape)} for {len(ids)} rows; it must be one bool for "
                "each row, or one for all"
            )
        done = done | verdict.flatten()
    return done


class StopText:
    """Finds stop strings in the new text of one row, which continues the ids `after`. Special tokens are searched as
    text, and so is text whose last character is still incomplete. The cost of a token does not grow with the text."""

    def __init__(self, tokenizer: Any, strings: Sequence[str], after: Sequence[int]):
        if hasattr(tokenizer, "clean_up_tokenization_spaces"):  # a tokenizer of transformers, which may remove spaces
            decode = functools.partial(tokenizer.decode, clean_up_tokenization_spaces=False)
            tokenizer = SimpleNamespace(decode=decode)
        self._decoder = StreamDecoder(tokenizer, after=after, skip_special_tokens=False)
        self._strings, self._longest = strings, max(map(len, strings))
        self._tail = ""

    def ends_with(self, token: int) -> bool:
        text = self._tail + self._decoder.put(token)
        self._tail = text[-self._longest :]
        return any(string in text + self._decoder.unfinished for string in self._strings)
