"""Gemma 3 with images against transformers: as a model of text, and with images, in every layout of its files."""

import pytest
import torch
import transformers

import ligermodels
from ligermodels.arch.gemma3 import Gemma3Config
from ligermodels.errors import ConfigError, InputError
from tests.arch.gemma3_vl import IMAGE, inputs, tiny
from tests.arch.suite import (
    GRADIENTS,
    LOGITS,
    Suite,
    Tiny,
    check_checkpointing,
    check_gradients,
    check_other_layout,
    read_tensors,
    relative,
)
from tests.arch.test_gemma3 import FULL, SLIDING, TestGemma3

TINY = {
    "plain": tiny(),
    "window_shorter_than_an_image": tiny(
        sliding_window=3, vision=dict(image_size=12, patch_size=4), num_hidden_layers=2, layer_types=[SLIDING, FULL],
        root=dict(mm_tokens_per_image=9),
    ),
    "untied_one_channel": tiny(
        tie_word_embeddings=False, vision=dict(num_channels=1, hidden_act="gelu", layer_norm_eps=0.05),
        num_hidden_layers=2, layer_types=[FULL, SLIDING],
    ),
}  # fmt: skip
CASES = {
    None: [[3, "image", 5, "image", 2]],
    "left": [["image", 4], [2, "image", 5, "image", 4]],
    "right": [[3, "image", 4], [2, "image", 5, "image", 4], [6]],
}
"""The side of the padding -> rows."""


def on_disk(tensors):
    """By transformers' names in memory -> by those of released files."""
    names = {"model.language_model.": "language_model.model.", "model.vision_tower.": "vision_tower.vision_model."}
    names |= {"model.multi_modal_projector.": "multi_modal_projector.", "lm_head.": "language_model.lm_head."}
    find = lambda name: next(x for x in names if name.startswith(x))  # noqa: E731
    return {name.replace(find(name), names[find(name)]): x for name, x in tensors.items()}


class TestText(Suite):
    arch = ligermodels.Gemma3VL
    TINY = TINY
    NORM = 0.0
    REAL = {"gemma-3-4b-it": 4_300_079_472, "gemma-3-12b-it": 12_187_325_040}

    def named_on_disk(self, tensors):
        return on_disk(tensors)

    def earlier_generation(self, config):
        text, vision = dict(config["text_config"]), dict(config["vision_config"])
        text = TestGemma3.earlier_generation(TestGemma3(), text)
        del text["torch_dtype"], vision["dtype"]
        root = {key: value for key, value in config.items() if key != "dtype"}
        return {**root, "torch_dtype": config["dtype"], "text_config": text, "vision_config": vision}

    def shallow(self, tiny):
        text = {**tiny["text_config"], "num_hidden_layers": 1, "layer_types": [SLIDING]}
        return {**tiny, "text_config": text}

    def training_batch(self, tiny, seed=0):
        batch = inputs([[3, "image", 2]], tiny, seed=seed)
        return {**batch, "labels": batch["input_ids"]}

    def test_the_whole_model_compiles_without_a_graph_break(self, first):
        """Of text, as in the other models with images."""
        model = self.arch.from_config(self.shallow(first), dtype=torch.float32, seed=0)
        ids = torch.randint(3, 90, (2, 24))
        torch.compiler.reset()
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(ids, labels=ids).loss, model(ids, labels=ids).loss)

    @pytest.mark.gpu
    def test_a_training_step_passes_the_sync_checker_is_captured_and_compiles(self, model, tiny):
        """But for the bias of k in the tower, which adds the same to all scores of a query: rounding errors."""
        for name, parameter in model.model.vision_tower.named_parameters():
            parameter.requires_grad_(not name.endswith("k_proj.bias"))
        super().test_a_training_step_passes_the_sync_checker_is_captured_and_compiles(model, tiny)

    def test_defaults_are_those_of_transformers(self):
        given = dict(model_type="gemma3", text_config={}, vision_config={"vision_use_head": False})
        ours = self.arch.config_class.from_hf({**given, "mm_tokens_per_image": 49})
        expected = transformers.AutoConfig.for_model(**given, mm_tokens_per_image=49)
        saved = ours.to_hf()
        assert saved["tie_word_embeddings"] and ours.ropes == Gemma3Config.from_hf({}).ropes
        for part, wanted in (
            (saved["text_config"], expected.text_config),
            (saved["vision_config"], expected.vision_config),
        ):
            for name, value in part.items():
                assert getattr(wanted, name, value) == value or name in ("dtype", "torch_dtype"), name
        assert [getattr(expected, name) for name in ours.root_fields] == [saved[name] for name in ours.root_fields]


