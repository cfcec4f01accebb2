"""Copies of a run's checkpoints in a second place: an object store, or any folder.

Below URL/NAME a copy of step N is the folder N, `checkpoint/` (the files of the checkpoint) and
`run/` (what else a resume needs), and the commit N.json, the checksums of all its files. The commit
is written last and removed first: a copy without it is not there.
"""

import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from jaxtrain.runs.checkpoint import saved_steps
from jaxtrain.runs.config import CheckpointConfig
from jaxtrain.runs.history import read_rows
from jaxtrain.settings import UserError
from jaxtrain.storage import checksums as sums
from jaxtrain.storage.objects import Damaged, RemoteFolder, reason_of

# Beside a checkpoint and metrics.jsonl, what a resume needs of a run directory.
COMPANIONS = ("config.yaml", "env.json", "data.json", "reference.npz", "tokenizer")
POLL = 1.0  # seconds between two looks at the run directory
STAGE = ".mirror"  # in the run directory: what goes out, what comes in
DAMAGED = "damaged"  # in the run directory: checkpoints that are not as they were written


class Store:
    """The copies of one run's checkpoints in a folder at a URL."""

    def __init__(self, url: str):
        self.folder = RemoteFolder(url)
        self.url = self.folder.url

    def steps(self) -> list[int]:
        """Of all whole copies, the newest last."""
        return committed_steps(self.folder.names())

    def commit(self, step: int) -> dict[str, sums.Entry]:
        """The checksums of a copy's files."""
        try:
            found = json.loads(self.folder.read(f"{step}.json") or b"")
            return {str(name): sums.Entry(**entry) for name, entry in found["files"].items()}
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise Damaged(f"{self.url}/{step}.json is damaged") from error

    def write(self, step: int, files: Mapping[str, Path]) -> None:
        """Copy files, then what makes the copy whole."""
        self.folder.remove(f"{step}.json")
        entries = {name: sums.entry(path) for name, path in files.items()}
        self.folder.put({f"{step}/{name}": path for name, path in files.items()})
        text = json.dumps({"step": step, "files": entries}, indent=1)
        self.folder.write(f"{step}.json", text.encode())

    def read(self, step: int, folder: Path, only: str = "") -> None:
        """Copy the files whose names begin with `only` into a folder.

        Damaged if one is not as it was written.
        """
        found = {name: entry for name, entry in self.commit(step).items() if name.startswith(only)}
        if not found:
            raise Damaged(f"{self.url}/{step}.json does not name {only or 'any file'}")
        self.folder.get({f"{step}/{name}": entry for name, entry in found.items()}, folder)
        for path in (folder / str(step)).iterdir():
            path.replace(folder / path.name)
        (folder / str(step)).rmdir()

    def remove(self, step: int) -> None:
        self.folder.remove(f"{step}.json")
        self.folder.remove(str(step))

    def clean(self, keep: int, keep_every: int | None) -> None:
        """Remove what is not kept, and what no commit made whole; no folder of anybody else."""
        names = self.folder.names()
        whole = committed_steps(names)
        forever = [step for step in whole if keep_every and step % keep_every == 0]
        kept = {*whole[-keep:], *forever}
        begun = [int(name) for name in names if name.isdigit() and int(name) not in whole]
        for step in [*(step for step in whole if step not in kept), *filter(self._is_ours, begun)]:
            self.remove(step)

    def _is_ours(self, step: int) -> bool:
        return any(self.folder.exists(f"{step}/{name}") for name in ("checkpoint", "run"))


def committed_steps(names: list[str]) -> list[int]:
    return sorted(int(name[:-5]) for name in names if name[:-5].isdigit() and name[-5:] == ".json")


# ---- out -----------------------------------------------------------------------------------------


class Mirror:
    """Copies the newest checkpoint of a run directory in a thread, as long as it is open.

    Its end copies the newest one of all, and waits for that. What fails is said in one line and
    tried again with the next checkpoint.
    """

    def __init__(
        self, run_dir: Path, config: CheckpointConfig, store: Store, say: Callable[[str], None]
    ):
        self.run_dir, self.store, self.say = run_dir, store, say
        self.every = config.mirror.every if config.mirror else 1
        self.keep = config.keep, config.keep_every
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
    run_dir: Path, store: Store, check: Callable[[Path], None], say: Callable[[str], None]
) -> None:
    """Take the newest whole copy that is newer than every local checkpoint, if there is one.

    Local checkpoints that are damaged are moved to DAMAGED first. check: raises UserError for the
    config.yaml of another run, whichever is newer. say: gets a line for each damaged
    copy, which is passed over. UserError where the copies cannot be read.
    """
    stage = run_dir / STAGE
    shutil.rmtree(stage, ignore_errors=True)
    try:
        steps = store.steps()
        with suppress(Damaged):  # said below
            for step in steps[-1:]:  # whoever wrote last owns the place
                store.read(step, stage, only="run/config.yaml")
                check(stage / "run" / "config.yaml")
        shutil.rmtree(stage, ignore_errors=True)
        _set_damaged_aside(run_dir, say)
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
            f"{store.url} cannot be read ({reason_of(error)}); checkpoint.mirror=null starts "
            "without it"
        ) from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _set_damaged_aside(run_dir: Path, say: Callable[[str], None]) -> None:
    """Until the newest local checkpoint is as it was written."""
    for step in reversed(saved_steps(run_dir)):
        folder, aside = run_dir / "checkpoints" / str(step), run_dir / DAMAGED / str(step)
        try:
            for listed in folder.glob(f"*/{sums.LIST}"):
                sums.check_files(listed.parent)
            return
        except UserError as error:
            say(f"mirror   local checkpoint {step} is damaged ({error}); it is now {aside}")
            shutil.rmtree(aside, ignore_errors=True)
            aside.parent.mkdir(exist_ok=True)
            folder.replace(aside)


def _move_in(run_dir: Path, stage: Path, step: int) -> None:
    """What makes the run directory one that is resumed comes last."""
    for path in (stage / "run").iterdir():
        target = run_dir / path.name
        if target.is_dir():
            shutil.rmtree(target)
        path.replace(target)
    (run_dir / "checkpoints").mkdir(exist_ok=True)
    (stage / "checkpoint").replace(run_dir / "checkpoints" / str(step))
