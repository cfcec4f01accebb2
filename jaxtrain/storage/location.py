"""Locations: a path, or a URL of an object store. Files at a URL are worked on in a local folder
below $JAXTRAIN_CACHE. This module only computes names; it opens nothing."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from jaxtrain.settings import UserError

COPIES, RUNS = "copies", "runs"  # cache folders: downloaded copies, and runs that train
LOCAL = ("file://", "local://")


def is_url(location: str) -> bool:
    return "://" in location and not location.startswith(LOCAL)


def path_of(location: str) -> str:
    """The path of a location: a path, or a file:// or local:// URL."""
    for scheme in LOCAL:
        location = location.removeprefix(scheme)
    return location


def location_fault(location: str) -> str | None:
    """The reason why a location cannot be written; None for a path or a plain URL."""
    if not is_url(location):
        return None
    parts = urlsplit(location)
    if parts.password is not None or parts.query:
        return (
            "it must not hold a password or a query; the store's own environment variables or "
            "files hold credentials"
        )
    if parts.scheme in ("http", "https") or "::" in location:
        return "there are no folders; take s3://, gs:// or another object store, or a path"
    return None


def check_location(what: str, location: str) -> None:
    """Raise UserError for a URL that cannot be written or contains a secret (masked in the
    message)."""
    if why := location_fault(location):
        scheme, _, rest = location.partition("://")
        shown = f"{scheme}://...@{rest.rpartition('@')[2].partition('?')[0]}"
        raise UserError(f"{what}: got '{shown}': {why}")


def cached(kind: str, url: str) -> Path:
    """The local folder for a URL."""
    cache = Path(os.environ.get("JAXTRAIN_CACHE", "~/.cache/jaxtrain")).expanduser()
    return cache / kind / hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16]


def local(location: str) -> Path:
    """Argument type of an input: a path, or the local copy of a folder at a URL."""
    if not is_url(location):
        return Path(path_of(location))
    from jaxtrain.storage.fetch import local_copy

    return local_copy(location)


@contextmanager
def output_at(location: str) -> Iterator[Path]:
    """Yield a path to write to. For a URL, a temporary path, uploaded at the end."""
    if not is_url(location):
        yield Path(path_of(location))
        return
    from jaxtrain.storage.fetch import sent_there

    with sent_there(location) as path:
        yield path
