"""Small checkpoints: of every architecture, and one model in every layout that is read."""

import json
import math
import random
import shutil
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from ligermodels.arch import ARCHS
from ligermodels.checkpoint import weights
from ligermodels.checkpoint.files import json_bytes, read_json
from ligermodels.checkpoint.weights import same_bits
from tests.tiny import SUITES

SIZES = {
    "vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64, "pad_token_id": None,
}  # fmt: skip
PARAMETERS = {"embedding": 768, "norms": 80, "attention": 1536, "mlp": 2304, "lm_head": 768}
"""Of SIZES, by hand: 48 x 16; 5 x 16; 2 x (4 + 2 + 2 + 4) x 4 x 16; 2 x 3 x 24 x 16; 48 x 16."""
QWEN3_TOWER = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 2, "out_hidden_size": 16,
    "num_position_embeddings": 9,
}  # fmt: skip
EXTRA = {
    "mixtral": {"num_local_experts": 2}, "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 4},
    "qwen2_vl": {
        "hidden_size": 32, "head_dim": 8, "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]},
        "image_token_id": 40, "video_token_id": 41, "vision_start_token_id": 42, "vision_end_token_id": 43,
        "vision_config": {
            "depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 2,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3,
        },
    },
    "qwen3_vl": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]},
        "vision_config": {**QWEN3_TOWER, "deepstack_visual_indexes": [0]},
    },
    "qwen3_vl_moe": {
        "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]},
        "vision_config": {**QWEN3_TOWER, "deepstack_visual_indexes": [0]},
    },
    "gemma3": {
        "image_token_index": 47, "mm_tokens_per_image": 4,
        "vision_config": {
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 8, "patch_size": 2,
        },
    },
    "gemma4": {
        "sliding_window": 8, "image_token_id": 45, "video_token_id": 46, "audio_token_id": 47,
        "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 48, "global_head_dim": 8,
        "vision_config": {
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 8, "patch_size": 2, "position_embedding_size": 9,
            "use_clipped_linears": True, "standardize": True,
        },
    },
    "gemma4_unified": {
        "sliding_window": 8, "image_token_id": 45, "video_token_id": 46, "audio_token_id": 47, "global_head_dim": 8,
        "vision_config": {"patch_size": 2, "mm_embed_dim": 12, "output_proj_dims": 12, "mm_posemb_size": 7},
    },
    "qwen3_5": {
        "head_dim": 8, "linear_key_head_dim": 4, "linear_value_head_dim": 4, "full_attention_interval": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 0, 0]},
        "vision_config": QWEN3_TOWER,
    },
    "qwen3_5_text": {"head_dim": 8, "linear_key_head_dim": 4, "linear_value_head_dim": 4, "full_attention_interval": 2},
    "qwen3_5_moe": {
        "head_dim": 8, "linear_key_head_dim": 4, "linear_value_head_dim": 4, "full_attention_interval": 2,
        "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 0, 0]},
        "vision_config": QWEN3_TOWER,
    },
    "mllama": {
        "cross_attention_layers": [1], "image_token_index": 48,
        "vision_config": {
            "hidden_size": 16, "attention_heads": 2, "num_hidden_layers": 2, "num_global_layers": 1, "image_size": 8,
            "patch_size": 4, "intermediate_size": 24, "intermediate_layers_indices": [0], "vision_output_dim": 32,
        },
    },
}  # fmt: skip
EXTRA |= {family: suite.SWITCHED_ON for family, suite in SUITES.items()}
FILES = {"tokenizer.json": b"{}", "chat_template.jinja": b"{{ x }}", "generation_config.json": b'{"eos_token_id": 2}'}
OF_LLAMA = ("hf", "sharded", "meta", "dcp", "bin")


def a_checkpoint(folder, family="llama", *, dtype=torch.float32, tied=False, shards=1, seed=0, finite=False, **fields):
    """Every bit pattern, NaN among them unless `finite`, in shuffled order over `shards` files."""
    arch = ARCHS[family]
    config = {"model_type": family, **SIZES, **EXTRA.get(family, {}), "tie_word_embeddings": tied, **fields}
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    draw = random.Random(f"{family} {dtype} {tied} {shards} {seed}")
    torch.manual_seed(draw.randrange(1 << 30))
    model = arch.from_config(config, device="meta")
    params = dict(weights.named_weights(model))
    tensors = {}
    for region in weights.regions(model, arch.DISK_NAMES):
        shape, kept = region.shape(params[region.param].shape), params[region.param].dtype  # fp32 of some in 16 bits
        bits = torch.randint(0, 256, (*shape, kept.itemsize), dtype=torch.uint8)
        tensors[region.source] = torch.randn(shape, dtype=kept) if finite else bits.view(kept).reshape(shape)
    names = draw.sample(sorted(tensors), len(tensors))
    folder.mkdir()
    for name, content in {"config.json": json_bytes(config), **FILES}.items():
        (folder / name).write_bytes(content)
    if shards == 1:
        save_file({name: tensors[name] for name in names}, folder / "model.safetensors")
    else:
        files = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
        for file in set(files.values()):
            save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return tensors


