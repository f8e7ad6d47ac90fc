"""Supervised fine-tuning on chats: loss on what the assistant says, conversations packed into rows without padding.

    python examples/sft.py                                                     # a tiny random model, on the CPU
    python examples/sft.py Qwen/Qwen2.5-0.5B-Instruct chats.jsonl --out tuned

Each line of chats.jsonl is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}.
"""

import argparse
import json
import random
from pathlib import Path

import tiny
import torch

import ligermodels
from ligermodels.training import AdamW

IGNORED = -100
CHATS = [[{"role": "user", "content": f"Say {word}."}, {"role": "assistant", "content": word}] for word in ("a", "bcd")]


def encode(tokenizer: ligermodels.Tokenizer, messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    """The ids of a conversation, and labels: the ids at what the assistant says and at the end of its turns."""
    ids, labels = [], []
    for n in (n for n, message in enumerate(messages) if message["role"] == "assistant"):
        prompt = tokenizer.apply_chat_template(messages[:n], add_generation_prompt=True)
        whole = tokenizer.apply_chat_template(messages[: n + 1])
        if whole[: len(prompt)] != prompt or prompt[: len(ids)] != ids:
            raise SystemExit("the chat template changes earlier turns once it has an answer: labels are not known")
        labels += [IGNORED] * (len(prompt) - len(ids)) + whole[len(prompt) :]
        ids = whole
    return ids, labels


def pack(chats: list[tuple[list[int], list[int]]], device: torch.device) -> dict[str, torch.Tensor]:
    """One row of several conversations. Positions that restart say where one begins: none sees another."""
    return {
        "input_ids": torch.tensor([[token for ids, _ in chats for token in ids]], device=device),
        "labels": torch.tensor([[label for _, labels in chats for label in labels]], device=device),
        "position_ids": torch.tensor([[n for ids, _ in chats for n in range(len(ids))]], device=device),
    }


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a repository of the Hub or a folder; default a tiny one")
    parser.add_argument("chats", nargs="?", type=Path, help="a file of JSON lines; default two short chats")
    parser.add_argument("--out", type=Path, help="a folder for the tuned checkpoint")
    parser.add_argument("--batch", type=int, default=4, help="conversations a row")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", type=float, default=3e-3, help="a pretrained model wants about 1e-5")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = options.model or tiny.write_llama()
    model = ligermodels.load(name, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32, device=device)
    tokenizer = ligermodels.Tokenizer.from_hub(name)
    chats = [json.loads(line)["messages"] for line in options.chats.open()] if options.chats else CHATS
    data = [encode(tokenizer, messages) for messages in chats]
    optimizer = AdamW(model.train().parameters(), lr=options.lr, max_grad_norm=1.0)
    losses = []
    for step in range(options.steps):
        loss = model(**pack(random.Random(step).choices(data, k=options.batch), device)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step}: loss {losses[-1]:.4f}", flush=True)
    if options.out:
        model.save_pretrained(options.out)  # the files of the tokenizer come along
    return losses


if __name__ == "__main__":
    main()
