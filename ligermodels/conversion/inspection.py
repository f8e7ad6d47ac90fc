"""Describes a checkpoint of any layout, and how to load it, from its headers and configuration."""

import os
import shlex
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ligermodels.checkpoint import hub, mxfp4, reading
from ligermodels.checkpoint.adapters import CONFIG, FACTOR, PREFIX, WEIGHTS, read_options, read_tensors
from ligermodels.checkpoint.files import VOCABULARIES, read_json
from ligermodels.checkpoint.weights import TensorInfo
from ligermodels.conversion.comparison import dtype_counts
from ligermodels.conversion.layouts import LAYOUTS, Layout, layout_of, open_source, weight_paths
from ligermodels.conversion.original import PARAMS
from ligermodels.conversion.source import Source, check_fit, model_of
from ligermodels.errors import CheckpointError, HubError, InputError, MismatchError, TokenizerError


@dataclass
class Inspection:
    """The description of a checkpoint. Counts are of elements, sizes in bytes.

    layout: its name. use: the call or command that loads it. load, merge, of an adapter: the call that puts it over its
    base, and the command that writes the two as one model; None if that is not possible.
    problem: why the weights do not fit the model of their config, or the adapter is not supported; None if it is fine.
    tensors, dtypes {name: elements}: as stored. files: {weight file: size}.
    parameters, parts {part of the model: elements}: as loaded, where a tied head counts once; of an adapter, its own.
    model: facts from the config, {} for an adapter. adapter: facts from adapter_config.json, {} for a model.
    params: params.json of Meta's files, if pickles may not be read; then tensors and parameters are 0, and model is {}.
    tokenizer: facts about it, None if there is none, {"problem": ...} if it cannot be read.
    """

    source: str
    folder: str
    layout: str
    use: str
    files: dict[str, int]
    load: str | None = None
    merge: str | None = None
    tensors: int = 0
    parameters: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    dtypes: dict[str, int] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    adapter: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    tokenizer: dict[str, Any] | None = None
    problem: str | None = None

    @property
    def ok(self) -> bool:
        return self.problem is None

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, **{name: value for name, value in vars(self).items() if value not in ({}, None)}}


def inspect(
    src: str | Path,
    *,
    revision: str | None = None,
    local_files_only: bool = False,
    allow_pickle: bool = False,
    config: str | Path | None = None,
) -> Inspection:
    """Describes `src`, a folder, a GGUF file or a repository of the Hub, whose weights are not fetched.

    Without allow_pickle, Meta's files are described from params.json alone. config: as in `Options`.
    The only weights that are read are the head and the embedding of Meta's files, to see whether they are tied.
    Raises CheckpointError, ConfigError, InputError, HubError. Weights that do not fit their config are a `problem`.
    """
    try:
        folder = hub.resolve(src, revision=revision, local_files_only=True, allow_pickle=allow_pickle)
    except HubError:
        if os.path.exists(src) or local_files_only:
            raise
        remote = _Remote(str(src), revision)
        return _of_model(remote, "folder", str(src), remote.sizes, remote.folder, [], revision)
    sizes = {path.name: path.stat().st_size for path in weight_paths(folder) if path.is_file()}
    layout = layout_of(folder)
    if layout == "adapter":
        if config is not None:
            raise InputError(f"{src} holds an adapter; --config is for models")
        return _of_adapter(str(src), folder, sizes, allow_pickle)
    if layout == "meta" and not allow_pickle:
        return Inspection(
            source=str(src),
            folder=str(folder),
            layout=LAYOUTS["meta"],
            use=shlex.join(["ligermodels", "convert", str(src), "DST", "--allow-pickle"]),
            files=sizes,
            params=read_json(folder / PARAMS) if (folder / PARAMS).is_file() else {},
            tokenizer=_tokenizer(folder),
        )
    config_folder = Path(os.path.expanduser(config)) if config is not None else None
    source = open_source(folder, allow_pickle=allow_pickle, config=config_folder)
    flags = ["--allow-pickle"] * (layout == "meta")
    for flag, value in (("--revision", revision), ("--config", config)):
        flags += [flag, str(value)] if value is not None else []
    return _of_model(source, layout, str(src), sizes, config_folder or folder, flags, revision)


_FACTS = {
    "model_type": "model_type", "context": "max_position_embeddings", "layers": "num_hidden_layers",
    "hidden_size": "hidden_size", "intermediate_size": "intermediate_size", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "vocab_size": "vocab_size",
}  # fmt: skip
"""{fact of a model: field of its config}."""


def _of_model(
    source: Source,
    layout: Layout,
    src: str,
    sizes: dict[str, int],
    config_folder: Path,
    flags: list[str],
    revision: str | None,
) -> Inspection:
    """flags: the options with which `ligermodels convert` reads it."""
    model, names = model_of(source)
    problem = None
    try:
        check_fit(source, model, names)
    except MismatchError as error:
        problem = str(error)
    parts = Counter[str]()
    for name, parameter in model.named_parameters():
        parts[_part(name)] += parameter.numel()
    is_pickled, types = getattr(source, "is_pickled", False), getattr(source, "types", {})
    use = shlex.join(["ligermodels", "convert", src, "DST", *flags])
    if layout in ("folder", "gguf") and "--config" not in flags:
        options = f", revision={revision!r}" if revision is not None else ""
        use = f"ligermodels.load({src!r}{options}{', allow_pickle=True' * is_pickled})"
    config = model.config
    facts = {name: getattr(config, key) for name, key in _FACTS.items()}
    facts["mlps"] = [*dict.fromkeys(text for module in model.decoder.layers.modules() if (text := _mlp(module)))]
    facts |= {"architecture": type(model).__name__, "tied": bool(config.tie_word_embeddings)}
    facts |= {"dtype": str(config.torch_dtype).removeprefix("torch."), "rope": dict(config.rope_parameters)}
    return Inspection(
        source=src,
        folder=source.source,
        layout=LAYOUTS[layout] + ", pickled" * is_pickled,
        use=use,
        tensors=len(source.headers),
        parameters=model.num_parameters(),
        parts=dict(parts),
        dtypes=dtype_counts(source.headers, types),
        files=sizes,
        model=facts,
        tokenizer=_tokenizer(config_folder),
        problem=problem,
    )


