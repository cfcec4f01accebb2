"""Replicas that meet now and then: what they must equal, and what they send."""

import re
import shutil
from math import prod
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import TypeAdapter
from tiny import (
    LLAMA,
    QUICK,
    batch,
    begin,
    begin_random,
    close,
    make_spec,
    mesh_of,
    resolved,
    rows_of,
    run_overrides,
    same,
)

from jaxtrain.estimate.traffic import collectives
from jaxtrain.main import main
from jaxtrain.optim import OptimConfig
from jaxtrain.optim.adamw8bit import Adam8bitState, decode, encode
from jaxtrain.optim.param_groups import Moment
from jaxtrain.parallel import place_batch
from jaxtrain.runs.checkpoint import Checkpointer
from jaxtrain.runs.config import CheckpointConfig
from jaxtrain.settings import UserError
from jaxtrain.train import program
from jaxtrain.train.config import LocalConfig
from jaxtrain.train.local_sgd import (
    LocalState,
    Replica,
    as_saved,
    comm_stats,
    comm_summary,
    compressed_mean,
    replicate_step,
    resize_replicas,
    ring_mean,
    take,
    wire_bytes,
)
from jaxtrain.train.restore import init_or_restore, non_param_state
from jaxtrain.train.step import init_state, make_step, state_shardings
from jaxtrain.weights import float8 as model_fp8

pytestmark = pytest.mark.slow

SGD = {"name": "sgd", "momentum": 0.0, "weight_decay": 0.0, "learning_rate": 0.1,
       "schedule": {"name": "constant"}}  # fmt: skip


def local(**fields):
    return TypeAdapter(LocalConfig).validate_python(fields)


@pytest.fixture(scope="module")
def task():
    optim = TypeAdapter(OptimConfig).validate_python(SGD)
    return make_spec(resolved(**LLAMA | {"depth": 1}), optim)


def whole_batch(seed, rows=8):
    one = batch(rows, seed=seed, micro=rows)
    return one._replace(weights_BT=np.ones_like(one.weights_BT))


def run(task, hyperparams, mesh, config=None, steps=3, rows=8):
    """States and losses after each step."""
    task = replicate_step(task, config, mesh) if config else task
    with jax.set_mesh(mesh):
        state = begin_random(task, mesh)
        if config:
            spread = lambda p, r: jnp.broadcast_to(p[None], r.shape)
            own = state.optimizer.replicas
            own = own._replace(params=jax.tree.map(spread, state.params, own.params))
            state = state._replace(optimizer=state.optimizer._replace(replicas=own))
            state = jax.device_put(state, state_shardings(task, mesh))
        return go_on(task, hyperparams, mesh, state, range(steps), rows)


def go_on(task, hyperparams, mesh, state, seeds, rows=8):
    """States and losses after each step, on the batch of each seed."""
    states, losses = [], []
    with jax.set_mesh(mesh):
        step = make_step(task, mesh)
        for seed in seeds:
            placed = place_batch(whole_batch(seed, rows), mesh, batch_dim=1)
            state, metrics = step(state, placed, hyperparams)
            states.append(jax.device_get(state))
            losses.append(float(metrics["loss"]))
    return states, losses


def test_maxima_of_delayed_scaling_are_those_of_all_replicas(monkeypatch):
    monkeypatch.setattr(model_fp8, "SMALLEST", 16)
    fields = LLAMA | {"depth": 1, "fp8": "blocks", "fp8_history": 2}
    states, _ = run(*make_spec(resolved(**fields)), mesh_of(data=2), local(name="gossip"), steps=1)
    alone, _ = run(*make_spec(resolved(**fields)), mesh_of(data=2), steps=1)
    for x, expected in zip(
        *(jax.tree.leaves(s[0].extras["amax_history"].inputs) for s in (states, alone))
    ):
        np.testing.assert_allclose(x, expected, rtol=1e-4)


# ---- DiLoCo ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(task):
    return run(*task, mesh_of(data=4))


THREE = [{"data": 2, "fsdp": 2, "tensor": 2}, {"data": 2, "fsdp": 2, "context": 2}]


@pytest.mark.parametrize("sizes", THREE, ids=str)
def test_meeting_each_step_with_rate_one_is_data_parallel(task, plain, sizes):
    config = local(name="diloco", every=1, outer_lr=1.0, outer_momentum=0.0)
    states, losses = run(*task, mesh_of(**sizes), config)
    np.testing.assert_allclose(losses, plain[1], rtol=1e-5)
    close(states[-1].params, plain[0][-1].params, rtol=1e-5, atol=1e-6)