def stored(folder):
    """All tensors, as the safetensors library reads the files: a second opinion on what was written."""
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def same(a, b):
    return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def write_all(root: Path, *, scale: float = 0.1) -> dict[str, Path]:
    """{layout: folder}: a Llama in those of OF_LLAMA, a Mistral as "hf of mistral" and "mistral", and an "adapter"."""
    config = {**SIZES, "initializer_range": scale, "rope_theta": 500000.0, "max_position_embeddings": 8192}
    model = ARCHS["llama"].from_config(config, device="cpu", dtype=torch.float32, seed=4)
    folders = {name: root / name for name in (*OF_LLAMA, "hf of mistral", "mistral", "adapter")}
    model.save_pretrained(folders["hf"])
    model.save_pretrained(folders["sharded"], max_shard_size="4KB")
    write_own(folders["meta"], folders["hf"], "meta", ranks=2)
    write_dcp(folders["hf"], folders["dcp"])
    folders["bin"].mkdir()
    (folders["bin"] / "config.json").write_bytes((folders["hf"] / "config.json").read_bytes())
    torch.save(load_file(folders["hf"] / "model.safetensors"), folders["bin"] / "pytorch_model.bin")
    config = {**SIZES, "initializer_range": scale, "sliding_window": None, "rope_theta": 10000.0}
    model = ARCHS["mistral"].from_config(config, device="cpu", dtype=torch.bfloat16, seed=4)
    model.save_pretrained(folders["hf of mistral"])
    write_own(folders["mistral"], folders["hf of mistral"], "mistral")
    write_adapter(folders["adapter"])
    return folders


def write_dcp(hf: Path, folder: Path) -> None:
    """The model of a folder as a distributed checkpoint, under the names that it has in memory."""
    model = ARCHS[read_json(hf / "config.json")["model_type"]].from_hub(hf, progress=False)
    state = {name: tensor.detach() for name, tensor in weights.named_weights(model)}
    shutil.copytree(hf, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


THEIR_NAMES = {
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3", "block_sparse_moe": "feed_forward", "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm", "model.embed_tokens": "tok_embeddings", "model.norm": "norm",
    "lm_head": "output", "model.layers": "layers",
}  # fmt: skip
"""{part of a Hugging Face name: what Meta and Mistral call it}."""


def own_weights(tensors: dict[str, Tensor], *, head_dim: int = 4) -> dict[str, Tensor]:
    """Hugging Face's tensors under Meta's and Mistral's names, each head's rows of q and k from halves to pairs."""
    own = {}
    for name, x in tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            x = x.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).reshape(x.shape).contiguous()
        for part, theirs in THEIR_NAMES.items():
            name = name.replace(part, theirs)
        own[name] = x
    return own


def cut(state: dict[str, Tensor], ranks: int, table_axis: int) -> list[dict[str, Tensor]]:
    """The ranks' dictionaries, by Meta's rules. table_axis: the dimension along which tok_embeddings is cut."""
    found: list[dict[str, Tensor]] = [{} for _ in range(ranks)]
    for name, tensor in state.items():
        axis = 1 if name.endswith(("wo.weight", "w2.weight")) else table_axis if "tok_" in name else 0
        parts = [tensor] * ranks if tensor.ndim == 1 else tensor.chunk(ranks, axis)
        for rank, part in zip(found, parts, strict=True):
            rank[name] = part.clone()
    return found


