"""Checks for test_parallelize.py, each of which compares a model that is spread over processes with a whole one.

A check returns a dict of errors, relative to what they are compared with, or of texts. `run` starts the processes once
for many checks, given by name, and returns what each process found.
"""

import functools
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from examples.custom_architecture import Parallel as Custom
from ligermodels import arch
from ligermodels.checkpoint.weights import named_weights, row_parts, whole_tensor
from ligermodels.errors import InputError
from ligermodels.kernels.linear.joint import joint as joint_view
from ligermodels.layers import ClampedSwiGLU, moe
from ligermodels.layers.base import fp32_layers, fp32_names
from ligermodels.parallel import make_mesh, parallelize
from ligermodels.training import AdamW, add_mtp, count_expert_loads, offload, update_router_biases
from tests.arch import gemma3_vl, gemma4_vl, qwen2_vl, qwen3_vl, toy_family
from tests.arch.suite import suites
from tests.parallel.ranks import results_of_ranks
from tests.tiny import ExactRouter

ROWS, LENGTH, VOCAB = 4, 16, 96
SMALLEST = offload.SMALLEST
ARCHS = {**arch.ARCHS, "toy": toy_family.Toy}
SIZES = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.2,
)  # fmt: skip
EIGHT_HEADS = dict(num_attention_heads=8, num_key_value_heads=4, head_dim=8)
"""Of families whose key heads are in one weight with the others, so that four ranks need four."""
TOWER = dict(
    model_type="mllama_vision_model", hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_global_layers=1,
    attention_heads=2, image_size=8, patch_size=4, intermediate_layers_indices=[0, 1], vision_output_dim=48,
)  # fmt: skip
FAMILIES = {
    "llama": dict(SIZES, tie_word_embeddings=True),
    "llama_biased": dict(SIZES, model_type="llama", attention_bias=True, mlp_bias=True),
    "qwen2": dict(SIZES, tie_word_embeddings=False),
    "qwen3": dict(SIZES, num_key_value_heads=1, head_dim=8),
    "gemma2": dict(
        SIZES, head_dim=8, query_pre_attn_scalar=12, sliding_window=6, tie_word_embeddings=True,
        attn_logit_softcapping=2.0, final_logit_softcapping=3.0,
    ),
    "mixtral": dict(SIZES, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5),
    "mixtral_fp32": dict(  # whose routers stay in fp32
        SIZES, model_type="mixtral", num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5,
    ),
    "mixtral_shared": dict(SIZES, model_type="mixtral", num_local_experts=4),
    "mixtral_sigmoid": dict(SIZES, model_type="mixtral", num_local_experts=4),
    "mixtral_biased": dict(SIZES, model_type="mixtral", num_local_experts=4),
    "phi3": dict(
        SIZES | EIGHT_HEADS, pad_token_id=0, original_max_position_embeddings=12, rope_parameters=dict(
            rope_type="longrope", rope_theta=1e4, partial_rotary_factor=0.75, short_factor=[1.0, 1.1, 1.2],
            long_factor=[1.0, 2.0, 4.0],
        ),
    ),
    "phi3_biased": dict(SIZES | EIGHT_HEADS, model_type="phi3", pad_token_id=0),
    "qwen3_5": dict(
        SIZES, model_type="qwen3_5_text", head_dim=8, linear_key_head_dim=16, linear_value_head_dim=8,
        linear_num_key_heads=4, linear_num_value_heads=8, full_attention_interval=2,
    ),
    "qwen3_5_mtp": dict(
        SIZES, model_type="qwen3_5_text", head_dim=8, linear_key_head_dim=16, linear_value_head_dim=8,
        linear_num_key_heads=4, linear_num_value_heads=8, full_attention_interval=2, tie_word_embeddings=True,
    ),
    "qwen3_5_one_key_head": dict(
        SIZES, model_type="qwen3_5_text", head_dim=8, linear_key_head_dim=16, linear_value_head_dim=8,
        linear_num_key_heads=1, linear_num_value_heads=4, full_attention_interval=2,
    ),
    "qwen2_vl": qwen2_vl.tiny(vocab_size=VOCAB, intermediate_size=48, initializer_range=0.2),
    "qwen3_vl": qwen3_vl.qwen3_vl(vocab_size=VOCAB, intermediate_size=48, initializer_range=0.2),
    "qwen3_vl_moe": qwen3_vl.qwen3_vl_moe(vocab_size=VOCAB, initializer_range=0.2),
    "qwen3_5_vl": qwen3_vl.qwen3_5(
        vocab_size=VOCAB, intermediate_size=48, initializer_range=0.2, linear_num_key_heads=4,
    ),
    "qwen3_5_moe_vl": qwen3_vl.qwen3_5_moe(
        vocab_size=VOCAB, shared_expert_intermediate_size=24, initializer_range=0.2, linear_num_key_heads=4,
    ),
    "qwen3_5_moe_mtp": dict(
        SIZES, model_type="qwen3_5_moe_text", head_dim=8, linear_key_head_dim=16, linear_value_head_dim=8,
        linear_num_key_heads=4, linear_num_value_heads=8, full_attention_interval=2, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=20, shared_expert_intermediate_size=24, output_router_logits=True,
        router_aux_loss_coef=0.5,
    ),
    "gemma3": gemma3_vl.tiny(
        vocab_size=VOCAB, intermediate_size=48, initializer_range=0.2
    ),
    "gemma4": gemma4_vl.tiny(
        dict(use_clipped_linears=True, standardize=True), vocab_size=VOCAB, vocab_size_per_layer_input=VOCAB,
        intermediate_size=48, initializer_range=0.2, hidden_size_per_layer_input=10, **gemma4_vl.BOTH_WAYS,
    ),
    "gemma4_unified": gemma4_vl.unified(vocab_size=VOCAB, intermediate_size=48, initializer_range=0.2),
    "mllama": dict(
        model_type="mllama", image_token_index=VOCAB, vision_config=TOWER,
        text_config=dict(SIZES, num_hidden_layers=3, cross_attention_layers=[1]),
    ),
    "toy": toy_family.SIZES | EIGHT_HEADS,
}  # fmt: skip
"""model_type, or a name, -> config: embeddings tied and not, biases, norms of heads, windows, caps, experts, images."""
MIXTURES = {
    "mixtral_shared": dict(shared_size=16, shared_gate=True),
    "mixtral_sigmoid": dict(score="sigmoid", correction_bias=True, fp32_router=True, scale=2.5, shared_size=16),
    "mixtral_biased": dict(bias=True, activation=ClampedSwiGLU(1.702, 0.3)),
}
"""name -> options of `MoE`, which no family of the zoo has."""
ALIKE = {"mistral": "llama", "gemma": "llama"}
"""Families whose layers are all those of another."""
SUITES = suites({*ALIKE, *(config.get("model_type", family) for family, config in FAMILIES.items())})
FAMILIES |= {family: SIZES | suite.SWITCHED_ON for family, suite in SUITES.items()}
FAMILIES["gemma4_experts"] = FAMILIES["gemma4_text"] | dict(
    model_type="gemma4_text", enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=20
)
SPLITS = {
    "fsdp2": dict(dp_shard=2),
    "ep2": dict(dp_shard=1, ep=2),
    "tp2": dict(tp=2),
    "cp2": dict(cp=2),
    "tp2-fsdp2": dict(tp=2, dp_shard=2),
    "cp2-fsdp2": dict(cp=2, dp_shard=2),
    "cp2-tp2": dict(cp=2, tp=2),
    "cp2-hsdp2": dict(cp=2, dp_replicate=2),
    "tp4": dict(tp=4),
    "cp4": dict(cp=4),
    "hsdp2-fsdp2": dict(dp_replicate=2, dp_shard=2),
    "ep2-fsdp2": dict(dp_shard=2, ep=2),
    "ep4": dict(dp_shard=1, ep=4),
    "ep2-hsdp2": dict(dp_replicate=2, dp_shard=1, ep=2),
}


