"""The model families that Hugging Face and this package share: one table entry each.

A family lists the fields of ModelConfig that it fixes, the config.json keys of the others, and the
names of its tensors. A new family is a new entry if the Transformer has its features.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

Values = Mapping[str, tuple[Any, ...] | None]  # a key -> the values that it may have; None: any


class Row(NamedTuple):
    """A tensor of a checkpoint, and our parameters that it holds concatenated.

    `theirs` has {} for the layer index; `layout` is a key of `layouts.LAYOUTS`.
    """

    ours: tuple[str, ...]
    theirs: str
    layout: str = "same"


class Family(NamedTuple):
    """`fixed`: fields of ModelConfig; `keys`: our field -> theirs.

    `defaults`: the values that transformers' config class uses for absent keys
    (tests/interop/make_defaults.py). `neutral`: keys that change nothing here, in addition to
    `keys.NEUTRAL`, with the values that they may have (None: any).
    """

    model_type: str
    architecture: str
    fixed: dict[str, Any]
    keys: dict[str, str]
    defaults: dict[str, Any]
    rows: tuple[Row, ...]
    rope_base: float | None = 10_000.0  # default if config.json has none; None: no RoPE
    embed_root: bool = False  # embeddings are multiplied by sqrt(width)
    biases: tuple[str, ...] = ()  # fields that `attention_bias` switches
    scale_key: str | None = None  # scores are divided by the square root of this value
    windows: str = "none"  # none, all (sliding_window in each layer), types (layer_types)
    window_keys: tuple[str, ...] = ()  # keys that select the layers with a window
    pattern: int | None = None  # without layer_types, every pattern-th layer is full
    per_type_rope: bool = False  # sliding-window (S) layers have their own RoPE settings
    whole_heads: bool = False  # heads must divide the width
    neutral: Values = MappingProxyType({})
    prefix: str = "model."
    activation: tuple[str, tuple[str, ...]] = ("hidden_act", ("silu", "swish"))


# ModelConfig fields that switch off all features beyond a plain decoder.
PLAIN = {
    "ffn": "swiglu", "qk_norm": False, "norm_gain": True, "embed_norm": False,
    "logit_softcap": None,
    "value_embeddings": False, "residual_scales": False, "smear": False, "backout": False,
    "init": "gpt2",
}  # fmt: skip
KEYS = {
    "depth": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "hidden": "intermediate_size",
    "norm_eps": "rms_norm_eps", "tied_head": "tie_word_embeddings",
    "context_length": "max_position_embeddings",
}  # fmt: skip
CAPS = {"logit_softcap": "final_logit_softcapping", "attention_softcap": "attn_logit_softcapping"}


def defaults(
    vocab: int, width: int, hidden: int, depth: int, heads: int, kv_heads: int | None, context: int
) -> dict[str, Any]:
    """Default sizes of a family's config class, and defaults that most families share."""
    return {
        "vocab_size": vocab, "hidden_size": width, "intermediate_size": hidden,
        "num_hidden_layers": depth, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "max_position_embeddings": context, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    }  # fmt: skip


BLOCK, LAYER = "blocks/", "model.layers.{}."
ATTENTION = tuple(
    Row((f"blocks/attention/{ours}",), f"{LAYER}self_attn.{theirs}_proj.weight", "linear")
    for ours, theirs in (("q", "q"), ("k", "k"), ("v", "v"), ("out", "o"))
) + tuple(
    Row((f"blocks/attention/{ours}_bias",), f"{LAYER}self_attn.{theirs}_proj.bias")
    for ours, theirs in (("q", "q"), ("k", "k"), ("v", "v"), ("out", "o"))
)
FFN = tuple(
    Row((f"blocks/ffn/{part}",), f"{LAYER}mlp.{part}_proj.weight", "linear")
    for part in ("gate", "up", "down")
) + tuple(
    Row((f"blocks/ffn/{part}_bias",), f"{LAYER}mlp.{part}_proj.bias")
    for part in ("gate", "up", "down")
)
ENDS = (
    Row(("embed",), "model.embed_tokens.weight"),
    Row(("head",), "lm_head.weight", "linear"),
)


def gains(layout: str, names: dict[str, str]) -> tuple[Row, ...]:
    """Rows of the norms' gains, including the final norm and the QK norms."""
    inside = (
        Row((BLOCK + ours,), f"{LAYER}{theirs}.weight", layout) for ours, theirs in names.items()
    )
    heads = (
        Row((f"blocks/attention/{x}_gain",), f"{LAYER}self_attn.{x}_norm.weight", layout)
        for x in "qk"
    )
    return (*inside, *heads, Row(("final_gain",), "model.norm.weight", layout))


