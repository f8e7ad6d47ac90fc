"""The vision tower of Qwen's models as a GGUF file of its own, mmproj, which llama.cpp reads beside that of the text.

    clip.projector_type                 qwen2vl_merger (Qwen2-VL), qwen3vl_merger (Qwen3-VL, Qwen3.5)
    v.patch_embd.weight, .weight.1      the two frames of a patch apart, [size, 3, side, side] each
    v.blk.N.attn_q, attn_k, attn_v      of Qwen2-VL, the rows of attn.qkv; of the others attn_qkv, all rows
    v.deepstack.N                       the merger of the states after block N, not number N of the list
    v.post_ln, mm.0, mm.2               the merger of all: its norm and two matrices

- Norms, biases, patch and position embeddings are F32, matrices F16 unless another dtype is asked for. llama.cpp's own
  converter has the patch embedding in F16, which it rounds pixels for.
- Pixel limits are in the file for us alone: llama.cpp allows 8 to 4,096 tokens (--image-min-tokens).
- llama.cpp computes a merge of 2 x 2 patches of two frames and three colours, a theta of 10,000, quick_gelu and gelu
  (tanh), which it also takes for the exact gelu of the mergers.

Checked against: conversion/qwenvl.py, qwen3vl.py and base.py, tools/mtmd/clip.cpp, models/qwen2vl.cpp and qwen3vl.cpp
of llama.cpp; gguf 0.19.
"""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ligermodels.checkpoint.files import lenient_json
from ligermodels.checkpoint.gguf.output import GgufOutput, OutTensor, file_type, float_type
from ligermodels.checkpoint.gguf.reader import package
from ligermodels.errors import CheckpointError, ConfigError

QWEN2, QWEN3 = "qwen2vl_merger", "qwen3vl_merger"
PROJECTORS = {
    "qwen2_vl": QWEN2, "qwen3_vl": QWEN3, "qwen3_vl_moe": QWEN3, "qwen3_5": QWEN3, "qwen3_5_moe": QWEN3,
}  # fmt: skip
"""{model_type of a model that reads images: llama.cpp's name of its tower}."""
_PATCHES, _POSITIONS = "patch_embed.proj.weight", "pos_embed.weight"
_IMAGE_SIZE = 560
"""Of Qwen2-VL's files; nothing is computed from it."""


def tower_names(projector: str, depth: int, picked: list[int]) -> dict[str, tuple[str, ...]]:
    """{Hugging Face's name after "visual.": llama.cpp's names of its parts}.

    depth: the number of blocks. picked: those whose states go to the text, in the order of their mergers.
    """
    names: dict[str, tuple[str, ...]] = {}

    def add(ours: str, *theirs: str) -> None:
        for kind in ("weight", "bias"):
            names[f"{ours}.{kind}"] = tuple(f"{place}.{kind}" for place in theirs)

    split = projector == QWEN2
    first, second, norm = ("fc1", "fc2", "ln_q") if split else ("linear_fc1", "linear_fc2", "norm")
    for i in range(depth):
        block, place = f"blocks.{i}.", f"v.blk.{i}."
        add(f"{block}norm1", f"{place}ln1")
        add(f"{block}attn.qkv", *(f"{place}attn_{part}" for part in (("q", "k", "v") if split else ("qkv",))))
        add(f"{block}attn.proj", f"{place}attn_out")
        add(f"{block}norm2", f"{place}ln2")
        add(f"{block}mlp.{first}", f"{place}ffn_up")
        add(f"{block}mlp.{second}", f"{place}ffn_down")
    for number, i in enumerate(picked):
        merger, place = f"deepstack_merger_list.{number}.", f"v.deepstack.{i}."
        add(f"{merger}{norm}", f"{place}norm")
        add(f"{merger}{first}", f"{place}fc1")
        add(f"{merger}{second}", f"{place}fc2")
    add(f"merger.{norm}", "v.post_ln")
    add("merger.mlp.0" if split else f"merger.{first}", "mm.0")
    add("merger.mlp.2" if split else f"merger.{second}", "mm.2")
    names[_PATCHES] = ("v.patch_embd.weight", "v.patch_embd.weight.1")
    if not split:
        names |= {"patch_embed.proj.bias": ("v.patch_embd.bias",), _POSITIONS: ("v.position_embd.weight",)}
    return names


class MmprojTarget(GgufOutput):
    """The mmproj file of a model that reads images, planned from headers.

    view: the source, a `conversion.source.View` of the whole model. dtype: of the matrices. name: of the model, for
    people.
    Raises ConfigError for a family or a tower that llama.cpp does not compute, or without the gguf package;
    CheckpointError for a source without preprocessor_config.json.
    """

    def __init__(self, view: Any, *, dtype: torch.dtype = torch.float16, name: str = ""):
        gguf, config = package(), view.model.config
        if config.model_type not in PROJECTORS:
            raise ConfigError(
                f"{view.source} is a {config.model_type}, and mmproj files are written for {', '.join(PROJECTORS)} "
                "alone.\n  Next: leave --mmproj out; llama.cpp's convert_hf_to_gguf.py --mmproj writes those of others."
            )
        check(config, view.source)
        vision, projector = config.vision_config, PROJECTORS[config.model_type]
        prefix = "visual." if config.model_type == "qwen2_vl" else "model.visual."
        tensors: dict[str, OutTensor] = {}
        names = tower_names(projector, vision.depth, getattr(vision, "deepstack_visual_indexes", []))
        for ours, places in names.items():
            shape = _parts(ours, torch.empty(view.headers[prefix + ours].shape, device="meta"), len(places))[0].shape
            exact = len(shape) != 2 or ours == _POSITIONS
            kind = "F32" if exact else float_type(ours, dtype)
            for i, place in enumerate(places):
                read = partial(_read, view, prefix + ours, ours, i, len(places))
                tensors[place] = OutTensor(kind, tuple(shape), read)
        writer = gguf.GGUFWriter(None, "clip")
        writer.add_type("mmproj")
        writer.add_file_type(file_type({"a matrix": tensors["mm.0.weight"]}))
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        add[bool] = writer.add_bool
        for key, value in _metadata_of(config, projector, tensors, _settings(view.files(), view.source)).items():
            add[type(value)](f"clip.{key}", value)
        super().__init__(writer, tensors, name)