def make(family, trained="", **changes):
    """The model, with norms, biases and gates that are not 1 and 0, where parts of them could be mistaken.

    trained: a part of the names of the parameters that are not frozen.
    """
    config = {**FAMILIES[family], **changes}
    with (
        mock.patch.object(moe, "Router", ExactRouter if family == "mixtral_fp32" else moe.Router),
        mock.patch.object(arch.block, "MoE", functools.partial(moe.MoE, **MIXTURES.get(family, {}))),
    ):
        model = ARCHS[config.get("model_type", family)].from_config(config, dtype=torch.float32, device="cpu", seed=0)
    if family.endswith("mtp"):
        add_mtp(model, loss_weight=0.5)
    if family == "phi3_biased":  # no family of the zoo has packed projections with biases
        for linear in (module for module in model.decoder.modules() if isinstance(module, torch.nn.Linear)):
            linear.bias = torch.nn.Parameter(torch.zeros(linear.out_features))
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, weight in named_weights(model):
            if isinstance(weight, torch.nn.Parameter):
                # Gemma 3's tower rotates nothing, so that a bias of k changes no score by more than rounding.
                no_gradient = "vision_tower" in name and name.endswith("k_proj.bias")
                weight.requires_grad_(trained in name and not no_gradient)
            if weight.dim() == 1 or name.endswith("proj_bias"):
                weight.add_(torch.randn(weight.shape, generator=draw), alpha=0.2)
    return model


