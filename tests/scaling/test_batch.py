"""Steps against tokens to equal losses: the critical batch size is recovered."""

import math

import numpy as np
import pytest

from jaxtrain.scaling.batch import (
    TradeOff,
    batch_law,
    critical_batches,
    fewest_steps,
    fit_trade_off,
    steps_to,
)
from jaxtrain.scaling.fit import best_rates, fit_minima
from jaxtrain.scaling.laws import Bootstrap
from jaxtrain.scaling.points import Point
from jaxtrain.settings import UserError

STEPS = tuple(range(10, 4000, 10))


def run(batch, noise=0.0, multiplier=1.0, seed=0):
    """Whose loss is 2 + (S_min / 100)^-0.5, with S = S_min (1 + critical / batch), and the critical
    batch 640 S_min^0.5 tokens."""
    least = np.geomspace(1, 4000, 4000)
    steps = least * (1 + 640 * least**0.5 / batch)
    at = np.interp(STEPS, steps, least)
    factor = math.exp(noise * np.random.default_rng([batch, seed]).normal())
    losses = tuple((2 + multiplier * factor * (at / 100) ** -0.5).tolist())
    return Point(
        f"b{batch}", ("batch_sizes",), 1, 8, seed, 1e4, batch * STEPS[-1], 1e9, losses[-1], batch,
        multiplier, None, 1.0, STEPS, losses,
    )  # fmt: skip


def test_a_trade_off_is_recovered():
    true = TradeOff(500.0, 500.0 * 8192)
    batch = np.array([1024.0, 4096.0, 16384.0, 65536.0])
    found = fit_trade_off(batch, np.array([true.steps(b) for b in batch.tolist()]))
    assert found.critical == pytest.approx(8192, rel=1e-3) == pytest.approx(true.critical)
    s, e = true.steps(8192.0), 8192 * true.steps(8192.0)
    assert (s / 500 - 1) * (e / true.least_tokens - 1) == pytest.approx(1.0)
    with pytest.raises(UserError, match="3 different batch sizes or more.*there are 2"):
        fit_trade_off(batch[:2], batch[:2])


def test_critical_batches_and_their_law_come_from_curves():
    points = [run(batch, noise=0.002) for batch in (2048, 4096, 8192, 16384, 32768)]
    found = critical_batches(points, 4, Bootstrap(10, 0.9))
    assert len(found) == 4
    for one in found:
        least = 100 * (one.loss - 2) ** -2
        assert one.critical.value == pytest.approx(640 * least**0.5, rel=0.15)
    assert batch_law(found).exponent == pytest.approx(1 / 3, abs=0.05)  # E = 640 S^1.5


def test_steps_are_read_off_between_validations():
    one = run(4096)
    loss = (one.losses[20] + one.losses[21]) / 2
    steps = steps_to(one, loss)
    assert steps is not None and one.steps[20] < steps < one.steps[21]
    assert steps_to(one, one.losses[-1] - 0.1) is None and steps_to(one, 1e9) is None
    slow = run(4096, multiplier=1.3)
    assert fewest_steps([one, slow], loss) == {(4096, 0): steps}


def test_the_best_batch_size_is_that_of_the_best_rate():
    batches = [2**k for k in range(8, 13)]
    loss = lambda b, m: 2 + 0.01 * (math.log2(b) - 10) ** 2 + 0.1 * (m - 1)
    points = [
        run(b, multiplier=m)._replace(loss=loss(b, m), tokens=100_000 + b)
        for b in batches
        for m in (1.0, 2.0)
    ]
    best = best_rates(points)
    assert len(best) == 5 and {p.multiplier for p in best} == {1.0}
    axis = lambda p: float(p.batch_tokens)
    minima = fit_minima(best, lambda p: float(p.tokens), axis, Bootstrap(20))
    assert minima is not None and minima.minima[0].best.value == pytest.approx(1024)
