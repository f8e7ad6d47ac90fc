"""Checkpoints of a run: resumed to the bit, on other numbers of ranks too, asynchronous, and what is refused."""

import json
import os
import pickle
import shutil
import sys
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ligermodels import CheckpointError, InputError
from ligermodels.arch import ARCHS
from ligermodels.checkpoint.dcp import Reader, checksum
from ligermodels.checkpoint.weights import same_bits
from ligermodels.parallel import Checkpoints, make_mesh, parallelize
from ligermodels.training import AdamW
from tests.parallel.ranks import on_ranks, one_rank
from tests.parallel.train import CONFIG, Data, Run, sharded


def same(a, b):
    return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)


def steps_in(folder):
    return sorted(path.name for path in folder.iterdir())


IN_BLOCKS = dict(optimizer="8 bits", hidden_size=64, intermediate_size=64)
"""Of a model some of whose moments are in 8 bits."""


@pytest.mark.parametrize(
    "kind",
    [dict(optimizer="ours"), dict(optimizer="master"), IN_BLOCKS, dict(optimizer="torch", dtype=torch.float32)],
    ids=lambda kind: kind["optimizer"],
)
def test_a_run_that_is_resumed_computes_the_same_bits(tmp_path, kind):
    kind = {"dtype": torch.bfloat16, **kind}
    run = Run(**kind)
    with run.checkpoints(tmp_path) as checkpoints:
        assert checkpoints.load() == 0
        for step in range(4):
            run.step()
            if step == 1:
                checkpoints.save(2, wait=False)
        expected = [run.step() for _ in range(2)]
    other = Run(**kind, seed=1)
    assert other.load(tmp_path) == 2
    for _ in range(2):
        other.step()
    assert [other.step() for _ in range(2)] == expected
    assert same(run.weights(), other.weights())
    assert all(
        same_bits(x, other.optimizer.state[q][key])
        for p, q in zip(run.model.parameters(), other.model.parameters(), strict=True)
        for key, x in run.optimizer.state[p].items()
    )
    size = sum(p.nbytes for p in run.model.parameters())
    size += sum(x.nbytes for state in run.optimizer.state.values() for x in state.values())
    headers = Reader(tmp_path / "step-00000002").headers
    assert sum(info.nbytes for info in headers.values()) == size
    assert all(name.startswith(("model.", "optimizer.")) for name in headers)


def test_saving_before_the_first_step_takes_none(tmp_path):
    """Nor does loading such a checkpoint; torch's get_optimizer_state_dict would leave step counts of 1."""
    run = Run()
    run.save(tmp_path, 0)
    assert not run.optimizer.state
    run.step()
    other = Run()
    other.load(tmp_path)
    assert not other.optimizer.state
    other.step()
    assert same(run.weights(), other.weights())


def test_training_goes_on_while_the_state_of_the_save_is_written(tmp_path, monkeypatch):
    run, go, write = Run("master", dtype=torch.bfloat16), threading.Event(), dcp.FileSystemWriter.write_data
    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", lambda *args: go.wait(60) and write(*args))
    with run.checkpoints(tmp_path) as checkpoints:
        run.step()
        saved = {name: tensor.clone() for name, tensor in run.weights().items()}
        checkpoints.save(1, wait=False)
        losses = [run.step() for _ in range(2)]
        assert not any(path.name == "step-00000001" for path in tmp_path.iterdir())
        go.set()
        checkpoints.save(3)
        assert steps_in(tmp_path) == ["step-00000001", "step-00000003"]
    shutil.rmtree(tmp_path / "step-00000003")
    assert not same(run.weights(), saved)
    other = Run("master", dtype=torch.bfloat16)
    assert other.load(tmp_path) == 1
    assert same(other.weights(), saved)
    assert [other.step() for _ in range(2)] == losses


