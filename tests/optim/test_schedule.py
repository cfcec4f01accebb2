"""Schedules at their corners."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from jaxtrain.optim.schedule import Schedule, multiplier, schedule_values

STEPS = jnp.arange(101)


def curve(total=100, **fields):
    """The multiplier at steps 0 ... total."""
    c = TypeAdapter(Schedule).validate_python(fields)
    return np.asarray(multiplier(c, schedule_values(c, total), STEPS))[: total + 1]


@pytest.mark.parametrize(
    ("fields", "points"),
    [
        ({"name": "constant"}, {0: 1, 100: 1}),
        ({"name": "constant", "warmup_steps": 10}, {0: 0.1, 4: 0.5, 9: 1, 100: 1}),
        ({"name": "linear"}, {0: 1, 25: 0.75, 100: 0}),
        (
            {"name": "linear", "warmup_steps": 20, "final_fraction": 0.2},
            {9: 0.5, 20: 1, 60: 0.6, 100: 0.2},
        ),
        ({"name": "cosine"}, {0: 1, 50: 0.5, 100: 0}),
        (
            {"name": "cosine", "warmup_steps": 20, "final_fraction": 0.1},
            {20: 1, 60: 0.55, 100: 0.1},
        ),
        ({"name": "trapezoid", "decay_fraction": 0.4}, {0: 1, 60: 1, 80: 0.5, 100: 0}),
        (
            {"name": "trapezoid", "decay_fraction": 1.0, "final_fraction": 0.5},
            {0: 1, 50: 0.75, 100: 0.5},
        ),
        (
            {"name": "trapezoid", "decay_fraction": 0.4, "decay": "sqrt"},
            {60: 1, 70: 0.5, 100: 0},
        ),
        (
            {"name": "trapezoid", "decay_fraction": 0.4, "decay": "power", "final_fraction": 0.2},
            {60: 1, 80: 0.2 + 0.8 * 0.5**1.2, 100: 0.2},
        ),
        (
            {"name": "trapezoid", "decay_fraction": 0.4, "decay": "power", "decay_power": 2},
            {60: 1, 80: 0.25, 90: 0.0625, 100: 0},
        ),
    ],
    ids=lambda x: "-".join(map(str, x.values())) if "name" in x else "",
)
def test_corners(fields, points):
    values = curve(**fields)
    np.testing.assert_allclose([values[step] for step in points], list(points.values()), atol=1e-6)


def nanochats(step, total, warmup=40, fraction=0.65, final=0.05):
    """The multiplier of nanochat's base_train.py (get_lr_multiplier, at 92d63d4)."""
    decaying = round(fraction * total)
    if step < warmup:
        return (step + 1) / warmup
    if step <= total - decaying:
        return 1.0
    left = (total - step) / decaying
    return left + (1 - left) * final


@pytest.mark.parametrize("total", [50, 100, 114, 507, 2520])
@pytest.mark.quick("114", "2520")
def test_the_trapezoid_is_nanochats(total):
    """Also where the warm-up reaches into the decay, and where 65% is no whole number of steps."""
    c = TypeAdapter(Schedule).validate_python(
        {"name": "trapezoid", "warmup_steps": 40, "final_fraction": 0.05}
    )
    steps = np.arange(total)
    values = multiplier(c, schedule_values(c, total), jnp.asarray(steps))
    expected = [nanochats(step, total) for step in steps]
    np.testing.assert_allclose(values, expected, rtol=1e-5)


@settings(max_examples=25)
@given(
    st.sampled_from(["linear", "cosine", "trapezoid"]),
    st.integers(2, 60),
    st.integers(0, 60),
    st.floats(0, 1),
)
def test_up_then_down_and_never_out_of_bounds(name, total, warmup, final):
    warmup = min(warmup, total - 1)
    values = curve(total, name=name, warmup_steps=warmup, final_fraction=final)
    assert (values > 0).all() or final < 1e-6
    assert values.max() <= 1 + 1e-6
    assert (np.diff(values[warmup:]) <= 1e-6).all()
    assert values[-1] == pytest.approx(final, abs=1e-5)


def test_numbers_are_arguments_of_the_compiled_step():
    traces = []

    @jax.jit
    def at(values, step):
        traces.append(1)
        return multiplier(c, values, step)

    c = TypeAdapter(Schedule).validate_python({"name": "trapezoid", "warmup_steps": 5})
    values = jax.tree.map(jnp.float32, schedule_values(c, 100))
    first = at(values, jnp.int32(90))
    assert at({**values, "total_steps": jnp.float32(1000.0)}, jnp.int32(90)) > first
    assert len(traces) == 1


def test_the_power_of_a_decay_is_an_argument_and_no_other_decay_has_one():
    c = TypeAdapter(Schedule).validate_python({"name": "trapezoid", "decay": "power"})
    values = schedule_values(c, 100)
    at = jax.jit(lambda values: multiplier(c, values, jnp.int32(90)))
    found = [at({**values, "decay_power": jnp.float32(power)}) for power in (1.2, 3.0)]
    np.testing.assert_allclose(found, [(10 / 65) ** 1.2, (10 / 65) ** 3], rtol=1e-5)
    linear = TypeAdapter(Schedule).validate_python({"name": "trapezoid"})
    assert "decay_power" not in schedule_values(linear, 100)
