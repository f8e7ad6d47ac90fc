"""What a layer says about itself, so that nothing outside of layers/ lists classes of layers.

Initialisation, the fusion report, tensor and context parallel, the plan of memory and generation go over
`model.modules()` and ask each `Layer`. A layer speaks for its own parameters and buffers, and for the torch.nn.Linear
modules right under it; layers inside of it speak for themselves. Modules that are no Layer (blocks, towers, wrappers
of other libraries) are passed over, and what stands in them is asked.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.layers.parallel import MeshGroup

Write = Callable[[Tensor, torch.Generator | None], object]
"""write(values of a whole parameter, generator) fills the values; the generator None is torch's default one."""


class Draw(Protocol):
    """Writes random or constant values into parameters, whole or sharded: each rank gets its part of the whole."""

    std: float
    drawn: set[int]  # ids of parameters

    def __call__(
        self,
        parameter: Tensor | None,
        write: Write | None = None,
        row_parts: Sequence[int] | None = None,
    ) -> None:
        """write: by default the weights of a matrix, in a model normal with mean 0 and `std`. A parameter that is None
        is passed over. row_parts: see `Layer.row_parts`."""


class _DrawAlone:
    """Draws for a layer that stands alone, as torch's layers do: matrices as nn.Linear's, by the default generator."""

    std = 0.02

    def __init__(self) -> None:
        self.drawn: set[int] = set()

    @torch.no_grad()
    def __call__(
        self, parameter: Tensor | None, write: Write | None = None, row_parts: Sequence[int] | None = None
    ) -> None:
        if parameter is None or parameter.is_meta:  # on the meta device normal_ and log_ would import torch._dynamo
            return
        if write is None:
            bound = parameter.shape[-1] ** -0.5
            parameter.uniform_(-bound, bound)
        else:
            write(parameter, None)


@dataclass(frozen=True)
class Shard:
    """How the ranks of tensor parallel share one linear module, or one parameter, of a layer.

    split: "columns": its outputs are split (a parameter: its first dim), and the linears of an input are gathered over
    the sequence before. "rows": its inputs are split (a parameter: its last dim), and outputs are summed. "heads": its
    outputs are split where there are enough heads; with fewer heads than ranks it is replicated, and a rank computes
    one. "replicated": each rank has all of it, and its gradient is a sum.
    count: the number of units, such as heads, each of which stays on one rank. what: the size that the error names
    where it does not fit, with "{size}" for the number of ranks.
    parts: rows of parts, such as q, k and v, each of which is split. dim: of a parameter, the dim that is split, where
    it is another; its parts are then equal.
    """

    split: Literal["columns", "rows", "heads", "replicated", "refused"]
    count: int = 1
    what: str = ""
    parts: tuple[int, ...] | None = None
    dim: int | None = None

    @classmethod
    def refused(cls, what: str) -> Self:
        """For a layer that no number of ranks can share. Its key may be the name of any attribute."""
        return cls("refused", what=what)

    def fits(self, size: int) -> bool:
        return self.split == "replicated" or (
            self.split != "refused" and (self.count % size == 0 or (self.split == "heads" and size % self.count == 0))
        )


REPLICATED = Shard("replicated")


class FusionContext(NamedTuple):
    """Of the model that is asked. gathered: FSDP2 gathers the layer's weights, as plain ones, before it runs."""

    dtype: torch.dtype
    device: torch.device
    gathered: bool


class FusionPart(NamedTuple):
    """How one part of a layer runs: see `FusionRow` of arch/fusion.py, which has the layers' names too."""

    part: str
    runs: str
    fused: bool
    why: str = ""


