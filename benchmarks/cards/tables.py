"""What the pages and the charts say of measurements: which are compared, ratios, MFU, names of models and baselines."""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.cards.records import RECOMPUTED, Measurement, Record
from benchmarks.train_cases import MODELS, whole_and_layers

PEAK_TFLOPS = {"H200": 989.4, "H100": 989.4}
"""bf16, dense, of the SXM modules. Source: NVIDIA's datasheets of H100 and H200."""
DENSE = ("llama", "qwen2", "qwen3")
"""Families of which every token takes every weight and every layer attends to all tokens before it; MFU is of these."""
_OPTIONS = {
    "captured": "as one CUDA graph", "capture": "as CUDA graphs",
    "8bit_moments": "moments in 8 bits", "offload": "block inputs offloaded",
    "in_place": "gradients in place", "peft": "PEFT's adapters",
    "rowwise": "scales of rows", "tensorwise": "scales of tensors",
    "rowwise_bf16_dw": "scales of rows, dW in bf16", "fp8": "over a base in FP8",
}  # fmt: skip
_PEERS = {
    "hf": "transformers", "trl": "TRL", "unsloth": "unsloth", "liger": "Liger", "flex": "flex_attention", "fla": "fla",
    "tilelang": "fla's TileLang", "flashqla": "FlashQLA", "compile": "torch.compile",
    "compile_blocks": "torch.compile by blocks", "lora": "PEFT",
    "nf4": "PEFT in 4 bits", "ao_rowwise": "torchao, scales of rows", "ao_tensorwise": "torchao, scales of tensors",
    "ao_rowwise_with_gw_hp": "torchao, scales of rows, dW in bf16",
}  # fmt: skip
_GENERATION = {
    "captured": "ligermodels", "captured-fp8": "ligermodels, fp8 cache", "host": "ligermodels without a graph",
    "hf": "transformers", "hf-static": "transformers, static cache + torch.compile",
}  # fmt: skip
_DELTA_RULES = {"fla", "tilelang", "flashqla"}
_NAMES = {"llama": "Llama", "gemma": "Gemma", "phi": "Phi", "smollm2": "SmolLM2", "glm": "GLM", "mistral": "Mistral"}


@dataclass(frozen=True)
class Comparison:
    """Our best measurement beside the strongest peer's of the same record; peer: None where the record has none.

    all: every measurement of the record of the same case, ours first.
    """

    ours: Measurement
    peer: Measurement | None
    all: tuple[Measurement, ...]

    @property
    def figure(self) -> str:
        """The name of the figure that decides."""
        return decides(self.ours)

    @property
    def speedup(self) -> float | None:
        """How many times as fast, or as long, ours is."""
        if self.peer is None:
            return None
        ours, peer = self.ours.figures[self.figure], self.peer.figures[self.figure]
        return peer / ours if self.figure in ("s", "step s", "first token ms") else ours / peer

    @property
    def memory(self) -> float | None:
        """Our peak memory as a share of the peer's."""
        if self.peer is None or "peak GiB" not in self.ours.figures or "peak GiB" not in self.peer.figures:
            return None
        return self.ours.figures["peak GiB"] / self.peer.figures["peak GiB"]


def decides(row: Measurement) -> str:
    return {"longest": "length", "load": "s", "rollout": "step s", "first token": "first token ms"}.get(
        row.kind, "tokens/s"
    )


def comparisons(rows: list[Measurement]) -> list[Comparison]:
    """For each case the newest record that has us and a peer, else the newest that has us; in the order of tables."""
    by_case: dict[tuple[str, ...], dict[str, list[Measurement]]] = {}
    for row in rows:
        by_case.setdefault(row.measured, {}).setdefault(row.record.name, []).append(row)
    found = []
    for records in by_case.values():
        with_us = [list(newest_of(rows).values()) for rows in records.values() if any(ran(row) for row in rows)]
        with_us = [rows for rows in with_us if any(ran(row) for row in rows)]
        with_peer = [rows for rows in with_us if any(row.figures and not row.is_ours for row in rows)]
        if chosen := (with_peer or with_us)[-1:]:
            found.append(_comparison(chosen[0]))
    return sorted(found, key=order)


def ran(row: Measurement) -> bool:
    """Whether it is a measurement of ours with figures."""
    return row.is_ours and bool(row.figures)


def newest_of(rows: list[Measurement]) -> dict[str, Measurement]:
    return {row.key: row for row in rows}


def _comparison(rows: list[Measurement]) -> Comparison:
    def rank(row: Measurement) -> float:
        figure = row.figures[decides(row)]
        return figure if decides(row) in ("s", "step s", "first token ms") else -figure

    ours = min((row for row in rows if ran(row)), key=rank)
    peers = sorted((row for row in rows if row.figures and not row.is_ours), key=rank)
    return Comparison(ours, next(iter(peers), None), tuple(sorted(rows, key=lambda row: not row.is_ours)))


def order(comparison: Comparison) -> tuple[Any, ...]:
    row = comparison.ours
    recompute = RECOMPUTED.index(row.recompute) if row.recompute in RECOMPUTED else 1.5
    return row.family, *_natural(row.model), row.trained, row.device, _natural(row.case), recompute


def _natural(text: str) -> tuple[tuple[float, str], ...]:
    return tuple((float(number or 0), word) for number, word in re.findall(r"(\d[\d.]*)?([^\d]*)", text))


# Names


