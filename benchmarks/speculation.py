"""What a step of speculation costs beside a step of one token, and what it brings a released model that copies.

    python -m benchmarks.speculation                                          # a GPU: shapes, random weights
    python -m benchmarks.speculation --copy SmolLM2-135M-Instruct.Q4_1.gguf   # a file, a folder or a Hub id; any device
    python -m benchmarks.speculation --dry                                    # tiny models, also on a CPU

Of the shapes, "guesses" says who guesses: "none" is plain decoding, "wrong" guesses are never right, so that its ms per
token are those of a step, and "right" are the tokens that plain decoding wrote, the most that can be gained. In bf16 a
tie may end the text of plain decoding, after which nothing is right. "same" is the share of equal ids up to the first
that differs. The second run counts.
"""

import argparse
import contextlib
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch

import ligermodels
from benchmarks import decode
from benchmarks.common import environment, heading, table, write_json
from ligermodels.generation import generate_iter, release_graphs
from ligermodels.generation.speculation import PromptLookup, Speculation

COLUMNS = ("model", "prompt", "guesses", "K", "tokens a step", "ms a step", "ms a token", "x plain", "same")
TASK = '''Rename the function to `total` and change nothing else. Answer with the code alone.

def add_all(numbers, start=0):
    """Returns the sum of the numbers, beginning with `start`."""
    result = start
    for number in numbers:
        if not isinstance(number, (int, float)):
            raise TypeError(f"expected a number, got {type(number).__name__}")
        result = result + number
    return result
'''


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="llama-3.2-1b,llama-3.1-8b")
    parser.add_argument("--prompts", default="128,8192", help="lengths, in tokens")
    parser.add_argument("--tokens", default="4,8", help="K: guesses a step")
    parser.add_argument("--copy", help="a chat model that renames a function in a piece of code, in place of shapes")
    parser.add_argument("--dry", action="store_true", help="tiny models, few tokens, fp32")
    parser.add_argument("--out", help="a JSON file for the figures")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    env = environment(device)
    print(heading(env))
    counts = [int(count) for count in options.tokens.split(",")]
    rows: list[dict[str, Any]] = []
    if options.copy:
        rows += copying(options.copy, counts, device)
    else:
        with decode.on(device):
            for name in options.models.split(","):
                model = decode.make(name, device, torch.float32 if options.dry else torch.bfloat16, tiny=options.dry)
                for length in (16,) if options.dry else map(int, options.prompts.split(",")):
                    ids = torch.randint(3, model.config.vocab_size, (1, length), device=device)
                    rows += measured(model, name, ids, 16 if options.dry else 96, counts, ("wrong", "right"))
                release_graphs(model)
                del model
                gc.collect()
    print("\n" + table(COLUMNS, [[row.get(column) for column in COLUMNS] for row in rows]))
    if options.out:
        write_json(options.out, {"environment": env, "rows": rows})
    return 0


def copying(name: str, counts: Sequence[int], device: str) -> list[dict[str, Any]]:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = ligermodels.load(name, dtype=dtype, device=device).eval()
    tokenizer = ligermodels.Tokenizer.from_hub(name)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": TASK}], add_generation_prompt=True)
    ids = torch.tensor([chat], device=device)
    return measured(model, name.rpartition("/")[2], ids, 64, counts, ("lookup",))


def measured(
    model: Any, name: str, ids: torch.Tensor, new: int, counts: Sequence[int], kinds: Sequence[str]
) -> list[dict[str, Any]]:
    """kinds: of wrong, right and lookup."""
    end = () if "lookup" not in kinds else None
    plain, text, _ = run(model, ids, new, end)
    rows = [{"guesses": "none", "tokens a step": 1.0, "ms a step": plain, "ms a token": plain, "x plain": 1.0}]
    for kind in kinds:
        for count in counts:
            with guessing(kind, ids[0].tolist() + text):
                found, written, steps = run(model, ids, new, end, prompt_lookup_num_tokens=count)
            equal = [a == b for a, b in zip(text, written, strict=False)]
            each = (len(written) - 1) / steps
            rows.append({
                "guesses": kind, "K": count, "tokens a step": each, "ms a step": found * each, "ms a token": found,
                "x plain": plain / found, "same": [*equal, False].index(False) / len(text),
            })  # fmt: skip
    return [{"model": name, "prompt": ids.shape[1], **row} for row in rows]


@contextlib.contextmanager
def guessing(kind: str, text: list[int]) -> Iterator[None]:
    if kind == "lookup":
        yield
        return

    def guess(self: PromptLookup) -> list[int]:
        ahead = text[len(self.tokens) :][: self.count]
        return ahead if kind == "right" else [(token + 1) % 3 for token in ahead]

    with mock.patch.object(PromptLookup, "guess", guess):
        yield


def run(model: Any, ids: torch.Tensor, new: int, end: Any, **options: Any) -> tuple[float, list[int], int]:
    """Milliseconds per token after the first, the new ids, and the steps of speculation, of a second run."""
    never = {"eos_token_id": model.config.get_text_config().vocab_size + 7, "pad_token_id": 0}
    begin, steps = Speculation.begin, [0]

    def counted(self: Speculation, most: float) -> list[int]:
        steps[0] += 1
        return begin(self, most)

    with mock.patch.object(Speculation, "begin", counted):
        for _ in range(2):
            decode.synchronize(ids.device.type)
            steps[0], times, tokens = 0, [], []
            for token in generate_iter(
                model, ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False,
                **(never if end == () else {}), **options,
            ):  # fmt: skip
                times.append(time.perf_counter())
                tokens.append(int(token))
    return (times[-1] - times[0]) / (len(tokens) - 1) * 1e3, tokens, max(1, steps[0])


if __name__ == "__main__":
    sys.exit(main())
