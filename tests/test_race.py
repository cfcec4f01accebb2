"""Races: what is read from run directories, what is compared, and what is refused."""

import importlib
import json
import sys

import pytest
import yaml
from tiny import run_overrides

from benchmarks import race as module
from benchmarks import record as record_module
from benchmarks import tables
from benchmarks.race import best_of_arms, draw, race, settings_of
from jaxtrain.main import main as train
from jaxtrain.runs.compare import training_seconds
from jaxtrain.settings import UserError

main = importlib.import_module("benchmarks.__main__").main
TOKENS = 64 * 2048  # of a step
STEPS = 400


def make_run(directory, name, optim, bpbs, tokens_per_s=500_000.0, status="finished", **changes):
    """A run directory as training writes it: rows of ten steps, a validation every hundred."""
    run = directory / name
    run.mkdir(parents=True)
    config = {
        "run": {"name": name, "seed": 42},
        "model": {"depth": 12, "width": 768},
        "data": {"seed": 0, "cache_dir": str(run), "train": {"path": "corpus"}},
        "train": {"batch_size": 64, "sequence_length": 2048, "steps": STEPS},
        "optim": optim,
        "mesh": {"data": "auto"},
        "eval": {"every": 100, "tokens": None},
    }  # fmt: skip
    for key, value in changes.items():
        section, _, field = key.partition("__")
        config[section][field] = value
    env = {"device_kind": "NVIDIA H200", "device_count": 1, "versions": {"jax": "0.11.2"},
           "python": "3.12", "backend": "gpu", "commit": "abc", "when": "2026-01-01",
           "command": ["python", "-m", "jaxtrain.main", "--config", "configs/gpt_d12.yaml",
                       f"run.name={name}"]}  # fmt: skip
    row = lambda step, kind, **values: {"step": step, "kind": kind, "time": 9.0 * step, **values}
    rows = [row(0, "event", event="start"), row(1, "train", loss=10.0)]
    for i in range(10 * len(bpbs)):
        step = 10 * (i + 1)
        rows.append(row(step, "train", loss=9.0 - step / 100, tokens_per_s=tokens_per_s))
        if step % 100 == 0:
            bpb = bpbs[step // 100 - 1]
            rows.append(row(step, "validation", loss=2 * bpb if bpb else None, bpb=bpb))
    rows.append(row(10 * len(bpbs), "event", event="end", status=status))
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    (run / "env.json").write_text(json.dumps(env))
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return run


def adamw(rate):
    return {"name": "adamw", "learning_rate": rate, "weight_decay": 0.1}


def muon(**switches):
    return {"name": "muon", "matrix_lr": 0.01, "weight_decay": 0.28, **switches}


@pytest.fixture
def runs(tmp_path):
    make = lambda *args, **changes: make_run(tmp_path, *args, **changes)
    return [
        make("adamw_1e-3", adamw(0.001), [1.6, 1.4, 1.3, 1.2]),
        make("adamw_8e-3", adamw(0.008), [1.9, 1.5, 1.4, 1.3]),
        make("adamw_1", adamw(1.0), [2.0, None], status="failed: UserError: step 190: nan"),
        make("muon_full", muon(), [1.5, 1.25, 1.15, 1.1], 400_000.0),
        make("lion_2e-4", {"name": "lion", "learning_rate": 2e-4}, [1.7, 1.5, 1.4, 1.25]),
        make("muonplain_1", muon(normuon=False), [1.5, 1.3, 1.2, 1.12], 450_000.0),
    ]


def test_the_record_ranks_runs_and_says_where_each_meets_the_baseline(runs):
    result = race(runs)
    labels = ["muon_full", "muonplain_1", "adamw_1e-3", "lion_2e-4", "adamw_8e-3", "adamw_1"]
    assert [e["label"] for e in result["runs"]] == labels
    assert (result["bench"], result["config"], result["device"]) == (
        "race", "gpt_d12", "NVIDIA H200",
    )  # fmt: skip
    assert result["baseline"] == "adamw_1e-3" and result["commit"] == "abc"
    full, plain, base, lion, *_ = result["runs"]
    assert full["bpb"] == 1.1 and full["loss"] == 2.2 and full["tokens"] == STEPS * TOKENS
    # 1.25 at step 200 and 1.15 at 300: half way.
    step = 250 * TOKENS / 400_000
    assert full["to_baseline"] == {
        "steps": 250.0, "seconds": round(step, 3),
        "speedup_steps": 1.6, "speedup_seconds": pytest.approx(1.6 * 0.8, rel=1e-3),
    }  # fmt: skip
    assert plain["to_baseline"]["steps"] == 300.0
    assert base["to_baseline"]["speedup_steps"] == base["to_baseline"]["speedup_seconds"] == 1.0
    assert lion["to_baseline"] is None
    assert full["curve"][1] == [200, 200 * TOKENS, round(200 * TOKENS / 400_000, 3), 1.25]


def test_a_run_that_learns_its_text_by_heart_counts_at_its_lowest(tmp_path):
    make = lambda *args: make_run(tmp_path, *args)
    base = make("adamw_1e-3", adamw(0.001), [1.6, 1.4, 1.3, 1.35])
    (fast, slow) = race([base, make("muon_full", muon(), [1.5, 1.2, 1.3, 1.6])])["runs"]
    assert (fast["label"], fast["bpb"], fast["lowest"]) == ("muon_full", 1.6, 1.2)
    assert fast["to_baseline"]["steps"] == 166.7
    assert fast["to_baseline"]["speedup_steps"] == pytest.approx(300 / 166.667, rel=1e-3)
    assert slow["to_baseline"]["speedup_steps"] == 1.0


def test_a_run_that_broke_off_is_listed_without_a_result(runs):
    broken = race(runs)["runs"][-1]
    assert broken["bpb"] is None and broken["loss"] is None and broken["steps"] == 200
    assert broken["status"].startswith("failed") and len(broken["curve"]) == 1


def test_the_baseline_is_the_best_adamw_or_the_one_named(runs):
    assert race(runs[1:])["baseline"] == "adamw_8e-3"
    named = race(runs, "lion_2e-4")
    assert named["baseline"] == "lion_2e-4"
    assert named["runs"][0]["to_baseline"]["steps"] == 200.0  # its first point below is exact


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # 10 steps at 100 tokens/s with 10 tokens a step, then 10 at 50.
        ([(1, None), (11, 100.0), (21, 50.0)], [0.0, 0.1333, 1.1333, 3.1333]),
        # A resumed run: the first row after it covers one untimed step.
        ([(10, 100.0), (20, 100.0)], [0.0, 1.0, 2.0]),
    ],
)
def test_seconds_are_those_of_training(rows, expected):
    given = [
        {"step": step, "time": 1e6} | ({"tokens_per_s": rate} if rate else {})
        for step, rate in rows
    ]
    steps, seconds = training_seconds(given, 10)
    assert steps == [0, *(step for step, _ in rows)]
    assert seconds == pytest.approx(expected, abs=1e-3)


