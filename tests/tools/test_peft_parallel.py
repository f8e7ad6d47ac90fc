"""PEFT's LoRA around a model that `parallelize` spreads: right under FSDP, refused under tensor parallel."""

import pytest

from tests.parallel.runs import run

JOBS = [
    ("adapted", "adapted", dict(split="fsdp2")),
    ("adapted under cp", "adapted", dict(split="cp2")),
    ("refused", "refused", dict(model=("llama", {}), split="tp2", lora=True)),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run(2, tmp_path_factory.mktemp("processes"), JOBS)


@pytest.mark.parametrize("name", ["adapted", "adapted under cp"])
def test_an_adapter_trains_as_in_one_process(found, name):
    for errors in found[name]:
        assert max(errors.values()) <= 2e-5  # fp32, sums of some hundred products in another order


def test_an_adapter_is_refused_under_tensor_parallel(found):
    for one in found["refused"]:
        assert "peft.tuners.lora" in one["says"] and "in place of a projection" in one["says"]
