"""Processors: images and text to the inputs of a model. Needs pillow: `pip install 'ligermodels[vision]'`."""

try:
    import PIL  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "ligermodels.vision needs pillow, which is not installed. Next step: pip install 'ligermodels[vision]'",
        name=error.name,
    ) from error

from ligermodels.vision.images import load_image
from ligermodels.vision.mllama import MllamaImageProcessor
from ligermodels.vision.processor import ModelInputs, Processor
from ligermodels.vision.qwen2_vl import Qwen2VLImageProcessor, Qwen3VLVideoProcessor

__all__ = [
    "MllamaImageProcessor",
    "ModelInputs",
    "Processor",
    "Qwen2VLImageProcessor",
    "Qwen3VLVideoProcessor",
    "load_image",
]
