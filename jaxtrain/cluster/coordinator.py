"""Coordination of a job's processes: compare facts, agree on a last step, detect deaths and hangs.

Everything uses the client of JAX's coordination service: values go through its key-value store, and
deaths are detected by the heartbeats of its C++ threads. A thread of each process asks every `BEAT`
seconds which processes are live, less often in a large job. The training loop itself never calls
the service (0.25 ms a call).

Keys: `facts/ROUND/PROCESS` and `answer/ROUND` of a comparison; `step/PROCESS` the last step that a
process has begun; `job/failed` why the job ends; `job/stop` a process has requested a stop;
`job/stop_step/PROCESS` the last step of a process that waits for the stop; `job/bye/PROCESS` a
process is done; `job/asked/PROCESS` how often a process has asked which processes are live.
"""

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO

import jax
from jax._src.distributed import global_state

from jaxtrain.cluster import meeting
from jaxtrain.cluster.meeting import Link, Trouble
from jaxtrain.cluster.secret import Secret, is_loopback
from jaxtrain.cluster.service import RetryingClient, make_client, start_service
from jaxtrain.settings import UserError

BEAT = 0.5  # seconds between two liveness queries, for up to MANY processes
MANY = 128  # more processes query less often: each answer lists all of them
WAIT = 0.5  # timeout in seconds of one request for a value that is not yet set
LINGER = 5.0  # seconds for the others to receive the reason of a failure
PATIENCE = 5.0  # seconds after which a wait at the start is reported
AGAIN = "; the same command resumes from the last checkpoint"


def end_process(message: str, code: int) -> None:
    """Print one line and exit at once: with a process lost, no orderly shutdown can complete."""
    os.write(2, f"error: {message}\n".encode())
    os._exit(code)


