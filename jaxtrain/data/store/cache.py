"""The cache folder of prepared data, and the locks of its entries."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxtrain.data.config import DataConfig
from jaxtrain.data.store.progress import Progress
from jaxtrain.settings import UserError


def cache_url(config: DataConfig) -> str | None:
    """URL of the cache of prepared data; None if it is a local folder."""
    url = config.cache_dir or ""
    return f"{url.rstrip('/')}/data" if "://" in url else None


def cache_directory(config: DataConfig) -> Path:
    """Local cache folder; for a cache at a URL, where data is prepared and blocks are cached."""
    default = os.environ.get("JAXTRAIN_CACHE", "~/.cache/jaxtrain")
    folder = config.cache_dir if cache_url(config) is None else config.local_cache.path
    return Path(folder or default).expanduser() / "data"


@contextmanager
def locked(directory: Path, progress: Progress = lambda *_: None) -> Iterator[None]:
    """Holds the lock of a cache folder; reports if it waits for another process."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / "lock").open("w")
    except OSError as error:
        raise UserError(
            f"data.cache_dir: {directory.parent} cannot be written ({error.strerror}); name a "
            "folder that can (of data at a URL data.local_cache.path)"
        ) from error
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that prepares the same data", 0, None)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
