"""Entries of the table of ops: the gated delta rule, and what is around it in a layer."""

import functools
import itertools

import torch
import torch.nn.functional as F

from ligermodels import kernels
from ligermodels.kernels._triton import accumulator
from ligermodels.kernels.recurrent.gated_delta_rule import MAX_FP32_KEYS
from tests.kernels.cases import Case, Op, Sizes
from tests.kernels.ops.elementwise import row_noise

CHUNK = 64


def documents(length: int) -> list[int]:
    """Bounds of packed documents, of which one is empty."""
    return [0, length // 3, length // 3, length // 2, length]


def by_document(op, tensors, state, cu_seqlens, **options):
    """The results of op for each document alone."""
    return [
        op(*(x[:, begin:end] for x in tensors), state=None if state is None else state[i : i + 1], **options)
        for i, (begin, end) in enumerate(itertools.pairwise(cu_seqlens.tolist()))
    ]


# The gated delta rule.


def eager_gated_delta_rule(q, k, v, g, beta, state=None, *, cu_seqlens=None):
    """The closed form of chunks of 64 tokens; what is multiplied is in the dtype of q, and sums are in fp32."""
    if cu_seqlens is not None:
        outs, states = zip(*by_document(eager_gated_delta_rule, (q, k, v, g, beta), state, cu_seqlens), strict=True)
        return torch.cat(outs, 1), torch.cat(states)
    dtype, low, scale = accumulator(q.dtype), q.dtype, q.shape[3] ** -0.5

    def product(a, b):
        return a.to(low).to(dtype) @ b.to(low).to(dtype)

    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q.to(dtype), k.to(dtype)))
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2).transpose(1, 2) for x in (q * scale, k))
    v, beta, g = v.to(dtype).transpose(1, 2), beta.to(dtype).transpose(1, 2)[..., None], g.to(dtype).transpose(1, 2)
    state = v.new_zeros(*v.shape[:2], k.shape[3], v.shape[3]) if state is None else state.to(dtype)
    outs = [v[:, :, :0]]
    for chunk in range(0, v.shape[2], CHUNK):
        q_, k_, v_, beta_, g_ = (x[:, :, chunk : chunk + CHUNK] for x in (q, k, v, beta, g))
        G = g_.cumsum(-1)
        past = torch.ones(G.shape[-1], G.shape[-1], dtype=torch.bool, device=G.device).tril()
        decay = (G[..., None] - G[..., None, :]).masked_fill(~past, float("-inf")).exp()
        lam, rho = G.exp()[..., None], (G[..., -1:] - G).exp()[..., None]
        eye = torch.eye(G.shape[-1], dtype=dtype, device=G.device)
        A = (beta_ * product(k_, k_.mT) * decay).tril(-1)
        inverse = torch.linalg.solve_triangular(eye + A, eye.expand_as(A), upper=False, unitriangular=True)
        written = product(inverse, beta_ * v_) - product(product(inverse, beta_ * lam * k_), state)
        outs.append(lam * product(q_, state) + product(product(q_, k_.mT) * decay, written))
        state = lam[:, :, -1:] * state + product((rho * k_).mT, written)
    return torch.cat(outs, 2).transpose(1, 2).to(low), state


def terms_of(keys: int) -> int:
    """Of `assert_as_exact`: a gradient passes through about six products, of up to a chunk or `keys` terms each."""
    return 6 * max(CHUNK, keys)


