"""The tokenizer files of one checkpoint folder, read and checked, before any tokenizer is built from them.

What each file is for, in the order in which it wins:
- chat_template.jinja and additional_chat_templates/*.jinja > `chat_template` of tokenizer_config.json >
  chat_template.json (old processors);
- `added_tokens_decoder` of tokenizer_config.json > added_tokens.json;
- where tokenizer_config.json has `added_tokens_decoder`, its bos, eos, pad and unk stand; in older folders
  special_tokens_map.json overrides them;
- eos ids are the union of generation_config.json, config.json (and its text_config) and the tokenizer's own.

Checked against transformers 5.23, `PreTrainedTokenizerBase._from_pretrained`.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as short
from typing import Any

from ligermodels.checkpoint.reading import check_file, lenient_json
from ligermodels.errors import CheckpointError, HubError, TokenizerError

# The largest tokenizer.json known has 33 MB; parsing takes about ten times the file in memory.
MAX_FILE_BYTES = 2**26
# 65,000 added tokens take 12 MB of tokenizer_config.json. Text beyond ASCII takes up to four times its bytes.
_MAX_JSON_BYTES, _MAX_JSON_ITEMS, _MAX_WIDE_BYTES = 2**24, 600_000, 2**22
# Each comma that is mended costs a parse of all.
_MAX_MENDED = 2**16
_MAX_TEMPLATES, MAX_CONTENT = 100, 1000
MAX_ID = 2**31 - 1
# Classes of transformers that pad on the left where the file does not say, and what stands for no limit there.
_LEFT, _NO_LIMIT = ("GemmaTokenizer", "GemmaTokenizerFast"), int(1e30)

MORE_TEMPLATES = "additional_chat_templates"

COPIED_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer.model.v3",
    "tekken.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True, kw_only=True)
class AddedToken:
    """A string that is cut out of the text before the model of the tokenizer sees it.

    lstrip, rstrip: the white space on that side belongs to the token. normalized: looked for in the
    normalised text. single_word: not next to a letter or digit. special: `decode` can skip it.
    """

    id: int
    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    single_word: bool = False


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    folder: Path
    config: Mapping[str, Any]
    # {"bos_token": "<s>", ...}: every *_token that the folder declares.
    named: Mapping[str, str]
    extra_special: tuple[str, ...]
    added: tuple[AddedToken, ...]
    templates: Mapping[str, str]
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    # Rows of the model's embedding as config.json states them; None without config.json.
    model_vocab_size: int | None
    # The files that are the tokenizer, and what `stamp` says of each.
    copied: Mapping[Path, tuple[int, int]] = field(repr=False)

    def path(self, name: str) -> Path | None:
        return _existing(self.folder, name)


def read_files(folder: str | Path) -> TokenizerFiles:
    """Reads everything but the vocabulary. Raises TokenizerError for a file that is damaged."""
    try:
        os.listdir(folder)
        folder = Path(folder)
    except (OSError, TypeError, ValueError) as error:
        raise TokenizerError(
            f"{str(folder)[:1000]} is not a folder that can be read ({type(error).__name__}). Next step: pass the "
            "folder that holds tokenizer.json."
        ) from error
    config = _read_object(folder, "tokenizer_config.json")
    names = dict(config)
    if "added_tokens_decoder" not in config:
        names |= _read_object(folder, "special_tokens_map.json")
    named = {key: text for key, value in names.items() if key.endswith("_token") and (text := _content(value))}
    extra = names.get("extra_special_tokens") or names.get("additional_special_tokens") or []
    extra = list(extra.values()) if isinstance(extra, Mapping) else extra
    if not isinstance(extra, list):
        raise TokenizerError(f"{folder}: the extra special tokens must be a list, not {short(extra)}.")
    extra_special = tuple(text for value in extra if (text := _content(value)))
    model, generation = _read_object(folder, "config.json"), _read_object(folder, "generation_config.json")
    text_model = model.get("text_config")
    text_model = text_model if isinstance(text_model, dict) else {}
    sizes = (model.get("vocab_size"), text_model.get("vocab_size"))
    return TokenizerFiles(
        folder=folder,
        config=config,
        named=named,
        extra_special=extra_special,
        added=_added_tokens(folder, config, {*named.values(), *extra_special}),
        templates=_templates(folder, config),
        eos_token_ids=tuple(
            dict.fromkeys(
                _ids(generation, "eos_token_id", folder / "generation_config.json")
                + _ids(model, "eos_token_id", folder / "config.json")
                + _ids(text_model, "eos_token_id", folder / "config.json")
            )
        ),
        pad_token_id=next(
            (i for source in (generation, model, text_model) for i in _ids(source, "pad_token_id", folder)),
            None,
        ),
        model_vocab_size=next((size for size in sizes if type(size) is int), None),
        copied={
            path: stamp(path)
            for path in (*(_existing(folder, name) for name in COPIED_FILES), *_more_templates(folder))
            if path is not None
        },
    )


def stamp(path: Path) -> tuple[int, int]:
    """Another one after the file has been written anew."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def call_settings(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The sides of padding and truncation and the length that a tokenizer_config.json states, or transformers' own."""
    length = config.get("model_max_length")
    found = {
        "padding_side": config.get("padding_side") or ("left" if config.get("tokenizer_class") in _LEFT else "right"),
        "truncation_side": config.get("truncation_side") or "right",
        "model_max_length": _NO_LIMIT if length is None else length,
    }
    sides = {found["padding_side"], found["truncation_side"]} <= {"left", "right"}
    if not sides or isinstance(length, bool) or not isinstance(found["model_max_length"], int | float):
        raise TokenizerError(
            f"{folder / 'tokenizer_config.json'}: {short(found)}: the sides must be 'left' or 'right', the length a "
            "number. Likely cause: a hand edit."
        )
    return found


