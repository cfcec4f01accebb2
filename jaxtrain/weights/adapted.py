"""A frozen matrix with a change beside it: what fine-tuning puts in the matrix's place."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxtrain.weights.packed import Packed, product, unpacked


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["w", "a", "b", "columns", "rows"],
    meta_fields=["scale"],
)
@dataclasses.dataclass(frozen=True)
class Adapted:
    """rows x (w + scale x a b) x columns, one matrix or a stack: w [.., K, N], a [.., K, r],
    b [.., r, N]. The factors rows [.., K] and columns [.., N] are float32; None is no change.
    """

    w: Any  # an array, or packed
    a: Any = None
    b: Any = None
    columns: Any = None
    rows: Any = None
    scale: float = 1.0


def adapted_dense(x: Float[Array, "*B K"], m: Adapted) -> Float[Array, "*B N"]:
    """x times the changed matrix, which is never made.

    Forward and backward, a low-rank branch takes 6 r (K + N) FLOPs a token; with x (w + a b) the
    gradient of the product alone would take 2 K N, more for any rank below K N / 3 (K + N).
    """
    over = lambda gain, y: (jnp.expand_dims(gain, range(y.ndim - 1)) * y).astype(y.dtype)
    x = x if m.rows is None else over(m.rows, x)
    y = product(x, m.w)
    if m.a is not None:
        y = y + (m.scale * (x @ m.a)).astype(x.dtype) @ m.b
    return y if m.columns is None else over(m.columns, y)


@functools.partial(jax.jit, static_argnums=3)
def column_norms(
    w: Any, a: Float[Array, "L K r"], b: Float[Array, "L r N"], scale: float
) -> Float[Array, "L N"]:
    """Norms [L, N] of the columns of w + scale x a b in float32; a layer's matrix at a time."""

    def one(wab: Any) -> Array:
        w32 = unpacked(wab[0]).astype(jnp.float32)
        return jnp.linalg.norm(w32 + scale * (wab[1] @ wab[2]).astype(jnp.float32), axis=0)

    return jax.lax.map(one, (w, a, b))


@jax.jit
def whole(m: Any) -> Array:
    """A stack of packed or adapted matrices [L, K, N] as an array; changes are added in float32."""

    def one(m: Any) -> Array:
        if not isinstance(m, Adapted):
            return unpacked(m)
        w = unpacked(m.w)
        y = w.astype(jnp.float32)
        if m.a is not None:
            y = y + m.scale * (m.a.astype(jnp.float32) @ m.b.astype(jnp.float32))
        y = y if m.rows is None else m.rows[:, None] * y
        return (y if m.columns is None else y * m.columns[None]).astype(w.dtype)

    return jax.lax.map(one, m)


def is_special(leaf: Any) -> bool:
    """Whether a leaf of the parameters is no array."""
    return isinstance(leaf, (Adapted, Packed))
