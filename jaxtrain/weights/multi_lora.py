"""Multi-LoRA: a matrix with several low-rank adapters; each row of a batch uses one of them."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxtrain.weights.contract import Weight, dequantize, is_weight, matmul
from jaxtrain.weights.params import Params, path_name


class LoRAFactors(NamedTuple):
    """One adapter's factors for a stack of matrices: columns x (w + a b); columns None: 1."""

    a: Float[Array, "L K r"]
    b: Float[Array, "L r N"]
    columns: Float[Array, "L N"] | None = None


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["w", "a", "b", "columns", "adapter"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class MultiLoRAWeight(Weight):
    """columns[i] x (w + a[i] b[i]) for a row whose adapter index is i; 0 is no change.

    One matrix or a stack: w [.., K, N], a [.., A, K, r], b [.., A, r, N], columns [.., A, N] in
    float32 or None. adapter [.., B]: index of each row (`choose_adapters`); None: no adapters.
    """

    w: Any  # an array, or quantized
    a: Any
    b: Any
    columns: Any = None
    adapter: Any = None

    def matmul(self, x: Float[Array, "B *T K"]) -> Float[Array, "B *T N"]:
        """Each row of x times its own matrix, which is never materialized; w is read once."""
        y = matmul(x, self.w)
        if self.adapter is None:
            return y
        of_rows = lambda factor: jnp.take(factor, self.adapter, axis=0)
        x_BtK = x.reshape(x.shape[0], -1, x.shape[-1])
        change = (x_BtK @ of_rows(self.a)) @ of_rows(self.b)
        y = y + change.astype(y.dtype).reshape(y.shape)
        if self.columns is None:
            return y
        columns_BN = of_rows(self.columns)
        middle = (1,) * (y.ndim - 2)
        return (columns_BN.reshape(len(columns_BN), *middle, -1) * y).astype(y.dtype)

    def dequantize(self) -> Float[Array, "K N"]:
        if self.adapter is not None:
            raise NotImplementedError("rows with adapters of their own have no common matrix")
        return dequantize(self.w)


def stack_adapters(w: Array | Weight, adapters: Sequence[LoRAFactors | None]) -> MultiLoRAWeight:
    """A stack of matrices with adapters 1, 2, ...; None: an adapter that does not change it.

    Lower ranks are zero-padded.
    """
    some = [one for one in adapters if one is not None]
    rank = max(one.a.shape[-1] for one in some)
    (L, K, _), N = some[0].a.shape, some[0].b.shape[-1]
    none = LoRAFactors(jnp.zeros((L, K, 0)), jnp.zeros((L, 0, N)))
    every = [none, *(none if one is None else one for one in adapters)]
    missing = [rank - one.a.shape[-1] for one in every]
    wide = [jnp.pad(x.a, ((0, 0), (0, 0), (0, n))) for x, n in zip(every, missing)]
    tall = [jnp.pad(x.b, ((0, 0), (0, n), (0, 0))) for x, n in zip(every, missing)]
    columns = None
    if any(one.columns is not None for one in some):
        plain = jnp.ones((L, N), jnp.float32)
        columns = jnp.stack([plain if x.columns is None else x.columns for x in every], axis=1)
    return MultiLoRAWeight(w, jnp.stack(wide, axis=1), jnp.stack(tall, axis=1), columns)


def choose_adapters(params: Params, adapter_B: Int[Array, "B"]) -> Params:
    """Set each batch row's adapter index in the parameters."""

    def choose(w: object) -> object:
        if not isinstance(w, MultiLoRAWeight):
            return w
        each = jnp.broadcast_to(adapter_B, (*w.a.shape[:-3], len(adapter_B)))
        return dataclasses.replace(w, adapter=each)

    return jax.tree.map(choose, params, is_leaf=is_weight)


def with_adapters(params: Params, changes: Mapping[str, Sequence[LoRAFactors | None]]) -> Params:
    """The parameters, with adapters for the matrices named in `changes`."""
    put = lambda path, w: (
        stack_adapters(w, changes[name]) if (name := path_name(path)) in changes else w
    )
    return jax.tree_util.tree_map_with_path(put, params, is_leaf=is_weight)