def _of_adapter(src: str, folder: Path, sizes: dict[str, int], allow_pickle: bool) -> Inspection:
    options, problem = read_json(folder / CONFIG), None
    try:
        read_options(folder, computed=frozenset({"use_dora"}))
    except CheckpointError as error:
        problem = str(error)
    tensors = read_tensors(folder, allow_pickle=allow_pickle)
    headers = {name: TensorInfo(x.dtype, tuple(x.shape)) for name, x in tensors.items()}
    parts = Counter[str]()
    for name, tensor in tensors.items():
        name = name.removeprefix(PREFIX)
        module = match["module"] if (match := FACTOR.fullmatch(name)) else name.rpartition(".")[0]
        parts[module.rpartition(".")[2]] += tensor.numel()
    base = options.get("base_model_name_or_path") or None
    revision = (base and options.get("revision")) or None
    pickled = not (folder / WEIGHTS).is_file()
    flags, more = ["--allow-pickle"] * pickled, ", allow_pickle=True" * pickled
    at = f", revision={revision!r}" if revision else ""
    load: str | None = f"ligermodels.training.load_adapter(ligermodels.load({base or 'BASE'!r}{at}), {src!r}{more})"
    use = ["ligermodels", "chat", *([src] if base else ["BASE", "--adapter", src]), *flags]
    merge = ["ligermodels", "convert", base or "BASE", "DST", "--adapter", src, *flags]
    merge += ["--revision", revision] if revision else []
    if options.get("bias", "none") != "none" or any("lora_embedding_" in name for name in headers):
        load, use = None, merge  # such an adapter can only be merged
    keys = ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "target_modules", "modules_to_save")
    return Inspection(
        source=src,
        folder=str(folder),
        layout=LAYOUTS["adapter"] + ", pickled" * pickled,
        use=shlex.join(use),
        load=load,
        merge=None if options.get("use_dora") else shlex.join(merge),
        tensors=len(headers),
        parameters=sum(parts.values()),
        parts=dict(parts),
        dtypes=dtype_counts(headers),
        files=sizes,
        adapter={"base": base, **{key: options[key] for key in keys if options.get(key) not in (None, False, [])}},
        tokenizer=_tokenizer(folder),
        problem=problem,
    )


class _Remote(Source):
    """A repository of the Hub, of which only headers and small files are fetched. sizes: {weight file: bytes}."""

    def __init__(self, repo: str, revision: str | None):
        from huggingface_hub import HfApi

        self.folder = hub.resolve(repo, revision=revision, weights=False)
        self.source = repo
        config = read_json(self.folder / "config.json")
        self.config = mxfp4.dequantized_config(config)
        try:
            shards = HfApi().get_safetensors_metadata(repo, revision=self.folder.name).files_metadata
        except Exception as error:
            if not hub.refused(error):
                raise
            raise HubError(
                f"{repo}: the headers of its weight files could not be read ({type(error).__name__}).\n"
                "  Likely: it has no model.safetensors, or the network failed; try again, or `hf download` it first."
            ) from error
        headers = {
            name: TensorInfo(reading.DTYPES.get(info.dtype, torch.uint8), tuple(info.shape))
            for shard in shards.values()
            for name, info in shard.tensors.items()
        }
        self.headers, packed = mxfp4.dequantized_headers(headers, repo) if mxfp4.is_mxfp4(config) else (headers, {})
        self.types = dict.fromkeys(packed, "MXFP4")
        ends = {name: max(info.data_offsets[1] for info in shard.tensors.values()) for name, shard in shards.items()}
        self.sizes = dict(sorted(ends.items()))


def _mlp(module: Any) -> str:
    """What an MLP or the experts of a block are; "" for other modules."""
    if (size := getattr(module, "intermediate_size", None)) is None:
        return ""
    experts = getattr(module, "num_experts", None)
    return f"MLP {size}" if experts is None else f"{experts} experts of {size}"


def _part(name: str) -> str:
    """The part of a model that a parameter belongs to."""
    path = name.removeprefix("model.").removeprefix("language_model.").split(".")
    if path[0] == "norm" or (path[0] == "layers" and path[-2].endswith("norm")):
        return "norms"
    part = path[2] if path[0] == "layers" else path[0]
    return {"self_attn": "attention", "embed_tokens": "embedding"}.get(part, part)


def _tokenizer(folder: Path) -> dict[str, Any] | None:
    from ligermodels.text import Tokenizer
    from ligermodels.text.files import names_in

    if not any((folder / name).is_file() for name in names_in(folder, VOCABULARIES)):
        return None
    try:
        tokenizer = Tokenizer.from_hub(folder)
    except TokenizerError as error:
        return {"problem": str(error)}
    return {
        "file": tokenizer.files.vocabulary.name if tokenizer.files.vocabulary else None,
        "vocab_size": tokenizer.vocab_size,
        "stop_ids": list(tokenizer.eos_token_ids),
        "chat_templates": list(tokenizer.files.templates),
    }
