"""Studies: what is planned, what is refused, what is resumed, and one from beginning to end."""

import json
from types import SimpleNamespace

import pytest
import yaml
from tiny import QUICK, assignments

from jaxtrain.cli import main
from jaxtrain.config import save_yaml
from jaxtrain.config.resolve import resolve, vocab_size_of
from jaxtrain.model import Transformer, flops_per_token, split
from jaxtrain.runs.history import read_rows
from jaxtrain.scaling import command, laws
from jaxtrain.scaling.laws import Bootstrap
from jaxtrain.scaling.plan import Planner, check_data, last_overrides, plan_text, rate_overrides
from jaxtrain.scaling.points import has_ended, point_of
from jaxtrain.scaling.record import write_prediction
from jaxtrain.scaling.study import ModelSize, load_study
from jaxtrain.settings import UserError

SIZES = [{"depth": 1, "width": 8}, {"depth": 1, "width": 16}, {"depth": 2, "width": 16}]
TREE = {
    "directory": "runs",
    "config": "quickstart",
    "overrides": [
        "data.tokenizer={name: bytes}", "model.head_dim=8", "train.sequence_length=16",
        "train.batch_size=8", "eval.batch_size=64", "data.validation.fraction=0.002",
    ],
    "least_steps": 4,
    "intervals": {"samples": 10},
}  # fmt: skip
ISO = {"isoflop": {"budgets": [1e8, 2e8], "sizes": SIZES}}
LINE = {
    "isoflop": {"budgets": [1e8, 2e8], "sizes": [{"depth": 1, "width": w} for w in (8, 16, 24)]},
    "held_out": {"size": {"depth": 1, "width": 32}, "flops": 6e8},
}
HELD_OUT = {"held_out": {"size": {"depth": 2, "width": 24}, "flops": 6e8}}


def write(folder, **fields):
    """The file of a study."""
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(TREE | {"directory": str(folder)} | fields))
    return path


def planner_of(folder, **fields):
    return Planner(load_study(write(folder, **fields)))


# ---- what is planned ---------------------------------------------------------------------------


def test_runs_of_a_budget_cost_it_within_a_percent_by_the_models_own_flops(tmp_path):
    iso = {"budgets": [4e9, 2e10], "sizes": [{"depth": 2}, *SIZES]}
    planner = planner_of(tmp_path, isoflop=iso)
    runs = planner.runs()
    assert len(runs) == 8
    for run in runs[:3] + runs[5:]:
        config = planner.config(run)
        c = resolve(config, vocab_size_of(config.data))
        specs = split(Transformer(c.model, 257))[1]
        t = c.train
        tokens = t.steps * t.batch_size * t.sequence_length
        flops = tokens * flops_per_token(c.model, specs, t.sequence_length)
        assert run.tokens == tokens and run.flops == pytest.approx(flops)
        if t.steps > 50:
            assert flops == pytest.approx(run.budget, rel=0.01)
    assert all(r.flops == pytest.approx(r.budget, rel=0.01) for r in runs if r.steps > 50)


def test_parameters_are_counted_as_asked(tmp_path):
    counts = planner_of(tmp_path, **ISO).resolved(ModelSize(depth=1, width=16))[1].parameters
    assert counts["matrices"] == 12 * 16**2
    assert counts["matrices_and_head"] == 12 * 16**2 + 16 * 320  # the vocabulary in multiples of 64
    assert counts["total"] > counts["without_embeddings"] > counts["matrices_and_head"]
    assert counts["total"] - counts["without_embeddings"] == 320 * 16


def test_a_run_that_serves_two_fits_is_there_once(tmp_path):
    rates = {"sizes": SIZES[:1], "flops": 1e8, "multipliers": [0.5, 1, 2]}
    runs = planner_of(tmp_path, **ISO, learning_rates=rates).runs()
    assert len(runs) == 8 and len({run.name for run in runs}) == 8
    assert runs[0].kinds == ("isoflop", "learning_rates") and runs[0].budget == 1e8


