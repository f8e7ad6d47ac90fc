"""Processors: text with placeholders and images to the inputs of a model.

The placeholder of Qwen's models is repeated once for every embedding of the tower; Llama-3.2-Vision's stays one token,
with a cross-attention mask over tokens and tiles; Gemma 4's is repeated between two further tokens. Placeholders are
found in the ids, not in the text. Gemma 3's becomes text with line ends around it, before the text is encoded: line
ends that meet are one token.

From Qwen3-VL on a video becomes, for every two frames, their time and a placeholder of an image's form:
<0.2 seconds><|vision_start|><|video_pad|><|vision_end|>. They take the place of <|vision_start|><|video_pad|>
<|vision_end|> in the text, as in the models' own code and in transformers 4.57; 5.23 leaves that outer pair of tokens.

Checked against transformers 5.23, processing_utils.ProcessorMixin and the processors of the models.
"""

import base64
import itertools
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ligermodels.checkpoint.files import read_json
from ligermodels.errors import ConfigError, InputError
from ligermodels.text import Tokenizer, batch
from ligermodels.vision.gemma3 import Gemma3ImageProcessor
from ligermodels.vision.gemma4 import Gemma4ImageProcessor, Gemma4UnifiedImageProcessor
from ligermodels.vision.mllama import MllamaImageProcessor, cross_attention_mask
from ligermodels.vision.qwen2_vl import Qwen2VLImageProcessor, Qwen3VLVideoProcessor

CONFIGS = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
FAMILIES = {
    "qwen2_vl": "Qwen2VLImageProcessor",
    "qwen3_vl": "Qwen2VLImageProcessor",
    "qwen3_vl_moe": "Qwen2VLImageProcessor",
    "qwen3_5": "Qwen2VLImageProcessor",
    "qwen3_5_moe": "Qwen2VLImageProcessor",
    "mllama": "MllamaImageProcessor",
    "gemma3": "Gemma3ImageProcessor",
    "gemma4": "Gemma4ImageProcessor",
    "gemma4_unified": "Gemma4UnifiedImageProcessor",
}
"""model_type of config.json -> image_processor_type of preprocessor_config.json, which may end in Fast or Pil."""

FPS = 2.0
"""The frames a second that Qwen3-VL is made for."""

_ON_THE_HOST = ("_grid_thw", "_position_ids")
_SOURCES = {"image": ("image", "image_url", "url", "path", "base64"), "video": ("video", "url", "path")}
"""The keys of a message part's image or video."""


class ModelInputs(dict[str, Tensor]):
    """Inputs for `model(**inputs)` and `model.generate(**inputs)`, on the CPU."""

    def to(self, device: str | torch.device | None = None, dtype: torch.dtype | None = None) -> "ModelInputs":
        """A copy on `device`; `dtype` applies to floating-point tensors.

        `image_grid_thw`, `video_grid_thw` and `image_position_ids` stay on the CPU, where the model reads them without
        synchronising.
        """
        moved = {name: x.to(device, dtype if x.is_floating_point() else None) for name, x in self.items()}
        return ModelInputs(moved | {name: x for name, x in self.items() if name.endswith(_ON_THE_HOST)})


