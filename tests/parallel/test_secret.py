"""Who does not know the secret of a job has no part in it, whatever else it sends."""

import itertools
import json
import re
import socket
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psutil
import pytest
from machine import LONG, Clock, free_port

from jaxtrain.cluster import coordinator, meeting
from jaxtrain.cluster import secret as secrets
from jaxtrain.cluster.coordinator import Coordinator
from jaxtrain.cluster.meeting import LINE_BYTES, Link
from jaxtrain.cluster.secret import Secret, is_loopback, key_of, nonces
from jaxtrain.settings import UserError

KNOWN = {"JAXTRAIN_SECRET": "of this test's job"}
OTHER = {"JAXTRAIN_SECRET": "of some other's job"}
HELLO = {"process": 1, "of": 2, "host": "stranger"}


@pytest.fixture(autouse=True)
def proving(monkeypatch):
    """Nobody is sent away or told to wait for being slow."""
    monkeypatch.setattr(meeting, "PROVING", LONG)
    monkeypatch.setattr(coordinator, "PATIENCE", LONG)


@pytest.fixture
def clock(monkeypatch):
    """That of those who meet."""
    clock = Clock()
    for module in (coordinator, meeting, secrets):
        monkeypatch.setattr(module, "time", clock)
    return clock


def secret(folder, environment=KNOWN):
    return Secret(folder, "localhost:1", environment)


def connected(port):
    until = time.monotonic() + LONG
    while time.monotonic() < until:
        with suppress(ConnectionRefusedError):
            return socket.create_connection(("localhost", port))
        time.sleep(0.01)
    raise TimeoutError


def leave(coordinators):
    with ThreadPoolExecutor(len(coordinators)) as threads:
        list(threads.map(lambda coordinator: coordinator.leave(), coordinators))


def test_another_secret_is_refused_and_the_job_begins_without_it(tmp_path, capfd):
    address = f"localhost:{free_port()}"
    coordinators = [Coordinator(0, 2), Coordinator(1, 2)]
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(coordinators[0].meet, address, LONG, secret(tmp_path))
        with pytest.raises(UserError, match="did not accept the secret of process 1; give all"):
            Coordinator(1, 2).meet(address, LONG, secret(tmp_path, OTHER))
        coordinators[1].meet(address, LONG, secret(tmp_path))
        first.result()
    leave(coordinators)
    said = capfd.readouterr().err
    assert (
        said == "refused  a connection from 127.0.0.1, which does not know the secret of the job\n"
    )


@pytest.mark.slow
def test_the_file_is_this_users_and_there_while_they_meet(tmp_path, monkeypatch):
    """Also where an earlier job's was left behind, and is read first."""
    monkeypatch.setattr("jaxtrain.cluster.meeting.RETRY", 0.01)
    port, folder = free_port(), tmp_path / "runs"
    keys = [secret(folder, {}) for _ in range(2)]
    keys[0].make()
    old, reads = keys[0].file.read_bytes(), []

    def read():
        reads.append(stat.S_IMODE(keys[1].file.stat().st_mode))
        return old if len(reads) < 3 else keys[1].file.read_bytes()

    monkeypatch.setattr(keys[1], "read", read)
    coordinators = [Coordinator(0, 2), Coordinator(1, 2)]
    with ThreadPoolExecutor(2) as threads:
        jobs = [
            threads.submit(c.meet, f"localhost:{port}", LONG, k) for c, k in zip(coordinators, keys)
        ]
        [job.result() for job in jobs]
    leave(coordinators)
    assert reads == [0o600] * 3 and list(folder.iterdir()) == []


def missed(at, folder, clock, after):
    """What a process says that does not reach process 0 and has no secret in `folder`.

    after(attempt, found): called with the number and the outcome of each attempt.
    """
    attempts, real = itertools.count(1), meeting.introduce

    def introduce(*given):
        found = real(*given)
        after(next(attempts), found)
        return found

    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError) as error:
        patch.setattr(meeting, "introduce", introduce)
        Coordinator(1, 2).meet(at, LONG, secret(folder, {}))
    return str(error.value)


def no_secret_in(folder):
    return f" s (there is no secret of the job in {folder}; all processes must share that folder"


