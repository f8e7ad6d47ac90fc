"""The table of ops: the choices for each, the eager code that it replaces, where it may be hard.

`OPS` is what `test_every_op.py` goes through. An entry (see `cases.Op`) holds the op, its reference, the eager code of
the same dtype that it replaces (as transformers or torch.nn.functional have it), what sizes and options may be,
adversarial values, and a case past 2^31 elements. All calls are by keyword: op, reference and eager take the same
arguments.
"""

import types

import torch
import torch.nn.functional as F

from ligermodels import kernels
from tests.kernels.cases import HALF, Case, Maker, Op, drawn
from tests.kernels.ops.attention import FORMS, OF_TORCH, WIDE_DIMS, attention_op, our_attention, wide_attention
from tests.kernels.ops.delta import causal_conv_op, delta_gates_op, gated_delta_rule_op, gated_norm_op
from tests.kernels.ops.divergences import jsd_op, kl_op, linear_jsd_op
from tests.kernels.ops.elementwise import (
    after_sum,
    eager_layer_norm,
    eager_rms_norm,
    eager_rope,
    eager_rope_qk,
    embedding_op,
    norm,
    rope_in_place,
    rotation,
)
from tests.kernels.ops.losses import linear_loss_op, logprobs_op, loss_op
from tests.kernels.ops.mlp import (
    activation_op,
    eager_activate,
    eager_glu,
    exact_linear_after_norm,
    joint_linear,
    linear,
    linear_after_norm,
    linear_op,
    mlp_op,
    of_two_weights,
    one_by_one,
    three_layers,
)
from tests.kernels.ops.moe import experts_op, grouped_route_op, route_op

OURS = [form for form in FORMS if form not in OF_TORCH]
OF_TORCH_DTYPES = HALF if torch.cuda.is_available() else (*HALF, torch.float32)
"""fp32 is judged on the CPU: on a GPU it is an engine of torch's against another."""
OPS: dict[str, Op] = {
    "rms_norm": norm(kernels.rms_norm, kernels.rms_norm_reference, eager_rms_norm, add=False, layer=False),
    "add_rms_norm": norm(
        kernels.add_rms_norm, kernels.add_rms_norm_reference, after_sum(eager_rms_norm), add=True, layer=False
    ),
    "layer_norm": norm(kernels.layer_norm, kernels.layer_norm_reference, eager_layer_norm, add=False, layer=True),
    "add_layer_norm": norm(
        kernels.add_layer_norm, kernels.add_layer_norm_reference, after_sum(eager_layer_norm), add=True, layer=True
    ),
    "rope": rotation(kernels.rope, kernels.rope_reference, eager_rope, packed=True),
    "rope in place": rotation(rope_in_place, kernels.rope_reference, eager_rope, packed=True),
    "rope_qk": rotation(kernels.rope_qk, kernels.rope_qk_reference, eager_rope_qk, packed=False),
    "glu": activation_op(kernels.glu, kernels.glu_reference, eager_glu, gated=True),
    "glu of two tensors": activation_op(kernels.glu, kernels.glu_reference, eager_glu, gated=True, separate=True),
    "activate": activation_op(kernels.activate, kernels.activate_reference, eager_activate, gated=False),
    "gated_mlp": mlp_op(kernels.gated_mlp, kernels.gated_mlp_reference, eager_glu, gated=True),
    "gated_mlp of two weights": mlp_op(
        of_two_weights(kernels.gated_mlp), of_two_weights(kernels.gated_mlp_reference), eager_glu, gated=True,
        separate=True,
    ),
    "mlp": mlp_op(kernels.mlp, kernels.mlp_reference, eager_activate, gated=False),
    "linear after a norm": linear_op(
        linear_after_norm(linear), exact_linear_after_norm, linear_after_norm(F.linear), packed=False
    ),
    "joint_linear": linear_op(
        three_layers(joint_linear), three_layers(one_by_one), three_layers(one_by_one), packed=True
    ),
    "attention": attention_op(kernels.attention, OURS, dtypes=HALF, ordered=True),
    "attention of torch": attention_op(kernels.attention, OF_TORCH, dtypes=OF_TORCH_DTYPES, ordered=False),
    "flash_attention": attention_op(our_attention, list(FORMS), dtypes=HALF, ordered=True),
    "unfused_attention": attention_op(
        wide_attention, [form for form in FORMS if "softcap" not in form], dtypes=HALF, ordered=True, dims=WIDE_DIMS
    ),
    "attention with sinks": attention_op(kernels.attention, [*OURS, "decode"], dtypes=HALF, ordered=True, sinks=True),
    "attention of torch with sinks": attention_op(
        kernels.attention, OF_TORCH[:-1], dtypes=OF_TORCH_DTYPES, ordered=False, sinks=True
    ),
    "flash_attention with sinks": attention_op(our_attention, list(FORMS), dtypes=HALF, ordered=True, sinks=True),
    "cross_entropy": loss_op(),
    "linear_cross_entropy": linear_loss_op(),
    "linear_logprobs": logprobs_op(),
    "kl_div": kl_op(),
    "jsd": jsd_op(),
    "linear_jsd": linear_jsd_op(),
    "embedding": embedding_op(),
    "route": route_op(),
    "route by groups": grouped_route_op(),
    "moe_experts": experts_op(),
    "moe_experts with biases": experts_op(biased=True),
    "gated_delta_rule": gated_delta_rule_op(),
    "causal_conv": causal_conv_op(),
    "delta_gates": delta_gates_op(),
    "gated_norm": gated_norm_op(),
}  # fmt: skip


def complete(name: str, m: Maker, rows: int = 6) -> Case:
    """A small case with every tensor argument there is, contiguous."""
    m.strided = False
    m.lead = lambda rows: (rows,)  # type: ignore[method-assign]
    return OPS[name].make(m, rows, **OPS[name].complete)


def medium(name: str, m: Maker, choice: int = 0) -> Case:
    """A case of usual size, contiguous, for what is not about shapes."""
    m.strided = False
    cases = [case for case in drawn(name, OPS[name], interpreted=m.device == "cpu") if case[3] > 3]
    variants = sorted({case[0] for case in cases})
    cases = [case for case in cases if case[0] == variants[(3 + 2 * choice) % len(variants)]]
    _, seed, chosen, rows, _ = cases[len(cases) // 2]
    torch.manual_seed(seed)
    return OPS[name].make(m, rows, **chosen)


def public_ops() -> set[str]:
    """What `ligermodels.kernels` offers that computes in one process, and has a gradient: neither references nor the
    types of results."""
    return {
        name
        for name, value in vars(kernels).items()
        if isinstance(value, types.FunctionType) and not name.endswith("_reference")
    } - {"vocab_parallel_cross_entropy", "quantize_nf4", "quantize_mxfp4"}  # each has a test file of its own
