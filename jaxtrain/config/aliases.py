"""Aliases: config keys of other stacks and our own former keys, with the right key.

The spellings come from Hugging Face (TrainingArguments, TRL, PretrainedConfig, peft), torchtitan,
nanochat, MaxText, Megatron, DeepSeek and Axolotl. A spelling is a key, or the end of a dotted path:
`save_every` also matches `checkpoint.save_every`, and `eval.steps` matches only paths that end so.
"""

from collections.abc import Collection, Mapping

# Dotted path of each field -> the variants of its section that have it; empty if the section has no
# variants. The path of a `name` has all variants of its section.
Known = Mapping[str, Collection[str]]

# Our key -> other spellings of it, which take the same values.
SAME = {
    "run.name": "run_name run_id experiment_name model_tag exp_name project_name",
    "run.directory": "output_dir out_dir base_output_directory base_output_dir save_dir "
    "logging_dir dump_folder checkpoint_dir checkpoint.folder ckpt_dir default_root_dir",
    "run.seed": "seed training_seed init_weights_seed random_seed manual_seed",
    "data.train.path": "dataset_path data_path train_file train_files dataset_name data_dir "
    "hf_path hf_train_files train_data train_data_path datasets.path dataset training.dataset",
    "data.train.field": "dataset_text_field text_field text_key field_messages train_data_columns",
    "data.train.template": "chat_template chat_template_path chat_template_jinja",
    "data.train.sources": "dataset_mixture datasets data_mixture blend data_blend dataset_mixer",
    "data.validation.fraction": "val_set_size validation_split val_fraction val_split eval_split "
    "test_size validation_split_percentage",
    "data.tokenizer.path": "tokenizer_path tokenizer_name tokenizer_model tokenizer_file "
    "hf_assets_path tokenizer_config tokenizer_name_or_path",
    "data.tokenizer.name": "tokenizer_type tokenizer",
    "data.tokenizer.vocab_size": "vocab_size n_vocab vocabulary_size vocab",
    "data.tokenizer.special_tokens": "additional_special_tokens",
    "data.seed": "data_seed data_shuffle_seed shuffle_seed",
    "data.cache_dir": "cache_dir dataset_prepared_path data_cache_path dataset_cache_dir",
    "data.prefetch": "dataloader_prefetch_factor prefetch_factor prefetch_buffer_size",
    "data.workers": "dataloader_num_workers num_workers grain_worker_count loader_workers",
    "data.prepare_workers": "dataset_num_proc dataset_processes preprocessing_num_workers num_proc",
    "data.augment.rate": "mask_probability fim_rate span_corruption_rate",
    "data.stages": "curriculum data_schedule training_stages",
    "optim.name": "opt_type optim_type optimizer_type optimizer_name optimizer.name",
    "optim.clip_norm": "max_grad_norm grad_clip gradient_clipping_threshold max_norm clip_grad "
    "gradient_clipping gradient_clip_val clip_grad_norm grad_clip_norm gradient_clip_norm",
    "optim.weight_decay": "weight_decay wd adam_weight_decay",
    "optim.b1": "adam_beta1 beta1 beta_1 adam_b1",
    "optim.b2": "adam_beta2 beta2 beta_2 adam_b2",
    "optim.eps": "adam_epsilon adam_eps epsilon optimizer.eps",
    "optim.momentum": "muon_momentum muon_beta sgd_momentum",
    "optim.orthogonalize": "ns_method newton_schulz",
    "optim.head_lr": "unembedding_lr lm_head_lr output_lr",
    "optim.embedding_lr": "embed_lr wte_lr",
    "optim.state_dtype": "mu_dtype optimizer_state_dtype optim_dtype main_params_dtype",
    "optim.offload": "cpu_offload optimizer_cpu_offload optimizer_memory_host_offload "
    "optimizer_offload offload_optimizer enable_cpu_offload",
    "optim.offload.directory": "nvme_path",
    "optim.multipliers": "embedding_lr_scale lr_multipliers lr_groups",
    "optim.schedule.name": "lr_scheduler_type lr_scheduler lr_schedule_type decay_type schedule "
    "scheduler lr_decay_style lr_schedule",
    "optim.schedule.warmup_steps": "warmup_steps num_warmup_steps warmup_iters warmup lr_warmup "
    "lr_warmup_steps lr_warmup_iters",
    "optim.schedule.final_fraction": "final_lr_frac min_lr_ratio min_lr_factor cosine_min_lr_ratio "
    "cosine_learning_rate_final_fraction learning_rate_final_fraction min_lr_rate",
    "optim.schedule.decay_fraction": "warmdown_ratio decay_ratio cooldown_frac cooldown_fraction "
    "cooldown_ratio wsd_decay_steps_fraction",
    "finetune.name": "peft_type peft_method adapter finetuning_type",
    "finetune.rank": "r lora_r lora_rank lora_dim rank",
    "finetune.alpha": "lora_alpha",
    "finetune.targets": "target_modules lora_target_modules lora_target lora_target_linear",
    "finetune.group_size": "qalora_group_size",
    "finetune.rslora": "use_rslora peft_use_rslora",
    "finetune.dora": "use_dora peft_use_dora",
    "finetune.lora_plus_ratio": "loraplus_lr_ratio",
    "finetune.init_adapter": "lora_model_dir adapter_name_or_path adapter_path lora_path",
    "finetune.trainable": "unfrozen_parameters trainable_parameters unfreeze",
    "finetune.last_layers": "freeze_trainable_layers num_trainable_layers",
    "finetune.virtual_tokens": "num_virtual_tokens prompt_length prefix_length",
    "finetune.projection": "encoder_hidden_size prefix_projection",
    "finetune.width": "bottleneck_size adapter_dim",
    "objective.name": "rl loss_type rlhf_method preference_loss objective_name",
    "objective.rate": "mlm_probability mlm_prob mask_ratio masked_lm_prob",
    "objective.depth": "mtp_num_layers num_nextn_predict_layers",
    "objective.beta": "rl_beta dpo_beta kto_beta orpo_alpha pref_beta",
    "objective.label_smoothing": "dpo_label_smoothing cdpo_label_smoothing",
    "objective.desirable_weight": "kto_desirable_weight kto_chosen_weight",
    "objective.undesirable_weight": "kto_undesirable_weight kto_rejected_weight",
    "mesh.data": "dp dp_size data_parallel data_parallel_size data_parallel_replicate_degree "
    "dp_replicate dp_replicate_size ici_data_parallelism dcn_data_parallelism ddp",
    "mesh.fsdp": "fsdp_size dp_shard dp_shard_size data_parallel_shard_degree "
    "ici_fsdp_parallelism dcn_fsdp_parallelism fsdp_parallelism",
    "mesh.tensor": "tp tp_size tensor_parallel tensor_parallel_size tensor_parallel_degree "
    "ici_tensor_parallelism dcn_tensor_parallelism tensor_model_parallel_size",
    "mesh.context": "cp cp_size sp context_parallel context_parallel_size context_parallel_degree "
    "ici_context_parallelism ici_sequence_parallelism sequence_parallel_degree "
    "sequence_parallel_size",
    "mesh.pipeline": "pp pp_size pipeline_parallel pipeline_parallel_size "
    "pipeline_parallel_degree ici_pipeline_parallelism dcn_pipeline_parallelism "
    "pipeline_model_parallel_size",
    "mesh.expert": "ep ep_size expert_parallel expert_parallel_size expert_parallel_degree "
    "ici_expert_parallelism dcn_expert_parallelism expert_model_parallel_size",
    "mesh.pipeline_repeats": "num_pipeline_repeats virtual_pipeline_model_parallel_size",
    "mesh.pipeline_schedule": "pipeline_parallel_schedule pp_schedule",
    "mesh.batch_overlap": "two_batch_overlap dual_batch_overlap enable_two_batch_overlap "
    "enable_dbo",
    "mesh.zero": "zero_stage zero_optimization.stage zero_optimization",
    "eval.every": "eval_steps eval_every eval_interval eval.steps eval.interval eval.freq "
    "validation.freq validation.interval val_check_interval val_every val_interval eval_freq",
    "eval.tokens": "eval_tokens val_tokens",
    "eval.batch_size": "eval_batch_size",
    "sample.every": "sample_every generate_every generate_steps",
    "sample.tokens": "max_new_tokens max_generated_tokens max_tokens",
    "sample.prompts": "prompt sample_prompts",
    "sample.kv_cache_dtype": "kv_cache_dtype kv_quant_dtype",
    "checkpoint.every": "save_steps save_every save_interval checkpoint_period checkpoint.interval "
    "checkpoint.steps checkpoint.freq checkpoint_interval checkpoint_every ckpt_interval save_freq",
    "checkpoint.keep": "save_total_limit keep_latest_k max_num_checkpoints_to_keep "
    "checkpoint.limit max_checkpoints max_to_keep",
    "metrics.every": "logging_steps log_every log_interval log_freq log_period log_steps "
    "metrics.interval metrics.steps",
    "metrics.tensorboard": "enable_tensorboard use_tensorboard",
    "metrics.wandb": "use_wandb enable_wandb wandb wandb_project",
    "processes.start_timeout": "init_timeout_seconds ddp_timeout",
    "processes.step_timeout": "train_timeout_seconds",
    "model.depth": "layers n_layer n_layers num_layers num_hidden_layers base_num_decoder_layers "
    "num_decoder_layers",
    "model.width": "d_model n_embd hidden_size dim model_dim emb_dim embed_dim base_emb_dim "
    "embedding_size embedding_dim",
    "model.heads": "n_head n_heads num_heads num_attention_heads base_num_query_heads "
    "num_query_heads",
    "model.kv_heads": "n_kv_head n_kv_heads num_kv_heads num_key_value_heads base_num_kv_heads "
    "num_query_groups",
    "model.head_dim": "head_size d_head kv_channels",
    "model.hidden": "intermediate_size ffn_dim mlp_dim base_mlp_dim n_inner ffn_hidden_size d_ff "
    "ffn_hidden_dim hidden_dim mlp_hidden_size",
    "model.ffn": "hidden_act activation activation_function mlp_activations act_fn mlp_type",
    "model.moe.experts": "num_experts n_experts num_local_experts n_routed_experts",
    "model.moe.top_k": "num_experts_per_tok num_experts_per_token moe_top_k moe_router_topk "
    "model.top_k experts_per_token",
    "model.moe.hidden": "moe_intermediate_size base_moe_mlp_dim moe_ffn_hidden_size moe_mlp_dim",
    "model.moe.shared_experts": "n_shared_experts num_shared_experts shared_experts",
    "model.moe.every": "decoder_sparse_step interleave_moe_layer_step moe_layer_freq",
    "model.moe.score_function": "scoring_func score_func score_function moe_router_score_function",
    "model.moe.aux_loss": "router_aux_loss_coef load_balance_loss_weight moe_aux_loss_coeff "
    "aux_loss_coef aux_loss_alpha",
    "model.moe.z_loss": "router_z_loss_coef moe_z_loss_coeff router_z_loss",
    "model.vocab_multiple": "pad_vocab_size_to make_vocab_size_divisible_by pad_to_multiple_of",
    "model.position_embedding": "position_embedding_type position_embedding pos_emb "
    "positional_encoding",
    "model.rope_base": "rope_theta rotary_base rope_max_timescale rotary_emb_base",
    "model.rope_base_short": "rope_local_base_freq local_rope_theta",
    "model.rope_scaling": "rope_parameters rope_config",
    "model.rope_scaling.original_context": "original_max_position_embeddings",
    "model.qk_norm": "use_qk_norm qk_layernorm use_qk_layernorm",
    "model.qkv_bias": "attention_bias use_qkv_bias add_qkv_bias attention_in_bias",
    "model.ffn_bias": "mlp_bias use_mlp_bias",
    "model.window_pattern": "layer_types sliding_window_pattern attention_pattern",
    "model.short_window": "sliding_window sliding_window_size window_size attention_window",
    "model.context_length": "max_position_embeddings n_positions n_ctx",
    "model.norm": "norm_type normalization layernorm_type",
    "model.norm_eps": "rms_norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon "
    "normalization_layer_epsilon",
    "model.post_norm": "use_post_attn_norm use_post_ffw_norm sandwich_norm",
    "model.tied_head": "tie_word_embeddings tie_embeddings tied_embeddings weight_tying "
    "tie_weights logits_via_embedding enable_weight_tying",
    "model.logit_softcap": "final_logit_softcapping final_logits_soft_cap logits_soft_cap "
    "logit_cap",
    "model.attention_softcap": "attn_logit_softcapping attn_logits_soft_cap attn_softcap",
    "model.document_mask": "intra_document_masking attn_mask_type doc_mask",
    "model.causal": "is_causal is_decoder bidirectional",
    "model.init": "initializer_range init_std init_method weight_init",
    "model.base_width": "mup_base_width mup_width mup_base_hidden_size",
    "model.embedding_dtype": "embed_dtype",
    "model.attention": "attn_implementation attention_kernel attn_type attention_backend "
    "attention_type flash_attention use_flash_attention flash_attn sdp_attention "
    "xformers_attention",
    "model.scan_layers": "scan_blocks stack_layers",
    "model.fp8_history": "amax_history_len fp8_amax_history_len",
    "model.ffn_tiles": "tiled_mlp_num_shards tiled_mlp mlp_chunks chunked_mlp",
    "train.sequence_length": "block_size seq_len seq_length max_seq_len max_seq_length max_length "
    "sequence_len max_target_length context_length context_len ctx_len model_max_length "
    "sequence_length cutoff_len",
    "train.steps": "max_steps num_iterations num_steps max_iters train_iters total_steps "
    "num_train_steps train_steps training_steps",
    "train.device_batch_size": "micro_batch_size per_device_train_batch_size per_device_batch_size "
    "local_batch_size microbatch_size mbs train_micro_batch_size_per_gpu "
    "pipeline_parallel_microbatch_size",
    "train.batch_size": "batch_size global_batch_size train_batch_size gbs",
    "train.tokens_per_parameter": "target_param_data_ratio tokens_per_param param_data_ratio",
    "train.init_from": "model_name_or_path base_model pretrained_model_name_or_path "
    "initial_load_path load_parameters_path load_path pretrained model_id model_path "
    "init_checkpoint",
    "train.z_loss": "z_loss z_loss_multiplier z_loss_weight z_loss_coef",
    "train.compiler_options": "xla_flags compiler_flags xla_options",
    "train.loss_spike": "loss_watchdog_threshold spike_detection",
    "train.local_sgd": "diloco local_sgd use_diloco enable_diloco",
    "train.local_sgd.every": "sync_every diloco_sync_period inner_steps",
    "train.local_sgd.outer_lr": "diloco_outer_lr outer_learning_rate",
    "train.local_sgd.outer_momentum": "diloco_outer_momentum",
}  # fmt: skip