def test_frozen_parameters_can_be_left_out(tmp_path):
    def freeze(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("mlp" in name)
        return model

    run, again = Run(spread=freeze), Run(spread=freeze)
    with run.checkpoints(tmp_path, frozen=False) as checkpoints:
        run.step()
        checkpoints.save(1, wait=False)
        losses = [run.step(), run.step()]
    stored = {key for key in Reader(tmp_path / "step-00000001").headers if key.startswith("model.")}
    assert stored == {f"model.{name}" for name, p in run.model.named_parameters() if p.requires_grad}
    assert again.load(tmp_path, frozen=False) == 1
    assert again.model.lm_head.weight not in again.optimizer.state
    assert [again.step(), again.step()] == losses and same(again.weights(), run.weights())


def test_which_checkpoints_are_kept(tmp_path, monkeypatch):
    run, seen, write = Run(), [], dcp.FileSystemWriter.write_data

    def note(*args):
        seen.append(steps_in(tmp_path))
        return write(*args)

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", note)
    (tmp_path / "step-00000007.partial").mkdir()
    (tmp_path / "step-00000007.partial" / "__0_0.distcp").touch()
    (tmp_path / "notes").touch()
    with run.checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 2, 3, 10):
            checkpoints.save(step, wait=step % 2 == 0)
            checkpoints.save(step)  # once more: nothing to do
        assert steps_in(tmp_path) == ["notes", "step-00000003", "step-00000010"]
    # The old ones were there until the new one was complete.
    assert seen[3] == ["notes", "step-00000002", "step-00000003", "step-00000010.partial"] and len(seen) == 4
    with run.checkpoints(tmp_path, keep=None) as checkpoints:
        assert checkpoints.load() == 10
        checkpoints.save(11)
        assert len(steps_in(tmp_path)) == 4


def test_a_full_disk_is_seen_beforehand(tmp_path, monkeypatch):
    checkpoints = Run().checkpoints(tmp_path)
    checkpoints.save(1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**4))
    with pytest.raises(CheckpointError, match=r"(?s)No space left.*It takes [\d.]+ kB, and 10 kB were free"):
        checkpoints.save(2)
    assert steps_in(tmp_path) == ["step-00000001"]


# What is refused


class Evil:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def cut(folder):
    file = folder / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-100])


def flipped(name):
    """Changes one bit of a file of the folder."""

    def change(folder):
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / name).write_bytes(content)

    return change


def with_checksums(change):
    """Whoever writes a hostile checkpoint writes the checksums that it has."""

    def spoil(folder):
        change(folder)
        files = [folder / ".metadata", *folder.glob("*.distcp")]
        (folder / "checksums.json").write_text(json.dumps({"files": {path.name: checksum(path) for path in files}}))

    return spoil


def overwrite(name, write):
    """Replaces a stored state by what `write(content, file)` makes of one that runs code when it is unpickled."""

    def change(folder):
        metadata = Reader(folder).metadata
        with (folder / "new.distcp").open("wb") as file:
            write(Evil("touch hacked"), file)
            length = file.tell()
        place = metadata.storage_data[next(key for key in metadata.storage_data if key.fqn == name)]
        place.relative_path, place.offset, place.length = "new.distcp", 0, length
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    return with_checksums(change)


def foreign(folder):
    shutil.rmtree(folder)
    dcp.save({"model": Run().model.state_dict()}, checkpoint_id=folder, no_dist=True)


OTHER_RUNS = {
    "another size": (dict(hidden_size=64), r"(?s)is \[97, 32\].*and \[97, 64\]"),
    "more layers": (dict(num_hidden_layers=3), r"model\.layers\.2\.\S+ is only in the model"),
    "another dtype": (dict(dtype=torch.bfloat16), r"torch\.float32 there and \S+ torch\.bfloat16 in the model"),
    "another optimizer": (dict(optimizer="sgd"), "has the state of AdamW, not SGD"),
}
DAMAGE = {
    "cut short": (cut, r"__0_0\.distcp cannot be read: it is cut short"),
    "a file is gone": (lambda f: (f / "__0_0.distcp").unlink(), r"__0_0\.distcp is not there"),
    "no checksums": (lambda f: (f / "checksums.json").unlink(), r"checksums\.json is not there"),
    "a bit of the weights": (flipped("__0_0.distcp"), r"__0_0\.distcp is damaged"),
    "a bit of the metadata": (flipped(".metadata"), r"\.metadata is damaged"),
    "a file of another": (
        lambda f: shutil.copy(f / "__0_0.distcp", f / "__1_0.distcp"),
        r"__1_0\.distcp does not belong",
    ),
}
HOSTILE = {
    "code in a state": (overwrite("run", torch.save), r"new\.distcp .*: run: it has a posix\.system\n.*refused"),
    "a bare pickle": (overwrite("extra.data", pickle.dump), r"extra\.data: .*\n.*refused"),
    "no tensor in a file": (
        with_checksums(lambda f: (f / "__0_0.distcp").write_bytes(b"\0" * (f / "__0_0.distcp").stat().st_size)),
        r"(?s)__0_0\.distcp cannot be read: .*delete .*step-00000001 to resume from step-00000000",
    ),
    "another program's": (foreign, "was not written by Checkpoints"),
}  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    run, folder = Run(), tmp_path_factory.mktemp("good")
    run.step()
    run.save(folder)
    return folder


