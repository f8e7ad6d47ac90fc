import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from ligermodels.text import Tokenizer
from tests.recipes.runs import CHATS
from tests.text import folders
from tests.text.conftest import folder_of  # noqa: F401  # a fixture


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory):
    """A tokenizer in the manner of Llama 3, with its template; eos is <|end|> or <|eot_id|>."""
    return Tokenizer.from_folder(folders.byte_level(tmp_path_factory.mktemp("byte_level")))


@pytest.fixture
def write(tmp_path):
    """write(name, content): the path of a file of bytes, of a text, or of JSON lines."""

    def write(name, content):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            content = "".join(json.dumps(row) + "\n" for row in content)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a model, chats and texts."""
    folder = tmp_path_factory.mktemp("train")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums of several threads have other bits
    sys.path.append(str(Path(__file__).parents[2] / "examples"))
    importlib.import_module("tiny").write_llama().rename(folder / "model")
    lines = [json.dumps({"messages": messages}) for messages in CHATS * 2]
    (folder / "chats.jsonl").write_text("\n".join(lines))
    texts = ["the quick brown fox jumps over the lazy dog. " * n for n in (1, 2, 9)]
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts * 4))
    yield folder
    torch.set_num_threads(threads)
