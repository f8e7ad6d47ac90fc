"""Which model a command runs: its options, and how model, tokenizer and processor are loaded from them."""

import argparse
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ligermodels.checkpoint import files, hub
from ligermodels.cli.arguments import UsageError, dtype, usage_errors
from ligermodels.cli.output import say
from ligermodels.errors import CheckpointError, HubError, InputError, TokenizerError
from ligermodels.generation.options import Options

if TYPE_CHECKING:
    from ligermodels.arch import CausalLM
    from ligermodels.text import Tokenizer
    from ligermodels.vision import Processor

PASSED_ON = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "prompt_lookup_num_tokens")
"""Options of `generate` that a command passes on as they are, where they are given."""


def model_options() -> argparse.ArgumentParser:
    """A parent parser of MODEL and the options of loading it, which `load_model` reads."""
    parser = argparse.ArgumentParser(add_help=False)
    option = parser.add_argument
    option(
        "model",
        metavar="MODEL",
        help="repository on the Hub, folder of a checkpoint, GGUF file, or folder of an adapter that names its base",
    )
    option("--adapter", metavar="DIR", help="LoRA adapter to put on MODEL, saved by train or PEFT")
    option("--revision", metavar="NAME", help="branch, tag or commit")
    option("--local-files-only", action="store_true", help="use the cache, never the network")
    option("--allow-pickle", action="store_true", help="read pytorch_model.bin where there is no safetensors file")
    option(
        "--dtype",
        type=dtype,
        default="auto",
        metavar="DTYPE",
        help="float32, bf16, ...; auto: as in config.json (auto)",
    )
    kinds = ("int8", "fp8", "int4", "nf4", "mxfp4")
    option("--quantize", choices=kinds, help="quantise the weights of linear layers and experts; mxfp4: of experts")
    option("--kv-cache-dtype", choices=("auto", "fp8"), default="auto", help="fp8 halves the memory of the KV cache")
    option("--device", metavar="NAME", help="cpu, cuda, cuda:1, ... (cuda if there is one)")
    return parser


def resolve_adapter(args: argparse.Namespace) -> None:
    """Where MODEL is an adapter, makes it --adapter, and MODEL the base that its config names.

    Raises InputError, CheckpointError for an unsupported adapter, HubError where its base is not there.
    """
    check_is_model(args.model)
    folder = files.absolute(args.model)
    is_adapter = (folder / files.ADAPTER).is_file() and not (folder / "config.json").exists()
    if is_adapter and args.adapter:
        raise InputError(f"{args.model} is an adapter, and so is {args.adapter}: give one, and its base as MODEL")
    if not is_adapter and not args.adapter:
        return
    from ligermodels.checkpoint import adapters

    args.adapter = files.absolute(args.model if is_adapter else args.adapter)
    options = adapters.read_options(args.adapter, computed=adapters.IN_MEMORY)
    base = options.get("base_model_name_or_path")
    if not is_adapter:
        if base and Path(base).name != folder.name:
            say(f"note: {args.adapter} names {base} as its base, and MODEL is {args.model}; they must be one model")
        return
    args.revision = args.revision or options.get("revision")
    advice = f"Next step: give the base as MODEL, and --adapter {args.model}"
    if not base:
        raise CheckpointError(f"{args.adapter / files.ADAPTER} does not name its base model. {advice}")
    try:
        hub.resolve(base, revision=args.revision, local_files_only=args.local_files_only, weights=False)
    except HubError as error:
        error.add_note(f"  It is the base that {args.adapter / files.ADAPTER} names. {advice}")
        raise
    args.model = base


@contextlib.contextmanager
def _text_folder(args: argparse.Namespace) -> Iterator[str | Path]:
    """Where tokenizer and processor are read from: MODEL, or its files with those of the adapter's folder over them."""
    adapter_files = files.companion_files(args.adapter) if args.adapter else {}
    if not adapter_files:
        yield args.model
        return
    folder = hub.resolve(args.model, revision=args.revision, local_files_only=args.local_files_only, weights=False)
    configs = {name: folder / name for name in ("config.json", "generation_config.json") if (folder / name).is_file()}
    with tempfile.TemporaryDirectory() as joined:
        for name, path in {**configs, **files.companion_files(folder), **adapter_files}.items():
            (Path(joined) / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, Path(joined) / name)
        yield joined


