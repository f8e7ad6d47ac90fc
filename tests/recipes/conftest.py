import json

import pytest

from ligermodels.text import Tokenizer
from tests.text import families, folders


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory):
    """A tokenizer in the manner of Llama 3, with its template; eos is <|end|> or <|eot_id|>."""
    return Tokenizer.from_folder(folders.byte_level(tmp_path_factory.mktemp("byte_level")))


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory):
    """folder_of(name): the folder of a family."""
    made = {}

    def make(name):
        if name not in made:
            made[name] = families.FAMILIES[name].build(tmp_path_factory.mktemp("family"))
        return made[name]

    return make


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
