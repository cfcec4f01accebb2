"""Optimizer-state offload: states stay off the device between steps, and return chunk by chunk.

In host memory it is ZeRO-Offload (Ren et al. 2021) without the CPU update; in files it is
ZeRO-Infinity (`train/file_offload.py`). A loop takes some layers of the stacks at a time: copy
states in, update, copy states back, in place. The copies of one stack overlap with those of the
others and with the updates. Run operation by operation, results are bit-identical (except for the
summation order of Muon's matmuls); compiled, they differ where XLA rounds differently.
"""

import functools
from collections.abc import Callable, Container, Mapping
from math import prod
from typing import Annotated, Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from pydantic import BeforeValidator, Field

from jaxtrain.optim.types import Hyper, OptState, Transformation
from jaxtrain.parallel.axes import current_mesh, partition_spec
from jaxtrain.settings import Settings, UserError
from jaxtrain.weights.params import Params, Specs

Index = int | np.int32 | jax.Array  # index of a part
MIN_BYTES = 2**20  # bytes; smaller states are not worth a copy
CHUNK_BYTES = (
    2**28
)  # bytes of parameters per device that are updated at once, if the first dim divides so


class HostOffload(Settings):
    """ZeRO-Offload: optimizer states in host memory."""

    name: Literal["host"] = "host"


class FileOffload(Settings):
    """ZeRO-Infinity: optimizer states in files on a local disk, when host memory is too small."""

    name: Literal["files"] = "files"
    directory: str | None = Field(
        None,
        min_length=1,
        description="folder of the files, on a fast local disk, for one run at a time; default "
        "`states` in the run directory",
    )


# Old run directories have `false` for no offload.
OffloadConfig = Annotated[
    Annotated[HostOffload | FileOffload, Field(discriminator="name")] | None,
    BeforeValidator(lambda given: None if given is False else given),
]


class UpdateGroup(NamedTuple):
    """Parameters that one transformation updates."""

    tx: Transformation  # init(params) and update(grads, state, params, hyper=, specs=)
    names: set[str]
    whole: bool  # whether the update needs whole matrices (norms, matmuls)


class OffloadChunk(NamedTuple):
    """Parameters with the same first dim; they are updated together, in `parts` parts."""

    names: set[str]
    parts: int


def name_of(path: tuple[Any, ...]) -> str:
    """Name of the parameter at a path in a tree of parameters."""
    return "/".join(str(key.key) for key in path)


def owner_of(path: tuple[Any, ...], names: Container[str]) -> str | None:
    """Name of the parameter that a path in a state ends in; None for a state that all share."""
    keys = [str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)]
    ends = ("/".join(keys[start:]) for start in range(len(keys)))
    return next((name for name in ends if name in names), None)


def masked(tree: Params | Specs, names: set[str]) -> Params:
    """Mask the parameters with other names in a tree of parameters, or in one like it."""
    hide = lambda path, x: x if name_of(path) in names else optax.MaskedNode()
    return jax.tree_util.tree_map_with_path(hide, tree)


def is_offloaded(state: jax.ShapeDtypeStruct) -> bool:
    """Whether this state of a parameter is offloaded (two dims or more, and MIN_BYTES or more)."""
    return len(state.shape) > 1 and state.size * state.dtype.itemsize >= MIN_BYTES


def host_sharding(mesh: Mesh, spec: PartitionSpec) -> NamedSharding:
    """Sharding in pinned host memory. UserError for a device without it."""
    try:
        return NamedSharding(mesh, spec, memory_kind="pinned_host")
    except ValueError as error:
        kind = mesh.devices.flat[0].device_kind
        raise UserError(
            f"optim.offload: a {kind} has no pinned memory of the host's beside its own; set it to "
            "null (optim.state_dtype=bfloat16 or optim.name=adamw8bit make states smaller)"
        ) from error


def on_host(x: jax.Array) -> bool:
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def to_device[T](tree: T) -> T:
    """Copy arrays in host memory to the device."""
    return jax.tree.map(
        lambda x: jax.device_put(x, jax.memory.Space.Device) if on_host(x) else x, tree
    )


