"""LongRoPE's candidates (Ding et al. 2024, arXiv:2402.13753): divisors of the rotary frequencies.

Each pair of channels has a divisor, from 1 (extrapolation) to slightly more than the extension
ratio (interpolation). It is never below the divisor of the pair before, which rotates faster. The
paper also searches the number of initial tokens that keep their frequencies; here all tokens have
the same. The factor on rotated queries and keys, which the paper fixes, is searched, too: YaRN's
divisors have such a factor, linear and NTK-aware ones have none.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxtrain.model.rope import LongRopeScaling, YarnScaling, frequencies

MARGIN = 1.25  # maximum divisor, as a multiple of the extension ratio, as in the paper
REDRAWN = 0.3  # probability that a mutation changes a divisor, as in the paper
STEP = 0.25  # standard deviation of a change, as a share of the log range
DIGITS = 3  # decimals of a divisor that was drawn


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
    """Search space: pairs of channels, the extension ratio, the context before the extension."""

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
    """Candidates of the methods that need no search, by name.

    none: the frequencies of training. linear: Chen et al. 2023, arXiv:2306.15595. ntk: NTK-aware,
    the base times ratio^(H / (H - 2)), for a head's H channels, so that the last pair is divided by
    the ratio (bloc97 2023). yarn: Peng et al. 2023, arXiv:2309.00071.
    """
    last = max(space.pairs - 1, 1)
    ntk = tuple(space.ratio ** (i / last) for i in range(space.pairs))
    plain_h, _ = frequencies(2 * space.pairs, space.base, None, jnp.zeros((1, 1), jnp.int32))
    scaling = YarnScaling.model_validate({"factor": space.ratio, "original_context": space.context})
    yarn_h, factor = frequencies(2 * space.pairs, space.base, scaling, jnp.zeros((1, 1), jnp.int32))
    yarn = np.maximum.accumulate(np.asarray(plain_h, np.float64) / np.asarray(yarn_h, np.float64))
    clipped = np.clip(yarn, 1.0, space.ratio)  # undoes float32 rounding
    return {
        "none": RopeCandidate((1.0,) * space.pairs),
        "linear": RopeCandidate((float(space.ratio),) * space.pairs),
        "ntk": RopeCandidate(ntk),
        "yarn": RopeCandidate(tuple(clipped.tolist()), float(factor)),
    }


def mutate(parent: RopeCandidate, space: RopeSpace, rng: np.random.Generator) -> RopeCandidate:
    """Move some divisors on a log scale. Divisors that they would cross move with them."""
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
    """Take each divisor from one parent or the other, sorted in ascending order."""
    taken = np.where(rng.random(space.pairs) < 0.5, a.divisors, b.divisors)
    return few_digits(np.sort(taken), a.factor if rng.random() < 0.5 else b.factor, space)


def few_digits(divisors: np.ndarray, factor: float, space: RopeSpace) -> RopeCandidate:
    """Round to a few decimals, then clip to the range."""
    short = np.clip(np.round(divisors, DIGITS), 1.0, MARGIN * space.ratio)
    return RopeCandidate(
        tuple(short.tolist()), float(min(round(factor, DIGITS), space.most_factor))
    )


def first_generation(space: RopeSpace, count: int, seed: int) -> list[RopeCandidate]:
    """The known candidates, then mutations of them."""
    rng = np.random.default_rng([seed, 0])
    known = list(known_candidates(space).values())
    found = dict.fromkeys(known)
    for number in range(100 * count):  # with very few pairs there may be no more candidates
        if len(found) >= count:
            break
        found[mutate(known[number % len(known)], space, rng)] = None
    return list(found)


def next_generation(
    scores: Mapping[RopeCandidate, float], space: RopeSpace, count: int, seed: int, number: int
) -> list[RopeCandidate]:
    """Half mutations, half crossovers of the `count` best candidates so far; none that has a score.

    scores: bits per byte of all candidates before this generation. The result depends on the
    arguments alone: a resumed search draws the same candidates again.
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
    """Candidate with the fewest bits per byte; the first one of a tie."""
    return min(among, key=lambda one: scores[one])
