"""Small configurations of Qwen3-VL and of Qwen3.5 with its tower, both also with experts."""

from tests.arch.qwen2_vl import END, IMAGE, START, VIDEO, rope as sections
from tests.sizes import SIZES

VISION = dict(depth=3, hidden_size=16, intermediate_size=24, num_heads=2, patch_size=2, out_hidden_size=32)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=20)
LINEAR = dict(linear_key_head_dim=8, linear_value_head_dim=12, linear_num_key_heads=2, linear_num_value_heads=4)


def rope(rope_type="default", numbers=(2, 1, 1), **values):
    return sections(rope_type, numbers, mrope_interleaved=True, **values)


def nested(model_type, vision, text, changes):
    base = dict(max_position_embeddings=128, rms_norm_eps=1e-5, bos_token_id=None, eos_token_id=None)
    tokens = dict(image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END)
    text = {**SIZES, **base, **text}
    changes = {"tie_word_embeddings": text.get("tie_word_embeddings", False), **changes}
    return dict(model_type=model_type, text_config=text, vision_config={**VISION, **vision}, **tokens, **changes)


def qwen3_vl(vision=None, root=None, model_type="qwen3_vl", **text):
    """Of two text blocks; the tower's states after its blocks 0 and 1 are added after both."""
    text = {"head_dim": 8, "rope_parameters": rope(), **text}
    picked = dict(num_position_embeddings=25, deepstack_visual_indexes=[0, 1])
    return nested(model_type, {**picked, **(vision or {})}, text, root or {})


def qwen3_vl_moe(vision=None, root=None, **text):
    return qwen3_vl(vision, root, "qwen3_vl_moe", **{**MOE, **text})


def qwen3_5(vision=None, root=None, model_type="qwen3_5", **text):
    parameters = rope(numbers=(1, 1, 0), partial_rotary_factor=0.25)
    kinds = ["linear_attention", "full_attention"]
    text = {"head_dim": 16, "layer_types": kinds, "rope_parameters": parameters, **LINEAR, **text}
    return nested(model_type, {"num_position_embeddings": 9, **(vision or {})}, text, root or {})


def qwen3_5_moe(vision=None, root=None, **text):
    return qwen3_5(vision, root, "qwen3_5_moe", **{**MOE, "shared_expert_intermediate_size": 28, **text})
