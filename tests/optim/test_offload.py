"""States that wait on the host and come by in parts: the same update."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import TypeAdapter
from tiny import (
    LLAMA,
    batch,
    begin_random,
    close,
    make_spec,
    mesh_of,
    random_params,
    rows_of,
    same,
    whole_overrides,
)

from jaxtrain.main import main
from jaxtrain.optim import OptimConfig, make_optimizer, offload
from jaxtrain.parallel import place_batch
from jaxtrain.settings import UserError
from jaxtrain.train.loss_scale import LossScale
from jaxtrain.train.step import make_step
from jaxtrain.train.stop_signal import StopSignal
from jaxtrain.weights.params import Initializer, ParamSpec

HOST = {"name": "host"}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Even the smallest state waits on the host, and comes in as many parts as can be."""
    monkeypatch.setattr(offload, "MIN_BYTES", 0)
    monkeypatch.setattr(offload, "CHUNK_BYTES", 1)


def config(name, **fields):
    fields = {"name": name, "schedule": {"name": "constant"}, **fields}
    return TypeAdapter(OptimConfig).validate_python(fields)


def spec(shape, axes, role):
    ins, outs = ((len(shape) - 2,), (len(shape) - 1,)) if role == "matrix" else ((), ())
    return ParamSpec(shape, axes, Initializer(jax.random.normal), role, ins, outs)


SPECS = {
    "blocks": {
        "down": spec((4, 8, 8), ("layers", "hidden", "embed"), "matrix"),
        "gain": spec((4, 8), ("layers", None), "gain"),
        "up": spec((4, 8, 8), ("layers", "embed", "hidden"), "matrix"),
    },
    "embed": spec((2, 8), ("vocab", "embed"), "embedding"),
    "lone": spec((1, 8, 8), ("layers", "embed", None), "matrix"),
    "scale": spec((4,), ("layers",), "scalar"),
}


def to_host(state, params):
    """Each state of two dims that belongs to a parameter, where `state_shardings` puts it."""
    names = {offload.name_of(p) for p, _ in jax.tree_util.tree_leaves_with_path(params)}

    def put(path, x):
        mine = x.ndim > 1 and offload.owner_of(path, names)
        return jax.device_put(x, jax.memory.Space.Host) if mine else x

    return jax.tree_util.tree_map_with_path(put, state)


def walk(c, steps=2):
    """Parameters and state after some gradients."""
    optimizer = make_optimizer(c, SPECS, 10)
    params = random_params(SPECS)
    state = optimizer.init(params)
    state = to_host(state, params) if c.offload else state
    where = jax.tree.map(lambda x: x.sharding, (params, state))
    apply = jax.jit(
        lambda params, state, grads, *rest: optimizer.apply(grads, state, params, *rest),
        donate_argnums=(0, 1), out_shardings=where,
    )  # fmt: skip
    start = random_params(SPECS)
    for i in range(steps):
        grads = jax.tree.map(lambda p, i=i: jnp.sin(9 * p + i), start)
        params, state = apply(params, state, grads, jnp.int32(i), optimizer.hyperparams)
    return params, state


@pytest.mark.slow
def test_the_update_in_parts_is_the_same():
    """On a GPU as well, where other memory is meant."""
    plain, there = walk(config("adamw"), 5), walk(config("adamw", offload=HOST), 5)
    close(there, plain, rtol=1e-5, atol=1e-7)
    moments = [x for x in jax.tree.leaves(there[1]) if x.ndim > 1]
    assert moments and all(x.sharding.memory_kind == "pinned_host" for x in moments)


@pytest.mark.slow
def test_wrappers_see_whole_layers_and_their_states_wait_as_well():
    wrappers = [{"name": "cautious"}, {"name": "ema", "decay": 0.5}]
    plain, there = (walk(config("adamw", offload=o, wrappers=wrappers), 3) for o in (None, HOST))
    close(there, plain, rtol=1e-5, atol=1e-7)
    average = there[1].inner_states["matrix"].inner_state.average["blocks"]["up"]
    assert average.sharding.memory_kind == "pinned_host"


SLOW = [
    pytest.param(name, marks=pytest.mark.slow) for name in ("adamw8bit", "schedule_free", "lamb")
]


# Each kind of state: of the parameter's shape, in blocks, beside scalars, by matrix, with norms.
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="operations on a host's memory by a CPU")
@pytest.mark.parametrize("name", ["adamw", "muon", *SLOW])
@pytest.mark.slow
def test_the_update_in_parts_is_the_same_bit_for_bit(name):
    few = {"min_size": 20, "block_size": 4} if name == "adamw8bit" else {}
    with jax.disable_jit():  # no fusion may round differently here than there
        plain, there = walk(config(name, **few)), walk(config(name, **few, offload=HOST))
    # A CPU multiplies one matrix of Muon's in another order than a batch of them.
    (close if name == "muon" else same)(there, plain)
    kinds = {x.ndim: offload.on_host(x) for x in jax.tree.leaves(there[1])}
    assert kinds[2] and kinds[3] and not kinds[0]


