"""Benchmark of matmuls beyond one cuBLAS call: float8, ReLU^2 in the epilogue, symmetric outputs,
grouped, a few rows with integer weights (`integers.py`), and chains of those
(`integer_chain.py`)."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxtrain_kernels as kernels
from jaxtrain_kernels import feed_forward
from jaxtrain_kernels.dispatch import target
from jaxtrain_kernels.grouped_feed_forward import BACKENDS as EXPERTS_BACKENDS
from jaxtrain_kernels.grouped_matmul import BACKENDS as GROUPED_BACKENDS
from jaxtrain_kernels.matmul import hopper

from benchmarks import integer_chain, integers
from benchmarks.casts import casts, norm_casts
from benchmarks.epilogues import epilogue_rows
from benchmarks.kernels import Row, chosen, error_of, growing, measured, quack_rows, sized
from benchmarks.peers import QUACK
from benchmarks.timing import rotating
from jaxtrain.cluster.runtime import compute_dtype
from jaxtrain.cluster.xla_flags import known_options
from jaxtrain.optim.orthogonalize import POLAR_EXPRESS, orthogonalize, orthogonalize_flops

Arrays = tuple[Any, ...]


class Dense(NamedTuple):
    """x [M, K] times w [K, N]; for a feed-forward network, its up projection."""

    name: str
    M: int
    K: int
    N: int


class Grouped(NamedTuple):
    """x [M, K] in E groups of rows, each times its own w [K, N]: the experts' up projection."""

    name: str
    M: int
    K: int
    N: int
    E: int


class Stacks(NamedTuple):
    """The matrices of a model that Muon orthogonalizes: stacks [L, rows, columns]."""

    name: str
    shapes: tuple[tuple[int, int, int], ...]


DENSE = (
    Dense("m65536_k1536_n6144", 65536, 1536, 6144),
    Dense("m65536_k768_n3072", 65536, 768, 3072),
    Dense("m32768_k1536_n6144", 32768, 1536, 6144),
)
GROUPED = (
    Grouped("m131072_k768_n1536_e8", 131072, 768, 1536, 8),
    Grouped("m65536_k1536_n3072_e8", 65536, 1536, 3072, 8),
    Grouped("m131072_k768_n768_e64", 131072, 768, 768, 64),
)
STACKS = (
    Stacks("gpt_d12", ((48, 768, 768), (12, 768, 3072), (12, 3072, 768))),
    Stacks("gpt_d24", ((96, 1536, 1536), (24, 1536, 6144), (24, 6144, 1536))),
)
# plain: 16-bit matmuls only; fp8_delayed: delayed scaling by earlier amaxes;
# fp8_xla, fp8_delayed_xla: casts by XLA. xla and mosaic belong to the other ops.
# triton, reduce and dot belong to matmuls with integer weights.
# fp8_epilogue: fp8_delayed with the hidden layer's casts in the epilogues of the matmuls.
# matmuls: the experts' network as two grouped matmuls by their default.
BACKENDS = ("plain", "fp8", "fp8_xla", "fp8_delayed", "fp8_delayed_xla", "fp8_epilogue", "xla",
            "mosaic", "tokamax", "matmuls", QUACK, *integers.BACKENDS[1:])  # fmt: skip


