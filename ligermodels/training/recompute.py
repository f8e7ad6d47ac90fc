"""What the blocks of a model keep for the backward, what they make again there, and what waits on the host meanwhile.

| recompute | a block keeps, bytes per token in 16 bits          | made again in the backward                  |
|-----------|----------------------------------------------------|---------------------------------------------|
| "none"    | all but what is cheap: 4H + 2(q + 2kv) + 2q + 4I   | outputs of norms and gates                  |
| "mlp"     | the same without what is inside of its units: - 4I | gate and up as well: 18 % of the FLOPs more |
| "block"   | one tensor, x + residual: 2H                       | the whole block: 33 % more                  |

H is the hidden size, q and kv the widths of queries and keys, I that of the gated unit.

Under "block", a block runs on (x + residual, None), which gives a norm the bits that (x, residual) gives it; in the
backward, the gradient of the sum in 16 bits is rounded once more. A unit at the end of a block is asked to recompute as
well: the second run of the block ends where the unit has saved its input, and the unit makes its inside again, in tiles
of tokens where it would take more than 1 GiB (`gated_mlp`), so that a longer text needs no more of that.

`offload` sends what the blocks keep to pinned memory of the host on a stream of its own, while the next block
computes, and brings it back one block ahead of its use. That costs no time where a block computes for longer than its
bytes travel: an H200 moves 54 GB/s each way, so that a block that keeps 4096 bytes per token ("block", H = 2048) has to
take 0.08 us per token and direction, and one that keeps 51 KB ("none") 0.95 us. Llama-3.2-1B takes 0.2 us forward.
Where only n of L blocks send (`blocks`, `every_n_layers`), their copies have the time of L / n blocks each: the others
fill the memory only as fast as these leave it. Few blocks' copies then keep nothing waiting, and cost what they take
from the memory's speed and the card's power: for one to four of Llama-3.2-1B's 16 about a hundredth of a step or less.
"""

import dataclasses
import functools
import math
import warnings
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import checkpoint

from ligermodels.errors import InputError
from ligermodels.kernels._triton import is_capturing

CHOICES = ("none", "mlp", "block")
SMALLEST = 2**20
"""Bytes from which on a tensor is worth a copy to the host."""
_OF_TORCH = {"preserve_rng_state", "determinism_check", "debug", "early_stop", "context_fn"}


def must_not_wait(x: Tensor) -> bool:
    """True while torch.compile or CUDA makes a graph of what happens to x: the host cannot wait for a value then."""
    return torch.compiler.is_compiling() or is_captured(x)


def is_captured(x: Tensor) -> bool:
    return x.is_cuda and is_capturing()


def plain(i: int, block: nn.Module, *inputs: Any) -> Any:
    """Block i as it is; see `Checkpointing.start`."""
    return block(*inputs)


def recomputed(block: nn.Module, x: Tensor, residual: Tensor | None, *inputs: Any, **options: Any) -> Any:
    """block(x + residual, None, *inputs), of which the sum alone is kept; the backward runs the block again.

    inputs: not kept but held, as whoever calls holds them: what all blocks share. options: of torch.utils.checkpoint.
    Raises InputError while a CUDA graph is captured, if the block draws random numbers, which nobody could draw again.
    """
    x = x if residual is None else x + residual
    if is_captured(x):
        if _draws(block):
            raise InputError(
                "recompute='block' of blocks with dropout or router jitter cannot be captured in a CUDA graph: the "
                "second run would draw other numbers. Set both to 0, or leave recompute or the capture out"
            )
        options["preserve_rng_state"] = False  # reading the state is not allowed there
    return checkpoint(block, x, None, *inputs, use_reentrant=False, **options)


def _draws(block: nn.Module) -> bool:
    return any(
        module.training
        and ((isinstance(module, _DropoutNd) and module.p > 0) or getattr(module, "jitter_noise", 0) > 0)
        for module in block.modules()
    )


