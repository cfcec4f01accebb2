"""Products of a few rows: what each backend serves, its numbers on a CPU (Triton's interpreted),
and its lowering for CUDA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from jaxtrain_kernels.dispatch import Target, on_target
from jaxtrain_kernels.matmul.few_rows import (
    BACKENDS,
    few_rows_matmul,
    padded,
    preferring,
    reference,
    triton,
)

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
        (HOPPER, (1, 4096, 4096), BF16, "less than 10000000 weights"),
        (TURING, (1, 64, 8), BF16, "8.0"),
        (Target("cpu"), (1, 64, 8), BF16, "this is cpu"),
    ],
)
def test_what_triton_serves(device, shape, dtype, reason):
    why = triton.supports(device, *shapes(*shape, dtype=dtype))
    assert why is None if reason is None else why is not None and reason in why


@pytest.mark.parametrize("K", [64, 768, 1536, 3072, 4096, 5440])
@pytest.mark.parametrize("columns", [[8], [768], [768, 128, 128], [768, 768, 768], [3072], [1000]])
def test_tiles_divide_the_matrices(K, columns):
    tile = triton.tile_of(K, columns)
    assert tile.inputs * tile.loads * tile.steps == K
    assert all(N % tile.columns == 0 for N in columns)
    assert tile.warps <= 16 and tile.inputs * tile.columns == tile.warps * 32 * 8


@pytest.mark.parametrize(
    ("M", "K", "columns"),
    [(1, 64, [8]), (1, 320, [64]), (4, 192, [16, 64, 16]), (2, 64 * 9, [24]), (3, 64 * 11, [8, 8])],
    ids=str,
)
@pytest.mark.quick("3-704-[8, 8]")
def test_triton_equals_the_reference(M, K, columns):
    arrays = inputs(M, K, *columns)
    for relu2 in (False, True):
        found = triton.few_rows_matmul(*arrays, relu2=relu2, interpret=True)
        every = reference.few_rows_matmul(*arrays, relu2=relu2)
        for y, expected in zip(found, every, strict=True):
            np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-4)


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
    options = {"interpret": True} if name == "triton" else {}
    run = lambda *a: BACKENDS[name].few_rows_matmul(*a, relu2=True, **options)
    loss = lambda f: lambda *a: sum((y**2).sum() for y in f(*a))
    plain = lambda *a: reference.few_rows_matmul(*a, relu2=True)
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
