"""Our 4-bit modules beside those of bitsandbytes: the same folders, the same bytes, the same outputs."""

import pytest
import torch
import transformers
from safetensors.torch import load_file

from ligermodels.checkpoint.quantizers import NF4
from ligermodels.checkpoint.weights import same_bits
from ligermodels.layers import QuantizedLinear
from tests.tools import models
from tests.tools.models import FAMILIES, make_ids, quantization_settings, theirs

bnb = pytest.importorskip("bitsandbytes")
# bitsandbytes keeps its weights as they are and computes in fp32; what is left is fp32's rounding in norms and softmax.
FP32 = dict(rtol=1e-5, atol=1e-5)


def ours(folder, config="nf4"):
    return models.ours(folder, quantization_config=config)


def theirs_of(folder, **settings):
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", **settings)
    return theirs(folder, quantization_config=config, device_map="cpu")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("double", [True, False])
def test_folders_are_those_of_transformers_and_bitsandbytes(quantizable, family, double, tmp_path):
    model = ours(quantizable[family], NF4(double=double, compute_dtype=torch.float32))
    hf, ids = theirs_of(quantizable[family], bnb_4bit_use_double_quant=double), make_ids(2, 12)
    model.save_pretrained(tmp_path / "ours")
    hf.save_pretrained(tmp_path / "theirs")
    found, wanted = (load_file(tmp_path / folder / "model.safetensors") for folder in ("ours", "theirs"))
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        if "nested_absmax" in name or (double and name.endswith(".absmax")):
            # On the CPU, bitsandbytes quantises absmax by a table of 2^16 entries: now and then to a neighbour.
            assert tensor.dtype == wanted[name].dtype and (tensor.float() - wanted[name].float()).abs().max() <= 1
        else:
            assert same_bits(tensor, wanted[name]), name
    assert quantization_settings(tmp_path / "ours") == quantization_settings(tmp_path / "theirs")

    # What either saved, each loads: transformers and bitsandbytes, our models over bitsandbytes' modules, our modules.
    for folder in ("ours", "theirs"):
        loaded = ours(tmp_path / folder)
        kinds = {type(module) for module in loaded.modules() if hasattr(module, "in_features")} - {torch.nn.Linear}
        assert QuantizedLinear in kinds and bnb.nn.Linear4bit not in kinds
        logits = loaded(ids).logits
        torch.testing.assert_close(theirs(tmp_path / folder, device_map="cpu")(ids).logits, logits, **FP32)
        torch.testing.assert_close(ours(tmp_path / folder, None)(ids).logits, logits, **FP32)
    assert torch.equal(ours(tmp_path / "ours")(ids).logits, model(ids).logits)
    again = load_file(ours(tmp_path / "theirs").save_pretrained(tmp_path / "again") / "model.safetensors")
    wanted = load_file(tmp_path / "theirs" / "model.safetensors")
    assert again.keys() == wanted.keys() and all(same_bits(again[name], wanted[name]) for name in again)


def test_bf16_storage_of_bitsandbytes_is_read(quantizable, tmp_path):
    hf, ids = theirs_of(quantizable["qwen2"], bnb_4bit_quant_storage=torch.bfloat16), make_ids(2, 12)
    logits = hf(ids).logits
    hf.save_pretrained(tmp_path)
    torch.testing.assert_close(ours(tmp_path)(ids).logits, logits, **FP32)
