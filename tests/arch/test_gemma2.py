"""Gemma 2: every switch of its configuration on tiny checkpoints, the released sizes, and naive loaders' mistakes."""

import json

import pytest
import torch

import ligermodels
from ligermodels.arch.gemma2 import Gemma2Config
from ligermodels.layers import attention as attention_layer
from tests.arch.suite import (
    FIXTURES,
    LOGITS,
    Suite,
    relative,
    theirs,
    theirs_logits,
    tiny_config,
    write_checkpoint,
)


def tiny(**changes):
    own = dict(
        num_hidden_layers=3,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=6,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=2.5,
        rms_norm_eps=1e-6,
    )
    return tiny_config("gemma2", **{**own, **changes})


class TestGemma2(Suite):
    arch = ligermodels.Gemma2
    NORM = 0.0
    TINY = {
        "plain": tiny(),
        "window_of_two": tiny(sliding_window=2, num_hidden_layers=2),
        "no_cap_on_scores": tiny(attn_logit_softcapping=None, num_hidden_layers=2),
        "no_cap_on_logits_long_window": tiny(final_logit_softcapping=None, sliding_window=100, num_hidden_layers=2),
        "no_caps_silu": tiny(
            attn_logit_softcapping=None, final_logit_softcapping=None, hidden_activation="silu", num_hidden_layers=2
        ),
        "another_scalar_than_head_dim": tiny(
            query_pre_attn_scalar=30, head_dim=12, num_key_value_heads=1, num_hidden_layers=2
        ),
        "layers_as_listed": tiny(layer_types=["full_attention", "sliding_attention", "sliding_attention"]),
        "untied_with_biases_and_gelu": tiny(
            tie_word_embeddings=False, attention_bias=True, hidden_activation="gelu", num_hidden_layers=2
        ),
        "other_theta_and_eps": tiny(
            rms_norm_eps=0.05,
            num_key_value_heads=4,
            num_hidden_layers=1,
            rope_parameters={"rope_type": "default", "rope_theta": 20.0},
        ),
    }  # fmt: skip
    REAL = {"gemma-2-2b": 2_614_341_888, "gemma-2-9b": 9_241_705_984, "gemma-2-27b": 27_227_128_320}

    def earlier_generation(self, config):
        config = super().earlier_generation(config)
        config["hidden_act"] = config["hidden_activation"]
        if config["layer_types"] == Gemma2Config.from_hf({**config, "layer_types": None}).layer_types:
            del config["layer_types"]
        return config

    def test_scores_and_logits_lie_on_both_sides_of_the_bend(self, model, ids, monkeypatch):
        """Else parity would show nothing about the caps: all values would be +-cap, or as if there were none."""
        seen, attention = [], attention_layer.attention

        def recorded(q, k, v, *, softcap, scale, **options):
            rows = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
            scores = torch.einsum("bqhd,bkhd->bhqk", q, rows) * scale
            visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
            seen.append((scores[..., visible].flatten(), softcap))
            return attention(q, k, v, softcap=softcap, scale=scale, **options)

        monkeypatch.setattr(attention_layer, "attention", recorded)
        cap = model.config.final_logit_softcapping
        monkeypatch.setattr(model.config, "final_logit_softcapping", None)
        seen.append((model(ids).logits.flatten().detach(), cap))
        assert len(seen) == model.config.num_hidden_layers + 1
        for values, cap in seen:
            if cap is not None:
                ratio = values.abs() / cap
                inside, beyond = ((ratio < 0.3).float().mean(), (ratio > 1.5).float().mean())
                assert inside > 0.15 and beyond > 0.02, (inside, beyond)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = tiny(query_pre_attn_scalar=12)
    return write_checkpoint(config, tmp_path_factory.mktemp("gemma2") / "hf", norm=0.0)


@pytest.fixture(scope="module")
def hf(folder):
    return theirs(folder)


@pytest.fixture
def model(folder):
    return ligermodels.Gemma2.from_hub(folder, progress=False)


@pytest.fixture
def ids():
    return torch.randint(3, 97, (2, 24))


def norm_after_the_residual(layer):
    """The post norm on the sum, where Llama has the norm of its gated unit."""

    def forward(x, residual, batch, cache=None):
        x, residual = layer.input_layernorm(x, residual)
        x, residual = layer.post_attention_layernorm(layer.self_attn(x, batch, cache), residual)
        x, residual = layer.pre_feedforward_layernorm(x, residual)
        return layer.post_feedforward_layernorm(layer.mlp(x))[0], residual

    layer.forward = forward


def no_norm_after_attention(layer):
    layer.post_attention_layernorm.forward = lambda x, residual=None: (x, residual)


def no_norm_after_the_gated_unit(layer):
    layer.post_feedforward_layernorm.forward = lambda x, residual=None: (x, residual)


def post_attention_norm_as_in_llama(layer):
    layer.pre_feedforward_layernorm, layer.post_attention_layernorm = (
        layer.post_attention_layernorm,
        layer.pre_feedforward_layernorm,
    )


