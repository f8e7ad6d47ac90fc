"""Training from the same weights on the same text, ours beside transformers: do the losses stay together?

Every family at a tiny size with all that sets it apart switched on: softcaps, windows shorter than the sequence,
biases, experts with their balancing loss, rotary embeddings beyond their original length. The text is the bytes of
the LICENSE file. In fp32 the two curves have to agree; in bf16, where no two programs round alike, ours may be no
further from transformers' fp32 curve than transformers' own bf16 one.

With --recipes, one family's models are trained as a user would, by our optimizer and torch's in each of their forms,
by steps within the backward, and with recomputation: how far does each lie from transformers' fp32 curve by torch's
AdamW, and where do the last steps come out? Two programs in bf16 whose optimizers keep fp32 weights say how far apart
curves lie that are the same but for rounding.

    python -m benchmarks.convergence --out benchmarks/results/convergence.json     # on a GPU, fp32 and bf16
    python -m benchmarks.convergence --dry --families llama                        # 8 steps on the CPU
    python -m benchmarks.convergence --recipes --families llama --out benchmarks/results/convergence-recipes.json
    python -m benchmarks.convergence --recipes --dry --families llama
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.common import PACKAGES, environment, table, write_json

TEXT = Path(__file__).parent.parent / "LICENSE"
STEPS, BATCH, LENGTH, SEEDS = 200, 4, 48, 4
LAST = 20
"""Steps at the end whose mean loss is what training came to."""
LEARNING_RATE = 1e-3
"""Twice that lets one mixture in six send a token to another expert than transformers does within 200 steps: two
experts tie to within fp32's rounding, and from there on the curves are two."""

_TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "use_cache": False,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
    "partial_rotary_factor": 0.75,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "mistral": {"head_dim": 24, "sliding_window": 12},
    "mixtral": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
        "sliding_window": 20,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.05,
    },
    "gemma": {"head_dim": 24, "num_key_value_heads": 1, "attention_bias": True},
    "gemma2": {
        "head_dim": 24,
        "query_pre_attn_scalar": 10,
        "sliding_window": 12,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 8.0,
    },
    "qwen2": {
        "use_sliding_window": True,
        "sliding_window": 12,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
        "rope_parameters": _YARN,
    },
    "phi3": {"sliding_window": 30, "original_max_position_embeddings": 32, "rope_parameters": _LONGROPE},
    "qwen3": {
        "head_dim": 24,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 12,
        "max_window_layers": 1,
    },
}
"""model_type -> what its config has beside _TINY."""
SWITCHES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "mistral": {"sliding_window": None},
    "mixtral": {"output_router_logits": False, "sliding_window": None, "num_experts_per_tok": 1},
    "gemma": {"hidden_activation": "silu"},
    "gemma2": {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "sliding_window": 128,
        "query_pre_attn_scalar": 24,
    },
    "qwen2": {"use_sliding_window": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "phi3": {"sliding_window": None, "rope_parameters": {**_LONGROPE, "long_factor": _LONGROPE["short_factor"]}},
    "qwen3": {"use_sliding_window": False},
}
"""model_type -> values of its config that switch a feature off, each of which the loss has to show."""


def write_checkpoint(family: str, folder: Path, seed: int = 0) -> Path:
    """A checkpoint by transformers: weights of deviation 0.1, so that scores leave the flat part of softmax, softcap
    and gate, norms 0.1 around theirs, and biases that are not zero."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**_TINY, **FAMILIES[family]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.1)
            if "norm" in name and not family.startswith("gemma"):
                parameter.add_(1.0)
    model.save_pretrained(folder)
    return folder


def theirs(folder: Path, dtype: torch.dtype, device: str) -> nn.Module:
    """transformers' model with eager attention and experts, the forms that compute every family in every dtype."""
    from transformers import AutoConfig, AutoModelForCausalLM

    options: dict[str, Any] = {"attn_implementation": "eager"}
    if hasattr(AutoConfig.from_pretrained(folder), "num_local_experts"):
        options["experts_implementation"] = "eager"
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).to(device)


def ours(folder: Path, dtype: torch.dtype, device: str) -> nn.Module:
    import ligermodels

    return ligermodels.load(folder, dtype=dtype, device=device, progress=False)


def text_batches(steps: int, device: str, seed: int = 0) -> Tensor:
    """Token ids [steps, BATCH, LENGTH]: pieces of TEXT from random places, one token a byte."""
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - LENGTH, (steps, BATCH, 1), generator=generator)
    return text[starts + torch.arange(LENGTH)].to(device)


