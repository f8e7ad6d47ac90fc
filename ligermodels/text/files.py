"""Reads the tokenizer files of a checkpoint folder, except the vocabulary.

The order of precedence where several files have a value:
- chat_template.jinja and additional_chat_templates/*.jinja > `chat_template` of tokenizer_config.json >
  chat_template.json (old processors);
- `added_tokens_decoder` of tokenizer_config.json > added_tokens.json;
- with `added_tokens_decoder`, the special tokens of tokenizer_config.json; without it (older folders)
  special_tokens_map.json overrides them;
- eos ids are the union of generation_config.json, config.json (and its text_config) and the tokenizer's own.

Checked against transformers 5.23, `PreTrainedTokenizerBase._from_pretrained`.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short
from typing import Any, NamedTuple

from ligermodels.checkpoint.files import MORE_TEMPLATES, TEMPLATES, TOKENIZER, VOCABULARIES, check_file, read_json
from ligermodels.errors import CheckpointError, HubError, TokenizerError

# Classes of transformers that pad on the left by default, and the length that means no limit there.
_LEFT_PADDED, _NO_LIMIT = ("GemmaTokenizer", "GemmaTokenizerFast"), int(1e30)


@dataclass(frozen=True, kw_only=True)
class AddedToken:
    """A string that is split off a text before the tokenizer's model runs.

    lstrip, rstrip: white space on that side belongs to the token. normalized: matched in the normalised text.
    single_word: not matched next to a letter or digit. special: `decode` can skip it.
    """

    id: int
    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    single_word: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The content and the flags, for tokenizer_config.json and `tokenizers.AddedToken`."""
        return {name: value for name, value in vars(self).items() if name != "id"}


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """The tokenizer's settings in a folder.

    named: {"bos_token": "<s>", ...}, every *_token of the folder. extra_special: the special tokens without a name.
    added: the added tokens, by id. templates: {name: chat template}.
    eos_token_ids, pad_token_id: those of generation_config.json and config.json.
    model_vocab_size: vocab_size of config.json; None without it.
    paths: the files that `save_pretrained` copies. template_file: another file with the default template.
    """

    folder: Path
    config: Mapping[str, Any]
    named: Mapping[str, str]
    extra_special: tuple[str, ...]
    added: tuple[AddedToken, ...]
    templates: Mapping[str, str]
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    model_vocab_size: int | None
    paths: tuple[Path, ...]
    template_file: Path | None = None

    def path(self, name: str) -> Path | None:
        """The path of one of the folder's files, or None."""
        return _existing(self.folder, name)

    @property
    def vocabulary(self) -> Path | None:
        """The first of tokenizer.json, tekken.json, tokenizer.model and the newest tokenizer.model.vN, or None."""
        return next((path for name in names_in(self.folder, VOCABULARIES) if (path := self.path(name))), None)


class Converted(NamedTuple):
    """A vocabulary file as a `tokenizers.Tokenizer`; the special tokens that it names, and those that end a turn."""

    native: Any
    named: Mapping[str, str] = {}
    stops: tuple[str, ...] = ()


def read_files(folder: str | Path) -> TokenizerFiles:
    """Reads everything but the vocabulary. Raises TokenizerError for a damaged file."""
    folder = Path(folder)
    if not folder.is_dir():
        raise TokenizerError(f"{folder} is not a folder. Next step: pass the folder with tokenizer.json.")
    config = _read_object(folder, "tokenizer_config.json")
    names = dict(config)
    if "added_tokens_decoder" not in config:
        names |= _read_object(folder, "special_tokens_map.json")
    named = {key: text for key, value in names.items() if key.endswith("_token") and (text := _content(value))}
    extra = names.get("extra_special_tokens") or names.get("additional_special_tokens") or []
    if isinstance(extra, Mapping):
        extra = list(extra.values())
    if not isinstance(extra, list):
        raise TokenizerError(f"{folder}: the extra special tokens must be a list, not {short(extra)}.")
    extra_special = tuple(text for value in extra if (text := _content(value)))
    model, generation = _read_object(folder, "config.json"), _read_object(folder, "generation_config.json")
    text_model = model["text_config"] if isinstance(model.get("text_config"), dict) else {}
    sources = (generation, model, text_model)
    pad_ids = _ids(sources, "pad_token_id", folder)
    sizes = (model.get("vocab_size"), text_model.get("vocab_size"))
    names_of_files = names_in(folder, (*TOKENIZER, *TEMPLATES))
    return TokenizerFiles(
        folder=folder,
        config=config,
        named=named,
        extra_special=extra_special,
        added=_added_tokens(folder, config, {*named.values(), *extra_special}),
        templates=_templates(folder, config),
        eos_token_ids=_ids(sources, "eos_token_id", folder),
        pad_token_id=pad_ids[0] if pad_ids else None,
        model_vocab_size=next((size for size in sizes if type(size) is int), None),
        paths=tuple(path for name in names_of_files if (path := _existing(folder, name))),
    )


