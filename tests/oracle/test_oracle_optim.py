"""Our optimizer against nanochat's in PyTorch float64 (make_golden.py), and its schedules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import Golden, model_of, to_ours

from jaxtrain.model import path_name
from jaxtrain.model.init import constant
from jaxtrain.optim import MuonConfig, Scale, make_optimizer, resolve_optimizer
from jaxtrain.optim.muon import adjust, muon
from jaxtrain.optim.schedule import multiplier, schedule_values
from jaxtrain.weights.params import ParamSpec

GOLDEN = Golden("golden_optim")
FACTS = GOLDEN.facts("facts")
SCALE = Scale(**FACTS["rule"])
SWITCHES = FACTS["muon"]


def trajectory(config, specs, params, gradients):
    """Parameters after each of the steps that the fixture took, by our optimizer."""
    optimizer = make_optimizer(resolve_optimizer(config, SCALE), specs, FACTS["steps"])
    state, update, path = optimizer.init(params), jax.jit(optimizer.update), []
    for step, g in zip(FACTS["at"], gradients, strict=True):
        updates, state = update(g, state, params, jnp.int32(step), optimizer.hyperparams)
        params = jax.tree.map(jnp.add, params, updates)
        path.append(params)
    return path


def assert_equal_moves(after, expected, before, what):
    """To 1e-5 of the largest move of the parameter."""
    after, expected, before = (np.asarray(x, np.float64) for x in (after, expected, before))
    scale = np.abs(expected - before).max()
    assert scale > 1e-4, what
    error = np.abs(after - expected)
    bound = 1e-5 * np.abs(expected) + 1e-5 * scale
    assert (error <= bound).all(), f"{what}: {(error / bound).max():.2f} x the tolerance"


def test_three_steps_of_the_whole_recipe():
    """Every group's rates, betas and decays, scaled to the width and batch, over the run."""
    c, _, specs = model_of(Golden("golden_model").facts("config") | FACTS["model"], 50, 24)
    before, after = (to_ours(GOLDEN.under(name), c) for name in ("weights", "after"))
    gradients = [to_ours(GOLDEN.under(f"gradients/{i}"), c) for i in range(len(FACTS["at"]))]
    path = trajectory(MuonConfig(), specs, before, gradients)
    for (name, x), expected, start in zip(
        jax.tree_util.tree_leaves_with_path(path[-1]),
        jax.tree.leaves(after),
        jax.tree.leaves(before),
        strict=True,
    ):
        assert_equal_moves(x, expected, start, path_name(name))


@pytest.mark.parametrize("title", SWITCHES)
@pytest.mark.slow
def test_three_steps_with_each_switch_of_muon(title):
    transposed = lambda x: jnp.asarray(x, jnp.float32).swapaxes(-1, -2)
    before = {name: transposed(w) for name, w in GOLDEN.under("muon/weights").items()}
    all_gradients = {name: transposed(g) for name, g in GOLDEN.under("muon/gradients").items()}
    gradients = [{name: g[i] for name, g in all_gradients.items()} for i in range(3)]
    specs = {
        name: ParamSpec(w.shape, (None, None), constant(0.0), "matrix", (0,), (1,))
        for name, w in before.items()
    }
    path = trajectory(MuonConfig.model_validate(SWITCHES[title]), specs, before, gradients)
    for name in before:
        expected = transposed(GOLDEN[f"muon/{title}/{name}"])
        for step in range(3):
            start = before[name] if step == 0 else expected[step - 1]
            assert_equal_moves(path[step][name], expected[step], start, f"{name} step {step}")


def test_the_switches_of_the_fixture_are_different_optimizers():
    ends = {title: GOLDEN[f"muon/{title}/h.wide"][-1] for title in SWITCHES}
    for title, end in ends.items():
        same = [t for t, other in ends.items() if np.allclose(end, other, rtol=1e-4, atol=1e-5)]
        assert same == [title]
    changed = {k for s in SWITCHES.values() for k, v in s.items() if v != SWITCHES["full"][k]}
    how = {
        "name",
        "gram_newton_schulz",
        "symmetric",
        "state_dtype",
        "offload",
    }  # not what is computed
    fields = MuonConfig().model_dump(exclude=how)
    assert changed == {name for name, value in fields.items() if isinstance(value, (bool, str))}


@pytest.mark.parametrize("steps", [1000, 2520])
@pytest.mark.quick("2520")
def test_rate_momentum_and_decay_at_every_step(steps):
    """At 1000 steps the momentum still rises when the rate begins to fall."""
    c = MuonConfig()
    values, peaks = schedule_values(c.schedule, steps), muon(c)["matrix"].peaks

    def at(step):
        now = adjust(c)(peaks, step, values)
        return multiplier(c.schedule, values, step), now["momentum"], now["weight_decay"] / 0.28

    ours = jax.vmap(at)(jnp.arange(0, steps, 5))
    np.testing.assert_allclose(np.stack(ours, 1), GOLDEN[f"schedule/{steps}"], rtol=1e-5, atol=1e-6)
