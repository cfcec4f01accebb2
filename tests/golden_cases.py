"""The cases of the golden runs: all of their configuration keys are here."""

import json

LOOP = {
    "train.sequence_length": 32, "train.batch_size": 8, "train.steps": 2, "train.fit": False,
    "eval.tokens": 256, "eval.batch_size": 64, "eval.every": None, "sample.every": None,
    "sample.prompts": [], "checkpoint.every": None, "metrics.every": 1,
    "metrics.tensorboard": False,
}  # fmt: skip
BYTES = {"data.tokenizer.name": "bytes"}
TEXT = {"data.train.name": "text", "data.train.path": "tinyshakespeare"}
GPT = {"model.depth": 2, "model.width": 32, "model.head_dim": 8, "model.hidden": 48}
LLAMA = GPT | {
    "model.kv_heads": 2, "model.ffn": "swiglu", "model.qk_norm": False,
    "model.window_pattern": "L", "model.norm_gain": True, "model.embed_norm": False,
    "model.tied_head": True, "model.logit_softcap": None, "model.value_embeddings": False,
    "model.residual_scales": False, "model.smear": False, "model.backout": False,
    "model.init": "gpt2",
}  # fmt: skip
GPT2 = LLAMA | {
    "model.kv_heads": 4, "model.ffn": "gelu", "model.norm": "layer",
    "model.position_embedding": "learned", "model.qkv_bias": True,
    "model.out_bias": True, "model.ffn_bias": True,
}  # fmt: skip
MOE = GPT | {"model.moe": {"experts": 4, "hidden": 32, "every": 2, "aux_loss": 0.01}}
FP8 = GPT | {"model.width": 128, "model.hidden": 128, "model.head_dim": 32}
NO_WARMUP = {"optim.schedule.warmup_steps": 0, "optim.schedule.final_fraction": 0}
MUON = NO_WARMUP | {"optim.momentum_warmup_steps": 2}
ADAMW = NO_WARMUP | {"optim.name": "adamw"}
THREE = {"train.steps": 3}
CHAT = {
    "data.train.name": "chat", "data.train.path": "CHAT", "data.validation.fraction": 0.3,
    "train.sequence_length": 128,
}  # fmt: skip
PAIRS = {
    "data.train.name": "preference", "data.train.path": "PAIRS", "data.validation.fraction": 0.3,
    "train.sequence_length": 128,
}  # fmt: skip
DOCUMENTS = {
    "data.train.document": "paragraph", "data.validation.name": "documents",
    "data.validation.fraction": 0.1,
}  # fmt: skip
PACKED = DOCUMENTS | {"data.packing.name": "best_fit", "model.document_mask": True}
MARKS = {
    "data.tokenizer.name": "sentencepiece", "data.tokenizer.vocab_size": 384,
    "data.tokenizer.special_tokens": ["<mask>", "<fim_prefix>", "<fim_suffix>", "<fim_middle>"],
}  # fmt: skip
TUNED = {"train.init_from": "RUN:start/llama"}  # with the model and the tokenizer of that run
TUNED_BIASES = {"train.init_from": "RUN:start/gpt2"}
RATE = {"optim.learning_rate": 0.01}  # of a few steps
LORA = TUNED | RATE | {"finetune.name": "lora", "finetune.rank": 2}
PREFERENCE = TUNED | PAIRS | RATE | ADAMW

# name -> (config that it begins with, devices, changes)
CASES: dict[str, tuple[str | None, int, dict[str, object]]] = {}


def add(name, changes, devices=1, config=None):
    CASES[name] = (config, devices, changes)


def pretrain(name, *changes, devices=1):
    """A new model of bytes."""
    merged = LOOP | BYTES | GPT | {k: v for part in changes for k, v in part.items()}
    add(name, (MUON if "optim.name" not in merged else {}) | merged, devices)


def tune(name, *changes, devices=1):
    """From a model of an earlier case, with its tokenizer."""
    merged = LOOP | {k: v for part in changes for k, v in part.items()}
    add(name, TEXT | merged if "data.train.name" not in merged else merged, devices)


