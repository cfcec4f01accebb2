"""Gradients that the kernel which computes them casts to float8, against a cast by itself."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtrain_kernels import cast_gradient, fp8_matmul, fp8_matmul_for_cast, rope_attention
from jaxtrain_kernels.attention import Call
from jaxtrain_kernels.attention.hopper.backward_plan import BackwardTiling
from jaxtrain_kernels.dispatch import on_target
from jaxtrain_kernels.matmul.fp8 import given_scale, reference
from jaxtrain_kernels.matmul.fp8.functions import itself
from jaxtrain_kernels.matmul.fp8.gradients import placeholders
from jaxtrain_kernels.rope_attention import hopper
from jaxtrain_kernels.rows.hopper import rope_cast, rope_in_place
from test_rows import EPS, angles

E5M2, BF16 = jnp.float8_e5m2, jnp.bfloat16
# The mode that knows bar.sync, a named barrier of the hardware.
INTERPRET = plgpu.InterpretGPUParams(
    inline_mgpu="_hack_model_inline_mgpu_tokamax", detect_races=True
)


def floats(tree: Any) -> list[Any]:
    return [np.asarray(x, np.float32) for x in jax.tree.leaves(tree)]


def assert_equal(found: Any, wanted: Any) -> None:
    for one, other in zip(floats(found), floats(wanted), strict=True):
        np.testing.assert_array_equal(one, other)


def normal(*shape: int, dtype: Any = BF16, seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng([*shape, seed]).standard_normal(shape), dtype)


# ---- matmuls -------------------------------------------------------------------------------------


def test_a_matmul_takes_the_gradient_from_the_op_that_reads_its_output():
    """Values, gradients and maxima are those of the matmul that casts the gradient itself."""
    x, w = normal(32, 64, dtype=jnp.float32), normal(64, 48, dtype=jnp.float32)
    amax_2 = jnp.asarray([3.0, 0.1])

    def plain(x, w, amax_2):
        return jnp.sin(fp8_matmul(x, w, amax_2=amax_2))

    def ours(x, w, amax_2):
        y, gradient = fp8_matmul_for_cast(x, w, amax_2=amax_2)
        return jnp.sin(cast_gradient(y, gradient))

    both = []
    for f in (plain, ours):
        y, pull = jax.vjp(jax.jit(f), x, w, amax_2)
        both.append((y, pull(normal(32, 48, dtype=jnp.float32))))
    assert_equal(*both)
    assert all(np.abs(x).max() > 0 for x in floats(both[1]))


def test_the_outputs_own_cotangent_is_not_read():
    x, w = normal(16, 32, dtype=jnp.float32), normal(32, 16, dtype=jnp.float32)
    run = lambda x: fp8_matmul_for_cast(x, w, amax_2=jnp.ones(2))[0]
    assert not np.any(jax.vjp(run, x)[1](jnp.ones((16, 16)))[0])


# ---- RoPE and attention --------------------------------------------------------------------------


def turned(B: int, T: int, N: int, K: int, b: int) -> tuple[Any, ...]:
    """Arguments of `turn_back_cast` after its options."""
    cos, sin = angles(b, T, 128)
    of_all = B, T, N + 2 * K, 128
    r_NR = normal(N + K, B * T, dtype=jnp.float32)
    dq = normal(B, T, N, 128, dtype=jnp.float32)
    # With this multiplier some values saturate.
    return normal(*of_all), r_NR, dq, normal(*of_all, seed=1), cos, sin, jnp.float32(2**13)


def by_itself(options, y, r_NR, dq, d, cos, sin, multiplier):
    """`turn_back` and a cast after it."""
    (d,) = rope_in_place.turn_back(options, 0.3, (y,), r_NR, dq, (d,), cos, sin)
    return reference.cast_measured((d.reshape(-1, d.shape[2] * 128),), multiplier, E5M2, itself)


@pytest.mark.parametrize(("shape", "b"), [((2, 64, 2, 1), 1), ((2, 64, 1, 2), 2)])
@pytest.mark.quick("shape0-1")
def test_turning_back_casts_bit_for_bit_without_races(shape, b, capfd):
    B, T, N, K = shape
    options = rope_in_place.TurnOptions((N, K), EPS, INTERPRET)
    given = turned(B, T, N, K, b)
    q_MN, q_NM, most = rope_cast.turn_back_cast(options, 0.3, *given)
    wanted = by_itself(options, *given)
    assert_equal((q_MN, q_NM, jnp.max(most)), wanted)
    assert np.abs(floats(q_MN)[0]).max() == float(jnp.finfo(E5M2).max)
    assert "RACE" not in "".join(capfd.readouterr())


@pytest.mark.gpu
def test_turning_back_casts_on_a_gpu():
    """At gpt_d24's width, with more tiles than a GPU runs at once: bit for bit."""
    options = rope_in_place.TurnOptions((12, 12), EPS, False)
    given = turned(9, 2048, 12, 12, 1)
    q_MN, q_NM, most = rope_cast.turn_back_cast(options, 0.3, *given)
    wanted = jax.jit(functools.partial(by_itself, options))(*given)
    assert_equal((q_MN, q_NM, jnp.max(most)), wanted)


