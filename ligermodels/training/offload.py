"""Offloads saved activations to pinned host memory in the forward, and copies them back before the backward.

Copies run on a stream of their own while the next block computes, and come back one block before their use. That costs
no time if a block computes for longer than its copies take. An H200 copies 54 GB/s each way, so a block that saves
4096 bytes per token ("block", H = 2048) has to compute for 0.08 us per token and direction.
"""

import functools
import math
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from ligermodels.kernels._triton import cdiv

SMALLEST = 2**20
"""Smaller tensors, in bytes, stay on the device."""


class Offload:
    """The copy streams and pinned buffers of one model, reused in each step. A copy of the model gets its own."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, CopyStream] = {}

    def __reduce__(self) -> tuple:
        return Offload, ()

    def stream(self, device: torch.device) -> "CopyStream":
        if device not in self._streams:
            self._streams[device] = CopyStream(device)
        return self._streams[device]

    def free_after(self, block: float) -> None:
        """Frees the device memory of tensors whose `free_after_block` is `block` or earlier."""
        for stream in self._streams.values():
            stream.free_after(block)


class OffloadPass:
    """The offloading blocks of one forward pass.

    The last block's tensors stay on the device, since the backward begins with them. If n of L blocks are offloaded, a
    copy may take as long as L / n blocks compute: `free_after_block` says after which block the device memory of each
    is freed. In the backward, the copy back begins after that block, which has freed as much memory.
    """

    def __init__(self, offload: Offload, blocks: list[int], num_blocks: int):
        last = num_blocks - 1
        blocks = [i for i in blocks if i < last]
        self.offload = offload
        self.free_after_block = {i: cdiv((n + 1) * last, len(blocks)) for n, i in enumerate(blocks)}
        self.fetches: defaultdict[int, list[StorageRefs]] = defaultdict(list)
        self.storages: dict[StorageWeakRef, weakref.ref[OffloadedStorage]] = {}
        offload.free_after(math.inf)  # of a step that raised

    def run(self, i: int, block: Callable[..., Any], *inputs: Any) -> Any:
        """block(*inputs), which is block i."""
        if i in self.free_after_block:
            new_refs: StorageRefs = []
            self.fetches[max(i + 1, self.free_after_block[i] - 1)].append(new_refs)
            with saved_tensors_hooks(functools.partial(self.pack, i, new_refs), _unpack):
                outputs = block(*inputs)
        else:
            outputs = block(*inputs)
        self.offload.free_after(i)
        for refs in self.fetches.pop(i, ()):
            if outputs[0].requires_grad:
                # Runs when the backward of this block begins.
                outputs[0].register_hook(functools.partial(_fetch, refs))
        return outputs

    def pack(self, i: int, new_refs: "StorageRefs", tensor: Tensor) -> "Tensor | _View":
        """Offloads large activations that block i saves, each storage once, and adds new ones to `new_refs`.

        Small tensors and parameters stay on the device.
        """
        strided = type(tensor) is Tensor and tensor.layout == torch.strided and tensor.device.type != "meta"
        if not strided or isinstance(tensor._base, nn.Parameter) or tensor.untyped_storage().nbytes() < SMALLEST:
            return tensor if tensor.is_leaf else tensor.detach()  # an output with its node would keep itself alive
        key = StorageWeakRef(tensor.untyped_storage())
        known = self.storages.get(key)
        storage = None if known is None else known()
        if storage is None or storage.version != tensor._version:
            storage = OffloadedStorage(self.offload.stream(tensor.device), tensor, self.free_after_block[i])
            self.storages[key] = weakref.ref(storage)
            new_refs.append(weakref.ref(storage))
        storage.uses += 1
        return _View(storage, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())


class _View(NamedTuple):
    """A saved tensor as a view of an offloaded storage."""

    storage: "OffloadedStorage"
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


def _unpack(saved: Tensor | _View) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    memory = saved.storage.take().untyped_storage()
    return torch.empty(0, dtype=saved.dtype, device=memory.device).set_(memory, saved.offset, saved.shape, saved.stride)


def _fetch(refs: "StorageRefs", _: Tensor) -> None:
    """Starts the copies of these storages back to the device."""
    storages = [storage for ref in refs if (storage := ref()) is not None and storage.on_device is None]
    for stream in {storage.stream for storage in storages}:
        stream.fetch([storage for storage in storages if storage.stream is stream])


class OffloadedStorage:
    """Memory on the host, kept as long as autograd has a view of it, and on the device while the backward reads it."""

    def __init__(self, stream: "CopyStream", tensor: Tensor, free_after_block: int):
        self.stream = stream
        self.version = tensor._version
        self.nbytes = tensor.untyped_storage().nbytes()
        self.buffer = stream.host_buffer(self.nbytes)
        self.on_device: Tensor | None = None
        self.ready: Any = None
        self.uses = self.used = 0
        self.outgoing: _Copies | None = None
        self.outgoing = stream.send(tensor, self.buffer)
        stream.outgoing.append((free_after_block, weakref.ref(self)))

    def __del__(self) -> None:
        self.free_source()
        if self.on_device is not None:  # a backward that raised
            self.stream.release_incoming()
        self.stream.buffers[len(self.buffer)].append(self.buffer)  # queued copies run before those of its next use

    def free_source(self) -> None:
        """Frees the device memory that was copied out, for use after the copy."""
        if self.outgoing is not None:
            self.outgoing.wait()
            self.outgoing = None

    def take(self) -> Tensor:
        """Returns the bytes on the device. After the last use, only the caller keeps them alive."""
        if self.on_device is None:
            self.stream.fetch([self])
        on_device = self.on_device
        assert on_device is not None
        self.stream.wait(self.ready)
        self.used += 1
        if self.used == self.uses:  # another backward through the same graph fetches them again
            self.on_device, self.ready, self.used = None, None, 0
        return on_device


StorageRefs = list[weakref.ref[OffloadedStorage]]


class _Copies(NamedTuple):
    """Queued copies and the device memory that they read or write."""

    computing: Any  # the stream that uses the memory; None on the CPU
    done: Any  # an event
    memory: list[Tensor]

    def wait(self) -> None:
        """Makes `computing` wait for the copies, so that `memory` may be freed."""
        if self.computing is not None:
            self.computing.wait_event(self.done)


class CopyStream:
    """Copies between one device and the host, in order, on a stream of their own. On the CPU there is no stream.

    Device memory belongs to the computing stream, whose allocator may reuse it when no tensor refers to it. So a
    reference is kept until that stream has been made to wait for the copy; the host never waits. (record_stream would
    keep the memory until the host happens to see that the copy is done.) Host buffers are used only by copies, which
    one stream keeps in order, so they are reused at once. Torch rounds pinned memory to powers of two, and so do we.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self.stream = None if self.module is None else self.module.Stream(device)
        self.buffers: defaultdict[int, list[Tensor]] = defaultdict(list)
        self.outgoing: deque[tuple[int, weakref.ref[OffloadedStorage]]] = deque()
        self.incoming: _Copies | None = None

    def host_buffer(self, nbytes: int) -> Tensor:
        size = 1 << (nbytes - 1).bit_length()
        if free := self.buffers[size]:
            return free.pop()
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self.stream is not None)

    def send(self, tensor: Tensor, buffer: Tensor) -> _Copies:
        """Starts a copy of the tensor's storage to the host."""
        source = torch.empty(0, dtype=torch.uint8, device=self.device).set_(tensor.untyped_storage())
        return self._copy([(buffer[: len(source)], source)], [tensor.detach()])

    def free_after(self, block: float) -> None:
        while self.outgoing and self.outgoing[0][0] <= block:
            storage = self.outgoing.popleft()[1]()
            if storage is not None:
                storage.free_source()

    def fetch(self, storages: list[OffloadedStorage]) -> None:
        """Starts copies back to the device, after what is queued on the computing stream now."""
        self.release_incoming()
        on_device = [torch.empty(storage.nbytes, dtype=torch.uint8, device=self.device) for storage in storages]
        buffers = [storage.buffer[: storage.nbytes] for storage in storages]
        self.incoming = self._copy(zip(on_device, buffers, strict=True), on_device)
        for storage, memory in zip(storages, on_device, strict=True):
            storage.on_device, storage.ready = memory, self.incoming.done

    def wait(self, ready: Any) -> None:
        """Makes the computing stream wait for the copies whose event this is."""
        if ready is not None:
            self.module.current_stream(self.device).wait_event(ready)
        if self.incoming is not None and self.incoming.done is ready:
            self.incoming = None

    def release_incoming(self) -> None:
        """Drops our reference to the memory of copies in flight."""
        if self.incoming is not None:
            self.incoming.wait()
            self.incoming = None

    def _copy(self, pairs: Iterable[tuple[Tensor, Tensor]], memory: list[Tensor]) -> _Copies:
        if self.stream is None:
            for target, source in pairs:
                target.copy_(source)
            return _Copies(None, None, memory)
        computing = self.module.current_stream(self.device)
        self.stream.wait_stream(computing)
        with torch.no_grad(), self.module.stream(self.stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return _Copies(computing, self.stream.record_event(), memory)
