"""`ligermodels train` as a user types it: what it learns, writes and says, on one process and on two."""

import json
import re
import shlex
import shutil

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import ligermodels
from ligermodels import Llama, Mixtral, Qwen3_5, Tokenizer
from ligermodels.cli import main
from ligermodels.recipes import card, memory
from ligermodels.recipes.data.batches import Batches
from ligermodels.recipes.recipe_options import SFTOptions
from ligermodels.training import add_mtp, load_adapter
from tests.recipes.runs import LEARN, check_answers, check_same, metrics, on_two, options_of, train, weights

FEW = "--max-length 64 --accumulation 2 --max-steps 5 --learning-rate 3e-3 --warmup-steps 0".split()


def test_sft_learns_what_the_assistant_says(home, capsys):
    folder, flags = home / "sft", ("--num-train-epochs", "20", "--eval-share", "0.25", "--show", "2")
    assert train(home, "sft", *LEARN, *flags) == 0
    out, said = capsys.readouterr()
    assert out == f"{folder / 'model'}\n"
    assert "Say bcd.<|im_end|>\n<|im_start|>assistant\n[bcd<|im_end|>\n]" in said  # what is trained
    losses, evaluated = metrics(folder), metrics(folder, "eval_loss")
    assert losses[1] > 4 and losses[max(losses)] < 0.1  # guessing among the bytes of the answers costs over 2
    check_answers(folder / "model", ligermodels.load(folder / "model"))
    text, best = (folder / "model" / "README.md").read_text(), min(evaluated, key=evaluated.get)
    for words in (" GiB |", "12 rows of messages", f"{evaluated[best]:.4f}, after step {best}", "learning_rate: 0.004"):
        assert words in text
    saved = SFTOptions.load(folder / "options.yaml")
    assert (saved["precision"], saved["activations"], saved["batch_tokens"]) == ("fp32", "none", 128)


def test_the_head_of_a_card(tmp_path):
    options = options_of("sft", model="someone/base", data="someone/chats:clean", lora_r=8)
    (folder := tmp_path / "adapter").mkdir()
    card.write_card(options, {}, folder)
    head = yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])
    assert head == {
        "base_model": "someone/base", "base_model_relation": "adapter", "datasets": ["someone/chats"],
        "library_name": "peft", "pipeline_tag": "text-generation", "tags": ["sft", "ligermodels"],
    }  # fmt: skip


