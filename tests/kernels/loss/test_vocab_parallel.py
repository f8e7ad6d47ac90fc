"""A head whose vocabulary is spread over processes: the loss and the gradients of the whole head in one process.

Two threads that take turns show what the processes compute, on the CPU as on one GPU; processes over gloo and, where
there are two GPUs, over NCCL show that they meet.
"""

import dataclasses
import datetime
import functools
import importlib
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ligermodels.errors import InputError
from ligermodels.kernels import (
    linear_cross_entropy_reference,
    vocab_parallel_cross_entropy,
    vocab_parallel_cross_entropy_reference,
)
from tests.kernels.cases import IGNORE
from tests.kernels.interpreter import CHUNK
from tests.kernels.judge import FP32_INTERPRETED, ON_GPU
from tests.kernels.on_gpu import assert_never_waits
from tests.kernels.oracle import assert_as_exact
from tests.kernels.seen import Seen, adding_in_place
from tests.parallel.ranks import one_rank
from tests.processes import spawn

HIDDEN = 32
HALF = torch.bfloat16 if ON_GPU else torch.float16  # the interpreter truncates where it should round to bf16


@dataclasses.dataclass
class Case:
    """A call: x [2, tokens / 2, HIDDEN], a head whose rows the ranks have in `shards`; `trained` have gradients."""

    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    tokens: int = 40
    shards: tuple[int, ...] = (64, 64)
    dtype: torch.dtype = torch.float64
    trained: tuple[str, ...] = ("x", "weight", "bias")
    ignored: float = 0.3
    upstream: float = 2.5
    wrong_label: int | None = None  # at [1, 3]

    def tensors(self, device="cpu", dtype=None):
        draw, vocab = torch.Generator().manual_seed(0), sum(self.shards)
        shapes = {"x": (2, self.tokens // 2, HIDDEN), "weight": (vocab, HIDDEN), "bias": (vocab,)}
        scales = {"x": 1.0, "weight": 0.4, "bias": 1.0}
        values = {n: torch.randn(s, generator=draw, dtype=torch.float64) * scales[n] for n, s in shapes.items()}
        if "bias" not in self.trained:
            del values["bias"]
        labels = torch.randint(vocab, shapes["x"][:2], generator=draw)
        labels[torch.rand(labels.shape, generator=draw) < self.ignored] = self.options.get("ignore_index", IGNORE)
        if self.wrong_label is not None:
            labels[1, 3] = self.wrong_label
        tensors = {n: t.to(self.dtype).to(device, dtype or self.dtype) for n, t in values.items()}
        return tensors | {"labels": labels.to(device)}

    def of_rank(self, rank, device="cpu"):
        """The arguments of one rank's call."""
        tensors, start = self.tensors(device), sum(self.shards[:rank])
        for name in tensors.keys() & {"weight", "bias"}:
            tensors[name] = tensors[name][start : start + self.shards[rank]]
        tensors = {n: t.detach().requires_grad_(n in self.trained) for n, t in tensors.items()}
        equal = len(set(self.shards)) == 1
        return tensors | self.options | {"first_id": start, "vocab_size": None if equal else sum(self.shards)}

    def whole(self, device="cpu", dtype=None):
        """Loss and gradients of the whole head in one process, in plain PyTorch."""
        tensors = {n: t.requires_grad_(n in self.trained) for n, t in self.tensors(device, dtype).items()}
        options = {n: v for n, v in self.options.items() if n not in OF_THE_RUN}
        return results(linear_cross_entropy_reference, tensors | options, self.upstream)


OF_THE_RUN = {"num_valid", "workspace_bytes", "accum_dtype"}
CASES = {
    "mean": Case(),
    "sum, capped, with z-loss": Case(dict(reduction="sum", softcap=2.0, z_loss=0.1)),
    "items": Case(dict(num_items_in_batch=13, ignore_index=5)),
    "uneven shards": Case(dict(softcap=4.0), shards=(60, 68)),
    "all ignored": Case(ignored=1.1),
    "all of one shard": Case(shards=(127, 1), ignored=0.0),
    "no tokens": Case(tokens=0),
    # Two chunks of 64 logits fit, and one of 128: all ranks must take the same length.
    "uneven shards of two lengths of chunk": Case(
        dict(workspace_bytes=2 * CHUNK * 64 * 8), tokens=CHUNK + 12, shards=(60, 68)
    ),
    "chunks": Case(dict(workspace_bytes=1), tokens=CHUNK + 12, dtype=torch.float32),
    "of weight alone": Case(trained=("weight",), shards=(60, 68)),
    "ignored rows dropped": Case(dict(num_valid=CHUNK), tokens=2 * CHUNK, ignored=0.8),
    "three ranks": Case(dict(softcap=4.0), shards=(33, 32, 30)),
    "smoothed": Case(dict(label_smoothing=0.2)),
    "smoothed, uneven, capped, with z-loss": Case(
        dict(label_smoothing=0.3, softcap=4.0, z_loss=0.1, workspace_bytes=1),
        tokens=CHUNK + 12,
        shards=(33, 32, 30),
    ),
    "smoothed fp32": Case(dict(label_smoothing=0.1, reduction="sum"), dtype=torch.float32, shards=(60, 68)),
    "half precision, sums in chunks": Case(
        dict(reduction="sum", workspace_bytes=1), tokens=96, dtype=HALF, trained=("x", "weight")
    ),
}
each_case = pytest.mark.parametrize("name", CASES)


def results(op, call, upstream):
    """The loss, and the gradients of `upstream` times the loss."""
    loss = op(**call)
    trained = [n for n, t in call.items() if isinstance(t, torch.Tensor) and t.requires_grad]
    found = torch.autograd.grad(upstream * loss, [call[n] for n in trained]) if trained else ()
    return {"loss": loss.detach()} | dict(zip(trained, found, strict=True))


def joined(ranks):
    """What the ranks found: one loss, the parts of dx added up, the rows of dweight and dbias concatenated."""
    assert all(torch.equal(one["loss"], ranks[0]["loss"]) for one in ranks)
    whole = {"loss": ranks[0]["loss"]}
    for name in ranks[0].keys() - {"loss"}:
        parts = [one[name].to(ranks[0][name].device) for one in ranks]
        whole[name] = sum(parts) if name == "x" else torch.cat(parts)
    return whole


def assert_right(case, ranks, device="cpu"):
    actual, exact = joined(ranks), case.whole(device, torch.float64)
    assert actual.keys() == exact.keys()
    if case.dtype == torch.float64:
        for name, value in exact.items():
            torch.testing.assert_close(actual[name], value, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
        return
    eager = case.whole(device)
    for name, value in exact.items():
        allowed = eager[name]
        if case.dtype == torch.float32 and not ON_GPU:
            allowed = value + FP32_INTERPRETED * (allowed.double() - value)
        assert_as_exact(actual[name], allowed, value, name, terms=max(case.tokens, sum(case.shards)))


class Turns:
    """Ranks as threads of one process, of which one runs at a time, until it waits for what the others gather."""

    def __init__(self, ranks):
        self.ranks, self.given = ranks, [None] * ranks
        self.turn, self.meeting = threading.Lock(), threading.Barrier(ranks, timeout=60)

    def gather(self, stats, group):
        self.given[group.rank()] = stats
        self._wait()
        gathered = torch.stack(self.given)
        self._wait()
        return gathered

    def _wait(self):
        self.turn.release()
        try:
            self.meeting.wait()
        finally:
            self.turn.acquire()

    def run(self, work):
        """[work(rank, group) of every rank]"""

        def turn(rank):
            with self.turn:
                try:
                    return work(rank, types.SimpleNamespace(rank=lambda: rank, size=lambda: self.ranks))
                except BaseException:
                    self.meeting.abort()
                    raise

        with ThreadPoolExecutor(self.ranks) as threads:
            return list(threads.map(turn, range(self.ranks)))


@pytest.fixture
def on_ranks(device, monkeypatch):
    """A function: (case, compute) -> what compute(op, call, upstream) of each rank is, and what it made torch do."""

    def run(case, compute=results):
        turns, seen = Turns(len(case.shards)), [Seen() for _ in case.shards]
        module = importlib.import_module("ligermodels.kernels.loss.vocab_parallel_cross_entropy")
        monkeypatch.setattr(module, "_gather", turns.gather)

        def work(rank, group):
            call = case.of_rank(rank, device) | {"group": group}
            with seen[rank]:
                return compute(vocab_parallel_cross_entropy, call, case.upstream)

        return turns.run(work), seen

    return run


@each_case
def test_as_in_one_process(on_ranks, device, poison, name):
    assert_right(CASES[name], on_ranks(CASES[name])[0], device)


@pytest.mark.parametrize("trained, matmuls", [(("x", "weight"), 3), (("x",), 2), (("weight",), 2), ((), 1)], ids=str)
def test_what_is_not_computed(on_ranks, trained, matmuls):
    """The largest tensor has the shard's logits of one chunk; a gradient that nobody needs costs nothing."""
    case = Case(dict(workspace_bytes=1), tokens=CHUNK + 12, trained=trained, dtype=torch.float32)
    _, seen = on_ranks(case)
    for one in seen:
        assert len(one.matmuls) == 2 * matmuls
        assert one.largest == 4 * 64 * max(CHUNK, HIDDEN)  # or a view of the shard


def test_fp16_gradients_do_not_underflow(on_ranks, device):
    """One of 2e6 tokens: p / 2e6 is below fp16, but not times a loss scaler's 65536."""
    case = Case(dict(num_items_in_batch=2_000_000), dtype=torch.float16, trained=("x", "weight"), upstream=2.0**16)
    actual, exact = joined(on_ranks(case)[0]), case.whole(device, torch.float64)
    for name in case.trained:
        # fp16 logits near 8 are off by 2^-9; gradients of logits near 1e-5, in fp16's subnormals, by 2^-25.
        assert actual[name].dtype == torch.float16
        assert (actual[name].double() - exact[name]).norm() < 2e-2 * exact[name].norm()


def test_labels_of_no_shard_and_of_two(on_ranks):
    """The loss is NaN on every rank, and so are the gradients of these tokens; as with more labels than announced."""
    for label in (-1, 120):
        for one in on_ranks(Case(dict(reduction="sum"), shards=(60, 60), wrong_label=label))[0]:
            assert one["loss"].isnan() and one["x"][1, 3].isnan().all()
            assert not one["x"][0].isnan().any() and not one["x"][1, 4:].isnan().any()

    def overlapping(op, call, upstream):
        return results(op, call | {"first_id": 0, "vocab_size": 120}, upstream)

    for one in on_ranks(Case(shards=(60, 60), ignored=0.0), overlapping)[0]:
        assert one["loss"].isnan() and one["x"].isnan().all()
    more = Case(dict(num_valid=CHUNK), tokens=CHUNK + 32, ignored=0.1, trained=())
    assert all(one["loss"].isnan() for one in on_ranks(more)[0])


def test_weight_grad_in_place(on_ranks, device):
    """Two micro-batches of two chunks add to one .grad."""
    case = Case(dict(workspace_bytes=1), CHUNK + 12, (60, 68), torch.float32, ("x", "weight"))

    def twice(op, call, upstream):
        (marked,) = adding_in_place(call["weight"])
        for _ in range(2):
            loss = upstream * op(**call | {"weight": marked})
            loss.backward()
        return {"loss": loss.detach(), "weight": marked.grad, "x": call["x"].grad}

    actual, exact = joined(on_ranks(case, twice)[0]), case.whole(device, torch.float64)
    for name in case.trained:
        torch.testing.assert_close(actual[name].double(), 2 * exact[name], rtol=1e-5, atol=1e-5)


# Processes that meet.


@pytest.mark.gpu
def test_never_synchronises(tmp_path):
    call = Case(shards=(128,), dtype=HALF, trained=("x", "weight")).of_rank(0, "cuda")
    tensors = [call.pop(name) for name in ("x", "weight", "labels")]
    with one_rank(tmp_path, "nccl"):
        op = functools.partial(vocab_parallel_cross_entropy, **call, group=dist.group.WORLD)
        assert_never_waits(op, tensors, [torch.ones((), device="cuda")])


BY_REFERENCE = {
    **{name: CASES[name] for name in (
        "mean", "sum, capped, with z-loss", "items", "uneven shards", "all ignored", "no tokens", "of weight alone",
        "smoothed", "smoothed fp32",
    )},
    **{str(dtype): Case(dict(softcap=8.0), dtype=dtype) for dtype in (torch.float32, torch.bfloat16)},
}  # fmt: skip


def meet(rank, folder, backend, names):
    """What the op gives on this rank in the cases of these names, and its reference in its own, goes to a file."""
    torch.set_num_threads(1)
    device = f"cuda:{rank}" if backend == "nccl" else "cpu"
    options = dict(rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))
    dist.init_process_group(backend, init_method=f"file://{folder}/meeting", **options)
    found, group = {}, {"group": dist.group.WORLD}
    for name in names:
        call = CASES[name].of_rank(rank, device) | group
        found[name] = results(vocab_parallel_cross_entropy, call, CASES[name].upstream)
    for name, case in BY_REFERENCE.items() if backend == "gloo" else ():
        call = {n: t for n, t in case.of_rank(rank).items() if n not in OF_THE_RUN} | group
        found["reference", name] = results(vocab_parallel_cross_entropy_reference, call, case.upstream)
        if call["labels"].numel():
            with pytest.raises(InputError, match=r"labels contain 128, which is neither a class in \[0, 128\)"):
                vocab_parallel_cross_entropy_reference(**call | {"labels": torch.full_like(call["labels"], 128)})
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


FEW = ["uneven shards of two lengths of chunk", "half precision, sums in chunks", "smoothed", "smoothed fp32"]


@pytest.mark.parametrize("backend, names", [
    ("gloo", FEW),
    pytest.param("nccl", [name for name in CASES if len(CASES[name].shards) == 2], marks=[
        pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    ]),
], ids=["gloo", "nccl"])  # fmt: skip
def test_two_processes(tmp_path, backend, names):
    """The op, interpreted, without Triton or on GPUs, and its reference."""
    spawn(meet, args=(tmp_path, backend, names), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt", map_location="cpu") for rank in range(2)]
    for name in ranks[0]:
        case = CASES[name] if isinstance(name, str) else BY_REFERENCE[name[1]]
        assert_right(case, [one[name] for one in ranks])