class Processor:
    """Tokenizer, image processor and chat template of a vision-language checkpoint.

        processor = ligermodels.Processor.from_hub("Qwen/Qwen2-VL-2B-Instruct")
        question = [{"type": "image", "image": "cat.png"}, {"type": "text", "text": "What is this?"}]
        inputs = processor.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
        ids = model.generate(**inputs.to("cuda"), max_new_tokens=99, eos_token_id=processor.tokenizer.chat_stop_ids)

    tokenizer: the `Tokenizer`. image_processor: a `Qwen2VLImageProcessor`, `MllamaImageProcessor`,
    `Gemma3ImageProcessor`, `Gemma4ImageProcessor` or `Gemma4UnifiedImageProcessor`.
    video_processor: a `Qwen2VLImageProcessor` with the limits for frames, from Qwen3-VL on a `Qwen3VLVideoProcessor`;
    None in a family without videos.
    image_token, video_token: the placeholders in a text.
    chat_template: used in place of the tokenizer's chat template.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        image_processor: Qwen2VLImageProcessor | MllamaImageProcessor | Gemma3ImageProcessor | Gemma4ImageProcessor,
        video_processor: Qwen2VLImageProcessor | None = None,
        *,
        chat_template: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.video_processor = video_processor
        self.image_token = image_processor.image_token
        self.video_token = "<|video_pad|>" if video_processor else None
        self.chat_template = chat_template
        self._tokens: dict[str, int] = {}
        others = ((token, token) for token in image_processor.other_tokens)
        for kind, token in (("image", self.image_token), ("video", self.video_token), *others):
            index = None if token is None else tokenizer.token_to_id(token)
            if index is not None:
                self._tokens[kind] = index
            elif token is not None:
                raise ConfigError(
                    f"{tokenizer.files.folder}: the tokenizer has no {token}. Likely cause: the tokenizer of a text "
                    "model beside the image processor of another checkpoint."
                )

    @classmethod
    def from_hub(cls, id_or_folder: str | Path, **options: Any) -> "Processor":
        """From a repository id or a folder. Downloads no weights.

        options: revision, subfolder, token, cache_dir, local_files_only, as for `Tokenizer.from_hub`.
        Raises HubError, TokenizerError, CheckpointError (a file that is not JSON), ConfigError.
        """
        from ligermodels.checkpoint import hub

        return cls.from_folder(hub.resolve(id_or_folder, weights=False, **options))

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Processor":
        """From the tokenizer's files and preprocessor_config.json, or processor_config.json (transformers 5)."""
        folder = Path(folder)
        image, video, where = _read_configs(folder)
        family = _family(folder, image, where)
        tokenizer = Tokenizer.from_folder(folder)
        template = _processor_template(folder)
        if family == "mllama":
            return cls(tokenizer, MllamaImageProcessor.from_config(image, where=where), chat_template=template)
        if family == "gemma3":
            nested = read_json(folder / "processor_config.json") if (folder / "processor_config.json").is_file() else {}
            image = {**image, **{key: nested[key] for key in ("image_seq_length",) if key in nested}}
            return cls(tokenizer, Gemma3ImageProcessor.from_config(image, where=where), chat_template=template)
        if family in ("gemma4", "gemma4_unified"):
            of_images = Gemma4ImageProcessor if family == "gemma4" else Gemma4UnifiedImageProcessor
            return cls(tokenizer, of_images.from_config(image, where=where), chat_template=template)
        of_videos = Qwen2VLImageProcessor if family == "qwen2_vl" else Qwen3VLVideoProcessor
        frames = of_videos.from_config(video, video=True, where=f"{where} (videos)")
        return cls(tokenizer, Qwen2VLImageProcessor.from_config(image, where=where), frames, chat_template=template)

    def __call__(
        self,
        text: str | Sequence[str],
        images: Any = None,
        videos: Any = None,
        *,
        fps: float | Sequence[float] | None = None,
        padding_side: str = "left",
        add_special_tokens: bool = True,
        padding: bool = True,
        return_tensors: str = "pt",
    ) -> ModelInputs:
        """The inputs of the model for one text or a list of texts.

        Returns input_ids and attention_mask, int64 [B, S]. Gemma 3: also pixel_values for images. Gemma 4: also
        pixel_values and image_position_ids for images. Qwen's models: also pixel_values and image_grid_thw for images,
        pixel_values_videos and video_grid_thw for videos. Llama-3.2-Vision: also pixel_values, aspect_ratio_ids,
        aspect_ratio_mask and cross_attention_mask for images.

        text: with one placeholder (`image_token`, `video_token`) for each image and video.
        images: for one text an image or a list of them; for several texts a list of lists, one for each text, or one
        list, divided by the number of placeholders. An image is anything that `vision.load_image` takes.
        videos: likewise; a video is a list of frames, or an array [frames, H, W, 3], or a tensor [frames, 3, H, W].
        fps: how many frames of a second the videos have, or of each video; default 2. Qwen3-VL and Qwen3.5 read times.
        padding_side: "left" to generate, "right" for most trainers.
        add_special_tokens: adds the checkpoint's special tokens around a text (BOS, unless the text has it; for
        Llama-3.2-Vision after the placeholders at the start).
        padding, return_tensors: only True and "pt", as transformers' processors are usually called.
        Raises InputError.
        """
        if padding_side not in ("left", "right") or not padding or return_tensors != "pt":
            raise InputError(
                f"padding_side must be 'left' or 'right', padding True and return_tensors 'pt', not {padding_side!r}, "
                f"{padding!r} and {return_tensors!r}: a batch is padded tensors."
            )
        texts = [text] if isinstance(text, str) else text
        if not isinstance(texts, list | tuple) or not all(isinstance(entry, str) for entry in texts):
            raise InputError(f"text must be a str or a list of them, not {str(text)[:80]!r}. images= takes images.")
        if videos is not None and self.video_processor is None:
            raise InputError("this model takes no videos. Next step: pass some frames as images.")
        if fps is not None and not isinstance(self.video_processor, Qwen3VLVideoProcessor):
            raise InputError("this model reads no times of frames. Next step: leave fps out.")
        rows = [self._encode(entry, add_special_tokens) for entry in texts]
        images = self._per_text("image", images, rows)
        if isinstance(self.image_processor, MllamaImageProcessor):
            pixels, tiles = self.image_processor(images)
            inputs = batch.padded(rows, padding_side, self.tokenizer.padding_id)
            if pixels:
                inputs["cross_attention_mask"] = cross_attention_mask(
                    inputs["input_ids"], self._tokens["image"], tiles, self.image_processor.max_image_tiles
                )
            return ModelInputs(inputs | pixels)
        names = [f"image {place} of text {row}" for row, some in enumerate(images) for place in range(len(some))]
        if isinstance(self.image_processor, Gemma3ImageProcessor):
            squares: dict[str, Tensor] = {}
            if names:
                squares, counts = self.image_processor([image for some in images for image in some], names)
                parts = iter(map(self.image_processor.text_of, counts))
                expanded = [re.sub(re.escape(self.image_token), lambda _: next(parts), entry) for entry in texts]
                rows = [self._encode(entry, add_special_tokens) for entry in expanded]
            return ModelInputs(batch.padded(rows, padding_side, self.tokenizer.padding_id) | squares)
        if isinstance(self.image_processor, Gemma4ImageProcessor):
            patches: dict[str, Tensor] = {}
            if names:
                patches, counts = self.image_processor([image for some in images for image in some], names)
                start, end = (self._tokens[token] for token in self.image_processor.other_tokens)
                rows = _repeat(rows, self._tokens["image"], counts, [start], [end])
            return ModelInputs(batch.padded(rows, padding_side, self.tokenizer.padding_id) | patches)
        clips = self._per_text("video", videos, rows)
        media: dict[str, Tensor] = {}
        if any(clips) and self.video_processor is not None:
            media |= self.video_processor.videos([clip for some in clips for clip in some])
            grids = media["video_grid_thw"]
            if isinstance(self.video_processor, Qwen3VLVideoProcessor):
                rows = [self._encode(entry, add_special_tokens) for entry in self._with_times(texts, clips, fps)]
                grids = grids.repeat_interleave(grids[:, 0], 0).index_fill(1, torch.tensor(0), 1)
            rows = _repeat(rows, self._tokens["video"], map(self.video_processor.num_tokens, grids))
        if any(images):
            media |= self.image_processor([image for some in images for image in some], names)
            of_images = map(self.image_processor.num_tokens, media["image_grid_thw"])
            rows = _repeat(rows, self._tokens["image"], of_images)
        return ModelInputs(batch.padded(rows, padding_side, self.tokenizer.padding_id) | media)

    def apply_chat_template(
        self,
        messages: Sequence[Any],
        images: Any = None,
        videos: Any = None,
        *,
        fps: float | Sequence[float] | None = None,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        chat_template: str | None = None,
        padding_side: str = "left",
        return_tensors: str = "pt",
        return_dict: bool = True,
        **options: Any,
    ) -> ModelInputs | str | list[str]:
        """A conversation, or a list of conversations, as inputs of the model; as text with tokenize=False.

        messages: [{"role": ..., "content": ...}]; a content is a str or a list of parts: {"type": "text", "text":
        ...}, {"type": "image", "image": image} (or url, path, base64, image_url), {"type": "video", "video":
        frames}. images, videos: for parts without their own, such as {"type": "image"}, in order. fps: as in a call.
        options: those of `Tokenizer.apply_chat_template`, including variables of the template.
        Raises TokenizerError where the template refuses the conversation, InputError.
        """
        if return_tensors != "pt" or not return_dict:
            raise InputError(
                "return_tensors must be 'pt' and return_dict True: a dict of tensors is returned. Next step: take "
                "['input_ids'] of it for the ids, or tokenize=False for the text."
            )
        is_batch = bool(messages) and not isinstance(messages[0], Mapping)
        chats = [split_media(chat) for chat in (messages if is_batch else [messages])]
        texts = [
            self.tokenizer.apply_chat_template(
                chat,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                chat_template=chat_template or self.chat_template,
                **options,
            )
            for chat, _, _ in chats
        ]
        if not tokenize:
            return [str(text) for text in texts] if is_batch else str(texts[0])
        for kind, media, place in (("images", images, 1), ("videos", videos, 2)):
            if media is not None and any(chat[place] for chat in chats):
                raise InputError(
                    f"{kind}= is given, and the messages have {kind} too. Next step: give them in one way."
                )
        return self(
            [str(text) for text in texts],
            [chat[1] for chat in chats] if images is None else images,
            [chat[2] for chat in chats] if videos is None and any(chat[2] for chat in chats) else videos,
            fps=fps,
            padding_side=padding_side,
        )

    def decode(self, ids: Iterable[int] | Tensor, skip_special_tokens: bool = True) -> str:
        """The text of one row of ids."""
        return self.tokenizer.decode(ids, skip_special_tokens)

    def batch_decode(
        self, ids: Iterable[Iterable[int] | Tensor] | Tensor, skip_special_tokens: bool = True
    ) -> list[str]:
        """The texts of a batch of rows, as `generate` returns them."""
        return self.tokenizer.batch_decode(ids, skip_special_tokens)

    def save(self, folder: str | Path) -> None:
        """Copies the files of the tokenizer, the chat template and the image processor."""
        self.tokenizer.save(folder)
        source = self.tokenizer.files.folder
        for name in CONFIGS:
            target = Path(folder) / name
            if (source / name).is_file() and not (target.exists() and target.samefile(source / name)):
                shutil.copyfile(source / name, target)

    def __repr__(self) -> str:
        return f"Processor({str(self.tokenizer.files.folder)!r}, {type(self.image_processor).__name__})"

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        bos = self.tokenizer.files.named.get("bos_token")
        if not isinstance(self.image_processor, MllamaImageProcessor) or bos is None:
            has_bos = bos is not None and text.startswith(bos)
            return self.tokenizer.encode(text, add_special_tokens and not has_bos)
        if add_special_tokens and bos not in text:
            # As Llama-3.2-Vision was trained: the images at the start come before BOS.
            start = 0
            while text.startswith(self.image_token, start):
                start += len(self.image_token)
            text = text[:start] + bos + text[start:]
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _with_times(
        self, texts: Sequence[str], clips: list[list[Any]], fps: float | Sequence[float] | None
    ) -> list[str]:
        """The texts with a time and a placeholder for each patch of frames, in place of that of the video."""
        videos = [clip for some in clips for clip in some]
        rates = [*fps] if isinstance(fps, list | tuple) else [FPS if fps is None else fps] * len(videos)
        if len(rates) != len(videos) or any(not isinstance(rate, int | float) or not rate > 0 for rate in rates):
            raise InputError(f"fps must be a positive number, or one for each of {len(videos)} videos, not {fps!r}.")
        processor: Any = self.video_processor
        times = iter([processor.times(len(video), rate) for video, rate in zip(videos, rates, strict=True)])
        start, end, token = "<|vision_start|>", "<|vision_end|>", str(self.video_token)

        def frames(match: re.Match[str]) -> str:
            return "".join(f"<{time:.1f} seconds>{start}{token}{end}" for time in next(times))

        both = f"{re.escape(start + token + end)}|{re.escape(token)}"
        return [re.sub(both, frames, text) for text in texts]

    def _per_text(self, kind: str, media: Any, rows: list[list[int]]) -> list[list[Any]]:
        """The images (or videos) of each text. Raises InputError if their number is not that of the placeholders."""
        wanted = [row.count(self._tokens[kind]) for row in rows]
        is_one = _is_image if kind == "image" else _is_video
        if media is None:
            nested: list[list[Any]] = [[] for _ in rows]
        elif is_one(media):
            nested = [[media]]
        elif not isinstance(media, list | tuple):
            raise InputError(f"{kind}s= must be a list, not {type(media).__name__}.{_FILM if kind == 'video' else ''}")
        elif all(map(is_one, media)):
            items = iter(media)
            nested = [list(itertools.islice(items, n)) for n in wanted] if len(media) == sum(wanted) else [list(media)]
        elif all(isinstance(some, list | tuple) and all(map(is_one, some)) for some in media):
            nested = [list(some) for some in media]
        else:
            wrong = next(item for item in media if not is_one(item))
            raise InputError(
                f"{kind}s= must be a list of {kind}s, or one list of them for each text; it has a "
                f"{type(wrong).__name__} ({str(wrong)[:60]}).{_FILM if kind == 'video' else ''}"
            )
        counts = [len(some) for some in nested]
        if counts != wanted:
            name = self.image_token if kind == "image" else self.video_token
            raise InputError(
                f"the texts have {wanted} {name}, but {counts} {kind}s are given; each {kind} needs its own {name} in "
                f"the text. Likely cause: a text written without apply_chat_template, a missing {kind}, or a list of "
                f"{kind}s that is not nested by text."
            )
        return nested


