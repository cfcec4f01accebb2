"""Gradient of an embedding: the kernels equal the reference, on a CPU and on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from jaxtrain_kernels.dispatch import Target, on_target, target
from jaxtrain_kernels.embedding_grad import embedding_grad, reference, triton

H200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))
HOPPER = Target("cuda", (9, 0))
BF16 = jnp.bfloat16
# Tokens M, rows V, width D, and the share of the most frequent token.
SHAPES = [(700, 300, 384, 0.4), (96, 3, 128, 0.3), (20, 50, 256, 0.0), (64, 8, 128, 1.0)]


def batch(M, V, D, share, whole=False):
    """Gradients of M tokens; whole: small integers, whose sums are exact."""
    rng = np.random.default_rng([M, V])
    tokens = np.where(rng.random(M) < share, V - 1, rng.integers(V, size=M))
    g = rng.integers(-3, 4, (M, D)) if whole else rng.normal(size=(M, D))
    return jnp.asarray(g, BF16), jnp.asarray(tokens, jnp.int32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.quick("(700, 300, 384, 0.4)")
def test_the_kernels_equal_the_reference(shape):
    """Frequent tokens have several pieces, and some rows no token."""
    g, tokens = batch(*shape, whole=True)
    found = triton.embedding_grad(g, tokens, shape[1], jnp.float32, interpret=True)
    expected = reference.embedding_grad(g, tokens, shape[1], jnp.float32)
    np.testing.assert_array_equal(found, expected)


def test_sums_are_rounded_once():
    """1,024 and 31 ones: a sum in bfloat16 would stay at 1,024."""
    g, tokens = jnp.ones((32, 128), BF16).at[0].set(1024), jnp.zeros(32, jnp.int32)
    sums = triton.embedding_grad(g, tokens, 2, BF16, interpret=True)
    assert sums.dtype == BF16
    np.testing.assert_array_equal(sums[:, 0].astype(jnp.float32), [1056, 0])


def test_one_sort_serves_all_tables():
    """XLA finds that the sort of the same tokens is the same, as compiled for a CPU."""
    run = lambda a, b, tokens: [
        triton.embedding_grad(g, tokens, 50, BF16, interpret=True) for g in (a, b)
    ]
    g, tokens = batch(64, 50, 128, 0.2)
    text = jax.jit(run).lower(g, 2 * g, tokens).compile().as_text() or ""
    assert text.count(" sort(") == 1


def test_lowers_for_cuda_without_a_scatter_of_values():
    S = jax.ShapeDtypeStruct
    run = lambda g, tokens: embedding_grad(g, tokens, 32768, BF16)
    given = S((4096, 1536), BF16), S((4096,), jnp.int32)
    with on_target("cuda", (9, 0)), jax.sharding.use_abstract_mesh(H200):
        text = jax.jit(run).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__gpu$xla.gpu.triton") == 2
    assert "32768x1536xf32" not in text


@pytest.mark.parametrize(
    ("device", "shape", "dtype", "size", "reason"),
    [
        (HOPPER, (4096, 768), BF16, 32768, None),
        (HOPPER, (4096, 768), jnp.float32, 32768, "got float32"),
        (HOPPER, (4096, 192), BF16, 32768, "multiples of 128, got 192"),
        (HOPPER, (4096, 768), BF16, 2**22, "at most 2147483647 values"),
        (Target("cuda", (8, 0)), (4096, 768), BF16, 32768, "9.0"),
        (Target("cpu"), (4096, 768), BF16, 32768, "needs an NVIDIA GPU, this is cpu"),
    ],
)
def test_reasons(device, shape, dtype, size, reason):
    found = triton.supports(device, jax.ShapeDtypeStruct(shape, dtype), size)
    assert found is None if reason is None else reason in (found or "")


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.0, 0.05, 1.0])
def test_sums_on_a_gpu(share):
    """32,768 tokens of 1,536 channels: exact sums of integers."""
    g, tokens = batch(32768, 32768, 1536, share, whole=True)
    if reason := triton.supports(target(), g, 32768):
        pytest.skip(reason)
    run = lambda name: jax.jit(
        functools.partial(embedding_grad, size=32768, dtype=jnp.float32, implementation=name)
    )(g, tokens)
    np.testing.assert_array_equal(run("triton"), run("reference"))
