"""Files in JAX's compilation cache folder, which processes may share.

A file that no process has read for MOST_AGE seconds is deleted. So are the files of its folder that
were read least recently, while they are larger than MOST_BYTES together. A key contains versions
and sources, so a new version makes new files and never reads old ones.

Whoever can write to the folder can run code in the processes that read it, as with the programs
that JAX itself keeps there. A checksum finds damaged files, not forged ones.
"""

import contextlib
import hashlib
import os
import threading
import time
from pathlib import Path

import jax

MOST_AGE = 30 * 24 * 3600.0  # seconds since a file was read
MOST_BYTES = 1 << 30  # of all files in a folder


def cache_folder(name: str) -> Path | None:
    """Folder `name` of the compilation cache; None if the cache is off or not on a local disk."""
    folder = jax.config.jax_compilation_cache_dir
    if not folder or "://" in folder or not jax.config.jax_enable_compilation_cache:
        return None
    return Path(folder) / name


def hash_of_sources(root: Path) -> str | None:
    """Hash of all Python files below a folder; None if there are none.

    Call it at import, as files may be edited while the process runs.
    """
    digest = hashlib.sha256()
    for path in (paths := sorted(root.rglob("*.py"))):
        digest.update(f"{path.relative_to(root)} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest() if paths else None


def read_file(path: Path) -> bytes | None:
    """Return the content that `write_file` wrote; None for a missing or damaged file."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if hashlib.sha256(content[32:]).digest() != content[:32]:
        return None
    with contextlib.suppress(OSError):  # another user's file, or another process deleted it
        os.utime(path)  # its time says when it was last read; atime is often off
    return content[32:]


def write_file(path: Path, content: bytes) -> None:
    """Write the file atomically, as several processes may write at once."""
    # Not by `tempfile`, whose files other users of the folder cannot read.
    part = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_bytes(hashlib.sha256(content).digest() + content)
            os.replace(part, path)
        except OSError:
            part.unlink(missing_ok=True)
        evict(path.parent)


def evict(folder: Path) -> None:
    """Delete the files of a folder that are too old, and the oldest while all are too large.

    Other processes may read, write and delete meanwhile. A process that has opened a file reads it
    to its end; one that comes later makes it again.
    """
    found: list[tuple[float, int, str]] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.is_file(follow_symlinks=False):
                    about = entry.stat(follow_symlinks=False)
                    found.append((about.st_mtime, about.st_size, entry.path))
    total, oldest = sum(size for _, size, _ in found), time.time() - MOST_AGE
    for read_at, size, path in sorted(found):
        if read_at >= oldest and total <= MOST_BYTES:
            break
        with contextlib.suppress(OSError):  # deleted by another process, or of another user
            os.unlink(path)
        total -= size
