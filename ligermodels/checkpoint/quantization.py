"""Loads models with quantised linear modules and experts, and saves those whose method has a format on disk.

Modules are quantised one by one, as a checkpoint is read. The head, which is not an `nn.Linear` here, is not quantised.
quantizers.py converts a module.
"""

import dataclasses
import json
import re
import warnings
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ligermodels.checkpoint import mxfp4, weights
from ligermodels.checkpoint.quantizers import (
    MXFP4,
    NF4,
    BitsAndBytes,
    Parts,
    Quantizer,
    TorchAO,
    WeightOnly,
    is_of_torchao,
)
from ligermodels.errors import CheckpointError, ConfigError, InputError
from ligermodels.layers.base import Layer
from ligermodels.layers.quantized import QuantizedLinear

OURS = ("nf4", "mxfp4", "int8", "fp8", "int4")
METHODS: dict[str, Any] = {"bitsandbytes": BitsAndBytes, "torchao": TorchAO, "mxfp4": MXFP4}
"""{quant_method of config.json: its quantiser}."""


def quantizer_of(config: Any) -> Quantizer:
    """The quantiser for a `quantization_config`.

    config: a name of OURS (`NF4`, `MXFP4` or `WeightOnly` with their defaults); a BitsAndBytesConfig, TorchAoConfig or
        Mxfp4Config of transformers; a config of torchao; or a dict: {"quant_method": ..., fields}, as in config.json,
        where fields of BitsAndBytesConfig need no quant_method.
    Raises InputError for other methods, unknown fields, settings that are not supported, and a missing library.
    """
    config = getattr(config, "quantization_config", config)  # of an hf_quantizer of transformers
    if isinstance(config, Quantizer):
        return config
    if is_of_torchao(config):
        return TorchAO(quant_type=config)
    read = {"quant_method": config} if isinstance(config, str) and config in OURS else config
    read = read.to_dict() if hasattr(read, "to_dict") else read if isinstance(read, Mapping) else {}
    values = {key: value for key, value in read.items() if not key.startswith("_")}
    method = values.pop("quant_method", "bitsandbytes" if {"load_in_4bit", "load_in_8bit"} & values.keys() else None)
    method = getattr(method, "value", method)  # an enum in transformers
    if getattr(config, "dequantize", False):  # to_dict of Mxfp4Config leaves it out
        values["dequantize"] = True
    methods = dict.fromkeys(OURS, WeightOnly) | METHODS | {"nf4": NF4}
    if method not in methods:
        described = (
            repr(config) if isinstance(config, str) else f"a {type(config).__name__} with quant_method {method!r}"
        )
        raise InputError(
            f"quantization_config is {described}; supported: {', '.join(map(repr, OURS))}, BitsAndBytesConfig, "
            "TorchAoConfig, Mxfp4Config, a dict of their fields, or a config object of torchao"
        )
    known = [field.name for field in dataclasses.fields(methods[method])]
    if unknown := values.keys() - set(known):
        raise InputError(f"quantization_config of {method} has no {min(unknown)!r}; it has {', '.join(known)}")
    return methods[method](**values, **({"quant_method": method} if "quant_method" in known else {}))


