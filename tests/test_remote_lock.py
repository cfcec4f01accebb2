"""One run at a URL, one job, by conditional put and nobody's clock but the waiter's."""

import json
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from s3_server import DENIED, LOST, OVERWRITE, SECRET
from tiny import run_overrides

from jaxtrain.main import main
from jaxtrain.runs import remote_lock
from jaxtrain.runs.lock import myself
from jaxtrain.runs.remote_lock import RemoteLock, locks
from jaxtrain.settings import UserError
from jaxtrain.storage import objects
from jaxtrain.storage.objects import RemoteFolder


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(objects, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(remote_lock, "LOOK", 0.02)


@pytest.fixture(params=["s3", "memory", "folder"])
def folder(request, tmp_path):
    urls = {
        "s3": lambda: f"{request.getfixturevalue('s3').bucket()}/run",
        "memory": lambda: f"memory://{uuid.uuid4().hex}",
        "folder": lambda: str(tmp_path / "far"),
    }
    return RemoteFolder(urls[request.param]())


def put(folder, number=1, beat=0, **changes):
    """A lock file as a holder on another machine would have left it."""
    holder = myself(0.5)._replace(**{"host": "far", "machine": "another", **changes})
    state = {"beat": beat, "released": False} | holder._asdict()
    folder.write(f"lock.{number}", json.dumps(state).encode())


def taken(folder, said=None, timeout=0.5, end=pytest.fail):
    lock = RemoteLock(folder, timeout, [].append if said is None else said.append, end)
    lock.take()
    return lock


def test_of_many_one_takes_it_and_the_next_follows(folder):
    def attempt(_):
        try:
            return taken(folder, timeout=60.0)
        except UserError as error:
            return str(error)

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(attempt, range(6)))
    locked = [lock for lock in found if not isinstance(lock, str)]
    assert len(locked) == 1
    assert all(" is in use by process " in text for text in found if isinstance(text, str))
    locked[0].release()
    again = taken(folder)
    assert again.number == locked[0].number + 1 and locks(folder) == [again.number]
    again.release()


@pytest.mark.quick("memory")
def test_one_on_another_machine_is_known_by_its_silence(folder):
    put(folder, started="2099-01-01T00:00:00Z")  # its clock says what it likes
    said, begun = [], time.monotonic()
    lock = taken(folder, said)
    assert lock.number == 2 and time.monotonic() - begun > 0.5
    assert len(said) == 1 and "by process" in said[0] and "on far: waiting" in said[0]
    lock.release()


def beating(folder, over):
    beat = 0
    while not over.wait(0.05):
        beat += 1
        put(folder, beat=beat, pid=7)


def test_a_second_machine_is_one_line_and_exit_code_2(tmp_path, s3, capsys):
    url = s3.bucket()
    folder, over = RemoteFolder(f"{url}/tiny"), threading.Event()
    put(folder, pid=7)
    thread = threading.Thread(target=beating, args=(folder, over))
    thread.start()
    try:
        assert main([*run_overrides(tmp_path), f"checkpoint.mirror.url={url}"]) == 2
    finally:
        over.set()
        thread.join()
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and f"{url}/tiny is in use by process 7 on far, which" in err
    assert not (tmp_path / "tiny").exists() and SECRET not in out + err


def test_whoever_was_followed_ends_and_leaves_the_lock_alone(folder):
    ended = threading.Event()
    first = taken(folder, end=lambda message, code: ended.set())
    put(folder, 2)
    assert ended.wait(10)
    first.release()
    assert locks(folder)[-1] == 2
    assert b'"released": false' in folder.read("lock.2")


def test_a_holder_stays_through_beats_that_fail(s3):
    folder = RemoteFolder(f"{s3.bucket()}/run")
    lock = taken(folder)
    s3.fault = lambda request: DENIED
    time.sleep(0.2)
    s3.fault = lambda request: None
    text = folder.read("lock.1")
    deadline = time.monotonic() + 10
    while folder.read("lock.1") == text and time.monotonic() < deadline:
        time.sleep(0.02)
    assert folder.read("lock.1") != text
    lock.release()


def test_an_answer_that_was_lost_is_not_anothers_lock(s3):
    folder = RemoteFolder(f"{s3.bucket()}/run")
    answers = iter([LOST])
    s3.fault = lambda request: next(answers, None) if request.method == "PUT" else None
    lock = taken(folder)
    assert lock.number == 1
    lock.release()


def test_a_store_without_conditional_puts_is_said(s3):
    folder, said = RemoteFolder(f"{s3.bucket()}/run"), []
    s3.fault = lambda request: OVERWRITE
    taken(folder, said).release()
    assert len(said) == 1 and "two machines" in said[0]


@pytest.mark.parametrize("where", ["denied", "nowhere"])
def test_a_bucket_that_cannot_be_written_is_one_line(tmp_path, s3, capsys, where):
    url = s3.bucket() if where == "denied" else "s3://no-such-bucket"
    s3.fault = lambda r: DENIED if where == "denied" and r.method == "PUT" else None
    assert main([*run_overrides(tmp_path), f"checkpoint.mirror.url={url}"]) == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and f"{url}/tiny cannot be written (" in err
    assert SECRET not in out + err and not (tmp_path / "tiny").exists()