def test_batch_runs_scale_the_rates_of_the_first(tmp_path):
    batch = {"size": SIZES[0], "tokens": [4096], "batch_sizes": [8, 16, 32], "evaluations": 4}
    planner = planner_of(tmp_path, batch_sizes=batch)
    runs = planner.runs()
    assert [(r.batch_size, r.steps, r.tokens) for r in runs] == [
        (8, 32, 4096), (16, 16, 4096), (32, 8, 4096)
    ]  # fmt: skip
    rates = [planner.config(run).optim.model_dump()["matrix_lr"] for run in runs]
    assert rates == pytest.approx([0.04, 0.04 * 2**0.5, 0.08], rel=1e-5)
    assert [planner.config(run).eval.every for run in runs] == [8, 4, 2]


def test_a_multiplier_is_of_every_learning_rate(tmp_path):
    c = planner_of(tmp_path, **ISO).resolved(ModelSize(depth=1, width=8))[0]
    lines = rate_overrides(c, 2.0)
    names = {line.partition("=")[0] for line in lines}
    assert {"optim.matrix_lr", "optim.embedding_lr", "optim.head_lr"} <= names
    assert "optim.matrix_lr=0.08" in lines
    assert last_overrides(["a=1", "b=2", "a=3"]) == ["a=3", "b=2"]


def test_the_plan_of_the_longest_shipped_name_fits_80_columns_and_groups_runs_by_use(tmp_path):
    planner = planner_of(tmp_path, **ISO)
    run = planner.runs()[0]._replace(parameters=22_528, tokens=2_170_368, flops=1.2e12)
    long = run._replace(name="d1_w32_b2_t1172_m0.707107_batch_sizes_s42", kinds=("a", "b"))
    lines = plan_text(planner.study, [run, long, run._replace(name="x")], {"x"}).splitlines()
    assert max(map(len, lines)) <= 80 and lines[2:5:2] == ["isoflop:", "a, b:"]
    assert lines[3].split() == [run.name, "22,528", "2,170,368", "96.34", "1.2e+12"]
    assert len(lines[1]) == len(lines[3]) == len(lines[5])  # columns are aligned
    assert lines[6] == "done:" and lines[8].startswith("2 of 3 runs are missing")


# ---- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "a study has runs: set isoflop, tokens, learning_rates or batch_sizes"),
        (ISO | {"budget": 3}, "budget: no such field; there are name, directory"),
        ({"isoflop": {"budgets": [1e8], "size": SIZES}}, "no such field; there are budgets, sizes"),
        (ISO | {"held_out": {"size": SIZES[0]}}, "set one of flops, tokens and tokens_per_param"),
        ({"isoflop": {"budgets": [0], "sizes": SIZES}}, "isoflop.budgets.0: input should be great"),
    ],
)
def test_a_study_that_cannot_be_is_one_line(tmp_path, fields, message, capsys):
    assert main(["scaling", "plan", str(write(tmp_path, **fields))]) == 2
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err


def test_a_budget_that_a_size_cannot_train_in_is_refused(tmp_path):
    tree = {"isoflop": {"budgets": [1e7], "sizes": SIZES[2:]}}
    with pytest.raises(
        UserError, match="budget 1e.07 FLOPs at depth 2, width 16 are 1 steps of 128"
    ):
        planner_of(tmp_path, **tree).runs()


def test_more_tokens_than_the_data_hold_are_refused(tmp_path):
    planner = planner_of(tmp_path, **ISO)
    runs = planner.runs()
    longest = max(run.tokens for run in runs)
    check_data(planner.study, runs, longest)
    with pytest.raises(UserError, match=rf"trains on {longest:,} tokens.*set most_epochs=2"):
        check_data(planner.study, runs, longest - 1)


def test_a_prediction_comes_before_its_run_and_the_run_is_larger(tmp_path):
    planner = planner_of(tmp_path, **ISO, **HELD_OUT)
    held_out = planner.held_out()
    assert held_out is not None
    (tmp_path / held_out.name).mkdir()
    (tmp_path / held_out.name / "metrics.jsonl").touch()
    with pytest.raises(UserError, match="has begun and there is no prediction.json"):
        write_prediction(tmp_path / "prediction.json", held_out, [], Bootstrap())


