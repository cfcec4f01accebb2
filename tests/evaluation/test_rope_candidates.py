"""LongRoPE's candidates: seeds as the papers have them, and children that keep the rules."""

import math

import numpy as np
import pytest

from jaxtrain.evaluation.rope_candidates import (
    RopeCandidate,
    RopeSpace,
    cross,
    first_generation,
    known_candidates,
    mutate,
    next_generation,
)

SPACE = RopeSpace(pairs=16, base=10_000.0, ratio=4.0, context=256)


def test_the_space_holds_rising_divisors_within_its_bounds():
    rising = tuple(np.linspace(1, 5, 16).tolist())  # 1.25 x the ratio
    assert SPACE.holds(RopeCandidate(rising)) and SPACE.holds(
        RopeCandidate(rising, SPACE.most_factor)
    )
    for wrong in (rising[::-1], rising[:-1], (0.99, *rising[1:]), (*rising[:-1], 5.01)):
        assert not SPACE.holds(RopeCandidate(wrong))
    assert not SPACE.holds(RopeCandidate(rising, 0.99)) and not SPACE.holds(
        RopeCandidate(rising, 1.3)
    )


def test_the_seeds_are_the_frequencies_of_training_linear_ntk_and_yarn():
    known = known_candidates(SPACE)
    assert known["linear"] == RopeCandidate((4.0,) * 16)
    assert known["none"] == RopeCandidate((1.0,) * 16)
    base = 10_000 * 4 ** (32 / 30)
    ntk = [(base / 10_000) ** (2 * i / 32) for i in range(16)]
    np.testing.assert_allclose(known["ntk"].divisors, ntk, rtol=1e-6)
    yarn = known["yarn"]
    turns = 256 * 10_000 ** (-np.arange(16) / 16) / (2 * math.pi)
    assert yarn.factor == pytest.approx(1 + 0.1 * math.log(4))
    assert all(d == 1 for d, t in zip(yarn.divisors, turns) if t > 45)
    assert all(d == pytest.approx(4, abs=1e-4) for d, t in zip(yarn.divisors, turns) if t < 0.8)
    assert all(map(SPACE.holds, known.values()))


def test_children_keep_the_rules_and_are_new():
    rng = np.random.default_rng(0)
    parents = list(known_candidates(SPACE).values())
    children = [mutate(parents[i % 4], SPACE, rng) for i in range(200)]
    children += [cross(children[i], children[i + 1], SPACE, rng) for i in range(100)]
    assert all(map(SPACE.holds, children)) and len(set(children)) > 280
    assert {child.factor for child in children} > {1.0}
    a, b = children[0], children[5]
    assert set(cross(a, b, SPACE, rng).divisors) <= {*a.divisors, *b.divisors}


def test_a_generation_follows_from_the_seed_and_the_scores_of_those_before():
    first = first_generation(SPACE, 8, seed=1)
    assert first[:4] == list(known_candidates(SPACE).values())
    assert len(set(first)) == 8 and first == first_generation(SPACE, 8, seed=1)
    scores = {one: sum(one.divisors) for one in first}
    again = dict(reversed(scores.items()))  # a history that was read in another order
    drawn = next_generation(scores, SPACE, 4, 1, 1)
    assert drawn == next_generation(again, SPACE, 4, 1, 1) and not scores.keys() & set(drawn)
    assert len(drawn) == 4 and drawn != next_generation(scores, SPACE, 4, 2, 1)


def test_one_pair_of_channels_has_candidates_as_well():
    space = RopeSpace(pairs=1, base=100.0, ratio=2.0, context=16)
    assert all(map(space.holds, first_generation(space, 6, seed=0)))
