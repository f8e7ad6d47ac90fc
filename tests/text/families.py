"""The tokenizer folders of the text families, with the files, settings and special ids of the released ones.

The vocabularies are trained here and small; where a family's special tokens follow a large vocabulary, it is
filled up with tokens that no text has, so that the special ids are the real ones. `FAMILIES` is the table.
"""

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.tokenization_utils_sentencepiece import generate_merges

from tests.text import folders

HUGE = 1000000000000000019884624838656  # "no limit", as model_max_length says it

# ---- chat templates: ours, with the turns of the released ones ----


def _template(turn: str, answer: str | None = None, prompt: str = "", bos: str = "bos_token ~ ") -> str:
    """turn, answer: jinja expressions of a message m of the user, and of the assistant where that differs."""
    return (
        f"{{% for m in messages %}}{{{{ ({bos}'' if loop.first else '') ~ "
        f"({answer or turn} if m.role == 'assistant' else {turn}) }}}}{{% endfor %}}"
        f"{{% if tools %}}{{{{ tools | tojson }}}}{{% endif %}}"
        f"{{% if add_generation_prompt %}}{{{{ '{prompt}' }}}}{{% endif %}}"
    )


LLAMA_2 = _template("'[INST] ' ~ m.content.strip() ~ ' [/INST]'", "' ' ~ m.content.strip() ~ ' ' ~ eos_token")
_HEADER = "<|start_header_id|>%s<|end_header_id|>\\n\\n"
LLAMA_3_1 = _template(f"'{_HEADER}' % m.role ~ m.content | trim ~ '<|eot_id|>'", prompt=_HEADER % "assistant")
LLAMA_3_1 += "{{ date_string }}"
MISTRAL_3 = _template("'[INST] ' ~ m.content ~ '[/INST]'", "' ' ~ m.content ~ eos_token")
NEMO = _template("'[INST]' ~ m.content ~ '[/INST]'", "m.content ~ eos_token")
GEMMA = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + _template(
        "'<start_of_turn>' ~ (m.role | replace('assistant', 'model')) ~ '\\n' ~ m.content | trim ~ '<end_of_turn>\\n'",
        prompt="<start_of_turn>model\\n",
    )
)
QWEN = _template(
    "'<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n'", prompt="<|im_start|>assistant\\n", bos=""
)
PHI_3 = _template("'<|' ~ m.role ~ '|>\\n' ~ m.content ~ '<|end|>\\n'", prompt="<|assistant|>\\n", bos="")
PHI_4 = _template("'<|im_start|>' ~ m.role ~ '<|im_sep|>' ~ m.content ~ '<|im_end|>'", bos="")

# ---- pre-tokenizers ----

_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+ENDS|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*ENDS"
LLAMA_3_SPLIT = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
QWEN_SPLIT = LLAMA_3_SPLIT.replace("{1,3}", "")
_MARKED_REST = _REST.replace(r"\p{L}", r"\p{L}\p{M}")
QWEN_3_5_SPLIT = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|{_MARKED_REST}"
O200K_SPLIT = _WORDS.replace("ENDS", f"{_ENDINGS}?") + r"|\p{N}{1,3}|" + _REST.replace(r"[\r\n]*|", r"[\r\n/]*|")
TEKKEN_SPLIT = _WORDS.replace("ENDS", "") + r"|\p{N}|" + _REST.replace(r"[\r\n]*|", r"[\r\n/]*|")

Specials = Mapping[int, dict[str, Any]]


def _named(first: int, *contents: str, **flags: bool) -> dict[int, dict[str, Any]]:
    return {first + at: folders.added(content, **flags) for at, content in enumerate(contents)}


def _filled(known: Specials, form: str, last: int, **flags: bool) -> dict[int, dict[str, Any]]:
    """`known` and, in the gaps up to id `last`, tokens named by their rank."""
    gaps = (index for index in range(min(known), last + 1) if index not in known)
    filled = {index: folders.added(form.format(rank), **flags) for rank, index in enumerate(gaps)}
    return dict(sorted((dict(known) | filled).items()))


