"""Optimizer states in files: one file per array, read and written in parts by threads.

The files are scratch space for one process of one run at a time. A checkpoint has a copy of them.
"""

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.settings import UserError, read_object
from jaxtrain.storage.disk import write_json

THREADS = 8  # concurrent parts, enough that threads waiting for the device do not block disk I/O
LIST = "states.json"  # index of a copy: path of a state -> {file, shape, dtype}
Rows = tuple[int, int]  # [first, last)


class StateFiles:
    """Arrays in files of a folder, by their paths in the optimizer's state.

    Call `open` before use. Raises UserError if the folder is in use or not writable, if the disk is
    full, or if a file was truncated.
    """

    def __init__(self, folder: Path, arrays: Mapping[str, jax.ShapeDtypeStruct]):
        self.folder, self.arrays = folder, dict(arrays)
        self.names = {key: f"{n:04d}.state" for n, key in enumerate(self.arrays)}
        self.nbytes = sum(x.size * x.dtype.itemsize for x in self.arrays.values())
        self.descriptors: dict[str, int] = {}
        self.reads: dict[int, Future[list[np.ndarray]]] = {}  # by the part's index in the step
        self.writes: dict[int, Future[None]] = {}
        self._locked: int | None = None  # descriptor of the lock file

    # ---- the folder ------------------------------------------------------------------------------

    def open(self) -> None:
        """Lock the folder and allocate its files; files left by another run are deleted."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock()
            for old in self.folder.glob("[0-9][0-9][0-9][0-9].state"):  # keep the user's own files
                old.unlink()
            for key, x in self.arrays.items():
                file = os.open(self.folder / self.names[key], os.O_RDWR | os.O_CREAT, 0o644)
                self.descriptors[key] = file
                os.posix_fallocate(file, 0, x.size * x.dtype.itemsize)
        except OSError as error:
            self.close()
            raise self._explained(error) from error
        except UserError:
            self.close()
            raise
        self.pool = ThreadPoolExecutor(THREADS, thread_name_prefix="states")

    def _lock(self) -> None:
        """Lock the folder for this run. UserError if another run holds the lock."""
        path = self.folder / "lock"
        while self._locked is None:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(file, 20, 0).decode() or "unknown"
                os.close(file)
                raise UserError(
                    f"optim.offload.directory: {self.folder} holds the states of another run "
                    f"(process {holder}): name a folder for this run alone"
                ) from None
            # A run that ends removes its lock file; then this lock would be on a deleted file, and
            # a third run could lock the new one.
            if is_file_at(file, path):
                self._locked = file
            else:
                os.close(file)
        os.ftruncate(self._locked, 0)
        os.pwrite(self._locked, str(os.getpid()).encode(), 0)

    def close(self) -> None:
        """Wait for all reads and writes, and remove the files."""
        for future in [*self.reads.values(), *self.writes.values()]:
            with suppress(Exception):
                future.result()
        if self.descriptors and hasattr(self, "pool"):
            self.pool.shutdown()
        for key, file in self.descriptors.items():
            os.close(file)
            (self.folder / self.names[key]).unlink(missing_ok=True)
        self.descriptors, self.reads, self.writes = {}, {}, {}
        if self._locked is not None:
            (self.folder / "lock").unlink(missing_ok=True)
            os.close(self._locked)
            self._locked = None
            with suppress(OSError):
                self.folder.rmdir()

    def _explained(self, error: OSError) -> UserError:
        what = f"optim.offload.directory: {self.folder}: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            what += f"; the states take {self.nbytes:,} bytes, and a checkpoint as many again"
        return UserError(f"{what}; name a folder on a local disk that has room")

    # ---- parts -----------------------------------------------------------------------------------

    def _view(self, key: str, rows: Rows | None) -> tuple[np.ndarray, int]:
        """An empty array for a part, and its offset in the file, in bytes."""
        x = self.arrays[key]
        first, last = rows or (0, x.shape[0])
        row = prod(x.shape[1:]) * x.dtype.itemsize
        return np.empty((last - first, *x.shape[1:]), x.dtype), first * row

    def read(self, key: str, rows: Rows | None = None) -> np.ndarray:
        """Read rows of an array; all of them by default."""
        part, at = self._view(key, rows)
        left = memoryview(part.reshape(-1).view(np.uint8))
        try:
            while left:
                got = os.preadv(self.descriptors[key], [left], at)
                if not got:
                    raise UserError(
                        f"optim.offload.directory: {self.folder / self.names[key]} was cut short "
                        "while the run used it; the same command resumes from the newest checkpoint"
                    )
                left, at = left[got:], at + got
        except OSError as error:
            raise self._explained(error) from error
        return part

    def write(self, key: str, part: np.ndarray, rows: Rows | None = None) -> None:
        """Write these rows of an array to its file."""
        first = rows[0] if rows else 0
        _, at = self._view(key, (first, first))
        left = memoryview(np.ascontiguousarray(part).reshape(-1).view(np.uint8))
        try:
            while left:
                put = os.pwritev(self.descriptors[key], [left], at)
                left, at = left[put:], at + put
        except OSError as error:
            raise self._explained(error) from error

    def prefetch(self, n: int, wanted: Sequence[tuple[str, Rows | None]]) -> None:
        """Start to read part n of a step, after its pending write."""
        if n in self.reads:
            return
        before = self.writes.pop(n, None)

        def work() -> list[np.ndarray]:
            if before is not None:
                before.result()
            return [self.read(key, rows) for key, rows in wanted]

        self.reads[n] = self.pool.submit(work)

    def take(self, n: int) -> tuple[list[np.ndarray], float]:
        """Return part n of a step, which was prefetched, and the seconds spent waiting."""
        begun = time.perf_counter()
        return self.reads.pop(n).result(), time.perf_counter() - begun

    def put(
        self, n: int, wanted: Sequence[tuple[str, Rows | None]], arrays: Sequence[jax.Array]
    ) -> Future[None]:
        """Start to write part n of a step, once the device has computed it."""

        def work() -> None:
            for (key, rows), x in zip(wanted, arrays, strict=True):
                self.write(key, np.asarray(x), rows)

        self.writes[n] = self.pool.submit(work)
        return self.writes[n]

    def settle(self) -> None:
        """Wait for all reads and writes, and discard the prefetched parts. Raises their errors."""
        for future in [*self.reads.values(), *self.writes.values()]:
            future.result()
        self.reads, self.writes = {}, {}

    # ---- checkpoints -----------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Copy all files into a folder, with an index that makes them readable without this run."""
        self.settle()
        listed = {}
        for key, x in self.arrays.items():
            shutil.copyfile(self.folder / self.names[key], folder / self.names[key])
            listed[key] = {"file": self.names[key], "shape": x.shape, "dtype": x.dtype.name}
        write_json(folder / LIST, listed)
        fsync_files(folder, [*self.names.values(), LIST])

    def load(self, key: str, copied: np.ndarray) -> None:
        """Write an array's file from a copy, some rows at a time, in this run's dtype.

        Raises UserError for a copy of another shape.
        """
        x = self.arrays[key]
        if copied.shape != x.shape:
            raise UserError(
                f"the checkpoint has the optimizer state {key} with the shape {copied.shape}, and "
                f"this configuration with {x.shape}"
            )
        rows = max(1, len(copied) * 2**26 // max(1, copied.nbytes))
        for first in range(0, len(copied), rows):
            last = min(first + rows, len(copied))
            self.write(key, copied[first:last].astype(x.dtype, copy=False), (first, last))


def is_file_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one at this path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def fsync_files(folder: Path, names: Iterable[str]) -> None:
    """Flush these files to disk."""
    for name in names:
        file = os.open(folder / name, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def copied_states(folder: Path) -> dict[str, np.ndarray]:
    """Memory-map the arrays copied by `StateFiles.save`; empty if there is no copy."""
    if not (folder / LIST).is_file():
        return {}
    return {
        key: np.memmap(folder / x["file"], jnp.dtype(x["dtype"]), "r", shape=tuple(x["shape"]))
        for key, x in read_object(folder / LIST).items()
    }
