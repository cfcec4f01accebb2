"""Parallel `map` over worker processes, with the results in order.

Workers on this host are spawned, not forked, and import neither the caller's main module nor jax.
The pool is therefore safe after jax has started its threads, in a notebook, and in a script without
a main guard. Workers exit when their parent does.
"""

import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from jaxtrain.cluster.ray_cluster import current_cluster
from jaxtrain.settings import UserError

AHEAD = 2  # queued tasks per process
START = """
from jaxtrain.cluster.ray_worker import leave_out_jax
leave_out_jax()
from jaxtrain.data.pool import serve
serve()
"""
Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]


def cores() -> int:
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def block_pool(workers: int | None, small: bool = False) -> Iterator[Map]:
    """Yield a `map` over blocks of text. It runs on the Ray cluster if the command asked for one,
    else in worker processes of this host, or in this process if the text is `small`.

    workers: tasks at once; default: one per core, on a cluster with queued tasks as well. Results
    come in order, so they do not depend on where they are computed.
    """
    cluster = current_cluster()
    if cluster is not None:
        yield lambda function, things: cluster.map(function, things, workers)
        return
    with process_pool(1 if small else workers or cores()) as mapped:
        yield mapped


def tasks_at_once(workers: int | None) -> int:
    """Number of tasks that a `block_pool` holds, running or queued."""
    cluster = current_cluster()
    return (1 + AHEAD) * (workers or cores()) if cluster is None else cluster.tasks(workers)


@contextmanager
def process_pool(count: int) -> Iterator[Map]:
    """Yield a lazy `map` over `count` worker processes, or in this process if `count` is 1.

    Functions and arguments are pickled. A UserError from a function is raised here too. A worker
    that dies raises UserError.
    """
    if count == 1:
        yield map
        return
    running: list[subprocess.Popen] = []
    mine = threading.local()

    def start() -> None:
        mine.process = _start()
        running.append(mine.process)

    threads = ThreadPoolExecutor(count, initializer=start)

    def mapped(function: Callable[[Any], Any], things: Iterable[Any]) -> Iterator[Any]:
        waiting = deque()
        for thing in things:
            waiting.append(threads.submit(lambda t: _ask(mine.process, function, t), thing))
            if len(waiting) >= (1 + AHEAD) * count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    try:
        yield mapped
    finally:
        for process in running:
            process.kill()
        threads.shutdown(cancel_futures=True)
        for process in running:
            process.communicate()


def _start() -> subprocess.Popen:
    path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    settings = {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.Popen(
        [sys.executable, "-c", START],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | settings,
    )


def _ask(process: subprocess.Popen, function: Callable[[Any], Any], thing: Any) -> Any:
    assert process.stdin is not None and process.stdout is not None
    try:
        pickle.dump((function, thing), process.stdin, pickle.HIGHEST_PROTOCOL)
        process.stdin.flush()
        result, error = pickle.load(process.stdout)
    except (EOFError, OSError, pickle.UnpicklingError) as gone:
        raise UserError(
            f"a process that prepares data died with exit code {process.wait()}; if memory ran "
            "out, use fewer data.prepare_workers"
        ) from gone
    if error is not None:
        raise error
    return result


def serve() -> None:
    """Run the loop of a worker process: compute tasks until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    inbox, outbox = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries print to stderr, not into the answers
    while True:
        try:
            function, thing = pickle.load(inbox)
        except EOFError:
            return
        try:
            answer = function(thing), None
        except UserError as error:
            answer = None, error
        except Exception:
            answer = None, RuntimeError(traceback.format_exc())
        try:
            pickle.dump(answer, outbox, pickle.HIGHEST_PROTOCOL)
            outbox.flush()
        except BrokenPipeError:
            os._exit(1)
