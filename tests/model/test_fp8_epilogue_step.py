"""Casts in the products of hidden layers, in a training step: its numbers are those without."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtrain_kernels.dispatch import on_target
from jaxtrain_kernels.matmul import fp8_epilogue
from jaxtrain_kernels.matmul.fp8_epilogue import hopper, xla
from jaxtrain_kernels.matmul.hopper.gemm import GemmTiling
from tiny import batch, make_spec, mesh_of, random_params, resolved

from jaxtrain.settings import UserError
from jaxtrain.train.step import gradients
from jaxtrain.weights import float8 as model_fp8

SHAPE = {"depth": 1, "width": 128, "head_dim": 32, "hidden": 256, "window_pattern": "L"}
FP8 = {"fp8": "blocks", "fp8_history": 2}
INTERPRET = plgpu.InterpretGPUParams(inline_mgpu="_hack_model_inline_mgpu_tokamax")


def step_of(fp8_epilogue):
    """A batch's loss, its gradients and the maxima that it saw, scaled by earlier ones."""
    task, _ = make_spec(resolved(**SHAPE, **FP8, fp8_epilogue=fp8_epilogue))
    past = jax.tree.map(lambda x: x + 4, model_fp8.init_amax_history(task.specs, 2))

    def slopes(params, tokens):
        extras = {"amax_history": past}
        (loss, _), grads, seen = gradients(task, params, tokens, jnp.float32(1), extras=extras)
        return loss, grads, seen["amax_history"]

    return jax.jit(slopes)(random_params(task.specs), batch(4, micro=4))


def backend_of(product_quantized):
    return SimpleNamespace(supports=lambda *_: None, product_quantized=product_quantized)


@pytest.mark.slow
def test_the_option_changes_who_casts_and_no_number(monkeypatch):
    """With XLA in the kernel's place, bit for bit."""
    calls = []
    count = lambda *given: calls.append(given[0].function.__name__) or xla.product_quantized(*given)
    monkeypatch.setitem(fp8_epilogue.BACKENDS, "mosaic", backend_of(count))
    found, plain = step_of(True), step_of(False)
    assert sorted(calls) == ["relu2", "relu2_grad"]
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_the_kernels_step_has_the_loss_of_the_step_without(monkeypatch):
    """But for sums in another order, whose last bit can move a value by a step of float8."""
    turns = GemmTiling(128, 64, stages=2, parts=1, cluster=1, blocks=1)
    shared = turns._replace(shared=True, columns=128)

    def interpreted(options, operands, *scales):
        tiling = shared if options.exact else turns
        return hopper.product_quantized(
            options._replace(product_dtype=jnp.bfloat16), operands, *scales, tiling=tiling,
            interpret=INTERPRET,
        )  # fmt: skip

    in_bfloat16 = functools.partial(with_bfloat16, xla.product_quantized)
    monkeypatch.setitem(fp8_epilogue.BACKENDS, "mosaic", backend_of(interpreted))
    found = step_of(True)
    monkeypatch.setitem(fp8_epilogue.BACKENDS, "mosaic", backend_of(in_bfloat16))
    plain = step_of(True)
    np.testing.assert_allclose(found[0], plain[0], rtol=1e-4)
    for a, b in zip(jax.tree.leaves(found[1:]), jax.tree.leaves(plain[1:]), strict=True):
        assert np.linalg.norm(a - b) <= 0.02 * np.linalg.norm(b)


def with_bfloat16(run, options, *given):
    return run(options._replace(product_dtype=jnp.bfloat16), *given)


@pytest.mark.slow
def test_where_the_kernel_cannot_run_the_step_says_so():
    task, _ = make_spec(resolved(**SHAPE, **FP8, fp8_epilogue=True))
    past = {"amax_history": model_fp8.init_amax_history(task.specs, 2)}
    run = lambda p, b: gradients(task, p, b, jnp.float32(1), extras=past)
    given = random_params(task.specs), batch(4, micro=4)
    with pytest.raises(UserError, match=r"model.fp8_epilogue: .* needs an NVIDIA GPU"):
        jax.eval_shape(run, *given)
    on_a_mesh = pytest.raises(UserError, match="runs on one device")
    with jax.set_mesh(mesh_of(data=2)), on_target("cuda", (9, 0)), on_a_mesh:
        jax.eval_shape(run, *given)
