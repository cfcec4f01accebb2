"""All layers of one row in one kernel whose weights stream through shared memory: its threads in
NumPy, what it serves, its lowering, and on a GPU tokens in a row against the reference."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated_layers import emulated_layers
from emulated_threads import Int, Raw
from jaxtrain_kernels.decode_layers import (
    StreamedLayers,
    choose_kernel,
    decode_layers,
    hopper,
    pack_matrices,
    reference,
)
from jaxtrain_kernels.decode_layers.hopper.block import LayersBlock
from jaxtrain_kernels.decode_layers.hopper.order import from_stream, slot_shape, to_stream
from jaxtrain_kernels.decode_layers.hopper.plan import PHASES, LayersRefs
from jaxtrain_kernels.decode_layers.packing import unpack_weights
from jaxtrain_kernels.dispatch import Target, on_target
from test_decode_layers import BF16, assert_close, inputs, shape_of

HOPPER = Target("cuda", (9, 0))


def streamed(s, weights):
    """Weights that are packed for `triton`, in the order of the stream."""
    matrices = [[unpack_weights(w).T for w in one] for one in weights[:4]]
    return jax.jit(functools.partial(pack_matrices, "hopper", s))(matrices, weights.scales_L2)


def streamed_inputs(s, start, tokens, seed=0) -> Any:
    weights, *others = inputs(s, start, tokens, seed)
    return streamed(s, weights), *others


@pytest.mark.parametrize(("D", "F"), [(256, 512), (768, 3072), (1536, 6144), (1280, 5120)])
def test_the_order_has_an_inverse(D, F):
    s = shape_of(D, F, N=D // 128, K=D // 128, H=128)
    rng = np.random.default_rng(0)
    for inputs_ in (D, F):
        w_IO = jnp.asarray(rng.normal(size=(inputs_, 12)), BF16)
        np.testing.assert_array_equal(
            from_stream(slot_shape(s), to_stream(slot_shape(s), w_IO)), w_IO.T
        )


SMALL = {"D": 256, "F": 512, "N": 2, "K": 2, "H": 128}


@pytest.mark.parametrize(
    ("windows", "middle", "start", "count"),
    [
        ((9, 40), 0, 37, 1),
        ((400,), 0, 300, 1),  # several groups of keys in a split
        pytest.param((4, 8, 8), 2, 0, 1, marks=pytest.mark.slow),  # no token before
        pytest.param((8, 40), 1, 37, 0, marks=pytest.mark.slow),  # an idle slot
    ],
)
def test_the_threads_of_all_blocks_compute_the_layers(monkeypatch, windows, middle, start, count):
    s, tokens = shape_of(**SMALL, windows=windows, middle=middle), -(-(start + 1) // 16) * 16
    weights, x0, cos, sin, values, pages, table, *_ = streamed_inputs(s, start, tokens)
    token = cos, sin, values, pages, table, jnp.int32(start), jnp.int32(count)
    expected = jax.jit(functools.partial(reference.decode_layers, s))(weights, x0, *token)
    plan = hopper.plan_of(s, pages, len(table), blocks=17)
    plan = plan._replace(slots=8, flight=2)  # 4 turns a layer
    device = emulated_layers(monkeypatch, plan.blocks, plan.warpgroups, plan.warps)
    put = device.put
    states = [put(np.zeros(s.width, BF16)) for _ in range(2)]
    timed_out = put(np.int32([9]))
    words = put(np.zeros(plan.places["end"] // 4, np.int32))
    keys, kept = map(put, pages)
    given = map(put, (x0, cos, sin, values, np.int32([start]), np.int32([count]), table))
    matrices = map(put, (np.int32(windows), weights.scales_L2, *weights[:4]))
    refs = LayersRefs(*given, *matrices, words, keys, kept, *states, timed_out)
    LayersBlock(plan, refs, Int(Raw(0, "i32"))).run()
    array = lambda at: device.arrays[int(at.value.values[0, 0]) >> 40]
    found = [array(x).view(BF16).reshape(pages[0].shape) for x in (keys, kept)]
    assert_close(found, expected[2])
    assert [(x != np.asarray(y)).any() for x, y in zip(found, pages)] == [count > 0] * 2
    if count:  # an idle slot has any stream
        assert_close([array(x).view(BF16) for x in states], list(expected[:2]))
    assert array(timed_out).view(np.int32) == 0
    assert not any(device.queues.values())  # what is loaded is used


def test_what_it_serves():
    pages = (jax.ShapeDtypeStruct((2, 8, 16, 6, 128), BF16),) * 2
    x0 = jax.ShapeDtypeStruct((768,), BF16)
    sizes = {"D": 768, "F": 3072, "N": 6, "K": 6, "H": 128}
    why = lambda target=HOPPER, x0=x0, pages=pages, **more: hopper.supports(
        target, shape_of(**sizes | more), x0, pages
    )
    assert why() is None
    assert "compute capability 9.0" in why(Target("cuda", (8, 0)))
    assert "got float32" in why(x0=jax.ShapeDtypeStruct((768,), jnp.float32))
    assert "pages in bfloat16" in why(pages=(jax.ShapeDtypeStruct((2, 8, 16, 6, 128), "int8"),) * 2)
    assert "as many heads" in why(K=1)
    assert "width of 528" in why(D=512, N=4, K=4)
    assert "4 to 12 warps" in why(D=1408, F=5632, N=11, K=11)
    assert "at most 16 heads" in why(D=2304, F=9216, N=18, K=18)
    assert "no ring" in why(D=1536, F=1792, N=12, K=12)
    with on_target("cuda", (9, 0)):
        assert choose_kernel(shape_of(**sizes), x0, pages) == ("hopper", None)
        assert choose_kernel(shape_of(**sizes | {"K": 1}), x0, pages) == ("triton", None)


@pytest.mark.parametrize(
    ("D", "slots", "turns", "spare"),
    [(768, 21, 1, 0), (1152, 16, 2, 1), (1536, 12, 3, 0), (1920, 12, 4, 2), (2048, 8, 6, 0)],
)
def test_the_ring_has_whole_turns_in_a_layer(D, slots, turns, spare):
    s = shape_of(D, 4 * D, D // 128, D // 128, 128)
    pages = (jax.ShapeDtypeStruct((2, 8, 16, D // 128, 128), BF16),) * 2
    plan = hopper.plan_of(s, pages, 8, blocks=132)
    assert (plan.slots, plan.turns, plan.spare) == (slots, turns, spare)
    assert plan.slots * plan.turns == plan.slots_of_layer
    assert sum(plan.shared_bytes) <= 227 * 1024
    # Each row is some block's, which multiplies it.
    for p in plan.products.values():
        own = [b * p.units // 132 for b in range(133)]
        first = [min(x, p.units - p.most) for x in own[:-1]]
        assert all(a <= b and c <= a + p.most for a, b, c in zip(first, own, own[1:], strict=False))


def test_weights_are_for_one_kernel():
    s = shape_of(**SMALL)
    arrays = streamed_inputs(s, 3, 16)
    with pytest.raises(NotImplementedError, match="packed for it"):
        decode_layers(s, *arrays, implementation="triton")
    found, expected = (
        decode_layers(s, weights, *arrays[1:], implementation="reference")
        for weights in (arrays[0], inputs(s, 3, 16)[0])
    )
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(x, y)


def test_it_is_one_kernel():
    s = shape_of(D=768, F=3072, N=6, K=6, H=128)
    like = jax.eval_shape(functools.partial(streamed_inputs, s, 3, 32))
    with on_target("cuda", (9, 0)):
        run = jax.jit(functools.partial(decode_layers, s))
        text = run.trace(*like).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == text.count("custom_call") == 1
    assert isinstance(like[0], StreamedLayers) and len(PHASES) == 4


GPU_SIZES = {
    "gpt_d12": {"D": 768, "F": 3072, "N": 6, "K": 6, "H": 128},
    "gpt_d20": {"D": 1280, "F": 5120, "N": 10, "K": 10, "H": 128},
    "gpt_d24": {"D": 1536, "F": 6144, "N": 12, "K": 12, "H": 128},
}


@jax.jit
def errors(found, expected):
    """Of each array, beyond 2% of a number, as a share of the largest one: on the GPU, which has
    millions of them."""
    wide = lambda x: x.astype(jnp.float32)
    error = lambda x, y: (
        (jnp.abs(wide(x) - wide(y)) - 0.02 * jnp.abs(wide(y))).max() / jnp.abs(wide(y)).max()
    )
    return jnp.stack(jax.tree.leaves(jax.tree.map(error, found, expected)))


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", GPU_SIZES.values(), ids=GPU_SIZES)
def test_on_a_gpu_it_equals_the_reference(sizes):
    s = shape_of(**sizes, windows=(512, 64, 512, 2047), middle=2)
    run = jax.jit(functools.partial(decode_layers, s, implementation="hopper"))
    like = jax.jit(functools.partial(reference.decode_layers, s))
    weights, x0, *others, pages, table, _, count = streamed_inputs(s, 0, 2064)
    for first in (0, 15, 63, 511, 1000, 2040):
        for start in range(first, first + 3):
            arrays = weights, x0, *others, pages, table, jnp.int32(start), count
            found, expected = run(*arrays), like(*arrays)
            assert not found[3]
            assert (errors(found[:3], expected[:3]) <= 0.02).all()  # false for NaN
            x0, pages = jnp.roll(x0, 1), found[2]


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", GPU_SIZES.values(), ids=GPU_SIZES)
def test_on_a_gpu_many_runs_are_the_same_bits(sizes):
    s = shape_of(**sizes, windows=(512, 512, 512, 2047) * 3, middle=6)
    arrays = streamed_inputs(s, 600, 1024)
    run = jax.jit(functools.partial(decode_layers, s, implementation="hopper"))
    first = run(*arrays)
    assert np.isfinite(np.asarray(first[0], np.float32)).all()
    leaves = jax.tree.leaves
    same = jax.jit(
        lambda a, b: jnp.stack([(x == y).all() for x, y in zip(leaves(a), leaves(b), strict=True)])
    )
    assert all([same(run(*arrays), first).all() for _ in range(200)])


@pytest.mark.gpu
def test_on_a_gpu_a_timeout_is_reported():
    s = shape_of(**GPU_SIZES["gpt_d12"], windows=(512,) * 4)
    weights, x0, cos, sin, values, pages, table, start, count = streamed_inputs(s, 600, 1024)
    token = x0, cos, sin, values, start.reshape(1), count.reshape(1), table
    plan = hopper.plan_of(s, pages, len(table), 132, spins=0)  # the first wait ends without words
    states, timed_out, _, _ = hopper.launch(plan, weights, *token, pages)
    assert timed_out[0] == 1 and np.isnan(np.asarray(states[0], np.float32)).all()
