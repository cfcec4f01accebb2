"""Layers that share weights: fewer parameters at the same depth, width and FLOPs.

adjacent  layers 0 0 1 1 2 2   so many in a row use one set (ALBERT's groups, MobileLLM-LS)
all       layers 0 0 0 0 0 0   one set (ALBERT)

A set is a block: attention, feed-forward network and norms. It is stored once, [sets, ...], its
gradient is the sum over its uses, and each use has keys and values of its own. Residual scales and
value embeddings stay each layer's own. ALBERT: Lan et al. 2020, arXiv:1909.11942. MobileLLM: Liu et
al. 2024, arXiv:2402.14905.
"""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from jaxtrain.settings import Settings


class SharedByAll(Settings):
    """All layers use one set of weights (ALBERT)."""

    name: Literal["all"] = "all"


class SharedByAdjacent(Settings):
    """So many layers in a row use one set of weights (MobileLLM-LS: two)."""

    name: Literal["adjacent"] = "adjacent"
    layers: int = Field(2, ge=2, description="layers in a row that use one set; divides the depth")


def section_of_name(given: object) -> object:
    """A section of its name alone."""
    return {"name": given} if type(given) is str else given


ShareLayers = Annotated[
    SharedByAll | SharedByAdjacent, Field(discriminator="name"), BeforeValidator(section_of_name)
]


def layers_of_set(share: SharedByAll | SharedByAdjacent | None, depth: int) -> int:
    """How many layers use one set of weights."""
    if share is None:
        return 1
    return depth if share.name == "all" else share.layers
