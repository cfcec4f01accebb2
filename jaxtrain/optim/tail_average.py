"""Stochastic weight averaging: the mean of the weights over the last part of a run.

SWA (Izmailov et al. 2018, arXiv:1803.05407); for language models, in place of the end of a decay,
LAWA (Sanyal et al. 2023, arXiv:2306.03241).
"""

from typing import Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int
from pydantic import Field

from jaxtrain.optim.ema import trained_params
from jaxtrain.optim.types import (
    EvalParams,
    Hyper,
    OptState,
    RunPosition,
    Transformation,
    Wrapper,
)
from jaxtrain.settings import Settings
from jaxtrain.weights.params import Params


class TailAverageConfig(Settings):
    """Averages the weights over the last part of the run; validation and samples use the average.
    Checkpoints hold the trained weights too. All averaged weights count equally."""

    name: Literal["tail_average"] = "tail_average"
    tail_fraction: float = Field(
        0.25,
        gt=0,
        le=1,
        description="fraction of the run, at its end, over which weights are averaged",
    )
    every: int = Field(
        1,
        ge=1,
        description="steps between the weights that enter the average; the last step's always do",
    )
    validate_trained: bool = Field(
        False, description="also validate the trained weights, logged as trained_loss and so on"
    )
    export: Literal["average", "trained"] = Field(
        "average", description="weights of the final model: the average or the trained ones"
    )


class TailAverageState(NamedTuple):
    count: Int[Array, ""]  # number of weights in the mean
    mean: Params  # float32, with the parameters' shapes and shardings
    inner: OptState


def tail_average(c: TailAverageConfig, of: EvalParams = trained_params) -> Wrapper:
    """mean <- mean + (parameters - mean) / count.

    of: (inner state, parameters) -> weights to average."""

    def due(hyper: Hyper, now: RunPosition) -> Hyper:
        left = now.total_steps - 1 - now.step
        tail = left < hyper["tail_fraction"] * now.total_steps
        return {**hyper, "tail_due": tail & (left % hyper["tail_every"] == 0)}

    def wrap(tx: Transformation, label: str) -> Transformation:
        def init(params):
            zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
            return TailAverageState(jnp.zeros((), jnp.int32), zeros, tx.init(params))

        def update(updates, state, params=None, **extra):
            assert params is not None
            updates, inner = tx.update(updates, state.inner, params, **extra)
            counts = extra["hyper"][label]["tail_due"]
            count = state.count + counts
            share = counts / jnp.maximum(count, 1)
            weights = of(inner, cast(Params, optax.apply_updates(params, updates)))
            mean = jax.tree.map(lambda a, p: a + share * (p - a), state.mean, weights)
            return updates, TailAverageState(count, mean, inner)

        return optax.GradientTransformationExtraArgs(init, update)

    def shown(state: TailAverageState, params: Params) -> Params:
        now = of(state.inner, params)
        pick = lambda a, p: jnp.where(state.count > 0, a, p).astype(p.dtype)
        return jax.tree.map(pick, state.mean, now)

    return Wrapper(
        wrap,
        {"tail_fraction": c.tail_fraction, "tail_every": float(c.every)},
        eval_params=shown,
        validate_trained=c.validate_trained,
        export_trained=c.export == "trained",
        adjust=due,
        over=lambda inner: tail_average(c, inner),
    )
