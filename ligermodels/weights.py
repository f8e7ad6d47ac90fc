"""Parameters packed in memory, Hugging Face names on disk: one table per architecture joins the two.

    HF = "model.layers.{i}.self_attn."
    {"layers.{i}.attn.qkv_proj.{w}": (HF + "q_proj.{w}", HF + "k_proj.{w}", HF + "v_proj.{w}")}

A string renames; a tuple stacks rows in that order, as many each as the module's `parts` say; a source with
`{e}` is stacked on a new dim 0. `{i}` is a layer number, `{w}` is weight or bias. Keys match whole names.

The table is read as regions: "this box of our parameter is that tensor on disk". Loading copies into the box,
saving reads it: there is no inverse to get wrong, and Hugging Face -> ours -> Hugging Face returns the same
bits. A native checkpoint holds our names, already packed: its table is the identity.
"""

import itertools
import math
import re
import warnings
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from ligermodels.errors import CheckpointError

Table = Mapping[str, str | tuple[str, ...]]

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_PLACEHOLDERS = {"{i}": r"(?P<i>\d+)", "{w}": "(?P<w>weight|bias)"}


@dataclass(frozen=True)
class TensorInfo:
    """What a header says about a tensor, known without reading it."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


class Reader(Protocol):
    """An open checkpoint; `checkpoint.open_checkpoint` makes one."""

    @property
    def source(self) -> str:
        """Where it was read from, for messages."""

    @property
    def headers(self) -> Mapping[str, TensorInfo]:
        """Every tensor, in the order in which the files hold them."""

    @property
    def native(self) -> bool:
        """Whether the names are ours rather than Hugging Face's."""

    def read(self, name: str) -> Tensor:
        """The tensor on the CPU, mapped from the file where that is possible: not to be written to."""


@dataclass(frozen=True)
class Region:
    """Box `index` of our parameter `param` is the tensor `source` on disk; `()` is the whole parameter."""

    param: str
    index: tuple[int | slice, ...]
    source: str


def regions(model: nn.Module, table: Table) -> list[Region]:
    """The boxes that tile every parameter of `model`, which may be on the meta device.

    Raises ValueError where a parameter has no entry or several, or where two boxes name one tensor.
    """
    patterns = [(_pattern(ours), theirs) for ours, theirs in table.items()]
    found: dict[str, Region] = {}
    for name, param in model.named_parameters():
        hits = [(match, theirs) for pattern, theirs in patterns if (match := pattern.fullmatch(name))]
        if len(hits) != 1:
            raise ValueError(f"{name} matches {len(hits)} entries of the weight table, expected exactly one")
        match, theirs = hits[0]
        sources = (theirs,) if isinstance(theirs, str) else theirs
        stacked = "{e}" in sources[0]
        rows: list[tuple[slice, ...]] = [()]
        if len(sources) > 1:
            owner: Any = model.get_submodule(name.rpartition(".")[0])
            rows = _rows(name, param.shape[int(stacked)], owner.parts)
        for expert in range(param.shape[0]) if stacked else [None]:
            for source, part in zip(sources, rows, strict=True):
                index: tuple[int | slice, ...] = part if expert is None else (expert, *part)
                region = Region(name, index, source.format(**match.groupdict(), e=expert))
                if found.setdefault(region.source, region) is not region:
                    raise ValueError(f"the weight table puts {region.source} in two places")
    return list(found.values())


def identity(model: nn.Module) -> dict[str, str]:
    """The table of a native checkpoint."""
    return {name: name for name, _ in model.named_parameters()}


def layout(
    model: nn.Module, table: Table, names: Container[str], *, native: bool = False, also: Iterable[Table] = ()
) -> Table:
    """The table of a checkpoint that holds `names`: the identity if it is native, else the one that fits best.

    also: tables of other layouts in which the same architecture is found on disk. `table` wins a draw.
    """
    if native:
        return identity(model)
    found = [sum(region.source in names for region in regions(model, one)) for one in (table, *also)]
    return (table, *also)[found.index(max(found))]


