"""How llama.cpp stores the weights of a model: their names, the order of rows and columns, and changed values.

- Llama, Mistral and Mixtral are one architecture, "llama", which rotates neighbouring rows of a head, (0, 1), (2, 3),
  ...: rows of q and k and of their biases are permuted. The others rotate halves, as Hugging Face's models do.
- Where a norm acts as 1 + w, in Gemma 1 to 3, Qwen3-Next and Qwen3.5, the file has 1 + w. Gemma 4's act as they are.
- Qwen3.5's linear attention has several value heads for a key head. Hugging Face stores those of one key head next to
  each other; the file has the first value head of every key head, then the second of every one, and so on.
- Qwen3-Next's value heads keep their order. Its in_proj_qkvz, whose rows are grouped by key head, is two tensors of the
  file: all rows of q, then those of k and of v, and those of z. in_proj_ba stays as it is.
- A_log is stored as -exp(A_log), here computed in float64 and rounded to float32; the weight of the convolution as
  [channels, size] instead of [channels, 1, size].
- Norms, biases, routers, gates of shared experts, convolutions and A_log are float32, whatever the dtype of the
  matrices is.
- The experts of a layer are stacked: ffn_gate_exps, ffn_up_exps and ffn_down_exps [experts, rows, columns]. Files may
  have ffn_gate_up_exps, with the rows of both, which is read, and those of Gemma 4 always do.
- Hugging Face's stacked experts of Qwen3-VL and gpt-oss are transposed. In gpt-oss's gate_up_proj and its bias, gate
  and up take turns; the file has the two apart.
- The gate of Qwen3.5's shared expert is a vector instead of [1, hidden_size].
- The layers for multi-token prediction follow the others as further blk.N; so they do in GLM-4.5's files, and in those
  of Qwen3.5 they are mtp.layers. llama.cpp's converter leaves out Qwen3-Next's.
- A tied head is not stored.

What changes order comes back to the bit. What changes values (1 + w, A_log) is rounded to float32, by at most 6e-8 for
values below 1. Values of bfloat16 come back exactly from 1.6e-5 on, of float16 from 1.3e-4 on, A_log of float32 from 1
on.

Checked against: gguf 0.19 (constants.py), conversion/llama.py, gemma.py, qwen.py, qwen3vl.py and base.py, src/models of
llama.cpp.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligermodels.checkpoint.weights import to_halves, to_pairs

_QWEN35 = ("qwen35", "qwen35moe")
ONE_MORE = ("gemma", "gemma2", "gemma3", "qwen3next", *_QWEN35)
"""llama.cpp's architectures whose norm weights are stored as 1 + weight."""
DELTA_NETS = ("qwen3next", *_QWEN35)
"""Those with linear attention."""
_NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "block_sparse_moe.gate", "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2", "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
}  # fmt: skip
_QWEN3_5 = {
    "ffn_norm": None, "post_attention_norm": "post_attention_layernorm", "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z", "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b", "ssm_conv1d": "linear_attn.conv1d", "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj", "nextn.eh_proj": "mtp.fc", "nextn.enorm": "mtp.pre_fc_norm_embedding",
    "nextn.hnorm": "mtp.pre_fc_norm_hidden", "nextn.shared_head_norm": "mtp.norm",
}  # fmt: skip
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate", "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj", "ffn_up_exps": "mlp.experts.{}.up_proj",
}  # fmt: skip
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate", "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj", "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip
_OF_FAMILY: dict[str, Mapping[str, str | None]] = {
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "gemma2": {
        "ffn_norm": "pre_feedforward_layernorm", "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "qwen3_moe": _EXPERTS,
    "qwen3_vl_moe": _EXPERTS,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": {**_QWEN3_5, **_EXPERTS, **_SHARED_EXPERT},
    "qwen3_next": {
        **_QWEN3_5, **_EXPERTS, **_SHARED_EXPERT, "attn_qkv": None, "attn_gate": None, "ssm_alpha": None,
        "ssm_beta": None, "ssm_ba": "linear_attn.in_proj_ba",
    },
    "gemma4_text": {
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm", "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm",
        "ffn_norm": "pre_feedforward_layernorm", "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2", "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2", "ffn_gate_inp": "router.proj", "ffn_gate_exps": None,
        "ffn_down_exps": None, "ffn_up_exps": None,
    },
    "gpt_oss": {
        "ffn_norm": None, "post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router",
        "ffn_gate_exps": None, "ffn_up_exps": None, "ffn_down_exps": None,
    },
    "glm4_moe": {
        **_EXPERTS, "ffn_norm": None, "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_shexp": "mlp.shared_experts.gate_proj", "ffn_up_shexp": "mlp.shared_experts.up_proj",
        "ffn_down_shexp": "mlp.shared_experts.down_proj",
        "nextn.eh_proj": "eh_proj", "nextn.enorm": "enorm", "nextn.hnorm": "hnorm",
        "nextn.shared_head_norm": "shared_head.norm", "nextn.shared_head_head": "shared_head.head",
        "nextn.embed_tokens": "embed_tokens",
    },
}  # fmt: skip
_OF_FAMILY["gemma3_text"] = _OF_FAMILY["gemma2"]
"""{llama.cpp's name of a module: Hugging Face's}, of all models and of single ones; {} is the number of an expert.
None: such a model has no module of that name."""
_WITHOUT_MODULE = {
    "ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}  # fmt: skip
_WHOLE = {
    "gemma4_text": {
        "layer_output_scale.weight": "layer_scalar", "ffn_gate_inp.scale": "router.scale",
        "ffn_gate_up_exps.weight": "experts.gate_up_proj", "ffn_down_exps.weight": "experts.down_proj",
        "ffn_down_exps.scale": "router.per_expert_scale",
    },
    "gpt_oss": {
        "attn_sinks.weight": "self_attn.sinks", "ffn_down_exps.weight": "mlp.experts.down_proj",
        "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
    },
}  # fmt: skip
"""{llama.cpp's name of a tensor: Hugging Face's}, of all models and of single ones."""
_STACKED = {"mlp.experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "mlp.experts.down_proj": ("ffn_down_exps",)}
"""{Hugging Face's name of stacked experts: llama.cpp's names of their parts, in the order of the rows}."""
_QKVZ = "linear_attn.in_proj_qkvz.weight"
_PARTS = {
    "qwen3_next": {_QKVZ: ("attn_qkv.weight", "attn_gate.weight")},
    "gpt_oss": {
        "mlp.experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
        "mlp.experts.gate_up_proj_bias": ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
    },
}
"""{Hugging Face's name: llama.cpp's names of the parts of its rows}."""
_FLOAT32 = (
    "block_sparse_moe.gate.weight", "mlp.gate.weight", "mlp.shared_expert_gate.weight", "router.proj.weight",
    "conv1d.weight", "mlp.router.weight", "mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias",
)  # fmt: skip


class Change(NamedTuple):
    """write: Hugging Face's tensor -> llama.cpp's. read: the inverse. Both work on meta tensors, for the shape."""

    write: Callable[[Tensor], Tensor]
    read: Callable[[Tensor], Tensor]


class Layout:
    """The names of a model's tensors in both layouts, and how each tensor changes.

    arch: llama.cpp's architecture. fields: of config.json, those of the sizes. left_out: how the names start of tensors
    that it has no place for.
    """

    def __init__(self, arch: str, model_type: str, fields: Mapping[str, Any]):
        self._arch, self._fields = arch, fields
        names: dict[str, str | None] = {**_NAMES, **_OF_FAMILY.get(model_type, {})}
        self._ours = {theirs: ours for theirs, ours in names.items() if ours is not None}
        self._theirs = {ours: theirs for theirs, ours in self._ours.items()}
        self._whole = _WITHOUT_MODULE | _WHOLE.get(model_type, {})
        self._parts = _PARTS.get(model_type, {})
        self.left_out = ("mtp.",) if arch == "qwen3next" else ()

    def ours(self, theirs: str) -> tuple[str, ...]:
        """Hugging Face's name of a tensor, with {} for the number of an expert; an unknown tensor keeps its name.

        Several names divide the rows of each expert. Several tensors that have one name are parts of its rows.
        """
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(.+)", theirs)
        assert match is not None
        name = self._whole.get(match[2])
        if name is None and match[2] == "ffn_gate_up_exps.weight" and "ffn_gate_exps" in self._ours:
            return tuple(name for part in ("gate", "up") for name in self.ours(theirs.replace("gate_up", part)))
        module, _, kind = match[2].rpartition(".")
        if module in self._ours and kind in ("weight", "bias"):
            name = f"{self._ours[module]}.{kind}"
        name = next((whole for whole, parts in self._parts.items() if match[2] in parts), name)
        if name is None or match[1] is None:
            return (name or theirs,)
        layer, layers = int(match[1]), self._fields["num_hidden_layers"]
        if layer >= layers and self._arch in _QWEN35:  # a layer for multi-token prediction
            return (name if name.startswith("mtp.") else f"mtp.layers.{layer - layers}.{name}",)
        return (f"model.layers.{layer}.{name}",)

    def parts(self, theirs: str) -> tuple[str, ...]:
        """llama.cpp's names of the tensors that, in this order, are the rows of the one that `theirs` is a part of."""
        prefix, name = re.fullmatch(r"(blk\.\d+\.)?(.+)", theirs).groups("")  # type: ignore[union-attr]
        return tuple(prefix + part for parts in self._parts.values() if name in parts for part in parts)

    def theirs(self, ours: str) -> tuple[str, ...]:
        """llama.cpp's name of a tensor; () if it has none. The experts of a layer share one name.

        Several names divide the rows, or those of each expert, in order.
        """
        ours = ours.replace("model.language_model.", "model.", 1)  # of a model that reads images
        match = re.fullmatch(r"(?:(model|mtp)\.layers\.(\d+)\.)?(.+)", ours)
        assert match is not None
        module, _, kind = re.sub(r"\.experts\.\d+\.", ".experts.{}.", match[3]).rpartition(".")
        names = tuple(theirs for theirs, whole in self._whole.items() if whole == match[3])
        names += tuple(f"{part}.weight" for part in _STACKED.get(match[3], ())) + self._parts.get(match[3], ())
        if module in self._theirs and kind in ("weight", "bias"):
            names = (f"{self._theirs[module]}.{kind}",)
        names = tuple(dict.fromkeys(names))
        if not (match[1] or ours.startswith("mtp.")):
            return names
        layer = int(match[2] or 0) + (self._fields["num_hidden_layers"] if ours.startswith("mtp.") else 0)
        return tuple(f"blk.{layer}.{name}" for name in names)

    def is_float32(self, ours: str, shape: tuple[int, ...]) -> bool:
        """Whether llama.cpp stores a tensor as float32 in every file."""
        return len(shape) == 1 or ours.endswith(_FLOAT32)

    def change(self, ours: str, theirs: str = "") -> Change | None:
        """The change of a tensor with Hugging Face's name `ours`; None if it is stored as it is.

        theirs: one of the names in llama.cpp, if there are several: `write` then gives the part that has it.
        """
        change = self._of_whole(ours)
        if not theirs or len(self.theirs(ours)) < 2:
            return change
        write = change.write if change else _same
        return Change(lambda x: self.part(ours, theirs, write(x)), _same)

    def part(self, ours: str, theirs: str, rows: Tensor) -> Tensor:
        """Of the rows of `ours`, [experts, rows, ...] or [rows, ...], those that the file has under `theirs`."""
        names = self.theirs(ours)
        if len(names) < 2:
            return rows
        at = names.index(theirs)
        if ours.endswith(_QKVZ):
            return rows.split(self._qkv_and_z)[at]
        return rows[:, at::2] if self._arch == "gpt-oss" else rows.chunk(2, 1)[at]

    def join(self, ours: str, parts: list[Tensor]) -> Tensor:
        """The rows of `ours`, of which `parts` are all parts in the order of their names."""
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if ours.endswith(_QKVZ) else torch.stack(parts, 2).flatten(1, 2)

    def _of_whole(self, ours: str) -> Change | None:
        fields, module = self._fields, ours.rpartition(".")[0]
        if self._arch == "llama" and module.endswith(("q_proj", "k_proj")):
            heads = fields["num_attention_heads" if module.endswith("q_proj") else "num_key_value_heads"]
            return Change(lambda x: to_pairs(x, heads), lambda x: to_halves(x, heads))
        if module.endswith("linear_attn.norm"):
            return None
        if "norm" in module.rpartition(".")[2] and self._arch in ONE_MORE:
            return _ONE_MORE
        if module.endswith("mlp.shared_expert_gate"):
            return Change(lambda x: x.squeeze(0), lambda x: x.unsqueeze(0))
        if self._arch in ("qwen3vlmoe", "gpt-oss") and ours.endswith(tuple(_STACKED)):
            return Change(lambda x: x.transpose(1, 2), lambda x: x.transpose(1, 2))
        if ".linear_attn." in ours:
            return self._of_linear_attention(ours.rpartition(".linear_attn.")[2])
        return None

    def _of_linear_attention(self, name: str) -> Change:
        keys, values = self._fields["linear_num_key_heads"], self._fields["linear_num_value_heads"]
        if name == "in_proj_qkvz.weight":
            return _by_part(keys, [size // keys for size in self._qkvz])
        per_key, dim = values // keys, int(name == "out_proj.weight")
        joint = sum(self._qkvz[:2]) if name in ("in_proj_qkv.weight", "conv1d.weight") else 0
        write, read = _reorder(joint, keys, per_key, dim), _reorder(joint, per_key, keys, dim)
        if self._arch == "qwen3next":
            write = read = _same
        if name == "A_log":
            return Change(lambda x: write(-x.double().exp()).float(), lambda x: read((-x.double()).log()).float())
        if name == "conv1d.weight":
            return Change(lambda x: write(x.squeeze(1)), lambda x: read(x).unsqueeze(1))
        return Change(write, read)

    @property
    def _qkvz(self) -> list[int]:
        """Rows of q, k, v and z."""
        keys = self._fields["linear_num_key_heads"] * self._fields["linear_key_head_dim"]
        return 2 * [keys] + 2 * [self._fields["linear_num_value_heads"] * self._fields["linear_value_head_dim"]]

    @property
    def _qkv_and_z(self) -> list[int]:
        return [sum(self._qkvz[:3]), self._qkvz[3]]


def _same(x: Tensor) -> Tensor:
    return x


_ONE_MORE = Change(lambda x: x.float() + 1.0, lambda x: x - 1.0)


def _reorder(start: int, outer: int, inner: int, dim: int) -> Callable[[Tensor], Tensor]:
    """Moves head (i, j), of outer x inner heads from row `start` on, to place (j, i). dim: of the rows."""

    def apply(x: Tensor) -> Tensor:
        first, heads = x.split([start, x.shape[dim] - start], dim)
        heads = heads.unflatten(dim, (outer, inner, -1)).transpose(dim, dim + 1).flatten(dim, dim + 2)
        return torch.cat([first, heads], dim) if start else heads

    return apply


def _by_part(groups: int, sizes: list[int]) -> Change:
    """Rows that are in `groups`, each with parts of these sizes, as all rows of each part in turn."""

    def write(x: Tensor) -> Tensor:
        return torch.cat([part.flatten(0, 1) for part in x.unflatten(0, (groups, -1)).split(sizes, 1)])

    def read(x: Tensor) -> Tensor:
        parts = x.split([groups * size for size in sizes])
        return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten(0, 1)

    return Change(write, read)
