"""Every backend at real head dims, in bfloat16 and float16, against the float32 reference.

The cross product runs on a GPU; on a CPU the same checks run over a small shape.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtrain_kernels.attention import BACKENDS, Call, attention
from jaxtrain_kernels.dispatch import target
from jaxtrain_kernels.shapes import ATTENTION_GPU, ATTENTION_SMALL

# A seed and the spread of queries: even probabilities, and some that are near 1.
DRAWS = ((11, 1.0), (12, 6.0))
DTYPES = (jnp.bfloat16, jnp.float16)
GPU_BACKENDS = [name for name in BACKENDS if name != "reference"]
by_name = functools.partial(pytest.mark.parametrize, "shape", ids=lambda shape: shape.name)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.dtype.name)


def draw(shape, dtype, seed, spread):
    """q, k, v and the cotangents of the output and the LSE."""
    keys = jax.random.split(jax.random.key(seed), 5)
    query, shared = (shape.B, shape.T, shape.N, shape.H), (shape.B, shape.T, shape.K, shape.H)
    sizes = (query, shared, shared, query)
    q, k, v, dout = (jax.random.normal(key, size, dtype) for key, size in zip(keys, sizes))
    dlse = jax.random.normal(keys[4], (shape.B, shape.N, shape.T), jnp.float32)
    return (spread * q).astype(dtype), k, v, dout, dlse


@functools.cache
def results(shape, backend, with_lse=True, deterministic=False):
    """Jitted (q, k, v, dout, dlse) -> (out, lse or None, dq, dk, dv)."""
    ids = shape.segment_ids_BT()
    call = functools.partial(
        attention, causal=shape.causal, window=shape.window, softcap=shape.softcap,
        segment_ids_BT=None if ids is None else jnp.asarray(ids), return_lse=with_lse,
        implementation=backend, deterministic=deterministic,
    )  # fmt: skip

    @jax.jit
    def run(q, k, v, dout, dlse):
        out, pull = jax.vjp(call, q, k, v)
        if not with_lse:
            return out, None, *pull(dout)
        out, lse = out
        return out, lse, *pull((dout, jnp.where(jnp.isfinite(lse), dlse, 0)))

    return run


def wide(arrays):
    return [x.astype(jnp.float32) for x in arrays]


def poison():
    """Leaves NaN in the memory that the next results will probably get."""
    for size in (2**10, 2**16, 2**20, 2**24):
        jnp.full(size, jnp.nan).block_until_ready().delete()


def relative(x, exact):
    x, exact = (np.asarray(a, np.float32) for a in (x, exact))
    known = np.isfinite(exact)
    assert np.array_equal(known, np.isfinite(x)), "not finite, where the reference is"
    norm = np.linalg.norm(exact[known])
    return np.linalg.norm(x[known] - exact[known]) / norm if norm else np.abs(x[known]).max()


def refusal(shape, backend, dtype, **options):
    """Why a backend does not serve a shape, or None."""
    q = jax.ShapeDtypeStruct((shape.B, shape.T, shape.N, shape.H), dtype)
    window = None if shape.window is None or shape.window >= shape.T - 1 else shape.window
    call = Call(shape.causal, window, shape.segment_ids_BT(), softcap=shape.softcap, **options)
    return BACKENDS[backend].supports(target(), q, call)


def of_stored_output(shape, inputs, exact, with_lse):
    """Results exact but for one rounding: dS = P (dP - D), and the D = sum(dout * out) of every
    flash attention's backward is of the output as it was stored."""
    *qkv, dout, dlse = wide(inputs)
    rounded = exact[0].astype(inputs[0].dtype)
    shift = jnp.einsum("btnh,btnh->bnt", dout, exact[0] - rounded)
    return results(shape, "reference")(*qkv, dout, with_lse * dlse + shift)


