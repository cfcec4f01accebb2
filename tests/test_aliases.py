"""Keys as other stacks spell them are answered by the right key."""

import re

import pytest

from jaxtrain.config import Config, aliases, fields, load_config
from jaxtrain.config.aliases import OLD, SAME, SENTENCES, TARGETS, WORDS, exists, right_key
from jaxtrain.config.load import known_fields
from jaxtrain.main import main
from jaxtrain.settings import UserError

# What a practitioner types -> the key that the answer must name. Written apart from the table.
TYPED = {
    "vocabulary": """
model.layers=depth model.n_layer=depth model.num_layers=depth model.d_model=width
model.hidden_size=width model.tie_embeddings=tied_head model.dropout=data.augment
model.activation=model.ffn model.vocab_size=data.tokenizer.vocab_size
optim.warmup_steps=optim.schedule.warmup_steps mesh.dp=mesh.data
checkpoint.save_every=checkpoint.every gradient_checkpointing=model.remat
grad_clip=optim.clip_norm max_grad_norm=optim.clip_norm
gradient_accumulation_steps=train.batch_size gradient_accumulation_steps=train.device_batch_size
tp=mesh.tensor dp=mesh.data pp=mesh.pipeline cp=mesh.context ep=mesh.expert lr=optim.matrix_lr
lr=optim.learning_rate learning_rate=optim.matrix_lr learning_rate=optim.learning_rate
micro_batch_size=train.device_batch_size per_device_train_batch_size=train.device_batch_size
block_size=train.sequence_length seq_len=train.sequence_length
max_seq_length=train.sequence_length n_head=model.heads num_attention_heads=model.heads
n_embd=model.width num_key_value_heads=model.kv_heads intermediate_size=model.hidden
max_steps=train.steps num_iterations=train.steps save_steps=checkpoint.every eval_steps=eval.every
packing=data.packing.name bf16=train.precision=bfloat16 fp16=train.precision=float16""",
    "Hugging Face": """
output_dir=run.directory run_name=run.name warmup_ratio=optim.schedule.warmup_steps
lr_scheduler_type=optim.schedule.name adam_beta1=optim.b1 adam_beta2=optim.b2
adam_epsilon=optim.eps weight_decay=optim.weight_decay logging_steps=metrics.every
save_total_limit=checkpoint.keep seed=run.seed data_seed=data.seed report_to=metrics.wandb
dataloader_num_workers=data.workers dataloader_prefetch_factor=data.prefetch
resume_from_checkpoint=run.directory num_train_epochs=train.steps fsdp=mesh.fsdp
deepspeed=mesh.zero per_device_eval_batch_size=eval.batch_size max_length=train.sequence_length
dataset_text_field=data.train.field model_name_or_path=train.init_from torch_dtype=train.precision
attn_implementation=model.attention load_in_4bit=finetune.base_quantization=nf4
load_in_8bit=finetune.base_quantization=int8
use_peft=finetune.name=lora assistant_only_loss=data.train.name=chat beta=objective.beta
loss_type=objective.name num_hidden_layers=model.depth hidden_act=model.ffn
max_position_embeddings=model.context_length rms_norm_eps=model.norm_eps
tie_word_embeddings=model.tied_head rope_theta=model.rope_base attention_bias=model.qkv_bias
mlp_bias=model.ffn_bias attention_dropout=data.augment sliding_window=model.short_window
num_local_experts=model.moe.experts num_experts_per_tok=model.moe.top_k
moe_intermediate_size=model.moe.hidden n_shared_experts=model.moe.shared_experts
router_aux_loss_coef=model.moe.aux_loss final_logit_softcapping=model.logit_softcap
layer_types=model.window_pattern r=finetune.rank lora_r=finetune.rank lora_alpha=finetune.alpha
lora_dropout=finetune.rank target_modules=finetune.targets use_dora=finetune.dora
use_rslora=finetune.rslora use_qalora=finetune.name=qalora
qalora_group_size=finetune.group_size num_virtual_tokens=finetune.virtual_tokens""",
    "torchtitan": """
training.seq_len=train.sequence_length training.local_batch_size=train.device_batch_size
training.global_batch_size=train.batch_size training.steps=train.steps
training.max_norm=optim.clip_norm training.dataset=data.train.path
training.dataset_path=data.train.path optimizer.lr=optim.matrix_lr optimizer.eps=optim.eps
optimizer.beta2=optim.b2 optimizer.name=optim.name
lr_scheduler.decay_ratio=optim.schedule.decay_fraction
lr_scheduler.min_lr_factor=optim.schedule.final_fraction
lr_scheduler.warmup_steps=optim.schedule.warmup_steps
parallelism.tensor_parallel_degree=mesh.tensor parallelism.data_parallel_shard_degree=mesh.fsdp
parallelism.data_parallel_replicate_degree=mesh.data
parallelism.context_parallel_degree=mesh.context
parallelism.pipeline_parallel_degree=mesh.pipeline parallelism.expert_parallel_degree=mesh.expert
checkpoint.interval=checkpoint.every checkpoint.keep_latest_k=checkpoint.keep
checkpoint.folder=run.directory activation_checkpoint.mode=model.remat
metrics.log_freq=metrics.every metrics.enable_wandb=metrics.wandb
metrics.enable_tensorboard=metrics.tensorboard job.dump_folder=run.directory
model.flavor=train.init_from validation.freq=eval.every model.hf_assets_path=data.tokenizer.path
comm.train_timeout_seconds=processes.step_timeout""",
    "nanochat": """
device_batch_size=train.device_batch_size total_batch_size=train.batch_size
unembedding_lr=optim.head_lr matrix_lr=optim.matrix_lr
warmdown_ratio=optim.schedule.decay_fraction final_lr_frac=optim.schedule.final_fraction
target_param_data_ratio=train.tokens_per_parameter max_seq_len=train.sequence_length
eval_every=eval.every eval_tokens=eval.tokens sample_every=sample.every
save_every=checkpoint.every model_tag=run.name aspect_ratio=model.width depth=model.depth
window_pattern=model.window_pattern""",
    "MaxText": """
base_output_directory=run.directory base_emb_dim=model.width base_num_query_heads=model.heads
base_num_kv_heads=model.kv_heads base_mlp_dim=model.hidden base_num_decoder_layers=model.depth
mlp_activations=model.ffn logits_via_embedding=model.tied_head
max_target_length=train.sequence_length per_device_batch_size=train.device_batch_size
warmup_steps_fraction=optim.schedule.warmup_steps gradient_clipping_threshold=optim.clip_norm
remat_policy=model.remat ici_fsdp_parallelism=mesh.fsdp dcn_data_parallelism=mesh.data
ici_tensor_parallelism=mesh.tensor checkpoint_period=checkpoint.every log_period=metrics.every
load_parameters_path=train.init_from eval_interval=eval.every num_experts=model.moe.experts
rope_max_timescale=model.rope_base opt_type=optim.name mu_dtype=optim.state_dtype
quantization=model.fp8 normalization_layer_epsilon=model.norm_eps""",
    "Axolotl": """
base_model=train.init_from sequence_len=train.sequence_length sample_packing=data.packing.name
val_set_size=data.validation.fraction dataset_prepared_path=data.cache_dir adapter=finetune.name
lora_model_dir=finetune.init_adapter lora_target_modules=finetune.targets num_epochs=train.steps
lr_scheduler=optim.schedule.name optimizer=optim.name train_on_inputs=data.train.name=chat
flash_attention=model.attention rl=objective.name chat_template=data.train.template
datasets=data.train.sources use_wandb=metrics.wandb evals_per_epoch=eval.every
saves_per_epoch=checkpoint.every dp_shard_size=mesh.fsdp wandb_project=metrics.wandb""",
    "Megatron and DeepSeek": """
mtp_num_layers=objective.depth mtp_num_layers=objective.name=mtp
mtp_loss_scaling_factor=objective.weight mtp_loss_scaling_factor=objective.name=mtp
num_nextn_predict_layers=objective.depth""",
}
PAIRS = [pair.split("=", 1) for block in TYPED.values() for pair in block.split()]
PATH = re.compile(r"\b[a-z]+(?:\.[a-z_0-9]+)+")


