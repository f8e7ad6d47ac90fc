"""Qwen3.5 with experts: text alone, with images, two layouts of the experts, and the layer `mtp.*`."""

import json
import warnings

import pytest
import torch
from safetensors.torch import save_file
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    Qwen3_5MoeDecoderLayer,
    Qwen3_5MoeTextRotaryEmbedding,
)

import ligermodels
from ligermodels.errors import ConfigError
from ligermodels.training import load_mtp
from tests.arch.images import ImageSuite
from tests.arch.qwen3_vl import MOE, qwen3_5_moe
from tests.arch.suite import FIXTURES, LOGITS, RoutedSuite, read_tensors, relative, write_checkpoint
from tests.arch.test_qwen3_5 import TestQwen3_5 as OfQwen3_5, tiny as dense
from tests.arch.test_qwen3_5_mtp import mtp_tensors as mtp_of_dense
from tests.arch.test_qwen3_vl import Nested


def tiny(**changes):
    return {**dense(**{**MOE, "shared_expert_intermediate_size": 28, **changes}), "model_type": "qwen3_5_moe_text"}


OPTIONS = dict(
    layer_types=["full_attention", "linear_attention"], tie_word_embeddings=True, num_experts=6, num_experts_per_tok=3,
    output_router_logits=True, router_aux_loss_coef=0.5,
)  # fmt: skip


class TestQwen3_5Moe(RoutedSuite):
    arch = ligermodels.Qwen3_5Moe
    TINY = {
        "plain": tiny(),
        "tied_with_balancing_loss": tiny(**OPTIONS),
        "biases_and_one_expert_of_all": tiny(attention_bias=True, num_experts_per_tok=4),
    }
    ALSO = ("tied_with_balancing_loss",)
    NORM = 0.0
    GAPS_DIFFER = True  # there the state decays in a gap of the mask, and here it stays
    SWITCHED_ON = dict(
        head_dim=16, layer_types=["linear_attention", "full_attention"], linear_key_head_dim=16,
        linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, num_experts=4,
        num_experts_per_tok=3, moe_intermediate_size=64, shared_expert_intermediate_size=32,
        output_router_logits=True, router_aux_loss_coef=0.05,
    )  # fmt: skip
    SWITCHED_OFF = dict(
        num_experts_per_tok=1, output_router_logits=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    )  # fmt: skip
    shallow, earlier_generation = OfQwen3_5.shallow, OfQwen3_5.earlier_generation


class TestTextOfQwen3_5MoeVL(Nested, RoutedSuite):
    arch = ligermodels.Qwen3_5MoeVL
    TINY = {"plain": qwen3_5_moe(), "options": qwen3_5_moe(**OPTIONS)}
    NORM = 0.0
    GAPS_DIFFER = True

    def earlier_generation(self, config):
        """There was none: every release has rope_parameters."""
        return config


class TestImagesOfQwen3_5Moe(ImageSuite):
    arch = ligermodels.Qwen3_5MoeVL
    TINY = TestTextOfQwen3_5MoeVL.TINY
    NORM = 0.0


def mtp_tensors(config):
    """What a released file has of the layer, with the experts stacked: the names and shapes of this size."""
    E, size, S = (config[name] for name in ("num_experts", "moe_intermediate_size", "shared_expert_intermediate_size"))
    H, mlp, draw = config["hidden_size"], "mtp.layers.0.mlp.", torch.Generator().manual_seed(2)
    shapes = {
        "gate.weight": (E, H), "experts.gate_up_proj": (E, 2 * size, H), "experts.down_proj": (E, H, size),
        "shared_expert.gate_proj.weight": (S, H), "shared_expert.up_proj.weight": (S, H),
        "shared_expert.down_proj.weight": (H, S), "shared_expert_gate.weight": (1, H),
    }  # fmt: skip
    experts = {mlp + name: 0.3 * torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    return {name: x for name, x in mtp_of_dense(config).items() if not name.startswith(mlp)} | experts


@pytest.fixture
def with_mtp(tmp_path):
    """A folder as one is released: with a tower and `mtp.*`."""
    folder = write_checkpoint(qwen3_5_moe(mtp_num_hidden_layers=1), tmp_path / "source", norm=0.0)
    config = json.loads((folder / "config.json").read_text())["text_config"]
    tensors = {**read_tensors(folder), **mtp_tensors(config)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.filterwarnings("ignore:qwen3_5_moe. only the text model is read")
@pytest.mark.parametrize("text_only", [False, True], ids=["whole", "text"])
def test_the_layer_for_multi_token_prediction(with_mtp, text_only, tmp_path):
    """It is kept, read, computed as transformers' block computes it, trained, and drafts the greedy text."""
    expected = {name: x for name, x in read_tensors(with_mtp).items() if name.startswith("mtp.")}
    model = ligermodels.load(with_mtp, text_only=text_only, progress=False)
    assert isinstance(model, ligermodels.Qwen3_5Moe if text_only else ligermodels.Qwen3_5MoeVL)
    for name in ("kept", "read"):
        saved = read_tensors(model.save_pretrained(tmp_path / name))
        assert all(torch.equal(saved[tensor], x) for tensor, x in expected.items())
        if name == "kept":
            load_mtp(model)
    ids = torch.randint(3, 90, (1, 12))
    config = Qwen3_5MoeTextConfig(**tiny(num_hidden_layers=1, layer_types=["full_attention"]))
    config._attn_implementation = "eager"
    block, theirs = model.mtp.layers[0], Qwen3_5MoeDecoderLayer(config, 0)
    theirs.load_state_dict(block.state_dict())
    rotary, seen = Qwen3_5MoeTextRotaryEmbedding(config), []
    block.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[:2]))
    block.register_forward_hook(lambda _, inputs, output: seen.append(output))
    model.train()(ids, labels=ids).mtp_loss.backward()
    (x, _), (y, residual, *_) = seen
    mask = torch.full((12, 12), -torch.inf).triu(1)[None, None]
    wanted = theirs(x, position_embeddings=rotary(x, torch.arange(12)[None]), attention_mask=mask)
    assert relative(y + residual, wanted) < LOGITS
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.mtp.parameters())
    options = dict(max_new_tokens=16, eos_token_id=[])
    model.eval().requires_grad_(False)
    assert torch.equal(model.generate(ids, use_mtp=True, **options), model.generate(ids, **options))


