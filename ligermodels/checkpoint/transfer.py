"""Copies tensors from files into the memory of a GPU, as fast as the files can be read.

    file -> (several threads, preadv) -> a ring of pinned buffers -> (a CUDA stream of its own) -> parameter

Threads read blocks of the files in order, each into a buffer of its own; reading lets go of the GIL. The calling thread
issues the copies. A buffer is read into again when the last copy out of it has ended. Host memory beyond the page cache
is that of the buffers.
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
from ligermodels.errors import CheckpointError, HubError

_PAGE = 4096
_ROW = 2**18
"""Bytes. Where a box on disk has gaps, pieces between them that are as large are read one by one; else all is read."""


@dataclass(frozen=True)
class Settings:
    """threads: that read. buffers: in the ring, more than threads, so that some are copied while the others are filled.

    buffer_bytes: of each, a multiple of 4096. direct: reads past the page cache (O_DIRECT), for disks that are faster
    than the kernel copies; the next load is then no faster.
    """

    threads: int = 8
    buffers: int = 12
    buffer_bytes: int = 2**24
    direct: bool = False


SETTINGS = Settings()


@dataclass(frozen=True)
class File:
    """A file that has to stay as it was when its header was read; `stat` is from then."""

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
    """Box `index` of the tensor `stored` is what `target` gets, in its own dtype. name: what the caller calls it."""

    name: str
    stored: Stored
    index: tuple[slice, ...]
    target: Tensor


@dataclass
class _Piece:
    """Bytes of a file that are a tensor of `dtype` and `shape`, of which `target` gets box `index`; `()` is all of it.

    Only a piece of one dim without an index may be cut.
    """

    name: str
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    index: tuple[slice, ...]
    target: Tensor

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def cut(self, room: int) -> tuple["_Piece | None", "_Piece | None"]:
        """What fits into `room` bytes, and the rest."""
        if self.nbytes <= room:
            return self, None
        count = room // self.dtype.itemsize
        if self.index or count == 0:
            return None, self
        rest = self.offset + count * self.dtype.itemsize
        return (
            _Piece(self.name, self.offset, self.dtype, (count,), (), self.target[:count]),
            _Piece(self.name, rest, self.dtype, (self.shape[0] - count,), (), self.target[count:]),
        )

    def copy(self, source: Tensor) -> None:
        """source: its bytes. Enqueues copies on the current stream."""
        target = self.target
        if not self.index and target.dtype == self.dtype:
            target.view(torch.uint8).copy_(source, non_blocking=True)
            return
        staged = torch.empty(self.nbytes, dtype=torch.uint8, device=target.device)  # aligned, unlike the file perhaps
        staged.copy_(source, non_blocking=True)
        target.copy_(staged.view(self.dtype).view(self.shape)[self.index])


@dataclass
class Block:
    """Bytes [start, end) of a file, which are read in one go, and the pieces in them, which follow each other."""

    file: File
    start: int
    end: int
    pieces: list[_Piece] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    def copy(self, memory: Tensor) -> None:
        """memory: begins with its bytes. Enqueues the copies on the current stream."""
        for piece in self.pieces:
            begin = piece.offset - self.start
            piece.copy(memory[begin : begin + piece.nbytes])


class _Buffer:
    """Pinned memory, and the event after the last copy out of it."""

    def __init__(self, memory: Tensor):
        self.memory = memory
        self.view: Any = memory.numpy()
        self.copied: Any = None


def serves(device: torch.device) -> bool:
    """Whether what goes to `device` goes through here."""
    return device.type == "cuda" and hasattr(os, "preadv")


def plan(parts: Iterable[Part], settings: Settings) -> list[Block]:
    """The blocks that hold `parts`, in the order of the files; none is larger than a buffer."""
    room = settings.buffer_bytes - (2 * _PAGE if settings.direct else 0)  # a direct read begins and ends with a page
    blocks: list[Block] = []
    for part in sorted(parts, key=lambda part: (part.stored.file.path, part.stored.offset)):
        stored = part.stored
        box = [at.indices(size)[:2] for at, size in zip(part.index, stored.shape, strict=False)]
        box += [(0, size) for size in stored.shape[len(box) :]]
        rest: _Piece | None
        for rest in _pieces(part.name, stored.dtype, stored.offset, stored.shape, box, part.target, room):
            while rest is not None:
                block = blocks[-1] if blocks else None
                piece = None
                if block is not None and (block.file, block.end) == (stored.file, rest.offset):
                    piece, rest = rest.cut(room - block.nbytes)
                if piece is None or block is None:
                    assert rest is not None
                    block = Block(stored.file, rest.offset, rest.offset)
                    blocks.append(block)
                    piece, rest = rest.cut(room)
                    assert piece is not None
                block.pieces.append(piece)
                block.end += piece.nbytes
    return blocks


def _pieces(
    name: str,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    box: Sequence[tuple[int, int]],
    target: Tensor,
    room: int,
) -> Iterator[_Piece]:
    """Box `box`, [(begin, end) of each dim], of a tensor of `shape` at `offset`, in pieces: flat where that works."""
    if target.numel() == 0:
        return
    sizes = [end - begin for begin, end in box]
    first = next((dim for dim, size in enumerate(sizes) if size > 1), len(sizes))
    row = dtype.itemsize * math.prod(shape[1:])
    if target.is_contiguous() and sizes[first + 1 :] == list(shape[first + 1 :]):
        index = 0
        for (begin, _), size in zip(box, shape, strict=True):
            index = index * size + begin
        yield _Piece(name, offset + index * dtype.itemsize, dtype, (target.numel(),), (), target.view(-1))
    elif row > room or math.prod(sizes[1:]) * dtype.itemsize >= _ROW:
        for k in range(sizes[0]):
            yield from _pieces(name, dtype, offset + (box[0][0] + k) * row, shape[1:], box[1:], target[k], room)
    else:
        inner = (slice(None), *(slice(*ends) for ends in box[1:]))
        for k in range(0, sizes[0], room // row):
            rows = target[k : k + room // row]
            yield _Piece(name, offset + (box[0][0] + k) * row, dtype, (len(rows), *shape[1:]), inner, rows)


def run(
    blocks: Sequence[Block], device: torch.device, settings: Settings
) -> Generator[tuple[int, list[str]], None, None]:
    """Fills the targets of the blocks of `plan`. Yields (bytes, the names that are complete) for each block.

    What the current stream of `device` does next comes after the copies so far. Leaving early (an error, Ctrl-C) ends
    the threads after the reads that they are in, and waits for the copies.
    Raises CheckpointError for a file that was cut, changed or removed since its header was read, HubError for one that
    cannot be read.
    """
    todo: queue.SimpleQueue[Block] = queue.SimpleQueue()
    free: queue.SimpleQueue[_Buffer | None] = queue.SimpleQueue()
    ready: queue.SimpleQueue[tuple[Block, _Buffer] | BaseException] = queue.SimpleQueue()
    for block in blocks:
        todo.put(block)
    left = Counter(piece.name for block in blocks for piece in block.pieces)
    count, workers = min(settings.buffers, len(blocks)), min(settings.threads, len(blocks))
    with contextlib.ExitStack() as stack:
        files = {file: stack.enter_context(_opened(file, settings)) for file in {block.file for block in blocks}}

        def read() -> None:
            try:
                while (buffer := free.get()) is not None and not todo.empty():
                    with contextlib.suppress(queue.Empty):  # another thread took the last one
                        block = todo.get_nowait()
                        if buffer.copied is not None:
                            copies.wait(buffer.copied)
                        _fill(files[block.file], block, buffer, settings)
                        ready.put((block, buffer))
            except BaseException as error:  # is raised where the blocks are awaited
                ready.put(error)

        copies = Copies(device)
        threads = [threading.Thread(target=read, name="ligermodels-load", daemon=True) for _ in range(workers)]
        try:
            for thread in threads:
                thread.start()
            made = 0
            for _ in blocks:
                while made < count and ready.empty():  # pinning memory takes a while, in which the others read
                    free.put(_Buffer(copies.buffer(settings.buffer_bytes)))
                    made += 1
                arrived = ready.get()
                if isinstance(arrived, BaseException):
                    raise arrived
                block, buffer = arrived
                buffer.copied = copies.copy(block, buffer.memory[_lead(block, settings) :])
                free.put(buffer)
                left.subtract(piece.name for piece in block.pieces)
                yield block.nbytes, [name for name in {piece.name for piece in block.pieces} if not left[name]]
            for file, number in files.items():
                _check_unchanged(file, number)
        finally:
            with contextlib.suppress(queue.Empty):
                while True:
                    todo.get_nowait()
            for _ in threads:
                free.put(None)
            for thread in threads:
                if thread.ident is not None:  # has been started
                    thread.join()
            copies.end()


class Copies:
    """Copies out of buffers on a CUDA stream of its own, which begins after what the current stream has in hand."""

    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.current_stream(device))

    def buffer(self, nbytes: int) -> Tensor:
        """Pinned memory, which torch keeps for the next load."""
        with torch.cuda.device(self.device):
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy(self, block: Block, memory: Tensor) -> Any:
        """Enqueues the copies of a block, which lies in `memory`; the event after them, for which the current stream
        waits."""
        with torch.cuda.stream(self.stream):
            block.copy(memory)
            event = self.stream.record_event(torch.cuda.Event(blocking=True))
        torch.cuda.current_stream(self.device).wait_event(event)
        return event

    def wait(self, event: Any) -> None:
        """Returns when `event` has happened; for threads, whose current device is another."""
        with torch.cuda.device(self.device):
            event.synchronize()

    def end(self) -> None:
        """Waits for all copies: the caller may let go of the targets."""
        self.stream.synchronize()


def _lead(block: Block, settings: Settings) -> int:
    """Where in its buffer a block begins."""
    return block.start % _PAGE if settings.direct else 0


def _fill(number: int, block: Block, buffer: _Buffer, settings: Settings) -> None:
    """Reads the block from the file that is open as `number`."""
    lead = _lead(block, settings)
    wanted, at = lead + block.nbytes, 0
    size = -(-wanted // _PAGE) * _PAGE if settings.direct else wanted
    while at < wanted:
        with read_errors(block.file.path):
            count = os.preadv(number, [buffer.view[at:size]], block.start - lead + at)
        if count == 0:
            raise CheckpointError(f"{block.file.path} was cut short while it was read; fetch it again")
        at += count


@contextlib.contextmanager
def _opened(file: File, settings: Settings) -> Iterator[int]:
    try:
        with read_errors(file.path):
            number = os.open(file.path, os.O_RDONLY | (os.O_DIRECT if settings.direct else 0))
    except HubError as error:
        if not os.path.lexists(file.path):
            raise CheckpointError(f"{file.path} was removed while the checkpoint was loaded") from error
        raise
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
