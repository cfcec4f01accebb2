"""The bench of an engine layer's products with integer codes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtrain_kernels.matmul.few_rows import InputNorm

from benchmarks import integer_chain, integers


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("name", ["chain_m1_llama_8b", "chain_m8_gpt_d12"])
def test_a_joined_chain_is_the_products_of_layers(form, name):
    s = next(integer_chain.small_chain(c) for c in integer_chain.CHAINS if c.name == name)
    x, gain, layers = integer_chain.joined_inputs(s, form, jnp.dtype(jnp.bfloat16))
    found = integer_chain.joined_chain(s, form)(x, gain, *jax.tree.leaves(layers))
    norm = lambda x: InputNorm(1e-5, gain).of(x)
    op = integers.OPS[form]
    for qkv, out, up, down in layers:
        x = x + op(op(norm(x), *qkv)[:, : s.D], *out)
        h = op(norm(x), *up)
        if s.activation == "swiglu":
            h = jax.nn.silu(h[:, ::2]) * h[:, 1::2]
        else:
            h = jnp.square(jax.nn.relu(h))
        x = x + op(h, *down)
    largest = float(jnp.abs(x).max())
    np.testing.assert_allclose(found / largest, x / largest, atol=0.02)
    assert len(layers) == s.layers and [len(one) for one in layers] == [4] * s.layers
