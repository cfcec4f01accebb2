"""Kernels of `moe_router.triton`: a program has some tokens, backward some of their columns."""

import functools
from math import gcd

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxtrain_kernels.moe_router.triton import TOKENS

COLUMNS = 64  # of a step of the forward pass
WARPS = 4
BACK_TOKENS = 32
BACK_COLUMNS = 256  # of a program, where they divide the width
BACK_STEPS = 16  # of a program that sums the router's gradient
BACK_WARPS = 8
BACK_STAGES = 3  # of that program: loads of two steps are in flight while one is multiplied


def _call(kernel, name: str, grid, out_shape, interpret: bool, arrays, warps=WARPS, stages=1):
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name=name,
    )(*arrays)


def _parts(x, count: int) -> list[jax.Array]:
    """Bfloat16 parts whose sum is float32 x up to 2^-8 of the last."""
    parts = []
    for _ in range(count):
        parts.append(x.astype(jnp.bfloat16))
        x = x - parts[-1].astype(jnp.float32)
    return parts


def _padded_pieces(router_DE):
    """`_parts` of the router for XLA, [3, D, E], with columns of zeros for experts that are none.

    Each program would make them again. XLA drops casts there and back; it keeps reduce_precision.
    """
    E = router_DE.shape[1]
    left_DE = jnp.pad(router_DE, ((0, 0), (0, len(_experts(E)[0]) - E)))
    pieces = []
    for _ in range(3):
        pieces.append(jax.lax.reduce_precision(left_DE, exponent_bits=8, mantissa_bits=7))
        left_DE = left_DE - pieces[-1]
    return jnp.stack(pieces).astype(jnp.bfloat16)


def _dot(a, b):
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _experts(E: int):
    """Numbers of the experts, padded for a matrix instruction, and which of them there are."""
    each_E = jnp.arange(max(16, pl.next_power_of_2(E)))
    return each_E, each_E < E


def _back_columns(D: int) -> int:
    return min(BACK_COLUMNS, D & -D)