# ---- the two kinds of vocabulary ----


def _filler(index: int) -> str:
    return f"<filler-{index:06}>"


def _byte_level(
    split: str,
    special: Specials,
    *,
    bos: str | None = None,
    normalizer: normalizers.Normalizer | None = None,
    behavior: str = "isolated",
    ignore_merges: bool = False,
) -> dict[str, Any]:
    """tokenizer.json. Special tokens come first (Tekken) or after the vocabulary, which is filled up to them."""
    native = folders.trained_bytes(split, behavior=behavior, ignore_merges=ignore_merges)
    if normalizer:
        native.normalizer = normalizer
    state = json.loads(native.to_str())
    first = min(special)
    if first == 0:
        offset = 1 + max(special)
        state["model"]["vocab"] = {token["content"]: index for index, token in special.items()} | {
            token: index + offset for token, index in state["model"]["vocab"].items()
        }
    else:
        vocab = state["model"]["vocab"]
        vocab.update({_filler(index): index for index in range(len(vocab), first)})
    state["added_tokens"] = [{"id": index, **token} for index, token in special.items()]
    post: processors.PostProcessor = processors.ByteLevel(trim_offsets=False)
    state["post_processor"] = json.loads(post.__getstate__())
    if bos:
        ids = {token["content"]: index for index, token in special.items()}
        template = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, ids[bos])])
        state["post_processor"] = json.loads(processors.Sequence([post, template]).__getstate__())
    return state


def _sentencepiece(size: int | None = None, **options: Any) -> bytes:
    """tokenizer.model, filled up to `size` pieces with unused ones: protobuf takes in what is appended."""
    model = folders.sentencepiece_model(**options)
    have = sentencepiece.SentencePieceProcessor(model_proto=model).get_piece_size()
    for index in range(have, size or 0):
        name = _filler(index).encode()
        piece = b"\x0a" + bytes([len(name)]) + name + b"\x15" + struct.pack("<f", 0.0) + b"\x18\x05"
        model += b"\x0a" + bytes([len(piece)]) + piece
    return model


def _converted(model: bytes, special: Specials, *, kind: str, bos: str | None) -> dict[str, Any]:
    """The tokenizer.json that transformers made of a tokenizer.model. kind: how it says the dummy prefix.

    prepend: before every stretch of text (transformers 4); first: before the text (later); none: Gemma.
    """
    native = sentencepiece.SentencePieceProcessor(model_proto=model)
    pieces = {native.id_to_piece(index): index for index in range(native.get_piece_size())}
    scores = {piece: native.get_score(index) for piece, index in pieces.items()}
    learned = {piece: index for piece, index in pieces.items() if not native.is_unused(index)}
    merges = generate_merges(learned, scores)
    json_model = models.BPE(vocab=pieces, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    made = tokenizers.Tokenizer(json_model)
    replace = normalizers.Replace(" ", "▁")
    if kind == "prepend":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
    elif kind == "first":
        made.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    else:
        made.normalizer = replace
        made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    strip = [] if kind == "none" else [decoders.Strip(" ", 1, 0)]
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence(steps + strip)
    state = json.loads(made.to_str())
    state["added_tokens"] = [{"id": index, **token} for index, token in special.items()]
    if bos:
        template = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, pieces[bos])])
        state["post_processor"] = json.loads(template.__getstate__())
    else:
        state["post_processor"] = json.loads(processors.TemplateProcessing(single="$A").__getstate__())
    return state


def _settings(special: Specials, template: str, **own: Any) -> dict[str, Any]:
    """tokenizer_config.json as transformers 4 writes it."""
    decoder = {str(index): token for index, token in special.items()}
    usual = {"clean_up_tokenization_spaces": False, "model_max_length": HUGE, "chat_template": template}
    return usual | {"added_tokens_decoder": decoder} | own


