"""The token table."""

from torch import nn


class Embedding(nn.Embedding):
    """A row per token id: [...] integers -> [..., embedding_dim].

    padding_idx: a row that stays 0 and takes no gradient. Rows start small (normal, std 0.02), as a tied head
    needs them. The gradient is dense, sums duplicates by sorting, never by atomics, and so is the same in
    every run.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, *, padding_idx: int | None = None):
        super().__init__(num_embeddings, embedding_dim, padding_idx=padding_idx)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)
        self._fill_padding_idx_with_zero()