# Advice -> the spellings that it answers: keys with another unit, other values, or no counterpart.
# Each dotted path is a field or a section, and each path=value is a valid setting (a test checks).
SENTENCES = {
    "there is no such key; the number of accumulated microbatches is train.batch_size / (devices x "
    "train.device_batch_size): set those two, both in sequences": "gradient_accumulation_steps "
    "grad_accum_steps accumulate_grad_batches grad_accumulation_steps gradient_accumulation "
    "accumulation_steps",
    "jaxtrain calls it train.batch_size, in sequences: tokens of a step / train.sequence_length":
    "total_batch_size batch_size_tokens tokens_per_batch tokens_per_step global_batch_tokens",
    "jaxtrain calls it eval.batch_size, in sequences summed over all devices: those of one device "
    "x devices": "per_device_eval_batch_size validation.local_batch_size",
    "there are no epochs; set train.steps (an epoch has training tokens / (train.batch_size x "
    "train.sequence_length) steps)": "num_train_epochs num_epochs epochs n_epochs max_epochs "
    "num_epoch",
    "jaxtrain calls it train.steps: tokens / (train.batch_size x train.sequence_length)":
    "max_train_tokens train_tokens total_tokens num_tokens target_flops",
    "jaxtrain calls it optim.schedule.warmup_steps, in steps: ratio x train.steps":
    "warmup_ratio warmup_fraction warmup_steps_fraction lr_warmup_fraction pct_start",
    "jaxtrain calls it optim.schedule.final_fraction, a fraction of the peak learning rate: "
    "minimum / peak": "min_lr lr_min end_lr lr_end minimum_learning_rate eta_min",
    "there is no such key; every schedule ends with train.steps":
    "lr_decay_iters lr_decay_steps learning_rate_schedule_steps lr_scheduler_steps",
    "set optim.b1 and optim.b2 (optim.name=adamw; Muon has optim.momentum)": "betas adam_betas",
    "jaxtrain has the section optim, and optim.name says which optimizer": "optimizer optim_args "
    "optimizer_config optimizers optim_config",
    "there is none; use data.augment (data.augment.name=masking hides input tokens), "
    "optim.weight_decay or fewer train.steps": "dropout dropout_rate attention_dropout "
    "attn_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop residual_dropout "
    "hidden_dropout_prob attention_probs_dropout_prob",
    "there is none; use optim.weight_decay, a smaller finetune.rank or fewer train.steps":
    "lora_dropout neftune_noise_alpha noisy_embedding_alpha",
    "jaxtrain calls it model.remat; set model.remat=block (attention, ffn, dots and offload "
    "recompute less; none: nothing)": "gradient_checkpointing activation_checkpointing "
    "gradient_checkpointing_kwargs remat_policy use_remat recompute recompute_granularity "
    "activation_checkpoint activation_checkpoint.mode grad_checkpointing activation_recompute "
    "checkpoint_activations",
    "jaxtrain calls it train.precision; set train.precision=bfloat16": "bf16 bfloat16 use_bf16 "
    "bf16_full_eval",
    "jaxtrain calls it train.precision; set train.precision=float16": "fp16 half float16 use_fp16",
    "jaxtrain calls it train.precision; set train.precision=float32": "fp32 float32 tf32",
    "jaxtrain calls it train.precision: auto, bfloat16, float16 or float32 (the weights that the "
    "optimizer updates stay float32)": "dtype torch_dtype mixed_precision compute_dtype amp "
    "mixed_precision_param activation_dtype param_dtype weight_dtype",
    "jaxtrain calls it model.fp8: set model.fp8=blocks (model.fp8=all: the head too)":
    "float8 enable_fp8 use_fp8 fp8 float8.enable quantization quantize enable_fp8_linear "
    "quantize_dense fp8_recipe",
    "jaxtrain calls it data.packing.name: concat, best_fit, padded or one_document (a row)":
    "packing sample_packing pack pad_to_sequence_len group_by_length eval_packing packing_strategy "
    "pack_sequences",
    "set finetune.name=lora finetune.base_quantization=nf4": "load_in_4bit "
    "qlora use_qlora bnb_4bit_quant_type quantization_config",
    "set finetune.name=lora finetune.base_quantization=int8": "load_in_8bit",
    "set finetune.name=qalora, whose base is int4": "use_qalora qalora",
    "set finetune.name=lora, with finetune.rank and finetune.alpha": "use_peft use_lora lora "
    "peft_config lora_config enable_lora peft",
    "there is no such key; data.train.name=chat trains on the assistant's tokens alone":
    "train_on_inputs assistant_only_loss completion_only_loss mask_prompt roles_to_train",
    "there is no such key; the reference model is train.init_from, and its log-probabilities are "
    "computed once": "ref_model reference_model ref_model_name_or_path "
    "precompute_ref_log_probs",
    "there is no such key; only objective.name=dpo smooths labels (objective.label_smoothing)":
    "label_smoothing_factor",
    "jaxtrain calls it objective.weight (objective.name=mtp): that of the mean of the modules' "
    "losses": "mtp_loss_scaling_factor",
    "there is no such key; the same command again (the same run.directory and run.name) resumes a "
    "run, and train.init_from starts a new one from its weights": "resume_from_checkpoint resume "
    "auto_resume auto_resume_from_checkpoints resume_from_step resume_from load_checkpoint",
    "there is no such key; a new run.name starts a new run": "overwrite_output_dir overwrite",
    "there is no such key; eval.every is in steps, and null validates at the end alone":
    "eval_strategy evaluation_strategy do_eval",
    "jaxtrain calls it eval.every, in steps: train.steps / evaluations": "evals_per_epoch",
    "jaxtrain calls it eval.tokens, in tokens of the validation split": "eval_iters "
    "validation.steps eval_batches max_eval_samples limit_val_batches",
    "there is no such key; checkpoint.every is in steps, and null saves at the end alone":
    "save_strategy enable_checkpointing checkpoint.enable",
    "jaxtrain calls it checkpoint.every, in steps: train.steps / checkpoints": "saves_per_epoch",
    "there is no such key; each checkpoint is kept that checkpoint.keep or checkpoint.keep_every "
    "says": "load_best_model_at_end save_best metric_for_best_model",
    "set metrics.wandb=true or metrics.tensorboard=true": "report_to log_with logger tracker",
    "there is no such key; every step is compiled": "torch_compile compile jit compile.enable "
    "use_torch_compile",
    "set mesh.fsdp (devices) and mesh.zero (1, 2 or 3: what is sharded)": "fsdp fsdp_config "
    "deepspeed fsdp_reshard_after_forward reshard_after_forward sharding_strategy "
    "zero_optimization_stage fully_sharded",
    "jaxtrain has the section mesh, one field a parallel axis": "parallelism parallel "
    "mesh_shape ici_parallelism dcn_parallelism",
    "there is no such key; set model.width (nanochat's ratio is model.width / model.depth)":
    "aspect_ratio",
    "jaxtrain calls it model.attention_scale, the factor itself: 1 / sqrt(scalar)":
    "query_pre_attn_scalar",
    "there is no such key; train.init_from takes a checkpoint's shape, and --config a shipped one":
    "model.name model.flavor model_name model_type model_size model_config",
    "there is no such key; devices are chosen by JAX_PLATFORMS and CUDA_VISIBLE_DEVICES":
    "device device_type accelerator devices gpus no_cuda use_cpu",
    "jaxtrain has the section train": "training trainer training_args train_args train_config "
    "training_arguments",
    "jaxtrain has the section checkpoint": "checkpointing checkpointer",
    "jaxtrain has the section eval": "evaluation validation evaluator",
}  # fmt: skip

