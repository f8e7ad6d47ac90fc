"""Small configurations of Qwen2-VL, and batches of text, images and videos for it and later models."""

import torch

import ligermodels
from tests.sizes import SIZES

VOCAB, IMAGE, VIDEO, START, END = 97, 90, 91, 92, 93


def tiny(vision=None, **changes):
    base = dict(
        model_type="qwen2_vl",
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        rope_parameters=rope("default"),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        bos_token_id=None,
        eos_token_id=None,
        vision_config=dict(depth=2, embed_dim=16, num_heads=2, mlp_ratio=2, patch_size=2, hidden_size=32)
        | (vision or {}),
    )
    return {**SIZES, **base, **changes}


def rope(rope_type, sections=(1, 1, 2), **values):
    return {"rope_type": rope_type, "rope_theta": 500.0, "mrope_section": list(sections), **values}


def windowed(**changes):
    return tiny(**{"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, **changes})


def inputs(rows, config=None, *, pad="left"):
    """Arguments of a forward for rows of text lengths and ("image" or "video", (frames, rows, columns)) in tokens.

    The frames of a video stand apart, each after two tokens of text, in all models but Qwen2-VL.
    """
    config = config or tiny()
    apart = config["model_type"] != "qwen2_vl"
    vision = {"spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3, "patch_size": 2}
    vision |= config["vision_config"]
    merge, width = vision["spatial_merge_size"], vision["in_channels"] * vision["temporal_patch_size"] * 4
    sizes, texts = {"image": [], "video": []}, []
    for row in rows:
        text = []
        for part in row:
            if isinstance(part, int):
                text += torch.randint(3, IMAGE, (part,)).tolist()
            else:
                kind, (t, h, w) = part
                sizes[kind].append((t, h * merge, w * merge))
                for frames in [1] * t if apart and kind == "video" else [t]:
                    text += torch.randint(3, IMAGE, (2 * apart,)).tolist() * (kind == "video")
                    text += [START] + [IMAGE if kind == "image" else VIDEO] * (frames * h * w) + [END]
        texts.append(text)
    longest = max(map(len, texts))
    made = {}
    gaps = [[0] * (longest - len(text)) for text in texts]
    sides = (lambda gap, text: gap + text) if pad == "left" else (lambda gap, text: text + gap)
    made["input_ids"] = torch.tensor([sides(gap, text) for gap, text in zip(gaps, texts, strict=True)])
    if any(gaps):
        mask = [sides(gap, [1] * len(text)) for gap, text in zip(gaps, texts, strict=True)]
        made["attention_mask"] = torch.tensor(mask)
    ids = made["input_ids"]
    made["mm_token_type_ids"] = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    names = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}
    for kind, (pixels, grid) in names.items():
        if sizes[kind]:
            made[grid] = torch.tensor(sizes[kind])
            made[pixels] = torch.randn(int(made[grid].prod(1).sum()), width)
    return made


def image(*size):
    return "image", (1, *size)


def video(*size):
    return "video", size


CASES = {
    "one_image": [[4, image(2, 2), 3]],
    "images_of_several_sizes": [[3, image(2, 3), 1, image(1, 1), image(4, 1), 3]],
    "of_one_size": [[2, image(2, 3), 2], [2, image(2, 3), 2]],
    "padded": [[5, image(2, 3), 3], [2, image(4, 1), image(1, 2), 1]],
    "with_and_without": [[9], [2, image(2, 2), 1], [4, image(1, 3), 2]],
    "videos": [[3, video(2, 2, 3), 2], [1, video(3, 2, 1), video(5, 1, 1), 6]],
    "mixed": [[2, video(4, 2, 1), 1, image(2, 2), 2], [6, image(1, 3), video(2, 1, 1), 3], [3, image(2, 1), 1]],
}


def token_mask(batch):
    """bool [B, S]: the tokens that are no padding."""
    return batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()


def load(folder, **options):
    """Our model; of Qwen2-VL with the rule for videos of the transformers that it is compared with."""
    model = ligermodels.load(folder, progress=False, **options)
    if isinstance(model, ligermodels.Qwen2VL):
        model.config.video_rule = "5.x"
    return model