def batch(family, kind):
    """Arguments of a forward with labels, of which ranks and rows have unequal numbers."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 90, (ROWS, LENGTH), generator=draw)
    made = {"input_ids": ids}
    if "_vl" in family and kind == "images":
        grids = [(2, 3), (3, 2), (1, 6), (6, 1)]  # one a row, of 6 tokens
        ids[:, 4:10] = qwen2_vl.IMAGE
        made["image_grid_thw"] = torch.tensor([(1, 2 * h, 2 * w) for h, w in grids])
        made["pixel_values"] = torch.randn(ROWS * 24, 3 * 2 * 2 * 2, generator=draw)
    elif family == "gemma3" and kind == "images":
        ids[:, 4:8] = gemma3_vl.IMAGE
        made["pixel_values"] = torch.randn(ROWS, 3, gemma3_vl.SIZE, gemma3_vl.SIZE, generator=draw)
    elif family in ("gemma4", "gemma4_unified") and kind == "images":
        images = gemma4_vl.inputs([[("image", *size)] for size in ((2, 3), (3, 2), (1, 6), (6, 1))], FAMILIES[family])
        ids[:, 4:10] = gemma4_vl.IMAGE
        made |= {name: images[name] for name in ("pixel_values", "image_position_ids")}
    elif family == "mllama" and kind == "images":
        made["pixel_values"] = torch.randn(ROWS, 1, 4, 3, 8, 8, generator=draw)
        made["aspect_ratio_ids"] = torch.tensor([[1], [2], [5], [8]])
        made["aspect_ratio_mask"] = torch.tensor([[[1, 0, 0, 0]], [[1, 1, 0, 0]], [[1, 1, 0, 0]], [[1, 1, 1, 1]]])
        sees = torch.rand(ROWS, LENGTH, 1, 4, generator=draw) < 0.5
        sees[:, :3] = False  # text before the image
        made["cross_attention_mask"] = sees.long()
    labels = ids.clone()
    labels[0, :9] = -100
    labels[3, 4:] = -100
    made["labels"] = labels
    if kind == "packed":  # in one row; no bound is a rank's
        bounds = torch.tensor([0, 5, 17, 23, 64], dtype=torch.int32)
        made |= {"input_ids": ids.view(1, -1), "labels": labels.view(1, -1), "cu_seqlens": bounds, "max_seqlen": 41}
    elif kind == "restarting":  # in several rows
        lengths = [(5, 11), (16,), (1, 2, 13), (9, 7)]
        made["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    elif kind in ("left", "right"):
        gaps = torch.tensor([0, 3, 9, 1])[:, None]
        place = torch.arange(LENGTH) if kind == "left" else torch.arange(LENGTH).flip(0)
        made["attention_mask"] = (place >= gaps).long()
        made["labels"] = labels.masked_fill(place < gaps, -100)
    elif kind == "positions":
        made["position_ids"] = torch.arange(LENGTH) + torch.tensor([0, 5, 9, 2])[:, None]
    elif kind == "axes":
        made["position_ids"] = torch.randint(40, (3, ROWS, LENGTH), generator=draw)
    elif kind == "embeds":
        made["inputs_embeds"] = torch.randn(ROWS, LENGTH, 32, generator=draw)
        del made["input_ids"]
    elif kind == "few":  # none on the first rank, of data or of context
        labels[:2] = -100
        labels[:, :9] = -100
        labels[2, 12] = 7
    elif kind == "long":
        made = {name: torch.cat([x, x.flip(0).flip(1)], 1) for name, x in made.items()}
    return made


def part(made, i, n):
    """The i-th of n parts of the rows."""
    axes = {"position_ids": -2}
    return {name: x if name == "max_seqlen" else x.chunk(n, axes.get(name, 0))[i] for name, x in made.items()}


@functools.cache
def mesh_of(split):
    """One mesh for all jobs: each one more makes groups, and groups make threads."""
    return make_mesh(**{"dp_shard": 1, **SPLITS[split]}, device_type="cpu")


class Spread:
    """A model over a mesh of all ranks, and this rank's rows of a batch."""

    def __init__(self, family, split, *, trained="", dtype=torch.float32, **options):
        self.mesh = mesh_of(split)
        self.model = parallelize(make(family, trained).to(dtype), self.mesh, **options)
        together = self.mesh["cp"].size() * self.mesh["tp"].size()
        self.parts, self.index = dist.get_world_size() // together, dist.get_rank() // together

    def rows(self, made):
        return part(made, self.index, self.parts)


