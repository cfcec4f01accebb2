"""A folder at a URL: an object store, or any other file system of fsspec.

Transient errors are retried with exponential backoff. Error messages contain no secrets.
"""

import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import fsspec

from jaxtrain.settings import UserError
from jaxtrain.storage import checksums as sums
from jaxtrain.storage.disk import disk_full, write_whole

TRIES = 6  # for a run's own files: if all fail, the next upload tries again
DATA_TRIES = 8  # for data that training waits for: about a minute
FIRST_WAIT = 0.5  # seconds; doubled for every further try
READS = 3  # downloads of a file whose checksum differs: the transfer may have damaged it
THREADS = 8  # concurrent transfers
# Errors that a retry would not help. All others are treated as transient.
FINAL = (NotADirectoryError, IsADirectoryError, ImportError, TypeError, AttributeError)
FINAL += (NotImplementedError, UserError)
NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound")
SKEWED = "RequestTimeTooSkewed"  # S3's error code if the clocks differ by more than 15 minutes
CHAIN = re.compile(r"::(/|[^:/]+://)")  # chained file systems, as zip://*.jsonl::s3://bucket/a.zip
PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub"}
PACKAGES |= {"az": "adlfs", "abfs": "adlfs", "ssh": "paramiko", "sftp": "paramiko"}


class Damaged(Exception):
    """A file differs from what was written."""


def is_local(url: str) -> bool:
    return url.startswith(("file://", "local://")) or "://" not in url


