"""The memory that a run needs on one GPU, in bytes.

The peak is the larger of two moments (docs/distributed.md):

    end of the forward:   (s - g) P / N + 8 h + L t a + r + w     if a step has one forward; else s P / N + ...
    end of the backward:   s P / N + 10 b + e

s: bytes of weight, gradient and optimizer state per trained parameter. g: those of the gradient alone.
P: parameters. N: GPUs that share them. h, b: parameters of the head and of a block, divided by tp. On one GPU, which
gathers nothing, 8 h is 4 h, a gradient of the head in fp32, and 10 b is 0.
Of b under expert parallelism, a rank gathers 1 / ep of the experts, and none where dp_shard is 1 and nothing is cast.
L: blocks. t: tokens of a forward. a: bytes that a block saves per token (training/recompute.py).
r: with activation checkpointing of whole blocks, the bytes that the largest block saves while it is run again.
w: a chunk of logits (kernels/loss/linear_cross_entropy.py).
e: on one GPU, where embedding and head are one parameter, its gradient from the head until the embedding's is added.
Of frozen parameters, only the weights count; where those are in 4 or 8 bits, also what of a block is in 16 bits at
once. With --fp8 a byte per weight of the blocks is added where they are kept.
"""

import itertools
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ligermodels.layers.base import Layer, not_counted, saved_per_token
from ligermodels.processes import Processes
from ligermodels.recipes.options import TrainOptions
from ligermodels.training.adamw import EIGHT_BITS_SIZE, in_eight_bits
from ligermodels.training.lora import linears_named, modules_named, weights_named
from ligermodels.training.muon import matrices_of

MARGIN = 0.92
"""The share of the free memory that a plan may use. Fragments and workspaces of libraries take the rest."""
GIB = 2**30

# Bytes of weight, gradient and optimizer state per trained parameter.
_BYTES = {"fp32": (4, 4, 8), "bf16-masters": (2, 2, 6), "bf16": (2, 2, 4)}
_MUON = {4: 4, 2: 8}
"""Bytes of Muon's state by those of the weight: the momentum, and of a weight in bf16 also its fp32 value."""
_ONE_GPU_FP32 = (2, 2, 10)
"""On one GPU the weights are in bf16; the optimizer has the other 16 bits of the fp32 weights, and fp32 moments."""


