"""A disk that is full: files are replaced whole, and the fault is named, whoever raises it."""

import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxtrain.settings import UserError


def write_whole(path: Path, content: str | bytes) -> None:
    """Write atomically: a reader sees the old file or the new one; a full disk leaves the old."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: object) -> None:
    """Write a JSON value as `write_whole` does."""
    write_whole(path, json.dumps(value, indent=2) + "\n")


FULL = {os.strerror(code): code for code in (errno.ENOSPC, errno.EDQUOT)}


def disk_full(error: BaseException | None) -> str | None:
    """What the system says where an error, or the one behind it, is that a disk holds no more.

    Libraries in C++ (array_record, tensorstore) raise others than OSError, with the system's words.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL.values():
            return error.strerror
        said = next((text for text in FULL if text in str(error)), None)
        if said:
            return said
        error = error.__cause__ or error.__context__
    return None


@contextmanager
def full_disk_explained(explain: Callable[[str], str]) -> Iterator[None]:
    """A full disk as UserError(explain(what the system says)) and not as a traceback."""
    try:
        yield
    except UserError:  # explained already
        raise
    except Exception as error:
        said = disk_full(error)
        if said is None:
            raise
        raise UserError(explain(said)) from error
