"""Llama: every switch of its configuration on tiny checkpoints, and the released sizes."""

import gc
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

import ligermodels
from ligermodels.arch import hooks
from ligermodels.errors import InputError
from tests.arch.suite import LLAMA3, LOGITS, YARN, Suite, edit_config, relative, rope, theirs, tiny_config
from tests.parallel.ranks import one_rank


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


@pytest.mark.parametrize("tied", [False, True])
def test_an_fp32_head_on_a_bf16_body(written, tied):
    """As norms and head are kept in fp32, or as TRL's cast_lm_head_to_fp32 does with the table of a tied head."""
    folder = written(tiny(tie_word_embeddings=tied))
    exact, found = theirs(folder), []
    ids = torch.randint(3, 90, (2, 24))
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.copy_(parameter.bfloat16())
    wanted = exact(ids, labels=ids)
    wanted.loss.backward()
    for model in (theirs(folder).bfloat16(), ligermodels.load(folder, dtype=torch.bfloat16, progress=False)):
        if tied:
            table = model.get_input_embeddings().float()
            table.register_forward_hook(lambda module, args, output: output.bfloat16())
            model.lm_head.register_forward_pre_hook(lambda module, args: (args[0].float(),))
        else:
            model.model.norm.float()
            model.lm_head.float()
        output = model(ids, labels=ids) | model(ids)
        output["loss"].backward()
        assert output["logits"].dtype == torch.float32
        gradients = [
            relative(model.get_parameter(name).grad, parameter.grad) for name, parameter in exact.named_parameters()
        ]
        found.append(torch.tensor([relative(output["logits"], wanted.logits), *gradients]))
        chosen = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert torch.equal(chosen, exact.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0))
    theirs_error, ours_error = found
    assert (ours_error < 1.5 * theirs_error).all()  # which of two roundings is nearer varies from tensor to tensor


def test_what_torch_wraps_and_hooks_leaves_a_block_as_it_is(written, monkeypatch, tmp_path):
    """FSDP2, checkpointing and torch.compile: the fast path stays."""
    model, ids = ligermodels.load(written(tiny(num_hidden_layers=3)), progress=False), torch.randint(3, 90, (2, 9))
    expected, layers = model(ids).logits, model.model.layers
    monkeypatch.setattr(hooks, "HookedLayer", None)
    with one_rank(tmp_path):
        fully_shard(layers[0])
        layers[1], layers[2] = checkpoint_wrapper(layers[1]), torch.compile(layers[2], backend="eager")
        assert layers[0]._forward_hooks and relative(model(ids).logits, expected) < LOGITS
        layers[0].register_forward_hook(lambda block, args, output: output)
        with pytest.raises(TypeError):  # for HookedLayer
            model(ids)


@pytest.mark.parametrize("norm", ["replaced", "hooked"])
def test_a_replaced_forward_and_the_final_norm_see_the_hidden_state(written, norm):
    folder, ids = written(tiny()), torch.randint(3, 90, (2, 9))
    found = []
    for model in (ligermodels.load(folder, progress=False), theirs(folder)):
        layer, decoder = model.model.layers[0], model.model
        layer.forward = lambda h, *args, forward=layer.forward, **options: 0.9 * forward(h + 0.1, *args, **options)
        if norm == "replaced":
            decoder.norm = torch.nn.RMSNorm(32, eps=1e-5)
        else:
            decoder.norm.register_forward_pre_hook(lambda module, args: args[0] + 0.1)
            decoder.norm.register_forward_hook(lambda module, args, output: output + 0.1)
        found.append(model(ids, labels=ids).loss)
    assert relative(*found) < LOGITS


def test_a_layer_that_is_no_block_is_refused():
    class Sequential(ligermodels.Llama):
        block_class = staticmethod(lambda config, layer: torch.nn.Linear(32, 32))

    with pytest.raises(InputError, match=r"a Linear cannot be a layer .*ResidualBlock"):
        Sequential.from_config(tiny())


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_is_freed_when_nobody_holds_it(tied):
    """By reference counts alone: a cycle would keep a GPU's memory until the collector comes."""
    config = {key: value for key, value in tiny(tie_word_embeddings=tied).items() if key != "rope_parameters"}
    model, ids = ligermodels.Llama.from_config(config, seed=0), torch.randint(97, (2, 16))
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
