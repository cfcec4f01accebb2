"""The recipes of docs/howto/extend.md: the Python of the page is taken from it and executed."""

import json
import re
import types
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxtrain_kernels.attention import Call, reference
from pydantic import TypeAdapter
from tiny import (
    SMALL,
    batch,
    begin,
    build,
    close,
    make_spec,
    mesh_of,
    random_params,
    run_overrides,
    same,
    tokens,
)

import jaxtrain
from jaxtrain.config import load_config
from jaxtrain.data.files.local import File
from jaxtrain.data.files.reading import START
from jaxtrain.finetune.partition import block_matrices, flatten
from jaxtrain.model import make_plan
from jaxtrain.model.remat import POLICIES
from jaxtrain.objectives import LossOptions
from jaxtrain.optim import OPTIMIZERS, AdamWConfig, make_optimizer
from jaxtrain.train import features, loop
from jaxtrain.train.growth import GROWTHS, Growth
from jaxtrain.train.step import State, make_step
from jaxtrain.weights import WEIGHTS, Form

PAGE = Path(jaxtrain.__file__).parents[1] / "docs" / "howto" / "extend.md"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def recipe(heading, name="recipe"):
    """The Python below a heading, as a module."""
    section = re.split(r"^## ", PAGE.read_text().split(f"\n## {heading}\n")[1], flags=re.MULTILINE)[
        0
    ]
    module = types.ModuleType(name)
    for kind, code in FENCE.findall(section):
        if kind == "python":
            exec(compile(code, heading, "exec"), module.__dict__)
    return module


def losses_of(spec, hyperparams, steps=20, state=None, frozen=None):
    """The metrics of some steps on one batch, and the state after them."""
    step, state = make_step(spec, mesh_of()), state or begin(spec, mesh_of())
    rows, found = batch(micro=8), []
    for _ in range(steps):
        state, metrics = step(state, rows, hyperparams, frozen)
        scalars = {k: v for k, v in metrics.items() if getattr(v, "ndim", 1) == 0}
        found.append({name: float(value) for name, value in scalars.items()})
    return found, state


@pytest.mark.slow
def test_the_recipe_of_an_optimizer_learns(monkeypatch):
    module = recipe("An optimizer")
    monkeypatch.setitem(OPTIMIZERS, "signum", module.signum)
    fields = {"learning_rate": 5e-3, "schedule": {"name": "constant"}}
    config = TypeAdapter(module.SignumConfig).validate_python(fields)
    found, _ = losses_of(*make_spec(None, config, 20, depth=1))
    assert found[-1]["loss"] < 0.7 * found[0]["loss"]


@pytest.mark.slow
def test_the_recipe_of_an_objective_learns():
    module = recipe("An objective")
    spec, hyperparams = make_spec(depth=1, smear=False, backout=False)
    objective = module.make_quiet(module.QuietConfig(weight=0.1), LossOptions())
    plain, _ = losses_of(spec, hyperparams, 1)
    found, _ = losses_of(spec._replace(objective=objective), hyperparams)
    assert found[0]["loss"] == pytest.approx(plain[0]["loss"], rel=1e-5)
    assert found[-1]["loss"] < found[0]["loss"] and found[0]["square"] > 0


@pytest.mark.slow
def test_the_recipe_of_an_optimizer_wrapper_sets_the_length_of_updates(monkeypatch):
    module = recipe("An optimizer wrapper")
    wrapper = module.normalized(module.NormalizedConfig(rate=0.05))
    monkeypatch.setattr("jaxtrain.optim.param_groups.make_wrappers", lambda *_: [wrapper])
    spec, hyperparams = make_spec(depth=1)
    before = jax.device_get(begin(spec, mesh_of()).params)
    _, state = losses_of(spec, hyperparams, 1)
    old, new = (params["blocks"]["attention"]["q"] for params in (before, state.params))
    assert norm(new - old) == pytest.approx(0.05 * norm(old), rel=1e-3)


def norm(x):
    return float(jnp.linalg.norm(x))


