"""What carries over to another size: which runs, their gains over the baseline, the rank."""

import json
import math
from pathlib import Path

import pytest
from sweep_cases import ADAMW, RATE, TWO, bowl, no_runs, open_sweep, write_sweep

from jaxtrain.settings import UserError
from jaxtrain.sweep import transfer, work
from jaxtrain.sweep.command import main
from jaxtrain.sweep.config import Transfer
from jaxtrain.sweep.finish import sweep_tables
from jaxtrain.sweep.load import load_sweep
from jaxtrain.sweep.report import write_sweep_report
from jaxtrain.sweep.results import as_json, results_of
from jaxtrain.sweep.transfer import TransferRun, chosen_ranks, title_of, transfer_runs, transferred

SHIPPED = sorted((Path(__file__).parents[2] / "configs" / "sweeps").glob("*.yaml"))
LARGER = ["model.width=64"]


def test_the_best_are_chosen_and_others_evenly_down_to_the_last():
    t = Transfer(overrides=("model.depth=2",), best=2, spread=3)
    assert chosen_ranks(t, 11) == [0, 1, 5, 7, 10]
    assert chosen_ranks(t, 2) == [0, 1] and chosen_ranks(t, 1) == [0]
    assert chosen_ranks(t.model_copy(update={"spread": 0}), 9) == [0, 1]


def test_each_is_trained_at_both_sizes_on_the_same_fresh_seeds(tmp_path):
    c = load_sweep(write_sweep(tmp_path, parameters=TWO, transfer={"overrides": LARGER, "best": 1}))
    runs = transfer_runs(c, [2, 0, 1])
    assert {run.seed for run in runs} == {2, 3} and len(set(runs)) == len(runs)
    own, other = ({r._replace(size="") for r in runs if r.size == s} for s in transfer.SIZES)
    assert own == other
    assert {(r.of, r.only) for r in own} == {
        (None, None), (2, None), (0, None), (1, None), (2, "optim.matrix_lr"),
        (2, "optim.weight_decay"),
    }  # fmt: skip


def test_gains_are_paired_with_the_baseline_of_the_same_size_and_seed(tmp_path):
    """A rank that holds is 1, one that is turned around -1."""
    path = write_sweep(tmp_path, transfer={"overrides": LARGER, "best": 4, "spread": 0})
    c = load_sweep(path)
    ranked, base = [3, 1, 0, 2], {2: 5.0, 3: 7.0}

    def scores(sign):
        found = {}
        for run in transfer_runs(c, ranked):
            gain = 0.0 if run.of is None else ranked.index(run.of) - 2.0
            size = 10.0 if run.size == "other" else 0.0
            found[run] = base[run.seed] + size + (gain if run.size == "own" else sign * gain)
        return found

    rows, rank = transferred(c, ranked, scores(1))
    assert rank == pytest.approx(1) and [(r.of, r.rank) for r in rows] == [
        *zip(ranked, range(1, 5))
    ]
    assert [r.own.mean for r in rows] == pytest.approx([-2, -1, 0, 1])
    assert rows[0].other.mean == pytest.approx(-2) and rows[0].other.half == pytest.approx(0)
    assert transferred(c, ranked, scores(-1)).rank_correlation == pytest.approx(-1)
    half = {run: score for run, score in scores(1).items() if run.size == "own"}
    rows, rank = transferred(c, ranked, half)
    assert rank is None and rows[0].other is None and rows[0].own is not None


@pytest.mark.slow
def test_a_sweep_ends_with_both_sizes_in_its_report(tmp_path, monkeypatch):
    """The larger model wants a tenth of the rate: what is best here is not best there."""
    no_runs(monkeypatch)
    seen = []

    def run_one(c, values, name, seed, prune=None, larger=()):
        seen.append((name, tuple(larger)))
        rate = values.get("optim.matrix_lr", 0.02)
        return bowl({"optim.matrix_lr": rate * 10 if larger else rate}, seed)

    monkeypatch.setattr(transfer, "run_one", run_one)
    path = write_sweep(tmp_path, parameters=TWO, trials=6,
                       transfer={"overrides": LARGER, "best": 2, "spread": 2})  # fmt: skip
    c, queues = open_sweep(path)
    work.work(c, queues)
    found = results_of(*queues)
    queues.close()
    assert ("transfer-other-baseline-seed2", tuple(LARGER)) in seen
    assert ("transfer-own-baseline-seed2", ()) in seen
    assert found.transferred is not None and found.transferred.rank_correlation is not None
    first = found.transferred.rows[0]
    best = next(row for row in found.trials if row.number == first.of)
    rate = math.log10(best.values["optim.matrix_lr"])
    assert first.own.mean == pytest.approx((rate + 2) ** 2 - math.log10(2) ** 2)
    assert first.other.mean == pytest.approx((rate + 3) ** 2 - math.log10(20) ** 2)
    text = json.loads(json.dumps(as_json(found)))["transferred"]
    assert text["rows"][0]["own"]["mean"] == pytest.approx(first.own.mean)
    page = write_sweep_report(found).read_text()
    assert "carries over to another size" in page and "<code>model.width=64</code>" in page
    assert f"trial {first.of}, optim.matrix_lr alone" in page
    assert any("rank correlation" in str(table.title) for table in sweep_tables(found))
    assert title_of(None, None) == "baseline"


def test_overrides_of_the_other_size_are_checked_before_anything_runs(tmp_path, capsys):
    path = write_sweep(tmp_path, transfer={"overrides": ["model.widht=64"]})
    assert main([str(path)]) == 2
    assert "model.widht" in capsys.readouterr().err and not (tmp_path / "runs").exists()
    path = write_sweep(tmp_path, transfer={"overrides": ["optim.matrix_lr=0.1"]})
    with pytest.raises(UserError, match="overrides also sets it"):
        load_sweep(path)
    goals = [{"metric": "bpb"}, {"metric": "seconds"}]
    with pytest.raises(UserError, match="transfer: it needs one objective"):
        load_sweep(write_sweep(tmp_path, objectives=goals, transfer={"overrides": LARGER}))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_sweep_is_sound(path):
    assert load_sweep(path, ["data.train.path=corpus"]).trials


def test_a_run_knows_itself_by_its_notes():
    run = TransferRun(3, "optim.matrix_lr", "other", 2)
    assert transfer.transfer_run_of(run._asdict() | {"attempts": 1, "worker": {}}) == run
    assert transfer.run_title(run) == "trial 3, optim.matrix_lr alone at the other size, seed 2"


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_real_runs_of_both_sizes(tmp_path, monkeypatch):
    """Of the first of two seeds."""
    train = transfer.run_one

    def run_one(c, values, name, seed, prune=None, larger=()):
        return train(c, values, name, seed, prune, larger) if seed == 2 else bowl(values, seed)

    monkeypatch.setattr(transfer, "run_one", run_one)
    both = {"overrides": LARGER, "best": 1, "spread": 0, "single": False}
    path = write_sweep(tmp_path, trials=1, parameters=RATE, transfer=both)
    assert main([str(path), "train.steps=2", ADAMW]) == 0
    folder = tmp_path / "runs" / "lr"
    found = json.loads((folder / "results.json").read_text())["transferred"]
    [row] = found["rows"]
    assert math.isfinite(row["own"]["mean"]) and math.isfinite(row["other"]["mean"])
    width = lambda name: (folder / name / "config.yaml").read_text()
    assert "width: 64" in width("transfer-other-baseline-seed2")
    assert "width: 64" not in width("transfer-own-baseline-seed2")
