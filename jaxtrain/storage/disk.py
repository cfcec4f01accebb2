"""Atomic file replacement, and clear errors for a full disk, whichever library raises them."""

import errno
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxtrain.settings import UserError


def write_whole(path: Path, content: str | bytes) -> None:
    """Write atomically: a reader sees the old or the new file. A full disk leaves the old one."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: object) -> None:
    """Write a JSON value atomically."""
    write_whole(path, json.dumps(value, indent=2) + "\n")


def why_not_writable(folder: Path) -> str | None:
    """Why a folder cannot be created and written, as "existing parent: reason"; None if it can.
    Leaves nothing there."""
    there = folder
    try:
        there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        return f"{there}: {error.strerror}"
    return None


FULL = {os.strerror(code): code for code in (errno.ENOSPC, errno.EDQUOT)}


def disk_full(error: BaseException | None) -> str | None:
    """The system's message if an error, or its cause, is a full disk or an exceeded quota.

    C++ libraries (array_record, tensorstore) raise other types than OSError, with that message.
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
    """Raise UserError(explain(system message)) for a full disk, instead of a traceback."""
    try:
        yield
    except UserError:  # explained already
        raise
    except Exception as error:
        said = disk_full(error)
        if said is None:
            raise
        raise UserError(explain(said)) from error