@pytest.mark.parametrize("apart", [False, True], ids=["stacked", "by expert"])
def test_the_text_of_a_model_that_reads_images(apart, tmp_path):
    folder = write_checkpoint(qwen3_5_moe(), tmp_path / "whole", norm=0.0)
    whole = ligermodels.load(folder, progress=False)
    if apart:
        tensors = TestTextOfQwen3_5MoeVL().by_expert(read_tensors(folder))
        tensors = {name: x.contiguous() for name, x in tensors.items()}
        assert "model.language_model.layers.1.mlp.experts.3.up_proj.weight" in tensors
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(UserWarning, match=r"qwen3_5_moe: only the text model is read"):
        text = ligermodels.load(folder, text_only=True, progress=False)
    ids = torch.randint(3, 90, (2, 9))
    assert relative(text(ids).logits, whole(ids).logits) < LOGITS
    names = read_tensors(text.save_pretrained(tmp_path / "text"))
    assert {"model.layers.0.mlp.experts.gate_up_proj", "model.layers.1.mlp.shared_expert_gate.weight"} <= names.keys()


@pytest.mark.parametrize("values, text, whole", [
    ((2048, 40, 16, 32, 256, 8, 512), 34_660_610_688, 35_107_181_936),
    ((3072, 48, 32, 64, 256, 8, 1024), 122_111_526_912, 122_562_817_776),
    ((4096, 60, 32, 64, 512, 10, 1024), 396_346_350_336, 396_802_360_816),
], ids=["35B-A3B", "122B-A10B", "397B-A17B"])  # fmt: skip
def test_exact_number_of_parameters(values, text, whole):
    names = "hidden_size num_hidden_layers num_attention_heads linear_num_value_heads num_experts num_experts_per_tok"
    sizes = dict(zip([*names.split(), "moe_intermediate_size"], values, strict=True))
    sizes |= dict(vocab_size=248320, shared_expert_intermediate_size=sizes["moe_intermediate_size"])
    model = ligermodels.Qwen3_5Moe.from_config(sizes, device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == text
    config = dict(model_type="qwen3_5_moe", text_config=sizes, vision_config={"out_hidden_size": sizes["hidden_size"]})
    model = ligermodels.Qwen3_5MoeVL.from_config(config, device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == whole


def test_a_released_configuration():
    values = json.loads((FIXTURES / "v5" / "Qwen3.5-35B-A3B.json").read_text())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = ligermodels.Qwen3_5MoeVLConfig.from_hf(values)
    assert ligermodels.Qwen3_5MoeVLConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config
    model = ligermodels.Qwen3_5MoeVL.from_config(config, device="meta")
    assert model.num_parameters() == 35_107_181_936 and model.dtype == torch.bfloat16


@pytest.mark.parametrize("changes, message", [
    (dict(norm_topk_prob=False), "norm_topk_prob=False is not supported"),
    (dict(decoder_sparse_step=2), "decoder_sparse_step=2 is not supported"),
    (dict(mlp_only_layers=[0]), "mlp_only_layers"),
    (dict(num_experts_per_tok=5), "num_experts_per_tok=5 must be at most the number of experts, 4"),
    (dict(model_type="qwen3_5_moe", text_config=dense()), "text_config is .*, expected an object of qwen3_5_moe_text"),
], ids=lambda changes: next(iter(changes)) if isinstance(changes, dict) else "")  # fmt: skip
def test_what_is_not_computed_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        ligermodels.Qwen3_5MoeConfig.from_hf({**tiny(), **changes})
