"""Exponential moving average of the weights (Polyak & Juditsky 1992), for evaluation."""

from typing import Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int
from pydantic import Field

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


class EMAConfig(Settings):
    """Exponential moving average of the weights; validation and samples use it.

    Checkpoints hold the trained weights too. The first steps average over fewer steps, so that a
    short run also forgets its initial values.
    """

    name: Literal["ema"] = "ema"
    decay: float = Field(
        0.999,
        ge=0,
        lt=1,
        description="decay rate per step; the average spans about 1 / (1 - decay) steps",
    )
    validate_trained: bool = Field(
        False, description="also validate the trained weights, logged as trained_loss and so on"
    )
    start_fraction: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="fraction of the run after which the average begins (a tail EMA)",
    )
    export: Literal["average", "trained"] = Field(
        "average", description="weights of the final model: the average or the trained ones"
    )


class EMAState(NamedTuple):
    count: Int[Array, ""]  # steps since the average began
    average: Params  # float32, with the parameters' shapes and shardings
    inner: OptState


def trained_params(state: OptState, params: Params) -> Params:
    """The weights to average, if no inner wrapper has its own evaluation weights."""
    return params


def ema(c: EMAConfig, of: EvalParams = trained_params) -> Wrapper:
    """average <- d average + (1 - d) parameters, d = min(decay, (1 + count) / (10 + count)).

    d is 0 until `start_fraction` of the run. of: (inner state, parameters) -> weights to average.
    """

    def start_averaging(hyper: Hyper, now: RunPosition) -> Hyper:
        if not c.start_fraction:
            return hyper
        return {**hyper, "ema_on": now.step >= hyper["ema_start"] * now.total_steps}

    def wrap(tx: Transformation, label: str) -> Transformation:
        def init(params):
            # In float32: 16 bits would round away the steps of a slow average.
            copies = jax.tree.map(lambda p: jnp.array(p, jnp.float32, copy=True), params)
            return EMAState(jnp.zeros((), jnp.int32), copies, tx.init(params))

        def update(updates, state, params=None, **extra):
            assert params is not None
            updates, inner = tx.update(updates, state.inner, params, **extra)
            hyper = extra["hyper"][label]
            count = state.count + (hyper["ema_on"] if c.start_fraction else 1)
            d = jnp.minimum(hyper["ema_decay"], (1 + count) / (10 + count))
            if c.start_fraction:
                d = d * (count > 0)
            mean = lambda a, p: (d * a + (1 - d) * p).astype(a.dtype)
            weights = of(inner, cast(Params, optax.apply_updates(params, updates)))
            average = jax.tree.map(mean, state.average, weights)
            return updates, EMAState(count, average, inner)

        return optax.GradientTransformationExtraArgs(init, update)

    def shown(state: EMAState, params: Params) -> Params:
        return jax.tree.map(lambda a, p: a.astype(p.dtype), state.average, params)

    late = {"ema_start": c.start_fraction} if c.start_fraction else {}
    return Wrapper(
        wrap,
        {"ema_decay": c.decay, **late},
        eval_params=shown,
        validate_trained=c.validate_trained,
        export_trained=c.export == "trained",
        adjust=start_averaging,
        over=lambda inner: ema(c, inner),
    )
