"""A tiny model, its checkpoint in one file and in two, and copies of it that are damaged."""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

import ligermodels

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


def make_model(seed: int = 0, **changes) -> nn.Module:
    config = {**CONFIG, **changes}
    arch = ligermodels.ARCHS[config["model_type"]]
    return arch.from_config(config, seed=seed, device="cpu", dtype=torch.float32)


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


@contextlib.contextmanager
def spoiled(good: Path, spoil: Callable[[Path], object]) -> Iterator[Path]:
    """A damaged copy of a good checkpoint."""
    with tempfile.TemporaryDirectory() as root:
        folder = shutil.copytree(good, Path(root) / "model")
        spoil(folder)
        yield folder


def make_biased_model():
    """With biases, and widths that are no multiples of a quantiser's block or group."""
    model = make_model(num_hidden_layers=2, attention_bias=True, initializer_range=0.2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return model
