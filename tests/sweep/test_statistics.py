"""Intervals, paired differences and the winner's curse, on scores that are known."""

import random
from statistics import mean

import pytest

from jaxtrain.sweep.statistics import interval, paired, winners_curse


def test_an_interval_is_students():
    found = interval([1.0, 2.0, 3.0])
    assert found.mean == 2 and found.half == pytest.approx(4.302653 * 1 / 3**0.5, rel=1e-6)
    assert interval([1.5]) == (1.5, None, 1) and str(interval([1.5])) == "1.5"


def test_pairs_cancel_what_a_seed_does_to_both():
    ours, theirs = {1: 2.0, 2: 5.0, 3: 9.0}, {1: 1.9, 2: 4.9, 3: 8.9, 4: 100.0}
    found = paired(ours, theirs)
    assert found.mean == pytest.approx(0.1) and found.half == pytest.approx(0, abs=1e-12)
    assert found.count == 3


def test_the_figures_of_the_winners_curse():
    fresh = {None: {3: 2.5, 4: 2.7}, 7: {3: 2.2, 4: 2.4}, 8: {3: 2.1, 4: 2.1}}
    found = winners_curse({7: 2.0, 8: 2.05}, fresh)
    assert [one.number for one in found] == [8, 7, None]
    eight, seven, baseline = found
    assert seven.optimism == pytest.approx(0.3) and eight.optimism == pytest.approx(0.05)
    assert seven.over_baseline.mean == pytest.approx(-0.3)
    assert eight.over_baseline.mean == pytest.approx(-0.5)
    assert baseline.optimism is None and baseline.over_baseline is None
    up = winners_curse({7: 2.0, 8: 2.5}, {7: {3: 1.8, 4: 1.8}, 8: {3: 2.6, 4: 2.6}}, maximize=True)
    assert [one.number for one in up] == [8, 7]
    assert up[1].optimism == pytest.approx(0.2) and up[0].optimism == pytest.approx(-0.1)


def test_the_best_of_many_equal_trials_is_too_good_and_fresh_seeds_say_by_how_much():
    draw, bias = random.Random(0), []
    for _ in range(200):
        searched = {n: draw.gauss(2, 0.1) for n in range(20)}
        best = min(searched, key=searched.__getitem__)
        [one] = winners_curse(searched, {best: {s: draw.gauss(2, 0.1) for s in (2, 3, 4)}})
        bias.append(one.optimism)
    assert mean(bias) == pytest.approx(0.187, abs=0.02)  # the least of 20 normal draws: 1.87 sigma
