"""The table of a model's names on disk; loading weights and exporting them.

The weights are what `named_weights` yields: parameters, and buffers that are persistent, such as a scale that is not
trained. A buffer is checked, loaded, drawn, moved and saved as a parameter is; FSDP2 and tensor parallelism leave it
whole on each rank. A weight has the same name on disk, unless the table of its architecture has another:

    {"model.layers.{i}.mlp.gate.weight": "model.layers.{i}.block_sparse_moe.gate.weight",
     "model.layers.{i}.mlp.experts.gate_up_proj": (EXPERT + "w1.weight", EXPERT + "w3.weight"),  # EXPERT has {i}, {e}
     "model.visual.{rest}": "visual.{rest}"}

`{i}` is a layer's number, `{w}` is weight or bias, `{rest}` is the rest of the name, and on disk `{layers}` is how many
layers there are. Keys match whole names; the first that matches counts. Sources with `{e}` are stacked on dim 0. A
tuple splits the rows into equal parts, in order. Names of tensors with another order of rows, or with the last two dims
swapped, are in a `Rearranged`:

    {EXPERTS + "gate_up_proj": Rearranged(  # ours is [E, 2 I, H]: all of gate, then up; on disk [E, H, 2 I]: in turn
        EXPERTS + "gate_up_proj", order=lambda rows, config: to_halves(rows, 1), dim=1, transposed=True)}

The table is read as regions: "this box of our weight is that tensor on disk". Loading copies into the box, saving reads
it, both by one order of the rows. So there is no inverse to get wrong, and what was loaded is saved with the same bits.
"""

import contextlib
import functools
import math
import re
import warnings
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ligermodels.checkpoint import transfer
from ligermodels.errors import CheckpointError, InputError


@dataclass(frozen=True)
class Rearranged:
    """Names on disk, as in a table, of tensors that are stored in another order; each is rearranged by itself.

    order: (a tensor of rows on disk, the config of the model) -> the same rows in our order, such as
        `lambda rows, config: to_halves(rows, config.num_attention_heads)`. It is called with the numbers of the rows.
    dim: of the rows, in our box: 1 for those of stacked experts.
    transposed: on disk, the last two dims are swapped.
    """

    names: str | tuple[str, ...]
    order: Callable[[Tensor, Any], Tensor] | None = None
    dim: int = 0
    transposed: bool = False


Table = Mapping[str, str | tuple[str, ...] | Rearranged]
"""{pattern of our names: names on disk}. With an empty table, all names are the same on disk."""

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_PLACEHOLDERS = {"{i}": r"(?P<i>\d+)", "{w}": "(?P<w>weight|bias)", "{rest}": "(?P<rest>.+)"}
_Steps = Generator[tuple[int, list[str]], None, None]
_WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


@dataclass(frozen=True)
class TensorInfo:
    """The dtype and shape of a tensor, from a header."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class Names:
    """How the weights of a model are named on disk.

    table: of the names that are written. also: tables of other layouts, which are read as well.
    ignore: regular expressions; other names on disk in which one is found are allowed.
    tied: {name on disk: our parameter}: it may be missing on disk; if it is there, it is a copy of that parameter.
    """

    table: Table
    also: tuple[Table, ...] = ()
    ignore: tuple[str, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)

    def found(self, model: nn.Module, headers: Mapping[str, TensorInfo]) -> Self:
        """With the one of the tables that has the most names in a checkpoint; in a tie, the one that has the most
        shapes there, or else the first."""
        if not self.also:
            return self
        tables, wholes = (self.table, *self.also), _wholes(model)
        counts = []
        for table in tables:
            stored = [region for region in regions(model, table) if region.source in headers]
            fitting = [x for x in stored if x.shape(wholes[x.param]) == headers[x.source].shape]
            counts.append((len(stored), len(fitting)))
        return replace(self, table=tables[counts.index(max(counts))], also=())


class Reader(Protocol):
    """An open checkpoint. source: its path, for messages. headers: of all tensors, in file order."""

    @property
    def source(self) -> str: ...

    @property
    def headers(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str) -> Tensor:
        """The tensor on the CPU, mapped from the file where possible. It must not be written to."""


@dataclass(frozen=True)
class Region:
    """Box `index` of our weight `param` is the tensor `source` on disk; `()` is the whole weight.

    order: row i of the box, along `dim`, is row order[i] on disk. transposed: on disk, the last two dims are swapped.
    """

    param: str
    index: tuple[int | slice, ...]
    source: str
    order: Tensor | None = field(default=None, compare=False)
    dim: int = 0
    transposed: bool = False

    @property
    def is_rearranged(self) -> bool:
        return self.order is not None or self.transposed

    def shape(self, whole: Iterable[int]) -> tuple[int, ...]:
        """The shape on disk. whole: that of the weight."""
        shape = _box_shape(whole, self.index)
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape

    def from_disk(self, stored: Tensor, part: tuple[slice, ...] = ()) -> Tensor:
        """Part `part` of the box, by default all of it. stored: the tensor on disk; no other rows of it are read."""
        box = stored.transpose(-2, -1) if self.transposed else stored
        if self.order is None:
            return box[part]
        rows = self.order[part[self.dim]] if part else self.order
        others = tuple(slice(None) if dim == self.dim else at for dim, at in enumerate(part))
        return box[others].index_select(self.dim, rows.to(box.device))

    def to_disk(self, box: Tensor) -> Tensor:
        """The tensor on disk, from the box."""
        if self.order is not None:
            box = box.index_select(self.dim, self.order.argsort().to(box.device))
        return box.transpose(-2, -1) if self.transposed else box


def plain_name(name: str) -> str:
    """The name without the prefixes of DDP, FSDP, torch.compile, activation checkpointing and PEFT."""
    plain = ".".join(word for word in name.split(".") if word not in _WRAPPERS).removeprefix("base_model.model.")
    return plain or name


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of all that a checkpoint holds: the parameters, then the persistent buffers."""
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}".removeprefix("."), buffer