def check(
    model: nn.Module,
    table: Table,
    headers: Mapping[str, TensorInfo],
    *,
    ignore: Iterable[str] = (),
    tied: Mapping[str, str] | None = None,
    where: str = "the checkpoint",
) -> None:
    """Compares names, shapes and kinds in both directions, from headers alone; `model` may be on meta.

    ignore: regular expressions, searched in the names on disk that the model has no place for.
    tied: {name on disk: our parameter}: may be absent; if present, a copy of that parameter.
    Raises CheckpointError that counts and lists what does not fit and guesses why.
    """
    params = dict(model.named_parameters())
    expected = {region.source: tuple(params[region.param][region.index].shape) for region in regions(model, table)}
    copies = {name: tuple(params[ours].shape) for name, ours in (tied or {}).items()}
    skip = [re.compile(pattern) for pattern in ignore]
    shapes = {name: shape for name, shape in {**copies, **expected}.items() if name in headers}
    missing = [name for name in expected if name not in headers]
    unexpected = [name for name in headers if name not in shapes and not any(pattern.search(name) for pattern in skip)]
    misshapen = [name for name, shape in shapes.items() if headers[name].shape != shape]
    coded = [name for name in shapes if headers[name].dtype not in FLOATS]
    lists = {
        f"missing ({len(missing)} of {len(expected)})": missing,
        f"unexpected ({len(unexpected)})": unexpected,
        f"wrong shape ({len(misshapen)})": [
            f"{name} is {list(headers[name].shape)}, the model has {list(shapes[name])}" for name in misshapen
        ],
        f"quantised ({len(coded)})": [f"{name} is {headers[name].dtype}" for name in coded],
    }
    lines = [f"{what}: {', '.join(which[:3])}{', ...' * (len(which) > 3)}" for what, which in lists.items() if which]
    if lines:
        guess = _guess(expected, headers, missing, unexpected, misshapen)
        raise CheckpointError("\n  ".join([f"{where} does not match {type(model).__name__}.", *lines, guess]))


def load(
    model: nn.Module,
    table: Table,
    reader: Reader,
    *,
    device: torch.device | str,
    dtype: torch.dtype | Literal["stored"] | None = None,
    progress: bool | Literal["force"] = True,
    ignore: Iterable[str] = (),
    tied: Mapping[str, str] | None = None,
    also: Iterable[Table] = (),
) -> None:
    """Gives the parameters of `model`, all on the meta device, their memory on `device` and their values.

    dtype: None keeps each parameter's own, "stored" takes that of the files (the wider one where the parts of
        a packed parameter differ), anything else casts.
    progress: a bar over bytes on stderr if that is a terminal; "force" shows it anyway.
    ignore, tied: as in `check`, which runs first. A tied copy must equal its parameter bit for bit.
    also: tables of other layouts that are read as well; see `layout`.
    Copies one tensor at a time in file order: host memory beyond the model stays below the largest tensor.
    A module that has buffers must rebuild them in its own `_apply`.
    Weights that hold NaN or infinity once they are in place are loaded, and named in one warning.
    Raises CheckpointError.
    """
    table = layout(model, table, reader.headers, native=reader.native, also=also)
    check(model, table, reader.headers, ignore=ignore, tied=tied, where=reader.source)
    boxes = {region.source: region for region in regions(model, table)}
    _check_tied(reader, boxes.values(), tied)
    if dtype == "stored":
        dtypes = _stored_dtypes(boxes.values(), reader)
    else:
        dtypes = {name: dtype or param.dtype for name, param in model.named_parameters()}
    _allocate(model, torch.device(device), dtypes)
    params = dict(model.named_parameters())
    finite: dict[str, Tensor] = {}
    with torch.no_grad(), _bar(sum(reader.headers[name].nbytes for name in boxes), progress) as bar:
        for name in reader.headers:
            if name in boxes:
                box = params[boxes[name].param][boxes[name].index]
                box.copy_(reader.read(name))
                finite[name] = torch.stack(box.aminmax()).isfinite().all()  # NaN spreads, and no copy is made
                bar.update(reader.headers[name].nbytes)
    _warn_of_nan(finite, reader.source)


