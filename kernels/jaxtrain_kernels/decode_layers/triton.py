"""All layers of one sequence in one launch, in Pallas Triton: Ampere and newer.

A launch takes about 5 us and begins with cold loads, but a matmul of a gpt_d12 layer needs only 0.3
to 1.5 us of memory traffic. Here one program per multiprocessor runs all layers (`program.py`,
imported by the first call).
"""

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxtrain_kernels.decode_layers.packing import LayersShape, PackedLayers
from jaxtrain_kernels.dispatch import Target, target, triton_unsupported

if TYPE_CHECKING:
    from jaxtrain_kernels.decode_layers.kernel import LayersPlan

PROCESSORS = 132  # multiprocessors (SMs) of a Hopper GPU
MOST_SPLITS = 32
TOKENS = 32  # keys per step
# By largest width: tiles of a matmul, 4 registers each, that are loaded ahead.
REGISTER_TILES = {1024: 12, 4096: 8}
PREFETCH = True  # weights into the L2 cache, two matmuls ahead: Hopper and newer
SPINS = 2**20  # reads of a vector, about a second, before a program times out
LAUNCHES = 6  # sequential launches per layer that interpret mode needs


def supports(target: Target, shape: LayersShape, x0_D, pages) -> str | None:
    """Return why this backend cannot serve the call; None = it can."""
    s, (k_PpKH, v_PpKH) = shape, pages
    if reason := triton_unsupported(target):
        return reason
    if x0_D.dtype != jnp.bfloat16:
        return f"needs bfloat16, got {x0_D.dtype}"
    if {k_PpKH.dtype, v_PpKH.dtype} != {jnp.dtype(jnp.bfloat16)}:
        return f"needs pages in bfloat16, got {k_PpKH.dtype}"
    inputs = {"width": s.width, "hidden": s.hidden, "heads x head_dim": s.heads * s.head_dim}
    for name, size in inputs.items():
        if size % 256:
            return f"needs a multiple of 256 channels, got {name} {size}"
    if s.width > max(REGISTER_TILES):
        return f"needs a width up to {max(REGISTER_TILES)}, got {s.width}"
    if s.head_dim not in (32, 64, 128, 256):
        return f"needs heads of 32, 64, 128 or 256 channels, got {s.head_dim}"
    if s.heads // s.kv_heads > 14:
        return f"needs at most 14 heads of queries for one of keys, got {s.heads // s.kv_heads}"
    if max(k_PpKH.size, shape.depth * s.hidden * s.width) >= 2**31:
        return "needs less than 2^31 numbers in pages and matrices"
    if s.kv_heads > processors() or s.heads * s.head_dim // 32 > processors():
        return f"needs at most {processors()} parts of heads, got {s.heads} heads"
    return None


def processors() -> int:
    """Number of multiprocessors of the device, which is the number of programs that run at once."""
    device = jax.local_devices()[0]
    return getattr(device, "core_count", PROCESSORS) if device.platform == "gpu" else PROCESSORS


class Launched(NamedTuple):
    """Results of a launch. states: residual stream after attention of the last and the middle
    layer. status: of each program, 0 if it timed out (else > 0). slots: outputs of each layer's
    phases (`LayersPlan.places`)."""

    plan: "LayersPlan"
    states_2D: Float[Array, "2 D"]
    status_G: Array  # of each program of the grid
    slots: Array
    pages: tuple[Array, Array]

    def words(self, layer: int, phase: str) -> Array:
        """Words that a phase of a layer wrote."""
        begin = layer * self.plan.places["end"] + self.plan.places[phase]
        return self.slots[begin : begin + self.plan.sizes[phase]]

    def values(self, layer: int, phase: str) -> tuple[Array, Array]:
        """Values that a phase of a layer wrote, and a mask of those that were written."""
        words = self.words(layer, phase)
        numbers = jax.lax.bitcast_convert_type(words & -65536, jnp.float32)
        return numbers, (words & 1) > 0


def decode_layers(
    shape, weights: PackedLayers, x0_D, cos_h, sin_h, values_LC, pages, table_W, start, count,
    *, programs: int | None = None, register_tiles: int | None = None, interpret: bool = False,
):  # fmt: skip
    """Backend of the public function. Other arguments as in `launch`."""
    row = x0_D, cos_h, sin_h, values_LC, pages, table_W, start, count
    how = {"programs": programs, "register_tiles": register_tiles, "interpret": interpret}
    done = launch(shape, weights, *row, **how)

    def total(layer: int):
        x_D = done.states_2D[int(layer == shape.middle)]
        return (x_D + done.values(layer, "down")[0]).astype(x0_D.dtype)

    timed_out = (done.status_G == 0).any()
    # After a timeout the result is NaN, because the values may be wrong.
    x_D = jnp.where(timed_out, jnp.nan, total(shape.depth - 1))
    return x_D, total(shape.middle), done.pages, timed_out


def layers_plan(
    shape: LayersShape, pages, table: int, programs: int | None = None,
    register_tiles: int | None = None, interpret: bool = False,
) -> "LayersPlan":  # fmt: skip
    """Make the kernel's plan. table: length of the page table. Other arguments as in `launch`."""
    from jaxtrain_kernels.decode_layers import kernel

    many = programs or processors()
    register_tiles = register_tiles or next(
        tiles for width, tiles in REGISTER_TILES.items() if shape.width <= width
    )
    splits = max(1, min(many // shape.kv_heads, MOST_SPLITS))
    sizes = pages[0].shape[2], pages[0].shape[1]
    spins = 1 if interpret else SPINS
    can_prefetch = not interpret and (target().compute_capability or (0, 0)) >= (9, 0)
    return kernel.LayersPlan(
        shape, many, splits, TOKENS, *sizes, table, register_tiles, spins, PREFETCH and can_prefetch
    )


def launch(
    shape: LayersShape, weights: PackedLayers, x0_D, cos_h, sin_h, values_LC, pages, table_W, start,
    count, *, programs: int | None = None, register_tiles: int | None = None,
    interpret: bool = False,
) -> Launched:  # fmt: skip
    """Run the kernel. programs: size of the grid; all must run at once, so by default one per
    multiprocessor. register_tiles: tiles that a program loads ahead. interpret: run on a CPU,
    where programs run one after the other and cannot wait, so launches are repeated until all have
    read the others' outputs."""
    from jaxtrain_kernels.decode_layers import program

    plan = layers_plan(shape, pages, len(table_W), programs, register_tiles, interpret)
    place_2 = jnp.stack([start, count]).astype(jnp.int32)
    x0_32, turns_2h = x0_D.astype(jnp.float32), jnp.stack([cos_h, sin_h])
    arrays = weights, x0_32, turns_2h, values_LC, place_2, table_W
    slots = jnp.zeros(plan.words, jnp.int32)
    for _ in range(LAUNCHES * shape.depth + 1 if interpret else 1):
        states_2D, status, slots, pages = program.call(plan, interpret, *arrays, slots, pages)
    return Launched(plan, states_2D, status[:, 0], slots, pages)
