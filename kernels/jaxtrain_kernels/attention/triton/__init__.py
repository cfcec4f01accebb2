"""FlashAttention-2 (arXiv:2307.08691) in Triton, through jax-triton: Ampere and newer.

Its kernels are in `kernels.py`, imported by the first call: this module needs no Triton.
The backward is two kernels, dQ and dK/dV, so every result is bitwise repeatable.
"""

import importlib.metadata
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain_kernels.attention.call import Call, kept
from jaxtrain_kernels.dispatch import Target, target
from jaxtrain_kernels.shapes import AttentionShape

INSTALL = "pip install jax-triton==0.3.1 triton==3.6.0"


class TritonTile(NamedTuple):
    """A kernel's tile: rows (queries) x columns (keys), its warps and software pipeline stages."""

    rows: int
    columns: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    forward: TritonTile
    dq: TritonTile
    dkv: TritonTile


# Tiles by chip and padded head dim: they fit and hardly spill registers, but were not tuned.
# "small": 99 KiB of shared memory (GeForce, RTX, L40); A100 has 163 KiB, Hopper 227 KiB.
TILES = {
    ("hopper", 64): Tiles(
        TritonTile(128, 128, 8, 3), TritonTile(128, 64, 8, 3), TritonTile(64, 128, 8, 2)
    ),
    ("hopper", 128): Tiles(
        TritonTile(128, 128, 8, 2), TritonTile(128, 64, 8, 2), TritonTile(64, 128, 8, 2)
    ),
    ("hopper", 256): Tiles(
        TritonTile(128, 64, 8, 2), TritonTile(64, 32, 8, 2), TritonTile(16, 64, 8, 2)
    ),
    ("ampere", 64): Tiles(
        TritonTile(128, 64, 4, 3), TritonTile(64, 64, 4, 3), TritonTile(64, 128, 8, 3)
    ),
    ("ampere", 128): Tiles(
        TritonTile(128, 64, 8, 3), TritonTile(64, 64, 4, 2), TritonTile(64, 64, 8, 2)
    ),
    ("ampere", 256): Tiles(
        TritonTile(64, 64, 8, 2), TritonTile(64, 32, 8, 2), TritonTile(32, 64, 8, 2)
    ),
    ("small", 64): Tiles(
        TritonTile(128, 64, 4, 3), TritonTile(64, 64, 4, 3), TritonTile(64, 64, 4, 3)
    ),
    ("small", 128): Tiles(
        TritonTile(64, 64, 4, 3), TritonTile(64, 64, 4, 2), TritonTile(64, 64, 8, 2)
    ),
    ("small", 256): Tiles(
        TritonTile(64, 32, 4, 2), TritonTile(32, 32, 4, 1), TritonTile(32, 32, 4, 1)
    ),
}


# Other tiles that fit a Hopper GPU with few register spills, to be measured.
ALTERNATIVES = {
    64: {
        "forward": [(128, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 3), (128, 128, 8, 2)],
        "dq": [(64, 64, 4, 3), (128, 32, 4, 3), (128, 128, 8, 2)],
        "dkv": [(64, 128, 8, 3), (32, 64, 4, 3), (64, 64, 4, 3)],
    },
    128: {
        "forward": [(128, 64, 8, 3), (64, 64, 4, 3), (64, 128, 4, 2), (128, 64, 8, 2)],
        "dq": [(64, 64, 4, 2), (128, 32, 8, 3), (64, 32, 4, 3)],
        "dkv": [(64, 64, 8, 2), (32, 128, 8, 3), (32, 64, 4, 3), (32, 128, 8, 2)],
    },
    256: {
        "forward": [(64, 64, 8, 2), (128, 32, 8, 3), (128, 32, 8, 2)],
        "dq": [(128, 32, 8, 2), (64, 64, 8, 2), (32, 32, 4, 1)],
        "dkv": [(32, 64, 8, 2), (32, 32, 4, 1)],
    },
}


class TritonPlan(NamedTuple):
    """Compile-time constants of one call's kernels; HP: head dim padded to a power of two.

    A score is `x * factor` in base 2, where x is q k^T or, with a softcap, its
    tanh = 1 - 2 / (1 + 2^(q k^T tanh_factor)).
    """

    causal: bool
    window: int | None
    segments: bool
    softcap: float | None
    scale: float
    N: int
    K: int
    G: int
    H: int
    HP: int
    factor: float
    tanh_factor: float


def supports(target: Target, q_BTNH, call: Call) -> str | None:
    H, cc = q_BTNH.shape[-1], target.compute_capability
    if target.platform != "cuda":
        return f"needs an NVIDIA GPU, this is {target.platform}"
    if cc is None or cc < (8, 0):
        return f"needs compute capability 8.0 (Ampere), this is {cc}"
    if q_BTNH.dtype not in (jnp.bfloat16, jnp.float16):
        return f"needs bfloat16 or float16, got {q_BTNH.dtype}"
    if H % 8 or H > 256:
        return f"needs a head dim that is a multiple of 8, at most 256, got {H}"
    try:
        version = importlib.metadata.version("jax-triton")
    except importlib.metadata.PackageNotFoundError:
        return f"needs jax-triton 0.3: {INSTALL}"
    if not version.startswith("0.3."):
        return f"needs jax-triton 0.3, this is {version}: {INSTALL}"
    if call.key_segment_ids_BS is not None:
        return "takes one array of segment ids for queries and keys"
    return None


