"""Processors: images and text to the inputs of a model. Needs pillow: `pip install 'ligermodels[vision]'`."""

from ligermodels.errors import ConfigError

try:
    import PIL  # noqa: F401
except ModuleNotFoundError as error:
    raise ConfigError(
        "ligermodels.vision needs pillow, which is not installed. Next step: pip install 'ligermodels[vision]'"
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
