"""Attention's backends against the reference, forward and gradients, and what they must not do."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtrain_kernels.attention import (
    BACKENDS,
    Call,
    attention,
    attention_gradients,
    reference,
    xla,
)
from jaxtrain_kernels.dispatch import on_target
from jaxtrain_kernels.shapes import ATTENTION_SMALL, AttentionShape

by_name = functools.partial(pytest.mark.parametrize, "shape", ids=lambda shape: shape.name)


def inputs(shape, dtype: Any = np.float64):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((shape.B, shape.T, shape.N, shape.H))
    k, v = rng.standard_normal((2, shape.B, shape.T, shape.K, shape.H))
    dout, dlse = rng.standard_normal(q.shape), rng.standard_normal(q.shape[:3]).swapaxes(1, 2)
    return [np.asarray(x, dtype) for x in (q, k, v, dout, dlse)]


def everything(function, shape, q, k, v, dout, dlse, **options):
    """(out, lse, dq, dk, dv) of a backend's attention; also through lse."""
    ids = shape.segment_ids_BT()
    call = Call(
        causal=shape.causal,
        window=shape.window,
        softcap=shape.softcap,
        segment_ids_BT=None if ids is None else jnp.asarray(ids),
        scale=shape.H**-0.5,
        **options,
    )

    @jax.jit
    def run(q, k, v, dout, dlse):
        (out, lse), pull = jax.vjp(lambda *qkv: function(*qkv, call), q, k, v)
        return out, lse, *pull((dout, jnp.where(lse == -jnp.inf, 0, dlse).astype(lse.dtype)))

    return run(*(jnp.asarray(x) for x in (q, k, v, dout, dlse)))


@functools.cache
def truth(shape):
    with jax.enable_x64(True):
        return [np.asarray(x) for x in everything(reference.attention, shape, *inputs(shape))]


def assert_close(got, expected, tolerance):
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), got, expected):
        np.testing.assert_allclose(x, y, atol=tolerance, rtol=tolerance, err_msg=name)


# What the others have one by one, some of these have together.
TOGETHER = (
    "window",
    "mqa",
    "packed_full",
    "all",
    "ragged_1",
    "ragged_257",
    "ragged_513",
    "ragged_full",
)
TOGETHER += ("softcap_gqa", "packed_window_ragged", "d256")


@by_name([s for s in ATTENTION_SMALL if s.name in TOGETHER])
@pytest.mark.quick("all")
def test_xla_equals_reference(shape):
    got = everything(xla.attention, shape, *inputs(shape, np.float32))
    assert_close(got, truth(shape), 2e-5)


@by_name([s for s in ATTENTION_SMALL if s.name in ("all", "ragged_full")])
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.quick("cpu-all")
def test_xla_in_loops_equals_reference(shape, platform):
    """More blocks than are unrolled, with the batch mapped (CPU) and vmapped (GPU)."""
    with on_target(platform):
        got = everything(xla.attention, shape, *inputs(shape, np.float32), tiling={"block": 4})
    assert_close(got, truth(shape), 2e-5)


@settings(max_examples=4, deadline=None)
@given(
    T=st.integers(1, 24),
    causal_window=st.sampled_from([(True, None), (True, 0), (True, 5), (True, 17), (False, None)]),
    block=st.sampled_from([1, 3, 8]),
)
@pytest.mark.slow
def test_xla_with_any_length_window_and_block(T, causal_window, block):
    shape = AttentionShape("", 1, T, 2, 1, 4, *causal_window)
    got = everything(xla.attention, shape, *inputs(shape, np.float32), tiling={"block": block})
    assert_close(got, everything(reference.attention, shape, *inputs(shape, np.float32)), 5e-5)


def mean_error(x, y):
    x, y = np.asarray(x, np.float64), np.asarray(y)
    return np.abs(x[np.isfinite(y)] - y[np.isfinite(y)]).mean()


BF16 = pytest.param(jnp.bfloat16, marks=pytest.mark.slow)  # as in test_attention_gpu.py


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, jnp.float16])
@by_name([s for s in ATTENTION_SMALL if s.name == "all"])
def test_xla_in_16_bits_is_as_exact_as_the_reference_in_16_bits(shape, dtype):
    errors = []
    for function in (xla.attention, reference.attention):
        got = everything(function, shape, *(jnp.asarray(x, dtype) for x in inputs(shape)))
        assert [x.dtype for x in got] == [dtype, jnp.float32, dtype, dtype, dtype]
        errors.append([mean_error(x, y) for x, y in zip(got, truth(shape))])
    for ours, naive in zip(*errors):
        assert ours <= 2 * naive


