"""Norms that cast what they compute, in a training step: its numbers are those without."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import jaxprs_in_params
from jaxtrain_kernels import rows
from jaxtrain_kernels.dispatch import on_target
from jaxtrain_kernels.rows import fp8
from tiny import batch, make_spec, mesh_of, random_params, resolved

from jaxtrain.settings import UserError
from jaxtrain.train.step import gradients
from jaxtrain.weights import float8 as model_fp8

SHAPE = {"depth": 2, "width": 128, "head_dim": 32, "hidden": 256, "window_pattern": "L"}
FP8 = {"fp8": "blocks", "fp8_history": 2}
INTERPRET = plgpu.InterpretGPUParams(inline_mgpu="_hack_model_inline_mgpu_tokamax")


def step_of(fp8_norms, dtype=jnp.float32, rows_of=4, **changes):
    """A batch's loss, its gradients and the maxima that it saw, scaled by earlier ones."""
    fields = {"kernels": {"norm": "reference"}} | changes
    task, _ = make_spec(resolved(**SHAPE | FP8 | fields, fp8_norms=fp8_norms), dtype=dtype)
    past = jax.tree.map(lambda x: x + 4, model_fp8.init_amax_history(task.specs, 2))

    def slopes(params, tokens):
        extras = {"amax_history": past}
        (loss, _), grads, seen = gradients(task, params, tokens, jnp.float32(1), extras=extras)
        return loss, grads, seen["amax_history"]

    return jax.jit(slopes)(params_of(task, dtype), batch(rows_of, micro=rows_of))


def params_of(task, dtype):
    return jax.tree.map(lambda x: x.astype(dtype), random_params(task.specs))


def assert_same(found, plain, error=0.0):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        assert np.linalg.norm(a - b) <= error * np.linalg.norm(b)
    assert all(jnp.all(most > 0) for most in jax.tree.leaves(found[2]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kernels": {"norm": "reference", "qkv": "reference"}},
        {"residual_scales": False, "ffn": "swiglu"},
        {"remat": "block", "scan_layers": True, "value_embeddings": False},
        {"remat": "ffn"},
    ],
    ids=["three_arrays", "one_array", "gated", "scanned", "remat"],
)
def test_the_option_changes_who_casts_and_no_number(changes, monkeypatch):
    """Bit for bit: the norms' casts are the products' own. (But for float32's last bit where XLA
    fuses what it computes again in another way.)"""
    calls = []
    run = fp8.reference.norm_quantized
    count = lambda *given, **more: calls.append(given[0].shape) or run(*given, **more)
    backend = SimpleNamespace(supports=lambda *_: None, norm_quantized=count)
    monkeypatch.setitem(fp8.BACKENDS, "reference", backend)
    found = step_of(True, **changes)
    assert len(calls) >= 2
    calls.clear()
    assert_same(found, step_of(False, **changes), 1e-6 if changes.get("remat") == "ffn" else 0.0)
    assert not calls


@pytest.mark.slow
def test_the_kernels_step_is_the_step_of_the_norms_kernel(monkeypatch):
    """Both interpreted, in bfloat16: the loss, all gradients and all maxima, bit for bit."""
    for table in (rows.BACKENDS, fp8.BACKENDS):
        monkeypatch.setitem(table, "mosaic", interpreted(table["mosaic"]))
    changes = {"kernels": {"norm": "mosaic"}, "dtype": jnp.bfloat16, "depth": 1}
    changes |= {"rows_of": 2}
    assert_same(step_of(True, **changes), step_of(False, **changes))


def interpreted(module):
    names = ("residual_norm", "mixed_norm", "rope_norm", "relu2", "norm_quantized")
    run = {n: functools.partial(getattr(module, n), interpret=INTERPRET)
           for n in names if hasattr(module, n)}  # fmt: skip
    return SimpleNamespace(supports=lambda *_: None, **run)


@pytest.mark.slow
def test_on_hopper_products_do_not_cast_what_a_norm_has_cast():
    found = []
    for fp8_norms in (False, True):
        fields = SHAPE | FP8 | {"attention": "xla", "fp8_norms": fp8_norms}
        task, _ = make_spec(resolved(**fields), dtype=jnp.bfloat16)
        past = {"amax_history": model_fp8.init_amax_history(task.specs, 2)}
        run = lambda p, b, task=task, past=past: gradients(task, p, b, jnp.float32(1), extras=past)
        with on_target("cuda", (9, 0)):
            traced = jax.make_jaxpr(run)(params_of(task, jnp.bfloat16), batch(4, micro=4))
        names = list(kernel_names(traced.jaxpr))
        found.append((names.count("_cast"), names.count("_norm_cast")))
    # Of each layer's ten, those of the inputs of the projections to queries, keys and values (one
    # for all) and to the hidden layer.
    assert found == [(2 * 10, 0), (2 * 8, 2 * 2)]


def kernel_names(jaxpr):
    """Of each cast, by itself or in a norm."""
    for equation in jaxpr.eqns:
        if (name := equation.params.get("name")) in ("_cast", "_norm_cast"):
            yield name
        else:
            for inner in jaxprs_in_params(equation.params):
                yield from kernel_names(inner)


@pytest.mark.slow
def test_where_the_kernel_cannot_run_the_step_says_so():
    def trace(**changes):
        task, _ = make_spec(resolved(**SHAPE, **FP8, **changes, fp8_norms=True))
        past = {"amax_history": model_fp8.init_amax_history(task.specs, 2)}
        run = lambda p, b: gradients(task, p, b, jnp.float32(1), extras=past)
        jax.eval_shape(run, random_params(task.specs), batch(4, micro=4))

    with pytest.raises(UserError, match=r"model.kernels.norm is xla here"):
        trace()
    on_a_mesh = pytest.raises(UserError, match="runs on one device")
    with jax.set_mesh(mesh_of(data=2)), on_target("cuda", (9, 0)), on_a_mesh:
        trace()
