"""Runs each property of a Suite on its tiny configurations, and writes each checkpoint once; see suite.py."""

import json
import shutil

import pytest

from tests.arch.suite import write_checkpoint

EVERY = ("test_logits_loss_and_every_gradient", "test_round_trip_is_bit_exact_and_both_generations_of_config_agree")


def pytest_generate_tests(metafunc):
    cls = metafunc.cls
    if cls is None:
        return
    if "tiny" in metafunc.fixturenames:
        quick = cls.TINY if metafunc.function.__name__ in EVERY else {next(iter(cls.TINY)), *getattr(cls, "ALSO", ())}
        metafunc.parametrize(
            "tiny",
            [
                pytest.param(config, id=name, marks=() if name in quick else pytest.mark.slow)
                for name, config in cls.TINY.items()
            ],
        )
    if "first" in metafunc.fixturenames:
        metafunc.parametrize("first", [next(iter(cls.TINY.values()))], ids=["first"])
    if "real" in metafunc.fixturenames:
        metafunc.parametrize("real", cls.REAL.items(), ids=cls.REAL.keys())


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """A function: (config, norm=) -> a folder with its checkpoint, a copy that the test may change."""
    made = {}

    def copy(config, **options):
        key = json.dumps([config, options])
        if key not in made:
            made[key] = write_checkpoint(config, tmp_path_factory.mktemp("made") / "hf", **options)
        return shutil.copytree(made[key], tmp_path_factory.mktemp("copy") / "hf")

    return copy
