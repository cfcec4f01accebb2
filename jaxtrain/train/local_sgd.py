"""Low-communication training (DiLoCo, gossip): replicas train alone and synchronize at intervals.

Each device group along the mesh axis `data`, whose links are slow, is a replica with its own
parameters and optimizer state. In the step's `State`, `params` are the shared weights, and
`optimizer` is a `LocalState` with a leading replica dim, sharded over `data`. A run can resume with
any number of replicas (`resize_replicas`).
"""

import functools
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PyTree

from jaxtrain.config.resolve import Resolved
from jaxtrain.objectives import StepBatch
from jaxtrain.optim import Optimizer, is_mergeable, mean_over_replicas, merge_states
from jaxtrain.optim.types import Hyperparams
from jaxtrain.parallel import partition_spec, shard_map, shardings
from jaxtrain.settings import UserError
from jaxtrain.train.checks import nonfinite_values, with_values
from jaxtrain.train.config import DiLoCo, Gossip
from jaxtrain.train.step import State, StepSpec, train_step
from jaxtrain.weights.params import Params, ParamSpec, Specs

BLOCK = 256  # elements that share a scale when compressed
WIRE = {"int8": (jnp.int8, 127.0), "fp8": (jnp.float8_e4m3fn, 448.0)}


class Replica(NamedTuple):
    """Parameters and optimizer state of each replica, stacked [R, ...]."""

    params: Params
    optimizer: PyTree


class LocalState(NamedTuple):
    """Replacement of the optimizer state in `State.optimizer`."""

    replicas: Replica
    momentum: Params | None  # outer momentum; None for gossip


def replicas(spec: StepSpec, c: Resolved, mesh: Mesh, resumed: bool = False) -> StepSpec:
    """Add the replicas of `train.local_sgd` to a step; return it unchanged if that is not set."""
    local = c.train.local_sgd
    if local is None:
        return spec
    if isinstance(local, Gossip) and spec.optimizer.averages:
        raise UserError(
            "train.local_sgd: gossip already evaluates the mean of the replicas; leave ema out of "
            "optim.wrappers"
        )
    found = replicate_step(spec, local, mesh, resumed)
    sent = comm_stats(local, spec.specs, mesh, spec.dtype)
    return found._replace(facts=spec.facts | sent, summary=comm_summary(local, sent, mesh))


def replicate_step(
    spec: StepSpec, c: DiLoCo | Gossip, mesh: Mesh, resumed: bool = False
) -> StepSpec:
    """Return the step with replicas along `data`, with the optimizer state and step function of c.

    resumed: the last replica of a run may continue alone, on several devices. UserError without
    replicas.
    """
    # `config.compatible` lists the options that exclude local_sgd. Whether one replica may train
    # alone depends on the run: the last of several may.
    if mesh.shape["data"] == 1 < mesh.size and not resumed:
        raise UserError(
            "train.local_sgd needs at least 2 replicas along mesh.data, which is 1: set "
            "mesh.data=auto and shrink the other axes"
        )
    if isinstance(c, DiLoCo) and c.fragments > c.every:
        raise UserError(
            f"train.local_sgd.fragments={c.fragments} are more than "
            f"train.local_sgd.every={c.every} steps, one for each fragment; give at most that many"
        )
    inner, replicas = spec.optimizer, mesh.shape["data"]

    def init(params: Params) -> LocalState:
        own = stacked(Replica(params, inner.init(params)), replicas)
        outer = isinstance(c, DiLoCo)
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params) if outer else None
        return LocalState(own, zeros)

    def eval_params(params: Params, state: LocalState) -> Params:
        """Return the shared weights; with gossip or averaging optimizers, the replicas' mean."""
        own = state.replicas
        if isinstance(c, Gossip) or inner.averages:
            weights = jax.vmap(inner.eval_params)(own.params, own.optimizer)
            return jax.tree.map(mean_over_replicas, weights)
        return params

    step = functools.partial(local_step, config=c, inner=inner, mesh=mesh)
    mean = functools.partial(over_replicas, jax.lax.pmean)
    optimizer = inner._replace(init=init, eval_params=eval_params)
    shared = jax.jit(eval_params)
    saved = lambda state: shared(state.params, state.optimizer)
    if isinstance(c, DiLoCo):
        saved = lambda state: state.params
    return spec._replace(optimizer=optimizer, step=step, agreed=mean, saved_params=saved)