@pytest.mark.default_tier
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
    specs = make_spec(resolved(**LLAMA | {"depth": 3}))[0].specs
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
    task = make_spec(resolved(**LLAMA | {"depth": 1}), optim, steps=3)
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


@pytest.mark.default_tier
@pytest.mark.parametrize("replicas", [2, 5])
def test_the_mean_on_the_ring_is_of_both_neighbours(replicas):
    x_RN = np.random.default_rng(0).normal(size=(replicas, 3)).astype(np.float32)
    mean = jax.shard_map(
        ring_mean, mesh=mesh_of(data=replicas), in_specs=jax.P("data"), out_specs=jax.P("data")
    )
    neighbours = [x_RN, np.roll(x_RN, 1, 0)] + [np.roll(x_RN, -1, 0)] * (replicas > 2)
    found = jax.jit(mean)({"x": x_RN})["x"]
    np.testing.assert_allclose(found, np.mean(neighbours, axis=0), rtol=1e-5)


def test_gossip_averages_with_the_neighbours_and_keeps_the_mean(task):
    idle = run(*task, mesh_of(data=4), local(name="gossip", every=99), steps=1)[0][0]
    states, _ = run(*task, mesh_of(data=4), local(name="gossip"), steps=1)
    x, y = (s.optimizer.replicas.params["embed"] for s in (idle, states[0]))
    assert np.abs(x[0] - x[1]).max() > 1e-4
    np.testing.assert_allclose(y, (x + np.roll(x, 1, 0) + np.roll(x, -1, 0)) / 3, atol=1e-6)
    gossip = replicate_step(task[0], local(name="gossip"), mesh_of(data=4))
    own = jax.tree.map(jnp.asarray, states[0].optimizer)
    kept = gossip.optimizer.eval_params(states[0].params, own)
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


def sent(text, replicas):
    """Bytes that a device sends in the collectives of a compiled program, metrics left out."""
    share = {"all-reduce": 2 * (replicas - 1) / replicas, "all-to-all": (replicas - 1) / replicas,
             "all-gather": (replicas - 1) / replicas, "collective-permute": 1}  # fmt: skip
    total = 0.0
    for shapes, kind in re.findall(
        r"= (\S.*?) (all-reduce|all-to-all|all-gather|collective-permute)\(", text
    ):
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
            total += share[kind] * BITS[dtype] * prod(map(int, filter(None, dims.split(","))))
    return total


@pytest.mark.parametrize(
    ("config", "replicas"),
    [(None, 4), ({"name": "diloco", "every": 1}, 4),
     ({"name": "diloco", "every": 1, "compress": "int8"}, 4),
     ({"name": "gossip"}, 4), ({"name": "gossip"}, 2)],
    ids=["plain", "float32", "int8", "gossip", "gossip of two"],
)  # fmt: skip
def test_bytes_are_those_of_the_compiled_collectives(task, config, replicas):
    mesh, (task, hyperparams) = mesh_of(data=replicas), task
    config = config and local(**config)
    task = replicate_step(task, config, mesh) if config else task
    with jax.set_mesh(mesh):
        state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
                             begin(task, mesh))  # fmt: skip
        placed = place_batch(whole_batch(0), mesh, batch_dim=1)
        text = make_step(task, mesh).lower(state, placed, hyperparams).compile().as_text()
    parameters = sum(s.size for s in jax.tree.leaves(task.specs))
    expected = wire_bytes(parameters, replicas, config)
    if config is None:  # XLA may send more: a tied embedding's two gradients, say
        assert sent(text, replicas) > 0.95 * expected
    else:
        # A few numbers for each array, which are checked to be finite, come on top.
        assert sent(text, replicas) == pytest.approx(expected, rel=0.06)


def test_each_device_of_a_replica_sends_its_own_part():
    """In 8 bits as well, and with Muon, whose exchanges stay within the replica."""
    config, mesh = local(name="diloco", every=1, compress="int8"), mesh_of(data=2, fsdp=2)
    optim = TypeAdapter(OptimConfig).validate_python({"name": "muon"})
    task, hyperparams = make_spec(resolved(**LLAMA | {"depth": 1}), optim)
    task = replicate_step(task, config, mesh)
    with jax.set_mesh(mesh):
        like = lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
        shapes = jax.eval_shape(lambda: init_state(task, 0))
        state = jax.tree.map(like, shapes, state_shardings(task, mesh))
        placed = place_batch(whole_batch(0), mesh, batch_dim=1)
        text = make_step(task, mesh).lower(state, placed, hyperparams).compile().as_text()
    found = collectives(text, dict(mesh.shape))
    over_data = sum(c.bytes for c in found if "data" in c.axes)
    said = comm_stats(config, task.specs, mesh, jnp.dtype(jnp.float32))["sent_bytes"]
    assert over_data == pytest.approx(said, rel=0.06)
    whole = wire_bytes(sum(s.size for s in jax.tree.leaves(task.specs)), 2, config)
    assert said == pytest.approx(whole / 2, rel=0.05)