class Offload:
    """The streams and pinned buffers of one model, from step to step; a copy of the model has its own."""

    def __init__(self) -> None:
        self._lanes: dict[torch.device, _Lane] = {}

    def __reduce__(self) -> tuple:
        return Offload, ()

    def lane(self, device: torch.device) -> "_Lane":
        if device not in self._lanes:
            self._lanes[device] = _Lane(device)
        return self._lanes[device]

    def release(self, block: float) -> None:
        """Gives up the memory of what is to be gone by the end of `block`."""
        for lane in self._lanes.values():
            lane.release(block)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """One model's policy. recompute: "none", "mlp" or "block". blocks: of so many of the first blocks; None: all.
    every_n_layers: of blocks 0, n, 2n, ... of those. options: of torch.utils.checkpoint."""

    recompute: str = "none"
    blocks: int | None = None
    every_n_layers: int = 1
    offload: Offload | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, settings: str | Mapping[str, Any], num_blocks: int) -> Self:
        """From one of the words, or a dict of the fields (offload: True or False). Raises InputError."""
        if isinstance(settings, str):
            settings = {"recompute": settings}
        if not isinstance(settings, Mapping):
            raise InputError(
                f"activation checkpointing is {settings!r}; expected {_words(CHOICES)}, or a dict such as "
                "{'recompute': 'block', 'blocks': 8, 'offload': True}"
            )
        options = dict(settings)
        recompute, blocks = options.pop("recompute", "block"), options.pop("blocks", None)
        every, offload = options.pop("every_n_layers", 1), options.pop("offload", False)
        if recompute not in CHOICES:
            raise InputError(f"recompute={recompute!r} is not supported; supported: {_words(CHOICES)}")
        if blocks is not None and not (type(blocks) is int and 0 <= blocks <= num_blocks):
            raise InputError(f"blocks={blocks!r} must be a number of the model's blocks, 0 to {num_blocks}")
        if type(every) is not int or every < 1:
            raise InputError(f"every_n_layers={every!r} must be a whole number from 1 on")
        if type(offload) is not bool:
            raise InputError(f"offload={offload!r} must be True or False")
        if options.pop("use_reentrant", None):
            warnings.warn(
                "use_reentrant=True is not used here: checkpointing is non-reentrant, which gives the same gradients",
                stacklevel=4,
            )
        if unknown := options.keys() - _OF_TORCH:
            raise InputError(
                f"activation checkpointing has no option {_words(sorted(unknown))}; there are 'recompute', 'blocks', "
                f"'every_n_layers', 'offload', and of torch.utils.checkpoint {_words(sorted(_OF_TORCH))}"
            )
        if options and recompute != "block":
            raise InputError(
                f"{_words(options)} of torch.utils.checkpoint belong to recompute='block', not {recompute!r}"
            )
        where = Offload() if offload else None
        return cls(recompute=recompute, blocks=blocks, every_n_layers=every, offload=where, options=options)

    @property
    def enabled(self) -> bool:
        return self.blocks != 0 and (self.recompute != "none" or self.offload is not None)

    def for_all(self) -> Self:
        """The same for all blocks of another stack, unless it is for none."""
        return dataclasses.replace(self, blocks=None if self.blocks != 0 else 0)

    def covers(self, i: int) -> bool:
        return (self.blocks is None or i < self.blocks) and i % self.every_n_layers == 0

    def prepare(self, blocks: Iterable[nn.Module]) -> None:
        """Tells the units in these blocks, which are modules with an attribute `recompute`, whether to recompute."""
        for i, block in enumerate(blocks):
            last = last_unit(block)
            for unit in block.modules():
                if isinstance(getattr(unit, "recompute", None), bool):
                    wanted = self.recompute == "mlp" or (self.recompute == "block" and unit is last)
                    unit.recompute = wanted and self.covers(i)  # type: ignore[assignment]

    def start(self, x: Tensor, num_blocks: int) -> Callable[..., Any]:
        """How one forward pass on x runs its blocks, all and in order: run(i, block, x, residual, *inputs), which
        gives what block(x, residual, *inputs) gives.

        Raises InputError where copies to the host are asked of torch.compile or of a CUDA graph.
        """
        if not self.enabled or not torch.is_grad_enabled() or (self.recompute == "mlp" and self.offload is None):
            return plain
        if self.offload is not None and must_not_wait(x):
            raise InputError(
                "offload=True runs neither in torch.compile nor in a captured CUDA graph: its copies are queued from "
                "step to step. Set offload=False"
            )
        return _Pass(self, num_blocks)


