"""Mixtral: every switch of its configuration on tiny checkpoints, the balancing loss, and jitter."""

import pytest
import torch

import ligermodels
from tests.arch.suite import LOGITS, Suite, Tiny, check_gradients, check_other_layout, relative, tiny_config


def tiny(**changes):
    own = dict(intermediate_size=20, num_local_experts=4, num_experts_per_tok=2)
    return tiny_config("mixtral", **{**own, **changes})


def named_on_disk(tensors):
    """transformers' names in memory, experts stacked -> those of the files, a tensor per expert and projection."""
    found = {}
    for name, tensor in tensors.items():
        block = name.partition("mlp.")[0] + "block_sparse_moe."
        if name.endswith("mlp.gate.weight"):
            found[block + "gate.weight"] = tensor
        elif name.endswith("experts.gate_up_proj"):
            for e, rows in enumerate(tensor):
                found[f"{block}experts.{e}.w1.weight"], found[f"{block}experts.{e}.w3.weight"] = rows.chunk(2)
        elif name.endswith("experts.down_proj"):
            found |= {f"{block}experts.{e}.w2.weight": rows for e, rows in enumerate(tensor)}
        else:
            found[name] = tensor
    return found


class TestMixtral(Suite):
    arch = ligermodels.Mixtral
    # With a cache, its balancing loss fails on an attention_mask, which is longer than the new tokens.
    GENERATE = {"output_router_logits": False}
    TINY = {
        "eight_experts": tiny(num_local_experts=8),
        "two_experts_and_both": tiny(num_local_experts=2, num_hidden_layers=1),
        # A single expert weighs 1 whatever its score: without the balancing loss the router had no gradient.
        "one_of_four": tiny(num_experts_per_tok=1, output_router_logits=True, router_aux_loss_coef=0.5),
        "balancing_loss": tiny(output_router_logits=True, router_aux_loss_coef=0.1),
        "window": tiny(sliding_window=6),
        "jitter_is_for_training": tiny(router_jitter_noise=0.3, hidden_act="gelu"),
        "tied_other_theta_and_eps": tiny(
            tie_word_embeddings=True, rms_norm_eps=0.05, rope_parameters={"rope_type": "default", "rope_theta": 20.0}
        ),
    }  # fmt: skip
    ALSO = ("balancing_loss",)
    REAL = {
        "Mixtral-8x7B": 46_702_792_704,
        "Mixtral-8x22B": 140_620_634_112,
        "Mixtral-8x22B-Instruct": 140_630_071_296,
    }

    def named_on_disk(self, tensors):
        return named_on_disk(tensors)

    def test_packed_equals_separate(self, model, ids):
        model.config.output_router_logits = False  # that loss is of a batch as a whole, not a sum over its sequences
        super().test_packed_equals_separate(model, ids)

    def test_the_stacked_layout_loads_and_is_written_as_the_released_one(self, folder, hf, model, ids, tmp_path):
        tensors = {name: tensor.contiguous() for name, tensor in hf.state_dict().items()}
        if hf.config.tie_word_embeddings:
            del tensors["lm_head.weight"]
        assert any(name.endswith("mlp.experts.gate_up_proj") for name in tensors)
        check_other_layout(model, folder, tensors, dict(input_ids=ids), tmp_path / "again")


class TestRouter(Tiny):
    arch = ligermodels.Mixtral
    TINY = {"six_experts": tiny(num_local_experts=6, router_aux_loss_coef=0.2, router_jitter_noise=0.2)}

    @pytest.fixture
    def ids(self):
        return torch.randint(3, 97, (2, 24))

    @pytest.mark.parametrize(("side", "checkpointing"), [("none", False), ("left", True), ("right", False)])
    def test_the_balancing_loss_is_that_of_transformers(self, hf, model, ids, side, checkpointing):
        mask = torch.ones(2, 24, dtype=torch.long)
        mask[1, :9] = 0
        mask = {"none": None, "left": mask, "right": mask.flip(1)}[side]
        labels = ids if mask is None else ids.masked_fill(mask == 0, -100)
        if side == "left":
            labels = labels.index_fill(1, torch.tensor([9]), -100)  # else the padding would have to predict it
        positions = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
        inputs = dict(attention_mask=mask, position_ids=positions, labels=labels, output_router_logits=True)
        if checkpointing:
            model.gradient_checkpointing_enable()
            model.train().config.router_jitter_noise = 0.0
            for layer in model.decoder.layers:
                layer.mlp.jitter_noise = 0.0
        expected, output = hf(ids, **inputs), model(ids, **inputs)
        tokens = torch.ones(48, dtype=torch.bool) if mask is None else mask.bool().flatten()
        assert len(output.router_logits) == len(expected.router_logits) == 2
        for found, wanted in zip(output.router_logits, expected.router_logits, strict=True):
            assert found.shape == (48, 6) and relative(found[tokens], wanted[tokens]) < LOGITS
        for name in ("aux_loss", "loss"):
            assert abs(output[name] - expected[name]) < LOGITS * expected[name], name
        plain = model(ids, mask, positions, labels)
        assert plain.aux_loss is plain.router_logits is None
        assert abs(output.loss - plain.loss - 0.2 * output.aux_loss) < LOGITS * output.loss
        assert output.aux_loss > 2.05  # it is 2 for balanced experts: its part of the gradients is no rounding error
        output.loss.backward()
        expected.loss.backward()
        check_gradients(hf, model, named_on_disk)

    def test_jitter_is_drawn_as_transformers_draws_it(self, hf, model, ids):
        found = []
        for one in (hf, model):
            torch.manual_seed(7)
            found.append(one.train()(ids).logits)
        assert relative(found[1], found[0]) < LOGITS
        assert relative(model.eval()(ids).logits, found[0]) > 100 * LOGITS
        torch.manual_seed(8)
        assert relative(model.train()(ids).logits, found[0]) > 100 * LOGITS
