"""JAX's coordination service, in a process of its own that is a child of process 0; its client.

JAX starts it inside process 0. There it dies with process 0, and every other process aborts with a
C++ stack trace before it can say who is gone. Here it outlives process 0 for as long as the others
need to notice: the child ends `linger` seconds after its standard input is closed, or after one
second when "done" was written there.
"""

import importlib
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO, Protocol, runtime_checkable

import jax

from jaxtrain.settings import UserError

TRIES = 8  # of a request that the service refuses, in 15 seconds or so
FIRST_WAIT = 0.1  # seconds; doubled for every further try
# A process without a heartbeat for so long is not live. Losses are noticed by the coordinator:
# `recoverable` keeps the service from ending the other processes by itself.
PROGRAM = """
import sys, time
from jaxlib import _jax
address, count, timeout, linger = sys.argv[1:]
service = _jax.get_distributed_runtime_service(
    address, int(count), heartbeat_timeout=int(timeout), shutdown_timeout=1, recoverable=True)
print("ready", flush=True)
done = sys.stdin.read()
time.sleep(1 if done else float(linger))
"""


def start_service(
    address: str, count: int, heartbeat_timeout: int, linger: float, until: float
) -> IO[bytes]:
    """The service's standard input, once it listens at `address`.

    Raises UserError if it cannot by `until` (monotonic).
    count: processes of the job. heartbeat_timeout, linger: seconds.
    """
    words = [sys.executable, "-c", PROGRAM, address, str(count), str(heartbeat_timeout)]
    while True:
        service = subprocess.Popen(
            [*words, str(linger)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        assert service.stdin is not None and service.stdout is not None
        with service.stdout:
            ready = service.stdout.readline()
        if ready:
            threading.Thread(target=service.wait, daemon=True).start()
            return service.stdin
        service.stdin.close()
        service.wait()
        if time.monotonic() > until:
            raise UserError(f"JAX's coordination service cannot listen at {address}")
        time.sleep(0.2)


@runtime_checkable
class ServiceClient(Protocol):
    """What is used of jaxlib's DistributedRuntimeClient. Errors are JaxRuntimeError."""

    def connect(self) -> None: ...
    def shutdown(self) -> None: ...
    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...
    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...
    def key_value_try_get(self, key: str) -> str: ...
    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str: ...
    def get_live_nodes(self, process_ids: Sequence[int]) -> dict[int, int]: ...


class RetryingClient:
    """A client whose requests are sent again when the service has refused them.

    It cancels new requests while many wait, as when 1,024 processes have just met.
    """

    def __init__(self, client: ServiceClient):
        self.client = client

    def connect(self) -> None:
        self.client.connect()

    def shutdown(self) -> None:
        self.client.shutdown()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        resent(lambda: self.client.key_value_set(key, value, allow_overwrite))

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        return resent(lambda: self.client.key_value_dir_get(key))

    def key_value_try_get(self, key: str) -> str:
        return resent(lambda: self.client.key_value_try_get(key))

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        return resent(lambda: self.client.blocking_key_value_get(key, timeout_in_ms))

    def get_live_nodes(self, process_ids: Sequence[int]) -> dict[int, int]:
        return resent(lambda: self.client.get_live_nodes(process_ids))


def resent[T](request: Callable[[], T]) -> T:
    """The answer to a request, which is sent again, ever later, when it was cancelled."""
    for attempt in range(TRIES):
        try:
            return request()
        except jax.errors.JaxRuntimeError as error:
            if attempt + 1 == TRIES or not str(error).startswith("CANCELLED"):
                raise
            time.sleep(FIRST_WAIT * 2**attempt * random.uniform(0.5, 1.5))
    raise AssertionError("unreachable")


def make_client(address: str, index: int, heartbeat_timeout: int, timeout: int) -> RetryingClient:
    """The client of process `index`; not connected yet. Both timeouts are in seconds."""
    client = importlib.import_module("jaxlib._jax").get_distributed_runtime_client(
        address,
        index,
        init_timeout=timeout,
        heartbeat_timeout=heartbeat_timeout,
        shutdown_timeout=1,
        shutdown_on_destruction=False,
        use_compression=True,
    )
    return RetryingClient(client)
