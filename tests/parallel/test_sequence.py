"""Tensor parallelism: what is done token by token is split over the tokens, not done twice."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tiny import LLAMA, T, batch, build, close, mesh_of

from jaxtrain import parallel
from jaxtrain.estimate.traffic import collectives
from jaxtrain.model.fused_ops import relu2, rope_norm
from jaxtrain.model.layers import Rotary
from jaxtrain.model.remat import tiled
from jaxtrain.objectives import next_token as objectives
from jaxtrain.parallel import partition_spec
from jaxtrain.parallel.axes import psum_replicated_grad, shard_map


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


def test_tiles_of_a_row_stay_where_they_are():
    """Each has tokens of every device: nothing is sent, forward or backward."""
    mesh, w_DF = (
        mesh_of(context=2, tensor=2, data=2),
        jax.random.normal(jax.random.key(1), (16, 24)) / 8,
    )
    place = lambda x: parallel.constrain(x, "batch", "sequence", None)
    loss = lambda x: jnp.sum(place(tiled(lambda h: jnp.tanh(h @ w_DF) @ w_DF.T, place(x), 4)) ** 2)
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
    mesh = mesh_of(context=2, tensor=4)
    spec = lambda T: partition_spec(("batch", "sequence", None), (8, T, 16), mesh)
    assert spec(8) == jax.P(None, ("context", "tensor"), None)
    assert spec(4) == jax.P(None, ("context",), None)
    assert spec(3) == jax.P(None, None, None)
