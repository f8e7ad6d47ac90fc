"""A step of Gated DeltaNet: convolution, gates and delta rule of the next tokens, and the rings that it writes."""

import pytest
import torch

from ligermodels.errors import InputError
from ligermodels.kernels import causal_conv, delta_gates, gated_delta_rule
from ligermodels.kernels.recurrent.gated_delta_step import gated_delta_step, gated_delta_step_reference
from tests.kernels.on_gpu import never_waits

SIZES = dict(key_heads=2, heads=6, keys=24, values=40)


def inputs(device, length, *, rows=1, width=4, states=1, key_heads=1, heads=2, keys=16, values=16, dtype=torch.float32):
    """((qkv, a, b) of tokens, parts of one tensor as a projection leaves them; weight, A_log, dt_bias; two rings)."""
    channels = 2 * key_heads * keys + heads * values
    tokens = torch.randn(rows, length, channels + 2 * heads, device=device).to(dtype).split([channels, heads, heads], 2)
    weight, A_log, dt_bias = (torch.randn(*size).to(device) for size in ((channels, 1, width), (heads,), (heads,)))
    conv = torch.randn(rows, width - 1 + states, channels, device=device).to(dtype)
    return tokens, (weight, A_log, dt_bias), (conv, torch.randn(rows, states, heads, keys, values, device=device))


def step(op, tokens, weights, rings, ends, **options):
    qkv, a, b = tokens
    return op(qkv, weights[0], a, b, *weights[1:], *rings, ends, **options)


def columns(ends, device):
    return torch.tensor(ends, dtype=torch.int32, device=device)


def run(tokens, weights, rings, sizes, begin=0, **options):
    """Passes of `sizes` tokens of each row from column `begin` on: the outputs of all tokens."""
    out, end = [], 0
    for size in sizes:
        ends = columns([begin + end + 1] * len(tokens[0]), tokens[0].device)
        now = [x[:, end : end + size] for x in tokens]
        out.append(step(gated_delta_step, now, weights, rings, ends, **options))
        end += size
    return torch.cat(out, 1)


def test_a_text_token_by_token(device, poison):
    """From the first token on, the ops of a whole text compute the same: rings of zeros have no token before it."""
    (qkv, a, b), (weight, A_log, dt_bias), rings = inputs(device, 11, rows=2, states=2, **SIZES)
    q, k, v = causal_conv(qkv, weight, activation="silu").split([48, 48, 240], 2)
    q, k, v = (x.unflatten(2, (-1, size)) for x, size in ((q, 24), (k, 24), (v, 40)))
    expected, last = gated_delta_rule(q, k, v, *delta_gates(a, b, A_log, dt_bias))
    rings = [x.zero_() for x in rings]
    out = run((qkv, a, b), (weight, A_log, dt_bias), rings, [1, 2, 1, 1, 2, 2, 1, 1])
    close = dict(rtol=1e-4, atol=1e-5)  # fp32 sums in another order
    torch.testing.assert_close(out, expected, **close)
    torch.testing.assert_close(rings[1][:, 10 % 2], last, **close)
    for column in range(6, 11):
        assert torch.equal(rings[0][:, column % 5], qkv[:, column])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("states", [1, 2, 5])
def test_rows_have_columns_of_their_own(device, poison, dtype, states):
    """One token of each of three rows, anywhere in its rings, against the reference."""
    tokens, weights, rings = inputs(device, 1, rows=3, states=states, dtype=dtype, **SIZES)
    ends, (conv, state) = columns([1, 17, 40], device), [x.clone() for x in rings]
    expected = step(gated_delta_step_reference, tokens, weights, rings, ends)
    out = step(gated_delta_step, tokens, weights, (conv, state), ends)
    assert torch.equal(conv, rings[0])
    # The dtype's rounding of q, k, v and beta may differ by an ulp; in fp32 sums have another order.
    close = dict(rtol=1e-4, atol=1e-5) if dtype == torch.float32 else dict(rtol=2**-6, atol=2**-6)
    torch.testing.assert_close(out, expected, **close)
    torch.testing.assert_close(state, rings[1], **close)