def _read(view: Any, source: str, ours: str, part: int, count: int) -> Iterator[Tensor]:
    yield _parts(ours, view.read(source), count)[part]


def _parts(ours: str, tensor: Tensor, count: int) -> tuple[Tensor, ...]:
    """The parts of a tensor in the file: frames of a patch embedding, or rows."""
    return tensor.unbind(2) if ours == _PATCHES else tensor.chunk(count)


def joined(ours: str, parts: list[Tensor]) -> Tensor:
    """The tensor with Hugging Face's name `ours`, of which `parts` are all parts."""
    if len(parts) == 1:
        return parts[0]
    return torch.stack(parts, 2) if ours == _PATCHES else torch.cat(parts)


def _metadata_of(
    config: Any, projector: str, tensors: Mapping[str, OutTensor], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """{key after "clip.": value}."""
    vision = config.vision_config
    metadata: dict[str, Any] = {"has_vision_encoder": True, "projector_type": projector}
    if vision.hidden_act != "quick_gelu":
        metadata["use_gelu"] = True
    positions, picked = tensors.get("v.position_embd.weight"), getattr(vision, "deepstack_visual_indexes", [])
    of_vision = {
        "projection_dim": config.hidden_size,
        "image_size": math.isqrt(positions.shape[0]) * vision.patch_size if positions else _IMAGE_SIZE,
        "patch_size": vision.patch_size,
        "embedding_length": tensors["v.post_ln.weight"].shape[0],
        "feed_forward_length": tensors["v.blk.0.ffn_up.weight"].shape[0],
        "block_count": vision.depth,
        "attention.head_count": vision.num_heads,
        "attention.layer_norm_epsilon": 1e-6,
        "spatial_merge_size": vision.spatial_merge_size,
        "image_mean": settings["image_mean"],
        "image_std": settings["image_std"],
        "image_min_pixels": settings["min_pixels"],
        "image_max_pixels": settings["max_pixels"],
    }
    if projector == QWEN3:
        of_vision["is_deepstack_layers"] = [i in picked for i in range(vision.depth)]
    return metadata | {f"vision.{key}": value for key, value in of_vision.items() if value is not None}


def _settings(files: Mapping[str, bytes | Path], source: str) -> dict[str, Any]:
    """image_mean, image_std, min_pixels and max_pixels (None where they are not set) of the image processor.

    files: of a `Source`. Raises CheckpointError, ConfigError.
    """

    def read(name: str) -> dict[str, Any]:
        content = files.get(name, b"{}")
        return lenient_json((content if isinstance(content, bytes) else content.read_bytes()).decode())

    config = read("processor_config.json").get("image_processor") or read("preprocessor_config.json")
    where = f"{source}: preprocessor_config.json"
    if not config:
        raise CheckpointError(
            f"{where} is not there, which says how pixels become numbers (image_mean, image_std).\n"
            "  Next: copy it from the checkpoint that this one was made from."
        )
    if not (config.get("do_rescale", True) and config.get("do_normalize", True)):
        raise ConfigError(f"{where} has do_rescale or do_normalize false, which llama.cpp does not compute")
    numbers = {key: config.get(key) for key in ("image_mean", "image_std")}
    for key, value in numbers.items():
        if not isinstance(value, list) or len(value) != 3 or not all(isinstance(x, int | float) for x in value):
            raise ConfigError(f"{where}: {key} is {value!r}, expected three numbers")
        numbers[key] = [float(x) for x in value]
    size = config.get("size") or {}
    for key, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        numbers[key] = config.get(key) or size.get(key) or size.get(edge)
    return numbers


def check(config: Any, where: str) -> None:
    """Raises ConfigError for a tower that llama.cpp computes otherwise."""
    vision = config.vision_config
    expected: dict[str, Any] = {"temporal_patch_size": 2, "in_channels": 3, "spatial_merge_size": 2}
    odd = [
        f"{field} {value} (it takes {expected[field]})"
        for field in expected
        if (value := getattr(vision, field)) != expected[field]
    ]
    odd += [f"hidden_act {vision.hidden_act}"] * (vision.hidden_act not in ("quick_gelu", "gelu_pytorch_tanh"))
    theta = vision.rope_parameters["rope_theta"]
    odd += [f"rope_theta {theta:g} (it takes 10000)"] * (theta != 10000)
    if config.model_type == "qwen2_vl" and int(vision.embed_dim * vision.mlp_ratio) == vision.embed_dim:
        odd.append("mlp_ratio 1 (it takes the two matrices of an MLP for one another)")
    if odd:
        raise ConfigError(
            f"{where}: llama.cpp does not compute {'; '.join(odd)} of the tower of a {config.model_type}.\n"
            "  Next: leave --mmproj out."
        )
