"""`ligermodels plan`: its estimates beside what was measured, and its arithmetic."""

import dataclasses
import functools
import json
import re

import pytest

import ligermodels
from benchmarks.distributed import NAMES, model_of
from ligermodels import Qwen3Moe
from ligermodels.cli import main
from ligermodels.errors import InputError
from ligermodels.layers.moe import all_experts
from ligermodels.recipes import memory, scale
from ligermodels.recipes.scale import HARDWARE, Mesh
from tests.arch.suite import FIXTURES
from tests.recipes.runs import options_of

MEASURED = [
    # model, rows, tokens of each, precision or adapters, recomputed, mesh, GPU: tokens/s of each, in benchmarks/results
    ("8B", 4, 4096, "bf16", "none", Mesh(), "h200", 12451),  # distributed-2xh200.json
    ("8B", 4, 4096, "fp32", "none", Mesh(dp_shard=2), "h200", 11579),
    ("8B", 2, 4096, "fp32", "none", Mesh(dp_shard=2), "h200", 10447),
    ("8B", 1, 8192, "bf16", "none", Mesh(tp=2), "h200", 9291),
    ("1B", 1, 131072, "bf16", "block", Mesh(cp=2), "h200", 9362),
    ("half 70B", 1, 4096, "bf16", "block", Mesh(dp_shard=2), "h200", 1867),
    ("70B", 1, 4096, "bf16", "block", Mesh(dp_shard=4), "h200", 931),  # distributed-4xh200.json
    ("1B", 1, 1048576, "bf16", "block", Mesh(cp=4), "h200", 1233),
    ("8B", 1, 8192, "bf16", "none", Mesh(tp=4), "h200", 8913),
    ("8B", 4, 4096, "fp32", "none", Mesh(dp_shard=4), "h200", 11517),
    ("8B", 4, 4096, "bf16", "mlp", Mesh(), "h100", 10811),  # distributed-4xh100.json
    ("8B", 4, 4096, "fp32", "mlp", Mesh(dp_shard=4), "h100", 10243),
    ("8B", 1, 32768, "fp32", "block", Mesh(dp_shard=4), "h100", 5975),
    ("half 70B", 1, 4096, "bf16", "block", Mesh(dp_shard=4), "h100", 1827),
    ("1B", 1, 131072, "bf16", "block", Mesh(cp=4), "h100", 9164),  # distributed-cp-4xh100.json
    ("1B", 1, 524288, "bf16", "block", Mesh(cp=4), "h100", 2449),
    ("6 layers of 30B-A3B", 4, 4096, "bf16", "none", Mesh(), "h200", 104782),  # distributed-mixtures-2xh200.json
    ("6 layers of 30B-A3B", 4, 4096, "bf16", "none", Mesh(dp_shard=2), "h200", 78558),
    ("6 layers of 30B-A3B", 4, 4096, "bf16", "none", Mesh(ep=2), "h200", 92086),
    ("30B-A3B", 4, 4096, "bf16", "block", Mesh(dp_shard=2), "h200", 11513),
    ("30B-A3B", 4, 4096, "bf16", "block", Mesh(ep=2), "h200", 12672),
    ("gpt-oss-20b", 4, 4096, "bf16", "block", Mesh(dp_shard=2), "h200", 13176),
    ("Gemma-4-31B", 4, 4096, "bf16", "block", Mesh(dp_shard=2), "h200", 2199),
    ("8B", 4, 4096, "lora", "none", Mesh(), "h200", 15904),  # step-llama-8b-lora-unsloth-h200.json
    ("8B", 4, 4096, "lora", "block", Mesh(), "h200", 12035),
    ("8B", 1, 2048, "nf4", "none", Mesh(), "h200", 15219),  # step-llama-8b-qlora-h200.json, captured
    ("8B", 1, 2048, "nf4", "block", Mesh(), "h200", 11564),
    ("70B", 1, 4096, "nf4", "block", Mesh(), "h200", 1403),  # step-llama-70b-qlora-h200.json
    ("Gemma-4-31B", 4, 4096, "lora", "block", Mesh(), "h200", 2821),  # step-gemma-4-31b-h200.json
]
ADAPTERS = {"lora": dict(lora_r=16), "nf4": dict(lora_r=16, quantize="nf4")}


