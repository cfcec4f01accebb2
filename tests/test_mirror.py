import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path

import fsspec
import pytest
from tiny import QUICK, assert_same_run, run_overrides, steps_of

from jaxtrain.config import load_config
from jaxtrain.main import main
from jaxtrain.runs import mirror
from jaxtrain.runs.config import CheckpointConfig
from jaxtrain.runs.history import read_rows
from jaxtrain.runs.mirror import Mirror, Store, stamps, take_newest
from jaxtrain.settings import UserError
from jaxtrain.storage import checksums, objects


class Killed(BaseException):
    """The process ends here."""


class Faulty:
    """A file system whose `before(method, path)` may raise, before each call that has a path."""

    def __init__(self, filesystem, before):
        self.filesystem, self.before = filesystem, before

    def __getattr__(self, name):
        method = getattr(self.filesystem, name)
        if name in ("invalidate_cache", "exists", "info"):
            return method

        def call(*args, **options):
            self.before(name, args[1] if name == "put_file" else args[0])
            return method(*args, **options)

        return call


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(objects, "FIRST_WAIT", 0.0)
    monkeypatch.setattr(mirror, "POLL", 0.01)


@pytest.fixture
def url():
    return f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def faults(monkeypatch):
    """Set `before` of the file system of each store that is opened from now on."""
    opened = objects.open_filesystem

    def inject(before):
        def faulty(url):
            filesystem, path = opened(url)
            return Faulty(filesystem, before), path

        monkeypatch.setattr(objects, "open_filesystem", faulty)

    yield inject
    monkeypatch.setattr(objects, "open_filesystem", opened)


def config(url, every=1, keep=2, keep_every=None):
    fields = {"keep": keep, "keep_every": keep_every, "mirror": {"url": str(url), "every": every}}
    return CheckpointConfig.model_validate(fields)


def store_at(url):
    return Store(f"{url}/a")


def mirror_of(run_dir, c, say):
    return Mirror(run_dir, c, store_at(c.mirror.url), say)


