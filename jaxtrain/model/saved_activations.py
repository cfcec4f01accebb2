"""Activation-compressed training: activations saved for the backward pass have 8, 4 or 2 bits.

Each group of 128 channels of a token has a minimum and a step size in bfloat16. Values are rounded
stochastically to whole steps, so that they are unbiased (ActNN, Chen et al. 2021, arXiv:2104.14129;
GACT, Liu et al. 2022), and packed, up to four per byte. The forward pass is exact.

`int8`, `int4`, `int2` save a layer's input, D (bits / 8 + 4 / 128) bytes per token instead of 2 D,
and recompute the layer: its gradients are those at a nearby point. `actnn8`, `actnn4`, `actnn2`
recompute nothing: they save all residuals of the layer's gradient, and compress states, hidden
layers and all other arrays [B, T, C] or [B T, C]. Queries, keys and values, [B, T, N, H], are not
compressed, since attention's gradient is not linear in them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxtyping import Array, ArrayLike, Float

from jaxtrain.weights.formats import random_fraction

GROUP = 128  # channels that share a scale; all channels if they are not a multiple of it
NARROW = 8  # arrays with fewer channels are not compressed
# A layer's constants, its compressed inputs, and its other inputs.
InputResiduals = tuple[list[Any], list[Any], list[Any]]


class Compression(NamedTuple):
    """bits: per value. recompute: save only a layer's input, and recompute the rest."""

    bits: int
    recompute: bool


COMPRESSIONS = {f"int{bits}": Compression(bits, True) for bits in (8, 4, 2)}
COMPRESSIONS |= {f"actnn{bits}": Compression(bits, False) for bits in (8, 4, 2)}


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "least", "step"],
    meta_fields=["bits", "channels", "dtype"],
)
@dataclasses.dataclass(frozen=True)
class Compressed:
    """codes uint8 [.., D bits / 8]; least and step bfloat16 [.., D / group]."""

    codes: Any
    least: Any
    step: Any
    bits: int
    channels: int
    dtype: Any


def compress(x: Float[Array, "*B D"], bits: int, key: Array | None) -> Compressed:
    """Quantize each group in 2^bits - 1 steps from its minimum to its maximum.

    key: for stochastic rounding; None: round to nearest."""
    D, values, most = x.shape[-1], 8 // bits, 2**bits - 1
    x32 = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, D if D % GROUP else GROUP)
    # The range is slightly wider than the values', since bfloat16 rounds minimum and step.
    least = jnp.min(x32, axis=-1)
    least = (least - jnp.abs(least) * 2.0**-8).astype(jnp.bfloat16)
    x32 = x32 - least.astype(jnp.float32)[..., None]
    step = (jnp.max(x32, axis=-1) / most * (1 + 2.0**-7)).astype(jnp.bfloat16)
    steps = x32 / jnp.where(step > 0, step, 1).astype(jnp.float32)[..., None]
    whole = jnp.round(steps) if key is None else jnp.floor(steps + random_fraction(key, x32.shape))
    codes = jnp.clip(whole, 0, most).astype(jnp.uint8).reshape(x.shape)
    codes = jnp.pad(codes, [(0, 0)] * (x.ndim - 1) + [(0, -D % values)])
    codes = codes.reshape(*x.shape[:-1], -1, values) << shifts(bits, x.ndim + 1)
    packed = jnp.sum(codes, axis=-1, dtype=jnp.uint8)
    return Compressed(packed, least, step, bits, D, x.dtype)


def decompress(c: Compressed) -> Array:
    """Dequantize."""
    codes = (c.codes[..., None] >> shifts(c.bits, c.codes.ndim + 1)) & jnp.uint8(2**c.bits - 1)
    codes = codes.reshape(*c.codes.shape[:-1], -1)[..., : c.channels]
    grouped = codes.astype(jnp.float32).reshape(*c.least.shape, -1)
    x32 = grouped * c.step.astype(jnp.float32)[..., None] + c.least.astype(jnp.float32)[..., None]
    return x32.reshape(codes.shape).astype(c.dtype)


