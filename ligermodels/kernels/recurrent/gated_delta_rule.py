"""The gated delta rule: linear attention whose state, a matrix per value head, decays and is corrected at each token.

    S <- exp(g_t) S;   n_t = beta_t (v_t - S^T k_t);   S <- S + k_t n_t^T;   o_t = S^T q_t          S: [DK, DV]

q and k are l2-normalised over DK, and q is then scaled by DK ** -0.5.

Source: Yang et al. 2024, "Gated Delta Networks", https://arxiv.org/abs/2412.06464; normalisation and scale as
Qwen3-Next in https://github.com/huggingface/transformers.
"""

import itertools
import operator

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels._check import check_bounds, check_operand, describe
from ligermodels.kernels._launch import launch
from ligermodels.kernels._triton import (
    accumulator,
    cdiv,
    cuda_capability,
    is_datacenter,
    last_dim_contiguous,
    next_power_of_2,
    num_sms,
    once_differentiable,
    use_triton,
)
from ligermodels.kernels.recurrent._delta import (
    key_gradients_kernel,
    output_kernel,
    prepare_kernel,
    query_gradients_kernel,
    reverse_scan_kernel,
    scan_kernel,
    value_gradients_kernel,
)

EPS = 1e-6
"""Added to the sum of squares of a row of q or k."""
CHUNK = 64
MAX_SIZE = 256
"""Maximum DK and DV of the kernels: a scan holds the state in registers."""
MAX_FP32_KEYS = 128
"""Maximum DK in fp32: tiles of 64 tokens by DK lie in shared memory."""


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


def _on_nvidia(q: Tensor) -> bool:
    return q.device.type == "cuda" and torch.version.cuda is not None


