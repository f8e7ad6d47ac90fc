"""How a model is made, loaded from a checkpoint, and saved as one."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import nn

from ligermodels import checkpoint, hub, saving, weights
from ligermodels.arch.config import DTYPES, ModelConfig, check_generation_config
from ligermodels.errors import ConfigError
from ligermodels.layers import Experts, LayerNorm, LMHead, RMSNorm, Router
from ligermodels.layers.pictures import PatchEmbedding


class Pretrained(nn.Module):
    """The part of `CausalLM` that makes, loads and saves models."""

    config_class: ClassVar[type[ModelConfig]]
    DISK_NAMES: ClassVar[weights.Table] = {}
    """Our parameter names -> the names on disk, where they differ; see weights.py."""
    ALSO_READ: ClassVar[tuple[weights.Table, ...]] = ()
    """Tables of other layouts that load; `DISK_NAMES` is what is written."""
    IGNORE: ClassVar[tuple[str, ...]] = (r"rotary_emb\.inv_freq$",)
    """Names on disk that hold nothing to load."""

    config: Any
    generation_config: Any
    source_folder: Path | None = None
    """Where the model was loaded from."""

    @classmethod
    def from_config(
        cls,
        config: ModelConfig | Mapping[str, Any],
        *,
        dtype: torch.dtype | str = "auto",
        device: torch.device | str | None = None,
        seed: int = 0,
        activation_checkpointing: str | Mapping[str, Any] = "none",
    ) -> Self:
        """A model with random weights, from a config or the contents of a config.json.

        `dtype="auto"` is the config's own; `device="meta"` builds shapes only. activation_checkpointing: "none", "mlp"
        or "block", or the dict of `gradient_checkpointing_enable`.
        Raises ConfigError if the config cannot work, InputError for other words of activation_checkpointing.
        """
        if not isinstance(config, ModelConfig):
            config = cls.config_class.from_hf(config)
        model = cls._on_meta(config, dtype, activation_checkpointing)
        device = torch.device(device or torch.get_default_device())
        if device.type != "meta":
            model.to_empty(device=device)
            model.init_weights(seed)
        return model

    @classmethod
    def from_hub(
        cls,
        id_or_folder: str | Path,
        *,
        revision: str | None = None,
        subfolder: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        dtype: torch.dtype | str = "auto",
        device: torch.device | str | None = None,
        progress: bool = True,
        allow_pickle: bool = False,
        activation_checkpointing: str | Mapping[str, Any] = "none",
    ) -> Self:
        """The model of a repository on the Hub, or of a folder in its layout, ready for inference (`eval()`).

        revision: branch, tag or commit. token: True takes the one that is logged in. A complete copy in the cache
        needs neither network nor token. dtype: "auto" is config.json's own. Weights are read from safetensors, one
        tensor at a time, straight to `device`; pickled ones only with `allow_pickle=True`. activation_checkpointing:
        as in `from_config`.
        Raises HubError, ConfigError, CheckpointError or InputError.
        """
        folder = hub.resolve(
            id_or_folder,
            revision=revision,
            subfolder=subfolder,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            allow_pickle=allow_pickle,
        )
        with checkpoint.unreplaced(folder):
            config = cls.config_class.from_hf(checkpoint.read_json(folder / "config.json"))
            config._name_or_path = str(id_or_folder)
            model = cls._on_meta(config, dtype, activation_checkpointing)
            opened = checkpoint.open_checkpoint(folder, allow_pickle=allow_pickle)
            if (folder / "generation_config.json").is_file():
                values = checkpoint.read_json(folder / "generation_config.json", lenient=True)
                check_generation_config(str(folder / "generation_config.json"), values)
                model.generation_config.update(values)
        with opened as reader:
            weights.load(
                model,
                cls.DISK_NAMES,
                reader,
                device=device or torch.get_default_device(),
                progress=progress,
                ignore=cls.IGNORE,
                tied=model.tied_weights,
                also=cls.ALSO_READ,
            )
        model.source_folder = folder
        return model.eval()

    @classmethod
    def _on_meta(
        cls, config: ModelConfig, dtype: torch.dtype | str, activation_checkpointing: str | Mapping[str, Any]
    ) -> Self:
        """The model without memory, in its final dtype."""
        if isinstance(dtype, str):
            if dtype not in ("auto", *DTYPES):
                raise ConfigError(f"dtype={dtype!r} is not supported; supported: 'auto', {', '.join(DTYPES)}")
            dtype = config.torch_dtype if dtype == "auto" else DTYPES[dtype]
        with torch.device("meta"):
            model = cls(config)
        model.config.dtype = str(dtype).removeprefix("torch.")
        model._set_checkpointing(activation_checkpointing)
        return model.to(dtype)

    @torch.no_grad()
    def init_weights(self, seed: int = 0) -> None:
        """Draws every parameter anew.

        | parameter                     | distribution                            |
        |-------------------------------|-----------------------------------------|
        | weights of linears, experts,  | normal, mean 0, std `initializer_range` |
        | embeddings                    |                                         |
        | biases, row of the pad token  | 0                                       |
        | norm weights                  | 1 - offset, so that the scale is 1      |
        """
        generator = torch.Generator(self.device).manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding | PatchEmbedding | LMHead | Router):
                if isinstance(module, LMHead) and module.is_tied:
                    continue
                module.weight.normal_(0.0, self.config.initializer_range, generator=generator)
                if isinstance(module, nn.Linear | LMHead) and module.bias is not None:
                    module.bias.zero_()
                if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                    module.weight[module.padding_idx].zero_()
            elif isinstance(module, Experts):
                for weight in module.parameters(recurse=False):
                    weight.normal_(0.0, self.config.initializer_range, generator=generator)
            elif isinstance(module, RMSNorm) and module.weight is not None:
                module.weight.fill_(1.0 - module.offset)
            elif isinstance(module, LayerNorm):
                module.reset_parameters()

    def save_pretrained(self, folder: str | Path, *, max_shard_size: int | str = "5GB") -> Path:
        """Writes a checkpoint in Hugging Face's layout, which transformers loads. Returns the folder.

        Holds config.json, generation_config.json, safetensors in shards of at most `max_shard_size`, and the
        tokenizer and template files of the checkpoint that this model came from. Written beside `folder` and
        renamed when complete: an interruption leaves the old contents.
        """
        self.config.dtype = str(self.dtype).removeprefix("torch.")  # the model may have been cast since
        files: dict[str, Any] = {"config.json": checkpoint.json_bytes(self.config.to_hf())}
        if self.generation_config:
            files["generation_config.json"] = checkpoint.json_bytes(dict(self.generation_config))
        if self.source_folder is not None:
            files = {**checkpoint.companion_files(self.source_folder), **files}
        return saving.write_checkpoint(
            folder,
            weights.export(self, self.DISK_NAMES),
            files=files,
            max_shard_size=max_shard_size,
            expected_bytes=sum(parameter.nbytes for parameter in self.parameters()),
        )

    def push_to_hub(self, repo: str, *, max_shard_size: int | str = "5GB", **options: Any) -> str:
        """Saves the model and uploads it to `repo` ("owner/name"). Returns the URL of the commit.

        options: private, revision, create_pr, commit_message, token; see hub.push.
        """
        with tempfile.TemporaryDirectory() as folder:
            saved = self.save_pretrained(Path(folder) / "model", max_shard_size=max_shard_size)
            return hub.push(saved, repo, **options)

    @property
    def tied_weights(self) -> dict[str, str]:
        """Name on disk of a tensor that has no parameter of its own -> the parameter whose copy it must be."""
        head: Any = self.lm_head
        if not (isinstance(head, LMHead) and head.is_tied):
            return {}
        table = next(name for name, module in self.named_modules() if module is self.get_input_embeddings())
        return {"lm_head.weight": f"{table}.weight"}
