"""All layers of one row in one kernel: its numbers on a CPU (interpreted), what it serves, its
lowering, and on a GPU tokens in a row against the reference."""

import functools
import re
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AbstractDevice, AbstractMesh
from jaxtrain_kernels.decode_layers import (
    LayersShape,
    PackedLayers,
    decode_layers,
    kernel,
    pack_weights,
    program,
    reference,
    triton,
)
from jaxtrain_kernels.decode_layers.packing import unpack_weights
from jaxtrain_kernels.dispatch import Target, on_target
from layer_phases import check_phases

BF16 = jnp.bfloat16
H200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))
PAGE = 16


def shape_of(D=256, F=512, N=4, K=2, H=64, windows=(9, 40), middle=0):
    return LayersShape(D, F, N, K, H, windows, middle, 1e-6, 1.44 / H**0.5)


def inputs(s, start, tokens, seed=0):
    """All arguments but the shape; pages for so many tokens in a mixed order, and as many more."""
    rng = np.random.default_rng(seed)
    L, KH, W = s.depth, s.kv_heads * s.head_dim, -(-tokens // PAGE)

    def array(*shape, scale=1.0):  # made on the device: gpt_d24 has 680 million of them
        key = jax.random.key(int(rng.integers(2**31)))
        return (jax.random.normal(key, shape) * scale).astype(BF16)

    stack = lambda i, o: pack_weights([array(i, o, scale=i**-0.5) for _ in range(L)])
    qkv = []
    for _ in range(L):
        gates = np.zeros((s.width, s.gate_rows))
        gates[:12, : s.kv_heads] = 0.3 * rng.normal(size=(12, s.kv_heads))
        heads = array(s.width, s.heads * s.head_dim + 2 * KH, scale=s.width**-0.5)
        qkv.append(jnp.concatenate([heads, jnp.asarray(gates, BF16)], axis=1))
    out = stack(s.heads * s.head_dim, s.width)
    scales = jnp.asarray(rng.uniform(0.2, 1.1, size=(L, 2)), jnp.float32)
    network = stack(s.width, s.hidden), stack(s.hidden, s.width)
    weights = PackedLayers(pack_weights(qkv), out, *network, scales)
    angles = rng.uniform(0, 6, size=s.head_dim // 2)
    turns = [jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin)]
    pages = tuple(array(L, 2 * W, PAGE, s.kv_heads, s.head_dim) for _ in range(2))
    table_W = jnp.asarray(rng.permutation(2 * W)[:W], jnp.int32)
    row = pages, table_W, jnp.int32(start), jnp.int32(1)
    return weights, array(s.width), *turns, array(L, KH), *row


def assert_close(found, expected):
    """Within a few roundings to bfloat16 of each other."""
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        x, y = (np.asarray(a, np.float32) for a in (x, y))
        np.testing.assert_allclose(x, y, rtol=0.02, atol=0.02 * np.abs(y).max())


def test_packed_weights_come_back():
    w_IO = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), BF16)
    np.testing.assert_array_equal(
        unpack_weights(pack_weights([w_IO, 2 * w_IO])), jnp.stack([w_IO.T, 2 * w_IO.T])
    )


def test_a_wait_has_a_word_for_each_thread():
    """Else several warps read the same word, and may leave the wait apart."""
    wait = lambda *words: kernel.poll(jnp.int32(5), lambda: ((), [*words]), ())[1]
    there, missing = (jnp.full(kernel.THREADS, mark, jnp.int32) for mark in (1, 0))
    assert (wait(there), wait(there, missing)) == (5, 0)
    for small in (there[:-1], jnp.int32(1)):
        with pytest.raises(AssertionError, match="each thread"):
            wait(there, small)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "start", "count"), [((4, 2), 37, 1), ((2, 2), 0, 0)], ids=str)
def test_interpreted_it_equals_the_reference(heads, start, count):
    N, K = heads
    s = shape_of(N=N, K=K, H=64 if N == 4 else 128)
    *arrays, _ = inputs(s, start, 48)
    found = triton.decode_layers(
        s, *arrays, jnp.int32(count), programs=9, register_tiles=2, interpret=True
    )
    expected = reference.decode_layers(s, *arrays, jnp.int32(count))
    assert_close(found[2], expected[2])
    if count:  # an idle row has any state
        assert_close(found, expected)
    changed = [np.argwhere(np.asarray(x != y)) for x, y in zip(found[2], arrays[5])]
    assert all((len(x) > 0) == bool(count) for x in changed)


