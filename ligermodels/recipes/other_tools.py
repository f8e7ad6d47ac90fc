"""What an unknown option means: the names of TRL, transformers, PEFT, axolotl, LLaMA-Factory, torchtune and unsloth.

docs/options.md shows the table; a test compares the two.
"""

import dataclasses
import difflib
from collections.abc import Sequence

from ligermodels.recipes import RECIPES, find
from ligermodels.recipes.options import TrainOptions, fields_of, flag, names_of

_TORCHRUN = "start it by `torchrun --nproc-per-node N -m ligermodels train ...`: FSDP shards the model"

OPTIONS = (
    # model and data
    ("model_name_or_path base_model model_name model_id pretrained_model_name_or_path", "MODEL", ""),
    ("tokenizer_name tokenizer_name_or_path tokenizer_config tokenizer", "", "the tokenizer is that of MODEL"),
    ("revision model_revision", "", "`train` reads the default branch; for another, give its folder as MODEL"),
    ("adapter_name_or_path lora_model_dir", "",
     "merge the adapter first: `ligermodels convert BASE DST --adapter DIR`"),
    ("trust_remote_code", "", "no code of a repository is run; leave it out"),
    ("rl stage finetuning_type training_type", "",
     "the recipe is the word after `train`: sft, dpo, ...; --lora-r N for LoRA"),
    ("dataset dataset_name datasets dataset_dir data_path train_file train_data data_files pretraining_dataset",
     "--data", "a file, folder or data set of the Hub; several, each with its --data"),
    ("dataset_config dataset_config_name dataset_split dataset_train_split split", "--data",
     "as OWNER/NAME:CONFIG:SPLIT"),
    ("dataset_text_field text_column field_messages messages_field columns column_map", "",
     "the format is detected from the names of the columns: docs/training.md"),
    ("interleave_probs mix_strategy dataset_mixer", "--data", "several, with weights: FILE*0.5"),
    ("max_train_samples", "--max-samples", ""),
    ("eval_dataset validation_file dataset_test_split test_datasets eval_file", "--eval-data", ""),
    ("val_set_size val_size test_size", "--eval-share", "a fraction below 1"),
    ("max_seq_length max_seq_len sequence_len cutoff_len block_size model_max_length", "--max-length", ""),
    ("max_prompt_length", "--max-length", "of prompt and answer together"),
    ("template chat_template_path chat_template_jinja", "--chat-template", "a file, or a name in the model's files"),
    ("default_system", "--system-prompt", "for chats that begin without one"),
    ("sample_packing eval_sample_packing neat_packing packed packing_strategy group_by_length", "--packing",
     "on by default"),
    ("padding_free pad_to_sequence_len pad_to_multiple_of", "", "packed rows have no padding; leave it out"),
    ("completion_only_loss train_on_responses_only train_on_inputs train_on_input train_on_prompt roles_to_train",
     "--assistant-only-loss", "on by default; off, every token is trained"),
    ("dataset_num_proc dataset_processes preprocessing_num_workers dataloader_num_workers dataloader_pin_memory", "",
     "the number of processes that encode rows is chosen; leave it out"),
    ("streaming dataset_prepared_path tokenized_path overwrite_cache remove_unused_columns", "",
     "rows are encoded as they are needed, and nothing is cached; leave it out"),
    ("shuffle shuffle_merged_datasets data_seed", "--seed", "rows are shuffled in each pass"),
    ("special_tokens added_tokens new_special_tokens add_special_tokens resize_vocab", "",
     "`train` adds no tokens to the tokenizer"),
    # length of the run
    ("num_epochs", "--num-train-epochs", ""),
    ("train_steps num_steps", "--max-steps", ""),
    ("per_device_train_batch_size micro_batch_size batch_size train_batch_size per_device_batch_size", "--batch-tokens",
     "tokens of a forward pass on one GPU, not rows"),
    ("per_device_eval_batch_size eval_batch_size", "--batch-tokens", "evaluations have batches of the same size"),
    ("gradient_accumulation_steps gradient_accumulation grad_accum_steps", "--accumulation",
     "forward passes of a step, of all GPUs together"),
    ("early_stopping_steps", "--early-stopping-patience", "in evaluations"),
    # optimizer
    ("embedding_learning_rate loraplus_lr_ratio loraplus_lr_embedding", "", "`train` has one learning rate for all"),
    ("lr_scheduler scheduler", "--lr-scheduler-type", "cosine, linear, wsd or constant_with_warmup"),
    ("lr_scheduler_kwargs cosine_min_lr_ratio min_lr min_lr_rate", "--final-lr", "a fraction of the peak"),
    ("warmup_ratio num_warmup_steps lr_warmup_steps", "--warmup-steps", "steps, or below 1 a fraction of them"),
    ("optim optimizer optim_args", "", "the optimizer is AdamW; --precision says the dtype of its states"),
    ("betas", "--adam-beta1", "and --adam-beta2"),
    ("adam_epsilon", "", "the epsilon of AdamW is 1e-8, and not an option"),
    ("clip_grad_norm gradient_clipping grad_clip", "--max-grad-norm", ""),
    ("neftune_noise_alpha noisy_embedding_alpha", "", "`train` has no NEFTune"),
    ("label_smoothing_factor", "",
     "`sft` has no label smoothing; --label-smoothing of dpo, cpo and simpo is that of pairs"),
    ("use_galore use_badam use_apollo pissa_init init_lora_weights", "",
     "`train` has no GaLore, BAdam, APOLLO or PiSSA"),
    ("freeze_trainable_layers unfrozen_parameters train_layers", "",
     "`train` trains all weights, or adapters (--lora-r N)"),
    # memory
    ("bf16 fp16 dtype torch_dtype pure_bf16 mixed_precision half_precision", "--precision", "auto: bf16 on GPUs"),
    ("tf32", "", "matrix products on GPUs are in bf16; leave it out"),
    ("gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing use_gradient_checkpointing "
     "enable_activation_checkpointing", "--activations", "none, mlp or block; auto: the least that fits"),
    ("activation_offloading enable_activation_offloading", "",
     "`train` does not offload activations; a loop of your own can: docs/training.md"),
    ("use_peft adapter peft lora_rank r rank", "--lora-r N", "the rank"),
    ("lora_target target_modules lora_attn_modules", "--lora-target-modules", "default: all projections"),
    ("lora_target_linear apply_lora_to_mlp", "--lora-target-modules", "all projections are the default"),
    ("peft_use_dora", "--use-dora", ""),
    ("peft_use_rslora", "--use-rslora", ""),
    ("additional_target", "--lora-modules-to-save", ""),
    ("load_in_4bit quantization_bit bnb_4bit_quant_type bnb_4bit_use_double_quant", "--quantize nf4",
     "with --lora-r N"),
    ("load_in_8bit", "", "`train` has no base in 8 bits; --quantize nf4 has one in 4"),
    ("attn_implementation flash_attention flash_attn sdp_attention xformers_attention use_flash_attention_2 "
     "use_liger_kernel enable_liger_kernel use_unsloth", "", "the kernels are fused already; leave it out"),
    ("torch_compile compile", "", "`train` does not compile; --capture of sft and pretrain makes steps CUDA graphs"),
    # processes
    ("deepspeed fsdp fsdp_config fsdp_version num_processes num_gpus ddp_timeout ddp_find_unused_parameters", "",
     _TORCHRUN),
    ("tensor_parallel_size tensor_parallel_dim tp_size", "--tp", ""),
    ("context_parallel_size context_parallel_dim sequence_parallel_degree cp_size", "--cp", ""),
    ("dp_replicate_size data_parallel_replicate_dim", "--dp-replicate", ""),
    ("dp_shard_size data_parallel_shard_dim", "", "FSDP takes the processes that --tp, --cp and --dp-replicate leave"),
    ("device device_map", "", "it runs on the GPU where there is one; CUDA_VISIBLE_DEVICES says on which"),
    # checkpoints and logs
    ("save_dir", "--output-dir", ""),
    ("overwrite_output_dir", "", "a folder with a run is not overwritten: give another --output-dir, or --resume"),
    ("save_strategy saves_per_epoch save_interval save_freq", "--save-steps", "in steps"),
    ("save_only_model save_safetensors", "", "checkpoints have what --resume needs, and models are safetensors"),
    ("eval_strategy evaluation_strategy evals_per_epoch run_val_every_n_steps eval_interval", "--eval-steps",
     "in steps"),
    ("load_best_model_at_end metric_for_best_model", "", "OUT/best has the model of the lowest evaluation loss"),
    ("resume_from_checkpoint auto_resume_from_checkpoints", "--resume",
     "with the same --output-dir; it goes on after the newest checkpoint"),
    ("logging_steps logging_strategy logging_dir log_every_n_steps plot_loss", "",
     "OUT has every step in metrics.jsonl"),
    ("log use_wandb use_tensorboard metric_logger", "--report-to", "auto, tensorboard, wandb or none"),
    ("run_name wandb_name wandb_run_name wandb_project wandb_entity", "",
     "with --report-to wandb a run has the name of its --output-dir; WANDB_PROJECT and WANDB_ENTITY are read by wandb"),
    ("push_to_hub hub_model_id hub_strategy hub_token hub_private_repo", "",
     "`train` does not upload: `hf upload OWNER/NAME OUT/model`"),
    ("merge_lora merge_adapter", "--merge", ""),
    # losses
    ("pref_loss", "--loss-type", ""),
    ("pref_beta dpo_beta kto_beta orpo_alpha kl_coef kl_beta", "--beta", ""),
    ("rpo_alpha cpo_alpha pref_ftx", "--sft-weight", ""),
    ("gamma", "--simpo-gamma", ""),
    ("kto_chosen_weight kto_desirable_weight", "--desirable-weight", ""),
    ("kto_rejected_weight kto_undesirable_weight", "--undesirable-weight", ""),
    ("ref_model ref_model_name_or_path reference_model", "", "the reference is MODEL as it was before the run"),
    # rollouts
    ("teacher_model teacher_model_name_or_path", "--teacher", ""),
    ("response_length max_new_tokens", "--max-completion-length", ""),
    ("importance_sampling_level", "--loss-type gspo", "for \"sequence\""),
    ("reward_model_name_or_path", "--reward-funcs FILE.py:FUNCTION", ""),
    ("log_completions", "", "OUT/completions.jsonl has them"),
    ("top_k top_p min_p", "", "completions are drawn from all tokens"),
    ("use_vllm vllm_mode vllm_gpu_memory_utilization", "", "the model's own `generate` samples; leave it out"),
)  # fmt: skip
"""(their names; our option, with a value or none, or ""; what differs, or what to do)."""