def export(model: nn.Module, table: Table) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor) one by one, each a view of its parameter."""
    params = dict(model.named_parameters())
    for region in regions(model, table):
        yield region.source, params[region.param].detach()[region.index]


def pack(
    model: nn.Module,
    table: Table,
    reader: Reader,
    *,
    tied: Mapping[str, str] | None = None,
    also: Iterable[Table] = (),
) -> Iterator[tuple[str, Tensor]]:
    """(our name, tensor) of a checkpoint in any layout that passed `check`; `model` is on meta.

    One packed tensor is in memory at a time. Parts that differ in dtype are packed in the wider one.
    """
    found = regions(model, layout(model, table, reader.headers, native=reader.native, also=also))
    _check_tied(reader, found, tied)
    boxes = _by_parameter(found)
    for name, param in model.named_parameters():
        yield name, _packed(param, boxes[name], reader)


def unpack(
    model: nn.Module,
    table: Table,
    reader: Reader,
    *,
    tied: Mapping[str, str] | None = None,
    also: Iterable[Table] = (),
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor) of a checkpoint in any layout that passed `check`; `model` is on meta.

    One tensor at a time, and a whole parameter where the layout on disk has cut it otherwise. Tied copies and ignored
    names are left out.
    """
    found = regions(model, layout(model, table, reader.headers, native=reader.native, also=also))
    _check_tied(reader, found, tied)
    boxes, params = _by_parameter(found), dict(model.named_parameters())
    for region in regions(model, table):
        stored = boxes[region.param]
        same = next((box.source for box in stored if box.index == region.index), None)
        if same is not None:
            yield region.source, reader.read(same)
        else:
            yield region.source, _packed(params[region.param], stored, reader)[region.index]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree in shape, dtype and every bit: NaN equals itself, -0.0 is not 0.0."""
    alike = a.shape == b.shape and a.dtype == b.dtype
    return alike and torch.equal(*(x.reshape(-1).view(torch.uint8) for x in (a, b)))


def _pattern(ours: str) -> re.Pattern[str]:
    pieces = re.split(r"(\{\w\})", ours)
    return re.compile("".join(_PLACEHOLDERS.get(piece, re.escape(piece)) for piece in pieces))


def _rows(name: str, total: int, parts: Mapping[str, int]) -> list[tuple[slice, ...]]:
    ends = list(itertools.accumulate(parts.values()))
    assert ends[-1] == total, f"{name} has {total} rows, but its parts {dict(parts)} make {ends[-1]}"
    return [(slice(end - count, end),) for end, count in zip(ends, parts.values(), strict=True)]


def _by_parameter(found: Iterable[Region]) -> dict[str, list[Region]]:
    boxes: dict[str, list[Region]] = {}
    for region in found:
        boxes.setdefault(region.param, []).append(region)
    return boxes


def _packed(param: Tensor, boxes: list[Region], reader: Reader) -> Tensor:
    """The whole parameter that these boxes tile, in the dtype that holds all of them without loss."""
    if boxes[0].index == ():
        return reader.read(boxes[0].source)
    packed = torch.empty(param.shape, dtype=_stored_dtypes(boxes, reader)[boxes[0].param])
    for box in boxes:
        packed[box.index].copy_(reader.read(box.source))
    return packed


def _stored_dtypes(found: Iterable[Region], reader: Reader) -> dict[str, torch.dtype]:
    """{our parameter: the dtype that holds all of its tensors on disk without loss}."""
    stored: dict[str, torch.dtype] = {}
    for region in found:
        dtype = reader.headers[region.source].dtype
        stored[region.param] = torch.promote_types(stored.get(region.param, dtype), dtype)
    return stored


def _check_tied(reader: Reader, found: Iterable[Region], tied: Mapping[str, str] | None) -> None:
    sources = {region.param: region.source for region in found}
    for name, param in (tied or {}).items():
        if name not in reader.headers:
            continue
        if not same_bits(reader.read(name), reader.read(sources[param])):
            raise CheckpointError(
                f"{reader.source}: {name} differs from {sources[param]}, though the config ties the two.\n"
                "  Likely: the head was trained or merged apart from the embedding. Then set "
                f"tie_word_embeddings to false in config.json; or, to drop this head, delete {name} on disk."
            )


def _warn_of_nan(finite: Mapping[str, Tensor], where: str) -> None:
    """finite: {name on disk: a truth value on the device}, read in one go."""
    if not finite:
        return
    broken = [name for name, fine in zip(finite, torch.stack(list(finite.values())).tolist(), strict=True) if not fine]
    if broken:
        warnings.warn(
            f"{where}: {len(broken)} of {len(finite)} tensors hold NaN or infinity: {', '.join(broken[:3])}"
            f"{', ...' * (len(broken) > 3)}.\n  Likely: a training run that diverged, a damaged file, or a dtype "
            "with too small a range (float16 ends at 65504). The model's output will be NaN as well.",
            stacklevel=4,
        )


def _allocate(model: nn.Module, device: torch.device, dtypes: Mapping[str, torch.dtype]) -> None:
    for name, module in model.named_modules():
        rebuilds = type(module)._apply is not nn.Module._apply or not list(module.buffers(recurse=False))
        assert rebuilds, f"{name} has buffers but no _apply of its own"
    for name, param in model.named_parameters():
        assert param.is_meta, f"load() fills models on the meta device; {name} is on {param.device}"
        param.data = param.data.to(dtypes[name])
    model._apply(lambda tensor: torch.empty_like(tensor, device=device))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert not tensor.is_meta, f"{name} is still on the meta device"


def _bar(total: int, progress: bool | Literal["force"]) -> Any:
    from tqdm import tqdm

    # tqdm reads disable=None as: unless stderr is a terminal.
    disable = None if progress is True else not progress
    return tqdm(desc="Loading weights", total=total, unit="B", unit_scale=True, disable=disable)


# (a name among the unexpected ones, what it means)
_SIGNS = (
    (r"\.(qweight|qzeros|scales|g_idx)$", "a GPTQ or AWQ checkpoint; use what it was quantised from."),
    (r"\.(absmax|quant_map|SCB)$", "a bitsandbytes checkpoint; use what it was quantised from."),
    (r"weight_(scale|scale_inv|packed)$", "an FP8 or compressed checkpoint; use what it was made from."),
    (r"\.lora_[AB]\.", "an adapter, not a whole model; merge it into its base model first."),
    (r"\.attention\.w[qkvo]\.|^tok_embeddings\.", "Meta's or Mistral's own layout; use the other one."),
    (r"\b(qkv_proj|gate_up_proj)\.", "projections packed on disk, as in Phi-3: of another model_type."),
)  # fmt: skip


def _guess(
    expected: Mapping[str, tuple[int, ...]],
    headers: Mapping[str, TensorInfo],
    missing: list[str],
    unexpected: list[str],
    misshapen: list[str],
) -> str:
    """What usually causes such a difference."""
    for pattern, meaning in _SIGNS:
        if any(re.search(pattern, name) for name in unexpected):
            return f"Likely: {meaning}"
    embedding = next(iter(expected))
    for name in unexpected:
        if name.endswith("." + embedding):
            return f"Likely: a larger model that holds this one behind {name.removesuffix(embedding)!r}."
        if embedding.endswith("." + name):
            prefix = embedding.removesuffix(name)
            return f"Likely: the bare model, saved without its head: its names lack {prefix!r}."
    layers, wanted = _count_layers(headers), _count_layers(expected)
    if layers != wanted:
        return f"Likely: a partial copy, or another config.json: {layers} layers on disk, {wanted} expected."
    if "lm_head.weight" in missing:
        return "Likely: the head is the embedding; then set tie_word_embeddings to true in config.json."
    if embedding in misshapen:
        return "Likely: the vocabulary was resized; set vocab_size in config.json to the embedding's rows."
    if misshapen:
        return "Likely: config.json is another model's; its hidden_size, heads or intermediate_size differ."
    return "Likely: a partial copy, or another architecture's weights; fetch it again, or correct model_type."


def _count_layers(names: Iterable[str]) -> int:
    return 1 + max((int(found[1]) for name in names if (found := re.search(r"\blayers\.(\d+)\.", name))), default=-1)
