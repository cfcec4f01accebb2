"""What tests have of the machine: ports that no other worker takes, a clock to put forward."""

import itertools
import os
import socket
import time
from concurrent.futures import Future
from contextlib import suppress

LONG = 120.0  # seconds that nothing takes, however loaded the machine: a wait that ends when it may

# Below the ports that the system hands out by itself; each process of tests begins elsewhere.
PORTS = itertools.cycle(range(12_000, 30_000))
PORTS = itertools.islice(PORTS, os.getpid() * 89 % 18_000, None)


def free_port() -> int:
    """A port of localhost that nobody listens at, another each time."""
    for port in PORTS:
        with suppress(OSError), socket.create_server(("localhost", port)):
            return port
    raise AssertionError("cycles")


class Clock:
    """In place of a module's `time`: the machine's, and `ahead` seconds more."""

    sleep = staticmethod(time.sleep)

    def __init__(self):
        self.ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


class HereExecutor:
    """In place of a pool of processes: what is submitted runs here, at once."""

    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, work, *args):
        future = Future()
        future.set_result(work(*args))
        return future
