"""Copies of a run's checkpoints in a second place: an object store, or any folder.

Below URL/NAME a copy of step N is the folder N, `checkpoint/` (the files of the checkpoint) and
`run/` (what else a resume needs), and the commit N.json, the checksums of all its files. The commit
is written last and removed first: a copy without it is not there.
"""

import json
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any

from jaxtrain.data.files.remote import FINAL, filesystem_of, is_local
from jaxtrain.runs.checkpoint import saved_steps
from jaxtrain.runs.config import CheckpointConfig
from jaxtrain.runs.history import read_rows
from jaxtrain.settings import UserError
from jaxtrain.storage import checksums as sums

# Beside a checkpoint and metrics.jsonl, what a resume needs of a run directory.
COMPANIONS = ("config.yaml", "env.json", "data.json", "reference.npz", "tokenizer")
TRIES = 6
FIRST_WAIT = 0.5  # seconds; doubled for every further try
POLL = 1.0  # seconds between two looks at the run directory
STAGE = ".mirror"  # in the run directory: what goes out, what comes in


class Damaged(Exception):
    """A copy that is not as it was written."""


class Store:
    """The copies of one run below a URL. An error that may pass is tried again, ever later."""

    def __init__(self, url: str, name: str):
        self.url = f"{url.rstrip('/')}/{name}"
        self.filesystem, root = filesystem_of(self.url)
        self.root = root.rstrip("/")

    def steps(self) -> list[int]:
        """Of all whole copies, the newest last."""
        return sorted(int(name[:-5]) for name in self._names() if name[:-5].isdigit())

    def commit(self, step: int) -> dict[str, sums.Entry]:
        """The checksums of a copy's files."""
        try:
            found = json.loads(self._tried(lambda: self.filesystem.cat_file(self._commit(step))))
            return {str(name): sums.Entry(**entry) for name, entry in found["files"].items()}
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise Damaged(f"{self.url}/{step}.json is damaged") from error

    def write(self, step: int, files: Mapping[str, Path]) -> None:
        """Copy files, then what makes the copy whole."""
        self._remove_commit(step)
        entries = {name: sums.entry(path) for name, path in files.items()}
        for name, path in files.items():
            self._tried(lambda p=path, n=name: self._put(p, f"{self.root}/{step}/{n}"))
        text = json.dumps({"step": step, "files": entries}, indent=1)
        self._tried(lambda: self.filesystem.pipe_file(self._commit(step), text.encode()))

    def read(self, step: int, folder: Path, only: str | None = None) -> None:
        """Copy the files, or one, into a folder. Damaged if one is not as it was written."""
        commit = self.commit(step)
        for name in commit if only is None else [only]:
            path, shown = PurePosixPath(name), f"{self.url}/{step}/{name}"
            if path.is_absolute() or ".." in path.parts:
                raise Damaged(f"{self.url}/{step}.json names {name}")
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            remote, local = f"{self.root}/{step}/{name}", str(folder / path)
            try:
                self._tried(lambda r=remote, p=local: self.filesystem.get_file(r, p))
            except FileNotFoundError as error:
                raise Damaged(f"{shown} is missing") from error
            if sums.entry(folder / path) != commit.get(name):
                raise Damaged(f"{shown} is not as it was written (CRC-32)")

    def remove(self, step: int) -> None:
        self._remove_commit(step)
        folder = f"{self.root}/{step}"
        if self._tried(lambda: self.filesystem.exists(folder)):
            self._tried(lambda: self.filesystem.rm(folder, recursive=True))

    def clean(self, keep: int, keep_every: int | None) -> None:
        """Remove what is not kept, and what no commit made whole; no folder of anybody else."""
        whole = self.steps()
        forever = [step for step in whole if keep_every and step % keep_every == 0]
        kept = {*whole[-keep:], *forever}
        begun = [int(name) for name in self._names() if name.isdigit() and int(name) not in whole]
        for step in [*(step for step in whole if step not in kept), *filter(self._is_ours, begun)]:
            self.remove(step)

    def _is_ours(self, step: int) -> bool:
        folders = (f"{self.root}/{step}/{name}" for name in ("checkpoint", "run"))
        return any(self._tried(lambda f=folder: self.filesystem.exists(f)) for folder in folders)

    def _commit(self, step: int) -> str:
        return f"{self.root}/{step}.json"

    def _remove_commit(self, step: int) -> None:
        if self._tried(lambda: self.filesystem.exists(self._commit(step))):
            self._tried(lambda: self.filesystem.rm_file(self._commit(step)))

    def _names(self) -> list[str]:
        """Of what is directly below the root."""

        def ask() -> list[str]:
            self.filesystem.invalidate_cache()
            return self.filesystem.ls(self.root, detail=False)

        try:
            return [path.rstrip("/").rpartition("/")[2] for path in self._tried(ask)]
        except FileNotFoundError:
            return []

    def _put(self, path: Path, to: str) -> None:
        if is_local(self.url):  # object stores have no folders to make
            Path(to).parent.mkdir(parents=True, exist_ok=True)
        self.filesystem.put_file(str(path), to)
        self.filesystem.invalidate_cache()
        size, wanted = self.filesystem.info(to)["size"], path.stat().st_size
        if size != wanted:
            raise OSError(f"{size:,} of {wanted:,} bytes have arrived")

    def _tried(self, action: Callable[[], Any]) -> Any:
        for attempt in range(TRIES):
            try:
                return action()
            except (FileNotFoundError, PermissionError, *FINAL):
                raise
            except Exception:
                if attempt + 1 == TRIES:
                    raise
                time.sleep(FIRST_WAIT * 2**attempt * random.uniform(0.75, 1.25))
        raise AssertionError("unreachable")


