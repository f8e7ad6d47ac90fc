"""Mistral: windows of every size, a head_dim of its own, and the released sizes."""

import ligermodels
from tests.arch.suite import LLAMA3, YARN, Suite, tiny_config


def tiny(**changes):
    return tiny_config("mistral", **{"sliding_window": None, **changes})


def without(config, *names):
    return {key: value for key, value in config.items() if key not in names}


class TestMistral(Suite):
    arch = ligermodels.Mistral
    SLOW = ("test_the_whole_model_compiles_without_a_graph_break",)
    TINY = {
        "no_window": tiny(),
        "window": tiny(sliding_window=6),
        "window_of_two": tiny(sliding_window=2, num_key_value_heads=4),
        "window_key_missing_tied": without(tiny(tie_word_embeddings=True), "sliding_window"),
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
