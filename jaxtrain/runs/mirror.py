"""Copies of a run's checkpoints at a second location: an object store, or any folder.

Below URL/NAME, a copy of step N is a folder N and a commit file N.json. The folder contains
`checkpoint/` (the checkpoint's files) and `run/` (other files that a resume needs). The commit file
lists the checksums of all files. It is written last and removed first: a copy without it does not
count.
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

# Files of a run directory that a resume needs, besides a checkpoint and metrics.jsonl.
COMPANIONS = ("config.yaml", "env.json", "data.json", "reference.npz", "tokenizer")
POLL = 1.0  # seconds between two checks of the run directory
STAGE = ".mirror"  # staging folder in the run directory, for uploads and downloads
DAMAGED = "damaged"  # folder in the run directory for damaged checkpoints


class Store:
    """The copies of one run's checkpoints in a folder at a URL."""

    def __init__(self, url: str):
        self.folder = RemoteFolder(url)
        self.url = self.folder.url

    def steps(self) -> list[int]:
        """Steps of all complete copies, in ascending order."""
        return committed_steps(self.folder.names())

    def commit(self, step: int) -> dict[str, sums.Entry]:
        """The checksums of a copy's files."""
        try:
            found = json.loads(self.folder.read(f"{step}.json") or b"")
            return {str(name): sums.Entry(**entry) for name, entry in found["files"].items()}
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise Damaged(f"{self.url}/{step}.json is damaged") from error

    def write(self, step: int, files: Mapping[str, Path]) -> None:
        """Upload files, then the commit file."""
        self.folder.remove(f"{step}.json")
        entries = {name: sums.entry(path) for name, path in files.items()}
        self.folder.put({f"{step}/{name}": path for name, path in files.items()})
        text = json.dumps({"step": step, "files": entries}, indent=1)
        self.folder.write(f"{step}.json", text.encode())

    def read(self, step: int, folder: Path, only: str = "") -> None:
        """Download the files whose names begin with `only` into a folder.

        Raises Damaged if a file does not match its checksum.
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
        """Remove copies beyond `keep` and `keep_every`, and incomplete copies. Folders that are
        not copies stay."""
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
    """Thread that uploads a run directory's newest checkpoint while the context is open.

    The end of the context uploads the last checkpoint and waits for it. A failure is reported in
    one line, and retried with the next checkpoint.
    """

    def __init__(
        self, run_dir: Path, config: CheckpointConfig, store: Store, say: Callable[[str], None]
    ):
        self.run_dir, self.store, self.say = run_dir, store, say
        self.every = config.mirror.every if config.mirror else 1
        self.keep = config.keep, config.keep_every
        self.copied: dict[int, int | None] | None = None  # step -> stamp of the local checkpoint
        self.failed: int | None = None  # step whose upload has failed
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self._run, name="mirror", daemon=True)

    def __enter__(self) -> "Mirror":
        self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None):
        self.closing.set()
        if kind is None or issubclass(kind, Exception):  # else KeyboardInterrupt: do not wait
            self.thread.join()

    def _run(self) -> None:
        closing = False
        while not closing:
            closing = self.closing.wait(POLL)
            self.look(closing)

    def look(self, last: bool = False) -> None:
        """Bring the copies up to date. last: ignore `every`, and retry a failed upload."""
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
                return  # removed meanwhile: there is a newer one, or the run was rolled back
            self.failed = newest
            self.say(
                f"mirror   {self.store.url}: checkpoint {newest} was not copied "
                f"({reason_of(error)}); the run continues, and the next checkpoint is tried"
            )

    def _copy(self, step: int) -> None:
        """Upload a checkpoint. Hard links keep its files if the run removes them meanwhile."""
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
    """Local files of a copy, keyed by their name in it."""
    found = sums.files_below(run_dir / "checkpoints" / str(step))
    files = {f"checkpoint/{name}": path for name, path in found.items()}
    for path in (run_dir / name for name in COMPANIONS):
        below = sums.files_below(path) if path.is_dir() else {"": path} if path.is_file() else {}
        files |= {f"run/{path.name}/{name}".rstrip("/"): file for name, file in below.items()}
    return files


def stamps(run_dir: Path) -> dict[int, int]:
    """Step -> modification time (ns), for each complete local checkpoint."""
    found = {}
    for step in saved_steps(run_dir):
        file = run_dir / "checkpoints" / str(step) / "position" / sums.LIST
        if file.is_file():
            found[step] = file.stat().st_mtime_ns
    return found


def taken_back(copied: Mapping[int, int | None], local: Mapping[int, int]) -> list[int]:
    """Copied steps that the run has since rolled back or written again."""
    newest = max(local)
    anew = lambda step, stamp: step in local and local[step] != stamp
    return [step for step, stamp in copied.items() if step > newest or anew(step, stamp)]


# ---- in ------------------------------------------------------------------------------------------


def take_newest(
    run_dir: Path, store: Store, check: Callable[[Path], None], say: Callable[[str], None]
) -> None:
    """Download the newest complete copy, if it is newer than every local checkpoint.

    Damaged local checkpoints are first moved to DAMAGED. check: raises UserError for the
    config.yaml of another run; it is called even if no copy is newer. say: gets a line for each
    damaged copy, which is skipped. Raises UserError if the copies cannot be read.
    """
    stage = run_dir / STAGE
    shutil.rmtree(stage, ignore_errors=True)
    try:
        steps = store.steps()
        with suppress(Damaged):  # reported below
            for step in steps[-1:]:  # the last writer owns the location
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
                say(f"mirror   {error}; checkpoint {step} is not restored from there")
                continue
            check(stage / "run" / "config.yaml")
            _move_in(run_dir, stage, step)
            say(f"mirror   {store.url}: checkpoint {step} is restored from there")
            return
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{store.url} cannot be read ({reason_of(error)}); set checkpoint.mirror=null to start "
            "without it"
        ) from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _set_damaged_aside(run_dir: Path, say: Callable[[str], None]) -> None:
    """Move damaged local checkpoints to DAMAGED, newest first, until one is intact."""
    for step in reversed(saved_steps(run_dir)):
        folder, aside = run_dir / "checkpoints" / str(step), run_dir / DAMAGED / str(step)
        try:
            for listed in folder.glob(f"*/{sums.LIST}"):
                sums.check_files(listed.parent)
            return
        except UserError as error:
            say(f"mirror   local checkpoint {step} is damaged ({error}); it was moved to {aside}")
            shutil.rmtree(aside, ignore_errors=True)
            aside.parent.mkdir(exist_ok=True)
            folder.replace(aside)


def _move_in(run_dir: Path, stage: Path, step: int) -> None:
    """Move a downloaded copy into the run directory. The checkpoint comes last: it is what makes
    a later start resume."""
    for path in (stage / "run").iterdir():
        target = run_dir / path.name
        if target.is_dir():
            shutil.rmtree(target)
        path.replace(target)
    (run_dir / "checkpoints").mkdir(exist_ok=True)
    (stage / "checkpoint").replace(run_dir / "checkpoints" / str(step))
