"""The contract that every row of OPTIMIZERS keeps, and the parameter groups."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pydantic import TypeAdapter
from tiny import LLAMA, VOCAB, batch, begin, make_spec, mesh_of, random_params, resolved, same

from jaxtrain.model import Transformer, path_name, split
from jaxtrain.optim import OPTIMIZERS, OptimConfig, make_optimizer
from jaxtrain.optim.param_groups import OptimizerConfig, ParamGroup, build_optimizer
from jaxtrain.optim.schedule import Constant
from jaxtrain.settings import UserError
from jaxtrain.train.step import init_state, make_step, state_shardings

RATES = {
    "muon": {},
    "adamw": {"learning_rate": 1e-2},
    "adamw8bit": {"learning_rate": 1e-2, "min_size": 256},
    "schedule_free": {"learning_rate": 1e-2},
    "lion": {"learning_rate": 5e-3, "adamw_lr": 1e-2},
    "soap": {"learning_rate": 1e-2},
    "galore": {"learning_rate": 0.04, "adamw_lr": 1e-2, "rank": 8, "gap": 10},
    "adafactor": {"learning_rate": 1e-2},
    "sgd": {"learning_rate": 2.0},
    # relative to weights that start at 0, most of them
    "lamb": {"learning_rate": 0.2, "scalar_lr": 0.05, "weight_decay": 0.0},
    "lars": {"learning_rate": 60.0, "scalar_lr": 0.1},
}
STEPS = 40


def config(name, **fields):
    fields = {"schedule": {"name": "constant"}, **RATES.get(name, {}), **fields}
    name, *soap = name.split()
    return TypeAdapter(OptimConfig).validate_python(
        {"name": name, **fields} | ({"soap": {}} if soap else {})
    )


# Whose like remain; all that is left takes half a minute.
SLOW = set(OPTIMIZERS) - {"muon"}
EACH = [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in OPTIMIZERS]


SOAP_MUON = pytest.param("muon soap", marks=pytest.mark.slow)  # with optim.soap


@pytest.fixture(scope="module", params=[*EACH, SOAP_MUON])
def trained(request):
    """(task, hyperparams, compiled step, state, losses) after some steps on one batch."""
    # every role is there, in few arrays
    plain = {"depth": 1, "value_embeddings": False, "smear": False, "backout": False}
    c = resolved(**plain, norm_gain=True)
    task, hyperparams = make_spec(c, config(request.param), STEPS)
    hyperparams = jax.tree.map(jnp.asarray, hyperparams)  # as the loop places them
    step, state = make_step(task, mesh_of()), begin(task, mesh_of())
    rows, losses = batch(micro=8), []
    for _ in range(STEPS):
        state, metrics = step(state, rows, hyperparams)
        losses.append(metrics["loss"])
    return task, hyperparams, step, state, [float(loss) for loss in losses]


@pytest.mark.slow
def test_overfits_a_batch(trained):
    *_, losses = trained
    assert losses[0] == pytest.approx(np.log(VOCAB), abs=0.1)
    assert losses[-1] < 0.5 * losses[0]


def moved_by_the_rate(state):
    """The parameters, or what stands for them where they are an average."""
    leaves = jax.tree_util.tree_leaves_with_path(state.optimizer)
    z = [leaf for path, leaf in leaves if any(getattr(k, "name", "") == "z" for k in path)]
    return z or state.params


def test_a_changed_rate_does_not_recompile_and_counts(trained):
    _, hyperparams, step, state, _ = trained
    before = jax.tree.map(jnp.copy, state)
    halted = jax.tree.map(jnp.copy, hyperparams)
    for rates in halted["groups"].values():
        rates["learning_rate"] = jnp.float32(0.0)
    halted["schedule"]["total_steps"] = jnp.float32(1e6)
    after, metrics = step(jax.tree.map(jnp.copy, state), batch(micro=8), halted)
    same(moved_by_the_rate(after), moved_by_the_rate(before))
    assert metrics["lr"] == 0
    assert step._cache_size() == 1


def test_resumes_bit_for_bit_through_the_host(trained):
    task, hyperparams, step, state, _ = trained
    ends = []
    for start in (
        jax.tree.map(jnp.copy, state),
        jax.device_put(jax.device_get(state), state_shardings(task, mesh_of())),
    ):
        for seed in (1, 2):
            start, metrics = step(start, batch(micro=8, seed=seed), hyperparams)
        ends.append((start, metrics))
    same(*ends)


@pytest.mark.slow
def test_zero_gradients_are_no_nan(trained):
    task, hyperparams, _, state, _ = trained
    zeros = jax.tree.map(jnp.zeros_like, state.params)
    update = jax.jit(task.optimizer.update)
    for optimizer in (jax.jit(task.optimizer.init)(zeros), state.optimizer):
        updates, new = update(zeros, optimizer, state.params, jnp.int32(0), hyperparams)
        for leaf in jax.tree.leaves((updates, new)):
            assert np.isfinite(leaf).all()


def test_state_has_shape_dtype_and_placement_of_its_parameter(trained):
    """Eight bits are a dtype of their own."""
    task = trained[0]
    if "scale" in task.optimizer.hyperparams["groups"]["matrix"]:
        pytest.skip("the states of GaLore's matrices are smaller")
    where = state_shardings(task, mesh_of(2, 2, 2))
    shapes = jax.eval_shape(lambda: init_state(task, 0))
    placed = {}
    for (path, leaf), sharding in zip(
        jax.tree_util.tree_leaves_with_path(shapes.optimizer), jax.tree.leaves(where.optimizer)
    ):
        keys = [str(k.key) for k in path if isinstance(k, jax.tree_util.DictKey)]
        placed.setdefault("/".join(keys[1:]), []).append((leaf.shape, leaf.dtype, sharding.spec))
    for (path, leaf), sharding in zip(
        jax.tree_util.tree_leaves_with_path(shapes.params), jax.tree.leaves(where.params)
    ):
        kinds = [(leaf.shape, dtype, sharding.spec) for dtype in (leaf.dtype, jnp.uint8)]
        assert any(kind in placed[path_name(path)] for kind in kinds)
    assert where.params["blocks"]["ffn"]["up"].spec == jax.P(None, "fsdp", "tensor")


# ---- groups ----------------------------------------------------------------------------------


def specs_of(**changes):
    return split(Transformer(resolved(**changes), VOCAB))[1]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("changes", [{}, LLAMA], ids=["speedrun", "llama"])
def test_every_parameter_is_covered(name, changes):
    make_optimizer(config(name), specs_of(**changes), 10)


def test_an_uncovered_parameter_is_named():
    group = ParamGroup(lambda h: optax.scale(-1.0), {"learning_rate": 1.0})
    table = {"matrix": group, "embedding": group, "scalar": group}
    with pytest.raises(UserError, match=r"no group covers head \(role head\); there are matrix, "):
        build_optimizer(OptimizerConfig(), Constant(), table, specs_of(), 100)


def test_the_finer_group_wins_over_the_role():
    """Each parameter moves by its own group's rate: value embeddings not by the embedding's."""
    specs = specs_of(depth=2)
    move = lambda h: optax.scale(-h["learning_rate"])
    table = {
        name: ParamGroup(move, {"learning_rate": float(rate)})
        for rate, name in enumerate(
            ("matrix", "embedding", "value_embedding", "head", "scalar", "x0_scale"), start=1
        )
    }
    c = OptimizerConfig.model_validate({"schedule": {"name": "constant"}})
    optimizer, params = build_optimizer(c, c.schedule, table, specs, 10), random_params(specs)
    ones = jax.tree.map(jnp.ones_like, params)
    updates, _ = optimizer.update(
        ones, optimizer.init(params), params, jnp.int32(0), optimizer.hyperparams
    )
    moved = {
        path_name(p): -float(u.ravel()[0]) for p, u in jax.tree_util.tree_leaves_with_path(updates)
    }
    assert moved["blocks/attention/q"] == moved["value_embed/gate"] == 1
    assert (moved["embed"], moved["value_embed/table"], moved["head"]) == (2, 3, 4)
    assert moved["smear_scale"] == moved["residual_scale"] == 5
    assert moved["x0_scale"] == 6


def test_more_warmup_than_steps_is_refused():
    with pytest.raises(UserError, match="warmup_steps is 20, but the run has 10 steps"):
        make_optimizer(
            config("adamw", schedule={"name": "cosine", "warmup_steps": 20}), specs_of(), 10
        )


def plain(spec):
    return spec.role in ("gain", "scalar")


def optax_lion(specs):
    """Lion for the matrices, AdamW for the rest."""
    parts = {
        "lion": optax.lion(5e-3, 0.9, 0.99, weight_decay=0.5),
        "decayed": optax.adamw(1e-2, 0.9, 0.95, 1e-10, weight_decay=0.1),
        "plain": optax.adam(1e-2, 0.9, 0.95, 1e-10),
    }
    label = lambda s: "lion" if s.role == "matrix" else "plain" if plain(s) else "decayed"
    return optax.partition(parts, jax.tree.map(label, specs))


def optax_adamw(specs):
    decayed = jax.tree.map(lambda s: not plain(s), specs)
    return optax.adamw(1e-2, 0.9, 0.95, 1e-8, weight_decay=0.1, mask=decayed)


@pytest.mark.parametrize(("name", "reference"), [("adamw", optax_adamw), ("lion", optax_lion)])
def test_adamw_and_lion_are_optaxs_and_gains_and_scalars_do_not_decay(name, reference):
    specs = specs_of(depth=1, norm_gain=True)
    params, grads = random_params(specs, 0), random_params(specs, 1)
    theirs = reference(specs)
    ours = make_optimizer(config(name), specs, 10)
    mine, other = ours.init(params), theirs.init(params)
    update, update_theirs = jax.jit(ours.update), jax.jit(theirs.update)
    for step in range(2):
        expected, other = update_theirs(grads, other, params)
        updates, mine = update(grads, mine, params, jnp.int32(step), ours.hyperparams)
        for a, b in zip(jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8)