def candidates(shape: AttentionShape) -> list[dict[str, Any]]:
    """Tilings worth measuring on a Hopper: each replaces one kernel's default tile."""
    by_kernel = ALTERNATIVES[max(64, _padded(shape.H))]
    return [{name: list(tile)} for name, tiles in by_kernel.items() for tile in tiles]


def attention(q_BTNH, k_BSKH, v_BSKH, call: Call):
    """Backend of the public function; returns (out_BTNH, lse_BNT).

    Does not work under jax.vmap; under jax.shard_map only with check_vma=False.
    deterministic: always so, every result is bitwise repeatable.
    tiling: a `TritonTile` for any of "forward", "dq" and "dkv"; the others keep the default.
    """
    plan = _plan(q_BTNH, k_BSKH, call)
    return _flash(plan, q_BTNH, k_BSKH, v_BSKH, _int32(call.segment_ids_BT))


def gradients(q_BTNH, k_BSKH, v_BSKH, out_BTNH, lse_BNT, dout_BTNH, call: Call):
    """Backend of the public `attention_gradients`."""
    plan = _plan(q_BTNH, k_BSKH, call)
    residuals = q_BTNH, k_BSKH, v_BSKH, _int32(call.segment_ids_BT), out_BTNH, lse_BNT
    return _flash_bwd(plan, residuals, (dout_BTNH, jnp.zeros_like(lse_BNT)))[:3]


def _int32(ids_BT) -> Any:
    return None if ids_BT is None else ids_BT.astype(jnp.int32)


def _plan(q_BTNH, k_BSKH, call: Call) -> Any:
    """Return the plan, the tiles and the compute capability."""
    N, H = q_BTNH.shape[2:]
    K = k_BSKH.shape[2]
    capability = target().compute_capability or (9, 0)
    HP = _padded(H)
    tiles = TILES[chip(capability), max(64, HP)]
    tiles = tiles._replace(
        **{name: TritonTile(*tile) for name, tile in (call.tiling or {}).items()}
    )
    scale, softcap, segments = call.scale, call.softcap, call.segment_ids_BT is not None
    log2e = math.log2(math.e)
    factor = (scale if softcap is None else softcap) * log2e
    tanh_factor = 0.0 if softcap is None else 2 * log2e * scale / softcap
    same = call.causal, call.window, segments, softcap, scale
    plan = TritonPlan(*same, N, K, N // K, H, HP, factor, tanh_factor)
    return plan, tiles, capability


def _padded(H: int) -> int:
    return max(16, 2 ** math.ceil(math.log2(H)))


def chip(compute_capability: tuple[int, int]) -> str:
    """Chip name in TILES, by the GPU's shared memory and tensor cores."""
    if compute_capability == (8, 0):
        return "ampere"
    return "hopper" if compute_capability in ((9, 0), (10, 0), (10, 3)) else "small"


def _flash_primal(setup, q_BTNH, k_BSKH, v_BSKH, ids_BT) -> tuple[jax.Array, jax.Array]:
    B, T, N, _ = q_BTNH.shape
    lse_BNT = jax.ShapeDtypeStruct((B, N, T), jnp.float32)
    arrays, outputs = (q_BTNH, k_BSKH, v_BSKH), (q_BTNH, lse_BNT)
    out_BTNH, lse_BNT = _call("forward", setup, setup[1].forward, arrays, ids_BT, outputs)
    return out_BTNH, lse_BNT


_flash = jax.custom_vjp(_flash_primal, nondiff_argnums=(0,))


def _flash_fwd(setup, q_BTNH, k_BSKH, v_BSKH, ids_BT):
    out_BTNH, lse_BNT = kept(*_flash_primal(setup, q_BTNH, k_BSKH, v_BSKH, ids_BT))
    return (out_BTNH, lse_BNT), (q_BTNH, k_BSKH, v_BSKH, ids_BT, out_BTNH, lse_BNT)


def _flash_bwd(setup, residuals, cotangents):
    q, k, v, ids_BT, out_BTNH, lse_BNT = residuals
    dout_BTNH, dlse_BNT = cotangents
    delta_BTN = jnp.sum(out_BTNH.astype(jnp.float32) * dout_BTNH.astype(jnp.float32), -1)
    delta_BNT = delta_BTN.transpose(0, 2, 1) - dlse_BNT
    # For a query without keys, any finite value: its scores are all -inf.
    lse_BNT = jnp.where(lse_BNT == -jnp.inf, 0, lse_BNT) * math.log2(math.e)
    arrays = q, k, v, dout_BTNH, lse_BNT, delta_BNT
    (dq,) = _call("backward_dq", setup, setup[1].dq, arrays, ids_BT, (q,))
    dk, dv = _call("backward_dkv", setup, setup[1].dkv, arrays, ids_BT, (k, v), by_key=True)
    return dq, dk, dv, None


_flash.defvjp(_flash_fwd, _flash_bwd)


def _call(name, setup, tile, arrays, ids_BT, outputs, by_key=False):
    """Run a kernel with one program per query block (by_key: key block), head and batch row."""
    import jax_triton

    from jaxtrain_kernels.attention.triton import kernels

    plan, _, (major, minor) = setup
    B, T = arrays[0].shape[:2]
    ranges = block_ranges(plan, T, tile.rows, tile.columns, ids_BT, by_key)
    lo, full_lo, full_hi, hi = (ranges[..., i] for i in range(4))
    known = isinstance(ranges, np.ndarray)
    ranges = jnp.asarray(ranges)
    return jax_triton.triton_call(
        *arrays,
        ranges if ids_BT is None else ids_BT,
        ranges,
        T,
        kernel=getattr(kernels, name),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs],
        grid=(ranges.shape[1], plan.K if by_key else plan.N, B),
        name=f"attention_{name}",
        num_warps=tile.warps,
        num_stages=tile.stages,
        compute_capability=10 * major + minor,
        R=tile.rows,
        C=tile.columns,
        LEFT=not known or bool((lo < full_lo).any()),
        RIGHT=not known or bool((full_hi < hi).any()),
        P=plan,
    )


