"""nnsight: values that are read from and written into our layers are those of transformers' model."""

import pytest
import torch

from tests.tools.models import make_ids, ours, theirs

nnsight = pytest.importorskip("nnsight")


def read(model, ids):
    with model.trace(input_ids=ids):
        states = model.model.layers[0].output.save()
        normed = model.model.norm.output.save()
    return states, normed


def patch(model, ids):
    with model.trace(input_ids=ids):
        state = model.model.layers[0].output[:, 3].clone()
        model.model.layers[1].input = model.model.layers[1].input + 1
        model.model.layers[1].output[:, 5] = state
        logits = model.output.logits.save()
    return (logits,)


def zero(model, ids):
    with model.trace(input_ids=ids):
        model.model.layers[0].output = model.model.layers[0].output * 0
        logits = model.output.logits.save()
    return (logits,)


def skip(model, ids):
    with model.trace(input_ids=ids):
        model.model.layers[0].skip(model.model.layers[0].input)
        logits = model.output.logits.save()
    return (logits,)


def lens(model, ids):
    with model.trace(input_ids=ids):
        logits = model.lm_head(model.model.norm(model.model.layers[0].output)).save()
    return (logits,)


@pytest.mark.parametrize("intervene", [read, patch, zero, skip, lens])
@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_interventions_are_those_in_transformers_model(folders, family, intervene):
    ids = make_ids(2, 9)
    with torch.no_grad():
        found, expected = (intervene(nnsight.NNsight(make(folders[family])), ids) for make in (ours, theirs))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-5)  # fp32 values of about 5
