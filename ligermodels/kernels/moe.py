"""Mixture of experts: the routing of tokens to experts, and the experts' gated units over the tokens they are sent.

    route:        the k largest logits of each token, softmaxed: the softmax over all, renormalised to sum 1
    moe_experts:  y[t] = sum over j of weights[t, j] * down[e] @ (act(gate) * up),  e = experts[t, j],
                  [gate | up] = gate_up[e] @ x[t]

What differs from a loop over experts:
- A counting sort in two small kernels puts each expert's rows together, in token order; every product runs over all
  experts at once. No host waits for a size, nothing is added atomically: results are the same bit for bit each time.
- Tokens gather: a kernel sums each token's k rows in fp32, weighted, and rounds once. The same kernel makes dx.
- Saved: x, the routing and gate_up. Not the sorted x, not h = act(gate) * up, not the experts' outputs: the
  gradient of a weight is <dy @ down, h>, taken row by row where one kernel reads (gate_up, dh), writes d_gate_up and
  leaves weight * h in the place of dh, for d_down.
- Under activation checkpointing, the second run of the block ends once everything is saved again, which is before h,
  the down product and the sum: `_Experts` saves all there is, `_Combine` nothing.

Bytes per token at 2-byte dtypes beside the products: forward k (6 I + 8 H) + 2 H, backward k (12 I + 14 H) + 2 H.

Source: Shazeer et al. 2017, https://arxiv.org/abs/1701.06538; routing and precision as MixtralSparseMoeBlock in
https://github.com/huggingface/transformers. Gathering instead of scattering, and the gradient of the weights from dh:
Guo et al. 2025, https://arxiv.org/abs/2512.14080.
"""

import operator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ligermodels.errors import InputError
from ligermodels.kernels import glu
from ligermodels.kernels._triton import accumulator, device_guard, last_dim_contiguous, tl, triton, use_triton
from ligermodels.kernels.glu import ACTIVATIONS, _activation, glu_reference
from ligermodels.kernels.grouped_mm import grouped_mm, grouped_mm_outer


def route_reference(logits: Tensor, *, top_k: int) -> tuple[Tensor, Tensor]:
    chosen, experts = logits.to(accumulator(logits.dtype)).sort(dim=-1, descending=True, stable=True)
    return chosen[:, :top_k].softmax(-1), experts[:, :top_k].int()


def moe_experts_reference(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up_proj: Tensor, down_proj: Tensor, *, activation: str = "silu"
) -> Tensor:
    y = 0
    for expert, (gate_up, down) in enumerate(zip(gate_up_proj.unbind(), down_proj.unbind(), strict=True)):
        here = experts == expert
        rows = torch.where(here.any(-1, keepdim=True), x, 0)  # the others' rows are zero, and so is what comes of them
        out = F.linear(glu_reference(F.linear(rows, gate_up), activation=activation), down)
        y = y + out * (weights * here).sum(-1, keepdim=True)
    return y.to(out.dtype)


@triton.jit(do_not_specialize=["n_rows"])
def _route_kernel(
    weights_ptr, experts_ptr, logits_ptr, n_rows, stride,
    E: tl.constexpr, TOP_K: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    ACC: tl.constexpr = weights_ptr.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    e = tl.arange(0, BLOCK_E)[None, :]
    inside = rows < n_rows
    logits = tl.load(logits_ptr + rows[:, None] * stride + e, mask=inside[:, None] & (e < E), other=0.0).to(ACC)
    open_ = (e < E) & (rows >= 0)[:, None]
    largest = tl.max(tl.where(open_, logits, -float("inf")), 1)
    total = tl.zeros([ROWS], ACC)
    for j in tl.static_range(TOP_K):
        top = tl.max(tl.where(open_, logits, -float("inf")), 1)
        # The first of equals. NaN equals nothing: then, too, an expert that there is.
        expert = tl.min(tl.where(open_ & (logits == top[:, None]), e, E - 1), 1)
        open_ &= e != expert[:, None]
        score = tl.exp(top - largest)
        total += score
        tl.store(experts_ptr + rows * TOP_K + j, expert, mask=inside)
        tl.store(weights_ptr + rows * TOP_K + j, score, mask=inside)
    tl.debug_barrier()  # the scores are read back, maybe by other threads
    for j in tl.static_range(TOP_K):
        score = tl.load(weights_ptr + rows * TOP_K + j, mask=inside)
        tl.store(weights_ptr + rows * TOP_K + j, score / total, mask=inside)