def test_a_run_says_what_it_sends():
    """1000 parameters, 4 replicas: a ring sends 1.5 times the bytes; float32 each 50 steps."""
    config, mesh = local(name="diloco", every=50), mesh_of(data=4)
    specs = {"up": SimpleNamespace(shape=(10, 100), axes=("embed", "hidden"))}
    facts = comm_stats(config, specs, mesh, jnp.dtype(jnp.bfloat16))
    assert facts == {"sent_bytes": 1.5 * 4 * 1000 / 50, "sent_bytes_plain": 1.5 * 2 * 1000}
    said = comm_summary(config, facts, mesh)
    assert "4 replicas" in said and "0.00012 MB a step, data parallel 0.003 MB" in said
    one, two, four = (wire_bytes(1000, replicas, local(name="gossip")) for replicas in (1, 2, 4))
    assert (one, two, four) == (0, 4000, 8000)


def test_one_replica_is_refused(task):
    with pytest.raises(UserError, match="at least 2 replicas along mesh.data, which is 1: set"):
        replicate_step(task[0], local(name="gossip"), mesh_of(fsdp=2))


# ---- resuming ----------------------------------------------------------------------------------


def resume(task, config, mesh, folder, saved, said=None):
    """The state of a run that goes on, on this mesh, from a saved one."""
    spread = replicate_step(task, config, mesh, resumed=True)
    say = (lambda line: None) if said is None else said.append
    with jax.set_mesh(mesh), Checkpointer(folder, CheckpointConfig()) as checkpoints:
        checkpoints.save(int(saved.step), saved.params, non_param_state(saved), {})
        checkpoints.wait()
        where = state_shardings(spread, mesh)
        first, _ = init_or_restore(spread, where, checkpoints, seed=0, log=say)
        state = first.result()
    return spread, state


def test_resumed_between_meetings_is_uninterrupted_bit_for_bit(task, tmp_path):
    mesh, config, said = mesh_of(data=2), local(name="diloco", every=2), []
    states, _ = run(*task, mesh, config)
    spread, state = resume(task[0], config, mesh, tmp_path, states[0], said)
    same(state, states[0])
    same(go_on(spread, task[1], mesh, state, (1, 2))[0][-1], states[2])
    assert not said


@pytest.fixture(scope="module")
def adam():
    """Whose inner state has counts and moments of every parameter."""
    optim = {"name": "adamw", "learning_rate": 0.01, "schedule": {"name": "constant"}}
    return make_spec(
        resolved(**LLAMA | {"depth": 1}), TypeAdapter(OptimConfig).validate_python(optim)
    )


DILOCO = {"name": "diloco", "every": 3}


@pytest.mark.parametrize(
    ("fields", "before", "after"),
    [(DILOCO | {"compress": "int8"}, {"data": 2}, {"data": 4, "fsdp": 2}),
     (DILOCO | {"fragments": 2}, {"data": 3}, {"data": 2}),
     ({"name": "gossip"}, {"data": 4}, {"fsdp": 2})],
    ids=["2 to 4 of two", "3 to 2 in fragments", "gossip 4 to 1"],
)  # fmt: skip
def test_another_number_of_replicas_goes_on_from_their_mean(adam, fields, before, after, tmp_path):
    """Stopped after a meeting and a step apart; the steps that follow are of the same batches."""
    config, said, rows = local(**fields), [], 24
    states, losses = run(*adam, mesh_of(**before), config, 6, rows)
    mesh, old = mesh_of(**after), states[3]
    assert all(
        np.ptp(x, axis=0).max() > 1e-5 for x in jax.tree.leaves(old.optimizer.replicas.params)
    )
    spread, state = resume(adam[0], config, mesh, tmp_path, old, said)
    had, now = before["data"], after.get("data", 1)
    assert len(said) == 1 and f"from {had} replicas to {now}: each starts from the mean" in said[0]

    others = lambda s: s._replace(optimizer=s.optimizer.momentum)  # shared weights, counters, keys
    same(others(state), others(old))
    assert jax.tree.structure(state) == jax.tree.structure(old)
    for x, o in zip(*(jax.tree.leaves(s.optimizer.replicas) for s in (state, old)), strict=True):
        assert x.shape == (now, *o.shape[1:]) and x.dtype == o.dtype
        x = np.asarray(x)
        assert (x == x[0]).all()
        np.testing.assert_allclose(x.mean(0), o.mean(0), rtol=2e-6, atol=1e-7)
    for x, where in zip(*map(jax.tree.leaves, (state, state_shardings(spread, mesh)))):
        assert x.sharding.is_equivalent_to(where, x.ndim)

    after_it = go_on(spread, adam[1], mesh, state, (4, 5), rows)[1]
    assert losses[0] - losses[3] > 0.1  # else the next would say nothing
    np.testing.assert_allclose(after_it, losses[4:], rtol=0.005)


