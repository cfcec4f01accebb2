"""An exponential moving average of the weights (Polyak & Juditsky 1992), kept for evaluation."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int
from pydantic import Field

from jaxtrain.optim.types import OptState, Transformation, Wrapper
from jaxtrain.settings import Settings
from jaxtrain.weights.params import Params


class EMAConfig(Settings):
    """Validation and samples use the average in place of the trained weights.

    Checkpoints keep both. The first steps average over fewer steps, so that a short run forgets
    its initial values as well.
    """

    name: Literal["ema"] = "ema"
    decay: float = Field(
        0.999, ge=0, lt=1, description="of the average in a step; 1 / (1 - decay) steps count"
    )
    validate_trained: bool = Field(
        False, description="validate the trained weights as well, as trained_loss and so on"
    )
    export: Literal["average", "trained"] = Field(
        "average", description="weights of the model that a run ends with"
    )


class EMAState(NamedTuple):
    count: Int[Array, ""]
    average: Params  # in the parameters' shapes, dtypes and places
    inner: OptState


def ema(c: EMAConfig) -> Wrapper:
    """average <- d average + (1 - d) parameters, d = min(decay, (1 + count) / (10 + count))."""

    def wrap(tx: Transformation, label: str) -> Transformation:
        def init(params):
            return EMAState(
                jnp.zeros((), jnp.int32), jax.tree.map(jnp.copy, params), tx.init(params)
            )

        def update(updates, state, params=None, **extra):
            assert params is not None
            updates, inner = tx.update(updates, state.inner, params, **extra)
            count = state.count + 1
            d = jnp.minimum(extra["hyper"][label]["ema_decay"], (1 + count) / (10 + count))
            mean = lambda a, p: (d * a + (1 - d) * p).astype(a.dtype)
            average = jax.tree.map(mean, state.average, optax.apply_updates(params, updates))
            return updates, EMAState(count, average, inner)

        return optax.GradientTransformationExtraArgs(init, update)

    return Wrapper(
        wrap,
        {"ema_decay": c.decay},
        eval_params=lambda state, params: state.average,
        validate_trained=c.validate_trained,
        export_trained=c.export == "trained",
    )
