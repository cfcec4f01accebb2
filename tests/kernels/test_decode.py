"""Decoding against the cache: equal to the last row of attention, whatever the splits and dtype."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtrain_kernels.attention import attention, decode, decode_attention, quantize
from jaxtrain_kernels.attention.decode import BACKENDS, Quantized

LENGTHS = [24, 7, 1, 0, 13]
OPTIONS = [{}, {"window": 5}, {"window": 0}, {"softcap": 2.0, "scale": 0.7}]
CASES = [(4, 2, options) for options in OPTIONS] + [(2, 2, OPTIONS[-1]), (6, 1, OPTIONS[1])]
both = pytest.mark.parametrize("implementation", [*BACKENDS, "reference"])


def arrays(N=4, K=2, S=24, H=8, B=5, dtype=np.float32):
    rng = np.random.default_rng(0)
    q, (k, v) = rng.standard_normal((B, N, H)), rng.standard_normal((2, B, S, K, H))
    return [jnp.asarray(x, dtype) for x in (q, k, v)]


def expected(q_BNH, k_BSKH, v_BSKH, lengths, **options):
    """The last row of attention over the keys that each row has: no query sees a later key."""
    (B, S), lengths = k_BSKH.shape[:2], np.array(lengths)
    q_BSNH = jnp.broadcast_to(q_BNH[:, None], (B, S, *q_BNH.shape[1:]))
    f = jax.jit(functools.partial(attention, implementation="reference", **options))
    rows = np.asarray(f(q_BSNH, k_BSKH, v_BSKH))[np.arange(B), np.maximum(lengths, 1) - 1]
    return jnp.asarray(np.where(lengths[:, None, None] > 0, rows, np.zeros_like(rows)))


def restored(cache: Quantized):
    return cache.values_BSKH * cache.scale_BSK[..., None]


IN_INT8 = [(False, *case) for case in CASES] + [(True, *case) for case in CASES[2:]]


@both
@pytest.mark.parametrize(("int8", "N", "K", "options"), IN_INT8, ids=str)
@pytest.mark.quick("False-4-2-{'window': 5}-dot", "True-2-2-{'softcap': 2.0, 'scale': 0.7}-reduce")
def test_decoding_equals_the_last_row_of_attention(implementation, int8, N, K, options):
    q, k, v = arrays(N, K)
    caches = (quantize(k), quantize(v)) if int8 else (k, v)
    plain = [restored(x) for x in caches] if int8 else (k, v)
    want = expected(q, *plain, LENGTHS, **options)
    f = functools.partial(decode_attention, implementation=implementation, **options)
    for splits in (1, 4):
        got = jax.jit(functools.partial(f, splits=splits))(q, *caches, jnp.asarray(LENGTHS))
        np.testing.assert_allclose(got, want, atol=2e-6)
    assert (got[LENGTHS.index(0)] == 0).all()


@settings(max_examples=4)
@given(
    S=st.integers(1, 12),
    lengths=st.lists(st.integers(0, 12), min_size=2, max_size=2),
    window=st.sampled_from([None, 0, 1, 4, 20]),
    data=st.data(),
)
@pytest.mark.slow
def test_any_length_window_and_split(S, lengths, window, data):
    splits = data.draw(st.sampled_from([P for P in range(1, S + 1) if S % P == 0]))
    lengths = [min(n, S) for n in lengths]
    q, k, v = arrays(2, 1, S, 4, 2)
    got = decode_attention(q, k, v, jnp.asarray(lengths), window=window, splits=splits)
    np.testing.assert_allclose(got, expected(q, k, v, lengths, window=window), atol=2e-6)


@both
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.slow
def test_16_bits_are_as_exact_as_the_reference_in_16_bits(implementation, dtype):
    q, k, v = arrays(dtype=dtype, H=32)
    lengths = [24, 20, 9, 24, 13]
    exact = expected(*(x.astype(jnp.float32) for x in (q, k, v)), lengths)
    naive = np.abs(expected(q, k, v, lengths).astype(jnp.float32) - exact).mean()
    out = decode_attention(q, k, v, jnp.asarray(lengths), splits=2, implementation=implementation)
    assert out.dtype == dtype
    assert np.abs(out.astype(jnp.float32) - exact).mean() <= 2 * naive
    int8 = decode_attention(
        q, quantize(k), quantize(v), jnp.asarray(lengths), implementation=implementation
    )
    assert int8.dtype == dtype
    assert np.abs(int8.astype(jnp.float32) - exact).mean() < 0.02


@pytest.mark.slow
def test_float16_with_small_values_and_scores_beyond_its_range():
    """Neither a score before its scale nor a probability times a scale leaves the range."""
    q, k, v = arrays(dtype=np.float32, H=32)
    q, k, v = (x.astype(jnp.float16) for x in (200 * q, 200 * k, 1e-4 * v))
    lengths = [24] * 5
    exact = expected(*(x.astype(jnp.float32) for x in (q, k, v)), lengths, scale=1e-5)
    for cache in ((k, v), (quantize(k), quantize(v))):
        out = decode_attention(q, *cache, jnp.asarray(lengths), scale=1e-5)
        error = np.abs(out.astype(jnp.float32) - exact).mean() / np.abs(exact).mean()
        assert error < 0.02


def test_quantizing_keeps_half_a_level():
    _, k, _ = arrays()
    k = k.at[0, 0, 0].set(0).at[0, 1].multiply(1e3)
    cache = quantize(k)
    assert cache.values_BSKH.dtype == jnp.int8 and cache.scale_BSK.shape == k.shape[:3]
    off = np.abs(restored(cache) - k)
    assert (off <= 0.5001 * cache.scale_BSK[..., None]).all() and (off[0, 0, 0] == 0).all()
    assert np.abs(cache.values_BSKH).max(-1).min() == 0
    np.testing.assert_array_equal(np.abs(cache.values_BSKH[1:]).max(-1), 127)


@pytest.mark.parametrize("int8", [False, True])
def test_the_cache_is_not_copied(int8):
    """Scratch memory stays far below the cache, in its own dtype and in float32 alike."""
    q = jax.ShapeDtypeStruct((4, 4, 64), jnp.float32)
    cache = jax.ShapeDtypeStruct((4, 2048, 4, 64), jnp.float32)
    if int8:
        cache = jax.eval_shape(quantize, cache)
    lengths = jax.ShapeDtypeStruct((4,), jnp.int32)
    f = jax.jit(functools.partial(decode_attention, implementation="reduce" if int8 else "dot"))
    options = {"xla_backend_optimization_level": 2, "xla_llvm_disable_expensive_passes": False}
    compiled = f.lower(q, cache, cache, lengths).compile(compiler_options=options)
    analysis = compiled.memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < 4 * 2048 * 4 * 64 * (1 if int8 else 4) / 2


def test_splits_keep_a_gpu_busy_and_divide_the_cache():
    assert decode._default_splits(64, 4096, 1024) == 1
    assert decode._default_splits(1, 4096, 1024) == 16
    assert decode._default_splits(1, 2049, 64) == 3  # of a length with few divisors
    assert decode._default_splits(1, 7, 64) == 1


def test_bad_arguments_are_one_line():
    q, k, v = arrays()
    with pytest.raises(ValueError, match="splits must divide the cache's length 24, got 5"):
        decode_attention(q, k, v, jnp.asarray(LENGTHS), splits=5)
    with pytest.raises(ValueError, match="no backend 'fast'; it has triton, dot, reduce"):
        decode_attention(q, k, v, jnp.asarray(LENGTHS), implementation="fast")
