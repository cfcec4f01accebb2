"""Kernel of `triton`: each thread multiplies its weights by its inputs and keeps its own sums,
which are added at the end."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu


def _tile_of_matrix(tile, relu2, n, x_ref, w_ref, out_ref):
    """Compute the columns from n * tile.columns on of one matrix's product."""
    columns = pl.ds(n * tile.columns, tile.columns)
    M = x_ref.shape[0]

    def places(i):
        begin = i * (tile.loads * tile.inputs)
        return [begin + j * tile.inputs + jnp.arange(tile.inputs) for j in range(tile.loads)]

    def load(i):
        """Load all weights of a step first, so that all loads are in flight at once."""
        return tuple(w_ref[k, columns] for k in places(i))

    def add(i, sums, loaded):
        sums = list(sums)
        for k, weights in zip(places(i), loaded):
            for m in range(M):
                sums[m] += x_ref[m, k].astype(jnp.float32)[:, None] * weights.astype(jnp.float32)
        return tuple(sums)

    def step(i, carried):
        """Load the weights of the next step while those of this one are added."""
        sums, loaded = carried
        ahead = load(i + 1)
        return add(i, sums, loaded), ahead

    zeros = tuple(jnp.zeros((tile.inputs, tile.columns), jnp.float32) for _ in range(M))
    last = tile.steps - 1
    carried = zeros, load(0)
    if last:
        carried = jax.lax.fori_loop(0, last, step, carried)
    sums = add(last, *carried)
    for m, of_threads in enumerate(sums):
        y = of_threads.sum(0).astype(out_ref.dtype)
        if relu2:
            positive = jnp.maximum(y.astype(jnp.float32), 0)
            y = (positive * positive).astype(out_ref.dtype)
        out_ref[m, columns] = y


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def call(tile, relu2: bool, interpret: bool, x_MK, *matrices):
    """Return a list of products [M, N]. All calls of a shape share one trace and one kernel."""
    ends = [0]
    for matrix in matrices:
        ends.append(ends[-1] + matrix.shape[1] // tile.columns)

    def kernel(x_ref, *refs):
        program = pl.program_id(0)
        w_refs, out_refs = refs[: len(matrices)], refs[len(matrices) :]
        for begin, end, w_ref, out_ref in zip(ends, ends[1:], w_refs, out_refs):
            tile_refs = program - begin, x_ref, w_ref, out_ref
            run = functools.partial(_tile_of_matrix, tile, relu2, *tile_refs)
            if len(matrices) == 1:
                run()
            else:
                pl.when((begin <= program) & (program < end))(run)

    kernel.__name__ = "few_rows_matmul"
    shape = lambda matrix: jax.ShapeDtypeStruct((len(x_MK), matrix.shape[1]), x_MK.dtype)
    return pl.pallas_call(
        kernel,
        grid=(ends[-1],),
        out_shape=[shape(matrix) for matrix in matrices],
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=1),
        interpret=interpret,
    )(x_MK, *matrices)