# The learning rate is one key for Muon (its matrices), another for all other optimizers.
LEARNING_RATE = "lr learning_rate max_lr peak_lr base_lr optim.learning_rate max_learning_rate"
MUON_RATE, OTHER_RATE = "optim.matrix_lr", "optim.learning_rate"

# Our own former keys -> their present names; a section stands for all its fields. An entry applies
# only if the new key exists and the old one does not.
OLD = {
    "train.local": "train.local_sgd",
    "train.loss_spike.back": "train.loss_spike.rollback_steps",
    "train.loss_spike.batches": "train.loss_spike.skip_batches",
    "model.rows": "model.kernels",
    "model.softcap": "model.logit_softcap",
    "model.context": "model.context_length",
    "model.positions": "model.position_embedding",
    "model.score_scale": "model.attention_scale",
    "model.moe.scores": "model.moe.score_function",
    "model.moe.shared": "model.moe.shared_experts",
    "finetune.base": "finetune.base_quantization",
    "finetune.train": "finetune.trainable",
    "finetune.tokens": "finetune.virtual_tokens",
    "optim.gram": "optim.gram_newton_schulz",
    "optim.trust": "optim.trust_coefficient",
    "optim.plain_lr": "optim.scalar_lr",
    "optim.adamw_decay": "optim.adamw_weight_decay",
    "optim.factor_decay": "optim.shampoo_beta",
    "optim.precondition_every": "optim.precondition_frequency",
    "optim.relative": "optim.multiply_by_parameter_scale",
    "optim.clip_rms": "optim.clipping_threshold",
    "optim.schedule.final": "optim.schedule.final_fraction",
    "optim.schedule.initial": "optim.schedule.initial_fraction",
    "optim.schedule.rise_fraction": "optim.schedule.warmup_fraction",
    "sample.cache_dtype": "sample.kv_cache_dtype",
}

