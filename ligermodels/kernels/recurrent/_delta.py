"""The Triton kernels of `gated_delta_rule`, over chunks of C tokens of a document.

With G the cumulative sum of g in a chunk, D_ij = exp(G_i - G_j) for i >= j and else 0, lam = exp(G),
rho = exp(G_last - G), K and Q normalised, and S the state before the chunk:

    A = strictly lower part of diag(beta) (K K^T * D);   X = (I + A)^-1
    U = X diag(beta) V;   W = X diag(beta lam) K;   N = U - W S              N: the values that are written
    O = diag(lam) Q S + (Q K^T * D) N;   S <- exp(G_last) S + (diag(rho) K)^T N

- A chunk has a slot in the scratch memory: chunk c of document n is slot cu[n] // C + n + c. So no prefix sum is
  needed, T // C + N slots are enough, and no chunk crosses a bound.
- Q and K are never normalised in memory: the factors of their rows multiply the fp32 results of matmuls or an operand.
- A scan has the transposed state, [value dims, key dims], in registers: it and the new values are left operands of
  matmuls. The scratch memory is transposed in the same way.
- Grids have one dim, since others end at 65,535. Heads of a chunk or document are neighbours, and so are the blocks of
  value dims of a head.
- No matmul reads the transpose of a computed tile: on Hopper some versions of Triton compile that wrongly. What the
  backward needs transposed goes through memory.

Backward, with dS the gradient of the state after the chunk and E, F = strictly lower parts:

    dN = (Q K^T * D)^T dO + diag(rho) K dS;   dR = X^T dN;   M = dO N^T * D;   E = -dR N^T * D;   F = diag(beta) E
    dQ = diag(lam) dO S^T + M K;   dV = diag(beta) dR
    dK = M^T Q + diag(rho) N dS^T - diag(beta lam) dR S^T + (F + F^T) K
    dS <- exp(G_last) dS + (diag(lam) Q)^T dO - W^T dN
"""

from ligermodels.kernels._triton import tl, triton