def operand_noise(case: Case, upstream: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """d_g is fp32, but a sum of products whose operands have the dtype of q: an ulp of that. Eager's backward rounds
    only some of them."""
    if not case.tensors["g"].numel():
        return {}
    tensors = {n: t.detach().double().requires_grad_(n == "g") for n, t in case.tensors.items()}
    outputs = eager_gated_delta_rule(**tensors, **case.options)
    (dg,) = torch.autograd.grad(outputs, tensors["g"], [d.double() for d in upstream])
    return {"d_g": torch.finfo(case.tensors["q"].dtype).eps * dg}


def gated_delta_rule_op() -> Op:
    def make(m, rows, *, key_heads, groups, keys, values, state, packed, decay=1.0, beta=2.0, same=False, scale=1.0):
        batch = 1 if packed else m.draw.choice([1, 2])
        heads = key_heads * groups
        if m.device == "cuda" and (keys % 16 or values % 16):
            m.strided = False  # each combination of strides that 16 does not divide compiles all eight kernels again
        if m.dtype == torch.float32:
            keys = min(keys, MAX_FP32_KEYS)
        q, k = (m(batch, rows, key_heads, keys, scale=scale) for _ in range(2))
        if same:
            k = m.of(k.detach()[:, :1].expand_as(k))
        g = -decay * F.softplus(torch.randn(batch, rows, heads, device=m.device))
        tensors = {
            "q": q, "k": k, "v": m(batch, rows, heads, values),
            "g": m.of(g, dtype=accumulator(m.dtype)), "beta": m.of((torch.randn_like(g) * beta).sigmoid()),
        }  # fmt: skip
        options = {}
        if packed:
            options["cu_seqlens"] = torch.tensor(documents(rows), dtype=torch.int32, device=m.device)
        if state:
            count = 4 if packed else batch
            tensors["state"] = m(count, heads, keys, values, dtype=accumulator(m.dtype))
        # A state that decays fast is one outer product, of one head more than of all others. All tokens of packed rows
        # may be in one of the four documents.
        shared = keys * values if decay > 1 else keys
        return Case(tensors, options, shared * (4 if packed else 1), terms_of(keys))

    usual = dict(key_heads=2, groups=2, keys=32, values=16, state=True, packed=False)
    return Op(
        kernels.gated_delta_rule, kernels.gated_delta_rule_reference, eager_gated_delta_rule, make,
        choices={
            "keys": Sizes([16, 24, 64, 96, 128, 256], [4, 16, 24]), "values": Sizes([16, 40, 64, 128, 192], [6, 16]),
            "key_heads": Sizes([1, 2], [1, 2]), "groups": Sizes([1, 2, 3], [1, 3]),
            "state": [False, True], "packed": [False, True], "decay": [0.01, 1.0, 16.0],
        },
        complete={"key_heads": 1, "groups": 2, "keys": 8, "values": 8, "state": True, "packed": False},
        row=lambda chosen: 2**22 // 333,  # six chunks
        variants=8,  # eight kernels each, which take long to compile
        edges={
            "beta of 0 and 1": lambda m: make(m, 70, beta=100.0, **usual),
            "strong decay": lambda m: make(m, 70, decay=100.0, **usual),
            "no decay": lambda m: make(m, 70, decay=0.0, **usual),
            "one key": lambda m: make(m, 70, decay=0.01, same=True, **usual),
            "small q and k": lambda m: make(m, 20, scale=1e-3, **usual),
        },
        noise=operand_noise,
        tf32=True,
        exact=eager_gated_delta_rule,  # the recurrence launches dozens of kernels for each token of each draw
    )  # fmt: skip


# The short convolution.


def eager_causal_conv(x, weight, bias=None, *, activation=None, state=None, cu_seqlens=None):
    """torch's depthwise convolution, then the activation."""
    if cu_seqlens is not None:
        convolve = functools.partial(eager_causal_conv, weight=weight, bias=bias, activation=activation)
        return torch.cat(by_document(convolve, (x,), state, cu_seqlens), 1)
    if x.shape[1] == 0:
        return x
    past = x.new_zeros(x.shape[0], x.shape[2], weight.shape[2] - 1) if state is None else state
    y = F.conv1d(torch.cat([past, x.transpose(1, 2)], 2), weight, bias, groups=x.shape[2]).transpose(1, 2)
    return y if activation is None else F.silu(y)


def causal_conv_op() -> Op:
    def make(m, rows, *, channels, width, bias, state, packed, activation="silu", scale=1.0):
        batch = 1 if packed else m.draw.choice([1, 2])
        options: dict = {"activation": activation}
        tensors = {"x": m(batch, rows, channels, scale=scale), "weight": m(channels, 1, width)}
        if bias:
            tensors["bias"] = m(channels)
        if packed:
            options["cu_seqlens"] = torch.tensor(documents(rows), dtype=torch.int32, device=m.device)
        if state:
            tensors["state"] = m(4 if packed else batch, channels, width - 1, train=False)
        # The slope of silu is neither 0 nor 1, and has an error, only where the sum of four large terms is near 0.
        return Case(tensors, options, 1 if scale <= 1 else 40, 4 * rows)

    def huge(m):
        m.strided = False
        return Case({"x": m.big(2**13 + 9, 64, 4096), "weight": m(4096, 1, 4)}, {"activation": "silu"})

    usual = dict(channels=40, width=4, bias=True, state=True, packed=False)
    return Op(
        kernels.causal_conv, kernels.causal_conv_reference, eager_causal_conv, make,
        choices={
            "channels": Sizes([1, 7, 64, 200, 1024, 8192], [1, 7, 70]), "width": [1, 2, 3, 4], "bias": [False, True],
            "state": [False, True], "packed": [False, True], "activation": [None, "silu"],
        },
        complete={"channels": 8, "width": 4, "bias": True, "state": True, "packed": False},
        row=lambda chosen: chosen["channels"],
        edges={
            "several tiles": lambda m: make(m, 300, **usual),
            "values of 100": lambda m: make(m, 10, scale=100.0, **usual),
            "tiny values": lambda m: make(m, 10, scale=1e-4, **usual),
        },
        past_2_31=huge,
    )  # fmt: skip


# Gates and norm.


def eager_delta_gates(a, b, A_log, dt_bias):
    dtype = accumulator(a.dtype)
    return -A_log.to(dtype).exp() * F.softplus(a.to(dtype) + dt_bias), b.sigmoid()


def delta_gates_op() -> Op:
    def make(m, rows, *, heads, scale=1.0, shift=0.0):
        lead = m.lead(rows)
        a, b = (m.of(torch.randn(*lead, heads) * scale + shift) for _ in range(2))
        return Case({"a": a, "b": b, "A_log": m.of(torch.rand(heads) * 2.8), "dt_bias": m(heads)}, {}, 1, rows)

    return Op(
        kernels.delta_gates, kernels.delta_gates_reference, eager_delta_gates, make,
        choices={"heads": Sizes([1, 3, 16, 32, 48, 64], [1, 3, 48]), "scale": [0.1, 1.0, 10.0]},
        complete={"heads": 8},
        row=lambda chosen: chosen["heads"],
        edges={
            "far from zero": lambda m: make(m, 40, heads=16, scale=30.0),
            "zeros": lambda m: make(m, 40, heads=16, scale=0.0),
            "decays of nearly 1": lambda m: make(m, 40, heads=16, shift=-18.0),
        },
    )  # fmt: skip


def eager_gated_norm(x, z, weight, eps):
    """Qwen3-Next's gated norm of transformers."""
    h = x.to(accumulator(x.dtype))
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * h.to(x.dtype) * F.silu(z.to(accumulator(x.dtype)))).to(x.dtype)


