"""AdamW for bf16 weights: little memory, one pass over it, no host synchronisation.

    optimizer = AdamW(model.parameters(), lr=2e-5, max_grad_norm=1.0)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

Bytes per parameter of weight and states, and bytes that a step moves:

| weights | options                                        | size | moved | compared with fp32 throughout             |
| ---     | ---                                            | ---  | ---   | ---                                       |
| bf16    | rounding="nearest": as torch.optim.AdamW       | 6    | 14   | updates below 1/512 of a weight are lost,  |
|         |                                                |      |      | second moments do not decay at beta2 0.999 |
| bf16    | the default                                    | 6    | 14   | the same in the mean, with noise           |
| bf16    | master_weights=True                            | 8    | 18   | the same weights, moments with noise       |
| bf16    | master_weights=True, state_dtype=torch.float32 | 12   | 26   | the same bits, for gradients in bf16       |
| fp32    | any                                            | 12   | 28   |                                            |
| bf16    | state_dtype=torch.uint8                        | 4    | 10   | the same in the mean, with more noise      |
| bf16    | master_weights=True, state_dtype=torch.uint8   | 6    | 14   | the same                                   |
| fp32    | state_dtype=torch.uint8                        | 6    | 16   | the same                                   |

The kernel and what it computes are in ligermodels/kernels/optimizer/adamw.py, moments in 8 bits in eight_bits.py there.
"""

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.kernels._triton import accumulator, is_capturing
from ligermodels.kernels.optimizer import eight_bits
from ligermodels.kernels.optimizer.adamw import ROUNDINGS
from ligermodels.kernels.optimizer.adamw_many import Parameter, Tables, adamw_many
from ligermodels.kernels.optimizer.rounding import UNSHARDED, ShardLayout, join_master

MIN_8BIT_SIZE = 4096
"""Elements of the smallest parameter whose moments are stored in 8 bits, as in bitsandbytes."""
EIGHT_BITS_SIZE = 2 + 2 / eight_bits.BLOCK
"""Bytes of the two moments of an element in 8 bits."""
_EIGHT_BITS = {"exp_avg": eight_bits.MOMENT, "exp_avg_sq": eight_bits.ROOT}
_TENSORS = "exp_avg", "exp_avg_sq", "remainder", "exp_avg_exponents", "exp_avg_sq_exponents"
"""The states that a step changes, in the order of the arguments of `adamw`."""
_STORAGE_OPTIONS = ("rounding", "master_weights", "state_dtype", "capturable")
"""Group options for how numbers are stored; loading a state does not change them."""


