"""Which backend casts to float8 in a training step, and the squared ReLU inside the casts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec
from jaxtrain_kernels.dispatch import on_target
from tiny import batch, make_spec, mesh_of, random_params, resolved, same

from jaxtrain.objectives import next_token as objectives
from jaxtrain.parallel import place_batch
from jaxtrain.parallel.fp8_cast import ShardedCast
from jaxtrain.settings import UserError
from jaxtrain.train.step import gradients
from jaxtrain.weights import float8 as model_fp8
from jaxtrain.weights.float8 import Fp8Weight

SHAPE = {"depth": 2, "width": 128, "head_dim": 32, "hidden": 256, "value_embeddings": False}
PLAIN = {"norm": "xla", "rope": "xla", "loss": "xla"}
# Pallas asks for the device when it lowers.
H200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))
ALONE = {"attention": "xla", "kernels": PLAIN, "fp8": "blocks"}


def traced(mesh=None, micro=4, **changes):
    """A batch's gradients on Hopper, lowered: what is cast by our kernel, and the text."""
    task, _ = make_spec(resolved(**SHAPE, **ALONE, window_pattern="L", **changes))
    past = {t.name: t.init({}, task.specs) for t in task.transforms if t.has_state}
    run = lambda p, b: gradients(task, p, b, jnp.float32(1), extras=past)
    given = random_params(task.specs), batch(4, micro=micro)
    struct = lambda x, dtype: jax.ShapeDtypeStruct(x.shape, dtype)
    if mesh is not None:
        where = NamedSharding(mesh, PartitionSpec())
        struct = lambda x, dtype: jax.ShapeDtypeStruct(x.shape, dtype, sharding=where)
    given = (
        jax.tree.map(lambda x: struct(x, jnp.bfloat16), given[0]),
        jax.tree.map(lambda x: struct(x, x.dtype), given[1]),
    )
    with (
        on_target("cuda", (9, 0)),
        jax.sharding.use_abstract_mesh(H200) if mesh is None else jax.set_mesh(mesh),
    ):
        found = jax.jit(run).trace(*given)
        text = found.lower(lowering_platforms=("cuda",)).as_text()
    # Of what is computed again, jax leaves an empty call.
    return sorted(read for read in casts(found.jaxpr.jaxpr) if read), text


def casts(jaxpr):
    """Shapes of the matrices that each call of our kernel reads."""
    for equation in jaxpr.eqns:
        if equation.params.get("name") == "_cast":
            yield [v.aval.shape for v in equation.invars if v.aval.ndim > 1]
        else:
            for inner in jaxprs_in_params(equation.params):
                yield from casts(inner)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "layers"),
    [({}, 2), ({"fp8_history": 2}, 2), ({"scan_layers": True, "remat": "block", "micro": 2}, 1)],
)
@pytest.mark.quick("changes0-2")
def test_on_one_hopper_tensors_are_cast_by_our_kernel_and_weights_are_not(changes, layers):
    found, text = traced(**changes)
    M = 32 * changes.get("micro", 4)
    # Forward: the inputs of q, k and v, of the output, of the network and of its second matrix;
    # backward: the gradients of all six. What is computed again is cast again. Only with delayed
    # scaling do q, k and v ask for one cast; else XLA merges theirs.
    forward = (3 if "fp8_history" in changes else 5) * [[(M, 128)]] + [[(M, 256)]]
    backward = 5 * [[(M, 128)]] + [[(M, 256), (M, 256)]]
    again = forward * ("remat" in changes)
    assert found == sorted(layers * (forward + again + backward))
    assert "mosaic_gpu" in text


@pytest.mark.parametrize(("remat", "times"), [("dots", 2), ("dots_fp8", 1)])
def test_matrices_with_one_input_share_its_cast_also_when_it_is_computed_again(remat, times):
    """Of a gated layer: the input of q, k and v, that of the output, of both matrices of the
    network, and the hidden layer; then the gradients of all seven. Each device casts its rows."""
    found, _ = traced(mesh_of(fsdp=2), ffn="swiglu", remat=remat, fp8_history=2)
    forward = 3 * [[(64, 128)]] + [[(64, 256)]]
    backward = 5 * [[(64, 128)]] + 2 * [[(64, 256)]]
    assert found == sorted(2 * (times * forward + backward))