_FILM = " Video files are not decoded: pass a list of frames."


def _repeat(
    rows: list[list[int]], token: int, counts: Iterable[int], before: Sequence[int] = (), after: Sequence[int] = ()
) -> list[list[int]]:
    """Repeats each placeholder `token` as often as its count says, between the tokens `before` and `after`."""
    left = iter(counts)
    return [[x for i in row for x in ((*before, *[i] * next(left), *after) if i == token else (i,))] for row in rows]


def _read_configs(folder: Path) -> tuple[dict[str, Any], dict[str, Any], str]:
    """(image config, video config, the file's name). processor_config.json wins, as in transformers."""
    configs = {name: read_json(folder / name) for name in CONFIGS if (folder / name).is_file()}
    nested = configs.get("processor_config.json", {})
    image, where = nested.get("image_processor"), folder / "processor_config.json"
    if image is None and "preprocessor_config.json" in configs:
        image, where = configs["preprocessor_config.json"], folder / "preprocessor_config.json"
    if image is None:
        names = sorted(path.name for path in folder.iterdir())[:20] if folder.is_dir() else "nothing"
        raise ConfigError(
            f"{folder} has no preprocessor_config.json and no image_processor in processor_config.json; it has {names}."
            " Likely cause: a text model (use Tokenizer), or files that were not copied with the checkpoint."
        )
    video = nested.get("video_processor") or configs.get("video_preprocessor_config.json") or image
    for config in (image, video):
        if not isinstance(config, Mapping):
            raise ConfigError(f"{where}: the image processor must be an object, not {str(config)[:60]!r}.")
    return dict(image), dict(video), str(where)