TARGETS = {spelling: key for key, spellings in SAME.items() for spelling in spellings.split()}
WORDS = {
    spelling: words for words, spellings in SENTENCES.items() for spelling in spellings.split()
}


def right_key(typed: str, known: Known, chosen: Mapping[str, str]) -> str | None:
    """Advice on a dotted path that is no field: the key it stands for. None if no table has it.

    known: all fields. chosen: section -> its variant, if known.
    """
    if renamed := renamed_key(typed, known):
        return f"its name is now {renamed}"
    parts = typed.lower().replace("-", "_").split(".")
    if any(part.isdigit() for part in parts) or (typed in known and typed != OTHER_RATE):
        return None  # an entry of a list, or a field of another variant: aliases do not apply
    for spelling in (".".join(parts[start:]) for start in range(len(parts))):
        if spelling in LEARNING_RATE.split():
            return learning_rate(chosen.get("optim"))
        if spelling in TARGETS:
            return f"jaxtrain calls it {with_variant(TARGETS[spelling], known, chosen)}"
        if spelling in WORDS:
            return WORDS[spelling]
    return None


def renamed_key(typed: str, known: Known) -> str | None:
    """The present name of one of our former keys, else None."""
    for old, new in OLD.items():
        if typed == old or typed.startswith(f"{old}."):
            now = new + typed.removeprefix(old)
            if exists(now, known) and not exists(typed, known):
                return now
    return None