def split(values: Any, asked: Any = None) -> tuple[Any, Quantizer | None]:
    """(a config without its quantization_config, the quantiser that it names or None), for the methods of METHODS.

    asked: quantization_config of the call; with "nf4", our modules read the weights of bitsandbytes.
    Raises ConfigError if the settings are not supported or the library is missing.
    """
    saved = values.get("quantization_config") if isinstance(values, Mapping) else None
    method = saved.get("quant_method") if isinstance(saved, Mapping) else None
    if not isinstance(saved, Mapping) or not isinstance(method, str) or method not in METHODS:
        return values, None
    asks = asked.get("quant_method") if isinstance(asked, Mapping) else getattr(asked, "quant_method", asked)
    try:
        is_ours = asks == "nf4" and method == "bitsandbytes"
        quantizer = NF4.of_saved(saved) if is_ours else quantizer_of(saved)
    except (InputError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{values.get('model_type')}: the checkpoint is quantised by {method}: {error}") from error
    return {key: value for key, value in values.items() if key != "quantization_config"}, quantizer


def choose(asked: Any, saved: Quantizer | None) -> Quantizer | None:
    """The quantiser of a load: the checkpoint's own if it is quantised, else the one that the call asks for.

    None: nothing is quantised, also where the call asks for a checkpoint in MXFP4 to be dequantised.
    """
    if asked is None:
        return saved
    if saved is not None and asked == saved.quant_method and asked in OURS:  # there are no settings that could differ
        return saved
    wanted = quantizer_of(asked)
    if saved is not None and type(wanted) is not type(saved):
        raise InputError(f"the checkpoint is quantised by {saved.quant_method} already; leave quantization_config out")
    if saved is None or getattr(wanted, "dequantize", False):
        return None if getattr(wanted, "dequantize", False) else wanted
    warnings.warn("the checkpoint is quantised: its own settings are used, not quantization_config", stacklevel=3)
    return saved


def reader_of(saved: Quantizer | None, reader: Any, device: torch.device | None) -> Any:
    """The reader of a checkpoint that is quantised with `saved`; one in MXFP4 also reads it dequantised, on `device`.

    Raises CheckpointError for a file whose weights in MXFP4 do not fit.
    """
    return mxfp4.MXFP4Reader(reader, device) if isinstance(saved, MXFP4) else reader


def sizes(model: nn.Module, quantizer: Quantizer | None) -> dict[str, Any]:
    """accelerate's arguments for the memory of the weights of `model`; empty if none is quantised."""
    if quantizer is None:
        return {}
    chosen = quantised_names(model, quantizer)
    plain = {name: p.dtype for name, p in weights.named_weights(model) if not chosen & {name, name.rpartition(".")[0]}}
    return {"dtype": quantizer.element, "special_dtypes": plain}


def linears(model: nn.Module, quantizer: Quantizer) -> dict[str, nn.Linear]:
    """{name: module} of the linear modules to quantise."""
    if not quantizer.quantizes_linears:
        return {}
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and not _is_skipped(name, quantizer)
    }


@dataclass
class Stacked:
    """A stacked weight of experts to quantise: as matrices, one after the other."""

    experts: Any
    weight: str

    def __post_init__(self) -> None:
        parameter = getattr(self.experts, self.weight)
        self.parts, self.dtype = self.experts.parts(self.weight), parameter.dtype
        rows, columns = parameter.numel() // parameter.shape[-1] // self.parts, parameter.shape[-1]
        self.matrix = nn.Linear(columns, rows, bias=False, device="meta", dtype=parameter.dtype)


def experts(model: nn.Module, quantizer: Quantizer) -> dict[str, Stacked]:
    """{name: stacked weight of experts to quantise}, of a model that is not quantised."""
    return _not_skipped(model, quantizer) if quantizer.quantizes_experts else {}


def _not_skipped(model: nn.Module, quantizer: Quantizer) -> dict[str, Stacked]:
    """{name: stacked weight of experts} of those that no name in the settings leaves as they are."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Layer)}
    return {
        f"{name}.{weight}": Stacked(module, weight)
        for name, module in layers.items()
        for weight in module.stacked
        if not (_is_skipped(name, quantizer) or _is_skipped(f"{name}.{weight}", quantizer))
    }


def _check_experts(model: nn.Module, quantizer: Quantizer, chosen: Container[str], source: str | None) -> None:
    """Raises InputError if experts would stay as they are and no name in the settings says so; warns if they are so on
    disk, in the quantised checkpoint `source`."""
    plain = {name: target for name, target in _not_skipped(model, quantizer).items() if name not in chosen}
    if not plain:
        return
    name, target = next(iter(plain.items()))
    size = sum(getattr(x.experts, x.weight).nbytes for x in plain.values()) / 1e9
    if source is not None:
        warnings.warn(
            f"{source}: the experts, such as {name}, are not quantised in this checkpoint, and take {size:.2f} GB in "
            f"{target.dtype}; what it was made from, with quantization_config='nf4', has them in 4 bits",
            stacklevel=5,
        )
        return
    raise InputError(
        f"quantization_config of {quantizer.quant_method} quantises linear modules alone: the experts, such as {name}, "
        f"would take {size:.2f} GB in {target.dtype}.\n  Next: quantization_config='nf4' quantises experts too; or "
        f"name them, to leave them so: {quantizer.skip_field}=['experts']"
    )


def quantised_names(model: nn.Module, quantizer: Quantizer) -> set[str]:
    """The names of all that is quantised: linear modules, and stacked weights of experts."""
    return {*linears(model, quantizer), *experts(model, quantizer)}


def _is_skipped(name: str, quantizer: Quantizer) -> bool:
    """As in transformers, an entry of `skipped` is a pattern of the beginning of a module's name, or the end of one."""
    boundary = r"(?:(?<=\.)|(?=\.|$))"
    return any(re.match(f"(?:{key}){boundary}", name) or name.endswith(key) for key in quantizer.skipped)


