"""The preference losses over a linear head: DPO and KTO with a reference model, ORPO, CPO and SimPO without."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.case import Case, Place, Provider, Tensors, chosen, compiled, compute
from benchmarks.kernels.losses import three_products
from ligermodels.layers import preference

BETA, GAMMA = 0.1, 0.5
OPTIONS: dict[str, dict[str, Any]] = {
    "linear_dpo": {"use_ref_model": True},
    "linear_kto": {"use_ref_model": True},
    "linear_orpo": {},
    "linear_cpo": {},
    "linear_simpo": {"gamma": GAMMA, "compute_nll_loss": False},
}
"""Liger's, of which use_ref_model is no option of ours: a reference that is given is used."""
OURS = {
    "linear_dpo": preference.LinearDPOLoss,
    "linear_kto": preference.LinearKTOLoss,
    "linear_orpo": preference.LinearORPOLoss,
    "linear_cpo": preference.LinearCPOLoss,
    "linear_simpo": preference.LinearSimPOLoss,
}


def _token_logps(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = x @ weight.T
    return logits.log_softmax(-1, dtype=compute(logits)).gather(-1, labels[..., None])[..., 0]


def eager_preference(t: Tensors, op: str) -> tuple[Tensor, ...]:
    """As trl writes them, on all logits at once."""
    tokens = _token_logps(t["x"], t["weight"], t["labels"])
    logps = tokens.mean(-1) if op in ("linear_orpo", "linear_simpo") else tokens.sum(-1)
    if "ref_x" in t:
        with torch.no_grad():
            ratio = _token_logps(t["ref_x"], t["ref_weight"], t["labels"]).sum(-1)
        logps = logps - ratio
    if op == "linear_kto":
        return (torch.sigmoid(BETA * torch.where(t["desirable"], -logps, logps)).mean(),)
    best, worst = logps.chunk(2)
    if op == "linear_orpo":
        odds = best - worst - (torch.log1p(-best.exp()) - torch.log1p(-worst.exp()))
        loss = -BETA * F.logsigmoid(odds).mean()
    else:
        loss = -F.logsigmoid(BETA * (best - worst) - (GAMMA if op == "linear_simpo" else 0)).mean()
    return (loss - tokens.chunk(2)[0].mean() if op in ("linear_orpo", "linear_cpo") else loss,)


def preference_case(
    place: Place, peers: set[str], sequences: int, length: int, size: int, vocab: int, *, op: str
) -> Case:
    with_reference = "use_ref_model" in OPTIONS[op]

    def make():
        names = ("", "ref_") if with_reference else ("",)
        inputs = {f"{name}x": place.randn(sequences, length, size) for name in names}
        inputs |= {f"{name}weight": place.randn(vocab, size, scale=size**-0.5) for name in names}
        inputs["labels"] = place.labels(sequences * length, vocab).view(sequences, length)
        if op == "linear_kto":
            inputs["desirable"] = torch.arange(sequences, device=place.device) % 2 == 0
        return inputs, ()

    own = {name: value for name, value in OPTIONS[op].items() if name != "use_ref_model"}
    module = OURS[op](beta=BETA, **own)
    eager = functools.partial(eager_preference, op=op)

    def reference(t, ref_x="ref_x"):
        return {ref_x: t["ref_x"], "ref_weight": t["ref_weight"]} if with_reference else {}

    def ours(t):
        wanted = [t["desirable"]] if op == "linear_kto" else []
        return (module(t["x"], t["weight"], t["labels"], *wanted, **reference(t)).loss,)

    def liger(t):
        from liger_kernel import chunked_loss

        module = getattr(chunked_loss, OURS[op].__name__.replace("Linear", "LigerFusedLinear"))(
            beta=BETA, **OPTIONS[op]
        )
        args = (t["x"], t["weight"]) if op == "linear_kto" else (t["weight"], t["x"])
        wanted = {"preference_labels": t["desirable"]} if op == "linear_kto" else {}
        return (module(*args, t["labels"], **wanted, **reference(t, "ref_input"))[0],)

    def products(t):
        rows = t["x"].flatten(0, 1)
        logits = (t["ref_x"].flatten(0, 1) @ t["ref_weight"].T,) if with_reference else ()
        return three_products(rows, t["weight"]), logits

    tokens = sequences * length
    return Case(
        op,
        f"{sequences} x {length} tokens, H={size} V={vocab}",
        make,
        leaves=("x", "weight"),
        outputs=("loss",),
        eager=eager,
        providers=chosen(
            peers,
            Provider("ligermodels", ours, ours=True),
            eager=[Provider("eager", eager)],
            compile=[Provider("torch.compile", compiled(eager))],
            liger=[Provider("Liger", liger)],
        ),
        full_work=(8.0 if with_reference else 6.0) * tokens * size * vocab,
        unit="operations",
        products=("four GEMMs" if with_reference else "three GEMMs", products),
        # A token's log probability errs by about one rounding of bf16 logits of size 1, independently of the others'.
        loss_floor=4 * torch.finfo(place.dtype).eps * BETA * tokens**0.5,
    )
