"""Arguments that do not fit, by op: the message of the InputError, and what is changed in a small case that fits.

A change is a dict of arguments, or a function of the tensors of that case that makes one; None leaves an argument out.
"""

from collections.abc import Callable

import torch

TAKEN = {
    ("glu", "gate_up", "device"), ("activate", "x", "device"), ("quantize_int8", "x", "device"),
    ("route", "logits", "device"),  # there is nothing else that it must lie with
    ("activate", "x", "shape"), ("quantize_int8", "x", "shape"), ("route", "logits", "shape"),
    ("embedding", "ids", "shape"), ("embedding", "weight", "shape"),  # any width will do
    ("int2_matmul", "scale_a", "dtype"), ("int2_matmul", "scale_w", "dtype"), ("int2_matmul", "bias", "dtype"),  # cast
}  # fmt: skip
"""(op, tensor, what of it) that is taken as it is, whatever the other arguments are."""

IDS = {
    "cross_entropy": "labels", "linear_cross_entropy": "labels", "linear_logprobs": "labels", "jsd": "labels",
    "linear_jsd": "labels", "embedding": "ids", "moe_experts": "experts", "rope": "position_ids",
    "rope_qk": "position_ids",
}  # fmt: skip
"""The argument that holds indices."""

Change = dict | Callable[..., dict]
NO_ACTIVATION: list[tuple[str, Change]] = [("activation='relu'; supported are 'silu'", {"activation": "relu"})]
OF_A_LOSS: list[tuple[str, Change]] = [
    ("reduction='avg'", {"reduction": "avg"}),
    ("label_smoothing=1.5", {"label_smoothing": 1.5}),
    ("softcap=0.0", {"softcap": 0.0}),
    ("num_items_in_batch", {"reduction": "sum", "num_items_in_batch": 4}),
    ("one number", {"reduction": "mean", "num_items_in_batch": torch.tensor([3, 4])}),
]
OF_A_HEAD: list[tuple[str, Change]] = [
    ("accum_dtype", {"accum_dtype": torch.float16}),
    ("workspace_bytes=0", {"workspace_bytes": 0}),
    ("num_valid=-1", {"num_valid": -1}),
]
OF_AN_MLP = [*NO_ACTIVATION, ("workspace_bytes is 0; expected .* positive", {"workspace_bytes": 0})]


def attention(*shapes, **options) -> Callable[..., dict]:
    """q and k, which is v too, of these shapes, without the masks of the case."""
    return lambda key_mask, **rest: {
        "q": torch.zeros(shapes[0], dtype=torch.float16), "k": torch.zeros(shapes[1], dtype=torch.float16),
        "v": torch.zeros(shapes[1], dtype=torch.float16), "key_mask": None,
    } | options  # fmt: skip


