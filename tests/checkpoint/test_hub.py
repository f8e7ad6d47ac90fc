"""Where a checkpoint is found: folders, and huggingface_hub's cache and client against a server of our own."""

import errno
import hashlib
import http.server
import json
import logging
import shutil
import threading
import traceback
import urllib.parse
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

import ligermodels
from ligermodels.checkpoint import hub
from ligermodels.checkpoint.files import read_json
from ligermodels.checkpoint.reading import open_checkpoint
from ligermodels.cli import main
from ligermodels.errors import CheckpointError, HubError, InputError
from tests.checkpoint.fixtures import make_model

REPO = "owner/name"
OLD, NEW = "1" * 40, "2" * 40
SECRET = "hf_NeverToBeShown"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = "model.safetensors.index.json"
NEEDED = sorted(["additional_chat_templates/tool.jinja", "chat_template.jinja", "config.json", *SHARDS, INDEX,
                 "tokenizer.json"])  # fmt: skip


def a_checkpoint(folder: Path, prefix: str = "") -> Path:
    """Two shards with their index, companions, and what a repository also holds and nobody needs."""
    (folder / prefix).mkdir(parents=True, exist_ok=True)
    for k, file in enumerate(SHARDS):
        save_file({f"x{k}": torch.full((2,), float(k))}, folder / prefix / file)
    index = {"weight_map": {f"x{k}": file for k, file in enumerate(SHARDS)}}
    (folder / prefix / INDEX).write_text(json.dumps(index))
    for file in ("config.json", "tokenizer.json", "chat_template.jinja", "consolidated.safetensors", "x.gguf",
                 "pytorch_model.bin", "original/consolidated.00.pth", "additional_chat_templates/tool.jinja",
                 "modeling_custom.py", "onnx/model.onnx", "model-00001-of-00003.safetensors", "README.md"):  # fmt: skip
        (folder / prefix / file).parent.mkdir(exist_ok=True)
        (folder / prefix / file).write_text("{}")
    return folder


def files_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


