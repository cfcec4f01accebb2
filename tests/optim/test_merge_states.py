"""The mean of several optimizers' states, which stands for all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.optim import merge_states
from jaxtrain.optim.adamw8bit import decode, make_adamw8bit
from jaxtrain.optim.soap import make_soap

RATES = {"learning_rate": 0.01, "weight_decay": 0.0, "b1": 0.9, "b2": 0.9, "eps": 1e-8}
P = {"up": jnp.ones((2, 12, 100)), "gate": jnp.ones((2, 3))}


def states_of(tx, params, count=3):
    """The states after two steps on gradients of each one's own, stacked in front."""
    random = np.random.default_rng(0)
    grads = {
        k: jnp.asarray(random.normal(size=(2, count, *p.shape)), jnp.float32)
        for k, p in params.items()
    }
    state = jax.vmap(lambda _: tx.init(params))(jnp.arange(count))
    for i in range(2):
        now = jax.tree.map(lambda g, i=i: g[i], grads)
        state = jax.vmap(lambda g, s: tx.update(g, s, params)[1])(now, state)
    return state


def test_values_are_averaged_in_float32_and_counts_stay():
    x_RN = jnp.asarray([[256.0, 1.0], [1.0, 1.0], [1.0, 4.0]], jnp.bfloat16)
    got = merge_states({"m": x_RN, "count": jnp.asarray([7, 7, 7]), "none": None})
    assert got["m"].dtype == jnp.bfloat16 and got["none"] is None
    np.testing.assert_array_equal(got["m"], jnp.asarray([86.0, 2.0], jnp.bfloat16))  # in 16: 85.5
    assert got["count"] == 7 and got["count"].dtype == jnp.int32


@pytest.mark.slow
def test_the_mean_is_of_what_8_bit_codes_stand_for():
    old = states_of(make_adamw8bit(64, 16)(RATES), P)
    new = jax.jit(merge_states)(old)
    assert new.count == 2 and new.block.shape == (64,)
    for signed, moments, had in ((True, new.m, old.m), (False, new.v, old.v)):
        codes, expected = moments["up"], decode(*had["up"], 64, signed).mean(0)
        assert codes.values.dtype == jnp.uint8 and codes.values.shape == P["up"].shape
        # Between two codes of the last decade are 0.9 / 64 (signed) and 0.9 / 128 of the maximum.
        error = 0.9 / (128 if signed else 256) * np.abs(expected).max() * 1.01
        np.testing.assert_allclose(decode(*codes, 64, signed), expected, rtol=0, atol=error)
        np.testing.assert_allclose(moments["gate"].values, had["gate"].values.mean(0), rtol=1e-6)


@pytest.mark.slow
def test_an_eigenbasis_stays_one():
    rates = RATES | {"shampoo_beta": 0.9, "precondition_frequency": 10}
    old = states_of(make_soap(20)(rates), {"up": P["up"]})
    new = jax.jit(merge_states)(old)
    leaf, had = new.leaves["up"], old.leaves["up"]
    assert new.count == 2 and leaf.right is None  # 100 is above 20
    np.testing.assert_allclose(leaf.m, had.m.mean(0), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(leaf.left.factor, had.left.factor.mean(0), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(leaf.v, had.v[0])
    turned = leaf.left.basis.mT @ leaf.left.basis
    np.testing.assert_allclose(turned, np.broadcast_to(np.eye(12), turned.shape), atol=1e-5)
    whole = states_of(make_soap(4)(rates), {"up": P["up"]})  # Adam, as no dim is that small
    v = jax.jit(merge_states)(whole).leaves["up"].v
    np.testing.assert_allclose(v, whole.leaves["up"].v.mean(0), rtol=1e-6)
