"""The tokenizer folders of every text family, with the files, settings and special ids of the released ones.

The vocabularies are trained here and small; where a family's special tokens follow a large vocabulary, it is
filled up with tokens that no text has, so that the special ids are the real ones. `FAMILIES` is the table.
"""

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.tokenization_utils_sentencepiece import generate_merges

from tests.text import folders

HUGE = 1000000000000000019884624838656  # "no limit", as model_max_length says it

# ---- chat templates: ours, with the text of the released ones ----

_REFUSE = "{{ raise_exception('%s') }}"
_TURNS = (
    "{% for m in turns %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    + _REFUSE % "Conversation roles must alternate user/assistant/user/assistant/..."
    + "{% endif %}"
)
_SPLIT_SYSTEM = (
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% set turns = messages[1:] if messages[0].role == 'system' else messages %}"
)
LLAMA_2 = (
    _SPLIT_SYSTEM
    + _TURNS
    + "{% set lead = '<<SYS>>\\n' ~ system ~ '\\n<</SYS>>\\n\\n' if loop.first and system else '' %}"
    "{% if m.role == 'user' %}{{ bos_token ~ '[INST] ' ~ (lead ~ m.content).strip() ~ ' [/INST]' }}"
    "{% else %}{{ ' ' ~ m.content.strip() ~ ' ' ~ eos_token }}{% endif %}{% endfor %}"
)
LLAMA_3_1 = """{{- bos_token }}
{%- set system = '' %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- set open = '<|start_header_id|>%s<|end_header_id|>\\n\\n' %}
{{- open % 'system' }}
{%- if tools %}{{ 'Environment: ipython\\n' }}{% endif %}
{{- 'Cutting Knowledge Date: December 2023\\nToday Date: ' ~ (date_string or '26 Jul 2024') }}
{{- '\\n\\n' ~ system ~ '<|eot_id|>' }}
{%- for m in messages %}
    {{- open % m.role }}
    {%- if tools and loop.first %}
        {{- 'Given the following functions, please respond with a JSON for a function call ' }}
        {{- 'with its proper arguments that best answers the given prompt.\\n\\n' }}
        {{- 'Respond in the format {"name": function name, "parameters": ' }}
        {{- 'dictionary of argument name and its value}.Do not use variables.\\n\\n' }}
        {%- for tool in tools %}{{ tool | tojson(indent=4) ~ '\\n\\n' }}{% endfor %}
    {%- endif %}
    {{- m.content | trim ~ '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ open % 'assistant' }}{% endif %}"""
MISTRAL_1 = (
    "{{ bos_token }}{% set turns = messages %}"
    + _TURNS
    + "{{ '[INST] ' ~ m.content ~ ' [/INST]' if m.role == 'user' else m.content ~ eos_token ~ ' ' }}{% endfor %}"
)
_MISTRAL = (
    "{{ bos_token }}" + _SPLIT_SYSTEM + _TURNS + "{% if m.role == 'user' %}"
    "{% if tools and loop.last %}{{ '[AVAILABLE_TOOLS]' ~ SP ~ (tools | tojson) ~ '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST]' ~ SP ~ (system ~ '\\n\\n' if system and loop.last else '') ~ m.content ~ '[/INST]' }}"
    "{% else %}{{ SP ~ m.content ~ eos_token }}{% endif %}{% endfor %}"
)
MISTRAL_3 = _MISTRAL.replace("SP", "' '")
NEMO = _MISTRAL.replace("SP", "''")
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}" + _REFUSE % "System role not supported" + "{% endif %}"
    "{% set turns = messages %}" + _TURNS + "{{ '<start_of_turn>' ~ ('model' if m.role == 'assistant' else m.role) "
    "~ '\\n' ~ (m.content | trim) ~ '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
_QWEN = """{%- set system = messages[0].content if messages[0].role == 'system' else 'DEFAULT' %}
{%- if tools or system %}{{ '<|im_start|>system\\n' ~ system }}
    {%- if tools %}
        {{- '\\n\\n' if system else '' }}
        {{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' }}
        {{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>\\n' }}
        {%- for tool in tools %}{{ tool | tojson ~ '\\n' }}{% endfor %}
        {{- '</tools>\\n\\nFor each function call, return a json object with function name and arguments ' }}
        {{- 'within <tool_call></tool_call> XML tags:\\n<tool_call>\\n' }}
        {{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for m in (messages[1:] if messages[0].role == 'system' else messages) %}
    {%- set content = m.content %}THOUGHT
    {{- '<|im_start|>' ~ m.role ~ '\\n' ~ content ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\nBEGIN' }}{% endif %}"""


