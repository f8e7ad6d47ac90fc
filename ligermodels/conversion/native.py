"""The layout of earlier versions, "native": names of their own, with packed q, k, v and gate, up. It is read only."""

import re
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from ligermodels.checkpoint.reading import PickleReader, SafetensorsReader
from ligermodels.checkpoint.weights import TensorInfo
from ligermodels.errors import CheckpointError

_TOWER = "vision_model."
_RENAMES: Mapping[str, list[tuple[str, str]]] = {
    "gemma2": [
        (r"\.attn_out_norm\.", ".post_attention_layernorm."),
        (r"\.mlp_norm\.", ".pre_feedforward_layernorm."),
        (r"\.mlp_out_norm\.", ".post_feedforward_layernorm."),
    ],
    "mixtral": [  # the experts stay stacked, as transformers has them in memory
        (r"\.moe_norm\.", ".post_attention_layernorm."),
        (r"\.moe\.router\.", ".mlp.gate."),
        (r"\.moe\.experts\.", ".mlp.experts."),
    ],
    "qwen2_vl": [
        (r"^vision\.patch_embed\.", "visual.patch_embed.proj."),
        (r"^vision\.(blocks\.\d+)\.attn\.qkv_proj\.", r"visual.\1.attn.qkv."),
        (r"^vision\.(blocks\.\d+)\.attn\.o_proj\.", r"visual.\1.attn.proj."),
        (r"^vision\.merger_norm\.", "visual.merger.ln_q."),
        (r"^vision\.merger\.fc1\.", "visual.merger.mlp.0."),
        (r"^vision\.merger\.fc2\.", "visual.merger.mlp.2."),
        (r"^vision\.", "visual."),
    ],
    "mllama": [
        (r"^vision\.global_(layers\.\d+)\.attn_gate", _TOWER + r"global_transformer.\1.gate_attn"),
        (r"^vision\.global_(layers\.\d+)\.mlp_gate", _TOWER + r"global_transformer.\1.gate_ffn"),
        (r"^vision\.global_layers\.", _TOWER + "global_transformer.layers."),
        (r"^vision\.layers\.", _TOWER + "transformer.layers."),
        (r"^vision\.(pre|post)_tile\.", _TOWER + r"\1_tile_positional_embedding."),
        (r"^vision\.position\.", _TOWER + "gated_positional_embedding."),
        (r"^vision\.norm_(pre|post)\.", _TOWER + r"layernorm_\1."),
        (r"^vision\.", _TOWER),
        (r"^projector\.", "multi_modal_projector."),
        (r"^(layers\.\d+)\.(attn|mlp)_gate$", r"\1.cross_attn_\2_gate"),
        (r"^(embed_tokens|layers|norm)\.", r"language_model.model.\1."),
        (r"^lm_head\.", "language_model.lm_head."),
    ],
}
_OF_ALL = [
    (r"^(embed_tokens|layers|norm)\.", r"model.\1."),
    (r"\b(layers\.\d+)\.attn\.", r"\1.self_attn."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.mlp_norm\.", ".post_attention_layernorm."),
]
_PACKED = {".qkv_proj.": ("q", "k", "v"), ".kv_proj.": ("k", "v"), ".mlp.gate_up_proj.": ("gate", "up")}


def is_native(names: Iterable[str]) -> bool:
    return any(re.match(r"layers\.\d+\.attn\.", name) for name in names)


def names_of(name: str, model_type: object) -> list[str]:
    """What Hugging Face calls the tensor of that name, or, if it is packed, its parts."""
    for pattern, theirs in (*_RENAMES.get(str(model_type), ()), *_OF_ALL):
        name = re.sub(pattern, theirs, name)
    for packed, parts in _PACKED.items():
        if packed in name and model_type != "phi3":  # which is packed on the Hub too
            whole = packed.rpartition(".mlp")[2]
            return [name.replace(whole, f".{part}_proj.") for part in parts]
    return [name]


class Unpacked:
    """The tensors of `reader`, which is native, under Hugging Face's names: a `weights.Reader`.

    places: {tensor: the file that holds it}. Raises CheckpointError for a packed tensor that its parts cannot fill.
    """

    def __init__(self, reader: SafetensorsReader | PickleReader, model_type: object):
        self.source, self._reader = reader.source, reader
        self.headers: dict[str, TensorInfo] = {}
        self.places: dict[str, str] = {}
        self._boxes: dict[str, tuple[str, tuple[slice, ...]]] = {}
        for name, info in reader.headers.items():
            parts, start = names_of(name, model_type), 0
            for part, rows in zip(parts, self._rows(name, len(parts)), strict=True):
                box = () if rows is None else (slice(start, start := start + rows),)
                self._boxes[part] = name, box
                self.headers[part] = info if rows is None else TensorInfo(info.dtype, (rows, *info.shape[1:]))
                self.places[part] = reader.places[name]

    def read(self, name: str) -> Tensor:
        source, box = self._boxes[name]
        return self._reader.read(source)[box]

    def _rows(self, name: str, parts: int) -> Sequence[int | None]:
        """Of each part: q has as many as o_proj has columns, and the others divide the rest. None: all there is."""
        if parts == 1:
            return [None]
        beside = self._reader.headers.get(re.sub(r"qkv_proj\.\w+$", "o_proj.weight", name))
        shape, columns = self._reader.headers[name].shape, beside.shape[-1:] if beside else ()
        rows = shape[0] if shape else 0
        q = [columns[0]] if parts == 3 and columns else []
        others = (rows - sum(q)) // 2
        if len(q) + 2 != parts or others < 1 or sum(q) + 2 * others != rows:
            raise CheckpointError(f"{self.source}: {name} {list(shape)} does not hold {parts} projections")
        return [*q, others, others]
