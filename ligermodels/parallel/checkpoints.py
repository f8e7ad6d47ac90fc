"""Checkpoints of a training run, on one process or many: written in one step, resumed exactly.

    with Checkpoints("runs/a", model, optimizer, scheduler=scheduler, data=loader) as checkpoints:
        for step in range(checkpoints.load(), steps):
            ...
            if (step + 1) % 500 == 0:
                checkpoints.save(step + 1, wait=False)
        checkpoints.save(steps)

`runs/a/step-00000500` is a folder of torch.distributed.checkpoint (DCP), in which each rank has a file. `ligermodels
convert` and DCP read the model in it. Only tensors are stored, so that resuming runs no code out of a file:

| key                       | what                                                        | bytes                      |
| ---                       | ---                                                         | ---                        |
| model.NAME                | parameters, frozen ones too, and persistent buffers         | its own, on one rank only  |
| optimizer.NAME.KEY        | the tensors of the optimizer, such as exp_avg               | its own, on one rank only  |
| run                       | step, ranks, mesh; options and parameter names of the       | 150 per parameter tensor   |
|                           | optimizer                                                   |                            |
| extra.NAME, extra.NAME.R  | state_dict() of a further object; of rank R, if it differs  | its own                    |
| rng.R                     | random states of rank R: torch's on the CPU and the current | 16,000                     |
|                           | GPU, Python's, numpy's                                      |                            |

DCP adds 2 kB per shard of a tensor. Per parameter trained with ligermodels.training.AdamW: 6 bytes for bf16 weights,
8 with master_weights=True, 12 with fp32 moments too; 12 for fp32 weights. Per frozen parameter: its own size.

Exact: on the same number of ranks and the same mesh, a run that is resumed computes the same bits as one that was not
interrupted, if its steps are deterministic. On others, weights, optimizer state and what is the same on all ranks are
exact. The random states of the ranks cannot be mapped and are left as they are, with a warning; sums over ranks are
rounded in another order. AdamW's stochastic rounding draws the same bits everywhere.
Not stored: gradients (save between optimizer.zero_grad() and backward()), and what is in no object given here.
Damage: checksums.json holds the size and CRC-32 of each file. Each rank computes those of the files that it wrote, in
the thread that wrote them, and `load` checks each file on one of the ranks before anything is read into the model: 2.2
GB/s and core. A file that is damaged, missing or of another checkpoint is an error, which names the checkpoint before.

Under `torchrun --max-restarts N`, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: without it, processes that torch 2.13
starts again find the addresses of those that died (pytorch#135712), and init_process_group fails or hangs.

Checked against: torch 2.11 and 2.13, distributed/checkpoint.
"""

import contextlib
import errno
import hashlib
import io
import os
import random
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ligermodels.checkpoint.dcp import CHECKSUMS, Reader, Writer, checksum, one_process
from ligermodels.checkpoint.files import METADATA, absolute, json_bytes
from ligermodels.checkpoint.saving import finish, sync
from ligermodels.checkpoint.weights import TensorInfo
from ligermodels.errors import CheckpointError, InputError, LigermodelsError

_COMPLETE, _PARTIAL = re.compile(r"step-(\d{8,})"), re.compile(r"step-\d{8,}\.partial")
_WRAPPERS = re.compile(r"(_orig_mod|_checkpoint_wrapped_module)\.")  # of torch.compile and checkpoint_wrapper
_T = TypeVar("_T")


