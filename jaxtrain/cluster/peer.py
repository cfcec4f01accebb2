"""One TCP connection between two processes of a job: JSON objects, a line each, with its HMAC."""

import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from jaxtrain.cluster.secret import HELLO_BYTES, is_right, mac

PATIENCE = 5.0  # seconds after which a wait is told
LINE_BYTES = 1 << 26  # of a message: a configuration, the description of the data

Message = dict[str, Any]


class Peer:
    """The other end of a connection, under the key of `parallel.secret`.

    first: whether this end is process 0's.
    """

    def __init__(self, link: socket.socket, key: bytes, *, first: bool):
        self.link, self.index, self.host = link, 0, "?"
        self.key, self.ends = key, (b"0", b"1") if first else (b"1", b"0")  # ours, theirs
        self.sent = self.taken = 0  # messages
        self.limit = HELLO_BYTES  # of a line; more once it has proved that it knows the secret
        self.buffer = b""
        self.heard = time.monotonic()  # when it last sent something
        self.done = False  # it has said goodbye
        self.sending = threading.Lock()

    def send(self, message: Message) -> None:
        text = json.dumps(message).encode()
        with self.sending, suppress(OSError):  # that it is gone shows where it is read
            proof = mac(self.key, self.ends[0], self.sent, text)
            self.sent += 1
            self.link.sendall(proof + b" " + text + b"\n")

    def receive(self) -> list[Message] | None:
        """What has come in; None at the end of the connection, and of what can be trusted."""
        try:
            data = self.link.recv(1 << 16)
        except OSError:
            return None
        if not data:
            return None
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        messages = [self._opened(line) for line in lines]
        if None in messages or len(self.buffer) > self.limit:
            return None
        self.heard = time.monotonic()
        return [message for message in messages if message is not None]

    def _opened(self, line: bytes) -> Message | None:
        """The message of a line; None if the other end has not written it, or not now."""
        proof, _, text = line.partition(b" ")
        wanted = mac(self.key, self.ends[1], self.taken, text)
        if len(line) > self.limit or not is_right(proof, wanted):
            return None
        self.taken += 1
        self.limit = LINE_BYTES
        message = json.loads(text)
        return message if isinstance(message, dict) else None


def first_line(peer: Peer, until: float) -> Message | None:
    """The first message of a connection; None if what comes till then is none."""
    while (left := until - time.monotonic()) > 0:
        peer.link.settimeout(left)
        messages = peer.receive()
        if messages is None:
            return None
        if messages:
            return messages[0]
    return None


@contextmanager
def warn_if_slow(what: Callable[[], str]) -> Iterator[None]:
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
