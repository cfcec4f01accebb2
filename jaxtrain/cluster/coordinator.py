"""The processes of one job: they meet, compare, agree on a last step, and notice a death or a hang.

A star of TCP connections around process 0, one JSON object a line, which only processes that know
the job's secret can write (`parallel.secret`). It is there before
`jax.distributed` starts and stands beside it, because JAX's own client answers a coordinator that
is not there, or a process that died, by aborting with a C++ stack trace that names nobody, and
notices a death only by a missing heartbeat: here a connection that closes tells at once.
"""

import os
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress

from jaxtrain.cluster.meeting import introduce, listen, proved
from jaxtrain.cluster.peer import Message, Peer, warn_if_slow
from jaxtrain.cluster.secret import Secret
from jaxtrain.settings import UserError

RETRY = 0.2  # seconds between attempts to connect
LINGER = 5.0  # seconds in which the news of a failure reach the others
DIED = "has died: its connection closed"


def end_process(message: str, code: int) -> None:
    """One line, and out: nothing more can be waited for when another process is gone."""
    os.write(2, f"error: {message}\n".encode())
    os._exit(code)


class Coordinator:
    """This process among the others; alone, every question is answered at once.

    heartbeat_timeout: seconds of silence after which a process counts as lost. step_timeout:
    seconds without a new step of any process. end(message, code): what to do when the job failed.
    """

    def __init__(
        self,
        index: int = 0,
        count: int = 1,
        *,
        heartbeat_timeout: float = 100.0,
        step_timeout: float | None = None,
        end: Callable[[str, int], None] = end_process,
    ):
        self.index, self.count, self.host = index, count, socket.gethostname()
        self.heartbeat_timeout, self.step_timeout, self.end = heartbeat_timeout, step_timeout, end
        self.peers: dict[int, Peer] = {}
        self.trouble = "no answer yet"  # why the last attempt to reach process 0 failed
        self.changed = threading.Condition()  # guards all that follows
        self.step: int | None = None  # the last step begun here; None outside the loop
        self.hold = False  # begin no step before `last` is known
        self.last: int | None = None  # where all stop
        self.over = False
        self.answers: dict[int, str] = {}  # by round, what process 0 found
        self.rounds = 0
        # What process 0 knows of the others (and of itself).
        self.said: dict[int, dict[int, Message]] = {}  # by round and process
        self.stands: dict[int, tuple[int | None, float]] = {}  # (step, when it began)
        self.stopping = False
        self.held: dict[int, int] = {}
        self.done: set[int] = set()

    # ---- meeting -----------------------------------------------------------------------------

    def meet(self, address: str, timeout: float, secret: Secret) -> None:
        """Connect all processes; UserError if one is missing after `timeout` seconds.

        address: host:port at which process 0 listens, and at which JAX's coordinator may
        afterwards: the port is free again. Under this host's own name (localhost) no other host
        can reach it.
        """
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise UserError(f"--coordinator {address}: expected HOST:PORT, as in node0:7777")
        until, host = time.monotonic() + timeout, host.strip("[]")
        with warn_if_slow(lambda: self._waits_for(address, until)):
            if self.index == 0:
                known = secret.make()
                try:
                    with listen(host, int(port)) as server:
                        self._gather(server, known, until, timeout)
                finally:
                    secret.forget()
            else:
                self._connect(host, int(port), address, until, timeout, secret)
        threading.Thread(target=self._listen, name="processes", daemon=True).start()

    def _waits_for(self, address: str, until: float) -> str:
        left = f"{max(0.0, until - time.monotonic()):.0f} s more at most"
        if self.index == 0:
            missing = self._missing()
            who = f"{len(missing)} of {self.count} processes to reach {address}"
            return f"waiting  for {who}, {left}: {', '.join(map(str, missing))}"
        me = f"process {self.index} of {self.count}"
        return f"waiting  for process 0 at {address} ({self.trouble}), {left}: {me}"

    def _missing(self) -> list[int]:
        return [i for i in range(1, self.count) if i not in self.peers]

    def _gather(self, server: socket.socket, secret: bytes, until: float, timeout: float) -> None:
        for peer, hello in proved(server, secret, until):
            self._welcome(peer, hello)
            if not self._missing():
                return
        missing, port = self._missing(), server.getsockname()[1]
        self._refuse_all(
            f"{len(missing)} of {self.count} processes did not reach process 0 ({self.host}, "
            f"port {port}) in {timeout:g} s: {', '.join(map(str, missing))}"
        )

    def _welcome(self, peer: Peer, hello: Message) -> None:
        peer.index, peer.host = hello["process"], hello["host"]
        twin = self.peers.setdefault(peer.index, peer)
        if hello["of"] != self.count:
            self._refuse_all(
                f"process {peer.index} ({peer.host}) was started as one of {hello['of']}, "
                f"process 0 ({self.host}) as one of {self.count}"
            )
        if twin is not peer or peer.index == 0:
            other = self.host if peer.index == 0 else twin.host
            self.peers[-1] = peer  # so that it hears of it
            self._refuse_all(
                f"two processes say that they are process {peer.index}: on {other} and {peer.host}"
            )
        peer.send({"host": self.host})

    def _refuse_all(self, message: str) -> None:
        self._part({"failed": message, "code": 2})
        for peer in self.peers.values():
            peer.link.close()
        raise UserError(message)

    def _connect(
        self, host: str, port: int, address: str, until: float, timeout: float, secret: Secret
    ) -> None:
        while time.monotonic() < until:
            try:
                link = socket.create_connection((host, port), max(0.1, until - time.monotonic()))
            except OSError as error:
                self.trouble = error.strerror or str(error)
                time.sleep(RETRY)
                continue
            hello = {"process": self.index, "of": self.count, "host": self.host}
            found = introduce(link, hello, until, secret)
            if not isinstance(found, str):
                return self._take_place(*found)
            link.close()
            self.trouble = found
            time.sleep(5 * RETRY)
        raise UserError(
            f"process {self.index} of {self.count} did not reach process 0 at {address} in "
            f"{timeout:g} s ({self.trouble}); is it running there, and not behind a firewall?"
        )

    def _take_place(self, peer: Peer, reply: Message) -> None:
        """The answer of process 0 to this one."""
        if "failed" in reply:
            peer.link.close()
            raise UserError(reply["failed"])
        peer.host = reply["host"]
        self.peers[0] = peer

    # ---- agreeing ----------------------------------------------------------------------------

    def compare(self, facts: Mapping[str, str], advice: str) -> None:
        """Wait until all processes say the same; UserError with the differences if they do not."""
        if self.count == 1:
            return
        self.rounds = number = self.rounds + 1
        self._tell_first({"facts": dict(facts), "round": number, "advice": advice})
        with self.changed:
            self.changed.wait_for(lambda: number in self.answers)
            answer = self.answers.pop(number)
        if answer:
            raise UserError(answer)

    def begin(self, step: int) -> None:
        """The loop begins: steps are watched from now on."""
        with self.changed:
            self.step = step
        self._beat()

    def should_stop(self, step: int, wanted: bool) -> bool:
        """Whether all stop after `step`; else the next step counts as begun.

        A wish of any process makes all hold, each before its next step; the furthest step that one
        of them has begun is the last of all. Until somebody wishes, this costs no message.
        """
        if self.count == 1:
            return wanted
        if wanted and not self.hold:
            self._tell_first({"stop": True})
        with self.changed:
            self.changed.wait_for(lambda: self.last is not None or not (self.hold or wanted))
            if self.last is not None and step >= self.last:
                return True
            self.step = step + 1
            return False

    def leave(self) -> None:
        """All is done here: wait until it is everywhere."""
        with self.changed:
            self.step = None
        self._tell_first({"bye": True})
        with self.changed:
            self.changed.wait_for(lambda: self.over)
        for peer in list(self.peers.values()):
            with suppress(OSError):
                peer.link.shutdown(socket.SHUT_RDWR)  # ends the thread that listens

    def fail(self, message: str, code: int) -> None:
        """Tell the others why this process ends the job, unless they know."""
        with self.changed:
            known, self.over = self.over, True
        if not known:
            where = f"process {self.index} ({self.host}): {message}"
            for peer in list(self.peers.values()):
                peer.send({"failed": where, "code": code})
        if self.index == 0:  # JAX's clients abort as soon as the coordinator is gone
            until = time.monotonic() + LINGER
            while self.peers and time.monotonic() < until:
                time.sleep(0.02)

    # ---- the thread that listens ---------------------------------------------------------------

    def _listen(self) -> None:
        beat = min(self.heartbeat_timeout, self.step_timeout or self.heartbeat_timeout, 20) / 4
        with selectors.DefaultSelector() as ready:
            for peer in self.peers.values():
                ready.register(peer.link, selectors.EVENT_READ, peer)
            next_beat = 0.0
            while self.peers:
                for key, _ in ready.select(max(0.0, next_beat - time.monotonic())):
                    peer = key.data
                    messages = peer.receive()
                    if messages is None:
                        ready.unregister(peer.link)
                        peer.link.close()
                        self.peers.pop(peer.index, None)
                        if not (peer.done or self.over):
                            self._lost(peer, DIED)
                    for message in messages or ():
                        self._take(peer.index, message)
                if time.monotonic() >= next_beat:
                    self._beat()
                    self._check()
                    next_beat = time.monotonic() + beat
            for key in list(ready.get_map().values()):
                key.data.link.close()

    def _take(self, index: int, message: Message) -> None:
        """A message of process `index`."""
        if "step" in message:
            self._note(index, message["step"])
        elif "failed" in message and not self.over:
            self._fall(message["failed"], message["code"], message.get("hung", False))
        elif "facts" in message:
            self._collect(index, message)
        elif "answer" in message:
            with self.changed:
                self.answers[message["round"]] = message["answer"]
                self.over = bool(message["answer"])  # all end with it, none because of another
                self.changed.notify_all()
        elif "stop" in message:
            with self.changed:
                first, self.stopping = not self.stopping, True
            if first:
                self._tell_all({"hold": True})
        elif "hold" in message:
            with self.changed:
                self.hold, step = True, self.step
            self._tell_first({"at": step})
        elif "at" in message:
            self._note_held(index, message["at"])
        elif "last" in message:
            with self.changed:
                self.last = message["last"]
                self.changed.notify_all()
        elif "bye" in message:
            self._note_bye(index)
        elif "over" in message:
            with self.changed:
                self.over = True
                self.changed.notify_all()

    def _tell_first(self, message: Message) -> None:
        self.peers[0].send(message) if self.index else self._take(0, message)

    def _tell_all(self, message: Message) -> None:
        """From process 0, to itself as well."""
        for peer in list(self.peers.values()):
            peer.send(message)
        self._take(0, message)

    # ---- what process 0 does with it -----------------------------------------------------------

    def _collect(self, index: int, message: Message) -> None:
        with self.changed:
            said = self.said.setdefault(message["round"], {})
            said[index] = message["facts"]
            if len(said) < self.count:
                return
            del self.said[message["round"]]
        found = [
            f"process {i} ({self._host(i)}) has {'; '.join(lines)}"
            for i in range(1, self.count)
            if (lines := differences(said[0], said[i]))
        ]
        answer = ""
        if found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            answer = f"{found[0]} in process 0 ({self.host}){more}; {message['advice']}"
        self._tell_all({"answer": answer, "round": message["round"]})

    def _note(self, index: int, step: int | None) -> None:
        with self.changed:
            before = self.stands.get(index)
            if before is None or before[0] != step:
                self.stands[index] = step, time.monotonic()

    def _note_held(self, index: int, step: int | None) -> None:
        with self.changed:
            self.held[index] = step or 0
            if len(self.held) < self.count:
                return
            last = max(self.held.values())
        self._tell_all({"last": last})

    def _note_bye(self, index: int) -> None:
        with self.changed:
            if index:
                self.peers[index].done = True
            self.done.add(index)
            everybody = len(self.done) == self.count
        if everybody:
            self._tell_all({"over": True})

    def _beat(self) -> None:
        with self.changed:  # two threads do this: an older step must not arrive later
            if self.index == 0:
                self._note(0, self.step)
            for peer in list(self.peers.values()):
                peer.send({"step": self.step})

    def _check(self) -> None:
        """End the job if somebody is silent, or if nobody gets on."""
        if self.over:
            return
        now = time.monotonic()
        for peer in list(self.peers.values()):
            silence = now - peer.heard
            if silence > self.heartbeat_timeout:
                return self._lost(peer, f"has not been heard of for {silence:.0f} s")
        steps = {i: step for i, (step, _) in self.stands.items() if step is not None}
        if self.index or self.step_timeout is None or not steps:
            return
        quiet = now - max(since for _, since in self.stands.values())
        if quiet > self.step_timeout:
            least = min(steps.values())
            slow = ", ".join(f"{i} ({self._host(i)})" for i in sorted(steps) if steps[i] == least)
            ahead = max(steps.values()) - least
            rest = f", the furthest {ahead} further" if ahead else ", as all"
            text = f"no step began for {quiet:.0f} s: process {slow} is at step {least}{rest}"
            self._fall(text, hung=True)

    def _lost(self, peer: Peer, how: str) -> None:
        self.peers.pop(peer.index, None)
        step, since = self.stands.get(peer.index, (None, 0.0))
        ago = time.monotonic() - since
        when = "before a step" if step is None else f"step {step} began {ago:.0f} s ago"
        self._fall(f"process {peer.index} ({peer.host}) {how} ({when})")

    def _fall(self, message: str, code: int = 1, hung: bool = False) -> None:
        """End here, and from process 0 everywhere; if hung, show where this process stands."""
        with self.changed:
            self.over = True
        if self.index == 0:
            self._part({"failed": message, "code": code, "hung": hung})
        if hung:
            frames = sys._current_frames()
            traceback.print_stack(frames.get(threading.main_thread().ident or 0))
        on = "" if code == 2 else "; the same command goes on from the last checkpoint"
        self.end(message + on, code)

    def _part(self, message: Message) -> None:
        """A last message to all, and some time to read it.

        JAX's clients abort as soon as the coordinator is gone, and what a closed connection had not
        read yet would take the message with it.
        """
        peers, until = list(self.peers.values()), time.monotonic() + LINGER
        for peer in peers:
            peer.send(message)
            with suppress(OSError):
                peer.link.shutdown(socket.SHUT_WR)
        for peer in peers:
            peer.link.settimeout(max(0.01, until - time.monotonic()))
            while peer.receive() is not None:
                pass
            peer.link.settimeout(None)

    def _host(self, index: int) -> str:
        return self.peers[index].host if index in self.peers else self.host


def differences(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """`field: new, not old` for each that differs."""
    keys = [*old, *(key for key in new if key not in old)]
    return [f"{k} {new.get(k)}, not {old.get(k)}" for k in keys if old.get(k) != new.get(k)]
