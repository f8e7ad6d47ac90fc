"""Finds a checkpoint in a folder or in a repository of the Hugging Face Hub, and uploads one."""

import os
import re
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from ligermodels.checkpoint.files import COMPANIONS, PICKLES, SAFETENSORS, find_gguf, is_gguf_name, weight_files
from ligermodels.errors import CheckpointError, HubError, InputError, LigermodelsError, did_you_mean


def resolve(
    repo_or_folder: str | Path,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    weights: bool = True,
    allow_pickle: bool = False,
) -> Path:
    """The local folder of a checkpoint: the given folder, a repository's snapshot, or `folder_of` a GGUF file.

    A GGUF file is given by its path, or by that of a folder with one and no other weights. If that folder has the file
    of its vision tower (mmproj), too, they are read as one model. The path of a model.safetensors stands for its
    folder.

    revision: branch, tag or commit; a local folder has "main" alone. weights: False fetches no weight files.
    The Hub is asked for the commit of a branch or tag, unless `local_files_only` or HF_HUB_OFFLINE=1 forbid it. A
    complete copy in the cache needs neither network nor token: it is used if the revision is a commit, and if the Hub
    cannot be reached or refuses. HF_TOKEN, HF_HOME, HF_HUB_CACHE and HF_ENDPOINT work as in huggingface_hub.
    Raises HubError, InputError for an empty name or the revision of a folder, and CheckpointError for another file.
    """
    if not str(repo_or_folder):
        raise InputError("the name of a checkpoint is empty: give a folder, or a repository of the Hub as owner/name")
    inside = PurePosixPath(subfolder or "")
    if inside.is_absolute() or ".." in inside.parts:
        raise HubError(f"subfolder={subfolder!r} must be a path inside the repository or folder")
    repo, local = str(repo_or_folder), Path(os.path.expanduser(repo_or_folder))
    is_id = isinstance(repo_or_folder, str) and re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", repo, re.ASCII)
    if os.path.exists(local) or not is_id or is_gguf_name(repo):
        folder = (local.parent if local.name == SAFETENSORS and local.is_file() else local) / inside
        if revision not in (None, "main"):
            raise InputError(f"revision={revision!r} is for repositories of the Hub, and {repo} is local: leave it out")
        if files := find_gguf(folder):
            from ligermodels.checkpoint.gguf.folder import folder_of

            return folder_of(*files)
        if os.path.isdir(folder):
            return folder
        if os.path.exists(folder):
            raise CheckpointError(
                f"{folder} is a file. Give the folder of a checkpoint, such as {folder.parent}, or a GGUF file.\n"
                f"  A folder has the model's config.json, and its weights as {SAFETENSORS} or as shards with an index."
            )
        raise HubError(
            f"{folder.absolute()} is not there. Give the folder of a checkpoint, a GGUF file, or a repository of the "
            "Hub as owner/name."
        )
    try:
        return _snapshot(repo, inside, revision, weights, allow_pickle, local_files_only, token, cache_dir)
    except HubError as error:
        is_open = os.path.isdir(local.parent) and os.access(local.parent, os.R_OK)
        near = did_you_mean(local.name, os.listdir(local.parent) if is_open else ())
        error.add_note(f"  If a folder was meant: there is none at {local.absolute()}{near or '.'}")
        raise


def _snapshot(
    repo: str,
    inside: PurePosixPath,
    revision: str | None,
    weights: bool,
    allow_pickle: bool,
    local_files_only: bool,
    token: str | bool | None,
    cache_dir: str | Path | None,
) -> Path:
    """The folder `inside` a repository's snapshot; see `resolve`."""
    from huggingface_hub import constants, errors, snapshot_download

    kinds = (SAFETENSORS, PICKLES)[: 1 + allow_pickle] if weights else ()

    def fetch(revision: str | None, names: Iterable[str], **options: Any) -> Path:
        patterns = [str(inside / name) for name in names]
        return Path(snapshot_download(repo, revision=revision, cache_dir=cache_dir, allow_patterns=patterns, **options))

    try:  # without patterns, an incomplete snapshot is found too
        cached: Path | None = fetch(revision, [], local_files_only=True)
    except (errors.LocalEntryNotFoundError, errors.HFValidationError):
        cached = None
    where = f"{repo} at revision {revision}" if revision else repo
    missing = _missing(cached / inside, kinds) if cached else ["any snapshot"]
    offline = local_files_only or constants.HF_HUB_OFFLINE
    if cached and not missing and (offline or (weights and revision == cached.name)):
        return cached / inside
    if offline:
        raise HubError(
            f"{where}: the cache lacks {', '.join(missing[:3])}, and the network may not be used "
            f"({'local_files_only=True' if local_files_only else 'HF_HUB_OFFLINE=1'}).\n"
            f"  Next: allow it once, or `hf download {repo}` where there is network. The cache is "
            f"{cache_dir or constants.HF_HUB_CACHE}."
        )
    try:
        small = ["config.json", "generation_config.json", *COMPANIONS, *(f"{kind}.index.json" for kind in kinds)]
        snapshot = fetch(revision, small, token=token)
        for kind in kinds:
            files, _ = weight_files(snapshot / inside, kind)
            fetch(snapshot.name, files, token=token)  # the shards that the index names, from the same commit
            if all((snapshot / inside / file).is_file() for file in files):
                break
    except Exception as error:
        if not refused(error):
            raise
        if not cached or missing or type(error).__name__ == "RevisionNotFoundError":
            raise _hub_error(where, error) from error
        warnings.warn(f"{_hub_error(where, error)}\n  Using commit {cached.name}, from the cache.", stacklevel=3)
        snapshot = cached
    if missing := _missing(snapshot / inside, kinds):
        raise HubError(
            f"{where} has no {', '.join(missing[:3])}{f' in {inside}' if inside.parts else ''}.\n"
            "  Likely: it holds an adapter, a GGUF file or pickled weights (for those, allow_pickle=True), "
            "or the checkpoint is in another subfolder."
        )
    return snapshot / inside


