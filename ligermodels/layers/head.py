"""The output head: logits, or with labels the loss or log probabilities, which are computed without whole logits.

Head and loss are one module called as a module, so that FSDP, ZeRO and adapters see the use of the weight.
"""

import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.errors import InputError, warn_once
from ligermodels.kernels.linear.linear import matmul
from ligermodels.kernels.loss.cross_entropy import CrossEntropyOutput
from ligermodels.kernels.loss.linear_cross_entropy import linear_cross_entropy
from ligermodels.kernels.loss.linear_logprobs import LogprobsOutput, linear_logprobs
from ligermodels.kernels.loss.vocab_parallel_cross_entropy import vocab_parallel_cross_entropy
from ligermodels.layers.base import Draw, Layer, Shard, zeros
from ligermodels.layers.embedding import vocabulary
from ligermodels.layers.linear import is_plain_call, warns, why_not_fused
from ligermodels.layers.losses import check_count
from ligermodels.layers.parallel import MeshGroup, local_shard
from ligermodels.libraries import integration

_LOSS_OPTIONS = frozenset(inspect.signature(linear_cross_entropy).parameters) - {"bias"}
_LOGPROBS_OPTIONS = frozenset(inspect.signature(linear_logprobs).parameters) - {"bias"}
_SHARDED_OPTIONS = frozenset(inspect.signature(vocab_parallel_cross_entropy).parameters) - {
    "bias", "group", "first_id", "vocab_size",
}  # fmt: skip


