"""Bounded LRU cache of remote blocks in a local folder, shared by the processes of a host.

A block is a file that is written atomically; its modification time is its last use. A process that
fetches a block holds the lock of its name, so that the other processes wait and then find it.
"""

import fcntl
import os
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from jaxtrain.storage.disk import disk_full

LOCKS = 256  # lock files, over which the names of blocks are hashed
FULL = 0.95  # fraction of max_bytes that is left after an eviction
TRIES = 3  # fetches of a block whose checksum is wrong


class Changed(Exception):
    """A block has a wrong checksum at every fetch."""


class BlockCache:
    """Cached blocks of all stores of a host; each is named FOLDER/NAME.

    If the disk is full or the folder cannot be written, blocks stay in memory, and one line on
    stderr reports it.
    """

    def __init__(self, folder: Path, max_bytes: int):
        self.folder, self.max_bytes = folder, max_bytes
        self._verified: set[str] = set()  # by this process
        self._said = False
        self._guard = threading.Lock()

    def read(
        self, name: str, size: int, crc32: str, fetch: Callable[[], bytes]
    ) -> tuple[np.ndarray, bool]:
        """Return a block, uint8 [size], and whether it is a file. A missing block is fetched.

        Raises Changed if the fetched bytes have another checksum.
        """
        found = self._mapped(name, size, crc32)
        if found is not None:
            return found, True
        try:
            with self._locked(f"{zlib.crc32(name.encode()) % LOCKS:03d}"):
                found = self._mapped(name, size, crc32)  # another process may have fetched it
                if found is not None:
                    return found, True
                data = self._fetched(name, crc32, fetch)
                self._keep(name, data)
        except OSError as error:
            self._say(error)
            return np.frombuffer(self._fetched(name, crc32, fetch), np.uint8), False
        found = self._mapped(name, size, crc32)
        return (np.frombuffer(data, np.uint8), False) if found is None else (found, True)

    def touch(self, name: str) -> bool:
        """Mark a block as just used. Returns False if it is not cached."""
        with suppress(OSError):
            os.utime(self.folder / name)
            return True
        return False

    def entries(self) -> list[tuple[float, int, Path]]:
        """(last use, bytes, path) of every block."""
        found = []
        with os.scandir(self.folder) as stores:
            folders = [entry.path for entry in stores if entry.is_dir() and entry.name != "locks"]
        for folder in folders:
            with os.scandir(folder) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):  # another process has removed it
                        status = entry.stat()
                        found.append((status.st_mtime, status.st_size, Path(entry.path)))
        return found

    def _mapped(self, name: str, size: int, crc32: str) -> np.ndarray | None:
        path = self.folder / name
        try:
            found = np.memmap(path, np.uint8, "r")
        except (OSError, ValueError):  # not there, or empty
            return None
        if name not in self._verified and (len(found) != size or crc32_of(found) != crc32):
            path.unlink(missing_ok=True)
            return None
        self._verified.add(name)
        self.touch(name)
        return found

    def _fetched(self, name: str, crc32: str, fetch: Callable[[], bytes]) -> bytes:
        for _ in range(TRIES):
            data = fetch()
            if crc32_of(data) == crc32:
                return data
        raise Changed(name)

    def _keep(self, name: str, data: bytes) -> None:
        """Write a block. If the disk is full, evict more blocks and try again."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
        self._make_room(len(data), self.max_bytes)
        try:
            part.write_bytes(data)
            part.replace(path)
        except OSError as error:
            part.unlink(missing_ok=True)
            if disk_full(error) is None:
                raise
            used = sum(size for _, size, _ in self.entries())
            self._make_room(len(data), used // 2, forced=True)
            try:
                part.write_bytes(data)
                part.replace(path)
            except OSError:
                part.unlink(missing_ok=True)
                raise

    def _make_room(self, size: int, limit: int, forced: bool = False) -> None:
        """Evict the least recently used blocks until `size` more bytes stay within `limit`. The
        file `bytes` has the total of all blocks, counted anew whenever it exceeds `limit`."""
        with self._locked("bytes"):
            note = self.folder / "bytes"
            try:
                total = int(note.read_text()) + size
            except (OSError, ValueError):  # the first block, or the disk was full
                total = limit + 1
            if total > limit or forced:
                total = self._remove_oldest(size, limit, forced)
            note.write_text(str(total))

    def _remove_oldest(self, size: int, limit: int, forced: bool) -> int:
        """Evict the oldest blocks. Returns the bytes that are then cached, `size` included."""
        blocks = self.entries()
        total = sum(bytes for _, bytes, _ in blocks) + size
        wanted = FULL * limit if forced or total > limit else limit
        for _, bytes, path in sorted(blocks):
            if total <= wanted:
                break
            path.unlink(missing_ok=True)
            total -= bytes
        return total

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        folder = self.folder / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / name).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _say(self, error: OSError) -> None:
        with self._guard:
            said, self._said = self._said, True
        if not said:
            print(
                f"data.local_cache: {self.folder} cannot be written ({error.strerror or error}): "
                "blocks stay in memory and are fetched again when they are needed again",
                file=sys.stderr,
                flush=True,
            )


def crc32_of(data: bytes | np.ndarray) -> str:
    return f"{zlib.crc32(data):08x}"
