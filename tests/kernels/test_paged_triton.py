"""Attention over pages in Triton: its numbers on a CPU (interpreted), its lowering for CUDA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from jaxtrain_kernels import paged_attention, quantize
from jaxtrain_kernels.attention import reference
from jaxtrain_kernels.attention.paged import triton
from jaxtrain_kernels.attention.paged.triton import Tile
from jaxtrain_kernels.dispatch import on_target

PAGES, PAGE, W = 60, 4, 12
# Of rows: ends inside a page, at a page's border, of the whole table, of one token; and idle.
STARTS, COUNTS = [21, 31, 45, 0, 17], [1, 3, 3, 1, 0]
NO_OPTIONS = {"window": None, "softcap": None, "scale": 0.3}
H200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))


def inputs(G=2, T=1, dtype="float32", pages=None, K=2, H=16):
    rng, B = np.random.default_rng(0), len(STARTS)
    cast = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    q_BTNH, k, v = cast(B, T, K * G, H), cast(PAGES, PAGE, K, H), cast(PAGES, PAGE, K, H)
    if pages is not None:
        k, v = (quantize(x, jnp.dtype(pages)) for x in (k, v))
    table_BW = jnp.asarray(rng.permutation(PAGES).reshape(B, W), jnp.int32)
    return q_BTNH, k, v, table_BW, jnp.array(STARTS), jnp.minimum(jnp.array(COUNTS), T)


def interpreted(arrays, tile=None, **options):
    f = functools.partial(triton.paged_attention, tile=tile, interpret=True)
    return jax.jit(functools.partial(f, **NO_OPTIONS | options))(*arrays)


@pytest.mark.parametrize(
    ("case", "tile", "options"),
    [
        ({"G": 1}, Tile(16, 1), {}),
        ({"G": 4, "T": 3}, Tile(16, 2), {}),
        ({"G": 8, "pages": "int8"}, Tile(16, 3), {}),
        ({"T": 3, "pages": "int8"}, Tile(16, 2), {"window": 5}),
        ({"T": 3, "pages": "float8_e4m3fn"}, Tile(32, 1), {"softcap": 2.0}),
        ({"T": 3, "H": 20}, Tile(16, 5), {"window": 0}),
        ({"G": 3, "H": 20}, None, {"window": 19, "softcap": 2.0}),
    ],
    ids=str,
)
def test_it_equals_the_reference(case, tile, options):
    arrays = inputs(**case)
    expected = reference.paged_attention(*arrays, **NO_OPTIONS | options)
    np.testing.assert_allclose(interpreted(arrays, tile, **options), expected, atol=2e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("pages", [None, "int8"])
def test_16_bits_stay_close(dtype, pages):
    arrays = inputs(dtype=dtype, pages=pages)
    q, *rest = jax.tree.map(lambda x: x.astype("float32") if x.dtype == dtype else x, arrays)
    out = interpreted(arrays)
    assert out.dtype == dtype
    expected = reference.paged_attention(q, *rest, **NO_OPTIONS)
    np.testing.assert_allclose(out.astype("float32"), expected, atol=0.02)


@pytest.mark.parametrize("pages", [None, "int8", "float8_e4m3fn"])
@pytest.mark.parametrize(
    ("T", "H", "options", "kernels"),
    [(1, 128, {}, 2), (3, 80, {"window": 30, "softcap": 30.0}, 1)],
    ids=str,
)
def test_it_lowers_for_cuda_as_a_kernel_of_xla(pages, T, H, options, kernels):
    B, size, K = 2, 32, 8
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    kv = array(128, size, K, H)
    if pages is not None:
        kv = jax.eval_shape(functools.partial(quantize, dtype=jnp.dtype(pages)), kv)
    numbers = [jax.ShapeDtypeStruct(x, jnp.int32) for x in ((B, 64), (B,), (B,))]
    with on_target("cuda", (9, 0)), jax.sharding.use_abstract_mesh(H200):
        traced = jax.jit(functools.partial(paged_attention, **options)).trace(
            array(B, T, 4 * K, H), kv, kv, *numbers
        )
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call") == text.count("@__gpu$xla.gpu.triton") == kernels
