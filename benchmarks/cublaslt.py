"""The kernels that cuBLASLt's heuristic offers for a matmul, called through ctypes on JAX arrays.

XLA's autotuner picks the kernel that is fastest in a short burst. At its power limit a GPU lowers
its clock, and another kernel that needs less energy may be faster. Constants are from cublasLt.h.
"""

import ctypes
import functools
import importlib.util
from collections.abc import Iterator
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.settings import UserError

LIBRARY = "libcublasLt.so"
VERSIONS = (13, 12)
DATA_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}  # cudaDataType
COMPUTE_FLOAT32 = 68  # cublasComputeType
TRANSPOSE_A, TRANSPOSE_B = 3, 4  # cublasLtMatmulDescAttributes
MOST_WORKSPACE = 1  # cublasLtMatmulPreferenceAttributes
WORKSPACE_BYTES = 64 << 20
# cublasLtMatmulAlgoConfigAttributes, each with its type.
ATTRIBUTES = {
    "tile": (1, ctypes.c_uint32), "split_k": (2, ctypes.c_int32), "stages": (6, ctypes.c_uint32),
    "cluster": (8, ctypes.c_uint16),
}  # fmt: skip
MOST_KERNELS = 64


class Problem(NamedTuple):
    """y [M, N] = a b, or y + a b (`adds`), with a [M, K], or [K, M] (`a_turned`), and b [K, N], or
    [N, K] (`b_turned`), all row-major. dtype: of a and b; out_dtype: of y."""

    M: int
    N: int
    K: int
    a_turned: bool = False
    b_turned: bool = False
    adds: bool = False
    dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"


class _Algorithm(ctypes.Structure):
    _fields_ = [("data", c_uint64 * 8)]


class _Heuristic(ctypes.Structure):
    _fields_ = [
        ("algorithm", _Algorithm),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


def library_paths() -> Iterator[str]:
    """Yield candidate paths of the library: loaded already, or in NVIDIA's wheels."""
    yield from (f"{LIBRARY}.{version}" for version in VERSIONS)
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        yield from map(str, sorted(Path(folder).rglob(f"{LIBRARY}.*")))


@functools.cache
def library() -> ctypes.CDLL:
    """Load cuBLASLt. Raises UserError if it is not installed."""
    for path in library_paths():
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise UserError(f"{LIBRARY} is not here: install jaxtrain[gpu] on a machine with an NVIDIA GPU")


def _check(code: int, what: str) -> None:
    if code:
        raise RuntimeError(f"{what} of cuBLASLt returned {code}")


class Products:
    """The `count` kernels for one problem. `run(i, a, b, y)` overwrites y.

    A call is queued on the device's default stream; `block_until_ready` waits for it.
    """

    def __init__(self, problem: Problem):
        self.problem, self.lt = problem, library()
        self.cuda = ctypes.CDLL("libcuda.so.1")
        context = c_void_p()
        self._cuda("cuInit", 0)
        self._cuda("cuDevicePrimaryCtxRetain", byref(context), 0)
        self._cuda("cuCtxSetCurrent", context)
        self.handle = self._made("cublasLtCreate")
        self.workspace = jnp.zeros(WORKSPACE_BYTES, jnp.uint8)
        M, N, K, a_turned, b_turned, *_ = problem
        # The library is column-major, so it computes the transposed y from b and a swapped.
        self.matmul = self._made("cublasLtMatmulDescCreate", COMPUTE_FLOAT32, DATA_TYPES["float32"])
        for attribute, turned in ((TRANSPOSE_A, b_turned), (TRANSPOSE_B, a_turned)):
            value = c_int(turned)
            self._lt("cublasLtMatmulDescSetAttribute", self.matmul, attribute, byref(value),
                     c_size_t(4))  # fmt: skip
        self.b = self._layout(*((K, N) if b_turned else (N, K)), problem.dtype)
        self.a = self._layout(*((M, K) if a_turned else (K, M)), problem.dtype)
        self.y = self._layout(N, M, problem.out_dtype)
        preference, most = self._made("cublasLtMatmulPreferenceCreate"), c_uint64(WORKSPACE_BYTES)
        self._lt("cublasLtMatmulPreferenceSetAttribute", preference, MOST_WORKSPACE, byref(most),
                 c_size_t(8))  # fmt: skip
        self.found, count = (_Heuristic * MOST_KERNELS)(), c_int()
        self._lt("cublasLtMatmulAlgoGetHeuristic", self.handle, self.matmul, self.b, self.a, self.y,
                 self.y, preference, MOST_KERNELS, self.found, byref(count))  # fmt: skip
        self.count = count.value
        self._lt("cublasLtMatmulPreferenceDestroy", preference)

    def close(self) -> None:
        """Free the library's handles."""
        for layout in (self.a, self.b, self.y):
            self._lt("cublasLtMatrixLayoutDestroy", layout)
        self._lt("cublasLtMatmulDescDestroy", self.matmul)
        self._lt("cublasLtDestroy", self.handle)

    def _lt(self, name: str, *arguments: object) -> None:
        _check(getattr(self.lt, name)(*arguments), name)

    def _cuda(self, name: str, *arguments: object) -> None:
        _check(getattr(self.cuda, name)(*arguments), name)

    def _made(self, name: str, *arguments: object) -> c_void_p:
        made = c_void_p()
        self._lt(name, byref(made), *arguments)
        return made

    def _layout(self, rows: int, columns: int, dtype: str) -> c_void_p:
        sizes = c_uint64(rows), c_uint64(columns), c_int64(rows)
        return self._made("cublasLtMatrixLayoutCreate", DATA_TYPES[dtype], *sizes)

    def run(self, i: int, a: jax.Array, b: jax.Array, y: jax.Array) -> None:
        """Compute y (or add to it) with kernel i. The arrays have the problem's shapes."""
        at = lambda x: c_void_p(x.unsafe_buffer_pointer())
        one, kept = c_float(1), c_float(self.problem.adds)
        self._lt("cublasLtMatmul", self.handle, self.matmul, byref(one), at(b), self.b, at(a),
                 self.a, byref(kept), at(y), self.y, at(y), self.y, byref(self.found[i].algorithm),
                 at(self.workspace), c_size_t(WORKSPACE_BYTES), None)  # fmt: skip

    def block_until_ready(self) -> None:
        """Wait for the queued calls, like an array's method of this name."""
        self._cuda("cuCtxSynchronize")

    def describe(self, i: int) -> dict[str, int]:
        """The library's attributes of kernel i, as its raw integers."""
        return {name: self._attribute(i, *kind) for name, kind in ATTRIBUTES.items()}

    def _attribute(self, i: int, number: int, kind: type[ctypes.c_uint32]) -> int:
        value, written = kind(), c_size_t()
        self._lt("cublasLtMatmulAlgoConfigGetAttribute", byref(self.found[i].algorithm), number,
                 byref(value), c_size_t(ctypes.sizeof(value)), byref(written))  # fmt: skip
        return int(value.value)
