"""Weights copied to a device through a ring of buffers: the bits of the files, at any timing, and no thread left.

On a machine with a GPU the copies are CUDA's. Elsewhere `Late` takes its place, which copies when somebody waits for a
copy: a buffer that is filled again too early shows.
"""

import errno
import itertools
import json
import os
import random
import threading
import time

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import ligermodels
from ligermodels.checkpoint import transfer, weights
from ligermodels.checkpoint.reading import SafetensorsReader
from ligermodels.checkpoint.transfer import Part, Settings
from ligermodels.checkpoint.weights import FLOATS, same_bits
from ligermodels.errors import CheckpointError, HubError
from tests.checkpoint.fixtures import join, split
from tests.conversion.layouts import a_checkpoint, same, stored as stored_tensors

EXPERTS = "model.layers.{i}.mlp.experts."
STACKED = {
    EXPERTS + "gate_up_proj": weights.Rearranged(
        EXPERTS + "gate_up_proj", lambda rows, config: weights.to_halves(rows, 1), dim=1, transposed=True
    ),
    EXPERTS + "down_proj": weights.Rearranged(EXPERTS + "down_proj", transposed=True),
}
"""gpt-oss' experts: rows of gate and up in turn, and transposed."""
SMALL = Settings(threads=3, buffers=2, buffer_bytes=1000)


class Late:
    """A device whose copies happen as late as it may: when an event after them is waited for, or at the end."""

    def __init__(self, device):
        self.pending, self.lock, self.made = [], threading.Lock(), 0

    def buffer(self, nbytes: int) -> Tensor:
        memory = torch.zeros(nbytes + 4096, dtype=torch.uint8)
        begin = -memory.data_ptr() % 4096  # as pinned memory is
        return memory[begin : begin + nbytes]

    def copy(self, block, memory):
        self.made += 1
        self.pending.append((block, memory, self.made))
        return self.made

    def wait(self, event):
        with self.lock, torch.no_grad():
            while any(number == event for *_, number in self.pending):
                block, memory, _ = self.pending.pop(0)
                block.copy(memory)

    def end(self):
        self.wait(self.made)


class Prompt(Late):
    """Copies at once: for callers that look at what is complete."""

    def copy(self, block, memory):
        event = super().copy(block, memory)
        self.wait(event)
        return event


@pytest.fixture
def through(device, monkeypatch):
    """Loading on `device` goes through the ring, with buffers so small that tensors take several."""
    if device == "cpu":
        monkeypatch.setattr(transfer, "serves", lambda device: True)
        monkeypatch.setattr(transfer, "Copies", Prompt)
    monkeypatch.setattr(transfer, "SETTINGS", SMALL)
    monkeypatch.setattr(transfer, "_ROW", 64)
    run, runs = transfer.run, []
    monkeypatch.setattr(transfer, "run", lambda blocks, *given: (runs.append(blocks), run(blocks, *given))[1])
    yield device
    assert all(len(blocks) > 3 for blocks in runs) and (runs or device != "cpu")


@pytest.fixture
def late(device, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(transfer, "Copies", Late)
    return torch.device(device)


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "ligermodels-load"]
    links = [os.path.join("/proc/self/fd", number) for number in os.listdir("/proc/self/fd")]
    assert not [link for link in links if os.path.lexists(link) and "safetensors" in os.readlink(link)]


# The same bits


@pytest.mark.parametrize("stored, dtype", [*((x, x) for x in FLOATS), *itertools.permutations(FLOATS[1:3])])
@pytest.mark.parametrize("family, tied, shards, pad", [("mixtral", False, 5, 0), ("llama", True, 1, 1)])
def test_a_model_has_the_bits_that_safetensors_reads(
    tmp_path, through, poison, stored, dtype, family, tied, shards, pad
):
    """Every bit pattern. With a header of odd length, as in old files, weights are not aligned to their elements."""
    a_checkpoint(tmp_path / "x", family, dtype=stored, tied=tied, shards=shards)
    for file in (tmp_path / "x").glob("*.safetensors"):
        entries, data = split(file.read_bytes())
        file.write_bytes(join(json.dumps(entries).encode() + b" " * pad, data))
    read = stored_tensors(tmp_path / "x")
    with pytest.warns(UserWarning, match="hold NaN or infinity"):
        model = ligermodels.load(tmp_path / "x", device=through, dtype=dtype, progress=False)
    for name, box in weights.export(model, model.names_on_disk):
        assert same_bits(box.cpu(), read[name].to(dtype)) or stored != dtype, name
        torch.testing.assert_close(box.cpu(), read[name].to(dtype), rtol=0, atol=0, equal_nan=True)
        assert box.device.type == torch.device(through).type


