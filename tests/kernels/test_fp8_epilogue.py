"""Products in float8 with the casts in their epilogue: every backend against the reference."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import jaxprs_in_params
from jaxtrain_kernels import fp8_feed_forward_relu2
from jaxtrain_kernels.dispatch import Target, on_target
from jaxtrain_kernels.matmul import fp8_epilogue
from jaxtrain_kernels.matmul.fp8.functions import relu2, relu2_grad
from jaxtrain_kernels.matmul.fp8_epilogue import fp8_product_quantized, hopper, reference
from jaxtrain_kernels.matmul.fp8_epilogue.reference import ProductOptions
from jaxtrain_kernels.matmul.hopper.gemm import GemmTiling

E4M3, E5M2, BF16 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16
# The mode that knows that TMA's copies are asynchronous, and hardware barriers by their name.
INTERPRET = plgpu.InterpretGPUParams(
    detect_races=True, inline_mgpu="_hack_model_inline_mgpu_tokamax"
)
TURNS = GemmTiling(128, 64, stages=2, parts=1, cluster=1, group=2, blocks=1)
SHARED = TURNS._replace(shared=True, columns=128)


def options_of(gradient, keep=False):
    """Of the activation, and of its gradient."""
    function, dtype = (relu2_grad, E5M2) if gradient else (relu2, E4M3)
    return ProductOptions(function, dtype, BF16, keep, exact=gradient)


def operands(M, N, K, gradient, fractions=False):
    """Small integers, whose products and sums are exact in any order; else normal values."""
    rng = np.random.default_rng(0)
    draw = rng.standard_normal if fractions else lambda shape: rng.integers(-4, 5, shape)
    a = jnp.asarray(draw((M, K)), E5M2 if gradient else E4M3)
    arrays = [a, jnp.asarray(draw((N, K)), E4M3)]
    return [*arrays, jnp.asarray(rng.standard_normal((M, N)), BF16)] if gradient else arrays


def bits(outs):
    return [np.asarray(x.astype(jnp.float32)) for x in outs if x is not None]


def with_maximum(outs):
    """Results of `product_quantized` with the amax of all parts."""
    q_MN, q_NM, seen, product = outs
    return q_MN, q_NM, jnp.max(seen), product


@pytest.mark.parametrize(
    ("M", "N", "K", "gradient", "exact", "tiling"),
    [
        (256, 256, 128, False, False, TURNS),
        (384, 256, 256, False, False, TURNS._replace(columns=192, parts=2, cluster=2, blocks=2)),
        (384, 256, 384, True, True, SHARED),
        (768, 256, 640, True, True, SHARED._replace(cluster=2, blocks=2)),
        (384, 256, 128, True, False, SHARED),
        (768, 256, 640, True, False, SHARED._replace(cluster=2, blocks=2)),
    ],
    ids=["small", "turns", "shared", "cluster", "fast, one step", "fast"],
)
@pytest.mark.quick("small")
def test_mosaic_is_the_reference_bit_for_bit_without_races(M, N, K, gradient, exact, tiling, capfd):
    """Sizes that cut tiles off; some values saturate."""
    keep = tiling.parts == 2
    given = options_of(gradient, keep)._replace(exact=exact), operands(M, N, K, gradient)
    scales = jnp.float32(2.0**-4), jnp.float32(2.0**12 if gradient else 4)
    outs = with_maximum(
        hopper.product_quantized(*given, *scales, tiling=tiling, interpret=INTERPRET)
    )
    wanted = reference.product_quantized(*given, *scales)
    assert len(bits(outs)) == 3 + keep
    for out, like in zip(bits(outs), bits(wanted), strict=True):
        np.testing.assert_array_equal(out, like)
    assert np.abs(bits(outs)[0]).max() == float(jnp.finfo(given[0].dtype).max)
    assert "RACE" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("gradient", [False, True])
def test_xla_is_the_reference(gradient):
    a, b, *others = operands(128, 64, 256, gradient)
    function, dtype, amax = (relu2_grad, E5M2, 90.0) if gradient else (relu2, E4M3, 400.0)
    run = lambda name: fp8_product_quantized(
        a, b, jnp.float32(2.0**-4), function, dtype, jnp.float32(amax), product_dtype=BF16,
        other_MN=others[0] if others else None, keep=not gradient, exact=gradient,
        implementation=name,
    )  # fmt: skip
    found, wanted = run("xla"), run("reference")
    for out, like in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        one, other = bits([out, like])
        np.testing.assert_array_equal(one, other)
    assert found.fp8.scale == wanted.fp8.scale and found.seen > 0
    assert (found.product_MN is None) == gradient


@pytest.mark.parametrize(
    ("gradient", "exact"), [(False, False), (True, False), (True, True)],
    ids=["forward", "fast", "exact"],
)  # fmt: skip
@pytest.mark.quick("exact")
def test_mosaic_lowers_for_hopper_at_the_models_sizes(gradient, exact):
    M, N, K = 32768, 6144, 1536  # gpt_d24's hidden layer
    shapes = [((M, K), E5M2 if gradient else E4M3), ((N, K), E4M3)]
    shapes += [((M, N), BF16)] * gradient
    arrays = [jax.ShapeDtypeStruct(*one) for one in shapes]
    scale = jax.ShapeDtypeStruct((), jnp.float32)
    options = options_of(gradient, keep=not gradient)._replace(exact=exact)

    def run(scale, multiplier, *arrays):
        return hopper.product_quantized(options, arrays, scale, multiplier)

    with on_target("cuda", (9, 0)):
        traced = jax.jit(run).trace(scale, scale, *arrays)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1 and "stablehlo.transpose" not in text


@pytest.mark.parametrize(
    ("reason", "shape", "dtype"),
    [
        ("needs rows", (192, 256, 128), BF16),
        ("needs rows", (256, 192, 128), BF16),
        ("above it", (128, 64, 128), BF16),
        ("above it", (64, 128, 128), BF16),
        ("a product in bfloat16", (128, 128, 128), jnp.float32),
    ],
)
def test_what_mosaic_cannot_do_is_refused_with_the_reason(reason, shape, dtype):
    a, b = operands(*shape, gradient=False)
    options = options_of(False)._replace(product_dtype=dtype)
    assert reason in (hopper.supports(Target("cuda", (9, 0)), options, a, b) or "")
    assert "needs an NVIDIA GPU" in (hopper.supports(Target("cpu"), options, a, b) or "")
    wide = a.astype(BF16), b
    assert "in float8" in (hopper.supports(Target("cuda", (9, 0)), options, *wide) or "")


# ---- the feed-forward network -----------------------------------------------------------------


def network(M=128, D=128, F=256):
    """(x, up, down, dy) and maxima that let some values saturate."""
    rng = np.random.default_rng(1)
    normal = lambda *shape, std=1.0: jnp.asarray(std * rng.standard_normal(shape), BF16)
    arrays = normal(M, D), normal(D, F, std=0.1), normal(F, D, std=0.05), normal(M, D, std=1e-5)
    return arrays, jnp.asarray([[3.0, 1e-4], [4.0, 2e-5]])


def results(epilogue, keep_hidden=True):
    (*given, dy), amax_22 = network()
    run = functools.partial(fp8_feed_forward_relu2, keep_hidden=keep_hidden, epilogue=epilogue)
    y, pull = jax.vjp(lambda *o: run(*o[:3], amax_22=o[3]), *given, amax_22)
    return [np.asarray(x, np.float32) for x in (y, *pull(dy))]


@pytest.mark.parametrize("keep_hidden", [True, False])
@pytest.mark.quick("False")
def test_the_network_is_that_of_casts_by_themselves(keep_hidden):
    for out, like in zip(*(results(name, keep_hidden) for name in ("xla", None)), strict=True):
        np.testing.assert_array_equal(out, like)


@pytest.mark.slow
def test_mosaics_network_is_that_of_casts_by_themselves(monkeypatch):
    """Sums in another order: a last bit of 16 moves a value by a step of float8."""

    def interpreted(options, *given):
        tiling = SHARED if options.exact else TURNS
        return hopper.product_quantized(options, *given, tiling=tiling, interpret=INTERPRET)

    backend = SimpleNamespace(supports=lambda *_: None, product_quantized=interpreted)
    monkeypatch.setitem(fp8_epilogue.BACKENDS, "mosaic", backend)
    for out, like in zip(results("mosaic"), results(None), strict=True):
        assert np.linalg.norm(out - like) <= 2e-3 * np.linalg.norm(like)


def test_an_epilogue_without_known_scales_is_an_error():
    (*given, _), _ = network()
    with pytest.raises(ValueError, match="pass amax_22"):
        fp8_feed_forward_relu2(*given, epilogue="xla")


@pytest.mark.gpu
@pytest.mark.parametrize(("gradient", "exact"), [(False, False), (True, False), (True, True)])
def test_on_a_gpu_mosaic_is_xla(gradient, exact):
    """At a size with several tiles a block; but for sums in another order."""
    a, b, *others = operands(4096, 3072, 768, gradient, fractions=True)
    function, dtype, amax = (relu2_grad, E5M2, 400.0) if gradient else (relu2, E4M3, 1e4)
    run = jax.jit(
        functools.partial(
            fp8_product_quantized, function=function, dtype=dtype, product_dtype=BF16,
            keep=not gradient, exact=exact,
        ),
        static_argnames=("implementation",),
    )  # fmt: skip
    given = dict(
        a_MK=a, b_NK=b, scale=jnp.float32(1), amax=jnp.float32(amax),
        other_MN=others[0] if others else None,
    )  # fmt: skip
    both = (run(**given, implementation=name) for name in ("mosaic", "xla"))
    ours, theirs = (found._replace(seen=jnp.max(found.seen)) for found in both)
    for out, like in zip(bits(jax.tree.leaves(ours)), bits(jax.tree.leaves(theirs)), strict=True):
        # The tensor cores' own sum has some 14 bits of its largest term, and values of e5m2 are up
        # to a quarter apart: 0.0067 was seen of gradients.
        assert np.linalg.norm(out - like) <= 1e-2 * np.linalg.norm(like)
        assert (out != like).mean() < 0.1
    np.testing.assert_array_equal(bits([ours.fp8.q_MK.T])[0], bits([ours.fp8.q_KM])[0])


@pytest.mark.gpu
@pytest.mark.parametrize(("gradient", "exact"), [(False, False), (True, False), (True, True)])
def test_on_a_gpu_mosaic_is_the_reference_bit_for_bit(gradient, exact):
    """Where each value lies in registers: no CPU runs that. Sizes that cut tiles off."""
    options = options_of(gradient, keep=not gradient)._replace(exact=exact)
    given = options, operands(1152, 1408, 768, gradient)
    scales = jnp.float32(2.0**-5), jnp.float32(4)
    for out, like in zip(
        bits(with_maximum(hopper.product_quantized(*given, *scales))),
        bits(reference.product_quantized(*given, *scales)),
        strict=True,
    ):
        np.testing.assert_array_equal(out, like)


@pytest.mark.slow
def test_the_network_on_hopper_has_two_products_less_of_xlas_and_two_casts_less():
    (*given, dy), amax_22 = network(M=256)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*given, amax_22, dy)]

    def run(x, up, down, amax_22, dy, epilogue):
        f = lambda *o: fp8_feed_forward_relu2(*o[:3], amax_22=o[3], epilogue=epilogue)
        y, pull = jax.vjp(f, x, up, down, amax_22)
        return y, pull(dy)

    dots, kernels = [], []
    for epilogue in (None, "mosaic"):
        with on_target("cuda", (9, 0)):
            fn = jax.jit(functools.partial(run, epilogue=epilogue))
            traced = fn.trace(*shapes)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        dots.append(text.count("stablehlo.dot_general"))
        names = list(kernel_names(traced.jaxpr.jaxpr))
        kernels.append((names.count("_cast"), names.count("_product")))
    # The casts that stay are of x, of y's gradient and of both matrices (no copies were given).
    assert dots == [6, 4] and kernels == [(6, 0), (4, 2)]


def kernel_names(jaxpr):
    """Of each call of a kernel for Hopper."""
    for equation in jaxpr.eqns:
        if (name := equation.params.get("name")) in ("_cast", "_product"):
            yield name
        else:
            for inner in jaxprs_in_params(equation.params):
                yield from kernel_names(inner)
