"""accelerate: loops, saved states, offloading, device maps. Losses and logits are those of transformers' own models."""

import shutil

import pytest
import torch

from ligermodels.arch import hooks
from tests.arch import test_toy_family
from tests.arch.toy_family import Toy
from tests.tools.models import Texts, make_ids, ours, theirs

accelerate = pytest.importorskip("accelerate")


@pytest.fixture
def accelerator():
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def prepared(accelerator, model):
    accelerator.free_memory()  # of the objects of an earlier loop
    loader = torch.utils.data.DataLoader(Texts(), batch_size=2)
    return accelerator.prepare(model.train(), torch.optim.AdamW(model.parameters(), lr=1e-2), loader)


def steps(accelerator, model, optimizer, loader, number=8):
    losses = []
    for batch, _ in zip(loader, range(number), strict=False):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses)


def test_a_loop_has_the_losses_of_transformers_and_saves(folder, tmp_path, accelerator):
    expected = steps(accelerator, *prepared(accelerator, theirs(folder)))
    model, optimizer, loader = prepared(accelerator, ours(folder))
    # fp32 on both sides: gradients differ in their last bits, which Adam's division spreads over the steps.
    torch.testing.assert_close(steps(accelerator, model, optimizer, loader), expected, rtol=1e-4, atol=0)

    accelerator.save_state(tmp_path / "state")
    then = steps(accelerator, model, optimizer, loader, 2)
    other, other_optimizer, other_loader = prepared(accelerator, ours(folder))
    accelerator.load_state(tmp_path / "state")
    assert torch.equal(steps(accelerator, other, other_optimizer, other_loader, 2), then)

    unwrapped, ids = accelerator.unwrap_model(model), make_ids(2, 6)
    unwrapped.save_pretrained(
        tmp_path / "saved", is_main_process=accelerator.is_main_process, save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )  # fmt: skip
    accelerator.save_model(model, tmp_path / "weights")
    shutil.copy(folder / "config.json", tmp_path / "weights")
    for saved in (tmp_path / "saved", tmp_path / "weights"):
        for load in (ours, theirs):
            torch.testing.assert_close(load(saved)(ids).logits, unwrapped.eval()(ids).logits, rtol=0, atol=1e-5)  # fp32


DEVICE_MAP = {
    "model.embed_tokens": "disk", "model.rotary_emb": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu",
    "model.norm": "disk", "lm_head": "disk",
}  # fmt: skip


def dispatched(folder, where):
    return accelerate.dispatch_model(ours(folder), DEVICE_MAP, main_device="cpu", offload_dir=where)


def loaded_and_dispatched(folder, where):
    arch = ours(folder)
    with accelerate.init_empty_weights():
        model = type(arch).from_config(arch.config, seed=0)
    return accelerate.load_checkpoint_and_dispatch(model, str(folder), DEVICE_MAP, offload_folder=where).eval()


@pytest.mark.parametrize("offload", [dispatched, loaded_and_dispatched])
def test_offloaded_models_compute_what_they_did(folder, tmp_path, monkeypatch, offload):
    monkeypatch.setattr(hooks, "HookedLayer", None)  # the forward of accelerate leaves a block as it is
    model, expected = offload(folder, str(tmp_path)), theirs(folder)
    ids = make_ids(2, 6)
    assert model.device == torch.device("cpu")
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected(ids).logits, rtol=0, atol=1e-5)  # fp32 logits of about 5
        torch.testing.assert_close(model(ids, labels=ids).loss, expected(ids, labels=ids).loss, rtol=1e-5, atol=0)
        cached = model(ids, use_cache=True).past_key_values
        following = model(ids[:, :1], past_key_values=cached).logits
        expected_cache = expected(ids, use_cache=True).past_key_values
        expected_following = expected(ids[:, :1], past_key_values=expected_cache).logits
        torch.testing.assert_close(following, expected_following, rtol=0, atol=1e-5)
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=4)
    assert torch.equal(model.generate(ids, **options), expected.generate(ids, do_sample=False, **options))


def test_blocks_of_a_users_family_on_the_disk_and_the_cpu(tmp_path):
    """With a carry between them, and buffers."""
    folder, ids = test_toy_family.write(tmp_path), test_toy_family.IDS
    others = {"model.rotary_emb": "cpu", "model.ropes": "cpu", "model.embed_blocks": "disk"}
    places = {**DEVICE_MAP, **others, "model.layers.2": "disk", "model.layers.3": "cpu"}
    model, expected = Toy.from_hub(folder, device_map=places, progress=False), Toy.from_hub(folder, progress=False)
    assert torch.equal(model(ids).logits, expected(ids).logits)
    assert torch.equal(model.generate(ids, max_new_tokens=6), expected.generate(ids, max_new_tokens=6))
    again = Toy.from_hub(model.save_pretrained(tmp_path / "saved"), progress=False)
    assert torch.equal(again(ids).logits, expected(ids).logits)
