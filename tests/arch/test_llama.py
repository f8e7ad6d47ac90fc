"""Llama: every switch of its configuration on tiny checkpoints, and the released sizes."""

import copy
import gc
import pickle
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
        "heads_all_their_own": tiny(num_key_value_heads=4),
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


@pytest.fixture(scope="module")
def model():
    config = {key: value for key, value in tiny().items() if key != "rope_parameters"}
    return ligermodels.Llama.from_config({**config, "initializer_range": 0.3}, dtype=torch.float32)


def test_an_adapter_around_the_head_is_not_passed_by(model):
    class Adapter(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.delta = base, torch.nn.Linear(32, 97, bias=False)

        def forward(self, x):
            return self.base(x) + self.delta(x)

    head, ids = model.lm_head, torch.randint(97, (2, 16))
    plain = model(ids, labels=ids).loss
    model.lm_head = Adapter(head)
    try:
        output = model(ids, labels=ids)
        output.loss.backward()
        assert abs(output.loss - plain) > 1e-3 and output.logits is None
        assert model.lm_head.delta.weight.grad.abs().sum() > 0
    finally:
        model.lm_head = head


class ModulesToSave(torch.nn.Module):
    """Trains a copy of a module, as PEFT's wrapper of this name does."""

    def __init__(self, module):
        super().__init__()
        self.original_module = module
        self.modules_to_save = torch.nn.ModuleDict({"default": copy.deepcopy(module)})


@pytest.mark.parametrize("made", [lambda model: model, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_tied_head_keeps_the_table_of_which_a_copy_is_trained(made):
    """Also the head of a copied model; transformers' tied head keeps its table as well."""
    model = made(ligermodels.Llama.from_config({**tiny(tie_word_embeddings=True), "initializer_range": 0.3}))
    table = model.model.embed_tokens
    wrapper = model.model.embed_tokens = ModulesToSave(table)
    assert model.lm_head.weight is table.weight
    model.model.embed_tokens = wrapper.modules_to_save["default"]  # merged
    assert model.lm_head.weight is table.weight and "lm_head.weight" in model.state_dict()


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
