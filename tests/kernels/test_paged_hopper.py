"""Attention over pages for Hopper: its threads in NumPy, its choice, its numbers on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated_pages import emulated_pages
from emulated_threads import Int, Raw
from jaxtrain_kernels import paged_attention, quantize
from jaxtrain_kernels.attention import reference
from jaxtrain_kernels.attention.paged import hopper
from jaxtrain_kernels.attention.paged.hopper.block import PageBlock
from jaxtrain_kernels.attention.paged.hopper.plan import PageMemory, PageRefs, PageStreamPlan
from jaxtrain_kernels.dispatch import Target, on_target

LOG2E = 1.442695
GPU = Target("cuda", (9, 0))


def inputs(lengths, K, G, size, dtype):
    rng, B = np.random.default_rng(0), len(lengths)
    W = max(2, -(-max(lengths) // size))
    cast = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    q, k, v = cast(B, 1, K * G, 128), *(cast(B * W, size, K, 128) for _ in range(2))
    if dtype == "int8":
        k, v = quantize(k, jnp.int8), quantize(v, jnp.int8)
    table = jnp.asarray(rng.permutation(B * W).reshape(B, W), jnp.int32)
    n = jnp.array(lengths, jnp.int32)
    counts = jnp.minimum(n, 1)
    return q, k, v, table, n - counts, counts


def run_emulated(monkeypatch, plan, arrays):
    """Results of the blocks' threads, after which counters must be zeros again."""
    q, k, v, table, starts, counts = arrays
    device = emulated_pages(monkeypatch, plan.blocks, plan.warpgroups, plan.threads)
    kv = [*k, *v] if plan.quantized else [k, None, v, None]
    k, k_scale, v, v_scale = (x if x is None else device.put(x) for x in kv)
    numbers = table, starts, counts, np.zeros(len(q), np.int32)
    table_at, starts_at, counts_at, counters = map(device.put, numbers)
    N = plan.K * plan.G
    shapes = [(q.size, 2), (2 * plan.blocks * N * 128, 4), (2 * plan.blocks * N * 2, 4)]
    out, sums, stats = (device.put(np.full(n * size, 0xFF, np.uint8)) for n, size in shapes)
    refs = PageRefs(
        device.put(q), k, k_scale, v, v_scale, table_at, starts_at, counts_at, counters, out, sums,
        stats, table.shape[1],
    )  # fmt: skip
    offsets = np.cumsum([0, *plan.shared_bytes])
    memory = PageMemory(*(Int(Raw(x, "i32")) for x in offsets[:-1]))
    with np.errstate(all="ignore"):  # of inactive threads
        PageBlock(plan, refs, memory).run()
    array = lambda x: device.arrays[int(x.value.values.flat[0]) >> 40]
    assert not array(counters).any()
    return array(out).view(jnp.bfloat16).reshape(q.shape).astype(np.float32)


RAGGED = [0, 1, 17, 130, 0, 96]


@pytest.mark.parametrize(
    ("K", "G", "size", "tokens", "dtype", "blocks", "window", "lengths"),
    [
        (2, 4, 32, 16, "bfloat16", 5, None, RAGGED),
        (2, 8, 32, 32, "int8", 5, None, RAGGED),
        (3, 1, 16, 16, "int8", 12, None, [250, 0]),
        (2, 4, 32, 16, "bfloat16", 5, 20, RAGGED),
        (1, 2, 16, 16, "bfloat16", 5, None, [40]),
        (2, 1, 16, 16, "bfloat16", 2, None, [0, 0, 0]),
    ],
)
def test_threads_equal_the_reference(
    monkeypatch, K, G, size, tokens, dtype, blocks, window, lengths
):
    arrays = inputs(lengths, K, G, size, dtype)
    quantized = dtype == "int8"
    plan = PageStreamPlan(
        len(lengths), K, G, size, tokens, quantized, blocks, 4, window, 0.1 * 1.442695
    )
    options = {"window": window, "softcap": None, "scale": 0.1}
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, arrays)
    expected = np.asarray(reference.paged_attention(*wide, **options))
    expected = np.where(np.array(lengths)[:, None, None, None] > 0, expected, 0)
    with monkeypatch.context() as patch:
        out = run_emulated(patch, plan, arrays)
    np.testing.assert_allclose(out, expected, atol=0.02)


