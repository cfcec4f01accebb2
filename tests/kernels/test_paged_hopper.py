"""Attention over pages for Hopper: its threads in NumPy, its choice, its numbers on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtrain_kernels import quantize
from jaxtrain_kernels.attention import reference
from jaxtrain_kernels.attention.paged.hopper.block import PageBlock, PageRefs
from jaxtrain_kernels.attention.paged.hopper.plan import Memory, PagePlan

from tests.kernels.emulated_pages import emulated


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
    """Run blocks one after another: first up to the join, then all of them."""
    q, k, v, table, starts, counts = arrays
    device = emulated(monkeypatch, plan.blocks, 128 * plan.warpgroups, plan.threads)
    kv = [*k, *v] if plan.quantized else [k, None, v, None]
    kv = [x if x is None else device.put(x) for x in kv]
    numbers = [device.put(x) for x in (table, starts, counts, np.zeros(len(q), np.int32))]
    N = plan.K * plan.G
    shapes = [(q.size, 2), (2 * plan.blocks * N * 128, 4), (2 * plan.blocks * N * 2, 4)]
    outs = [device.put(np.full(n * size, 0xFF, np.uint8)) for n, size in shapes]
    refs = PageRefs(device.put(q), *kv, *numbers, *outs, table.shape[1])
    begins = np.cumsum([0, *plan.shared_bytes])
    from tests.kernels.emulated_threads import Int, Raw
    memory = Memory(*(Int(Raw(x, "i32")) for x in begins[:-1]))
    with np.errstate(all="ignore"):  # of inactive threads
        PageBlock(plan, refs, memory).run()
    counters = device.arrays[int(numbers[-1].value.values.flat[0]) >> 40].view(np.int32)
    assert not counters.any()
    out = device.arrays[int(outs[0].value.values.flat[0]) >> 40]
    return out.view(jnp.bfloat16).reshape(q.shape).astype(np.float32)


RAGGED = [0, 1, 17, 130, 0, 96]


@pytest.mark.parametrize(
    ("K", "G", "size", "tokens", "dtype", "blocks", "window", "lengths"),
    [
        (2, 4, 32, 16, "bfloat16", 5, None, RAGGED),
        (2, 8, 32, 32, "int8", 5, None, RAGGED),
        (3, 1, 16, 16, "int8", 12, None, [250, 0]),
        (2, 4, 32, 16, "bfloat16", 5, 20, RAGGED),
        (1, 2, 16, 16, "bfloat16", 3, None, [20]),
        (2, 1, 16, 16, "bfloat16", 2, None, [0, 0, 0]),
    ],
)
def test_threads_equal_the_reference(
    monkeypatch, K, G, size, tokens, dtype, blocks, window, lengths
):
    arrays = inputs(lengths, K, G, size, dtype)
    quantized = dtype == "int8"
    plan = PagePlan(len(lengths), K, G, size, tokens, quantized, blocks, 4, window, 0.1 * 1.442695)
    options = {"window": window, "softcap": None, "scale": 0.1}
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, arrays)
    expected = np.asarray(reference.paged_attention(*wide, **options))
    expected = np.where(np.array(lengths)[:, None, None, None] > 0, expected, 0)
    with monkeypatch.context() as patch:
        out = run_emulated(patch, plan, arrays)
    np.testing.assert_allclose(out, expected, atol=0.02)
