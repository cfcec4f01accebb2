"""JAX's coordination service in a process of its own, a child of process 0.

JAX starts it inside process 0. There it dies with process 0, and every other process aborts with a
C++ stack trace before it can say who is gone. Here it outlives process 0 for as long as the others
need to notice: the child ends `linger` seconds after its standard input is closed, or after one
second when "done" was written there.
"""

import subprocess
import sys
import threading
import time
from typing import IO

from jaxtrain.settings import UserError

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