# ---- runs --------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def few_starts():
    """Of a fit: what is fitted here is not looked at for its quality."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(laws, "STARTS", 2)
        yield


def record_like(first, config):
    """The directory of a finished run, without its training: the rows of the first run, and at its
    end a loss that falls with width and steps."""
    c = resolve(config, vocab_size_of(config.data))
    folder, steps = c.run.folder / c.run.name, c.train.steps
    folder.mkdir()
    save_yaml(folder / "config.yaml", c)
    rows = read_rows(first / "metrics.jsonl")
    ends = [row for row in rows if row["kind"] == "validation"]
    for row in [row for row in rows if row not in ends[:-1]]:
        if "total_steps" in row:
            row["total_steps"] = steps
        if row["kind"] == "validation":
            row |= {"step": steps, "loss": row["loss"] * (1 + 1 / c.model.width + 4 / steps)}
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
    return SimpleNamespace(stopped=False)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A finished study with a prediction; the order in which its runs were trained. The first
    of them and the held-out one are really trained: a run takes five seconds."""
    folder, trained = tmp_path_factory.mktemp("study"), []
    fields = {"overrides": [*TREE["overrides"], *assignments(**QUICK)]}
    path, train = write(folder, **LINE, **fields), command.train
    with pytest.MonkeyPatch.context() as patch:

        def stopping(config):
            trained.append(config.run.name)
            if len(trained) == 3:
                raise KeyboardInterrupt
            if len(trained) == 1 or config.model.width == 32:
                return train(config)
            return record_like(folder / "tiny" / trained[0], config)

        patch.setattr(command, "train", stopping)
        with pytest.raises(KeyboardInterrupt):
            main(["scaling", "run", str(path)])
        assert main(["scaling", "run", str(path)]) == 0
    return folder / "tiny", path, trained


@pytest.mark.slow
def test_a_killed_study_goes_on_and_predicts_before_it_trains_the_held_out_run(study):
    folder, path, trained = study
    planner = Planner(load_study(path))
    last = planner.held_out()
    assert last is not None
    names = [run.name for run in planner.runs()]
    assert trained == [*names[:3], *names[2:], last.name]
    fit = json.loads((folder / "fit.json").read_text())
    prediction = json.loads((folder / "prediction.json").read_text())
    env = json.loads((folder / last.name / "env.json").read_text())
    assert prediction["when"] <= env["when"] and prediction["runs"] == names
    assert fit["held_out"]["inside"] in (True, False) and fit["missing_runs"] == []
    loss = read_rows(folder / last.name / "metrics.jsonl")[-2]["loss"]
    assert fit["held_out"]["loss"] == pytest.approx(loss)
    page = (folder / "scaling.html").read_text()
    assert "<svg" in page and "its loss" in page and "http" not in page


@pytest.mark.slow
def test_the_fits_of_a_study_and_of_its_run_directories_agree(study, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "Bootstrap", lambda *given: Bootstrap(*(given or (10,))))
    folder, path, trained = study
    before = (folder / "fit.json").read_text()
    assert main(["scaling", "run", str(path)]) == 0  # nothing is left to train
    again = (folder / "fit.json").read_text()
    strip = lambda text: {k: v for k, v in json.loads(text).items() if k not in ("when", "command")}
    assert strip(before) == strip(again)
    runs = [str(folder / name) for name in dict.fromkeys(trained[:-1])]
    assert main(["scaling", "fit", *runs, "--out", str(tmp_path)]) == 0
    ours, theirs = (json.loads((f / "fit.json").read_text()) for f in (folder, tmp_path))
    law = lambda tree: tree["fits"]["parametric"]["alpha"]["value"]
    assert law(ours) == pytest.approx(law(theirs), rel=0.05)
    assert main(["scaling", "fit", runs[0], "--out", str(tmp_path)]) == 2
    assert "too few runs for any fit" in capsys.readouterr().err


def test_a_run_that_has_not_ended_is_no_point(whole, tmp_path):
    assert has_ended(whole) and not has_ended(tmp_path)
    point = point_of(whole, "bpb", "total")
    assert (
        point.depth == 1 and point.width == 32 and point.loss > 1 and point.losses[-1] == point.loss
    )
    metrics = tmp_path / "metrics.jsonl"
    rows = (whole / "metrics.jsonl").read_text().splitlines()
    metrics.write_text("\n".join(rows[:-1]) + "\n")
    assert not has_ended(tmp_path)
    with pytest.raises(UserError, match="is not a finished run"):
        point_of(tmp_path, "loss", "total")
