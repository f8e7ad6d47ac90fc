"""`ligermodels chat --image` and examples/images.py on checkpoints that transformers wrote."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

import ligermodels
from ligermodels.cli import main
from tests.arch import (
    gemma3_vl as small_gemma3,
    gemma4_vl as small_gemma4,
    llama_vision,
    qwen2_vl as small_qwen2_vl,
    qwen3_vl as small_qwen3_vl,
)
from tests.arch.suite import auto_class
from tests.vision import folders

SIZES = dict(max_position_embeddings=1024, initializer_range=0.4)


def qwen2_vl(folder: Path):
    folders.qwen2_vl(folder, min_pixels=56 * 56, max_pixels=112 * 112)
    tokenizer = ligermodels.Tokenizer.from_folder(folder)
    names = ("image_token_id", "video_token_id", "eos_token_id", "vision_start_token_id", "vision_end_token_id")
    tokens = ("image_pad", "video_pad", "im_end", "vision_start", "vision_end")
    ids = {name: tokenizer.token_to_id(f"<|{token}|>") for name, token in zip(names, tokens, strict=True)}
    return small_qwen2_vl.tiny(dict(patch_size=14), vocab_size=tokenizer.vocab_size, **ids, **SIZES)


def qwen3_vl(folder: Path, family: str = "qwen3_vl"):
    size = {"shortest_edge": 64 * 64, "longest_edge": 128 * 128}
    getattr(folders, family)(folder, size=size)
    tokenizer = ligermodels.Tokenizer.from_folder(folder)
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    tokens = ("image_pad", "video_pad", "vision_start", "vision_end")
    ids = {name: tokenizer.token_to_id(f"<|{token}|>") for name, token in zip(names, tokens, strict=True)}
    text = dict(vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.token_to_id("<|im_end|>"), **SIZES)
    return {**getattr(small_qwen3_vl, family)(dict(patch_size=16, initializer_range=0.4), **text), **ids}


def qwen3_vl_moe(folder: Path):
    return qwen3_vl(folder, "qwen3_vl_moe")


def qwen3_5(folder: Path):
    return qwen3_vl(folder, "qwen3_5")


def qwen3_5_moe(folder: Path):
    config = qwen3_vl(folder, "qwen3_5_moe")
    config["text_config"]["initializer_range"] = 0.6  # with less it says the same to all
    return config


def mllama(folder: Path):
    folders.mllama(folder, size={"height": 28, "width": 28})
    tokenizer = ligermodels.Tokenizer.from_folder(folder)
    # Llama 3's own tokenizer keeps two line ends together whatever follows; this one does not.
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("\n\n", "\n"))
    rows, eos = tokenizer.token_to_id("<|image|>"), tokenizer.token_to_id("<|eot_id|>")
    config = llama_vision.tiny(dict(image_size=28, patch_size=14), vocab_size=rows, eos_token_id=eos, **SIZES)
    return {**config, "image_token_index": rows}


def gemma3(folder: Path):
    folders.gemma3(folder, size={"height": 28, "width": 28}, image_seq_length=4)
    tokenizer = ligermodels.Tokenizer.from_folder(folder)
    keys = {"boi_token": "boi_token_index", "eoi_token": "eoi_token_index", "image_token": "image_token_index"}
    ids = {keys[name]: tokenizer.token_to_id(token) for name, token in folders.GEMMA3_TOKENS.items()}
    text = dict(vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.token_to_id("<end_of_turn>"), **SIZES)
    return small_gemma3.tiny(dict(image_size=28, patch_size=7), ids, tie_word_embeddings=False, **text)


def gemma4(folder: Path):
    folders.gemma4(folder, patch_size=2, max_soft_tokens=70)
    tokenizer = ligermodels.Tokenizer.from_folder(folder)
    names = {f"{name}_id" for name in folders.GEMMA4_TOKENS} - {"eoa_token_id"}
    ids = {name: tokenizer.token_to_id(folders.GEMMA4_TOKENS[name.removesuffix("_id")]) for name in names}
    ids |= dict(video_token_id=tokenizer.token_to_id("<|video|>"), eoa_token_index=tokenizer.token_to_id("<audio|>"))
    rows, eos = tokenizer.vocab_size, tokenizer.token_to_id("<turn|>")
    text = dict(
        vocab_size=rows, vocab_size_per_layer_input=rows, eos_token_id=eos, use_bidirectional_attention="vision"
    )
    vision = dict(position_embedding_size=99, use_clipped_linears=True)
    options = dict(hidden_size_per_layer_input=6, tie_word_embeddings=False, **SIZES)
    return small_gemma4.tiny(vision, ids, **text, **options)


@pytest.fixture(
    params=[qwen2_vl, qwen3_vl, qwen3_vl_moe, qwen3_5, qwen3_5_moe, mllama, gemma3, gemma4],
    ids=lambda build: build.__name__,
)
def built(request, tmp_path):
    """(folder, transformers' model): a checkpoint of random weights that transformers wrote, with a processor."""
    config = transformers.AutoConfig.for_model(**request.param(tmp_path / "model"))
    torch.manual_seed(0)
    model = auto_class(config).from_config(config, dtype=torch.float32).eval()
    for name, gate in model.named_parameters():
        if "gate" in name and gate.numel() == 1:
            torch.nn.init.constant_(gate, 0.7)
        if name.endswith("mm_input_projection_weight"):  # which is 0 in a new model
            torch.nn.init.normal_(gate, std=2.0)
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model", model


def said(model, inputs, length, stops) -> list[int]:
    """The ids that transformers generates greedily."""
    inputs = dict(inputs)
    if "image_grid_thw" in inputs:
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == model.config.image_token_id).int()
    if "image_position_ids" in inputs:
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == model.config.image_token_id).long()
    if "Gemma3" in type(model).__name__:
        inputs["token_type_ids"] = (inputs["input_ids"] == model.config.image_token_id).long()
    out = model.generate(**inputs, do_sample=False, max_new_tokens=length, pad_token_id=0, eos_token_id=list(stops))
    return out[0, inputs["input_ids"].shape[1] :].tolist()