def losses(model: nn.Module, batches: Tensor) -> Tensor:
    """The loss of each step [steps] of training `model` with AdamW on batches [steps, B, S].

    The optimizer works on fp32 copies of the weights. In bf16 its small steps would be lost in rounding otherwise,
    in the same way for every model, and drown what the models compute differently: both curves would lie 2 % from
    fp32's, and within 1 % of that from one another.
    """
    weights = [p for p in model.train().parameters() if p.requires_grad]
    masters = [p.detach().float().clone() for p in weights]
    optimizer = torch.optim.AdamW(masters, lr=LEARNING_RATE, weight_decay=0.01, fused=True)
    found = []
    for ids in batches:
        loss = model(input_ids=ids, labels=ids)["loss"]
        loss.backward()
        for weight, master in zip(weights, masters, strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
        found.append(loss.detach())
    return torch.stack(found).double().cpu()


class Recipe(NamedTuple):
    """A way to train: whose model, in which dtype, by which optimizer (None: torch's, on fp32 copies of the weights),
    and what of it is computed again in the backward."""

    build: Callable[[Path, torch.dtype, str], nn.Module]
    dtype: torch.dtype
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None
    recompute: str = "none"


def torch_adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.01, fused=True)


def our_adamw(**options: Any) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    from ligermodels.training.adamw import AdamW

    return lambda parameters: AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.01, **options)


_BF16, _FP32 = torch.bfloat16, torch.float32
EXACT = "transformers, fp32, torch's AdamW"


def recipes() -> dict[str, Recipe]:
    """What is compared, by name, and first what all is compared with."""
    exact = our_adamw(master_weights=True, state_dtype=torch.float32)
    return {
        EXACT: Recipe(theirs, _FP32, torch_adamw),
        "ligermodels, fp32, torch's AdamW": Recipe(ours, _FP32, torch_adamw),
        "ligermodels, fp32, AdamW": Recipe(ours, _FP32, our_adamw()),
        "ligermodels, fp32, AdamW, step in backward": Recipe(ours, _FP32, our_adamw(step_in_backward=True)),
        "ligermodels, fp32, AdamW, recompute mlp": Recipe(ours, _FP32, our_adamw(), "mlp"),
        "ligermodels, fp32, AdamW, recompute block": Recipe(ours, _FP32, our_adamw(), "block"),
        "transformers, bf16, torch's AdamW on fp32 copies": Recipe(theirs, _BF16, None),
        "transformers, bf16, torch's AdamW": Recipe(theirs, _BF16, torch_adamw),
        "ligermodels, bf16, torch's AdamW": Recipe(ours, _BF16, torch_adamw),
        "ligermodels, bf16, AdamW, nearest": Recipe(ours, _BF16, our_adamw(rounding="nearest")),
        "ligermodels, bf16, AdamW": Recipe(ours, _BF16, our_adamw()),
        "ligermodels, bf16, AdamW, step in backward": Recipe(ours, _BF16, our_adamw(step_in_backward=True)),
        "ligermodels, bf16, AdamW, recompute mlp": Recipe(ours, _BF16, our_adamw(), "mlp"),
        "ligermodels, bf16, AdamW, recompute block": Recipe(ours, _BF16, our_adamw(), "block"),
        "ligermodels, bf16, AdamW, master weights": Recipe(ours, _BF16, our_adamw(master_weights=True)),
        "ligermodels, bf16, AdamW, master weights, fp32 states": Recipe(ours, _BF16, exact),
    }


def follow(recipe: Recipe, folder: Path, batches: Tensor, device: str) -> Tensor:
    """The loss of each step [steps] of training by a recipe on batches [steps, B, S]."""
    model = recipe.build(folder, recipe.dtype, device).train()
    if recipe.recompute != "none":
        model.gradient_checkpointing_enable({"recompute": recipe.recompute})
    if recipe.optimizer is None:
        return losses(model, batches)
    optimizer, found = recipe.optimizer(model.parameters()), []
    for ids in batches:
        loss = model(input_ids=ids, labels=ids)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return torch.stack(found).double().cpu()


def compare_recipes(family: str, device: str, steps: int, seeds: int) -> list[dict[str, Any]]:
    """For each recipe its distance from the exact curve, over all steps and seeds, and of its last steps alone."""
    curves: dict[str, list[Tensor]] = {name: [] for name in recipes()}
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(family, Path(folder), seed)
            batches = text_batches(steps, device, seed)
            for name, recipe in recipes().items():
                curves[name].append(follow(recipe, Path(folder), batches, device))
    ends = {name: torch.stack([curve[-LAST:].mean() for curve in found]) for name, found in curves.items()}
    return [
        {
            "family": family,
            "recipe": name,
            "last_loss": ends[name].mean().item(),
            "apart": rms([apart(*pair) for pair in zip(found, curves[EXACT], strict=True)]),
            "last_apart": ((ends[name] - ends[EXACT]) / ends[EXACT]).mean().item(),
        }
        for name, found in curves.items()
    ]


