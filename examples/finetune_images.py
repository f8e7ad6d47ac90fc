"""Fine-tunes a vision-language model on pairs of image and text: a loop of plain PyTorch.

    python examples/finetune_images.py Qwen/Qwen2-VL-2B-Instruct pairs.jsonl --out tuned

Each line of pairs.jsonl is {"image": "cat.png", "question": "What is this?", "answer": "A cat."}; paths are relative to
the file. Only the answers are learned, and the token that ends them. The tower that looks at the images stays as it
is, which costs neither memory nor time in backward, unless --train-tower is given. The result loads in transformers.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

import torch

import ligermodels

IGNORED = -100


def read_pairs(path: Path) -> list[dict[str, str]]:
    pairs = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [{**pair, "image": str(path.parent / pair["image"])} for pair in pairs]


def encode(processor: ligermodels.Processor, pairs: list[dict[str, str]]) -> dict[str, torch.Tensor]:
    """The inputs of the model for a batch of pairs, with labels at the tokens of the answers."""
    texts, tails = [], []
    for pair in pairs:
        image = [{"type": "image"}, {"type": "text", "text": pair["question"]}]
        question = [{"role": "user", "content": image}]
        answer = [{"role": "assistant", "content": [{"type": "text", "text": pair["answer"]}]}]
        prompt = processor.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
        text = processor.apply_chat_template(question + answer, tokenize=False)
        if not text.startswith(prompt):
            raise SystemExit("the chat template changes the question once it has an answer: labels cannot be found")
        whole, before, tail = (
            processor.tokenizer.encode(part, add_special_tokens=False) for part in (text, prompt, text[len(prompt) :])
        )
        if whole != before + tail:
            raise SystemExit(f"the answer {pair['answer']!r} is encoded otherwise behind its question than alone")
        texts.append(text)
        tails.append(tail)
    images = [[pair["image"]] for pair in pairs]
    inputs = processor(texts, images, padding_side="right", add_special_tokens=False)
    labels = torch.full_like(inputs["input_ids"], IGNORED)
    for row, (ids, tail) in enumerate(zip(inputs["input_ids"], tails, strict=True)):
        end = int(inputs["attention_mask"][row].sum())
        labels[row, end - len(tail) : end] = ids[end - len(tail) : end]
    return {**inputs, "labels": labels}


def batches(pairs: list[dict[str, str]], size: int, steps: int, seed: int) -> Iterator[list[dict[str, str]]]:
    draw, queue = random.Random(seed), []
    for _ in range(steps):
        while len(queue) < size:
            queue += draw.sample(pairs, len(pairs))
        yield queue[:size]
        del queue[:size]


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="a repository of the Hub or a folder")
    parser.add_argument("pairs", type=Path, help="a file of JSON lines")
    parser.add_argument("--out", type=Path, required=True, help="the folder for the tuned checkpoint")
    parser.add_argument("--train-tower", action="store_true", help="train the vision tower too")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--checkpointing", action="store_true", help="compute blocks again in backward: less memory")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)

    on_gpu = torch.cuda.is_available()
    model = ligermodels.load(
        options.model, dtype="bfloat16" if on_gpu else "float32", device="cuda" if on_gpu else "cpu"
    )
    processor = ligermodels.Processor.from_hub(options.model)
    tower = model.model.visual if hasattr(model.model, "visual") else model.model.vision_model
    tower.requires_grad_(options.train_tower)
    if options.checkpointing:
        model.gradient_checkpointing_enable()
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.lr, fused=True)

    losses = []
    for batch in batches(read_pairs(options.pairs), options.batch, options.steps, options.seed):
        inputs = {name: x.to(model.device) for name, x in encode(processor, batch).items()}
        loss = model(**inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {len(losses)}: loss {losses[-1]:.4f}", flush=True)
    model.save_pretrained(options.out)  # the files of the processor come along
    return losses


if __name__ == "__main__":
    main()
