"""Float8 in a training step: which matrices, how often they are cast, and what it does to a model.

The products themselves are in tests/kernels/test_fp8.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jaxtrain_kernels.dispatch import on_target
from tiny import batch, begin, build, make_spec, mesh_of, random_params, resolved, run_overrides

from jaxtrain.main import main
from jaxtrain.model import ModelConfig, Transformer, fp8_weights, path_name, resolve_model, split
from jaxtrain.objectives import next_token as objectives
from jaxtrain.parallel import place_batch
from jaxtrain.settings import UserError
from jaxtrain.train.step import gradients, make_step
from jaxtrain.weights import float8 as model_fp8

MATRICES = ["attention/k", "attention/out", "attention/q", "attention/v", "ffn/down", "ffn/up"]


@pytest.fixture
def small(monkeypatch):
    """Matrices of the tests' size count as large."""
    monkeypatch.setattr(model_fp8, "SMALLEST", 16)


def cast_names(specs):
    paths = jax.tree_util.tree_flatten_with_path(specs)[0]
    return sorted(path_name(path) for path, spec in paths if model_fp8.in_fp8(spec))


def equations(jaxpr):
    """All equations, those of inner jaxprs included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def is_fp8(variable):
    return str(variable.aval.dtype).startswith("float8")


def test_the_large_matrices_of_the_blocks_are_cast_and_nothing_else():
    c = resolve_model(ModelConfig(depth=12), 2048)
    _, specs = split(Transformer(c, 32768))
    assert cast_names(specs) == [f"blocks/{name}" for name in MATRICES]
    c = resolve_model(ModelConfig(depth=2, width=128, hidden=200, ffn="swiglu"), 2048)
    _, specs = split(Transformer(c, 32768))
    assert cast_names(specs) == [f"blocks/{name}" for name in MATRICES[:4]]  # 200 is no 12 x 16


def traced(fp8=None, micro=8, **changes):
    """The jaxpr of a batch's gradients."""
    task, _ = make_spec(resolved(depth=2, fp8=fp8, **changes))
    params = random_params(task.specs)
    run = lambda p, b: gradients(task, p, b, jnp.float32(1))
    return jax.make_jaxpr(run)(params, batch(8, micro=micro)).jaxpr


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("which", "head"), [("blocks", 0), ("all", 3)])
@pytest.mark.quick("all-3")
def test_all_three_products_of_each_matrix_are_in_float8(which, head):
    dots = [e for e in equations(traced(which)) if e.primitive.name == "dot_general"]
    of_fp8 = [e for e in dots if all(map(is_fp8, e.invars))]
    assert len(of_fp8) == 2 * len(MATRICES) * 3 + head
    assert not any(is_fp8(v) for e in dots if e not in of_fp8 for v in e.invars)
    assert not any(is_fp8(v) for e in equations(traced()) for v in e.outvars)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "changes",
    [{"ffn": "relu2"}, {"ffn": "swiglu"}, {"fp8_history": 2, "kernels": {"qkv": "reference"}}],
    ids=["relu2", "swiglu", "one array"],
)
@pytest.mark.quick("relu2")
def test_with_fast_accum_gradients_of_weights_alone_are_summed_in_float32(changes):
    """Two of three products of a matrix by default, one of three with it."""
    exact = []
    for fast in (False, True):
        jaxpr = traced("blocks", fp8_fast_accum=fast, fp8_gradients="kernels" in changes, **changes)
        dots = [e for e in equations(jaxpr) if e.primitive.name == "dot_general"]
        products = [e.params["precision"] for e in dots if all(map(is_fp8, e.invars))]
        exact.append(sum("HIGHEST" in str(precision) for precision in products))
    assert len(products) == 3 * exact[1] and exact[0] == 2 * exact[1] > 0


def test_the_three_products_of_the_head_alone_are_in_float8():
    jaxpr = traced(kernels={"loss": "fp8_head"})
    dots = [e for e in equations(jaxpr) if e.primitive.name == "dot_general"]
    assert [all(map(is_fp8, e.invars)) for e in dots].count(True) == 3


