"""Processes that meet, compare, stop together and notice each other's end; here in threads.

The deaths are of real processes, in tests/test_launch.py.
"""

import queue
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import jax
import pytest
from machine import LONG, Clock, free_port

from jaxtrain.cluster import coordinator, meeting, service
from jaxtrain.cluster.coordinator import BEAT, Coordinator
from jaxtrain.cluster.secret import Secret
from jaxtrain.settings import UserError

SECRET = Secret(Path("nowhere"), "", {"JAXTRAIN_SECRET": "of this test's job"})


@pytest.fixture
def clock(monkeypatch):
    """That of those who meet; a link lasts when it is put forward."""
    clock = Clock()
    monkeypatch.setattr(coordinator, "time", clock)
    monkeypatch.setattr(meeting, "time", clock)
    monkeypatch.setattr(meeting, "PROVING", 2 * LONG)
    return clock


def together(count, work, timeout=LONG, **options):
    """work(coordinator) in a thread for each process: its result or error, and how it ended."""
    address, ends = f"localhost:{free_port()}", queue.Queue()

    def one(index):
        end = lambda message, code: ends.put((index, message, code))
        coordinator = Coordinator(index, count, end=end, **options)
        try:
            coordinator.meet(address, timeout, SECRET)
            return work(coordinator)
        except UserError as error:
            return str(error)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(one, range(count))), ends


def ended(ends, count):
    return sorted(ends.get(timeout=LONG) for _ in range(count))


def test_they_meet_compare_and_leave():
    def work(coordinator):
        coordinator.compare({"code": "a"}, "advice")
        coordinator.compare({"data": "b"}, "advice")
        coordinator.leave()
        return any(thread.is_alive() for thread in coordinator.watchers)

    found, ends = together(4, work)
    assert found == [False] * 4 and ends.empty()


@pytest.mark.slow
def test_who_leaves_waits_for_no_question_that_another_never_asks():
    """A thread that came back from the client's C++ after Python's end would abort the process."""
    silent, taken = threading.Event(), []

    def work(coordinator):
        if coordinator.index == 1:  # stops asking before the other
            coordinator.over = True
            coordinator.watchers[1].join(LONG)
            coordinator.over = False
            silent.set()
        assert silent.wait(LONG)
        time.sleep(2 * BEAT)  # a thread of process 0 waits inside by now
        begun = time.monotonic()
        coordinator.leave()
        taken.append(time.monotonic() - begun)
        return [thread.is_alive() for thread in coordinator.watchers]

    found, ends = together(2, work, heartbeat_timeout=LONG)
    assert ends.empty() and found == [[False, False]] * 2 and max(taken) < LONG / 2


def test_a_difference_is_named_everywhere(monkeypatch):
    """Process 0 asks for no process's facts alone: a key takes its turn among all requests."""
    get, asked = service.RetryingClient.blocking_key_value_get, set()

    def counted(client, key, timeout_in_ms):
        asked.add(key)
        return get(client, key, timeout_in_ms)

    monkeypatch.setattr(service.RetryingClient, "blocking_key_value_get", counted)

    def work(coordinator):
        facts = {"jax": "0.11.2", "optim.matrix_lr": "0.01" if coordinator.index == 2 else "0.02"}
        coordinator.compare(facts, "make them equal")

    found, _ = together(11, work)
    host = socket.gethostname()
    line = f"process 2 ({host}) has optim.matrix_lr 0.01, not 0.02 in process 0 ({host}); make them"
    assert found == [f"{line} equal"] * 11 and asked == {"job/failed", "answer/1"}


def test_who_is_missing_is_named_everywhere(clock):
    address, coordinators = f"localhost:{free_port()}", [Coordinator(i, 4) for i in (0, 2)]

    def one(coordinator):
        with pytest.raises(UserError) as error:
            coordinator.meet(address, LONG, SECRET)
        return str(error.value)

    with ThreadPoolExecutor(2) as threads:
        said = threads.map(one, coordinators)
        while not coordinators[0].links:
            time.sleep(0.01)
        clock.ahead = LONG
        first, other = said
    assert first == other
    assert re.fullmatch(
        r"2 of 4 processes did not reach process 0 \(.*, port \d+\) in 120 s: 1, 3", first
    )


