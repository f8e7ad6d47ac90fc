"""Tiny models in fp64 and batches of them, for losses that are compared with plain formulas."""

import torch

import ligermodels
from ligermodels.recipes.data.examples import Example, packed_batch

TINY = dict(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3,
)  # fmt: skip
MIXTURE = dict(
    head_dim=8, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=16, mlp_only_layers=[0], num_hidden_layers=3
)
GEMMA2 = dict(head_dim=8, final_logit_softcapping=3.0, hidden_activation="gelu_pytorch_tanh")


def model(family="Llama", seed=0, **changes):
    config = TINY | {"Gemma2": GEMMA2, "Qwen3Moe": MIXTURE}.get(family, {}) | changes
    config["model_type"] = {"Qwen3Moe": "qwen3_moe"}.get(family, family.lower())
    return getattr(ligermodels, family).from_config(config, device="cpu", seed=seed).double().train()


def examples(*sizes, seed=0):
    """Of the sizes; about a third of the labels, and each first one, are -100."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for size in sizes:
        ids = torch.randint(0, TINY["vocab_size"], (size,), generator=generator)
        labels = ids.where(torch.rand(size, generator=generator) > 0.3, -100)
        labels[0] = -100
        found.append(Example(ids.tolist(), labels.tolist()))
    return found


def batches(*sizes):
    """The same examples, packed, and as padded rows, whose last tokens attend to nothing."""
    found, width = examples(*sizes), max(sizes)
    padded = {"input_ids": [one.ids + [0] * (width - one.size) for one in found]}
    padded["labels"] = [one.labels + [-100] * (width - one.size) for one in found]
    padded["attention_mask"] = [[1] * one.size + [0] * (width - one.size) for one in found]
    return packed_batch(found), {name: torch.tensor(rows) for name, rows in padded.items()}


def check(model, found, expected):
    """Two losses of a model are the same, and so are their gradients. The second may be checked again."""
    torch.testing.assert_close(found, expected)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = [torch.autograd.grad(x, [*trained.values()], retain_graph=True) for x in (found, expected)]
    for name, one, other in zip(trained, *gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")
