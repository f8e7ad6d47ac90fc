"""Chunks of tokens, for the losses over a linear head: how long a chunk is, which tokens are dropped, how gradients are
summed over the chunks and passed to the backward, and how torch.compile is kept out of the loop.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels._gradients import accumulate, accumulate_grad, is_marked, scale_
from ligermodels.kernels._triton import accumulator, cdiv

CHUNK_BYTES = 512 * 2**20
"""The default workspace for the logits of a chunk."""
CHUNK_MULTIPLE = 128
"""The number of tokens of a chunk is a multiple of this."""


def chunk_rows(tokens: int, row_bytes: int, workspace_bytes: int) -> int:
    """Tokens per chunk: at most what workspace_bytes can store, in chunks of about the same length."""
    maximum = max(workspace_bytes // row_bytes // CHUNK_MULTIPLE, 1) * CHUNK_MULTIPLE
    chunks = max(cdiv(tokens, maximum), 1)
    return min(cdiv(tokens, chunks * CHUNK_MULTIPLE) * CHUNK_MULTIPLE, tokens)


def slices(tokens: int, rows: int | None) -> list[slice]:
    """One slice of all tokens, or slices of `rows` tokens."""
    return [slice(None)] if rows is None or rows >= tokens else [slice(i, i + rows) for i in range(0, tokens, rows)]


def gather(x: Tensor, source: Tensor) -> Tensor:
    """x [N, H] -> rows x[source], and zeros where source is negative, even if x has NaN there."""
    return x.index_select(0, source.clamp(min=0)).masked_fill_(source[:, None] < 0, 0)


def compact(labels: Tensor, limit: int, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """(labels of the valid tokens [limit], source: the token of each or -1, place: the row of each token or -1).

    With more than `limit` valid labels, all returned labels are negative, so that the loss becomes NaN.
    """
    valid = labels != ignore_index
    rank = valid.cumsum(0) - 1
    place = torch.where(valid & (rank < limit), rank, -1)
    tokens = torch.arange(labels.shape[0], device=labels.device)
    source = torch.full((limit + 1,), -1, device=labels.device)
    source = source.scatter_(0, torch.where(place < 0, limit, place), tokens)[:limit]
    kept = torch.where(source < 0, ignore_index, labels.gather(0, source.clamp(min=0)))
    return torch.where(rank[-1] >= limit, -1 - (ignore_index == -1), kept), source, place


class Settings(NamedTuple):
    """How a loss over a linear head runs; none of it changes what is computed."""

    num_valid: int | None
    workspace_bytes: int
    dtype: torch.dtype  # of the matmuls
    accumulate_fp32: bool

    def sum_dtype(self, weight: Tensor) -> torch.dtype:
        """The dtype of the sum of dweight; cuBLAS can add in the dtype of the factors, or in fp32."""
        upcast = self.accumulate_fp32 or weight.dtype != self.dtype
        return torch.promote_types(weight.dtype, torch.float32) if upcast else weight.dtype

    def leaves_divisor(self, reduction: str, needs: tuple[bool, bool, bool]) -> bool:
        """True if the backward divides by the divisor of a mean. It does in fp16, where p / T underflows: the upstream
        gradient brings the factor of a loss scaler."""
        return self.dtype == torch.float16 and reduction == "mean" and any(needs)

    def whole_bytes(self, weight: Tensor, need_weight: bool) -> int:
        """The largest size at which all logits are one chunk: workspace_bytes, and the memory of an fp32 sum of
        dweight, which a single chunk does not need."""
        summed = need_weight and weight.numel() * (self.sum_dtype(weight).itemsize - weight.itemsize)
        return self.workspace_bytes + summed


class Chunks:
    """Tokens x [T, H] and their labels [R], in chunks of `rows` rows, without the ignored tokens where that is faster.

    source [R]: the token of each row (-1: none); place [T]: the row of each token (-1: dropped). Both are None if no
    token is dropped: tokens are dropped if the number of valid labels is known (num_valid, or labels on the CPU) and at
    most nine tenths of T.
    """

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, ignore_index: int, settings: Settings
    ):
        num_valid, dtype = settings.num_valid, settings.dtype
        if num_valid is None and labels.device.type == "cpu":
            num_valid = int((labels != ignore_index).sum())
        self.labels = labels.to(x.device, non_blocking=True)
        self.source = self.place = None
        tokens, self.vocab = x.shape[0], weight.shape[0]
        multiple = CHUNK_MULTIPLE
        if num_valid is not None and (limit := max(cdiv(num_valid, multiple), 1) * multiple) <= 0.9 * tokens:
            self.labels, self.source, self.place = compact(self.labels, limit, ignore_index)
            x = gather(x, self.source)
        self.x, self.weight = x.to(dtype), weight.to(dtype)
        self.bias = None if bias is None else bias.to(dtype)
        # Rows start at multiples of 128 bytes for any V, for vector loads and for cuBLAS.
        self.pitch = cdiv(self.vocab, 64) * 64
        self.limit(settings.workspace_bytes)

    def logits_bytes(self, rows: int) -> int:
        """The size of the logits of `rows` rows."""
        return rows * self.pitch * self.x.element_size()

    def limit(self, workspace_bytes: int, whole_bytes: int = 0) -> None:
        """Sets `rows`: all of them if they fit into whole_bytes, else as many as fit into workspace_bytes."""
        self.rows = len(self.labels)
        if self.logits_bytes(self.rows) > whole_bytes:
            self.rows = chunk_rows(self.rows, self.logits_bytes(1), workspace_bytes)

    def workspace(self) -> Tensor:
        """Uninitialised memory for the logits of a chunk, [rows, V]."""
        return torch.empty(self.rows, self.pitch, dtype=self.x.dtype, device=self.x.device)[:, : self.vocab]

    def logits(self, workspace: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(first row, logits in the workspace) of each chunk."""
        for start in range(0, len(self.labels), max(self.rows, 1)):
            chunk = self.x[start : start + self.rows]
            z = workspace[: chunk.shape[0]]
            if self.bias is None:
                torch.mm(chunk, self.weight.t(), out=z)
            else:
                torch.addmm(self.bias, chunk, self.weight.t(), out=z)
            yield start, z

    def per_row(self, values: Tensor | None) -> Tensor | None:
        """values [T] of the tokens -> [R], 0 where a row has no token."""
        if values is None or self.source is None:
            return values
        return torch.where(self.source < 0, 0, values.gather(0, self.source.clamp(min=0)))

    def per_token(self, values: Tensor | None, fill: int) -> Tensor | None:
        """values [R] of the rows -> [T], `fill` where a token was dropped."""
        if values is None or self.place is None:
            return values
        return torch.where(self.place < 0, fill, values.gather(0, self.place.clamp(min=0)))


