"""Direct preference optimisation: a loop of plain PyTorch, no trainer.

    python examples/dpo.py                                                     # a tiny random model, on the CPU
    python examples/dpo.py Qwen/Qwen2.5-0.5B-Instruct pairs.jsonl --out tuned

Each line of pairs.jsonl is {"prompt": "...", "chosen": "...", "rejected": "..."}. The reference costs a second model in
memory and one forward a step; its log probabilities can as well be computed once, before training.
"""

import argparse
import copy
import json
import random
from pathlib import Path

import tiny
import torch
from torch.nn.utils.rnn import pad_sequence

import ligermodels
from ligermodels.layers import dpo_loss, sum_per_sequence
from ligermodels.training import AdamW

IGNORED = -100
BETA = 0.1
PAIRS = [{"prompt": f"{n} + {n}?", "chosen": f"{2 * n}.", "rejected": f"maybe {n}"} for n in (1, 2, 3)]


def encode(tokenizer: ligermodels.Tokenizer, prompt: str, answer: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids of prompt and answer, and the labels: the ids of the answer."""
    question = [{"role": "user", "content": prompt}]
    before = tokenizer.apply_chat_template(question, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template([*question, {"role": "assistant", "content": answer}])
    if whole[: len(before)] != before:
        raise SystemExit("the chat template changes the prompt once it has an answer: labels are not known")
    return torch.tensor(whole), torch.tensor([IGNORED] * len(before) + whole[len(before) :])


def answer_logps(model: torch.nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The log probability of each answer. The logits are never whole: the head returns those of the labels."""
    return sum_per_sequence(model(ids, labels=labels, use_cache=False, return_logprobs=True).logprobs)


def main(arguments: list[str] | None = None) -> list[dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a repository of the Hub or a folder; default a tiny one")
    parser.add_argument("pairs", nargs="?", type=Path, help="a file of JSON lines; default three short pairs")
    parser.add_argument("--out", type=Path, help="a folder for the tuned checkpoint")
    parser.add_argument("--batch", type=int, default=4, help="pairs a step")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", type=float, default=1e-3, help="a pretrained model wants about 1e-6")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = options.model or tiny.write_llama()
    policy = ligermodels.load(name, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32, device=device)
    tokenizer = ligermodels.Tokenizer.from_hub(name)
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    pairs = [json.loads(line) for line in options.pairs.open()] if options.pairs else PAIRS
    optimizer = AdamW(policy.train().parameters(), lr=options.lr, max_grad_norm=1.0)
    metrics = []
    for step in range(options.steps):
        batch = random.Random(step).choices(pairs, k=options.batch)
        encoded = [encode(tokenizer, pair["prompt"], pair[kind]) for kind in ("chosen", "rejected") for pair in batch]
        ids = pad_sequence([ids for ids, _ in encoded], batch_first=True).to(device)  # what is on the right is not seen
        labels = pad_sequence([labels for _, labels in encoded], batch_first=True, padding_value=IGNORED).to(device)
        with torch.no_grad():
            ref = answer_logps(reference, ids, labels)
        logps = answer_logps(policy, ids, labels)
        loss = dpo_loss(*logps.chunk(2), *ref.chunk(2), beta=BETA).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        chosen, rejected = (BETA * (logps.detach() - ref)).chunk(2)  # the rewards of DPO
        metrics.append({"loss": loss.item(), "margin": (chosen - rejected).mean().item()})
        print(f"step {step}: loss {loss:.4f}, margin {metrics[-1]['margin']:.3f}", flush=True)
    if options.out:
        policy.save_pretrained(options.out)  # the files of the tokenizer come along
    return metrics


if __name__ == "__main__":
    main()
