"""Building blocks of every layer: norms, rotary positions, feed-forward network."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtrain_kernels import Fp8Input
from jaxtyping import Array, Float, Int

from jaxtrain.model.config import ResolvedModel
from jaxtrain.model.fused_ops import relu2
from jaxtrain.model.init import SCHEMES, constant, normal
from jaxtrain.model.rope import Divisors, RopeScaling, frequencies
from jaxtrain.parallel import constrain, embedding_grad, embedding_lookup
from jaxtrain.weights.contract import (
    DeferredNorm,
    PendingProduct,
    add_bias,
    cast_input,
    computed,
    dense,
    dense_fused,
    dense_of,
    feed_forward_relu2,
    input_amax,
    reading,
)
from jaxtrain.weights.params import declare


def rms_norm(
    x: Float[Array, "*B D"], gain: Float[Array, "D"] | None = None, *, eps: float
) -> Float[Array, "*B D"]:
    """x / rms(x), statistics in float32, result in x's dtype (Zhang & Sennrich 2019)."""
    x32 = x.astype(jnp.float32)
    y = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    if gain is not None:
        y = y * jnp.expand_dims(gain, range(y.ndim - 1))
    return y.astype(x.dtype)


def layer_norm(
    x: Float[Array, "*B D"],
    gain: Float[Array, "D"] | None = None,
    shift: Float[Array, "D"] | None = None,
    *,
    eps: float,
) -> Float[Array, "*B D"]:
    """(x - mean) / std, statistics in float32, result in x's dtype (Ba et al. 2016)."""
    x32 = x.astype(jnp.float32)
    x32 -= jnp.mean(x32, axis=-1, keepdims=True)
    y = rms_norm(x32, gain, eps=eps)
    return (y if shift is None else y + jnp.expand_dims(shift, range(y.ndim - 1))).astype(x.dtype)


def branch_output(
    x: Float[Array, "*B K"] | PendingProduct,
    matrix: nnx.Param,
    bias: nnx.Param | None,
    residual: Float[Array, "*B D"] | PendingProduct | None = None,
) -> Float[Array, "*B D"] | PendingProduct:
    """A branch's last matmul; residual: the stream, which its kernel adds."""
    if residual is None:
        return add_bias(dense(computed(x), matrix), bias)
    return dense_fused(x, matrix, biases=(bias,), residual=residual)[0]


def declare_bias(layers: int, size: int, axis: str | None) -> nnx.Param:
    """Declare a bias for every layer, [L, size]; it starts at zero."""
    return declare((layers, size), ("layers", axis), constant(0.0), "gain", group="bias")