@pytest.mark.slow
@pytest.mark.parametrize("block", [8, 64])
@pytest.mark.quick("64")
def test_scores_beyond_the_largest_float16(block):
    """q k^T before its scale overflows float16; the soft maximum and all gradients do not."""
    shape = AttentionShape("", 1, 48, 2, 1, 64)
    q, k, v, dout, _ = inputs(shape)
    q, k = (np.asarray(200 * x, np.float16) for x in (q, k))
    v, dout = np.asarray(v, np.float16), np.asarray(dout, np.float16)
    assert np.abs(np.einsum("btnh,bskh->bnts", q, k, dtype=np.float64)).max() > 4 * 65504
    call = Call(scale=1e-5)

    def run(function, dtype, **options):
        arrays = [jnp.asarray(x, dtype) for x in (q, k, v, dout)]

        @jax.jit
        def outputs(q, k, v, dout):
            out, pull = jax.vjp(lambda *qkv: function(*qkv, call._replace(**options))[0], q, k, v)
            return out, *pull(dout)

        return outputs(*arrays)

    exact = run(reference.attention, np.float32)
    ours, naive = (
        [mean_error(x, np.asarray(y, np.float64)) for x, y in zip(run(f, np.float16, **o), exact)]
        for f, o in ((xla.attention, dict(tiling={"block": block})), (reference.attention, {}))
    )
    assert all(np.isfinite(ours)) and all(a <= 2 * b + 1e-6 for a, b in zip(ours, naive))


def test_no_output_depends_on_a_later_token():
    q, k, v = (jnp.asarray(x[:1, :24], jnp.float32) for x in inputs(ATTENTION_SMALL[0])[:3])

    def first_outputs(k, v):
        return xla.attention(q, k, v, Call(tiling={"block": 8}))[0][:, :11].sum()

    dk, dv = jax.jit(jax.grad(first_outputs, (0, 1)))(k, v)
    assert (dk[:, 11:] == 0).all() and (dv[:, 11:] == 0).all()
    assert (dv[:, :11] != 0).all()


def test_packed_documents_equal_separate_ones_and_padding_has_no_gradient():
    q, k, v = (jnp.asarray(x[:1, :30], jnp.float32) for x in inputs(ATTENTION_SMALL[0])[:3])
    ids = jnp.asarray([[1] * 12 + [2] * 10 + [0] * 8])

    @jax.jit
    def run(q, k, v):
        packed, pull = jax.vjp(lambda *a: attention(*a, segment_ids_BT=ids), q, k, v)
        alone = [attention(*(x[:, part] for x in (q, k, v))) for part in documents]
        return packed, alone, pull(jnp.ones_like(q))

    documents = slice(0, 12), slice(12, 22)
    packed, alone, gradients = run(q, k, v)
    for part, out in zip(documents, alone):
        np.testing.assert_allclose(packed[:, part], out, atol=1e-6)
    assert (packed[:, 22:] == 0).all()
    for gradient in gradients:
        assert jnp.isfinite(gradient).all() and (gradient[:, 22:] == 0).all()


def test_lse_comes_back_only_when_asked_for():
    q, k, v = (jnp.asarray(x, jnp.float32) for x in inputs(ATTENTION_SMALL[0])[:3])
    out, lse = jax.jit(functools.partial(attention, return_lse=True))(q, k, v)
    assert lse.shape == (2, 2, 64) and lse.dtype == jnp.float32
    np.testing.assert_array_equal(out, jax.jit(attention)(q, k, v))


def test_scale_is_applied():
    q, k, v = (jnp.asarray(x, jnp.float32) for x in inputs(ATTENTION_SMALL[0])[:3])
    half = jax.jit(functools.partial(attention, scale=0.5 * 16**-0.5))(q, k, v)
    np.testing.assert_allclose(half, jax.jit(attention)(0.5 * q, k, v), atol=1e-6)


