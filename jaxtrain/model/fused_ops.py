"""Fused passes over activations between the matmuls: choice and calls of their kernels."""

from typing import Any, NamedTuple

import jax
from jaxtrain_kernels import Fp8Input
from jaxtrain_kernels import rows as kernels
from jaxtrain_kernels.attention.call import Call
from jaxtrain_kernels.dispatch import target
from jaxtrain_kernels.matmul import few_rows
from jaxtrain_kernels.rope_attention import hopper as mosaic_attention
from jaxtrain_kernels.rows.fp8 import norm_quantized
from jaxtyping import Array, Float

from jaxtrain import parallel
from jaxtrain.model.config import ResolvedModel
from jaxtrain.model.sections import FusedOps
from jaxtrain.parallel import constrain, splits_heads
from jaxtrain.parallel.axes import current_mesh
from jaxtrain.settings import UserError
from jaxtrain.weights.contract import PendingProduct, computed

PLAIN = FusedOps.model_validate("xla")
# Mesh axes that leave attention's matrices whole or split them by heads.
HEAD_AXES = ("data", "expert", "tensor")


def fastest(fused: FusedOps, c: ResolvedModel, x_BTD: Array | jax.ShapeDtypeStruct) -> FusedOps:
    """Resolve the unset ops of `fused` for model `c`: XLA where no kernel supports it."""

    def has_kernel(op: str, *shape: int) -> bool:
        return kernels.has_hopper_kernel(op, jax.ShapeDtypeStruct(shape, x_BTD.dtype))

    changes = {}
    if fused.norm is None and not (c.fits_norm_kernel and has_kernel("mixed_norm", *x_BTD.shape)):
        changes["norm"] = "xla"
    if fused.rope is None and not (
        c.fits_rope_kernel and has_kernel("rope_norm", *x_BTD.shape[:2], c.heads, c.qk_dim)
    ):
        changes["rope"] = "xla"
    if fused.qkv is None:
        changes["qkv"] = "mosaic" if gains_by_joining(fused, c, x_BTD) else "xla"
    return fused.model_copy(update=changes)


def gains_by_joining(
    fused: FusedOps, c: ResolvedModel, x_BTD: Array | jax.ShapeDtypeStruct
) -> bool:
    """Whether one joint QKV array is faster, by our measurements.

    That is with bf16 matmuls and no recomputation, on one device, or with attention weights that
    are replicated or sharded over `tensor` by heads.
    """
    chosen = c.attention or fused.rope or c.fp8 or c.weight_form or c.deterministic_attention
    remat = {c.remat, c.remat_short or c.remat} != {"none"}
    if chosen or remat or not c.fits_joined_heads:
        return False
    mesh, shards = current_mesh(), 1
    if mesh is not None:
        shards = mesh.shape["tensor"]
        others = any(n > 1 for axis, n in mesh.shape.items() if axis not in HEAD_AXES)
        if others or (shards > 1 and not splits_heads(x_BTD, c.heads, c.kv_heads)):
            return False
    B, T, _ = x_BTD.shape
    heads = (c.heads + 2 * c.kv_heads) // shards
    qkv_BTCH = jax.ShapeDtypeStruct((B, T, heads, c.head_dim), x_BTD.dtype)
    any_scale = Call(c.causal, None, None, None, c.attention_softcap, 1.0)
    return mosaic_attention.supports(target(), qkv_BTCH, any_scale) is None


def of_decoding(c: ResolvedModel, x_BTD: Array | jax.ShapeDtypeStruct) -> FusedOps:
    """Backends for a step with a KV cache: Triton where it supports the op, else XLA."""
    if not few_rows.are_fused():
        return PLAIN
    B, T, _ = x_BTD.shape
    heads = jax.ShapeDtypeStruct((B, T, c.heads, c.qk_dim), x_BTD.dtype)
    why = lambda op, x: kernels.BACKENDS["triton"].supports(target(), op, x)
    changes = {}
    if c.fits_norm_kernel and why("mixed_norm", x_BTD) is None:
        changes["norm"] = "triton"
    if c.fits_rope_kernel and why("rope_norm", heads) is None:
        changes["rope"] = "triton"
    return PLAIN.model_copy(update=changes)


class Stream(NamedTuple):
    """The residual stream between layers.

    branch: the last layer's output still to be added; the next layer's first pass adds it. x0: the
    embedding, passed from layer to layer, so that the layers' own passes sum its gradient.
    balance_B: auxiliary losses of each sequence, summed over the layers so far.
    """

    x_BTD: Array | PendingProduct
    branch_BTD: Array | None = None
    x0_BTD: Array | None = None
    balance_B: Array | None = None

    def total(self) -> Array:
        x_BTD = computed(self.x_BTD)
        return x_BTD if self.branch_BTD is None else x_BTD + self.branch_BTD


