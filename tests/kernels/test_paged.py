"""Attention in pages: what attention gives of the same keys in a row, wherever the pages are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtrain_kernels import paged_attention, quantize
from jaxtrain_kernels.attention import attention

PAGE, PAGES, W = 4, 24, 6
STARTS, COUNTS = [13, 0, 7, 3], [1, 3, 0, 2]
OPTIONS = [{}, {"window": 5}, {"window": 0}, {"softcap": 2.0, "scale": 0.7}]
both = pytest.mark.parametrize("implementation", ["xla", "reference"])


def arrays(N, K, T=3, H=8, dtype=np.float32):
    """Queries of new tokens, and texts with their keys and values laid out in shuffled pages."""
    rng, B = np.random.default_rng(0), len(STARTS)
    q_BTNH, k_BSKH = rng.normal(size=(B, T, N, H)), rng.normal(size=(2, B, PAGE * W, K, H))
    table_BW = rng.permutation(PAGES).reshape(B, W).astype(np.int32)
    pages = rng.normal(size=(2, PAGES, PAGE, K, H))
    pages[:, table_BW] = k_BSKH.reshape(2, B, W, PAGE, K, H)
    cast = lambda x: jnp.asarray(x, dtype)
    kv, in_pages = (tuple(cast(x) for x in pair) for pair in (k_BSKH, pages))
    return cast(q_BTNH), kv, in_pages, jnp.asarray(table_BW)


def expected(q_BTNH, kv, **options):
    """Each query in its place of a whole text, whose other queries do not matter."""
    k_BSKH, v_BSKH = kv
    (N, H), S = q_BTNH.shape[2:], k_BSKH.shape[1]
    out_BTNH = np.zeros(q_BTNH.shape, np.float32)
    for b, (start, count) in enumerate(zip(STARTS, COUNTS)):
        q_SNH = np.zeros((S, N, H), np.float32)
        q_SNH[start : start + count] = q_BTNH[b, :count]
        rows = jnp.asarray(q_SNH, q_BTNH.dtype)[None], k_BSKH[b : b + 1], v_BSKH[b : b + 1]
        whole = attention(*rows, implementation="reference", **options)[0]
        out_BTNH[b, :count] = whole[start : start + count]
    return out_BTNH


# Each dtype with each number of heads, and each option with both.
CASES = [(None, 4, 2, OPTIONS[1]), ("int8", 4, 2, OPTIONS[2]), (None, 3, 1, OPTIONS[3])]
CASES += [("int8", 3, 1, OPTIONS[0]), ("float8_e4m3fn", 4, 2, OPTIONS[3])]
CASES += [("float8_e4m3fn", 3, 1, OPTIONS[1]), (None, 4, 2, OPTIONS[0]), (None, 3, 1, OPTIONS[2])]


@both
@pytest.mark.parametrize(("name", "N", "K", "options"), CASES, ids=str)
@pytest.mark.quick("None-4-2-{'window': 5}-xla", "int8-4-2-{'window': 0}-xla")
def test_it_is_attention_over_a_row(implementation, name, N, K, options):
    q, kv, pages, table = arrays(N, K)
    if name is not None:
        restored = lambda x: x.values_BSKH.astype(jnp.float32) * x.scale_BSK[..., None]
        pages = [jax.jit(functools.partial(quantize, dtype=jnp.dtype(name)))(x) for x in pages]
        kv = [restored(x)[table].reshape(row.shape) for x, row in zip(pages, kv)]
    k, v = pages
    f = functools.partial(paged_attention, implementation=implementation, **options)
    out = jax.jit(f)(q, k, v, table, jnp.array(STARTS), jnp.array(COUNTS))
    np.testing.assert_allclose(out, expected(q, kv, **options), atol=3e-6)


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", [None, "int8"])
def test_one_token_a_row_without_matmuls(options, name):
    q, _, (k, v), table = arrays(4, 2)
    if name:
        k, v = quantize(k), quantize(v)
    counts = jnp.minimum(jnp.array(COUNTS), 1)
    f = lambda by: paged_attention(
        q[:, :1], k, v, table, jnp.array(STARTS), counts, implementation=by, **options
    )
    np.testing.assert_allclose(jax.jit(f, static_argnums=0)("reduce"), f("xla"), atol=3e-6)


@pytest.mark.slow
@both
def test_16_bits_stay_close(implementation):
    q, kv, (k, v), table = arrays(4, 2, H=32, dtype=jnp.bfloat16)
    rows = jnp.array(STARTS), jnp.array(COUNTS)
    out = paged_attention(q, k, v, table, *rows, implementation=implementation)
    exact = expected(q.astype(np.float32), [x.astype(np.float32) for x in kv])
    assert out.dtype == jnp.bfloat16
    assert np.abs(out.astype(np.float32) - exact).max() < 0.05


def test_an_unknown_backend_is_one_line():
    q, _, (k, v), table = arrays(4, 2)
    rows = jnp.array(STARTS), jnp.array(COUNTS)
    with pytest.raises(
        ValueError, match="no backend 'fast'; it has hopper, triton, xla, reduce, reference"
    ):
        paged_attention(q, k, v, table, *rows, implementation="fast")


def test_more_than_one_token_needs_matmuls():
    q, _, (k, v), table = arrays(4, 2)
    rows = jnp.array(STARTS), jnp.array(COUNTS)
    with pytest.raises(NotImplementedError, match="reduce cannot serve .* takes one token a row"):
        paged_attention(q, k, v, table, *rows, implementation="reduce")
