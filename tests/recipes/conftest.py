import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from ligermodels.text import Tokenizer
from tests.recipes.runs import CHATS, LEARN, PAIRS, PROMPTS, REWARD, SINGLE, TEXTS, train
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
    """A folder with a model, and data for each recipe."""
    folder = tmp_path_factory.mktemp("train")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums of several threads have other bits
    sys.path.append(str(Path(__file__).parents[2] / "examples"))
    importlib.import_module("tiny").write_llama().rename(folder / "model")
    chats = [{"messages": messages} for messages in CHATS * 2]
    texts = [{"text": text} for text in TEXTS * 4]
    files = {"chats": chats, "texts": texts, "pairs": PAIRS, "single": SINGLE, "prompts": PROMPTS}
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "reward.py").write_text(REWARD)
    yield folder
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer(home):
    return Tokenizer.from_hub(home / "model")


@pytest.fixture(scope="module")
def teacher(home):
    """The model after some training, in home/teacher/model."""
    assert train(home, "teacher", *LEARN, "--num-train-epochs", "10") == 0
    return home / "teacher" / "model"
