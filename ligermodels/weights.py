"""Parameters packed in memory, Hugging Face names on disk: one table per architecture joins the two.

    {"layers.{i}.attn.qkv_proj.{w}": ("model.layers.{i}.self_attn.q_proj.{w}", "...k_proj.{w}", "...v_proj.{w}")}

A string renames; a tuple stacks rows in that order, as many each as the module's `parts` say; a source that holds
`{e}` is stacked on a new dim 0. `{i}` is a layer number, `{w}` is weight or bias. Keys match whole names.

The table is read as regions: "this box of our parameter is that tensor on disk". Loading copies into the box and
saving reads it, so nothing has an inverse that could be wrong, and Hugging Face -> ours -> Hugging Face returns the
same bits. A native checkpoint holds our names, already packed: its table is the identity.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Literal, Protocol

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
        return self.dtype.itemsize * torch.Size(self.shape).numel()


class Reader(Protocol):
    """An open checkpoint; `hub.open_checkpoint` makes one."""

    @property
    def headers(self) -> Mapping[str, TensorInfo]:
        """Every tensor, in the order in which the files hold them."""

    @property
    def native(self) -> bool:
        """Whether the names are ours rather than Hugging Face's."""

    @property
    def source(self) -> str:
        """Where it was read from, for messages."""

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

    Raises ValueError where a parameter has no entry or several, or two boxes name one tensor.
    """
    patterns = [(_pattern(ours), theirs) for ours, theirs in table.items()]
    found: list[Region] = []
    for name, param in model.named_parameters():
        hits = [(match, theirs) for pattern, theirs in patterns if (match := pattern.fullmatch(name))]
        if len(hits) != 1:
            raise ValueError(
                f"parameter {name} matches {len(hits)} entries of the weight table, expected exactly one"
            )
        [(match, theirs)] = hits
        sources = (theirs,) if isinstance(theirs, str) else theirs
        stacked = "{e}" in sources[0]
        rows: list[slice | None] = [None]
        if len(sources) > 1:
            rows = list(
                _rows(model.get_submodule(name.rpartition(".")[0]).parts, param.shape[int(stacked)], name)
            )
        for expert in range(param.shape[0]) if stacked else [None]:
            for source, part in zip(sources, rows, strict=True):
                index = tuple(at for at in (expert, part) if at is not None)
                found.append(Region(name, index, source.format(**match.groupdict(), e=expert)))
    sources_seen = [region.source for region in found]
    if len(set(sources_seen)) != len(sources_seen):
        twice = next(source for source in sources_seen if sources_seen.count(source) > 1)
        raise ValueError(f"the weight table takes {twice} for two places; a shared tensor is one parameter")
    return found


def identity(model: nn.Module) -> dict[str, str]:
    """The table of a native checkpoint."""
    return {name: name for name, _ in model.named_parameters()}


def check(
    model: nn.Module,
    table: Table,
    headers: Mapping[str, TensorInfo],
    *,
    ignore: Iterable[str] = (),
    tied: Mapping[str, str] | None = None,
    where: str = "the checkpoint",
) -> None:
    """Compares names, shapes and kinds in both directions, from headers alone; `model` may be on the meta device.

    ignore: regular expressions, searched in names on disk that the model has no place for.
    tied: {name on disk: our parameter}: may be there, and then holds a copy of that parameter.
    Raises CheckpointError that counts and lists what does not fit and guesses why.
    """
    params = dict(model.named_parameters())
    expected = {
        region.source: tuple(params[region.param][region.index].shape) for region in regions(model, table)
    }
    copies = {name: tuple(params[param].shape) for name, param in (tied or {}).items() if name in headers}
    skip = [re.compile(pattern) for pattern in ignore]
    missing = [name for name in expected if name not in headers]
    unexpected = [
        name for name in headers
        if name not in expected and name not in copies and not any(pattern.search(name) for pattern in skip)
    ]  # fmt: skip
    here = {name: shape for name, shape in {**expected, **copies}.items() if name in headers}
    misshapen = [name for name, shape in here.items() if headers[name].shape != shape]
    coded = [name for name in here if headers[name].dtype not in FLOATS]
    if not (missing or unexpected or misshapen or coded):
        return
    lists = {
        f"missing ({len(missing)} of {len(expected)})": missing,
        f"unexpected ({len(unexpected)})": unexpected,
        f"wrong shape ({len(misshapen)})": [
            f"{name} is {list(headers[name].shape)} where the model has {list(here[name])}"
            for name in misshapen
        ],
        f"not float64, float32, bfloat16 or float16, so quantised ({len(coded)})": [
            f"{name} is {str(headers[name].dtype).removeprefix('torch.')}" for name in coded
        ],
    }
    raise CheckpointError(
        "\n  ".join(
            [f"{where} does not match {type(model).__name__}."]
            + [
                f"{title}: {', '.join(names[:3])}{', ...' * (len(names) > 3)}"
                for title, names in lists.items()
                if names
            ]
            + [f"Likely: {guess}" for guess in _guesses(expected, headers, missing, unexpected, misshapen)]
        )
    )


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
) -> None:
    """Gives the parameters of `model`, all on the meta device, their memory on `device` and their values.

    dtype: None keeps each parameter's own, "stored" takes that of the files (the wider one where the parts of a
        packed parameter differ), anything else casts.
    progress: a bar over bytes on stderr if that is a terminal; "force" shows it anyway.
    ignore, tied: as in `check`, which comes first. A tied copy must equal its parameter's tensor bit for bit.
    Tensors are copied one at a time in file order: host memory beyond the model stays below the largest tensor.
    A module with buffers rebuilds them in its own `_apply`.
    Raises CheckpointError.
    """
    if reader.native:
        table = identity(model)
    check(model, table, reader.headers, ignore=ignore, tied=tied, where=reader.source)
    boxes = {region.source: region for region in regions(model, table)}
    _check_tied(reader, boxes.values(), tied)
    if dtype == "stored":
        dtypes = stored_dtypes(boxes.values(), reader.headers)
    else:
        dtypes = {name: dtype or param.dtype for name, param in model.named_parameters()}
    _allocate(model, torch.device(device), dtypes)
    params = dict(model.named_parameters())
    with torch.no_grad(), _bar(sum(reader.headers[name].nbytes for name in boxes), progress) as bar:
        for name in reader.headers:
            if name in boxes:
                tensor = reader.read(name)
                params[boxes[name].param][boxes[name].index].copy_(tensor)
                bar.update(tensor.nbytes)


def export(model: nn.Module, table: Table) -> Iterator[tuple[str, Tensor]]:
    """(name on disk, tensor) for every region, one after the other, without a copy: rows of a parameter."""
    params = dict(model.named_parameters())
    for region in regions(model, table):
        yield region.source, params[region.param].detach()[region.index]


def pack(
    model: nn.Module, table: Table, reader: Reader, *, tied: Mapping[str, str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(our name, packed tensor) of a checkpoint in either layout that `check` has accepted; `model` is on meta.

    Parts of different dtypes are packed in the wider one. In memory: one parameter, and none that is a mere rename.
    """
    found = regions(model, identity(model) if reader.native else table)
    _check_tied(reader, found, tied)
    dtypes = stored_dtypes(found, reader.headers)
    boxes: dict[str, list[Region]] = {}
    for region in found:
        boxes.setdefault(region.param, []).append(region)
    for name, param in model.named_parameters():
        if not boxes[name][0].index:
            yield name, reader.read(boxes[name][0].source)
            continue
        packed = torch.empty(param.shape, dtype=dtypes[name])
        for region in boxes[name]:
            packed[region.index].copy_(reader.read(region.source))
        yield name, packed


