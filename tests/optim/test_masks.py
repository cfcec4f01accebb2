"""Masked weights are exactly zero after each update, sharded, resumed and exported too."""

import json
import shutil
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError
from tiny import (
    LLAMA,
    QUICK,
    batch,
    begin_random,
    close,
    forget_end,
    make_spec,
    mesh_of,
    random_params,
    resolved,
    rows_of,
    run_overrides,
    same,
    weights_of,
)

from jaxtrain.config.features import MASKS
from jaxtrain.main import main
from jaxtrain.optim import OptimConfig, make_optimizer
from jaxtrain.optim.dynamic_sparsity import RigLConfig, weights_left
from jaxtrain.optim.lottery_ticket import LotteryTicketConfig, lottery_ticket
from jaxtrain.optim.masks import keep_largest, keep_largest_of_all, magnitude
from jaxtrain.parallel import place_batch, shardings
from jaxtrain.settings import UserError
from jaxtrain.train.step import make_step, state_shardings
from jaxtrain.weights.contract import flatten
from jaxtrain.weights.params import Initializer, ParamSpec

GRADUAL = {"name": "gradual_pruning", "sparsity": 0.5, "begin": 1, "end": 3, "every": 1}


def config(name="muon", *wrappers, **fields):
    fields = {"schedule": {"name": "constant"}, "wrappers": wrappers, **fields}
    return TypeAdapter(OptimConfig).validate_python({"name": name, **fields})


def spec(shape, axes, role="matrix", group=None):
    ins, outs = ((len(shape) - 2,), (len(shape) - 1,)) if role == "matrix" else ((), ())
    return ParamSpec(shape, axes, Initializer(jax.random.normal), role, ins, outs, group or role)


SPECS = {
    "blocks": {
        "down": spec((2, 32, 8), ("layers", "hidden", "embed")),
        "up": spec((2, 8, 32), ("layers", "embed", "hidden")),
    },
    "embed": spec((6, 8), ("vocab", "embed"), "embedding"),
    "experts": spec((2, 2, 8, 16), ("layers", "experts", "embed", "hidden"), group="experts"),
    "router": spec((2, 8, 2), ("layers", "embed", None), group="router"),
}
BLOCKS = ["blocks/down", "blocks/up", "experts"]


def walk(c, steps, mesh=None, start=None, begin=0):
    """(parameters, state, metrics) after each of some steps with random gradients."""
    optimizer = make_optimizer(c, SPECS, STEPS)
    params = random_params(SPECS)
    if mesh is not None:
        params = jax.device_put(params, shardings(SPECS, mesh))
    params, state = start or (params, jax.jit(optimizer.init)(params))
    apply = jax.jit(optimizer.apply)
    for step in range(begin, steps):
        grads = random_params(SPECS, seed=step + 1)
        params, state = apply(grads, state, params, jnp.int32(step), optimizer.hyperparams)
        yield params, state, optimizer.metrics(state)


def zeros_of(params):
    """Zeros of each matrix of the blocks, by name: [L]; there are none elsewhere."""
    flat = {name: np.asarray(p) for name, p in flatten(params).items()}
    assert all((p != 0).all() for name, p in flat.items() if name not in BLOCKS)
    return {name: (flat[name] == 0).sum((-2, -1)) for name in BLOCKS}


def masks_of(state):
    mine = state.inner_states["matrix"].inner_state
    return getattr(mine, "masks", None) or mine.inner.masks


def size_of(name):
    i, o = flatten(SPECS)[name].shape[-2:]
    return i * o


def steps(task, hyperparams, mesh, seeds, state):
    """The state after a step of the model for each seed."""
    state = begin_random(task, mesh) if state is None else jax.tree.map(jnp.copy, state)
    with jax.set_mesh(mesh):
        step = make_step(task, mesh)
        for seed in seeds:
            rows = place_batch(batch(micro=8, seed=seed), mesh, 1)
            state, _ = step(state, rows, hyperparams)
    return state


# ---- the largest of many ------------------------------------------------------------------------


