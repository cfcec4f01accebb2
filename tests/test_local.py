"""Replicas that meet now and then: what they must equal, and what they send."""

import re
from math import prod
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import TypeAdapter
from tiny import LLAMA, batch, begin, begin_random, close, make_task, mesh_of, resolved, same

from jaxtrain.bench.traffic import collectives
from jaxtrain.checkpoint import CheckpointConfig, Checkpointer
from jaxtrain.local import (
    LocalConfig,
    compressed_mean,
    local_facts,
    local_summary,
    local_task,
    take,
    wire_bytes,
)
from jaxtrain.model import fp8 as model_fp8
from jaxtrain.optim import OptimConfig
from jaxtrain.parallel import place_batch
from jaxtrain.run import new_or_resumed, rest_of
from jaxtrain.settings import UserError
from jaxtrain.step import init_state, make_step, state_shardings

pytestmark = pytest.mark.slow

SGD = {"name": "sgd", "momentum": 0.0, "weight_decay": 0.0, "learning_rate": 0.1,
       "schedule": {"name": "constant"}}  # fmt: skip


def local(**fields):
    return TypeAdapter(LocalConfig).validate_python(fields)


@pytest.fixture(scope="module")
def task():
    optim = TypeAdapter(OptimConfig).validate_python(SGD)
    return make_task(resolved(**LLAMA | {"depth": 1}), optim)


def whole_batch(seed):
    one = batch(8, seed=seed, micro=8)
    return one._replace(weights_BT=np.ones_like(one.weights_BT))


def run(task, knobs, mesh, config=None, steps=3):
    """States and losses after each step."""
    task = local_task(task, config, mesh) if config else task
    with jax.set_mesh(mesh):
        state, states, losses = begin_random(task, mesh), [], []
        if config:
            spread = lambda p, r: jnp.broadcast_to(p[None], r.shape)
            own = state.optimizer.replicas
            own = own._replace(params=jax.tree.map(spread, state.params, own.params))
            state = state._replace(optimizer=state.optimizer._replace(replicas=own))
            state = jax.device_put(state, state_shardings(task, mesh))
        step = make_step(task, mesh)
        for seed in range(steps):
            placed = place_batch(whole_batch(seed), mesh, batch_dim=1)
            state, metrics = step(state, placed, knobs)
            states.append(jax.device_get(state))
            losses.append(float(metrics["loss"]))
    return states, losses


def test_maxima_of_delayed_scaling_are_those_of_all_replicas(monkeypatch):
    monkeypatch.setattr(model_fp8, "SMALLEST", 16)
    fields = LLAMA | {"depth": 1, "fp8": "blocks", "fp8_history": 2}
    states, _ = run(*make_task(resolved(**fields)), mesh_of(data=2), local(name="gossip"), steps=1)
    alone, _ = run(*make_task(resolved(**fields)), mesh_of(data=2), steps=1)
    for x, expected in zip(*(jax.tree.leaves(s[0].maxima.inputs) for s in (states, alone))):
        np.testing.assert_allclose(x, expected, rtol=1e-4)


# ---- DiLoCo ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(task):
    return run(*task, mesh_of(data=4))


THREE = [{"data": 2, "fsdp": 2, "tensor": 2}, {"data": 2, "fsdp": 2, "context": 2}]


@pytest.mark.parametrize("sizes", [{"data": 4}, {"data": 2, "fsdp": 2}, *THREE], ids=str)
def test_meeting_each_step_with_rate_one_is_data_parallel(task, plain, sizes):
    config = local(name="diloco", every=1, outer_lr=1.0, outer_momentum=0.0)
    states, losses = run(*task, mesh_of(**sizes), config)
    np.testing.assert_allclose(losses, plain[1], rtol=1e-5)
    close(states[-1].params, plain[0][-1].params, rtol=1e-5, atol=1e-6)


def test_replicas_part_and_meet_by_nesterov(task):
    """Two meetings in four steps, by hand from the replicas of the step before."""
    config = local(name="diloco", every=2, outer_lr=0.7, outer_momentum=0.9)
    states, _ = run(*task, mesh_of(data=2), config, steps=4)
    up = lambda tree: np.asarray(tree["blocks"]["ffn"]["up"], np.float64)
    own = [up(state.optimizer.replicas.params) for state in states]
    shared = [up(state.params) for state in states]
    assert np.abs(own[0][0] - own[0][1]).max() > 1e-4
    np.testing.assert_array_equal(own[1][0], own[1][1])
    np.testing.assert_array_equal(own[1][0], shared[1])
    np.testing.assert_array_equal(shared[1], shared[2])  # between meetings
    m = up(states[1].optimizer.momentum)
    np.testing.assert_allclose(shared[0] - shared[1], 0.7 * 1.9 * m, rtol=1e-4, atol=1e-7)
    # the second: m' = 0.9 m + way, and the weights move by 0.7 (way + 0.9 m')
    after = up(states[3].optimizer.momentum)
    move = 0.7 * (after - 0.9 * m + 0.9 * after)
    np.testing.assert_allclose(shared[1] - shared[3], move, rtol=1e-4, atol=1e-7)


