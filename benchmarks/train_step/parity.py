"""The checkpoints that all providers load, and who computes with them what transformers computes in fp32.

On a shallow model of the same widths and the same sequence length, whose attention is drawn sharp, so that a mask,
window, softcap or bias that is left out shows: logits, loss and gradient norm. At full depth the first timed step is
compared as well.
"""

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.images import for_transformers, with_pictures
from benchmarks.train_cases import Case, changed
from benchmarks.train_step.providers import ATTENTION, auto_class

PARITY_LOGITS = 64
"""Parity is checked on one sequence of the run's length, its logits on the last positions: beyond any window."""
PARITY_DRAWS = 4
"""Sequences that say what transformers in bf16 errs by: rms of its error in loss and gradient norm."""
SHARP_SCORES = 8.0
"""Standard deviation of the attention scores of the parity model. Those of a model just initialised are below 1:
all keys weigh the same, and neither a window nor a softcap of 50 would be missed."""
LOGITS_FACTOR, PEERS_LOGITS_FACTOR = 1.25, 4.0
"""Error of the logits over that of transformers in bf16. Ours rounds at places of its own, no more often;
a peer may be less exact and only has to be the same model."""
RELATIVE = 2**-8
"""For the loss and the gradient norm, beyond three times what transformers in bf16 errs by: one bf16 rounding. A mean
over tokens and a norm over all gradients average roundings out, so right models agree more closely; a wrong
rotation, mask or residual moves the norm by percents."""


def device_of(options: argparse.Namespace) -> str:
    return "cpu" if options.dry else "cuda"