def _back_program(D: int):
    """Number of a program's tokens, and its columns; those of the same tokens run side by side."""
    width, program = _back_columns(D), pl.program_id(0)
    at_W = jax.lax.rem(program, D // width) * width + jnp.arange(width)
    return jax.lax.div(program, D // width), at_W


def _logsumexp(logits_RE, there_E):
    logits_RE = jnp.where(there_E[None], logits_RE, -jnp.inf)
    most_R = logits_RE.max(1)
    return most_R + jnp.log(jnp.exp(logits_RE - most_R[:, None]).sum(1))


def _scores(score_function: str, logits_RE, lse_R, there_E):
    """Scores, 0 for experts that are not there."""
    if score_function == "sigmoid":
        scores_RE = 1 / (1 + jnp.exp(-logits_RE))
    else:
        scores_RE = jnp.exp(logits_RE - lse_R[:, None])
    return jnp.where(there_E[None], scores_RE, 0.0)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def route(top_k: int, score_function: str, interpret: bool, x_ND, router_DE, bias_E):
    """Return logits [N, E], chosen and weights [N, k], hits and shares [n, E] and z [n]."""
    (N, D), E = x_ND.shape, router_DE.shape[1]

    def kernel(x_ref, pieces_ref, bias_ref, logits_ref, *refs):
        chosen_ref, weights_ref, hits_ref, shares_ref, z_ref = refs
        part, (each_E, there_E) = pl.program_id(0), _experts(E)
        token_R = part * TOKENS + jnp.arange(TOKENS)

        def step(i, logits_RE):
            at_W = i * COLUMNS + jnp.arange(COLUMNS)
            x_RW = plgpu.load(x_ref.at[token_R[:, None], at_W[None]])
            for n in range(3):
                piece_WE = plgpu.load(pieces_ref.at[n, at_W[:, None], each_E[None]])
                logits_RE += _dot(x_RW, piece_WE)
            return logits_RE

        start_RE = jnp.zeros((TOKENS, len(each_E)), jnp.float32)
        logits_RE = jax.lax.fori_loop(0, D // COLUMNS, step, start_RE)
        at = token_R[:, None], each_E[None]
        plgpu.store(logits_ref.at[at], logits_RE, mask=there_E[None])
        lse_R = _logsumexp(logits_RE, there_E)
        scores_RE = _scores(score_function, logits_RE, lse_R, there_E)
        bias_E = plgpu.load(bias_ref.at[each_E], mask=there_E, other=0.0)
        ranked_RE = jnp.where(there_E[None], scores_RE + bias_E[None], -jnp.inf)
        picks, hits_RE = [], jnp.zeros(scores_RE.shape, jnp.float32)
        for j in range(top_k):
            best_RE = ranked_RE == ranked_RE.max(1)[:, None]
            # The last expert where no value is the largest, as among NaN.
            chosen_R = jnp.where(best_RE, each_E[None], E - 1).min(1)
            plgpu.store(chosen_ref.at[token_R, j], chosen_R)
            hit_RE = chosen_R[:, None] == each_E[None]
            ranked_RE = jnp.where(hit_RE, -jnp.inf, ranked_RE)
            picks.append(jnp.where(hit_RE, scores_RE, 0.0).sum(1))
            hits_RE += hit_RE.astype(jnp.float32)
        for j, picked_R in enumerate(picks):
            plgpu.store(weights_ref.at[token_R, j], picked_R / sum(picks))
        shares_RE = scores_RE / scores_RE.sum(1)[:, None]
        plgpu.store(hits_ref.at[part, each_E], hits_RE.sum(0), mask=there_E)
        plgpu.store(shares_ref.at[part, each_E], shares_RE.sum(0), mask=there_E)
        plgpu.store(z_ref.at[part], (lse_R * lse_R).sum(0))

    parts = N // TOKENS
    shapes = (N, E), (N, top_k), (N, top_k), (parts, E), (parts, E), (parts,)
    dtypes = jnp.float32, jnp.int32, *[jnp.float32] * 4
    out = [jax.ShapeDtypeStruct(*each) for each in zip(shapes, dtypes)]
    given = x_ND, _padded_pieces(router_DE), bias_E
    return _call(kernel, "moe_route", (parts,), out, interpret, given)


@functools.partial(jax.jit, static_argnums=(0, 1))
def logits_gradient(score_function: str, interpret: bool, *arrays):
    """Return the gradient of the logits [N, E].

    arrays: logits, chosen; the gradients of weights [N, k], shares [n, E] and z [n]. Or the weights
    are in rows [N k, 1], and each copy's row [N, k] is the last array.
    """
    (N, E), k = arrays[0].shape, arrays[1].shape[1]

    def kernel(logits_ref, chosen_ref, dweights_ref, dshares_ref, dz_ref, *refs):
        *row_ref, out_ref = refs

        def dweight(j):
            if not row_ref:
                return plgpu.load(dweights_ref.at[token_R, j])
            return plgpu.load(dweights_ref.at[plgpu.load(row_ref[0].at[token_R, j]), 0])

        part, (each_E, there_E) = pl.program_id(0), _experts(E)
        token_R = part * TOKENS + jnp.arange(TOKENS)
        at = token_R[:, None], each_E[None]
        logits_RE = plgpu.load(logits_ref.at[at], mask=there_E[None], other=0.0)
        lse_R = _logsumexp(logits_RE, there_E)
        scores_RE = _scores(score_function, logits_RE, lse_R, there_E)
        dweights = [dweight(j) for j in range(k)]
        chosen = [plgpu.load(chosen_ref.at[token_R, j]) for j in range(k)]
        hits = [chosen_R[:, None] == each_E[None] for chosen_R in chosen]
        picks = [jnp.where(hit_RE, scores_RE, 0.0).sum(1) for hit_RE in hits]
        total_R = sum(picks)
        mean_R = sum(d_R * picked_R for d_R, picked_R in zip(dweights, picks)) / total_R
        dshares_E = plgpu.load(dshares_ref.at[part, each_E], mask=there_E, other=0.0)
        sum_R = scores_RE.sum(1)
        inner_R = (dshares_E[None] * scores_RE).sum(1) / sum_R
        dscores_RE = (dshares_E[None] - inner_R[:, None]) / sum_R[:, None]
        for hit_RE, d_R in zip(hits, dweights):
            dscores_RE += jnp.where(hit_RE, ((d_R - mean_R) / total_R)[:, None], 0.0)
        if score_function == "sigmoid":
            dlogits_RE = dscores_RE * scores_RE * (1 - scores_RE)
        else:
            # The mean of dscores is 0, as no result changes when all scores are scaled.
            dlogits_RE = dscores_RE * scores_RE
        softmax_RE = _scores("softmax", logits_RE, lse_R, there_E)
        dlogits_RE += (2 * lse_R * dz_ref[part])[:, None] * softmax_RE
        plgpu.store(out_ref.at[at], dlogits_RE, mask=there_E[None])

    out = jax.ShapeDtypeStruct((N, E), jnp.float32)
    return _call(kernel, "moe_logits_gradient", (N // TOKENS,), out, interpret, arrays)


@functools.partial(jax.jit, static_argnums=0)
def token_gradient(interpret: bool, router_DE, dlogits_NE, dx_ND):
    """Return dx + dlogits router^T."""
    (N, D), E = dx_ND.shape, router_DE.shape[1]

    def kernel(router_ref, dlogits_ref, dx_ref, out_ref):
        each_E, there_E = _experts(E)
        block, at_W = _back_program(D)
        token_R = block * BACK_TOKENS + jnp.arange(BACK_TOKENS)
        at = token_R[:, None], at_W[None]
        dx_RW = plgpu.load(dx_ref.at[at])
        router_EW = plgpu.load(
            router_ref.at[at_W[None], each_E[:, None]], mask=there_E[:, None], other=0.0
        )
        dlogits_RE = plgpu.load(
            dlogits_ref.at[token_R[:, None], each_E[None]], mask=there_E[None], other=0.0
        )
        (high_EW, low_EW), (high_RE, low_RE) = _parts(router_EW, 2), _parts(dlogits_RE, 2)
        # 16 bits of a sum that is rounded to 8.
        product_RW = _dot(high_RE, high_EW) + _dot(high_RE, low_EW) + _dot(low_RE, high_EW)
        sum_RW = dx_RW.astype(jnp.float32) + product_RW
        plgpu.store(out_ref.at[at], sum_RW.astype(out_ref.dtype))

    grid, given = (N // BACK_TOKENS * (D // _back_columns(D)),), (router_DE, dlogits_NE, dx_ND)
    out = jax.ShapeDtypeStruct((N, D), dx_ND.dtype)
    return _call(kernel, "moe_token_gradient", grid, out, interpret, given, BACK_WARPS)


@functools.partial(jax.jit, static_argnums=0)
def router_gradient(interpret: bool, x_ND, dlogits_NE):
    """Return x^T dlogits: each program sums some tokens, and XLA the programs' sums."""
    (N, D), E = x_ND.shape, dlogits_NE.shape[1]
    steps = gcd(N // BACK_TOKENS, BACK_STEPS)

    def kernel(x_ref, dlogits_ref, out_ref):
        (run, at_W), (each_E, there_E) = _back_program(D), _experts(E)

        def step(i, sum_EW):
            token_R = (run * steps + i) * BACK_TOKENS + jnp.arange(BACK_TOKENS)
            x_RW = plgpu.load(x_ref.at[token_R[:, None], at_W[None]])
            dlogits_RE = plgpu.load(
                dlogits_ref.at[token_R[:, None], each_E[None]], mask=there_E[None], other=0.0
            )
            for piece_RE in _parts(dlogits_RE, 3):
                sum_EW += _dot(piece_RE.T, x_RW)
            return sum_EW

        start_EW = jnp.zeros((len(each_E), len(at_W)), jnp.float32)
        sum_EW = jax.lax.fori_loop(0, steps, step, start_EW)
        plgpu.store(out_ref.at[run, each_E[:, None], at_W[None]], sum_EW, mask=there_E[:, None])

    runs = N // (BACK_TOKENS * steps)
    grid, out = (runs * (D // _back_columns(D)),), jax.ShapeDtypeStruct((runs, E, D), jnp.float32)
    given = x_ND, dlogits_NE
    sums_rED = _call(
        kernel, "moe_router_gradient", grid, out, interpret, given, BACK_WARPS, BACK_STAGES
    )
    return jnp.sum(sums_rED, axis=0).T
