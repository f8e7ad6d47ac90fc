"""Images and videos among text tokens, as in Qwen2-VL and after it: their sizes, their embeddings, their positions.

An image, or a video, of (frames, rows, columns) patches becomes frames * rows * columns / merge^2 tokens, frame by
frame and row by row. Patches are in the order of their tokens, and within a token row by row.

There is no loop over tokens. Tables for tokens and patches are computed on the device from the sizes of the images,
which are on the host: nothing synchronises.

Sources: Wang et al. 2024, https://arxiv.org/abs/2409.12191; get_rope_index in modeling_qwen2_vl.py and vision_utils.py
of transformers.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.kernels._triton import is_capturing
from ligermodels.layers.base import Draw, Layer, draw_table

Grids = list[tuple[int, int, int]]
"""Frames, rows and columns of each image, in patches."""


class PatchEmbedding(Layer):
    """Patches of pixels [N, width] -> [N, size], by a convolution's weight [size, channels, *kernel] and bias [size].

    That is the shape in checkpoints; on patches that do not overlap the convolution is a matmul. width: channels *
    product of the kernel. Pixels are cast to the weight's dtype. Raises InputError for pixels on another device.
    """

    def __init__(self, channels: int, size: int, kernel: tuple[int, ...], *, bias: bool = False):
        super().__init__()
        self.width = channels * math.prod(kernel)
        self.weight = nn.Parameter(torch.empty(size, channels, *kernel))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None
        self.reset_parameters()

    def init_weights(self, draw: Draw) -> None:
        draw_table(self, draw)

    def forward(self, pixels: Tensor) -> Tensor:
        if pixels.device != self.weight.device:
            raise InputError(f"pixels are on {pixels.device}, the model on {self.weight.device}; move one of them")
        return F.linear(pixels.to(self.weight.dtype), self.weight.flatten(1), self.bias)


class Modality(NamedTuple):
    """All images, or all videos, of a call: name ("image", "video"), the id of their token, sizes."""

    name: str
    token_id: int
    grids: Grids


class VisionInputs:
    """The images and videos of one call. bool() is False if there are none.

    frames_count: whether text after a video counts its frames, see `positions`.
    """

    def __init__(self, modalities: Sequence[Modality], *, merge: int, frames_count: bool = True):
        self.merge = merge
        self.frames_count = frames_count
        self.modalities = modalities
        self.grids: Grids = [grid for modality in self.modalities for grid in modality.grids]

    def __bool__(self) -> bool:
        return bool(self.grids)

    def pixels(self, *by_modality: Tensor | None, width: int) -> Tensor | None:
        """Concatenates the pixels of each modality to those of all patches, [patches, width]; None without images.

        Raises InputError if they do not fit the sizes.
        """
        for (name, _, grids), rows in zip(self.modalities, by_modality, strict=True):
            count, actual = num_tokens(grids, 1), "none"
            if rows is not None and not isinstance(rows, Tensor):
                actual = f"a {type(rows).__name__}"
            elif rows is not None:
                actual = f"{'floats' if rows.is_floating_point() else rows.dtype} {list(rows.shape)}"
            expected = f"floats [{count}, {width}]" if count else "none"
            if actual != expected:
                raise InputError(
                    f"{name} pixels are {actual}, and the sizes in {name}_grid_thw ask for {expected}, a row for each "
                    "patch; take both from one call of the processor"
                )
        parts = [rows for rows in by_modality if rows is not None]
        return torch.cat(parts) if len(parts) > 1 else parts[0] if parts else None

    def places(self, input_ids: Tensor) -> Tensor:
        """Where the tokens of the images stand in the flattened input_ids [B, S], modality by modality, in order.

        Undefined where there are too few; `check_count` raises there.
        """
        ids = input_ids.flatten()
        counts = [(modality.token_id, num_tokens(modality.grids, self.merge)) for modality in self.modalities]
        return torch.cat([(ids != token_id).int().argsort(stable=True)[:count] for token_id, count in counts])

    def check_count(self, input_ids: Tensor) -> Callable[[], None]:
        """Raises InputError if the number of image tokens in input_ids is not that of the sizes.

        On the CPU it checks at once. On a GPU the counts are copied to the host while the forward runs, and the
        returned function, to be called after it, checks them; more tokens than input_ids has are refused at once. Under
        torch.compile and CUDA graph capture, which cannot synchronise, there is no check.
        """
        if torch.compiler.is_compiling() or (input_ids.is_cuda and is_capturing()):
            return lambda: None
        counts = torch.stack([(input_ids == modality.token_id).sum() for modality in self.modalities])
        if not counts.is_cuda or num_tokens(self.grids, self.merge) > input_ids.numel():
            self._compare(counts.tolist())
            return lambda: None
        on_host = torch.empty_like(counts, device="cpu", pin_memory=True)
        on_host.copy_(counts, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(counts.device))  # which may not be the current device

        def check() -> None:
            copied.synchronize()
            self._compare(on_host.tolist())

        return check

    def positions(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        past: int = 0,
        deltas: Tensor | None = None,
    ) -> Tensor:
        """Positions of all tokens by time, row and column: int64 [3, B, S], on the device of input_ids [B, S].

        Text has the same position on all three axes. The tokens of an image that begins at position p are at p +
        (frame, row, column), and the text after it continues at p + max(rows, columns) / merge; with `frames_count`, at
        p + frames if that is larger.

        attention_mask: [B, past + S]; tokens where it is 0 are not counted, and get the position where the text begins.
        cu_seqlens: int32 [N + 1], boundaries of sequences packed into the flattened rows; each counts from 0.
        past: the number of tokens in the cache. deltas: [B, 1], the next position after them minus their number.
        """
        rows, length = input_ids.shape[:2]
        if attention_mask is None:
            attention_mask = torch.ones(rows, past + length, dtype=torch.bool, device=input_ids.device)
        elif attention_mask.shape != (rows, past + length):
            raise InputError(f"attention_mask has shape {list(attention_mask.shape)}, expected {[rows, past + length]}")
        real = attention_mask[:, past:].bool()
        cells = torch.zeros(3, rows, length, dtype=torch.int64, device=input_ids.device)
        steps = real.long()  # from a token to the next; 0 within an image, whose last token makes the whole step
        for _, token_id, grids in self.modalities:
            if grids:
                is_image = (input_ids == token_id) & real
                index = (is_image.flatten().cumsum(0) - 1).view_as(input_ids)
                table = _cells_and_steps(grids, self.merge, self.frames_count, input_ids.device)
                entries = table.index_select(1, index.clamp(0, table.shape[1] - 1).flatten()).view(4, rows, length)
                cells, steps = torch.where(is_image, entries[:3], cells), torch.where(is_image, entries[3], steps)
        if cu_seqlens is None:
            before = steps.cumsum(1) - steps
        else:
            before = steps.flatten().cumsum(0) - steps.flatten()
            tokens = torch.arange(len(before), device=before.device)
            starts = cu_seqlens[torch.bucketize(tokens, cu_seqlens[1:], right=True)]
            before = (before - before[starts.long()]).view(rows, length)
        start = attention_mask[:, :past].long().sum(1, keepdim=True) + (0 if deltas is None else deltas)
        return torch.where(real, cells + before, 0) + start

    def _compare(self, counts: list[int]) -> None:
        for count, (name, token_id, grids) in zip(counts, self.modalities, strict=True):
            expected = num_tokens(grids, self.merge)
            if count != expected:
                raise InputError(
                    f"input_ids have {count} tokens with the {name}_token_id {token_id}, and the {name}s of this call "
                    f"make {expected}. Likely the text was cut, placeholders were not expanded, or a "
                    f"{name} is missing; take ids and pixels from one call of the processor"
                )


def read_grids(name: str, sizes: Tensor | None, merge: int, *, frames_apart: bool = False) -> Grids:
    """The sizes of images or videos from integers [images, 3]. Reading them from a GPU synchronises.

    frames_apart: each frame of a video stands alone among the tokens, as an image does.
    Raises InputError for another shape, or sizes that are no multiples of `merge`.
    """
    if sizes is None:
        return []
    sizes = torch.as_tensor(sizes)
    if sizes.dim() != 2 or sizes.shape[1] != 3 or sizes.is_floating_point():
        raise InputError(
            f"{name}_grid_thw is {sizes.dtype} {list(sizes.shape)}, expected integers [{name}s, 3]: frames, rows "
            "and columns, in patches"
        )
    grids = [(t, h, w) for t, h, w in sizes.tolist()]
    for grid in grids:
        if min(grid) < 1 or grid[1] % merge or grid[2] % merge:
            raise InputError(
                f"{name}_grid_thw contains {list(grid)}: frames, rows and columns must be positive, and rows and "
                f"columns multiples of {merge}, as the image processor makes them"
            )
    return [(1, h, w) for t, h, w in grids for _ in range(t)] if frames_apart else grids


def num_tokens(grids: Grids, merge: int) -> int:
    """The number of tokens of all images; with merge=1 of patches."""
    return sum(t * h * w for t, h, w in grids) // merge**2


def token_cells(grids: Grids, merge: int, device: torch.device) -> Tensor:
    """Frame, row and column of each token within its image: int64 [3, tokens]."""
    frames, rows, columns = _sizes(grids, merge, device).T
    counts, total = frames * rows * columns, num_tokens(grids, merge)
    image = torch.repeat_interleave(counts, output_size=total)
    place = torch.arange(total, device=device) - (counts.cumsum(0) - counts)[image]
    rows, columns = rows[image], columns[image]
    return torch.stack([place // (rows * columns), place // columns % rows, place % columns])


def patch_cells(grids: Grids, merge: int, device: torch.device) -> Tensor:
    """Row and column of each patch within its image: int64 [2, patches]."""
    rows, columns = token_cells(grids, merge, device)[1:, :, None, None] * merge
    inner = torch.arange(merge, device=device)
    return torch.stack(torch.broadcast_tensors(rows + inner[:, None], columns + inner)).flatten(1)


def resampled(grids: Grids, cells: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Bilinear interpolation of a table of side x side positions, stretched over each image so that corners coincide.

    cells: of the patches, from `patch_cells`. Returns the 4 rows of the table around each patch, int64 [4, patches],
    and their weights, fp32 [4, patches].
    """
    sizes = _sizes(grids, 1, cells.device)
    sizes = sizes[:, 1:].repeat_interleave(sizes.prod(1), 0, output_size=cells.shape[1]).T
    places = cells.float() * (side - 1) / (sizes - 1).clamp(min=1)
    first = places.floor()
    rows, columns = torch.stack([first, (first + 1).clamp(max=side - 1)], 1).long()
    down, across = torch.stack([1 - (places - first), places - first], 1)
    return (rows[:, None] * side + columns).flatten(0, 1), (down[:, None] * across).flatten(0, 1)


def _cells_and_steps(grids: Grids, merge: int, frames_count: bool, device: torch.device) -> Tensor:
    """[4, tokens]: the cells, and for the last token of each image the step to the text after it."""
    cells, sizes = token_cells(grids, merge, device), _sizes(grids, merge, device)
    steps = torch.zeros_like(cells[0])
    steps = steps.index_copy(0, sizes.prod(1).cumsum(0) - 1, sizes[:, 0 if frames_count else 1 :].amax(1))
    return torch.cat([cells, steps[None]])


def _sizes(grids: Grids, merge: int, device: torch.device) -> Tensor:
    """Frames, rows and columns of each image, counted in tokens: int64 [images, 3]."""
    sizes = torch.tensor([(t, h // merge, w // merge) for t, h, w in grids], device="cpu")
    return sizes.to(device, non_blocking=True)  # a copy of so few bytes does not wait for the device
