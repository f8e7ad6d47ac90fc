"""What `ligermodels train` hands on: a folder that transformers opens, a GGUF file, a model card."""

import json

import pytest
import torch
import transformers

import ligermodels
from ligermodels.recipes import report
from tests.conversion.gguf_files import small_model
from tests.recipes.runs import CHATS, metrics, options_of, train

FEW = "--max-length 64 --accumulation 1 --max-steps 3 --learning-rate 5e-3 --warmup-steps 0".split()
TEXT = "Say bcd.<|eot|>"


def logits(model, tokenizer):
    with torch.no_grad():
        return model(torch.tensor([tokenizer.encode(TEXT, add_special_tokens=False)])).logits


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A model that llama.cpp would take, and chats."""
    folder = tmp_path_factory.mktemp("export")
    small_model(folder / "model", "llama 3", initializer_range=0.1)
    (folder / "chats.jsonl").write_text("\n".join(json.dumps({"messages": messages}) for messages in CHATS * 2))
    return folder


@pytest.fixture(scope="module")
def whole(home):
    assert train(home, "whole", *FEW, "--eval-share", "0.25") == 0
    return home / "whole"


def test_files_have_the_mode_of_new_ones(home, whole):
    """Not that of temporary files, which nobody but their owner reads."""
    (home / "new").touch()
    modes = {path.stat().st_mode: path for path in whole.rglob("*") if path.is_file()}
    assert set(modes) == {(home / "new").stat().st_mode}, modes


def test_transformers_opens_the_tuned_model(home, whole):
    tokenizer = transformers.AutoTokenizer.from_pretrained(whole / "model")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(whole / "model").eval()
    ours, text = ligermodels.load(whole / "model"), ligermodels.Tokenizer.from_hub(whole / "model")
    messages = [{"role": "user", "content": "Say efg."}]
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert asked == text.apply_chat_template(messages, add_generation_prompt=True)
    assert tokenizer.encode(TEXT) == text.encode(TEXT)
    expected = logits(theirs, tokenizer)
    torch.testing.assert_close(logits(ours, text), expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    assert (expected - logits(ligermodels.load(home / "model"), text)).abs().max() > 0.1  # it was trained


def test_the_card_says_of_what_data_how_and_with_which_results(whole, tmp_path, monkeypatch):
    import yaml

    card = (whole / "model" / "README.md").read_text()
    evaluated = metrics(whole, "eval_loss")
    for words in (f"{evaluated[3]:.4f}, after step 3", "12 rows of messages", "learning_rate: 0.005", ", loss "):
        assert words in card
    monkeypatch.chdir(tmp_path)
    options = options_of("sft", model="someone/base", data="someone/chats:clean", output_dir="out", lora_r=8)
    (folder := tmp_path / "out" / "adapter").mkdir(parents=True)
    report.write_card(options, {}, folder)
    head = yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])
    assert head == {
        "base_model": "someone/base", "base_model_relation": "adapter", "datasets": ["someone/chats"],
        "library_name": "peft", "pipeline_tag": "text-generation", "tags": ["sft", "lora", "ligermodels"],
    }  # fmt: skip