def to_halves(weight: Tensor, heads: int) -> Tensor:
    """Permutes rows [heads * D, ...] of q or k from a rotation of neighbouring rows to a rotation of halves."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(weight.shape)


def to_pairs(weight: Tensor, heads: int) -> Tensor:
    """The inverse of `to_halves`."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)


def regions(model: nn.Module, table: Table) -> list[Region]:
    """The regions that tile every weight of `model`, which may be on the meta device.

    Raises ValueError if two regions name one tensor, a weight cannot be split into its sources, or an order is none of
    its rows.
    """
    patterns = [(_pattern(ours), theirs) for ours, theirs in table.items()]
    by_source: dict[str, Region] = {}
    parts, config = row_parts(model), getattr(model, "config", None)
    layers = getattr(config, "num_hidden_layers", None)
    order_of = functools.cache(functools.partial(_order, config=config))
    for name, param in named_weights(model):
        plain = plain_name(name)
        shape = _shape(param, parts.get(plain))
        hits = ((match, theirs) for pattern, theirs in patterns if (match := pattern.fullmatch(plain)))
        match, theirs = next(hits, (None, plain))
        groups = match.groupdict() if match else {}
        row = theirs if isinstance(theirs, Rearranged) else Rearranged(theirs)
        sources = (row.names,) if isinstance(row.names, str) else row.names
        stacked = "{e}" in sources[0]
        rows, remainder = divmod(shape[int(stacked)], len(sources)) if len(sources) > 1 else (0, 0)
        if remainder:
            raise ValueError(f"{name} {list(shape)} cannot be split into {len(sources)} equal parts")
        for expert in range(shape[0]) if stacked else [None]:
            for k, source in enumerate(sources):
                index: tuple[int | slice, ...] = () if expert is None else (expert,)
                index += (slice(k * rows, (k + 1) * rows),) if rows else ()
                on_disk = source.format(**groups, e=expert, layers=layers) if match else plain
                plainly = row.order is None and not row.transposed
                order = None if plainly else order_of(row, name, _box_shape(shape, index))
                region = Region(name, index, on_disk, order, row.dim, row.transposed)
                if by_source.setdefault(region.source, region) is not region:
                    raise ValueError(f"the names on disk put {region.source} in two places")
    return list(by_source.values())


def names_on_disk(name: str, table: Table) -> tuple[str, ...]:
    """The names on disk of the parts of a weight, with {e} for the number of an expert; () for another order there."""
    for ours, theirs in table.items():
        if match := _pattern(ours).fullmatch(name):
            sources = () if isinstance(theirs, Rearranged) else (theirs,) if isinstance(theirs, str) else theirs
            return tuple(source.format(**match.groupdict(), e="{e}") for source in sources)
    return (name,)


def _order(row: Rearranged, name: str, shape: tuple[int, ...], config: Any) -> Tensor | None:
    """The order of the rows of a box of `shape`. Raises ValueError for one that does not fit the box."""
    if len(shape) < max(row.dim + 1, 2 * row.transposed):
        raise ValueError(f"{name}: a box {list(shape)} of it has too few dims for {row}")
    if row.order is None:
        return None
    rows = torch.arange(shape[row.dim], device="cpu")
    order = row.order(rows, config)
    if not (order.shape == rows.shape and order.sort().values.equal(rows)):
        raise ValueError(f"{name}: the order of {row.names} in the table is no permutation of its {len(rows)} rows")
    return order


