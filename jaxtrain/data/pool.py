"""A function applied to many things by other processes, with the results in order.

The processes of this host are started afresh, not forked, and import neither the caller's main
module nor jax: it is safe after jax has started its threads, in a notebook, and in a script without
a main guard. They end by themselves when their parent does.
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

AHEAD = 2  # tasks that wait for each process
START = """
from jaxtrain.cluster.ray_worker import leave_out_jax
leave_out_jax()
from jaxtrain.data.pool import serve
serve()
"""
Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def block_pool(workers: int | None, small: bool = False) -> Iterator[Map]:
    """A `map` over blocks of text: on the Ray cluster that the command asked for, else over
    processes of this host, of which there is only this one if the text is `small`.

    workers: tasks at once; default one a core, and on a cluster some that wait as well. The results
    come in order, so that they are the same wherever they are computed.
    """
    cluster = current_cluster()
    if cluster is not None:
        yield lambda function, things: cluster.map(function, things, workers)
        return
    with process_pool(1 if small else workers or cores()) as mapped:
        yield mapped


def tasks_at_once(workers: int | None) -> int:
    """How many tasks a `block_pool` holds."""
    cluster = current_cluster()
    return (1 + AHEAD) * (workers or cores()) if cluster is None else cluster.tasks(workers)


@contextmanager
def process_pool(count: int) -> Iterator[Map]:
    """A `map` over `count` processes, or in this one if `count` is 1; it takes things as it goes.

    Functions and things are pickled. A UserError that a function raises is raised here too; a
    process that dies is a UserError.
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
    """The loop of a worker process: answers tasks until its parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    inbox, outbox = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
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
