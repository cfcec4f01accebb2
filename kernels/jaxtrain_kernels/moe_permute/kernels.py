"""Kernels of `moe_permute.triton`: a program has some tokens, or a block of copies to sort."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

TOKENS = 8  # of a program: 12 KB of a row of 768 channels are in flight for each
PRODUCT_TOKENS = 16  # of a program that also reads a matrix, once for all its tokens
MOST_FACTORS = 16  # of a token in registers
WARPS = 4
WIDEST = 1024


def parts_of_row(D: int) -> list[slice]:
    """Parts of a row, each the largest power of two that divides D, up to `WIDEST`."""
    width = min(D & -D, WIDEST)
    return [slice(first, first + width) for first in range(0, D, width)]


def _call(kernel, name: str, grid, out_shape, interpret: bool, arrays, aliases=None):
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        input_output_aliases=aliases or {},
        interpret=interpret,
        name=name,
    )(*arrays)


def _tokens(N: int, tokens: int = TOKENS):
    """A program's tokens, and which of them there are."""
    token_R = pl.program_id(0) * tokens + jnp.arange(tokens)
    return token_R, token_R < N


def _part(part: slice):
    return part.start + jnp.arange(part.stop - part.start)


@functools.partial(jax.jit, static_argnums=0)
def copy_rows(interpret: bool, x_ND, row_Nk, weights_Nk=None):
    """Return each token at its rows, and the weights there [M, 1] if they are given."""
    (N, D), k = x_ND.shape, row_Nk.shape[1]

    def kernel(x_ref, row_ref, *refs):
        rows_ref, *weights = refs if weights_Nk is None else refs[1:]
        token_R, inside_R = _tokens(N)
        rows_of = [plgpu.load(row_ref.at[token_R, j], mask=inside_R, other=0) for j in range(k)]
        for part in parts_of_row(D):
            at_W = _part(part)[None]
            index = lambda row_R, at_W=at_W: (row_R[:, None], at_W)
            x_RW = plgpu.load(x_ref.at[index(token_R)], mask=inside_R[:, None], other=0)
            for row_R in rows_of:
                plgpu.store(rows_ref.at[index(row_R)], x_RW, mask=inside_R[:, None])
        for j, row_R in enumerate(rows_of if weights else ()):
            weight_R = plgpu.load(refs[0].at[token_R, j], mask=inside_R, other=0)
            plgpu.store(weights[0].at[row_R, 0], weight_R, mask=inside_R)

    given = (x_ND, row_Nk) if weights_Nk is None else (x_ND, row_Nk, weights_Nk)
    out = [jax.ShapeDtypeStruct((N * k, D), x_ND.dtype)]
    if weights_Nk is not None:
        out.append(jax.ShapeDtypeStruct((N * k, 1), weights_Nk.dtype))
    return _call(kernel, "moe_copy_rows", (pl.cdiv(N, TOKENS),), out, interpret, given)


@functools.partial(jax.jit, static_argnums=0)
def sum_rows(interpret: bool, y_MD, row_Nk, weights_M1=None, added_SD=None, first=0):
    """Return the sum of each token's rows, and the weights there [N, k] if they are given. Rows
    that y lacks are zeros. Rows of added from `first` on are added to the sums."""
    (N, k), (M, D) = row_Nk.shape, y_MD.shape
    given, out = [y_MD, row_Nk], [jax.ShapeDtypeStruct((N, D), y_MD.dtype)]
    if weights_M1 is not None:
        given.append(weights_M1)
        out.append(jax.ShapeDtypeStruct((N, k), weights_M1.dtype))
    if added_SD is not None:
        given += [added_SD, jnp.full(1, first, jnp.int32)]

    def kernel(y_ref, row_ref, *refs):
        given_refs, (sums_ref, *weights) = refs[: len(given) - 2], refs[len(given) - 2 :]
        token_R, inside_R = _tokens(N)
        rows_of = [plgpu.load(row_ref.at[token_R, j], mask=inside_R, other=-1) for j in range(k)]
        exists = lambda row_R: (row_R >= 0) & (row_R < M)
        for part in parts_of_row(D):
            at_W = _part(part)[None]
            read = lambda row_R, at_W=at_W: plgpu.load(
                y_ref.at[row_R[:, None], at_W], mask=exists(row_R)[:, None], other=0
            )
            first_RW, *others = (read(row_R).astype(jnp.float32) for row_R in rows_of)
            if added_SD is not None:
                added_ref, place_ref = given_refs[-2:]
                row_R1 = (token_R + place_ref[0])[:, None]
                added_RW = plgpu.load(added_ref.at[row_R1, at_W], mask=inside_R[:, None], other=0)
                others.append(added_RW.astype(jnp.float32))
            sum_RW = functools.reduce(jnp.add, others, first_RW)
            plgpu.store(
                sums_ref.at[token_R[:, None], at_W],
                sum_RW.astype(sums_ref.dtype),
                mask=inside_R[:, None],
            )
        for j, row_R in enumerate(rows_of if weights else ()):
            weight_R = plgpu.load(given_refs[0].at[row_R, 0], mask=exists(row_R), other=0)
            plgpu.store(weights[0].at[token_R, j], weight_R, mask=inside_R)

    return _call(kernel, "moe_sum_rows", (pl.cdiv(N, TOKENS),), out, interpret, given)