def check(model: nn.Module, names: Names, headers: Mapping[str, TensorInfo], where: str = "the checkpoint") -> None:
    """Compares names, shapes and dtypes of the model, which may be on meta, with the headers of a checkpoint.

    Raises CheckpointError with the names that do not fit and a likely cause, and the error of `check_buffers`.
    """
    check_buffers(model)
    wholes = _wholes(model)
    expected = {box.source: box.shape(wholes[box.param]) for box in regions(model, names.table)}
    copies = {name: wholes[ours] for name, ours in names.tied.items()}
    shapes = {name: shape for name, shape in {**copies, **expected}.items() if name in headers}
    missing = [name for name in expected if name not in headers]
    skip = re.compile("|".join(names.ignore) or "(?!)")
    unexpected = [name for name in headers if name not in shapes and not skip.search(name)]
    misshapen = [name for name, shape in shapes.items() if headers[name].shape != shape]
    lists = {
        "missing": missing,
        "unexpected": unexpected,
        "wrong shape": [f"{n} is {list(headers[n].shape)}, the model has {list(shapes[n])}" for n in misshapen],
        "quantised": [f"{name} is {headers[name].dtype}" for name in shapes if headers[name].dtype not in FLOATS],
    }
    of = {"missing": f" of {len(expected)}"}
    if lines := [f"{what} ({len(x)}{of.get(what, '')}): {_some(x)}" for what, x in lists.items() if x]:
        guess = f"Likely: {_guess(expected, headers, missing, unexpected, misshapen)}"
        raise CheckpointError("\n  ".join([f"{where} does not match {type(model).__name__}.", *lines, guess]))


def _some(names: list[str]) -> str:
    """The first three names."""
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)


def check_buffers(model: nn.Module) -> None:
    """Raises InputError for a persistent buffer of integers, which a cast to the dtype of the weights would change."""
    for name, weight in named_weights(model):
        if not isinstance(weight, nn.Parameter) and weight.dtype not in FLOATS:
            raise InputError(
                f"{name} is a buffer of {weight.dtype}, and a checkpoint holds floats alone: make it a float, or "
                "register it with persistent=False and compute it in _apply"
            )


def check_tied(model: nn.Module, names: Names, reader: Reader) -> None:
    """Raises CheckpointError if a tied copy on disk differs from its parameter."""
    copies = {name: param for name, param in names.tied.items() if name in reader.headers}
    sources = {region.param: region.source for region in regions(model, names.table)} if copies else {}
    for name, param in copies.items():
        if not same_bits(reader.read(name), reader.read(sources[param])):
            raise CheckpointError(
                f"{reader.source}: {name} differs from {sources[param]}, though the config ties the two.\n"
                "  Likely: the head was trained or merged without the embedding. Then set "
                f"tie_word_embeddings to false in config.json; or, to drop this head, delete {name} on disk."
            )


