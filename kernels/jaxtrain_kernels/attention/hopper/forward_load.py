"""Plan, shared memory and load warpgroup (by TMA) of the Hopper forward kernel."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jaxtrain_kernels import hopper
from jaxtrain_kernels.attention.hopper.common import Heads, Mask
from jaxtrain_kernels.hopper import Index, Ref

# Fields of a tile, which the load warpgroup writes to shared memory as int32. runs: whether each
# segment id of that batch row is one contiguous run of tokens.
TILE = ("batch", "head", "row", "lo", "full_lo", "full_hi", "hi", "runs")


class ForwardTiling(NamedTuple):
    """block_kv: keys per step. warpgroups: number that compute, 64 query rows each.

    k_stages, v_stages, q_stages: number of tiles of each in shared memory at once.
    turns: whether warpgroups take turns at issuing matmuls.
    blocks: number of CUDA blocks; None = one per multiprocessor, 0 = one per tile.
    dynamic: whether a block takes its next tile from a counter (else every `blocks`-th tile).
    l2_bytes: L2 cache for the keys and values that the tiles in flight share.
    ahead: whether the next tile's first matmul is issued before this one's epilogue (if there are
        two q_stages).
    halves: whether the diagonal block, and the one at a window's edge, are processed 64 keys at a
        time, and only where visible.
    lazy: powers of two by which a row's scores may exceed its current maximum before the output is
        rescaled to a new maximum (0 = always rescaled).
    polynomial: one in so many groups of 8 keys uses a polynomial, not the exponential unit.
    """

    block_kv: int = 128
    warpgroups: int = 2
    k_stages: int = 3
    v_stages: int = 2
    q_stages: int = 2
    turns: bool = False
    blocks: int | None = None
    dynamic: bool = True
    l2_bytes: int = 24 << 20
    ahead: bool = True
    halves: bool = True
    lazy: float = 8.0
    polynomial: int | None = None


class ForwardPlan(NamedTuple):
    """Static parameters of the kernel."""

    B: int
    T: int
    N: int
    K: int
    H: int
    dtype: DTypeLike
    mask: Mask
    softcap: float | None
    scale: float
    segments: bool
    tiling: ForwardTiling
    blocks: int
    group: int  # heads that are processed together, to share the L2 cache
    extra_masked: bool  # some tile has more blocks to mask than the first it visits
    interpret: bool
    heads: Heads  # where the heads begin in their arrays

    @property
    def rows(self) -> int:
        return 64 * self.tiling.warpgroups

    @property
    def row_blocks(self) -> int:
        return -(-self.T // self.rows)

    @property
    def n_tiles(self) -> int:
        return self.B * self.N * self.row_blocks

    @property
    def halves(self) -> bool:
        return self.tiling.halves and self.mask.causal and self.tiling.block_kv == self.rows

    @property
    def halves_left(self) -> bool:
        """Whether the window edge's block is in halves too; then no other block needs a mask."""
        window, block = self.mask.window, self.tiling.block_kv
        aligned = window is not None and window % block == 0 and window >= 2 * block
        return self.halves and aligned and not self.segments

    @property
    def earlier_mask(self) -> Mask:
        """Mask of blocks before the diagonal, of which documents' ends hide nothing."""
        if self.segments and self.halves:
            return self.mask._replace(causal=False)
        return self.mask

    @property
    def ahead(self) -> bool:
        return self.tiling.ahead and self.tiling.q_stages > 1

    @property
    def first_keys(self) -> int:
        """Number of keys in a tile's first matmul."""
        return 64 if self.halves else self.tiling.block_kv

    def barrier(self, name: str) -> int:
        """First hardware barrier of a name. CUDA uses 0, Mosaic 1 to the number of warpgroups."""
        sizes = {"turn": self.tiling.warpgroups, "k": self.tiling.k_stages}
        sizes |= {"v": self.tiling.v_stages, "q": self.tiling.q_stages}
        at = self.tiling.warpgroups + 2
        for key, size in sizes.items():
            if key == name:
                return at
            at += size
        return at


class ForwardMemory(NamedTuple):
    """Shared memory. *_full: load barriers; hardware barriers free slots.

    q: also holds the output. tile: see TILE. limits: range of keys that a row sees, its segment id.
    """

    q: Any
    k: Any
    v: Any
    lse: Any
    tile: Any
    q_full: Any
    k_full: Any
    v_full: Any
    limits: Any = None
    k_ids: Any = None


