"""How tensor parallel splits each kind of layer over the ranks, and which sizes fit."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from ligermodels.errors import InputError
from ligermodels.layers import (
    Attention,
    Embedding,
    GatedDeltaNet,
    GatedMLP,
    GatedRMSNorm,
    LMHead,
    MoE,
    MultiTokenPrediction,
    RMSNorm,
)
from ligermodels.layers.gated_delta_net import CausalConv
from ligermodels.layers.moe import Experts, Router
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
    heads = list(dict.fromkeys(found for module in model.decoder.modules() if (found := _heads(module)) is not None))

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


def _heads(module: nn.Module) -> tuple[int, int] | None:
    """(heads, key heads) of a mixer. Those of a GatedDeltaNet that go over ranks are its value heads."""
    if isinstance(module, Attention):
        return module.num_heads, module.num_kv_heads
    return (module.num_value_heads, module.num_key_heads) if isinstance(module, GatedDeltaNet) else None


def _splits(heads: int, kv_heads: int, size: int) -> bool:
    """Whether each of `size` ranks can have as many heads, and whole key heads or one that it shares."""
    return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)


def _modules(model: Any) -> Iterator[nn.Module]:
    """The modules that tensor parallel splits: those of the text model, the head, and `mtp`."""
    yield from model.decoder.modules()
    yield model.lm_head
    if model.mtp is not None:
        yield from model.mtp.modules()


def _problems(model: Any, size: int) -> Iterator[str]:
    """What does not fit `size` ranks."""
    handled = set()
    for module in _modules(model):
        if isinstance(module, Attention):
            if len(module.joint_names) != 3:
                yield "q, k and v are one weight"
            elif not _splits(module.num_heads, module.num_kv_heads, size):
                yield f"{module.num_heads} heads and {module.num_kv_heads} key heads"
            handled |= set(module.joint_modules) | {module.output_module}
        elif isinstance(module, GatedDeltaNet):
            if module.num_key_heads % size:
                yield f"{module.num_key_heads} key heads of linear attention"
            handled |= {*module.joint_modules, module.output_module, module.conv1d, module.norm}
        elif isinstance(module, GatedMLP):
            if len(module.joint_names) != 2:
                yield "gate and up are one weight"
            elif module.output_module.in_features % size:
                yield f"an intermediate size of {module.output_module.in_features}"
            handled |= set(module.joint_modules) | {module.output_module}
        elif isinstance(module, MultiTokenPrediction):
            handled.add(module.fc)
        elif isinstance(module, Experts):
            if module.down_proj.shape[-1] % size:
                yield f"an intermediate size of {module.down_proj.shape[-1]}"
        elif isinstance(module, MoE):
            if module.jitter_noise > 0:
                yield "router jitter, which each rank would draw for itself; set router_jitter_noise to 0"
        elif isinstance(module, Embedding | LMHead):
            rows = module.num_embeddings if isinstance(module, Embedding) else module.out_features
            if rows % size:
                yield f"a vocabulary of {rows}, which resize_token_embeddings(pad_to_multiple_of={size}) pads"
        elif not isinstance(module, RMSNorm | Router) and module not in handled and list(module.parameters(False)):
            yield f"a {type(module).__name__}"
    for module in handled:
        if type(module) not in (nn.Linear, CausalConv, GatedRMSNorm):
            yield f"a {type(module).__module__}.{type(module).__name__} in place of a projection"


def shard_tensors(model: Any, tp: MeshGroup) -> None:
    """Replaces the parameters of the text model and the head by DTensors over the ranks."""
    for module in list(_modules(model)):
        if isinstance(module, Attention):
            q, k, v = module.joint_names
            whole = module.num_kv_heads % tp.size == 0
            _replace(module, q, tp, "columns")
            for name in (k, v):
                _replace(module, name, tp, "columns" if whole else "heads", module.head_dim)
            _replace(module, module.output_name, tp, "rows")
            module.num_heads //= tp.size
            module.num_kv_heads = max(module.num_kv_heads // tp.size, 1)
        elif isinstance(module, GatedDeltaNet):
            qkv, *others = module.joint_names
            _replace(module, qkv, tp, "columns", row_parts=module.sizes)
            for name in others:
                _replace(module, name, tp, "columns")
            _replace(module, module.output_name, tp, "rows")
            module.A_log, module.dt_bias = to_dtensor(module.A_log, tp, 0), to_dtensor(module.dt_bias, tp, 0)
            module.conv1d.weight = to_dtensor(module.conv1d.weight, tp, None, module.sizes)
            module.conv1d.tp, module.conv1d.row_parts = tp, module.sizes
            module.norm.weight, module.norm.tp = to_dtensor(module.norm.weight, tp, None), tp
            module.sizes = tuple(size // tp.size for size in module.sizes)
            module.num_key_heads //= tp.size
            module.num_value_heads //= tp.size
        elif isinstance(module, GatedMLP):
            for name in module.joint_names:
                _replace(module, name, tp, "columns")
            _replace(module, module.output_name, tp, "rows")
        elif isinstance(module, MultiTokenPrediction):
            _replace(module, "fc", tp, "heads", module.fc.out_features)  # one head: all of it, on this rank's tokens
        elif isinstance(module, Experts):
            gate_up = module.gate_up_proj.unflatten(1, (2, -1)).detach()
            gate_up.requires_grad_(module.gate_up_proj.requires_grad)
            module.gate_up_proj = to_dtensor(gate_up, tp, 2)
            module.down_proj = to_dtensor(module.down_proj, tp, 2)
        elif isinstance(module, RMSNorm | Router):
            if module.weight is not None:
                module.weight = to_dtensor(module.weight, tp, None)
        elif isinstance(module, Embedding) or (isinstance(module, LMHead) and not module.is_tied):
            for name, parameter in module.named_parameters(recurse=False):
                module._parameters[name] = to_dtensor(parameter, tp, 0)
        elif not isinstance(module, MoE | LMHead):
            continue
        module.tp = tp


def _replace(layer: nn.Module, name: str, tp: MeshGroup, split: str, head_dim: int = 1, **options: Any) -> None:
    layer._modules[name] = ShardedLinear(layer._modules[name], tp, split, head_dim, **options)  # type: ignore[arg-type]