def load_tokenizer(args: argparse.Namespace) -> "Tokenizer":
    """The tokenizer; called before the model is loaded, so that a wrong one fails before weights are fetched.

    Raises TokenizerError; where the model cannot be used either, the error of the model.
    """
    from ligermodels.text import Tokenizer

    how: dict[str, Any] = dict(revision=args.revision, local_files_only=args.local_files_only)
    try:
        with _text_folder(args) as source:
            return Tokenizer.from_hub(source, **how)
    except TokenizerError:
        from ligermodels.conversion import inspect

        inspect(args.model, allow_pickle=args.allow_pickle, **how)
        raise


def load_processor(args: argparse.Namespace) -> "Processor":
    """The processor of a model that takes images. Raises UsageError for a model of text."""
    folder = hub.resolve(args.model, revision=args.revision, local_files_only=args.local_files_only, weights=False)
    if not files.takes_images(folder):
        raise UsageError(f"--image: {args.model} reads no images; leave it out")
    from ligermodels.vision import Processor

    with _text_folder(args) as source:
        return Processor.from_hub(source, revision=args.revision, local_files_only=args.local_files_only)


def load_model(args: argparse.Namespace) -> "CausalLM":
    """The model with its adapter, after `resolve_adapter`.

    Raises UsageError for options that cannot be, before torch is imported; the errors of loading.
    """
    with usage_errors():
        options: dict[str, Any] = {name: getattr(args, name, None) for name in ("max_new_tokens", *PASSED_ON)}
        Options(**options)  # all None for `bench`
    folder = files.absolute(args.model)
    if (folder / "config.json").is_file() and not any(files.is_gguf_name(path.name) for path in folder.glob("*")):
        files.weights_in(folder, allow_pickle=args.allow_pickle)
    import torch

    import ligermodels
    from ligermodels.arch.placement import usable
    from ligermodels.cli import doctor_kernels
    from ligermodels.layers.state import check_cache_dtype

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    with usage_errors():
        place = usable(device, f"--device {device}")
    if place.type == "meta":
        raise UsageError(f"--device {device} has no values to compute with; give cpu, or cuda where there is a GPU")
    check_cache_dtype(args.kv_cache_dtype, place)
    doctor_kernels.check_once(place)
    model = ligermodels.load(
        args.model,
        revision=args.revision,
        local_files_only=args.local_files_only,
        allow_pickle=args.allow_pickle,
        dtype=args.dtype,
        device=place,
        quantization_config=args.quantize,
    )
    if args.adapter:
        from ligermodels.training import load_adapter

        load_adapter(model, args.adapter, dtype=model.dtype, allow_pickle=args.allow_pickle)
    return model


def load_drafter(model: "CausalLM", args: argparse.Namespace) -> dict[str, Any]:
    """The options of `generate` for --medusa or --use-mtp. Raises CheckpointError, InputError for a model without."""
    if args.medusa is not None:
        from ligermodels.training import load_medusa

        return {"medusa": load_medusa(model, args.medusa, allow_pickle=args.allow_pickle)}
    if args.use_mtp:
        from ligermodels.training import load_mtp

        load_mtp(model)
    return {"use_mtp": True} if args.use_mtp else {}


def check_is_model(src: str) -> None:
    """Raises UsageError for the --output-dir of `train` and for Medusa heads, HubError for what may not be entered."""
    with files.read_errors(src):
        folder = files.absolute(src)
        is_run = (folder / "options.yaml").is_file() and not (folder / "config.json").exists()
        weights = [path.name for path in folder.glob("*") if path.suffix.lower() in (".safetensors", ".bin", ".gguf")]
    if is_run:
        results = [f"{Path(src) / name}" for name in ("model", "adapter", "medusa", "best") if (folder / name).is_dir()]
        advice = f"give what it has written: {' or '.join(results)}" if results else "it has written no model yet"
        raise UsageError(f"{src} is the folder of a run of `train`; {advice}")
    if weights == [files.MEDUSA]:
        raise UsageError(f"{src} has Medusa heads, which go with their model: `ligermodels chat BASE --medusa {src}`")


def check_source(src: str) -> None:
    """Raises HubError for the path of a folder that is not there, before torch is imported; UsageError for a run's."""
    check_is_model(src)
    is_path = src.startswith(("/", ".", "~")) or src.count("/") > 1
    if is_path and not os.path.exists(os.path.expanduser(src)):
        hub.resolve(src)
