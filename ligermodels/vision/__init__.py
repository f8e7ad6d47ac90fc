"""Processors: images and text to the inputs of a model. Needs pillow: `pip install 'ligermodels[vision]'`."""

from ligermodels.errors import ConfigError

try:
    import PIL  # noqa: F401
except ModuleNotFoundError as error:
    raise ConfigError(
        "ligermodels.vision needs pillow, which is not installed. Next step: pip install 'ligermodels[vision]'"
    ) from error

from ligermodels.vision.gemma3 import Gemma3ImageProcessor as Gemma3ImageProcessor
from ligermodels.vision.gemma4 import (
    Gemma4ImageProcessor as Gemma4ImageProcessor,
    Gemma4UnifiedImageProcessor as Gemma4UnifiedImageProcessor,
)
from ligermodels.vision.images import load_image as load_image
from ligermodels.vision.mllama import MllamaImageProcessor as MllamaImageProcessor
from ligermodels.vision.processor import ModelInputs as ModelInputs, Processor as Processor
from ligermodels.vision.qwen2_vl import (
    Qwen2VLImageProcessor as Qwen2VLImageProcessor,
    Qwen3VLVideoProcessor as Qwen3VLVideoProcessor,
)
