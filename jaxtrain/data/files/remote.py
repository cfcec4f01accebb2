"""Local and remote files, opened by URL; remote reads resume after network failures.

fsspec opens the URLs. After a lost connection, reading resumes at the byte that was reached.
http(s) uses the standard library: one request streams a whole file, without another package.
"""

import io
import urllib.error
import urllib.request
from http.client import HTTPResponse
from typing import Any, override

from fsspec.spec import AbstractFileSystem

from jaxtrain.data.files.local import File, local_path
from jaxtrain.data.files.positioned import PositionedReader
from jaxtrain.settings import UserError
from jaxtrain.storage.objects import is_local, open_filesystem, retried

TIMEOUT = 60.0  # seconds that a server may be silent
AHEAD = 1 << 23  # bytes per read-ahead request of fsspec to an object store
HTTP = ("http", "https")


def filesystem_of(url: str) -> tuple[Any, str]:
    """The file system that a URL belongs to, and its path there."""
    if url.startswith(("http://", "https://")):
        return HttpFileSystem(), url
    return open_filesystem(url)


def revision_of(url: str) -> tuple[str, str] | None:
    """Return the (repository, commit) of an hf:// URL; None for all other URLs.

    REVISION in hf://datasets/OWNER/NAME@REVISION/... is a branch, tag or commit; default: main.
    """
    if not url.startswith("hf://"):
        return None
    filesystem, path = filesystem_of(url)

    def ask() -> tuple[str, str] | None:
        resolved = filesystem.resolve_path(path)
        if not hasattr(resolved, "repo_id"):  # a bucket, which has no revisions
            return None
        kind = resolved.repo_type
        found = huggingface_hub.HfApi(endpoint=filesystem.endpoint).repo_info(
            resolved.repo_id, repo_type=kind, revision=resolved.revision
        )
        prefix = "" if kind == "model" else f"{kind}s/"
        return f"hf://{prefix}{resolved.repo_id}", str(found.sha)

    import huggingface_hub

    return retried(url, ask)


def open_file(file: File) -> io.BufferedReader:
    """Open a file for reading. Reads of a remote file resume after network failures."""
    if is_local(file.url):
        try:
            return open(local_path(file.url), "rb")
        except OSError as error:
            raise UserError(f"cannot read {file.url}: {error.strerror}") from error
    return io.BufferedReader(_Resumed(*filesystem_of(file.url), file), 1 << 20)


class NothingThere(Exception):
    """The requested byte range begins at the end of the file."""


class _Resumed(PositionedReader):
    """A remote file that is reopened at the byte that was reached whenever reading fails."""

    def __init__(self, filesystem: Any, path: str, file: File):
        super().__init__()
        self._filesystem, self._path, self._file = filesystem, path, file
        self._stream: Any = None

    def readinto(self, buffer: Any) -> int:
        lost = f"connection lost at byte {self.at}"
        data = retried(self._file.url, lambda: self._read(len(buffer)), lost)
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)

    def _read(self, size: int) -> bytes:
        try:
            if self.at >= (self._file.size or self.at + 1):
                return b""  # servers refuse a request for an empty range
            if self._stream is None:
                self._stream = self._open()
            data = self._stream.read(size)
            if not data and self.at < (self._file.size or 0):
                raise ConnectionError(f"the file ends at byte {self.at} of {self._file.size}")
            if not data and self._file.size is None:
                if not self._ended():
                    raise ConnectionError("the server sent more than the file has")
                self._file = self._file._replace(size=self.at)
            return data
        except NothingThere as error:
            if self._file.size is None:
                return b""
            raise UserError(f"{self._file.url} changed while it was read; start again") from error
        except BaseException:
            self._drop()
            raise

    def _open(self) -> Any:
        if isinstance(self._filesystem, HttpFileSystem):
            return self._filesystem.stream(self._path, self.at, self._file.version)
        options = {"block_size": AHEAD, "cache_type": "readahead"}
        stream = self._filesystem.open(self._path, "rb", **options)
        stream.seek(self.at)
        return stream

    def _ended(self) -> bool:
        """Whether a stream of unknown length that returns no more data is complete."""
        if not isinstance(self._filesystem, HttpFileSystem):
            return True
        return self._filesystem.ended(self._stream, self._path, self.at, self._file.version)

    def _drop(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    @override
    def end(self) -> int:
        return self._file.size or 0

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        before = self.at
        if super().seek(offset, whence) != before:
            self._drop()
        return self.at

    def close(self) -> None:
        self._drop()
        super().close()


class HttpFileSystem(AbstractFileSystem):
    """Single files of web servers, which have no folders to list."""

    protocol = HTTP

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        with _request(path) as response:  # not HEAD, which signed URLs refuse
            size = response.headers.get("Content-Length")
            return {
                "name": path,
                "size": None if size is None else int(size),
                "type": "file",
                "version": _version(response.headers),
            }

    def stream(self, url: str, start: int, version: str) -> HTTPResponse:
        """Open a file at byte `start`, even if the server can send only whole files."""
        headers = {"Range": f"bytes={start}-"} if start else {}
        response = _request(url, headers)
        if _version(response.headers) != version:
            response.close()
            raise UserError(f"{url} changed while it was read; start again")
        left = start if response.status == 200 else 0
        while left and (skipped := response.read(min(left, 1 << 20))):
            left -= len(skipped)
        if left:
            response.close()
            raise ConnectionError(f"the file ends {left} bytes before byte {start}")
        return response

    def ended(self, response: HTTPResponse, url: str, at: int, version: str) -> bool:
        """Whether a response that returns no more data is complete, after `at` bytes of the file.

        A response with neither a length nor chunks ends when the connection closes, for any
        reason. A second request, for the bytes after it, tells whether the file goes on.
        """
        if response.chunked or response.length is not None:
            return not response.length  # a missing chunk has already raised an error
        try:
            with self.stream(url, at, version) as rest:
                return not rest.read(1)
        except NothingThere:
            return True


def _request(url: str, headers: dict[str, str] | None = None) -> HTTPResponse:
    ask = {"User-Agent": "jaxtrain", "Accept-Encoding": "identity"} | (headers or {})
    try:
        return urllib.request.urlopen(urllib.request.Request(url, headers=ask), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in (404, 410):
            raise FileNotFoundError(url) from error
        if error.code in (401, 403):
            raise PermissionError(f"the server says {error.code} {error.reason}") from error
        if error.code == 416:
            raise NothingThere(url) from error
        if 400 <= error.code < 500 and error.code not in (408, 425, 429):
            raise UserError(f"cannot read {url}: {error.code} {error.reason}") from error
        raise ConnectionError(f"the server says {error.code} {error.reason}") from error


def _version(headers: Any) -> str:
    return headers.get("ETag") or headers.get("Last-Modified") or ""
