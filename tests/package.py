"""Checks what `make dist` built: contents, metadata, and that the wheel with its dependencies alone runs the demo.

    python -m tests.package dist

The wheel is installed into a new environment. Its dependencies, and theirs, are links to those of this environment:
nothing is downloaded, and a file or a dependency that is not declared is missing there.
"""

import importlib.metadata
import os
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from pathlib import Path

from packaging.metadata import Metadata
from packaging.requirements import Requirement

import ligermodels
from ligermodels.errors import REPOSITORY

ROOT = Path(__file__).parents[1]
NOT_DISTRIBUTED = (".ci/", ".github/", ".gitignore")
GENERATED = {"PKG-INFO", "setup.cfg"}


def tracked() -> set[str]:
    """The files of the repository that exist."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {name for name in listed.split("\0") if name and (ROOT / name).is_file()}


def check_same(what: str, files: set[str], expected: set[str]) -> None:
    assert files == expected, f"{what}: missing {sorted(expected - files)}, not expected {sorted(files - expected)}"


def check_source(sdist: Path) -> None:
    """The source distribution has what a clone has, so that its tests run and its docs can be built."""
    with tarfile.open(sdist) as archive:
        files = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    files = {name for name in files - GENERATED if ".egg-info/" not in name}
    check_same(sdist.name, files, {name for name in tracked() if not name.startswith(NOT_DISTRIBUTED)})


def check_wheel(wheel: Path) -> None:
    """The wheel has every file of the package and nothing else, and metadata that an index takes."""
    info = f"ligermodels-{ligermodels.__version__}.dist-info/"
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if not name.startswith(info)}
        text = archive.read(f"{info}METADATA")
        licences = [name for name in archive.namelist() if name.startswith(f"{info}licenses/")]
    check_same(wheel.name, files, {name for name in tracked() if name.startswith("ligermodels/")})
    metadata = Metadata.from_email(text, validate=True)
    assert str(metadata.version) == ligermodels.__version__ and metadata.license_expression == "Apache-2.0"
    assert licences and metadata.author and metadata.summary and metadata.keywords and metadata.classifiers
    assert metadata.description_content_type == "text/markdown"
    assert metadata.description == (ROOT / "README.md").read_text("utf-8")
    assert all(url.startswith(REPOSITORY) or "ligermodels" in url for url in (metadata.project_urls or {}).values())
    assert set(message_from_bytes(text).get_all("Provides-Extra")) == {"eval", "vision", "gguf", "train"}


def dependencies(distribution: importlib.metadata.Distribution) -> Iterator[importlib.metadata.Distribution]:
    """The distributions of this environment that one without extras asks for, and those that these ask for."""
    waiting, seen = [(distribution, "")], set()
    while waiting:
        asking, extra = waiting.pop()
        for requirement in map(Requirement, asking.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                asked = {(requirement.name, extra) for extra in {"", *requirement.extras}} - seen
                seen |= asked
                waiting += [(importlib.metadata.distribution(name), extra) for name, extra in asked]
        if asking is not distribution:
            yield asking


def install(wheel: Path, folder: Path) -> Path:
    """Makes an environment with the wheel and its dependencies; returns its folder of commands."""
    venv.create(folder)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "--disable-pip-version-check", "install"]
    subprocess.run([*pip, "--quiet", "--no-deps", "--no-index", wheel], check=True)
    (packages,) = folder.glob("lib/*/site-packages")
    (installed,) = importlib.metadata.distributions(path=[str(packages)])
    for distribution in dependencies(installed):
        for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (packages / name).is_symlink():
                (packages / name).symlink_to(distribution.locate_file(name))
    return folder / "bin"


def check_demo(wheel: Path) -> None:
    """In another folder, the installed command trains, saves, loads and generates; its version is the one built."""
    with tempfile.TemporaryDirectory(prefix="ligermodels-") as scratch:
        commands = install(wheel, Path(scratch) / "venv")
        away = Path(scratch) / "away"
        away.mkdir()
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}

        def run(*argv: str) -> str:
            done = subprocess.run(argv, cwd=away, env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
            return done.stdout

        where = "import ligermodels; print(ligermodels.__file__)"
        assert Path(run(f"{commands}/python", "-c", where)).is_relative_to(Path(scratch) / "venv")
        program = f"{commands}/ligermodels"
        assert run(program, "--version").strip() == f"ligermodels {ligermodels.__version__}"
        shown = run(program, "demo", "--seconds", "1")
        assert shown.count("\nok ") == 3 and "FAILED" not in shown, shown


def main(folder: Path) -> None:
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    check_source(sdist)
    check_wheel(wheel)
    check_demo(wheel)
    for built in (sdist, wheel):
        print(f"ok  {built}  {built.stat().st_size / 1000:,.0f} kB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
