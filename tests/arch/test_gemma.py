"""Gemma: every switch of its configuration on tiny checkpoints, the released sizes, and naive loaders' mistakes."""

import json

import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm, GemmaTextScaledWordEmbedding

import ligermodels
from ligermodels.arch.gemma import GemmaConfig
from ligermodels.layers import Embedding, LMHead, RMSNorm
from tests.arch.suite import LOGITS, Suite, relative, theirs, theirs_logits, write_checkpoint


def tiny(**changes):
    base = dict(
        model_type="gemma",
        vocab_size=97,
        hidden_size=32,
        intermediate_size=44,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        hidden_act="gelu_pytorch_tanh",
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )
    return {**base, **changes}


class TestGemma(Suite):
    arch = ligermodels.Gemma
    NORM = 0.0
    TINY = {
        "plain": tiny(),
        "gelu_means_tanh": tiny(hidden_act="gelu"),
        "hidden_activation": tiny(hidden_act="gelu", hidden_activation="gelu_pytorch_tanh"),
        "silu": tiny(hidden_act="silu", hidden_activation="silu"),
        "wide_heads_sharing_one": tiny(head_dim=20, num_key_value_heads=1),
        "heads_all_their_own": tiny(head_dim=12, num_attention_heads=3, num_key_value_heads=3, hidden_size=30),
        "attention_bias": tiny(attention_bias=True),
        "untied": tiny(tie_word_embeddings=False),
        "other_theta_and_eps": tiny(
            rms_norm_eps=0.05, rope_parameters={"rope_type": "default", "rope_theta": 20.0}, num_hidden_layers=3
        ),
        "linear": tiny(rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}),
    }  # fmt: skip
    REAL = {"gemma-2b": 2_506_172_416, "gemma-7b": 8_537_680_896}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tiny(), tmp_path_factory.mktemp("gemma") / "hf", norm=0.0)


@pytest.fixture(scope="module")
def hf(folder):
    return theirs(folder)


@pytest.fixture
def model(folder):
    return ligermodels.Gemma.from_hub(folder, progress=False)


@pytest.fixture
def ids():
    return torch.randint(3, 97, (2, 24))


def norms(model):
    return [module for module in model.modules() if isinstance(module, RMSNorm)]


def rows_as_they_are(model):
    model.decoder.embed_tokens.embed_scale = None


def a_head_that_is_scaled(model):
    model.lm_head = LMHead(32, 97)
    model.lm_head.weight.data = model.decoder.embed_tokens.weight.detach() * 32**0.5


def weights_for_scales(model):
    for norm in norms(model):
        norm.offset = 0.0


def one_norm_that_is_not_offset(model):
    model.decoder.norm.offset = 0.0


def exact_gelu(model):
    for layer in model.decoder.layers:
        layer.mlp.activation = "gelu"


def silu(model):
    for layer in model.decoder.layers:
        layer.mlp.activation = "silu"


@pytest.mark.parametrize(
    "mistake",
    [rows_as_they_are, a_head_that_is_scaled, weights_for_scales, one_norm_that_is_not_offset, exact_gelu, silu],
)
def test_what_a_naive_loader_gets_wrong_shows(hf, model, ids, mistake):
    expected = theirs_logits(hf, ids)
    assert relative(model(ids).logits, expected) < LOGITS
    mistake(model)
    # Exact GELU is the nearest to the truth of these: the two curves are at most 5e-4 apart.
    assert relative(model(ids).logits, expected) > 10 * LOGITS


def test_the_scale_of_the_embedding_is_rounded_in_its_dtype():
    for size, bf16, fp16 in [
        (2048, 45.25, 45.25),
        (2304, 48.0, 48.0),
        (3072, 55.5, 55.4375),
        (3584, 59.75, 59.875),
        (4608, 68.0, 67.875),
    ]:
        for dtype, scale in ((torch.bfloat16, bf16), (torch.float16, fp16)):
            table = torch.randn(5, size).to(dtype)
            ours, hf = Embedding(5, size, embed_scale=size**0.5), GemmaTextScaledWordEmbedding(5, size, 0, size**0.5)
            ours.weight.data, hf.weight.data = table, table
            rows = ours(torch.arange(5))
            assert torch.equal(rows, table * scale) and torch.equal(rows, hf(torch.arange(5)))
    naive = table.float() * 4608**0.5  # fp32 scale: other values where the product is rounded
    assert not torch.equal(naive.half(), rows)