def _missing(folder: Path, kinds: Sequence[str]) -> list[str]:
    """The files that a folder lacks to be loaded. kinds: of weight files; none are needed if it is empty."""
    if not kinds:
        return [] if folder.is_dir() and any(folder.iterdir()) else ["any file"]
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    for kind in kinds:
        files, weight_map = weight_files(folder, kind)
        absent = [file for file in files if not (folder / file).is_file()]
        if weight_map or not absent:
            return missing + absent
    return [*missing, SAFETENSORS]


def refused(error: Exception) -> bool:
    """Whether an error of huggingface_hub comes from the Hub, the network or the disk, and not from a bug."""
    from huggingface_hub import errors

    theirs = (OSError, RuntimeError, errors.HTTPError, errors.HFValidationError)  # RuntimeError is hf_xet's
    return isinstance(error, theirs) and not isinstance(error, LigermodelsError)


_REFUSALS = {
    "RepositoryNotFoundError": (
        "the Hub has no such repository, or it is private",
        "compare the name; a private repository needs `hf auth login` or HF_TOKEN.",
    ),
    "GatedRepoError": (
        "the repository is gated",
        "accept its terms on its page, and `hf auth login` or set HF_TOKEN.",
    ),
    "RevisionNotFoundError": (
        "the repository has no such branch, tag or commit",
        "compare it with those on its page.",
    ),
}
"""The errors by which the Hub refuses: what each says, and what to do."""


def _hub_error(where: str, error: Exception) -> HubError:
    """A HubError that says what an error of huggingface_hub means, or has its message, without passwords in URLs."""
    from huggingface_hub import errors

    name = type(error).__name__
    what = f"{name}: {error}"
    step = "check the name, the network and the disk; a private repository needs `hf auth login` or HF_TOKEN."
    if name in _REFUSALS:
        meaning, step = _REFUSALS[name]
        what = f"{name}: {meaning}"
    elif isinstance(error, errors.LocalEntryNotFoundError):  # whatever keeps the Hub from answering
        cause = error.__cause__ or error
        reason = str(cause).partition("\n")[0]
        what = f"the Hub cannot be reached, and the cache has no complete copy ({type(cause).__name__}: {reason})"
        step = (
            "check the network, or give a local folder. `hf download NAME` fills a cache where there is network; with "
            "that cache here, HF_HUB_OFFLINE=1 reads it without asking."
        )
    what = re.sub(r"//[^/@\s]*@", "//", what)  # HF_ENDPOINT may have a name and a password
    failure = HubError(f"{where}: {what}\n  Next: {step}")
    failure.errno = error.errno if isinstance(error, OSError) else None
    return failure


def push(
    folder: str | Path,
    repo: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str = "Upload model with ligermodels",
    token: str | bool | None = None,
) -> str:
    """Uploads `folder` to the repository `repo` ("owner/name"), created if it does not exist. Returns the commit's URL.

    revision: a branch, created if it does not exist. create_pr: open a pull request instead, and return its URL.
    Raises HubError.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    try:
        repo = api.create_repo(repo, private=private, exist_ok=True).repo_id
        if revision is not None and not create_pr:
            api.create_branch(repo, branch=revision, exist_ok=True)
        commit = api.upload_folder(
            folder_path=folder,
            repo_id=repo,
            revision=revision,
            create_pr=create_pr,
            commit_message=commit_message,
        )
    except Exception as error:
        if not refused(error):
            raise
        raise _hub_error(repo, error) from error
    return commit.pr_url or commit.commit_url
