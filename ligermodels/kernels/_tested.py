"""On which GPUs and versions of Triton the kernels were tested, and the warning on others.

A compiler's fault gives wrong numbers, not an error. `ligermodels doctor --kernels` compares every op with its
reference, and leaves a report, after which the warning is no more.
"""

import json
import os
import re
import warnings
from pathlib import Path

import torch

from ligermodels import __version__

CAPABILITIES, TRITON = (90,), "3.6"
"""Of H100 and H200, and of the runs on them: see benchmarks/results/gpu.json. With Triton 3.9 the kernels were
interpreted, and compiled by ptxas."""
SWITCH = "LIGERMODELS_CHECK_KERNELS"
"""In the environment: 0 stands for neither a warning nor a check."""


def why_untested(capability: int, name: str, triton: str) -> str | None:
    """Why the kernels were not tested on a GPU, by its name and compute capability (0: none of NVIDIA's), with this
    version of Triton; None if they were."""
    if capability not in CAPABILITIES:
        return f"the kernels were tested on H100 and H200, and never on {name}"
    if not triton.startswith(f"{TRITON}."):
        return f"the kernels were tested on GPUs with Triton {TRITON}, and never with {triton}"
    return None


def report_of(name: str, triton: str) -> Path:
    """The file that says what the checks found on this GPU, for this version of Triton and of ligermodels."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    gpu = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return Path(cache) / "ligermodels" / f"kernels-{gpu}-{triton}-{__version__}.json"


def has_passed(report: Path) -> bool:
    """True if all checks of a report passed; False also where there is none that can be read."""
    try:
        return json.loads(report.read_text("utf-8"))["failed"] == []
    except (OSError, ValueError, KeyError, TypeError):
        return False


def warn_if_untested(index: int | None, capability: int, triton: str) -> None:
    """Warns where nobody has tested or checked the kernels on CUDA or HIP device `index`."""
    name = torch.cuda.get_device_name(index)
    reason = why_untested(capability, name, triton)
    if reason is None or os.environ.get(SWITCH) == "0" or has_passed(report_of(name, triton)):
        return
    warnings.warn(
        f"{reason}. `ligermodels doctor --kernels` compares each with its reference, in about a minute, and then this "
        f"warning ends; so it does with {SWITCH}=0",
        stacklevel=2,
    )