@pytest.mark.usefixtures("small")
def test_matrices_are_cast_once_a_step_not_once_a_microbatch():
    scans = [e for e in traced("blocks", micro=2).eqns if e.primitive.name == "scan"]
    (scan,) = scans
    stacks = [v.aval.shape for v in scan.invars if is_fp8(v)]
    assert len(stacks) == 2 * len(MATRICES) and all(shape[0] == 2 for shape in stacks)
    inside = [e for e in equations(scan.params["jaxpr"].jaxpr) if any(map(is_fp8, e.outvars))]
    casts = [e.outvars[0].aval.shape for e in inside if e.primitive.name == "convert_element_type"]
    assert casts and not set(casts) & {shape[1:] for shape in stacks}


@pytest.mark.usefixtures("small")
def test_evaluation_has_no_float8():
    _, graphdef, _, params = build(depth=2, fp8="all", fp8_history=2)
    run = lambda p, b: objectives.evaluation_sums(graphdef, p, b, jnp.ones(61))
    jaxpr = jax.make_jaxpr(run)(params, batch(2)).jaxpr
    assert not any(is_fp8(v) for e in equations(jaxpr) for v in e.outvars)


@pytest.mark.usefixtures("small")
@pytest.mark.slow
def test_scan_and_remat_change_nothing():
    def losses(**changes):
        fields = {"depth": 2, "window_pattern": "L", "value_embeddings": False, "fp8": "blocks"}
        task, _ = make_spec(resolved(**fields, **changes))
        run = jax.jit(lambda p, b: gradients(task, p, b, jnp.float32(1)))
        return run(random_params(task.specs), batch(4, micro=4))

    (loss, _), grads, _ = losses()
    for (other_loss, _), other_grads, _ in [losses(scan_layers=True, remat="block")]:
        np.testing.assert_allclose(other_loss, loss, rtol=1e-5)
        for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(other_grads), strict=True):
            # A last bit before a cast can move a value by a step of float8.
            assert np.linalg.norm(a - b) <= 0.02 * np.linalg.norm(a)


@pytest.mark.slow
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "changes", [{"fp8": "all"}, {"kernels": {"loss": "fp8_head"}}], ids=["all", "fp8_head"]
)
def test_a_model_learns_as_it_does_without(changes):
    def losses(**changes):
        task, hyperparams = make_spec(resolved(depth=1, **changes))
        mesh, out = mesh_of(), []
        with jax.set_mesh(mesh):
            step, state = make_step(task, mesh), begin(task, mesh)
            placed = place_batch(batch(8, micro=8), mesh, batch_dim=1)
            for _ in range(40):
                state, metrics = step(state, placed, hyperparams)
                out.append(float(metrics["loss"]))
        return np.array(out)

    plain, fp8 = losses(), losses(**changes)
    assert plain[-1] < 0.85 * plain[0]
    np.testing.assert_allclose(fp8, plain, rtol=0.01)
    assert (fp8[5:] != plain[5:]).all()


def test_a_device_without_float8_is_one_clear_error(monkeypatch, tmp_path, capsys):
    with on_target("cuda", (7, 5)), pytest.raises(UserError, match="this is cuda 7.5") as error:
        fp8_weights({}, {})
    assert "model.fp8: float8 matmuls need" in str(error.value) and "\n" not in str(error.value)
    with on_target("cuda", (8, 0)):
        assert main(run_overrides(tmp_path, model__fp8="blocks")) == 2
    assert "compute capability 8.9 or later" in capsys.readouterr().err
    with on_target("cuda", (8, 0)):
        assert main(run_overrides(tmp_path, model__kernels__loss="fp8_head")) == 2
    error = capsys.readouterr().err
    assert "model.kernels.loss: float8 matmuls need" in error and "this is cuda 8.0" in error
    assert not list(tmp_path.iterdir())


def test_it_is_off_unless_asked_for():
    assert ModelConfig().fp8 is None
