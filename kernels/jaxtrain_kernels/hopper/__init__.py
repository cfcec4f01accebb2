"""Shared helpers of the Hopper kernels in Pallas Mosaic GPU: memory, barriers, launch."""

from collections.abc import Callable
from types import EllipsisType
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import ArrayLike, DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from jaxtrain_kernels.dispatch import Target
from jaxtrain_kernels.hopper.export_cache import ONLY_TYPES, cached_kernel

MATRIX = plgpu.Layout.WGMMA
ROWS = plgpu.Layout.WGMMA.reduce(1)
COLUMNS = plgpu.Layout.WGMMA.reduce(0)
_TRANSFORMS: Any = plgpu.TilingTransform, plgpu.SwizzleTransform
Interpret = bool | plgpu.InterpretGPUParams  # the latter where a kernel runs on a CPU
untyped: Any = (
    plgpu  # for what takes a `Ref` or a `RegisterLayout`: Pallas's own types are not public
)
Index = jax.Array | int
Places = Index | slice | pl.Slice | EllipsisType
RefIndex = Places | tuple[Places, ...]


@runtime_checkable
class Ref(Protocol):
    """A kernel's reference to memory or to a part of it, for which Pallas has no public type."""

    def __getitem__(self, index: RefIndex, /) -> jax.Array: ...

    def __setitem__(self, index: RefIndex, value: ArrayLike, /) -> None: ...

    @property
    def at(self) -> Any: ...

    @property
    def T(self) -> Any: ...


@runtime_checkable
class RegisterLayout(Protocol):
    """Layout of an array in the threads' registers, for which Pallas has no public type either."""

    def reduce(self, axes: int, /) -> "RegisterLayout": ...


def unsupported_reason(target: Target, *arrays: Any) -> str | None:
    """Why a Hopper kernel cannot run on the target with arrays of these dtypes; None = it can."""
    if target.platform != "cuda":
        return f"needs an NVIDIA GPU, this is {target.platform}"
    if target.compute_capability != (9, 0):
        return f"needs compute capability 9.0 (H100, H200), this is {target.compute_capability}"
    for x in arrays:
        if x.dtype not in (jnp.bfloat16, jnp.float16):
            return f"needs bfloat16 or float16, got {x.dtype}"
    return None


def jit_kernel(*static: str) -> Callable[[Callable], Any]:
    """Decorate a kernel's caller: it is traced and lowered once for the same shapes and `static`.

    Otherwise each layer of a model would be lowered, in each program of each process: 0.2 s per
    call.
    """
    return lambda function: cached_kernel(function, static, lambda: sm_count())


def traced_body(body: Callable[..., None]) -> Callable[..., None]:
    """Return a kernel's body, or an empty one if only its results' types are wanted."""
    return (lambda *_, **__: None) if ONLY_TYPES.get() else body


def pallas_kernel(body: Callable[..., None], **options: Any) -> Any:
    """plgpu.kernel with the `traced_body`."""
    return plgpu.kernel(traced_body(body), **options)


def compiler_params(approx_math: bool = True, scratch_bytes: int = 0) -> plgpu.CompilerParams:
    """Compiler parameters: code is written per thread (Lane), and kernels place all barriers.

    scratch_bytes: shared memory for reductions across warps.
    """
    return plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Lane,
        approx_math=approx_math,
        unsafe_no_auto_barriers=True,
        reduction_scratch_bytes=scratch_bytes,
    )


def specialize_warpgroups(
    warpgroups: int, load: Callable[[], None], compute: Callable[[jax.Array], None]
) -> None:
    """Run compute(index) in `warpgroups` warpgroups with many registers; the last one loads."""
    warpgroup = lax.axis_index("warpgroup")
    # Registers per thread, in multiples of 8; a multiprocessor has 64 Ki.
    few, many = (24, 240) if warpgroups <= 2 else (32, 160)

    def loading():
        plgpu.set_max_registers(few, action="decrease")
        load()

    def computing():
        plgpu.set_max_registers(many, action="increase")
        compute(warpgroup)

    lax.cond(warpgroup < warpgroups, computing, loading)


def tiles(shape: tuple[int, ...], dtype: DTypeLike) -> Any:
    """Shared memory for matrices [..., rows, columns] that TMA writes and wgmma reads."""
    size = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(shape[-1] * 8 * size)
    tiling, swizzling = _TRANSFORMS
    return plgpu.SMEM(shape, dtype, transforms=(tiling((8, swizzle // size)), swizzling(swizzle)))


def sm_count() -> int:
    """Number of multiprocessors of this GPU; an H200's when lowering without a GPU."""
    device = jax.devices()[0]
    return device.core_count if device.platform == "gpu" else 132


def _named_barrier(operation: str, barrier_id: Index, num_threads: int) -> None:
    # Pallas's interpret mode recognizes the operation by its name, bar_op, and these variables.
    # (Not a def, which a type checker may wrap.)
    if isinstance(barrier_id, int):
        bar_op = lambda _: mgpu.utils.inline_ptx(f"bar.{operation} {barrier_id}, {num_threads};")
        arguments, types = (), ()
    else:
        bar_op = lambda _, number: mgpu.utils.inline_ptx(
            f"bar.{operation} $0, {num_threads};", number.registers[()]
        )
        arguments, types = (barrier_id,), (plgpu.Layout.WG_SPLAT,)
    bar_op.__qualname__ = "bar_op"
    plgpu.inline_mgpu(arg_types=types)(bar_op)(*arguments)


def bar_arrive(barrier_id: Index, warpgroups: int) -> None:
    """Signal the hardware barrier, which releases its waiters once `warpgroups` have arrived."""
    _named_barrier("arrive", barrier_id, 128 * warpgroups)


def bar_sync(barrier_id: Index, warpgroups: int) -> None:
    """Signal the barrier and wait on it."""
    _named_barrier("sync", barrier_id, 128 * warpgroups)


def take_number(counter: Ref, shared: Ref) -> jax.Array:
    """Fetch and increment a counter in device memory, once per warpgroup; return the old value.

    shared: an int32 in shared memory.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, plgpu.Layout.WG_SPLAT),
    )
    def count(_, counter, shared):
        # One thread of the warpgroup increments; the others read its value from shared memory.
        one = mgpu.utils.single_thread_predicate(mgpu.utils.ThreadSubset.WARPGROUP)
        pointers = mgpu.utils.memref_ptr(counter), mgpu.utils.memref_ptr(shared)
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [*pointers, one],
            "{ .reg .pred p; .reg .b32 n; setp.ne.b32 p, $2, 0;"
            " @p atom.global.add.u32 n, [$0], 1; @p st.shared.b32 [$1], n; }",
            "l,r,r",
            has_side_effects=True,
        )
        mgpu.utils.warpgroup_barrier()
        ptx, i32 = "ld.shared.b32 $0, [$1];", ir.IntegerType.get_signless(32)
        n: Any = mgpu.utils.inline_ptx(ptx, pointers[1], result_types=i32, has_side_effects=True)
        return mgpu.FragmentedArray.splat(n, shape=(), is_signed=True)

    counted: Any = count
    return counted(counter, shared)
