"""Where a checkpoint is found: folders, the cache as huggingface_hub lays it out, every way to be refused."""

import errno
import hashlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import urllib.parse
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants, errors
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import save_file

import ligermodels
from ligermodels.checkpoint import hub
from ligermodels.checkpoint.reading import open_checkpoint, read_json
from ligermodels.errors import CheckpointError, HubError

ROOT = Path(__file__).parents[2]
DOWNLOAD = huggingface_hub.snapshot_download
REPO = "owner/name"
OLD, NEW = "1" * 40, "2" * 40
SECRET = "hf_NeverToBeShown"


def shard(k: int, n: int = 2) -> str:
    return f"model-{k:05}-of-{n:05}.safetensors"


def a_checkpoint(folder: Path, prefix: str = "") -> Path:
    """Two shards with their index, companions, and what a repository also holds and nobody needs."""
    (folder / prefix).mkdir(parents=True)
    for k in (1, 2):
        save_file({f"x{k}": torch.full((2,), float(k))}, folder / prefix / shard(k))
    index = {"weight_map": {f"x{k}": shard(k) for k in (1, 2)}}
    (folder / prefix / "model.safetensors.index.json").write_text(json.dumps(index))
    for file in ("config.json", "tokenizer.json", "chat_template.jinja", "consolidated.safetensors", "x.gguf",
                 "pytorch_model.bin", "original/consolidated.00.pth", "additional_chat_templates/tool.jinja",
                 "modeling_custom.py", "onnx/model.onnx", shard(1, 3), "README.md"):  # fmt: skip
        (folder / prefix / file).parent.mkdir(exist_ok=True)
        (folder / prefix / file).write_text("{}")
    return folder


NEEDED = ["additional_chat_templates/tool.jinja", "chat_template.jinja", "config.json", shard(1), shard(2),
          "model.safetensors.index.json", "tokenizer.json"]  # fmt: skip


def files_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


class Hub:
    """A Hub and its cache on disk; `download` stands in for huggingface_hub.snapshot_download where that connects."""

    def __init__(self, root: Path):
        self.remote, self.cache = root / "remote", root / "cache"
        self.storage = self.cache / f"models--{REPO.replace('/', '--')}"
        self.refs = {"main": OLD}
        self.calls: list[dict] = []
        self.failure: Exception | None = None

    def download(self, repo, *, revision, cache_dir, allow_patterns, token=None, local_files_only=False):
        if local_files_only:
            options = dict(cache_dir=cache_dir, allow_patterns=allow_patterns, local_files_only=True)
            return DOWNLOAD(repo, revision=revision, **options)
        assert repo == REPO
        self.calls.append({"revision": revision, "token": token, "patterns": allow_patterns})
        if self.failure:
            raise self.failure
        commit = self.refs.get(revision or "main", revision)
        self.store(commit, filter_repo_objects(files_in(self.remote), allow_patterns=allow_patterns))
        (self.storage / "refs").mkdir(exist_ok=True)
        (self.storage / "refs" / (revision or "main")).write_text(commit)
        return str(self.storage / "snapshots" / commit)

    def store(self, commit, files):
        """Files are links to blobs named by their hash, as in the real cache."""
        (self.storage / "blobs").mkdir(parents=True, exist_ok=True)
        snapshot = self.storage / "snapshots" / commit
        snapshot.mkdir(parents=True, exist_ok=True)
        for file in files:
            blob = self.storage / "blobs" / f"{abs(hash((commit, file))):x}"
            shutil.copyfile(self.remote / file, blob)
            (snapshot / file).parent.mkdir(parents=True, exist_ok=True)
            if not (snapshot / file).exists():
                (snapshot / file).symlink_to(os.path.relpath(blob, (snapshot / file).parent))

    @property
    def snapshot(self) -> Path:
        return self.storage / "snapshots" / OLD


@pytest.fixture
def online(tmp_path, monkeypatch):
    the_hub = Hub(tmp_path)
    a_checkpoint(the_hub.remote)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", the_hub.download)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(the_hub.cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    return the_hub


@pytest.fixture
def cached(online):
    hub.resolve(REPO)
    online.calls.clear()
    return online


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


@pytest.mark.parametrize("given", ["./x", "/no/such/folder", "~/x", "a/b/c", "a b/c", "C:\\x", ".x/y", Path("x/y")])
def test_what_is_neither_folder_nor_repository(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HubError, match=r"(?s)is not there\. Give the folder.*owner/name"):
        hub.resolve(given)


