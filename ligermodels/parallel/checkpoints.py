"""Checkpoints of a training run, on one process or many: written in one step, resumed exactly.

    with Checkpoints("runs/a", model, optimizer, scheduler=scheduler, data=loader) as checkpoints:
        for step in range(checkpoints.load(), steps):
            ...
            if (step + 1) % 500 == 0:
                checkpoints.save(step + 1, wait=False)
        checkpoints.save(steps)

`runs/a/step-00000500` is a folder of torch.distributed.checkpoint (DCP), one file per rank. `ligermodels convert` and
DCP read the model in it. Its keys:

| key                       | what                                                        | bytes                      |
| ---                       | ---                                                         | ---                        |
| model.NAME                | parameters, also frozen ones, and persistent buffers        | its own, on one rank only  |
| optimizer.NAME.KEY        | tensors of the optimizer, such as exp_avg                   | its own, on one rank only  |
| run                       | layout of the ranks; options and parameter names of the     | 200 per parameter tensor   |
|                           | optimizer                                                   |                            |
| extra.NAME, extra.NAME.R  | state_dict() of another object; of rank R, if ranks differ  | its own                    |
| rng.R                     | random states of rank R: torch's on the CPU and the current | 14,000                     |
|                           | GPU, Python's, numpy's                                      |                            |

DCP adds 2 kB per shard of a tensor. Per parameter trained with ligermodels.training.AdamW: 6 bytes for bf16 weights,
8 with master_weights=True, 12 with fp32 moments too; 12 for fp32 weights; with moments in 8 bits 4, 6 and 6. Per
frozen parameter: its own size.
Values that are not tensors are read with weights_only=True, so loading runs no code from a file.

Exact: on the same number of ranks and the same mesh, a resumed run computes the same bits as one that was not
interrupted, if its steps are deterministic. On others, weights, optimizer state and states that are the same on all
ranks are exact; the ranks' random states are left as they are, with a warning, and sums over ranks are rounded in
another order. AdamW's stochastic rounding draws the same bits everywhere.
Not stored: gradients (save between optimizer.zero_grad() and backward()), and the states of objects not given here.
Damage: checksums.json has the size and CRC-32 of each file. Each rank computes those of the files that it wrote, in
the thread that wrote them. `load` divides the files over the ranks and checks them before it changes anything: 2.2
GB/s per core. A file that is damaged, missing or of another checkpoint is an error that names the checkpoint before.

Checked against: torch 2.11 and 2.13, distributed/checkpoint.
"""

import errno
import hashlib
import io
import os
import random
import re
import shutil
import sys
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel

from ligermodels.checkpoint.dcp import CHECKSUMS, Reader, Writer, cause, checksum, one_process
from ligermodels.checkpoint.files import METADATA, absolute, json_bytes, readable_size
from ligermodels.checkpoint.saving import finish, sync
from ligermodels.checkpoint.weights import TensorInfo
from ligermodels.errors import CheckpointError, InputError
from ligermodels.processes import Processes

_COMPLETE, _PARTIAL = re.compile(r"step-(\d{8,})"), re.compile(r"step-\d{8,}\.partial")
_WRAPPERS = re.compile(r"(_orig_mod|_checkpoint_wrapped_module)\.")  # of torch.compile and checkpoint_wrapper


