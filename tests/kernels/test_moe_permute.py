"""Rows of the experts: the sort, copies and sums equal the reference, on a CPU and on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from jaxtrain_kernels import (
    gather_rows,
    moe_permute,
    moe_unpermute,
    row_id_map,
    scatter_rows,
    sum_rows,
)
from jaxtrain_kernels.dispatch import Target, on_target, target
from jaxtrain_kernels.moe_permute import reference, triton

H200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))
HOPPER = Target("cuda", (9, 0))
BF16 = jnp.bfloat16
# N, k, E, D: tokens that no program divides; one copy; a block of the sort that is not full.
SHAPES = [(700, 2, 8, 384), (9, 1, 64, 256), (1100, 3, 5, 128)]


def chosen(N, k, E):
    """Distinct experts of each token; the last expert gets none."""
    rng = np.random.default_rng([N, k])
    return jnp.asarray(np.stack([rng.permutation(E - 1)[:k] for _ in range(N)]), jnp.int32)


def arrays(N, k, D, dtype):
    """x, weights, and gradients of rows and of their weights."""
    rng = np.random.default_rng([N, k, D])
    shapes = ((N, D), dtype), ((N, k), jnp.float32), ((N * k, D), dtype), ((N * k, 1), jnp.float32)
    return [jnp.asarray(rng.normal(size=s), d) for s, d in shapes]


def all_results(permute, unpermute, row_Nk, x, weights, rows, row_weights):
    """Rows, their weights, sums, and the gradients of each, of bfloat16 in float32."""
    given, back = jax.vjp(lambda *a: permute(*a, row_Nk), x, weights)
    sums, back_sums = jax.vjp(lambda a: unpermute(a, row_Nk), rows)
    found = (*given, sums, *back((rows, row_weights)), *back_sums(x))
    return [a.astype(jnp.float32) for a in found], [a.dtype for a in found]


def assert_equal(found, expected):
    (values, dtypes), (others, other_dtypes) = found, expected
    assert dtypes == other_dtypes
    for name, a, b in zip(("rows", "w", "sums", "dx", "dw", "drows"), values, others, strict=True):
        # Sums of bfloat16 may be rounded in another order.
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-6, err_msg=name)


def test_the_reference_is_a_stable_sort():
    """Expert 0 has the copies (1, 0) and (2, 1), expert 1 (0, 0) and (1, 1), expert 2 the rest."""
    rows_of, sizes = reference.row_id_map(jnp.array([[1, 2], [0, 1], [2, 0]]), 4)
    assert rows_of.tolist() == [[2, 4], [0, 3], [5, 1]] and sizes.tolist() == [2, 2, 2, 0]
    x, w = jnp.array([[1.0], [2.0], [3.0]]), jnp.arange(6.0).reshape(3, 2)
    rows, weights = reference.moe_permute(x, w, rows_of)
    assert rows[:, 0].tolist() == [2, 3, 1, 2, 1, 3] and weights[:, 0].tolist() == [
        2,
        5,
        0,
        3,
        1,
        4,
    ]
    sums = reference.moe_unpermute(jnp.arange(6.0)[:, None], rows_of)
    assert sums[:, 0].tolist() == [6, 3, 6]


@pytest.mark.parametrize("by", [reference, functools.partial(triton.sum_rows, interpret=True)])
def test_sums_of_rows_of_which_some_are_missing(by):
    """Rows of -1 and from M on count as zeros."""
    run = by.sum_rows if by is reference else by
    y = jnp.asarray(np.random.default_rng(0).normal(size=(20, 128)), BF16)
    rows = jnp.array(
        [[0, 19], [-1, 3], [20, 5], [-1, 20], [1000, -7], [7, 7], [2, -1], [4, 6], [9, 8]]
    )
    wide = np.concatenate([np.asarray(y, np.float32), np.zeros((1, 128))])
    expected = wide[np.where((rows >= 0) & (rows < 20), rows, 20)].sum(1)
    np.testing.assert_allclose(run(y, rows).astype(jnp.float32), expected, atol=0.02)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.quick("(700, 2, 8, 384)")
def test_the_kernels_equal_the_reference(shape):
    N, k, E, D = shape
    given = chosen(N, k, E)
    found = triton.row_id_map(given, E, interpret=True)
    rows_of, sizes = reference.row_id_map(given, E)
    np.testing.assert_array_equal(found[0], rows_of)
    np.testing.assert_array_equal(found[1], sizes)
    assert [a.dtype for a in found] == [jnp.int32] * 2
    permute = functools.partial(triton.moe_permute, interpret=True)
    unpermute = functools.partial(triton.moe_unpermute, interpret=True)
    operands = arrays(N, k, D, BF16)
    there = all_results(reference.moe_permute, reference.moe_unpermute, rows_of, *operands)
    assert_equal(all_results(permute, unpermute, rows_of, *operands), there)


def test_copies_that_share_an_expert_have_a_row_each():
    """As of tokens that are not numbers, whose best experts are no set: no row is written twice."""
    rows_of, sizes = triton.row_id_map(jnp.full((300, 2), 3), 4, interpret=True)
    np.testing.assert_array_equal(rows_of.reshape(-1), np.arange(600))
    assert sizes.tolist() == [0, 0, 0, 600]


def rows_by_index(N, S, D):
    """x, rows, other rows to write, and indices: no index twice, some of no row of x."""
    rng = np.random.default_rng([N, S])
    at = rng.permutation(np.arange(-5, N + 20))[:S]
    x, rows = (jnp.asarray(rng.normal(size=(n, D)), BF16) for n in (N, S))
    return x, rows, jnp.asarray(at, jnp.int32)


@pytest.mark.parametrize("by", [triton, reference], ids=["triton", "reference"])
def test_rows_by_index(by):
    """Beside NumPy: rows that do not exist are read as zeros and not written."""
    x, rows, at = rows_by_index(300, 203, 384)
    how = {"interpret": True} if by is triton else {}
    inside = (at >= 0) & (at < 300)
    expected = np.where(inside[:, None], np.asarray(x, np.float32)[np.clip(at, 0, 299)], 0)
    np.testing.assert_array_equal(by.gather_rows(x, at, **how).astype(jnp.float32), expected)
    expected = np.array(x, np.float32)
    expected[at[inside]] = np.asarray(rows, np.float32)[inside]
    np.testing.assert_array_equal(by.scatter_rows(x, rows, at, **how).astype(jnp.float32), expected)


@pytest.mark.parametrize("by", [reference, triton], ids=["reference", "triton"])
def test_sums_of_rows_with_a_part_of_an_array(by):
    """Beside NumPy: rows that y lacks are zeros, and rows 7 to 106 of another array are added."""
    y, _, _ = rows_by_index(300, 203, 384)
    added, how = rows_by_index(111, 1, 384)[0], {"interpret": True} if by is triton else {}
    row = jnp.asarray(np.random.default_rng(1).integers(-1, 302, (100, 2)), jnp.int32)
    wide = lambda x: np.asarray(x, np.float32)
    rows = np.where(((row >= 0) & (row < 300))[..., None], wide(y)[np.clip(row, 0, 299)], 0)
    for first in (0, 7):
        found = by.sum_rows(y, row, added, jnp.int32(first), **how)
        expected = jnp.asarray(rows.sum(1) + wide(added)[first : first + 100]).astype(y.dtype)
        np.testing.assert_array_equal(wide(found), wide(expected))


@pytest.mark.gpu
def test_rows_by_index_on_a_gpu():
    x, rows, at = rows_by_index(65536, 69000, 768)
    if reason := triton.supports(target(), "gather_rows", x, at):
        pytest.skip(reason)
    for f, given in ((gather_rows, (x, at)), (scatter_rows, (x, rows[: len(at)], at))):
        found = jax.jit(functools.partial(f, implementation="triton"))(*given)
        np.testing.assert_array_equal(found, f(*given, implementation="reference"))


def test_lowers_for_cuda_in_one_kernel_each():
    S = jax.ShapeDtypeStruct
    x, weights, rows_of = S((4096, 768), BF16), S((4096, 2), jnp.float32), S((4096, 2), jnp.int32)

    def run(x, weights, chosen):
        rows_of, sizes = row_id_map(chosen, 8)
        rows, row_weights = moe_permute(x, weights, rows_of)
        x = scatter_rows(x, gather_rows(rows, rows_of[:, 0]), rows_of[:, 1])
        x = sum_rows(rows, rows_of, jnp.concatenate([x, x]), sizes[0])
        return moe_unpermute(rows, rows_of), row_weights, sizes, x

    with on_target("cuda", (9, 0)), jax.sharding.use_abstract_mesh(H200):
        text = jax.jit(run).trace(x, weights, rows_of).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__gpu$xla.gpu.triton") == 6
    assert not any(
        f"stablehlo.{op}" in text for op in ("sort", "gather", "scatter", "dynamic_slice")
    )


@pytest.mark.parametrize(
    ("device", "op", "x", "other", "reason"),
    [
        (HOPPER, "moe_permute", ((4096, 768), BF16), (4096, 2), None),
        (HOPPER, "moe_permute", ((4096, 768), jnp.float32), (4096, 2), "got float32"),
        (HOPPER, "moe_permute", ((4096, 192), BF16), (4096, 2), "multiples of 128, got 192"),
        (HOPPER, "moe_permute", ((4096, 768), BF16), (4096, 17), "16 experts a token, got 17"),
        (HOPPER, "moe_permute", ((2**21, 1024), BF16), (2**20, 2), "values, got 2147483648"),
        (HOPPER, "gather_rows", ((4096, 768), BF16), (9000,), None),
        (HOPPER, "scatter_rows", ((2**22, 512), BF16), (4096,), "values, got 2147483648"),
        (HOPPER, "row_id_map", ((4096, 2), jnp.int32), 257, "at most 256 experts, got 257"),
        (HOPPER, "row_id_map", ((2**20, 2), jnp.int32), 64, "got 16384 blocks of 64 experts"),
        (Target("cuda", (8, 0)), "row_id_map", ((4096, 2), jnp.int32), 8, "this is (8, 0)"),
        (Target("cpu"), "row_id_map", ((4096, 2), jnp.int32), 8, "this is cpu"),
    ],
)  # fmt: skip
def test_what_they_serve(device, op, x, other, reason):
    other = other if isinstance(other, int) else jax.ShapeDtypeStruct(other, jnp.int32)
    why = triton.supports(device, op, jax.ShapeDtypeStruct(*x), other)
    assert why is None if reason is None else why is not None and reason in why


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (65536, 2, 8, 768)], ids=str)
def test_on_a_gpu_they_equal_the_reference(shape):
    N, k, E, D = shape
    given, operands = chosen(N, k, E), arrays(N, k, D, BF16)
    if reason := triton.supports(target(), "moe_permute", operands[0], given):
        pytest.skip(reason)
    by = dict(implementation="triton")
    rows_of, sizes = jax.jit(lambda c: row_id_map(c, E, **by))(given)
    expected = reference.row_id_map(given, E)
    np.testing.assert_array_equal(rows_of, expected[0])
    np.testing.assert_array_equal(sizes, expected[1])
    permute, unpermute = (functools.partial(f, **by) for f in (moe_permute, moe_unpermute))
    found = jax.jit(lambda *a: all_results(permute, unpermute, *a)[0])(rows_of, *operands)
    there, dtypes = all_results(reference.moe_permute, reference.moe_unpermute, rows_of, *operands)
    assert_equal((found, dtypes), (there, dtypes))
