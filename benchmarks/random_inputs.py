"""Inputs of a step on the device: an initial state, and batches of random tokens."""

import jax
import jax.numpy as jnp

from jaxtrain.data import Batch
from jaxtrain.estimate.workload import Workload, batch_shapes
from jaxtrain.train.step import State, init_state, state_shardings

DOCUMENTS = 4  # documents per row, if the configuration masks attention by document


def random_batch(w: Workload, seed: int) -> Batch:
    """Uniform token ids, made on the device; every label has weight 1."""
    like = batch_shapes(w)
    shape = like.tokens_BT.shape

    def make() -> Batch:
        longer = jax.random.randint(
            jax.random.key(seed), (*shape[:2], shape[2] + 1), 0, w.vocab_size
        )
        length = -(-shape[2] // DOCUMENTS)
        position = jnp.broadcast_to(jnp.arange(shape[2]), shape)
        segments = None if like.segments_BT is None else position // length + 1
        positions = None if like.positions_BT is None else position % length
        weights = jnp.ones(shape, jnp.float32)
        return like._replace(
            tokens_BT=longer[..., :-1], targets_BT=longer[..., 1:], weights_BT=weights,
            segments_BT=segments, positions_BT=positions,
        )  # fmt: skip

    return jax.jit(make, out_shardings=jax.tree.map(lambda x: x.sharding, like))()


def new_state(w: Workload) -> State:
    create = jax.jit(lambda: init_state(w.spec, 0), out_shardings=state_shardings(w.spec, w.mesh))
    return create()
