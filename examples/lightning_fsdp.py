"""Lightning with a model that is spread over the GPUs by `parallelize`.

    python examples/lightning_fsdp.py                                          # a tiny Llama; without GPUs, on the CPU
    python examples/lightning_fsdp.py --devices 8 --tp 2 --model meta-llama/Llama-3.1-8B --out tuned

Lightning starts the processes, feeds and checkpoints them. It wraps and divides nothing under ModelParallelStrategy.
"""

import argparse
from pathlib import Path
from typing import Any

import lightning
import tiny
import torch
from lightning.pytorch.strategies import ModelParallelStrategy

import ligermodels
from ligermodels.parallel import make_mesh
from ligermodels.training import AdamW


class Module(lightning.LightningModule):
    def __init__(self, name: str, tp: int, lr: float):
        super().__init__()
        self.name, self.tp, self.lr, self.losses = name, tp, lr, []
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:  # Lightning calls this for each of fit, test and predict
            mesh = make_mesh(tp=self.tp, device_type=self.device.type)
            parallel = dict(param_dtype=torch.bfloat16 if mesh.device_type == "cuda" else None)
            model = ligermodels.load(self.name, mesh=mesh, parallel=parallel, dtype=torch.float32)
            self.model = model.train()

    def training_step(self, ids: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.model(ids, labels=ids).loss  # the mean over the labels of all ranks, on each of them
        self.losses.append(loss.item())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return AdamW(self.model.parameters(), lr=self.lr, max_grad_norm=1.0)  # in place of gradient_clip_val


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a repository of the Hub or a folder; default a tiny Llama")
    parser.add_argument("--devices", type=int, default=2, help="processes on each node")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1, help="GPUs that share each layer")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=3e-3, help="a pretrained model wants about 1e-5")
    parser.add_argument("--out", type=Path, help="a folder for the trained model")
    options = parser.parse_args(arguments)
    # Lightning's sizes say which ranks get the same rows; the mesh is ours.
    groups = options.devices * options.nodes // options.tp
    trainer = lightning.Trainer(
        strategy=ModelParallelStrategy(data_parallel_size=groups, tensor_parallel_size=options.tp),
        accelerator="auto", devices=options.devices, num_nodes=options.nodes, max_steps=options.steps,
        default_root_dir=options.out, logger=False, enable_progress_bar=False, enable_checkpointing=False,
    )  # fmt: skip
    module = Module(options.model or str(tiny.write_llama()), options.tp, options.lr)
    starts = torch.randint(50, (64, 1), generator=torch.Generator().manual_seed(0))
    trainer.fit(module, torch.utils.data.DataLoader(starts + torch.arange(32), batch_size=4))
    if trainer.global_rank == 0:
        print("\n".join(f"step {step}: loss {loss:.4f}" for step, loss in enumerate(module.losses)), flush=True)
    if options.out:
        module.model.save_pretrained(options.out)  # called by every rank
    return module.losses


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()  # its threads must end before the interpreter does