def _write(folder: Path, model_type: str, ids: Mapping[str, Any], generation: Mapping[str, Any], **files: Any) -> Path:
    """ids: of config.json and generation_config.json; `generation`: of the latter alone. Names of files spell the dot
    as two underscores."""
    folders.write(folder, "config.json", {"model_type": model_type, **ids})
    folders.write(folder, "generation_config.json", {**ids, **generation})
    for name, value in files.items():
        name = name.replace("__", ".")
        if isinstance(value, bytes):
            (folder / name).write_bytes(value)
        else:
            folders.write(folder, name, value)
    return folder


# ---- the families ----

CONTROL = _named(0, "<unk>", "<s>", "</s>")
_LLAMA_IDS = {"bos_token_id": 1, "eos_token_id": 2}
_LLAMA_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "LlamaTokenizer"}


def _llama_2(folder: Path) -> Path:
    """As in 2023: no added_tokens_decoder, special tokens as objects."""
    model = _sentencepiece()
    plain = {"lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
    named = {name: {"content": _LLAMA_NAMES[name], **plain} for name in ("bos_token", "eos_token", "unk_token")}
    config = {name: {"__type": "AddedToken", **token} for name, token in named.items()}
    config |= {"add_bos_token": True, "legacy": False, "model_max_length": HUGE, "padding_side": "right"}
    return _write(
        folder,
        "llama",
        _LLAMA_IDS,
        {"pad_token_id": 0},
        tokenizer__model=model,
        tokenizer__json=_converted(model, CONTROL, kind="prepend", bos="<s>"),
        tokenizer_config__json=config | {"tokenizer_class": "LlamaTokenizer", "chat_template": LLAMA_2},
        special_tokens_map__json=named,
    )


def _llama_3(folder: Path) -> Path:
    names = {0: "<|begin_of_text|>", 1: "<|end_of_text|>", 4: "<|finetune_right_pad_id|>"}
    names |= {6: "<|start_header_id|>", 7: "<|end_header_id|>", 8: "<|eom_id|>", 9: "<|eot_id|>", 10: "<|python_tag|>"}
    known = {128000 + at: folders.added(name) for at, name in names.items()}
    special = _filled(known, "<|reserved_special_token_{}|>", 128255)
    own = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    return _write(
        folder,
        "llama",
        {"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009]},
        {"top_p": 0.9},
        tokenizer__json=_byte_level(LLAMA_3_SPLIT, special, bos="<|begin_of_text|>", ignore_merges=True),
        tokenizer_config__json=_settings(special, LLAMA_3_1, model_max_length=131072, **own),
    )


def _mistral_3(folder: Path) -> Path:
    names = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]")
    names += ("[/TOOL_RESULTS]", *(f"[control_{rank}]" for rank in range(8, 769)))
    special = CONTROL | _named(3, *names)
    model = _sentencepiece(vocab_size=1190, control_symbols=list(names))
    return _write(
        folder,
        "mistral",
        _LLAMA_IDS,
        {},
        tokenizer__model=model,
        tokenizer__model__v3=model,
        tokenizer__json=_converted(model, special, kind="first", bos="<s>"),
        tokenizer_config__json=_settings(special, MISTRAL_3, add_prefix_space=True, legacy=False, **_LLAMA_NAMES),
    )


def _nemo(folder: Path) -> Path:
    names = ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
    names += ("[TOOL_CALLS]", "<pad>", "[PREFIX]", "[MIDDLE]", "[SUFFIX]")
    special = CONTROL | _named(3, *names, *(f"<SPECIAL_{index}>" for index in range(14, 1000)))
    state = _byte_level(TEKKEN_SPLIT, special, ignore_merges=True)
    template = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _write(
        folder,
        "mistral",
        _LLAMA_IDS,
        {},
        tokenizer__json=state | {"post_processor": json.loads(template.__getstate__())},
        tokenizer_config__json=_settings(special, NEMO, **_LLAMA_NAMES | {"tokenizer_class": "GPT2Tokenizer"}),
    )


def _gemma(folder: Path, version: int = 1) -> Path:
    unused = tuple(f"<unused{rank}>" for rank in range(99))
    runs = tuple("\n" * count for count in range(1, 32)) + tuple("▁" * count for count in range(2, 32))
    tags = tuple(f"<{slash}{tag}>" for slash in ("", "/") for tag in ("table", "tr", "td", "h1", "h2", "ul", "li", "b"))
    own = ("<mask>", "<2mass>", "[@BOS@]", *unused, "<start_of_turn>", "<end_of_turn>", *runs, *tags)
    model = _sentencepiece(
        vocab_size=680,
        pad_id=0, eos_id=1, bos_id=2, unk_id=3,
        pad_piece="<pad>", eos_piece="<eos>", bos_piece="<bos>",
        add_dummy_prefix=False,
        user_defined_symbols=list(own),
    )  # fmt: skip
    turns = ("<start_of_turn>", "<end_of_turn>")
    special = _named(0, "<pad>", "<eos>", "<bos>", "<unk>") | _named(106, *turns)
    every = dict(sorted((_named(4, *own, special=False) | special).items()))
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    names |= {"additional_special_tokens": list(turns), "legacy": None, "tokenizer_class": "GemmaTokenizer"}
    return _write(
        folder,
        "gemma" if version == 1 else "gemma2",
        {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0},
        {} if version == 1 else {"eos_token_id": [1, 107]},
        tokenizer__model=model,
        tokenizer__json=_converted(model, every, kind="none", bos="<bos>"),
        tokenizer_config__json=_settings(special if version == 1 else every, GEMMA, **names),
    )


def _qwen_2(folder: Path) -> Path:
    special = _named(151643, "<|endoftext|>", "<|im_start|>", "<|im_end|>")
    vision = ("object_ref_start", "object_ref_end", "box_start", "box_end", "quad_start", "quad_end")
    vision += ("vision_start", "vision_end", "vision_pad", "image_pad", "video_pad")
    special |= _named(151646, *(f"<|{name}|>" for name in vision))
    special |= _named(151657, "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", special=False)
    own = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None}
    own["additional_special_tokens"] = [token["content"] for token in special.values() if token["special"]][1:]
    state = _byte_level(QWEN_SPLIT, special, normalizer=normalizers.NFC())
    merges = "\n".join(" ".join(pair) for pair in state["model"]["merges"])
    return _write(
        folder,
        "qwen2",
        {"bos_token_id": 151643, "eos_token_id": 151645},
        {"eos_token_id": [151645, 151643], "pad_token_id": 151643},
        tokenizer__json=state,
        vocab__json=state["model"]["vocab"],
        merges__txt=f"#version: 0.2\n{merges}\n",
        tokenizer_config__json=_settings(
            special, QWEN, model_max_length=131072, tokenizer_class="Qwen2Tokenizer", **own
        ),
    )