class Gradients:
    """dx, dweight and dbias of a head, where needed, summed over the chunks from the gradients of their logits.

    sum_dtype: the dtype in which dweight is summed. final: the dtype in which `take` returns it. The result takes the
    memory of the chunks' workspace, which should be free by then. Where it is larger than that, the fp32 sum is two
    tensors, each of half the rows, and the result takes the memory of the first.
    """

    def __init__(self, chunks: Chunks, needs: tuple[bool, bool, bool], sum_dtype: torch.dtype, final: torch.dtype):
        need_x, need_weight, need_bias = needs
        x, (vocab, hidden) = chunks.x, chunks.weight.shape
        make = torch.empty if len(x) else torch.zeros
        self.dx = torch.empty_like(x, memory_format=torch.contiguous_format) if need_x else None
        fits = vocab * hidden * final.itemsize <= chunks.logits_bytes(chunks.rows)
        half = vocab if fits or sum_dtype.itemsize != 2 * final.itemsize else cdiv(vocab, 128) * 64
        parts = [range(vocab)[i : i + half] for i in range(0, vocab, half)] if need_weight else []
        self.parts = [(rows, make(len(rows), hidden, dtype=sum_dtype, device=x.device)) for rows in parts]
        self.final = final
        dtype = accumulator(x.dtype)
        self.dbias = torch.zeros(chunks.vocab, dtype=dtype, device=x.device) if need_bias else None

    def add(self, chunks: Chunks, start: int, dlogits: Tensor) -> None:
        if self.dx is not None:
            torch.mm(dlogits, chunks.weight, out=self.dx[start : start + len(dlogits)])
        for rows, total in self.parts:
            part = dlogits[:, rows.start : rows.stop]
            accumulate(total, part, chunks.x[start : start + len(dlogits)], start == 0)
        if self.dbias is not None:
            self.dbias += dlogits.sum(0, dtype=self.dbias.dtype)

    def _take_dweight(self) -> Tensor | None:
        parts, self.parts = self.parts, []
        if len(parts) < 2:
            return parts[0][1].to(self.final) if parts else None
        (rows, first), (_, second) = parts
        hidden = first.shape[1]
        # Tensor.untyped_storage would count as a reference, and autograd adds in place only to a tensor without others.
        dweight, memory = first.new_empty(0, dtype=self.final), first.view(self.final)
        dweight.set_(memory, 0, (rows.stop + len(second), hidden), (hidden, 1))  # type: ignore[call-overload]
        step = cdiv(len(first), 8)
        for start in range(0, len(first), step):  # each is written over rows that have been read
            dweight[start : start + step][: len(first) - start] = first[start : start + step].to(self.final)
        dweight[rows.stop :] = second
        return dweight

    def take(self, place: Tensor | None, x: Tensor, bias_dtype: torch.dtype | None) -> tuple[Tensor | None, ...]:
        """(dx, dweight, dbias); called once. place: of `Chunks`; dx has all tokens, in x's dtype. bias_dtype: of dbias;
        None leaves it as it was summed. Rounding dweight is a peak of memory: free the chunks' workspace before."""
        dx = self.dx if place is None or self.dx is None else gather(self.dx, place)
        self.dx = None
        dweight, dbias = self._take_dweight(), self.dbias
        dbias = dbias if dbias is None or bias_dtype is None else dbias.to(bias_dtype)
        return None if dx is None else dx.to(x.dtype), dweight, dbias


