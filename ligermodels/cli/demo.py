"""`ligermodels demo`: training, saving, loading and generation in under a minute, without GPU or network.

Writes a tokenizer and a small Llama in Hugging Face's layout, loads them through the public API, trains, saves, loads
again and compares bit for bit; the trained model writes a text; the kernels are compared with fp64.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import ligermodels
from ligermodels.kernels._triton import IS_INSTALLED

TEXT = Path(__file__).with_name("demo_text.txt")
END = "<|end|>"  # stands before each fable, and stops generation
PROMPT = "The Crow and the"
BATCH, LENGTH = 4, 128  # many small steps: on a CPU that learns most in a minute

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
# The model has seen only titles and their fables, so the user's message is used as a title.
CHAT_TEMPLATE = "{{ bos_token }}{{ messages[-1]['content'] | trim }}{{ '\\n\\n' }}"


def run(*, seconds: float, folder: Path) -> bool:
    """Prints the demo and returns whether all its comparisons held.

    seconds: time for training. folder: for the trained checkpoint.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.cuda.get_device_name() if device == "cuda" else "one CPU thread"
    print(f"ligermodels {ligermodels.__version__} demo, {where}, torch {torch.__version__}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more threads cost more than they bring for ops this small
    try:
        good = _train_and_generate(folder, device, seconds)
        good &= _compare_kernels(device)
    finally:
        torch.set_num_threads(threads)
    name = shlex.quote(str(folder))
    print(f"\nThe trained model is in {name}. Next")
    print(f"ligermodels generate {name} --prompt 'The Wolf Who' --temperature 0.5")
    print(f"ligermodels chat {name}    # type a title, such as The Snail and the Race")
    print(f"ligermodels inspect {name}")
    return good


def _train_and_generate(folder: Path, device: str, seconds: float) -> bool:
    print("\nA checkpoint in Hugging Face's layout")
    with tempfile.TemporaryDirectory(prefix="ligermodels-") as scratch:
        made, again = Path(scratch) / "made", Path(scratch) / "again"
        write_checkpoint(made)
        tokenizer = ligermodels.Tokenizer.from_hub(made)
        model = ligermodels.load(made, device=device, progress=False)
        vocabulary = f"a vocabulary of {model.config.vocab_size:,} tokens"
        print(f"{type(model).__name__}, {model.num_parameters():,} parameters, {vocabulary}")
        model.save_pretrained(again)
        same = (made / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
        good = report(same, "loaded and saved again: model.safetensors is byte for byte the same")
        print(f"\nTraining for {seconds:g} s on {TEXT.stat().st_size / 1000:.0f} kB of fables")
        train(model, tokenizer, seconds)
        model.save_pretrained(folder)

    trained = ligermodels.load(folder, device=device, progress=False)
    good &= report_same_weights(model.eval(), trained)
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
    """Writes a Llama with random weights and a tokenizer trained on the bundled text, in Hugging Face's layout."""
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
    """The fables of the bundled text, each a title and the text under it."""
    paragraphs = TEXT.read_text("utf-8").strip().split("\n\n")
    return [f"{title}\n\n{text}\n" for title, text in zip(paragraphs[::2], paragraphs[1::2], strict=True)]


def train(model: Any, tokenizer: Any, seconds: float) -> None:
    """Trains with AdamW for `seconds`. Half of the windows of the text begin with a fable, as a prompt does."""
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


# Kernels against fp64, beside PyTorch's own ops


def _compare_kernels(device: str) -> bool:
    print("\nKernels and PyTorch's own ops against fp64 (rms error / rms)")
    if not IS_INSTALLED:
        print("Triton is not installed: every op runs as plain PyTorch. On Linux: pip install triton")
        return True
    # In a child process: whether Triton interprets its kernels is decided when it is imported.
    environment = {**os.environ, "TRITON_INTERPRET": "0" if device == "cuda" else "1"}
    command = [sys.executable, "-m", "ligermodels.cli.demo"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        return report(False, (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    return print_errors(json.loads(done.stdout.splitlines()[-1]))


def print_errors(errors: dict[str, list[float]]) -> bool:
    """Prints a line for each op, {op: (output: kernel, eager; gradients: kernel, eager)}.

    Returns whether each kernel's errors are at most twice those of the eager op, or a few roundings of fp32.
    """
    print(f"{'':22}{'output':^24}{'gradients':^24}\n{'':22}" + f"{'kernel':>12}{'PyTorch':>12}" * 2)
    wrong = []
    for op, (output, eager_output, gradients, eager_gradients) in errors.items():
        print(f"{op:22}{output:12.1e}{eager_output:12.1e}{gradients:12.1e}{eager_gradients:12.1e}")
        if not (output <= 2 * eager_output + 1e-6 and gradients <= 2 * eager_gradients + 1e-6):
            wrong.append(op)
    return report(not wrong, f"too far from fp64: {', '.join(wrong)}" if wrong else "as near to fp64 as PyTorch's ops")


def kernel_errors() -> dict[str, list[float]]:
    """{op: errors}, see `print_errors`; in bfloat16 on a GPU, else in fp32 through Triton's interpreter."""
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    torch.manual_seed(0)
    errors = {}
    for op, kernel, eager, draws in _kernel_cases(large=on_gpu):
        inputs = [x.to(device, dtype) for x in draws]
        exact = _outcome(eager, [x.double() for x in inputs])
        found = [_outcome(function, inputs) for function in (kernel, eager)]
        errors[op] = [_relative_rms(one[part], exact[part]) for part in (0, 1) for one in found]
    return errors


def _kernel_cases(*, large: bool) -> Iterator[tuple[str, Callable[..., Any], Callable[..., Tensor], list[Tensor]]]:
    """(op, the kernel, PyTorch's own ops with the casts that models use, inputs in fp64)."""
    from ligermodels import kernels

    rows, size, vocab = (1024, 2048, 32000) if large else (16, 96, 200)
    x, weight, gate_up = (torch.randn(*shape).double() for shape in ((rows, size), (size,), (rows, 2 * size)))
    logits, head = 3 * torch.randn(rows, vocab).double(), 3 * torch.randn(vocab, size).double() / size**0.5
    labels = torch.randint(vocab, (rows,))

    def upcast(x: Tensor) -> Tensor:
        return x if x.dtype == torch.float64 else x.float()

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return weight * F.rms_norm(upcast(x), (size,), eps=1e-6).to(x.dtype)

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(upcast(logits), labels.to(logits.device))

    yield "rms_norm", kernels.rms_norm, norm, [x, weight]
    yield "glu (silu)", kernels.glu, lambda x: F.silu(x[:, :size]) * x[:, size:], [gate_up]
    yield "cross_entropy", lambda x: kernels.cross_entropy(x, labels.to(x.device)), loss, [logits]
    yield (
        "linear_cross_entropy",
        lambda x, w: kernels.linear_cross_entropy(x, w, labels.to(x.device)),
        lambda x, w: loss(F.linear(x, w)),
        [x, head],
    )


def _outcome(function: Callable[..., Any], inputs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """([output], gradients) for an upstream gradient that is the same in every call, exact in every dtype."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    y = function(*inputs)
    upstream = torch.randint(1, 9, y.shape, generator=torch.Generator().manual_seed(1)) / 8
    return [y.detach()], list(torch.autograd.grad(y, inputs, upstream.to(y)))


def _relative_rms(found: list[Tensor], exact: list[Tensor]) -> float:
    """The largest over the tensors of rms(found - exact) / rms(exact)."""
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True))


def report(good: bool, text: str) -> bool:
    """Prints the outcome of a comparison and returns it."""
    print(f"{'ok    ' if good else 'FAILED'}  {text}", flush=True)
    return good


def report_same_weights(model: Any, reloaded: Any) -> bool:
    """Compares all weights, prints the outcome and returns it."""
    ours, theirs = model.state_dict(), reloaded.state_dict()
    same = ours.keys() == theirs.keys() and all(torch.equal(x, theirs[name]) for name, x in ours.items())
    parameters = f"{model.num_parameters():,}"
    return report(same, f"saved and loaded again: all {parameters} parameters are bit for bit the same")


if __name__ == "__main__":
    print(json.dumps(kernel_errors()))
