"""lm-eval: scores and texts of our models are those of transformers' own, by its calls and by a task of its own."""

import logging

import pytest
import torch

from tests.tools.models import letters, ours, theirs

lm_eval = pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def models(folder):
    logging.disable()
    yield [HFLM(pretrained=make(folder), batch_size=3) for make in (ours, theirs)]  # the tokenizer by name_or_path
    logging.disable(logging.NOTSET)


def both(models, kind, arguments):
    """The results of ours and of theirs."""
    requests = [Instance(kind, {}, argument, i) for i, argument in enumerate(arguments)]
    return [getattr(model, kind)(requests, disable_tqdm=True) for model in models]


def test_loglikelihood(models):
    arguments = [(letters(i, 3 + i), " " + letters(i + 50, 1 + i % 3)) for i in range(7)]
    found, expected = both(models, "loglikelihood", arguments)
    # sums of up to three fp32 log probabilities
    torch.testing.assert_close([score for score, _ in found], [score for score, _ in expected], rtol=0, atol=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    rolling = [(letters(i, 150 + i),) for i in range(3)]  # longer than the model's 128 positions: in windows
    found, expected = both(models, "loglikelihood_rolling", rolling)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)  # sums of 150 fp32 log probabilities


@pytest.mark.parametrize(
    "options", [{}, {"do_sample": False, "temperature": 0.0}, {"repetition_penalty": 1.3}], ids=str
)
def test_generate_until(models, options):
    arguments = [(letters(i, 3 + i), {"until": ["c d", "x"], "max_gen_toks": 9, **options}) for i in range(7)]
    found, expected = both(models, "generate_until", arguments)
    assert found == expected and len(set(found)) > 1
