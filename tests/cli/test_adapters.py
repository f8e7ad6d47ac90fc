"""`generate` and `chat` with a LoRA adapter: what they say is what PEFT says, and what does not fit is refused."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import ligermodels
from ligermodels.cli import main
from ligermodels.text import Tokenizer
from ligermodels.training import add_lora, save_adapter
from tests.cli.commands import run, stdin_of
from tests.cli.test_chat import HELLO, SMALL
from tests.text import families
from tests.text.folders import write


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """base, a checkpoint of transformers; pefts and ours, adapters of it, with B that is not zero."""
    peft = pytest.importorskip("peft")
    home = tmp_path_factory.mktemp("adapters")
    folder = base(home)
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    options = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    peft.get_peft_model(theirs, options).save_pretrained(home / "pefts")
    save_ours(home, targets=["q_proj", "down_proj"])
    return home


def base(home: Path, **changes) -> Path:
    """A small checkpoint of transformers with the tokenizer of Llama 2, in the folder `base`."""
    folder = families.FAMILIES["llama 2"].build(home / "base")
    ids = json.loads((folder / "config.json").read_text())
    settings = SMALL | ids | {"vocab_size": Tokenizer.from_folder(folder).vocab_size, "head_dim": 8} | changes
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def save_ours(home: Path, **targets) -> None:
    """An adapter of the base by our `add_lora`, in the folder `ours`."""
    ours = add_lora(ligermodels.load(home / "base", progress=False), r=2, alpha=4, **targets)
    for name, parameter in ours.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(2))
    save_adapter(ours, home / "ours")


@pytest.fixture(autouse=True)
def _offline_on_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def expected(home: Path, adapter: str | None, ids, stops) -> str:
    """What transformers says, with the adapter in PEFT."""
    from peft import PeftModel

    model = AutoModelForCausalLM.from_pretrained(home / "base")
    if adapter:
        model = PeftModel.from_pretrained(model, home / adapter)
    with torch.no_grad():
        sure = torch.cat([p.flatten() for n, p in model.named_parameters() if "lora_B" in n] or [torch.ones(1)])
    assert sure.abs().max() > 0.01
    new = model.generate(
        input_ids=torch.tensor([ids]), eos_token_id=list(stops), do_sample=False, max_new_tokens=16, pad_token_id=0
    )[0, len(ids) :]
    return Tokenizer.from_folder(home / "base").decode(new, skip_special_tokens=True)


@pytest.mark.parametrize(("adapter", "alone"), [("pefts", False), ("ours", True)])
def test_both_commands_say_what_peft_says(home, adapter, alone, capsys, monkeypatch):
    """With MODEL and --adapter, and with the adapter's folder alone, which names its base."""
    base, folder = home / "base", home / adapter
    tokenizer = Tokenizer.from_folder(base)
    ids = tokenizer.encode(HELLO)
    said = expected(home, adapter, ids, tokenizer.eos_token_ids)
    assert said != expected(home, None, ids, tokenizer.eos_token_ids)
    given = (folder,) if alone else (base, "--adapter", folder)
    status, out, err = run(capsys, "generate", *given, "--prompt", HELLO, "--max-new-tokens", 16)
    assert (status, out.strip()) == (0, said.strip()) and "note: " not in err, err
    monkeypatch.setattr(sys, "stdin", stdin_of(f"{HELLO}\n"))
    status, out, err = run(capsys, "chat", *given, "--max-new-tokens", 16)
    asked = tokenizer.apply_chat_template([{"role": "user", "content": HELLO}], add_generation_prompt=True)
    assert (status, out) == (0, expected(home, adapter, asked, tokenizer.chat_stop_ids) + "\n"), err


def test_adapters_of_experts_and_routers(capsys, tmp_path):
    """PEFT's target_parameters."""
    pytest.importorskip("peft")
    folder = base(tmp_path, model_type="mixtral", num_local_experts=4, num_experts_per_tok=2)
    save_ours(tmp_path, targets=[], target_parameters=["experts.down_proj", "mlp.gate.weight"])
    tokenizer = Tokenizer.from_folder(folder)
    of_prompt = tokenizer.encode(HELLO), tokenizer.eos_token_ids
    said = expected(tmp_path, "ours", *of_prompt)
    assert said != expected(tmp_path, None, *of_prompt)
    status, out, err = run(capsys, "generate", tmp_path / "ours", "--prompt", HELLO, "--max-new-tokens", 16)
    assert (status, out.strip()) == (0, said.strip()), err


def test_another_base_than_the_adapter_names_is_noted(home, capsys, tmp_path):
    """It may be a copy, so it is no error."""
    shutil.copytree(home / "base", tmp_path / "copy")
    status, _, err = run(capsys, "generate", tmp_path / "copy", "--adapter", home / "ours", "--prompt", HELLO)
    assert status == 0
    assert f"note: {home / 'ours'} names {home / 'base'} as its base, and MODEL is {tmp_path / 'copy'}" in err