class Checkpoints:
    """Saves and resumes a training run in `folder`, on a disk that all ranks share. One run writes there at a time.

    Every rank makes one, after init_process_group and after the model is sharded, and calls the same methods in the
    same order. Without a process group it serves one process.

    model: plain, FSDP2, tensor parallel, DistributedDataParallel, or compiled. optimizer: over parameters of the model.
    keep: so many of the newest complete checkpoints stay, None for all; older ones go once a new one is complete.
    frozen: False leaves out parameters that are not trained, as of the base of adapters, and buffers: `load` then needs
        a model that holds them already.
    others: further objects with state_dict() and load_state_dict(), such as a learning-rate scheduler or a data loader.
        Their states consist of what torch.load(weights_only=True) reads: numbers, strings, lists, dicts, plain tensors.
        A state that differs between ranks (the data position of each) resumes on the same ranks and mesh only.

    A checkpoint is written as step-NNNNNNNN.partial and renamed once all files are complete, read back and on the disk:
    whatever is killed at whatever moment, `load` finds the last one that was complete, whole.
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
        self._ranks = _Ranks()
        self._last: int | None = None  # the step that this object saved or loaded last
        self._writing: Future[None] | None = None
        self._copies: dict[str, Tensor] = {}  # in host memory, of what a save with wait=False writes
        self._thread: ThreadPoolExecutor | None = None
        self._closed = False
        if self._ranks.group is None:
            # Not around each save: what a thread does to the list of filters, the main thread may undo.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", module=r"torch\.distributed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def save(self, step: int, *, wait: bool = True) -> None:
        """Saves the state after `step` steps.

        wait: False copies this rank's shards to host memory (pinned, where they are on a GPU; kept for the next time)
            and writes them in a thread, while training goes on. The next save, load or close waits for that.

        Saving the step that was saved or loaded last does nothing.
        Raises CheckpointError if this save, or the one before with wait=False, failed; then the older checkpoints are
        as they were, and the next save may be tried. Raises InputError for steps that fall or differ between ranks, and
        for a folder with checkpoints of a run that was not resumed.
        """
        self._wait()
        check = self._check_step if self._ranks.is_main else lambda step: None
        _, steps = self._ranks.gather(lambda: check(step), lambda _: step)
        if len(set(steps)) > 1:
            raise InputError(f"Checkpoints.save: the ranks are at different steps: {sorted(set(steps))}")
        if step == self._last:
            return

        def collect() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
            tensors, blobs = self._state(step)
            if not wait:
                self._copy(tensors)
            return tensors, blobs

        (tensors, blobs), digests = self._ranks.gather(collect, lambda found: _digests(found[1]))
        for name, blob in blobs.items():
            same = name == "run" or (name != "rng" and len({each[name] for each in digests}) == 1)
            tensors[name if same else f"{name}.{self._ranks.rank}"] = blob
        if wait:
            self._write(step, tensors, {}, copy_ahead=10_000_000)
        else:
            if self._thread is None:
                cuda = torch.cuda.is_initialized()
                start: Any = (torch.cuda.set_device, (torch.cuda.current_device(),)) if cuda else (None, ())
                self._thread = ThreadPoolExecutor(1, "checkpoint", *start)
            self._writing = self._thread.submit(self._write, step, tensors, self._copies, copy_ahead=0)

    def load(self) -> int:
        """Resumes from the newest complete checkpoint. Returns its step; 0, and changes nothing, if there is none.

        Memory: what the optimizer's state takes, and the largest tensor of a file.
        Raises CheckpointError for a checkpoint of another model, optimizer, or number of ranks where that matters, and
        for one that is damaged; never takes an older one instead. Damage is found before anything is changed; after
        another error, model and optimizer may be half loaded.
        """
        self._wait()
        steps = self._ranks.on_main(lambda: _steps(self.folder))
        if not steps:
            self._last = 0
            return 0
        step = max(steps)
        reader, _ = self._ranks.gather(lambda: self._open(steps[step]))
        (rng, warning), _ = self._ranks.gather(lambda: self._read(reader))
        if warning and self._ranks.is_main:
            warnings.warn(f"{steps[step]} {warning}", stacklevel=2)
        if rng is not None:
            _set_rng(rng)
        self._last = step
        return step

    def close(self) -> None:
        """Waits until what is being written is complete. Raises CheckpointError if that failed."""
        if self._closed:
            return
        try:
            self._wait()
        finally:
            self._closed = True
            if self._thread is not None:
                self._thread.shutdown()
            self._copies.clear()
            self._ranks.close()

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
        found = max(_steps(self.folder), default=-1)
        if found >= 0 and self._last is None:
            raise InputError(
                f"Checkpoints.save: {self.folder} has step {found} of an earlier run, which a restart would take for "
                "this one.\n  Next: call load() before the first step to resume that run, or give another folder."
            )
        if step <= found and step != self._last:
            raise InputError(
                f"Checkpoints.save: step {step} comes after step {found} in {self.folder}; steps must grow"
            )

    def _state(self, step: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The tensors of model and optimizer, and the packed states of all else."""
        tensors = {f"model.{name}": tensor for name, tensor in self._model_state().items()}
        names = self._names()
        held: dict[str, Any] = {"kind": type(self._optimizer).__name__, "tensors": {}, "values": {}}
        state = self._optimizer.state_dict()
        order = [names[p] for group in self._optimizer.param_groups for p in group["params"]]
        held["groups"] = [{**group, "params": [order[i] for i in group["params"]]} for group in state["param_groups"]]
        parameters = {name: p for p, name in names.items()}
        for index, values in state["state"].items():
            name = order[index]
            held["tensors"][name] = [key for key, value in values.items() if isinstance(value, Tensor)]
            held["values"][name] = {key: value for key, value in values.items() if not isinstance(value, Tensor)}
            for key in held["tensors"][name]:
                if isinstance(parameters[name], DTensor) and not isinstance(values[key], DTensor) and values[key].dim():
                    raise InputError(
                        f"Checkpoints: {key} of {name} is a plain tensor, though its parameter is sharded: of whose "
                        "rank would it be? The optimizer has to keep DTensors."
                    )
                tensors[f"optimizer.{name}.{key}"] = values[key]
        run = {"step": step, "layout": self._layout(), "optimizer": held}
        blobs = {"run": _packed(run, "the optimizer"), "rng": _packed(_rng(), "random")}
        blobs |= {f"extra.{name}": _packed(item.state_dict(), name) for name, item in self._others.items()}
        return tensors, blobs

    def _copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies this rank's shards to host memory, which is kept for the next time."""
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

    def _write(self, step: int, tensors: dict[str, Tensor], copies: Mapping[str, Tensor], *, copy_ahead: int) -> None:
        """Writes a checkpoint, in whichever thread. What it asks of other ranks goes through their CPU group.

        copies: {name: this rank's shard}, of those that are not to be read from `tensors` any more.
        """
        complete = self.folder / f"step-{step:08d}"
        partial = complete.with_name(f"{complete.name}.partial")
        size = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())  # of all ranks
        free = 0
        try:
            free = self._ranks.on_main(lambda: _make(partial))
            if self._ranks.on_main(lambda: size > free):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            writer = Writer(partial, per_thread_copy_ahead=copy_ahead)  # syncs each file
            planner = _Planner(copies)
            group = self._ranks.group
            dcp.save(tensors, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
            own = f"__{self._ranks.rank}_*.distcp"
            _, sums = self._ranks.gather(lambda: {path.name: checksum(path) for path in partial.glob(own)}, dict)
            self._ranks.on_main(lambda: _publish(partial, complete, sums))
        except (Exception, CheckpointException) as error:  # the latter is a BaseException
            if self._ranks.is_main:
                shutil.rmtree(partial, ignore_errors=True)
            reason, full = _reason(error), ""
            if any(os.strerror(code) in reason for code in (errno.ENOSPC, errno.EDQUOT)):
                full = (
                    f"\n  The disk is full: the checkpoint takes {size / 1e9:.2f} GB, and {free / 1e9:.2f} GB were "
                    "free.\n  Next: free some space, or give a folder on another disk."
                )
            raise CheckpointError(
                f"Checkpoints: step {step} could not be saved to {self.folder}: {reason}\n"
                f"  The checkpoints before it are as they were.{full}"
            ) from error
        self._last = step
        self._ranks.on_main(lambda: _remove_old(self.folder, self.keep))

    # Loading

    def _open(self, folder: Path) -> Reader:
        """Checks the files of a checkpoint, which the ranks divide. Raises CheckpointError for damage."""
        with _damage(folder):
            reader = Reader(folder, verify=False)
            if self._ranks.is_main:
                reader.check_files()
            if "run" in reader.headers and reader.checksums is None:
                raise CheckpointError(
                    f"{folder / CHECKSUMS} is not there.\n  Likely: a copy left it out; or an earlier version of "
                    "ligermodels wrote the checkpoint, which resumes from it still."
                )
            if reader.checksums is not None:
                reader.verify(reader.files[self._ranks.rank :: self._ranks.size])
        return reader

    def _read(self, reader: Reader) -> tuple[Any, str]:
        """Fills model, optimizer and the other objects. Returns this rank's random state, and what to warn of."""
        folder = reader.folder
        if "run" not in reader.headers:
            raise CheckpointError(
                f"{folder} was not written by Checkpoints: it has no `run`, and so no optimizer state to resume from.\n"
                "  Next: to start from its weights, convert it (`ligermodels convert`) and load the result; or move it "
                "elsewhere."
            )
        run = _state_at(reader, _load(reader, {"run": _buffer(reader, "run")}), "run")
        same_layout = run["layout"] == self._layout()
        model = self._model_state()
        wanted = {f"model.{name}": tensor for name, tensor in model.items()}
        self._check_model(reader, wanted)
        optimizer = self._optimizer_buffers(reader, run["optimizer"])
        wanted |= {f"optimizer.{name}.{key}": x for name, state in optimizer.items() for key, x in state.items()}
        places = {name: self._place_of(name, reader, run["layout"]) for name in self._others}
        wanted |= {place: _buffer(reader, place) for place in places.values()}
        rng = f"rng.{self._ranks.rank}"
        if same_layout:
            wanted[rng] = _buffer(reader, rng)
        reader.check_whole(wanted)
        _load(reader, wanted)

        set_model_state_dict(self._model, dict(model), options=StateDictOptions(strict=self.frozen))
        order = {name: number for number, name in enumerate(name for names in self._groups() for name in names)}
        groups = []  # with the parameters in the order of this optimizer
        for group, now in zip(run["optimizer"]["groups"], self._optimizer.param_groups, strict=True):
            options = {  # a learning rate that is a tensor goes back to its device
                key: x.to(now[key].device) if isinstance(x, Tensor) and isinstance(now.get(key), Tensor) else x
                for key, x in group.items()
            }
            groups.append({**options, "params": sorted(order[name] for name in group["params"])})
        state = {order[name]: {**optimizer[name], **run["optimizer"]["values"][name]} for name in optimizer}
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})
        for name, item in self._others.items():
            item.load_state_dict(_state_at(reader, wanted, places[name]))

        warning = []
        if not same_layout:
            warning.append(
                f"was saved on {run['layout']} and is resumed on {self._layout()}: the random states of the ranks are "
                "left as they are, so dropout and sampling go on with other numbers."
            )
        if left := sorted(_extras(reader) - self._others.keys()):
            warning.append(f"has a state of {', '.join(left)}, which is not resumed.")
        return _state_at(reader, wanted, rng) if same_layout else None, " It ".join(warning)

    def _check_model(self, reader: Reader, wanted: Mapping[str, Tensor]) -> None:
        """Raises CheckpointError unless the names, shapes and dtypes of the checkpoint are the model's."""
        stored = {name: info for name, info in reader.headers.items() if name.startswith("model.")}
        ours = {name: TensorInfo(tensor.dtype, tuple(tensor.shape)) for name, tensor in wanted.items()}
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

    def _optimizer_buffers(self, reader: Reader, held: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
        """Uninitialised tensors for the optimizer's state, sharded as their parameters are.

        Not by torch's get_optimizer_state_dict: where an optimizer has no state yet, that takes a step to make one,
        and it refuses checkpoints in which a parameter never had a gradient.
        Raises CheckpointError for the state of another optimizer.
        """
        kind, ours, theirs = type(self._optimizer).__name__, self._groups(), [x["params"] for x in held["groups"]]
        next_step = "  Next: build the optimizer as the run did, or start a run of its own in another folder."
        if kind != held["kind"]:
            raise CheckpointError(f"{reader.folder} has the state of {held['kind']}, not {kind}.\n{next_step}")
        if [set(names) for names in theirs] != [set(names) for names in ours]:
            counts = [", ".join(str(len(names)) for names in groups) for groups in (theirs, ours)]
            raise CheckpointError(
                f"{reader.folder} has other parameter groups: {counts[0]} parameters there, {counts[1]} in this "
                f"optimizer, or other ones.\n{next_step}"
            )
        parameters = {name: p for p, name in self._names().items()}
        found: dict[str, dict[str, Tensor]] = {}
        for name, keys in held["tensors"].items():
            p, found[name] = parameters[name], {}
            for key in keys:
                place = f"optimizer.{name}.{key}"
                if place not in reader.headers:
                    raise CheckpointError(f"{reader.folder} lacks {place}.\n{_next_step(reader.folder)}")
                info = reader.headers[place]
                like = info.shape == tuple(p.shape)
                found[name][key] = (
                    torch.empty_like(p, dtype=info.dtype, requires_grad=False) if like else _buffer(reader, place)
                )
        return found

    def _place_of(self, name: str, reader: Reader, layout: str) -> str:
        """The key of the state of one of the other objects on this rank."""
        place = f"extra.{name}"
        if place in reader.headers:
            return place
        own = f"{place}.{self._ranks.rank}"
        if not any(key.startswith(f"{place}.") for key in reader.headers):
            has = ", ".join(sorted(_extras(reader))) or "none of such objects"
            raise CheckpointError(
                f"{reader.folder} has no state of {name!r}; it has {has}.\n"
                f"  Next: leave {name}=... out of Checkpoints for this load, or give it the name of the run before."
            )
        if layout != self._layout():
            raise CheckpointError(
                f"{reader.folder} has another state of {name!r} for each rank of {layout}; this run has "
                f"{self._layout()}.\n  Next: resume on the same, or leave {name}=... out of Checkpoints and set its "
                "position by hand."
            )
        return own

    # The model and the optimizer

    def _model_state(self) -> dict[str, Tensor]:
        """The tensors of the model, sharing its memory. FSDP2 shards its parameters again for that."""
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

    def _names(self) -> dict[Tensor, str]:
        """{parameter: its name in the state of the model}."""
        names: dict[Tensor, str] = {p: _WRAPPERS.sub("", name) for name, p in self._model.named_parameters()}
        for group in self._optimizer.param_groups:
            for p in group["params"]:
                if p not in names:
                    raise InputError(
                        f"Checkpoints: the optimizer has a parameter of shape {tuple(p.shape)} that is not the "
                        "model's. Make the optimizer after the model is sharded."
                    )
        return names

    def _groups(self) -> list[list[str]]:
        names = self._names()
        return [[names[p] for p in group["params"]] for group in self._optimizer.param_groups]

    def _layout(self) -> str:
        """What per-rank states depend on: the number of ranks, and how a mesh arranges them."""
        ranks = f"{self._ranks.size} rank{'s' if self._ranks.size > 1 else ''}"
        meshes = [p.device_mesh for p in self._model.parameters() if isinstance(p, DTensor)]
        if not meshes:
            return ranks
        # The whole mesh where `parallelize` made the model: in those of the parameters, dp_shard and cp are one.
        spread: list[Any] = [getattr(module, "parallel", None) for module in self._model.modules()]
        whole = [x.mesh for x in spread if hasattr(x, "mesh")]
        mesh = whole[0] if whole else max(meshes, key=lambda mesh: mesh.ndim)
        names = mesh.mesh_dim_names or [f"dimension {i}" for i in range(mesh.ndim)]
        sizes = [f"{name} {size}" for name, size in zip(names, mesh.shape, strict=True) if size > 1]
        return f"{ranks} ({', '.join(sizes)})" if sizes else ranks


class _Ranks:
    """What the ranks tell each other, through a CPU group of their own: NCCL carries nothing of it, and nothing that
    the training sends comes between. One process, without a process group."""

    def __init__(self) -> None:
        together = dist.is_available() and dist.is_initialized()
        self.group = dist.new_group(backend="gloo") if together else None
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
        self.is_main = self.rank == 0

    def gather(self, work: Callable[[], _T], tell: Callable[[_T], Any] = lambda result: None) -> tuple[_T, list[Any]]:
        """This rank's result of `work`, and what each rank tells of its own. An error on one is raised on all."""
        result: Any = None
        error: Exception | None = None
        told: Any = None
        try:
            result = work()
            told = tell(result)
        except Exception as raised:
            error = raised
        if self.group is None:
            if error is not None:
                raise error
            return result, [told]
        kind = type(error) if isinstance(error, LigermodelsError) else CheckpointError
        text = str(error) if isinstance(error, LigermodelsError) else f"{type(error).__name__}: {error}"
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, (told, None if error is None else (kind, text)), group=self.group)
        for rank, (_, failure) in enumerate(everyone):
            if failure is not None:
                raise failure[0](f"rank {rank}: {failure[1]}") from error
        return result, [told for told, _ in everyone]

    def on_main(self, work: Callable[[], _T]) -> _T:
        """The result of `work` on rank 0, on all ranks."""
        return self.gather(lambda: work() if self.is_main else None, lambda result: result)[1][0]

    def close(self) -> None:
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model in DistributedDataParallel and torch.compile."""
    while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, DistributedDataParallel) else model._orig_mod  # type: ignore[assignment]
    return model


class _Planner(dcp.DefaultSavePlanner):
    """Plans by tensors and writes copies of their shards. torch 2.11's own stager cannot copy all that 2.13's can."""

    def __init__(self, copies: Mapping[str, Tensor]):
        super().__init__(flatten_state_dict=False)
        self._copies = copies

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._copies[index.fqn] if index.fqn in self._copies else super().lookup_object(index)


# Folders


def _steps(folder: Path) -> dict[int, Path]:
    """{step: folder} of the complete checkpoints."""
    if not folder.is_dir():
        return {}
    found = {path: _COMPLETE.fullmatch(path.name) for path in folder.iterdir()}
    return {int(match[1]): path for path, match in found.items() if match is not None}


def _make(partial: Path) -> int:
    """Makes the folder to write into, removes the unfinished ones of killed runs, and returns the free bytes."""
    partial.parent.mkdir(parents=True, exist_ok=True)
    for path in list(partial.parent.iterdir()):
        if _PARTIAL.fullmatch(path.name):
            shutil.rmtree(path)
    partial.mkdir()
    return shutil.disk_usage(partial).free


def _publish(partial: Path, complete: Path, sums: Sequence[Mapping[str, Any]]) -> None:
    """Adds the checksums of all ranks to a folder that is written, and gives it its final name."""
    every = {METADATA: checksum(partial / METADATA)}
    for of_rank in sums:
        every |= of_rank
    finish(partial, {CHECKSUMS: json_bytes({"files": every})})
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
            # Under this name it is no checkpoint any more, should the removal be cut short.
            shutil.rmtree(steps[step].rename(steps[step].with_name(f"{steps[step].name}.partial")))
        except OSError as error:
            raise CheckpointError(f"Checkpoints: {steps[step]} is not needed any more and stays: {error}") from error


@contextlib.contextmanager
def _damage(folder: Path) -> Iterator[None]:
    """For a block whose CheckpointErrors are damage: they also say how to go on."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{error}\n{_next_step(folder)}") from error


