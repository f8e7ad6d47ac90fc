"""Quantised GGUF files: the types that llama-quantize chooses, the values of the gguf package's quantiser, refusals."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import ligermodels
from ligermodels import cli
from ligermodels.checkpoint.gguf.reader import GgufFile
from ligermodels.conversion import Options, convert
from ligermodels.errors import CheckpointError, InputError
from tests.conversion.gguf_files import fields_of, gguf, small_model, tensors_of, to_gguf

WIDE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
MOE = WIDE | {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
MODELS = {
    "llama": ("llama 3", "llama", WIDE),
    "tied": ("llama 3", "llama", WIDE | {"tie_word_embeddings": True, "attention_bias": True}),
    "odd rows": ("llama 3", "llama", WIDE | {"intermediate_size": 80}),
    "mixtral": ("mixtral", "mixtral", WIDE | {"num_local_experts": 8}),
    "qwen3_moe": ("qwen 2", "qwen3_moe", MOE),
}
FILE_TYPES = {"q8_0": 7, "q5_1": 9, "q5_0": 8, "q4_1": 3, "q4_0": 2}


def type_of(name: str, tensor: torch.Tensor, model: str, kind: str) -> str:
    """As llama-quantize has it, but Q8_0 for Q6_K."""
    if tensor.dim() == 1 or "ffn_gate_inp" in name:
        return "F32"
    if tensor.shape[-1] % 32:
        return "F16"
    head = "token_embd.weight" if model == "tied" else "output.weight"
    if name == head or (model == "mixtral" and name.endswith(("attn_v.weight", "attn_k.weight"))):
        return "Q8_0"
    return kind


@pytest.mark.parametrize(
    "model, kind", [*((name, "q4_0") for name in MODELS), *(("llama", kind) for kind in FILE_TYPES)]
)
def test_types_and_values(tmp_path, model, kind):
    tokens, family, fields = MODELS[model]
    source = small_model(tmp_path / "hf", tokens, family, **fields)
    to_gguf(source, tmp_path / "float.gguf", dtype="fp32")
    report = to_gguf(source, tmp_path / "out.gguf", dtype=kind, verify="bytes")
    assert report.ok and report.details["verified"] == "bytes"
    assert fields_of(tmp_path / "out.gguf")["general.file_type"] == FILE_TYPES[kind]
    floats, file = tensors_of(tmp_path / "float.gguf"), GgufFile(tmp_path / "out.gguf")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    assert floats.keys() == stored.keys()
    for name, values in floats.items():
        of = type_of(name, values, model, kind.upper())
        assert (stored[name].tensor_type.name, file.tensors[name].type) == (of, of), name
        expected = values.numpy()
        if of not in ("F32", "F16"):
            blocks = gguf.quantize(expected, gguf.GGMLQuantizationType[of])
            assert np.array_equal(np.array(stored[name].data).ravel(), blocks.ravel()), name
            expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType[of])
        read = file.read(file.tensors[name]).float().numpy()
        assert np.array_equal(read, expected.astype(np.float16) if of == "F16" else expected), name
    odd = [name for name in floats if type_of(name, floats[name], model, kind) == "F16"]
    assert ("F16" in report.details) is bool(odd) and all(name in report.details["F16"] for name in odd)
    logits = ligermodels.load(tmp_path / "out.gguf", progress=False)(torch.tensor([[5, 6, 7]])).logits
    assert logits.isfinite().all()


def test_an_error_of_q8_0_is_half_a_step(tmp_path):
    source = small_model(tmp_path / "hf", "llama 3", **WIDE)
    to_gguf(source, tmp_path / "out.gguf", dtype="Q8_0")
    file, values = (
        GgufFile(tmp_path / "out.gguf"),
        load_file(source / "model.safetensors")["model.layers.0.mlp.up_proj.weight"],
    )
    found = file.read(file.tensors["blk.0.ffn_up.weight"])
    step = values.float().unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True) / 127
    error = (values.float() - found).unflatten(1, (-1, 32)).abs()
    assert (error <= step * (0.5 + 127 * 2**-11)).all() and error.max() > 0  # the step is rounded to fp16


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e5])
@pytest.mark.parametrize("dtype", ["q4_0", "fp16"])
def test_values_that_fp16_cannot_hold(tmp_path, value, dtype):
    source = small_model(tmp_path / "hf", "llama 3", **WIDE)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 40] = value
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"(?s)blk.0.ffn_up.weight holds values .*--dtype bf16"):
        to_gguf(source, tmp_path / "out.gguf", dtype=dtype)
    assert not (tmp_path / "out.gguf").exists()


def test_what_is_refused_and_the_commands_of_llama_quantize(tmp_path, capsys):
    source = small_model(tmp_path / "hf", "llama 3", **WIDE)
    with pytest.raises(InputError, match="for GGUF files"):
        convert(source, tmp_path / "folder", Options(dtype="q8_0"))
    argv = ["convert", str(source), str(tmp_path / "my-Q4_K_M.gguf"), "--dtype", "Q4_K_M", "--name", "My model"]
    assert cli.main(argv) == 2
    lines = [line.split() for line in capsys.readouterr().err.splitlines()]
    half = str(tmp_path / "my-f16.gguf")
    first = ["ligermodels", "convert", str(source), half, "--dtype", "f16", "--name", "'My", "model'"]
    assert lines[-2:] == [["Next:", *first], ["llama-quantize", half, argv[2], "Q4_K_M"]]
    for kind in ("q2_k", "q3_k_l", "q5_k_s", "q6_k", "iq4_xs", "iq4_nl"):
        with pytest.raises(InputError, match=rf"llama-quantize (\S+)out-f16.gguf (\S+)out.gguf {kind.upper()}$"):
            convert(source, tmp_path / "out.gguf", Options(dtype=kind))
    with pytest.raises(InputError, match=r"llama-quantize (\S+)out-f16\.gguf (\S+)out-q6_k\.GGUF Q6_K$"):
        convert(source, tmp_path / "out-q6_k.GGUF", Options(dtype="q6_k"))
    for kind in ("q8_1", "q4_k_xl", "int4"):
        with pytest.raises(InputError, match=r"is not supported; supported: keep, auto, q8_0, .*float32"):
            convert(source, tmp_path / "out.gguf", Options(dtype=kind))
    report = convert(source, None, Options(dtype="q8_0", dry_run=True))
    assert report.details["to"] == "gguf" and "Q8_0" in report.details["dtypes"]
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
