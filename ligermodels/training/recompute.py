"""Activation checkpointing: what the blocks of a model save for the backward, recompute there, or offload to the host.

| recompute | a block saves, bytes per token in 16 bits              | recomputed in the backward                  |
|-----------|--------------------------------------------------------|---------------------------------------------|
| "none"    | 4H + 2(q + 2kv) + 2q + 4I                              | outputs of norms and activations            |
| "mlp"     | the same without the inside of its MLPs: - 4I          | gate and up as well: 18 % more FLOPs        |
| "block"   | one tensor, x + residual: 2H                           | the whole block: 33 % more FLOPs            |

H is the hidden size, q and kv the widths of queries and keys, I that of the gated MLP.

Under "block", a block runs on (x + residual, None): its first norm has the same bits as on (x, residual), and in the
backward the gradient of the sum, in 16 bits, is rounded once more. An MLP at the end of a block saves only its input in
the second run and recomputes gate and up in chunks of tokens (`gated_mlp`), so that a longer text needs no more memory
there.

`offload` sends what the blocks save to pinned host memory; see offload.py.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import checkpoint

from ligermodels.errors import InputError
from ligermodels.kernels._triton import is_capturing
from ligermodels.training.offload import Offload, OffloadPass

CHOICES = ("none", "mlp", "block")
_TORCH_OPTIONS = {"preserve_rng_state", "determinism_check", "debug", "early_stop", "context_fn"}


def must_not_sync(x: Tensor) -> bool:
    """True while torch.compile or a CUDA graph captures what happens to x: the host cannot read a value then."""
    return torch.compiler.is_compiling() or is_captured(x)


def is_captured(x: Tensor) -> bool:
    """True while a CUDA graph captures what happens to x."""
    return x.is_cuda and is_capturing()


def run_block(i: int, block: nn.Module, *inputs: Any) -> Any:
    """Runs block i without checkpointing; see `Checkpointing.start`."""
    return block(*inputs)


def recomputed(block: nn.Module, x: Tensor, residual: Tensor | None, *inputs: Any, **options: Any) -> Any:
    """block(x + residual, None, *inputs); only the sum is saved, and the backward runs the block again.

    options: of torch.utils.checkpoint. Raises InputError while a CUDA graph is captured, if the block draws random
    numbers: the second run would draw others.
    """
    x = x if residual is None else x + residual
    if is_captured(x):
        if _draws(block):
            raise InputError(
                "recompute='block' of blocks with dropout or router jitter cannot be captured in a CUDA graph: the "
                "second run would draw other numbers. Set both to 0, or leave recompute or the capture out"
            )
        options["preserve_rng_state"] = False  # reading the state is not allowed there
    return checkpoint(block, x, None, *inputs, use_reentrant=False, **options)


def _draws(block: nn.Module) -> bool:
    return any(
        module.training
        and ((isinstance(module, _DropoutNd) and module.p > 0) or getattr(module, "jitter_noise", 0) > 0)
        for module in block.modules()
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """The policy of one model.

    recompute: "none", "mlp" or "block". blocks: number of first blocks that it applies to, None for all.
    every_n_layers: among these, it applies to blocks 0, n, 2n, ... options: of torch.utils.checkpoint.
    """

    recompute: str = "none"
    blocks: int | None = None
    every_n_layers: int = 1
    offload: Offload | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, settings: str | Mapping[str, Any], num_blocks: int) -> Self:
        """From "none", "mlp" or "block", or a dict of the fields (offload: True or False). Raises InputError."""
        if isinstance(settings, str):
            settings = {"recompute": settings}
        if not isinstance(settings, Mapping):
            raise InputError(
                f"activation checkpointing is {settings!r}; expected {_quoted(CHOICES)}, or a dict such as "
                "{'recompute': 'block', 'blocks': 8, 'offload': True}"
            )
        options = dict(settings)
        recompute, blocks = options.pop("recompute", "block"), options.pop("blocks", None)
        every, offload = options.pop("every_n_layers", 1), options.pop("offload", False)
        if recompute not in CHOICES:
            raise InputError(f"recompute={recompute!r} is not supported; supported: {_quoted(CHOICES)}")
        if blocks is not None and not (type(blocks) is int and 0 <= blocks <= num_blocks):
            raise InputError(f"blocks={blocks!r} must be a number of the model's blocks, 0 to {num_blocks}")
        if type(every) is not int or every < 1:
            raise InputError(f"every_n_layers={every!r} must be a whole number of 1 or more")
        if type(offload) is not bool:
            raise InputError(f"offload={offload!r} must be True or False")
        if options.pop("use_reentrant", None):
            warnings.warn(
                "use_reentrant=True is not used here: checkpointing is non-reentrant, which gives the same gradients",
                stacklevel=4,
            )
        if unknown := options.keys() - _TORCH_OPTIONS:
            raise InputError(
                f"activation checkpointing has no option {_quoted(sorted(unknown))}; there are 'recompute', 'blocks', "
                f"'every_n_layers', 'offload', and of torch.utils.checkpoint {_quoted(sorted(_TORCH_OPTIONS))}"
            )
        if options and recompute != "block":
            raise InputError(
                f"{_quoted(options)} of torch.utils.checkpoint belong to recompute='block', not {recompute!r}"
            )
        where = Offload() if offload else None
        return cls(recompute=recompute, blocks=blocks, every_n_layers=every, offload=where, options=options)

    @property
    def enabled(self) -> bool:
        return self.blocks != 0 and (self.recompute != "none" or self.offload is not None)

    def for_all(self) -> Self:
        """The same policy for all blocks of another stack, or for none where `blocks` is 0."""
        return dataclasses.replace(self, blocks=None if self.blocks != 0 else 0)

    def covers(self, i: int) -> bool:
        return (self.blocks is None or i < self.blocks) and i % self.every_n_layers == 0

    def prepare(self, blocks: Iterable[nn.Module]) -> None:
        """Sets the attribute `recompute` of the MLPs and experts in these blocks."""
        for i, block in enumerate(blocks):
            last = last_mlp(block)
            for module in block.modules():
                if isinstance(getattr(module, "recompute", None), bool):
                    wanted = self.recompute == "mlp" or (self.recompute == "block" and module is last)
                    module.recompute = wanted and self.covers(i)  # type: ignore[assignment]

    def start(self, x: Tensor, num_blocks: int) -> Callable[..., Any]:
        """Returns run(i, block, x, residual, *inputs), which calls block(x, residual, *inputs) under this policy, for
        one forward pass on x through all blocks in order.

        Raises InputError where offloading meets torch.compile or a CUDA graph.
        """
        if not self.enabled or not torch.is_grad_enabled() or (self.recompute == "mlp" and self.offload is None):
            return run_block
        if self.offload is not None and must_not_sync(x):
            raise InputError(
                "offload=True runs neither in torch.compile nor in a captured CUDA graph: its copies are queued from "
                "step to step. Set offload=False"
            )
        return _Pass(self, num_blocks)


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def last_mlp(block: nn.Module) -> nn.Module | None:
    """The module whose output is the block's: the one that the attribute `last_mlp` names, or else the last child.

    None where the block has parameters of its own, such as gates, to apply after it.
    """
    if isinstance(name := getattr(block, "last_mlp", None), str):
        return block.get_submodule(name)
    *_, last = None, *block.children()
    return None if next(block.parameters(recurse=False), None) is not None else last


class _Pass:
    """The blocks of one forward pass, some of which are recomputed or offloaded."""

    def __init__(self, policy: Checkpointing, num_blocks: int):
        self.policy = policy
        covered = [i for i in range(num_blocks) if policy.covers(i)]
        self.recomputed = set(covered) if policy.recompute == "block" else set()
        self.offload = None if policy.offload is None else OffloadPass(policy.offload, covered, num_blocks)

    def __call__(self, i: int, block: nn.Module, x: Tensor, residual: Tensor | None, *inputs: Any) -> Any:
        run: Callable[..., Any] = block
        if i in self.recomputed:
            run = functools.partial(recomputed, block, **self.policy.options)
        if self.offload is None:
            x, residual, *more = run(x, residual, *inputs)
        else:
            x, residual, *more = self.offload.run(i, run, x, residual, *inputs)
        if residual is not None and i + 1 in self.recomputed:
            x, residual = x + residual, None  # here, where nothing else refers to the two
        return x, residual, *more
