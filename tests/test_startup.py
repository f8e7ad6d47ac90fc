"""What commands and imports load: the modules that take long are not imported where they are not needed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ligermodels.checkpoint.dtypes import NAMES, dtype_name
from ligermodels.errors import InputError
from ligermodels.kernels._triton import assume_constant_result
from ligermodels.recipes import RECIPES
from tests.cli.commands import write_checkpoint

HEAVY = {"torch", "torch._dynamo", "torch.distributed.checkpoint", "transformers", "triton", "sympy"}
HAS_GPUS = bool(torch.version.cuda or torch.version.hip or torch.version.xpu)
WITH_TORCH = HEAVY - ({"torch", "triton"} if HAS_GPUS else {"torch"})
"""What a command that computes does without; Triton too, where torch is built without GPUs."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("startup")
    write_checkpoint(root / "model")
    (root / "empty").mkdir()
    for path in (root / "model").iterdir():
        if path.suffix != ".safetensors":
            (root / "empty" / path.name).write_bytes(path.read_bytes())
    return root


def loaded(code: str, folder: Path) -> tuple[set[str], str]:
    """Those of HEAVY that `code` imports, and what it prints."""
    code += "\nimport sys; print('LOADED', *sys.modules)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
        env=env,
    )  # fmt: skip
    printed, found, modules = done.stdout.rpartition("LOADED ")
    assert found, done.stderr
    return HEAVY & set(modules.split()), printed + done.stderr


WITHOUT_TORCH = {
    "": (2, "convert   write a checkpoint"),
    "train": (2, "orpo"),
    "--help": (0, "chat"),
    "generate --help": (0, "--temperature"),
    "inspect /nowhere/at/all": (3, "not there"),
    "verify model ./nowhere": (3, "not there"),
    "convert model empty": (2, "--overwrite"),
    "convert model new --dtype int3": (2, "float32 (fp32, "),
    "convert model new.gguf --dtype fp64": (2, "float64"),
    "generate /nowhere/at/all --prompt x": (3, "not there"),
    "generate empty --prompt x": (3, "neither model.safetensors"),
    "generate model --prompt x --temperature -1": (2, "temperature"),
    "generate model --prompt x --top-p 2": (2, "top_p"),
    "generate model --prompt x --dtype int3": (2, "float32 (fp32, "),
    "chat empty": (3, "neither model.safetensors"),
    "eval --help": (0, "--tasks"),
    "eval model --tasks x --log-samples": (2, "--output"),
    "train --help": (
        0,
        "ligermodels train sft HuggingFaceTB/SmolLM2-135M-Instruct --data chats.jsonl --output-dir tuned",
    ),
    **{f"train {recipe} --help": (0, "--batch-tokens") for recipe in RECIPES},
    **dict.fromkeys(("train sft -h", "train distill -h", "plan -h", "doctor -h"), (0, "GGUF")),
    "train sft model --data x --output-dir y --deepspeed z": (2, "has no option --deepspeed; here torchrun"),
    "train pretrain model --data x --output-dir y --max-steps 1 --num-train-epochs 1": (2, "give one of the two"),
}
"""Command -> its exit status, and words that it prints."""


def running(command: str) -> str:
    return f"""
from ligermodels.cli import main
try:
    status = main({command.split()!r})
except SystemExit as stop:
    status = stop.code
print("status", status)
"""


def test_commands_that_only_print(folders):
    """They need no torch, and do not import it."""
    code = "import sys\nsys.stderr = sys.stdout"
    heavy, printed = loaded("\n".join([code, *map(running, WITHOUT_TORCH)]), folders)
    assert not heavy
    outputs = re.split(r"(?<=status \d)\n", printed)
    for output, (command, (status, words)) in zip(outputs, WITHOUT_TORCH.items(), strict=False):
        assert f"status {status}" in output and words in output, f"{command}: {output}"


