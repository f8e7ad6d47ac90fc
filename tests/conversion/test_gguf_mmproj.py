"""The vision tower of a GGUF file: written as formulas of this file say, read back to the bit, and what is refused."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import ligermodels
from ligermodels import cli
from ligermodels.checkpoint.files import read_json
from ligermodels.checkpoint.weights import same_bits
from ligermodels.conversion import Options, convert, inspect
from ligermodels.errors import CheckpointError, ConfigError, InputError
from tests.conversion.gguf_files import fields_of, gguf, rewritten, small_model, tensors_of, to_gguf, with_images
from tests.vision import folders

FAMILIES = ("qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
QUIET = {"progress": False}
TEXT = "the <|vision_start|><|image_pad|><|vision_end|> it is"
pytestmark = pytest.mark.filterwarnings("ignore:.*1 . weight")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """family -> (the folder of the model, that of its two GGUF files in fp32)."""
    built = {}

    def build(family):
        if family not in built:
            folder = tmp_path_factory.mktemp(family)
            source = with_images(folder / "tiny", family)
            (folder / "gguf").mkdir()
            to_gguf(source, folder / "gguf/tiny.gguf", dtype="fp32", mmproj=True, verify="bytes")
            built[family] = source, folder / "gguf"
        return built[family]

    return build


def expected(source, family):
    """{llama.cpp's name: tensor} of the tower."""
    names = {
        "pos_embed": "v.position_embd", "patch_embed.proj": "v.patch_embd", "merger.norm": "v.post_ln",
        "merger.ln_q": "v.post_ln", "merger.linear_fc1": "mm.0", "merger.linear_fc2": "mm.2", "merger.mlp.0": "mm.0",
        "merger.mlp.2": "mm.2", "deepstack_merger_list.0": "v.deepstack.0", "deepstack_merger_list.1": "v.deepstack.2",
    }  # fmt: skip
    parts = {
        "norm1": "ln1", "norm2": "ln2", "attn.proj": "attn_out", "attn.qkv": "attn_qkv", "mlp.fc1": "ffn_up",
        "mlp.fc2": "ffn_down", "mlp.linear_fc1": "ffn_up", "mlp.linear_fc2": "ffn_down",
    }  # fmt: skip
    found = {}
    for name, x in load_file(source / "model.safetensors").items():
        module, _, kind = name.rpartition("visual.")[2].rpartition(".")
        if "visual." not in name:
            continue
        if name.endswith("patch_embed.proj.weight"):
            found |= {"v.patch_embd.weight": x[:, :, 0], "v.patch_embd.weight.1": x[:, :, 1]}
        elif family == "qwen2_vl" and module.endswith("attn.qkv"):
            block = f"v.blk.{module.split('.')[1]}"
            found |= {f"{block}.attn_{part}.{kind}": x[16 * i : 16 * i + 16] for i, part in enumerate("qkv")}
        elif module.startswith("blocks."):
            _, block, part = module.split(".", 2)
            found[f"v.blk.{block}.{parts[part]}.{kind}"] = x
        elif module.startswith("deepstack"):
            merger, _, part = module.rpartition(".")
            found[f"{names[merger]}.{part.removeprefix('linear_')}.{kind}"] = x
        else:
            found[f"{names[module]}.{kind}"] = x
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_the_file_of_the_tower(pairs, family):
    source, files = pairs(family)
    fields, tensors = fields_of(files / "mmproj-tiny.gguf"), tensors_of(files / "mmproj-tiny.gguf")
    wanted = expected(source, family)
    assert tensors.keys() == wanted.keys() and all(same_bits(tensors[name], x) for name, x in wanted.items())
    of_qwen2 = family == "qwen2_vl"
    side, depth = (14, 2) if of_qwen2 else (16, 3)
    known = {
        "general.architecture": "clip", "general.type": "mmproj", "general.name": "tiny", "general.file_type": 0,
        "clip.has_vision_encoder": True, "clip.projector_type": f"qwen{2 if of_qwen2 else 3}vl_merger",
    }  # fmt: skip
    vision = {
        "projection_dim": 32, "image_size": 560 if of_qwen2 else 64, "patch_size": side, "embedding_length": 16,
        "feed_forward_length": 32 if of_qwen2 else 24, "block_count": depth, "attention.head_count": 2,
        "attention.layer_norm_epsilon": pytest.approx(1e-6), "spatial_merge_size": 2, "image_mean": [0.5, 0.25, 0.75],
        "image_std": [0.25, 0.5, 0.375], "image_min_pixels": 4 * side**2, "image_max_pixels": 4096 * 4 * side**2,
    }  # fmt: skip
    if not of_qwen2:
        known["clip.use_gelu"] = True
        vision["is_deepstack_layers"] = [family.startswith("qwen3_vl") and i != 1 for i in range(3)]
    assert fields == known | {f"clip.vision.{name}": value for name, value in vision.items()}
    names = {key for group in (gguf.Keys.General, gguf.Keys.Clip, gguf.Keys.ClipVision) for key in vars(group).values()}
    names |= set(vars(gguf.Keys.ClipVision.Attention).values())
    assert fields.keys() <= names


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_with_both_files_is_a_model_that_reads_images(pairs, family):
    source, files = pairs(family)
    model, back = (ligermodels.load(folder, **QUIET).eval() for folder in (source, files))
    assert type(back) is type(model)
    for (name, a), (other, b) in zip(model.named_parameters(), back.named_parameters(), strict=True):
        # what GGUF stores as 1 + w or -exp(w)
        exact = "visual." in name or not family.startswith("qwen3_5") or not name.endswith(("norm.weight", "A_log"))
        assert name == other and (same_bits(a, b) if exact else torch.allclose(a, b, rtol=0, atol=1e-6)), name
    ours, theirs = (config_of(folder) for folder in (model, back))
    assert ours == theirs
    images = [folders.draw(64, 96), folders.draw(32, 32)]
    text = TEXT + TEXT
    inputs, again = (ligermodels.Processor.from_hub(folder)(text, images) for folder in (source, files))
    assert inputs.keys() == again.keys() and all(torch.equal(inputs[name], again[name]) for name in inputs)
    with torch.no_grad():
        torch.testing.assert_close(back(**again).logits, model(**inputs).logits, rtol=0, atol=2e-5)
    assert inspect(files).ok
    alone = ligermodels.load(files / "tiny.gguf", **QUIET)
    assert "VL" not in type(alone).__name__


def config_of(model):
    """Without the ids of ends, which only the tokenizer has in one of the two, and what follows from other fields."""
    config = model.config.to_hf()
    text = config.get("text_config", config)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "full_attention_interval"):
        text.pop(name, None)
    return config