@functools.cache
def whole(family, kind, trained=""):
    """One process's loss and gradients over the whole batch."""
    model = make(family, trained)
    loss = model(**batch(family, kind)).loss
    loss.backward()
    return loss.detach(), grads(model)


def error(found, wanted):
    """The largest difference relative to the largest number of `wanted`."""
    found, wanted = torch.as_tensor(found).detach().float(), torch.as_tensor(wanted).detach().float()
    return ((found.reshape(wanted.shape) - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30)).item()


def grads(model):
    """{name: gradient, whole}."""
    rows = row_parts(model)
    return {
        name: whole_tensor(p.grad, rows.get(name)) if hasattr(p.grad, "full_tensor") else p.grad
        for name, p in model.named_parameters()
    }


def grad_errors(model, wanted):
    found = grads(model)
    assert found.keys() == wanted.keys()
    assert [name for name in found if found[name] is None] == [name for name in wanted if wanted[name] is None]
    return {name: error(found[name], wanted[name]) for name in wanted if wanted[name] is not None}


def gradients(family, split, recompute="none", kind="plain", trained="", offloads=False):
    """Loss and the gradient of each parameter."""
    offload.SMALLEST = 1 if offloads else SMALLEST  # the ranks have no other thread that reads it
    loss, wanted = whole(family, kind, trained)
    spread = Spread(family, split, trained=trained)
    spread.model.gradient_checkpointing_enable({"recompute": recompute, "offload": offloads})
    found = spread.model(**spread.rows(batch(family, kind))).loss
    found.backward()
    return {"loss": error(found, loss), **grad_errors(spread.model, wanted)}


def uneven(family, split, recompute="none"):
    """Three rows on the first rank, one on the other."""
    made = batch(family, "plain")
    loss, wanted = whole(family, "plain")
    spread = Spread(family, split)
    spread.model.gradient_checkpointing_enable({"recompute": recompute})
    rows = slice(3) if spread.index == 0 else slice(3, 4)
    found = spread.model(**{name: x[rows] for name, x in made.items()}).loss
    found.backward()
    return {"loss": error(found, loss), **grad_errors(spread.model, wanted)}


