"""Medusa heads: each guesses a token further ahead than the model's own head, from the same hidden state.

From the hidden state x at position t, head k = 0, 1, ... guesses token t + k + 2 (the model's own head: t + 1):

    x <- x + SiLU(W x + b), `layers` times        logits = x @ V.T

At first, W = b = 0 and V is a copy of the model's head. The files are those of the reference implementation:
medusa_lm_head.safetensors with `K.L.linear.weight`, `K.L.linear.bias` and `K.LAYERS.weight` of head K, and config.json
with medusa_num_heads, medusa_num_layers and base_model_name_or_path. Each implementation reads the other's files.

Paper: Cai et al., https://arxiv.org/abs/2401.10774, section 2.1. Checked against: FasterDecoding/Medusa,
medusa/model/medusa_model.py.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.checkpoint import adapters, saving
from ligermodels.checkpoint.files import MEDUSA, json_bytes, read_json
from ligermodels.errors import CheckpointError, InputError
from ligermodels.layers import LMHead
from ligermodels.training import files

WEIGHTS, PICKLE, CONFIG = MEDUSA, "medusa_lm_head.pt", "config.json"


class _Residual(nn.Module):
    """x + SiLU(W x + b)."""

    def __init__(self, size: int):
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class MedusaHead(nn.Sequential):
    """Residual blocks and a linear head."""

    def __init__(self, hidden_size: int, vocab_size: int, layers: int, softcap: float | None = None):
        super().__init__(*(_Residual(hidden_size) for _ in range(layers)), LMHead(hidden_size, vocab_size))
        self.softcap = softcap

    def forward(self, x: Tensor, labels: Tensor | None = None, **options: Any) -> Any:  # type: ignore[override]
        """Logits [..., V] of x [..., H]; with labels [...], shifted already, what `LMHead` returns for them."""
        *blocks, head = self
        for block in blocks:
            x = block(x)
        return head(x, labels, softcap=self.softcap, **options)


class MedusaHeads(nn.ModuleList):
    """`heads[k]` is a `MedusaHead`, which guesses the token k + 2 ahead."""

    def __init__(
        self, hidden_size: int, vocab_size: int, heads: int = 4, layers: int = 1, softcap: float | None = None
    ):
        super().__init__(MedusaHead(hidden_size, vocab_size, layers, softcap) for _ in range(heads))
        self.layers = layers

    def forward(self, x: Tensor) -> list[Tensor]:
        """The logits [..., V] of each head, of hidden states x [..., H] after the final norm."""
        return [head(x) for head in self]


def add_medusa(model: Any, heads: int = 4, layers: int = 1, *, freeze: bool = True) -> MedusaHeads:
    """Gives the model new heads as `model.medusa`; returns them. Call it before the model is sharded.

    freeze: only the heads are trained. Raises InputError for numbers out of range, and for a model that has heads, is
    sharded or is not loaded.
    """
    if heads < 1 or layers < 0:
        raise InputError(f"add_medusa: heads={heads}, layers={layers}; expected heads >= 1 and layers >= 0")
    weight = model.lm_head.weight
    if "medusa" in model._modules or weight.is_meta or hasattr(weight, "full_tensor"):
        raise InputError("add_medusa: the model has heads already, or is sharded or not loaded; give a loaded one")
    if freeze:
        model.requires_grad_(False)
    medusa = _empty(model, heads, layers)
    with torch.no_grad():
        for parameter in medusa.parameters():
            parameter.zero_()
        for head in medusa:
            head[-1].weight.copy_(weight)  # type: ignore[index, union-attr, operator]
    model.medusa = medusa.train(model.training)
    return medusa


def save_medusa(model: Any, folder: str | Path, *, base: str | None = None) -> Path:
    """Writes `model.medusa` and returns the folder. base: the base model's name in config.json.

    Every rank of a sharded model calls this, and one writes. Raises HubError where the folder cannot be written.
    """
    heads: MedusaHeads = model.medusa
    files.reshard(model)
    config = {
        "medusa_num_heads": len(heads),
        "medusa_num_layers": heads.layers,
        "base_model_name_or_path": base or model.name_or_path,
    }
    return files.write(folder, dict(heads.named_parameters()), WEIGHTS, {CONFIG: json_bytes(config)})


def load_medusa(model: Any, folder: str | Path, *, allow_pickle: bool = False) -> MedusaHeads:
    """Returns the heads in `folder`, ours or the reference implementation's, on the device and in the dtype of the
    model's head; the model is unchanged.

    allow_pickle: reads medusa_lm_head.pt if there is nothing else. Raises CheckpointError for files that are missing,
    damaged, or of a model of another size.
    """
    folder = saving.absolute(folder)
    config = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    heads, layers = (config.get(f"medusa_num_{name}") for name in ("heads", "layers"))
    if not (type(heads) is int and heads > 0 and type(layers) is int and layers >= 0):
        raise CheckpointError(
            f"{folder / CONFIG} lacks medusa_num_heads and medusa_num_layers; give a folder of Medusa heads"
        )
    tensors = adapters.read_tensors(folder, WEIGHTS, PICKLE, allow_pickle=allow_pickle)
    sketch = _empty(model, heads, layers, device="meta")
    wanted = {name: tuple(parameter.shape) for name, parameter in sketch.named_parameters()}
    stored = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if wrong := sorted(name for name in wanted.keys() | stored.keys() if wanted.get(name) != stored.get(name)):
        first = wrong[0]
        raise CheckpointError(
            f"{folder} has heads of another model: {first} is {stored.get(first, 'not there')}, and this model's "
            f"would be {wanted.get(first, 'not there')}; {len(wrong)} differ"
        )
    medusa = _empty(model, heads, layers)
    with torch.no_grad():
        for name, parameter in medusa.named_parameters():
            parameter.copy_(tensors[name])
    return medusa.eval()


def _empty(model: Any, heads: int, layers: int, device: str | None = None) -> MedusaHeads:
    """Uninitialised heads for the model, on the device of its own head."""
    weight = model.lm_head.weight
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    with torch.device("meta"):
        medusa = MedusaHeads(weight.shape[1], weight.shape[0], heads, layers, softcap)
    return medusa.to(weight.dtype).to_empty(device=device or weight.device)
