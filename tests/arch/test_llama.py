"""Llama: every switch of its configuration on tiny checkpoints, and the released sizes."""

import gc
import weakref

import pytest
import torch

import ligermodels
from tests.arch.suite import Suite


def tiny(**changes):
    base = dict(
        model_type="llama",
        vocab_size=97,
        hidden_size=32,
        intermediate_size=44,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )
    return {**base, **changes}


def rope(rope_type, **values):
    return {"rope_type": rope_type, "rope_theta": 500.0, **values}


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
        "llama3": tiny(
            tie_word_embeddings=True,
            rope_parameters=rope(
                "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
            ),
        ),
        "yarn": tiny(
            rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=8, beta_slow=1)
        ),
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


@pytest.fixture(scope="module")
def model():
    config = {key: value for key, value in tiny().items() if key != "rope_parameters"}
    return ligermodels.Llama.from_config({**config, "initializer_range": 0.3}, dtype=torch.float32)


def test_the_whole_model_compiles_without_a_graph_break(model):
    ids = torch.randint(97, (2, 16))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(ids).logits, model(ids).logits)
    compiled(ids, labels=ids).loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(), "either input_ids or inputs_embeds"),
        (dict(input_ids=torch.zeros(5, dtype=torch.long)), "expected [batch, sequence]"),
        (
            dict(input_ids=torch.zeros(2, 5, dtype=torch.long), labels=torch.zeros(2, 4, dtype=torch.long)),
            "labels",
        ),
        (dict(input_ids=torch.zeros(2, 5, dtype=torch.long), attention_mask=torch.ones(2, 4)), "[2, 5]"),
        (
            dict(input_ids=torch.zeros(2, 5, dtype=torch.long), position_ids=torch.zeros(3, 5).long()),
            "position_ids",
        ),
        (dict(input_ids=torch.zeros(2, 5, dtype=torch.long), output_attentions=True), "never in memory"),
        (
            dict(
                input_ids=torch.zeros(1, 5, dtype=torch.long),
                cu_seqlens=torch.tensor([0, 5], dtype=torch.int32),
                max_seqlen=5,
                attention_mask=torch.ones(1, 5),
            ),
            "packed sequences",
        ),
    ],
)
def test_arguments_that_do_not_fit(model, arguments, words):
    with pytest.raises(ligermodels.InputError) as error:
        model(**arguments)
    assert words in str(error.value)


def test_random_weights_follow_the_seed_and_the_table(model):
    config = {key: value for key, value in tiny(attention_bias=True).items() if key != "rope_parameters"}
    one, same, other = (ligermodels.Llama.from_config(config, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert abs(one["lm_head.weight"].std() - 0.02) < 2e-3
    assert (one["model.norm.weight"] == 1).all() and (one["model.layers.0.self_attn.q_proj.bias"] == 0).all()


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