def _family(folder: Path, image: Mapping[str, Any], where: str) -> str:
    declared = str(image.get("image_processor_type") or image.get("feature_extractor_type") or "")
    declared = declared.removesuffix("Fast").removesuffix("Pil")
    model_type = read_json(folder / "config.json").get("model_type") if (folder / "config.json").is_file() else None
    family = str(model_type) if model_type else {name: key for key, name in FAMILIES.items()}.get(declared, "")
    if family not in FAMILIES or (declared and declared != FAMILIES[family]):
        raise ConfigError(
            f"{where}: image_processor_type {declared or 'missing'!r} with model_type {model_type!r} in config.json; "
            f"supported are {', '.join(f'{name} with {family}' for family, name in FAMILIES.items())}."
        )
    return family


def _processor_template(folder: Path) -> str | None:
    """The template of chat_template.json, which for a processor wins over tokenizer_config.json; None without it."""
    if (folder / "chat_template.jinja").is_file() or not (folder / "chat_template.json").is_file():
        return None
    template = read_json(folder / "chat_template.json").get("chat_template")
    return template if isinstance(template, str) else None


def _is_image(value: Any) -> bool:
    return not isinstance(value, list | tuple | Mapping) and getattr(value, "ndim", 0) < 4


def _is_video(value: Any) -> bool:
    if isinstance(value, np.ndarray | Tensor):
        return value.ndim == 4
    return isinstance(value, list | tuple) and bool(value) and all(map(_is_image, value))


