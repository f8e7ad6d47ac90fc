"""Tiny random checkpoints as the Hub has them, so that every example here runs on a CPU without a download."""

import json
import tempfile
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import ligermodels

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
CHAT_TEMPLATE = """{%- for message in messages -%}{{ '<|im_start|>' + message['role'] + '\n' }}
{%- if message['content'] is string -%}{{ message['content'] }}{%- else -%}{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else -%}{{ part['text'] }}{%- endif -%}{%- endfor -%}{%- endif -%}{{ '<|im_end|>\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""
SIZES: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    initializer_range=0.1,
)  # fmt: skip


def write_llama() -> Path:
    """The folder of a tiny Llama with a tokenizer for chats."""
    folder, ids = write_tokenizer()
    config = dict(SIZES, model_type="llama", vocab_size=len(ids), eos_token_id=ids["<|im_end|>"])
    ligermodels.Llama.from_config(config, device="cpu", seed=0).save_pretrained(folder)
    return folder


def write_qwen2_vl() -> Path:
    """The folder of a tiny Qwen2-VL with its processor."""
    folder, ids = write_tokenizer()
    names = {"eos_token_id": "im_end", "vision_start_token_id": "vision_start", "vision_end_token_id": "vision_end",
             "image_token_id": "image_pad", "video_token_id": "video_pad"}  # fmt: skip
    config = dict(
        SIZES, model_type="qwen2_vl", vocab_size=len(ids), rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]},
        vision_config=dict(depth=2, embed_dim=32, num_heads=2, mlp_ratio=2, hidden_size=64),
        **{name: ids[f"<|{token}|>"] for name, token in names.items()},
    )  # fmt: skip
    ligermodels.Qwen2VL.from_config(config, device="cpu", seed=0).save_pretrained(folder)
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 56 * 56, "max_pixels": 112 * 112}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def write_tokenizer() -> tuple[Path, dict[str, int]]:
    """The folder of a tokenizer, one token a byte and those of a chat, and its ids by token."""
    folder = Path(tempfile.mkdtemp(prefix="ligermodels-"))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({token: n for n, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": CHAT_TEMPLATE}))
    return folder, tokenizer.get_vocab()