def _qwen(default: str, thought: str = "", begin: str = "") -> str:
    return _QWEN.replace("DEFAULT", default).replace("THOUGHT", thought).replace("BEGIN", begin)


QWEN_2_5 = _qwen("You are Qwen, created by Alibaba Cloud. You are a helpful assistant.")
QWQ = _qwen(
    "",
    "{%- if m.role == 'assistant' %}{% set content = m.content.split('</think>')[-1].lstrip('\\n') %}{% endif %}",
    "<think>\\n",
)
QWEN_2 = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PHI_3 = (
    "{% for m in messages %}{{ '<|' ~ m.role ~ '|>\n' ~ m.content ~ '<|end|>\n' }}{% endfor %}"
    "{{ '<|assistant|>\n' if add_generation_prompt else eos_token }}"
)
# As first released: the system message is passed over, and the prompt always stands ready.
PHI_3_FIRST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '<|user|>\n' ~ m.content ~ '<|end|>\n<|assistant|>\n' }}{% elif m.role == 'assistant' %}"
    "{{ m.content ~ '<|end|>\n' }}{% endif %}{% endfor %}"
)
PHI_4 = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '<|im_sep|>' ~ m.content ~ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
)
PHI_4_MINI = (
    "{% for m in messages %}{{ '<|' ~ m.role ~ '|>' ~ m.content }}"
    "{% if m.role == 'system' and m.tools %}{{ '<|tool|>' ~ m.tools ~ '<|/tool|>' }}{% endif %}{{ '<|end|>' }}"
    "{% endfor %}{{ '<|assistant|>' if add_generation_prompt else eos_token }}"
)

# ---- pre-tokenizers ----

_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+ENDS|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*ENDS"
LLAMA_3_SPLIT = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
QWEN_SPLIT = LLAMA_3_SPLIT.replace("{1,3}", "")
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
    native = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    cut = pre_tokenizers.Split(tokenizers.Regex(split), behavior, invert=behavior == "removed")
    byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    native.pre_tokenizer, native.decoder = pre_tokenizers.Sequence([cut, byte]), decoders.ByteLevel()
    if normalizer:
        native.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    native.train_from_iterator(folders.CORPUS, trainer)
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
    """tokenizer.model, filled up to `size` pieces with unused ones: protobuf appends what is written behind."""
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


def _decoder(special: Specials) -> dict[str, dict[str, Any]]:
    return {str(index): token for index, token in special.items()}


def _token(content: str) -> dict[str, Any]:
    """A special token as files of 2023 write it."""
    plain = folders.added(content, normalized=True)
    del plain["special"]
    return {"__type": "AddedToken", **plain}


def _write(folder: Path, model_type: str, config: Mapping[str, Any], **files: Any) -> Path:
    """config.json with `config`; file names spell the dot as two underscores. None: not written."""
    folders.write(folder, "config.json", {"model_type": model_type, **config})
    for name, value in files.items():
        name = name.replace("__", ".")
        if isinstance(value, bytes):
            (folder / name).write_bytes(value)
        elif value is not None:
            folders.write(folder, name, value)
    return folder


# ---- the families ----

CONTROL = _named(0, "<unk>", "<s>", "</s>")


def _llama_2(folder: Path, template: str | None = LLAMA_2) -> Path:
    model = _sentencepiece()
    special = {"bos_token": _token("<s>"), "eos_token": _token("</s>"), "unk_token": _token("<unk>")}
    config = {
        "add_bos_token": True,
        "add_eos_token": False,
        **special,
        "clean_up_tokenization_spaces": False,
        "legacy": False,
        "model_max_length": HUGE,
        "pad_token": None,
        "padding_side": "right",
        "sp_model_kwargs": {},
        "tokenizer_class": "LlamaTokenizer",
    }
    plain = {name: {k: v for k, v in token.items() if k != "__type"} for name, token in special.items()}
    return _write(
        folder,
        "llama",
        {"bos_token_id": 1, "eos_token_id": 2},
        tokenizer__model=model,
        tokenizer__json=_converted(model, CONTROL, kind="prepend", bos="<s>"),
        tokenizer_config__json=config | ({"chat_template": template} if template else {}),
        special_tokens_map__json=plain,
        generation_config__json={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "temperature": 0.6},
    )