def block_ranges(
    plan, T: int, rows: int, columns: int, ids_BT, by_key: bool
) -> np.ndarray | jax.Array:
    """Key blocks that each query block visits, int32 [B or 1, query blocks, 4] (by_key: reversed).

    (lo, full_lo, full_hi, hi): all visible blocks are in [lo, hi); [full_lo, full_hi) are entirely
    visible. Without ids a numpy array. With ids, blocks are skipped if the ranges of their ids do
    not overlap: always correct, and exact where ids increase along the sequence.
    """
    xp: Any = np if ids_BT is None else jnp
    some, full = _block_pairs(plan, T, rows, columns, by_key)
    if ids_BT is not None:
        may_share, same = _block_ids(ids_BT, rows, columns)
        some, full = some & may_share, full & same
    if by_key:
        some, full = some.swapaxes(1, 2), full.swapaxes(1, 2)
    j = np.arange(some.shape[2])[None, None]
    hi = xp.where(some, j + 1, 0).max(-1)
    lo = xp.minimum(hi, xp.where(some, j, len(j[0, 0])).min(-1))
    # Keep only the last run of full blocks.
    full_hi = xp.where(full, j + 1, 0).max(-1)
    full_lo = xp.where(~full & (j < full_hi[..., None]), j + 1, 0).max(-1)
    full_lo, full_hi = xp.clip(full_lo, lo, hi), xp.clip(full_hi, lo, hi)
    return xp.stack([lo, full_lo, full_hi, hi], -1).astype(np.int32)


def _block_pairs(plan, T, rows, columns, by_key):
    """Two bool [1, query blocks, key blocks], by position: sees some of it; sees all of it.

    A full block is loaded without a bounds check, so a block that reaches beyond T is not full.
    """
    t, s = (np.arange(0, T, size) for size in (rows, columns))
    t_last, s_last = (np.minimum(x + n, T)[None] - 1 for x, n in ((t, rows), (s, columns)))
    t, s, t_last, s_last = t[None, :, None], s[None, None], t_last[..., None], s_last[None]
    full = t + rows <= T if by_key else s + columns <= T
    some = np.ones((1, t.shape[1], s.shape[2]), bool)
    full = full & some
    if plan.causal:
        some, full = some & (s <= t_last), full & (s_last <= t)
    if plan.window is not None:
        some, full = some & (s_last >= t - plan.window), full & (s >= t_last - plan.window)
    return some, full


def _block_ids(ids_BT, rows, columns):
    """Two bool [B, query blocks, key blocks]: may share an id; all ids of both are equal."""

    def bounds(size):
        blocks = jnp.pad(ids_BT, ((0, 0), (0, -ids_BT.shape[1] % size)))
        blocks = blocks.reshape(len(ids_BT), -1, size)
        smallest = jnp.where(blocks > 0, blocks, jnp.iinfo(jnp.int32).max).min(-1)
        return smallest, blocks.max(-1), blocks.min(-1)

    t_lo, t_hi, t_all = (x[:, :, None] for x in bounds(rows))
    s_lo, s_hi, s_all = (x[:, None] for x in bounds(columns))
    # `*_all` is the minimum with padding: it equals the maximum only in a block of one id.
    same = (t_all == t_hi) & (s_all == s_hi) & (t_hi == s_hi) & (t_hi > 0)
    return (t_lo <= s_hi) & (s_lo <= t_hi), same