def read_bytes(path: Path, limit: int = MAX_FILE_BYTES) -> bytes:
    """The file, unless it is too large, a git-lfs pointer or an HTML page."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(limit + 1) if size <= limit else b""
        if max(size, len(data)) > limit:
            raise TokenizerError(
                f"{path} is too large to be a tokenizer file: {size:,} bytes, the limit is {limit:,}. "
                "Likely cause: another file under this name."
            )
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error}.") from error
    if data.startswith(b"version https://git-lfs"):
        raise TokenizerError(f"{path} is a git-lfs pointer, not the file itself. Next step: run `git lfs pull`.")
    if data.lstrip()[:9].lower().startswith((b"<!doctype", b"<html")):
        raise TokenizerError(f"{path} is an HTML page. Likely cause: a download link saved in place of the file.")
    return data


def read_text(path: Path, limit: int = MAX_FILE_BYTES) -> str:
    try:
        return read_bytes(path, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} is not UTF-8: {error}. Likely cause: a damaged or converted file.") from error


def _existing(folder: Path, name: str) -> Path | None:
    path = folder / name
    if not os.path.lexists(path):
        return None
    try:
        check_file(path, folder)
    except (CheckpointError, HubError) as error:
        raise TokenizerError(str(error)) from error
    return path


def _more_templates(folder: Path) -> list[Path]:
    found = sorted((folder / MORE_TEMPLATES).glob("*.jinja"))
    if len(found) > _MAX_TEMPLATES:
        raise TokenizerError(f"{folder} has {len(found)} additional chat templates; at most {_MAX_TEMPLATES} are read.")
    return [path for path in found if _existing(folder, path.relative_to(folder).as_posix())]


def _read_object(folder: Path, name: str) -> dict[str, Any]:
    path = _existing(folder, name)
    if path is None:
        return {}
    data = read_bytes(path, _MAX_JSON_BYTES)
    items = sum(map(data.count, b",[{"))
    if items > _MAX_JSON_ITEMS or (len(data) > _MAX_WIDE_BYTES and not data.isascii()):
        raise TokenizerError(
            f"{path} is too large, with {len(data):,} bytes and {items:,} items; read are at most "
            f"{_MAX_JSON_ITEMS:,} items, and {_MAX_WIDE_BYTES:,} bytes where not all is ASCII. Likely cause: another "
            "file under this name."
        )
    try:
        text = data.decode("utf-8")
        mend = name == "generation_config.json" and len(text) <= _MAX_MENDED
        value = lenient_json(text) if mend else json.loads(text)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} is not UTF-8: {error}. Likely cause: a damaged or converted file.") from error
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"{path} holds a lone surrogate, which has no UTF-8. Likely cause: a hand edit."
        ) from error
    except (ValueError, RecursionError) as error:  # ValueError also for a number of thousands of digits
        raise TokenizerError(
            f"{path} is not valid JSON: {error}. Likely cause: an interrupted download or a hand edit."
        ) from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} must hold a JSON object; it holds a {type(value).__name__}.")
    return value


def _content(value: Any) -> str | None:
    """A special token is written as a string, or as an object with its flags."""
    value = value.get("content") if isinstance(value, Mapping) else value
    return value if isinstance(value, str) and value else None


def _ids(source: Mapping[str, Any], key: str, path: Path) -> tuple[int, ...]:
    value = source.get(key)
    values = value if isinstance(value, list) else [] if value is None else [value]
    for item in values:
        if not isinstance(item, int) or isinstance(item, bool) or item > MAX_ID:
            raise TokenizerError(
                f"{path}: {key} must be an integer or a list of integers up to {MAX_ID:,}, not {short(value)}. "
                "Likely cause: a hand edit."
            )
    # -1 is how some configs write "none".
    return tuple(item for item in values if item >= 0)


def _added_tokens(folder: Path, config: Mapping[str, Any], special: set[str]) -> tuple[AddedToken, ...]:
    tokens = []
    older = {} if "added_tokens_decoder" in config else _read_object(folder, "added_tokens.json")
    try:
        if "added_tokens_decoder" in config:
            flags = ("special", "lstrip", "rstrip", "normalized", "single_word")
            for index, value in config["added_tokens_decoder"].items():
                given = {flag: bool(value[flag]) for flag in flags if flag in value}
                tokens.append(AddedToken(id=int(index), content=value["content"], **given))
        else:
            for content, index in older.items():
                is_special = content in special
                tokens.append(AddedToken(id=int(index), content=content, special=is_special, normalized=not is_special))
        for token in tokens:
            if not (isinstance(token.content, str) and 0 < len(token.content) <= MAX_CONTENT):
                raise ValueError(f"content {short(token.content)}")
            if not 0 <= token.id <= MAX_ID:
                raise ValueError(f"id {short(token.id)}")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TokenizerError(
            f"{folder}: an added token cannot be read ({type(error).__name__}: {str(error)[:80]}). It must have a "
            f"content of 1 to {MAX_CONTENT:,} characters and an id of 0 or more and below 2**31, in "
            "tokenizer_config.json (added_tokens_decoder) or added_tokens.json."
        ) from error
    return tuple(sorted(tokens, key=lambda token: token.id))


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    found = {path.stem: read_text(path, _MAX_WIDE_BYTES // 8) for path in _more_templates(folder)}
    if path := _existing(folder, "chat_template.jinja"):
        found["default"] = read_text(path, _MAX_WIDE_BYTES)
    if found:
        return found
    declared = config.get("chat_template") or _read_object(folder, "chat_template.json").get("chat_template")
    if declared is None:
        return {}
    if isinstance(declared, str):
        return {"default": declared}
    try:
        pairs = declared.items() if isinstance(declared, Mapping) else [(t["name"], t["template"]) for t in declared]
        found = dict(pairs)
        if not all(isinstance(text, str) for pair in found.items() for text in pair):
            raise TypeError("names and templates must be texts")
    except (KeyError, TypeError, ValueError) as error:
        raise TokenizerError(
            f"{folder}: chat_template must be a string or a list of objects with name and template; it is "
            f"{short(declared)}. Likely cause: a hand edit."
        ) from error
    return found
