"""Where a checkpoint comes from and goes to: a folder on disk, or a repository of the Hugging Face Hub."""

import contextlib
import errno
import os
import re
import warnings
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from ligermodels.checkpoint.reading import COMPANIONS, PICKLES, SAFETENSORS, weight_files
from ligermodels.errors import HubError, LigermodelsError


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
    """The local folder of a checkpoint: the given one as it is, or a repository's snapshot.

    revision: branch, tag or commit. weights: False leaves out the weight files.
    The Hub is asked where a branch or tag is now, unless `local_files_only` or HF_HUB_OFFLINE=1 forbid it.
    A complete copy in the cache needs neither network nor token: it is taken where the revision is a commit
    and, with a warning, where the Hub cannot be reached or refuses.
    HF_TOKEN, HF_HOME, HF_HUB_CACHE and HF_ENDPOINT mean what they mean to huggingface_hub.
    Raises HubError.
    """
    inside = PurePosixPath(subfolder or "")
    if inside.is_absolute() or ".." in inside.parts:
        raise HubError(f"subfolder={subfolder!r} must be a path inside the repository or folder")
    repo, local = str(repo_or_folder), Path(os.path.expanduser(repo_or_folder))
    is_id = isinstance(repo_or_folder, str) and re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", repo, re.ASCII)
    if os.path.isdir(local) or not is_id:
        if not os.path.isdir(local / inside):
            raise HubError(
                f"{str(local / inside)[:500]} is {'a file' if os.path.exists(local / inside) else 'not there'}. Give "
                "the folder of a checkpoint, or a repository of the Hub as owner/name."
            )
        return local / inside

    from huggingface_hub import constants, errors

    cached = _cached(repo, revision, Path(cache_dir or constants.HF_HUB_CACHE).expanduser())
    lacking = _lacking(cached / inside, weights, allow_pickle) if cached else ["any snapshot"]
    offline = local_files_only or constants.HF_HUB_OFFLINE
    if cached and not lacking and (offline or (weights and revision == cached.name)):
        return cached / inside
    if offline:
        raise HubError(
            f"{_at(repo, revision)}: the cache lacks {_few(lacking)}, and the network is not to be used "
            f"({'local_files_only=True' if local_files_only else 'HF_HUB_OFFLINE=1'}).\n"
            f"  Next: allow it once, or `hf download {repo}` where there is network. The cache is "
            f"{cache_dir or constants.HF_HUB_CACHE}."
        )
    try:
        snapshot = _download(repo, revision, inside, token, cache_dir, weights, allow_pickle)
    except Exception as error:
        if not refused(error):
            raise
        explained = _explained(error, repo, revision, token)
        if not cached or lacking or isinstance(error, errors.RevisionNotFoundError):
            raise explained from error
        warnings.warn(f"{explained}\n  Using the copy in the cache, commit {cached.name}.", stacklevel=3)
        snapshot = cached
    if lacking := _lacking(snapshot / inside, weights, allow_pickle):
        raise HubError(
            f"{_at(repo, revision)} has no {_few(lacking)}{f' in {subfolder}' if subfolder else ''}.\n"
            "  Likely: it holds an adapter, a GGUF file or pickled weights (for those, allow_pickle=True), "
            "or the checkpoint is in another subfolder."
        )
    return snapshot / inside


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)


def _at(repo: str, revision: str | None) -> str:
    return f"{repo} at revision {revision}" if revision else repo


def _cached(repo: str, revision: str | None, cache: Path) -> Path | None:
    """The snapshot that the cache holds of a revision, complete or not."""
    root = cache / f"models--{repo.replace('/', '--')}"
    commit = revision or "main"
    with contextlib.suppress(OSError, ValueError):
        commit = (root / "refs" / commit).read_text().strip()
    snapshot = root / "snapshots" / commit
    return snapshot if re.fullmatch("[0-9a-f]{40}", commit) and snapshot.is_dir() else None


def _lacking(folder: Path, weights: bool, allow_pickle: bool) -> list[str]:
    """What a folder needs to be loaded and does not hold."""
    if not weights:
        return [] if folder.is_dir() and any(folder.iterdir()) else ["any file"]
    lacking = [] if (folder / "config.json").is_file() else ["config.json"]
    for single in (SAFETENSORS, PICKLES)[: 1 + allow_pickle]:
        files, weight_map = weight_files(folder, single)
        absent = [file for file in files if not (folder / file).is_file()]
        if weight_map or not absent:
            return lacking + absent
    return [*lacking, SAFETENSORS]


