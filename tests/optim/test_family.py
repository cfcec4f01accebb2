"""Each optimizer by what is its own; the contract that all keep is in test_optimizers.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gradient_paths import ADAM, arrays, gradients, walk
from pydantic import TypeAdapter
from tiny import LLAMA, VOCAB, batch, begin_random, make_spec, mesh_of, random_params, resolved

from jaxtrain.model import Transformer, path_name, split
from jaxtrain.optim import OptimConfig, make_optimizer
from jaxtrain.optim.adafactor import make_adafactor
from jaxtrain.optim.adamw import make_adamw
from jaxtrain.optim.adamw8bit import code_values, decode, encode, make_adamw8bit
from jaxtrain.optim.lamb import make_lamb
from jaxtrain.optim.lars import make_lars
from jaxtrain.optim.schedule_free import make_schedule_free
from jaxtrain.optim.sgd import make_sgd
from jaxtrain.parallel import place_batch
from jaxtrain.settings import UserError
from jaxtrain.train.step import make_step

MOMENTUM = {"learning_rate": 0.1, "weight_decay": 0.01, "momentum": 0.9}


def config(name, **fields):
    fields = {"name": name, "schedule": {"name": "constant"}, **fields}
    return TypeAdapter(OptimConfig).validate_python(fields)


def specs_of(**changes):
    return split(Transformer(resolved(**changes), VOCAB))[1]


# ---- SGD, LAMB, LARS, Adafactor ------------------------------------------------------------------


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_by_hand(nesterov):
    p = arrays(4, 6)
    grads = gradients(4, 6)
    path, _ = walk(make_sgd(nesterov)(MOMENTUM), p, grads)
    m = jnp.zeros_like(p)
    for g, got in zip(grads, path[1:]):
        m = 0.9 * m + g
        p = p - 0.1 * ((g + 0.9 * m if nesterov else m) + 0.01 * p)
        np.testing.assert_allclose(got, p, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (make_lamb(ADAM), optax.lamb(0.01, 0.9, 0.95, 1e-8, weight_decay=0.1)),
        (
            make_lars({**MOMENTUM, "trust_coefficient": 0.02}),
            optax.lars(0.1, 0.01, trust_coefficient=0.02),
        ),
    ],
    ids=["lamb", "lars"],
)
def test_trust_ratios_are_of_each_matrix_of_a_stack(ours, theirs):
    p = arrays(3, 4, 6) * jnp.float32([1, 10, 100]).reshape(3, 1, 1)
    stacked = walk(ours, p, gradients(3, 4, 6))[0][-1]
    alone = [walk(theirs, p[i], [g[i] for g in gradients(3, 4, 6)])[0][-1] for i in range(3)]
    np.testing.assert_allclose(stacked, jnp.stack(alone), rtol=1e-5, atol=1e-5)
    whole = walk(theirs, p, gradients(3, 4, 6))[0][-1]
    assert np.abs(stacked - whole).max() > 0.01


@pytest.mark.parametrize("relative", [False, True])
def test_adafactor_is_optaxs_and_keeps_sums_of_large_matrices(relative):
    rates = {
        "learning_rate": 0.01,
        "weight_decay": 0.0,
        "decay_power": 0.8,
        "clipping_threshold": 1.0,
    }
    p = 0.02 * arrays(128, 160)
    theirs = optax.adafactor(0.01, multiply_by_parameter_scale=relative)
    path, state = walk(make_adafactor(relative)(rates), p, gradients(128, 160))
    expected = walk(theirs, p, gradients(128, 160))[0]
    np.testing.assert_allclose(path[-1], expected[-1], rtol=1e-5, atol=1e-6)
    assert sum(x.nbytes for x in jax.tree.leaves(state)) < 0.02 * p.nbytes


# ---- schedule-free -------------------------------------------------------------------------------


def test_the_evaluated_parameters_are_the_average_of_the_path():
    """At a constant rate, the plain mean of Adam's own iterates z."""
    tx = make_schedule_free(ADAM)
    p, path = arrays(4, 6), []
    state = tx.init(p)
    for g in gradients(4, 6, steps=5):
        updates, state = jax.jit(tx.update)(g, state, p)
        p = optax.apply_updates(p, updates)
        path.append(state.z)
    average = optax.contrib.schedule_free_eval_params(state, p)
    np.testing.assert_allclose(average, np.mean(path, axis=0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(p, 0.9 * average + 0.1 * path[-1], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_eval_params_of_the_optimizer():
    """A whole tree with bfloat16 embeddings; the same parameters for every other optimizer."""
    specs = specs_of(depth=1, embedding_dtype="bfloat16")
    params, grads = random_params(specs), random_params(specs, 1)
    optimizer = make_optimizer(config("schedule_free", learning_rate=0.1), specs, 10)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for step in range(2):
        updates, state = update(grads, state, params, jnp.int32(step), optimizer.hyperparams)
        params = optax.apply_updates(params, updates)
    average = jax.jit(optimizer.eval_params)(params, state)
    for x, p in zip(jax.tree.leaves(average), jax.tree.leaves(params), strict=True):
        assert (x.shape, x.dtype) == (p.shape, p.dtype)
        assert (x != p).any()
    # two steps from y against g: the average lies half a step behind z
    z = state.inner_states["matrix"].inner_state.z["blocks"]["ffn"]["up"]
    up = lambda tree: tree["blocks"]["ffn"]["up"]
    np.testing.assert_allclose(up(params), 0.9 * up(average) + 0.1 * z, rtol=1e-4, atol=1e-5)
    plain = make_optimizer(config("adamw"), specs, 10)
    assert plain.eval_params(params, plain.init(params)) is params


# ---- 8 bits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("signed", [True, False])
def test_the_dynamic_code(signed):
    """256 values from below 1e-6 to 1, about a percent apart at the top, and all are kept."""
    values = code_values(signed)
    assert len(values) == 256 and (np.diff(values) > 0).all()
    assert {0.0, 1.0} <= set(values) and 0 < values[values > 0].min() < 1e-6
    x = jnp.asarray(values, jnp.float32)
    codes, scale = encode(x, 256, signed)
    np.testing.assert_array_equal(codes, np.arange(256))
    np.testing.assert_allclose(decode(codes, scale, 256, signed), values, rtol=1e-6)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.quick("True")
def test_encoding_finds_the_nearest_value(signed):
    values = code_values(signed).astype(np.float32)
    x = np.float32(10) ** np.random.default_rng(0).uniform(-8, 0, 2000).astype(np.float32)
    x = np.concatenate([[1.0], x]) * (np.where(np.arange(2001) % 3, 1, -1) if signed else 1)
    got = values[np.asarray(encode(jnp.asarray(x, jnp.float32), 4096, signed)[0])]
    error = np.abs(got - x)
    best = np.abs(values[:, None] - x).min(axis=0)
    if not signed:  # what is above 0 stays above 0
        lifted = x < values[1] / 2
        np.testing.assert_array_equal(got[lifted], values[1])
        error, best = error[~lifted], best[~lifted]
    np.testing.assert_allclose(error, best, rtol=1e-3, atol=1e-9)


@pytest.mark.slow
def test_blocks_have_their_own_scale_and_rows_may_be_ragged():
    x = arrays(3, 10) * jnp.logspace(0, -9, 10)[None]
    codes, scale = encode(x, 4, True)
    assert codes.dtype == jnp.uint8 and codes.shape == x.shape and scale.shape == (3, 3)
    parts = [np.abs(x[:, i : i + 4]).max(axis=1) for i in (0, 4, 8)]
    np.testing.assert_array_equal(scale, np.stack(parts, axis=1))
    np.testing.assert_allclose(
        decode(codes, scale, 4, True)[:, [0, 4, 8]], x[:, [0, 4, 8]], rtol=0.3
    )
    zeros = jnp.zeros((2, 8))
    np.testing.assert_array_equal(decode(*encode(zeros, 4, False), 4, False), zeros)


@pytest.mark.slow
def test_8_bits_track_adamw_over_mixed_gradient_scales():
    """Neighbours whose gradients differ by 10^4: each still moves as AdamW moves it."""
    scales = jnp.logspace(0, -4, 64)[None, np.random.default_rng(0).permutation(64)]
    grads = [scales * (1 + 0.5 * g) for g in gradients(64, 64, steps=30)]
    p = arrays(64, 64)
    exact = walk(make_adamw(ADAM), p, grads)[0][-1] - p
    coded = walk(make_adamw8bit(256, 0)(ADAM), p, grads)[0][-1] - p
    ratio = np.asarray(jnp.sum(coded * exact, axis=0) / jnp.sum(exact**2, axis=0))
    near, far = np.asarray(scales[0] > 1e-3), np.asarray(scales[0] < 2e-4)
    np.testing.assert_allclose(ratio[near], 1, atol=0.1)
    assert (0.05 < ratio[far]).all() and ratio.max() < 1.3  # below the code, slower; never wild


def test_8_bit_states_are_a_quarter_and_only_of_large_matrices():
    specs = specs_of(depth=2)
    state = jax.eval_shape(make_optimizer(config("adamw8bit"), specs, 10).init, specs_shapes(specs))
    wide = jax.eval_shape(make_optimizer(config("adamw"), specs, 10).init, specs_shapes(specs))
    size = lambda s: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(s))
    up = lambda s: [x for p, x in jax.tree_util.tree_leaves_with_path(s) if "'up'" in str(p)]
    assert size(up(state)) < 0.3 * size(up(wide))
    kinds = {}
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        names = [str(k.key) for k in path if isinstance(k, jax.tree_util.DictKey)][1:]
        kinds.setdefault("/".join(names), set()).add(str(x.dtype))
    assert kinds["blocks/ffn/up"] == {"uint8", "float32"}  # float32 are its scales
    assert kinds["embed"] == kinds["value_embed/gate"] == kinds["smear_gate"] == {"float32"}


@pytest.mark.slow
def test_bfloat16_states_leave_the_scales_of_8_bits_in_float32():
    """And the update is the one that 8 bits make; what has no codes is narrowed."""
    specs = specs_of(depth=2, value_embeddings=False, smear=False)
    params, grads, ends = random_params(specs), random_params(specs, 1), []
    for dtype in ("float32", "bfloat16"):
        optimizer = make_optimizer(config("adamw8bit", state_dtype=dtype), specs, 10)
        state, update = optimizer.init(params), jax.jit(optimizer.update)
        for step in range(3):
            updates, state = update(grads, state, params, jnp.int32(step), optimizer.hyperparams)
        ends.append((updates["blocks"]["ffn"]["up"], state))
    np.testing.assert_allclose(ends[0][0], ends[1][0], rtol=1e-6)  # float32's last bits
    kinds = {"blocks": set(), "embed": set()}
    for path, x in jax.tree_util.tree_leaves_with_path(ends[1][1]):
        names = [k.key for k in path if isinstance(k, jax.tree_util.DictKey)][1:]
        if names[-1:] in (["up"], ["embed"]):
            kinds[names[0]].add(str(x.dtype))
    assert kinds == {"blocks": {"uint8", "float32"}, "embed": {"bfloat16"}}


def specs_shapes(specs):
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), specs)


