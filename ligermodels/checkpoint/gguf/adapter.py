"""A LoRA adapter, as PEFT saves it, as a GGUF file, which llama.cpp adds to the GGUF file of its base (--lora).

    general.type adapter, adapter.type lora, adapter.lora.alpha     the scale is alpha / r of each tensor
    NAME.lora_a [r, in], NAME.lora_b [out, r]                       NAME: of the base's tensor: blk.0.attn_q.weight
    of experts                                                      [experts, r, in] and [experts, out, r]

- Rows of q and k are permuted in Llama's files, so are those of lora_b; the columns of lora_a of Qwen3.5's out_proj.
- The file has one alpha. It is such that the scale of the first module is exact, also with use_rslora; where other
  modules have another scale (rank_pattern, alpha_pattern), their lora_b is multiplied by the quotient, in fp32.
- An expert without an adapter has zeros.
- Refused: DoRA and other variants, whole weights and biases, embeddings, the head of a tied model, towers of images,
  and experts that are adapted as one tensor (target_parameters).

Checked against: convert_lora_to_gguf.py and src/llama-adapter.cpp of llama.cpp.
"""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from ligermodels.checkpoint import adapters
from ligermodels.checkpoint.adapters import FACTOR, PREFIX
from ligermodels.checkpoint.gguf.config import FAMILIES, check
from ligermodels.checkpoint.gguf.layout import Layout
from ligermodels.checkpoint.gguf.output import GgufOutput, OutTensor, expert_of, file_type, float_type
from ligermodels.checkpoint.gguf.reader import package
from ligermodels.errors import CheckpointError

_Pair = tuple[Tensor, Tensor]  # A [r, in], B [out, r]


class AdapterTarget(GgufOutput):
    """The GGUF file of the adapter in `folder`.

    model: its base, on the meta device. shapes: {name on disk: shape} of the base's tensors. names: {name of a tensor
    in memory or in another layout: name on disk}. dtype: of the factors; None keeps theirs. name: of the adapter, for
    people. allow_pickle: read adapter_model.bin if there is nothing else.
    Raises CheckpointError for an adapter that llama.cpp does not compute or that is of another model, ConfigError for a
    base that it does not compute.
    """

    def __init__(
        self,
        folder: Path,
        model: Any,
        shapes: Mapping[str, tuple[int, ...]],
        names: Mapping[str, str],
        *,
        dtype: torch.dtype | None = None,
        name: str = "",
        allow_pickle: bool = False,
    ):
        self.folder, self._shapes = folder, shapes
        options = adapters.read_options(folder)
        check(model, str(options.get("base_model_name_or_path") or "the base"))
        arch, _ = FAMILIES[model.config.model_type]
        self._layout = Layout(arch, model.config.model_type, vars(model.config))
        groups: dict[str, dict[int, _Pair]] = {}
        alpha: float | None = None
        for module, (a, b) in self._pairs(adapters.read_tensors(folder, allow_pickle=allow_pickle)).items():
            source = names.get(f"{module}.weight", f"{module}.weight")
            rank, scale = a.shape[0], adapters.scale_of(options, module)
            self._check(source, module, a, b, adapters.size_of(options, module)[0])
            alpha = scale * rank if alpha is None else alpha
            if not math.isclose(quotient := scale * rank / alpha, 1.0, rel_tol=1e-6):
                b = b.float() * quotient
            change, (place,) = self._layout.change(source), self._layout.theirs(source)
            if change is not None and module.endswith("linear_attn.out_proj"):
                a = change.write(a)
            elif change is not None:
                b = change.write(b)
            groups.setdefault(place, {})[expert_of(source)] = a, b
        if alpha is None:
            self._fail("it has no lora_A and lora_B", "a training run that saved none, as under FSDP or ZeRO-3")
        tensors: dict[str, OutTensor] = {}
        for place, pairs in groups.items():
            count = self._experts(place)
            for half, index in (("lora_a", 0), ("lora_b", 1)):
                parts = {expert: pair[index] for expert, pair in pairs.items()}
                first = next(iter(parts.values()))
                if any(part.shape != first.shape for part in parts.values()):
                    self._fail(f"the experts of {place} have several ranks", "rank_pattern with numbers of experts")
                kind = float_type(place, dtype or first.dtype)
                shape = tuple(first.shape) if count is None else (count, *first.shape)
                tensors[f"{place}.{half}"] = OutTensor(kind, shape, partial(_stacked, parts, count))
        writer = package().GGUFWriter(None, arch)
        writer.add_type("adapter")
        writer.add_file_type(file_type(tensors))
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", alpha)
        super().__init__(writer, tensors, name)

    def _pairs(self, tensors: Mapping[str, Tensor]) -> dict[str, _Pair]:
        """{module: (A, B)}."""
        halves: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            match = FACTOR.fullmatch(name := key.removeprefix(PREFIX))
            if match is None:
                self._fail(f"llama.cpp adds factors alone, and {key} is a whole weight", "modules_to_save, or bias")
            if match["embedding"]:
                self._fail(f"{name} adapts an embedding", "target_modules with embed_tokens")
            halves.setdefault(match["module"], {})[match["half"]] = tensor
        for module, pair in halves.items():
            if len(pair) < 2:
                self._fail(f"{module} has one of lora_A and lora_B alone", "a partial copy of the adapter")
            if module.endswith((".experts", ".experts.base_layer")):
                self._fail(f"{module} adapts all experts as one tensor", "target_parameters")
        return {module: (pair["A"], pair["B"]) for module, pair in halves.items()}

    def _check(self, source: str, module: str, a: Tensor, b: Tensor, rank: int) -> None:
        """Raises CheckpointError for factors that do not fit the base, or that llama.cpp has no name for."""
        if source not in self._shapes:
            tied = module.endswith("lm_head")
            reason = "the head of a tied model, which no file stores" if tied else "the adapter of another model"
            self._fail(f"the base has no {source}", reason)
        expected, found = self._shapes[source], (b.shape[0], a.shape[1])
        if expected != found or not a.shape[0] == b.shape[1] == rank:
            what = f"{module} has lora_A {list(a.shape)} and lora_B {list(b.shape)}"
            self._fail(f"{what}, expected rank {rank} for {list(expected)}", "the adapter of another model")
        if len(self._layout.theirs(source)) != 1 or 1 in expected:
            self._fail(f"llama.cpp has no place for an adapter of {source}", "a router, a vector or a tower of images")

    def _experts(self, place: str) -> int | None:
        """The number of experts in a tensor of the base; None for other tensors."""
        if not place.endswith("_exps.weight"):
            return None
        return sum(self._layout.theirs(source) == (place,) for source in self._shapes)

    def _fail(self, what: str, likely: str) -> NoReturn:
        raise CheckpointError(
            f"{self.folder} cannot be written as a GGUF adapter: {what}.\n  Likely: {likely}.\n"
            f"  Next: merge it: ligermodels convert BASE out.gguf --adapter {self.folder}"
        )


def _stacked(parts: Mapping[int, Tensor], count: int | None) -> Iterator[Tensor]:
    """The factor, or that of each of `count` experts."""
    if count is None:
        yield parts[0]
        return
    empty = torch.zeros_like(next(iter(parts.values())))
    for expert in range(count):
        yield parts.get(expert, empty)