@pytest.mark.slow
def test_a_coordinator_that_is_not_there():
    address = f"localhost:{free_port()}"
    with pytest.raises(UserError, match=rf"process 1 of 2 did not reach .* {address} in 0.5 s \("):
        Coordinator(1, 2).meet(address, 0.5, SECRET)


def test_a_long_wait_for_the_coordinator_is_told_while_it_lasts(monkeypatch, capsys):
    """Also while a single attempt hangs, as in the lookup of a name or behind a firewall."""
    attempts, hanging = [], threading.Event()

    class Enough(Exception):
        pass

    def hangs(*_):
        attempts.append(0)
        if len(attempts) == 1:
            raise OSError(-3, "Temporary failure in name resolution")
        hanging.set()
        raise Enough(line_said(capsys))

    class Timer(threading.Timer):
        def run(self):
            assert hanging.wait(LONG)
            self.function()

    monkeypatch.setattr(threading, "Timer", Timer)
    monkeypatch.setattr(socket, "create_connection", hangs)
    with pytest.raises(Enough) as said:
        Coordinator(1, 2).meet("node0:7777", LONG, SECRET)
    assert re.fullmatch(
        r"waiting  for process 0 at node0:7777 \(Temporary failure in name resolution\), "
        r"\d+ s more at most: process 1 of 2\n",
        str(said.value),
    )


def line_said(capsys):
    """What is on stderr once it is a line."""
    until, said = time.monotonic() + LONG, ""
    while not said.endswith("\n") and time.monotonic() < until:
        time.sleep(0.01)
        said += capsys.readouterr().err
    return said


def test_process_0_tells_whom_it_waits_for(monkeypatch, capsys, clock):
    monkeypatch.setattr(coordinator, "PATIENCE", 0.01)
    address = f"localhost:{free_port()}"
    with ThreadPoolExecutor(1) as threads:
        job = threads.submit(Coordinator(0, 3).meet, address, LONG, SECRET)
        said = line_said(capsys)
        clock.ahead = LONG
        with pytest.raises(UserError, match="2 of 3 processes did not reach"):
            job.result()
    expected = rf"waiting  for 2 of 3 processes to reach {address}, \d+ s more at most: 1, 2\n"
    assert re.fullmatch(expected, said)


def test_what_was_quick_is_not_told(monkeypatch, capsys):
    monkeypatch.setattr(coordinator, "PATIENCE", 2 * LONG)
    timers = lambda: {t for t in threading.enumerate() if isinstance(t, threading.Timer)}
    before = timers()
    with coordinator.warn_if_slow(lambda: "it took long"):
        (timer,) = timers() - before
    timer.join(LONG)
    assert not timer.is_alive() and capsys.readouterr().err == ""


@pytest.mark.parametrize("address", ["node0", "node0:", ":7777", "node0:http"])
def test_an_address_is_host_and_port(address):
    with pytest.raises(UserError, match="expected HOST:PORT"):
        Coordinator(0, 2).meet(address, 1.0, SECRET)


@pytest.mark.slow
def test_a_port_that_is_taken():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UserError, match=f"process 0 cannot listen on port {port}: "):
            Coordinator(0, 2).meet(f"localhost:{port}", 1.0, SECRET)


@pytest.mark.parametrize(
    ("index", "count", "message"),
    [
        (1, 3, r"process 1 \(.*\) was started as one of 3, process 0 \(.*\) as one of 2"),
        (0, 2, r"two processes say that they are process 0: on .* and "),
    ],
)
def test_processes_that_do_not_belong_together(index, count, message):
    port = free_port()
    other = Coordinator(index, count)
    other.until = time.monotonic() + LONG
    attend = lambda: other._attend(("localhost", port), SECRET)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(Coordinator(0, 2).meet, f"localhost:{port}", LONG, SECRET)
        second = threads.submit(attend)
        for result in (first, second):
            with pytest.raises(UserError, match=message):
                result.result()


def test_a_stranger_at_the_port_is_sent_away():
    port = free_port()
    groups = [Coordinator(0, 2), Coordinator(1, 2)]
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(groups[0].meet, f"localhost:{port}", LONG, SECRET)
        while True:
            try:
                stranger = socket.create_connection(("localhost", port))
                break
            except ConnectionRefusedError:
                time.sleep(0.01)
        with stranger:
            stranger.sendall(b"GET / HTTP/1.1\n")
            groups[1].meet(f"localhost:{port}", LONG, SECRET)
            first.result()
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda g: g.leave(), groups))


