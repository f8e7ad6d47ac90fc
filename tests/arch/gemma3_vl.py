"""Small configurations of Gemma 3 with images, and inputs for them."""

import torch

from tests.arch.test_gemma3 import tiny as text_of

IMAGE, SIZE, TOKENS = 93, 12, 4
VISION = dict(
    model_type="siglip_vision_model", hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
    image_size=SIZE, patch_size=2, vision_use_head=False,
)  # fmt: skip


def tiny(vision=None, root=None, **text):
    """Of 6 x 6 patches and 4 tokens an image, whose text has windows of 6 tokens."""
    text = text_of(**{"tie_word_embeddings": True, **text})
    root = {"tie_word_embeddings": text["tie_word_embeddings"], **(root or {})}
    ids = dict(image_token_index=IMAGE, boi_token_index=94, eoi_token_index=95, mm_tokens_per_image=TOKENS)
    return dict(model_type="gemma3", text_config=text, vision_config={**VISION, **(vision or {})}, **{**ids, **root})


def inputs(rows, config, pad=None, seed=0):
    """Arguments of forward for rows of parts: a number of random tokens, or "image". pad: the side of the padding."""
    torch.manual_seed(seed)
    size, tokens = config["vision_config"]["image_size"], config["mm_tokens_per_image"]
    texts = [
        torch.cat([torch.full((tokens,), IMAGE) if part == "image" else torch.randint(3, 90, (part,)) for part in row])
        for row in rows
    ]
    longest = max(map(len, texts))
    ids, mask = torch.zeros(len(rows), longest, dtype=torch.long), torch.zeros(len(rows), longest, dtype=torch.long)
    for row, text in enumerate(texts):
        place = slice(longest - len(text), None) if pad == "left" else slice(len(text))
        ids[row, place], mask[row, place] = text, 1
    count = sum(row.count("image") for row in rows)
    pixels = torch.randn(count, config["vision_config"].get("num_channels", 3), size, size)
    batch = dict(input_ids=ids, token_type_ids=(ids == IMAGE).long())
    batch |= {"pixel_values": pixels} if count else {}
    return batch if pad is None else {**batch, "attention_mask": mask}
