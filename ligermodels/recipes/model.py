"""The model of a run, its tokenizer and its optimizer, as the options say."""

import copy
import dataclasses
import math
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ligermodels.arch import CausalLM, arch_of, load
from ligermodels.arch.pretrained import config_values
from ligermodels.checkpoint import hub, mxfp4
from ligermodels.errors import InputError, config_of
from ligermodels.layers.fp8 import RECIPES, candidates, check_device
from ligermodels.layers.moe import mixtures_of
from ligermodels.layers.quantized import QuantizedLinear
from ligermodels.parallel import parallelize
from ligermodels.processes import Processes
from ligermodels.recipes.memory import keeps_fp8_weights
from ligermodels.recipes.options import TrainOptions, check_named, flag
from ligermodels.text import Tokenizer
from ligermodels.training import AdamW, MuonAdamW, accumulate_in_place
from ligermodels.training.lora import add_lora
from ligermodels.training.muon import matrices_of


def source_of(options: TrainOptions, processes: Processes) -> tuple[Path, Any]:
    """The folder of MODEL, and the model on the meta device; or a model in memory, and the folder of its tokenizer.

    Raises InputError for a model that cannot be trained with these options.
    """
    if (model := options.objects.get("model")) is not None:
        _check_in_memory(options, model, processes)
        tokenizer: Any = options.objects.get("tokenizer")
        folder = Path(tokenizer) if isinstance(tokenizer, str | Path) else model.source_folder
        if folder is None and tokenizer is None:
            raise InputError(
                "model: it came from no folder, so that its tokenizer is not known; give tokenizer=, a folder, a "
                "repository, or a ligermodels.Tokenizer"
            )
        return folder or tokenizer.files.folder, model
    folder = folder_of(options)
    return folder, sketch(folder, text_only=options.text_only, mtp_loss_weight=options.mtp_loss_weight)


def _check_in_memory(options: TrainOptions, model: Any, processes: Processes) -> None:
    if not isinstance(model, CausalLM):
        raise InputError(
            f"model is a {type(model).__name__}: expected the name of a repository or folder, or a model of "
            "ligermodels (ligermodels.load; ligermodels.from_transformers makes one of a model of transformers)"
        )
    if processes.mesh is not None:
        raise InputError("model: several processes read a model from its files; save it, and give the folder")
    why = dict.fromkeys(("scratch", "text_only", "quantize", "mtp_loss_weight"), "it is for a model that is loaded")
    for name, reason in why.items():
        if getattr(options, name) not in (False, 0.0, "none"):
            raise InputError(f"{name}: {reason}, and this one is in memory; load it so, or leave {flag(name)} out")
    if any(".lora_" in name for name, _ in model.named_parameters()):
        raise InputError("model has adapters already: give training.merge_lora(model), or the base, with lora_r=")
    if any(isinstance(module, QuantizedLinear) for module in model.modules()) and not options.lora_r:
        raise InputError("model has quantised weights, which are frozen: give lora_r=, such as 16")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise InputError("model has weights on the meta device or on the disk: load it whole")
    if not options.lora_r and not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError("model has no weight that requires a gradient: model.requires_grad_(True) trains all")
    name = str(model.dtype).removeprefix("torch.")
    if processes.device.type == "cpu" and model.dtype != torch.float32:
        raise InputError(f"model is in {name}, and the CPU trains in float32: give model.float()")
    if model.dtype not in (torch.float32, torch.bfloat16):
        raise InputError(f"model is in {name}: give model.bfloat16(), or model.float()")
    if model.dtype == torch.float32 and options.precision not in ("auto", "fp32"):
        raise InputError(f"precision={options.precision}: the model is in float32; give model.bfloat16()")


def folder_of(options: TrainOptions) -> Path:
    """The folder of MODEL. Raises InputError for a folder of adapters, of weights alone, or of a run."""
    check_named(options.model, "model")
    if Path(options.model, "options.yaml").is_file() and not Path(options.model, "config.json").exists():
        results = [str(path) for name in ("model", "adapter") if (path := Path(options.model, name)).is_dir()]
        advice = f"give what it has written: {' or '.join(results)}" if results else "it has written no model yet"
        raise InputError(f"{options.model} is the folder of a run of `train`; {advice}")
    folder = hub.resolve(options.model, weights=not options.scratch)
    if not (folder / "config.json").is_file():
        what = "no config.json; copy into it the config.json of the model that the weights came from"
        if (folder / "adapter_config.json").is_file():
            what = "only adapters; give the model that they belong to, or a merged model"
        raise InputError(f"{options.model} has {what}")
    return folder


