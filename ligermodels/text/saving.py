"""A tokenizer's files: those it was loaded from, byte for byte, and what was changed since.

- Other templates: chat_template.jinja and additional_chat_templates/*.jinja, and no others beside them.
- Other tokens: tokenizer_config.json names all of them (`added_tokens_decoder`), which replaces
  special_tokens_map.json and added_tokens.json; with new ones tokenizer.json is written anew.
- Other sides of padding and truncation, another model_max_length: tokenizer_config.json.

Both this package and transformers read the folder so. A folder without tokenizer.json and tokenizer.model is
refused, so that they go last, and one of another tokenizer goes first: no reader meets halves of two.
"""

import json
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ligermodels.errors import HubError, TokenizerError
from ligermodels.text.files import COPIED_FILES, MORE_TEMPLATES, TokenizerFiles, call_settings, stamp
from ligermodels.text.json_backend import JsonBackend
from ligermodels.text.vocabulary import Backend

_VOCABULARY = ("tokenizer.json", "tokenizer.model")
_TOKENS = ("special_tokens_map.json", "added_tokens.json")


def contents(
    loaded: TokenizerFiles, files: TokenizerFiles, backend: Backend, settings: Mapping[str, Any]
) -> dict[str, bytes | Path]:
    """{name in the folder: its bytes, or the file to copy}. settings: those of `call_settings`, as they are now."""
    for path, known in loaded.copied.items():
        if not path.exists() or stamp(path) != known:
            raise TokenizerError(f"{path} is not what it was when the tokenizer was loaded. Next step: load it again.")
    found: dict[str, bytes | Path] = {path.relative_to(files.folder).as_posix(): path for path in loaded.copied}
    config = dict(loaded.config)
    if files.templates != loaded.templates:
        config.pop("chat_template", None)
        found = {name: path for name, path in found.items() if not name.endswith((".jinja", "chat_template.json"))}
        found |= {_template_name(name): text.encode() for name, text in files.templates.items()}
    if (files.named, files.extra_special, files.added) != (loaded.named, loaded.extra_special, loaded.added):
        found = {name: path for name, path in found.items() if name not in _TOKENS}
        # A name that is None here has no token, also where the class of transformers has one by default.
        config |= dict.fromkeys(loaded.named) | dict(files.named)
        if files.extra_special != loaded.extra_special:
            config.pop("extra_special_tokens", None)
            config["additional_special_tokens"] = list(files.extra_special)
        flags = ("content", "special", "lstrip", "rstrip", "normalized", "single_word")
        config["added_tokens_decoder"] = {
            str(index): {flag: getattr(token, flag) for flag in flags} for index, token in sorted(backend.added.items())
        }
    if files.added != loaded.added and isinstance(backend, JsonBackend):
        found["tokenizer.json"] = backend.to_json().encode()
        # The classes of transformers that build all but the vocabulary anew split the text around new tokens elsewhere.
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    stated = call_settings(config, files.folder)
    config |= {name: value for name, value in settings.items() if value != stated[name]}
    if config != loaded.config:
        found["tokenizer_config.json"] = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    return found


def write(target: Path, files: Mapping[str, bytes | Path]) -> tuple[str, ...]:
    """Puts the files into the folder, in place of any other tokenizer's there. Returns their paths.

    Files that are the same already are not touched. Raises HubError for a folder that cannot be written.
    """
    staged: dict[str, Path] = {}
    try:
        target.mkdir(parents=True, exist_ok=True)
        there = {name for name in COPIED_FILES if os.path.lexists(target / name)}
        there |= {path.relative_to(target).as_posix() for path in (target / MORE_TEMPLATES).glob("*.jinja")}
        for name, source in files.items():
            data = source if isinstance(source, bytes) else source.read_bytes()
            if (target / name).is_file() and (target / name).read_bytes() == data:
                continue
            staged[name] = path = (target / name).with_name(f".{Path(name).name}.{secrets.token_hex(4)}")
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
        for name in sorted(there, key=_VOCABULARY.__contains__, reverse=True):
            if name not in files or (name in _VOCABULARY and name in staged):
                (target / name).unlink(missing_ok=True)
        for name in sorted(staged, key=_VOCABULARY.__contains__):
            os.replace(staged[name], target / name)
    except OSError as error:
        raise HubError(
            f"{target} cannot be written: {error}. Next step: free some space, or save elsewhere."
        ) from error
    finally:
        for path in staged.values():
            path.unlink(missing_ok=True)
    return tuple(str(target / name) for name in files)


def _template_name(name: str) -> str:
    if name == "default":
        return "chat_template.jinja"
    if not re.fullmatch(r"[\w-][\w. -]*", name):
        raise TokenizerError(f"a chat template cannot be saved as {name!r}: its name must be the name of a file.")
    return f"{MORE_TEMPLATES}/{name}.jinja"
