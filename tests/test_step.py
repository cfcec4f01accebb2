"""The step's invariants: accumulation, sharding, float16's loss scale, clipping."""

from threading import Event

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from machine import LONG
from pydantic import TypeAdapter
from tiny import (
    LLAMA,
    batch,
    begin,
    begin_random,
    close,
    make_spec,
    mesh_of,
    random_params,
    resolved,
    same,
)

from jaxtrain.objectives import LossOptions
from jaxtrain.objectives.next_token import make_next_token
from jaxtrain.optim import OptimConfig
from jaxtrain.parallel import place_batch
from jaxtrain.runs.checkpoint import Checkpointer
from jaxtrain.runs.config import CheckpointConfig
from jaxtrain.train.loss_scale import GROWTH_INTERVAL, LossScale, adjust_scale
from jaxtrain.train.restore import init_or_restore, non_param_state
from jaxtrain.train.step import (
    make_step,
    state_shardings,
    train_step,
)

ROWS = 8


def optim(name="adamw", **fields):
    fields = {"schedule": {"name": "constant"}, **fields}
    return TypeAdapter(OptimConfig).validate_python({"name": name, **fields})


def run(task, hyperparams, mesh=None, micro=ROWS, steps=2, rows=ROWS):
    """The state after some steps, and the metrics of each."""
    states, history = run_each(task, hyperparams, mesh, micro, steps, rows)
    return states[-1], history


def run_each(task, hyperparams, mesh=None, micro=ROWS, steps=2, rows=ROWS):
    """The state and the metrics after each of some steps."""
    mesh = mesh or mesh_of()
    with jax.set_mesh(mesh):
        step, state, states, history = make_step(task, mesh), begin_random(task, mesh), [], []
        for seed in range(steps):
            placed = place_batch(batch(rows, seed=seed, micro=micro), mesh, batch_dim=1)
            state, metrics = step(state, placed, hyperparams)
            states.append(jax.device_get(state))
            history.append(metrics)
    return states, jax.device_get(history)


def moments(state):
    """Adam's first moments: (1 - b1) x the gradient after one step."""
    leaves = jax.tree_util.tree_leaves_with_path(state.optimizer)
    return [x for path, x in leaves if any(getattr(key, "name", "") == "mu" for key in path)]


@pytest.fixture(scope="module")
def every_feature():
    return make_spec(resolved(depth=2), optim("muon"), steps=10)


@pytest.fixture(scope="module")
def speedrun(every_feature):
    """A task of every feature, and what one device makes of it in one piece."""
    return *every_feature, run(*every_feature)


@pytest.fixture(scope="module")
def plain():
    """A task of one layer; the states and the metrics of two steps on one device in one piece."""
    task, hyperparams = make_spec(
        resolved(**LLAMA | {"depth": 1}), optim("adamw", clip_norm=None), steps=10
    )
    return task, hyperparams, run_each(task, hyperparams)


# ---- accumulation ----------------------------------------------------------------------------


