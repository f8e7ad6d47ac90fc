"""Preference losses (DPO, KTO, ORPO, CPO, SimPO) as functions of the log probabilities of sequences.

    logprobs = model(ids, labels=labels, return_logprobs=True).logprobs  # [2B, S]; the logits are never whole
    chosen, rejected = sum_per_sequence(logprobs).chunk(2)
    loss = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=0.1).mean()

Log probabilities are summed over the tokens of a sequence, but averaged for ORPO, SimPO and the loss types in
`PER_TOKEN`. Losses are in fp32, of fp64 in fp64, one per pair or sequence. Nothing here synchronises with the device.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError

DPO_LOSS_TYPES = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard",
                  "aot", "aot_unpaired", "apo_zero", "apo_down", "discopop")  # fmt: skip
CPO_LOSS_TYPES = ("sigmoid", "hinge", "ipo", "simpo")
KTO_LOSS_TYPES = ("kto", "apo_zero_unpaired")
PER_TOKEN = ("sigmoid_norm", "ipo", "simpo")
"""Loss types of DPO and CPO that take means over the tokens of a sequence."""
_SMOOTHED = ("sigmoid", "exo_pair", "robust", "aot", "aot_unpaired", "simpo")


def sum_per_sequence(values: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """The sum of each sequence's values, [N]: of values [N, S], or of packed values [1, T] or [T]. bool counts as 0, 1.

    cu_seqlens [N + 1]: the bounds of packed sequences. Values outside of them are dropped.
    """
    if cu_seqlens is None:
        return values.sum(-1)
    bounds = cu_seqlens.to(values.device, non_blocking=True)[:, None]
    position = torch.arange(values.numel(), device=values.device)
    # A sum over all tokens for each sequence: no atomics, and the host need not know the lengths.
    return torch.where((position >= bounds[:-1]) & (position < bounds[1:]), values.reshape(-1), 0).sum(-1)


def dpo_loss(
    chosen_logps: Tensor, rejected_logps: Tensor, ref_chosen_logps: Tensor | None = None,
    ref_rejected_logps: Tensor | None = None, *, beta: float = 0.1, loss_type: str = "sigmoid",
    label_smoothing: float = 0.0, discopop_tau: float = 0.05,
) -> Tensor:  # fmt: skip
    """Losses [B] of pairs from log probabilities [B]. Without a reference, its log probabilities count as 0.

    With a and b the log ratios of policy to reference of chosen and rejected, d = beta (a - b), s = sigmoid and
    e = label_smoothing, which must be 0 for types whose formula has no e:

    sigmoid       -(1 - e) log s(d) - e log s(-d)       arXiv:2305.18290; TRL 1.16 and Liger ignore e
    sigmoid_norm  -log s(d), a and b per token          arXiv:2411.15124, equation 6
    hinge         max(0, 1 - d)                         arXiv:2309.06657
    ipo           (a - b - 1 / (2 beta))^2, per token   arXiv:2310.12036, equation 17, per token as TRL; Liger has none
    exo_pair      s(d) (log s(d) - log(1 - e)) + s(-d) (log s(-d) - log e), e > 0          arXiv:2402.00856, equation 16
    nca_pair      -log s(beta a) - log s(-beta a) / 2 - log s(-beta b) / 2                 arXiv:2402.05369
    robust        (-(1 - e) log s(d) + e log s(-d)) / (1 - 2 e)                            arXiv:2403.00409
    bco_pair      -log s(beta a) - log s(-beta b)       arXiv:2404.04656, as TRL and Liger without its moving shift
    sppo_hard     (a - 1 / (2 beta))^2 + (b + 1 / (2 beta))^2                              arXiv:2405.00675, P = 1 or 0
    aot           as sigmoid; d = beta (sorted log ratio chosen to rejected of policy - that of reference)
    aot_unpaired  as sigmoid; d = beta (sorted a - sorted b); losses in sorted order; arXiv:2406.05882
    apo_zero      s(-beta a) + s(beta b)                arXiv:2408.06266, equation 7, plus 1
    apo_down      s(beta a) + s(-d)                     arXiv:2408.06266, equation 8, plus 1
    discopop      s(-d / tau) (-log s(d)) + s(d / tau) exp(-d), tau = discopop_tau         arXiv:2406.08414, equation 5

    TRL and Liger compute exp(-d) s(d / tau), which is inf * 0 for d below -88, and 1 - s(z), which cancels; nothing
    overflows or cancels here. Raises InputError for other types and for numbers out of range.
    """
    check_dpo(loss_type, beta, label_smoothing, discopop_tau)
    chosen, rejected = _upcast(chosen_logps), _upcast(rejected_logps)
    ref_chosen = torch.zeros_like(chosen) if ref_chosen_logps is None else _upcast(ref_chosen_logps)
    ref_rejected = torch.zeros_like(rejected) if ref_rejected_logps is None else _upcast(ref_rejected_logps)
    a, b = chosen - ref_chosen, rejected - ref_rejected
    d, e = beta * (a - b), label_smoothing
    match loss_type:
        case "sigmoid" | "sigmoid_norm":
            return _smoothed(d, e)
        case "hinge":
            return torch.relu(1 - d)
        case "ipo":
            return (a - b - 0.5 / beta).square()
        case "exo_pair":
            p, q = F.logsigmoid(d), F.logsigmoid(-d)
            return torch.sigmoid(d) * (p - math.log1p(-e)) + torch.sigmoid(-d) * (q - math.log(e))
        case "nca_pair":
            return -F.logsigmoid(beta * a) - 0.5 * (F.logsigmoid(-beta * a) + F.logsigmoid(-beta * b))
        case "robust":
            return (e * F.logsigmoid(-d) - (1 - e) * F.logsigmoid(d)) / (1 - 2 * e)
        case "bco_pair":
            return -F.logsigmoid(beta * a) - F.logsigmoid(-beta * b)
        case "sppo_hard":
            return (a - 0.5 / beta).square() + (b + 0.5 / beta).square()
        case "aot":
            return _smoothed(beta * (_sorted(chosen - rejected) - _sorted(ref_chosen - ref_rejected)), e)
        case "aot_unpaired":
            return _smoothed(beta * (_sorted(a) - _sorted(b)), e)
        case "apo_zero":
            return torch.sigmoid(-beta * a) + torch.sigmoid(beta * b)
        case "apo_down":
            return torch.sigmoid(beta * a) + torch.sigmoid(-d)
        case _:  # discopop
            t = d / discopop_tau
            return torch.exp(F.logsigmoid(t) - d) - torch.sigmoid(-t) * F.logsigmoid(d)


def cpo_loss(
    chosen_logps: Tensor, rejected_logps: Tensor, *, beta: float = 0.1, loss_type: str = "sigmoid",
    label_smoothing: float = 0.0, gamma: float = 0.5,
) -> Tensor:  # fmt: skip
    """Losses [B] of pairs from log probabilities [B]. CPO adds the cross entropy of the chosen tokens, SimPO does not.

    With u = chosen - rejected, s = sigmoid and e = label_smoothing, which must be 0 for types whose formula has no e:

    sigmoid  -(1 - e) log s(beta u) - e log s(-beta u)    arXiv:2401.08417, equation 3
    hinge    max(0, 1 - beta u)                           arXiv:2309.06657, without a reference
    ipo      (u - 1 / (2 beta))^2, per token              arXiv:2310.12036
    simpo    as sigmoid with beta u - gamma, per token    arXiv:2405.14734, which trains with beta from 2 to 10

    For hinge and ipo, TRL ignores a label smoothing, with a warning. Raises InputError as `dpo_loss` does.
    """
    check_cpo(loss_type, beta, label_smoothing)
    u = _upcast(chosen_logps) - _upcast(rejected_logps)
    if loss_type == "hinge":
        return torch.relu(1 - beta * u)
    if loss_type == "ipo":
        return (u - 0.5 / beta).square()
    return _smoothed(beta * u - gamma if loss_type == "simpo" else beta * u, label_smoothing)


def orpo_loss(chosen_logps: Tensor, rejected_logps: Tensor, *, beta: float = 0.1) -> Tensor:
    """-beta log sigmoid(log_odds(chosen) - log_odds(rejected)), losses [B] of pairs from means per token [B].

    ORPO adds the cross entropy of the chosen tokens. arXiv:2403.07691, equations 6 and 7, where beta is lambda.
    Liger computes log1p(-exp(logps)), which is -inf or noise where logps nears 0; TRL -inf at 0; here see `log_odds`.
    """
    _check_positive(beta=beta)
    return -beta * F.logsigmoid(log_odds(chosen_logps) - log_odds(rejected_logps))


def log_odds(logps: Tensor) -> Tensor:
    """log(p / (1 - p)) of p = exp(logps), accurate for p near 0 and near 1.

    1 - p is -expm1(logps), which loses no digits where p nears 1. Where p nears 0, log(1 - p) is about -p, and the
    digits that log1p would add to it vanish beside logps.
    From logps = -eps (2^-23 in fp32) on, up to 0 and what rounding puts above it, log(1 - p) stays at log(eps), -15.9
    in fp32, without gradient. So value and gradient are finite for every logps but -inf, which gives -inf.
    """
    x = _upcast(logps)
    return x - torch.log(-torch.expm1(x.clamp(max=-torch.finfo(x.dtype).eps)))


def kto_loss(
    logps: Tensor, desirable: Tensor, ref_logps: Tensor | None = None, *, kl: Tensor | None = None, beta: float = 0.1,
    loss_type: str = "kto", desirable_weight: float = 1.0, undesirable_weight: float = 1.0,
) -> Tensor:  # fmt: skip
    """Losses [N] of sequences from log probabilities [N]. desirable [N]: bool.

    With a the log ratio of policy to reference and s = sigmoid, times the weight of the sequence's kind:

    kto                desirable: s(-beta (a - kl)), undesirable: s(beta (a - kl))     arXiv:2402.01306, equation 7
    apo_zero_unpaired  the same with kl = 0                                            arXiv:2408.06266, equation 7

    kl: the reference point [] or [N] from `kto_kl`, used without gradient; None is 0. Liger has no weights.
    """
    _check_loss_type(loss_type, KTO_LOSS_TYPES)
    _check_positive(beta=beta)
    if desirable.dtype != torch.bool or desirable.shape != logps.shape:
        raise InputError(
            f"desirable is {desirable.dtype} {list(desirable.shape)}; it must be torch.bool {list(logps.shape)}: for "
            "each sequence, whether it is desirable"
        )
    a = _upcast(logps)
    a = a if ref_logps is None else a - _upcast(ref_logps)
    a = a if kl is None or loss_type == "apo_zero_unpaired" else a - _upcast(kl.detach())
    losses = torch.sigmoid(beta * torch.where(desirable, -a, a))
    return torch.where(desirable, desirable_weight * losses, undesirable_weight * losses)


def kto_kl(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """max(0, mean log ratio) of completions [M] under the prompts of others: an estimate of KL(policy, reference).

    Without gradient, as in the paper. With several processes, average before the max.
    """
    return (_upcast(logps.detach()) - _upcast(ref_logps.detach())).mean().clamp(min=0)


def check_dpo(loss_type: str, beta: float, label_smoothing: float, discopop_tau: float = 0.05) -> None:
    """Raises InputError for options that `dpo_loss` does not take."""
    hint = "; the aot_pair of old releases of TRL is aot_unpaired" if loss_type == "aot_pair" else ""
    _check_loss_type(loss_type, DPO_LOSS_TYPES, label_smoothing, hint)
    _check_positive(beta=beta, discopop_tau=discopop_tau)
    if loss_type == "exo_pair":
        _check_positive(label_smoothing=label_smoothing)  # its divergence from a certain preference is infinite


def check_cpo(loss_type: str, beta: float, label_smoothing: float) -> None:
    """Raises InputError for options that `cpo_loss` does not take."""
    _check_loss_type(loss_type, CPO_LOSS_TYPES, label_smoothing)
    _check_positive(beta=beta)


def _check_loss_type(loss_type: str, supported: tuple[str, ...], label_smoothing: float = 0.0, hint: str = "") -> None:
    if loss_type not in supported:
        raise InputError(f"loss_type={loss_type!r} is not supported; supported: {', '.join(supported)}{hint}")
    if not 0 <= label_smoothing < 0.5:
        raise InputError(
            f"label_smoothing={label_smoothing} must be in [0, 0.5): it is the share of pairs whose order is wrong"
        )
    if label_smoothing and loss_type not in _SMOOTHED:
        raise InputError(
            f"label_smoothing={label_smoothing} is not defined for loss_type={loss_type!r}; leave it 0, or use one of "
            f"{', '.join(name for name in supported if name in _SMOOTHED)}"
        )


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise InputError(f"{name}={value} must be greater than 0")


def _smoothed(logits: Tensor, label_smoothing: float) -> Tensor:
    """-log sigmoid(logits), with the sign of the logits flipped for a share of label_smoothing."""
    loss = -F.logsigmoid(logits)
    return (1 - label_smoothing) * loss - label_smoothing * F.logsigmoid(-logits) if label_smoothing else loss


def _sorted(x: Tensor) -> Tensor:
    return x.sort(stable=True).values


def _upcast(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
