"""Symmetric matmuls: backends against the reference, the Hopper kernel interpreted and lowered."""

import functools
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtrain_kernels import matmul
from jaxtrain_kernels.dispatch import on_target
from jaxtrain_kernels.matmul import reference, xla
from jaxtrain_kernels.matmul.hopper import symmetric
from jaxtrain_kernels.matmul.hopper.symmetric import Tiling

from jaxtrain.optim.orthogonalize import POLAR_EXPRESS, orthogonalize

# The mode that knows bar.sync and bar.arrive, named barriers of the hardware.
INTERPRET = plgpu.InterpretGPUParams(
    inline_mgpu="_hack_model_inline_mgpu_tokamax", detect_races=True
)
SMALL = Tiling(warpgroups=2, stages=3, blocks=2)
COEFFICIENTS = (3.0, -2.0, 0.5)
OPS = ("gram", "square_polynomial", "symmetric_product")


def arguments(op: str, L: int, M: int, K: int, dtype: Any = jnp.bfloat16):
    """Matrices of norm 1 or so; the symmetric ones commute, as polynomials of one."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((L, M, K)) / np.sqrt(K)
    if op == "gram":
        return (jnp.asarray(x, dtype),)
    a = x @ x.mT
    if op == "square_polynomial":
        return jnp.asarray(a, dtype), COEFFICIENTS
    return jnp.asarray(a, dtype), jnp.asarray(np.eye(M) - 0.5 * a + 0.1 * a @ a, dtype)


def assert_equals_reference(op, L, M, K, dtype, tiling):
    given = arguments(op, L, M, K, dtype)
    run = functools.partial(getattr(symmetric, op), tiling=tiling, interpret=INTERPRET)
    out = run(*given)
    wide = [x.astype(jnp.float32) if isinstance(x, jax.Array) else x for x in given]
    expected = getattr(reference, op)(*wide)
    assert out.dtype == dtype
    # A product of rounded operands commutes up to their rounding.
    eps = float(jnp.finfo(dtype).eps)
    atol = 8 * eps if op == "symmetric_product" else eps
    np.testing.assert_allclose(out.astype(jnp.float32), expected, atol=atol, rtol=eps)


EVEN = 2, 256, 256, jnp.bfloat16, SMALL
ODD_TILES = 1, 384, 192, jnp.float16, SMALL._replace(stages=2)
RAGGED = 1, 192, 64, jnp.float16, SMALL._replace(blocks=1)
THREE_WARPGROUPS = 2, 256, 128, jnp.bfloat16, Tiling(blocks=1)


@pytest.mark.parametrize(
    ("op", "L", "M", "K", "dtype", "tiling"),
    [
        ("gram", *ODD_TILES), ("gram", *THREE_WARPGROUPS), ("square_polynomial", *EVEN),
        ("square_polynomial", *RAGGED), ("symmetric_product", *RAGGED),
        ("symmetric_product", *THREE_WARPGROUPS),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_mosaic_equals_reference_without_races(op, L, M, K, dtype, tiling, capfd):
    assert_equals_reference(op, L, M, K, dtype, tiling)
    assert "RACE" not in "".join(capfd.readouterr())


@pytest.mark.slow
def test_each_matrix_may_have_a_polynomial_of_its_own():
    a, _ = arguments("square_polynomial", 2, 192, 192, jnp.float16)
    each = jnp.asarray([COEFFICIENTS, (0.5, 1.5, -0.25)], jnp.float32)
    out = symmetric.square_polynomial(a, each, tiling=SMALL, interpret=INTERPRET)
    wide = a.astype(jnp.float32)
    expected = [reference.square_polynomial(wide[n : n + 1], tuple(each[n])) for n in range(2)]
    eps = float(jnp.finfo(jnp.float16).eps)
    np.testing.assert_allclose(out.astype(jnp.float32), jnp.concatenate(expected), atol=eps)
    for backend in (xla, reference):
        other = backend.square_polynomial(wide, each)
        np.testing.assert_allclose(other, jnp.concatenate(expected), atol=1e-5)


@pytest.mark.gpu
def test_on_a_gpu_each_matrix_has_its_polynomial():
    a, _ = arguments("square_polynomial", 3, 768, 768, jnp.float16)
    each = jnp.asarray([COEFFICIENTS, (0.5, 1.5, -0.25), (8.0, -3.0, 0.1)], jnp.float32)
    out = jax.jit(symmetric.square_polynomial)(a, each).astype(jnp.float32)
    with jax.default_matmul_precision("highest"):
        expected = reference.square_polynomial(a.astype(jnp.float32), each)
    eps = float(jnp.finfo(jnp.float16).eps)
    np.testing.assert_allclose(out, expected, atol=8 * eps, rtol=2 * eps)


@pytest.mark.slow
def test_a_mapped_axis_is_one_more_axis_of_the_grid():
    """As in a population of models (`jaxtrain.train.population`)."""
    (x,) = arguments("gram", 2, 192, 64, jnp.float16)
    run = functools.partial(symmetric.gram, tiling=SMALL._replace(blocks=1), interpret=INTERPRET)
    out = jax.vmap(run)(x[:, None])
    expected = reference.gram(x.astype(jnp.float32))[:, None]
    eps = float(jnp.finfo(jnp.float16).eps)
    np.testing.assert_allclose(out.astype(jnp.float32), expected, atol=eps, rtol=eps)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_xla_equals_reference(op, dtype):
    given = arguments(op, 2, 24, 40, dtype)
    out, expected = (getattr(module, op)(*given) for module in (xla, reference))
    assert out.dtype == expected.dtype == dtype
    atol = 4 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(out.astype("float32"), expected.astype("float32"), atol=atol)


def test_references_say_what_they_should():
    a = np.array([[[2.0, 1.0], [1.0, 3.0]]])
    np.testing.assert_allclose(reference.gram(jnp.asarray(a)), [[[5, 5], [5, 10]]])
    out = reference.square_polynomial(jnp.asarray(a), COEFFICIENTS)
    np.testing.assert_allclose(out, [[[3 - 4 + 2.5, -2 + 2.5], [-2 + 2.5, 3 - 6 + 5]]])
    np.testing.assert_allclose(
        reference.symmetric_product(jnp.asarray(a), out), a @ np.asarray(out)
    )


def test_the_tiles_are_the_upper_triangle():
    for rows in range(1, 8):
        tiling = Tiling(blocks=3)
        plan = symmetric.SymmetricPlan(
            2, rows * tiling.tile, 64, jnp.bfloat16, True, False, tiling, 3
        )
        seen = [symmetric.tile_of(plan, np.int32(n)) for n in range(plan.n_tiles)]
        expected = [(n, i, j) for n in range(2) for i in range(rows) for j in range(i, rows)]
        assert sorted(tuple(int(x) for x in tile) for tile in seen) == expected


def test_tiles_fit_the_matrix():
    assert symmetric.default_tiling(1536).warpgroups == 3
    assert symmetric.default_tiling(256).warpgroups == 2


@pytest.mark.parametrize(
    ("dtype", "M", "op"),
    [
        (jnp.bfloat16, 768, "gram"), (jnp.float16, 1088, "symmetric_product"),
        (jnp.bfloat16, 1088, "square_polynomial"), (jnp.float16, 768, "square_polynomial"),
        (jnp.bfloat16, 768, "symmetric_product"), (jnp.float16, 1088, "gram"),
    ],
)  # fmt: skip
@pytest.mark.quick("bfloat16-1088-square_polynomial")
def test_lowers_for_hopper(op, M, dtype):
    arrays = [jax.ShapeDtypeStruct((4, M, 4 * M if op == "gram" else M), dtype)]
    arrays += [arrays[0]] if op == "symmetric_product" else []
    more = {"coefficients": COEFFICIENTS} if op == "square_polynomial" else {}
    with on_target("cuda", (9, 0)):
        traced = jax.jit(functools.partial(getattr(matmul, op), **more)).trace(*arrays)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


@pytest.mark.parametrize(
    ("device", "shape", "dtype", "reason"),
    [
        (("cpu", None), (1, 192, 192), jnp.bfloat16, "needs an NVIDIA GPU, this is cpu"),
        (("cuda", (8, 0)), (1, 192, 192), jnp.bfloat16, "needs compute capability 9.0"),
        (("cuda", (9, 0)), (1, 192, 192), jnp.float32, "needs bfloat16 or float16, got float32"),
        (("cuda", (9, 0)), (1, 64, 40), jnp.bfloat16, r"in multiples of 64, got \[64, 40\]"),
    ],
)
def test_what_it_cannot_serve_is_refused_with_the_reason_and_goes_to_xla(
    device, shape, dtype, reason
):
    x = jnp.ones(shape, dtype)
    with on_target(*device):
        with pytest.raises(NotImplementedError, match=reason):
            matmul.gram(x, implementation="mosaic")
        out = matmul.gram(x)
    np.testing.assert_array_equal(out, xla.gram(x))


@pytest.mark.parametrize(("shape", "products"), [((2, 256, 256), 10), ((2, 512, 192), 13)])
@pytest.mark.quick("shape0-10")
def test_muon_asks_for_them(monkeypatch, shape, products):
    module = sys.modules[orthogonalize.__module__]  # jaxtrain.optim.muon is also a function
    monkeypatch.setattr(module, "matmul_dtype", lambda wanted=jnp.bfloat16: jnp.dtype(wanted))

    def calls(symmetric):
        run = lambda x: orthogonalize(x, POLAR_EXPRESS, symmetric=symmetric)
        with on_target("cuda", (9, 0)):
            jaxpr = jax.make_jaxpr(run)(jax.ShapeDtypeStruct(shape, jnp.float32))
        return len(re.findall(r"\bname=_symmetric", str(jaxpr)))

    assert calls(True) == products
    assert calls(False) == 0
