"""Each optimizer by what is its own; the contract that all keep is in test_optimizers.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pydantic import TypeAdapter
from tiny import LLAMA, VOCAB, batch, begin_random, make_spec, mesh_of, random_params, resolved

from jaxtrain.model import Transformer, path_name, split
from jaxtrain.optim import OptimConfig, make_optimizer
from jaxtrain.optim.adafactor import make_adafactor
from jaxtrain.optim.adamw import make_adamw
from jaxtrain.optim.adamw8bit import code_values, decode, encode, make_adamw8bit
from jaxtrain.optim.eigenbasis import rotate_basis
from jaxtrain.optim.galore import GaLoreConfig, from_int4, make_galore, to_int4
from jaxtrain.optim.lamb import make_lamb
from jaxtrain.optim.lars import make_lars
from jaxtrain.optim.schedule_free import make_schedule_free
from jaxtrain.optim.sgd import make_sgd
from jaxtrain.optim.soap import make_soap
from jaxtrain.parallel import place_batch
from jaxtrain.settings import UserError
from jaxtrain.train.step import make_step

ADAM = {"learning_rate": 0.01, "weight_decay": 0.1, "b1": 0.9, "b2": 0.95, "eps": 1e-8}
MOMENTUM = {"learning_rate": 0.1, "weight_decay": 0.01, "momentum": 0.9}


def config(name, **fields):
    fields = {"name": name, "schedule": {"name": "constant"}, **fields}
    return TypeAdapter(OptimConfig).validate_python(fields)


def arrays(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def walk(tx, params, grads):
    """Parameters before and after each gradient, and the last state."""
    state, update, path = tx.init(params), jax.jit(tx.update), [params]
    for g in grads:
        updates, state = update(g, state, path[-1])
        path.append(optax.apply_updates(path[-1], updates))
    return path, state


def gradients(*shape, steps=3):
    return [arrays(*shape, seed=10 + i) for i in range(steps)]


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


# ---- SOAP ----------------------------------------------------------------------------------------

SOAP = {**ADAM, "weight_decay": 0.0, "shampoo_beta": 0.9, "precondition_frequency": 3.0}


def rotation(n, seed):
    return jnp.linalg.qr(arrays(n, n, seed=seed))[0]


def test_soap_does_not_see_a_rotation_of_the_gradients():
    """The update of U G V^T is that of G, turned the same way; Adam's is not."""
    u, v, grads = rotation(6, 1), rotation(5, 2), gradients(2, 6, 5, steps=8)
    turned = [u @ g @ v.T for g in grads]
    p = jnp.zeros((2, 6, 5))
    apart = lambda tx: np.abs(
        walk(tx, p, turned)[0][-1] - u @ walk(tx, p, grads)[0][-1] @ v.T
    ).max()
    assert apart(make_soap(8)(SOAP)) < 2e-4
    assert apart(make_adamw({**ADAM, "weight_decay": 0.0})) > 0.01


def test_soap_makes_its_basis_first_and_keeps_it_orthogonal():
    p, grads = arrays(2, 6, 5), gradients(2, 6, 5, steps=8)
    path, state = walk(make_soap(8)({**SOAP, "weight_decay": 0.1}), p, grads)
    np.testing.assert_array_equal(path[1], p)  # the first gradient moves nothing
    assert (path[2] != p).all()
    for side, n in ((state.leaves.left, 6), (state.leaves.right, 5)):
        eye = np.broadcast_to(np.eye(n), (2, n, n))
        np.testing.assert_allclose(side.basis.mT @ side.basis, eye, atol=1e-5)
    left = 0
    for i, g in enumerate(grads):
        left = 0.9 * left + 0.1 * g @ g.mT
        if i == 0:
            first = jnp.linalg.eigh(left)[1]
    np.testing.assert_allclose(state.leaves.left.factor, left, rtol=1e-4, atol=1e-5)
    assert np.abs(np.abs(first[..., ::-1].mT @ state.leaves.left.basis) - np.eye(6)).max() > 0.1


def test_soaps_basis_converges_to_the_eigenvectors():
    """The gradients keep their directions: power iterations find them, largest first."""
    u, scales = rotation(5, 1), jnp.float32([5, 4, 3, 2, 1])
    grads = [u @ jnp.diag(scales) @ arrays(5, 5, seed=i) for i in range(60)]
    state = walk(make_soap(8)({**SOAP, "shampoo_beta": 0.99}), arrays(5, 5), grads)[1]
    side = state.leaves.left
    vectors = np.linalg.eigh(side.factor)[1]
    np.testing.assert_allclose(np.abs(vectors[:, ::-1].T @ side.basis), np.eye(5), atol=0.15)
    seen = np.diagonal(side.basis.T @ side.factor @ side.basis)
    assert (np.diff(seen) < 0).all()


