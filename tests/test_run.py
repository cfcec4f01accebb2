"""What stands around the loop: a run directory that cannot be, and the hints at the end."""

import io
import json
import shlex
from pathlib import Path

import pytest
from tiny import run_overrides

from jaxtrain import generate
from jaxtrain.main import main
from jaxtrain.run import check_writable


@pytest.mark.parametrize("place", ["file/runs", "/proc/runs"])
def test_a_run_directory_that_cannot_be_written_is_noticed_before_the_data(place, tmp_path, capfd):
    (tmp_path / "file").write_text("in the way")
    directory, cache = tmp_path / place, tmp_path / "cache"
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
    command = words[words.index("jaxtrain.generate") + 1 :]
    assert generate.main([*command, "--prompt", "Hi", "--tokens", "4"]) == 0
    # A talk by the defaults, which leave room in a context of 64.
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n"))
    assert generate.main(command) == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n"))
    assert generate.main([*command, "--tokens", "64"]) == 2
    assert "--tokens 64 leaves no room in a context of 64; give fewer" in capfd.readouterr().err
