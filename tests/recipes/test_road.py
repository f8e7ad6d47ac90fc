"""What a run may do beside its steps: stop early, add noise, use Muon, report to W&B, upload, say what comes next."""

import json
import shlex
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import ligermodels
from ligermodels import InputError
from ligermodels.cli import main
from ligermodels.errors import HubError
from ligermodels.processes import Processes
from ligermodels.recipes import memory, model as models
from ligermodels.recipes.neftune import Neftune
from tests.recipes import losses
from tests.recipes.runs import metrics, on_two, options_of, train, weights

FEW = "--max-length 64 --accumulation 2 --max-steps 12 --learning-rate 3e-3 --warmup-steps 0".split()
WORSE = (*FEW, "--learning-rate", "0.1", "--lr-scheduler-type", "constant_with_warmup", "--eval-share", "0.3",
         "--eval-steps", "1")  # fmt: skip
"""At so high a learning rate later evaluations are worse."""


def test_a_run_stops_when_evaluations_get_worse(home, tmp_path, capsys):
    assert train(home, tmp_path / "whole", *WORSE) == 0
    values = metrics(tmp_path / "whole", "eval_loss")
    best, worse, stop = 0, 0, None
    for step in range(1, 13):
        best, worse = (step, 0) if values[step] < values[best] else (best, worse + 1)
        if worse == 2:
            stop = step
            break
    assert stop is not None and 0 < best < stop < 12
    capsys.readouterr()
    flags = (*WORSE, "--early-stopping-patience", "2")
    assert train(home, tmp_path / "early", *flags) == 0
    said = capsys.readouterr().err
    assert (
        f"stopped early after step {stop} of 12: 2 evaluations in a row were no better than that after step {best}"
        in said
    )
    assert metrics(tmp_path / "early", "eval_loss") == {step: values[step] for step in range(stop + 1)}
    assert max(metrics(tmp_path / "early")) == stop and (tmp_path / "early" / "best").is_dir()
    # It ends at once when it is resumed, and goes on with more patience, as a run that had it from the start.
    before = weights(tmp_path / "early")
    assert train(home, tmp_path / "early", *flags, "--resume") == 0
    assert weights(tmp_path / "early") == before and max(metrics(tmp_path / "early")) == stop
    assert train(home, tmp_path / "early", *WORSE, "--early-stopping-patience", "99", "--resume") == 0
    assert metrics(tmp_path / "early") == metrics(tmp_path / "whole")


@pytest.mark.parametrize("packed", [True, False])
def test_neftune_is_the_formula_of_the_paper(packed):
    model, rows = losses.model().float(), (5, 11, 8)
    batch = losses.batches(*rows)[not packed]
    inputs = {
        name: batch[name] for name in ("input_ids", "cu_seqlens", "max_seqlen", "attention_mask") if name in batch
    }
    seen, table = [], model.get_input_embeddings()
    noise = Neftune(model, 5.0)
    handle = table.register_forward_hook(lambda module, args, x: seen.append(x.detach()))
    torch.manual_seed(3)
    model(**inputs, return_logits=False)
    clean = table.weight.detach()[batch["input_ids"]]
    added = seen[0] - clean
    torch.manual_seed(3)
    uniform = torch.empty_like(clean).uniform_(-1, 1)
    lengths = torch.tensor([length for length in rows for _ in range(length)])[None]
    if not packed:
        lengths = torch.tensor(rows)[:, None].expand(clean.shape[:2])
    expected = uniform * 5.0 / (lengths[..., None] * clean.shape[-1]).sqrt()
    torch.testing.assert_close(added, expected, rtol=1e-4, atol=1e-6)
    model.eval()(**inputs, return_logits=False)
    assert torch.equal(seen[1], clean)
    noise.remove(), handle.remove()
    model.train()(**inputs, return_logits=False)
    assert len(seen) == 2 and not model._forward_pre_hooks and not table._forward_hooks


def test_neftune_changes_the_steps_and_not_the_evaluations(home, tmp_path):
    flags = (*FEW, "--max-steps", "2", "--eval-share", "0.3")
    assert train(home, tmp_path / "plain", *flags) == 0
    assert train(home, tmp_path / "noisy", *flags, "--neftune-noise-alpha", "5") == 0
    plain, noisy = tmp_path / "plain", tmp_path / "noisy"
    assert metrics(plain, "eval_loss")[0] == metrics(noisy, "eval_loss")[0]
    assert metrics(plain)[1] != metrics(noisy)[1] == pytest.approx(metrics(plain)[1], rel=0.1)


