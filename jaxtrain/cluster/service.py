"""JAX's coordination service, in a child process of process 0, and its client.

By default JAX starts the service inside process 0. It then dies with process 0, and every other
process aborts with a C++ stack trace before it can report which process is lost. Our child process
outlives process 0 long enough for the others to notice. It ends `linger` seconds after its standard
input is closed, or after one second if "done" was written there.
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

TRIES = 8  # of a request that the service cancels, within about 15 seconds
FIRST_WAIT = 0.1  # seconds; doubled for every further try
# A process without a heartbeat for `timeout` seconds is not live. The coordinator handles losses:
# `recoverable` keeps the service from ending the other processes itself.
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
    """Start the service. Returns its standard input once it listens at `address`.

    Raises UserError if it cannot listen by `until` (time.monotonic()).
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
            raise UserError(f"JAX's coordination service cannot listen on {address}")
        time.sleep(0.2)


@runtime_checkable
class ServiceClient(Protocol):
    """The used methods of jaxlib's DistributedRuntimeClient. Errors are JaxRuntimeError."""

    def connect(self) -> None: ...
    def shutdown(self) -> None: ...
    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...
    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...
    def key_value_try_get(self, key: str) -> str: ...
    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str: ...
    def get_live_nodes(self, process_ids: Sequence[int]) -> dict[int, int]: ...


class RetryingClient:
    """A client that retries requests which the service has cancelled.

    The service cancels new requests while many are queued, as when 1,024 processes have just
    connected.
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
    """Return the answer to a request; retry with exponential backoff while it is cancelled."""
    for attempt in range(TRIES):
        try:
            return request()
        except jax.errors.JaxRuntimeError as error:
            if attempt + 1 == TRIES or not str(error).startswith("CANCELLED"):
                raise
            time.sleep(FIRST_WAIT * 2**attempt * random.uniform(0.5, 1.5))
    raise AssertionError("unreachable")


def make_client(address: str, index: int, heartbeat_timeout: int, timeout: int) -> RetryingClient:
    """The client of process `index`, not yet connected. Both timeouts are in seconds."""
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
