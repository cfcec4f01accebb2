"""A Ray cluster as a place of host work: connecting to it, and functions that its nodes compute.

Ray is imported when a command asks for it (`--ray`). The nodes need this version of the project and
of the packages that decide bytes. Nothing of the environment of the command goes to them: a node
has credentials of its own.
"""

import logging
import os
import pickle
import re
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any, NamedTuple

from jaxtrain.cluster import ray_worker
from jaxtrain.settings import UserError

LOCAL = "local"
AHEAD = 2  # tasks that wait for each core
RETRIES = 5  # of a task whose node or process was lost
LOOK = 1.0  # seconds between two looks at the head node
HEAD_GONE = 15.0  # seconds without it after which the cluster counts as lost
HEAD_LOST = (
    "the head node is gone, and its cluster with it; the same command on a new cluster goes on "
    "from what is on disk"
)
PROBE = 30.0  # seconds in which a cluster says that it is one
HOST_PORT = re.compile(r"(?:[\w.-]+|\[[0-9a-fA-F:]+\]):\d{1,5}")
# Of this process, before Ray is imported. Ray would repeat a `uv run` on the nodes, with a copy of
# the working directory, send statistics of its use, and leave out lines that several nodes print.
SETTINGS = {
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
}
# Of the processes on the nodes. Tasks of data do not share processes with what loads a model.
DATA_PROCESS = {"env_vars": {"TOKENIZERS_PARALLELISM": "false"}}


class RayCluster(NamedTuple):
    """A cluster that this process is connected to."""

    address: str

    def map(
        self, function: Callable[[Any], Any], things: Iterable[Any], limit: int | None = None
    ) -> Iterator[Any]:
        """The results of a function in order; things are taken as it goes. limit: tasks at once.

        What a lost node computed is computed again by another one. UserError if one task loses
        RETRIES nodes or processes, and for one that the function raises.
        """
        import ray

        run = ray.remote(
            num_cpus=1, max_retries=RETRIES, scheduling_strategy="SPREAD", runtime_env=DATA_PROCESS
        )(ray_worker.run_task)
        packed = ray.put(pickle.dumps(function, pickle.HIGHEST_PROTOCOL))
        caller, waiting = ray_worker.this_caller(), deque()
        for thing in things:
            call = pickle.dumps(thing, pickle.HIGHEST_PROTOCOL)
            waiting.append(run.remote(caller, packed, call))
            # Nodes come and go while it runs.
            if len(waiting) >= self.tasks(limit):
                yield task_result(waiting.popleft())
        while waiting:
            yield task_result(waiting.popleft())

    def tasks(self, limit: int | None) -> int:
        """How many are in work or wait: some for each core of all nodes."""
        import ray

        return limit or (1 + AHEAD) * max(1, int(ray.cluster_resources().get("CPU", 1)))


CURRENT: ContextVar[RayCluster | None] = ContextVar("ray_cluster", default=None)


def current_cluster() -> RayCluster | None:
    """The cluster that the command asked for; None: this host does the work."""
    return CURRENT.get()


@contextmanager
def ray_cluster(address: str | None, show: bool = False) -> Iterator[RayCluster | None]:
    """Host work inside runs on this cluster; on this host if None.

    address: HOST:PORT, auto (the cluster that this host is a node of), or local (a cluster of this
    host alone, which ends with it). show: what processes of the nodes print. UserError for one that
    cannot be reached.
    """
    if address is None:
        yield None
        return
    check_address(address)
    connect_to_ray(address, show)
    import ray

    mark, over = CURRENT.set(RayCluster(address)), threading.Event()
    head = ray.get_runtime_context().gcs_address
    threading.Thread(target=watch_head, args=(address, head, over), daemon=True).start()
    try:
        yield CURRENT.get()
    finally:
        CURRENT.reset(mark)
        ray.shutdown()  # without a head, it may not come back
        over.set()


def watch_head(address: str, head: str, over: threading.Event) -> None:
    """Ends this process with one line once nothing has listened at `head` for HEAD_GONE seconds.

    Ray itself would wait a minute, and then abort the process. Whatever is written appears whole.
    """
    host, _, port = head.rpartition(":")
    seen = time.monotonic()
    while not over.wait(LOOK):
        with suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), LOOK):
            seen = time.monotonic()
        if time.monotonic() - seen > HEAD_GONE and not over.is_set():
            os.write(2, f"error: --ray {address}: {HEAD_LOST}\n".encode())
            os._exit(2)


def task_result(result: Any, passed_on: type[Exception] | tuple[type[Exception], ...] = ()) -> Any:
    """The value of a task. UserError if its nodes were lost too often, or by the function.

    passed_on: errors of Ray that the caller handles.
    """
    import ray
    from ray.exceptions import LocalRayletDiedError, RayError, RayTaskError

    try:
        value, error = pickle.loads(ray.get(result))
    except passed_on:
        raise
    except RayTaskError as failed:  # before the function was called
        raise UserError(f"--ray: a node cannot do the work: {ray_reason(failed)}") from failed
    except LocalRayletDiedError as lost:
        raise UserError(f"--ray: {HEAD_LOST}") from lost
    except RayError as lost:
        raise UserError(
            f"--ray: a part of the work was lost {RETRIES + 1} times ({type(lost).__name__}); if "
            "memory ran out, use fewer tasks at once (data.prepare_workers). The same command goes "
            "on from what is on disk"
        ) from lost
    if error is not None:
        raise error
    return value


# ---- connecting --------------------------------------------------------------------------------


def check_address(address: str) -> None:
    """Raises UserError for what is no address, without repeating it: it may hold a password."""
    if find_spec("ray") is None:
        raise UserError(
            "--ray needs the package ray, which is not installed: uv sync --extra ray, or pip "
            "install 'jaxtrain[ray]'"
        )
    if address not in (LOCAL, "auto") and not HOST_PORT.fullmatch(address):
        raise UserError(
            "--ray: expected HOST:PORT of the head node, auto or local; the command itself runs on "
            "a node of the cluster"
        )


def connect_to_ray(address: str, show: bool) -> None:
    """Raises UserError if no cluster answers."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    if ":" in address:
        probe(address)
    import ray
    from ray.exceptions import RayError

    options: dict[str, Any] = {}
    if address == LOCAL:
        options = {"num_cpus": len(os.sched_getaffinity(0)), "include_dashboard": False}
    try:
        ray.init(address, log_to_driver=show, logging_level=logging.ERROR, **options)
    except (ConnectionError, RuntimeError, ValueError, OSError, RayError) as error:
        raise UserError(f"--ray {address}: {ray_reason(error)}") from error


def probe(address: str) -> None:
    """Asks whether a cluster is there: Ray itself would wait two minutes, and end the process."""
    host, _, port = address.rpartition(":")
    advice = "is the head node running (ray start --head), and is this its address?"
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE):
            pass
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--ray {address} cannot be reached ({reason}); {advice}") from error
    line = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    try:
        code = subprocess.run(line, capture_output=True, timeout=PROBE).returncode
    except subprocess.TimeoutExpired:
        code = 1
    if code:
        raise UserError(f"--ray {address} answers, but not as a Ray cluster; {advice}")


def ray_reason(error: BaseException) -> str:
    """What an error says, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
