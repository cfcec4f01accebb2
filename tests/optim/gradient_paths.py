"""Gradients and parameter paths for the tests of single optimizers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

ADAM = {"learning_rate": 0.01, "weight_decay": 0.1, "b1": 0.9, "b2": 0.95, "eps": 1e-8}


def arrays(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def rotation(n, seed):
    return jnp.linalg.qr(arrays(n, n, seed=seed))[0]


def walk(tx, params, grads):
    """Parameters before and after each gradient, and the last state."""
    state, update, path = tx.init(params), jax.jit(tx.update), [params]
    for g in grads:
        updates, state = update(g, state, path[-1])
        path.append(optax.apply_updates(path[-1], updates))
    return path, state


def gradients(*shape, steps=3):
    return [arrays(*shape, seed=10 + i) for i in range(steps)]