def local_step(
    spec: StepSpec,
    state: State,
    batch: StepBatch,
    hyperparams: Hyperparams,
    frozen: Params | None = None,
    *,
    config: DiLoCo | Gossip,
    inner: Optimizer,
    mesh: Mesh,
) -> tuple[State, dict[str, Any]]:
    """Run one inner step of every replica on its own rows, and the outer step or exchange if due.

    Metrics are means over the replicas.
    """
    own_spec = spec._replace(optimizer=inner, step=None)
    shared = state._replace(optimizer=state.optimizer.momentum)
    due = functools.partial(outer_step, spec.specs, config) if isinstance(config, DiLoCo) else None

    def one(
        shared: State,
        replicas: Replica,
        batch: StepBatch,
        hyperparams: Hyperparams,
        frozen: Params | None,
    ) -> Any:
        own = jax.tree.map(lambda x: x[0], replicas)
        before = shared._replace(params=own.params, optimizer=own.optimizer)
        after, metrics = train_step(own_spec, before, batch, hyperparams, frozen)
        params, momentum, mine = shared.params, shared.optimizer, after.params
        if due is None:
            mine = every(config.every, after.step, ring_mean, mine)
        else:
            end = hyperparams["schedule"]["total_steps"]
            params, momentum, mine = due(after.step, end, params, momentum, mine)
        # The exchanged values are checked, too, and all replicas see one replica's bad values.
        bad = nonfinite_values(mine) + nonfinite_values(params)
        metrics["checks"] = with_values(metrics["checks"], bad)
        shared_by = {t.name: t.over_replicas for t in spec.transforms}
        pmax = functools.partial(over_replicas, jax.lax.pmax)
        extras = {name: shared_by[name](x, pmax) for name, x in after.extras.items()}
        new = after._replace(params=params, optimizer=momentum, extras=extras)
        own = jax.tree.map(lambda x: x[None], Replica(mine, after.optimizer))
        return new, own, over_replicas(jax.lax.pmean, metrics)

    split = jax.shard_map(
        one, mesh=mesh, in_specs=(P(), P("data"), P(None, "data"), P(), P()),
        out_specs=(P(), P("data"), P()), axis_names={"data"}, check_vma=False,
    )  # fmt: skip
    new, replicas, metrics = split(shared, state.optimizer.replicas, batch, hyperparams, frozen)
    return new._replace(optimizer=LocalState(replicas, new.optimizer)), metrics


def over_replicas[Tree](reduce: Callable[[Tree, str], Tree], tree: Tree) -> Tree:
    """Apply `reduce`, such as pmean, over the replicas. One replica skips it: XLA's partitioner
    rejects a collective along an axis of size 1 if it also partitions other axes."""
    return tree if jax.lax.axis_size("data") == 1 else reduce(tree, "data")


def every[Tree](
    steps: int,
    step: Array,
    work: Callable[[Tree], Tree],
    tree: Tree,
    offset: int = 0,
    end: Array | None = None,
) -> Tree:
    """Return work(tree) every `steps` steps (counted from 1) and at `end`; else the tree."""
    if steps == 1:
        return work(tree)
    due = (step + offset) % steps == 0
    due = due if end is None else due | (step == end)
    return jax.lax.cond(due, work, lambda x: x, tree)


# ---- another number of replicas ------------------------------------------------------------------


def replicas_in(stacked: PyTree) -> int:
    """Return the number of replicas R of a tree of arrays [R, ...]."""
    return jax.tree.leaves(stacked)[0].shape[0]


def as_saved(like: LocalState, replicas: int) -> LocalState:
    """Return the shapes and shardings for restoring a checkpoint with this number of replicas.

    like: shapes and shardings of the final state. Each array is sharded over `data` along the first
    dim that it divides, so the replica dim if possible. If `data` divides no dim, the array is
    replicated over `data`.
    """

    def with_replica_dim(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        mesh, shape = x.sharding.mesh, (replicas, *x.shape[1:])
        spec = [entry or () for entry in (None, *x.sharding.spec[1:])]
        spec = [e if isinstance(e, tuple) else (e,) for e in spec] + [()] * (len(shape) - len(spec))
        for i, size in enumerate(shape):
            if size % prod(mesh.shape[name] for name in (*spec[i], "data")) == 0:
                spec[i] = (*spec[i], "data")
                break
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=NamedSharding(mesh, P(*spec)))

    return like._replace(replicas=jax.tree.map(with_replica_dim, like.replicas))


