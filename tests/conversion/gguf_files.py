"""Tiny models and tokenizers to convert to GGUF, and what the gguf package reads back from the file."""

import functools
import shutil
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from ligermodels.arch import ARCHS
from ligermodels.conversion import Options, convert
from ligermodels.text import Tokenizer
from tests.text import families, folders

gguf = pytest.importorskip("gguf")

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": None,
}  # fmt: skip
SPECIALS = ("<|begin|>", "<|end|>", "<|eot|>")
CHAT = "{% for m in messages %}<|begin|>{{ m.content }}<|eot|>{% endfor %}"


def byte_level(folder: Path, split: str = families.LLAMA_3_SPLIT, **options) -> Path:
    """A tokenizer like those of Llama 3 and Qwen: special ids after 420 tokens, and one added token that is not."""
    special = {420 + at: folders.added(name) for at, name in enumerate(SPECIALS)}
    special[423] = folders.added("<tool call>", special=False)
    state = families._byte_level(split, special, bos="<|begin|>", **options)
    folders.write(folder, "tokenizer.json", state)
    config = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": CHAT}
    folders.write(folder, "tokenizer_config.json", config)
    return folder


KINDS = {
    "llama 2": families.FAMILIES["llama 2"].build,
    "llama 3": lambda folder: byte_level(folder, ignore_merges=True),
    "mistral 0.3": families.FAMILIES["mistral 0.3"].build,
    "mixtral": families.FAMILIES["llama 2"].build,
    "nemo": families.FAMILIES["nemo"].build,
    "gemma 1": families.FAMILIES["gemma 1"].build,
    "gemma 2": families.FAMILIES["gemma 2"].build,
    "qwen 2": lambda folder: byte_level(folder, families.QWEN_SPLIT),
    "phi 4": lambda folder: byte_level(folder, behavior="removed"),
    "phi 4 mini": lambda folder: byte_level(folder, families.O200K_SPLIT),
}


@functools.cache
def tokenizer_folder(kind: str) -> Path:
    """The folder of a tokenizer of KINDS, written once; it is deleted when the interpreter ends."""
    root = tempfile.TemporaryDirectory()
    tokenizer_folder.roots.append(root)
    return KINDS[kind](Path(root.name) / "folder")


tokenizer_folder.roots = []


def add_tokenizer(folder: Path, kind: str, without: tuple[str, ...] = ()) -> None:
    for path in tokenizer_folder(kind).iterdir():
        if path.name not in ("config.json", "generation_config.json", *without):
            shutil.copy(path, folder / path.name)


def small_model(folder: Path, kind: str, family: str = "llama", rows: int | None = None, **fields) -> Path:
    """A model of one layer with a tokenizer of KINDS and, by default, eight rows more than that has tokens."""
    rows = rows or Tokenizer.from_folder(tokenizer_folder(kind)).vocab_size + 8
    config = {"model_type": family, **SIZES, "num_hidden_layers": 1, "vocab_size": rows, **fields}
    ARCHS[family].from_config(config, device="cpu", seed=1).save_pretrained(folder)
    add_tokenizer(folder, kind)
    return folder


def to_gguf(source: Path, target: Path, **options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*window.*")
        return convert(source, target, Options(to="gguf", progress=False, **options))


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a file, as the gguf package reads it."""
    types = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        data = torch.from_numpy(np.array(tensor.data).reshape(-1).view(np.uint8))
        found[tensor.name] = data.view(types[tensor.tensor_type.name]).reshape(tensor.shape.tolist()[::-1])
    return found


def fields_of(path: Path) -> dict:
    fields = gguf.GGUFReader(path).fields
    return {name: field.contents() for name, field in fields.items() if not name.startswith("GGUF.")}
