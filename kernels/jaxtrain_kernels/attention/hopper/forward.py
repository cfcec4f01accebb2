"""Flash attention's forward pass for Hopper, in Pallas Mosaic GPU.

The design is FlashAttention-3's (arXiv:2407.08608): one warpgroup loads tiles by TMA, two or three
others compute 64 query rows each. A computing warpgroup issues q k^T of the next key block and p v
of this one together, and computes the softmax of the first while the second still runs. Warpgroups
may take turns at issuing, so that one's softmax overlaps another's matmuls. Blocks are persistent:
the load warpgroup prefetches the next tile while the others finish the last one, and these issue
the next tile's first matmul before they store their output. Tiles are scheduled heaviest first,
within groups of heads whose keys and values fit the L2 cache, or whose tiles occupy the GPU.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxtrain_kernels import hopper
from jaxtrain_kernels.attention.hopper import common
from jaxtrain_kernels.attention.hopper.common import Heads, Mask
from jaxtrain_kernels.attention.hopper.forward_compute import compute
from jaxtrain_kernels.attention.hopper.forward_load import (
    TILE,
    ForwardArrays,
    ForwardMemory,
    ForwardPlan,
    ForwardTiling,
    load,
)

NEVER = 2**30  # beyond any key: the first key of a query that sees none


def default_tiling(head_dim: int, segments: bool = False) -> ForwardTiling:
    if head_dim <= 64:
        return ForwardTiling(v_stages=3)
    if head_dim <= 128:
        # Segment ids need shared memory too.
        return ForwardTiling(k_stages=2 if segments else 3)
    return ForwardTiling(block_kv=64, k_stages=2, q_stages=1)


@hopper.jit_kernel("causal", "window", "softcap", "scale", "heads", "tiling", "interpret")
def forward(
    q_BTNH: Float[Array, "B T C H"],
    k_BSKH: Float[Array, "B T D H"],
    v_BSKH: Float[Array, "B T E H"],
    ids_BT: Int[Array, "B T"] | None = None,
    *,
    causal: bool,
    window: int | None,
    softcap: float | None,
    scale: float,
    heads: Heads | None = None,
    tiling: ForwardTiling | None = None,
    interpret: hopper.Interpret = False,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]:
    """Return the output in q's dtype and the LSE in float32 (-inf for a query without keys).

    bfloat16 or float16; N a multiple of K; H a multiple of 32 up to 256; scale > 0; any T. Other
    arguments as in `attention`. heads: positions of q's, k's and v's heads, if their arrays have
    other heads too. interpret: plgpu.InterpretGPUParams, to run on a CPU.
    """
    heads = heads or common.of_separate(q_BTNH, k_BSKH)
    (B, T, _, H), N = q_BTNH.shape, heads.N
    tiling = tiling or default_tiling(H, ids_BT is not None)
    mask = Mask(causal, window)
    ranges = common.block_ranges(mask, T, 64 * tiling.warpgroups, tiling.block_kv, ids_BT)
    plan = ForwardPlan(
        B=B,
        T=T,
        N=N,
        K=heads.K,
        H=H,
        dtype=q_BTNH.dtype,
        mask=mask,
        softcap=softcap,
        scale=scale,
        segments=ids_BT is not None,
        tiling=tiling,
        blocks=0,
        group=1,
        extra_masked=ids_BT is not None or _extra_masked(ranges),
        interpret=bool(interpret),
        heads=heads,
    )
    wanted = hopper.sm_count() if tiling.blocks is None else tiling.blocks or plan.n_tiles
    blocks = min(wanted, plan.n_tiles)
    # Documents are shorter than rows, and so are the keys that their tiles share.
    l2_bytes = tiling.l2_bytes * (8 if plan.segments else 1)
    fit = l2_bytes // (T * H * 4) * (N // heads.K)
    group = common.heads_together(B * N, fit, plan.row_blocks, blocks)
    plan = plan._replace(blocks=blocks, group=group)
    # TMA needs multiples of 8 tokens. Outside the arrays it reads zeros and drops writes.
    pad = lambda x: jnp.pad(x, [(0, -T % 8 if d == 1 else 0) for d in range(x.ndim)])
    arrays = [pad(x) for x in (q_BTNH, k_BSKH, v_BSKH)]
    runs = jnp.zeros_like(ranges.lo)
    if ids_BT is not None:
        limits_B3T, runs_B = _limits(mask, ids_BT)
        runs = jnp.broadcast_to(runs_B[:, None].astype(jnp.int32), ranges.lo.shape)
        arrays += [jnp.pad(limits_B3T, ((0, 0), (0, 0), (0, -T % plan.rows))), pad(ids_BT)]
    arrays.insert(3, jnp.stack((*ranges, runs), -1))
    out_BTNH, lse_BNT = _call(plan, arrays, interpret)
    return out_BTNH[:, :T], lse_BNT[:, :, :T]


def _extra_masked(ranges: common.BlockRanges) -> bool:
    return bool(np.any((ranges.full_hi < ranges.hi - 1) | (ranges.full_lo > ranges.lo)))


def _limits(mask: Mask, ids_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int32 [B, 3, T]: a query's first visible key, one past its last, its segment id; bool [B].

    The second result tells for which batch rows the limits hold: ids increase, except for padding.
    """
    B, T = ids_BT.shape
    t = jnp.arange(T, dtype=jnp.int32)[None]
    is_first = jnp.pad(ids_BT[:, 1:] != ids_BT[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    ends = jnp.pad(is_first[:, 1:], ((0, 0), (0, 1)), constant_values=True)
    first = _running_max(jnp.where(is_first, t, 0))
    last = T - 1 - _running_max(jnp.where(ends, T - 1 - t, 0)[:, ::-1])[:, ::-1]
    if mask.window is not None:
        first = jnp.maximum(first, t - mask.window)
    if mask.causal:
        last = jnp.broadcast_to(t, (B, T))
    some = ids_BT > 0
    limits = jnp.where(some, first, NEVER), jnp.where(some, last + 1, 0), ids_BT
    earlier = jnp.pad(_running_max(jnp.maximum(ids_BT, 0))[:, :-1], ((0, 0), (1, 0)))
    return jnp.stack(limits, 1), (~(some & is_first) | (ids_BT > earlier)).all(1)


def _running_max(x_BT: Any, block: int = 128) -> Any:
    """Running maximum of entries >= 0: two levels, each one fused kernel, instead of a scan."""
    B, T = x_BT.shape
    x = jnp.pad(x_BT, ((0, 0), (0, -T % block))).reshape(B, -1, block)
    inside = jnp.where(np.tri(block, dtype=bool), x[:, :, None], 0).max(-1)
    before = jnp.where(np.tri(x.shape[1], k=-1, dtype=bool), inside[:, None, :, -1], 0).max(-1)
    return jnp.maximum(inside, before[..., None]).reshape(B, -1)[:, :T]


def _call(plan: ForwardPlan, arrays: list, interpret: hopper.Interpret):
    tiling, rows, i32 = plan.tiling, plan.rows, jnp.int32
    block = (tiling.block_kv, plan.H)
    arrivals = 2 if plan.segments else 1
    scratch: dict[str, Any] = dict(
        q=hopper.tiles((tiling.q_stages, rows, plan.H), plan.dtype),
        k=hopper.tiles((tiling.k_stages, *block), plan.dtype),
        v=hopper.tiles((tiling.v_stages, *block), plan.dtype),
        lse=plgpu.SMEM((tiling.warpgroups, 64), jnp.float32),
        tile=plgpu.SMEM((tiling.q_stages + 1, len(TILE)), i32),
        q_full=plgpu.Barrier(num_barriers=tiling.q_stages, num_arrivals=arrivals),
        k_full=plgpu.Barrier(num_barriers=tiling.k_stages, num_arrivals=arrivals),
        v_full=plgpu.Barrier(num_barriers=tiling.v_stages),
    )
    if plan.segments:
        scratch["limits"] = plgpu.SMEM((tiling.q_stages, 3, rows), i32)
        scratch["k_ids"] = plgpu.SMEM((tiling.k_stages, tiling.block_kv), i32)

    def attention_forward(*refs, **memory):
        q, k, v, ranges, *ids, out, lse = refs
        limits, ids = ids or (None, None)
        _block(plan, ForwardArrays(q, k, v, ranges, limits, ids, out, lse), ForwardMemory(**memory))

    padded_T = plan.row_blocks * rows
    return hopper.pallas_kernel(
        attention_forward,
        out_type=(
            jax.ShapeDtypeStruct((*arrays[0].shape[:2], plan.N, plan.H), plan.dtype),
            jax.ShapeDtypeStruct((plan.B, plan.N, padded_T), jnp.float32),
        ),
        scratch_types=scratch,
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=tiling.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=hopper.compiler_params(),
        interpret=interpret,
    )(*arrays)


def _block(plan: ForwardPlan, arrays: ForwardArrays, memory: ForwardMemory):
    """One CUDA block."""
    counter = None
    if plan.tiling.dynamic and not plan.interpret and plan.blocks < plan.n_tiles:
        counter = pl.get_global(plgpu.SemaphoreType.REGULAR)
    hopper.specialize_warpgroups(
        plan.tiling.warpgroups,
        lambda: load(plan, arrays, memory, counter),
        lambda warpgroup: compute(plan, arrays, memory, warpgroup),
    )
