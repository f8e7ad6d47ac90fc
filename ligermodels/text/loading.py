"""Opens the vocabulary of a tokenizer's folder, whatever its kind."""

import json
from pathlib import Path

from ligermodels.errors import TokenizerError
from ligermodels.text import saving
from ligermodels.text.backend import Backend
from ligermodels.text.files import TokenizerFiles, call_settings, read_bytes, read_files
from ligermodels.text.json_backend import JsonBackend
from ligermodels.text.ranks import RanksBackend
from ligermodels.text.sentencepiece_backend import SentencePieceBackend, is_tiktoken


def open_backend(files: TokenizerFiles) -> Backend:
    """The backend of `files.vocabulary`. Raises TokenizerError."""
    path = files.vocabulary
    if path is None:
        names = sorted(path.name for path in files.folder.iterdir())[:20]
        raise TokenizerError(
            f"{files.folder} has neither tokenizer.json nor tokenizer.model nor tekken.json; it has {names}. Next "
            "step: take the tokenizer's files from the checkpoint's repository (vocab.json and merges.txt are not "
            "read by themselves)."
        )
    if path.name == "tokenizer.json":
        return JsonBackend(path, files)
    if path.name == "tekken.json" or is_tiktoken(read_bytes(path)):
        return RanksBackend(path, files)
    return SentencePieceBackend(path, files)


def hugging_face_files(folder: Path, rows: int) -> dict[str, bytes]:
    """Meta's or Mistral's own tokenizer of a folder as the files that transformers reads: {name: bytes}.

    rows: of the model's embedding. {} for a folder without a tokenizer, or with a tokenizer.json. With a
    generation_config.json where Meta's code stops at more than the end of a text. Raises TokenizerError.
    """
    files = read_files(folder)
    if files.vocabulary is None or files.vocabulary.name == "tokenizer.json":
        return {}
    backend = open_backend(files)
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
