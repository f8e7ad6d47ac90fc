"""Our tokenizer in transformers and TRL: the results are those of their own tokenizer."""

from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from ligermodels.text import Tokenizer
from tests.text import families, folders
from tests.text.families import TALK, TOLD


@pytest.fixture
def pair(byte_level_folder):
    """(ours, transformers') of one folder, with a pad token."""
    ours, theirs = Tokenizer.from_folder(byte_level_folder), AutoTokenizer.from_pretrained(byte_level_folder)
    ours.pad_token, theirs.pad_token = ours.eos_token, theirs.eos_token
    return ours, theirs


def small_model(tokenizer):
    torch.manual_seed(0)
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape, **ids))


@pytest.mark.slow
def test_trainer(pair, tmp_path):
    """datasets tokenizes in two processes, the collator pads, Trainer saves: the losses and the folder are the same."""
    pytest.importorskip("accelerate")
    datasets = pytest.importorskip("datasets")
    losses = []
    for kind, tokenizer in zip(("ours", "theirs"), pair, strict=True):
        rows = datasets.Dataset.from_dict({"text": list(folders.WORDS) * 2}).map(
            lambda batch, tokenizer: tokenizer(batch["text"], truncation=True, max_length=16),
            batched=True,
            num_proc=2,
            fn_kwargs={"tokenizer": tokenizer},
            remove_columns="text",
        )
        trainer = transformers.Trainer(
            model=small_model(tokenizer),
            args=transformers.TrainingArguments(
                tmp_path / kind,
                max_steps=2,
                per_device_train_batch_size=3,
                logging_steps=1,
                report_to=[],
                use_cpu=True,
            ),
            train_dataset=rows,
            data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
            processing_class=tokenizer,
        )
        trainer.train()
        log = trainer.state.log_history
        losses.append([entry.get("loss") for entry in log[:2]])
        trainer.save_model(tmp_path / f"{kind} saved")
    assert losses[0] == losses[1] and losses[0][0]
    for folder in (tmp_path / "ours saved", tmp_path / "ours" / "checkpoint-2"):
        ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
        assert ours.pad_token == theirs.pad_token == pair[0].eos_token
        assert ours.chat_template == theirs.chat_template == pair[0].chat_template
        text = "the cat <|eot_id|>🦊"
        assert ours.encode(text) == theirs.encode(text) == pair[1].encode(text)


def test_pipeline_and_streamer(pair, capsys):
    model = small_model(pair[0]).eval()
    said = []
    for tokenizer in pair:
        pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
        options = {"max_new_tokens": 5, "do_sample": False}
        chat = [{"role": "user", "content": "the cat"}]
        results = [pipe(["the cat sat", "the"], batch_size=2, **options), pipe(chat, **options)]
        ids = torch.tensor([tokenizer.encode("the cat")])
        model.generate(ids, streamer=transformers.TextStreamer(tokenizer, skip_prompt=True), **options)
        said.append((results, capsys.readouterr().out))
    assert said[0] == said[1] and said[0][1]


def test_training_templates_of_trl(folder_of):
    """Those with {% generation %} give the same ids and mask; ours refuses what theirs refuses."""
    trl = pytest.importorskip("trl")
    folder = folder_of("qwen 2.5")
    ours, theirs = Tokenizer.from_folder(folder), families.theirs("qwen 2.5", folder)
    paths = sorted((Path(trl.__file__).parent / "chat_templates").glob("*_training.jinja"))
    assert len(paths) > 10
    agreed = 0
    for path in paths:
        options = {"chat_template": path.read_text(), "return_dict": True, "return_assistant_tokens_mask": True}
        for chat in (TALK[1:], [TOLD[0], {"role": "assistant", "content": " the 🦊 \n\n cat"}]):
            try:
                expected = theirs.apply_chat_template(chat, **options)
            except Exception:
                with pytest.raises(ValueError):
                    ours.apply_chat_template(chat, **options)
                continue
            assert ours.apply_chat_template(chat, **options) == expected, (path.name, chat)
            agreed += 1
    assert agreed > 10