Q, K, ONE = (2, 4, 4, 8), (2, 4, 2, 8), ((1, 4, 4, 8), (1, 4, 2, 8))
BAD_CALLS: dict[str, list[tuple[str, Change]]] = {
    "rms_norm": [
        ("N >= 1", lambda x, weight: {"x": x[..., :0]}),
    ],
    "add_rms_norm": [("residual has shape \\(1, 8\\)", lambda x, residual, weight: {"residual": residual[:1]})],
    "add_layer_norm": [
        ("add_layer_norm: residual has shape \\(1, 8\\)", lambda residual, **rest: {"residual": residual[:1]})
    ],
    "rope": [
        ("num_heads", {"num_heads": 7}),
        ("tables \\[P, R/2\\]", lambda cos, sin, **rest: {"cos": cos[None], "sin": sin[None]}),
        ("cos has shape \\(0, 4\\)", lambda cos, sin, **rest: {"cos": cos[:0], "sin": sin[:0]}),
        ("need position_ids", lambda cos, sin, **rest: {
            "cos": cos[None, :3], "sin": sin[None, :3], "position_ids": None, "sections": (1, 1, 2),
        }),
        ("sections=\\[1, 1\\] .* add up to the 4", lambda position_ids, **rest: {
            "position_ids": position_ids.expand(2, 2, 3), "sections": (1, 1),
        }),
        ("sections=\\[5, -1\\]", lambda position_ids, **rest: {
            "position_ids": position_ids.expand(2, 2, 3), "sections": (5, -1),
        }),
        ("must be up to", lambda position_ids, **rest: {
            "position_ids": position_ids.expand(4, 2, 3), "sections": (1, 1, 1, 1),
        }),
        ("int(32|64) \\[3, 1 or 2, 3\\]", lambda position_ids, **rest: {
            "position_ids": position_ids[:, :2], "sections": (1, 1, 2),
        }),
        ("half width", lambda cos, sin, **rest: {"cos": torch.cat([cos, cos], -1), "sin": torch.cat([sin, sin], -1)}),
        ("no gradient", lambda cos, **rest: {"cos": cos.clone().requires_grad_()}),
        ("overwrite a leaf", lambda qkv, **rest: {"qkv": qkv.clone().requires_grad_(), "inplace": True}),
        ("expanded", lambda qkv, **rest: {"qkv": qkv[:1].expand(2, -1, -1), "inplace": True}),
    ],
    "rope_qk": [
        ("of the same B, S, D, floating dtype", lambda k, **rest: {"k": k.double()}),
        ("\\[B, S, heads, D\\]", lambda q, **rest: {"q": q.transpose(1, 2)}),
    ],
    "glu": [
        *NO_ACTIVATION,
        ("expected floating point \\[..., 2F\\]", lambda gate_up: {"gate_up": gate_up[:, :7]}),
        ("gate_up is the gate, of its shape", lambda gate_up: {"up": gate_up[:, :4]}),
        ("up has shape \\(6, 16\\) and dtype torch.float64", lambda gate_up: {"up": gate_up.double()}),
    ],
    "glu_linear": [
        *NO_ACTIVATION,
        ("glu_linear: .*gate_up is the gate, of its shape", lambda gate_up, **rest: {"up": gate_up[:, :7]}),
        ("expected \\[N, 16\\]", lambda gate_up, **rest: {"up": gate_up}),
        ("one dtype", lambda weight, **rest: {"weight": weight.double()}),
    ],
    "activate": [*NO_ACTIVATION, ("F >= 1", lambda x: {"x": x[:, :0]})],
    "activation_linear": [*NO_ACTIVATION, ("one dtype", lambda weight, **rest: {"weight": weight.double()})],
    "gated_mlp": [
        *OF_AN_MLP,
        ("gate_up_weight has 0 rows", lambda gate_up_weight, **rest: {
            "gate_up_weight": gate_up_weight[:0], "gate_up_bias": None,
        }),
        ("gate_up_weight has 7 rows.*even number", lambda gate_up_weight, **rest: {
            "gate_up_weight": gate_up_weight[:7], "gate_up_bias": None,
        }),
        ("gate_up_bias \\[\\(8,\\), None\\]", lambda gate_up_bias, **rest: {"gate_up_bias": (gate_up_bias, None)}),
    ],
    "gated_mlp of two weights": [
        *OF_AN_MLP,
        ("\\[\\(4, 8\\), \\(3, 8\\)\\]", lambda up_weight, **rest: {"up_weight": up_weight[:3]}),
        ("gate_bias has shape \\(3,\\)", lambda gate_bias, **rest: {"gate_bias": gate_bias[:3]}),
        ("up_weight torch.float64", lambda up_weight, **rest: {"up_weight": up_weight.double()}),
    ],
    "mlp": [*OF_AN_MLP, ("fc1_weight has 0 rows", lambda fc1_weight, **rest: {
        "fc1_weight": fc1_weight[:0], "fc1_bias": None,
    })],
    "attention": [
        ("expected q \\[B, S, HQ, D\\] and k, v", attention((2, 4, 8), K)),
        ("expected q \\[B, S, HQ, D\\] and k, v", attention(Q, (1, 4, 2, 8))),
        ("expected q \\[B, S, HQ, D\\] and k, v", attention(Q, (2, 4, 2, 16))),
        ("4 query heads must be a multiple of the 3 key", attention(Q, (2, 4, 3, 8))),
        ("4 query heads must be a multiple of the 0 key", attention(Q, (2, 4, 0, 8))),
        ("4 queries but only 3 keys", attention(Q, (2, 3, 2, 8))),
        ("4 queries but only 0 keys", attention(Q, (2, 0, 2, 8), causal=False)),
        ("window=0", attention(Q, K, window=0)),
        ("softcap=0.0", attention(Q, K, softcap=0.0)),
        ("key_mask has shape \\(2, 5\\)", attention(Q, K, key_mask=torch.ones(2, 5) > 0)),
        ("end to end in one row", attention(Q, K, cu_seqlens=torch.tensor([0, 4]).int())),
        ("padding has shape \\(2, 4\\) and dtype torch.float32", attention(Q, K, padding=torch.ones(2, 4))),
        ("expected torch.bool \\[2, 4\\]", attention(Q, K, padding=torch.ones(1, 4) > 0)),
        ("4 queries and 5 keys", attention(Q, (2, 5, 2, 8), padding=torch.ones(2, 4) > 0)),
        ("padding has shape .* on meta", attention(Q, K, padding=torch.ones(2, 4, device="meta") > 0)),
        ("expected torch.int32", attention(*ONE, cu_seqlens=torch.tensor([0, 4]))),
        ("runs from 0 to 3", attention(*ONE, cu_seqlens=torch.tensor([0, 3]).int())),
        ("must ascend", attention(*ONE, cu_seqlens=torch.tensor([0, 3, 2, 4]).int())),
        ("cu_seqlens has shape .* on meta", attention(*ONE, cu_seqlens=torch.tensor([0, 4]).int().to("meta"))),
        ("dtype torch.float16 on cpu, k shape .* dtype torch.float64", lambda q, k, v, key_mask: {
            "q": q.cpu().half(), "k": k.cpu().double(), "v": v.cpu().double(),
        }),
    ],
    "cross_entropy": OF_A_LOSS,
    "linear_cross_entropy": [
        *OF_A_LOSS, *OF_A_HEAD,
        ("cast one", lambda weight, **rest: {"weight": weight.double()}),
    ],
    "linear_logprobs": [
        *OF_A_HEAD,
        ("temperature=0.0", {"temperature": 0.0}),
        ("temperature=nan", {"temperature": float("nan")}),
        ("softcap=-1.0", {"softcap": -1.0}),
    ],
    "kl_div": [
        ("reduction='avg'", {"reduction": "avg"}),
        ("do not broadcast to one shape", lambda input, target: {"target": target[:, :-1]}),
    ],
    "jsd": [
        ("reduction='batchmean'", {"reduction": "batchmean"}),
        ("beta=1.5", {"beta": 1.5}),
        ("beta=nan", {"beta": float("nan")}),
        ("one entry per token", lambda labels, **rest: {"labels": labels[:-1]}),
    ],
    "linear_jsd": [
        *OF_A_HEAD,
        ("reduction='batchmean'", {"reduction": "batchmean"}),
        ("beta=-0.5", {"beta": -0.5}),
        ("temperature=0.0", {"temperature": 0.0}),
        ("weight_hard=0.5", {"labels": None, "weight_hard": 0.5}),
        ("smaller than student_weight", lambda teacher_weight, teacher_bias, **rest: {
            "teacher_weight": teacher_weight[:4], "teacher_bias": teacher_bias[:4],
        }),
        ("teacher_x", lambda teacher_x, **rest: {"teacher_x": teacher_x[:-1]}),
        ("cast one", lambda student_weight, **rest: {"student_weight": student_weight.double()}),
    ],
    "embedding": [
        ("ids are a list", {"ids": [1, 2]}),
        ("padding_idx=7, but the table has 7 rows", {"padding_idx": 7}),
        ("padding_idx=-8", {"padding_idx": -8}),
    ],
    "int2_matmul": [
        ("out_features=13", {"out_features": 13}),
        ("out_dtype=torch.int64", {"out_dtype": torch.int64}),
        ("without scales", {"out_dtype": torch.int32}),
        ("scale_w \\(3,\\).* or \\(5,\\)", lambda scale_w, **rest: {"scale_w": scale_w[:3]}),
        ("scale_a requires a gradient", lambda scale_a, **rest: {"scale_a": scale_a.clone().requires_grad_()}),
    ],
    "quantize_int8": [("expected floating \\[\\.\\.\\., K\\]", {"x": torch.tensor(1.0)})],
    "route": [("top_k is 6", {"top_k": 6}), ("top_k is 0", {"top_k": 0})],
    "moe_experts": [
        *NO_ACTIVATION,
        ("one dtype", lambda gate_up_proj, **rest: {"gate_up_proj": gate_up_proj.double()}),
        ("\\[6, top_k\\]", lambda weights, experts, **rest: {"weights": weights[1:], "experts": experts[1:]}),
        ("\\[E, H, I\\]", lambda x, **rest: {"x": x[:, 1:]}),
    ],
}  # fmt: skip
