"""The memory that a run needs on one GPU, in bytes, and what to change where it does not fit.

The peak is the larger of two moments (docs/distributed.md):

    end of the forward:   (s - g) P / N + 8 h + L t a + r + w     if a step has one forward; else s P / N + ...
    end of the backward:   s P / N + 10 b + e

s: bytes of weight, gradient and optimizer state per trained parameter. g: those of the gradient alone.
P: parameters. N: GPUs that share them. h, b: parameters of the head and of a block, divided by tp. On one GPU, which
gathers nothing, 8 h is 4 h, a gradient of the head in fp32, and 10 b is 0.
L: blocks. t: tokens of a forward. a: bytes that a block saves per token (training/recompute.py).
r: with activation checkpointing of whole blocks, the bytes that one block saves while it is run again.
w: a chunk of logits (kernels/linear_cross_entropy.py).
e: on one GPU, where embedding and head are one parameter, its gradient from the head until the embedding's is added.
Of frozen parameters, only the weights count; where those are in 4 bits, also the MLP weights of a block in 16 bits.
"""

import dataclasses
import os
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ligermodels.layers.attention import Attention
from ligermodels.layers.gated_delta_net import GatedDeltaNet

MARGIN = 0.92
"""The share of the free memory that a plan may use. Fragments and workspaces of libraries take the rest."""
GIB = 2**30

# Bytes of weight, gradient and optimizer state per trained parameter.
_BYTES = {"fp32": (4, 4, 8), "bf16-masters": (2, 2, 6), "bf16": (2, 2, 4)}
_ONE_GPU_FP32 = (2, 2, 10)
"""On one GPU the weights are in bf16; the optimizer has the other 16 bits of the fp32 weights, and fp32 moments."""


@dataclass(frozen=True)
class Sizes:
    """Counts of a model's parameters, and the elements that a block saves per token: the mean of its blocks.

    mlp: parameters of the MLP of a block. tied: head and embedding are one parameter. frozen: elements of another model
    and of KV caches, in 16 bits (on the CPU in 32). heads: Medusa heads, trained in the dtype of the weights.
    """

    parameters: int
    trained: int
    head: int
    block: int
    blocks: int
    saved: dict[str, int]
    vocab: int = 0
    mlp: int = 0
    tied: bool = False
    frozen: int = 0
    heads: int = 0

    @classmethod
    def of(cls, model: Any, *, trained: int | None = None) -> "Sizes":
        """The sizes of a model, which may be on the meta device. trained: trained parameters, if not all are."""
        config = model.config.get_text_config()
        heads = config.num_attention_heads * config.head_dim
        kv_heads = config.num_key_value_heads * config.head_dim
        inner = config.intermediate_size * getattr(config, "num_experts_per_tok", 1)
        blocks = model.decoder.layers
        mixers = sum(_saved_by_mixer(block, heads, kv_heads) for block in blocks)
        outside = 2 * config.hidden_size + mixers // len(blocks)
        parameters = sum(p.numel() for p in model.parameters())
        return cls(
            parameters=parameters,
            trained=parameters if trained is None else trained,
            head=config.vocab_size * config.hidden_size,
            block=max(sum(p.numel() for p in block.parameters()) for block in blocks),
            blocks=config.num_hidden_layers,
            vocab=config.vocab_size,
            mlp=3 * config.intermediate_size * config.hidden_size,
            tied=bool(config.tie_word_embeddings),
            saved={"none": outside + 2 * inner, "mlp": outside, "block": config.hidden_size},
        )


def _saved_by_mixer(block: nn.Module, heads: int, kv_heads: int) -> int:
    """Elements that the mixer of a block saves per token. heads, kv_heads: dims of all heads of q, and of k.

    Attention saves q, k and v, and its output, which o_proj reads; with norms of q and k also their inputs, and q and k
    after the rotation; with a gate of its output the gate, its sigmoid and the product.
    A Gated DeltaNet saves the inputs of its convolution, of the delta rule and of the norm, z, and out_proj's input.
    """
    attention = (heads + 2 * kv_heads) + heads
    for module in block.modules():
        if isinstance(module, GatedDeltaNet):
            return 2 * sum(module.sizes) + 3 * module.sizes[2]
        if isinstance(module, Attention):
            normed = 2 * (heads + kv_heads) * (module.q_norm is not None)
            return attention + normed + 3 * heads * module.output_gate
    return attention


@dataclass(frozen=True)
class Setting:
    """The settings that decide how much memory a run needs.

    tokens: of a forward. accumulates: a step has several forwards. gpus: GPUs that share the weights. split: GPUs that
    share a row's tokens (cp x tp). quantized: frozen blocks are in 4 bits. copies: frozen models of the same size.
    sequences: of an example.
    """

    precision: str
    activations: str
    tokens: int
    accumulates: bool
    gpus: int = 1
    split: int = 1
    tp: int = 1
    on_cpu: bool = False
    quantized: bool = False
    copies: int = 0
    sequences: int = 1


class Need(NamedTuple):
    """Bytes on one GPU."""

    weights: int
    gradients: int
    states: int
    activations: int
    gathered: int
    total: int

    def __str__(self) -> str:
        names = ("weights", "gradients", "optimizer", "activations and logits", "gathered blocks and head")
        parts = [f"{name} {_gib(size)}" for name, size in zip(names, self, strict=False) if size]
        return f"{_gib(self.total)} (tensors, estimated): {', '.join(parts)}"