def stash(ctx: Any, gradients: Sequence[Tensor | None], weight: Tensor | None = None) -> None:
    """In a forward: stores dx, dweight, dbias and a factor (None: 1) for `release` in the backward.

    weight: given where dweight may be added to its .grad in place.
    """
    ctx.gradients = ctx.weight = None
    if torch.compiler.is_compiling():
        ctx.save_for_backward(*gradients)
    else:
        # save_for_backward would keep references, and autograd would then copy dweight into weight.grad.
        ctx.gradients = gradients
        ctx.weight = weight if weight is not None and is_marked(weight) else None


def release(ctx: Any, upstream: Tensor, op: str) -> list[Tensor | None]:
    """In the backward of `op`, once: dx, dweight and dbias of the forward, times upstream and factor.

    dweight is None if it was added to the .grad of the weight given to `stash`. Autograd casts each to its input's
    dtype.
    """
    if torch.compiler.is_compiling():
        *gradients, factor = ctx.saved_tensors
        factor = upstream if factor is None else upstream * factor
        return [None if t is None else t * factor for t in gradients]
    if ctx.gradients is None:
        raise RuntimeError(
            f"{op} computes its gradients in forward and releases them in backward, so a second backward through the "
            "same loss is not possible: compute the loss again."
        )
    dx, dweight, dbias, factor = ctx.gradients
    ctx.gradients = None
    factor = upstream if factor is None else upstream * factor
    dx, dbias = (None if t is None else scale_(t, factor) for t in (dx, dbias))
    if dweight is not None:
        dweight = scale_(dweight, factor) if ctx.weight is None else accumulate_grad(ctx.weight, dweight, factor)
    return [dx, dweight, dbias]


_SCHEMA = {
    Tensor: "Tensor", Tensor | None: "Tensor?", int: "int", int | None: "SymInt?", float: "float",
    float | None: "float?", bool: "bool", str: "str", torch.dtype: "ScalarType",
}  # fmt: skip


