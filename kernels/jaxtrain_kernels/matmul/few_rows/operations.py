"""Operations that a matmul of a few rows takes with it: the norm of its input, and what follows it.

`composed` is their specification, and what every backend without own kernels for them runs.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "swiglu": jax.nn.silu,
    "geglu": lambda x: jax.nn.gelu(x, approximate=True),
}
GATED = ("swiglu", "geglu")  # of two matrices' products: activation(x gate) * (x up)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["gain_K"], meta_fields=["eps"])
@dataclasses.dataclass(frozen=True)
class InputNorm:
    """RMS norm of a matmul's input: x / rms(x), times gain_K if there is one."""

    eps: float
    gain_K: Float[Array, "K"] | None = None

    def of(self, x: Float[Array, "*B K"]) -> Float[Array, "*B K"]:
        """The norm of x: statistics in float32, result in x's dtype (Zhang & Sennrich 2019)."""
        x32 = x.astype(jnp.float32)
        y = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        if self.gain_K is not None:
            y *= jnp.expand_dims(self.gain_K, range(y.ndim - 1))
        return y.astype(x.dtype)


class Operations(NamedTuple):
    """norm: of the input. biases: of each matrix's product, None without. activation: a key of
    ACTIVATIONS. residual_MN: is added to the result of the only matrix, or of a gated pair."""

    norm: InputNorm | None = None
    biases: tuple[Array | None, ...] | None = None
    activation: str | None = None
    residual_MN: Float[Array, "M N"] | None = None

    def check(self, matrices: Sequence[Array]) -> None:
        """Raise ValueError if these matrices do not fit the operations."""
        gated = self.activation in GATED
        if self.activation is not None and self.activation not in ACTIVATIONS:
            raise ValueError(f"activation {self.activation!r}: one of {', '.join(ACTIVATIONS)}")
        if gated and (len(matrices) != 2 or matrices[0].shape != matrices[1].shape):
            raise ValueError(f"{self.activation} takes two matrices of one shape, gate and up")
        if self.residual_MN is not None and len(matrices) != 1 + gated:
            raise ValueError("a residual is added to the result of one matrix")


NOTHING = Operations()


def composed(
    matmul: Callable[..., tuple[Array, ...]],
    x_MK: Float[Array, "M K"],
    *matrices: Float[Array, "_ _"],
    operations: Operations,
) -> tuple[Float[Array, "M _"], ...]:
    """The products by `matmul`, with the operations around them one by one."""
    norm, biases, activation, residual_MN = operations
    ys = matmul(x_MK if norm is None else norm.of(x_MK), *matrices)
    if biases is not None:
        add = lambda y, bias: y if bias is None else y + bias.astype(y.dtype)[None]
        ys = tuple(map(add, ys, biases))
    if activation in GATED:
        gate, up = ys
        ys = (ACTIVATIONS[activation](gate) * up,)
    elif activation is not None:
        ys = tuple(map(ACTIVATIONS[activation], ys))
    return ys if residual_MN is None else (residual_MN + ys[0],)
