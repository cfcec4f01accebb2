"""SR-STE, sparse-refined training of 2:4 weights (Zhou et al. 2021, arXiv:2102.04010)."""

from typing import Literal

import jax
import optax
from pydantic import Field

from jaxtrain.optim.types import Transformation, Wrapper
from jaxtrain.settings import Settings
from jaxtrain.weights.params import ParamSpec, is_block_matrix
from jaxtrain.weights.two_four import two_four_mask


class SRSTEConfig(Settings):
    """Adds `refine` times the weight to the gradient of each weight pruned by the 2:4 mask, so that
    these weights shrink and masks settle. For model.weight_form=sparse_2_4."""

    name: Literal["sr_ste"] = "sr_ste"
    refine: float = Field(
        2e-4,
        ge=0,
        description="factor on the masked weights that is added to their gradients (lambda_W in "
        "the paper)",
    )


def sr_ste(c: SRSTEConfig) -> Wrapper:
    """Make the wrapper, which has no state of its own."""

    def refined(g: jax.Array, p: jax.Array, spec: ParamSpec) -> jax.Array:
        if not is_block_matrix(spec):
            return g
        return (g + c.refine * p * ~two_four_mask(p)).astype(g.dtype)

    def wrap(tx: Transformation, label: str) -> Transformation:
        def update(updates, state, params=None, **extra):
            updates = jax.tree.map(refined, updates, params, extra["specs"])
            return tx.update(updates, state, params, **extra)

        return optax.GradientTransformationExtraArgs(tx.init, update)

    return Wrapper(wrap)