@pytest.mark.slow
def test_keep_largest_keeps_exactly_so_many_and_of_equal_ones_the_last():
    x = np.array([[[3, -1, 0], [0, -3, 2]], [[0, 0, 0], [0, 0, 0]]], np.float32)
    kept = {k: np.asarray(keep_largest(magnitude(jnp.asarray(x)), k)) for k in range(7)}
    assert all((kept[k].sum((-2, -1)) == k).all() for k in kept)
    np.testing.assert_array_equal(kept[1][0], [[0, 0, 0], [0, 1, 0]])
    np.testing.assert_array_equal(kept[3][0], [[1, 0, 0], [0, 1, 1]])
    np.testing.assert_array_equal(kept[2][1], [[0, 0, 0], [0, 1, 1]])


@pytest.mark.slow
def test_keep_largest_is_that_of_a_sort():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 16, 24)).astype(np.float32))
    masks = jax.jit(keep_largest)(magnitude(x), jnp.int32(100))
    for one, mask in zip(np.abs(x), np.asarray(masks)):
        assert set(one[mask]) == set(np.sort(one, axis=None)[-100:])
    two = {"a": x[:, :4], "b": x[:, 4:]}
    masks = keep_largest_of_all({name: magnitude(v) for name, v in two.items()}, 100)
    kept = np.concatenate([np.abs(v)[np.asarray(masks[name])] for name, v in two.items()])
    assert set(kept) == set(np.sort(np.abs(x), axis=None)[-100:])


# ---- gradual pruning ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["muon", "adamw"])
@pytest.mark.quick("adamw")
def test_gradual_pruning_follows_the_cubic_and_is_exact(name):
    """The schedule of the paper; masked weights have zero moments, and no others are zero."""
    walked = list(walk(config(name, GRADUAL), 4))
    for step, (params, _, metrics) in enumerate(walked, 1):
        share = 0 if step < 2 else 1 if step >= 3 else 1 - (1 - 1 / 2) ** 3
        found = zeros_of(params)
        for key, zeros in found.items():
            assert (zeros == int(0.5 * share * size_of(key))).all()
        np.testing.assert_allclose(metrics["sparsity"], 0.5 * share, atol=1e-2)
    params, state, _ = walked[-1]
    moments = jax.tree_util.tree_leaves_with_path(state.inner_states["matrix"])
    up = [x for path, x in moments if "up" in str(path) and x.shape == (2, 8, 32)]
    assert len(up) == (2 if name == "muon" else 3)  # the mask and the moments
    for x in up:
        np.testing.assert_array_equal(x == 0, params["blocks"]["up"] == 0)


def test_a_global_scope_prunes_matrices_by_one_threshold():
    *_, (params, _, _) = walk(config("adamw", GRADUAL | {"scope": "global"}), 3)
    found = zeros_of(params)
    sizes = {name: size_of(name) * zeros.size for name, zeros in found.items()}
    assert sum(zeros.sum() for zeros in found.values()) == round(0.5 * sum(sizes.values()))
    assert len({zeros.sum() / sizes[name] for name, zeros in found.items()}) > 1


# ---- SET, RigL ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "optimizer"), [("set", "adamw"), ("rigl", "muon")])
@pytest.mark.slow
def test_as_many_weights_stay_while_others_grow(name, optimizer):
    """By hand: the smallest go, those with the largest gradients (RigL) or random ones come."""
    walked = list(walk(config(optimizer, METHODS[name]), 4))
    masks = [x.inner_states["matrix"].inner_state.masks for _, x, _ in walked]
    for (params, _, metrics), mask in zip(walked, masks):
        assert metrics["sparsity"] == pytest.approx(0.5, abs=0.01)
        for key in BLOCKS:
            assert (flatten(params)[key][~mask[key]] == 0).all()
            [left] = set(np.ravel(mask[key].sum((-2, -1))).tolist())
            assert left == size_of(key) / 2 if name == "set" else 0 < left < size_of(key)
    share = 0.3 / 2 * (1 + np.cos(np.pi * 2 / 10))
    for key in BLOCKS:
        same(masks[1][key], masks[2][key])
        old, new = np.asarray(masks[0][key]), np.asarray(masks[1][key])
        grads = np.abs(flatten(random_params(SPECS, seed=2))[key])
        for layer in np.ndindex(old.shape[:-2]):
            gone, come = old[layer] & ~new[layer], ~old[layer] & new[layer]
            assert 0 < gone.sum() == come.sum() <= int(share * old[layer].sum())
            if name == "rigl":
                never = ~old[layer] & ~new[layer]
                assert grads[layer][come].min() >= grads[layer][never].max()
    grown = ~np.asarray(masks[0]["experts"]) & np.asarray(masks[1]["experts"])
    assert (np.asarray(walked[1][0]["experts"])[grown] == 0).all()
    moments = jax.tree_util.tree_leaves_with_path(walked[1][1].inner_states["matrix"])
    for path, x in moments:
        if "experts" in str(path) and x.dtype != bool and x.shape == grown.shape:
            assert (np.asarray(x)[grown] == 0).all()
    moved = np.asarray(walked[2][0]["experts"])[grown & np.asarray(masks[2]["experts"])]
    assert (moved != 0).all() and len(moved) > 2