def _words(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def last_unit(block: nn.Module) -> nn.Module | None:
    """The unit whose output is the block's, if there is one: `block.last_unit`, a name, or else its last module, unless
    the block has parameters of its own, such as gates, to put behind it. A norm behind the unit is the last module
    itself, and keeps its input."""
    if isinstance(name := getattr(block, "last_unit", None), str):
        return block.get_submodule(name)
    *_, last = None, *block.children()
    return None if next(block.parameters(recurse=False), None) is not None else last


class _Pass:
    """The blocks of one forward pass, of which some are run again in the backward, or send to the host what they keep.

    The last block's tensors stay: the backward needs them at once. gone_by: for each block that sends, the one at whose
    end its memory is free, which has the copies spread evenly over all blocks. In the backward they begin where that
    block is through: what has been freed by then is at least as much.
    """

    def __init__(self, policy: Checkpointing, num_blocks: int):
        self.policy = policy
        self.last = num_blocks - 1
        self.again = [policy.recompute == "block" and policy.covers(i) for i in range(num_blocks)]
        sending = [i for i in range(self.last) if policy.offload is not None and policy.covers(i)]
        self.gone_by = {i: -(-(n + 1) * self.last // len(sending)) for n, i in enumerate(sending)}
        self.fetches: defaultdict[int, list[_Kept]] = defaultdict(list)
        self.records: dict[StorageWeakRef, weakref.ref[_Record]] = {}
        if policy.offload is not None:
            policy.offload.release(math.inf)  # what a step that broke off has left

    def __call__(self, i: int, block: nn.Module, x: Tensor, residual: Tensor | None, *inputs: Any) -> Any:
        run: Callable[..., Any] = block
        if self.again[i]:
            run = functools.partial(recomputed, block, **self.policy.options)
        if self.policy.offload is not None:
            run = functools.partial(self._offloaded, self.policy.offload, i, run)
        x, residual, *more = run(x, residual, *inputs)
        if residual is not None and i < self.last and self.again[i + 1]:
            x, residual = x + residual, None  # here, where nothing else holds the two
        return x, residual, *more

    def _offloaded(self, offload: Offload, i: int, run: Callable[..., Any], *inputs: Any) -> Any:
        if i in self.gone_by:
            kept = _Kept(offload, self.records, self.gone_by[i])
            self.fetches[max(i + 1, kept.gone_by - 1)].append(kept)
            with saved_tensors_hooks(kept.pack, _unpack):
                outputs = run(*inputs)
        else:
            outputs = run(*inputs)
        offload.release(i)
        for kept in self.fetches.pop(i, ()):
            if outputs[0].requires_grad:
                outputs[0].register_hook(kept.fetch)  # when the backward of this block begins
        return outputs


class _Kept:
    """What one block keeps, whose memory is free at the end of block `gone_by`."""

    def __init__(self, offload: Offload, records: dict[StorageWeakRef, "weakref.ref[_Record]"], gone_by: int):
        self.offload = offload
        self.records = records
        self.gone_by = gone_by
        self.mine: list[weakref.ref[_Record]] = []

    def pack(self, tensor: Tensor) -> "Tensor | _View":
        """Large results of the block, each memory once; the rest, and parameters, stay where they are."""
        memory = _memory(tensor)
        if memory is None:
            return tensor if tensor.is_leaf else tensor.detach()  # with its node it would hold itself
        key = StorageWeakRef(memory)
        there = self.records.get(key)
        record = None if there is None else there()
        if record is None or record.version != tensor._version:
            lane = self.offload.lane(tensor.device)
            record = _Record(lane, lane.take(memory.nbytes()), tensor, memory, self.gone_by)
            self.records[key] = weakref.ref(record)
            self.mine.append(weakref.ref(record))
        record.uses += 1
        return _View(record, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())

    def fetch(self, _: Tensor | None = None) -> None:
        found = [record for ref in self.mine if (record := ref()) is not None and record.here is None]
        for lane in {record.lane for record in found}:
            lane.bring([record for record in found if record.lane is lane])


def _memory(tensor: Tensor) -> torch.UntypedStorage | None:
    """The memory to send to the host; None where the tensor stays."""
    if type(tensor) is not Tensor or isinstance(tensor._base, nn.Parameter) or tensor.layout != torch.strided:
        return None
    memory = tensor.untyped_storage()
    return memory if memory.nbytes() >= SMALLEST and tensor.device.type != "meta" else None


class _View(NamedTuple):
    """A tensor that autograd keeps, as a part of a record."""

    record: "_Record"
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


def _unpack(kept: Tensor | _View) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    memory = kept.record.take().untyped_storage()
    return torch.empty(0, dtype=kept.dtype, device=memory.device).set_(memory, kept.offset, kept.shape, kept.stride)


class _Record:
    """Memory that is on the host, for as long as autograd keeps something of it, and back on the device for a while."""

    def __init__(self, lane: "_Lane", buffer: Tensor, tensor: Tensor, memory: torch.UntypedStorage, gone_by: int):
        self.lane = lane
        self.buffer = buffer
        self.version = tensor._version
        self.nbytes = memory.nbytes()
        self.here: Tensor | None = None
        self.ready: Any = None
        self.uses = self.used = 0
        self.leaving: _Copies | None = None
        self.leaving = lane.send(tensor, memory, buffer)
        lane.leaving.append((gone_by, weakref.ref(self)))

    def __del__(self) -> None:
        self.release()
        if self.here is not None:  # for a backward that broke off
            self.lane.arrive()
        self.lane.buffers[len(self.buffer)].append(self.buffer)  # copies still queued come before those of its next use

    def release(self) -> None:
        """Gives up the memory that leaves, to be used once its copy is done."""
        if self.leaving is not None:
            self.leaving.settle()
            self.leaving = None

    def take(self) -> Tensor:
        """The bytes on the device; once every use had them, they are only held by these."""
        if self.here is None:
            self.lane.bring([self])
        here = self.here
        assert here is not None
        self.lane.wait(self.ready)
        self.used += 1
        if self.used == self.uses:  # another backward through the same graph fetches them again
            self.here, self.ready, self.used = None, None, 0
        return here


class _Copies(NamedTuple):
    """Copies that are queued, and what they need of the device's memory."""

    computing: Any  # the stream that uses the memory; None on the CPU
    done: Any  # an event
    held: list[Tensor]

    def settle(self) -> None:
        """What `computing` does from now on comes behind the copies, so that `held` may be given up."""
        if self.computing is not None:
            self.computing.wait_event(self.done)


class _Lane:
    """The copies between one device and the host, queued one behind the other on a stream of their own.

    Memory on the device belongs to the stream that computes, where the allocator may give it away as soon as nothing
    here holds it. So it is held, by the records and in `arriving`, until that stream was made to wait for the copy,
    which the host never does; record_stream would hold it until the host happens to see that the copy is done. Buffers
    on the host are used by copies alone, which one stream keeps in order: they may be used again at once. torch rounds
    pinned memory up to a power of two, and so do the buffers. On the CPU the copies are made as well, without streams.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self.stream = None if self.module is None else self.module.Stream(device)
        self.buffers: defaultdict[int, list[Tensor]] = defaultdict(list)
        self.leaving: deque[tuple[int, weakref.ref[_Record]]] = deque()
        self.arriving: _Copies | None = None

    def take(self, nbytes: int) -> Tensor:
        """A buffer on the host."""
        size = 1 << (nbytes - 1).bit_length()
        if free := self.buffers[size]:
            return free.pop()
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self.stream is not None)

    def send(self, tensor: Tensor, memory: torch.UntypedStorage, buffer: Tensor) -> _Copies:
        """Starts a copy of the tensor's memory to the host."""
        source = torch.empty(0, dtype=torch.uint8, device=self.device).set_(memory)
        return self._copy([(buffer[: len(source)], source)], [tensor.detach()])

    def release(self, block: float) -> None:
        """Gives up the memory of what is to be gone by the end of `block`."""
        while self.leaving and self.leaving[0][0] <= block:
            record = self.leaving.popleft()[1]()
            if record is not None:
                record.release()

    def bring(self, records: "list[_Record]") -> None:
        """Starts copies back to the device, once the stream that computes has come to where it is now."""
        self.arrive()
        here = [torch.empty(record.nbytes, dtype=torch.uint8, device=self.device) for record in records]
        buffers = [record.buffer[: record.nbytes] for record in records]
        self.arriving = self._copy(zip(here, buffers, strict=True), here)
        for record, memory in zip(records, here, strict=True):
            record.here, record.ready = memory, self.arriving.done

    def wait(self, ready: Any) -> None:
        """What is queued from now on comes behind these copies."""
        if ready is not None:
            self.module.current_stream(self.device).wait_event(ready)
        if self.arriving is not None and self.arriving.done is ready:
            self.arriving = None

    def arrive(self) -> None:
        """The memory that is arriving is held by its records alone from now on."""
        if self.arriving is not None:
            self.arriving.settle()
            self.arriving = None

    def _copy(self, pairs: Iterable[tuple[Tensor, Tensor]], held: list[Tensor]) -> _Copies:
        if self.stream is None:
            for target, source in pairs:
                target.copy_(source)
            return _Copies(None, None, held)
        computing = self.module.current_stream(self.device)
        self.stream.wait_stream(computing)
        with torch.no_grad(), self.module.stream(self.stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return _Copies(computing, self.stream.record_event(), held)