def test_muon_trains_matrices_and_adamw_the_rest(home, tmp_path, capsys):
    """The first step, by torch's optimizers."""
    flags = (*FEW, "--max-steps", "1", "--weight-decay", "0.1", "--optim", "muon", "--max-grad-norm", "0")
    assert train(home, tmp_path / "muon", *flags) == 0
    assert train(home, tmp_path / "adamw", *[flag for flag in flags if flag not in ("--optim", "muon")]) == 0
    before, muon, adamw = (
        ligermodels.load(folder, dtype=torch.float32, device="cpu").state_dict()
        for folder in (home / "model", tmp_path / "muon" / "model", tmp_path / "adamw" / "model")
    )
    for name, x in before.items():
        is_matrix = "_proj.weight" in name
        assert torch.equal(muon[name], adamw[name]) != is_matrix, name
        if is_matrix:  # singular values near one, where the gradient has some rank
            update = (x * (1 - 3e-3 * 0.1) - muon[name]) / (3e-3 * 0.2 * max(x.shape) ** 0.5)
            values = torch.linalg.svdvals(update)
            assert values[7] > 0.6 and values[0] < 1.3
    assert train(home, tmp_path / "two", *flags, "--dry-run") == 0
    on_two(tmp_path, lambda: train(home, tmp_path / "two", *flags) - 3)
    options = options_of("sft", optim="muon")
    with pytest.raises(InputError, match="optim=muon: it needs whole matrices, and each of the 2 processes has a part"):
        models.check_muon(Processes(size=2, mesh=object()))
    assert type(models.make_optimizer(options, losses.model(), Processes())).__name__ == "MuonAdamW"


def test_the_memory_of_muon():
    """On the CPU in fp32 a matrix has one state of 4 bytes in place of two; on a GPU 8 bytes in place of 6."""
    model = losses.model()
    matrices = sum(weight.numel() for weight in models.matrices_of(model))
    for device, difference in (("cpu", -4), ("cuda", 2)):
        states = []
        for optim in ("adamw", "muon"):
            options = options_of("sft", optim=optim, batch_tokens=64, accumulation=1)
            processes, sizes = Processes(torch.device(device)), memory.Sizes.of(model, options)
            precision, activations = memory.choose(sizes, options, processes, 1)
            precision = {"cpu": "fp32", "cuda": "bf16-masters"}[device]
            states.append(memory.estimate(sizes, options, processes, precision, activations)["optimizer"])
        assert states[1] - states[0] == difference * matrices
        assert optim == "muon" and memory.choose(sizes, options, processes, 1)[0] == precision  # not bf16


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16-masters", torch.bfloat16), ("bf16", torch.bfloat16)]
)
def test_the_memory_of_moments_in_8_bits(precision, dtype):
    """The plan has the bytes that the states have after a step."""
    model = losses.model(hidden_size=128).to(dtype)
    options = options_of(
        "sft", optim="adamw8bit", precision=precision, activations="none", batch_tokens=64, accumulation=1
    )
    optimizer = models.make_optimizer(options, model, Processes())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    held = [x.nbytes for state in optimizer.state.values() for name, x in state.items() if name != "step"]
    assert {x.dtype for state in optimizer.state.values() for x in state.values()} >= {torch.uint8, torch.float32}
    sizes, processes = (
        memory.Sizes.of(model, options),
        Processes(torch.device("cuda" if "bf16" in precision else "cpu")),
    )
    assert memory.estimate(sizes, options, processes)["optimizer"] == sum(held)
    assert memory.Sizes.of(model, options_of("sft", optim="adamw8bit", lora_r=4)).eight_bits == 0


def test_a_run_with_moments_in_8_bits_is_resumed_to_the_bit(home, tmp_path):
    flags = (*FEW, "--optim", "adamw8bit", "--lr-scheduler-type", "constant_with_warmup")
    assert train(home, tmp_path / "whole", *flags, "--max-steps", "4") == 0
    assert train(home, tmp_path / "parts", *flags, "--max-steps", "2") == 0
    assert train(home, tmp_path / "parts", *flags, "--max-steps", "4", "--resume") == 0
    assert train(home, tmp_path / "plain", *FEW, "--lr-scheduler-type", "constant_with_warmup", "--max-steps", "4") == 0
    before = load_file(home / "model" / "model.safetensors")
    whole, parts, plain = (
        load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "parts", "plain")
    )
    assert all(torch.equal(x, parts[name]) for name, x in whole.items())
    distance, way = (
        sum((x.double() - y[name].double()).square().sum() for name, x in plain.items()).sqrt() for y in (whole, before)
    )
    assert 0 < distance < 0.1 * way


class WandB:
    """W&B, as far as a run uses it. A run of an id that is there goes on in it."""

    def __init__(self):
        self.runs, self.calls = {}, []

    def init(self, **options):
        self.calls.append(options)
        id = options["id"] or f"id-{len(self.runs)}"
        return self.runs.setdefault(id, Run(id))


class Run:
    def __init__(self, id):
        self.id, self.lines, self.metrics = id, [], []

    def define_metric(self, name, step_metric):
        self.metrics.append((name, step_metric))

    def log(self, values):
        self.lines.append(values)

    def finish(self): ...


