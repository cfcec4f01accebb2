"""The Triton backend: what it serves, which blocks it visits, lowering, and (GPU) its numbers."""

import functools
import importlib.metadata
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtrain_kernels.attention import Call, reference, triton
from jaxtrain_kernels.dispatch import Target, on_target
from jaxtrain_kernels.shapes import AttentionShape
from test_attention import everything, inputs, mean_error, truth

AMPERE, TURING = (Target("cuda", cc) for cc in ((8, 0), (7, 5)))
CALL = Call(window=5, segment_ids_BT=1, softcap=3.0, return_lse=True)

SHAPES = (
    AttentionShape("causal", 2, 256, 2, 2, 64),
    AttentionShape("full", 2, 256, 2, 2, 64, causal=False),
    AttentionShape("ragged", 1, 1031, 2, 2, 128),
    AttentionShape("ragged_full", 2, 333, 2, 2, 128, causal=False),
    AttentionShape("one", 2, 1, 2, 2, 64),
    AttentionShape("window", 1, 700, 2, 2, 128, window=100),
    AttentionShape("window_itself", 1, 200, 2, 2, 64, window=0),
    AttentionShape("gqa", 2, 300, 8, 2, 64),
    AttentionShape("mqa_d96", 1, 300, 4, 1, 96),
    AttentionShape("d16", 1, 100, 2, 2, 16),
    AttentionShape("d256", 1, 400, 2, 1, 256),
    AttentionShape("softcap", 2, 300, 2, 2, 64, softcap=2.0),
    AttentionShape("packed", 2, 1024, 2, 2, 128, documents=(400, 1, 300, 200)),
    AttentionShape("packed_full", 2, 700, 2, 2, 64, causal=False, documents=(400, 200)),
    AttentionShape("all", 2, 1031, 4, 2, 128, window=150, softcap=2.0, documents=(700, 17, 200)),
    AttentionShape(
        "all_d256", 2, 515, 4, 2, 256, window=150, softcap=2.0, documents=(300, 17, 100)
    ),
)
by_name = functools.partial(pytest.mark.parametrize, "shape", ids=lambda shape: shape.name)


@pytest.mark.parametrize(
    ("device", "dtype", "H", "version", "reason"),
    [
        (AMPERE, jnp.bfloat16, 96, "0.3.1", None),
        (AMPERE, jnp.float16, 256, "0.3.1", None),
        (AMPERE, jnp.bfloat16, 64, None, "pip install jax-triton==0.3.1 triton==3.6.0"),
        (AMPERE, jnp.bfloat16, 64, "0.4.1", "this is 0.4.1"),
        (AMPERE, jnp.float32, 64, "0.3.1", "float32"),
        (AMPERE, jnp.bfloat16, 512, "0.3.1", "at most 256"),
        (AMPERE, jnp.bfloat16, 20, "0.3.1", "multiple of 8"),
        (TURING, jnp.float16, 64, "0.3.1", "8.0"),
        (Target("cpu"), jnp.bfloat16, 64, "0.3.1", "this is cpu"),
    ],
)
def test_what_it_serves(monkeypatch, device, dtype, H, version, reason):
    def installed(name):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    said = triton.supports(device, jnp.ones((1, 4, 2, H), dtype), CALL)
    assert said is None if reason is None else said is not None and reason in said


@pytest.mark.slow
def test_importing_it_imports_no_triton():
    code = """
import sys, jaxtrain_kernels.attention.triton
assert not {"triton", "jax_triton"} & set(sys.modules)
"""
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, **path})


def seen(shape):
    """bool [B or 1, T, T]: which keys each query sees."""
    t, s = np.arange(shape.T)[None, :, None], np.arange(shape.T)[None, None]
    visible = s <= t if shape.causal else s >= 0 * t
    if shape.window is not None:
        visible = visible & (s >= t - shape.window)
    if (ids := shape.segment_ids_BT()) is not None:
        visible = visible & (ids[:, None] == ids[..., None]) & (ids[:, None] > 0)
    return visible


def ranges_of(causal, window, ids, T, rows, columns, by_key):
    plan = triton.TritonPlan(*[None] * len(triton.TritonPlan._fields))
    plan = plan._replace(causal=causal, window=window)
    ids_BT = None if ids is None else jnp.asarray(ids)
    return np.asarray(triton.block_ranges(plan, T, rows, columns, ids_BT, by_key))


