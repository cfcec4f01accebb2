"""Wrappers go around any optimizer: reference updates, sharding, resuming, replicas, errors."""

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
    close,
    make_spec,
    mesh_of,
    resolved,
    rows_of,
    run_overrides,
    same,
)

from jaxtrain.config.features import MASKS
from jaxtrain.main import main
from jaxtrain.model import ParamSpec
from jaxtrain.model.init import constant
from jaxtrain.optim import WRAPPERS, OptimConfig, make_optimizer, merge_states
from jaxtrain.parallel import place_batch
from jaxtrain.runs.saved import load_saved
from jaxtrain.settings import UserError
from jaxtrain.train.step import make_step, state_shardings

CAUTIOUS, EMA = {"name": "cautious"}, {"name": "ema", "decay": 0.5}


def config(name, *wrappers, **fields):
    fields = {"schedule": {"name": "constant"}, "wrappers": wrappers, **fields}
    return TypeAdapter(OptimConfig).validate_python({"name": name, **fields})


def small_specs():
    """A stack of two layers, an embedding and a gain."""
    spec = lambda shape, axes, role: ParamSpec(
        shape, axes, constant(1.0), role, ins=(len(shape) - 2,), outs=(len(shape) - 1,)
    )
    return {
        "w": spec((2, 8, 4), ("layers", None, None), "matrix"),
        "embed": spec((6, 4), (None, None), "embedding"),
        "gain": spec((2, 4), ("layers", None), "gain"),
    }


def arrays(seed, specs):
    random = np.random.default_rng(seed)
    return {n: jnp.float32(random.normal(size=s.shape)) for n, s in specs.items()}


def updates_of(optimizer, params, seeds=(1, 2, 3)):
    """The updates of some steps, and the weights after each."""
    state, found = jax.jit(optimizer.init)(params), []
    for step, seed in enumerate(seeds):
        grads = arrays(seed, params)
        updates, state = jax.jit(optimizer.update)(
            grads, state, params, jnp.int32(step), optimizer.hyperparams
        )
        params = jax.tree.map(jnp.add, params, updates)
        found.append((grads, updates, params))
    return found, state


FAST = ("adamw", "muon")
SLOW = ("adamw8bit", "schedule_free", "soap", "lamb")  # a state of each other kind
EACH = [*FAST, *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)]
NO_AVERAGE = [p for p in EACH if p in FAST or p.values != ("schedule_free",)]


@pytest.mark.parametrize("name", EACH)
@pytest.mark.quick("adamw")
def test_cautious_drops_what_goes_up_the_gradient_and_rescales_the_rest(name):
    """The second update of any optimizer, masked by numpy; its state is the optimizer's own."""
    specs = small_specs()
    params, grads = arrays(0, specs), arrays(2, specs)
    plain, wrapped = (
        make_optimizer(config(name, *wrappers), specs, 10) for wrappers in ((), (CAUTIOUS,))
    )
    [(_, _, params)], state = updates_of(plain, params, (1,))
    after = [
        jax.jit(o.update)(grads, state, params, jnp.int32(1), o.hyperparams)
        for o in (plain, wrapped)
    ]
    same(after[0][1], after[1][1])
    for key, u in after[0][0].items():
        u, g = np.asarray(u), np.asarray(grads[key])
        mask = (u * g < 0).astype(np.float32)
        assert name not in FAST or key == "gain" or 0 < mask.mean() < 1
        layers = tuple(range(int(key != "embed"), u.ndim))
        expected = u * mask / np.maximum(mask.mean(layers, keepdims=True), 1e-3)
        np.testing.assert_allclose(after[1][0][key], expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", NO_AVERAGE)
def test_ema_is_the_average_of_the_path_and_the_updates_stay(name):
    specs = small_specs()
    params = arrays(0, specs)
    plain, _ = updates_of(make_optimizer(config(name), specs, 10), params)
    average = {n: np.asarray(x) for n, x in params.items()}
    optimizer = make_optimizer(config(name, EMA), specs, 10)
    found, state = updates_of(optimizer, params)
    for count, (_, updates, now) in enumerate(found, start=1):
        d = min(0.5, (1 + count) / (10 + count))
        average = {n: d * average[n] + (1 - d) * np.asarray(now[n]) for n in average}
        close(updates, plain[count - 1][1], rtol=1e-4)
    close(optimizer.eval_params(found[-1][2], state), average, rtol=1e-4)


def test_an_average_keeps_float32_where_states_have_16_bits():
    specs = small_specs()
    optimizer = make_optimizer(config("adamw", EMA, state_dtype="bfloat16"), specs, 10)
    params = arrays(0, specs)
    shown = optimizer.eval_params(params, optimizer.init(params))
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(shown))


def test_a_changed_decay_is_a_value_of_the_compiled_step():
    specs = small_specs()
    rates = make_optimizer(config("adamw", EMA), specs, 10).hyperparams["groups"]
    assert {float(r["ema_decay"]) for r in rates.values()} == {0.5}


