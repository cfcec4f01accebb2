"""Runs on object storage, against a server of S3 that fails as real ones do."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from s3_server import CUT, EXPIRED, INTERNAL, LOST, SECRET, SHORT, SLOW_DOWN
from test_mirror import config, mirror_of, save, taken, tree
from tiny import QUICK, rows_of, run_overrides

from jaxtrain.runs import mirror
from jaxtrain.runs.mirror import Store
from jaxtrain.settings import UserError
from jaxtrain.storage import objects

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(objects, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(mirror, "POLL", 0.01)


def test_copies_go_there_and_back_through_faults(tmp_path, s3):
    c = config(s3.bucket())
    save(tmp_path / "one", 7)
    faults = iter([SLOW_DOWN, LOST, INTERNAL, SLOW_DOWN])
    s3.fault = lambda request: next(faults, None) if request.method == "PUT" else None
    mirror_of(tmp_path / "one", c, pytest.fail).look()
    faults = iter([SLOW_DOWN, CUT, SHORT])
    s3.fault = lambda request: next(faults, None) if request.method == "GET" else None
    assert taken(tmp_path / "two", c) == 7
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    assert next(faults, None) is None


@pytest.mark.slow
def test_files_are_copied_several_at_a_time_and_the_commit_after_all(tmp_path, s3):
    c = config(s3.bucket())
    save(tmp_path / "one", 1)
    running, most, order = Counter(), [], []

    def fault(request):
        if request.method == "PUT":
            running["now"] += 1
            most.append(running["now"])
            time.sleep(0.2)
            running["now"] -= 1
            order.append(request.key)

    s3.fault = fault
    mirror_of(tmp_path / "one", c, pytest.fail).look()
    assert max(most) > 2 and order[-1].endswith("/a/1.json") and len(order) == 10


@pytest.mark.slow
def test_credentials_that_expire_are_one_line_and_the_next_checkpoint_is_tried(tmp_path, s3):
    c, said = config(s3.bucket()), []
    one = mirror_of(tmp_path / "one", c, said.append)
    save(tmp_path / "one", 1)
    one.look()
    s3.fault = lambda request: EXPIRED
    save(tmp_path / "one", 2)
    one.look()
    assert len(said) == 1 and "\n" not in said[0] and "PermissionError: ExpiredToken" in said[0]
    assert SECRET not in said[0]
    with pytest.raises(UserError, match=r"cannot be read \(PermissionError: ExpiredToken"):
        taken(tmp_path / "two", c)
    s3.reset()
    assert taken(tmp_path / "two", c) == 1
    save(tmp_path / "one", 3)
    one.look()
    assert len(said) == 1 and one.store.steps() == [1, 3]


@pytest.mark.slow
def test_a_read_that_stays_damaged_is_said(tmp_path, s3):
    c, said = config(s3.bucket()), []
    one = mirror_of(tmp_path / "one", c, said.append)
    for step in (1, 2):
        save(tmp_path / "one", step)
        one.look()
    s3.fault = lambda request: SHORT if request.key.endswith("/2/checkpoint/rest/d/0") else None
    assert taken(tmp_path / "two", c, said) == 1
    assert len(said) == 2 and "/2/checkpoint/rest/d/0" in said[0] and "is not restored" in said[0]


# ---- with runs -----------------------------------------------------------------------------------


def killed_at(s3, part, *command):
    """Kill a process at its third PUT below a folder of this name; what it has said until then."""
    puts = []

    def fault(request):
        if request.method == "PUT" and part in request.key:
            puts.append(request.key)
            if len(puts) == 3:
                for one in [*psutil.Process(process.pid).children(True), process]:
                    one.kill()

    s3.fault = fault
    process = subprocess.Popen(
        [sys.executable, "-m", *command], env=os.environ | s3.environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    said = process.communicate(timeout=300)[0]
    assert process.returncode == -signal.SIGKILL and len(puts) >= 3, said
    s3.fault = lambda request: None
    assert SECRET not in said
    return said


def holds_no_secret(folder):
    return not any(SECRET.encode() in p.read_bytes() for p in folder.rglob("*") if p.is_file())


@pytest.fixture
def quick_processes(tmp_path, monkeypatch):
    """What `quick` does, in the processes of a job: steps 3 to 6 take less than a second."""
    (tmp_path / "sitecustomize.py").write_text(
        "from jaxtrain.runs import mirror\nmirror.POLL = 0.01\n"
    )
    paths = str(tmp_path), os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


@pytest.mark.slow
@pytest.mark.usefixtures("quick_processes")
def test_a_job_of_two_processes_goes_on_from_s3_alone(tmp_path, s3):
    fields = QUICK | {"mesh__data": 2, "checkpoint__mirror__url": s3.bucket()}
    job = ["jaxtrain.cli", "launch", "--processes", "2", "--devices-per-process", "1", "--"]
    killed_at(s3, "/tiny/6/", *job, *run_overrides(tmp_path / "one", **fields))
    shutil.rmtree(tmp_path / "one")
    command = [sys.executable, "-m", *job, *run_overrides(tmp_path / "two", **fields)]
    done = subprocess.run(
        command, env=os.environ | s3.environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "checkpoint 3 is restored from there" in done.stdout
    assert [row["step"] for row in rows_of(tmp_path / "two" / "tiny")] == list(range(1, 7))
    assert Store(f"{fields['checkpoint__mirror__url']}/tiny").steps() == [3, 6]