def test_what_inspect_says_of_an_adapter_works(home, capsys):
    for adapter, size in (("pefts", 4), ("ours", 2)):
        status, out, err = run(capsys, "inspect", home / adapter)
        rows = {line[:15].strip(): line[15:].strip() for line in out.splitlines()}
        assert (status, err) == (0, "") and rows["rank"] == str(size) and rows["alpha"] == str(2 * size)
        assert rows["base model"] == str(home / "base") and "down_proj" in rows["targets"]
        model = eval(rows["in Python"], {"ligermodels": ligermodels})
        count = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
        assert rows["parameters"] == f"{count:,}"
        _, *command = rows["to use it"].replace("chat", "generate").split()
        assert run(capsys, *command, "--prompt", HELLO, "--max-new-tokens", 2)[0] == 0


def copy(source: Path, target: Path, **changes) -> Path:
    """The adapter with other values in its config; None leaves one out."""
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    config = json.loads((target / "adapter_config.json").read_text()) | changes
    write(target, "adapter_config.json", {name: value for name, value in config.items() if value is not None})
    return target


def test_the_tokenizer_beside_an_adapter_is_taken_and_the_bases_stops_stay(home, capsys, monkeypatch, tmp_path):
    shutil.copytree(home / "base", tmp_path / "base")
    write(tmp_path / "base", "generation_config.json", {"eos_token_id": [2, 77]})
    (tmp_path / "base" / "chat_template.jinja").write_text("{% for m in messages %}base{{ m.content }}{% endfor %}")
    adapter = copy(home / "pefts", tmp_path / "adapter", base_model_name_or_path=str(tmp_path / "base"))
    Tokenizer.from_folder(home / "base").save(adapter)
    (adapter / "chat_template.jinja").write_text("{% for m in messages %}({{ m.content }}){% endfor %}")
    conversations, encode = [], Tokenizer.encode

    def remember(self, text, *args, **options):
        conversations.append((self, text))
        return encode(self, text, *args, **options)

    monkeypatch.setattr(Tokenizer, "encode", remember)
    monkeypatch.setattr(sys, "stdin", stdin_of(f"{HELLO}\n"))
    assert run(capsys, "chat", adapter, "--max-new-tokens", 2)[0] == 0
    found, text = next(pair for pair in conversations if HELLO in pair[1])
    assert text == f"({HELLO})"
    assert {2, 77} <= set(found.chat_stop_ids)


@pytest.mark.parametrize("wrong, message", [
    ("generate {base} --adapter {tmp}/nothing --prompt x", "nothing/adapter_config.json is not there. Is "),
    ("chat {base} --adapter {base}", "adapter_config.json is not there. Is "),
    ("chat {ours} --adapter {pefts}", "is an adapter, and so is"),
    ("chat {nameless}", "does not name its base model. Next step: give the base as MODEL, and --adapter "),
    ("chat {lost}", "It is the base that {lost}/adapter_config.json names. Next step: give the base as MODEL"),
    ("chat {unfetched}", "someone/base at revision v1: the cache lacks any snapshot"),
    ("chat {base} --adapter {dropped}", "sets alora_invocation_tokens, which is not computed here"),
    ("generate {larger} --adapter {ours} --prompt x", "Likely: the adapter of another model"),
    ("generate {base} --adapter {other} --prompt x", "an adapter for model.layers.7.mlp.down_proj, which is not there"),
])  # fmt: skip
def test_what_does_not_fit_is_one_message(home, wrong, message, capsys, tmp_path, monkeypatch):
    ours, names = home / "ours", {"base": home / "base", "ours": home / "ours", "pefts": home / "pefts"}
    names["nameless"] = copy(ours, tmp_path / "nameless", base_model_name_or_path=None)
    names["lost"] = copy(ours, tmp_path / "lost", base_model_name_or_path="/nowhere/base")
    names["unfetched"] = copy(ours, tmp_path / "unfetched", base_model_name_or_path="someone/base", revision="v1")
    names["dropped"] = copy(ours, tmp_path / "dropped", alora_invocation_tokens=[1])
    names["other"], names["larger"] = copy(ours, tmp_path / "other"), tmp_path / "larger" / "base"
    from safetensors.torch import load_file, save_file

    file = names["other"] / "adapter_model.safetensors"
    save_file({name.replace("layers.0", "layers.7"): tensor for name, tensor in load_file(file).items()}, file)
    model = ligermodels.load(home / "base", progress=False)
    changes = {"intermediate_size": 64, "torch_dtype": "float32"}
    type(model).from_config(model.config.to_hf() | changes, device="cpu", seed=0).save_pretrained(names["larger"])
    Tokenizer.from_folder(home / "base").save(names["larger"])
    monkeypatch.setattr(sys, "stdin", stdin_of("Hi\n"))
    status = main(wrong.format(tmp=tmp_path, **names).split())
    out, err = capsys.readouterr()
    assert (status, out) == (3, "") and err.startswith("error: ") and message.format(**names) in err, err
