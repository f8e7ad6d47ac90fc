"""unsloth as a baseline of `benchmarks.train_step`: how its model is loaded, and where its packages lie.

It wants versions of its own (TRL below 1.16) and patches transformers as it is imported, so that only the process of
its baselines has its folder on the path: `--unsloth-path FOLDER`, filled by
`pip install --no-deps --target FOLDER unsloth unsloth_zoo trl==1.15.0 cut_cross_entropy`, with datasets below 5,
bitsandbytes, and what else it names where Python finds them.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.train_cases import write_tokenizer

PACKAGES = ("unsloth", "unsloth_zoo", "trl", "xformers")


def variables(folder: str, scratch: str) -> dict[str, str]:
    """The environment of a baseline's process: `folder` first on the path, no network, nothing written outside
    `scratch`."""
    path = os.pathsep.join(part for part in (folder, os.environ.get("PYTHONPATH", "")) if part)
    return {
        **({"PYTHONPATH": path} if path else {}), "HF_HUB_OFFLINE": "1", "UNSLOTH_DISABLE_STATISTICS": "1",
        "UNSLOTH_COMPILE_LOCATION": str(Path(scratch, "unsloth_compiled_cache")),
    }  # fmt: skip


def is_installed() -> bool:
    return importlib.util.find_spec("unsloth") is not None


def versions() -> str:
    """Those of unsloth and of what it was loaded with."""
    known = {}
    for package in PACKAGES:
        try:
            known[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(f"{package} {version}" for package, version in known.items())


def load(
    folder: Path, config: Mapping[str, Any], adapters: Path | None, in_4_bits: bool, length: int,
    checkpointing: bool | str, device: str,
) -> nn.Module:  # fmt: skip
    """unsloth's model of a checkpoint, ready to train: all weights, or the `adapters` that PEFT wrote.

    Args:
        length: the longest sequence; unsloth cuts longer ones.
        checkpointing: its `use_gradient_checkpointing`: False, True, or "unsloth", which offloads to the host.

    Raises:
        RuntimeError: it loaded no weight in 4 bits, or not every adapter.
    """
    unsloth = importlib.import_module("unsloth")  # before transformers and PEFT, which it patches
    write_tokenizer(folder, config)
    model, _ = unsloth.FastLanguageModel.from_pretrained(
        str(folder), max_seq_length=length, dtype=torch.bfloat16, load_in_4bit=in_4_bits,
        load_in_16bit=adapters is not None and not in_4_bits, full_finetuning=adapters is None,
        use_gradient_checkpointing=checkpointing, use_exact_model_name=True, local_files_only=True,
        device_map={"": device},
    )  # fmt: skip
    if in_4_bits and not any(type(module).__name__ == "Linear4bit" for module in model.modules()):
        raise RuntimeError("unsloth loaded no weight in 4 bits; see why in `python -m bitsandbytes`")
    if adapters is not None:
        options = json.loads((adapters / "adapter_config.json").read_text())
        model = unsloth.FastLanguageModel.get_peft_model(
            model, r=options["r"], lora_alpha=options["lora_alpha"], lora_dropout=0, bias="none",
            target_modules=sorted({name.rpartition(".")[2] for name in options["target_modules"]}),
            target_parameters=options["target_parameters"], rank_pattern=options["rank_pattern"],
            alpha_pattern=options["alpha_pattern"], use_gradient_checkpointing=checkpointing,
        )  # fmt: skip
        fill_adapters(model, adapters)
    unsloth.FastLanguageModel.for_training(model, use_gradient_checkpointing=checkpointing)
    return model


def fill_adapters(model: nn.Module, adapters: Path) -> None:
    """Copies the adapters of a file into those of the model. Raises RuntimeError if either has others."""
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    values = load_file(adapters / "adapter_model.safetensors")
    result = set_peft_model_state_dict(model, values)
    filled = sum(".lora_" in name for name, parameter in model.named_parameters() if parameter.requires_grad)
    missing = [name for name in result.missing_keys if ".lora_" in name]
    if result.unexpected_keys or missing or filled != len(values):
        raise RuntimeError(
            f"unsloth trains {filled} tensors of adapters, the file has {len(values)}; "
            f"missing {missing[:3]}, unexpected {result.unexpected_keys[:3]}"
        )