def load(
    model: nn.Module,
    names: Names,
    reader: Reader,
    *,
    device: torch.device | str,
    progress: bool = True,
    adopt: bool = False,
    leave: Container[str] = (),
) -> None:
    """Allocates the weights of `model`, all on the meta device, on `device`, and reads their values.

    progress: show a bar over bytes on stderr if that is a terminal.
    adopt: on the CPU, a tensor of the weight's dtype and shape becomes the weight itself. Nothing else may use
        its memory, as with a mapped safetensors file. So without a GPU, one copy of the weights is in memory.
    leave: weights that stay on the meta device.
    `check` and `check_tied` run first. A reader with `locate` is copied to a GPU through transfer.py. Otherwise one
    tensor at a time is copied, in file order, so host memory beyond the model stays below the largest tensor. Only the
    local part of a sharded parameter (DTensor) is filled, and only that part of a mapped file is read. Weights with NaN
    or infinity are loaded, with one warning that names them.
    Raises CheckpointError, and the error of `allocate`.
    """
    names = names.found(model, reader.headers)
    check(model, names, reader.headers, reader.source)
    check_tied(model, names, reader)
    boxes = {region.source: region for region in regions(model, names.table) if region.param not in leave}
    adopted: dict[str, Tensor] = {}
    if adopt and torch.device(device).type == "cpu":
        params = dict(named_weights(model))
        for name, box in boxes.items():
            param, is_part = params[box.param], bool(box.index or box.is_rearranged)
            if is_part or _is_sharded(param) or reader.headers[name].dtype != param.dtype:
                continue
            if (tensor := reader.read(name)).data_ptr() % tensor.element_size() == 0:
                adopted[box.param] = tensor
    allocate(model, device, adopted, leave)
    params = dict(named_weights(model))
    order = [name for name in reader.headers if name in boxes]
    extremes: dict[str, list[Tensor]] = {}
    with torch.no_grad():
        rows, parts = row_parts(model), {}
        for name in order:
            box = boxes[name]
            parts[name] = list(_parts(params[box.param], box.index, rows.get(plain_name(box.param))))
        place = next((memory.device for targets in parts.values() for memory, _ in targets), torch.device("cpu"))
        locate: Callable[[str], transfer.Stored] | None = getattr(reader, "locate", None)
        if locate is not None and transfer.serves(place):
            # The buffers move boxes as they are on disk; what is in another order there is copied by the host.
            parts_of_host = {name: parts[name] for name in order if boxes[name].is_rearranged}
            through = [name for name in order if name not in parts_of_host]
            wanted = [transfer.Part(name, locate(name), at, to) for name in through for to, at in parts[name]]
            blocks = transfer.plan(wanted, transfer.SETTINGS)
            total, steps = sum(block.nbytes for block in blocks), transfer.run(blocks, place, transfer.SETTINGS)
        else:
            parts_of_host, total, steps = parts, 0, None
        total += sum(reader.headers[name].nbytes for name in parts_of_host)
        steps = _in_turn(steps, _copy(reader, boxes, parts_of_host, adopted))
        disable = None if progress else True  # None: unless stderr is a terminal
        bar = tqdm(None, "Loading weights", total, unit="B", unit_scale=True, disable=disable)
        with bar, contextlib.closing(steps):
            for nbytes, complete in steps:
                for name in complete:  # NaN is an extreme too, and this makes no copy
                    extremes[name] = [extreme for memory, _ in parts[name] for extreme in memory.aminmax()]
                bar.update(nbytes)
    _warn_of_nan({name: extremes[name] for name in order if extremes.get(name)}, reader.source)


def _copy(
    reader: Reader,
    boxes: Mapping[str, Region],
    parts: Mapping[str, list[tuple[Tensor, tuple[slice, ...]]]],
    adopted: Container[str],
) -> _Steps:
    """Fills {name on disk: [(memory, its part of the box)]}, but the weights `adopted`; yields (bytes, [name]) for each
    tensor."""
    for name, targets in parts.items():
        for memory, part in targets:
            if boxes[name].param not in adopted:
                memory.copy_(boxes[name].from_disk(reader.read(name), part))
        yield reader.headers[name].nbytes, [name]


def _in_turn(*steps: _Steps | None) -> _Steps:
    for some in steps:
        if some is not None:
            yield from some


def allocate(
    model: nn.Module,
    device: torch.device | str,
    adopted: Mapping[str, Tensor] | None = None,
    leave: Container[str] = (),
) -> None:
    """Gives the weights of `model`, all on the meta device, memory on `device` with arbitrary contents.

    adopted: {weight: a tensor whose memory it gets}. leave: weights that stay on meta. A DTensor gets memory for its
    local part. torch's to_empty would import sympy, which takes a while.
    Raises InputError for a module whose buffers no checkpoint holds, unless an `_apply` of its own computes them, and
    the error of `check_buffers`.
    """
    from ligermodels.layers.base import Layer  # takes half a second, and is loaded where there is a model

    check_buffers(model)
    memory: dict[int, Tensor] = {}
    for name, module in model.named_modules():
        lost = [key for key in module._non_persistent_buffers_set if module._buffers[key] is not None]
        if lost and type(module)._apply in (nn.Module._apply, Layer._apply):
            raise InputError(
                f"{name}.{lost[0]} is a buffer that no checkpoint holds, and nothing computes it again on its device: "
                f"make it persistent, or give {type(module).__name__} an _apply that does"
            )
    for name, param in named_weights(model):
        assert param.is_meta, f"only models on the meta device are filled; {name} is on {param.device}"
        if name in leave:
            memory[id(param)] = param
        elif adopted and name in adopted:
            memory[id(param)] = adopted[name]

    def with_memory(x: Tensor) -> Tensor:
        if id(x) in memory:
            return memory[id(x)]
        if _is_sharded(x):
            return torch.empty_like(x, device=device)
        return torch.empty(x.shape, dtype=x.dtype, device=device)

    model._apply(with_memory)