# The quickstart as it is shipped, but for its length; both have all of the GPT's switches.
add("quickstart", {
    "train.steps": 20, "eval.every": None, "sample.every": None, "sample.tokens": 16,
    "sample.temperature": 0, "checkpoint.every": None, "metrics.every": 1,
    "metrics.tensorboard": False,
}, config="quickstart")  # fmt: skip
pretrain("start/llama", LLAMA, ADAMW, RATE)
pretrain("start/gpt2", GPT2, ADAMW, RATE)

SHIPPED = {
    "continue": TUNED | TEXT | DOCUMENTS,
    "dpo_small": TUNED | PAIRS,
    "gpt_d12": GPT | TEXT | BYTES | DOCUMENTS | {"train.device_batch_size": 4},
    "gpt_d24": GPT | TEXT | BYTES | DOCUMENTS | {"train.device_batch_size": 4},
    "llama_1b_lora_t4": TUNED | CHAT | LLAMA | {
        "model.vocab_multiple": 64, "model.rope_base": 100_000.0, "model.norm_eps": 1e-6,
        "train.precision": "auto",
    },
    "llama_8b": GPT | {"model.kv_heads": 2} | TEXT | BYTES | DOCUMENTS,
    "llama_tiny": GPT | {"model.kv_heads": 2} | BYTES,
    "lora_chat": TUNED | CHAT,
    "moe_tiny": GPT | BYTES,
    "quickstart": GPT | BYTES,
    "sft_small": TUNED | CHAT,
}  # fmt: skip
for _name, _changes in SHIPPED.items():
    add(f"config/{_name}", LOOP | _changes, config=_name)

for _name, _changes in {
    "gpt_samples": {"sample.prompts": ["", "To be"], "sample.tokens": 8, "sample.temperature": 0},
    "gpt_four_layers": {"model.depth": 4, "model.short_window": 5, "model.window_pattern": "SL"},
    "grouped_queries": {"model.kv_heads": 2},
    "geglu_post_norm": {"model.ffn": "geglu", "model.post_norm": True, "model.norm_gain": True,
                        "model.attention_softcap": 20.0, "model.qk_norm_gain": True},
    "document_mask": PACKED,
    "padded": DOCUMENTS | {"data.train.document": "line", "data.packing.name": "padded",
                           "model.document_mask": True, "train.sequence_length": 128},
    "scan_layers": {"model.depth": 4, "model.scan_layers": True},
    "remat_block": {"model.remat": "block"},
    "remat_dots": {"model.remat": "dots"},
    "remat_attention": {"model.remat": "attention"},
    "remat_ffn": {"model.remat": "ffn"},
    "ffn_tiles": {"model.ffn_tiles": 2},
    "bfloat16_embeddings": {"model.embedding_dtype": "bfloat16"},
    "rope_scaling": {"model.rope_scaling": {"name": "linear", "factor": 2.0}},
    "moe": MOE,
    "moe_softmax_shared": {"model.moe": {
        "experts": 4, "hidden": 32, "shared_experts": 1, "score_function": "softmax",
        "balance_bias": False}},
    "fp8_blocks": FP8 | {"model.fp8": "blocks"},
    "fp8_all": FP8 | {"model.fp8": "all"},
    "fp8_history": FP8 | {"model.fp8": "blocks", "model.fp8_history": 2} | THREE,
    **{f"init_{_init}": {"model.init": _init} for _init in ("gpt2", "depth_scaled", "orthogonal")},
    "init_mup": LLAMA | {"model.init": "mup", "model.tied_head": False, "model.base_width": 16},
    **{f"init_{_init}": {"model.init": _init, "model.block_norm": False}
       for _init in ("fixup", "tfixup", "rezero", "skipinit")},
}.items():  # fmt: skip
    pretrain(f"model/{_name}", ADAMW if _name != "init_mup" else MUON, _changes)