def test_other_models_and_optimizers(good):
    for changes, message in OTHER_RUNS.values():
        run = Run(**changes)
        before = {name: tensor.clone() for name, tensor in run.weights().items()}
        with pytest.raises(CheckpointError, match=message):
            run.load(good)
        assert same(run.weights(), before) and not run.optimizer.state


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_found_before_anything_is_loaded(tmp_path, good, case):
    """The message says how to resume from the checkpoint before, and that then works."""
    spoil, message = DAMAGE[case]
    shutil.copytree(good, tmp_path / "run")
    last = shutil.copytree(good / "step-00000001", tmp_path / "run" / "step-00000012")
    spoil(last)
    run = Run(seed=1)
    before = {name: tensor.clone() for name, tensor in run.weights().items()}
    with run.checkpoints(tmp_path / "run") as checkpoints:
        with pytest.raises(CheckpointError, match=message) as caught:
            checkpoints.load()
        assert f"Next: delete {last} to resume from step-00000001" in str(caught.value)
        assert same(run.weights(), before) and not run.optimizer.state and run.data.position == 0
        shutil.rmtree(last)
        assert checkpoints.load() == 1 and not same(run.weights(), before)
        spoil(tmp_path / "run" / "step-00000001")
        with pytest.raises(CheckpointError, match=r"has no checkpoint before it"):
            checkpoints.load()


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_checkpoints(tmp_path, monkeypatch, good, case):
    spoil, message = HOSTILE[case]
    monkeypatch.chdir(tmp_path)
    shutil.copytree(good, tmp_path / "run")
    shutil.copytree(good / "step-00000001", tmp_path / "run" / "step-00000000")  # is not taken instead
    spoil(tmp_path / "run" / "step-00000001")
    with Run().checkpoints(tmp_path / "run") as checkpoints, pytest.raises(CheckpointError, match=message):
        checkpoints.load()
    assert not (tmp_path / "hacked").exists()


def test_other_parameter_groups(tmp_path):
    run = Run()
    run.save(tmp_path)
    norms = [p for p in run.model.parameters() if p.dim() == 1]
    rest = [p for p in run.model.parameters() if p.dim() > 1]
    run.optimizer = AdamW([{"params": rest}, {"params": norms, "weight_decay": 0.0}])
    with pytest.raises(CheckpointError, match="21 parameters there, 16, 5"):
        run.load(tmp_path)
    run.optimizer = AdamW([*run.model.parameters(), torch.zeros(3, requires_grad=True)])
    with pytest.raises(InputError, match=r"\(3,\) that is not the model's"):
        run.load(tmp_path)


def test_wrapped_modules_have_the_names_of_bare_ones(tmp_path, good):
    run = Run()
    layers = run.model.model.layers
    layers[0], layers[1] = torch.compile(layers[0]), checkpoint_wrapper(layers[1])
    run.model = torch.compile(run.model)
    assert run.load(good) == 1
    run.save(tmp_path)
    ours, theirs = (Reader(folder / "step-00000001").headers for folder in (tmp_path, good))
    assert ours == theirs


