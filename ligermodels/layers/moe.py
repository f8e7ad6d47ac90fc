"""Mixture of experts: router, experts, and the load balancing loss."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.kernels._math import Activation, activation_name
from ligermodels.kernels._recompute import attach, attach_to_view, cast_with_handle, in_backward
from ligermodels.kernels.experts.experts import experts_of
from ligermodels.kernels.experts.route import check_routing, route, weights_of
from ligermodels.kernels.linear.linear import linears
from ligermodels.kernels.linear.operand import Adapter, LinearOperand
from ligermodels.layers.base import REPLICATED, Draw, FusionContext, FusionPart, Layer, Shard, ones, zeros
from ligermodels.layers.fusion import linears_part, operand_kinds
from ligermodels.layers.linear import apply_linear
from ligermodels.layers.lora import Factor, scale_of
from ligermodels.layers.mlp import GatedMLP
from ligermodels.layers.norm import RMSNorm
from ligermodels.layers.parallel import MeshGroup, local_shard, replicated
from ligermodels.layers.quantized import QuantizedLinear


class Adaptable(Layer):
    """A module whose weights, by the names in `adaptable`, can get an `ExpertsAdapter`."""

    adaptable: ClassVar[tuple[str, ...]]

    def operand(self, name: str) -> LinearOperand:
        """The operand of a weight [E, out, in], with the bias NAME_bias [E, out] and its adapter, where it has them."""
        bias, adapter = (getattr(self, f"{name}_{what}", None) for what in ("bias", "adapter"))
        return LinearOperand(getattr(self, name), bias, None if adapter is None else adapter.factors)

    def add_adapter(self, name: str, *, r: int, alpha: float, rslora: bool, dtype: torch.dtype) -> "ExpertsAdapter":
        """Gives a weight an adapter of zeros, and freezes all weights and biases."""
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
    experts of each token. activation: as in `glu`, also a ClampedSwiGLU. bias: both layers have one, gate_up_proj_bias
    [num_experts, 2 intermediate_size] and down_proj_bias [num_experts, hidden_size]. recompute: see `moe_experts`. tp:
    the ranks over which intermediate_size is sharded (tensor parallel); the caller then sums the outputs over the
    ranks, of which only the first adds down_proj_bias. ep: the ranks over which the experts are spread by number
    (expert parallel), each of which has tokens of its own; see `_over_ranks`.
    """

    ep: MeshGroup | None = None

    adaptable = stacked = ("gate_up_proj", "down_proj")
    gate_up_proj_bias: nn.Parameter | None
    down_proj_bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        num_experts: int,
        activation: Activation = "silu",
        bias: bool = False,
    ):
        super().__init__()
        activation_name("Experts", activation, gated=True)
        self.activation, self.num_experts = activation, num_experts
        inner = 2 * intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, inner, hidden_size))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(num_experts, inner)) if bias else None
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.down_proj_bias = nn.Parameter(torch.empty(num_experts, hidden_size)) if bias else None
        self.reset_parameters()

    def init_weights(self, draw: Draw) -> None:
        draw(self.gate_up_proj)
        draw(self.down_proj)
        draw(self.gate_up_proj_bias, zeros)
        draw(self.down_proj_bias, zeros)

    @property
    def intermediate_size(self) -> int:
        return self.operand("down_proj").weight.shape[-1]

    @property
    def saved_per_row(self) -> int:
        """gate and up of a token in one expert, and the rank of an adapter on them, unless they are recomputed."""
        adapter = self.adapters.get("gate_up_proj")
        return 2 * self.intermediate_size + (0 if adapter is None else adapter.r)

    def unchosen_bytes(self, top_k: int, rows: int) -> float:
        """Bytes of the experts that none of `rows` tokens is expected to choose, each of them `top_k` at random."""
        unchosen = (1 - top_k / self.num_experts) ** rows
        return unchosen * sum(x.nbytes for x in (*self.parameters(), *self.buffers()))

    def shards(self) -> Mapping[str, Shard]:
        inner = self.intermediate_size
        split = inner, f"an intermediate size of {inner}"
        gate_up = Shard("columns", *split, parts=(inner, inner), dim=1)
        shards = {"gate_up_proj": gate_up, "down_proj": Shard("rows", *split)}
        biases = {} if self.down_proj_bias is None else {"gate_up_proj_bias": gate_up, "down_proj_bias": REPLICATED}
        return shards | biases

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
        if self.ep is not None:
            self.check_dense("expert parallelism", "ep")
            return self._over_ranks(x, weights, experts, self.ep, recompute)
        if self.tp is not None:
            self.check_dense("tensor parallelism", "tp")
            layers = self._local_operands(*layers, self.tp)
        return experts_of(x, weights, experts, *layers, activation=self.activation, recompute=recompute)

    def check_dense(self, what: str, dim: str) -> None:
        """Raises InputError for experts with adapters or in few bits."""
        if not all(self.operand(name).is_dense for name in self.stacked):
            raise InputError(
                f"experts with adapters or quantised weights cannot run under {what}: use a mesh without {dim}"
            )

    def _over_ranks(self, x: Tensor, weights: Tensor, experts: Tensor, ep: MeshGroup, recompute: bool) -> Tensor:
        """The outputs for this rank's tokens, of the experts of all ranks.

        Each rank gets the tokens of all ranks, computes what its experts make of them, and the sums over ranks go back.
        Tokens of a rank that has fewer are padded by some without an expert. Whatever the routing, (n - 1) H numbers a
        token arrive at a rank, and leave it. An exchange of those that are needed alone would move 90 % of that over 4
        ranks and 66 % over 8, where a token has 8 experts, and copies rows once more on both sides.
        """
        gate_up, down = (
            LinearOperand(*(None if t is None else local_shard(t, ep) for t in self.operand(name)[:2]))
            for name in self.stacked
        )
        tokens, longest = len(x), ep.largest(len(x))
        weights = ep.all_gather(_padded(weights, longest), 0)
        experts = ep.all_gather(F.pad(experts.int(), (0, 0, 0, longest - tokens), value=self.num_experts), 0)
        gather = functools.partial(_gather_rows, longest, ep)
        gathered = attach(gather(x), gather, x)  # the backward gathers them again, and a rank saves its tokens alone
        y = experts_of(
            gathered, weights, experts, gate_up, down, activation=self.activation, recompute=recompute,
            first_expert=ep.rank * len(down.weight), total_experts=self.num_experts + 1,
        )  # fmt: skip
        y = ep.reduce_scatter(y, 0)
        return y if tokens == longest else y[:tokens].clone()  # FSDP2 hooks what a module returns, and warns of views

    @staticmethod
    def _local_operands(
        gate_up: LinearOperand, down: LinearOperand, tp: MeshGroup
    ) -> tuple[LinearOperand, LinearOperand]:
        """This rank's operands. Of gate_up's tensors, gate and up have a dim of their own."""
        first, last = local_shard(gate_up.weight, tp).flatten(1, 2), local_shard(down.weight, tp)
        if down.bias is None:
            return LinearOperand(first), LinearOperand(last)
        first_bias, last_bias = local_shard(gate_up.bias, tp).flatten(1, 2), replicated(down.bias, tp)
        return LinearOperand(first, first_bias), LinearOperand(last, last_bias * float(tp.rank == 0))

    def extra_repr(self) -> str:
        sizes = f"{self.operand('down_proj').weight.shape[1]}, {self.intermediate_size}"
        bias = self.down_proj_bias is not None
        return f"{sizes}, num_experts={self.num_experts}, activation={self.activation!r}, bias={bias}"


