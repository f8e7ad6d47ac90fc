"""Qwen3.5: linear and full attention, partial rotation, an output gate, and files that also have images."""

import json

import pytest
import torch
from safetensors.torch import save_file

import ligermodels
from ligermodels.errors import CheckpointError, ConfigError
from ligermodels.layers import Batch, GatedDeltaNet
from tests.arch.suite import LOGITS, Suite, read_tensors, relative, rope, tiny_config, write_checkpoint


def tiny(**changes):
    linear = dict(linear_key_head_dim=8, linear_value_head_dim=12, linear_num_key_heads=2, linear_num_value_heads=4)
    kinds = ["linear_attention", "full_attention"]
    parameters = rope("default", partial_rotary_factor=0.25, mrope_section=[1, 1, 0], mrope_interleaved=True)
    base = dict(head_dim=16, layer_types=kinds, rope_parameters=parameters, **linear)
    return tiny_config("qwen3_5_text", **{**base, **changes})


class TestQwen3_5(Suite):
    arch = ligermodels.Qwen3_5
    TINY = {
        "plain": tiny(),
        "tied": tiny(tie_word_embeddings=True, layer_types=["full_attention", "linear_attention"]),
        "biases_and_one_key_head": tiny(attention_bias=True, linear_num_key_heads=1, linear_num_value_heads=3),
    }
    ALSO = ("tied",)
    REAL = {}
    NORM = 0.0
    GAPS_DIFFER = True  # there the state decays in a gap of the mask, and here it stays

    def shallow(self, tiny):
        return {**tiny, "num_hidden_layers": 1, "layer_types": tiny["layer_types"][:1]}

    def earlier_generation(self, config):
        """There was none: every release has rope_parameters."""
        return config

    def test_packed_documents_are_those_alone(self, model, ids):
        """Neither state nor convolution passes a boundary."""
        lengths, row = [1, 7, 3, 13], ids[:1, :24]
        bounds = torch.tensor([0, 1, 8, 11, 24], dtype=torch.int32)
        found = model(row, cu_seqlens=bounds).logits.split(lengths, 1)
        for packed, alone in zip(found, row.split(lengths, 1), strict=True):
            assert relative(packed, model(alone).logits) < LOGITS


def test_padding_on_the_right_leaves_the_state_of_the_text():
    layer = GatedDeltaNet(16, num_key_heads=1, num_value_heads=2, key_head_dim=8, value_head_dim=8)
    x, lengths = torch.randn(3, 9, 16), [9, 2, 5]
    mask = torch.arange(9) < torch.tensor(lengths)[:, None]
    options = dict(dtype=torch.float32, device="cpu")
    whole = layer.new_state(3, 9, **options)
    layer(x, Batch(token_mask=mask), whole)
    for row, length in enumerate(lengths):
        alone = layer.new_state(1, 9, **options)
        layer(x[row : row + 1, :length], Batch(), alone)
        for found, expected in zip(whole.read(9), alone.read(length), strict=True):
            torch.testing.assert_close(found[row : row + 1], expected)


def test_a_convolution_of_one_token_has_no_past():
    layer = GatedDeltaNet(16, num_key_heads=1, num_value_heads=2, key_head_dim=8, value_head_dim=8, conv_size=1)
    x, state = torch.randn(2, 9, 16), layer.new_state(2, 9, dtype=torch.float32, device="cpu")
    parts = [
        layer(part, Batch(past_length=past), state) for past, part in zip((0, 4, 5), x.split([4, 1, 4], 1), strict=True)
    ]
    torch.testing.assert_close(torch.cat(parts, 1), layer(x, Batch()))


def with_images(folder, into):
    """The checkpoint as one of a model that also reads images, and predicts several tokens."""
    config = json.loads((folder / "config.json").read_text())
    model_type = config["model_type"].removesuffix("_text")
    outer = dict(model_type=model_type, text_config=config, tie_word_embeddings=config["tie_word_embeddings"])
    into.mkdir()
    (into / "config.json").write_text(json.dumps(outer))
    tensors = {name.replace("model.", "model.language_model.", 1): x for name, x in read_tensors(folder).items()}
    tensors |= {"model.visual.patch_embed.proj.weight": torch.ones(2), "mtp.fc.weight": torch.ones(2)}
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    return into


@pytest.mark.parametrize("changes", [{}, dict(tie_word_embeddings=True)], ids=["untied", "tied"])
def test_the_text_of_a_model_that_reads_images(changes, tmp_path):
    folder = write_checkpoint(tiny(**changes), tmp_path / "text", norm=0.0)
    with pytest.warns(UserWarning, match=r"the vision tower .* left out, here and in what is saved"):
        model = ligermodels.Qwen3_5.from_hub(with_images(folder, tmp_path / "images"), progress=False)
    ids = torch.randint(3, 90, (1, 9))
    assert torch.equal(model(ids).logits, ligermodels.load(folder, progress=False)(ids).logits)
    model.save_pretrained(tmp_path / "saved")
    assert read_tensors(tmp_path / "saved").keys() == read_tensors(folder).keys() | {"mtp.fc.weight"}