def estimate(sizes: Sizes, setting: Setting) -> Need:
    """The memory of a run, by the formulas at the top of this file."""
    weight, gradient, state = _BYTES[setting.precision]
    if setting.precision == "fp32" and setting.gpus == 1 and not setting.on_cpu:
        weight, gradient, state = _ONE_GPU_FP32
    frozen, frozen_bytes = 0, 4 if setting.on_cpu and setting.precision == "fp32" else 2
    adapters = sizes.trained < sizes.parameters and not sizes.heads
    if adapters:  # in fp32, on a frozen model
        frozen, (weight, gradient, state) = sizes.parameters, _BYTES["fp32"]
    elif sizes.heads:
        frozen = sizes.parameters - sizes.trained
    packed = sizes.block * sizes.blocks if setting.quantized else 0  # nf4: 4.127 bits, in blocks
    frozen_total = frozen_bytes * (frozen - packed) + int(4.127 / 8 * packed)
    copy = (4 if setting.precision == "fp32" and (setting.on_cpu or setting.gpus > 1) else 2) * sizes.parameters
    weights = (weight * sizes.trained + frozen_total + setting.copies * copy) // setting.gpus
    weights += (4 if setting.on_cpu else 2) * sizes.frozen // setting.gpus
    gradients, states = (size * sizes.trained // setting.gpus for size in (gradient, state))
    element, tokens = (4 if setting.on_cpu else 2), -(-setting.tokens // setting.split)
    saved = sizes.blocks * tokens * sizes.saved[setting.activations] * element
    if setting.activations == "block":
        saved += tokens * sizes.saved["none"] * element
    head, block = sizes.head // setting.tp, sizes.block // setting.tp
    saved += min(tokens, max(2048, 2**29 // (element * sizes.vocab or 1))) * sizes.vocab * element // setting.tp
    saved += 2 * sizes.mlp * setting.quantized
    gathered = (2 if adapters else 8) * head * (1 + sizes.heads) if setting.gpus > 1 else (0 if adapters else 4) * head
    forward = weights + states + saved + gathered + (gradients if setting.accumulates else 0)
    backward = weights + states + gradients + ((2 if frozen else 10) * block if setting.gpus > 1 else 0)
    backward += weight * head * (sizes.tied and not frozen and setting.gpus == 1)
    if forward < backward:
        gathered, saved = backward - weights - states - gradients, 0
    shown = gradients if setting.accumulates or forward < backward else 0
    return Need(weights, shown, states, saved, gathered, max(forward, backward))


def fits(sizes: Sizes, setting: Setting, available: int | None) -> bool:
    """available: bytes, or None where they are not known: then everything fits."""
    return available is None or estimate(sizes, setting).total <= MARGIN * available


def choose(sizes: Sizes, asked: Setting, available: int | None) -> Setting:
    """The setting with each "auto" replaced: the most exact weights that fit, and the least recomputation.

    Where nothing fits, the smallest.
    """
    precisions, policies = [asked.precision], [asked.activations]
    if asked.precision == "auto":
        precisions = ["fp32"] if asked.on_cpu else ["bf16-masters", "bf16"]
    if asked.activations == "auto":
        policies = ["none", "mlp", "block"]
    settings = [
        dataclasses.replace(asked, precision=precision, activations=policy)
        for precision in precisions
        for policy in policies
    ]
    return next((setting for setting in settings if fits(sizes, setting, available)), settings[-1])


def advice(sizes: Sizes, setting: Setting, available: int, adapters: int | None) -> list[str]:
    """Changes that would make a run fit, each as a flag with its need.

    adapters: parameters of LoRA of rank 16, or None where that is no choice.
    """
    found: list[str] = []

    def offer(*changes: tuple[str, Sizes, Setting]) -> None:
        """Adds the first change that fits."""
        for flags, other, small in changes:
            if fits(other, small, available):
                found.append(f"{flags}: {_gib(estimate(other, small).total)}")
                return

    change = partial(dataclasses.replace, setting, activations="block")
    if setting.activations != "block":
        offer(("--activations block", sizes, change()))
    if setting.precision in ("fp32", "bf16-masters") and not setting.on_cpu:
        offer(("--precision bf16", sizes, change(precision="bf16")))
    lengths = [setting.tokens // part for part in (2, 4, 8, 16, 32) if setting.tokens // part >= 128]
    flags = [f"--max-length {tokens // setting.sequences} --batch-tokens {tokens}" for tokens in lengths]
    offer(*((flag, sizes, change(tokens=tokens)) for flag, tokens in zip(flags, lengths, strict=True)))
    if adapters is not None:
        offer(("--lora-r 16", dataclasses.replace(sizes, trained=adapters), change(copies=0)))
    if not setting.on_cpu:
        more = [gpus for gpus in (2, 4, 8, 16, 32, 64) if gpus > setting.gpus]
        offer(*((f"torchrun over {gpus} GPUs", sizes, change(gpus=gpus)) for gpus in more))
    return found


def adapter_parameters(model: Any, options: Any) -> int:
    """The number of parameters that the lora_ options train."""
    rank, targets, total = options.lora_r, options.lora_target_modules, 0
    for name, module in model.decoder.layers.named_modules():
        if isinstance(module, nn.Linear) and (not targets or name.rpartition(".")[2] in targets):
            total += rank * (module.in_features + module.out_features) + options.use_dora * module.out_features
    if options.lora_target_parameters:
        from ligermodels.training.lora import ending, stacked_weights

        found = stacked_weights(model)
        for name in {name for end in options.lora_target_parameters for name in ending(found, end)}:
            experts, weight = found[name]
            number, rows, columns = getattr(experts, weight).shape
            total += number * rank * (rows + columns)
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in options.lora_modules_to_save:
            total += sum(parameter.numel() for parameter in module.parameters())
    return total


def available(device: torch.device) -> int | None:
    """The free bytes of the GPU, or the bytes of the host's memory; None if the system does not report them."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows
        return None


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"
