"""Stop strings in the text of every kind of tokenizer, and the streamer of transformers."""

from types import SimpleNamespace

import pytest
import tokenizers
import torch

import ligermodels
from ligermodels.generation import generate
from ligermodels.generation.stopping import StopText
from tests.cli.commands import write_checkpoint
from tests.generation.models import llama
from tests.text import families, folders


class Letters:
    """A tokenizer whose ids are letters, so that stop strings fall across tokens where a test says so."""

    def decode(self, ids, **options):
        return "".join(chr(33 + i) for i in ids)


def test_stop_strings_end_a_row_across_token_borders():
    model, prompt, letters = llama(), torch.tensor([[1, 2, 3, 4, 5], [6, 8, 9, 10, 11]]), Letters()
    free = [letters.decode(row.tolist()) for row in generate(model, prompt, max_new_tokens=20)[:, 5:]]
    stop = free[0][3:6]
    ends = [(row + stop).index(stop) + 3 for row in free]
    options = dict(stop_strings=["~~~~~~~~", stop], tokenizer=letters, pad_token_id=0)
    ids = generate(model, prompt, max_new_tokens=20, **options)[:, 5:]
    assert ids.shape[1] == min(20, max(ends))
    for row, end in enumerate(ends):
        assert letters.decode(ids[row, :end].tolist()) == free[row][:end]
        assert (ids[row, end:] == 0).all()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("generate") / "model")


def test_stop_strings_with_the_tokenizers_of_anyone(checkpoint):
    """The expectation is transformers' own search; a special token is text too."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs, model = AutoModelForCausalLM.from_pretrained(checkpoint), ligermodels.load(checkpoint, progress=False)
    of_theirs = AutoTokenizer.from_pretrained(checkpoint)
    ids = torch.tensor([of_theirs.encode("The Owl")])
    options = dict(max_new_tokens=40, do_sample=True, temperature=1.0, top_k=0, eos_token_id=model.config.vocab_size)
    torch.manual_seed(0)
    text = of_theirs.decode(theirs.generate(ids, **options)[0, ids.shape[1] :])
    special = of_theirs.all_special_tokens[0]
    assert of_theirs.decode([0]) == special
    forced = [lambda ids, logits: logits.index_fill(1, torch.tensor([0]), 90.0) if ids.shape[1] == 9 else logits]
    for stop, processors in ((text[12:17], []), ([special, "nowhere"], forced), ("nowhere", [])):
        torch.manual_seed(0)
        expected = theirs.generate(ids, stop_strings=stop, tokenizer=of_theirs, logits_processor=processors, **options)
        assert (expected.shape[1] < ids.shape[1] + 40) == (stop != "nowhere")
        for tokenizer in (
            of_theirs,
            ligermodels.Tokenizer.from_hub(checkpoint),
            tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json")),
            SimpleNamespace(decode=lambda ids, **options: of_theirs.decode(ids, **options)),
        ):
            found = model.generate(
                ids, stop_strings=stop, tokenizer=tokenizer, logits_processor=processors, seed=0, **options
            )
            assert torch.equal(found, expected), (type(tokenizer), stop)


@pytest.mark.parametrize("make", [folders.byte_level, families.FAMILIES["llama 2"].build], ids=lambda f: f.__name__)
def test_a_stop_string_is_seen_with_the_token_that_completes_it(make, tmp_path):
    """Whatever a token is, such as a part of a character. A token of a long text costs no more than of a short one."""
    tokenizer = ligermodels.Tokenizer.from_folder(make(tmp_path / "tokenizer"))
    decoded, total = [], 0

    def decode(ids, **options):
        decoded.append(len(ids))
        return tokenizer.decode(ids)

    for text in folders.TEXTS:
        ids = tokenizer.encode("so it begins " + text, add_special_tokens=False)
        start = len(tokenizer.encode("so it begins", add_special_tokens=False))
        known = len(tokenizer.decode(ids[:start]))
        texts = [tokenizer.decode(ids[:end])[known:] for end in range(start + 1, len(ids) + 1)]  # after each new token
        whole = texts[-1] if texts else ""
        for stop in {whole[i : i + n] for i in range(1, len(whole), 3) for n in (1, 2, 5)}:
            expected = next(n for n, text in enumerate(texts) if stop in text)
            stopper = StopText(SimpleNamespace(decode=decode), [stop, "never" * 9], ids[:start][-8:])
            found = next((n for n, token in enumerate(ids[start:]) if stopper.ends_with(token)), None)
            assert found == expected, (text, stop)
            total += 1
    assert total > 100 and max(decoded) < 40


def test_a_stop_string_may_begin_with_the_space_of_the_first_new_token(tmp_path):
    """The decoder takes the space off the beginning of a text, and new text is none."""
    tokenizer = ligermodels.Tokenizer.from_folder(families.FAMILIES["llama 2"].build(tmp_path / "tokenizer"))
    prompt, whole = tokenizer.encode("the"), tokenizer.encode("the cat")
    coming = whole[len(prompt) :]
    assert whole[: len(prompt)] == prompt and tokenizer.decode(coming)[0] != " "
    config = dict(vocab_size=1 + max(whole), hidden_size=8, intermediate_size=8, num_hidden_layers=1)
    model = ligermodels.Llama.from_config({**config, "num_attention_heads": 1}, device="cpu")

    def force(ids, logits):
        chosen = (coming + coming)[ids.shape[1] - len(prompt)]
        return torch.full_like(logits, -1e9).index_fill(1, torch.tensor([chosen]), 0.0)

    options = dict(max_new_tokens=2 * len(coming), eos_token_id=[], tokenizer=tokenizer, logits_processor=force)
    first = " " + tokenizer.decode(coming[:1])
    out = model.generate(torch.tensor([prompt]), stop_strings=first, **options)
    assert out[0].tolist() == [*prompt, coming[0]]
