"""`ligermodels demo`: the whole path in under a minute, without GPU, network or downloads.

A tokenizer and a small Llama are made from the bundled text and written in Hugging Face's layout, loaded
through the public API, trained, saved, loaded again and compared bit for bit; the trained model writes; the
kernels are measured against fp64 beside PyTorch's own ops. On a GPU a training step is timed with the kernels
and without.

Measurements run in child processes (`python -m ligermodels.cli.demo <what>`, which prints JSON): the interpreter
of Triton is chosen when triton is imported, and peak memory is a process's.
"""

import hashlib
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import ligermodels
from ligermodels.errors import InputError
from ligermodels.kernels._triton import HAS_TRITON

TEXT = Path(__file__).with_name("demo_text.txt")
END = "<|end|>"  # stands before the first fable, between fables, and stops generation
PROMPT = "The Crow and the"
BATCH, LENGTH = 4, 128  # small steps and many: on a CPU that learns most in a minute

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
# the model has only seen titles and the fables under them: what the user says is taken for a title
CHAT_TEMPLATE = "{{ bos_token }}{{ messages[-1]['content'] | trim }}{{ '\\n\\n' }}"


def run(*, seconds: float, keep: str | Path | None) -> bool:
    """Prints the demo and says whether all its proofs held.

    seconds: time for training. keep: the folder for the trained checkpoint; None: a temporary one.
    Raises InputError if `keep` exists and is not empty.
    """
    if not 0 < seconds < math.inf:
        raise InputError(f"--seconds {seconds} must be a positive number")
    if keep is not None and Path(keep).exists() and (not Path(keep).is_dir() or any(Path(keep).iterdir())):
        raise InputError(f"--keep {keep} is there already; name a folder that is new or empty")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.cuda.get_device_name() if device == "cuda" else "one CPU thread"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for ops this small more bring little, and on a busy machine they wait for each other
    try:
        return _run(seconds, keep, device, where)
    finally:
        torch.set_num_threads(threads)


def _run(seconds: float, keep: str | Path | None, device: str, where: str) -> bool:
    good = True
    print(bold(f"ligermodels {ligermodels.__version__} demo") + f"   {where}, torch {torch.__version__}")

    with tempfile.TemporaryDirectory(prefix="ligermodels-") as scratch:
        made, again = Path(scratch) / "made", Path(scratch) / "again"
        write_checkpoint(made)
        tokenizer = ligermodels.Tokenizer.from_hub(made)
        model = ligermodels.load(made, device=device, progress=False)
        heading("A checkpoint in Hugging Face's layout")
        print(
            f"{type(model).__name__}, {model.num_parameters():,} parameters, with a byte-level BPE tokenizer "
            f"of {model.config.vocab_size:,} tokens"
        )
        model.save_pretrained(again)
        same = digest(made) == digest(again)
        good &= report(same, f"loaded and saved again: model.safetensors byte for byte the same ({digest(again)[:12]})")

        heading(f"Training on {TEXT.stat().st_size / 1000:.0f} kB of fables, {seconds:g} s")
        losses, speed = train(model, tokenizer, seconds)
        print(
            f"loss {losses[0]:.2f} {sparkline(losses)} {losses[-1]:.2f}   "
            f"{len(losses)} steps, {speed:,.0f} tokens/s, {memory(device)}"
        )

        folder = Path(keep or tempfile.mkdtemp(prefix="ligermodels-demo-")).resolve()
        model.save_pretrained(folder)
    trained = ligermodels.load(folder, device=device, progress=False)
    pairs = list(zip(model.eval().state_dict().items(), trained.state_dict().items(), strict=True))
    same = all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)
    good &= report(same, f"saved, loaded again: all {model.num_parameters():,} parameters bit for bit the same")
    ids = torch.tensor([tokenizer.encode(PROMPT)], device=device)
    with torch.no_grad():
        same = torch.equal(model(ids).logits, trained(ids).logits)
    good &= report(same, "and the same logits, to the last bit")

    passes = len(losses) * BATCH * LENGTH / len(text_ids(tokenizer))
    heading(f"What it writes now, after {passes:.0f} passes over the text (temperature 0.5, seed 0)")
    start = time.perf_counter()
    out = trained.generate(ids, max_new_tokens=240, temperature=0.5, seed=0)
    speed = (out.shape[1] - ids.shape[1]) / (time.perf_counter() - start)
    for paragraph in tokenizer.decode(out[0].tolist(), skip_special_tokens=True).strip().split("\n"):
        print(textwrap.fill(paragraph, 100, initial_indent="  | ", subsequent_indent="  | ") or "  |")
    print(dim(f"{speed:,.0f} tokens/s"))

    good &= print_kernel_errors(device)
    if device == "cuda":
        print_training_steps()

    heading("Next")
    quoted = shlex.quote(str(folder))
    print(f"ligermodels generate {quoted} --prompt 'The Wolf Who' --temperature 0.5")
    print(f"ligermodels chat {quoted}    # type a title, such as The Snail and the Race")
    print(f"ligermodels inspect {quoted}")
    return good


