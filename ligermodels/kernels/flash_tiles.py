"""Tiles of heads for the kernels of flash_attention: loaded, multiplied and stored in one part or in two.

A tile is a pair, [ROWS, MAIN] and [ROWS, REST]: tensor cores take powers of two, and a head of 80 dims is 64 and 16.
Where REST is 0 the second is the first, or a number, and nothing is made of it.
"""

from ligermodels.kernels._triton import tl, triton


@triton.jit
def _part(
    source, b, head, start, limit, stride_b, stride_s, stride_h,
    ROWS: tl.constexpr, D: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Tokens start .. start + ROWS of a head, dims from FIRST on: [ROWS, WIDTH], zero past `limit` and past D."""
    if TMA:
        return source.load([b, start, head, FIRST]).reshape(ROWS, WIDTH)
    else:
        rows = tl.arange(0, ROWS)
        cols = FIRST + tl.arange(0, WIDTH)
        base = source + b.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h + tl.cast(start, tl.int64) * stride_s
        mask = (rows < limit - start)[:, None]
        if D < FIRST + WIDTH:
            mask = mask & (cols < D)[None, :]
        return tl.load(base + rows.to(tl.int64)[:, None] * stride_s + cols[None, :], mask=mask, other=0.0)


@triton.jit
def tile(
    source, rest_source, b, head, start, limit, stride_b, stride_s, stride_h,
    ROWS: tl.constexpr, D: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Tokens start .. start + ROWS of a head in two parts, [ROWS, MAIN] and [ROWS, REST]; without REST one, twice."""
    main = _part(source, b, head, start, limit, stride_b, stride_s, stride_h, ROWS, D, 0, MAIN, TMA)
    rest = main
    if REST:
        rest = _part(rest_source, b, head, start, limit, stride_b, stride_s, stride_h, ROWS, D, MAIN, REST, TMA)
    return main, rest


@triton.jit
def numbers(source, b, head, start, limit, stride, H: tl.constexpr, ROWS: tl.constexpr, TMA: tl.constexpr):
    """[ROWS] of a [B, H, limit] with rows `stride` apart, zero past `limit`."""
    if TMA:
        return source.load([b, head, start]).reshape(ROWS)
    else:
        rows = start + tl.arange(0, ROWS)
        return tl.load(source + (b.to(tl.int64) * H + head) * stride + rows, mask=rows < limit, other=0.0)


@triton.jit
def inner(a, b, REST: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr):
    """a b^T over the dims of a head, both in parts."""
    product = tl.dot(a[0], b[0].T, input_precision=PRECISION, out_dtype=ACC)
    if REST:
        product = tl.dot(a[1], b[1].T, product, input_precision=PRECISION, out_dtype=ACC)
    return product


@triton.jit
def zeros(ROWS: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, ACC: tl.constexpr):
    main = tl.zeros([ROWS, MAIN], ACC)
    rest = main
    if REST:
        rest = tl.zeros([ROWS, REST], ACC)
    return main, rest


@triton.jit
def times(total, factor, REST: tl.constexpr):
    main = total[0] * factor
    rest = total[1]
    if REST:
        rest = rest * factor
    return main, rest


@triton.jit
def outer(weights, b, total, REST: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr):
    """total + weights b, b and total in parts."""
    main = tl.dot(weights, b[0], total[0], input_precision=PRECISION, out_dtype=ACC)
    rest = total[1]
    if REST:
        rest = tl.dot(weights, b[1], total[1], input_precision=PRECISION, out_dtype=ACC)
    return main, rest


@triton.jit
def add_row(total, at, where, FIRST: tl.constexpr, D: tl.constexpr):
    """total, and in the rows `where` the row at `at`, dims from FIRST on."""
    cols = FIRST + tl.arange(0, total.shape[1])[None, :]
    return total + tl.load(at + cols, mask=where[:, None] & (cols < D), other=0.0).to(total.dtype)


@triton.jit
def store(target, tile, b, head, start, limit, H: tl.constexpr, D: tl.constexpr, REST: tl.constexpr):
    """The reverse of `tile`, into a contiguous [B, limit, H, D]."""
    _store_part(target, tile[0], b, head, start, limit, H, D, 0)
    if REST:
        _store_part(target, tile[1], b, head, start, limit, H, D, tile[0].shape[1])


@triton.jit
def _store_part(target, tile, b, head, start, limit, H: tl.constexpr, D: tl.constexpr, FIRST: tl.constexpr):
    rows = start + tl.arange(0, tile.shape[0])
    cols = FIRST + tl.arange(0, tile.shape[1])
    at = ((b.to(tl.int64) * limit + rows)[:, None] * H + head) * D + cols[None, :]
    tl.store(target + at, tile.to(target.dtype.element_ty), mask=(rows < limit)[:, None] & (cols < D)[None, :])