def _gather_rows(length: int, ep: MeshGroup, x: Tensor) -> Tensor:
    """The tokens x [T, H] of all ranks, each padded to `length`: [n * length, H]."""
    return ep.all_gather(_padded(x, length), 0)


def _padded(x: Tensor, length: int) -> Tensor:
    return x if len(x) == length else F.pad(x, (0, 0, 0, length - len(x)))


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
    """Scores of the experts for each token: x [T, hidden_size] -> [T, num_experts].

    fp32: the weight stays in fp32, and the product is in fp32, as in DeepSeek-V3 and GLM-4.5. bias: adds the parameter
    `bias` [num_experts] to the scores, as in gpt-oss. correction_bias: the buffer `e_score_correction_bias`
    [num_experts], in fp32, for `route`; no gradient trains it. The weight is then in fp32, too, but without `fp32` the
    product is in the dtype of x.
    """

    adaptable = ("weight",)
    bias: nn.Parameter | None
    e_score_correction_bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        *,
        fp32: bool = False,
        bias: bool = False,
        correction_bias: bool = False,
    ):
        super().__init__()
        self.fp32 = fp32
        self.keep_fp32 = fp32 or correction_bias
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.register_parameter("bias", nn.Parameter(torch.empty(num_experts)) if bias else None)
        correction = torch.zeros(num_experts, dtype=torch.float32) if correction_bias else None
        self.register_buffer("e_score_correction_bias", correction)
        self.reset_parameters()

    def init_weights(self, draw: Draw) -> None:
        draw(self.weight)
        draw(self.bias)  # as GptOssPreTrainedModel does
        draw(self.e_score_correction_bias, zeros)

    def shards(self) -> Mapping[str, Shard]:
        return {"weight": REPLICATED} | ({} if self.bias is None else {"bias": REPLICATED})

    def operand(self, name: str) -> LinearOperand:
        """The operand of "weight", as that of one expert: [1, num_experts, hidden_size]."""
        return super().operand(name)._replace(weight=self.weight[None])

    def forward(self, x: Tensor) -> Tensor:
        module = getattr(self, "weight_adapter", None)
        adapter = None if module is None else module.factors
        if adapter is not None:
            adapter = adapter._replace(a=adapter.a[0], b=adapter.b[0])
        weight, bias = replicated(self.weight, self.tp), replicated(self.bias, self.tp)
        if self.fp32:
            x = cast_with_handle(x, weight.dtype)
        elif self.keep_fp32:
            weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        return linears(x, [LinearOperand(weight, bias, adapter)])


