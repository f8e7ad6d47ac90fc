"""A LoRA adapter as PEFT saves it, merged into its base model: W + scale * B A, in fp32, rounded once.

- The adapter may have been trained on today's modules (q_proj) or on those that earlier versions packed (qkv_proj:
  its rows are split).
- scale is lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora; rank_pattern and alpha_pattern name exceptions.
- What modules_to_save and `bias` put beside the factors replaces the base's tensor.
- fan_in_fan_out is for transposed layers (GPT-2); the zoo has none, and PEFT ignores it on plain ones, as here.
- DoRA and whatever else changes the sum is refused by name: nothing is merged approximately.

Checked against: PEFT 0.21, tuners/lora/layer.py and utils/save_and_load.py.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ligermodels.arch import ARCHS
from ligermodels.checkpoint import reading, weights
from ligermodels.checkpoint.reading import companion_files, json_bytes, read_json
from ligermodels.checkpoint.weights import TensorInfo, same_bits
from ligermodels.conversion import native
from ligermodels.conversion.source import Source
from ligermodels.errors import CheckpointError, ConfigError

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"

# Fields of adapter_config.json that the sum does not depend on, or that are read below. Another one, where it is set,
# may change what is computed.
_FIELDS = frozenset({
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out", "bias", "use_rslora",
    "modules_to_save", "init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern",
    "megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
    "qalora_group_size", "runtime_config", "ensure_weight_tying",
})  # fmt: skip
_INITS = (None, True, False, "gaussian", "eva", "orthogonal")  # the others change the base as well
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<half>[AB])(\.default)?(\.weight)?")
_PREFIX = "base_model.model."
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_ROWS = 1 << 22  # elements that are merged in fp32 at a time


@dataclass(frozen=True)
class _Patch:
    """What the adapter does to one tensor: adds scale * left [out, r] @ right [r, in], or replaces it."""

    left: Tensor
    right: Tensor | None = None
    scale: float = 1.0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.left.shape) if self.right is None else (self.left.shape[0], self.right.shape[1])


class MergedSource:
    """`base` with the adapter in `adapter_folder` merged in: a source like any other. A context manager.

    base: with Hugging Face names; closed with this. allow_pickle: reads adapter_model.bin if there is nothing else.
    A tokenizer beside the adapter replaces the base's. Where the adapter trains a tied head apart from its embedding,
    the result is untied. Memory: the adapter is mapped, `read` holds the tensor asked for and 32 MiB.
    Raises CheckpointError for an adapter that is damaged, incomplete, of another model, or not plain LoRA.
    """

    def __init__(self, base: "Source", adapter_folder: str | Path, *, allow_pickle: bool = False):
        self.base, self.folder = base, Path(adapter_folder)
        self.source = f"{base.source} + {self.folder}"
        self._config = dict(base.config())
        options = read_options(self.folder)
        tensors = _tensors(self.folder, allow_pickle)
        places = _Places(base, self._config)
        pairs, whole = self._sort(tensors)
        self._patches: dict[str, _Patch] = {}
        for module, (a, b) in pairs.items():
            right, left = (b, a) if module.embedding else (a, b)
            if module.embedding:  # kept as [r, vocab] and [hidden, r]; their product is transposed
                right, left = right.T, left.T
            scale = _scale(options, self.folder, module.name, right.shape[0])
            self._add(places, f"{module.name}.weight", _Patch(left, right, scale))
        for name, tensor in whole.items():
            self._add(places, name, _Patch(tensor))
        self._check_complete(places, options, {module.name for module in pairs})
        self.headers = dict(base.headers)
        self._untie(places)
        for name, patch in self._patches.items():
            info = self.headers[name]
            grows = patch.right is None and name in (places.embedding, _HEAD) and patch.shape[1:] == info.shape[1:]
            if patch.shape != info.shape and not grows:
                self._fail(
                    f"{name} would change by {list(patch.shape)}, the base has {list(info.shape)}",
                    "the adapter of another model, or of another size",
                )
            if info.dtype not in weights.FLOATS:
                self._fail(f"{name} is {info.dtype} in the base", "a quantised base; merge into what it was made from")
            self.headers[name] = TensorInfo(info.dtype, patch.shape)
        rows = {self.headers[name].shape[0] for name in (places.embedding, _HEAD) if name in self.headers}
        if len(rows) > 1:
            self._fail(f"embedding and head have {sorted(rows)} rows", "only one of them was saved with the adapter")
        if rows:
            self._config["vocab_size"] = rows.pop()

    def config(self) -> dict[str, Any]:
        return dict(self._config)

    def files(self) -> dict[str, bytes | Path]:
        files = {**self.base.files(), **companion_files(self.folder)}
        if self._config != self.base.config():
            files["config.json"] = json_bytes(self._config)
        return files

    def read(self, name: str) -> Tensor:
        """The merged tensor, in the base's dtype. Raises CheckpointError where that cannot hold it."""
        if name not in self._patches:
            return self.base.read(self._sources.get(name, name))
        patch, info = self._patches[name], self.headers[name]
        if patch.right is None:
            merged = patch.left.to(info.dtype)
            if not merged.isfinite().all():
                self._overflow(name, info.dtype)
            return merged
        old = self.base.read(self._sources.get(name, name))
        wide = torch.promote_types(torch.float32, info.dtype)
        merged, right = torch.empty(info.shape, dtype=info.dtype), patch.right.to(wide)
        step = max(1, _ROWS // max(1, info.shape[1]))
        for start in range(0, info.shape[0], step):
            rows = slice(start, start + step)
            before = old[rows].to(wide)
            merged[rows] = torch.addmm(before, patch.left[rows].to(wide), right, alpha=patch.scale)
            if not merged[rows].isfinite().all() and before.isfinite().all():
                self._overflow(name, info.dtype)
        return merged

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._patches.clear()
        self.base.__exit__(*exc_info)

    def _fail(self, what: str, likely: str) -> None:
        raise CheckpointError(f"{self.folder} cannot be merged into {self.base.source}: {what}.\n  Likely: {likely}.")

    def _overflow(self, name: str, dtype: torch.dtype) -> None:
        self._fail(f"{name} leaves the range of {dtype}", "the base must be cast to bfloat16 or float32 first")

    def _sort(self, tensors: Mapping[str, Tensor]) -> tuple[dict["_Module", tuple[Tensor, Tensor]], dict[str, Tensor]]:
        """The pairs (A, B) by module, and the tensors that replace others by name."""
        halves: dict[_Module, dict[str, Tensor]] = {}
        whole: dict[str, Tensor] = {}
        for key, tensor in tensors.items():
            name = key.removeprefix(_PREFIX)
            if tensor.dtype not in weights.FLOATS or not tensor.isfinite().all():
                self._fail(f"{key} is {tensor.dtype} or holds NaN or infinity", "a training run that diverged")
            if match := _FACTOR.fullmatch(name):
                module = _Module(match["module"].replace(".base_layer", ""), match["embedding"] is not None)
                halves.setdefault(module, {})[match["half"]] = tensor
            elif re.search(r"lora_|trainable_tokens|token_adapter", name):
                self._fail(f"{key} belongs to a variant of LoRA that is not computed", "DoRA, LoRA bias or the like")
            else:
                whole[re.sub(r"\.base_layer\b|\.modules_to_save(\.default)?\b", "", name)] = tensor
        for module, pair in halves.items():
            if len(pair) < 2:
                self._fail(f"{module.name} has lora_{next(iter(pair))} alone", "a partial copy of the adapter")
            a, b = pair["A"], pair["B"]
            if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
                self._fail(f"{module.name} has A {list(a.shape)} and B {list(b.shape)}", "files of two adapters")
        if not halves and not whole:
            self._fail("it holds no tensors", "a training run that saved none, as under FSDP or ZeRO-3")
        return {module: (pair["A"], pair["B"]) for module, pair in halves.items()}, whole

    def _add(self, places: "_Places", name: str, patch: _Patch) -> None:
        found = places.find(name)
        if not found:
            self._fail(f"the base has no {name}", "the adapter of another model, or of a part that has no weights here")
        for source, index in found:
            if index and patch.shape != (shape := places.shape(found)):
                self._fail(
                    f"{name} would change by {list(patch.shape)}, the model has {list(shape)}",
                    "the adapter of another model, or of another size",
                )
            if source in self._patches:
                self._fail(f"{source} is changed twice", "adapters of two layouts in one file")
            if patch.right is None:
                self._patches[source] = _Patch(patch.left[index])
            else:
                self._patches[source] = _Patch(patch.left[index], patch.right, patch.scale)

    def _check_complete(self, places: "_Places", options: Mapping[str, Any], found: set[str]) -> None:
        """Every module that target_modules names must have its factors, where the config says so plainly."""
        targets = options.get("target_modules")
        narrowed = any(options.get(key) not in (None, [], {}) for key in ("layers_to_transform", "exclude_modules"))
        if not isinstance(targets, list) or narrowed or not found:
            return
        for module in places.modules(like=found):
            if any(module == target or module.endswith(f".{target}") for target in targets) and module not in found:
                self._fail(f"target_modules asks for {module}, which is not in the file", "a partial copy of it")

    def _untie(self, places: "_Places") -> None:
        """Sorts out embedding and head where the base ties them; then both are changed alike, or parted."""
        self._sources: dict[str, str] = {}
        changed = [name for name in (places.embedding, _HEAD) if name in self._patches]
        if not places.tied or not changed:
            return
        if len(changed) == 1:
            self._fail(
                f"{changed[0]} is changed, but the base ties embedding and head, and which was meant is not recorded",
                "a tied model trained by PEFT. Untie the base first: lm_head.weight on disk, tie_word_embeddings false",
            )
        one, other = (self._patches[name] for name in changed)
        if one.right is None and other.right is None and same_bits(one.left, other.left):
            if _HEAD not in self.headers:
                del self._patches[_HEAD]
            return
        if _HEAD not in self.headers:
            self.headers[_HEAD] = self.headers[places.embedding]
            self._sources[_HEAD] = places.embedding
        self._config["tie_word_embeddings"] = False


@dataclass(frozen=True)
class _Module:
    name: str
    embedding: bool


class _Places:
    """Where the tensors that an adapter names, by any of the names the zoo knows, lie in the base."""

    def __init__(self, base: "Source", config: Mapping[str, Any]):
        if (kind := config.get("model_type")) not in ARCHS:
            raise ConfigError(f"{base.source}: config.json has model_type {kind!r}; the zoo holds {', '.join(ARCHS)}")
        self._kind, arch = kind, ARCHS[kind]
        with torch.device("meta"):
            model = arch(arch.config_class.from_hf(config))
        table = weights.layout(model, arch.DISK_NAMES, base.headers, also=arch.ALSO_READ)
        weights.check(model, table, base.headers, ignore=arch.IGNORE, tied=model.tied_weights, where=base.source)
        self.tied, self._base = bool(model.tied_weights), base
        self._boxes: dict[str, list[weights.Region]] = {}
        for region in weights.regions(model, table):
            self._boxes.setdefault(region.param, []).append(region)
        self._other = {r.source: r for one in (arch.DISK_NAMES, *arch.ALSO_READ) for r in weights.regions(model, one)}
        self.embedding = next(name for name in base.headers if name.endswith(_EMBEDDING))

    def modules(self, *, like: set[str]) -> list[str]:
        """All that have a weight, under the names by which `like` goes: those of memory, or else of the base."""
        in_memory = {name.removesuffix(".weight") for name in self._boxes if name.endswith(".weight")}
        on_disk = {name.removesuffix(".weight") for name in self._base.headers if name.endswith(".weight")}
        names = in_memory if like <= in_memory else on_disk
        return sorted(names) if like & names else []

    def shape(self, found: list[tuple[str, tuple[slice, ...]]]) -> tuple[int, ...]:
        """Of a tensor that `find` has found in these pieces."""
        shapes = [self._base.headers[source].shape for source, _ in found]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def find(self, name: str) -> list[tuple[str, tuple[slice, ...]]]:
        """[(tensor of the base, the rows of the named tensor that go there)]; empty where there is none."""
        if source := self._source(name):
            return [(source, ())]
        sources = [self._source(part) for part in native.names_of(name, self._kind)]
        start = 0
        found: list[tuple[str, tuple[slice, ...]]] = []
        for source in sources:
            if source is None:
                return []
            end = start + self._base.headers[source].shape[0]
            found.append((source, (slice(start, end),) if len(sources) > 1 else ()))
            start = end
        return found

    def _source(self, name: str) -> str | None:
        """The tensor of the base that has this name in any layout of the architecture."""
        if name in self._base.headers or (self.tied and name == _HEAD):
            return name
        index: tuple[int | slice, ...] = ()
        if box := self._other.get(name):
            name, index = box.param, box.index
        return next((box.source for box in self._boxes.get(name, ()) if box.index == index), None)


def headers(folder: Path, *, allow_pickle: bool = False) -> dict[str, TensorInfo]:
    """What the file of an adapter holds; nothing of it is read. Raises CheckpointError, HubError."""
    opened = _open(folder, allow_pickle)
    if isinstance(opened, reading.SafetensorsFile):
        return {name: opened.info(name) for name in opened.names}
    return {name: TensorInfo(x.dtype, tuple(x.shape)) for name, x in opened.items()}


def module_of(key: str) -> str:
    """The module that a tensor of an adapter belongs to."""
    name = key.removeprefix(_PREFIX)
    match = _FACTOR.fullmatch(name)
    return match["module"] if match else name.rpartition(".")[0]


def read_options(folder: Path) -> dict[str, Any]:
    """adapter_config.json. Raises CheckpointError for everything in it that is not a sum of low rank."""
    path = folder / CONFIG
    with reading.read_errors(folder):
        there = path.exists()
    if not there:
        raise CheckpointError(f"{path} is not there. Is {folder} the folder of a LoRA adapter, as PEFT saves it?")
    options = read_json(path)
    if options.get("peft_type") != "LORA":
        raise CheckpointError(f"{path} has peft_type {options.get('peft_type')!r}; LORA is what can be merged")
    unknown = sorted(key for key, value in options.items() if key not in _FIELDS and value)
    if unknown:
        raise CheckpointError(
            f"{path} sets {', '.join(unknown[:3])}, which is not computed here.\n"
            "  Next: merge it with PEFT itself (merge_and_unload), then convert the result."
        )
    init = options.get("init_lora_weights")
    if not any(init is one or (isinstance(one, str) and init == one) for one in _INITS):
        raise CheckpointError(
            f"{path} has init_lora_weights {init!r}, which changed the base model as well.\n"
            "  Next: save the adapter again with path_initial_model_for_weight_conversion, or merge it with PEFT."
        )
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = options.get(key) or {}
        # PEFT reads them as regular expressions; these forms of them take linear time.
        if not isinstance(patterns, dict) or not all(re.fullmatch(r"\^?(\w|\.|\\\.)+\$?", one) for one in patterns):
            raise CheckpointError(f"{path}: {key} is {str(patterns)[:80]}; expected names of modules as its keys")
    return options


def _scale(options: Mapping[str, Any], folder: Path, module: str, rank: int) -> float:
    """lora_alpha over the rank or its root, with the exceptions made for this module."""

    def of(key: str, patterns: str) -> Any:
        table = options.get(patterns) or {}
        hit = next((one for one in table if re.match(rf"(.*\.)?({one})$", module)), None)
        return options.get(key, 8) if hit is None else table[hit]

    r, alpha = of("r", "rank_pattern"), of("lora_alpha", "alpha_pattern")
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) for x in (r, alpha))
    if not numbers or r < 1 or r != rank:
        raise CheckpointError(
            f"{folder}: {module} has rank {rank} on disk, r {r!r} and lora_alpha {alpha!r} in {CONFIG}.\n"
            "  Likely: config and weights of two adapters; fetch both again."
        )
    return alpha / (math.sqrt(r) if options.get("use_rslora") else r)


def _tensors(folder: Path, allow_pickle: bool) -> dict[str, Tensor]:
    """The adapter's tensors, mapped from its file."""
    opened = _open(folder, allow_pickle)
    return opened if isinstance(opened, dict) else {name: opened.read(name) for name in opened.names}


def _open(folder: Path, allow_pickle: bool) -> reading.SafetensorsFile | dict[str, Tensor]:
    path, pickled = folder / WEIGHTS, folder / PICKLE
    if not path.is_file() and pickled.is_file():
        if not allow_pickle:
            raise CheckpointError(
                f"{pickled} is a pickle, which can carry code, and there is no {WEIGHTS}.\n"
                "  Next: pass allow_pickle=True (--allow-pickle): tensors are read from it, and nothing else."
            )
        return reading.read_pickle(pickled)
    if not path.is_file():
        raise CheckpointError(f"{path} is not there. Is {folder} the folder of a LoRA adapter, and complete?")
    return reading.open_safetensors(folder, [WEIGHTS])[WEIGHTS]
