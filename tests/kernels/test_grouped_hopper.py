"""The grouped matmul for Hopper: tiles of rows, equality with the reference, lowering."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtrain_kernels import grouped_matmul
from jaxtrain_kernels.dispatch import on_target, target
from jaxtrain_kernels.grouped_matmul import hopper, reference
from jaxtrain_kernels.grouped_matmul.hopper import weights
from jaxtrain_kernels.grouped_matmul.hopper.rows import Epilogue, default_tiling
from jaxtrain_kernels.grouped_matmul.hopper.table import largest_first, row_tiles
from jaxtrain_kernels.matmul.hopper.gemm import GemmTiling

# The mode that knows that TMA's copies are asynchronous.
INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
TURNS = GemmTiling(64, 64, stages=2, parts=2, cluster=1, group=2, blocks=2)
SHARED = TURNS._replace(columns=128, shared=True)
BF16 = jnp.bfloat16


def arrays(sizes, M, K, N, dtype=BF16, after=1.0):
    """x, w, dy and sizes; rows after the last group are `after`."""
    rng = np.random.default_rng(0)
    x, w, dy = (rng.standard_normal(s) for s in ((M, K), (len(sizes), K, N), (M, N)))
    end = sum(sizes)
    x[end:], dy[end:] = after, after
    x, w, dy = (jnp.asarray(a, dtype) for a in (x, w / np.sqrt(K), dy))
    return x, w, dy, jnp.asarray(sizes, jnp.int32)


def exact(x, w, dy, sizes):
    """y, dx and dw in float32, group by group."""
    x, w, dy = (np.asarray(a, np.float32) for a in (x, w, dy))
    y, dx = np.zeros_like(dy), np.zeros_like(x)
    dw, end = np.zeros_like(w), np.cumsum(sizes)
    for e, n in enumerate(sizes):
        rows = slice(int(end[e] - n), int(end[e]))
        y[rows], dx[rows], dw[e] = x[rows] @ w[e], dy[rows] @ w[e].T, x[rows].T @ dy[rows]
    return y, dx, dw


def results(f, x, w, dy, sizes):
    y, pull = jax.vjp(lambda x, w: f(x, w, sizes), x, w)
    return y, *pull(dy)


@pytest.mark.parametrize(
    ("sizes", "M", "K", "N", "dtype", "tiling"),
    [
        # Uneven, one empty, all ends inside a tile, rows behind; blocks end in different rounds.
        ((70, 0, 66, 30), 200, 128, 128, BF16, TURNS._replace(blocks=3)),
        # Four groups in one tile; a last tile that is not full.
        ((3, 2, 190, 5), 200, 128, 192, jnp.float16, TURNS._replace(rows=128, stages=3)),
        ((136,), 136, 192, 128, BF16, TURNS),  # one group
        ((0, 0), 136, 128, 128, BF16, TURNS),  # rows behind alone
    ],
    ids=["uneven", "small", "one", "none"],
)
@pytest.mark.quick("uneven")
def test_equals_the_reference_without_races(sizes, M, K, N, dtype, tiling, capfd):
    """Value and gradients; rows after the last group may be any values."""
    assert_equals_reference(sizes, M, K, N, dtype, tiling)
    assert "RACE" not in "".join(capfd.readouterr())


@pytest.mark.slow
def test_equals_the_reference_with_tiles_of_a_cluster():
    """The interpreter runs six warpgroups of a cluster at once, and XLA a thread for each core."""
    code = """if True:
        import test_grouped_hopper as t
        sizes, tiling = (70, 0, 66, 30), t.TURNS._replace(cluster=2, columns=128)
        t.assert_equals_reference(sizes, 200, 128, 192, t.BF16, tiling)
    """
    env = os.environ | {
        "NPROC": "32",
        "PYTHONPATH": os.pathsep.join([*sys.path, os.path.dirname(__file__)]),
    }
    subprocess.run([sys.executable, "-c", code], env=env, timeout=300, check=True)


def assert_equals_reference(sizes, M, K, N, dtype, tiling):
    given = arrays(sizes, M, K, N, dtype, after=np.nan)
    ours = lambda *a: hopper.grouped_matmul(*a, tiling=tiling, interpret=INTERPRET)
    eps = float(jnp.finfo(dtype).eps)
    for name, out, right in zip(("y", "dx", "dw"), results(ours, *given), exact(*given)):
        assert out.dtype == dtype
        size = np.abs(right).max() + 1
        np.testing.assert_allclose(
            out.astype(jnp.float32), right, atol=eps * size, rtol=eps, err_msg=name
        )


def test_warpgroups_may_share_a_tile_of_rows_and_not_one_of_a_matrix():
    x, w, dy, sizes = arrays((70, 0, 66), 136, 128, 128)
    y = hopper.rows_matmul(x, w, sizes, tiling=SHARED, interpret=INTERPRET)
    right = exact(x, w, dy, sizes)[0]
    np.testing.assert_allclose(y.astype(jnp.float32), right, atol=0.02, rtol=0.01)
    with pytest.raises(ValueError, match="cannot share a tile"):
        weights.weights_matmul(x, dy, sizes, tiling=SHARED, interpret=INTERPRET)


@pytest.mark.parametrize(
    ("sizes", "M"),
    [((70, 0, 66, 30), 200), ((64, 64), 128), ((1, 1, 1, 1), 130), ((0, 0), 65), ((0, 200), 200)],
)
def test_each_row_of_a_group_is_in_one_tile(sizes, M):
    tiles, position_M = row_tiles(jnp.asarray(sizes), M, 64)
    seen, places = [], []
    pairs = np.asarray(tiles.pairs_P4)[: int(tiles.counts_2[1])]
    assert tiles.counts_2[0] == np.sum(pairs[:, 1] < len(sizes))
    for n, (row, group, start, end) in enumerate(pairs):
        assert row % 64 == 0
        rows = range(max(row, start), min(row + 64, end, M))
        assert rows, "a tile without rows"
        seen += [(r, group) for r in rows]
        places += [64 * n + r - row for r in rows]
    groups = np.repeat(np.arange(len(sizes) + 1), [*sizes, M - sum(sizes)])
    assert seen == list(enumerate(groups.tolist()))
    assert places == position_M.tolist()


def test_small_groups_and_epilogues_get_tiles_of_fewer_rows():
    shape = lambda *given: (default_tiling(*given).rows, default_tiling(*given).cluster)
    plain, other = Epilogue(), Epilogue(jnp.negative)
    assert [shape(16384, 768, e) for e in (plain, other)] == [(192, 2), (128, 2)]
    assert shape(2048, 768, plain) == (128, 1)
    assert default_tiling(16384, 192, plain).columns == 192  # in one tile, not in two


def test_large_groups_come_first():
    groups = largest_first(jnp.asarray((5, 0, 20, 7)), 40)
    np.testing.assert_array_equal(groups, [[2, 5, 25], [3, 25, 32], [0, 0, 5], [1, 5, 5]])


def test_parts_of_groups_begin_at_steps_or_with_their_group():
    groups = largest_first(jnp.asarray((70, 0, 200, 3)), 280, parts=2, step=64)
    # 0: 0..64, 64..70 (the half is at 35); 2: 70..128, 128..270 (at 170); 3: 270, 270..273.
    right = [[5, 128, 270], [1, 0, 70], [4, 70, 128], [7, 270, 273]]
    np.testing.assert_array_equal(groups[:4], right)
    assert (groups[4:, 1] == groups[4:, 2]).all()
    assert sorted(groups[:, 0].tolist()) == list(range(8))


def test_few_groups_are_split_where_that_saves_rounds():
    """At 8 experts of 768 x 1536 over 66 clusters there are 192 tiles, three rounds; at 4 there are
    96: two rounds, of halves three."""
    assert [weights.best_parts(16384, tiles, 66) for tiles in (192, 96, 24, 1536)] == [1, 2, 2, 1]
    assert weights.best_parts(4096, 96, 66) == 1


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.quick("3")
def test_gradients_of_parts_are_added(parts):
    """Parts that are empty, that begin inside a step's rows, and one of a whole group."""
    x, _, dy, sizes = arrays((70, 0, 200, 3), 280, 128, 128, after=np.nan)
    run = lambda n: weights.weights_matmul(x, dy, sizes, parts=n, tiling=TURNS, interpret=INTERPRET)
    right = exact(x, jnp.zeros((4, 128, 128)), dy, sizes)[2]
    size = np.abs(right).max()
    # Each part is rounded, and their sum.
    np.testing.assert_allclose(run(parts).astype(jnp.float32), right, atol=0.01 * size)
    assert (run(parts)[1] == 0).all()
    assert not np.array_equal(run(parts), run(1))


