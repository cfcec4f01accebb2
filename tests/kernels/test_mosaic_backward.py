"""The Hopper backward kernel: numbers in interpret mode, lowering for CUDA without a GPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtrain_kernels.attention import Call, reference
from jaxtrain_kernels.attention.hopper import backward
from jaxtrain_kernels.attention.hopper import backward_inline as inline
from jaxtrain_kernels.attention.hopper import backward_keys as keys
from jaxtrain_kernels.attention.hopper.backward_plan import BackwardTiling, KeyPlan, QueryTiling
from jaxtrain_kernels.attention.hopper.backward_stats import NO_KEYS, row_stats
from jaxtrain_kernels.attention.hopper.common import Mask, heads_together
from jaxtrain_kernels.dispatch import on_target
from jaxtrain_kernels.shapes import AttentionShape

# The mode that knows bar.sync and bar.arrive, named barriers of the hardware.
INTERPRET = plgpu.InterpretGPUParams(
    inline_mgpu="_hack_model_inline_mgpu_tokamax", detect_races=True
)
D64 = BackwardTiling(block_q=128, blocks=2)
D128 = BackwardTiling(blocks=2)

SHAPES = (
    (AttentionShape("full_ragged", 1, 203, 1, 1, 128, causal=False), D128),
    (AttentionShape("gqa_softcap", 1, 130, 4, 2, 64, softcap=2.0), D64._replace(stages=3)),
    (AttentionShape("window_itself", 1, 130, 1, 1, 64, window=0), D64._replace(blocks=0)),
    (
        AttentionShape("packed_window", 1, 200, 2, 1, 96, True, 50, 3.0, (100, 17, 40)),
        D128._replace(stages=1),
    ),
    (AttentionShape("packed_full", 1, 200, 1, 1, 64, False, documents=(100, 17)), D64),
    (AttentionShape("two_stages", 1, 260, 1, 1, 128), D128),
    (
        AttentionShape("large_heads", 1, 130, 2, 1, 256),
        BackwardTiling(block_kv=64, split="dims", dq_by="apart", blocks=2),
    ),
    (AttentionShape("tiny", 2, 3, 2, 1, 64), D64),
    # Tiles of one step, of two and of more, one after another in a block.
    (AttentionShape("one_block", 2, 260, 1, 1, 128, window=0), D128._replace(blocks=1)),
    (
        AttentionShape("one_block_packed", 1, 300, 2, 1, 64, documents=(40, 1, 120, 100)),
        D64._replace(blocks=1),
    ),
)
Q = QueryTiling(blocks=2)
# With dQ in a kernel of its own.
APART = (
    (AttentionShape("causal_window", 1, 200, 1, 1, 64, window=70), D64, Q),
    (AttentionShape("all", 1, 130, 2, 1, 96, True, 50, 3.0, (60, 17, 40)), D128, Q),
    (
        AttentionShape("large_heads", 1, 130, 1, 1, 256, documents=(50, 75)),
        BackwardTiling(block_kv=64, split="dims", blocks=2),
        Q._replace(block_kv=64, k_stages=1, v_stages=1),
    ),
)


def options(shape):
    return dict(
        causal=shape.causal, window=shape.window, softcap=shape.softcap, scale=shape.H**-0.5
    )


def inputs(shape, dtype: Any):
    rng = np.random.default_rng(0)
    q, dout = rng.standard_normal((2, shape.B, shape.T, shape.N, shape.H))
    k, v = rng.standard_normal((2, shape.B, shape.T, shape.K, shape.H))
    dlse = jnp.asarray(rng.standard_normal((shape.B, shape.N, shape.T)), jnp.float32)
    return [jnp.asarray(x, dtype) for x in (q, k, v, dout)] + [dlse]


def assert_equals_reference(shape, tiling, ids=None, dtype: Any = jnp.bfloat16, **more):
    """Returns what gave the gradients: a function and its arguments, and the gradients."""
    q, k, v, dout, dlse = inputs(shape, dtype)
    if ids is None and shape.documents:
        ids = jnp.asarray(shape.segment_ids_BT())
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    call = Call(segment_ids_BT=ids, **options(shape))

    @jax.jit
    def by_reference(dout, dlse, *qkv):
        (out, lse), pull = jax.vjp(lambda *qkv: reference.attention(*qkv, call), *qkv)
        dlse = jnp.where(lse == -jnp.inf, 0, dlse)
        return out, lse, dlse, pull((dout.astype(jnp.float32), dlse))

    out, lse, dlse, expected = by_reference(dout, dlse, *wide)
    run = functools.partial(
        backward.backward, tiling=tiling, interpret=INTERPRET, **options(shape), **more
    )
    run, arrays = jax.jit(run), (q, k, v, ids, out.astype(dtype), lse, dout, dlse)
    got = run(*arrays)
    for name, x, y in zip(("dq", "dk", "dv"), got, expected):
        assert x.dtype == dtype
        error = np.abs(np.asarray(x, np.float32) - y)
        assert error.max() < 0.008 * np.abs(y).max() + 0.005, name
        if ids is not None:
            assert (x[ids == 0] == 0).all(), name
    return run, arrays, got


# The rest are of the same kinds, and slow in interpret mode.
@pytest.mark.parametrize("case", SHAPES, ids=lambda case: case[0].name)
@pytest.mark.slow
def test_equals_reference_without_races(case, capfd):
    assert_equals_reference(*case)
    assert "RACE" not in "".join(capfd.readouterr())


@pytest.mark.slow
@pytest.mark.parametrize("case", APART, ids=lambda case: case[0].name)
def test_deterministic_equals_reference_bit_for_bit_again_without_races(case, capfd):
    shape, tiling, query_tiling = case
    run, arrays, first = assert_equals_reference(
        shape, tiling, deterministic=True, query_tiling=query_tiling
    )
    if shape.name == "causal_window":
        for x, y in zip(first, run(*arrays)):
            np.testing.assert_array_equal(x, y)
    assert "RACE" not in "".join(capfd.readouterr())


@pytest.mark.slow
def test_float16_equals_reference():
    assert_equals_reference(AttentionShape("", 1, 130, 1, 1, 64), D64, dtype=jnp.float16)


@pytest.mark.slow
def test_ids_in_any_order_equal_reference():
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 4, (1, 200)), jnp.int32)
    assert_equals_reference(AttentionShape("", 1, 200, 1, 1, 64), D64, ids)


@pytest.mark.parametrize("documents", [(), (100, 17), (20,)])
@pytest.mark.parametrize("mask", [Mask(True, None), Mask(True, 70), Mask(False, None)])
@pytest.mark.quick("mask1-documents1", "mask2-documents2")
def test_query_ranges_cover_what_is_visible(mask, documents):
    shape = AttentionShape("", 2, 333, 1, 1, 64, documents=documents)
    ids = shape.segment_ids_BT()
    q = jnp.zeros((2, 333, 1, 64))
    tiling = BackwardTiling(block_q=64, block_kv=128)
    plan = backward.make_backward_plan(KeyPlan, q, q, ids, mask, None, 1.0, tiling, False)
    ranges = backward.query_ranges(plan, None if ids is None else jnp.asarray(ids))
    ranges = np.broadcast_to(ranges, (2, 3, 4))
    t, s = np.arange(384)[:, None], np.arange(384)[None]
    seen = np.broadcast_to((s < 333) & ((s <= t) | (not mask.causal)), (2, 384, 384)).copy()
    if mask.window is not None:
        seen &= s >= t - mask.window
    if ids is not None:
        wide = np.pad(ids, ((0, 0), (0, 384 - 333)))
        seen &= (wide[:, :, None] == wide[:, None]) & (wide[:, :, None] > 0)
    for b, j in np.ndindex(2, 3):
        blocks = seen[b, :, j * 128 : (j + 1) * 128].reshape(6, 64, 128)
        # What queries beyond the sequence see does not matter.
        some = blocks.reshape(6, -1)[:, :].any(1) & (np.arange(6) * 64 < 333)
        lo, full_lo, full_hi, hi = ranges[b, j]
        i = np.arange(6)
        assert lo < hi <= 6 and lo <= full_lo
        assert not some[(i < lo) | (i >= hi)].any()
        assert blocks[full_lo:full_hi].all()
        assert hi - lo <= max(1, np.ptp(i[some]) + 1 if some.any() else 1)


ALL = AttentionShape("all", 2, 2049, 12, 4, 128, True, 768, 15.0, documents=(700, 900))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (AttentionShape("causal", 16, 2048, 12, 12, 64), jnp.float16),
        (AttentionShape("full_ragged", 1, 333, 4, 2, 96, causal=False), jnp.bfloat16),
        (ALL, jnp.bfloat16),
        (AttentionShape("large_heads", 1, 333, 4, 2, 256, causal=False), jnp.float16),
    ],
    ids=lambda x: getattr(x, "name", None),
)
@pytest.mark.slow
def test_lowers_for_hopper(shape, dtype):
    struct = jax.ShapeDtypeStruct
    q, k = (struct((shape.B, shape.T, n, shape.H), dtype) for n in (shape.N, shape.K))
    lse = struct((shape.B, shape.N, shape.T), jnp.float32)
    ids = struct((shape.B, shape.T), jnp.int32) if shape.documents else None
    run = functools.partial(backward.backward, **options(shape))
    with on_target("cuda", (9, 0)):
        traced = jax.jit(run).trace(q, k, k, ids, q, lse, q, lse)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


def lower_anew(head_dim):
    struct = jax.ShapeDtypeStruct
    q, lse = struct((1, 264, 1, head_dim), jnp.bfloat16), struct((1, 1, 264), jnp.float32)
    run = functools.partial(backward.backward.__wrapped__, causal=True, window=None, softcap=None)
    with on_target("cuda", (9, 0)):
        traced = jax.jit(functools.partial(run, scale=0.1)).trace(q, q, q, None, q, lse, q, None)
        traced.lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_products_of_queries_cover_the_head_dim_and_start_without_zeros(head_dim, monkeypatch):
    issued = []
    inner = inline._asm

    def record(result, arguments, ptx, constraints):
        if "wgmma.mma" in ptx:
            issued.append((ptx.split("p, ")[1][0], ptx.split("m64n")[1].split("k")[0]))
        return inner(result, arguments, ptx, constraints)

    monkeypatch.setattr(inline, "_asm", record)
    lower_anew(head_dim)
    width, steps = ("128", 1) if head_dim == 64 else ("64", 2)  # the first step is compiled apart
    one = [("0", width), *[("1", width)] * (head_dim // 16 - 1)]
    assert issued == 2 * steps * one  # S and dP


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.slow
def test_deterministic_lowers_to_two_kernels_without_a_float32_dq(head_dim):
    struct = jax.ShapeDtypeStruct
    q, k = (struct((2, 264, n, head_dim), jnp.bfloat16) for n in (4, 2))
    lse, ids = struct((2, 4, 264), jnp.float32), struct((2, 264), jnp.int32)
    run = functools.partial(
        backward.backward,
        causal=True,
        window=100,
        softcap=15.0,
        scale=0.1,
        deterministic=True,
    )
    with on_target("cuda", (9, 0)):
        traced = jax.jit(run).trace(q, k, k, ids, q, lse, q, lse)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "custom_call @mosaic_gpu" in line]
    assert len(calls) == 2
    outputs = "".join(line.split("->")[-1] for line in calls)
    assert f"2x264x4x{head_dim}xbf16" in outputs and f"x{head_dim}xf32" not in outputs


@pytest.mark.parametrize("H, T", [(64, 192), (128, 64), (256, 64), (96, 70)])
@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.slow
def test_row_stats(H, T, with_dlse):
    B, N, rows = 2, 3, 64
    shape = AttentionShape("", B, T, N, N, H)
    out, _, _, dout, dlse = inputs(shape, jnp.bfloat16)
    lse = jax.random.normal(jax.random.key(0), (B, N, T)).at[1, 2, 5].set(-jnp.inf)
    given = out, lse, dout, dlse if with_dlse else None, rows
    got, zeros = row_stats(*given, zeros=True, interpret=INTERPRET)
    assert zeros is None if T % rows else zeros.shape == (B * N * T * H,) and (zeros == 0).all()
    (alone,) = row_stats(*given, interpret=INTERPRET)
    np.testing.assert_array_equal(alone, got)
    got = np.asarray(got)
    assert got.shape == (B, N, 2, T + -T % rows)
    delta = np.einsum("btnh,btnh->bnt", *(np.asarray(x, np.float64) for x in (out, dout)))
    delta = delta - (np.asarray(dlse) if with_dlse else 0)
    delta[1, 2, 5] = 0
    np.testing.assert_allclose(got[:, :, 1, :T], delta, rtol=1e-5, atol=1e-4)
    expected = np.asarray(lse) * np.log2(np.e)
    expected[1, 2, 5] = NO_KEYS
    np.testing.assert_allclose(got[:, :, 0, :T], expected, rtol=1e-6)
    assert (got[:, :, 0, T:] == NO_KEYS).all() and (got[:, :, 1, T:] == 0).all()


def key_plan(tiling, H):
    q = jnp.zeros((1, 512, 1, H), jnp.bfloat16)
    mask = Mask(True, None)
    return backward.make_backward_plan(KeyPlan, q, q, None, mask, None, 1.0, tiling, False)


@pytest.mark.parametrize("head_dim, finish", [(64, "WCCW"), (128, "WCWCW")])
def test_outputs_are_staged_once_earlier_stores_have_read_their_memory(
    head_dim, finish, monkeypatch
):
    """Which the interpreter does not show: there dq and the outputs have memory of their own."""
    events = []

    def recorded(letter, inner):
        return lambda *args, **more: events.append(letter) or inner(*args, **more)

    for name, letter in (("wait_smem_to_gmem", "W"), ("copy_smem_to_gmem", "C")):
        monkeypatch.setattr(plgpu, name, recorded(letter, getattr(plgpu, name)))
    lower_anew(head_dim)
    assert "".join(events).endswith(
        "CCC" + finish
    )  # after dq of the loop and of the last two steps


@pytest.mark.parametrize(
    "heads, fit, tiles, blocks, together",
    [
        (8, 0, 64, 132, 2),  # one head fits, but has fewer tiles than there are CUDA blocks
        (8, 0, 128, 132, 1),
        (32, 0, 32, 132, 4),
        (48, 13, 64, 132, 12),
        (48, 100, 64, 132, 48),
        (6, 1, 16, 132, 6),
    ],
)
def test_heads_are_scheduled_together_that_occupy_the_gpu_or_fit_its_cache(
    heads, fit, tiles, blocks, together
):
    assert heads_together(heads, fit, tiles, blocks) == together


def test_grouped_queries_issue_dv_first_and_a_softcap_does_not():
    q, k = (jax.ShapeDtypeStruct((1, 512, n, 128), jnp.bfloat16) for n in (4, 2))
    make = lambda softcap: backward.make_backward_plan(
        KeyPlan, q, k, None, Mask(True, None), softcap, 1.0, BackwardTiling(), False
    )
    assert make(None).dv_first and not make(15.0).dv_first


@pytest.mark.parametrize("documents, together", [(False, 2), (True, 8)])
def test_documents_share_less_of_the_cache(documents, together):
    q = jax.ShapeDtypeStruct((8, 4096, 1, 128), jnp.bfloat16)
    tiling = BackwardTiling(blocks=16, l2_bytes=10 << 20)
    ids = q if documents else None
    plan = backward.make_backward_plan(
        KeyPlan, q, q, ids, Mask(True, None), None, 1.0, tiling, False
    )
    assert plan.group == together


@pytest.mark.parametrize("block_q", [32, 192, 256])
def test_warpgroups_that_cannot_share_dq_are_refused(block_q):
    with pytest.raises(ValueError, match=f"block_q={block_q}: 2 warpgroups"):
        _ = key_plan(BackwardTiling(block_q=block_q), 64).dq_parts


@pytest.mark.parametrize("change", [{"block_kv": 64}, {"block_kv": 192}, {"split": "dims"}])
def test_dq_in_the_same_kernel_needs_two_warpgroups_of_keys(change):
    with pytest.raises(ValueError, match="two warpgroups of 64 keys"):
        _ = key_plan(BackwardTiling(**change), 128).dq_parts


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_hardware_barriers_are_sixteen_and_apart(head_dim):
    plan = key_plan(backward.default_tiling(head_dim)._replace(stages=3), head_dim)
    # CUDA uses 0, Mosaic 1 to 3.
    numbers = [0, 1, 2, 3]
    for name, count in plan.barriers.items():
        numbers += range(plan.barrier(name), plan.barrier(name) + count)
    assert len(set(numbers)) == len(numbers) and max(numbers) < 16
    assert plan.barriers["ds"] == 2 * plan.warpgroups


@pytest.mark.parametrize("block_q, head_dim", [(64, 64), (128, 64), (64, 128)])
def test_outputs_replace_the_warpgroups_own_dq_alone(block_q, head_dim):
    plan = key_plan(BackwardTiling(block_q=block_q), head_dim)
    dq, outputs = keys._scratch(plan)["dq_outputs"].refs
    size = lambda ref: np.prod(ref.shape) * jnp.dtype(ref.dtype).itemsize
    assert size(outputs) == size(dq) and outputs.shape[0] == dq.shape[0] == plan.warpgroups
