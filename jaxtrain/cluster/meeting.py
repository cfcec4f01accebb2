"""Rendezvous of a job's processes: each proves to process 0 that it has the job's secret.

These are our only sockets. JAX's coordination service takes over after the rendezvous. It cannot do
this part (measured with jax 0.11.2): its client's `connect()` aborts with a C++ stack trace if
another process is missing, its key-value store does not answer before `connect()` has returned, its
callback for a lost process ends in std::bad_cast, and it has no shared secret. A connection stays
open until JAX's clients are connected, so that a death in between is noticed as well.
"""

import errno
import json
import queue
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from jaxtrain.cluster.secret import Secret, is_loopback, is_right, key_of, mac, nonces
from jaxtrain.settings import UserError

RETRY = 0.2  # seconds between attempts to connect
PROVING = 5.0  # seconds for a connection to authenticate
MOST = 256  # connections that authenticate concurrently
LINE_BYTES = 4096

Message = dict[str, str | int]


class Link:
    """A connection between process 0 and another process. A message is a line: HMAC and JSON.

    first: whether this end is process 0. index, host: of the other end.
    """

    def __init__(self, link: socket.socket, key: bytes, *, first: bool):
        self.socket, self.key, self.index, self.host = link, key, 0, "?"
        self.ends = (b"0", b"1") if first else (b"1", b"0")  # ours, theirs
        self.sent = self.taken = 0  # messages
        self.buffer = b""

    def send(self, message: Mapping[str, str | int]) -> None:
        text = json.dumps(message).encode()
        with suppress(OSError):  # a lost connection is noticed by `receive`
            proof = mac(self.key, self.ends[0], self.sent, text)
            self.sent += 1
            self.socket.sendall(proof + b" " + text + b"\n")

    def receive(self, until: float) -> Message | None:
        """The next message; None if the connection is closed, late, or the HMAC is wrong."""
        try:
            while b"\n" not in self.buffer and len(self.buffer) <= LINE_BYTES:
                self.socket.settimeout(max(0.001, until - time.monotonic()))
                data = self.socket.recv(LINE_BYTES)
                if not data:
                    return None
                self.buffer += data
        except OSError:
            return None
        line, _, self.buffer = self.buffer.partition(b"\n")
        proof, _, text = line.partition(b" ")
        wanted = mac(self.key, self.ends[1], self.taken, text)
        if len(line) > LINE_BYTES or not is_right(proof, wanted):
            return None
        self.taken += 1
        return json.loads(text)


def listen(host: str, port: int, until: float) -> socket.socket:
    """Process 0's server socket: on loopback if `host` is a loopback address, else on all
    interfaces.

    Waits while the port is taken: the service of a job that has just ended frees it after seconds.
    """
    six = socket.has_dualstack_ipv6()
    while True:
        try:
            if is_loopback(host):
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                return socket.create_server((host, port), family=family)
            family = socket.AF_INET6 if six else socket.AF_INET
            return socket.create_server(("", port), family=family, dualstack_ipv6=six)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() + RETRY > until:
                why = error.strerror
                raise UserError(f"process 0 cannot listen on port {port}: {why}") from None
        time.sleep(RETRY)


def proved(server: socket.socket, secret: bytes, until: float) -> Iterator[tuple[Link, Message]]:
    """Yield each authenticated connection with its first message, until `until`.

    Each connection has its own thread: an unauthenticated client must not block the job.
    """
    found: queue.SimpleQueue[tuple[Link, Message]] = queue.SimpleQueue()
    refused: set[str] = set()
    proving: list[threading.Thread] = []

    def admit(link: socket.socket, name: str) -> None:
        end = time.monotonic() + PROVING
        if both := nonces(link, end):
            peer = Link(link, key_of(secret, *both), first=True)
            hello = peer.receive(end)
            if hello is not None and hello.keys() >= {"process", "of", "host"}:
                return found.put((peer, hello))
        link.close()
        if name not in refused:
            refused.add(name)
            line = f"refused  a connection from {name}, which does not know the secret of the job"
            print(line, file=sys.stderr, flush=True)

    while time.monotonic() < until:
        with suppress(queue.Empty):
            yield found.get_nowait()
            continue
        proving = [thread for thread in proving if thread.is_alive()]
        server.settimeout(max(0.01, min(0.05, until - time.monotonic())))
        try:
            if len(proving) >= MOST:
                raise TimeoutError
            link, (name, *_) = server.accept()
        except OSError:  # no connection, or MOST connections are authenticating
            time.sleep(0.01)
            continue
        proving.append(threading.Thread(target=admit, args=(link, name), daemon=True))
        proving[-1].start()


@dataclass(frozen=True)
class Trouble:
    """Why an attempt to connect failed. greeted: process 0 answered, so the secret is wrong or
    missing."""

    why: str
    greeted: bool = False


def introduce(
    address: tuple[str, int], hello: Message, until: float, secret: Secret
) -> tuple[Link, Message] | Trouble:
    """Connect to process 0, and authenticate in both directions.

    Returns the connection and process 0's answer, or a Trouble that may be temporary: the secret's
    file may still be an earlier job's. Raises UserError if the given secret is refused.
    """
    try:
        link = socket.create_connection(address, max(0.1, until - time.monotonic()))
    except OSError as error:
        return Trouble(error.strerror or str(error))
    both, known = nonces(link, min(until, time.monotonic() + PROVING)), secret.read()
    if both is None or known is None:
        link.close()
        if both is None:
            return Trouble("another program answers at this address")
        why = f"there is no secret of the job in {secret.file.parent}; {secret.advice()}"
        return Trouble(why, greeted=True)
    peer = Link(link, key_of(known, both[1], both[0]), first=False)
    peer.send(hello)
    reply = peer.receive(until + PROVING)
    if reply is not None:
        return peer, reply
    link.close()
    if secret.given:
        raise UserError(
            f"process 0 did not accept the secret of process {hello['process']}; {secret.advice()}"
        )
    why = f"it did not accept the secret in {secret.file.parent}; {secret.advice()}"
    return Trouble(why, greeted=True)


def watch(links: list[Link], done: threading.Event, fail: Callable[[str], None]) -> None:
    """Wait until each link has sent {"connected": ...}. Call fail(why) if one closes or fails.

    done: set once this end has sent its own message, so that the links can be closed.
    """
    with selectors.DefaultSelector() as ready:
        for link in links:
            ready.register(link.socket, selectors.EVENT_READ, link)
        while ready.get_map():
            for key, _ in ready.select():
                link = key.data
                ready.unregister(link.socket)
                message = link.receive(time.monotonic() + PROVING)
                if message is None:
                    message = {
                        "failed": f"process {link.index} ({link.host}) has died at the start"
                    }
                if "failed" in message:
                    return fail(str(message["failed"]))
    done.wait()
    for link in links:
        link.socket.close()
