"""The bench of float8 products with the casts in their epilogue, and of norms that cast."""

import jax.numpy as jnp
import pytest
from jaxtrain_kernels.matmul.fp8_epilogue import hopper

from benchmarks import casts, epilogues, timing


@pytest.mark.slow
def test_each_product_has_a_row_with_its_error(monkeypatch):
    monkeypatch.setattr(timing, "WINDOW_SECONDS", 0.02)
    backends = {"xla", "mosaic"}
    rows = list(epilogues.epilogue_rows("small", (64, 128, 64), backends, jnp.bfloat16))
    names = [(row["name"], row["backend"]) for row in rows]
    assert names == [("fp8_product_relu2", "xla"), ("fp8_product_relu2_grad", "xla")]
    assert all(row["ms"] > 0 and row["error"] < 3e-2 for row in rows)
    assert not list(epilogues.epilogue_rows("small", (64, 128, 64), backends, jnp.float32))


@pytest.mark.slow
def test_norms_with_a_cast_have_rows_in_one_pass_and_apart(monkeypatch):
    monkeypatch.setattr(timing, "WINDOW_SECONDS", 0.02)
    dtype = jnp.dtype(jnp.bfloat16)
    rows = list(casts.norm_casts("small", (64, 128), {"xla", "mosaic"}, dtype))
    names = [(row["name"], row["backend"]) for row in rows]
    kinds = ("residual", "residual apart", "mixed", "mixed apart")
    assert names == [(f"norm_cast {kind}", "xla") for kind in kinds]
    assert all(row["ms"] > 0 for row in rows)
    # 64 x 128 values: two or three arrays read and one written in 16 bits, two in 8.
    sizes = [row["ms"] * row["gbps"] * 1e6 for row in rows]
    assert [round(size) for size in sizes] == [64 * 128 * n for n in (8, 8, 10, 10)]


@pytest.mark.parametrize("gradient", [False, True])
def test_every_tiling_that_is_timed_fits_shared_memory(gradient):
    options, sizes = epilogues.options_of(gradient), (32768, 6144, 1536)
    for tiling in epilogues.TILINGS[gradient]:
        plan = hopper._plan(options, sizes, options.dtype, gradient, tiling, False)
        assert plan.shared_bytes <= hopper.SHARED_BYTES
    unsuitable = [tiling._replace(rows=64), tiling._replace(stages=7)]
    if gradient:
        unsuitable.append(tiling._replace(columns=192, stages=1))
    for wrong in unsuitable:
        with pytest.raises(ValueError, match="tile"):
            hopper._plan(options, sizes, options.dtype, gradient, wrong, False)
