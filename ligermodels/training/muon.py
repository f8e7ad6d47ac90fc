"""Muon for the matrices of a model's blocks, and AdamW for all else, as one optimizer.

Muon replaces the momentum of a matrix by the nearest matrix with orthogonal rows or columns, by Newton-Schulz
iterations. The step is torch.optim.Muon's, with its adjustment "match_rms_adamw": an update has the size of AdamW's, so
that both have one learning rate and one weight decay. Sources: https://kellerjordan.github.io/posts/muon/,
arXiv:2502.16982.

    groups = [dict(params=matrices_of(model), muon=True), dict(params=the others)]
    optimizer = MuonAdamW(groups, lr=2e-5, max_grad_norm=1.0)
"""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.training.adamw import AdamW

MOMENTUM = 0.95


class MuonAdamW(AdamW):
    """params: groups as of AdamW, of which those with `muon=True` have matrices alone.

    options: those of AdamW. A matrix has the state "momentum_buffer" in fp32 and, unless it is in fp32 itself,
    "master", its fp32 value, which the steps change and the weight rounds: 8 bytes for each element in bf16. Memory for
    one more matrix in fp32 is needed in a step.
    Raises InputError for weights that are no matrices or that are sharded, and for options that Muon does not have.
    """

    def __init__(self, params: Iterable, lr: float = 1e-3, **options: Any) -> None:
        for name in ("capturable", "step_in_backward"):
            if options.get(name):
                raise InputError(f"MuonAdamW: {name}=True is AdamW's alone; leave it out")
        super().__init__([{"muon": False, **group} for group in params], lr, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        for p in param_group["params"] if param_group["muon"] else ():
            if hasattr(p, "device_mesh"):
                raise InputError(
                    f"MuonAdamW: a matrix of shape {tuple(p.shape)} is sharded, and Muon needs it whole; use AdamW"
                )
            if p.dim() != 2 or not p.is_floating_point():
                raise InputError(f"MuonAdamW: a weight of shape {tuple(p.shape)}, {p.dtype}, is no matrix of numbers")
        super().add_param_group(param_group)

    def master(self, p: Tensor) -> Tensor:
        """The fp32 weight of p."""
        master = self.state[p].get("master") if p in self.state else None
        return super().master(p) if master is None else master

    def _update(self, group: dict[str, Any], ready: Sequence[tuple[int, Tensor]], factor: Tensor | None) -> None:
        if not group["muon"]:
            super()._update(group, ready, factor)
            return
        for _, p in ready:
            state = self.state[p] = self.state.get(p) or _first_state(p)
            weight = nn.Parameter(state.get("master", p.detach()))  # the same memory
            weight.grad = p.grad.to(weight.dtype)  # type: ignore[union-attr]
            if factor is not None:
                weight.grad = weight.grad * factor.to(p.device)
            step = torch.optim.Muon(
                [weight], float(group["lr"]), group["weight_decay"], MOMENTUM, adjust_lr_fn="match_rms_adamw"
            )
            step.state[weight]["momentum_buffer"] = state["momentum_buffer"]
            step.step()
            if "master" in state:
                p.copy_(weight)
        torch.autograd.graph.increment_version([p for _, p in ready])

    def _check_loadable(self, state_dict: dict[str, Any]) -> None:
        matrices = {key for group in state_dict["param_groups"] if group.get("muon") for key in group["params"]}
        super()._check_loadable(
            state_dict | {"state": {key: x for key, x in state_dict["state"].items() if key not in matrices}}
        )
        for key in matrices:
            if (state := state_dict["state"].get(key)) and "momentum_buffer" not in state:
                raise InputError(
                    f"MuonAdamW: the loaded state of parameter {key} has {', '.join(map(str, state))}; expected "
                    "momentum_buffer. Is it another optimizer's?"
                )

    def _loaded_state(self, p: Tensor, group: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
        if not group["muon"]:
            return super()._loaded_state(p, group, state)
        first = _first_state(p)
        return {key: state[key].to(x.device, x.dtype, copy=True) if key in state else x for key, x in first.items()}


def matrices_of(model: Any) -> list[nn.Parameter]:
    """The weights of the linear modules of the blocks that are trained, for which Muon is meant.

    Embedding, head, norms, biases, routers, convolutions and the stacked weights of experts are not among them.
    """
    weights = [module.weight for module in model.decoder.layers.modules() if isinstance(module, nn.Linear)]
    return list(dict.fromkeys(cast(nn.Parameter, weight) for weight in weights if weight.requires_grad))


def _first_state(p: Tensor) -> dict[str, Any]:
    exact = torch.float32 if p.dtype in (torch.bfloat16, torch.float16) else p.dtype
    state = {"momentum_buffer": torch.zeros_like(p, dtype=exact, requires_grad=False)}
    if exact != p.dtype:
        state["master"] = p.detach().to(exact)
    return state
