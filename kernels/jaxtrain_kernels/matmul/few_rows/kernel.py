"""Kernel of `triton`: each thread multiplies its weights by its inputs and keeps its own sums,
which are added at the end. The norm of the input precedes the first step, while its weights load:
each program computes it anew, as x is small."""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxtrain_kernels.matmul.few_rows.operations import GATED

JOINED = 64  # columns of a program that joins splits


def _sums_of_tile(plan, refs, group, n, split):
    """Sums of M rows of each matrix's product, from column n * tile.columns on, over the inputs of
    a split. group: indices of the matrices, two of a gated pair, else one."""
    tile, M, dtype = plan.tile, refs.x_MK.shape[0], refs.x_MK.dtype
    columns = pl.ds(n * tile.columns, tile.columns)
    first = split * (tile.steps * tile.loads * tile.inputs)

    def load(i):
        """Load all weights of a step first, then its inputs, so that all are in flight at once."""
        begin = first + i * (tile.loads * tile.inputs)
        places = [begin + j * tile.inputs + jnp.arange(tile.inputs) for j in range(tile.loads)]
        weights = [[refs.matrices[g][k, columns] for g in group] for k in places]
        inputs = [[refs.x_MK[m, k] for m in range(M)] for k in places]
        gains = [None if refs.gain_K is None else refs.gain_K[k] for k in places]
        return weights, inputs, gains

    def normed(m, x, gain):
        """Inputs of row m."""
        x = x.astype(jnp.float32)
        if plan.eps is None:
            return x
        x *= inverses[m]
        if gain is not None:
            x *= gain.astype(jnp.float32)
        return x.astype(dtype).astype(jnp.float32)

    def add(sums, loaded):
        for weights, inputs, gain in zip(*loaded):
            rows = [normed(m, x, gain)[:, None] for m, x in enumerate(inputs)]
            wide = [w.astype(jnp.float32) for w in weights]
            sums = [[old + x * w for old, x in zip(of, rows)] for of, w in zip(sums, wide)]
        return sums

    def step(i, carried):
        """Load the weights of the next step while those of this one are added."""
        sums, loaded = carried
        ahead = load(i + 1)
        return add(sums, loaded), ahead

    zeros = [[jnp.zeros((tile.inputs, tile.columns), jnp.float32)] * M for _ in group]
    carried = zeros, load(0)
    inverses = [] if plan.eps is None else [_inverse_rms(refs.x_MK, m, plan.eps) for m in range(M)]
    if tile.steps > 1:
        carried = jax.lax.fori_loop(0, tile.steps - 1, step, carried)
    return [[of_threads.sum(0) for of_threads in of] for of in add(*carried)]


def _finish(plan, refs, group, columns, sums, out_ref):
    """Round the sums, apply the operations after the products, and store the result."""
    for m, of_matrices in enumerate(zip(*sums)):
        ys = [y.astype(out_ref.dtype) for y in of_matrices]
        if refs.biases is not None:
            biases = [refs.biases[g] for g in group]
            add = lambda y, bias: _add(y, bias[columns].astype(y.dtype))
            ys = [y if bias is None else add(y, bias) for y, bias in zip(ys, biases)]
        y = _activated(plan.activation, *ys)
        if refs.residual_MN is not None:
            y = _add(refs.residual_MN[m, columns], y)
        out_ref[m, columns] = y


def _inverse_rms(x_ref, m, eps):
    """1 / rms of row m."""
    K = x_ref.shape[1]
    k = jnp.arange(pl.next_power_of_2(K))
    x_K = plgpu.load(x_ref.at[m, k], mask=k < K, other=0.0).astype(jnp.float32)
    return jax.lax.rsqrt((x_K * x_K).sum(0) / K + eps)


def _add(a, b):
    """The sum, rounded once to the dtype of both."""
    return (a.astype(jnp.float32) + b.astype(jnp.float32)).astype(a.dtype)


