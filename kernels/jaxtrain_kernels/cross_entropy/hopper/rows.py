"""Loss and logit gradient of a chunk for Hopper, in Pallas Mosaic GPU: one read, one write.

A thread block takes whole rows. Each warpgroup loads a quarter of the row into shared memory (by
TMA), sums e = exp(logit - peak) over it and keeps the numerators of the gradient in registers. The
partial sums are reduced through shared memory. Then the gradient overwrites the logits there, and
TMA stores it in the logits' place. Blocks are persistent: meanwhile the next rows are loaded and
the last one is stored. A float8 gradient has separate shared and device memory, at half the bytes.

Arithmetic decides whether this runs at memory bandwidth: it takes a hardware tanh and one
exponential per element, some ten instructions (XLA's two passes take three such functions each).
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxtrain_kernels import hopper

LOG2E = math.log2(math.e)
WARPGROUPS = 4  # of 128 threads; each has a quarter of a row
WIDTH = 256  # TMA's longest line
STEP = 4 * WIDTH  # elements that a warpgroup processes at a time: one line per warp, 8 per thread
STAGES = 3  # rows in shared memory: one is loaded, one is computed, one is stored
SMEM_BYTES = 224 * 1024  # for these rows and one row in float8
# As in the XLA pass: up to this softcap, which replaces the maximum, exp(-2 * softcap) is not 0.
SOFTCAP_AS_MAXIMUM = 30.0
# In a step, each warp holds one line and each thread 8 contiguous elements of it.
LAYOUT = plgpu.Layout.TILED(plgpu.Tiling(((4, WIDTH), (8,))), (-3,), (-2,), -1)
# Hardware barriers: CUDA uses 0, Mosaic uses 1 up to the number of warpgroups.
ROW_BARRIER = WARPGROUPS + 1
OWN_BARRIER = WARPGROUPS + 2  # and one for each warpgroup from here


class LossPlan(NamedTuple):
    """Static parameters of the kernel."""

    rows: int
    V: int
    dtype: DTypeLike
    softcap: float | None
    z_loss: float
    valid_vocab: int
    blocks: int
    gradient_dtype: DTypeLike
    interpreted: bool

    @property
    def in_place(self) -> bool:
        """Whether the gradient overwrites the logits."""
        return self.gradient_dtype == self.dtype

    @property
    def part(self) -> int:
        """Number of columns per warpgroup."""
        return self.V // WARPGROUPS

    @property
    def capped(self) -> bool:
        """Whether the softcap replaces the row's maximum."""
        return self.softcap is not None and self.softcap <= SOFTCAP_AS_MAXIMUM


class Refs(NamedTuple):
    """Arrays; then shared memory: parts of rows [STAGES, WARPGROUPS, ...], partial sums [2, warps],
    full (barriers), and leaving: the gradient [WARPGROUPS, ...] if it is not in place.
    """

    labels: Any
    weights: Any
    logits: Any
    nll: Any
    lse: Any
    gradient: Any
    parts: Any
    partial: Any
    full: Any
    leaving: Any = None


class LossRow(NamedTuple):
    """Label and weight of a row, which are read before its logits arrive."""

    label: jax.Array
    weight: jax.Array


def unsupported_reason(V: int, dtype: DTypeLike, fp8: bool = False) -> str | None:
    """Why a vocabulary of V columns is unsupported; None = supported. fp8: float8 gradient."""
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"needs bfloat16 or float16, got {dtype}"
    if V % (WARPGROUPS * STEP):
        return f"needs a vocabulary in multiples of {WARPGROUPS * STEP}, got {V}"
    if STAGES * V * 2 + fp8 * V > SMEM_BYTES:
        return f"needs {STAGES} rows in {SMEM_BYTES} bytes of shared memory, a vocabulary of {V}"
    return None