class Server(http.server.BaseHTTPRequestHandler):
    """The few addresses of the Hub that a download asks for. refuse: {part of a path: (status, error code)}."""

    remote: Path
    commit: str
    refuse: dict[str, tuple[int, str]]
    asked: list[str]

    def do_GET(self):
        path, api = urllib.parse.urlsplit(self.path).path, f"/api/models/{REPO}"
        self.asked.append(f"{self.command} {path}")
        files = {file: self.remote / file for file in files_in(self.remote)}
        for part, (status, code) in self.refuse.items():
            if part in path:
                return self.answer(status, b"", {"X-Error-Code": code, "X-Error-Message": "no"})
        if path in (api, f"{api}/revision/main", f"{api}/revision/{self.commit}"):
            siblings = [{"rfilename": file} for file in files]
            return self.json({"_id": "1", "id": REPO, "modelId": REPO, "sha": self.commit, "siblings": siblings})
        if path.startswith(f"{api}/tree/{self.commit}"):
            sizes = {file: place.stat().st_size for file, place in files.items()}
            return self.json([{"type": "file", "path": f, "size": n, "oid": f"{n:040x}"} for f, n in sizes.items()])
        if path.startswith(f"/{REPO}/resolve/{self.commit}/"):
            content = files[urllib.parse.unquote(path).split(f"{self.commit}/")[1]].read_bytes()
            etag = hashlib.sha1(path.encode() + content).hexdigest()
            return self.answer(200, content, {"X-Repo-Commit": self.commit, "ETag": f'"{etag}"'})
        code = "RevisionNotFound" if path.startswith(f"{api}/") else "RepoNotFound"
        return self.answer(404, b"", {"X-Error-Code": code})

    do_HEAD = do_GET

    def json(self, value):
        self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def answer(self, status, content, headers):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Serves tmp_path/remote; the cache is tmp_path/cache."""
    remote = a_checkpoint(tmp_path / "remote")
    handler = type("Handler", (Server,), {"remote": remote, "commit": OLD, "refuse": {}, "asked": []})
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        address = f"http://127.0.0.1:{running.server_address[1]}"
        settings = {
            "ENDPOINT": address,
            "HUGGINGFACE_CO_URL_TEMPLATE": address + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
        }
        for name, value in settings.items():
            monkeypatch.setattr(constants, name, value)
        handler.snapshot = tmp_path / "cache" / "models--owner--name" / "snapshots" / OLD
        yield handler
        running.shutdown()
        thread.join()


@pytest.fixture
def cached(server):
    hub.resolve(REPO)
    server.asked.clear()
    return server


def fetched(server) -> list[str]:
    return sorted(asked.split(f"{OLD}/")[1] for asked in server.asked if asked.startswith(f"GET /{REPO}/resolve"))


# Folders


def test_a_folder_is_used_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    folder = a_checkpoint(tmp_path / "owner" / "name", "sub/dir")
    assert hub.resolve(folder) == folder
    assert hub.resolve(str(folder), subfolder="sub/dir") == folder / "sub" / "dir"
    monkeypatch.chdir(tmp_path)
    assert hub.resolve(REPO) == Path(REPO), "an existing folder goes before a repository of that name"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.resolve("~/owner/name") == folder


@pytest.mark.parametrize("given, subfolder, message", [
    *((given, None, r"(?s)is not there\. Give the folder.*owner/name")
      for given in ("./x", "/no/such/folder", "a/b/c", "C:\\x", Path("x/y"))),
    (".", "sub", "sub is not there"),
    *((".", subfolder, "must be a path inside") for subfolder in ("../x", "/etc", "a/../../b")),
])  # fmt: skip
def test_what_is_neither_folder_nor_repository(given, subfolder, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HubError, match=message):
        hub.resolve(given, subfolder=subfolder)


def test_the_file_of_the_weights_stands_for_its_folder(tmp_path):
    for name in ("model.safetensors", "model-00001-of-00002.safetensors"):
        (tmp_path / name).write_bytes(b"")
    assert hub.resolve(tmp_path / "model.safetensors") == tmp_path
    with pytest.raises(CheckpointError, match=r"(?s)is a file\. Give the folder.*weights as model\.safetensors"):
        hub.resolve(tmp_path / "model-00001-of-00002.safetensors")


# Downloading


def test_only_what_is_needed_is_fetched_from_one_commit(server, monkeypatch):
    revisions, real = [], huggingface_hub.snapshot_download

    def download(*args, revision, **options):
        revisions.append(revision)
        return real(*args, revision=revision, **options)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    folder = hub.resolve(REPO, revision="main")
    assert revisions == ["main", "main", OLD], "the cache, the index, and the shards of the same commit"
    assert folder == server.snapshot and files_in(folder) == fetched(server) == NEEDED
    with open_checkpoint(folder) as reader:
        assert float(reader.read("x1")[0]) == 1.0


def test_a_single_file_in_a_subfolder(server):
    (server.remote / "sub" / "dir").mkdir(parents=True)
    (server.remote / "sub" / "dir" / "config.json").write_text("{}")
    save_file({"x": torch.ones(1)}, server.remote / "sub" / "dir" / "model.safetensors")
    assert hub.resolve(REPO, subfolder="sub/dir") == server.snapshot / "sub" / "dir"
    assert fetched(server) == ["sub/dir/config.json", "sub/dir/model.safetensors"]


def test_pickles_are_fetched_only_when_allowed_and_needed(server):
    assert "pytorch_model.bin" not in files_in(hub.resolve(REPO, allow_pickle=True))
    for file in (*SHARDS, INDEX):
        (server.remote / file).unlink()
    server.commit = NEW
    with pytest.raises(HubError, match=r"(?s)has no model\.safetensors.*allow_pickle=True"):
        hub.resolve(REPO)
    assert "pytorch_model.bin" in files_in(hub.resolve(REPO, allow_pickle=True))


def test_a_moved_branch_is_seen(cached):
    cached.commit = NEW
    (cached.remote / "config.json").write_text('{"new": 1}')
    folder = hub.resolve(REPO)
    assert folder.name == NEW and read_json(folder / "config.json") == {"new": 1}


def test_an_index_that_points_elsewhere_fetches_nothing(server):
    (server.remote / INDEX).write_text('{"weight_map": {"x": "../../secret.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"names '\.\./\.\./secret"):
        hub.resolve(REPO)
    assert not any("secret" in asked for asked in server.asked)


# The cache


@pytest.fixture(params=["local_files_only", "HF_HUB_OFFLINE"])
def offline(request, monkeypatch):
    """(the way in which the network is forbidden, its arguments of `resolve`)."""
    if request.param == "local_files_only":
        return request.param, {"local_files_only": True}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return request.param, {}


def test_a_complete_copy_needs_no_network(cached, tmp_path, offline):
    for revision in (None, "main", OLD):
        assert hub.resolve(REPO, revision=revision, **offline[1]) == cached.snapshot
    (cached.snapshot / "tokenizer.json").unlink()  # the model can be loaded without
    assert hub.resolve(REPO, **offline[1]) == hub.resolve(REPO, weights=False, **offline[1]) == cached.snapshot
    elsewhere = (tmp_path / "cache").rename(tmp_path / "elsewhere")
    assert hub.resolve(REPO, cache_dir=elsewhere, **offline[1]).is_relative_to(elsewhere)
    assert cached.asked == []


@pytest.mark.parametrize("lost", [SHARDS[1], "config.json", None])
def test_an_incomplete_copy_says_what_is_missing(cached, tmp_path, offline, lost):
    if lost is None:
        shutil.rmtree(tmp_path / "cache")
    else:
        (cached.snapshot / lost).unlink()
    message = f"(?s)the cache lacks {lost or 'any snapshot'}.*network.*{offline[0]}.*hf download {REPO}"
    with pytest.raises(HubError, match=message):
        hub.resolve(REPO, **offline[1])
    assert cached.asked == []


# Refusals


def test_a_local_folder_has_no_revisions(tmp_path):
    assert hub.resolve(tmp_path, revision="main") == tmp_path
    with pytest.raises(InputError, match=f"revision='v1.0' .*{tmp_path} is local: leave it out"):
        hub.resolve(tmp_path, revision="v1.0")


@pytest.mark.parametrize(
    "options, refuse, message",
    [
        (dict(repo_or_folder="a/b"), {}, "RepositoryNotFoundError: .* no such repository, .*Next: compare the name"),
        (dict(revision="dev"), {}, "at revision dev: RevisionNotFoundError: .* no such branch, .*Next: compare it"),
        (dict(), {"/resolve/": (403, "GatedRepo")}, "GatedRepoError: .* gated.*Next: accept its terms"),
        (dict(), {"/api/": (401, "")}, "HfHubHTTPError: .*401 Unauthorized.*Next: .*HF_TOKEN"),
        (dict(), {"/api/": (503, "")}, "the Hub cannot be reached, .*HfHubHTTPError: .*503.*Next: check the network"),
    ],
)
def test_refusals_are_huberrors_that_never_show_the_token(server, caplog, options, refuse, message):
    server.refuse |= refuse
    with caplog.at_level(logging.DEBUG), pytest.raises(HubError, match=f"(?s){message}") as caught:
        hub.resolve(**{"repo_or_folder": REPO, **options}, token=SECRET)
    shown = "".join(traceback.format_exception(caught.value)) + caplog.text
    assert SECRET not in shown


@pytest.mark.parametrize("command, options", [
    ("chat", ""), ("generate", "--prompt x"), ("plan", "--gpus 1"), ("convert", "out"), ("inspect", ""),
    ("train sft", "--data rows.jsonl --output-dir out"),
])  # fmt: skip
def test_commands_without_network_say_what_to_do(server, monkeypatch, capsys, tmp_path, command, options):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"text": "a"}\n')
    assert main([*command.split(), REPO, *options.split()]) == 3
    failure, step, note = capsys.readouterr().err.rstrip().splitlines()[-3:]
    assert failure.startswith(f"error: {REPO}: the Hub cannot be reached") and "ConnectError" in failure
    assert "a local folder" in step and "HF_HUB_OFFLINE=1" in step and "If a folder was meant" in note


REFUSALS = [RuntimeError("of hf_xet"), OSError(errno.ENOSPC, f"No space left on https://me:{SECRET}@mirror/")]


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: type(error).__name__)
def test_a_complete_copy_stands_in_with_a_warning(cached, monkeypatch, error):
    real = huggingface_hub.snapshot_download

    def download(*args, local_files_only=False, **options):
        if not local_files_only:
            raise error
        return real(*args, local_files_only=True, **options)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.warns(UserWarning, match=f"(?s){type(error).__name__}.*Using commit {OLD}, from the cache"):
        assert hub.resolve(REPO) == cached.snapshot
    (cached.snapshot / SHARDS[1]).unlink()
    with pytest.raises(HubError, match=type(error).__name__) as caught:
        hub.resolve(REPO)
    assert caught.value.__cause__ is error and caught.value.errno == getattr(error, "errno", None)
    assert SECRET not in str(caught.value), "a password in HF_ENDPOINT"


# Uploading


class Api:
    """Stands for HfApi, and lists its calls."""

    calls: list[tuple] = []

    def __init__(self, token=None):
        self.calls.append(("token", token))

    def __getattr__(self, name):
        def call(*args, **options):
            self.calls.append((name, *args, options))
            pr = "https://huggingface.co/pr/1" if options.get("create_pr") else None
            return SimpleNamespace(repo_id=REPO, commit_url="https://huggingface.co/commit/1", pr_url=pr)

        return call


@pytest.fixture
def api(monkeypatch):
    monkeypatch.setattr(Api, "calls", [])
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    return Api.calls


def test_push(tmp_path, api):
    url = hub.push(tmp_path, REPO, private=True, revision="dev", commit_message="message", token=SECRET)
    assert url == "https://huggingface.co/commit/1"
    upload = {"folder_path": tmp_path, "repo_id": REPO, "revision": "dev", "create_pr": False}
    assert api == [
        ("token", SECRET),
        ("create_repo", REPO, {"private": True, "exist_ok": True}),
        ("create_branch", REPO, {"branch": "dev", "exist_ok": True}),
        ("upload_folder", {**upload, "commit_message": "message"}),
    ]
    assert hub.push(tmp_path, REPO, create_pr=True, revision="dev") == "https://huggingface.co/pr/1"
    assert [call[0] for call in api[4:]] == ["token", "create_repo", "upload_folder"]


def test_the_token_is_in_no_file(server, tmp_path, api):
    """Neither in what a model that was loaded with it writes, nor in the model, nor in what is uploaded."""
    shutil.rmtree(server.remote)
    make_model().save_pretrained(server.remote)
    loaded = ligermodels.load(REPO, token=SECRET, progress=False)
    loaded.save_pretrained(tmp_path / "out")
    for folder in (tmp_path / "out", tmp_path / "cache"):
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert files and all(SECRET.encode() not in path.read_bytes() for path in files)
    assert SECRET not in repr(vars(loaded)) + repr(loaded)
    loaded.push_to_hub(REPO, token=SECRET)
    assert api[0] == ("token", SECRET) and all(SECRET not in repr(call) for call in api[1:])


def test_a_folder_of_nearly_the_same_name_is_named(tmp_path, monkeypatch):
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    for name, end in (("smolm2", "/smolm2; did you mean 'smollm2'?"), ("nothing/near", "/nothing/near.")):
        with pytest.raises(HubError) as caught:
            hub.resolve(name, local_files_only=True, cache_dir=tmp_path / "cache")
        assert caught.value.__notes__ == [f"  If a folder was meant: there is none at {tmp_path}{end}"]
