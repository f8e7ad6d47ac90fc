"""GGUF files read: ours there and back to the bit, quantised ones as the gguf package has them, and what is refused."""

import json
import shutil
import struct
import unicodedata
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import ligermodels
from ligermodels import cli
from ligermodels.checkpoint.files import read_json
from ligermodels.checkpoint.gguf.reader import TYPES, GgufReader
from ligermodels.checkpoint.weights import same_bits
from ligermodels.conversion import Options, convert, inspect, verify
from ligermodels.errors import CheckpointError, ConfigError, HubError, TokenizerError
from ligermodels.text import Tokenizer
from tests.conversion.gguf_files import KINDS, small_model, tensors_of, to_gguf
from tests.conversion.test_gguf import MODELS, TEXTS, model_of  # noqa: F401  # a fixture

gguf = pytest.importorskip("gguf")
QUIET = {"progress": False}


def load(path, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return ligermodels.load(path, progress=False, **options)


@pytest.mark.parametrize("name, dtype", [*((name, "fp32") for name in MODELS), ("gemma2", "fp16"), ("mixtral", "bf16")])
def test_every_family_there_and_back(tmp_path, model_of, name, dtype):  # noqa: F811
    source = model_of(name, torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        convert(source, tmp_path / "cast", Options(dtype=dtype, **QUIET))
        to_gguf(tmp_path / "cast", tmp_path / "model.gguf")
        convert(tmp_path / "model.gguf", tmp_path / "back", Options(**QUIET))
    there, back = (load_file(tmp_path / folder / "model.safetensors") for folder in ("cast", "back"))
    assert there.keys() == back.keys()
    for tensor, values in there.items():
        if name.startswith("gemma") and tensor.endswith("norm.weight"):
            values = ((values.float() + 1) - 1).to(values.dtype)  # the sum in the file is rounded to fp32
        assert same_bits(back[tensor], values), tensor
    a, b = (ligermodels.load(tmp_path / folder, progress=False) for folder in ("cast", "model.gguf"))
    ids = torch.arange(90).reshape(1, 90) % 97
    with torch.no_grad():
        difference = (a(ids).logits - b(ids).logits).abs().max()
    assert difference <= (1e-5 if name.startswith("gemma") or name == "llama" else 0), difference
    # A Mistral without a window is a Llama; LongRoPE's factor follows from the two lengths.
    left_out = {"dtype", "initializer_range", "pad_token_id", "bos_token_id", "eos_token_id", "sliding_window"}
    left_out |= {"router_aux_loss_coef", "max_window_layers", "use_sliding_window", "layer_types", "head_dim"}
    one, other = (
        {key: value for key, value in model.config.values().items() if key not in left_out} for model in (a, b)
    )
    assert {key: other[key] for key in one} == one
    assert [a.config.window(i) for i in (0, 1)] == [b.config.window(i) for i in (0, 1)]


def quantised(source, target, type_name):
    """A copy of a GGUF file whose matrices are quantised, and its tensors as the gguf package dequantises them."""
    kind, expected = gguf.GGMLQuantizationType[type_name], {}

    def values_of(tensor):
        values = np.array(tensor.data).reshape(tensor.shape.tolist()[::-1])
        is_quantised = len(tensor.shape) > 1 and tensor.shape[0] % gguf.GGML_QUANT_SIZES[kind][0] == 0
        values = blocks(values, kind) if is_quantised else values
        expected[tensor.name] = torch.from_numpy(gguf.dequantize(values, kind) if is_quantised else values)
        return values, kind if is_quantised else None

    rewritten(source, target, values_of=values_of)
    return expected


def blocks(values, kind):
    """`values` quantised; of a type that the gguf package only reads, random blocks with small scales."""
    try:
        return gguf.quantize(values, kind)
    except NotImplementedError:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        shape = (*values.shape[:-1], values.shape[-1] // block * size)
        found = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
        scales = found.reshape(-1, size)
        for at in (0, 2, size - 2, size - 4):  # where the types have their fp16 scales
            scales[:, at : at + 2] = np.array([0.01], np.float16).view(np.uint8)
        return found


QUANTISED = [name for name in TYPES.values() if name not in ("F32", "F16", "BF16")]


def test_gemma_2_27b_is_known_by_its_number_of_layers(tmp_path):
    """Its queries alone are scaled by the width of the model, which no key of the file says."""
    sizes = {"num_hidden_layers": 46, "head_dim": 16, "query_pre_attn_scalar": 8}
    small_model(tmp_path / "hf", "gemma 2", "gemma2", tie_word_embeddings=True, **sizes)
    to_gguf(tmp_path / "hf", tmp_path / "model.gguf")
    assert load(tmp_path / "model.gguf").config.query_pre_attn_scalar == 8


def test_norms_that_a_half_does_not_hold_stay_fp32(tmp_path, model_of):  # noqa: F811
    source = model_of("qwen3", torch.float32)
    to_gguf(source, tmp_path / "model.gguf", dtype="fp16")
    convert(tmp_path / "model.gguf", tmp_path / "back", Options(**QUIET))
    there, back = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "back"))
    for name, values in there.items():
        assert same_bits(back[name], values if values.dim() == 1 else values.half()), name
    assert load(tmp_path / "model.gguf").dtype == torch.float16


@pytest.mark.parametrize("type_name, family", [*((name, "llama") for name in QUANTISED), ("Q8_0", "mixtral")])
def test_quantised_tensors_are_those_of_the_gguf_package(tmp_path, type_name, family):
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
    sizes |= {"head_dim": 32, "num_local_experts": 2} if family == "mixtral" else {}
    kind = "mixtral" if family == "mixtral" else "llama 3"
    to_gguf(small_model(tmp_path / "hf", kind, family, **sizes), tmp_path / "float.gguf", dtype="fp32")
    expected = quantised(tmp_path / "float.gguf", tmp_path / "model.gguf", type_name)
    found = inspect(tmp_path / "model.gguf")
    assert found.ok and set(found.dtypes) == {"F32", type_name} and found.layout == "GGUF"
    model = load(tmp_path / "model.gguf")
    assert model.dtype == torch.float32
    to_gguf(tmp_path / "model.gguf", tmp_path / "again.gguf")  # the writer puts rows back where they were
    again = tensors_of(tmp_path / "again.gguf")
    assert again.keys() == expected.keys()
    assert all(same_bits(again[name], expected[name]) for name in expected)
    half = load(tmp_path / "model.gguf", dtype="bfloat16")
    for (name, a), b in zip(model.named_parameters(), half.parameters(), strict=True):
        assert same_bits(a.bfloat16(), b), name


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokenizer_gives_the_same_ids(tmp_path, kind):
    source = small_model(tmp_path / "hf", kind)
    to_gguf(source, tmp_path / "model.gguf")
    ours, read = Tokenizer.from_hub(source), Tokenizer.from_hub(tmp_path / "model.gguf")
    # llama.cpp puts the dummy prefix before a text that begins with a space and after a special token, too.
    odd = ("▁already▁there", "</s>the") if kind == "mistral 0.3" else ()
    for text in (*TEXTS, "x<|eot|> y", "½ 7 77 777 7777"):
        # The source has no NFC, which Qwen's own tokenizers have.
        ids = ours.encode(unicodedata.normalize("NFC", text) if kind == "qwen 2" else text)
        if text not in odd:
            assert read.encode(text) == ids, text
            assert read.decode(ids) == ours.decode(ids)
    assert read.backend.special_ids == ours.backend.special_ids
    if kind in ("llama 3", "phi 4"):
        merges = [json.loads(one.backend.to_json())["model"]["ignore_merges"] for one in (read, ours)]
        assert merges == [kind == "llama 3"] * 2
    for name in ("bos_token_id", "eos_token_id", "chat_stop_ids", "chat_template"):
        assert getattr(read, name) == getattr(ours, name), name


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    source = small_model(folder / "hf", "llama 3")
    to_gguf(source, folder / "tiny.gguf")
    return folder / "tiny.gguf"


def test_it_opens_by_its_name_and_by_its_folder(model, tmp_path, monkeypatch):
    shutil.copy(model, tmp_path / "x.gguf")
    monkeypatch.chdir(tmp_path)
    for name in ("x.gguf", str(tmp_path), tmp_path / "x.gguf"):
        loaded = ligermodels.Llama.from_hub(name, progress=False)
        assert loaded.name_or_path == str(name)
        # The ends of a text and of a turn.
        assert loaded.generation_config == {"bos_token_id": 420, "eos_token_id": [421, 422], "pad_token_id": None}
        assert Tokenizer.from_hub(name).encode("the the")
    loaded.save_pretrained(tmp_path / "saved")
    assert ligermodels.load(tmp_path / "saved", progress=False).generation_config == loaded.generation_config
    assert Tokenizer.from_hub(tmp_path / "saved").encode("the the") == Tokenizer.from_hub("x.gguf").encode("the the")
    assert verify("x.gguf", tmp_path / "saved", **QUIET).ok
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(HubError, match=r"config\.json is a file\. Give the folder of a checkpoint, such as \."):
        ligermodels.load("config.json")  # no name of a repository, where such a file is
    with pytest.raises(HubError, match=r"z\.gguf is not there"):
        ligermodels.load("z.gguf")
    shutil.copy("x.gguf", "y.gguf")
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF files: x\.gguf, y\.gguf"):
        ligermodels.load(tmp_path)


def test_several_stop_ids(tmp_path):
    source = small_model(tmp_path / "hf", "llama 3")
    (source / "generation_config.json").write_text('{"eos_token_id": [421, 7, 422]}')
    to_gguf(source, tmp_path / "model.gguf")
    assert sorted(Tokenizer.from_hub(tmp_path / "model.gguf").eos_token_ids) == [7, 421, 422]
    (source / "generation_config.json").write_text('{"eos_token_id": [421, 7, 8, 422]}')
    with pytest.warns(UserWarning, match=r"three stop ids; \[7\] are dropped"):
        to_gguf(source, tmp_path / "model.gguf", overwrite=True)


def test_the_commands_take_it(model, capsys, tmp_path):
    assert cli.main(["inspect", str(model)]) == 0
    out = capsys.readouterr().out
    assert all(text in out for text in ("layout          GGUF", f"load('{model}')", "tokenizer.json, ")), out
    assert cli.main(["convert", str(model), str(tmp_path / "hf"), "--verify", "logits", "--dtype", "bf16"]) == 0
    assert read_json(tmp_path / "hf" / "config.json")["dtype"] == "bfloat16"
    assert cli.main(["generate", str(model), "--prompt", "the", "--max-new-tokens", "2", "--device", "cpu"]) == 0


def test_floats_are_mapped_from_the_file(model):
    reader = GgufReader(model)
    first, again = (reader.read("model.embed_tokens.weight") for _ in range(2))
    assert first.data_ptr() == again.data_ptr()


# Refused


def rewritten(model, target, change=lambda fields: None, values_of=lambda tensor: (np.array(tensor.data), None)):
    """A copy of the file with other metadata, or other (values, type) of its tensors."""
    reader = gguf.GGUFReader(model)
    fields = {key: (field.contents(), field.types) for key, field in reader.fields.items() if "GGUF." not in key}
    change(fields)
    writer = gguf.GGUFWriter(target, fields.pop("general.architecture")[0])
    for key, (value, types) in fields.items():
        inner = types[-1] if types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, value, types[0], sub_type=inner)
    for tensor in reader.tensors:
        values, kind = values_of(tensor)
        writer.add_tensor(tensor.name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def put(key, value):
    return lambda fields: fields.update({key: (value, fields[key][1] if key in fields else NEW[type(value)])})


NEW = {float: [gguf.GGUFValueType.FLOAT32], int: [gguf.GGUFValueType.UINT32], str: [gguf.GGUFValueType.STRING]}


def test_metadata_that_nothing_reads_is_named(tmp_path, model):
    rewritten(model, tmp_path / "odd.gguf", put("llama.attention.scale", 0.5))
    with pytest.warns(UserWarning, match="not used here: llama.attention.scale"):
        ligermodels.load(tmp_path / "odd.gguf", progress=False)


def other_type(data: bytes) -> bytes:
    name = b"token_embd.weight"
    at = data.index(name) + len(name) + 4 + 16
    return data[:at] + struct.pack("<I", 39) + data[at + 4 :]


def metadata(change):
    return lambda model, target: rewritten(model, target, change)


def data(change):
    return lambda model, target: target.write_bytes(change(model.read_bytes()))


def without(key):
    return metadata(lambda fields: fields.pop(key))


BAD = {
    "architecture": (metadata(put("general.architecture", "mamba")), ConfigError, "'mamba'.*supported: llama, gemma"),
    "a field": (without("llama.embedding_length"), ConfigError, "lacks llama.embedding_length"),
    "split": (metadata(put("split.count", 3)), CheckpointError, "one of 3 parts.*\n.*llama-gguf-split"),
    "rope": (metadata(put("llama.rope.scaling.type", "longrope")), ConfigError, "longrope as it is set there"),
    "part of a head": (metadata(put("llama.rope.dimension_count", 4)), ConfigError, "rotates 4 of a head's 8"),
    "values of another size": (metadata(put("llama.attention.value_length", 4)), ConfigError, "other sizes"),
    "pre": (metadata(put("tokenizer.ggml.pre", "chatglm-bpe")), TokenizerError, "'chatglm-bpe'.*supported: "),
    "tokenizer": (metadata(put("tokenizer.ggml.model", "bert")), TokenizerError, "'bert' is not supported"),
    "no merges": (without("tokenizer.ggml.merges"), TokenizerError, "its tokenizer is damaged"),
    "cut short": (data(lambda blob: blob[:-40]), CheckpointError, "is cut short"),
    "header cut": (data(lambda blob: blob[:1000]), CheckpointError, "header is damaged or cut short"),
    "no GGUF": (data(lambda blob: b"<html>" + blob), CheckpointError, "is not a GGUF file"),
    "version": (data(lambda blob: blob[:4] + b"\1" + blob[5:]), CheckpointError, "2 and 3 are read"),
    "a quantisation": (data(other_type), CheckpointError, "quantised as type 39, which is not read; supported: F32"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_files_that_are_damaged_or_not_supported(tmp_path, model, case):
    spoil, error, message = BAD[case]
    spoil(model, tmp_path / "bad.gguf")
    with pytest.raises(error, match=message):
        ligermodels.load(tmp_path / "bad.gguf")


def test_rope_tables_of_another_rule(tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    source = small_model(tmp_path / "hf", "llama 3", rope_scaling=scaling, rope_theta=500000.0)
    to_gguf(source, tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match="not Llama 3's rule"):
        ligermodels.load(tmp_path / "model.gguf")


def test_what_an_older_file_leaves_out(tmp_path, model):
    """Without the keys, BOS is added for Llama 3 and texts are split as llama.cpp's "default" does."""
    rewritten(model, tmp_path / "old.gguf", lambda fields: fields.pop("tokenizer.ggml.add_bos_token"))
    assert Tokenizer.from_hub(tmp_path / "old.gguf").encode("the") == Tokenizer.from_hub(model).encode("the")
    rewritten(model, tmp_path / "older.gguf", lambda fields: fields.pop("tokenizer.ggml.pre"))
    split = Tokenizer.from_hub(tmp_path / "older.gguf").backend._native.pre_tokenizer
    pieces = [piece for piece, _ in split.pre_tokenize_str("it's 12345, a+b\u00b2")]
    assert pieces == ["it", "'", "s", "\u0120", "123", "45", ",", "\u0120a", "+", "b", "\u00c2\u00b2"]