@jax.custom_vjp
def lookup(table_VD: Float[Array, "V D"], tokens_BT: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Look up rows of an embedding. Its gradient is summed in float32, whatever the table's dtype.

    A frequent token sums thousands of rows; in bfloat16 the sum would stop growing. (The sums of
    several devices are then added in the table's dtype, as all gradients are.)
    """
    return embedding_lookup(table_VD, tokens_BT)


def _lookup_forward(table_VD: Array, tokens_BT: Array) -> tuple[Array, tuple[Array, Array]]:
    return embedding_lookup(table_VD, tokens_BT), (table_VD[:, :0], tokens_BT)


def _lookup_backward(saved: tuple[Array, Array], g_BTD: Array) -> tuple[Array, None]:
    like_V0, tokens_BT = saved
    return embedding_grad(g_BTD, tokens_BT, len(like_V0), like_V0.dtype), None


lookup.defvjp(_lookup_forward, _lookup_backward)


class Rotary(NamedTuple):
    """Cosines and signed sines of the rotary angles, ready to broadcast over heads."""

    cos_BT1H: Array
    sin_BT1H: Array


def rotary(
    positions_BT: Int[Array, "B T"],
    head_dim: int,
    base: float,
    scaling: RopeScaling | Divisors | None = None,
) -> Rotary:
    """Rotary angles of each position (Su et al. 2021); h is half the head dim."""
    frequency, factor = frequencies(head_dim, base, scaling, positions_BT)
    angle_BT1h = positions_BT[:, :, None, None].astype(jnp.float32) * frequency.reshape(
        -1, 1, 1, head_dim // 2
    )
    cos, sin = jnp.cos(angle_BT1h), jnp.sin(angle_BT1h)
    if isinstance(factor, Array) or factor != 1.0:
        cos, sin = factor * cos, factor * sin
    return Rotary(jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1))


def rotate(
    x_BTNH: Float[Array, "B T N H"], rope: Rotary, norm_eps: float | None
) -> Float[Array, "B T N H"]:
    """Rotate the pairs (i, i + H/2), the half-split layout of Llama; then RMS-normalise.

    A rotation preserves the norm, so the statistics come from x itself: one pass reduces, one
    rotates and scales. The halves are swapped by a reversal, which fuses (a concatenation does
    not). norm_eps None: no norm.
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


class Adapter(nnx.Module):
    """A bottleneck y + up gelu(down y) behind a branch (Houlsby et al. 2019); `up` starts at 0."""

    def __init__(self, c: ResolvedModel, layers: int):
        L, D, A = layers, c.width, c.adapter or 1
        matrix = lambda shape, axes, init: declare(shape, axes, init, "matrix", group="adapter")
        self.down = matrix((L, D, A), ("layers", "embed", None), normal(D**-0.5))
        self.up = matrix((L, A, D), ("layers", None, "embed"), constant(0.0))

    def __call__(self, y_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        h_BTA = jax.nn.gelu(dense(y_BTD, self.down), approximate=True)
        return y_BTD + dense(h_BTA, self.up)


class FeedForward(nnx.Module):
    """Position-wise network; gated kinds multiply by a second projection (Shazeer 2020)."""

    def __init__(self, c: ResolvedModel, layers: int):
        scheme = SCHEMES[c.init](c)
        L, D, F = layers, c.width, c.hidden
        self.kind = c.ffn
        self.up = declare((L, D, F), ("layers", "embed", "hidden"), scheme.up, "matrix")
        if c.ffn in GATED:
            self.gate = declare((L, D, F), ("layers", "embed", "hidden"), scheme.up, "matrix")
        self.down = declare((L, F, D), ("layers", "hidden", "embed"), scheme.down, "matrix")
        self.up_bias = declare_bias(L, F, "hidden") if c.ffn_bias else None
        self.gate_bias = declare_bias(L, F, "hidden") if c.ffn_bias and c.ffn in GATED else None
        self.down_bias = declare_bias(L, D, None) if c.ffn_bias else None

    def input_amax(self) -> Array | None:
        """See `weights.contract.input_amax`."""
        return input_amax(self.up, *([self.gate] if self.kind in GATED else []))

    def readers(self) -> tuple[nnx.Param, ...]:
        """Matrices of the input, in the order in which a fused kernel takes them."""
        return (self.gate, self.up) if self.kind in GATED else (self.up,)

    def in_two_kernels(
        self,
        x_BTD: Float[Array, "B T D"] | DeferredNorm,
        residual_BTD: Array | PendingProduct | None,
    ) -> Float[Array, "B T D"] | PendingProduct:
        """The network of a few rows: its norm, biases, activation and residual are in the kernels
        of its matmuls."""
        gates = (self.gate_bias,) if self.kind in GATED else ()
        (h_BTF,) = dense_fused(
            x_BTD, *self.readers(), biases=(*gates, self.up_bias), activation=self.kind
        )
        return branch_output(h_BTF, self.down, self.down_bias, residual_BTD)

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"] | DeferredNorm,
        relu2_by: str | None = None,
        by: str | None = None,
        cast: Fp8Input | None = None,
        residual_BTD: Float[Array, "B T D"] | PendingProduct | None = None,
    ) -> Float[Array, "B T D"] | PendingProduct:
        """cast: of x, for matrices that have an `input_amax`. residual_BTD: added to the result of
        a few rows; needs `DeferredNorm`."""
        if isinstance(x_BTD, DeferredNorm):
            return self.in_two_kernels(x_BTD, residual_BTD)
        if self.kind == "relu2" and self.up_bias is None and relu2_by is None:
            matrices = reading(self.up, cast), self.down.get_value()
            if (y_BTD := feed_forward_relu2(x_BTD, *matrices, by)) is not None:
                return y_BTD
        act = ACTIVATIONS[self.kind]
        gates = [self.gate] if self.kind in GATED else []
        product = dense_of(x_BTD, self.up, *gates, cast=cast or cast_input(x_BTD, self.up))
        up_BTF = constrain(product(self.up), "batch", "tokens", "hidden")
        up_BTF = add_bias(up_BTF, self.up_bias)
        if self.kind in GATED:
            gate_BTF = constrain(product(self.gate), "batch", "tokens", "hidden")
            h_BTF = act(add_bias(gate_BTF, self.gate_bias)) * up_BTF
        else:
            h_BTF = act(up_BTF) if relu2_by is None else relu2(up_BTF, relu2_by)
        return add_bias(dense(h_BTF, self.down), self.down_bias)
