"""Runs side by side: the figures, the settings that differ, the picture, and what is refused."""

import io
import json

import pytest
import yaml
from rich.console import Console

from jaxtrain.runs import compare as module
from jaxtrain.runs.compare import compare as compare_runs
from jaxtrain.runs.compare import draw, main, read_runs, tables_of
from jaxtrain.settings import UserError


def compare(run_dirs):
    return compare_runs(read_runs(run_dirs))


def make_run(folder, name, losses, rate=1000.0, lr=0.01, kind="validation", every=10, seed=1):
    """A run whose `losses` are at steps 10, 20, ...; a step is 100 tokens."""
    run = folder / name
    run.mkdir(parents=True)
    config = {
        "run": {"name": name, "directory": str(folder), "seed": seed},
        "train": {"batch_size": 10, "sequence_length": 10, "steps": every * len(losses)},
        "optim": {"name": "adamw", "learning_rate": lr},
    }
    row = lambda step, kind, **values: {"step": step, "kind": kind, "time": 9.0 * step, **values}
    rows = []
    for i, loss in enumerate(losses, 1):
        train = {"loss": loss if kind == "train" else 9.0, "tokens_per_s": rate}
        rows.append(row(every * i, "train", **train))
        if kind == "validation":
            rows.append(row(every * i, "validation", loss=2 * loss, bpb=loss))
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    (run / "env.json").write_text(json.dumps({"device_kind": "H200", "device_count": 1}))
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return run


def test_loss_at_equal_steps_and_seconds_to_equal_loss(tmp_path):
    slow = make_run(tmp_path, "slow", [3.0, 2.0, 1.0])
    fast = make_run(tmp_path, "fast", [2.0, 0.5], rate=2000.0, lr=0.02)
    found = compare([slow, fast])
    assert (found.measure, found.step, found.target) == ("validation bits per byte", 20, 1.0)
    a, b = found.runs
    assert (a.at_step, b.at_step) == (2.0, 0.5) and (a.lowest, b.lowest) == (1.0, 0.5)
    assert (a.tokens_per_s, b.tokens_per_s) == (1000.0, 2000.0)
    assert a.seconds == pytest.approx(3.0)  # 30 steps of 100 tokens, 1,000 a second
    assert b.seconds == pytest.approx((10 + 10 * 2 / 3) * 100 / 2000)
    assert b.speedup == pytest.approx(3.0 / b.seconds)
    assert found.differences == {"train.steps": [30, 20], "optim.learning_rate": [0.01, 0.02]}


def test_runs_without_validation_are_compared_by_smoothed_training_loss(tmp_path):
    first = make_run(tmp_path, "a", [5.0 - 0.01 * i for i in range(200)], kind="train", every=1)
    found = compare([first, make_run(tmp_path, "b", [4.0, 3.0])])
    assert found.measure.startswith("training loss")
    assert len(found.curves["a"].steps) == 10 and found.curves["a"].steps[0] == 20
    assert found.curves["a"].losses[0] == pytest.approx(5.0 - 0.01 * 9.5)  # the mean of 20
    assert found.runs[1].lowest == 9.0 and found.runs[1].speedup is not None


def test_a_run_has_no_figure_before_its_first_point(tmp_path):
    late = make_run(tmp_path, "late", [2.0], every=50)
    early = make_run(tmp_path, "early", [3.0, 1.0])
    found = compare([late, early])
    assert found.step == 20 and found.runs[0].at_step is None


def test_runs_of_one_name_are_told_by_their_folders(tmp_path):
    runs = [make_run(tmp_path / x, "run", [2.0, 1.0]) for x in "ab"]
    assert list(compare(runs).curves) == list(map(str, runs))


def test_runs_of_two_seeds_differ_by_the_seed_and_not_by_their_folders(tmp_path):
    runs = [make_run(tmp_path / str(seed), "run", [2.0, 1.0], seed=seed) for seed in (1, 2)]
    assert compare(runs).differences == {"run.seed": [1, 2]}


def test_what_cannot_be_compared_is_refused(tmp_path):
    run = make_run(tmp_path, "a", [2.0])
    empty = make_run(tmp_path, "empty", [])
    with pytest.raises(UserError, match="two runs or more"):
        compare([run])
    with pytest.raises(UserError, match="is not a run directory: it has no config.yaml"):
        compare([run, tmp_path])
    with pytest.raises(UserError, match="no loss in common yet"):
        compare([run, empty])


def test_the_command_prints_a_table_and_draws(tmp_path, capsys, monkeypatch):
    runs = [make_run(tmp_path, "a", [3.0, 2.0]), make_run(tmp_path, "b", [2.5, 1.5], lr=0.1)]
    drawn = []
    monkeypatch.setattr(module, "draw", lambda c, path: drawn.append(draw(c, path)) or drawn[-1])
    picture = tmp_path / "out" / "c.png"
    assert main([*map(str, runs), "--plot", str(picture)]) == 0
    page = capsys.readouterr().out
    assert "at step" in page and "2.0000" in page and "optim.learning_rate" in page
    assert drawn == [picture] and picture.read_bytes().startswith(b"\x89PNG")


def test_tables_of_80_columns_fold_no_name_and_no_head(tmp_path):
    names = ("gpt_d12_speedrun_1", "gpt_d12_speedrun_2")
    losses = [3.0 - i / 1e3 for i in range(120)]
    runs = [make_run(tmp_path, name, losses, rate=1_234_567.0) for name in names]
    for run, digit in zip(runs, "ab"):
        facts = {"device_kind": "NVIDIA H100 80GB HBM3", "device_count": 8, "commit": digit * 40}
        (run / "env.json").write_text(json.dumps(facts))
    console = Console(width=80, record=True, file=io.StringIO())
    found = compare(runs)
    found = found._replace(runs=[run._replace(goodput=0.95) for run in found.runs])
    for table in tables_of(found):
        console.print(table)
    lines = console.export_text().splitlines()
    page = "\n".join(lines[1:3])
    heads = "steps", "tokens/s", "goodput", "lowest", "at step", "seconds", "speed-up"
    assert all(head in page for head in heads)
    assert "8 x NVIDIA H100 80GB HBM3" in lines[0]
    assert [line.split()[0] for line in lines[3:5]] == list(names)
    assert lines[-1].split() == ["env.commit", "a" * 7, "b" * 7]