def is_of_tokens(x: Array, rows: tuple[int, int]) -> bool:
    """Whether a 16-bit or 32-bit array has channels for each token; rows: (B, T)."""
    B, T = rows
    wide = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 1 and x.ndim > 1
    return wide and x.shape[-1] >= NARROW and x.shape[:-1] in ((B, T), (B * T,))


def draw_of_layer(key: Array, index: ArrayLike) -> Array:
    """A layer's PRNG key from the step's, different from the key for rounding its matrices."""
    return jax.random.fold_in(jax.random.fold_in(key, index), 0x5A7ED)


def shifts(bits: int, ndim: int) -> Array:
    """Bit offsets of the values in a byte, along the last of `ndim` dims."""
    return jnp.arange(0, 8, bits, dtype=jnp.uint8).reshape((1,) * (ndim - 1) + (-1,))


def compress_all(arrays: list[Any], chosen: list[bool], bits: int, key: Array | None) -> list[Any]:
    """Compress the chosen arrays, each with its own PRNG key."""
    own = lambda i: None if key is None else jax.random.fold_in(key, i)
    return [compress(x, bits, own(i)) if chosen[i] else x for i, x in enumerate(arrays)]


def decompress_all[Tree](tree: Tree) -> Tree:
    """Decompress all compressed leaves of a tree."""
    is_compressed = lambda leaf: isinstance(leaf, Compressed)
    one = lambda leaf: decompress(leaf) if is_compressed(leaf) else leaf
    return jax.tree.map(one, tree, is_leaf=is_compressed)


def save_compressed(
    run: Callable[..., Any],
    how: Compression,
    scanned: bool,
    key: Array | None,
    policy: Callable[..., bool],
) -> Callable[..., Any]:
    """`run(stream, source)` with compressed activations saved for its backward pass.

    Constants of `run` and `source` are saved uncompressed, and so are arrays of the stream without
    a channel dim (sums per sequence). key: for stochastic rounding; None: round to nearest.
    policy: of jax.checkpoint; if layers are scanned, values that it does not save are recomputed.
    """

    def saved(stream: Any, source: Any) -> Any:
        closed, shape = jax.make_jaxpr(run, return_shape=True)(stream, source)
        out_tree = jax.tree.structure(shape)
        given = jax.tree.leaves((stream, source))
        count = len(jax.tree.leaves(stream))
        rows = given[0].shape[:2]
        call = lambda consts, arrays: jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, consts))(*arrays)
        sliced = jax.checkpoint(call, policy=policy, prevent_cse=False) if scanned else call

        @jax.custom_vjp
        def layer(consts: list[Any], arrays: list[Any], key: Array | None) -> list[Array]:
            return call(consts, arrays)

        def keep_input(consts: list[Any], arrays: list[Any], key: Array | None) -> Any:
            wide = [x.ndim > 1 for x in arrays[:count]]
            kept = compress_all(arrays[:count], wide, how.bits, key)
            return call(consts, arrays), (consts, kept, arrays[count:])

        def compute_again(saved: InputResiduals, cotangents: list[Array]) -> Any:
            consts, kept, rest = saved
            if not scanned:  # recompute when this layer's backward pass runs, not all at the start
                kept, cotangents = jax.lax.optimization_barrier((kept, cotangents))
            again = [*decompress_all(kept), *rest]
            return *jax.vjp(call, consts, again)[1](cotangents), None

        def keep_residuals(consts: list[Any], arrays: list[Any], key: Array | None) -> Any:
            out, pullback = jax.vjp(sliced, consts, arrays)
            leaves, tree = jax.tree.flatten(pullback)
            whole = {id(x) for x in (*consts, *arrays[count:])}
            chosen = [id(x) not in whole and is_of_tokens(x, rows) for x in leaves]
            return out, jax.tree.unflatten(tree, compress_all(leaves, chosen, how.bits, key))

        def from_residuals(pullback: Callable[..., Any], cotangents: list[Array]) -> Any:
            if not scanned:
                pullback, cotangents = jax.lax.optimization_barrier((pullback, cotangents))
            return *decompress_all(pullback)(cotangents), None

        if how.recompute:
            layer.defvjp(keep_input, compute_again)
        else:
            layer.defvjp(keep_residuals, from_residuals)
        return jax.tree.unflatten(out_tree, layer(closed.consts, given, key))

    return saved