class Normed(NamedTuple):
    """The stream x, its RMS norm h, and the embedding x0; cast: h in float8, if requested."""

    x_BTD: Array | PendingProduct
    h_BTD: Array | None
    x0_BTD: Array | None
    cast: Fp8Input | None = None


def prenorm(
    stream: Stream,
    x0_BTD: Array,
    scales: tuple[Array, Array] | None,
    eps: float,
    norm: str | None,
    amax: Array | None = None,
) -> Normed:
    """A layer's first pass: scale the stream x, mix in x0, norm.

    scales: of the stream and of x0, if the model has them. amax: with which the norm is cast as
    well, None: not at all. With XLA's fusion the norm is None.
    """
    x_BTD, branch_BTD, own_BTD, _ = stream
    x0_BTD = x0_BTD if own_BTD is None else own_BTD
    if norm == "xla":
        check_cast(norm, amax)
        if scales is not None:
            x_BTD = (scales[0] * computed(x_BTD) + scales[1] * x0_BTD).astype(x0_BTD.dtype)
        return Normed(x_BTD, None, None)
    x_BTD = computed(x_BTD)
    if scales is None:
        if branch_BTD is None:
            return Normed(x_BTD, None, x0_BTD)
        x_BTD, h_BTD, cast = add_norm(x_BTD, branch_BTD, eps, norm, amax)
        return Normed(x_BTD, h_BTD, x0_BTD, cast)
    if amax is not None:
        arrays = x_BTD, branch_BTD, x0_BTD, scales, amax
        return Normed(*norm_quantized(*arrays, eps=eps, implementation=norm))
    run = lambda *arrays: kernels.mixed_norm(*arrays, eps=eps, implementation=norm)
    return Normed(*parallel.shard_map_tokens(run, x_BTD, branch_BTD, x0_BTD, *scales))


def add_norm(
    x_BTD: Float[Array, "B T D"],
    y_BTD: Float[Array, "B T D"],
    eps: float,
    norm: str | None,
    amax: Array | None = None,
) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"], Fp8Input | None]:
    """The stream with a branch added, its RMS norm, and the norm's cast. amax: as of `prenorm`."""
    if amax is not None:
        arrays = x_BTD, y_BTD, None, None, amax
        s_BTD, h_BTD, _, cast = norm_quantized(*arrays, eps=eps, implementation=norm)
        return s_BTD, h_BTD, cast
    run = lambda *arrays: kernels.residual_norm(*arrays, eps=eps, implementation=norm)
    return *parallel.shard_map_tokens(run, x_BTD, y_BTD), None


def check_cast(norm: str | None, amax: Array | None) -> None:
    """Raise UserError if a norm should be cast and XLA fuses the norms."""
    if norm == "xla" and amax is not None:
        raise UserError(
            "model.fp8_norms needs the norm kernel, and model.kernels.norm is xla here (RMSNorm "
            "without gain has a kernel on a Hopper GPU): leave it out"
        )


def residual_out(
    x_BTD: Array | PendingProduct,
    y_BTD: Array | None,
    x0_BTD: Array | None,
    balance_B: Array | None = None,
) -> Stream:
    """The stream after a layer's last branch, None if it is in the stream; with x0 the next layer
    adds the branch."""
    if y_BTD is None:
        return Stream(x_BTD, balance_B=balance_B)
    x_BTD = computed(x_BTD)
    if x0_BTD is None:
        return Stream(constrain(x_BTD + y_BTD, "batch", "sequence", None), balance_B=balance_B)
    return Stream(x_BTD, constrain(y_BTD, "batch", "sequence", None), x0_BTD, balance_B)


def rope_norm(
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    rope: Any,
    eps: float,
    by: str | None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"]]:
    """Rotate and norm queries and keys; rope: a `Rotary`."""
    cos_BTH, sin_BTH = (jax.lax.squeeze(x, [2]) for x in rope)
    run = lambda *arrays: kernels.rope_norm(*arrays, eps=eps, implementation=by)
    return parallel.shard_map_tokens(
        run, q_BTNH, k_BTKH, cos_BTH, sin_BTH, tokens="tokens", columns=("heads", "kv_heads")
    )


def relu2(x_BTF: Float[Array, "B T F"], by: str) -> Float[Array, "B T F"]:
    """max(x, 0)^2."""
    run = lambda x: kernels.relu2(x, implementation=by)
    return parallel.shard_map_tokens(run, x_BTF, tokens="tokens", columns=("hidden",))
