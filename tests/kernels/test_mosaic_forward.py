"""The Hopper forward kernel: numbers in interpret mode, lowering for CUDA without a GPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtrain_kernels.attention import Call, reference
from jaxtrain_kernels.attention.hopper import forward
from jaxtrain_kernels.attention.hopper.common import Mask, block_ranges
from jaxtrain_kernels.attention.hopper.forward import ForwardTiling
from jaxtrain_kernels.dispatch import on_target
from jaxtrain_kernels.shapes import AttentionShape

# The mode that knows bar.sync and bar.arrive, named barriers of the hardware.
INTERPRET = plgpu.InterpretGPUParams(
    inline_mgpu="_hack_model_inline_mgpu_tokamax", detect_races=True
)
SMALL = ForwardTiling(block_kv=64, k_stages=2, blocks=2, turns=True)
HALVES = SMALL._replace(block_kv=128)

SHAPES = (
    (AttentionShape("full_ragged", 1, 203, 1, 1, 64, causal=False), SMALL),
    (AttentionShape("gqa_softcap", 1, 130, 4, 2, 32, softcap=2.0), SMALL._replace(k_stages=3)),
    (
        AttentionShape("window_itself", 1, 130, 1, 1, 64, window=0),
        SMALL._replace(turns=False, q_stages=1),
    ),
    (
        AttentionShape("packed_window", 1, 200, 2, 1, 96, True, 50, 3.0, (100, 17, 40)),
        SMALL._replace(warpgroups=3, block_kv=128),
    ),
    (AttentionShape("packed_full", 1, 200, 1, 1, 64, False, documents=(100, 17)), SMALL),
    (AttentionShape("tiny", 2, 3, 2, 1, 64), SMALL._replace(blocks=0)),
    (AttentionShape("halves", 1, 330, 2, 1, 64), HALVES._replace(k_stages=3)),
    (AttentionShape("halves_narrow", 1, 330, 1, 1, 64, window=70), HALVES._replace(turns=False)),
    (AttentionShape("halves_edge", 1, 650, 1, 1, 32, window=256), HALVES),
    (
        AttentionShape("halves_edge3", 1, 400, 1, 1, 32, window=384),
        HALVES._replace(warpgroups=3, block_kv=192, blocks=1),
    ),
    (AttentionShape("halves_packed", 1, 330, 1, 1, 64, documents=(100, 17, 150)), HALVES),
    (AttentionShape("plain", 1, 256, 2, 2, 64), SMALL._replace(ahead=False, lazy=0)),
    (AttentionShape("polynomial", 1, 330, 1, 1, 64), SMALL._replace(polynomial=2)),
)


def inputs(shape, dtype: Any = jnp.bfloat16):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((shape.B, shape.T, shape.N, shape.H))
    k, v = rng.standard_normal((2, shape.B, shape.T, shape.K, shape.H))
    ids = shape.segment_ids_BT()
    return [jnp.asarray(x, dtype) for x in (q, k, v)] + [None if ids is None else jnp.asarray(ids)]


def options(shape):
    return dict(
        causal=shape.causal, window=shape.window, softcap=shape.softcap, scale=shape.H**-0.5
    )


def assert_equals_reference(shape, tiling, ids=None, interpret=INTERPRET, dtype=jnp.bfloat16):
    q, k, v, shape_ids = inputs(shape, dtype)
    ids = shape_ids if ids is None else ids
    run = functools.partial(forward.forward, tiling=tiling, interpret=interpret, **options(shape))
    out, lse = jax.jit(run)(q, k, v, ids)
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    call = Call(segment_ids_BT=ids, **options(shape))
    expected, expected_lse = jax.jit(lambda *qkv: reference.attention(*qkv, call))(*wide)
    assert out.dtype == dtype and lse.dtype == jnp.float32
    np.testing.assert_allclose(out.astype(jnp.float32), expected, atol=0.015)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5, rtol=1e-5)


# The rest are of the same kinds, and slow in interpret mode.
@pytest.mark.parametrize("case", SHAPES, ids=lambda case: case[0].name)
@pytest.mark.slow
def test_equals_reference_without_races(case, capfd):
    assert_equals_reference(*case)
    assert "RACE" not in "".join(capfd.readouterr())


@pytest.mark.slow
def test_float16_equals_reference():
    assert_equals_reference(AttentionShape("", 1, 130, 1, 1, 64), SMALL, dtype=jnp.float16)


@pytest.mark.slow
def test_ids_in_any_order_equal_reference():
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 4, (1, 200)), jnp.int32)
    assert_equals_reference(AttentionShape("", 1, 200, 1, 1, 64), HALVES, ids)


@pytest.mark.slow
def test_ids_in_runs_out_of_order_equal_reference():
    ids = jnp.asarray(np.repeat([3, 1, 0, 2, 3], [90, 60, 10, 100, 30])[None], jnp.int32)
    assert_equals_reference(AttentionShape("", 1, 290, 1, 1, 64), HALVES, ids)


@pytest.mark.slow
def test_growing_maxima_rescale():
    """Later keys' scores are far larger than earlier ones', by more than `lazy` allows for."""
    shape = AttentionShape("", 1, 256, 1, 1, 64, causal=False)
    q, k, v, _ = inputs(shape)
    k = (k * jnp.linspace(40, 1, 256)[None, :, None, None]).astype(k.dtype)
    run = functools.partial(forward.forward, tiling=SMALL, interpret=INTERPRET, **options(shape))
    out, lse = jax.jit(run)(q, k, v)
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    expected, expected_lse = reference.attention(*wide, Call(**options(shape)))
    np.testing.assert_allclose(out.astype(jnp.float32), expected, atol=0.02)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("documents", [(), (100, 17)])
@pytest.mark.parametrize("mask", [Mask(True, None), Mask(True, 70), Mask(False, None)])
def test_block_ranges_cover_what_is_visible(mask, documents):
    shape, rows, columns = AttentionShape("", 2, 333, 1, 1, 8, documents=documents), 128, 64
    ids = shape.segment_ids_BT()
    t, s = np.arange(shape.T)[:, None], np.arange(384)[None]
    seen = np.broadcast_to((s < shape.T) & ((s <= t) | (not mask.causal)), (2, shape.T, 384)).copy()
    if mask.window is not None:
        seen &= s >= t - mask.window
    if ids is not None:
        wide = np.pad(ids, ((0, 0), (0, 384 - shape.T)))
        seen &= (ids[:, :, None] == wide[:, None]) & (ids[:, :, None] > 0)
    ranges = block_ranges(mask, shape.T, rows, columns, None if ids is None else jnp.asarray(ids))
    lo, full_lo, full_hi, hi = (np.broadcast_to(x, (2, 3)) for x in ranges)
    for b in range(2):
        for i in range(3):
            blocks = seen[b, i * rows : (i + 1) * rows].reshape(-1, 6, columns)
            some, every = blocks.any((0, 2)), blocks.all((0, 2))
            j = np.arange(6)
            assert not some[(j < lo[b, i]) | (j >= hi[b, i])].any()
            assert every[full_lo[b, i] : full_hi[b, i]].all()
            assert lo[b, i] <= full_lo[b, i] <= full_hi[b, i] < hi[b, i]
            visited = hi[b, i] - lo[b, i]
            assert visited <= max(1, np.ptp(np.append(j[some], -1)[:-1]) + 1 if some.any() else 1)


@pytest.mark.parametrize("mask", [Mask(True, None), Mask(False, None), Mask(True, 230)])
def test_full_blocks_of_documents_are_all_that_need_no_mask(mask):
    lengths, side = (500, 12, 300), 64
    ids = np.pad(np.repeat(np.arange(1, 4), lengths), (0, 960 - sum(lengths)))
    ranges = block_ranges(mask, 960, side, side, jnp.asarray(ids)[None])
    t, s = np.arange(960)[:, None], np.arange(960)[None]
    seen = (ids[:, None] == ids) & (ids > 0) & ((s <= t) | (not mask.causal))
    seen &= s >= t - (mask.window or 960)
    blocks = seen.reshape(15, side, 15, side)
    some, full = blocks.any((1, 3)), blocks.all((1, 3))
    for i, (lo, full_lo, full_hi, hi) in enumerate(zip(*(x[0].tolist() for x in ranges))):
        expected = np.flatnonzero(some[i]) if some[i].any() else [i if mask.causal else 0]
        assert (lo, hi - 1) == (expected[0], expected[-1])
        # The last block that is visited always has the mask.
        assert full_hi - full_lo == full[i, : hi - 1].sum() and full[i, full_lo:full_hi].all()


def test_packed_documents_share_less_of_the_cache_than_rows(monkeypatch):
    plans = []

    def call(plan, arrays, interpret):
        plans.append(plan)
        return arrays[0], jnp.zeros((8, 1, 4096))

    monkeypatch.setattr(forward, "_call", call)
    tiling = ForwardTiling(blocks=16, l2_bytes=5 << 20)
    q, ids = jnp.zeros((8, 4096, 1, 128), jnp.bfloat16), jnp.ones((8, 4096), jnp.int32)
    run = functools.partial(forward.forward.__wrapped__, softcap=None, scale=1.0, tiling=tiling)
    for given in (None, ids):
        jax.eval_shape(lambda q, ids=given: run(q, q, q, ids, causal=True, window=None)[0], q)
    assert [plan.group for plan in plans] == [2, 8]


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
    array = lambda heads: jax.ShapeDtypeStruct((shape.B, shape.T, heads, shape.H), dtype)
    ids = jax.ShapeDtypeStruct((shape.B, shape.T), jnp.int32) if shape.documents else None
    run = functools.partial(forward.forward, **options(shape))
    with on_target("cuda", (9, 0)):
        traced = jax.jit(run).trace(array(shape.N), array(shape.K), array(shape.K), ids)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    assert "stablehlo.transpose" not in text
