"""Who may take part in a job: all its processes know one secret, and prove it without sending it.

Each end of a connection first sends 32 random bytes, its nonce; from both and the secret follows
the key of this one connection. Every message then carries an HMAC-SHA256 under that key of who
sends it, of its number and of its text: what somebody else has made, or recorded here or in another
connection, is no message.

Nothing is encrypted, and it is about the meeting alone: the ports of JAX's service, XLA and NCCL
know no such secret (SECURITY.md).
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
LEAST = 16  # characters of it
GREETING = re.compile(rb"jaxtrain ([0-9a-f]{64})\n")
GREETING_BYTES = 74  # all that is read of a peer before it has proved anything, and then a line


class Secret:
    """The secret of a job: $JAXTRAIN_SECRET, or a file that only this user may read.

    folder: one that all processes share. Process 0 writes the file for the time in which they
    meet, and a new secret each time.
    """

    def __init__(self, folder: Path, address: str, environment: Mapping[str, str] = os.environ):
        self.given = environment.get(VARIABLE, "").encode()
        if 0 < len(self.given) < LEAST:
            raise UserError(f"{VARIABLE} has {len(self.given)} characters, give it {LEAST} or more")
        self.file = folder / f".secret-{re.sub(r'[^0-9A-Za-z.]', '-', address)}"

    def make(self) -> bytes:
        """By process 0, before the others can reach it."""
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
                f"would find the secret of the job; set {VARIABLE} for all of them"
            ) from error
        return made

    def read(self) -> bytes | None:
        """By the others; None while there is none."""
        if self.given:
            return self.given
        try:
            return self.file.read_bytes() or None
        except OSError:
            return None

    def forget(self) -> None:
        """By process 0, when all have met or some did not come."""
        if not self.given:
            self.file.unlink(missing_ok=True)

    def advice(self) -> str:
        """What is wrong where two processes do not know the same."""
        if self.given:
            return f"give all processes the same {VARIABLE}"
        return f"all processes must share that folder, or have the same {VARIABLE}"


def is_loopback(host: str) -> bool:
    """Whether an address is this host's own, by its name: what others resolve may differ."""
    return host == "localhost" or host == "::1" or re.fullmatch(r"127(\.\d+){3}", host) is not None


def nonces(link: socket.socket, until: float) -> tuple[bytes, bytes] | None:
    """Send a nonce and read the other's: (ours, theirs); None if what comes is none."""
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
    """The key of a connection, from the nonces of process 0 and of the other."""
    return hmac.digest(secret, b"jaxtrain " + first + b" " + other, "sha256")


def mac(key: bytes, end: bytes, number: int, text: bytes) -> bytes:
    """Of message `number` of one end of a connection, hexadecimal."""
    data = b"%s %d %s" % (end, number, text)
    return hmac.new(key, data, hashlib.sha256).hexdigest().encode()


def is_right(given: bytes, expected: bytes) -> bool:
    """Whether two MACs are the same, in a time that does not tell where they differ."""
    return hmac.compare_digest(given, expected)