def _next_step(folder: Path) -> str:
    """How to go on where `folder` is damaged, with the name of the checkpoint before it."""
    steps = sorted(_steps(folder.parent).items())
    before = [path.name for _, path in steps if path != folder]
    if not before:
        return f"  Next: copy its files again. {folder.parent} has no checkpoint before it to resume from."
    return f"  Next: delete {folder} to resume from {before[-1]}, or copy its files again."


def _reason(error: BaseException) -> str:
    if not isinstance(error, CheckpointException):
        return str(error)
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {type(cause).__name__}: {cause}"


# States that are not tensors, as bytes


def _packed(state: Any, name: str) -> Tensor:
    """A state as bytes. Raises InputError where torch would not read them without running code."""
    file = io.BytesIO()
    try:
        torch.save(state, file)
        packed = torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)
        _unpacked(packed)
    except Exception as error:
        raise InputError(
            f"Checkpoints: the state of {name} cannot be saved: {_brief(error)}\n"
            "  Next: have its state_dict() consist of numbers, strings, lists, dicts and plain tensors."
        ) from error
    return packed


def _unpacked(packed: Tensor) -> Any:
    """Raises pickle.UnpicklingError and others."""
    return torch.load(io.BytesIO(packed.numpy().tobytes()), map_location="cpu", weights_only=True)