def apart(curve: Tensor, other: Tensor) -> Tensor:
    """Relative distance of two curves at each step."""
    return (curve - other).abs() / other.abs()


def rms(distances: Sequence[Tensor]) -> float:
    """One figure for how far curves lie apart, over all steps and all seeds."""
    return torch.cat(list(distances)).square().mean().sqrt().item()


def compare(family: str, device: str, steps: int, seeds: int) -> dict[str, Any]:
    """How far apart curves lie: ours from transformers' in fp32, and both in bf16 from its fp32 one."""
    fp32, in_bf16 = [], {"ours": [], "theirs": []}
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as name:
            folder = write_checkpoint(family, Path(name), seed)
            batches = text_batches(steps, device, seed)
            exact = losses(theirs(folder, torch.float32, device), batches)
            fp32.append(apart(losses(ours(folder, torch.float32, device), batches), exact))
            for who, build in (("ours", ours), ("theirs", theirs)):
                in_bf16[who].append(apart(losses(build(folder, torch.bfloat16, device), batches), exact))
    return {
        "family": family,
        "first_loss": exact[0].item(),
        "last_loss": exact[-LAST:].mean().item(),
        "fp32_first_32": max(distance[:32].max().item() for distance in fp32),
        "fp32_last": max(distance[-1].item() for distance in fp32),
        "bf16_ours": rms(in_bf16["ours"]),
        "bf16_theirs": rms(in_bf16["theirs"]),
    }


COLUMNS = {
    "family": "family",
    "first_loss": "first loss",
    "last_loss": "last loss",
    "fp32_first_32": "fp32: first 32 steps",
    "fp32_last": "fp32: last step",
    "bf16_ours": "bf16: ours",
    "bf16_theirs": "bf16: transformers",
}
"""The keys of `compare` and what they are called; from the fourth on they are relative distances."""
RECIPE_COLUMNS = {
    "family": "family",
    "recipe": "recipe",
    "last_loss": "last loss",
    "apart": "all steps from the first row",
    "last_apart": "last steps from the first row",
}
"""The same of `compare_recipes`; the last has a sign: above 0 where the loss is higher."""


def render(record: Mapping[str, Any], *, markdown: bool = False) -> str:
    """The table of a result as text."""
    env, settings = record["environment"], record["settings"]
    versions = ", ".join(f"{package} {env[package]}" for package in PACKAGES if env[package])
    columns = RECIPE_COLUMNS if settings.get("recipes") else COLUMNS
    keys = list(columns)
    lines = [[*(row[key] for key in keys[:3]), *(f"{row[key]:.1e}" for key in keys[3:])] for row in record["rows"]]
    return "\n\n".join(
        [
            f"{env['device']}, {versions}; commit {env['commit']}, {env['date']}",
            f"`{env['command']}`" if markdown else env["command"],
            f"### {settings['steps']} steps of AdamW, {settings['seeds']} seeds",
            table(list(columns.values()), lines, markdown=markdown),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--families", default=",".join(FAMILIES), help="comma-separated; default all")
    parser.add_argument("--recipes", action="store_true", help="compare optimizers and recomputation instead")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--out", help="JSON file for the result")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    parser.add_argument("--render", metavar="FILE.json", help="print an earlier result instead of training")
    parser.add_argument("--dry", action="store_true", help="8 steps of one seed on the CPU: does everything run?")
    options = parser.parse_args(arguments)
    if options.render:
        print(render(json.loads(Path(options.render).read_text()), markdown=options.markdown))
        return 0
    families = options.families.split(",")
    if unknown := sorted(set(families) - set(FAMILIES)):
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(FAMILIES)}")
    if not options.dry and not torch.cuda.is_available():
        parser.error("needs a CUDA device; --dry trains 8 steps on the CPU")
    device, steps, seeds = ("cpu", 8, 1) if options.dry else ("cuda", STEPS, options.seeds)
    rows = []
    for family in families:
        started = time.perf_counter()
        if options.recipes:
            rows += compare_recipes(family, device, steps, seeds)
        else:
            rows.append(compare(family, device, steps, seeds))
        print(f"{family}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    record = {
        "benchmark": "convergence",
        "environment": environment(device),
        "settings": {
            "steps": steps,
            "seeds": seeds,
            "batch": BATCH,
            "length": LENGTH,
            "lr": LEARNING_RATE,
            "recipes": options.recipes,
        },
        "rows": rows,
    }
    if options.out:
        write_json(options.out, record)
    print(render(record, markdown=options.markdown))
    return 0


if __name__ == "__main__":
    sys.exit(main())