def fill(param: Tensor, draw: Callable[[Tensor], object], rows: Sequence[int] | None = None) -> None:
    """Has `draw` write the values of `param`.

    For a DTensor, `draw` writes the whole parameter in other memory, and its local part is copied: ranks with the same
    generator get the parts of what one process draws. rows: the `row_parts` of the parameter.
    """
    if not _is_sharded(param):
        draw(param)
        return
    whole = torch.empty(_shape(param, rows), dtype=param.dtype, device=_local(param).device)
    draw(whole)
    for values, index in _parts(param, (), rows):
        values.copy_(whole[index])


class Draw:
    """Draws weights, as `layers.base.Draw` says. std: of weights."""

    def __init__(self, generator: torch.Generator, std: float):
        self.generator, self.std, self.drawn = generator, std, set[int]()

    def __call__(
        self,
        parameter: Tensor | None,
        write: Callable[[Tensor, torch.Generator], object] | None = None,
        row_parts: Sequence[int] | None = None,
    ) -> None:
        if parameter is None:
            return
        self.drawn.add(id(parameter))

        def draw(values: Tensor) -> object:
            if write is not None:
                return write(values, self.generator)
            return values.normal_(0.0, self.std, generator=self.generator)

        fill(parameter, draw, row_parts)


def row_parts(model: nn.Module) -> dict[str, Sequence[int]]:
    """{name of a parameter: numbers of rows of its parts}, where tensor parallelism splits each of several parts.

    Such a parameter [R, ...] is a DTensor [R/n, n, ...] over n ranks, see `layers.parallel.to_dtensor`. The attribute
    `row_parts` of a module is that of its weight and of its bias.
    """
    modules = ((path, getattr(module, "row_parts", None)) for path, module in model.named_modules())
    names = ("weight", "bias")
    return {plain_name(f"{path}.{name}"): parts for path, parts in modules if parts for name in names}


def export(
    model: nn.Module,
    names: Names,
    state_dict: Mapping[str, Tensor] | None = None,
    rows: Mapping[str, Sequence[int]] | None = None,
) -> "Exported":
    """The weights of `model` under their names on disk, each a view of the one in memory.

    state_dict: {name of a weight: tensor}, saved instead of the model's own; names may have a wrapper's prefixes.
        The model then gives names and shapes only and may be on the meta device. A tied copy in it is dropped.
    rows: the `row_parts` of the parameters in it.
    Raises CheckpointError for names or shapes that are not the model's, for a tied copy that differs, and for weights
    that are quantised or have no local memory.
    """
    params = named_weights(model) if state_dict is None else state_dict.items()
    tensors = {plain_name(name): tensor.detach() for name, tensor in params}
    for name, ours in names.tied.items():
        copy, original = tensors.pop(name, None), tensors.get(plain_name(ours))
        if copy is not None and original is not None and not same_bits(_local(copy), _local(original)):
            raise CheckpointError(f"{name} differs from {ours}, though the config ties the two; untie them, or drop it")
    rows = row_parts(model) if rows is None else rows
    _check_saveable(model, tensors, rows)
    pairs = [(r, plain_name(r.param)) for r in regions(model, names.table)]
    boxes = {region.source: (tensors[name], region.index) for region, name in pairs}
    of_parts = {region.source: rows[name] for region, name in pairs if name in rows}
    return Exported(boxes, of_parts, {region.source: region for region, _ in pairs if region.is_rearranged})


class Exported:
    """A `Reader` of tensors in memory. Iterating gives (name, tensor).

    boxes: {name: (tensor, index of the part with this name)}. A sharded tensor (DTensor) is gathered when it is read,
    so every rank has to read all of them in the same order. The last one is cached for its next box. rows: {name:
    `row_parts` of its tensor}. rearranged: {name: its region}, of those that are in another order on disk.
    """

    source = "the model"

    def __init__(
        self,
        boxes: Mapping[str, tuple[Tensor, tuple[int | slice, ...]]],
        rows: Mapping[str, Sequence[int]] | None = None,
        rearranged: Mapping[str, Region] | None = None,
    ):
        self.boxes, self._rows, self._rearranged = boxes, rows or {}, rearranged or {}
        self.headers: dict[str, TensorInfo] = {}
        for name, (x, index) in boxes.items():
            region = self._rearranged.get(name, Region(name, index, name))
            self.headers[name] = TensorInfo(x.dtype, region.shape(_shape(x, self._rows.get(name))))
        self._gathered: tuple[Any, Tensor] | None = None

    def add(
        self,
        boxes: Mapping[str, tuple[Tensor, tuple[int | slice, ...]]],
        rearranged: Mapping[str, Region] | None = None,
    ) -> None:
        """Adds tensors that are none of the model's weights. rearranged: regions that are in another order on disk."""
        self.boxes, self._rearranged = {**self.boxes, **boxes}, {**self._rearranged, **(rearranged or {})}
        for name, (x, index) in boxes.items():
            region = self._rearranged.get(name, Region(name, index, name))
            self.headers[name] = TensorInfo(x.dtype, region.shape(_shape(x)))

    def read(self, name: str) -> Tensor:
        tensor: Any
        tensor, index = self.boxes[name]
        if _is_sharded(tensor):
            if self._gathered is None or self._gathered[0] is not tensor:
                self._gathered = None
                self._gathered = tensor, whole_tensor(tensor, self._rows.get(name))
            tensor = self._gathered[1]
        region = self._rearranged.get(name)
        return tensor[index] if region is None else region.to_disk(tensor[index])

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, self.read(name)) for name in self.headers)


