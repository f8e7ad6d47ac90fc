"""NEFTune: noise on the embeddings in training.

    x + uniform(-1, 1) alpha / sqrt(L d)

x: an embedding of d numbers, of a token in a row of L tokens. Paper: https://arxiv.org/abs/2310.05914. transformers
takes the length of the padded or packed batch for L; here it is that of the token's own row, as in the paper.
"""

from typing import Any

import torch
from torch import Tensor, nn


class Neftune:
    """Adds noise to the embeddings of a model in training until `remove`. The random numbers are torch's own."""

    def __init__(self, model: Any, alpha: float) -> None:
        self.model, self.alpha = model, alpha
        self._inputs: dict[str, Any] = {}  # of the forward that runs
        embedding: nn.Module = model.get_input_embeddings()
        self._handles = [
            model.register_forward_pre_hook(self._note, with_kwargs=True),
            embedding.register_forward_hook(self._add),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _note(self, model: nn.Module, args: Any, inputs: dict[str, Any]) -> None:
        self._inputs = inputs

    def _add(self, embedding: nn.Module, args: Any, x: Tensor) -> Tensor | None:
        if not self.model.training:
            return None
        lengths = row_lengths(x.shape[:-1], self._inputs)
        scale = self.alpha * (lengths * x.shape[-1]).rsqrt()
        noise = torch.empty_like(x, dtype=torch.float32, requires_grad=False).uniform_(-1, 1)
        return x + (noise * scale[..., None].to(x.device)).to(x.dtype)


def row_lengths(shape: torch.Size, inputs: dict[str, Any]) -> Tensor:
    """For each token of ids [B, S] the number of tokens of its row, fp32 [B, S].

    inputs: of the model, with cu_seqlens of packed rows, or the attention_mask of padded ones.
    """
    if (bounds := inputs.get("cu_seqlens")) is not None:
        lengths = bounds.diff()
        return lengths.repeat_interleave(lengths, output_size=shape.numel()).view(shape).float()
    if (mask := inputs.get("attention_mask")) is not None:
        return mask.sum(-1, keepdim=True).clamp(min=1).expand(shape).float()
    return torch.full(shape, float(shape[-1]), device=inputs["input_ids"].device)