def test_fragments_cover_every_parameter_once_and_meet_in_turn(task):
    specs = make_task(resolved(**LLAMA | {"depth": 3}))[0].specs
    ones = jax.tree.map(lambda s: jnp.ones(s.shape), specs)
    sizes = [sum(x.size for x in take(ones, specs, p, 3)) for p in range(3)]
    assert sum(sizes) == sum(s.size for s in jax.tree.leaves(specs)) and min(sizes) > 0
    config = local(name="diloco", every=2, fragments=2)
    states, _ = run(*task, mesh_of(data=2), config, steps=2)
    leaves = [jax.tree.leaves(s.optimizer.replicas.params) for s in states]
    together = [[bool((x[0] == x[1]).all()) for x in at] for at in leaves]
    assert any(together[0]) and any(together[1])
    assert all(a != b for a, b in zip(*together)), "each fragment meets in one of two steps"


def test_all_meet_at_the_end():
    """A run of three steps that meets each second, one fragment after the other."""
    optim = TypeAdapter(OptimConfig).validate_python(SGD)
    task = make_task(resolved(**LLAMA | {"depth": 1}), optim, steps=3)
    config = local(name="diloco", every=2, fragments=2)
    states, _ = run(*task, mesh_of(data=2), config)
    for mine, shared in zip(*map(jax.tree.leaves, (states[2].optimizer.replicas.params,
                                                  states[2].params))):  # fmt: skip
        np.testing.assert_array_equal(mine[0], shared)
        np.testing.assert_array_equal(mine[1], shared)


@pytest.mark.parametrize(("kind", "error"), [("int8", 0.5 / 127), ("fp8", 2**-4)])
def test_a_compressed_mean_is_near_and_the_same_for_all(kind, error):
    x_RN = np.random.default_rng(0).normal(size=(4, 1000)).astype(np.float32)
    x_RN[:, :256] *= 1e-4  # its own scale
    mean = jax.shard_map(
        lambda x: compressed_mean(x[0], kind)[None], mesh=mesh_of(data=4),
        in_specs=jax.P("data"), out_specs=jax.P("data"),
    )  # fmt: skip
    got_RN = np.asarray(jax.jit(mean)(x_RN))
    assert (got_RN == got_RN[0]).all()
    for part in (slice(0, 256), slice(256, 1000)):
        bound = 2 * error * np.abs(x_RN[:, part]).max()
        assert np.abs(got_RN[0, part] - x_RN[:, part].mean(0)).max() < bound


# ---- gossip ------------------------------------------------------------------------------------


def test_gossip_averages_with_the_neighbours_and_keeps_the_mean(task):
    idle = run(*task, mesh_of(data=4), local(name="gossip", every=99), steps=1)[0][0]
    states, _ = run(*task, mesh_of(data=4), local(name="gossip"), steps=1)
    x, y = (s.optimizer.replicas.params["embed"] for s in (idle, states[0]))
    assert np.abs(x[0] - x[1]).max() > 1e-4
    np.testing.assert_allclose(y, (x + np.roll(x, 1, 0) + np.roll(x, -1, 0)) / 3, atol=1e-6)
    gossip = local_task(task[0], local(name="gossip"), mesh_of(data=4))
    kept = gossip.optimizer.eval_params(states[0].params, states[0].optimizer)
    np.testing.assert_allclose(kept["embed"], x.mean(0), atol=1e-6)


def test_two_replicas_are_one_neighbour_to_each_other(task):
    """Its copy is sent once and counts as much as mine: both have the mean."""
    mesh = mesh_of(data=2)
    idle = run(*task, mesh, local(name="gossip", every=99), steps=1)[0][0]
    states, _ = run(*task, mesh, local(name="gossip"), steps=1)
    x, y = (s.optimizer.replicas.params["embed"] for s in (idle, states[0]))
    assert np.abs(x[0] - x[1]).max() > 1e-4
    np.testing.assert_allclose(y, np.stack([x.mean(0)] * 2), atol=1e-6)


# ---- bytes -------------------------------------------------------------------------------------

BITS = {"f32": 4, "s8": 1, "u8": 1, "f8e4m3fn": 1}


def sent(text, ways):
    """Bytes that a device sends in the collectives of a compiled program, metrics left out."""
    share = {"all-reduce": 2 * (ways - 1) / ways, "all-to-all": (ways - 1) / ways,
             "all-gather": (ways - 1) / ways, "collective-permute": 1}  # fmt: skip
    total = 0.0
    for shapes, kind in re.findall(
        r"= (\S.*?) (all-reduce|all-to-all|all-gather|collective-permute)\(", text
    ):
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
            total += share[kind] * BITS[dtype] * prod(map(int, filter(None, dims.split(","))))
    return total