class Layer(nn.Module):
    """A module with parameters or a state of its own, and the answers to what is asked of it; the defaults are none."""

    tp: MeshGroup | None = None
    """The ranks over which it is sharded (tensor parallel)."""
    row_parts: tuple[int, ...] | None = None
    """The `parts` of its own `weight` and `bias`, once they are sharded; checkpoint/weights.py reads them."""
    is_recurrent: ClassVar[bool] = False
    """It reads a mask of tokens, and takes no padding between them."""
    stacked: ClassVar[tuple[str, ...]] = ()
    """Names of its weights [E, out, in] that are quantised as matrices, see `Experts`."""
    keep_bf16: ClassVar[tuple[str, ...]] = ()
    """Names of its linear modules that stay in 16 bits where others compute in FP8: routers and small gates."""
    keep_fp32: bool = False
    """Its own parameters and buffers, not those of modules inside of it, stay in fp32 where the model is in 16 bits:
    cast, loaded, saved, and under FSDP2, of which the layer is then a unit.

    Its forward says what it computes in, such as `F.linear(x.float(), self.weight)`: x comes in the model's dtype, and
    torch.autocast casts the inputs of F.linear here as elsewhere. Other modules get what it holds by calling it, which
    is when FSDP2 gathers the parameters; a forward may just return them. So one fp32 parameter of a larger layer is a
    small layer of its own."""

    @property
    def heads(self) -> tuple[int, int] | None:
        """(heads, key heads) that context parallel exchanges for tokens; None: it does not."""
        return None

    def init_weights(self, draw: Draw) -> None:
        """Draws its own parameters and buffers, not those of the modules inside of it."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As in nn.Module, but with `keep_fp32` a cast to 16 bits leaves its own tensors in fp32, with their bits."""
        if not self.keep_fp32:
            return super()._apply(fn, recurse)

        def without_cast(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            is_short = result.is_floating_point() and result.itemsize < 4
            return tensor.to(result.device, torch.float32) if is_short else result

        for child in self.children() if recurse else ():
            child._apply(fn)
        return super()._apply(without_cast, recurse=False)

    def reset_parameters(self) -> None:
        """`init_weights` for a layer that stands alone, under the name that torch's layers have."""
        self.init_weights(_DrawAlone())

    def shards(self) -> Mapping[str, Shard]:
        """{name of a linear module or a parameter: how ranks share it}; read before `set_tp`. Names may have dots."""
        return {}

    def set_tp(self, tp: MeshGroup) -> None:
        """Makes its numbers, such as that of its heads, those of a rank. What `shards` names is sharded already."""
        self.tp = tp

    def fusion_parts(self, at: FusionContext) -> Iterable[FusionPart]:
        """How it runs in eager training."""
        return ()

    def saved_per_token(self, policy: str) -> int | None:
        """Elements in 16 bits that it and all inside of it save for the backward. None: what the layers inside of it
        save. policy: "none" or "mlp", as in training/recompute.py.

        What is in 32 bits is left out: a number or two a row of a norm, a head or a chosen expert, below 1 % of all at
        the sizes of real models."""
        return None

    def unread_bytes(self, rows: int) -> float:
        """Bytes of its weights that a step of decoding `rows` rows is expected not to read."""
        return 0.0


def fp32_layers(root: nn.Module) -> dict[str, Layer]:
    """{name: layer} of those in `root` with `keep_fp32`."""
    return {name: layer for name, layer in root.named_modules() if isinstance(layer, Layer) and layer.keep_fp32}


def fp32_names(root: nn.Module) -> set[str]:
    """The names of the parameters and buffers in `root` that stay in fp32."""
    return {
        f"{path}.{name}".removeprefix(".")
        for path, layer in fp32_layers(root).items()
        for name, tensor in (*layer._parameters.items(), *layer._buffers.items())
        if tensor is not None
    }


def init_weights(root: nn.Module, draw: Draw) -> None:
    """Draws all parameters and persistent buffers in `root`: layers draw theirs, torch's linear modules and embeddings
    are drawn here, and modules of others by their reset_parameters. Raises InputError for one that nothing has drawn.
    """
    foreign: set[int] = set()
    for module in root.modules():
        if isinstance(module, Layer):
            module.init_weights(draw)
        elif isinstance(module, nn.Linear | nn.Embedding):
            draw_table(module, draw)
        elif callable(reset := getattr(type(module), "reset_parameters", None)):
            reset(module)
            foreign |= {id(x) for x in (*module.parameters(recurse=False), *module.buffers(recurse=False))}
    drawn, state = draw.drawn | foreign, root.state_dict(keep_vars=True)
    undrawn = [name for name, x in state.items() if id(x) not in drawn]
    if undrawn:
        raise InputError(
            f"{undrawn[0]} has no values, nor have {len(undrawn) - 1} others: nothing has drawn them; let "
            "the init_weights of their layers do it"
        )


def draw_table(module: Any, draw: Draw) -> None:
    """A weight from the normal distribution; a bias and the row of a pad token are 0."""
    padding = getattr(module, "padding_idx", None)

    def fill(weight: Tensor, generator: torch.Generator | None) -> None:
        weight.normal_(0.0, draw.std, generator=generator)
        if padding is not None:
            weight[padding].zero_()

    draw(module.weight, fill, getattr(module, "row_parts", None))
    draw(getattr(module, "bias", None), zeros)


def normal(std: float) -> Write:
    return lambda values, generator: values.normal_(0.0, std, generator=generator)


def zeros(values: Tensor, generator: torch.Generator | None) -> None:
    values.zero_()


def ones(values: Tensor, generator: torch.Generator | None) -> None:
    values.fill_(1.0)


def saved_per_token(module: nn.Module, policy: str) -> int:
    """Elements that `module` saves for the backward: the sum over the outermost layers in it that say."""
    answer = module.saved_per_token(policy) if isinstance(module, Layer) else None
    return sum(saved_per_token(child, policy) for child in module.children()) if answer is None else answer


def not_counted(module: nn.Module) -> Iterator[str]:
    """Classes in `module` with parameters, or linear modules, of which `saved_per_token` counts nothing: no layer says
    what they save."""
    if isinstance(module, Layer) and module.saved_per_token("none") is not None:
        return
    children = [child for child in module.children() if not isinstance(child, nn.Linear)]
    if len(children) < len([*module.children()]) or any(True for _ in module.parameters(recurse=False)):
        yield type(module).__name__
    for child in children:
        yield from not_counted(child)
