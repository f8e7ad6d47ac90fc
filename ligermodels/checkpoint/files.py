"""The files of a checkpoint folder, without torch: JSON, names of weight files, links, errors.

A link that leaves the folder is not followed, except to the blobs of the Hub's cache.
"""

import contextlib
import errno
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PureWindowsPath
from typing import Any

from safetensors import SafetensorError

from ligermodels.errors import CheckpointError, HubError, LigermodelsError

VOCABULARIES = ("tokenizer.json", "tekken.json", "tokenizer.model", "tokenizer.model.v*")
"""The files that can hold a tokenizer's vocabulary: the first of them that is there counts."""
SPECIAL_TOKENS = ("special_tokens_map.json", "added_tokens.json")
TOKENIZER = (*VOCABULARIES, "tokenizer_config.json", *SPECIAL_TOKENS, "vocab.json", "vocab.txt", "merges.txt")
MORE_TEMPLATES = "additional_chat_templates"
"""The folder of the templates that are not named "default"."""
TEMPLATES = ("chat_template.jinja", "chat_template.json", f"{MORE_TEMPLATES}/*.jinja")
PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
COMPANIONS = (*TOKENIZER, *TEMPLATES, *PROCESSORS)
"""The files of a model other than its configs and weights."""

SAFETENSORS, PICKLES = "model.safetensors", "pytorch_model.bin"
GGUF = "model.gguf"
"""The name of the GGUF file in a folder of `gguf.folder.folder_of`, where it is a link."""
MMPROJ = "mmproj.gguf"
"""That of its vision tower there."""
ADAPTER = "adapter_config.json"
MEDUSA = "medusa_lm_head.safetensors"
METADATA = ".metadata"
"""The metadata of a distributed checkpoint. dcp.py would import torch.distributed, which takes half a second."""


def absolute(path: str | Path) -> Path:
    """`path` with links followed and ~ resolved."""
    return Path(os.path.realpath(os.path.expanduser(path)))


def check_file(path: Path, home: Path | None = None) -> None:
    """Raises CheckpointError for a file that is missing, not a regular file, or a link out of the folder `home`.

    home: by default the folder of the file. The links of the Hub's cache are allowed.
    """
    if not os.path.exists(path):
        raise CheckpointError(f"{path} is not there. Did a download or copy not finish? Fetch the checkpoint again.")
    if not os.path.isfile(path):
        raise CheckpointError(f"{path} is not a regular file. Remove what is there and fetch the checkpoint again.")
    real, root = path.resolve(), (home or path.parent).resolve()
    blobs = [parent.parent / "blobs" for parent in root.parents if parent.name == "snapshots"]
    if not any(real.is_relative_to(place) for place in (root, *blobs)):
        raise CheckpointError(
            f"{path} is a link that leaves its folder, to {real}.\n"
            "  Next: if you trust it, replace the link by the file."
        )


def companion_files(folder: Path, target: Path | None = None) -> dict[str, Path]:
    """{name: path} of the tokenizer, template and processor files in `folder`. Raises the errors of `check_file`.

    target: the folder to save them to. Files that exist there are dropped. If a tokenizer exists there, all files of
    the tokenizer are: the user has saved one, perhaps with added tokens.
    """

    def matches(place: Path, patterns: Iterable[str]) -> dict[str, Path]:
        paths = [path for pattern in patterns for path in sorted(place.glob(pattern)) if path.is_file()]
        return {path.relative_to(place).as_posix(): path for path in paths}

    present = matches(target, COMPANIONS) if target is not None else {}
    has_tokenizer = any(name in present for name in TOKENIZER)
    companions = matches(folder, PROCESSORS if has_tokenizer else COMPANIONS)
    for path in companions.values():
        check_file(path, folder)
    return {name: path for name, path in companions.items() if name not in present}


def config_files(folder: Path, *more: str) -> dict[str, Path]:
    """{name: path} of config.json, generation_config.json and `more`, without missing ones."""
    names = ("config.json", "generation_config.json", *more)
    return {name: folder / name for name in names if (folder / name).is_file()}


def takes_images(folder: Path) -> bool:
    """Whether the model of a folder takes images, by its config.json."""
    config = folder / "config.json"
    return config.is_file() and "vision_config" in read_json(config)


