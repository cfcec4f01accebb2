"""Benchmark of chained matmuls with int8 and int4 weights, as in the layers of a decode step.

A chain includes launch overhead and CUDA graphs, which a single matmul does not show. `joined` rows
are the products of an engine's layers: queries, keys and values are one, gate and up are one, and
norms, activations and residuals are in their kernels. `streamed` rows are the same products with
one kernel for those between two attentions.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtrain_kernels.dispatch import target
from jaxtrain_kernels.matmul.few_rows import InputNorm, Operations
from jaxtrain_kernels.matmul.integers import (
    joined_integer_matmul,
    serves_fragments,
    to_fragments,
)
from jaxtrain_kernels.matmul.streamed import (
    StreamedMatrix,
    hopper,
    streamed_products,
    to_stream,
)

from benchmarks.decode import bandwidth
from benchmarks.integers import BACKENDS, OPS, Product, ordered, product, stack
from benchmarks.kernels import Kernel, Row
from benchmarks.timing import ceilings
from jaxtrain.estimate.workload import SHORT


class Chain(NamedTuple):
    """M rows through layers of four matrices each: D x D twice, D x F, F x D.

    kv: columns of keys. activation: of the network, whose gate and up have F columns each.
    """

    name: str
    M: int
    layers: int
    D: int
    F: int
    kv: int
    activation: str


CHAINS = tuple(
    Chain(f"chain_m{M}_{model}", M, layers, D, F, kv, activation)
    for model, layers, D, F, kv, activation in (
        ("llama_8b", 32, 4096, 14336, 1024, "swiglu"), ("gpt_d12", 12, 768, 3072, 768, "relu2"),
        ("gpt_d24", 24, 1536, 6144, 1536, "relu2"),
    )
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
        if form in OPS and "fragments" in backends:
            yield from joined_rows(s, form, dtype, copy_gbps)
            yield from streamed_rows(s, form, dtype, copy_gbps)


def joined_rows(s: Chain, form: str, dtype: Any, copy_gbps: float) -> Iterator[Row]:
    """The row of a layer's four products as the engine runs them, if it does."""
    x_MD, gain_D, layers = joined_inputs(s, form, dtype)
    if not serves_fragments(form, s.M, dtype, *layers[0][0]):
        return
    size = sum(array.nbytes for array in jax.tree.leaves(layers))
    inputs = [(x_MD, gain_D, *jax.tree.leaves(layers))]
    figures = bandwidth(joined_chain(s, form), inputs, size, copy_gbps)
    row = {"name": f"{form}, joined", "shape": s.name, "backend": "fragments"}
    yield row | figures | {"floor_ms": size / copy_gbps / 1e6}


def streamed_rows(s: Chain, form: str, dtype: Any, copy_gbps: float) -> Iterator[Row]:
    """The row of the same products, with one kernel between two attentions, if there is one."""
    if s.activation != "swiglu":
        return
    x_MD, gain_D, layers = jax.eval_shape(lambda: streamed_inputs(s, form, dtype))
    phases = [m.phase for m in streamed_matrices(s, gain_D, layers[0])]
    if hopper.supports(target(), x_MD, phases) is not None:
        return
    x_MD, gain_D, layers = streamed_inputs(s, form, dtype)
    size = sum(array.nbytes for array in jax.tree.leaves(layers))
    figures = bandwidth(streamed_chain(s, form), [(x_MD, gain_D, layers)], size, copy_gbps)
    row = {"name": f"{form}, streamed", "shape": s.name, "backend": "hopper"}
    yield row | figures | {"floor_ms": size / copy_gbps / 1e6}


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


def joined_chain(s: Chain, form: str) -> Kernel:
    """A function of x, a gain of all norms, and codes and scales of each product -> the stream.
    There is no attention: the output's matrix reads the queries."""

    def run(x_MD: jax.Array, gain_D: jax.Array, *arrays: jax.Array) -> jax.Array:
        norm = InputNorm(1e-5, gain_D)
        matrices = zip(arrays[::2], arrays[1::2], strict=True)
        for qkv, out, up, down in itertools.batched(matrices, 4):
            sizes = s.D, s.kv, s.kv
            q_MD, _, _ = joined_integer_matmul(form, x_MD, *qkv, sizes, operations=Operations(norm))
            x_MD = OPS[form](q_MD, *out, operations=Operations(residual_MN=x_MD))
            h_MF = OPS[form](x_MD, *up, operations=Operations(norm, None, s.activation))
            x_MD = OPS[form](h_MF, *down, operations=Operations(residual_MN=x_MD))
        return x_MD

    return run


def streamed_chain(s: Chain, form: str) -> Kernel:
    """As `joined_chain`. The first layer's queries have a kernel of their own."""

    def run(x_MD: jax.Array, gain_D: jax.Array, arrays: list[Any]) -> jax.Array:
        layers = [streamed_matrices(s, gain_D, four) for four in arrays]
        q_MD, *_ = streamed_products(form, x_MD, x_MD, layers[0][:1])
        for layer, following in itertools.pairwise([*layers, []]):
            given = [*layer[1:], *following[:1]]
            _, _, x_MD, *last = streamed_products(form, q_MD, x_MD, given)
            q_MD = last[0] if last else q_MD
        return x_MD

    return run


def streamed_matrices(s: Chain, gain_D: Any, arrays: Iterable[Any]) -> list[StreamedMatrix]:
    """A layer's matrices: queries with keys and values, output, gate with up, down."""
    norm = InputNorm(1e-5, gain_D)
    qkv, out, up, down = arrays
    return [
        StreamedMatrix(s.D, qkv[0], qkv[1], norm, parts=(s.D, s.kv, s.kv)),
        StreamedMatrix(s.D, out[0], out[1], residual=True),
        StreamedMatrix(s.D, up[0], up[1], norm, "swiglu"),
        StreamedMatrix(s.F, down[0], down[1], residual=True),
    ]  # fmt: skip


def joined_inputs(s: Chain, form: str, dtype: Any) -> tuple[Any, Any, list[Any]]:
    """x, the gain of all norms, and the (codes, scales) of each layer's four products."""
    return layer_inputs(s, form, dtype, lambda codes, scales: (to_fragments(codes), scales))


def streamed_inputs(s: Chain, form: str, dtype: Any) -> tuple[Any, Any, list[Any]]:
    """As `joined_inputs`, in the order of `to_stream`; int4's scales are with its codes."""

    def arranged(codes: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        return to_stream(form, codes, scales), scales if form == "int8" else None

    return layer_inputs(s, form, dtype, arranged)


def layer_inputs(
    s: Chain, form: str, dtype: Any, arrange: Callable[[jax.Array, jax.Array], tuple[Any, Any]]
) -> tuple[Any, Any, list[Any]]:
    up = s.F * (2 if s.activation == "swiglu" else 1)
    shapes = ((s.D, s.D + 2 * s.kv), (s.D, s.D), (s.D, up), (s.F, s.D))
    keys = jax.random.split(jax.random.key(0), s.layers)
    one = lambda K, N, key: stack(Product(s.name, s.M, K, N), form, 1, dtype, key)

    def layer(key: jax.Array) -> list[tuple[jax.Array, jax.Array | None]]:
        return [arrange(*(array[0] for array in one(*shape, key)[1:])) for shape in shapes]

    x_MD = jax.random.normal(keys[0], (s.M, s.D), dtype)
    return x_MD, jnp.ones(s.D, dtype), [jax.jit(layer)(key) for key in keys]


def small_chain(s: Chain) -> Chain:
    return s._replace(name=f"{s.name}_small", layers=2, D=256, F=512, kv=128)
