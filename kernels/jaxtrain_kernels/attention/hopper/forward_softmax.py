"""Online softmax of the Hopper forward kernel, on one warpgroup's scores in registers."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf, vector

from jaxtrain_kernels import hopper
from jaxtrain_kernels.attention.hopper import common
from jaxtrain_kernels.attention.hopper.common import FLOOR, LOG2E, Mask
from jaxtrain_kernels.attention.hopper.forward_load import ForwardMemory, ForwardPlan, key_block
from jaxtrain_kernels.hopper import MATRIX, ROWS, Index, Ref

GROUP = 8  # adjacent columns; a thread holds two of them
# 2^x = 2^round(x) * 2^f for f in [-1/2, 1/2], with least-squares coefficients; relative error 1e-4.
EXP2 = (0.05517, 0.24261, 0.69325, 0.99992)
# Adding this rounds a float below 2^22 to an integer, which is then in the low bits.
ROUND = 1.5 * 2**23


class Keys(NamedTuple):
    """Keys offset .. offset + width of a tile's t-th key block."""

    t: Index
    offset: Index
    width: int

    def slice(self) -> pl.Slice:
        return pl.ds(self.offset, self.width)


class ForwardWork(NamedTuple):
    """A warpgroup's part of a tile. used: key blocks visited in this CUDA block's past tiles."""

    plan: ForwardPlan
    memory: ForwardMemory
    warpgroup: jax.Array
    stage: jax.Array
    used: jax.Array
    tile: dict[str, jax.Array]

    def blocks(self) -> jax.Array:
        return self.tile["hi"] - self.tile["lo"]

    def rows(self) -> pl.Slice:
        return pl.ds(self.warpgroup * 64, 64)

    def k_slot(self, t: Index) -> jax.Array:
        return lax.rem(self.used + t, self.plan.tiling.k_stages)

    def v_slot(self, t: Index) -> jax.Array:
        return lax.rem(self.used + t, self.plan.tiling.v_stages)

    def q(self) -> Any:
        return self.memory.q.at[self.stage, self.rows()]

    def k(self, keys: Keys) -> Ref:
        return self.memory.k.at[self.k_slot(keys.t), keys.slice()]

    def v(self, keys: Keys) -> Ref:
        return self.memory.v.at[self.v_slot(keys.t), keys.slice()]

    def first(self) -> Keys:
        """Keys of the tile's first matmul: those on the diagonal, or the whole block."""
        halves = self.plan.halves
        return Keys(0, self.warpgroup * 64 if halves else 0, self.plan.first_keys)

    def all(self, t: Index) -> Keys:
        return Keys(t, 0, self.plan.tiling.block_kv)

    def await_keys(self, t: Index) -> None:
        """Wait until key block t is loaded, if the tile has it."""
        loaded = self.memory.k_full.at[self.k_slot(t)]
        pl.when(t < self.blocks())(lambda: plgpu.barrier_wait(loaded))

    def await_values(self, t: Index) -> None:
        plgpu.barrier_wait(self.memory.v_full.at[self.v_slot(t)])

    def free(self, name: str, t: Index) -> None:
        if self.plan.interpret:
            plgpu.commit_smem()  # interpreted wgmma reads by ordinary loads
        slot = self.k_slot(t) if name == "k" else self.v_slot(t)
        hopper.bar_arrive(self.plan.barrier(name) + slot, self.plan.tiling.warpgroups + 1)


class SoftmaxState(NamedTuple):
    """Online softmax. p: probabilities of the last keys, whose values are not yet in `out`.

    peak: subtracted from the scores, in base 2: a row's maximum so far, or up to `lazy` less.
    total: partial sums of p, each over every eighth key.
    """

    out: Any
    p: jax.Array | None
    peak: jax.Array
    total: jax.Array


def no_state(plan: ForwardPlan) -> SoftmaxState:
    zeros = lambda *shape: plgpu.layout_cast(jnp.zeros(shape, jnp.float32), MATRIX)
    peak = plgpu.layout_cast(jnp.full((64,), FLOOR, jnp.float32), ROWS)
    return SoftmaxState(zeros(64, plan.H), None, peak, zeros(64, GROUP))