class AdamW(torch.optim.Optimizer):
    """AdamW with torch.optim.AdamW's interface and checkpoints.

    params, lr, betas, eps, weight_decay: as in torch, each also per group. lr may be a 0-dim tensor on the device, and
        should be one where steps are captured in a CUDA graph, which freezes a float.
    rounding: of weights and moments in bf16, "stochastic" or "nearest"; other dtypes round to nearest.
    master_weights: bf16 weights are the upper half of fp32 weights (`master(p)`); the lower 16 bits are the state
        "remainder" (typed bf16, since NCCL and gloo carry no int16). Not for fp16 weights.
    state_dtype: of the moments; None for the weight's. torch.uint8 stores them in 8 bits, and an exponent of each 64
        elements of the last dim in the states exp_avg_exponents and exp_avg_sq_exponents. Parameters of one dim, of
        fewer than 4096 elements, or whose last dim is no multiple of 64 then have moments in fp32.
    max_grad_norm: the step scales gradients as clip_grad_norm_(parameters, max_grad_norm) would, with the norm in fp32;
        .grad itself is unchanged. `grad_norm` is the norm of the last step, on the device. inf only measures.
    step_in_backward: each parameter takes its step as soon as its gradient is complete, and .grad becomes None: the
        gradients of one layer at a time exist. Call step() once per backward all the same: it marks the end. Not for
        max_grad_norm, several backwards per step, a GradScaler, or DistributedDataParallel, which averages gradients
        later and is not detected (FSDP2 reduces before). It lasts until `remove_hooks()`.
    seed: of stochastic rounding, together with the parameter's number and step, and an element's place in the whole
        parameter: a resumed run draws the same bits, and so does one on another number of GPUs.
    capturable: step counts live on the device, for CUDA graphs. Take a step before capturing.

    DTensors (FSDP2, tensor parallelism) are updated shard by shard. Given the same gradients, the bits of weights and
    states do not depend on the sharding; with max_grad_norm the last bit of the norm does.
    Parameters that are stored alike step in one launch, unless capturable or step_in_backward.
    On the CPU a step takes as long as torch.optim.AdamW's; with stochastic rounding of bf16 or moments in 8 bits some
    ten to twenty times that, for the random bits.
    Raises InputError for options out of range, complex parameters, sparse gradients, and moments in 8 bits of a
    DTensor whose last dim is cut within 64 elements.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        rounding: str = "stochastic",
        master_weights: bool = False,
        state_dtype: torch.dtype | None = None,
        max_grad_norm: float | None = None,
        step_in_backward: bool = False,
        seed: int = 0,
        capturable: bool = False,
    ):
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise InputError(f"AdamW: max_grad_norm={max_grad_norm!r} must be positive, or None for no clipping")
        if max_grad_norm is not None and step_in_backward:
            raise InputError(
                "AdamW: max_grad_norm needs the gradients of all parameters at once, and step_in_backward=True frees "
                "each at once; choose one of the two"
            )
        self.max_grad_norm, self.step_in_backward = max_grad_norm, step_in_backward
        self.grad_norm: Tensor | None = None
        self._prepare()
        super().__init__(
            params,
            dict(
                lr=lr,
                betas=betas,
                eps=eps,
                weight_decay=weight_decay,
                rounding=rounding,
                master_weights=master_weights,
                state_dtype=state_dtype,
                seed=seed,
                capturable=capturable,
            ),
        )

    def _prepare(self) -> None:
        self._stepped: set[Tensor] = set()  # by their backward, since the last step() or zero_grad()
        self._layouts: dict[Tensor, ShardLayout] = {}  # of DTensors: each takes about 100 us to compute
        self._tables: dict[Tensor, Tables] = {}  # of the parameters that step together, by the first of them
        self._handles: list[Any] = []
        weakref.finalize(self, _remove, self._handles)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            _check(self.param_groups[-1])
        except InputError:
            self.param_groups.pop()
            raise
        self._hook(len(self.param_groups) - 1)

    def _hook(self, index: int) -> None:
        """Registers the hooks of step_in_backward for one group."""
        if self.step_in_backward:
            start, this = sum(len(group["params"]) for group in self.param_groups[:index]), weakref.ref(self)
            for number, p in enumerate(self.param_groups[index]["params"], start):
                if p.requires_grad:
                    hook = _Hook(this, index, number)
                    self._handles.append(p.register_post_accumulate_grad_hook(hook))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Takes one step for every parameter that has a gradient. closure: computes loss and gradients, before that."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        factor = None
        if self.max_grad_norm is not None:
            self.grad_norm = _total_norm(
                [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            )
            factor = (self.max_grad_norm / (self.grad_norm + 1e-6)).clamp(max=1.0)
        number = 0
        for group in self.param_groups:
            ready = [(i, p) for i, p in enumerate(group["params"], number) if p.grad is not None]
            number += len(group["params"])
            if ready:
                self._update(group, ready, factor)
        self._stepped.clear()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._stepped.clear()

    def remove_hooks(self) -> None:
        """Ends step_in_backward."""
        self.step_in_backward = False
        _remove(self._handles)

    def master(self, p: Tensor) -> Tensor:
        """The fp32 weight of p; with master_weights=True it has more bits than p."""
        remainder = self.state[p].get("remainder") if p in self.state else None
        if remainder is None:
            return p.detach().float()
        return _sharded_as(p, join_master(_local(p.detach()), _local(remainder).view(torch.int16)), p.shape)

    def _update(self, group: dict[str, Any], ready: Sequence[tuple[int, Tensor]], factor: Tensor | None) -> None:
        """The step of parameters of one group, each with its number."""
        first, capturable = ready[0][1], group["capturable"]
        begun = all(self.state.get(p) for _, p in ready)
        if first.is_cuda and not (capturable and begun) and is_capturing():
            raise InputError(
                "AdamW: a step is captured in a CUDA graph, with "
                + ("states that do not exist yet; take a step before" if capturable else "capturable=False; set it")
            )
        for _, p in ready:
            if p.grad.layout != torch.strided:  # type: ignore[union-attr]
                raise InputError(f"AdamW: the gradient of {_name(p)} is {p.grad.layout}; make it dense")  # type: ignore[union-attr]
            if not (begun or self.state[p]):
                self.state[p] = _first_state(p, group)
        torch._foreach_add_([self.state[p]["step"] for _, p in ready], 1)
        steps = []
        for _, p in ready:
            state = self.state[p]
            if capturable and state["step"].device != p.device:  # the option was set later
                state["step"] = state["step"].to(p.device)
            steps.append(int(state["step"]) if state["step"].is_cpu else state["step"])
        parameters = [self._parameter(number, p, group) for number, p in ready]
        options = {name: group[name] for name in ("betas", "eps", "weight_decay", "rounding", "seed")}

        def on(device: torch.device) -> dict[str, Any]:
            return dict(lr=_number(group["lr"], device), factor=None if factor is None else factor.to(device))

        if not capturable and len(ready) > 1 and len({p.device for _, p in ready}) == len(set(steps)) == 1:
            tables = self._tables.setdefault(first, Tables())
            adamw_many(parameters, tables, step=steps[0], **on(first.device), **options)
        else:
            for x, step in zip(parameters, steps, strict=True):
                x.update(step=step, **on(x.weight.device), **options)
        torch.autograd.graph.increment_version([p for _, p in ready])  # so that a backward that still needs them raises

    def _parameter(self, number: int, p: Tensor, group: dict[str, Any]) -> Parameter:
        """What a step of p reads and writes on this rank."""
        state, layout = self.state[p], UNSHARDED
        tensors: Any = p, _grad(p), *(state.get(name) for name in _TENSORS)
        if not _is_plain(p):
            tensors = tuple(None if x is None else x.to_local() for x in tensors)
            dtypes = p.dtype, state["exp_avg"].dtype
            if torch.uint8 in dtypes or (group["rounding"] == "stochastic" and torch.bfloat16 in dtypes):
                if p not in self._layouts:
                    self._layouts[p] = _layout(p)
                layout = self._layouts[p]
        weight, grad, exp_avg, exp_avg_sq, remainder, *exponents = tensors
        remainder = None if remainder is None else remainder.view(torch.int16)
        both = None if exponents[0] is None else (exponents[0], exponents[1])
        return Parameter(weight, grad, exp_avg, exp_avg_sq, remainder, both, number, layout)

    def _step_in_backward(self, index: int, number: int, p: Tensor) -> None:
        """The step of one parameter, in its hook.

        FSDP2 calls it on the stream that reduced the gradient, and at the end of backward has the caller's stream wait
        for that one, hooks included: the next forward reads the new weight. The gradient's memory is that stream's too.
        """
        if p.grad is None:
            raise InputError(
                f"AdamW: {_name(p)} has no gradient at its step; another optimizer steps in the backward too: call its "
                "remove_hooks()"
            )
        if p in self._stepped:
            raise InputError(
                f"AdamW: {_name(p)} gets a second gradient after its step in the backward; call step() after each "
                "backward, and zero_grad() after one that raised. Gradient accumulation needs step_in_backward=False"
            )
        if p.is_cpu and not _is_plain(p) and torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()  # a gradient that FSDP2 offloads may still be on its way
        with torch.no_grad():
            self._update(self.param_groups[index], [(number, p)], None)
        self._stepped.add(p)
        p.grad = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state_dict() of this class or of torch.optim.AdamW.

        lr, betas, eps, weight_decay and seed are loaded. rounding, master_weights, state_dtype and capturable stay, and
        moments are cast to state_dtype; a missing remainder starts at 0. A tensor lr stays the same tensor.
        Raises InputError for another optimizer's state.
        """
        loaded: dict[str, Any] = {}

        def take(_: Any, state: dict[str, Any]) -> dict[str, Any]:  # torch would cast all states to the weight's dtype
            loaded.update(state)
            self._check_loadable(state)
            return {**state, "state": {}}

        before = self.param_groups
        handle = self.register_load_state_dict_pre_hook(take)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        for old, group, saved in zip(before, self.param_groups, loaded["param_groups"], strict=True):
            group.update({key: old[key] for key in old if key in _STORAGE_OPTIONS or key not in group})
            if isinstance(old["lr"], Tensor):
                group["lr"] = old["lr"].copy_(torch.as_tensor(group["lr"]))
            for key, p in zip(saved["params"], group["params"], strict=True):
                if loaded["state"].get(key):
                    self.state[p] = self._loaded_state(p, group, loaded["state"][key])

    def _check_loadable(self, state_dict: dict[str, Any]) -> None:
        """Raises InputError for another optimizer's state."""
        for group in state_dict["param_groups"]:
            for option in ("amsgrad", "maximize"):
                if group.get(option):
                    raise InputError(
                        f"AdamW: the loaded state comes from a run with {option}=True, which is not supported"
                    )
            if group.get("weight_decay") and not group.get("decoupled_weight_decay", True):
                raise InputError("AdamW: the loaded state is Adam's, whose weight decay goes into the moments")
        for key, state in state_dict["state"].items():
            expected = ["step", *_EIGHT_BITS]
            if getattr(state.get("exp_avg"), "dtype", None) == torch.uint8:
                expected += [f"{name}_exponents" for name in _EIGHT_BITS]
            if state and not set(expected) <= set(state):
                raise InputError(
                    f"AdamW: the loaded state of parameter {key} has {', '.join(map(str, state))}; expected "
                    f"{', '.join(expected[:-1])} and {expected[-1]}. Is it another optimizer's?"
                )

    def _loaded_state(self, p: Tensor, group: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
        """The state of a parameter from a loaded one. Raises InputError."""
        where = p.device if group["capturable"] else "cpu"
        loaded = {
            "step": torch.as_tensor(state["step"]).detach().to(where, torch.float32, copy=True),
            **_loaded_moments(p, _moments(p, group), state),
        }
        if group["master_weights"] and p.dtype == torch.bfloat16:
            remainder = state.get("remainder", torch.zeros_like(p))
            if remainder.dtype != torch.bfloat16:
                raise InputError(f"AdamW: a loaded remainder is {remainder.dtype}; expected torch.bfloat16")
            loaded["remainder"] = remainder.to(p.device)
        return loaded

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "max_grad_norm": self.max_grad_norm,
            "step_in_backward": self.step_in_backward,
            "grad_norm": self.grad_norm,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "step_in_backward" in state:  # a copy or unpickled; without it, load_state_dict calls this
            self._prepare()
            for index in range(len(self.param_groups)):
                self._hook(index)


class _Hook:
    """Steps a parameter in its backward; does not keep the optimizer alive."""

    def __init__(self, optimizer: Any, index: int, number: int):
        self.optimizer, self.index, self.number = optimizer, index, number

    def __call__(self, p: Tensor) -> None:
        if (optimizer := self.optimizer()) is not None:
            optimizer._step_in_backward(self.index, self.number, p)


def _remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()


def _check(group: dict[str, Any]) -> None:
    lr, betas, seed, dtype = group["lr"], group["betas"], group["seed"], group["state_dtype"]
    if isinstance(lr, Tensor):
        wrong = "lr must be one number" if lr.numel() != 1 else ""
    else:
        wrong = "" if lr >= 0 else "lr must be 0 or more"
    if len(betas) != 2 or not all(0 <= float(beta) < 1 for beta in betas):
        wrong = "betas must be two numbers from 0 up to, but not, 1"
    for name in ("eps", "weight_decay"):
        if not group[name] >= 0:
            wrong = f"{name} must be 0 or more"
    if group["rounding"] not in ROUNDINGS:
        wrong = f"rounding must be one of {', '.join(ROUNDINGS)}"
    if dtype is not None:
        group["state_dtype"] = str(dtype).removeprefix("torch.")  # distributed checkpoints cannot store dtypes
        parsed = getattr(torch, group["state_dtype"], None)
        if not (isinstance(parsed, torch.dtype) and (parsed.is_floating_point or parsed == torch.uint8)):
            wrong = "state_dtype must be a floating dtype, torch.uint8, or None"
    if type(seed) is not int or not 0 <= seed < 2**63:
        wrong = "seed must be an integer from 0 to 2^63 - 1"
    if wrong:
        raise InputError(f"AdamW: {wrong}; got { {key: group[key] for key in group if key != 'params'} }")
    group["betas"] = tuple(map(float, betas))
    for p in group["params"]:
        if not p.is_floating_point():
            raise InputError(f"AdamW: {_name(p)} is {p.dtype}; only floating dtypes are trained")
        if group["master_weights"] and p.dtype == torch.float16:
            raise InputError(
                f"AdamW: {_name(p)} is fp16, which is not the upper half of an fp32 number: master_weights=True needs "
                "bf16 weights; or keep them in fp32 under torch.autocast"
            )
        if _moments(p, group) == torch.uint8 and (width := _local(p).shape[-1]) % eight_bits.BLOCK:
            raise InputError(
                f"AdamW: {_name(p)} has shards of {width} columns, and moments in 8 bits are in blocks of "
                f"{eight_bits.BLOCK}: shard another dim, or leave it in a group with another state_dtype"
            )


def in_eight_bits(p: Tensor) -> bool:
    """True if state_dtype=torch.uint8 stores the moments of p in 8 bits; those of other parameters are in fp32."""
    return p.dim() > 1 and p.numel() >= MIN_8BIT_SIZE and p.shape[-1] % eight_bits.BLOCK == 0


def _moments(p: Tensor, group: dict[str, Any]) -> torch.dtype:
    dtype = p.dtype if group["state_dtype"] is None else getattr(torch, group["state_dtype"])
    return accumulator(p.dtype) if dtype == torch.uint8 and not in_eight_bits(p) else dtype


def _first_state(p: Tensor, group: dict[str, Any]) -> dict[str, Any]:
    dtype = _moments(p, group)
    where = p.device if group["capturable"] else "cpu"
    state = {
        "step": torch.zeros((), dtype=torch.float32, device=where),
        "exp_avg": torch.zeros_like(p, dtype=dtype),
        "exp_avg_sq": torch.zeros_like(p, dtype=dtype),
    }
    if group["master_weights"] and p.dtype == torch.bfloat16:
        state["remainder"] = torch.zeros_like(p)
    if dtype == torch.uint8:
        for name in _EIGHT_BITS:
            shape = eight_bits.exponents_shape(_local(p).shape)
            state[f"{name}_exponents"] = _exponents_of(p, torch.zeros(shape, dtype=torch.uint8, device=p.device))
    return state


def _exponents_of(p: Tensor, local: Tensor) -> Tensor:
    """The exponents of all blocks of p, of which this rank has `local`."""
    return _sharded_as(p, local, eight_bits.exponents_shape(p.shape))


def _loaded_moments(p: Tensor, dtype: torch.dtype, state: dict[str, Any]) -> dict[str, Tensor]:
    """The moments of p in `dtype` from loaded ones of any dtype, with the exponents of those in 8 bits."""
    loaded: dict[str, Tensor] = {}
    for name, levels in _EIGHT_BITS.items():
        moment, exponents, is_root = state[name].to(p.device), None, levels == eight_bits.ROOT
        if moment.dtype == torch.uint8:
            exponents = state[f"{name}_exponents"].to(p.device)
        if moment.dtype != dtype:
            x = _local(moment)
            if exponents is not None:
                x, exponents = eight_bits.decode(x, _local(exponents), levels), None
                x = x.square() if is_root else x
            if dtype == torch.uint8:
                x, blocks = eight_bits.encode(x.sqrt() if is_root else x, levels)
                exponents = _exponents_of(p, blocks)
            moment = _sharded_as(p, x.to(dtype), p.shape)
        loaded |= {name: moment} if exponents is None else {name: moment, f"{name}_exponents": exponents}
    return loaded


def _total_norm(parameters: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all gradients in fp32 (fp64 for fp64), a 0-dim tensor, the same on all ranks.

    Each mesh takes one all-gather per dim of it, of one number per rank.
    """
    if not parameters:
        return torch.tensor(0.0)
    alike = defaultdict(list)
    for p in parameters:
        alike[getattr(p, "device_mesh", None)].append(p)
    norms = []
    for mesh, some in alike.items():
        grads: list[Any] = [_grad(p) for p in some]
        dtype = torch.float64 if torch.float64 in {grad.dtype for grad in grads} else torch.float32
        if mesh is None:
            norm = _norm(grads, dtype, grads[0].device)
        else:
            at = mesh.get_coordinate()
            local = [grad.to_local() for grad in grads if _is_counted(grad, at)]
            norm = _norm([x for x in local if x.numel()], dtype, grads[0].device)
            norm = torch.linalg.vector_norm(_of_all_ranks(norm, mesh))
        norms.append(norm.to(parameters[0].device))
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def _norm(tensors: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The 2-norm of plain tensors, which may be none."""
    alike = defaultdict(list)
    for x in tensors:
        alike[x.device, x.dtype].append(x)
    norms = [torch.zeros((), dtype=dtype, device=device)]
    for some in alike.values():
        each = torch._foreach_norm(some, 2, dtype=accumulator(some[0].dtype))
        norms.append(torch.linalg.vector_norm(torch.stack(each), dtype=dtype).to(device))
    return norms[1] if len(norms) == 2 else torch.linalg.vector_norm(torch.stack(norms))


def _is_counted(grad: Any, coordinate: Sequence[int] | None) -> bool:
    """True on the first of the ranks that have the same shard of a DTensor."""
    return coordinate is not None and not any(
        at and placement.is_replicate() for at, placement in zip(coordinate, grad.placements, strict=True)
    )


def _of_all_ranks(x: Tensor, mesh: Any) -> Tensor:
    """The 0-dim x of each rank of a mesh.

    They are gathered and not reduced: an all-reduce over each dim in turn may add in another order on other ranks, and
    replicas of a weight that are clipped by different numbers drift apart.
    """
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(x.view([1] * mesh.ndim), mesh, [Shard(dim) for dim in range(mesh.ndim)]).full_tensor()


def _number(lr: float | Tensor, device: torch.device) -> float | Tensor:
    """lr for a kernel on device: a tensor there, or a float."""
    if not isinstance(lr, Tensor) or lr.device == device:
        return lr if device.type != "cpu" else float(lr)
    return float(lr) if lr.is_cpu or device.type == "cpu" else lr.to(device)


def _is_plain(p: Tensor) -> bool:
    return type(p) is nn.Parameter or not hasattr(p, "device_mesh")


def _local(x: Any) -> Tensor:
    """This rank's part of a tensor."""
    return x if _is_plain(x) else x.to_local()


def _sharded_as(p: Any, local: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor of `shape` of which this rank has `local`, sharded as p is."""
    if _is_plain(p):
        return local
    from torch.distributed.tensor import DTensor

    strides = tuple(_strides(shape))
    # Moved back, since from_local moves what FSDP2 offloads to the device of the mesh.
    shape = torch.Size(shape)
    return DTensor.from_local(local, p.device_mesh, p.placements, shape=shape, stride=strides).to(p.device)


def _grad(p: Any) -> Any:
    """The gradient of p, which has one, sharded as p is."""
    if _is_plain(p) or p.grad.placements == p.placements:
        return p.grad
    return p.grad.redistribute(placements=p.placements)


def _layout(p: Any) -> ShardLayout:
    """The elements of a DTensor that this rank has.

    Raises InputError if they are not evenly spaced runs: two dims are sharded, and one between them is not.
    """
    # Distributed checkpoints place shards by this function. torch 2.11 to 2.13 has no public one, and FSDP2's shards of
    # tensor parallel weights, _StridedShard, are not strided.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    if tuple(p.to_local().shape) != tuple(shape) or not _is_box(p):
        raise InputError(
            f"AdamW: the position of a shard of {_name(p)} is unknown, with placements {p.placements}; "
            'rounding="nearest" does not need it'
        )
    if math.prod(shape) == 0:
        return UNSHARDED
    first = sum(at * stride for at, stride in zip(offset, _strides(p.shape), strict=True))
    runs: list[tuple[int, int]] = []  # (count, stride), the innermost last
    for count, stride in zip(shape, _strides(p.shape), strict=True):
        if runs and runs[-1][1] == count * stride:
            runs[-1] = runs[-1][0] * count, stride
        elif count > 1:
            runs.append((count, stride))
    if not runs or runs[-1][1] > 1:
        runs.append((1, 1))
    if len(runs) > 2:
        raise InputError(
            f"AdamW: a shard of {_name(p)} is not evenly spaced runs of elements, with placements {p.placements}; "
            'shard other dims, or set rounding="nearest"'
        )
    return ShardLayout(first) if len(runs) == 1 else ShardLayout(first, runs[1][0], runs[0][1])


def _strides(shape: Sequence[int]) -> list[int]:
    """Of a contiguous tensor."""
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _is_box(p: Any) -> bool:
    """True if the shard of a DTensor is a range of each dim.

    A _StridedShard alone takes rows from several places. It is a range if Shards of the same dim, further to the right,
    divide that by its split_factor, as FSDP2's of tensor parallel weights do.
    """
    for i, placement in enumerate(p.placements):
        factor = getattr(placement, "split_factor", 1)
        if factor > 1:
            later = [j for j in range(i + 1, p.device_mesh.ndim) if p.placements[j].is_shard(placement.dim)]
            if factor != math.prod(p.device_mesh.size(j) for j in later):
                return False
    return True


def _name(p: Tensor) -> str:
    return f"a parameter of shape {tuple(p.shape)}"
