"""torch's FSDP2 around blocks and model, on two processes: the gradients of one."""

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import fully_shard

from ligermodels.errors import InputError
from ligermodels.integrations.transformers import AutoModelForCausalLM
from ligermodels.training import offload
from tests.parallel.ranks import on_ranks
from tests.parallel.runs import batch, grad_errors, make, part, whole
from tests.parallel.train import sharded
from tests.tools.models import SIZES


def on_two_ranks():
    offload.SMALLEST = 1  # a process of its own: nobody else sees it
    for family in ("llama", "gemma2"):
        model, (_, expected) = sharded(make(family)), whole(family, "plain")
        mine = part(batch(family, "plain"), dist.get_rank(), 2)
        labels = batch(family, "plain")["labels"][:, 1:] != -100
        for recompute, offloads in (("none", False), ("block", False), ("none", True)):
            model.gradient_checkpointing_enable({"recompute": recompute, "offload": offloads})
            model.zero_grad()
            (2 * model(**mine, num_items_in_batch=labels.sum()).loss).backward()  # FSDP2 takes the mean over ranks
            assert max(grad_errors(model, expected).values()) < 2e-5
    model = AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZES))
    fully_shard(model, reshard_after_forward=True)
    output = model(**mine)
    with pytest.raises(InputError, match="return_logits=True"):
        output.logits  # noqa: B018
    torch.testing.assert_close(model(**mine, return_logits=True).loss, output.loss)


def test_fsdp2_gives_the_gradients_of_one_process(tmp_path):
    on_ranks(tmp_path, on_two_ranks)