@pytest.mark.slow
def test_an_average_of_16_bit_weights_is_kept_in_float32():
    """A slow average moves by less than 16 bits can tell."""
    specs = small_specs()
    params = {n: x.astype(jnp.bfloat16) for n, x in arrays(0, specs).items()}
    for wrapper in ({"name": "ema"}, TAIL, AHEAD):
        optimizer = make_optimizer(config("adamw", wrapper), specs, 10)
        _, state = updates_of(optimizer, params, range(1))
        kept = state.inner_states["matrix"].inner_state[1]
        assert {x.dtype for x in jax.tree.leaves(kept)} == {jnp.dtype(jnp.float32)}
        shown = optimizer.eval_params(params, state)
        assert {x.dtype for x in jax.tree.leaves(shown)} == {jnp.dtype(jnp.bfloat16)}


def test_a_tail_ema_begins_late():
    specs = small_specs()
    params = arrays(0, specs)
    late = {**EMA, "start_fraction": 0.5}
    optimizer = make_optimizer(config("adamw", late), specs, 6)
    found, state = updates_of(optimizer, params, range(6))
    average = jax.tree.map(np.asarray, found[2][2])
    for count, (_, _, now) in enumerate(found[3:], start=1):
        d = min(0.5, (1 + count) / (10 + count))
        average = {n: d * average[n] + (1 - d) * np.asarray(now[n]) for n in average}
    close(optimizer.eval_params(found[-1][2], state), average, rtol=1e-4)
    _, early = updates_of(optimizer, params, range(3))
    close(optimizer.eval_params(found[2][2], early), found[2][2])


TAIL = {"name": "tail_average", "tail_fraction": 0.7, "every": 2}


def test_a_tail_average_is_the_mean_of_every_second_weights_up_to_the_last():
    specs = small_specs()
    params = arrays(0, specs)
    plain, _ = updates_of(make_optimizer(config("muon"), specs, 8), params, range(8))
    optimizer = make_optimizer(config("muon", TAIL), specs, 8)
    found, state = updates_of(optimizer, params, range(8))
    close([now for _, _, now in found], [now for _, _, now in plain])
    mean = jax.tree.map(lambda *x: sum(x) / 3, *(found[i][2] for i in (3, 5, 7)))
    close(optimizer.eval_params(found[-1][2], state), mean, rtol=1e-4)
    _, before = updates_of(optimizer, params, range(3))
    same(optimizer.eval_params(found[2][2], before), found[2][2])


AHEAD = {"name": "ema_nesterov", "decay": 0.8, "start_fraction": 0.25, "end_fraction": 0.75}


def looks_ahead(name, total):
    """x and y of the paper's two lines, by numpy, around an optimizer without the wrapper."""
    specs = small_specs()
    optimizer = make_optimizer(config(name, schedule={"name": "linear"}), specs, total)
    x = arrays(0, specs)
    m, state = jax.tree.map(jnp.zeros_like, x), optimizer.init(x)
    path = []
    for step in range(total):
        inside = total * 0.25 <= step < total * 0.75
        b = 0.6 * (1 - step / total) * inside
        y = jax.tree.map(lambda x, m, b=b: x + b * m, x, m)
        path.append((x, y))
        u, state = jax.jit(optimizer.update)(
            arrays(step, x), state, y, jnp.int32(step), optimizer.hyperparams
        )
        new = jax.tree.map(jnp.add, y, u)
        m = jax.tree.map(lambda m, n, x: 0.8 * m + (1 - 0.8) * (n - x), m, new, x)
        x = new
    return [*path, (x, x)]


