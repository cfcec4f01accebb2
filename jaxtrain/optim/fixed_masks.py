"""Training of a pruned model: weights that start at zero stay zero (Han et al. 2015,
arXiv:1506.02626)."""

from typing import Literal

from jaxtrain.optim.masks import MaskRule, with_masks
from jaxtrain.optim.types import Wrapper
from jaxtrain.settings import Settings


class FixedMasksConfig(Settings):
    """Zeros of train.init_from in the matrices of the blocks stay zero; the other weights train.
    For models pruned by `jaxtrain prune`."""

    name: Literal["fixed_masks"] = "fixed_masks"


def fixed_masks(c: FixedMasksConfig) -> Wrapper:
    """Wrapper whose masks are the nonzero initial weights of the run, and never change."""
    start = lambda params: {name: p != 0 for name, p in params.items()}
    first = lambda step, memory: step == 1  # draws the same masks, so that their zeros are counted
    return with_masks(MaskRule(first, lambda seen, memory: (seen.masks, memory), start=start))