def test_rotations_find_the_eigenvectors_from_the_identity():
    """As QR power iteration does, in rounds of matmuls alone, which leave the basis orthogonal."""
    values = jnp.stack([jnp.logspace(0, -2, 24), jnp.linspace(1, 0.1, 24)])
    turns = jnp.stack([rotation(24, 1), rotation(24, 2)])
    factor = jnp.einsum("lij,lj,lkj->lik", turns, values, turns)
    basis = jnp.broadcast_to(jnp.eye(24), factor.shape)
    turn = jax.jit(rotate_basis)
    for _ in range(30):
        basis = turn(factor, basis)
    np.testing.assert_allclose(
        basis.mT @ basis, jnp.broadcast_to(jnp.eye(24), factor.shape), atol=1e-5
    )
    seen = basis.mT @ factor @ basis
    found = -jnp.sort(-jnp.diagonal(seen, axis1=-2, axis2=-1))
    np.testing.assert_allclose(found, values, rtol=1e-2)
    np.testing.assert_allclose(turn(0 * factor, basis), basis, atol=1e-5)


def test_soap_with_rotations_steps_as_with_qr():
    """Gradients whose directions last: both bases come to the same steps."""
    u, v = rotation(6, 1), rotation(5, 2)
    scales = jnp.outer(jnp.float32([6, 4, 3, 2, 1.4, 1]), jnp.float32([1, 0.7, 0.5, 0.3, 0.2]))
    grads = [u @ (scales * arrays(6, 5, seed=i)) @ v.T for i in range(80)]
    often = {**SOAP, "precondition_frequency": 1.0, "shampoo_beta": 0.98}
    paths = [
        np.diff(walk(tx, jnp.zeros((6, 5)), grads)[0], axis=0)[-1]
        for tx in (make_soap(8)(often), make_soap(8, "newton_schulz")(often), make_adamw(ADAM))
    ]
    apart = lambda a, b: np.linalg.norm(a - b) / np.linalg.norm(a)
    assert apart(paths[0], paths[1]) < 0.05 < 0.3 < apart(paths[0], paths[2])


