import pytest

from tests.text import families, folders


@pytest.fixture(scope="session")
def byte_level_folder(tmp_path_factory):
    return folders.byte_level(tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="session")
def sentencepiece_model():
    return folders.sentencepiece_model()


@pytest.fixture
def sentencepiece_folder(tmp_path, sentencepiece_model):
    """write(**config): a folder with tokenizer.model and a tokenizer_config.json with these entries."""
    return lambda model=sentencepiece_model, **config: folders.sentencepiece_folder(tmp_path, model, **config)


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory):
    """folder_of(name): the folder of a family."""
    made = {}

    def make(name):
        if name not in made:
            made[name] = families.FAMILIES[name].build(tmp_path_factory.mktemp("family"))
        return made[name]

    return make