def write_meta(folder: Path, ranks: list[dict[str, Tensor]], params: dict) -> Path:
    """Meta's own files."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, rank in enumerate(ranks):
        torch.save(rank, folder / f"consolidated.{number:02}.pth")
    (folder / "params.json").write_text(json.dumps(params))
    return folder


def write_own(folder: Path, hf: Path, to: str, *, ranks: int = 1) -> None:
    """Meta's or Mistral's own files of the model in `hf`, beside its config.json and other files.

    to: "meta" (a Llama, cut into `ranks`) or "mistral" (a Mistral or Mixtral).
    """
    config = ARCHS[json.loads((hf / "config.json").read_bytes())["model_type"]].config_class.from_pretrained(hf)
    own, theta = own_weights(stored(hf), head_dim=config.head_dim), config.rope_parameters["rope_theta"]
    params = {
        "dim": config.hidden_size, "n_layers": config.num_hidden_layers, "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads, "vocab_size": config.vocab_size, "norm_eps": config.rms_norm_eps,
        "rope_theta": theta,
    }  # fmt: skip
    if to == "meta":
        write_meta(folder, cut(own, ranks, 0 if theta == 500000.0 else 1), params)
    else:
        params |= {"head_dim": config.head_dim, "hidden_dim": config.intermediate_size}
        params |= {"sliding_window": config.sliding_window, "tied_embeddings": config.tie_word_embeddings}
        if config.model_type == "mixtral":
            moe = {"num_experts": config.num_local_experts, "num_experts_per_tok": config.num_experts_per_tok}
            params["moe"] = moe
        folder.mkdir()
        for part in (1, 2):
            half = {name: own[name] for name in sorted(own)[part - 1 :: 2]}
            save_file(half, folder / f"consolidated-0000{part}-of-00002.safetensors")
        (folder / "params.json").write_text(json.dumps(params))
    for path in hf.iterdir():
        if not path.name.endswith((".safetensors", ".safetensors.index.json")):
            (folder / path.name).write_bytes(path.read_bytes())


def write_adapter(folder: Path, **options: object) -> None:
    """A LoRA adapter of rank 2 for q_proj of both layers."""
    folder.mkdir()
    config = {
        "peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["q_proj"], "bias": "none",
        "base_model_name_or_path": "someone/base", **options,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(
        {
            f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{half}.weight": torch.randn(shape)
            for layer in range(2)
            for half, shape in (("A", (2, 16)), ("B", (16, 2)))
        },
        folder / "adapter_model.safetensors",
    )


def logits(state: dict[str, Tensor], ids: Tensor, params: dict, frequencies: Tensor | None = None) -> Tensor:
    """Meta's and Mistral's forward pass in fp64, from their description: neighbouring dimensions rotated together, a
    window, experts weighed by softmax. state: under their names. frequencies: of the rotation, where it is scaled."""
    heads, groups = params["n_heads"], params["n_heads"] // params["n_kv_heads"]
    width = len(state["layers.0.attention.wq.weight"]) // heads
    batch, length = ids.shape
    if frequencies is None:
        frequencies = params["rope_theta"] ** -(torch.arange(0, width, 2).double() / width)
    angles = torch.arange(length).double()[:, None] * frequencies
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    ago = torch.arange(length)[:, None] - torch.arange(length)
    hidden = (ago < 0) | (ago >= (params.get("sliding_window") or length))

    def rotated(x: Tensor) -> Tensor:
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + params["norm_eps"]).rsqrt() * weight

    def mlp(x: Tensor, prefix: str) -> Tensor:
        w1, w2, w3 = (state[f"{prefix}.w{n}.weight"] for n in (1, 2, 3))
        return (F.silu(x @ w1.T) * (x @ w3.T)) @ w2.T

    state = {name: tensor.double() for name, tensor in state.items()}
    x = state["tok_embeddings.weight"][ids]
    for i in range(params["n_layers"]):
        at = f"layers.{i}."
        h = norm(x, state[at + "attention_norm.weight"])
        q, k, v = ((h @ state[f"{at}attention.w{n}.weight"].T).unflatten(-1, (-1, width)) for n in "qkv")
        k, v = (t.repeat_interleave(groups, 2) for t in (rotated(k), v))
        scores = torch.einsum("bqhd,bkhd->bhqk", rotated(q), k) / math.sqrt(width)
        mixed = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(hidden, -math.inf).softmax(-1), v)
        x = x + mixed.reshape(batch, length, heads * width) @ state[at + "attention.wo.weight"].T
        h = norm(x, state[at + "ffn_norm.weight"])
        if params.get("moe"):
            best = (h @ state[at + "feed_forward.gate.weight"].T).topk(params["moe"]["num_experts_per_tok"])
            shares = torch.zeros(*h.shape[:2], params["moe"]["num_experts"]).double()
            shares = shares.scatter(-1, best.indices, best.values.softmax(-1))
            for e in range(params["moe"]["num_experts"]):
                x = x + shares[..., e, None] * mlp(h, f"{at}feed_forward.experts.{e}")
        else:
            x = x + mlp(h, at + "feed_forward")
    return norm(x, state["norm.weight"]) @ state.get("output.weight", state["tok_embeddings.weight"]).T