class Renamed:
    """A `Reader` of a checkpoint with other names.

    stored: the table of the names on disk, with which `check` has passed. wanted: the table of the names to show.
    A tensor that is joined from several has the dtype that holds all of them.
    """

    def __init__(self, model: nn.Module, reader: Reader, stored: Table, wanted: Table):
        self.source, self._reader = reader.source, reader
        self._stored: dict[str, list[Region]] = {}
        for region in regions(model, stored):
            self._stored.setdefault(region.param, []).append(region)
        self._wanted = {region.source: region for region in regions(model, wanted)}
        self._shapes = {name: param.shape for name, param in named_weights(model)}

    @functools.cached_property
    def headers(self) -> Mapping[str, TensorInfo]:
        """Computed on demand: if tensors are missing on disk, the others can still be read."""
        return {name: self._info(name) for name in self._wanted}

    def boxes(self, name: str) -> list[Region]:
        """The tensors on disk that `name` is read from."""
        boxes = self._stored[self._wanted[name].param]
        return [box for box in boxes if box.index == self._wanted[name].index] or boxes

    def read_boxes(self, name: str) -> Iterator[Tensor]:
        """The boxes that `name` consists of, one by one, in the order of its rows."""
        return (box.from_disk(self._reader.read(box.source)) for box in self.boxes(name))

    def read(self, name: str) -> Tensor:
        """A tensor that is a part of one on disk, or joined from several, takes the memory of all of it."""
        region, boxes = self._wanted[name], self.boxes(name)
        if len(boxes) == 1:
            (tensor,) = self.read_boxes(name)
            return region.to_disk(tensor if boxes[0].index == region.index else tensor[region.index])
        whole = torch.empty(self._shapes[region.param], dtype=self._info(name).dtype)
        for box, tensor in zip(boxes, self.read_boxes(name), strict=True):
            whole[box.index].copy_(tensor)
        return region.to_disk(whole[region.index])

    def _info(self, name: str) -> TensorInfo:
        dtypes = [self._reader.headers[box.source].dtype for box in self.boxes(name)]
        shape = self._wanted[name].shape(self._shapes[self._wanted[name].param])
        return TensorInfo(functools.reduce(torch.promote_types, dtypes), shape)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree in shape, dtype and every bit: NaN equals itself, -0.0 is not 0.0."""
    alike = a.shape == b.shape and a.dtype == b.dtype
    return alike and torch.equal(*(x.reshape(-1).view(torch.uint8) for x in (a, b)))


def _pattern(ours: str) -> re.Pattern[str]:
    pieces = re.split(r"(\{\w+\})", ours)
    return re.compile("".join(_PLACEHOLDERS.get(piece, re.escape(piece)) for piece in pieces))


def _is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor; importing the class takes half a second."""
    return hasattr(tensor, "full_tensor")


