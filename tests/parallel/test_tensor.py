"""Tensor parallelism: matmuls whose partial sums are exchanged by all-to-all."""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtrain_kernels import feed_forward
from tiny import mesh_of

from jaxtrain import parallel
from jaxtrain.parallel import tensor
from jaxtrain.settings import UserError
from jaxtrain.weights import contract

EXCHANGE = re.compile(r"(all-to-all|all-gather|reduce-scatter|all-reduce)(?:-start)?\(")


def network(B=16):
    """An input and the matrices of a layer: two with divided outputs, one with divided inputs."""
    shapes = (B, 8, 32), (32, 64), (32, 32), (64, 32)
    return [jax.random.normal(jax.random.key(i), shape) / 5 for i, shape in enumerate(shapes)]


def loss(x, q, k, out, dims=("heads", "kv_heads")):
    a, b = parallel.tensor_matmuls(x, (q, k), ("embed", dims[1]))
    (y,) = parallel.tensor_matmuls(jnp.sin(a) + jnp.tile(b, 2), (out,), (dims[0], "embed"))
    return jnp.sum(jnp.cos(parallel.constrain(y, "batch", "sequence", None)))


def gradients(function, given, **mesh):
    """The loss, the gradients and the number of exchanges of each kind in the compiled program."""
    every = tuple(range(len(given)))
    with jax.set_mesh(mesh_of(**mesh)):
        compiled = jax.jit(jax.value_and_grad(function, every)).lower(*given).compile()
        return compiled(*given), Counter(EXCHANGE.findall(compiled.as_text() or ""))


@pytest.mark.parametrize(
    "mesh", [dict(tensor=8), dict(data=2, tensor=4), dict(fsdp=2, context=2, tensor=2)], ids=str
)
@pytest.mark.quick("{'data': 2, 'tensor': 4}")
def test_matmuls_over_a_mesh_are_those_of_one_device(mesh):
    given = network()
    expected = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(*given)
    found, exchanges = gradients(loss, given, **mesh)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    # One exchange of partial sums forward and, for q and k together, one backward.
    assert exchanges["all-to-all"] == 2 and not exchanges["reduce-scatter"]


def test_rows_or_matrices_that_the_axis_does_not_divide_are_left_to_xla():
    with jax.set_mesh(mesh_of(tensor=8)):
        x = network()[0]
        assert tensor.exchanges_rows(x, "heads", 64)
        assert not tensor.exchanges_rows(x[:4], "heads", 64)
        assert not tensor.exchanges_rows(x, "heads", 12)
        assert not tensor.exchanges_rows(x, "embed", 64)
        assert not tensor.exchanges_rows(x[0], "heads", 64)
    assert not tensor.exchanges_rows(x, "heads", 64)  # no mesh


def test_partial_sums_of_16_bits_are_added_in_float32():
    """Each device's part is rounded once; the sum of eight is exact before it is rounded."""
    x = jnp.ones((8, 1, 8), jnp.bfloat16)
    w = jnp.array([256.0, 1, 1, 1, 1, 1, 1, 1], jnp.bfloat16)[:, None]
    with jax.set_mesh(mesh_of(tensor=8)):
        y = jax.jit(lambda x, w: tensor.sum_partial_matmuls((x, w)))(x, w)
    assert float(y[0, 0, 0]) == 264.0  # 263 rounded to the 8 bits of bfloat16; 256 + 1 is 256


@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
@pytest.mark.quick("mosaic")
def test_a_feed_forward_network_exchanges_rows(implementation, monkeypatch):
    monkeypatch.setitem(feed_forward.BACKENDS, "mosaic", feed_forward.xla)
    x, up, _, down = network()
    run = functools.partial(parallel.feed_forward_relu2, implementation=implementation)
    f = lambda *given: jnp.sum(jnp.sin(run(*given)))
    expected = jax.jit(jax.value_and_grad(f, (0, 1, 2)))(x, up, down)
    found, exchanges = gradients(f, (x, up, down), data=2, tensor=4)
    for a, b in zip(jax.tree.leaves(found[1]), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert exchanges["all-to-all"] == 2 and not exchanges["reduce-scatter"]


def attention(x, q, k, v, out, *, heads=8):
    """Attention of joined heads, 8 of queries and 4 of keys, then the output projection's loss."""
    joined = contract.matmul_joined(x, q, k, v)
    assert joined is not None
    qkv = joined.y.reshape(*x.shape[:2], -1, 8)
    angles = jnp.arange(x.shape[1])[None, :, None] / jnp.arange(1, 5).repeat(2)[None, None]
    value = jnp.sin(jnp.arange(4 * 8.0)).reshape(1, 1, 4, 8) * x[..., :1, None]
    y = parallel.rope_attention(
        qkv, jnp.cos(angles), jnp.sin(angles), value, None, heads=heads, eps=1e-6, scale=0.3,
        causal=True, window=None, softcap=None, implementation="reference",
    )  # fmt: skip
    (y,) = parallel.tensor_matmuls(y.reshape(*x.shape[:2], -1), (out,), ("heads", "embed"))
    return jnp.sum(jnp.cos(parallel.constrain(y, "batch", "sequence", None)))


@pytest.mark.parametrize(
    "mesh", [dict(data=2, tensor=4), dict(tensor=2), dict(expert=2, tensor=2)], ids=str
)
@pytest.mark.quick("{'data': 2, 'tensor': 4}")
def test_joined_heads_over_a_mesh_are_those_of_one_device(mesh):
    shapes = (16, 8, 32), (32, 64), (32, 32), (32, 32), (64, 32)
    given = [jax.random.normal(jax.random.key(i), shape) / 5 for i, shape in enumerate(shapes)]
    every = tuple(range(len(given)))
    expected = jax.jit(jax.value_and_grad(attention, every))(*given)
    found, exchanges = gradients(attention, given, **mesh)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert exchanges["all-to-all"] == 2


def test_heads_that_the_axis_does_not_divide_are_an_error():
    x, q, k, _ = network()
    with jax.set_mesh(mesh_of(tensor=4)):
        with pytest.raises(UserError, match="mesh.tensor=4 does not divide 16 rows or the heads"):
            contract.matmul_joined(x, q, k[:, :30], k)
        with pytest.raises(UserError, match="mesh.tensor=4 does not divide 2 and 7 heads; set it"):
            jax.eval_shape(functools.partial(attention, heads=2), x, q, k, k, q.T)
