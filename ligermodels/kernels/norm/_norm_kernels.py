"""The Triton kernels of `rms_norm` and `layer_norm`, which differ in a few lines, under LAYER_NORM.

    y = (x - mean) * rstd * (offset + weight) + bias          over the last dim, of width N; mean is 0 in RMSNorm

- A program has whole rows in registers.
- The backward is persistent: each program strides over tiles of rows, with the loads of the next tiles in flight, and
  sums its part of dweight and dbias in registers. `sum_parts_kernel` sums these parts in a fixed order (no atomics).
"""

# Triton's compiler has no (*tiles, tile), and mypy no tuple that grows:
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

from ligermodels.kernels._math import head_rows
from ligermodels.kernels._triton import tl, triton, wait_for_previous


@triton.jit
def _mean(total, count):
    """total / count, correctly rounded: in a row of equal numbers its error is multiplied by rsqrt(eps)."""
    if total.dtype == tl.float64:
        return total / count
    else:
        return tl.div_rn(total, count)


@triton.jit
def rstd_of(total, N: tl.constexpr, eps: tl.constexpr, dtype: tl.constexpr):
    """rsqrt(total / N + eps), whose error is that of the whole row."""
    mean_square = total * (1.0 / N)
    if dtype == tl.float32:  # the 2 ulp of the hardware's rsqrt would show in fp32
        return tl.div_rn(1.0, tl.sqrt_rn(mean_square + eps))
    elif dtype == tl.float64:
        return 1.0 / tl.sqrt(mean_square + eps)
    else:
        return tl.rsqrt(mean_square + eps)


@triton.jit
def _load_sum(x_ptr, residual_ptr, total_ptr, mask, ADD: tl.constexpr, ACC: tl.constexpr):
    """A tile of x in ACC; with ADD that of x + residual, rounded as it is stored."""
    x = tl.load(x_ptr, mask=mask, other=0.0, eviction_policy="evict_first")
    if ADD:
        residual = tl.load(residual_ptr, mask=mask, other=0.0, eviction_policy="evict_first")
        x = (x.to(ACC) + residual.to(ACC)).to(total_ptr.dtype.element_ty)
        tl.store(total_ptr, x, mask=mask)
    return x.to(ACC)


@triton.jit
def _load_weight(w_ptr, cols, N: tl.constexpr, offset: tl.constexpr, WEIGHT: tl.constexpr, ACC: tl.constexpr):
    if WEIGHT:
        w = tl.load(w_ptr + cols, mask=cols < N, other=0.0, eviction_policy="evict_last")
        return (w.to(ACC) + offset)[None, :]
    else:
        return tl.full(cols.shape, 1.0, ACC)[None, :]


@triton.jit
def _load_bias(b_ptr, cols, N: tl.constexpr, BIAS: tl.constexpr, ACC: tl.constexpr):
    if BIAS:
        return tl.load(b_ptr + cols, mask=cols < N, other=0.0, eviction_policy="evict_last").to(ACC)[None, :]
    else:
        return tl.zeros(cols.shape, ACC)[None, :]


@triton.jit
def scaled(x_hat, w, b, CAST_FIRST: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, OUT: tl.constexpr):
    """x_hat * w + b. CAST_FIRST: rounds x_hat to OUT before."""
    if WEIGHT:
        if CAST_FIRST:
            x_hat = x_hat.to(OUT).to(w.dtype)
        x_hat = x_hat * w
    if BIAS:
        x_hat += b
    return x_hat.to(OUT)


