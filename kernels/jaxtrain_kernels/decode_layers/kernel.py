"""The kernel of `triton`: a program for each processor runs all layers, from phase to phase.

What one phase hands to the next lies in `slots`, zeros at first: words of 32 bits, a bfloat16
above and a 1 below. Who needs a vector reads it until each word has its 1. No other memory orders
programs: a word is written and read whole, so that no fence is needed. Each layer has slots of its
own, which are written once. Each read of them is volatile: past the processor's own cache, where
another processor's word would never arrive.

Phases of a layer, and what they wait for:
    qkv     branch of the layer before  ->  q, k, v, gates
    attend  q, k, v of a head           ->  peak, total, sum of a part of the keys
    join    the parts of a head         ->  its output
    out     all heads                   ->  what attention adds
    up      that                        ->  squared ReLU
    down    that                        ->  the branch

Every program keeps the whole residual stream, and computes the same of it. A tile is 8 rows of a
matrix, one a warp, and 128 columns, of 2 inputs each. Tiles of the next product are loaded before
the wait for the inputs of this one: the memory is never idle.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxtrain_kernels.decode_layers.packing import ROWS, LayersShape

COLUMNS = 128  # of a tile
MOST_CHUNKS = 8  # of a part: of each a thread has 4 registers of weights, and 8 of inputs
WARPS = 8
THREADS = 32 * WARPS
FETCHED = 16  # numbers of 32 bits that the memory gives the cache at once
FLOOR = -1e30
LOG2E = 1.4426950408889634


class LayersPlan(NamedTuple):
    """What is compiled into the kernel.

    programs: of the grid. splits: parts of the keys of a head. tokens: keys of a step. pages:
    of a layer. held: tiles of a product that are loaded a product ahead; of the others lines of the
    cache are. spins: reads
    of a vector until a program gives up.
    """

    shape: LayersShape
    programs: int
    splits: int
    tokens: int
    page: int
    pages: int
    table: int
    held: int
    spins: int

    @property
    def padded_splits(self) -> int:
        return pl.next_power_of_2(self.splits)

    @property
    def sizes(self) -> dict[str, int]:
        """Words of each vector of a layer."""
        s, each = self.shape, self.shape.heads * self.splits
        return {
            "qkv": s.qkv_rows, "parts": each * 2 * s.head_dim, "stats": each * 4,
            "heads": s.heads * s.head_dim, "out": s.width, "up": s.hidden, "down": s.width,
        }  # fmt: skip

    @property
    def places(self) -> dict[str, int]:
        """Where each begins in a layer's slots, a multiple of 32."""
        ends, at = {}, 0
        for name, size in self.sizes.items():
            ends[name], at = at, at + -(-size // 32) * 32
        return ends | {"end": at}

    @property
    def words(self) -> int:
        """All slots."""
        return self.shape.depth * self.places["end"]


class Product(NamedTuple):
    """Packed weights of all layers [L * rows * columns], and the program's tiles of them."""

    ref: Any
    rows: int
    columns: int
    units: int  # of 8 rows, that a program has


class Context(NamedTuple):
    """What the steps of a program share."""

    plan: LayersPlan
    slots: Any
    program: Any


def low(word):
    return jax.lax.bitcast_convert_type(word << 16, jnp.float32)


def high(word):
    return jax.lax.bitcast_convert_type(word & -65536, jnp.float32)


def rounded(x):
    """Through bfloat16."""
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def word_of(x):
    """A bfloat16 value with its mark."""
    return jax.lax.bitcast_convert_type(rounded(x), jnp.int32) | 1


def words_of(x):
    """A float32 value in two words: 16 bits above, and those below."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return bits & -65536 | 1, bits << 16 | 1


def join_words(above, below):
    """The float32 value of two words."""
    bits = (above & -65536) | jax.lax.shift_right_logical(below, 16)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def poll(left, read, shapes):
    """(words, reads that are left): read() until all words have their marks.

    read: returns (words, checks), arrays of words in which those that nobody needs are 1; each word
    of `words` is in a check. shapes: of the words. The kernel holds read() once, as compiling takes
    the cube of its size.

    All warps must leave the loop together, so they must see the same words. Triton gives each warp
    its own copy of a scalar, and of an array with fewer words than threads. Each warp then reads at
    another moment. So an array has a word for each thread, or more.
    """

    def look(carry):
        words, checks = read()
        assert all(word.size >= THREADS for word in (*words, *checks)), "a word for each thread"
        missing = 0
        for word in checks:
            absent = 1 - (word & 1)
            while absent.ndim:  # one axis a time: Triton has no sum over several
                absent = absent.sum(absent.ndim - 1)
            missing += absent
        return carry[0] - 1, missing, *words

    go_on = lambda carry: (carry[1] > 0) & (carry[0] > 0)
    first = jnp.maximum(left, 1), jnp.int32(1), *(jnp.zeros(shape, jnp.int32) for shape in shapes)
    _, missing, *words = jax.lax.while_loop(go_on, look, first)
    return words, jnp.where(missing > 0, 0, left)


def wait_vector(c: Context, left, begin, size: int):
    """The reads that are left when the words begin .. begin + size are there."""
    at = jnp.arange(pl.next_power_of_2(max(size, THREADS)))

    def read():
        return (), [plgpu.load(c.slots.at[begin + at], mask=at < size, other=1, volatile=True)]

    return poll(left, read, ())[1]


def parts_of(columns: int) -> list[tuple[int, int]]:
    """Chunks of 128 columns in powers of two: (first, how many)."""
    chunks, found, at = columns // COLUMNS, [], 0
    while at < chunks:
        size = min(MOST_CHUNKS, 1 << ((chunks - at).bit_length() - 1))
        found.append((at, size))
        at += size
    return found


def tile_places(size: int, row_stride: int = 0):
    """[chunks, 8, 128]: numbers of 8 rows. Stride 0: the same in each row, so that each warp has
    all of a vector."""
    at = (jnp.arange(size) * COLUMNS)[:, None, None] + jnp.arange(COLUMNS)[None, None]
    return at + (jnp.arange(ROWS) * row_stride)[None, :, None]


def first_row(c: Context, product: Product, unit: int):
    """Of a tile. Those beyond the last are the last one: its outputs are written twice."""
    return jnp.minimum((c.program * product.units + unit) * ROWS, product.rows - ROWS)


def load_tiles(c: Context, product: Product, layer, unit: int, part: tuple[int, int]):
    """Packed weights [chunks, 8, 128]. Scalars are added first: the compiler's time."""
    first, size = part
    row = layer * product.rows + first_row(c, product, unit)
    begin = row * product.columns + first * COLUMNS
    return plgpu.load(product.ref.at[begin + tile_places(size, product.columns)])


def tiles_of(product: Product):
    """In the order of their use."""
    parts = parts_of(product.columns)
    return [(unit, i, part) for i, part in enumerate(parts) for unit in range(product.units)]


def load_ahead(c: Context, product: Product, layer):
    """The tiles that are held, and where there are others a number of each piece of the rows."""
    tiles, ahead, chunks = tiles_of(product), [], 0
    for unit, _, part in tiles:
        chunks += part[1]
        if chunks > c.plan.held:
            break
        ahead.append(load_tiles(c, product, layer, unit, part))
    return tuple(ahead), touch(c, product, layer) if len(ahead) < len(tiles) else None


def touch(c: Context, product: Product, layer):
    """A number of each piece of a program's rows, [.., 256], so that the cache has them."""
    pieces = product.units * ROWS * product.columns // FETCHED
    times = pl.next_power_of_2(-(-pieces // THREADS))
    piece = jnp.arange(times)[:, None] * THREADS + jnp.arange(THREADS)[None]
    all_rows = product.rows * product.columns
    at = c.program * (pieces * FETCHED) + piece * FETCHED
    mask = (piece < pieces) & (at < all_rows)
    return plgpu.load(product.ref.at[layer * all_rows + at], mask=mask, other=0)


def multiply(c: Context, product: Product, layer, ahead, inputs, begin, finish):
    """Outputs of a program's rows go to the slots from `begin` on.

    inputs(i): two arrays [chunks, 8, 128] of part i, of the lower and the upper half of the inputs.
    finish: what becomes of an output.
    """
    sums = [jnp.zeros((ROWS, COLUMNS), jnp.float32) for _ in range(product.units)]
    x_low, x_high = inputs(0)
    for at, (unit, i, part) in enumerate(tiles_of(product)):
        if unit == 0 and i:
            x_low, x_high = inputs(i)
        w = ahead[at] if at < len(ahead) else load_tiles(c, product, layer, unit, part)
        sums[unit] += (low(w) * x_low + high(w) * x_high).sum(0)
    for unit, products in enumerate(sums):
        place = c.slots.at[begin + first_row(c, product, unit) + jnp.arange(ROWS)]
        plgpu.store(place, word_of(finish(products.sum(1))))


def read_inputs(c: Context, begin, size: int):
    """A vector in the slots, which has been waited for, as `multiply` takes it."""
    parts = parts_of(size // 2)

    def inputs(i: int):
        first, chunks = parts[i]
        at = jnp.arange(chunks)[:, None] * COLUMNS + jnp.arange(COLUMNS)[None]
        begins = [begin + half + first * COLUMNS for half in (0, size // 2)]
        words = [plgpu.load(c.slots.at[at_ + at], volatile=True) for at_ in begins]
        # Read once, then handed to all warps.
        shape = chunks, ROWS, COLUMNS
        return tuple(high(jnp.broadcast_to(word[:, None], shape)) for word in words)

    return inputs


def norm_inputs(c: Context, x):
    """x / rms(x) of the stream's parts, as `multiply` takes it."""
    squares = jnp.zeros((ROWS, COLUMNS), jnp.float32)
    for part in (part for half in x for part in half):
        squares += (part * part).sum(0)
    mean_8 = squares.sum(1) / c.plan.shape.width
    factor = jax.lax.rsqrt(mean_8 + c.plan.shape.eps)[None, :, None]
    return lambda i: tuple(rounded(half[i] * factor) for half in x)


def add_vector(c: Context, x, begin):
    """The stream with a vector of the slots added."""
    inputs = read_inputs(c, begin, c.plan.shape.width)
    found = [inputs(i) for i in range(len(x[0]))]
    return tuple(
        tuple(rounded(part + y[i]) for part, y in zip(half, found)) for i, half in enumerate(x)
    )
