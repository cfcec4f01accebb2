"""Download a folder at a URL into a local copy, and upload a local folder to a URL.

A run lists its published files, with checksums, in files.json. It writes the list after the files,
and a reader downloads what is listed. Other folders have no list: all their files are downloaded.
"""

import fcntl
import json
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxtrain.settings import UserError, read_object
from jaxtrain.storage import checksums as sums
from jaxtrain.storage.disk import disk_full, write_json
from jaxtrain.storage.location import COPIES, cached, check_location
from jaxtrain.storage.objects import Damaged, RemoteFolder, reason_of

LIST = "files.json"  # at the URL of a run
SOURCE = "source.json"  # in a local copy: its URL, and its files' checksums, or sizes and versions
RESULTS = re.compile(r"(tasks|needle|harness).*\.json")  # evaluations that others add to a run
LAST = ("config.json", "config.yaml")  # uploaded last: a folder with these counts as a model
TRIES = 3
COMPLETE: set[Path] = set()  # local copies that have the model, since the last `local_copy`
WAIT = 1.0  # seconds, for a run that is being written


def local_copy(url: str) -> Path:
    """Update the local copy of a folder at a URL. A run's model is left to `fetch_model`."""
    check_location("the URL", url)
    url = url.rstrip("/")
    folder = cached(COPIES, url) / url.rpartition("/")[2]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / SOURCE).is_file():
            write_json(folder / SOURCE, {"url": url, "files": {}})
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written ({error.strerror}); name another with JAXTRAIN_CACHE"
        ) from error
    COMPLETE.discard(folder)
    update(folder, lambda name: not name.startswith("model/"))
    return folder


def fetch_model(folder: Path) -> None:
    """Download the model into a local copy, once per process. No-op for any other folder."""
    if folder not in COMPLETE and (folder / SOURCE).is_file():
        update(folder, lambda name: True)
        COMPLETE.add(folder)


def source_of(folder: Path) -> RemoteFolder | None:
    """The remote folder of a local copy; None if the folder is no local copy."""
    file = folder / SOURCE
    return RemoteFolder(read_object(file)["url"]) if file.is_file() else None


def update(folder: Path, wanted: Callable[[str], bool]) -> None:
    """Bring a local copy up to date with its URL. Raises UserError if that cannot be read."""
    remote = source_of(folder)
    assert remote is not None
    stage = folder / ".part"
    try:
        with alone(folder):
            for attempt in range(TRIES):
                try:
                    listed = published(remote)
                    if listed is None:
                        take_unlisted(remote, folder, stage, wanted)
                    else:
                        take_listed(remote, listed, folder, stage, wanted)
                    return
                except Damaged:  # or being written
                    if attempt + 1 == TRIES:
                        raise
                    time.sleep(WAIT)
    except UserError:
        raise
    except Exception as error:
        if said := disk_full(error):
            raise UserError(f"{folder}: {said}; name another disk with JAXTRAIN_CACHE") from error
        raise UserError(f"{remote.url} cannot be read ({reason_of(error)})") from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def published(remote: RemoteFolder) -> dict[str, sums.Entry] | None:
    """The files that a run lists as published; None without a list."""
    text = remote.read(LIST)
    if text is None:
        return None
    try:
        found = json.loads(text)
        return {str(name): sums.Entry(**entry) for name, entry in found["files"].items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise Damaged(f"{remote.url}/{LIST} is damaged") from error


def take_listed(
    remote: RemoteFolder,
    listed: dict[str, sums.Entry],
    folder: Path,
    stage: Path,
    wanted: Callable[[str], bool],
) -> None:
    """Download listed files whose checksums differ; delete files that are no longer listed."""

    def differs(name: str, entry: sums.Entry) -> bool:
        return not (folder / name).is_file() or sums.entry(folder / name) != entry

    new = {name: e for name, e in listed.items() if wanted(name) and differs(name, e)}
    remote.get(new, stage)
    results = [name for name in remote.names() if RESULTS.fullmatch(name) and name not in listed]
    for name in results:
        remote.fetch(name, stage / name)
    before = read_object(folder / SOURCE)["files"]
    for name in before.keys() - listed.keys():
        (folder / name).unlink(missing_ok=True)
    move_in(stage, folder, [*new, *results])
    write_json(folder / SOURCE, {"url": remote.url, "files": dict(listed)})


def take_unlisted(
    remote: RemoteFolder, folder: Path, stage: Path, wanted: Callable[[str], bool]
) -> None:
    """Download files whose size or version differs from the copy's."""
    try:
        found = remote.files()
    except FileNotFoundError:
        found = {}
    if not found:
        raise UserError(f"{remote.url}: there is nothing there")
    facts = {
        name: [info.get("size"), *(str(info.get(key)) for key in ("ETag", "mtime", "updated"))]
        for name, info in found.items()
        if wanted(name)
    }
    before = read_object(folder / SOURCE)["files"]
    new = [n for n in facts if facts[n] != before.get(n) or not (folder / n).is_file()]
    for name in new:
        if ".." in Path(name).parts:
            raise UserError(f"{remote.url} has a file {name}")
        remote.fetch(name, stage / name)
        if facts[name][0] != (stage / name).stat().st_size:
            raise Damaged(f"{remote.url}/{name} has arrived in part")
    move_in(stage, folder, new)
    write_json(folder / SOURCE, {"url": remote.url, "files": before | facts})


def move_in(stage: Path, folder: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (stage / name).replace(folder / name)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold a file lock: one process of this machine at a time."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def sent_there(url: str) -> Iterator[Path]:
    """Yield a temporary path for a file or folder, which is uploaded to a URL at the end."""
    check_location("the URL", url)
    remote = RemoteFolder(url.rstrip("/").rpartition("/")[0])
    name = url.rstrip("/").rpartition("/")[2]
    if remote.exists(name):
        raise UserError(f"{url} is there already; name another place")
    with tempfile.TemporaryDirectory(prefix="jaxtrain-") as scratch:
        yield Path(scratch) / name
        send_files(remote, sums.files_below(Path(scratch)))


def send_results(folder: Path, *paths: Path) -> None:
    """Upload files written into the local copy of a run to the run's URL."""
    remote = source_of(folder)
    inside = [path for path in paths if path.is_file() and path.parent == folder]
    if remote is not None and inside:
        send_files(remote, {path.name: path for path in inside})


def send_files(remote: RemoteFolder, files: dict[str, Path]) -> None:
    """Upload files; those last by which a reader recognizes a complete folder."""
    last = {name: path for name, path in files.items() if path.name in LAST}
    try:
        remote.put({name: path for name, path in files.items() if name not in last})
        remote.put(last)
    except Exception as error:
        raise UserError(f"{remote.url} cannot be written ({reason_of(error)})") from error