@pytest.mark.parametrize(
    "width, dtype", [(1, torch.float32), (2, torch.float32), (4, torch.float32), (4, torch.bfloat16)], ids=str
)
def test_tokens_at_once_are_single_steps(device, poison, dtype, width):
    """To the bit, also the states after each; and back to any of them, other tokens follow as if nothing had been."""
    tokens, weights, rings = inputs(device, 12, width=width, states=5, dtype=dtype, **SIZES)
    single, at_once = ([x.clone() for x in rings] for _ in range(2))
    first = run([x[:, :8] for x in tokens], weights, single, [1] * 8)
    after = {8: [x.clone() for x in single]}
    for length in range(8, 12):
        last = run([x[:, length : length + 1] for x in tokens], weights, single, [1], length)
        first = torch.cat([first, last], 1)
        after[length + 1] = [x.clone() for x in single]
    assert torch.equal(first, run(tokens, weights, at_once, [2, 5, 5]))
    assert all(map(torch.equal, single, at_once))
    for length in range(8, 12):
        others = inputs(device, 5, dtype=dtype, **SIZES)[0]
        again = run(others, weights, [x.clone() for x in at_once], [5], length)
        assert torch.equal(again, run(others, weights, after[length], [1] * 5, length))


def test_writes_only_its_columns(device):
    """Of rows in a larger batch; rings that the kernel cannot write in place raise, and so do too many tokens."""
    tokens, weights, (conv, state) = inputs(device, 2, rows=4, states=3)
    kept, two, ends = (conv.clone(), state.clone()), [x[:2] for x in tokens], columns([9, 9], device)
    step(gated_delta_step, two, weights, (conv[1:3], state[1:3]), ends)
    for new, old, written in ((conv, kept[0], [8 % 6, 9 % 6]), (state, kept[1], [8 % 3, 9 % 3])):
        changed = (new != old).flatten(2).any(2)
        wanted = torch.zeros_like(changed)
        wanted[1:3, written] = True
        assert torch.equal(changed, wanted)
    for wrong, message in (
        ((conv[1:3].half(), state[1:3]), "conv has"),
        ((conv[1:3], state[1:3].half()), "state has"),
        ((conv[1:3], state[1:3].mT.contiguous().mT), "state has"),
        ((conv[1:3, :4], state[1:3, :1]), "1 <= T <= N"),
    ):
        with pytest.raises(InputError, match=message):
            step(gated_delta_step, two, weights, wrong, ends)


@pytest.mark.gpu
@pytest.mark.parametrize("rows, tokens, states", [(1, 1, 1), (1, 2, 2), (8, 1, 1)])
def test_a_graph_that_loads_the_rings_early(device, rows, tokens, states):
    """As in decoding: each pass begins with a launch that does not overlap. The same bits as without, by the host."""
    sizes = dict(key_heads=16, heads=32, keys=128, values=128, dtype=torch.bfloat16)
    given, weights, rings = inputs(device, tokens * 100, rows=rows, states=states, **sizes)
    found = []
    for captured in (False, True):
        own, ends, out = [x.clone() for x in rings], columns([1 - tokens] * rows, device), []
        now = [x[:, :tokens].clone() for x in given]

        def once(own=own, ends=ends, now=now, rings_are_ready=captured):
            ends.add_(tokens)
            return step(gated_delta_step, now, weights, own, ends, rings_are_ready=rings_are_ready)

        # Compiles the kernel, which may synchronise, and not in a graph.
        step(gated_delta_step, now, weights, [x.clone() for x in rings], ends + tokens, rings_are_ready=captured)
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = once()
        for i in range(100):
            for mine, x in zip(now, given, strict=True):
                mine.copy_(x[:, i * tokens : (i + 1) * tokens])
            if captured:
                graph.replay()
            else:
                with never_waits():
                    result = once()
            out.append(result.clone())
        found.append([torch.cat(out, 1), *own])
    assert all(map(torch.equal, *found))