def load(
    model: nn.Module,
    names: weights.Names,
    reader: Any,
    quantizer: Quantizer,
    *,
    device: torch.device,
    devices: Mapping[str, torch.device] | None = None,
    from_quantized: bool = False,
    progress: bool = True,
) -> None:
    """Does `weights.load`, and quantises linear modules and experts one by one as their weights are read.

    devices: {one of `quantised_names`: its device}, `device` for the rest. Beyond the quantised weights, a device needs
    memory for one weight, and for the quantised experts of one layer. from_quantized: the checkpoint has quantised
    modules; those that are not quantised there stay so.
    Raises CheckpointError, also for a weight with NaN or infinity, and InputError for a device on which the modules
    cannot compute, and for experts that the quantiser would leave as they are, unless its settings name them.
    """
    for place in {device, *(devices or {}).values()}:
        quantizer.check_device(place)
    names = names.found(model, reader.headers)
    chosen: dict[str, nn.Linear | Stacked] = {**linears(model, quantizer), **experts(model, quantizer)}
    boxes = weights.regions(model, names.table)
    stacks: dict[str, weights.Region] = {}
    if isinstance(reader, mxfp4.MXFP4Reader):
        if not reader.packed:
            raise CheckpointError(
                f"{reader.source}: its config.json says that it is in MXFP4, and no tensor is: remove "
                "quantization_config there"
            )
        weights.check(model, names, reader.headers, reader.source)
        stacks = mxfp4.stacks(boxes, reader.packed, reader.source)
        if plain := stacks.keys() - chosen.keys():
            raise CheckpointError(
                f"{reader.source}: {min(plain)} is quantised, and this quantisation leaves it as it is"
            )
        chosen = {name: chosen[name] for name in stacks}
        taken = {box.source for box in stacks.values()}
        _check_experts(model, quantizer, chosen, reader.source)
    elif from_quantized:
        saved = _saved_parts(boxes, chosen, reader)
        chosen = {name: chosen[name] for name in saved}
        taken = {source for modules in saved.values() for parts in modules for source in parts.values()}
        _check_experts(model, quantizer, chosen, reader.source)
    else:
        _check_experts(model, quantizer, chosen, None)
        if not chosen and not quantizer.quantizes_linears:
            raise InputError(
                f"quantization_config of {quantizer.quant_method} quantises experts alone, and {type(model).__name__} "
                "has none to quantise. Next: quantization_config='nf4' quantises linear modules"
            )
        weights.check(model, names, reader.headers, reader.source)
        taken = {box.source for box in boxes if chosen.keys() & {box.param, box.param.rpartition(".")[0]}}
        ours = weights.Renamed(model, reader, names.table, {})
    for name, target in chosen.items():  # until the others are loaded
        if isinstance(target, Stacked):
            delattr(target.experts, target.weight)
        else:
            model.set_submodule(name, nn.Module())
    quantized = f"^({'|'.join(map(re.escape, taken))})$"
    others = dataclasses.replace(names, ignore=(*names.ignore, quantized))
    weights.load(model, others, reader, device=device, progress=progress)
    for name, target in tqdm(chosen.items(), "Quantised weights", disable=None if progress else True):
        place = device if devices is None else devices[name]
        linear = target.matrix if isinstance(target, Stacked) else target
        if stacks and isinstance(target, Stacked):
            replacements: list[Any] = [mxfp4.restored(reader, stacks[name], place, target.dtype)]
        elif from_quantized:
            read = ({part: reader.read(source).to(place, copy=True) for part, source in m.items()} for m in saved[name])
            replacements = [_restored(quantizer, linear, parts, name, reader) for parts in read]
        else:
            matrices = _matrices(ours, name, target)
            replacements = [_converted(quantizer, linear, values, place, name, reader) for values in matrices]
        if isinstance(target, Stacked):
            try:
                target.experts.set_quantized(target.weight, replacements)
            except InputError as error:
                raise InputError(f'{name}: {error}; or leave it as it is: skip_modules=["experts"]') from error
        else:
            model.set_submodule(name, replacements[0])
    quantizer.finish(model)
    mark(model, quantizer)