for _name, _changes in {
    "accumulation": {"train.device_batch_size": 2},
    "accumulation_moe": MOE | {"train.device_batch_size": 2},
    "bfloat16": {"train.precision": "bfloat16"},
    "float16": {"train.precision": "float16"} | LLAMA | ADAMW,
    "z_loss": {"train.z_loss": 1e-4},
    "clip_norm": {"optim.clip_norm": 0.1},
    "skip_nonfinite": {"train.on_nonfinite": "skip"},
    "loss_spike": {"train.loss_spike": {"action": "skip"}} | THREE,
    "masking": MARKS | {"data.augment.name": "masking"},
    "span_corruption": MARKS | PACKED | {"data.augment.name": "span_corruption"},
    "fill_in_the_middle": MARKS | PACKED | {"data.augment.name": "fill_in_the_middle"},
    "subword_splits": MARKS | {"data.augment.name": "subword_splits"},
    "stages": THREE | {"data.stages": [{"tokens": 256, "sequence_length": 16}, {}]},
}.items():
    pretrain(f"train/{_name}", ADAMW if "accum" not in _name else MUON, _changes)

ONE_WARMUP = NO_WARMUP | {"optim.schedule.warmup_steps": 1}
for _name in ("muon", "adamw", "adafactor", "adamw8bit", "lamb", "lars", "lion", "sgd", "soap"):
    pretrain(f"optim/{_name}", THREE, ONE_WARMUP | {"optim.name": _name})
SCHEDULE_FREE = {"optim.name": "schedule_free", "optim.schedule.warmup_steps": 1}
pretrain("optim/schedule_free", THREE, SCHEDULE_FREE)
for _name, _changes in {
    "muon_plain": {"optim.normuon": False, "optim.cautious_decay": False, "optim.nesterov": False,
                   "optim.orthogonalize": "newton_schulz", "optim.gram_newton_schulz": False},
    "muon_equilibrate": {"optim.equilibrate": True, "optim.renormalize": True},
    "adamw_bfloat16_states": {"optim.name": "adamw", "optim.state_dtype": "bfloat16"},
    "adamw8bit_blocks": {"optim.name": "adamw8bit", "optim.min_size": 16, "optim.block_size": 32},
    "soap_often": {"optim.name": "soap", "optim.precondition_frequency": 1},
    "adamw_groups": {"optim.name": "adamw", "optim.multipliers": {"embedding": 0.5},
                     "optim.decay_multipliers": {"head": 0.0},
                     "optim.batch_scaling.rule": "sqrt"},
    **{f"schedule_{_schedule}": LLAMA | {"optim.name": "sgd", "optim.schedule.name": _schedule,
                                         "model.depth": 1}
       for _schedule in ("constant", "linear", "cosine", "onecycle", "inverse_sqrt")},
}.items():  # fmt: skip
    pretrain(f"optim/{_name}", THREE, _changes)

for _name, _changes in {
    "full": TUNED | ADAMW | RATE,
    "lora": LORA,
    "lora_dora": LORA | {"finetune.dora": True},
    "lora_plus": LORA | {"finetune.lora_plus_ratio": 16},
    "lora_rslora_targets": LORA | {"finetune.rslora": True, "finetune.targets": ["q", "down"]},
    "lora_nf4": LORA | {"finetune.base_quantization": "nf4"},
    "lora_int8": LORA | {"finetune.base_quantization": "int8"},
    "lora_from_adapter": LORA | {"finetune.init_adapter": "RUN:finetune/lora"},
    "lora_chat": LORA | CHAT,
    "freeze": TUNED | RATE | {"finetune.name": "freeze", "finetune.trainable": ["ffn", "gain"],
                              "finetune.last_layers": 1},
    "freeze_int8": TUNED | RATE | {"finetune.name": "freeze",
                                   "finetune.trainable": ["embed", "gain"],
                                   "finetune.base_quantization": "int8"},
    "bitfit": TUNED_BIASES | RATE | {"finetune.name": "bitfit"},
    "ia3": TUNED | RATE | {"finetune.name": "ia3"},
    "adapter": TUNED | RATE | {"finetune.name": "adapter", "finetune.width": 4},
    "prompt": TUNED | RATE | {"finetune.name": "prompt", "finetune.virtual_tokens": 3},
    "prefix": TUNED | RATE | {"finetune.name": "prefix", "finetune.virtual_tokens": 3},
    "prefix_projection": TUNED | RATE | {"finetune.name": "prefix", "finetune.virtual_tokens": 3,
                                         "finetune.projection": 5},
}.items():  # fmt: skip
    tune(f"finetune/{_name}", THREE, _changes)