def images_on_one_rank(family, packed=False):
    """Images on the first rank, text alone on the other."""
    images, text = part(batch(family, "images"), 0, 2), part(batch(family, "packed" if packed else "plain"), 0, 1)
    if "_vl" in family:  # one of the parts of the patches
        images["pixel_values"] = batch(family, "images")["pixel_values"][: ROWS // 2 * 24]
    model = make(family)
    count = sum((one["labels"][:, 1:] != -100).sum() for one in (images, text))
    count -= 0 if not packed else (text["labels"][0, text["cu_seqlens"][1:-1].long()] != -100).sum()
    losses = [model(**one, num_items_in_batch=count).loss for one in (images, text)]
    sum(losses).backward()
    spread = Spread(family, "fsdp2")
    found = spread.model(**(text if spread.index else images)).loss
    found.backward()
    return {"loss": error(found, sum(losses)), **grad_errors(spread.model, grads(model))}


def balanced(family, split):
    """The biases of routers after a step in two micro-batches whose blocks are recomputed, and the largest load."""
    model, made = make(family), batch(family, "plain")
    count_expert_loads(model)
    model(**made).loss.backward()
    wanted = update_router_biases(model, rate=0.5)
    spread = Spread(family, split)
    count_expert_loads(spread.model)
    spread.model.gradient_checkpointing_enable({"recompute": "block"})
    rows = spread.rows(made)
    for micro in (part(rows, i, 2) for i in range(2)):
        spread.model(**micro).loss.backward()
    errors = {"load": error(update_router_biases(spread.model, rate=0.5), wanted)}
    for (name, bias), (_, expected) in zip(spread.model.named_buffers(), model.named_buffers(), strict=True):
        if name.endswith("e_score_correction_bias"):
            errors[name] = error(bias, expected)
    return errors


def accumulated(family, split):
    """Two micro-batches, divided by the number of labels of all, are one process's step over all."""
    loss, wanted = whole(family, "plain")
    spread = Spread(family, split)
    rows = spread.rows(batch(family, "plain"))
    micro = [part(rows, i, 2) for i in range(2)]
    count = spread.model.parallel.count([one["labels"] for one in micro])
    losses = [spread.model(**one, num_items_in_batch=count).loss for one in micro]
    for one in losses:
        one.backward()
    labels = (batch(family, "plain")["labels"][:, 1:] != -100).sum()
    return {"count": error(count, labels), "loss": error(sum(losses), loss), **grad_errors(spread.model, wanted)}


def logits(family, split, kind="plain"):
    """The logits of this rank's rows, with and without labels, and the gradients of a loss that is computed of them."""
    made = batch(family, kind)
    spread, model = Spread(family, split), make(family)
    rows = spread.rows(made)
    labels, own = made.pop("labels"), rows["labels"]
    found, wanted = spread.model(**{k: v for k, v in rows.items() if k != "labels"}).logits, model(**made).logits
    expected = wanted.chunk(spread.parts)[spread.index]
    errors = {"shape": float(found.shape != expected.shape), "logits": error(found, expected)}
    count = (labels[:, 1:] != -100).sum()

    def loss(logits, labels):
        logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return (F.cross_entropy(logits, labels, reduction="none") * torch.linspace(0, 2, len(labels))).sum() / count

    if spread.parts == 1:
        loss(wanted, labels).backward()
        loss(found, own).backward()
        errors |= grad_errors(spread.model, grads(model))
        model.zero_grad()
        spread.model.zero_grad()
    for each in (model, spread.model):
        each.eval()
    with torch.no_grad():
        evaluated, reference = spread.model(**rows), model(**made, labels=labels)
    errors |= {"eval loss": error(evaluated.loss, reference.loss), "eval logits": error(evaluated.logits, expected)}
    both = spread.model(**rows, return_logits=True)
    both.loss.backward()
    model.train()(**made, labels=labels).loss.backward()
    errors |= {"logits beside the loss": error(both.logits, expected), "loss": error(both.loss, reference.loss)}
    wanted, found = grads(model), grads(spread.model)
    return errors | {f"{name} with logits": error(found[name], wanted[name]) for name in wanted}


def norm(family, split):
    """The norm of all gradients, as torch and AdamW find it, and the clipped gradients."""
    model, made = make(family), batch(family, "plain")
    model(**made).loss.backward()
    spread = Spread(family, split)
    spread.model(**spread.rows(made)).loss.backward()
    ours = AdamW(spread.model.parameters(), lr=0.0, weight_decay=0.0, max_grad_norm=0.1)
    ours.step()
    wanted = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    errors = {"AdamW": error(ours.grad_norm, wanted)}
    if split.startswith("ep"):  # torch sums the squares of one mesh alone
        return errors
    found = torch.nn.utils.clip_grad_norm_(spread.model.parameters(), 0.1)
    return {**errors, "torch": error(found.full_tensor(), wanted), **grad_errors(spread.model, grads(model))}


def headless(family, split):
    """Gradients through the last hidden state, without the head, and those of a whole step after it."""
    made, model = batch(family, "plain"), make(family)
    spread = Spread(family, split)
    rows = spread.rows(made)
    own = {name: x for name, x in made.items() if name != "labels"}
    states = model(**own, return_logits=False).last_hidden_state
    weights = torch.linspace(0, 1, states.numel()).view_as(states)
    (states * weights).sum().backward()
    found = spread.model(**{name: rows[name] for name in own}, return_logits=False).last_hidden_state
    (found * weights.chunk(spread.parts)[spread.index]).sum().backward()
    errors = grad_errors(spread.model, grads(model))
    spread.model.zero_grad()
    spread.model(**rows).loss.backward()
    wanted = whole(family, "plain")[1]
    return {**errors, "a step after it": max(grad_errors(spread.model, wanted).values())}


def mixed(family, split, recompute="none", kind="plain", low=False):
    """bf16 beside fp32 parameters, or with `low` bf16 ones: how far from fp32, in units of how far one process in bf16
    is. Layers that stay in fp32 read and return what they do there."""
    made = batch(family, kind)
    model = make(family).to(torch.bfloat16)
    seen = dtypes_in(fp32_layers(model))
    loss = model(**made).loss
    loss.backward()
    exact_loss, exact = whole(family, kind)
    spread = Spread(family, split, dtype=torch.bfloat16 if low else torch.float32, param_dtype=torch.bfloat16)
    assert not (low and split == "tp2") or spread.model.parallel.tp.leaves is not None, "FSDP casts nothing here"
    spread.model.gradient_checkpointing_enable({"recompute": recompute})
    found_seen = dtypes_in(fp32_layers(spread.model))
    found = spread.model(**spread.rows(made)).loss
    found.backward()
    assert found_seen == seen and len(seen) == len(fp32_layers(model))
    kept = fp32_names(model)
    for name, p in spread.model.named_parameters():
        assert p.dtype == p.grad.dtype == (torch.bfloat16 if low and name not in kept else torch.float32), name

    def distance(grad, name):
        return (grad.float().reshape(exact[name].shape) - exact[name]).norm() / exact[name].norm()

    of_one = {name: distance(p.grad, name) for name, p in model.named_parameters()}
    ours = {name: distance(grad, name) for name, grad in grads(spread.model).items()}
    errors = {name: (ours[name] / (of_one[name] + 2**-8)).item() for name in ours}
    return {"loss": error(found, exact_loss) / (error(loss, exact_loss) + 2**-8), **errors}


def dtypes_in(layers):
    """A dict that gets {name: dtypes of what it reads, of its weight, and of what it returns} when layers run."""
    seen = {}
    for name, layer in layers.items():
        layer.register_forward_hook(
            lambda layer, inputs, y, name=name: seen.update(
                {name: (*(x.dtype for x in inputs), layer.weight.dtype, y.dtype)}
            )
        )
    return seen


def stepped(family, split):
    """The weights after steps in the backward, and the loss once the parameters have other memory and another dtype."""
    spread, models, made = Spread(family, split), [make(family)], batch(family, "plain")
    models.append(spread.model)
    for model, rows in zip(models, (made, spread.rows(made)), strict=True):
        optimizer = AdamW(model.parameters(), lr=1e-2, eps=1e-3, step_in_backward=True)
        for _ in range(2):
            model(**rows).loss.backward()
            assert all(p.grad is None for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        optimizer.remove_hooks()
    weights = dict(models[0].named_parameters())
    errors = {name: error(p.full_tensor(), weights[name]) for name, p in spread.model.named_parameters()}
    if split != "tp2":  # FSDP keeps its dtypes
        return errors
    loss, found = models[0].double()(**made).loss, spread.model.double()(**spread.rows(made)).loss
    found.backward()
    assert {p.grad.dtype for p in spread.model.parameters()} == {torch.float64}
    return {**errors, "in fp64": error(found, loss)}


def joint(family, split):
    """Whether one matmul reads the shards of q, k and v, and one those of gate and up; and the biases."""
    block = Spread(family, split).model.decoder.layers[0]
    found = {}
    for layer in (block.self_attn, block.mlp):
        with torch.no_grad():
            weights, biases = zip(*(module.parts() for module in layer.joint_modules), strict=True)
        found[layer.joint_names[0]] = float(joint_view(weights) is None)
        found[f"bias of {layer.joint_names[0]}"] = float(joint_view(biases) is None)
    return found


def generated(family, split):
    """Greedy tokens of the same prompt on all ranks, in bf16."""
    spread, model = Spread(family, split, param_dtype=torch.bfloat16), make(family).to(torch.bfloat16)
    prompt = batch(family, "plain")["input_ids"][:2, :5]
    found, wanted = (each.eval().generate(prompt, max_new_tokens=6) for each in (spread.model, model))
    return {"other tokens": float(not torch.equal(found, wanted))}


def adapted(split):
    """PEFT around the model, with the whole wrapper parallelized: LoRA, or under tp trained norms and head."""
    import peft  # an extra that only tests/tools have

    def made():
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        if "tp" in split:
            config = peft.LNTuningConfig(target_modules=["norm"], modules_to_save=["lm_head"])
        return peft.get_peft_model(make("qwen2"), config)

    model, inputs = made(), batch("qwen2", "plain")
    loss = model(**inputs).loss
    loss.backward()
    mesh = mesh_of(split)
    spread, data = parallelize(made(), mesh), mesh["dp_shard"]
    found = spread(**part(inputs, data.get_local_rank(), data.size())).loss
    found.backward()
    return {"loss": error(found, loss), **grad_errors(spread, grads(model))}


def custom(split):
    """A module of the user's own made of our layers; its loss is a mean over its own rows."""

    def made():
        torch.manual_seed(0)
        return Custom(VOCAB, size=32)

    model, ids = made(), batch("llama", "plain")["input_ids"]
    model(ids[:, :-1], labels=ids[:, 1:]).backward()
    mesh = mesh_of(split)
    spread = parallelize(made(), mesh)
    rows = ids.chunk(mesh.size())[dist.get_rank()]
    (spread(rows[:, :-1], labels=rows[:, 1:]) / mesh.size()).backward()
    return grad_errors(spread, grads(model))


def refused(model, split, lora=False):
    """What `parallelize` says to this model, (family, changes), having changed nothing; split: or a mesh's only dim."""
    sizes = SPLITS.get(split)
    if sizes is None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(split,))
    else:
        mesh = make_mesh(**{"dp_shard": 1, **sizes}, device_type="cpu")
    family, changes = model
    model = Custom(VOCAB, size=32) if family == "custom" else make(family, **changes)
    if lora:
        import peft  # an extra that only tests/tools have

        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))

    def contents():
        return [(type(module), [*map(id, module._parameters.values())]) for module in model.modules()]

    before = contents()
    try:
        parallelize(model, mesh)
    except InputError as error:
        assert contents() == before and getattr(model, "parallel", None) is None
        return str(error)
    return "nothing"


