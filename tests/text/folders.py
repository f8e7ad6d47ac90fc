"""Small tokenizers of every kind in the zoo, trained here and written as Hugging Face folders."""

import base64
import io
import json
import struct
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

WORDS = (
    "the cat sat on the mat and the dog ran under the old tree while rain fell softly over green hills",
    "numbers like 3, 14 and 1592 or 2.71828 are written plainly; code such as x = y.z(a, b) is too",
    "Ein größerer Bär überquert die Straße, déjà vu à la façon de naïve café",
    "日本語の文章と한국어 문장 и немного русского текста",
    "line one\nline two\n\n    indented\ttabbed   spaces",
)
CORPUS = WORDS * 20

# What a user may type: every case that tokenizers get wrong in their own way.
TEXTS = (
    *WORDS,
    "",
    "a",
    "Hello, world!",
    "emoji 🦊👩‍👩‍👧‍👦🏳️‍🌈 and ﬁ ligature",
    "a  b   c",
    "trailing space ",
    "\n",
    "\n\n \t x",
    "é e\u0301 \u00a0 \u200b \ufeff",
    "\x00\x01 control",
    "▁already▁there",
    "<0x41> not a byte",
    "مرحبا שלום हिन्दी ไทย",
    "\U0001d573\U0001d58a",
)

LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token ~ '[INST] ' ~ m.content.strip() ~ ' [/INST]' }}"
    "{% else %}{{ ' ' ~ m.content.strip() ~ ' ' ~ eos_token }}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' ~ m.role ~ '<|end_header_id|>\n\n' }}"
    "{{ m.content | trim ~ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)


def write(folder: Path, name: str, value: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    (folder / name).write_text(text, encoding="utf-8")


def added(content: str, **flags: bool) -> dict[str, Any]:
    base = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {"content": content, **base, **flags}


def trained_bytes(
    split: str, size: int = 420, behavior: str = "isolated", ignore_merges: bool = False
) -> tokenizers.Tokenizer:
    """Byte-level BPE of CORPUS; `split` is the pattern of the parts of a text, or with "removed" of what is between."""
    native = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    cut = pre_tokenizers.Split(tokenizers.Regex(split), behavior, invert=behavior == "removed")
    byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    native.pre_tokenizer, native.decoder = pre_tokenizers.Sequence([cut, byte]), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    native.train_from_iterator(CORPUS, trainer)
    return native


def byte_level(folder: Path) -> Path:
    """In the manner of Llama 3: byte-level BPE, BOS from a TemplateProcessing, special tokens at the end."""
    native = trained_bytes(r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+", ignore_merges=True)
    special = ["<|begin|>", "<|end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    special += ["<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>"]
    native.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    # A token with characters beyond the byte alphabet, and one within it that stands for itself.
    native.add_tokens([AddedToken("<tool call>", normalized=False), AddedToken("été", normalized=False)])
    bos = native.token_to_id("<|begin|>")
    native.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", bos)]),
        ]
    )
    write(folder, "tokenizer.json", native.to_str())
    config = {"bos_token": "<|begin|>", "eos_token": "<|eot_id|>", "chat_template": LLAMA3, "model_max_length": 4096}
    config |= {"clean_up_tokenization_spaces": True, "tokenizer_class": "PreTrainedTokenizerFast"}
    decoder = {str(index): token.__getstate__() for index, token in native.get_added_tokens_decoder().items()}
    write(folder, "tokenizer_config.json", {**config, "added_tokens_decoder": decoder})
    end = native.token_to_id("<|end|>")
    eot = native.token_to_id("<|eot_id|>")
    write(folder, "generation_config.json", {"eos_token_id": [end, eot]})
    return folder


def harmony(
    folder: Path, chat_template: str, split: str = r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"
) -> Path:  # fmt: skip
    """In the manner of gpt-oss: byte-level BPE with the tokens of the harmony format."""
    native = trained_bytes(split, ignore_merges=True)
    names = "startoftext endoftext return constrain channel start end message call".split()
    native.add_special_tokens([AddedToken(f"<|{name}|>", normalized=False) for name in names])
    write(folder, "tokenizer.json", native.to_str())
    config = {"bos_token": "<|startoftext|>", "eos_token": "<|return|>", "pad_token": "<|endoftext|>"}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": chat_template}
    decoder = {str(index): token.__getstate__() for index, token in native.get_added_tokens_decoder().items()}
    write(folder, "tokenizer_config.json", {**config, "added_tokens_decoder": decoder})
    stops = [native.token_to_id(f"<|{name}|>") for name in ("return", "endoftext", "call")]
    write(folder, "generation_config.json", {"eos_token_id": stops})
    return folder


def sentencepiece_model(**options: Any) -> bytes:
    """A trained .model, by default as Llama 2's: BPE, byte fallback, dummy prefix, no normalisation."""
    writer = io.BytesIO()
    defaults = {
        "vocab_size": 420,
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "character_coverage": 0.98,
        "hard_vocab_limit": False,
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=writer, **(defaults | options)
    )
    return writer.getvalue()


def ranked_tokens() -> list[bytes]:
    """The tokens of a small byte-level BPE by rank: the 256 bytes in order, a word no merges lead to, others."""
    native = trained_bytes(r" ?\p{L}+|\s+|[^\s\p{L}]+", size=500)
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    byte_of = {chr(byte): byte for byte in visible} | {chr(256 + at): byte for at, byte in enumerate(hidden)}
    longer = [native.id_to_token(index) for index in range(256, native.get_vocab_size())]
    return [
        *(bytes([byte]) for byte in range(256)),
        b" xqzw",
        *(bytes(byte_of[char] for char in token) for token in longer),
    ]


def tiktoken_file(path: Path) -> list[bytes]:
    """Writes Meta's kind of tokenizer.model. Returns its tokens."""
    tokens = ranked_tokens()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)))
    return tokens


def tekken_file(path: Path, special: list[str] | None = None, version: str = "v3", **config: Any) -> list[bytes]:
    """Writes Mistral's tekken.json with 30 special tokens and 7 tokens too many. Returns the tokens that count."""
    tokens = ranked_tokens()
    kept = tokens[:-7]
    content: dict[str, Any] = {
        "config": {
            "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            "num_vocab_tokens": len(tokens),
            "default_vocab_size": len(kept) + 30,
            "default_num_special_tokens": 30,
            "version": version,
            **config,
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(tokens)
        ],
    }
    if special is not None:
        content["special_tokens"] = [
            {"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(special)
        ]
    write(path.parent, path.name, content)
    return kept


def merged_last(model: bytes, text: str) -> bytes:
    """The model with one piece merged after all others, as runs of spaces are in Llama 2 and Mistral."""
    piece = text.encode()
    at = model.index(b"\n" + bytes([len(piece)]) + piece + b"\x15") + 3 + len(piece)
    return model[:at] + struct.pack("<f", -1e9) + model[at + 4 :]


def sentencepiece_folder(folder: Path, model: bytes | None = None, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(sentencepiece_model() if model is None else model)
    base = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": LLAMA2}
    write(folder, "tokenizer_config.json", base | config)
    return folder