def trained(c, mesh, steps=2, dtype=jnp.float32, **model):
    task, hyperparams = make_spec(optim=c, dtype=dtype, **LLAMA | model)
    with jax.set_mesh(mesh):
        state, step = begin_random(task, mesh), make_step(task, mesh)
        for i in range(steps):
            state, _ = step(state, place_batch(batch(micro=8, seed=i), mesh, 1), hyperparams)
    return state


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.slow
def test_sharded_states_stay_on_the_host_and_train_the_same():
    mesh = mesh_of(fsdp=2)
    plain, there = trained(config("muon"), mesh), trained(config("muon", offload=HOST), mesh)
    close(there, plain)
    for x, other in zip(jax.tree.leaves(there.optimizer), jax.tree.leaves(plain.optimizer)):
        assert x.sharding.spec == other.sharding.spec
    state = there.optimizer.inner_states["matrix"].inner_state
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state)} == {"pinned_host"}
    assert not any(offload.on_host(x) for x in jax.tree.leaves(there.params))


@pytest.mark.slow
def test_an_overflow_in_float16_leaves_them_as_they_were():
    task, hyperparams = make_spec(optim=config("adamw", offload=HOST), dtype=jnp.float16, depth=1)
    mesh = mesh_of()
    with jax.set_mesh(mesh):
        before, step = begin_random(task, mesh), make_step(task, mesh)
        before = before._replace(
            extras={"loss_scale": before.extras["loss_scale"]._replace(scale=jnp.float32(1e30))}
        )
        kept = jax.device_get((before.params, before.optimizer))
        skipped, _ = step(before, batch(micro=8), hyperparams)
        same((skipped.params, skipped.optimizer), kept)
        small = {"loss_scale": LossScale(jnp.float32(8), jnp.int32(0))}
        good, metrics = step(skipped._replace(extras=small), batch(micro=8), hyperparams)
    assert metrics["skipped"] == 0 and good.step == 2
    moments = [x for x in jax.tree.leaves(good.optimizer) if offload.on_host(x)]
    assert moments and any(np.any(x) for x in moments)


def test_stacks_go_by_layers_and_other_arrays_by_rows_of_a_bounded_size(monkeypatch):
    monkeypatch.setattr(offload, "CHUNK_BYTES", 2 * 2 * 8 * 8 * 4)  # two layers of two stacks
    specs = {"down": SPECS["blocks"]["down"], "up": SPECS["blocks"]["up"], "embed": SPECS["embed"]}
    params = {name: jnp.zeros(s.shape) for name, s in specs.items()}
    stacks, embed = {"down", "up"}, {"embed"}
    assert offload.offload_chunks(params, specs, False) == [(stacks, 2), (embed, 2)]
    monkeypatch.setattr(offload, "CHUNK_BYTES", 1)
    assert offload.offload_chunks(params, specs, False) == [(stacks, 4), (embed, 2)]
    assert offload.offload_chunks(params, specs, True) == [(stacks, 4), (embed, 1)]
    with jax.set_mesh(mesh_of(fsdp=2)):  # matrices are dealt out
        assert offload.offload_chunks(params, specs, True) == [(stacks, 2), (embed, 1)]
    with jax.set_mesh(mesh_of(pipeline=2)):  # the layers are
        assert {parts for _, parts in offload.offload_chunks(params, specs, False)} == {1, 2}


@pytest.mark.slow
def test_resumed_with_the_states_on_the_host_and_back(whole, copy, monkeypatch):
    arguments = whole_overrides(copy)
    shutil.rmtree(copy / "checkpoints" / "6")
    with monkeypatch.context() as patch:
        patch.setattr(StopSignal, "after", lambda self, step: step == 5)
        assert main([*arguments, "optim.offload.name=host"]) == 0
    assert (copy / "checkpoints" / "5").is_dir()
    assert main(arguments) == 0
    for mine, other in zip(rows_of(copy), rows_of(whole), strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-5)


def test_where_it_cannot_be(monkeypatch):
    def none(mesh, spec, memory_kind):
        raise ValueError(f"Could not find memory addressable by device with {memory_kind}")

    monkeypatch.setattr(offload, "NamedSharding", none)
    with pytest.raises(UserError, match="optim.offload: a cpu has no pinned memory of the host's"):
        offload.host_sharding(mesh_of(), jax.P())
