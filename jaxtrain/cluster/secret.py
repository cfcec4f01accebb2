"""Authentication of a job's processes: all share a secret, and prove it without sending it.

Each end of a connection first sends a nonce of 32 random bytes. Both nonces and the secret give the
key of this connection. Every message carries an HMAC-SHA256 under that key, of its sender, number
and content. Forged messages, and replays from this or another connection, are rejected.

Nothing is encrypted. Only the rendezvous is authenticated: the ports of JAX's service, XLA and NCCL
have no such secret (SECURITY.md).
"""

import hashlib
import hmac
import os
import re
import secrets
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from jaxtrain.settings import UserError

VARIABLE = "JAXTRAIN_SECRET"
LEAST = 16  # characters of a secret
GREETING = re.compile(rb"jaxtrain ([0-9a-f]{64})\n")
GREETING_BYTES = 74  # an unauthenticated peer may only send this and one line


class Secret:
    """The secret of a job: $JAXTRAIN_SECRET, or a file that only this user can read.

    folder: shared by all processes. The file exists only during the rendezvous: process 0 writes
    it, with a new secret each time.
    """

    def __init__(self, folder: Path, address: str, environment: Mapping[str, str] = os.environ):
        self.given = environment.get(VARIABLE, "").encode()
        if 0 < len(self.given) < LEAST:
            raise UserError(
                f"{VARIABLE} has {len(self.given)} characters; it needs at least {LEAST}"
            )
        self.file = folder / f".secret-{re.sub(r'[^0-9A-Za-z.]', '-', address)}"

    def make(self) -> bytes:
        """In process 0: create the secret before the others can connect."""
        if self.given:
            return self.given
        made = secrets.token_hex(32).encode()
        part = self.file.with_name(f"{self.file.name}.{secrets.token_hex(4)}")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(made)
            part.replace(self.file)
        except OSError as error:
            raise UserError(
                f"{self.file.parent} cannot be written ({error.strerror}), where the processes "
                f"look for the secret of the job; set {VARIABLE} for all of them"
            ) from error
        return made

    def read(self) -> bytes | None:
        """In the other processes: read the secret; None while there is none."""
        if self.given:
            return self.given
        try:
            return self.file.read_bytes() or None
        except OSError:
            return None

    def forget(self) -> None:
        """In process 0: delete the file after the rendezvous, successful or not."""
        if not self.given:
            self.file.unlink(missing_ok=True)

    def advice(self) -> str:
        """Advice to the user if two processes have different secrets."""
        if self.given:
            return f"give all processes the same {VARIABLE}"
        return f"all processes must share that folder, or have the same {VARIABLE}"


def is_loopback(host: str) -> bool:
    """Whether a host is a loopback address, by its name alone: other hosts may resolve names
    differently."""
    return host == "localhost" or host == "::1" or re.fullmatch(r"127(\.\d+){3}", host) is not None


def nonces(link: socket.socket, until: float) -> tuple[bytes, bytes] | None:
    """Send a nonce and read the peer's. Returns (ours, theirs); None if the peer sends none."""
    ours = secrets.token_hex(32).encode()
    data = b""
    try:
        link.sendall(b"jaxtrain " + ours + b"\n")
        while len(data) < GREETING_BYTES and b"jaxtrain "[: len(data)] == data[:9]:
            link.settimeout(max(0.01, until - time.monotonic()))
            more = link.recv(GREETING_BYTES - len(data))
            if not more or time.monotonic() > until:
                return None
            data += more
    except OSError:
        return None
    found = GREETING.fullmatch(data)
    return (ours, found[1]) if found else None


def key_of(secret: bytes, first: bytes, other: bytes) -> bytes:
    """The key of a connection, from the nonces of process 0 (`first`) and the other process."""
    return hmac.digest(secret, b"jaxtrain " + first + b" " + other, "sha256")


def mac(key: bytes, end: bytes, number: int, text: bytes) -> bytes:
    """The HMAC of message `number` from one end of a connection, in hexadecimal."""
    data = b"%s %d %s" % (end, number, text)
    return hmac.new(key, data, hashlib.sha256).hexdigest().encode()


def is_right(given: bytes, expected: bytes) -> bool:
    """Whether two MACs are equal, compared in constant time."""
    return hmac.compare_digest(given, expected)