def test_what_is_in_another_order_on_disk_is_loaded_beside_the_ring(tmp_path, through, monkeypatch):
    monkeypatch.setattr(ligermodels.Mixtral, "DISK_NAMES", STACKED)
    read = a_checkpoint(tmp_path / "x", "mixtral", shards=3, finite=True)
    model = ligermodels.load(tmp_path / "x", device=through, progress=False)
    written = dict(weights.export(model, model.names_on_disk))
    assert {box.device.type for box in written.values()} == {torch.device(through).type}
    assert same({name: box.cpu() for name, box in written.items()}, read)
    experts = "model.layers.1.mlp.experts."
    gate_up = model.model.layers[1].mlp.experts.gate_up_proj.cpu()
    assert torch.equal(gate_up[:, :24], read[experts + "gate_up_proj"][:, :, 0::2].transpose(1, 2))
    assert torch.equal(model.model.layers[1].mlp.experts.down_proj.cpu(), read[experts + "down_proj"].transpose(1, 2))


def placed(generator: random.Random, device: torch.device) -> tuple[tuple[int, ...], tuple[slice, ...], Tensor]:
    """A shape on disk, a box in it, and memory for the box, with gaps or without."""
    shape = tuple(generator.randint(1, 9) for _ in range(generator.randint(0, 4)))
    ends = [sorted(generator.sample(range(size + 1), 2)) for size in shape]
    ends = [generator.choice([end, [0, size]]) for end, size in zip(ends, shape, strict=True)]
    index = tuple(slice(*end) for end in ends)[: generator.randint(0, len(shape))]
    box = torch.empty(shape)[index].shape
    sizes = [size + generator.choice([0, 0, 2]) for size in box]
    large = torch.zeros(sizes, dtype=generator.choice(FLOATS), device=device)
    return shape, index, large[tuple(slice(size) for size in box)]