def test_training_curves_are_thinned_to_their_end(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_POINTS", 7)
    (only,) = race([make_run(tmp_path, "adamw_1", adamw(1e-3), [1.6, 1.4, 1.3, 1.2])])["runs"]
    assert len(only["train"]) == 7 and only["train"][-1] == [400, 5.0]


def test_settings_are_the_rates_and_what_is_not_the_default():
    given = {**adamw(0.001), "b2": 0.95, "schedule": {"name": "cosine", "final_fraction": 0.1}}
    assert settings_of(given) == {
        "learning_rate": 0.001, "weight_decay": 0.1,
        "schedule.name": "cosine", "schedule.final_fraction": 0.1,
    }  # fmt: skip
    assert settings_of(muon(normuon=False, cautious_decay=True)) == {
        "matrix_lr": 0.01, "weight_decay": 0.28, "normuon": False,
    }  # fmt: skip


def test_tables_show_the_best_of_each_arm_and_every_run(runs):
    result = race(runs) | {"file": "race.json"}
    marked = lambda name: f"<!-- table {name} gpt_d12 -->\n<!-- end -->"
    page = marked("race") + marked("race_runs")
    best, every = tables.render(page, [result]).split("<!-- end -->")[:2]
    assert best.count("race.json") == 4 and every.count("race.json") == 6
    rates = "matrix_lr 0.01, weight_decay 0.28"
    assert f"| muon_full | {rates} | 1.1000 | 1.1000 | 400,000 | 131 | 1.60 |" in best
    assert f"| muonplain_1 | {rates}, normuon False | 1.1200 | 1.1200 |" in best
    assert "| adamw_1e-3 (baseline) | learning_rate 0.001, weight_decay 0.1 | 1.2000 |" in best
    assert "| 1.2500 | 1.2500 | 500,000 | 105 | - | - |" in best  # Lion never gets there
    assert "adamw_8e-3" not in best and "| adamw_8e-3 |" in every
    assert "failed: UserError: step 190: nan (step 200)" in every


def test_the_figure_has_both_panels_and_the_best_in_its_legend(runs, tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(module.Figure, "savefig", lambda figure, path: drawn.update({path: figure}))
    result = race(runs)
    path = draw(result, tmp_path / "race.png")
    tokens, seconds = drawn[path].axes
    assert tokens.get_xlabel() and seconds.get_xlabel() and tokens.get_ylabel()
    labels = [text.get_text() for text in seconds.get_legend().get_texts()]
    assert labels == [f"{e['label']}: {e['lowest']:.4f}" for e in best_of_arms(result)]
    longest = max(line.get_xdata()[-1] for line in tokens.lines[:6])
    assert longest == pytest.approx(STEPS * TOKENS / 1e6)


def test_the_command_records_json_and_figure(runs, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["race", *map(str, runs), "--record", "--out", str(out)]) == 0
    text = (out / "race-gpt_d12-nvidia_h200.json").read_text()
    assert json.loads(text)["runs"][0]["label"] == "muon_full"
    assert "[400, 52428800, 131.072, 1.1]" in text  # a point is one line
    assert record_module.read_results(out)[0]["bench"] == "race"
    assert (out / "race-gpt_d12.png").read_bytes()[:4] == b"\x89PNG"
    assert "adamw_8e-3" in capsys.readouterr().out


@pytest.mark.slow
def test_a_real_run_can_race(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "jaxtrain.main"])
    given = run_overrides(tmp_path, run__name="adamw_3e-3", eval__every=2, eval__tokens="null")
    changes = ["optim.name=adamw", "optim.learning_rate=0.003"]
    assert train([*given, *changes]) == 0
    result = race([tmp_path / "adamw_3e-3"])
    assert result["config"] == "d1" and result["device_count"] == 8
    assert result["workload"] == {"batch_size": 8, "sequence_length": 32, "steps": 6}
    (run,) = result["runs"]
    assert [point[0] for point in run["curve"]] == [2, 4, 6] and run["status"] == "finished"
    assert 0 < run["curve"][0][2] < run["seconds"] and run["tokens"] == 6 * 8 * 32
    assert run["settings"]["learning_rate"] == 0.003
    assert run["to_baseline"]["speedup_seconds"] == 1.0


def other(tmp_path, **changes):
    return make_run(tmp_path, "other", adamw(0.1), [1.6, 1.4, 1.3, 1.2], **changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data__seed": 1}, "other has data.seed=1, but adamw_1e-3 has 0"),
        ({"train__steps": 500}, "other has train.steps=500"),
        ({"model__depth": 6}, "other has model.depth=6"),
        ({"eval__tokens": 1000}, "other has eval.tokens=1000"),
    ],
    ids=str,
)
def test_runs_that_differ_in_more_than_the_optimizer_are_refused(tmp_path, runs, change, message):
    with pytest.raises(UserError, match=message):
        race([runs[0], other(tmp_path, **change)])