def test_accumulated_gradients_are_those_of_one_big_batch(plain):
    """Weights differ from row to row: a mean of means would not be the mean."""
    task, hyperparams, (states, metrics) = plain
    counts = batch(ROWS, micro=2).weights_BT.sum((1, 2))
    assert len(set(counts.tolist())) > 1
    accumulated, others = run(task, hyperparams, micro=2)
    close(others, metrics, rtol=1e-4)
    close(moments(accumulated), moments(states[-1]), rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_accumulated_is_one_big_batch(speedrun):
    task, hyperparams, (state, metrics) = speedrun
    accumulated, others = run(task, hyperparams, micro=2)
    close(others, metrics, rtol=1e-4)
    close(accumulated.params, state.params, rtol=1e-3, atol=1e-5)


@pytest.fixture(scope="module")
def by_hand(plain):
    """Mean loss and mean squared log of the softmax's denominator, from the whole logits."""
    task, rows = plain[0], batch(ROWS)
    model = nnx.merge(task.graphdef, random_params(task.specs))
    x_BTD = jax.jit(lambda t: model(t).states)(jnp.asarray(rows.tokens_BT))
    logits_NV = model.logits(x_BTD.reshape(-1, x_BTD.shape[-1]))
    lse_N = jax.nn.logsumexp(logits_NV, axis=-1)
    nll_N = lse_N - logits_NV[np.arange(len(lse_N)), rows.targets_BT.ravel()]
    mean = lambda x_N: np.average(x_N, weights=rows.weights_BT.ravel())
    return mean(nll_N), mean(lse_N**2)


def test_metrics_are_what_they_say(plain, by_hand):
    task, hyperparams, (_, (first, second)) = plain
    assert set(first) == {"loss", "bpb", "grad_norm", "lr", "checks"}
    assert first["loss"] == pytest.approx(by_hand[0], rel=1e-5)
    # two bytes a token here
    assert first["bpb"] == pytest.approx(first["loss"] / np.log(2) / 2, rel=1e-5)
    assert first["grad_norm"] == pytest.approx(
        np.sqrt(first["checks"].gradient_squares.sum()), rel=1e-5
    )
    assert first["lr"] == second["lr"] == hyperparams["groups"]["matrix"]["learning_rate"]
    assert len(first["checks"].gradient_squares) == len(jax.tree.leaves(task.specs))


@pytest.mark.slow
def test_z_loss_is_added(plain, by_hand):
    task, hyperparams, _ = plain
    _, (with_z,) = run(
        task._replace(objective=make_next_token(options=LossOptions(z_loss=0.1))),
        hyperparams,
        steps=1,
    )
    assert with_z["loss"] == pytest.approx(by_hand[0] + 0.1 * by_hand[1], rel=1e-5)


# ---- sharding --------------------------------------------------------------------------------

SLOW = ((8, 1, 1), (1, 8, 1))
MESHES = [(2, 2, 2), *(pytest.param(sizes, marks=pytest.mark.slow) for sizes in SLOW)]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_sharded_is_one_device(speedrun, sizes):
    task, hyperparams, (state, metrics) = speedrun
    sharded, others = run(task, hyperparams, mesh_of(*sizes))
    close(others, metrics, rtol=1e-3, atol=1e-5)
    close(sharded.params, state.params, rtol=1e-2, atol=1e-4)
    close(sharded.optimizer, state.optimizer, rtol=1e-2, atol=1e-4)


@pytest.mark.slow
def test_fewer_kv_heads_than_tensor_devices():
    """Llama's shape: two key/value heads over four devices, tied head, accumulated as well."""
    task, hyperparams = make_spec(resolved(**LLAMA), optim("adamw"), steps=10)
    state, metrics = run(task, hyperparams)
    sharded, others = run(task, hyperparams, mesh_of(1, 2, 4), micro=4)
    close(others, metrics, rtol=1e-3, atol=1e-5)
    close(sharded.params, state.params, rtol=1e-2, atol=1e-4)


def test_parameters_and_states_are_split_over_the_mesh(every_feature):
    task = every_feature[0]
    state = begin(task, mesh_of(1, 2, 4))
    up = state.params["blocks"]["ffn"]["up"]
    assert up.sharding.spec == jax.P(None, "fsdp", "tensor")
    assert up.addressable_shards[0].data.shape == (2, 16, 32)
    whole = sum(x.nbytes for x in jax.tree.leaves(state))
    on_one = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    assert on_one < 0.2 * whole


# ---- float16 ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def half():
    task, hyperparams = make_spec(
        resolved(**LLAMA | {"depth": 1}), optim("adamw"), dtype=jnp.float16
    )
    return task, hyperparams, make_step(task, mesh_of())


def scaled_step(half, scale):
    task, hyperparams, step = half
    before = begin_random(task, mesh_of())._replace(
        extras={"loss_scale": LossScale(jnp.float32(scale), jnp.int32(7))}
    )
    kept = jax.device_get(before)
    after, metrics = step(before, batch(micro=8), hyperparams)
    return kept, jax.device_get(after), metrics


def test_float16_trains_with_a_scale_that_does_not_show(half, plain):
    before, after, metrics = scaled_step(half, 2.0**10)
    assert metrics["loss_scale"] == 2.0**10
    assert after.extras["loss_scale"] == (2.0**10, 8)
    assert (after.params["embed"] != before.params["embed"]).any()
    # the norm is that of the unscaled gradient
    exact = plain[2][1][0]
    assert metrics["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.01)
    assert metrics["loss"] == pytest.approx(exact["loss"], rel=1e-3)


def test_an_overflow_halves_the_scale_and_skips_the_update(half):
    before, after, metrics = scaled_step(half, 2.0**60)
    assert not np.isfinite(metrics["grad_norm"])
    assert np.isfinite(metrics["loss"])
    same(after.params, before.params)
    same(after.optimizer, before.optimizer)
    assert after.extras["loss_scale"] == (2.0**59, 0)
    assert after.step == before.step + 1


def test_a_state_comes_back_from_a_checkpoint_bit_for_bit(half, tmp_path):
    task, where = half[0], state_shardings(half[0], mesh_of())
    _, state, _ = scaled_step(half, 2.0**9)
    with Checkpointer(tmp_path, CheckpointConfig()) as checkpoints:
        checkpoints.save(1, state.params, non_param_state(state), {"at": 7})
        checkpoints.wait()
        first, position = init_or_restore(task, where, checkpoints, seed=0)
    restored = first.result()
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    same(restored, state)
    assert restored.extras["loss_scale"] == (2.0**9, 8) and position == {"at": 7}


@pytest.mark.parametrize("devices", [1, 2])
def test_one_device_is_initialized_while_the_caller_goes_on(plain, tmp_path, monkeypatch, devices):
    go_on, real, (spec, mesh) = Event(), jax.stages.Lowered.compile, (plain[0], mesh_of(devices))
    compile_later = lambda self: (devices > 1 or go_on.wait(LONG)) and real(self)
    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_later)
    with jax.set_mesh(mesh), Checkpointer(tmp_path, CheckpointConfig()) as checkpoints:
        first, position = init_or_restore(spec, state_shardings(spec, mesh), checkpoints, seed=3)
        assert first.done() == (devices > 1) and position is None
        go_on.set()
        same(first.result(), begin(spec, mesh, seed=3))


def test_an_error_of_the_initialization_is_raised_where_its_state_is_needed(
    plain, tmp_path, monkeypatch
):
    spec, mesh = plain[0], mesh_of()
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda self: {}["RESOURCE_EXHAUSTED"])
    with jax.set_mesh(mesh), Checkpointer(tmp_path, CheckpointConfig()) as checkpoints:
        first, _ = init_or_restore(spec, state_shardings(spec, mesh), checkpoints, seed=0)
        with pytest.raises(KeyError, match="RESOURCE_EXHAUSTED"):
            first.result()


