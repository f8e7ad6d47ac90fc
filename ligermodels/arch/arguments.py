"""Keyword arguments of transformers' from_pretrained and save_pretrained.

One rule: a keyword that is unknown or not supported is an error that suggests the nearest one. It is accepted where
its value asks for nothing that differs from what happens here anyway.
"""

import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from ligermodels.checkpoint.dtypes import dtype_name
from ligermodels.errors import InputError, did_you_mean

_NO_EFFECT = frozenset("""
    disable_mmap low_cpu_mem_usage offload_buffers offload_folder offload_state_dict resume_download save_function
    save_peft_format tqdm_class weights_only
""".split())  # fmt: skip  # noqa: SIM905
"""Accepted with any value: details of how transformers reads and writes files."""
_WARNED = frozenset(("attn_implementation", "experts_implementation", "trust_remote_code", "use_kernels"))
"""Accepted with a warning: every layer has one implementation here, and no code of a repository runs."""
_ONLY_FALSE = frozenset("""
    adapter_kwargs force_download from_flax from_tf ignore_mismatched_sizes load_in_4bit load_in_8bit
    output_loading_info
""".split())  # fmt: skip  # noqa: SIM905
_ONLY_TRUE = frozenset(("safe_serialization", "save_original_format", "use_safetensors"))


def supported(options: Mapping[str, Any], accepted: Collection[str], parameters: Iterable[str]) -> dict[str, Any]:
    """The accepted ones of `options`. parameters: of the function itself, to suggest instead of an unknown name.

    Raises InputError for other options, unless they change nothing. None never does.
    """
    accepted_options = {}
    for name, value in options.items():
        if name in accepted:
            accepted_options[name] = value
        elif name in _WARNED and value:
            warnings.warn(f"{name}={value!r} changes nothing: ligermodels runs its own layers", stacklevel=4)
        elif not (
            value is None
            or name in _NO_EFFECT | _WARNED
            or (name in _ONLY_FALSE and value in (False, {}))
            or (name in _ONLY_TRUE and value is True)
        ):
            known = {*parameters, *accepted}
            raise InputError(f"argument {name}={value!r:.80} is not supported" + did_you_mean(name, known))
    return accepted_options


def one_dtype(dtype: torch.dtype | str | None, torch_dtype: torch.dtype | str | None) -> str:
    """torch's name of the dtype that either argument gives; "auto" if neither does. Raises InputError."""
    names = {dtype_name(name) for name in (dtype, torch_dtype) if name is not None} - {"auto"}
    if len(names) > 1:
        raise InputError(f"dtype={dtype} and torch_dtype={torch_dtype} are one argument under two names; pass dtype")
    return names.pop() if names else "auto"
