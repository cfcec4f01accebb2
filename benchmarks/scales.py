"""Shared by `verdicts` and `ladder`: a scale (model and data size), and tokens to a loss."""

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class Scale(NamedTuple):
    """A size at which techniques are tried. horizons: baseline run lengths over `steps`."""

    config: str
    overrides: tuple[str, ...]
    steps: int
    depth: int
    seeds: tuple[int, ...]
    horizons: tuple[float, ...]

    @property
    def tokens(self) -> int:
        """Training tokens of a run; the overrides must have the batch size and sequence length."""
        given = dict(one.split("=", 1) for one in self.overrides)
        return self.steps * int(given["train.batch_size"]) * int(given["train.sequence_length"])

    def filled(self, switch: str) -> str:
        """A switch with shares of the run filled in: <0.25 steps>, <0.5 depth> (layers), <0.1
        tokens>."""
        share = lambda m: str(max(1, round(float(m[1]) * getattr(self, m[2]))))
        return re.sub(r"<([\d.]+) (steps|depth|tokens)>", share, switch)


def settings_of(
    scale: Scale, overrides: tuple[str, ...], switch: tuple[str, ...]
) -> tuple[str, ...]:
    """A run's overrides: the last value of each key, in the order in which they were given."""
    last: dict[str, str] = {}
    for one in (*scale.overrides, *overrides, *switch):
        key = one.partition("=")[0]
        last.pop(key, None)
        last[key] = one
    return tuple(last.values())


def tokens_to(loss: float, frontier: Sequence[tuple[float, float]]) -> tuple[float, bool]:
    """Training tokens to a loss, and whether the loss is outside the range of the runs.

    frontier: (tokens, loss) of runs of growing length. Between two of them, and beyond the
    outermost ones, the loss is linear in log tokens.
    """
    lines = list(pairwise(frontier))
    inside = [line for line in lines if line[1][1] <= loss <= line[0][1]]
    (t0, l0), (t1, l1) = (inside or [lines[0] if loss > lines[0][0][1] else lines[-1]])[0]
    share = (l0 - loss) / (l0 - l1)
    return math.exp(math.log(t0) + share * (math.log(t1) - math.log(t0))), not inside