@hopper.jit_kernel("softcap", "z_loss", "valid_vocab", "gradient_dtype", "blocks", "interpret")
def loss_rows(
    logits_CV: Float[Array, "C V"],
    labels_C: Int[Array, "C"],
    weights_C: Float[Array, "C"],
    *,
    softcap: float | None,
    z_loss: float,
    valid_vocab: int | None,
    gradient_dtype: DTypeLike | None = None,
    blocks: int | None = None,
    interpret: hopper.Interpret = False,
) -> tuple[Float[Array, "C"], Float[Array, "C"], Float[Array, "C V"]]:
    """Return (nll_C, lse_C) in float32, and the logits' gradient, which overwrites the logits.

    The gradient is that of sum_n weights_n * (nll_n + z_loss * lse_n^2) with respect to the logits
    before the softcap. `unsupported_reason` lists the limits. gradient_dtype: a float8 dtype, which
    saturates and has a separate array; None = the logits'. blocks: number of thread blocks; None =
    one per multiprocessor. interpret: plgpu.InterpretGPUParams, to run on a CPU.
    """
    C, V = logits_CV.shape
    blocks, dtype = min(blocks or hopper.sm_count(), C), logits_CV.dtype
    options = softcap, z_loss, valid_vocab or V
    plan = LossPlan(C, V, dtype, *options, blocks, gradient_dtype or dtype, bool(interpret))
    lines = (WARPGROUPS, plan.part // WIDTH, WIDTH)
    f32_C = jax.ShapeDtypeStruct((C,), jnp.float32)
    scratch: dict[str, Any] = dict(
        parts=plgpu.SMEM((STAGES, *lines), plan.dtype),
        partial=plgpu.SMEM((2, 4 * WARPGROUPS), jnp.float32),
        full=plgpu.Barrier(num_barriers=STAGES * WARPGROUPS),
    )
    out_type = [f32_C, f32_C]
    logits: Any = logits_CV.reshape(C, *lines)
    if plan.in_place:
        logits = jax.new_ref(logits)
    else:
        scratch["leaving"] = plgpu.SMEM(lines, plan.gradient_dtype)
        out_type.append(jax.ShapeDtypeStruct((C, *lines), plan.gradient_dtype))

    def loss_rows(labels, weights, logits, nll, lse, gradient=None, **memory):
        gradient = logits if gradient is None else gradient
        _block(plan, Refs(labels, weights, logits, nll, lse, gradient, **memory))

    nll_C, lse_C, *apart = hopper.pallas_kernel(
        loss_rows,
        out_type=out_type,
        scratch_types=scratch,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        compiler_params=hopper.compiler_params(),
        interpret=interpret,
    )(labels_C.astype(jnp.int32), weights_C.astype(jnp.float32), logits)
    gradient = apart[0] if apart else jax.freeze(logits)
    return nll_C, lse_C, gradient.reshape(C, V)


def _block(plan: LossPlan, refs: Refs):
    """One CUDA block, which processes its rows one after another."""
    block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    rows = lax.div(plan.rows - 1 - block, plan.blocks) + 1

    def load(t):
        @pl.when(t < rows)
        def _():
            slot = lax.rem(t, STAGES)
            plgpu.copy_gmem_to_smem(
                refs.logits.at[block + t * plan.blocks, warpgroup],
                refs.parts.at[slot, warpgroup],
                refs.full.at[slot * WARPGROUPS + warpgroup],
            )

    def read(t):
        row = block + jnp.minimum(t, rows - 1) * plan.blocks
        return LossRow(refs.labels[row], refs.weights[row])

    def visit(t, row):
        after = read(t + 1)  # one row ahead, to hide the latency
        slot = lax.rem(t, STAGES)
        part, at = refs.parts.at[slot, warpgroup], block + t * plan.blocks
        result = part if plan.in_place else refs.leaving.at[warpgroup]
        plgpu.barrier_wait(refs.full.at[slot * WARPGROUPS + warpgroup])
        _row(plan, refs, part, result, row, at, lax.rem(t, 2))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(result, refs.gradient.at[at, warpgroup])
        if plan.in_place:
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the previous row is stored
        load(t + STAGES - 1 if plan.in_place else t + STAGES)
        return after

    for t in range(STAGES - plan.in_place):
        load(t)
    lax.fori_loop(0, rows, visit, read(0))
    plgpu.wait_smem_to_gmem(0)


def _row(plan: LossPlan, refs: Refs, part: Any, result: Any, row: LossRow, at: Any, parity: Any):
    """Replace a warpgroup's part of a row by its gradient."""
    warpgroup = lax.axis_index("warpgroup")
    label = jnp.clip(row.label, 0, plan.V - 1)
    column_of_label = jnp.clip(label - warpgroup * plan.part, 0, plan.part - 1)
    line, column = lax.div(column_of_label, WIDTH), lax.rem(column_of_label, WIDTH)
    # Read before the warpgroups synchronize: after that the part is overwritten.
    label_raw = part[line, column].astype(jnp.float32)
    peak: Any = plan.softcap
    if not plan.capped:
        peak = _over_row(refs, _largest(plan, part), jnp.maximum, 0)
        parity = 1
        peak = _cap(plan, peak)
    kept, sums = _numerators(plan, part, peak)
    if not plan.in_place:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous row is stored
    total = _over_row(refs, sums, jnp.add, parity)
    lse = jnp.log(total) + peak
    factor = row.weight * (1 + 2 * plan.z_loss * lse) / total
    if not plan.in_place:
        less = jnp.where(row.label == label, row.weight, 0.0)
        less = less * _exponential(plan, label_raw, peak)[1]
        here = (label >= warpgroup * plan.part) & (label < (warpgroup + 1) * plan.part)
        wanted = jnp.where(here, column_of_label, -1)
    for n, numerator in enumerate(kept):
        gradient = numerator * factor
        if not plan.in_place:
            gradient = _saturated(plan, gradient - _only_at(wanted - n * STEP, less))
        result[pl.ds(4 * n, 4)] = gradient.astype(plan.gradient_dtype)

    @pl.when((label >= warpgroup * plan.part) & (label < (warpgroup + 1) * plan.part))
    def _():
        if plan.in_place:
            e, slope = _exponential(plan, label_raw, peak)
            gradient = slope * (e * factor - jnp.where(row.label == label, row.weight, 0.0))
            hopper.bar_sync(OWN_BARRIER + warpgroup, 1)  # after the stores above
            part[line, column] = gradient.astype(plan.dtype)
        refs.nll[at] = lse - _cap(plan, label_raw)
        refs.lse[at] = lse


def _only_at(index: Any, value: Any) -> Any:
    """`value` at `index` of a warpgroup's step, 0 elsewhere; all 0 if out of range.

    Made by comparing indices, because a single float8 value cannot be stored.
    """
    shape = (4, WIDTH)
    line, column = (plgpu.broadcasted_iota(jnp.int32, shape, d, layout=LAYOUT) for d in (0, 1))
    return jnp.where(line * WIDTH + column == index, value, 0.0)


def _saturated(plan: LossPlan, gradient: Any) -> Any:
    """Clip to the dtype's range; on the device the cast itself saturates."""
    if not plan.interpreted:
        return gradient
    largest = float(jnp.finfo(plan.gradient_dtype).max)
    return jnp.minimum(jnp.maximum(gradient, -largest), largest)


def _numerators(plan: LossPlan, part: Any, peak: Any) -> tuple[list, Any]:
    """Per step, exp(logit - peak) times the softcap's derivative; per warp, the sums of the exp."""
    kept: list = []
    total: Any = None
    for n in range(plan.part // STEP):
        e, slope = _exponential(plan, plgpu.load(part.at[pl.ds(4 * n, 4)], layout=LAYOUT), peak)
        if (inside := _inside(plan, n)) is not None:
            e = jnp.where(inside, e, 0.0)
        total = e if total is None else total + e
        kept.append(e if plan.softcap is None else e * slope)
    return kept, jnp.sum(total, 1)


def _largest(plan: LossPlan, part: Any) -> Any:
    """Largest logit of each warp before the softcap, which is monotonic."""
    most: Any = None
    for n in range(plan.part // STEP):
        x = plgpu.load(part.at[pl.ds(4 * n, 4)], layout=LAYOUT).astype(jnp.float32)
        if (inside := _inside(plan, n)) is not None:
            x = jnp.where(inside, x, -jnp.inf)
        most = x if most is None else jnp.maximum(most, x)
    return jnp.max(most, 1)


def _exponential(plan: LossPlan, raw: Any, peak: Any) -> tuple[Any, Any]:
    """exp(logit after the softcap - peak) in float32, and the softcap's derivative."""
    x = raw.astype(jnp.float32)
    if plan.softcap is None:
        return jnp.exp2(x * LOG2E - peak * LOG2E), 1.0
    t = jnp.tanh(x * (1 / plan.softcap))
    return jnp.exp2(t * (plan.softcap * LOG2E) - peak * LOG2E), 1 - t * t


def _cap(plan: LossPlan, x: Any) -> Any:
    return x if plan.softcap is None else plan.softcap * jnp.tanh(x / plan.softcap)


def _inside(plan: LossPlan, n: int) -> Any:
    """Mask of the columns of a warpgroup's step that are not padding; None if none can be."""
    first = (WARPGROUPS - 1) * plan.part + n * STEP  # of the last warpgroup
    if first + STEP <= plan.valid_vocab:
        return None
    shape = (4, WIDTH)
    line, column = (plgpu.broadcasted_iota(jnp.int32, shape, d, layout=LAYOUT) for d in (0, 1))
    begin = lax.axis_index("warpgroup") * plan.part + n * STEP
    return line * WIDTH + column < plan.valid_vocab - begin


def _over_row(refs: Refs, by_warp: Any, operation: Any, which: Any) -> Any:
    """Reduce one value per warp (4 per warpgroup) over the whole row, for all threads.

    which: one of two buffers; consecutive calls need different ones.
    """
    refs.partial[which, pl.ds(4 * lax.axis_index("warpgroup"), 4)] = by_warp
    hopper.bar_sync(ROW_BARRIER, WARPGROUPS)
    parts = [refs.partial[which, n] for n in range(4 * WARPGROUPS)]
    while len(parts) > 1:
        parts = [operation(a, b) for a, b in zip(parts[::2], parts[1::2])]
    return parts[0]
