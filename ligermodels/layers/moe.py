"""Mixture of experts: router, experts, and the load balancing loss."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.kernels._recompute import attach_to_view
from ligermodels.kernels.linear import linear
from ligermodels.kernels.moe import moe_experts, route
from ligermodels.layers.parallel import MeshGroup, local_shard, replicated


class Experts(nn.Module):
    """Gated MLPs with stacked weights: expert e computes down_proj[e] @ (activation(gate) * up).

    forward(x [T, hidden_size], weights [T, top_k], experts [T, top_k]) -> [T, hidden_size]: the weighted sum over the
    experts of each token. recompute: see `moe_experts`. tp: the ranks over which intermediate_size is sharded (tensor
    parallel); the caller then sums the outputs over the ranks.
    """

    tp: MeshGroup | None = None

    def __init__(self, hidden_size: int, intermediate_size: int, *, num_experts: int, activation: str = "silu"):
        super().__init__()
        self.activation = activation
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in (self.gate_up_proj, self.down_proj):
            bound = weight.shape[-1] ** -0.5  # as nn.Linear draws it
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor, *, recompute: bool = False) -> Tensor:
        gate_up, down = local_shard(self.gate_up_proj, self.tp), local_shard(self.down_proj, self.tp)
        gate_up = gate_up.flatten(1, -2)  # a sharded weight has a separate dim for gate and up
        return moe_experts(x, weights, experts, gate_up, down, activation=self.activation, recompute=recompute)

    def extra_repr(self) -> str:
        num_experts, hidden_size, intermediate_size = self.down_proj.shape
        return f"{hidden_size}, {intermediate_size}, num_experts={num_experts}, activation={self.activation!r}"


class Router(nn.Module):
    """Scores of the experts for each token: x [T, hidden_size] -> [T, num_experts]."""

    tp: MeshGroup | None = None

    def __init__(self, hidden_size: int, num_experts: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        nn.init.uniform_(self.weight, -(hidden_size**-0.5), hidden_size**-0.5)  # as nn.Linear draws it

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, replicated(self.weight, self.tp))


class MoE(nn.Module):
    """Sends each token through the top_k experts with the highest router scores.

    forward(x [B, S, hidden_size]) -> (y [B, S, hidden_size], router_logits [B * S, num_experts]).

    The scores of the chosen experts go through a softmax in fp32, so that they sum to 1; their weighted sum of the
    experts' outputs is in fp32. jitter_noise: in training, x is first multiplied by random numbers from
    [1 - jitter_noise, 1 + jitter_noise], for both the router (`gate`) and the experts. activation: as in GatedMLP.
    With the attribute `recompute` the backward recomputes the experts' gate and up, 2 top_k intermediate_size numbers
    per token, instead of saving them. tp: as in `GatedMLP`; each rank routes all tokens to its shards of all experts.
    """

    recompute = False
    tp: MeshGroup | None = None

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        num_experts: int,
        top_k: int,
        activation: str = "silu",
        jitter_noise: float = 0.0,
    ):
        super().__init__()
        self.top_k = top_k
        self.jitter_noise = jitter_noise
        self.gate = Router(hidden_size, num_experts)
        self.experts = Experts(hidden_size, intermediate_size, num_experts=num_experts, activation=activation)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.training and self.jitter_noise > 0:
            x = x * torch.empty_like(x).uniform_(1.0 - self.jitter_noise, 1.0 + self.jitter_noise)
        x = x if self.tp is None else self.tp.all_gather(x, 1)
        rows = attach_to_view(x, x.reshape(-1, x.shape[-1]))
        router_logits = self.gate(rows)
        y = self.experts(rows, *route(router_logits, top_k=self.top_k), recompute=self.recompute).view(x.shape)
        if self.tp is None:
            return y, router_logits
        return self.tp.reduce_scatter(y, 1), self.tp.divide_gradient(router_logits)

    def extra_repr(self) -> str:
        return f"top_k={self.top_k}, jitter_noise={self.jitter_noise}"


def load_balancing_loss(
    router_logits: Sequence[Tensor],
    *,
    top_k: int,
    attention_mask: Tensor | None = None,
    data: MeshGroup | None = None,
) -> Tensor:
    """E * sum over experts e of f_e P_e, smallest if every expert gets an equal share of the tokens: then it is top_k.

    f_e is the share of rows that choose expert e, P_e its mean probability, both over the rows of all layers together.

    router_logits: [T, E] of each layer; attention_mask: [B, S] with B * S = T, 0 for rows that do not count. data: the
    ranks that have the other tokens; the loss is then that of all tokens, and the gradients of all ranks add up.
    Returns an fp32 scalar, 0 if no row counts. The softmax is in the logits' dtype, as in transformers'
    load_balancing_loss_func. Raises InputError if there is no layer, or if the mask has another number of tokens.
    Source: Fedus et al. 2021, https://arxiv.org/abs/2101.03961, equations 4 to 6.
    """
    if not router_logits:
        raise InputError("load_balancing_loss: router_logits is empty; pass the logits of at least one MoE layer.")
    first = router_logits[0]
    probabilities = torch.cat([logits.to(first.device) for logits in router_logits]).softmax(-1)
    chosen = torch.zeros_like(probabilities, dtype=torch.float32)
    chosen = chosen.scatter(1, probabilities.topk(top_k).indices, 1.0)
    counts = torch.ones_like(first[:, :1], dtype=torch.float32)
    if attention_mask is not None:
        if attention_mask.numel() != first.shape[0]:
            raise InputError(
                f"load_balancing_loss: attention_mask {tuple(attention_mask.shape)} has {attention_mask.numel()} "
                f"positions; the router saw {first.shape[0]} tokens. Pass the mask of the same batch."
            )
        counts = attention_mask.reshape(-1, 1).to(counts)
    counts = counts.repeat(len(router_logits), 1)
    sums = [(chosen * counts).sum(0), (probabilities.float() * counts).sum(0), counts.sum()[None]]
    if data is not None:
        sums = list(data.all_reduce(torch.cat(sums)).split([len(one) for one in sums]))
    share, probability = (one / sums[2].clamp(min=1) for one in sums[:2])
    return first.shape[-1] * (share * probability).sum()
