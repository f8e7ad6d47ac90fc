"""What `ligermodels train` hands on: a folder that transformers opens, a GGUF file, a model card."""

import json
import shutil

import pytest
import torch
import transformers

import ligermodels
from ligermodels.arch import ARCHS
from ligermodels.cli import main
from ligermodels.recipes import report
from ligermodels.training import load_adapter
from tests.conversion.gguf_files import fields_of, small_model
from tests.recipes.runs import CHATS, metrics, options_of, train

FEW = ("--length", "64", "--accumulation", "1", "--steps", "3", "--lr", "5e-3", "--warmup-steps", "0")
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
    assert train(home, "whole", *FEW, "--export", "gguf", "--eval-share", "0.25") == 0
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


def test_the_gguf_file_is_the_tuned_model(whole):
    tuned, read = ligermodels.load(whole / "model"), ligermodels.load(whole / "model.gguf")
    text, again = (ligermodels.Tokenizer.from_hub(whole / name) for name in ("model", "model.gguf"))
    assert fields_of(whole / "model.gguf")["general.name"] == f"{whole.parent.name}-whole"
    assert again.encode(TEXT) == text.encode(TEXT)
    assert again.chat_template == text.chat_template
    assert torch.equal(logits(read, again), logits(tuned, text))


@pytest.mark.parametrize("more", [(), ("--merge",), ("--quantize", "nf4")])
def test_the_gguf_file_holds_the_adapters(home, more, capsys):
    out = f"lora{''.join(more)}"
    assert train(home, out, *FEW, "--lora", "4", "--lora-alpha", "64", "--export", "gguf", *more) == 0
    said, file = capsys.readouterr().err, home / out / "model.gguf"
    assert f"export         {file}, for llama.cpp\n" in said
    assert f"GGUF: {file} ({file.stat().st_size / 1e6:.1f} MB), for llama.cpp\n" in said
    model = load_adapter(ligermodels.load(home / "model"), home / out / "adapter").eval()
    text = ligermodels.Tokenizer.from_hub(home / "model")
    expected = logits(model, text)
    found = logits(ligermodels.load(home / out / "model.gguf"), text)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    assert (found - logits(ligermodels.load(home / "model"), text)).abs().max() > 0.05


def test_what_cannot_be_exported_is_said_before_training(home, capsys, tmp_path, monkeypatch):
    shutil.copytree(home / "model", tmp_path / "model")
    (tmp_path / "chats.jsonl").write_text((home / "chats.jsonl").read_text())
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    ARCHS["llama"].from_config(config, device="cpu").save_pretrained(tmp_path / "model")
    assert train(tmp_path, "biased", *FEW, "--export", "gguf") == 3
    assert (
        "llama.cpp does not compute rope_type dynamic" in capsys.readouterr().err and not (tmp_path / "biased").exists()
    )
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    assert train(home, "missing", *FEW, "--export", "gguf") == 3
    assert "pip install 'ligermodels[gguf]'" in capsys.readouterr().err and not (home / "missing").exists()
    assert train(home, "scratch", *FEW, "--export", "gguf", "--scratch", recipe="pretrain", data="texts.jsonl") == 3
    assert "pip install 'ligermodels[gguf]'" in capsys.readouterr().err and not (home / "scratch").exists()


def test_a_model_in_another_dtype_than_its_base_is_announced(home, tmp_path, capsys):
    ligermodels.load(home / "model", dtype=torch.bfloat16).save_pretrained(tmp_path / "base")
    for more, saved in (((), "model"), (("--lora", "2"), "adapter"), (("--lora", "2", "--merge"), "model")):
        out = tmp_path / f"out{''.join(more)}"
        argv = ["train", "sft", tmp_path / "base", "--data", home / "chats.jsonl", "--out", out, "--report-to", "none"]
        assert main([str(argument) for argument in (*argv, "--show", "0", *FEW, *more)]) == 0
        said, doubled = capsys.readouterr().err, f"`ligermodels convert {out / 'model'} DST --dtype bf16` halves it\n"
        assert said.endswith(
            f"report: {out / 'report.md'}\n"
            + f"saved as fp32, and the base is bf16: twice its size; {doubled}" * (saved == "model")
            + f"{saved}: {out / saved}\n"
        )
        assert ("saved as       fp32" in said) == (saved == "model")
        assert ligermodels.load(out / "model").dtype == torch.float32 if saved == "model" else True


def test_the_picture_has_the_curves_of_rewards_and_accuracy(tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)

    def drawn(*lines):
        (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
        assert report.write_plot(tmp_path) and (tmp_path / "loss.png").stat().st_size > 1000
        return {
            axes.get_ylabel(): {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
            for axes in figures[-1].axes
        }

    pair = {"reward_chosen": 1.0, "reward_rejected": -2.0, "reward_margin": 3.0, "reward_accuracy": 0.5}
    after = {"step": 1, "eval_loss": 0.4, **{f"eval_{name}": value for name, value in pair.items()}}
    assert drawn({"step": 1, "loss": 0.6, **pair}, after) == {
        "loss": {"training": [[1, 0.6]], "evaluation": [[1, 0.4]]},
        "rewards": {
            "chosen": [[1, 1]], "rejected": [[1, -2]], "margin": [[1, 3]], "margin, evaluation": [[1, 3]],
        },
        "accuracy": {"training": [[1, 0.5]], "evaluation": [[1, 0.5]]},
    }  # fmt: skip
    kto = {name: value for name, value in pair.items() if name != "reward_accuracy"}
    assert drawn({"step": 1, "loss": 0.6, **kto}).keys() == {"loss", "rewards"}
    grpo = {"loss": 0.6, "reward": 0.3, "reward_std": 0.1}
    assert drawn({"step": 1, **grpo}, {"step": 2, **grpo}) == {"reward": {"training": [[1, 0.3], [2, 0.3]]}}
    assert drawn({"step": 1, "loss": 0.6, "perplexity": 3.0}) == {"loss": {"training": [[1, 0.6]]}}


def test_the_card_says_of_what_data_how_and_with_which_results(whole, tmp_path, monkeypatch):
    import yaml

    card = (whole / "model" / "README.md").read_text()
    losses, evaluated = metrics(whole), metrics(whole, "eval_loss")
    assert f"| loss | {losses[1]:.4f} in the first step, {losses[3]:.4f} in the last |" in card
    assert (
        f"{evaluated[3]:.4f}, after step 3" in card and "12 rows of messages" in card and "learning_rate: 0.005" in card
    )
    assert "model.gguf" in card
    monkeypatch.chdir(tmp_path)
    options = options_of("sft", model="someone/base", data="someone/chats:clean", output_dir="out", lora_r=8)
    head = yaml.safe_load(report.card(options, {}, [], tmp_path / "out" / "adapter").split("---\n")[1])
    assert head == {
        "base_model": "someone/base", "base_model_relation": "adapter", "datasets": ["someone/chats"],
        "library_name": "peft", "pipeline_tag": "text-generation", "tags": ["sft", "lora", "ligermodels"],
    }  # fmt: skip
