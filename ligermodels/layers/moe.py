"""Mixture of experts: router, experts, and the load balancing loss."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.kernels._recompute import attach_to_view
from ligermodels.kernels.experts.experts import experts_of
from ligermodels.kernels.experts.route import route
from ligermodels.kernels.linear.linear import linears
from ligermodels.kernels.linear.operand import Adapter, LinearOperand
from ligermodels.layers.base import REPLICATED, Draw, FusionContext, FusionPart, Layer, Shard
from ligermodels.layers.fusion import operand_kinds
from ligermodels.layers.lora import Factor, scale_of
from ligermodels.layers.parallel import MeshGroup, local_shard, replicated
from ligermodels.layers.quantized import QuantizedLinear


class Adaptable(Layer):
    """A module whose weights, by the names in `adaptable`, can get an `ExpertsAdapter`."""

    adaptable: ClassVar[tuple[str, ...]]

    def operand(self, name: str) -> LinearOperand:
        """The operand of a weight [E, out, in], with its adapter."""
        adapter = getattr(self, f"{name}_adapter", None)
        return LinearOperand(getattr(self, name), None, None if adapter is None else adapter.factors)

    def add_adapter(self, name: str, *, r: int, alpha: float, rslora: bool, dtype: torch.dtype) -> "ExpertsAdapter":
        """Gives a weight an adapter of zeros, and freezes all weights."""
        self.requires_grad_(False)
        weight = self.operand(name).weight
        adapter = ExpertsAdapter(weight.shape, r=r, alpha=alpha, rslora=rslora, dtype=dtype, device=weight.device)
        self.add_module(f"{name}_adapter", adapter)
        for other in self.adapters.values():
            other.requires_grad_(True)
        return adapter

    @property
    def adapters(self) -> dict[str, "ExpertsAdapter"]:
        """{name of the weight: its adapter}."""
        adapters = {name: getattr(self, f"{name}_adapter", None) for name in self.adaptable}
        return {name: adapter for name, adapter in adapters.items() if adapter is not None}


class Experts(Adaptable):
    """Gated MLPs with stacked weights: expert e computes down_proj[e] @ (activation(gate) * up).

    forward(x [T, hidden_size], weights [T, top_k], experts [T, top_k]) -> [T, hidden_size]: the weighted sum over the
    experts of each token. recompute: see `moe_experts`. tp: the ranks over which intermediate_size is sharded (tensor
    parallel); the caller then sums the outputs over the ranks.
    """

    adaptable = stacked = ("gate_up_proj", "down_proj")

    def __init__(self, hidden_size: int, intermediate_size: int, *, num_experts: int, activation: str = "silu"):
        super().__init__()
        self.activation, self.num_experts = activation, num_experts
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.reset_parameters()

    def init_weights(self, draw: Draw) -> None:
        draw(self.gate_up_proj)
        draw(self.down_proj)

    @property
    def intermediate_size(self) -> int:
        return self.operand("down_proj").weight.shape[-1]

    def shards(self) -> Mapping[str, Shard]:
        inner = self.intermediate_size
        split = inner, f"an intermediate size of {inner}"
        gate_up = Shard("columns", *split, parts=(inner, inner), dim=1)
        return {"gate_up_proj": gate_up, "down_proj": Shard("rows", *split)}

    def fusion_parts(self, at: FusionContext) -> Iterable[FusionPart]:
        operands = [self.operand(name) for name in self.stacked]
        yield FusionPart("experts", "one op, grouped matmuls" + operand_kinds(operands), True)

    def operand(self, name: str) -> LinearOperand:
        """The operand of "gate_up_proj" or "down_proj": a weight [E, out, in], and its adapter."""
        operand, weight = super().operand(name), getattr(self, name)
        if isinstance(weight, QuantizedLinear):
            operand = operand._replace(weight=weight.operand.in_groups(self.num_experts))
        return operand

    def parts(self, name: str) -> int:
        """How many matrices "gate_up_proj" or "down_proj" consists of; each is quantised by itself."""
        return self.num_experts * (2 if name == "gate_up_proj" else 1)

    def set_quantized(self, name: str, modules: Sequence[QuantizedLinear]) -> None:
        """Replaces "gate_up_proj" or "down_proj" by its quantised `parts`, in the order of their rows."""
        weights = [module.operand for module in modules]
        self._parameters.pop(name, None)
        self.add_module(name, QuantizedLinear(type(weights[0]).stack(weights)))

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor, *, recompute: bool = False) -> Tensor:
        layers = self.operand("gate_up_proj"), self.operand("down_proj")
        if self.tp is not None:
            if not all(layer.is_dense for layer in layers):
                raise InputError(
                    "experts with adapters or quantised weights cannot run under tensor parallel: use a mesh without tp"
                )
            gate_up, down = (LinearOperand(local_shard(layer.weight, self.tp)) for layer in layers)
            layers = LinearOperand(gate_up.weight.flatten(1, -2)), down  # gate and up have a dim of their own
        return experts_of(x, weights, experts, *layers, activation=self.activation, recompute=recompute)

    def extra_repr(self) -> str:
        sizes = f"{self.operand('down_proj').weight.shape[1]}, {self.intermediate_size}"
        return f"{sizes}, num_experts={self.num_experts}, activation={self.activation!r}"


class ExpertsAdapter(nn.Module):
    """LoRA of a weight [E, out, in] of experts, or [1, experts, in] of a router.

    PEFT's shapes: lora_A.weight [r E, in], the rows of an expert one after the other; lora_B.weight [out, r E], the
    columns of an expert E apart.
    """

    def __init__(self, shape: Sequence[int], *, r: int, alpha: float, rslora: bool, **options: Any):
        super().__init__()
        self.num_experts, rows, columns = shape
        self.r, self.alpha, self.rslora, self.adapter_on = r, alpha, rslora, True
        self.scale = scale_of(alpha, r, rslora)
        self.lora_A = Factor(torch.zeros(r * self.num_experts, columns, **options))
        self.lora_B = Factor(torch.zeros(rows, r * self.num_experts, **options))

    @property
    def factors(self) -> Adapter | None:
        """A [E, r, in], B [E, out, r] and the scale; None if the adapter is off."""
        if not self.adapter_on:
            return None
        return Adapter(*self.by_expert(self.lora_A.weight, self.lora_B.weight), self.scale)

    def by_expert(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """A [E, r, in] and B [E, out, r] from the weights of lora_A and lora_B."""
        return a.unflatten(0, (-1, self.r)), b.unflatten(1, (-1, self.num_experts)).permute(2, 0, 1)


class Router(Adaptable):
    """Scores of the experts for each token: x [T, hidden_size] -> [T, num_experts]."""

    adaptable = ("weight",)

    def __init__(self, hidden_size: int, num_experts: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.reset_parameters()

    def init_weights(self, draw: Draw) -> None:
        draw(self.weight)

    def shards(self) -> Mapping[str, Shard]:
        return {"weight": REPLICATED}

    def operand(self, name: str) -> LinearOperand:
        """The operand of "weight", as that of one expert: [1, num_experts, hidden_size]."""
        return super().operand(name)._replace(weight=self.weight[None])

    def forward(self, x: Tensor) -> Tensor:
        module = getattr(self, "weight_adapter", None)
        adapter = None if module is None else module.factors
        if adapter is not None:
            adapter = adapter._replace(a=adapter.a[0], b=adapter.b[0])
        return linears(x, [LinearOperand(replicated(self.weight, self.tp), None, adapter)])


class MoE(Layer):
    """Sends each token through the top_k experts with the highest router scores.

    forward(x [B, S, hidden_size]) -> (y [B, S, hidden_size], router_logits [B * S, num_experts]).

    The scores of the chosen experts go through a softmax in fp32, so that they sum to 1; with normalize=False, the
    softmax is over all experts. The weighted sum of the experts' outputs is in fp32. jitter_noise: in training, x is
    first multiplied by random numbers from [1 - jitter_noise, 1 + jitter_noise], for both the router (`gate`) and the
    experts. experts_first: `experts` stand before `gate` in the order of parameters, by which optimizers know them.
    activation: as in GatedMLP.
    With the attribute `recompute` the backward recomputes the experts' gate and up, 2 top_k intermediate_size numbers
    per token, instead of saving them. tp: as in `GatedMLP`; each rank routes all tokens to its shards of all experts.
    """

    recompute = False

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        num_experts: int,
        top_k: int,
        activation: str = "silu",
        jitter_noise: float = 0.0,
        normalize: bool = True,
        experts_first: bool = False,
    ):
        super().__init__()
        self.top_k, self.normalize = top_k, normalize
        self.jitter_noise = jitter_noise
        self.gate = Router(hidden_size, num_experts)
        self.experts = Experts(hidden_size, intermediate_size, num_experts=num_experts, activation=activation)
        if experts_first:
            self.gate = self._modules.pop("gate")  # type: ignore[assignment]

    def shards(self) -> Mapping[str, Shard]:
        what = "router jitter, which each rank would draw for itself; set router_jitter_noise to 0"
        return {"jitter_noise": Shard.refused(what)} if self.jitter_noise > 0 else {}

    def saved_per_token(self, policy: str) -> int:
        """gate and up of the chosen experts, and the scores where all make up the weights."""
        inside = 2 * self.top_k * self.experts.intermediate_size if policy == "none" else 0
        return inside + (0 if self.normalize else len(self.gate.weight))

    def unread_bytes(self, rows: int) -> float:
        """Bytes of the experts that a step of decoding `rows` rows is expected not to read."""
        unused = (1 - self.top_k / len(self.gate.weight)) ** rows
        return unused * sum(x.nbytes for x in (*self.experts.parameters(), *self.experts.buffers()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.training and self.jitter_noise > 0:
            x = x * torch.empty_like(x).uniform_(1.0 - self.jitter_noise, 1.0 + self.jitter_noise)
        x = x if self.tp is None else self.tp.all_gather(x, 1)
        rows = attach_to_view(x, x.reshape(-1, x.shape[-1]))
        router_logits = self.gate(rows)
        routing = route(router_logits, top_k=self.top_k, normalize=self.normalize)
        y = self.experts(rows, *routing, recompute=self.recompute).view(x.shape)
        if self.tp is None:
            return y, router_logits
        return self.tp.reduce_scatter(y, 1), self.tp.divide_gradient(router_logits)

    def extra_repr(self) -> str:
        return f"top_k={self.top_k}, normalize={self.normalize}, jitter_noise={self.jitter_noise}"


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
        sums = list(data.all_reduce(torch.cat(sums)).split([len(part) for part in sums]))
    share, probability = (part / sums[2].clamp(min=1) for part in sums[:2])
    return first.shape[-1] * (share * probability).sum()
