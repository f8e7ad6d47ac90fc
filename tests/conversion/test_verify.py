"""Two checkpoints compared: what is the same passes, and each way of not being the same is named."""

import itertools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from ligermodels.checkpoint.files import read_json
from ligermodels.conversion import MismatchError, verify
from ligermodels.errors import InputError
from tests.checkpoint.fixtures import make_model
from tests.conversion.layouts import OF_LLAMA, write_all


def save(folder, scale=0.1):
    sizes = dict(vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    return make_model(3, **sizes, num_key_value_heads=2, rms_norm_eps=1e-6, initializer_range=scale).save_pretrained(
        folder
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("verify") / "a")


def changed(folder, target, change=lambda tensors: None, **fields):
    """A copy of the checkpoint with other tensors or fields of the config."""
    config = read_json(folder / "config.json")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    target.mkdir()
    (target / "config.json").write_text(json.dumps({**config, **fields}))
    save_file(tensors, target / "model.safetensors")
    return target


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    return write_all(tmp_path_factory.mktemp("layouts"))


@pytest.mark.parametrize("a, b", list(itertools.pairwise(OF_LLAMA)))
def test_any_layout_with_any_other(layouts, a, b):
    report = verify(layouts[a], layouts[b], allow_pickle=True, progress=False)
    assert report.ok and report.tensors == 21
    assert report.to_json() | {"ok": True, "verified": "bytes"} == report.to_json()


def test_a_config_that_neither_takes(layouts):
    with pytest.raises(InputError, match="is for"):
        verify(layouts["hf"], layouts["sharded"], config=layouts["hf"])


def test_fields_of_the_config_are_compared(tmp_path, folder):
    rope = {"rope_type": "default", "rope_theta": 500.0}
    other = changed(folder, tmp_path / "b", rope_theta=500.0, rope_parameters=rope, eos_token_id=[2, 3])
    (other / "generation_config.json").write_text('{"temperature": 0.5}')
    rope, *others = verify(folder, other, level="keys", progress=False).mismatches
    assert rope.startswith("config: rope_parameters is ") and "10000.0" in rope and "500.0" in rope
    assert others == ["config: eos_token_id is None and [2, 3]", "generation_config.json: temperature is None and 0.5"]
    for name, fields in (("a window", {}), ("none", {"sliding_window": None, "initializer_range": 0.5})):
        changed(folder, tmp_path / name, model_type="mistral", **fields)
    assert verify(tmp_path / "a window", tmp_path / "none", progress=False).mismatches == [
        "config: sliding_window is 4096 and None"
    ]


@pytest.mark.parametrize(
    "change, fields, level, message",
    [
        (
            lambda t: t.update({"model.norm.weight": t["model.norm.weight"].half()}),
            {}, "keys", "float32 and float16",
        ),
        (
            lambda t: t.update({"model.norm.weight": t["model.norm.weight"].mul(1.01).half()}),
            {}, "bytes", "model.norm.weight: values differ by more than a cast (float32 and float16)",
        ),
        (lambda t: t["model.norm.weight"].neg_(), {}, "bytes", "model.norm.weight: values differ"),
        (
            lambda t: t.update({n: t[n][:290].clone() for n in ("lm_head.weight", "model.embed_tokens.weight")}),
            {"vocab_size": 290}, "keys", "shape [300, 64] and [290, 64]",
        ),
        (lambda t: t.pop("lm_head.weight"), {"tie_word_embeddings": True}, "keys", "lm_head.weight: only in"),
        (lambda t: None, {"model_type": "mistral"}, "keys", "architecture: Llama and Mistral"),
    ],
    ids=["dtype", "cast", "bits", "shape", "names", "architecture"],
)  # fmt: skip
def test_each_difference_is_named(tmp_path, folder, change, fields, level, message):
    report = verify(folder, changed(folder, tmp_path / "b", change, **fields), level=level, progress=False)
    assert not report.ok and any(message in line for line in report.mismatches), report.mismatches


@pytest.mark.parametrize("dtype, first", [(torch.float16, True), (torch.bfloat16, False), (torch.float64, True)])
def test_a_cast_is_no_mismatch_unless_it_overflows(tmp_path, folder, dtype, first):
    def cast(tensors):
        tensors.update({name: x.to(dtype) for name, x in tensors.items() if "proj" in name})

    def enlarge(tensors):
        tensors["model.layers.0.mlp.up_proj.weight"].mul_(1e7)

    pair = [folder, changed(folder, tmp_path / "b", cast)][:: 1 if first else -1]
    report = verify(*pair, progress=False)
    names = [str(x).removeprefix("torch.") for x in (torch.float32, dtype)][:: 1 if first else -1]
    assert report.ok and report.casts == {tuple(names): 14}, report.mismatches
    large = changed(folder, tmp_path / "large", enlarge)
    report = verify(large, changed(large, tmp_path / "small", cast), level="bytes", progress=False)
    assert report.ok == (dtype != torch.float16)
    assert all("up_proj.weight: values differ by more than a cast" in line for line in report.mismatches)


def test_weights_that_do_not_fit_their_config(tmp_path, folder):
    with pytest.raises(MismatchError, match="3 expected"):
        verify(folder, changed(folder, tmp_path / "b", num_hidden_layers=3))
    with pytest.raises(InputError, match="verify='some'"):
        verify(folder, folder, level="some")
