"""LoRA adapters in PEFT's files, adapter_config.json and adapter_model.safetensors, and the merge into a weight.

    W + scale * B A        scale: lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora

rank_pattern and alpha_pattern name modules with their own r and lora_alpha. DoRA, which scales the rows of the sum, and
other variants are refused by name, unless the caller computes them.

Adapters of E experts are stored in one of two layouts:

    stacked       experts.base_layer.lora_A.weight [r E, H] and lora_B.weight [2 I, r E] of gate_up_proj, and
                  experts.lora_A.weight [r E, I] and lora_B.weight [H, r E] of down_proj. The rows of an expert follow
                  each other in A, its columns are E apart in B. PEFT 0.21 writes it over transformers 5.
    per expert    experts.3.gate_proj.lora_A.weight [r, H], lora_B.weight [I, r], and so on, by the names that the
                  weights have on disk. PEFT writes it over transformers 4, and reads it.

Checked against: PEFT 0.21, tuners/lora/layer.py, utils/save_and_load.py and utils/transformers_weight_conversion.py.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ligermodels.checkpoint import reading
from ligermodels.checkpoint.files import ADAPTER, pickles_refused, read_json
from ligermodels.errors import CheckpointError

CONFIG, WEIGHTS, PICKLE = ADAPTER, "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."
"""The prefix of PEFT's wrappers."""

_FIELDS = frozenset({
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out", "bias", "use_rslora",
    "modules_to_save", "init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern",
    "megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
    "qalora_group_size", "runtime_config", "ensure_weight_tying",
})  # fmt: skip
"""Fields of adapter_config.json that do not change the sum, or that are read here. Other fields may change it."""
IN_MEMORY = frozenset({"use_dora", "target_parameters"})
"""Further fields that `training.load_adapter` computes, and a merge on disk does not."""
_INITS = (None, True, False, "gaussian", "eva", "orthogonal")  # the other ways to initialise change the base as well


def _is_flag(value: Any) -> bool:
    return value is None or type(value) is bool


def _is_names(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(name, str) for name in value))


_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "r": (lambda x: type(x) is int and x >= 1, "a whole number of 1 or more"),
    "lora_alpha": (
        lambda x: type(x) in (int, float) and 0 < x <= torch.finfo(torch.float32).max,  # not NaN
        "a number above 0",
    ),
    "lora_dropout": (lambda x: x is None or (type(x) in (int, float) and 0 <= x < 1), "a number from 0 to below 1"),
    "use_rslora": (_is_flag, "true or false"),
    "use_dora": (_is_flag, "true or false"),
    "modules_to_save": (_is_names, "a list of names of modules"),
    "target_parameters": (_is_names, "a list of names of weights"),
}
"""{field of adapter_config.json: (whether a value is valid, what is expected)}."""
FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<half>[AB])(\.default)?(\.weight)?")
MAGNITUDE = re.compile(r"(?P<module>.+)\.lora_magnitude_vector(\.default)?(\.weight)?")
_CHUNK = 1 << 22  # elements that are merged in fp32 at a time


