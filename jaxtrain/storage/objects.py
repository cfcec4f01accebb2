"""A folder at a URL: an object store, or any other file system of fsspec.

An error that may pass is tried again, ever later. What is said of an error holds no secret.
"""

import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec

from jaxtrain.settings import UserError
from jaxtrain.storage import checksums as sums
from jaxtrain.storage.disk import disk_full

TRIES = 6
FIRST_WAIT = 0.5  # seconds; doubled for every further try
READS = 3  # of a file that is not as it was written: a transfer may damage it, too
THREADS = 8  # transfers at once
# Another try would not help; all else is taken for a failure that passes.
FINAL = (NotADirectoryError, IsADirectoryError, ImportError, TypeError, AttributeError)
FINAL += (NotImplementedError, UserError)
NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound")
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


def reason_of(error: BaseException) -> str:
    """One short line, without what a URL in it may hold: a password, or a signed query."""
    said = str(error).strip().splitlines()
    if not said:
        return type(error).__name__
    plain = re.sub(r"//[^/\s@]*@", "//", said[0])
    plain = re.sub(r"(https?://[^\s?\"']*)\?[^\s\"']*", r"\1", plain)
    return f"{type(error).__name__}: {plain[:200]}"


def tried[T](action: Callable[[], T]) -> T:
    """The value of `action`, which is tried again after an error that may pass."""
    for attempt in range(TRIES):
        try:
            return action()
        except (FileNotFoundError, PermissionError, *FINAL):
            raise
        except Exception as error:
            final = disk_full(error) or type(error).__name__ in NO_CREDENTIALS
            if attempt + 1 == TRIES or final:
                raise
            time.sleep(FIRST_WAIT * 2**attempt * random.uniform(0.75, 1.25))
    raise AssertionError("unreachable")


class RemoteFolder:
    """Files below a URL, by their names there."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self.filesystem, root = open_filesystem(self.url)
        self.root, self.local = root.rstrip("/"), is_local(url)

    def names(self) -> list[str]:
        """Of the files and folders directly in it; none where there is no such folder."""

        def ask() -> list[str]:
            self.filesystem.invalidate_cache()
            return self.filesystem.ls(self.root, detail=False)

        try:
            return [path.rstrip("/").rpartition("/")[2] for path in tried(ask)]
        except FileNotFoundError:
            return []

    def files(self) -> dict[str, dict[str, Any]]:
        """fsspec's facts of every file below it."""

        def ask() -> dict[str, dict[str, Any]]:
            self.filesystem.invalidate_cache()
            return self.filesystem.find(self.root, detail=True)

        begin = len(self.root) + 1
        return {path[begin:]: facts for path, facts in tried(ask).items() if path[begin:]}

    def exists(self, name: str) -> bool:
        def ask() -> bool:
            self.filesystem.invalidate_cache()
            return self.filesystem.exists(self._at(name))

        return tried(ask)

    def read(self, name: str) -> bytes:
        return tried(lambda: self.filesystem.cat_file(self._at(name)))

    def write(self, name: str, content: bytes) -> None:
        self._make_parent(name)
        tried(lambda: self.filesystem.pipe_file(self._at(name), content))

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

        return tried(attempt)

    def remove(self, name: str) -> None:
        """A file, or a folder with all that is in it."""
        self.filesystem.invalidate_cache()
        with suppress(FileNotFoundError):
            tried(lambda: self.filesystem.rm(self._at(name), recursive=True))

    def put(self, files: Mapping[str, Path]) -> None:
        """Copy files there, some at a time."""
        in_threads(files.items(), lambda one: tried(lambda: self._put(*one)))

    def get(self, entries: Mapping[str, sums.Entry], folder: Path) -> None:
        """Copy files into a folder, some at a time. Damaged if one is not as `entries` say."""
        in_threads(entries.items(), lambda one: self._get(*one, folder))

    def fetch(self, name: str, to: Path) -> None:
        """Copy a file as it is."""
        to.parent.mkdir(parents=True, exist_ok=True)
        tried(lambda: self.filesystem.get_file(self._at(name), str(to)))

    def _at(self, name: str) -> str:
        return f"{self.root}/{name}"

    def _make_parent(self, name: str) -> None:
        if self.local:  # object stores have no folders to make
            Path(self._at(name)).parent.mkdir(parents=True, exist_ok=True)

    def _put(self, name: str, path: Path) -> None:
        self._make_parent(name)
        self.filesystem.put_file(str(path), self._at(name))
        self.filesystem.invalidate_cache()
        size, wanted = self.filesystem.info(self._at(name))["size"], path.stat().st_size
        if size != wanted:
            raise OSError(f"{size:,} of {wanted:,} bytes have arrived")

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
