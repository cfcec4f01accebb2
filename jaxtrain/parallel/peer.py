"""One TCP connection between two processes of a job: JSON objects, a line each."""

import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

PATIENCE = 5.0  # seconds after which a wait is told

Message = dict[str, Any]


class Peer:
    """The other end of a connection."""

    def __init__(self, link: socket.socket):
        self.link, self.index, self.host = link, 0, "?"
        self.buffer = b""
        self.heard = time.monotonic()  # when it last sent something
        self.done = False  # it has said goodbye
        self.sending = threading.Lock()

    def send(self, message: Message) -> None:
        with self.sending, suppress(OSError):  # that it is gone shows where it is read
            self.link.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Message] | None:
        """What has come in; None at the end of the connection."""
        try:
            data = self.link.recv(1 << 16)
        except OSError:
            return None
        if not data:
            return None
        self.heard = time.monotonic()
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]


def first_line(peer: Peer) -> Message | None:
    """The first message of a connection; None if what comes is none."""
    try:
        while True:
            messages = peer.receive()
            if messages is None:
                return None
            if messages:
                return messages[0] if isinstance(messages[0], dict) else None
    except ValueError:
        return None


@contextmanager
def said_late(what: Callable[[], str]) -> Iterator[None]:
    """One line on stderr, what(), if what is done inside takes longer than PATIENCE.

    From a thread: looking up a name, or a firewall, may hold a single attempt for a minute.
    """
    timer = threading.Timer(PATIENCE, lambda: print(what(), file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