def test_erdos_renyi_leaves_small_matrices_more_and_none_more_than_all():
    c = TypeAdapter(RigLConfig).validate_python(RIGL | {"sparsity": 0.8})
    shapes = {"small": (2, 4, 4), "wide": (2, 8, 64), "large": (1, 64, 64)}
    params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    left = weights_left(c, params)
    assert left["small"] == 16
    rest = 0.2 * (32 + 1024 + 4096) - 32
    factor = rest / (2 * 72 + 128)
    assert left == {"small": 16, "wide": round(factor * 72), "large": round(factor * 128)}


# ---- early-bird tickets -------------------------------------------------------------------------


@pytest.mark.slow
def test_an_early_bird_ticket_is_drawn_when_masks_settle_and_stays():
    """Distances by numpy; the path before the ticket is that of the optimizer alone."""
    c = config("adamw", EARLY_BIRD | {"epsilon": 0.08, "patience": 2}, learning_rate=0.1)
    free = [flatten(params) for params, *_ in walk(config("adamw", learning_rate=0.1), 6)]
    halves = []
    for params in free:
        masks = [keep_largest(magnitude(params[k]), size_of(k) // 2) for k in BLOCKS]
        halves.append(np.concatenate([np.ravel(mask) for mask in masks]))
    far = [1.0, *(float((a != b).mean()) for a, b in pairwise(halves))]
    due = next(i for i in range(6) if max(far[i - 1 : i + 1], default=1) < 0.08)
    assert 2 < due < 5
    for step, (params, state, metrics) in enumerate(walk(c, 6)):
        assert metrics["mask_distance"] == pytest.approx(far[min(step, due)], abs=1e-6)
        assert metrics["sparsity"] == (0.5 if step >= due else 0)
        for key, zeros in zeros_of(params).items():
            assert (zeros == (size_of(key) / 2 if step >= due else 0)).all()
        if step >= due:
            masks = state.inner_states["matrix"].inner_state.masks
            found = np.concatenate([np.ravel(masks[key]) for key in BLOCKS])
            np.testing.assert_array_equal(found, halves[due])


# ---- lottery tickets ----------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["matrix", "global"])
@pytest.mark.slow
def test_the_winning_ticket_begins_again_from_an_early_step(scope):
    """Half of each matrix goes after step 4; all else is as after step 2, with fresh moments."""
    walked = list(walk(config("adamw", LOTTERY | {"scope": scope}), STEPS))
    early, ends = flatten(walked[1][0]), flatten(walked[3][0])
    trained = [flatten(params) for params, *_ in walk(config("adamw"), 4)][-1]
    sizes = {key: early[key].size for key in BLOCKS}
    assert sum(int((ends[key] == 0).sum()) for key in BLOCKS) == sum(sizes.values()) / 2
    for key, p in ends.items():
        kept = np.asarray(p != 0)
        np.testing.assert_allclose(p[kept], np.asarray(early[key])[kept], rtol=1e-5, atol=1e-6)
        if key in BLOCKS and scope == "matrix":
            mask = keep_largest(magnitude(trained[key]), size_of(key) // 2)
            np.testing.assert_array_equal(kept, mask)
        assert key in BLOCKS or kept.all()
    state = walked[3][1].inner_states["matrix"].inner_state.inner.inner
    assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(state))
    last = zeros_of(walked[-1][0])
    same(last, zeros_of(walked[3][0]))
    assert walked[-1][2]["sparsity"] == 0.5 and walked[2][2]["sparsity"] == 0


def test_later_rounds_take_the_schedule_from_the_early_step():
    c = TypeAdapter(LotteryTicketConfig).validate_python(LOTTERY | {"rounds": 3})
    restarts = lottery_ticket(c).restarts
    assert restarts is not None and restarts.total == 8
    assert [int(restarts(jnp.int32(step))) for step in range(8)] == [0, 1, 2, 3, 2, 3, 2, 3]
    with pytest.raises(UserError, match="its rounds take 6 steps, not 10; set train.steps=6"):
        make_optimizer(config("adamw", LOTTERY), SPECS, 10)
    fields = {"name": "linear", "warmup_steps": 0}
    o = make_optimizer(config("adamw", LOTTERY, schedule=fields), SPECS, STEPS)
    rates = [float(o.rate(jnp.int32(step), o.hyperparams)) for step in range(STEPS)]
    assert rates[4:] == rates[2:4] and rates[:4] == sorted(rates[:4], reverse=True)


# ---- every method -------------------------------------------------------------------------------

SET = {"name": "set", "sparsity": 0.5, "every": 2, "end": 10, "density": "uniform"}
RIGL = SET | {"name": "rigl", "density": "erdos_renyi"}
EARLY_BIRD = {"name": "early_bird", "sparsity": 0.5, "every": 1, "epsilon": 0.9, "patience": 1}
LOTTERY = {"name": "lottery_ticket", "rounds": 2, "round_steps": 4, "rewind_step": 2}
LOTTERY |= {"prune": 0.5, "scope": "matrix"}
METHODS = {"gradual_pruning": GRADUAL, "set": SET, "rigl": RIGL, "early_bird": EARLY_BIRD}
METHODS["lottery_ticket"] = LOTTERY
STEPS = 6  # of the optimizer's run
EACH = pytest.mark.parametrize("name", METHODS)


@pytest.mark.parametrize("name", ["set", "rigl", "early_bird"])  # draws, gradients, distances
@pytest.mark.slow
def test_sharded_equals_one_device_and_resumed_is_uninterrupted(name):
    """Masks lie as their weights under fsdp; a state that was saved goes on bit for bit."""
    c, mesh = config("adamw", METHODS[name]), mesh_of(fsdp=2)
    one = list(walk(c, 4))
    with jax.set_mesh(mesh):
        many = list(walk(c, 4, mesh))
        places = jax.tree.map(lambda x: x.sharding, many[1][:2])
        saved = jax.device_put(jax.tree.map(np.asarray, many[1][:2]), places)
        *_, resumed = walk(c, 4, mesh, saved, begin=2)
    same(resumed[:2], many[-1][:2])
    params, state, _ = many[-1]
    flat, masks = flatten(params), masks_of(state)
    assert not masks["blocks/up"].sharding.is_fully_replicated
    for key in BLOCKS:
        assert masks[key].sharding.is_equivalent_to(flat[key].sharding, masks[key].ndim)
    same(zeros_of(params), zeros_of(one[-1][0]))
    close(params, one[-1][0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["rigl", "lottery_ticket"])  # what reads gradients; what rewinds
@pytest.mark.slow
def test_a_step_of_the_model_sharded_and_resumed(name):
    c = config("muon", METHODS[name])
    task, hyperparams = make_spec(resolved(**LLAMA | {"depth": 1}), c, STEPS)
    mesh = mesh_of(fsdp=2)
    one = steps(task, hyperparams, mesh_of(), range(4), None)
    between = steps(task, hyperparams, mesh, range(2), None)
    end = steps(task, hyperparams, mesh, (2, 3), between)
    again = jax.device_put(jax.tree.map(np.asarray, between), state_shardings(task, mesh))
    same(steps(task, hyperparams, mesh, (2, 3), again), end)
    close(end.params, one.params, rtol=1e-3, atol=1e-4)
    masks, flat = masks_of(end.optimizer), flatten(end.params)
    for key, mask in masks.items():
        assert mask.sharding.is_equivalent_to(flat[key].sharding, mask.ndim)
        assert (mask | (flat[key] == 0)).all()


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("name", ["gradual_pruning", "lottery_ticket"])
@pytest.mark.slow
def test_a_run_is_resumed_and_exports_exact_zeros(tmp_path, name):
    """Rows report the sparsity; the saved model has as many zeros as the masks say."""
    given = QUICK | {"optim__wrappers": f"[{json.dumps(METHODS[name])}]"}
    whole, parts = tmp_path / "whole" / "tiny", tmp_path / "parts" / "tiny"
    assert main(run_overrides(whole.parent, **given)) == 0
    shutil.copytree(whole, parts)
    forget_end(parts, 6)
    assert main(run_overrides(parts.parent, **given)) == 0
    same(weights_of(parts), weights_of(whole))
    row = rows_of(whole)[-1]
    assert row["sparsity"] == rows_of(parts)[-1]["sparsity"] == pytest.approx(0.5, 0.02)
    weights = weights_of(whole)
    for key in ("q", "k", "v", "out"):
        assert (weights[f"blocks/attention/{key}"] == 0).mean() > 0.1
    assert (weights["embed"] != 0).all()
    assert "Weights of the blocks that are zero" in (whole / "report.html").read_text()


# ---- masks of a pruned model --------------------------------------------------------------------


def test_fixed_masks_are_the_zeros_of_the_start():
    """They stay zero, sharded and resumed too; everything else trains."""
    c, mesh = config("adamw", {"name": "fixed_masks"}), mesh_of(fsdp=2)
    begin = random_params(SPECS)
    keep = np.random.default_rng(0).random((2, 8, 32)) < 0.5
    begin["blocks"]["up"] = begin["blocks"]["up"] * keep
    state = jax.jit(make_optimizer(c, SPECS, STEPS).init)(begin)
    one = list(walk(c, 3, start=(begin, state)))
    with jax.set_mesh(mesh):
        *_, many = walk(c, 3, mesh, jax.device_put((begin, state)))
        *_, resumed = walk(c, 3, mesh, jax.device_put(one[0][:2]), begin=1)
    params, state, metrics = one[-1]
    np.testing.assert_array_equal(params["blocks"]["up"] != 0, keep)
    assert (params["blocks"]["down"] != 0).all() and (params["embed"] != begin["embed"]).all()
    zeros, weights = (~keep).sum(), sum(flatten(SPECS)[name].size for name in BLOCKS)
    assert metrics["sparsity"] == pytest.approx(zeros / weights)
    for end in (many, resumed):
        close(end[0], params, rtol=1e-4, atol=1e-5)
        same(masks_of(end[1]), masks_of(state))


# ---- what does not go together ------------------------------------------------------------------

EMA = {"name": "ema", "decay": 0.9}


@pytest.mark.parametrize(
    ("name", "wrappers", "message"),
    [
        ("adamw", (GRADUAL, {"name": "cautious"}), "gradual_pruning masks what the others give"),
        ("adamw", (GRADUAL, EMA), "their average would not be zero; leave ema out"),
        ("adamw", (EMA, GRADUAL), "their average would not be zero; leave ema out"),
        ("adamw", (GRADUAL, RIGL), "gradual_pruning and rigl each mask the same weights"),
        ("schedule_free", (GRADUAL,), "averages its weights itself; leave gradual_pruning out"),
    ],
)
def test_masks_come_last_and_are_not_averaged(name, wrappers, message):
    with pytest.raises(UserError, match=message):
        make_optimizer(config(name, *wrappers), SPECS, 10)


def test_a_schedule_that_ends_before_it_begins_is_refused():
    with pytest.raises(ValidationError, match="begin 3 is not before end 3"):
        config("adamw", GRADUAL | {"begin": 3})


def test_the_table_of_what_goes_together_knows_every_method():
    assert {*METHODS, "fixed_masks"} == set(MASKS)  # that one begins with a pruned model
