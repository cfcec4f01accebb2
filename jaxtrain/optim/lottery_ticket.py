"""Lottery tickets by iterative magnitude pruning with rewinding (Frankle & Carbin 2018,
arXiv:1803.03635; late rewinding, Frankle et al. 2019, arXiv:1912.05671)."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Int, PyTree
from pydantic import Field, model_validator

from jaxtrain.optim.masks import (
    MaskInputs,
    MaskRule,
    Masks,
    MaskState,
    keep_largest,
    keep_largest_of_all,
    magnitude,
    map_by_name,
    with_masks,
)
from jaxtrain.optim.types import OptState, Restarts, Transformation, Wrapper
from jaxtrain.settings import Settings
from jaxtrain.weights.params import Params


class LotteryTicketConfig(Settings):
    """Iterative magnitude pruning: train, prune a fraction of the remaining weights, rewind the
    others to their values at an early step, and train again. The optimizer state is reset, the
    schedule continues from that step, and the data stream continues."""

    name: Literal["lottery_ticket"] = "lottery_ticket"
    rounds: int = Field(
        5, ge=2, description="number of training rounds; weights are pruned between two of them"
    )
    round_steps: int = Field(gt=0, description="steps of the first round and of the schedule")
    rewind_step: int = Field(0, ge=0, description="step to whose weights later rounds rewind")
    prune: float = Field(
        0.2, gt=0, lt=1, description="fraction of the remaining weights that each round prunes"
    )
    scope: Literal["matrix", "global"] = Field(
        "global",
        description="weights that are ranked together: those of each matrix, or of all matrices "
        "of an optimizer group",
    )

    @model_validator(mode="after")
    def _check(self) -> "LotteryTicketConfig":
        if self.rewind_step >= self.round_steps:
            raise ValueError(
                f"rewind_step {self.rewind_step} is not before round_steps {self.round_steps}"
            )
        return self


class RewindState(NamedTuple):
    count: Int[Array, ""]  # number of updates
    start: Params  # the weights to rewind to
    inner: OptState


def lottery_ticket(c: LotteryTicketConfig) -> Wrapper:
    """Wrapper that rewinds the weights of all groups and prunes the blocks' matrices."""
    length = c.round_steps - c.rewind_step
    total = c.round_steps + (c.rounds - 1) * length

    def ends(step: Array) -> Bool[Array, ""]:
        """Whether a training round ends with this update and another one follows."""
        return (step >= c.round_steps) & ((step - c.rewind_step) % length == 0) & (step < total)

    def draw(seen: MaskInputs, memory: PyTree) -> tuple[Masks, PyTree]:
        done = (seen.step - c.rewind_step) // length
        left = lambda n: jnp.array([round((1 - c.prune) ** r * n) for r in range(c.rounds)])[done]
        keys = {name: magnitude(p) for name, p in seen.params.items()}
        if c.scope == "global":
            return keep_largest_of_all(keys, left(sum(x.size for x in keys.values()))), memory
        kept = lambda x: keep_largest(x, left(x.shape[-2] * x.shape[-1]))
        return {name: kept(x) for name, x in keys.items()}, memory

    masks = with_masks(MaskRule(lambda step, memory: ends(step), draw))

    def wrap(tx: Transformation, label: str) -> Transformation:
        inside = masks.wrap(tx, label)

        def init(params):
            start = jax.tree.map(jnp.copy, params)
            return RewindState(jnp.zeros((), jnp.int32), start, inside.init(params))

        def update(updates, state, params=None, **extra):
            assert params is not None
            moved, inner = inside.update(updates, state.inner, params, **extra)
            count = state.count + 1
            now, over = optax.apply_updates(params, moved), ends(count)
            keep = lambda s, p: jnp.where(count == c.rewind_step, p, s)
            start = jax.tree.map(keep, state.start, now)
            pruned = inner.masks if isinstance(inner, MaskState) else {}

            def back(name: str, m: Array, s: Array, p: Array) -> Array:
                away = s.astype(jnp.float32) - p.astype(jnp.float32)
                return jnp.where(over & pruned.get(name, True), away, m)

            moved = map_by_name(back, moved, start, params)
            fresh = lambda: anew(tx, params, inner)
            return moved, RewindState(count, start, jax.lax.cond(over, fresh, lambda: inner))

        return optax.GradientTransformationExtraArgs(init, update)

    measure = masks.metrics
    return masks._replace(
        wrap=wrap,
        metrics=measure and (lambda states: measure([s.inner for s in states])),
        restarts=Restarts(c.rewind_step, c.round_steps, total),
    )


def anew(tx: Transformation, params: Params, state: OptState) -> OptState:
    """Reset the optimizer state to its initial values; masks stay."""
    if isinstance(state, MaskState):
        return state._replace(inner=anew(tx, params, state.inner))
    return jax.tree.map(lambda new, old: new.astype(old.dtype), tx.init(params), state)
