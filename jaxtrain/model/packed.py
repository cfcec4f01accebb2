"""A decode step of one sequence with all layers in one kernel (`jaxtrain_kernels.decode_layers`).

The kernel has its own copy of the layers' matrices, packed once (`pack_layers`), and the KV pages
of all layers in two arrays (`StackedPages`). `why_not_packed` explains why a model cannot use it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtrain_kernels import decode_layers as kernels
from jaxtrain_kernels.decode_layers import LayersShape, LayersWeights
from jaxtyping import Array, Bool, Float, Int

from jaxtrain.model.config import ResolvedModel
from jaxtrain.model.kv_cache import PagedCache, StackedPages
from jaxtrain.model.layers import lookup, rotary
from jaxtrain.model.modes import Output, Paged
from jaxtrain.model.plan import make_plan
from jaxtrain.model.stack import is_apart
from jaxtrain.weights.contract import is_weight
from jaxtrain.weights.params import Params

if TYPE_CHECKING:
    from jaxtrain.model.transformer import Transformer

# Field values that the kernel requires; it does not implement any other.
NEEDED: dict[str, Any] = {
    "qk_head_dim": None, "ffn": "relu2", "moe": None, "position_embedding": "rotary",
    "rope_base_short": None, "qk_norm": True, "qk_norm_gain": False, "qkv_bias": False,
    "out_bias": False, "ffn_bias": False, "norm": "rms", "norm_gain": False, "post_norm": False,
    "attention_softcap": None, "residual_scales": True, "causal": True, "adapter": None,
    "prompt": None, "prefix": None, "block_norm": True, "weight_form": None, "share_layers": None,
    "mla": None, "share_kv": None,
}  # fmt: skip
# Initialization schemes whose branches have a learned scale.
SCALED_INITS = {"fixup", "tfixup", "rezero", "skipinit"}
# Fields with any value: sizes and constants that are the kernel's arguments, fields of what runs
# before or after the layers, and fields that only affect training.
ANY = {
    "depth", "width", "head_dim", "heads", "kv_heads", "hidden", "vocab_multiple", "rope_base",
    "rope_scaling", "qk_scale", "attention_scale", "window_pattern", "last_layer_full",
    "short_window", "context_length", "norm_eps", "embed_scale", "embed_norm", "tied_head",
    "logit_softcap", "value_embeddings", "bigram_rows", "smear", "backout", "document_mask",
    "base_width", "embedding_dtype", "attention", "deterministic_attention", "kernels",
    "scan_layers", "fp8", "fp8_hidden", "fp8_epilogue", "fp8_norms", "fp8_gradients",
    "fp8_fast_accum", "fp8_history", "mtp",
    "remat", "remat_short", "stochastic_depth", "frozen_layers", "token_dropping", "ffn_tiles",
}  # fmt: skip


def layers_shape(c: ResolvedModel) -> LayersShape:
    """The layers' sizes and constants for the kernel."""
    whole = c.context_length - 1
    windows = tuple(spec.window or whole for spec in make_plan(c))
    scale = c.attention_scale or c.qk_scale**2 / c.head_dim**0.5
    sizes = c.width, c.hidden, c.heads, c.kv_heads, c.head_dim
    return LayersShape(*sizes, windows, c.depth // 2, c.norm_eps, scale)


def why_not_packed(
    c: ResolvedModel, params: Params, pages: tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]
) -> str | None:
    """Reason why the model's layers cannot run in one kernel on this device; None if they can.

    pages: keys and values of all layers, [L, pages, page size, K, H]."""
    for name in type(c).model_fields:
        if name in NEEDED and getattr(c, name) != NEEDED[name]:
            return f"needs model.{name}={NEEDED[name]}, got {getattr(c, name)}"
        if name == "init" and c.init in SCALED_INITS:
            return f"has no learned scales of branches, which model.init={c.init} has"
        if name not in NEEDED and name not in ANY and name != "init":
            return f"does not know model.{name}"
    leaves = jax.tree.leaves(params, is_leaf=is_weight)
    if any(is_weight(x) or (x.ndim > 1 and x.dtype != jnp.bfloat16) for x in leaves):
        return "needs plain matrices in bfloat16, without adapters"
    return kernel_of(c, params, pages)[1]


def kernel_of(
    c: ResolvedModel, params: Params, pages: tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]
) -> tuple[str, str | None]:
    """Name of the kernel for the model's layers, and None; or the reason why there is none."""
    x0_D = jax.ShapeDtypeStruct((c.width,), params["embed"].dtype)
    return kernels.choose_kernel(layers_shape(c), x0_D, pages)


