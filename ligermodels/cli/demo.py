"""What `ligermodels demo` runs: training, saving, loading and generation in under a minute, without GPU or network.

Writes a tokenizer and a small Llama in Hugging Face's layout, loads them through the public API, trains, saves, loads
again and compares bit for bit. The trained model writes a text.
"""

import json
import shlex
import shutil
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import torch

import ligermodels

TEXT = Path(__file__).with_name("demo_text.txt")
END = "<|end|>"  # between fables; stops generation
PROMPT = "The Crow and the"
BATCH, LENGTH = 4, 128  # on a CPU, many small steps learn most in a minute

CONFIG = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
    "torch_dtype": "float32",
}
# The model knows only titles and their fables, so the user's message is a title.
CHAT_TEMPLATE = "{{ bos_token }}{{ messages[-1]['content'] | trim }}{{ '\\n\\n' }}"


def run(*, seconds: float, folder: Path) -> bool:
    """Prints the demo and returns whether every comparison was equal.

    seconds: time for training. folder: for the trained checkpoint.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.cuda.get_device_name() if device == "cuda" else "one CPU thread"
    print(f"ligermodels {ligermodels.__version__} demo, {where}, torch {torch.__version__}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more threads cost more than they bring for ops this small
    try:
        good = _train_and_generate(folder, device, seconds)
    finally:
        torch.set_num_threads(threads)
    name, program = shlex.quote(str(folder)), _program()
    print(f"\nThe trained model is in {name}. Next")
    print(f"{program} generate {name} --prompt 'The Wolf Who' --temperature 0.5")
    print(f"{program} chat {name}    # type a title, such as The Snail and the Race")
    print(f"{program} inspect {name}")
    return good


def _program() -> str:
    """How the shell finds this program: `make demo` runs it in an environment that is not on its path."""
    if shutil.which("ligermodels"):
        return "ligermodels"
    script = Path(sys.argv[0])
    return shlex.quote(str(script)) if script.name == "ligermodels" else f"{shlex.quote(sys.executable)} -m ligermodels"


def _train_and_generate(folder: Path, device: str, seconds: float) -> bool:
    print("\nA checkpoint in Hugging Face's layout")
    with tempfile.TemporaryDirectory(prefix="ligermodels-") as scratch:
        first, second = Path(scratch) / "made", Path(scratch) / "again"
        write_checkpoint(first)
        tokenizer = ligermodels.Tokenizer.from_hub(first)
        model = ligermodels.load(first, device=device, progress=False)
        vocabulary = f"a vocabulary of {model.config.vocab_size:,} tokens"
        print(f"{type(model).__name__}, {model.num_parameters():,} parameters, {vocabulary}")
        model.save_pretrained(second)
        same = (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
        good = report(same, "loaded and saved again: model.safetensors is byte for byte the same")
        print(f"\nTraining for {seconds:g} s on {TEXT.stat().st_size / 1000:.0f} kB of fables")
        train(model, tokenizer, seconds)
        model.save_pretrained(folder)

    trained = ligermodels.load(folder, device=device, progress=False)
    ours, theirs = model.eval().state_dict(), trained.state_dict()
    same = ours.keys() == theirs.keys() and all(torch.equal(x, theirs[name]) for name, x in ours.items())
    good &= report(same, f"saved and loaded again: all {model.num_parameters():,} parameters are bit for bit the same")
    ids = torch.tensor([tokenizer.encode(PROMPT)], device=device)
    with torch.no_grad():
        good &= report(torch.equal(model(ids).logits, trained(ids).logits), "and so are the logits")

    print("\nWhat it writes now (temperature 0.5, seed 0)")
    start = time.perf_counter()
    out = trained.generate(ids, max_new_tokens=240, temperature=0.5, seed=0)
    speed = (out.shape[1] - ids.shape[1]) / (time.perf_counter() - start)
    for paragraph in tokenizer.decode(out[0].tolist(), skip_special_tokens=True).strip().split("\n"):
        print(textwrap.fill(paragraph, 100, initial_indent="  | ", subsequent_indent="  | ") or "  |")
    print(f"{speed:,.0f} tokens/s")
    return good


def write_checkpoint(folder: Path) -> None:
    """Writes a Llama of random weights and a tokenizer trained on the text of fables, in Hugging Face's layout."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(
        [TEXT.read_text("utf-8")],
        trainers.BpeTrainer(vocab_size=1024, special_tokens=[END], initial_alphabet=alphabet, show_progress=False),
    )
    end = bpe.token_to_id(END)
    bpe.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, end)])

    special = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    config = {**CONFIG, **special, "vocab_size": bpe.get_vocab_size()}
    model = ligermodels.Llama.from_config(config, device="cpu", seed=0)
    model.generation_config.update(special)
    model.save_pretrained(folder)
    bpe.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "pad_token": END,
        "model_max_length": CONFIG["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")


def fables() -> list[str]:
    """The fables, each a title and its text."""
    paragraphs = TEXT.read_text("utf-8").strip().split("\n\n")
    return [f"{title}\n\n{text}\n" for title, text in zip(paragraphs[::2], paragraphs[1::2], strict=True)]


def train(model: Any, tokenizer: Any, seconds: float) -> None:
    """Trains with AdamW for `seconds`. Half of each batch begins where a fable begins, as a prompt does."""
    ids = torch.tensor([i for fable in fables() for i in tokenizer.encode(fable)], device=model.device)
    beginnings = (ids[:-LENGTH] == tokenizer.bos_token_id).nonzero().flatten().cpu()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    model.train()
    start, step, shown = time.perf_counter(), 0, 0.0
    while (elapsed := time.perf_counter() - start) < seconds:
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * min(1.0, (step + 1) / 10) * (1 - 0.95 * elapsed / seconds)
        anywhere = torch.randint(len(ids) - LENGTH, (BATCH // 2,), generator=generator)
        titles = beginnings[torch.randint(len(beginnings), (BATCH // 2,), generator=generator)]
        starts = torch.cat([anywhere, titles])[:, None]
        batch = ids[(starts + torch.arange(LENGTH)).to(ids.device)]
        loss = model(batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if elapsed >= shown:
            print(f"step {step:4}  loss {loss.item():.2f}", flush=True)
            shown += seconds / 4
    speed = step * BATCH * LENGTH / (time.perf_counter() - start)
    print(f"step {step:4}  loss {loss.item():.2f}  {speed:,.0f} tokens/s")


def report(good: bool, text: str) -> bool:
    """Prints the outcome of a comparison and returns it."""
    print(f"{'ok    ' if good else 'FAILED'}  {text}", flush=True)
    return good
