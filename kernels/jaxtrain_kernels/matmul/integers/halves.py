"""Weights of the even and the odd inputs in bytes of 4-bit codes, and sums of a group's inputs."""

import jax.numpy as jnp


def scaled_halves(codes_HN, scales_GN, dtype):
    """Dequantized weights of the even and the odd inputs, [G, H / G, N] each, rounded to dtype."""
    codes = codes_HN.reshape(scales_GN.shape[0], -1, codes_HN.shape[1])
    scales = scales_GN[:, None].astype(jnp.float32)
    halves = codes & 15, codes >> 4
    return tuple(((half.astype(jnp.float32) - 8) * scales).astype(dtype) for half in halves)


def group_sums(x_MK, groups):
    """Sum of each group's inputs, float32 [M, G]."""
    return x_MK.astype(jnp.float32).reshape(len(x_MK), groups, -1).sum(-1)
