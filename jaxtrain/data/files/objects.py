"""Whole objects and ranges of them below a URL, each request tried again after what may pass."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from jaxtrain.data.files.remote import filesystem_of, is_local, retried


class Objects:
    """The objects below a URL of fsspec."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self.filesystem, root = filesystem_of(self.url)
        self.root = root.rstrip("/")

    def below(self, name: str) -> "Objects":
        return Objects(f"{self.url}/{name}")

    def size(self, name: str) -> int | None:
        """Bytes of an object; None if it is not there."""

        def ask() -> int | None:
            self.filesystem.invalidate_cache()
            try:
                return int(self.filesystem.info(self._path(name))["size"])
            except FileNotFoundError:
                return None

        return self._tried(name, ask)

    def read(self, name: str) -> bytes | None:
        """A small object; None if it is not there."""

        def ask() -> bytes | None:
            try:
                return self.filesystem.cat_file(self._path(name))
            except FileNotFoundError:
                return None

        return self._tried(name, ask)

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Bytes start..stop. UserError if the object is not there or ends before."""

        def ask() -> bytes:
            data = self.filesystem.cat_file(self._path(name), start=start, end=stop)
            if len(data) != stop - start:
                raise ConnectionError(f"{len(data):,} of {stop - start:,} bytes have arrived")
            return data

        return self._tried(name, ask)

    def write(self, name: str, data: bytes) -> None:
        """An object of these bytes, which appears whole; done when its size is right."""

        def put() -> None:
            path = self._path(name)
            if is_local(self.url):  # object stores have no folders to make
                part = Path(f"{path}.part")
                part.parent.mkdir(parents=True, exist_ok=True)
                part.write_bytes(data)
                part.replace(path)
            else:
                self.filesystem.pipe_file(path, data)
            self.filesystem.invalidate_cache()
            size = self.filesystem.info(path)["size"]
            if size != len(data):
                raise ConnectionError(f"{size:,} of {len(data):,} bytes have arrived")

        self._tried(name, put, "write")

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def _tried[T](
        self, name: str, action: Callable[[], T], access: Literal["read", "write"] = "read"
    ) -> T:
        return retried(f"{self.url}/{name}", action, access=access)
