"""The output head: logits, or with labels the loss or log probabilities, for which the logits are never whole.

Head and loss are one module called as a module, so that FSDP, ZeRO and adapters see the weight being used.
"""

import torch
from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.kernels.cross_entropy import CrossEntropyOutput
from ligermodels.kernels.linear_cross_entropy import linear_cross_entropy
from ligermodels.kernels.linear_logprobs import LogprobsOutput, linear_logprobs
from ligermodels.layers.losses import check_count


class _Head(nn.Module):
    weight: Tensor
    bias: Tensor | None
    softcap: float | None
    chunk_bytes: int | None = None
    """Memory for the logits of a chunk where a call says nothing; None: what `linear_cross_entropy` finds best.

    `model.lm_head.chunk_bytes = 256 * 2**20` makes room where the head is a step's peak, for some of its time. Set it
    on the head itself, before something is wrapped around that.
    """

    def forward(
        self,
        x: Tensor,
        labels: Tensor | None = None,
        *,
        num_items_in_batch: Tensor | int | None = None,
        num_valid: int | None = None,
        class_weight: Tensor | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        reduction: str = "mean",
        token_scaling: bool = False,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        return_entropy: bool = False,
        return_logprobs: bool = False,
        temperature: float = 1.0,
        return_logits_mean: bool = False,
        accum_dtype: torch.dtype | None = torch.float32,
        chunk_bytes: int | None = None,
    ) -> Tensor | CrossEntropyOutput | LogprobsOutput:
        """Logits [..., V] of x [..., hidden_size]; with labels [...], shifted already, the loss.

        The options are those of `ligermodels.kernels.linear_cross_entropy`, and count only with labels.
        return_logprobs: log probabilities [...] of the labels instead, as `ligermodels.kernels.linear_logprobs`
        gives them, whose options temperature, return_entropy and return_logits_mean are then available, and of the
        loss's only those that are its own too.
        """
        chunk_bytes = self.chunk_bytes if chunk_bytes is None else chunk_bytes
        if labels is None:
            logits = nn.functional.linear(x, self.weight, self.bias)
            return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)
        if return_logprobs:
            of_the_loss = {
                "num_items_in_batch": num_items_in_batch is not None,
                "class_weight": class_weight is not None,
                "label_smoothing": label_smoothing != 0.0,
                "z_loss": z_loss != 0.0,
                "reduction": reduction not in ("mean", "none"),
                "token_scaling": token_scaling,
                "return_z_loss": return_z_loss,
                "return_token_accuracy": return_token_accuracy,
                "return_predicted_tokens": return_predicted_tokens,
            }
            if any(of_the_loss.values()):
                given = ", ".join(name for name, set_ in of_the_loss.items() if set_)
                raise InputError(f"{given}: options of the loss, which return_logprobs=True does not compute")
            return linear_logprobs(
                x,
                self.weight,
                labels,
                bias=self.bias,
                softcap=self.softcap,
                ignore_index=ignore_index,
                temperature=temperature,
                return_entropy=return_entropy,
                return_logits_mean=return_logits_mean,
                num_valid=num_valid,
                accum_dtype=accum_dtype,
                chunk_bytes=chunk_bytes,
            )
        if temperature != 1.0 or return_logits_mean:
            raise InputError("temperature and return_logits_mean belong to return_logprobs=True")
        if num_items_in_batch is not None:
            check_count(num_items_in_batch)
        return linear_cross_entropy(
            x,
            self.weight,
            labels,
            bias=self.bias,
            softcap=self.softcap,
            num_items_in_batch=num_items_in_batch,
            num_valid=num_valid,
            class_weight=class_weight,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            reduction=reduction,
            token_scaling=token_scaling,
            return_z_loss=return_z_loss,
            return_token_accuracy=return_token_accuracy,
            return_predicted_tokens=return_predicted_tokens,
            return_entropy=return_entropy,
            accum_dtype=accum_dtype,
            chunk_bytes=chunk_bytes,
        )


class LMHead(_Head, nn.Linear):  # type: ignore[misc]
    """A linear head with its own weight [vocab_size, hidden_size].

    softcap: logits become softcap * tanh(logits / softcap), in the loss too.
    """

    def __init__(self, hidden_size: int, vocab_size: int, *, bias: bool = False, softcap: float | None = None):
        nn.Linear.__init__(self, hidden_size, vocab_size, bias=bias)
        self.softcap = softcap


class TiedLMHead(_Head):
    """A head whose weight is the table of `embedding`.

    It owns no parameter and registers no module: the table keeps its one name in `state_dict()`, moves, casts
    and is materialised with the embedding, and stays shared when a model that holds both is copied. Both write their
    gradients into one buffer where `ligermodels.training.gradients.accumulate_in_place` was called.
    """

    embedding: nn.Embedding

    def __init__(self, embedding: nn.Embedding, *, softcap: float | None = None):
        super().__init__()
        object.__setattr__(self, "embedding", embedding)  # past nn.Module, which would register it
        self.softcap = softcap

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self.embedding.weight

    @property
    def bias(self) -> None:  # type: ignore[override]
        return None

    def extra_repr(self) -> str:
        return f"{self.embedding.embedding_dim}, {self.embedding.num_embeddings}, softcap={self.softcap}"
