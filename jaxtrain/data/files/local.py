"""Files of this machine by path, folder or pattern. A link counts as what it points to."""

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

    url: str  # a plain path if it is local, which may be a link
    size: int | None  # bytes, as it is stored
    version: str  # changes with the content, where the storage tells
    name: str = ""  # its path below the folder of the source


def local_path(url: str) -> str:
    """A path or file:// URL as an absolute path."""
    return os.path.abspath(os.path.expanduser(re.sub("^(file|local)://", "", url)))


def is_folder(path: str) -> bool:
    """Raises UserError for what cannot be read, such as a loop of links."""
    return stat.S_ISDIR(_status(path).st_mode)


def files_at(paths: list[str], *, strict: bool = True) -> list[File]:
    """Those of the paths that are files; sockets and the like are not.

    Raises UserError for a link to nothing or in a loop, which is left out if not `strict`.
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
    """The files of a folder and of its folders whose names end so.

    Raises UserError for a folder that cannot be read; if `strict`, for a link to nothing and for
    one to a folder that it is in. Those are left out else.
    """
    below = _walk(folder, not_entered, strict)
    paths = [path for path, folder in below if not folder and path.lower().endswith(endings)]
    return files_at(paths, strict=strict)


def files_like(pattern: str, *, strict: bool = True) -> list[File]:
    """The files that match an absolute path with *, ?, [...], and ** for any folders.

    Brackets stand for themselves where something has that very name. Raises as `files_under`.
    """
    paths, parts = ["/"], [part for part in pattern.split("/") if part]
    for part in parts[:-1]:
        inner = [path for folder in paths for path in _matches(folder, part, strict)]
        paths = [path for path in dict.fromkeys(inner) if os.path.isdir(path)]
    found = [path for folder in paths for path in _matches(folder, parts[-1], strict)]
    return files_at(list(dict.fromkeys(found)), strict=strict)


def fixed_part(pattern: str) -> str:
    """The folder that all of `files_like` is below."""
    parts = pattern.split("/")
    for number, part in enumerate(parts):
        here = "/".join(parts[: number + 1])
        if re.search("[*?]", part) or ("[" in part and not os.path.lexists(here)):
            return "/".join(parts[:number])
    return os.path.dirname(pattern)


def without_copies(paths: Iterable[str]) -> list[str]:
    """The paths of different files: of each the path itself rather than a link, else one link."""
    real_folder = lru_cache(os.path.realpath)
    kept: dict[str, str] = {}
    for linked, path in sorted((os.path.islink(path), path) for path in paths):
        folder, name = os.path.split(path)
        real = os.path.realpath(path) if linked else os.path.join(real_folder(folder), name)
        kept.setdefault(real, path)
    return list(kept.values())


def _matches(folder: str, part: str, strict: bool) -> list[str]:
    """The paths that match a part of a pattern in a folder; ** matches the folder too."""
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
    """Everything below a folder, and whether it is a folder."""
    above = (*above, os.path.realpath(folder))
    for entry in _entries(folder):
        if not os.path.isdir(entry.path) if entry.is_symlink() else not entry.is_dir():
            yield entry.path, False
        elif entry.name in not_entered:
            continue
        elif entry.is_symlink() and os.path.realpath(entry.path) in above:
            if strict:
                raise UserError(f"{entry.path} is a link to a folder that it is in; remove it")
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
            raise UserError(f"{path} is a link to {gone}, which is not there") from error
        raise UserError(f"there is no file or folder {path}") from error
    except (OSError, ValueError) as error:  # a loop of links, a name too long, a NUL in it
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"cannot read {path}: {reason}") from error