@pytest.mark.parametrize("changes, message", [
    (dict(layer_types=["full_attention", "sliding_attention"]), "layer_types"),
    (dict(layer_types=["full_attention"]), "for each of 2 blocks"),
    (dict(linear_num_value_heads=3), "must be a multiple of 2 key heads"),
    (dict(attn_output_gate=False), "attn_output_gate=False is not supported"),
    (dict(mlp_only_layers=[1]), "mlp_only_layers"),
    (dict(hidden_act="gelu"), "hidden_act"),
    (dict(layer_types=None, full_attention_interval=0), "full_attention_interval=0 must be a positive integer"),
    (dict(layer_types=None, full_attention_interval=2.5), "full_attention_interval=2.5 must be"),
    (dict(model_type="qwen3_5", text_config=None), "text_config is None"),
    (dict(model_type="qwen3_5", text_config=dict(model_type="llama")), "text_config is .*llama"),
    (dict(model_type="qwen3_5", text_config=tiny(), quantization_config=dict(quant_method="fp8")), "'fp8'"),
    (dict(model_type="qwen3_next"), "model_type 'qwen3_next'"),
], ids=lambda changes: next(iter(changes)) if isinstance(changes, dict) else "")  # fmt: skip
def test_what_is_not_computed_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        ligermodels.Qwen3_5Config.from_hf({**tiny(), **changes})


def with_bias(tensors):
    return {**tensors, "model.layers.0.linear_attn.conv1d.bias": torch.ones(80)}


def of_qwen3_next(tensors):
    """The projections of Qwen3-Next: q, k, v and z of each key head side by side, and b and a."""
    name = "model.layers.0.linear_attn.in_proj_"
    joint = {"qkvz": [tensors.pop(f"{name}{part}.weight") for part in ("qkv", "z")]}
    joint["ba"] = [tensors.pop(f"{name}{part}.weight") for part in "ba"]
    return {**tensors, **{f"{name}{part}.weight": torch.cat(found) for part, found in joint.items()}}


@pytest.mark.parametrize("change, says", [
    (of_qwen3_next, r"missing \(4 of \d+\): .*in_proj_(.*\n)*.*unexpected \(2\): .*in_proj_qkvz"),
    (with_bias, r"unexpected \(1\): .*conv1d"),
    (dict(linear_num_value_heads=2), "wrong shape"),
    (dict(linear_num_value_heads=8, linear_value_head_dim=6), "wrong shape"),
    (dict(linear_key_head_dim=16, linear_value_head_dim=4), "wrong shape"),
    (dict(linear_conv_kernel_dim=3), r"conv1d.weight is \[80, 1, 4\], the model has \[80, 1, 3\]"),
    (dict(layer_types=["full_attention", "linear_attention"]), "missing"),
], ids=["rows of qwen3_next", "bias", "heads", "more heads", "sizes", "convolution", "order"])  # fmt: skip
def test_weights_of_another_hybrid_are_refused(change, says, tmp_path):
    folder = write_checkpoint(tiny(), tmp_path, norm=0.0)
    if callable(change):
        (file,) = folder.glob("*.safetensors")
        save_file(change(read_tensors(folder)), file, metadata={"format": "pt"})
    else:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(CheckpointError, match=says):
        ligermodels.load(folder, progress=False)


def test_the_dtype_of_the_whole_is_that_of_the_text():
    values = dict(model_type="qwen3_5", text_config=tiny(), torch_dtype="bfloat16")
    with pytest.warns(UserWarning, match="only the text model is read"):
        assert ligermodels.Qwen3_5Config.from_hf(values).dtype == "bfloat16"


def test_offloaded_blocks_compute_the_same(tmp_path):
    """accelerate's hooks bring the weights of a module when it is called, also that of the convolution."""
    pytest.importorskip("accelerate")
    folder, ids = write_checkpoint(tiny(), tmp_path, norm=0.0), torch.randint(3, 90, (2, 9))
    model = ligermodels.load(folder, progress=False)
    places = {"model.layers.0": "disk"} | dict.fromkeys(
        ["model.embed_tokens", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head"], "cpu"
    )
    offloaded = ligermodels.load(folder, progress=False, device_map=places)
    assert relative(offloaded(ids).logits, model(ids).logits) < LOGITS
    options = dict(max_new_tokens=6, eos_token_id=[])
    assert torch.equal(offloaded.generate(ids, **options), model.generate(ids, **options))


@pytest.mark.parametrize("values, count", [
    ((1024, 3584, 24, 8, 2, 16, True), 752_393_024),
    ((2048, 6144, 24, 8, 2, 16, True), 1_881_825_088),
    ((2560, 9216, 32, 16, 4, 32, True), 4_205_751_296),
    ((4096, 12288, 32, 16, 4, 32, False), 8_953_803_264),
    ((5120, 17408, 64, 24, 4, 48, False), 26_895_998_464),
], ids=["0.8B", "2B", "4B", "9B", "27B"])  # fmt: skip
def test_exact_number_of_parameters(values, count):
    names = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
    names = [*names.split(), "linear_num_value_heads", "tie_word_embeddings"]
    config = ligermodels.Qwen3_5Config.from_hf({"vocab_size": 248320, **dict(zip(names, values, strict=True))})
    model = ligermodels.Qwen3_5.from_config(config, device="meta")
    assert sum(p.numel() for p in model.parameters()) == count
