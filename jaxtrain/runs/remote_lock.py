"""Lock of a run's checkpoints in an object store: one job at a time.

As on a disk (`lock.py`), the lock is the file `lock.N` with the largest N, and whoever creates N+1
takes over from a holder that is gone; a conditional put lets only one succeed. The holder rewrites
its file every few seconds. It counts as gone if the file has not changed for `timeout` seconds on
the waiting process's clock, so that no two clocks are compared. The newest file is never removed,
so that no number is reused: its last holder marks it as released.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jaxtrain.cluster.coordinator import Coordinator, end_process
from jaxtrain.runs.lock import BEATS, Holder, InUseError, known_gone, myself
from jaxtrain.runs.mirror import Store
from jaxtrain.settings import UserError
from jaxtrain.storage.objects import RemoteFolder, reason_of

LOOK = 1.0  # seconds between two checks of another process's lock


class RemoteLock:
    """The lock of a folder at a URL, held from `take` to `release`.

    timeout: seconds without a change after which others may treat this process as gone.
    end(message, code): called if another process has taken the lock anyway. Nothing may be written
    from then on.
    """

    def __init__(
        self,
        folder: RemoteFolder,
        timeout: float,
        say: Callable[[str], Any],
        end: Callable[[str, int], Any] = end_process,
    ):
        self.folder, self.say, self.end = folder, say, end
        self.me, self.number, self.beats = myself(timeout), 0, 0
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run, name="remote lock", daemon=True)

    def take(self) -> None:
        """Take the lock. Raises UserError that names a holder, or if the store denies access."""
        try:
            while not self.number:
                number = self._free()
                if not self.folder.create(f"lock.{number}", self._text()):
                    continue
                if locks(self.folder)[-1:] == [number]:
                    self.number = number
                else:  # the listing was stale
                    self.folder.remove(f"lock.{number}")
            if self.folder.create(f"lock.{number}", self._text(1)):
                self.say(
                    f"lock     {self.folder.url} does not support conditional puts: two machines "
                    "that train this run at the same time are not detected"
                )
            for older in locks(self.folder):
                if older < number:
                    self.folder.remove(f"lock.{older}")
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"{self.folder.url} cannot be written ({reason_of(error)}); check the address, and "
                "the credentials in the environment"
            ) from error
        self.thread.start()

    def release(self) -> None:
        """Release the lock, unless another process has it. After a failure here, the next holder
        has to wait for the timeout."""
        self.over.set()
        if self.thread.ident is None:
            return
        self.thread.join()
        try:
            if locks(self.folder)[-1:] == [self.number]:
                self.folder.write(f"lock.{self.number}", self._text(released=True))
        except Exception as error:
            self.say(f"lock     {self.folder.url} was not released ({reason_of(error)})")

    def _free(self) -> int:
        """Wait until the last lock is stale or released. Returns the next number."""
        seen: dict[int, tuple[bytes, float]] = {}  # lock -> its first content, and when it was read
        while numbers := locks(self.folder):
            newest = numbers[-1]
            text = self.folder.read(f"lock.{newest}")
            if text is None:  # the listing was stale
                continue
            holder, released = read_lock(text)
            gone = known_gone(holder) if holder else None
            patience = (holder or self.me).timeout
            known = newest in seen
            first, since = seen.setdefault(newest, (text, time.monotonic()))
            if released or gone or (gone is None and time.monotonic() - since > patience):
                return newest + 1
            if gone is False or text != first:
                who = holder or self.me._replace(pid=0, host="another host")
                raise InUseError(
                    f"{self.folder.url} is in use by process {who.pid} on {who.host}, which began "
                    f"at {who.started}: wait until it has ended, stop it, or set run.name to start "
                    "another run",
                    who,
                )
            if not known:
                who = f"process {holder.pid} on {holder.host}" if holder else "a process"
                self.say(
                    f"lock     {self.folder.url} is held by {who}: waiting up to {patience:.0f} s "
                    "for a sign that it still runs"
                )
            time.sleep(LOOK)
        return 1

    def _run(self) -> None:
        while not self.over.wait(self.me.timeout / BEATS):
            try:
                numbers = locks(self.folder)
                if not numbers or numbers[-1] == self.number:
                    self.beats += 1
                    self.folder.write(f"lock.{self.number}", self._text(self.beats))
                    continue
                who = read_lock(self.folder.read(f"lock.{numbers[-1]}") or b"")[0]
            except Exception:
                continue  # the store is unreachable; it may come back
            by = f"process {who.pid} on {who.host}" if who else "another process"
            self.end(f"{self.folder.url} was taken from this process: {by} has it", 2)
            return

    def _text(self, beat: int = 0, released: bool = False) -> bytes:
        state = {"beat": beat, "released": released}
        return json.dumps(state | self.me._asdict(), indent=1).encode()


def locks(folder: RemoteFolder) -> list[int]:
    """The numbers of the lock files, in ascending order."""
    names = [name.removeprefix("lock.") for name in folder.names() if name.startswith("lock.")]
    return sorted(int(name) for name in names if name.isdigit())


def read_lock(text: bytes) -> tuple[Holder | None, bool]:
    """(holder, released) of a lock file. The holder is None if the file is damaged."""
    try:
        said = json.loads(text)
        released = bool(said.pop("released"))
        said.pop("beat")
        return Holder(**said), released
    except (ValueError, TypeError, KeyError, AttributeError):
        return None, False


@contextmanager
def held_remotely(
    store: Store | None,
    coordinator: Coordinator,
    timeout: float,
    say: Callable[[str], Any],
) -> Iterator[None]:
    """Hold the lock of a run's remote checkpoints in process 0, for the whole job. No-op without a
    store."""
    if store is None or coordinator.index:
        yield
        return
    lock = RemoteLock(store.folder, timeout, say)
    try:
        lock.take()
        yield
    finally:
        lock.release()