class Checkpoints:
    """Saves and resumes a training run in `folder`, on a disk that all ranks share. One run writes there at a time.

    Every rank makes one, after init_process_group and after the model is sharded, and calls the same methods in the
    same order. One process needs no process group.

    model: plain, FSDP2, tensor parallel, DistributedDataParallel, or compiled. optimizer: over parameters of the model.
    keep: number of checkpoints to keep, None for all. Older ones are removed once a new one is complete.
    frozen: False leaves out buffers and parameters that are not trained, such as the base model of adapters. `load`
        then needs a model that has them already.
    others: objects with state_dict() and load_state_dict(), such as a learning-rate scheduler or a data loader. Their
        states consist of what torch.load(weights_only=True) reads: numbers, strings, lists, dicts, plain tensors.
        A state that differs between ranks, such as a position in the data, resumes on the same ranks and mesh only.

    A checkpoint is written as step-NNNNNNNN.partial and renamed when all files are complete, read back and synced to
    the disk. If a process is killed, `load` finds the last complete checkpoint.
    Errors on one rank are raised on all. Raises InputError for arguments that cannot be saved.
    """

    def __init__(
        self,
        folder: str | Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        keep: int | None = 2,
        frozen: bool = True,
        **others: Any,
    ):
        if keep is not None and (type(keep) is not int or keep < 1):
            raise InputError(f"Checkpoints: keep={keep!r}; expected 1 or more checkpoints, or None for all")
        for name, item in others.items():
            if isinstance(item, nn.Module | torch.optim.Optimizer):
                raise InputError(
                    f"Checkpoints: {name} is a {type(item).__name__}; one model and one optimizer are saved"
                )
            if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
                raise InputError(f"Checkpoints: {name} lacks state_dict() or load_state_dict()")
        self.folder, self.keep, self.frozen = absolute(folder), keep, frozen
        self._model, self._optimizer, self._others = _unwrapped(model), optimizer, others
        # A CPU group of its own: a thread uses it while training uses the other groups.
        self._group = dist.new_group(backend="gloo") if dist.is_available() and dist.is_initialized() else None
        self._processes = Processes() if self._group is None else Processes.of_group(self._group)
        self._last: int | None = None  # the step that this object saved or loaded last
        self._writing: Future[None] | None = None
        self._copies: dict[str, Tensor] = {}  # in host memory, of what a save with wait=False writes
        self._thread: ThreadPoolExecutor | None = None
        self._closed = False
        if self._group is None:
            # Not around each save: the main thread could undo what a thread does to the list of filters.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", module=r"torch\.distributed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def save(self, step: int, *, wait: bool = True) -> None:
        """Saves the state after `step` steps.

        wait: False copies this rank's shards to host memory (pinned if they are on a GPU; reused by the next save) and
            writes them in a thread while training continues. The next save, load or close waits for it.

        Saving the step that was saved or loaded last does nothing.
        Raises CheckpointError if this save failed, or the previous one with wait=False. Older checkpoints are then
        unchanged, and the next save may be tried. Raises InputError for a step that is lower than the last or differs
        between ranks, and for a folder with checkpoints of a run that was not resumed.
        """
        self._wait()
        self._processes.from_main(lambda: self._check_step(step))
        steps = self._processes.gather(step)
        if len(set(steps)) > 1:
            raise InputError(f"Checkpoints.save: the ranks are at different steps: {sorted(set(steps))}")
        if step == self._last:
            return
        with self._processes.raise_on_all():
            tensors, optimizer = self._tensors()
            run = {"layout": self._layout(), "optimizer": optimizer}
            states = {name: _snapshot(item.state_dict(), name) for name, item in self._others.items()}
            state = {**tensors, "run": _snapshot(run, "the optimizer")[0], f"rng.{self._processes.rank}": _rng()}
            if not wait:
                self._copy(tensors)
        digests = self._processes.gather({name: digest for name, (_, digest) in states.items()})
        for name, (value, _) in states.items():
            is_same = len({each[name] for each in digests}) == 1
            state[f"extra.{name}" if is_same else f"extra.{name}.{self._processes.rank}"] = value
        if wait:
            self._write(step, state, {}, copy_ahead=10_000_000)
        else:
            if self._thread is None:
                cuda = torch.cuda.is_initialized()
                start: Any = (torch.cuda.set_device, (torch.cuda.current_device(),)) if cuda else (None, ())
                self._thread = ThreadPoolExecutor(1, "checkpoint", *start)
            self._writing = self._thread.submit(self._write, step, state, self._copies, copy_ahead=0)

    def load(self) -> int:
        """Resumes from the newest complete checkpoint. Returns its step; 0, and changes nothing, if there is none.

        Memory: the optimizer's state and the largest tensor of a file.
        Raises CheckpointError for a checkpoint that is damaged or of another model, optimizer, or number of ranks where
        that matters; an older checkpoint is never taken instead. Damage is found before anything is changed; after
        another error, model and optimizer may be half loaded.
        """
        self._wait()
        steps = self._processes.from_main(lambda: _steps(self.folder))
        if not steps:
            self._last = 0
            return 0
        step = max(steps)
        with self._processes.raise_on_all():
            reader = self._open(steps[step])
        with self._processes.raise_on_all():
            rng, warning = self._read(reader)
        if warning and self._processes.is_main:
            warnings.warn(f"{steps[step]} {warning}", stacklevel=2)
        if rng is not None:
            _set_rng(rng)
        self._last = step
        return step

    def close(self) -> None:
        """Waits until the checkpoint that is being written is complete. Raises CheckpointError if that failed."""
        if self._closed:
            return
        try:
            self._wait()
        finally:
            self._closed = True
            if self._thread is not None:
                self._thread.shutdown()
            self._copies.clear()
            if self._group is not None and dist.is_initialized():
                dist.destroy_process_group(self._group)
            # gloo's threads end with the last reference to their group. One that still drops its share of a collective
            # while the interpreter ends asks for the GIL, which aborts the process.
            self._group, self._processes = None, Processes()

    def _wait(self) -> None:
        if self._closed:
            raise InputError("Checkpoints: it is closed; make another")
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    # Saving

    def _check_step(self, step: int) -> None:
        if type(step) is not int or step < 0:
            raise InputError(f"Checkpoints.save: step={step!r}; expected the number of steps taken")
        newest = max(_steps(self.folder), default=-1)
        if newest >= 0 and self._last is None:
            raise InputError(
                f"Checkpoints.save: {self.folder} has step {newest} of an earlier run, which a restart would take for "
                "this one.\n  Next: call load() before the first step to resume that run, or give another folder."
            )
        if step <= newest and step != self._last:
            raise InputError(
                f"Checkpoints.save: step {step} comes after step {newest} in {self.folder}; steps must grow"
            )

    def _tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors of model and optimizer by key, and the optimizer's state_dict().

        In the latter, parameters are named, and tensors are on the meta device.
        """
        tensors = {f"model.{name}": tensor for name, tensor in self._model_state().items()}
        parameters, saved = self._parameters(), self._optimizer.state_dict()
        names = list(parameters)
        state: dict[str, dict[str, Any]] = {names[index]: dict(entries) for index, entries in saved["state"].items()}
        for name, entries in state.items():
            for key, value in entries.items():
                if not isinstance(value, Tensor):
                    continue
                if isinstance(parameters[name], DTensor) and not isinstance(value, DTensor) and value.dim():
                    raise InputError(
                        f"Checkpoints: {key} of {name} is a plain tensor, though its parameter is sharded, so its "
                        "rank is unknown. The optimizer has to keep DTensors."
                    )
                tensors[f"optimizer.{name}.{key}"] = value
                entries[key] = torch.empty(value.shape, dtype=value.dtype, device="meta")
        groups = [{**group, "params": [names[i] for i in group["params"]]} for group in saved["param_groups"]]
        return tensors, {"kind": type(self._optimizer).__name__, "state": state, "param_groups": groups}

    def _copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies this rank's shards to host memory, which is reused by the next save."""
        for name in self._copies.keys() - tensors.keys():
            del self._copies[name]
        cuda = False
        for name, tensor in tensors.items():
            shard = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            copy = self._copies.get(name)
            if copy is None or (copy.shape, copy.dtype) != (shard.shape, shard.dtype):
                copy = torch.empty(shard.shape, dtype=shard.dtype, pin_memory=shard.is_cuda)
            self._copies[name] = copy.copy_(shard.detach(), non_blocking=True)
            cuda |= shard.is_cuda
        if cuda:
            torch.cuda.current_stream().synchronize()

    def _write(self, step: int, state: dict[str, Any], copies: Mapping[str, Tensor], *, copy_ahead: int) -> None:
        """Writes a checkpoint, in the caller's thread or another.

        copies: {key: this rank's shard}, to be written in place of the tensors of `state`, which training may change.
        """
        complete = self.folder / f"step-{step:08d}"
        partial = complete.with_name(f"{complete.name}.partial")
        size = sum(value.numel() * value.itemsize for value in state.values() if isinstance(value, Tensor))
        free: int | None = None
        try:
            free, size = self._processes.from_main(lambda: (_make(partial), size))  # sizes of all ranks together
            if size > free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            writer = Writer(partial, per_thread_copy_ahead=copy_ahead)  # syncs each file
            planner, no_dist = _SavePlanner(copies), self._group is None
            dcp.save(state, storage_writer=writer, planner=planner, process_group=self._group, no_dist=no_dist)
            with self._processes.raise_on_all():
                rank_sums = {path.name: checksum(path) for path in partial.glob(f"__{self._processes.rank}_*.distcp")}
            sums = {name: value for of_rank in self._processes.gather(rank_sums) for name, value in of_rank.items()}
            self._processes.from_main(lambda: _publish(partial, complete, sums))
        except (Exception, CheckpointException) as error:  # the latter is a BaseException
            if self._processes.is_main:
                shutil.rmtree(partial, ignore_errors=True)
            reason, space = str(error), ""
            failure: BaseException = error
            if isinstance(error, CheckpointException):
                rank, (failure, _) = next(iter(error.failures.items()))
                reason = f"rank {rank}: {type(failure).__name__}: {failure}"
            code = getattr(failure, "errno", None)  # of a failure of the file system, on this rank or another
            if code is not None and free is not None:
                space = f"\n  It takes {readable_size(size)}, and {readable_size(free)} were free on its disk."
            if code in (errno.ENOSPC, errno.EDQUOT):
                space += "\n  Next: free some space, or give a folder on another disk."
            raise CheckpointError(
                f"Checkpoints: step {step} could not be saved to {self.folder}: {reason}\n"
                f"  The checkpoints before it are unchanged.{space}"
            ) from error
        self._last = step
        self._processes.from_main(lambda: _remove_old(self.folder, self.keep))

    # Loading

    def _open(self, folder: Path) -> Reader:
        """Checks this rank's share of the files of a checkpoint. Raises CheckpointError for damage."""
        try:
            reader = Reader(folder, verify=False)
            if self._processes.is_main:
                reader.check_files()
            if "run" in reader.metadata.state_dict_metadata and reader.checksums is None:
                raise CheckpointError(f"{folder / CHECKSUMS} is not there.\n  Likely: a copy left it out.")
            if reader.checksums is not None:
                reader.verify(reader.files[self._processes.rank :: self._processes.size])
        except CheckpointError as error:
            raise CheckpointError(f"{error}\n{_next_step(folder)}") from error
        return reader

    def _read(self, reader: Reader) -> tuple[Any, str]:
        """Fills model, optimizer and the other objects. Returns this rank's random state, or None, and a warning."""
        if "run" not in reader.metadata.state_dict_metadata:
            raise CheckpointError(
                f"{reader.folder} was not written by Checkpoints: it has no `run`, and so no optimizer state to resume "
                "from.\n  Next: to start from its weights, convert it (`ligermodels convert`) and load the result; or "
                "move it elsewhere."
            )
        run = _load(reader, {"run": None})["run"]
        is_same_layout = run["layout"] == self._layout()
        model = self._model_state()
        state: dict[str, Any] = {f"model.{name}": tensor for name, tensor in model.items()}
        self._check_model(reader, state)
        optimizer = self._empty_optimizer_state(reader.folder, run["optimizer"])
        for index, name in enumerate(self._parameters()):
            tensors = {key: x for key, x in optimizer["state"].get(index, {}).items() if isinstance(x, Tensor)}
            state |= {f"optimizer.{name}.{key}": x for key, x in tensors.items()}
        reader.check_whole(state)
        keys = {name: self._key_of(name, reader, run["layout"]) for name in self._others}
        rng = f"rng.{self._processes.rank}"
        objects = [*keys.values(), *([rng] if is_same_layout else [])]
        state = _load(reader, {**state, **dict.fromkeys(objects)})

        set_model_state_dict(self._model, dict(model), options=StateDictOptions(strict=self.frozen))
        self._optimizer.load_state_dict(optimizer)
        for name, item in self._others.items():
            item.load_state_dict(state[keys[name]])

        warning = []
        if not is_same_layout:
            warning.append(
                f"was saved on {run['layout']} and is resumed on {self._layout()}: the random states of the ranks are "
                "left as they are, so dropout and sampling draw other numbers."
            )
        if dropped := sorted(_extras(reader) - self._others.keys()):
            warning.append(f"has a state of {', '.join(dropped)}, which is not resumed.")
        return state.get(rng), " It ".join(warning)

    def _check_model(self, reader: Reader, state: Mapping[str, Tensor]) -> None:
        """Raises CheckpointError unless the names, shapes and dtypes of the checkpoint are the model's."""
        stored = {name: info for name, info in reader.headers.items() if name.startswith("model.")}
        ours = {name: TensorInfo(tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}
        wrong = [f"{name.removeprefix('model.')} is only in the model" for name in ours if name not in stored]
        wrong += [f"{name.removeprefix('model.')} is only in the checkpoint" for name in stored if name not in ours]
        for name in ours.keys() & stored.keys():
            if ours[name] != stored[name]:
                there, here = (f"{list(x[name].shape)} {x[name].dtype}" for x in (stored, ours))
                wrong.append(f"{name.removeprefix('model.')} is {there} there and {here} in the model")
        if wrong:
            more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise CheckpointError(
                f"{reader.folder} is of another model: {'; '.join(sorted(wrong)[:3])}{more}.\n"
                "  Next: build the model with the config and dtype that the run began with, or give another folder."
            )

    def _empty_optimizer_state(self, folder: Path, stored: Mapping[str, Any]) -> dict[str, Any]:
        """A state_dict() for the optimizer, with uninitialised tensors that are sharded as their parameters are.

        torch's get_optimizer_state_dict is not used: an optimizer that has no state yet would take a step, and
        checkpoints in which a parameter never had a gradient would be refused.
        Raises CheckpointError for the state of another optimizer.
        """
        parameters, kind = self._parameters(), type(self._optimizer).__name__
        index = {name: number for number, name in enumerate(parameters)}
        advice = "  Next: build the optimizer as the run did, or start a run of its own in another folder."
        if kind != stored["kind"]:
            raise CheckpointError(f"{folder} has the state of {stored['kind']}, not {kind}.\n{advice}")
        theirs = [sorted(index.get(name, -1) for name in group["params"]) for group in stored["param_groups"]]
        ours = [group["params"] for group in self._optimizer.state_dict()["param_groups"]]
        if ours != theirs:
            counts = [", ".join(str(len(group)) for group in groups) for groups in (theirs, ours)]
            raise CheckpointError(
                f"{folder} has other parameter groups: {counts[0]} parameters there, {counts[1]} in this optimizer, or "
                f"other ones.\n{advice}"
            )

        def empty(like: Tensor, x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            if x.shape == like.shape:
                return torch.empty_like(like, dtype=x.dtype, requires_grad=False)
            if not x.dim() or not isinstance(like, DTensor):
                return torch.empty(x.shape, dtype=x.dtype)
            # Such as the exponents of a parameter's blocks: sharded as it is. Distributed checkpoints place shards by
            # this function, too.
            shape, _ = compute_local_shape_and_global_offset(x.shape, like.device_mesh, like.placements)
            local = torch.empty(shape, dtype=x.dtype)
            stride = torch.empty(x.shape, device="meta").stride()
            return DTensor.from_local(local, like.device_mesh, like.placements, shape=x.shape, stride=stride)

        state = {
            index[name]: {key: empty(parameters[name], x) for key, x in entries.items()}
            for name, entries in stored["state"].items()
        }
        groups = [
            {  # a learning rate that is a tensor goes back to its device
                key: x.to(now[key].device) if isinstance(x, Tensor) and isinstance(now.get(key), Tensor) else x
                for key, x in group.items()
            }
            | {"params": params}
            for group, now, params in zip(stored["param_groups"], self._optimizer.param_groups, ours, strict=True)
        ]
        return {"state": state, "param_groups": groups}

    def _key_of(self, name: str, reader: Reader, layout: str) -> str:
        """The key of the state of one of the other objects on this rank."""
        keys, rank_key = reader.metadata.state_dict_metadata, f"extra.{name}.{self._processes.rank}"
        if f"extra.{name}" in keys:
            return f"extra.{name}"
        if name not in (extras := _extras(reader)):
            has = ", ".join(sorted(extras)) or "none of such objects"
            raise CheckpointError(
                f"{reader.folder} has no state of {name!r}; it has {has}.\n"
                f"  Next: leave {name}=... out of Checkpoints for this load, or give it the name of the run before."
            )
        if layout != self._layout() or rank_key not in keys:
            raise CheckpointError(
                f"{reader.folder} has another state of {name!r} for each rank of {layout}; this run has "
                f"{self._layout()}.\n  Next: resume on the same, or leave {name}=... out of Checkpoints and set its "
                "position by hand."
            )
        return rank_key

    # The model and the optimizer

    def _model_state(self) -> dict[str, Tensor]:
        """The tensors of the model, sharing its memory. FSDP2 reshards its parameters for that."""
        state = get_model_state_dict(self._model)
        if not self.frozen:
            trained = {_WRAPPERS.sub("", name) for name, p in self._model.named_parameters() if p.requires_grad}
            state = {name: tensor for name, tensor in state.items() if name in trained}
        for name, tensor in state.items():
            if not isinstance(tensor, Tensor):
                raise InputError(
                    f"Checkpoints: {name} of the model is a {type(tensor).__name__}; expected tensors only"
                )
            if tensor.is_meta:
                raise InputError(
                    f"Checkpoints: {name} is on the meta device; load weights into the model, or draw them"
                )
        return state  # type: ignore[return-value]

    def _parameters(self) -> dict[str, Tensor]:
        """The optimizer's parameters, in its order, by their names in the state of the model."""
        names: dict[Tensor, str] = {p: _WRAPPERS.sub("", name) for name, p in self._model.named_parameters()}
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        for p in parameters:
            if p not in names:
                raise InputError(
                    f"Checkpoints: the optimizer has a parameter of shape {tuple(p.shape)} that is not the "
                    "model's. Make the optimizer after the model is sharded."
                )
        return {names[p]: p for p in parameters}

    def _layout(self) -> str:
        """The number of ranks and the sizes of the mesh, on which per-rank states depend."""
        ranks = f"{self._processes.size} rank{'s' if self._processes.size > 1 else ''}"
        meshes = [p.device_mesh for p in self._model.parameters() if isinstance(p, DTensor)]
        if not meshes:
            return ranks
        # `parallelize` sets the whole mesh; in those of the parameters, dp_shard and cp are one dimension.
        parallels: list[Any] = [getattr(module, "parallel", None) for module in self._model.modules()]
        whole = [parallel.mesh for parallel in parallels if hasattr(parallel, "mesh")]
        mesh = whole[0] if whole else max(meshes, key=lambda mesh: mesh.ndim)
        names = mesh.mesh_dim_names or [f"dimension {i}" for i in range(mesh.ndim)]
        sizes = [f"{name} {size}" for name, size in zip(names, mesh.shape, strict=True) if size > 1]
        return f"{ranks} ({', '.join(sizes)})" if sizes else ranks


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model in DistributedDataParallel and torch.compile."""
    while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, DistributedDataParallel) else model._orig_mod  # type: ignore[assignment]
    return model


class _SavePlanner(dcp.DefaultSavePlanner):
    """Writes copies in place of tensors. torch 2.11's own stager cannot copy all that 2.13's can."""

    def __init__(self, copies: Mapping[str, Tensor]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._copies = copies

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._copies[index.fqn] if index.fqn in self._copies else super().lookup_object(index)


class _LoadPlanner(dcp.DefaultLoadPlanner):
    """Reads objects with weights_only=True, where torch's planner would run code from the file."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            self.state_dict[name] = torch.load(value, map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointError(
                f"{name}: {_brief(error)}\n  Likely: damaged, or made to run code on who loads it, which was refused."
            ) from error


def _load(reader: Reader, state: dict[str, Any]) -> dict[str, Any]:
    """Reads into the tensors of `state`, and sets its other values. Ranks read alone: none waits for one that fails."""
    planner = _LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with one_process():
            dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as error:
        raise CheckpointError(f"{cause(error)}\n{_next_step(reader.folder)}") from error
    return state


def _snapshot(state: Any, name: str) -> tuple[Any, str]:
    """A copy of a state on the CPU, and its SHA-256. Raises InputError for what weights_only=True would not read."""
    file = io.BytesIO()
    try:
        torch.save(state, file)
        file.seek(0)
        copy = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise InputError(
            f"Checkpoints: the state of {name} cannot be saved: {_brief(error)}\n"
            "  Next: have its state_dict() consist of numbers, strings, lists, dicts and plain tensors."
        ) from error
    return copy, hashlib.sha256(file.getbuffer()).hexdigest()


def _brief(error: Exception) -> str:
    """torch's message without its advice to unpickle everything."""
    if match := re.search(r"GLOBAL (\S+)", str(error)):
        return f"it has a {match[1]}"
    return "it is not a pickle that torch reads" if "Weights only" in str(error) else f"{type(error).__name__}: {error}"


def _extras(reader: Reader) -> set[str]:
    """The names of the other objects in a checkpoint."""
    return {key.split(".")[1] for key in reader.metadata.state_dict_metadata if key.startswith("extra.")}


# Folders


def _steps(folder: Path) -> dict[int, Path]:
    """{step: folder} of the complete checkpoints."""
    if not folder.is_dir():
        return {}
    matches = {path: _COMPLETE.fullmatch(path.name) for path in folder.iterdir()}
    return {int(match[1]): path for path, match in matches.items() if match is not None}


def _make(partial: Path) -> int:
    """Makes the folder to write to, removes unfinished ones of killed runs, and returns the free bytes."""
    partial.parent.mkdir(parents=True, exist_ok=True)
    for path in list(partial.parent.iterdir()):
        if _PARTIAL.fullmatch(path.name):
            shutil.rmtree(path)
    partial.mkdir()
    return shutil.disk_usage(partial).free


def _publish(partial: Path, complete: Path, sums: Mapping[str, Any]) -> None:
    """Adds the checksums of all ranks' files to a complete folder, and gives it its final name."""
    finish(partial, {CHECKSUMS: json_bytes({"files": {METADATA: checksum(partial / METADATA), **sums}})})
    try:
        Reader(partial).check_files()
    except CheckpointError as error:
        raise CheckpointError(f"{error}\n  Likely: {partial.parent} is not on a disk that all ranks share.") from error
    partial.rename(complete)
    sync(complete.parent)


def _remove_old(folder: Path, keep: int | None) -> None:
    steps = _steps(folder)
    for step in sorted(steps)[:-keep] if keep else ():
        try:
            # Renamed first: if the removal is interrupted, the rest is not taken for a checkpoint.
            shutil.rmtree(steps[step].rename(steps[step].with_name(f"{steps[step].name}.partial")))
        except OSError as error:
            raise CheckpointError(f"Checkpoints: {steps[step]} could not be removed: {error}") from error


def _next_step(folder: Path) -> str:
    """What to do about a damaged `folder`, with the name of the checkpoint before it."""
    steps = sorted(_steps(folder.parent).items())
    before = [path.name for _, path in steps if path != folder]
    if not before:
        return f"  Next: copy its files again. {folder.parent} has no checkpoint before it to resume from."
    return f"  Next: delete {folder} to resume from {before[-1]}, or copy its files again."


# Random numbers


def _rng() -> dict[str, Any]:
    """The random states of this process; on a GPU, that of the current one."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (kind, keys.tolist(), *rest)
    return state


def _set_rng(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(state["numpy"])
