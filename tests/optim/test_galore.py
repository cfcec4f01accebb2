"""GaLore and Q-GaLore, whose gap doubles for a matrix whose subspace rests, and for no other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gradient_paths import ADAM, arrays, gradients, rotation, walk

from jaxtrain.optim.adamw import make_adamw
from jaxtrain.optim.galore import GaLoreConfig, from_int4, make_galore, to_int4

HYPER = {"learning_rate": 0.1, "b1": 0.9, "b2": 0.999, "eps": 1e-8}
HYPER |= {"weight_decay": 0.0, "gap": 2.0, "scale": 0.5}


def galore_of(**fields):
    c = GaLoreConfig.model_validate({"rank": 4, "gap": 3, **fields})
    return make_galore(c)({**ADAM, "weight_decay": 0.1, "gap": 3.0, "scale": 0.5})


@pytest.mark.parametrize("shape", [(2, 6, 10), (2, 10, 6)], ids=str)
def test_galore_is_adam_in_the_subspace_of_every_third_gradient(shape):
    """By numpy, each matrix of the stack by itself."""
    p, grads = arrays(*shape), gradients(*shape, steps=5)
    tx = galore_of()
    state, flip = tx.init(p), shape[-2] > shape[-1]
    m = v = np.zeros((2, 4, 10))
    for t, g in enumerate(grads):
        u, state = jax.jit(tx.update)(g, state, p)
        wide = np.asarray(g.mT if flip else g)
        if t % 3 == 0:
            basis = np.linalg.svd(wide)[0][..., :4]
            # the state's own signs of the singular vectors
            own = np.asarray(state.leaves.projection)
            np.testing.assert_allclose(np.abs(basis), np.abs(own), rtol=1e-3, atol=1e-4)
            basis = own
        seen = basis.swapaxes(-1, -2) @ wide
        m, v = ADAM["b1"] * m + (1 - ADAM["b1"]) * seen, ADAM["b2"] * v + (1 - ADAM["b2"]) * seen**2
        adam = (
            m
            / (1 - ADAM["b1"] ** (t + 1))
            / (np.sqrt(v / (1 - ADAM["b2"] ** (t + 1))) + ADAM["eps"])
        )
        moved = basis @ adam
        moved = moved.swapaxes(-1, -2) if flip else moved
        expected = -ADAM["learning_rate"] * (0.5 * moved + 0.1 * np.asarray(p))
        np.testing.assert_allclose(u, expected, rtol=1e-3, atol=1e-5)


def test_galores_states_are_smaller_than_adams_and_q_galores_smaller_still():
    p = {"w": jnp.zeros((2, 256, 512))}
    size = lambda tx: sum(
        x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(tx.init, p))
    )
    adam = size(make_adamw(ADAM))
    plain, quantized = (size(galore_of(rank=64, quantize=q)) for q in (False, True))
    assert plain < 0.35 * adam and quantized < 0.25 * plain
    assert size(galore_of(rank=256)) == pytest.approx(adam, rel=1e-5)  # no smaller: plain Adam


@pytest.mark.slow
def test_q_galore_steps_as_galore_does_but_for_its_rounding():
    p, grads = arrays(2, 16, 24), gradients(2, 16, 24, steps=4)
    one, other = (
        np.diff(walk(galore_of(rank=8, quantize=q), p, grads)[0], axis=0) for q in (False, True)
    )
    off = np.linalg.norm(one - other) / np.linalg.norm(one)
    assert 1e-3 < off < 0.3
    x = rotation(16, 3)[:, :8]
    codes, scale = to_int4(x)
    assert codes.dtype == jnp.uint8 and codes.size == x.size // 2
    assert np.abs(from_int4(codes, scale) - x).max() <= 0.5 * np.max(scale) + 1e-6


def gap_states(steps, **fields):
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
    states = gap_states(16, quantize=quantize)
    made = [
        [i for i in range(1, 16) if np.any(states[i].projection[m] != states[i - 1].projection[m])]
        for m in (0, 1)
    ]
    assert made[0] == [2, 4, 8, 12]
    assert made[1] == list(range(2, 16, 2))
    assert states[-1].gap.steps.tolist() == [8, 2] and states[-1].gap.next.tolist() == [20, 16]


def test_without_the_field_the_state_has_no_gap():
    assert gap_states(1, gap_similarity=None)[0].gap is None
