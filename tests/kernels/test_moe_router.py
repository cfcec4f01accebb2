"""The router: equal to the reference with all gradients, on a CPU and on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from jaxtrain_kernels import moe_router, moe_router_permute
from jaxtrain_kernels.dispatch import Target, on_target, target
from jaxtrain_kernels.moe_router import reference, separate, triton

H200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))
HOPPER = Target("cuda", (9, 0))
BF16 = jnp.bfloat16
# B, T, D, E, k
CASES = [
    ((2, 128, 256, 8, 2), "sigmoid"),
    ((1, 64, 128, 5, 3), "softmax"),
    ((3, 64, 384, 20, 1), "softmax"),
]


def arrays(B, T, D, E):
    rng = np.random.default_rng([B, T, D, E])
    x, router, bias = (rng.normal(size=s) for s in ((B, T, D), (D, E), (E,)))
    return jnp.asarray(x, BF16), jnp.float32(router / D**0.5), jnp.float32(0.1 * bias)


def gradients(B, T, D, E, k):
    """Gradients of x, weights, shares and z."""
    rng = np.random.default_rng(7)
    shapes = ((B, T, D), BF16), ((B, T, k), jnp.float32), ((B, E), jnp.float32), ((B,), jnp.float32)
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape, dtype in shapes)


def all_results(route, x, router, bias, given):
    """Choices and hits; x, weights, shares, z, and the gradients of x and of the router."""

    def run(x, router):
        r = route(x, router, bias)
        return (r[0], r[2], r[4].sum(1), r[5].sum(1)), (r[1], r[3].sum(1))

    values, back, chosen = jax.vjp(run, x, router, has_aux=True)
    return chosen, (*values, *back(given))


def permuted_results(route, x, router, bias, given, k):
    """Rows of copies and hits; rows, their weights, shares, z, and the gradients of x and of the
    router."""
    (B, T, D), (dx, _, dshares, dz) = x.shape, given
    rng = np.random.default_rng(8)
    drows = jnp.asarray(rng.normal(size=(B, T * k, D)), dx.dtype)
    dweights = jnp.float32(rng.normal(size=(B, T * k, 1)))

    def run(x, router):
        r = route(x, router, bias)
        return (r[0], r[1], r[4].sum(1), r[5].sum(1)), (r[2], r[3].sum(1))

    values, back, chosen = jax.vjp(run, x, router, has_aux=True)
    return chosen, (*values, *back((drows, dweights, dshares, dz)))


def assert_equal(found, expected, error=3e-6):
    """Choices are equal; float32 differs by the order of sums, dx by a rounding of bfloat16."""
    for a, b in zip(found[0], expected[0], strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype
    names = "x", "weights", "shares", "z", "dx", "drouter"
    for name, a, b in zip(names, found[1], expected[1], strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        tolerance = 8e-3 if name == "dx" else error
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max(), name


@pytest.mark.parametrize(("shape", "scores"), CASES, ids=str)
@pytest.mark.quick("(2, 128, 256, 8, 2)-sigmoid", "(1, 64, 128, 5, 3)-softmax")
def test_the_kernels_equal_the_reference(shape, scores):
    *sizes, k = shape
    by = lambda m, **how: lambda *a: m.moe_router(*a, top_k=k, score_function=scores, **how)
    given = *arrays(*sizes), gradients(*sizes, k)
    found, expected = (all_results(by(*m[:1], **m[1]), *given) for m in
                       ((triton, {"interpret": True}), (reference, {})))  # fmt: skip
    assert_equal(found, expected)


@pytest.mark.parametrize(("shape", "scores"), CASES, ids=str)
@pytest.mark.quick("(2, 128, 256, 8, 2)-sigmoid")
def test_the_kernels_with_permuted_tokens_equal_the_reference(shape, scores):
    *sizes, k = shape
    given, how = (*arrays(*sizes), gradients(*sizes, k), k), dict(top_k=k, score_function=scores)
    by = lambda run, **more: permuted_results(lambda *a: run(*a, **how, **more), *given)
    expected = by(reference.moe_router_permute)
    assert_equal(by(triton.moe_router_permute, interpret=True), expected)
    assert_equal(by(separate.moe_router_permute), expected)


def test_the_rows_are_sorted_by_expert_over_all_sequences():
    x, router, bias = arrays(2, 64, 128, 5)
    how = dict(top_k=2, score_function="softmax")
    r, chosen = moe_router_permute(x, router, bias, **how), moe_router(x, router, bias, **how)[1]
    experts = np.empty(256, int)
    experts[np.asarray(r.row_BTk).reshape(-1)] = np.asarray(chosen).reshape(-1)
    assert (np.diff(experts) >= 0).all()
    for b, t, j in ((0, 0, 0), (1, 63, 1)):
        row = np.asarray(r.rows_BMD, np.float32).reshape(256, -1)[r.row_BTk[b, t, j]]
        np.testing.assert_array_equal(row, x[b, t].astype(jnp.float32))


def test_without_a_bias_the_best_scores_win():
    x, router, bias = arrays(1, 64, 128, 8)
    by = dict(top_k=2, score_function="sigmoid")
    found = triton.moe_router(x, router, None, **by, interpret=True)[1]
    logits = np.asarray(x[0], np.float64) @ np.asarray(router, np.float64)
    np.testing.assert_array_equal(found[0], np.argsort(-logits, axis=1)[:, :2])
    other = triton.moe_router(x, router, 10 * bias, **by, interpret=True)[1]
    assert (found != other).any()


def test_tokens_that_are_not_numbers_go_to_experts_that_exist():
    x, router, bias = arrays(1, 64, 128, 5)
    x = x.at[0, 3].set(jnp.nan)
    out = triton.moe_router(x, router, bias, top_k=2, score_function="softmax", interpret=True)
    assert int(out[1].min()) >= 0 and int(out[1].max()) < 5
    assert np.isnan(out[2][0, 3]).all() and np.isfinite(np.delete(out[2][0], 3, axis=0)).all()


def test_the_states_are_not_kept_in_float32():
    x_BTD = jax.random.normal(jax.random.key(0), (2, 8, 16), BF16)
    w_DE = jax.random.normal(jax.random.key(1), (16, 4))
    logits_BTE, back = jax.vjp(reference.router_logits, x_BTD, w_DE)
    plain = jax.vjp(lambda x, w: jnp.matmul(x.astype(jnp.float32), w), x_BTD, w_DE)
    for a, b in zip(back(logits_BTE), plain[1](plain[0]), strict=True):
        np.testing.assert_allclose(a.astype("float32"), b.astype("float32"), rtol=1e-2, atol=1e-5)
    kept = [(k.shape, k.dtype) for k in jax.tree.leaves(back)]
    assert (x_BTD.shape, BF16) in kept and (x_BTD.shape, jnp.float32) not in kept


def test_lowers_for_cuda_without_a_sort():
    given = *arrays(2, 128, 256, 8), gradients(2, 128, 256, 8, 2)
    route = lambda *a: moe_router(*a, top_k=2, score_function="sigmoid")
    with on_target("cuda", (9, 0)), jax.sharding.use_abstract_mesh(H200):
        traced = jax.jit(lambda *a: all_results(route, *a)).trace(*given)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__gpu$xla.gpu.triton") == 4
    route = lambda *a: moe_router_permute(*a, top_k=2, score_function="sigmoid")
    with on_target("cuda", (9, 0)), jax.sharding.use_abstract_mesh(H200):
        traced = jax.jit(lambda *a: permuted_results(route, *a, 2)).trace(*given)
        permuted = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert permuted.count("@__gpu$xla.gpu.triton") == 6
    assert "stablehlo.sort" not in permuted
    assert not any(f"stablehlo.{op}" in text for op in ("sort", "dot_general", "exponential"))


@pytest.mark.parametrize(
    ("device", "x", "router", "reason"),
    [
        (HOPPER, ((2, 2048, 768), BF16), ((768, 8), jnp.float32), None),
        (HOPPER, ((2, 2048, 768), jnp.float16), ((768, 8), jnp.float32), "got float16"),
        (HOPPER, ((2, 2048, 768), BF16), ((768, 8), BF16), "a float32 router"),
        (HOPPER, ((2, 1, 768), BF16), ((768, 8), jnp.float32), "got 1 and 768"),
        (HOPPER, ((2, 64, 96), BF16), ((96, 8), jnp.float32), "got 64 and 96"),
        (HOPPER, ((2, 64, 128), BF16), ((128, 65), jnp.float32), "64 experts, got 65"),
        (HOPPER, ((2**15, 64, 1024), BF16), ((1024, 8), jnp.float32), "got 2147483648"),
        (Target("cuda", (8, 0)), ((2, 64, 128), BF16), ((128, 8), jnp.float32), "this is (8, 0)"),
        (Target("cpu"), ((2, 64, 128), BF16), ((128, 8), jnp.float32), "this is cpu"),
    ],
)
def test_what_they_serve(device, x, router, reason):
    why = triton.supports(device, *(jax.ShapeDtypeStruct(*a) for a in (x, router)))
    assert why is None if reason is None else why is not None and reason in why
    given = (jax.ShapeDtypeStruct(*a) for a in (x, router))
    with_rows = triton.supports_permute(device, *given, 17)
    assert with_rows == (why or "needs at most 16 experts a token, got 17")


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "scores"), CASES, ids=str)
def test_on_a_gpu_they_equal_the_reference(shape, scores):
    assert_equal_on_a_gpu(shape, scores, *arrays(*shape[:-1]))


@pytest.mark.gpu
def test_on_a_gpu_they_equal_the_reference_at_a_layers_size():
    """Of integers times 2^-10: the order of sums changes no logit, so that no choice differs."""
    shape = B, T, D, E, _ = 32, 2048, 768, 8, 2
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(-4, 5, (B, T, D)), BF16)
    router = jnp.float32(rng.integers(-16, 17, (D, E)) / 1024)
    assert_equal_on_a_gpu(shape, "sigmoid", x, router, jnp.zeros(E))


def assert_equal_on_a_gpu(shape, scores, x, router, bias):
    if reason := triton.supports(target(), x, router):
        pytest.skip(reason)
    how = dict(top_k=shape[-1], score_function=scores)
    by = lambda name: lambda *a: moe_router(*a, **how, implementation=name)
    run, given = jax.jit(all_results, static_argnums=0), (x, router, bias, gradients(*shape))
    assert_equal(run(by("triton"), *given), run(by("reference"), *given), error=3e-5)
    by = lambda name: lambda *a: moe_router_permute(*a, **how, implementation=name)
    run, given = jax.jit(permuted_results, static_argnums=(0, 5)), (*given, shape[-1])
    assert_equal(run(by("triton"), *given), run(by("reference"), *given), error=3e-5)
