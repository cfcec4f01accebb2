"""The fits of a grid whose law is known, the prediction, and the record."""

import json
import math

import numpy as np
import pytest

from jaxtrain.config.scaling_fit import Dial
from jaxtrain.scaling.fit import bootstrap_parametric, fit_all, plain, predict
from jaxtrain.scaling.laws import Bootstrap, Interval, ParametricLaw
from jaxtrain.scaling.points import Point, with_budgets
from jaxtrain.scaling.record import dial_of, read_prediction, record_of
from jaxtrain.scaling.report import summary_lines, write_fit_report
from jaxtrain.settings import UserError

LAW = ParametricLaw(1.7, 400.0, 1200.0, 0.34, 0.36)
BOOTSTRAP = Bootstrap(10, 0.9, 1)


def grid(noise=2e-3, seed=0):
    """Runs of four budgets around the optimum of LAW."""
    random, points = np.random.default_rng(seed), []
    for budget in (1e17, 4e17, 1.6e18, 6.4e18):
        best = LAW.optimal_parameters(budget, 6.0)
        for factor in (0.25, 0.5, 1.0, 2.0, 4.0):
            n = best * factor
            tokens = round(budget / (6 * n))
            loss = LAW(n, float(tokens)) * math.exp(noise * float(random.normal()))
            points.append(
                Point(f"n{n:.3g}_{budget:.3g}", ("isoflop",), 1, 8, 0, n, tokens, 6 * n * tokens,
                      loss, 4096, 1.0, budget, 1.0)
            )  # fmt: skip
    return points


def test_both_methods_find_the_optimum_of_the_law():
    fits = fit_all(grid(), 2, BOOTSTRAP)
    assert fits.isoflop and fits.isoflop.best and fits.parametric and not fits.missing
    power = LAW.beta / (LAW.alpha + LAW.beta)
    assert fits.isoflop.best.exponent.value == pytest.approx(power, abs=0.05)
    assert fits.isoflop.best.exponent.low < power < fits.isoflop.best.exponent.high + 0.03
    for one, optimal in zip(fits.isoflop.minima, fits.parametric.optimal, strict=True):
        true = LAW.optimal_parameters(one.at, 6.0)
        assert one.curve.inside and one.best.value == pytest.approx(true, rel=0.2)
        assert one.tokens * one.best.value * 6 == pytest.approx(one.at, rel=0.02)
        assert optimal.parameters.value == pytest.approx(true, rel=0.35)


@pytest.mark.slow
def test_fits_are_a_function_of_runs_and_seed():
    assert plain(fit_all(grid(), 2, BOOTSTRAP)) == plain(fit_all(grid(), 2, BOOTSTRAP))


@pytest.mark.slow
def test_a_larger_run_lies_in_its_predicted_interval():
    inside = 0
    for seed in range(3):
        points = grid(seed=seed)
        n = LAW.optimal_parameters(2.5e19, 6.0)
        tokens = round(2.5e19 / (6 * n))
        fit = bootstrap_parametric(points, BOOTSTRAP)
        one = predict(fit, points, "large", n, tokens, 2.5e19, BOOTSTRAP)
        noise = 2e-3 * float(np.random.default_rng([seed, 1]).normal())
        inside += one.loss.holds(LAW(n, float(tokens)) * math.exp(noise))
        assert one.loss.high / one.loss.low < 1.05
    assert inside >= 2


def test_the_record_has_a_dial_that_the_configuration_reads(tmp_path):
    facts = {"name": "mine", "rates_derived": True}
    tree, fits = record_of(grid(), "matrices_and_head", "loss", BOOTSTRAP, 2, facts)
    dial = Dial.model_validate(tree["dial"])
    assert fits.isoflop and fits.isoflop.ratio
    assert dial.tokens_per_parameter.value == pytest.approx(fits.isoflop.ratio.value, rel=1e-4)
    assert dial_of(fits, "total", facts) is None
    text = json.dumps(tree)
    assert "Infinity" not in text and "NaN" not in text
    page = write_fit_report(tmp_path / "scaling.html", tree, grid(), fits).read_text()
    assert page.count("<svg") == 4 and page.count('class="marks') == 4 + 2 + 20 + 1
    lines = "\n".join(summary_lines(tree, fits))
    assert "isoFLOP: tokens per parameter" in lines and "alpha" in lines


@pytest.mark.slow
def test_a_minimum_outside_the_sizes_is_left_out_of_the_law():
    points = [p._replace(loss=p.parameters**-0.1) if p.budget == 1e17 else p for p in grid()]
    fits = fit_all(points, 2, BOOTSTRAP)
    assert fits.isoflop and [m.curve.inside for m in fits.isoflop.minima] == [False] + [True] * 3
    assert fits.isoflop.best and fits.isoflop.best.exponent.value == pytest.approx(0.51, abs=0.08)


def test_runs_of_no_study_share_budgets_by_their_flops():
    points = [p._replace(budget=None) for p in grid()]
    assert len({p.budget for p in with_budgets(points)}) == 4


def test_too_few_runs_and_a_torn_prediction_are_refused(tmp_path):
    with pytest.raises(UserError, match="too few runs for any fit: no budget has runs of 3 sizes"):
        fit_all(grid()[:2], 2, BOOTSTRAP)
    (tmp_path / "prediction.json").write_text('{"run": "x", "loss": {"value": 1}}')
    with pytest.raises(UserError, match="is not a prediction"):
        read_prediction(tmp_path / "prediction.json")
    assert read_prediction(tmp_path / "none.json") is None
    assert plain(Interval(1.0, -math.inf, 2.0)) == {"value": 1.0, "low": None, "high": 2.0}