def calls_refused(split):
    """{call: what a parallel model says to it, where it cannot honour it}; it still works afterwards."""
    spread = Spread("llama", split)
    made = spread.rows(batch("llama", "plain"))
    ids, labels = made["input_ids"], made["labels"]
    calls = {
        "length": lambda: spread.model(ids[:, :15], labels=labels[:, :15]),
        "length of a packed row": lambda: spread.model(
            ids.view(1, -1)[:, :15], cu_seqlens=torch.tensor([0, 4, 15], dtype=torch.int32)
        ),
        "length, without the head": lambda: spread.model.model(ids[:, :15]),
        "cache": lambda: spread.model(ids, use_cache=True),
        "generate": lambda: spread.model.eval().generate(ids[:, :5], max_new_tokens=3),
        "output_hidden_states": lambda: spread.model(ids, output_hidden_states=True),
        "return_logits": lambda: spread.model(ids, return_logits=False),
        "logits_to_keep": lambda: spread.model(ids, logits_to_keep=1),
        "return_logprobs": lambda: spread.model.lm_head(torch.zeros(4, 16, 32), labels, return_logprobs=True),
        "ids": lambda: spread.model(ids + VOCAB),
        "parallelize": lambda: parallelize(spread.model, spread.mesh),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
        except InputError as found:
            said[name] = str(found)
        if hasattr(spread.model, "reset_iter_state"):  # torch 2.11's FSDP does not recover from an error inside
            spread.model.reset_iter_state()
            spread.model.zero_grad()
            spread.model.train()(**made).loss.backward()
            assert max(grad_errors(spread.model, whole("llama", "plain")[1]).values()) < 2e-5, name
    return said


CHECKS = (
    gradients, uneven, images_on_one_rank, balanced, accumulated, logits, headless, norm, mixed, stepped, joint,
    generated, adapted, custom, refused, calls_refused,
)  # fmt: skip
_CHECKS = {check.__name__: check for check in CHECKS}


def run(size, folder, jobs):
    """Runs jobs, each (name, check, options), in `size` processes; returns {name: what each process found}."""

    def work():
        found = {}
        for name, check, options in jobs:
            try:
                found[name] = _CHECKS[check](**options)
            except Exception as error:
                error.add_note(f"in {name}")
                raise
        return found

    for _, check, options in jobs:
        if check in ("gradients", "accumulated", "headless", "mixed"):
            whole(
                options["family"], options.get("kind", "plain"), options.get("trained", "")
            )  # once, and not by each rank
    found = results_of_ranks(folder, work, size, seconds=1800)
    return {name: [one[name] for one in found] for name, _, _ in jobs}
