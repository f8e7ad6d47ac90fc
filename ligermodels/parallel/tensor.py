"""How tensor parallel splits each kind of layer over the ranks, and which sizes fit."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.layers.base import Layer, Shard
from ligermodels.layers.parallel import MeshGroup, ShardedLinear, to_dtensor

_SIZES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 24, 32, 64)


def check_tensor(model: Any, size: int) -> None:
    """Raises InputError where the layers cannot be split over `size` ranks, saying which sizes fit."""
    if problems := sorted(set(_problems(model, size))):
        fits = [str(other) for other in _SIZES if not any(_problems(model, other))]
        advice = f"tp may be {', '.join(fits)}" if fits else "use dp_shard and cp instead of tp"
        raise InputError(f"{type(model).__name__} cannot be split over tp={size}: {'; '.join(problems)}. {advice}")


def check_context(model: Any, size: int, tp: int) -> None:
    """Raises InputError where the heads cannot be split over `size` ranks of context parallel, saying which sizes fit.

    tp: the ranks over which the heads are split already.
    """
    heads = list(dict.fromkeys(layer.heads for layer in _layers(model.decoder.modules()) if layer.heads is not None))

    def fits(size: int, heads: Iterable[tuple[int, int]] = heads) -> bool:
        return all(_splits(queries // tp, keys // tp or 1, size) for queries, keys in heads)

    if not fits(size):
        sizes = ", ".join(str(other) for other in _SIZES if fits(other))
        queries, keys = next(one for one in heads if not fits(size, [one]))
        raise InputError(
            f"cp={size} does not fit {queries} heads and {keys} key heads"
            + (f" over tp={tp}" if tp > 1 else "")
            + (f"; cp may be {sizes}" if sizes else "; use dp_shard or tp instead of cp")
        )


def _splits(heads: int, kv_heads: int, size: int) -> bool:
    """Whether each of `size` ranks can have as many heads, and whole key heads or one that it shares."""
    return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)


def _modules(model: Any) -> Iterator[nn.Module]:
    """The modules that tensor parallel splits: those of the text model, the head, and `mtp`."""
    yield from model.decoder.modules()
    yield model.lm_head
    if model.mtp is not None:
        yield from model.mtp.modules()


def _layers(modules: Iterable[nn.Module]) -> list[Layer]:
    return [module for module in modules if isinstance(module, Layer)]


def _find(layer: Layer, name: str) -> tuple[Any, str, nn.Module | Tensor | None]:
    """(owner, its last name, what it is) of what `Layer.shards` names; None: it is not there."""
    path, _, last = name.rpartition(".")
    owner = layer.get_submodule(path)
    module = owner._modules.get(last)
    return owner, last, owner._parameters.get(last) if module is None else module


def _problems(model: Any, size: int) -> Iterator[str]:
    """What does not fit `size` ranks, and parameters that no layer says how to share."""
    named: set[int] = set()
    modules = list(_modules(model))
    for layer in _layers(modules):
        for name, shard in layer.shards().items():
            if not shard.fits(size):
                yield shard.what.format(size=size)
            owner, _, found = _find(layer, name)
            if isinstance(found, nn.Module):
                named |= {id(parameter) for parameter in found.parameters()}
            elif found is not None:
                named.add(id(found))
            other = owner if found is None and shard.split != "refused" else found
            if isinstance(other, nn.Module) and type(other) is not nn.Linear:
                yield f"a {type(other).__module__}.{type(other).__name__} in place of a projection"
    for module in modules:
        if any(id(parameter) not in named for parameter in module.parameters(recurse=False)):
            yield f"a {type(module).__name__}"


def shard_tensors(model: Any, tp: MeshGroup) -> None:
    """Replaces the parameters of the text model and the head by DTensors over the ranks."""
    for layer in _layers(list(_modules(model))):
        for name, shard in layer.shards().items():
            owner, last, found = _find(layer, name)
            if isinstance(found, nn.Linear):
                owner._modules[last] = _sharded_linear(found, shard, tp)
            else:
                owner._parameters[last] = _sharded(found, shard, tp)
                if shard.dim is None and shard.parts is not None:
                    owner.row_parts = shard.parts
        layer.set_tp(tp)


def _sharded_linear(linear: nn.Linear, shard: Shard, tp: MeshGroup) -> ShardedLinear:
    if shard.split in ("heads", "replicated"):
        split = "columns" if shard.split == "heads" and shard.count % tp.size == 0 else "heads"
    else:
        split = shard.split
    return ShardedLinear(linear, tp, split, linear.out_features // shard.count, shard.parts)


def _sharded(parameter: Any, shard: Shard, tp: MeshGroup) -> nn.Parameter:
    if shard.dim is not None:
        shape = (len(shard.parts or (0,)), -1)
        parts = nn.Parameter(parameter.detach().unflatten(shard.dim, shape), parameter.requires_grad)
        return to_dtensor(parts, tp, shard.dim + 1)
    return to_dtensor(parameter, tp, {"columns": 0, "rows": parameter.dim() - 1}.get(shard.split), shard.parts)
