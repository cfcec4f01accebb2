"""RoPE and RMS norm of queries and keys in place; the backward takes dq in float32, as accumulated.

The arrays of queries and keys are overwritten: the backward needs only the results and each head's
factor r. With y = R x r, r = 1 / rms(x), R the rotation and g = dy:

    dx = r R^T (g - y mean(y g))

since a rotation preserves inner products. Queries, keys and values may be in one array, so that
their projections are one matmul, and the gradient of its input is one matmul too.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxtrain_kernels import hopper
from jaxtrain_kernels.rows.hopper.launch import broadcast_lanes, lanes_layout, launch, load
from jaxtrain_kernels.rows.hopper.rope import tokens_of_block


class TurnOptions(NamedTuple):
    """heads: number of query and of key heads; in one array the keys follow the queries."""

    heads: tuple[int, int]
    eps: float
    interpret: hopper.Interpret

    def places(self, arrays: int) -> list[tuple[int, int]]:
        """(index of the array, index of the head in it) of each head, queries first."""
        N, K = self.heads
        keys = [(0, N + n) if arrays == 1 else (1, n) for n in range(K)]
        return [*((0, n) for n in range(N)), *keys]


@hopper.jit_kernel("options")
def turn(options: TurnOptions, arrays, cos_BTH, sin_BTH):
    """Return (rotated arrays, r_NR of all heads). arrays: (q, k), or one that begins with both."""
    B, T, _, H = arrays[0].shape
    half, tokens = H // 2, tokens_of_block(H)
    layout, halves = lanes_layout(half), (pl.ds(0, half), pl.ds(half, half))
    places = options.places(len(arrays))

    def rope_turn(block, cos_ref, sin_ref, *refs):
        refs, r_ref = refs[:-1], refs[-1]
        here = pl.ds(block * tokens, tokens)
        cos, sin = angles(block, cos_ref, sin_ref, len(cos_BTH) == 1, T, layout)
        read = lambda i, n: [load(refs[i].at[here, n, h], layout) for h in halves]
        ahead = read(*places[0])
        for number, ((i, n), after) in enumerate(zip(places, [*places[1:], None])):
            # Start to load the next head before this one's results are written.
            (first, second), ahead = ahead, read(*after) if after else []
            square_R = jnp.sum(first * first + second * second, 1) * (1 / H)
            r_R = lax.rsqrt(square_R + options.eps)
            r = broadcast_lanes(r_R, first, layout)
            turned = (first * cos - second * sin) * r, (second * cos + first * sin) * r
            r_ref[number, here] = r_R
            for h, value in zip(halves, turned):
                refs[i][here, n, h] = value.astype(arrays[i].dtype)

    r_type = jax.ShapeDtypeStruct((len(places), B * T), jnp.float32)
    refs = [jax.new_ref(x.reshape(B * T, x.shape[2], H)) for x in arrays]
    given = [*flat_angles(cos_BTH, sin_BTH), *refs]
    (r_NR,) = launch(rope_turn, [r_type], B * T // tokens, *given, interpret=options.interpret)
    turned = tuple(jax.freeze(ref).reshape(x.shape) for ref, x in zip(refs, arrays))
    return turned, r_NR


@hopper.jit_kernel("options", "scale")
def turn_back(options: TurnOptions, scale: float, arrays, r_NR, dq_BTNH, grads, cos_BTH, sin_BTH):
    """Write the gradients of `turn`'s arrays to grads: (dk,), or one array that contains dk.

    arrays: results of `turn`. dq: gradient of the rotated queries, divided by the scale, in
    float32. Returns (dq, dk), or the one array, whose other heads are unchanged.
    """
    B, T, _, H = arrays[0].shape
    half, tokens = H // 2, tokens_of_block(H)
    layout, halves = lanes_layout(half), (pl.ds(0, half), pl.ds(half, half))
    places, (N, _) = options.places(len(arrays)), options.heads

    def rope_turn_back(block, cos_ref, sin_ref, r_ref, dq_ref, *refs):
        inputs, outputs = refs[: len(arrays)], refs[len(arrays) :]
        # There are no results: the outputs are references among the inputs.
        here = pl.ds(block * tokens, tokens)
        cos, sin = angles(block, cos_ref, sin_ref, len(cos_BTH) == 1, T, layout)

        def read(number):
            i, n = places[number]
            source = dq_ref if number < N else outputs[i]
            at = number if number < N else n
            y = [load(inputs[i].at[here, n, h], layout) for h in halves]
            r_R = hopper.untyped.load(
                r_ref.at[number, here], layout=layout.reduce(1), optimized=False
            )
            return y, [load(source.at[here, at, h], layout) for h in halves], r_R

        ahead = read(0)
        for number, (i, n) in enumerate(places):
            y, g, r_R = ahead
            if number + 1 < len(places):
                # Start to load the next head before this one's results are written.
                ahead = read(number + 1)
            if number < N:
                g = [x * scale for x in g]
            along_R = jnp.sum(y[0] * g[0] + y[1] * g[1], 1) * (1 / H)
            along, r = (broadcast_lanes(x, y[0], layout) for x in (along_R, r_R))
            first, second = ((dy - x * along) * r for x, dy in zip(y, g))
            back = first * cos + second * sin, second * cos - first * sin
            for h, value in zip(halves, back):
                outputs[i][here, n, h] = value.astype(arrays[i].dtype)

    flat = lambda x: x.reshape(B * T, x.shape[2], H)
    into = [jax.new_ref(flat(x)) for x in grads]
    if len(arrays) == 2:
        into.insert(0, jax.new_ref(lax.empty(flat(arrays[0]).shape, arrays[0].dtype)))
    given = [*flat_angles(cos_BTH, sin_BTH), r_NR, flat(dq_BTNH), *map(flat, arrays), *into]
    launch(rope_turn_back, [], B * T // tokens, *given, interpret=options.interpret)
    return tuple(jax.freeze(ref).reshape(x.shape) for ref, x in zip(into, arrays))


def flat_angles(cos_BTH: jax.Array, sin_BTH: jax.Array) -> list[jax.Array]:
    return [x.astype(jnp.float32).reshape(-1, x.shape[-1]) for x in (cos_BTH, sin_BTH)]


def angles(
    block: jax.Array, cos_ref: Any, sin_ref: Any, periodic: bool, T: int, layout: Any
) -> tuple[jax.Array, jax.Array]:
    """(cos, sin) of a block's tokens; periodic: all batch rows have the same positions."""
    half = cos_ref.shape[-1] // 2
    tokens = tokens_of_block(2 * half)
    at = pl.ds((lax.rem(block, T // tokens) if periodic else block) * tokens, tokens)
    cos, sin = (load(ref.at[at, pl.ds(half, half)], layout) for ref in (cos_ref, sin_ref))
    return cos, sin