def gated_norm_noise(case: Case, upstream: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of the norm, whose output's gradient is multiplied by silu(z)."""
    dy = upstream[0].double() * F.silu(case.tensors["z"].detach().double())
    return row_noise(case, [dy], layer=False)


def gated_norm_op() -> Op:
    def make(m, rows, *, width, heads, scale=1.0):
        shape = (*m.lead(rows), heads, width)
        return Case({"x": m(*shape, scale=scale), "z": m(*shape), "weight": m(width)}, {"eps": 1e-6}, width)

    def huge(m):
        m.strided = False
        x, z = (m.big(2**19 + 9, 32, 128) for _ in range(2))
        return Case({"x": x, "z": z, "weight": m(128)}, {"eps": 1e-6})

    return Op(
        kernels.gated_norm, kernels.gated_norm_reference, eager_gated_norm, make,
        choices={
            "width": Sizes([1, 7, 64, 96, 128, 256, 1000], [1, 7, 128]), "heads": Sizes([1, 3, 32], [1, 3]),
            "scale": [0.1, 1.0, 10.0],
        },
        complete={"width": 8, "heads": 2},
        row=lambda chosen: chosen["width"] * chosen["heads"],
        edges={
            "rows of zeros": lambda m: make(m, 20, width=64, heads=2, scale=0.0),
            "rows of 1e4": lambda m: make(m, 20, width=64, heads=2, scale=1e4),
            "tiny rows": lambda m: make(m, 20, width=64, heads=2, scale=1e-4),
        },
        past_2_31=huge,
        noise=gated_norm_noise,
    )  # fmt: skip
