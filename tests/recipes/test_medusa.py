"""Medusa: the loss beside plain formulas, a run, and the memory of heads. tests/training has the heads themselves."""

import pytest
import torch
import torch.nn.functional as F

import ligermodels
from ligermodels.processes import Processes
from ligermodels.recipes import memory
from ligermodels.training import add_medusa, load_medusa
from tests.recipes import losses
from tests.recipes.runs import metrics, recipe_of, run
from tests.training.test_medusa import with_heads


def plain(model, batch):
    """The sums of the cross entropy of the model's own head and of each new one, from all logits."""
    given = {name: value for name, value in batch.items() if name != "labels"}
    x = model(**given, return_logits=False).last_hidden_state
    head = model.lm_head.weight
    cap = model.config.to_dict().get("final_logit_softcapping")
    sums, right = [], []
    for k, medusa in enumerate([None, *model.medusa]):
        y = x
        for block in () if medusa is None else list(medusa)[:-1]:
            y = y + F.silu(y @ block.linear.weight.T + block.linear.bias)
        logits = y @ (head if medusa is None else medusa[-1].weight).T
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        logits, labels = logits[:, : -1 - k].flatten(0, 1), batch["labels"][:, 1 + k :].flatten()
        sums.append(F.cross_entropy(logits, labels, reduction="sum"))
        right.append(((logits.argmax(-1) == labels) & (labels != -100)).sum())
    return sums, right


@pytest.mark.parametrize("family, layers", [("Llama", 1), ("Llama", 2), ("Gemma2", 0)])
def test_loss_and_gradients_are_those_of_the_formula(family, layers):
    """Head k guesses the token k + 2 ahead, of its own sequence."""
    model = with_heads(family, layers=layers, freeze=True)
    packed, padded = losses.batches(9, 14, 3, 2)
    (_, *heads), right = plain(model, padded)
    expected = sum(0.8 ** (k + 1) * loss for k, loss in enumerate(heads)) / 7
    assert all(name.startswith("medusa.") for name, p in model.named_parameters() if p.requires_grad)
    recipe = recipe_of("medusa")
    for batch in (packed, padded):
        losses.check(model, recipe.loss(model, batch, torch.tensor(7.0))[0], expected)
    model.eval()
    with torch.no_grad():
        found, sums = recipe.loss(model, packed, torch.tensor(7.0))
    torch.testing.assert_close(found, expected.detach())
    for k, number in enumerate(right[1:], 1):
        labels = padded["labels"][:, 1 + k :]
        assert [round(float(part)) for part in sums[f"accuracy_{k}"]] == [int(number), int((labels != -100).sum())]


def test_heads_alone_are_trained_and_saved(home, capsys):
    assert run(home, home / "heads", "medusa", "--save-steps", "3") == 0
    out, said = capsys.readouterr()
    assert out == f"{home / 'heads' / 'medusa'}\n" and "% of the model" in said
    assert metrics(home / "heads", "eval_accuracy_2")
    kept = sum(path.stat().st_size for path in (home / "heads" / "checkpoints").rglob("*.distcp"))
    file = home / "heads" / "medusa" / "medusa_lm_head.safetensors"
    assert kept < 2 * 3 * file.stat().st_size + 2 * 100_000  # of two checkpoints: the heads, two moments, headers
    for name in ("medusa", "best"):
        assert len(load_medusa(ligermodels.load(home / "model"), home / "heads" / name)) == 2
    assert f"load_medusa(model, '{home}" in (home / "heads" / "medusa" / "README.md").read_text()


def test_the_estimate_of_memory():
    """A frozen base takes its weights alone, and blocks that nothing is trained in save nothing."""
    sketch = ligermodels.Llama.from_config(losses.TINY, device="meta")
    base = sum(p.numel() for p in sketch.parameters())
    heads = sum(p.numel() for p in add_medusa(losses.model(), 3).parameters())
    how = dict(heads=3, accumulation=2, batch_tokens=100, precision="bf16-masters", activations="none")
    recipe = recipe_of("medusa", **how)
    sizes = recipe.memory(memory.Sizes.of(sketch, recipe.options), sketch)
    need = memory.estimate(sizes, recipe.options, Processes(torch.device("cuda")))
    assert (need["weights"], need["gradients"], need["optimizer"]) == (2 * (base + heads), 2 * heads, 6 * heads)
    assert need["activations and logits"] == 2 * 100 * (3 * 3 * 32 + sizes.vocab)
    recipe = recipe_of("medusa", **how, optim="adamw8bit")
    sketch = ligermodels.Llama.from_config({**losses.TINY, "hidden_size": 64}, device="meta")
    sizes = recipe.memory(memory.Sizes.of(sketch, recipe.options), sketch)
    assert sizes.eight_bits == sizes.trained > 0
