"""Parameter declarations, the source of initial values, shardings, optimizer groups and counts."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.parallel.axes import Shardings

Role = Literal["matrix", "embedding", "head", "gain", "scalar"]
Params = dict[str, Any]  # a tree of arrays, by the names of modules and parameters
Specs = dict[str, Any]  # a tree of the same structure, of `ParamSpec`
ShapeTree = dict[str, Any]  # a tree of the same structure, of `jax.ShapeDtypeStruct`
# Groups of a mixture of experts whose "gradient" is the number of tokens per expert.
BALANCE_GROUPS = ("router_bias", "router_load")
BLOCK_GROUPS = ("matrix", "experts")  # groups of the blocks' large matrices


@dataclass(frozen=True)
class Initializer:
    """Draws initial values. `wider`: the in and out dims, as multiples of the base model's.

    muP ties the learning rate to the initial values, so the optimizer reads `wider`.
    """

    draw: Callable[[jax.Array, tuple[int, ...]], jax.Array]
    wider: tuple[float, float] = (1.0, 1.0)

    def __call__(self, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return self.draw(key, shape)


@dataclass(frozen=True)
class ParamSpec:
    """One parameter; `ins` and `outs` are the dims of its matrix view, other dims are stacked."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Initializer
    role: Role
    ins: tuple[int, ...] = ()
    outs: tuple[int, ...] = ()
    group: str = ""  # optimizer group, where it is finer than the role
    dtype: str = "float32"
    head_dim: int | None = None  # output channels per head, for query and key projections

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def wider(self) -> tuple[float, float]:
        return self.init.wider


def is_block_matrix(spec: ParamSpec) -> bool:
    """Whether a parameter is a matrix of attention, feed-forward network or experts, and not a
    router, gate or adapter."""
    return spec.role == "matrix" and spec.group in BLOCK_GROUPS


def declare(
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    init: Initializer,
    role: Role,
    *,
    group: str | None = None,
    dtype: str = "float32",
    head_dim: int | None = None,
) -> nnx.Param:
    """Declare a module's parameter, without a value.

    The last two dims of a matrix or head are (in, out), of an embedding (row, out). A leading dim
    called `layers` is a stack of equal layers.
    """
    ins, outs = ((len(shape) - 2,), (len(shape) - 1,)) if role in ("matrix", "head") else ((), ())
    spec = ParamSpec(shape, axes, init, role, ins, outs, group or role, dtype, head_dim)
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)), spec=spec)


def split(model: nnx.Module) -> tuple[nnx.GraphDef, dict[str, Any]]:
    """The model's structure, and its declarations as a plain tree of ParamSpec."""
    graphdef, state = nnx.split(model, nnx.Param)
    tree: dict[str, Any] = {}
    for path, variable in nnx.to_flat_state(state):
        *parents, name = (str(key) for key in path)
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[name] = variable.get_metadata()["spec"]
    return graphdef, tree


def path_name(path: tuple[Any, ...]) -> str:
    """`blocks/attention/q` from a jax key path."""
    return "/".join(str(getattr(key, "key", key)) for key in path)


def initialize(specs: Specs, seed: int | jax.Array) -> Params:
    """Initial values. PRNG keys derive from paths, so adding a parameter does not change others."""
    root = jax.random.key(seed)

    def value(path: tuple[Any, ...], spec: ParamSpec) -> jax.Array:
        key = jax.random.fold_in(root, zlib.crc32(path_name(path).encode()))
        return spec.init(key, spec.shape).astype(spec.dtype)

    return jax.tree_util.tree_map_with_path(value, specs)


def abstract(specs: Specs, shardings: Shardings) -> ShapeTree:
    """Shapes, dtypes and shardings without values, as the target of a checkpoint's restore."""
    return jax.tree.map(
        lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), specs, shardings
    )


def count(specs: Specs, role: Role | None = None) -> int:
    """Number of parameters of one role, or of all."""
    return sum(s.size for s in jax.tree.leaves(specs) if role in (None, s.role))


def cast(params: Params, specs: Specs, dtype: jnp.dtype) -> Params:
    """Cast parameters to the compute dtype. Gains, scalars and routers stay float32."""
    keep = lambda s: s.role in ("gain", "scalar") or s.group == "router"
    # A quantized matrix is a subtree below its declaration.
    return jax.tree.map(lambda s, p: p if keep(s) else p.astype(dtype), specs, params)
