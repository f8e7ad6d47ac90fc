"""`ligermodels plan`: its estimates beside what was measured, and its arithmetic."""

import dataclasses
import functools
import re

import pytest

from ligermodels import Llama, Qwen3Moe
from ligermodels.cli import main
from ligermodels.errors import InputError
from ligermodels.recipes import memory, scale
from ligermodels.recipes.scale import HARDWARE, Mesh
from tests.arch.suite import FIXTURES
from tests.recipes.runs import options_of
from tests.recipes.test_trainer import MODELS

HALF_70B = {**MODELS["70B"], "num_hidden_layers": 40}
MEASURED = [
    # model, rows, tokens of each, weights, recomputed, mesh, GPU: tokens/s of each GPU, in benchmarks/results
    ("8B", 4, 4096, "bf16", "none", Mesh(1, 1, 1, 1), "h200", 12451),  # distributed-2xh200.json
    ("8B", 4, 4096, "fp32", "none", Mesh(1, 2, 1, 1), "h200", 11579),
    ("8B", 2, 4096, "fp32", "none", Mesh(1, 2, 1, 1), "h200", 10447),
    ("8B", 1, 8192, "bf16", "none", Mesh(1, 1, 1, 2), "h200", 9291),
    ("1B", 1, 131072, "bf16", "block", Mesh(1, 1, 2, 1), "h200", 9362),
    ("half 70B", 1, 4096, "bf16", "block", Mesh(1, 2, 1, 1), "h200", 1867),
    ("70B", 1, 4096, "bf16", "block", Mesh(1, 4, 1, 1), "h200", 931),  # distributed-4xh200.json
    ("1B", 1, 1048576, "bf16", "block", Mesh(1, 1, 4, 1), "h200", 1233),
    ("8B", 1, 8192, "bf16", "none", Mesh(1, 1, 1, 4), "h200", 8913),
    ("8B", 4, 4096, "fp32", "none", Mesh(1, 4, 1, 1), "h200", 11517),
    ("8B", 4, 4096, "bf16", "mlp", Mesh(1, 1, 1, 1), "h100", 10811),  # distributed-4xh100.json
    ("8B", 4, 4096, "fp32", "mlp", Mesh(1, 4, 1, 1), "h100", 10243),
    ("8B", 1, 32768, "fp32", "block", Mesh(1, 4, 1, 1), "h100", 5975),
    ("half 70B", 1, 4096, "bf16", "block", Mesh(1, 4, 1, 1), "h100", 1827),
    ("1B", 1, 131072, "bf16", "block", Mesh(1, 1, 4, 1), "h100", 9164),  # distributed-cp-4xh100.json
    ("1B", 1, 524288, "bf16", "block", Mesh(1, 1, 4, 1), "h100", 2449),
]


@functools.cache
def sketch_of(model):
    return Llama.from_config(HALF_70B if model == "half 70B" else MODELS[model], device="meta")


def step(model, mesh, gpu="h200", rows=1, length=4096, **options):
    sketch = sketch_of(model)
    options = options_of("sft", batch_tokens=rows * length, max_length=length, accumulation=1, **options)
    return scale.step_on(mesh, sketch, memory.Sizes.of(sketch, options), options, HARDWARE[gpu])


@pytest.mark.parametrize(("model", "rows", "length", "precision", "activations", "mesh", "gpu", "measured"), MEASURED)
def test_the_speed_is_what_was_measured(model, rows, length, precision, activations, mesh, gpu, measured):
    """Within 11 %; the mean error of these rows is 4 %."""
    found = step(model, mesh, gpu, rows, length, precision=precision, activations=activations)
    assert found.tokens_per_second == pytest.approx(measured, rel=0.11)


def test_the_bytes_are_those_of_the_collectives():
    """Of the 8B over four: two gathers of three quarters in bf16, one reduction in fp32; with replicas, also theirs."""
    P = 8_030_261_248
    found = step("8B", Mesh(1, 4, 1, 1), precision="bf16", activations="none").bytes
    assert found == {"gathers": 2 * 2 * P * 0.75, "reductions": 4 * P * 0.75, "replicas": 0.0}
    found = step("8B", Mesh(2, 4, 1, 1), precision="bf16", activations="none").bytes
    assert found["replicas"] == pytest.approx(2 * 4 * (P / 4) / 2)
    # 8 collectives in each of 32 blocks, of 8,192 x 4,096 numbers in 16 bits, of which this rank has a half
    found = step("8B", Mesh(1, 1, 1, 2), length=8192, precision="bf16", activations="none").bytes
    assert found["tensor parallel"] == 32 * 8 * 8192 * 4096 * 2 / 2


def test_what_cannot_be_hidden_is_exposed():
    """Slow links: all that communication takes beyond the compute of the blocks beside it."""
    sketch, slow = sketch_of("8B"), dataclasses.replace(HARDWARE["h200"], inside=1e9)
    options = options_of("sft", batch_tokens=4096, max_length=4096, accumulation=1, precision="bf16")
    sizes = memory.Sizes.of(sketch, options)
    found = scale.step_on(Mesh(1, 4, 1, 1), sketch, sizes, options, slow)
    links = sum(found.bytes.values()) / 1e9
    assert 0.95 * links < found.exposed + found.compute < 1.2 * links  # compute holds a tenth of it
    assert scale.step_on(Mesh(1, 4, 1, 1), sketch, sizes, options, HARDWARE["h200"]).exposed < 0.01


def test_a_token_meets_the_chosen_experts_alone():
    config = {
        "model_type": "qwen3_moe", "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "intermediate_size": 44, "tie_word_embeddings": False,
    }  # fmt: skip
    sketch = Qwen3Moe.from_config(config, device="meta")
    matmuls, attention = scale.flops_per_token(sketch, options_of("sft", max_length=64))
    experts, blocks = 2 * 8 * 3 * 16 * 32, memory.count(sketch.decoder.layers)
    assert matmuls == 6 * (blocks - experts + experts // 4 + 97 * 32) and attention == 6 * 2 * 4 * 8 * 64


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
    assert main(["plan", str(tmp_path), "--gpus", "1", "--memory", "20"]) == 0
    text = capsys.readouterr().out
    assert "which does not fit" in text and re.search(r"^optimizer +29\.9 GiB$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--gpus", "eight"), "--gpus eight: expected numbers, such as 8, or 8,12,16, or 8..1024"),
        (("--gpus", "16..8"), "--gpus 16..8: expected numbers"),
        (("--gpus", "8", "--memory", "0"), "--memory 0: expected more than 0"),
        (("--gpus", "8", "--quantize", "nf4"), "quantize=nf4 needs lora_r"),
        (("--gpus", "8", "--tp", "3"), "no mesh of 8 GPUs for Llama has tp=3: the product of all sizes must be 8"),
        (("--gpus", "6", "--tp", "4", "--cp", "2"), "Sizes that fit, each alone: cp 1, 2; tp 1, 2\n"),
    ],
)
def test_wrong_options(tmp_path, capsys, flags, says):
    (tmp_path / "config.json").write_text((FIXTURES / "Llama-3.1-8B.json").read_text())
    assert main(["plan", str(tmp_path), *flags]) == 2
    assert says in capsys.readouterr().err
