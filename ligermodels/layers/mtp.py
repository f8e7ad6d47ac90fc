"""A layer for multi-token prediction: from a token's hidden state and the next token, the hidden state of that one.

    x = fc([pre_fc_norm_embedding(embedding of token t + 1) | pre_fc_norm_hidden(h of token t)])
    h' = norm(layers(x)),  whose logits by the model's own head are those of token t + 2

h is after the final norm. The layer attends to the inputs of the tokens before, at their positions t, and its own h'
stands for the h of token t + 1 where that is not known: so it proposes any number of tokens, each from the last.

Source: DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.2, which normalises h instead of the model. Checked
against: vllm/model_executor/models/qwen3_5_mtp.py of vLLM, the names and shapes of Qwen3.5's files.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.layers.base import REPLICATED, Layer, Shard
from ligermodels.layers.batch import Batch
from ligermodels.layers.norm import RMSNorm


class MultiTokenPrediction(Layer):
    """forward(embeds, hidden [B, S, hidden_size], batch, cache=None) -> [B, S, hidden_size], after the norm.

    embeds: the embeddings of the next tokens. hidden: the states of the tokens. cache: the state of its one block.
    blocks: a `ResidualBlock` or several; one that carries must read nothing, and what it adds is dropped.
    norm: keyword arguments of the RMSNorms.
    loss_weight: of the loss that `CausalLM.forward` adds in training; 0: the layer does not run.
    tp: the ranks over which its block is sharded (tensor parallel); embeds and hidden are then a rank's shards.
    """

    def __init__(
        self, hidden_size: int, blocks: Iterable[nn.Module], norm: Mapping[str, Any], loss_weight: float = 0.1
    ):
        super().__init__()
        self.loss_weight = loss_weight
        self.fc = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.layers = nn.ModuleList(blocks)
        self.norm = RMSNorm(hidden_size, **norm)
        self.pre_fc_norm_hidden = RMSNorm(hidden_size, **norm)
        self.pre_fc_norm_embedding = RMSNorm(hidden_size, **norm)

    def shards(self) -> Mapping[str, Shard]:
        return {"fc": REPLICATED}  # on each rank's own tokens

    def forward(self, embeds: Tensor, hidden: Tensor, batch: Batch, cache: Any = None) -> Tensor:
        normed = self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(hidden)
        x, residual = self.fc(torch.cat(normed, -1)), None
        for layer in self.layers:
            x, residual, *_ = layer(x, residual, batch, cache, *([_NoCarry()] if layer.carries else []))
        return self.norm(x, residual)[0]


class _NoCarry(dict[str, Any]):
    """The carry of the layer's blocks: it also runs alone, to draft, where no block has run before it."""

    def __missing__(self, name: str) -> Any:
        raise InputError(
            f"a block of the layer for multi-token prediction reads {name!r} of what blocks pass on to each other, and "
            "none runs before it: make_mtp must give it a block that reads nothing"
        )
