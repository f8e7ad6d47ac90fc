"""Copies tensors from files into the memory of a GPU, as fast as the files can be read.

    file -> (several threads, preadv) -> a ring of pinned buffers -> (a separate CUDA stream) -> parameter

Threads read blocks of the files in order, each into its own buffer; reading releases the GIL. The calling thread issues
the copies. A buffer is reused when its last copy has ended. Host memory beyond the page cache is that of the buffers.
"""

import contextlib
import math
import os
import queue
import threading
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ligermodels.checkpoint.files import read_errors
from ligermodels.errors import CheckpointError

_ROW = 2**18
"""Bytes. Rows of a box with gaps between them are read one by one if they are as large; else the gaps are read too."""


@dataclass(frozen=True)
class Settings:
    """threads: that read. buffers: in the ring, more than threads, so that some are copied while others are filled."""

    threads: int = 8
    buffers: int = 12
    buffer_bytes: int = 2**24


SETTINGS = Settings()


@dataclass(frozen=True)
class File:
    """A file that must not change after its header was read; `stat` is from then."""

    path: Path
    stat: os.stat_result


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, row-major at byte `offset`."""

    file: File
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """Box `index` of the tensor `stored` is copied to `target`, in the dtype of `target`. name: for the caller."""

    name: str
    stored: Stored
    index: tuple[slice, ...]
    target: Tensor


@dataclass
class _Piece:
    """A tensor of `dtype` and `shape` at byte `offset`, whose box `index` is copied to `target`; `()` is all of it."""

    name: str
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    index: tuple[slice, ...]
    target: Tensor

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def copy(self, source: Tensor) -> None:
        """Enqueues copies of `source`, its bytes, on the current stream."""
        target = self.target
        if not self.index and target.dtype == self.dtype:
            target.view(torch.uint8).copy_(source, non_blocking=True)
            return
        staged = torch.empty(self.nbytes, dtype=torch.uint8, device=target.device)  # the file may not be aligned
        staged.copy_(source, non_blocking=True)
        target.copy_(staged.view(self.dtype).view(self.shape)[self.index])


@dataclass
class Block:
    """Bytes [start, end) of a file, which are read at once, and the consecutive pieces in them."""

    file: File
    start: int
    end: int
    pieces: list[_Piece] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    def copy(self, memory: Tensor) -> None:
        """Enqueues copies of `memory`, which begins with its bytes, on the current stream."""
        for piece in self.pieces:
            begin = piece.offset - self.start
            piece.copy(memory[begin : begin + piece.nbytes])


def serves(device: torch.device) -> bool:
    """Whether copies to `device` use this module."""
    return device.type == "cuda" and hasattr(os, "preadv")


def plan(parts: Iterable[Part], settings: Settings) -> list[Block]:
    """The blocks that contain `parts`, in file order; none is larger than a buffer."""
    blocks: list[Block] = []
    for part in sorted(parts, key=lambda part: (part.stored.file.path, part.stored.offset)):
        stored, space = part.stored, settings.buffer_bytes
        box = [at.indices(size)[:2] for at, size in zip(part.index, stored.shape, strict=False)]
        box += [(0, size) for size in stored.shape[len(box) :]]
        for piece in _pieces(part.name, stored.dtype, stored.offset, stored.shape, box, part.target, space):
            last = blocks[-1] if blocks else None
            follows = last is not None and (last.file, last.end) == (stored.file, piece.offset)
            if last is None or not follows or last.nbytes + piece.nbytes > space:
                last = Block(stored.file, piece.offset, piece.offset)
                blocks.append(last)
            last.pieces.append(piece)
            last.end += piece.nbytes
    return blocks


def _pieces(
    name: str,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    box: Sequence[tuple[int, int]],
    target: Tensor,
    space: int,
) -> Iterator[_Piece]:
    """The pieces, of at most `space` bytes, of box [(begin, end) of each dim] of a tensor of `shape` at `offset`."""
    if target.numel() == 0:
        return
    sizes = [end - begin for begin, end in box]
    first = next((dim for dim, size in enumerate(sizes) if size > 1), len(sizes))
    row = dtype.itemsize * math.prod(shape[1:])
    if target.is_contiguous() and sizes[first + 1 :] == list(shape[first + 1 :]):
        begin = 0
        for (start, _), size in zip(box, shape, strict=True):
            begin = begin * size + start
        count = space // dtype.itemsize
        for k in range(0, target.numel(), count):
            flat = target.view(-1)[k : k + count]
            yield _Piece(name, offset + (begin + k) * dtype.itemsize, dtype, (len(flat),), (), flat)
    elif row > space or math.prod(sizes[1:]) * dtype.itemsize >= _ROW:
        for k in range(sizes[0]):
            yield from _pieces(name, dtype, offset + (box[0][0] + k) * row, shape[1:], box[1:], target[k], space)
    else:
        inner = (slice(None), *(slice(*ends) for ends in box[1:]))
        for k in range(0, sizes[0], space // row):
            rows = target[k : k + space // row]
            yield _Piece(name, offset + (box[0][0] + k) * row, dtype, (len(rows), *shape[1:]), inner, rows)


def run(
    blocks: Sequence[Block], device: torch.device, settings: Settings
) -> Generator[tuple[int, list[str]], None, None]:
    """Fills the targets of the blocks of `plan`. Yields (bytes, the names that are complete) for each block.

    Later work on the current stream of `device` comes after the copies so far. Leaving early (an error, Ctrl-C) ends
    the threads after their current reads and waits for the copies.
    Raises CheckpointError for a file that was cut, changed or removed since its header was read, HubError for one that
    cannot be read.
    """
    todo: queue.SimpleQueue[Block] = queue.SimpleQueue()
    free: queue.SimpleQueue[tuple[Tensor, Any] | None] = queue.SimpleQueue()  # buffers, the event after their last copy
    ready: queue.SimpleQueue[tuple[Block, Tensor] | BaseException] = queue.SimpleQueue()
    for block in blocks:
        todo.put(block)
    remaining = Counter(piece.name for block in blocks for piece in block.pieces)
    count, workers = min(settings.buffers, len(blocks)), min(settings.threads, len(blocks))
    with contextlib.ExitStack() as stack:
        files = {file: stack.enter_context(_opened(file)) for file in {block.file for block in blocks}}

        def read() -> None:
            try:
                while (buffer := free.get()) is not None and not todo.empty():
                    with contextlib.suppress(queue.Empty):  # another thread took the last one
                        block, (memory, copied) = todo.get_nowait(), buffer
                        if copied is not None:
                            copies.wait(copied)
                        _fill(files[block.file], block, memory)
                        ready.put((block, memory))
            except BaseException as error:  # the calling thread raises it
                ready.put(error)

        copies = Copies(device)
        threads = [threading.Thread(target=read, name="ligermodels-load", daemon=True) for _ in range(workers)]
        try:
            for thread in threads:
                thread.start()
            allocated = 0
            for _ in blocks:
                while allocated < count and ready.empty():  # pinning takes a while, in which the threads read
                    free.put((copies.buffer(settings.buffer_bytes), None))
                    allocated += 1
                arrived = ready.get()
                if isinstance(arrived, BaseException):
                    raise arrived
                block, memory = arrived
                free.put((memory, copies.copy(block, memory)))
                remaining.subtract(piece.name for piece in block.pieces)
                yield block.nbytes, [name for name in {piece.name for piece in block.pieces} if not remaining[name]]
            for file, number in files.items():
                _check_unchanged(file, number)
        finally:
            with contextlib.suppress(queue.Empty):
                while True:
                    todo.get_nowait()
            for _ in threads:
                free.put(None)
            for thread in threads:
                if thread.ident is not None:  # it was started
                    thread.join()
            copies.end()


class Copies:
    """Copies out of buffers on a separate CUDA stream, which first waits for the current stream."""

    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.current_stream(device))

    def buffer(self, nbytes: int) -> Tensor:
        """Pinned memory, which torch caches for the next load."""
        with torch.cuda.device(self.device):
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy(self, block: Block, memory: Tensor) -> Any:
        """Enqueues the copies of a block from `memory`. The current stream waits for the returned event."""
        with torch.cuda.stream(self.stream):
            block.copy(memory)
            event = self.stream.record_event(torch.cuda.Event(blocking=True))
        torch.cuda.current_stream(self.device).wait_event(event)
        return event

    def wait(self, event: Any) -> None:
        """Waits for `event`, in a thread, whose current device may be another."""
        with torch.cuda.device(self.device):
            event.synchronize()

    def end(self) -> None:
        """Waits for all copies, so that the caller may free the targets."""
        self.stream.synchronize()


def _fill(number: int, block: Block, memory: Tensor) -> None:
    """Reads the block from the file descriptor `number`."""
    view: Any = memory.numpy()[: block.nbytes]
    at = 0
    while at < block.nbytes:
        with read_errors(block.file.path):
            count = os.preadv(number, [view[at:]], block.start + at)
        if count == 0:
            raise CheckpointError(f"{block.file.path} was cut short while it was read; fetch it again")
        at += count


@contextlib.contextmanager
def _opened(file: File) -> Iterator[int]:
    if not os.path.lexists(file.path):
        raise CheckpointError(f"{file.path} was removed while the checkpoint was loaded")
    with read_errors(file.path):
        number = os.open(file.path, os.O_RDONLY)
    try:
        _check_unchanged(file, number)
        yield number
    finally:
        os.close(number)


def _check_unchanged(file: File, number: int) -> None:
    now = os.fstat(number)
    names = ("st_dev", "st_ino", "st_size", "st_mtime_ns")
    if any(getattr(now, name) != getattr(file.stat, name) for name in names):
        raise CheckpointError(f"{file.path} was changed or replaced while the checkpoint was loaded; load it again")
