"""A run directory is one job's: the second is refused by name, a dead one's place is taken."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from machine import LONG
from tiny import run_overrides

from jaxtrain.cluster.coordinator import Coordinator
from jaxtrain.main import main
from jaxtrain.runs import lock
from jaxtrain.runs.lock import RunLock, lock_run, locks_in, myself
from jaxtrain.settings import UserError

ROOT = Path(__file__).parents[1]

HOLD = """
import sys, time
from pathlib import Path
from jaxtrain.runs.lock import RunLock
from jaxtrain.settings import UserError
print("ready", flush=True)
sys.stdin.readline()
try:
    lock = RunLock(Path(sys.argv[1]), 60.0)
    lock.take()
    print("held", flush=True)
    sys.stdin.readline()
except UserError as error:
    print(error, flush=True)
"""


def starter(run_dir):
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run_dir)], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=1,
    )  # fmt: skip


def put(run_dir, number=1, silent=0.0, **changes):
    """A lock file as another holder would have left it."""
    path = run_dir / f"lock.{number}"
    path.write_text(json.dumps(myself(60.0)._replace(**changes)._asdict()))
    os.utime(path, (time.time() - silent,) * 2)
    return path


def test_of_two_the_second_is_refused_by_name_and_then_goes(tmp_path):
    first = RunLock(tmp_path, 60.0)
    first.take()
    who = f"{tmp_path} is in use by process {os.getpid()} on {first.me.host}, which began at 20"
    with pytest.raises(UserError, match=who):
        RunLock(tmp_path, 60.0).take()
    assert [p.name for p in tmp_path.iterdir()] == ["lock.1"]
    first.release()
    second = RunLock(tmp_path, 60.0)
    second.take()
    second.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "silent"),
    [
        ({"pid": 2**22 + 1}, 0),
        ({"created": 1.0}, 0),  # the pid was given again
        ({"machine": "another"}, 61),
        ({"machine": "another", "timeout": 1.0}, 0),  # after a wait, of the holder's own time
    ],
)
@pytest.mark.quick("changes0-0", "changes1-0", "changes2-61")
def test_who_counts_as_gone(tmp_path, changes, silent):
    put(tmp_path, 4, silent, **changes)
    taker = RunLock(tmp_path, 60.0)
    taker.take()
    assert locks_in(tmp_path) == [5]
    taker.release()


def test_a_live_process_holds_however_silent(tmp_path):
    put(tmp_path, 4, silent=1e6)
    with pytest.raises(UserError, match="is in use by process"):
        RunLock(tmp_path, 60.0).take()


def test_a_holder_on_another_machine_gives_a_sign_of_life(tmp_path, capfd, monkeypatch):
    path = put(tmp_path, 4, 5, machine="another", host="far", pid=12, timeout=LONG)
    waits = SimpleNamespace(sleep=lambda seconds: os.utime(path))
    monkeypatch.setattr(lock, "time", waits)
    with pytest.raises(UserError, match="is in use by process 12 on far"):
        RunLock(tmp_path, 60.0).take()
    said = (
        rf"lock     {path} is of process 12 on far: waiting for a sign of life, 1\d\d s at most\n"
    )
    assert re.fullmatch(said, capfd.readouterr().err)


def test_an_unfinished_lock_file_counts_for_a_while(tmp_path, monkeypatch):
    """One that was made without a link, by a process that was killed then."""
    path = tmp_path / "lock.1"
    path.write_text('{"host": "a')
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        os.utime(path, (time.time() - len(waits) * LONG,) * 2)

    monkeypatch.setattr(lock, "time", SimpleNamespace(sleep=sleep))
    taker = RunLock(tmp_path, 1.5 * LONG)
    taker.take()
    assert waits == [lock.LOOK] * 2
    taker.release()


def test_without_links_a_file_is_made_that_was_not_there(tmp_path, monkeypatch):
    def no_link(*_):
        raise OSError(lock.errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "link", no_link)
    test_of_two_the_second_is_refused_by_name_and_then_goes(tmp_path)


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.quick("False")
def test_of_many_at_once_one_has_it(tmp_path, stale):
    """Threads here; processes in the slow test."""
    for attempt in range(20):
        run_dir = tmp_path / str(attempt)
        run_dir.mkdir()
        if stale:
            put(run_dir, 3, pid=2**22 + 1)
        barrier, got = threading.Barrier(8), []

        def take(run_dir=run_dir, barrier=barrier, got=got):
            mine = RunLock(run_dir, 60.0)
            barrier.wait()
            try:
                mine.take()
                got.append(mine)
            except UserError:
                pass

        threads = [threading.Thread(target=take) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(got) == 1 and len(list(run_dir.iterdir())) == 1
        got[0].release()


@pytest.mark.slow
def test_of_many_processes_at_once_one_has_it_and_one_takes_it_from_the_dead(tmp_path):
    for _ in range(2):  # the second time the last holder is dead
        jobs = [starter(tmp_path) for _ in range(4)]
        assert {job.stdout.readline() for job in jobs} == {"ready\n"}
        for job in jobs:
            job.stdin.write("\n")
        said = [job.stdout.readline().strip() for job in jobs]
        assert said.count("held") == 1
        holder = jobs[said.index("held")]
        rest = [text for text in said if text != "held"]
        assert all("is in use by process" in text for text in rest)
        holder.send_signal(signal.SIGKILL)
        for job in jobs:
            job.wait()
            job.stdin.close()
            job.stdout.close()
        assert len(locks_in(tmp_path)) == 1


def test_a_zombie_holds_nothing(tmp_path):
    child = subprocess.Popen(["sleep", "1000"])
    created = psutil.Process(child.pid).create_time()
    put(tmp_path, 1, pid=child.pid, created=created)
    with pytest.raises(UserError, match=f"in use by process {child.pid} "):
        RunLock(tmp_path, 60.0).take()
    child.kill()
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    taker = RunLock(tmp_path, 60.0)
    taker.take()
    taker.release()
    child.wait()


def test_a_holder_that_was_given_up_ends(tmp_path):
    """It was stopped for so long that another has followed it."""
    said, ended = [], threading.Event()

    def end(message, code):
        said.append((message, code))
        ended.set()

    slow = RunLock(tmp_path, 0.3, end)
    slow.take()
    before = slow.path.stat().st_mtime_ns
    while slow.path.stat().st_mtime_ns == before:
        time.sleep(0.01)
    assert not said
    put(tmp_path, 2, pid=77, host="other")
    assert ended.wait(LONG)
    assert said == [(f"{tmp_path} was taken from this process: process 77 on other has it", 2)]
    slow.release()


def test_folders_made_for_it_go_and_process_0_holds_for_all(tmp_path):
    run_dir = tmp_path / "a" / "b"
    with lock_run(run_dir, Coordinator(), 60.0):
        assert locks_in(run_dir) == [1]
        with lock_run(run_dir, Coordinator(1, 2), 60.0):
            assert locks_in(run_dir) == [1]
    assert list(tmp_path.iterdir()) == []
    with lock_run(run_dir, Coordinator(), 60.0):
        (run_dir / "file").touch()
    assert [p.name for p in run_dir.iterdir()] == ["file"]


def test_a_second_start_is_refused_and_changes_nothing(copy, capfd):
    put(copy, 1, host="far", started="2026-01-02T03:04:05Z")
    before = {p: p.read_bytes() for p in copy.rglob("*") if p.is_file()}
    assert main(run_overrides(copy.parent)) == 2
    (line,) = [x for x in capfd.readouterr().err.splitlines() if x.startswith("error: ")]
    assert (
        f"{copy} is in use by process {os.getpid()} on far, which began at 2026-01-02T03:04:05Z"
        in line
    )
    assert {p: p.read_bytes() for p in copy.rglob("*") if p.is_file()} == before
