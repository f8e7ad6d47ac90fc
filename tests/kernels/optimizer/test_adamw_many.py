"""A step on many parameters in few launches: the bits of one launch for each, of all kinds, wherever they move."""

import pytest
import torch
from torch import nn

from ligermodels.errors import InputError
from ligermodels.kernels.optimizer import adamw_many as many_file
from ligermodels.kernels.optimizer.adamw import adamw
from ligermodels.kernels.optimizer.adamw_many import Parameter, Tables, adamw_many
from ligermodels.kernels.optimizer.rounding import ShardLayout
from ligermodels.training import AdamW
from tests.kernels.on_gpu import never_waits

OPTIONS = dict(lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
BF16, FP32, FP16, FP64 = torch.bfloat16, torch.float32, torch.float16, torch.float64


def parameter(device, shape, weight, moments=None, *, masters=False, **options):
    moments = moments or weight
    w = torch.randn(shape, device=device).to(weight)
    m, v = (torch.zeros(shape, dtype=moments, device=device) for _ in "12")
    r = torch.zeros_like(w, dtype=torch.int16) if masters else None
    exponents = None
    if moments == torch.uint8:
        blocks = *shape[:-1], shape[-1] // 64
        exponents = tuple(torch.zeros(blocks, dtype=torch.uint8, device=device) for _ in "12")
    return Parameter(w, torch.randn(shape, device=device).to(weight), m, v, r, exponents, **options)


def mixture(device):
    """Several of each kind but the last three, which have launches of their own."""
    kinds = [
        dict(shape=(37, 128), weight=BF16), dict(shape=(3, 16), weight=BF16), dict(shape=(13,), weight=BF16),
        dict(shape=(1315,), weight=BF16), dict(shape=(37, 128), weight=BF16, masters=True),
        dict(shape=(5, 128), weight=BF16, masters=True), dict(shape=(1024,), weight=FP32),
        dict(shape=(2, 1040), weight=FP32), dict(shape=(37, 128), weight=BF16, moments=torch.uint8),
        dict(shape=(3, 64), weight=BF16, moments=torch.uint8),
        dict(shape=(9, 48), weight=BF16, layout=ShardLayout(48, 48, 96)),
        dict(shape=(2, 48), weight=BF16, layout=ShardLayout(0, 48, 96)),
        dict(shape=(16,), weight=FP16), dict(shape=(5, 7), weight=FP64), dict(shape=(0, 8), weight=BF16),
    ]  # fmt: skip
    return [parameter(device, **kind, number=i) for i, kind in enumerate(kinds)]


def copies(parameters):
    def copy(x):
        return tuple(map(copy, x)) if type(x) is tuple else x.clone() if isinstance(x, torch.Tensor) else x

    return [Parameter(*map(copy, p)) for p in parameters]


@pytest.fixture
def launches(monkeypatch):
    """The numbers of programs of the launches for many."""
    seen = []

    def launch(kernel, grid, *args, **options):
        seen.append(grid[0])
        original(kernel, grid, *args, **options)

    original = many_file.launch
    monkeypatch.setattr(many_file, "launch", launch)
    return seen


@pytest.mark.parametrize("options", [dict(seed=2**40 + 7), dict(rounding="nearest")], ids=str)
def test_many_have_the_bits_of_each(device, launches, options):
    many = mixture(device)
    each, tables = copies(many), Tables()
    for step in (1, 2, 3):
        extra = dict(options, factor=torch.tensor(0.5, device=device))
        lr = torch.tensor(1e-2, device=device) if step == 3 else 1e-2
        if step == 2:  # gradients move, and one is not contiguous any more
            many = [p._replace(grad=p.grad * 0.5) for p in many]
            many[0] = many[0]._replace(grad=many[0].grad.T.contiguous().T)
            each = [q._replace(grad=p.grad.clone()) for p, q in zip(many, each, strict=True)]
        adamw_many(many, tables, step=step, **OPTIONS | extra | dict(lr=lr))
        for p in each:
            adamw(*p[:6], step=step, number=p.number, layout=p.layout, **OPTIONS | extra | dict(lr=lr))
        for p, q in zip(many, each, strict=True):
            for x, y in zip(p.tensors, q.tensors, strict=True):
                assert (x is None) == (y is None) and (x is None or torch.equal(x, y)), (p.weight.shape, p.weight.dtype)
    # Whole and odd sizes in bf16, masters, fp32, 8 bits, and columns. Later the first has a launch of its own.
    assert launches[:6] == [5 + 1, 1 + 2, 5 + 1, 1 + 3, 5 + 1, 1 + 1] and len(launches) == 6 + 5 + 5


def test_tables_stay_while_nothing_moves(device, launches):
    many, tables = mixture(device)[:2], Tables()
    adamw_many(many, tables, step=1, **OPTIONS)
    (of_all,) = tables.launches
    table, row_of = of_all.table, of_all.row_of
    for p in many:
        p.grad.mul_(2)
    adamw_many(many, tables, step=2, **OPTIONS)
    assert of_all.table is table and launches == [6, 6]
    moved = [p._replace(grad=p.grad.clone()) for p in many]
    adamw_many(moved, tables, step=3, **OPTIONS)
    assert tables.launches[0] is of_all and of_all.table is not table and of_all.row_of is row_of
    with pytest.raises(InputError, match="expected floating dtypes of one shape"):
        adamw_many([many[0], many[1]._replace(grad=many[0].grad)], tables, step=4, **OPTIONS)


@pytest.mark.gpu
def test_steps_never_wait():
    """Also where tables are made, and where gradients move."""
    params = [nn.Parameter(torch.randn(64, 64, device="cuda").bfloat16()) for _ in range(5)]
    optimizer = AdamW(params, 1e-2, max_grad_norm=1.0)
    grads = [[torch.randn_like(p) for p in params] for _ in range(3)]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    torch.cuda.synchronize()
    with never_waits():
        for some in grads:
            for p, grad in zip(params, some, strict=True):
                p.grad = grad
            optimizer.step()


def test_the_optimizer_steps_in_few_launches(device, launches):
    """As one optimizer for each parameter does, for which rounding to nearest makes no difference."""
    shapes = [(64, 64), (64,), (33, 128), (9,), (128,)]
    weights = [torch.randn(shape, device=device).bfloat16() for shape in shapes]
    for options in (dict(rounding="nearest"), dict(max_grad_norm=1e9, rounding="nearest", state_dtype=FP32)):
        ours, theirs = ([nn.Parameter(w.clone()) for w in weights] for _ in "12")
        one, several = AdamW(ours, 1e-2, **options), [AdamW([p], 1e-2, **options) for p in theirs]
        del launches[:]
        for step in range(3):
            for p, q in zip(ours, theirs, strict=True):
                p.grad = torch.randn_like(p)
                q.grad = p.grad.clone()
            if step == 2:
                ours[1].grad = theirs[1].grad = None  # its count falls back, so that later steps are taken one by one
            for optimizer in (one, *several):
                optimizer.step()
        assert launches == [4 + 1 + 5 + 1, 4 + 1 + 5 + 1, 4 + 5 + 1] and all(map(torch.equal, ours, theirs))
        ours[1].grad = torch.ones_like(ours[1])
        theirs[1].grad = ours[1].grad.clone()
        for optimizer in (one, *several):
            optimizer.step()
        assert len(launches) == 3 and all(map(torch.equal, ours, theirs))
