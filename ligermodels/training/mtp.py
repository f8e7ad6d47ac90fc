"""The layer for multi-token prediction that a checkpoint has beside its model: `mtp.*` of Qwen3.5 and Qwen3-Next, and
the layer after the last of GLM-4.5.

`load_mtp` reads it as `model.mtp`. It is then trained with the model, saved with it, and drafts for it in
`generate(use_mtp=True)`. Without `load_mtp` nothing is lost: saving copies it from the checkpoint of the model.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ligermodels.checkpoint import reading, weights
from ligermodels.errors import CheckpointError, InputError
from ligermodels.layers import MultiTokenPrediction
from ligermodels.layers.base import init_weights


def add_mtp(model: Any, *, loss_weight: float = 0.1, freeze: bool = False, seed: int = 0) -> MultiTokenPrediction:
    """Gives the model a new layer as `model.mtp`, with random weights; returns it. Call it before the model is sharded.

    loss_weight: of the layer's loss in training, `loss + loss_weight * mtp_loss`; DeepSeek-V3 began with 0.3 and ended
    with 0.1, which Megatron takes by default. freeze: only the layer is trained.
    Raises InputError for a model that has no such layer, has it already, or is sharded or not loaded.
    """
    mtp = _empty(model, loss_weight)
    generator = torch.Generator(next(mtp.parameters()).device).manual_seed(seed)
    with torch.no_grad():
        init_weights(mtp, weights.Draw(generator, model.config.initializer_range))
    return _attach(model, mtp, freeze)


def load_mtp(
    model: Any, folder: str | Path | None = None, *, loss_weight: float = 0.1, freeze: bool = False
) -> MultiTokenPrediction:
    """Gives the model the layer of a checkpoint as `model.mtp`; returns it. Call it before sharding.

    folder: by default the one that the model came from. Other arguments as in `add_mtp`.
    Raises CheckpointError where the checkpoint has no such layer or one of another size, and InputError as `add_mtp`.
    """
    mtp, source = _empty(model, loss_weight), Path(folder or model.source_folder or "")
    if folder is None and model.source_folder is None:
        raise InputError("load_mtp: the model came from no folder; give one that has mtp.*, or call add_mtp")
    with reading.open_checkpoint(source) as reader, torch.no_grad():
        alone, names = alone_with(model, mtp), model.names_on_disk
        parameters = dict(weights.named_weights(alone))
        boxes = {box.source: box for box in weights.regions(alone, names.found(alone, reader.headers).table)}
        wanted = {name: box.shape(parameters[box.param].shape) for name, box in boxes.items()}
        stored = {name: info.shape for name, info in reader.headers.items() if model.carries(name)}
        stored = {name: shape for name, shape in stored.items() if name in wanted or not model.ignores(name)}
        if wrong := sorted(name for name in wanted.keys() | stored.keys() if wanted.get(name) != stored.get(name)):
            first = wrong[0]
            has = f"{first} is {list(stored[first])}" if first in stored else f"it has no {first}"
            expects = f"{list(wanted[first])}" if first in wanted else "no such tensor"
            raise CheckpointError(f"{source}: {has}, and the layer of this model {expects}; {len(wrong)} differ")
        for name, box in boxes.items():
            parameters[box.param][box.index].copy_(box.from_disk(reader.read(name)))
    return _attach(model, mtp, freeze)


def alone_with(model: Any, mtp: nn.Module) -> nn.Module:
    """A module that has the layer under its name in the model, and nothing else, for the tables of names on disk."""
    alone = nn.Module()
    alone.mtp, alone.config = mtp, model.config
    return alone


def _empty(model: Any, loss_weight: float) -> MultiTokenPrediction:
    """The layer of the model, uninitialised, on the device and in the dtype of its head."""
    mtp, weight = empty_mtp(model, loss_weight), model.lm_head.weight
    if model.mtp is not None or weight.is_meta or hasattr(weight, "full_tensor"):
        raise InputError("the model has its layer for multi-token prediction already, or is sharded or not loaded")
    return mtp.to(weight.dtype).to_empty(device=weight.device)


def check_has_mtp(model: Any) -> None:
    """Raises InputError for a model of an architecture that has no layer for multi-token prediction."""
    if not hasattr(model, "make_mtp"):
        raise InputError(f"{type(model).__name__} has no layer for multi-token prediction")


def empty_mtp(model: Any, loss_weight: float) -> MultiTokenPrediction:
    """The layer of the model, on the meta device."""
    if loss_weight < 0:
        raise InputError(f"loss_weight={loss_weight} must be 0 or more")
    check_has_mtp(model)
    with torch.device("meta"):
        mtp: MultiTokenPrediction = model.make_mtp(model.config)
    mtp.loss_weight = float(loss_weight)
    return mtp


def _attach(model: Any, mtp: MultiTokenPrediction, freeze: bool) -> MultiTokenPrediction:
    if freeze:
        model.requires_grad_(False)
    model.mtp = mtp.train(model.training)
    return mtp
