"""Benchmark of chained matmuls with int8 and int4 weights, as in the layers of a decode step.

A chain includes launch overhead and CUDA graphs, which a single matmul does not show.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from benchmarks.decode import bandwidth
from benchmarks.integers import BACKENDS, OPS, Product, ordered, product, stack
from benchmarks.kernels import Kernel, Row
from benchmarks.timing import ceilings
from jaxtrain.estimate.workload import SHORT


class Chain(NamedTuple):
    """M rows through layers of four matrices each: D x D twice, D x F, F x D."""

    name: str
    M: int
    layers: int
    D: int
    F: int


CHAINS = tuple(
    Chain(f"chain_m{M}_{model}", M, layers, D, F)
    for model, layers, D, F in (("llama_8b", 32, 4096, 14336), ("gpt_d12", 12, 768, 3072),
                                ("gpt_d24", 24, 1536, 6144))
    for M in (1, 8, 32)
)  # fmt: skip


def chain_rows(s: Chain, backends: set[str], dtype: Any) -> Iterator[Row]:
    """Rows with ms of all matmuls in one program, including launches.

    floor_ms: time to read all matrices at the rate of a copy.
    """
    copy_gbps = ceilings(dtype).copy_gbps
    for form in (SHORT[dtype.name], *OPS):
        x_MD, *arrays = chain_inputs(s, form, dtype)
        size = sum(array.nbytes for array in arrays)
        for backend in [b for b in BACKENDS if b in backends and (b == "plain") != (form in OPS)]:
            run = chained(s, product(form, backend), len(arrays) // 4)
            figures = bandwidth(run, [(x_MD, *ordered(arrays, backend))], size, copy_gbps)
            if figures["ms"] is None and "failed" not in figures:
                continue  # the backend does not support it
            row = {"name": form, "shape": s.name, "backend": backend}
            yield row | figures | {"floor_ms": size / copy_gbps / 1e6}
        del arrays


def chained(s: Chain, matmul: Kernel, each: int) -> Kernel:
    """A function of x and the arrays of the four stacks (`each` per stack) -> final output."""

    def run(x_MD: jax.Array, *arrays: jax.Array) -> jax.Array:
        for layer in range(s.layers):
            for i in range(0, len(arrays), each):
                x_MD = matmul(layer, x_MD, *arrays[i : i + each])
                x_MD = x_MD / (1 + abs(x_MD))
        return x_MD

    return run


def chain_inputs(s: Chain, form: str, dtype: Any) -> tuple[Any, ...]:
    """x, then the arrays of the four stacks."""
    shapes = ((s.D, s.D), (s.D, s.D), (s.D, s.F), (s.F, s.D))
    keys = jax.random.split(jax.random.key(0), len(shapes))
    stacks = [
        stack(Product(s.name, s.M, K, N), form, s.layers, dtype, key)
        for (K, N), key in zip(shapes, keys, strict=True)
    ]
    return stacks[0][0], *(array for _, *arrays in stacks for array in arrays)


def small_chain(s: Chain) -> Chain:
    return s._replace(name=f"{s.name}_small", layers=2, D=256, F=512)
