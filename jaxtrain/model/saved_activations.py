"""Saved activations in 8 bits: what a recomputed layer keeps of its input for the backward pass.

The forward pass is exact. The backward pass computes the layer again from the input rounded to
int8, one scale for each group of channels of a token (ActNN, Chen et al. 2021, arXiv:2104.14129;
GACT, Liu et al. 2022), so its gradients are those of a point nearby. A layer keeps D + 4 D / 128
bytes a token in the place of 2 D.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.typing import DTypeLike
from jaxtyping import Array, Float

GROUP = 128  # channels that share a scale, or all where they are not a multiple


class Rounded(NamedTuple):
    """codes int8 [.., D], scales float32 [.., D / group]: a group's largest magnitude is 127."""

    codes: Array
    scales: Array


def compress(x: Float[Array, "*B D"]) -> Rounded:
    """The nearest of 255 values of each group."""
    D = x.shape[-1]
    group = D if D % GROUP else GROUP
    x32 = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, group)
    scales = jnp.max(jnp.abs(x32), axis=-1) / 127
    codes = jnp.round(x32 / jnp.where(scales > 0, scales, 1.0)[..., None])
    return Rounded(codes.reshape(x.shape).astype(jnp.int8), scales)


def decompress(rounded: Rounded, dtype: DTypeLike) -> Array:
    """The values that were rounded to."""
    codes, scales = rounded
    x32 = codes.astype(jnp.float32).reshape(*scales.shape, -1) * scales[..., None]
    return x32.reshape(codes.shape).astype(dtype)


def save_int8(run: Callable[..., Any], scanned: bool) -> Callable[..., Any]:
    """`run(stream, source)`, recomputed in the backward pass from `stream` in 8 bits.

    Arrays of the stream without a dim of channels (sums of each row) are kept as they are, and so
    is what `run` closes over.
    """

    def saved(stream: Any, source: Any) -> Any:
        closed, shape = jax.make_jaxpr(run, return_shape=True)(stream, source)
        out_tree = jax.tree.structure(shape)
        given = jax.tree.leaves((stream, source))
        count = len(jax.tree.leaves(stream))
        dtypes = [x.dtype for x in given[:count]]
        call = lambda consts, arrays: jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, consts))(*arrays)

        @jax.custom_vjp
        def layer(consts: list[Any], arrays: list[Any]) -> list[Array]:
            return call(consts, arrays)

        def forward(consts: list[Any], arrays: list[Any]) -> Any:
            kept = [compress(x) if x.ndim > 1 else x for x in arrays[:count]]
            return call(consts, arrays), (consts, kept, arrays[count:])

        def backward(saved: Any, cotangents: list[Array]) -> Any:
            consts, kept, rest = saved
            if not scanned:  # again when it is its turn, not all at the start
                kept, cotangents = jax.lax.optimization_barrier((kept, cotangents))
            again = [
                decompress(x, dtype) if isinstance(x, Rounded) else x
                for x, dtype in zip(kept, dtypes, strict=True)
            ]
            return jax.vjp(call, consts, [*again, *rest])[1](cotangents)

        layer.defvjp(forward, backward)
        return jax.tree.unflatten(out_tree, layer(closed.consts, given))

    return saved
