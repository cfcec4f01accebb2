"""Tilings and plans of the Hopper backward kernels: over blocks of keys, over blocks of queries."""

import dataclasses
from typing import Any, NamedTuple

from jax.typing import DTypeLike

from jaxtrain_kernels import hopper
from jaxtrain_kernels.attention.hopper import common
from jaxtrain_kernels.attention.hopper.common import Heads, Mask


class BackwardTiling(NamedTuple):
    """block_q, block_kv: queries and keys per step.

    stages: number of query blocks in shared memory at once.
    split: dimension divided among the computing warpgroups: "keys" (64 each) or "dims" of the head.
        Only with two warpgroups of 64 keys can the same kernel compute dQ.
    dq_by: how dQ is summed. "tma": added to device memory, in any order. "apart": in a separate
        kernel (QueryTiling), always in the same order.
    blocks: number of CUDA blocks; None = one per multiprocessor, 0 = one per tile.
    dynamic: whether a block takes its next tile from a counter (else every `blocks`-th tile).
    l2_bytes: L2 cache for the queries and gradients that the tiles in flight share.
    """

    block_q: int = 64
    block_kv: int = 128
    stages: int = 2
    split: str = "keys"
    dq_by: str = "tma"
    blocks: int | None = None
    dynamic: bool = True
    l2_bytes: int = 24 << 20


class QueryTiling(NamedTuple):
    """Tiling of the kernel for dQ alone.

    warpgroups: number that compute, 64 queries each. block_kv: keys per step.
    k_stages, v_stages: number of key blocks and of value blocks in shared memory at once.
    together: whether dP is issued with S (else after the exponentials, which saves registers).
    blocks, dynamic: as in BackwardTiling. l2_bytes: for keys and values that tiles in flight share.
    """

    warpgroups: int = 2
    block_kv: int = 128
    k_stages: int = 2
    v_stages: int = 2
    together: bool = True
    blocks: int | None = None
    dynamic: bool = True
    l2_bytes: int = 24 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardPlan:
    """Static parameters of either kernel."""

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
    interpret: bool
    tiling: Any
    blocks: int = 0
    group: int = 1  # heads that are processed together, to share the L2 cache
    at: Heads  # where the heads begin in their arrays

    @property
    def warpgroups(self) -> int:
        """Number of warpgroups that compute."""
        raise NotImplementedError

    @property
    def heads(self) -> int:
        """Number of heads that tiles are divided by: query heads or KV heads."""
        raise NotImplementedError

    @property
    def tile_blocks(self) -> int:
        """Number of tiles per head."""
        raise NotImplementedError

    @property
    def last_first(self) -> bool:
        """Whether the last blocks have the most work (under a causal mask)."""
        raise NotImplementedError

    @property
    def barriers(self) -> dict[str, int]:
        """Number of hardware barriers of each name."""
        raise NotImplementedError

    @property
    def n_tiles(self) -> int:
        return self.B * self.heads * self.tile_blocks

    def barrier(self, name: str) -> int:
        """First hardware barrier of a name. CUDA uses 0, Mosaic 1 to the number of warpgroups."""
        names = list(self.barriers)
        before = sum(self.barriers[earlier] for earlier in names[: names.index(name)])
        return self.warpgroups + 2 + before

    @property
    def head_bytes(self) -> int:
        """Bytes of the arrays that the tiles of a head share."""
        raise NotImplementedError

    def handed_out(self) -> Any:
        """Return the plan with `blocks` and `group` set."""
        wanted = self.tiling.blocks
        blocks = hopper.sm_count() if wanted is None else wanted or self.n_tiles
        blocks = min(blocks, self.n_tiles)
        # Documents are shorter than rows, and so is what their tiles share.
        fit = self.tiling.l2_bytes * (4 if self.segments else 1) // self.head_bytes
        group = common.heads_together(self.B * self.heads, fit, self.tile_blocks, blocks)
        return dataclasses.replace(self, group=group, blocks=blocks)


class KeyPlan(BackwardPlan):
    """Plan of the kernel over blocks of keys, for dK, dV and, unless dq_by is "apart", dQ."""

    @property
    def with_dq(self) -> bool:
        return self.tiling.dq_by != "apart"

    @property
    def dv_first(self) -> bool:
        """Whether dV is issued before dS is computed, and a tile's first step is compiled apart.

        Both take registers, of which more queries or a softcap leave too few.
        """
        return self.tiling.block_q <= 64 and self.softcap is None

    @property
    def warpgroups(self) -> int:
        return 2 if self.tiling.split == "dims" else self.tiling.block_kv // 64

    @property
    def last_first(self) -> bool:
        return False

    @property
    def columns(self) -> int:
        """Number of columns of dK and dV that a warpgroup owns."""
        return self.H // 2 if self.tiling.split == "dims" else self.H

    @property
    def heads(self) -> int:
        return self.K

    @property
    def tile_blocks(self) -> int:
        return -(-self.T // self.tiling.block_kv)

    @property
    def head_bytes(self) -> int:
        # q, do and float32 dq of the query heads of one KV head.
        return self.T * self.H * 8 * (self.N // self.K)

    @property
    def q_blocks(self) -> int:
        return -(-self.T // self.tiling.block_q)

    @property
    def barriers(self) -> dict[str, int]:
        # ds: one of each warpgroup and each of two steps.
        return {"ds": 4, "kv": 1, "stage": self.tiling.stages}

    @property
    def dq_parts(self) -> tuple[int, int]:
        """Number of parts of a query block's dq, by 64 rows and by columns; one per warpgroup."""
        if self.tiling.split != "keys" or self.warpgroups != 2:
            raise ValueError(
                'dq_by="tma" needs two warpgroups of 64 keys: split="keys", block_kv=128'
            )
        rows = self.tiling.block_q // 64
        if self.warpgroups % max(rows, 1) or not rows:
            raise ValueError(
                f"block_q={self.tiling.block_q}: {self.warpgroups} warpgroups share dq in parts of "
                "64 queries; 64 or 128 would do"
            )
        return rows, self.warpgroups // rows


class QueryPlan(BackwardPlan):
    """Plan of the kernel over blocks of queries, for dQ alone."""

    @property
    def warpgroups(self) -> int:
        return self.tiling.warpgroups

    @property
    def last_first(self) -> bool:
        return True

    @property
    def rows(self) -> int:
        return 64 * self.warpgroups

    @property
    def heads(self) -> int:
        return self.N

    @property
    def tile_blocks(self) -> int:
        return -(-self.T // self.rows)

    @property
    def early(self) -> bool:
        """Whether a step already waits for the next step's keys."""
        return self.tiling.k_stages > 1

    @property
    def head_bytes(self) -> int:
        # k and v, which the query heads of one KV head share.
        return max(1, self.T * self.H * 4 * self.K // self.N)

    @property
    def barriers(self) -> dict[str, int]:
        return {"q": 1, "do": 1, "k": self.tiling.k_stages, "v": self.tiling.v_stages}