def save(run_dir, step, content=""):
    """A folder as a checkpoint has it, and what a run has beside it."""
    folder = run_dir / "checkpoints" / str(step)
    for item, name in (("params", "d/0"), ("rest", "d/0"), ("position", "metadata")):
        path = folder / item / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{item}/{name} of {step} {content}" * 100)
        checksums.write_list(folder / item / checksums.LIST, {name: path}, {})
    (run_dir / "tokenizer").mkdir(exist_ok=True)
    (run_dir / "tokenizer" / "tokenizer.json").write_text("{}")
    (run_dir / "config.yaml").write_text("run: {name: a}\n")
    rows = [{"step": i, "kind": "train", "time": float(i), "loss": 1.0} for i in range(step + 5)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def remove(run_dir, step):
    shutil.rmtree(run_dir / "checkpoints" / str(step))


def taken(run_dir, c, said=None, check=lambda file: None):
    """The newest local step after a start."""
    run_dir.mkdir(parents=True, exist_ok=True)
    take_newest(run_dir, store_at(c.mirror.url), check, [].append if said is None else said.append)
    assert not (run_dir / mirror.STAGE).exists()
    return max(stamps(run_dir), default=None)


def tree(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "metrics.jsonl"
    }


@pytest.mark.parametrize("where", ["memory", "folder"])
def test_a_copy_is_all_that_a_new_machine_needs(tmp_path, url, where):
    c = config(url if where == "memory" else tmp_path / "far" / "away")
    save(tmp_path / "one", 7)
    mirror_of(tmp_path / "one", c, print).look()
    assert taken(tmp_path / "two", c) == 7
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    rows = read_rows(tmp_path / "two" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(8))
    assert taken(tmp_path / "three", config(f"{url}-empty")) is None


def test_copies_are_so_many_steps_apart_and_kept_by_the_same_rule(tmp_path, url):
    c = config(url, every=2, keep=2, keep_every=4)
    one = mirror_of(tmp_path, c, print)
    seen = []
    for step in range(1, 10):
        save(tmp_path, step)
        one.look()
        seen.append(one.store.steps())
    assert seen == [[1], [1], [1, 3], [1, 3], [3, 5], [3, 5], [5, 7], [5, 7], [7, 9]]
    save(tmp_path, 10)
    one.look(last=True)
    assert one.store.steps() == [9, 10]
    for step in (12, 14, 16):
        save(tmp_path, step)
        one.look()
    assert one.store.steps() == [12, 14, 16]  # 12 forever
    files = fsspec.filesystem("memory").find(one.store.folder.root)
    assert {path.split("/")[-1] for path in files if path.count("/") == 3} == {
        "12.json", "14.json", "16.json"
    }  # fmt: skip
    assert not any("/9/" in path or "/10/" in path for path in files)


def test_a_thread_copies_while_the_run_goes_on_and_ends_with_the_newest(tmp_path, url):
    with mirror_of(tmp_path, config(url, every=100), print) as one:
        for step in (1, 2, 3):
            save(tmp_path, step)
    assert one.store.steps()[-1] == 3 and taken(tmp_path / "two", config(url)) == 3


def test_an_upload_that_is_killed_anywhere_leaves_the_copy_before(tmp_path, url, faults):
    c = config(url, keep=1)
    save(tmp_path / "one", 1)
    mirror_of(tmp_path / "one", c, print).look()
    save(tmp_path / "one", 2)
    for point in range(100):
        calls = []

        def before(method, path, calls=calls, point=point):
            calls.append((method, path))
            if len(calls) > point:
                raise Killed

        faults(before)
        try:
            mirror_of(tmp_path / "one", c, print).look()
        except Killed:
            written = any(method == "pipe_file" for method, _ in calls[:-1])
            faults(lambda method, path: None)
            expected = 2 if written else 1
            assert taken(tmp_path / f"two{point}", c) == expected
            copied = tree(tmp_path / f"two{point}" / "checkpoints" / str(expected))
            assert copied == tree(tmp_path / "one" / "checkpoints" / str(expected))
        else:
            break
    assert point > 8
    assert store_at(url).steps() == [2]
    left = fsspec.filesystem("memory").find(store_at(url).folder.root)
    assert all("/2/" in path or path.endswith("/2.json") for path in left)


def test_errors_of_a_server_are_tried_again(tmp_path, url, faults):
    failures = []

    def before(method, path):
        if failures.count((method, path)) < objects.TRIES - 1:
            failures.append((method, path))
            raise OSError("503 Slow Down")

    faults(before)
    said = []
    save(tmp_path / "one", 1)
    mirror_of(tmp_path / "one", config(url), said.append).look()
    assert said == [] and len(failures) > 20
    failures.clear()
    assert taken(tmp_path / "two", config(url)) == 1


@pytest.mark.parametrize("error", [OSError("503 Slow\nDown"), PermissionError("403"), ValueError()])
def test_a_copy_that_fails_is_one_line_and_the_next_is_tried(tmp_path, url, faults, error):
    down, said = [True], []

    def before(method, path):
        if down[0]:
            raise error

    faults(before)
    save(tmp_path, 1)
    one = mirror_of(tmp_path, config(url), said.append)
    one.look()
    one.look()  # of the same checkpoint nothing more is said
    save(tmp_path, 2)
    one.look()
    assert [line.split(" was not")[0][-12:] for line in said] == ["checkpoint 1", "checkpoint 2"]
    assert all("\n" not in line and type(error).__name__ in line for line in said)
    down[0] = False
    save(tmp_path, 3)
    one.look()
    assert len(said) == 2 and one.store.steps() == [3]


def test_a_store_that_is_down_at_a_start_is_an_error(tmp_path, url, faults):
    def before(method, path):
        raise OSError("503 Slow Down")

    faults(before)
    with pytest.raises(
        UserError, match=r"cannot be read \(OSError: 503 Slow Down\); set checkpoint.m"
    ):
        taken(tmp_path / "two", config(url))


@pytest.mark.parametrize(
    "damage", ["truncated", "config", "flipped", "missing", "commit", "outside"]
)
def test_a_damaged_copy_is_said_and_the_one_before_is_taken(tmp_path, url, damage):
    c, memory = config(url), fsspec.filesystem("memory")
    one = mirror_of(tmp_path / "one", c, print)
    for step in (1, 2):
        save(tmp_path / "one", step)
        one.look()
    victim = f"{one.store.folder.root}/2/checkpoint/rest/d/0"
    if damage == "config":
        victim = f"{one.store.folder.root}/2/run/config.yaml"
    data = memory.cat_file(victim)
    if damage == "missing":
        memory.rm_file(victim)
    elif damage == "commit":
        memory.pipe_file(f"{one.store.folder.root}/2.json", b'{"files": {"run')
    elif damage == "outside":
        text = json.dumps({"files": {"../../x": {"bytes": 1, "crc32": "0"}}})
        memory.pipe_file(f"{one.store.folder.root}/2.json", text.encode())
    else:
        memory.pipe_file(victim, data[:-1] if damage == "truncated" else data[:-1] + b"?")
    said = []
    check = lambda file: load_config(file)  # fails for what is cut
    assert taken(tmp_path / "two", c, said, check) == 1
    assert len(said) == 2 and "checkpoint 2 is not restored from there" in said[0]
    assert steps_of(tmp_path / "two") == [1]


def test_an_upload_that_arrives_short_is_not_committed(tmp_path, url, monkeypatch):
    memory, said = fsspec.filesystem("memory"), []
    short = lambda path, to, **_: memory.pipe_file(to, b"short")
    monkeypatch.setattr(memory, "put_file", short)
    save(tmp_path, 1)
    one = mirror_of(tmp_path, config(url), said.append)
    one.look()
    assert one.store.steps() == [] and "5 of " in said[0] and len(said) == 1


def test_what_a_run_has_gone_back_from_is_removed_and_copied_anew(tmp_path, url):
    one = mirror_of(tmp_path / "one", config(url, keep=3), print)
    for step in (2, 4):
        save(tmp_path / "one", step)
        one.look()
    remove(tmp_path / "one", 4)
    one.look()
    assert one.store.steps() == [2]
    save(tmp_path / "one", 4)
    one.look()
    remove(tmp_path / "one", 4)
    save(tmp_path / "one", 4, "again")  # between two looks
    one.look()
    assert taken(tmp_path / "two", config(url)) == 4
    assert b"again" in tree(tmp_path / "two")["checkpoints/4/params/d/0"]


def test_a_newer_local_checkpoint_wins_and_an_older_does_not(tmp_path, url):
    c = config(url)
    save(tmp_path / "one", 5)
    mirror_of(tmp_path / "one", c, print).look()
    save(tmp_path / "newer", 6)
    save(tmp_path / "older", 4)
    assert taken(tmp_path / "newer", c) == 6 and steps_of(tmp_path / "newer") == [6]
    assert taken(tmp_path / "older", c) == 5 and steps_of(tmp_path / "older") == [4, 5]


@pytest.mark.parametrize(("copied", "damaged", "expected"), [(5, (6,), 5), (4, (6, 7), 5)])
def test_of_local_checkpoints_and_copies_the_newest_whole_one_is_taken(
    tmp_path, url, copied, damaged, expected
):
    c, said, run = config(url), [], tmp_path / "two"
    save(tmp_path / "one", copied)
    mirror_of(tmp_path / "one", c, print).look()
    for step in {4, 9 - copied, *damaged}:
        save(run, step)
    broken = [run / "checkpoints" / str(step) / "rest" / "d" / "0" for step in damaged]
    for path in broken:
        path.write_text("x")
    assert taken(run, c, said) == expected
    for line, step in zip(said, sorted(damaged, reverse=True)):
        assert f"local checkpoint {step} is damaged (rest/d/0 has 1 bytes, not " in line
        assert (run / "damaged" / str(step) / "rest" / "d" / "0").read_text() == "x"


@pytest.mark.parametrize("local", [None, 4, 6])
def test_the_place_of_another_run_is_left_to_it(tmp_path, url, local):
    save(tmp_path / "one", 5)
    mirror_of(tmp_path / "one", config(url), print).look()
    if local:
        save(tmp_path / "two", local)
    before = tree(tmp_path / "two")

    def check(file):
        assert file.read_text() == "run: {name: a}\n"
        raise UserError("another")

    with pytest.raises(UserError, match="another"):
        taken(tmp_path / "two", config(url), check=check)
    assert tree(tmp_path / "two") == before


def test_folders_of_others_are_not_cleaned_up(tmp_path, url):
    memory = fsspec.filesystem("memory")
    one = mirror_of(tmp_path, config(url, keep=1), print)
    memory.pipe_file(f"{one.store.folder.root}/100/params/x", b"theirs")
    memory.pipe_file(f"{one.store.folder.root}/3/checkpoint/params/x", b"ours, not whole")
    for step in (1, 2):
        save(tmp_path, step)
        one.look()
    assert one.store.steps() == [2] and not memory.exists(f"{one.store.folder.root}/3")
    assert memory.cat_file(f"{one.store.folder.root}/100/params/x") == b"theirs"


@pytest.mark.parametrize(
    "key, url",
    [
        ("mirror.url", "s3://KEY:hunter2@bucket/x"), ("mirror.url", "s3://bucket/x?token=hunter2"),
        ("mirror", "s3://KEY:hunter2@bucket/x"), ("mirror.url", "https://KEY:hunter2@host/x"),
    ],
)  # fmt: skip
def test_a_url_with_a_secret_is_refused_in_one_line_without_it(tmp_path, capsys, key, url):
    assert main([*run_overrides(tmp_path), f"checkpoint.{key}={url}"]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and "checkpoint.mirror" in lines[0] and "hunter2" not in lines[0]
    assert not (tmp_path / "tiny").exists()


# ---- with a run ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_a_killed_run_goes_on_bit_for_bit_from_the_mirror_alone(tmp_path, capsys):
    far = tmp_path / "far" / "tiny"
    fields = {"eval__every": 2, "sample__prompts": "['']", "sample__tokens": 8} | QUICK
    assert main(run_overrides(tmp_path / "whole", **fields)) == 0
    fields["checkpoint__mirror__url"] = far.parent
    killed = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("gated.py")),
         *run_overrides(tmp_path / "one", **fields)],
        env=os.environ | {"GATE": str(tmp_path / "never"), "GATE_STEP": "5"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    while not (far / "3.json").is_file():
        assert killed.poll() is None, killed.communicate()[0]
        time.sleep(0.01)
    killed.kill()
    killed.communicate()
    arguments, run_dir = run_overrides(tmp_path / "two", **fields), tmp_path / "two" / "tiny"
    capsys.readouterr()
    assert main(run_overrides(tmp_path / "two", **fields, train__batch_size=16)) == 2
    said = capsys.readouterr().err
    assert "a run tiny of another configuration: " in said and said.count("\n") == 1
    assert not (run_dir / "checkpoints").exists() and not (run_dir / "config.yaml").exists()
    assert main(arguments) == 0
    assert "checkpoint 3 is restored from there" in capsys.readouterr().out.replace("\n", " ")
    assert_same_run(run_dir, tmp_path / "whole" / "tiny")
    assert Store(str(far)).steps() == [3, 6]
    assert read_rows(run_dir / "metrics.jsonl")[0]["event"] == "start"
    shutil.rmtree(run_dir)
    assert main(arguments) == 0  # of a run that has ended
    assert_same_run(run_dir, tmp_path / "whole" / "tiny")