TWO_NORMS = {"attention_gain": "input_layernorm", "ffn_gain": "post_attention_layernorm"}
FOUR_NORMS = {
    "attention_gain": "input_layernorm",
    "attention_post_gain": "post_attention_layernorm",
    "ffn_gain": "pre_feedforward_layernorm",
    "ffn_post_gain": "post_feedforward_layernorm",
}
LLAMA_ROWS = (*ENDS, *ATTENTION, *FFN, *gains("same", TWO_NORMS))
GEMMA_ROWS = (*ENDS, *ATTENTION, *FFN, *gains("plus one", TWO_NORMS))
GEMMA2_ROWS = (*ENDS, *ATTENTION, *FFN, *gains("plus one", FOUR_NORMS))
NANOCHAT_ROWS = (
    *ENDS,
    *(
        Row((f"blocks/attention/{x}",), f"{LAYER}self_attn.{x}_proj.weight", "turned linear")
        for x in "qk"
    ),
    *(row for row in ATTENTION if row.ours[0][-2:] in ("/v", "ut")),
    Row(("blocks/ffn/up",), f"{LAYER}mlp.fc1.weight", "linear"),
    Row(("blocks/ffn/down",), f"{LAYER}mlp.fc2.weight", "linear"),
)
OF_GPT2 = "transformer.h.{}."
GPT2_ROWS = (
    Row(("embed",), "transformer.wte.weight"),
    Row(("position_embed",), "transformer.wpe.weight"),
    Row(("head",), "lm_head.weight", "linear"),
    Row(tuple(f"blocks/attention/{x}" for x in "qkv"), f"{OF_GPT2}attn.c_attn.weight"),
    Row(tuple(f"blocks/attention/{x}_bias" for x in "qkv"), f"{OF_GPT2}attn.c_attn.bias"),
    Row(("blocks/attention/out",), f"{OF_GPT2}attn.c_proj.weight"),
    Row(("blocks/attention/out_bias",), f"{OF_GPT2}attn.c_proj.bias"),
    Row(("blocks/ffn/up",), f"{OF_GPT2}mlp.c_fc.weight"),
    Row(("blocks/ffn/up_bias",), f"{OF_GPT2}mlp.c_fc.bias"),
    Row(("blocks/ffn/down",), f"{OF_GPT2}mlp.c_proj.weight"),
    Row(("blocks/ffn/down_bias",), f"{OF_GPT2}mlp.c_proj.bias"),
    Row(("blocks/attention_gain",), f"{OF_GPT2}ln_1.weight"),
    Row(("blocks/attention_shift",), f"{OF_GPT2}ln_1.bias"),
    Row(("blocks/ffn_gain",), f"{OF_GPT2}ln_2.weight"),
    Row(("blocks/ffn_shift",), f"{OF_GPT2}ln_2.bias"),
    Row(("final_gain",), "transformer.ln_f.weight"),
    Row(("final_shift",), "transformer.ln_f.bias"),
)