def test_bad_input_is_one_line(tmp_path, runs, capsys):
    def error(*argv):
        assert main(["race", *map(str, argv)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "it has no config.yaml" in error(tmp_path / "nowhere")
    assert "name the run directories" in error()
    assert "given more than once" in error(runs[0], runs[0])
    assert "no finished run of AdamW; name one with --baseline (finished: muon_full)" in error(
        runs[3]
    )
    assert "no finished run called x" in error(runs[0], "--baseline", "x")
    (runs[0] / "metrics.jsonl").write_text("")
    assert "adamw_1e-3 has no validation" in error(runs[0])


def test_curves_of_runs_that_differ_in_more(tmp_path, monkeypatch):
    """Of kernels, say: the first run is the baseline, a run that stopped is drawn as well, and
    each has a colour of its own, whatever it is called."""
    muon = {"name": "muon", "matrix_lr": 0.01}
    xla = make_run(tmp_path, "d12_xla", muon, [2.0, 1.5, 1.2, 1.1])
    ours = make_run(tmp_path, "d12_ours", muon, [2.0, 1.5, 1.2], 1e6, "stopped", model__depth=11)
    with pytest.raises(UserError, match="model.depth=11.*--differ names a section"):
        race([xla, ours], "d12_xla")
    record = race([xla, ours], differ=["model"])
    assert (record["bench"], record["baseline"]) == ("curves", "d12_xla")
    drawn = []
    monkeypatch.setattr(module.Figure, "savefig", lambda figure, path: drawn.append(figure))
    draw(record, tmp_path / "curves.png")
    colours = [line.get_color() for line in drawn[0].axes[1].lines]
    assert len(set(colours[:2])) == 2


def test_what_replicas_send_is_kept(tmp_path):
    plain = make_run(tmp_path, "plain", muon(), [2.0, 1.5, 1.2, 1.1])
    replicas = make_run(
        tmp_path, "diloco", muon(), [2.0, 1.6, 1.3, 1.2], train__local_sgd={"every": 50}
    )
    rows = (replicas / "metrics.jsonl").read_text().splitlines()
    first = json.loads(rows[0]) | {"sent_bytes": 10.0, "sent_bytes_plain": 500.0}
    (replicas / "metrics.jsonl").write_text("\n".join([json.dumps(first), *rows[1:]]) + "\n")
    found = {e["label"]: e for e in race([plain, replicas], differ=["train"])["runs"]}
    assert (found["diloco"]["sent_bytes"], found["diloco"]["sent_bytes_plain"]) == (10.0, 500.0)
    assert "sent_bytes" not in found["plain"]
