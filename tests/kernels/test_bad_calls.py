"""Arguments that do not fit, by op: each raises an InputError that says what is wrong, where.

A case of BAD_CALLS is the message of the error, and what is changed in a small case that fits: a dict of arguments, or
a function of the tensors of that case that returns one; None leaves an argument out.
"""

import dataclasses
import math
import random
import re
import types
from collections.abc import Callable

import pytest
import torch

from ligermodels import kernels
from ligermodels.errors import InputError
from ligermodels.kernels.linear import nf4, quantized
from ligermodels.kernels.optimizer import adamw
from ligermodels.kernels.optimizer.rounding import ShardLayout
from tests.kernels.cases import Case, Maker
from tests.kernels.judge import as_dtype, failures, run
from tests.kernels.ops import OPS, complete

TAKEN = {
    ("glu", "gate_up", "device"), ("activate", "x", "device"), ("route", "logits", "device"),  # the only tensor
    ("activate", "x", "shape"), ("route", "logits", "shape"),
    ("embedding", "ids", "shape"), ("embedding", "weight", "shape"),  # any width will do
    ("route by groups", "logits", "shape"),  # the groups do not fit it
}  # fmt: skip
"""(op, tensor, property) that the op accepts whatever the other arguments are."""

IDS = {
    "cross_entropy": "labels", "linear_cross_entropy": "labels", "linear_logprobs": "labels", "jsd": "labels",
    "linear_jsd": "labels", "embedding": "ids", "moe_experts": "experts",
    "moe_experts with biases": "experts",
}  # fmt: skip
"""The argument that holds indices."""

Change = dict | Callable[..., dict]
NO_ACTIVATION: list[tuple[str, Change]] = [("activation='relu'; supported are 'silu'", {"activation": "relu"})]
OF_A_LOSS: list[tuple[str, Change]] = [
    ("reduction='avg'", {"reduction": "avg"}),
    ("softcap=0.0", {"softcap": 0.0}),
    ("one number", {"reduction": "mean", "num_items_in_batch": torch.tensor([3, 4])}),
]
OF_A_HEAD: list[tuple[str, Change]] = [
    ("accum_dtype", {"accum_dtype": torch.float16}),
    ("workspace_bytes=0", {"workspace_bytes": 0}),
    ("num_valid=-1", {"num_valid": -1}),
]
SWAPPED: tuple[str, Change] = ("in Liger's order", lambda x, weight, **rest: {"x": weight, "weight": x})
OF_AN_MLP = [*NO_ACTIVATION, ("workspace_bytes is 0; expected .* positive", {"workspace_bytes": 0})]


def attention(*shapes, **options) -> Callable[..., dict]:
    """q and k, which is v too, of these shapes, without the masks of the case."""
    return lambda key_mask, **rest: {
        "q": torch.zeros(shapes[0], dtype=torch.float16), "k": torch.zeros(shapes[1], dtype=torch.float16),
        "v": torch.zeros(shapes[1], dtype=torch.float16), "key_mask": None,
    } | options  # fmt: skip