def check_errors(shape, backend, dtype):
    """Out, LSE and gradients: at most twice the error of the reference in this dtype, or of a
    backward that is exact but for the output's rounding, if that is larger (where P is near 1)."""
    with_lse = refusal(shape, backend, dtype, return_lse=True) is None
    for seed, spread in DRAWS:
        inputs = draw(shape, dtype, seed, spread)
        with jax.default_matmul_precision("highest"):
            exact = results(shape, "reference", with_lse)(*wide(inputs))
            stored = of_stored_output(shape, inputs, exact, with_lse)
        naive = results(shape, "reference", with_lse)(*inputs)
        poison()
        ours = results(shape, backend, with_lse)(*inputs)
        for name, x, y, s, z in zip(("out", "lse", "dq", "dk", "dv"), ours, naive, stored, exact):
            if z is not None:
                bound = 2 * max(relative(y, z), relative(s, z)) + 1e-5
                assert relative(x, z) <= bound, f"{name}, seed {seed}"


def check_repeats(shape, backend, dtype):
    """The forward bit for bit; with deterministic=True the gradients too, where that is served."""
    (seed, spread), *_ = DRAWS
    inputs = draw(shape, dtype, seed, spread)
    settled = refusal(shape, backend, dtype, deterministic=True) is None
    with_lse = refusal(shape, backend, dtype, return_lse=True) is None
    run = results(shape, backend, with_lse, deterministic=settled)
    first = run(*inputs)
    for _ in range(3):
        poison()
        again = run(*inputs)
        for x, y in list(zip(first, again))[: 5 if settled else 2]:
            np.testing.assert_array_equal(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", GPU_BACKENDS)
@by_dtype
@by_name(ATTENTION_GPU)
def test_errors_are_at_most_twice_the_naive_ones(shape, backend, dtype):
    if reason := refusal(shape, backend, dtype):
        pytest.skip(reason)
    check_errors(shape, backend, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", GPU_BACKENDS)
@by_name([s for s in ATTENTION_GPU if s.name in ("d128", "d64", "all", "packed", "d256")])
def test_results_repeat_bit_for_bit(shape, backend):
    if reason := refusal(shape, backend, jnp.bfloat16):
        pytest.skip(reason)
    check_repeats(shape, backend, jnp.bfloat16)


DETERMINISTIC = ("d128", "d64", "d256", "packed", "all", "full_packed", "ragged_129", "t8192")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [None, "mosaic"], ids=str)
@by_name([s for s in ATTENTION_GPU if s.name in DETERMINISTIC])
def test_deterministic_gradients_are_right_too(shape, backend):
    """By the backend that is chosen for it, and by the one with kernels of their own for it."""
    if backend and (reason := refusal(shape, backend, jnp.bfloat16, deterministic=True)):
        pytest.skip(reason)
    inputs = draw(shape, jnp.bfloat16, *DRAWS[0])
    with jax.default_matmul_precision("highest"):
        exact = results(shape, "reference")(*wide(inputs))
    naive = results(shape, "reference")(*inputs)
    run = results(shape, backend, True, True)
    ours, again = run(*inputs), run(*inputs)
    for x, y, z, repeated in zip(ours, naive, exact, again):
        assert relative(x, z) <= 2 * relative(y, z) + 1e-5
        np.testing.assert_array_equal(x, repeated)


@pytest.mark.slow
@by_name([s for s in ATTENTION_SMALL if s.name == "packed_window_ragged"])
def test_the_checks_hold_for_xla_anywhere(shape):
    check_errors(shape, "xla", jnp.bfloat16)
    check_repeats(shape, "xla", jnp.bfloat16)


@pytest.mark.slow
def test_the_checks_can_fail(monkeypatch):
    shape = ATTENTION_SMALL[0]
    exact = np.ones((2, 3), np.float32)
    with pytest.raises(AssertionError, match="not finite"):
        relative(np.where(np.eye(2, 3), np.nan, exact), exact)
    right = results(shape, "xla")
    monkeypatch.setitem(globals(), "results", lambda *a, **k: (
        (lambda *x: [y if y is None else 1.1 * y for y in right(*x)]) if a[1] == "xla"
        else results_of(*a, **k)
    ))  # fmt: skip
    with pytest.raises(AssertionError, match="out, seed 11"):
        check_errors(shape, "xla", jnp.bfloat16)


results_of = results