def sketch(folder: Path, *, text_only: bool = False, mtp_loss_weight: float = 0.0) -> Any:
    """The model of a folder on the meta device; with a weight of its loss, the layer for multi-token prediction too."""
    kind = arch_of(folder, text_only=text_only)
    with config_of(folder):
        values = mxfp4.dequantized_config(config_values(folder, None))
        return kind.from_config(values, device="meta", mtp_loss_weight=mtp_loss_weight or None)


def with_quantization(options: TrainOptions, folder: Path) -> TrainOptions:
    """The options for the checkpoint in a folder: adapters are trained over one in MXFP4 as it is.

    Raises InputError for `merge`, since no sum of weights and adapters is in MXFP4.
    """
    in_memory = options.objects.get("model") is not None
    if in_memory or options.scratch or not options.lora_r or options.quantize != "none":
        return options
    if not mxfp4.is_mxfp4(config_values(folder)):
        return options
    if options.merge:
        raise InputError(
            "merge: the experts of the model are in MXFP4, and adapters cannot be added to them; merge later: "
            "`ligermodels convert MODEL DST --adapter DIR/adapter`"
        )
    return dataclasses.replace(options, quantize="mxfp4")


def tokenizer_of(options: TrainOptions, folder: Path, sketch: Any) -> Tokenizer:
    """The tokenizer, with the template of --chat-template."""
    tokenizer = options.objects.get("tokenizer") or folder
    tokenizer = Tokenizer.from_hub(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
    if options.chat_template is not None:
        if sketch.extra_inputs:
            raise InputError("chat_template: a model of images needs its own, which places them; leave it out")
        tokenizer.read_chat_template(Path(options.chat_template).expanduser())
    return tokenizer


def check_length(length: int, sketch: Any, name: str, processes: Processes) -> None:
    """Warns, on rank 0, if sequences are longer than the context. name: of the model, as in "the teacher's context"."""
    context = sketch.config.get_text_config().max_position_embeddings
    if length > context and processes.is_main:
        warnings.warn(
            f"--max-length {length} is more than the {name}'s context of {context} tokens (max_position_embeddings), "
            "beyond which it has not been trained; lower it, unless that is the aim",
            stacklevel=2,
        )


def check_capture(sketch: Any, processes: Processes) -> None:
    """Raises InputError if steps cannot be CUDA graphs, or if padding would change the loss."""
    reason = ""
    if processes.mesh is not None:
        reason = "it is for one process, and there are several"
    elif sketch.extra_inputs:
        reason = f"the images of a {type(sketch).__name__} have no fixed shape"
    elif getattr(sketch.config, "output_router_logits", False):
        reason = "the balancing loss of the routers (output_router_logits in config.json) would count the padding"
    if reason:
        raise InputError(f"capture: {reason}; leave --capture out")


def check_muon(processes: Processes) -> None:
    """Raises InputError if the matrices are sharded, which Muon orthogonalises whole."""
    if processes.mesh is not None:
        raise InputError(
            f"optim=muon: it needs whole matrices, and each of the {processes.size} processes has a part of them; "
            "leave --optim out"
        )


def check_fp8(options: TrainOptions, sketch: Any, processes: Processes) -> None:
    """Raises InputError if the run cannot multiply in FP8, which --fp8 or --quantize fp8 asks for."""
    name = "fp8" if options.fp8 != "none" else "quantize"
    how = f"{name}={getattr(options, name)}"
    if processes.device.type == "cpu":
        raise InputError(f"{how}: the run is on the CPU, which is slow in FP8; leave {flag(name)} out")
    check_device(processes.device)
    if options.objects.get("model") is not None and sketch.dtype != torch.bfloat16:
        raise InputError(f"{how}: the model is in {sketch.dtype}, and FP8 is beside bfloat16: give model.bfloat16()")
    if name == "fp8" and not [*candidates(sketch.decoder.layers)]:
        raise InputError(
            f"{how}: no linear layer of a {type(sketch).__name__} has sizes that are multiples of 16; leave --fp8 out"
        )


def check_router_biases(sketch: Any) -> None:
    """Raises InputError if no router has a bias, by which --router-bias-rate balances experts."""
    if all(mixture.plain_router.e_score_correction_bias is None for mixture in mixtures_of(sketch)):
        raise InputError(
            f"router_bias_rate: no router of a {type(sketch).__name__} has a correction bias; leave --router-bias-rate "
            "out"
        )


def model_of(
    options: TrainOptions, folder: Path, processes: Processes, add: Callable[[Any], Any] | None = None, *,
    frozen: bool = False,
) -> Any:  # fmt: skip
    """The model, ready to train. add: adds modules to it before it is sharded. frozen: for a reference."""
    gpu = processes.device.type == "cuda"
    mixed = torch.bfloat16 if gpu and (options.precision == "fp32" or options.lora_r) else None
    low = options.precision != "fp32" or (gpu and processes.mesh is None)
    how: dict[str, Any] = dict(
        dtype=torch.bfloat16 if low else torch.float32, activation_checkpointing=options.activations,
        mtp_loss_weight=options.mtp_loss_weight or None,
    )  # fmt: skip
    shards_later = processes.mesh is None or options.lora_r or add is not None  # after modules are added
    in_memory = options.objects.get("model")
    fp8 = None
    if options.fp8 != "none":
        fp8 = dataclasses.replace(RECIPES[options.fp8], keep_weights=keeps_fp8_weights(options, processes))
        how["fp8"] = fp8
    if shards_later:
        how["device"] = processes.device
    else:
        how |= dict(mesh=processes.mesh, parallel=dict(param_dtype=mixed))
    if in_memory is not None:
        if frozen:
            return copy.deepcopy(in_memory).requires_grad_(False).eval()
        model = in_memory.to(processes.device)
        if fp8 is not None:
            model.use_fp8(fp8)
        model._set_checkpointing(options.activations)
    elif options.scratch:
        kind = arch_of(folder, text_only=options.text_only)
        model = kind.from_config(config_values(folder, None), seed=options.seed, **how)
        model.source_folder = folder  # for the files of the tokenizer
    else:
        if options.quantize != "none":
            how["quantization_config"] = options.quantize
        elif mxfp4.is_mxfp4(config_values(folder)):  # all weights are trained
            how["quantization_config"] = {"quant_method": "mxfp4", "dequantize": True}
        how |= dict(text_only=options.text_only, progress=processes.is_main and sys.stderr.isatty())
        model = load(str(folder), **how)
        model.config._name_or_path = model.name_or_path = options.model
    if options.lora_r:
        add_lora(
            model, r=options.lora_r, alpha=options.lora_alpha, dropout=options.lora_dropout, dora=options.use_dora,
            targets=list(options.lora_target_modules) or "all-linear", rslora=options.use_rslora,
            modules_to_save=options.lora_modules_to_save, target_parameters=options.lora_target_parameters,
            seed=options.seed,
        )  # fmt: skip
    if add is not None:
        add(model)
    if shards_later and processes.mesh is not None:
        parallelize(model, processes.mesh, param_dtype=mixed)
    if frozen:
        return model.requires_grad_(False).eval()
    if not options.lora_r and gpu and processes.mesh is None and options.accumulation != 1:
        accumulate_in_place(model)
    return model.train()


def make_optimizer(options: TrainOptions, model: Any, processes: Processes) -> AdamW:
    """The optimizer of the trained parameters, without weight decay of norms and biases."""
    is_muon = options.optim == "muon"
    matrices = matrices_of(model) if is_muon else []
    by_muon = set(matrices)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad and p not in by_muon}
    decayed = {n: p for n, p in trained.items() if p.dim() >= 2 and not n.endswith("bias")}  # experts have [E, N]
    groups: list[dict[str, Any]] = [
        dict(params=[*decayed.values()], weight_decay=options.weight_decay),
        dict(params=[p for n, p in trained.items() if n not in decayed], weight_decay=0.0),
    ]
    if is_muon:
        groups.append(dict(params=matrices, weight_decay=options.weight_decay, muon=True))
    exact = options.precision == "fp32" and processes.device.type == "cuda" and processes.mesh is None
    moments = torch.uint8 if options.optim == "adamw8bit" else torch.float32 if exact else None
    return (MuonAdamW if is_muon else AdamW)(
        [group for group in groups if group["params"]],
        betas=(options.adam_beta1, options.adam_beta2),
        master_weights=exact or options.precision == "bf16-masters" or bool(options.lora_r),
        state_dtype=moments,
        max_grad_norm=options.max_grad_norm or math.inf,
        seed=options.seed,
        capturable=options.capture,
    )