@dataclass(frozen=True)
class Sizes:
    """Counts of a model's parameters, and the elements that a block saves per token: the mean of its blocks, and under
    "again" those of the block that saves most.

    block: of the largest block. experts: of the experts of the block with most. layers: of all blocks. stacked: of all
    experts. unpacked: those of a block that are in 16 bits at once where all are in 4. tied: head and embedding are one
    parameter. frozen: elements of another model and of KV caches, in 16 bits (on the CPU in 32). heads: Medusa heads,
    trained in the dtype of the weights. matrices: what Muon trains. eight_bits: what has moments in 8 bits.
    not_counted: classes of modules in the blocks that save something for the backward, and do not say how much.
    """

    parameters: int
    trained: int
    head: int
    block: int
    blocks: int
    saved: dict[str, int]
    vocab: int = 0
    layers: int = 0
    stacked: int = 0
    experts: int = 0
    unpacked: int = 0
    tied: bool = False
    frozen: int = 0
    heads: int = 0
    matrices: int = 0
    eight_bits: int = 0
    not_counted: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: Any, options: TrainOptions) -> "Sizes":
        """The sizes of a model, which may be on the meta device, or of its adapters."""
        config = model.config.get_text_config()
        blocks = model.decoder.layers
        inside = {p: [saved_per_token(block, p) for block in blocks] for p in ("none", "mlp")}
        saved = {p: sum(counts) // len(blocks) for p, counts in inside.items()}
        parameters, sizes = count(model), [count(block) for block in blocks]
        experts = [sum(weight.numel() for weight in stacked(block)) for block in blocks]
        return cls(
            parameters=parameters,
            trained=adapter_parameters(model, options) if options.lora_r else count(model, trained=True),
            head=config.vocab_size * config.hidden_size,
            block=max(sizes),
            blocks=len(blocks) + (model.mtp is not None),
            stacked=sum(experts),
            experts=max(experts),
            layers=sum(sizes) + (0 if model.mtp is None else max(sizes)),
            vocab=config.vocab_size,
            matrices=sum(weight.numel() for weight in matrices_of(model)) if options.optim == "muon" else 0,
            eight_bits=sum(p.numel() for p in model.parameters() if p.requires_grad and in_eight_bits(p))
            if options.optim == "adamw8bit" and not options.lora_r
            else 0,
            unpacked=max(unpacked(block) for block in blocks),
            tied=bool(config.tie_word_embeddings),
            saved={**saved, "block": config.hidden_size, "again": max(inside["none"])},
            not_counted=tuple(sorted({name for block in blocks for name in not_counted(block)})),
        )


def count(module: nn.Module, *, trained: bool = False) -> int:
    """The number of its parameters. trained: of those that require a gradient."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad or not trained)


def unpacked(block: nn.Module) -> int:
    """The most of a block's weights that are in 16 bits at once where all are in 4: the largest of its modules', of
    which experts have one stacked weight at a time."""
    sizes = {id(weight): weight.numel() for weight in stacked(block)}
    rest = [sum(p.numel() for p in child.parameters() if id(p) not in sizes) for child in block.children()]
    return max([*rest, *sizes.values()], default=0)


def stacked(block: nn.Module) -> list[nn.Parameter]:
    """The stacked weights of the experts of a block that are not quantised."""
    layers = [module for module in block.modules() if isinstance(module, Layer)]
    weights = [layer._parameters.get(name) for layer in layers for name in layer.stacked]
    return [weight for weight in weights if weight is not None]


def adapter_parameters(model: Any, options: TrainOptions) -> int:
    """The number of parameters that the lora_ options train. Raises the InputError of `add_lora` for unknown names."""
    rank = options.lora_r
    chosen = linears_named(model, list(options.lora_target_modules) or "all-linear")
    saved = modules_named(model, options.lora_modules_to_save, chosen, "add_lora")
    total = sum(p.numel() for p in {p for module in saved.values() for p in module.parameters()})
    for module in chosen.values():
        total += rank * (module.in_features + module.out_features) + options.use_dora * module.out_features
    for module, weight in weights_named(model, options.lora_target_parameters, "add_lora").values():
        number, rows, columns = module.operand(weight).weight.shape
        total += number * rank * (rows + columns)
    return total


def estimate(
    sizes: Sizes, options: TrainOptions, processes: Processes, precision: str = "", activations: str = ""
) -> dict[str, int]:
    """The bytes on one GPU by purpose, whose sum the formulas at the top give.

    precision, activations: in place of those of the options.
    """
    assert options.batch_tokens is not None and options.accumulation is not None, "the options are complete"
    precision, activations = precision or options.precision, activations or options.activations
    on_cpu, gpus = processes.device.type == "cpu", processes.size // options.dp_replicate
    weight, gradient, state = _BYTES[precision]
    is_fp32 = getattr(options.objects.get("model"), "dtype", None) == torch.float32  # a model in memory stays so
    if precision == "fp32" and gpus == 1 and not on_cpu and not is_fp32:
        weight, gradient, state = _ONE_GPU_FP32
    if options.lora_r:  # adapters in fp32, beside a model that is frozen
        weight, gradient, state = _BYTES["fp32"]
    frozen = sizes.parameters - (0 if options.lora_r else sizes.trained)
    packed, bits = quantized(sizes, options)
    element, tokens = (4 if on_cpu else 2), -(-options.batch_tokens // processes.ranks_per_batch)
    weights = weight * sizes.trained + element * sizes.frozen + int(bits / 8 * packed)
    weights += (4 if (on_cpu and precision == "fp32") or is_fp32 else 2) * (frozen - packed)
    weights += (4 if precision == "fp32" and (on_cpu or gpus > 1) else 2) * sizes.parameters * options.frozen_copies
    states = state * (sizes.trained - sizes.matrices) + _MUON[weight] * sizes.matrices
    if options.optim == "adamw8bit":  # other moments are in fp32; a bf16 weight may have 16 more bits
        masters = state % 4
        states = int((masters + 8) * sizes.trained - (8 - EIGHT_BITS_SIZE) * sizes.eight_bits)
    if keeps_fp8_weights(options, processes):
        weights += sizes.layers - sizes.stacked
    weights, gradients, states = (size // gpus for size in (weights, gradient * sizes.trained, states))
    saved = sizes.blocks * tokens * sizes.saved[activations] * element
    if activations == "block":
        saved += tokens * sizes.saved["again"] * element
    experts = sizes.experts // options.ep
    if options.ep == gpus > 1 and precision != "fp32":
        experts = 0  # no other rank has them, and nothing is cast
    head, block = sizes.head // options.tp, (sizes.block - sizes.experts + experts) // options.tp
    saved += min(tokens, max(2048, 2**29 // (element * sizes.vocab or 1))) * sizes.vocab * element // options.tp
    saved += 2 * sizes.unpacked if packed else 0
    if gpus > 1:
        head_bytes, block_bytes = (2 if options.lora_r else 8) * head * (1 + sizes.heads), (2 if frozen else 10) * block
    else:
        head_bytes, block_bytes = 0 if options.lora_r else 4 * head, weight * head if sizes.tied and not frozen else 0
    kept = gradients if options.accumulation > processes.batch_ranks else 0
    buffers = "communication buffers" if gpus > 1 else "head gradient"
    moments = [(kept, saved, head_bytes), (gradients, 0, block_bytes)]  # the ends of forward and backward
    gradients, saved, gathered = max(moments, key=sum)
    return {
        "weights": weights,
        "gradients": gradients,
        "optimizer": states,
        "activations and logits": saved,
        buffers: gathered,
    }


def quantized(sizes: Sizes, options: TrainOptions) -> tuple[int, float]:
    """(the number of weights that --quantize stores in few bits, the bits of one with its scales)."""
    return {
        "none": (0, 0.0), "nf4": (sizes.layers, 4.127), "mxfp4": (sizes.stacked, 4.25), "fp8": (sizes.layers, 8.02),
    }[options.quantize]  # fmt: skip


def keeps_fp8_weights(options: TrainOptions, processes: Processes) -> bool:
    """True if a run with --fp8 keeps the FP8 numbers of weights, 1 byte each, over the forwards of a step.

    Several processes shard weights, whose whole numbers nobody has the memory for; a single forward reads them once,
    and a replayed graph quantises them in each."""
    single = options.accumulation == 1 and options.activations != "block"
    return options.fp8 != "none" and processes.mesh is None and not (single or options.capture)


def choose(sizes: Sizes, options: TrainOptions, processes: Processes, free: int) -> tuple[str, str]:
    """(precision, activations) without "auto": the most exact weights that fit, then the least recomputation.

    free: bytes. If nothing fits, the choice that needs the least memory.
    """
    exact = ("fp32",) if processes.device.type == "cpu" else ("bf16-masters", "bf16")[: 2 - (options.optim == "muon")]
    precisions = exact if options.precision == "auto" else (options.precision,)
    policies = ("none", "mlp", "block") if options.activations == "auto" else (options.activations,)
    pairs = list(itertools.product(precisions, policies))
    return next((pair for pair in pairs if fits(estimate(sizes, options, processes, *pair), free)), pairs[-1])


def fits(need: dict[str, int], free: int) -> bool:
    return sum(need.values()) <= MARGIN * free


def available(device: torch.device) -> int:
    """The free bytes of the GPU, or the bytes of the host's memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"
