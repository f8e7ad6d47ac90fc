"""Released tokenizers against the libraries that they were made for; docs/tokenizers.md holds the table.

The oracles are tiktoken as llama-models and mistral-common call it, sentencepiece, and tokenizers on the released
tokenizer.json. `python -m pytest tests/tools/test_real_tokenizers.py -s` prints the number of texts of each.
"""

import base64
import json
import random
import re
import shutil
from pathlib import Path

import pytest
import sentencepiece
import tiktoken
import tiktoken.load
from transformers import PreTrainedTokenizerFast

from ligermodels.text import Tokenizer
from tests import real_files

SENTENCES = (
    "The quick brown fox doesn't jump; we've SEEN it, they'll say: IT'S 3.14159 or 1,234,567!",
    "Größe, Übermut und Straßenbahn: „Wie geht's?“ — gut, danke.",
    "L'été dernier, j'ai mangé des crêpes à Bézier; où êtes-vous né ?",
    "El niño comió piñata ¿verdad? ¡Sí! Mañana será otro día.",
    "Быстрая коричневая лиса прыгает через ленивую собаку.",
    "\u0397 γρήγορη αλεπού πηδά πάνω από το σκυλί.",
    "素早い茶色の狐がのろまな犬を飛び越える。カタカナ、ひらがな。",
    "敏捷的棕色狐狸跳过了懒狗。繁體中文也在這裡。",
    "빠른 갈색 여우가 게으른 개를 뛰어넘는다.",
    "الثعلب البني السريع يقفز فوق الكلب الكسول ١٢٣٤.",
    "השועל החום המהיר קופץ מעל הכלב.",
    "तेज़ भूरी लोमड़ी आलसी कुत्ते के ऊपर कूदती है।",
    "สุนัขจิ้งจอกสีน้ำตาลกระโดดข้ามสุนัขขี้เกียจ",
    "Con cáo nâu nhanh nhẹn nhảy qua con chó lười biếng.",
    "H\u0131zl\u0131 kahverengi tilki İstanbul'da \u0131ğd\u0131r ŞİRİN.",
    "தமிழ் மொழி, ქართული ენა, Հայերեն, ភាសាខ្មែរ",
    "emoji 🦊👩‍👩‍👧‍👦🏳️‍🌈🇩🇪👍🏽 ✨ and ﬁ ﬀ ligatures \u210c \U0001d573\U0001d58a ①②③ ½ ²",
    "e\u0301 n\u0303 \u00a0nbsp\u200bzwsp\ufeffbom \u2028line\u2029para \x85nel \x0bvt \x0cff",
    'def f(x: int) -> str:\n    return f"{x!r}\\n" if x else None  # no\n\n\nclass A(B):\n\tpass\r\n',
    "for (int i = 0; i < n; ++i) { a[i] += b->c * 0xFF; }\n\t\t// done */\n#include <stdio.h>",
    '{"key": [1, 2.5e-3, null, true], "url": "https://example.org/a/b?c=d&e=f#g"}',
    "SELECT * FROM t WHERE a >= 10 AND b LIKE '%x%'; <div class=\"a\">&nbsp;</div>",
    "aaaaaaaaaaaaaaaaaaaa !!!!!!!!!!!! ............ -------- ======== 00000000 ________",
    "▁already▁there <0x41> <0x0A> \x00\x01\x7f",
)
COUNT = 2400


