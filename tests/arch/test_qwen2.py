"""Qwen2: windows of some blocks, biases, long contexts, and the released sizes."""

import pytest
from safetensors.torch import load_file, save_file

import ligermodels
from tests.arch.suite import Suite, rope, tiny_config

FULL, SLIDING = "full_attention", "sliding_attention"


def tiny(**changes):
    return tiny_config("qwen2", **changes)


def windowed(**changes):
    return tiny(**{"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, **changes})


class TestQwen2(Suite):
    arch = ligermodels.Qwen2
    SLOW = ("test_the_whole_model_compiles_without_a_graph_break",)
    TINY = {
        "plain": tiny(num_key_value_heads=4),
        "large_biases": tiny(num_key_value_heads=1),
        "tied_with_rows_to_spare": tiny(tie_word_embeddings=True, vocab_size=160),
        "window_in_every_block": windowed(max_window_layers=0),
        "window_in_the_last_block": windowed(tie_word_embeddings=True),
        "window_switched_off": windowed(use_sliding_window=False, max_window_layers=0),
        "window_where_layer_types_say": windowed(layer_types=[SLIDING, FULL]),
        "yarn": windowed(rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=16)),
        "dynamic": tiny(max_position_embeddings=16, rope_parameters=rope("dynamic", factor=3.0)),
    }
    ALSO = ("window_in_the_last_block",)
    # Sizes and counts are exact; fields without a say in them (eps, special ids, windows) may differ by revision.
    REAL = {
        "Qwen2-0.5B": 494_032_768,
        "Qwen2-1.5B": 1_543_714_304,
        "Qwen2-72B": 72_706_203_648,
        "Qwen2.5-0.5B": 494_032_768,
        "Qwen2.5-3B": 3_085_938_688,
        "Qwen2.5-7B-Instruct": 7_615_616_512,
        "Qwen2.5-32B": 32_763_876_352,
        "Qwen2.5-72B": 72_706_203_648,
    }

    @pytest.fixture
    def folder(self, request, tiny, written):
        folder = written(tiny)
        if request.node.callspec.id == "large_biases":
            enlarge_biases(folder)
        return folder

    def earlier_generation(self, config):
        """Windows by their three fields alone, of which `sliding_window` stays where it is switched off."""
        config = super().earlier_generation(config)
        if config["layer_types"] != [SLIDING, FULL]:  # no choice of max_window_layers says that
            del config["layer_types"]
        if not config["use_sliding_window"]:
            config["sliding_window"] = 5
        return config


def enlarge_biases(folder):
    """Those of k to around 10, far above its weights, as in the small released models."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("k_proj.bias"):
            tensor *= 30
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
