"""Every Triton kernel, compiled by ptxas for five kinds of GPU on a machine that has none: registers, spills, memory.

    python -m benchmarks.compile                 writes tests/fixtures/ptxas.json
    python -m benchmarks.compile --check         exit status 1 where the sources are worse than that table says
    python -m benchmarks.compile --fresh adamw   also compiles again what has this in its name ("": everything)

compile_cases.py has the calls, and pretend.py runs them as on a GPU of each capability. A row of the table is a variant
of a kernel: registers of a thread, bytes spilled (stores and loads of the code, not of a run), bytes of shared memory,
warps. It also has a fingerprint of the variant and of all source that it is compiled from. What has the fingerprint of
its row is not compiled again: that takes seconds, the whole table eleven minutes on two cores.

`--check` fails where a variant does not compile, has no row, needs more shared memory than a program of that GPU can
have, spills more bytes than its row says, or takes more than 10 % more registers; or where a kernel is in no case.
Without it the new figures are written, whatever they are, and the status is 1 only for what cannot run. Figures are
those of one Triton, with its ptxas: `--check` refuses another.
"""

import argparse
import contextlib
import functools
import hashlib
import importlib
import io
import json
import multiprocessing
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ["TRITON_INTERPRET"] = "0"  # before Triton is imported
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"  # what Triton 3.9 does where nothing is said, with a warning

import triton
from triton import knobs
from triton.compiler import ASTSource
from triton.runtime.jit import JITCallable, JITFunction

import ligermodels
from benchmarks import pretend
from benchmarks.compile_cases import cases

TABLE = Path(__file__).parents[1] / "tests" / "fixtures" / "ptxas.json"
SHARED = {80: 163, 89: 99, 90: 227, 100: 227, 120: 99}
"""KiB of shared memory that a program can have, by capability. Source: CUDA C++ Programming Guide, compute
capabilities."""
TENSOR_MEMORY = 512
"""Columns of data center Blackwell's. With more, Triton 3.9 makes a kernel that only traps, and refuses its launch."""
REGISTERS_MAY_GROW = 1.1
LANES = {
    "experts._decode_mxfp4": (r"\[1, 2\], threadsPerWarp = \[8, 4\]",),
    "linear._int4_row": (r"\[1, 2\], threadsPerWarp = \[1, 32\]", r"\[2\], threadsPerWarp = \[32\]"),
}
"""{file: which elements a lane must have of what its PTX hands to tensor cores, as sizePerThread of a layout}. Triton
chooses layouts, and PTX of a lane has its own elements alone: with others the numbers would be wrong."""


class Variant(NamedTuple):
    """name: unique for a capability. fingerprint: of what is compiled."""

    name: str
    capability: int
    launch: pretend.Launch
    fingerprint: str


class Figures(NamedTuple):
    """registers of a thread; spilled: bytes of stores and loads; shared: bytes of a program."""

    registers: int
    spilled: int
    shared: int
    warps: int


Row = tuple[str, Figures]
"""(fingerprint, figures)."""
Table = dict[str, dict[int, Row]]
"""{name: {capability: row}}."""


# ---- The kernels of the package ----


