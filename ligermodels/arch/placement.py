"""Device placement: one device, or several through accelerate, which is imported on demand."""

from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.checkpoint.weights import Reader, named_weights
from ligermodels.errors import InputError

_PLANS = ("auto", "balanced", "balanced_low_0", "sequential")

Device = torch.device | str | int
Plan = Mapping[str, Device]
"""{name of a module, "" for all: its device, "cpu" or "disk"}."""


def usable(device: Device, name: str | None = None) -> torch.device:
    """The device, on which torch can make a tensor here. name: how the error names it. Raises InputError."""
    name = f"device={device!r}" if name is None else name
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"{name} is no device of torch's; give one such as cpu, cuda or cuda:1") from error
    try:
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"{name} cannot be used: {reason}. Where there is no GPU, give cpu; `ligermodels doctor` says what torch "
            "sees"
        ) from None
    return place


def one_device(device: Device | None, device_map: Device | Plan | None) -> torch.device | None:
    """The device of the whole model; None if `device_map` asks for several.

    Raises InputError, also for a device that is not there: before a checkpoint is fetched.
    """
    if device_map is None:
        return torch.get_default_device() if device is None else usable(device)
    if device is not None:
        raise InputError("device and device_map both say where the model goes; pass one of them")
    places = set(device_map.values()) if isinstance(device_map, Mapping) else {device_map}
    if len(places) > 1 or places & {"disk", *_PLANS}:
        return None
    try:
        place = torch.device(places.pop())
    except (RuntimeError, TypeError, KeyError) as error:
        raise InputError(
            f"device_map={device_map!r} is no device; expected one such as 'cuda:0', {', '.join(map(repr, _PLANS))}, "
            "or a dict {name of a module: device}"
        ) from error
    return usable(place, f"device_map={device_map!r}")


def plan(
    model: Any,
    device_map: Device | Plan,
    *,
    max_memory: Mapping[Any, int | str] | None = None,
    **sizes: Any,
) -> dict[str, Device]:
    """The device of each module of `model`, which is on the meta device, from accelerate or from the dict.

    max_memory: {device: bytes, or a string such as "10GB"}; an entry for "disk" is ignored. sizes: `dtype` and
    `special_dtypes` of accelerate, for weights that will be quantised. A tied head is placed with its table.
    Raises InputError.
    """
    if isinstance(device_map, Mapping):
        places: dict[str, Any] = dict(device_map)
    else:
        accelerate = _accelerate(device_map)
        options = {"no_split_module_classes": model._no_split_modules, **sizes}
        if max_memory is not None:  # accelerate expects torch's devices as keys
            max_memory = {device: size for device, size in max_memory.items() if device != "disk"}
        if device_map != "sequential":
            low_zero = device_map == "balanced_low_0"
            max_memory = accelerate.utils.get_balanced_memory(model, max_memory, low_zero=low_zero, **options)
        places = dict(accelerate.infer_auto_device_map(model, max_memory=max_memory, **options))
    names = [name for name, _ in named_weights(model)]
    if missing := [name for name in names if _place(places, name) is None]:
        raise InputError(f"device_map has no device for {', '.join(missing[:3])}{', ...' * (len(missing) > 3)}")
    if unknown := places.keys() - {name for name, _ in model.named_modules()} - set(names):
        raise InputError(f"device_map names {sorted(unknown)[0]!r}, which the model does not have")
    _accelerate(device_map)  # before anything is read: `dispatch` needs it
    places = dict(_disjoint(model, places))
    moves = {*places.values()} - {"cpu", "disk"}
    if still := [name for name in names if name in places and (moves or places[name] == "disk")]:
        raise InputError(
            f"device_map splits {still[0].rpartition('.')[0] or 'the model'}, which has weights of its own, such as "
            f"{still[0]}, and accelerate moves whole modules: give it one device"
        )
    if model.tied_weights and "" not in places:
        places["lm_head"] = _place(places, model.tied_weights["lm_head.weight"])
    return places


