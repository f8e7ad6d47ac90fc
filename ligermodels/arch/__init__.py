"""The architectures, one file each, and `load`, which picks among them by config.json."""

# ruff: noqa: I001  # one line an architecture, in the order of `ARCHS`

from pathlib import Path
from typing import Any

from ligermodels.arch.base import CausalLM as CausalLM, CausalLMOutput as CausalLMOutput
from ligermodels.arch.config import ModelConfig as ModelConfig
from ligermodels.arch.placement import one_device
from ligermodels.arch.pretrained import config_values
from ligermodels.checkpoint import hub
from ligermodels.errors import ConfigError

from ligermodels.arch.llama import Llama as Llama, LlamaConfig as LlamaConfig
from ligermodels.arch.mistral import Mistral as Mistral, MistralConfig as MistralConfig
from ligermodels.arch.mixtral import Mixtral as Mixtral, MixtralConfig as MixtralConfig
from ligermodels.arch.gemma import Gemma as Gemma, GemmaConfig as GemmaConfig
from ligermodels.arch.gemma2 import Gemma2 as Gemma2, Gemma2Config as Gemma2Config
from ligermodels.arch.gemma3 import Gemma3 as Gemma3, Gemma3Config as Gemma3Config
from ligermodels.arch.gemma4 import Gemma4 as Gemma4, Gemma4Config as Gemma4Config
from ligermodels.arch.qwen2 import Qwen2 as Qwen2, Qwen2Config as Qwen2Config
from ligermodels.arch.qwen3 import Qwen3 as Qwen3, Qwen3Config as Qwen3Config
from ligermodels.arch.qwen3_moe import Qwen3Moe as Qwen3Moe, Qwen3MoeConfig as Qwen3MoeConfig
from ligermodels.arch.qwen3_5 import Qwen3_5 as Qwen3_5, Qwen3_5Config as Qwen3_5Config
from ligermodels.arch.qwen3_5_moe import Qwen3_5Moe as Qwen3_5Moe, Qwen3_5MoeConfig as Qwen3_5MoeConfig
from ligermodels.arch.qwen3_next import Qwen3Next as Qwen3Next, Qwen3NextConfig as Qwen3NextConfig
from ligermodels.arch.glm4_moe import Glm4Moe as Glm4Moe, Glm4MoeConfig as Glm4MoeConfig
from ligermodels.arch.gpt_oss import GptOss as GptOss, GptOssConfig as GptOssConfig
from ligermodels.arch.phi3 import Phi3 as Phi3, Phi3Config as Phi3Config
from ligermodels.arch.qwen2_vl import Qwen2VL as Qwen2VL, Qwen2VLConfig as Qwen2VLConfig
from ligermodels.arch.qwen3_vl import Qwen3VL as Qwen3VL, Qwen3VLConfig as Qwen3VLConfig
from ligermodels.arch.qwen3_vl_moe import Qwen3VLMoe as Qwen3VLMoe, Qwen3VLMoeConfig as Qwen3VLMoeConfig
from ligermodels.arch.qwen3_5_vl import Qwen3_5VL as Qwen3_5VL, Qwen3_5VLConfig as Qwen3_5VLConfig
from ligermodels.arch.qwen3_5_moe_vl import Qwen3_5MoeVL as Qwen3_5MoeVL, Qwen3_5MoeVLConfig as Qwen3_5MoeVLConfig
from ligermodels.arch.gemma3_vl import Gemma3VL as Gemma3VL, Gemma3VLConfig as Gemma3VLConfig
from ligermodels.arch.gemma4_vl import Gemma4VL as Gemma4VL, Gemma4VLConfig as Gemma4VLConfig
from ligermodels.arch.gemma4_vl import Gemma4Unified as Gemma4Unified, Gemma4UnifiedConfig as Gemma4UnifiedConfig
from ligermodels.arch.llama_vision import LlamaVision as LlamaVision, LlamaVisionConfig as LlamaVisionConfig

ARCHS: dict[str, type[CausalLM]] = {
    arch.config_class.model_type: arch
    for arch in globals().copy().values()
    if isinstance(arch, type) and issubclass(arch, CausalLM) and arch is not CausalLM
}
"""model_type of config.json -> the class that reads it: every architecture imported above."""

TEXTS = {"gemma3": "gemma3_text", "gemma4": "gemma4_text", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
"""model_type of a model that reads images -> that of its text, where the zoo has a class for it alone."""

PUBLIC = {"ARCHS", "load"} | {cls.__name__ for arch in ARCHS.values() for cls in (arch, arch.config_class)}
"""Names that `ligermodels` exports."""


def arch_of(folder: Path, config: Any = None, *, text_only: bool = False, **hub_options: Any) -> type[CausalLM]:
    """The class for the checkpoint in `folder`, or for `config`; arguments as in `pretrained.config_values`.

    text_only: as in `load`. Raises ConfigError for a model_type that is not in the zoo.
    """
    values = config_values(folder, config, **hub_options)
    model_type = values.model_type if isinstance(values, ModelConfig) else values.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHS:
        raise ConfigError(
            f"{folder}: config.json has model_type {model_type!r}; the zoo has {', '.join(ARCHS)}. A class of your own "
            "loads its folders itself, by from_hub"
        )
    if text_only and ARCHS[model_type].extra_inputs:
        if model_type not in TEXTS:
            raise ConfigError(f"{folder}: there is no class for the text of a {model_type} alone; leave text_only out")
        return ARCHS[TEXTS[model_type]]
    return ARCHS[model_type]


def load(
    id_or_folder: str | Path,
    *,
    config: Any = None,
    revision: str | None = None,
    subfolder: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    allow_pickle: bool = False,
    text_only: bool = False,
    **options: Any,
) -> CausalLM:
    """The model of a repository or folder. The model_type, or that of `config`, chooses its class.

    text_only: of a model that reads images, its text, without the vision tower: of Qwen3.5 a `Qwen3_5` in place of a
        `Qwen3_5VL`. It is saved as a model of text. Raises ConfigError where the zoo has no class for that.
    `options` (dtype, device, device_map, quantization_config, ...) and the rest are those of `CausalLM.from_hub`.
    """
    if options.get("mesh") is None:
        one_device(options.get("device"), options.get("device_map"))  # raises before anything is fetched
    hub_options: dict[str, Any] = dict(token=token, cache_dir=cache_dir, local_files_only=local_files_only)
    folder = hub.resolve(id_or_folder, revision=revision, subfolder=subfolder, allow_pickle=allow_pickle, **hub_options)
    arch = arch_of(folder, config, text_only=text_only, **hub_options)
    model = arch.from_hub(folder, config=config, allow_pickle=allow_pickle, **hub_options, **options)
    model.config._name_or_path = model.name_or_path = str(id_or_folder)
    return model
