"""Supervised fine-tuning by hand: all that `ligermodels train sft` does on one device, in plain PyTorch.

    python examples/train_by_hand.py --out sums                    # a tiny random model learns to add, on the CPU
    python examples/train_by_hand.py Qwen/Qwen2.5-0.5B-Instruct chats.jsonl --out tuned --lr 2e-5

Each line of chats.jsonl is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}.
Prints the loss of each step, and writes tuned/model, for `ligermodels chat tuned/model`. The same command, run again
after a stop, continues from the last checkpoint. On the CPU, losses and weights are to the bit those of

    ligermodels train sft MODEL --data chats.jsonl --output-dir DIR --max-length 1024 --accumulation 2 --max-steps 100
"""

import argparse
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tiny
import torch
from torch import Tensor

import ligermodels
from ligermodels.training import AdamW, accumulate_in_place

LENGTH = 1024  # tokens of a forward, into which several chats are packed; a longer chat is cut
FORWARDS = 2  # forwards of a step, whose gradients add up
SAVE_EVERY = 5  # steps
SEED = 0
IGNORED = -100  # the label of a token that is not trained
SUMS = [[("user", f"{a}+{b}"), ("assistant", f"{a + b}")] for a in range(10) for b in range(10)]
CHATS = [[dict(role=role, content=content) for role, content in turns] for turns in SUMS]


def encode(tokenizer: ligermodels.Tokenizer, messages: list[dict[str, str]]) -> Tensor:
    """A chat [tokens, 2]: ids, and labels, which are the ids of what the assistant says, with the end of its turns."""
    text, spans = tokenizer.apply_chat_template(messages, tokenize=False), []
    for n in (n for n, message in enumerate(messages) if message["role"] == "assistant"):
        before = tokenizer.apply_chat_template(messages[:n], tokenize=False, add_generation_prompt=True)
        after = tokenizer.apply_chat_template(messages[: n + 1], tokenize=False)
        if not (text.startswith(after) and after.startswith(before)):
            raise SystemExit("the chat template changes earlier turns once others follow: the labels are not known")
        spans.append((len(before), len(after)))
    tokens = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)  # the template has the special ones
    said = [any(first < end and start < last for start, end in spans) for first, last in tokens["offset_mapping"]]
    ids = torch.tensor(tokens["input_ids"])
    return torch.stack([ids, torch.where(torch.tensor(said), ids, IGNORED)], 1)[:LENGTH]


def packs(chats: list[Tensor]) -> Iterator[list[Tensor]]:
    """The chats of each forward, without end. They follow from the seed: a run is resumed by skipping those it had."""
    for epoch in itertools.count():
        order = np.random.RandomState([SEED, epoch, 0]).permutation(len(chats))
        for start in range(0, len(chats), 1000):  # packed together: enough to choose from
            packed: list[list[Tensor]] = []
            window = [chats[n] for n in order[start : start + 1000]]
            trained = [chat for chat in window if (chat[:, 1] != IGNORED).any()]
            for chat in sorted(trained, key=lambda chat: -len(chat)):  # best fit: the longest first,
                fitting = [pack for pack in packed if sum(map(len, pack)) + len(chat) <= LENGTH]
                if not fitting:
                    packed.append([])
                max(fitting or packed[-1:], key=lambda pack: sum(map(len, pack))).append(chat)  # into the fullest
            shuffled = np.random.RandomState([SEED, epoch, start + 1]).permutation(len(packed))
            yield from (packed[n] for n in shuffled)  # again: the first packs have the longest chats


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a repository of the Hub or a folder; default a tiny one")
    parser.add_argument("chats", nargs="?", type=Path, help="a file of JSON lines; default sums")
    parser.add_argument("--out", type=Path, default=Path("tuned"), help="a folder for checkpoint and model")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=3e-3, help="a pretrained model wants about 2e-5")
    options = parser.parse_args(arguments)
    name, gpu = options.model or tiny.write_llama(), torch.cuda.is_available()
    tokenizer = ligermodels.Tokenizer.from_hub(name)
    chats = [json.loads(line)["messages"] for line in options.chats.open()] if options.chats else CHATS
    # On a GPU, weights are in bf16. The optimizer has 16 more bits of each, since small steps would be rounded away.
    model = ligermodels.load(name, dtype=torch.bfloat16 if gpu else torch.float32, device="cuda" if gpu else "cpu")
    accumulate_in_place(model.train())  # on a GPU, a matmul adds its gradient to .grad by itself
    parameters = sorted(model.parameters(), key=lambda p: p.dim() < 2)  # matrices first, as `train`: a norm sums them
    optimizer = AdamW(parameters, weight_decay=0.0, master_weights=gpu, max_grad_norm=1.0, seed=SEED)
    options.out.mkdir(parents=True, exist_ok=True)
    checkpoint, state = options.out / "checkpoint.pt", dict(step=0)
    if checkpoint.is_file():
        state = torch.load(checkpoint, map_location="cpu")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    forwards = itertools.islice(packs([encode(tokenizer, chat) for chat in chats]), state["step"] * FORWARDS, None)
    warmup, losses = math.ceil(0.03 * options.steps), []
    for step in range(state["step"], options.steps):
        done = (step - warmup) / max(1, options.steps - warmup)
        rate = (step + 1) / warmup if step < warmup else 1 - 0.5 * (1 - math.cos(math.pi * done))  # a cosine to 0
        for group in optimizer.param_groups:
            group["lr"] = options.lr * rate
        batches = list(itertools.islice(forwards, FORWARDS))
        count = sum((chat[:, 1] != IGNORED).sum() for pack in batches for chat in pack).to(model.device)
        loss = torch.zeros((), device=model.device)
        for pack in batches:
            ids, labels = torch.cat(pack).T.contiguous()[:, None].to(model.device)
            ends = torch.tensor([0, *map(len, pack)]).cumsum(0).int().to(model.device)  # no chat sees another
            part = model(ids, labels=labels, cu_seqlens=ends, max_seqlen=max(map(len, pack)), num_items_in_batch=count)
            part.loss.backward()
            loss += part.loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step + 1}: loss {losses[-1]:.4f}", flush=True)
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == options.steps:
            state = dict(step=step + 1, model=model.state_dict(), optimizer=optimizer.state_dict())
            torch.save(state, partial := checkpoint.with_suffix(".partial"))
            partial.replace(checkpoint)
    model.save_pretrained(options.out / "model")
    return losses


if __name__ == "__main__":
    main()
