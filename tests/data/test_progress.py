import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from jaxtrain.data.store.progress import described, show_progress
from jaxtrain.train.prepare import main


@pytest.fixture
def clock(monkeypatch):
    """The time, to be set; rich keeps its own."""
    now = SimpleNamespace(seconds=0.0)
    module = SimpleNamespace(monotonic=lambda: now.seconds)
    monkeypatch.setattr("jaxtrain.data.store.progress.time", module)
    return now


def test_a_file_gets_a_line_now_and_then(clock):
    file = io.StringIO()
    with show_progress(Console(file=file, width=120)) as progress:
        for done, clock.seconds in enumerate((0.0, 2.0, 11.0, 12.0)):
            progress("tokens", done * 10_000_000, 60_000_000)
    lines = ["prepare  tokens", "prepare  tokens 20 MB of 60 MB, 1.8 MB/s, 0:22 left"]
    assert file.getvalue().splitlines() == lines


def test_a_terminal_gets_a_bar(clock):
    file = io.StringIO()
    with show_progress(Console(file=file, force_terminal=True, width=120)) as progress:
        progress("tokens", 0, None)
        clock.seconds = 2.0
        progress("tokens", 30_000_000, 60_000_000)
    assert "30 MB of 60 MB, 15.0 MB/s, 0:02 left" in file.getvalue()


def test_what_is_known_is_said():
    assert described(0, None, 0, 0.0) == ""
    assert described(5_000_000, None, 5_000_000, 2.0) == "5 MB, 2.5 MB/s"
    # What an earlier attempt did is done, but says nothing about the speed.
    assert described(90_000_000, 100_000_000, 5_000_000, 1.0).endswith("5.0 MB/s, 0:02 left")


def test_the_command_prepares_and_says_what_there_is(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("some text\n" * 100)
    options = [f"data.train.path={tmp_path}/a.txt", "data.train.document=line"]
    options += ["data.tokenizer.name=bytes", f"data.cache_dir={tmp_path}/cache"]
    options += ["data.validation.name=none"]
    assert main(options) == 0
    out = capsys.readouterr().out
    assert "train        100 documents, 900 tokens, 1.00 bytes per token" in out
    assert "vocabulary   257 tokens" in out
    assert main([*options, f"data.train.path={tmp_path}/no.txt"]) == 2
    assert "no.txt" in capsys.readouterr().err
