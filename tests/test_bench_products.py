"""The products of a step: which there are, and how they are added up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import cublaslt, products
from benchmarks.cublaslt import Problem
from jaxtrain.estimate.workload import load_workload
from jaxtrain.settings import UserError
from jaxtrain.weights.params import is_block_matrix

SMALL = ["model.depth=2", "model.width=64", "model.head_dim=16", "train.sequence_length=128",
         "train.batch_size=8", "train.device_batch_size=1"]  # fmt: skip


def test_a_steps_products_are_those_of_its_matrices():
    w = load_workload("gpt_d12", SMALL)
    found = products.step_products(w.spec.specs, w.tokens)
    leaves = jax.tree.leaves(w.spec.specs)
    weights = sum(x.size for x in leaves if is_block_matrix(x) or x.role == "head")
    # Each weight and token is met once forward and once for each gradient.
    assert sum(p.count * p.flops for p in found) == 6 * weights * w.tokens
    names = {p.name for p in found}
    assert "blocks/attention/qkv" in names and "blocks/attention/q" not in names
    wide = next(p for p in found if p.name.endswith("qkv") and p.pass_ == "forward")
    assert (wide.problem.M, wide.problem.N, wide.problem.K) == (1024, 3 * 64, 64)


@pytest.mark.parametrize("a_turned", [False, True])
@pytest.mark.parametrize("b_turned", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_a_product_is_computed_in_each_order_of_its_operands(a_turned, b_turned, adds):
    problem = Problem(8, 4, 16, a_turned, b_turned, adds, "float32", "float32")
    a, b, _ = products.operands(problem, jax.random.key(0))
    y = jnp.ones((8, 4))
    expected = (a.T if a_turned else a) @ (b.T if b_turned else b) + adds
    np.testing.assert_allclose(products.multiply(problem, a, b, y), expected, rtol=1e-5, atol=1e-5)


def test_sums_of_a_step_count_each_product_and_take_the_fastest():
    row = lambda name, backend, ms, count: dict(
        name=name, backend=backend, ms=ms, count=count, tflops=10 / ms, shape=""
    )
    rows = [row("a", "xla", 2.0, 3), row("a", "mosaic", 1.0, 3), row("b", "xla", 5.0, 1),
            {"name": "b", "backend": "cublaslt", "ms": None, "count": 1}]  # fmt: skip
    xla, fastest = products.sums_of(rows)
    assert (xla["backend"], xla["ms"]) == ("xla", 11.0)
    assert (fastest["backend"], fastest["ms"]) == ("fastest of each", 8.0)
    assert fastest["tflops"] == pytest.approx(40 / 8)
    assert products.sums_of([*rows, {"name": "c", "backend": "xla", "ms": None}]) == []


def test_without_the_library_one_line_says_so(monkeypatch):
    monkeypatch.setattr(cublaslt, "library_paths", lambda: iter(["/nowhere/libcublasLt.so"]))
    cublaslt.library.cache_clear()
    with pytest.raises(UserError, match="libcublasLt.so is not here"):
        cublaslt.library()


def test_experts_are_refused():
    with pytest.raises(UserError, match="groups of rows"):
        w = load_workload("gpt_d12", [*SMALL, "model.moe.experts=4"])
        products.step_products(w.spec.specs, w.tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, False), (True, True)])
def test_the_librarys_kernels_compute_the_product(turned):
    problem = Problem(256, 384, 512, *turned, adds=turned == (True, False),
                      out_dtype="float32" if turned == (True, False) else "bfloat16")  # fmt: skip
    a, b, y = products.operands(problem, jax.random.key(0))
    expected = products.multiply(problem, a, b, y)
    found = cublaslt.Products(problem)
    assert found.count
    into = jnp.copy(y)
    jax.block_until_ready((a, b, into))
    found.run(0, a, b, into)
    found.block_until_ready()
    np.testing.assert_allclose(into, expected, rtol=0.02, atol=0.05)
    assert min(found.describe(0).values()) >= 0
    found.close()