@pytest.mark.parametrize(
    ("device", "shapes", "dtypes", "reason"),
    [
        (("cpu", None), ((256, 128), (2, 128, 128)), (BF16, BF16), "this is cpu"),
        (("cuda", (8, 0)), ((256, 128), (2, 128, 128)), (BF16, BF16), "compute capability 9.0"),
        (("cuda", (9, 0)), ((256, 128), (2, 128, 128)), (jnp.float32,) * 2, "got float32"),
        (("cuda", (9, 0)), ((256, 128), (2, 128, 128)), (BF16, jnp.float16), "needs one dtype"),
        (("cuda", (9, 0)), ((256, 96), (2, 96, 128)), (BF16, BF16), r"of 64 above it, .*\[96, 128"),
        (("cuda", (9, 0)), ((256, 128), (2, 128, 64)), (BF16, BF16), r"of 64 above .*\[128, 64\]"),
        (("cuda", (9, 0)), ((260, 128), (2, 128, 128)), (BF16, BF16), "multiples of 8 .* got 260"),
        (("cuda", (9, 0)), ((128, 128), (2, 128, 128)), (BF16, BF16), "above 128, got 128"),
    ],
)
def test_what_it_cannot_serve_is_refused_with_the_reason(device, shapes, dtypes, reason):
    x, w = (jnp.ones(s, dtype) for s, dtype in zip(shapes, dtypes))
    sizes = jnp.asarray((len(x) - 8, 4), jnp.int32)
    with on_target(*device):
        with pytest.raises(NotImplementedError, match=reason):
            grouped_matmul(x, w, sizes, implementation="mosaic")
        if dtypes[0] == dtypes[1]:
            right = reference.grouped_matmul(x, w, sizes)
            np.testing.assert_array_equal(grouped_matmul(x, w, sizes, implementation="xla"), right)


