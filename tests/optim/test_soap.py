"""SOAP: Adam in the eigenvectors of the gradients' second moments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gradient_paths import ADAM, arrays, gradients, rotation, walk

from jaxtrain.optim.adamw import make_adamw
from jaxtrain.optim.eigenbasis import rotate_basis
from jaxtrain.optim.soap import make_soap

SOAP = {**ADAM, "weight_decay": 0.0, "shampoo_beta": 0.9, "precondition_frequency": 3.0}


@pytest.mark.slow
def test_soap_does_not_see_a_rotation_of_the_gradients():
    """The update of U G V^T is that of G, turned the same way; Adam's is not."""
    u, v, grads = rotation(6, 1), rotation(5, 2), gradients(2, 6, 5, steps=8)
    turned = [u @ g @ v.T for g in grads]
    p = jnp.zeros((2, 6, 5))
    apart = lambda tx: np.abs(
        walk(tx, p, turned)[0][-1] - u @ walk(tx, p, grads)[0][-1] @ v.T
    ).max()
    assert apart(make_soap(8)(SOAP)) < 2e-4
    assert apart(make_adamw({**ADAM, "weight_decay": 0.0})) > 0.01


def test_soap_makes_its_basis_first_and_keeps_it_orthogonal():
    p, grads = arrays(2, 6, 5), gradients(2, 6, 5, steps=8)
    path, state = walk(make_soap(8)({**SOAP, "weight_decay": 0.1}), p, grads)
    np.testing.assert_array_equal(path[1], p)  # the first gradient moves nothing
    assert (path[2] != p).all()
    for side, n in ((state.leaves.left, 6), (state.leaves.right, 5)):
        eye = np.broadcast_to(np.eye(n), (2, n, n))
        np.testing.assert_allclose(side.basis.mT @ side.basis, eye, atol=1e-5)
    left = 0
    for i, g in enumerate(grads):
        left = 0.9 * left + 0.1 * g @ g.mT
        if i == 0:
            first = jnp.linalg.eigh(left)[1]
    np.testing.assert_allclose(state.leaves.left.factor, left, rtol=1e-4, atol=1e-5)
    assert np.abs(np.abs(first[..., ::-1].mT @ state.leaves.left.basis) - np.eye(6)).max() > 0.1


def test_soaps_basis_converges_to_the_eigenvectors():
    """The gradients keep their directions: power iterations find them, largest first."""
    u, scales = rotation(5, 1), jnp.float32([5, 4, 3, 2, 1])
    grads = [u @ jnp.diag(scales) @ arrays(5, 5, seed=i) for i in range(60)]
    state = walk(make_soap(8)({**SOAP, "shampoo_beta": 0.99}), arrays(5, 5), grads)[1]
    side = state.leaves.left
    vectors = np.linalg.eigh(side.factor)[1]
    np.testing.assert_allclose(np.abs(vectors[:, ::-1].T @ side.basis), np.eye(5), atol=0.15)
    seen = np.diagonal(side.basis.T @ side.factor @ side.basis)
    assert (np.diff(seen) < 0).all()


def test_rotations_find_the_eigenvectors_from_the_identity():
    """As QR power iteration does, in rounds of matmuls alone, which leave the basis orthogonal."""
    values = jnp.stack([jnp.logspace(0, -2, 24), jnp.linspace(1, 0.1, 24)])
    turns = jnp.stack([rotation(24, 1), rotation(24, 2)])
    factor = jnp.einsum("lij,lj,lkj->lik", turns, values, turns)
    basis = jnp.broadcast_to(jnp.eye(24), factor.shape)
    turn = jax.jit(rotate_basis)
    for _ in range(30):
        basis = turn(factor, basis)
    np.testing.assert_allclose(
        basis.mT @ basis, jnp.broadcast_to(jnp.eye(24), factor.shape), atol=1e-5
    )
    seen = basis.mT @ factor @ basis
    found = -jnp.sort(-jnp.diagonal(seen, axis1=-2, axis2=-1))
    np.testing.assert_allclose(found, values, rtol=1e-2)
    np.testing.assert_allclose(turn(0 * factor, basis), basis, atol=1e-5)


def test_soap_with_rotations_steps_as_with_qr():
    """Gradients whose directions last: both bases come to the same steps."""
    u, v = rotation(6, 1), rotation(5, 2)
    scales = jnp.outer(jnp.float32([6, 4, 3, 2, 1.4, 1]), jnp.float32([1, 0.7, 0.5, 0.3, 0.2]))
    grads = [u @ (scales * arrays(6, 5, seed=i)) @ v.T for i in range(80)]
    often = {**SOAP, "precondition_frequency": 1.0, "shampoo_beta": 0.98}
    paths = [
        np.diff(walk(tx, jnp.zeros((6, 5)), grads)[0], axis=0)[-1]
        for tx in (make_soap(8)(often), make_soap(8, "newton_schulz")(often), make_adamw(ADAM))
    ]
    apart = lambda a, b: np.linalg.norm(a - b) / np.linalg.norm(a)
    assert apart(paths[0], paths[1]) < 0.05 < 0.3 < apart(paths[0], paths[2])


def test_soap_leaves_large_dims_alone():
    p, grads = arrays(6, 5), gradients(6, 5, steps=4)
    _, state = walk(make_soap(5)(SOAP), p, grads)
    assert state.leaves.left is None and state.leaves.right is not None
    neither, state = walk(make_soap(4)(SOAP), p, grads)
    adam, _ = walk(make_adamw({**ADAM, "weight_decay": 0.0}), p, grads[1:])
    assert state.leaves.left is None and state.leaves.right is None
    np.testing.assert_allclose(neither[-1], adam[-1], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_soap_wins_where_the_inputs_are_turned():
    """Noisy least squares whose inputs have axes of their own; the best of three rates."""
    n, steps = 16, 100
    root = rotation(n, 1) @ jnp.diag(jnp.logspace(0, -2, n)) @ rotation(n, 1).T
    target = arrays(n, n, seed=5)

    def end(make, rate):
        state = make({**SOAP, "learning_rate": rate}).init(target)

        @jax.jit
        def run(state):
            def step(carry, i):
                p, state = carry
                x = jax.random.normal(jax.random.key(i), (64, n)) @ root
                g = x.T @ (x @ (p - target)) / 64
                tx = make({**SOAP, "learning_rate": rate * (1 - i / steps)})
                updates, state = tx.update(g, state, p)
                return (optax.apply_updates(p, updates), state), None

            (p, _), _ = jax.lax.scan(step, (jnp.zeros((n, n)), state), jnp.arange(steps))
            return jnp.sum(jnp.square(root @ (p - target)))

        return float(run(state))

    soap, adam = (
        min(end(make, r) for r in (0.1, 0.3, 1.0)) for make in (make_soap(64), make_adamw)
    )
    assert soap < 0.3 * adam