class ForwardArrays(NamedTuple):
    q: Any
    k: Any
    v: Any
    ranges: Any
    limits: Any
    ids: Any
    out: Any
    lse: Any


def key_block(t: Index, tile: dict[str, jax.Array]) -> jax.Array:
    """The t-th key block visited: masked ones from the right, then from the left, then others."""
    right = tile["hi"] - tile["full_hi"]
    masked = right + tile["full_lo"] - tile["lo"]
    from_left = tile["full_lo"] - 1 - (t - right)
    others = tile["full_hi"] - 1 - (t - masked)
    return jnp.where(t < right, tile["hi"] - 1 - t, jnp.where(t < masked, from_left, others))


def load(plan: ForwardPlan, arrays: ForwardArrays, memory: ForwardMemory, counter: Ref | None):
    """Load each tile's queries, then its key and value blocks in visiting order."""
    tiling = plan.tiling
    width, everyone = tiling.block_kv, tiling.warpgroups + 1

    def load_tile(carry):
        step, loaded, number, tile = carry
        stage = lax.rem(step, tiling.q_stages)
        b, head, rows = tile["batch"], tile["head"], pl.ds(tile["row"], plan.rows)
        hopper.bar_sync(plan.barrier("q") + stage, everyone)
        for i, name in enumerate(TILE):
            memory.tile[stage, i] = tile[name]
        full = memory.q_full.at[stage]
        plgpu.copy_gmem_to_smem(arrays.q.at[b, rows, plan.heads.q + head], memory.q.at[stage], full)
        if plan.segments:
            plgpu.copy_gmem_to_smem(arrays.limits.at[b, :, rows], memory.limits.at[stage], full)
        kv_head = lax.div(head, plan.N // plan.K)

        def load_block(t, _):
            slot = lax.rem(loaded + t, tiling.k_stages)
            keys = pl.ds(key_block(t, tile) * width, width)
            full = memory.k_full.at[slot]
            hopper.bar_sync(plan.barrier("k") + slot, everyone)
            plgpu.copy_gmem_to_smem(
                arrays.k.at[b, keys, plan.heads.k + kv_head], memory.k.at[slot], full
            )
            if plan.segments:
                plgpu.copy_gmem_to_smem(arrays.ids.at[b, keys], memory.k_ids.at[slot], full)
            slot = lax.rem(loaded + t, tiling.v_stages)
            full = memory.v_full.at[slot]
            hopper.bar_sync(plan.barrier("v") + slot, everyone)
            plgpu.copy_gmem_to_smem(
                arrays.v.at[b, keys, plan.heads.v + kv_head], memory.v.at[slot], full
            )

        load_block(0, None)
        # While the first block is being loaded, find the next tile.
        number = _next_tile(plan, memory, counter, number)
        following = _read_tile(plan, arrays, jnp.minimum(number, plan.n_tiles - 1))
        blocks = tile["hi"] - tile["lo"]
        lax.fori_loop(1, blocks, load_block, None)
        return step + 1, loaded + blocks, number, following

    number = lax.axis_index("block")
    start = jnp.int32(0), jnp.int32(0), number, _read_tile(plan, arrays, number)
    step, *_ = lax.while_loop(lambda carry: carry[2] < plan.n_tiles, load_tile, start)
    stage = lax.rem(step, tiling.q_stages)
    hopper.bar_sync(plan.barrier("q") + stage, everyone)
    memory.tile[stage, 0] = -1  # no more tiles
    for _ in range(2 if plan.segments else 1):
        plgpu.barrier_arrive(memory.q_full.at[stage])


def _read_tile(plan: ForwardPlan, arrays: ForwardArrays, number: jax.Array) -> dict[str, jax.Array]:
    """Return a tile. Their order: by group of heads, then from the last rows, then by head."""
    in_group = plan.group * plan.row_blocks
    group, rest = lax.div(number, in_group), lax.rem(number, in_group)
    block = plan.row_blocks - 1 - lax.div(rest, plan.group)
    head = group * plan.group + lax.rem(rest, plan.group)
    b = lax.div(head, plan.N)
    row = (b if plan.segments else 0, block)
    ranges = [arrays.ranges[*row, i] for i in range(5)]
    return dict(zip(TILE, (b, lax.rem(head, plan.N), block * plan.rows, *ranges), strict=True))


def _next_tile(
    plan: ForwardPlan, memory: ForwardMemory, counter: Ref | None, number: jax.Array
) -> jax.Array:
    if counter is None:
        return number + plan.blocks
    return plan.blocks + hopper.take_number(counter, memory.tile.at[plan.tiling.q_stages, 0])
