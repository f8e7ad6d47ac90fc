"""Fine-tunes a vision-language model on pairs of image and text: a loop of plain PyTorch.

    python examples/images.py                                                  # a tiny random model, on the CPU
    python examples/images.py Qwen/Qwen2-VL-2B-Instruct pairs.jsonl --out tuned

Each line of pairs.jsonl is {"image": "cat.png", "question": "What is this?", "answer": "A cat."}; paths are relative to
the file. Only the answers are learned, and the tokens that end them. The vision tower stays as it is, which costs
neither memory nor time in the backward, unless --train-tower is given. The result loads in transformers.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import tiny
import torch
from PIL import Image

import ligermodels
from ligermodels.training import AdamW

IGNORED = -100
PAIRS = [{"image": Image.new("RGB", (60, 60), c), "question": "Colour?", "answer": c} for c in ("red", "blue")]


def encode(processor: ligermodels.Processor, pairs: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The inputs of the model for a batch of pairs, with labels at the tokens of the answers."""
    texts, answers = [], []
    for pair in pairs:
        question = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": pair["question"]}]}]
        answer = {"role": "assistant", "content": [{"type": "text", "text": pair["answer"]}]}
        before = processor.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
        texts.append(processor.apply_chat_template([*question, answer], tokenize=False))
        prompt, whole = (processor.tokenizer.encode(text, add_special_tokens=False) for text in (before, texts[-1]))
        if whole[: len(prompt)] != prompt:
            raise SystemExit("the chat template changes the question once it has an answer: labels are not known")
        answers.append(len(whole) - len(prompt))
    inputs = processor(texts, [[pair["image"]] for pair in pairs], padding_side="right", add_special_tokens=False)
    ends = inputs["attention_mask"].sum(1, keepdim=True)
    index = torch.arange(inputs["input_ids"].shape[1])
    learned = (index < ends) & (index >= ends - torch.tensor(answers)[:, None])
    return {**inputs, "labels": inputs["input_ids"].where(learned, IGNORED)}


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a repository of the Hub or a folder; default a tiny one")
    parser.add_argument("pairs", nargs="?", type=Path, help="a file of JSON lines; default two plain images")
    parser.add_argument("--out", type=Path, help="a folder for the tuned checkpoint")
    parser.add_argument("--train-tower", action="store_true", help="train the vision tower too")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", type=float, default=3e-3, help="a pretrained model wants about 1e-5")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = options.model or tiny.write_qwen2_vl()
    model = ligermodels.load(name, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32, device=device)
    processor = ligermodels.Processor.from_hub(name)
    tower = model.model.visual if hasattr(model.model, "visual") else model.model.vision_model
    tower.requires_grad_(options.train_tower)
    pairs = [json.loads(line) for line in options.pairs.open()] if options.pairs else PAIRS
    for pair in pairs if options.pairs else []:
        pair["image"] = options.pairs.parent / pair["image"]
    trained = [parameter for parameter in model.train().parameters() if parameter.requires_grad]
    optimizer, losses = AdamW(trained, lr=options.lr, max_grad_norm=1.0), []
    for step in range(options.steps):
        batch = encode(processor, [pairs[(2 * step + n) % len(pairs)] for n in range(2)])
        loss = model(**{name: x.to(device) for name, x in batch.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step}: loss {losses[-1]:.4f}", flush=True)
    if options.out:
        model.save_pretrained(options.out)  # the files of the processor come along
    return losses


if __name__ == "__main__":
    main()
