"""`rope_in_place.turn_back` that writes the whole gradient in float8, in both layouts.

A block has 64 tokens of all heads, so that a channel of the transpose is written in 64 bytes. Each
of two warpgroups turns back 2 x 16 tokens of a head, casts them, and writes their rows directly.
The transpose goes through shared memory: the hardware transposes 16-bit elements (ldmatrix) but not
bytes, so an element has two bytes, of tokens 32 apart, as in `rows.fp8.hopper`.

A warpgroup starts to load its next tokens before it casts and writes the last ones, also across
heads. The angles are in shared memory, so that a thread has registers for both (at most 128).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtrain_kernels import hopper
from jaxtrain_kernels.rows.hopper.launch import broadcast_lanes, lanes_layout
from jaxtrain_kernels.rows.hopper.rope_in_place import TurnOptions, angles, flat_angles

HEAD_DIM = 128
HALF = HEAD_DIM // 2  # channels; RoPE turns channel i with i + HALF
TOKENS = 64  # per block
PAIRS = TOKENS // 2  # tokens n and n + PAIRS share 16-bit elements
WARPGROUPS = 2  # per block
MINE = PAIRS // WARPGROUPS  # tokens of each half that a warpgroup turns back
PAD = 8  # elements between rows in shared memory, so that ldmatrix has no bank conflicts
E5M2 = jnp.float8_e5m2
Pair = tuple[jax.Array, jax.Array]


class Turned(NamedTuple):
    """Of a rotated head: its rotated halves y, their gradient g, and the factor r of each token."""

    y: Pair
    g: Pair
    r_R: jax.Array


class HeadGroup(NamedTuple):
    """Heads of one kind. read(head, n): what the gradient of the n-th 16 tokens is computed from;
    values(n, it): the gradient's halves."""

    start: int
    count: int
    read: Callable[..., Any]
    values: Callable[..., list[jax.Array]]


def unsupported_reason(B: int, T: int, H: int) -> str | None:
    """Why arrays of this shape cannot be served; None = they can."""
    if H != HEAD_DIM:
        return f"needs a head dim of {HEAD_DIM}, got {H}"
    return f"needs a length in multiples of {TOKENS}, got {T}" if T % TOKENS else None