def answers(*overrides):
    with pytest.raises(UserError) as error:
        load_config(None, overrides)
    return [str(line) for line in error.value.args]


def test_the_spellings_of_other_stacks_lead_to_the_right_key():
    assert len({typed for typed, _ in PAIRS}) >= 120
    wrong = []
    for typed, key in PAIRS:
        (line,) = answers(f"{typed}=1")
        said = line.partition(": ")
        found = re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.])", said[2] + " ")
        bare = re.search(rf"model\.{key}\b", said[2])  # the vocabulary's own are written short
        if said[0] != typed or not (found or bare):
            wrong.append(f"{typed} -> {key}: {line}")
    assert not wrong


def test_each_spelling_of_the_table_leads_to_a_key_that_exists():
    known = known_fields()
    assert [key for key in SAME if not exists(key, known)] == []
    named = {path for words in SENTENCES for path in PATH.findall(words)}
    assert [path for path in named if not exists(path, known)] == []
    settings = {
        found
        for words in SENTENCES
        for found in re.findall(r"[a-z.]+\.\w+=\w+(?: [a-z.]+\.\w+=\w+)*", words)
    }
    assert "model.remat=block" in settings
    for setting in settings:
        load_config(None, [*setting.split(), "train.steps=1", "data.train.path=x"])