@functools.cache
def sketch_of(model):
    config = model_of(NAMES[model])[1]
    return ligermodels.ARCHS[config["model_type"]].from_config(config, device="meta")


def step(model, mesh, gpu="h200", rows=1, length=4096, **options):
    sketch = sketch_of(model)
    options = options_of("sft", batch_tokens=rows * length, max_length=length, accumulation=1, **options)
    return scale.step_on(mesh, sketch, memory.Sizes.of(sketch, options), options, HARDWARE[gpu])


@pytest.mark.parametrize(("model", "rows", "length", "weights", "activations", "mesh", "gpu", "measured"), MEASURED)
def test_the_speed_is_what_was_measured(model, rows, length, weights, activations, mesh, gpu, measured):
    """Within 13 %; the mean error of these rows is 5 %."""
    how = ADAPTERS.get(weights) or dict(precision=weights)
    found = step(model, mesh, gpu, rows, length, activations=activations, **how)
    assert found.tokens_per_second == pytest.approx(measured, rel=0.13)


def test_the_bytes_are_those_of_the_collectives():
    """Of the 8B over four: two gathers of three quarters in bf16, one reduction in fp32; with replicas, also theirs."""
    P = 8_030_261_248
    found = step("8B", Mesh(dp_shard=4), precision="bf16", activations="none").bytes
    assert found == {"gathers": 2 * 2 * P * 0.75, "reductions": 4 * P * 0.75, "replicas": 0.0}
    found = step("8B", Mesh(dp_replicate=2, dp_shard=4), precision="bf16", activations="none").bytes
    assert found["replicas"] == pytest.approx(2 * 4 * (P / 4) / 2)
    in_blocks = 32 * (2 * 4096**2 + 2 * 1024 * 4096 + 3 * 14336 * 4096 + 2 * 4096)
    found = step("8B", Mesh(dp_shard=4), activations="none", **ADAPTERS["nf4"]).bytes
    assert found["gathers"] == pytest.approx(2 * 0.75 * (2 * (P - in_blocks) + 4.127 / 8 * in_blocks))
    # 8 collectives in each of 32 blocks, of 8,192 x 4,096 numbers in 16 bits, of which this rank has a half
    found = step("8B", Mesh(tp=2), length=8192, precision="bf16", activations="none").bytes
    assert found["tensor parallel"] == 32 * 8 * 8192 * 4096 * 2 / 2


def test_the_bytes_under_expert_parallelism():
    """Each of 48 layers of experts gets the tokens of three other ranks five times, or seven; no rank gets experts, or
    over two groups of four those of its fourth."""
    sketch = sketch_of("30B-A3B")
    rest = memory.count(sketch) - (experts := sum(memory.count(layer) for layer in all_experts(sketch)))
    tokens = 48 * 4096 * 2048 * 2 * 3
    found = step("30B-A3B", Mesh(ep=4), precision="bf16", activations="none").bytes
    assert found["expert parallel"] == 5 * tokens and found["gathers"] == pytest.approx(2 * 2 * rest * 3 / 4)
    found = step("30B-A3B", Mesh(dp_shard=2, ep=4), precision="bf16", activations="block").bytes
    assert found["expert parallel"] == 7 * tokens
    assert found["gathers"] == pytest.approx(2 * 2 * (rest * 7 / 8 + experts / 4 / 2))
    assert found["reductions"] == pytest.approx(found["gathers"])


def test_expert_parallelism_gathers_no_experts():
    """The memory is that of FSDP over as many ranks, less the buffers of the experts of a block."""
    both = [step("30B-A3B", mesh, precision="bf16", activations="block").need for mesh in (Mesh(1, 4), Mesh(ep=4))]
    block = 128 * 3 * 768 * 2048
    names = "weights", "optimizer", "activations and logits"
    assert [both[0][name] for name in names] == [both[1][name] for name in names]
    assert both[0]["communication buffers"] - both[1]["communication buffers"] == 10 * block


