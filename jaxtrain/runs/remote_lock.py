"""One run at a URL, one job: the lock of a run's checkpoints in an object store.

As on a disk (`lock.py`), the lock is a file `lock.N`, the largest N holds, and whoever makes N+1
has followed a holder that is gone; a conditional put lets one alone make it. The holder writes its
file anew every few seconds. It is gone when its file has stayed the same for so many seconds of the
clock of whoever waits: no two clocks are compared. The newest file is never removed, so that no
number comes again: its last holder writes that it has let go.
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

LOOK = 1.0  # seconds between two looks at another's lock


class RemoteLock:
    """The lock of a folder at a URL, held from `take` to `release`.

    timeout: seconds of silence after which others may take this process for gone. end(message,
    code): what to do when another has the lock all the same: nothing may be written any more.
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
        """UserError with the holder's name if there is one, or for a store that says no."""
        try:
            while not self.number:
                number = self._free()
                if not self.folder.create(f"lock.{number}", self._text()):
                    continue
                if locks(self.folder)[-1:] == [number]:
                    self.number = number
                else:  # what was listed before was old
                    self.folder.remove(f"lock.{number}")
            if self.folder.create(f"lock.{number}", self._text(1)):
                self.say(
                    f"lock     {self.folder.url} does not refuse to overwrite a file (conditional "
                    "put): two machines that train this run at once are not told apart"
                )
            for older in locks(self.folder):
                if older < number:
                    self.folder.remove(f"lock.{older}")
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"{self.folder.url} cannot be written ({reason_of(error)}); see the address, and "
                "the credentials that the environment has for it"
            ) from error
        self.thread.start()

    def release(self) -> None:
        """Let go, unless another has it already. What fails here costs the next one a wait."""
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
        """The number after the last lock's, when nobody holds that one any more."""
        seen: dict[int, tuple[bytes, float]] = {}  # lock -> what it said first, and when we saw it
        while numbers := locks(self.folder):
            newest = numbers[-1]
            text = self.folder.read(f"lock.{newest}")
            if text is None:  # the list was old
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
                    f"lock     {self.folder.url} is of {who}: waiting for a sign of life, "
                    f"{patience:.0f} s at most"
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
                continue  # the store is away; it may come back
            by = f"process {who.pid} on {who.host}" if who else "another process"
            self.end(f"{self.folder.url} was taken from this process: {by} has it", 2)
            return

    def _text(self, beat: int = 0, released: bool = False) -> bytes:
        state = {"beat": beat, "released": released}
        return json.dumps(state | self.me._asdict(), indent=1).encode()


def locks(folder: RemoteFolder) -> list[int]:
    """The numbers of the lock files, rising."""
    names = [name.removeprefix("lock.") for name in folder.names() if name.startswith("lock.")]
    return sorted(int(name) for name in names if name.isdigit())


def read_lock(text: bytes) -> tuple[Holder | None, bool]:
    """The holder, None for a file that is damaged; and whether it has let go."""
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
    """The copies of a run's checkpoints, if there are any, held by process 0 for the job."""
    if store is None or coordinator.index:
        yield
        return
    lock = RemoteLock(store.folder, timeout, say)
    try:
        lock.take()
        yield
    finally:
        lock.release()
