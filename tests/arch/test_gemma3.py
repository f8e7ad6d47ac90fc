"""Gemma 3 without images: every switch of its configuration on tiny checkpoints, and the released sizes."""

import json

import pytest
import torch
from safetensors.torch import save_file

import ligermodels
from ligermodels.arch.gemma3 import Gemma3Config
from tests.arch.suite import FIXTURES, LOGITS, Suite, read_tensors, relative, rope, tiny_config, write_checkpoint

FULL, SLIDING = "full_attention", "sliding_attention"


def ropes(full):
    return {FULL: full, SLIDING: {"rope_type": "default", "rope_theta": 20.0}}


def tiny(**changes):
    own = dict(
        num_hidden_layers=4, head_dim=8, query_pre_attn_scalar=12, sliding_window=6, layer_types=[SLIDING, FULL] * 2,
        rope_parameters=ropes(rope("linear", factor=8.0)),
    )  # fmt: skip
    return tiny_config("gemma3_text", **{**own, **changes})


class TestGemma3(Suite):
    arch = ligermodels.Gemma3
    NORM = 0.0
    TINY = {
        "plain": tiny(),
        "every_sixth_block_sees_everything": tiny(num_hidden_layers=7, layer_types=None, head_dim=4, hidden_size=24),
        "one_key_head_rope_unscaled": tiny(
            rope_parameters=ropes(rope("default")), num_hidden_layers=2, num_key_value_heads=1, head_dim=12,
            layer_types=[FULL, SLIDING],
        ),
        "capped_logits_silu_no_full_block": tiny(
            final_logit_softcapping=2.5, hidden_activation="silu", num_hidden_layers=2, layer_types=None
        ),
        "untied_with_biases_and_gelu": tiny(
            tie_word_embeddings=False, attention_bias=True, hidden_activation="gelu", num_hidden_layers=2,
            layer_types=[SLIDING, FULL],
        ),
    }  # fmt: skip
    REAL = {"gemma-3-270m": 268_098_176, "gemma-3-1b-it": 999_885_952}

    SWITCHED_ON = dict(
        head_dim=24, query_pre_attn_scalar=10, sliding_window=12, final_logit_softcapping=8.0,
        layer_types=[SLIDING, FULL], rope_parameters=ropes(rope("linear", factor=8.0)),
    )  # fmt: skip
    SWITCHED_OFF = dict(
        sliding_window=128, final_logit_softcapping=None, query_pre_attn_scalar=24,
        rope_parameters=ropes(rope("default")),
    )  # fmt: skip

    def shallow(self, tiny):
        return {**super().shallow(tiny), "layer_types": [FULL]}

    def earlier_generation(self, config):
        by_type = config["rope_parameters"]
        config = super().earlier_generation({**config, "rope_parameters": by_type[FULL]})
        if config["layer_types"] == Gemma3Config.from_hf({**config, "layer_types": None}).layer_types:
            del config["layer_types"]
        return {**config, "rope_local_base_freq": by_type[SLIDING]["rope_theta"]}


@pytest.mark.parametrize("prefix", ["language_model.model", "model.language_model"])
def test_the_text_of_a_model_that_reads_images(prefix, tmp_path):
    folder = write_checkpoint(tiny(), tmp_path / "text", norm=0.0)
    model, ids = ligermodels.load(folder, progress=False), torch.randint(3, 90, (2, 9))
    text = json.loads((folder / "config.json").read_text())
    whole = {"model_type": "gemma3", "text_config": text, "vision_config": {}, "image_token_index": 96}
    (folder / "config.json").write_text(json.dumps(whole))
    tensors = {name.replace("model", prefix, 1): x for name, x in read_tensors(folder).items()}
    tower = {"vision_tower.vision_model.post_layernorm.bias", "multi_modal_projector.mm_soft_emb_norm.weight"}
    tensors |= {("model." * prefix.startswith("model.")) + name: torch.ones(4) for name in tower}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(UserWarning, match="gemma3: only the text model is read: the vision tower"):
        alone = ligermodels.load(folder, text_only=True, progress=False)
    assert relative(alone(ids).logits, model(ids).logits) < LOGITS
    again = ligermodels.load(alone.save_pretrained(tmp_path / "again"), progress=False)
    assert torch.equal(again(ids).logits, alone(ids).logits) and again.config.model_type == "gemma3_text"


@pytest.mark.filterwarnings("ignore:gemma3. only the text")
@pytest.mark.parametrize("name, count", [("gemma-3-4b-it", 3_880_263_168), ("gemma-3-12b-it", 11_766_034_176)])
def test_exact_number_of_parameters_of_the_text(name, count):
    configs = [json.loads((FIXTURES / version / f"{name}.json").read_text()) for version in (".", "v5")]
    one, other = map(Gemma3Config.from_hf, configs)
    assert one == other and one.ropes["full"] == {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    assert ligermodels.Gemma3.from_config(one, device="meta").num_parameters() == count
