"""A whole training step as one CUDA graph, for batches so small that the host limits the speed.

A step of Llama-3.2-1B has some 600 kernels. With 1024 tokens, Python takes longer to launch them than the GPU takes to
run them. The graph is captured once and launched in one call; kernels, their order and their results stay the same.
"""

import gc
import os
import traceback
import warnings
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.kernels._triton import as_if_capturing
from ligermodels.layers.moe import mixtures_of

_FROM_ZERO = {
    "step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "remainder", "exp_avg_exponents", "exp_avg_sq_exponents",
}  # fmt: skip
"""States that are 0 before the first step: those of Adam and AdamW, torch's and ours."""


class CapturedStep:
    """step(**inputs) -> loss: forward, backward, the optimizer's step and zero_grad, as one CUDA graph.

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=True)
        step = CapturedStep(model, optimizer, input_ids=ids, labels=ids)
        for ids in batches:
            loss = step(input_ids=ids, labels=ids)

    model(**inputs) returns a loss, or a mapping with one as "loss". The call returns a new tensor on the device; only
    loss.item() synchronises. `example_inputs` fix the shapes and dtypes of tensors, which may be on any device, and the
    values of all other inputs. Without CUDA, the same step runs without a graph and makes the same checks.

    optimizer: on CUDA with capturable=True in its param_groups. A float lr becomes an fp32 tensor on the device, which
        schedulers then write to; an lr set by hand is copied there. Other options are frozen at the capture.
    accumulate: calls per step of the optimizer. Gradients add up, each divided by `accumulate` unless
        num_items_in_batch is among the inputs (best a 0-dim tensor). The returned loss is never divided.
    max_grad_norm: clips by torch.nn.utils.clip_grad_norm_; `grad_norm` is then the norm of the last step, in memory
        that the next step overwrites. Leave it out if the optimizer clips.
    fixed: names of tensors that the host reads to decide what to run; their values must be the example's.

    Building it runs each kind of call twice, to compile kernels and initialise libraries. Then weights, buffers,
    optimizer states and random numbers are restored from copies in host memory, and all gradients are dropped. The
    GPU memory of a step (activations, gradients) stays allocated as long as the object lives.

    Without a graph the head's GEMMs skip rows without a label, whose number the host reads. A graph computes all rows,
    so the last bits of the head's sums differ. All other results have the same bits.

    Raises InputError for models that cannot be captured (DDP, FSDP), for inputs unlike the example's, and for a stale
    graph: parameters moved or replaced, states loaded, another option, train() or eval(), autocast.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        accumulate: int = 1,
        max_grad_norm: float | None = None,
        fixed: Collection[str] = ("image_grid_thw", "video_grid_thw"),
        **example_inputs: Any,
    ):
        self.model, self.optimizer = model, optimizer
        self.max_grad_norm, self.grad_norm = max_grad_norm, torch.tensor(0.0)
        self._parameters = list(dict.fromkeys([*model.parameters(), *(p for g in self._groups for p in g["params"])]))
        self._device = _device(model, self._parameters)
        if type(accumulate) is not int or accumulate < 1:
            raise InputError(f"CapturedStep: accumulate={accumulate!r} must be a number of calls, 1 or more")
        self._divisor = 1 if "num_items_in_batch" in example_inputs else accumulate
        self._fixed = {name for name, x in example_inputs.items() if name in fixed or not isinstance(x, Tensor)}
        self._inputs = {name: self._buffer(name, x) for name, x in example_inputs.items()}
        # The first call creates the gradients, the last one uses and frees them: one graph for each kind.
        self._calls = [(i == 0, i == accumulate - 1) for i in range(accumulate)]
        self._done = 0
        self._graphs: dict[tuple[bool, bool], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._lrs: list[Tensor] = []
        self._drop_gradients()
        if self._device.type == "cuda":
            if not all(group.get("capturable") for group in self._groups):
                raise InputError(
                    f"CapturedStep: {type(optimizer).__name__} does not count its steps on the device; build it with "
                    "capturable=True"
                )
            try:
                with torch.cuda.device(self._device):
                    self._capture()
            finally:
                self._drop_gradients()
        self._captured = self._fingerprint()

    def __call__(self, **inputs: Any) -> Tensor:
        self._check(inputs)
        for group, lr in zip(self._groups, self._lrs, strict=False):
            if group["lr"] is not lr:
                lr.fill_(group["lr"])
                group["lr"] = lr
        for name in self._inputs.keys() - self._fixed:
            self._inputs[name].copy_(inputs[name], non_blocking=True)
        call = self._calls[self._done % len(self._calls)]
        self._done += 1
        if not self._graphs:
            return self._run(last=call[1])
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # or schedulers warn that it never steps
        graph, loss = self._graphs[call]
        graph.replay()
        return loss.clone()

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def _run(self, *, last: bool) -> Tensor:
        torch.clear_autocast_cache()  # weights cast before a step, or within the graph, are of no use outside
        output = self.model(**self._inputs)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise InputError("CapturedStep: the model returns no loss, one number; are labels among the inputs?")
        (loss / self._divisor if self._divisor > 1 else loss).backward()
        if last:
            if self.max_grad_norm is not None:
                self.grad_norm = nn.utils.clip_grad_norm_(self._parameters, self.max_grad_norm)
            self.optimizer.step()
            self._drop_gradients()
        torch.clear_autocast_cache()
        return loss.detach()

    def _capture(self) -> None:
        for group in self._groups:
            if not isinstance(group["lr"], Tensor) or group["lr"].device != self._device:
                group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float32, device=self._device)
        self._lrs = [group["lr"] for group in self._groups]
        gc.collect()
        names = {p: name for name, p in self.model.named_parameters()}
        if alive := [names.get(p, "a parameter") for p in self._parameters if p.requires_grad and _in_a_graph(p)]:
            raise InputError(
                f"CapturedStep: a loss or an output of an earlier forward is still alive, and its autograd graph reads "
                f"{alive[0]} on another stream. `del` it or detach it first"
            )
        stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._warm_up()
            for call in dict.fromkeys(self._calls):
                graph = torch.cuda.CUDAGraph()
                try:
                    # "relaxed": a data loader's thread may pin memory meanwhile.
                    with torch.cuda.graph(graph, pool, stream, capture_error_mode="relaxed"):
                        loss = self._run(last=call[1])
                except RuntimeError as error:
                    raise InputError(
                        f"CapturedStep: the step cannot be captured, {_first_cause(error)}. Nothing in it may "
                        "synchronise with the GPU or copy from unpinned memory: no .item() or print of a tensor, no "
                        "tensor made of Python numbers on the GPU; packed sequences by cu_seqlens, not by position_ids"
                    ) from error
                self._graphs[call] = graph, loss
        torch.cuda.current_stream().wait_stream(stream)

    def _warm_up(self) -> None:
        """Runs each kind of call twice, then restores everything; new optimizer states are 0."""
        states = [x for state in self.optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
        changed = [*(p for p in self._parameters if p.requires_grad), *self.model.buffers(), *states]
        before = [(x, x.detach().to("cpu", copy=True)) for x in changed]
        devices = [self._device] if self._device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "This instance was constructed with capturable=True")
                for _, last in dict.fromkeys(self._calls):
                    self._run(last=last)
                # Some code paths differ under capture: run them once too.
                with as_if_capturing():
                    for _, last in dict.fromkeys(self._calls):
                        self._run(last=last)
        finally:
            self._drop_gradients()
            with torch.no_grad():
                for x, copy in before:
                    x.copy_(copy)
        known = set(map(id, states))
        for state in self.optimizer.state.values():
            for name, x in state.items():
                if isinstance(x, Tensor) and id(x) not in known:
                    if name not in _FROM_ZERO:
                        raise InputError(
                            f"CapturedStep: the first step of {type(self.optimizer).__name__} makes a state, {name}, "
                            "whose initial value is not known. Take a step before, or use AdamW"
                        )
                    x.zero_()

    def _fingerprint(self) -> dict[str, Any]:
        """What a graph has captured and would keep using, by its name in the error message."""
        kind = self._device.type
        fingerprint: dict[str, Any] = {
            "a parameter's place": [p.data_ptr() for p in self._parameters],
            "a parameter's requires_grad": [p.requires_grad for p in self._parameters],
            "train() or eval()": self.model.training,
            "the counting of experts' loads": [
                None if mixture.expert_loads is None else mixture.expert_loads.data_ptr()
                for mixture in mixtures_of(self.model)
            ],
            "autocast": torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
        }
        if self._graphs:  # without one, the first step has yet to make the states
            states = [state for p in self._parameters if (state := self.optimizer.state.get(p))]
            fingerprint["the place of the optimizer's states (were they loaded?)"] = [
                x.data_ptr() for state in states for x in state.values() if isinstance(x, Tensor)
            ]
        fingerprint["an option of the optimizer"] = [
            {name: group.get(name) for name in self.optimizer.defaults if name != "lr"} for group in self._groups
        ]
        return fingerprint

    def _drop_gradients(self) -> None:
        self.optimizer.zero_grad()  # ours counts backwards too
        for p in self._parameters:
            p.grad = None

    def _buffer(self, name: str, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if not isinstance(value, Tensor):
            raise InputError(
                f"CapturedStep: {name} is a {type(value).__name__}; inputs are tensors, numbers, strings or None"
            )
        if value.requires_grad:
            raise InputError(f"CapturedStep: {name} requires a gradient, which would stay inside the graph; detach it")
        return value.to("cpu" if name in self._fixed else self._device, copy=True)

    def _check(self, inputs: dict[str, Any]) -> None:
        if inputs.keys() != self._inputs.keys():
            raise InputError(f"CapturedStep: the inputs are {sorted(inputs)}, the example's {sorted(self._inputs)}")
        for name, value in inputs.items():
            example = self._inputs[name]
            if _kind(value) != _kind(example):
                raise InputError(
                    f"CapturedStep: {name} is {_kind(value)}, the example's {_kind(example)}. A graph has one shape: "
                    "pad the batch, or make a CapturedStep for each"
                )
            if name not in self._fixed:
                continue
            if not (torch.equal(value.to(example.device), example) if isinstance(value, Tensor) else value == example):
                raise InputError(
                    f"CapturedStep: {name} is {value!r}, the example's {example!r}, which is part of the graph. Give a "
                    "0-dim tensor in place of a number that changes, if the model takes one"
                )
        for what, value in self._fingerprint().items():
            if value != self._captured[what]:
                raise InputError(f"CapturedStep: {what} changed after the capture; make a new CapturedStep")


def _device(model: nn.Module, parameters: list[nn.Parameter]) -> torch.device:
    """The one device of all parameters."""
    if isinstance(model, nn.parallel.DistributedDataParallel) or any(hasattr(p, "device_mesh") for p in parameters):
        raise InputError("CapturedStep: DDP and sharded models (FSDP, tensor parallelism) are not supported")
    devices = {p.device for p in parameters}
    if len(devices) != 1 or (device := devices.pop()).type == "meta":
        raise InputError("CapturedStep: the parameters must be on one device, and not on meta; move the model before")
    return device


def _in_a_graph(p: Tensor) -> bool:
    """True if an autograd graph is alive that holds the node of p.grad: then asking twice gives the same node."""

    def node() -> Any:
        return torch.autograd.graph.get_gradient_edge(p).node

    node().metadata["seen"] = True
    return "seen" in node().metadata


def _first_cause(error: BaseException) -> str:
    """The first error of the chain, and the last line outside of torch that led to it."""
    while error.__context__ is not None:
        error = error.__context__
    ours = [f for f in traceback.extract_tb(error.__traceback__) if f"{os.sep}torch{os.sep}" not in f.filename]
    where = f" at {ours[-1].filename}:{ours[-1].lineno} ({ours[-1].line})" if ours else ""
    return f"{str(error).splitlines()[0] if str(error) else type(error).__name__}{where}"


def _kind(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
