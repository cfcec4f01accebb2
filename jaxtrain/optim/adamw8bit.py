"""AdamW with both moments in 8 bits (Dettmers et al. 2022): a dynamic code and a scale per block.

A block is 256 adjacent values along the last dim, so codes and scales are sharded like their
parameter. Embeddings, gains, scalars and small matrices keep 32 bits.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, UInt8
from pydantic import Field

from jaxtrain.optim.adamw import make_adamw
from jaxtrain.optim.merge_states import mean_over_replicas
from jaxtrain.optim.param_groups import Hyper, Moment, OptimizerConfig, ParamGroup
from jaxtrain.settings import UserError

DECADES = 7  # the code reaches down to a few 1e-7 of a block's maximum


class AdamW8bitConfig(OptimizerConfig):
    """AdamW with 8-bit moments: the same hyperparameters, a quarter of the optimizer state."""

    name: Literal["adamw8bit"] = "adamw8bit"
    learning_rate: float = Field(1e-3, gt=0, description="peak learning rate")
    weight_decay: float = Field(
        0.1, ge=0, description="decoupled weight decay, multiplied by the learning rate"
    )
    b1: float = Field(0.9, ge=0, lt=1, description="decay rate of the first moment")
    b2: float = Field(0.95, ge=0, lt=1, description="decay rate of the second moment")
    eps: float = Field(
        1e-8, gt=0, description="epsilon, added to the square root of the second moment"
    )
    block_size: int = Field(
        256, ge=1, description="values per quantization block, which share a scale"
    )
    min_size: int = Field(
        4096, ge=1, description="parameters with fewer values keep 32-bit moments"
    )


def magnitudes(signed: bool) -> np.ndarray:
    """0, the midpoints of 2^i (signed) or 2^(i+1) equal parts of decade i = 0 ... 6, and 1; sorted.

    The dynamic-tree code: few values in the small decades, many in the largest one, below 1.
    """
    parts = [2 ** (i if signed else i + 1) for i in range(DECADES)]
    decades = [
        10.0 ** (i + 1 - DECADES) * (0.1 + 0.9 * (np.arange(n) + 0.5) / n)
        for i, n in enumerate(parts)
    ]
    return np.concatenate([[0.0], *decades, [1.0]])


def code_values(signed: bool) -> np.ndarray:
    """Values of the codes 0 ... 255 in [-1, 1] or [0, 1], sorted."""
    up = magnitudes(signed)
    return np.concatenate([-up[-2:0:-1], up]) if signed else up


def nearest_magnitude(a: Float[Array, "*S"], signed: bool) -> Array:
    """Index of the nearest entry of `magnitudes`. Arithmetic only: a search would need gathers."""
    first = 1 if signed else 2  # parts of decade 0
    up = magnitudes(signed)
    starts = [first * (2**i - 1) + 1 for i in range(DECADES)]
    decade = sum((a >= (up[n - 1] + up[n]) / 2).astype(jnp.int32) for n in starts[1:])
    parts = jnp.left_shift(first, decade)
    powers = jnp.float32([10.0 ** (DECADES - 1 - i) for i in range(DECADES)])
    position = (a * powers.at[decade].get(mode="promise_in_bounds") - 0.1) * (parts / 0.9)
    index = parts - first + 1 + jnp.clip(position.astype(jnp.int32), 0, parts - 1)
    index = jnp.where(a < up[1] / 2, 0, index)
    return jnp.where(a >= (up[-2] + up[-1]) / 2, len(up) - 1, index)


def spread(scale: Float[Array, "*S n"], block: int, size: int) -> Float[Array, "*S o"]:
    """Broadcast each block's scale to its values."""
    return jnp.repeat(scale, block, axis=-1)[..., :size]


def encode(
    x: Float[Array, "*S o"], block: int, signed: bool
) -> tuple[UInt8[Array, "*S o"], Float[Array, "*S n"]]:
    """Codes, and each block's largest magnitude as its scale; a row's last block may be short.

    An unsigned value above 0 never becomes 0, since Adam divides by its root.
    """
    size = x.shape[-1]
    padded = jnp.pad(jnp.abs(x), [(0, 0)] * (x.ndim - 1) + [(0, -size % block)])
    scale = jnp.max(padded.reshape(*x.shape[:-1], -1, block), axis=-1)
    unit = jnp.abs(x) / spread(jnp.where(scale > 0, scale, 1.0), block, size)
    index = nearest_magnitude(unit, signed)
    if signed:
        index = jnp.where(x < 0, -jnp.minimum(index, 127), index) + 127
    else:
        index = jnp.where(x > 0, jnp.maximum(index, 1), index)
    return index.astype(jnp.uint8), scale


