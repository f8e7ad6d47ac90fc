"""Tiny models and tokenizers to convert to GGUF, and what the gguf package reads from the file."""

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
from tests.arch import qwen2_vl, qwen3_vl
from tests.text import families, folders, templates
from tests.vision import folders as vision_folders

gguf = pytest.importorskip("gguf")

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": None,
}  # fmt: skip
SPECIALS = ("<|begin|>", "<|end|>", "<|eot|>")
CHAT = "{% for m in messages %}<|begin|>{{ m.content }}<|eot|>{% endfor %}"
TEXTS = (*folders.TEXTS, "the the", "the  the", "a\n\n\nb", "314 it's I'LL", "</s>the")


def byte_level(folder: Path, split: str = families.LLAMA_3_SPLIT, **options) -> Path:
    """A tokenizer like those of Llama 3 and Qwen: special ids after 420 tokens, and one added token that is not."""
    special = {420 + at: folders.added(name) for at, name in enumerate(SPECIALS)}
    special[423] = folders.added("<tool call>", special=False)
    folders.write(folder, "tokenizer.json", families._byte_level(split, special, bos="<|begin|>", **options))
    config = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": CHAT}
    folders.write(folder, "tokenizer_config.json", config)
    return folder


def qwen_vl(folder: Path, split: str) -> Path:
    """Tokenizer, chat template and image processor of a Qwen that reads images; `with_images` changes the processor."""
    vision_folders.qwen3_vl(folder)
    special = {420 + at: folders.added(name) for at, name in enumerate(vision_folders.QWEN_TOKENS)}
    folders.write(folder, "tokenizer.json", families._byte_level(split, special))
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": vision_folders.QWEN_TEMPLATE}
    folders.write(folder, "tokenizer_config.json", config)
    (folder / "chat_template.json").unlink()
    return folder


def gemma_4(folder: Path) -> Path:
    """Gemma's tokens with their merges alone, in tokenizer.json."""
    families.FAMILIES["gemma 2"].build(folder)
    (folder / "tokenizer.model").unlink()
    return folder


KINDS = {
    **{kind: families.FAMILIES[kind].build for kind in ("llama 2", "mistral 0.3", "nemo", "gemma 1", "gemma 2")},
    "mixtral": families.FAMILIES["llama 2"].build,
    "gemma 4": gemma_4,
    "llama 3": lambda folder: byte_level(folder, ignore_merges=True),
    "qwen 2": lambda folder: byte_level(folder, families.QWEN_SPLIT),
    "qwen 3.5": lambda folder: byte_level(folder, families.QWEN_3_5_SPLIT),
    "qwen vl": lambda folder: qwen_vl(folder, families.QWEN_SPLIT),
    "qwen 3.5 vl": lambda folder: qwen_vl(folder, families.QWEN_3_5_SPLIT),
    "phi 4": lambda folder: byte_level(folder, behavior="removed"),
    "harmony": lambda folder: folders.harmony(folder, templates.HARMONY, families.O200K_SPLIT),
    "phi 4 mini": lambda folder: byte_level(folder, families.O200K_SPLIT),
}


@functools.cache
def tokenizer_folder(kind: str) -> Path:
    """The folder of a tokenizer of KINDS, written once; it is deleted when the interpreter ends."""
    root = tempfile.TemporaryDirectory()
    tokenizer_folder.roots.append(root)
    return KINDS[kind](Path(root.name) / "folder")


tokenizer_folder.roots = []


def rows_of(kind: str) -> int:
    """Rows of an embedding: eight more than the tokenizer has tokens."""
    return Tokenizer.from_folder(tokenizer_folder(kind)).vocab_size + 8


def add_tokenizer(folder: Path, kind: str) -> None:
    for path in tokenizer_folder(kind).iterdir():
        if path.name not in ("config.json", "generation_config.json"):
            shutil.copy(path, folder / path.name)


def small_model(folder: Path, kind: str, family: str = "llama", rows: int | None = None, **fields) -> Path:
    """A model of one layer with a tokenizer of KINDS."""
    config = {"model_type": family, **SIZES, "num_hidden_layers": 1, "vocab_size": rows or rows_of(kind), **fields}
    ARCHS[family].from_config(config, device="cpu", seed=1).save_pretrained(folder)
    add_tokenizer(folder, kind)
    return folder