class Coordinator:
    """This process's view of the job. In a single-process job, all methods return at once.

    heartbeat_timeout: seconds without a heartbeat after which a process counts as lost.
    step_timeout: seconds without a new step of any process after which the job counts as hung.
    end(message, code): called when the job has failed.
    """

    def __init__(
        self,
        index: int = 0,
        count: int = 1,
        *,
        heartbeat_timeout: float = 10.0,
        step_timeout: float | None = None,
        end: Callable[[str, int], None] = end_process,
    ):
        self.index, self.count, self.host = index, count, socket.gethostname()
        self.heartbeat_timeout, self.step_timeout, self.end = heartbeat_timeout, step_timeout, end
        self.hosts = {index: self.host}
        # Set by `meet`: process 0's address, the rendezvous timeout (seconds) and its deadline.
        # The deadline is a time of time.monotonic(), in seconds.
        self.address, self.timeout, self.until = "", 0.0, 0.0
        self.links: dict[int, Link] = {}  # index of a process -> the connection to it
        self.trouble = Trouble("no answer yet")  # why the last attempt to reach process 0 failed
        self.client: RetryingClient | None = None
        self.service: IO[bytes] | None = None  # of process 0
        self.watchers: list[threading.Thread] = []
        self.rounds = 0  # number of comparisons
        # In process 0: the newest step of each process, and since when.
        self.steps: dict[int, tuple[str, float]] = {}
        self.changed = threading.Condition()  # guards all the following fields
        self.step: int | None = None  # the last step begun here; None outside the loop
        self.hold = False  # begin no step before `last` is set
        self.last: int | None = None  # the step after which all processes stop
        self.over = False
        self.asked = 0  # number of liveness queries; none begins once `over` is set

    # ---- meeting -----------------------------------------------------------------------------

    def meet(self, address: str, timeout: float, secret: Secret) -> None:
        """Connect all processes. Raises UserError if one is missing after `timeout` seconds.

        address: host:port at which first process 0 listens, then JAX's service. With a loopback
        host (localhost), no other host can connect.
        """
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise UserError(f"--coordinator {address}: expected HOST:PORT, as in node0:7777")
        self.address, self.timeout, self.until = address, timeout, time.monotonic() + timeout
        at = host.strip("[]"), int(port)
        with warn_if_slow(self._waits_for):
            if self.index == 0:
                known = secret.make()
                try:
                    with meeting.listen(*at, self.until) as server:
                        self._gather(server, known)
                finally:
                    secret.forget()
                bound = address if is_loopback(at[0]) else f"[::]:{port}"
                beat, linger = max(1, int(self.heartbeat_timeout)), self.heartbeat_timeout + LINGER
                self.service = start_service(bound, self.count, beat, linger, self.until)
                self._tell({"host": self.host})
            else:
                self._attend(at, secret)
        self._connect()

    def _waits_for(self) -> str:
        left = f"{max(0.0, self.until - time.monotonic()):.0f} s more at most"
        if self.index == 0:
            missing = self._missing()
            who = f"{len(missing)} of {self.count} processes to reach {self.address}"
            return f"waiting  for {who}, {left}: {', '.join(map(str, missing))}"
        me = f"process {self.index} of {self.count}"
        return f"waiting  for process 0 at {self.address} ({self.trouble.why}), {left}: {me}"

    def _missing(self) -> list[int]:
        return [i for i in range(1, self.count) if i not in self.links]

    def _gather(self, server: socket.socket, secret: bytes) -> None:
        """In process 0: wait until all other processes have authenticated."""
        for link, hello in meeting.proved(server, secret, self.until):
            link.index, link.host, of = int(hello["process"]), str(hello["host"]), hello["of"]
            twin = self.host if link.index == 0 else None
            if link.index in self.links:
                twin, self.links[-1] = self.links[link.index].host, link  # both get the error
            self.links.setdefault(link.index, link)
            self.hosts[link.index] = link.host
            if of != self.count:
                self._refuse(
                    f"process {link.index} ({link.host}) was started as one of {of}, "
                    f"process 0 ({self.host}) as one of {self.count}"
                )
            if twin:
                who = f"two processes say that they are process {link.index}"
                self._refuse(f"{who}: on {twin} and {link.host}")
            if not self._missing():
                return
        missing, port = self._missing(), server.getsockname()[1]
        self._refuse(
            f"{len(missing)} of {self.count} processes did not reach process 0 ({self.host}, "
            f"port {port}) in {self.timeout:g} s: {', '.join(map(str, missing))}"
        )

    def _tell(self, message: Mapping[str, str | int]) -> None:
        for link in self.links.values():
            link.send(message)

    def _refuse(self, message: str) -> None:
        self._tell({"failed": message})
        for link in self.links.values():
            link.socket.close()
        raise UserError(message)

    def _attend(self, at: tuple[str, int], secret: Secret) -> None:
        """In every other process: try to connect until process 0 accepts."""
        hello = {"process": self.index, "of": self.count, "host": self.host}
        while time.monotonic() < self.until:
            found = meeting.introduce(at, hello, self.until, secret)
            if not isinstance(found, Trouble):
                self.links[0], reply = found
                if "failed" in reply:
                    self.links[0].socket.close()
                    raise UserError(str(reply["failed"]))
                self.hosts[0] = self.links[0].host = str(reply["host"])
                return
            # Keep "no secret" as the reason if process 0 gives up first and later attempts fail.
            # Ignore the attempt that the deadline interrupted.
            late = time.monotonic() >= self.until
            if found.greeted or not (late or self.trouble.greeted):
                self.trouble = found
            time.sleep(meeting.RETRY)
        raise UserError(
            f"process {self.index} of {self.count} did not reach process 0 at {self.address} "
            f"in {self.timeout:g} s ({self.trouble.why}); "
            "is it running there, and does a firewall block the port?"
        )

    def _connect(self) -> None:
        """Connect JAX's client. Meanwhile the links show whether all processes are still alive."""

        def fail(why: str) -> None:
            self._tell({"failed": why})
            self._end(why, 1)

        done = threading.Event()
        args = list(self.links.values()), done, fail
        threading.Thread(target=meeting.watch, args=args, daemon=True).start()
        beat = max(1, int(self.heartbeat_timeout))
        client = self.client = make_client(self.address, self.index, beat, int(self.timeout) + 1)
        client.connect()
        self._tell({"connected": self.index})
        done.set()
        self._set(f"host/{self.index}", self.host)
        watches = self._watch_news, self._watch_processes
        self.watchers = [threading.Thread(target=watch, daemon=True) for watch in watches]
        for watcher in self.watchers:
            watcher.start()

    def share_with_jax(self) -> None:
        """Let this process's JAX use the client, as `jax.distributed.initialize` would."""
        global_state.client = self.client and self.client.client
        global_state.process_id, global_state.num_processes = self.index, self.count

    # ---- agreeing ----------------------------------------------------------------------------

    def compare(self, facts: Mapping[str, object], advice: str) -> None:
        """Wait until all processes have sent `facts`. Raises UserError if they differ."""
        if self.client is None:
            return
        self.rounds += 1
        said = json.dumps({k: str(v) for k, v in facts.items()})
        self._set(f"facts/{self.rounds}/{self.index}", said)
        if self.index == 0:
            told = [json.loads(facts) for facts in self._get_all(f"facts/{self.rounds}/")]
            found = [
                f"process {i} ({self.hosts[i]}) has {'; '.join(lines)}"
                for i in range(1, self.count)
                if (lines := differing_facts(told[0], told[i]))
            ]
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            where = f" in process 0 ({self.host}){more}; {advice}"
            self._set(f"answer/{self.rounds}", found[0] + where if found else "")
        if answer := self._get(f"answer/{self.rounds}"):
            with self.changed:
                self.over = True  # all processes get this error; none reports another's failure
            raise UserError(answer)

    def begin(self, step: int) -> None:
        """Begin the training loop at `step`; from now on, steps are monitored."""
        with self.changed:
            self.step = step

    def should_stop(self, step: int, wanted: bool) -> bool:
        """Whether all processes stop after `step`; if not, the next step counts as begun.

        wanted: this process requests a stop. A request of any process makes all wait, each before
        its next step. The furthest step that any of them has begun becomes the last step of all.
        Without a request, this does not call the service.
        """
        if self.client is None:
            return wanted
        if wanted and not self.hold:
            self._set("job/stop", "")
        with self.changed:
            self.changed.wait_for(
                lambda: self.over or self.last is not None or not (self.hold or wanted)
            )
            if self.over or (self.last is not None and step >= self.last):
                return True
            self.step = step + 1
            return False

    def leave(self) -> None:
        """Wait until all processes are done, and disconnect."""
        if self.client is None:
            return
        with self.changed:
            self.step = None
        self._set(f"job/bye/{self.index}", "")
        while not self.over and len(self.client.key_value_dir_get("job/bye/")) < self.count:
            time.sleep(0.05)
        if self.over:
            return
        with self.changed:
            self.over = True
        self._release_watchers(self.client)
        client, self.client, global_state.client = self.client, None, None
        client.shutdown()
        if self.service is not None:
            self.service.write(b"done")  # it ends after the others have disconnected as well
            self.service.close()

    def fail(self, message: str, code: int) -> None:
        """Publish why this process ends the job, unless the job is already over.

        The caller then exits with `os._exit`, which waits for no thread.
        """
        with self.changed:
            known, self.over = self.over, True
        if not known:
            self._publish(f"process {self.index} ({self.host}): {message}", code)

    def _release_watchers(self, client: RetryingClient) -> None:
        """Wait until no thread is inside the client.

        A thread that returns from C++ after Python has ended aborts the process (SIGABRT).
        `get_live_nodes` returns once all processes have called it equally often, or after the
        heartbeat timeout. A process that has called it less often than another calls it once more.
        """
        self._set(f"job/asked/{self.index}", str(self.asked))
        until = time.monotonic() + self.heartbeat_timeout
        while len(told := client.key_value_dir_get("job/asked/")) < self.count:
            if time.monotonic() > until:  # one was killed
                break
            time.sleep(0.05)
        if self.asked < max(int(asked) for _, asked in told):
            client.get_live_nodes(range(self.count))
        for watcher in self.watchers:
            watcher.join(self.heartbeat_timeout + LINGER)

    # ---- the threads that watch ----------------------------------------------------------------

    def _watch_news(self) -> None:
        """Wait for a published failure, and end this process with its message."""
        try:
            news = json.loads(self._get("job/failed"))
        except jax.errors.JaxRuntimeError:  # disconnected; the other thread reports a loss
            return
        if self.over:
            return
        if news["hung"]:
            frames = sys._current_frames()
            traceback.print_stack(frames.get(threading.main_thread().ident or 0))
        self._end(news["message"] + ("" if news["code"] == 2 else AGAIN), news["code"])

    def _watch_processes(self) -> None:
        """End this process if another is lost or all hang; hold if one requests a stop."""
        everybody = set(range(self.count))
        try:
            while (client := self.client) is not None and self._may_ask():
                client.key_value_set(f"step/{self.index}", str(self.step), allow_overwrite=True)
                lost = everybody - client.get_live_nodes(sorted(everybody)).keys()
                news = dict(client.key_value_dir_get("job/"))
                if lost := sorted(i for i in lost if f"job/bye/{i}" not in news):
                    return self._lost(lost[0], client)
                self._agree_on_stop(client, news)
                if self.index == 0 and self.step_timeout is not None:
                    self._check_steps(client, self.step_timeout)
                time.sleep(BEAT * max(1.0, self.count / MANY))
        except jax.errors.JaxRuntimeError as error:
            if not self.over:
                where = f"process 0 ({self.hosts[0]})"
                self._end(
                    f"JAX's coordination service of {where} is gone: {error}"[:300] + AGAIN, 1
                )

    def _may_ask(self) -> bool:
        """Whether the job still runs; if so, count one more liveness query."""
        with self.changed:
            self.asked += not self.over
            return not self.over

    def _lost(self, index: int, client: RetryingClient) -> None:
        step = dict(client.key_value_dir_get("step/")).get(f"step/{index}", "None")
        when = "before a step" if step == "None" else f"in step {step}"
        host = self.hosts.get(index) or client.key_value_try_get(f"host/{index}")
        silent = f"has not been heard of for {self.heartbeat_timeout:g} s"
        self._end(f"process {index} ({host}) {silent} ({when}); it was killed or hangs" + AGAIN, 1)

    def _agree_on_stop(self, client: RetryingClient, news: dict[str, str]) -> None:
        """Hold once a stop is requested. When all processes hold, the furthest step is the last."""
        if "job/stop" not in news or self.last is not None:
            return
        if not self.hold:
            with self.changed:
                self.hold, step = True, self.step
            client.key_value_set(f"job/stop_step/{self.index}", str(step or 0))
        stop_steps = [int(step) for key, step in news.items() if key.startswith("job/stop_step/")]
        if len(stop_steps) == self.count:
            with self.changed:
                self.last = max(stop_steps)
                self.changed.notify_all()

    def _check_steps(self, client: RetryingClient, limit: float) -> None:
        """End all processes if none has begun a step for `limit` seconds."""
        now = time.monotonic()
        for key, step in client.key_value_dir_get("step/"):
            index = int(key.removeprefix("step/"))
            if self.steps.get(index, ("", 0.0))[0] != step:
                self.steps[index] = step, now
        steps = {i: int(step) for i, (step, _) in self.steps.items() if step != "None"}
        quiet = now - max(since for _, since in self.steps.values())
        if not steps or quiet <= limit:
            return
        least = min(steps.values())
        slow = ", ".join(f"{i} ({self.hosts[i]})" for i in sorted(steps) if steps[i] == least)
        ahead = max(steps.values()) - least
        rest = f", the furthest {ahead} further" if ahead else ", as all"
        text = f"no step began for {quiet:.0f} s: process {slow} is at step {least}{rest}"
        self._publish(text, 1, hung=True)

    # ---- the store -------------------------------------------------------------------------------

    def _set(self, key: str, value: str) -> None:
        assert self.client is not None
        self.client.key_value_set(key, value, allow_overwrite=True)

    def _get(self, key: str) -> str:
        """Wait for a key, and return its value."""
        while not self.over and (client := self.client) is not None:
            try:
                return client.blocking_key_value_get(key, round(1000 * WAIT))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
        raise jax.errors.JaxRuntimeError(f"the job has ended, and {key} was never set")

    def _get_all(self, folder: str) -> list[str]:
        """Wait for the values of all processes, in order. Lists the folder, not key by key."""
        while not self.over and (client := self.client) is not None:
            found = client.key_value_dir_get(folder)
            if len(found) == self.count:
                values = {int(key.removeprefix(folder)): value for key, value in found}
                return [values[i] for i in range(self.count)]
            time.sleep(0.05 * max(1.0, self.count / MANY))
        raise jax.errors.JaxRuntimeError(f"the job has ended, and {folder} was never complete")

    def _publish(self, message: str, code: int, hung: bool = False) -> None:
        """Publish why the job ends, unless another process has already done so."""
        client = self.client
        if client is not None:
            with suppress(jax.errors.JaxRuntimeError):
                news = json.dumps({"message": message, "code": code, "hung": hung})
                client.key_value_set("job/failed", news)

    def _end(self, message: str, code: int) -> None:
        with self.changed:
            known, self.over = self.over, True
            self.changed.notify_all()
        if not known:
            self.end(message, code)


def differing_facts(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """`field new, not old` for each field that differs."""
    keys = [*old, *(key for key in new if key not in old)]
    return [f"{k} {new.get(k)}, not {old.get(k)}" for k in keys if old.get(k) != new.get(k)]


@contextmanager
def warn_if_slow(what: Callable[[], str]) -> Iterator[None]:
    """Print what() to stderr if the context takes longer than PATIENCE seconds.

    Uses a thread: a DNS lookup or a firewall may block a single attempt for a minute.
    """
    timer = threading.Timer(PATIENCE, lambda: print(what(), file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
