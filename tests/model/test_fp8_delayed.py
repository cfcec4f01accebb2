"""Delayed scaling in a training step: what it equals, and where its history goes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import batch, begin, make_spec, mesh_of, random_params, resolved, run_overrides, same

from jaxtrain.main import main
from jaxtrain.parallel import place_batch
from jaxtrain.runs.checkpoint import Checkpointer
from jaxtrain.runs.config import CheckpointConfig
from jaxtrain.train.float8_scaling import Float8
from jaxtrain.train.restore import init_or_restore, non_param_state
from jaxtrain.train.step import gradients, make_step, state_shardings
from jaxtrain.weights import float8 as model_fp8

FACTOR = jnp.float32(2.0**-8)
INPUTS = ["attention/embed", "attention/heads", "ffn/embed", "ffn/hidden"]
MATRICES = ["attention/k", "attention/out", "attention/q", "attention/v", "ffn/down", "ffn/up"]


@pytest.fixture(scope="module", autouse=True)
def small():
    """Matrices of the tests' size count as large."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_fp8, "SMALLEST", 16)
        yield


def fp8_task(history, **changes):
    alike = {"depth": 2, "window_pattern": "L", "value_embeddings": False}
    alike |= {"smear": False, "backout": False, "residual_scales": False}
    return make_spec(resolved(**alike | changes, fp8="blocks", fp8_history=history))


def slopes(task):
    """(batch, history, factor) -> sums, gradients, history, compiled."""
    params = random_params(task.specs)

    def run(b, past, factor):
        extras = {} if past is None else {"amax_history": past}
        sums, grads, seen = gradients(task, params, b, factor, extras=extras)
        return sums, grads, seen.get("amax_history")

    compiled = jax.jit(run)
    return lambda b, past, factor=FACTOR: compiled(b, past, factor)


@pytest.fixture(scope="module")
def settled(small):
    """(task, its gradients' function, a batch, the history after some steps of it)."""
    task, _ = fp8_task(3)
    run, one = slopes(task), batch(4, micro=4)
    past = model_fp8.init_amax_history(task.specs, 3)
    for _ in range(6):
        past = run(one, past)[2]
    return task, run, one, past


