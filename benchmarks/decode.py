"""Benchmark of decode attention against the rate of a copy: the floor is reading the cache once."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jaxtrain_kernels as kernels
from jaxtrain_kernels.attention.decode import BACKENDS
from jaxtrain_kernels.shapes import DECODE_BENCH, DecodeShape

from benchmarks.kernels import Kernel, Row, chosen, exact, growing, measured, sized
from benchmarks.timing import ceilings, relative_error, rotating
from jaxtrain.cluster.runtime import compute_dtype
from jaxtrain.estimate.workload import SHORT

NAMES = (*BACKENDS, "triton")
SPLITS = (None, 1, 4, 16)  # None: the default


def bench_decode(variant: str | None = None, names: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """GB/s of the bytes that must be read, with the KV cache in the compute dtype and in int8.

    The cache is full. names: shapes and implementations to measure; default all.
    """
    dtype = compute_dtype("auto")
    yield from growing("decode", dtype, variant, decode_rows(names, dtype))


def decode_rows(names: Sequence[str], dtype: Any) -> Iterator[Row]:
    copy_gbps = ceilings(dtype).copy_gbps
    shapes, wanted = chosen("decode", names, [s.name for s in DECODE_BENCH], NAMES)
    for shape in map(sized(small_decode), [s for s in DECODE_BENCH if s.name in shapes]):
        for int8 in (False, True):
            inputs = rotating(lambda key, s=shape, i=int8: decode_inputs(s, dtype, i, key))
            size = sum(x.nbytes for x in jax.tree.leaves(inputs[0]))
            for backend in [name for name in NAMES if name in wanted]:
                for splits in SPLITS:
                    row = {"name": f"decode_{'int8' if int8 else SHORT[dtype.name]}"}
                    row |= {"shape": shape.name, "backend": label(backend, splits)}
                    row |= bandwidth(decode(backend, splits), inputs, size, copy_gbps)
                    if row["ms"] is None and "failed" not in row:
                        continue  # the backend does not support it
                    if "failed" not in row:
                        row |= decode_error(shape, backend, splits, dtype, int8)
                    yield row
            del inputs


def label(backend: str, splits: int | None) -> str:
    return backend if splits is None else f"{backend}, splits {splits}"


def decode(backend: str, splits: int | None) -> Kernel:
    return lambda q, k, v, lengths: kernels.decode_attention(
        q, k, v, lengths, splits=splits, implementation=backend
    )


def bandwidth(fn: Kernel, inputs: Any, size: int, copy_gbps: float) -> dict[str, Any]:
    """ms, GB/s for `size` bytes, and its ratio to a copy's rate."""
    figures = measured(fn, inputs, 0.0) or {"ms": None}
    figures.pop("tflops", None)
    if figures["ms"]:
        figures["gbps"] = size / figures["ms"] / 1e6
        figures["of_copy"] = figures["gbps"] / copy_gbps
    return figures


def decode_inputs(s: DecodeShape, dtype: Any, int8: bool, key: jax.Array) -> tuple[Any, ...]:
    """q, the K cache, the V cache, lengths."""
    q_key, k_key, v_key = jax.random.split(key, 3)
    normal = lambda k, *shape: jax.random.normal(k, shape, dtype)
    caches = [normal(k, s.B, s.S, s.K, s.H) for k in (k_key, v_key)]
    if int8:
        caches = [jax.jit(kernels.quantize)(x) for x in caches]
    return normal(q_key, s.B, s.N, s.H), *caches, jnp.full((s.B,), s.S, jnp.int32)


def small_decode(s: DecodeShape) -> DecodeShape:
    return s._replace(name=f"{s.name}_small", B=2, S=256)


def decode_error(
    shape: DecodeShape, backend: str, splits: int | None, dtype: Any, int8: bool
) -> dict[str, float]:
    """Error against the float32 specification on the unquantized cache, and the specification's
    own error in `dtype`."""
    s = small_decode(shape)
    wide, naive = specified(s, dtype)
    inputs = decode_inputs(s, dtype, int8, jax.random.key(1))
    ours = relative_error(jax.jit(decode(backend, splits))(*inputs), wide)
    return {"error": ours, "naive_error": naive}


@functools.lru_cache(maxsize=1)
def specified(s: DecodeShape, dtype: Any) -> tuple[Any, float]:
    """The specification's result in float32, and its error when computed in `dtype`."""
    inputs = decode_inputs(s, dtype, False, jax.random.key(1))
    wide = exact(last_of_attention, inputs)
    return wide, relative_error(jax.jit(last_of_attention)(*inputs), wide)


def last_of_attention(q_BNH: Any, k_BSKH: Any, v_BSKH: Any, lengths_B: Any) -> Any:
    """The result for a full cache: the last query row of attention."""
    B, S = k_BSKH.shape[:2]
    q_BTNH = jnp.broadcast_to(q_BNH[:, None], (B, S, *q_BNH.shape[1:]))
    return kernels.attention(q_BTNH, k_BSKH, v_BSKH, implementation="reference")[:, -1]