@pytest.mark.slow
@pytest.mark.parametrize("ffn", ["swiglu", "relu2"])
@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.quick("False-swiglu")
def test_saved_casts_are_those_that_would_be_made_again(ffn, scan, monkeypatch):
    """Loss, gradients and maxima with `remat=dots_fp8`, beside casting again: up to last bits."""
    monkeypatch.setattr(model_fp8, "SMALLEST", 16)

    def run(remat):
        given = {"ffn": ffn, "remat": remat, "scan_layers": scan, "value_embeddings": not scan}
        task, _ = make_spec(resolved(**given, fp8="blocks", fp8_history=2))
        past = jax.tree.map(lambda x: x + 64, model_fp8.init_amax_history(task.specs, 2))
        slopes = lambda p, b: gradients(task, p, b, jnp.float32(1), extras={"amax_history": past})
        return jax.jit(slopes)(random_params(task.specs), batch(4, micro=4))

    for a, b in zip(*map(jax.tree.leaves, (run("dots_fp8"), run("dots"))), strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"share_kv": "adjacent"}], ids=["own", "shared"])
@pytest.mark.parametrize("sizes", [{}, {"fsdp": 8}], ids=["one", "fsdp"])
@pytest.mark.quick("one-own")
def test_one_cast_for_an_input_changes_no_bit(sizes, changes, monkeypatch):
    """The loss, all gradients and all maxima, beside a cast for each matrix. The maxima of a layer
    whose keys and values are apart differ, so its casts stay apart."""
    monkeypatch.setattr(model_fp8, "SMALLEST", 16)
    if sizes:
        how = ShardedCast(("data", "fsdp", "expert"), "reference")
        monkeypatch.setattr(model_fp8, "cast_backend", lambda: how)
    alike = {"ffn": "swiglu", "kv_heads": 2, "remat": "dots", "value_embeddings": False}
    task, _ = make_spec(resolved(**alike | changes, fp8="blocks", fp8_history=2))
    past, mesh = model_fp8.init_amax_history(task.specs, 2), mesh_of(**sizes)
    leaves, tree = jax.tree.flatten(past)
    past = tree.unflatten(x + 1.5 * (i + 1) for i, x in enumerate(leaves))
    slopes = lambda p, b: gradients(task, p, b, jnp.float32(1), extras={"amax_history": past})
    with jax.set_mesh(mesh):
        given = random_params(task.specs), place_batch(batch(8, micro=8), mesh, batch_dim=1)
        found = jax.jit(slopes)(*given)
        monkeypatch.setattr(Fp8Weight, "cast_input", lambda *_: None)
        same(found, jax.jit(lambda *given: slopes(*given))(*given))


def test_on_a_mesh_that_divides_columns_all_casts_are_xlas():
    found, text = traced(mesh_of(data=2, tensor=2))
    assert not found and "mosaic_gpu" not in text and "f8E5M2" in text
    assert "mosaic_gpu" in traced(mesh_of(fsdp=2))[1]  # 64 rows each


@pytest.mark.slow
def test_the_activation_in_the_casts_is_the_one_before_them(monkeypatch):
    monkeypatch.setattr(model_fp8, "SMALLEST", 16)

    def run(**changes):
        task, _ = make_spec(resolved(depth=1, fp8="blocks", **changes))
        params = random_params(task.specs)
        past = {t.name: t.init({}, task.specs) for t in task.transforms if t.has_state}
        past = jax.tree.map(lambda x: x + 64, past)  # as the true maxima would be, but larger
        slopes = lambda p, b: gradients(task, p, b, jnp.float32(1), extras=past)
        return jax.jit(slopes)(params, batch(4, micro=4))

    for scaling in ({}, {"fp8_history": 1}):
        (loss, _), grads, maxima = run(**scaling)
        (apart, _), others, others_seen = run(kernels={"relu2": "xla"}, **scaling)
        np.testing.assert_allclose(loss, apart, rtol=1e-4)
        pairs = jax.tree.leaves((grads, maxima)), jax.tree.leaves((others, others_seen))
        for a, b in zip(*pairs, strict=True):
            # A last bit before a cast can move a value by a step of float8.
            assert np.linalg.norm(a - b) <= 0.02 * np.linalg.norm(b)


def test_evaluation_is_the_same_computation_without_it():
    def jaxpr_of(fp8):
        task, _ = make_spec(resolved(**SHAPE, fp8=fp8))
        run = lambda p, b: objectives.evaluation_sums(task.graphdef, p, b, jnp.ones(61))
        text = str(jax.make_jaxpr(run)(random_params(task.specs), batch(2)))
        return [line.split(" at 0x")[0] for line in text.splitlines()]

    assert jaxpr_of("blocks") == jaxpr_of(None)


def test_a_backend_that_cannot_serve_is_one_clear_error():
    task, _ = make_spec(resolved(**SHAPE, fp8="blocks", kernels={"ffn": "mosaic"}))
    given = random_params(task.specs), batch(1, micro=1)
    with pytest.raises(UserError, match=r"model.kernels.ffn: fp8_quantize: mosaic cannot .* xla"):
        jax.eval_shape(lambda p, b: gradients(task, p, b, jnp.float32(1)), *given)
