"""The Python of docs/tools.md and docs/training/memory.md runs as printed, on a tiny folder in place of the Hub's."""

import re
from pathlib import Path

import pytest
import torch

import ligermodels
from tests.tools.models import Texts, make_ids, ours, theirs, write_checkpoint

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl")

DOCS = Path(__file__).parents[2] / "docs"
PAGES = "".join((DOCS / name).read_text("utf-8") for name in ("tools.md", "training/memory.md"))
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGES, re.DOTALL)


@pytest.fixture
def run_snippet(tmp_path, monkeypatch):
    """Runs the one snippet that contains `text`, in an empty folder; returns its variables."""
    monkeypatch.chdir(tmp_path)
    folder = write_checkpoint(tmp_path / "checkpoint", "llama")

    def run_snippet(text, **variables):
        (code,) = [code for code in SNIPPETS if text in code]
        code, repositories = re.subn(r'"meta-llama/[^"]*"', repr(str(folder)), code)
        assert repositories > 0
        modules = dict(torch=torch, ligermodels=ligermodels, transformers=transformers, peft=peft, trl=trl)
        variables = {**modules, **variables, "folder": folder}
        for on_gpu, on_cpu in (('device="cuda"', 'device="cpu"'), ('("out", ', '("out", use_cpu=True, ')):
            code = code.replace(on_gpu, on_cpu)
        exec(code, variables)
        return variables

    return run_snippet


def assert_opens_everywhere(folder, model):
    """The weights are those of `model`, and transformers computes the same from them."""
    opened, ids = ours(folder), make_ids(2, 8)
    for name, parameter in model.named_parameters():
        assert torch.equal(opened.get_parameter(name), parameter), name
    found, expected = ours(folder, dtype=torch.float32)(ids).logits, theirs(folder, dtype=torch.float32)(ids).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)  # fp32 logits of about 5


def test_a_loop_of_your_own(run_snippet):
    batches = [{"input_ids": make_ids(2, 12, seed), "labels": make_ids(2, 12, seed)} for seed in range(3)]
    done = run_snippet("import AdamW", batches=batches)
    assert_opens_everywhere("out", done["model"])
    assert not torch.equal(done["model"].lm_head.weight, ours(done["folder"], dtype=torch.bfloat16).lm_head.weight)


def test_lora(run_snippet):
    done = run_snippet("add_lora", input_ids=make_ids(2, 12))
    assert_opens_everywhere("merged", done["model"])
    on_theirs = peft.PeftModel.from_pretrained(theirs(done["folder"], dtype=torch.bfloat16), "adapter")
    assert on_theirs.get_nb_trainable_parameters()[1] > 0


def test_peft(run_snippet):
    done = run_snippet("get_peft_model", input_ids=make_ids(2, 12))
    on_theirs = peft.PeftModel.from_pretrained(theirs(done["folder"], dtype=torch.bfloat16), "adapter")
    assert on_theirs.get_nb_trainable_parameters()[1] > 0
    assert sum(p.grad is not None for p in done["model"].parameters()) == 2 * 7 * 2  # A and B of 7 in each layer


def test_trainer(run_snippet):
    done = run_snippet("transformers.Trainer(", data=Texts(), collator=transformers.default_data_collator)
    assert done["trainer"].state.global_step == 6
    assert_opens_everywhere("out/final", done["model"])


def test_sft(run_snippet):
    done = run_snippet("SFTTrainer(", data=datasets.Dataset.from_list([{"text": "a b c d e f"}] * 8))
    assert done["trainer"].state.global_step == 3


def test_models_of_transformers(run_snippet):
    hf_model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=97, hidden_size=32,
        intermediate_size=44, num_hidden_layers=2, num_attention_heads=4)).eval()  # fmt: skip
    done, ids = run_snippet("import AutoModelForCausalLM", hf_model=hf_model), make_ids(2, 8)
    assert isinstance(done["model"], transformers.LlamaForCausalLM) and isinstance(done["model"], ligermodels.Llama)
    torch.testing.assert_close(done["ours"](ids).logits, hf_model(ids).logits, rtol=0, atol=1e-5)  # fp32
