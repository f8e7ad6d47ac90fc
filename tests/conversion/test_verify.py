"""Two checkpoints compared: what is the same passes, and each way of not being the same is named."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import ligermodels
from ligermodels import checkpoint
from ligermodels.conversion import MismatchError, Options, convert, verify
from ligermodels.errors import InputError

CONFIG = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "torch_dtype": "float32",
}  # fmt: skip


@pytest.fixture(scope="module", params=[0.02, 0.1], ids=["small weights", "large weights"])
def folder(tmp_path_factory, request):
    """A model as it is drawn before training, where order within heads shows least, and one with larger weights."""
    model = ligermodels.Llama.from_config({**CONFIG, "initializer_range": request.param}, device="cpu", seed=3)
    return model.save_pretrained(tmp_path_factory.mktemp("verify") / "a")


def changed(folder, target, change=lambda tensors: None, **fields):
    """A copy of the checkpoint with other tensors or fields of the config."""
    config = checkpoint.read_json(folder / "config.json")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    target.mkdir()
    (target / "config.json").write_text(json.dumps({**config, **fields}))
    save_file(tensors, target / "model.safetensors")
    return target


def permuted(tensors):
    """Rows of q and k as Meta orders them: the two of a rotated pair beside each other."""
    for name, x in tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = x.shape[0] // 16
            tensors[name] = x.unflatten(0, (heads, 2, 8)).transpose(1, 2).reshape(x.shape).contiguous()


@pytest.mark.parametrize("to", ["hf", "native"])
def test_either_layout_is_the_same_model(tmp_path, folder, to):
    convert(folder, tmp_path / "b", Options(to=to, max_shard_size="20KB", progress=False, verify="logits"))
    report = verify(folder, tmp_path / "b", progress=False)
    assert report.ok and report.tensors == 21 and report.details["mean_kl"] < 1e-13
    assert report.to_json() | {"ok": True, "verified": "logits", "positions": 192} == report.to_json()


def test_permuted_rows_of_q_and_k_are_caught_by_the_logits_alone(tmp_path, folder):
    """The negative control: same names, shapes and dtypes, and a divergence far above the threshold."""
    other = changed(folder, tmp_path / "b", permuted)
    assert verify(folder, other, level="keys", progress=False).ok
    report = verify(folder, other, progress=False)
    assert any(line.startswith("logits: mean KL") for line in report.mismatches)
    assert report.details["mean_kl"] > 1e-7
    assert sum("values differ" in line for line in report.mismatches) == 4


def test_another_config_is_another_model(tmp_path, folder):
    rope = {"rope_type": "default", "rope_theta": 500.0}
    other = changed(folder, tmp_path / "b", rope_theta=500.0, rope_parameters=rope)
    assert verify(folder, other, level="bytes", progress=False).ok
    (line,) = [line for line in verify(folder, other, progress=False).mismatches if "KL" in line]
    assert "192 positions" in line


def test_what_rounding_leaves_passes(tmp_path, folder):
    """A factor moved from one matrix to the next computes the same function, in other roundings."""

    def rescaled(tensors):
        tensors["model.layers.0.mlp.up_proj.weight"] *= 3.0
        tensors["model.layers.0.mlp.down_proj.weight"] /= 3.0

    report = verify(folder, changed(folder, tmp_path / "b", rescaled), progress=False)
    assert 0 < report.details["mean_kl"] < 1e-11 and not any("KL" in line for line in report.mismatches)
    assert len(report.mismatches) == 2


@pytest.mark.parametrize(
    "change, fields, level, words",
    [
        (
            lambda t: t.update({"model.norm.weight": t["model.norm.weight"].half()}),
            {}, "keys", "float32 and torch.float16",
        ),
        (lambda t: t["model.norm.weight"].neg_(), {}, "bytes", "model.norm.weight: values differ"),
        (lambda t: t["model.norm.weight"].fill_(float("nan")), {}, "logits", "NaN or infinity"),
        (
            lambda t: t.update({n: t[n][:290].clone() for n in ("lm_head.weight", "model.embed_tokens.weight")}),
            {"vocab_size": 290}, "logits", "vocabularies of 300 and 290",
        ),
        (lambda t: t.pop("lm_head.weight"), {"tie_word_embeddings": True}, "keys", "lm_head.weight: only in"),
        (lambda t: None, {"model_type": "mistral"}, "logits", "architecture: Llama and Mistral"),
    ],
    ids=["dtype", "bits", "nan", "shape", "names", "architecture"],
)  # fmt: skip
def test_each_difference_is_named(tmp_path, folder, change, fields, level, words):
    report = verify(folder, changed(folder, tmp_path / "b", change, **fields), level=level, progress=False)
    assert not report.ok and any(words in line for line in report.mismatches), report.mismatches


def test_weights_that_do_not_fit_their_config(tmp_path, folder):
    with pytest.raises(MismatchError, match="3 expected"):
        verify(folder, changed(folder, tmp_path / "b", num_hidden_layers=3))
    with pytest.raises(InputError, match="verify='some'"):
        verify(folder, folder, level="some")


def test_a_cast_is_compared_with_the_cast(tmp_path, folder):
    convert(folder, tmp_path / "b", Options(dtype="bf16", verify="logits", progress=False))
    assert not verify(folder, tmp_path / "b", level="keys", progress=False).ok
    assert all(x.dtype == torch.bfloat16 for x in load_file(tmp_path / "b" / "model.safetensors").values())