def test_chat_about_images(built, tmp_path, capsys, monkeypatch):
    folder, theirs = built
    monkeypatch.setattr("ligermodels.cli.writer.CHUNK", 16)
    images = [folders.draw(70, 90, seed=1), folders.draw(40, 100, seed=2)]
    for number, image in enumerate(images):
        image.save(tmp_path / f"{number}.png")
    show = [f"/image {tmp_path / name}\n" for name in ("0.png", "1.png")]
    lines = iter(["the cat\n", show[1], "/image nowhere.png\n", "the dog\n", "why\n", "/reset\n", *show, "both\n"])
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False, readline=lambda: next(lines, "")))
    command = ["chat", str(folder), "--image", str(tmp_path / "0.png"), "--max-new-tokens", "12", "--device", "cpu"]
    status = main(command)
    out, err = capsys.readouterr()
    assert status == 0 and "nowhere.png" in err, err
    processor = ligermodels.Processor.from_folder(folder)
    stops, messages, answers = processor.tokenizer.chat_stop_ids, [], []
    for shown, text in ((images[:1], "the cat"), (images[1:], "the dog"), ([], "why"), (images, "both")):
        messages = [] if text == "both" else messages
        parts = [*({"type": "image", "image": image} for image in shown), {"type": "text", "text": text}]
        messages.append({"role": "user", "content": parts if shown else text})
        inputs = processor.apply_chat_template(messages, add_generation_prompt=True)
        answer = processor.decode(said(theirs, inputs, 12, stops))
        messages.append({"role": "assistant", "content": answer})
        answers.append(answer)
    assert out == "".join(f"{answer}\n" for answer in answers)
    assert len(set(answers)) == 4 and all(map(len, answers))
    cached = ["cached" in line for line in err.splitlines() if "tokens/s" in line]
    crops = "Qwen3_5" not in type(theirs).__name__  # a recurrent state is computed anew
    assert cached == [False, False, crops, False], "text goes on after the images in the cache"


def test_chat_refuses_a_missing_image_before_the_model_loads(built, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ligermodels, "load", None)
    assert main(["chat", str(built[0]), "--image", str(tmp_path / "missing.png")]) == 3
    assert "missing.png" in capsys.readouterr().err


@pytest.mark.parametrize("tower", [pytest.param(False, marks=pytest.mark.slow), True], ids=["frozen", "trained"])
@pytest.mark.parametrize(
    "built",
    [qwen2_vl, qwen3_vl, *(pytest.param(one, marks=pytest.mark.slow) for one in (qwen3_5, mllama))],
    indirect=True,
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
