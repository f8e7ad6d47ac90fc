"""Folders of small checkpoints with images: tokenizer, chat template and image processor, without weights."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import AddedToken, processors

from tests.text.folders import trained_bytes, write

# As the Hub has them: the generation of transformers 4.
QWEN = {
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2VLProcessor",
}
QWEN3 = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
QWEN3_VIDEO = {
    **{key: value for key, value in QWEN3.items() if key != "image_processor_type"},
    "size": {"longest_edge": 25165824, "shortest_edge": 4096},
    "video_processor_type": "Qwen3VLVideoProcessor",
}
MLLAMA = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_pad": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_processor_type": "MllamaImageProcessor",
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "max_image_tiles": 4,
    "resample": 2,
    "rescale_factor": 0.00392156862745098,
    "size": {"height": 560, "width": 560},
}
GEMMA3 = {
    "do_convert_rgb": None,
    "do_normalize": True,
    "do_pan_and_scan": None,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "Gemma3ImageProcessor",
    "image_seq_length": 256,
    "image_std": [0.5, 0.5, 0.5],
    "pan_and_scan_max_num_crops": None,
    "pan_and_scan_min_crop_size": None,
    "pan_and_scan_min_ratio_to_activate": None,
    "processor_class": "Gemma3Processor",
    "resample": 2,
    "rescale_factor": 0.00392156862745098,
    "size": {"height": 896, "width": 896},
}
GEMMA3_TOKENS = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
GEMMA4 = {
    "do_convert_rgb": True,
    "do_normalize": False,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.0, 0.0, 0.0],
    "image_processor_type": "Gemma4ImageProcessor",
    "image_seq_length": 280,
    "image_std": [1.0, 1.0, 1.0],
    "max_soft_tokens": 280,
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
}
GEMMA4_TOKENS = {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>"}
GEMMA4_TOKENS |= {"boa_token": "<|audio>", "eoa_token": "<audio|>", "audio_token": "<|audio|>"}
QWEN_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
QWEN_TOKENS += ("<|image_pad|>", "<|video_pad|>")
MLLAMA_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
MLLAMA_TOKENS += ("<|finetune_right_pad_id|>", "<|python_tag|>", "<|image|>")

QWEN_TEMPLATE = """{%- set seen = namespace(images=0) -%}
{%- for message in messages -%}
{%- if loop.first and message['role'] != 'system' -%}{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{%- endif -%}
{{ '<|im_start|>' + message['role'] + '\n' }}
{%- if message['content'] is string -%}{{ message['content'] }}{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' or 'image' in part or 'image_url' in part -%}
{%- set seen.images = seen.images + 1 -%}
{%- if add_vision_id -%}{{ 'Picture ' ~ seen.images ~ ': ' }}{%- endif -%}
{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part['type'] == 'video' or 'video' in part -%}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- elif 'text' in part -%}{{ part['text'] }}{%- endif -%}
{%- endfor -%}{%- endif -%}{{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""
MLLAMA_TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
{%- if message['content'] is string %}{{- message['content'] }}{%- else %}
{%- for part in message['content'] %}
{%- if part['type'] == 'image' %}{{- '<|image|>' }}{%- elif part['type'] == 'text' %}{{- part['text'] }}{%- endif %}
{%- endfor %}{%- endif %}{{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

GEMMA3_TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
{{- '<start_of_turn>' + message['role'].replace('assistant', 'model') + '\n' }}
{%- if message['content'] is string %}{{- message['content'] }}{%- else %}
{%- for part in message['content'] %}
{%- if part['type'] == 'image' %}{{- '<start_of_image>' }}{%- endif %}
{%- if part['type'] == 'text' %}{{- part['text'] }}{%- endif %}
{%- endfor %}{%- endif %}{{- '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}"""


GEMMA4_TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
{{- '<|turn>' + message['role'].replace('assistant', 'model') + '\n' }}
{%- if message['content'] is string %}{{- message['content'] }}{%- else %}
{%- for part in message['content'] %}
{%- if part['type'] == 'image' %}{{- '\n\n<|image|>\n\n' }}{%- endif %}
{%- if part['type'] == 'text' %}{{- part['text'] }}{%- endif %}
{%- endfor %}{%- endif %}{{- '<turn|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|turn>model\n' }}{%- endif %}"""


def _tokenizer(folder: Path, special: tuple[str, ...], **config: Any) -> None:
    native = trained_bytes(r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", size=400)
    native.post_processor = processors.ByteLevel(trim_offsets=False)
    native.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    write(folder, "tokenizer.json", native.to_str())
    write(folder, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **config})


def qwen2_vl(folder: Path, **config: Any) -> Path:
    """Files as on the Hub. config: changes of preprocessor_config.json."""
    _tokenizer(folder, QWEN_TOKENS, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template="text only")
    write(folder, "chat_template.json", {"chat_template": QWEN_TEMPLATE})
    write(folder, "config.json", {"model_type": "qwen2_vl"})
    write(folder, "preprocessor_config.json", QWEN | config)
    return folder


def qwen3_vl(folder: Path, video: dict[str, Any] | None = None, **config: Any) -> Path:
    """Files as on the Hub. config: changes of preprocessor_config.json; video: of the file for videos."""
    qwen2_vl(folder)
    write(folder, "config.json", {"model_type": "qwen3_vl"})
    write(folder, "preprocessor_config.json", QWEN3 | config)
    write(folder, "video_preprocessor_config.json", QWEN3_VIDEO | (video or {}))
    return folder


def qwen3_vl_moe(folder: Path, video: dict[str, Any] | None = None, **config: Any) -> Path:
    qwen3_vl(folder, video, **config)
    write(folder, "config.json", {"model_type": "qwen3_vl_moe"})
    return folder


def qwen3_5(folder: Path, video: dict[str, Any] | None = None, **config: Any) -> Path:
    qwen3_vl(folder, video, **config)
    write(folder, "config.json", {"model_type": "qwen3_5"})
    return folder


def qwen3_5_moe(folder: Path, video: dict[str, Any] | None = None, **config: Any) -> Path:
    qwen3_vl(folder, video, **config)
    write(folder, "config.json", {"model_type": "qwen3_5_moe"})
    return folder


def mllama(folder: Path, **config: Any) -> Path:
    special = {"bos_token": MLLAMA_TOKENS[0], "eos_token": "<|eot_id|>", "pad_token": "<|finetune_right_pad_id|>"}
    _tokenizer(folder, MLLAMA_TOKENS, **special)
    write(folder, "chat_template.jinja", MLLAMA_TEMPLATE)
    write(folder, "config.json", {"model_type": "mllama"})
    write(folder, "preprocessor_config.json", MLLAMA | config)
    return folder


def gemma3(folder: Path, **config: Any) -> Path:
    tokens = ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", *GEMMA3_TOKENS.values())
    special = {"bos_token": "<bos>", "eos_token": "<end_of_turn>", "pad_token": "<pad>", **GEMMA3_TOKENS}
    _tokenizer(folder, tokens, **special, extra_special_tokens=GEMMA3_TOKENS)
    write(folder, "chat_template.jinja", GEMMA3_TEMPLATE)
    write(folder, "config.json", {"model_type": "gemma3"})
    write(folder, "preprocessor_config.json", GEMMA3 | config)
    length = config.get("image_seq_length", 256)
    write(folder, "processor_config.json", {"image_seq_length": length, "processor_class": "Gemma3Processor"})
    return folder


def gemma4(folder: Path, **config: Any) -> Path:
    tokens = ("<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>", *GEMMA4_TOKENS.values(), "<|video|>")
    special = {"bos_token": "<bos>", "eos_token": "<turn|>", "pad_token": "<pad>", **GEMMA4_TOKENS}
    _tokenizer(folder, tokens, **special, extra_special_tokens=GEMMA4_TOKENS)
    write(folder, "chat_template.jinja", GEMMA4_TEMPLATE)
    write(folder, "config.json", {"model_type": "gemma4"})
    write(folder, "processor_config.json", {"image_processor": GEMMA4 | config, "processor_class": "Gemma4Processor"})
    return folder


def gemma4_unified(folder: Path, **config: Any) -> Path:
    gemma4(folder, image_processor_type="Gemma4UnifiedImageProcessor", **config)
    write(folder, "config.json", {"model_type": "gemma4_unified"})
    return folder


def draw(height: int, width: int, seed: int = 0) -> Image.Image:
    """Smooth colours with noise on them: resizing, channels and places that are mixed up show."""
    generator = np.random.default_rng(seed)
    down, across = np.linspace(0, 1, height)[:, None, None], np.linspace(0, 1, width)[None, :, None]
    waves = np.sin(down * generator.uniform(1, 9, 3) + across * generator.uniform(1, 9, 3) + generator.uniform(0, 9, 3))
    pixels = 128 + 90 * waves + generator.normal(0, 20, (height, width, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