@pytest.mark.slow
def test_a_state_of_another_block_size_is_refused():
    p, g = arrays(16, 16), arrays(16, 16, seed=1)
    _, state = walk(make_adamw8bit(256, 0)(ADAM), p, [g])
    message = "block_size is 128, but the 8-bit state was saved with 256: set optim.block_size=256"
    with pytest.raises(UserError, match=message):
        make_adamw8bit(128, 0)(ADAM).update(g, state, p)


# ---- on a mesh, groups ---------------------------------------------------------------------------


TOLERANCES = {"adamw8bit": 1e-2, "lamb": 1e-4, "muon": 1e-2, "galore": 1e-2}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tolerance"), TOLERANCES.items())
def test_four_devices_train_as_one(name, tolerance):
    """What looks beyond single values: norms, blocks, eigenvectors (Muon with SOAP)."""
    special = {
        "adamw8bit": {"min_size": 256, "block_size": 16},
        "muon": {"soap": {}},
        "galore": {"rank": 8},
    }
    fields = special.get(name, {})
    task, hyperparams = make_spec(resolved(**LLAMA | {"depth": 1}), config(name, **fields))
    losses = []
    for mesh in (mesh_of(), mesh_of(fsdp=2, tensor=2)):
        with jax.set_mesh(mesh):
            step, state = make_step(task, mesh), begin_random(task, mesh)
            rows = place_batch(batch(8, micro=8), mesh, batch_dim=1)
            for _ in range(3):
                state, metrics = step(state, rows, hyperparams)
            losses.append(float(metrics["loss"]))
    assert losses[0] == pytest.approx(losses[1], rel=tolerance)


