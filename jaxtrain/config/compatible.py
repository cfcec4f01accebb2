"""One table of what goes with what: every pair of features that is refused, and the fix.

FEATURES says how each feature is read off a configuration and which devices it runs on; REFUSALS
lists the pairs. `check_compatible` raises for a configuration, `jaxtrain.config.support_matrix`
writes the manual's table, and a test tries each cell. Whoever adds a feature adds its fields here.

Checks elsewhere need more than two settings: sizes that must divide (`config.resolve`,
`parallel.mesh`), the layer plan (`parallel.pipeline`), a device or a kernel (`weights.float8`,
`model.remat`, `optim.offload`), the state of a run (`train`), one section (its own model).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel

from jaxtrain.cluster.runtime import compute_dtype
from jaxtrain.config.tree import Sections
from jaxtrain.data import sources_of
from jaxtrain.finetune import METHODS
from jaxtrain.model.saved_activations import COMPRESSIONS
from jaxtrain.objectives import OBJECTIVES, PREFERENCES
from jaxtrain.optim import OPTIMIZERS
from jaxtrain.settings import UserError
from jaxtrain.weights import TRAINING_FORMS

AXES = ("data", "fsdp", "tensor", "context", "pipeline", "expert")
EVERY_DEVICE = "CPU, GPU, TPU"


class Feature(NamedTuple):
    """What a configuration has or has not."""

    label: str  # in the support matrix; "" for the absence of something, which has no row there
    key: str
    active: Callable[[Any], bool]  # of the value at `key`; None where there is no such value
    example: str = ""  # overrides that switch it on
    devices: str = EVERY_DEVICE


class Refusal(NamedTuple):
    """Two features that exclude each other."""

    feature: str
    other: str
    why: str
    fix: str  # key=value


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
    """Whether a `finetune` section quantizes the matrices of feed-forward layers."""
    trained = " ".join(getattr(c, "trainable", ()))
    return given(getattr(c, "base_quantization", None)) and "experts" not in trained


def any_named(*names: str) -> Callable[[Any], bool]:
    """Whether a list has an entry of one of these names."""
    return lambda entries: any(entry.name in names for entry in entries or ())


MASKS = (
    "gradual_pruning",
    "set",
    "rigl",
    "early_bird",
    "lottery_ticket",
)  # wrappers that make weights zero
FFN_TARGETS = {"ffn", "up", "gate", "down"}
PAIRS = (
    "data.train={name: preference, path: pairs.jsonl} data.packing.name=padded "
    "model.document_mask=true"
)
MASKED = "objective.name=masked_lm model.window_pattern=L"
MOE = "model.moe.experts=4"
GPU_OR_TPU = "GPU, TPU"
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
    "other ffn": Feature("", "model.ffn", lambda kind: kind != "relu2", "model.ffn=gelu"),
    "weight_form": Feature("", "model.weight_form.name", given, "model.weight_form=fake_int8"),
    "fake_quant": Feature("fake-quantized weights", "model.weight_form.name",
                          lambda name: given(name) and name not in TRAINING_FORMS,
                          "model.weight_form=fake_int8"),
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
    "tuning": Feature("", "finetune.name", lambda name: name != "full",
                      "finetune.name=lora train.steps=2"),
    "lora": tuning("LoRA", "lora"),
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
    "prefix_token": Feature("prefix-token prediction", "objective.name", equals("prefix_token"),
                            "objective.name=prefix_token"),
    "sampled_softmax": Feature("sampled softmax", "objective.name", equals("sampled_softmax"),
                               "objective.name=sampled_softmax"),
    "fp8 head": Feature("", "model.fp8", equals("all"), "model.fp8=all"),
    "selective": Feature("selective language modeling (RHO-1)", "objective.name",
                         equals("selective"), "objective.name=selective"),
    "masked_lm": Feature("masked language modeling", "objective.name", equals("masked_lm"),
                         f"{MASKED} model.causal=false"),
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
    "float16": Feature("float16 with loss scaling", "train.precision", equals("float16"),
                       "train.precision=float16"),
    "offload": Feature("optimizer offload", "optim.offload", given, "optim.offload=true",
                       GPU_OR_TPU),
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
    "soap_muon": Feature("SOAP-Muon", "optim.soap.basis", given, "optim.soap={}"),
    "sr_ste": Feature("2:4 sparse weights (SR-STE)", "optim.wrappers", any_named("sr_ste"),
                      "optim.wrappers=[{name: sr_ste}] model.weight_form=sparse_2_4"),
    "no 2:4": Feature("", "model.weight_form.name", lambda form: form != "sparse_2_4",
                      "model.weight_form=null"),
    **{name: optimizer(name) for name in OPTIMIZERS},
}  # fmt: skip

ONE_CALL = "delayed scaling measures one call of each matrix a step"
WHOLE_TEXT = "virtual tokens stand in front of a whole text on one device"
NO_LATENTS = "virtual tokens have keys and values, no latents"
NO_RESET = "its moments of single weights cannot be set to zero"
NOT_FOR_PREFERENCES = "preference training does not have it yet"
REFUSALS = (
    Refusal("interleaved stages", "no pipeline", "there are no stages to interleave",
            "mesh.pipeline_repeats=1"),
    Refusal("expert", "no moe", "there are no experts to divide", "mesh.expert=1"),
    Refusal("prompt", "context", WHOLE_TEXT, "mesh.context=1"),
    Refusal("prompt", "pipeline", WHOLE_TEXT, "mesh.pipeline=1"),
    Refusal("prefix", "context", WHOLE_TEXT, "mesh.context=1"),
    Refusal("prefix", "pipeline", WHOLE_TEXT, "mesh.pipeline=1"),
    Refusal("fp8", "tuning", "float8 is for training all matrices, and these are frozen "
            "(finetune.base_quantization=int8 makes them smaller)", "model.fp8=null"),
    Refusal("fp8_history", "no fp8", "there is nothing to scale", "model.fp8_history=null"),
    Refusal("fp8_hidden", "no fp8", "nothing is in float8", "model.fp8_hidden=false"),
    Refusal("fp8_hidden", "other ffn", "the root of a squared ReLU's copy is its input",
            "model.fp8_hidden=false"),
    Refusal("fp8_hidden", "ffn_bias", "biases take the unfused path", "model.ffn_bias=false"),
    Refusal("fp8_history", "ffn_tiles", ONE_CALL, "model.ffn_tiles=1"),
    Refusal("fp8_history", "prompt", ONE_CALL, "model.fp8_history=null"),
    Refusal("fp8_history", "pipeline", ONE_CALL, "mesh.pipeline=1"),
    Refusal("prompt", "prefix", "both stand in front of the text", "model.prefix=null"),
    Refusal("weight_form", "fp8", "a matrix has one form", "model.fp8=null"),
    Refusal("low_bit", "tuning", "low-bit products are for training all matrices, and these are "
            "frozen (finetune.base_quantization=nf4 makes them smaller)",
            "model.weight_form=null"),
    Refusal("low_bit", "pipeline", "the step's key does not reach the stages", "mesh.pipeline=1"),
    Refusal("low_bit", "preference", NOT_FOR_PREFERENCES, "model.weight_form=null"),
    Refusal("compressed", "pipeline", "the step's key does not reach the stages",
            "model.remat=int8"),
    Refusal("compressed", "preference", NOT_FOR_PREFERENCES, "model.remat=int8"),
    Refusal("stochastic_depth", "pipeline", "the step's key does not reach the stages",
            "mesh.pipeline=1"),
    Refusal("stochastic_depth", "moe", "a skipped layer reports no expert loads",
            "model.stochastic_depth=0"),
    Refusal("stochastic_depth", "fp8_history", "a skipped layer reports no maxima",
            "model.stochastic_depth=0"),
    Refusal("share_layers", "pipeline", "a set of weights lies on one stage", "mesh.pipeline=1"),
    Refusal("share_layers", "moe", "experts count the tokens of one layer",
            "model.share_layers=null"),
    Refusal("share_layers", "fp8_history", ONE_CALL, "model.fp8_history=null"),
    Refusal("encoder", "not masked_lm", "a token sees the ones that it would predict",
            "objective.name=masked_lm"),
    Refusal("sampled_softmax", "fp8 head", "a sample of the head's columns is not in float8",
            "model.fp8=blocks"),
    Refusal("masked_lm", "causal", "hidden tokens are predicted from both sides",
            "model.causal=false"),
    Refusal("encoder", "windows", "a window reaches back alone", "model.window_pattern=L"),
    Refusal("encoder", "context", "rows split over devices are attended to in causal order",
            "mesh.context=1"),
    Refusal("masked_lm", "augment", "the objective hides tokens by itself",
            "data.augment={name: none}"),
    Refusal("frozen_layers", "tuning", "finetune.name=freeze says what trains",
            "model.frozen_layers=0"),
    Refusal("frozen_layers", "pipeline", "stages train all of their layers", "mesh.pipeline=1"),
    Refusal("frozen_layers", "moe", "a frozen layer reports no expert loads",
            "model.frozen_layers=0"),
    Refusal("frozen_layers", "fp8_history", "a frozen layer reports no maxima",
            "model.frozen_layers=0"),
    Refusal("frozen_layers", "share_layers", "the layers on top train the same weights",
            "model.frozen_layers=0"),
    Refusal("frozen_layers", "offload", "states are moved as a whole", "optim.offload=false"),
    Refusal("frozen_layers", "local_sgd", "the outer step moves all layers",
            "train.local_sgd=null"),
    Refusal("frozen_layers", "masks", "masks are drawn from all weights", "optim.wrappers=[]"),
    Refusal("frozen_layers", "averages", "the averages of frozen layers would stand still",
            "optim.wrappers=[]"),
    Refusal("frozen_layers", "schedule_free", "it evaluates an average of the weights, which would "
            "stand still", "optim.name=adamw"),
    Refusal("share_kv", "frozen_layers", "layers on top may read the keys of a frozen one",
            "model.frozen_layers=0"),
    Refusal("share_kv", "pipeline", "keys and values do not travel between stages",
            "mesh.pipeline=1"),
    Refusal("share_kv", "stochastic_depth", "a skipped layer leaves no keys and values",
            "model.stochastic_depth=0"),
    Refusal("share_kv", "phases", "layers would be copied without their keys and values",
            "train.phases=[]"),
    Refusal("share_kv", "tuning", "methods change the matrices of each layer's block",
            "model.share_kv=null"),
    Refusal("token_dropping", "pipeline", "the step's key does not reach the stages",
            "mesh.pipeline=1"),
    Refusal("token_dropping", "context", "a layer's tokens are gathered from the whole row",
            "mesh.context=1"),
    Refusal("token_dropping", "moe", "experts balance the tokens of whole rows",
            "model.token_dropping=0"),
    Refusal("token_dropping", "share_kv", "keys of a layer before are those of other tokens",
            "model.token_dropping=0"),
    Refusal("token_dropping", "preference", "log-probs of answers need all tokens",
            "model.token_dropping=0"),
    Refusal("qk_head_dim", "mla", "model.mla.nope_dim and rope_dim say it",
            "model.qk_head_dim=null"),
    Refusal("qk_head_dim", "prefix", "virtual keys have the size of values",
            "model.qk_head_dim=null"),
    Refusal("mla", "qk_norm", "decoding never makes the keys; MLA norms its latents",
            "model.qk_norm=false"),
    Refusal("mla", "value_embeddings", "decoding never makes the values",
            "model.value_embeddings=false"),
    Refusal("mla", "qkv_bias", "its projections have no biases", "model.qkv_bias=false"),
    Refusal("mla", "out_bias", "its projections have no biases", "model.out_bias=false"),
    Refusal("mla", "share_kv", "each layer has a latent", "model.share_kv=null"),
    Refusal("mla", "mup", "muP has no rule for the ranks", "model.init=speedrun"),
    Refusal("mla", "prompt", NO_LATENTS, "model.mla=null"),
    Refusal("mla", "prefix", NO_LATENTS, "model.mla=null"),
    Refusal("mla", "ia3", "there are no keys and values to scale", "model.mla=null"),
    Refusal("mla", "fp8_history", "it knows one input of each module's matrices",
            "model.fp8_history=null"),
    Refusal("moe", "ffn_bias", "experts have no biases", "model.ffn_bias=false"),
    Refusal("adapted ffn", "moe", "experts take no adapters", "finetune.targets=[attention]"),
    Refusal("packed ffn", "moe", "experts are not quantized",
            "finetune.base_quantization=null"),
    Refusal("ia3", "moe", "experts take no factors",
            "finetune={name: lora, targets: [attention]}"),
    Refusal("mup", "tied_head", "muP scales the head unlike the embedding",
            "model.tied_head=false"),
    Refusal("qk_norm_gain", "no qk_norm", "there is no norm for the gains",
            "model.qk_norm_gain=false"),
    Refusal("norm_gain", "no block_norm", "there are no norms for the gains",
            "model.norm_gain=false"),
    Refusal("phases", "tuning", "the checkpoint fixes the number of frozen layers",
            "train.phases=[]"),
    Refusal("batch sizes", "rewinds", "the data go on where the schedule goes back",
            "data.stages=[]"),
    Refusal("masks", "tuning", "pruning needs all weights to train", "optim.wrappers=[]"),
    Refusal("masks", "offload", "masks are drawn from all weights at once", "optim.offload=false"),
    Refusal("masks", "local_sgd", "each replica would draw other masks",
            "train.local_sgd=null"),
    Refusal("masks", "schedule_free", "it evaluates an average of the weights, which has no zeros",
            "optim.name=adamw"),
    Refusal("masks", "soap", NO_RESET, "optim.name=muon"),
    Refusal("masks", "galore", NO_RESET, "optim.name=adamw"),
    Refusal("local_sgd", "galore", "each replica would project to a subspace of its own",
            "optim.name=adamw"),
    Refusal("masks", "soap_muon", NO_RESET, "optim.soap=null"),
    Refusal("masks", "adamw8bit", NO_RESET, "optim.name=adamw"),
    Refusal("sr_ste", "no 2:4", "it holds weights to 2:4 masks", "model.weight_form=sparse_2_4"),
    Refusal("local_sgd", "pipeline", "a replica is not divided into stages", "mesh.pipeline=1"),
    Refusal("local_sgd", "float16", "each replica would have a loss scale of its own",
            "train.precision=bfloat16"),
    Refusal("local_sgd", "offload", "each replica keeps its own states", "optim.offload=false"),
    Refusal("preference", "other data", "dpo, ipo, orpo and kto learn from preferences",
            "objective.name=next_token"),
    Refusal("language modeling", "preference data", "it is for text, not for answers to compare",
            "objective.name=dpo"),
    Refusal("preference", "no document_mask", "the answers of a pair share a row",
            "model.document_mask=true"),
    Refusal("preference", "pipeline", NOT_FOR_PREFERENCES,
            "mesh.pipeline=1"),
    Refusal("preference", "local_sgd", NOT_FOR_PREFERENCES,
            "train.local_sgd=null"),
    Refusal("preference", "z_loss", "the loss is of answers, not of tokens", "train.z_loss=0"),
    Refusal("preference", "fp8", NOT_FOR_PREFERENCES, "model.fp8=null"),
    Refusal("preference", "stochastic_depth", "log-probs of answers need all layers",
            "model.stochastic_depth=0"),
)  # fmt: skip

# Sizes, rates and switches inside one layer: they go with every axis and every feature. section ->
# its fields. The fields of an optimizer, an objective or a method are those of its row above.
EVERYWHERE = {
    "model": "depth width head_dim heads kv_heads hidden vocab_multiple rope_base "
    "rope_base_short qk_scale attention_scale "
    "last_layer_full short_window context_length norm norm_eps post_norm embed_scale "
    "embed_norm logit_softcap attention_softcap residual_scales "
    "smear backout bigram_rows base_width adapter embedding_dtype attention "
    "deterministic_attention remat_short",
    "model.share_layers": "layers",
    "model.mla": "q_rank rope_dim nope_dim",
    "model.share_kv": "layers",
    "model.moe": "top_k hidden shared_experts every score_function balance_bias aux_loss z_loss "
    "remat",
    "model.weight_form": "stochastic_rounding hadamard",
    "model.rope_scaling": "name factor low_freq_factor high_freq_factor original_context beta_fast "
    "beta_slow attention_factor truncate short_factor long_factor",
    "model.kernels": "norm rope relu2 ffn loss",
    "train": "sequence_length batch_size device_batch_size fit steps tokens_per_parameter "
    "init_from on_nonfinite max_consecutive_skips compiler_options",
    "train.local_sgd": "every outer_lr outer_momentum compress fragments",
    "train.phases[]": "until model grow",
    "train.loss_spike": "action deviations window rollback_steps skip_batches",
}  # fmt: skip


def check_compatible(c: Sections, mesh_shape: Mapping[str, int]) -> None:
    """Raises UserError, a line for each refused pair of features, with the fix.

    c: a configuration, resolved or not. mesh_shape: devices of each axis, `auto` resolved.
    """
    lines = [shown(c, mesh_shape, refusal) for refusal in refusals(c, mesh_shape)]
    if lines:
        raise UserError(*lines)


def refusals(c: Sections, mesh_shape: Mapping[str, int]) -> list[Refusal]:
    """The rows of the table that a configuration breaks."""
    has = {name: f.active(value_at(c, mesh_shape, f.key)) for name, f in FEATURES.items()}
    return [refusal for refusal in REFUSALS if has[refusal.feature] and has[refusal.other]]


def shown(c: Sections, mesh_shape: Mapping[str, int], refusal: Refusal) -> str:
    one, other = (setting(c, mesh_shape, FEATURES[name].key) for name in refusal[:2])
    return f"{one} does not go with {other}: {refusal.why}; set {refusal.fix}"


def setting(c: Sections, mesh_shape: Mapping[str, int], key: str) -> str:
    """`key=value` as a command line has it."""
    value = value_at(c, mesh_shape, key)
    if isinstance(value, BaseModel):
        changed = {"name"} | value.model_dump(exclude_defaults=True).keys()
        fields = value.model_dump(mode="json", include=changed).items()
        return f"{key}={{{', '.join(f'{name}: {field}' for name, field in fields)}}}"
    if isinstance(value, tuple):
        return f"{key}=[{', '.join(getattr(entry, 'name', str(entry)) for entry in value)}]"
    if value is None or isinstance(value, bool):
        value = "null" if value is None else str(value).lower()
    return f"{key}={value}"


def value_at(c: Sections, mesh_shape: Mapping[str, int], key: str) -> object:
    """The value of a dotted path; None where its section has no such field, or there is none."""
    section, _, name = key.rpartition(".")
    if section == "mesh" and name in mesh_shape:
        return mesh_shape[name]
    if key == "data.train.name":  # a mixture's sources are all preferences, or none is
        return next(iter(sources_of(c.data.train).values())).name
    found: Any = c
    for part in key.split("."):
        found = getattr(found, part, None) if isinstance(found, BaseModel) else None
    return compute_dtype(found).name if key == "train.precision" else found