def _options(kernel: str, q: Tensor, heads: tuple[int, ...], scans: int = 0) -> tuple[int, dict[str, int]]:
    """(value dims of a program, launch options) of a kernel, for what `_heads` returned. Those of the key kernel have
    BLOCK_S, the value dims of the states' gradients that it reads at once.

    For 128 key and 128 value dims in half precision, the fastest measured on an H200. Smaller heads take the same
    tiles, without pipelined loads, see `_heads`. Otherwise what fits its shared memory.
    scans: sequences times value heads. A scan takes larger tiles, thus fewer programs, only where these still keep
    three quarters of the multiprocessors busy: four rows of 32 heads do on an H200, one long document does not. The
    reverse scan takes smaller tiles where all of its programs then run at once, two on each multiprocessor: of one row
    of 32 heads they do, of two rows they do not.
    """
    _, _, keys, values, block_k, block_v = heads
    itemsize = q.element_size()
    if itemsize > 2 or block_k > 128:
        block = min(block_v, 16 if itemsize > 2 and block_k > 128 else 32)
        options = dict(num_warps=8 if kernel in ("query", "key") or block_k > 128 else 4, num_stages=1)
        if kernel == "key":
            options["BLOCK_S"] = block
            if itemsize > 2 and cuda_capability(q.device.index) // 10 == 10:
                options["num_warps"] = 16  # with fewer, Triton 3.9 takes 576 of 512 columns of tensor memory
        return block, options
    multiprocessors = num_sms(q.device.index)
    is_measured = block_v == 128 and is_datacenter(q.device.index)
    many_scans = is_measured and 4 * scans >= 3 * multiprocessors
    few_scans = is_measured and scans * (block_v // 16) <= 2 * multiprocessors
    block, warps, stages = {
        "prepare": (64, 4, 1), "scan": (64, 4, 2) if many_scans else (32, 4, 3), "output": (128, 4, 1),
        "reverse": (128, 8, 2) if many_scans else (16, 4, 3) if few_scans else (32, 4, 2),
        "value": (128, 4, 1), "query": (64, 4, 3), "key": (64, 4, 1),
    }[kernel]  # fmt: skip
    options = dict(num_warps=warps, num_stages=stages if keys == values == 128 else 1)
    if kernel == "prepare" and block_v == 128 and _on_nvidia(q):
        options["maxnreg"] = 168  # so that three programs share a multiprocessor
    if kernel == "key":
        options["BLOCK_S"] = min(128, block_v)
    return min(block, block_v), options


def _precision(q: Tensor) -> tuple[str, str | None]:
    """Of products, tl.dot's input_precision: for fp32 on NVIDIA tf32x3, which is nearly as exact as fp32, and faster.
    And that of _exact_dot, on NVIDIA for half precision None: sums of two bf16."""
    if not _on_nvidia(q):
        return "ieee", "ieee"
    return ("tf32x3", "tf32x3") if q.dtype == torch.float32 else ("ieee", None)


def _key_precision(q: Tensor) -> str:
    """`_precision` of products in the key kernel. tf32x3 takes 160 KiB of shared memory there, which A100 and what
    `is_datacenter` names have; ieee takes 92, is slow, and was not timed."""
    precision, _ = _precision(q)
    fits = precision != "tf32x3" or is_datacenter(q.device.index) or cuda_capability(q.device.index) == 80
    return precision if fits else "ieee"


def _heads(q: Tensor, v: Tensor) -> tuple[int, ...]:
    """HK, HV, DK, DV and the padded DK and DV: ints, because they are constants of the kernels.

    Padded to at least 128: of smaller tiles, Triton 3.6 compiles kernels for an H200 that read outside of shared memory
    (compute-sanitizer: query_gradients_kernel, 16 dims in fp32) or give wrong results (half precision). Interpreted,
    fp32 takes the smaller tiles, which are faster there.
    """
    least = 16 if q.device.type == "cpu" and q.dtype == torch.float32 else 128
    key_heads, keys, value_heads, values = (operator.index(n) for n in (*q.shape[2:], *v.shape[2:]))
    return key_heads, value_heads, keys, values, *(max(least, next_power_of_2(n)) for n in (keys, values))


def _slots(v: Tensor, cu_seqlens: Tensor | None) -> tuple[int, int]:
    """(rows or documents, slots of chunks), see _delta.py."""
    rows, length = v.shape[:2]
    if cu_seqlens is None:
        return rows, rows * cdiv(length, CHUNK)
    documents = cu_seqlens.shape[0] - 1
    return documents, length // CHUNK + documents


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:3]]