for _name, _changes in {
    "dpo": {"objective.name": "dpo"},
    "dpo_smoothed": {"objective.name": "dpo", "objective.label_smoothing": 0.1},
    "dpo_lora": {"objective.name": "dpo", "finetune.name": "lora", "finetune.rank": 2},
    "dpo_accumulated": {"objective.name": "dpo", "train.device_batch_size": 4},
    "ipo": {"objective.name": "ipo"},
    "ipo_sums": {"objective.name": "ipo", "objective.per_token": False},
    "orpo": {"objective.name": "orpo"},
    "kto": {"objective.name": "kto", "data.train.path": "LABELED"},
}.items():
    tune(f"objective/{_name}", PREFERENCE, THREE, _changes)

EIGHT = {"train.batch_size": 16}
for _name, _changes in {
    "data": {},
    "fsdp": {"mesh.data": 4, "mesh.fsdp": 2},
    "fsdp_zero1": {"mesh.data": 1, "mesh.fsdp": 8, "mesh.zero": 1},
    "fsdp_zero2": {"mesh.data": 1, "mesh.fsdp": 8, "mesh.zero": 2},
    "fsdp_accumulated": {"mesh.data": 2, "mesh.fsdp": 4, "mesh.zero": 1,
                         "train.device_batch_size": 1},
    "fsdp_llama": LLAMA | ADAMW | {"mesh.data": 2, "mesh.fsdp": 4},
    "tensor": LLAMA | {"mesh.data": 4, "mesh.tensor": 2},
    "context": LLAMA | {"mesh.data": 4, "mesh.context": 2},
    "expert": MOE | {"mesh.data": 4, "mesh.expert": 2},
    "pipeline": LLAMA | {"mesh.data": 4, "mesh.pipeline": 2, "train.device_batch_size": 2},
    "pipeline_repeats": LLAMA | {"mesh.data": 4, "mesh.pipeline": 2, "model.depth": 4,
                                 "mesh.pipeline_repeats": 2, "train.device_batch_size": 2},
    "pipeline_context_expert": LLAMA | MOE | {
        "mesh.data": 1, "mesh.pipeline": 2, "mesh.context": 2, "mesh.expert": 2,
        "model.moe": {"experts": 4, "hidden": 32}, "train.device_batch_size": 4},
    "fsdp_adamw8bit": {"mesh.data": 1, "mesh.fsdp": 8, "optim.name": "adamw8bit",
                       "optim.min_size": 16, "optim.block_size": 32},
    "diloco": THREE | {"train.local_sgd": {"name": "diloco", "every": 2}},
    "diloco_int8": THREE | {"train.local_sgd": {"name": "diloco", "every": 2, "compress": "int8"}},
    "diloco_fp8": THREE | {"train.local_sgd": {"name": "diloco", "every": 2, "compress": "fp8"}},
    "diloco_fragments": THREE | {"train.local_sgd": {"name": "diloco", "every": 2, "fragments": 2},
                                 "mesh.data": 4, "mesh.fsdp": 2},
    "gossip": THREE | {"train.local_sgd": {"name": "gossip"}},
}.items():  # fmt: skip
    pretrain(f"mesh/{_name}", EIGHT, _changes, devices=8)


# ---- what the cases read ---------------------------------------------------------------------


def conversation(i):
    asked = {"role": "user", "content": f"What is {i} and {i}?"}
    return {"messages": [asked, {"role": "assistant", "content": f"It is {2 * i}."}]}


def write_inputs(folder):
    """The files that stand for words in capitals in the cases."""
    pairs = [{"prompt": f"Is {i} a number?", "chosen": "yes", "rejected": "no"} for i in range(24)]
    labeled = [
        {"prompt": f"Is {i} a number?", "completion": "yes" if good else "no", "label": good}
        for i in range(24)
        for good in (True, False)
    ]
    files = {"CHAT": map(conversation, range(40)), "PAIRS": pairs, "LABELED": labeled}
    for name, lines in files.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)