def test_a_run_of_wandb_goes_on_where_it_was(home, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", wandb := WandB())
    wandb.__spec__ = object()
    flags = (*FEW, "--report-to", "wandb", "--lr-scheduler-type", "constant_with_warmup")
    assert train(home, tmp_path / "out", *flags, "--max-steps", "2", "--run-name", "pip") == 0
    assert train(home, tmp_path / "out", *flags, "--max-steps", "3", "--resume") == 0
    assert train(home, tmp_path / "new", *flags, "--max-steps", "1") == 0
    one, two, three = wandb.calls
    assert (one["id"], two["id"], three["id"]) == (None, "id-0", None) and two["resume"] == "allow"
    assert (one["name"], two["name"], three["name"]) == ("pip", "out", "new")
    assert one["config"]["max_steps"] == 2 and json.dumps(one["config"]) and "objects" not in one["config"]
    assert [line["step"] for line in wandb.runs["id-0"].lines] == [1, 2, 3]
    assert wandb.runs["id-0"].metrics[0] == ("*", "step")
    assert [line["loss"] for line in wandb.runs["id-0"].lines] == list(metrics(tmp_path / "out").values())


class Hub:
    """The Hub, as far as an upload uses it."""

    def __init__(self, private=True, error=None):
        self.calls, self.private, self.error = [], private, error

    def __call__(self, token=None):
        return self

    def create_repo(self, name, *, private, exist_ok):
        self.calls.append(("create", name, private))
        if self.error == "create":
            raise OSError("401 Unauthorized")
        return SimpleNamespace(repo_id=name if "/" in name else f"me/{name}")

    def repo_info(self, name):
        return SimpleNamespace(private=self.private)

    def upload_folder(self, folder_path, repo_id, **options):
        if self.error == "upload":
            raise OSError("connection lost")
        self.calls.append(("upload", repo_id, sorted(path.name for path in folder_path.iterdir())))
        return SimpleNamespace(pr_url=None, commit_url=f"https://hub/{repo_id}/commit/1")


@pytest.fixture
def hub_of(monkeypatch):
    def make(**options):
        hub = Hub(**options)
        monkeypatch.setattr("huggingface_hub.HfApi", hub)
        return hub

    return make


def test_a_result_is_uploaded(home, tmp_path, capsys, hub_of):
    hub, flags = hub_of(), (*FEW, "--max-steps", "1", "--push-to-hub")
    assert train(home, tmp_path / "tuned", *flags, "--dry-run") == 0 and hub.calls == []
    assert train(home, tmp_path / "tuned", *flags) == 0
    create, _, (_, repository, files) = hub.calls
    assert create == ("create", "tuned", True) and repository == "me/tuned"
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(files)
    assert "uploaded to https://hub/me/tuned/commit/1" in capsys.readouterr().err
    hub = hub_of()
    more = ("--lora-r", "2", "--hub-model-id", "them/x", "--no-hub-private-repo")
    assert train(home, tmp_path / "adapter", *flags, *more) == 0
    assert hub.calls[0] == ("create", "them/x", False) and "adapter_model.safetensors" in hub.calls[-1][2]
    assert "is public" not in capsys.readouterr().err
    hub_of(private=False)
    assert train(home, tmp_path / "public", *flags) == 0
    assert "warning: me/public was there before, and is public" in capsys.readouterr().err


def test_an_upload_that_fails(home, tmp_path, capsys, hub_of):
    """Before the training, if it can; after it the result is there, and the run says how to upload it."""
    flags = (*FEW, "--max-steps", "1", "--push-to-hub")
    hub_of(error="create")
    assert train(home, tmp_path / "none", *flags) == 3
    assert "can be neither made nor read: 401" in capsys.readouterr().err and not (tmp_path / "none").exists()
    hub_of(error="upload")
    with pytest.raises(HubError) as failed:
        ligermodels.train(
            "sft", model=home / "model", data=home / "chats.jsonl", output_dir=tmp_path / "out", max_steps=1,
            push_to_hub=True,
        )  # fmt: skip
    folder = tmp_path / "out" / "model"
    assert f"The result is complete in {folder}. Next: `hf upload me/out {folder}`" in failed.value.__notes__[0]
    assert (folder / "model.safetensors").is_file()


def test_the_commands_that_a_run_ends_with_work(home, tmp_path, capsys):
    for name, flags in (("model", ()), ("adapter", ("--lora-r", "2"))):
        out = tmp_path / f"my {name}"
        assert train(home, out, *FEW, "--max-steps", "1", *flags) == 0
        lines = capsys.readouterr().err.splitlines()
        chat, convert, evaluate, *_ = [shlex.split(line) for line in lines[lines.index("next:") + 1 :]]
        assert evaluate[1:3] == ["eval", str(out / name)]
        assert chat == ["ligermodels", "chat", str(out / name)] and convert[1] == "convert"
        if name == "adapter":
            assert main(convert[1:]) == 0 and (out / "merged" / "model.safetensors").is_file()
        else:
            assert convert[2:] == [str(out / "model"), f"{out}.gguf"]