@pytest.mark.parametrize("seed", range(12))
def test_any_box_goes_to_any_place(tmp_path, late, monkeypatch, seed):
    generator = random.Random(seed)
    monkeypatch.setattr(transfer, "_ROW", generator.choice([1, 60, 2**18]))
    settings = Settings(generator.randint(1, 4), generator.randint(1, 4), generator.choice([8, 50, 400, 10**5]))
    cases = {f"x{k}": placed(generator, late) for k in range(20)}
    tensors = {name: torch.randn(shape, dtype=generator.choice(FLOATS)) for name, (shape, _, _) in cases.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    targets = {name: target for name, (_, _, target) in cases.items()}
    with SafetensorsReader(tmp_path) as reader:
        parts = [Part(name, reader.locate(name), cases[name][1], targets[name]) for name in cases]
        blocks = transfer.plan(parts, settings)
    assert all(0 < block.nbytes <= settings.buffer_bytes for block in blocks)
    steps = list(transfer.run(blocks, late, settings))
    assert sum(nbytes for nbytes, _ in steps) == sum(block.nbytes for block in blocks)
    names = [name for _, complete in steps for name in complete]
    assert sorted(names) == sorted(cases)
    for name, tensor in tensors.items():
        assert torch.equal(targets[name].cpu(), tensor[cases[name][1]].to(targets[name].dtype)), name


def test_rows_are_read_and_nothing_else(tmp_path):
    save_file({"a": torch.randn(64, 16), "b": torch.randn(8)}, tmp_path / "model.safetensors")
    with SafetensorsReader(tmp_path) as reader:
        a, b = (reader.locate(name) for name in "ab")
    part = Part("b", b, (), torch.empty(8))
    blocks = transfer.plan([Part("a", a, (slice(16, 48),), torch.empty(32, 16)), part], transfer.SETTINGS)
    assert sum(block.nbytes for block in blocks) == 4 * (32 * 16 + 8)
    blocks = transfer.plan([Part("a", a, (slice(0, 64),), torch.empty(64, 16)), part], transfer.SETTINGS)
    assert len(blocks) == 1, "neighbours on disk are read together"


# The ring


@pytest.fixture
def stored(tmp_path):
    """(its parts, what they should become) of a file of 40 kB."""
    tensors = {f"x{k}": torch.randn(50, 25, dtype=torch.float64) for k in range(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    reader = SafetensorsReader(tmp_path)

    def parts(device):
        empty = {name: torch.empty(50, 25, dtype=torch.float64, device=device) for name in tensors}
        return [Part(name, reader.locate(name), (), empty[name]) for name in tensors]

    return parts, tensors


def slow(generator: random.Random, most: float, least_bytes: int = 1):
    """A preadv that takes its time, and reads less than it was asked for."""
    real = os.preadv

    def preadv(file, buffers, offset):
        time.sleep(generator.uniform(0, most))
        (buffer,) = buffers
        return real(file, [buffer[: max(least_bytes, generator.randint(1, len(buffer)))]], offset)

    return preadv


@pytest.mark.parametrize("settings", [SMALL, Settings(1, 1, 512), Settings(8, 3, 4096), Settings(2, 9, 10**6)])
def test_a_buffer_is_filled_again_only_when_its_copies_have_ended(stored, late, monkeypatch, settings):
    monkeypatch.setattr(os, "preadv", slow(random.Random(0), 1e-3, least_bytes=200))
    made = []
    monkeypatch.setattr(transfer, "Copies", type("Watched", (transfer.Copies,), {
        "__init__": lambda self, device: (super(type(self), self).__init__(device), made.append(self))[0],
        "buffer": lambda self, nbytes: made.append(super(type(self), self).buffer(nbytes)) or made[-1],
    }))  # fmt: skip
    parts, tensors = stored[0](late), stored[1]
    list(transfer.run(transfer.plan(parts, settings), late, settings))
    assert all(same_bits(part.target.cpu(), tensors[part.name]) for part in parts)
    places = sorted(buffer.data_ptr() for buffer in made[1:])
    assert 1 <= len(places) <= settings.buffers
    assert all(b - a >= settings.buffer_bytes for a, b in itertools.pairwise(places)), "buffers overlap"


# What goes wrong


def touch(path):
    os.utime(path, ns=(1, 1))


def broken(path):
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("when, damage, kind, message", [
    ("read", lambda path: os.truncate(path, 20_000), CheckpointError, "cut short"),
    ("read", broken, HubError, "cannot be read: Input/output error"),
    ("read", touch, CheckpointError, "changed or replaced"),
    ("before", lambda path: path.unlink(), CheckpointError, "was removed"),
    ("before", lambda path: path.rename(f"{path}.old").with_suffix("").write_bytes(b"x" * 40_500),
     CheckpointError, "changed or replaced"),
])  # fmt: skip
def test_what_happens_to_a_file_after_its_header_was_read(stored, late, monkeypatch, when, damage, kind, message):
    parts, preadv = stored[0](late), os.preadv
    path = parts[0].stored.file.path
    if when == "before":
        damage(path)
    else:
        monkeypatch.setattr(os, "preadv", lambda *args: (preadv(*args), damage(path))[0])
    with pytest.raises(kind, match=message) as caught:
        list(transfer.run(transfer.plan(parts, SMALL), late, SMALL))
    assert str(path) in str(caught.value)


def test_an_error_of_the_copies_reaches_the_caller(stored, late, monkeypatch):
    blocks = transfer.plan(stored[0](late), SMALL)
    blocks[len(blocks) // 2].pieces[0].target = torch.empty(1, device=late)
    with pytest.raises(RuntimeError):
        list(transfer.run(blocks, late, SMALL))


@pytest.mark.parametrize("how", ["close", "interrupt"])
def test_leaving_early_ends_the_threads(stored, late, monkeypatch, how):
    monkeypatch.setattr(os, "preadv", slow(random.Random(0), 1e-3))
    steps = transfer.run(transfer.plan(stored[0](late), SMALL), late, SMALL)
    next(steps)
    assert any(thread.name == "ligermodels-load" for thread in threading.enumerate())
    if how == "close":
        steps.close()
    else:
        with pytest.raises(KeyboardInterrupt):
            steps.throw(KeyboardInterrupt())