def resize_replicas(saved: LocalState, like: LocalState) -> LocalState:
    """Resize the state to another number of replicas; `saved` is donated.

    Shared weights and outer momentum do not depend on the number and stay. Each new replica starts
    from the mean of all old replicas, in parameters and inner optimizer state. Nothing learned
    since the last outer step is lost: the pseudo-gradient shared - mean(mine) of DiLoCo's next
    outer step is unchanged up to rounding, for any two numbers and for each fragment. With gossip,
    the mean is the weights that were validated and saved. Pairing old with new replicas would keep
    that mean only if one number divides the other. It gains nothing, since a batch's rows are
    redistributed anyway. DiLoCo's authors find that replicas may come and go (Douillard et al.
    2023, arXiv:2311.08105, robustness to an adaptive compute pool: total compute is what counts).
    Their new replicas start from the shared weights, at an outer step.

    Arrays are resized one by one, since all at once would need the memory of both old and new.
    """

    def change(old: Any, new: Any) -> Any:
        places = jax.tree.map(lambda x: x.sharding, new)
        spread = jax.jit(mean_for_each, static_argnums=1, out_shardings=places)
        done = spread(old, replicas_in(new))
        jax.tree.map(lambda x: x.delete(), old)
        return done

    own = jax.tree.map(change, saved.replicas, like.replicas, is_leaf=is_mergeable)
    return saved._replace(replicas=own)


def mean_for_each(old: PyTree, replicas: int) -> PyTree:
    """Replace arrays [R, ...] by their mean over R, repeated for each new replica."""
    return stacked(merge_states(old), replicas)


def stacked[Tree](tree: Tree, replicas: int) -> Tree:
    """Repeat the tree for each replica, along a new leading dim."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x[None], (replicas, *x.shape)), tree)


# ---- gossip ------------------------------------------------------------------------------------


def ring_mean(params: Params) -> Params:
    """Average the parameters with both neighbours on the ring `data`, a third each; with two
    replicas, half each."""
    replicas = jax.lax.axis_size("data")

    def mean(x: Array) -> Array:
        shift = lambda by: [(i, (i + by) % replicas) for i in range(replicas)]
        total = x.astype(jnp.float32)
        for by in steps_round(replicas):
            total += jax.lax.ppermute(x, "data", shift(by))
        return (total / (1 + len(steps_round(replicas)))).astype(x.dtype)

    return jax.tree.map(mean, params)


def steps_round(replicas: int) -> list[int]:
    """Return the offsets of a replica's neighbours on the ring, to which it sends."""
    return sorted({1 % replicas, -1 % replicas} - {0})


# ---- DiLoCo ------------------------------------------------------------------------------------