def test_any_number_of_replicas_can_be_asked_for():
    sketch, options = sketch_of("8B"), options_of("sft", batch_tokens=4096, max_length=4096)
    sizes = memory.Sizes.of(sketch, options)
    assert scale.best(sketch, sizes, options, 4, HARDWARE["h200"], {"dp_replicate": 2}).mesh.dp_replicate == 2
    with pytest.raises(InputError, match="no mesh of 4 GPUs for Llama has dp_replicate=3"):
        scale.best(sketch, sizes, options, 4, HARDWARE["h200"], {"dp_replicate": 3})


def test_adapters_over_released_mxfp4_leave_it_so(tmp_path, capsys):
    config, weights = json.loads((FIXTURES / "gpt-oss-20b-BF16.json").read_text()), []
    sizes = memory.Sizes.of(sketch_of("gpt-oss-20b"), options_of("sft", **ADAPTERS["lora"]))
    for more in ({}, {"quantization_config": {"quant_method": "mxfp4"}}):
        (tmp_path / "config.json").write_text(json.dumps(config | more))
        assert main(["plan", str(tmp_path), "--gpus", "1", "--lora-r", "16"]) == 0
        weights.append(float(re.search(r"^weights +([\d.]+) GiB$", capsys.readouterr().out, re.MULTILINE)[1]))
    adapters, stacked = 4 * sizes.trained, sizes.stacked  # in bytes; and the weights that are in 4.25 bits
    expected = [adapters + 2 * sizes.parameters, adapters + 2 * (sizes.parameters - stacked) + 4.25 / 8 * stacked]
    assert weights == pytest.approx([size / memory.GIB for size in expected], abs=0.06)


def test_a_mesh_that_train_refuses_is_left_out():
    """Adapters have no tp, and quantised experts no ep."""
    sketch, options = sketch_of("30B-A3B"), options_of("sft", batch_tokens=4096, max_length=4096, **ADAPTERS["nf4"])
    sizes = memory.Sizes.of(sketch, options)
    mesh = scale.best(sketch, sizes, options, 8, HARDWARE["h200"]).mesh
    assert mesh.ep == mesh.tp == 1
    for name in ("ep", "tp"):
        with pytest.raises(InputError, match=f"has {name}=2: .* adapters exclude tp, and 4 bits ep.*: {name} 1$"):
            scale.best(sketch, sizes, options, 8, HARDWARE["h200"], {name: 2})


def test_the_experts_beside_an_mlp_are_chosen_too():
    """Gemma 4's 26B-A4B has some four billion parameters for a token."""
    config = json.loads((FIXTURES / "gemma-4-26B-A4B.json").read_text())
    sketch = ligermodels.ARCHS[config["model_type"]].from_config(config, device="meta")
    dense, chosen, _ = scale.flops_per_token(sketch, options_of("sft", max_length=64))
    assert 3.5e9 < (dense + chosen) / 6 < 4.5e9


def test_what_cannot_be_hidden_is_exposed():
    """Slow links: all that communication takes beyond the compute of the blocks beside it."""
    sketch, slow = sketch_of("8B"), dataclasses.replace(HARDWARE["h200"], inside=1e9)
    options = options_of("sft", batch_tokens=4096, max_length=4096, accumulation=1, precision="bf16")
    sizes = memory.Sizes.of(sketch, options)
    found = scale.step_on(Mesh(dp_shard=4), sketch, sizes, options, slow)
    links = sum(found.bytes.values()) / 1e9
    assert 0.95 * links < found.exposed + found.compute < 1.2 * links  # compute holds 15 % of it
    assert scale.step_on(Mesh(dp_shard=4), sketch, sizes, options, HARDWARE["h200"]).exposed < 0.01


