"""`deterministic` reaches the kernels, and a backend that cannot serve it says so in one line."""

import jax
import jax.numpy as jnp
import pytest
from jaxtrain_kernels.dispatch import on_target

from jaxtrain import parallel
from jaxtrain.settings import UserError


def test_a_backend_that_cannot_is_one_line_for_the_user():
    q = jnp.ones((1, 64, 2, 64), jnp.bfloat16)
    call = lambda q: parallel.attention(
        q, q, q, window=None, implementation="cudnn", deterministic=True
    )
    with on_target("cuda", (9, 0)), pytest.raises(UserError) as raised:
        jax.eval_shape(call, q)
    message = str(raised.value)
    assert message.startswith("model.attention: cudnn cannot serve bfloat16[1, 64, 2, 64]")
    assert "sums its gradients in any order" in message and "\n" not in message


@pytest.mark.parametrize(("deterministic", "kernels"), [(False, 2), (True, 3)])
@pytest.mark.slow
def test_mosaic_takes_a_kernel_more(deterministic, kernels):
    def loss(q):
        y = parallel.attention(
            q, q, q, window=None, implementation="mosaic", deterministic=deterministic
        )
        return y.astype(jnp.float32).sum()

    with on_target("cuda", (9, 0)):
        traced = jax.jit(jax.grad(loss)).trace(jax.ShapeDtypeStruct((1, 64, 2, 64), jnp.bfloat16))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == kernels
