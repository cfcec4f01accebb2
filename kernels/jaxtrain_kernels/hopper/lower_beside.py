"""Lower Mosaic kernels in worker processes, while this process traces the rest of the program.

Pallas lowers a kernel in Python, in 0.2 to 0.4 s, and Python runs one thread at a time. A worker
needs no GPU: without one, Pallas lowers for compute capability 9.0.
"""

import contextlib
import contextvars
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxtyping import PyTree

from jaxtrain_kernels.dispatch import target
from jaxtrain_kernels.hopper.compile_beside import has_gpu

START = "from jaxtrain_kernels.hopper.lower_beside import run_worker; run_worker()"
MOST = 16
# Threads and their worker processes; None outside of `lowering_in_workers`.
WORKERS: contextvars.ContextVar[tuple[ThreadPoolExecutor, threading.local] | None]
WORKERS = contextvars.ContextVar("workers", default=None)
STARTED: list[subprocess.Popen[bytes]] = []  # by `start_workers`, for the next program


def default_count() -> int:
    """Half of this process's cores, up to MOST, if it has a GPU. None in a job of several
    processes, which would all lower the same kernels on one host."""
    if not has_gpu() or jax.process_count() > 1:
        return 0
    known = hasattr(os, "sched_getaffinity")
    return min(MOST, (len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1) // 2)


def start_workers(count: int | None = None) -> None:
    """Start `count` workers for the next `lowering_in_workers`: they import JAX and the kernels,
    which takes 2 s. Default: default_count on Hopper, whose kernels they are, else none."""
    if count is None:
        count = default_count() if target().compute_capability == (9, 0) else 0
    STARTED.extend(_start() for _ in range(count if count > 1 else 0))


def stop_workers() -> None:
    """End the started workers that no program has used."""
    _end([STARTED.pop() for _ in range(len(STARTED))])


@contextlib.contextmanager
def lowering_in_workers(count: int | None = None) -> Iterator[None]:
    """Kernels that are traced inside are lowered by worker processes. So must be their program.

    A process starts with each kernel, until there are `count` (default_count). Those that
    `start_workers` has started are used first.
    """
    count = default_count() if count is None else count
    if count < 2:
        yield
        return
    processes: list[subprocess.Popen[bytes]] = []
    mine = threading.local()

    def start() -> None:
        try:
            mine.process = STARTED.pop(0)
        except IndexError:
            mine.process = _start()
        processes.append(mine.process)
        with contextlib.suppress(EOFError, OSError):
            _answer(mine.process)  # it is ready for a kernel

    pool = ThreadPoolExecutor(count, initializer=start)
    token = WORKERS.set((pool, mine))
    try:
        yield
    finally:
        WORKERS.reset(token)
        for process in processes:
            process.kill()
        pool.shutdown(cancel_futures=True)
        _end(processes)
        stop_workers()


def _start() -> subprocess.Popen[bytes]:
    path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    environment.pop("XLA_FLAGS", None)  # they may be for the GPU's XLA alone
    return subprocess.Popen(
        [sys.executable, "-P", "-c", START],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.communicate()


def _ask(process: subprocess.Popen[bytes], asked: bytes) -> bytes:
    assert process.stdin is not None
    process.stdin.write(asked)
    process.stdin.flush()
    return _answer(process)


def _answer(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    result, error = pickle.load(process.stdout)
    if error is not None:
        raise RuntimeError(error)
    return result


def run_worker() -> None:
    """Run a worker: call functions until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    inbox, outbox = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries print to stderr, not into the answers
    from jaxtrain_kernels.hopper import export_cache  # noqa: F401 - before the first kernel

    jax.local_devices()
    answer: tuple[bytes, str | None] = b"", None
    while True:
        pickle.dump(answer, outbox)
        outbox.flush()
        try:
            function, arguments = pickle.load(inbox)
        except EOFError:
            return
        try:
            answer = function(*arguments), None
        except Exception as error:
            answer = b"", f"{type(error).__name__}: {error}"


def submit[R](
    then: Callable[[bytes], R], function: Callable[..., bytes], *arguments: Any
) -> Future[R] | None:
    """Call a module's function in a worker, and then(its result) in a thread of this process. None
    without workers, or if it cannot be pickled."""
    if (workers := WORKERS.get()) is None:
        return None
    try:
        asked = pickle.dumps((function, arguments))
    except (pickle.PicklingError, AttributeError, TypeError):  # such as a lambda
        return None
    pool, mine = workers
    return pool.submit(lambda: then(_ask(mine.process, asked)))


# ---- a kernel whose code is not there yet --------------------------------------------------------

pending_kernel = Primitive("pending_kernel")
pending_kernel.multiple_results = True


def pending(code: Callable[[], Callable[..., Any]], results: PyTree) -> Callable[..., Any]:
    """A function whose results have these types (a tree). `code` returns the function itself, when
    a program that contains it is lowered."""
    leaves, tree = jax.tree.flatten(results)
    kinds = tuple(ShapedArray(x.shape, x.dtype, weak_type=x.weak_type) for x in leaves)
    call = lambda *given: pending_kernel.bind(*given, code=code, results=kinds)
    return lambda *given: jax.tree.unflatten(tree, call(*given))


@pending_kernel.def_abstract_eval
def _(*_: ShapedArray, code: Callable[..., Any], results: tuple[ShapedArray, ...]) -> Any:
    return results


def _lower(ctx: Any, *operands: Any, code: Callable[[], Callable[..., Any]], **_: Any) -> Any:
    flat = lambda *leaves: jax.tree.leaves(code()(*leaves))
    return mlir.lower_fun(flat, multiple_results=True)(ctx, *operands)


mlir.register_lowering(pending_kernel, _lower)
