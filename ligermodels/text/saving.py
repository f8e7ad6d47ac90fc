"""Saves a tokenizer: copies the files it was loaded from, and rewrites those whose content has changed.

- Changed templates: chat_template.jinja and additional_chat_templates/*.jinja replace all other files with templates.
- Changed tokens: `added_tokens_decoder` of tokenizer_config.json replaces special_tokens_map.json and
  added_tokens.json; tokenizer.json is rewritten if there are new tokens.
- A vocabulary from another file than tokenizer.json: tokenizer.json is written, and tokenizer_config.json names the
  tokens. SentencePiece's file stays beside it as tokenizer.model, and so does a tekken.json without new tokens.
- Changed padding_side, truncation_side or model_max_length: tokenizer_config.json is rewritten.

transformers reads the folder in the same way.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ligermodels.checkpoint.files import MORE_TEMPLATES, SPECIAL_TOKENS, TEMPLATES, TOKENIZER
from ligermodels.errors import HubError, TokenizerError
from ligermodels.text.backend import Backend
from ligermodels.text.files import TokenizerFiles, call_settings, names_in
from ligermodels.text.tiktoken import is_tiktoken


def contents(
    loaded: TokenizerFiles, files: TokenizerFiles, backend: Backend, settings: Mapping[str, Any]
) -> dict[str, bytes]:
    """{name in the folder: its bytes} of the tokenizer.

    loaded, files: the settings as they were read, and as they are now. settings: the same of `call_settings`, now.
    """
    try:
        saved = {path.relative_to(files.folder).as_posix(): path.read_bytes() for path in loaded.paths}
    except OSError as error:
        raise TokenizerError(f"a file that the tokenizer was loaded from cannot be read any more: {error}.") from error
    config = dict(loaded.config)
    if backend.converted:
        data = saved.get(backend.path.name, b"")
        saved = {name: data for name, data in saved.items() if not name.startswith("tokenizer.model")}
        if backend.path.name != "tekken.json" and not is_tiktoken(data):
            saved["tokenizer.model"] = data
        config = {**loaded.named, **config}
    if files.templates != loaded.templates:
        config.pop("chat_template", None)
        saved = {name: data for name, data in saved.items() if not name.endswith((".jinja", "chat_template.json"))}
        saved |= {_template_name(name): text.encode() for name, text in files.templates.items()}
    if (files.named, files.extra_special, files.added) != (loaded.named, loaded.extra_special, loaded.added):
        saved = {name: data for name, data in saved.items() if name not in SPECIAL_TOKENS}
        # None removes a token that the class of transformers has by default.
        config |= dict.fromkeys(loaded.named) | dict(files.named)
        if files.extra_special != loaded.extra_special:
            config.pop("extra_special_tokens", None)
            config["additional_special_tokens"] = list(files.extra_special)
        config["added_tokens_decoder"] = {str(index): token.to_dict() for index, token in sorted(backend.added.items())}
    if backend.converted or files.added != loaded.added:
        saved["tokenizer.json"] = backend.to_json().encode()
        if files.added != loaded.added:
            saved.pop("tekken.json", None)
        # Classes of transformers that rebuild all but the vocabulary split texts with new tokens differently.
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    stated = call_settings(config, files.folder)
    config |= {name: value for name, value in settings.items() if value != stated[name]}
    if config != loaded.config:
        saved["tokenizer_config.json"] = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    return saved


def write(target: Path, files: Mapping[str, bytes]) -> tuple[str, ...]:
    """Writes the files and removes those of any other tokenizer in the folder. Returns their paths.

    Each file is replaced atomically; files with the same content are not touched. Raises HubError.
    """
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name in names_in(target, (*TOKENIZER, *TEMPLATES)):
            if name not in files:
                (target / name).unlink(missing_ok=True)
        for name, data in files.items():
            path = target / name
            if path.is_file() and path.read_bytes() == data:
                continue
            path.parent.mkdir(exist_ok=True)
            staged = path.with_name(f".{path.name}.partial")
            staged.write_bytes(data)
            os.replace(staged, path)
    except OSError as error:
        raise HubError(
            f"{target} cannot be written: {error}. Next step: free some space, or save elsewhere."
        ) from error
    return tuple(str(target / name) for name in files)


def _template_name(name: str) -> str:
    if name == "default":
        return "chat_template.jinja"
    if not re.fullmatch(r"[\w-][\w. -]*", name):
        raise TokenizerError(f"a chat template cannot be saved as {name!r}: its name must be the name of a file.")
    return f"{MORE_TEMPLATES}/{name}.jinja"