def test_processes_that_share_no_folder_are_told(tmp_path, clock):
    address = f"localhost:{free_port()}"

    def after(attempt, found):
        clock.ahead += LONG * found.greeted  # no other attempt

    with ThreadPoolExecutor(1) as threads:
        keep = secret(tmp_path / "a", {})
        first = threads.submit(Coordinator(0, 2).meet, address, LONG, keep)
        assert no_secret_in(tmp_path / "b") in missed(address, tmp_path / "b", clock, after)
        with pytest.raises(UserError, match="1 of 2 processes did not reach"):
            first.result()


@pytest.mark.parametrize("later", [None, b"", b"220 mail\n"])
def test_who_answers_no_more_does_not_hide_that_there_is_no_secret(
    tmp_path, clock, monkeypatch, later
):
    """As where process 0 gives up first: nobody listens, or somebody else does."""
    monkeypatch.setattr(meeting, "RETRY", 0.01)
    server = socket.create_server(("localhost", 0))
    address = f"localhost:{server.getsockname()[1]}"

    def answer():
        with server:
            with server.accept()[0] as link:
                nonces(link, time.monotonic() + LONG)
            if later is not None:
                with server.accept()[0] as link:
                    link.sendall(later)

    def after(attempt, found):
        assert found.greeted is (attempt == 1)
        if later is None or attempt == 2:
            job.result()
        clock.ahead = LONG * (attempt == 3)

    with ThreadPoolExecutor(1) as threads:
        job = threads.submit(answer)
        assert no_secret_in(tmp_path) in missed(address, tmp_path, clock, after)


def test_an_attempt_that_the_deadline_cuts_off_says_nothing(tmp_path, clock):
    """It may have been process 0 that was about to answer."""
    port = free_port()

    def answer(server):
        with server, server.accept()[0]:
            clock.ahead = LONG

    def after(attempt, found):
        if attempt == 1:
            threads.submit(answer, socket.create_server(("localhost", port)))

    with ThreadPoolExecutor(1) as threads:
        said = missed(f"localhost:{port}", tmp_path, clock, after)
    assert f"in {LONG:g} s (Connection refused); is it running there" in said


def test_a_folder_that_cannot_be_written_and_a_short_secret(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="set JAXTRAIN_SECRET for all of them"):
        secret(tmp_path / "file" / "runs", {}).make()
    with pytest.raises(UserError, match="JAXTRAIN_SECRET has 3 characters; it needs at least 16"):
        secret(tmp_path, {"JAXTRAIN_SECRET": "abc"})


@pytest.fixture
def pair():
    """The two ends of a connection: process 0's, and another's."""
    links = socket.socketpair()
    with links[0], links[1]:
        yield lambda key=b"k" * 32, other=None: (
            Link(links[0], key, first=True),
            Link(links[1], other or key, first=False),
        )


@pytest.mark.parametrize(
    "what", ["changed", "repeated", "reflected", "another key", "long", "none"]
)
def test_a_message_that_the_other_end_has_not_written_ends_the_connection(pair, what):
    here, there = pair(other=b"x" * 32 if what == "another key" else None)
    there.send({"stop": True})
    line = here.socket.recv(1 << 16)
    replies = {
        "changed": line.replace(b"true", b"null"),
        "repeated": line + line,
        "another key": line,
        "long": b"a" * (LINE_BYTES + 1),
        "none": b"\n",
    }
    if what == "reflected":
        here.send({"stop": True})
        replies[what] = there.socket.recv(1 << 16)
    there.socket.sendall(replies[what])
    until = time.monotonic() + LONG
    if what == "repeated":
        assert here.receive(until) == {"stop": True}
    assert here.receive(until) is None


def test_a_message_that_it_has_written_is_taken(pair):
    here, there = pair()
    for i in range(3):
        there.send({"step": i})
    here.send({"host": "a"})
    until = time.monotonic() + LONG
    assert [here.receive(until) for _ in range(3)] == [{"step": i} for i in range(3)]
    assert there.receive(until) == {"host": "a"}


def proxy(port, upstream, seen):
    """Hands a connection on, and keeps what was sent to process 0."""
    with socket.create_server(("localhost", port)) as server:
        here, _ = server.accept()
        there = connected(upstream)
        seen.append((here, there))

        def copy(source, target, keep):
            with suppress(OSError):
                while data := source.recv(1 << 16):
                    seen.append(data) if keep else None
                    target.sendall(data)

        threading.Thread(target=copy, args=(there, here, False), daemon=True).start()
        threading.Thread(target=copy, args=(here, there, True), daemon=True).start()


