"""Small configurations of Llama-3.2-Vision, and batches of images for them."""

import torch
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

from tests.arch.suite import rope
from tests.sizes import SIZES

IMAGE = SIZES["vocab_size"]
RATIOS = [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]]


def tiny(vision=(), rope_parameters=None, **text):
    """A tile has 4 patches of 4 x 4 pixels and the class token."""
    base = dict(
        model_type="mllama_text_model",
        num_hidden_layers=4,
        cross_attention_layers=[1, 3],
        max_position_embeddings=128,
        rope_parameters=rope_parameters or rope("default"),
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    tower = dict(
        model_type="mllama_vision_model",
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_global_layers=2,
        attention_heads=2,
        image_size=8,
        patch_size=4,
        intermediate_layers_indices=[0, 2, 3],
        vision_output_dim=64,
    )
    return dict(
        model_type="mllama",
        text_config={**SIZES, **base, **text},
        vision_config={**tower, **dict(vision)},
        image_token_index=IMAGE,
    )


def images(config, placed, length=24, seed=3):
    """ids with an image token at each place, the images' arguments, and labels.

    placed: for each row a list of (place, index of the aspect ratio).
    """
    generator = torch.Generator().manual_seed(seed)
    text, vision = config["text_config"], config["vision_config"]
    ratios, tiles = vision.get("supported_aspect_ratios", RATIOS), vision.get("max_num_tiles", 4)
    side, most = vision["image_size"], max(1, *(len(row) for row in placed))
    ids = torch.randint(3, text["vocab_size"], (len(placed), length), generator=generator)
    shape = (len(placed), most, tiles, vision.get("num_channels", 3), side, side)
    pixels = torch.zeros(shape)
    ratio_ids = torch.zeros(len(placed), most, dtype=torch.long)
    there = torch.zeros(len(placed), most, tiles, dtype=torch.long)
    there[..., 0] = 1
    counts = []
    for row, found in enumerate(placed):
        counts.append([ratios[kind][0] * ratios[kind][1] for _, kind in found])
        for image, ((place, kind), count) in enumerate(zip(found, counts[-1], strict=True)):
            ids[row, place] = IMAGE
            pixels[row, image, :count] = torch.randn(shape[2:], generator=generator)[:count]
            ratio_ids[row, image] = 1 + kind
            there[row, image, :count] = 1
    spans = [get_cross_attention_token_mask(row, IMAGE) for row in ids.tolist()]
    mask = torch.from_numpy(convert_sparse_cross_attention_mask_to_dense(spans, counts, tiles, length))
    mask = torch.nn.functional.pad(mask, (0, 0, 0, most - mask.shape[2]))
    return ids, ids.masked_fill(ids == IMAGE, -100), dict(
        pixel_values=pixels, aspect_ratio_ids=ratio_ids, aspect_ratio_mask=there, cross_attention_mask=mask
    )  # fmt: skip


def placements(config):
    """Every aspect ratio once; text before the first image, neighbours, rows with fewer and with none."""
    kinds = len(config["vision_config"].get("supported_aspect_ratios", RATIOS))
    kinds = list(range(kinds)) * 2
    return [[(0, kinds[0]), (1, kinds[1]), (9, kinds[2])], [(4, kinds[3]), (11, kinds[4])], [(7, kinds[5])], []]
