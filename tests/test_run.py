"""What stands around the loop: a run directory that cannot be, and the hints at the end."""

import io
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import QUICK, run_overrides, steps_of

from jaxtrain.inference import generate
from jaxtrain.main import main
from jaxtrain.train.run_directory import check_writable

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("where", ["file/runs", "/proc/runs"])
def test_a_run_directory_that_cannot_be_written_is_noticed_before_the_data(where, tmp_path, capfd):
    (tmp_path / "file").write_text("in the way")
    directory, cache = tmp_path / where, tmp_path / "cache"
    assert main(run_overrides(directory, data__cache_dir=cache)) == 2
    out, err = capfd.readouterr()
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    what = f"{directory / 'tiny'} cannot be written ({directory.parent}: "
    assert line.startswith(f"error: run.directory: {what}")
    assert "prepare" not in out and [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_run_directory_that_can_be_is_not_made_yet(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_writable(Path("a/b"))
    check_writable(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_full_cache_is_one_line(tmp_path, capfd, monkeypatch):
    def full(*_, **__):  # as array_record says it
        raise RuntimeError("write() failed: No space left on device; writing /x; at byte 9")

    monkeypatch.setattr("jaxtrain.data.store.prepare.prepare_source", full)
    assert main(run_overrides(tmp_path, data__cache_dir=tmp_path / "cache")) == 2
    (line,) = [x for x in capfd.readouterr().err.splitlines() if x.startswith("error: ")]
    where = f"error: data.cache_dir: {tmp_path / 'cache' / 'data'}: No space left on device; free "
    assert line.startswith(where) and "the same command resumes" in line


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_a_real_disk_that_is_full_is_one_line(tmp_path):
    """Whatever is written when it fills up: nothing half-written stays, and the command goes on."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting needs root")
    more = {"train__steps": 3, "checkpoint__every": 1, "checkpoint__keep": 9, "model__width": 128}
    more |= {"metrics__tensorboard": True} | QUICK
    command = [sys.executable, "-m", "jaxtrain.main", *run_overrides(tmp_path, **more)]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 2 and "Traceback" not in done.stderr + done.stdout, done.stderr
        (line,) = [x for x in done.stderr.splitlines() if x.startswith("error: ")]
        run_dir = tmp_path / "tiny"
        steps = steps_of(run_dir) if (run_dir / "checkpoints").is_dir() else []
        newest = f"the newest whole one is {max(steps)}" if steps else "there is none yet"
        assert f"{run_dir}: No space left on device" in line and newest in line
        left = [p.name for p in tmp_path.rglob("*") if ".part" in p.name or "tmp" in p.name]
        assert left == []
        subprocess.run(["mount", "-o", "remount,size=64m", str(tmp_path)], check=True)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_a_run_on_conversations_ends_with_the_command_that_talks(tmp_path, capfd, monkeypatch):
    lines = [
        [{"role": "user", "content": f"Say {i}."}, {"role": "assistant", "content": f"{i}!"}]
        for i in range(40)
    ]
    corpus = tmp_path / "talk.jsonl"
    corpus.write_text("".join(json.dumps({"messages": m}) + "\n" for m in lines))
    chat = {
        "data__train__name": "chat", "data__train__path": corpus, "train__steps": 1,
        "data__tokenizer": "{name: bytes}", "data__cache_dir": tmp_path / "cache",
        "train__sequence_length": 64, "sample__prompts": "[Hi]", "sample__tokens": 4,
        "data__validation__name": "none",
    }  # fmt: skip
    arguments = [x for x in run_overrides(tmp_path, **chat) if "vocab_size" not in x]
    assert main(arguments) == 0
    hint = capfd.readouterr().out.splitlines()[-1]
    assert hint.startswith("more     ") and hint.endswith(f"{tmp_path / 'tiny'} --chat")
    words = shlex.split(hint)
    command = words[words.index("generate") + 1 :]
    assert generate.main([*command, "--prompt", "Hi", "--tokens", "4"]) == 0
    assert "note:" not in capfd.readouterr().err
    assert generate.main([*command, "--prompt", "Hi " * 30, "--tokens", "4"]) == 0
    assert "more than the context of 64 in training" in capfd.readouterr().err
    # A talk by the defaults, which leave room in a context of 64.
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n"))
    assert generate.main(command) == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n"))
    assert generate.main([*command, "--tokens", "64"]) == 2
    assert "--tokens 64 leaves no room in a context of 64; give fewer" in capfd.readouterr().err
