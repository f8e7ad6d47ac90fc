"""LoRA, rsLoRA and DoRA on models of the zoo; adapters in PEFT's files.

    model = add_lora(model, r=16, alpha=32)                     train the parameters that require gradients, then
    save_adapter(model, "adapter")                              or
    merge_lora(model).save_pretrained("merged")

Linear modules get their adapter in place (`layers.lora.Adapted`), and stay fused. In `state_dict()` the base's weights
keep their names; adapters have PEFT's names without its prefix and "default", such as
model.layers.0.self_attn.q_proj.lora_A.weight. Modules in `modules_to_save` are trained whole.
"""

import collections
import contextlib
import copy
import dataclasses
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.checkpoint import adapters, saving, weights
from ligermodels.checkpoint.adapters import CONFIG, PREFIX, WEIGHTS
from ligermodels.checkpoint.files import json_bytes
from ligermodels.errors import CheckpointError, InputError
from ligermodels.layers import LMHead
from ligermodels.layers.fp8 import RECIPES, FP8Linear, check_device, use_fp8
from ligermodels.layers.linear import why_not_fused
from ligermodels.layers.lora import Adapted
from ligermodels.layers.moe import Adaptable
from ligermodels.layers.quantized import QuantizedLinear
from ligermodels.training import files

_BASES = nn.Linear, FP8Linear, QuantizedLinear
"""Classes of modules that an adapter can be added to."""
_SAVED = "_lora_modules_to_save"
"""The attribute of a model with adapters: the names in modules_to_save."""
_FORMAT = "0.21.2"
"""The version of PEFT whose files these are."""
_MERGE_IT = ".\n  Next: `ligermodels convert BASE OUTPUT --adapter ADAPTER` merges it into the base."