def whole_tensor(tensor: Any, rows: Sequence[int] | None = None) -> Tensor:
    """The whole of a DTensor, in the shape of a checkpoint; all ranks call this. rows: its `row_parts`."""
    whole = tensor.full_tensor()
    if rows is not None:  # of each part the rows of all ranks
        parts = whole.transpose(0, 1).split([part // whole.shape[1] for part in rows], 1)
        whole = torch.cat([part.flatten(0, 1) for part in parts])
    return whole.reshape(_shape(tensor, rows))


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if _is_sharded(tensor) else tensor


def _shape(param: Tensor, rows: Sequence[int] | None = None) -> tuple[int, ...]:
    """The shape of the whole parameter in a checkpoint. rows: its `row_parts`.

    Under ZeRO-3, DeepSpeed leaves an empty tensor in its place. Tensor parallelism stores the gate and up projections
    of experts, [E, 2 I, H] on disk, as a DTensor [E, 2, I, H], so that each rank has rows of both, and their biases,
    [E, 2 I], as [E, 2, I].
    """
    shape = tuple(getattr(param, "ds_shape", param.shape))
    if rows is not None and _is_sharded(param):
        return sum(rows), *shape[2:]
    return (shape[0], 2 * shape[2], *shape[3:]) if _holds_gate_and_up(param) else shape


def _wholes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """{weight: its shape in a checkpoint}."""
    rows = row_parts(model)
    return {name: _shape(param, rows.get(plain_name(name))) for name, param in named_weights(model)}


def _holds_gate_and_up(param: Any) -> bool:
    """Whether it is a DTensor [E, 2, I, ...], of which tensor parallelism has split dim 2."""
    if not _is_sharded(param) or param.ndim not in (3, 4) or param.shape[1] != 2:
        return False
    return any(getattr(placement, "dim", None) == 2 for placement in param.placements)


def _parts(
    param: Any, index: tuple[int | slice, ...], rows: Sequence[int] | None = None
) -> Iterator[tuple[Tensor, tuple[slice, ...]]]:
    """(memory, its index in the box) for each local part of box `index` of `param`. rows: its `row_parts`."""
    if not _is_sharded(param):
        yield param[index], ()
        return
    shape = _shape(param, rows)
    for start, local in _local_boxes(param, rows):
        here: list[int | slice] = []
        there: list[slice] = []
        for dim, (first, size, whole) in enumerate(zip(start, local.shape, shape, strict=True)):
            at = index[dim] if dim < len(index) else slice(None)
            low, high, _ = (at if isinstance(at, slice) else slice(at, at + 1)).indices(whole)
            begin, end = max(low, first), min(high, first + size)
            if begin >= end:
                break
            if isinstance(at, slice):
                here.append(slice(begin - first, end - first))
                there.append(slice(begin - low, end - low))
            else:
                here.append(at - first)
        else:
            yield local[tuple(here)], tuple(there)


def _local_boxes(param: Any, rows: Sequence[int] | None = None) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """(offsets in the whole parameter, of shape `_shape`; memory) of each local box of a DTensor."""
    local = _local(param.detach())
    if local.numel() == 0:
        return
    # torch's own checkpoints use it. It handles FSDP2 over tensor parallelism (_StridedShard) and uneven shards.
    (chunk,) = param.__create_chunk_list__()
    assert chunk.sizes == local.shape, f"{param.placements}: {list(local.shape)} here, {list(chunk.sizes)} expected"
    start = tuple(chunk.offsets)
    if rows is not None:
        yield from _boxes_of_rows(start, local, param.shape[1], rows)
        return
    if not _holds_gate_and_up(param):
        yield start, local
        return
    expert, half, row, *rest = start
    for k in range(local.shape[1]):
        yield (expert, (half + k) * param.shape[2] + row, *rest), local[:, k]


def _boxes_of_rows(
    start: tuple[int, ...], local: Tensor, ranks: int, rows: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """The boxes of `local` [r, k, ...], which is at `start` of a DTensor [R/n, n, ...]: its rows of each part."""
    first, rank, *rest = start
    before = here = 0  # rows of the parts before: of the whole, and of a rank
    for part in rows:
        share = part // ranks
        low, high = max(first, here), min(first + len(local), here + share)
        if low < high:
            for k in range(local.shape[1]):
                yield (before + (rank + k) * share + low - here, *rest), local[low - first : high - first, k]
        before, here = before + part, here + share


def _box_shape(shape: Iterable[int], index: tuple[int | slice, ...]) -> tuple[int, ...]:
    return tuple(torch.empty(tuple(shape), device="meta")[index].shape)


def _check_saveable(model: nn.Module, tensors: Mapping[str, Tensor], rows: Mapping[str, Sequence[int]]) -> None:
    """Raises CheckpointError if `tensors`, by name, are not the weights of `model` in plain floats."""
    params = ((plain_name(name), param) for name, param in named_weights(model))
    expected = {name: _shape(param, rows.get(name)) for name, param in params}
    adapters = [name for name in tensors if re.search(r"\.lora_|\.base_layer\.|\.modules_to_save\.", name)]
    extra = adapters or [name for name in tensors if name not in expected]
    missing = [name for name in expected if name not in tensors]
    if missing or extra:
        likely = "the state dict of another model, or of a part of this one"
        if adapters:
            likely = "adapters in the model; merge them first (merge_lora, or merge_and_unload of PEFT), or save them "
            likely += "alone (save_adapter)"
        elif any("_flat_param" in name for name in (*missing, *extra)):
            likely = "a model in FSDP1; pass its whole state dict as state_dict="
        lists = {"missing": missing, "not the model's": extra}
        lines = [f"{what} ({len(names)}): {_some(names)}" for what, names in lists.items() if names]
        raise CheckpointError("\n  ".join(["The weights cannot be saved.", *lines, f"Likely: {likely}."]))
    whole = "Pass state_dict= with whole tensors, as accelerator.get_state_dict(model) gives them"
    for name, tensor in tensors.items():
        problem = ""
        if type(_local(tensor)) is not Tensor or tensor.dtype not in FLOATS:
            kind = f"{type(tensor).__name__} of {tensor.dtype}"
            problem = f"is quantised ({kind}). Save the model that it was made from"
        elif tensor.is_meta:
            problem = f"has no memory in this process: it is offloaded, or was never loaded. {whole}"
        elif _shape(tensor, rows.get(name)) != expected[name]:
            problem = f"is {list(tensor.shape)}, the model has {list(expected[name])}. {whole}"
        if problem:
            raise CheckpointError(f"The weights cannot be saved: {name} {problem}.")


def _warn_of_nan(extremes: Mapping[str, list[Tensor]], where: str) -> None:
    """extremes: {name on disk: minimum and maximum of each part}, on one device. Synchronises once."""
    if not extremes:
        return
    finite = iter(torch.stack([value for values in extremes.values() for value in values]).isfinite().tolist())
    broken = [name for name, values in extremes.items() if not all([next(finite) for _ in values])]
    if broken:
        warnings.warn(
            f"{where}: {len(broken)} of {len(extremes)} tensors hold NaN or infinity: {_some(broken)}.\n"
            "  Likely: a training run that diverged, a damaged file, or a dtype with too small a range (float16 ends "
            "at 65504). The model's output will be NaN as well.",
            stacklevel=4,
        )


_SIGNS = (
    (r"\.(qweight|qzeros|scales|g_idx)$", "a GPTQ or AWQ checkpoint; use what it was quantised from."),
    (r"_(blocks|scales)$", "MXFP4; its config.json lacks the quantization_config that says so."),
    (r"\.(absmax|quant_map|SCB)$", "a bitsandbytes checkpoint; use what it was quantised from."),
    (r"weight_(scale|scale_inv|packed)$", "an FP8 or compressed checkpoint; use what it was made from."),
    (r"\.lora_[AB]\.|\.base_layer\.", "an adapter, not a whole model; merge it into its base model first."),
    (r"\.attention\.w[qkvo]\.|^tok_embeddings\.", "Meta's or Mistral's own layout; use the other one."),
    (r"\b(qkv_proj|gate_up_proj)\.", "joint projections on disk, as in Phi-3: another model_type."),
)  # fmt: skip
"""(pattern of an unexpected name, what the checkpoint is)."""


def _guess(
    expected: Mapping[str, tuple[int, ...]],
    headers: Mapping[str, TensorInfo],
    missing: list[str],
    unexpected: list[str],
    misshapen: list[str],
) -> str:
    """The likely cause of a difference."""
    for pattern, meaning in _SIGNS:
        if any(re.search(pattern, name) for name in unexpected):
            return meaning
    embedding = next((name for name in expected if name.endswith("embed_tokens.weight")), next(iter(expected)))
    for name in unexpected:
        if name.endswith("." + embedding):
            return f"a larger model that holds this one under {name.removesuffix(embedding)!r}."
        if embedding.endswith("." + name):
            return f"the bare model, saved without its head: its names lack {embedding.removesuffix(name)!r}."
    layers, wanted = _count_layers(headers), _count_layers(expected)
    if layers != wanted:
        return f"a partial copy, or another config.json: {layers} layers on disk, {wanted} expected."
    if "lm_head.weight" in missing:
        return "the head is the embedding; then set tie_word_embeddings to true in config.json."
    if embedding in misshapen and {*misshapen} <= {embedding, "lm_head.weight"}:
        return "the vocabulary was resized; set vocab_size in config.json to the embedding's rows."
    if misshapen:
        return "config.json is another model's; its hidden_size, heads or intermediate_size differ."
    return "a partial copy, or another architecture's weights; fetch it again, or correct model_type."


def _count_layers(names: Iterable[str]) -> int:
    return 1 + max((int(match[1]) for name in names if (match := re.search(r"\blayers\.(\d+)\.", name))), default=-1)
