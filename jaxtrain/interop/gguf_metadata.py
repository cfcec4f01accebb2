"""GGUF metadata of a model, and the check that llama.cpp computes the model as we do.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
from typing import NamedTuple

import gguf
import jax.numpy as jnp
import numpy as np

from jaxtrain.interop.configs import attention_scale
from jaxtrain.model import ResolvedModel, make_plan
from jaxtrain.model.rope import frequencies
from jaxtrain.settings import UserError

LINEAR = ("linear",)


class Architecture(NamedTuple):
    """An architecture of llama.cpp (`general.architecture`), shared by one or more families.

    `paired`: RoPE rotates adjacent channels, not the two halves. `scaling`: the supported names of
    `model.rope_scaling`. `biases`: the tensors that may have a bias. `every` = n: each n-th layer
    has full attention, the others a sliding window; None: no windows. `head`: whether an untied
    output head is supported.
    """

    name: str
    key: gguf.MODEL_ARCH
    scaling: tuple[str, ...] = ()
    biases: tuple[str, ...] = ()
    paired: bool = False
    every: int | None = None
    head: bool = True
    large: int | None = None  # depth of the model size that has its own attention scale


QKV = ("attn_q", "attn_k", "attn_v")
LLAMA = Architecture(
    "llama", gguf.MODEL_ARCH.LLAMA, ("linear", "yarn", "llama3"),
    (*QKV, "attn_output", "ffn_gate", "ffn_up", "ffn_down"), paired=True,
)  # fmt: skip
QWEN2 = Architecture("qwen2", gguf.MODEL_ARCH.QWEN2, ("linear", "yarn"), QKV)
ARCHITECTURES = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "ministral": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN2._replace(name="qwen3", key=gguf.MODEL_ARCH.QWEN3, biases=()),
    "gemma": Architecture("gemma", gguf.MODEL_ARCH.GEMMA, LINEAR, head=False),
    "gemma2": Architecture(
        "gemma2", gguf.MODEL_ARCH.GEMMA2, LINEAR, every=2, head=False, large=46
    ),
    "gemma3_text": Architecture("gemma3", gguf.MODEL_ARCH.GEMMA3, LINEAR, every=6, large=62),
    "gpt2": Architecture(
        "gpt2", gguf.MODEL_ARCH.GPT2,
        biases=("attn_qkv", "attn_output", "ffn_up", "ffn_down", "attn_norm", "ffn_norm")
        + ("output_norm",),
    ),
}  # fmt: skip


def architecture_of(family: str, c: ResolvedModel) -> Architecture:
    """The architecture of a model. Raises a one-line UserError if llama.cpp would differ."""
    if family not in ARCHITECTURES:
        raise UserError(
            f"llama.cpp has no architecture for models of the family {family}; GGUF is written for "
            + ", ".join(ARCHITECTURES)
        )
    arch = ARCHITECTURES[family]
    if reason := missing_feature(arch, c):
        raise UserError(f"llama.cpp's architecture {arch.name} has no {reason}")
    return arch


def missing_feature(arch: Architecture, c: ResolvedModel) -> str | None:
    """A feature of the model that the architecture lacks; None if it has all."""
    scaling = c.rope_scaling
    if scaling and scaling.name not in arch.scaling and c.position_embedding == "rotary":
        has = f"only {', '.join(arch.scaling)}" if arch.scaling else "none"
        return f"rope_scaling {scaling.name}, {has}"
    if scaling and scaling.name == "yarn" and not scaling.truncate:
        return "YaRN with rope_scaling.truncate=false"
    if not (c.tied_head or arch.head):
        return "head apart from the embedding (tied_head false)"
    if c.width != c.heads * c.head_dim and arch.name in ("qwen2", "gpt2"):
        return f"{c.heads} heads of {c.head_dim} channels with a width of {c.width}"
    if arch.name == "gemma2" and None in (c.logit_softcap, c.attention_softcap):
        return "model without logit_softcap and attention_softcap"
    scale = c.head_dim**-0.5
    if c.depth == arch.large:
        scale = (c.width // c.heads) ** -0.5
    if not math.isclose(attention_scale(c), scale, rel_tol=1e-5):
        return f"factor {attention_scale(c):.6g} on the scores (it has {scale:.6g})"
    return None


def context_length(arch: Architecture, c: ResolvedModel) -> int:
    """Context length in tokens, cut to the shortest window if llama.cpp does not apply windows."""
    windows = [] if arch.every else [x.window for x in make_plan(c) if x.window is not None]
    return min([c.context_length, *(window + 1 for window in windows)])


def add_model_facts(
    writer: gguf.GGUFWriter, arch: Architecture, c: ResolvedModel, rows: int
) -> None:
    """Write sizes and settings of a model. rows: vocabulary size, padding included."""
    writer.add_vocab_size(rows)
    writer.add_context_length(context_length(arch, c))
    writer.add_embedding_length(c.width)
    writer.add_block_count(c.depth)
    writer.add_feed_forward_length(c.hidden)
    writer.add_head_count(c.heads)
    writer.add_head_count_kv(c.kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    if c.norm == "layer":
        writer.add_layer_norm_eps(c.norm_eps)
    else:
        writer.add_layer_norm_rms_eps(c.norm_eps)
    if c.logit_softcap is not None:
        writer.add_final_logit_softcapping(c.logit_softcap)
    if c.attention_softcap is not None:
        writer.add_attn_logit_softcapping(c.attention_softcap)
    if arch.every:
        add_windows(writer, arch.every, c)
        writer.add_rope_freq_base_swa(c.rope_base_short or c.rope_base)
    if c.position_embedding == "rotary":
        add_rope(writer, c)


def add_windows(writer: gguf.GGUFWriter, every: int, c: ResolvedModel) -> None:
    """Write the window size and its layers. Their window counts the query's own key, ours not."""
    windows = [spec.window for spec in make_plan(c)]
    sliding = [window is not None for window in windows]
    own = {w for w in windows if w is not None}
    writer.add_sliding_window(own.pop() + 1 if own else c.context_length)
    if sliding != [(i + 1) % every != 0 for i in range(c.depth)]:
        writer.add_sliding_window_pattern(sliding)


def add_rope(writer: gguf.GGUFWriter, c: ResolvedModel) -> None:
    """Write the RoPE base and RoPE scaling."""
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_rope_freq_base(c.rope_base)
    scaling = c.rope_scaling
    if scaling is None or scaling.name not in ("linear", "yarn"):
        return
    writer.add_rope_scaling_type(gguf.RopeScalingType(scaling.name))
    writer.add_rope_scaling_factor(scaling.factor)
    if scaling.name == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling.original_context)
        writer.add_rope_scaling_yarn_beta_fast(scaling.beta_fast)
        writer.add_rope_scaling_yarn_beta_slow(scaling.beta_slow)
        if scaling.attention_factor is not None:  # llama.cpp's multiplies the paper's factor
            usual = 1 + 0.1 * math.log(scaling.factor)
            writer.add_rope_scaling_attn_factors(scaling.attention_factor / usual)


def rope_divisors(c: ResolvedModel) -> np.ndarray | None:
    """Divisors of the frequencies under Llama 3 RoPE scaling, float32 [H / 2]; else None."""
    if c.rope_scaling is None or c.rope_scaling.name != "llama3":
        return None
    at = jnp.zeros((1, 1), jnp.int32)
    plain, _ = frequencies(c.head_dim, c.rope_base, None, at)
    stretched, _ = frequencies(c.head_dim, c.rope_base, c.rope_scaling, at)
    return np.asarray(plain / stretched, np.float32)
