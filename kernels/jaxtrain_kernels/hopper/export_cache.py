"""Cache of lowered (exported) kernels, in the process and in JAX's compilation cache folder.

JAX's compilation cache saves a second process from compiling a program, but not from lowering it.
Pallas lowers a kernel in Python: about 0.4 s per kernel, in each program that contains it.
"""

import contextlib
import contextvars
import enum
import functools
import hashlib
import importlib
import inspect
import logging
import pickle
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import jax
import jaxlib.version
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.export import DisabledSafetyCheck, Exported, deserialize, export

from jaxtrain_kernels import dispatch
from jaxtrain_kernels.disk_cache import cache_folder, hash_of_sources, read_file, write_file
from jaxtrain_kernels.hopper import compile_beside, lower_beside

logger = logging.getLogger("jaxtrain_kernels")
PACKAGE = __name__.partition(".")[0]
# Mosaic's custom call is not stable across JAX versions, so the version is in the key.
CHECKS = (DisabledSafetyCheck.custom_call("mosaic_gpu_v2"),)
# JAX settings that a trace depends on. A thread may have its own values.
SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion")
EXPORTED: dict[tuple[Callable[..., Any], tuple[Any, ...]], Callable[..., Any]] = {}
SOURCES = hash_of_sources(Path(__file__).parents[1])
# Whether the kernels that are traced have empty bodies, as only their results' types are wanted.
ONLY_TYPES: contextvars.ContextVar[bool] = contextvars.ContextVar("only_types", default=False)
SETTING_LOCK = threading.Lock()  # guards a JAX setting that all threads share
# An array's type without a sharding, a memory space or a mesh axis along which it varies.
PLAIN_TYPE = re.compile(r"~?\w+\[[\d,]*\]")


class UnnamedValue(Exception):
    """A value has no key that is unique to it and the same in each process."""


class Kernel(NamedTuple):
    """A call of a module's kernel. fixed: arguments that are no arrays, by name. arrays: names of
    the others. tree: of the arrays."""

    module: str
    name: str
    fixed: dict[str, Any]
    arrays: list[str]
    tree: Any

    def run(self, function: Callable[..., Any], *leaves: Any) -> Any:
        """Call `function`, which has the kernel's signature, with these arrays."""
        arrays = dict(zip(self.arrays, jax.tree.unflatten(self.tree, leaves)))
        given = inspect.BoundArguments(
            inspect.signature(function), OrderedDict({**self.fixed, **arrays})
        )
        return function(*given.args, **given.kwargs)

    def jitted(self) -> Any:
        """The kernel as a function of its arrays, with the kernel's name."""
        function = getattr(sys.modules[self.module], self.name).__wrapped__

        def run(*leaves: Any) -> Any:
            return self.run(function, *leaves)

        run.__name__ = run.__qualname__ = self.name
        return jax.jit(run)


