"""Host work on a Ray cluster: connect to it, and map functions over its nodes.

Ray is imported only for `--ray`. The nodes need the same versions of this project and of the
packages that affect output bytes. The command's environment is not sent to them: each node has its
own credentials.
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
AHEAD = 2  # queued tasks per core
RETRIES = 5  # of a task whose node or process was lost
LOOK = 1.0  # seconds between two checks of the head node
HEAD_GONE = 15.0  # seconds without the head node after which the cluster counts as lost
HEAD_LOST = (
    "the head node is gone, and its cluster with it; the same command on a new cluster goes on "
    "from what is on disk"
)
PROBE = 30.0  # seconds to wait for an answer of the cluster
HOST_PORT = re.compile(r"(?:[\w.-]+|\[[0-9a-fA-F:]+\]):\d{1,5}")
# Environment of this process, set before Ray is imported. By default Ray repeats a `uv run` on the
# nodes with a copy of the working directory, sends usage statistics, and drops lines that several
# nodes print.
SETTINGS = {
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
}
# Environment of data tasks on the nodes. They do not share processes with model workers.
DATA_PROCESS = {"env_vars": {"TOKENIZERS_PARALLELISM": "false"}}


class RayCluster(NamedTuple):
    """A cluster that this process is connected to."""

    address: str

    def map(
        self, function: Callable[[Any], Any], things: Iterable[Any], limit: int | None = None
    ) -> Iterator[Any]:
        """Yield function(thing) for all things, in order. Things are consumed lazily, and at most
        `limit` tasks are in flight.

        Tasks of a lost node run again on another node. Raises UserError if a task loses more than
        RETRIES nodes or processes. A UserError of the function is raised here.
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
            # Nodes join and leave while this runs.
            if len(waiting) >= self.tasks(limit):
                yield task_result(waiting.popleft())
        while waiting:
            yield task_result(waiting.popleft())

    def tasks(self, limit: int | None) -> int:
        """Maximum number of running and queued tasks: `limit`, or a few per core of the cluster."""
        import ray

        return limit or (1 + AHEAD) * max(1, int(ray.cluster_resources().get("CPU", 1)))


CURRENT: ContextVar[RayCluster | None] = ContextVar("ray_cluster", default=None)


def current_cluster() -> RayCluster | None:
    """The cluster of the command's --ray; None if this host does the work."""
    return CURRENT.get()


@contextmanager
def ray_cluster(address: str | None, show: bool = False) -> Iterator[RayCluster | None]:
    """Run the context's host work on this cluster; on this host if `address` is None.

    address: HOST:PORT, auto (the cluster that contains this host), or local (a temporary cluster of
    this host alone). show: print the output of the nodes' processes. Raises UserError if the
    cluster cannot be reached.
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
        ray.shutdown()  # without a head node, this call may never return
        over.set()


def watch_head(address: str, head: str, over: threading.Event) -> None:
    """End this process with a one-line error once `head` is unreachable for HEAD_GONE seconds.

    Ray itself would wait a minute and then abort the process. No file is left half-written: files
    are replaced atomically.
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
    """The value of a task. Raises UserError if its nodes were lost too often, and the function's
    own error.

    passed_on: Ray errors that the caller handles.
    """
    import ray
    from ray.exceptions import LocalRayletDiedError, RayError, RayTaskError

    try:
        value, error = pickle.loads(ray.get(result))
    except passed_on:
        raise
    except RayTaskError as failed:  # raised before the function was called
        raise UserError(f"--ray: a node cannot run the tasks: {ray_reason(failed)}") from failed
    except LocalRayletDiedError as lost:
        raise UserError(f"--ray: {HEAD_LOST}") from lost
    except RayError as lost:
        raise UserError(
            f"--ray: a task was lost {RETRIES + 1} times ({type(lost).__name__}); if memory ran "
            "out, use fewer tasks at once (data.prepare_workers). The same command goes on from "
            "what is on disk"
        ) from lost
    if error is not None:
        raise error
    return value


# ---- connecting --------------------------------------------------------------------------------


def check_address(address: str) -> None:
    """Raise UserError for an invalid address. The message omits it, as it may hold a password."""
    if find_spec("ray") is None:
        raise UserError(
            "--ray needs the package ray, which is not installed: uv sync --extra ray, or "
            "install the wheel with [ray]"
        )
    if address not in (LOCAL, "auto") and not HOST_PORT.fullmatch(address):
        raise UserError(
            "--ray: expected HOST:PORT of the head node, auto or local; the command itself runs on "
            "a node of the cluster"
        )


def connect_to_ray(address: str, show: bool) -> None:
    """Connect this process to the cluster. Raises UserError if no cluster answers."""
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
    """Raise UserError if no cluster answers. Ray itself would wait two minutes, then end the
    process."""
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
    """The last line of an error's message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