def texts(special: list[str], seed: int = 0) -> list[str]:
    """COUNT texts: sentences and pieces of them, code, white space, random characters and bytes, special tokens."""
    generator = random.Random(seed)
    code = Path(random.__file__).read_text("utf-8").splitlines(keepends=True)
    spaces = (" ", "  ", "\n", "\t", "\r\n", "\u00a0", "\u3000", "\u2003", " \n", "\n\n")

    def piece() -> str:
        sentence = generator.choice(SENTENCES)
        start = generator.randrange(len(sentence))
        return sentence[start : start + generator.randrange(1, 40)]

    def characters() -> str:
        codes = (generator.choice((0x80, 0x250, 0x800, 0x3000, 0x10000, 0x2FFFF)) for _ in range(12))
        points = (generator.randrange(1, code) for code in codes)
        return "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)

    kinds = (
        lambda: generator.choice(SENTENCES),
        piece,
        lambda: " ".join(piece() for _ in range(5)),
        lambda: "".join(code[(at := generator.randrange(len(code) - 8)) : at + generator.randrange(1, 8)]),
        lambda: "".join(generator.choice(spaces) * generator.randrange(1, 9) + piece() for _ in range(4)),
        lambda: "".join(generator.choice(spaces) for _ in range(generator.randrange(12))),
        characters,
        lambda: generator.randbytes(generator.randrange(1, 40)).decode("utf-8", "replace"),
        lambda: "".join(generator.choice([*special, piece(), " "]) for _ in range(6)) if special else piece(),
    )
    fixed = ["", " ", "\n", *SENTENCES, *special[:40]]
    return fixed + [kinds[at % len(kinds)]() for at in range(COUNT - len(fixed))]


def compare(name, ours, encode, decode, found, without=()):
    """The ids and the text of the ids of every text, and the text of random ids."""
    generator = random.Random(1)
    random_ids = [generator.choices(range(len(ours)), k=generator.randrange(1, 12)) for _ in range(COUNT)]
    ids = [encode(text) for text in found]
    wrong_ids = [text for text, row in zip(found, ids, strict=True) if ours.encode(text, False) != row]
    rows = [*ids, *(row for row in random_ids if not set(row) & set(without))]
    wrong_texts = [row for row in rows if ours.decode(row) != decode(row)]
    print(f"{name}: {len(found)} texts, {len(wrong_ids)} other ids; {len(rows)} rows, {len(wrong_texts)} other texts")
    assert not wrong_ids and not wrong_texts, (wrong_ids[:3], wrong_texts[:3])
    assert [ours.decode(row, True) for row in ids[:99]] == [decode_plain(ours, decode, row) for row in ids[:99]]


def decode_plain(ours, decode, row):
    special = ours.backend.special_ids
    return decode([index for index in row if index not in special])


def folder_with(tmp_path, released, name):
    path = real_files.path(released)
    tmp_path.mkdir(exist_ok=True)
    shutil.copy(path, tmp_path / name)
    return tmp_path


LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
LLAMA_3_NAMES = {
    128000: "<|begin_of_text|>", 128001: "<|end_of_text|>", 128002: "<|reserved_special_token_0|>",
    128004: "<|finetune_right_pad_id|>", 128005: "<|step_id|>", 128006: "<|start_header_id|>",
    128007: "<|end_header_id|>", 128008: "<|eom_id|>", 128009: "<|eot_id|>", 128010: "<|python_tag|>",
    128011: "<|image|>", 128012: "<|reserved_special_token_2|>", 128255: "<|reserved_special_token_245|>",
}  # fmt: skip


def test_metas_tokenizer_model(tmp_path):
    """Against tiktoken, as llama-models calls it with allowed_special="all"."""
    path = real_files.path("llama-models/llama3/tokenizer.model")
    ours = Tokenizer.from_folder(folder_with(tmp_path, "llama-models/llama3/tokenizer.model", "tokenizer.model"))
    loaded = tiktoken.load.load_tiktoken_bpe(str(path))
    added = {token.content: index for index, token in ours.backend.added.items()}
    assert sorted(added.values()) == list(range(len(loaded), max(LLAMA_3_NAMES) + 1))
    assert {index: ours.convert_ids_to_tokens(index) for index in LLAMA_3_NAMES} == LLAMA_3_NAMES
    theirs = tiktoken.Encoding("llama3", pat_str=LLAMA_3, mergeable_ranks=loaded, special_tokens=added)
    found = texts(list(LLAMA_3_NAMES.values()))
    compare("llama3", ours, lambda text: theirs.encode(text, allowed_special="all"), theirs.decode, found)


