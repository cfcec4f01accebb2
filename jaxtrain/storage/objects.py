"""A folder at a URL: an object store, or any other file system of fsspec.

An error that may pass is tried again, ever later. What is said of an error holds no secret.
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

TRIES = 6  # of what a run saves: what fails, its next look tries again
DATA_TRIES = 8  # of data, which training waits for: a minute
FIRST_WAIT = 0.5  # seconds; doubled for every further try
READS = 3  # of a file that is not as it was written: a transfer may damage it, too
THREADS = 8  # transfers at once
# Another try would not help; all else is taken for a failure that passes.
FINAL = (NotADirectoryError, IsADirectoryError, ImportError, TypeError, AttributeError)
FINAL += (NotImplementedError, UserError)
NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound")
SKEWED = "RequestTimeTooSkewed"  # what S3 answers where clocks differ by a quarter of an hour
CHAIN = re.compile(r"::(/|[^:/]+://)")  # of file systems, as zip://*.jsonl::s3://bucket/a.zip
PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub"}
PACKAGES |= {"az": "adlfs", "abfs": "adlfs", "ssh": "paramiko", "sftp": "paramiko"}


class Damaged(Exception):
    """A file that is not as it was written."""


def is_local(url: str) -> bool:
    return url.startswith(("file://", "local://")) or "://" not in url


def open_filesystem(url: str) -> tuple[Any, str]:
    """fsspec's file system that a URL belongs to, and its path there."""
    try:
        if CHAIN.search(url):
            return fsspec.url_to_fs(url)
        # fsspec takes any :: for a chain, and no name has a NUL.
        filesystem, path = fsspec.url_to_fs(url.replace("::", "\0"))
        return filesystem, path.replace("\0", "::")
    except ImportError as error:
        package = PACKAGES.get(url.split("://")[0])
        hint = f"{package} is not installed: pip install {package}" if package else str(error)
        raise UserError(f"cannot open {url}: {hint}") from error
    except ValueError as error:
        raise UserError(f"cannot open {url}: {error}") from error


def said_by(error: BaseException) -> str:
    """One short line, without what a URL in it may hold: a password, or a signed query."""
    first = (str(error).strip().splitlines() or [""])[0]
    plain = re.sub(r"//[^/\s@]*@", "//", first)
    return re.sub(r"(https?://[^\s?\"']*)\?[^\s\"']*", r"\1", plain)[:200]


def reason_of(error: BaseException) -> str:
    """What an error is and says, as `said_by`."""
    return ": ".join(filter(None, (type(error).__name__, said_by(error))))


def refuses(error: BaseException) -> bool:
    """Whether it is about credentials."""
    return isinstance(error, PermissionError) or type(error).__name__ in NO_CREDENTIALS


def tried[T](
    action: Callable[[], T],
    tries: int = TRIES,
    say: Callable[[int, float, Exception], None] = lambda *_: None,
) -> T:
    """The value of `action`, which is tried again after an error that may pass.

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
    """`tried` for data. Each wait is a line on stderr; `what` says in it what has happened to the
    file. Raises UserError for one that is not there or that `access` is refused to, and after the
    last try."""

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
    """Files below a URL, by their names there. explained: errors and waits are those of `retried`,
    and otherwise those of `tried`."""

    def __init__(self, url: str, explained: bool = False):
        self.url, self.explained = url.rstrip("/"), explained
        self.filesystem, root = open_filesystem(self.url)
        self.root, self.local = root.rstrip("/"), is_local(url)

    def below(self, name: str) -> "RemoteFolder":
        return RemoteFolder(f"{self.url}/{name}", self.explained)

    def names(self) -> list[str]:
        """Of the files and folders directly in it; none where there is no such folder."""

        def ask() -> list[str]:
            self.filesystem.invalidate_cache()
            with suppress(FileNotFoundError):
                return self.filesystem.ls(self.root, detail=False)
            return []

        return [path.rstrip("/").rpartition("/")[2] for path in self._tried("", ask)]

    def files(self) -> dict[str, dict[str, Any]]:
        """fsspec's facts of every file below it."""

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
        """Bytes of a file; None if it is not there."""

        def ask() -> int | None:
            with suppress(FileNotFoundError):
                return self._size(name)
            return None

        return self._tried(name, ask)

    def read(self, name: str) -> bytes | None:
        """A small file; None if it is not there."""

        def ask() -> bytes | None:
            with suppress(FileNotFoundError):
                return self.filesystem.cat_file(self._at(name))
            return None

        return self._tried(name, ask)

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Bytes start..stop. An error if the file is not there or ends before."""

        def ask() -> bytes:
            data = self.filesystem.cat_file(self._at(name), start=start, end=stop)
            if len(data) != stop - start:
                raise ConnectionError(f"{len(data):,} of {stop - start:,} bytes have arrived")
            return data

        return self._tried(name, ask)

    def write(self, name: str, content: bytes) -> None:
        """A file of these bytes, which appears whole; done when its size is right."""

        def put() -> None:
            if self.local:
                write_whole(Path(self._at(name)), content)
            else:
                self.filesystem.pipe_file(self._at(name), content)
            self._check_size(name, len(content))

        self._make_parent(name)
        self._tried(name, put, "write")

    def create(self, name: str, content: bytes) -> bool:
        """Whether this call made the file: of several, on whatever machines, one does.

        A conditional put (If-None-Match: * at S3). `content` must be the caller's alone: a put
        whose answer was lost and that was sent again is told from another's by it.
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
        """A file, or a folder with all that is in it."""

        def ask() -> None:
            self.filesystem.invalidate_cache()
            with suppress(FileNotFoundError):
                self.filesystem.rm(self._at(name), recursive=True)

        self._tried(name, ask, "write")

    def put(self, files: Mapping[str, Path]) -> None:
        """Copy files there, some at a time."""

        def put(name: str, path: Path) -> None:
            self._make_parent(name)
            self.filesystem.put_file(str(path), self._at(name))
            self._check_size(name, path.stat().st_size)

        in_threads(files.items(), lambda one: self._tried(one[0], lambda: put(*one), "write"))

    def get(self, entries: Mapping[str, sums.Entry], folder: Path) -> None:
        """Copy files into a folder, some at a time. Damaged if one is not as `entries` say."""
        in_threads(entries.items(), lambda one: self._get(*one, folder))

    def fetch(self, name: str, to: Path) -> None:
        """Copy a file as it is."""
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
                if "Checksum" not in type(error).__name__:  # that of the store's own
                    raise
                raise Damaged(f"{self.url}/{name}: {reason_of(error)}") from error
            if sums.entry(folder / path) == entry:
                return
        raise Damaged(f"{self.url}/{name} is not as it was written (CRC-32)")


def in_threads[T](items: Iterable[T], work: Callable[[T], Any]) -> None:
    """work(item) of all items. The first error ends it: what has not begun does not begin.

    The threads are daemons: a process that is told to end does not wait for them.
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