def reason_of(error: Exception) -> str:
    """One short line."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0][:200]}" if said else type(error).__name__


# ---- out -----------------------------------------------------------------------------------------


class Mirror:
    """Copies the newest checkpoint of a run directory in a thread, as long as it is open.

    Its end copies the newest one of all, and waits for that. What fails is said in one line and
    tried again with the next checkpoint.
    """

    def __init__(
        self, run_dir: Path, config: CheckpointConfig, name: str, say: Callable[[str], None]
    ):
        assert config.mirror is not None
        self.run_dir, self.every, self.say = run_dir, config.mirror.every, say
        self.store, self.keep = Store(config.mirror.url, name), (config.keep, config.keep_every)
        self.copied: dict[int, int | None] | None = None  # step -> stamp of the local checkpoint
        self.failed: int | None = None  # step that was given up
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self._run, name="mirror", daemon=True)

    def __enter__(self) -> "Mirror":
        self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None):
        self.closing.set()
        if kind is None or issubclass(kind, Exception):  # else somebody is in a hurry
            self.thread.join()

    def _run(self) -> None:
        closing = False
        while not closing:
            closing = self.closing.wait(POLL)
            self.look(closing)

    def look(self, last: bool = False) -> None:
        """Make the copies what they should be. last: whatever `every` says, and what failed."""
        local = stamps(self.run_dir)
        if not local or (max(local) == self.failed and not last):
            return
        newest = max(local)
        try:
            if self.copied is None:
                self.store.clean(*self.keep)
                self.copied = {step: local.get(step) for step in self.store.steps()}
            for step in taken_back(self.copied, local):
                self.store.remove(step)
                del self.copied[step]
            gap = newest - max(self.copied, default=newest - self.every)
            if newest in self.copied or (gap < self.every and not last):
                return
            self._copy(newest)
            self.copied[newest] = local[newest]
            self.store.clean(*self.keep)
            self.failed = None
        except Exception as error:
            if stamps(self.run_dir).get(newest) != local[newest]:
                return  # removed meanwhile: there is a newer one, or the run went back
            self.failed = newest
            self.say(
                f"mirror   {self.store.url}: checkpoint {newest} was not copied "
                f"({reason_of(error)}); the run goes on, and its next checkpoint is tried"
            )

    def _copy(self, step: int) -> None:
        """Links keep the files while they are copied, whatever the run removes meanwhile."""
        stage = self.run_dir / STAGE
        shutil.rmtree(stage, ignore_errors=True)
        try:
            for name, path in sources(self.run_dir, step).items():
                (stage / name).parent.mkdir(parents=True, exist_ok=True)
                os.link(path, stage / name)
            rows = [row for row in read_rows(self.run_dir / "metrics.jsonl") if row["step"] <= step]
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (stage / "run" / "metrics.jsonl").write_text(lines)
            self.store.write(step, sums.files_below(stage))
        finally:
            shutil.rmtree(stage, ignore_errors=True)


def sources(run_dir: Path, step: int) -> dict[str, Path]:
    """The files of a copy, by their names there."""
    found = sums.files_below(run_dir / "checkpoints" / str(step))
    files = {f"checkpoint/{name}": path for name, path in found.items()}
    for path in (run_dir / name for name in COMPANIONS):
        below = sums.files_below(path) if path.is_dir() else {"": path} if path.is_file() else {}
        files |= {f"run/{path.name}/{name}".rstrip("/"): file for name, file in below.items()}
    return files


def stamps(run_dir: Path) -> dict[int, int]:
    """Step -> when it was made, for each whole local checkpoint."""
    found = {}
    for step in saved_steps(run_dir):
        file = run_dir / "checkpoints" / str(step) / "position" / sums.LIST
        if file.is_file():
            found[step] = file.stat().st_mtime_ns
    return found


def taken_back(copied: Mapping[int, int | None], local: Mapping[int, int]) -> list[int]:
    """Copies of checkpoints that the run has gone back from, or made anew."""
    newest = max(local)
    anew = lambda step, stamp: step in local and local[step] != stamp
    return [step for step, stamp in copied.items() if step > newest or anew(step, stamp)]


# ---- in ------------------------------------------------------------------------------------------


def take_newest(
    run_dir: Path,
    c: CheckpointConfig,
    name: str,
    check: Callable[[Path], None],
    say: Callable[[str], None],
) -> None:
    """Take the newest whole copy that is newer than every local checkpoint, if there is one.

    check: raises UserError for the config.yaml of another run, whichever is newer. A damaged copy
    is said and passed over. UserError where the copies cannot be read.
    """
    assert c.mirror is not None
    stage = run_dir / STAGE
    shutil.rmtree(stage, ignore_errors=True)
    store = Store(c.mirror.url, name)
    try:
        steps = store.steps()
        with suppress(Damaged):  # said below
            for step in steps[-1:]:  # whoever wrote last owns the place
                store.read(step, stage, only="run/config.yaml")
                check(stage / "run" / "config.yaml")
        shutil.rmtree(stage, ignore_errors=True)
        newer = [s for s in steps if s > max(saved_steps(run_dir), default=-1)]
        for step in reversed(newer):
            try:
                store.read(step, stage)
            except Damaged as error:
                shutil.rmtree(stage, ignore_errors=True)
                say(f"mirror   {error}; checkpoint {step} is not taken from there")
                continue
            check(stage / "run" / "config.yaml")
            _move_in(run_dir, stage, step)
            say(f"mirror   {store.url}: checkpoint {step} is taken from there")
            return
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"checkpoint.mirror.url: {store.url} cannot be read ({reason_of(error)}); "
            "checkpoint.mirror=null starts without it"
        ) from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _move_in(run_dir: Path, stage: Path, step: int) -> None:
    """What makes the run directory one that is resumed comes last."""
    for path in (stage / "run").iterdir():
        target = run_dir / path.name
        if target.is_dir():
            shutil.rmtree(target)
        path.replace(target)
    (run_dir / "checkpoints").mkdir(exist_ok=True)
    (stage / "checkpoint").replace(run_dir / "checkpoints" / str(step))