def test_the_scale_grows_after_enough_good_steps_and_stays_above_one():
    interval = GROWTH_INTERVAL

    def after(scale, good, finite):
        return adjust_scale(LossScale(jnp.float32(scale), jnp.int32(good)), jnp.bool(finite))

    assert after(8.0, interval - 2, True) == (8.0, interval - 1)
    assert after(8.0, interval - 1, True) == (16.0, 0)
    assert after(8.0, interval - 1, False) == (4.0, 0)
    assert after(1.0, 0, False) == (1.0, 0)


def test_other_dtypes_have_no_scale_and_bfloat16_computes_in_it(plain):
    assert plain[2][0][-1].extras == {}
    fields = LLAMA | {"depth": 1}
    task, hyperparams = make_spec(resolved(**fields), optim("adamw"), dtype=jnp.bfloat16)
    state = begin(task, mesh_of())
    text = str(
        jax.make_jaxpr(lambda s, b, k: train_step(task, s, b, k))(
            state, batch(micro=8), hyperparams
        )
    )
    assert state.extras == {} and text.count("bf16") > 50


# ---- clipping, determinism -------------------------------------------------------------------
def test_clip_norm_shrinks_to_the_norm_and_leaves_small_gradients_alone(plain):
    def clipped_to(clip):
        task, hyperparams = make_spec(
            resolved(**LLAMA | {"depth": 1}), optim("adamw", clip_norm=clip)
        )
        state, (metrics,) = run(task, hyperparams, steps=1)
        return moments(state), metrics["grad_norm"]

    states, metrics = plain[2]
    free, norm = moments(states[0]), metrics[0]["grad_norm"]
    clipped, same_norm = clipped_to(float(norm / 4))
    loose, _ = clipped_to(float(norm * 4))
    assert same_norm == pytest.approx(norm, rel=1e-5)  # the norm before clipping is reported
    close(clipped, [x / 4 for x in free], rtol=1e-4, atol=1e-9)
    close(loose, free, rtol=1e-5, atol=1e-9)


@pytest.mark.slow
def test_the_same_step_twice_is_the_same_bit_for_bit(speedrun):
    task, hyperparams, (state, metrics) = speedrun
    again, others = run(task, hyperparams)
    same(again, state)
    same(others, metrics)
