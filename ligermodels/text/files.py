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
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ligermodels.checkpoint import lenient_json
from ligermodels.errors import TokenizerError

# The largest tokenizer.json of the zoo has 17 MB; parsing takes about ten times the file in memory.
MAX_FILE_BYTES = 2**28

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
    copied: tuple[Path, ...] = field(repr=False)

    def path(self, name: str) -> Path | None:
        return _existing(self.folder, name)


def read_files(folder: str | Path) -> TokenizerFiles:
    """Reads everything but the vocabulary. Raises TokenizerError for a file that is damaged."""
    folder = Path(folder)
    if not folder.is_dir():
        raise TokenizerError(f"{folder} is not a folder. Next step: pass the folder that holds tokenizer.json.")
    config = _read_object(folder, "tokenizer_config.json")
    names = dict(config)
    if "added_tokens_decoder" not in config:
        names |= _read_object(folder, "special_tokens_map.json")
    named = {key: text for key, value in names.items() if key.endswith("_token") and (text := _content(value))}
    extra = names.get("extra_special_tokens") or names.get("additional_special_tokens") or []
    extra = list(extra.values()) if isinstance(extra, Mapping) else extra
    if not isinstance(extra, list):
        raise TokenizerError(f"{folder}: the extra special tokens must be a list, not {extra!r}.")
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
        model_vocab_size=next((size for size in sizes if isinstance(size, int)), None),
        copied=tuple(path for name in COPIED_FILES if (path := _existing(folder, name)))
        + tuple(sorted((folder / "additional_chat_templates").glob("*.jinja"))),
    )


def read_bytes(path: Path) -> bytes:
    """The file, unless it is too large, a git-lfs pointer or an HTML page."""
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise TokenizerError(
            f"{path} is too large to be a tokenizer file: {size:,} bytes, the limit is {MAX_FILE_BYTES:,}. "
            "Likely cause: another file under this name."
        )
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error}.") from error
    if data.startswith(b"version https://git-lfs"):
        raise TokenizerError(f"{path} is a git-lfs pointer, not the file itself. Next step: run `git lfs pull`.")
    if data.lstrip()[:9].lower().startswith((b"<!doctype", b"<html")):
        raise TokenizerError(f"{path} is an HTML page. Likely cause: a download link saved in place of the file.")
    return data


def read_text(path: Path) -> str:
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} is not UTF-8: {error}. Likely cause: a damaged or converted file.") from error


def _existing(folder: Path, name: str) -> Path | None:
    path = folder / name
    if path.exists() and not path.is_file():
        raise TokenizerError(f"{path} is not a regular file. Next step: put the tokenizer's {name} in its place.")
    return path if path.is_file() else None


def _read_object(folder: Path, name: str) -> dict[str, Any]:
    path = _existing(folder, name)
    if path is None:
        return {}
    text = read_text(path)
    try:
        value = lenient_json(text) if name == "generation_config.json" else json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise TokenizerError(
            f"{path} is not valid JSON: {error}. Likely cause: an interrupted download or a hand edit."
        ) from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} must hold a JSON object; it holds a {type(value).__name__}.")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(f"{path} holds a lone surrogate, which has no UTF-8: {error}.") from error
    return value


def _content(value: Any) -> str | None:
    """A special token is written as a string, or as an object with its flags."""
    value = value.get("content") if isinstance(value, Mapping) else value
    return value if isinstance(value, str) and value else None


def _ids(source: Mapping[str, Any], key: str, path: Path) -> tuple[int, ...]:
    value = source.get(key)
    values = value if isinstance(value, list) else [] if value is None else [value]
    for item in values:
        if not isinstance(item, int) or isinstance(item, bool):
            raise TokenizerError(f"{path}: {key} must be an integer or a list of integers, not {value!r}.")
    # -1 is how some configs write "none".
    return tuple(item for item in values if item >= 0)


def _added_tokens(folder: Path, config: Mapping[str, Any], special: set[str]) -> tuple[AddedToken, ...]:
    tokens = []
    try:
        if "added_tokens_decoder" in config:
            flags = ("special", "lstrip", "rstrip", "normalized", "single_word")
            for index, value in config["added_tokens_decoder"].items():
                given = {flag: bool(value[flag]) for flag in flags if flag in value}
                tokens.append(AddedToken(id=int(index), content=value["content"], **given))
        else:
            for content, index in _read_object(folder, "added_tokens.json").items():
                is_special = content in special
                tokens.append(AddedToken(id=int(index), content=content, special=is_special, normalized=not is_special))
        assert all(isinstance(token.content, str) and token.content and token.id >= 0 for token in tokens)
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise TokenizerError(
            f"{folder}: an added token cannot be read ({type(error).__name__}: {error}). It must have a "
            "content and an id of 0 or more, in tokenizer_config.json (added_tokens_decoder) or "
            "added_tokens.json."
        ) from error
    return tuple(sorted(tokens, key=lambda token: token.id))


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    found = {path.stem: read_text(path) for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if path := _existing(folder, "chat_template.jinja"):
        found["default"] = read_text(path)
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
        assert all(isinstance(text, str) for pair in found.items() for text in pair)
    except (AssertionError, KeyError, TypeError) as error:
        raise TokenizerError(
            f"{folder}: chat_template must be a string or a list of objects with name and template; it is "
            f"{str(declared)[:80]!r}."
        ) from error
    return found
