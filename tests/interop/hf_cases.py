"""The tiny models of the golden fixtures: their configs, and their weights from a seed."""

import json
import zlib
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
VOCAB, ROWS, T, NEW = 96, 2, 24, 8

COMMON = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
WINDOWED = {"sliding_window": 7}
GEMMA = COMMON | {"head_dim": 16, "tie_word_embeddings": True}
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16, "rope_theta": 500.0,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
    "rope_theta": 10000.0,
}  # fmt: skip
CASES = {
    "llama": ("llama", COMMON),
    "llama tied mha": ("llama", COMMON | {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama biases mqa wide heads": (
        "llama",
        COMMON | {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}
        | {"head_dim": 16},
    ),
    "llama rope linear": (
        "llama",
        COMMON | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
    ),
    "llama rope llama3": ("llama", COMMON | {"rope_parameters": LLAMA3}),
    "llama rope yarn": ("llama", COMMON | {"rope_parameters": YARN}),
    "mistral": ("mistral", COMMON | {"sliding_window": None}),
    "mistral window": ("mistral", COMMON | WINDOWED),
    "ministral": (  # Mistral's with layer_types, which transformers reads as this
        "ministral",
        COMMON | WINDOWED | {"head_dim": 16, "num_hidden_layers": 3}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "qwen2": ("qwen2", COMMON),
    "qwen2 tied windows": (
        "qwen2",
        COMMON | WINDOWED | {"tie_word_embeddings": True, "num_key_value_heads": 1}
        | {"use_sliding_window": True, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", COMMON | {"head_dim": 16, "rope_parameters": YARN}),
    "qwen3 tied mha biases": (
        "qwen3",
        COMMON | {"head_dim": 8, "num_key_value_heads": 4, "tie_word_embeddings": True}
        | {"attention_bias": True},
    ),
    "gemma": ("gemma", GEMMA | {"num_key_value_heads": 1}),
    "gemma2": ("gemma2", GEMMA | WINDOWED | {"query_pre_attn_scalar": 24}),
    "gemma3": (
        "gemma3_text",
        GEMMA | WINDOWED | {"query_pre_attn_scalar": 16, "num_hidden_layers": 3}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            }
        },
    ),
    "gpt2": (
        "gpt2",
        {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        | {"bos_token_id": 1, "eos_token_id": None},
    ),
    "gpt2 untied": (
        "gpt2",
        {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
        | {"bos_token_id": 1, "eos_token_id": None, "n_inner": 48, "tie_word_embeddings": False},
    ),
    "nanochat": ("nanochat", COMMON),
    "nanochat mqa": (
        "nanochat",
        COMMON | {"num_key_value_heads": 1, "final_logit_softcapping": 5.0},
    ),
}  # fmt: skip

LINEAR = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}}
MQA, MHA = {"num_key_value_heads": 1}, {"num_key_value_heads": 4}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
THREE_LAYERS = {
    "num_hidden_layers": 3, "query_pre_attn_scalar": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
# What the cases above leave out of family x (tied, heads per key/value head, wide heads, window,
# stretched positions).
MORE = {
    "llama three heads tied": (  # as SmolLM and MobileLLM: 3 query heads to a key/value head
        "llama", COMMON | MQA | TIED | {"hidden_size": 48, "num_attention_heads": 3},
    ),
    "mistral tied mqa wide heads": ("mistral", COMMON | WINDOWED | MQA | TIED | {"head_dim": 16}),
    "mistral mha rope linear": ("mistral", COMMON | WINDOWED | MHA | LINEAR),
    "qwen2 mha rope yarn": ("qwen2", COMMON | MHA | {"rope_parameters": YARN}),
    "qwen3 mqa windows": (
        "qwen3",
        COMMON | WINDOWED | MQA
        | {"head_dim": 16, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "gemma mha untied": ("gemma", GEMMA | MHA | UNTIED),
    "gemma rope linear": ("gemma", GEMMA | LINEAR),
    "gemma2 mqa untied": (
        "gemma2", GEMMA | WINDOWED | MQA | UNTIED | {"query_pre_attn_scalar": 16},
    ),
    "gemma2 mha rope linear": (
        "gemma2", GEMMA | WINDOWED | MHA | LINEAR | {"query_pre_attn_scalar": 16},
    ),
    "gemma3 mqa untied": ("gemma3_text", GEMMA | WINDOWED | MQA | UNTIED | THREE_LAYERS),
    "gemma3 mha": ("gemma3_text", GEMMA | WINDOWED | MHA | THREE_LAYERS),
    "nanochat mha": ("nanochat", COMMON | MHA),
}  # fmt: skip
CASES |= MORE


def weights(shapes):
    """name -> float32 array: random values that float16 holds too, the same on every machine."""

    def one(name, shape):
        random = np.random.default_rng(zlib.crc32(name.encode()))
        noise = random.standard_normal(shape)
        if "norm" in name or "ln_" in name:
            noise = 0.2 * noise + ("weight" in name)
        elif len(shape) == 2 and "embed" not in name and "wte" not in name:
            noise = 1.5 * noise / np.sqrt(shape[-1])
        else:
            noise = 0.3 * noise
        return noise.astype(np.float16).astype(np.float32)

    return {name: one(name, tuple(shape)) for name, shape in shapes.items()}


def prompts():
    return np.random.default_rng(0).integers(2, VOCAB, (ROWS, T)).astype(np.int32)


def golden():
    """(facts, arrays) of the fixture."""
    arrays = np.load(HERE / "golden.npz")
    return json.loads(str(arrays["facts"])), arrays
