"""Triton's products with integer codes: what they serve, their numbers on a CPU (interpreted),
lowering for CUDA, and (GPU) numbers and gradients."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from jax.sharding import PartitionSpec as P
from jaxtrain_kernels import dispatch
from jaxtrain_kernels.dispatch import Target, mesh_devices, on_target
from jaxtrain_kernels.matmul import integers
from jaxtrain_kernels.matmul.few_rows.operations import InputNorm, Operations
from jaxtrain_kernels.matmul.integers import (
    from_fragments,
    reference,
    to_fragments,
    triton,
    w4a16_matmul,
    w8a16_matmul,
)

HOPPER, TURING = (Target("cuda", cc) for cc in ((9, 0), (7, 5)))
INT4, INT8 = (64, jnp.uint8), (128, jnp.int8)  # rows of codes for 128 inputs
# Pallas asks for the device when it lowers.
H100 = AbstractMesh(
    (),
    (),
    abstract_device=AbstractDevice(device_kind="NVIDIA H100", num_cores=None, platform="gpu"),
)


@pytest.mark.parametrize(
    ("device", "rows", "dtype", "codes", "columns", "group", "reason"),
    [
        (HOPPER, 1, jnp.bfloat16, INT4, 96, 128, None),
        (HOPPER, 32, jnp.float16, INT8, 96, 128, None),
        (HOPPER, 32, jnp.bfloat16, INT4, 96, 32, None),
        (HOPPER, 33, jnp.bfloat16, INT8, 96, 128, "at most 32 rows, got 33"),
        (HOPPER, 1, jnp.float32, INT8, 96, 128, "bfloat16 or float16, got float32"),
        (HOPPER, 1, jnp.bfloat16, INT8, 48, 128, "multiple of 32 columns, got 48"),
        (HOPPER, 1, jnp.bfloat16, INT4, 96, 16, "multiple of 32 inputs, got 16"),
        (TURING, 1, jnp.float16, INT8, 96, 128, "8.0"),
        (Target("cpu"), 1, jnp.bfloat16, INT8, 96, 128, "this is cpu"),
    ],
)
def test_what_it_serves(device, rows, dtype, codes, columns, group, reason):
    H, stored = codes
    scales = jnp.ones((128 // group, columns), jnp.bfloat16)
    arrays = jnp.ones((rows, 128), dtype), jnp.ones((H, columns), stored), scales
    form = "int4" if stored == jnp.uint8 else "int8"
    why = triton.supports(device, form, *arrays)
    assert why is None if reason is None else why is not None and reason in why


@pytest.mark.parametrize(("form", "R"), [("int4", 64), ("int8", 128)])
@pytest.mark.parametrize(
    ("device", "rows", "N", "rows_of_codes", "expected"),
    [
        (HOPPER, 8, 96, 0, True),
        (HOPPER, 9, 96, 0, False),
        (HOPPER, 1, 80, 0, False),
        (HOPPER, 1, 96, 8, False),
        (TURING, 1, 96, 0, False),
    ],
)
def test_which_products_codes_in_fragments_serve(device, rows, N, rows_of_codes, expected, form, R):
    codes = jnp.ones((2, R + rows_of_codes, N), jnp.uint8 if form == "int4" else jnp.int8)
    scales = jnp.ones((2, 1, N) if form == "int4" else (2, N), jnp.bfloat16)
    with on_target(*device):
        assert integers.serves_fragments(form, rows, jnp.float16, codes, scales) is expected


@pytest.mark.parametrize("form", ["int4", "int8"])
def test_the_order_of_fragments_is_that_of_the_lanes(form):
    """Word (c, q, i) of a block has row 4q + i, columns 4c to 4c + 3."""
    dtype = jnp.uint8 if form == "int4" else jnp.int8
    codes = jnp.asarray(np.random.default_rng(0).integers(0, 127, (2, 32, 96)), dtype)
    words = to_fragments(codes)
    assert words.shape == (2, 3, 2, 128)
    columns = np.asarray(words)[1, 2, 1].view(np.int8).reshape(8, 4, 4, 4)  # c, q, i, column
    c, q, i = 5, 2, 3
    np.testing.assert_array_equal(columns[c, q, i], codes[1, 16 + 4 * q + i, 64 + 4 * c :][:4])
    np.testing.assert_array_equal(from_fragments(words, form), codes)
    assert from_fragments(words, form).dtype == dtype


@pytest.mark.parametrize("N", [32, 96, 1024, 14336])
@pytest.mark.parametrize("group", [None, 32, 96, 128, 4096])
@pytest.mark.parametrize("tile_of", [triton.dot_tile, triton.fragment_tile])
def test_tiles_divide_the_codes_and_lie_in_a_group(tile_of, N, group):
    for R in (4096, 16 * 3, 768) if group is None else (16 * group, 3 * group // 2):
        tile = tile_of(R, N, group)
        assert R % (tile.rows * tile.splits) == N % tile.columns == 0
        if isinstance(tile, triton.Tile):
            assert group is None or (group // 2) % (16 * tile.loads) == 0


def test_small_matrices_have_programs_for_most_multiprocessors():
    for K, N in ((4096, 1024), (4096, 4096), (4096, 14336), (14336, 4096), (1536, 6144)):
        for R, group in ((K, None), (K // 2, 128)):
            for tile in (triton.dot_tile(R, N, group), triton.fragment_tile(R, N, group)):
                assert N // tile.columns * tile.splits >= 0.4 * triton.PROCESSORS


@pytest.mark.parametrize("op", [w8a16_matmul, w4a16_matmul])
@pytest.mark.parametrize("tile", [triton.Tile(2, 2, 4), triton.DotTile(16, 64, 4, 4, 1)])
@pytest.mark.quick("tile0-w4a16_matmul", "tile1-w4a16_matmul")
def test_warps_and_splits_add_up(op, tile):
    """Several steps of each."""
    run, whole, x = interpreted(op, 3, 512, 128, tile=tile)
    assert_near(run(x), whole(x), x.dtype)


def backend_of(op, rows, mesh=None, **options):
    """The name of the backend that serves a call on a Hopper, and what it passed over."""
    shape = jax.ShapeDtypeStruct
    arrays = shape((rows, 256), jnp.bfloat16), *(shape(s.shape[1:], s.dtype) for s in stacked(op))
    chosen = []
    choose = dispatch.choose_backend

    def noted(op, reasons, *rest):
        chosen.append((choose(op, reasons, *rest), reasons["triton"]))
        return "dot"  # needs no Triton here

    with pytest.MonkeyPatch.context() as patch, on_target(*HOPPER):
        patch.setattr(integers, "choose_backend", noted)
        with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
            jax.eval_shape(lambda *a: op(*a, **options), *arrays)
    return chosen[-1]


@pytest.mark.parametrize("op", [w8a16_matmul, w4a16_matmul])
def test_it_is_the_default_of_up_to_32_rows(op):
    for rows in (1, 2, 8, 32):
        assert backend_of(op, rows) == ("triton", None)
    name, passed = backend_of(op, 33)
    assert name == "dot" and passed == "needs at most 32 rows, got 33"


@pytest.mark.parametrize("op", [w8a16_matmul, w4a16_matmul])
def test_on_a_mesh_of_several_devices_xla_serves(op):
    of = lambda count: jax.sharding.Mesh(np.array(jax.devices()[:count]), ("fsdp",))
    name, reason = backend_of(op, 1, of(2))
    assert name == "reduce" and reason == "has no partitioning rule, and the mesh has 2 devices"
    with pytest.raises(NotImplementedError, match="no partitioning rule"):
        backend_of(op, 1, of(2), implementation="triton")
    assert backend_of(op, 1, of(1)) == ("triton", None)
    manual = jax.shard_map(
        lambda x: x * mesh_devices(), mesh=of(2), in_specs=P("fsdp"), out_specs=P("fsdp")
    )
    assert manual(jnp.ones(2)).tolist() == [1.0, 1.0]


def interpreted(
    op, M, K, N, *, dtype=jnp.bfloat16, group=64, offsets=False, layer=1, tile=None, interpret=True
):
    """Layer 1 of 2 by the kernel and by the reference, as functions of x; and x. Codes are in
    fragments for up to 8 rows, unless `tile` is of codes in rows."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((M, K)), dtype)
    if op is w8a16_matmul:
        codes = jnp.asarray(rng.integers(-128, 128, (2, K, N)), jnp.int8)
        arrays = [codes, jnp.asarray(rng.random((2, N)), jnp.float32)]
    else:
        codes = jnp.asarray(rng.integers(0, 256, (2, K // 2, N)), jnp.uint8)
        arrays = [codes, jnp.asarray(rng.random((2, K // group, N)), jnp.bfloat16)]
    if offsets:
        arrays.append(jnp.asarray(rng.standard_normal((2, K // group, N)), jnp.float32))
    ours, theirs = (getattr(module, op.__name__) for module in (triton, reference))
    given = list(arrays)
    if M <= triton.FRAGMENT_ROWS and not isinstance(tile, triton.DotTile):
        given[0] = to_fragments(codes)
    whole = lambda x: theirs(x, *(array[1] for array in arrays))

    def run(x):
        out = ours(x, *given, layer=layer, tile=tile, interpret=interpret)
        return out if isinstance(out, jax.Array) else out[0]

    return run, whole, x


def assert_near(out, expected, dtype):
    out, expected = (np.asarray(y, np.float32) for y in (out, expected))
    within = 1e-5 if dtype == jnp.float32 else 2 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(out, expected, rtol=within, atol=within * np.abs(expected).max())


CASES = (
    (w8a16_matmul, 1, 192, 96, {}),
    (w4a16_matmul, 1, 256, 96, {"group": 64, "offsets": True, "layer": jnp.int32(1)}),
    (w4a16_matmul, 8, 128, 64, {"group": 32, "offsets": True}),
    (w8a16_matmul, 2, 192, 96, {"tile": triton.DotTile(32, 32, 1, 4, 1)}),
    (w8a16_matmul, 17, 64, 32, {"dtype": jnp.float16, "layer": jnp.int32(1)}),
)
MORE = tuple(
    (op, M, 768, 160, {"group": group, "dtype": dtype})
    for op in (w8a16_matmul, w4a16_matmul) for M in (1, 2, 8, 32)
    for group in (32, 192) for dtype in (jnp.bfloat16, jnp.float16)
    if (group == 32 if op is w8a16_matmul or M in (1, 8) else group == 192)
    and (dtype == jnp.float16) == (M == 8)
)  # fmt: skip


@pytest.mark.parametrize(("op", "M", "K", "N", "how"), CASES)
@pytest.mark.quick("w8a16_matmul-1-192-96-how0", "w4a16_matmul-8-128-64-how2")
def test_interpreted_it_equals_the_reference(op, M, K, N, how):
    run, whole, x = interpreted(op, M, K, N, **how)
    assert_near(run(x), whole(x), x.dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("op", "M", "K", "N", "how"), MORE)
def test_interpreted_it_equals_the_reference_in_more_shapes(op, M, K, N, how):
    run, whole, x = interpreted(op, M, K, N, **how)
    assert_near(run(x), whole(x), x.dtype)


def with_operations(op, M, norm, activation, residual, *, K=256, N=192, group=64, **how):
    """A product with operations by the kernel, and by the reference: functions of x; and x."""
    rng = np.random.default_rng(1)
    random = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    dtype = how.pop("dtype", jnp.bfloat16)
    x = random(M, K).astype(dtype)
    if op is w8a16_matmul:
        codes = jnp.asarray(rng.integers(-128, 128, (K, N)), jnp.int8)
        scales = jnp.asarray(rng.random(N) / (80 * K**0.5), jnp.float32)
    else:
        codes = jnp.asarray(rng.integers(0, 256, (K // 2, N)), jnp.uint8)
        scales = jnp.asarray(rng.random((K // group, N)) / (5 * K**0.5), jnp.bfloat16)
    gain = {"norm": None, "gain": random(K).astype(dtype).astype(jnp.float32)}
    operations = Operations(
        InputNorm(1e-5, gain[norm]) if norm else None, None, activation,
        random(M, N // 2 if activation == "swiglu" else N).astype(dtype) if residual else None,
    )  # fmt: skip
    run = lambda module: getattr(module, op.__name__)
    fused = lambda x, operations: run(triton)(
        x, to_fragments(codes), scales, operations=operations, **how
    )[0]
    whole = lambda x, operations: run(integers)(
        x, codes, scales, operations=operations, implementation="reference"
    )
    return lambda x: fused(x, operations), lambda x: whole(x, operations), x


AROUND = (
    (1, "gain", "swiglu", False),
    (3, "gain", None, True),
    (8, "norm", "gelu", True),
    (2, None, "relu2", False),
    (8, "gain", "geglu", False),
)


@pytest.mark.parametrize("op", [w8a16_matmul, w4a16_matmul])
@pytest.mark.parametrize(("M", "norm", "activation", "residual"), AROUND)
@pytest.mark.parametrize("tile", [None, triton.Tile(2, 1, 1)])
def test_interpreted_with_operations_it_equals_the_reference(
    op, M, norm, activation, residual, tile
):
    how = {"tile": tile, "interpret": True}
    run, whole, x = with_operations(op, M, norm, activation, residual, **how)
    assert_near(run(x), whole(x), x.dtype)
    (ours,), (theirs,) = (jax.vjp(f, x)[1](whole(x)) for f in (run, whole))
    assert_near(ours, theirs, x.dtype)


def test_products_take_no_biases():
    x, codes, scales = jnp.ones((1, 32)), jnp.ones((32, 32), jnp.int8), jnp.ones(32)
    with pytest.raises(ValueError, match="no biases"):
        w8a16_matmul(x, codes, scales, operations=Operations(biases=(scales,)))


def test_operations_leave_no_splits():
    assert triton.fragment_tile(4096, 1024, None).splits > 1
    assert triton.fragment_tile(4096, 1024, None, whole=True).splits == 1


@pytest.mark.parametrize("op", [w8a16_matmul, w4a16_matmul])
@pytest.mark.slow
def test_it_has_a_batch_and_the_gradient_of_the_matrix(op):
    run, whole, x = interpreted(op, 1, 128, 32)
    (ours,), (theirs,) = (jax.vjp(f, x)[1](f(x)) for f in (run, whole))
    assert_near(ours, theirs, x.dtype)
    for y in jax.vmap(run)(jnp.stack([x, x])):
        assert_near(y, whole(x), x.dtype)


def stacked(op, K=256, N=96, in_fragments=False):
    """Codes and scales of three layers, as shapes."""
    shape = jax.ShapeDtypeStruct
    R, G, stored = (K, (), jnp.int8) if op is w8a16_matmul else (K // 2, (K // 64,), jnp.uint8)
    codes = shape((3, R, N), stored)
    scales = shape((3, *G, N), jnp.bfloat16 if G else jnp.float32)
    return jax.eval_shape(to_fragments, codes) if in_fragments else codes, scales


@pytest.mark.parametrize("op", [w8a16_matmul, w4a16_matmul])
@pytest.mark.parametrize(("rows", "in_fragments"), [(1, True), (8, True), (8, False)])
def test_it_lowers_for_cuda_and_slices_no_codes(op, rows, in_fragments):
    codes_scales = stacked(op, in_fragments=in_fragments)
    arrays = jax.ShapeDtypeStruct((rows, 256), jnp.bfloat16), *codes_scales
    asked = functools.partial(op, implementation="triton")

    def unrolled(x, codes, scales):
        return [asked(x, codes, scales, layer=i) for i in range(3)]

    def scanned(x, codes, scales):
        run = lambda sum_MN, i: (sum_MN + asked(x, codes, scales, layer=i), None)
        return jax.lax.scan(run, jnp.zeros((rows, 96), x.dtype), jnp.arange(3))[0]

    of_codes = "x".join(map(str, arrays[1].shape[1:]))
    for f in (unrolled, scanned):
        with on_target("cuda", (9, 0)), jax.sharding.use_abstract_mesh(H100):
            traced = jax.jit(f).trace(*arrays)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("@__gpu$xla.gpu.triton(") == 1  # one kernel for all layers
        assert f"x{of_codes}x" in text and f"tensor<{of_codes}x" not in text


@pytest.mark.parametrize("op", [w8a16_matmul, w4a16_matmul])
def test_other_backends_restore_the_order_of_the_codes(op):
    x = interpreted(op, 3, 128, 64)[2]
    rng = np.random.default_rng(0)
    codes, scales = (
        jnp.asarray(rng.integers(0, 256, s.shape) if s.ndim == 3 and s.dtype != jnp.bfloat16
                    else rng.random(s.shape), s.dtype)
        for s in stacked(op, 128, 64)
    )  # fmt: skip
    run = lambda codes: op(x, codes, scales, layer=2, implementation="dot")
    np.testing.assert_array_equal(run(to_fragments(codes)), run(codes))


@pytest.mark.gpu
@pytest.mark.parametrize("op", [w8a16_matmul, w4a16_matmul])
@pytest.mark.parametrize("rows", [1, 3, 8, 32])
@pytest.mark.parametrize(("K", "N"), [(256, 96), (4096, 1024)])
def test_it_equals_the_reference(op, rows, K, N):
    rng = np.random.default_rng(0)
    codes, scales = (
        jnp.asarray(rng.integers(0, 256, s.shape) if jnp.issubdtype(s.dtype, jnp.integer)
                    else rng.random(s.shape), s.dtype)
        for s in stacked(op, K, N)
    )  # fmt: skip
    x = jnp.asarray(rng.standard_normal((rows, K)), jnp.bfloat16)
    product = lambda name, codes, layer: (
        lambda x: op(x, codes, scales, layer=layer, implementation=name)
    )
    expected, pull = jax.vjp(product("dot", codes, 2), x)
    largest = float(jnp.abs(expected).max())
    if rows <= triton.FRAGMENT_ROWS:
        codes = to_fragments(codes)
    for layer in (2, jnp.int32(2)):
        out, ours = jax.vjp(product("triton", codes, layer), x)
        np.testing.assert_allclose(out / largest, expected / largest, atol=0.02)
        np.testing.assert_array_equal(ours(expected)[0], pull(expected)[0])
    again = jax.vmap(product("triton", codes, 2))(jnp.stack([x, x]))
    np.testing.assert_array_equal(again[1], out)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("op", [w8a16_matmul, w4a16_matmul])
@pytest.mark.parametrize("tile", [(2, 4, 1), (8, 1, 4), (16, 2, 1)])
def test_each_tile_equals_the_reference(op, tile, dtype):
    """The lanes of `fragments` are those that Triton chooses, for any tile."""
    shape = {"group": 128, "offsets": op is w4a16_matmul, "tile": triton.Tile(*tile)}
    run, whole, x = interpreted(op, 5, 1024, 512, dtype=dtype, interpret=False, **shape)
    assert_near(run(x), whole(x), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("op", [w8a16_matmul, w4a16_matmul])
@pytest.mark.parametrize(("M", "norm", "activation", "residual"), AROUND)
@pytest.mark.parametrize(
    ("tile", "dtype"),
    [
        (None, jnp.bfloat16),
        (triton.Tile(2, 1, 1), jnp.bfloat16),
        (triton.Tile(16, 2, 1), jnp.float16),
    ],
)
def test_with_operations_it_equals_the_reference(op, M, norm, activation, residual, tile, dtype):
    how = {"tile": tile, "dtype": jnp.dtype(dtype), "K": 2048, "group": 128}
    run, whole, x = with_operations(op, M, norm, activation, residual, **how)
    assert_near(run(x), whole(x), x.dtype)


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("interpret", [True, pytest.param(False, marks=pytest.mark.gpu)])
def test_parts_are_columns_of_the_product(form, interpret):
    op = w8a16_matmul if form == "int8" else w4a16_matmul
    _, _, x = interpreted(op, 3, 256, 160)
    rng = np.random.default_rng(0)
    codes, scales = (
        jnp.asarray(rng.integers(0, 127, s.shape[1:]) if s.dtype != jnp.bfloat16 else
                    rng.random(s.shape[1:]), s.dtype)
        for s in stacked(op, 256, 160)
    )  # fmt: skip
    if form == "int8":
        scales = jnp.asarray(rng.random(160), jnp.float32)
    ours = functools.partial(getattr(triton, op.__name__), interpret=interpret)
    arrays = to_fragments(codes), scales
    sizes = 96, 32, 32
    parts = ours(x, *arrays, sizes=sizes)
    assert tuple(part.shape[1] for part in parts) == sizes
    np.testing.assert_array_equal(jnp.concatenate(parts, 1), ours(x, *arrays)[0])
