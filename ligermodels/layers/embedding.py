"""The token table."""

import torch
from torch import Tensor, nn

from ligermodels.errors import InputError


class Embedding(nn.Embedding):
    """A row per token id: [...] integers -> [..., embedding_dim].

    scale: multiplies the rows, rounded to the table's dtype first, as Gemma's released models were trained; a tied
    head reads the rows as they are. padding_idx: a row that takes no gradient from here, and starts at 0. Rows start
    small (normal, std 0.02), as a tied head needs them. The gradient is dense, sums duplicates by sorting, never by
    atomics, and so is the same in every run.

    Raises InputError for ids that are no int64 or int32, are on another device, or, on the CPU, have no row. CUDA finds
    the last out by an assertion of its own, since looking at them first would mean a wait for the device.
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, *, scale: float | None = None, padding_idx: int | None = None
    ):
        super().__init__(num_embeddings, embedding_dim, padding_idx=padding_idx)
        self.scale = scale

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)
        self._fill_padding_idx_with_zero()

    def forward(self, input: Tensor) -> Tensor:
        if not isinstance(input, Tensor) or input.dtype not in (torch.int64, torch.int32):
            kind = input.dtype if isinstance(input, Tensor) else f"a {type(input).__name__}"
            raise InputError(f"ids are {kind}; they must be a tensor of torch.int64 or torch.int32")
        if input.device != self.weight.device:
            raise InputError(f"ids are on {input.device}, the embedding on {self.weight.device}; move one of them")
        try:
            rows = super().forward(input)
        except IndexError as error:  # on the CPU, where the lookup itself looks at them; it names none
            low, high = input.aminmax()
            raise InputError(
                f"ids reach from {int(low)} to {int(high)}, the table from 0 to {self.num_embeddings - 1}; "
                "likely the tokenizer of another model, or a label value such as -100"
            ) from error
        # A tensor on the CPU: it rounds as the table would, and costs no copy to the device.
        return rows if self.scale is None else rows * torch.tensor(self.scale, dtype=rows.dtype)

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.scale is None else f", scale={self.scale}")