Q, K, ONE = (2, 4, 4, 8), (2, 4, 2, 8), ((1, 4, 4, 8), (1, 4, 2, 8))
BAD_CALLS: dict[str, list[tuple[str, Change]]] = {
    "rms_norm": [("N >= 1", lambda x, weight: {"x": x[..., :0]})],
    "add_rms_norm": [("residual has shape \\(1, 8\\)", lambda x, residual, weight: {"residual": residual[:1]})],
    "rope": [
        ("num_heads", {"num_heads": 7}),
        ("\\[1 or 2, 3, R/2\\]", lambda cos, sin, **rest: {"cos": cos[0], "sin": sin[0]}),
        ("half width", lambda cos, sin, **rest: {"cos": torch.cat([cos, cos], -1), "sin": torch.cat([sin, sin], -1)}),
        ("overwrite a leaf", lambda qkv, **rest: {"qkv": qkv.clone().requires_grad_(), "inplace": True}),
    ],
    "rope_qk": [("of the same B, S, D, floating dtype", lambda k, **rest: {"k": k.double()})],
    "glu": [
        *NO_ACTIVATION,
        ("expected floating point \\[..., 2F\\]", lambda gate_up: {"gate_up": gate_up[:, :7]}),
    ],
    "glu of two tensors": [("up has shape \\(1, 8\\)", lambda gate_up, up: {"up": up[:1]})],
    "activate": [*NO_ACTIVATION, ("F >= 1", lambda x: {"x": x[:, :0]})],
    "gated_mlp": [
        *OF_AN_MLP,
        ("gate_up_weight has 7 rows.*even number", lambda gate_up_weight, **rest: {
            "gate_up_weight": gate_up_weight[:7], "gate_up_bias": None,
        }),
    ],
    "gated_mlp of two weights": [
        *OF_AN_MLP,
        ("gate_weight has 4 and 3 rows", lambda up_weight, **rest: {"up_weight": up_weight[:3]}),
    ],
    "mlp": OF_AN_MLP,
    "attention": [
        ("expected q \\[B, S, HQ, D\\] and k, v", attention((2, 4, 8), K)),
        ("4 query heads must be a multiple of the 3 key", attention(Q, (2, 4, 3, 8))),
        ("window=0", attention(Q, K, window=0)),
        ("key_mask has shape \\(2, 5\\)", attention(Q, K, key_mask=torch.ones(2, 5) > 0)),
        ("together has shape \\(2, 5\\)", attention(Q, K, together=torch.ones(2, 5))),
        ("sinks has shape \\(2,\\)", attention(Q, K, sinks=torch.zeros(2))),
        ("sinks has shape \\(4,\\) and dtype torch.int64", attention(Q, K, sinks=torch.zeros(4, dtype=torch.int64))),
        ("end to end in one row", attention(Q, K, cu_seqlens=torch.tensor([0, 4]).int())),
        ("runs from 0 to 3", attention(*ONE, cu_seqlens=torch.tensor([0, 3]).int())),
    ],
    "cross_entropy": OF_A_LOSS,
    "linear_cross_entropy": [
        SWAPPED,
        *OF_A_LOSS, *OF_A_HEAD,
        ("cast one", lambda weight, **rest: {"weight": weight.double()}),
    ],
    "linear_logprobs": [*OF_A_HEAD, SWAPPED, ("temperature=0.0", {"temperature": 0.0})],
    "kl_div": [("reduction='avg'", {"reduction": "avg"})],
    "jsd": [("reduction='batchmean'", {"reduction": "batchmean"})],
    "linear_jsd": [
        *OF_A_HEAD,
        ("temperature=0.0", {"temperature": 0.0}),
        ("teacher_softcap=0.0", {"teacher_softcap": 0.0}),
        ("weight_hard=0.5", {"labels": None, "weight_hard": 0.5}),
        ("divergence='kl' is not supported; supported: jsd, tv, cosine", {"divergence": "kl"}),
        ("smaller than student_weight", lambda teacher_weight, teacher_bias, **rest: {
            "teacher_weight": teacher_weight[:4], "teacher_bias": teacher_bias[:4],
        }),
        ("cast one", lambda student_weight, **rest: {"student_weight": student_weight.double()}),
    ],
    "embedding": [("padding_idx=7, but the table has 7 rows", {"padding_idx": 7})],
    "route": [("top_k is 6", {"top_k": 6})],
    "route by groups": [
        ("top_k is 9 for 8 experts", {"top_k": 9}),
        ("top_k is 5, but 2 of 4 groups have 4 experts", {"top_k": 5}),
        ("score is 'tanh'; supported: 'softmax', 'sigmoid'", {"score": "tanh"}),
        ("groups is 3 and groups_kept 2 for 8 experts", {"groups": 3}),
        ("groups is 8 .* 2 or more", {"groups": 8}),
        ("groups_kept 5", {"groups_kept": 5}),
        ("dropped is 1.0; expected -inf or 0.0", {"dropped": 1.0}),
        ("eps is 1e-06 .* 0 with 'softmax'", {"score": "softmax"}),
        ("scale nan", {"scale": math.nan}),
        ("bias has .*float64.*; expected torch.float32 \\[8\\]", lambda bias, **rest: {"bias": bias.double()}),
    ],
    "moe_experts": [
        *NO_ACTIVATION,
        ("one dtype", lambda gate_up_proj, **rest: {"gate_up_proj": gate_up_proj.double()}),
        ("\\[E, H, I\\]", lambda x, **rest: {"x": x[:, 1:]}),
    ],
    "moe_experts with biases": [
        ("gate_up_proj_bias has .*; expected \\(5, 8\\)", lambda gate_up_proj_bias, **rest: {
            "gate_up_proj_bias": gate_up_proj_bias[:, 1:]
        }),
        ("down_proj_bias torch.float64; outside", lambda down_proj_bias, **rest: {
            "down_proj_bias": down_proj_bias.double()
        }),
        ("no gate", lambda gate_up_proj, gate_up_proj_bias, **rest: {
            "gate_up_proj": gate_up_proj[:, :4], "gate_up_proj_bias": gate_up_proj_bias[:, :4]
        }),
    ],
}  # fmt: skip


