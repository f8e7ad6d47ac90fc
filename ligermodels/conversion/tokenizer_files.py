"""Meta's and Mistral's own tokenizers as tokenizer.json and tokenizer_config.json, which transformers reads."""

import json
from pathlib import Path

from ligermodels.errors import TokenizerError
from ligermodels.text import saving
from ligermodels.text.backend import Backend
from ligermodels.text.files import call_settings, read_files


def hugging_face_files(folder: Path, rows: int) -> dict[str, bytes]:
    """{name: bytes}; {} for a folder without a tokenizer, or with a tokenizer.json. rows: of the model's embedding.

    generation_config.json is among them if Meta's code stops at other ids than the end of a text.
    Raises TokenizerError.
    """
    files = read_files(folder)
    if files.vocabulary is None or files.vocabulary.name == "tokenizer.json":
        return {}
    backend = Backend(files)
    if backend.base_vocab_size > rows:
        raise TokenizerError(
            f"{files.vocabulary} has {backend.base_vocab_size} ids, the model's embedding {rows} rows. Likely cause: "
            "the tokenizer of another checkpoint."
        )
    complete = backend.complete(files)
    found = saving.contents(complete, complete, backend, call_settings(files.config, folder))
    if backend.stop_ids and not files.eos_token_ids:
        ids = {"bos_token_id": backend.token_to_id(backend.named["bos_token"]), "eos_token_id": [*backend.stop_ids]}
        found["generation_config.json"] = (json.dumps(ids, indent=2) + "\n").encode()
    return found