@functools.cache
def _functions() -> list[Any]:
    """All functions of the package that Triton compiles, also those that kernels call."""
    found = []
    root = Path(ligermodels.__file__).parent
    for file in sorted((root / "kernels").rglob("*.py")):
        name = ".".join(file.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")
        values = vars(importlib.import_module(name)).values()
        found += [f for f in values if isinstance(f, JITCallable) and f.fn.__module__ == name]
    for f in found:  # the fingerprint is not to depend on where in its file a function is
        f.starting_line_number = 0
    return found


def kernels() -> set[str]:
    """The functions that no other calls, by their full names: what is launched."""
    called = {id(f.fn.__globals__.get(name)) for f in _functions() for name in f.fn.__code__.co_names}
    return {f._fn_name for f in _functions() if isinstance(f, JITFunction) and id(f) not in called}


def variants(capability: int) -> list[Variant]:
    """The variants of all cases on a GPU of this capability, in order."""
    _functions()
    found: list[Variant] = []
    names: set[str] = set()
    with pretend.gpu(capability) as launches, warnings.catch_warnings(action="ignore"):  # of ops that are torch's
        for case, call in cases(capability).items():
            before = len(launches)
            call()
            for launch in launches[before:]:
                name = f"{launch.kernel._fn_name.removeprefix('ligermodels.kernels.')}: {case}"
                count = sum(n == name or n.startswith(f"{name} (") for n in names)
                name = f"{name} ({count + 1})" if count else name
                names.add(name)
                text = f"{launch.kernel.cache_key} {launch.key} {capability}"
                found.append(Variant(name, capability, launch, hashlib.sha256(text.encode()).hexdigest()[:12]))
    return found


# ---- Compiling ----


def figures(variant: Variant) -> Figures | str:
    """Of a variant, compiled now; or why it does not compile."""
    launch, log = variant.launch, io.StringIO()
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    try:
        with contextlib.redirect_stdout(log):
            compiled = triton.compile(source, target=pretend.target(variant.capability), options=launch.options)
    except Exception as error:  # of the compiler, of any kind
        return f"{type(error).__name__}: {str(error).strip()[-400:]}"
    if layouts := wrong_layouts(launch.kernel._fn_name, compiled.asm["ttgir"]):
        return f"hands elements of other lanes to tensor cores: {', '.join(layouts)}"
    columns = getattr(compiled.metadata, "tmem_size", None) or 0
    if columns > TENSOR_MEMORY:
        return f"needs {columns} columns of tensor memory, and a multiprocessor has {TENSOR_MEMORY}"
    if "ret;" not in compiled.asm["ptx"]:
        return "ends in a trap: the compiler gave up, and said nothing"
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", log.getvalue())]
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill", log.getvalue())]
    return Figures(max(registers), sum(spilled), compiled.metadata.shared, compiled.metadata.num_warps)


def wrong_layouts(kernel: str, ttgir: str) -> list[str]:
    """The layouts of operands of mma.sync in inline PTX that are not those of LANES."""
    known = next((known for file, known in LANES.items() if f".{file}." in kernel), ())
    layouts = dict(re.findall(r"(#\w+) = #ttg\.(\S+<\{.*?\}>)", ttgir))
    lines = [line for line in ttgir.splitlines() if "elementwise_inline_asm" in line and "mma.sync" in line]
    used = {layouts.get(name, name) for line in lines for name in re.findall(r"tensor<[^>]*?, (#[\w.]+)", line)}
    return sorted(layout for layout in used if not any(re.search(f"sizePerThread = {one}", layout) for one in known))


def compiled(todo: list[Variant]) -> Iterator[tuple[Variant, Figures | str]]:
    """Each with its figures, compiled in as many processes as there are cores."""
    global _todo
    _todo = todo
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        knobs.compilation.always_compile = knobs.nvidia.dump_ptxas_log = True
        # Forked, since what was launched is no message to another process.
        with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
            for i, found in enumerate(pool.imap(_figures, range(len(todo)))):
                if sys.stderr.isatty():
                    print(f"\r{i + 1} of {len(todo)}", end="\n" * (i + 1 == len(todo)), file=sys.stderr, flush=True)
                yield todo[i], found


_todo: list[Variant] = []


def _figures(index: int) -> Figures | str:
    return figures(_todo[index])


# ---- The table ----


def read(path: Path = TABLE) -> tuple[str, Table]:
    """(version of Triton, table); an empty one where there is no file."""
    if not path.exists():
        return triton.__version__, {}
    record = json.loads(path.read_text())
    table = {
        name: {int(n): (row[0], Figures(*row[1:])) for n, row in rows.items()} for name, rows in record["rows"].items()
    }
    return record["triton"], table


def write(table: Table, path: Path = TABLE) -> None:
    """A line for each name."""
    columns = json.dumps(["fingerprint", *Figures._fields])
    rows = (
        f"  {json.dumps(name)}: {json.dumps({n: [row[0], *row[1]] for n, row in rows.items()})}"
        for name, rows in table.items()
    )
    path.write_text(
        f'{{\n "triton": {json.dumps(triton.__version__)},\n "columns": {columns},\n "rows": {{\n'
        + ",\n".join(rows)
        + "\n }\n}\n"
    )


def problems(variant: Variant, found: Figures | str, row: Row | None) -> Iterator[str]:
    """What is worse than the table says, or impossible on that GPU."""
    if isinstance(found, str):
        yield f"does not compile: {found}"
        return
    limit = SHARED[variant.capability] * 1024
    if found.shared > limit:
        yield f"needs {found.shared} bytes of shared memory, and a program can have {limit}"
    if row is None:
        yield "has no row in the table"
        return
    before = row[1]
    if found.spilled > before.spilled:
        yield f"spills {found.spilled} bytes, {before.spilled} before"
    if found.registers > before.registers * REGISTERS_MAY_GROW:
        yield f"takes {found.registers} registers, {before.registers} before"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the table, and write nothing")
    parser.add_argument("--fresh", metavar="TEXT", help="compile again what has TEXT in its name")
    options = parser.parse_args(arguments)
    version, before = read()
    if version != triton.__version__:
        if options.check:
            print(f"the table is of triton {version}; this is {triton.__version__}")
            return 2
        before = {}
    everything = [v for capability in SHARED for v in variants(capability)]
    missing = kernels() - {v.launch.kernel._fn_name for v in everything}
    bad = [f"{name} is launched by no case of compile_cases.py" for name in sorted(missing)]
    todo, table = [], {v.name: {} for v in everything}  # type: tuple[list[Variant], Table]
    for v in everything:
        row = before.get(v.name, {}).get(v.capability)
        fresh = options.fresh is not None and options.fresh in v.name
        if row is None or row[0] != v.fingerprint or fresh:
            todo.append(v)
        else:
            table[v.name][v.capability] = row
    broken = bool(bad)
    for v, found in compiled(todo):
        row = before.get(v.name, {}).get(v.capability)
        bad += [f"{v.name}, sm_{v.capability}: {problem}" for problem in problems(v, found, row)]
        if isinstance(found, str):
            broken = True
            continue
        broken |= found.shared > SHARED[v.capability] * 1024
        table[v.name][v.capability] = (v.fingerprint, found)
    print(f"{len(everything)} variants of {len(kernels())} kernels, of which {len(todo)} were compiled")
    print("\n".join(bad) or "no worse than the table")
    if options.check:
        return 1 if bad else 0
    write({name: {c: table[name][c] for c in SHARED if c in table[name]} for name in table})
    print(f"wrote {TABLE}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
