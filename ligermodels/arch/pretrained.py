"""Models from a config or a checkpoint, and checkpoints from models."""

import contextlib
import copy
import dataclasses
import functools
import inspect
import json
import os
import re
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from ligermodels.arch import arguments, placement
from ligermodels.arch.config import ModelConfig
from ligermodels.arch.output import GenerationConfig
from ligermodels.checkpoint import hub, quantization, reading, saving, weights
from ligermodels.checkpoint.dtypes import dtype_name
from ligermodels.checkpoint.files import companion_files, json_bytes, read_json, unreplaced
from ligermodels.errors import CheckpointError, ConfigError, HubError, InputError, config_of
from ligermodels.layers import LMHead
from ligermodels.layers.base import fp32_names, init_weights
from ligermodels.layers.fp8 import FP8Recipe, check_device, recipe_of, use_fp8
from ligermodels.processes import Processes
from ligermodels.training.files import reshard
from ligermodels.training.mtp import alone_with, empty_mtp

_HUB_OPTIONS = ("repo_id", "private", "revision", "create_pr", "commit_message", "token")


class Pretrained(nn.Module):
    """Creates, loads and saves models; a base class of `CausalLM`."""

    config_class: ClassVar[type[ModelConfig]]
    DISK_NAMES: ClassVar[weights.Table] = {}
    """Our names of weights -> the names on disk, where they or the order of rows differ; see weights.py."""
    OTHER_LAYOUTS: ClassVar[tuple[weights.Table, ...]] = ()
    """Tables of other layouts that can be loaded; models are saved by `DISK_NAMES`."""
    IGNORE: ClassVar[tuple[str, ...]] = (r"rotary_emb\.inv_freq$",)
    """Patterns of names on disk that are not loaded."""
    COPIED_ON_SAVE: ClassVar[tuple[str, ...]] = ()
    """Patterns of names that are not loaded either, and that saving copies from the checkpoint of the model; {layers}
    is the number of blocks."""

    config: Any
    generation_config: Any
    get_input_embeddings: Any
    decoder: Any
    _set_checkpointing: Any
    device: Any
    dtype: Any
    name_or_path: str
    """The repository or folder that the model was loaded from, as given."""
    source_folder: Path | None = None
    """The folder that the model was loaded from."""
    carried: tuple[str, ...] = ()
    """The names in it that `COPIED_ON_SAVE` matches."""
    mtp: Any
    """A layer for multi-token prediction, where training/mtp.py has added one; else None."""

    @classmethod
    def from_config(
        cls,
        config: ModelConfig | Mapping[str, Any],
        *,
        dtype: torch.dtype | str = "auto",
        device: torch.device | str | None = None,
        seed: int | None = None,
        activation_checkpointing: str | Mapping[str, Any] = "none",
        mtp_loss_weight: float | None = None,
        fp8: str | FP8Recipe | None = None,
        mesh: Any = None,
        parallel: Mapping[str, Any] | None = None,
    ) -> Self:
        """A model with random weights, from a config or the contents of a config.json.

        seed: of the weights; None draws one from torch's generator, so that `torch.manual_seed` decides the weights.
        dtype: "auto" is the config's own. device: "meta" builds shapes only.
        activation_checkpointing: "none", "mlp" or "block", or the dict of `gradient_checkpointing_enable`.
        mtp_loss_weight, fp8, mesh, parallel: as in `from_hub`. The weights are those that one process draws from the
            same seed on a device of the same kind; without one, all take that of the mesh's first process. Beyond the
            shards, memory for one whole parameter is needed.
        Raises ConfigError if the config cannot work, and InputError.
        """
        if not isinstance(config, ModelConfig):
            config = cls.config_class.from_hf(config)
        place = None if device is None else torch.device(device) if mesh is not None else placement.usable(device)
        _check_mesh(mesh, parallel, None if place is not None and place.type == "meta" else device)
        model = cls._on_meta(config, dtype, activation_checkpointing, mtp_loss_weight)
        if fp8 is not None:
            model.use_fp8(fp8)
        if mesh is None:
            place = place or torch.get_default_device()
        else:
            model = _parallelize(model, mesh, parallel)
            place = place or torch.device(mesh.device_type)
        if place.type != "meta":
            weights.allocate(model, place)
            if seed is None:
                processes = Processes() if mesh is None else Processes.of_mesh(mesh)
                seed = processes.gather(int(torch.randint(2**63 - 1, (), device="cpu")))[0]
            model.init_weights(seed)
        return model

    @classmethod
    def from_hub(
        cls,
        id_or_folder: str | Path,
        *,
        config: ModelConfig | Mapping[str, Any] | str | Path | None = None,
        revision: str | None = None,
        subfolder: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        dtype: torch.dtype | str | None = "auto",
        torch_dtype: torch.dtype | str | None = None,
        device: torch.device | str | int | None = None,
        device_map: Any = None,
        max_memory: Mapping[Any, int | str] | None = None,
        quantization_config: Any = None,
        progress: bool = True,
        allow_pickle: bool = False,
        activation_checkpointing: str | Mapping[str, Any] = "none",
        mtp_loss_weight: float | None = None,
        fp8: str | FP8Recipe | None = None,
        mesh: Any = None,
        parallel: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Self:
        """The model of a repository on the Hub, or of a folder in its layout, ready for inference (`eval()`).

        config: a config, the contents of a config.json, its path, or its folder or repository; needed for a folder of
            weights alone, as Trainer, TRL and accelerate leave it. Default: the folder's own config.json.
        revision: branch, tag or commit. token: True is the one of `hf auth login`. A complete copy in the cache
            needs neither network nor token.
        dtype: "auto" is config.json's own, and with `config` that of the weights. Names as in `dtypes.NAMES`, such
            as "bfloat16" or "bf16". torch_dtype: its older name.
        device: the device of the whole model. To a GPU, several threads read safetensors through 192 MiB of pinned
            memory, which torch keeps; other files are read one tensor at a time. On the CPU, safetensors of the
            model's dtype stay mapped: training writes to memory, never to the file. Do not truncate the file meanwhile.
        device_map: a device, or "auto", "balanced", "balanced_low_0", "sequential" or {module: device}: the model is
            read into host memory, and accelerate distributes it within `max_memory`. Modules on "disk" stay in the
            checkpoint's files, and each forward reads them; `offload_folder` is not needed, and ignored.
        quantization_config: "nf4" quantises linear modules and experts to 4 bits, frozen, for LoRA, "mxfp4" experts
            alone, "fp8" to 8 bits, for LoRA with products in FP8 and for inference; "int8" and "int4" are for
            inference; a config of bitsandbytes or torchao selects that library.
            See `quantization.quantizer_of`. Modules are quantised as they are read; with bitsandbytes the default
            device is the GPU. A quantised checkpoint stays so; one in MXFP4 (gpt-oss) is dequantised with
            {"quant_method": "mxfp4", "dequantize": True} or transformers' Mxfp4Config(dequantize=True).
        allow_pickle: reads pytorch_model.bin where there are no safetensors. activation_checkpointing: as in
            `from_config`.
        mtp_loss_weight: reads the layer for multi-token prediction too, as `training.load_mtp` does, with this weight
            of its loss; None: it is not read.
        fp8: "rowwise", "tensorwise", "rowwise-bf16-dw" or an FP8Recipe: see `use_fp8`; not with quantization_config.
        mesh: a DeviceMesh. `ligermodels.parallel.parallelize` shards the model over its processes before it is loaded;
            each process calls this, and reads its own rows onto its device. parallel: options of `parallelize`.
        options: fields of the config to change, such as use_cache=False. Arguments of transformers that change nothing
            are ignored; others raise.

        Raises HubError, ConfigError, CheckpointError or InputError.
        """
        fields = cls.config_class.field_names()
        changes = arguments.supported(options, fields, inspect.signature(cls.from_hub).parameters)
        dtype = arguments.one_dtype(dtype, torch_dtype)
        _check_mesh(mesh, parallel, device, device_map)
        place = placement.one_device(device, device_map) if mesh is None else torch.device(mesh.device_type)
        hub_options: dict[str, Any] = dict(token=token, cache_dir=cache_dir, local_files_only=local_files_only)
        folder = hub.resolve(
            id_or_folder, revision=revision, subfolder=subfolder, allow_pickle=allow_pickle, **hub_options
        )
        with unreplaced(folder), config_of(folder) if config is None else contextlib.nullcontext():
            values, saved_with = quantization.split(config_values(folder, config, **hub_options), quantization_config)
            model_config = cls._checked_config(values, changes)
            model_config._name_or_path = str(id_or_folder)
            quantizer = quantization.choose(quantization_config, saved_with)
            _check_plain(quantizer, fp8, mesh, mtp_loss_weight)
            opened = reading.open_checkpoint(folder, allow_pickle=allow_pickle)
            opened = quantization.reader_of(saved_with, opened, place)
            model = cls._on_meta(model_config, dtype, activation_checkpointing, mtp_loss_weight)
            if fp8 is not None:
                model.use_fp8(fp8, device=place)
            if config is not None and dtype == "auto" and (of_file := model._dtype_of(opened.headers)):
                model.config.dtype = str(of_file).removeprefix("torch.")
                model.to(of_file)
            model.carried = tuple(name for name in opened.headers if model.carries(name))
            if (folder / "generation_config.json").is_file():
                generation = read_json(folder / "generation_config.json", lenient=True)
                model.generation_config = GenerationConfig.of_file(generation)
        if mesh is not None:
            model = _parallelize(model, mesh, parallel)
            progress = progress and torch.distributed.get_rank() == int(mesh.mesh.min())
        if place is not None and device is None and device_map is None and quantizer is not None:
            place = quantizer.default_device(place)
        plan = None
        if place is None:
            plan = placement.plan(model, device_map, max_memory=max_memory, **quantization.sizes(model, quantizer))
        model._read(opened, quantizer, saved_with is not None, place, plan, progress)
        model.source_folder = folder
        return model.eval()

    from_pretrained = from_hub

    def _read(
        self,
        opened: Any,
        quantizer: Any,
        from_quantized: bool,
        place: torch.device | None,
        plan: placement.Plan | None,
        progress: bool,
    ) -> None:
        """Reads the weights of this model, all on meta, from an open checkpoint. plan: where `place` is None, the
        devices of modules; what it leaves on the disk is read when it is used."""
        names, on_disk, stored = self.names_on_disk, set[str](), None
        options: dict[str, Any] = dict(device=place or torch.device("cpu"), progress=progress)
        if plan is not None and (on_disk := placement.on_disk(self, plan)):
            stored = weights.Renamed(self, opened, names.found(self, opened.headers).table, {})
        with contextlib.nullcontext(opened) if on_disk else opened as reader:
            if quantizer is None:
                weights.load(self, names, reader, adopt=reader.is_mapped, leave=on_disk, **options)
            else:
                if plan is not None:
                    options["devices"] = placement.devices(plan, quantization.quantised_names(self, quantizer))
                quantization.load(self, names, reader, quantizer, from_quantized=from_quantized, **options)
        if plan is not None:
            placement.dispatch(self, plan, stored)

    @classmethod
    def _checked_config(cls, values: ModelConfig | Mapping[str, Any], changes: Mapping[str, Any]) -> Any:
        """A copy of the config with `changes`. Raises ConfigError."""
        if not isinstance(values, ModelConfig):
            values = cls.config_class.from_hf(values)
        if not isinstance(values, cls.config_class):
            raise ConfigError(f"config is a {type(values).__name__}; {cls.__name__} has a {cls.config_class.__name__}")
        return dataclasses.replace(copy.deepcopy(values), **changes)

    @classmethod
    def _on_meta(
        cls,
        config: ModelConfig,
        dtype: torch.dtype | str,
        activation_checkpointing: str | Mapping[str, Any],
        mtp_loss_weight: float | None = None,
    ) -> Self:
        """The model on the meta device, in its final dtype."""
        if not isinstance(dtype, torch.dtype):
            name = dtype_name(dtype)
            dtype = config.torch_dtype if name == "auto" else getattr(torch, name)
        with torch.device("meta"):
            model = cls(config)
            if mtp_loss_weight is not None:
                model.mtp = empty_mtp(model, mtp_loss_weight)
        model.config.dtype = str(dtype).removeprefix("torch.")
        model._set_checkpointing(activation_checkpointing)
        return model.to(dtype)

    def use_fp8(self, fp8: str | FP8Recipe | None, *, device: torch.device | None = None) -> list[str]:
        """Has the linear modules of the text model's blocks multiply in FP8, in training and in forwards of more than
        64 rows; returns their names. None turns that off. docs/fp8.md.

        Weights stay what they are, and are saved so. Embedding, head, norms, routers, small gates, experts, vision
        towers and layers whose sizes are no multiples of 16 compute as before. Activations are bf16, by the model's
        dtype or by autocast. device: of the model, where it is on meta still.
        Raises InputError for another recipe, for a GPU without FP8, and for a model that has no such module.
        """
        recipe = None if fp8 is None else recipe_of(fp8)
        if recipe is not None:
            check_device(device or self.device)
        names = use_fp8(self.decoder.layers, recipe)
        if recipe is not None and not names:
            raise InputError(
                f"fp8={fp8!r}: no linear module of the blocks of {type(self).__name__} can compute in FP8: they are "
                "quantised, have adapters, or sizes that are no multiples of 16. Leave fp8 out"
            )
        return names

    @torch.no_grad()
    def init_weights(self, seed: int = 0) -> None:
        """Draws every parameter and persistent buffer. A sharded one gets its rows of what one process would draw.

        | parameter                     | distribution                            |
        |-------------------------------|-----------------------------------------|
        | weights of linears, experts,  | normal, mean 0, std `initializer_range` |
        | convolutions, embeddings      |                                         |
        | biases, row of the pad token  | 0                                       |
        | norm weights                  | 1 - offset, so that the scale is 1      |
        | A_log, dt_bias                | log of a uniform from 0.01 to 16; 1     |
        """
        draw = weights.Draw(torch.Generator(self.device).manual_seed(seed), self.config.initializer_range)
        init_weights(self, draw)

    def save_pretrained(
        self,
        folder: str | Path,
        *,
        state_dict: Mapping[str, Tensor] | None = None,
        is_main_process: bool | None = None,
        max_shard_size: int | str = "5GB",
        push_to_hub: bool = False,
        **options: Any,
    ) -> Path:
        """Writes a checkpoint in Hugging Face's layout, which transformers loads. Returns the folder.

        It has config.json, generation_config.json, safetensors in shards of at most `max_shard_size`, and the
        tokenizer and template files of the checkpoint that this model came from, unless the folder has a tokenizer
        already. It is written beside `folder` and renamed when complete: an interruption leaves the old contents.

        state_dict: {name of a parameter or buffer: tensor} to save in place of the model's own weights, as
            accelerator.get_state_dict(model) gives them.
        is_main_process: False writes nothing. By default every process writes.
        Sharded weights (FSDP2, tensor parallelism): every rank of the mesh calls this. Parameters are gathered one by
            one, and all ranks write shards into one folder, on a file system that all of them see. The folder is
            complete when any rank returns; an error in one rank raises in all. A rank needs memory for a whole
            parameter or two on the device and one on the host. With a `state_dict` of whole tensors for a sharded
            model, rank 0 writes by default, and the others return at once.
        push_to_hub: uploads the folder too, from one rank, to `repo_id`, by default the folder's name.
        options: those of `hub.push`. Arguments of transformers that change nothing are ignored; others raise.

        Weights that accelerate has offloaded are fetched; a quantised model is saved with its quantization_config.
        Raises CheckpointError for weights that cannot be saved so, HubError where the folder cannot be written,
        InputError.
        """
        for_hub = arguments.supported(options, _HUB_OPTIONS, inspect.signature(self.save_pretrained).parameters)
        if for_hub.keys() - {"token"} and not push_to_hub:
            raise InputError(f"{', '.join(for_hub)}: options of an upload; pass push_to_hub=True with them")
        target = saving.absolute(folder)
        if state_dict is None:
            reshard(self)
            if any(parameter.is_meta for parameter in self.parameters()):
                state_dict = placement.offloaded_state(self)
        state = dict(weights.named_weights(self)) if state_dict is None else dict(state_dict)
        writes, processes = is_main_process is not False, Processes.of_tensors(state.values())
        if is_main_process is None and not any(hasattr(tensor, "full_tensor") for tensor in state.values()):
            writes = not any(hasattr(p, "full_tensor") for p in self.parameters()) or torch.distributed.get_rank() == 0
        if processes.size == 1 and not writes:
            return target
        with processes.raise_on_all():
            tensors, files, metadata = self._exported(state, state_dict is not None, target)
        saving.write_checkpoint(
            target,
            tensors,
            files=files,
            metadata=metadata,
            max_shard_size=max_shard_size,
            processes=processes,
            writes=writes,
        )
        if push_to_hub and [*processes.gather(writes), True].index(True) == processes.rank:
            hub.push(target, for_hub.pop("repo_id", target.name), **for_hub)
        return target

    def _exported(
        self, state: Mapping[str, Tensor], is_state: bool, target: Path
    ) -> tuple[weights.Exported, dict[str, Any], Mapping[str, str] | None]:
        """(tensors, other files, metadata of the safetensors) that `save_pretrained` writes to `target`.

        state: the weights, or with `is_state` the caller's state_dict. Raises CheckpointError.
        """
        if not is_state and any(getattr(tensor, "ds_shape", tensor.shape) != tensor.shape for tensor in state.values()):
            raise CheckpointError(
                "The weights are partitioned by DeepSpeed's ZeRO-3. Call model_engine.save_16bit_model(folder), or "
                "save_pretrained(folder, state_dict=accelerator.get_state_dict(model)) on every rank."
            )
        tied = self.tied_weights
        quantised_by = getattr(self, "hf_quantizer", None)
        quantizer = None if quantised_by is None else quantization.quantizer_of(quantised_by)
        config = copy.copy(self.config)
        config.tie_word_embeddings = bool(tied)
        config.dtype = str(self._saved_dtype(state)).removeprefix("torch.")
        beside = {name: x for name, x in state.items() if weights.plain_name(name).startswith("mtp.")}
        state = {name: x for name, x in state.items() if name not in beside}
        boxes: dict[str, Any] = {weights.plain_name(name): (x.detach(), ()) for name, x in beside.items()}
        if self.mtp is not None:
            empty = empty_mtp(self, self.mtp.loss_weight)
            layer = {f"mtp.{name}": tensor.shape for name, tensor in weights.named_weights(empty)}
            sharded = weights.Exported(boxes, weights.row_parts(self))
            stored = {name: info.shape for name, info in sharded.headers.items()}
            if differ := sorted(name for name in {*layer, *stored} if layer.get(name) != stored.get(name)):
                raise CheckpointError(
                    f"The weights cannot be saved.\n  {', '.join(differ[:3])} and {len(differ)} in all are missing, or "
                    "not those of the layer for multi-token prediction.\n  Likely: adapters in it (merge_lora first), "
                    "or a state_dict without it."
                )
        values, metadata = config.to_hf(), None
        # Shapes by config.json: the weights of a model in FSDP1 or ZeRO-3 have others.
        shapes = type(self)._on_meta(copy.copy(config), config.dtype, "none")
        if quantizer is None:
            tensors = weights.export(shapes, self.names_on_disk, state, weights.row_parts(self))
        elif is_state:
            raise CheckpointError("A quantised model is saved from its own weights: leave state_dict out.")
        else:
            mtp, self.mtp = self.mtp, None
            try:
                tensors, metadata = quantization.export(self, shapes, self.names_on_disk, quantizer)
            finally:
                self.mtp = mtp
            values["quantization_config"] = quantizer.to_dict()
        carried = () if beside else self.carried
        if self.mtp is not None:
            alone, (table, *others) = alone_with(self, empty), (self.DISK_NAMES, *self.OTHER_LAYOUTS)
            boxes = {box.source: (boxes[box.param][0], box.index) for box in weights.regions(alone, table)}
            read = {box.source for other in others for box in weights.regions(alone, other)} | boxes.keys()
            carried = tuple(name for name in self.carried if name not in read)
        tensors.add(boxes)
        if carried:
            tensors.add({name: (x, ()) for name, x in self._read_carried(carried).items()})
        files: dict[str, Any] = {"config.json": json_bytes(values)}
        if self.generation_config:
            settings = {name: value for name, value in self.generation_config.items() if value is not None}
            files["generation_config.json"] = json_bytes(settings)
        if self.source_folder is not None:
            files = {**companion_files(self.source_folder, target), **files}
        return tensors, files, metadata

    def _read_carried(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        """Tensors of the checkpoint that the model came from that it does not have. Warns where they are gone."""
        try:
            with reading.open_checkpoint(cast(Path, self.source_folder)) as reader:
                return {name: reader.read(name) for name in names}
        except (CheckpointError, HubError, KeyError) as error:
            warnings.warn(
                f"{len(names)} tensors such as {names[0]} are not in what is saved: they would be copied "
                f"from {self.source_folder}, which cannot be read any more ({error})",
                stacklevel=5,
            )
            return {}

    def push_to_hub(self, repo_id: str, *, max_shard_size: int | str = "5GB", **options: Any) -> str:
        """Saves the model and uploads it to `repo_id` ("owner/name"). Returns the URL of the commit.

        options: private, revision, create_pr, commit_message, token; see hub.push.
        """
        if any(hasattr(parameter, "full_tensor") for parameter in self.parameters()):
            raise InputError(
                "push_to_hub: a sharded model is saved by all its ranks into one folder: call on each of them "
                "save_pretrained(folder, push_to_hub=True, repo_id=...)"
            )
        with tempfile.TemporaryDirectory() as folder:
            saved = self.save_pretrained(Path(folder) / "model", max_shard_size=max_shard_size)
            return hub.push(saved, repo_id, **options)

    def _saved_dtype(self, tensors: Mapping[str, Tensor]) -> torch.dtype:
        """The dtype of the embedding among `tensors`, or else of the model."""
        named = {weights.plain_name(name): tensor.dtype for name, tensor in tensors.items()}
        return named.get(weights.plain_name(self._table_name), self.dtype)

    @property
    def _table_name(self) -> str:
        """The name of the embedding's parameter."""
        table = self.get_input_embeddings()
        return next(f"{name}.weight" for name, module in self.named_modules() if module is table)

    @property
    def names_on_disk(self) -> weights.Names:
        return weights.Names(
            self.DISK_NAMES, self.OTHER_LAYOUTS, (*self.IGNORE, *self._copied_on_save), self.tied_weights
        )

    def names_in_fp32(self, table: weights.Table) -> set[str]:
        """The names on disk, by this table, of the weights that stay in fp32 when the model is cast to 16 bits."""
        names = fp32_names(self)
        return {region.source for region in weights.regions(self, table) if region.param in names} if names else set()

    def _dtype_of(self, headers: Mapping[str, weights.TensorInfo]) -> torch.dtype | None:
        """The dtype that represents every weight of a checkpoint exactly, beside those that stay in fp32."""
        exact = self.names_in_fp32(self.names_on_disk.found(self, headers).table)
        floats = {info.dtype for name, info in headers.items() if name not in exact} & set(weights.FLOATS)
        return functools.reduce(torch.promote_types, floats) if floats else None

    @property
    def _copied_on_save(self) -> tuple[str, ...]:
        layers = str(self.config.num_hidden_layers)
        return tuple(pattern.replace("{layers}", layers) for pattern in self.COPIED_ON_SAVE)

    def carries(self, name: str) -> bool:
        """Whether a tensor of this name is not loaded, and copied when the model is saved."""
        return any(re.search(pattern, name) for pattern in self._copied_on_save)

    def ignores(self, name: str) -> bool:
        """Whether nothing here ever reads a tensor of this name."""
        return any(re.search(pattern, name) for pattern in self.IGNORE)

    @property
    def tied_weights(self) -> dict[str, str]:
        """{name of a tensor without a parameter of its own: name of the parameter that it must equal}.

        The head is tied if it reads the table, and if its weight is the table's Parameter, as PEFT may leave it.
        """
        head, table = self.lm_head, self.get_input_embeddings().weight
        if (isinstance(head, LMHead) and head.is_tied) or getattr(head, "weight", None) is table:
            return {"lm_head.weight": self._table_name}
        return {}


def _check_plain(quantizer: Any, fp8: Any, mesh: Any, mtp_loss_weight: float | None) -> None:
    """Raises InputError where weights are quantised and an option is for plain ones."""
    if quantizer is None:
        return
    if fp8 is not None:
        raise InputError(
            "fp8= multiplies weights in 16 bits in FP8, and these are quantised: leave it out. Adapters over "
            'quantization_config="fp8" compute in FP8 without it'
        )
    if mesh is not None:
        raise InputError("mesh= shards plain weights, and these are quantised: leave mesh out, or quantization")
    if mtp_loss_weight is not None:
        raise InputError("mtp_loss_weight= reads plain weights, and these are quantised: use training.load_mtp")


def _check_mesh(mesh: Any, parallel: Mapping[str, Any] | None, device: Any, device_map: Any = None) -> None:
    """Raises InputError for arguments that contradict `mesh`."""
    if mesh is None:
        if parallel is not None:
            raise InputError("parallel= has options of parallelize, which shards over mesh=: pass both")
        return
    if device_map is not None:
        raise InputError(
            "mesh= and device_map= both say where the weights go: pass mesh= alone, in each of its processes"
        )
    of_process = torch.empty(0, device=mesh.device_type).device  # with its index
    if device is not None and torch.device(device) not in (torch.device(mesh.device_type), of_process):
        raise InputError(
            f"device={device!r}, but the mesh puts this process on {of_process}: leave device out; "
            "torch.cuda.set_device chooses the GPU of a process"
        )


def _parallelize(model: Any, mesh: Any, parallel: Mapping[str, Any] | None) -> Any:
    from ligermodels.parallel import parallelize  # imports torch.distributed, which is slow

    return parallelize(model, mesh, **(parallel or {}))


def config_values(folder: Path, config: Any = None, **hub_options: Any) -> ModelConfig | Mapping[str, Any]:
    """The `config` argument of `from_hub`, as a config or the contents of a config.json; default: the folder's.

    hub_options: token, cache_dir and local_files_only of `hub.resolve`. Raises CheckpointError or HubError.
    """
    if config is None:
        place = folder / "config.json"
        if not os.path.lexists(place) and any(folder.glob("model*.safetensors")):
            raise CheckpointError(
                f"{place} is not there: {folder} has weights alone, as Trainer and accelerate leave them.\n"
                "  Next: pass config=, the folder or repository that the model came from, or its config."
            )
        return read_json(place)
    if isinstance(config, ModelConfig | Mapping):
        return config
    if hasattr(config, "to_json_string"):  # of transformers
        return json.loads(config.to_json_string())
    path = Path(config).expanduser()
    return read_json(path if path.is_file() else hub.resolve(config, weights=False, **hub_options) / "config.json")
