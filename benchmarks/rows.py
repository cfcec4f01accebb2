"""Benchmark of element-wise and norm ops on activations against the rate of a copy."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtrain_kernels import rows as kernels

from benchmarks.decode import bandwidth
from benchmarks.kernels import Row, chosen, error_of, growing, quack_rows, sized
from benchmarks.peers import QUACK
from benchmarks.timing import ceilings, rotating
from jaxtrain.cluster.runtime import compute_dtype

EPS = 1e-6


class RowsShape(NamedTuple):
    name: str
    B: int
    T: int
    D: int


SHAPES = (RowsShape("b32_t2048_d768", 32, 2048, 768), RowsShape("b16_t2048_d1536", 16, 2048, 1536))
HEAD_DIM = 128


class Case(NamedTuple):
    """An op. run: backend name -> function of `count` arguments. The last `fixed` arguments have no
    gradient. forward, both: number of [B, T, D] arrays that must be read or written.

    made, learned: the results and the gradients that are new arrays. The others (an argument passed
    through, a repeated gradient) would be copied if the program returned them.
    """

    arguments: Callable[[RowsShape, Any, jax.Array], tuple[Any, ...]]
    run: Callable[[str], Callable[..., Any]]
    count: int
    forward: int
    both: int
    fixed: int = 0
    made: slice = slice(None)
    learned: slice = slice(None)


def bench_rows(variant: str | None = None, names: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """GB/s of the bytes that must be read and written, for forward alone and with backward.

    names: shapes, backends and ops to measure; default all.
    """
    dtype = compute_dtype("auto")
    yield from growing("rows", dtype, variant, measured_rows(names, dtype))


def measured_rows(names: Sequence[str], dtype: Any) -> Iterator[Row]:
    copy_gbps = ceilings(dtype).copy_gbps
    known = [s.name for s in SHAPES]
    shapes, backends, ops = chosen("rows", names, known, [*kernels.BACKENDS, QUACK], CASES)
    by_quack = "residual_norm" in ops and QUACK in backends
    for s in [s for s in SHAPES if s.name in shapes and by_quack]:
        size = CASES["residual_norm"].both * s.B * s.T * s.D * dtype.itemsize
        for row in quack_rows("residual_norm", s.name, (s.B * s.T, s.D), size=size):
            yield row | {"name": "residual_norm with backward"}
    for shape in map(sized(small), [s for s in SHAPES if s.name in shapes]):
        for op, case in [(op, case) for op, case in CASES.items() if op in ops]:
            inputs = rotating(lambda key, c=case, s=shape: inputs_of(c, s, dtype, key))
            tested = inputs_of(case, small(shape), dtype, jax.random.key(1))
            for backend in [name for name in kernels.BACKENDS if name in backends]:
                for part, arrays in (("", case.forward), (" with backward", case.both)):
                    passes = with_backward if part else forward_alone
                    fn, reference = (passes(case, b) for b in (backend, "reference"))
                    size = arrays * shape.B * shape.T * shape.D * dtype.itemsize
                    row = {"name": f"{op}{part}", "shape": shape.name, "backend": backend}
                    row |= bandwidth(fn, inputs, size, copy_gbps)
                    if row["ms"] is not None:
                        yield row | {"error": error_of(fn, reference, tested)}
            del inputs


def inputs_of(case: Case, shape: RowsShape, dtype: Any, key: jax.Array) -> tuple[Any, ...]:
    """The arguments, then a cotangent for each result."""
    argument_key, *keys = jax.random.split(key, 4)
    arguments = case.arguments(shape, dtype, argument_key)
    results = jax.tree.leaves(jax.eval_shape(case.run("reference"), *arguments))
    return *arguments, *(jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, results))


def forward_alone(case: Case, backend: str) -> Callable[..., Any]:
    return lambda *inputs: jax.tree.leaves(case.run(backend)(*inputs[: case.count]))[case.made]


def with_backward(case: Case, backend: str) -> Callable[..., Any]:
    """A function that returns the results, and the gradients from a later pass."""

    def run(*inputs: Any) -> Any:
        learned = case.count - case.fixed
        fixed, cotangents = inputs[learned : case.count], inputs[case.count :]
        f = lambda *arguments: case.run(backend)(*arguments, *fixed)
        out, pull = jax.vjp(f, *inputs[:learned])
        out, cotangents = jax.lax.optimization_barrier((out, cotangents))
        gradients = pull(jax.tree.unflatten(jax.tree.structure(out), cotangents))
        return jax.tree.leaves(out)[case.made], gradients[case.learned]

    return run


def small(s: RowsShape) -> RowsShape:
    return s._replace(name=f"{s.name}_small", B=2, T=64, D=256)


def normal(number: int, wider: int = 1) -> Callable[..., tuple[jax.Array, ...]]:
    """A function that makes `number` normal arrays [B, T, wider * D]."""
    shape = lambda s: (s.B, s.T, wider * s.D)
    return lambda s, dtype, key: tuple(
        jax.random.normal(k, shape(s), dtype) for k in jax.random.split(key, number)
    )


def heads(s: RowsShape, dtype: Any, key: jax.Array) -> tuple[jax.Array, ...]:
    """Q, K, and the cosines and signed sines of the RoPE angles."""
    q, k = (x.reshape(s.B, s.T, -1, HEAD_DIM) for x in normal(2)(s, dtype, key))
    angle = jnp.arange(s.T)[:, None] * 1e5 ** (-jnp.arange(0, 1, 2 / HEAD_DIM))
    cos, sin = jnp.cos(angle)[None], jnp.sin(angle)[None]
    return q, k, jnp.concatenate([cos, cos], -1), jnp.concatenate([-sin, sin], -1)


def mixed(backend: str) -> Callable[..., Any]:
    a, b = jnp.float32(1.1), jnp.float32(0.2)
    return lambda x, y, x0: kernels.mixed_norm(x, y, x0, a, b, eps=EPS, implementation=backend)


def joined(backend: str) -> Callable[..., Any]:
    return lambda x, y: kernels.residual_norm(x, y, eps=EPS, implementation=backend)


def turned(backend: str) -> Callable[..., Any]:
    return lambda *arrays: kernels.rope_norm(*arrays, eps=EPS, implementation=backend)


CASES = {
    "residual_norm": Case(normal(2), joined, 2, 4, 8, learned=slice(1)),
    "mixed_norm": Case(normal(3), mixed, 3, 5, 12, made=slice(2), learned=slice(0, 3, 2)),
    "rope_norm": Case(heads, turned, 4, 4, 10, fixed=2),
    "relu2": Case(
        normal(1, wider=4), lambda b: lambda x: kernels.relu2(x, implementation=b), 1, 8, 20
    ),
}