@pytest.mark.parametrize("name", NO_AVERAGE)
@pytest.mark.quick("adamw")
def test_ema_nesterov_steps_from_weights_that_look_ahead(name):
    specs, total = small_specs(), 8
    path = looks_ahead(name, total)
    c = config(name, AHEAD, schedule={"name": "linear"})
    optimizer = make_optimizer(c, specs, total)
    moved = lambda tree: jax.tree.map(jnp.subtract, tree, path[0][0])
    for steps in (4, total):
        found, state = updates_of(optimizer, path[0][0], range(steps))
        for (_, _, now), (_, y) in zip(found, path[1:], strict=steps == total):
            close(moved(now), moved(y), rtol=1e-2, atol=1e-5)
        shown = optimizer.eval_params(found[-1][2], state)
        close(moved(shown), moved(path[steps][0]), rtol=1e-2, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("average", [EMA, TAIL], ids=["ema", "tail_average"])
def test_an_average_around_a_look_ahead_is_of_where_it_stands(average):
    specs, total = small_specs(), 6
    ahead = {**AHEAD, "start_fraction": 0, "end_fraction": 1}
    one, other = (
        make_optimizer(config("adamw", *w, schedule={"name": "linear"}), specs, total)
        for w in ((ahead,), (ahead, average))
    )
    params = arrays(0, specs)
    reached = []
    for steps in range(1, total + 1):
        found, state = updates_of(one, params, range(steps))
        reached.append(one.eval_params(found[-1][2], state))
    found, state = updates_of(other, params, range(total))
    expected = params
    for count, now in enumerate(reached, start=1):
        d = min(0.5, (1 + count) / (10 + count))
        expected = jax.tree.map(lambda a, p, d=d: d * a + (1 - d) * p, expected, now)
    if average is TAIL:
        expected = jax.tree.map(lambda *x: sum(x) / 3, *reached[1::2])
    close(other.eval_params(found[-1][2], state), expected, rtol=1e-4)


BOTH = CAUTIOUS, EMA
ALL_THREE = CAUTIOUS, {**AHEAD, "start_fraction": 0}, TAIL


@pytest.fixture(scope="module")
def trained():
    """(task, hyperparams, state after two steps on one device)."""
    c = resolved(**LLAMA | {"depth": 1})
    task, hyperparams = make_spec(c, config("adamw", *ALL_THREE))
    return task, hyperparams, steps(task, hyperparams, mesh_of(), begin(task, mesh_of()), (0, 1))


def steps(task, hyperparams, mesh, state, seeds):
    with jax.set_mesh(mesh):
        step = make_step(task, mesh)
        for seed in seeds:
            placed = place_batch(batch(micro=8, seed=seed), mesh, 1)
            state, _ = step(state, placed, hyperparams)
    return state


@pytest.mark.slow
def test_sharded_equals_one_device_and_the_average_lies_as_its_parameters(trained):
    task, hyperparams, one = trained
    mesh = mesh_of(data=2, fsdp=2, tensor=2)
    many = steps(task, hyperparams, mesh, begin(task, mesh), (0, 1))
    close(many.params, one.params, rtol=1e-4, atol=1e-5)
    shown = task.optimizer.eval_params(many.params, many.optimizer)
    close(shown, task.optimizer.eval_params(one.params, one.optimizer), rtol=1e-4, atol=1e-5)
    for average, param in zip(jax.tree.leaves(shown), jax.tree.leaves(many.params)):
        assert average.sharding.is_equivalent_to(param.sharding, param.ndim)
        assert average.dtype == param.dtype


@pytest.mark.slow
def test_resumed_is_uninterrupted_bit_for_bit(trained):
    task, hyperparams, state = trained
    mesh = mesh_of()
    again = jax.device_put(jax.device_get(state), state_shardings(task, mesh))
    kept = jax.tree.map(jnp.copy, state)
    ends = [steps(task, hyperparams, mesh, start, (2, 3)) for start in (kept, again)]
    same(*ends)


def test_replicas_merge_into_the_mean_of_their_averages():
    specs = small_specs()
    optimizer = make_optimizer(config("adamw", *BOTH), specs, 10)
    ends = []
    for seed in (0, 5):
        params = arrays(seed, specs)
        found, state = updates_of(optimizer, params, (seed + 1, seed + 2))
        ends.append((found[-1][2], state))
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *(state for _, state in ends))
    got = optimizer.eval_params(ends[0][0], merge_states(stacked))
    shown = [optimizer.eval_params(*end) for end in ends]
    close(got, jax.tree.map(lambda a, b: (a + b) / 2, *shown))


@pytest.mark.parametrize(
    ("name", "wrappers", "message"),
    [
        ("adamw", (EMA, CAUTIOUS), "name it last"),
        ("adamw", (EMA, TAIL), "name it last"),
        ("adamw", (EMA, AHEAD), "name it last"),
        ("schedule_free", (AHEAD,), "averages its weights itself; leave ema_nesterov out"),
        ("adamw", (CAUTIOUS, CAUTIOUS), "cautious is listed twice"),
        ("schedule_free", (EMA,), "averages its weights itself; leave ema out"),
    ],
)
def test_wrappers_that_do_not_go_together_are_refused(name, wrappers, message):
    with pytest.raises(UserError, match=message):
        make_optimizer(config(name, *wrappers), small_specs(), 10)


def test_every_wrapper_is_tried_here():
    assert {"cautious", "ema", "ema_nesterov", "tail_average", "sr_ste", *MASKS} == set(
        WRAPPERS
    )  # tests/optim/test_masks.py has those


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_a_run_validates_and_exports_the_average_or_the_trained_weights(tmp_path):
    """The same run twice; a checkpoint gives the trained weights."""
    for export in ("average", "trained"):
        wrapper = f"{{name: ema, decay: 0.9, validate_trained: true, export: {export}}}"
        given = run_overrides(tmp_path, run__name=export, optim__wrappers=f"[{wrapper}]", **QUICK)
        assert main(given) == 0
        row = rows_of(tmp_path / export, "validation")[-1]
        assert row["loss"] != row["trained_loss"]
    average, trained = (load_saved(tmp_path / name).params for name in ("average", "trained"))
    same(trained, load_saved(tmp_path / "average", 6).params)
    differ = jax.tree.map(lambda a, b: bool((a != b).any()), average, trained)
    assert all(jax.tree.leaves(differ))