def test_states_go_by_names(good):
    """Another order of parameters within a group changes nothing; other objects may be left out."""
    run, other = Run(), Run()
    other.optimizer = AdamW(reversed(list(other.model.parameters())))
    for each in (run, other):
        data_alone = Checkpoints(good, each.model, each.optimizer, data=each.data)
        with data_alone as checkpoints, pytest.warns(UserWarning, match="a state of scheduler, which is not resumed"):
            checkpoints.load()
        assert each.data.position == 1
    for p, q in zip(run.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(run.optimizer.state[p]["exp_avg"], other.optimizer.state[q]["exp_avg"])
    message = r"no state of 'loader'; it has data, scheduler"
    with pytest.raises(CheckpointError, match=message):
        run.load(good, loader=Data())


def test_bad_calls(tmp_path, good):
    run = Run()
    for options, message in [
        (dict(keep=0), "keep=0; expected 1 or more"),
        (dict(data=7), "data lacks state_dict"),
        (dict(ema=run.model), "ema is a LlamaForCausalLM|ema is a Llama"),
    ]:
        with pytest.raises(InputError, match=message):
            run.checkpoints(tmp_path, **options)
    checkpoints = run.checkpoints(good)
    with pytest.raises(InputError, match=r"has step 1 of an earlier run.*\n.*call load\(\) before"):
        checkpoints.save(2)
    assert checkpoints.load() == 1
    checkpoints.save(1)
    for step, message in [(0, "step 0 comes after step 1"), (-1, "step=-1"), (2.0, r"step=2\.0")]:
        with pytest.raises(InputError, match=message):
            checkpoints.save(step)
    run.data.state_dict = lambda: {"f": Run}
    with pytest.raises(InputError, match=r"state of data cannot be saved: it has a \S+Run\n.*numbers, strings, lists"):
        checkpoints.save(2)
    checkpoints.close()
    checkpoints.close()
    with pytest.raises(InputError, match="closed"):
        checkpoints.save(2)
    assert steps_in(good) == ["step-00000001"]
    on_meta = ARCHS["llama"].from_config(CONFIG, device="meta")
    with pytest.raises(InputError, match="meta device"):
        Checkpoints(tmp_path, on_meta, AdamW(on_meta.parameters())).save(1)


# Several ranks


def states(run):
    """The whole states of the optimizer by their names."""
    names = {p: name for name, p in run.model.named_parameters()}
    return {
        f"{names[p]} {key}": (x.full_tensor() if isinstance(x, DTensor) else x).clone()
        for p, state in run.optimizer.state.items()
        for key, x in state.items()
    }


def threads():
    """The names of the threads of this process, by their numbers."""
    return {path.name: (path / "comm").read_text() for path in Path("/proc/self/task").iterdir()}


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_no_thread_of_its_group_outlives_it(tmp_path):
    with one_rank(tmp_path):
        run, before = Run(), threads()
        with run.checkpoints(tmp_path / "run") as checkpoints:
            checkpoints.save(1, wait=False)
            assert any("gloo" in threads()[number] for number in threads().keys() - before.keys())
        assert not any("gloo" in threads()[number] for number in threads().keys() - before.keys())


def on_two_ranks(folder):
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    fsdp = dict(spread=lambda model: sharded(model, mesh), rank=rank)
    run = Run(**fsdp)
    with run.checkpoints(folder / "fsdp") as checkpoints:
        for _ in range(2):
            run.step()
        checkpoints.save(2, wait=False)
        weights = run.weights()
        if rank == 0:
            torch.save(weights, folder / "fsdp.pt")
        expected = [run.step() for _ in range(2)]
    other = Run(**{**fsdp, "seed": 5})
    with warnings.catch_warnings(), other.checkpoints(folder / "fsdp") as checkpoints:
        warnings.simplefilter("error")
        assert checkpoints.load() == 2
    assert [other.step() for _ in range(2)] == expected, "each rank has its own losses, data and randomness"
    assert same(run.weights(), other.weights())

    # The exponents of blocks are sharded as their weights are.
    in_blocks = dict(fsdp, **IN_BLOCKS)
    run = Run(**in_blocks)
    with run.checkpoints(folder / "in blocks") as checkpoints:
        run.step()
        checkpoints.save(1)
        first, expected = states(run), run.step()
    if rank == 0:
        torch.save(first, folder / "blocks.pt")
    other = Run(**{**in_blocks, "seed": 5})
    assert other.load(folder / "in blocks") == 1 and same(states(other), first)
    assert other.step() == expected and same(states(other), states(run))

    # What one process saved, on two ranks; and what two in FSDP saved, in DDP on two.
    run = Run(**fsdp)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of random states
        assert run.load(folder / "single") == 1
    assert run.data.position == 1
    assert same(run.weights(), torch.load(folder / "single.pt"))
    wrapped = Run(spread=DistributedDataParallel, rank=rank)
    one = dict(scheduler=wrapped.scheduler)
    with warnings.catch_warnings(), Checkpoints(folder / "fsdp", wrapped.model, wrapped.optimizer, **one) as found:
        warnings.simplefilter("ignore")  # of random states and data
        assert found.load() == 2
    with Checkpoints(folder / "ddp", wrapped.model, wrapped.optimizer, **one) as checkpoints:
        checkpoints.save(2, wait=False)

    # An error on one rank is raised on both, before anyone waits.
    run = Run(**fsdp)
    checkpoints = run.checkpoints(folder / "bad")
    with pytest.raises(InputError, match=r"different steps: \[1, 2\]"):
        checkpoints.save(1 + rank)
    if rank == 1:
        run.data.state_dict = lambda: {"f": Run}
    with pytest.raises(InputError, match=r"^(rank 1: )?Checkpoints: the state of data cannot"):
        checkpoints.save(1, wait=False)
    vars(run.data).pop("state_dict", None)
    checkpoints.save(1)
    checkpoints.close()
    other = Run("sgd" if rank == 1 else "ours", **fsdp)
    with pytest.raises(CheckpointError, match=r"state of AdamW, not SGD"):
        other.checkpoints(folder / "bad").load()

    # Each rank checks the file that it wrote.
    if rank == 0:
        shutil.copytree(folder / "fsdp", folder / "damaged")
        flipped("__1_0.distcp")(folder / "damaged" / "step-00000002")
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp is damaged"):
        Run(**fsdp).checkpoints(folder / "damaged").load()

    # The same ranks in another mesh: whose data would be whose?
    square = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    message = r"'data' for each rank of 2 ranks \(dp_shard 2\).*dp_replicate 2"
    with pytest.raises(CheckpointError, match=message):
        Run(spread=lambda model: sharded(model, square)).checkpoints(folder / "fsdp").load()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run = Run()
    run.step()
    run.save(folder / "single")
    torch.save(run.weights(), folder / "single.pt")
    on_ranks(folder, lambda: on_two_ranks(folder))
    return folder


@pytest.mark.parametrize("saved_by", ["fsdp", "ddp"])
def test_what_ranks_saved_is_resumed_by_one_process(saved, saved_by):
    folder, run = saved / saved_by, Run()
    keys = Reader(folder / "step-00000002").metadata.state_dict_metadata
    extra = {key for key in keys if key.startswith(("extra", "rng", "run"))}
    per_rank = set() if saved_by == "ddp" else {"extra.data.0", "extra.data.1"}
    assert extra == {"extra.scheduler", "rng.0", "rng.1", "run"} | per_rank
    if per_rank:
        message = r"(?s)another state of 'data' for each rank of 2 ranks.*1 rank\b"
        with pytest.raises(CheckpointError, match=message):
            run.load(folder)
    without_data = Checkpoints(folder, run.model, run.optimizer, scheduler=run.scheduler)
    with without_data as checkpoints, warnings.catch_warnings(record=True) as warned:
        assert checkpoints.load() == 2
    (warning,) = [str(each.message) for each in warned if each.filename == __file__]
    assert "is resumed on 1 rank: the random states" in warning
    assert ("of data, which is not resumed" in warning) == bool(per_rank)
    assert run.scheduler.last_epoch == 2
    state = run.optimizer.state[run.model.lm_head.weight]
    assert state["step"] == 2 and state["exp_avg"].abs().sum() > 0
    assert same(run.weights(), torch.load(saved / "fsdp.pt"))


def test_blocks_that_ranks_saved_are_resumed_by_one_process(saved):
    run = Run(**IN_BLOCKS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of random states
        with Checkpoints(saved / "in blocks", run.model, run.optimizer, scheduler=run.scheduler) as checkpoints:
            assert checkpoints.load() == 1
    kinds = {x.dtype for x in states(run).values()}
    assert torch.uint8 in kinds and same(states(run), torch.load(saved / "blocks.pt"))


SPLIT = dict(optimizer="torch", vocab_size=98, tie_word_embeddings=False)


def on_four_ranks(folder):
    """FSDP2 over tensor parallelism, 2 x 2."""
    mesh = make_mesh(tp=2, device_type="cpu")
    run, other = (Run(spread=lambda model: parallelize(model, mesh), seed=seed, **SPLIT) for seed in (0, 1))
    run.step()
    run.save(folder / "run", data=Data())
    assert other.load(folder / "run") == 1
    weights = run.weights()
    assert same(other.weights(), weights)
    moments = {name: run.optimizer.state[p]["exp_avg"].full_tensor() for name, p in run.model.named_parameters()}
    if dist.get_rank() == 0:
        torch.save((weights, moments), folder / "expected.pt")


@pytest.mark.slow
def test_shards_of_two_dimensions_on_one_process(tmp_path):
    on_ranks(tmp_path, lambda: on_four_ranks(tmp_path), 4)
    run = Run(seed=2, **SPLIT)
    with pytest.warns(UserWarning, match=r"4 ranks \(dp_shard 2, tp 2"):
        assert run.load(tmp_path / "run") == 1
    weights, moments = torch.load(tmp_path / "expected.pt")
    assert same(run.weights(), weights)
    assert same({name: run.optimizer.state[p]["exp_avg"] for name, p in run.model.named_parameters()}, moments)
