"""Stop strings in the text of a row, and the caller's stopping criteria."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ligermodels.errors import InputError

StoppingCriterion = Callable[..., Tensor | bool]
"""(ids [B, S + new], scores of the steps or None) -> bool [B], True where a row is done; or one bool for all rows."""


def ask_criteria(criteria: Sequence[StoppingCriterion], ids: Tensor, scores: tuple[Tensor, ...] | None) -> Tensor:
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
    """Finds stop strings in the new text of one row, which continues the ids `after`.

    tokenizer: anything with `decode(ids) -> str`. Special tokens are text too, if decode has an option for it. The cost
    of a token does not grow with the text: only the ids after the last complete characters are decoded. Unlike in
    text.StreamDecoder, text before an incomplete character counts at once.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str], after: Sequence[int]):
        self._decode, self._options = tokenizer.decode, _verbatim_options(tokenizer.decode)
        self._strings, self._longest = strings, max(map(len, strings))
        self._ids = list(after)
        self._known = len(self._ids)  # ids whose text has been read
        self._tail = ""

    def ends_with(self, token: int) -> bool:
        self._ids.append(token)
        before, now = self._text(self._ids[: self._known]), self._text(self._ids)
        text = self._tail + now[len(before) :]
        if len(now) > len(before) and not now.endswith("\N{REPLACEMENT CHARACTER}"):  # no character is open
            self._ids, self._known = self._ids[self._known :], len(self._ids) - self._known
            self._tail = text[-self._longest :]
        return any(string in text for string in self._strings)

    def _text(self, ids: list[int]) -> str:
        return self._decode(ids, **self._options) if ids else ""


def _verbatim_options(decode: Callable[..., str]) -> dict[str, bool]:
    """Those options of `decode` that leave the text unchanged and that it has."""
    wanted = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    try:
        parameters = inspect.signature(decode).parameters.values()
    except ValueError:  # a function that is not written in Python
        return {}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return wanted
    return {name: value for name, value in wanted.items() if name in {parameter.name for parameter in parameters}}
