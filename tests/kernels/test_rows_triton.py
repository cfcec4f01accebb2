"""The passes over a few rows in Triton: numbers on a CPU (interpreted), lowering for CUDA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from jaxtrain_kernels import rows
from jaxtrain_kernels.dispatch import Target, on_target
from jaxtrain_kernels.rows import reference, triton

H200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))
EPS = 1e-6
HOPPER = Target("cuda", (9, 0))


def array(*shape, dtype=jnp.float32, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), dtype)


def case(name, B, T, D, dtype=jnp.float32):
    """(op, arrays). D: of a row, or four heads of D / 4 and two of keys."""
    make = functools.partial(array, dtype=dtype)
    x, y, x0 = (make(B, T, D, seed=i) for i in range(3))
    if name == "residual_norm":
        return name, (x, y)
    if name == "mixed_norm":
        return name, (x, y, x0, jnp.float32(1.1), jnp.float32(0.3))
    if name == "mixed_norm_alone":
        return "mixed_norm", (x, None, x0, jnp.float32(1.1), jnp.float32(0.3))
    H, b = D // 4, B if name == "rope_norm" else 1
    turns = array(b, T, H, seed=4), array(b, T, H, seed=5)
    return "rope_norm", (x.reshape(B, T, 4, H), make(B, T, 2, H, seed=3), *turns)


CASES = ["residual_norm", "mixed_norm", "mixed_norm_alone", "rope_norm", "rope_norm_shared"]


def assert_close(found, expected, atol):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one.astype("float32"), other.astype("float32"), atol=atol)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shape", [(1, 1, 64), (3, 2, 80), (2, 1, 768)], ids=str)
@pytest.mark.quick(
    "(3, 2, 80)-residual_norm",
    "(3, 2, 80)-mixed_norm",
    "(3, 2, 80)-mixed_norm_alone",
    "(3, 2, 80)-rope_norm",
    "(3, 2, 80)-rope_norm_shared",
)
def test_they_equal_the_reference(name, shape):
    op, arrays = case(name, *shape)
    found = getattr(triton, op)(*arrays, eps=EPS, interpret=True)
    if op == "rope_norm":
        found_by = lambda m, **k: m.rope_norm(*arrays[:2], *signed(*arrays[2:]), eps=EPS, **k)
        assert_close(found_by(triton, interpret=True), found_by(reference), 1e-5)
    else:
        assert_close(found, getattr(reference, op)(*arrays, eps=EPS), 1e-5)


def signed(cos_BTH, sin_BTH):
    """In both halves, sines negative in the first."""
    h = cos_BTH.shape[-1] // 2
    cos, sin = cos_BTH[..., :h], sin_BTH[..., :h]
    return jnp.concatenate([cos, cos], -1), jnp.concatenate([-sin, sin], -1)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_16_bits_stay_close(name):
    op, arrays = case(name, 2, 1, 128, jnp.bfloat16)
    if op == "rope_norm":
        arrays = *arrays[:2], *signed(*arrays[2:])
    found = getattr(triton, op)(*arrays, eps=EPS, interpret=True)
    assert all(x.dtype == jnp.bfloat16 for x in found)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), arrays)
    assert_close(found, getattr(reference, op)(*wide, eps=EPS), 0.06)


@pytest.mark.parametrize("name", ["residual_norm", "mixed_norm_alone", "rope_norm"])
@pytest.mark.quick("residual_norm", "mixed_norm_alone")
def test_gradients(name):
    op, arrays = case(name, 1, 2, 64)
    if op == "rope_norm":
        arrays = *arrays[:2], *signed(*arrays[2:])
    loss = lambda m, **k: (
        lambda *a: sum(
            (x**2).sum() * i for i, x in enumerate(getattr(m, op)(*a, eps=EPS, **k)[:2], 1)
        )
    )
    # The reference takes the angles of one half alone.
    wanted = (
        (0, 1) if op == "rope_norm" else tuple(i for i, x in enumerate(arrays) if x is not None)
    )
    found = jax.grad(loss(triton, interpret=True), wanted)(*arrays)
    assert_close(found, jax.grad(loss(reference), wanted)(*arrays), 1e-3)


@pytest.mark.parametrize("name", CASES)
def test_each_is_one_kernel_of_xla(name):
    op, arrays = case(name, 2, 1, 768, jnp.bfloat16)
    run = functools.partial(getattr(rows, op), eps=EPS, implementation="triton")
    with on_target("cuda", (9, 0)), jax.sharding.use_abstract_mesh(H200):
        text = jax.jit(lambda *a: run(*a)).trace(*arrays).lower(lowering_platforms=("cuda",))
    text = text.as_text()
    assert text.count("custom_call") == text.count("@__gpu$xla.gpu.triton") == 1
    assert "stablehlo.multiply" not in text and "stablehlo.reduce" not in text


@pytest.mark.parametrize(
    ("op", "shape", "dtype", "device", "reason"),
    [
        ("residual_norm", (32, 8, 768), jnp.bfloat16, HOPPER, None),
        ("residual_norm", (32, 9, 768), jnp.bfloat16, HOPPER, "at most 256 tokens, got 288"),
        ("residual_norm", (1, 1, 768), jnp.float32, HOPPER, "got float32"),
        ("relu2", (1, 1, 768), jnp.bfloat16, HOPPER, "no squared ReLU"),
        ("rope_norm", (1, 1, 6, 64), jnp.bfloat16, Target("cpu"), "this is cpu"),
    ],
)
def test_what_they_serve(op, shape, dtype, device, reason):
    why = triton.supports(device, op, jax.ShapeDtypeStruct(shape, dtype))
    assert why is None if reason is None else why is not None and reason in why
