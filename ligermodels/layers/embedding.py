"""The token table."""

from collections.abc import Mapping

from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.kernels.loss.embedding import embedding
from ligermodels.layers.base import Draw, Layer, Shard, draw_table
from ligermodels.layers.parallel import MeshGroup, local_shard


class Embedding(Layer, nn.Embedding):
    """The rows of token ids: integers [...] -> [..., embedding_dim].

    embed_scale (PEFT reads this name): multiplies the rows; it is rounded to the table's dtype first, as in Gemma's
    training. A tied head reads the rows unscaled. padding_idx: a row that starts at 0 and gets no gradient. Rows are
    drawn with std 0.02, as a tied head needs. The gradient is dense and deterministic.

    Raises InputError for ids that are not int64 or int32, are on another device, or, on the CPU, have no row. On a GPU
    the result of such an id is NaN, since checking would synchronise.

    tp: the ranks over which the rows are sharded (tensor parallel); each looks up its own, and the results are summed.
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

    def init_weights(self, draw: Draw) -> None:
        draw_table(self, draw)

    def shards(self) -> Mapping[str, Shard]:
        return {"weight": Shard("columns", self.num_embeddings, vocabulary(self.num_embeddings))}

    def unread_bytes(self, rows: int) -> float:
        """All but the rows that are looked up; a tied head, which reads the whole table, says so elsewhere."""
        return max(0.0, self.weight.nbytes * (1 - rows / self.num_embeddings))

    def forward(self, input: Tensor) -> Tensor:
        if self.tp is None:
            return embedding(input, self.weight, padding_idx=self.padding_idx, scale=self.embed_scale)
        return self.tp.all_reduce(self._own_rows(input, self.tp))

    def _own_rows(self, ids: Tensor, tp: MeshGroup) -> Tensor:
        """The rows of the ids in this rank's shard, zeros for the others."""
        if ids.device.type == "cpu" and not bool(((ids >= 0) & (ids < self.num_embeddings)).all()):
            low, high = ids.aminmax()
            raise InputError(
                f"ids reach from {int(low)} to {int(high)}, the table from 0 to {self.num_embeddings - 1}; likely the "
                "tokenizer of another model, or a label value such as -100"
            )
        weight = local_shard(self.weight, tp)
        first, rows = tp.rank * len(weight), len(weight)
        elsewhere = (ids >= 0) & (ids < self.num_embeddings) & ((ids < first) | (ids >= first + rows))
        padding = None if self.padding_idx is None else self.padding_idx - first
        embedded = embedding(
            (ids - first).masked_fill(elsewhere, 0),
            weight,
            padding_idx=padding if padding is not None and 0 <= padding < rows else None,
            scale=self.embed_scale,
        )
        return embedded.masked_fill(elsewhere[..., None], 0)

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.embed_scale is None else f", embed_scale={self.embed_scale}")


def vocabulary(rows: int) -> str:
    """What tensor parallel says of a vocabulary that does not fit."""
    return f"a vocabulary of {rows}, which resize_token_embeddings(pad_to_multiple_of={{size}}) pads"