SILU = {"hidden_act": "silu"}
NO_BIAS: Values = {"attention_bias": (None, False)}
NO_WINDOW: Values = {
    "sliding_window": (None,), "use_sliding_window": (None, False), "max_window_layers": None,
}  # fmt: skip
LLAMA = Family(
    "llama", "LlamaForCausalLM", PLAIN, KEYS | {"ffn_bias": "mlp_bias"},
    defaults(32000, 4096, 11008, 32, 32, None, 2048) | SILU | {"attention_bias": False}
    | {"mlp_bias": False},
    LLAMA_ROWS, biases=("qkv_bias", "out_bias"), whole_heads=True,
    # rope_interleaved is a SmolLM key for a head reordering that it does not use.
    neutral={**NO_WINDOW, "is_llama_config": None, "rope_interleaved": (None, False)},
)  # fmt: skip
MISTRAL = Family(
    "mistral", "MistralForCausalLM", PLAIN, KEYS,
    defaults(32000, 4096, 14336, 32, 32, 8, 131072) | SILU | {"sliding_window": 4096},
    LLAMA_ROWS, windows="all", window_keys=("sliding_window",), neutral=NO_BIAS,
)  # fmt: skip
MINISTRAL = MISTRAL._replace(
    model_type="ministral", architecture="MinistralForCausalLM", windows="types",
    window_keys=("sliding_window", "layer_types"),
)  # fmt: skip
QWEN2 = Family(
    "qwen2", "Qwen2ForCausalLM", PLAIN | {"qkv_bias": True}, KEYS,
    defaults(151936, 4096, 22016, 32, 32, 32, 32768) | SILU
    | {"sliding_window": 4096, "max_window_layers": 28, "use_sliding_window": False},
    LLAMA_ROWS, windows="types",
    window_keys=("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
    neutral={"attention_bias": (None, True), "use_mrope": (None, False)},
)  # fmt: skip
QWEN3 = QWEN2._replace(
    model_type="qwen3", architecture="Qwen3ForCausalLM", biases=("qkv_bias", "out_bias"),
    fixed=PLAIN | {"qk_norm": True, "qk_norm_gain": True, "qk_scale": 1.0},
    defaults=QWEN2.defaults | {"head_dim": 128, "attention_bias": False},
    neutral={"use_mrope": (None, False)},
)  # fmt: skip
TANH_GELU = ("gelu_pytorch_tanh", "gelu_new")
OF_GEMMA = {"tie_word_embeddings": True, "head_dim": 256, "attention_bias": False}
GEMMA = Family(
    "gemma", "GemmaForCausalLM", PLAIN | {"ffn": "geglu"}, KEYS,
    defaults(256000, 3072, 24576, 28, 16, 16, 8192) | OF_GEMMA | {"hidden_act": TANH_GELU[0]},
    # Gemma's first releases say "gelu" but mean the tanh approximation.
    GEMMA_ROWS, embed_root=True, biases=("qkv_bias", "out_bias"), neutral=NO_WINDOW,
    activation=("hidden_act", (*TANH_GELU, "gelu")),
)  # fmt: skip
GEMMA2 = GEMMA._replace(
    model_type="gemma2", architecture="Gemma2ForCausalLM",
    fixed=GEMMA.fixed | {"post_norm": True}, keys=KEYS | CAPS,
    defaults=defaults(256000, 2304, 9216, 26, 8, 4, 8192) | OF_GEMMA
    | {"query_pre_attn_scalar": 256, "sliding_window": 4096, "hidden_activation": TANH_GELU[0]}
    | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
    rows=GEMMA2_ROWS, scale_key="query_pre_attn_scalar", windows="types", pattern=2,
    window_keys=("sliding_window", "layer_types"), whole_heads=True,
    neutral={"sliding_window_pattern": (None, 2), "sliding_window_size": None},
    activation=("hidden_activation", TANH_GELU),
)  # fmt: skip
GEMMA3 = GEMMA2._replace(
    model_type="gemma3_text", architecture="Gemma3ForCausalLM",
    fixed=GEMMA2.fixed | {"qk_norm": True, "qk_norm_gain": True, "qk_scale": 1.0},
    keys=KEYS | {"logit_softcap": CAPS["logit_softcap"]},
    defaults={k: v for k, v in GEMMA2.defaults.items() if k != CAPS["attention_softcap"]}
    | {"vocab_size": 262208, "max_position_embeddings": 131072, "final_logit_softcapping": None},
    rope_base=1_000_000.0, per_type_rope=True, pattern=6,
    window_keys=("sliding_window", "layer_types", "sliding_window_pattern"),
    # transformers keeps this Gemma 2 key but does not apply it, so no checkpoint can depend on it.
    neutral={"attn_logit_softcapping": (None,), "_sliding_window_pattern": None},
)  # fmt: skip
GPT2 = Family(
    "gpt2", "GPT2LMHeadModel",
    PLAIN | {"ffn": "gelu", "norm": "layer", "position_embedding": "learned", "qkv_bias": True}
    | {"out_bias": True, "ffn_bias": True},
    {"depth": "n_layer", "width": "n_embd", "heads": "n_head", "hidden": "n_inner"}
    | {"norm_eps": "layer_norm_epsilon", "tied_head": "tie_word_embeddings"}
    | {"context_length": "n_positions"},
    {"vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}
    | {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "n_inner": None}
    | {"activation_function": TANH_GELU[1]},
    GPT2_ROWS, rope_base=None, prefix="transformer.",
    activation=("activation_function", TANH_GELU[::-1]),
    neutral={
        "attn_pdrop": None, "embd_pdrop": None, "resid_pdrop": None, "n_ctx": None,
        "summary_type": None, "summary_use_proj": None, "summary_activation": None,
        "summary_proj_to_labels": None, "summary_first_dropout": None,
        "scale_attn_weights": (None, True), "scale_attn_by_inverse_layer_idx": (None, False),
        "reorder_and_upcast_attn": None,
    },
)  # fmt: skip
NANOCHAT = Family(
    "nanochat", "NanoChatForCausalLM",
    PLAIN | {"ffn": "relu2", "qk_norm": True, "qk_scale": 1.0, "norm_gain": False}
    | {"embed_norm": True, "init": "speedrun"},
    KEYS | {"logit_softcap": "final_logit_softcapping"},
    defaults(50304, 768, 8192, 12, 6, None, 2048)
    | {"final_logit_softcapping": 15.0, "hidden_act": "relu2"},
    NANOCHAT_ROWS, activation=("hidden_act", ("relu2",)), neutral={**NO_BIAS, **NO_WINDOW},
)  # fmt: skip

FAMILIES = {
    family.model_type: family
    for family in (
        LLAMA, MISTRAL, MINISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3, GPT2, NANOCHAT
    )
}  # fmt: skip