def add_lora(
    model: Any,
    r: int = 16,
    alpha: float = 32,
    *,
    dropout: float = 0.0,
    targets: str | Sequence[str] = "all-linear",
    rslora: bool = False,
    dora: bool = False,
    modules_to_save: Sequence[str] = (),
    target_parameters: Sequence[str] = (),
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Any:
    """Freezes `model` and gives linear modules an adapter to train, in place; returns the model.

    r: the rank. alpha: adapters are scaled by alpha / r, with rslora by alpha / sqrt(r). dropout: of A's input, in
    training, one mask per module. dora: also trains the norms of the rows. Dropout and DoRA run module by module.
    targets: "all-linear", all linear modules of the text model, without the head; or names of modules, with any part
        of their path. A name without a dot stands for modules of the text model only; modules of a vision tower are
        named with a path, such as "visual.blocks.0.attn.qkv".
    modules_to_save: suffixes of the names of modules that are trained whole and saved with the adapter, such as
        "lm_head"; "norm" names all norms. If a tied head or its embedding is named, the head gets its own weight.
    target_parameters: the ends of the names of weights of experts, such as "experts.gate_up_proj", and of routers,
        "mlp.gate.weight", that also get an adapter, one for each expert, as in PEFT; `targets` may then be []. Gate and
        up share their A. Not with dropout or DoRA.
    dtype: of the adapters; they compute in the dtype of their input. seed: of A, which is uniform in +- 1 / sqrt(in) as
        in PEFT, from a generator of its own; B is zero.

    Call it before `parallelize`, which then shards base and adapters (not under tensor parallel).
    Raises InputError for values and names that do not fit, and for a model that is sharded, on the meta device, or has
    adapters already; nothing is changed then.
    """
    if not (type(r) is int and r >= 1 and alpha > 0 and 0 <= dropout < 1):
        raise InputError(
            f"add_lora: r={r!r}, alpha={alpha!r}, dropout={dropout!r}; expected r >= 1, alpha > 0 and 0 <= dropout < 1"
        )
    _check_free(model, "add_lora")
    stacked = weights_named(model, target_parameters, "add_lora")
    _check_loaded(stacked, "add_lora")
    if stacked and (dropout or dora):
        raise InputError("add_lora: adapters of target_parameters cannot have dropout or DoRA; leave these out")
    chosen = linears_named(model, targets) if targets or not stacked else {}
    saved = modules_named(model, modules_to_save, chosen, "add_lora")
    _rearranged(model, chosen, stacked, saved, "add_lora")
    for name, module in chosen.items():
        if (reason := why_not_fused(module, *_BASES)) is not None:
            raise InputError(f"add_lora: {name} cannot get an adapter, because of {reason}")
        if module.weight.is_meta:
            raise InputError(f"add_lora: {name} is on the meta device; load the model first")
        if dora and isinstance(module, QuantizedLinear | FP8Linear):
            bits = "4-bit" if module.fp8 is None and module.kind != "fp8" else "in FP8"
            raise InputError(
                f"add_lora: DoRA needs the norms of {name}, which is {bits}: load the base in bf16, or use LoRA"
            )
    _freeze(model, saved, modules_to_save)
    _multiply_in_fp8(model)
    generator = torch.Generator().manual_seed(seed)
    options: dict[str, Any] = dict(r=r, alpha=alpha, dropout=dropout, rslora=rslora, dora=dora, dtype=dtype)
    added: list[Any] = [Adapted.of(module, **options) for module in chosen.values()]
    for experts, name in stacked.values():
        added.append(experts.add_adapter(name, r=r, alpha=alpha, rslora=rslora, dtype=dtype))
    for adapted in added:
        a = torch.empty(adapted.lora_A.weight.shape)  # on the CPU, so that all devices draw alike
        bound = 1 / math.sqrt(a.shape[1])
        with torch.no_grad():
            adapted.lora_A.weight.copy_(a.uniform_(-bound, bound, generator=generator))
    return model


def merge_lora(model: Any) -> Any:
    """Adds the adapters to the weights, in place, and removes them; returns the model, which stays frozen.

    The sum is computed in fp32 and rounded once. Under FSDP2 every rank calls this; weights are gathered one by one.
    Raises InputError for a model without adapters.
    """
    linears = _adapted(model, "merge_lora")
    experts = _adapted_experts(model)
    bases = [*linears.values(), *(getattr(module, name) for module, name in experts.values())]
    if kinds := {base.kind for base in bases if isinstance(base, QuantizedLinear)}:
        is_fp8 = "fp8" in kinds
        raise InputError(
            f"merge_lora: the base is {'in FP8' if is_fp8 else '4-bit'}, and a merge would be rounded to "
            f"{'FP8' if is_fp8 else '4 bits'} again: save_adapter, load the base in bf16, load_adapter, and merge there"
        )
    files.reshard(model)
    for module in linears.values():
        a, b, m = module.lora_A.weight, module.lora_B.weight, module.lora_magnitude_vector
        with torch.no_grad():
            old, whole_b, whole_a = files.whole(module.weight), files.whole(b), files.whole(a)
            new = adapters.merged(
                old, whole_b, whole_a, module.lora_scale, None if m is None else files.whole(m.weight)
            )
            weights.fill(module.weight, lambda whole, new=new: whole.copy_(new))  # type: ignore[misc]
        module.plain()
    for stacked, name in experts.values():
        adapter = stacked.adapters[name]
        with torch.no_grad():
            factors = adapter.by_expert(files.whole(adapter.lora_A.weight), files.whole(adapter.lora_B.weight))
            old = files.whole(getattr(stacked, name))
            each = zip(old.view(adapter.num_experts, -1, old.shape[-1]), *factors, strict=True)
            new = torch.stack([adapters.merged(w, b, a, adapter.scale) for w, a, b in each]).view_as(old)
            weights.fill(getattr(stacked, name), lambda whole, new=new: whole.copy_(new))  # type: ignore[misc]
        delattr(stacked, f"{name}_adapter")
    if hasattr(model, _SAVED):
        delattr(model, _SAVED)
    return model


@contextlib.contextmanager
def adapters_off(model: Any) -> Iterator[Any]:
    """Within it the model runs without its adapters. Run the backward of its outputs inside the block as well.

    Raises InputError for a model without adapters, or with modules_to_save, whose old weights are gone.
    """
    modules: list[Any] = list(_adapted(model, "adapters_off").values())
    modules += [module.adapters[name] for module, name in _adapted_experts(model).values()]
    if names := getattr(model, _SAVED, ()):
        raise InputError(
            f"adapters_off: {', '.join(names)} (modules_to_save) were trained in place, so their old weights are gone. "
            "Load the base as a model of its own"
        )
    before = [module.adapter_on for module in modules]
    try:
        for module in modules:
            module.adapter_on = False
        yield model
    finally:
        for module, on in zip(modules, before, strict=True):
            module.adapter_on = on


def save_adapter(model: Any, folder: str | Path, *, per_expert: bool = False) -> Path:
    """Writes the adapters as PEFT does, adapter_config.json and adapter_model.safetensors; returns the folder.

    PEFT loads them on transformers' model, `load_adapter` on ours. The files are written beside `folder` and renamed
    when complete; other files in it stay. Every rank of a sharded model calls this, and one writes.
    per_expert: each expert has tensors of its own, by the names of the weights on disk; see checkpoint/adapters.py.
        Servers want that of families whose checkpoints are so, such as Mixtral and Qwen3-MoE. A of gate and up is then
        in the file twice.
    Raises InputError for a model without adapters, and with per_expert where the experts' adapters have several r or
    alpha, or the experts of the family are one tensor on disk; HubError where the folder cannot be written.
    """
    linears = _adapted(model, "save_adapter")
    files.reshard(model)
    saved = modules_named(model, getattr(model, _SAVED, ()), (), "save_adapter")
    experts = _adapted_experts(model)
    parameters = {
        weights.plain_name(name): parameter.detach()
        for name, parameter in model.named_parameters()
        if ".lora_" in name or any(name.startswith(f"{module}.") for module in saved)
    }
    for key, regions in _rearranged(model, linears, experts, saved, "save_adapter").items():
        prefix = f"{key}_adapter" if key in experts else key
        for name in (f"{prefix}.lora_B.weight", f"{prefix}.lora_magnitude_vector.weight"):
            if name in parameters:
                rows = files.whole(parameters[name])
                parameters[name] = torch.cat([region.to_disk(rows[region.index]) for region in regions])
    each = _all_per_expert(model, experts) if per_expert else {}
    for key, modules in each.items():
        owner, weight = experts[key]
        halves = (files.whole(parameters.pop(f"{key}_adapter.lora_{half}.weight")) for half in "AB")
        a, b = owner.adapters[weight].by_expert(*halves)
        for part, rows in zip(modules, b.chunk(len(modules), 1), strict=True):
            for e, expert in enumerate(part):
                parameters |= {f"{expert}.lora_A.weight": a[e], f"{expert}.lora_B.weight": rows[e]}
    parameters = {PREFIX + _file_name(name, experts): parameter for name, parameter in parameters.items()}
    return files.write(folder, parameters, WEIGHTS, {CONFIG: json_bytes(_config(model, linears, each))})


def load_adapter(
    model: Any, folder: str | Path, *, dtype: torch.dtype = torch.float32, allow_pickle: bool = False
) -> Any:
    """Freezes `model` and gives it the adapter in `folder`, ours or PEFT's, to use or to train on; returns the model.

    dtype: of the adapters in memory. allow_pickle: reads adapter_model.bin if there is nothing else.
    Raises CheckpointError for files that are damaged, of another model, or ask for what is not computed here, and
    InputError as `add_lora` does for the model; nothing is changed then.
    """
    folder = saving.absolute(folder)
    _check_free(model, "load_adapter")
    options = adapters.read_options(folder, computed=adapters.IN_MEMORY)
    if options.get("bias", "none") != "none":
        raise CheckpointError(
            f"{folder}: bias={options['bias']!r} trains biases of the base, which is not supported{_MERGE_IT}"
        )
    parts, others = _by_module(folder, adapters.read_tensors(folder, allow_pickle=allow_pickle))
    factors = _take_experts(folder, options, model, parts)
    modules, dora = dict(model.named_modules()), bool(options.get("use_dora"))
    sizes: dict[str, tuple[int, float]] = {}
    for name, part in parts.items():
        linear: Any = modules.get(name)
        if linear is None or why_not_fused(linear, *_BASES) is not None or linear.weight.is_meta:
            actual = "not there" if linear is None else f"a {type(linear).__name__}, or not plain"
            merge = _MERGE_IT if isinstance(linear, LMHead) else ""
            raise CheckpointError(
                f"{folder} has an adapter for {name}, which is {actual} in this {_kind(model)}{merge}"
            )
        if dora and isinstance(linear, QuantizedLinear | FP8Linear):
            raise CheckpointError(f"{folder} is a DoRA, which weights in 4 bits or FP8 cannot have: load it in bf16")
        r, alpha = sizes[name] = adapters.size_of(options, name)
        expected: dict[str, tuple[int, ...]] = {"A": (r, linear.in_features), "B": (linear.out_features, r)}
        expected |= {"magnitude": (linear.out_features,)} if dora else {}
        shapes = {key: tuple(tensor.shape) for key, tensor in part.items()}
        if shapes != expected:
            raise CheckpointError(
                f"{folder}: {name} has {shapes}, expected {expected} by {CONFIG} and this {_kind(model)}.\n"
                "  Likely: the adapter of another model, or a partial copy."
            )
    if not parts and not factors:
        raise CheckpointError(f"{folder} has no adapter: {WEIGHTS} has no lora_A and lora_B")
    names = options.get("modules_to_save") or ()
    saved = modules_named(model, names, parts, "load_adapter")
    places = {f"{name}.{key}": p for name, module in saved.items() for key, p in _own_parameters(module)}
    wanted = {name: tuple(parameter.shape) for name, parameter in places.items()}
    stored = {name: tuple(tensor.shape) for name, tensor in others.items()}
    if wanted != stored:
        differ = sorted(name for name in {*wanted, *stored} if wanted.get(name) != stored.get(name))
        likely = "another vocabulary (call resize_token_embeddings first), or another model"
        if options.get("ensure_weight_tying"):
            likely = "PEFT trained a tied head (ensure_weight_tying); `ligermodels convert` with --adapter merges it"
        raise CheckpointError(
            f"{folder}: of modules_to_save {list(names)}, {', '.join(differ[:3])} differ from this {_kind(model)} in "
            f"name or shape.\n  Likely: {likely}."
        )
    for name, regions in _rearranged(model, parts, factors, saved, "load_adapter").items():
        if name in factors:
            a, b, *size = factors[name]
            factors[name] = (a, regions[0].from_disk(b), *size)  # type: ignore[assignment]
            continue
        for key in parts[name].keys() - {"A"}:
            rows = parts[name][key]
            parts[name][key] = torch.cat([region.from_disk(rows[region.index]) for region in regions])
    _freeze(model, saved, names)
    _multiply_in_fp8(model)
    for name, part in parts.items():
        r, alpha = sizes[name]
        adapted = Adapted.of(
            modules[name],
            r=r,
            alpha=alpha,
            dropout=float(options.get("lora_dropout") or 0.0),
            rslora=bool(options.get("use_rslora")),
            dora=dora,
            dtype=dtype,
        )
        into: Any = {"A": adapted.lora_A, "B": adapted.lora_B, "magnitude": adapted.lora_magnitude_vector}
        with torch.no_grad():
            for key, tensor in part.items():
                into[key].weight.copy_(tensor)
    stacked = stacked_weights(model)
    for key, (a, b, r, alpha) in factors.items():
        module, name = stacked[key]
        adapter = module.add_adapter(name, r=r, alpha=alpha, rslora=bool(options.get("use_rslora")), dtype=dtype)
        with torch.no_grad():
            adapter.lora_A.weight.copy_(a)
            adapter.lora_B.weight.copy_(b)
    with torch.no_grad():
        for name, module in saved.items():
            for key, parameter in _own_parameters(module):
                parameter.copy_(others[f"{name}.{key}"])
    return model


def _by_module(folder: Path, tensors: Mapping[str, Tensor]) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """{module: {"A", "B", "magnitude": tensor}}, and the other tensors by the name of the parameter."""
    parts: dict[str, dict[str, Tensor]] = {}
    others: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        name = key.removeprefix(PREFIX)
        match, magnitude = adapters.FACTOR.fullmatch(name), adapters.MAGNITUDE.fullmatch(name)
        if match and not match["embedding"]:
            parts.setdefault(match["module"], {})[match["half"]] = tensor
        elif magnitude:
            parts.setdefault(magnitude["module"], {})["magnitude"] = tensor
        elif name.endswith(".base_layer.weight") or (match and match["embedding"]):  # PEFT saves both with their base
            module = match["module"] if match else name.removesuffix(".base_layer.weight")
            raise CheckpointError(f"{folder} has an adapter for {module}, a head or an embedding{_MERGE_IT}")
        elif "lora_" in name or "base_layer" in name or "token_adapter" in name or "trainable_tokens" in name:
            raise CheckpointError(f"{folder}: {key} belongs to a variant of LoRA that is not supported")
        else:
            others[name.replace(".modules_to_save.default.", ".").replace(".modules_to_save.", ".")] = tensor
    return parts, others


def _rearranged(
    model: Any, adapted: Container[str], experts: Container[str], saved: Iterable[str], where: str
) -> dict[str, list[weights.Region]]:
    """{name: regions of the rows of B} where these are in another order on disk, of the linear modules in `adapted` and
    of the weights in `experts`.

    That is the order of PEFT's files, so B and the magnitudes are rearranged as they are written and read. Whether the
    disk has [E, out, in] or [E, in, out] is the same to PEFT's A and B. saved: names of modules that are saved whole.
    Raises InputError for a weight that is rearranged on disk in a way that is not computed here for adapters.
    """
    table = getattr(model, "DISK_NAMES", {})
    if not any(isinstance(row, weights.Rearranged) for row in table.values()):
        return {}
    shapes = type(model)._on_meta(
        copy.copy(model.config), model.dtype, "none"
    )  # those here may be quantised or sharded
    orders: dict[str, list[weights.Region]] = {}
    for region in weights.regions(shapes, table):
        module, is_stacked = region.param.removesuffix(".weight"), region.param in experts
        is_saved = any(region.param.startswith(f"{name}.") for name in saved)
        if not region.is_rearranged or not (is_stacked or module in adapted or is_saved):
            continue
        # The rows of B [out, r] or [out, r E] are those of a weight [out, in] or [E, out, in].
        rows = dataclasses.replace(region, dim=region.dim - 1, transposed=False) if is_stacked else region
        if is_saved or rows.transposed or (rows.order is not None and rows.dim) or (is_stacked and rows.index):
            raise InputError(
                f"{where}: {region.param} has another layout on disk, {region.source}, which files of adapters cannot "
                "have: leave it out of targets, target_parameters and modules_to_save"
            )
        if rows.order is not None:
            orders.setdefault(region.param if is_stacked else module, []).append(rows)
    return orders


# ---- Which modules ----


def _kind(model: Any) -> str:
    return type(model).__name__


def _adapted(model: Any, where: str) -> dict[str, Adapted]:
    """{name: module} of all adapters."""
    modules = {weights.plain_name(name): m for name, m in model.named_modules() if isinstance(m, Adapted)}
    if not modules and not _adapted_experts(model):
        raise InputError(f"{where}: {_kind(model)} has no adapters; add_lora or load_adapter gives it some")
    return modules


def _check_free(model: Any, where: str) -> None:
    kinds = {module.kind for module in model.modules() if isinstance(module, QuantizedLinear)}
    if "fp8" in kinds:
        check_device(next(module for module in model.modules() if isinstance(module, QuantizedLinear)).weight.device)
    if kinds := kinds - {"nf4", "mxfp4", "fp8"}:
        raise InputError(
            f"{where}: the weights are {min(kinds)}, which is for inference: load the base in bf16, or with "
            'quantization_config="fp8" or "nf4", to train adapters over it'
        )
    if any(isinstance(module, Adapted) for module in model.modules()) or _adapted_experts(model):
        raise InputError(f"{where}: {_kind(model)} has adapters already; merge_lora or a new model comes first")
    if any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
        raise InputError(
            f"{where}: {_kind(model)} is sharded already. Call {where} before parallelize, on a mesh without tp: "
            "adapters are not supported under tensor parallel"
        )


def _multiply_in_fp8(model: Any) -> None:
    """Has a base in FP8 be multiplied in FP8, where it would be dequantised for each product.

    Modules outside of the blocks of the text, and what `Layer.keep_bf16` names, are dequantised as before.
    """
    blocks = model.decoder.layers if hasattr(model, "decoder") else model
    if any(isinstance(module, QuantizedLinear) and module.kind == "fp8" for module in blocks.modules()):
        use_fp8(blocks, RECIPES["rowwise"], frozen=True)


def _adapted_experts(model: Any) -> dict[str, tuple[Adaptable, str]]:
    """{name of a weight: (its module, its name there)} of all adapters of experts and routers."""
    experts = [(n, m) for n, m in model.named_modules() if isinstance(m, Adaptable)]
    return {f"{weights.plain_name(n)}.{name}": (m, name) for n, m in experts for name in m.adapters}


def stacked_weights(model: Any) -> dict[str, tuple[Adaptable, str]]:
    """{name of a weight of experts or of a router: (its module, its name there)}."""
    owners = {name: module for name, module in model.named_modules() if isinstance(module, Adaptable)}
    return {f"{n}.{name}": (m, name) for n, m in owners.items() for name in m.adaptable}


def weights_named(
    model: Any, ends: Sequence[str], where: str, error: type[Exception] = InputError
) -> dict[str, tuple[Adaptable, str]]:
    """Those of target_parameters, matched as PEFT does."""
    candidates = stacked_weights(model)
    if isinstance(ends, str) or (wrong := [end for end in ends if not ending(candidates, end)]):
        raise error(
            f"{where}: target_parameters={ends if isinstance(ends, str) else wrong}; expected a list of names of "
            f"weights of experts or routers, of which {_kind(model)} has {', '.join(list(candidates)[:3]) or 'none'}"
        )
    chosen = {name for end in ends for name in ending(candidates, end)}
    return {name: place for name, place in candidates.items() if name in chosen}


def _check_loaded(stacked: Mapping[str, tuple[Adaptable, str]], where: str) -> None:
    if any(parameter.is_meta for module, _ in stacked.values() for parameter in module.parameters()):
        raise InputError(f"{where}: the experts are on the meta device; load the model first")


def _file_name(name: str, experts: Iterable[str]) -> str:
    """The name in PEFT's files, without its prefix, of a parameter of an adapter."""
    weight, is_of_experts, rest = name.partition("_adapter.lora_")
    if is_of_experts:
        return f"{adapters.file_module(weight, experts)}.lora_{rest}"
    return name.replace("magnitude_vector.weight", "magnitude_vector")


def _modules_per_expert(model: Any, key: str, module: Adaptable, name: str) -> list[list[str]]:
    """The modules [part][expert] of an adapted weight in files that have an adapter for each expert; a router is one
    module. [] for experts that are one tensor on disk."""
    names = weights.names_on_disk(key, getattr(model, "DISK_NAMES", {}))
    experts = module.operand(name).weight.shape[0]
    if name in module.stacked and not all("{e}" in source for source in names):
        return []
    return [[source.format(e=e).removesuffix(".weight") for e in range(experts)] for source in names]


def _all_per_expert(model: Any, experts: Mapping[str, tuple[Adaptable, str]]) -> dict[str, list[list[str]]]:
    """{name of an adapted weight: `_modules_per_expert`}. Raises InputError where no tool reads such files."""
    each = {name: _modules_per_expert(model, name, *place) for name, place in stacked_weights(model).items()}
    whole = next((name for name, modules in each.items() if not modules), None)
    for name, (module, _) in experts.items():
        reason = None if whole is None else f"{whole} is one tensor on disk in this {_kind(model)}"
        if lacking := [weight for weight in module.stacked if weight not in module.adapters]:
            reason = f"{name} has an adapter and {lacking[0]} beside it has none, which PEFT and vLLM do not read so"
        if reason:
            raise InputError(f"save_adapter: per_expert=True, but {reason}: leave per_expert out")
    adapters_of = [module.adapters[weight] for module, weight in experts.values()]
    if len(sizes := {(adapter.r, adapter.alpha) for adapter in adapters_of}) > 1:
        raise InputError(
            "save_adapter: with per_expert=True the adapters of experts and routers need one r and one alpha, and have "
            f"{', '.join(f'r={r} and alpha={alpha:g}' for r, alpha in sorted(sizes))}: leave per_expert out"
        )
    return {name: each[name] for name in experts}


def _take_experts(
    folder: Path, options: Mapping[str, Any], model: Any, parts: dict[str, Any]
) -> dict[str, tuple[Tensor, Tensor, int, float]]:
    """{name of a weight of experts or routers: its A and B, stacked; r; alpha}, taken out of `parts` and checked.

    Those of target_parameters, and of experts that have tensors of their own.
    """
    everything, linears = stacked_weights(model), [f"{name}.weight" for name in _linears(model)]
    ends = options.get("target_parameters") or ()
    ends = [end for end in ends if ending(everything, end) or not ending(linears, end)]
    named = weights_named(model, ends, f"{folder}/{CONFIG}", CheckpointError)
    _check_loaded(everything, "load_adapter")
    factors = {}
    for key, (module, name) in everything.items():
        experts, rows, columns = module.operand(name).weight.shape
        modules = _modules_per_expert(model, key, module, name)
        if key in named:
            r, alpha = adapters.size_of(options, key)
            a, b = _pair(
                folder,
                key,
                parts.pop(adapters.file_module(key, named), {}),
                (r * experts, columns),
                (rows, r * experts),
            )
            factors[key] = a, b, r, alpha
        elif any(expert in parts for part in modules for expert in part):
            factors[key] = _join_experts(folder, options, modules, parts, (rows // len(modules), columns))
    return factors


def _join_experts(
    folder: Path, options: Mapping[str, Any], modules: list[list[str]], parts: dict[str, Any], shape: tuple[int, int]
) -> tuple[Tensor, Tensor, int, float]:
    """A and B, stacked, r and alpha of the adapters of `modules` [part][expert], whose weights have `shape`."""
    rows, columns = shape
    pairs: list[tuple[Tensor, Tensor]] = []
    scales: dict[float, tuple[int, float]] = {}
    for part in modules:
        if not any(expert in parts for expert in part):  # gate without up, or the other way round
            pairs.append((torch.empty(len(part), 0, columns), torch.empty(len(part), rows, 0)))
            continue
        sizes = {adapters.size_of(options, expert) for expert in part}
        r, alpha = min(sizes)
        each = [_pair(folder, expert, parts.pop(expert, {}), (r, columns), (rows, r)) for expert in part]
        pairs.append((torch.stack([a for a, _ in each]), torch.stack([b for _, b in each])))
        scales |= {adapters.scale_of(options, expert): (r, alpha) for expert in part}
        if len(sizes) > 1 or len(scales) > 1:
            raise CheckpointError(
                f"{folder}: {part[0]} and the experts beside it have several r or scales in {CONFIG}, and they are "
                f"computed as one{_MERGE_IT}"
            )
    a, b = adapters.stack(pairs)
    ((r, alpha),) = scales.values()
    total = a.shape[0] // len(modules[0])
    return a, b, total, alpha * (math.sqrt(total / r) if options.get("use_rslora") else total / r)


def _pair(
    folder: Path, key: str, part: Mapping[str, Tensor], a: tuple[int, int], b: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """A and B of an adapter of experts, which must have these shapes."""
    if (shapes := {half: tuple(tensor.shape) for half, tensor in part.items()}) != {"A": a, "B": b}:
        raise CheckpointError(
            f"{folder}: the adapter of {key} has {shapes}, expected {dict(A=a, B=b)} by {CONFIG} and this model.\n"
            "  Likely: the adapter of a model with other experts, or a partial copy."
        )
    return part["A"], part["B"]


def _text_prefix(model: Any) -> str:
    """The prefix of the names of the text model's modules."""
    decoder = getattr(model, "decoder", model)
    return next((f"{name}." for name, module in model.named_modules() if module is decoder and name), "")


def linears_named(model: Any, targets: str | Sequence[str]) -> dict[str, Any]:
    """{name: linear module} of `targets`, in the model's order."""
    prefix = _text_prefix(model)
    linears = _linears(model)
    text = [name for name in linears if name.startswith(prefix)]
    if targets == "all-linear":
        return {name: linears[name] for name in text}
    if isinstance(targets, str) or not targets:
        raise InputError(f"add_lora: targets={targets!r}; expected 'all-linear' or a list of names of modules")
    chosen: set[str] = set()
    for target in targets:
        hits = set(ending(linears if "." in target else text, target))
        if not hits:
            others = ending(dict(model.named_modules()), target)
            is_other = f" is a {type(model.get_submodule(others[0])).__name__}" if others else " is not there"
            if set(others) & linears.keys():
                is_other = f" is not in the text model; name it with its path, such as {others[0]}"
            names = sorted({name.rpartition(".")[2] for name in text})
            raise InputError(f"add_lora: {target!r}{is_other}; targets are linear modules: {', '.join(names)}")
        chosen |= hits
    return {name: module for name, module in linears.items() if name in chosen}


def _linears(model: Any) -> dict[str, Any]:
    """{name: linear module}; quantised weights of experts, which `target_parameters` names, are none."""
    modules = dict(model.named_modules())
    of_experts = {id(m) for owner in modules.values() if isinstance(owner, Adaptable) for m in owner.modules()}
    return {n: m for n, m in modules.items() if isinstance(m, nn.Linear | QuantizedLinear) and id(m) not in of_experts}


def ending(names: Iterable[str], end: str) -> list[str]:
    """The names that are `end` or end with a dot and it, as PEFT matches."""
    return [name for name in names if name == end or name.endswith(f".{end}")]


def modules_named(model: Any, names: Sequence[str], chosen: Iterable[str], where: str) -> dict[str, Any]:
    """{name: module} of modules_to_save; chosen: what gets an adapter. Raises InputError."""
    if isinstance(names, str):
        raise InputError(f"{where}: modules_to_save={names!r}; expected a list of names of modules")
    modules, saved = dict(model.named_modules()), {}
    for end in names:
        hits = [name for name in modules if name.endswith(end)]  # as PEFT matches here
        if not hits:
            raise InputError(f"{where}: modules_to_save names {end!r}, which {_kind(model)} does not have")
        for hit in hits:
            if any(name == hit or name.startswith(f"{hit}.") for name in chosen):
                raise InputError(f"{where}: {hit} is in modules_to_save, and gets an adapter, or parts of it do")
            saved[hit] = modules[hit]
    return saved


def _own_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """A module's parameters; for a tied head also the weight that it is about to get."""
    if isinstance(module, LMHead) and module.is_tied:
        yield "weight", module.weight  # type: ignore[misc]
    yield from module.named_parameters()


def _freeze(model: Any, saved: Mapping[str, Any], names: Sequence[str]) -> None:
    """Freezes all but the modules in `saved`; unties a head whose weight or embedding is among them."""
    model.requires_grad_(False)
    head = getattr(model, "lm_head", None)
    if isinstance(head, LMHead) and head.is_tied and {head, model.decoder.embed_tokens} & set(saved.values()):
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)  # type: ignore[misc]
        model.config.tie_word_embeddings = False
    for module in saved.values():
        module.requires_grad_(True)
    setattr(model, _SAVED, tuple(names))


# ---- Files ----


def _config(model: Any, linears: Mapping[str, Adapted], per_expert: Mapping[str, list[list[str]]]) -> dict[str, Any]:
    """adapter_config.json. r and lora_alpha are those of most modules; the patterns name the others. Fields that have
    PEFT's defaults are left out.

    per_expert: {name of an adapted weight: `_modules_per_expert`} where these have tensors of their own; then r and
    lora_alpha are theirs, which PEFT reads there alone, and lora_alpha holds the scale of rslora, which it does not.
    """
    experts = _adapted_experts(model)
    every: dict[str, Any] = {**linears, **{key: module.adapters[name] for key, (module, name) in experts.items()}}
    some, names_experts = next(iter(every.values())), _names_of_experts(model)
    rslora = some.rslora and not per_expert
    sizes = {name: (m.r, m.alpha * math.sqrt(m.r) if m.rslora and per_expert else m.alpha) for name, m in every.items()}
    counts = collections.Counter(sizes[name] for name in per_expert or sizes)
    (r, alpha), _ = counts.most_common(1)[0]
    as_parameters = [name for name in linears if name.rpartition(".")[2] in names_experts]
    patterns = {f"{name}.weight" if name in as_parameters else name: size for name, size in sizes.items()}
    ends = {part[0].rpartition(".")[2] for parts in per_expert.values() for part in parts}
    modules = _shortest(model, [name for name in linears if name not in as_parameters])
    parameters = [*(() if per_expert else experts), *(f"{name}.weight" for name in as_parameters)]
    return {
        "alpha_pattern": {name: size[1] for name, size in patterns.items() if size[1] != alpha},
        "base_model_name_or_path": getattr(model, "name_or_path", None) or None,
        "bias": "none",
        "inference_mode": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.0 if (dropout := getattr(some, "lora_dropout", None)) is None else dropout.p,
        "modules_to_save": list(getattr(model, _SAVED, ())) or None,
        "peft_type": "LORA",
        "peft_version": _FORMAT,
        "r": r,
        "rank_pattern": {name: size[0] for name, size in patterns.items() if size[0] != r},
        "target_modules": sorted({*modules, *ends}),
        "target_parameters": parameters or None,
        "task_type": "CAUSAL_LM",
        "use_dora": getattr(some, "lora_magnitude_vector", None) is not None,
        "use_rslora": rslora,
    }


def _names_of_experts(model: Any) -> set[str]:
    """The last parts of the names of an expert's matrices on disk, such as gate_proj; none where experts are stacked.

    PEFT 0.21 takes these names in target_modules for the experts' also where they, or a whole path, name a linear
    module of a dense block or a shared expert. In target_parameters it does not.
    """
    modules = [
        _modules_per_expert(model, key, m, name) for key, (m, name) in stacked_weights(model).items() if m.stacked
    ]
    return {part[0].rpartition(".")[2] for parts in modules for part in parts}


def _shortest(model: Any, names: Iterable[str]) -> list[str]:
    """The last parts of the names, if PEFT finds exactly these modules by them; else the names."""
    short = sorted({name.rpartition(".")[2] for name in names})
    linears = [weights.plain_name(name) for name in _linears(model)]
    hits = {name for end in short for name in ending(linears, end)}
    return short if hits == set(names) else sorted(names)