def _matrices(ours: weights.Renamed, name: str, target: nn.Linear | Stacked) -> Iterator[list[Tensor]]:
    """[weight], or [weight, bias], of each matrix of a target, read under our names."""
    if not isinstance(target, Stacked):
        yield [ours.read(f"{name}.{key}").to(target.weight.dtype) for key, _ in weights.named_weights(target)]
        return
    for whole in ours.read_boxes(name):
        for matrix in whole.flatten(0, -2).split(target.matrix.out_features):
            yield [matrix.to(target.dtype)]


def _converted(
    quantizer: Quantizer, linear: nn.Linear, values: list[Tensor], place: torch.device, name: str, reader: Any
) -> nn.Module:
    if not all(torch.stack(value.aminmax()).isfinite().all() for value in values):
        raise CheckpointError(f"{reader.source}: {name} holds NaN or infinity and cannot be quantised")
    return quantizer.convert(linear, values[0], values[1] if len(values) > 1 else None, place)


def mark(model: Any, quantizer: Quantizer) -> None:
    """Sets the attributes by which trainers and adapters know that a model is quantised."""
    model.is_quantized = True
    model.quantization_method = quantizer.quant_method
    model.hf_quantizer = model.config.quantization_config = quantizer
    for name, value in quantizer.flags.items():
        setattr(model, name, value)


def export(
    model: nn.Module, shapes: nn.Module, names: weights.Names, quantizer: Quantizer
) -> tuple[weights.Exported, dict[str, str]]:
    """(the tensors under their names on disk, the metadata of the files). Raises the errors of `weights.export`.

    shapes: the same model before it was quantised, on meta; its quantised modules are removed.
    """
    targets: dict[str, nn.Linear | Stacked] = {**linears(shapes, quantizer), **experts(shapes, quantizer)}
    chosen = {name: module for name in targets if quantizer.is_quantized(module := _at(model, name))}
    places: dict[str, list[str]] = {}
    boxes = weights.regions(shapes, names.table)
    stacks: dict[str, weights.Region] = {}
    if isinstance(quantizer, MXFP4):
        stacks = mxfp4.stacks(boxes, [box.source for box in boxes if box.param in chosen], "the model")
    for box in boxes:
        if chosen.keys() & {box.param, box.param.rpartition(".")[0]} and box.param not in stacks:
            _check_order(box, "the model")
        places.setdefault(box.param.removesuffix(".weight"), []).append(box.source)
    state = {name: tensor for name, tensor in weights.named_weights(model) if name.rpartition(".")[0] not in chosen}
    metadata = {"format": "pt"}
    quantized: dict[str, Any] = {}
    rearranged: dict[str, weights.Region] = {}
    for name, module in chosen.items():
        target = targets[name]
        if isinstance(target, Stacked):
            _check_whole(name, module)
        if isinstance(target, Stacked) and name in stacks:
            experts_of = len(getattr(target.experts, target.weight))
            delattr(target.experts, target.weight)
            tensors_of, regions_of = mxfp4.exported(module, experts_of, stacks[name])
            quantized, rearranged = quantized | tensors_of, rearranged | regions_of
            continue
        if isinstance(target, Stacked):
            modules = _split(name, module, target, places[name])
            delattr(target.experts, target.weight)
        else:
            modules = [module]
            shapes.set_submodule(name, nn.Module())
        for source, part in zip(places[name], modules, strict=True):
            parts, described = quantizer.parts(part, name)
            quantized |= {f"{source.removesuffix('.weight')}.{key}": (tensor, ()) for key, tensor in parts.items()}
            metadata |= described
    if len(metadata) > 1:  # torchao's, which names the plain tensors too
        metadata |= {name: json.dumps({"_type": "Tensor"}) for name in state}
        metadata["tensor_names"] = json.dumps([name for name in metadata if name != "format"])
    tensors = weights.export(shapes, names, state)
    tensors.add(quantized, rearranged)
    return tensors, metadata


