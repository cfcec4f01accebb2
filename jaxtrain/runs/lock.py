"""Lock of a run directory: one job at a time. The lock names its holder and expires with it.

The lock is a file `lock.N` in the run directory. It is created by `link`, which is atomic on local
disks and on NFS (O_EXCL and flock have not always been there); without hard links, by O_EXCL. The
file with the largest N is the lock, and its holder touches it every few seconds. A stale lock is
not removed, because two processes could then each remove the other's new lock. Instead, whoever
creates `lock.N+1` has the lock, and only one process can. On the holder's machine, a lock is stale
as soon as the process is gone. On another machine, it is stale if it was not touched for `timeout`
seconds by the file server's clock, which is read from a file made there. A start waits until this
is decided: a job that is rescheduled to another machine resumes by itself, and `kill -9` leaves no
file to remove by hand.
"""

import errno
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from jaxtrain.cluster.coordinator import Coordinator, end_process
from jaxtrain.settings import UserError

BEATS = 20  # touches within `timeout`
LOOK = 0.5  # seconds between two checks of another machine's lock
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class Holder(NamedTuple):
    """The process that holds a lock, and the facts that show whether it is alive."""

    host: str
    pid: int
    started: str  # UTC, to the second
    machine: str  # boot id and PID namespace: a pid identifies a process only within these
    created: float  # start time of the process in seconds: pids are reused
    timeout: float  # seconds without a touch after which it counts as gone
    token: str


def myself(timeout: float) -> Holder:
    """This process as a holder."""
    now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    created = psutil.Process().create_time()
    host = socket.gethostname()
    return Holder(host, os.getpid(), now, machine(), created, timeout, secrets.token_hex(8))


def machine() -> str:
    """Identity of the booted system and PID namespace (a container has its own)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {psutil.boot_time():.0f}"


def known_gone(holder: Holder) -> bool | None:
    """Whether a lock's process is gone; None on another machine, where only a timeout decides."""
    if holder.machine != machine():
        return None
    try:
        process = psutil.Process(holder.pid)
        same = abs(process.create_time() - holder.created) < 1
        return not same or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def locks_in(run_dir: Path) -> list[int]:
    """The numbers of the lock files, in ascending order."""
    names = [p.name.partition(".")[2] for p in run_dir.glob("lock.*")]
    return sorted(int(name) for name in names if name.isdigit())


def read_holder(path: Path) -> Holder | None:
    """The holder that a lock file names; None if the file is incomplete or gone."""
    with suppress(OSError, ValueError, TypeError):
        return Holder(**json.loads(path.read_text()))
    return None


class InUseError(UserError):
    """A living process holds the run directory."""

    def __init__(self, message: str, holder: Holder):
        super().__init__(message)
        self.holder = holder


class RunLock:
    """The lock of a run directory, held from `take` to `release`.

    timeout: seconds without a touch after which others may treat this process as gone.
    end(message, code): called if another process has taken the lock anyway, because this one was
    suspended for longer. Nothing may be written from then on.
    """

    def __init__(self, run_dir: Path, timeout: float, end: Callable[[str, int], Any] = end_process):
        self.run_dir, self.timeout, self.end = run_dir, timeout, end
        self.me = myself(timeout)
        self.path: Path | None = None
        self.over = threading.Event()

    def take(self) -> None:
        """Take the lock. Raises UserError that names the holder if there is one."""
        draft = self.run_dir / f"lock-{self.me.host}-{self.me.pid}-{self.me.token}"
        try:
            draft.write_text(json.dumps(self.me._asdict()))
            while True:
                number = self._free(draft)
                mine = self.run_dir / f"lock.{number}"
                if not made(mine, draft):
                    continue
                if locks_in(self.run_dir)[-1:] == [number]:
                    break
                mine.unlink(missing_ok=True)  # the directory listing was stale
        finally:
            draft.unlink(missing_ok=True)
        self.path = mine
        for older in locks_in(self.run_dir):
            if older < number:
                (self.run_dir / f"lock.{older}").unlink(missing_ok=True)
        threading.Thread(target=self._beat, name="lock", daemon=True).start()

    def _free(self, draft: Path) -> int:
        """Wait until the last lock is stale or released. Returns the next number."""
        seen: dict[Path, int] = {}  # lock waited for -> its last touch
        while numbers := locks_in(self.run_dir):
            path = self.run_dir / f"lock.{numbers[-1]}"
            try:
                touched = path.stat().st_mtime_ns
                holder = read_holder(path)
            except FileNotFoundError:  # released just now
                continue
            gone = known_gone(holder) if holder else None
            os.utime(draft)  # sets the file server's time
            silence = (draft.stat().st_mtime_ns - touched) / 1e9
            if gone is None and silence > (holder or self.me).timeout:
                gone = True
            if gone:
                return numbers[-1] + 1
            if holder and (gone is False or touched != seen.get(path, touched)):
                raise InUseError(
                    f"{self.run_dir} is in use by process {holder.pid} on {holder.host}, which "
                    f"began at {holder.started}: wait until it has ended, stop it, or set "
                    "run.name to start another run",
                    holder,
                )
            if path not in seen:
                seen[path] = touched
                self._say_wait(path, holder, silence)
            time.sleep(LOOK)
        return 1

    def _say_wait(self, path: Path, holder: Holder | None, silence: float) -> None:
        left = (holder or self.me).timeout - silence
        who = f"process {holder.pid} on {holder.host}" if holder else "a process"
        text = f"lock     {path} is of {who}: waiting for a sign of life, {left:.0f} s at most"
        print(text, file=sys.stderr, flush=True)

    def _beat(self) -> None:
        assert self.path is not None
        while not self.over.wait(self.timeout / BEATS):
            try:
                os.utime(self.path)
                numbers = locks_in(self.run_dir)
            except FileNotFoundError:
                numbers = []
            except OSError:
                continue  # the file server is unreachable; it may come back
            mine = int(self.path.suffix[1:])
            if self.over.is_set() or (numbers and numbers[-1] == mine):
                continue
            who = read_holder(self.run_dir / f"lock.{numbers[-1]}") if numbers else None
            by = f"process {who.pid} on {who.host} has it" if who else "its lock is gone"
            self.end(f"{self.run_dir} was taken from this process: {by}", 2)
            return

    def release(self) -> None:
        self.over.set()
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def made(path: Path, draft: Path) -> bool:
    """Create `path` with the draft's content. Returns whether this call created it."""
    try:
        os.link(draft, path)
        return True
    except FileExistsError:
        # On NFS, a lost answer makes the client resend the call: then the first call created it.
        return draft.stat().st_nlink == 2 and path.exists() and path.samefile(draft)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
    try:
        with path.open("x") as file:
            file.write(draft.read_text())
        return True
    except FileExistsError:
        return False


@contextmanager
def lock_run(run_dir: Path, coordinator: Coordinator, timeout: float) -> Iterator[None]:
    """Hold the run directory's lock in process 0, for the whole job. Folders created for it are
    removed if they are empty in the end. Raises UserError if another job holds the lock."""
    if coordinator.index:
        yield
        return
    absent = [p for p in (run_dir, *run_dir.absolute().parents) if not p.exists()]
    lock = RunLock(run_dir, timeout)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock.take()
        yield
    finally:
        lock.release()
        with suppress(OSError):
            for folder in absent:
                folder.rmdir()