def bench_matmuls(
    variant: str | None = None, names: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """TF/s count the FLOPs of the plain matmuls; ms include casts and activations.

    names: shapes and backends to measure; default all.
    """
    dtype = compute_dtype("auto")
    yield from growing("matmul", dtype, variant, matmul_rows(names, dtype))


def matmul_rows(names: Sequence[str], dtype: Any) -> Iterator[Row]:
    known = [s.name for s in (*DENSE, *GROUPED, *STACKS, *integers.PRODUCTS,
                               *integer_chain.CHAINS)]  # fmt: skip
    shapes, backends = chosen("matmul", names, known, BACKENDS)
    for part, all_shapes, small in (
        (dense, DENSE, small_dense), (hidden_casts, DENSE, small_dense),
        (hidden_products, DENSE, small_dense), (stream_norms, DENSE, small_dense),
        (grouped, GROUPED, small_grouped), (experts, GROUPED, small_grouped),
        (muon, STACKS, small_stacks),
        (integers.product_rows, integers.PRODUCTS, integers.small_product),
        (integer_chain.chain_rows, integer_chain.CHAINS, integer_chain.small_chain),
    ):  # fmt: skip
        for shape in map(sized(small), [s for s in all_shapes if s.name in shapes]):
            yield from part(shape, backends, dtype)


def dense(s: Dense, backends: set[str], dtype: Any) -> Iterator[Row]:
    """A linear layer and a feed-forward network, each forward and backward."""
    layers = {
        "plain": with_gradients(jnp.matmul), "fp8": with_gradients(kernels.fp8_matmul),
        "fp8_xla": with_gradients(functools.partial(kernels.fp8_matmul, implementation="xla")),
        "fp8_delayed": delayed(None), "fp8_delayed_xla": delayed("xla"),
    }  # fmt: skip
    networks = {b: with_gradients(network(b)) for b in feed_forward.BACKENDS if b != "reference"}
    networks |= {"fp8": with_gradients(kernels.fp8_feed_forward_relu2)}
    networks |= {"fp8_delayed": delayed_network(), "fp8_epilogue": delayed_network("mosaic")}
    for op, functions, flops in (
        ("linear", layers, 6.0 * s.M * s.K * s.N),
        ("feed_forward_relu2", networks, 12.0 * s.M * s.K * s.N),
    ):
        if op != "linear" and QUACK in backends:
            yield from quack_rows(op, s.name, (s.M, s.K, s.N), flops)
        make = lambda key, s, op=op: dense_inputs(op, s, dtype, key)
        inputs = rotating(lambda key, make=make: make(key, s))
        tested = make(jax.random.key(1), small_dense(s))
        reference = with_gradients(jnp.matmul if op == "linear" else network("reference"))
        for backend in [b for b in BACKENDS if b in functions and b in backends]:
            fn = functions[backend]
            # As a float8 training step is compiled (jaxtrain/train/program.py).
            options = known_options(("cublas",)) if backend.startswith("fp8") else {}
            figures = measured(fn, inputs, flops, compiler_options=options)
            if figures is not None:
                row = {"name": op, "shape": s.name, "backend": backend}
                error = error_of(lambda *a, fn=fn: fn(*a)[:2], reference, tested, options)
                yield row | figures | {"error": error}
        del inputs


def network(backend: str) -> Callable[..., Any]:
    return lambda x, up, down: kernels.feed_forward_relu2(x, up, down, implementation=backend)


def with_gradients(f: Callable[..., Any]) -> Callable[..., Any]:
    """A function (cotangent, *arguments) -> the result, and all gradients from a later pass."""

    def run(dy: Any, *arguments: Any) -> Any:
        y, pull = jax.vjp(f, *arguments)
        y, dy = jax.lax.optimization_barrier((y, dy))
        return y, pull(dy)

    return run


def delayed(cast: str | None) -> Callable[..., Any]:
    """`with_gradients` of a float8 matmul with delayed scaling; also returns the new amaxes."""
    matmul = lambda x, w, amax_2: kernels.fp8_matmul(x, w, amax_2=amax_2, implementation=cast)

    def run(dy: Any, x: Any, w: Any) -> Any:
        most_2 = jnp.full(2, 6.0)  # amax of normal values
        y, (dx, dw, seen_2) = with_gradients(matmul)(dy, x, w, most_2)
        return y, (dx, dw), seen_2

    return run


def delayed_network(epilogue: str | None = None) -> Callable[..., Any]:
    """As `delayed`, for a feed-forward network whose casts are fused with the squared ReLU."""
    f = lambda x, up, down, amax_22: kernels.fp8_feed_forward_relu2(
        x, up, down, amax_22=amax_22, epilogue=epilogue
    )

    def run(dy: Any, *arguments: Any) -> Any:
        most_22 = jnp.array([[6.0, 64.0], [36.0, 6.0]])
        y, (*gradients, seen_22) = with_gradients(f)(dy, *arguments, most_22)
        return y, tuple(gradients), seen_22

    return run


def hidden_casts(s: Dense, backends: set[str], dtype: Any) -> Iterator[Row]:
    """The casts of a hidden layer's size."""
    return casts(s.name, (s.M, s.N), backends, dtype)


def hidden_products(s: Dense, backends: set[str], dtype: Any) -> Iterator[Row]:
    """The matmuls into a hidden layer and into its gradient, with their casts."""
    return epilogue_rows(s.name, (s.M, s.K, s.N), backends, dtype)


def stream_norms(s: Dense, backends: set[str], dtype: jnp.dtype) -> Iterator[Row]:
    """The norms of a stream as wide as the input, with their casts."""
    return norm_casts(s.name, (s.M, s.K), backends, dtype)


def dense_inputs(op: str, s: Dense, dtype: Any, key: jax.Array) -> Arrays:
    """A cotangent, x, and weights scaled to keep the variance."""
    keys = jax.random.split(key, 4)
    shapes = [(s.K, s.N), (s.N, s.K)][: 1 if op == "linear" else 2]
    x = jax.random.normal(keys[0], (s.M, s.K), dtype)
    dy = jax.random.normal(keys[1], (s.M, shapes[-1][1]), dtype)
    weights = [jax.random.normal(k, w, dtype) * w[0] ** -0.5 for k, w in zip(keys[2:], shapes)]
    return dy, x, *(w.astype(dtype) for w in weights)


def grouped(s: Grouped, backends: set[str], dtype: Any) -> Iterator[Row]:
    """Grouped matmuls forward and backward, with group sizes of a balanced router."""
    inputs = rotating(lambda key: grouped_inputs(s, dtype, key))
    tested = grouped_inputs(small_grouped(s), dtype, jax.random.key(1))
    for backend in [b for b in BACKENDS if b in GROUPED_BACKENDS and b in backends]:
        fn = grouped_with_gradients(backend)
        figures = measured(fn, inputs, 6.0 * s.M * s.K * s.N)
        if figures is not None:
            error = error_of(fn, grouped_with_gradients("reference"), tested)
            row = {"name": "grouped_matmul", "shape": s.name, "backend": backend}
            yield row | figures | {"error": error}


def grouped_with_gradients(backend: str) -> Callable[..., Any]:
    def run(dy: Any, x: Any, w: Any, sizes_E: Any) -> Any:
        f = lambda x, w: kernels.grouped_matmul(x, w, sizes_E, implementation=backend)
        return with_gradients(f)(dy, x, w)

    return run


def grouped_inputs(s: Grouped, dtype: Any, key: jax.Array) -> Arrays:
    keys = jax.random.split(key, 4)
    dy, x, w = (
        jax.random.normal(k, shape, dtype)
        for k, shape in zip(keys, ((s.M, s.N), (s.M, s.K), (s.E, s.K, s.N)))
    )
    expert_M = jax.random.randint(keys[3], (s.M,), 0, s.E)
    return dy, x, (w * s.K**-0.5).astype(dtype), jnp.bincount(expert_M, length=s.E)


def experts(s: Grouped, backends: set[str], dtype: Any) -> Iterator[Row]:
    """Their network with the squared ReLU and weighted rows, forward and backward."""

    def make(key: jax.Array, s: Grouped) -> Arrays:
        _, x, up, sizes_E = grouped_inputs(s, dtype, key)
        keys = jax.random.split(key, 3)
        dy = jax.random.normal(keys[0], x.shape, dtype)
        down = jax.random.normal(keys[1], (s.E, s.N, s.K), dtype) * s.N**-0.5
        weights = jax.random.uniform(keys[2], (s.M, 1), jnp.float32, 0.1)
        return dy, x, up, down.astype(dtype), weights, sizes_E

    inputs = rotating(lambda key: make(key, s))
    tested = make(jax.random.key(1), small_grouped(s))
    for backend in [b for b in BACKENDS if b in EXPERTS_BACKENDS and b in backends]:
        fn = experts_with_gradients(backend)
        figures = measured(fn, inputs, 12.0 * s.M * s.K * s.N)
        if figures is not None:
            error = error_of(fn, experts_with_gradients("reference"), tested)
            row = {"name": "grouped_feed_forward_relu2", "shape": s.name, "backend": backend}
            yield row | figures | {"error": error}


def experts_with_gradients(backend: str) -> Callable[..., Any]:
    def run(dy: Any, x: Any, up: Any, down: Any, weights: Any, sizes_E: Any) -> Any:
        f = lambda x, up, down, weights: kernels.grouped_feed_forward_relu2(
            x, up, down, weights, sizes_E, implementation=backend
        )
        return with_gradients(f)(dy, x, up, down, weights)

    return run


def muon(s: Stacks, backends: set[str], dtype: Any) -> Iterator[Row]:
    """Polar Express on all matrices of a model; mosaic computes one triangle of symmetric products.

    FLOPs count the whole products.
    """

    def flops_of(m: int, n: int) -> int:
        return orthogonalize_flops(min(m, n), max(m, n), len(POLAR_EXPRESS), gram=True)

    flops = float(sum(L * flops_of(m, n) for L, m, n in s.shapes))
    make = lambda key, s: tuple(
        jax.random.normal(k, shape, jnp.float32) / (shape[1] * shape[2]) ** 0.5
        for k, shape in zip(jax.random.split(key, len(s.shapes)), s.shapes)
    )
    inputs = rotating(lambda key: make(key, s))
    tested = make(jax.random.key(1), small_stacks(s))
    symmetric = {"xla": False, "mosaic": True}
    for backend in [b for b in BACKENDS if b in symmetric and b in backends]:
        if backend == "mosaic" and unserved(inputs[0]):
            continue
        fn = iterated(symmetric[backend])
        figures = measured(fn, inputs, flops)
        if figures is not None:
            row = {"name": "orthogonalize", "shape": s.name, "backend": backend}
            yield row | figures | {"error": error_of(fn, exactly, tested)}


def unserved(matrices: Arrays) -> bool:
    """Whether the triangle kernel does not support these matrices."""
    return any(hopper.supports(target(), x.astype(jnp.bfloat16)) for x in matrices)


def iterated(symmetric: bool) -> Callable[..., Any]:
    return lambda *matrices: [orthogonalize(x, POLAR_EXPRESS, True, symmetric) for x in matrices]


def exactly(*matrices: Any) -> list[Any]:
    """The iteration as in the paper, in the dtype of the matrices."""
    results = []
    for x in matrices:
        tall = x.shape[-2] > x.shape[-1]
        x = x.mT if tall else x
        for a, b, c in POLAR_EXPRESS:
            gram = x @ x.mT
            x = a * x + (b * gram + c * gram @ gram) @ x
        results.append(x.mT if tall else x)
    return results


def small_dense(s: Dense) -> Dense:
    return s._replace(name=f"{s.name}_small", M=256, K=128, N=512)


def small_grouped(s: Grouped) -> Grouped:
    return s._replace(name=f"{s.name}_small", M=512, K=128, N=128, E=4)


def small_stacks(s: Stacks) -> Stacks:
    return s._replace(
        name=f"{s.name}_small", shapes=tuple((2, m // 4, n // 4) for _, m, n in s.shapes)
    )