@pytest.mark.slow
@pytest.mark.parametrize("asked", [(1,), (0,), (0, 1, 2)])
def test_all_stop_after_the_same_step_and_none_waits_for_a_step_that_is_not_begun(asked):
    """Steps that all take part in, with some in flight, as on devices."""
    begun, done, flight = [[] for _ in range(99)], [threading.Event() for _ in range(99)], 4
    done[0].set()

    def work(coordinator):
        coordinator.begin(0)
        step = 0
        while not coordinator.should_stop(step, coordinator.index in asked and step >= 20):
            step += 1
            begun[step].append(coordinator.index)
            if len(begun[step]) == 3:  # the device ends a step when all have begun it
                done[step].set()
            time.sleep(0.001 * coordinator.index)  # one is ahead, another behind
            assert done[max(0, step - flight)].wait(LONG)
        coordinator.leave()
        return step

    found, ends = together(3, work)
    assert ends.empty() and len(set(found)) == 1 and isinstance(found[0], int)
    assert 20 <= found[0] <= 20 + flight + 1


def test_alone_a_wish_is_a_stop():
    assert Coordinator().should_stop(3, True) and not Coordinator().should_stop(3, False)


@pytest.mark.slow
def test_a_process_without_heartbeats_is_named():
    """As after kill -9 or SIGSTOP: its client is gone, and nobody has said goodbye."""

    def work(coordinator):
        coordinator.begin(5)
        coordinator.compare({}, "")
        wait_for_steps(coordinator, ["5"] * 3)
        coordinator.compare({}, "")
        if coordinator.index == 1:
            coordinator.over = True  # a dead process notices nothing
            coordinator.client = None

    _, ends = together(3, work, heartbeat_timeout=6.0)
    found = ended(ends, 2)
    assert [index for index, _, _ in found] == [0, 2]
    for _, message, code in found:
        silent = (
            rf"process 1 \({socket.gethostname()}\) has not been heard of for 6 s \(in step 5\)"
        )
        assert re.match(silent, message) and code == 1
        assert message.endswith("; the same command resumes from the last checkpoint")


@pytest.mark.slow
def test_a_hang_names_the_process_that_is_behind(capfd):
    def work(coordinator):
        coordinator.begin(0)
        for step in range(3 if coordinator.index == 1 else 6):
            coordinator.should_stop(step, False)
        wait_for_steps(coordinator, ["6", "3", "6"])
        coordinator.step_timeout = 1.0  # from now on

    _, ends = together(3, work)
    found = ended(ends, 3)
    text = rf"process 1 \({socket.gethostname()}\) is at step 3, the furthest 3"
    assert all(re.match(rf"no step began for \d+ s: {text}", message) for _, message, _ in found)
    assert "test_coordinator.py" in capfd.readouterr().err  # where each main thread stood


def wait_for_steps(coordinator, expected):
    """Until the processes have said that they are at these steps."""
    while dict(coordinator.client.key_value_dir_get("step/")) != {
        f"step/{i}": step for i, step in enumerate(expected)
    }:
        time.sleep(0.01)


def test_a_failure_of_one_ends_all_with_its_message():
    compared = threading.Barrier(3)  # else one might end before another has read the answer

    def work(coordinator):
        coordinator.compare({}, "")
        compared.wait(LONG)
        if coordinator.index == 1:
            coordinator.fail("the mesh is wrong", 2)

    _, ends = together(3, work)
    message = f"process 1 ({socket.gethostname()}): the mesh is wrong"
    assert ended(ends, 2) == [(0, message, 2), (2, message, 2)]


REFUSED = "CANCELLED: CANCELLED\nAdditional GRPC error information"


@pytest.mark.parametrize(
    ("error", "times", "asked"),
    [(REFUSED, 3, 4), (REFUSED, 99, service.TRIES), ("UNAVAILABLE: failed to connect", 1, 1)],
)
def test_a_request_that_the_service_refuses_is_sent_again(monkeypatch, error, times, asked):
    """Up to TRIES times; any other error is raised at once."""
    monkeypatch.setattr(service, "FIRST_WAIT", 0.0)
    calls = []

    def request():
        calls.append(error)
        if len(calls) <= times:
            raise jax.errors.JaxRuntimeError(error)
        return "answer"

    with nullcontext() if times < asked else pytest.raises(jax.errors.JaxRuntimeError):
        assert service.resent(request) == "answer"
    assert len(calls) == asked