PACKAGE = """
import sys, ligermodels
assert not {"transformers", "triton", "tokenizers", "sentencepiece", "jinja2", "PIL", "gguf"} & set(sys.modules)
"""
WITHOUT = "import sys\nsys.modules['triton'] = sys.modules['transformers'] = None\n"
"""Importing them raises ImportError."""
TEXT = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, pad_token_id=0, rope_theta=1e4)  # fmt: skip
QWEN2_VL = dict(TEXT, model_type="qwen2_vl", rope_scaling=dict(type="mrope", mrope_section=[1, 1, 2]),
                vision_config=dict(depth=1, embed_dim=16, num_heads=2, hidden_size=32))  # fmt: skip
QWEN3_VL = dict(model_type="qwen3_vl", text_config=dict(TEXT, head_dim=128), vision_config=dict(
    depth=1, hidden_size=16, intermediate_size=24, num_heads=2, out_hidden_size=32, deepstack_visual_indexes=[0],
))  # fmt: skip
QWEN3_5 = dict(model_type="qwen3_5", text_config=dict(TEXT, head_dim=256), vision_config=dict(
    depth=1, hidden_size=16, intermediate_size=24, num_heads=2, out_hidden_size=32,
))  # fmt: skip
TOWER = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_global_layers=1, attention_heads=2,
             image_size=8, patch_size=4, vision_output_dim=32, intermediate_layers_indices=[1])  # fmt: skip
MLLAMA = dict(model_type="mllama", vision_config=TOWER,
              text_config=dict(TEXT, model_type="mllama_text_model", cross_attention_layers=[1]))  # fmt: skip

GEMMA3 = dict(model_type="gemma3", text_config=TEXT, mm_tokens_per_image=4, vision_config=dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=2,
))  # fmt: skip

GEMMA4 = dict(model_type="gemma4", text_config=TEXT, vision_config=dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
))  # fmt: skip
GEMMA4_UNIFIED = dict(GEMMA4, model_type="gemma4_unified", vision_config=dict(mm_embed_dim=16, output_proj_dims=16))


@pytest.mark.parametrize(
    "code, absent",
    [
        (PACKAGE + "ligermodels.Tokenizer.from_hub('model').encode('the')", HEAVY),
        ("import ligermodels.layers, ligermodels.training, ligermodels.conversion.pipeline", WITH_TORCH),
        (running("inspect model") + running("generate model --prompt the --max-new-tokens 2 --device cpu"), WITH_TORCH),
        (WITHOUT + f"""
import torch, ligermodels
model, ids = ligermodels.load('model'), torch.ones(1, 3).long()
model(ids, labels=ids).loss.backward()
assert all(p.grad.isfinite().all() for p in model.parameters())
model.generate(ids, max_new_tokens=2)
configs = {{"qwen2_vl": {QWEN2_VL}, "mllama": {MLLAMA}, "qwen3_vl": {QWEN3_VL}, "qwen3_5": {QWEN3_5}}}
configs |= {{"gemma3": {GEMMA3}, "gemma4": {GEMMA4}, "gemma4_unified": {GEMMA4_UNIFIED}}}
configs |= {{f"{{name}}_moe": configs[name] | {{"model_type": f"{{name}}_moe"}} for name in ("qwen3_vl", "qwen3_5")}}
for model_type, arch in ligermodels.ARCHS.items():
    for device in ("meta", "cpu"):
        arch.from_config(configs.get(model_type, dict({TEXT}, model_type=model_type)), device=device)""",
         WITH_TORCH - {"transformers", "triton"}),
    ],
    ids=["tokenizer", "imports", "commands", "every architecture"],
)  # fmt: skip
def test_what_is_not_imported(folders, code, absent):
    assert not loaded(code, folders)[0] & absent


def test_the_mark_of_a_constant_result_is_that_of_torch():
    def ours(): ...
    def theirs(): ...

    assert vars(assume_constant_result(ours)) == vars(torch.compiler.assume_constant_result(theirs)) != {}


def test_names_of_dtypes():
    """Each name of torch's, and the dtype itself, means one dtype everywhere."""
    for name, others in NAMES.items():
        for given in (name, f"torch.{name}", getattr(torch, name), *others):
            assert dtype_name(given) == name
    assert dtype_name("auto") == "auto"
    for wrong in ("int8", torch.int8, "BF16", "", None, "keep"):
        with pytest.raises(InputError, match=r"supported: auto, float32 \(fp32, f32, float\)"):
            dtype_name(wrong)
