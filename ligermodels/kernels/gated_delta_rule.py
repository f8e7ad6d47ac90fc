"""The gated delta rule: linear attention whose state, a matrix per value head, decays and is corrected at each token.

    S <- exp(g_t) S;   n_t = beta_t (v_t - S^T k_t);   S <- S + k_t n_t^T;   o_t = S^T q_t          S: [DK, DV]

q and k are l2-normalised over DK, and q is then scaled by DK ** -0.5.

Source: Yang et al. 2024, "Gated Delta Networks", https://arxiv.org/abs/2412.06464; normalisation and scale as
Qwen3-Next in https://github.com/huggingface/transformers.
"""

import itertools

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels._check import check_operand, describe
from ligermodels.kernels._triton import accumulator

EPS = 1e-6
"""Added to the sum of squares of a row of q or k."""


def gated_delta_rule_reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None, *,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The specification of `gated_delta_rule`: the recurrence, in fp32 (fp64 for fp64), one token after the other."""
    dtype, (rows, length, num_value_heads, value_size) = accumulator(q.dtype), v.shape
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        documents = []
        for i, (begin, end) in enumerate(itertools.pairwise(bounds)):
            before = None if state is None else state[i : i + 1]
            q_, k_, v_, g_, beta_ = (x[:, begin:end] for x in (q, k, v, g, beta))
            documents.append(gated_delta_rule_reference(q_, k_, v_, g_, beta_, before))
        return torch.cat([o for o, _ in documents], 1), torch.cat([s for _, s in documents])
    out_dtype, scale, group = q.dtype, q.shape[3] ** -0.5, num_value_heads // k.shape[2]
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS) for x in (q.to(dtype), k.to(dtype)))
    q, k = (x.repeat_interleave(group, 2) for x in (q * scale, k))
    v, decay, beta = v.to(dtype), g.to(dtype).exp(), beta.to(dtype)
    if state is None:
        state = v.new_zeros(rows, num_value_heads, k.shape[3], value_size)
    state = state.to(dtype)
    out = []
    for t in range(length):
        state = state * decay[:, t, :, None, None]
        new = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], new)
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return (torch.stack(out, 1) if out else v).to(out_dtype), state


def gated_delta_step_reference(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    q, k, v, g, beta = (x[:, None] for x in (q, k, v, g, beta))
    out, after = gated_delta_rule_reference(q, k, v, g, beta, state)
    state.copy_(after)
    return out[:, 0]


def _check(where: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lead: int) -> None:
    """Raises InputError unless q, k are [*lead, HK, DK], v [*lead, HV, DV] and g, beta [*lead, HV]."""
    if (
        q.dim() != lead + 2 or v.dim() != lead + 2 or q.shape[:lead] != v.shape[:lead] or not q.is_floating_point()
        or q.shape[lead] == 0 or v.shape[lead] % q.shape[lead]
    ):  # fmt: skip
        tokens = ", ".join("BT"[:lead])
        raise InputError(
            f"{where}: q has {describe(q)}, v has {describe(v)}; expected floating point [{tokens}, HK, DK] and "
            f"[{tokens}, HV, DV], HV a multiple of HK."
        )
    check_operand(where, "k", k, q.shape, "q", q)
    check_operand(where, "v", v, v.shape, "q", q)
    if not q.dtype == k.dtype == v.dtype:
        raise InputError(f"{where}: q is {q.dtype}, k {k.dtype}, v {v.dtype}; they must be one dtype.")
    check_operand(where, "g", g, v.shape[:-1], "v", v)
    check_operand(where, "beta", beta, v.shape[:-1], "v", v)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None, *,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, state after the last token) of the recurrence above.

    q, k: [B, T, HK, DK], not yet normalised; v: [B, T, HV, DV] of their dtype; value head i reads key head
    i // (HV / HK). g: [B, T, HV], the log of the decay, <= 0, in fp32. beta: [B, T, HV], the write strength.
    state: fp32 [B, HV, DK, DV] before the first token; None: zeros. It is not written over.
    cu_seqlens: int32 [N + 1] on their device, from 0 to T: the state restarts at each of N packed documents. B is then
    1, and both states are [N, HV, DK, DV].
    Returns out [B, T, HV, DV] of q's dtype, and the state in fp32 (fp64 for fp64).
    Raises InputError for shapes, dtypes or devices that do not fit.
    """
    _check("gated_delta_rule", q, k, v, g, beta, 2)
    rows = v.shape[0]
    if cu_seqlens is not None:
        if cu_seqlens.dim() != 1 or cu_seqlens.dtype != torch.int32 or cu_seqlens.device != q.device or rows != 1:
            raise InputError(
                f"gated_delta_rule: cu_seqlens has {describe(cu_seqlens)} for {rows} rows; expected torch.int32 "
                f"[documents + 1] on {q.device}, and documents end to end in one row."
            )
        rows = cu_seqlens.shape[0] - 1
    if state is not None:
        check_operand("gated_delta_rule", "state", state, (rows, v.shape[2], q.shape[3], v.shape[3]), "v", v)
    return gated_delta_rule_reference(q, k, v, g, beta, state, cu_seqlens=cu_seqlens)


def gated_delta_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """One token of each row: out [B, HV, DV] of q's dtype; overwrites `state`, and has no gradient.

    q, k: [B, HK, DK]; v: [B, HV, DV]; g, beta: [B, HV]; state: fp32 [B, HV, DK, DV]; see `gated_delta_rule`.
    Raises InputError for shapes, dtypes or devices that do not fit.
    """
    _check("gated_delta_step", q, k, v, g, beta, 1)
    check_operand("gated_delta_step", "state", state, (*v.shape[:2], q.shape[2], v.shape[2]), "v", v)
    return gated_delta_step_reference(q, k, v, g, beta, state)