class Opaque:
    """Calls `run`, which torch.compile sees as one opaque custom op.

    Traced, the chunks would be unrolled for one number of tokens, and addmm with out_dtype cannot be traced at all
    (pytorch/pytorch#163880). The schema follows from the annotations of run's arguments without a default; tuples are
    passed element by element. like(*args): empty tensors like the results of run(*args), None where those are None,
    which a custom op cannot return.
    """

    def __init__(self, name: str, run: Callable, like: Callable):
        self.run, self.like, self.groups = run, like, []
        fields: list[str] = []
        for argument in inspect.signature(run).parameters.values():
            kind = argument.annotation
            if argument.default is not argument.empty:
                break
            is_named = hasattr(kind, "_fields")
            kinds = list(kind.__annotations__.values()) if is_named else get_args(kind) if kind not in _SCHEMA else None
            make = None if kinds is None else kind._make if is_named else tuple
            self.groups.append((make, len(kinds or [kind])))
            fields += [f"{_SCHEMA[each]} {argument.name}_{i}" for i, each in enumerate(kinds or [kind])]
        self.op = torch.library.custom_op(
            f"ligermodels::{name}", lambda *flat: _present(run(*self._nested(flat))), mutates_args=(),
            schema=f"({', '.join(fields)}) -> Tensor[]",
        )  # fmt: skip
        self.op.register_fake(lambda *flat: _present(like(*self._nested(flat))))

    def _nested(self, flat: Sequence[Any]) -> list[Any]:
        values = iter(flat)
        return [
            next(values) if make is None else make([next(values) for _ in range(count)]) for make, count in self.groups
        ]

    def __call__(self, *args: Any) -> Any:
        if not torch.compiler.is_compiling():
            return self.run(*args)
        outputs = iter(self.op(*[each for x in args for each in (x if isinstance(x, tuple) else (x,))]))
        return [None if t is None else next(outputs) for t in self.like(*args)]


def _present(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    """The tensors that are not None, each at the start of its memory, since Inductor assumes that it is aligned."""
    return [t.clone() if t.storage_offset() else t for t in tensors if t is not None]


def check_head(
    x: Tensor, weight: Tensor, bias: Tensor | None, num_valid: int | None, accum_dtype: torch.dtype | None,
    workspace_bytes: int,
) -> torch.dtype:  # fmt: skip
    """The dtype of the matmuls; raises InputError where x [..., H], weight [V, H] and bias [V] do not fit."""
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1] or weight.device != x.device:
        raise InputError(
            f"weight {tuple(weight.shape)} on {weight.device} does not fit x {tuple(x.shape)} on {x.device}; expected "
            "[V, H] there, for x [..., H]."
        )
    vocab = weight.shape[0]
    if bias is not None and (bias.shape != (vocab,) or bias.device != x.device):
        raise InputError(f"bias {tuple(bias.shape)} on {bias.device} must be [{vocab}] on {x.device}.")
    dtype = x.dtype
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and not parameter.is_floating_point():
            raise InputError(f"{name} is {parameter.dtype}; beside x it must be floating point.")
    fp64 = torch.float64 in (dtype, weight.dtype)
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type) and not fp64:
        dtype = torch.get_autocast_dtype(x.device.type)
    elif weight.dtype != dtype:
        raise InputError(f"x is {dtype} and weight {weight.dtype}: cast one, or use torch.autocast.")
    elif bias is not None and bias.dtype != dtype:
        raise InputError(f"x is {dtype} and bias {bias.dtype}: cast one, or use torch.autocast.")
    if accum_dtype not in (None, torch.float32):
        raise InputError(f"accum_dtype={accum_dtype}; use torch.float32, or None for the dtype of weight.")
    if workspace_bytes <= 0 or (num_valid is not None and num_valid < 0):
        raise InputError(f"workspace_bytes={workspace_bytes} must be positive and num_valid={num_valid} not negative.")
    return dtype