def test_a_file_or_an_absent_subfolder(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(HubError, match="is a file"):
        hub.resolve(tmp_path / "model.safetensors")
    with pytest.raises(HubError, match="sub is not there"):
        hub.resolve(tmp_path, subfolder="sub")


@pytest.mark.parametrize("subfolder", ["../x", "/etc", "a/../../b"])
def test_a_subfolder_stays_inside(tmp_path, subfolder):
    with pytest.raises(HubError, match="must be a path inside"):
        hub.resolve(tmp_path, subfolder=subfolder)


# Downloading


def test_only_what_is_needed_is_fetched_from_one_commit(online):
    folder = hub.resolve(REPO, token=SECRET)
    assert folder == online.snapshot and files_in(folder) == NEEDED
    assert [call["revision"] for call in online.calls] == [None, OLD]
    assert {call["token"] for call in online.calls} == {SECRET}
    with open_checkpoint(folder) as reader:
        assert float(reader.read("x2")[0]) == 2.0


def test_a_single_file(online):
    for k in (1, 2):
        (online.remote / shard(k)).unlink()
    (online.remote / "model.safetensors.index.json").unlink()
    save_file({"x": torch.ones(1)}, online.remote / "model.safetensors")
    assert "model.safetensors" in files_in(hub.resolve(REPO))


def test_a_subfolder(online):
    a_checkpoint(online.remote, "sub/dir")
    folder = hub.resolve(REPO, subfolder="sub/dir")
    assert folder == online.snapshot / "sub" / "dir"
    assert files_in(online.snapshot) == sorted(f"sub/dir/{file}" for file in NEEDED)


def test_without_weights(online):
    assert files_in(hub.resolve(REPO, weights=False)) == [
        file for file in NEEDED if not file.startswith("model")
    ]  # fmt: skip
    assert len(online.calls) == 1


def test_pickles_are_fetched_only_when_allowed_and_needed(online):
    assert "pytorch_model.bin" not in files_in(hub.resolve(REPO, allow_pickle=True))
    for file in [shard(1), shard(2), "model.safetensors.index.json"]:
        (online.remote / file).unlink()
    shutil.rmtree(online.cache)
    with pytest.raises(HubError, match=r"(?s)has no model\.safetensors.*allow_pickle=True"):
        hub.resolve(REPO)
    assert "pytorch_model.bin" in files_in(hub.resolve(REPO, allow_pickle=True))


def test_a_repository_without_a_model(online):
    (online.remote / "config.json").unlink()
    with pytest.raises(HubError, match=r"has no config\.json"):
        hub.resolve(REPO)
    with pytest.raises(HubError, match=r"(?s)has no config\.json, model\.safetensors in other.*another subfolder"):
        hub.resolve(REPO, subfolder="other")


def test_a_moved_branch_is_seen(cached):
    cached.refs["main"] = NEW
    (cached.remote / "config.json").write_text('{"new": 1}')
    folder = hub.resolve(REPO)
    assert folder.name == NEW and read_json(folder / "config.json") == {"new": 1}


def test_an_index_that_points_elsewhere_fetches_nothing(online):
    (online.remote / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../../secret.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"names '\.\./\.\./secret"):
        hub.resolve(REPO)
    assert len(online.calls) == 1


# The cache


def offline_options(how: str, monkeypatch) -> dict:
    if how == "local_files_only":
        return {"local_files_only": True}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return {}


@pytest.mark.parametrize("how", ["local_files_only", "HF_HUB_OFFLINE"])
def test_a_complete_copy_needs_no_network(cached, monkeypatch, how):
    options = offline_options(how, monkeypatch)
    for revision in (None, "main", OLD):
        assert hub.resolve(REPO, revision=revision, **options) == cached.snapshot
    assert hub.resolve(REPO, weights=False, **options) == cached.snapshot
    elsewhere = cached.cache.rename(cached.cache.with_name("elsewhere"))
    assert hub.resolve(REPO, cache_dir=elsewhere, **options).is_relative_to(elsewhere)
    assert cached.calls == []


@pytest.mark.parametrize("how", ["local_files_only", "HF_HUB_OFFLINE"])
@pytest.mark.parametrize("lost", [shard(2), "config.json", "model.safetensors.index.json", "everything"])
def test_an_incomplete_copy_says_what_is_missing(cached, monkeypatch, how, lost):
    if lost == "everything":
        shutil.rmtree(cached.cache)
        words = "the cache lacks any snapshot"
    else:
        (cached.snapshot / lost).unlink()
        words = f"the cache lacks {'model.safetensors' if 'index' in lost else lost}"
    with pytest.raises(HubError, match=f"(?s){words}.*network.*{how}.*hf download {REPO}"):
        hub.resolve(REPO, **offline_options(how, monkeypatch))
    assert cached.calls == []


def test_a_link_to_a_lost_blob_is_missing(cached):
    (cached.snapshot / shard(1)).resolve().unlink()
    with pytest.raises(HubError, match=f"lacks {shard(1)}"):
        hub.resolve(REPO, local_files_only=True)


def test_unknown_revisions_offline(cached):
    for revision in ("dev", NEW, "../main"):
        with pytest.raises(HubError, match=f"{REPO} at revision {revision}: the cache lacks any snapshot"):
            hub.resolve(REPO, revision=revision, local_files_only=True)


def test_a_commit_in_the_cache_is_not_asked_for_again(cached):
    assert hub.resolve(REPO, revision=OLD) == cached.snapshot
    assert cached.calls == []
    (cached.snapshot / shard(1)).unlink()
    hub.resolve(REPO, revision=OLD)
    assert len(cached.calls) == 2 and (cached.snapshot / shard(1)).is_file()


# The real client against a server of our own


class Server(http.server.BaseHTTPRequestHandler):
    """The few addresses of the Hub that a download asks for."""

    remote: Path
    refuse: tuple[int, str] | None = None
    asked: list[str] = []

    def do_GET(self):
        path = urllib.parse.urlsplit(self.path).path
        self.asked.append(f"{self.command} {path}")
        if self.refuse and "/resolve/" in path:
            return self.answer(self.refuse[0], b"", {"X-Error-Code": self.refuse[1], "X-Error-Message": "no"})
        if path in (
            f"/api/models/{REPO}",
            f"/api/models/{REPO}/revision/main",
            f"/api/models/{REPO}/revision/{OLD}",
        ):
            siblings = [{"rfilename": file} for file in files_in(self.remote)]
            return self.json({"_id": "1", "id": REPO, "modelId": REPO, "sha": OLD, "siblings": siblings})
        if path.startswith(f"/api/models/{REPO}/tree/{OLD}"):
            sizes = {file: (self.remote / file).stat().st_size for file in files_in(self.remote)}
            return self.json([{"type": "file", "path": f, "size": n, "oid": f"{n:040x}"} for f, n in sizes.items()])
        if path.startswith(f"/{REPO}/resolve/{OLD}/"):
            content = (self.remote / urllib.parse.unquote(path).split(f"{OLD}/")[1]).read_bytes()
            etag = hashlib.sha1(path.encode() + content).hexdigest()
            return self.answer(200, content, {"X-Repo-Commit": OLD, "ETag": f'"{etag}"'})
        code = "RevisionNotFound" if path.startswith(f"/api/models/{REPO}/") else "RepoNotFound"
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
def server(tmp_path):
    handler = type("Handler", (Server,), {"remote": a_checkpoint(tmp_path / "served"), "asked": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        handler.address = f"http://127.0.0.1:{running.server_address[1]}"
        handler.stop = running.shutdown
        yield handler
        running.shutdown()
        thread.join()


def ask(server, cache: Path, *calls: str) -> list[str]:
    """What `hub.resolve` returns with these arguments, or its error, call by call in a new process."""
    code = f"""if True:
        import logging, traceback, warnings
        from ligermodels.checkpoint import hub
        from ligermodels.errors import HubError
        warnings.simplefilter("ignore")
        logging.basicConfig(level=logging.DEBUG)
        for options in [{", ".join(f"dict({call})" for call in calls)}]:
            repo = options.pop("repo", {REPO!r})
            try:
                print(hub.resolve(repo, **options))
            except HubError as error:
                print(str(error).replace(chr(10), " "))
                traceback.print_exc()  # with all that led to it
    """
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_CACHE": str(cache),
        "HF_ENDPOINT": server.address,
    }
    environment |= {
        "HF_HOME": str(cache),
        "HF_TOKEN": SECRET,
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
    }
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=True)
    assert SECRET not in result.stdout + result.stderr, "in a message, a traceback or a log"
    return result.stdout.splitlines()


def test_the_real_client(server, tmp_path):
    cache = tmp_path / "cache"
    unknown, revision, folder, again = ask(server, cache, "repo='a/b'", "revision='dev'", "", f"revision='{OLD}'")
    assert unknown.startswith("a/b: RepositoryNotFoundError")
    assert revision.startswith(f"{REPO} at revision dev: RevisionNotFoundError")
    assert folder == again and files_in(Path(folder)) == NEEDED
    fetched = [asked.split(f"{OLD}/")[1] for asked in server.asked if asked.startswith(f"GET /{REPO}/resolve")]
    assert sorted(fetched) == NEEDED
    server.refuse = (403, "GatedRepo")
    [gated] = ask(server, tmp_path / "empty", "")
    assert gated.startswith(f"{REPO}: GatedRepoError") and "hf auth login" in gated
    server.stop()  # a complete copy needs no network
    server.address = "http://127.0.0.1:9"
    again, unknown = ask(server, cache, "", "repo='owner/other'")
    assert again == folder and unknown.startswith("owner/other: LocalEntryNotFoundError")


# Refusals


def http_error(kind: type, status: int, words: str = "server says no") -> Exception:
    request = SimpleNamespace(method="GET", url="https://huggingface.co/api")
    return kind(words, response=SimpleNamespace(status_code=status, headers={}, request=request))


FAILURES = {
    "gated": http_error(errors.GatedRepoError, 403),
    "absent": http_error(errors.RepositoryNotFoundError, 401),
    "revision": http_error(errors.RevisionNotFoundError, 404),
    "down": http_error(errors.HfHubHTTPError, 503),
    "offline": errors.OfflineModeIsEnabled("off"),
    "transport": errors.HTTPError("broken"),
    "id": errors.HFValidationError("bad name"),
    "full": OSError(errno.ENOSPC, "No space left on device", "/cache"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_refusals_are_huberrors(online, name):
    online.failure = FAILURES[name]
    with pytest.raises(HubError, match=f"{REPO} at revision dev: {type(online.failure).__name__}") as caught:
        hub.resolve(REPO, revision="dev", token=SECRET)
    assert str(online.failure) in str(caught.value) and SECRET not in str(caught.value)
    assert caught.value.__cause__ is online.failure
    assert (caught.value.errno == errno.ENOSPC) == (name == "full")


@pytest.mark.parametrize("name", FAILURES)
def test_a_complete_copy_stands_in_with_a_warning(cached, name):
    cached.failure = FAILURES[name]
    (cached.storage / "refs" / "dev").write_text(OLD)
    if name == "revision":  # the Hub knows better than the cache
        with pytest.raises(HubError):
            hub.resolve(REPO, revision="dev")
        return
    with pytest.warns(UserWarning, match=f"Using commit {OLD}, from the cache"):
        assert hub.resolve(REPO, revision="dev") == cached.snapshot
    (cached.snapshot / shard(2)).unlink()
    with pytest.raises(HubError):
        hub.resolve(REPO, revision="dev")


@pytest.mark.parametrize("error", [TypeError("a bug"), KeyError("a bug"), HubError("the index cannot be read")])
def test_a_failure_of_our_own_is_not_taken_for_the_hubs(cached, error):
    cached.failure = error
    (cached.storage / "refs" / "dev").write_text(OLD)
    with pytest.raises(type(error)) as caught:
        hub.resolve(REPO, revision="dev")
    assert caught.value is error


def test_a_password_in_the_endpoint_is_not_shown(online):
    online.failure = OSError(f"no route to https://me:{SECRET}@mirror.example/api")
    with pytest.raises(HubError, match=r"https://mirror\.example/api") as caught:
        hub.resolve(REPO)
    assert SECRET not in str(caught.value)


# Uploading


class Api:
    calls: list[tuple] = []

    def __init__(self, token=None):
        self.calls.append(("token", token))

    def create_repo(self, repo, **options):
        self.calls.append(("create_repo", repo, options))
        return SimpleNamespace(repo_id=repo)

    def create_branch(self, repo, **options):
        self.calls.append(("create_branch", repo, options))

    def upload_folder(self, **options):
        self.calls.append(("upload_folder", options))
        pr = "https://huggingface.co/pr/1" if options["create_pr"] else None
        return SimpleNamespace(commit_url="https://huggingface.co/commit/1", pr_url=pr)


def test_push(tmp_path, monkeypatch):
    monkeypatch.setattr(Api, "calls", [])
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    url = hub.push(tmp_path, REPO, private=True, revision="dev", commit_message="words", token=SECRET)
    assert url == "https://huggingface.co/commit/1"
    upload = {
        "folder_path": tmp_path,
        "repo_id": REPO,
        "revision": "dev",
        "create_pr": False,
        "commit_message": "words",
    }
    assert Api.calls == [
        ("token", SECRET),
        ("create_repo", REPO, {"private": True, "exist_ok": True}),
        ("create_branch", REPO, {"branch": "dev", "exist_ok": True}),
        ("upload_folder", upload),
    ]
    assert hub.push(tmp_path, REPO, create_pr=True, revision="dev") == "https://huggingface.co/pr/1"
    assert [call[0] for call in Api.calls[4:]] == ["token", "create_repo", "upload_folder"]


def test_the_token_is_in_no_file(online, tmp_path, monkeypatch):
    """Neither in what a model that was loaded with it writes, nor in the model, nor in what is uploaded."""
    config = dict(model_type="llama", vocab_size=8, hidden_size=4, intermediate_size=4, num_hidden_layers=1,
                  num_attention_heads=1)  # fmt: skip
    shutil.rmtree(online.remote)
    ligermodels.Llama.from_config(config, device="cpu").save_pretrained(online.remote)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    loaded = ligermodels.load(REPO, token=SECRET, progress=False)
    assert {call["token"] for call in online.calls} == {SECRET}
    loaded.save_pretrained(tmp_path / "out")
    for folder in (tmp_path / "out", online.cache):
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert files and all(SECRET.encode() not in path.read_bytes() for path in files)
    assert SECRET not in repr(vars(loaded)) + repr(loaded)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(Api, "calls", [])
    loaded.push_to_hub(REPO, token=SECRET)
    assert Api.calls[0] == ("token", SECRET) and all(SECRET not in repr(call) for call in Api.calls[1:])


def test_what_is_on_this_machine_needs_no_network(tmp_path):
    """Importing, building, saving, loading, tokenizing, generating and converting: no connection, no name asked for.

    In a process of its own, in which huggingface_hub is not told to be offline.
    """
    code = f"""if True:
        import sys, warnings

        def hook(event, args):
            if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
                raise AssertionError(f"the network was asked: {{event}} {{args}}")

        sys.addaudithook(hook)
        warnings.simplefilter("ignore")
        import socket, torch, ligermodels, ligermodels.kernels, ligermodels.layers
        from ligermodels.cli import main
        from tokenizers import Tokenizer, models
        folder = {str(tmp_path / "owner" / "model")!r}
        config = dict(model_type="llama", vocab_size=8, hidden_size=4, intermediate_size=4, num_hidden_layers=1,
                      num_attention_heads=1, auto_map={{"AutoModel": "evil/repo--x.Model"}})
        ligermodels.Llama.from_config(config, device="cpu").save_pretrained(folder)
        Tokenizer(models.WordLevel({{"a": 0, "b": 1}}, "a")).save(folder + "/tokenizer.json")
        model = ligermodels.load(folder, token={SECRET!r}, progress=False)
        ids = torch.tensor([ligermodels.Tokenizer.from_hub(folder).encode("a")])
        model(ids, labels=ids).loss.backward()
        model.generate(ids, max_new_tokens=2)
        model.save_pretrained(folder + "-2")
        for arguments in (["inspect", folder], ["verify", folder, folder + "-2"],
                          ["convert", folder, folder + "-3"]):
            try:
                assert not main(arguments), arguments
            except SystemExit as end:
                assert not end.code, arguments
        try:
            socket.create_connection(("localhost", 9))
        except AssertionError:
            print("the hook was in place")
    """
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    environment |= {"HF_TOKEN": SECRET, "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("the hook was in place\n") and SECRET not in done.stdout + done.stderr
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert all(SECRET.encode() not in path.read_bytes() for path in written)


def test_push_refused(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise http_error(errors.HfHubHTTPError, 403)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(Api, "create_repo", refuse)
    with pytest.raises(HubError, match="owner/name: HfHubHTTPError: server says no"):
        hub.push(tmp_path, REPO)
