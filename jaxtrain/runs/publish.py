"""Publishing of a run whose `run.directory` is a URL: its files are uploaded while it trains.

The run works in a local folder. Files are uploaded first and files.json, their checksums, last, so
that a reader of the list never sees incomplete files. `mirror.py` uploads the checkpoints.
"""

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from jaxtrain.runs.checkpoint import saved_steps
from jaxtrain.runs.mirror import Store
from jaxtrain.settings import UserError
from jaxtrain.storage import checksums as sums
from jaxtrain.storage.fetch import LIST, published, source_of
from jaxtrain.storage.objects import Damaged, RemoteFolder, reason_of

EVERY = 30.0  # seconds between two checks of the run directory
LOG = "metrics.jsonl"  # written while it is read
NAMES = (
    "config.yaml", "env.json", "data.json", "reference.npz", LOG, "tokenizer", "samples", "model",
)  # fmt: skip
UNLISTED = ("report.html",)  # `jaxtrain report URL` writes it as well
CHECKPOINTS = "checkpoints"  # folder at the URL


class Publisher:
    """Thread that uploads a run directory, without checkpoints, while the context is open.

    The end of the context uploads the rest. Raises UserError if that fails; the same command then
    retries it.
    """

    def __init__(self, run_dir: Path, url: str, say: Callable[[str], None]):
        self.run_dir, self.say, self.remote = run_dir, say, RemoteFolder(url)
        self.there: dict[str, sums.Entry] | None = None  # files listed at the URL
        # Name -> ((mtime, size), entry), so that unchanged files are not read again.
        self.known: dict[str, tuple[tuple[int, int], sums.Entry]] = {}
        self.fault: str | None = None  # error of the last upload
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self._run, name="publish", daemon=True)

    def __enter__(self) -> "Publisher":
        self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None):
        self.closing.set()
        if kind is not None and not issubclass(kind, Exception):
            return  # do not wait after a KeyboardInterrupt
        self.thread.join()
        if kind is None and self.fault:
            raise UserError(
                f"{self.remote.url} cannot be written ({self.fault}); the run is complete in "
                f"{self.run_dir}, and the same command uploads it"
            )

    def _run(self) -> None:
        closing = False
        while not closing:
            closing = self.closing.wait(EVERY)
            self.look()

    def look(self) -> None:
        """Upload new and changed files."""
        before, self.fault = self.fault, None
        try:
            self._publish()
        except FileNotFoundError as error:
            if not error.filename:  # with a filename, the run has replaced or removed a local file
                self.fault = reason_of(error)
        except Exception as error:
            self.fault = reason_of(error)
        if self.fault and not before:
            self.say(
                f"publish  {self.remote.url} cannot be written ({self.fault}); the run continues "
                f"in {self.run_dir}, and the upload is retried"
            )

    def _publish(self) -> None:
        if self.there is None:
            try:
                self.there = published(self.remote) or {}
            except Damaged:
                self.there = {}
        files = self._files()
        entries = {name: self._entry(name, path) for name, path in files.items()}
        new = {name: path for name, path in files.items() if entries[name] != self.there.get(name)}
        self.remote.put(new)
        listed = {name: entry for name, entry in entries.items() if name not in UNLISTED}
        if listed != {n: entry for n, entry in self.there.items() if n not in UNLISTED}:
            self.remote.write(LIST, json.dumps({"files": listed}, indent=1).encode())
        self.there = entries

    def _files(self) -> dict[str, Path]:
        """Local files to publish, keyed by their name at the URL."""
        found: dict[str, Path] = {}
        for path in (self.run_dir / name for name in (*NAMES, *UNLISTED)):
            below = sums.files_below(path) if path.is_dir() else {"": path} if path.exists() else {}
            found |= {f"{path.name}/{name}".rstrip("/"): file for name, file in below.items()}
        if LOG in found:  # a copy that ends with a complete row
            copy = self.run_dir / f".{LOG}"
            copy.write_bytes(found[LOG].read_bytes().rpartition(b"\n")[0] + b"\n")
            found[LOG] = copy
        return {name: path for name, path in found.items() if path.suffix != ".part"}

    def _entry(self, name: str, path: Path) -> sums.Entry:
        facts = path.stat()
        stamp = facts.st_mtime_ns, facts.st_size
        if name not in self.known or self.known[name][0] != stamp:
            self.known[name] = stamp, sums.entry(path)
        return self.known[name][1]


# ---- in ------------------------------------------------------------------------------------------


def take_samples(run_dir: Path, url: str) -> None:
    """Download a run's published samples that are missing locally, for its report."""
    remote, newest = RemoteFolder(url), max(saved_steps(run_dir), default=-1)
    try:
        names = {
            name: entry
            for name, entry in (published(remote) or {}).items()
            if name.startswith("samples/") and not (run_dir / name).exists()
            and int("".join(filter(str.isdigit, name)) or 0) <= newest
        }  # fmt: skip
        remote.get(names, run_dir)
    except Exception as error:
        raise UserError(f"{url} cannot be read ({reason_of(error)})") from error


def take_checkpoint(folder: Path, step: int | None) -> None:
    """Download a checkpoint (of `step`, or the newest) into the local copy of a run at a URL. No-op
    for any other folder."""
    remote = source_of(folder)
    if remote is None:
        return
    stage = folder / ".part"
    try:
        store = Store(f"{remote.url}/{CHECKPOINTS}")
        there = store.steps()
        steps = [s for s in there if step in (None, s)]
        if step is not None and not steps:
            known = ", ".join(map(str, there)) or "none"
            raise UserError(f"{remote.url}: no checkpoint of step {step}; there are {known}")
        if not steps or steps[-1] in saved_steps(folder):
            return
        store.read(steps[-1], stage, only="checkpoint/")
        (folder / "checkpoints").mkdir(exist_ok=True)
        (stage / "checkpoint").replace(folder / "checkpoints" / str(steps[-1]))
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{remote.url} cannot be read ({reason_of(error)})") from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)