def with_images(folder: Path, family: str, vision: dict | None = None, dtype=None, **fields) -> Path:
    """A model of Qwen that reads images, with random weights: blocks, biases and norms far from their initial values.

    Its mean and deviation of pixels differ by colour; the smallest image has one token.
    """
    kind = "qwen 3.5 vl" if family.startswith("qwen3_5") else "qwen vl"
    tokens = {f"{name}_token_id": 420 + at for at, name in IMAGE_TOKENS.items()}
    fields = {"vocab_size": rows_of(kind), "num_hidden_layers": 3, "max_position_embeddings": 256, **fields}
    side = 14 if family == "qwen2_vl" else 16
    sizes = {"patch_size": side} | ({} if side == 14 else {"num_position_embeddings": 16})
    sizes |= {"deepstack_visual_indexes": [0, 2]} if family.startswith("qwen3_vl") else {}
    vision = sizes | (vision or {})
    if kind == "qwen 3.5 vl":
        kinds = ["linear_attention", "linear_attention", "full_attention"]
        fields = {"layer_types": kinds, "linear_value_head_dim": 8, **fields}
    config = (qwen2_vl.tiny if side == 14 else getattr(qwen3_vl, family))(vision, **fields) | tokens
    model = ARCHS[family].from_config(config, device="cpu", dtype=dtype or torch.float32)
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.2 if parameter.dim() > 1 else 0.5
            scale = {"visual.patch_embed.proj": 0.02, "visual.pos_embed": 1.0}.get(name[6:].rpartition(".")[0], scale)
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * scale)
    model.save_pretrained(folder)
    add_tokenizer(folder, kind)
    limits = {"shortest_edge": (2 * side) ** 2, "longest_edge": 4096 * (2 * side) ** 2}
    processor = {**vision_folders.QWEN3, "size": limits, "patch_size": side, "image_mean": [0.5, 0.25, 0.75]}
    folders.write(folder, "preprocessor_config.json", {**processor, "image_std": [0.25, 0.5, 0.375]})
    (folder / "video_preprocessor_config.json").unlink()
    return folder


IMAGE_TOKENS = {3: "vision_start", 4: "vision_end", 5: "image", 6: "video"}


def to_gguf(source: Path, target: Path, **options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*window.*")
        return convert(source, target, Options(progress=False, **options))


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


def as_it_is(tensor):
    return np.array(tensor.data), None


def rewritten(model, target, change=lambda fields: None, values_of=as_it_is, name_of=str):
    """A copy of the file with other metadata, or other (values, type) of its tensors, or without those whose name is
    None."""
    reader = gguf.GGUFReader(model)
    fields = {key: (field.contents(), field.types) for key, field in reader.fields.items() if "GGUF." not in key}
    change(fields)
    writer = gguf.GGUFWriter(target, fields.pop("general.architecture")[0])
    for key, (value, types) in fields.items():
        inner = types[-1] if types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, value, types[0], sub_type=inner)
    for tensor in reader.tensors:
        values, kind = values_of(tensor)
        if (name := name_of(tensor.name)) is not None:
            writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantised(source, target, type_name):
    """A copy of a GGUF file whose matrices are quantised, and its tensors as the gguf package dequantises them."""
    kind, expected = gguf.GGMLQuantizationType[type_name], {}
    block, size = gguf.GGML_QUANT_SIZES[kind]

    def blocks(values):
        try:
            return gguf.quantize(values, kind)
        except NotImplementedError:  # the gguf package only reads it: random blocks with small scales
            shape = (*values.shape[:-1], values.shape[-1] // block * size)
            found = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
            scales = found.reshape(-1, size)
            for at in (0, 2, size - 2, size - 4):  # where the types have their fp16 scales
                scales[:, at : at + 2] = np.array([0.01], np.float16).view(np.uint8)
            return found

    def values_of(tensor):
        values = np.array(tensor.data).reshape(tensor.shape.tolist()[::-1])
        is_quantised = len(tensor.shape) > 1 and tensor.shape[0] % block == 0
        values = blocks(values) if is_quantised else values
        expected[tensor.name] = torch.from_numpy(gguf.dequantize(values, kind) if is_quantised else values)
        return values, kind if is_quantised else None

    rewritten(source, target, values_of=values_of)
    return expected