def test_no_spelling_stands_twice_or_hides_a_field():
    spelled = " ".join([*SAME.values(), *SENTENCES.values(), aliases.LEARNING_RATE]).split()
    assert sorted(set(spelled)) == sorted(spelled)
    sections = set(Config.model_fields)
    assert not sections & set(spelled)
    paths = {path for path, *_ in fields(Config)}
    assert paths & set(spelled) == {"optim.learning_rate"}  # a field, but not of Muon
    assert all(right_key(one, known_fields(), {}) for one in spelled)


# ---- the forms in which a key is given --------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("model.n_layer=4", "model.n_layer: jaxtrain calls it model.depth"),
        ("n_layer=4", "n_layer: jaxtrain calls it model.depth"),
        ("model.N-Layer=4", "model.N-Layer: jaxtrain calls it model.depth"),
        ("optim.lr=1", "optim.lr: jaxtrain calls it optim.matrix_lr"),
        ("optim.learning_rate=1", "optim.learning_rate: jaxtrain calls it optim.matrix_lr"),
        ("optim.name=lion optim.lr=1", "optim.lr: jaxtrain calls it optim.learning_rate"),
        ("optim.name=adamw lr=1", "lr: jaxtrain calls it optim.learning_rate"),
        (
            "lr=1",
            "lr: jaxtrain calls it optim.matrix_lr (optim.name=muon) or optim.learning_rate "
            "(all others)",
        ),
        ("lora_r=8", "lora_r: jaxtrain calls it finetune.rank, with finetune.name=lora or qalora "
             "or relora"),
        ("train.steps=1 finetune.name=lora finetune.r=8", "finetune.r: jaxtrain calls it "
         "finetune.rank"),
        ("training.seq_len=8", "training.seq_len: jaxtrain calls it train.sequence_length"),
        ("training.z_loss=8", "training.z_loss: jaxtrain calls it train.z_loss"),
        ("training.top_p=1", "training.top_p: no such field; did you mean sample.top_p?"),
        ("training.what=8", "training: jaxtrain has the section train"),
        ("eval.steps=8", "eval.steps: jaxtrain calls it eval.every"),
        ("optim.max_dim=8", "optim.max_dim: no such field; it belongs to optim.name=soap"),
        ("optim.block_size=8", "optim.block_size: no such field; it belongs to "
         "optim.name=adamw8bit"),
        ("gradient_checkpointing_kwargs={a: 1}", "gradient_checkpointing_kwargs: jaxtrain calls it "
         "model.remat; set model.remat=block (attention, ffn, dots and offload recompute less; "
         "none: nothing)"),
        (
            "gradient_accumulation_steps=4",
            "gradient_accumulation_steps: there is no such key; the number of accumulated "
            "microbatches is train.batch_size / (devices x train.device_batch_size): set those "
            "two, both in sequences",
        ),
    ],
)  # fmt: skip
def test_the_answer_is_one_line_that_knows_its_context(given, line):
    assert answers(*re.split(r" (?=\w+[.=])", given)) == [line]


