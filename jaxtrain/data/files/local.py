"""Local files by path, folder or glob pattern. Links are followed."""

import fnmatch
import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from jaxtrain.settings import UserError


class File(NamedTuple):
    """A file of a source, local or not."""

    url: str  # a plain path for a local file, which may be a link
    size: int | None  # bytes as stored
    version: str  # changes with the content, if the storage reports it
    name: str = ""  # path relative to the folder of the source


def local_path(url: str) -> str:
    """A path or file:// URL as an absolute path."""
    return os.path.abspath(os.path.expanduser(re.sub("^(file|local)://", "", url)))


def is_folder(path: str) -> bool:
    """Whether a path is a folder. Raises UserError if it cannot be read, as for a loop of links."""
    return stat.S_ISDIR(_status(path).st_mode)


def files_at(paths: list[str], *, strict: bool = True) -> list[File]:
    """Return the paths that are regular files, which excludes sockets and the like.

    Raises UserError for a missing path or a broken link; if not `strict`, these are left out.
    """
    found = []
    for path in paths:
        try:
            status = _status(path)
        except UserError:
            if strict:
                raise
            continue
        if stat.S_ISREG(status.st_mode):
            found.append(File(path, status.st_size, str(status.st_mtime)))
    return found


def files_under(
    folder: str, endings: tuple[str, ...], *, not_entered: Collection[str] = (), strict: bool = True
) -> list[File]:
    """Return all files below a folder whose names end in one of `endings`.

    Raises UserError for a folder that cannot be read. Broken links, and links to a folder that
    contains them, raise UserError if `strict`, else they are left out.
    """
    below = _walk(folder, not_entered, strict)
    paths = [path for path, folder in below if not folder and path.lower().endswith(endings)]
    return files_at(paths, strict=strict)


def files_like(pattern: str, *, strict: bool = True) -> list[File]:
    """Return the files that match an absolute path with *, ?, [...], and ** for any folders.

    Brackets are literal if a file or folder has exactly that name. Raises as `files_under`.
    """
    paths, parts = ["/"], [part for part in pattern.split("/") if part]
    for part in parts[:-1]:
        inner = [path for folder in paths for path in _matches(folder, part, strict)]
        paths = [path for path in dict.fromkeys(inner) if os.path.isdir(path)]
    found = [path for folder in paths for path in _matches(folder, parts[-1], strict)]
    return files_at(list(dict.fromkeys(found)), strict=strict)


def fixed_part(pattern: str) -> str:
    """Return the fixed folder of a pattern, above all matches of `files_like`."""
    parts = pattern.split("/")
    for number, part in enumerate(parts):
        here = "/".join(parts[: number + 1])
        if re.search("[*?]", part) or ("[" in part and not os.path.lexists(here)):
            return "/".join(parts[:number])
    return os.path.dirname(pattern)


def without_copies(paths: Iterable[str]) -> list[str]:
    """Return one path per distinct file: a path that is not a link, else one of its links."""
    real_folder = lru_cache(os.path.realpath)
    kept: dict[str, str] = {}
    for linked, path in sorted((os.path.islink(path), path) for path in paths):
        folder, name = os.path.split(path)
        real = os.path.realpath(path) if linked else os.path.join(real_folder(folder), name)
        kept.setdefault(real, path)
    return list(kept.values())


def _matches(folder: str, part: str, strict: bool) -> list[str]:
    """Return the paths in a folder that match one pattern component; ** matches the folder too."""
    if part == "**":
        return [folder, *(path for path, _ in _walk(folder, (), strict))]
    if not re.search(r"[*?\[]", part):
        there = os.path.lexists(os.path.join(folder, part))
        return [os.path.join(folder, part)] if there else []
    names = [entry.name for entry in _entries(folder)]
    literal = fnmatch.filter(names, part.replace("[", "[[]"))
    return [os.path.join(folder, name) for name in literal or fnmatch.filter(names, part)]


def _walk(
    folder: str, not_entered: Collection[str], strict: bool, above: tuple[str, ...] = ()
) -> Iterator[tuple[str, bool]]:
    """Yield each path below a folder, and whether it is a folder."""
    above = (*above, os.path.realpath(folder))
    for entry in _entries(folder):
        if not os.path.isdir(entry.path) if entry.is_symlink() else not entry.is_dir():
            yield entry.path, False
        elif entry.name in not_entered:
            continue
        elif entry.is_symlink() and os.path.realpath(entry.path) in above:
            if strict:
                raise UserError(f"{entry.path} is a link to a folder that contains it; remove it")
        else:
            yield entry.path, True
            yield from _walk(entry.path, not_entered, strict, above)


def _entries(folder: str) -> list[os.DirEntry]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise UserError(f"cannot read the folder {folder}: {error.strerror}") from error


def _status(path: str) -> os.stat_result:
    try:
        return os.stat(path)
    except FileNotFoundError as error:
        if os.path.islink(path):
            gone = os.readlink(path)
            raise UserError(f"{path} is a broken link to {gone}") from error
        raise UserError(f"there is no file or folder {path}") from error
    except (OSError, ValueError) as error:  # a loop of links, a name too long, a NUL in it
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"cannot read {path}: {reason}") from error