# Ops that have no entry in the table: messages, and calls.

W = torch.randn(8, 16)
IN_NF4 = nf4.quantize_nf4(W)
MOMENT = torch.zeros(4, dtype=torch.bfloat16)


def of_nf4(changed=None, **options) -> Callable:
    return lambda: dataclasses.replace(IN_NF4, **(changed or {})).dequantize(**options)


def step(grad=MOMENT, **options) -> Callable:
    numbers = dict(step=1, lr=0.0, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    return lambda: adamw.adamw(MOMENT, grad, MOMENT, MOMENT, **numbers, **options)


def of_a_shard(**change) -> Callable:
    """The second of two shards of 64 ids each."""
    group = types.SimpleNamespace(rank=lambda: 1, size=lambda: 2)
    call = dict(x=torch.zeros(3, 5), weight=torch.zeros(64, 5), labels=torch.zeros(3).long(), first_id=64, group=group)
    return lambda: kernels.vocab_parallel_cross_entropy(**call | change)


OTHER_CALLS: list[tuple[str, Callable]] = [
    ("float64", lambda: nf4.quantize_nf4(W.double())),
    (r"\(0, 16\)", lambda: nf4.quantize_nf4(W[:0])),
    ("Freeze it first", lambda: nf4.quantize_nf4(W.clone().requires_grad_())),
    ("NaN or infinity", lambda: nf4.quantize_nf4(W / 0)),
    ("block=48", lambda: nf4.quantize_nf4(W, block=48)),
    (r"expected uint8 \(64, 1\)", of_nf4(dict(packed=IN_NF4.packed[1:]))),
    ("float32", of_nf4(dict(packed=IN_NF4.packed.float()))),
    ("and 2 elements", of_nf4(dict(absmax=IN_NF4.absmax[:1]))),
    (r"\(8, 15\)", of_nf4(out=torch.zeros(8, 15))),
    ("contiguous", of_nf4(out=torch.empty(16, 8).t())),
    ("float16", of_nf4(out=W, dtype=torch.float16)),
    ("int3", lambda: quantized.quantize(W, "int3")),
    ("infinity", lambda: quantized.quantize(W / 0, "int8")),
    ("gradient", lambda: quantized.quantize(W.clone().requires_grad_(), "int8")),
    ("expected", lambda: quantized.quantize(W[0], "int8")),
    ("contiguous", lambda: quantized.quantize(W, "int8").dequantize(out=torch.empty(16, 8).t())),
    (r"grad torch.bfloat16 \(3,\).* expected floating dtypes of one shape", step(MOMENT[:3])),
    (r"torch.bfloat16 \(.*expected floating dtypes without exponents, or uint8", step(exponents=(MOMENT, MOMENT))),
    ("supported: stochastic, nearest", step(rounding="up")),
    (r"ShardLayout\(first=0, inner=8, stride=4\); expected", step(layout=ShardLayout(0, 8, 4))),
    ("give vocab_size", of_a_shard(first_id=60)),
    ("no shard of a vocabulary of 128", of_a_shard(first_id=65, vocab_size=128)),
    ("no shard", of_a_shard(first_id=-1, vocab_size=128)),
    ("no shard", of_a_shard(weight=torch.zeros(0, 5), vocab_size=128)),
    ("'mean' or 'sum'", of_a_shard(reduction="none")),
]


@pytest.mark.parametrize(("message", "call"), OTHER_CALLS, ids=[message for message, _ in OTHER_CALLS])
def test_bad_calls_of_other_ops_raise(message, call):
    with pytest.raises(InputError, match=message):
        call()


def refused(call: Callable, case: Case, change: dict, *shown: str) -> str | None:
    """Why the InputError that `change` of an argument should raise is not as it should be, if so.

    shown: what it must name: the argument, and what it was in any of these forms.
    """
    argument = next(iter(change))
    tensors = {n: t.detach() for n, t in case.tensors.items()}
    try:
        call(**(tensors | case.options | change))
    except InputError as error:
        words = rf"\b{argument}\b|\b{argument.replace('_', ': .*')}\b"  # "student: x ..." is student_x
        if not re.search(words, str(error)):
            return f"does not name {argument}: {error}"
        return None if any(form in str(error) for form in shown) else f"does not show {shown[0]}: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.checks])
def test_wrong_tensors_raise(device, name):
    """Each tensor argument in turn is of another dtype, a narrower shape, or on another device."""
    op, case = OPS[name], complete(name, Maker(random.Random(0), torch.float32, device))
    if torch.float32 not in op.dtypes:
        case.tensors |= as_dtype(case.tensors, torch.float16)
    op.call(**case.tensors, **case.options)
    found = []
    for argument, t in ((n, t.detach()) for n, t in case.tensors.items()):
        other = t.long() if t.is_floating_point() else t.float()
        narrow, elsewhere = t[..., :-1], t.to("meta")
        for kind, wrong, *shown in (
            ("dtype", other, str(other.dtype)),
            ("shape", narrow, *(str(f(size)) for f in (tuple, list) for size in (narrow.shape, narrow.shape[-1:]))),
            ("device", elsewhere, str(elsewhere.device)),
        ):
            if (name, argument, kind) not in TAKEN:
                why = refused(op.call, case, {argument: wrong}, *shown)
                found += [f"{argument}, {kind}: {why}"] if why else []
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls_raise(device, name):
    """InputError that says what is wrong, where."""
    case = complete(name, Maker(random.Random(0), torch.float32, device))
    tensors = {n: t.detach() for n, t in case.tensors.items()}
    with failures() as failed:
        for message, change in BAD_CALLS[name]:
            arguments = tensors | case.options | (change(**tensors) if callable(change) else change)
            with failed(message), pytest.raises(InputError, match=message):
                OPS[name].call(**{n: value for n, value in arguments.items() if value is not None})


@pytest.mark.parametrize("bad", [-7, 7])
@pytest.mark.parametrize("name", IDS)
def test_ids_out_of_range(without_triton, name, bad):
    """On the CPU they raise InputError, which names them. What a GPU does with them is in each op's docstring."""
    op, argument = OPS[name], IDS[name]
    case = complete(name, Maker(random.Random(0), torch.float32, "cpu"))
    ids = case.tensors[argument].clone()
    ids.view(-1)[3] = bad
    assert not refused(op.call, case, {argument: ids}, str(bad))


@pytest.mark.parametrize("bad", [-7, 7])
@pytest.mark.parametrize("name", IDS)
def test_ids_out_of_range_of_kernels(device, name, bad):
    """Nothing synchronises: what such an id decides is NaN, and what it does not is as it was."""
    op, argument = OPS[name], IDS[name]
    case = complete(name, Maker(random.Random(0), torch.float32, device))
    right, upstream = case.tensors[argument], {}
    expected = run(op.call, case, upstream)
    case.tensors[argument] = right.clone()
    case.tensors[argument].view(-1)[3] = bad
    actual = run(op.call, case, upstream)
    first, other = actual["output 0"], expected["output 0"]
    if first.dim() == 0:
        assert first.isnan()
    else:
        of_experts = name.startswith("moe_experts")
        first, other = (y.flatten(0, len(right.shape) - 1 if not of_experts else 0) for y in (first, other))
        at = 3 if not of_experts else 3 // right.shape[1]
        rest = torch.arange(len(first), device=device) != at
        assert first[at].isnan().all()
        # The rows of an expert may be in other rows of its tiles.
        torch.testing.assert_close(first[rest], other[rest], rtol=1e-6 if of_experts else 0, atol=1e-6)