@triton.jit
def chunk(slot, cu_ptr, T, N, PACKED: tl.constexpr, C: tl.constexpr):
    """(row of the batch; row or document, and its first token; first token of the chunk; one past the last token of the
    row or document). The slot is empty where the chunk would begin past that end."""
    if PACKED:
        n = -1
        for first in range(0, N, 64):
            documents = first + tl.arange(0, 64)
            slots = tl.load(cu_ptr + documents, mask=documents < N, other=2**30) // C + documents
            n += tl.sum((slots <= slot).to(tl.int32), 0)
        begin = tl.load(cu_ptr + n)
        return begin * 0, n, begin, begin + (slot - begin // C - n) * C, tl.load(cu_ptr + n + 1)
    else:
        chunks = tl.cdiv(T, C)
        return slot // chunks, slot // chunks, 0, slot % chunks * C, T


@triton.jit
def _sequence(n, cu_ptr, T, PACKED: tl.constexpr, C: tl.constexpr):
    """(row of the batch, first token, one past the last, first slot) of row or document n."""
    if PACKED:
        begin = tl.load(cu_ptr + n)
        return begin * 0, begin, tl.load(cu_ptr + n + 1), begin // C + n
    else:
        return n, 0, T, n * tl.cdiv(T, C)


@triton.jit
def _tokens(ptr, b, first, end, head, of_b, of_t, of_h, rows, dims, D: tl.constexpr):
    """A tile [tokens, dims] of one head of [B, T, H, D]; 0 past the end."""
    ptr += b.to(tl.int64) * of_b + tl.cast(first, tl.int64) * of_t + head.to(tl.int64) * of_h
    at = rows[:, None] * of_t + dims[None, :]
    return tl.load(ptr + at, mask=(rows < end - first)[:, None] & (dims < D)[None, :], other=0.0)


@triton.jit
def _decay(G, STRICT: tl.constexpr, C: tl.constexpr):
    """D; STRICT: with a diagonal of zeros. The exponent is masked, as it may be huge."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    inside = i > j if STRICT else i >= j
    return tl.exp(tl.where(inside, G[:, None] - G[None, :], float("-inf")))


@triton.jit
def _exact_dot(a, b, PRECISION: tl.constexpr):
    """a @ b of fp32 tiles. With PRECISION None, each is the sum of two tiles of bf16: 16 bits, for three matmuls."""
    if PRECISION is None:
        a_high, b_high = a.to(tl.bfloat16), b.to(tl.bfloat16)
        a_low, b_low = (a - a_high).to(tl.bfloat16), (b - b_high).to(tl.bfloat16)
        return tl.dot(a_high, b_high, tl.dot(a_high, b_low, tl.dot(a_low, b_high)))
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _doubled(x, A, SIZE: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr):
    """The inverses of blocks of 2 SIZE on the diagonals of I + A, from those of blocks of SIZE; both [B, C, C].

    The inverse of [[P, 0], [L, Q]] is [[P^-1, 0], [-Q^-1 L P^-1, Q^-1]].
    """
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    below = (i // SIZE != j // SIZE) & (i // (2 * SIZE) == j // (2 * SIZE))
    return x - _exact_dot(_exact_dot(x, tl.where(below[None, :, :], A, 0.0), PRECISION), x, PRECISION)


@triton.jit
def _inverse(A, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^-1 of a strictly lower A [C, C].

    Blocks of 16 on the diagonal from those of 1, which are 1, all blocks at once. With B = inverse of those times the
    rest of A, whose fourth power is 0, the inverse is (I + B^2) (I - B) times that of the blocks.
    """
    BLOCKS: tl.constexpr = C // 16
    block = tl.arange(0, C) // 16
    diagonal = block[:, None] == block[None, :]
    a = tl.sum(tl.reshape(tl.where(diagonal, A, 0.0), [BLOCKS, 16, BLOCKS, 16]), 2)
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    x = tl.where((i == j)[None, :, :], 1.0, tl.where((i // 2 == j // 2)[None, :, :], -a, 0.0))
    x = _doubled(x, a, 2, 16, PRECISION)
    x = _doubled(x, a, 4, 16, PRECISION)
    x = _doubled(x, a, 8, 16, PRECISION)
    blocks = tl.arange(0, BLOCKS)
    same = (blocks[:, None] == blocks[None, :])[:, None, :, None]
    x = tl.reshape(tl.where(same, x[:, :, None, :], 0.0), [C, C])
    b = _exact_dot(x, tl.where(diagonal, 0.0, A), PRECISION)
    x -= _exact_dot(b, x, PRECISION)
    return x + _exact_dot(b, _exact_dot(b, x, PRECISION), PRECISION)


@triton.jit(do_not_specialize=["T", "N"])
def prepare_kernel(
    u_ptr, w_ptr, x_ptr, dn_ptr, G_ptr, q_scale_ptr, k_scale_ptr,
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, do_ptr, cu_ptr, T, N,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h,
    SCALE: tl.constexpr, EPS: tl.constexpr, PACKED: tl.constexpr, BACKWARD: tl.constexpr,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, PRECISION: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """For one chunk and value head, writes U^T, W, G and the factors of the rows of Q and K; BACKWARD: also X, and the
    part of dN^T that comes from the chunk itself."""
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    slot, i = tl.program_id(0) // HV, tl.program_id(0) % HV
    b, _, _, first, end = chunk(slot, cu_ptr, T, N, PACKED, C)
    if first >= end:
        return
    j = i // (HV // HK)
    rows, key_dims, value_dims = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    inside = rows < end - first
    of_token = (b.to(tl.int64) * T + first + rows) * HV + i
    k = _tokens(k_ptr, b, first, end, j, k_b, k_t, k_h, rows, key_dims, DK)
    beta = tl.load(beta_ptr + of_token, mask=inside, other=0.0).to(tl.float32)
    G = tl.cumsum(tl.load(g_ptr + of_token, mask=inside, other=0.0).to(tl.float32), 0)
    # Past the end exactly that of the last token, which a sum in another order may miss by an ulp of all of G.
    G = tl.where(inside, G, tl.sum(tl.where(rows == end - first - 1, G, 0.0), 0))
    k_scale = tl.rsqrt(tl.sum(k.to(tl.float32) * k.to(tl.float32), 1) + EPS)
    at = slot.to(tl.int64) * HV + i
    tl.store(G_ptr + at * C + rows, G)
    A = tl.dot(k, tl.trans(k), input_precision=PRECISION) * _decay(G, True, C)
    x = _inverse(A * (beta * k_scale)[:, None] * k_scale[None, :], C, INVERSE)
    w = tl.dot((x * (beta * tl.exp(G) * k_scale)[None, :]).to(dtype), k, input_precision=PRECISION)
    tl.store(w_ptr + at * (C * BK) + (rows[:, None] * BK + key_dims[None, :]), w.to(dtype))
    v = _tokens(v_ptr, b, first, end, i, v_b, v_t, v_h, rows, value_dims, DV)
    u = tl.dot((x * beta[None, :]).to(dtype), v, input_precision=PRECISION)
    tl.store(u_ptr + at * (C * BV) + (value_dims[None, :] * C + rows[:, None]), u.to(dtype))
    if BACKWARD or i % (HV // HK) == 0:
        q = _tokens(q_ptr, b, first, end, j, q_b, q_t, q_h, rows, key_dims, DK)
        q_scale = tl.rsqrt(tl.sum(q.to(tl.float32) * q.to(tl.float32), 1) + EPS) * SCALE
        if i % (HV // HK) == 0:
            of_key = (slot.to(tl.int64) * HK + j) * C + rows
            tl.store(q_scale_ptr + of_key, q_scale)
            tl.store(k_scale_ptr + of_key, k_scale)
        if BACKWARD:
            tl.store(x_ptr + at * (C * C) + (rows[:, None] * C + rows[None, :]), x.to(dtype))
            p = tl.dot(q, tl.trans(k), input_precision=PRECISION) * _decay(G, False, C)
            p = (p * q_scale[:, None] * k_scale[None, :]).to(dtype)
            do = _tokens(do_ptr, b, first, end, i, tl.cast(T, tl.int64) * (HV * DV), HV * DV, DV, rows, value_dims, DV)
            dn = tl.dot(tl.trans(do), p, input_precision=PRECISION)
            tl.store(dn_ptr + at * (C * BV) + (value_dims[:, None] * C + rows[None, :]), dn.to(dtype))


@triton.jit(do_not_specialize=["T"])
def scan_kernel(
    n_ptr, states_ptr, last_ptr, w_ptr, G_ptr, k_scale_ptr, k_ptr, state_ptr, cu_ptr, T, k_b, k_t, k_h,
    INITIAL: tl.constexpr, PACKED: tl.constexpr,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BLOCK_V: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Goes over the chunks of one document and value head, for BLOCK_V value dims. Writes the state before each chunk,
    N^T over U^T, and the last state."""
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    VALUE_BLOCKS: tl.constexpr = BV // BLOCK_V
    program, value_block = tl.program_id(0) // VALUE_BLOCKS, tl.program_id(0) % VALUE_BLOCKS
    n, i = program // HV, program % HV
    b, begin, end, slot = _sequence(n, cu_ptr, T, PACKED, C)
    j = i // (HV // HK)
    rows, key_dims = tl.arange(0, C), tl.arange(0, BK)
    value_dims = value_block * BLOCK_V + tl.arange(0, BLOCK_V)
    of_state = program.to(tl.int64) * (DK * DV) + key_dims[None, :] * DV + value_dims[:, None]
    exists = (key_dims < DK)[None, :] & (value_dims < DV)[:, None]
    state = tl.zeros([BLOCK_V, BK], tl.float32)
    if INITIAL:
        state += tl.load(state_ptr + of_state, mask=exists, other=0.0)
    for step in tl.range(0, tl.cdiv(end - begin, C)):
        at = (slot + step).to(tl.int64) * HV + i
        tl.store(states_ptr + at * (BV * BK) + (value_dims[:, None] * BK + key_dims[None, :]), state.to(dtype))
        w = tl.load(w_ptr + at * (C * BK) + (rows[:, None] * BK + key_dims[None, :]))
        of_values = n_ptr + at * (C * BV) + (value_dims[:, None] * C + rows[None, :])
        u = tl.load(of_values)
        k = _tokens(k_ptr, b, begin + step * C, end, j, k_b, k_t, k_h, rows, key_dims, DK)
        G = tl.load(G_ptr + at * C + rows)
        total = tl.load(G_ptr + at * C + C - 1)
        k_scale = tl.load(k_scale_ptr + ((slot + step).to(tl.int64) * HK + j) * C + rows)
        values = u.to(tl.float32) - tl.dot(state.to(dtype), tl.trans(w), input_precision=PRECISION)
        tl.store(of_values, values.to(dtype))
        written = (values * (tl.exp(total - G) * k_scale)[None, :]).to(dtype)
        state = tl.dot(written, k, state * tl.exp(total), input_precision=PRECISION)
    tl.store(last_ptr + of_state, state, mask=exists)


@triton.jit(do_not_specialize=["T", "N"])
def output_kernel(
    o_ptr, q_ptr, k_ptr, n_ptr, states_ptr, G_ptr, q_scale_ptr, k_scale_ptr, cu_ptr, T, N,
    q_b, q_t, q_h, k_b, k_t, k_h, PACKED: tl.constexpr,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BLOCK_V: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """O of one chunk and value head, for BLOCK_V value dims."""
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    VALUE_BLOCKS: tl.constexpr = (DV + BLOCK_V - 1) // BLOCK_V
    program, value_block = tl.program_id(0) // VALUE_BLOCKS, tl.program_id(0) % VALUE_BLOCKS
    slot, i = program // HV, program % HV
    b, _, _, first, end = chunk(slot, cu_ptr, T, N, PACKED, C)
    if first >= end:
        return
    j = i // (HV // HK)
    rows, key_dims = tl.arange(0, C), tl.arange(0, BK)
    value_dims = value_block * BLOCK_V + tl.arange(0, BLOCK_V)
    at, of_key = slot.to(tl.int64) * HV + i, (slot.to(tl.int64) * HK + j) * C + rows
    q = _tokens(q_ptr, b, first, end, j, q_b, q_t, q_h, rows, key_dims, DK)
    k = _tokens(k_ptr, b, first, end, j, k_b, k_t, k_h, rows, key_dims, DK)
    state = tl.load(states_ptr + at * (BV * BK) + (value_dims[:, None] * BK + key_dims[None, :]))
    n = tl.load(n_ptr + at * (C * BV) + (value_dims[:, None] * C + rows[None, :]))
    G, q_scale, k_scale = tl.load(G_ptr + at * C + rows), tl.load(q_scale_ptr + of_key), tl.load(k_scale_ptr + of_key)
    p = tl.dot(q, tl.trans(k), input_precision=PRECISION) * _decay(G, False, C)
    o = tl.dot(q, tl.trans(state), input_precision=PRECISION) * tl.exp(G)[:, None]
    o = tl.dot((p * k_scale[None, :]).to(dtype), tl.trans(n), o, input_precision=PRECISION) * q_scale[:, None]
    o_ptr += ((b.to(tl.int64) * T + first) * HV + i) * DV
    tl.store(
        o_ptr + (rows[:, None] * (HV * DV) + value_dims[None, :]),
        o.to(dtype),
        mask=(first + rows < end)[:, None] & (value_dims < DV)[None, :],
    )


@triton.jit(do_not_specialize=["T"])
def reverse_scan_kernel(
    dn_ptr, d_states_ptr, d_first_ptr, w_ptr, G_ptr, q_scale_ptr, k_scale_ptr, q_ptr, k_ptr, do_ptr, d_last_ptr, cu_ptr,
    T, q_b, q_t, q_h, k_b, k_t, k_h, LAST: tl.constexpr, PACKED: tl.constexpr,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BLOCK_V: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Goes over the chunks of one document and value head, from the last to the first. Writes the gradient of the state
    after each chunk, dN^T over the part of it that prepare_kernel wrote, and the gradient of the first state."""
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    VALUE_BLOCKS: tl.constexpr = BV // BLOCK_V
    program, value_block = tl.program_id(0) // VALUE_BLOCKS, tl.program_id(0) % VALUE_BLOCKS
    n, i = program // HV, program % HV
    b, begin, end, slot = _sequence(n, cu_ptr, T, PACKED, C)
    j = i // (HV // HK)
    rows, key_dims = tl.arange(0, C), tl.arange(0, BK)
    value_dims = value_block * BLOCK_V + tl.arange(0, BLOCK_V)
    of_state = program.to(tl.int64) * (DK * DV) + key_dims[None, :] * DV + value_dims[:, None]
    exists = (key_dims < DK)[None, :] & (value_dims < DV)[:, None]
    d_state = tl.zeros([BLOCK_V, BK], tl.float32)
    if LAST:
        d_state += tl.load(d_last_ptr + of_state, mask=exists, other=0.0)
    chunks = tl.cdiv(end - begin, C)
    of_do = tl.cast(T, tl.int64) * (HV * DV)
    for step in tl.range(0, chunks):
        c = chunks - 1 - step
        at = (slot + c).to(tl.int64) * HV + i
        first = begin + c * C
        after = d_state.to(dtype)
        tl.store(d_states_ptr + at * (BV * BK) + (value_dims[:, None] * BK + key_dims[None, :]), after)
        q = _tokens(q_ptr, b, first, end, j, q_b, q_t, q_h, rows, key_dims, DK)
        k = _tokens(k_ptr, b, first, end, j, k_b, k_t, k_h, rows, key_dims, DK)
        w = tl.load(w_ptr + at * (C * BK) + (rows[:, None] * BK + key_dims[None, :]))
        of_values = dn_ptr + at * (C * BV) + (value_dims[:, None] * C + rows[None, :])
        dn = tl.load(of_values).to(tl.float32)
        G = tl.load(G_ptr + at * C + rows)
        total = tl.load(G_ptr + at * C + C - 1)
        of_key = ((slot + c).to(tl.int64) * HK + j) * C + rows
        q_scale, k_scale = tl.load(q_scale_ptr + of_key), tl.load(k_scale_ptr + of_key)
        # The factors of dO^T Q multiply the smaller tile, or Q where tensor cores can read dO^T from shared memory.
        if BLOCK_V < 64:
            of_first = (b.to(tl.int64) * T + first) * HV + i
            do = tl.load(
                do_ptr + of_first * DV + (rows[None, :] * (HV * DV) + value_dims[:, None]),
                mask=(rows < end - first)[None, :] & (value_dims < DV)[:, None], other=0.0,
            )  # fmt: skip
        else:
            do = _tokens(do_ptr, b, first, end, i, of_do, HV * DV, DV, rows, value_dims, DV)
        if BLOCK_V < 64:
            do = (do.to(tl.float32) * (tl.exp(G) * q_scale)[None, :]).to(dtype)
            d_state = tl.dot(do, q, d_state * tl.exp(total), input_precision=PRECISION)
        else:
            q = (q.to(tl.float32) * (tl.exp(G) * q_scale)[:, None]).to(dtype)
            d_state = tl.dot(tl.trans(do), q, d_state * tl.exp(total), input_precision=PRECISION)
        product = tl.dot(after, tl.trans(k), input_precision=PRECISION)
        dn += product * (tl.exp(total - G) * k_scale)[None, :]
        tl.store(of_values, dn.to(dtype))
        d_state = tl.dot((-dn).to(dtype), w, d_state, input_precision=PRECISION)
    tl.store(d_first_ptr + of_state, d_state, mask=exists)


@triton.jit
def _store_through_norm(
    ptr, d, x, scale, tokens, FACTOR: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores the gradient of x from d, that of x * scale[:, None], where scale = FACTOR * rsqrt(sum(x^2) + eps)."""
    rows, dims = tl.arange(0, C)[:, None], tl.arange(0, BLOCK)[None, :]
    x = x.to(tl.float32)
    projection = tl.sum(d * x, 1) * (scale / FACTOR) * (scale / FACTOR)
    d = (d - x * projection[:, None]) * scale[:, None]
    tl.store(ptr + (rows * (HEADS * D) + dims), d.to(ptr.dtype.element_ty), mask=(rows < tokens) & (dims < D))


@triton.jit(do_not_specialize=["T", "N"])
def value_gradients_kernel(
    dv_ptr, dr_ptr, m_ptr, f_ptr, dG_ptr, d_beta_ptr,
    q_ptr, k_ptr, v_ptr, beta_ptr, do_ptr, x_ptr, n_ptr, dn_ptr, G_ptr, q_scale_ptr, k_scale_ptr, cu_ptr, T, N,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, PACKED: tl.constexpr,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BLOCK_V: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of one chunk and value head: dV, what the next kernels read (dR, M, F), and the parts of dG and d_beta that do
    not depend on the state."""
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    slot, i = tl.program_id(0) // HV, tl.program_id(0) % HV
    b, _, _, first, end = chunk(slot, cu_ptr, T, N, PACKED, C)
    if first >= end:
        return
    j = i // (HV // HK)
    rows, key_dims = tl.arange(0, C), tl.arange(0, BK)
    inside = rows < end - first
    of_key = (slot.to(tl.int64) * HK + j) * C
    q_scale, k_scale = tl.load(q_scale_ptr + of_key + rows), tl.load(k_scale_ptr + of_key + rows)
    at = slot.to(tl.int64) * HV + i
    of_token = (b.to(tl.int64) * T + first) * HV + i
    of_do = tl.cast(T, tl.int64) * (HV * DV)
    square = at * (C * C) + (rows[:, None] * C + rows[None, :])
    G = tl.load(G_ptr + at * C + rows)
    beta = tl.load(beta_ptr + of_token + rows * HV, mask=inside, other=0.0).to(tl.float32)
    m = tl.zeros([C, C], tl.float32)  # dO N^T
    e = tl.zeros([C, C], tl.float32)  # dR N^T
    d_beta = tl.zeros([C], tl.float32)
    for v_first in range(0, BV, BLOCK_V):
        dims = v_first + tl.arange(0, BLOCK_V)
        of_value = at * (C * BV) + (dims[:, None] * C + rows[None, :])
        x = tl.load(x_ptr + square)
        dn = tl.load(dn_ptr + of_value)
        dr = tl.dot(tl.trans(x), tl.trans(dn), input_precision=PRECISION)
        v = _tokens(v_ptr, b, first, end, i, v_b, v_t, v_h, rows, dims, DV)
        d_beta += tl.sum(dr * v.to(tl.float32), 1)
        at_v = dv_ptr + of_token * DV + (rows[:, None] * (HV * DV) + dims[None, :])
        tl.store(at_v, (dr * beta[:, None]).to(dtype), mask=inside[:, None] & (dims < DV)[None, :])
        dr = dr.to(dtype)
        tl.store(dr_ptr + at * (C * BV) + (rows[:, None] * BV + dims[None, :]), dr)
        n = tl.load(n_ptr + of_value)
        do = _tokens(do_ptr, b, first, end, i, of_do, HV * DV, DV, rows, dims, DV)
        m = tl.dot(do, n, m, input_precision=PRECISION)
        e = tl.dot(dr, n, e, input_precision=PRECISION)
    q = _tokens(q_ptr, b, first, end, j, q_b, q_t, q_h, rows, key_dims, DK)
    k = _tokens(k_ptr, b, first, end, j, k_b, k_t, k_h, rows, key_dims, DK)
    decay = _decay(G, False, C)
    m *= decay
    e = tl.where(rows[:, None] > rows[None, :], -e * decay, 0.0)
    tl.store(m_ptr + square, m.to(dtype))
    tl.store(f_ptr + square, (e * beta[:, None]).to(dtype))
    # The gradient of G_i - G_j: fp32 sums over rows and over columns of the same terms, most of which cancel.
    terms = e * tl.dot(k, tl.trans(k), input_precision=PRECISION) * k_scale[:, None] * k_scale[None, :]
    tl.store(d_beta_ptr + at * C + rows, d_beta + tl.sum(terms, 1))
    terms *= beta[:, None]
    terms += m * tl.dot(q, tl.trans(k), input_precision=PRECISION) * q_scale[:, None] * k_scale[None, :]
    tl.store(dG_ptr + at * C + rows, tl.sum(terms, 1) - tl.sum(terms, 0))


@triton.jit(do_not_specialize=["T", "N"])
def query_gradients_kernel(
    dq_ptr, dG_ptr, q_ptr, k_ptr, do_ptr, m_ptr, states_ptr, G_ptr, q_scale_ptr, k_scale_ptr, cu_ptr, T, N,
    q_b, q_t, q_h, k_b, k_t, k_h, SCALE: tl.constexpr, PACKED: tl.constexpr,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BLOCK_V: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of one chunk and key head, over its value heads: dQ, and what the state adds to dG by the queries."""
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    GROUP: tl.constexpr = HV // HK
    slot, j = tl.program_id(0) // HK, tl.program_id(0) % HK
    b, _, _, first, end = chunk(slot, cu_ptr, T, N, PACKED, C)
    if first >= end:
        return
    rows, key_dims = tl.arange(0, C), tl.arange(0, BK)
    of_key = (slot.to(tl.int64) * HK + j) * C
    q_scale, k_scale = tl.load(q_scale_ptr + of_key + rows), tl.load(k_scale_ptr + of_key + rows)
    of_do = tl.cast(T, tl.int64) * (HV * DV)
    q = _tokens(q_ptr, b, first, end, j, q_b, q_t, q_h, rows, key_dims, DK)
    k = _tokens(k_ptr, b, first, end, j, k_b, k_t, k_h, rows, key_dims, DK)
    k = (k.to(tl.float32) * k_scale[:, None]).to(dtype)
    dq = tl.zeros([C, BK], tl.float32)
    for member in range(GROUP):
        i = j * GROUP + member
        at = slot.to(tl.int64) * HV + i
        d = tl.zeros([C, BK], tl.float32)  # dO S^T
        for v_first in range(0, BV, BLOCK_V):
            dims = v_first + tl.arange(0, BLOCK_V)
            do = _tokens(do_ptr, b, first, end, i, of_do, HV * DV, DV, rows, dims, DV)
            state = tl.load(states_ptr + at * (BV * BK) + (dims[:, None] * BK + key_dims[None, :]))
            d = tl.dot(do, state, d, input_precision=PRECISION)
        d *= tl.exp(tl.load(G_ptr + at * C + rows))[:, None]
        dG = tl.load(dG_ptr + at * C + rows) + tl.sum(d * q.to(tl.float32), 1) * q_scale
        tl.store(dG_ptr + at * C + rows, dG)
        m = tl.load(m_ptr + at * (C * C) + (rows[:, None] * C + rows[None, :]))
        dq = tl.dot(m, k, dq + d, input_precision=PRECISION)
    dq_ptr += ((b.to(tl.int64) * T + first) * HK + j) * DK
    _store_through_norm(dq_ptr, dq, q, q_scale, end - first, SCALE, HK, DK, C, BK)


@triton.jit(do_not_specialize=["T", "N"])
def key_gradients_kernel(
    dk_ptr, dg_ptr, d_beta_ptr, q_ptr, k_ptr, beta_ptr, dr_ptr, m_ptr, f_ptr, dG_ptr, d_beta_part_ptr,
    n_ptr, states_ptr, d_states_ptr, G_ptr, q_scale_ptr, k_scale_ptr, cu_ptr, T, N, q_b, q_t, q_h, k_b, k_t, k_h,
    PACKED: tl.constexpr,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BLOCK_V: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Of one chunk and key head, over its value heads: dK, dg and d_beta. At once it reads BLOCK_V value dims of S, and
    BLOCK_S of dS."""
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    GROUP: tl.constexpr = HV // HK
    slot, j = tl.program_id(0) // HK, tl.program_id(0) % HK
    b, _, _, first, end = chunk(slot, cu_ptr, T, N, PACKED, C)
    if first >= end:
        return
    rows, key_dims = tl.arange(0, C), tl.arange(0, BK)
    inside = rows < end - first
    of_first = b.to(tl.int64) * T + first
    of_key = (slot.to(tl.int64) * HK + j) * C
    q_scale, k_scale = tl.load(q_scale_ptr + of_key + rows), tl.load(k_scale_ptr + of_key + rows)
    square = rows[:, None] * C + rows[None, :]
    q = _tokens(q_ptr, b, first, end, j, q_b, q_t, q_h, rows, key_dims, DK)
    k = _tokens(k_ptr, b, first, end, j, k_b, k_t, k_h, rows, key_dims, DK)
    scaled_q, scaled_k = (q * q_scale[:, None]).to(dtype), (k * k_scale[:, None]).to(dtype)
    dk = tl.zeros([C, BK], tl.float32)
    for member in range(GROUP):
        i = j * GROUP + member
        at = slot.to(tl.int64) * HV + i
        G, total = tl.load(G_ptr + at * C + rows), tl.load(G_ptr + at * C + C - 1)
        of_token = of_first * HV + i
        beta = tl.load(beta_ptr + of_token + rows * HV, mask=inside, other=0.0).to(tl.float32)
        m = tl.load(m_ptr + at * (C * C) + square)
        dk = tl.dot(tl.trans(m), scaled_q, dk, input_precision=PRECISION)
        f = tl.load(f_ptr + at * (C * C) + square)
        dk = tl.dot(f, scaled_k, dk, input_precision=PRECISION)
        dk = tl.dot(tl.trans(f), scaled_k, dk, input_precision=PRECISION)
        d = tl.zeros([C, BK], tl.float32)  # dR S^T
        for v_first in range(0, BV, BLOCK_V):
            dims = v_first + tl.arange(0, BLOCK_V)
            dr = tl.load(dr_ptr + at * (C * BV) + (rows[:, None] * BV + dims[None, :]))
            state = tl.load(states_ptr + at * (BV * BK) + (dims[:, None] * BK + key_dims[None, :]))
            d = tl.dot(dr, state, d, input_precision=PRECISION)
        d *= tl.exp(G)[:, None]
        r_k = tl.sum(d * k.to(tl.float32), 1) * k_scale
        dk -= d * beta[:, None]
        d = tl.zeros([C, BK], tl.float32)  # N dS^T
        d_total = tl.zeros([BK], tl.float32)
        for v_first in range(0, BV, BLOCK_S):
            dims = v_first + tl.arange(0, BLOCK_S)
            n = tl.load(n_ptr + at * (C * BV) + (dims[:, None] * C + rows[None, :]))
            of_state = at * (BV * BK) + (dims[:, None] * BK + key_dims[None, :])
            d_state = tl.load(d_states_ptr + of_state)
            d_total += tl.sum(tl.load(states_ptr + of_state).to(tl.float32) * d_state.to(tl.float32), 0)
            d = tl.dot(tl.trans(n), d_state, d, input_precision=PRECISION)
        d *= tl.exp(total - G)[:, None]
        after = tl.sum(d * k.to(tl.float32), 1) * k_scale  # reaches g of the tokens after this one
        dk += d
        dG = tl.load(dG_ptr + at * C + rows) - beta * r_k
        dg = tl.cumsum(dG, 0, reverse=True) + tl.cumsum(after, 0) - after + tl.exp(total) * tl.sum(d_total, 0)
        tl.store(dg_ptr + of_token + rows * HV, dg, mask=inside)
        d_beta = tl.load(d_beta_part_ptr + at * C + rows) - r_k
        tl.store(d_beta_ptr + of_token + rows * HV, d_beta.to(d_beta_ptr.dtype.element_ty), mask=inside)
    dk_ptr += (of_first * HK + j) * DK
    _store_through_norm(dk_ptr, dk, k, k_scale, end - first, 1.0, HK, DK, C, BK)
