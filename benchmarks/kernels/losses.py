"""Cross entropy alone, and with the product that makes its logits; the log probabilities of the labels."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.case import IGNORED, Case, Place, Provider, Tensors, chosen, compiled, compute
from ligermodels import kernels


def eager_cross_entropy(t: Tensors) -> tuple[Tensor, ...]:
    logits = t["logits"]
    return (F.cross_entropy(logits.to(compute(logits)), t["labels"], ignore_index=IGNORED),)


def cross_entropy_case(place: Place, peers: set[str], tokens: int, vocab: int, trained: bool = True) -> Case:
    """trained: with the gradient of the logits; without, the loss alone, as evaluation needs it."""

    def make():
        return {"logits": place.randn(tokens, vocab, scale=2.0), "labels": place.labels(tokens, vocab)}, ()

    def liger(t):
        from liger_kernel.ops import LigerCrossEntropyFunction

        return (LigerCrossEntropyFunction.apply(t["logits"], t["labels"], None)[0],)

    width = 2 * tokens * vocab
    return Case(
        "cross_entropy",
        f"T={tokens} V={vocab}" + ("" if trained else ", no gradient"),
        make,
        leaves=("logits",) if trained else (),
        outputs=("loss",),
        eager=eager_cross_entropy,
        providers=chosen(
            peers,
            Provider("ligermodels", lambda t: (kernels.cross_entropy(t["logits"], t["labels"]),), ours=True),
            eager=[Provider("eager", eager_cross_entropy)],
            compile=[Provider("torch.compile", compiled(eager_cross_entropy))],
            torch=[Provider("F.cross_entropy, no upcast", lambda t: (F.cross_entropy(t["logits"], t["labels"]),))],
            liger=[Provider("Liger", liger, mutates=True)],
        ),
        forward_work=None if trained else width,
        full_work=2 * width,
        unit="bytes" if trained else "bytes read",
        # The logits are exact here; what is left is fp32 sums over the vocabulary in another order.
        loss_floor=1e-5,
    )


def eager_linear_cross_entropy(t: Tensors) -> tuple[Tensor, ...]:
    return eager_cross_entropy({"logits": t["x"] @ t["weight"].T, "labels": t["labels"]})


def exact_linear_cross_entropy(inputs: Tensors) -> Tensors:
    """In fp64 and by hand, since the logits of all tokens in fp64 are too large: 1024 tokens at a time."""
    x, weight, labels = inputs["x"].double(), inputs["weight"].double(), inputs["labels"]
    dx, dw = torch.zeros_like(x), torch.zeros_like(weight)
    count = (labels != IGNORED).sum()
    loss = x.new_zeros(())
    for rows in torch.arange(len(x), device=x.device)[labels != IGNORED].split(1024):
        logits, target = x[rows] @ weight.T, labels[rows, None]
        lse = logits.logsumexp(-1, keepdim=True)
        loss += (lse - logits.gather(-1, target)).sum()
        dlogits = logits.sub_(lse).exp_().scatter_add_(-1, target, torch.full_like(lse, -1.0)).div_(count)
        dx[rows] = dlogits @ weight
        dw.addmm_(dlogits.T, x[rows])
    return {"loss": loss / count, "d_x": dx, "d_weight": dw}


def three_products(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Those of a linear loss: the logits, and with something of their shape the gradients of x and of the weight."""
    logits = x @ weight.T
    return logits @ weight, logits.T @ x