def _llama_3(folder: Path) -> Path:
    names = {0: "<|begin_of_text|>", 1: "<|end_of_text|>", 4: "<|finetune_right_pad_id|>"}
    names |= {6: "<|start_header_id|>", 7: "<|end_header_id|>", 8: "<|eom_id|>", 9: "<|eot_id|>", 10: "<|python_tag|>"}
    known = {128000 + at: folders.added(name) for at, name in names.items()}
    special = _filled(known, "<|reserved_special_token_{}|>", 128255)
    return _write(
        folder,
        "llama",
        {"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009]},
        tokenizer__json=_byte_level(LLAMA_3_SPLIT, special, bos="<|begin_of_text|>", ignore_merges=True),
        tokenizer_config__json={
            "added_tokens_decoder": _decoder(special),
            "bos_token": "<|begin_of_text|>",
            "chat_template": LLAMA_3_1,
            "clean_up_tokenization_spaces": True,
            "eos_token": "<|eot_id|>",
            "model_input_names": ["input_ids", "attention_mask"],
            "model_max_length": 131072,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
        special_tokens_map__json={"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
        generation_config__json={"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "top_p": 0.9},
    )


def _mistral_1(folder: Path, model_type: str = "mistral") -> Path:
    model = _sentencepiece()
    return _write(
        folder,
        model_type,
        {"bos_token_id": 1, "eos_token_id": 2},
        tokenizer__model=model,
        tokenizer__json=_converted(model, CONTROL, kind="prepend", bos="<s>"),
        tokenizer_config__json={
            "add_bos_token": True,
            "add_eos_token": False,
            "added_tokens_decoder": _decoder(CONTROL),
            "additional_special_tokens": [],
            "bos_token": "<s>",
            "chat_template": MISTRAL_1,
            "clean_up_tokenization_spaces": False,
            "eos_token": "</s>",
            "legacy": True,
            "model_max_length": HUGE,
            "pad_token": None,
            "sp_model_kwargs": {},
            "spaces_between_special_tokens": False,
            "tokenizer_class": "LlamaTokenizer",
            "unk_token": "<unk>",
            "use_default_system_prompt": False,
        },
        special_tokens_map__json={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        generation_config__json={"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2},
    )


def _mixtral(folder: Path) -> Path:
    return _mistral_1(folder, "mixtral")


def _mistral_3(folder: Path) -> Path:
    names = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]")
    names += ("[/TOOL_RESULTS]", *(f"[control_{rank}]" for rank in range(8, 769)))
    special = CONTROL | _named(3, *names)
    model = _sentencepiece(vocab_size=1190, control_symbols=list(names))
    return _write(
        folder,
        "mistral",
        {"bos_token_id": 1, "eos_token_id": 2},
        tokenizer__model=model,
        tokenizer__model__v3=model,
        tokenizer__json=_converted(model, special, kind="first", bos="<s>"),
        tokenizer_config__json={
            "add_bos_token": True,
            "add_eos_token": False,
            "add_prefix_space": True,
            "added_tokens_decoder": _decoder(special),
            "bos_token": "<s>",
            "chat_template": MISTRAL_3,
            "clean_up_tokenization_spaces": False,
            "eos_token": "</s>",
            "legacy": False,
            "model_max_length": HUGE,
            "pad_token": None,
            "sp_model_kwargs": {},
            "spaces_between_special_tokens": False,
            "tokenizer_class": "LlamaTokenizer",
            "unk_token": "<unk>",
            "use_default_system_prompt": False,
        },
        special_tokens_map__json={"bos_token": folders.added("<s>"), "eos_token": folders.added("</s>")},
        generation_config__json={"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2},
    )


def _nemo(folder: Path) -> Path:
    names = ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
    names += ("[TOOL_CALLS]", "<pad>", "[PREFIX]", "[MIDDLE]", "[SUFFIX]")
    names += tuple(f"<SPECIAL_{index}>" for index in range(14, 1000))
    special = CONTROL | _named(3, *names)
    state = _byte_level(TEKKEN_SPLIT, special, ignore_merges=True)
    template = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _write(
        folder,
        "mistral",
        {"bos_token_id": 1, "eos_token_id": 2},
        tokenizer__json=state | {"post_processor": json.loads(template.__getstate__())},
        tokenizer_config__json={
            "add_bos_token": True,
            "add_eos_token": False,
            "add_prefix_space": False,
            "added_tokens_decoder": _decoder(special),
            "bos_token": "<s>",
            "chat_template": NEMO,
            "clean_up_tokenization_spaces": False,
            "eos_token": "</s>",
            "model_max_length": HUGE,
            "tokenizer_class": "GPT2Tokenizer",
            "unk_token": "<unk>",
        },
        special_tokens_map__json={"bos_token": folders.added("<s>"), "eos_token": folders.added("</s>")},
        generation_config__json={"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2},
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
    return _write(
        folder,
        "gemma" if version == 1 else "gemma2",
        {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0},
        tokenizer__model=model,
        tokenizer__json=_converted(model, every, kind="none", bos="<bos>"),
        tokenizer_config__json={
            "add_bos_token": True,
            "add_eos_token": False,
            "added_tokens_decoder": _decoder(special if version == 1 else every),
            "additional_special_tokens": list(turns),
            **names,
            "chat_template": GEMMA,
            "clean_up_tokenization_spaces": False,
            "legacy": None,
            "model_max_length": HUGE,
            "sp_model_kwargs": {},
            "spaces_between_special_tokens": False,
            "tokenizer_class": "GemmaTokenizer",
            "use_default_system_prompt": False,
        },
        special_tokens_map__json={
            "additional_special_tokens": list(turns),
            **{name: folders.added(content) for name, content in names.items()},
        },
        generation_config__json={
            "bos_token_id": 2,
            "eos_token_id": 1 if version == 1 else [1, 107],
            "pad_token_id": 0,
        },
    )


def _gemma_2(folder: Path) -> Path:
    return _gemma(folder, 2)


def _qwen2(folder: Path, template: str | None = QWEN_2_5, eos: str = "<|im_end|>") -> Path:
    special = _named(151643, "<|endoftext|>", "<|im_start|>", "<|im_end|>")
    vision = ("object_ref_start", "object_ref_end", "box_start", "box_end", "quad_start", "quad_end")
    vision += ("vision_start", "vision_end", "vision_pad", "image_pad", "video_pad")
    special |= _named(151646, *(f"<|{name}|>" for name in vision))
    code = ("fim_prefix", "fim_middle", "fim_suffix", "fim_pad", "repo_name", "file_sep")
    names = ("<tool_call>", "</tool_call>", *(f"<|{name}|>" for name in code))
    special |= _named(151657, *names, special=False)
    turns = [token["content"] for token in special.values() if token["special"]][1:]
    state = _byte_level(QWEN_SPLIT, special, normalizer=normalizers.NFC())
    vocab = state["model"]["vocab"]
    merges = "\n".join(" ".join(pair) for pair in state["model"]["merges"])
    return _write(
        folder,
        "qwen2",
        {"bos_token_id": 151643, "eos_token_id": 151645},
        tokenizer__json=state,
        vocab__json=vocab,
        merges__txt=f"#version: 0.2\n{merges}\n",
        tokenizer_config__json={
            "add_bos_token": False,
            "add_prefix_space": False,
            "added_tokens_decoder": _decoder(special),
            "additional_special_tokens": turns,
            "bos_token": None,
            "chat_template": template,
            "clean_up_tokenization_spaces": False,
            "eos_token": eos,
            "errors": "replace",
            "model_max_length": 131072,
            "pad_token": "<|endoftext|>",
            "split_special_tokens": False,
            "tokenizer_class": "Qwen2Tokenizer",
            "unk_token": None,
        },
        generation_config__json={
            "bos_token_id": 151643,
            "eos_token_id": [151645, 151643],
            "pad_token_id": 151643,
            "repetition_penalty": 1.05,
        },
    )


def _phi_3(folder: Path, template: str = PHI_3) -> Path:
    model = _sentencepiece(32000)
    marks = ("assistant", "placeholder1", "placeholder2", "placeholder3", "placeholder4", "system", "end")
    marks += ("placeholder5", "placeholder6", "user")
    special = _named(0, "<unk>", "<s>") | _named(2, "</s>", rstrip=True, special=False)
    special |= _named(32000, "<|endoftext|>") | _named(32001, *(f"<|{mark}|>" for mark in marks), rstrip=True)
    names = {"bos_token": "<s>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "unk_token": "<unk>"}
    return _write(
        folder,
        "phi3",
        {"bos_token_id": 1, "eos_token_id": 32000, "pad_token_id": 32000},
        tokenizer__model=model,
        tokenizer__json=_converted(model, special, kind="prepend", bos=None),
        added_tokens__json={token["content"]: index for index, token in special.items() if index >= 32000},
        tokenizer_config__json={
            "add_bos_token": False,
            "add_eos_token": False,
            "added_tokens_decoder": _decoder(special),
            **names,
            "chat_template": template,
            "clean_up_tokenization_spaces": False,
            "legacy": False,
            "model_max_length": 4096,
            "padding_side": "left",
            "sp_model_kwargs": {},
            "tokenizer_class": "LlamaTokenizer",
            "use_default_system_prompt": False,
        },
        special_tokens_map__json={name: folders.added(content) for name, content in names.items()},
        generation_config__json={
            "_from_model_config": True,
            "bos_token_id": 1,
            "eos_token_id": [32000, 32001, 32007],
            "pad_token_id": 32000,
        },
    )


def _phi_4(folder: Path) -> Path:
    both = {"lstrip": True, "rstrip": True}
    names = ("<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
    known = _named(100256, "<|dummy|>") | _named(100257, *names)
    known |= _named(100264, "<|im_start|>", "<|im_end|>", "<|im_sep|>") | _named(100276, "<|endofprompt|>")
    special = {index: token | both for index, token in _filled(known, "<|dummy_{}|>", 100351).items()}
    return _write(
        folder,
        "phi3",
        {"bos_token_id": 100257, "eos_token_id": 100265, "pad_token_id": 100349},
        tokenizer__json=_byte_level(LLAMA_3_SPLIT, special, behavior="removed"),
        tokenizer_config__json={
            "add_prefix_space": False,
            "added_tokens_decoder": _decoder(special),
            "bos_token": "<|endoftext|>",
            "chat_template": PHI_4,
            "clean_up_tokenization_spaces": False,
            "eos_token": "<|im_end|>",
            "model_max_length": 16384,
            "pad_token": special[100349]["content"],
            "padding_side": "left",
            "tokenizer_class": "GPT2Tokenizer",
        },
        special_tokens_map__json={"bos_token": folders.added("<|endoftext|>", **both)},
        generation_config__json={"bos_token_id": 100257, "eos_token_id": 100265, "pad_token_id": 100349},
    )


def _phi_4_mini(folder: Path) -> Path:
    marks = ("assistant", "end", "user", "system", "tool", "/tool", "tool_call", "/tool_call", "tool_response")
    known = _named(199999, "<|endoftext|>") | _named(200018, "<|endofprompt|>")
    known |= _named(200019, *(f"<|{mark}|>" for mark in marks), rstrip=True) | _named(200028, "<|tag|>")
    special = _filled(known, "<|dummy_{}|>", 200028)
    end = "<|endoftext|>"
    return _write(
        folder,
        "phi3",
        {"bos_token_id": 199999, "eos_token_id": 199999, "pad_token_id": 199999},
        tokenizer__json=_byte_level(O200K_SPLIT, special, behavior="removed"),
        tokenizer_config__json={
            "add_bos_token": False,
            "add_eos_token": False,
            "add_prefix_space": False,
            "added_tokens_decoder": _decoder(special),
            "bos_token": end,
            "chat_template": PHI_4_MINI,
            "clean_up_tokenization_spaces": False,
            "eos_token": end,
            "model_max_length": 131072,
            "pad_token": end,
            "tokenizer_class": "GPT2Tokenizer",
            "unk_token": end,
        },
        special_tokens_map__json={"bos_token": folders.added(end), "eos_token": folders.added(end)},
        generation_config__json={"bos_token_id": 199999, "eos_token_id": [200020, 199999], "pad_token_id": 199999},
    )


@dataclass(frozen=True)
class Family:
    """build writes the folder. stops: ids that end a text; turn_end: the one that ends a turn.

    pieces: {text: the tokens that it becomes, without special tokens around it, joined by spaces}.
    alone, talk, told: the template's text of `ALONE` and `TALK` with a generation prompt, of `TOLD` without.
    talk is None where the template refuses a system message.
    """

    build: Callable[[Path], Path]
    stops: tuple[int, ...]
    turn_end: int
    alone: str
    talk: str | None
    told: str
    bos: str | None = None
    special: tuple[str, ...] = ()
    pieces: Mapping[str, str] = field(default_factory=dict)


ALONE = [{"role": "user", "content": "Hi"}]
TOLD = [*ALONE, {"role": "assistant", "content": "Yes."}]
TALK = [{"role": "system", "content": "Be brief."}, *TOLD, {"role": "user", "content": "Why?"}]

_QWEN_TALK = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
    "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
)
_QWEN_ALONE = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
_QWEN_TOLD = f"{_QWEN_ALONE}Yes.<|im_end|>\n"
_QWEN_DEFAULT = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
_QWEN2_DEFAULT = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
_LLAMA_3_DATES = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
_LLAMA_3_OPEN = f"<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n{_LLAMA_3_DATES}"
_LLAMA_3_USER = "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
_LLAMA_3_ANSWER = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
_FOX = "<0xF0> <0x9F> <0xA6> <0x8A>"

FAMILIES = {
    "llama 2": Family(
        _llama_2,
        stops=(2,),
        turn_end=2,
        bos="<s>",
        special=("</s>",),
        alone="<s>[INST] Hi [/INST]",
        talk="<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Yes. </s><s>[INST] Why? [/INST]",
        told="<s>[INST] Hi [/INST] Yes. </s>",
        pieces={"the the": "▁the ▁the", "</s>the": "</s> ▁the", " the": "▁ ▁the", "🦊": f"▁ {_FOX}"},
    ),
    "llama 3.1": Family(
        _llama_3,
        stops=(128001, 128008, 128009),
        turn_end=128009,
        bos="<|begin_of_text|>",
        special=("<|eot_id|>", "<|python_tag|>"),
        alone=f"{_LLAMA_3_OPEN}{_LLAMA_3_USER}Hi{_LLAMA_3_ANSWER}",
        talk=f"{_LLAMA_3_OPEN}Be brief.{_LLAMA_3_USER}Hi{_LLAMA_3_ANSWER}Yes.{_LLAMA_3_USER}Why?{_LLAMA_3_ANSWER}",
        told=f"{_LLAMA_3_OPEN}{_LLAMA_3_USER}Hi{_LLAMA_3_ANSWER}Yes.<|eot_id|>",
        pieces={"the the": "the Ġthe", "e\u0301": "e Ì ģ"},
    ),
    "mistral 0.1": Family(
        _mistral_1,
        stops=(2,),
        turn_end=2,
        bos="<s>",
        special=("</s>",),
        alone="<s>[INST] Hi [/INST]",
        talk=None,
        told="<s>[INST] Hi [/INST]Yes.</s> ",
        pieces={"the the": "▁the ▁the", "</s>the": "</s> ▁the", "🦊": f"▁ {_FOX}"},
    ),
    "mistral 0.3": Family(
        _mistral_3,
        stops=(2,),
        turn_end=2,
        bos="<s>",
        special=("</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"),
        alone="<s>[INST] Hi[/INST]",
        talk="<s>[INST] Hi[/INST] Yes.</s>[INST] Be brief.\n\nWhy?[/INST]",
        told="<s>[INST] Hi[/INST] Yes.</s>",
        pieces={"the the": "▁the ▁the", "[INST]he": "[INST] he", "[INST] the": "[INST] ▁the"},
    ),
    "nemo": Family(
        _nemo,
        stops=(2,),
        turn_end=2,
        bos="<s>",
        special=("</s>", "[INST]", "[TOOL_CALLS]"),
        alone="<s>[INST]Hi[/INST]",
        talk="<s>[INST]Hi[/INST]Yes.</s>[INST]Be brief.\n\nWhy?[/INST]",
        told="<s>[INST]Hi[/INST]Yes.</s>",
        pieces={"the the": "the Ġthe", "[INST]the": "[INST] the", "314": "3 1 4"},
    ),
    "mixtral": Family(
        _mixtral,
        stops=(2,),
        turn_end=2,
        bos="<s>",
        special=("</s>",),
        alone="<s>[INST] Hi [/INST]",
        talk=None,
        told="<s>[INST] Hi [/INST]Yes.</s> ",
    ),
    "gemma 1": Family(
        _gemma,
        stops=(1,),
        turn_end=107,
        bos="<bos>",
        special=("<start_of_turn>", "<end_of_turn>", "<eos>"),
        alone="<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
        talk=None,
        told="<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nYes.<end_of_turn>\n",
        pieces={"the the": "the ▁the", "a\n\n\nb": "a \n\n\n b", "the  the": "the ▁▁ the", "🦊": _FOX},
    ),
    "gemma 2": Family(
        _gemma_2,
        stops=(1, 107),
        turn_end=107,
        bos="<bos>",
        special=("<start_of_turn>", "<end_of_turn>", "<unused7>", "<h1>", "\n\n"),
        alone="<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
        talk=None,
        told="<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nYes.<end_of_turn>\n",
        pieces={"the the": "the ▁the", "a\n\n\nb": "a \n\n\n b", "the  the": "the ▁▁ the", "<h1>": "<h1>"},
    ),
    "qwen 2": Family(
        lambda folder: _qwen2(folder, QWEN_2),
        stops=(151645, 151643),
        turn_end=151645,
        special=("<|im_end|>", "<tool_call>"),
        alone=_QWEN2_DEFAULT + _QWEN_ALONE,
        talk=_QWEN_TALK,
        told=_QWEN2_DEFAULT + _QWEN_TOLD,
        pieces={"the the": "the Ġthe", "314": "3 1 4", "e\u0301": "Ã©"},
    ),
    "qwen 2.5": Family(
        _qwen2,
        stops=(151645, 151643),
        turn_end=151645,
        alone=_QWEN_DEFAULT + _QWEN_ALONE,
        talk=_QWEN_TALK,
        told=_QWEN_DEFAULT + _QWEN_TOLD,
    ),
    "qwq": Family(
        lambda folder: _qwen2(folder, QWQ),
        stops=(151645, 151643),
        turn_end=151645,
        alone=f"{_QWEN_ALONE}<think>\n",
        talk=f"{_QWEN_TALK}<think>\n",
        told=_QWEN_TOLD,
    ),
    "phi 3": Family(
        _phi_3,
        stops=(32000, 32001, 32007),
        turn_end=32007,
        special=("<|user|>", "<|end|>", "<|endoftext|>", "</s>"),
        alone="<|user|>\nHi<|end|>\n<|assistant|>\n",
        talk="<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\nYes.<|end|>\n"
        "<|user|>\nWhy?<|end|>\n<|assistant|>\n",
        told="<|user|>\nHi<|end|>\n<|assistant|>\nYes.<|end|>\n<|endoftext|>",
        pieces={
            "the the": "▁the ▁the",
            "<|user|>\n \nthe": "<|user|> ▁the",
            "<|endoftext|> the": "<|endoftext|> ▁ ▁the",
        },
    ),
    "phi 4": Family(
        _phi_4,
        stops=(100265,),
        turn_end=100265,
        special=("<|im_start|>", "<|im_sep|>", "<|im_end|>"),
        alone="<|im_start|>user<|im_sep|>Hi<|im_end|><|im_start|>assistant<|im_sep|>",
        talk="<|im_start|>system<|im_sep|>Be brief.<|im_end|><|im_start|>user<|im_sep|>Hi<|im_end|>"
        "<|im_start|>assistant<|im_sep|>Yes.<|im_end|><|im_start|>user<|im_sep|>Why?<|im_end|>"
        "<|im_start|>assistant<|im_sep|>",
        told="<|im_start|>user<|im_sep|>Hi<|im_end|><|im_start|>assistant<|im_sep|>Yes.<|im_end|>",
        pieces={"the the": "the Ġthe", "the \n<|im_end|> \n the": "the <|im_end|> the"},
    ),
    "phi 4 mini": Family(
        _phi_4_mini,
        stops=(200020, 199999),
        turn_end=200020,
        special=("<|user|>", "<|end|>", "<|endoftext|>", "<|tool|>"),
        alone="<|user|>Hi<|end|><|assistant|>",
        talk="<|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>Yes.<|end|><|user|>Why?<|end|><|assistant|>",
        told="<|user|>Hi<|end|><|assistant|>Yes.<|end|><|endoftext|>",
        pieces={"the the": "the Ġthe", "<|user|> \nthe": "<|user|> the"},
    ),
}

# Of these two AutoTokenizer reads the vocabulary alone out of tokenizer.json and builds the rest anew, where
# transformers 4 and PreTrainedTokenizerFast take the file as it is: test_where_transformers_rebuilds_the_file.
REBUILT = ("llama 2", "gemma 1")


def theirs(name: str, folder: Path) -> Any:
    """transformers' tokenizer of a family's folder."""
    return (PreTrainedTokenizerFast if name in REBUILT else AutoTokenizer).from_pretrained(folder)