def model_name(name: str) -> str:
    """As it is written by those who released it: "qwen3-30b-a3b-2-layers" -> "Qwen3-30B-A3B (2 of 48 blocks)"."""
    whole, layers = whole_and_layers(name)
    parts = [_NAMES.get(part) or (part.upper() if re.fullmatch(r"[ae]?[\d.]+[bm]", part) else part) for part in
             whole.split("-")]  # fmt: skip
    first = parts[0] if whole.startswith("gpt-oss") else parts[0][:1].upper() + parts[0][1:]
    shown = "-".join([first, *parts[1:]])
    if layers is None:
        return shown
    return f"{shown} ({layers} of {MODELS[whole].config['num_hidden_layers']} blocks)"


def baseline_name(row: Measurement) -> str:
    if row.kind in ("decode", "drafted", "first token"):
        return _GENERATION.get(row.baseline, row.baseline)
    base, *options = row.baseline.split("+")
    if base in ("ligermodels", "unsloth"):
        is_ours = not {"adamw", "in_backward", "8bit_moments"}.isdisjoint(options)
        adamw = ["our AdamW in the backward" if "in_backward" in options else "our AdamW"] if is_ours else []
        return ", ".join([base, *adamw, *(_OPTIONS[name] for name in options if name in _OPTIONS)])
    known = list(_PEERS)
    options.sort(key=lambda name: known.index(name) if name in known else len(known))
    whole = " + ".join(_PEERS.get(name, name) for name in (base, *options))
    if row.kind == "rollout":
        whole += " with transformers' generate"
    if row.kind == "command" and "flex" not in options:
        whole += " on sdpa"
    slow = base == "hf" and row.family.startswith(("qwen3_5", "qwen3_next")) and not _DELTA_RULES & {*options}
    return whole + " (delta rule in PyTorch)" * slow


def shape(row: Measurement) -> str:
    if row.kind == "decode":
        batch, prompt, new = re.fullmatch(r"(\d+)x(\d+)\+(\d+)", row.case).groups()  # type: ignore[union-attr]
        return f"{int(batch)} row{'s' * (batch != '1')}, prompt {int(prompt):,}, {new} new"
    if row.kind == "rollout":
        prompts, group, prompt, new = re.split(r"[x+]", row.case)
        return f"{prompts} prompts of {prompt} x {group} completions of {new}"
    shown = re.sub(r"\d{5,}", lambda number: f"{int(number[0]):,}", row.case)
    if row.kind != "gpus":
        return shown
    size, *options = shown.split(", ")
    known = {"ep": "expert parallel", "tp": "tensor parallel", "cp": "context parallel", "whole": "not resharded",
             "one GPU": "on one GPU alone"}  # fmt: skip
    one = {"tp", "cp"} & {*options}
    how = [] if one or "one GPU" in options else ["FSDP2"]
    return ", ".join([size if one else f"{size} a GPU", *how, *(known.get(name, name) for name in options)])


TRAINED = {
    "full": "all weights", "lora": "LoRA of rank 16", "nf4": "QLoRA of rank 16 (nf4)",
    "mxfp4": "LoRA of rank 16 over experts in MXFP4", "full fp8": "all weights, products in FP8",
    "lora fp8": "LoRA of rank 16, products in FP8",
}  # fmt: skip


def recomputed(row: Measurement) -> str:
    """What the backward recomputes, for a column of that title."""
    names = {"none": "nothing", "mlp": "MLPs", "block": "blocks", "mlp offloaded": "MLPs; the rest is offloaded"}
    return names.get(row.recompute, row.recompute)


# Figures


def number(value: float, name: str = "") -> str:
    if name == "length":
        return f"{value:,.0f}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if name == "s" or abs(value) < 10 else f"{value:.1f}"


def gib(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def speed_and_gib(row: Measurement) -> str:
    """tokens/s / peak GiB."""
    if not row.figures:
        return "did not run"
    peak = row.figures.get("peak GiB")
    return number(row.figures["tokens/s"]) + (f" / {gib(peak)}" if peak is not None else "")


def times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"


def mfu(row: Measurement) -> float | None:
    """The share of the GPU's peak that the model's FLOPs of a step come to; recomputation does not count.

    A token takes 6 FLOPs a weight of a matmul (4 where these are frozen), and 6 * length * heads * head_dim a layer of
    causal attention. None where it is not defined here: several GPUs, packed rows, products in FP8, other than DENSE.
    """
    peak, case = PEAK_TFLOPS.get(row.device), re.fullmatch(r"\d+ x (\d+)", row.case)
    in_fp8 = row.trained.endswith("fp8")
    if (
        row.kind != "train"
        or in_fp8
        or row.family not in DENSE
        or peak is None
        or case is None
        or row.model not in MODELS
    ):
        return None
    matmuls, attention = flops(row.model)
    total = (6 if row.trained == "full" else 4) * matmuls + 6 * int(case[1]) * attention
    return row.figures["tokens/s"] * total / (peak * 1e12)


@functools.cache
def flops(model: str) -> tuple[int, int]:
    """(weights in matmuls, the head's among them; heads * head_dim of all layers)."""
    made = on_meta(MODELS[model].config)
    weights = sum(parameter.numel() for parameter in made.parameters() if parameter.dim() == 2)
    table = made.get_input_embeddings().weight.numel()
    config = made.config
    return weights - (0 if made.lm_head.is_tied else table), config.num_attention_heads * config.head_dim * len(
        made.model.layers
    )


def on_meta(config: Mapping[str, Any]) -> Any:
    """A model without memory for its weights."""
    import ligermodels

    return ligermodels.ARCHS[config["model_type"]].from_config(config, dtype=torch.bfloat16, device="meta")


def link(record: Record, up: str, text: str = "") -> str:
    return f"[{text or record.name}]({up}benchmarks/results/{record.name}.json)"