def gradients(cast: bool, module: Any, given: tuple, **options: Any) -> Any:
    """Of the values' addition; of qkv in float8, in both layouts, and its amax."""
    qkv, value, dy, amax = given
    B, T, C, H = qkv.shape
    cos, sin = angles(1, T, H)
    slots = placeholders(B * T, C * H, amax)

    def run(qkv, value, slots):
        more: Any = {"gradient": slots} if cast else {}
        call = Call(scale=0.1, window=100)
        return module.rope_attention(qkv, cos, sin, value, 1, EPS, call, **more, **options)

    d_qkv, d_value, d_place = jax.vjp(run, qkv, value, slots)[1](dy)
    if cast:
        return d_value, tuple(d_place[:3])
    flat = d_qkv.reshape(B * T, -1)
    multiplier = 1 / given_scale(amax, E5M2)
    return d_value, reference.cast_measured((flat,), multiplier, E5M2, itself)


@pytest.mark.slow
def test_attention_hands_its_gradient_on_in_float8():
    """With a value embedding, whose gradient stays in 16 bits."""
    given = normal(1, 128, 3, 128), normal(1, 128, 1, 128), normal(1, 128, 1, 128), jnp.float32(2)
    tiling = BackwardTiling(block_q=64, blocks=2)
    options = {"interpret": INTERPRET, "tilings": (None, tiling)}
    found, wanted = (gradients(cast, hopper, given, **options) for cast in (True, False))
    assert_equal(found, wanted)


@pytest.mark.parametrize("H", [64, 128])
def test_lowers_for_hopper_with_one_pass_back(H):
    """A head dim that the pass does not have is cast by a pass of its own."""
    spec = lambda *shape, dtype=BF16: jax.ShapeDtypeStruct(shape, dtype)
    given = [spec(2, 2048, 18, H), *[spec(1, 2048, H, dtype=jnp.float32)] * 2]

    def run(x, cos, sin, slots):
        f = functools.partial(rope_attention, heads=6, eps=EPS, scale=0.1, implementation="mosaic")
        return f(x, cos, sin, gradient=slots).astype(jnp.float32).sum()

    def both(x, cos, sin):
        slots = placeholders(4096, 18 * H, jnp.float32(1))
        return jax.grad(run, 3, allow_int=True)(x, cos, sin, slots)[:3]

    with on_target("cuda", (9, 0)):
        text = jax.jit(both).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    # Turn, attention, sums of rows, attention's backward, turn back (and, by itself, the cast).
    assert text.count("@mosaic_gpu") == (5 if H == 128 else 6)


def test_reasons():
    assert rope_cast.unsupported_reason(1, 64, 128) is None
    assert "head dim of 128, got 64" in (rope_cast.unsupported_reason(1, 64, 64) or "")
    assert "multiples of 64, got 32" in (rope_cast.unsupported_reason(1, 32, 128) or "")
