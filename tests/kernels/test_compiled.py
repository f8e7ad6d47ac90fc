"""The table of benchmarks/compile.py: all kernels are in it, and the sources are no worse than it says."""

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = json.loads((ROOT / "tests" / "fixtures" / "ptxas.json").read_text())


def triton() -> str | None:
    try:
        return version("triton")
    except PackageNotFoundError:
        return None


of_this_triton = pytest.mark.skipif(
    triton() != TABLE["triton"], reason=f"the table is of triton {TABLE['triton']}; this is {triton()}"
)


def python(*arguments: str, timeout: int = 900) -> subprocess.CompletedProcess:
    """In a process of its own, in which Triton is not interpreted."""
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
    )


@of_this_triton
def test_no_kernel_is_forgotten():
    """Every function that is launched is in the table, for each GPU; those of attention to 512 dims and of the copies
    for CUTLASS are launched on data center GPUs alone, from Hopper on, and those of FP8 from Ada on."""
    done = python("-c", "from benchmarks import compile; print('\\n'.join(compile.kernels()))")
    assert done.returncode == 0, done.stderr
    kernels = {line.removeprefix("ligermodels.kernels.") for line in done.stdout.split()}
    assert len(kernels) > 70
    for capability in ("80", "89", "90", "100", "120"):
        compiled = {name.split(":")[0] for name, row in TABLE["rows"].items() if capability in row}
        some = {"experts._order._dispatch_kernel"} | {k for k in kernels if "_unfused_attention" in k}
        some |= {k for k in kernels if "_fp8_quantize" in k and capability == "80"}
        assert kernels - compiled == (set() if capability in ("90", "100") else some), capability


@of_this_triton
@pytest.mark.slow
def test_the_sources_are_no_worse_than_the_table():
    """Compiles what has changed since the table was written, and one kernel in any case."""
    done = python("-m", "benchmarks.compile", "--check", "--fresh", "optimizer.adamw")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


WORSE = """
from benchmarks import compile as c
variant = c.Variant("a kernel", 120, None, "")
row = "", c.Figures(100, 8, 1000, 4)
for found in ((110, 8, 99 * 1024, 4), (111, 8, 1000, 4), (100, 9, 1000, 4), (1, 0, 99 * 1024 + 1, 4)):
    print(list(c.problems(variant, c.Figures(*found), row)))
print(list(c.problems(variant, "no registers", row)), list(c.problems(variant, row[1], None)))
"""


@of_this_triton
def test_what_is_worse():
    done = python("-c", WORSE)
    assert done.stdout.splitlines() == [
        "[]",
        "['takes 111 registers, 100 before']",
        "['spills 9 bytes, 8 before']",
        "['needs 101377 bytes of shared memory, and a program can have 101376']",
        "['does not compile: no registers'] ['has no row in the table']",
    ], done.stderr


LANES = """
from benchmarks import compile as c
ttgir = "#blocked = #ttg.blocked<{sizePerThread = [1, 2], threadsPerWarp = [LANES], warpsPerCTA = [1, 1]}>\\n" + (
    '%1 = tt.elementwise_inline_asm "mma.sync" %0 : tensor<8x8xi32, #blocked> -> tensor<8x8xf32, #blocked>')
for lanes in ("8, 4", "4, 8"):
    print(c.wrong_layouts("ligermodels.kernels.experts._decode_mxfp4._up_kernel", ttgir.replace("LANES", lanes)))
print(len(c.wrong_layouts("ligermodels.kernels.linear.linear._kernel", ttgir)))
"""


@of_this_triton
def test_elements_of_other_lanes_are_refused():
    done = python("-c", LANES)
    right, other, unknown = done.stdout.splitlines()
    assert right == "[]" and "threadsPerWarp = [4, 8]" in other and unknown == "1", done.stderr
