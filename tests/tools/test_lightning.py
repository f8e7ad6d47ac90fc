"""Lightning: a LightningModule around our model trains, saves and resumes as one around transformers' own model."""

import warnings

import pytest
import torch

from tests.tools.models import Texts, ours, theirs

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning = pytest.importorskip("lightning")
pytestmark = pytest.mark.filterwarnings("ignore")


class Module(lightning.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model, self.losses = model, []

    def training_step(self, batch, index):
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        self.log("validation", self.model(**batch).loss)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(model, tmp_path, max_steps, checkpoint=None):
    trainer = lightning.Trainer(
        max_steps=max_steps, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=True,
        enable_checkpointing=False, default_root_dir=tmp_path, accumulate_grad_batches=2, num_sanity_val_steps=0,
    )  # fmt: skip
    module = Module(model.train())
    loader = torch.utils.data.DataLoader(Texts(12), batch_size=2)  # three steps an epoch
    trainer.fit(module, loader, torch.utils.data.DataLoader(Texts(4), batch_size=2), ckpt_path=checkpoint)
    return trainer, module


def test_losses_are_those_of_transformers_and_a_resumed_run_goes_on(folder, tmp_path):
    trainer, module = fit(ours(folder), tmp_path, 6)
    other, expected = fit(theirs(folder), tmp_path, 6)
    assert len(module.losses) == 12
    # fp32 on both sides: gradients differ in their last bits, which Adam's division spreads over the steps.
    torch.testing.assert_close(torch.tensor(module.losses), torch.tensor(expected.losses), rtol=1e-4, atol=0)
    assert float(trainer.callback_metrics["validation"]) == pytest.approx(
        float(other.callback_metrics["validation"]), rel=1e-4
    )

    half, _ = fit(ours(folder), tmp_path, 3)
    half.save_checkpoint(tmp_path / "half.ckpt")
    _, resumed = fit(ours(folder), tmp_path, 6, tmp_path / "half.ckpt")
    assert resumed.losses == module.losses[-len(resumed.losses) :] and len(resumed.losses) == 6
    for one, two in zip(resumed.parameters(), module.parameters(), strict=True):
        assert torch.equal(one, two)