def test_its_types(tmp_path, pairs):
    """Norms, biases, patches and positions are F32; matrices are F16 unless floats are asked for."""
    source, _ = pairs("qwen3_vl")
    for dtype, text, tower in (("auto", "F32", "F16"), ("bf16", "BF16", "BF16"), ("q8_0", "Q8_0", "F16")):
        to_gguf(source, tmp_path / "out.gguf", dtype=dtype, mmproj=True, verify="bytes", overwrite=True)
        types = {x.name: x.tensor_type.name for x in gguf.GGUFReader(tmp_path / "mmproj-out.gguf").tensors}
        exact = {name for name in types if name.endswith("bias") or "ln" in name or "norm" in name or "embd" in name}
        assert types == {name: "F32" if name in exact else tower for name in types} and len(exact) < len(types)
        written = {x.name: x.tensor_type.name for x in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
        assert written["blk.0.ffn_up.weight"] == text
    assert fields_of(tmp_path / "mmproj-out.gguf")["general.file_type"] == gguf.LlamaFileType.MOSTLY_F16
    back = ligermodels.load(tmp_path, **QUIET)
    assert back.dtype == torch.float32
    half = load_file(source / "model.safetensors")["model.visual.blocks.1.attn.qkv.weight"].half()
    assert same_bits(back.model.visual.blocks[1].attn.qkv.weight.detach(), half.float())


def test_the_command(tmp_path, pairs, capsys):
    source, _ = pairs("qwen2_vl")
    target = tmp_path / "out.gguf"
    assert cli.main(["convert", str(source), str(target)]) == 0
    assert "only the text is written. --mmproj" in capsys.readouterr().err
    assert cli.main(["convert", str(source), str(target), "--mmproj", "--dry-run", "--overwrite", "--json"]) == 0
    details = json.loads(capsys.readouterr().out)
    assert details["mmproj"].startswith("40 tensors, ") and "images" not in details
    assert not (tower := tmp_path / "mmproj-out.gguf").exists()
    assert cli.main(["convert", str(source), str(target), "--mmproj", "--overwrite", "--verify", "bytes"]) == 0
    assert f"images: llama-server -m {target} --mmproj {tower}\n" in capsys.readouterr().out and tower.is_file()
    target.unlink()
    assert cli.main(["convert", str(source), str(target), "--mmproj"]) == 2
    assert "mmproj-out.gguf already exists" in capsys.readouterr().err


def test_an_adapter_is_merged_into_the_tower_too(tmp_path, pairs):
    source, _ = pairs("qwen3_vl")
    model = ligermodels.load(source, **QUIET)
    ligermodels.training.add_lora(model, r=2, targets=["model.visual.blocks.0.attn.qkv"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    ligermodels.training.save_adapter(model, tmp_path / "adapter")
    to_gguf(source, tmp_path / "out.gguf", dtype="fp32", adapter=tmp_path / "adapter", mmproj=True)
    convert(source, tmp_path / "merged", Options(adapter=tmp_path / "adapter", **QUIET))
    merged = load_file(tmp_path / "merged/model.safetensors")["model.visual.blocks.0.attn.qkv.weight"]
    assert same_bits(tensors_of(tmp_path / "mmproj-out.gguf")["v.blk.0.attn_qkv.weight"], merged)


REFUSED = [
    ("qwen3_vl", {"temporal_patch_size": 1}, {}, r"temporal_patch_size 1 \(it takes 2\)"),
    ("qwen3_vl", {"spatial_merge_size": 3}, {}, r"spatial_merge_size 3 \(it takes 2\)"),
    ("qwen2_vl", {"in_channels": 1}, {}, r"in_channels 1 \(it takes 3\)"),
    ("qwen2_vl", {"hidden_act": "gelu"}, {}, "hidden_act gelu"),
    ("qwen2_vl", {"mlp_ratio": 1}, {}, "mlp_ratio 1"),
    ("qwen3_vl", {"rope_parameters": {"rope_type": "axial", "rope_theta": 500.0}}, {}, "rope_theta 500"),
    ("qwen3_vl", {}, {"do_normalize": False}, "do_rescale or do_normalize false"),
    ("qwen3_vl", {}, {"image_std": [1.0]}, "image_std is .1.0., expected three numbers"),
]


@pytest.mark.parametrize("family, vision, processor, message", REFUSED)
def test_towers_that_llama_cpp_does_not_compute(tmp_path, family, vision, processor, message):
    source = with_images(tmp_path / "source", family, vision)
    settings = read_json(source / "preprocessor_config.json") | processor
    (source / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=message):
        to_gguf(source, tmp_path / "out.gguf", mmproj=True)
    assert not (tmp_path / "out.gguf").exists()


def test_other_refusals(tmp_path, pairs):
    source, _ = pairs("qwen3_vl")
    with pytest.raises(ConfigError, match=r"is a llama, and mmproj files are written for qwen2_vl, .*\n.*leave"):
        to_gguf(small_model(tmp_path / "llama", "llama 3"), tmp_path / "out.gguf", mmproj=True)
    copy = shutil.copytree(source, tmp_path / "copy")
    (copy / "preprocessor_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json is not there.*\n.*copy it"):
        to_gguf(copy, tmp_path / "out.gguf", mmproj=True)
    for target, message in (("folder", "mmproj is for GGUF files"), ("MMPROJ.gguf", "a vision tower's file")):
        with pytest.raises(InputError, match=message):
            to_gguf(source, tmp_path / target, mmproj=True)
    assert not any(tmp_path.glob("*.gguf"))
    nested = read_json(source / "preprocessor_config.json")
    (copy / "processor_config.json").write_text(json.dumps({"image_processor": nested}))  # transformers 5
    to_gguf(copy, tmp_path / "out.gguf", mmproj=True, dtype="fp32")
    assert fields_of(tmp_path / "mmproj-out.gguf")["clip.vision.image_mean"] == nested["image_mean"]


def changed(pairs, folder, family="qwen3_vl", fields=None, **options):
    """A folder with the two files, the metadata of whose tower is changed."""
    _, files = pairs(family)
    shutil.copytree(files, folder, dirs_exist_ok=True)
    (tower := folder / "mmproj-tiny.gguf").unlink()

    def change(of_file):
        for key, value in (fields or {}).items():
            of_file[key] = value, of_file[key][1]
            if value is None:
                del of_file[key]

    rewritten(files / tower.name, tower, change, **options)
    return folder


def test_files_of_llama_cpp_s_converter(tmp_path, pairs):
    """They have patches in F16, the width of the text as that of Qwen2-VL's MLPs, and no limits."""

    def halves(tensor):
        values = np.array(tensor.data)
        return (values.astype(np.float16), None) if "patch_embd.weight" in tensor.name else (values, None)

    fields = {"clip.vision.image_min_pixels": None, "clip.vision.image_max_pixels": None}
    fields |= {"clip.vision.feed_forward_length": 32, "clip.vision.spatial_merge_size": None}
    folder = changed(pairs, tmp_path, "qwen2_vl", fields, values_of=halves)
    back, model = (ligermodels.load(path, **QUIET) for path in (folder, pairs("qwen2_vl")[0]))
    patches = [of.model.visual.patch_embed["proj"].weight.detach() for of in (back, model)]
    assert same_bits(patches[0], patches[1].half().float())
    processor = ligermodels.Processor.from_hub(folder).image_processor
    assert (processor.min_pixels, processor.max_pixels) == (8 * 28 * 28, 4096 * 28 * 28)
    assert processor.image_mean == (0.5, 0.25, 0.75)


BAD = [
    ({"clip.projector_type": "gemma3"}, {}, ConfigError, "holds 'gemma3', and .* a 'qwen3vl': read together are"),
    ({"clip.vision.block_count": 2}, {}, CheckpointError, "has more than.*: v.blk.2.attn_out.bias"),
    ({"clip.vision.block_count": 0}, {}, CheckpointError, r"clip\.vision\.block_count is 0, expected a whole number"),
    ({"clip.vision.patch_size": None}, {}, ConfigError, "lacks clip.vision.patch_size"),
    ({}, {"name_of": lambda name: None if name == "v.blk.1.ln1.bias" else name}, CheckpointError, "lacks.*1.ln1.bias"),
    ({}, {"name_of": lambda name: None if name == "mm.2.weight" else name}, CheckpointError, "lacks mm.2.weight"),
]


@pytest.mark.parametrize("fields, options, error, message", BAD)
def test_towers_that_are_not_read(tmp_path, pairs, fields, options, error, message):
    with pytest.raises(error, match=message):
        ligermodels.load(changed(pairs, tmp_path / "bad", fields=fields, **options), **QUIET)


def test_pairs_that_do_not_belong_together(tmp_path, pairs):
    source, files = pairs("qwen3_vl")
    with pytest.raises(CheckpointError, match=r"holds a vision tower .*\n.*a folder with these two files"):
        ligermodels.load(files / "mmproj-tiny.gguf", **QUIET)
    shutil.copy(files / "mmproj-tiny.gguf", tmp_path / "mmproj-tiny.gguf")
    with pytest.raises(CheckpointError, match=r"neither model.safetensors"):
        ligermodels.load(tmp_path, **QUIET, config=source)
    to_gguf(small_model(tmp_path / "hf", "llama 3"), tmp_path / "text.gguf")
    with pytest.raises(ConfigError, match=r"'qwen3vl_merger', and .* a 'llama': read together.*\n.*the text alone"):
        ligermodels.load(tmp_path, **QUIET)
    other = with_images(tmp_path / "other", "qwen3_vl", {"out_hidden_size": 64}, hidden_size=64)
    (tmp_path / "text.gguf").unlink()
    with pytest.warns(UserWarning, match="only the text is written"):
        to_gguf(other, tmp_path / "text.gguf")
    with pytest.raises(CheckpointError, match=r"makes tokens of size 32, and .* takes 64: they are of two models"):
        ligermodels.load(tmp_path, **QUIET)
    shutil.copy(files / "mmproj-tiny.gguf", tmp_path / "second-mmproj.gguf")
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF files: mmproj-tiny\.gguf, second-mmproj\.gguf"):
        ligermodels.load(tmp_path, **QUIET)


def test_a_folder_with_both_is_converted_back(tmp_path, pairs):
    source, files = pairs("qwen2_vl")
    convert(files, tmp_path / "back", Options(**QUIET))
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "back"))
    assert ours.keys() == theirs.keys() and all(same_bits(ours[name], theirs[name]) for name in ours)
    assert (tmp_path / "back/preprocessor_config.json").is_file()