class LMHead(Layer):
    """A linear head [vocab_size, hidden_size], with a weight of its own or tied to the table of the embedding.

    It is not an nn.Linear, which quantisers and PEFT's "all-linear" would take; the head of a model must be left out.
    tied_to: a module with an `embed_tokens`, whose table is the weight. A tied head has no parameter of its own: it
        reads `tied_to.embed_tokens` at each use, so that the table has one name in `state_dict()`, and the head sees a
        replaced embedding. Assigning a Parameter to `weight` unties the head. A copy of the head alone, as PEFT makes
        one for modules_to_save, has a weight of its own; in a copy of the whole model the head stays tied.
    tp: the ranks over which the vocabulary is sharded (tensor parallel). Each gets all x and labels, and returns all
        logits, or the loss; its gradient of x is a part of the sum.
    """

    _tied_to: nn.Module | None
    workspace_bytes: int | None = None
    """Default memory for a chunk of logits; None: chosen by `linear_cross_entropy`.

    A small value, such as `model.lm_head.workspace_bytes = 256 * 2**20`, lowers the peak memory of a step and costs
    some time. Set it on the head itself, before something wraps it.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        bias: bool = False,
        tied_to: nn.Module | None = None,
    ):
        super().__init__()
        self.in_features = hidden_size
        self.out_features = vocab_size
        self._parameters["weight"] = nn.Parameter(torch.empty(vocab_size, hidden_size)) if tied_to is None else None
        self.bias = nn.Parameter(torch.zeros(vocab_size)) if bias else None
        self.tie(tied_to)
        self.reset_parameters()

    def tie(self, tied_to: nn.Module | None) -> None:
        """Replaces the head's own weight by the table of `tied_to.embed_tokens`; None changes nothing."""
        if tied_to is not None:
            self._parameters["weight"] = None
            if hasattr(tied_to, "_tied_head"):  # for Decoder.__setattr__; a weak one, to make no cycle
                object.__setattr__(tied_to, "_tied_head", weakref.ref(self))
        object.__setattr__(self, "_tied_to", tied_to)  # nn.Module would register it as a submodule

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.is_tied:
            self.tie(self._tied_to)

    @property
    def weight(self) -> Tensor:
        weight = self._parameters.get("weight")
        if weight is not None:
            return weight
        embedding: Any = self._tied_to.embed_tokens  # type: ignore[union-attr]
        peft = None if isinstance(embedding, nn.Embedding) else integration("peft")
        return embedding.weight if peft is None else peft.table_of(embedding)

    @property
    def is_tied(self) -> bool:
        return self._parameters.get("weight") is None

    def __deepcopy__(self, memo: dict[int, Any]) -> "LMHead":
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        stays_tied = self.is_tied and id(self._tied_to) in memo
        state = self.__dict__ if stays_tied else {**self.__dict__, "_tied_to": None}
        copied.__dict__.update(copy.deepcopy(state, memo))
        if stays_tied:
            copied.tie(copied._tied_to)
        elif self.is_tied:
            copied._parameters["weight"] = nn.Parameter(self.weight.detach().clone(), self.weight.requires_grad)
        return copied

    def init_weights(self, draw: Draw) -> None:
        if not self.is_tied:
            draw(self.weight)
            draw(self.bias, zeros)

    def shards(self) -> Mapping[str, Shard]:
        if self.is_tied:
            return {}
        rows = Shard("columns", self.out_features, vocabulary(self.out_features))
        return {name: rows for name, _ in self.named_parameters(recurse=False)}

    def forward(
        self,
        x: Tensor,
        labels: Tensor | None = None,
        *,
        weight: Tensor | None = None,
        softcap: float | None = None,
        return_logprobs: bool = False,
        workspace_bytes: int | None = None,
        loss_function: Callable[..., Any] | None = None,
        **options: Any,
    ) -> Tensor | CrossEntropyOutput | LogprobsOutput:
        """Logits [..., V] of x [..., hidden_size]; with labels [...], shifted already, the loss.

        weight [V, hidden_size]: replaces the head's own. softcap: logits become softcap * tanh(logits / softcap).
        return_logprobs: log probabilities [...] of the labels instead of the loss. options, used with labels only:
        those of `ligermodels.kernels.linear_cross_entropy`, or with return_logprobs of
        `ligermodels.kernels.linear_logprobs`. loss_function: called with labels instead of linear_cross_entropy, with
        the same arguments; its result is returned.

        Raises InputError for other options, and for a tied table that FSDP shards in a group without the head.
        """
        known = _LOGPROBS_OPTIONS if return_logprobs else _LOSS_OPTIONS
        if unknown := [name for name in options if name not in known]:
            op = "linear_logprobs" if return_logprobs else "linear_cross_entropy"
            raise InputError(
                f"lm_head: {', '.join(unknown)} are no options of {op}, which return_logprobs={return_logprobs} calls"
            )
        weight = self._weight_for(x) if weight is None else weight
        if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
            x = x.to(weight.dtype)  # such as an fp32 head on a bf16 body
        if workspace_bytes is None:
            workspace_bytes = self.workspace_bytes
        if self.tp is not None:
            unsupported = ["return_logprobs"] * return_logprobs + ["loss_function"] * (loss_function is not None)
            if unsupported := [*unsupported, *sorted(options.keys() - _SHARDED_OPTIONS)]:
                raise InputError(
                    f"lm_head: {', '.join(unsupported)} is not supported under tensor parallel; use a mesh without tp"
                )
            return self._sharded(x, weight, labels, self.tp, softcap, workspace_bytes=workspace_bytes, **options)
        if labels is None:
            return capped(matmul(x, weight, self.bias), softcap)
        options |= {"bias": self.bias, "softcap": softcap, "workspace_bytes": workspace_bytes}
        if return_logprobs:
            return linear_logprobs(x, weight, labels, **options)
        if options.get("num_items_in_batch") is not None:
            check_count(options["num_items_in_batch"])
        return (loss_function or linear_cross_entropy)(x, weight, labels, **options)

    def _sharded(
        self, x: Tensor, weight: Tensor, labels: Tensor | None, tp: MeshGroup, softcap: float | None, **options: Any
    ) -> Tensor:
        """Logits or loss from this rank's rows of the weight."""
        if options.get("num_items_in_batch") is not None:
            check_count(options["num_items_in_batch"])
        weight, bias = local_shard(weight, tp), local_shard(self.bias, tp)
        if labels is None:
            return tp.all_gather_replicated(capped(matmul(x, weight, bias), softcap), -1)
        return vocab_parallel_cross_entropy(
            x, weight, labels, bias=bias, group=tp.group, first_id=tp.rank * len(weight), softcap=softcap, **options
        )

    def _weight_for(self, x: Tensor) -> Tensor:
        """The weight on the device of x. An offloaded table is loaded for this use by the hook of its embedding."""
        weight = self.weight
        if not self.is_tied:
            return weight
        embedding: Any = self._tied_to.embed_tokens  # type: ignore[union-attr]
        if weight.device != x.device and not x.is_meta:
            accelerate = integration("accelerate")
            if accelerate is not None:
                weight = accelerate.load_table(weight, self, embedding, x.device)
            if weight.is_meta:
                raise InputError(
                    "lm_head is tied to an embed_tokens whose weight is on the meta device; load the model"
                )
        if self.tp is None and hasattr(embedding, "unshard") and hasattr(weight, "full_tensor"):
            raise InputError(
                "lm_head is tied to embed_tokens, which FSDP shards as a group of its own: its table is not gathered "
                "when the head runs. Leave embed_tokens to the root's fully_shard(model), or shard both in one group: "
                "fully_shard([model.model.embed_tokens, model.model.norm, model.lm_head])"
            )
        return weight

    def extra_repr(self) -> str:
        tied = ", tied" if self.is_tied else ""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}{tied}"


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """softcap * tanh(logits / softcap), or with None the logits themselves."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def unwrapped(head: nn.Module) -> Callable[..., Any]:
    """`head`, or the LMHead inside of a wrapper of PEFT that only replaces its weight, with that weight."""
    if isinstance(head, LMHead) or not is_plain_call(head):
        return head
    peft = integration("peft")
    return head if peft is None else peft.unwrapped(head)


def takes_labels(head: Callable[..., Any]) -> bool:
    """True if head(x, labels=...) calls an LMHead, directly or through a wrapper of PEFT."""
    head = head.func if isinstance(head, functools.partial) else head
    if isinstance(head, LMHead):
        return True
    peft = integration("peft")
    return peft is not None and peft.saves_heads(head)


def warn_unfused_head(head: nn.Module, x: Tensor) -> None:
    """Warns once in training that the loss needs whole logits, since `head` takes no labels."""
    if warns(x):
        reason = why_not_fused(head, LMHead)
        warn_once(
            "head",
            f"The loss is not fused with lm_head, because of {reason if reason else 'a wrapper around it'}: the logits "
            "of all tokens are in memory. model.fusion_report() says more.",
        )