@by_name(SHAPES)
@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.quick("True-packed_full", "True-window")
def test_block_ranges_are_what_is_seen(shape, by_key):
    """A program's own rows beyond T are not stored, so a full block may hold them."""
    size, walked = (64, 32) if by_key else (32, 64)
    visible = seen(shape).swapaxes(1, 2) if by_key else seen(shape)

    def blocks(beyond_own):
        own = np.pad(visible, ((0, 0), (0, -shape.T % size), (0, 0)), constant_values=beyond_own)
        whole = np.pad(own, ((0, 0), (0, 0), (0, -shape.T % walked)))
        B, T, S = whole.shape
        return whole.reshape(B, T // size, size, S // walked, walked)

    some, full = blocks(False).any((2, 4)), blocks(True).all((2, 4))
    ranges = ranges_of(shape.causal, shape.window, shape.segment_ids_BT(), shape.T, 32, 64, by_key)
    lo, full_lo, full_hi, hi = (ranges[..., i, None] for i in range(4))
    j = np.arange(some.shape[2])[None, None]
    visited, unmasked = (lo <= j) & (j < hi), (full_lo <= j) & (j < full_hi)
    assert (lo <= full_lo).all() and (full_lo <= full_hi).all() and (full_hi <= hi).all()
    assert not (some & ~visited).any() and not (unmasked & ~full).any()
    if not shape.documents:
        np.testing.assert_array_equal(unmasked, full)
    if not (shape.documents and shape.window):
        np.testing.assert_array_equal(visited, some)


def test_documents_in_any_order_lie_in_the_ranges():
    ids = np.random.default_rng(0).permutation(np.repeat([5, 2, 9, 0, 2, 7], 16))
    ids = np.repeat(ids, 4)
    lo, _, _, hi = ranges_of(True, None, ids[None], len(ids), 16, 16, False)[0].T
    for t in range(len(ids)):
        keys = np.flatnonzero((ids[: t + 1] == ids[t]) & (ids[: t + 1] > 0))
        assert all(lo[t // 16] <= s // 16 < hi[t // 16] for s in keys)


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.quick("True")
def test_time_follows_the_documents(by_key):
    ids = AttentionShape("", 1, 8192, 1, 1, 64, documents=(512,) * 16).segment_ids_BT()
    dense, packed = (ranges_of(True, None, x, 8192, 128, 64, by_key) for x in (None, ids))
    visited = [(ranges[..., 3] - ranges[..., 0]).sum() for ranges in (dense, packed)]
    assert visited[1] < visited[0] / 12


def gradients(shape, q, k, v, ids):
    def total(q, k, v):
        call = Call(
            shape.causal, shape.window, ids if shape.documents else None, softcap=shape.softcap,
            scale=shape.H**-0.5,
        )  # fmt: skip
        out, lse = triton.attention(q, k, v, call)
        return out.astype(jnp.float32).sum() + lse.sum()

    return jax.grad(total, (0, 1, 2))(q, k, v)


@pytest.mark.parametrize(
    ("H", "capability"), [(64, (8, 0)), (96, (8, 6)), (128, (9, 0)), (256, (8, 6))]
)
@pytest.mark.slow
def test_it_lowers_for_cuda_without_a_gpu(H, capability):
    pytest.importorskip("jax_triton", exc_type=ImportError)
    for dtype, shape in (
        (jnp.bfloat16, AttentionShape("", 2, 130, 2, 2, H, causal=False)),
        (jnp.float16, AttentionShape("", 2, 130, 4, 2, H, True, 50, 2.0, documents=(100, 17))),
    ):
        q, k = (jax.ShapeDtypeStruct((2, 130, n, H), dtype) for n in (shape.N, shape.K))
        ids = jax.ShapeDtypeStruct((2, 130), jnp.int32)
        with on_target("cuda", capability):
            traced = jax.jit(functools.partial(gradients, shape)).trace(q, k, k, ids)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("@triton_kernel_call(") == 3


@pytest.mark.gpu
@by_name(SHAPES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_it_equals_the_reference(shape, dtype):
    pytest.importorskip("jax_triton", exc_type=ImportError)
    arrays = [jnp.asarray(x, dtype) for x in inputs(shape)]
    got, naive = (everything(f, shape, *arrays) for f in (triton.attention, reference.attention))
    for name, ours, theirs, true in zip(("out", "lse", "dq", "dk", "dv"), got, naive, truth(shape)):
        assert ours.dtype == theirs.dtype
        assert (np.isfinite(np.asarray(ours, np.float32)) == np.isfinite(true)).all(), name
        # The floor: what float32 itself errs, in the LSE, which the reference has in float32.
        assert mean_error(ours, true) <= 2 * mean_error(theirs, true) + 2e-6, name
    again = everything(triton.attention, shape, *arrays)
    for x, y in zip(got, again):
        np.testing.assert_array_equal(x, y)