@pytest.mark.slow
def test_the_recipe_of_a_layer_trains_and_with_a_gain_of_one_changes_nothing(monkeypatch):
    module = recipe("A layer")
    plain, params = model_of()
    monkeypatch.setattr("jaxtrain.model.block.Attention", module.ScaledAttention)
    scaled, _ = model_of()
    with_gain = jax.tree.map(lambda x: x, params)
    with_gain["blocks"]["attention"]["scale_D"] = jnp.ones((2, SMALL["width"]))
    ids = jnp.asarray(tokens())
    states = lambda graphdef, params: nnx.merge(graphdef, params)(ids).states
    close(states(scaled, with_gain), states(plain, params))
    spec, hyperparams = make_spec(depth=1)
    found, state = losses_of(spec, hyperparams, 2)
    assert found[1]["loss"] < found[0]["loss"]
    assert not np.allclose(state.params["blocks"]["attention"]["scale_D"], 0.1, atol=1e-6)


def model_of(**changes):
    """(graphdef, random parameters) of two layers of full attention."""
    _, graphdef, _, params = build(depth=2, window_pattern="L", **changes)
    return graphdef, params


def gradients_of(graphdef, params):
    """The gradients of a loss of the model, and the bytes that the backward pass is given."""

    def loss(p):
        x_BTD = nnx.merge(graphdef, p)(jnp.asarray(tokens())).states
        return jnp.mean(jnp.square(x_BTD))

    given = jax.tree.leaves(jax.eval_shape(lambda p: jax.vjp(loss, p)[1], params))
    return jax.jit(jax.grad(loss))(params), sum(x.size * x.dtype.itemsize for x in given)


@pytest.mark.slow
def test_the_recipe_of_a_layer_plan_keeps_less_and_changes_no_gradient(monkeypatch):
    module = recipe("A layer plan")
    grads, most = gradients_of(*model_of())
    rewritten = lambda c: module.recompute_first(make_plan(c), 1)
    monkeypatch.setattr("jaxtrain.model.transformer.make_plan", rewritten)
    again, kept = gradients_of(*model_of())
    close(again, grads)
    assert kept < 0.8 * most


@pytest.mark.slow
def test_the_recipe_of_a_weight_has_three_values_and_trains(monkeypatch):
    module = recipe("A weight")
    w = module.ternary(jnp.asarray(np.random.default_rng(0).normal(size=(2, 16, 8)), jnp.float32))
    assert [len(np.unique(x)) for x in np.asarray(w)] == [3, 3]
    monkeypatch.setitem(WEIGHTS, "ternary", Form(module.ternary, "layer"))
    monkeypatch.setattr("jaxtrain.model.sections.LAYER_FORMS", ("ternary",))
    spec, hyperparams = make_spec(depth=1, weight_form="ternary")
    found, _ = losses_of(spec, hyperparams, 2)
    assert found[1]["loss"] < found[0]["loss"]


@pytest.mark.slow
def test_the_recipe_of_an_activation_policy_keeps_less_and_changes_no_gradient(monkeypatch):
    module, kept = recipe("An activation policy"), {}
    first = None
    monkeypatch.setitem(POLICIES, "narrow", module.narrow_matmuls)
    for policy in ("none", "dots", "narrow"):
        as_said = lambda c, policy=policy: tuple(replace(x, remat=policy) for x in make_plan(c))
        monkeypatch.setattr("jaxtrain.model.transformer.make_plan", as_said)
        grads, kept[policy] = gradients_of(*model_of(ffn="gelu"))
        first = grads if first is None else first
        close(grads, first)
    assert kept["narrow"] < kept["dots"] < kept["none"]


