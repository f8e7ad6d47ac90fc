"""Opens the vocabulary of a tokenizer's folder, whatever its kind."""

from ligermodels.errors import TokenizerError
from ligermodels.text.backend import Backend
from ligermodels.text.files import TokenizerFiles, read_bytes
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