def unstacked(leaf: Any) -> Sequence[Array]:
    """The layers of a stack, as a sequence of arrays."""
    return leaf.layers if is_apart(leaf) else list(leaf)


@jax.jit(static_argnames=("kernel", "graphdef"))
def pack_layers(kernel: str, graphdef: nnx.GraphDef, params: Params) -> LayersWeights:
    """Copy the layers' matrices into the layout of a kernel (`kernel_of`); `params` is not
    changed."""
    model = nnx.merge(graphdef, params)
    c, block = model.config, model.blocks
    shape = layers_shape(c)
    layers = lambda param: unstacked(param.get_value())
    gates = iter(layers(model.value_embed.gate) if model.value_embed else [])
    qkv, heads = [], (layers(getattr(block.attention, name)) for name in "qkv")
    for spec, *matrices in zip(make_plan(c), *heads, strict=True):
        gate_DK = jnp.zeros((c.width, shape.gate_rows), matrices[0].dtype)
        if spec.value_embed:
            gate_cK = next(gates)
            gate_DK = gate_DK.at[: len(gate_cK), : c.kv_heads].set(gate_cK.astype(gate_DK.dtype))
        qkv.append(jnp.concatenate([*matrices, gate_DK], axis=1))
    scales = [jnp.stack(layers(x)) for x in (model.residual_scale, model.x0_scale)]
    others = map(layers, (block.attention.out, block.ffn.up, block.ffn.down))
    scales_L2 = jnp.stack(scales, axis=1).astype(jnp.float32)
    return kernels.pack_matrices(kernel, shape, (qkv, *others), scales_L2)


def run_stacked(
    model: "Transformer", tokens_BT: Int[Array, "B T"], mode: Paged
) -> tuple[Output, Bool[Array, ""] | None]:
    """Run the model with stacked pages: in one kernel for one sequence with one new token, else
    layer by layer, for which the pages are unstacked. Also returns whether the kernel timed out,
    None if it did not run."""
    cache, packed = mode.cache, mode.packed
    assert isinstance(cache.kv, StackedPages)
    if packed is not None and tokens_BT.shape == (1, 1):
        x_11D, _ = model.embed_tokens(tokens_BT, cache)
        *states, kv, timed_out = run_packed(model, packed, x_11D, tokens_BT, cache)
        cache = cache._replace(kv=kv)
        return Output(model.final_norm(*states), cache=cache), timed_out
    apart = cache._replace(kv=cache.kv.apart())
    out = model(tokens_BT, mode=Paged(apart, first_chunk=mode.first_chunk))
    assert isinstance(out.cache, PagedCache) and not isinstance(out.cache.kv, StackedPages)
    return out._replace(cache=cache._replace(kv=StackedPages.of(out.cache.kv))), None


def run_packed(
    model: "Transformer", packed: LayersWeights, x_11D: Float[Array, "1 1 D"],
    tokens_11: Int[Array, "1 1"], cache: PagedCache,
) -> tuple[Array, Array, StackedPages, Bool[Array, ""]]:  # fmt: skip
    """The stream [1, 1, D] after the last and after the middle layer, the pages with the new
    token, and whether the kernel timed out."""
    c = model.config
    assert isinstance(cache.kv, StackedPages)
    place_11 = cache.starts_B[:, None]
    cos_H, sin_H = (x[0, 0, 0] for x in rotary(place_11, c.rope_dim, c.rope_base, c.rope_scaling))
    half, dtype = c.head_dim // 2, x_11D.dtype
    tables = iter(unstacked(model.value_embed.table.get_value()) if model.value_embed else [])
    nothing_C = jnp.zeros(c.kv_heads * c.head_dim, dtype)
    values_LC = jnp.stack([
        lookup(next(tables), tokens_11)[0, 0].astype(dtype) if spec.value_embed else nothing_C
        for spec in make_plan(c)
    ])  # fmt: skip
    x_D, middle_D, pages, timed_out = kernels.decode_layers(
        layers_shape(c), packed, x_11D[0, 0], cos_H[half:], sin_H[half:], values_LC,
        (cache.kv.k_LPpKH, cache.kv.v_LPpKH), cache.table_BW[0], cache.starts_B[0],
        cache.counts_B[0],
    )  # fmt: skip
    return x_D[None, None], middle_D[None, None], StackedPages(*pages), timed_out
