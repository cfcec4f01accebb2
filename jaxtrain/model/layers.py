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


@jax.custom_vjp
def lookup(table_VD: Float[Array, "V D"], tokens_BT: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Rows of an embedding. Its gradient is summed in float32, whatever the table's dtype.

    A frequent token gathers thousands of rows: in bfloat16 their sum would stop growing.
    """
    return table_VD[tokens_BT]


def _lookup_forward(table_VD: Array, tokens_BT: Array) -> tuple[Array, tuple[Array, Array]]:
    return table_VD[tokens_BT], (table_VD[:, :0], tokens_BT)


def _lookup_backward(saved: tuple[Array, Array], g_BTD: Array) -> tuple[Array, None]:
    like_V0, tokens_BT = saved
    sums_VD = jnp.zeros((like_V0.shape[0], g_BTD.shape[-1]), jnp.float32)
    return sums_VD.at[tokens_BT].add(g_BTD.astype(jnp.float32)).astype(like_V0.dtype), None


lookup.defvjp(_lookup_forward, _lookup_backward)


class Rotary(NamedTuple):
    """Cosines of the rotary angles and signed sines, ready to broadcast over heads."""

    cos_BT1H: Array
    sin_BT1H: Array


def rotary(positions_BT: Int[Array, "B T"], head_dim: int, base: float) -> Rotary:
    """Angles of each position (Su et al. 2021); h is half the head dim."""
    frequency_h = base ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle_BT1h = positions_BT[:, :, None, None].astype(jnp.float32) * frequency_h.reshape(
        1, 1, 1, -1
    )
    cos, sin = jnp.cos(angle_BT1h), jnp.sin(angle_BT1h)
    return Rotary(jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1))


def rotate(
    x_BTNH: Float[Array, "B T N H"], rope: Rotary, norm_eps: float | None
) -> Float[Array, "B T N H"]:
    """Rotate the pairs (i, i + H/2), the half-split layout of Llama; then RMS-normalise.

    A rotation keeps the norm, so that its statistics come from x itself: one pass to reduce, one to
    rotate and scale, with the halves swapped by a reversal that fuses (a concatenation does not).
    norm_eps None leaves the norm out.
    """
    x32 = x_BTNH.astype(jnp.float32)
    halves = x32.reshape(*x32.shape[:-1], 2, -1)
    turned = x32 * rope.cos_BT1H + halves[..., ::-1, :].reshape(x32.shape) * rope.sin_BT1H
    if norm_eps is not None:
        turned *= jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + norm_eps)
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
