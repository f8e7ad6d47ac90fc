"""The token table."""

from torch import Tensor, nn

from ligermodels.kernels.embedding import embedding


class Embedding(nn.Embedding):
    """A row per token id: [...] integers -> [..., embedding_dim].

    embed_scale: multiplies the rows; it is rounded to the table's dtype first, as in Gemma's training. A tied head
    reads the rows unscaled; PEFT reads the attribute by this name. padding_idx: a row that starts at 0 and gets no
    gradient. Rows are drawn with std 0.02, as a tied head needs them. The gradient is dense and deterministic.

    Raises InputError for ids that are not int64 or int32, are on another device, or, on the CPU, have no row. On a GPU
    the row of such an id is NaN, since checking would synchronise.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        embed_scale: float | None = None,
        padding_idx: int | None = None,
    ):
        super().__init__(num_embeddings, embedding_dim, padding_idx=padding_idx)
        self.embed_scale = embed_scale

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:  # there is nothing to draw, and normal_ would import torch._dynamo: a second
            nn.init.normal_(self.weight, std=0.02)
            self._fill_padding_idx_with_zero()

    def forward(self, input: Tensor) -> Tensor:
        return embedding(input, self.weight, padding_idx=self.padding_idx, scale=self.embed_scale)

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.embed_scale is None else f", embed_scale={self.embed_scale}")