@pytest.mark.parametrize("release", ["tekken_240718.json", "tekken_240911.json"])
def test_tekken(tmp_path, release):
    """Against tiktoken, as mistral-common calls it; it takes special tokens as ids alone, here they are cut out."""
    content = json.loads(real_files.path(f"mistral-common/{release}").read_text("utf-8"))
    ours = Tokenizer.from_folder(folder_with(tmp_path, f"mistral-common/{release}", "tekken.json"))
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in content["vocab"][: 131072 - 1000]}
    theirs = tiktoken.Encoding("tekken", pat_str=content["config"]["pattern"], mergeable_ranks=ranks, special_tokens={})
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"]
    special += ["[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"]
    special += ["[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"]
    special += [f"<SPECIAL_{index}>" for index in range(20, 1000)]
    index_of = {token: index for index, token in enumerate(special)}
    pattern = re.compile("|".join(map(re.escape, special)))

    def encode(text):
        ids, start = [], 0
        for match in pattern.finditer(text):
            ids += [1000 + rank for rank in theirs.encode_ordinary(text[start : match.start()])]
            ids.append(index_of[match[0]])
            start = match.end()
        return ids + [1000 + rank for rank in theirs.encode_ordinary(text[start:])]

    def decode(ids):
        data = b"".join(
            special[index].encode() if index < 1000 else theirs.decode_single_token_bytes(index - 1000) for index in ids
        )
        return data.decode(errors="replace")

    compare(release, ours, encode, decode, texts(special))
    assert (len(ours), ours.bos_token_id, ours.eos_token_id, ours.unk_token_id, ours.pad_token_id) == (
        131072, 1, 2, 0, 11
    )  # fmt: skip


VERSIONS = {
    "v1": "tokenizer.model.v1",
    "v2": "mistral_instruct_tokenizer_240216.model.v2",
    "v3": "mistral_instruct_tokenizer_240323.model.v3",
    "v7": "mistral_instruct_tokenizer_241114.model.v7",
}


@pytest.mark.parametrize("version", list(VERSIONS))
def test_mistrals_tokenizer_model(tmp_path, version):
    """Against sentencepiece, whose encode does not know control pieces: the texts have none."""
    name = f"mistral-common/{VERSIONS[version]}"
    ours = Tokenizer.from_folder(folder_with(tmp_path, name, f"tokenizer.model.{version}"))
    native = sentencepiece.SentencePieceProcessor(model_file=str(real_files.path(name)))
    control = [native.id_to_piece(index) for index in range(len(native)) if native.is_control(index)]
    assert set(control) | {"<unk>"} == {token.content for token in ours.backend.added.values() if token.special}
    pattern = re.compile("|".join(map(re.escape, [*control, "<unk>"])))
    found = [text for text in texts([]) if not pattern.search(text)]
    native_ids = set(range(len(native))) - ours.backend.special_ids

    def decode(ids):
        """sentencepiece drops control pieces and writes unknown ones as U+2047."""
        return native.decode([index for index in ids if index in native_ids])

    compare(version, ours, native.encode, decode, found, without=ours.backend.special_ids)
    for piece in control:
        index = native.piece_to_id(piece)
        assert ours.encode(f"{piece}hi")[: 1 + (piece != "<s>")] == ([1] if piece == "<s>" else [1, index])
        assert ours.decode([index], skip_special_tokens=True) == ""


@pytest.mark.parametrize("release", ["tokenizer-llama3", "tokenizer-llama3_1", "tokenizer-qwen3", "tokenizer-gemma3"])
def test_a_released_tokenizer_json(release):
    folder = real_files.path(f"{release}/tokenizer.json").parent
    ours, theirs = Tokenizer.from_folder(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    special = list(theirs.get_added_vocab())[-20:]
    compare(
        release, ours,
        lambda text: theirs.encode(text, add_special_tokens=False),
        lambda ids: theirs.decode(ids),
        texts(special),
    )  # fmt: skip