def _chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, cu: Tensor | None, do: Tensor | None
) -> tuple[Tensor, ...]:
    """What chunks have in scratch memory, and the last state; with do, also what the backward reads.

    (N^T, states before chunks, G, factors of q's and of k's rows, W, X, the chunk's own part of dN^T, last state)
    All of it is written, also the padded dims: what reads it multiplies them by zero.
    """
    heads = key_heads, value_heads, _, _, block_k, block_v = _heads(q, v)
    sequences, slots = _slots(v, cu)
    n = q.new_empty(slots, value_heads, block_v, CHUNK)
    w = q.new_empty(slots, value_heads, CHUNK, block_k)
    x, dn = (q, q) if do is None else (q.new_empty(slots, value_heads, CHUNK, CHUNK), torch.empty_like(n))
    states = q.new_empty(slots, value_heads, block_v, block_k)
    G = torch.empty(slots, value_heads, CHUNK, dtype=torch.float32, device=q.device)
    q_scale, k_scale = (torch.empty(slots, key_heads, CHUNK, dtype=torch.float32, device=q.device) for _ in range(2))
    last = _last_state(q, v, cu)
    precision, exact = _precision(q)
    _, options = _options("prepare", q, heads)
    launch(
        prepare_kernel, (slots * value_heads,),
        n, w, x, dn, G, q_scale, k_scale, q, k, v, g, beta, q if do is None else do, k if cu is None else cu,
        v.shape[1], sequences, *_strides(q, k, v),
        heads[2] ** -0.5, EPS, cu is not None, do is not None, *heads, CHUNK, precision, exact, **options,
    )  # fmt: skip
    block, options = _options("scan", q, heads, sequences * value_heads)
    launch(
        scan_kernel, (sequences * value_heads * (block_v // block),),
        n, states, last, w, G, k_scale, k, k if state is None else state, k if cu is None else cu,
        v.shape[1], *_strides(k), state is not None, cu is not None, *heads, block, CHUNK, precision, **options,
    )  # fmt: skip
    return n, states, G, q_scale, k_scale, w, x, dn, last


def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, cu: Tensor | None
) -> tuple[Tensor, Tensor]:
    heads = _heads(q, v)
    sequences, slots = _slots(v, cu)
    n, states, G, q_scale, k_scale, _, _, _, last = _chunks(q, k, v, g, beta, state, cu, None)
    o = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    block, options = _options("output", q, heads)
    launch(
        output_kernel, (slots * heads[1] * cdiv(heads[3], block),),
        o, q, k, n, states, G, q_scale, k_scale, k if cu is None else cu, v.shape[1], sequences,
        *_strides(q, k), cu is not None, *heads, block, CHUNK, _precision(q)[0], **options,
    )  # fmt: skip
    return o, last


def _backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, cu: Tensor | None,
    do: Tensor | None, d_last: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k, v, g, beta and the first state."""
    heads, precision = _heads(q, v), _precision(q)[0]
    sequences, slots = _slots(v, cu)
    do = torch.zeros(v.shape, dtype=q.dtype, device=q.device) if do is None else do.contiguous()
    d_last = None if d_last is None else d_last.contiguous()
    n, states, G, q_scale, k_scale, w, x, dn, last = _chunks(q, k, v, g, beta, state, cu, do)
    d_states, d_first = torch.empty_like(states), torch.empty_like(last)
    block, options = _options("reverse", q, heads, sequences * heads[1])
    cu_ = k if cu is None else cu
    launch(
        reverse_scan_kernel, (sequences * heads[1] * (heads[5] // block),),
        dn, d_states, d_first, w, G, q_scale, k_scale, q, k, do, G if d_last is None else d_last, cu_,
        v.shape[1], *_strides(q, k), d_last is not None, cu is not None, *heads, block, CHUNK, precision, **options,
    )  # fmt: skip
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    dg, d_beta = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (g, beta))
    dr, m, f = torch.empty_like(n), torch.empty_like(x), torch.empty_like(x)
    dG, d_beta_part = torch.empty_like(G), torch.empty_like(G)
    block, options = _options("value", q, heads)
    launch(
        value_gradients_kernel, (slots * heads[1],),
        dv, dr, m, f, dG, d_beta_part, q, k, v, beta, do, x, n, dn, G, q_scale, k_scale, cu_,
        v.shape[1], sequences, *_strides(q, k, v), cu is not None, *heads, block, CHUNK, precision, **options,
    )  # fmt: skip
    block, options = _options("query", q, heads)
    launch(
        query_gradients_kernel, (slots * heads[0],),
        dq, dG, q, k, do, m, states, G, q_scale, k_scale, cu_, v.shape[1], sequences, *_strides(q, k),
        heads[2] ** -0.5, cu is not None, *heads, block, CHUNK, precision, **options,
    )  # fmt: skip
    block, options = _options("key", q, heads)
    launch(
        key_gradients_kernel, (slots * heads[0],),
        dk, dg, d_beta, q, k, beta, dr, m, f, dG, d_beta_part, n, states, d_states, G, q_scale, k_scale, cu_,
        v.shape[1], sequences, *_strides(q, k), cu is not None, *heads, block, CHUNK, _key_precision(q), **options,
    )  # fmt: skip
    return dq, dk, dv, dg, d_beta, d_first


class _GatedDeltaRule(torch.autograd.Function):
    """Saves the inputs alone: the backward computes the chunks again, in about a third of its time. They take 32 kB a
    token of 32 heads of 128 dims."""

    @staticmethod
    def forward(ctx, *inputs):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        return _forward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, do, d_last):
        return _gradients(ctx, do, d_last, _backward)


def _gradients(ctx, do, d_last, backward):
    *grads, d_first = backward(*ctx.saved_tensors, do, d_last)
    return *grads, d_first if ctx.needs_input_grad[5] else None, None


# For torch.compile, ops that it does not look into. In kernels, Inductor takes an argument for written to if a store
# depends on what a function loads from it, as `chunk` does from cu_seqlens or from what stands in its place. Gradients
# of q, k and v that are views of one tensor were wrong with PyTorch 2.11.
_compiled_forward = torch.library.custom_op("ligermodels::gated_delta_rule", _forward, mutates_args=())
_compiled_backward = torch.library.custom_op("ligermodels::gated_delta_rule_backward", _backward, mutates_args=())


def _last_state(q: Tensor, v: Tensor, cu: Tensor | None) -> Tensor:
    sequences = v.shape[0] if cu is None else cu.shape[0] - 1
    return torch.empty(sequences, v.shape[2], q.shape[3], v.shape[3], dtype=torch.float32, device=q.device)


@_compiled_forward.register_fake
def _(q, k, v, g, beta, state, cu):
    return torch.empty(v.shape, dtype=q.dtype, device=q.device), _last_state(q, v, cu)


@_compiled_backward.register_fake
def _(q, k, v, g, beta, state, cu, do, d_last):
    return *(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v, g, beta)), _last_state(q, v, cu)


_compiled_forward.register_autograd(
    lambda ctx, do, d_last: _gradients(ctx, do, d_last, _compiled_backward),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def _check(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    """Raises InputError unless q, k are [B, T, HK, DK], v [B, T, HV, DV] and g, beta [B, T, HV]."""
    where = "gated_delta_rule"
    if (
        q.dim() != 4 or v.dim() != 4 or q.shape[:2] != v.shape[:2] or not q.is_floating_point()
        or q.shape[2] == 0 or v.shape[2] % q.shape[2]
    ):  # fmt: skip
        raise InputError(
            f"{where}: q has {describe(q)}, v has {describe(v)}; expected floating point [B, T, HK, DK] and "
            "[B, T, HV, DV], HV a multiple of HK."
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
    _check(q, k, v, g, beta)
    rows = v.shape[0]
    if cu_seqlens is not None:
        check_bounds("gated_delta_rule", cu_seqlens, v)
        rows = cu_seqlens.shape[0] - 1
    if state is not None:
        check_operand("gated_delta_rule", "state", state, (rows, v.shape[2], q.shape[3], v.shape[3]), "v", v)
    if not use_triton(q) or q.dtype == torch.float64 or v.numel() == 0:
        return gated_delta_rule_reference(q, k, v, g, beta, state, cu_seqlens=cu_seqlens)
    if max(q.shape[3], v.shape[3]) > MAX_SIZE:
        raise InputError(
            f"gated_delta_rule: q has {describe(q)}, v {describe(v)}; the kernels take DK and DV up to {MAX_SIZE}."
        )
    if q.dtype == torch.float32 and q.shape[3] > MAX_FP32_KEYS and q.device.type != "cpu":
        raise InputError(
            f"gated_delta_rule: q has {describe(q)}; in fp32 the kernels take DK up to {MAX_FP32_KEYS}. Use bf16."
        )
    q, k, v = (last_dim_contiguous(x) for x in (q, k, v))
    state = None if state is None else state.float().contiguous()
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    run = _compiled_forward if torch.compiler.is_compiling() else _GatedDeltaRule.apply
    return run(q, k, v, g.float().contiguous(), beta.contiguous(), state, cu_seqlens)
