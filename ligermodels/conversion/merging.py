"""A LoRA adapter, as PEFT saves it, merged into its base model: W + scale * B A, in fp32, rounded once.

- checkpoint/adapters.py reads the files and computes the scale.
- Tensors that modules_to_save and `bias` put into the file replace the base's.
- fan_in_fan_out is for transposed layers (GPT-2). The zoo has none, and PEFT ignores it on other layers, as here.
- Adapters of experts that are stacked in the file (target_parameters) go into experts in any layout on disk; adapters
  that are one by one go into experts that are one by one.
- DoRA and other variants are refused by name: nothing is merged approximately.

Checked against: PEFT 0.21, tuners/lora/layer.py and utils/save_and_load.py.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ligermodels.arch import CausalLM
from ligermodels.checkpoint import adapters, weights
from ligermodels.checkpoint.adapters import CONFIG, FACTOR, PREFIX, read_options, read_tensors
from ligermodels.checkpoint.files import companion_files, json_bytes
from ligermodels.checkpoint.mxfp4 import MXFP4Weight
from ligermodels.checkpoint.weights import TensorInfo, same_bits
from ligermodels.conversion.source import Source, View
from ligermodels.errors import CheckpointError

_HEAD = "lm_head.weight"
_ROWS = 1024
"""Rows, or experts, that are checked at a time: a base may have infinities of its own."""


class _Patch(NamedTuple):
    """A change of one tensor: scale * tensor [out, r] @ lora_a [r, in] is added; without lora_a, tensor replaces it.

    For a tensor of E experts both factors have a first dim, E. transposed: the tensor is [E, in, out].
    """

    tensor: Tensor
    lora_a: Tensor | None = None
    scale: float = 1.0
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        if self.lora_a is None:
            return tuple(self.tensor.shape)
        *experts, rows, columns = *self.tensor.shape[:-1], self.lora_a.shape[-1]
        return (*experts, columns, rows) if self.transposed else (*experts, rows, columns)

    def added_to(self, old: Tensor) -> Tensor:
        """The sum, in the dtype of `old`."""
        assert self.lora_a is not None
        if old.dim() == 2:
            return adapters.merged(old, self.tensor, self.lora_a, self.scale)
        each = zip(old.mT if self.transposed else old, self.tensor, self.lora_a, strict=True)
        new = torch.stack([adapters.merged(w.contiguous(), b, a, self.scale) for w, b, a in each])
        return new.mT.contiguous() if self.transposed else new


class MergedSource(Source):
    """`base` with the adapter in `adapter_folder` merged in.

    allow_pickle: read adapter_model.bin if there is nothing else.
    A tokenizer in the adapter's folder replaces the base's. If the adapter changes a tied head and its embedding
    differently, the result is untied. The adapter is mapped; `read` needs memory for the tensor and 32 MiB.
    Raises CheckpointError for an adapter that is damaged, incomplete, of another model, or not plain LoRA.
    """

    def __init__(self, base: View, adapter_folder: Path, *, allow_pickle: bool = False):
        self.base, self.folder = base, adapter_folder
        self.source = f"{base.source} + {adapter_folder}"
        self.config = dict(base.config)
        self._embedding = next(name for name in base.headers if name.endswith("embed_tokens.weight"))
        self._aliases = aliases(base.model)
        on_disk = weights.regions(base.model, base.model.DISK_NAMES)
        self._rearranged = {
            region.source for region in on_disk if region.transposed or (region.order is not None and region.dim)
        }
        self._patches: dict[str, _Patch] = {}
        options = read_options(adapter_folder, computed=frozenset({"target_parameters"}))
        for name, patch in self._read_patches(options, read_tensors(adapter_folder, allow_pickle=allow_pickle)).items():
            self._add(name, patch)
        self.headers: dict[str, TensorInfo] = dict(base.headers)
        self._untie()
        self.packed = [name for name in base.packed if name not in self._patches]
        for name, patch in self._patches.items():
            info = self.headers[name]
            grows = patch.lora_a is None and name in (self._embedding, _HEAD) and patch.shape[1:] == info.shape[1:]
            if patch.shape != info.shape and not grows:
                what = f"{name} would change by {list(patch.shape)}, the base has {list(info.shape)}"
                self._fail(what, "the adapter of another model, or of another size")
            self.headers[name] = TensorInfo(info.dtype, patch.shape)
        rows = {name: self.headers[name].shape[0] for name in (self._embedding, _HEAD) if name in self.headers}
        if any(name in base.headers and base.headers[name].shape[0] != count for name, count in rows.items()):
            if len(set(rows.values())) > 1:
                self._fail(f"the rows become {rows}", "only one of embedding and head was saved with the adapter")
            self.config["vocab_size"] = rows[self._embedding]

    def files(self) -> dict[str, bytes | Path]:
        files = {**self.base.files(), **companion_files(self.folder)}
        if self.config != self.base.config:
            files["config.json"] = json_bytes(self.config)
        return files

    def read(self, name: str) -> Tensor:
        """The merged tensor, in the base's dtype. Raises CheckpointError where that cannot hold it."""
        base_name = name if name in self.base.headers else self._embedding  # a head that the adapter has untied
        if name not in self._patches:
            return self.base.read(base_name)
        patch, info = self._patches[name], self.headers[name]
        if patch.lora_a is None:
            merged = patch.tensor.to(info.dtype)
            self._check_finite(name, merged)
            return merged
        old = self.base.read(base_name)
        merged = patch.added_to(old)
        for before, after in zip(old.split(_ROWS), merged.split(_ROWS), strict=True):
            if before.isfinite().all():
                self._check_finite(name, after)
        return merged

    def read_packed(self, name: str) -> MXFP4Weight:
        return self.base.read_packed(name)

    def _fail(self, what: str, likely: str) -> NoReturn:
        raise CheckpointError(f"{self.folder} cannot be merged into {self.base.source}: {what}.\n  Likely: {likely}.")

    def _check_finite(self, name: str, merged: Tensor) -> None:
        if not merged.isfinite().all():
            self._fail(
                f"{name} then holds NaN or infinity in {merged.dtype}",
                "a training run that diverged, or a sum beyond the dtype's range: cast the base to bfloat16 first",
            )

    def _read_patches(self, options: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, _Patch]:
        """{the adapter's name of a tensor: its patch}."""
        patches: dict[str, _Patch] = {}
        halves: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            name = key.removeprefix(PREFIX)
            if match := FACTOR.fullmatch(name):
                pair = halves.setdefault(match["module"], {})
                # For an embedding, A is [r, vocab] and B [hidden, r], and (B A)^T is added.
                swapped = {"A": "B", "B": "A"}[match["half"]]
                pair |= {swapped: tensor.T} if match["embedding"] else {match["half"]: tensor}
            elif re.search(r"lora_|trainable_tokens|token_adapter", name):
                self._fail(f"{key} belongs to a variant of LoRA that is not computed", "DoRA, LoRA bias or the like")
            else:
                name = re.sub(r"\.base_layer\b|\.modules_to_save(\.default)?\b", "", name)
                patches[name] = _Patch(tensor)
        patches |= self._experts_patches(options, halves)
        for wrapped, pair in halves.items():
            module = wrapped.replace(".base_layer", "")
            if len(pair) < 2:
                self._fail(f"{module} has one of lora_A and lora_B alone", "a partial copy of the adapter")
            lora_a, lora_b = pair["A"], pair["B"]
            r, _ = adapters.size_of(options, module)
            if not r == lora_a.shape[0] == lora_b.shape[1]:
                what = f"{module} has rank {lora_a.shape[0]} in A and {lora_b.shape[1]} in B, r {r!r} in {CONFIG}"
                self._fail(what, "config and weights of two adapters; fetch both again")
            patches[f"{module}.weight"] = _Patch(lora_b, lora_a, adapters.scale_of(options, module))
        if not patches:
            self._fail("it holds no tensors", "a training run that saved none, as under FSDP or ZeRO-3")
        return patches

    def _experts_patches(
        self, options: Mapping[str, Any], halves: dict[str, dict[str, Tensor]]
    ) -> dict[str, _Patch]:  # fmt: skip
        """{name on disk: patch} of the stacked weights in target_parameters. Takes their factors out of `halves`."""
        model, ends = self.base.model, [end for end in options.get("target_parameters") or () if ".weight" not in end]
        shapes = {name: tuple(weight.shape) for name, weight in weights.named_weights(model)}
        chosen = [name for name in shapes if any(f".{name}".endswith(f".{end}") for end in ends)]
        if unknown := [end for end in ends if not any(f".{name}".endswith(f".{end}") for name in shapes)]:
            self._fail(
                f"target_parameters names {unknown[0]}, which is not in the base", "the adapter of another model"
            )
        patches = {}
        for name in chosen:
            experts, rows, columns = shapes[name]
            r, alpha = adapters.size_of(options, name)
            pair = halves.pop(adapters.file_module(name, chosen), {})
            expected = {"A": (r * experts, columns), "B": (rows, r * experts)}
            if (stored := {half: tuple(tensor.shape) for half, tensor in pair.items()}) != expected:
                self._fail(
                    f"the adapter of {name} has {stored}, expected {expected} by {CONFIG} and the base",
                    "the adapter of a model with other experts, or a partial copy",
                )
            a, b = pair["A"].unflatten(0, (experts, r)), pair["B"].unflatten(1, (r, experts)).permute(2, 0, 1)
            scale = alpha / (math.sqrt(r) if options.get("use_rslora") else r)
            for region in weights.regions(model, model.DISK_NAMES):
                if region.param == name:  # the rows of B are in the order of those on disk
                    expert = region.index[:1]  # () for a tensor of all experts
                    patches[region.source] = _Patch(b[region.index], a[expert], scale, region.transposed)
        return patches

    def _add(self, name: str, patch: _Patch) -> None:
        """Adds the patch of the base's tensor that has this name in any layout of the architecture."""
        is_known = name in self.base.headers or (name == _HEAD and self.base.model.tied_weights)
        source = name if is_known else self._aliases.get(name)
        if source is None:
            self._fail(f"the base has no {name}", "the adapter of another model, or of a part that has no weights here")
        if patch.lora_a is not None and patch.tensor.dim() == 2 and source in self._rearranged:
            self._fail(
                f"{source} is transposed on disk, or its columns are in another order",
                "an adapter that was trained on a model in another layout",
            )
        if source in self._patches:
            self._fail(f"{source} is changed twice", "adapters of two layouts in one file")
        self._patches[source] = patch

    def _untie(self) -> None:
        """Handles a base that ties embedding and head: the two are changed alike, or untied."""
        changed = [name for name in (self._embedding, _HEAD) if name in self._patches]
        if not self.base.model.tied_weights or not changed:
            return
        if len(changed) == 1:
            self._fail(
                f"{changed[0]} is changed, but the base ties embedding and head, and which was meant is not recorded",
                "a tied model trained by PEFT. Untie the base first: lm_head.weight on disk, tie_word_embeddings false",
            )
        table, head = (self._patches[name] for name in changed)
        if table.lora_a is None and head.lora_a is None and same_bits(table.tensor, head.tensor):
            del self._patches[_HEAD]
        else:
            self.headers[_HEAD] = self.headers[self._embedding]
            self.config["tie_word_embeddings"] = False


def aliases(model: CausalLM) -> dict[str, str]:
    """{name in memory or in another layout of the architecture: name on disk}."""

    def box(region: weights.Region) -> tuple[str, str]:
        return region.param, str(region.index)  # a slice has no hash before Python 3.12

    on_disk = {box(region): region.source for region in weights.regions(model, model.DISK_NAMES)}
    others = [region for table in ({}, *model.OTHER_LAYOUTS) for region in weights.regions(model, table)]
    return {region.source: on_disk[box(region)] for region in others if box(region) in on_disk}
