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


def _tile_of_products(plan, refs, group, n, out_ref):
    """Compute the columns from n * tile.columns on of one result. group: indices of its matrices,
    two of a gated pair, else one."""
    tile, M, dtype = plan.tile, refs.x_MK.shape[0], refs.x_MK.dtype
    columns = pl.ds(n * tile.columns, tile.columns)
    axis = 1 if plan.transposed else 0  # of the inputs

    def places(i):
        begin = i * (tile.loads * tile.inputs)
        return [begin + j * tile.inputs + jnp.arange(tile.inputs) for j in range(tile.loads)]

    def read(i):
        """Inputs of a step, and their gains."""
        inputs = [[refs.x_MK[m, k] for m in range(M)] for k in places(i)]
        return inputs, [None if refs.gain_K is None else refs.gain_K[k] for k in places(i)]

    def load(i):
        """Load all weights of a step first, so that all loads are in flight at once. With rows of a
        transposed matrix, a thread has few enough registers of weights to load its inputs, too."""
        if not plan.transposed:
            return [[refs.matrices[g][k, columns] for g in group] for k in places(i)], None
        n_R1 = (n * tile.columns + jnp.arange(tile.columns))[:, None]
        return [[refs.matrices[g][n_R1, k[None]] for g in group] for k in places(i)], read(i)

    def normed(m, x, gain):
        """Inputs of row m."""
        x = x.astype(jnp.float32)
        if plan.eps is None:
            return x
        x *= inverses[m]
        if gain is not None:
            x *= gain.astype(jnp.float32)
        return x.astype(dtype).astype(jnp.float32)

    def add(i, sums, loaded):
        every, ahead = loaded
        for weights, inputs, gain in zip(every, *(ahead or read(i))):
            rows = [jnp.expand_dims(normed(m, x, gain), 1 - axis) for m, x in enumerate(inputs)]
            wide = [w.astype(jnp.float32) for w in weights]
            sums = [[old + x * w for old, x in zip(of, rows)] for of, w in zip(sums, wide)]
        return sums

    def step(i, carried):
        """Load the weights of the next step while those of this one are added."""
        sums, loaded = carried
        ahead = load(i + 1)
        return add(i, sums, loaded), ahead

    shape = (tile.inputs, tile.columns)[:: -1 if plan.transposed else 1]
    zeros = [[jnp.zeros(shape, jnp.float32)] * M for _ in group]
    carried = zeros, load(0)
    inverses = [] if plan.eps is None else [_inverse_rms(refs.x_MK, m, plan.eps) for m in range(M)]
    if tile.steps > 1:
        carried = jax.lax.fori_loop(0, tile.steps - 1, step, carried)
    sums = [[of_threads.sum(axis) for of_threads in of] for of in add(tile.steps - 1, *carried)]
    for m, of_matrices in enumerate(zip(*sums)):
        ys = [y.astype(out_ref.dtype) for y in of_matrices]
        if refs.biases is not None:
            biases = [refs.biases[g] for g in group]
            plus = lambda y, bias: add_rounded(y, bias[columns].astype(y.dtype))
            ys = [y if bias is None else plus(y, bias) for y, bias in zip(ys, biases)]
        y = activated(plan.activation, *ys)
        if refs.residual_MN is not None:
            y = add_rounded(refs.residual_MN[m, columns], y)
        out_ref[m, columns] = y


def _inverse_rms(x_ref, m, eps):
    """1 / rms of row m."""
    K = x_ref.shape[1]
    k = jnp.arange(pl.next_power_of_2(K))
    x_K = plgpu.load(x_ref.at[m, k], mask=k < K, other=0.0).astype(jnp.float32)
    return jax.lax.rsqrt((x_K * x_K).sum(0) / K + eps)


def add_rounded(a, b):
    """The sum, rounded once to the dtype of both."""
    return (a.astype(jnp.float32) + b.astype(jnp.float32)).astype(a.dtype)


def activated(activation, y, *up):
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
    tile, (M, _), dtype = plan.tile, operands.x_MK.shape, operands.x_MK.dtype
    every = tuple(range(len(operands.matrices)))
    groups = [every] if plan.activation in GATED else [(i,) for i in every]
    sizes = [operands.matrices[group[0]].shape[1 - plan.transposed] for group in groups]
    ends = [0, *itertools.accumulate(N // tile.columns for N in sizes)]
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
    return pl.pallas_call(
        kernel,
        grid=(ends[-1],),
        out_shape=[jax.ShapeDtypeStruct((M, N), dtype) for N in sizes],
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=1),
        interpret=plan.interpret,
    )(*arrays)
