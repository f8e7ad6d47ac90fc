"""`ligermodels doctor`: this machine's setup, with a fix for each problem, and which parts of a model run fused."""

import argparse
import importlib.metadata
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from ligermodels import __version__
from ligermodels.checkpoint.files import readable_size
from ligermodels.cli.arguments import UsageError
from ligermodels.cli.models import check_source
from ligermodels.errors import config_of


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser."""
    doctor = commands.add_parser(
        "doctor",
        help="check this machine, with a fix for each problem, and show which parts of a model run fused",
        description="Prints versions, GPUs, Hub token and cache, with a fix for what is missing. With MODEL, also\n"
        "which of its parts run as fused ops on this machine, and why the others do not, by its config.json.\n"
        "For a model in memory, with its adapters and hooks: model.fusion_report(). With --kernels, compares every\n"
        "kernel with its reference on this GPU, in about a minute; the exit status is 1 if one is wrong.",
    )
    doctor.add_argument(
        "model", metavar="MODEL", nargs="?", help="folder, GGUF file, or repository on the Hub; no weights are read"
    )
    doctor.add_argument("--kernels", action="store_true", help="compare every kernel with its reference, on this GPU")
    doctor.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    """Prints a line for each finding, and a second line with the fix of a problem."""
    if args.kernels:
        if args.model is not None:
            raise UsageError("--kernels checks the machine, for every model: leave MODEL out")
        from ligermodels.cli import doctor_kernels

        return doctor_kernels.doctor()
    if args.model is not None:
        check_source(args.model)
    problems = 0
    for name, value, fix in _findings():
        print(f"{'FIX ' if fix else 'ok  '} {name:14}{value}")
        if fix:
            problems += 1
            print(f"     {'':14}-> {fix}")
    if args.model is not None:
        print(f"\n{_fusion(args.model)}")
    return 1 if problems else 0


def _findings() -> Iterator[tuple[str, str, str | None]]:
    """(name, state, how to fix it or None)."""
    import torch
    from huggingface_hub import constants, get_token

    from ligermodels.kernels import _triton

    yield "ligermodels", f"{__version__} at {Path(__file__).parents[1]}", None
    yield "python", f"{platform.python_version()} on {platform.platform()}", None
    fix = None if _version(torch.__version__) >= (2, 11) else "pip install -U 'torch>=2.11'"
    yield "torch", torch.__version__, fix
    if not _triton.IS_INSTALLED:
        fix = "pip install 'triton>=3.6'" if sys.platform == "linux" else None
        yield "triton", "not installed; every op runs as plain PyTorch", fix
    else:
        version = importlib.metadata.version("triton")
        yield "triton", version, None if _version(version) >= (3, 6) else "pip install -U 'triton>=3.6'"

    if torch.cuda.is_available():
        yield "CUDA runtime", f"{torch.version.cuda or torch.version.hip}", None
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            free = torch.cuda.mem_get_info(index)[0]
            capability = ".".join(map(str, torch.cuda.get_device_capability(index)))
            memory = f"{free / 2**30:.1f} of {gpu.total_memory / 2**30:.1f} GiB free"
            yield f"GPU {index}", f"{gpu.name}, {memory}, capability {capability}", None
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        yield "bfloat16", "in hardware" if native else "emulated and slow on this GPU: use dtype=torch.float16", None
        yield "kernels", *_try_kernel()
    else:
        built, fix = torch.version.cuda or torch.version.hip, None
        if shutil.which("nvidia-smi"):
            fix = "install a torch build with CUDA: https://pytorch.org/get-started"
            if built:
                fix = f"this torch needs a driver for {built}: update it, or check CUDA_VISIBLE_DEVICES"
        yield "GPU", "none that torch can use", fix
        interpreter = "; TRITON_INTERPRET=1 runs them in Triton's interpreter" if _triton.IS_INSTALLED else ""
        yield "kernels", f"plain PyTorch on the CPU{interpreter}", None

    has_token = get_token() is not None
    yield "HF token", "present" if has_token else "none (for gated and private repositories: `hf auth login`)", None
    cache = Path(constants.HF_HUB_CACHE)
    existing = next(folder for folder in (cache, *cache.parents) if folder.is_dir())
    free = shutil.disk_usage(existing).free
    fix = None if os.access(existing, os.W_OK) else "not writable: set HF_HOME to a folder that is"
    if fix is None and free < 10e9:
        fix = "little space for checkpoints: free some, or set HF_HOME to another disk"
    yield "cache", f"{cache}, {readable_size(free)} free", fix


def _fusion(model: str) -> str:
    """The fusion report of the model that config.json in the folder or repository describes."""
    from ligermodels import arch
    from ligermodels.checkpoint import files, hub

    folder = hub.resolve(model, weights=False)
    if (folder / files.ADAPTER).is_file() and not (folder / "config.json").exists():
        raise UsageError(f"{model} is an adapter; give the model that it belongs to")
    config = files.read_json(folder / "config.json")
    with config_of(folder):
        return str(arch.arch_of(folder).from_config(config, device="meta").fusion_report())


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


def _try_kernel() -> tuple[str, str | None]:
    """Compiles and runs one Triton kernel on the GPU and compares it with PyTorch."""
    import torch

    from ligermodels.kernels._launch import why_through_triton
    from ligermodels.kernels._triton import HAS_TRITON
    from ligermodels.kernels.norm.rms_norm import rms_norm, rms_norm_reference

    if not HAS_TRITON:
        return "plain PyTorch", None
    x = torch.randn(4, 100, device="cuda")
    try:
        close = torch.allclose(rms_norm(x), rms_norm_reference(x), atol=1e-5)
    except Exception as error:  # a compiler, driver or library that is missing shows in many ways
        reason = (str(error).strip().splitlines() or [""])[-1]
        fix = "Triton needs a C compiler (apt install gcc) and the torch release that it came with"
        return f"do not run: {type(error).__name__}: {reason}", fix
    if not close:
        return "WRONG RESULTS", "reinstall torch and triton together"
    cause = why_through_triton()
    return "Triton, tried on this GPU; " + (f"slow launches: {cause}" if cause else "fast launches"), None
