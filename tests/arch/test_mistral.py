"""Mistral: windows of every size, a head_dim of its own, and the released sizes."""

import torch

import ligermodels
from ligermodels.arch.mistral import MistralConfig
from ligermodels.layers import cache
from tests.arch.suite import (
    LLAMA3,
    YARN,
    Suite,
    theirs,
    tiny_config,
    write_checkpoint,
)


def tiny(**changes):
    return tiny_config("mistral", **{"sliding_window": None, **changes})


def without(config, *names):
    return {key: value for key, value in config.items() if key not in names}


class TestMistral(Suite):
    arch = ligermodels.Mistral
    TINY = {
        "no_window": tiny(),
        "window": tiny(sliding_window=6),
        "window_of_two": tiny(sliding_window=2, num_key_value_heads=4),
        "window_as_long_as_the_sequence": tiny(sliding_window=24, num_key_value_heads=1),
        "window_key_missing_tied": without(tiny(tie_word_embeddings=True), "sliding_window"),
        "heads_wider_than_their_share": tiny(head_dim=12, num_key_value_heads=1),
        "yarn_in_a_window": tiny(sliding_window=9, rope_parameters=YARN),
        "llama3_in_a_window_tied": tiny(sliding_window=30, tie_word_embeddings=True, rope_parameters=LLAMA3),
        "other_eps_theta_and_activation": tiny(
            rms_norm_eps=0.05, hidden_act="gelu", rope_parameters={"rope_type": "default", "rope_theta": 77.0}
        ),
    }  # fmt: skip
    ALSO = ("window",)
    REAL = {
        "Mistral-7B-v0.1": 7_241_732_096,
        "Mistral-7B-Instruct-v0.2": 7_241_732_096,
        "Mistral-7B-v0.3": 7_248_023_552,
        "Mistral-Nemo-12B": 12_247_782_400,
    }

    def earlier_generation(self, config):
        """Files of the first months had no head_dim, and a window of 4096 goes without saying."""
        config = super().earlier_generation(config)
        if config["head_dim"] == config["hidden_size"] // config["num_attention_heads"]:
            del config["head_dim"]
        if config["sliding_window"] == 4096:
            del config["sliding_window"]
        return config


def test_a_missing_window_is_4096_and_null_is_none():
    config = without(tiny(), "rope_parameters")
    missing, null = without(config, "sliding_window"), {**config, "sliding_window": None}
    for values, window in ((missing, 4096), (null, None)):
        config = MistralConfig.from_hf(values)
        assert config.window(0) == window == MistralConfig.from_hf(config.to_hf()).window(0)
        model = ligermodels.Mistral.from_config(config, device="meta")
        assert [layer.self_attn.window for layer in model.decoder.layers] == [window, window]


def test_a_long_text_through_a_small_cache(tmp_path, monkeypatch):
    """Space for the window and three tokens: the cache moves its rows every few steps, and the padding with them."""
    monkeypatch.setattr(cache, "SLACK", 3)
    folder = write_checkpoint(tiny(sliding_window=6), tmp_path)
    model, hf = ligermodels.Mistral.from_hub(folder, progress=False), theirs(folder)
    assert model.new_cache(2, 1000)[0].keys.shape[1] == 8
    ids, mask = torch.randint(3, 97, (2, 11)), torch.ones(2, 11, dtype=torch.long)
    mask[1, :9] = 0
    expected = hf.generate(
        ids, attention_mask=mask, max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=30, eos_token_id=[]), expected)
