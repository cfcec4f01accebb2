"""Adapted weights: a frozen matrix with a low-rank or scaling change, for fine-tuning."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxtrain.weights.contract import Weight, dequantize, matmul
from jaxtrain.weights.int4 import OffsetInt4Weight


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["w", "a", "b", "columns", "rows"],
    meta_fields=["scale"],
)
@dataclasses.dataclass(frozen=True)
class AdaptedWeight(Weight):
    """rows x (w + scale x a b) x columns, one matrix or a stack: w [.., K, N], a [.., K, r],
    b [.., r, N]. The factors rows [.., K] and columns [.., N] are float32; None: no change.
    """

    w: Any  # an array, or quantized
    a: Any = None
    b: Any = None
    columns: Any = None
    rows: Any = None
    scale: float = 1.0

    def matmul(self, x: Float[Array, "*B K"]) -> Float[Array, "*B N"]:
        """x times the changed matrix, which is never materialized.

        Forward and backward, a low-rank branch takes 6 r (K + N) FLOPs per token. With x (w + a b)
        the gradient of the matmul alone would take 2 K N, which is more for any rank below
        K N / 3 (K + N).
        """
        over = lambda gain, y: (jnp.expand_dims(gain, range(y.ndim - 1)) * y).astype(y.dtype)
        x = x if self.rows is None else over(self.rows, x)
        y = matmul(x, self.w)
        if self.a is not None:
            y = y + (self.scale * (x @ self.a)).astype(x.dtype) @ self.b
        return y if self.columns is None else over(self.columns, y)

    def dequantize(self) -> Float[Array, "K N"]:
        """The changed matrix; changes are added in float32."""
        w = dequantize(self.w)
        y = w.astype(jnp.float32)
        if self.a is not None:
            y = y + self.scale * (self.a.astype(jnp.float32) @ self.b.astype(jnp.float32))
        y = y if self.rows is None else self.rows[:, None] * y
        return (y if self.columns is None else y * self.columns[None]).astype(w.dtype)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["w", "a", "b"], meta_fields=["scale"]
)
@dataclasses.dataclass(frozen=True)
class GroupAdaptedWeight(Weight):
    """w + scale x a b, with the same change for all inputs of a group of w (QA-LoRA).

    w OffsetInt4Weight [.., K, N] in G groups, a [.., G, r], b [.., r, N].
    """

    w: OffsetInt4Weight
    a: Any
    b: Any
    scale: float = 1.0

    def matmul(self, x: Float[Array, "*B K"]) -> Float[Array, "*B N"]:
        """x times the changed matrix; the adapter reads the sum of each group's inputs."""
        groups = x.astype(jnp.float32).reshape(*x.shape[:-1], self.a.shape[-2], -1)
        change = self.scale * (groups.sum(-1).astype(x.dtype) @ self.a)
        return matmul(x, self.w) + change.astype(x.dtype) @ self.b

    def dequantize(self) -> Float[Array, "K N"]:
        return self.merged().dequantize()

    def merged(self) -> OffsetInt4Weight:
        """The changed matrix with the same codes and scales; the change is added to the offsets."""
        change = self.scale * (self.a.astype(jnp.float32) @ self.b.astype(jnp.float32))
        return dataclasses.replace(self.w, offsets=self.w.offsets + change)


@functools.partial(jax.jit, static_argnums=3)
def column_norms(
    w: Array | Weight, a: Float[Array, "L K r"], b: Float[Array, "L r N"], scale: float
) -> Float[Array, "L N"]:
    """Norms [L, N] of the columns of w + scale x a b in float32, one layer at a time."""

    def one(wab: Any) -> Array:
        w32 = dequantize(wab[0]).astype(jnp.float32)
        return jnp.linalg.norm(w32 + scale * (wab[1] @ wab[2]).astype(jnp.float32), axis=0)

    return jax.lax.map(one, (w, a, b))


@jax.jit
def merge_weights(stack: Array | Weight) -> Array:
    """Dequantize a stack of matrices [L, K, N] in any form, one layer at a time."""
    return jax.lax.map(dequantize, stack)
