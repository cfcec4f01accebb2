"""LongRoPE's candidates (Ding et al. 2024, arXiv:2402.13753): divisors of the rotary frequencies.

A divisor for each pair of channels, from 1 (extrapolation) to a little more than the extension
ratio (interpolation), and never less than that of the pair before, which turns faster. The paper
searches also how many tokens at the beginning keep their frequencies; here all have the same.
The factor on rotated queries and keys, which the paper fixes, is searched with them: YaRN's
divisors come with one, linear and NTK-aware ones without.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxtrain.model.rope import LongRopeScaling, YarnScaling, frequencies

MARGIN = 1.25  # divisors up to so many times the extension ratio, as in the paper
REDRAWN = 0.3  # probability that a mutation changes a divisor, as in the paper
STEP = 0.25  # standard deviation of a change, of the range of the logarithms
DIGITS = 3  # of a divisor that was drawn, behind the point


class RopeCandidate(NamedTuple):
    """The divisors of the pairs' frequencies, and the factor on rotated queries and keys."""

    divisors: tuple[float, ...]
    factor: float = 1.0

    def scaling(self, ratio: float, context: int) -> LongRopeScaling:
        """`model.rope_scaling`: rows within the original context keep their frequencies."""
        short = (1.0,) * len(self.divisors)
        return LongRopeScaling(
            short_factor=short, long_factor=self.divisors, factor=ratio,
            original_context=context, attention_factor=self.factor,
        )  # fmt: skip


class RopeSpace(NamedTuple):
    """What may be searched: pairs of channels, the extension ratio, the context before it."""

    pairs: int
    base: float  # of the rotary frequencies
    ratio: float
    context: int  # tokens

    @property
    def most_factor(self) -> float:
        """The larger of the factors that YaRN and LongRoPE derive from the ratio."""
        grown = math.sqrt(1 + math.log(self.ratio) / math.log(self.context))
        return max(1 + 0.1 * math.log(self.ratio), grown)

    def holds(self, one: RopeCandidate) -> bool:
        """Whether the divisors are in range and never fall, and the factor is in range."""
        steps = zip(one.divisors, one.divisors[1:])
        inside = all(1 <= x <= MARGIN * self.ratio for x in one.divisors)
        rising = all(a <= b for a, b in steps)
        return (
            len(one.divisors) == self.pairs
            and inside
            and rising
            and 1 <= one.factor <= self.most_factor
        )


def known_candidates(space: RopeSpace) -> dict[str, RopeCandidate]:
    """The divisors of the ways that need no search, by name.

    none: the frequencies of training. linear: Chen et al. 2023, arXiv:2306.15595. ntk: NTK-aware,
    the base times ratio^(H / (H - 2)), of a head's H channels, so that the last pair is divided by
    the ratio (bloc97 2023). yarn: Peng et al. 2023, arXiv:2309.00071.
    """
    last = max(space.pairs - 1, 1)
    ntk = tuple(space.ratio ** (i / last) for i in range(space.pairs))
    plain_h, _ = frequencies(2 * space.pairs, space.base, None, jnp.zeros((1, 1), jnp.int32))
    scaling = YarnScaling.model_validate({"factor": space.ratio, "original_context": space.context})
    yarn_h, factor = frequencies(2 * space.pairs, space.base, scaling, jnp.zeros((1, 1), jnp.int32))
    yarn = np.maximum.accumulate(np.asarray(plain_h, np.float64) / np.asarray(yarn_h, np.float64))
    clipped = np.clip(yarn, 1.0, space.ratio)  # what float32 rounds away
    return {
        "none": RopeCandidate((1.0,) * space.pairs),
        "linear": RopeCandidate((float(space.ratio),) * space.pairs),
        "ntk": RopeCandidate(ntk),
        "yarn": RopeCandidate(tuple(clipped.tolist()), float(factor)),
    }


def mutate(parent: RopeCandidate, space: RopeSpace, rng: np.random.Generator) -> RopeCandidate:
    """Some divisors moved on the scale of logarithms; what they cross moves with them."""
    top = math.log(MARGIN * space.ratio)
    logs = np.log(parent.divisors)
    chosen = rng.random(space.pairs) < REDRAWN
    chosen[rng.integers(space.pairs)] = True
    logs = np.clip(logs + chosen * rng.normal(0.0, STEP * top, space.pairs), 0.0, top)
    upwards = np.maximum.accumulate(logs)
    downwards = np.minimum.accumulate(logs[::-1])[::-1]
    factor = parent.factor
    if rng.random() < REDRAWN:
        factor = rng.uniform(1.0, space.most_factor)
    return few_digits(np.exp(upwards if rng.random() < 0.5 else downwards), factor, space)


def cross(
    a: RopeCandidate, b: RopeCandidate, space: RopeSpace, rng: np.random.Generator
) -> RopeCandidate:
    """Each divisor of one parent or the other, in rising order."""
    taken = np.where(rng.random(space.pairs) < 0.5, a.divisors, b.divisors)
    return few_digits(np.sort(taken), a.factor if rng.random() < 0.5 else b.factor, space)


def few_digits(divisors: np.ndarray, factor: float, space: RopeSpace) -> RopeCandidate:
    """Few digits, and in the range in spite of them."""
    short = np.clip(np.round(divisors, DIGITS), 1.0, MARGIN * space.ratio)
    return RopeCandidate(
        tuple(short.tolist()), float(min(round(factor, DIGITS), space.most_factor))
    )


def first_generation(space: RopeSpace, count: int, seed: int) -> list[RopeCandidate]:
    """The known candidates, then mutations of them."""
    rng = np.random.default_rng([seed, 0])
    known = list(known_candidates(space).values())
    found = dict.fromkeys(known)
    for number in range(100 * count):  # of very few pairs there may be no more candidates
        if len(found) >= count:
            break
        found[mutate(known[number % len(known)], space, rng)] = None
    return list(found)


def next_generation(
    scores: Mapping[RopeCandidate, float], space: RopeSpace, count: int, seed: int, number: int
) -> list[RopeCandidate]:
    """Half mutations, half crossings of the `count` best of all so far; none that has a score.

    scores: bits per byte of all candidates before this generation. A function of its arguments
    alone: a search that goes on draws the same candidates again.
    """
    rng = np.random.default_rng([seed, number])
    parents = sorted(scores, key=lambda one: (scores[one], one))[:count]
    pick = lambda: parents[rng.integers(len(parents))]
    found: dict[RopeCandidate, None] = {}
    for _ in range(100 * count):
        if len(found) >= count:
            break
        crossed = len(found) >= count // 2 and len(parents) > 1
        one = cross(pick(), pick(), space, rng) if crossed else mutate(pick(), space, rng)
        if one not in scores:
            found[one] = None
    return list(found)


def best_of(scores: Mapping[RopeCandidate, float], among: Sequence[RopeCandidate]) -> RopeCandidate:
    """The one with the fewest bits per byte; of equal ones the first."""
    return min(among, key=lambda one: scores[one])
