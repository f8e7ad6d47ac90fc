"""Weights that are looked up or unpacked: the embedding, and ternary weights in two bits times int8 activations."""

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.case import Case, Place, Provider, Tensors, chosen, compiled
from ligermodels import kernels
from ligermodels.experimental import bitnet

FEW_ROWS = 64
"""Below, reading the weights of int2_matmul takes longer than multiplying with them."""


def eager_embedding(t: Tensors) -> tuple[Tensor, ...]:
    return (F.embedding(t["ids"], t["weight"]),)


def embedding_case(place: Place, peers: set[str], tokens: int, size: int, vocab: int, zipf: bool = False) -> Case:
    """zipf: the id of rank r is drawn 1 / r times as often as the first, as the words of a text are."""

    def draw() -> Tensor:
        if not zipf:
            return torch.randint(vocab, (tokens,), device=place.device)
        odds = torch.arange(1, vocab + 1, device=place.device, dtype=torch.float64).reciprocal_()
        rank = torch.searchsorted(odds.cumsum(0), torch.rand_like(odds[:1].expand(tokens)) * odds.sum())
        return torch.randperm(vocab, device=place.device)[rank.clamp_(max=vocab - 1)]

    def make():
        inputs = {"ids": draw(), "weight": place.randn(vocab, size)}
        return inputs, (place.randn(tokens, size),)

    torch.manual_seed(0)
    read = draw().unique().numel()

    def liger(t):
        from liger_kernel.ops import LigerEmbeddingFunction

        return (LigerEmbeddingFunction.apply(t["weight"], t["ids"]),)

    forward = 2.0 * (read + tokens) * size
    return Case(
        "embedding",
        f"T={tokens} H={size} V={vocab}, {'Zipf' if zipf else 'uniform'} ids",
        make,
        leaves=("weight",),
        outputs=("y",),
        eager=eager_embedding,
        providers=chosen(
            peers,
            Provider("ligermodels", lambda t: (kernels.embedding(t["ids"], t["weight"]),), ours=True),
            eager=[Provider("eager", eager_embedding)],
            compile=[Provider("torch.compile", compiled(eager_embedding))],
            liger=[Provider("Liger", liger)],
        ),
        forward_work=forward,
        full_work=forward + 2.0 * (tokens + vocab) * size,  # the gradient of the weight is dense
    )


def int2_matmul_case(place: Place, peers: set[str], rows: int, out_size: int, size: int) -> Case:
    def make():
        weight = torch.randint(-1, 2, (out_size, size), dtype=torch.int8, device=place.device)
        inputs = {
            "a": torch.randint(-127, 128, (rows, size), dtype=torch.int8, device=place.device),
            "weight": weight,
            "wide": weight.to(place.dtype),
            "packed": bitnet.pack_int2(weight),
            "scale_a": torch.rand(rows, device=place.device) / 100,
            "scale_w": torch.rand((), device=place.device),
        }
        if "liger" in peers:
            quarters = (weight.T + 1).to(torch.uint8).chunk(4)
            inputs["liger"] = sum(quarter << 2 * i for i, quarter in enumerate(quarters)).contiguous()
        return inputs, ()

    def scaled(product, t):
        return ((product * t["scale_a"][:, None] * t["scale_w"]).to(t["wide"].dtype),)

    def eager(t):
        return scaled(F.linear(t["a"].to(t["wide"].dtype), t["wide"]), t)

    def int8(t):
        return scaled(torch._int_mm(t["a"], t["weight"].T), t)

    def liger(t):
        from liger_kernel.ops.experimental.mm_int8int2 import matmul

        return scaled(matmul(t["a"], t["liger"]), t)

    def ours(t):
        scales = {"scale_a": t["scale_a"], "scale_w": t["scale_w"]}
        return (bitnet.int2_matmul(t["a"], t["packed"], **scales, out_dtype=t["wide"].dtype),)

    few = rows <= FEW_ROWS
    return Case(
        "int2_matmul",
        f"M={rows} N={out_size} K={size}",
        make,
        leaves=(),
        outputs=("y",),
        eager=eager,
        providers=chosen(
            peers,
            Provider("ligermodels", ours, ours=True),
            eager=[Provider("bf16 weights", eager)],
            torch=[Provider("torch._int_mm, int8 weights", int8)] if rows > 16 else [],
            liger=[Provider("Liger", liger)],
        ),
        forward_work=out_size * size / 4 + rows * size + 2.0 * rows * out_size if few else 2.0 * rows * out_size * size,
        unit="bytes read" if few else "int8 operations",
    )