def read_json(path: Path, *, lenient: bool = False) -> dict[str, Any]:
    """The object in a JSON file; `lenient`: read by `lenient_json`. Raises CheckpointError."""
    if not os.path.lexists(path):
        raise CheckpointError(
            f"{path} is not there: is this the folder of a checkpoint? Meta's and Mistral's go through `ligermodels "
            "convert`.\n"
            "  Weights alone, as trainers leave them, need the model's configuration: config= (--config DIR)."
        )
    check_file(path)
    with read_errors(path):
        content = path.read_bytes()
    try:
        value = lenient_json(content.decode()) if lenient else json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {file_kind(content) or error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, expected an object")
    return value


def lenient_json(text: str) -> Any:
    """JSON with extra or missing commas, as published with Llama 3.2 (Lightning-AI/litgpt#1752)."""
    text = re.sub(r",(\s*[}\]])", r"\1", text)
    while True:
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            if error.msg != "Expecting ',' delimiter" or text[error.pos : error.pos + 1] != '"':
                raise
            text = f"{text[: error.pos]},{text[error.pos :]}"


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """The bytes of a JSON file as on the Hub: indented, UTF-8, a newline at the end."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def file_kind(start: bytes) -> str | None:
    """The kind of a file that cannot be parsed, from its first bytes."""
    if start.startswith(b"version https://git-lfs"):
        return "it is a git-lfs pointer; run `git lfs pull` in that folder."
    if re.match(rb"\s*<(!doctype|html|head|\?xml)", start, re.IGNORECASE):
        return "it is an HTML page, saved instead of a download; fetch the file again."
    if start.startswith((b"PK\x03\x04", b"\x80\x02\x8a")):
        return "it is a pickle under another name; torch.save wrote it."
    return "it is a GGUF file." if start.startswith(b"GGUF") else None


def weight_files(folder: Path, single: str) -> tuple[list[str], dict[str, str] | None]:
    """(the weight files that a folder should have, {tensor: file} if there is an index).

    single: the name of the file if it is the only one. Raises CheckpointError for an index that is damaged or names
    files in other folders.
    """
    index = folder / f"{single}.index.json"
    if not os.path.lexists(index):
        return [single], None
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map from tensors to files; fetch it again")
    suffix = Path(single).suffix
    for file in weight_map.values():
        if not isinstance(file, str) or not file.endswith(suffix) or PureWindowsPath(file).name != file:
            raise CheckpointError(f"{index} names {file!r}; expected a {suffix} file in its folder")
    return sorted(set(weight_map.values())), weight_map


def weights_in(folder: str | Path, *, allow_pickle: bool = False) -> str:
    """The kind of the weights in `folder`: SAFETENSORS, else PICKLES if they are allowed, else GGUF.

    Raises CheckpointError if there are none, HubError for a folder that cannot be read.
    """
    with read_errors(folder):
        present = {name.removesuffix(".index.json") for name in os.listdir(folder)}
    if SAFETENSORS in present:
        return SAFETENSORS
    if PICKLES in present:
        if not allow_pickle:
            raise pickles_refused(folder, PICKLES)
        return PICKLES
    if is_gguf_folder(Path(folder)):
        return GGUF
    raise CheckpointError(
        f"{folder} holds neither model.safetensors nor its index.\n"
        "  Likely: an adapter, Medusa heads, a GGUF file, Meta's or Mistral's own layout, or an unfinished download."
    )


def pickles_refused(folder: str | Path, file: str) -> CheckpointError:
    """The error for weights that are pickles alone, such as `file`, where pickles are not allowed."""
    return CheckpointError(
        f"{folder} holds its weights only as pickles ({file}), which can carry code.\n"
        "  Next: pass allow_pickle=True (--allow-pickle): tensors are read from them, and nothing else."
    )


def is_gguf_name(name: str) -> bool:
    """Whether a file with this name is a GGUF file, whatever the case of its ending."""
    return name.lower().endswith(".gguf")


def is_mmproj(name: str) -> bool:
    """Whether a GGUF file with this name holds a vision tower, as llama.cpp and the Hub name such files."""
    return is_gguf_name(name) and "mmproj" in name.lower()


def find_gguf(path: Path) -> tuple[Path, Path | None] | None:
    """(the GGUF file, that of its vision tower): `path` alone, or in a folder without other weights; else None.

    Raises CheckpointError for a folder with several of either.
    """
    with read_errors(path):
        if path.is_file():
            return (path, None) if is_gguf_name(path.name) else None
        if not path.is_dir():
            return None
        names = sorted(os.listdir(path))
    towers = [name for name in names if is_mmproj(name)]
    files = [name for name in names if is_gguf_name(name) and name not in towers]
    others = re.compile(r".*\.(safetensors|bin|pth)(\.index\.json)?|\.metadata")
    if not files or any(others.fullmatch(name) for name in names):
        return None
    if len(several := max(files, towers, key=len)) > 1:
        raise CheckpointError(
            f"{path} holds {len(several)} GGUF files: {', '.join(several[:4])}{', ...' * (len(several) > 4)}.\n"
            f"  Next: give one of them, such as {path / files[0]}"
        )
    return path / files[0], path / towers[0] if towers else None


def is_gguf_folder(folder: Path) -> bool:
    """Whether `gguf.folder.folder_of` made `folder`."""
    return (folder / GGUF).is_symlink()


@contextlib.contextmanager
def unreplaced(folder: Path) -> Iterator[None]:
    """Raises CheckpointError if a save replaces `folder` while the block opens several of its files."""
    with read_errors(folder):
        before = os.stat(folder)
    yield
    with read_errors(folder):
        after = os.stat(folder)
    if not os.path.samestat(before, after):
        raise CheckpointError(f"{folder} was replaced while it was opened, by another save; load it again")


@contextlib.contextmanager
def read_errors(where: str | Path) -> Iterator[None]:
    """Turns errors of the system and of safetensors in the block, which reads `where` alone, into HubErrors."""
    try:
        yield
    except LigermodelsError:
        raise
    except (OSError, ValueError, SafetensorError) as error:
        raise HubError(f"{where} cannot be read: {getattr(error, 'strerror', None) or error}") from error


@contextlib.contextmanager
def write_errors(target: Path) -> Iterator[None]:
    """Turns errors of the system in the block, which writes `target`, into HubErrors with `errno`."""
    try:
        yield
    except HubError:
        raise
    except OSError as error:
        steps = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space, or save elsewhere")
        steps |= dict.fromkeys((errno.EACCES, errno.EROFS), "you may not write there; save elsewhere")
        step = steps.get(error.errno or 0, "check the disk, or save elsewhere")
        if os.path.islink(target) and not os.path.exists(target):
            step = f"it is a link to nowhere ({os.readlink(target)}); remove it, or save elsewhere"
        failure = HubError(f"{target} cannot be written: {error}.\n  Next: {step}.")
        failure.errno = error.errno
        raise failure from error


def readable_size(count: float) -> str:
    """A number of bytes as text, such as 2.89 MB."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.1f} GB"