@triton.jit(do_not_specialize=["n_rows"])
def forward_kernel(
    y_ptr, total_ptr, stats_ptr, x_ptr, residual_ptr, w_ptr, b_ptr, n_rows, x_t, x_h, residual_stride,
    eps: tl.constexpr, offset: tl.constexpr, LAYER_NORM: tl.constexpr, CAST_FIRST: tl.constexpr, ADD: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, HEADS: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """ROWS whole rows per program. stats: rstd of each row, and with LAYER_NORM the means after them."""
    wait_for_previous(OVERLAP)
    ACC: tl.constexpr = stats_ptr.dtype.element_ty
    OUT: tl.constexpr = y_ptr.dtype.element_ty
    cols = tl.arange(0, BLOCK)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = rows < n_rows
    mask = row_mask[:, None] & (cols < N)[None, :]
    row = rows.to(tl.int64)[:, None]
    place = row * N + cols
    x = _load_sum(
        x_ptr + head_rows(rows, x_t, x_h, HEADS)[:, None] + cols, residual_ptr + row * residual_stride + cols,
        total_ptr + place, mask, ADD, ACC,
    )  # fmt: skip
    w = _load_weight(w_ptr, cols, N, offset, WEIGHT, ACC)
    b = _load_bias(b_ptr, cols, N, BIAS, ACC)
    if LAYER_NORM:
        mean = _mean(tl.sum(x, 1), 1.0 * N)
        tl.store(stats_ptr + n_rows + rows, mean, mask=row_mask)
        x = tl.where(mask, x - mean[:, None], 0.0)
    rstd = rstd_of(tl.sum(x * x, 1), N, eps, OUT)
    tl.store(stats_ptr + rows, rstd, mask=row_mask)
    tl.store(y_ptr + place, scaled(x * rstd[:, None], w, b, CAST_FIRST, WEIGHT, BIAS, OUT), mask=mask)


@triton.jit
def _columns(piece: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr):
    """The columns of a row's first tile, BLOCK, or of its second, the next REST."""
    if piece == 0:
        return tl.arange(0, BLOCK)
    else:
        return BLOCK + tl.arange(0, REST)


@triton.jit
def _g(dy, w, LAYER_NORM: tl.constexpr):
    """dy * w; for LayerNorm an fma with 0 rounds it, so that no fma with a later subtraction makes g - mean(g) != 0
    for equal g."""
    if LAYER_NORM:
        return tl.fma(dy, tl.broadcast_to(w, dy.shape), tl.zeros(dy.shape, dy.dtype))
    else:
        return dy * w


@triton.jit(do_not_specialize=["n_rows"])
def backward_kernel(
    dx_ptr, parts_ptr, dy_ptr, dtotal_ptr, x_ptr, w_ptr, stats_ptr, n_rows, dy_t, dy_h, dtotal_stride, x_t, x_h,
    offset: tl.constexpr, LAYER_NORM: tl.constexpr, ADD: tl.constexpr, WEIGHT: tl.constexpr,
    DX: tl.constexpr, DW: tl.constexpr, DB: tl.constexpr, HEADS: tl.constexpr,
    N: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx = (g - mean(g) - x_hat * mean(g * x_hat)) * rstd + dtotal, with g = dy * w, and mean(g) only if LAYER_NORM.

    A row is one tile of BLOCK columns, or two, of BLOCK and REST columns.
    This program's part of dw is row pid of parts; its part of db is row pid after all parts of dw, if there are any.
    """
    ACC: tl.constexpr = stats_ptr.dtype.element_ty
    PIECES: tl.constexpr = 2 if REST else 1
    weights = ()
    dw = ()
    db = ()
    for i in tl.static_range(PIECES):
        cols = _columns(i, BLOCK, REST)
        weights = weights + (_load_weight(w_ptr, cols, N, offset, WEIGHT, ACC),)
        dw = dw + (tl.zeros([ROWS, cols.shape[0]], ACC),)
        db = db + (tl.zeros([ROWS, cols.shape[0]], ACC),)
    for tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = tile * ROWS + tl.arange(0, ROWS)
        row_mask = rows < n_rows
        row = rows.to(tl.int64)[:, None]
        of_dy, of_x = head_rows(rows, dy_t, dy_h, HEADS)[:, None], head_rows(rows, x_t, x_h, HEADS)[:, None]
        mean = tl.zeros([ROWS], ACC)
        rstd = tl.load(stats_ptr + rows, mask=row_mask, other=0.0)[:, None]
        if LAYER_NORM:
            mean = tl.load(stats_ptr + n_rows + rows, mask=row_mask, other=0.0)
        dys = ()
        x_hats = ()
        for i in tl.static_range(PIECES):
            cols = _columns(i, BLOCK, REST)
            mask = row_mask[:, None] & (cols < N)[None, :]
            dys = dys + (tl.load(dy_ptr + of_dy + cols, mask=mask, other=0.0).to(ACC),)
            if DX or DW:
                x = tl.load(x_ptr + of_x + cols, mask=mask, other=0.0).to(ACC)
                if LAYER_NORM:
                    x -= mean[:, None]
                x_hats = x_hats + (x * rstd,)
        mean_g = tl.zeros([ROWS], ACC)
        mean_gx = tl.zeros([ROWS], ACC)
        new_dw = ()
        new_db = ()
        for i in tl.static_range(PIECES):
            if DW:
                new_dw = new_dw + (dw[i] + dys[i] * x_hats[i],)
            if DB:
                new_db = new_db + (db[i] + dys[i],)
            if DX:
                g = _g(dys[i], weights[i], LAYER_NORM)
                mean_gx += tl.sum(g * x_hats[i], 1)
                if LAYER_NORM:
                    mean_g += tl.sum(g, 1)
        if DW:
            dw = new_dw
        if DB:
            db = new_db
        if DX:
            mean_g *= 1.0 / N
            mean_gx *= 1.0 / N
            for i in tl.static_range(PIECES):
                cols = _columns(i, BLOCK, REST)
                mask = row_mask[:, None] & (cols < N)[None, :]
                dx = _g(dys[i], weights[i], LAYER_NORM)
                if LAYER_NORM:
                    dx -= mean_g[:, None]
                dx = (dx - x_hats[i] * mean_gx[:, None]) * rstd
                if ADD:
                    dx += tl.load(dtotal_ptr + row * dtotal_stride + cols, mask=mask, other=0.0).to(ACC)
                tl.store(dx_ptr + row * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    parts_ptr += tl.program_id(0).to(tl.int64) * N
    for i in tl.static_range(PIECES):
        cols = _columns(i, BLOCK, REST)
        if DW:
            tl.store(parts_ptr + cols, tl.sum(dw[i], 0), mask=cols < N)
        if DB:
            skipped = tl.num_programs(0).to(tl.int64) * N if DW else 0
            tl.store(parts_ptr + skipped + cols, tl.sum(db[i], 0), mask=cols < N)
