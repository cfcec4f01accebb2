"""The Hopper backward kernels' tilings and plans: one owns blocks of keys, the other of queries."""

import dataclasses
from typing import Any, NamedTuple

from jax.typing import DTypeLike

from jaxtrain_kernels import hopper
from jaxtrain_kernels.attention.hopper.common import Heads, Mask


class BackwardTiling(NamedTuple):
    """block_q, block_kv: queries and keys a step.

    stages: query blocks that are in shared memory at once.
    split: what the computing warpgroups divide: "keys" (64 each) or "dims" of the head.
    dq_by: how dQ is summed: added to memory by "tma", in any order; or in a kernel "apart", of
        QueryTiling, always in the same order.
    blocks: CUDA blocks; None = one a multiprocessor, 0 = one a tile of work.
    dynamic: whether a block takes the next tile from a counter, or every `blocks`-th tile.
    l2_bytes: of queries and their gradients that the tiles in flight should share.
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
    """Of the kernel for dQ alone.

    warpgroups: that compute, of 64 queries each. block_kv: keys a step.
    k_stages, v_stages: blocks of keys, of values that are in shared memory at once.
    together: whether dP is issued with S, or after the exponentials, which takes fewer registers.
    blocks, dynamic: as BackwardTiling's. l2_bytes: of keys and values that tiles in flight share.
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
    """Everything that is known while tracing, for either kernel."""

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
    group: int = 1  # heads that are worked on together
    at: Heads  # where they begin in their arrays

    @property
    def warpgroups(self) -> int:
        """That compute."""
        raise NotImplementedError

    @property
    def heads(self) -> int:
        """That a tile may be of."""
        raise NotImplementedError

    @property
    def tile_blocks(self) -> int:
        """Of a head."""
        raise NotImplementedError

    @property
    def last_first(self) -> bool:
        """Whether the last blocks are the heaviest, if any."""
        raise NotImplementedError

    @property
    def barriers(self) -> dict[str, int]:
        """How many hardware barriers of each name."""
        raise NotImplementedError

    @property
    def n_tiles(self) -> int:
        return self.B * self.heads * self.tile_blocks

    def barrier(self, name: str) -> int:
        """Hardware barriers: 0 is CUDA's, and 1 up to the number of warpgroups Mosaic's."""
        names = list(self.barriers)
        before = sum(self.barriers[earlier] for earlier in names[: names.index(name)])
        return self.warpgroups + 2 + before

    @property
    def head_bytes(self) -> int:
        """What the tiles of a head share."""
        raise NotImplementedError

    def handed_out(self) -> Any:
        """The plan with `blocks` and `group`."""
        fit = max(1, self.tiling.l2_bytes // self.head_bytes)
        heads = self.B * self.heads
        group = max(d for d in range(1, min(fit, heads) + 1) if heads % d == 0)
        wanted = self.tiling.blocks
        wanted = hopper.sm_count() if wanted is None else wanted or self.n_tiles
        return dataclasses.replace(self, group=group, blocks=min(wanted, self.n_tiles))


class KeyPlan(BackwardPlan):
    """Of the kernel that owns blocks of keys: for dK and dV, and for dQ unless that is apart."""

    @property
    def with_dq(self) -> bool:
        return self.tiling.dq_by != "apart"

    @property
    def warpgroups(self) -> int:
        return 2 if self.tiling.split == "dims" else self.tiling.block_kv // 64

    @property
    def last_first(self) -> bool:
        return False

    @property
    def columns(self) -> int:
        """Of dK and dV that a warpgroup owns."""
        return self.H // 2 if self.tiling.split == "dims" else self.H

    @property
    def heads(self) -> int:
        return self.K

    @property
    def tile_blocks(self) -> int:
        return -(-self.T // self.tiling.block_kv)

    @property
    def head_bytes(self) -> int:
        # q, do and float32 dq of the query heads of a key/value head.
        return self.T * self.H * 8 * (self.N // self.K)

    @property
    def q_blocks(self) -> int:
        return -(-self.T // self.tiling.block_q)

    @property
    def barriers(self) -> dict[str, int]:
        return {"ds": 1, "kv": 1, "stage": self.tiling.stages}

    @property
    def dq_parts(self) -> tuple[int, int]:
        """Of a query block's dq, the parts of 64 rows and of columns, a warpgroup each."""
        rows = self.tiling.block_q // 64
        if self.warpgroups % max(rows, 1) or not rows:
            raise ValueError(
                f"block_q={self.tiling.block_q}: {self.warpgroups} warpgroups share dq in parts of "
                "64 queries; 64 or 128 would do"
            )
        return rows, self.warpgroups // rows


class QueryPlan(BackwardPlan):
    """Of the kernel that owns blocks of queries: for dQ alone."""

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
        """Whether a step waits for the next one's keys."""
        return self.tiling.k_stages > 1

    @property
    def head_bytes(self) -> int:
        # k and v, which the query heads of a key/value head share.
        return max(1, self.T * self.H * 4 * self.K // self.N)

    @property
    def barriers(self) -> dict[str, int]:
        return {"q": 1, "do": 1, "k": self.tiling.k_stages, "v": self.tiling.v_stages}
