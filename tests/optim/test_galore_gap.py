"""Q-GaLore's gap: it doubles for a matrix whose subspace rests, and for no other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.optim.galore import GaLoreConfig, make_galore

HYPER = {"learning_rate": 0.1, "b1": 0.9, "b2": 0.999, "eps": 1e-8}
HYPER |= {"weight_decay": 0.0, "gap": 2.0, "scale": 0.5}


def walk(steps, **fields):
    """State after each step; the first matrix has gradients of rank 4, those of the other turn."""
    c = {"rank": 4, "gap": 2, "gap_similarity": 0.7, "gap_patience": 2} | fields
    tx = make_galore(GaLoreConfig.model_validate(c))(HYPER)
    random = np.random.default_rng(0)
    left, params = random.normal(size=(16, 4)), {"w": jnp.zeros((2, 16, 24))}
    update, state, states = jax.jit(tx.update), tx.init(params), []
    for _ in range(steps):
        still, other = left @ random.normal(size=(4, 24)), random.normal(size=(16, 24))
        grads = {"w": jnp.asarray(np.stack([still, other]), jnp.float32)}
        _, state = update(grads, state, params)
        states.append(jax.tree.map(np.asarray, state.leaves["w"]))
    return states


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.quick("False")
def test_the_gap_doubles_where_the_subspace_rests(quantize):
    """Projections of the first matrix at steps 0, 2, 4 (twice the same: gap 4), 8, 12 (gap 8)."""
    states = walk(16, quantize=quantize)
    made = [
        [i for i in range(1, 16) if np.any(states[i].projection[m] != states[i - 1].projection[m])]
        for m in (0, 1)
    ]
    assert made[0] == [2, 4, 8, 12]
    assert made[1] == list(range(2, 16, 2))
    assert states[-1].gap.steps.tolist() == [8, 2] and states[-1].gap.next.tolist() == [20, 16]


def test_without_the_field_the_state_has_no_gap():
    assert walk(1, gap_similarity=None)[0].gap is None