def test_soap_leaves_large_dims_alone():
    p, grads = arrays(6, 5), gradients(6, 5, steps=4)
    _, state = walk(make_soap(5)(SOAP), p, grads)
    assert state.leaves.left is None and state.leaves.right is not None
    neither, state = walk(make_soap(4)(SOAP), p, grads)
    adam, _ = walk(make_adamw({**ADAM, "weight_decay": 0.0}), p, grads[1:])
    assert state.leaves.left is None and state.leaves.right is None
    np.testing.assert_allclose(neither[-1], adam[-1], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_soap_wins_where_the_inputs_are_turned():
    """Noisy least squares whose inputs have axes of their own; the best of three rates."""
    n, steps = 16, 100
    root = rotation(n, 1) @ jnp.diag(jnp.logspace(0, -2, n)) @ rotation(n, 1).T
    target = arrays(n, n, seed=5)

    def end(make, rate):
        state = make({**SOAP, "learning_rate": rate}).init(target)

        @jax.jit
        def run(state):
            def step(carry, i):
                p, state = carry
                x = jax.random.normal(jax.random.key(i), (64, n)) @ root
                g = x.T @ (x @ (p - target)) / 64
                tx = make({**SOAP, "learning_rate": rate * (1 - i / steps)})
                updates, state = tx.update(g, state, p)
                return (optax.apply_updates(p, updates), state), None

            (p, _), _ = jax.lax.scan(step, (jnp.zeros((n, n)), state), jnp.arange(steps))
            return jnp.sum(jnp.square(root @ (p - target)))

        return float(run(state))

    soap, adam = (
        min(end(make, r) for r in (0.1, 0.3, 1.0)) for make in (make_soap(64), make_adamw)
    )
    assert soap < 0.3 * adam


# ---- GaLore --------------------------------------------------------------------------------------


def galore_of(**fields):
    c = GaLoreConfig.model_validate({"rank": 4, "gap": 3, **fields})
    return make_galore(c)({**ADAM, "weight_decay": 0.1, "gap": 3.0, "scale": 0.5})


@pytest.mark.parametrize("shape", [(2, 6, 10), (2, 10, 6)], ids=str)
def test_galore_is_adam_in_the_subspace_of_every_third_gradient(shape):
    """By numpy, each matrix of the stack by itself."""
    p, grads = arrays(*shape), gradients(*shape, steps=5)
    tx = galore_of()
    state, flip = tx.init(p), shape[-2] > shape[-1]
    m = v = np.zeros((2, 4, 10))
    for t, g in enumerate(grads):
        u, state = jax.jit(tx.update)(g, state, p)
        wide = np.asarray(g.mT if flip else g)
        if t % 3 == 0:
            basis = np.linalg.svd(wide)[0][..., :4]
            # the state's own signs of the singular vectors
            own = np.asarray(state.leaves.projection)
            np.testing.assert_allclose(np.abs(basis), np.abs(own), rtol=1e-3, atol=1e-4)
            basis = own
        seen = basis.swapaxes(-1, -2) @ wide
        m, v = ADAM["b1"] * m + (1 - ADAM["b1"]) * seen, ADAM["b2"] * v + (1 - ADAM["b2"]) * seen**2
        adam = (
            m
            / (1 - ADAM["b1"] ** (t + 1))
            / (np.sqrt(v / (1 - ADAM["b2"] ** (t + 1))) + ADAM["eps"])
        )
        moved = basis @ adam
        moved = moved.swapaxes(-1, -2) if flip else moved
        expected = -ADAM["learning_rate"] * (0.5 * moved + 0.1 * np.asarray(p))
        np.testing.assert_allclose(u, expected, rtol=1e-3, atol=1e-5)


def test_galores_states_are_smaller_than_adams_and_q_galores_smaller_still():
    p = {"w": jnp.zeros((2, 256, 512))}
    size = lambda tx: sum(
        x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(tx.init, p))
    )
    adam = size(make_adamw(ADAM))
    plain, quantized = (size(galore_of(rank=64, quantize=q)) for q in (False, True))
    assert plain < 0.35 * adam and quantized < 0.25 * plain
    assert size(galore_of(rank=256)) == pytest.approx(adam, rel=1e-5)  # no smaller: plain Adam


def test_q_galore_steps_as_galore_does_but_for_its_rounding():
    p, grads = arrays(2, 16, 24), gradients(2, 16, 24, steps=4)
    one, other = (
        np.diff(walk(galore_of(rank=8, quantize=q), p, grads)[0], axis=0) for q in (False, True)
    )
    off = np.linalg.norm(one - other) / np.linalg.norm(one)
    assert 1e-3 < off < 0.3
    x = rotation(16, 3)[:, :8]
    codes, scale = to_int4(x)
    assert codes.dtype == jnp.uint8 and codes.size == x.size // 2
    assert np.abs(from_int4(codes, scale) - x).max() <= 0.5 * np.max(scale) + 1e-6


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


def test_a_state_of_another_block_size_is_refused():
    p, g = arrays(16, 16), arrays(16, 16, seed=1)
    _, state = walk(make_adamw8bit(256, 0)(ADAM), p, [g])
    message = "block_size is 128, but the 8-bit state was saved with 256: set optim.block_size=256"
    with pytest.raises(UserError, match=message):
        make_adamw8bit(128, 0)(ADAM).update(g, state, p)


# ---- on a mesh, groups ---------------------------------------------------------------------------


TOLERANCES = {
    "adamw8bit": 1e-2,
    "lamb": 1e-4,
    "lars": 1e-4,
    "soap": 1e-2,
    "muon": 1e-2,
    "galore": 1e-2,
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tolerance"), TOLERANCES.items())
def test_eight_devices_train_as_one(name, tolerance):
    """What looks beyond single values: norms, blocks, eigenvectors."""
    special = {
        "adamw8bit": {"min_size": 256, "block_size": 16},
        "muon": {"soap": {}},
        "galore": {"rank": 8},
    }
    fields = special.get(name, {})
    task, hyperparams = make_spec(resolved(**LLAMA | {"depth": 1}), config(name, **fields))
    losses = []
    for mesh in (mesh_of(), mesh_of(2, 2, 2)):
        with jax.set_mesh(mesh):
            step, state = make_step(task, mesh), begin_random(task, mesh)
            rows = place_batch(batch(8, micro=8), mesh, batch_dim=1)
            for _ in range(4):
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
