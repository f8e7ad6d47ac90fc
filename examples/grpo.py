"""Reinforcement learning with a reward that anyone can check, on the CPU, in a minute or two.

    python examples/grpo.py [--out FOLDER]

A tiny random model first learns from sums of which half are wrong (`train sft`), so that it answers like those. Then it
answers sums by itself, and the function `reward` below says which answers are right (`train grpo`). The same from the
command line, once FOLDER/sft/model is there:

    ligermodels train grpo FOLDER/sft/model --data FOLDER/sums.jsonl --output-dir FOLDER/grpo \\
        --reward-funcs examples/grpo.py:reward

with the options below as flags: `--learning-rate 1e-3 --num-generations 8` and so on.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from ligermodels import train

SUMS = [(a, b) for a in range(10) for b in range(10)]
RIGHT = 0.5  # the share of the sums in the first data that are right


def reward(completions: list[str], answer: list[str], **others: Any) -> list[float]:
    """1 for a right sum, else 0. answer: the column of the data."""
    return [float(said == right) for said, right in zip(completions, answer, strict=True)]


def write_data(folder: Path) -> None:
    """taught.jsonl, of which half is wrong, and sums.jsonl, prompts with their answers."""
    draw = random.Random(0)
    taught = []
    for _ in range(40):
        for a, b in SUMS:
            said = a + b if draw.random() < RIGHT else draw.randrange(19)
            taught.append({"prompt": f"{a}+{b}=", "completion": str(said)})
    sums = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in SUMS]
    for name, rows in {"taught": taught, "sums": sums}.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")


def main(arguments: list[str] | None = None) -> list[float]:
    """The mean reward of each step."""
    import tiny  # here, so that the command line can import `reward` from anywhere

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a new folder for data, models and reports; default a temporary one")
    parser.add_argument("--sft-steps", type=int, default=400)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args(arguments)
    out = options.out or Path(tempfile.mkdtemp(prefix="ligermodels-grpo-"))
    out.mkdir(parents=True, exist_ok=True)
    write_data(out)
    common: dict[str, Any] = dict(precision="fp32", report_to="none", save_steps=0, show=2)
    train(
        "sft", model=tiny.write_llama(), data=out / "taught.jsonl", output_dir=out / "sft",
        max_length=512, max_steps=options.sft_steps, accumulation=1, learning_rate=3e-3, **common,
    )  # fmt: skip
    _, lines = train(
        "grpo", model=out / "sft" / "model", data=out / "sums.jsonl", output_dir=out / "grpo",
        rewards=[reward], max_length=64, batch_tokens=4096, prompts=25, num_generations=16,
        max_completion_length=3, max_steps=options.steps, learning_rate=1e-3,
        lr_scheduler_type="constant_with_warmup", **common,
    )  # fmt: skip
    rewards = [line["reward"] for line in lines]
    for step in range(0, len(rewards), 10):
        part = rewards[step : step + 10]
        print(f"steps {step + 1} to {step + len(part)}: reward {sum(part) / len(part):.2f}")
    return rewards


if __name__ == "__main__":
    main()