def exists(path: str, known: Known) -> bool:
    """Whether a dotted path is a field or a section."""
    return path in known or any(key.startswith((f"{path}.", f"{path}[]")) for key in known)


def learning_rate(optimizer: str | None) -> str:
    if optimizer is None:
        return f"jaxtrain calls it {MUON_RATE} (optim.name=muon) or {OTHER_RATE} (all others)"
    return f"jaxtrain calls it {MUON_RATE if optimizer == 'muon' else OTHER_RATE}"


def with_variant(key: str, known: Known, chosen: Mapping[str, str]) -> str:
    """The key; if the chosen variant lacks it, with the variants of its section that have it."""
    section = key.rpartition(".")[0]
    have, chosen_one = known.get(key, ()), chosen.get(section)
    if (
        key == f"{section}.name"
        or chosen_one in have
        or len(have) == len(known.get(f"{section}.name", ()))
    ):
        return key
    return f"{key}, with {section}.name={' or '.join(sorted(have))}"


def same_name(typed: str, known: Known) -> list[str]:
    """Fields with the same last name as a path: those in its own section, or else all."""
    name, section = typed.split(".")[-1], typed.split(".")[0]
    plain = [path for path in known if "[]" not in path and "NAME" not in path]
    found = [path for path in plain if path.split(".")[-1] == name and name != "name"]
    return [path for path in found if path.startswith(f"{section}.")] or found