def test_what_triton_serves():
    pages = (jax.ShapeDtypeStruct((2, 8, 16, 2, 64), BF16),) * 2
    x0 = jax.ShapeDtypeStruct((256,), BF16)
    small = shape_of()
    why = lambda target, s=small, x0=x0, pages=pages: triton.supports(target, s, x0, pages)
    hopper = Target("cuda", (9, 0))
    assert why(hopper) is None
    assert "this is cpu" in (why(Target("cpu")) or "")
    assert "8.0" in (why(Target("cuda", (7, 5))) or "")
    assert "got width 128" in (why(hopper, shape_of(D=128)) or "")
    assert "got 80" in (why(hopper, shape_of(N=16, H=80)) or "")
    assert "got float32" in (why(hopper, x0=jax.ShapeDtypeStruct((256,), jnp.float32)) or "")
    float32 = (jax.ShapeDtypeStruct(pages[0].shape, jnp.float32),) * 2
    assert "pages in bfloat16" in (why(hopper, pages=float32) or "")
    assert "14 heads" in (why(hopper, shape_of(N=16, K=1)) or "")


@pytest.mark.slow
def test_it_is_one_kernel_of_xla():
    s = shape_of()
    with on_target("cuda", (9, 0)), jax.sharding.use_abstract_mesh(H200):
        run = jax.jit(functools.partial(decode_layers, s))
        text = run.trace(*inputs(s, 3, 32)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call") == text.count("@__gpu$xla.gpu.triton") == 1
    assert "dot_general" not in text


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=str)
def test_weights_are_prefetched_where_the_gpu_can(capability):
    """The kernel's code has the rows of each matrix, or none."""
    s = shape_of()
    with on_target("cuda", capability), jax.sharding.use_abstract_mesh(H200):
        run = jax.jit(functools.partial(decode_layers, s))
        text = run.trace(*inputs(s, 3, 32)).lower(lowering_platforms=("cuda",)).as_text()
        products = program.products_of(triton.layers_plan(s, inputs(s, 3, 32)[5], 2), [None] * 4)
    found = re.findall(r"cp\.async\.bulk\.prefetch\.L2\.global \[row\], (\d+)", text)
    sizes = {str(4 * product.columns) for product in products}
    assert set(found) == (sizes if capability >= (9, 0) else set())


