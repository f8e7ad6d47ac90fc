"""Llama: every switch of its configuration on tiny checkpoints, and the released sizes."""

import gc
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file

import ligermodels
from tests.arch.suite import LLAMA3, YARN, Suite, edit_config, rope, tiny_config


def tiny(**changes):
    return tiny_config("llama", **changes)


class TestLlama(Suite):
    arch = ligermodels.Llama
    TINY = {
        "plain": tiny(),
        "tied": tiny(tie_word_embeddings=True),
        "one_head_shared_by_all": tiny(num_key_value_heads=1),
        "attention_bias": tiny(attention_bias=True),
        "mlp_bias_gelu": tiny(mlp_bias=True, hidden_act="gelu"),
        "explicit_head_dim": tiny(head_dim=12, num_key_value_heads=1, hidden_act="gelu_pytorch_tanh"),
        "odd_sizes": tiny(
            hidden_size=30, num_attention_heads=3, num_key_value_heads=3, intermediate_size=17, vocab_size=101
        ),
        "linear": tiny(rope_parameters=rope("linear", factor=2.5)),
        "dynamic": tiny(max_position_embeddings=16, rope_parameters=rope("dynamic", factor=3.0)),
        "llama3": tiny(tie_word_embeddings=True, rope_parameters=LLAMA3),
        "yarn": tiny(rope_parameters=YARN),
        "longrope": tiny(
            rope_parameters=rope(
                "longrope",
                factor=8.0,
                original_max_position_embeddings=8,
                short_factor=[1.0, 1.1, 1.2, 1.3],
                long_factor=[1.0, 2.0, 4.0, 7.5],
            )
        ),
    }  # fmt: skip
    REAL = {
        "Llama-2-7b": 6_738_415_616,
        "Llama-3-8B": 8_030_261_248,
        "Llama-3.1-8B": 8_030_261_248,
        "Llama-3.2-1B": 1_235_814_400,
        "Llama-3.2-3B": 3_212_749_824,
    }

    def test_the_head_is_never_tied_unasked(self, folder):
        edit_config(folder, tie_word_embeddings=...)
        tensors = load_file(folder / "model.safetensors")
        if tensors.pop("lm_head.weight", None) is not None:
            assert not self.arch.from_hub(folder, progress=False).lm_head.is_tied
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ligermodels.CheckpointError, match=r"lm_head\.weight"):
            self.arch.from_hub(folder, progress=False)


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_is_freed_when_nobody_holds_it(tied):
    """By reference counts alone: a cycle would keep a GPU's memory until the collector comes."""
    config = {key: value for key, value in tiny(tie_word_embeddings=tied).items() if key != "rope_parameters"}
    model, ids = ligermodels.Llama.from_config(config), torch.randint(97, (2, 16))
    model(ids, labels=ids).loss.backward()
    model.generate(ids, max_new_tokens=2, do_sample=False, eos_token_id=[])
    kept = weakref.ref(model.model.layers[0].mlp.up_proj.weight)
    gc.collect()
    gc.disable()
    try:
        del model
        assert kept() is None
    finally:
        gc.enable()