def test_a_yaml_of_another_stack_is_answered_a_line_a_key(tmp_path, capsys):
    file = tmp_path / "c.yaml"
    file.write_text(
        "model: {n_layer: 4, depth: 4}\ngradient_checkpointing: true\n"
        "optimizer: {name: adamw, lr: 1.0e-3}\nparallelism:\n  tensor_parallel_degree: 2\n"
    )
    assert main(["--config", str(file), "--print-config"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and sorted(err.splitlines()) == [
        "error: gradient_checkpointing: jaxtrain calls it model.remat; set model.remat=block "
        "(attention, ffn, dots and offload recompute less; none: nothing)",
        "error: model.n_layer: jaxtrain calls it model.depth",
        "error: optimizer.lr: jaxtrain calls it optim.matrix_lr (optim.name=muon) or "
        "optim.learning_rate (all others)",
        "error: optimizer.name: jaxtrain calls it optim.name",
        "error: parallelism.tensor_parallel_degree: jaxtrain calls it mesh.tensor",
    ]


def test_what_no_table_has_is_said_too_where_the_rest_of_its_section_is_answered():
    assert answers("stuff.n_layer=1", "stuff.what=2") == [
        "stuff.n_layer: jaxtrain calls it model.depth",
        "stuff.what: no such field",
    ]
    (line,) = answers("stuff.what=1", "stuff.where=2")
    assert line.startswith("stuff: no such field; there are run, data, optim")


def test_an_entry_of_a_list_is_not_a_key_of_the_training():
    (line,) = answers("data.train.filters=[{name: c4, max_length: 1}]")
    assert line.startswith("data.train.filters.0.max_length: no such field; ")
    assert "sequence_length" not in line


# ---- our own former keys ----------------------------------------------------------------------


@pytest.mark.parametrize("old", OLD)
def test_a_former_key_answers_once_its_rename_is_done(old):
    """Of the two keys exactly one exists: before the rename the old one, then the new one."""
    known = known_fields()
    assert exists(old, known) != exists(OLD[old], known)
    answer = right_key(old, known, {})
    assert (answer == f"its name is now {OLD[old]}") == exists(OLD[old], known)
    of_old = lambda path: path == old or path.startswith(f"{old}.")
    done = {OLD[old] + path.removeprefix(old) if of_old(path) else path for path in known}
    renamed = {path: () for path in done}
    assert right_key(old, renamed, {}) == f"its name is now {OLD[old]}"


def test_the_fields_of_a_renamed_section_are_answered_each(monkeypatch):
    monkeypatch.setitem(OLD, "checkpointed", "checkpoint")
    assert answers("checkpointed.every=3", "checkpointed.keep=1") == [
        "checkpointed.every: its name is now checkpoint.every",
        "checkpointed.keep: its name is now checkpoint.keep",
    ]
    assert TARGETS.keys().isdisjoint(WORDS)
