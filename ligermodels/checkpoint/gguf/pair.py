"""Reads a GGUF file of a text and the mmproj of its vision tower as the model that reads images.

The tensors are those of mmproj.py; its sizes are read from them, where files of other converters differ in the keys.
config.json takes the sections of the rotary frequencies, which the text alone does not need, from the text's metadata,
and the ids of image tokens from the tokenizer. Videos have the limits of images.
"""

import json
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ligermodels.checkpoint.files import json_bytes
from ligermodels.checkpoint.gguf.config import whole
from ligermodels.checkpoint.gguf.mmproj import PROJECTORS, joined, tower_names
from ligermodels.checkpoint.gguf.reader import GgufFile, GgufReader
from ligermodels.checkpoint.weights import TensorInfo
from ligermodels.errors import CheckpointError, ConfigError

_WHOLE = {
    "qwen2vl": ("qwen2_vl", "Qwen2VLForConditionalGeneration"),
    "qwen3vl": ("qwen3_vl", "Qwen3VLForConditionalGeneration"),
    "qwen3vlmoe": ("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration"),
    "qwen35": ("qwen3_5", "Qwen3_5ForConditionalGeneration"),
    "qwen35moe": ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
}
"""{llama.cpp's architecture of a text: model_type and architecture of the model that reads images}."""
_TOKENS = {
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>", "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}  # fmt: skip
_LIMITS = (8, 4096)
"""Tokens of an image in llama.cpp."""


