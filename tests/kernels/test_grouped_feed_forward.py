"""The experts' network with the squared ReLU: every backend is the reference, and its lowering."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtrain_kernels import grouped_feed_forward_relu2
from jaxtrain_kernels.dispatch import on_target, target
from jaxtrain_kernels.grouped_feed_forward import hopper, matmuls, reference
from jaxtrain_kernels.matmul.hopper.gemm import GemmTiling

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
# A tile has more parts than there are buffers: one is used again within a tile.
TURNS = GemmTiling(64, 192, stages=2, parts=2, cluster=1, group=2, blocks=1)
BF16 = jnp.bfloat16
NAMES = "y", "dx", "dup", "ddown", "dweights"


def arrays(sizes, M, D, F, dtype=BF16, after=1.0):
    """dy, x, up, down, weights (one is 0) and sizes; rows after the last group are `after`."""
    rng, E, end = np.random.default_rng(0), len(sizes), sum(sizes)
    dy, x, up, down = (rng.standard_normal(s) for s in ((M, D), (M, D), (E, D, F), (E, F, D)))
    weights = rng.uniform(0.1, 1, (M, 1))
    weights[1] = 0
    dy[end:], x[end:] = after, after
    dy, x, up, down = (jnp.asarray(a, dtype) for a in (dy, x, up / D**0.5, down / F**0.5))
    return dy, x, up, down, jnp.asarray(weights, jnp.float32), jnp.asarray(sizes, jnp.int32)


def results(f, dy, x, up, down, weights, sizes):
    y, pull = jax.vjp(lambda *operands: f(*operands, sizes), x, up, down, weights)
    return y, *pull(dy)


def exact(dy, x, up, down, weights, sizes):
    """By the reference's autodiff, in float32 and without the rows after the last group."""
    end = int(jnp.sum(sizes))
    wide = lambda a: a.astype(jnp.float32)
    y, dx, dup, ddown, dweights = results(
        reference.grouped_feed_forward_relu2,
        wide(dy[:end]), wide(x[:end]), wide(up), wide(down), weights[:end], sizes,
    )  # fmt: skip
    padded = lambda a: jnp.pad(a, ((0, len(x) - end), (0, 0)))
    return padded(y), padded(dx), dup, ddown, padded(dweights)


def assert_equals_reference(given, out, tolerance):
    for name, ours, right in zip(NAMES, out, exact(*given), strict=True):
        ours = np.array(ours, np.float32)
        if name == "dweights":
            assert ours[1] == 0, "of a weight of 0 it is not known"
            ours[1] = right[1]
        size = float(jnp.abs(right).max()) + 1e-6
        np.testing.assert_allclose(ours / size, right / size, atol=tolerance, err_msg=name)


@pytest.mark.parametrize(
    ("sizes", "M", "tiling"),
    [
        ((70, 0, 66, 30), 200, TURNS),
        ((136,), 136, TURNS._replace(rows=128, columns=64)),
    ],
    ids=["uneven", "one"],
)
@pytest.mark.quick("uneven")
def test_the_kernel_equals_the_reference_without_races(sizes, M, tiling, capfd):
    """Value and gradients; rows after the last group may be any values."""
    given = arrays(sizes, M, 128, 192, after=np.nan)
    how = dict(tiling=tiling, interpret=INTERPRET)
    out = results(lambda *a: hopper.grouped_feed_forward_relu2(*a, **how), *given)
    assert [a.dtype for a in out] == [BF16] * 4 + [jnp.float32]
    assert_equals_reference(given, out, 2e-2)
    assert "RACE" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("sizes", [(7, 0, 20, 5), (0, 0)], ids=str)
def test_two_matmuls_equal_the_reference(sizes):
    given = arrays(sizes, 40, 16, 24, jnp.float32)
    ours, right = (results(b.grouped_feed_forward_relu2, *given) for b in (matmuls, reference))
    for name, a, b in zip(NAMES, ours, right, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("device", "D", "dtype", "reason"),
    [
        (("cpu", None), 128, BF16, "this is cpu"),
        (("cuda", (9, 0)), 128, jnp.float16, "needs bfloat16, .* got float16"),
        (("cuda", (9, 0)), 64, BF16, r"in multiples of 64 above it, got \[64, 192\]"),
    ],
)
def test_what_the_kernel_cannot_serve_goes_to_two_matmuls(device, D, dtype, reason):
    _, *operands = arrays((100, 60), 200, D, 192, dtype)
    with on_target(*device):
        with pytest.raises(NotImplementedError, match=reason):
            grouped_feed_forward_relu2(*operands, implementation="mosaic")
        by_default = jax.make_jaxpr(grouped_feed_forward_relu2)(*operands)
        by_name = jax.make_jaxpr(matmuls.grouped_feed_forward_relu2)(*operands)
    assert str(by_default).count("ragged_dot") == str(by_name).count("ragged_dot")


def test_lowers_for_hopper():
    shapes = (4096, 768), (4096, 768), (8, 768, 1536), (8, 1536, 768)
    given = [jax.ShapeDtypeStruct(s, BF16) for s in shapes]
    given += [jax.ShapeDtypeStruct((4096, 1), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.int32)]
    with on_target("cuda", (9, 0)):
        traced = jax.jit(lambda *a: results(grouped_feed_forward_relu2, *a)).trace(*given)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 6
    assert not re.search(r"stablehlo\.(maximum|multiply).*4096x1536", text)  # ReLU^2 is in them


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("sizes", "M", "D", "F"),
    [((1000, 0, 333, 129, 4), 2048, 256, 512), ((3, 2, 190, 5), 256, 192, 320)],
    ids=["uneven", "small"],
)
def test_on_a_gpu_it_errs_by_few_roundings(sizes, M, D, F):
    given = arrays(sizes, M, D, F, after=np.nan)
    if reason := hopper.supports(target(), *given[1:4]):
        pytest.skip(reason)
    kernel = lambda *a: grouped_feed_forward_relu2(*a, implementation="mosaic")
    assert_equals_reference(given, jax.jit(lambda *a: results(kernel, *a))(*given), 2e-2)
