"""Kernel of `triton`: each thread multiplies its weights by its inputs and keeps its own sums,
which are added at the end. The norm of the input precedes the first step, while its weights load:
each program computes it anew, as x is small."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxtrain_kernels.matmul.few_rows.operations import GATED


def _tile_of_products(plan, refs, group, n, out_ref):
    """Compute the columns from n * tile.columns on of one result. group: indices of its matrices,
    two of a gated pair, else one."""
    tile, M, dtype = plan.tile, refs.x_MK.shape[0], out_ref.dtype
    columns = pl.ds(n * tile.columns, tile.columns)
    w_refs = [refs.matrices[i] for i in group]

    def places(i):
        begin = i * (tile.loads * tile.inputs)
        return [begin + j * tile.inputs + jnp.arange(tile.inputs) for j in range(tile.loads)]

    def load(i):
        """Load all weights of a step first, so that all loads are in flight at once."""
        return tuple(_weights(w_ref, k, columns) for k in places(i) for w_ref in w_refs)

    def read(m, k):
        """Inputs of row m, normed."""
        x = refs.x_MK[m, k].astype(jnp.float32)
        if plan.eps is None:
            return x
        x *= inverses[m]
        if refs.gain_K is not None:
            x *= refs.gain_K[k].astype(jnp.float32)
        return x.astype(dtype).astype(jnp.float32)

    def add(i, sums, loaded):
        sums, loaded = list(sums), iter(loaded)
        for k in places(i):
            inputs = [read(m, k)[:, None] for m in range(M)]
            for g in range(len(group)):
                weights = next(loaded).astype(jnp.float32)
                for m in range(M):
                    sums[g * M + m] += inputs[m] * weights
        return tuple(sums)

    def step(i, carried):
        """Load the weights of the next step while those of this one are added."""
        sums, loaded = carried
        ahead = load(i + 1)
        return add(i, sums, loaded), ahead

    zero = lambda: jnp.zeros((tile.inputs, tile.columns), jnp.float32)
    last = tile.steps - 1
    zeros = tuple(zero() for _ in range(len(group) * M))
    if tile.ahead:
        carried = zeros, load(0)
    inverses = [] if plan.eps is None else [_inverse_rms(refs.x_MK, m, plan.eps) for m in range(M)]
    if tile.ahead:
        if last:
            carried = jax.lax.fori_loop(0, last, step, carried)
        sums = add(last, *carried)
    else:
        sums = jax.lax.fori_loop(0, last + 1, lambda i, sums: add(i, sums, load(i)), zeros)
    for m in range(M):
        ys = [sums[g * M + m].sum(0).astype(dtype) for g in range(len(group))]
        if refs.biases is not None:
            biases = [refs.biases[i] for i in group]
            ys = [y if b is None else _add(y, b[columns].astype(dtype)) for y, b in zip(ys, biases)]
        y = _activated(plan.activation, *ys)
        if refs.residual_MN is not None:
            y = _add(refs.residual_MN[m, columns], y)
        out_ref[m, columns] = y


def _weights(w_ref, k, columns):
    return w_ref[k, columns]


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
    """Return a list of results [M, N]. All calls of a shape share one trace and one kernel."""
    x_MK, matrices = operands.x_MK, operands.matrices
    every = tuple(range(len(matrices)))
    groups = [every] if plan.activation in GATED else [(i,) for i in every]
    ends = [0]
    for i, *_ in groups:
        ends.append(ends[-1] + matrices[i].shape[1] // plan.tile.columns)
    arrays, form = jax.tree.flatten(operands)

    def kernel(*all_refs):
        program = pl.program_id(0)
        refs, out_refs = form.unflatten(all_refs[: len(arrays)]), all_refs[len(arrays) :]
        for begin, end, group, out_ref in zip(ends, ends[1:], groups, out_refs):
            run = functools.partial(_tile_of_products, plan, refs, group, program - begin, out_ref)
            if len(groups) == 1:
                run()
            else:
                pl.when((begin <= program) & (program < end))(run)

    kernel.__name__ = "few_rows_matmul"
    shape = lambda i: jax.ShapeDtypeStruct((len(x_MK), matrices[i].shape[1]), x_MK.dtype)
    return pl.pallas_call(
        kernel,
        grid=(ends[-1],),
        out_shape=[shape(group[0]) for group in groups],
        compiler_params=plgpu.CompilerParams(num_warps=plan.tile.warps, num_stages=1),
        interpret=plan.interpret,
    )(*arrays)