def call_settings(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """padding_side, truncation_side and model_max_length of a tokenizer_config.json, or transformers' defaults."""
    length, is_left = config.get("model_max_length"), config.get("tokenizer_class") in _LEFT_PADDED
    settings = {
        "padding_side": config.get("padding_side") or ("left" if is_left else "right"),
        "truncation_side": config.get("truncation_side") or "right",
        "model_max_length": _NO_LIMIT if length is None else length,
    }
    sides = {settings["padding_side"], settings["truncation_side"]} <= {"left", "right"}
    if not sides or not isinstance(settings["model_max_length"], int | float):
        raise TokenizerError(
            f"{folder / 'tokenizer_config.json'}: {short(settings)}: the sides must be 'left' or 'right', the length a "
            "number. Likely cause: a hand edit."
        )
    return settings


def read_bytes(path: Path) -> bytes:
    """The file's bytes, unless it is a git-lfs pointer or an HTML page."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise TokenizerError(f"there is no file {path}.") from None
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error}.") from error
    if data.startswith(b"version https://git-lfs"):
        raise TokenizerError(f"{path} is a git-lfs pointer, not the file itself. Next step: run `git lfs pull`.")
    if data[:99].lstrip()[:9].lower().startswith((b"<!doctype", b"<html")):
        raise TokenizerError(f"{path} is an HTML page. Likely cause: a download link saved in place of the file.")
    return data


def read_text(path: Path) -> str:
    """The file as UTF-8 text; raises as `read_bytes`."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} is not UTF-8: {error}. Likely cause: a damaged or converted file.") from error


def names_in(folder: Path, patterns: Sequence[str]) -> list[str]:
    """The names in `patterns`; for one with a *, the files in `folder` that match.

    Of Mistral's tokenizer.model.vN (v3, v7m1) the largest N is first; other files of that pattern are left out.
    """
    names: list[str] = []
    for pattern in patterns:
        if "*" not in pattern:
            names.append(pattern)
            continue
        matches = sorted(path.relative_to(folder).as_posix() for path in folder.glob(pattern))
        if pattern.startswith("tokenizer.model."):
            matches = sorted(filter(_version, matches), key=_version, reverse=True)
        names += matches
    return names


def _version(name: str) -> tuple[int, ...]:
    """(7, 1) of tokenizer.model.v7m1, () of another name."""
    match = re.fullmatch(r"tokenizer\.model\.v(\d+)(?:m(\d+))?", name)
    return (int(match[1]), int(match[2] or 0)) if match else ()


def _existing(folder: Path, name: str) -> Path | None:
    """The path of a file, or None. Raises TokenizerError for a link that leaves the folder."""
    path = folder / name
    if not os.path.lexists(path):
        return None
    try:
        check_file(path, folder)
    except (CheckpointError, HubError) as error:
        raise TokenizerError(str(error)) from error
    return path


def _more_templates(folder: Path) -> list[Path]:
    names = names_in(folder, [f"{MORE_TEMPLATES}/*.jinja"])
    return [path for name in names if (path := _existing(folder, name))]


def _read_object(folder: Path, name: str) -> dict[str, Any]:
    path = _existing(folder, name)
    if path is None:
        return {}
    try:
        return read_json(path, lenient=name == "generation_config.json")
    except (CheckpointError, HubError) as error:
        raise TokenizerError(str(error)) from error


def _content(value: Any) -> str | None:
    """The text of a special token, which is a string or an object with flags; None for neither."""
    value = value.get("content") if isinstance(value, Mapping) else value
    return value if isinstance(value, str) and value else None


def _ids(sources: Sequence[Mapping[str, Any]], key: str, folder: Path) -> tuple[int, ...]:
    """The ids under `key` in any of the sources, each once."""
    all_ids: list[int] = []
    for value in (source.get(key) for source in sources):
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(index) is not int for index in ids):
            raise TokenizerError(
                f"{folder}: {key} in generation_config.json and config.json must be an integer or a list of integers, "
                f"not {short(value)}. Likely cause: a hand edit."
            )
        all_ids += ids
    return tuple(index for index in dict.fromkeys(all_ids) if index >= 0)  # some configs write -1 for none


def _added_tokens(folder: Path, config: Mapping[str, Any], special: set[str]) -> tuple[AddedToken, ...]:
    """The added tokens by id. special: those of added_tokens.json that are special, for it has no flags."""
    tokens = []
    try:
        if "added_tokens_decoder" in config:
            flags = ("special", "lstrip", "rstrip", "normalized", "single_word")
            for index, value in config["added_tokens_decoder"].items():
                token_flags = {flag: bool(value[flag]) for flag in flags if flag in value}
                tokens.append(AddedToken(id=int(index), content=value["content"], **token_flags))
        else:
            for content, index in _read_object(folder, "added_tokens.json").items():
                is_special = content in special
                tokens.append(AddedToken(id=int(index), content=content, special=is_special, normalized=not is_special))
        if not all(isinstance(token.content, str) and token.content and token.id >= 0 for token in tokens):
            raise ValueError("a content that is not a str, or a negative id")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TokenizerError(
            f"{folder}: an added token cannot be read ({type(error).__name__}: {str(error)[:80]}). It must have a "
            "content and an id of 0 or more, in tokenizer_config.json (added_tokens_decoder) or added_tokens.json."
        ) from error
    return tuple(sorted(tokens, key=lambda token: token.id))


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    templates = {path.stem: read_text(path) for path in _more_templates(folder)}
    if path := _existing(folder, "chat_template.jinja"):
        templates["default"] = read_text(path)
    if templates:
        return templates
    declared = config.get("chat_template") or _read_object(folder, "chat_template.json").get("chat_template")
    try:
        if isinstance(declared, list):
            declared = {entry["name"]: entry["template"] for entry in declared}
        templates = {"default": declared} if isinstance(declared, str) else dict(declared or {})
        if not all(isinstance(text, str) for pair in templates.items() for text in pair):
            raise TypeError("names and templates must be texts")
    except (KeyError, TypeError, ValueError) as error:
        raise TokenizerError(
            f"{folder}: chat_template must be a string or a list of objects with name and template; it is "
            f"{short(declared)}. Likely cause: a hand edit."
        ) from error
    return templates