def softmax(
    work: ForwardWork, scores, keys: Keys, state: SoftmaxState, mask: Mask | None, free: bool = True
):
    """Return (p in float32, new peak, new total, factor of the earlier sums, its `shrinks`).

    mask: the part of the kernel's mask that hides some of these keys. free: free the key block as
    soon as it is no longer needed.
    """
    plan = work.plan
    factor = plan.scale * LOG2E
    if plan.softcap is not None:
        scores = jnp.tanh(scores * (plan.scale / plan.softcap))
        factor = plan.softcap * LOG2E
    reads_ids = mask is not None and plan.segments
    if free and not reads_ids:
        work.free("k", keys.t)
    if mask is not None:
        scores = _masked(work, scores, keys, mask)
    if free and reads_ids:
        work.free("k", keys.t)
    peak = scores.max(axis=1) * factor
    if plan.tiling.lazy:
        peak = jnp.where(peak > state.peak + plan.tiling.lazy, peak, state.peak)
    else:
        peak = jnp.maximum(peak, state.peak)
    shrink = jnp.exp2(state.peak - peak)
    p = _exp2(scores * factor - common.rows_to(peak, scores), plan if mask is None else None)
    # A sum over a row needs other threads' values, so it is taken only once per tile.
    parts = _groups(p)
    while len(parts) > 1:
        odd = parts[len(parts) // 2 * 2 :]
        parts = [a + b for a, b in zip(parts[::2], parts[1::2])] + odd
    total = state.total * common.rows_to(shrink, state.total) + parts[0]
    return p, peak, total, shrink, shrinks(plan, shrink)


def rescaled(plan: ForwardPlan, out, shrink, anywhere):
    """Multiply the rows of `out` by `shrink`; anywhere: 0 if all factors are 1 (see `shrinks`)."""
    if not plan.tiling.lazy or plan.interpret:
        return out * common.rows_to(shrink, out)

    @plgpu.inline_mgpu(
        arg_types=(MATRIX, ROWS, plgpu.Layout.WG_SPLAT),
        return_type=plgpu.ShapeDtypeStruct(out.shape, jnp.float32, MATRIX),
    )
    def scale(_, out, shrink, anywhere):
        registers = out.registers.flatten()
        zero: Any = mgpu.utils.c(0, ir.IntegerType.get_signless(32))
        taken = arith.cmpi(arith.CmpIPredicate.ne, anywhere.registers.flat[0], zero)
        branch: Any = scf.IfOp(taken, [x.type for x in registers], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            product = out * shrink.broadcast_in_dim(out.shape, (0,), out.layout)
            scf.yield_(list(product.registers.flatten()))
        with ir.InsertionPoint(branch.else_block):
            scf.yield_(list(registers))
        results = np.asarray(list(branch.results), dtype=object).reshape(out.registers.shape)
        return mgpu.FragmentedArray(_registers=results, _layout=out.layout, _is_signed=None)

    scaled: Any = scale
    return scaled(out, shrink, anywhere)


def shrinks(plan: ForwardPlan, shrink: jax.Array) -> jax.Array:
    """int32, equal in all threads of a warp: whether any row of the warp has a factor != 1."""
    if not plan.tiling.lazy or plan.interpret:
        return jnp.int32(1)

    @plgpu.inline_mgpu(
        arg_types=(ROWS,),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, plgpu.Layout.WG_SPLAT),
    )
    def vote(_, shrink):
        i32 = ir.IntegerType.get_signless(32)
        one: Any = mgpu.utils.c(1.0, shrink.mlir_dtype)
        factors = [vector.extract(x, [], [0]) for x in shrink.registers.flatten()]
        changes = [arith.cmpf(arith.CmpFPredicate.UNE, x, one) for x in factors]
        change = functools.reduce(arith.ori, changes)
        ptx = (
            "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff;"
            " selp.b32 $0, 1, 0, p; }"
        )
        anywhere: Any = mgpu.utils.inline_ptx(
            ptx, arith.extui(i32, change), result_types=i32, convergent=True
        )
        return mgpu.FragmentedArray.splat(anywhere, shape=(), is_signed=True)

    anywhere: Any = vote
    return anywhere(shrink)


def _groups(x) -> list:
    return [x[:, i : i + GROUP] for i in range(0, x.shape[1], GROUP)]


def _exp2(x, plan: ForwardPlan | None):
    """2^x, some groups of columns by polynomial if a plan is given."""
    if plan is None or plan.tiling.polynomial is None:
        return jnp.exp2(x)
    every = plan.tiling.polynomial
    groups = [
        _exp2_polynomial(part, plan) if i % every == every - 1 else jnp.exp2(part)
        for i, part in enumerate(_groups(x))
    ]
    return jnp.concatenate(groups, axis=1)


def _exp2_polynomial(x, plan: ForwardPlan):
    """2^x by multiply-adds, for x < 128 (2^-126 for x < -126)."""
    x = jnp.maximum(x, -126.0)
    rounded = x + ROUND
    if plan.interpret:
        rounded = lax.optimization_barrier(rounded)  # XLA would fold the two constants
    fraction = x - (rounded - ROUND)
    y = jnp.full_like(x, EXP2[0])
    for coefficient in EXP2[1:]:
        y = y * fraction + coefficient
    exponent = lax.bitcast_convert_type(rounded, jnp.int32) << 23
    return lax.bitcast_convert_type(lax.bitcast_convert_type(y, jnp.int32) + exponent, jnp.float32)


def _masked(work: ForwardWork, scores, keys: Keys, mask: Mask):
    """Return the scores, -inf where masked."""
    plan = work.plan
    t0 = work.tile["row"] + work.warpgroup * 64
    s0 = key_block(keys.t, work.tile) * plan.tiling.block_kv + keys.offset
    if not plan.segments:
        return _within(scores, *_limits(plan, mask, t0, s0))

    def by_limits(scores):
        start = common.rows_to(_load_rows(work, 0) - s0, _columns())
        if plan.mask.causal and not mask.causal:
            return _within(scores, start, None)
        return _within(scores, start, common.rows_to(_load_rows(work, 1) - s0, _columns()))

    def by_ids(scores):
        key_ids = work.memory.k_ids.at[work.k_slot(keys.t), keys.slice()]
        ids = _load_rows(work, 2), plgpu.load(key_ids, layout=hopper.COLUMNS)
        # Past the end of the sequence the id is 0, so the length needs no check.
        seen = common.is_visible(plan.mask, t0, s0, scores.shape, None, ids)
        return jnp.where(seen, scores, -jnp.inf)

    return lax.cond(work.tile["runs"] != 0, by_limits, by_ids, scores)


def _load_rows(work: ForwardWork, i: int) -> jax.Array:
    return plgpu.load(work.memory.limits.at[work.stage, i, work.rows()], layout=ROWS)


def _columns() -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (64, GROUP), 1, layout=MATRIX)


def _limits(plan: ForwardPlan, mask: Mask, t0: Any, s0: Any) -> tuple[Any, Any]:
    """First visible key of each row and one past its last, relative to s0; None = no limit."""
    t = plgpu.broadcasted_iota(jnp.int32, (64, GROUP), 0, layout=MATRIX) + (t0 - s0)
    start = None if mask.window is None else t - mask.window
    if mask.causal:
        return start, t + 1
    # The last block may reach beyond the sequence (causal rows inside it never see that far).
    ragged = plan.T % plan.tiling.block_kv and not plan.mask.causal
    return start, jnp.full_like(t, plan.T - s0) if ragged else None


def _within(scores, start, end):
    """Set -inf before column `start` and from column `end` on; both [64, GROUP] or None."""
    # A thread's columns in a group differ from those in the first group by a constant, so that a
    # comparison is one instruction.
    before = None if start is None else _columns() - start
    after = None if end is None else _columns() - end
    parts = []
    for i, part in enumerate(_groups(scores)):
        if before is not None:
            part = jnp.where(before >= -GROUP * i, part, -jnp.inf)
        if after is not None:
            part = jnp.where(after < -GROUP * i, part, -jnp.inf)
        parts.append(part)
    return jnp.concatenate(parts, axis=1)
