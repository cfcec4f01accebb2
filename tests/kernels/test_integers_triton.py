"""Triton's products with integer codes: what they serve, their numbers on a CPU (interpreted),
lowering for CUDA, and (GPU) numbers and gradients."""

import contextlib
import functools
import importlib.metadata
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jaxtrain_kernels import dispatch
from jaxtrain_kernels.dispatch import Target, on_target
from jaxtrain_kernels.matmul import integers
from jaxtrain_kernels.matmul.integers import triton, w4a16_matmul, w8a16_matmul

HOPPER, TURING = (Target("cuda", cc) for cc in ((9, 0), (7, 5)))
INT4, INT8 = (64, jnp.uint8), (128, jnp.int8)  # rows of codes for 128 inputs


@pytest.mark.parametrize(
    ("device", "rows", "dtype", "codes", "columns", "group", "reason"),
    [
        (HOPPER, 1, jnp.bfloat16, INT4, 48, 128, None),
        (HOPPER, 1, jnp.float32, INT8, 48, 128, None),
        (HOPPER, 32, jnp.bfloat16, INT4, 48, 32, None),
        (HOPPER, 33, jnp.bfloat16, INT8, 48, 128, "at most 32 rows, got 33"),
        (HOPPER, 2, jnp.float32, INT8, 48, 128, "one row of float32, got 2 of float32"),
        (HOPPER, 1, jnp.bfloat16, INT8, 40, 128, "multiple of 16 columns, got 40"),
        (HOPPER, 2, jnp.bfloat16, INT4, 48, 16, "multiple of 32 inputs for 2 rows, got 16"),
        (TURING, 1, jnp.float16, INT8, 48, 128, "8.0"),
        (Target("cpu"), 1, jnp.bfloat16, INT8, 48, 128, "this is cpu"),
    ],
)
def test_what_it_serves(monkeypatch, device, rows, dtype, codes, columns, group, reason):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.3.1")
    H, stored = codes
    scales = jnp.ones((128 // group, columns), jnp.bfloat16)
    arrays = jnp.ones((rows, 128), dtype), jnp.ones((H, columns), stored), scales
    why = triton.supports(device, *arrays)
    assert why is None if reason is None else why is not None and reason in why


def test_without_jax_triton_it_says_how_to_install_it(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "version", missing)
    x, codes, scales = jnp.ones((1, 4)), jnp.ones((4, 16), jnp.int8), jnp.ones(16)
    with on_target(*HOPPER), pytest.raises(NotImplementedError, match="pip install jax-triton"):
        w8a16_matmul(x, codes, scales, implementation="triton")


@pytest.mark.parametrize("M", [1, 2, 32])
@pytest.mark.parametrize("N", [16, 1024, 14336])
@pytest.mark.parametrize("group", [None, 2, 32, 96, 128, 4096])
def test_tiles_lie_in_a_group_and_fill_the_device(M, N, group):
    R = 4096 if group is None else 96 * group
    tile = triton.tile_of(M, R, N, group)
    step = tile.each if M == 1 else tile.rows
    assert group is None or group % (2 * step) == 0 or M > 1 > group % 32
    programs = math.ceil(N / tile.columns) * tile.splits
    steps = math.ceil(R / (tile.rows * tile.each))
    assert programs <= 5 * triton.PROCESSORS
    assert programs >= 3 * triton.PROCESSORS or tile.splits == max(1, steps // 2)


def test_tiles_are_within_5_percent_of_the_best_measured():
    path = Path(__file__).parents[2] / "benchmarks/results/matmul-integers-nvidia_h200.json"
    shapes: dict[tuple[str, str], list[dict]] = {}
    for row in json.loads(path.read_text())["sweep"]:
        shapes.setdefault((row["name"], row["shape"]), []).append(row)
    assert len(shapes) == 11
    for (form, shape), rows in shapes.items():
        M, K, N = (int(size[1:]) for size in shape.split("_"))
        R = K // 2 if form == "int4" else K
        # splits that end in the same whole steps are one program
        plain = lambda tile, R=R: (tile._replace(splits=0), triton.splits_of(tile, R))
        chosen = plain(triton.tile_of(M, R, N, 128 if form == "int4" else None))
        (ms,) = {row["ms"] for row in rows if plain(triton.Tile(*row["tile"])) == chosen}
        assert ms <= 1.05 * min(row["ms"] for row in rows), (form, shape)


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
        patch.setattr(importlib.metadata, "version", lambda name: "0.3.1")
        patch.setattr(integers, "choose_backend", noted)
        with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
            jax.eval_shape(lambda *a: op(*a, **options), *arrays)
    return chosen[-1]


@pytest.mark.parametrize(
    ("op", "rows", "backend", "reason"),
    [
        (w4a16_matmul, 1, "triton", None),
        (w4a16_matmul, 8, "triton", None),
        (w4a16_matmul, 9, "dot", "not measured for more than 8 rows of uint8"),
        (w8a16_matmul, 1, "triton", None),
        (w8a16_matmul, 2, "dot", "not measured for more than 1 row of int8"),
    ],
)
def test_it_is_the_default_where_it_was_measured(op, rows, backend, reason):
    name, passed = backend_of(op, rows)
    assert name == backend
    assert passed is None if reason is None else reason in passed
    assert backend_of(op, rows, implementation="triton") == ("triton", None)


@pytest.mark.parametrize("op", [w8a16_matmul, w4a16_matmul])
def test_on_a_mesh_of_several_devices_xla_serves(op):
    of = lambda count: jax.sharding.Mesh(np.array(jax.devices()[:count]), ("fsdp",))
    name, reason = backend_of(op, 1, of(2))
    assert name == "reduce" and reason == "has no partitioning rule, and the mesh has 2 devices"
    with pytest.raises(NotImplementedError, match="no partitioning rule"):
        backend_of(op, 1, of(2), implementation="triton")
    assert backend_of(op, 1, of(1)) == ("triton", None)
    manual = jax.shard_map(
        lambda x: x * triton.mesh_devices(), mesh=of(2), in_specs=P("fsdp"), out_specs=P("fsdp")
    )
    assert manual(jnp.ones(2)).tolist() == [1.0, 1.0]


class Memory:
    """A numpy array as Triton's interpreter takes one: like torch's, its own storage."""

    def __init__(self, array):
        self.array = np.ascontiguousarray(array)
        self.dtype = self.array.dtype

    data_ptr = lambda self: self.array.ctypes.data
    untyped_storage = cpu = lambda self: self
    new_empty = lambda self, *size, **how: Memory(self.array)
    storage_offset = size = stride = lambda self: 0
    copy_ = lambda self, other: None

    def set_(self, storage, *place):
        self.array = storage.array


def interpreted():
    """Each kernel's sums, of layer 1 of 2, against numpy; run where TRITON_INTERPRET=1."""
    from jaxtrain_kernels.matmul.integers.triton import kernels
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt  # an integer in an array of one is no bound of a loop
    interpreter._implicit_cvt = lambda x: x if isinstance(x, int) else convert(x)
    rng = np.random.default_rng(0)
    for M, (K, N, group), traced in itertools.product(
        (1, 5), ((256, 64, 32), (192, 80, 96), (320, 48, 64)), (False, True)
    ):
        x = rng.standard_normal((M, K)).astype(ml_dtypes.bfloat16 if M == 1 else np.float16)
        codes = rng.integers(0, 16, (2, K, N)).astype(np.uint8)
        scales = rng.random((2, K // group, N)).astype(ml_dtypes.bfloat16)
        w = (codes[1] - 8.0) * scales[1].astype(np.float64).repeat(group, 0)
        packed = codes[:, 0::2] | codes[:, 1::2] << 4
        wide = rng.integers(-128, 128, (2, K, N)).astype(np.int8)
        for kind, stored, extra, dims, true in (
            ("int4", packed, [Memory(scales)], {"H": K // 2, "GROUP": group}, w),
            ("int8", wide, [], {"K": K}, wide[1].astype(np.float64)),
        ):
            R = stored.shape[1]
            split = math.ceil(R / 48) * 16  # the last may be short, and end in a step
            splits = math.ceil(R / split)
            tile = {"TH": 4, "EACH": 4, "WORDS": 16}
            if M > 1:
                tile = {"M": M, "MP": 16, "TN": 64, "TH" if kind == "int4" else "TK": 16}
            out = Memory(np.full((splits, M, N), np.nan, np.float32))
            getattr(kernels, f"{'row' if M == 1 else 'rows'}_{kind}")[math.ceil(N / 64), splits](
                Memory(x), Memory(stored), *extra, Memory(np.array([1], np.int32)),
                0 if traced else -1, split, out, N=N, TRACED=traced, STAGES=1, **dims, **tile,
            )  # fmt: skip
            expected = x.astype(np.float64) @ true
            off = np.abs(out.array.sum(0) - expected).max() / np.abs(expected).max()
            assert off < (3e-5 if M > 1 else 1e-6), (kind, M, K, N, traced, off)
    print("checked")


def test_interpreted_kernels_equal_numpy():
    pytest.importorskip("triton")
    path = {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_INTERPRET": "1"}
    code = "import test_integers_triton as t; t.interpreted()"
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, env={**os.environ, **path}, capture_output=True, text=True)
    assert done.stdout.endswith("checked\n"), done.stderr


def stacked(op, K=256, N=48):
    """Codes and scales of three layers, as shapes."""
    shape = jax.ShapeDtypeStruct
    if op is w8a16_matmul:
        return shape((3, K, N), jnp.int8), shape((3, N), jnp.float32)
    return shape((3, K // 2, N), jnp.uint8), shape((3, K // 64, N), jnp.bfloat16)


@pytest.mark.parametrize("op", [w8a16_matmul, w4a16_matmul])
@pytest.mark.parametrize("rows", [1, 8])
def test_it_lowers_for_cuda_and_slices_no_codes(op, rows):
    pytest.importorskip("jax_triton", exc_type=ImportError)
    arrays = jax.ShapeDtypeStruct((rows, 256), jnp.bfloat16), *stacked(op)
    asked = functools.partial(op, implementation="triton")

    def unrolled(x, codes, scales):
        return [asked(x, codes, scales, layer=i) for i in range(3)]

    def scanned(x, codes, scales):
        run = lambda sum_MN, i: (sum_MN + asked(x, codes, scales, layer=i), None)
        return jax.lax.scan(run, jnp.zeros((rows, 48), x.dtype), jnp.arange(3))[0]

    of_codes = "x".join(map(str, arrays[1].shape[1:]))
    for f, calls in ((unrolled, 3), (scanned, 1)):
        with on_target("cuda", (9, 0)):
            traced = jax.jit(f).trace(*arrays)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("@triton_kernel_call(") == calls
        assert f"x{of_codes}x" in text and f"tensor<{of_codes}x" not in text


@pytest.mark.gpu
@pytest.mark.parametrize("op", [w8a16_matmul, w4a16_matmul])
@pytest.mark.parametrize("rows", [1, 3, 32])
@pytest.mark.parametrize(("K", "N"), [(256, 48), (4096, 1024), (3072, 768)])
def test_it_equals_the_reference(op, rows, K, N):
    pytest.importorskip("jax_triton", exc_type=ImportError)
    rng = np.random.default_rng(0)
    codes, scales = (
        jnp.asarray(rng.integers(0, 128, s.shape) if jnp.issubdtype(s.dtype, jnp.integer)
                    else rng.random(s.shape), s.dtype)
        for s in stacked(op, K, N)
    )  # fmt: skip
    x = jnp.asarray(rng.standard_normal((rows, K)), jnp.bfloat16)
    product = lambda name, layer: lambda x: op(x, codes, scales, layer=layer, implementation=name)
    expected, pull = jax.vjp(product("dot", 2), x)
    largest = float(jnp.abs(expected).max())
    for layer in (2, jnp.int32(2)):
        out, ours = jax.vjp(product("triton", layer), x)
        np.testing.assert_allclose(out / largest, expected / largest, atol=0.02)
        np.testing.assert_array_equal(ours(expected)[0], pull(expected)[0])
    again = jax.vmap(product("triton", 2))(jnp.stack([x, x]))
    np.testing.assert_array_equal(again[1], out)
