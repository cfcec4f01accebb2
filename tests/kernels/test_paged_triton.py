"""Attention over pages in Triton: its numbers on a CPU (interpreted), its lowering for CUDA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from jaxtrain_kernels import decode_attention, paged_attention, quantize
from jaxtrain_kernels.attention import reference
from jaxtrain_kernels.attention.paged import triton
from jaxtrain_kernels.attention.paged.triton import PageTile
from jaxtrain_kernels.dispatch import Target, on_target

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
        pytest.param({"G": 1}, PageTile(16, 1), {}, marks=pytest.mark.slow),
        pytest.param({"G": 4, "T": 3}, PageTile(16, 2), {}, marks=pytest.mark.slow),
        pytest.param({"G": 8, "pages": "int8"}, PageTile(16, 3), {}, marks=pytest.mark.slow),
        pytest.param(
            {"T": 3, "pages": "int8"}, PageTile(16, 2), {"window": 5}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"T": 3, "pages": "float8_e4m3fn"},
            PageTile(32, 1),
            {"softcap": 2.0},
            marks=pytest.mark.slow,
        ),
        ({"T": 3, "H": 20}, PageTile(16, 5), {"window": 0}),
        pytest.param(
            {"G": 3, "H": 20}, None, {"window": 19, "softcap": 2.0}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_it_equals_the_reference(case, tile, options):
    arrays = inputs(**case)
    expected = reference.paged_attention(*arrays, **NO_OPTIONS | options)
    np.testing.assert_allclose(interpreted(arrays, tile, **options), expected, atol=2e-6)


@pytest.mark.parametrize(
    ("G", "T", "counts", "options"),
    [(1, 70, [26, 0, 3, 48, 31], {}), (16, 9, [9, 0, 3, 8, 5], {"window": 6})],
    ids=str,
)
@pytest.mark.quick("16-9-[9, 0, 3, 8, 5]-{'window': 6}")
def test_many_queries_are_rows_of_their_own(G, T, counts, options):
    """Of 64 and 4 tokens; some are only padding, and the first of some have none before them."""
    q, k, v, table, *_ = inputs(G=G, T=T)
    arrays = q, k, v, table, jnp.array([21, 31, 45, 0, 17]), jnp.array(counts)
    expected = reference.paged_attention(*arrays, **NO_OPTIONS | options)
    for tile in (PageTile(16, 1), PageTile(16, 2)):
        np.testing.assert_allclose(interpreted(arrays, tile, **options), expected, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("pages", [None, "int8"])
@pytest.mark.quick("None-bfloat16")
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
    [(1, 128, {}, 2), (3, 80, {"window": 30, "softcap": 30.0}, 1), (512, 64, {}, 1)],
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


def test_splits_beyond_the_steps_of_a_join_are_joined():
    arrays = inputs(T=3)
    expected = reference.paged_attention(*arrays, **NO_OPTIONS)
    np.testing.assert_allclose(interpreted(arrays, PageTile(16, 70)), expected, atol=2e-6)


@pytest.mark.slow
def test_what_pages_hold_elsewhere_does_not_matter():
    q, k, v, table, starts, counts = inputs(T=3)
    shown = np.zeros((PAGES, PAGE), bool)
    for row, end in zip(np.asarray(table), np.asarray(starts + counts)):
        for s in range(end):
            shown[row[s // PAGE], s % PAGE] = True
    poison = lambda x: jnp.where(shown[..., None, None], x, 1e30)
    tile = PageTile(16, 2)
    clean = interpreted((q, k, v, table, starts, counts), tile)
    np.testing.assert_array_equal(
        interpreted((q, poison(k), poison(v), table, starts, counts), tile), clean
    )
    assert (clean[-1] == 0).all() and (clean[0, 1:] == 0).all()


@pytest.mark.parametrize("pages", [None, "int8"])
@pytest.mark.slow
def test_a_cache_of_rows_is_one_page_a_row(pages):
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(3, 4, 16)), jnp.float32)
    k, v = (jnp.asarray(rng.normal(size=(3, 40, 2, 16)), jnp.float32) for _ in range(2))
    if pages is not None:
        k, v = quantize(k), quantize(v)
    lengths = jnp.array([40, 0, 7])
    out = triton.decode_attention(
        q, k, v, lengths, window=20, softcap=None, scale=0.3, splits=3, interpret=True
    )
    expected = decode_attention(q, k, v, lengths, window=20, scale=0.3)
    np.testing.assert_allclose(out, expected, atol=2e-6)


def test_programs_fill_a_gpu_and_splits_stop_there():
    tile = functools.partial(triton.tile_of, results=16 * 128, kind="hopper")
    rows = lambda B, tokens: tile(8 * B, tokens, 256)
    assert rows(2, 16384) == PageTile(64, 16) and rows(1, 16384).splits == 33
    assert rows(256, 640).splits == 1 and rows(1, 64).splits == 1
    assert rows(64, 4096) == PageTile(64, 1, stages=4)  # several waves
    assert tile(16, 16384, 128) == PageTile(128, 16)  # 8 bits
    assert tile(512, 4096, 128).stages == 6
    assert tile(16, 16384, 256, results=64 * 256) == PageTile(32, 16, warps=8)


def refusal(q_shape=(2, 1, 8, 128), dtype=jnp.bfloat16, pages=jnp.bfloat16, K=2, target=(9, 0)):
    on = Target("cuda" if target else "cpu", target)
    values = jax.ShapeDtypeStruct((64, 32, K, q_shape[-1]), pages)
    return triton.supports(on, jax.ShapeDtypeStruct(q_shape, dtype), values) or "none"


def test_what_it_cannot_serve():
    assert refusal() == "none"
    assert refusal(target=None) == "needs an NVIDIA GPU, this is cpu"
    assert "needs compute capability 8.0" in refusal(target=(7, 5))
    assert "8.9 (Ada) for float8" in refusal(pages=jnp.float8_e4m3fn, target=(8, 0))
    assert "needs bfloat16 or float16, got float32" in refusal(dtype=jnp.float32)
    assert "at most 64 heads of queries for one of keys, got 80" in refusal((2, 1, 80, 128), K=1)
    assert "heads of at most 256, got 512" in refusal((2, 1, 8, 512))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("pages", [None, "int8", "float8_e4m3fn"])
@pytest.mark.parametrize(
    "case", [{"G": 4}, {"G": 1, "H": 64}, {"T": 3, "H": 80}, {"H": 256}, {"T": 90}]
)
@pytest.mark.parametrize("options", [{}, {"window": 9, "softcap": 2.0}], ids=str)
def test_on_a_gpu_it_equals_the_reference(dtype, pages, case, options):
    arrays = inputs(**{"H": 128} | case, dtype=dtype, pages=pages)
    q, *rest = jax.tree.map(lambda x: x.astype("float32") if x.dtype == dtype else x, arrays)
    expected = reference.paged_attention(q, *rest, **NO_OPTIONS | options)
    for tile in (None, PageTile(32, 1), PageTile(32, 2), PageTile(64, 3, warps=8, stages=4)):
        f = functools.partial(triton.paged_attention, tile=tile, **NO_OPTIONS | options)
        np.testing.assert_allclose(jax.jit(f)(*arrays).astype("float32"), expected, atol=0.02)
    f = functools.partial(paged_attention, implementation="triton", **NO_OPTIONS | options)
    chosen = functools.partial(paged_attention, **NO_OPTIONS | options)
    np.testing.assert_array_equal(jax.jit(chosen)(*arrays), jax.jit(f)(*arrays))
