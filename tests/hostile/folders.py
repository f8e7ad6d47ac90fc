"""A tiny checkpoint to spoil, and the limits that every refusal keeps: its time and its memory."""

import contextlib
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import ligermodels

SECONDS, SPARE = 20, 64 * 2**20  # what takes longest, a config of 1024 layers, takes 1 s
PATIENCE = 300  # seconds on the wall, where other work has the processor too
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
EMBEDDING, NORM, LAST = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
CONFIG = dict(
    model_type="llama",
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
)


def make_model(seed: int = 0, **changes) -> ligermodels.Llama:
    return ligermodels.Llama.from_config({**CONFIG, **changes}, seed=seed, device="cpu", dtype=torch.float32)


def make_good(root: Path) -> dict[str, Path]:
    """The same model in one file ("single") and in two with an index ("sharded")."""
    model = make_model()
    single = model.save_pretrained(root / "single")
    sharded = model.save_pretrained(root / "sharded", max_shard_size=sum(p.nbytes for p in model.parameters()) - 1)
    assert sorted(path.name for path in sharded.glob("*.safetensors")) == sorted(SHARDS)
    return {"single": single, "sharded": sharded}


def split(blob: bytes) -> tuple[dict, bytes]:
    """The header and the data of a safetensors file."""
    length = int.from_bytes(blob[:8], "little")
    return json.loads(blob[8 : 8 + length]), blob[8 + length :]


def join(header: object, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


class TooSlow(BaseException):
    """Nothing catches this one by mistake."""


@contextlib.contextmanager
def limited(folder: Path) -> Iterator[None]:
    """Fails if what is inside computes for over 20 s or hangs, or takes memory beyond the size of the files and 64 MiB
    (Linux)."""
    measured = sys.platform == "linux"
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0

    def stop(*args):
        raise TooSlow(f"{folder} was read for {PATIENCE} s")

    if measured:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = _memory("VmRSS")
    previous, start = signal.signal(signal.SIGALRM, stop), time.process_time()
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    assert time.process_time() - start < SECONDS
    if measured:
        assert (grown := _memory("VmHWM") - before) <= size + SPARE, f"{grown / 2**20:.0f} MiB for {size} bytes"


@contextlib.contextmanager
def spoiled(good: Path, spoil: Callable[[Path], object]) -> Iterator[Path]:
    """A copy of a good checkpoint, spoiled, in a folder that every user may enter."""
    with tempfile.TemporaryDirectory() as root:
        Path(root).chmod(0o755)
        folder = shutil.copytree(good, Path(root) / "model")
        spoil(folder)
        yield folder