def test_a_vector_is_read_by_the_wait_for_it():
    """The inputs of a product are words of the wait, in halves and in parts."""
    size = 2 * 3 * kernel.COLUMNS  # parts of two chunks and of one
    values = jnp.arange(size, dtype=BF16)
    plan = triton.layers_plan(shape_of(D=size), inputs(shape_of(), 3, 32)[5], 2, interpret=True)

    def run(slots_ref, status_ref, *found):
        c = kernel.Context(plan, slots_ref, 0)
        read, left = kernel.read_vector(c, jnp.int32(1), 32, size)
        status_ref[0] = left
        for i, out in enumerate(found):
            out[...] = read(i // 2)[i % 2]

    @jax.jit
    def call(slots):
        chunks = [2, 2, 1, 1]
        out = [jax.ShapeDtypeStruct((n, kernel.ROWS, kernel.COLUMNS), jnp.float32) for n in chunks]
        left = jax.ShapeDtypeStruct((1,), jnp.int32)
        return pl.pallas_call(run, out_shape=[left, *out], interpret=True)(slots)

    words = kernel.word_of(values.astype(jnp.float32))
    left, *found = call(jnp.concatenate([jnp.zeros(32, jnp.int32), words]))
    assert left[0] == 1
    halves = values.astype(jnp.float32).reshape(2, 3, kernel.COLUMNS)
    for part, chunks in enumerate((slice(0, 2), slice(2, 3))):
        for half in (0, 1):
            expected = jnp.broadcast_to(halves[half, chunks, None], found[2 * part + half].shape)
            np.testing.assert_array_equal(found[2 * part + half], expected)
    for missing in (0, 300, size - 1):
        assert (
            call(jnp.concatenate([jnp.zeros(32, jnp.int32), words.at[missing].set(0)]))[0][0] == 0
        )


def launched(s, arrays, **how):
    """Two launches of the same, with what the phases of each layer handed on."""
    plan = triton.layers_plan(s, arrays[5], len(arrays[6]), **how)
    run = lambda *arrays: triton.launch(s, *arrays, **how)[1:]
    if not how.get("interpret"):  # which launches many times, each a program of its own
        run = jax.jit(run).lower(*arrays).compile()
    return [triton.Launched(plan, *run(*arrays)) for _ in range(2)]


@pytest.mark.slow
def test_phases_of_an_interpreted_launch_are_right_and_a_wrong_word_is_found():
    s = shape_of(windows=(9, 40))
    arrays = inputs(s, 37, 48)
    first, again = launched(s, arrays, programs=9, register_tiles=2, interpret=True)
    found = check_phases(s, arrays, first, again)
    assert all(one.is_right for one in found), "\n".join(map(str, found))
    at = first.plan.places["end"] + first.plan.places["out"]  # of the second layer
    wrong = first._replace(slots=first.slots.at[at].add(3 << 24).at[0].set(0))
    found = {one.phase: one for one in check_phases(s, arrays, wrong, again)}
    assert not found["out"].is_right and found["out"].error > 1 and found["out"].worst == 1
    assert (found["qkv"].missing, found["out"].missing) == (1, 0)
    assert (found["qkv"].changed, found["out"].changed, found["heads"].changed) == (1, 1, 0)


GPU_SIZES = {
    "small": {"D": 256, "F": 768, "N": 8, "K": 2, "H": 64},
    "grouped": {"D": 768, "F": 3072, "N": 6, "K": 1, "H": 128},
    "gpt_d12": {"D": 768, "F": 3072, "N": 6, "K": 6, "H": 128},
    "gpt_d24": {"D": 1536, "F": 6144, "N": 12, "K": 12, "H": 128},
}
DEPTHS = {"gpt_d12": 12, "gpt_d24": 24}  # of the others 4


@pytest.mark.gpu
def test_on_a_gpu_each_phase_of_each_layer_is_right():
    """Run this first: it tells the phase, and the size, that is wrong.

    -s prints the table; a failure has it, too. Kernels are compiled beside each other."""
    shapes, arrays = {}, {}
    for name, sizes in GPU_SIZES.items():
        windows = ((512, 512, 512, 2047) * 6)[: DEPTHS.get(name, 4)]
        shapes[name] = shape_of(**sizes, windows=windows, middle=len(windows) // 2)
        arrays[name] = inputs(shapes[name], 600, 1024)
    with ThreadPoolExecutor() as pool:
        coming = {name: pool.submit(launched, shapes[name], arrays[name]) for name in GPU_SIZES}
    lines, are_right = [], True
    for name, one in coming.items():
        first, again = one.result()
        found = check_phases(shapes[name], arrays[name], first, again)
        gave_up = int((np.asarray(first.status_G) == 0).sum())
        are_right = are_right and not gave_up and all(x.is_right for x in found)
        lines += [f"{name}: {gave_up} programs gave up", *(f"  {x}" for x in found)]
    print("\n" + "\n".join(lines))
    assert are_right, "\n".join(lines)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", GPU_SIZES.values(), ids=GPU_SIZES)
def test_on_a_gpu_it_equals_the_reference(sizes):
    s = shape_of(**sizes, windows=(512, 64, 512, 2047), middle=2)
    run, like = (
        jax.jit(functools.partial(one, s))
        for one in (
            functools.partial(decode_layers, implementation="triton"),
            reference.decode_layers,
        )
    )
    for start in (0, 1, 15, 63, 64, 65, 511, 513, 1000, 2040):
        arrays = inputs(s, start, 2064)
        for _ in range(3):
            found = run(*arrays)
            assert_close(found, like(*arrays))
            x0, pages = jnp.roll(arrays[1], 1), found[2]
            next_start = arrays[7] + 1
            arrays = (arrays[0], x0, *arrays[2:5], pages, arrays[6], next_start, arrays[8])


@pytest.mark.gpu
def test_on_a_gpu_many_runs_are_the_same_bits():
    s = shape_of(D=768, F=3072, N=6, K=6, H=128, windows=(512, 512, 512, 2047) * 3, middle=6)
    arrays = inputs(s, 600, 1024)
    run = jax.jit(functools.partial(decode_layers, s, implementation="triton"))
    first = run(*arrays)
    assert np.isfinite(np.asarray(first[0], np.float32)).all()
    leaves = jax.tree.leaves
    same = jax.jit(
        lambda a, b: jnp.stack([(x == y).all() for x, y in zip(leaves(a), leaves(b), strict=True)])
    )
    assert all([same(run(*arrays), first).all() for _ in range(200)])
