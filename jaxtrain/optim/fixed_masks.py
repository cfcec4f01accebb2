"""Training of a pruned model: weights that are zero at first stay zero (Han et al. 2015,
arXiv:1506.02626)."""

from typing import Literal

from jaxtrain.optim.masks import MaskRule, with_masks
from jaxtrain.optim.types import Wrapper
from jaxtrain.settings import Settings


class FixedMasksConfig(Settings):
    """The zeros of train.init_from stay, in the matrices of the blocks; the other weights train.
    For a model of `jaxtrain prune`."""

    name: Literal["fixed_masks"] = "fixed_masks"


def fixed_masks(c: FixedMasksConfig) -> Wrapper:
    """Masks are drawn from the weights that the run begins with, and never again."""
    start = lambda params: {name: p != 0 for name, p in params.items()}
    first = lambda step, memory: step == 1  # the same masks again, whose zeros are then counted
    return with_masks(MaskRule(first, lambda seen, memory: (seen.masks, memory), start=start))