# A checkpoint from nothing


def write_checkpoint(folder: Path) -> None:
    """A Llama with random weights and a tokenizer trained on the bundled text, as the Hub would have them."""
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
    model = ligermodels.Llama.from_config(
        {**CONFIG, **special, "vocab_size": bpe.get_vocab_size()}, device="cpu", seed=0
    )
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


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


# Training


def fables() -> list[str]:
    """The bundled text, cut before every title: a line with an empty line behind it."""
    lines = TEXT.read_text("utf-8").split("\n")
    starts = [i for i in range(len(lines) - 1) if lines[i] and not lines[i + 1] and not lines[i].endswith(".")]
    return ["\n".join(lines[a:b]).strip() for a, b in zip(starts, [*starts[1:], len(lines)], strict=True)]


def text_ids(tokenizer: Any) -> list[int]:
    """The fables one behind the other, the end token before each."""
    return [i for fable in fables() for i in tokenizer.encode(fable + "\n")]


def train(model: Any, tokenizer: Any, seconds: float) -> tuple[list[float], float]:
    """AdamW on windows of the text for `seconds`: the loss of each step, and tokens per second.

    Half of the windows begin with a fable, as a prompt does.
    """
    ids = torch.tensor(text_ids(tokenizer), device=model.device)
    beginnings = (ids[:-LENGTH] == tokenizer.bos_token_id).nonzero().flatten().cpu()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    losses: list[float] = []
    model.train()
    start = time.perf_counter()
    with LiveLine() as line:
        while (elapsed := time.perf_counter() - start) < seconds:
            rate = 5e-3 * min(1.0, (len(losses) + 1) / 10) * (1 - 0.95 * elapsed / seconds)
            for group in optimizer.param_groups:
                group["lr"] = rate
            anywhere = torch.randint(len(ids) - LENGTH, (BATCH // 2,), generator=generator)
            titles = beginnings[torch.randint(len(beginnings), (BATCH // 2,), generator=generator)]
            starts = torch.cat([anywhere, titles])[:, None]
            batch = ids[(starts + torch.arange(LENGTH)).to(ids.device)]
            loss = model(batch, labels=batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            speed = len(losses) * BATCH * LENGTH / (time.perf_counter() - start)
            line.show(
                f"{bar(elapsed / seconds)} step {len(losses):4d}  loss {losses[-1]:.3f}  "
                f"{speed:8,.0f} tokens/s  {memory(model.device.type)}"
            )
    return losses, speed


# Kernels against fp64, beside PyTorch's own ops


def print_kernel_errors(device: str) -> bool:
    heading("Kernel against fp64, beside PyTorch's own ops in the same dtype (error / magnitude, rms)")
    if not HAS_TRITON:
        print("Triton is not installed: every op runs as plain PyTorch. On Linux: pip install triton")
        return True
    rows = child("kernel-errors", TRITON_INTERPRET="0" if device == "cuda" else "1")
    if isinstance(rows, str):
        return report(False, rows)
    how = "bfloat16 on the GPU" if device == "cuda" else "float32, small, through Triton's interpreter"
    print(dim(f"{'':22}{'output':^24}{'gradients':^24}"))
    print(dim(f"{'':22}{'kernel':>12}{'eager':>12}{'kernel':>12}{'eager':>12}") + f"   {how}")
    for row in rows:
        print(f"{row['op']:22}" + "".join(f"{error:12.1e}" for error in row["errors"]))
    wrong = [row["op"] for row in rows if not accurate(row["errors"])]
    return report(not wrong, f"too far from fp64: {', '.join(wrong)}" if wrong else "as near to fp64 as the eager ops")


def accurate(errors: Sequence[float]) -> bool:
    """Whether the kernel's errors, of output and gradients, are those of the eager op: at most twice as large.

    A few roundings of fp32 are allowed where the eager op has next to none.
    """
    kernel_output, eager_output, kernel_gradients, eager_gradients = errors
    pairs = ((kernel_output, eager_output), (kernel_gradients, eager_gradients))
    return all(kernel <= 2 * eager + 1e-6 for kernel, eager in pairs)


def kernel_errors() -> list[dict[str, Any]]:
    """[{op, errors: (output: kernel, eager; gradients: kernel, eager)}], rms relative to fp64.

    All start from the same numbers: what the dtype holds of a random draw.
    """
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    torch.manual_seed(0)
    return [
        {"op": op, "errors": errors(kernel, eager, inputs, device, dtype)}
        for op, kernel, eager, inputs in kernel_cases(large=on_gpu)
    ]


def kernel_cases(*, large: bool) -> Iterator[tuple[str, Callable[..., Any], Callable[..., Tensor], list[Tensor]]]:
    """(op, through the kernel, in PyTorch's own ops with Llama's usual casts, inputs in fp64)."""
    from ligermodels import kernels

    rows, size, vocab, heads, head_dim = (1024, 2048, 32000, 8, 64) if large else (16, 96, 200, 2, 16)
    angles = torch.arange(rows)[:, None] / 10000 ** (torch.arange(0, head_dim, 2) / head_dim)
    cos, sin = angles.cos()[None], angles.sin()[None]
    labels = torch.randint(vocab, (rows,))

    def wide(x: Tensor) -> Tensor:
        return x if x.dtype == torch.float64 else x.float()

    def rms_norm_eager(x: Tensor, weight: Tensor) -> Tensor:
        return weight * F.rms_norm(wide(x), (size,), eps=1e-6).to(x.dtype)

    def rope(qkv: Tensor) -> Tensor:
        tables = (table.float().to(qkv.device) for table in (cos, sin))
        return torch.cat(kernels.rope(qkv, *tables, num_heads=heads, num_kv_heads=heads), 2)

    def rope_eager(qkv: Tensor) -> Tensor:
        x = qkv.view(1, rows, 3 * heads, head_dim)
        c, s = (torch.cat([table, table], -1).to(x)[:, :, None] for table in (cos, sin))
        low, high = x.chunk(2, -1)
        turned = x * c + torch.cat([-high, low], -1) * s
        return torch.cat([turned[:, :, : 2 * heads], x[:, :, 2 * heads :]], 2)

    def glu_eager(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    x, weight = torch.randn(rows, size, dtype=torch.float64), torch.randn(size, dtype=torch.float64)
    yield "rms_norm", kernels.rms_norm, rms_norm_eager, [x, weight]
    yield "rope", rope, rope_eager, [torch.randn(1, rows, 3 * heads * head_dim, dtype=torch.float64)]
    yield "glu (silu)", kernels.glu, glu_eager, [torch.randn(rows, 2 * size, dtype=torch.float64)]
    yield (
        "cross_entropy",
        lambda logits: kernels.cross_entropy(logits, labels.to(logits.device)),
        lambda logits: F.cross_entropy(wide(logits), labels.to(logits.device)),
        [3 * torch.randn(rows, vocab, dtype=torch.float64)],
    )
    yield (
        "linear_cross_entropy",
        lambda x, w: kernels.linear_cross_entropy(x, w, labels.to(x.device)),
        lambda x, w: F.cross_entropy(wide(F.linear(x, w)), labels.to(x.device)),
        [x, 3 * torch.randn(vocab, size, dtype=torch.float64) / size**0.5],
    )


def errors(
    kernel: Callable[..., Any],
    eager: Callable[..., Tensor],
    inputs: list[Tensor],
    device: str,
    dtype: torch.dtype,
) -> tuple[float, ...]:
    """(output through the kernel, output through eager, gradients likewise): errors relative to fp64."""
    inputs = [x.to(device, dtype) for x in inputs]
    exact = outcome(eager, [x.double() for x in inputs])
    measured = [outcome(function, inputs) for function in (kernel, eager)]
    return tuple(relative_rms(got[i], exact[i]) for i in (0, 1) for got in measured)


def outcome(function: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """([output], gradients) for an upstream gradient that is the same in every call, exact in every dtype."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    y = function(*inputs)
    upstream = (
        torch.randint(-8, 9, y.shape, generator=torch.Generator().manual_seed(1)) / 8 if y.dim() else torch.ones(())
    )
    return [y.detach()], list(torch.autograd.grad(y, inputs, upstream.to(y)))


def relative_rms(got: list[Tensor], exact: list[Tensor]) -> float:
    """The largest over the tensors of rms(got - exact) / rms(exact)."""
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, exact, strict=True))


# A training step with the kernels and without


def print_training_steps() -> None:
    heading("A training step: 4 x 1024 tokens, 260 M parameters, vocabulary 128,256, bfloat16, AdamW")
    results = {name: child(name) for name in ("step-eager", "step-fused")}
    print(dim(f"{'':22}{'tokens/s':>12}{'peak memory':>14}"))
    for name, words in (("step-eager", "plain PyTorch"), ("step-fused", "kernels")):
        result = results[name]
        if isinstance(result, str):
            print(f"{words:22}{result}")
        else:
            print(f"{words:22}{result['tokens_per_second']:12,.0f}{result['peak_bytes'] / 2**30:10.2f} GiB")
    if not any(isinstance(result, str) for result in results.values()):
        eager, fused = results["step-eager"], results["step-fused"]
        print(
            f"{fused['tokens_per_second'] / eager['tokens_per_second']:.2f} times the speed, "
            f"{fused['peak_bytes'] / eager['peak_bytes']:.2f} of the memory"
        )


def training_step(*, fused: bool) -> dict[str, float]:
    """Tokens per second (median of 10 steps) and peak bytes of a training step on the GPU."""
    if not fused:
        take_references()
    vocab = 128256
    config = {
        **CONFIG, "vocab_size": vocab, "hidden_size": 1024, "intermediate_size": 4096,
        "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8,
        "max_position_embeddings": 2048, "initializer_range": 0.02,
    }  # fmt: skip
    model = ligermodels.Llama.from_config(config, dtype=torch.bfloat16, device="cuda").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(vocab, (4, 1024), device="cuda")
    times = []
    for step in range(13):
        start = time.perf_counter()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        if step >= 3:
            times.append(time.perf_counter() - start)
    return {
        "tokens_per_second": ids.numel() / sorted(times)[len(times) // 2],
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }


def take_references() -> None:
    """Lets every op of this process run in plain PyTorch, as it does where there is no GPU.

    The loss is F.cross_entropy over fp32 logits, which is faster and smaller than our reference of it.
    """
    from ligermodels import layers

    for name, module in list(sys.modules.items()):
        if name.startswith("ligermodels.kernels.") and hasattr(module, "use_triton"):
            module.use_triton = lambda x: False  # type: ignore[attr-defined]

    def loss(x: Tensor, weight: Tensor, labels: Tensor, **_: Any) -> Tensor:
        return F.cross_entropy(F.linear(x, weight).flatten(0, -2).float(), labels.flatten())

    layers.head.linear_cross_entropy = loss


def child(what: str, **environment: str) -> Any:
    """What `python -m ligermodels.cli.demo <what>` measures, or the last line of its error."""
    done = subprocess.run(
        [sys.executable, "-m", "ligermodels.cli.demo", what],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return json.loads(done.stdout.splitlines()[-1])


# The terminal


def bold(text: str) -> str:
    return styled(text, 1)


def dim(text: str) -> str:
    return styled(text, 2)


def styled(text: str, code: int) -> str:
    return f"\033[{code}m{text}\033[0m" if sys.stdout.isatty() and "NO_COLOR" not in os.environ else text


def heading(text: str) -> None:
    print("\n" + bold(text), flush=True)


def report(good: bool, text: str) -> bool:
    print(f"{styled('ok', 32) if good else styled('FAILED', 31)}  {text}")
    return good


def bar(share: float, width: int = 20) -> str:
    full = round(min(share, 1.0) * width)
    return "█" * full + "░" * (width - full)


def sparkline(values: list[float], width: int = 32) -> str:
    """The means of `width` even stretches of `values` as blocks of eight heights."""
    width = min(width, len(values))
    means = [
        sum(part) / len(part)
        for i in range(width)
        if (part := values[i * len(values) // width : (i + 1) * len(values) // width])
    ]
    low, span = min(means), max(max(means) - min(means), 1e-9)
    return "".join("▁▂▃▄▅▆▇█"[int((value - low) / span * 7.999)] for value in means)


def memory(device: str) -> str:
    """The peak of this process: of the GPU's memory where it computes there, else resident in main memory."""
    if device == "cuda":
        return f"{torch.cuda.max_memory_allocated() / 2**20:,.0f} MiB on the GPU"
    try:
        import resource
    except ImportError:  # Windows
        return ""
    unit = 1 if sys.platform == "darwin" else 1024
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20:,.0f} MiB"


class LiveLine:
    """One line on stderr that is written over; where stderr is no terminal, a line every few seconds."""

    def __enter__(self) -> "LiveLine":
        self.live, self.shown, self.pause = sys.stderr.isatty(), 0.0, 0.1 if sys.stderr.isatty() else 5.0
        return self

    def show(self, text: str) -> None:
        if time.monotonic() - self.shown >= self.pause:
            self.shown = time.monotonic()
            width = shutil.get_terminal_size().columns - 1
            print(
                f"\r\033[K{text[:width]}" if self.live else text,
                end="" if self.live else "\n",
                file=sys.stderr,
                flush=True,
            )

    def __exit__(self, *_: object) -> None:
        if self.live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    measurements: dict[str, Callable[[], Any]] = {
        "kernel-errors": kernel_errors,
        "step-fused": lambda: training_step(fused=True),
        "step-eager": lambda: training_step(fused=False),
    }
    print(json.dumps(measurements[sys.argv[1]]()))