def split_media(chat: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """(the messages without their images and videos, the images, the videos)."""
    if not isinstance(chat, list | tuple) or not all(isinstance(message, Mapping) for message in chat):
        raise InputError(f"messages must be a list of dicts, or a list of such lists, not {str(chat)[:80]!r}.")
    media: dict[str, list[Any]] = {"image": [], "video": []}
    messages = []
    for message in chat:
        content = message.get("content")
        if isinstance(content, list | tuple):
            content = [_without_source(part, media) if isinstance(part, Mapping) else part for part in content]
        messages.append({**message, "content": content} if "content" in message else message)
    return messages, media["image"], media["video"]


def _without_source(part: Mapping[str, Any], media: dict[str, list[Any]]) -> Mapping[str, Any]:
    """The part for the template. Its image or video is appended to `media`.

    Keys with None, which rows of a table have, are dropped: templates only test whether a key is present.
    """
    part = {name: value for name, value in part.items() if value is not None}
    kind = part.get("type", next((name for name in media if name in part), None))
    kind = "image" if kind == "image_url" or (kind is None and "image_url" in part) else kind
    if kind not in media:
        return part
    sources = [name for name in _SOURCES[kind] if name in part]
    if len(sources) > 1:
        raise InputError(f"a part of the messages has {' and '.join(sources)}. Next step: give its {kind} once.")
    for name in sources:
        value = part[name]
        if name == "image_url" and isinstance(value, Mapping):
            value = value.get("url")
        if name == "base64" and isinstance(value, str) and not value.startswith("data:"):
            try:
                value = base64.b64decode(value)
            except ValueError as error:
                raise InputError(f"base64 of an image part cannot be decoded: {error}.") from error
        media[kind].append(value)
    return {"type": kind} | {name: value for name, value in part.items() if name not in (*_SOURCES[kind], "type")}