class ScaledRouter(Layer):
    """Gemma 4's router: x [T, hidden_size] -> the weights [T, top_k] and the experts [T, top_k] of each token.

    x is normed without a weight and multiplied by `scale` and hidden_size ** -0.5. The largest of the softmax are made
    to sum to 1, and multiplied by the `per_expert_scale` of each. norm: keyword arguments of the RMSNorm.
    """

    keep_bf16 = ("proj",)

    def __init__(self, hidden_size: int, num_experts: int, *, top_k: int, **norm: Any):
        super().__init__()
        check_routing(num_experts, top_k=top_k)
        self.top_k, self.factor = top_k, hidden_size**-0.5
        self.norm = RMSNorm(hidden_size, elementwise_affine=False, **norm)
        self.proj = nn.Linear(hidden_size, num_experts, bias=False)
        self.scale = nn.Parameter(torch.ones(hidden_size))
        self.per_expert_scale = nn.Parameter(torch.ones(num_experts))

    def init_weights(self, draw: Draw) -> None:
        draw(self.scale, ones)
        draw(self.per_expert_scale, ones)

    def shards(self) -> Mapping[str, Shard]:
        return dict.fromkeys(("proj", "scale", "per_expert_scale"), REPLICATED)

    def saved_per_token(self, policy: str) -> int:
        """The normed row, what `proj` reads, and the scales of the chosen experts."""
        return 2 * self.norm.hidden_size + self.top_k

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(x) * replicated(self.scale, self.tp) * self.factor
        weights, experts = route(apply_linear(self.proj, x), top_k=self.top_k)
        return weights * replicated(self.per_expert_scale, self.tp)[experts.long()], experts


