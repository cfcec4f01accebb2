"""Features: how each is detected in a configuration, and which devices it runs on.

`compatible.py` lists the pairs that exclude each other. A new feature adds its fields here.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from pydantic import BaseModel

from jaxtrain.finetune import METHODS, PRETRAINING
from jaxtrain.model.saved_activations import COMPRESSIONS
from jaxtrain.model.sections import FP8_LOSSES
from jaxtrain.objectives import OBJECTIVES, PREFERENCES
from jaxtrain.optim import OPTIMIZERS
from jaxtrain.weights import TRAINING_FORMS

EVERY_DEVICE = "CPU, GPU, TPU"
PAIRS = (
    "data.train={name: preference, path: pairs.jsonl} data.packing.name=padded "
    "model.document_mask=true"
)


class Feature(NamedTuple):
    """A feature that a configuration uses or not."""

    label: str  # in the support matrix; "" for features without a row there
    key: str
    active: Callable[[Any], bool]  # test of the value at `key`, which is None if there is none
    example: str = ""  # overrides that switch it on
    devices: str = EVERY_DEVICE


def more_than_one(value: int | None) -> bool:
    return value is not None and value > 1


def given(value: object) -> bool:
    return value not in (None, False, 0)


def absent(value: object) -> bool:
    return not given(value)


def equals(name: str) -> Callable[[Any], bool]:
    return lambda value: value == name


def axis(name: str, example: str = "") -> Feature:
    return Feature(
        f"mesh.{name}", f"mesh.{name}", more_than_one, f"mesh.{name}=2 {example}".strip()
    )


def optimizer(name: str) -> Feature:
    return Feature(f"optimizer {name}", "optim.name", equals(name), f"optim.name={name}")


def tuning(label: str, name: str, more: str = "") -> Feature:
    example = f"finetune.name={name} train.steps=2 {more}".strip()
    return Feature(label, "finetune.name", equals(name), example)


def objective(name: str) -> Feature:
    example = f"objective.name={name} {PAIRS if name in PREFERENCES else ''}".strip()
    return Feature(f"objective {name}", "objective.name", equals(name), example)


def packs_ffn(c: BaseModel) -> bool:
    """Whether a `finetune` section quantizes the FFN matrices of the base."""
    trained = " ".join(getattr(c, "trainable", ()))
    return given(getattr(c, "base_quantization", None)) and "experts" not in trained


def any_named(*names: str) -> Callable[[Any], bool]:
    """A test whether a list has an entry with one of these names."""
    return lambda entries: any(entry.name in names for entry in entries or ())


AXES = ("data", "fsdp", "tensor", "context", "pipeline", "expert")
MASKS = (
    "gradual_pruning",
    "set",
    "rigl",
    "early_bird",
    "lottery_ticket",
    "fixed_masks",
)  # wrappers that make weights zero
FFN_TARGETS = {"ffn", "up", "gate", "down"}
MASKED = "objective.name=masked_lm model.window_pattern=L"
MOE = "model.moe.experts=4"
GPU_OR_TPU = "GPU, TPU"
NO_LOSS = "model.kernels.loss=null"
NO_EPILOGUE = "model.fp8_epilogue=false"
FEATURES = {
    # ---- the mesh
    "data": axis("data"),
    "fsdp": axis("fsdp", "mesh.data=1"),
    "tensor": axis("tensor", "mesh.data=1"),
    "context": axis("context", "mesh.data=1"),
    "pipeline": axis("pipeline", "mesh.data=1"),
    "expert": axis("expert", f"mesh.data=1 {MOE}"),
    "no pipeline": Feature("", "mesh.pipeline", lambda stages: stages == 1, "mesh.pipeline=1"),
    "interleaved stages": Feature("", "mesh.pipeline_repeats", more_than_one,
                                  "mesh.pipeline_repeats=2"),
    "1f1b": Feature("", "mesh.pipeline_schedule", equals("1f1b"), "mesh.pipeline_schedule=1f1b"),
    "batch_overlap": Feature("overlap of two parts of a batch", "mesh.batch_overlap",
                             more_than_one, "mesh.batch_overlap=2"),
    "zero 1": Feature("ZeRO 1", "mesh.zero", lambda stage: stage == 1, "mesh.zero=1"),
    "zero 2": Feature("ZeRO 2", "mesh.zero", lambda stage: stage == 2, "mesh.zero=2"),
    # ---- the model
    "moe": Feature("mixture of experts", "model.moe.experts", given, MOE),
    "no moe": Feature("", "model.moe.experts", absent, "model.moe=null"),
    "swiglu": Feature("gated FFN (swiglu, geglu)", "model.ffn",
                      lambda kind: kind in ("swiglu", "geglu"), "model.ffn=swiglu"),
    "ffn_bias": Feature("FFN biases", "model.ffn_bias", given, "model.ffn_bias=true"),
    "learned positions": Feature("learned positions", "model.position_embedding",
                                 equals("learned"), "model.position_embedding=learned"),
    "qk_norm_gain": Feature("QK-norm with gains", "model.qk_norm_gain", given,
                            "model.qk_norm_gain=true"),
    "no qk_norm": Feature("", "model.qk_norm", absent, "model.qk_norm=false"),
    "norm_gain": Feature("norms with gains", "model.norm_gain", given, "model.norm_gain=true"),
    "no block_norm": Feature("", "model.block_norm", absent, "model.block_norm=false"),
    "tied_head": Feature("tied head", "model.tied_head", given, "model.tied_head=true"),
    "mup": Feature("muP", "model.init", equals("mup"), "model.init=mup"),
    "document_mask": Feature("document mask", "model.document_mask", given,
                             "model.document_mask=true"),
    "no document_mask": Feature("", "model.document_mask", absent, "model.document_mask=false"),
    "encoder": Feature("bidirectional attention (encoder)", "model.causal",
                       lambda causal: causal is False,
                       f"model.causal=false {MASKED}"),
    "causal": Feature("", "model.causal", lambda causal: causal is True, "model.causal=true"),
    "windows": Feature("", "model.window_pattern", lambda pattern: "S" in pattern,
                       "model.window_pattern=SL"),
    "fp8": Feature("float8 matmuls", "model.fp8", given, "model.fp8=all", "GPU (Hopper or later)"),
    "no fp8": Feature("", "model.fp8", absent, "model.fp8=null"),
    "fp8_history": Feature("float8 with delayed scaling", "model.fp8_history", given,
                           "model.fp8_history=2 model.fp8=blocks", "GPU (Hopper or later)"),
    "fp8_hidden": Feature("float8 hidden layers", "model.fp8_hidden", given,
                          "model.fp8_hidden=true model.fp8=blocks", "GPU (Hopper or later)"),
    "fp8_epilogue": Feature("float8 casts in the products of hidden layers", "model.fp8_epilogue",
                            given, "model.fp8_epilogue=true model.fp8=blocks model.fp8_history=2",
                            "GPU (Hopper)"),
    "fp8_norms": Feature("float8 casts in norms", "model.fp8_norms", given,
                         "model.fp8_norms=true model.fp8=blocks model.fp8_history=2",
                         "GPU (Hopper)"),
    "fp8_gradients": Feature("float8 casts in the backward pass of RoPE", "model.fp8_gradients",
                             given, "model.fp8_gradients=true model.fp8=blocks model.fp8_history=2 "
                             "model.kernels.qkv=mosaic", "GPU (Hopper)"),
    "fp8_fast_accum": Feature("float8 gradients of inputs in 14 bits", "model.fp8_fast_accum",
                              given, "model.fp8_fast_accum=true model.fp8=blocks",
                              "GPU (Hopper or later)"),
    "qkv apart": Feature("", "model.kernels.qkv", lambda name: name in (None, "xla"),
                         "model.kernels.qkv=xla"),
    "no fp8_history": Feature("", "model.fp8_history", absent, "model.fp8_history=null"),
    "fp8_loss": Feature("float8 head", "model.kernels.loss", lambda name: name in FP8_LOSSES,
                        "model.kernels.loss=fp8_head", "GPU (Hopper or later)"),
    "other ffn": Feature("", "model.ffn", lambda kind: kind != "relu2", "model.ffn=gelu"),
    "weight_form": Feature("", "model.weight_form.name", given, "model.weight_form=fake_int8"),
    "fake_quant": Feature("fake-quantized weights", "model.weight_form.name",
                          lambda name: given(name) and name not in TRAINING_FORMS,
                          "model.weight_form=fake_int8"),
    "int8_activations": Feature("fake-quantized activations", "model.weight_form.activations",
                                given, "model.weight_form={name: fake_int8, activations: int8}"),
    "low_bit": Feature("low-bit training (MXFP8, MXFP6, MXFP4, NVFP4, int8)",
                       "model.weight_form.name", lambda name: name in TRAINING_FORMS,
                       "model.weight_form=nvfp4"),
    "stochastic_depth": Feature("stochastic depth", "model.stochastic_depth", given,
                                "model.stochastic_depth=0.5"),
    "share_layers": Feature("layers that share weights (ALBERT, MobileLLM-LS)",
                            "model.share_layers.name", given,
                            "model.share_layers=adjacent model.depth=2"),
    "frozen_layers": Feature("frozen lower layers (AutoFreeze)", "model.frozen_layers", given,
                             "model.frozen_layers=1 model.depth=2"),
    "share_kv": Feature("layers that share keys and values (CLA, Character.AI)",
                        "model.share_kv.name", given, "model.share_kv=adjacent"),
    "token_dropping": Feature("random token dropping (Random-LTD)", "model.token_dropping", given,
                              "model.token_dropping=0.5"),
    "qk_head_dim": Feature("queries and keys of another head size", "model.qk_head_dim", given,
                           "model.qk_head_dim=6"),
    "mla": Feature("multi-head latent attention (MLA)", "model.mla.kv_rank", given,
                   "model.mla={kv_rank: 32, rope_dim: 4} model.qk_norm=false "
                   "model.value_embeddings=false"),
    "qk_norm": Feature("", "model.qk_norm", given, "model.qk_norm=true"),
    "value_embeddings": Feature("", "model.value_embeddings", given, "model.value_embeddings=true"),
    "qkv_bias": Feature("", "model.qkv_bias", given, "model.qkv_bias=true"),
    "out_bias": Feature("", "model.out_bias", given, "model.out_bias=true"),
    "scan_layers": Feature("scanned layers", "model.scan_layers", given, "model.scan_layers=true"),
    "remat": Feature("activation checkpointing", "model.remat",
                     lambda kind: kind not in (None, "none", "offload"), "model.remat=block"),
    "compressed": Feature("activations in 8, 4 or 2 bits (ActNN)", "model.remat",
                          lambda kind: kind in COMPRESSIONS and kind != "int8",
                          "model.remat=actnn4"),
    "remat offload": Feature("activation offload", "model.remat", equals("offload"),
                             "model.remat=offload model.scan_layers=true", GPU_OR_TPU),
    "ffn_tiles": Feature("tiled FFN", "model.ffn_tiles", more_than_one, "model.ffn_tiles=2"),
    **{name: tuning(name, name) for name in METHODS if name != "full"},
    "adapter": tuning("adapters", "adapter"),
    "prompt": Feature("prompt tuning", "model.prompt", given,
                      "finetune.name=prompt train.steps=2 finetune.virtual_tokens=4 "
                      "model.prompt=4"),
    "prefix": Feature("prefix tuning", "model.prefix", given,
                      "finetune.name=prefix train.steps=2 finetune.virtual_tokens=4 "
                      "model.prefix=4"),
    # ---- what trains
    "tuning": Feature("", "finetune.name", lambda name: name not in PRETRAINING,
                      "finetune.name=lora train.steps=2"),
    "lora": tuning("LoRA", "lora"),
    "qalora": tuning("QA-LoRA", "qalora"),
    "relora": tuning("ReLoRA", "relora", "finetune.rank=4"),
    "dora": Feature("DoRA", "finetune.dora", given,
                    "finetune.dora=true finetune.name=lora train.steps=2"),
    "adapted ffn": Feature("", "finetune.targets",
                           lambda names: bool(FFN_TARGETS & set(names or ())),
                           "finetune.name=lora finetune.targets=[ffn] train.steps=2"),
    "packed ffn": Feature("", "finetune", packs_ffn,
                          "finetune.base_quantization=nf4 finetune.targets=[attention] "
                          "finetune.name=lora train.steps=2"),
    "qlora": Feature("QLoRA (nf4)", "finetune.base_quantization", given,
                     "finetune.base_quantization=nf4 finetune.name=lora train.steps=2"),
    "freeze": tuning("frozen parts", "freeze", "finetune.trainable=[attention]"),
    "bitfit": tuning("BitFit", "bitfit", "model.qkv_bias=true"),
    "ia3": tuning("IA3", "ia3"),
    # ---- the objective
    "preference": Feature("", "objective.name", lambda name: name in PREFERENCES,
                          f"objective.name=dpo {PAIRS}"),
    "language modeling": Feature("", "objective.name", lambda name: name not in PREFERENCES,
                                 "objective.name=next_token"),
    **{name: objective(name) for name in OBJECTIVES if name != "next_token"},
    "multi_token": Feature("multi-token prediction", "objective.name", equals("multi_token"),
                           "objective.name=multi_token"),
    "mtp": Feature("multi-token prediction with modules (DeepSeek-V3)", "objective.name",
                   equals("mtp"), "objective.name=mtp"),
    "mtp modules": Feature("", "model.mtp", given, "model.mtp=1"),
    "not mtp": Feature("", "objective.name", lambda name: name != "mtp",
                       "objective.name=next_token"),
    "prefix_token": Feature("prefix-token prediction", "objective.name", equals("prefix_token"),
                            "objective.name=prefix_token"),
    "sampled_softmax": Feature("sampled softmax", "objective.name", equals("sampled_softmax"),
                               "objective.name=sampled_softmax"),
    "fp8 head": Feature("", "model.fp8", equals("all"), "model.fp8=all"),
    "selective": Feature("selective language modeling (RHO-1)", "objective.name",
                         equals("selective"), "objective.name=selective"),
    "distill": Feature("distillation", "objective.name", equals("distill"),
                       "objective.name=distill objective.teacher=runs/teacher"),
    "masked_lm": Feature("masked language modeling", "objective.name", equals("masked_lm"),
                         f"{MASKED} model.causal=false"),
    "other objective": Feature("", "objective.name", lambda name: name != "next_token",
                               "objective.name=multi_token"),
    "not masked_lm": Feature("", "objective.name", lambda name: name != "masked_lm",
                             "objective.name=next_token"),
    "augment": Feature("", "data.augment.name", lambda name: name != "none",
                       "data.augment.name=masking"),
    "preference data": Feature("", "data.train.name", equals("preference"), PAIRS),
    "other data": Feature("", "data.train.name", lambda name: name != "preference",
                          "data.train={name: text, path: corpus.txt}"),
    "z_loss": Feature("z-loss", "train.z_loss", given, "train.z_loss=0.1"),
    # ---- the step
    "local_sgd": Feature("DiLoCo, gossip", "train.local_sgd.name", given,
                         "train.local_sgd.name=diloco mesh.data=2"),
    "phases": Feature("phases (progressive stacking)", "train.phases", bool,
                      "train.phases=[{until: 1, model: {depth: 1}}] model.depth=2"),
    "autofreeze": Feature("layers that freeze when they have converged (AutoFreeze)",
                          "train.autofreeze.every", given, "train.autofreeze={} model.depth=2"),
    "float16": Feature("float16 with loss scaling", "train.precision", equals("float16"),
                       "train.precision=float16"),
    "offload": Feature("optimizer offload", "optim.offload", given, "optim.offload.name=host",
                       GPU_OR_TPU),
    "file offload": Feature("optimizer states in files", "optim.offload.name", equals("files"),
                            "optim.offload.name=files"),
    "batch sizes": Feature("stages with other batch sizes", "data.stages",
                           lambda stages: any(stage.batch_size for stage in stages),
                           "data.stages=[{tokens: 64, batch_size: 4}]"),
    "rewinds": Feature("", "optim.wrappers", any_named("lottery_ticket"),
                       "optim.wrappers=[{name: lottery_ticket, rounds: 2, round_steps: 1}]"),
    "averages": Feature("", "optim.wrappers",
                        any_named("ema", "ema_nesterov", "tail_average", "sr_ste"),
                        "optim.wrappers=[{name: ema}]"),
    "masks": Feature("pruning, sparse training", "optim.wrappers", any_named(*MASKS),
                     "optim.wrappers=[{name: gradual_pruning, sparsity: 0.5, end: 1}]"),
    "qk_heads": Feature("Muon by heads of queries and keys", "optim.qk_heads", given,
                        "optim.qk_heads=2"),
    "soap_muon": Feature("SOAP-Muon", "optim.soap.basis", given, "optim.soap={}"),
    "sr_ste": Feature("2:4 sparse weights (SR-STE)", "optim.wrappers", any_named("sr_ste"),
                      "optim.wrappers=[{name: sr_ste}] model.weight_form=sparse_2_4"),
    "no 2:4": Feature("", "model.weight_form.name", lambda form: form != "sparse_2_4",
                      "model.weight_form=null"),
    **{name: optimizer(name) for name in OPTIMIZERS},
}  # fmt: skip