def outer_step(
    specs: Specs,
    c: DiLoCo,
    step: Array,
    end: Array,
    params: Params,
    momentum: Params,
    mine: Params,
) -> tuple[Params, ...]:
    """Take the outer step of the fragments that are due; return shared weights, momentum, mine.

    Fragment p takes its outer step p H / fragments steps before fragment 0, so that only a part of
    the parameters is sent at any time (Douillard et al. 2025, "Streaming DiLoCo"). At the end of
    the run all fragments take it: otherwise the last inner steps would be lost.
    """

    def outer(axes: list[Any], parts: Any) -> Any:
        """Update lists of arrays by Nesterov momentum on the mean of shared - mine."""
        shared, velocity, own = parts
        f32 = lambda x: x.astype(jnp.float32)
        ways = mean_of([f32(s) - f32(o) for s, o in zip(shared, own)], axes, c.compress)
        velocity = [c.outer_momentum * v + way for v, way in zip(velocity, ways)]
        moves = [c.outer_lr * (way + c.outer_momentum * v) for way, v in zip(ways, velocity)]
        shared = [(f32(s) - move).astype(s.dtype) for s, move in zip(shared, moves)]
        return shared, velocity, shared

    trees = (params, momentum, mine)
    for p in range(c.fragments):
        parts = tuple(take(tree, specs, p, c.fragments) for tree in trees)
        work = functools.partial(outer, axes_of(specs, p, c.fragments))
        parts = every(c.every, step, work, parts, p * c.every // c.fragments, end)
        trees = tuple(put(t, specs, p, c.fragments, part) for t, part in zip(trees, parts))
    return trees


def layered(spec: ParamSpec, fragments: int) -> bool:
    """Whether a parameter is a stack with at least one layer per fragment."""
    return spec.axes[:1] == ("layers",) and spec.shape[0] >= fragments


def take(tree: Params, specs: Specs, p: int, fragments: int) -> list[Array]:
    """Return fragment p: layers p, p + fragments, ... of stacks; likewise of the other arrays."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(specs))
    found = []
    for i, (x, spec) in enumerate(pairs):
        if layered(spec, fragments):
            found.append(x[p::fragments])
        elif i % fragments == p:
            found.append(x)
    return found


def axes_of(specs: Specs, p: int, fragments: int) -> list[tuple[str | None, ...]]:
    """Return the logical axes of the arrays that `take` returns."""
    leaves = enumerate(jax.tree.leaves(specs))
    return [s.axes for i, s in leaves if layered(s, fragments) or i % fragments == p]


def put(tree: Params, specs: Specs, p: int, fragments: int, part: list[Array]) -> Params:
    """Write fragment p back into the tree."""
    leaves, treedef = jax.tree.flatten(tree)
    rest = iter(part)
    for i, spec in enumerate(jax.tree.leaves(specs)):
        if layered(spec, fragments):
            new = next(rest)
            leaves[i] = new if fragments == 1 else leaves[i].at[p::fragments].set(new)
        elif i % fragments == p:
            leaves[i] = next(rest)
    return treedef.unflatten(leaves)


def mean_of(arrays: list[Array], axes: list[Any], compress: str | None) -> list[Array]:
    """Return the mean of each array over the replicas, in float32."""
    if compress is None or jax.lax.axis_size("data") == 1:
        return [over_replicas(jax.lax.pmean, x) for x in arrays]
    mesh = jax.sharding.get_abstract_mesh()
    places = [partition_spec(a, x.shape, mesh) for a, x in zip(axes, arrays)]
    # Each device of a replica sends its own shards.
    return shard_map(functools.partial(joined_mean, compress), (places,), places)(arrays)


def joined_mean(compress: str, arrays: list[Array]) -> list[Array]:
    flat_N = jnp.concatenate([x.reshape(-1) for x in arrays])
    mean_N, at, found = compressed_mean(flat_N, compress), 0, []
    for x in arrays:
        found.append(mean_N[at : at + x.size].reshape(x.shape))
        at += x.size
    return found


def compressed_mean(x_N: Float[Array, "N"], compress: str) -> Float[Array, "N"]:
    """Average over the replicas with 8-bit traffic: a reduce-scatter by all-to-all, an all-gather.

    Values are rounded twice, to the nearest, with a scale per BLOCK elements. This sends 2 (R-1)/R
    bytes per element; a float32 ring all-reduce sends 8 (R-1)/R.
    """
    replicas = jax.lax.axis_size("data")
    padded = jnp.pad(x_N, (0, -len(x_N) % (replicas * BLOCK)))
    sent = quantize(padded.reshape(replicas, -1, BLOCK), compress)
    got = [jax.lax.all_to_all(x, "data", 0, 0, tiled=True) for x in sent]
    mine_bK = jnp.mean(dequantize(*got), axis=0)
    round_trip = [jax.lax.all_gather(x, "data") for x in quantize(mine_bK, compress)]
    return dequantize(*round_trip).reshape(-1)[: len(x_N)]


def quantize(x: Float[Array, "*n K"], kind: str) -> tuple[Array, Array]:
    """Quantize each row to 8-bit codes and a float32 scale."""
    dtype, top = WIRE[kind]
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / top
    codes = x / jnp.where(scale == 0, 1, scale)
    return (jnp.round(codes) if kind == "int8" else codes).astype(dtype), scale


def dequantize(codes: Array, scale: Array) -> Array:
    return codes.astype(jnp.float32) * scale


# ---- bytes -------------------------------------------------------------------------------------


def wire_bytes(
    parameters: int, replicas: int, c: DiLoCo | Gossip | None, gradient_bytes: int = 4
) -> float:
    """Return the mean bytes per step that a device sends along `data`; c None: data parallel.

    parameters: number on the device. A ring all-reduce sends 2 (R-1)/R times the bytes it sums:
    gradients in the compute dtype at each step, or the replicas' deltas in float32 or 8 bits (plus
    scales) every H steps.
    """
    ring = 2 * (replicas - 1) / replicas * parameters
    if c is None:
        return ring * gradient_bytes
    if isinstance(c, Gossip):
        return len(steps_round(replicas)) * parameters * 4 / c.every
    return ring * (4 if c.compress is None else 1 + 4 / BLOCK) / c.every


def comm_stats(c: DiLoCo | Gossip, specs: Specs, mesh: Mesh, dtype: jnp.dtype) -> dict[str, float]:
    """Return the bytes that a device sends per step, and would send with plain data parallelism.

    specs: declarations of the trainable parameters, which are sharded over a replica's devices.
    """
    leaves = zip(jax.tree.leaves(specs), jax.tree.leaves(shardings(specs, mesh)))
    parameters, replicas = sum(prod(p.shard_shape(s.shape)) for s, p in leaves), mesh.shape["data"]
    plain = wire_bytes(parameters, replicas, None, dtype.itemsize)
    return {"sent_bytes": wire_bytes(parameters, replicas, c), "sent_bytes_plain": plain}


def comm_summary(c: DiLoCo | Gossip, facts: dict[str, float], mesh: Mesh) -> str:
    """Return a log line: the replicas, and their traffic compared with plain data parallelism."""
    ours, plain = (1e-6 * facts[key] for key in ("sent_bytes", "sent_bytes_plain"))
    replicas = mesh.shape["data"]
    return (
        f"local    {replicas} replica{'s' * (replicas > 1)}, {c.name} each {c.every} steps: a "
        f"device sends {ours:.3g} MB a step, data parallel {plain:.3g} MB"
    )