@pytest.mark.parametrize("name", ["muon", "soap"])
def test_a_matrix_without_declared_dims_is_named(name):
    specs = specs_of(depth=1)
    up = specs["blocks"]["ffn"]["up"]
    specs["blocks"]["ffn"]["up"] = dataclasses.replace(up, ins=(), outs=())
    with pytest.raises(UserError, match=r"blocks/ffn/up is in group matrix, .* are \(\) and \(\)"):
        make_optimizer(config(name), specs, 10)
    make_optimizer(config("adamw"), specs, 10)


# ---- width transfer ------------------------------------------------------------------------------


def moves(optimizer, specs):
    """Path -> how far one step moves the parameter per unit of its rate, and its decay."""
    params = random_params(specs)
    ones = jax.tree.map(jnp.ones_like, params)
    updates, _ = optimizer.update(
        ones, optimizer.init(params), params, jnp.int32(0), optimizer.hyperparams
    )
    flat = jax.tree_util.tree_leaves_with_path(updates)
    return {path_name(p): float(jnp.abs(u).mean()) for p, u in flat}


@pytest.mark.parametrize(
    ("name", "fields", "matrix", "head", "embed"),
    [
        ("adamw", {"weight_decay": 0.0}, 1 / 4, 1 / 4, 1),
        ("sgd", {"weight_decay": 0.0}, 1, 1 / 4, 4),
        pytest.param("muon", {}, 1, 1 / 4, 1, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_rates_follow_the_width_as_mup_says(name, fields, matrix, head, embed):
    """Four times wider than the base model: table 3 of Yang et al. 2022."""
    wide, base = (
        specs_of(depth=1, init="mup", width=32, base_width=width, head_dim=8) for width in (8, 32)
    )
    found = [moves(make_optimizer(config(name, **fields), s, 10), s) for s in (wide, base)]
    ratio = {path: found[0][path] / found[1][path] for path in found[0]}
    assert ratio["blocks/ffn/up"] == pytest.approx(matrix, rel=0.02)
    assert ratio["blocks/attention/q"] == pytest.approx(matrix, rel=0.02)
    assert ratio["head"] == pytest.approx(head, rel=0.02)
    assert ratio["embed"] == ratio["value_embed/table"] == pytest.approx(embed, rel=0.02)
    assert ratio["smear_gate"] == pytest.approx(1)


@pytest.mark.slow
def test_the_decay_does_not_follow_the_width():
    specs = specs_of(depth=1, init="mup", width=32, base_width=8)
    optimizer = make_optimizer(config("adamw", weight_decay=0.1), specs, 10)
    params = random_params(specs)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(
        zeros, optimizer.init(params), params, jnp.int32(0), optimizer.hyperparams
    )
    np.testing.assert_allclose(updates["head"], -1e-3 * 0.1 * params["head"], rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_relative_rates_have_no_rule_for_the_width(name):
    with pytest.raises(UserError, match="have no rule that follows the width; use adamw"):
        make_optimizer(config(name), specs_of(init="mup", base_width=8), 10)