@pytest.mark.slow
def test_the_recipe_of_a_partition_trains_the_scales_alone():
    module = recipe("A partition")
    spec, _ = make_spec(depth=1)
    partition = module.output_scales(module.OutputScalesConfig(), spec.specs, jnp.dtype("float32"))
    config = AdamWConfig.model_validate({"learning_rate": 0.1, "schedule": {"name": "constant"}})
    optimizer = make_optimizer(config, partition.trainable, 20)
    base = random_params(spec.specs)
    frozen, scales = partition.init(base, 0)
    assert set(flatten(scales)) == {f"{name}/scale" for name in block_matrices(spec.specs)}
    same(partition.merge(scales, frozen), base)  # at first
    spec = spec._replace(specs=partition.trainable, optimizer=optimizer, join=partition.join)
    state = begin(spec, mesh_of())
    found, state = losses_of(spec, optimizer.hyperparams, 3, state, frozen)
    assert found[2]["loss"] < found[0]["loss"]
    merged = partition.merge(state.params, frozen)
    assert norm(merged["blocks"]["ffn"]["up"] - base["blocks"]["ffn"]["up"]) > 0
    same(merged["embed"], base["embed"])


def test_the_recipe_of_a_phase_grows_the_state(monkeypatch):
    module = recipe("A phase")
    monkeypatch.setitem(GROWTHS, "repeat_middle", module.repeat_middle)
    old = {"w": jnp.arange(6.0).reshape(3, 2), "gain": jnp.ones(2)}
    new = {"w": jnp.zeros((5, 2)), "gain": jnp.zeros(2)}
    before, after = (State(x, {}, jnp.int32(1), jnp.zeros(2, jnp.uint32), {}) for x in (old, new))
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), after
    )
    grown = Growth(1, before, (3, 5), "repeat_middle")(before, like).params
    np.testing.assert_array_equal(grown["w"][:, 0] / 2, [0, 1, 1, 1, 2])
    np.testing.assert_array_equal(grown["gain"], 1)


def test_the_recipe_of_a_phase_of_the_data_ends_with_the_source_alone():
    module = recipe("A phase of the data")
    first, last = module.cooldown_stages(module.Cooldown(tokens=100, source="books"), 1000)
    assert (first.tokens, first.weights) == (900, None)
    assert (last.tokens, last.weights) == (None, {"books": 1.0})


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_the_recipes_of_an_event_and_of_a_step_transform_take_part_in_a_run(tmp_path, monkeypatch):
    event, transform = recipe("An event"), recipe("A step transform")
    steep = transform.SkipSteep(factor=1e-3)  # every step after the first
    monkeypatch.setattr(features, "TRANSFORMS", [*features.TRANSFORMS, lambda c, dtype: steep])
    usual = features.make_events
    with_one_more = lambda *given: [*usual(*given), event.WeightNorm(1, given[-1])]
    monkeypatch.setattr(loop, "make_events", with_one_more)
    changes = {"train__steps": 4, "metrics__every": 1, "checkpoint__every": 2}
    jaxtrain.train(load_config(None, run_overrides(tmp_path, **changes)))
    lines = (tmp_path / "tiny" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    norms = [row["weight_norm"] for row in rows if "weight_norm" in row]
    assert len(norms) == 3 and norms[0] == norms[1] == norms[2] > 0  # nothing moves any more
    means = [row["mean_grad_norm"] for row in rows if row["kind"] == "train"]
    assert means[0] == 0 < means[1] == means[2] == means[3]


def test_the_recipe_of_a_data_source_reads(tmp_path):
    module, path = recipe("A data source"), tmp_path / "a.txt"
    path.write_text("one\n---\ntwo\nlines\n---\nthree")
    source, file = module.DashedSource(path=str(path)), File(str(path), None, "", "a.txt")
    found = [text for block in module.DASHED.blocks(source, file, START)
             for text in module.DASHED.texts(source, block)]  # fmt: skip
    assert found == ["one", "two\nlines", "three"]


def test_the_recipe_of_a_kernel_backend_equals_the_reference():
    module = recipe("A kernel backend")
    random = np.random.default_rng(0)
    q, k, v = (jnp.asarray(random.normal(size=(1, 16, 2, 8)), jnp.float32) for _ in range(3))
    call = Call(window=4, scale=0.3)
    assert module.supports(None, q, call) is None
    out, _ = module.attention(q, k, v, call)
    right, _ = reference.attention(q, k, v, call)
    np.testing.assert_allclose(out, right, atol=1e-5)
