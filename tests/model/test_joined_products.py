"""Matrices side by side in one product: arrays, float8, and forms that have none."""

import jax
import jax.numpy as jnp
import jaxtrain_kernels as kernels
import numpy as np
import pytest

from jaxtrain.weights.contract import matmul_joined
from jaxtrain.weights.float8 import Fp8Weight


def operands():
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    return normal(2, 16, 32), [normal(32, n) / 6 for n in (32, 16, 16)], normal(2, 16, 64)


def joined_product(x, *matrices):
    """`matmul_joined`'s output, or None."""
    product = matmul_joined(x, *matrices)
    return None if product is None else product.y


def results(f, *arguments, dy):
    y, pull = jax.vjp(f, *arguments)
    return y, pull(dy)


def test_arrays_have_the_product_and_the_gradients_of_their_concatenation():
    x, matrices, dy = operands()
    plain = lambda x, *ws: x @ jnp.concatenate(ws, axis=1)
    ours, expected = (results(f, x, *matrices, dy=dy) for f in (joined_product, plain))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("delayed", [False, True])
def test_float8_matrices_are_one_product_whose_maxima_reach_each_history(delayed):
    x, matrices, dy = operands()
    most = [(jnp.float32(4.0), jnp.float32(3.0 + n)) for n in range(3)]

    def joined(x, matrices, most):
        # One of the three reports what they all read.
        stopped = [(a if n == 1 else jax.lax.stop_gradient(a), b) for n, (a, b) in enumerate(most)]
        forms = [
            Fp8Weight(w, None, amax if delayed else None) for w, amax in zip(matrices, stopped)
        ]
        return joined_product(x, *forms)

    def plain(x, w):
        amax_2 = jnp.asarray([4.0, 5.0]) if delayed else None
        y = kernels.fp8_matmul(x.reshape(-1, 32), w, amax_2=amax_2, implementation="xla")
        return y.reshape(2, 16, -1)

    w = jnp.concatenate(matrices, axis=1)
    y, (dx, dws, seen) = results(joined, x, matrices, most, dy=dy)
    expected, (dx_expected, dw) = results(plain, x, w, dy=dy)
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(dx, dx_expected)
    np.testing.assert_array_equal(jnp.concatenate(dws, axis=1), dw)
    if delayed:
        assert [float(a) for a, _ in seen] == [0, float(jnp.abs(x).max()), 0]
        assert [float(b) for _, b in seen] == [float(jnp.abs(dy).max())] * 3


def test_other_forms_and_mixtures_have_none():
    x, matrices, _ = operands()
    forms = [Fp8Weight(w, None) for w in matrices]
    assert matmul_joined(x, forms[0], matrices[1], forms[2]) is None
    assert matmul_joined(x, matrices[0], *forms[1:]) is None