def test_a_token_meets_the_chosen_experts_alone():
    config = {
        "model_type": "qwen3_moe", "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "intermediate_size": 44, "tie_word_embeddings": False,
    }  # fmt: skip
    sketch = Qwen3Moe.from_config(config, device="meta")
    dense, chosen, attention = scale.flops_per_token(sketch, options_of("sft", max_length=64))
    experts, blocks = 2 * 8 * 3 * 16 * 32, memory.count(sketch.decoder.layers)
    assert dense == 6 * (blocks - experts + 97 * 32) and chosen == 6 * experts // 4
    assert attention == 6 * 2 * 4 * 8 * 64


def test_the_fastest_mesh_that_fits_is_chosen():
    sketch = sketch_of("70B")
    options = options_of("sft", batch_tokens=4096, max_length=4096)
    sizes = memory.Sizes.of(sketch, options)
    fitting = scale.best(sketch, sizes, options, 16, HARDWARE["h100"])
    assert scale.fits(fitting, HARDWARE["h100"])
    for mesh in scale.meshes(sketch, 16, HARDWARE["h100"]):
        other = scale.step_on(mesh, sketch, sizes, options, HARDWARE["h100"])
        assert other.tokens_per_second <= fitting.tokens_per_second or not scale.fits(other, HARDWARE["h100"])
    assert not scale.fits(scale.best(sketch, sizes, options, 2, HARDWARE["h100"]), HARDWARE["h100"])
    assert scale.best(sketch, sizes, options, 16, HARDWARE["h100"], {"tp": 4}).mesh.tp == 4
    with pytest.raises(InputError, match="no mesh of 6 GPUs for Llama has tp=5"):
        scale.best(sketch, sizes, options, 6, HARDWARE["h100"], {"tp": 5})


def test_the_command(tmp_path, capsys):
    (tmp_path / "config.json").write_text((FIXTURES / "Llama-3.1-8B.json").read_text())
    assert main(["plan", str(tmp_path), "--gpus", "2..16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("8,030,261,248 trained; a forward of 4,096 tokens, rows of 4,096")
    assert [line.split()[0] for line in lines[2:]] == ["2", "4", "8", "16"]
    assert [line.endswith("extrapolated") for line in lines[2:]] == [False, False, True, True]
    assert main(["plan", str(tmp_path), "--gpus", "1..8", "--lora-r", "16"]) == 0
    capsys.readouterr()
    assert main(["plan", str(tmp_path), "--gpus", "1", "--memory", "20"]) == 0
    text = capsys.readouterr().out
    assert "which does not fit" in text and re.search(r"^optimizer +29\.9 GiB$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--gpus", "eight"), "--gpus eight: expected numbers, such as 8, or 8,12,16, or 8..1024"),
        (("--gpus", "16..8"), "--gpus 16..8: expected numbers"),
        (("--gpus", "0..8"), "--gpus 0..8: expected numbers"),
        (("--gpus", "8", "--memory", "0"), "--memory 0: expected a number of more than 0"),
        (("--gpus", "8", "--memory", "inf"), "--memory inf: expected a number of more than 0"),
        (("--gpus", "8", "--batch-tokens", "0"), "batch_tokens=0"),
        (("--gpus", "1", "--quantize", "nf4"), "quantize=nf4 needs lora_r"),
        (("--gpus", "8", "--ep", "2"), "no mesh of 8 GPUs for Llama has ep=2"),
        (("--gpus", "8", "--tp", "3"), "no mesh of 8 GPUs for Llama has tp=3: the product of all sizes must be 8"),
        (("--gpus", "6", "--tp", "4", "--cp", "2"), "Sizes that fit, each alone: cp 1, 2; tp 1, 2\n"),
    ],
)
def test_wrong_options(tmp_path, capsys, flags, says):
    (tmp_path / "config.json").write_text((FIXTURES / "Llama-3.1-8B.json").read_text())
    assert main(["plan", str(tmp_path), *flags]) == 2
    assert says in capsys.readouterr().err
