"""Small configurations of Gemma 4 with images, and inputs for them."""

import torch
from transformers.models.gemma4_unified import modeling_gemma4_unified

from tests.arch.test_gemma4 import FULL, SLIDING, tiny as text_of

IMAGE, PATCH = 93, 2
IDS = dict(
    image_token_id=IMAGE, video_token_id=94, audio_token_id=95, boi_token_id=90, eoi_token_id=91, boa_token_id=92,
    eoa_token_index=96,
)  # fmt: skip
VISION = dict(
    model_type="gemma4_vision", hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, head_dim=8, patch_size=PATCH, position_embedding_size=20,
)  # fmt: skip
EMBEDDER = dict(
    model_type="gemma4_unified_vision", patch_size=PATCH, mm_embed_dim=20, mm_posemb_size=7, output_proj_dims=20
)
NOT_UNIFIED = ("hidden_size_per_layer_input", "vocab_size_per_layer_input")
BOTH_WAYS = dict(use_bidirectional_attention="vision")


def tiny(vision=None, root=None, **text):
    """Whose text has windows of 6 tokens."""
    text = text_of(**{"tie_word_embeddings": True, **text})
    root = {"tie_word_embeddings": text["tie_word_embeddings"], **IDS, **(root or {})}
    return dict(model_type="gemma4", text_config=text, vision_config=VISION | (vision or {})) | root


def unified(vision=None, **text):
    config = tiny(**BOTH_WAYS | text)
    text = {name: value for name, value in config["text_config"].items() if name not in NOT_UNIFIED}
    text["model_type"], vision = "gemma4_unified_text", EMBEDDER | (vision or {})
    return {**config, "model_type": "gemma4_unified", "text_config": text, "vision_config": vision}


def mask_as_gemma4(monkeypatch):
    """gemma4_unified of transformers 5.24 with its masks for static caches also in a plain forward, as gemma4 has it.

    What it does otherwise lets full blocks see an image both ways, and sliding ones beyond the window."""
    module = modeling_gemma4_unified
    plain = module.create_masks_for_generate

    def masks(block_sequence_ids=None, **options):
        if block_sequence_ids is None:
            return plain(**options)
        return module.create_masks_for_vision_model(block_sequence_ids=block_sequence_ids, **options)

    monkeypatch.setattr(module, "create_masks_for_generate", masks)


def inputs(rows, config, pad=None, seed=0):
    """Arguments of forward for rows of parts: a number of random tokens, or ("image", rows, columns), in tokens. pad:
    the side of the padding."""
    torch.manual_seed(seed)
    pooled = config["vision_config"].get("pooling_kernel_size", 3)
    merge, side = (1, pooled * PATCH) if config["model_type"] == "gemma4_unified" else (pooled, PATCH)
    texts, images = [], []
    for row in rows:
        parts = []
        for part in row:
            if isinstance(part, int):
                parts.append(torch.randint(3, 90, (part,)))
            else:
                parts.append(torch.full((part[1] * part[2],), IMAGE))
                images.append((part[1] * merge, part[2] * merge))
        texts.append(torch.cat(parts))
    longest = max(map(len, texts))
    ids, mask = torch.zeros(len(rows), longest, dtype=torch.long), torch.zeros(len(rows), longest, dtype=torch.long)
    for row, text in enumerate(texts):
        place = slice(longest - len(text), None) if pad == "left" else slice(len(text))
        ids[row, place], mask[row, place] = text, 1
    batch = dict(input_ids=ids, mm_token_type_ids=(ids == IMAGE).long())
    if images:
        # transformers pools by the ratio of lengths: a multiple of merge * merge
        count = max(h * w for h, w in images) + 2 * merge**2
        pixels = torch.zeros(len(images), count, 3 * side**2)
        places = torch.full((len(images), count, 2), -1)
        for i, (h, w) in enumerate(images):
            pixels[i, : h * w] = torch.rand(h * w, pixels.shape[2])
            y, x = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
            places[i, : h * w] = torch.stack([x, y], -1).flatten(0, 1)
        batch |= dict(pixel_values=pixels, image_position_ids=places)
    return batch if pad is None else {**batch, "attention_mask": mask}


__all__ = ["BOTH_WAYS", "EMBEDDER", "FULL", "IMAGE", "SLIDING", "inputs", "mask_as_gemma4", "tiny", "unified"]
