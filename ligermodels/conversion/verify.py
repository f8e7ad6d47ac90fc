"""Whether two checkpoints are one: names, shapes, dtypes, every bit, and what the models say."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm

from ligermodels import hub, weights
from ligermodels.conversion.sources import View, open_source
from ligermodels.errors import InputError

Level = Literal["none", "keys", "bytes", "logits"]
LEVELS: tuple[Level, ...] = ("none", "keys", "bytes", "logits")

MEAN_KL = 1e-9
"""Above this the models differ. Equal weights give 0, the same function in other roundings up to 2e-12, and rows of q
and k in another order from 9e-7 on, where a tiny model with weights as they are drawn before training shows it least
(weights of std 0.02 to 0.1, hidden sizes 64 and 256)."""
_PROMPTS, _LENGTH = 4, 48


@dataclass
class Report:
    """What was done or compared. `mismatches` is empty if all of it agreed."""

    source: str
    destination: str
    tensors: int = 0
    bytes: int = 0
    mismatches: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.mismatches

    def to_json(self) -> dict[str, Any]:
        fields = {"ok": self.ok, "source": self.source, "destination": self.destination}
        return {
            **fields,
            "tensors": self.tensors,
            "bytes": self.bytes,
            **self.details,
            "mismatches": self.mismatches,
        }


def verify(
    a: str | Path,
    b: str | Path,
    *,
    level: Level = "logits",
    allow_pickle: bool = False,
    progress: bool = True,
) -> Report:
    """Compares two checkpoints of any layout; each is a folder or a repository of the Hub.

    level: "keys" reads headers only and compares names, shapes and dtypes; "bytes" every bit too; "logits" also runs
    both models in fp32 on the CPU, one after the other, on the same prompts: memory holds one model in fp32.
    Raises MismatchError if one of them does not fit its own config; what differs between the two is in the report.
    """
    folders = [hub.resolve(one, allow_pickle=allow_pickle) for one in (a, b)]
    with (
        View(open_source(folders[0], allow_pickle=allow_pickle)) as one,
        View(open_source(folders[1], allow_pickle=allow_pickle)) as other,
    ):
        size = sum(info.nbytes for info in one.headers.values())
        report = Report(str(a), str(b), len(one.headers), size)
        return compare(one, other, level=level, report=report, progress=progress)


def compare(a: View, b: View, *, level: Level, report: Report, progress: bool = True) -> Report:
    """Adds to `report` what differs between two checkpoints that are seen in the same layout."""
    if level not in LEVELS:
        raise InputError(f"verify={level!r} is not known; known: {', '.join(LEVELS)}")
    depth = LEVELS.index(level)
    report.details["verified"] = level
    if depth >= 1:
        report.mismatches += _keys(a, b)
    if depth >= 2:
        report.mismatches += _bytes(a, b, progress)
    if depth >= 3 and a.arch is b.arch:
        report.mismatches += _logits(a, b, report)
    return report


def _keys(a: View, b: View) -> Iterator[str]:
    if a.arch is not b.arch:
        yield f"architecture: {a.arch.__name__} and {b.arch.__name__}"
    for name in a.headers.keys() | b.headers.keys():
        if name not in b.headers:
            yield f"{name}: only in {a.source}"
        elif name not in a.headers:
            yield f"{name}: only in {b.source}"
        elif a.headers[name].shape != b.headers[name].shape:
            yield f"{name}: shape {list(a.headers[name].shape)} and {list(b.headers[name].shape)}"
        elif a.headers[name].dtype != b.headers[name].dtype:
            yield f"{name}: {a.headers[name].dtype} and {b.headers[name].dtype}"


def _bytes(a: View, b: View, progress: bool) -> Iterator[str]:
    total = sum(info.nbytes for info in a.headers.values())
    disable = None if progress else True
    with tqdm(desc="Comparing", total=total, unit="B", unit_scale=True, disable=disable) as bar:
        for name, info in a.headers.items():
            if b.headers.get(name) == info and not weights.same_bits(a.read(name), b.read(name)):
                yield f"{name}: values differ"
            bar.update(info.nbytes)


def _logits(a: View, b: View, report: Report) -> Iterator[str]:
    vocab_size = min(x.model.config.vocab_size for x in (a, b))
    # Ids spread over the vocabulary, the same on every machine and with every release of torch.
    ids = (torch.arange(_PROMPTS * _LENGTH).reshape(_PROMPTS, _LENGTH) * 7919 + 13) ** 2 % vocab_size
    one, other = _log_probabilities(a, ids), _log_probabilities(b, ids)
    if one.shape != other.shape:
        yield f"logits: vocabularies of {one.shape[-1]} and {other.shape[-1]}"
        return
    for view, values in ((a, one), (b, other)):
        if not values.isfinite().all():
            yield f"logits: {view.source} gives NaN or infinity; nothing can be said"
            return
    kl = (one.exp() * (one - other)).sum(-1).mean().item()
    greedy = (one.argmax(-1) != other.argmax(-1)).sum().item()
    report.details |= {"mean_kl": kl, "greedy_tokens_that_differ": greedy, "positions": ids.numel()}
    if not kl <= MEAN_KL:
        yield f"logits: mean KL {kl:.2e} over {ids.numel()} positions, at most {MEAN_KL:.0e} is rounding"
    if greedy:
        yield f"logits: the likeliest token differs at {greedy} of {ids.numel()} positions"


@torch.no_grad()
def _log_probabilities(view: View, ids: Tensor) -> Tensor:
    """fp64 [prompts, length, vocabulary] of the model in fp32."""
    model = view.arch.from_config(view.config(), device="meta", dtype=torch.float32)
    weights.load(model, view.arch.WEIGHTS, view, device="cpu", dtype=torch.float32, progress=False)
    return model.eval()(ids).logits.double().log_softmax(-1)
