"""A Llama of two layers, with weights large enough that its text varies and that positions and windows decide."""

import torch

import ligermodels
from tests.tiny import FAMILIES, NORMS_AROUND_ZERO, TINY

VOCAB = 97
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.4, 2.5, 5.0, 9.0],
    "original_max_position_embeddings": 16,
    "factor": 8.0,
}
ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "longrope": LONGROPE,
}


def config(rope="default", positions=512, **changes):
    """The config of a small Llama without special tokens but the pad id 0."""
    return {
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_parameters": {"rope_theta": 100.0, **ROPES[rope]},
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "initializer_range": 0.3, **changes,
    }  # fmt: skip


def llama(windows=(None, None), rope="default", positions=512):
    """windows: of each layer."""
    model = ligermodels.Llama.from_config(config(rope, positions), seed=0).requires_grad_(False)
    for layer, window in zip(model.model.layers, windows, strict=True):
        layer.self_attn.window = window
    return model


def with_large_weights(model):
    """Text that varies, so that positions, windows and caps decide."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.3 if "norm" not in name else 0.1)
            if "norm" in name and model.config.model_type not in NORMS_AROUND_ZERO:
                parameter.add_(1.0)
        if hasattr(model.config, "image_token_id"):  # which no text may have
            model.lm_head.weight[[model.config.image_token_id, model.config.video_token_id]] = 0.0
    return model.requires_grad_(False).eval()


def family(name, **changes):
    values = {**TINY, **FAMILIES[name], "model_type": name, "pad_token_id": 0, "tie_word_embeddings": False, **changes}
    return with_large_weights(ligermodels.ARCHS[name].from_config(values, seed=0))


def prompt(rows=1, length=5):
    return torch.randint(1, VOCAB, (rows, length))


def padded(lengths, extra=0):
    """(ids, mask) of prompts of these lengths, padded on the left to the longest and `extra` more."""
    width = max(lengths) + extra
    mask = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    return prompt(len(lengths), width) * mask, mask
