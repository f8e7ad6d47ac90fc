"""What layers say that they save for the backward, beside what autograd saves; the kernels run as on a GPU."""

import functools
from unittest import mock

import pytest
import torch

from ligermodels.arch import ARCHS, block
from ligermodels.kernels._triton import INTERPRET
from ligermodels.layers import MoE
from ligermodels.layers.base import saved_per_token
from tests.tiny import FAMILIES, TINY

pytestmark = pytest.mark.skipif(not INTERPRET, reason="counts on the CPU")
TOKENS = 16
# Numbers in 32 bits a token, which the plan leaves out. A norm has one a row, and attention one a head.
NORMS, HEADS, KEY_HEADS = 2, 4, 2
ROUTED = 4 * 2  # of each chosen expert: its weight and number, and the place of its row, there and back
MIXTURES = {
    "mixtral": {},
    "weights of all experts": dict(normalize=False),
    "a shared expert": dict(shared_size=40),
    "a gated shared expert": dict(shared_size=40, shared_gate=True),
    "a router in fp32": dict(score="sigmoid", correction_bias=True, fp32_router=True),
}
CASES = {
    "llama": NORMS + HEADS,
    "gemma2": 2 * NORMS + HEADS,
    "qwen3": NORMS + HEADS + HEADS + KEY_HEADS,
    **dict.fromkeys(MIXTURES, NORMS + HEADS + ROUTED),
    "a router in fp32": NORMS + HEADS + ROUTED + 2,  # the logits of the chosen experts
    "gemma4_text": NORMS + 4 + 2 * HEADS + 2,  # the norms of its own input among them, and of one key and value head
    "full_attention": NORMS + HEADS + HEADS + KEY_HEADS,
    "linear_attention": NORMS + 2 * HEADS,  # the decay of a head, and its norm
}


def saved(family, policy, blocks, mixture, **changes):
    """(elements in 16 bits, in 32 bits) that a training forward saves, each memory once."""
    arch = ARCHS[family]
    config = {**TINY, **FAMILIES[family], "model_type": family, "num_hidden_layers": blocks, **changes}
    with mock.patch.object(block, "MoE", functools.partial(MoE, **mixture)):
        model = arch.from_config(arch.config_class.from_hf(config), dtype=torch.bfloat16).train()
    model.gradient_checkpointing_enable({"recompute": policy})
    weights = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
    kept, ids = {}, torch.randint(3, 90, (1, TOKENS))

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes() // tensor.element_size(), tensor.element_size(), tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=ids, labels=ids)
    return model, *(sum(count for count, size, _ in kept.values() if size == width) for width in (2, 4))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("policy", ["none", "mlp"])
def test_a_block_saves_what_its_layers_say(case, policy):
    """The difference of three and two blocks."""
    family = "mixtral" if case in MIXTURES else "qwen3_5_text" if case.endswith("_attention") else case
    changes = [{"layer_types": [case] * n} if case.endswith("_attention") else {} for n in (3, 2)]
    if family == "gemma4_text":
        changes = [{"layer_types": ["full_attention"] * n, "num_kv_shared_layers": 0} for n in (3, 2)]
    if family == "mixtral":  # the balancing loss is not of a block
        changes = [{"output_router_logits": False}] * 2
    (model, *more), (_, *fewer) = (
        saved(family, policy, n, MIXTURES.get(case, {}), **change) for n, change in zip((3, 2), changes, strict=True)
    )
    halves, words = ((a - b) / TOKENS for a, b in zip(more, fewer, strict=True))
    assert halves == saved_per_token(model.decoder.layers[-1], policy)
    tables = 5 + 3 * 6 if family == "mixtral" else 0  # for all tokens: the rows of 4 experts, and the lines of 5 tiles
    assert words == CASES[case] + tables / TOKENS
