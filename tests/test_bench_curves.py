"""The picture of several records of curves."""

import importlib
import json

import pytest

from benchmarks import curves

command = importlib.import_module("benchmarks.__main__")


def entry(label, seconds, losses, **more):
    points = [[100 * i, 1000 * i, seconds * i, bpb] for i, bpb in enumerate(losses, 1)]
    ends = {"label": label, "bpb": losses[-1], "lowest": min(losses), "optimizer": "muon"}
    return ends | {"tokens": points[-1][1], "curve": points} | more


OURS = entry("gpt_d12_speedrun", 10.0, [1.5, 1.3, 1.1], peak_bytes=5 * 2**30)
NANOCHAT = entry("nanochat", 20.0, [1.6, 1.4, 1.2], peak_bytes=2**31, peer="nanochat")
TRAINER = entry("trainer", 15.0, [1.7, 1.6, 1.5], peer="huggingface")


@pytest.fixture
def records(tmp_path):
    def write(name, *runs, device="NVIDIA H200"):
        record = {"bench": "curves", "config": "gpt_d12", "device": device, "device_count": 1}
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(record | {"baseline": runs[0]["label"], "runs": runs}))
        return str(path)

    return write


def test_the_picture_says_seconds_and_memory_to_the_baselines_loss(records, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(curves.Figure, "savefig", lambda figure, path: drawn.append((figure, path)))
    theirs, ours = records("beside", NANOCHAT, TRAINER), records("ours", OURS)
    assert command.main(["curves", theirs, ours, "--out", str(tmp_path)]) == 0
    ((figure, path),) = drawn
    assert path == tmp_path / "peers-gpt_d12.png"
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "gpt d12 speedrun: 25 s, 5.0 GiB",  # 1.2 lies between 1.3 after 20 s and 1.1 after 30 s
        "nanochat: 60 s, 2.0 GiB",
        "trainer: ends at 1.500",
    ]
    styles = {line.get_label().split(":")[0]: line.get_linestyle() for line in axes.lines}
    assert (styles["nanochat"], styles["gpt d12 speedrun"]) == ("--", "-")


def test_bad_input_is_one_line(records, tmp_path, capsys):
    def error(*argv):
        assert command.main(["curves", *argv, "--out", str(tmp_path / "out")]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    ours, other = records("ours", OURS), records("other", NANOCHAT, device="cpu")
    assert "name the records" in error()
    assert "there is no record nowhere" in error("nowhere")
    assert "has device cpu, but" in error(ours, other)
    assert "gpt_d12_speedrun is in two records" in error(ours, ours)
    assert "no finished run called x" in error(ours, "--baseline", "x")
    (tmp_path / "ours.json").write_text('{"bench": "step"}')
    assert "no record of `race`" in error(ours)
    assert not (tmp_path / "out").exists()
