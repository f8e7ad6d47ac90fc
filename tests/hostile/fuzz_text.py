"""Mutated tokenizer files, by hypothesis: each works, or ends in a typed error.

The longer run: python -m tests.hostile.fuzz_text --count 10000
"""

import collections
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ligermodels.errors import InputError, TokenizerError
from ligermodels.text import StreamDecoder, Tokenizer
from tests.hostile.fuzz_files import BYTE_STEP, TREE_STEP, change_bytes, change_tree
from tests.hostile.fuzzing import bounded, run
from tests.text import families, folders

CHAT = [
    {"role": "user", "content": "Hi é"},
    {"role": "assistant", "content": "the cat"},
    {"role": "user", "content": ""},
]
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
TEXT = "the cat <|user|>  sat 🦊\n</s>"

# A tokenizer.json with a step of every kind, small enough for most mutations to hit one.
_SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>"]
_VOCAB = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in (0x0A, 0xC3, 0xA9)), *"▁tehca", "▁t", "he", "▁the"]
TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": {"direction": "Right", "max_length": 512, "strategy": "LongestFirst", "stride": 0},
    "padding": None,
    "added_tokens": [{"id": index, **folders.added(content)} for index, content in enumerate(_SPECIAL)],
    "normalizer": {
        "type": "Sequence",
        "normalizers": [
            {"type": "NFC"},
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ],
    },
    "pre_tokenizer": {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": r"\p{L}+|\p{N}{1,3}|\s+"}, "behavior": "Isolated", "invert": False},
            {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": False},
        ],
    },
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    },
    "decoder": {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    },
    "model": {
        "type": "BPE",
        "dropout": None,
        "unk_token": "<unk>",
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": True,
        "ignore_merges": False,
        "vocab": {token: index for index, token in enumerate(_VOCAB)},
        "merges": [["▁", "t"], ["h", "e"], ["▁t", "he"]],
    },
}
CONFIG: dict[str, Any] = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>", "lstrip": False},
    "unk_token": "<unk>",
    "pad_token": None,
    "additional_special_tokens": ["<|user|>"],
    "added_tokens_decoder": {str(index): folders.added(content) for index, content in enumerate(_SPECIAL)},
    "add_bos_token": True,
    "legacy": False,
    "model_max_length": families.HUGE,
    "chat_template": [{"name": "default", "template": folders.CHATML}, {"name": "tool_use", "template": "{{ tools }}"}],
}


class Fuzz:
    """Two good folders of which one file is mutated, loaded, used and counted by its outcome."""

    def __init__(self, root: Path):
        self.json, self.model = root / "json", root / "model"
        folders.write(self.json, "tokenizer.json", TOKENIZER)
        folders.write(self.json, "tokenizer_config.json", CONFIG)
        self.blob = folders.sentencepiece_model()
        folders.sentencepiece_folder(self.model, self.blob)
        self.tokenizer = Tokenizer.from_folder(self.json)
        self.counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)

    def attempt(self, kind: str, call: Callable[[], None]) -> None:
        """Whatever else than these two errors comes, passes through to hypothesis."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                call()
            except (TokenizerError, InputError) as error:
                assert len(str(error)) < 3000
                self.counts[kind][type(error).__name__] += 1
            else:
                self.counts[kind]["worked"] += 1

    def use(self, path: Path, content: bytes) -> Callable[[], None]:
        """With this in the place of a good file: loaded, and every call made of it."""

        def call() -> None:
            good = path.read_bytes()
            path.write_bytes(content)
            try:
                tokenizer = Tokenizer.from_folder(path.parent)
                ids = tokenizer.encode(TEXT)
                tokenizer.decode(ids)
                tokenizer.encode_batch(["the", ""])
                stream = StreamDecoder(tokenizer)
                "".join([stream.put(index) for index in ids] + [stream.flush()])
                assert isinstance(tokenizer.chat_stop_ids, tuple)
                tokenizer.apply_chat_template(CHAT, tools=TOOLS)
            finally:
                path.write_bytes(good)

        return call

    def targets(self, count: int, **options: Any) -> list[Callable[[], None]]:
        """A function of hypothesis for each kind of mutation, `count` examples in all."""
        steps = st.lists(TREE_STEP, min_size=1, max_size=3)
        blobs = st.lists(BYTE_STEP, min_size=1, max_size=3)
        files = self.json / "tokenizer.json", self.json / "tokenizer_config.json", self.model / "tokenizer.model"
        tree, config = json.dumps(TOKENIZER, ensure_ascii=False).encode(), json.dumps(CONFIG).encode()

        def dump(value: Any) -> bytes:
            return json.dumps(value).encode()

        # kind: (share, what is drawn, the call made of it)
        kinds: dict[str, tuple[float, st.SearchStrategy, Callable[[Any], Callable[[], None]]]] = {
            "tokenizer.json as JSON": (0.35, steps, lambda s: self.use(files[0], dump(change_tree(TOKENIZER, s)))),
            "tokenizer.json as bytes": (0.15, blobs, lambda s: self.use(files[0], change_bytes(tree, s, len(tree)))),
            "tokenizer_config.json as JSON": (0.25, steps, lambda s: self.use(files[1], dump(change_tree(CONFIG, s)))),
            "tokenizer_config.json as bytes": (
                0.1, blobs, lambda s: self.use(files[1], change_bytes(config, s, len(config)))),
            "tokenizer.model as bytes": (
                0.15, blobs, lambda s: self.use(files[2], change_bytes(self.blob, s, len(self.blob)))),
        }  # fmt: skip

        def target(kind: str) -> Callable[[], None]:
            share, strategy, make = kinds[kind]

            @bounded(max(1, round(count * share)), **options)
            @given(strategy)
            def run(drawn):
                self.attempt(kind, make(drawn))

            return run

        return [target(kind) for kind in kinds]


if __name__ == "__main__":
    run(Fuzz, "Mutated tokenizer files", count=10_000)