def cached_kernel(
    function: Callable[..., Any], static: Sequence[str], sm_count: Callable[[], int]
) -> Callable[..., Any]:
    """jax.jit(function, static_argnames=static), which on CUDA uses the cache where possible.

    sm_count: returns the number of multiprocessors, on which a kernel's grid depends.
    """
    signature = inspect.signature(function)
    plain = jax.jit(function, static_argnames=tuple(static))
    arrays = [name for name in signature.parameters if name not in static]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if ONLY_TYPES.get():
            return function(*args, **kwargs)  # jax.jit would keep the empty body
        if dispatch.target().platform != "cuda" or jax.config.jax_disable_jit:
            return plain(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        fixed = {name: x for name, x in bound.arguments.items() if name in static}
        leaves, tree = jax.tree.flatten([bound.arguments[name] for name in arrays])
        try:
            key = (
                *_function_key(function),
                *_target_key(sm_count()),
                *_argument_key(signature, leaves, tree, fixed),
            )
        except UnnamedValue:
            return plain(*args, **kwargs)
        if (kept := EXPORTED.get((function, key))) is not None:
            return kept(*leaves)

        kernel = Kernel(function.__module__, function.__name__, fixed, arrays, tree)
        without = functools.partial(kernel.run, plain)
        try:
            exported = _exported(kernel, without, leaves, key)
        except Exception as error:
            result = without(*leaves)  # raises if the call itself is wrong
            logger.warning("%s is lowered anew in each program: %s", function.__qualname__, error)
            EXPORTED[function, key] = without
            return result
        EXPORTED[function, key] = kept = _caller(exported, function.__name__, without)
        return kept(*leaves)

    return call


def _caller(
    exported: Callable[..., Any], name: str, plain: Callable[..., Any]
) -> Callable[..., Any]:
    """Wrap an exported function as one that a program contains once; under vmap, call `plain`.

    An exported function has no batching rule.
    """
    mapped = custom_vmap(exported)

    @mapped.def_vmap
    def rule(axis_size: int, in_batched: list[bool], *leaves: Any) -> tuple[Any, Any]:
        axes = tuple(0 if batched else None for batched in in_batched)
        results = jax.vmap(plain, axes, axis_size=axis_size)(*leaves)
        return results, jax.tree.map(lambda _: True, results)

    def in_mesh(x: jax.Array) -> jax.Array:
        # The results of an exported function have no mesh in their type, which a loop or a
        # function would reject as another type. XLA removes this operation.
        same = jax.typeof(x).sharding.mesh == jax.sharding.get_abstract_mesh()
        return x if same else lax.bitcast_convert_type(x, x.dtype)

    def run(*leaves: Any) -> Any:
        return jax.tree.map(in_mesh, mapped(*leaves))

    run.__name__ = run.__qualname__ = name
    return jax.jit(run)


def _exported(
    kernel: Kernel, plain: Callable[..., Any], leaves: Sequence[Any], key: tuple[Any, ...]
) -> Callable[..., Any]:
    """Read the exported function from the cache folder, or make it and store it there."""
    path = _path(kernel.name, key)
    types = [jax.typeof(x) for x in leaves]
    if path and (kept := _read(path)) and [str(x) for x in kept.in_avals] == list(map(str, types)):
        return kept.call
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in types]
    settings, where = _settings(), dispatch.target()

    def in_thread[R](function: Callable[..., R]) -> R:
        def run() -> R:
            if _settings() != settings:
                raise UnnamedValue("a setting of JAX holds in the caller's thread alone")
            return function(kernel, shapes)

        return _in_new_thread(run)

    def stored(content: bytes, kernels: Sequence[compile_beside.MosaicKernel]) -> Exported:
        if compile_beside.has_gpu():
            compile_beside.start_compiling(kernels)
        if path:
            write_file(path, content)
        return deserialize(bytearray(content))  # a copy that holds no trace

    def here() -> Exported:
        made = in_thread(_export)
        try:
            content = bytes(made.serialize())
        except (ImportError, ValueError):  # without flatbuffers; a result that is no tuple
            return made
        return stored(content, in_thread(lambda *_: _mosaic_kernels(made, shapes)))

    then = lambda answer: stored(*pickle.loads(answer))
    work = lower_beside.submit(then, _in_worker, kernel, shapes, settings, where, key[3])
    if work is None:
        return here().call

    @functools.cache
    def code() -> Callable[..., Any]:
        if not work.cancel():
            with contextlib.suppress(Exception):  # a worker that died
                return work.result().call
        try:
            return here().call  # no worker has begun it
        except Exception as error:
            logger.warning("%s is lowered anew in each program: %s", kernel.name, error)
            return plain

    return lower_beside.pending(code, in_thread(_results))


def _export(kernel: Kernel, shapes: Sequence[jax.ShapeDtypeStruct]) -> Exported:
    with _as_without_export():
        jitted = kernel.jitted()
        made = export(jitted, platforms=("cuda",), disabled_checks=CHECKS)(*shapes)
    if made.ordered_effects or made.unordered_effects:
        raise ValueError(f"its effects are {made.ordered_effects + made.unordered_effects}")
    return made


def _results(kernel: Kernel, shapes: Sequence[jax.ShapeDtypeStruct]) -> Any:
    """Types of a kernel's results. Its body is traced in the worker alone."""
    ONLY_TYPES.set(True)  # in this thread's context
    traced = kernel.jitted().trace(*shapes)
    # A kernel that changes an operand in place has this effect until it is lowered.
    inside = "InternalMutableArrayEffect"
    if effects := [x for x in traced.jaxpr.effects if type(x).__name__ != inside]:
        raise ValueError(f"its effects are {effects}")
    return traced.out_info


def _mosaic_kernels(
    exported: Exported, shapes: Sequence[jax.ShapeDtypeStruct]
) -> list[compile_beside.MosaicKernel]:
    traced = jax.jit(exported.call).trace(*shapes)
    return compile_beside.mosaic_kernels(traced.lower(lowering_platforms=("cuda",)))