def _phi_3(folder: Path) -> Path:
    model = _sentencepiece(32000)
    marks = ("assistant", "placeholder1", "placeholder2", "placeholder3", "placeholder4", "system", "end")
    marks += ("placeholder5", "placeholder6", "user")
    special = _named(0, "<unk>", "<s>") | _named(2, "</s>", rstrip=True, special=False)
    special |= _named(32000, "<|endoftext|>") | _named(32001, *(f"<|{mark}|>" for mark in marks), rstrip=True)
    own = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "padding_side": "left", "model_max_length": 4096}
    return _write(
        folder,
        "phi3",
        {"bos_token_id": 1, "eos_token_id": 32000, "pad_token_id": 32000},
        {"eos_token_id": [32000, 32001, 32007]},
        tokenizer__model=model,
        tokenizer__json=_converted(model, special, kind="prepend", bos=None),
        tokenizer_config__json=_settings(special, PHI_3, add_bos_token=False, legacy=False, **_LLAMA_NAMES | own),
    )


def _phi_4(folder: Path) -> Path:
    both = {"lstrip": True, "rstrip": True}
    names = ("<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
    known = _named(100256, "<|dummy|>") | _named(100257, *names)
    known |= _named(100264, "<|im_start|>", "<|im_end|>", "<|im_sep|>") | _named(100276, "<|endofprompt|>")
    special = {index: token | both for index, token in _filled(known, "<|dummy_{}|>", 100351).items()}
    own = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": special[100349]["content"]}
    return _write(
        folder,
        "phi3",
        {"bos_token_id": 100257, "eos_token_id": 100265, "pad_token_id": 100349},
        {},
        tokenizer__json=_byte_level(LLAMA_3_SPLIT, special, behavior="removed"),
        tokenizer_config__json=_settings(
            special, PHI_4, model_max_length=16384, padding_side="left", tokenizer_class="GPT2Tokenizer", **own
        ),
    )


@dataclass(frozen=True)
class Family:
    """build writes the folder. stops: ids that end a text; turn_end: the one that ends a turn.

    special: tokens to put into texts.
    """

    build: Callable[[Path], Path]
    stops: tuple[int, ...]
    turn_end: int
    bos: str | None = None
    special: tuple[str, ...] = ()


ALONE = [{"role": "user", "content": "Hi"}]
TOLD = [*ALONE, {"role": "assistant", "content": "Yes."}]
TOOL = {"type": "function", "function": {"name": "find", "description": "é <b>", "parameters": {"type": "object"}}}
TALK = [{"role": "system", "content": "Be brief."}, *TOLD, {"role": "user", "content": "Why?"}]

FAMILIES = {
    "llama 2": Family(_llama_2, stops=(2,), turn_end=2, bos="<s>", special=("</s>",)),
    "llama 3.1": Family(
        _llama_3,
        stops=(128001, 128008, 128009),
        turn_end=128009,
        bos="<|begin_of_text|>",
        special=("<|eot_id|>", "<|python_tag|>"),
    ),
    "mistral 0.3": Family(_mistral_3, stops=(2,), turn_end=2, bos="<s>", special=("</s>", "[INST]")),
    "nemo": Family(_nemo, stops=(2,), turn_end=2, bos="<s>", special=("</s>", "[INST]")),
    "gemma 1": Family(_gemma, stops=(1,), turn_end=107, bos="<bos>", special=("<start_of_turn>", "<eos>")),
    "gemma 2": Family(
        lambda folder: _gemma(folder, 2),
        stops=(1, 107),
        turn_end=107,
        bos="<bos>",
        special=("<end_of_turn>", "<h1>", "\n\n"),
    ),
    "qwen 2.5": Family(_qwen_2, stops=(151645, 151643), turn_end=151645, special=("<|im_end|>", "<tool_call>")),
    "phi 3": Family(_phi_3, stops=(32000, 32001, 32007), turn_end=32007, special=("<|user|>", "<|endoftext|>", "</s>")),
    "phi 4": Family(_phi_4, stops=(100265,), turn_end=100265, special=("<|im_start|>", "<|im_sep|>")),
}

# AutoTokenizer takes only the vocabulary of these two from tokenizer.json and rebuilds the rest; transformers 4 and
# PreTrainedTokenizerFast take the file as it is.
REBUILT = ("llama 2", "gemma 1")


def theirs(name: str, folder: Path) -> Any:
    """transformers' tokenizer of a family's folder."""
    return (PreTrainedTokenizerFast if name in REBUILT else AutoTokenizer).from_pretrained(folder)


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, or that it refuses."""
    try:
        return call()
    except Exception:
        return "refused"
