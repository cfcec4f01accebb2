"""A quantized model on a mesh: the figures of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import byte_model, random_run, tokens

from jaxtrain.compress.methods import METHODS, MethodOptions
from jaxtrain.compress.quantize import quantize_params, text_config
from jaxtrain.data import Scored
from jaxtrain.evaluation.evaluate import evaluate
from jaxtrain.evaluation.log_likelihood import make_scorer, scores
from jaxtrain.model import cast
from jaxtrain.parallel import MeshConfig
from jaxtrain.parallel.mesh import make_mesh
from jaxtrain.runs.saved import load_saved, place_params
from jaxtrain.weights.contract import flatten, is_weight

TENSOR = {"tensor": 2, "fsdp": 2, "data": 2}
FSDP = {"fsdp": 8}
TEXTS = tokens(2)[:, :20]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text("To be, or not to be, that is the question.\n" * 20)
    folder = tmp_path_factory.mktemp("run") / "plain"
    return load_saved(
        random_run(folder, byte_model(32, f"data.train.path={text}", "train.precision=float32"))
    ), text


def on_mesh(saved, text, axes):
    """(validation figures, negative log-likelihoods of two texts) on a mesh."""
    config = text_config(saved.config, text).model_copy(update={"mesh": MeshConfig(**axes)})
    asked = [[Scored(np.asarray(row), 1)] for row in TEXTS]
    nll = next(iter(scores(make_scorer(saved, config), [asked]))).nll
    return evaluate(saved, config), nll


def on_one_device(model):
    """The same negative log-likelihoods without a mesh."""

    @jax.jit
    def log_probabilities(params):
        merged = nnx.merge(model.graphdef, cast(params, model.specs, jnp.dtype("float32")))
        return jax.nn.log_softmax(merged.logits(merged(jnp.asarray(TEXTS)).states))

    found = np.asarray(log_probabilities(jax.device_put(model.params)))
    labels = np.asarray(TEXTS)[:, 1:, None]
    return -np.take_along_axis(found[:, :-1], labels, axis=-1).sum((1, 2))


@pytest.mark.parametrize("axes", [TENSOR, FSDP], ids=["tensor", "fsdp"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.quick("int4-tensor")
def test_a_quantized_model_has_the_figures_of_one_device(saved, method, axes):
    plain, text = saved
    small = quantize_params(plain.params, plain.specs, method, MethodOptions(16))
    model = plain._replace(params=small)
    one, _ = on_mesh(model, text, {"data": 8})
    many, together = on_mesh(model, text, axes)
    rough = 2e-3 if METHODS[method].activations else 1e-5
    assert many["bpb"] == pytest.approx(one["bpb"], rel=rough)
    np.testing.assert_allclose(together, on_one_device(model), rtol=rough)
    mesh = make_mesh(MeshConfig(**axes))
    placed = [x for x in flatten(place_params(model, mesh)).values() if is_weight(x)]
    assert placed and all(x.sharding.is_fully_replicated for x in jax.tree.leaves(placed))