def _download(
    repo: str,
    revision: str | None,
    inside: PurePosixPath,
    token: str | bool | None,
    cache_dir: str | Path | None,
    weights: bool,
    allow_pickle: bool,
) -> Path:
    """The snapshot: configs and index first, then the shards that the index names, from the same commit."""
    from huggingface_hub import snapshot_download

    def fetch(revision: str | None, names: Iterable[str]) -> Path:
        patterns = [str(inside / name) for name in names]
        return Path(
            snapshot_download(repo, revision=revision, token=token, cache_dir=cache_dir, allow_patterns=patterns)
        )

    kinds = (SAFETENSORS, PICKLES)[: 1 + allow_pickle] if weights else ()
    small = ["config.json", "generation_config.json", *COMPANIONS]
    snapshot = fetch(revision, [*small, *(f"{kind}.index.json" for kind in kinds)])
    for kind in kinds:
        files, _ = weight_files(snapshot / inside, kind)
        fetch(snapshot.name, files)
        if all((snapshot / inside / file).is_file() for file in files):
            break
    return snapshot


def refused(error: Exception) -> bool:
    """Whether network, disk or Hub said no, rather than that the program went wrong."""
    packages = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    theirs = packages & {"huggingface_hub", "hf_xet", "httpx", "httpx2", "requests"}
    system = isinstance(error, OSError) or type(error) is RuntimeError  # the latter is hf_xet's
    return bool(theirs) or (system and not isinstance(error, LigermodelsError))


def _explained(error: Exception, repo: str, revision: str | None, token: str | bool | None) -> HubError:
    """What a failure of huggingface_hub means and what to do. Never the token, but where it came from."""
    from huggingface_hub import constants, errors

    endpoint = re.sub(r"//[^/]*@", "//", constants.ENDPOINT)  # HF_ENDPOINT may hold a name and a password
    where, url, source = _at(repo, revision), f"{endpoint}/{repo}", _token_source(token)
    if isinstance(error, errors.GatedRepoError):
        problem = f"is gated, and access was refused. Token: {source}."
        step = f"accept its terms at {url} with your account, then `hf auth login` or set HF_TOKEN."
    elif isinstance(error, errors.RepositoryNotFoundError):
        problem = f"does not exist, or is private and not open to you. Token: {source}."
        step = f"check the name at {url}; for a private one `hf auth login` or set HF_TOKEN."
    elif isinstance(error, errors.RevisionNotFoundError):
        problem = "does not exist, though the repository does."
        step = f"pick a branch, tag or commit from {url}/commits/main."
    elif isinstance(error, errors.HFValidationError):
        problem = f"is not a valid repository id: {error}"
        step = "write it as owner/name, or give the path of an existing folder."
    elif isinstance(error, errors.HfHubHTTPError) and _status(error) in (401, 403):
        problem = f"refused access ({_status(error)}). Token: {source}."
        step = f"renew the token with `hf auth login`, or give it the rights that it needs for {url}."
    elif isinstance(error, errors.OfflineModeIsEnabled):
        problem = "needs the network, which HF_HUB_OFFLINE=1 forbids."
        step = "unset HF_HUB_OFFLINE."
    elif isinstance(error, OSError) and error.errno in (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EACCES,
        errno.EROFS,
    ):
        problem = f"could not be stored: {error.strerror}: {error.filename}."
        step = "free some space or rights, or set HF_HOME to another disk."
    else:
        problem = f"could not be fetched from {endpoint} ({type(error).__name__})."
        step = f"check network, proxy and HF_ENDPOINT, then try again; `hf download {repo}` shows the details."
    explained = HubError(f"{where} {problem}\n  Next: {step}")
    explained.errno = error.errno if isinstance(error, OSError) else None
    return explained


def _status(error: Any) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _token_source(token: str | bool | None) -> str:
    from huggingface_hub import constants, get_token

    if isinstance(token, str):
        return "the argument `token`"
    if token is False or (token is None and constants.HF_HUB_DISABLE_IMPLICIT_TOKEN):
        return "none, as asked"
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if os.environ.get(variable):
            return f"the environment variable {variable}"
    return "the login saved by `hf auth login`" if get_token() else "none"


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
    """Uploads `folder` to the repository `repo` ("owner/name"), made if need be. Returns the commit's URL.

    revision: a branch, made if need be. create_pr: opens a pull request instead, whose URL is returned.
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
        raise _explained(error, repo, revision, token) from error
    return commit.pr_url or commit.commit_url