def test_adapters_learn_and_load(home, tmp_path):
    flags = (*LEARN, "--max-length", "512", "--max-steps", "60", "--lora-r", "8", "--learning-rate", "1e-2")
    assert train(home, tmp_path, *flags, "--quantize", "nf4") == 0
    base = ligermodels.load(home / "model", quantization_config="nf4", dtype=torch.float32, device="cpu")
    check_answers(home / "model", load_adapter(base, tmp_path / "adapter"))
    kept = sum(path.stat().st_size for path in (tmp_path / "checkpoints").rglob("*.distcp"))
    adapter = (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size
    assert kept < 2 * 4 * adapter + 2 * 300_000  # of each of two checkpoints: the adapter, two moments, and headers


def test_kinds_of_adapters(home, tmp_path):
    flags = ("--lora-r", "4", "--use-dora", "--use-rslora", "--lora-dropout", "0.1", "--lora-modules-to-save", "norm")
    assert train(home, tmp_path, *FEW, *flags) == 0
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    expected = dict(use_dora=True, use_rslora=True, lora_dropout=0.1, modules_to_save=["norm"])
    assert {name: config[name] for name in expected} == expected
    assert metrics(tmp_path)[5] < metrics(tmp_path)[1]


@pytest.mark.parametrize(
    ("tied", "flags", "command"),
    [
        (False, ("--lora-modules-to-save", "lm_head"), "ligermodels convert"),
        (False, ("--use-dora",), "python -c"),
        (True, (), "ligermodels convert"),
        (True, ("--lora-modules-to-save", "lm_head,embed_tokens"), "ligermodels convert"),
        (True, ("--lora-modules-to-save", "lm_head"), "python -c"),
        (True, ("--lora-modules-to-save", "embed_tokens"), "python -c"),
    ],
)
def test_the_command_that_merges_an_adapter_works(home, tmp_path, capsys, tied, flags, command):
    """`convert` refuses DoRA, and one of a tied head and its embedding."""
    base, out = tmp_path / "base", tmp_path / 'a "run"'
    shutil.copytree(home / "model", base, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((base / "config.json").read_text()) | {"tie_word_embeddings": tied}
    Llama.from_config(config, seed=0, dtype=torch.float32, device="cpu").save_pretrained(base)
    assert train(home, out, *FEW, "--max-steps", "2", "--lora-r", "2", *flags, model=base) == 0
    lines = capsys.readouterr().err.partition("next:\n  ")[2].splitlines()
    assert len(lines) == 3 and lines[1].strip().startswith(command)
    program, *argv = shlex.split(lines[1])
    if program == "python":
        exec(argv[1], {})
    else:
        assert main(argv) == 0
    ids, model = torch.arange(20)[None], load_adapter(ligermodels.load(base), out / "adapter")
    torch.testing.assert_close(ligermodels.load(out / "merged")(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def check_mtp(folder, out):
    before, after = (load_file(path / "model.safetensors") for path in (folder, out / "model"))
    moved = [not torch.equal(after[name], x) for name, x in before.items() if name.startswith("mtp.")]
    assert len(moved) == 15 and all(moved)


def check_experts(folder, out):
    model = load_adapter(ligermodels.load(folder, dtype=torch.float32), out / "adapter")
    adapters = {name: weight for name, weight in model.named_parameters() if "lora_" in name}
    experts = [weight for name, weight in adapters.items() if "proj_adapter.lora_" in name]
    assert len(experts) == 4 * model.config.num_hidden_layers and all(weight.count_nonzero() for weight in experts)
    options = SFTOptions(**SFTOptions.load(out / "options.yaml"))
    assert sum(weight.numel() for weight in adapters.values()) == memory.adapter_parameters(model, options)
    merged, ids = ligermodels.load(out / "model"), torch.arange(20)[None]
    torch.testing.assert_close(merged(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


MIXTRAL = dict(model_type="mixtral", num_local_experts=4, attention_bias=None, mlp_bias=None)
HYBRID = dict(
    model_type="qwen3_5_text", num_hidden_layers=2, full_attention_interval=2, mlp_bias=None, linear_num_key_heads=2,
    linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
)  # fmt: skip
OTHERS = {  # class, changes of the home's config, what is added to the model, options, what is checked beside
    "mtp": (Qwen3_5, HYBRID, add_mtp, ("--mtp-loss-weight", "0.3"), check_mtp),
    "experts": (Mixtral, MIXTRAL, lambda model: None, ("--lora-r", "4", "--lora-target-parameters",
                "experts.gate_up_proj,experts.down_proj", "--merge"), check_experts),
    "expert parallel": (Mixtral, MIXTRAL, lambda model: None, (), lambda folder, out: None),
}  # fmt: skip
ON_TWO = {"expert parallel": ("--ep", "2")}
"""Further options of the run of two processes."""


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_on_one_process_and_on_two(home, tmp_path, name):
    model_class, changes, prepare, flags, check = OTHERS[name]
    folder, config = tmp_path / "model", json.loads((home / "model" / "config.json").read_text())
    shutil.copytree(home / "model", folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    values = {key: value for key, value in (config | changes).items() if value is not None}
    model = model_class.from_config(values, seed=0, dtype=torch.float32, device="cpu")
    prepare(model)
    model.save_pretrained(folder)
    one, two = tmp_path / "one", tmp_path / "two"
    assert train(home, one, *FEW, *flags, model=folder) == 0
    on_two(tmp_path, lambda: train(home, two, *FEW, *flags, *ON_TWO.get(name, ()), model=folder))
    check_same(two, one)
    assert metrics(one)[5] < metrics(one)[1]
    for out in (one, two):
        check(folder, out)


def test_experts_are_not_spread_where_there_are_none(home, tmp_path, capfd):
    on_two(tmp_path, lambda: train(home, tmp_path / "out", *FEW, "--ep", "2") - 3)
    assert "ep=2 is for mixtures, and Llama has no experts: use dp_shard" in capfd.readouterr().err


def test_runs_of_one_and_two_processes_resume_each_other(home, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    flags = (*FEW, "--eval-share", "0.3", "--eval-steps", "2", "--save-steps", "3")
    assert train(home, one, *flags) == 0
    assert train(home, one, *flags, "--max-steps", "7", "--resume") == 0
    on_two(tmp_path, lambda: train(home, two, *flags))
    with pytest.warns(UserWarning, match="is resumed on 1 rank"):  # the command prints warnings
        saved = SFTOptions.load(two / "options.yaml")
        ligermodels.train("sft", **{**saved, "max_steps": 7, "resume": True})
    check_same(two, one)


def test_a_file_of_options_and_a_dry_run(home, tmp_path, capsys):
    file, out = tmp_path / "recipe.yaml", tmp_path / "dry"
    file.write_text(
        f"model: {home}/model\ndata: {home}/chats.jsonl\noutput_dir: {out}\nnum_train_epochs: 2\nlearning_rate: 1e-4"
    )
    argv = ["train", "sft", "--config", str(file), "--dry-run", "--max-length", "64", "--show", "1", "--lora-r", "4"]
    assert main(argv) == 0
    plan, said = capsys.readouterr()
    for words in (
        "107,584 parameters", "LoRA of rank 4", "8,192 parameters", "16 rows of messages", "\nlearning_rate: 0.0001\n",
        "\nsteps          16, each of 1 forward pass of up to 64 tokens\n", " MiB (tensors, estimated): weights",
        "504 a pass", "GiB", "\nbatch_tokens: 64\n", '\nactivations: "none"\n',
    ):  # fmt: skip
        assert words in plan
    assert "[a<|im_end|>\n]" in said and not out.exists()


def test_torchrun_shows_the_error_of_a_process(home, tmp_path, monkeypatch, capsys):
    """torch reads the file that it is left; all but rank 0 wait, for theirs may be the same."""
    file, slept = tmp_path / "error.json", []
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setattr("ligermodels.cli.output.time.sleep", slept.append)
    for rank, waits in ((0, []), (1, [2])):
        monkeypatch.setenv("RANK", str(rank))
        assert train(home, tmp_path / "out", data="nowhere.jsonl") == 3
        said = capsys.readouterr().err
        assert said.startswith("error: there is no file or folder") and slept == waits
        failure = ProcessFailure(local_rank=rank, pid=7, exitcode=3, error_file=str(file))
        assert f"traceback : {said}" in str(ChildFailedError("ligermodels", {rank: failure}))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_bad_row_in_the_middle_of_a_run_loses_nothing(home, tmp_path, monkeypatch, capfd, ranks):
    """The steps before it are saved, and the command in the error ends as a run that skipped it at once."""
    monkeypatch.setitem(Batches.__init__.__kwdefaults__, "window", 4)
    rows = (home / "chats.jsonl").read_text().splitlines()
    data, out, skipped = tmp_path / "some.jsonl", tmp_path / "out", tmp_path / "skipped"
    data.write_text("\n".join([*rows[:5], '{"messages": 3}', *rows[5:]]))

    def on_all(run, status):
        if ranks == 2:
            on_two(tmp_path, lambda: run() - status)
        else:
            assert run() == status

    on_all(lambda: train(home, skipped, *FEW, "--skip-bad", data=data), 0)
    assert "rows skipped that cannot be read: 1" in (skipped / "model" / "README.md").read_text()
    on_all(lambda: train(home, out, *FEW, data=data), 3)
    said = capfd.readouterr().err
    assert "some.jsonl:6: messages: expected a list" in said and "Traceback" not in said
    last = max(metrics(out))
    assert f"stopped after step {last} of 5, which is saved. To continue:" in said and 0 < last < 4
    again = re.search(r"ligermodels (train sft .* --resume --skip-bad)$", said, re.MULTILINE)[1]
    on_all(lambda: main(shlex.split(again)), 0)
    assert metrics(out) == metrics(skipped)
    assert weights(out) == weights(skipped)
    read = [re.search(r"rows read \| .*", (folder / "model" / "README.md").read_text())[0] for folder in (out, skipped)]
    assert read[0] == read[1] and "over all epochs; rows skipped that cannot be read: 1" in read[0]


def test_a_template_of_the_command_line(home, tmp_path, capsys):
    """It makes the rows, and is beside all that is saved."""
    text = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
    text += "{% if add_generation_prompt %}[assistant] {% endif %}"
    (tmp_path / "template.jinja").write_text(text)
    out, given = tmp_path / "with template", ("--chat-template", tmp_path / "template.jinja", "--show", "1")
    assert train(home, out, *FEW, "--eval-share", "0.2", "--lora-r", "2", "--merge", *given) == 0
    assert re.search(r"\[user\] Say (\w+)\.<\|im_end\|>\[assistant\] \[\1<\|im_end\|>\]", capsys.readouterr().err)
    for name in ("model", "adapter", "best"):
        assert Tokenizer.from_folder(out / name).chat_template == text
    assert Tokenizer.from_folder(home / "model").chat_template not in (None, text)
