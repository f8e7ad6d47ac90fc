"""Reinforcement learning by hand (GRPO): all that `ligermodels train grpo` does on one device, in plain PyTorch.

    python examples/train_by_hand.py --out sums                 # a tiny model learns to add, on the CPU, and not well
    python examples/grpo_by_hand.py sums/model --out better     # by trying: from 46 % right answers to 74 %
    python examples/grpo_by_hand.py Qwen/Qwen2.5-0.5B-Instruct rows.jsonl --out tuned --lr 1e-6

Each line of rows.jsonl is {"prompt": [{"role": "user", "content": "3+4"}], "answer": "7"}. A rollout samples several
completions of each of some prompts, and `reward` below judges them. A step makes those likelier that are better than
others of the same prompt. Prints reward and loss of each step, and writes tuned/model. The same command, run again
after a stop, continues from the last checkpoint. On the CPU, completions, losses and weights are to the bit those of

    ligermodels train grpo MODEL --data rows.jsonl --reward-funcs examples/grpo_by_hand.py:reward --output-dir DIR \\
        --prompts 16 --num-generations 16 --max-completion-length 4 --max-length 4096 --max-steps 100
"""

import argparse
import copy
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import ligermodels
from ligermodels.generation import generate_many
from ligermodels.training import AdamW, accumulate_in_place

PROMPTS = 16  # of a rollout
SAMPLES = 16  # completions of each prompt
NEW_TOKENS = 4  # of a completion, at most
ITERATIONS = 1  # steps that train on the completions of a rollout
LENGTH = 4096  # tokens of a forward, into which completions are packed, each after its prompt
LOW, HIGH = 0.2, 0.28  # shares by which the probability of a token may fall or rise after it was sampled
BETA = 0.0  # weight of the divergence from the model as it was before the run
SAVE_EVERY = 5  # rollouts
SEED = 0
IGNORED = -100  # the label of a token that is not trained
SUMS = [(f"{a}+{b}", f"{a + b}") for a in range(10) for b in range(10)]
ROWS = [{"prompt": [{"role": "user", "content": question}], "answer": answer} for question, answer in SUMS]


def reward(completions: list[list[dict[str, str]]], answer: list[str], **others: Any) -> list[float]:
    """1 for a right sum, else 0. A completion is a list of one message; answer is the column of the rows."""
    return [float(said["content"] == right) for (said,), right in zip(completions, answer, strict=True)]