def _at(model: nn.Module, name: str) -> Any:
    """The module or parameter of this name."""
    owner, _, last = name.rpartition(".")
    return getattr(model.get_submodule(owner), last)


def _split(name: str, module: Any, target: Stacked, sources: Sequence[str]) -> list[nn.Module]:
    """The quantised matrices of a stacked weight as modules. Raises CheckpointError."""
    if len(sources) != target.parts or not all(source.endswith(".weight") for source in sources):
        raise CheckpointError(
            f"{name} is one tensor on disk, {sources[0]}, for which there is no quantised format: load the model with "
            'skip_modules=["experts"]'
        )
    return [QuantizedLinear(operand) for operand in module.operand.split(target.parts)]


def _check_whole(name: str, module: Any) -> None:
    """Raises CheckpointError for a quantised stacked weight that is sharded."""
    if any(hasattr(tensor, "full_tensor") for tensor in module.parameters()):
        raise CheckpointError(f"{name} is quantised and sharded: save the adapters, or the model before parallelize")


def _check_order(box: weights.Region, where: str) -> None:
    """Raises CheckpointError for what is quantised and in another order on disk: quantised rows cannot be moved."""
    if box.is_rearranged:
        raise CheckpointError(
            f"{where}: {box.param} is quantised, and {box.source} has another order on disk, for which there is no "
            "quantised format: leave it plain, by its name in skip_modules"
        )


def _saved_parts(
    boxes: Sequence[weights.Region], chosen: Mapping[str, nn.Linear | Stacked], reader: Any
) -> dict[str, list[dict[str, str]]]:
    """{what is quantised on disk: [{part: name on disk}] of each of its matrices}. Raises CheckpointError."""
    sources: dict[str, list[str]] = {}
    for box in boxes:
        sources.setdefault(box.param.removesuffix(".weight"), []).append(box.source.removesuffix(".weight"))
    modules = {source for group in sources.values() for source in group}
    parts: dict[str, dict[str, str]] = {}
    for name in reader.headers:
        stored = name.partition(".weight.")[0] if ".weight." in name else name.rpartition(".")[0]
        if stored in modules:
            parts.setdefault(stored, {})[name.removeprefix(f"{stored}.")] = name
    parts = {stored: names for stored, names in parts.items() if names.keys() - {"weight", "bias"}}
    saved: dict[str, list[dict[str, str]]] = {}
    for name, names in sources.items():
        matrices = [parts[source] for source in names if source in parts]
        if not matrices or name.endswith(".bias"):
            continue
        target = chosen.get(name)
        wanted = target.parts if isinstance(target, Stacked) else 1
        if target is None or len(matrices) != wanted:
            raise CheckpointError(
                f"{reader.source}: {len(matrices)} of the {len(names)} matrices of {name} are quantised, "
                + ("which is not supported: all or none" if target else "and this quantisation leaves it as it is")
                + ('; pass quantization_config="nf4"' if "bitsandbytes__nf4" in " ".join(matrices[0]) else "")
            )
        saved[name] = matrices
    for box in boxes:
        if saved.keys() & {box.param, box.param.rpartition(".")[0]}:
            _check_order(box, reader.source)
    return saved


def _restored(quantizer: Quantizer, linear: nn.Linear, parts: Parts, name: str, reader: Any) -> nn.Module:
    if (linear.bias is None) != ("bias" not in parts):
        raise CheckpointError(f"{reader.source}: {name} has a bias on disk or in the model, and not in both")
    try:
        return quantizer.restore(linear, parts, name, reader.metadata)
    except (ValueError, KeyError, TypeError, AssertionError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"{reader.source}: {name} was not quantised by {quantizer.quant_method} with these settings: "
            f"{error}.\n  Likely: quantization_config in config.json is another checkpoint's, or a newer version's."
        ) from error