@pytest.mark.parametrize(
    ("config", "ways"),
    [(None, 4), ({"name": "diloco", "every": 1}, 4),
     ({"name": "diloco", "every": 1, "compress": "int8"}, 4),
     ({"name": "gossip"}, 4), ({"name": "gossip"}, 2)],
    ids=["plain", "float32", "int8", "gossip", "gossip of two"],
)  # fmt: skip
def test_bytes_are_those_of_the_compiled_collectives(task, config, ways):
    mesh, (task, knobs) = mesh_of(data=ways), task
    config = config and local(**config)
    task = local_task(task, config, mesh) if config else task
    with jax.set_mesh(mesh):
        state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
                             begin(task, mesh))  # fmt: skip
        placed = place_batch(whole_batch(0), mesh, batch_dim=1)
        text = make_step(task, mesh).lower(state, placed, knobs).compile().as_text()
    parameters = sum(s.size for s in jax.tree.leaves(task.specs))
    expected = wire_bytes(parameters, ways, config)
    if config is None:  # XLA may send more: a tied embedding's two gradients, say
        assert sent(text, ways) > 0.95 * expected
    else:
        assert sent(text, ways) == pytest.approx(expected, rel=0.05)


def test_each_device_of_a_replica_sends_its_own_part():
    """In 8 bits as well, and with Muon, whose exchanges stay within the replica."""
    config, mesh = local(name="diloco", every=1, compress="int8"), mesh_of(data=2, fsdp=2)
    optim = TypeAdapter(OptimConfig).validate_python({"name": "muon"})
    task, knobs = make_task(resolved(**LLAMA | {"depth": 1}), optim)
    task = local_task(task, config, mesh)
    with jax.set_mesh(mesh):
        like = lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
        shapes = jax.eval_shape(lambda: init_state(task, 0))
        state = jax.tree.map(like, shapes, state_shardings(task, mesh))
        placed = place_batch(whole_batch(0), mesh, batch_dim=1)
        text = make_step(task, mesh).lower(state, placed, knobs).compile().as_text()
    found = collectives(text, dict(mesh.shape))
    over_data = sum(c.bytes for c in found if "data" in c.axes)
    said = local_facts(config, task.specs, mesh, jnp.dtype(jnp.float32))["sent_bytes"]
    assert over_data == pytest.approx(said, rel=0.05)
    whole = wire_bytes(sum(s.size for s in jax.tree.leaves(task.specs)), 2, config)
    assert said == pytest.approx(whole / 2, rel=0.05)


def test_a_run_says_what_it_sends():
    """1000 parameters, 4 replicas: a ring sends 1.5 times the bytes; float32 each 50 steps."""
    config, mesh = local(name="diloco", every=50), mesh_of(data=4)
    specs = {"up": SimpleNamespace(shape=(10, 100), axes=("embed", "hidden"))}
    facts = local_facts(config, specs, mesh, jnp.dtype(jnp.bfloat16))
    assert facts == {"sent_bytes": 1.5 * 4 * 1000 / 50, "sent_bytes_plain": 1.5 * 2 * 1000}
    said = local_summary(config, facts, mesh)
    assert "4 replicas" in said and "0.00012 MB a step, data parallel 0.003 MB" in said
    one, two, four = (wire_bytes(1000, ways, local(name="gossip")) for ways in (1, 2, 4))
    assert (one, two, four) == (0, 4000, 8000)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [({"fsdp": 2}, "replicas lie along mesh.data, which is 1"),
     ({"data": 2, "pipeline": 2}, "a replica is no pipeline; set mesh.pipeline=1")],
)  # fmt: skip
def test_what_cannot_be_replicas(task, sizes, message):
    with pytest.raises(UserError, match=message):
        local_task(task[0], local(name="gossip"), mesh_of(**sizes))


# ---- resuming ----------------------------------------------------------------------------------


def test_resumed_between_meetings_is_uninterrupted_bit_for_bit(task, tmp_path):
    mesh, config = mesh_of(data=2), local(name="diloco", every=2)
    states, _ = run(*task, mesh, config)
    spread = local_task(task[0], config, mesh)
    with jax.set_mesh(mesh), Checkpointer(tmp_path, CheckpointConfig()) as checkpoints:
        checkpoints.save(1, states[0].params, rest_of(states[0]), {})
        checkpoints.wait()
        state, _ = new_or_resumed(spread, state_shardings(spread, mesh), checkpoints, seed=0)
        step = make_step(spread, mesh)
        for seed in (1, 2):
            state, _ = step(state, place_batch(whole_batch(seed), mesh, batch_dim=1), task[1])
    same(state, states[2])
    other = mesh_of(data=4)
    more = local_task(task[0], config, other)
    refused = pytest.raises(UserError, match="has 2 replicas .*, not 4; go on with mesh.data=2")
    with jax.set_mesh(other), Checkpointer(tmp_path, CheckpointConfig()) as checkpoints, refused:
        new_or_resumed(more, state_shardings(more, other), checkpoints, seed=0)