def prompts(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows, epoch after epoch without end. They follow from the seed: a run is resumed by skipping those it had."""
    for epoch in itertools.count():
        order = np.random.RandomState([SEED, epoch, 0]).permutation(len(rows))
        for start in range(0, len(rows), 1000):
            window = order[start : start + 1000]
            # `train` shuffles the batches of such a window as well, and here each is a prompt.
            for n in np.random.RandomState([SEED, epoch, start + 1]).permutation(len(window)):
                yield rows[window[n]]


def best_fit(sizes: list[int]) -> list[list[int]]:
    """The completions of each forward: the longest first, each into the fullest forward that has space for it."""
    packs: list[list[int]] = []
    for n in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        fitting = [pack for pack in packs if sum(sizes[m] for m in pack) + sizes[n] <= LENGTH]
        if not fitting:
            packs.append([])
        max(fitting or packs[-1:], key=lambda pack: sum(sizes[m] for m in pack)).append(n)
    return packs


def logprobs(model: Any, batch: dict[str, Any]) -> Tensor:
    """The log probability of each token of the completions, [completions, tokens of the longest], 0 after an end."""
    found = model(**batch["inputs"], return_logprobs=True).logprobs[0]
    return pad_sequence([found[first:last] for first, last in batch["places"]], batch_first=True)


def main(arguments: list[str] | None = None) -> list[tuple[float, float]]:
    """The mean reward and the loss of each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a repository of the Hub or a folder")
    parser.add_argument("rows", nargs="?", type=Path, help="a file of JSON lines; default sums")
    parser.add_argument("--out", type=Path, default=Path("better"), help="a folder for checkpoint and model")
    parser.add_argument("--rollouts", type=int, default=100)
    parser.add_argument("--lr", type=float, default=5e-4, help="a pretrained model wants about 1e-6")
    options = parser.parse_args(arguments)
    tokenizer = ligermodels.Tokenizer.from_hub(options.model)
    rows = [json.loads(line) for line in options.rows.open()] if options.rows else ROWS

    # On a GPU, weights are in bf16. The optimizer has 16 more bits of each, since small steps would be rounded away.
    gpu = torch.cuda.is_available()
    dtype, device = (torch.bfloat16, "cuda") if gpu else (torch.float32, "cpu")
    model = ligermodels.load(options.model, dtype=dtype, device=device).train()
    reference = copy.deepcopy(model).eval() if BETA else None
    accumulate_in_place(model)  # on a GPU, a matmul adds its gradient to .grad by itself
    parameters = sorted(model.parameters(), key=lambda p: p.dim() < 2)  # matrices first, as `train`: a norm sums them
    optimizer = AdamW(parameters, weight_decay=0.0, master_weights=gpu, max_grad_norm=1.0, seed=SEED)

    options.out.mkdir(parents=True, exist_ok=True)
    checkpoint, begin = options.out / "checkpoint.pt", 0
    if checkpoint.is_file():
        state = torch.load(checkpoint, map_location="cpu")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["rollouts"]
    data = itertools.islice(prompts(rows), begin * PROMPTS, None)
    steps, history = options.rollouts * ITERATIONS, []
    warmup = math.ceil(0.03 * steps)
    for rollout in range(begin, options.rollouts):
        # The model as it is now answers. Options that its generation_config.json may have are off, since the
        # probabilities that are trained must be those that were drawn from.
        asked = list(itertools.islice(data, PROMPTS))
        asks = [tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True) for row in asked]
        off = dict.fromkeys(("top_k", "top_p", "min_p", "repetition_penalty", "no_repeat_ngram_size"))
        draws = np.random.SeedSequence((SEED, rollout, 0, 0)).generate_state(1, np.uint64)  # as in `train`
        said = generate_many(
            model.eval(), asks, batch_size=PROMPTS * SAMPLES, num_return_sequences=SAMPLES, max_new_tokens=NEW_TOKENS,
            eos_token_id=list(tokenizer.chat_stop_ids), do_sample=True, temperature=1.0, seed=int(draws[0]), **off,
        )  # fmt: skip
        model.train()

        # An advantage: by how many standard deviations a completion is better than the mean of its prompt.
        texts = [tokenizer.decode(ids.tolist(), skip_special_tokens=True) for ids in said]
        messages = [[{"role": "assistant", "content": text}] for text in texts]
        rewards = reward(messages, [row["answer"] for row in asked for _ in range(SAMPLES)])
        groups = torch.tensor(rewards).reshape(PROMPTS, SAMPLES)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()

        batches, sizes = [], [len(asks[n // SAMPLES]) + len(ids) for n, ids in enumerate(said)]
        for pack in best_fit(sizes):
            pairs = [(torch.tensor(asks[n // SAMPLES]), said[n]) for n in pack]
            labels = [part for ask, ids in pairs for part in (torch.full_like(ask, IGNORED), ids)]
            ends = [0, *itertools.accumulate(sizes[n] for n in pack)]
            inputs = dict(
                input_ids=torch.cat([part for pair in pairs for part in pair])[None].to(device),
                labels=torch.cat(labels)[None].to(device),
                cu_seqlens=torch.tensor(ends, dtype=torch.int32, device=device),
                max_seqlen=max(sizes[n] for n in pack),
            )
            # A token's log probability stands where it is predicted, one place before it.
            places = [(end - 1 - len(said[n]), end - 1) for n, end in zip(pack, ends[1:], strict=True)]
            gains = pad_sequence([advantages[n].expand(len(said[n])) for n in pack], batch_first=True).to(device)
            batches.append(dict(inputs=inputs, places=places, advantages=gains))

        count = torch.tensor(float(sum(map(len, said))), device=device)
        for step in range(rollout * ITERATIONS, (rollout + 1) * ITERATIONS):
            done = (step - warmup) / max(1, steps - warmup)
            rate = (step + 1) / warmup if step < warmup else 1 - 0.5 * (1 - math.cos(math.pi * done))  # a cosine to 0
            for group in optimizer.param_groups:
                group["lr"] = options.lr * rate
            loss = torch.zeros((), device=device)
            for batch in batches:
                logp = logprobs(model, batch)
                sampled = batch.setdefault("sampled", logp.detach())  # in the first step nothing has changed yet
                ratio = (logp - sampled).exp()
                bounded = ratio.clamp(1 - LOW, 1 + HIGH)
                losses = -torch.minimum(ratio * batch["advantages"], bounded * batch["advantages"])
                if reference is not None:
                    with torch.no_grad():
                        before = logprobs(reference, batch)
                    # An estimate of the KL divergence that is never negative: http://joschu.net/blog/kl-approx.html
                    losses = losses + BETA * (ratio * ((before - logp).exp() - (before - logp) - 1))
                part = losses.sum() / count  # the mean over all tokens of the step
                part.backward()
                loss += part.detach()
            optimizer.step()
            optimizer.zero_grad()
            history.append((sum(rewards) / len(rewards), loss.item()))
            print(f"step {step + 1}: reward {history[-1][0]:.3f}, loss {history[-1][1]:.4f}", flush=True)
        if (rollout + 1) % SAVE_EVERY == 0 or rollout + 1 == options.rollouts:
            state = dict(rollouts=rollout + 1, model=model.state_dict(), optimizer=optimizer.state_dict())
            torch.save(state, partial := checkpoint.with_suffix(".partial"))
            partial.replace(checkpoint)  # a stop leaves the old checkpoint or the new one, and never a part
    model.save_pretrained(options.out / "model")
    return history


if __name__ == "__main__":
    main()