def _activated(activation, y, *up):
    """An activation in float32, times the product of the second matrix if it is gated."""
    if activation is None:
        return y
    x = y.astype(jnp.float32)
    if activation == "relu2":
        positive = jnp.maximum(x, 0)
        x = positive * positive
    elif activation == "swiglu":
        x /= 1 + jnp.exp(-x)
    else:  # gelu by tanh, x (1 + tanh(z)) / 2, as x times the logistic function of 2 z
        z = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x /= 1 + jnp.exp(-2 * z)
    if up:
        x *= up[0].astype(jnp.float32)
    return x.astype(y.dtype)


@functools.partial(jax.jit, static_argnums=0)
def call(plan, operands):
    """Return a list of results [M, N]. All calls of a shape share one trace and its kernels."""
    tile, (M, _), dtype = plan.tile, operands.x_MK.shape, operands.x_MK.dtype
    every = tuple(range(len(operands.matrices)))
    groups = [every] if plan.activation in GATED else [(i,) for i in every]
    sizes = [operands.matrices[group[0]].shape[1] for group in groups]
    results = [jax.ShapeDtypeStruct((M, N), dtype) for N in sizes]

    def products(refs, out_refs, group, n, split):
        sums = _sums_of_tile(plan, refs, group, n, split)
        columns = pl.ds(n * tile.columns, tile.columns)
        _finish(plan, refs, group, columns, sums, *out_refs)

    def parts(refs, out_refs, group, n, split):
        sums = _sums_of_tile(plan, refs, group, n, split)
        for of_rows, out_ref in zip(sums, out_refs, strict=True):
            for m, y in enumerate(of_rows):
                out_ref[split, m, pl.ds(n * tile.columns, tile.columns)] = y

    def join(refs, out_refs, group, n, _):
        columns = pl.ds(n * JOINED, JOINED)
        parts_refs = [refs.matrices[g] for g in group]
        sums = [[ref[:, m, columns].sum(0) for m in range(M)] for ref in parts_refs]
        _finish(plan, refs, group, columns, sums, *out_refs)

    run = functools.partial(_launch, groups, plan.interpret)
    if tile.splits == 1:
        ends = _ends(sizes, tile.columns)
        return run(products, "few_rows_matmul", ends, 1, tile.warps, operands, results)
    each = [jax.ShapeDtypeStruct((tile.splits, M, N), jnp.float32)
            for group, N in zip(groups, sizes) for _ in group]  # fmt: skip
    before = operands._replace(biases=None, residual_MN=None)
    ends = _ends(sizes, tile.columns)
    found = run(parts, "few_rows_matmul", ends, tile.splits, tile.warps, before, each)
    after = operands._replace(matrices=tuple(found), gain_K=None)
    ends = _ends(sizes, JOINED)
    return run(join, "few_rows_join", ends, 1, max(1, JOINED // 32), after, results)


def _ends(sizes, columns):
    """First program of each result, and one past the last."""
    return [0, *itertools.accumulate(-(-N // columns) for N in sizes)]


def _launch(groups, interpret, tile, name, ends, splits, warps, operands, out_shape):
    """Launch `tile` on each tile of columns of each group's result."""
    arrays, form = jax.tree.flatten(operands)

    def kernel(*all_refs):
        program, split = pl.program_id(0), pl.program_id(1)
        refs, outs = form.unflatten(all_refs[: len(arrays)]), iter(all_refs[len(arrays) :])
        each = len(out_shape) // len(groups)
        for begin, end, group in zip(ends, ends[1:], groups):
            out_refs = [next(outs) for _ in range(each)]
            run = functools.partial(tile, refs, out_refs, group, program - begin, split)
            if len(groups) == 1:
                run()
            else:
                pl.when((begin <= program) & (program < end))(run)

    kernel.__name__ = name
    return pl.pallas_call(
        kernel,
        grid=(ends[-1], splits),
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
    )(*arrays)