def decode(
    codes: UInt8[Array, "*S o"], scale: Float[Array, "*S n"], block: int, signed: bool
) -> Float[Array, "*S o"]:
    table = jnp.asarray(code_values(signed), jnp.float32)
    values = table.at[codes.astype(jnp.int32)].get(mode="promise_in_bounds")
    return values * spread(scale, block, codes.shape[-1])


class Adam8bitState(NamedTuple):
    count: Array
    m: Any  # a tree of Moment
    v: Any
    block: Array  # values unused; its length is the block size of the codes

    def merge(self) -> "Adam8bitState":
        """Mean of states stacked [R, ...]: decode, average over R, and encode again."""
        size = self.block.shape[-1]

        def mean(m: Moment, signed: bool) -> Moment:
            if m.scale is None:
                return Moment(mean_over_replicas(m.values), None)
            values = mean_over_replicas(decode(m.values, m.scale, size, signed))
            return Moment(*encode(values, size, signed))

        is_moment = lambda x: isinstance(x, Moment)
        m = jax.tree.map(lambda x: mean(x, True), self.m, is_leaf=is_moment)
        v = jax.tree.map(lambda x: mean(x, False), self.v, is_leaf=is_moment)
        return Adam8bitState(mean_over_replicas(self.count), m, v, self.block[0])


def make_adamw8bit(block: int, min_size: int) -> Callable[[Hyper], optax.GradientTransformation]:
    """Function from the current rates to the transformation of a tree of parameters."""

    def zeros(p: jax.Array, signed: bool) -> Moment:
        x = jnp.zeros(p.shape, jnp.float32)
        return Moment(*encode(x, block, signed)) if p.size >= min_size else Moment(x, None)

    def blend(decay: Any, old: Moment, x: jax.Array, signed: bool) -> tuple[jax.Array, Moment]:
        """The updated moment, exact for this step's update, and in stored form."""
        if old.scale is None:
            now = decay * old.values + (1 - decay) * x
            return now, Moment(now, None)
        now = decay * decode(old.values, old.scale, block, signed) + (1 - decay) * x
        return now, Moment(*encode(now, block, signed))

    def leaf(h: Hyper, count: jax.Array, g: jax.Array, m: Moment, v: Moment, p: jax.Array):
        g = g.astype(jnp.float32)
        m_now, m = blend(h["b1"], m, g, True)
        v_now, v = blend(h["b2"], v, jnp.square(g), False)
        m_hat, v_hat = m_now / (1 - h["b1"] ** count), v_now / (1 - h["b2"] ** count)
        u = m_hat / (jnp.sqrt(v_hat) + h["eps"]) + h["weight_decay"] * p
        return -h["learning_rate"] * u, m, v

    def make(h: Hyper) -> optax.GradientTransformation:
        def init(params):
            return Adam8bitState(
                jnp.zeros((), jnp.int32),
                jax.tree.map(lambda p: zeros(p, True), params),
                jax.tree.map(lambda p: zeros(p, False), params),
                jnp.zeros(block, jnp.uint8),
            )

        def update(updates, state, params=None):
            if state.block.size != block:
                raise UserError(
                    f"optim.block_size is {block}, but the 8-bit state was saved with "
                    f"{state.block.size}: set optim.block_size={state.block.size} to resume"
                )
            count = state.count + 1
            grads, treedef = jax.tree.flatten(updates)
            rest = (treedef.flatten_up_to(t) for t in (state.m, state.v, params))
            parts = zip(*(leaf(h, count, *arrays) for arrays in zip(grads, *rest)))
            moved, m, v = (treedef.unflatten(part) for part in parts)
            return moved, Adam8bitState(count, m, v, state.block)

        return optax.GradientTransformation(init, update)

    return make


def adamw8bit(c: AdamW8bitConfig) -> dict[str, ParamGroup]:
    peaks = c.model_dump(include={"learning_rate", "weight_decay", "b1", "b2", "eps"})
    small = ParamGroup(make_adamw8bit(c.block_size, c.min_size), peaks)
    plain = ParamGroup(make_adamw, {**peaks, "weight_decay": 0.0})
    return {
        "matrix": small,
        "embedding": ParamGroup(make_adamw, peaks),
        "head": small,
        "gain": plain,
        "scalar": plain,
    }