def config_of(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    config = case.dry() if options.dry else case.config
    # For the longest sequence: no case's angles depend on where a model says it ends.
    return {**config, "max_position_embeddings": 2**22} if getattr(options, "longest", None) else config


def prepare(case: Case, options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Writes what is not there yet: the checkpoints `model` and `parity`, and what transformers computes with the
    latter at this length, parity-SEQ.pt. Returns the seconds that each took."""
    device, config, started = device_of(options), config_of(case, options), time.perf_counter()
    if not (folder / "model").exists():
        torch.manual_seed(options.seed)
        _initialised(config, case, device).save_pretrained(folder / "model")
    seconds = {"checkpoint": time.perf_counter() - started}
    if getattr(options, "longest", None) or parity_file(options, folder).exists():
        return seconds
    torch.manual_seed(options.seed)
    model = _initialised(config if options.dry else changed(config, case.shallow), case, device)
    _sharpen(model)
    if not (folder / "parity").exists():
        model.save_pretrained(folder / "parity")
    draws = batches(case, options, PARITY_DRAWS, 1, seed=options.seed + 1)
    in_bf16 = [probe(model.train(), for_transformers(model, inputs)) for inputs in draws]
    # In fp32 torch's attention repeats key heads only where it holds all scores: 128 GiB at 32768 tokens.
    with mock.patch("transformers.integrations.sdpa_attention.use_gqa_in_sdpa", return_value=False):
        exact = [probe(model.float(), for_transformers(model, inputs)) for inputs in draws]
    pairs = list(zip(in_bf16, exact, strict=True))
    errors = {"logits": statistics.mean(typical_error(a["logits"], b["logits"]) for a, b in pairs)}
    for name in ("loss", "gradient_norm"):
        errors[name] = statistics.mean((a[name] - b[name]) ** 2 for a, b in pairs) ** 0.5
    torch.save({"inputs": draws[0], "exact": exact[0], "errors_in_bf16": errors}, parity_file(options, folder))
    return {**seconds, "exact": time.perf_counter() - started - seconds["checkpoint"]}


def parity_bytes(case: Case, options: argparse.Namespace) -> int:
    """Of the device, enough for a provider's parity: a shallow model, its gradients and activations, and the logits,
    in bf16 and fp32, beside their log softmax and the gradients of both."""
    config = config_of(case, options)
    return 8 * 2**30 + (2 + 4 + 4 + 4 + 2) * options.seq * config.get("text_config", config)["vocab_size"]


def parity_file(options: argparse.Namespace, folder: Path) -> Path:
    return folder / f"parity-{options.seq}.pt"


def _initialised(config: Mapping[str, Any], case: Case, device: str) -> nn.Module:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    with torch.device(device):
        return auto_class(case).from_config(
            CONFIG_MAPPING[config["model_type"]].from_dict(config),
            dtype=torch.bfloat16,
            attn_implementation=ATTENTION[case.attention],
        )


@torch.no_grad()
def _sharpen(model: nn.Module) -> None:
    """Draws the rows of q and k anew, so that scores have a deviation of SHARP_SCORES, and all biases."""
    for name, parameter in model.named_parameters():
        rows = len(parameter)
        if ".qkv_proj." in name:
            heads, kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
            rows = rows * (heads + kv_heads) // (heads + 2 * kv_heads)
        if name.endswith(".bias"):
            parameter.normal_()
        elif any(f".{part}_proj." in name for part in ("q", "k", "qkv")):
            # Of normed inputs, q and k then have a deviation of SHARP_SCORES ** 0.5, and q k / sqrt(D) its square.
            parameter[:rows].normal_(0, (SHARP_SCORES / parameter.shape[1]) ** 0.5)


def probe(model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
    """Logits of the last positions, loss and gradient norm of one forward and backward on one sequence."""
    output = model(**inputs)
    output["loss"].backward()
    norms = [p.grad.float().norm() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    logits = output.logits
    if logits is None:  # a fused loss does not make them
        with torch.no_grad():
            logits = model(**{name: x for name, x in inputs.items() if name != "labels"}).logits
    logits = logits[:, -PARITY_LOGITS:].detach().to(torch.float32, copy=True)  # a view would hold them all
    return {"logits": logits, "loss": output["loss"].item(), "gradient_norm": torch.stack(norms).norm().item()}


def disagreement(found: Mapping[str, Any], expected: Mapping[str, Any], logits_factor: float) -> list[str]:
    """What `found` has wrong beside the contents of parity-SEQ.pt, in words; empty if it agrees."""
    exact, errors, reasons = expected["exact"], expected["errors_in_bf16"], []
    error, allowed = typical_error(found["logits"], exact["logits"]), logits_factor * errors["logits"]
    if not error <= allowed:
        reasons.append(f"logits err by {error:.3e} against fp32, allowed {allowed:.3e}")
    for name in ("loss", "gradient_norm"):
        allowed = RELATIVE * abs(exact[name]) + 3 * errors[name]
        if not abs(found[name] - exact[name]) <= allowed:
            reasons.append(f"{name} is {found[name]:.6g}, in fp32 {exact[name]:.6g}, allowed {allowed:.2g} off")
    return reasons


def compare_first_steps(rows: Sequence[dict[str, Any]]) -> None:
    """All start from the same weights on the same batch: step 1 must agree with transformers' too."""
    exact = [row for row in rows if "losses" in row and "inexact" not in row]
    theirs = [row for row in exact if not row["provider"].startswith("ligermodels")]
    reference = next((row for row in theirs if row["provider"] == "hf"), theirs[0] if theirs else None)
    for row in exact:
        if reference is None:
            continue
        for name in ("loss", "gradient_norm"):
            found, expected = (r["losses"][0] if name == "loss" else r["first_gradient_norm"] for r in (row, reference))
            # Both are bf16 and err by one rounding each.
            if not abs(found - expected) <= 2 * RELATIVE * abs(expected):
                row["parity"]["red"].append(
                    f"{name} of step 1 is {found:.6g}, {reference['provider']} has {expected:.6g}"
                )


def first_gradient_norm(optimizer: torch.optim.Optimizer) -> float:
    """Of the gradients of step 1, when AdamW has made that step only.

    Its first moments are (1 - beta1) gradient then. The gradients themselves are gone, where they are stepped on in
    backward, or in a graph's memory.
    """
    norms = [
        optimizer.state[p]["exp_avg"].float().norm() / (1 - group["betas"][0])
        for group in optimizer.param_groups
        for p in group["params"]
        if "exp_avg" in optimizer.state[p]
    ]
    return torch.stack(norms).norm().item()


def typical_error(logits: Tensor, exact: Tensor) -> float:
    """The rms over the vocabulary, of which the median over positions [1, S, V]: a token that bf16 sends to another
    expert than fp32 does is far off, whoever computes it. NaN if any is."""
    return (logits.double() - exact.double()).square().mean(-1).sqrt().median().item()


def batches(case: Case, options: argparse.Namespace, steps: int, batch: int, *, seed: int) -> list[dict[str, Tensor]]:
    """Model inputs for each step: random ids [B, S] and labels, and the case's image in front.

    The same on every device. Neither padding nor, in the text, ids of images: transformers does not train the row of
    the one, and takes the others for images.
    """
    config, generator = config_of(case, options), torch.Generator().manual_seed(seed)
    text = config.get("text_config", config)
    ids = torch.randint(text["vocab_size"], (steps, batch, options.seq), generator=generator)
    names = {name for name in config if name.endswith("token_id")} - {"bos_token_id", "eos_token_id"} | {"pad_token_id"}
    special = [text[name] for name in names if text.get(name) is not None]
    ids[torch.isin(ids, torch.tensor(special, dtype=torch.int64))] = text["bos_token_id"]
    ids = ids.to(device_of(options))
    if case.image is None:
        return [{"input_ids": row, "labels": row} for row in ids]
    height, width = (56, 56) if options.dry else case.image
    return [with_pictures(config, row, height, width, seed=seed + i) for i, row in enumerate(ids)]