def test_the_norm_adds_one_in_fp32_and_rounds_once():
    x, weight = torch.randn(64, 256).bfloat16(), (0.3 * torch.randn(256)).bfloat16()
    hf = GemmaRMSNorm(256).bfloat16()
    hf.weight.data = weight
    found = {}
    for early in (False, True):
        norm = RMSNorm(256, eps=1e-6, offset=1.0, cast_before_weight=early).bfloat16()
        norm.weight.data = weight
        found[early] = norm(x)[0]
    assert torch.equal(found[False], hf(x))
    assert not torch.equal(found[True], hf(x))  # rounded before the weight
    early = RMSNorm(256, eps=1e-6, cast_before_weight=False).bfloat16()
    early.weight.data = 1 + weight  # rounded before the product
    assert not torch.equal(early(x)[0], hf(x))


def test_every_norm_casts_as_gemma_does(model):
    assert {(norm.offset, norm.cast_before_weight) for norm in norms(model)} == {(1.0, False)} and len(
        norms(model)
    ) == 5


def test_embeddings_that_are_passed_are_not_scaled(hf, model, ids):
    embedded = torch.randn(2, 24, 32)
    expected = theirs_logits(hf, None, inputs_embeds=embedded)
    assert relative(model(inputs_embeds=embedded).logits, expected) < LOGITS
    assert relative(model(inputs_embeds=embedded * 32**0.5).logits, expected) > 100 * LOGITS


def test_what_config_json_does_not_say_is_as_in_transformers():
    sizes = {key: tiny()[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    config = GemmaConfig.from_hf({**sizes, "num_attention_heads": 16})
    assert config.tie_word_embeddings and ligermodels.Gemma.from_config(config, device="meta").lm_head.is_tied
    assert (config.head_dim, config.num_key_value_heads, config.rms_norm_eps) == (256, 16, 1e-6)
    assert config.hidden_act == "gelu_pytorch_tanh" and config.rope_parameters["rope_theta"] == 10000.0
    assert config.max_position_embeddings == 8192


@pytest.mark.parametrize(
    ("act", "activation", "computed"),
    [
        ("gelu", None, "gelu_pytorch_tanh"),
        ("gelu", "gelu", "gelu_pytorch_tanh"),
        ("gelu_pytorch_tanh", None, "gelu_pytorch_tanh"),
        ("gelu", "silu", "silu"),
        ("silu", None, "silu"),
    ],
)
def test_one_activation_is_written_under_both_names(act, activation, computed):
    config = GemmaConfig.from_hf({**tiny(), "hidden_act": act, "hidden_activation": activation})
    saved = json.loads(json.dumps(config.to_hf()))
    assert saved["hidden_act"] == saved["hidden_activation"] == computed
    model = ligermodels.Gemma.from_config(config, device="meta")
    assert model.decoder.layers[0].mlp.activation == {"silu": "silu"}.get(computed, "gelu_tanh")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(use_bidirectional_attention=True), ["use_bidirectional_attention=True", "causal"]),
        (dict(hidden_activation="relu"), ["hidden_activation='relu'", "gelu_pytorch_tanh"]),
        (dict(hidden_activation=3), ["hidden_activation=3", "str or null"]),
        (dict(num_hidden_layers="2"), ["num_hidden_layers='2'", "positive integer"]),
        (dict(head_dim=7), ["head_dim=7", "even"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_work_is_refused(changes, words):
    with pytest.raises(ligermodels.ConfigError) as error:
        GemmaConfig.from_hf({**tiny(), **changes})
    assert all(word in str(error.value) for word in ["gemma", *words]), str(error.value)


def test_a_router_is_not_asked_for_what_it_has_not(model, ids):
    with pytest.raises(ligermodels.InputError, match="gemma has no router"):
        model(ids, output_router_logits=True)


def test_the_whole_model_compiles_without_a_graph_break(model, ids):
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(ids).logits, model(ids).logits)
    compiled(ids, labels=ids).loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)
