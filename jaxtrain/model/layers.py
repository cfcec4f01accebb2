"""The small pieces that every layer uses: RMS norm, rotary positions, feed-forward."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxtrain.model.config import ResolvedModel
from jaxtrain.model.init import SCHEMES
from jaxtrain.model.params import declare
from jaxtrain.parallel import constrain


def rms_norm(
    x: Float[Array, "*B D"], gain: Float[Array, "D"] | None = None, *, eps: float
) -> Float[Array, "*B D"]:
    """x / rms(x), statistics in float32, result in x's dtype (Zhang & Sennrich 2019)."""
    x32 = x.astype(jnp.float32)
    y = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    if gain is not None:
        y = y * jnp.expand_dims(gain, range(y.ndim - 1))
    return y.astype(x.dtype)


class Rotary(NamedTuple):
    """Cosines and sines of the rotary angles, ready to broadcast over heads."""

    cos_BT1h: Array
    sin_BT1h: Array


def rotary(positions_BT: Int[Array, "B T"], head_dim: int, base: float) -> Rotary:
    """Angles of each position (Su et al. 2021); h is half the head dim."""
    frequency_h = base ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle_BT1h = positions_BT[:, :, None, None].astype(jnp.float32) * frequency_h.reshape(
        1, 1, 1, -1
    )
    return Rotary(jnp.cos(angle_BT1h), jnp.sin(angle_BT1h))


def rotate(x_BTNH: Float[Array, "B T N H"], rope: Rotary) -> Float[Array, "B T N H"]:
    """Rotate the pairs (i, i + H/2), the half-split layout of Llama checkpoints."""
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    cos, sin = rope
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BTNH.dtype)


ACTIVATIONS = {
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "swiglu": jax.nn.silu,
    "geglu": lambda x: jax.nn.gelu(x, approximate=True),
}
GATED = ("swiglu", "geglu")


class FeedForward(nnx.Module):
    """Position-wise network; the gated kinds multiply a second projection in (Shazeer 2020)."""

    def __init__(self, c: ResolvedModel, layers: int):
        scheme = SCHEMES[c.init](c)
        L, D, F = layers, c.width, c.hidden
        self.kind = c.ffn
        self.up = declare((L, D, F), ("layers", "embed", "hidden"), scheme.up, "matrix")
        if c.ffn in GATED:
            self.gate = declare((L, D, F), ("layers", "embed", "hidden"), scheme.up, "matrix")
        self.down = declare((L, F, D), ("layers", "hidden", "embed"), scheme.down, "matrix")

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        act = ACTIVATIONS[self.kind]
        up_BTF = constrain(x_BTD @ self.up[...], "batch", None, "hidden")
        h_BTF = act(x_BTD @ self.gate[...]) * up_BTF if self.kind in GATED else act(up_BTF)
        return h_BTF @ self.down[...]