def test_no_device_reads_all_replicas_whole(adam):
    """They lie split along the first dim that the new ones divide: their own, or another."""
    mesh = mesh_of(data=2, fsdp=2)
    spread = replicate_step(adam[0], local(name="gossip"), mesh)
    like = jax.tree.map(lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
                        jax.eval_shape(lambda: init_state(spread, 0)),
                        state_shardings(spread, mesh)).optimizer  # fmt: skip
    for had in (3, 4):
        for x, new in zip(*map(jax.tree.leaves, (as_saved(like, had), like)), strict=True):
            assert x.shape == (had, *new.shape[1:]) and x.dtype == new.dtype
            part = prod(x.sharding.shard_shape(x.shape))
            # of each replica, a device reads half of what it will have of one
            whole = had * prod(new.sharding.shard_shape(new.shape))
            assert part == (whole // 2 if had == 4 or x.ndim > 1 else whole)


def test_regrouped_8_bit_states_are_decoded_first():
    """A mean of scales would not be one of what the codes stand for."""
    random, mesh = np.random.default_rng(0), mesh_of(data=2)
    normal_RDF = jnp.asarray(random.normal(size=(3, 8, 128)), jnp.float32)
    m, v = (Moment(*encode(x, 64, signed)) for x, signed in ((normal_RDF, True),
                                                            (normal_RDF**2, False)))  # fmt: skip
    adam = Adam8bitState(jnp.full(3, 5), {"up": m}, {"up": v}, jnp.zeros((3, 64), jnp.uint8))
    saved = LocalState(Replica({"up": normal_RDF}, adam), None)
    expected = normal_RDF.mean(0), decode(*m, 64, True).mean(0)
    where = jax.NamedSharding(mesh, jax.P("data"))
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((2, *x.shape[1:]), x.dtype, sharding=where), saved
    )
    own = resize_replicas(saved, like).replicas
    for mine in range(2):
        np.testing.assert_allclose(own.params["up"][mine], expected[0], rtol=1e-6)
        got = decode(
            own.optimizer.m["up"].values[mine], own.optimizer.m["up"].scale[mine], 64, True
        )
        np.testing.assert_allclose(got, expected[1], atol=0.01 * np.abs(expected[1]).max())
    assert all(x.sharding == where for x in jax.tree.leaves(own))
    assert normal_RDF.is_deleted()


# ---- the command ---------------------------------------------------------------------------------


def test_a_run_goes_on_with_fewer_replicas(tmp_path, capfd, monkeypatch):
    """Eight, stopped between two meetings, go on as four of two devices, on the same batches."""
    microbatches, seen = program.microbatches, []

    def watched(batch, rows, mesh, make_arrays):
        made = microbatches(batch, rows, mesh, make_arrays)
        if make_arrays is place_batch:  # not types, which the step is compiled for
            seen.append(np.asarray(made.tokens_BT).reshape(8, -1))
        return made

    monkeypatch.setattr(program, "microbatches", watched)
    meet = QUICK | {"train__local_sgd__name": "diloco", "train__local_sgd__every": 2}
    assert main(run_overrides(tmp_path / "eight", **meet, mesh__data=8)) == 0
    whole, copy = (tmp_path / name / "tiny" for name in ("eight", "four"))
    shutil.copytree(whole, copy)
    shutil.rmtree(copy / "checkpoints" / "6")
    shutil.rmtree(copy / "model")
    capfd.readouterr()
    assert main(run_overrides(copy.parent, **meet, mesh__data=4, mesh__fsdp=2)) == 0
    out = capfd.readouterr().out
    assert "from 8 replicas to 4" in out and "steps 3 to 6" in out
    assert len({x.tobytes() for x in seen}) == 6 and len(seen) == 6 + 3
    np.testing.assert_array_equal(seen[-3:], seen[3:6])
    for mine, other in zip(rows_of(copy), rows_of(whole), strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=3e-4)
