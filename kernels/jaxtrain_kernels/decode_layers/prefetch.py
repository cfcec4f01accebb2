"""Prefetch of a matrix into the L2 cache for the kernel `decode_layers`: Hopper and newer.

A load that only warms the cache occupies a register until it returns, and the loads after it, those
of a wait too, return behind it. `cp.async.bulk.prefetch.L2` returns nothing, and one thread of a
warp asks for a whole row. Pallas has no such operation, so this is a primitive of its own.
"""

from typing import Any

from jax._src.pallas.triton import lowering  # has the table of lowerings
from jax._src.pallas.triton.primitives import barrier_effect
from jax.extend.core import Primitive
from jaxlib.mlir import ir
from jaxlib.triton import dialect

# Lane 0 of warp i prefetches row i of the tile.
ASSEMBLY = """{{
.reg .pred is_first;
.reg .b32 thread, lane, warp;
.reg .b64 row;
mov.u32 thread, %tid.x;
and.b32 lane, thread, 31;
shr.u32 warp, thread, 5;
setp.eq.u32 is_first, lane, 0;
mad.wide.u32 row, warp, {size}, $1;
@is_first cp.async.bulk.prefetch.L2.global [row], {size};
mov.b32 $0, 0;
}}"""

prefetch_p = Primitive("prefetch_rows")
prefetch_p.multiple_results = True


def prefetch_rows(ref: Any, begin: Any, size: int, threads: int) -> None:
    """Prefetch consecutive rows, one per warp. begin: index of the first. size: bytes of a row, a
    multiple of 16; the first row's address must be one, too."""
    prefetch_p.bind(ref, begin, size=size, threads=threads)


@prefetch_p.def_effectful_abstract_eval
def _effects(ref, begin, *, size: int, threads: int):
    return [], {barrier_effect}  # kept although it has no result


@lowering.register_lowering(prefetch_p)
def _lower(ctx, pointer, begin, *, size: int, threads: int):
    row = dialect.addptr(pointer.type, pointer, begin)
    each = ir.RankedTensorType.get([threads], pointer.type)
    result = ir.RankedTensorType.get([threads], ir.IntegerType.get_signless(32))
    dialect.elementwise_inline_asm(
        [result], ASSEMBLY.format(size=size), constraints="=r,l", pure=False, packed_element=1,
        args=[dialect.splat(each, row)],
    )  # fmt: skip
    return []