def devices(plan: Plan, names: Iterable[str]) -> dict[str, torch.device]:
    """{name of a quantised module: its device}. Raises InputError for the disk, and for a CPU that offloads."""
    places = {name: _place(plan, name) for name in names}
    offloaded = {"disk", "cpu"} if set(plan.values()) - {"disk", "cpu"} else {"disk"}
    if away := [name for name, place in places.items() if place in offloaded]:
        raise InputError(
            f"quantised modules cannot be offloaded, and device_map puts {', '.join(away[:3])}"
            f"{', ...' * (len(away) > 3)} on the CPU or the disk; raise max_memory, or skip them"
        )
    return {name: torch.device(place) for name, place in places.items() if place is not None}


def on_disk(model: nn.Module, plan: Plan) -> set[str]:
    """The weights that `plan` leaves on the disk."""
    return {name for name, _ in named_weights(model) if _place(plan, name) == "disk"}


def dispatch(model: nn.Module, plan: Plan, checkpoint: Reader | None) -> None:
    """Moves the modules of a loaded model to their devices, with hooks that move weights and activations between them.

    checkpoint: the weights that `plan` leaves on the disk, under our names, or None. They are read at each use: it
    must stay open.
    """
    accelerate = _accelerate(plan)
    options: dict[str, Any] = {}
    if checkpoint is not None:
        options = dict(state_dict=_Offloaded(model, plan, checkpoint), offload_index={})
    accelerate.dispatch_model(model, dict(plan), skip_keys="past_key_values", offload_buffers=True, **options)


class _Offloaded(Mapping[str, Tensor]):
    """The weights that accelerate's hooks fetch: from memory for modules on the CPU, from files for those on disk."""

    def __init__(self, model: nn.Module, plan: Plan, checkpoint: Reader):
        self._in_memory = {n: w.detach() for n, w in named_weights(model) if _place(plan, n) == "cpu"}
        self._dtypes = {n: w.dtype for n, w in named_weights(model) if _place(plan, n) == "disk"}
        self._checkpoint = checkpoint

    def __getitem__(self, name: str) -> Tensor:
        if name in self._in_memory:
            return self._in_memory[name]
        return self._checkpoint.read(name).to(self._dtypes[name])

    def __iter__(self) -> Iterator[str]:
        return iter([*self._in_memory, *self._dtypes])

    def __len__(self) -> int:
        return len(self._in_memory) + len(self._dtypes)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Offloaded":
        return self  # the weights are only read


def offloaded_state(model: nn.Module) -> dict[str, Tensor] | None:
    """The weights, in host memory, of a model that accelerate has offloaded; None for other models."""
    if not any(hasattr(module, "_hf_hook") for module in model.modules()):
        return None
    return _accelerate("a plan").utils.modeling.get_state_dict_offloaded_model(model)


def _disjoint(module: nn.Module, plan: Plan, name: str = "") -> Iterator[tuple[str, Device]]:
    """The entries of `plan` for `module`, called `name`, without nesting: accelerate needs disjoint entries."""
    prefix, place = f"{name}." if name else "", _place(plan, name)
    if not any(inner != name and inner.startswith(prefix) for inner in plan):
        if place is not None:
            yield name, place
        return
    for child, inside in module.named_children():
        yield from _disjoint(inside, plan, prefix + child)
    for child, _ in named_weights(module):
        if "." not in child and (place := _place(plan, prefix + child)) is not None:
            yield prefix + child, place


def _place(plan: Plan, name: str) -> Device | None:
    """The entry of `name`, or of the innermost module around it."""
    while name not in plan and name:
        name = name.rpartition(".")[0]
    return plan.get(name)


def _accelerate(device_map: Any) -> ModuleType:
    try:
        import accelerate
        import accelerate.utils
    except ImportError as error:
        raise InputError(
            f"device_map={device_map!r} spreads the model by accelerate, which is not installed: "
            "`pip install accelerate`, or name one device"
        ) from error
    return accelerate