@functools.partial(jax.jit, static_argnums=0)
def sum_rows_with_product(interpret: bool, y_MD, row_Nk, factors_NE, matrix_ED):
    """Return the sum of each token's rows, all of which exist, plus factors matrix, in float32."""
    (N, k), (E, D) = row_Nk.shape, matrix_ED.shape

    def kernel(y_ref, row_ref, factors_ref, matrix_ref, sums_ref):
        token_R, inside_R = _tokens(N, PRODUCT_TOKENS)
        rows_of = [plgpu.load(row_ref.at[token_R, j], mask=inside_R, other=0) for j in range(k)]
        factor = lambda e: plgpu.load(factors_ref.at[token_R, e], mask=inside_R, other=0)
        # Few factors stay in registers, so that nothing waits for one load after another.
        factors = [factor(e) for e in range(E)] if E <= MOST_FACTORS else []
        for part in parts_of_row(D):
            at_W = _part(part)
            line = lambda e, at_W=at_W: plgpu.load(matrix_ref.at[e, at_W])[None]
            given = [
                plgpu.load(y_ref.at[row_R[:, None], at_W[None]], mask=inside_R[:, None], other=0)
                for row_R in rows_of
            ]
            total_RW = jnp.zeros((len(token_R), len(at_W)), jnp.float32)
            if factors:
                for e, factor_R in enumerate(factors):
                    total_RW += factor_R[:, None] * line(e)
            else:
                add = lambda e, total_RW, line=line: total_RW + factor(e)[:, None] * line(e)
                total_RW = jax.lax.fori_loop(0, E, add, total_RW)
            for y_RW in given:
                total_RW += y_RW.astype(jnp.float32)
            plgpu.store(
                sums_ref.at[token_R[:, None], at_W[None]],
                total_RW.astype(sums_ref.dtype),
                mask=inside_R[:, None],
            )

    grid, out = (pl.cdiv(N, PRODUCT_TOKENS),), jax.ShapeDtypeStruct((N, D), y_MD.dtype)
    given = y_MD, row_Nk, factors_NE, matrix_ED
    return _call(kernel, "moe_sum_rows_with_product", grid, out, interpret, given)


@functools.partial(jax.jit, static_argnums=0)
def gather_rows(interpret: bool, x_ND, row_S):
    """Return x[row], zeros where there is no such row."""
    (N, D), S = x_ND.shape, len(row_S)

    def kernel(x_ref, row_ref, rows_ref):
        token_R, inside_R = _tokens(S)
        row_R = plgpu.load(row_ref.at[token_R], mask=inside_R, other=-1)
        exists_R1 = ((row_R >= 0) & (row_R < N))[:, None]
        for part in parts_of_row(D):
            at_W = _part(part)[None]
            x_RW = plgpu.load(x_ref.at[row_R[:, None], at_W], mask=exists_R1, other=0)
            plgpu.store(rows_ref.at[token_R[:, None], at_W], x_RW, mask=inside_R[:, None])

    out = jax.ShapeDtypeStruct((S, D), x_ND.dtype)
    return _call(kernel, "moe_gather_rows", (pl.cdiv(S, TOKENS),), out, interpret, (x_ND, row_S))


@functools.partial(jax.jit, static_argnums=0)
def scatter_rows(interpret: bool, into_ND, rows_SD, row_S):
    """Return `into`, in whose memory these rows are replaced; rows that it lacks are left out."""
    (N, D), S = into_ND.shape, len(row_S)

    def kernel(_, rows_ref, row_ref, out_ref):
        token_R, inside_R = _tokens(S)
        row_R = plgpu.load(row_ref.at[token_R], mask=inside_R, other=-1)
        exists_R = (row_R >= 0) & (row_R < N)
        row_R = jnp.where(exists_R, row_R, N)  # the interpreter takes -1 for the last row
        for part in parts_of_row(D):
            at_W = _part(part)[None]
            x_RW = plgpu.load(rows_ref.at[token_R[:, None], at_W], mask=inside_R[:, None], other=0)
            plgpu.store(out_ref.at[row_R[:, None], at_W], x_RW, mask=exists_R[:, None])

    out, grid = jax.ShapeDtypeStruct((N, D), into_ND.dtype), (pl.cdiv(S, TOKENS),)
    given = into_ND, rows_SD, row_S
    return _call(kernel, "moe_scatter_rows", grid, out, interpret, given, aliases={0: 0})


@functools.partial(jax.jit, static_argnums=0)
def row_ids(interpret: bool, expert_bC, counts_bE):
    """Return each copy's row. counts: of each expert's copies in each block of C."""
    (blocks, C), E = expert_bC.shape, counts_bE.shape[1]
    width, height = max(8, pl.next_power_of_2(E)), pl.next_power_of_2(blocks)

    def kernel(expert_ref, counts_ref, row_ref):
        block = pl.program_id(0)
        each_E, block_b = jnp.arange(width), jnp.arange(height)
        inside_bE = (block_b < blocks)[:, None] & (each_E < E)[None]
        index = block_b[:, None], each_E[None]
        count_bE = plgpu.load(counts_ref.at[index], mask=inside_bE, other=0)
        total_E = count_bE.sum(0)
        earlier_E = jnp.where((block_b < block)[:, None], count_bE, 0).sum(0)
        first_E = jnp.cumsum(total_E) - total_E + earlier_E
        expert_C = plgpu.load(expert_ref.at[block, jnp.arange(C)])
        one_CE = (expert_C[:, None] == each_E[None]).astype(jnp.int32)
        row_CE = first_E[None] + jnp.cumsum(one_CE, axis=0) - 1
        row_C = jnp.where(one_CE == 1, row_CE, 0).sum(1)
        plgpu.store(row_ref.at[block, jnp.arange(C)], row_C)

    out = jax.ShapeDtypeStruct((blocks, C), jnp.int32)
    return _call(kernel, "moe_row_ids", (blocks,), out, interpret, (expert_bC, counts_bE))