def test_a_recording_of_a_meeting_opens_no_other(tmp_path, clock):
    ports, seen, until = [free_port(), free_port()], [], time.monotonic() + LONG
    known = KNOWN["JAXTRAIN_SECRET"].encode()
    with ThreadPoolExecutor(3) as threads, meeting.listen("localhost", ports[0], until) as server:
        threads.submit(proxy, ports[1], ports[0], seen)
        job = threads.submit(lambda: next(meeting.proved(server, known, until)))
        attend = lambda: meeting.introduce(("localhost", ports[1]), HELLO, until, secret(tmp_path))
        other = threads.submit(lambda: next(x for x in iter(attend, None) if isinstance(x, tuple)))
        link, hello = job.result()
        link.send({"host": "here"})
        assert hello == HELLO and other.result()[1] == {"host": "here"}
        link.socket.close(), other.result()[0].socket.close()
    for link in seen.pop(0):
        link.close()
    assert re.match(rb"jaxtrain [0-9a-f]{64}\n[0-9a-f]{64} \{", b"".join(seen))
    port = free_port()
    with ThreadPoolExecutor(1) as threads:
        again = threads.submit(Coordinator(0, 2).meet, f"localhost:{port}", LONG, secret(tmp_path))
        with connected(port) as stranger:
            stranger.sendall(b"".join(seen))
            assert stranger.recv(74).startswith(b"jaxtrain ")
            with suppress(ConnectionResetError):
                assert stranger.recv(1) == b""  # closed, without an answer
        clock.ahead = LONG
        with pytest.raises(UserError, match="1 of 2 processes did not reach"):
            again.result()


@pytest.mark.slow
def test_strangers_that_say_nothing_or_too_much_hold_nobody_up(tmp_path):
    port = free_port()
    coordinators = [Coordinator(0, 2), Coordinator(1, 2)]
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(coordinators[0].meet, f"localhost:{port}", LONG, secret(tmp_path))
        strangers = [connected(port) for _ in range(20)]
        flood = connected(port)
        with suppress(OSError):  # sent away while it still sends
            flood.sendall(b"jaxtrain " + b"0" * 64 + b"\n" + b"0" * (1 << 22))
        coordinators[1].meet(f"localhost:{port}", LONG, secret(tmp_path))
        first.result()  # before they have had their time
    for stranger in [*strangers, flood]:
        stranger.close()
    leave(coordinators)


def test_who_plays_process_0_is_not_believed(tmp_path):
    port = free_port()

    def play():
        with socket.create_server(("localhost", port)) as server:
            link, _ = server.accept()
            both = nonces(link, time.monotonic() + LONG)
            assert both is not None
            peer = Link(link, key_of(b"a guess at the secret", *both), first=True)
            link.recv(1 << 16)
            peer.send({"host": "here"})
            link.close()

    with ThreadPoolExecutor(1) as threads:
        job = threads.submit(play)
        with pytest.raises(UserError, match="process 0 did not accept the secret of process 1"):
            Coordinator(1, 2).meet(f"localhost:{port}", LONG, secret(tmp_path))
        job.result()


def outer_address():
    """An address of this host that others can reach."""
    for addresses in psutil.net_if_addrs().values():
        for one in addresses:
            if one.family == socket.AF_INET and not is_loopback(one.address):
                return one.address
    return pytest.skip("this host has no network")


def test_under_localhost_no_other_host_reaches_the_port():
    port, outer = free_port(), outer_address()
    for host, reached in (("localhost", False), ("127.0.0.1", False), ("node0", True)):
        with meeting.listen(host, port, time.monotonic() + LONG):
            socket.create_connection(("127.0.0.1", port), LONG).close()
            if reached:
                socket.create_connection((outer, port), LONG).close()
            else:
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection((outer, port), LONG)


@pytest.mark.parametrize(
    "host", ["localhost.example.org", "127.0.0.1.example.org", "10.0.0.1", "0.0.0.0"]
)
def test_what_is_not_this_host_alone(host):
    assert not is_loopback(host)


def test_nothing_of_the_secret_is_in_a_message(pair):
    here, there = pair(key_of(KNOWN["JAXTRAIN_SECRET"].encode(), b"a", b"b"))
    there.send(HELLO)
    proof, _, text = here.socket.recv(1 << 16).partition(b" ")
    assert len(proof) == 64 and json.loads(text) == HELLO