def linear_cross_entropy_case(
    place: Place, peers: set[str], tokens: int, size: int, vocab: int, ignored: float = 0.0
) -> Case:
    def make():
        inputs = {
            "x": place.randn(tokens, size),
            "weight": place.randn(vocab, size, scale=size**-0.5),
            "labels": place.labels(tokens, vocab, ignored=ignored),
        }
        return inputs, ()

    torch.manual_seed(0)
    valid = int((make()[0]["labels"] != IGNORED).sum()) if ignored else tokens

    def ours(t, accum_dtype=torch.float32):
        num_valid = valid if ignored else None
        return (
            kernels.linear_cross_entropy(
                t["x"], t["weight"], t["labels"], num_valid=num_valid, accum_dtype=accum_dtype
            ),
        )

    def liger(t, accum_dtype=None):
        from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction

        # bias, class weight, ignore_index, z-loss, smoothing, reduction, softcap, return_z_loss, accum_dtype
        options = (None, None, IGNORED, 0.0, 0.0, "mean", None, False, accum_dtype)
        return (LigerFusedLinearCrossEntropyFunction.apply(t["x"], t["weight"], t["labels"], *options)[0],)

    return Case(
        "linear_cross_entropy",
        f"T={tokens} H={size} V={vocab}" + (f", {ignored:.0%} ignored" if ignored else ""),
        make,
        leaves=("x", "weight"),
        outputs=("loss",),
        eager=eager_linear_cross_entropy,
        exact=exact_linear_cross_entropy,
        providers=chosen(
            peers,
            Provider("ligermodels", ours, ours=True),
            # dW is rounded to bf16 after each of up to 8 chunks, worth sqrt((8 + 1) / 2) = 2.1 roundings
            Provider(
                "ligermodels, accum_dtype=None",
                functools.partial(ours, accum_dtype=None),
                ours=True,
                slack=2.5,
            ),
            eager=[Provider("eager", eager_linear_cross_entropy)],
            compile=[Provider("torch.compile", compiled(eager_linear_cross_entropy))],
            liger=[
                Provider("Liger", liger),
                Provider("Liger, accum_dtype=fp32", functools.partial(liger, accum_dtype=torch.float32)),
            ],
            cce=[Provider("CCE, exact", _cce)],
        ),
        full_work=6.0 * valid * size * vocab,
        unit="operations",
        products=("three GEMMs", lambda t: three_products(t["x"][:valid], t["weight"])),
        # A token's loss errs by about one rounding of a bf16 logit of size 1, independently of the others'.
        loss_floor=4 * torch.finfo(place.dtype).eps / valid**0.5,
    )


def eager_linear_logprobs(t: Tensors) -> tuple[Tensor, ...]:
    logits = t["x"] @ t["weight"].T
    return (logits.log_softmax(-1, dtype=compute(logits)).gather(-1, t["labels"][:, None])[:, 0],)


def linear_logprobs_case(place: Place, peers: set[str], tokens: int, size: int, vocab: int) -> Case:
    def make():
        inputs = {
            "x": place.randn(tokens, size),
            "weight": place.randn(vocab, size, scale=size**-0.5),
            "labels": place.labels(tokens, vocab),
        }
        return inputs, (torch.randn(tokens, device=place.device) / tokens,)

    def liger(t):
        from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction

        # bias, class weight, ignore_index, z-loss, smoothing, reduction
        options = (None, None, IGNORED, 0.0, 0.0, "none")
        return (-LigerFusedLinearCrossEntropyFunction.apply(t["x"], t["weight"], t["labels"], *options)[0],)

    def liger_scaled(t):
        """What Liger has for this, in PyTorch: its Hopper kernel needs a package that Liger does not bring along."""
        from liger_kernel.ops.fused_linear_scaled_cross_entropy import _FusedLinearPPOFallbackFunction

        nll = _FusedLinearPPOFallbackFunction.apply(t["x"], t["weight"], t["labels"], 1.0, IGNORED, False)
        return (-nll,)

    return Case(
        "linear_logprobs",
        f"T={tokens} H={size} V={vocab}",
        make,
        leaves=("x", "weight"),
        outputs=("logprobs",),
        eager=eager_linear_logprobs,
        providers=chosen(
            peers,
            Provider("ligermodels", lambda t: (kernels.linear_logprobs(t["x"], t["weight"], t["labels"]),), ours=True),
            eager=[Provider("eager", eager_linear_logprobs)],
            compile=[Provider("torch.compile", compiled(eager_linear_logprobs))],
            liger=[Provider("Liger, reduction none", liger), Provider("Liger, scaled CE", liger_scaled)],
        ),
        full_work=6.0 * tokens * size * vocab,
        unit="operations",
        products=("three GEMMs", lambda t: three_products(t["x"], t["weight"])),
    )


def _cce(t: Tensors) -> tuple[Tensor, ...]:
    """Without the gradient filter, whose saving comes from leaving small gradients out."""
    import cut_cross_entropy

    exact = {"filter_eps": None}
    if hasattr(cut_cross_entropy.LinearCrossEntropyImpl, "CCE_EXACT"):
        exact = {"impl": "cce_exact"}
    return (cut_cross_entropy.linear_cross_entropy(t["x"], t["weight"], t["labels"], **exact),)
