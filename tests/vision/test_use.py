"""`ligermodels chat --image` and examples/images.py on checkpoints that transformers wrote."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import MllamaForConditionalGeneration, Qwen2VLForConditionalGeneration
from transformers.models.mllama import MllamaConfig
from transformers.models.qwen2_vl import Qwen2VLConfig

import ligermodels
from ligermodels.cli import main
from tests.vision import folders

TEXT = dict(
    hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=1024, initializer_range=0.4,
)  # fmt: skip


def qwen2_vl(folder: Path):
    folders.qwen2_vl(folder, min_pixels=56 * 56, max_pixels=112 * 112)
    tokenizer = ligermodels.Tokenizer.from_folder(folder)
    ids = {
        name: tokenizer.token_to_id(f"<|{token}|>")
        for name, token in [
            ("image_token_id", "image_pad"), ("video_token_id", "video_pad"), ("eos_token_id", "im_end"),
            ("vision_start_token_id", "vision_start"), ("vision_end_token_id", "vision_end"),
        ]
    }  # fmt: skip
    vision = dict(depth=2, embed_dim=16, num_heads=2, mlp_ratio=2, hidden_size=32)
    rope = {"type": "mrope", "mrope_section": [1, 1, 2]}
    config = Qwen2VLConfig.from_dict(
        {**TEXT, **ids, "num_hidden_layers": 2, "vocab_size": tokenizer.vocab_size, "rope_scaling": rope,
         "vision_config": vision, "model_type": "qwen2_vl", "tie_word_embeddings": False}
    )  # fmt: skip
    return Qwen2VLForConditionalGeneration(config)


def mllama(folder: Path):
    folders.mllama(folder, size={"height": 28, "width": 28})
    tokenizer = ligermodels.Tokenizer.from_folder(folder)
    # Llama 3's own tokenizer keeps two line ends together whatever follows; this one does not.
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("\n\n", "\n"))
    rows = tokenizer.token_to_id("<|image|>")
    eos = tokenizer.token_to_id("<|eot_id|>")
    text = dict(
        TEXT, num_hidden_layers=3, cross_attention_layers=[1], vocab_size=rows, eos_token_id=eos, pad_token_id=0
    )
    vision = dict(
        hidden_size=16, attention_heads=2, num_hidden_layers=2, num_global_layers=1, intermediate_size=24,
        intermediate_layers_indices=[0], image_size=28, patch_size=14, max_num_tiles=4, vision_output_dim=32,
    )  # fmt: skip
    model = MllamaForConditionalGeneration(MllamaConfig(vision_config=vision, text_config=text, image_token_index=rows))
    with torch.no_grad():
        for name, gate in model.named_parameters():
            if "gate" in name and gate.numel() == 1:
                gate.fill_(0.7)
    return model


@pytest.fixture(params=[qwen2_vl, mllama], ids=lambda build: build.__name__)
def built(request, tmp_path):
    """(folder, transformers' model): a checkpoint of random weights that transformers wrote, with a processor."""
    torch.manual_seed(0)
    model = request.param(tmp_path / "model").eval()
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model", model


def said(model, inputs, length, stops) -> list[int]:
    """The ids that transformers generates greedily."""
    inputs = dict(inputs)
    if "image_grid_thw" in inputs:
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == model.config.image_token_id).int()
    out = model.generate(**inputs, do_sample=False, max_new_tokens=length, pad_token_id=0, eos_token_id=list(stops))
    return out[0, inputs["input_ids"].shape[1] :].tolist()


def test_chat_about_images(built, tmp_path, capsys, monkeypatch):
    folder, theirs = built
    images = [folders.draw(70, 90, seed=1), folders.draw(40, 100, seed=2)]
    for number, image in enumerate(images):
        image.save(tmp_path / f"{number}.png")
    lines = iter(["the cat\n", f"/image {tmp_path / '1.png'}\n", "/image nowhere.png\n", "the dog\n"])
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False, readline=lambda: next(lines, "")))
    command = ["chat", str(folder), "--image", str(tmp_path / "0.png"), "--max-new-tokens", "12", "--device", "cpu"]
    status = main(command)
    out, err = capsys.readouterr()
    assert status == 0 and "nowhere.png" in err, err
    processor = ligermodels.Processor.from_folder(folder)
    stops, messages, answers = processor.tokenizer.chat_stop_ids, [], []
    for image, text in zip(images, ["the cat", "the dog"], strict=True):
        parts = [{"type": "image", "image": image}, {"type": "text", "text": text}]
        messages.append({"role": "user", "content": parts})
        inputs = processor.apply_chat_template(messages, add_generation_prompt=True)
        answer = processor.decode(said(theirs, inputs, 12, stops))
        messages.append({"role": "assistant", "content": answer})
        answers.append(answer)
    assert out == "".join(f"{answer}\n" for answer in answers)
    assert len(set(answers)) == 2 and all(map(len, answers))


@pytest.mark.parametrize(
    "tower", [pytest.param(False, marks=pytest.mark.slow), True], ids=["frozen tower", "trained tower"]
)
def test_fine_tuning(built, tmp_path, tower, monkeypatch, capsys):
    """It learns which of two images gets which answer, and what it saves loads in transformers."""
    folder, theirs = built
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    lines = []
    for number, answer in enumerate(["the cat sat", "a dog"]):
        folders.draw(60, 60, seed=number).save(tmp_path / f"{number}.png")
        lines.append(json.dumps({"image": f"{number}.png", "question": "What is it?", "answer": answer}))
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    arguments = [str(folder), str(tmp_path / "pairs.jsonl"), "--out", str(tmp_path / "tuned"), "--lr", "3e-3"]
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    example = importlib.import_module("images")
    losses = example.main([*arguments, "--steps", "40", *(["--train-tower"] if tower else [])])
    assert losses[-1] < 0.1 * losses[0]
    tuned = type(theirs).from_pretrained(tmp_path / "tuned").eval()
    moved = {name for (name, a), b in zip(tuned.named_parameters(), theirs.parameters(), strict=True) if not a.equal(b)}
    assert any("visual" in name or "vision_model" in name for name in moved) == tower
    processor = ligermodels.Processor.from_folder(tmp_path / "tuned")
    for number, answer in enumerate(["the cat sat", "a dog"]):
        parts = [{"type": "image", "image": tmp_path / f"{number}.png"}, {"type": "text", "text": "What is it?"}]
        inputs = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
        assert processor.decode(said(tuned, inputs, 12, processor.tokenizer.chat_stop_ids)) == answer