def unpack(
    model: nn.Module, table: Table, reader: Reader, *, tied: Mapping[str, str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor) of a checkpoint in either layout that `check` has accepted; `model` is on meta.

    Leaves out what the model has no place for, tied copies among it. Nothing is held in memory.
    """
    found = regions(model, table)
    _check_tied(reader, found, tied)
    for region in found:
        yield (
            region.source,
            reader.read(region.param)[region.index] if reader.native else reader.read(region.source),
        )


def stored_dtypes(found: Iterable[Region], headers: Mapping[str, TensorInfo]) -> dict[str, torch.dtype]:
    """{our parameter: the dtype that holds all of its tensors on disk without loss}."""
    stored: dict[str, list[torch.dtype]] = {}
    for region in found:
        stored.setdefault(region.param, []).append(headers[region.source].dtype)
    return {name: reduce(torch.promote_types, dtypes) for name, dtypes in stored.items()}


def _pattern(ours: str) -> re.Pattern[str]:
    return re.compile(
        "".join(_PLACEHOLDERS.get(piece, re.escape(piece)) for piece in re.split(r"(\{\w\})", ours))
    )


def _rows(parts: Mapping[str, int], total: int, name: str) -> Iterator[slice]:
    assert sum(parts.values()) == total, (
        f"{name} has {total} rows, its parts {dict(parts)} make {sum(parts.values())}"
    )
    start = 0
    for count in parts.values():
        yield slice(start, start + count)
        start += count


def _check_tied(reader: Reader, found: Iterable[Region], tied: Mapping[str, str] | None) -> None:
    """A copy that differs from its parameter means that the files do not tie what the config ties."""
    sources = {region.param: region.source for region in found}
    for name, param in (tied or {}).items():
        if name not in reader.headers:
            continue
        copy, original = reader.read(name), reader.read(sources[param])
        # As bytes: NaN equals itself, and -0.0 is not 0.0.
        same = copy.dtype == original.dtype and torch.equal(
            *(x.reshape(-1).view(torch.uint8) for x in (copy, original))
        )
        if not same:
            raise CheckpointError(
                f"{reader.source}: {name} differs from {sources[param]}, but the config ties the two.\n"
                "  Likely: the head was trained or merged apart from the embedding. If so, set tie_word_embeddings to "
                f"false in config.json; else delete {name} from the checkpoint."
            )


def _allocate(model: nn.Module, device: torch.device, dtypes: Mapping[str, torch.dtype]) -> None:
    on_meta = {name: param.is_meta for name, param in model.named_parameters()}
    assert all(on_meta.values()), (
        f"load() needs a model on the meta device; {[n for n, m in on_meta.items() if not m][0]} is not"
    )
    for name, module in model.named_modules():
        rebuilds = type(module)._apply is not nn.Module._apply
        assert rebuilds or not list(module.buffers(recurse=False)), (
            f"{name} has buffers and no _apply to rebuild them"
        )
    for name, param in model.named_parameters():
        param.data = param.data.to(dtypes[name])
    model._apply(lambda tensor: torch.empty_like(tensor, device=device))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert not tensor.is_meta, f"{name} is still on the meta device after loading"


def _bar(total: int, progress: bool | Literal["force"]):
    from tqdm import tqdm

    # disable=None is tqdm's word for "unless stderr is a terminal".
    disable = None if progress is True else progress != "force"
    return tqdm(
        total=total, unit="B", unit_scale=True, unit_divisor=1024, desc="Loading weights", disable=disable
    )


_SIGNS = (
    (r"\.(qweight|qzeros|scales|g_idx)$", "a GPTQ or AWQ checkpoint; use the unquantised one it was made from."),
    (r"\.(absmax|quant_map|SCB)$|\.quant_state\.", "a bitsandbytes checkpoint; use the unquantised one."),
    (r"weight_scale(_inv)?$|weight_packed$", "an FP8 or otherwise compressed checkpoint; use the unquantised one."),
    (r"\.lora_[AB]\.", "an adapter, not a whole model; merge it into its base model first."),
    (r"\.attention\.w[qkvo]\.|^tok_embeddings\.", "Meta's or Mistral's own layout; use the files of the transformers one."),
    (r"\.experts\.(gate_up_proj|down_proj)$", "experts stacked as transformers 5 holds them in memory; its save_pretrained"
     " writes them one by one."),
    (r"(^|\.)(qkv_proj|gate_up_proj)\.", "projections packed on disk, as Phi-3 has them: another model_type's weights."),
)  # fmt: skip
"""(names among the unexpected, what they mean)"""


def _guesses(
    expected: Mapping[str, tuple[int, ...]],
    headers: Mapping[str, TensorInfo],
    missing: list[str],
    unexpected: list[str],
    misshapen: list[str],
) -> Iterator[str]:
    """What usually causes such a difference."""
    signs = [meaning for pattern, meaning in _SIGNS if any(re.search(pattern, name) for name in unexpected)]
    anchor = next(iter(expected))
    longer = next((name for name in unexpected if name.endswith("." + anchor)), None)
    layers, wanted = _layers(headers), _layers(expected)
    if signs:
        yield signs[0]
    elif longer:
        yield f"a checkpoint of a larger model that holds this one behind the prefix {longer.removesuffix(anchor)!r}."
    elif any(anchor.endswith("." + name) for name in unexpected):
        yield "a checkpoint of the bare model, saved without its head: the names lack a prefix."
    elif layers != wanted:
        yield (
            f"the files hold {layers} layers and config.json says {wanted}: another model's config.json, or shards "
            "that were not all copied."
        )
    elif "lm_head.weight" in missing:
        yield "the head was not saved; if it is the embedding, set tie_word_embeddings to true in config.json."
    if any(re.search("embed_tokens|lm_head", name) for name in misshapen):
        yield "the vocabulary was resized; vocab_size in config.json must be the number of rows of the embedding."
    elif misshapen:
        yield "config.json is another model's: sizes such as hidden_size or num_key_value_heads differ."


def _layers(names: Iterable[str]) -> int:
    return 1 + max(
        (int(match[1]) for name in names if (match := re.search(r"\blayers\.(\d+)\.", name))), default=-1
    )
