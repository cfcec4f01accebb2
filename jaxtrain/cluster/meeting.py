"""How the connections of a job begin: who knows its secret is let in, strangers are sent away."""

import queue
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

from jaxtrain.cluster.peer import Message, Peer, first_line
from jaxtrain.cluster.secret import Secret, is_loopback, key_of, nonces
from jaxtrain.settings import UserError

PROVING = 5.0  # seconds in which a connection must have shown that it knows the secret
MOST = 256  # connections that may be at it at a time


def listen(host: str, port: int) -> socket.socket:
    """Where process 0 is reached: from this host alone if that is its address, else from all."""
    six = socket.has_dualstack_ipv6()
    try:
        if is_loopback(host):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, port), family=family)
        family = socket.AF_INET6 if six else socket.AF_INET
        return socket.create_server(("", port), family=family, dualstack_ipv6=six)
    except OSError as error:
        raise UserError(f"process 0 cannot listen at port {port}: {error.strerror}") from None


def proved(server: socket.socket, secret: bytes, until: float) -> Iterator[tuple[Peer, Message]]:
    """Who connects and knows the secret, each with its first message, till `until`.

    Each connection has a thread of its own: a stranger at the port must not stop the job.
    """
    found: queue.SimpleQueue[tuple[Peer, Message]] = queue.SimpleQueue()
    refused: set[str] = set()
    proving: list[threading.Thread] = []
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
        except OSError:  # nobody came, or more than there is room for
            time.sleep(0.01)
            continue
        job = lambda link=link, name=name: admit(link, name, secret, found, refused)
        proving.append(threading.Thread(target=job, daemon=True))
        proving[-1].start()


def admit(
    link: socket.socket,
    name: str,
    secret: bytes,
    found: "queue.SimpleQueue[tuple[Peer, Message]]",
    refused: set[str],
) -> None:
    """Put a connection into `found`, or close it, and say so once of each address."""
    until = time.monotonic() + PROVING
    if both := nonces(link, until):
        peer = Peer(link, key_of(secret, *both), first=True)
        hello = first_line(peer, until)
        if hello is not None and hello.keys() >= {"process", "of", "host"}:
            link.settimeout(None)
            return found.put((peer, hello))
    link.close()
    if name not in refused:
        refused.add(name)
        line = f"refused  a connection from {name}, which does not know the secret of the job"
        print(line, file=sys.stderr, flush=True)


def introduce(
    link: socket.socket, hello: Message, until: float, secret: Secret
) -> tuple[Peer, Message] | str:
    """Prove to process 0 that this one knows the secret, and have it do the same.

    Returns its answer, or what is wrong where that may pass: a file may hold an earlier job's
    secret still. Raises UserError for a secret that differs for good.
    """
    both, known = nonces(link, min(until, time.monotonic() + PROVING)), secret.read()
    if both is None:
        return "what answers there is none of this job"
    if known is None:
        return f"there is no secret of the job in {secret.file.parent}; {secret.advice()}"
    ours, theirs = both
    peer = Peer(link, key_of(known, theirs, ours), first=False)
    peer.send(hello)
    reply = first_line(peer, until + PROVING)
    if reply is not None:
        link.settimeout(None)
        return peer, reply
    if secret.given:
        link.close()
        raise UserError(
            f"process 0 did not accept the secret of process {hello['process']}; {secret.advice()}"
        )
    return f"it did not accept the secret in {secret.file.parent}; {secret.advice()}"
