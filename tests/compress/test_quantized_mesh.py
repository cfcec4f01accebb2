"""A quantized model on a mesh: the figures of one device."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import FEW_PARTS, assignments, byte_model, random_run, tokens

from jaxtrain.compress.methods import METHODS, MethodOptions
from jaxtrain.compress.quantize import quantize_params, text_config
from jaxtrain.data import Scored
from jaxtrain.evaluation.evaluate import evaluate
from jaxtrain.evaluation.log_likelihood import make_scorer, scores
from jaxtrain.model import ParamSpec, cast
from jaxtrain.model.init import constant
from jaxtrain.parallel import MeshConfig
from jaxtrain.parallel.mesh import make_mesh
from jaxtrain.runs.saved import load_saved, place_params
from jaxtrain.weights.contract import flatten, is_weight
from jaxtrain.weights.int4 import quantize_int4
from jaxtrain.weights.stored import packed_shardings

TENSOR = {"tensor": 2, "fsdp": 2, "data": 2}
FSDP = {"fsdp": 8}
TEXTS = tokens(2)[:, :20]
FEW = ["train.precision=float32", *assignments(**FEW_PARTS)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text("To be, or not to be, that is the question.\n" * 20)
    folder = tmp_path_factory.mktemp("run") / "plain"
    return load_saved(random_run(folder, byte_model(32, f"data.train.path={text}", *FEW))), text


def on_mesh(saved, text, axes):
    """(validation figures on a mesh, the configuration with it)."""
    config = text_config(saved.config, text).model_copy(update={"mesh": MeshConfig(**axes)})
    return evaluate(saved, config), config


def on_one_device(model):
    """The same negative log-likelihoods without a mesh."""

    @jax.jit
    def log_probabilities(params):
        merged = nnx.merge(model.graphdef, cast(params, model.specs, jnp.dtype("float32")))
        return jax.nn.log_softmax(merged.logits(merged(jnp.asarray(TEXTS)).states))

    found = np.asarray(log_probabilities(jax.device_put(model.params)))
    labels = np.asarray(TEXTS)[:, 1:, None]
    return -np.take_along_axis(found[:, :-1], labels, axis=-1).sum((1, 2))


@pytest.mark.parametrize(
    ("method", "axes"),
    [
        # Each way of storing: groups, columns, blocks, activations as well.
        *(pytest.param(m, TENSOR, id=f"{m}-tensor") for m in ("int4", "int8", "w8a8")),
        pytest.param("nf4", FSDP, id="nf4-fsdp"),
    ],
)
@pytest.mark.quick("int4-tensor")
def test_a_quantized_model_has_the_figures_of_one_device(saved, method, axes):
    plain, text = saved
    parts = 8 if axes is FSDP else 4
    small = quantize_params(plain.params, plain.specs, method, MethodOptions(16))
    model = plain._replace(params=small)
    one, _ = on_mesh(model, text, {"data": 8})
    many, config = on_mesh(model, text, axes)
    asked = [[Scored(np.asarray(row), 1)] for row in TEXTS]
    together = next(iter(scores(make_scorer(model, config), [asked]))).nll
    rough = 2e-3 if METHODS[method].activations else 1e-5
    assert many["bpb"] == pytest.approx(one["bpb"], rel=rough)
    np.testing.assert_allclose(together, on_one_device(model), rtol=rough)
    mesh = make_mesh(MeshConfig(**axes))
    placed = [x for x in flatten(place_params(model, mesh)).values() if is_weight(x)]
    codes = [x.codes for x in placed]
    assert codes and of_one_device(codes) == sum(x.nbytes for x in codes) / parts


def of_one_device(arrays):
    """Bytes of the arrays' shards on the first device."""
    shards = [shard for x in arrays for shard in x.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == jax.devices()[0])


SPEC = ParamSpec((2, 256, 96), ("layers", "embed", "hidden"), constant(0.0), "matrix")


@pytest.mark.parametrize(
    ("group", "axes", "spec"),
    [
        (32, {"fsdp": 4, "tensor": 2}, ("fsdp", "tensor")),  # 8 groups
        (32, {"fsdp": 8}, ("fsdp", None)),
        (64, {"fsdp": 8}, (None, "fsdp")),  # 4 groups: the other dim
        (128, {"fsdp": 4, "tensor": 2}, (None, ("tensor", "fsdp"))),
        (2, {"tensor": 8}, (None, "tensor")),
        (96, {"fsdp": 8}, None),  # 5 columns and 2 groups: whole on each device
    ],
)
def test_no_shard_cuts_a_group(group, axes, spec):
    """Codes and scales are split alike, along the dim of the whole matrix or the other one."""
    columns, rows = (5, 192) if spec is None else (96, 256)
    full = dataclasses.replace(SPEC, shape=(2, rows, columns))
    weight = jax.vmap(lambda w: quantize_int4(w, group))(jnp.ones((2, rows, columns)))
    where = packed_shardings(weight, full, make_mesh(MeshConfig(**axes)))
    expected = jax.sharding.PartitionSpec(None, *(spec or (None, None)))
    for name in ("codes", "scales"):
        found = getattr(where, name)
        same = jax.sharding.NamedSharding(found.mesh, expected)
        assert found.is_equivalent_to(same, 3), (name, found.spec)


@pytest.mark.parametrize("method", ["int4", "nf4", "w8a8"])
@pytest.mark.quick("int4")
def test_fsdp_sends_codes_and_not_what_they_stand_for(method):
    """Forward and backward: no gathered array of float32 is as large as the matrix."""
    full = dataclasses.replace(SPEC, shape=(1, 64, 128))
    stack = METHODS[method].quantize(jnp.ones((64, 128)), None, MethodOptions(8))
    weight = jax.tree.map(lambda x: x[None], stack)
    mesh = make_mesh(MeshConfig(fsdp=8))
    placed = jax.device_put(weight, packed_shardings(weight, full, mesh))
    x = jax.device_put(jnp.ones((8, 64)), jax.NamedSharding(mesh, jax.P("fsdp")))

    def loss(x, stack):
        return jnp.sum(jax.tree.map(lambda a: a[0], stack).matmul(x) ** 2)

    with jax.set_mesh(mesh):
        program = jax.jit(jax.grad(loss)).lower(x, placed).compile().as_text()
    gathered = re.findall(r"= (\w+)\[([\d,]+)\]\S* all-gather", program)
    sizes = {kind: max(int(np.prod([*map(int, dims.split(","))])) for k, dims in gathered
                       if k == kind) for kind, _ in gathered}  # fmt: skip
    assert sizes.get("f32", 0) < 64 * 128 / 2
    assert max(sizes.get("u8", 0), sizes.get("s8", 0)) >= 64 * 128 / 2, gathered
