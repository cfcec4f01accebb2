"""Tensor parallelism: what is done token by token is split over the tokens, not done twice."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tiny import LLAMA, T, batch, build, close, make_spec, mesh_of, random_params, resolved

from jaxtrain import parallel
from jaxtrain.estimate.traffic import collectives
from jaxtrain.model.fused_ops import relu2, rope_norm
from jaxtrain.model.layers import Rotary
from jaxtrain.model.remat import tiled
from jaxtrain.objectives import next_token as objectives
from jaxtrain.parallel import BATCH, partition_spec, place_batch, split_rows
from jaxtrain.parallel.axes import psum_replicated_grad, shard_map
from jaxtrain.train.step import cast_params, gradients


@pytest.mark.slow
def test_norms_are_split_over_the_tensor_devices():
    """Every reciprocal root of the compiled step: one of T/4 tokens, none of more."""
    _, graphdef, _, params = build(**LLAMA)
    rows = jax.tree.map(jnp.asarray, batch(4))
    with jax.set_mesh(mesh_of(tensor=4, data=2)):
        f = jax.value_and_grad(lambda p, b: objectives.next_token_loss(graphdef, p, b))
        text = jax.jit(f).lower(params, parallel.place_batch(rows, mesh_of(tensor=4, data=2)))
        shapes = re.findall(r"= f32\[([\d,]*)\]\S* rsqrt\(", text.compile().as_text())
    sizes = {tuple(int(n) for n in shape.split(",") if n != "1") for shape in shapes}
    assert sizes == {(2, T // 4)}


@pytest.mark.parametrize(("kv_heads", "sends"), [(4, False), (1, True)])
@pytest.mark.quick("4-False")
def test_heads_are_turned_and_hidden_layers_squared_where_they_are(kv_heads, sends):
    """Nothing is sent, forward or backward; but what all devices hold, a single head, is summed."""
    mesh, H = mesh_of(data=2, context=2, tensor=2), 32
    shapes = (4, T, 8, H), (4, T, kv_heads, H), (4, T, 64), (4, T, H), (4, T, H)
    arrays = [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]
    axes = ["heads", None], ["kv_heads", None], ["hidden"], [None], [None]
    places = [partition_spec(("batch", "tokens", *a), x.shape, mesh) for a, x in zip(axes, arrays)]

    def results_and_gradients(q, k, up, cos, sin):
        rope = Rotary(cos[:, :, None], sin[:, :, None])
        run = lambda q, k, up: (*rope_norm(q, k, rope, 1e-6, "reference"), relu2(up, "reference"))
        results, back = jax.vjp(run, q, k, up)
        return results, back(jax.tree.map(jnp.cos, results))

    expected = jax.jit(results_and_gradients)(*arrays)
    with jax.set_mesh(mesh):
        spread = [jax.device_put(x, jax.NamedSharding(mesh, p)) for x, p in zip(arrays, places)]
        compiled = jax.jit(results_and_gradients).lower(*spread).compile()
        close(compiled(*spread), expected, rtol=1e-5, atol=1e-5)
    assert bool(collectives(compiled.as_text(), dict(mesh.shape))) == sends


def test_the_gradient_of_a_sum_over_devices_is_there_already():
    mesh, (x, w, g) = mesh_of(tensor=4, data=2), jax.random.normal(jax.random.key(0), (3, 8, 8))
    product = shard_map(
        lambda x, w: psum_replicated_grad(x @ w, "tensor"),
        (P("data", "tensor"), P("tensor")),
        P("data"),
    )
    with jax.set_mesh(mesh):
        spread = lambda x, *names: jax.device_put(x, jax.NamedSharding(mesh, P(*names)))
        given = spread(x, "data", "tensor"), spread(w, "tensor"), spread(g, "data")
        grad = jax.jit(jax.grad(lambda x, w, g: jnp.sum(product(x, w) * g)))
        compiled = grad.lower(*given).compile()
        close((product(*given[:2]), compiled(*given)), (x @ w, g @ w.T), rtol=1e-5, atol=1e-5)
    assert collectives(compiled.as_text(), dict(mesh.shape)) == []


@pytest.mark.slow
def test_tiles_of_a_row_stay_where_they_are():
    """Each has tokens of every device: nothing is sent, forward or backward."""
    mesh, w_DF = (
        mesh_of(context=2, tensor=2, data=2),
        jax.random.normal(jax.random.key(1), (16, 24)) / 8,
    )
    sharded = lambda x: parallel.constrain(x, "batch", "sequence", None)
    loss = lambda x: jnp.sum(
        sharded(tiled(lambda h: jnp.tanh(h @ w_DF) @ w_DF.T, sharded(x), 4)) ** 2
    )
    x = jax.device_put(
        jax.random.normal(jax.random.key(0), (2, T, 16)),
        jax.NamedSharding(mesh, jax.P("data", ("context", "tensor"))),
    )
    whole = jax.grad(lambda x: jnp.sum((jnp.tanh(x @ w_DF) @ w_DF.T) ** 2))(x)
    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(loss)).lower(x).compile()
        np.testing.assert_allclose(compiled(x), whole, rtol=1e-5, atol=1e-5)
    assert collectives(compiled.as_text(), dict(mesh.shape)) == []


def test_a_sequence_is_split_as_far_as_it_divides():
    """Rows by the devices of `tensor` if they divide, else the tokens of a row."""
    mesh = mesh_of(context=2, tensor=4)
    spec = lambda B, T: partition_spec(("batch", "sequence", None), (B, T, 16), mesh)
    assert spec(6, 8) == jax.P(None, ("context", "tensor"), None)
    assert spec(6, 4) == jax.P(None, ("context",), None)
    assert spec(6, 3) == jax.P(None, None, None)
    assert spec(8, 6) == jax.P((*BATCH, "tensor"), "context", None)
    assert spec(8, 3) == jax.P((*BATCH, "tensor"), None, None)


@pytest.mark.slow
def test_rows_come_together_without_a_transpose():
    """The stream's rows are divided: no exchange of a step is of an inner dim of [B, T, D]."""
    _, graphdef, _, params = build(**LLAMA)
    mesh = mesh_of(tensor=2)
    rows = parallel.place_batch(jax.tree.map(jnp.asarray, batch(4)), mesh)
    with jax.set_mesh(mesh):
        f = jax.value_and_grad(lambda p, b: objectives.next_token_loss(graphdef, p, b))
        text = jax.jit(f).lower(params, rows).compile().as_text()
    gathers = re.findall(rf"\[4,{T},\d+\]\S* all-gather\(.*dimensions={{(\d)}}", text)
    assert gathers and set(gathers) == {"0"}


