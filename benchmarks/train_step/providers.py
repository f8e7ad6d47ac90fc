"""What a provider's name means: its model, its optimizer and its step.

`ligermodels`, with any of +adamw (our AdamW in place of torch's fused one), +inbackward (our AdamW, stepping inside
backward), +inplace (gradients are added to the .grad that is there), +captured (the step is one CUDA graph), +offload
(what is kept for backward goes to the host), +chunks (the loss makes its logits 256 MiB at a time); or `hf` with any
of +eager, +sdpa, +flex (its attention; sdpa where none is named, and for +liger and +compile the case's own), +loop,
+grouped_mm (its experts), +liger, +compile (its patch).
Behind a colon its checkpointing, where that is not the run's: `ligermodels+adamw:none`; `ligermodels:mlp-9` computes
the gated units of the first 9 blocks again, `ligermodels+offload:none-2` sends what the first 2 keep to the host.
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from benchmarks.train_cases import Case

CHECKPOINTING = ("none", "mlp", "block")
"""What is computed again in backward: nothing, the gated units or experts (ours alone can), whole blocks."""
ATTENTION = {"eager": "eager", "sdpa": "sdpa", "flex": "flex_attention"}
EXPERTS = {"loop": "eager", "grouped_mm": "grouped_mm"}
"""The word in a provider's name -> what transformers calls it."""
PATCHES = ("liger", "compile")
OURS = ("adamw", "inbackward", "inplace", "captured", "offload", "chunks")
LEARNING_RATE = 1e-5


@dataclass(frozen=True)
class Provider:
    """What is behind a provider's name. words: of `PATCHES` or `OURS`."""

    ours: bool
    checkpointing: str
    attention: str = ""
    experts: str = ""
    words: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, case: Case, checkpointing: str) -> Self:
        """Raises ValueError for a name that means nothing."""
        kind, _, own = name.partition(":")
        base, *words = kind.split("+")
        known = {"ligermodels": OURS, "hf": (*ATTENTION, *EXPERTS, *PATCHES)}.get(base)
        can = CHECKPOINTING if base == "ligermodels" else ("none", "block")
        what, _, blocks = (own or checkpointing).partition("-")
        known_blocks = not blocks or (
            blocks.isdecimal() and base == "ligermodels" and (what != "none" or "offload" in words)
        )
        if known is None or not set(words) <= set(known) or what not in can or not known_blocks:
            raise ValueError(
                f"unknown provider {name!r}; known: ligermodels with any of +{', +'.join(OURS)}, and :none, :mlp or "
                ":block behind it (:mlp-9: the first 9 blocks only); hf with any of "
                f"+{', +'.join((*ATTENTION, *EXPERTS, *PATCHES))}, and :none or :block behind it"
            )
        ours, flags = base == "ligermodels", tuple(word for word in words if word in PATCHES + OURS)
        attention = next((word for word in words if word in ATTENTION), case.attention if flags else "sdpa")
        experts = next((word for word in words if word in EXPERTS), "")
        return cls(ours, own or checkpointing, attention, experts, flags)


def auto_class(case: Case) -> Any:
    """The class of transformers that finds the model's."""
    import transformers

    return transformers.AutoModelForImageTextToText if case.image else transformers.AutoModelForCausalLM


def build(provider: Provider, case: Case, folder: Path, device: str, *, shallow: bool = False) -> nn.Module:
    """The provider's model with the checkpoint's weights in bf16, ready to train. shallow: it has fewer blocks than the
    case, of which the provider's checkpointing takes as many as there are."""
    if provider.ours:
        import ligermodels

        model: nn.Module = ligermodels.load(folder, dtype=torch.bfloat16, device=device, progress=False)
    else:
        model = _theirs(provider, case, folder, device)
    model.train()
    what, _, blocks = provider.checkpointing.partition("-")
    if provider.ours and (what != "none" or "offload" in provider.words):
        options: dict[str, Any] = {"recompute": what, "offload": "offload" in provider.words}
        if blocks:
            options["blocks"] = min(int(blocks), len(model.decoder.layers)) if shallow else int(blocks)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    elif what != "none":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if "chunks" in provider.words:
        model.lm_head.workspace_bytes = 256 * 2**20  # type: ignore[union-attr]
    if "inplace" in provider.words:
        from ligermodels.training.gradients import accumulate_in_place

        accumulate_in_place(model)
    if "compile" in provider.words:
        model.compile(dynamic=False)
    return model


def _theirs(provider: Provider, case: Case, folder: Path, device: str) -> nn.Module:
    options: dict[str, Any] = {"attn_implementation": ATTENTION[provider.attention]}
    if provider.experts:
        options["experts_implementation"] = EXPERTS[provider.experts]
    if device == "cuda" and importlib.util.find_spec("accelerate"):
        options["device_map"] = device  # straight to the card
    model = auto_class(case).from_pretrained(folder, dtype=torch.bfloat16, **options).to(device)
    model.config.use_cache = False
    if "liger" in provider.words:
        patches = importlib.import_module("liger_kernel.transformers")
        getattr(patches, f"apply_liger_kernel_to_{model.config.model_type}")(model=model)
    return model


def optimizer_of(provider: Provider, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with states in the weights' dtype."""
    captured = "captured" in provider.words
    if {"adamw", "inbackward"} & set(provider.words):
        from ligermodels.training.adamw import AdamW

        return AdamW(
            model.parameters(), lr=LEARNING_RATE, step_in_backward="inbackward" in provider.words, capturable=captured
        )
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True, capturable=captured)


def step_of(
    provider: Provider,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    example: Mapping[str, Tensor],
    after_backward: Callable[[], None] = lambda: None,
) -> Callable[..., Tensor]:
    """A function of the model's inputs that trains one step on them and returns the loss.

    after_backward: called where the gradients are whole; not by a captured step, which does not stop there.
    """
    if "captured" in provider.words:
        from ligermodels.training.capture import CapturedStep

        return CapturedStep(model, optimizer, **example)

    def step(**inputs: Tensor) -> Tensor:
        loss = model(**inputs)["loss"]
        loss.backward()
        after_backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def preload(name: str, case: Case) -> None:
    """Imports what the provider of that name will need, and touches no device."""
    modules = ["ligermodels.arch"]
    if not name.startswith("ligermodels"):
        kind = case.config["model_type"]
        modules = [f"transformers.models.{kind}.modeling_{kind}", "transformers.models.auto.modeling_auto"]
    if "+liger" in name:
        modules.append("liger_kernel.transformers")
    if "+compile" in name:
        modules.append("torch._inductor.compile_fx")
    for module in modules:
        importlib.import_module(module)
