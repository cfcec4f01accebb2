"""Backward passes that cast the gradients of products' outputs: a step's numbers stay the same."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jaxtrain_kernels.dispatch import on_target
from test_fp8_norms_step import FP8, SHAPE, assert_same, params_of
from tiny import batch, make_spec, mesh_of, random_params, resolved

from jaxtrain.model.attention import leading_channels
from jaxtrain.settings import UserError
from jaxtrain.train.step import gradients
from jaxtrain.weights import float8 as model_fp8

JOINED = {"kernels": {"norm": "reference", "qkv": "reference"}}


def step_of(**fields):
    """A batch's loss, its gradients and the maxima that it saw, scaled by earlier ones."""
    task, _ = make_spec(resolved(**SHAPE | FP8 | JOINED | fields), dtype=jnp.float32)
    past = jax.tree.map(lambda x: x + 4, model_fp8.init_amax_history(task.specs, 2))

    def slopes(params, tokens):
        extras = {"amax_history": past}
        (loss, _), grads, seen = gradients(task, params, tokens, jnp.float32(1), extras=extras)
        return loss, grads, seen["amax_history"]

    return jax.jit(slopes)(params_of(task, jnp.float32), batch(4, micro=4))


@pytest.mark.parametrize(
    "changes", [{}, {"remat": "block", "scan_layers": True, "value_embeddings": False}],
    ids=["unrolled", "scanned"],
)  # fmt: skip
@pytest.mark.quick("unrolled")
def test_the_option_changes_who_casts_and_no_number(changes, monkeypatch):
    """Bit for bit: the casts are the products' own."""
    calls = []
    run = model_fp8.kernels.fp8_matmul_for_cast
    count = lambda *given, **more: calls.append(given[0].shape) or run(*given, **more)
    monkeypatch.setattr(model_fp8.kernels, "fp8_matmul_for_cast", count)
    found = step_of(fp8_gradients=True, **changes)
    assert calls
    calls.clear()
    assert_same(found, step_of(**changes))
    assert not calls


def test_fast_accum_is_that_of_the_joint_product_too():
    """Of its three products, that of the weights' gradient alone is summed in float32."""
    exact = []
    for fast in (False, True):
        task, _ = make_spec(
            resolved(**SHAPE, **FP8, **JOINED, fp8_gradients=True, fp8_fast_accum=fast)
        )
        past = {"amax_history": model_fp8.init_amax_history(task.specs, 2)}
        run = functools.partial(gradients, task, grad_scale=jnp.float32(1), extras=past)
        text = str(jax.make_jaxpr(lambda p, b, run=run: run(p, b))(
            params_of(task, jnp.float32), batch(4, micro=4)
        ))  # fmt: skip
        assert "f8_e4m3fn" in text or "float8_e4m3fn" in text
        exact.append(text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)"))
    assert exact[0] == 2 * exact[1] > 0


@pytest.mark.slow
def test_on_hopper_the_pass_that_turns_gradients_back_casts_them():
    found = []
    shape = SHAPE | FP8 | {"head_dim": 128, "kernels": {"qkv": "mosaic"}}
    for casts in (False, True):
        task, _ = make_spec(resolved(**shape, fp8_gradients=casts), dtype=jnp.bfloat16)
        past = {"amax_history": model_fp8.init_amax_history(task.specs, 2)}
        run = functools.partial(gradients, task, grad_scale=jnp.float32(1), extras=past)
        with on_target("cuda", (9, 0)):
            traced = jax.make_jaxpr(lambda p, b, run=run: run(p, b))(
                params_of(task, jnp.bfloat16), batch(4, micro=4, length=128)
            )
        names = list(kernel_names(traced.jaxpr))
        found.append((names.count("_cast"), names.count("turn_back_cast")))
    (before, none), (after, passes) = found
    assert none == 0 and passes == 2 and before - after == 2


def kernel_names(jaxpr):
    """Of each cast, by itself or as gradients are turned back."""
    for equation in jaxpr.eqns:
        if (name := equation.params.get("name")) in ("_cast", "turn_back_cast"):
            yield name
        else:
            for inner in jaxprs_in_params(equation.params):
                yield from kernel_names(inner)


@pytest.mark.slow
def test_a_mesh_is_refused():
    task, _ = make_spec(resolved(**SHAPE, **FP8, **JOINED, fp8_gradients=True))
    past = {"amax_history": model_fp8.init_amax_history(task.specs, 2)}
    run = lambda p, b: gradients(task, p, b, jnp.float32(1), extras=past)
    with jax.set_mesh(mesh_of(data=2)), pytest.raises(UserError, match="fp8_gradients runs on one"):
        jax.eval_shape(run, random_params(task.specs), batch(4, micro=4))


def test_leading_channels_have_the_gradient_of_a_slice():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 8)), jnp.float32)

    def ours(x):
        y, first = leading_channels(x, 3)
        return jnp.sum(jnp.sin(y)) + jnp.sum(first**2)

    plain = lambda x: jnp.sum(jnp.sin(x)) + jnp.sum(x[..., :3] ** 2)
    np.testing.assert_array_equal(jax.grad(ours)(x), jax.grad(plain)(x))
    text = jax.jit(jax.grad(ours)).lower(x).as_text()
    assert "stablehlo.pad" not in text