class PairReader:
    """A GGUF file of a text and its mmproj, under the names of the model that reads images: a `weights.Reader`.

    headers, types, metadata, is_mapped: as of `GgufReader`. The tower has the dtype of the text.
    Raises CheckpointError and ConfigError, as `GgufReader`, and for files that do not belong together.
    """

    is_mapped = GgufReader.is_mapped

    def __init__(self, text: Path, tower: Path):
        self._text, self._file = GgufReader(text), GgufFile(tower)
        self.source, self.metadata = f"{text} with {tower}", self._text.metadata
        self._where, projector = str(tower), self._file.metadata.get("clip.projector_type")
        self._kind, self._architecture = _WHOLE.get(self._text.arch, ("", ""))
        if not self._kind or projector != PROJECTORS[self._kind]:
            raise ConfigError(
                f"{tower} holds {projector!r}, and {text} a {self._text.arch!r}: read together are "
                f"{', '.join(f'{arch} with {PROJECTORS[kind]}' for arch, (kind, _) in _WHOLE.items())}.\n"
                f"  Next: give {text} itself for the text alone."
            )
        self._vision = self._vision_config()
        picked = self._vision.get("deepstack_visual_indexes", [])
        names = tower_names(projector, self._vision["depth"], picked)
        prefix = "visual." if self._kind == "qwen2_vl" else "model.visual."
        self._texts = {self._renamed(name): name for name in self._text.headers}
        self._towers = {prefix + ours: (ours, places) for ours, places in names.items()}
        known = {place for places in names.values() for place in places}
        if odd := sorted(known ^ self._file.tensors.keys()):
            raise CheckpointError(f"{tower} lacks, or has more than, what its blocks need: {', '.join(odd[:4])}")
        embedding = self._text.headers["model.embed_tokens.weight"]
        if (size := self._vision_size()) != embedding.shape[1]:
            raise CheckpointError(
                f"{tower} makes tokens of size {size}, and {text} takes {embedding.shape[1]}: they are of two models"
            )
        self._dtype = embedding.dtype
        self.headers = {name: self._text.headers[ours] for name, ours in self._texts.items()}
        self.headers |= {name: TensorInfo(self._dtype, self._shape(*at)) for name, at in self._towers.items()}
        self.types = {name: self._text.types[ours] for name, ours in self._texts.items() if ours in self._text.types}
        self.types |= {name: self._file.tensors[places[0]].type for name, (_, places) in self._towers.items()}

    def read(self, name: str) -> Tensor:
        """As `GgufReader.read`."""
        if name in self._texts:
            return self._text.read(self._texts[name])
        ours, places = self._towers[name]
        parts = [self._file.read(self._file.tensors[place]) for place in places]
        return joined(ours, parts).to(self._dtype)

    def files(self) -> dict[str, bytes]:
        """The files of the text, with a config.json for images and preprocessor_config.json."""
        files = self._text.files()
        config = self._config(json.loads(files["config.json"]))
        return files | {"config.json": json_bytes(config), "preprocessor_config.json": json_bytes(self._processor())}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def _renamed(self, name: str) -> str:
        if self._kind == "qwen2_vl" or not name.startswith("model."):
            return name
        return name.replace("model.", "model.language_model.", 1)

    def _value(self, key: str) -> Any:
        if (value := self._file.metadata.get(f"clip.{key}")) is None:
            raise ConfigError(f"{self._where} lacks clip.{key}, which a tower needs. Is the file whole?")
        return value

    def _size(self, key: str) -> int:
        return whole(self._value(key), f"clip.{key}", self._where)

    def _rows(self, place: str) -> int:
        if place not in self._file.tensors:
            raise CheckpointError(f"{self._where} lacks {place}. Is the file whole?")
        return self._file.tensors[place].shape[0]

    def _vision_size(self) -> int:
        return self._rows("mm.2.weight")

    def _vision_config(self) -> dict[str, Any]:
        """vision_config of config.json. Widths are those of the tensors; the keys of some files differ."""
        if self._file.metadata.get("clip.use_silu"):
            raise ConfigError(f"{self._where} has clip.use_silu, which no tower here computes")
        size, inner = self._size("vision.embedding_length"), self._rows("v.blk.0.ffn_up.weight")
        has_merge = "clip.vision.spatial_merge_size" in self._file.metadata
        vision = {
            "depth": self._size("vision.block_count"),
            "num_heads": self._size("vision.attention.head_count"),
            "patch_size": self._size("vision.patch_size"),
            "spatial_merge_size": self._size("vision.spatial_merge_size") if has_merge else 2,
            "temporal_patch_size": 2,
            "in_channels": 3,
            "hidden_act": "gelu_pytorch_tanh" if self._file.metadata.get("clip.use_gelu") else "quick_gelu",
        }
        if self._kind == "qwen2_vl":
            return vision | {"embed_dim": size, "hidden_size": self._vision_size(), "mlp_ratio": inner / size}
        picked = sorted({int(name.split(".")[2]) for name in self._file.tensors if name.startswith("v.deepstack.")})
        vision |= {"hidden_size": size, "intermediate_size": inner, "out_hidden_size": self._vision_size()}
        vision["num_position_embeddings"] = self._rows("v.position_embd.weight")
        return vision | {"deepstack_visual_indexes": picked}

    def _config(self, text: dict[str, Any]) -> dict[str, Any]:
        """config.json of the whole model. text: that of its text."""
        tokens = self._text.tokens
        ids = {field: tokens.index(token) for field, token in _TOKENS.items() if token in tokens}
        if len(ids) < len(_TOKENS):
            raise ConfigError(f"{self.source}: the tokenizer lacks one of {', '.join(_TOKENS.values())}")
        whole: dict[str, Any] = {"architectures": [self._architecture], "model_type": self._kind}
        whole |= {"vision_config": self._vision, **ids}
        if "rope_parameters" not in text:
            sections: dict[str, Any] = {"mrope_section": self._text.sections}
            if self._kind != "qwen2_vl":
                sections["mrope_interleaved"] = True
            text["rope_scaling"] = {**(text["rope_scaling"] or {"rope_type": "default"}), **sections}
        if self._kind == "qwen2_vl":
            return text | whole
        of_both = {key: text[key] for key in ("tie_word_embeddings", "dtype", "torch_dtype")}
        return whole | of_both | {"text_config": text | {"model_type": f"{self._kind}_text"}}

    def _processor(self) -> dict[str, Any]:
        """preprocessor_config.json."""
        side, merge = self._vision["patch_size"], self._vision["spatial_merge_size"]
        area, get = (side * merge) ** 2, self._file.metadata.get
        return {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": side,
            "merge_size": merge,
            "temporal_patch_size": 2,
            "image_mean": self._value("vision.image_mean"),
            "image_std": self._value("vision.image_std"),
            "min_pixels": get("clip.vision.image_min_pixels") or _LIMITS[0] * area,
            "max_pixels": get("clip.vision.image_max_pixels") or _LIMITS[1] * area,
        }

    def _shape(self, ours: str, places: tuple[str, ...]) -> tuple[int, ...]:
        parts = [torch.empty(self._file.tensors[place].shape, device="meta") for place in places]
        return tuple(joined(ours, parts).shape)
