"""Products of a few rows: what each backend serves, its numbers on a CPU (Triton's interpreted),
and its lowering for CUDA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from jaxtrain_kernels.dispatch import Target, on_target
from jaxtrain_kernels.matmul.few_rows import (
    BACKENDS,
    LARGE,
    InputNorm,
    Operations,
    few_rows_matmul,
    padded,
    preferring,
    reference,
    streams_rows,
    triton,
    xla,
)
from jaxtrain_kernels.matmul.few_rows.operations import ACTIVATIONS, GATED, composed

HOPPER, TURING = (Target("cuda", cc) for cc in ((9, 0), (7, 5)))
H200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))
BF16 = jnp.bfloat16


def inputs(M, K, *columns, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    array = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    return array(M, K), *(array(K, N) for N in columns)


def shapes(M, K, *columns, dtype=BF16):
    return [jax.ShapeDtypeStruct(s, dtype) for s in ((M, K), *((K, N) for N in columns))]


@pytest.mark.parametrize(
    ("device", "shape", "dtype", "reason"),
    [
        (HOPPER, (1, 768, 768, 3072), BF16, None),
        (HOPPER, (4, 64, 8), jnp.float16, None),
        (HOPPER, (5, 64, 8), BF16, "at most 4 rows, got 5"),
        (HOPPER, (1, 64, 8), jnp.float32, "bfloat16 or float16, got float32"),
        (HOPPER, (1, 96, 8), BF16, "multiple of 64 inputs, got 96"),
        (HOPPER, (1, 64, 8, 12), BF16, "multiple of 8 columns, got 12"),
        (HOPPER, (1, 4096, 4096), BF16, "fewer than 10000000 weights"),
        (TURING, (1, 64, 8), BF16, "8.0"),
        (Target("cpu"), (1, 64, 8), BF16, "this is cpu"),
    ],
)
def test_what_triton_serves(device, shape, dtype, reason):
    why = triton.supports(device, *shapes(*shape, dtype=dtype))
    assert why is None if reason is None else why is not None and reason in why


@pytest.mark.parametrize("K", [64, 768, 1536, 3072, 4096, 5440])
@pytest.mark.parametrize(
    "columns", [[8], [768], [768, 128, 128], [768, 768, 768], [3072], [1000], [4096]]
)
def test_tiles_divide_the_matrices(K, columns):
    for pair in {False, len(columns) == 1}:
        tile = triton.tile_of(K, columns * (1 + pair), pair)
        assert tile.inputs * tile.loads * tile.steps == K
        assert all(N % tile.columns == 0 for N in columns)
        assert tile.warps <= 16 and tile.inputs * tile.columns == tile.warps * 32 * 8


@pytest.mark.parametrize("K", [64, 768, 4096, 5440, 14336])
@pytest.mark.parametrize("pair", [False, True])
def test_tiles_of_transposed_matrices(K, pair):
    tile = triton.transposed_tile_of(K, pair)
    assert tile.inputs * tile.loads * tile.steps == K
    assert tile.warps == max(1, tile.inputs // 256)
    assert tile.columns * (1 + pair) == 4
    if K >= 4096:
        assert tile.warps == (1 if pair else {4096: 8, 5440: 1, 14336: 2}[K])


def test_larger_matrices_are_served_transposed():
    x, w = shapes(1, 4096, 4096)
    two = jax.ShapeDtypeStruct((2, 4096), BF16)
    assert "at most 1 rows" in (triton.supports(HOPPER, two, w, transposed=True) or "")
    assert triton.supports(HOPPER, x, w, transposed=True) is None
    huge = jax.ShapeDtypeStruct((2**19, 4096), BF16)
    assert "fewer than 2147483648" in (triton.supports(HOPPER, x, huge, transposed=True) or "")
    odd = jax.ShapeDtypeStruct((20, 4096), BF16)
    assert "8 columns, got 20" in (triton.supports(HOPPER, x, odd, transposed=True) or "")
    assert streams_rows(1, BF16) is False  # a CPU
    with on_target("cuda", (9, 0)):
        assert streams_rows(4, BF16) and not streams_rows(5, BF16)


@pytest.mark.parametrize(
    ("M", "K", "columns"),
    [(1, 64, [8]), (1, 320, [64]), (4, 192, [16, 64, 16]), (2, 64 * 9, [24]), (3, 64 * 11, [8, 8])],
    ids=str,
)
@pytest.mark.quick("3-704-[8, 8]")
def test_triton_equals_the_reference(M, K, columns):
    arrays = inputs(M, K, *columns)
    every = reference.few_rows_matmul(*arrays)
    for y, expected in zip(triton.few_rows_matmul(*arrays, interpret=True), every, strict=True):
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize(("M", "K"), [(1, 192), (3, 320)])
@pytest.mark.parametrize("dtype", [jnp.float32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("transposed", [False, True])
def test_operations_around_the_products_equal_the_separate_ones(
    activation, M, K, dtype, transposed
):
    """With their roundings; an activation is computed in float32 and rounded once, as XLA does."""
    pair = activation in GATED
    x, *matrices = inputs(M, K, *([32] * (1 + pair)), dtype=dtype)
    gain, bias, residual = (inputs(n, k, dtype=dtype)[0] for n, k in ((1, K), (1, 32), (M, 32)))
    before = InputNorm(0.1, gain[0]), (bias[0], None)[: 1 + pair]
    around = Operations(*before, activation, residual)
    stored = [w.T if transposed else w for w in matrices]
    options = {"operations": around, "transposed": transposed, "interpret": True}
    (found,) = triton.few_rows_matmul(x, *stored, **options)
    ys = composed(reference.few_rows_matmul, x, *matrices, operations=Operations(*before))
    y, *up = (y.astype(jnp.float32) for y in ys)
    y = ACTIVATIONS[activation](y) if activation else y
    expected = residual + (y * up[0] if pair else y).astype(dtype)
    assert found.dtype == dtype
    exact = dtype == BF16 and activation in (None, "relu2")
    rtol, atol = (0, 0) if exact else (1e-5, 1e-4) if dtype == jnp.float32 else (2**-7, 1e-6)
    found, expected = (y.astype(jnp.float32) for y in (found, expected))
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=atol)


def test_operations_of_several_products():
    x, *matrices = inputs(2, 128, 16, 8)
    biases = inputs(1, 16)[0][0], inputs(1, 8)[0][0]
    around = Operations(InputNorm(1e-6), biases)
    found = triton.few_rows_matmul(x, *matrices, operations=around, interpret=True)
    every = composed(reference.few_rows_matmul, x, *matrices, operations=around)
    for y, expected in zip(found, every, strict=True):
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("columns", "options", "why"),
    [
        ((8,), {"activation": "tanh"}, "one of relu2, gelu, swiglu, geglu"),
        ((8,), {"activation": "swiglu"}, "two matrices of one shape"),
        ((8, 16), {"activation": "geglu"}, "two matrices of one shape"),
        ((8, 8), {"residual": jnp.zeros((1, 8))}, "one matrix"),
    ],
)
def test_operations_that_do_not_fit(columns, options, why):
    with pytest.raises(ValueError, match=why):
        few_rows_matmul(*inputs(1, 64, *columns), **options)


def test_16_bits_are_added_in_float32():
    arrays = inputs(1, 1024, 16, dtype=BF16)
    (y,) = triton.few_rows_matmul(*arrays, interpret=True)
    (expected,) = reference.few_rows_matmul(*(x.astype(jnp.float32) for x in arrays))
    assert y.dtype == BF16
    np.testing.assert_allclose(y.astype(jnp.float32), expected, rtol=2**-8, atol=1e-3)


@pytest.mark.slow
def test_a_row_is_that_of_it_alone():
    x, w = inputs(4, 192, 16, dtype=BF16)
    (together,) = triton.few_rows_matmul(x, w, interpret=True)
    for i in range(4):
        (alone,) = triton.few_rows_matmul(x[i : i + 1], w, interpret=True)
        np.testing.assert_array_equal(alone[0], together[i])


def test_padded_gives_xla_eight_rows():
    x, *matrices = inputs(1, 64, 8, 16)
    for y, w in zip(padded.few_rows_matmul(x, *matrices), matrices, strict=True):
        np.testing.assert_allclose(y, x @ w, atol=1e-5)
    text = jax.jit(padded.few_rows_matmul).lower(x, *matrices).as_text()
    assert "(tensor<8x64xf32>, tensor<64x16xf32>)" in text and "optimization_barrier" in text


@pytest.mark.parametrize("name", ["triton", "padded", "xla"])
@pytest.mark.quick("padded", "xla")
def test_gradients(name):
    arrays = inputs(1, 64, 8, 16)
    around = Operations(InputNorm(1e-5, jnp.arange(64) / 32), None, "relu2")
    if name == "triton":
        run = functools.partial(triton.few_rows_matmul, operations=around, interpret=True)
    else:
        run = functools.partial(composed, BACKENDS[name].few_rows_matmul, operations=around)
    loss = lambda f: lambda *a: sum((y**2).sum() for y in f(*a))
    plain = functools.partial(composed, reference.few_rows_matmul, operations=around)
    found, expected = (jax.grad(loss(f), (0, 1, 2))(*arrays) for f in (run, plain))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3), found, expected
    )


def lowered(shape, name=None):
    """The program of a call on a Hopper."""
    with on_target("cuda", (9, 0)), preferring(name), jax.sharding.use_abstract_mesh(H200):
        traced = jax.jit(lambda *arrays: few_rows_matmul(*arrays)).trace(*shapes(*shape))
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_several_matrices_are_one_kernel_of_xla():
    text = lowered((2, 768, 768, 128, 128), "triton")
    assert text.count("custom_call") == text.count("@__gpu$xla.gpu.triton") == 1
    assert "dot_general" not in text


def test_a_few_rows_are_tritons_where_it_serves_else_one_row_is_padded():
    assert all("triton" in lowered((M, 768, 768)) for M in (1, 4))
    assert "tensor<8x4096xbf16>" in lowered((1, 4096, 4096))
    assert "tensor<8x768xbf16>" in lowered((1, 768, 768), "padded")
    assert "tensor<8x768xbf16>" in lowered((1, 768, 768, 20))  # Triton has no 20 columns
    for text in (lowered((5, 768, 768)), lowered((1, 768, 768), "xla")):
        assert "tensor<8x" not in text and "triton" not in text
    with pytest.raises(ValueError, match="no backend 'cuda'"), preferring("cuda"):
        pass


def test_many_rows_and_a_cpu_have_matmuls_as_they_are():
    for M in (1, 7, 8):
        x, w = inputs(M, 64, 16)
        text, plain = (jax.jit(f).lower(x, w).as_text() for f in (few_rows_matmul, jnp.matmul))
        assert text.count("dot_general") == plain.count("dot_general") == 1
        assert "pad" not in text
        np.testing.assert_array_equal(few_rows_matmul(x[None], w)[0][0], x @ w)


SIZES = [  # of llama_8b, of gpt_d12, and of widths that are no powers of two
    (4096, (4096, 1024, 1024), None), (4096, (14336, 14336), "swiglu"), (14336, (4096,), None),
    (768, (3072,), "relu2"), (3584, (2432, 2432), "geglu"), (2560, (1000,), "gelu"),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 4])
@pytest.mark.parametrize(("K", "columns", "activation"), SIZES)
def test_operations_on_a_gpu(K, columns, activation, M):
    rng = np.random.default_rng(0)
    some = rng.normal(size=100_003).astype(BF16)
    array = lambda *shape: jnp.asarray(np.resize(some, shape))
    x, residual, gain, bias = array(M, K), array(M, columns[0]), array(K), array(columns[0])
    transposed = M == 1 and max(columns) * K >= LARGE
    shape = lambda N: (N, K) if transposed else (K, N)
    matrices = [jnp.asarray(np.resize(np.roll(some, N), shape(N))) / 64 for N in columns]
    single = activation in GATED or len(columns) == 1
    around = Operations(
        InputNorm(1e-5, 1 + gain / 4), (bias, *(None for _ in columns[1:])), activation,
        residual if single else None,
    )  # fmt: skip
    matmul = functools.partial(xla.few_rows_matmul, transposed=transposed)
    every = composed(matmul, x, *matrices, operations=around)
    found = triton.few_rows_matmul(x, *matrices, operations=around, transposed=transposed)
    for y, expected in zip(found, every, strict=True):
        y, expected = (np.asarray(z, np.float32) for z in (y, expected))
        np.testing.assert_allclose(y, expected, atol=0.02 * np.abs(expected).max(), rtol=2**-6)
        assert np.abs(y - expected).mean() < 0.004 * np.abs(expected).mean()
