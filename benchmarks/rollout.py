"""A step of GRPO, rollout and update timed separately: ours beside TRL's GRPOTrainer.

    python -m benchmarks.decode --rollout 64x8x128+256 --models llama-3.2-1b --out rollout.json

A case is PROMPTSxGROUPxPROMPT+NEW. Weights are random, of the config's sizes, in bf16 for both, so that nearly all
completions have NEW tokens: one id in the vocabulary stops them. Each baseline takes two steps; the second counts.
"update" is loss, backward and AdamW over all tokens of the rollout: ours packs rows of --tokens tokens, TRL pads
--tokens / (PROMPT + NEW) completions per forward. tokens/s count new tokens in the rollout, all tokens in the update.
"""

import argparse
import importlib.util
import random
import re
import tempfile
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks import harness
from benchmarks.harness import Row, synchronize, timed
from benchmarks.train_cases import MODELS, changed, ours as our_model, theirs as their_model
from ligermodels.recipes.data.examples import best_fit
from ligermodels.recipes.grpo import GRPO, GRPOOptions
from ligermodels.recipes.rewards import Rewards
from ligermodels.recipes.rollout import Completion, Prompt, sample
from ligermodels.recipes.steps import on_device
from ligermodels.training import AdamW

STOP = 5


def steps(options: argparse.Namespace) -> list[Row]:
    """The rows of ours and TRL's."""
    prompts, group, prompt, new = case = tuple(map(int, re.split(r"[x+]", options.rollout)))
    tokens, device, rows = options.tokens, options.device, []
    if options.dry:
        prompts, group, prompt, new = case = 2, 2, 8, 8
        tokens = 32
    for name, baseline in ((name, baseline) for name in options.models for baseline in (ours, trl)):
        row = {"model": name, "case": f"{prompts}x{group}x{prompt}+{new}", "baseline": baseline.__name__}
        rows.append(row)
        if baseline is trl and importlib.util.find_spec("trl") is None:
            row["note"] = "trl is not installed"
            continue
        harness.reset_peak(device)
        rollout, update = baseline(name, case, tokens, device, options.dry)
        row |= {
            "rollout s": rollout, "rollout tokens/s": prompts * group * new / rollout, "update s": update,
            "update tokens/s": prompts * group * (prompt + new) / update, "step s": rollout + update,
            "peak GiB": harness.peak_gib(device),
        }  # fmt: skip
        harness.announce(row)
        harness.free(device)
    return rows


Case = tuple[int, int, int, int]


def ours(name: str, case: Case, tokens: int, device: str, dry: bool) -> tuple[float, float]:
    prompts, group, length, new = case
    model = our_model(name, device, torch.float32 if dry else torch.bfloat16, tiny=dry).train()
    options = GRPOOptions(
        model=name, data="-", output_dir="-", reward_funcs=("-",), prompts=prompts, num_generations=group,
        max_completion_length=new, max_length=length + new, batch_tokens=tokens,
    )  # fmt: skip
    tokenizer = SimpleNamespace(pad_token_id=STOP, eos_token_ids=(STOP,))
    recipe = GRPO(options, tokenizer, rewards=Rewards({"reward": reward}))
    optimizer = AdamW(model.parameters(), lr=1e-6, max_grad_norm=1.0)
    draw = random.Random(0)
    asked = [[draw.randrange(6, model.config.vocab_size) for _ in range(length)] for _ in range(prompts)]

    def roll(seed: int) -> list[list[int]]:
        how: dict[str, Any] = dict(max_new_tokens=new, temperature=1.0, stop_ids=(STOP,), seed=[seed])
        return sample(model, asked, group, **how)

    def update(found: list[list[int]]) -> None:
        values = reward(found)
        completions = [
            Completion(Prompt(asked[n // group], []), ids, "", True, advantage=values[n] - 3)
            for n, ids in enumerate(found)
        ]
        bins = best_fit([one.prompt.size + len(one.ids) for one in completions], tokens)
        made = (recipe.batch_of([completions[n] for n in bin]) for bin in bins)
        batches = [on_device(batch, torch.device(device)) for batch in made]
        count = torch.stack([recipe.count(batch) for batch in batches]).sum(0).clamp(min=1)
        for batch in batches:
            recipe.loss(model, batch, count)[0].backward()
        optimizer.step()
        optimizer.zero_grad()

    for seed in range(2):
        first, found = timed(lambda seed=seed: roll(seed), device)
        second, _ = timed(lambda found=found: update(found), device)
    model.release()
    return first, second


def reward(completion_ids: Sequence[Sequence[int]], **others: Any) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


def trl(name: str, case: Case, tokens: int, device: str, dry: bool) -> tuple[float, float]:
    """TRL's trainer, whose rollout is transformers' generate. Its own work between the two counts as update."""
    import datasets
    import tokenizers
    import transformers
    import trl

    prompts, group, length, new = case
    config = changed(
        MODELS[name].config, {**(MODELS[name].tiny if dry else {}), "eos_token_id": STOP, "pad_token_id": STOP}
    )
    model = their_model(name, device, torch.float32 if dry else torch.bfloat16, config)
    draw = random.Random(0)
    words = {f"w{n}": n for n in range(model.config.vocab_size)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=f"w{STOP}", pad_token=f"w{STOP}", unk_token="w0"
    )
    rows = [
        {"prompt": " ".join(f"w{draw.randrange(6, len(words))}" for _ in range(length))} for _ in range(2 * prompts)
    ]
    rows_a_forward = max(group, tokens // (length + new) // group * group)
    while prompts * group % rows_a_forward:
        rows_a_forward -= group
    with tempfile.TemporaryDirectory() as folder:
        arguments = trl.GRPOConfig(
            folder, max_steps=2, per_device_train_batch_size=rows_a_forward, num_generations=group,
            gradient_accumulation_steps=prompts * group // rows_a_forward, max_completion_length=new,
            bf16=False, gradient_checkpointing=False, use_cpu=device == "cpu", report_to=[], save_strategy="no",
            disable_tqdm=True, optim="adamw_torch_fused",
        )  # fmt: skip
        trainer = trl.GRPOTrainer(
            model, args=arguments, reward_funcs=reward, train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
        )  # fmt: skip
        rolled: list[float] = []
        generate = trainer._generate_single_turn

        def timed_generate(*given: Any) -> Any:
            seconds, found = timed(lambda: generate(*given), device)
            rolled.append(seconds)
            return found

        trainer._generate_single_turn = timed_generate
        ends: list[float] = []

        class Ends(transformers.TrainerCallback):  # type: ignore[misc]
            def on_step_end(self, *given: Any, **named: Any) -> None:
                synchronize(device)
                ends.append(time.perf_counter())

        trainer.add_callback(Ends())
        trainer.train()
    return rolled[-1], ends[-1] - ends[-2] - rolled[-1]
