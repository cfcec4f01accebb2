"""Steps of the megakernel of `triton`: one program per multiprocessor runs all layers in phases.

A phase passes its results to the next through `slots`, which start as zeros: 32-bit words with a
bfloat16 in the upper half and a 1, the mark, in the lowest bit. A reader polls a vector until each
word has its mark. This alone synchronizes the programs: a word is written and read atomically, so
no fence is needed. Each layer has its own slots, which are written once. Reads of slots are
volatile: they bypass the L1 cache, in which another multiprocessor's word would never appear.

Phases of a layer, with the inputs that they wait for and their outputs:
    qkv     branch of the layer before  ->  q, k, v, gates
    attend  q, k, v of a head           ->  peak, total, sum over a split of the keys
    join    the splits of a head        ->  its output
    out     all heads                   ->  attention's output
    up      attention's output          ->  squared ReLU
    down    squared ReLU                ->  the branch

Every program computes and keeps the whole residual stream. A tile is 8 rows of a matrix, one per
warp, and 128 columns, of 2 inputs each. Tiles of the next matmul are loaded before the wait for
this one's inputs, so that the memory is never idle.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxtrain_kernels.decode_layers.packing import ROWS, LayersShape
from jaxtrain_kernels.decode_layers.prefetch import prefetch_rows

COLUMNS = 128  # of a tile
MOST_CHUNKS = 8  # per part; a thread has 4 registers of weights and 8 of inputs per chunk
WARPS = 8
THREADS = 32 * WARPS
FETCHED = 16  # 32-bit words that one memory access brings into the cache
FLOOR = -1e30
LOG2E = 1.4426950408889634


class LayersPlan(NamedTuple):
    """Compile-time constants of the kernel.

    programs: of the grid. splits: parts of a head's keys. tokens: keys per step. page: tokens per
    page. pages: pages per layer. table: length of the page table. register_tiles: tiles of a
    matmul that are loaded into registers one matmul ahead; the others are only prefetched into the
    cache. spins: reads of a vector before a program times out. prefetch: weights are also fetched
    into the L2 cache two matmuls ahead (`prefetch_rows`).
    """

    shape: LayersShape
    programs: int
    splits: int
    tokens: int
    page: int
    pages: int
    table: int
    register_tiles: int
    spins: int
    prefetch: bool

    @property
    def padded_splits(self) -> int:
        return pl.next_power_of_2(self.splits)

    @property
    def sizes(self) -> dict[str, int]:
        """Number of words of each vector of a layer."""
        s, each = self.shape, self.shape.heads * self.splits
        return {
            "qkv": s.qkv_rows, "parts": each * 2 * s.head_dim, "stats": each * 4,
            "heads": s.heads * s.head_dim, "out": s.width, "up": s.hidden, "down": s.width,
        }  # fmt: skip

    @property
    def places(self) -> dict[str, int]:
        """Offset of each vector in a layer's slots, a multiple of 32."""
        ends, at = {}, 0
        for name, size in self.sizes.items():
            ends[name], at = at, at + -(-size // 32) * 32
        return ends | {"end": at}

    @property
    def words(self) -> int:
        """Number of words of all slots."""
        return self.shape.depth * self.places["end"]


class Product(NamedTuple):
    """Packed weights of all layers [L * rows * columns], and the program's tiles of them."""

    ref: Any
    rows: int
    columns: int
    units: int  # groups of 8 rows per program


class Context(NamedTuple):
    """Values that all steps of a program share."""

    plan: LayersPlan
    slots: Any
    program: Any


def low(word):
    return jax.lax.bitcast_convert_type(word << 16, jnp.float32)


def high(word):
    return jax.lax.bitcast_convert_type(word & -65536, jnp.float32)


def rounded(x):
    """Round to bfloat16, in float32."""
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def word_of(x):
    """Word of a bfloat16 value with its mark."""
    return jax.lax.bitcast_convert_type(rounded(x), jnp.int32) | 1


def words_of(x):
    """Two words of a float32 value, with marks: its upper 16 bits, and its lower 16 bits."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return bits & -65536 | 1, bits << 16 | 1


def join_words(above, below):
    """Return the float32 value of two words."""
    bits = (above & -65536) | jax.lax.shift_right_logical(below, 16)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def poll(left, read, shapes):
    """Call read() until all words have their marks; return (words, left, or 0 after a timeout).

    left: most reads of a vector; 0 after an earlier timeout, when each vector is read once.
    read: returns (words, checks), arrays of words, in which unneeded ones are 1; each word of
    `words` is in a check. shapes: of the words. The kernel contains read() only once, because
    compile time grows with the cube of its size.

    All warps must leave the loop together, so they must see the same words. Triton gives each warp
    its own copy of a scalar, and of an array with fewer words than threads, and each warp then
    reads at a different time. So each array has at least one word per thread.
    """

    def look(carry):
        words, checks = read()
        assert all(word.size >= THREADS for word in (*words, *checks)), "a word for each thread"
        missing = 0
        for word in checks:
            missing += (1 - (word & 1)).reshape(-1).sum(0)  # one axis: one exchange between warps
        return carry[0] - 1, missing, *words

    go_on = lambda carry: (carry[1] > 0) & (carry[0] > 0)
    first = jnp.maximum(left, 1), jnp.int32(1), *(jnp.zeros(shape, jnp.int32) for shape in shapes)
    _, missing, *words = jax.lax.while_loop(go_on, look, first)
    return words, jnp.where(missing > 0, 0, left)


def parts_of(columns: int) -> list[tuple[int, int]]:
    """Group chunks of 128 columns into parts of a power of two: (first chunk, number of chunks)."""
    chunks, found, at = columns // COLUMNS, [], 0
    while at < chunks:
        size = min(MOST_CHUNKS, 1 << ((chunks - at).bit_length() - 1))
        found.append((at, size))
        at += size
    return found


def tile_places(size: int, row_stride: int = 0):
    """Offsets [chunks, 8, 128] of the words of 8 rows. Stride 0: the same in each row, so that each
    warp has a whole vector."""
    at = (jnp.arange(size) * COLUMNS)[:, None, None] + jnp.arange(COLUMNS)[None, None]
    return at + (jnp.arange(ROWS) * row_stride)[None, :, None]


def first_row(c: Context, product: Product, unit):
    """First row of a tile. Tiles past the end repeat the last tile, whose outputs are rewritten."""
    return jnp.minimum((c.program * product.units + unit) * ROWS, product.rows - ROWS)


def load_tiles(c: Context, product: Product, layer, unit: int, part: tuple[int, int]):
    """Load packed weights [chunks, 8, 128]. Scalars are added first, which saves compile time."""
    first, size = part
    row = layer * product.rows + first_row(c, product, unit)
    begin = row * product.columns + first * COLUMNS
    return plgpu.load(product.ref.at[begin + tile_places(size, product.columns)])


def tiles_of(product: Product):
    """(unit, index of the part, part) of each tile, in the order of use."""
    parts = parts_of(product.columns)
    return [(unit, i, part) for i, part in enumerate(parts) for unit in range(product.units)]


def load_ahead(c: Context, product: Product, layer):
    """Load the tiles kept in registers; if there are others and no `prefetch`, `touch` the rows."""
    tiles, ahead, chunks = tiles_of(product), [], 0
    for unit, _, part in tiles:
        chunks += part[1]
        if chunks > c.plan.register_tiles:
            break
        ahead.append(load_tiles(c, product, layer, unit, part))
    is_whole = len(ahead) == len(tiles)
    return tuple(ahead), None if is_whole or c.plan.prefetch else touch(c, product, layer)


def prefetch(c: Context, product: Product, layer) -> None:
    """Start to bring a program's rows into the L2 cache, where the plan says so."""
    if not c.plan.prefetch:
        return
    for unit in range(product.units):
        row = layer * product.rows + first_row(c, product, unit)
        prefetch_rows(product.ref, row * product.columns, product.columns * 4, THREADS)


def touch(c: Context, product: Product, layer):
    """Prefetch a program's rows into the cache: read every 16th word of them, [.., 256]."""
    pieces = product.units * ROWS * product.columns // FETCHED
    times = pl.next_power_of_2(-(-pieces // THREADS))
    piece = jnp.arange(times)[:, None] * THREADS + jnp.arange(THREADS)[None]
    all_rows = product.rows * product.columns
    at = c.program * (pieces * FETCHED) + piece * FETCHED
    mask = (piece < pieces) & (at < all_rows)
    return plgpu.load(product.ref.at[layer * all_rows + at], mask=mask, other=0)


def multiply(c: Context, product: Product, layer, ahead, inputs, begin, finish):
    """Multiply a program's rows by the inputs; write the outputs to the slots from `begin` on.

    inputs(i): two arrays [chunks, 8, 128] of part i, of the lower and the upper half of the inputs.
    finish: function that is applied to each output.
    """
    sums = [jnp.zeros((ROWS, COLUMNS), jnp.float32) for _ in range(product.units)]
    x_low, x_high = inputs(0)
    for at, (unit, i, part) in enumerate(tiles_of(product)):
        if unit == 0 and i:
            x_low, x_high = inputs(i)
        w = ahead[at] if at < len(ahead) else load_tiles(c, product, layer, unit, part)
        sums[unit] += (low(w) * x_low + high(w) * x_high).sum(0)
    # One store of all tiles: each store costs an exchange between warps.
    unit_1U = jnp.arange(pl.next_power_of_2(product.units))[None]
    y_8U = jnp.zeros((ROWS, unit_1U.size), jnp.float32)
    for unit, products in enumerate(sums):
        y_8U = jnp.where(unit_1U == unit, products.sum(1)[:, None], y_8U)
    at_8U = begin + first_row(c, product, unit_1U) + jnp.arange(ROWS)[:, None]
    plgpu.store(c.slots.at[at_8U], word_of(finish(y_8U)), mask=unit_1U < product.units)


def read_vector(c: Context, left, begin, size: int):
    """Wait for a vector of the slots; return its inputs, in the form that `multiply` takes, and
    `left` (see `poll`).

    The words that end the wait are the inputs: to read them again would take as long as one more
    exchange. A part's two halves are one array, so that one chunk has a word for each thread.
    """
    parts, half = parts_of(size // 2), size // 2
    column = jnp.arange(2 * COLUMNS)[None]
    side = (column >= COLUMNS).astype(jnp.int32)

    def read():
        words = []
        for first, chunks in parts:
            at = (first + jnp.arange(chunks))[:, None] * COLUMNS + column
            words.append(
                plgpu.load(c.slots.at[begin + at + side * (half - COLUMNS)], volatile=True)
            )
        return words, words

    words, left = poll(left, read, tuple((chunks, 2 * COLUMNS) for _, chunks in parts))

    def inputs(i: int):
        shape = parts[i][1], ROWS, 2 * COLUMNS  # all warps have the vector
        return tuple(map(high, jnp.split(jnp.broadcast_to(words[i][:, None], shape), 2, axis=2)))

    return inputs, left


def norm_inputs(c: Context, x):
    """x / rms(x) of the residual stream, in the form that `multiply` takes."""
    squares = jnp.zeros((ROWS, COLUMNS), jnp.float32)
    for part in (part for half in x for part in half):
        squares += (part * part).sum(0)
    mean_8 = squares.sum(1) / c.plan.shape.width
    factor = jax.lax.rsqrt(mean_8 + c.plan.shape.eps)[None, :, None]
    return lambda i: tuple(rounded(half[i] * factor) for half in x)


def add_inputs(x, inputs):
    """Add a vector of `read_vector` to the residual stream."""
    found = [inputs(i) for i in range(len(x[0]))]
    return tuple(
        tuple(rounded(part + y[i]) for part, y in zip(half, found)) for i, half in enumerate(x)
    )