def read_options(folder: Path, *, computed: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The contents of adapter_config.json.

    computed: names of further fields that the caller supports.
    Raises CheckpointError for another method than LoRA, a variant of it, and values of a wrong type or range.
    """
    path = folder / CONFIG
    if not path.exists():
        raise CheckpointError(f"{path} is not there. Is {folder} the folder of a LoRA adapter, as PEFT saves it?")
    options = read_json(path)
    if options.get("peft_type") != "LORA":
        raise CheckpointError(f"{path} has peft_type {options.get('peft_type')!r}; LORA is what is read here")
    known, parameters = _FIELDS | computed, options.get("target_parameters")
    if _is_names(parameters) and all(name.endswith(".weight") for name in parameters or ()):
        known |= {"target_parameters"}  # of routers and linear modules, whose tensors are named as those of modules
    unknown = sorted(key for key, value in options.items() if key not in known and value)
    if unknown:
        step = "merge it with PEFT itself (merge_and_unload), and use the result"
        if IN_MEMORY.issuperset(unknown):
            step = "merge it in Python: load_adapter and merge_lora of ligermodels.training compute it"
        raise CheckpointError(f"{path} sets {', '.join(unknown[:3])}, which is not computed here.\n  Next: {step}.")
    if (init := options.get("init_lora_weights")) not in _INITS:
        raise CheckpointError(
            f"{path} has init_lora_weights {init!r}, which changed the base model as well.\n"
            "  Next: save the adapter again with path_initial_model_for_weight_conversion, or merge it with PEFT."
        )
    for field, (is_right, expected) in _VALUES.items():
        if field in options and not is_right(options[field]):
            raise CheckpointError(f"{path} has {field} {options[field]!r}; expected {expected}")
    for field, of in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha")):
        table, (is_right, expected) = options.get(field), _VALUES[of]
        if table is not None and not isinstance(table, dict):
            raise CheckpointError(f"{path} has {field} {table!r}; expected an object of patterns and values")
        for pattern, value in (table or {}).items():
            if not is_right(value):
                raise CheckpointError(f"{path} has {field} {value!r} for {pattern!r}; expected {expected}")
            try:
                re.compile(pattern)
            except re.error as error:
                raise CheckpointError(f"{path} has {field} for {pattern!r}, no regular expression: {error}") from error
    return options


def size_of(options: Mapping[str, Any], module: str) -> tuple[int, float]:
    """(r, lora_alpha) of a module. Where target_parameters names its weight, the patterns name that too."""
    weight = f".{module}.weight"
    if any(weight.endswith(f".{end}") for end in options.get("target_parameters") or ()):
        module += ".weight"

    def of(key: str, patterns: str) -> Any:
        table = options.get(patterns) or {}
        hit = next((pattern for pattern in table if re.match(rf"(.*\.)?({pattern})$", module)), None)
        return options.get(key, 8) if hit is None else table[hit]

    return of("r", "rank_pattern"), of("lora_alpha", "alpha_pattern")


def scale_of(options: Mapping[str, Any], module: str) -> float:
    r, alpha = size_of(options, module)
    return alpha / (math.sqrt(r) if options.get("use_rslora") else r)


def file_module(name: str, chosen: Iterable[str]) -> str:
    """The module of PEFT's files for a weight of experts, such as model.layers.0.mlp.experts.down_proj.

    PEFT wraps the experts once for each weight, gate_up_proj first. chosen: the weights that have an adapter.
    """
    experts, _, weight = name.rpartition(".")
    return f"{experts}.base_layer" if weight == "gate_up_proj" and f"{experts}.down_proj" in chosen else experts


def stack(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """lora_A [r E, in] and lora_B [out, r E] of stacked experts, from A [E, r, in] and B [E, rows, r] of each part.

    The parts are gate and up, or all rows. Where both have the same A, they share it; else the ranks add up, and B is 0
    between them. A part without an adapter has r = 0.
    """
    (first, _), *others = parts
    if all(torch.equal(first, a) for a, _ in others):
        a, b = first, torch.cat([b for _, b in parts], 1)
    else:
        a = torch.cat([a for a, _ in parts], 1)
        b = torch.stack([torch.block_diag(*blocks) for blocks in zip(*(b for _, b in parts), strict=True)])
    return a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)


def merged(old: Tensor, lora_b: Tensor, lora_a: Tensor, scale: float, magnitude: Tensor | None = None) -> Tensor:
    """old + scale * lora_b [out, r] @ lora_a [r, in], in fp32 and rounded once. It needs 32 MiB beyond the result.

    magnitude: DoRA's norms of the rows of the sum, [out].
    """
    dtype = torch.promote_types(torch.float32, old.dtype)
    result, lora_a = torch.empty_like(old), lora_a.to(dtype)
    for rows in _row_chunks(old):
        total = torch.addmm(old[rows].to(dtype), lora_b[rows].to(dtype), lora_a, alpha=scale)
        if magnitude is not None:
            total *= (magnitude[rows].to(dtype) / torch.linalg.vector_norm(total, dim=1))[:, None]
        result[rows] = total
    return result


def _row_chunks(weight: Tensor) -> list[slice]:
    """Slices of the rows of a matrix, each 16 MiB in fp32."""
    step = max(1, _CHUNK // weight.shape[1])
    return [slice(start, start + step) for start in range(0, weight.shape[0], step)]


def read_tensors(
    folder: Path, weights: str = WEIGHTS, pickle: str = PICKLE, *, allow_pickle: bool = False
) -> dict[str, Tensor]:
    """The tensors of the file `weights`, mapped; of `pickle` if that is allowed and there is nothing else."""
    path, pickled = folder / weights, folder / pickle
    if path.is_file() or not pickled.is_file():
        opened = reading.SafetensorsFile(path, folder)
        return {name: opened.read(name) for name in opened.names}
    if not allow_pickle:
        raise pickles_refused(folder, pickle)
    return reading.read_pickle(pickled)
