"""2:4 weights: the mask by numpy, SR-STE's gradient, and what a saved model and an export hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import TypeAdapter
from tiny import NANOCHAT, random_params, random_run, run_overrides, same, weights_of

from jaxtrain.cli import main as interop
from jaxtrain.config import load_config
from jaxtrain.config.resolve import resolve
from jaxtrain.main import main
from jaxtrain.model import ParamSpec
from jaxtrain.model.init import constant
from jaxtrain.optim import OptimConfig, make_optimizer
from jaxtrain.runs.saved import load_saved
from jaxtrain.settings import UserError
from jaxtrain.weights.contract import flatten
from jaxtrain.weights.params import is_block_matrix
from jaxtrain.weights.two_four import sparse_2_4, two_four_mask


def largest_two(w):
    """The mask of the two largest of four along the inputs, the first of equal ones, by a sort."""
    fours = np.moveaxis(w, -1, -2).reshape(*w.shape[:-2], w.shape[-1], -1, 4)
    order = np.argsort(-np.abs(fours), axis=-1, kind="stable")[..., :2]
    mask = np.zeros(fours.shape, bool)
    np.put_along_axis(mask, order, True, axis=-1)
    return np.moveaxis(mask.reshape(*w.shape[:-2], w.shape[-1], -1), -1, -2)


def is_two_four(w):
    return ((np.asarray(w) != 0).reshape(*w.shape[:-2], -1, 4, w.shape[-1]).sum(-2) <= 2).all()


def test_the_mask_by_numpy_and_the_gradient_is_that_of_all():
    w = np.random.default_rng(0).normal(size=(2, 12, 6)).astype(np.float32)
    w[0, :4, 0] = [1, -1, 1, 1]
    np.testing.assert_array_equal(two_four_mask(jnp.asarray(w)), largest_two(w))
    np.testing.assert_array_equal(sparse_2_4(jnp.asarray(w)), w * largest_two(w))
    dy = np.arange(w.size, dtype=np.float32).reshape(w.shape)
    gradient = jax.grad(lambda w: jnp.sum(sparse_2_4(w) * dy))(jnp.asarray(w))
    np.testing.assert_array_equal(gradient, dy)


def test_inputs_that_four_does_not_divide_are_refused():
    with pytest.raises(UserError, match="6 inputs, no multiple of 4"):
        sparse_2_4(jnp.ones((1, 6, 4)))


def test_sr_ste_pulls_on_the_weights_that_the_mask_leaves_out():
    """The same as the optimizer alone with the paper's gradient; embeddings have no mask."""
    spec = lambda shape, role: ParamSpec(
        shape, (None,) * len(shape), constant(1.0), role, (len(shape) - 2,), (len(shape) - 1,), role
    )
    specs = {"w": spec((2, 8, 4), "matrix"), "embed": spec((8, 4), "embedding")}
    params, grads = random_params(specs), random_params(specs, seed=1)
    w = np.asarray(params["w"])
    expected = grads | {"w": grads["w"] + 0.5 * w * ~largest_two(w)}
    fields = {"name": "sgd", "schedule": {"name": "constant"}}
    updates = []
    for wrappers, g in ((({"name": "sr_ste", "refine": 0.5},), grads), ((), expected)):
        c = TypeAdapter(OptimConfig).validate_python(fields | {"wrappers": wrappers})
        o = make_optimizer(c, specs, 10)
        updates.append(o.update(g, o.init(params), params, jnp.int32(0), o.hyperparams)[0])
    for one, other in zip(*map(jax.tree.leaves, updates)):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    assert (updates[0]["w"] != 0).all()


def test_a_saved_model_and_its_export_hold_the_masked_weights(tmp_path):
    """Every matrix of the blocks is 2:4, nothing else; a checkpoint of Hugging Face is dense."""
    plain = random_run(tmp_path / "plain", NANOCHAT)
    run = random_run(tmp_path / "run", [*NANOCHAT, "model.weight_form=sparse_2_4"])
    dense, saved = load_saved(plain), load_saved(run)
    specs = flatten(saved.specs)
    for (name, w), full in zip(flatten(saved.params).items(), flatten(dense.params).values()):
        if is_block_matrix(specs[name]):
            np.testing.assert_array_equal(w, full * largest_two(np.asarray(full)))
        else:
            np.testing.assert_array_equal(w, full)
    assert interop(["export", str(run), str(tmp_path / "out")]) == 0
    assert interop(["import", str(tmp_path / "out"), str(tmp_path / "back")]) == 0
    back = load_saved(tmp_path / "back")
    assert back.config.model.weight_form is None
    same(back.params["blocks"], saved.params["blocks"])


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_a_run_trains_dense_weights_and_saves_two_of_four(tmp_path):
    given = {"model__weight_form": "sparse_2_4", "optim__wrappers": "[{name: sr_ste}]"}
    assert main(run_overrides(tmp_path, **given)) == 0
    run, names = tmp_path / "tiny", ("ffn/up", "ffn/down", "attention/q", "attention/out")
    trained = flatten(load_saved(run, step=6).params)
    for name in (f"blocks/{n}" for n in names):
        np.testing.assert_array_equal(weights_of(run)[name], sparse_2_4(trained[name]))
        assert is_two_four(weights_of(run)[name]) and not is_two_four(trained[name])


def test_sr_ste_needs_the_form():
    c = ["optim.wrappers=[{name: sr_ste}]", "data.tokenizer.name=bytes"]
    with pytest.raises(UserError, match="set model.weight_form=sparse_2_4"):
        resolve(load_config(None, c), 257)