def open_filesystem(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, and the URL's path in it."""
    try:
        if CHAIN.search(url):
            return fsspec.url_to_fs(url)
        # fsspec takes any :: for a chain. A NUL stands in for it, as no file name contains one.
        filesystem, path = fsspec.url_to_fs(url.replace("::", "\0"))
        return filesystem, path.replace("\0", "::")
    except ImportError as error:
        package = PACKAGES.get(url.split("://")[0])
        hint = f"{package} is not installed: pip install {package}" if package else str(error)
        raise UserError(f"cannot open {url}: {hint}") from error
    except ValueError as error:
        raise UserError(f"cannot open {url}: {error}") from error


def said_by(error: BaseException) -> str:
    """An error's message as one short line, without passwords or signed queries of URLs in it."""
    first = (str(error).strip().splitlines() or [""])[0]
    plain = re.sub(r"//[^/\s@]*@", "//", first)
    return re.sub(r"(https?://[^\s?\"']*)\?[^\s\"']*", r"\1", plain)[:200]


def reason_of(error: BaseException) -> str:
    """An error's type and its message, as in `said_by`."""
    return ": ".join(filter(None, (type(error).__name__, said_by(error))))


def refuses(error: BaseException) -> bool:
    """Whether an error is about credentials."""
    return isinstance(error, PermissionError) or type(error).__name__ in NO_CREDENTIALS


def tried[T](
    action: Callable[[], T],
    tries: int = TRIES,
    say: Callable[[int, float, Exception], None] = lambda *_: None,
) -> T:
    """Return the value of `action`, which is retried after transient errors.

    say: called with the number of the next try, the seconds until then, and the error.
    """
    for attempt in range(1, tries + 1):
        try:
            return action()
        except (FileNotFoundError, *FINAL):
            raise
        except Exception as error:
            if attempt == tries or refuses(error) or disk_full(error):
                raise
            wait = FIRST_WAIT * 2 ** (attempt - 1) * random.uniform(0.75, 1.25)
            say(attempt + 1, wait, error)
            time.sleep(wait)
    raise AssertionError("unreachable")


def retried[T](
    url: str,
    action: Callable[[], T],
    what: str = "failed",
    access: Literal["read", "write"] = "read",
) -> T:
    """Retry an action on data, as `tried`, and print a line to stderr before each wait. The line
    contains `what`: what happened to the file. Raises UserError if the file does not exist, if
    `access` is denied, and after the last try."""

    def say(number: int, wait: float, error: Exception) -> None:
        again = f"attempt {number} of {DATA_TRIES} in {wait:.1f} s"
        print(f"{url}: {what} ({reason_of(error)}), {again}", file=sys.stderr, flush=True)

    try:
        return tried(action, DATA_TRIES, say)
    except FileNotFoundError as error:
        raise UserError(f"there is no file or folder {url}") from error
    except FINAL:
        raise
    except Exception as error:
        if disk_full(error):
            raise
        if refuses(error):
            refused = "may not be read" if access == "read" else "may not be written"
            what = "clock of this host" if SKEWED in repr(error.__cause__) else "credentials"
            line = f"{url} {refused}, check the {what}: {said_by(error)}"
        else:
            line = f"cannot {access} {url}: {DATA_TRIES} tries failed, last {reason_of(error)}"
        raise UserError(line) from error


class RemoteFolder:
    """Files below a URL, by their relative names. explained: retry with `retried` (UserError, and
    a line for each wait) instead of `tried`."""

    def __init__(self, url: str, explained: bool = False):
        self.url, self.explained = url.rstrip("/"), explained
        self.filesystem, root = open_filesystem(self.url)
        self.root, self.local = root.rstrip("/"), is_local(url)

    def below(self, name: str) -> "RemoteFolder":
        return RemoteFolder(f"{self.url}/{name}", self.explained)

    def names(self) -> list[str]:
        """Names of the direct children; empty if there is no such folder."""

        def ask() -> list[str]:
            self.filesystem.invalidate_cache()
            with suppress(FileNotFoundError):
                return self.filesystem.ls(self.root, detail=False)
            return []

        return [path.rstrip("/").rpartition("/")[2] for path in self._tried("", ask)]

    def files(self) -> dict[str, dict[str, Any]]:
        """fsspec's info of every file below the folder, by relative name."""

        def ask() -> dict[str, dict[str, Any]]:
            self.filesystem.invalidate_cache()
            return self.filesystem.find(self.root, detail=True)

        begin = len(self.root) + 1
        return {path[begin:]: facts for path, facts in self._tried("", ask).items() if path[begin:]}

    def exists(self, name: str) -> bool:
        def ask() -> bool:
            self.filesystem.invalidate_cache()
            return self.filesystem.exists(self._at(name))

        return self._tried(name, ask)

    def size(self, name: str) -> int | None:
        """Size of a file in bytes; None if it does not exist."""

        def ask() -> int | None:
            with suppress(FileNotFoundError):
                return self._size(name)
            return None

        return self._tried(name, ask)

    def read(self, name: str) -> bytes | None:
        """Contents of a small file; None if it does not exist."""

        def ask() -> bytes | None:
            with suppress(FileNotFoundError):
                return self.filesystem.cat_file(self._at(name))
            return None

        return self._tried(name, ask)

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Bytes start..stop of a file. An error if the file does not exist or is shorter."""

        def ask() -> bytes:
            data = self.filesystem.cat_file(self._at(name), start=start, end=stop)
            if len(data) != stop - start:
                raise ConnectionError(f"{len(data):,} of {stop - start:,} bytes have arrived")
            return data

        return self._tried(name, ask)

    def write(self, name: str, content: bytes) -> None:
        """Write a file atomically, then check its size."""

        def put() -> None:
            if self.local:
                write_whole(Path(self._at(name)), content)
            else:
                self.filesystem.pipe_file(self._at(name), content)
            self._check_size(name, len(content))

        self._make_parent(name)
        self._tried(name, put, "write")

    def create(self, name: str, content: bytes) -> bool:
        """Create a file exclusively. Returns True for one of several callers, on any machines.

        A conditional put (If-None-Match: * at S3). `content` must be unique to the caller: if the
        answer to a put is lost and the put is sent again, it tells this caller's file from another.
        """
        self._make_parent(name)

        def attempt() -> bool:
            try:
                if self.local:
                    with open(self._at(name), "xb") as file:
                        file.write(content)
                else:
                    self.filesystem.pipe_file(self._at(name), content, mode="create")
                return True
            except (PermissionError, FileNotFoundError):
                raise
            except OSError:
                self.filesystem.invalidate_cache()
                if self.filesystem.exists(self._at(name)):
                    return self.filesystem.cat_file(self._at(name)) == content
                raise

        return self._tried(name, attempt, "write")

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with its contents."""

        def ask() -> None:
            self.filesystem.invalidate_cache()
            with suppress(FileNotFoundError):
                self.filesystem.rm(self._at(name), recursive=True)

        self._tried(name, ask, "write")

    def put(self, files: Mapping[str, Path]) -> None:
        """Upload files, several at a time."""

        def put(name: str, path: Path) -> None:
            self._make_parent(name)
            self.filesystem.put_file(str(path), self._at(name))
            self._check_size(name, path.stat().st_size)

        in_threads(files.items(), lambda one: self._tried(one[0], lambda: put(*one), "write"))

    def get(self, entries: Mapping[str, sums.Entry], folder: Path) -> None:
        """Download files, several at a time. Raises Damaged if one does not match its entry."""
        in_threads(entries.items(), lambda one: self._get(*one, folder))

    def fetch(self, name: str, to: Path) -> None:
        """Download a file, without checking its checksum."""
        to.parent.mkdir(parents=True, exist_ok=True)
        self._tried(name, lambda: self.filesystem.get_file(self._at(name), str(to)))

    def _at(self, name: str) -> str:
        return f"{self.root}/{name}"

    def _make_parent(self, name: str) -> None:
        if self.local:  # object stores have no folders to make
            Path(self._at(name)).parent.mkdir(parents=True, exist_ok=True)

    def _size(self, name: str) -> int:
        self.filesystem.invalidate_cache()
        return int(self.filesystem.info(self._at(name))["size"])

    def _check_size(self, name: str, wanted: int) -> None:
        size = self._size(name)
        if size != wanted:
            raise ConnectionError(f"{size:,} of {wanted:,} bytes have arrived")

    def _tried[T](
        self, name: str, action: Callable[[], T], access: Literal["read", "write"] = "read"
    ) -> T:
        if not self.explained:
            return tried(action)
        return retried(f"{self.url}/{name}".rstrip("/"), action, access=access)

    def _get(self, name: str, entry: sums.Entry, folder: Path) -> None:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise Damaged(f"a list of {self.url} names {name}")
        for _ in range(READS):
            try:
                self.fetch(name, folder / path)
            except FileNotFoundError as error:
                raise Damaged(f"{self.url}/{name} is missing") from error
            except Exception as error:
                if "Checksum" not in type(error).__name__:  # the store's own check has failed
                    raise
                raise Damaged(f"{self.url}/{name}: {reason_of(error)}") from error
            if sums.entry(folder / path) == entry:
                return
        raise Damaged(f"{self.url}/{name} is not as it was written (CRC-32)")


def in_threads[T](items: Iterable[T], work: Callable[[T], Any]) -> None:
    """Call work(item) for all items, in threads. After the first error no further item begins.

    The threads are daemons: a process that is terminated does not wait for them.
    """
    every = list(items)
    left, errors = iter(every), list[BaseException]()

    def run() -> None:
        for item in left:
            try:
                work(item)
            except BaseException as error:
                errors.append(error)
            if errors:
                return

    count = min(THREADS, len(every))
    threads = [threading.Thread(target=run, name="transfer", daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