def _in_worker(
    kernel: Kernel,
    shapes: Sequence[jax.ShapeDtypeStruct],
    settings: Sequence[Any],
    where: dispatch.Target,
    sm_count: int,
) -> bytes:
    """Lower a kernel in a process without the GPU, as `_exported` does in one that has it. Returns
    the arguments of `stored`, pickled."""
    importlib.import_module(kernel.module)
    for name, value in zip(SETTINGS, settings):
        jax.config.update(name, value)
    vars(importlib.import_module(f"{PACKAGE}.hopper"))["sm_count"] = lambda: sm_count
    with dispatch.on_target(*where):
        made = _export(kernel, shapes)
        return pickle.dumps((bytes(made.serialize()), _mosaic_kernels(made, shapes)))


@contextlib.contextmanager
def _as_without_export() -> Iterator[None]:
    """Lower to the Mosaic code of this JAX version, as jax.jit does, not of an older version."""
    name = "jax_export_ignore_forward_compatibility"
    with SETTING_LOCK:
        before = getattr(jax.config, name)
        jax.config.update(name, True)
        try:
            yield
        finally:
            jax.config.update(name, before)


def _in_new_thread[R](run: Callable[[], R]) -> R:
    """Call run() where neither the caller's mesh nor its trace is active."""
    context = contextvars.copy_context()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(context.run, run).result()


def _path(name: str, key: tuple[Any, ...]) -> Path | None:
    """Path of a kernel on disk; None without a compilation cache on disk or without sources."""
    folder = cache_folder("kernels")
    if folder is None or SOURCES is None:
        return None
    whole = SOURCES, jax.__version__, jaxlib.version.__version__, key
    return folder / f"{name}-{hashlib.sha256(repr(whole).encode()).hexdigest()}"


def _read(path: Path) -> Exported | None:
    if (content := read_file(path)) is None:
        return None
    try:
        return deserialize(bytearray(content))
    except Exception:  # another version's file, no flatbuffers
        return None


def _function_key(function: Callable[..., Any]) -> tuple[str, ...]:
    module, name = function.__module__, function.__qualname__
    if not module.startswith(f"{PACKAGE}.") or "<" in name:
        raise UnnamedValue(f"the source of {module}.{name} is not in the key")
    return module, name


def _target_key(sm_count: int) -> tuple[Any, ...]:
    on, there = dispatch.target().compute_capability, jax.local_devices()[0]
    if there.platform == "gpu" and there.compute_capability != ".".join(map(str, on or ())):
        raise UnnamedValue("Pallas lowers for the GPU that is there")
    return on, sm_count, *_settings()


def _settings() -> tuple[Any, ...]:
    return tuple(getattr(jax.config, name) for name in SETTINGS)


def _argument_key(
    signature: inspect.Signature, leaves: Sequence[Any], tree: Any, fixed: dict[str, Any]
) -> tuple[Any, ...]:
    types = tuple(str(jax.typeof(x)) for x in leaves)
    if not all(map(PLAIN_TYPE.fullmatch, types)):
        raise UnnamedValue(str(types))
    default = lambda name, x: (
        isinstance(x, FunctionType) and x is signature.parameters[name].default
    )
    static = ((n, "default" if default(n, x) else _described(x, n)) for n, x in fixed.items())
    return types, str(tree), *static


def _described(value: Any, name: str = "") -> Any:
    """Key that is unique to a value; name: of the parameter or field that holds the value."""
    if name == "interpret" and value is not False:
        raise UnnamedValue("an interpreted kernel is not lowered")
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if value is None or isinstance(value, bool | int | float | str | enum.Enum):
        return kind, repr(value)
    if isinstance(value, tuple):
        fields = getattr(value, "_fields", None)
        if fields is None and type(value) is not tuple:
            raise UnnamedValue(kind)
        return kind, *(_described(x, n) for n, x in zip(fields or [""] * len(value), value))
    if isinstance(value, functools.partial):
        named = tuple(sorted(value.keywords.items()))
        return kind, _described(value.func), _described(value.args), _described(named)
    if isinstance(value, np.dtype | type):
        dtype = np.dtype(value)
        if dtype.kind == "O":  # of any class
            raise UnnamedValue(repr(value))
        return kind, dtype.name
    return kind, _module_function(value)


def _module_function(value: Any) -> str:
    """Name of a function of this package or of JAX, whose source or version is in the key."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not callable(value) or not isinstance(module, str) or not isinstance(name, str):
        raise UnnamedValue(repr(value))
    known = module.partition(".")[0] in (PACKAGE, "jax")
    if not known or getattr(sys.modules.get(module), name, None) is not value:
        raise UnnamedValue(f"{module}.{name}")
    return f"{module}.{name}"