def _brief(error: Exception) -> str:
    """torch's message without its advice to unpickle everything."""
    if found := re.search(r"GLOBAL (\S+)", str(error)):
        return f"it holds a {found[1]}"
    return "it is no pickle that torch reads" if "Weights only" in str(error) else f"{type(error).__name__}: {error}"


def _digests(blobs: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: hashlib.sha256(blob.numpy().tobytes()).hexdigest() for name, blob in blobs.items()}


def _extras(reader: Reader) -> set[str]:
    """The names of the further objects in a checkpoint."""
    return {key.split(".")[1] for key in reader.headers if key.startswith("extra.")}


def _buffer(reader: Reader, name: str) -> Tensor:
    return torch.empty(reader.headers[name].shape, dtype=reader.headers[name].dtype)


def _load(reader: Reader, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Reads into `tensors`. Each rank for itself: nobody waits for a rank that fails."""
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with one_process():
            dcp.load(tensors, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise CheckpointError(f"{cause}\n{_next_step(reader.folder)}") from error
    return tensors


def _state_at(reader: Reader, tensors: Mapping[str, Tensor], name: str) -> Any:
    try:
        return _unpacked(tensors[name])
    except Exception as error:
        raise CheckpointError(
            f"{reader.folder}: {name} cannot be read: {_brief(error)}\n"
            "  Likely: damaged, or made to run code on who loads it, which was refused."
        ) from error


# Random numbers


def _rng() -> dict[str, Any]:
    """The random states of this process; on a GPU, that of the current one."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = [kind, torch.from_numpy(keys.astype(numpy.int64)), *rest]
    return state


def _set_rng(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = state["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype(numpy.uint32), *rest))
