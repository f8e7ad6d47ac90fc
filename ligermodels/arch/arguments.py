"""Keyword arguments of transformers' from_pretrained and save_pretrained: which are ignored, warned of or refused."""

import dataclasses
import difflib
import inspect
import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from ligermodels.checkpoint.dtypes import dtype_name
from ligermodels.errors import InputError

_NOTHING_TO_DO = {"low_cpu_mem_usage", "weights_only", "offload_state_dict", "offload_buffers", "disable_mmap"}
_NOTHING_TO_DO |= {"tqdm_class", "resume_download", "offload_folder"}
"""Always the case here, not needed, or a detail of how transformers reads files."""

_WARNED = {
    "attn_implementation": "the attention of ligermodels is its own, whatever the name",
    "experts_implementation": "the experts of ligermodels are its own, whatever the name",
    "use_kernels": "the kernels of ligermodels are its own",
    "trust_remote_code": "ligermodels runs no code from a repository; the model is the zoo's own",
}
"""Has no effect here: a value other than None and False gets a warning with this reason."""

_REFUSED = {
    "adapter_kwargs": "load the model, then PeftModel.from_pretrained(model, adapter)",
    "device_mesh": "load the model, then shard it with torch.distributed.fsdp.fully_shard or parallelize_module",
    "distributed_config": "load the model, then shard it with torch.distributed.fsdp.fully_shard",
    "force_download": "`hf download --force-download` fetches what the cache holds again",
    "from_flax": "weights are read from safetensors",
    "from_tf": "weights are read from safetensors",
    "generation_config": "set model.generation_config after loading",
    "gguf_file": "give the path of the GGUF file in place of the folder",
    "ignore_mismatched_sizes": "every weight must fit; correct config.json",
    "key_mapping": "rename the tensors on disk",
    "load_in_4bit": 'pass quantization_config={"load_in_4bit": True}',
    "load_in_8bit": 'pass quantization_config={"load_in_8bit": True}',
    "output_loading_info": "loading raises for every missing and unexpected weight, so there is nothing to report",
    "proxies": "set HTTPS_PROXY",
    "state_dict": "make the model with from_config(config), then model.load_state_dict(state_dict)",
    "tp_plan": "load the model, then shard it with torch.distributed.tensor.parallel.parallelize_module",
    "tp_size": "load the model, then shard it with torch.distributed.tensor.parallel.parallelize_module",
    "variant": "rename the files to model.safetensors or model-*-of-*.safetensors with their index",
}
"""Not supported, with what to do instead. None, False and {} are transformers' defaults, and allowed."""

_REFUSED_SAVING = {
    "distributed_checkpoint": "torch.distributed.checkpoint.save(model.state_dict(), checkpoint_id=folder) writes one",
    "variant": "rename the files afterwards",
}

_ALWAYS = {
    "use_safetensors": "allow_pickle=True reads pickles where there is nothing else",
    "safe_serialization": "weights are written as safetensors only, never as pickles",
    "save_original_format": "names on disk are always those of the Hub's checkpoints",
}
"""Always the case here: False is refused, with this reason."""

_SAVE_PRETRAINED = ("state_dict", "is_main_process", "max_shard_size", "push_to_hub")
_HUB = ("repo_id", "private", "revision", "create_pr", "commit_message", "token")


def config_changes(options: Mapping[str, Any], arch: Any) -> dict[str, Any]:
    """The `options`, further keyword arguments of `arch.from_hub`, that change fields of its config.

    Raises InputError for options that are not supported and for unknown names; warns of those without effect.
    """
    fields = [field.name for field in dataclasses.fields(arch.config_class)]
    return _select(options, fields, _REFUSED, _NOTHING_TO_DO, inspect.signature(arch.from_hub).parameters)


def hub_options(options: Mapping[str, Any], push_to_hub: bool) -> dict[str, Any]:
    """The `options`, further keyword arguments of `save_pretrained`, that are for the Hub. Raises InputError."""
    found = _select(options, _HUB, _REFUSED_SAVING, {"save_function", "save_peft_format"}, _SAVE_PRETRAINED)
    if push_to_hub:
        return found
    if given := sorted(found.keys() - {"token"}):
        raise InputError(f"{given[0]}= is for the Hub: it goes with push_to_hub=True")
    return {}


def _select(
    options: Mapping[str, Any],
    accepted: Collection[str],
    refused: Mapping[str, str],
    ignored: Collection[str],
    explicit: Iterable[str],
) -> dict[str, Any]:
    """The accepted ones of `options`. explicit: the function's own parameters, for the hint on an unknown name."""
    found = {}
    for name, value in options.items():
        if name in accepted:
            found[name] = value
        elif name in refused:
            if value not in (None, False, {}):
                raise InputError(f"{name}={value!r} is not supported: {refused[name]}")
        elif name in _ALWAYS:
            if value is False:
                raise InputError(f"{name}=False: {_ALWAYS[name]}")
        elif name in _WARNED:
            if value:
                warnings.warn(f"{name}={value!r} changes nothing: {_WARNED[name]}", stacklevel=4)
        elif name not in ignored:
            near = difflib.get_close_matches(name, [*explicit, *accepted, *refused, *_ALWAYS, *_WARNED, *ignored], n=1)
            raise InputError(f"unknown argument {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    return found


def one_dtype(dtype: torch.dtype | str | None, torch_dtype: torch.dtype | str | None) -> str:
    """torch's name of the dtype, given under either argument; "auto" where neither says. Raises InputError."""
    names = {dtype_name(given) for given in (dtype, torch_dtype) if given is not None} - {"auto"}
    if len(names) > 1:
        raise InputError(f"dtype={dtype} and torch_dtype={torch_dtype} are one argument under two names; pass dtype")
    return names.pop() if names else "auto"