class MoE(Layer):
    """Sends each token through the top_k experts with the highest router scores.

    forward(x [B, S, hidden_size], experts=None) -> (y [B, S, hidden_size], router_logits [B * S, num_experts]). experts
    [B * S, top_k]: those that the tokens take, -1 for the router's choice; the router's logits weigh them.

    routing: options of `route`, which says what makes up the weights of the chosen experts. The weighted sum of the
    experts' outputs is in fp32. fp32_router, correction_bias: as in `Router`. bias: router and experts have one, as in
    gpt-oss. jitter_noise: in training, x is first multiplied by random numbers from [1 - jitter_noise,
    1 + jitter_noise], for both the router (`gate`) and the experts. experts_first: `experts` stand before `gate` in the
    order of parameters, by which optimizers know them. activation: as in `Experts`.
    shared_size: the size of `shared_expert`, a GatedMLP that every token passes and whose output is added; 0 for none.
    shared_name: its name, where it is another. router_name: that of the router, where it is not `gate`.
    shared_gate: its output is first multiplied by sigmoid(shared_expert_gate(x)), a number per token.
    With the attribute `recompute` the backward recomputes the experts' gate and up, 2 top_k intermediate_size numbers
    per token, instead of saving them. tp: as in `GatedMLP`; each rank routes all tokens to its shards of all experts.
    expert_loads: the tokens of each expert, int64 [num_experts], where they are counted; see training/balancing.py.
    """

    recompute = False
    keep_bf16 = ("shared_expert_gate",)
    expert_loads: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        num_experts: int,
        top_k: int,
        activation: Activation = "silu",
        bias: bool = False,
        correction_bias: bool = False,
        jitter_noise: float = 0.0,
        experts_first: bool = False,
        shared_size: int = 0,
        shared_name: str = "shared_expert",
        shared_gate: bool = False,
        router_name: str = "gate",
        fp32_router: bool = False,
        **routing: Any,
    ):
        super().__init__()
        check_routing(num_experts, top_k=top_k, **routing)
        self.top_k, self.routing = top_k, routing
        self.jitter_noise = jitter_noise
        self.router_name, inner = router_name, dict[str, Any](activation=activation, bias=bias)
        router = Router(hidden_size, num_experts, fp32=fp32_router, bias=bias, correction_bias=correction_bias)
        self.add_module(router_name, router)
        self.experts = Experts(hidden_size, intermediate_size, num_experts=num_experts, **inner)
        if experts_first:
            self.add_module(router_name, self._modules.pop(router_name))
        self.register_buffer("expert_loads", None, persistent=False)
        self.shared_name = shared_name
        self.add_module(shared_name, GatedMLP(hidden_size, shared_size, **inner) if shared_size else None)
        self.shared_expert_gate = nn.Linear(hidden_size, 1, bias=False) if shared_size and shared_gate else None

    @property
    def plain_router(self) -> Router:
        """The router, also inside a wrapper of PEFT."""
        modules = getattr(self, self.router_name).modules()
        return next(module for module in modules if isinstance(module, Router))

    @property
    def shared(self) -> GatedMLP | None:
        """The MLP that every token passes."""
        return self._modules[self.shared_name]  # type: ignore[return-value]

    def shards(self) -> Mapping[str, Shard]:
        shards = {} if self.shared_expert_gate is None else {"shared_expert_gate": REPLICATED}
        if self.jitter_noise > 0:
            what = "router jitter, which each rank would draw for itself; set router_jitter_noise to 0"
            shards["jitter_noise"] = Shard.refused(what)
        return shards

    def fusion_parts(self, at: FusionContext) -> Iterable[FusionPart]:
        if self.shared_expert_gate is not None:
            yield linears_part(self, ["shared_expert_gate"], at)

    def saved_per_token(self, policy: str) -> int:
        """gate and up of the chosen experts, with the ranks of an adapter, the scores where all make up the weights,
        and what the shared expert saves, with its output and the number that multiplies it."""
        inside = self.top_k * self.experts.saved_per_row if policy == "none" else 0
        if self.routing.get("score") != "sigmoid" and not self.routing.get("normalize", True):
            inside += (1 + self.plain_router.fp32) * len(self.plain_router.weight)
        if self.shared is not None:
            inside += self.shared.saved_per_token(policy)
        return inside + (0 if self.shared_expert_gate is None else 1 + self.shared_expert_gate.in_features)

    def unread_bytes(self, rows: int) -> float:
        return self.experts.unchosen_bytes(self.top_k, rows)

    def forward(self, x: Tensor, experts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self.training and self.jitter_noise > 0:
            x = x * torch.empty_like(x).uniform_(1.0 - self.jitter_noise, 1.0 + self.jitter_noise)
        x = x if self.tp is None else self.tp.all_gather(x, 1)
        rows = attach_to_view(x, x.reshape(-1, x.shape[-1]))
        router_logits = getattr(self, self.router_name)(rows)
        weights, chosen = self.choose(router_logits)
        if experts is not None:
            chosen = torch.where(experts < 0, chosen, experts)
            weights = weights_of(router_logits, chosen, **self.routing)
        if self.expert_loads is not None and self.training and torch.is_grad_enabled() and not in_backward():
            ones = self.expert_loads.new_ones(1).expand(chosen.numel())
            self.expert_loads.index_add_(0, chosen.flatten(), ones)
        y = self.experts(rows, weights, chosen, recompute=self.recompute)
        y = self._add_shared(y, rows).view(x.shape)
        if self.tp is None:
            return y, router_logits
        return self.tp.reduce_scatter(y, 1), self.tp.divide_gradient(router_logits)

    def choose(self, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        """The weights and the experts [T, top_k] of each token."""
        return route(router_logits, top_k=self.top_k, bias=self.plain_router.e_score_correction_bias, **self.routing)

    def _add_shared(self, y: Tensor, rows: Tensor) -> Tensor:
        if (mlp := self.shared) is None:
            return y
        shared = (mlp if self.tp is None else mlp.unreduced)(rows)
        if self.shared_expert_gate is None:
            return y + shared
        return torch.addcmul(y, apply_linear(self.shared_expert_gate, rows).sigmoid(), shared)

    def extra_repr(self) -> str:
        options = {"top_k": self.top_k, **self.routing, "jitter_noise": self.jitter_noise}
        return ", ".join(f"{name}={value!r}" for name, value in options.items())


def mixtures_of(model: nn.Module) -> list[MoE]:
    """The mixtures in a model, in the order of its modules."""
    return [module for module in model.modules() if isinstance(module, MoE)]


def all_experts(model: nn.Module) -> list[Experts]:
    """The experts in a model, also those beside an MLP, in the order of its modules."""
    return [module for module in model.modules() if isinstance(module, Experts)]


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