def close_within_rounding(found, expected, error=0.02):
    """A last bit before a cast can move a value by a step of float8."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(a - b) <= error * np.linalg.norm(b)


@pytest.mark.slow
def test_with_the_true_maxima_it_is_current_scaling(settled):
    """But for float32's last bit, which is the compiler's: they are two programs."""
    task, run, one, past = settled
    sums, grads, after = run(one, past)
    close_within_rounding((sums, grads), slopes(fp8_task(None)[0])(one, None)[:2], 1e-6)
    same(after, past)
    assert sorted(past.inputs) == [f"blocks/{name}" for name in INPUTS]
    assert sorted(past.gradients) == [f"blocks/{name}" for name in MATRICES]
    # A normed row of 32 cannot have more, and q, k and v report it once.
    most = past.inputs["blocks/attention/embed"]
    assert ((most > 2) & (most <= 32**0.5)).all()
    # Before there is a history, values are cast as they are.
    assert run(one, model_fp8.init_amax_history(task.specs, 3))[0][0] != sums[0]


def test_gradients_are_remembered_whatever_the_loss_is_divided_by(settled):
    _, run, one, past = settled
    _, grads, _ = run(one, past)
    _, larger, after = run(one, past, 2.0**20 * FACTOR)
    same(jax.tree.map(lambda g: g / 2.0**20, larger), grads)
    same(after, past)


def test_a_history_holds_the_last_steps_and_its_largest_counts(settled):
    _, run, one, past = settled
    twice = jax.tree.map(lambda x: x.at[1].multiply(2), past)  # neither end
    after = run(one, twice)[2]
    for old, new in zip(jax.tree.leaves(twice), jax.tree.leaves(after)):
        np.testing.assert_array_equal(new[1:], old[:-1])
    most = model_fp8.amax_from_history(twice, jnp.float32(0.5))
    same(most.inputs, {name: 2 * x[0] for name, x in past.inputs.items()})
    same(most.gradients, {name: x[0] for name, x in past.gradients.items()})


def test_unrolled_layers_find_the_same_maxima_in_slots(settled):
    task, run, one, past = settled
    unrolled = task._replace(transforms=(Float8(3, unrolled=True),))
    amax, slots = (t.transforms[0].statistics(past, FACTOR) for t in (task, unrolled))
    for alone, found in zip(jax.tree.leaves(amax), jax.tree.leaves(slots), strict=True):
        wanted = np.repeat(np.asarray(alone)[:, None], model_fp8.AMAX_SLOTS, 1)
        np.testing.assert_array_equal(found, wanted)
    close_within_rounding(slopes(unrolled)(one, past), run(one, past), 1e-6)


@pytest.mark.slow
def test_microbatches_scan_and_remat_change_nothing(settled):
    """Of microbatches, the largest maximum counts; of scanned layers, each has its own."""
    _, run, one, past = settled
    parts = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[2:]), one)
    task, _ = fp8_task(3, scan_layers=True, remat="block")
    sums, grads, after = run(one, past)
    other_sums, other_grads, other = slopes(task)(parts, past)
    np.testing.assert_allclose(other_sums[0], sums[0], rtol=1e-4)
    close_within_rounding((other_grads, other), (grads, after))


# ---- whole steps -------------------------------------------------------------------------------


def trained(task, hyperparams, mesh):
    """A function (state or None, steps) -> (state, losses) on one batch."""
    with jax.set_mesh(mesh):
        step, placed = make_step(task, mesh), place_batch(batch(8, micro=8), mesh, batch_dim=1)

    def run(state, steps):
        losses = []
        with jax.set_mesh(mesh):
            state = state or begin(task, mesh)
            for _ in range(steps):
                state, metrics = step(state, placed, hyperparams)
                losses.append(float(metrics["loss"]))
        return state, losses

    return run


@pytest.fixture(scope="module")
def whole(small, tmp_path_factory):
    """40 steps: (their function, the state after 5, its checkpoints, the last state, losses)."""
    folder, run = tmp_path_factory.mktemp("run"), trained(*fp8_task(16, depth=1), mesh_of())
    state, first = run(None, 5)
    early = jax.device_get(state)
    with Checkpointer(folder, CheckpointConfig.model_validate({})) as checkpoints:
        checkpoints.save(5, state.params, non_param_state(state), {})
    state, rest = run(state, 35)
    return run, early, folder, state, first + rest


@pytest.mark.slow
def test_a_model_learns_as_it_does_with_current_scaling(whole):
    losses = trained(*fp8_task(None, depth=1), mesh_of())(None, 40)[1]
    assert losses[-1] < 0.85 * losses[0]
    np.testing.assert_allclose(whole[-1], losses, rtol=0.01)


@pytest.mark.slow
def test_resumed_is_uninterrupted_bit_for_bit(whole):
    run, early, folder, last, losses = whole
    assert all(
        (x[:5] > 0).all() and not x[5:].any() for x in early.extras["amax_history"].inputs.values()
    )
    (task, _), mesh = fp8_task(16, depth=1), mesh_of()
    with jax.set_mesh(mesh), Checkpointer(folder, CheckpointConfig.model_validate({})) as saved:
        first, _ = init_or_restore(task, state_shardings(task, mesh), saved, seed=1)
        state = first.result()
    same(state, early)
    state, rest = run(state, 35)
    same((state, rest), (last, losses[5:]))


@pytest.mark.slow
def test_sharded_is_one_device(whole):
    """The maxima are those of the whole tensors, on every device."""
    mesh = mesh_of(data=2, fsdp=2, tensor=2)
    state, losses = trained(*fp8_task(16, depth=1), mesh)(None, 5)
    np.testing.assert_allclose(losses, whole[-1][:5], rtol=1e-3)
    for x, expected in zip(
        jax.tree.leaves(state.extras["amax_history"]),
        jax.tree.leaves(whole[1].extras["amax_history"]),
    ):
        np.testing.assert_allclose(x, expected, rtol=0.1)


# ---- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"model__fp8": "null"}, "model.fp8_history=16 does not go with model.fp8=null: "),
     ({"model__ffn_tiles": 2}, "fp8_history=16 does not go with model.ffn_tiles=2: "),
     ({"mesh__pipeline": 2, "model__depth": 2}, "does not go with mesh.pipeline=2: ")],
)  # fmt: skip
def test_what_it_does_not_go_with_is_one_clear_error(changes, message, tmp_path, capsys):
    given = {"model__fp8": "blocks", "model__fp8_history": 16} | changes
    assert main(run_overrides(tmp_path, **given)) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_one_array_of_queries_keys_and_values_has_one_product_and_the_same_loss():
    one, found = batch(4, micro=4), []
    for kernels in ({}, {"qkv": "reference"}):
        task, _ = fp8_task(3, kernels=kernels)
        run, past = slopes(task), model_fp8.init_amax_history(task.specs, 3)
        for _ in range(3):
            (loss, _), grads, past = run(one, past)
        found.append((loss, grads, past))
    (loss, grads, past), (other_loss, other_grads, other_past) = found
    np.testing.assert_allclose(other_loss, loss, rtol=1e-3)
    close_within_rounding(other_grads, grads, 0.1)
    close_within_rounding(other_past.inputs, past.inputs, 0.02)
    heads = [other_past.gradients[f"blocks/attention/{name}"] for name in "qkv"]
    np.testing.assert_array_equal(heads[0], heads[1])
    np.testing.assert_array_equal(heads[0], heads[2])
    assert (heads[0] > 0).all()