def abstract(B, tokens, K, dtype, size=32, T=1, H=128, G=4):
    array = jax.ShapeDtypeStruct
    pages = array((B * tokens // size, size, K, H), jnp.bfloat16)
    if dtype == "int8":
        pages = jax.eval_shape(quantize, pages)
    numbers = [array(x, jnp.int32) for x in ((B, tokens // size), (B,), (B,))]
    return array((B, T, K * G, H), jnp.bfloat16), pages, pages, *numbers


@pytest.mark.parametrize(
    ("backend", "case"),
    [
        ("hopper", (64, 4096, 8, "bfloat16")),
        ("triton", (256, 640, 6, "bfloat16")),
        ("hopper", (2, 16384, 8, "int8")),
        ("hopper", (32, 640, 6, "int8")),
        ("triton", (16, 640, 6, "int8")),
        ("triton", (64, 4096, 16, "int8")),
    ],
    ids=str,
)
def test_it_is_chosen_where_it_was_measured_to_be_faster(monkeypatch, backend, case):
    monkeypatch.setattr("jaxtrain_kernels.hopper.sm_count", lambda: 132)
    with on_target("cuda", (9, 0)):
        traced = jax.jit(paged_attention).trace(*abstract(*case))
    text = str(traced.jaxpr)
    assert ("call_paged" in text) == (backend == "hopper")


def test_it_lowers_for_cuda_as_one_kernel(monkeypatch):
    monkeypatch.setattr("jaxtrain_kernels.hopper.sm_count", lambda: 132)
    run = functools.partial(paged_attention, implementation="hopper", window=100)
    for dtype in ("bfloat16", "int8"):
        with on_target("cuda", (9, 0)):
            traced = jax.jit(run).trace(*abstract(2, 64, 2, dtype))
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("@mosaic_gpu_v2") == 1


def test_reasons_name_what_is_not_supported():
    q, pages, *_ = abstract(2, 64, 2, "bfloat16")
    assert hopper.supports(GPU, q, pages, None) is None
    refusal = lambda q, pages, softcap=None, on=GPU: str(hopper.supports(on, q, pages, softcap))
    assert "GPU" in refusal(q, pages, on=Target("cpu", None))
    assert "9.0" in refusal(q, pages, on=Target("cuda", (10, 0)))
    assert "no softcap" in refusal(q, pages, softcap=2.0)
    for change in ({"T": 2}, {"H": 64}):
        q, pages, *_ = abstract(2, 64, 2, "bfloat16", **change)
        assert "one token, heads of 128" in refusal(q, pages)
    for change in ({"G": 9}, {"size": 8}):
        q, pages, *_ = abstract(2, 64, 2, "bfloat16", **change)
        assert "up to 8 queries of up to 16 heads" in refusal(q, pages)
    q, pages, *_ = abstract(2, 64, 2, "bfloat16")
    assert "float16" in refusal(jax.ShapeDtypeStruct(q.shape, jnp.float16), pages)


def test_blocks_that_wait_for_each_other_fit_on_a_multiprocessor(monkeypatch):
    """Two of 8 warps, of 128 registers a thread, and their shared memory."""
    monkeypatch.setattr("jaxtrain_kernels.hopper.sm_count", lambda: 132)
    for K, dtype, per in [(7, "int8", 2), (8, "int8", 1), (6, "bfloat16", 1)]:
        q, pages, *_ = abstract(2, 64, K, dtype)
        values = jax.tree.leaves(pages)[0]
        plan = hopper.plan_of(q, values, None, 1.0, hopper.blocks_each(values))
        assert plan.blocks == 132 * per and plan.slots >= 3
        assert per * (sum(plan.shared_bytes) + 1024) <= 228 * 1024
        assert per == 1 or per * plan.warpgroups * 128 * 128 <= 2**16


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("K", "G", "size"), [(4, 8, 32), (6, 1, 16), (8, 4, 32), (12, 1, 32)])
def test_on_a_gpu_it_equals_the_reference(dtype, window, K, G, size):
    """Sequences of many blocks too, and the same bits in each call: counters are zeros again."""
    lengths = [0, 1, 17, 640, 0, 333, 4096, 31, 32, 33, 1000, 0]
    arrays = inputs(lengths, K, G, size, dtype)
    options = {"window": window, "softcap": None, "scale": 0.1}
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, arrays)
    expected = np.asarray(reference.paged_attention(*wide, **options))
    expected = np.where(np.array(lengths)[:, None, None, None] > 0, expected, 0)
    run = jax.jit(functools.partial(hopper.paged_attention, **options))
    first, again = (np.asarray(run(*arrays), np.float32) for _ in range(2))
    np.testing.assert_allclose(first, expected, atol=0.03)
    np.testing.assert_array_equal(first, again)
