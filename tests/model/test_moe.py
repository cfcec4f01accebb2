"""A mixture of experts in the model: routing by hand, invariants, balance, sharded steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jaxtrain_kernels.dispatch import on_target
from pydantic import TypeAdapter
from tiny import (
    LLAMA,
    batch,
    begin,
    begin_random,
    build,
    close,
    make_spec,
    mesh_of,
    resolved,
    tokens,
)

from jaxtrain.estimate.traffic import collectives
from jaxtrain.model import Decode, Forward, Prefill, active, cast, moe, split
from jaxtrain.model.moe import MixtureOfExperts, balance_loss
from jaxtrain.model.plan import make_plan
from jaxtrain.optim import OptimConfig
from jaxtrain.parallel import constrain, place_batch
from jaxtrain.parallel.mesh import AXES
from jaxtrain.train.step import make_step

MOE = {"experts": 4, "top_k": 2, "hidden": 24, "shared_experts": 1, "every": 2}
SMALL = LLAMA | {"depth": 4, "ffn": "relu2", "window_pattern": "SL", "moe": MOE}
STEP = LLAMA | {"depth": 1, "moe": MOE | {"every": 1, "experts": 8}}


def optim(name, **fields):
    fields = {"schedule": {"name": "constant"}, **fields}
    return TypeAdapter(OptimConfig).validate_python({"name": name, **fields})


# ---- one layer, by hand ------------------------------------------------------------------------


def relu2(x):
    return np.maximum(x, 0) ** 2


@pytest.mark.parametrize("scores", ["sigmoid", "softmax"])
def test_a_layer_is_what_a_loop_over_tokens_says(scores):
    c = resolved(moe=MOE | {"score_function": scores})
    graphdef, specs = split(MixtureOfExperts(c, 1))
    random = np.random.default_rng(0)
    draw = lambda s: (
        random.normal(size=s.shape[1:]) / s.shape[-2 if len(s.shape) > 2 else -1] ** 0.5
    )
    p = jax.tree.map(draw, specs)
    x_BTD = random.normal(size=(2, 8, c.width))
    layer = nnx.merge(graphdef, jax.tree.map(jnp.float32, p))
    y_BTD, loss_B = jax.jit(lambda m, x: m(x))(layer, jnp.float32(x_BTD))
    expected, balance = np.zeros_like(x_BTD), np.zeros((2, 2))
    for b in range(2):
        logits_TE = x_BTD[b] @ p["router"]
        e_TE = np.exp(logits_TE)
        s_TE = e_TE / (1 + e_TE) if scores == "sigmoid" else e_TE / e_TE.sum(1, keepdims=True)
        hits_E = np.zeros(4)
        for t in range(8):
            picks = np.argsort(-(s_TE[t] + p["bias"]))[:2]
            hits_E[picks] += 1
            for e in picks:
                h = relu2(x_BTD[b, t] @ p["up"][e]) @ p["down"][e]
                expected[b, t] += s_TE[t, e] / s_TE[t, picks].sum() * h
        shared = p["shared"]
        expected[b] += relu2(x_BTD[b] @ shared["up"]) @ shared["down"]
        share_E = (s_TE / s_TE.sum(1, keepdims=True)).mean(0)
        balance[b] = 4 * hits_E / 16 @ share_E, (np.log(e_TE.sum(1)) ** 2).mean()
    np.testing.assert_allclose(y_BTD, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(loss_B, balance @ [1e-4, 1e-5], rtol=1e-5)


def test_gated_experts_apply_the_weights_of_their_rows():
    layer = nnx.merge(*split(MixtureOfExperts(resolved(ffn="swiglu", moe=MOE), 1)))
    random = np.random.default_rng(0)
    shapes = (6, 8), (6, 1), (2, 8, 12), (2, 8, 12), (2, 12, 8)
    x, weights, gate, up, down = (jnp.float32(random.normal(size=s)) for s in shapes)
    y_MD = layer.network(x, weights, (gate, up), down, jnp.array([4, 2]))
    for rows, e in ((slice(4), 0), (slice(4, 6), 1)):
        u = x[rows] @ gate[e]
        h = u / (1 + np.exp(-u)) * (x[rows] @ up[e]) * weights[rows]
        np.testing.assert_allclose(y_MD[rows], h @ down[e], rtol=1e-4, atol=1e-4)


def test_an_even_load_has_a_balance_loss_of_one():
    even_BE = jnp.full((1, 4), 0.25)
    assert balance_loss(even_BE, even_BE)[0] == pytest.approx(1.0)
    peaked_BE = jnp.array([[1.0, 0, 0, 0]])
    assert balance_loss(peaked_BE, peaked_BE)[0] == pytest.approx(4.0)


# ---- the model ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    """(config, graphdef, specs, params), and a function of the last states."""
    c, graphdef, specs, params = build(**SMALL)
    run = jax.jit(lambda p, t: nnx.merge(graphdef, p)(t, mode=Forward(zigzag=True))[:2])
    return c, graphdef, specs, params, run


@pytest.mark.slow
def test_layers_alternate_and_scan_and_remat_change_nothing(model):
    _, graphdef, specs, params, _ = model
    assert [spec.ffn for spec in nnx.merge(graphdef, params).plan] == ["dense", "experts"] * 2
    assert specs["experts"]["up"].shape == (2, 4, 32, 24)
    assert specs["dense"]["up"].shape == (2, 32, 48) and "ffn" not in specs["blocks"]
    _, other, _, _ = build(**SMALL, scan_layers=True, remat="block")
    rows = tokens()

    def grads(graphdef):
        def loss(p):
            x_BTD, balance_B, _ = nnx.merge(graphdef, p)(jnp.asarray(rows))
            return jnp.mean(jnp.square(x_BTD * jnp.arange(32.0)[None, None])) + jnp.sum(balance_B)

        return jax.jit(jax.value_and_grad(loss))(params)

    close(grads(other), grads(graphdef), rtol=1e-4, atol=1e-5)


def test_layers_with_experts_are_computed_again_by_a_policy_of_their_own():
    """Whatever the window: it wins over that of S layers."""
    own = {"moe": MOE | {"remat": "block"}}
    given = {"window_pattern": "SSLL", "remat": "dots", "remat_short": "ffn"}
    policies = lambda **c: [spec.remat for spec in make_plan(resolved(**SMALL | c))]
    assert policies(**own) == ["none", "block"] * 2
    assert policies(**given) == ["ffn", "ffn", "dots", "dots"]
    assert policies(**given, **own) == ["ffn", "block", "dots", "block"]


@pytest.mark.slow
def test_decode_is_the_full_forward_and_the_future_is_unseen(model):
    _, graphdef, _, params, run = model
    rows = jnp.asarray(tokens(2, 12))
    merged = nnx.merge(graphdef, params)
    full_BTD, _ = run(params, rows)
    mode = Prefill(jnp.array([6, 6]), 12)
    state_BD, _, cache = jax.jit(lambda r: merged(r, mode=mode))(rows[:, :6])
    np.testing.assert_allclose(state_BD, full_BTD[:, 5], rtol=1e-4, atol=1e-5)
    decode = jax.jit(lambda t, cache: merged(t, mode=Decode(cache)))
    for t in range(6, 9):
        state_BD, _, cache = decode(rows[:, t, None], cache)
        np.testing.assert_allclose(state_BD, full_BTD[:, t], rtol=1e-4, atol=1e-5)
    changed_BTD, _ = run(params, rows.at[:, 7].add(1))
    np.testing.assert_array_equal(changed_BTD[:, :7], full_BTD[:, :7])
    assert (changed_BTD[:, 7] != full_BTD[:, 7]).all(1).any()


def test_what_counts_as_active(model):
    c, _, specs, _, _ = model
    dense = {
        **specs,
        "experts": {k: v for k, v in specs["experts"].items() if k not in ("up", "down")},
    }
    without = active(c.model_copy(update={"moe": None}), dense)
    assert active(c, specs) == without + 2 * 2 * (2 * 32 * 24)  # layers x top_k x an expert


def test_the_router_stays_in_float32(model):
    _, _, specs, params, _ = model
    half = cast(params, specs, jnp.dtype(jnp.bfloat16))["experts"]
    assert half["router"].dtype == half["bias"].dtype == jnp.float32
    assert half["up"].dtype == jnp.bfloat16


# ---- steps -------------------------------------------------------------------------------------


def run_steps(task, hyperparams, mesh, micro=8, steps=2):
    with jax.set_mesh(mesh):
        step, state, history = make_step(task, mesh), begin_random(task, mesh), []
        for seed in range(steps):
            placed = place_batch(batch(8, seed=seed, micro=micro), mesh, batch_dim=1)
            state, metrics = step(state, placed, hyperparams)
            history.append(metrics)
    return jax.device_get(state), jax.device_get(history)


@pytest.fixture(scope="module")
def one_device():
    task, hyperparams = make_spec(resolved(**STEP), optim("sgd"))
    return task, hyperparams, run_steps(task, hyperparams, mesh_of())


@pytest.mark.parametrize(
    "sizes",
    [
        {"expert": 4, "fsdp": 2},
        *(
            pytest.param(sizes, marks=pytest.mark.slow)
            for sizes in ({"expert": 4, "context": 2}, {"data": 2, "context": 4}, {"tensor": 2})
        ),
    ],
    ids=str,
)
@pytest.mark.slow
def test_sharded_is_one_device(one_device, sizes):
    task, hyperparams, (state, metrics) = one_device
    mesh = mesh_of(**sizes)
    sharded, others = run_steps(task, hyperparams, mesh)
    close(others, metrics, rtol=1e-5, atol=1e-6)
    close(sharded.params, state.params, rtol=1e-4, atol=1e-5)
    up = begin(task, mesh).params["experts"]["up"]
    assert up.addressable_shards[0].data.shape[1] == 8 // sizes.get("expert", 1)


@pytest.mark.slow
def test_accumulated_is_one_big_batch(one_device):
    task, hyperparams, (state, metrics) = one_device
    accumulated, others = run_steps(task, hyperparams, mesh_of(), micro=2)
    close(others, metrics, rtol=1e-4, atol=1e-6)
    close(accumulated.params, state.params, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_metrics_tell_the_load_and_the_norm_is_of_gradients_alone(one_device):
    task, _, (_, (first, _)) = one_device
    assert first["expert_load"].shape == (8,)
    assert np.mean(first["expert_load"]) == pytest.approx(1.0)
    assert first["expert_load_min"] < 1 < first["expert_load_max"]
    names = [
        jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(task.specs)[0]
    ]
    assert first["checks"].gradient_squares[names.index("['experts']['bias']")] == 0
    assert first["grad_norm"] == pytest.approx(
        np.sqrt(first["checks"].gradient_squares.sum()), rel=1e-5
    )


@pytest.mark.parametrize("tiles", [1, 2])
def test_tokens_run_in_tiles_one_after_another_where_asked(tiles):
    graphdef, specs = split(MixtureOfExperts(resolved(moe=MOE, ffn_tiles=tiles), 1))
    p = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape[1:], jnp.float32), specs)
    x_BTD = jax.ShapeDtypeStruct((2, 16, 32), jnp.float32)
    text = jax.jit(lambda p, x: nnx.merge(graphdef, p)(x)).lower(p, x_BTD).as_text()
    assert text.count("stablehlo.while") == 2 * (tiles - 1)  # experts and shared experts


@pytest.mark.slow
def test_each_device_routes_and_feeds_its_own_tokens():
    """Along data and context only sums are exchanged: no tokens, and no scores of them."""
    graphdef, specs = split(MixtureOfExperts(resolved(moe=MOE, ffn="swiglu"), 1))
    mesh = mesh_of(data=2, context=2, tensor=2)

    def loss(p, x_BTD):
        x_BTD = constrain(x_BTD, "batch", "sequence", None)
        y_BTD, loss_B = nnx.merge(graphdef, p)(x_BTD)
        return jnp.sum(jnp.square(constrain(y_BTD, "batch", "sequence", None))) + jnp.sum(loss_B)

    p = jax.tree.map(lambda s: jax.random.normal(jax.random.key(0), s.shape[1:]), specs)
    x_BTD = jax.random.normal(jax.random.key(1), (4, 16, 32))
    with jax.set_mesh(mesh):
        text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(p, x_BTD).compile().as_text()
    found = [c for c in collectives(text, dict(mesh.shape)) if {"data", "context"} & {*c.axes}]
    assert {c.kind for c in found} == {"all-reduce"}


@pytest.mark.parametrize("sizes", [{}, {"data": 2, "fsdp": 2}], ids=str)
def test_on_hopper_kernels_route_and_permute_a_devices_own_tokens(sizes):
    """Nothing is sorted or gathered by XLA, whatever divides the batch."""
    graphdef, specs = split(MixtureOfExperts(resolved(moe=MOE, ffn="relu2", width=128), 1))
    h200 = AbstractDevice("NVIDIA H200", 132, "gpu")
    axes = {axis: sizes.get(axis, 1) for axis in AXES}
    types = (AxisType.Auto,) * len(AXES)
    mesh = AbstractMesh(tuple(axes.values()), AXES, axis_types=types, abstract_device=h200)

    def loss(p, x_BTD):
        y_BTD, loss_B = nnx.merge(graphdef, p)(x_BTD)
        return jnp.sum(jnp.square(y_BTD.astype(jnp.float32))) + jnp.sum(loss_B)

    half = lambda s: jnp.float32 if len(s.shape) < 4 else jnp.bfloat16
    p = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape[1:], half(s)), specs)
    x_BTD = jax.ShapeDtypeStruct((4, 128, 128), jnp.bfloat16)
    with on_target("cuda", (9, 0)), jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(p, x_BTD)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__gpu$xla.gpu.triton") == 8
    assert "stablehlo.sort" not in text


@pytest.mark.parametrize(
    ("rows", "spec"),
    [(4, (("data", "tensor"), "context")), (2, ("data", ("context", "tensor")))],
    ids=["rows", "tokens"],
)
def test_the_tokens_gradient_goes_back_to_the_device_that_had_them(rows, spec):
    """Along `tensor`, which divides rows or tokens: so that it is scattered, not summed whole on
    each device."""
    mesh = mesh_of(data=2, context=2, tensor=2)
    x_BTD = jax.random.normal(jax.random.key(0), (rows, 16, 8))
    with jax.set_mesh(mesh):
        there = jax.jit(moe.gathered)(x_BTD)
        back = jax.jit(jax.grad(lambda x: jnp.sum(moe.gathered(x) ** 2)))(x_BTD)
    assert there.sharding.spec[:2] == ("data", "context")
    assert back.sharding.spec[:2] == spec
    np.testing.assert_array_equal(there, x_BTD)
    np.testing.assert_allclose(back, 2 * x_BTD)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon", "adamw8bit", "schedule_free"])
def test_the_bias_moves_against_the_load_with_optimizers_of_each_kind(one_device, name):
    """By the rate of group router_bias, whatever the optimizer; all other states fit the stacks."""
    specs = one_device[0].specs
    task, hyperparams = make_spec(resolved(**STEP), optim(name))
    params = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), specs)
    load_LE = jnp.broadcast_to(jnp.array([3.0, 1, 1, 1, 1, 1, 0, 0]), (1, 8))
    grads = jax.tree.map(lambda p: 1e-3 * p, params)
    grads["experts"]["bias"] = load_LE
    update = lambda: task.optimizer.update(
        grads, task.optimizer.init(params), params, jnp.int32(0), hyperparams
    )[0]
    if name in ("sgd", "adamw"):
        moved = update()["experts"]["bias"]
        np.testing.assert_allclose(moved, 1e-3 * np.sign(1 - load_LE), rtol=1e-6)
    shapes = jax.eval_shape(update)
    assert shapes["experts"]["up"].shape == (1, 8, 32, 24)


@pytest.mark.slow
def test_without_the_bias_nothing_is_added_and_the_load_is_still_told():
    task, hyperparams = make_spec(
        resolved(**STEP | {"moe": MOE | {"every": 1, "balance_bias": False}})
    )
    state, (first, _) = run_steps(task, hyperparams, mesh_of())
    start = jax.device_get(begin_random(task, mesh_of()).params)
    np.testing.assert_array_equal(state.params["experts"]["bias"], start["experts"]["bias"])
    assert first["expert_load"].shape == (4,)