@pytest.mark.parametrize(("M", "E", "dtype"), [(4096, 8, BF16), (1000, 64, jnp.float16)])
@pytest.mark.quick("4096-8-bfloat16")
def test_lowers_for_hopper(M, E, dtype):
    shapes = (M, 768), (E, 768, 1536), (M, 1536)
    given = [jax.ShapeDtypeStruct(s, dtype) for s in shapes]
    f = lambda *a: grouped_matmul(*a, implementation="mosaic")
    with on_target("cuda", (9, 0)):
        traced = jax.jit(lambda *a: results(f, *a)).trace(
            *given, jax.ShapeDtypeStruct((E,), jnp.int32)
        )
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, jnp.float16])
@pytest.mark.parametrize(
    ("sizes", "M", "K", "N"),
    [
        ((1000, 0, 333, 129, 4), 2048, 256, 512),
        ((3, 2, 190, 5), 200, 192, 320),
        ((136,), 136, 128, 128),
        ((0, 0), 136, 128, 128),
        (tuple([64] * 32), 2048, 128, 192),
    ],
    ids=["uneven", "small", "one", "none", "many"],
)
def test_on_a_gpu_it_errs_no_more_than_one_rounding(sizes, M, K, N, dtype):
    x, w, dy, counts = arrays(sizes, M, K, N, dtype, after=np.nan)
    if reason := hopper.supports(target(), x, w):
        pytest.skip(reason)
    f = lambda *a: grouped_matmul(*a, implementation="mosaic")
    out = jax.jit(lambda *a: results(f, *a))(x, w, dy, counts)
    eps = float(jnp.finfo(dtype).eps)
    for name, ours, right in zip(("y", "dx", "dw"), out, exact(x, w, dy, sizes)):
        size = np.abs(right).max() + 1
        np.testing.assert_allclose(
            np.asarray(ours, np.float32), right, atol=eps * size, rtol=eps, err_msg=name
        )
