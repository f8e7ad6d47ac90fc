"""Qwen3-VL with experts: as a model of text and with images, in three layouts of the experts."""

import pytest
import torch
from safetensors.torch import save_file

import ligermodels
from ligermodels.errors import ConfigError
from tests.arch.images import ImageSuite
from tests.arch.qwen3_vl import qwen3_vl_moe
from tests.arch.suite import RoutedSuite, read_tensors, write_checkpoint
from tests.arch.test_qwen3_vl import Nested

TINY = {
    "plain": qwen3_vl_moe(),
    "dense_in_block_0_tied": qwen3_vl_moe(
        dict(deepstack_visual_indexes=[2]), mlp_only_layers=[0], tie_word_embeddings=True, output_router_logits=True,
        router_aux_loss_coef=0.5,
    ),
    "every_other_block": qwen3_vl_moe(decoder_sparse_step=2, num_experts_per_tok=3, attention_bias=True),
}  # fmt: skip


class TestTextOfQwen3VLMoe(Nested, RoutedSuite):
    arch = ligermodels.Qwen3VLMoe
    TINY = TINY
    GIVEN = {"head_dim": 128}
    ALSO = ("dense_in_block_0_tied",)
    REAL = {"Qwen3-VL-30B-A3B-Instruct": 31_070_754_032, "Qwen3-VL-235B-A22B-Instruct": 235_670_022_896}

    def earlier_generation(self, config):
        config = super().earlier_generation(config)
        text = config["text_config"]
        return {**config, "text_config": {**text, "num_experts": text.pop("num_local_experts")}}


class TestImagesOfQwen3VLMoe(ImageSuite):
    arch = ligermodels.Qwen3VLMoe
    TINY = TINY
    named_on_disk = TestTextOfQwen3VLMoe.named_on_disk


@pytest.mark.parametrize("size", [16, 32], ids=["H = 2 I", "H = I"])
def test_a_square_tensor_is_of_the_layout_of_the_other(size, tmp_path):
    """Either of the two alone could be transposed or not; transformers 5 takes it for one that is not."""
    folder = write_checkpoint(qwen3_vl_moe(moe_intermediate_size=size), tmp_path)
    ids, before = torch.randint(3, 90, (2, 9)), read_tensors(folder)
    expected = ligermodels.load(folder, progress=False)(ids).logits
    tensors = {name: x.mT.contiguous() if ".mlp.experts." in name else x for name, x in before.items()}
    assert sum(x.shape != before[name].shape for name, x in tensors.items()) == 2, "one tensor of each block is square"
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(ligermodels.load(folder, progress=False)(ids).logits, expected)


def test_weights_that_do_not_sum_to_1_are_refused():
    with pytest.raises(ConfigError, match="norm_topk_prob=False is not supported"):
        ligermodels.Qwen3VLMoeConfig.from_hf(qwen3_vl_moe(norm_topk_prob=False))