@pytest.mark.parametrize("axes", [{"tensor": 2, "data": 2}, {"expert": 2, "fsdp": 2}], ids=str)
@pytest.mark.slow
def test_parts_of_a_batch_side_by_side_are_one_batch(axes):
    """Loss and gradients, with the experts' loads, of two parts as of one; each has a device's own
    rows, so that nothing is sent to make them."""
    model = resolved(
        **LLAMA | {"depth": 1, "moe": {"experts": 4, "hidden": 32}} if "expert" in axes else LLAMA
    )
    task, mesh = make_spec(model)[0], mesh_of(**axes)
    params = random_params(task.specs)
    rows, factor = batch(8, micro=8), jnp.float32(0.1)

    def found(task, mesh):
        with jax.set_mesh(mesh):
            placed = place_batch(rows, mesh, batch_dim=1)
            run = jax.jit(lambda p, b: gradients(task, cast_params(task, p), b, factor)[:2])
            return jax.device_get(run(params, placed))

    twice = task._replace(batch_overlap=2)
    close(found(twice, mesh), found(task, mesh_of()), rtol=2e-4, atol=2e-5)
    with jax.set_mesh(mesh):
        split = jax.jit(lambda b: split_rows(b, 2)).lower(place_batch(rows.tokens_BT[0], mesh))
        assert collectives(split.compile().as_text(), dict(mesh.shape)) == []
