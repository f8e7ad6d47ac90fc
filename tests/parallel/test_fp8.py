"""FP8 under FSDP2 on two ranks: as in one process, also after steps, whose weights FSDP gathers into old memory."""

import pytest
import torch

import ligermodels
from ligermodels import InputError
from ligermodels.layers import FP8Recipe
from ligermodels.parallel import make_mesh, parallelize
from ligermodels.training import AdamW, add_lora
from tests.parallel.ranks import results_of_ranks
from tests.tiny import TINY

LLAMA = {**TINY, "model_type": "llama", "tie_word_embeddings": False}
TOKENS = torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(1))


def train(model, tokens):
    """The losses of three steps, the gradients of the first, and how the first projections run."""
    optimizer, losses, first = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2), [], {}
    for _ in range(3):
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        first = first or {n: g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for n, g in grads.items()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, first, str(model.fusion_report())


def make(folder, how):
    options = dict(fp8=FP8Recipe(keep_weights=True)) if how == "fp8" else {}
    options |= dict(quantization_config="fp8") if how == "frozen" else {}
    model = ligermodels.load(folder, dtype=torch.bfloat16, **options).train()
    if how in ("frozen", "lora"):
        add_lora(model, r=4)
    return model


@pytest.mark.parametrize("how", ["fp8", "frozen"])
def test_a_sharded_model_trains_as_a_whole_one(tmp_path, how):
    ligermodels.Llama.from_config(LLAMA, dtype=torch.bfloat16, seed=0).save_pretrained(tmp_path / "model")

    def work():
        mesh, rank = make_mesh(dp_shard=2, device_type="cpu"), torch.distributed.get_rank()
        model = parallelize(make(tmp_path / "model", how), mesh)
        return train(model, TOKENS[2 * rank : 2 * rank + 2])

    (losses, grads, report), (others, *_) = results_of_ranks(tmp_path, work)
    whole, of_whole, _ = train(make(tmp_path / "model", how), TOKENS)
    exact, *_ = train(make(tmp_path / "model", "plain" if how == "fp8" else "lora"), TOKENS)
    assert losses == others and "in FP8 (rowwise)" in report and grads.keys() == of_whole.keys()
    for found, expected, plain in zip(losses, whole, exact, strict=True):
        # dW has the scales of another batch, and AdamW's first steps are signs. A weight of the step before would be
        # ten times as far off.
        assert abs(found - expected) < 0.03 and abs(found - plain) < 0.03
    assert whole[2] < whole[0] - 0.3 or how == "frozen"
    for name, grad in grads.items():
        cosine = torch.cosine_similarity(grad.double().flatten(), of_whole[name].double().flatten(), 0)
        assert cosine > 0.99 or not of_whole[name].any()


def test_parallelize_turns_it_on_and_refuses_tensor_parallel(tmp_path):
    def work():
        mesh = make_mesh(dp_shard=2, device_type="cpu")
        model = ligermodels.Llama.from_config(LLAMA, dtype=torch.bfloat16, seed=0)
        report = str(parallelize(model, mesh, fp8="tensorwise").fusion_report())
        model = ligermodels.Llama.from_config(LLAMA, dtype=torch.bfloat16, seed=0)
        with pytest.raises(InputError, match="with tp=1"):
            parallelize(model, make_mesh(tp=2, device_type="cpu"), fp8="rowwise")
        return report

    assert all("in FP8 (tensorwise)" in report for report in results_of_ranks(tmp_path, work))
