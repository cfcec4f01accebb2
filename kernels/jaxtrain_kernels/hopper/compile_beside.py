"""Compile a program's Mosaic kernels in threads, in parallel with the rest of its compilation.

XLA compiles kernels one after the other, after the rest of the program. jaxlib caches compiled
kernels in the process by their hash, and holds no lock while it compiles
(jaxlib/mosaic/gpu/custom_call.cc). So a thread fills that cache by compiling a small program with
the same kernel. gpt_d12's step on an H200 with 16 cores: 24 kernels in 8 s, all in 10 s (LOG.md).

A kernel that is lowered for the first time (`export_cache`) compiles at once, while Python lowers
the others; a program's other kernels compile beside XLA's compilation of the program.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxlib.mlir import ir

TARGET = "mosaic_gpu_v2"  # XLA's custom call of a kernel
POOL = ThreadPoolExecutor(32)  # one thread a kernel: most of the time it waits (LOG.md)
STARTED: set[bytes | bool] = set()  # hashes of kernels
PATIENCE = 1.0  # seconds that XLA has to find the program in its disk cache
# Dtypes of MLIR's element types.
DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64", "i1": "bool",
          "f8E4M3FN": "float8_e4m3fn", "f8E5M2": "float8_e5m2", "i8": "int8", "i32": "int32",
          "ui8": "uint8", "ui32": "uint32"}  # fmt: skip


class MosaicKernel(NamedTuple):
    """A kernel's custom call. attributes: its code as MLIR bytecode, and the code's hash."""

    attributes: tuple[tuple[str, bytes | bool], ...]
    operands: tuple[jax.ShapeDtypeStruct, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]

    def call(self, *operands: jax.Array) -> list[jax.Array]:
        """Call the kernel and return its results."""
        call = jax.ffi.ffi_call(TARGET, list(self.results))
        return list(call(*operands, **dict(self.attributes)))


def mosaic_kernels(lowered: jax.stages.Lowered) -> list[MosaicKernel]:
    """Distinct kernels of a program, without those whose call `read_call` cannot read."""
    found: dict[bytes | bool, MosaicKernel] = {}

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == "stablehlo.custom_call" and (kernel := read_call(op)):
            found.setdefault(dict(kernel.attributes)["kernel_hash"], kernel)
        return ir.WalkResult.ADVANCE

    if (module := lowered.compiler_ir("stablehlo")) is not None:
        module.operation.walk(visit)
    return list(found.values())


def read_call(op: ir.Operation) -> MosaicKernel | None:
    """Return the kernel that an operation calls; None for other or unreadable calls."""
    named = op.attributes["call_target_name"]
    if "mhlo.backend_config" not in op.attributes or ir.StringAttr(named).value != TARGET:
        return None
    try:
        config = ir.DictAttr(op.attributes["mhlo.backend_config"])
        attributes = tuple((one.name, attribute_value(one.attr)) for one in config)
        operands = tuple(tensor_shape(value.type) for value in op.operands)
        results = tuple(tensor_shape(value.type) for value in op.results)
    except (TypeError, ValueError):
        return None
    return MosaicKernel(attributes, operands, results) if "kernel_hash" in config else None


def attribute_value(attribute: ir.Attribute) -> bytes | bool:
    """Python value from which `ffi_call` makes the same attribute. Raises TypeError for others."""
    if isinstance(attribute, ir.StringAttr):
        return attribute.value_bytes
    if isinstance(attribute, ir.BoolAttr):
        return attribute.value
    raise TypeError(attribute)


def tensor_shape(kind: ir.Type) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a tensor. Raises TypeError for an element type that is not in DTYPES."""
    tensor = ir.RankedTensorType(kind)
    if (name := str(tensor.element_type)) not in DTYPES:
        raise TypeError(name)
    return jax.ShapeDtypeStruct(tuple(tensor.shape), jnp.dtype(DTYPES[name]))


def has_gpu() -> bool:
    """Whether this process has a GPU to compile kernels for."""
    return jax.local_devices()[0].platform == "gpu"


def compile_kernel(kernel: MosaicKernel) -> None:
    """Compile a program of this kernel alone, for the first device of this process."""
    jax.jit(kernel.call).lower(*kernel.operands).compile()


def start_compiling(
    kernels: Iterable[MosaicKernel], compile_one: Callable[[MosaicKernel], None] = compile_kernel
) -> list[Future[None]]:
    """Compile the kernels that no thread has begun to compile in this process."""
    begun: list[Future[None]] = []
    for kernel in kernels:
        digest = dict(kernel.attributes)["kernel_hash"]
        if digest not in STARTED:
            STARTED.add(digest)
            begun.append(POOL.submit(compile_one, kernel))
    return begun


@contextlib.contextmanager
def compiling_kernels(
    lowered: jax.stages.Lowered, compile_one: Callable[[MosaicKernel], None] = compile_kernel
) -> Iterator[None]:
    """Compile the program's kernels in threads, while the caller compiles the program inside.

    Starts after PATIENCE, as a program from the disk cache contains its compiled kernels. XLA
    reports a kernel's error, since it compiles that kernel again. The exit waits for no thread.
    """
    kernels = mosaic_kernels(lowered)
    done = threading.Event()

    def begin() -> None:
        if not done.wait(PATIENCE):
            begun = start_compiling(kernels, compile_one)
            done.wait()
            for one in begun:
                one.cancel()

    if kernels:
        threading.Thread(target=begin, daemon=True).start()
    try:
        yield
    finally:
        done.set()