def offload_chunks(
    params: Mapping[str, jax.Array | jax.ShapeDtypeStruct], specs: dict[str, Any], whole: bool
) -> list[OffloadChunk]:
    """Parameters to update together, and the number of parts.

    Stacks with the same number of layers are updated together, layer by layer. Other arrays are
    separate, cut by rows if the update is row-wise (not `whole`). A sharded dim is not cut.
    """
    mesh = current_mesh()
    sets: dict[tuple[Any, ...], list[str]] = {}
    sizes: dict[str, int] = {}
    for name, p in params.items():
        layers = specs[name].axes[0] == "layers"
        entry, shape = None, p.shape
        if mesh is not None:
            spec = partition_spec(specs[name].axes, p.shape, mesh)
            entry, shape = spec[0], NamedSharding(mesh, spec).shard_shape(p.shape)
        sizes[name] = prod(shape) * p.dtype.itemsize
        length = len(p) if entry is None and (layers or not whole) else 1
        sets.setdefault((length,) if layers and length > 1 else (length, name), []).append(name)
    devices = 1 if mesh is None else mesh.size
    found = []
    for (length, *_), names in sets.items():
        # Two parts at least: XLA would overlap a copy outside of a loop with the whole step, in an
        # order that needs more memory than the states. Matrices are distributed over the devices:
        # over all parts, no device should get more of them than with one part.
        share = lambda n, length=length: n * -(-(length // n) // devices)
        cuts = [n for n in range(2, length + 1) if length % n == 0]
        cuts = [n for n in cuts if not whole or share(n) <= share(1)] or [1]
        total = sum(sizes[name] for name in names)
        found.append(
            OffloadChunk(set(names), next((n for n in cuts if total / n <= CHUNK_BYTES), cuts[-1]))
        )
    return found


def update_offloaded(
    tx: Transformation,
    hyper: dict[str, Hyper],
    grads: Params,
    state: OptState,
    params: Params,
    specs: Specs,
    whole: bool,
    finite: jax.Array | None = None,
) -> tuple[Params, OptState]:
    """(new parameters, new state) of a group; offloaded states stay on the host.

    tx: init(params) and update(grads, state, params, hyper=, specs=). finite: if False, nothing
    changes. whole: the update needs whole matrices (norms, matmuls).
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(state)
    table = {jax.tree_util.keystr(path): leaf for path, leaf in paths}
    leaves = jax.tree_util.tree_leaves_with_path(params)
    arrays = {name_of(path): p for path, p in leaves}
    declared = dict(zip(arrays, jax.tree.leaves(specs)))
    away = {owner_of(path, arrays) for path, leaf in paths if on_host(leaf)}
    found = offload_chunks({n: p for n, p in arrays.items() if n in away}, declared, whole)
    new = dict(table)
    here = OffloadChunk(set(arrays) - away, 1)
    for portion in [here, *found] if here.names else found:
        names = portion.names
        given = masked(grads, names), masked(params, names), masked(specs, names)
        moved, states = update_chunk(tx, hyper, *given, table, portion.parts, finite)
        arrays |= {name_of(path): p for path, p in jax.tree_util.tree_leaves_with_path(moved)}
        new |= states
    done = jax.tree.unflatten(jax.tree.structure(params), arrays.values())
    return done, treedef.unflatten(new.values())


class ChunkUpdate(NamedTuple):
    """Update of a chunk's parameters, or of one of its parts."""

    keys: list[str]  # paths of its states in the group's state
    cut: list[bool]  # whether each state is cut into parts like its parameter
    update: Callable[..., tuple[Params, list[jax.Array]]]  # (hyper, grads, params, states, finite)


def make_chunk_update(tx: Transformation, params: Params, specs: Specs) -> ChunkUpdate:
    """Make the update of these parameters (arrays or shapes). Other leaves are masked."""
    lengths = {name_of(p): len(x) for p, x in jax.tree_util.tree_leaves_with_path(params) if x.ndim}
    paths, treedef = jax.tree_util.tree_flatten_with_path(jax.eval_shape(tx.init, params))
    keys = [jax.tree_util.keystr(path) for path, _ in paths]
    # A state with the first dim of its parameter is cut like it.
    cut = [x.ndim > 0 and lengths.get(owner_of(path, lengths) or "") == len(x) for path, x in paths]

    def update(
        hyper: dict[str, Hyper],
        grads: Params,
        params: Params,
        states: list[jax.Array],
        finite: jax.Array | None,
    ) -> tuple[Params, list[jax.Array]]:
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
        updates, new = tx.update(grads, treedef.unflatten(states), params, hyper=hyper, specs=specs)
        done = cast(Params, optax.apply_updates(params, updates)), jax.tree.leaves(new)
        if (keep := finite) is not None:
            done = jax.tree.map(lambda n, o: jnp.where(keep, n, o), done, (params, states))
        return done

    return ChunkUpdate(keys, cut, update)


def part_of[T](tree: T, i: Index, parts: int) -> T:
    """Part i of each array's first dim."""
    take = lambda x: jax.lax.dynamic_slice_in_dim(
        x, i * (len(x) // parts), len(x) // parts, allow_negative_indices=False
    )
    return jax.tree.map(take, tree)


def with_part[T](tree: T, part: T, i: Index) -> T:
    """The tree with part i replaced by `part`."""
    put = lambda x, y: jax.lax.dynamic_update_slice_in_dim(
        x, y, i * len(y), 0, allow_negative_indices=False
    )
    return jax.tree.map(put, tree, part)


def update_chunk(
    tx: Transformation,
    hyper: dict[str, Hyper],
    grads: Params,
    params: Params,
    specs: Specs,
    table: dict[str, jax.Array],
    parts: int,
    finite: jax.Array | None,
) -> tuple[Params, dict[str, jax.Array]]:
    """(new parameters, their states by path). Other leaves of the trees are masked."""
    keys, cut, update = make_chunk_update(tx, params, specs)
    before = [table[key] for key in keys]

    def send(new: list[Any]) -> list[Any]:
        return [
            jax.device_put(n, jax.memory.Space.Host) if on_host(o) else n
            for n, o in zip(new, before)
        ]

    if parts == 1:
        params, states = update(hyper, grads, params, to_device(before), finite)
        return params, dict(zip(keys, send(states)))

    def part(i: Any, carry: tuple[Any, list[Any]]) -> tuple[Any, list[Any]]:
        params, states = carry
        mine = [part_of(x, i, parts) if c else b for x, b, c in zip(states, before, cut)]
        given = part_of((grads, params), i, parts)
        moved, new = update(hyper, *given, to_device(mine), finite)
        states = [with_part(x, n, i) if c else n for x, n, c in zip(states, send(new), cut)]
        return with_part(params, moved, i), states

    params, states = jax.lax.fori_loop(0, parts, part, (params, before))
    return params, dict(zip(keys, states))


def apply_offloaded(
    groups: Mapping[str, UpdateGroup],
    labels: dict[str, Any],
    hyper: dict[str, Hyper],
    trees: tuple[Params, Any, Params, Specs],
    finite: jax.Array | None,
) -> tuple[Params, OptState]:
    """(new parameters, state) from gradients, state, parameters and specs, group by group."""
    grads, state, params, specs = trees
    # Start only after all gradients are computed: until then, the device's memory is full.
    grads, state = jax.lax.optimization_barrier((grads, state))
    inner = dict(state.inner_states)
    for name, group in groups.items():
        pick = functools.partial(jax.tree.map, functools.partial(only, name), labels)
        given = pick(grads), inner[name].inner_state, pick(params), pick(specs)
        mine, new = update_offloaded(group.tx, hyper, *given, group.whole, finite)
        params = jax.tree.map(replace, params, mine)
        inner[name] = inner[name]._replace(inner_state=new)
    return params, state._replace(inner_states=inner)


def only[Leaf](name: str, label: str, param: Leaf) -> Leaf | optax.MaskedNode:
    """The leaf if it belongs to this group of optax.partition, else MaskedNode."""
    return param if label == name else optax.MaskedNode()


def replace(param: jax.Array, mine: jax.Array | optax.MaskedNode) -> jax.Array:
    """A parameter's new value, unless `only` masked it in this group."""
    return param if isinstance(mine, optax.MaskedNode) else mine.astype(param.dtype)