def weights_for_scales(layer):
    for norm in (
        layer.input_layernorm,
        layer.post_attention_layernorm,
        layer.pre_feedforward_layernorm,
        layer.post_feedforward_layernorm,
    ):
        norm.offset = 0.0


def scaled_by_head_dim(layer):
    layer.self_attn.scale = layer.self_attn.head_dim**-0.5


def no_cap_on_scores(layer):
    layer.self_attn.softcap = None


def odd_layers_slide(layer):
    layer.self_attn.window = None if layer.self_attn.window else 6


def window_without_itself(layer):
    layer.self_attn.window = layer.self_attn.window and layer.self_attn.window + 1


def no_window(layer):
    layer.self_attn.window = None


def exact_gelu(layer):
    layer.mlp.activation = "gelu"


@pytest.mark.parametrize(
    "mistake",
    [
        norm_after_the_residual,
        no_norm_after_attention,
        no_norm_after_the_gated_unit,
        post_attention_norm_as_in_llama,
        weights_for_scales,
        scaled_by_head_dim,
        no_cap_on_scores,
        odd_layers_slide,
        window_without_itself,
        no_window,
        exact_gelu,
    ],
)
def test_what_a_naive_block_gets_wrong_shows(hf, model, ids, mistake):
    expected = theirs_logits(hf, ids)
    assert relative(model(ids).logits, expected) < LOGITS
    for layer in model.decoder.layers:
        mistake(layer)
    # Exact GELU is the nearest to the truth of these: the two curves are at most 5e-4 apart.
    assert relative(model(ids).logits, expected) > 10 * LOGITS


def test_what_a_naive_ending_gets_wrong_shows(hf, model, ids):
    expected = theirs_logits(hf, ids)
    scale, cap = model.decoder.embed_tokens.embed_scale, model.config.final_logit_softcapping
    for module, name, wrong, right in [
        (model.decoder.embed_tokens, "embed_scale", None, scale),
        (model.config, "final_logit_softcapping", None, cap),
        (model.decoder.norm, "offset", 0.0, 1.0),
    ]:
        setattr(module, name, wrong)
        assert relative(model(ids).logits, expected) > 100 * LOGITS
        setattr(module, name, right)
    table = model.decoder.embed_tokens.weight.detach()
    scaled = torch.tanh(model.base_model(ids).last_hidden_state @ table.T * scale / cap) * cap  # a head that is scaled
    assert relative(scaled, expected) > 100 * LOGITS
    assert relative(model(ids).logits, expected) < LOGITS


def test_the_cap_comes_before_the_mask(hf, model, ids, monkeypatch):
    """Behind it, tanh would turn -inf into -cap, and every token would see a little of the future."""
    later = ids.clone()
    later[:, 12:] = torch.randint(3, 97, (2, 12))
    assert torch.equal(model(later).logits[:, :12], model(ids).logits[:, :12])
    expected = theirs_logits(hf, ids)

    def cap_after_mask(q, k, v, *, window, softcap, scale, **_):
        rows, values = (x.repeat_interleave(q.shape[2] // k.shape[2], 2).transpose(1, 2) for x in (k, v))
        scores = q.transpose(1, 2) @ rows.mT * scale
        past = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
        scores = scores.masked_fill((past < 0) | (past >= (window or 1000)), -torch.inf)
        return ((softcap * torch.tanh(scores / softcap)).softmax(-1) @ values).transpose(1, 2)

    monkeypatch.setattr(attention_layer, "attention", cap_after_mask)
    assert relative(model(ids).logits, expected) > 100 * LOGITS
    for layer in model.decoder.layers:
        layer.self_attn.softcap = 1e9  # the same attention without the mistake, were there no cap
    uncapped = model(ids).logits
    monkeypatch.undo()
    for layer in model.decoder.layers:
        layer.self_attn.softcap = None
    assert relative(uncapped, model(ids).logits) < 1e-4


def test_the_27b_is_scaled_by_its_own_number():
    for path in (FIXTURES / "gemma-2-27b.json", FIXTURES / "v5" / "gemma-2-27b.json"):
        model = ligermodels.Gemma2.from_config(json.loads(path.read_text()), device="meta")
        attn = model.decoder.layers[0].self_attn
        assert attn.scale == 144**-0.5 != attn.head_dim**-0.5 and attn.num_heads * attn.head_dim != 4608
        assert [layer.self_attn.window for layer in model.decoder.layers] == [4096, None] * 23
        assert attn.softcap == 50.0 and model.config.final_logit_softcapping == 30.0 and model.lm_head.is_tied


def test_layers_that_do_not_slide_need_no_window():
    config = Gemma2Config.from_hf({**tiny(), "sliding_window": None, "layer_types": ["full_attention"] * 3})
    assert [config.window(layer) for layer in range(3)] == [None] * 3
