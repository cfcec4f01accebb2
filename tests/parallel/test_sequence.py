"""Tensor parallelism: what is done token by token is split over the tokens, not done twice."""

import re

import jax
import jax.numpy as jnp
from tiny import LLAMA, T, batch, build, mesh_of

from jaxtrain import objectives, parallel
from jaxtrain.parallel import partition_spec


def test_norms_are_split_over_the_tensor_devices():
    """Every reciprocal root of the compiled step: one of T/4 tokens, none of more."""
    _, graphdef, _, params = build(**LLAMA)
    rows = jax.tree.map(jnp.asarray, batch(4))
    with jax.set_mesh(mesh_of(tensor=4, data=2)):
        f = jax.value_and_grad(lambda p, b: objectives.next_token(graphdef, p, b))
        text = jax.jit(f).lower(params, parallel.place_batch(rows, mesh_of(tensor=4, data=2)))
        shapes = re.findall(r"= f32\[([\d,]*)\]\S* rsqrt\(", text.compile().as_text())
    sizes = {tuple(int(n) for n in shape.split(",") if n != "1") for shape in shapes}
    assert sizes == {(2, T // 4)}


def test_a_sequence_is_split_as_far_as_it_divides():
    mesh = mesh_of(context=2, tensor=4)
    spec = lambda T: partition_spec(("batch", "sequence", None), (8, T, 16), mesh)
    assert spec(8) == jax.P(None, ("context", "tensor"), None)
    assert spec(4) == jax.P(None, ("context",), None)
    assert spec(3) == jax.P(None, None, None)
