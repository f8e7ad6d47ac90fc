"""The examples as a user runs them, on their own tiny models. examples/images.py: tests/vision/test_use.py."""

import importlib
import json
import math
import re
import tempfile
from pathlib import Path

import pytest
import torch

import ligermodels
from ligermodels.cli import main
from tests.recipes.runs import metrics, weights

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def example(monkeypatch, tmp_path):
    """Imports an example as `python examples/NAME.py` would, on the CPU."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return importlib.import_module


def write_chats(file, chats):
    """chats: a list of turns each, (role, content)."""
    rows = [{"messages": [dict(role=role, content=content) for role, content in turns]} for turns in chats]
    file.write_text("\n".join(map(json.dumps, rows)))


def test_train_by_hand_learns_what_the_assistant_says(example, tmp_path):
    script, model, file = example("train_by_hand"), str(example("tiny").write_llama()), tmp_path / "chats.jsonl"
    answers = {f"Say {word}.": word for word in ("a", "bcd")}
    write_chats(file, [[("user", question), ("assistant", answer)] for question, answer in answers.items()])
    losses = script.main([model, str(file), "--steps", "30", "--out", str(tmp_path / "tuned")])
    assert losses[-1] < 0.02 * losses[0]
    tokenizer = ligermodels.Tokenizer.from_hub(tmp_path / "tuned" / "model")
    tuned = ligermodels.load(tmp_path / "tuned" / "model", device="cpu").eval()
    for question, answer in answers.items():
        prompt = [dict(role="user", content=question)]
        ids = torch.tensor([tokenizer.apply_chat_template(prompt, add_generation_prompt=True)])
        out = tuned.generate(ids, max_new_tokens=8, eos_token_id=list(tokenizer.chat_stop_ids))[0, ids.shape[1] :]
        assert tokenizer.decode(out, skip_special_tokens=True) == answer


def test_train_by_hand_has_labels_at_the_assistants_tokens_and_packs_without_leaks(example, tmp_path):
    script, folder, file = example("train_by_hand"), example("tiny").write_llama(), tmp_path / "chats.jsonl"
    tokenizer = ligermodels.Tokenizer.from_hub(folder)
    long = [("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four"), ("user", "five")]
    chats = [long, [("user", "Say a."), ("assistant", "a")], long]
    encoded = [script.encode(tokenizer, [dict(role=role, content=text) for role, text in turns]) for turns in chats]
    ids, labels = encoded[0].T
    assert tokenizer.decode(ids.tolist()).endswith("four<|im_end|>\n<|im_start|>user\nfive<|im_end|>\n")
    assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))
    assert tokenizer.decode(labels[labels != -100].tolist()) == "two<|im_end|>\nfour<|im_end|>\n"
    model = ligermodels.load(folder, device="cpu").double().train()
    counts = [int((labels != -100).sum()) for _, labels in (chat.T for chat in encoded)]
    alone = [model(ids[None], labels=labels[None]).loss for ids, labels in (chat.T for chat in encoded)]
    write_chats(file, chats)
    (together,) = script.main([str(folder), str(file), "--steps", "1", "--out", str(tmp_path / "tuned")])
    expected = sum(loss * count for loss, count in zip(alone, counts, strict=True)) / sum(counts)
    assert together == pytest.approx(expected.item(), rel=1e-5)


def runs_by_hand(script, arguments, command, tmp_path, monkeypatch):
    """What a script by hand returns for each step, once without a stop. It has the bits of `ligermodels train`.

    command: the arguments of that. A second run is stopped in step 7 and continued.
    """

    def stops(text, **options):
        if text.startswith("step 7:"):
            raise KeyboardInterrupt

    whole, stopped, trained = (tmp_path / name for name in ("whole", "stopped", "trained"))
    values = script.main([*map(str, arguments), "--out", str(whole)])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(script, "print", stops, raising=False)
        script.main([*map(str, arguments), "--out", str(stopped)])
    continued = script.main([*map(str, arguments), "--out", str(stopped)])
    assert 0 < len(continued) < 7 and continued == values[-len(continued) :]
    options = ["--output-dir", trained, "--max-steps", len(values), "--max-length", script.LENGTH, "--show", 0]
    assert main([str(argument) for argument in ("train", *command, *options)]) == 0
    assert weights(whole / "model") == weights(stopped / "model") == weights(trained / "model")
    return values


def test_train_by_hand_has_the_bits_of_train_sft(example, tmp_path, monkeypatch):
    script, model, chats = example("train_by_hand"), example("tiny").write_llama(), tmp_path / "chats.jsonl"
    monkeypatch.setattr(script, "LENGTH", 128)
    turns = [("user", "Who?"), ("assistant", "Pip é."), ("user", "And?"), ("assistant", "Ferrow Point.")]
    is_cut, is_dropped = ([("user", "a" * n), ("assistant", "b" * m)] for n, m in ((1, 200), (200, 1)))
    many = [[("user", "a" * (7 * n % 50)), ("assistant", "bc")] for n in range(20)]
    write_chats(chats, [*many, turns, turns[:3], is_cut, is_dropped])
    command = ["sft", model, "--data", chats, "--accumulation", script.FORWARDS, "--learning-rate", 3e-3]
    values = runs_by_hand(script, [model, chats, "--steps", 10, "--lr", 3e-3], command, tmp_path, monkeypatch)
    assert values == [*metrics(tmp_path / "trained").values()]
    assert len(values) == 10 and values[-1] < 0.6 * values[0]


@pytest.mark.parametrize("iterations, beta", [(1, 0.0), (2, 0.5)])
def test_grpo_by_hand_has_the_bits_of_train_grpo(example, tmp_path, monkeypatch, iterations, beta):
    script, file, model = example("grpo_by_hand"), tmp_path / "rows.jsonl", tmp_path / "sums" / "model"
    constants = dict(ITERATIONS=iterations, BETA=beta, SAVE_EVERY=2, LENGTH=512, PROMPTS=6, SAMPLES=8)
    for name, value in constants.items():
        monkeypatch.setattr(script, name, value)
    example("train_by_hand").main(["--steps", "10", "--out", str(model.parent)])  # it says digits
    prompts = [[dict(role="user", content="0" * (7 * n % 50) + "+1")] for n in range(20)]
    file.write_text("\n".join(json.dumps({"prompt": prompt, "answer": "1"}) for prompt in prompts))
    command = ["grpo", model, "--data", file, "--learning-rate", 3e-3, "--num-iterations", iterations, "--beta", beta,
               "--prompts", script.PROMPTS, "--num-generations", script.SAMPLES, "--max-completion-length",
               script.NEW_TOKENS, "--reward-funcs", f"{EXAMPLES / 'grpo_by_hand.py'}:reward"]  # fmt: skip
    arguments = [model, file, "--rollouts", 10 // iterations, "--lr", 3e-3]
    values = runs_by_hand(script, arguments, command, tmp_path, monkeypatch)
    rewards, losses, clipped = (metrics(tmp_path / "trained", name).values() for name in ("reward", "loss", "clipped"))
    assert values == [*zip(rewards, losses, strict=True)]
    assert len(values) == 10 and len({*rewards}) > 2 and any(clipped) == (iterations > 1)


@pytest.mark.slow
def test_grpo_raises_the_reward(example, tmp_path):
    rewards = example("grpo").main(["--out", str(tmp_path / "out"), "--sft-steps", "300", "--steps", "40"])
    assert sum(rewards[:3]) / 3 < 0.5 and sum(rewards[-5:]) / 5 > sum(rewards[:3]) / 3 + 0.2
    assert "| reward | " in (tmp_path / "out" / "grpo" / "model" / "README.md").read_text()


def test_dpo_learns_the_preference(example, tmp_path):
    dpo = example("dpo")
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("\n".join(json.dumps(pair) for pair in dpo.PAIRS))
    model = example("tiny").write_llama()
    metrics = dpo.main([str(model), str(pairs), "--steps", "10", "--out", str(tmp_path / "tuned")])
    assert metrics[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)  # still its own reference
    assert metrics[-1]["loss"] < 0.1 and metrics[-1]["margin"] > 1
    tokenizer = ligermodels.Tokenizer.from_hub(tmp_path / "tuned")
    ids, labels = dpo.encode(tokenizer, "1 + 1?", "2.")
    assert tokenizer.decode(labels[labels != -100].tolist()) == "2.<|im_end|>\n"
    assert torch.equal(labels[labels != -100], ids[labels != -100])


def test_the_custom_architecture(example):
    module = example("custom_architecture")
    losses = module.train(steps=30)
    assert losses[0] > 3.3  # ln 32 = 3.47: at the start it guesses
    assert losses[-1] < 0.5
    model = module.Parallel(vocab=32).double()
    torch.nn.init.normal_(model.embed_tokens.weight)
    ids = torch.randint(32, (2, 40))
    logits, found = model(ids), model(ids[:, :-1], labels=ids[:, 1:])
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(found, loss)
    found.backward()
    assert [name for name, parameter in model.named_parameters() if not parameter.grad.abs().sum() > 0] == []
    changed = ids.clone()
    changed[:, 20] = (changed[:, 20] + 1) % 32
    moved = (model(changed) != logits).any(-1).any(0)
    assert not moved[:20].any() and moved[20]  # attention is causal


def shown(page: str) -> list[str]:
    """The blocks of Python in a page."""
    return re.findall(r"```python\n(.*?)\n```", (EXAMPLES.parent / page).read_text(), re.DOTALL)


def test_the_block_of_the_readme_runs(example, monkeypatch):
    """On a tiny model, without a GPU."""
    (block,) = shown("README.md")
    folder, load = example("tiny").write_llama(), ligermodels.Llama.from_hub
    monkeypatch.setattr(ligermodels.Llama, "from_hub", lambda name, dtype, device: load(folder, dtype=torch.float32))
    saved = []
    monkeypatch.setattr(ligermodels.Llama, "save_pretrained", lambda model, folder: saved.append(folder))
    found = {}
    exec(block.replace('device="cuda"', 'device="cpu"').replace("128_000", "90").replace("2048", "20"), found)
    assert saved == ["out"] and all(parameter.grad is not None for parameter in found["model"].parameters())


def test_the_page_about_streaming_runs(example, capsys):
    """On a tiny model; each way prints what `generate` returns."""
    folder, found = example("tiny").write_llama(), {}
    one, streamer, processors, many = (
        block.replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(folder)) for block in shown("docs/generation.md")
    )
    exec(one, found)
    model, tokenizer, ids = found["model"], found["tokenizer"], found["ids"]

    def text(ids):
        new = model.generate(ids, max_new_tokens=100, eos_token_id=list(tokenizer.chat_stop_ids))[0, ids.shape[1] :]
        return tokenizer.decode(new, skip_special_tokens=True)

    assert capsys.readouterr().out == text(ids) + "\n"
    exec(streamer, found)
    assert capsys.readouterr().out == text(ids) + "\n"
    exec(processors, found)
    exec(many, found)
    printed = capsys.readouterr().out
    for index, prompt in enumerate(found["prompts"]):
        new = model.generate(torch.tensor([prompt]), max_new_tokens=20)[0, len(prompt) :]
        assert f"{index} {tokenizer.decode(new)}" in printed