@pytest.mark.parametrize("wrong", [dict(window=2, causal=False), dict(window=-1)])
def test_senseless_windows_are_refused(wrong):
    q = jnp.ones((1, 4, 2, 8))
    with pytest.raises(ValueError, match="window needs causal=True and must be >= 0"):
        attention(q, q, q, **wrong)


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.quick("cuda")
def test_memory_grows_linearly_with_the_length(platform):
    def temporary_bytes(T):
        q = jax.ShapeDtypeStruct((1, T, 1, 8), jnp.float32)
        with on_target(platform):
            f = jax.jit(jax.grad(lambda q, k, v: attention(q, k, v).sum(), (0, 1, 2)))
            traced = f.trace(q, q, q)
        analysis = traced.lower().compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    short, long = temporary_bytes(16384), temporary_bytes(32768)
    assert long < 2.2 * short
    assert long < 32768 * 32768 // 4


@pytest.mark.slow
def test_xla_runs_inside_shard_map():
    shape = AttentionShape("", 8, 24, 2, 1, 8)
    q, k, v = (jnp.asarray(x, jnp.float32) for x in inputs(shape)[:3])
    if len(jax.devices()) < 8:
        pytest.skip("needs 8 devices")
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.P("data")
    f = functools.partial(xla.attention, call=Call(window=5, tiling={"block": 4}))
    sharded = jax.shard_map(lambda *a: f(*a)[0], mesh=mesh, in_specs=(rows,) * 3, out_specs=rows)
    got = jax.jit(jax.grad(lambda *a: (sharded(*a) ** 2).sum(), (0, 1, 2)))(q, k, v)
    expected = jax.jit(jax.grad(lambda *a: (f(*a)[0] ** 2).sum(), (0, 1, 2)))(q, k, v)
    for x, y in zip(got, expected):
        np.testing.assert_allclose(x, y, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    [
        AttentionShape("causal", 2, 256, 4, 4, 64),
        AttentionShape("full", 2, 256, 4, 4, 64, causal=False),
        AttentionShape("window", 2, 300, 4, 4, 128, window=100),
        AttentionShape("gqa", 2, 258, 8, 2, 64),
    ],
    ids=lambda shape: shape.name,
)
def test_cudnn_equals_reference(shape):
    q, k, v, dout, _ = (jnp.asarray(x, jnp.bfloat16) for x in inputs(shape))
    options = dict(causal=shape.causal, window=shape.window)
    errors = []
    for implementation in ("cudnn", "reference"):
        f = functools.partial(attention, implementation=implementation, **options)
        out, pull = jax.vjp(f, q, k, v)
        pairs = zip((out, *pull(dout)), (truth(shape)[0], *truth_without_lse(shape)))
        errors.append([mean_error(x, y) for x, y in pairs])
    for ours, naive in zip(*errors):
        assert ours <= 2 * naive


def truth_without_lse(shape):
    with jax.enable_x64(True):
        q, k, v, dout, dlse = inputs(shape)
        return everything(reference.attention, shape, q, k, v, dout, 0 * dlse)[2:]


GRADIENTS = [name for name, backend in BACKENDS.items() if hasattr(backend, "gradients")]


@pytest.mark.slow
@pytest.mark.parametrize("implementation", [n for n in GRADIENTS if n in ("xla", "reference")])
@pytest.mark.parametrize(
    "options", [{}, {"window": 5}, {"softcap": 2.0}, {"segments": True}], ids=str
)
def test_gradients_from_output_and_lse_equal_those_of_attention(implementation, options):
    """What ring attention calls in its backward pass."""
    rng = np.random.default_rng(0)
    B, T, N, K, H = 2, 16, 4, 2, 8
    q, dout = (jnp.asarray(rng.standard_normal((B, T, N, H)), jnp.float32) for _ in range(2))
    k, v = (jnp.asarray(rng.standard_normal((B, T, K, H)), jnp.float32) for _ in range(2))
    options = dict(options)
    if options.pop("segments", False):
        options["segment_ids_BT"] = jnp.asarray([[1] * 9 + [2] * 5 + [0] * 2] * B)
    whole = functools.partial(attention, implementation="reference", **options)
    out, lse = whole(q, k, v, return_lse=True)
    _, pull = jax.vjp(whole, q, k, v)
    lse = jnp.where(jnp.isfinite(lse), lse, 1e30)  # a query without keys contributes nothing
    part = functools.partial(attention_gradients, implementation=implementation, **options)
    got = jax.jit(part)(q, k, v, out, lse, dout)
    for a, b in zip(got, pull(dout)):
        np.testing.assert_allclose(a, b, atol=3e-5)