def unknown(names: Sequence[str], options: type[TrainOptions]) -> str:
    """The error for options that a recipe does not have, as they were given: flags, or keys of a file."""
    advice = [(name, _advice(name.removeprefix("--").replace("-", "_"), options)) for name in names]
    if len(advice) == 1:
        return f"{options.recipe} has no option {names[0]}; {advice[0][1]}"
    return f"{options.recipe} does not have these options:" + "".join(f"\n  {name}: {text}" for name, text in advice)


def _advice(name: str, options: type[TrainOptions]) -> str:
    if recipes := _recipes_with(name):
        return f"{recipes} it"
    for theirs, ours, note in OPTIONS:
        if name in theirs.split():
            own = ours.partition(" ")[0].removeprefix("--").replace("-", "_").lower()
            use = "use" if own in fields_of(options) else _recipes_with(own)
            return f"{use} {ours}" + f" ({note})" * bool(note) if ours else note
    names = sorted(name for field in dataclasses.fields(options) for name in names_of(field))
    close = difflib.get_close_matches(name, names, 1, 0.8)
    if near := close or [other for other in names if len(name) > 2 and other.startswith(name)]:
        return f"did you mean {' or '.join(map(flag, near))}?"
    return f"`ligermodels train {options.recipe} --help` lists all"


def _recipes_with(name: str) -> str:
    """ "sft has", or "dpo, kto have": the recipes with an option; "" if there are none."""
    options = {recipe: dataclasses.fields(find(recipe).Options) for recipe in RECIPES}
    found = [recipe for recipe, fields in options.items() if any(name in names_of(field) for field in fields)]
    return f"{', '.join(found)} {'has' if len(found) == 1 else 'have'}" if found else ""