@hopper.jit_kernel("options", "scale")
def turn_back_cast(
    options: TurnOptions, scale, qkv_BTCH, r_NR, dq_BTNH, d_BTCH, cos_BTH, sin_BTH, multiplier
):
    """Return (q_MN, q_NM, maxima) of the gradient of `turn`'s one array times the multiplier.

    As `turn_back` rounds it to 16 bits first. qkv: result of `turn`. d: has the gradients of the
    rotated keys and of the values. dq: gradient of the rotated queries, divided by the scale, in
    float32. M = B T, N = C H. The maxima are of the gradient's magnitude.
    """
    B, T, C, H = qkv_BTCH.shape
    N, K = options.heads
    layout, halves = lanes_layout(HALF), (pl.ds(0, HALF), pl.ds(HALF, HALF))
    largest = float(jnp.finfo(E5M2).max)
    dtype = qkv_BTCH.dtype
    wide = lambda pair: [x.astype(jnp.float32) for x in pair]

    def load(ref: hopper.Ref, layout: hopper.RegisterLayout = layout) -> jax.Array:
        return hopper.untyped.load(ref, layout=layout, optimized=False)

    def rope_turn_back_cast(
        cos_ref, sin_ref, r_ref, dq_ref, y_ref, d_ref, multiplier, q_ref, qt_ref, most_ref,
        *, packed, tiles, turns,
    ):  # fmt: skip
        block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        first_row, factor = block * TOKENS, multiplier[0]
        parts = [(block * 2 + n) * WARPGROUPS + warpgroup for n in (0, 1)]
        rows = [pl.ds(part * MINE, MINE) for part in parts]
        shared = len(cos_BTH) == 1  # by all batch rows
        for n, part in enumerate(parts):
            for i, x in enumerate(angles(part, cos_ref, sin_ref, shared, T, layout)):
                turns.at[warpgroup, n, i][...] = x

        def read(ref: hopper.Ref, head, n: int) -> Pair:
            """A head's halves, as they are stored, of the n-th 16 tokens."""
            first, second = (load(ref.at[rows[n], head, h]) for h in halves)
            return first, second

        def read_turned(source: hopper.Ref, head, n: int) -> Turned:
            r_R = load(r_ref.at[head, rows[n]], layout.reduce(1))
            return Turned(read(y_ref, head, n), read(source, head, n), r_R)

        def turned_back(divided_by: float | None, n: int, given: Turned) -> list[jax.Array]:
            y, g, r_R = wide(given.y), wide(given.g), given.r_R
            if divided_by is not None:
                g = [x * divided_by for x in g]
            along_R = jnp.sum(y[0] * g[0] + y[1] * g[1], 1) * (1 / H)
            along, r = (broadcast_lanes(x, y[0], layout) for x in (along_R, r_R))
            first, second = ((dy - x * along) * r for x, dy in zip(y, g))
            cos, sin = (load(turns.at[warpgroup, n, i]) for i in (0, 1))
            return [first * cos + second * sin, second * cos - first * sin]

        def cast(head, n: int, values: list[jax.Array], most, low):
            """Write the rows of the n-th 16 tokens; with the second, their pairs with low."""
            at = packed.at[lax.rem(head, 2), pl.ds(warpgroup * MINE, MINE)]
            cast_bytes = []
            for h, value in enumerate(values):
                value = value.astype(dtype).astype(jnp.float32)
                most = jnp.maximum(most, jnp.abs(value))
                scaled = value * factor
                if options.interpret:  # on the device the cast saturates
                    scaled = jnp.minimum(jnp.maximum(scaled, -largest), largest)
                q = scaled.astype(E5M2)
                q_ref[rows[n], pl.ds(head * H + h * HALF, HALF)] = q
                byte = lax.bitcast_convert_type(q, jnp.uint8).astype(jnp.uint16)
                if n:
                    at.at[:, halves[h]][...] = low[h] | (byte << jnp.uint16(8))
                cast_bytes.append(byte)
            return most, cast_bytes

        def transpose(head) -> None:
            # One barrier a head: the next head has the other slot.
            hopper.bar_sync(WARPGROUPS + 1, WARPGROUPS)
            here = packed.at[lax.rem(head, 2), :, pl.ds(warpgroup * HALF, HALF)]
            pairs = plgpu.load(here.T, layout=hopper.MATRIX)
            channels = pl.ds(head * H + warpgroup * HALF, HALF)
            for n, byte in enumerate((pairs & jnp.uint16(0xFF), pairs >> jnp.uint16(8))):
                tile = tiles.at[warpgroup, n]
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # of this tile, not of the other
                tile[...] = lax.bitcast_convert_type(byte.astype(jnp.uint8), E5M2)
                plgpu.commit_smem()
                tokens = pl.ds(first_row + n * PAIRS, PAIRS)
                plgpu.copy_smem_to_gmem(tile, qt_ref.at[channels, tokens])

        def process(group: HeadGroup, following: HeadGroup | None, head, carry):
            """A head whose first tokens have been read. following: the group of the next head."""
            most, first = carry
            values = group.values(0, first)
            second = group.read(head, 1)
            most, low = cast(head, 0, values, most, None)
            values = group.values(1, second)
            first = None if following is None else following.read(head + 1, 0)
            most, _ = cast(head, 1, values, most, low)
            transpose(head)
            return most, first

        of_queries, of_keys = (functools.partial(read_turned, ref) for ref in (dq_ref, d_ref))
        groups = [
            HeadGroup(0, N, of_queries, functools.partial(turned_back, scale)),
            HeadGroup(N, K, of_keys, functools.partial(turned_back, None)),
            HeadGroup(N + K, K, functools.partial(read, d_ref), lambda n, pair: wide(pair)),
        ]
        most = hopper.untyped.layout_cast(jnp.zeros((MINE, HALF), jnp.float32), layout)
        carry = most, groups[0].read(0, 0)
        for group, following in zip(groups, [*groups[1:], None]):
            last = group.start + group.count - 1
            each = functools.partial(process, group, group)
            carry = lax.fori_loop(group.start, last, each, carry)
            carry = process(group, following, last, carry)
        plgpu.wait_smem_to_gmem(0)
        at = pl.ds((block * WARPGROUPS + warpgroup) * MINE, MINE)
        most_ref[at] = jnp.max(carry[0], 1)

    R, blocks = B * T, B * T // TOKENS
    flat = lambda x: x.reshape(R, x.shape[2], H)
    struct = jax.ShapeDtypeStruct
    return hopper.pallas_kernel(
        rope_turn_back_cast,
        out_type=[
            struct((R, C * H), E5M2), struct((C * H, R), E5M2),
            struct((blocks * WARPGROUPS * MINE,), jnp.float32),
        ],
        scratch_types=dict(
            packed=plgpu.SMEM((2, PAIRS, H + PAD), jnp.uint16),
            tiles=hopper.tiles((WARPGROUPS, 2, HALF, PAIRS), E5M2),
            turns=plgpu.SMEM((WARPGROUPS, 2, 2, MINE, HALF), jnp.float32),
        ),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        compiler_params=hopper.compiler_params(),
        interpret=options.interpret,
    )(
        *flat_angles(cos_BTH, sin_BTH), r_NR, flat(dq_BTNH), flat(qkv_BTCH), flat(d_BTCH),
        multiplier.reshape(1),
    )  # fmt: skip
