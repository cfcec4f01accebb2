"""Fits recover laws that are known, and their intervals cover them."""

import math

import numpy as np
import pytest

from jaxtrain.scaling.laws import (
    Bootstrap,
    ParametricLaw,
    fit_parabola,
    fit_parametric,
    fit_power_law,
    refitted,
    resamples,
)
from jaxtrain.settings import UserError

# Besiroglu et al. 2024, table 1: the corrected fit of Hoffmann et al.'s runs.
LAW = ParametricLaw(1.8172, 482.01, 2085.43, 0.3478, 0.3658)


def grid(noise=0.0, seed=0):
    """Runs of LAW: parameters, tokens, loss."""
    n, d = map(np.ravel, np.meshgrid(np.geomspace(5e7, 1e10, 7), np.geomspace(1e9, 3e11, 7)))
    factor = np.exp(noise * np.random.default_rng(seed).normal(size=len(n)))
    return n, d, np.array([LAW(*one) for one in zip(n, d)]) * factor


def test_the_parametric_law_is_recovered_exactly_from_exact_runs():
    found = fit_parametric(*grid())
    np.testing.assert_allclose(found, LAW, rtol=2e-2)
    assert found.alpha == pytest.approx(LAW.alpha, rel=2e-3)


@pytest.mark.slow
def test_intervals_of_noisy_runs_cover_the_law():
    n, d, loss = grid(noise=3e-3, seed=1)
    found = fit_parametric(n, d, loss)
    bootstrap = Bootstrap(samples=80, level=0.95)
    fits = refitted(
        lambda rows: fit_parametric(n[rows], d[rows], loss[rows], found),
        resamples([0] * len(n), bootstrap),
    )
    for name in ("E", "alpha", "beta"):
        one = bootstrap.interval(getattr(found, name), [getattr(fit, name) for fit in fits])
        assert one.holds(getattr(LAW, name)) and one.high - one.low < 0.3 * getattr(LAW, name), name


def test_an_outlier_does_not_move_the_law():
    n, d, loss = grid(noise=1e-4)
    loss[5] *= 1.3
    assert fit_parametric(n, d, loss).alpha == pytest.approx(LAW.alpha, rel=0.05)


def test_the_optimal_size_is_where_the_loss_is_lowest():
    flops = 1e21
    sizes = np.geomspace(1e8, 1e11, 20001)
    lowest = sizes[np.argmin([LAW(n, flops / (6 * n)) for n in sizes])]
    assert LAW.optimal_parameters(flops, 6.0) == pytest.approx(lowest, rel=2e-3)


def test_resamples_are_a_function_of_the_seed_and_keep_their_groups():
    groups = [0, 0, 0, 1, 1]
    first, again, other = (resamples(groups, Bootstrap(20, seed=s)) for s in (3, 3, 4))
    assert all((a == b).all() for a, b in zip(first, again))
    assert any((a != b).any() for a, b in zip(first, other))
    assert all(sorted(np.asarray(groups)[rows]) == groups for rows in first)


def test_a_parabola_and_a_power_law_are_recovered():
    x = np.geomspace(10, 1000, 5)
    found = fit_parabola(x, 2.0 + 0.05 * (np.log(x) - math.log(80)) ** 2)
    assert found.best == pytest.approx(80) and found.lowest == pytest.approx(2.0) and found.inside
    assert found(80 * math.e) == pytest.approx(2.05)
    assert not fit_parabola(x, -(np.log(x) ** 2)).inside
    assert not fit_parabola(x, (np.log(x) - math.log(2000)) ** 2).inside
    np.testing.assert_allclose(fit_power_law(x, 3 * x**0.54), (3, 0.54))


def test_an_interval_is_of_percentiles_and_holds_the_estimate():
    low, high = Bootstrap(level=0.8).interval(5.0, np.arange(11.0))[1:]
    assert (low, high) == pytest.approx((1.0, 9.0))
    assert Bootstrap().interval(20.0, [1.0, 2.0, math.nan]).high == 20.0
    assert math.isinf(Bootstrap().interval(1.0, []).high)


def test_too_few_runs_are_refused():
    n, d, loss = grid()
    with pytest.raises(UserError, match="needs 6 runs or more.*there are 4 runs of"):
        fit_parametric(n[:4], d[:4], loss[:4])
    with pytest.raises(UserError, match="1 numbers of tokens"):
        fit_parametric(n[:7], d[:7] * 0 + 1e9, loss[:7])
    with pytest.raises(UserError, match="3 different values or more; there are 2"):
        fit_parabola(n[:2], loss[:2])
    with pytest.raises(UserError, match="2 different values or more; there is 1"):
        fit_power_law(n[:1], loss[:1])