class TestImages(Tiny):
    arch = ligermodels.Gemma3VL
    TINY = TINY
    NORM = 0.0

    def test_logits_loss_and_every_gradient(self, hf, model, tiny):
        for pad, rows in CASES.items():
            batch = inputs(rows, tiny, pad)
            tokens = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
            labels = batch["input_ids"].masked_fill(~tokens | (batch["input_ids"] == IMAGE), -100)
            labels[torch.arange(len(labels)), tokens.int().argmax(1)] = -100
            expected, output = hf(**batch, labels=labels), model(**batch, labels=labels, return_logits=True)
            assert relative(output.logits[tokens], expected.logits[tokens]) < LOGITS
            assert abs(output.loss - expected.loss) < LOGITS * expected.loss
            hf.zero_grad()
            model.zero_grad()
            expected.loss.backward()
            model(**batch, labels=labels).loss.backward()
            for one in (hf, model):  # the bias of k adds the same to all scores of a query: rounding errors
                for layer in dict(one.model.vision_tower.encoder.named_children())["layers"]:
                    assert layer.self_attn.k_proj.bias.grad.norm() < GRADIENTS * layer.self_attn.q_proj.bias.grad.norm()
                    layer.self_attn.k_proj.bias.grad = None
            check_gradients(hf, model, on_disk, allowed=2 * GRADIENTS)

    def test_greedy_tokens(self, hf, model, tiny):
        for rows in ([[3, "image", 5, "image", 2]], [["image", 9], [2, "image", 7]], CASES["right"]):
            batch = inputs(rows, tiny, "left")
            expected = hf.generate(**batch, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
            assert torch.equal(model.generate(**batch, max_new_tokens=12, eos_token_id=[]), expected)

    def test_an_image_after_a_cache_and_what_does_not_fit(self, model, tiny):
        rows = [[3, "image", 2], [4, "image", 2]]
        whole = inputs([rows[0] + rows[1]], tiny)
        first, length = len(inputs(rows[:1], tiny)["input_ids"][0]), whole["input_ids"].shape[1]
        cache, ids, pixels = model.new_cache(1, length), whole["input_ids"], whole["pixel_values"]
        parts = [model(ids[:, :first], pixel_values=pixels[:1], past_key_values=cache).logits]
        with pytest.raises(InputError, match=r"image_token_id 93, and the images of this call make 0"):
            model(ids[:, first:], past_key_values=cache)
        parts.append(model(ids[:, first:], pixel_values=pixels[1:], past_key_values=cache).logits)
        assert relative(torch.cat(parts, 1), model(**whole).logits) < LOGITS
        assert model(torch.tensor([[IMAGE]]), past_key_values=cache).logits.isfinite().all()
        with pytest.raises(InputError, match=r"expected \[images, "):
            model(ids, pixel_values=pixels[:, :, :-2])
        with pytest.raises(InputError, match="images need input_ids"):
            model(inputs_embeds=model.get_input_embeddings()(ids), pixel_values=pixels)

    def test_packed_rows_equal_separate_ones(self, model, tiny):
        parts = [inputs([row], tiny, seed=n) for n, row in enumerate(([3, "image", 2], ["image", 4], [5], ["image"]))]
        ids = torch.cat([part["input_ids"] for part in parts], 1)
        pixels = torch.cat([part["pixel_values"] for part in parts if "pixel_values" in part])
        bounds = torch.tensor([0, *(part["input_ids"].shape[1] for part in parts)]).cumsum(0, dtype=torch.int32)
        expected = torch.cat([model(**part).logits for part in parts], 1)
        assert relative(model(ids, pixel_values=pixels, cu_seqlens=bounds).logits, expected) < LOGITS
        positions = torch.cat([torch.arange(part["input_ids"].shape[1]) for part in parts])[None]
        assert relative(model(ids, pixel_values=pixels, position_ids=positions).logits, expected) < LOGITS

    @pytest.mark.parametrize("text, tower", [(a, b) for a in (0, 1) for b in (0, 1)])
    def test_every_layout_of_its_files(self, model, folder, hf, tiny, text, tower, tmp_path):
        here = (
            ("language_model.model.", "model.language_model.")[text],
            ("vision_tower.", "vision_tower.vision_model.")[tower],
        )
        tensors = {}
        for name, x in read_tensors(folder).items():
            name = name.replace("language_model.model.", here[0]).replace("vision_tower.vision_model.", here[1])
            name = "model." * text + name if name.startswith(("vision", "multi")) else name
            tensors["lm_head.weight" if text and name.endswith("lm_head.weight") else name] = x
        check_other_layout(model, folder, tensors, inputs([[3, "image", 2]], tiny), tmp_path / "again")

    @pytest.mark.parametrize("recompute", ["block", "mlp"])
    def test_checkpointing_gives_the_same_gradients_and_saves_less(self, recompute, model, tiny):
        tower, batch = model.model.vision_tower, inputs(CASES["right"], tiny, "right")
        batch["labels"] = batch["input_ids"]
        check_checkpointing(model, tower, tower.encoder["layers"], batch, recompute)


def test_what_is_refused():
    for config, words in (
        (tiny(vision=dict(vision_use_head=True)), "vision_use_head=True is not supported"),
        (tiny(final_logit_softcapping=3.0), "final_logit_softcapping=3.0 is not supported with images"),
        (tiny(root=dict(mm_tokens_per_image=16)), "mm_tokens_per_image=16 must be the square of a divisor of 6"),
    ):
        with pytest.raises(ConfigError, match=words):
            ligermodels.Gemma3VL.from_config(config, device="meta")
