"""How tensor parallel splits what `Layer.shards` names over the ranks, which sizes fit, and what is refused."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.layers.base import Layer, Shard
from ligermodels.layers.parallel import MeshGroup, ShardedLinear, to_dtensor

_SIZES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 24, 32, 64)


def check_tensor(model: Any, size: int) -> None:
    """Raises InputError where the layers cannot be split over `size` ranks, saying what does not fit, and what does."""
    if problems := sorted(set(_problems(model, size))):
        fits = [str(other) for other in _SIZES if not any(_problems(model, other))]
        advice = f"tp may be {', '.join(fits)}" if fits else "use dp_shard and cp instead of tp"
        raise InputError(f"{type(model).__name__} cannot be split over tp={size}: {'; '.join(problems)}. {advice}")


def check_context(model: Any, size: int, tp: int) -> None:
    """Raises InputError where the heads cannot be split over `size` ranks of context parallel, saying which sizes fit.

    tp: the number of ranks over which tensor parallel splits the heads.
    """
    heads = list(dict.fromkeys(layer.heads for layer in _layers(model.decoder.modules()) if layer.heads is not None))

    def fits(size: int, heads: Iterable[tuple[int, int]] = heads) -> bool:
        return all(_splits(queries // tp, keys // tp or 1, size) for queries, keys in heads)

    if not fits(size):
        sizes = ", ".join(str(other) for other in _SIZES if fits(other))
        queries, keys = next(pair for pair in heads if not fits(size, [pair]))
        raise InputError(
            f"cp={size} does not fit {queries} heads and {keys} key heads"
            + (f" over tp={tp}" if tp > 1 else "")
            + (f"; cp may be {sizes}" if sizes else "; use dp_shard or tp instead of cp")
        )


def _splits(heads: int, kv_heads: int, size: int) -> bool:
    """Whether each of `size` ranks can have as many heads, and whole key heads or one that it shares."""
    return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)


def _modules(model: Any) -> Iterator[nn.Module]:
    """All modules of the text model, of the head and of `mtp`, from outside to inside: what tensor parallel splits."""
    for part in (model.decoder, model.lm_head, model.mtp):
        if part is not None:
            yield from part.modules()


def _layers(modules: Iterable[nn.Module]) -> list[Layer]:
    return [module for module in modules if isinstance(module, Layer)]


def _find(layer: Layer, name: str) -> tuple[nn.Module, str, nn.Module | Tensor | None]:
    """What `Layer.shards` names: (the module that holds it, its name there, the module or parameter, or None)."""
    path, _, last = name.rpartition(".")
    holder = layer.get_submodule(path)
    module = holder._modules.get(last)
    return holder, last, holder._parameters.get(last) if module is None else module


def _problems(model: Any, size: int) -> Iterator[str]:
    """What does not fit `size` ranks, what stands in place of a linear module, and what no layer says how to split."""
    named: set[int] = set()
    modules = list(_modules(model))
    for layer in _layers(modules):
        for name, shard in layer.shards().items():
            if not shard.fits(size):
                yield shard.what.format(size=size)
            holder, _, target = _find(layer, name)
            if isinstance(target, nn.Module):
                named |= {id(parameter) for parameter in target.parameters()}
                if type(target) is not nn.Linear:
                    yield f"a {_class(target)} in place of a projection"
            elif target is not None:
                named.add(id(target))
            elif shard.split != "refused":
                yield f"{_class(layer)}.shards() names {name}, but a {_class(holder)} has no such parameter"
    for module in modules:
        parameters = _parameters_of(module)
        if missing := [name for name, parameter in parameters.items() if id(parameter) not in named]:
            if isinstance(module, Layer):
                yield f"{_class(module)}.shards() does not name {', '.join(missing)}"
            else:
                yield f"a {_class(module)} has parameters, but no method shards()"
        named |= {id(parameter) for parameter in parameters.values()}


def _parameters_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """{name: parameter} of a module alone; for a layer also those of its linear modules, which it speaks for."""
    parameters = dict(module.named_parameters(recurse=False))
    if isinstance(module, Layer):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                parameters |= child.named_parameters(name, recurse=False)
    return parameters


def _class(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def shard_tensors(model: Any, tp: MeshGroup) -> None:
    """Replaces the parameters of the text model and the head by DTensors over the ranks."""
    for layer in _layers(list(_modules(model))):
        for name, shard in layer.shards().items():
            holder, last, target = _find(layer, name)
            if isinstance(target, nn.Linear):
                holder._modules[last] = _sharded_linear(target, shard, tp)
            else:
                holder._parameters[last] = _sharded(target, shard, tp)
                if shard.dim is None and shard.parts is not None:
                    holder.row_parts = shard.parts  # type: ignore[assignment]
        layer.set_tp(tp)


def _sharded_linear(linear: nn.Linear, shard: Shard, tp: MeshGroup) -> ShardedLinear:
    split = shard.split
    if split == "replicated":  # one head, of all outputs
        split = "heads"
    elif split == "heads" and shard.count % tp.size == 0:
        split = "columns"
    return ShardedLinear(linear, tp, split, linear.out_features // shard.count, shard.parts)


def _sharded(parameter: Any, shard: Shard, tp: MeshGroup) -> nn.Parameter:
    if shard.dim is not None:  # its parts become a dim before the one that is split
        shape = (len(shard.parts or (0,)), -1)
        parts = nn.Parameter(parameter.detach().unflatten(shard.dim, shape), parameter.requires_grad)
        return to_dtensor(parts, tp, shard.dim + 1)
    return to_dtensor(parameter, tp, {"columns": 0, "rows": parameter.dim() - 1}.get(shard.split), shard.parts)
