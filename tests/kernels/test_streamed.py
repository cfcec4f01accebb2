"""Consecutive products with integer codes in one kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated_roles import emulated_roles
from emulated_threads import BLOCKS, SHARED, Int, Raw
from jaxtrain_kernels.dispatch import Target, on_target
from jaxtrain_kernels.matmul.few_rows import InputNorm, Operations
from jaxtrain_kernels.matmul.integers import columns_by_size, w4a16_matmul, w8a16_matmul
from jaxtrain_kernels.matmul.streamed import (
    StreamedMatrix,
    from_stream,
    hopper,
    registers,
    streamed_products,
    to_stream,
)  # fmt: skip
from jaxtrain_kernels.matmul.streamed.block import StreamBlock, StreamRefs
from jaxtrain_kernels.matmul.streamed.order import WARPS, half_inputs
from jaxtrain_kernels.matmul.streamed.plan import (
    EXCHANGE_LINE,
    FINISHERS,
    LOADERS,
    Memory,
    PhaseRefs,
    StreamPhase,
    StreamPlan,
)
from jaxtrain_kernels.matmul.streamed.ring import Ring

OPS = {"int8": w8a16_matmul, "int4": w4a16_matmul}
GPU = Target("cuda", (9, 0))
EPS = 1e-5


def codes_of(form, K, N, rng):
    """(codes, scales) in rows; the products have results of about the inputs' size."""
    if form == "int8":
        codes, scales = rng.integers(-128, 128, (K, N)), rng.uniform(0.5, 1.5, N)
        return jnp.asarray(codes, jnp.int8), jnp.asarray(scales / (73 * K**0.5), jnp.float32)
    codes, scales = rng.integers(0, 256, (K // 2, N)), rng.uniform(0.5, 1.5, (K // 128, N))
    return jnp.asarray(codes, jnp.uint8), jnp.asarray(scales / (4.6 * K**0.5), jnp.bfloat16)


def example(form, M, phases, seed=0):
    """x, stream, (codes, scales, gain) of each phase in rows, and the `StreamedMatrix`s."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
    rows, matrices = [], []
    for p in phases:
        codes, scales = codes_of(form, p.K, p.N, rng)
        gain = normal(p.K) * 0.1 + 1 if p.normed else None
        norm = InputNorm(EPS, gain) if p.normed else None
        words = to_stream(form, codes, scales if form == "int4" else None)
        own = scales if form == "int8" else None
        rows.append((codes, scales, norm))
        matrices.append(StreamedMatrix(p.K, words, own, norm, p.activation, p.residual, p.parts))
    residual = [p.N for p in phases if p.residual] or [8]
    return normal(M, phases[0].K + 64), normal(M, residual[0]), rows, matrices


def one_by_one(form, x, stream, phases, rows):
    results = []
    for p, (codes, scales, norm) in zip(phases, rows, strict=True):
        residual = stream if p.residual else None
        around = Operations(norm, None, p.activation, residual)
        x = OPS[form](x[:, : p.K], codes, scales, operations=around, implementation="reference")
        stream = x if p.residual else stream
        results += columns_by_size(x, p.outputs)
    return results


def assert_near(ours, theirs):
    ours, theirs = (np.asarray(x, np.float32) for x in (ours, theirs))
    np.testing.assert_allclose(ours, theirs, atol=0.02 * np.abs(theirs).max())


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("K", [2048, 4096, 6144])
def test_the_order_has_an_inverse(form, K):
    codes, scales = codes_of(form, K, 64, np.random.default_rng(0))
    found, own = from_stream(form, K, to_stream(form, codes, scales))
    np.testing.assert_array_equal(found, codes)
    assert (own is None) == (form == "int8")
    if own is not None:
        np.testing.assert_array_equal(own, scales)


LAYER = (
    StreamPhase(2048, 2048, residual=True),
    StreamPhase(2048, 64, normed=True, activation="swiglu"),
)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_the_reference_is_the_products_one_by_one(form):
    phases = StreamPhase(2048, 2048, residual=True), *LAYER
    x, stream, rows, matrices = example(form, 3, phases)
    found = streamed_products(form, x, stream, matrices, implementation="reference")
    for ours, theirs in zip(found, one_by_one(form, x, stream, phases, rows), strict=True):
        np.testing.assert_array_equal(ours, theirs)


CLAIMED = StreamPhase(4096, 2048), StreamPhase(2048, 64)  # blocks claim panels of 16 columns
NORMED = (StreamPhase(4096, 96, activation="geglu", normed=True),)
WIDE = StreamPhase(6144, 160, residual=True), StreamPhase(6144, 160, parts=(96, 32, 32))
CASES = [(1, LAYER), (8, LAYER), (1, NORMED), (1, WIDE[1:])]
SLOW = [(2, LAYER), (3, LAYER), (5, LAYER), (3, CLAIMED), (8, WIDE[:1])]


@pytest.mark.parametrize(
    ("form", "M", "phases"),
    [
        *(("int4", *case) for case in CASES),
        *(("int8", *case) for case in CASES[2:]),
        *(pytest.param("int8", *case, marks=pytest.mark.slow) for case in CASES[:2]),
        *(pytest.param(f, *case, marks=pytest.mark.slow) for f in OPS for case in SLOW),
    ],
)
def test_the_threads_of_all_blocks_compute_the_products(monkeypatch, form, M, phases):
    x, stream, rows, matrices = example(form, M, phases)
    device = emulated_roles(monkeypatch, WARPS[form] + LOADERS + FINISHERS)
    plan = StreamPlan(form, M, phases, BLOCKS, 3, (1, 3), EPS)
    exchanged = device.put(np.full(plan.exchange_words, -1, np.int32))
    array = lambda at: device.arrays[int(at.value.values[0, 0]) >> 40]
    words = array(exchanged).view(np.int32)
    expected = one_by_one(form, x, stream, phases, rows)
    for call in range(2):
        outs = run_emulated(device, plan, x, stream, matrices, exchanged)
        for out, theirs in zip(outs, expected, strict=True):
            assert_near(array(out).view(jnp.bfloat16).reshape(theirs.shape), theirs)
        sets = words[EXCHANGE_LINE // 4 :].reshape(2, -1)
        assert (sets[1 - call % 2] == -1).all()  # as the next call needs it
        assert words[0] == BLOCKS * (1 + call % 2) - 1
        assert len(phases) == 1 or (sets[call % 2] != -1).any()
    assert device.copied == 2 * sum(m.codes.nbytes for m in matrices)  # each byte once a call


@pytest.mark.parametrize(("column", "value"), [(5, 1000), (4095, np.inf), (70, np.nan)])
def test_one_row_of_unequal_inputs(monkeypatch, column, value):
    """int4's products of one row have integers in the inputs' column."""
    phases = (StreamPhase(4096, 96),)
    x, stream, rows, matrices = example("int4", 1, phases)
    x = x.at[0, column].set(value)
    device = emulated_roles(monkeypatch, WARPS["int4"] + LOADERS + FINISHERS)
    plan = StreamPlan("int4", 1, phases, BLOCKS, 3, (1, 3), EPS)
    exchanged = device.put(np.full(plan.exchange_words, -1, np.int32))
    (out,) = run_emulated(device, plan, x, stream, matrices, exchanged)
    found = device.arrays[int(out.value.values[0, 0]) >> 40].view(jnp.bfloat16)[None]
    if np.isfinite(value):
        (expected,) = one_by_one("int4", x, stream, phases, rows)
        np.testing.assert_allclose(found.astype(np.float32), expected, atol=0.05, rtol=0.01)
    else:
        assert np.isnan(found.astype(np.float32)).all()


def run_emulated(device, plan, x, stream, matrices, exchanged):
    """Addresses of the results of a call, with other shared memory than the call before left."""
    refs = []
    for p, m in zip(plan.phases, matrices, strict=True):
        scales = None if m.scales_N is None else device.put(m.scales_N)
        gain = device.put(m.norm.gain_K) if m.norm else None
        outs = [device.put(np.full((len(x), N), np.nan, jnp.bfloat16)) for N in p.outputs]
        refs.append(PhaseRefs(device.put(m.codes), scales, gain, outs))
    *starts, top = plan.shared_offsets
    assert top <= SHARED
    device.shared.fill(255)
    operands = StreamRefs(device.put(x), x.shape[1], device.put(stream), exchanged, refs)
    StreamBlock(plan, operands, Memory(*(Int(Raw(at, "i32")) for at in starts))).run()
    return [out for ref in refs for out in ref.outs]


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_a_slot_is_free_after_all_its_loads(monkeypatch, form):
    """The address of the slot's barrier has bits of each load, under %ctaid.z, which is 0."""
    device = emulated_roles(monkeypatch, WARPS[form] + LOADERS + FINISHERS)
    number = lambda x: Int(Raw(x, "i32"))
    lane = number(np.arange(32 * (WARPS[form] + LOADERS + FINISHERS))[None] % 32)
    words = device.shared.view(np.int32).reshape(BLOCKS, -1, 4)
    loads = {"int8": 16, "int4": 4}[form]
    words[:, : loads * 32, 0] = 1 << np.arange(loads).repeat(32)
    if form == "int4":  # whose scales are behind the codes
        words[:, loads * 32 : loads * 32 + 4] = 1 << np.arange(4, 6).repeat(2)[:, None]
    xs = [[Raw(0, "i32")] * 4] * (half_inputs(form) // 32)
    zeros = [Raw(np.float32(0), "f32")] * 8
    read = number(0)
    for half in range(2):
        if form == "int8":
            _, read = registers.add_int8(number(0), half, lane, xs, zeros, read)
        else:
            _, read = registers.add_int4(number(0), half, lane, xs, [zeros[:2]], zeros, read)
    assert (read.value.values == (1 << {"int8": 16, "int4": 6}[form]) - 1).all()
    plan = StreamPlan(form, 1, (StreamPhase(2048, 32),), BLOCKS, 2, (1, 1), EPS)
    memory = Memory(*[number(1024 * n) for n in range(9)])
    ring = Ring(plan, memory)
    ring.init(number(0))
    device.block_z = -1
    position = [Raw(1, "i32"), Raw(0, "i32")]
    monkeypatch.setattr(device, "barriers_at", lambda address: [])
    ring.release(position, number(3), Raw(True, "i1"), read)
    free = 2048 + (ring.groups + 3 // plan.sharing) * 8
    np.testing.assert_array_equal(device.freed, free + read.value.values)


@pytest.mark.parametrize(
    ("device", "rows", "dtype", "phases", "reason"),
    [
        (GPU, 8, jnp.bfloat16, LAYER, None),
        (Target("cuda", (8, 0)), 8, jnp.bfloat16, LAYER, "compute capability 9.0"),
        (GPU, 9, jnp.bfloat16, LAYER, "8 rows"),
        (GPU, 1, jnp.float16, LAYER, "bfloat16"),
        (GPU, 1, jnp.bfloat16, (StreamPhase(1024, 64),), "multiples of 2048"),
        (GPU, 1, jnp.bfloat16, (StreamPhase(4096, 40),), "multiples of 16"),
        (GPU, 1, jnp.bfloat16, (StreamPhase(6144, 48),), "multiples of 32"),
        (GPU, 1, jnp.bfloat16, (StreamPhase(6144, 64, normed=True),), "norms 2,048 or 4,096"),
    ],
)
def test_what_it_serves(device, rows, dtype, phases, reason):
    found = hopper.supports(device, jax.ShapeDtypeStruct((rows, 2048), dtype), phases)
    assert found is None if reason is None else reason in found


def test_norms_have_one_eps():
    x, stream, _, matrices = example("int8", 1, LAYER[1:])
    other = matrices[0]._replace(norm=InputNorm(1e-6, None))
    with pytest.raises(ValueError, match="one eps"):
        streamed_products("int8", x, stream, [matrices[0], other])


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_all_layers_have_one_kernel_and_one_memory_of_exchanged_values(form):
    x, stream, _, matrices = example(form, 1, LAYER)

    def run(x, stream, codes, scales, gain):
        norms = None, InputNorm(EPS, gain)
        given = zip(matrices, codes, scales, norms, strict=True)
        given = [m._replace(codes=c, scales_N=s, norm=n) for m, c, s, n in given]
        for _ in range(3):
            stream, _ = streamed_products(form, x, stream, given)
        return stream

    arrays = [m.codes for m in matrices], [m.scales_N for m in matrices], matrices[1].norm.gain_K
    with on_target("cuda", (9, 0)):
        lowered = jax.jit(run).trace(x, stream, *arrays).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("@mosaic_gpu_v2") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("M", range(1, 9))
@pytest.mark.parametrize("wide", [False, True])
def test_it_equals_the_reference(form, M, wide):
    D, F = 2048, 8192 if wide else 4096
    up = StreamPhase(D, 2 * F, normed=True, activation="swiglu")
    phases = (
        StreamPhase(D, D, residual=True),
        up,
        StreamPhase(F, D, residual=True),
        StreamPhase(D, 3072, normed=True),
    )
    x, stream, rows, matrices = example(form, M, phases)
    run = jax.jit(lambda x, s: streamed_products(form, x, s, matrices))
    expected, first = one_by_one(form, x, stream, phases, rows), run(x, stream)
    for ours, theirs in zip(first, expected, strict=True):
        assert_near(ours, theirs)
    for _ in range(50):  # of which none finds other codes, inputs or counters, nor memory of before
        freed = [jnp.full(y.shape, jnp.nan, y.dtype) for y in (*first, *first)]
        jax.block_until_ready(freed)
        del freed
        for again, y in zip(run(x, stream), first, strict=True):
            np.testing.assert_array_equal(again, y)
