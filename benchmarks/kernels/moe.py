"""A mixture-of-experts layer: router, gated experts, the weighted sum of each token's experts."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from benchmarks.kernels.case import Case, Place, Provider, Tensors, chosen, compute
from ligermodels.layers import MoE

MARGIN = 0.05
"""What the last expert chosen is ahead of the first one not chosen, in the router's logits of size 1: several bf16
roundings, so that all providers send a token to the same experts and errors are those of the arithmetic."""


def moe_case(
    place: Place, peers: set[str], tokens: int, size: int, intermediate: int, experts: int, top_k: int
) -> Case:
    def make(tokens=tokens):
        inputs = {
            "router": place.randn(experts, size, scale=size**-0.5),
            "gate_up": place.randn(experts, 2 * intermediate, size, scale=size**-0.5),
            "down": place.randn(experts, size, intermediate, scale=intermediate**-0.5),
        }
        x = place.randn(tokens, size)
        best = (x.float() @ inputs["router"].float().T).topk(min(top_k + 1, experts)).values
        clear = torch.arange(tokens, device=x.device)
        if experts > top_k:
            clear = clear[best[:, -2] - best[:, -1] > MARGIN]
        inputs["x"] = x[clear[torch.arange(tokens, device=x.device) % len(clear)]]
        return inputs, (place.randn(tokens, size),)

    def ours(t):
        weights = {"gate.weight": "router", "experts.gate_up_proj": "gate_up", "experts.down_proj": "down"}
        layer = _on_meta(MoE, size, intermediate, num_experts=experts, top_k=top_k)
        return (functional_call(layer, _named(weights, t), (t["x"][None],))[0][0],)

    def eager(t):
        """As transformers writes it, in fp64 where the inputs are."""
        probabilities = F.linear(t["x"], t["router"]).softmax(-1, dtype=compute(t["x"]))
        weights, picked = probabilities.topk(top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        y = torch.zeros_like(t["x"])
        for expert in range(experts):
            token, place_of = torch.where(picked == expert)
            gate, up = F.linear(t["x"][token], t["gate_up"][expert]).chunk(2, -1)
            out = F.linear(F.silu(gate) * up, t["down"][expert]) * weights[token, place_of, None]
            y = y.index_add(0, token, out.to(y.dtype))
        return (y,)

    def theirs(t, implementation):
        weights = {"gate.weight": "router", "experts.gate_up_proj": "gate_up", "experts.down_proj": "down"}
        block = _transformers_block(size, intermediate, experts, top_k, implementation)
        return (functional_call(block, _named(weights, t), (t["x"][None],))[0],)

    def liger(t):
        from liger_kernel.ops import LigerFusedMoEFunction

        probabilities = F.linear(t["x"], t["router"]).softmax(-1, dtype=torch.float32)
        weights, picked = probabilities.topk(top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        return (LigerFusedMoEFunction.apply(t["x"], t["gate_up"], t["down"], picked.int(), weights),)

    work = 6.0 * tokens * top_k * size * intermediate
    return Case(
        "moe",
        f"T={tokens} H={size} I={intermediate} E={experts} top {top_k}",
        make,
        leaves=("x", "router", "gate_up", "down"),
        outputs=("y",),
        eager=eager,
        providers=chosen(
            peers,
            Provider("ligermodels", ours, ours=True),
            eager=[Provider("eager", eager)],
            transformers=[
                Provider(f"transformers, {name}", functools.partial(theirs, implementation=implementation))
                for name, implementation in (("grouped_mm", "grouped_mm"), ("loop over experts", "eager"))
            ],
            liger=[Provider("Liger", liger)],
        ),
        forward_work=work,
        full_work=3 * work,
        unit="operations",
        make_small=lambda: make(min(tokens, 4096)),
    )


def _named(names: dict[str, str], t: Tensors) -> Tensors:
    return {ours: t[name] for ours, name in names.items()}


@functools.cache
def _on_meta(make: type[nn.Module], *sizes: int, **options: Any) -> nn.Module:
    """The module without memory: `functional_call` gives it a case's tensors."""
    with torch.device("meta"):
        return make(*sizes, **options)


@functools.cache
def _transformers_block(size: int, intermediate: int, experts: int, top_k: int, implementation: str) -> nn.Module:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=size,
        intermediate_size=intermediate,
        num_local_experts=experts,
        num_experts_per_tok=top_k,
    )
    config._experts_implementation = implementation
    with torch.device("meta"):
        return MixtralSparseMoeBlock(config)
