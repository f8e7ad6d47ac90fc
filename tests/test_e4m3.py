"""Weights and keys in fp8 on GPUs for which Triton does not compile e4m3: refused where they are asked for."""

import pytest
import torch

import ligermodels
from ligermodels.arch import placement
from ligermodels.errors import InputError
from ligermodels.generation import generate_many
from ligermodels.kernels.linear import fp8, fp8_matmul
from ligermodels.kernels.linear.linear import linears
from ligermodels.kernels.linear.operand import LinearOperand
from ligermodels.kernels.linear.quantized import quantize
from ligermodels.layers.quantized import QuantizedLinear
from tests.cli.commands import run, write_checkpoint
from tests.generation.models import llama

GPU = torch.device("cuda", 0)
CAPABILITY = "cuda:0 has compute capability 8.6, and Triton compiles e4m3 for 8.9 and later"
WEIGHTS = r'Next: quantization_config="int8" is as small, "int4" and "nf4" are smaller'


@pytest.fixture
def ampere(monkeypatch):
    for module in (fp8, fp8_matmul):
        monkeypatch.setattr(module, "cuda_capability", lambda index: 86)


@pytest.fixture
def ampere_for_cpu(ampere, monkeypatch):
    """The CPU is taken for such a GPU."""
    monkeypatch.setattr(fp8, "has_e4m3", lambda device: False)


def test_the_gpus(monkeypatch):
    """0 is AMD's, of which Triton knows more than a number says."""
    found = {}
    for capability in (0, 75, 80, 86, 89, 90, 120):
        monkeypatch.setattr(fp8, "cuda_capability", lambda index, number=capability: number)
        found[capability] = fp8.has_e4m3(GPU)
    assert found == {0: True, 75: False, 80: False, 86: False, 89: True, 90: True, 120: True}
    assert fp8.has_e4m3(torch.device("cpu")) and fp8.has_e4m3(torch.device("meta"))


@pytest.mark.parametrize("place", [{"device": "cuda:0"}, {"device_map": {"": "cuda:0"}}], ids=str)
def test_load(ampere, tmp_path, monkeypatch, place):
    """Before a weight is read."""
    llama().save_pretrained(tmp_path)
    monkeypatch.setattr(placement, "usable", lambda device, name=None: torch.device(device))  # also without a GPU
    monkeypatch.setattr(ligermodels.checkpoint.weights, "load", lambda *args, **options: pytest.fail("reads weights"))
    with pytest.raises(InputError, match=rf'quantization_config="fp8": {CAPABILITY}.*\n  {WEIGHTS}'):
        ligermodels.load(tmp_path, quantization_config="fp8", progress=False, **place)


def test_a_model_that_is_moved_there(ampere_for_cpu):
    weight = torch.randn(16, 32, dtype=torch.bfloat16)
    for kind in ("int8", "int4", "nf4"):
        QuantizedLinear.from_weight(weight, kind=kind)(torch.ones(2, 32))
    with pytest.raises(InputError, match=rf"weight in fp8: cpu has compute capability 8\.6.*\n  {WEIGHTS}"):
        linears(torch.ones(2, 32, dtype=torch.bfloat16), [LinearOperand(quantize(weight, "fp8"))])


def test_the_cache(ampere_for_cpu):
    model, ids = llama().eval(), torch.ones(1, 4, dtype=torch.int64)
    message = r"kv_cache_dtype='fp8': cpu has compute capability 8\.6.*\n  Next: leave it out"
    for call in (
        lambda: model.new_cache(1, 8, kv_cache_dtype="fp8"),
        lambda: model.generate(ids, max_new_tokens=2, kv_cache_dtype="fp8"),
        lambda: generate_many(model, [[1, 2]], max_new_tokens=2, kv_cache_dtype="fp8"),
    ):
        with pytest.raises(InputError, match=message):
            call()
    assert model.generate(ids, max_new_tokens=2).shape == (1, 6)


def test_the_command(ampere_for_cpu, tmp_path, monkeypatch, capsys):
    """Before the model is loaded."""
    folder = write_checkpoint(tmp_path / "model")
    monkeypatch.setattr(ligermodels, "load", lambda *args, **options: pytest.fail("loads the model"))
    status, _, error = run(capsys, "generate", folder, "--prompt", "hi", "--device", "cpu", "--kv-cache-dtype", "fp8")
    assert status == 3 and "kv_cache_dtype='fp8': cpu has compute capability 8.6" in error


def test_training(ampere):
    """The same check, then that of products in FP8, which AMD's GPUs do not pass either."""
    with pytest.raises(InputError, match=f"^fp8: {CAPABILITY}.*\n  Next: leave it out; .*nf4"):
        fp8_matmul.check_device(GPU)
