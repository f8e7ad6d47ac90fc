"""Seconds of a step of GRPO, rollout and update apart: ours, beside TRL's GRPOTrainer or transformers' generate.

    python -m benchmarks.rollout --out benchmarks/results/rollout.json
    python -m benchmarks.rollout --baselines ours,hf     # where TRL is not installed: its rollout alone
    python -m benchmarks.rollout --dry                   # a tiny model, also on a CPU

A case is PROMPTSxGROUPxPROMPT+NEW. Weights are random, of the config's sizes, in bf16, so that one token in a
vocabulary stops a completion: nearly all have NEW tokens. Everyone takes two steps, of which the second
counts. "update" is loss, backward and AdamW over all tokens of the rollout; ours packs rows of --tokens tokens, and TRL
pads --tokens / (PROMPT + NEW) completions a forward, in the same bf16 weights. tokens/s count new tokens in the
rollout, and all tokens in the update.
"""

import argparse
import gc
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from benchmarks.common import environment, heading, table, write_json
from benchmarks.decode import make, synchronize
from benchmarks.train_cases import MODELS, changed
from ligermodels.generation import release_graphs
from ligermodels.recipes.grpo import PolicyLoss, policy_counts
from ligermodels.recipes.loop import Batch, on_device
from ligermodels.recipes.options import GRPOOptions
from ligermodels.recipes.packing import best_fit
from ligermodels.recipes.rewards import Rewards
from ligermodels.recipes.rollout import Completion, Prompt, Sampler, policy_batch, sample
from ligermodels.training import AdamW

COLUMNS = (
    "model", "case", "baseline", "rollout s", "rollout tokens/s", "update s", "update tokens/s", "step s", "peak GiB",
)  # fmt: skip
STOP = 5


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--case", default="64x8x128+256")
    parser.add_argument("--tokens", type=int, default=12288, help="of a forward in the update")
    parser.add_argument("--baselines", default="ours,trl", help="of ours, trl, hf")
    parser.add_argument("--dry", action="store_true", help="a tiny model, few tokens, fp32")
    parser.add_argument("--out", help="a JSON file for the figures")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    prompts, group, prompt, new = map(int, re.split(r"[x+]", options.case))
    tokens = options.tokens
    if options.dry:
        prompts, group, prompt, new, tokens = 2, 2, 8, 8, 32
    env = environment(device)
    print(heading(env))
    rows: list[dict[str, Any]] = []
    for name in options.baselines.split(","):
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        rollout, update = BASELINES[name](options.model, (prompts, group, prompt, new), tokens, device, options.dry)
        row = {
            "model": options.model, "case": f"{prompts}x{group}x{prompt}+{new}", "baseline": name,
            "rollout s": rollout, "rollout tokens/s": prompts * group * new / rollout,
        }  # fmt: skip
        if update is not None:
            row |= {
                "update s": update, "update tokens/s": prompts * group * (prompt + new) / update,
                "step s": rollout + update,
            }  # fmt: skip
        if device == "cuda":
            row["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
        rows.append(row)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    print("\n" + table(COLUMNS, [[row.get(column) for column in COLUMNS] for row in rows]))
    if options.out:
        write_json(options.out, {"environment": env, "rows": rows})
    return 0


Case = tuple[int, int, int, int]


def ours(name: str, case: Case, tokens: int, device: str, dry: bool) -> tuple[float, float]:
    prompts, group, length, new = case
    model = make(name, device, torch.float32 if dry else torch.bfloat16, tiny=dry).train()
    options = GRPOOptions(
        model=name, data="-", out="-", reward=("-",), prompts=prompts, group=group, max_new_tokens=new,
        length=length + new, batch_tokens=tokens,
    )  # fmt: skip
    rewards = Rewards({"reward": reward})
    loss = PolicyLoss(options, Sampler(options, None, rewards, None))  # type: ignore[arg-type]
    optimizer = AdamW(model.parameters(), lr=1e-6, max_grad_norm=1.0)
    draw = random.Random(0)
    asked = [[draw.randrange(6, model.config.vocab_size) for _ in range(length)] for _ in range(prompts)]

    def roll(seed: int) -> list[list[int]]:
        how: dict[str, Any] = dict(max_new_tokens=new, temperature=1.0, stop_ids=(STOP,), seeds=iter([seed]))
        return sample(model, asked, group, **how)

    def update(found: list[list[int]]) -> None:
        values = reward(found)
        completions = [
            Completion(Prompt(asked[n // group], "", {}, "", new), ids, "", True, advantage=values[n] - 3)
            for n, ids in enumerate(found)
        ]
        batches = [on_device(batch, torch.device(device)) for batch in packed(completions, options, rewards)]
        count = torch.stack([policy_counts(batch) for batch in batches]).sum(0).clamp(min=1)
        for batch in batches:
            loss(model, batch, count)[0].backward()
        optimizer.step()
        optimizer.zero_grad()

    for seed in range(2):
        first, found = timed(lambda seed=seed: roll(seed), device)
        second, _ = timed(lambda found=found: update(found), device)
    release_graphs(model)
    return first, second


def packed(completions: list[Completion], options: GRPOOptions, rewards: Rewards) -> Iterator[Batch]:
    sizes = [one.prompt.size + len(one.ids) for one in completions]
    assert options.batch_tokens is not None
    for bin in best_fit(sizes, options.batch_tokens):
        yield policy_batch([completions[n] for n in bin], options, rewards, 0)


def reward(completion_ids: Sequence[Sequence[int]], **others: Any) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


def timed(work: Callable[[], Any], device: str) -> tuple[float, Any]:
    synchronize(device)
    start = time.perf_counter()
    found = work()
    synchronize(device)
    return time.perf_counter() - start, found


def theirs(name: str, device: str, dry: bool) -> Any:
    """transformers' model of random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**changed(MODELS[name].config, MODELS[name].tiny if dry else {}))
    config.eos_token_id = config.pad_token_id = STOP
    how: dict[str, Any] = dict(dtype=torch.float32 if dry else torch.bfloat16)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, attn_implementation=MODELS[name].attention, **how)


def hf(name: str, case: Case, tokens: int, device: str, dry: bool) -> tuple[float, None]:
    """transformers' generate as TRL calls it."""
    prompts, group, length, new = case
    model = theirs(name, device, dry).eval()
    ids = torch.randint(6, model.config.vocab_size, (prompts, length), device=device).repeat_interleave(group, 0)
    how: dict[str, Any] = dict(do_sample=True, top_k=0, max_new_tokens=new, eos_token_id=STOP, pad_token_id=STOP)
    for _ in range(2):
        with torch.no_grad():
            seconds, _ = timed(lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **how), device)
    return seconds, None


def trl(name: str, case: Case, tokens: int, device: str, dry: bool) -> tuple[float, float]:
    """TRL's trainer, whose rollout is transformers' generate. Its own work between the two counts as update."""
    import datasets
    import tokenizers
    import transformers
    import trl

    prompts, group, length, new = case
    model, draw = theirs(name, device, dry), random.Random(0)
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


BASELINES: dict[str, Callable[[str, Case, int, str, bool], tuple[float, float | None]]] = {
    "ours": ours, "trl": trl, "hf": hf,
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
