"""What the options of TRL, transformers, axolotl and unsloth are called here, for errors and for docs/options.md.

    python -m ligermodels.recipes.other_tools docs/options.md

writes the table of that page.
"""

import sys
from pathlib import Path

_PACKED = "rows are always packed, by best fit; a row attends to itself alone"
_FUSED = "there is none: the kernels are fused already"
_BEST = "the model of the best evaluation is in DIR/best"
ROWS = {
    "model_name_or_path, model_name, model, base_model": "MODEL, the argument without a name; `model:` in a file",
    "per_device_train_batch_size, micro_batch_size, train_batch_size, batch_size":
        "`--batch-tokens`: tokens of a forward pass on one GPU, not rows",
    "per_device_eval_batch_size, eval_batch_size": "`--batch-tokens`, which evaluations use too",
    "gradient_accumulation_steps": "`--accumulation`: forward passes of a step, of all GPUs together",
    "bf16, fp16, tf32, torch_dtype": "`--precision`: of weights and states of AdamW",
    "optimizer": "`--optim adamw`, `adamw8bit` or `muon`; `--precision` decides what the other states of AdamW take",
    "gradient_checkpointing": "`--activations none`, `mlp` or `block`",
    "use_peft, peft, adapter": "`--lora-r` above 0",
    "load_in_4bit": "`--quantize nf4` with `--lora-r`",
    "load_in_8bit": "`--quantize fp8` with `--lora-r`, on GPUs that have FP8",
    "lora_target_linear": "all linear layers have adapters unless `--lora-target-modules` is given",
    "packing, sample_packing, padding_free, group_by_length, pad_to_sequence_len": _PACKED,
    "dataset_name, dataset_config, dataset_train_split, datasets, dataset":
        "`--data`: a file, a folder, or OWNER/NAME:CONFIG:SPLIT of the Hub",
    "dataset_text_field": "there is none: the text of a row is under `text`",
    "max_seq_length, max_seq_len, sequence_len": "`--max-length`; beyond the model's context it is a warning",
    "val_set_size": "`--eval-share`",
    "eval_strategy, evaluation_strategy": "`--eval-steps`: steps between evaluations",
    "save_strategy": "`--save-steps`: steps between checkpoints",
    "load_best_model_at_end, metric_for_best_model": _BEST,
    "train_on_inputs, completion_only_loss": "`--no-assistant-only-loss` of sft trains every token",
    "logging_steps, logging_dir, disable_tqdm": "there is none: every step is in DIR/metrics.jsonl",
    "wandb_project, wandb_entity": "there is none: `--report-to wandb` reads WANDB_PROJECT and WANDB_ENTITY",
    "wandb_name, trackio_name": "`--run-name`",
    "early_stopping, early_stopping_steps": "`--early-stopping-patience`: evaluations",
    "warmup_ratio": "`--warmup-steps` below 1",
    "min_lr_rate, cosine_min_lr_ratio": "`--final-lr`: a fraction of the peak",
    "neftune, noisy_embedding_alpha": "`--neftune-noise-alpha` of sft",
    "rpo_alpha, cpo_alpha": "`--sft-weight` of dpo, cpo and simpo",
    "importance_sampling_level": '`--loss-type gspo` and `luspo` of grpo are "sequence"',
    "lmbda": "`--on-policy` of distill is lmbda 1",
    "use_vllm": "there is none: grpo samples with the model that it trains",
    "use_liger_kernel, attn_implementation, flash_attention, torch_compile": _FUSED,
    "fsdp, fsdp_config, deepspeed, num_processes": "`torchrun --nproc-per-node N -m ligermodels train ...`",
    "device, device_map, no_cuda, use_cpu": "there is none: a GPU if there is one; CUDA_VISIBLE_DEVICES chooses which",
    "resume_from_checkpoint": "`--resume` with the same `--output-dir`",
    "overwrite_output_dir": "there is none: give a new `--output-dir`",
    "hub_token": "there is none, so that no file has it: `hf auth login`, or HF_TOKEN",
    "push_to_hub_model_id, hub_repo_id": "`--hub-model-id` with `--push-to-hub`",
    "trust_remote_code": "there is none: no code of a checkpoint is run",
    "dataloader_num_workers, dataset_num_proc, remove_unused_columns": "there is none, and none is needed",
}  # fmt: skip
"""Options of other tools, and what they are here."""
_MEANINGS = {name: meaning for names, meaning in ROWS.items() for name in names.split(", ")}
_HEAD = "| elsewhere | here |\n|---|---|\n"


def meaning(name: str) -> str | None:
    """What an option of another tool, as a flag or a key of a file, is here; None for a name that none of them has."""
    text = _MEANINGS.get(name.strip("-").replace("-", "_"))
    if text is None:
        return None
    return text if text.startswith("there is none") else f"here {text}".replace("`", "")


def table() -> str:
    """The table of docs/options.md."""
    return _HEAD + "".join(f"| `{names.replace(', ', '`, `')}` | {text} |\n" for names, text in ROWS.items())


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(page.read_text("utf-8").partition(_HEAD)[0] + table(), "utf-8")
