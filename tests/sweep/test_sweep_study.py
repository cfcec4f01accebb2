"""The queue of trials: a grid covers all, a sweep goes on, joins, gives back and refuses."""

import time

import pytest
from sweep_cases import TWO, bowl, no_runs, open_sweep, rows_now, swept, write_sweep

from jaxtrain.runs.lock import InUseError, myself
from jaxtrain.settings import UserError
from jaxtrain.sweep import study, work
from jaxtrain.sweep.command import main
from jaxtrain.sweep.config import IntRange, LogUniform
from jaxtrain.sweep.load import grid_points, load_sweep
from jaxtrain.sweep.report import write_sweep_report
from jaxtrain.sweep.study import MOST_ATTEMPTS, make_sampler
from jaxtrain.sweep.trials import Failed, Pruned

GRID = {
    "optim.matrix_lr": {"name": "log_uniform", "low": 0.001, "high": 0.1, "points": 3},
    "train.max_consecutive_skips": {"name": "int", "low": 1, "high": 3, "step": 2},
    "model.ffn": {"name": "choice", "values": ["relu2", "swiglu"]},
}


@pytest.mark.slow
def test_a_grid_has_a_trial_for_each_combination(tmp_path, monkeypatch):
    no_runs(monkeypatch)
    path = write_sweep(tmp_path, parameters=GRID, sampler={"name": "grid"}, trials=None)
    found = swept(path)
    points = {tuple(row.values[key] for key in GRID) for row in found.trials}
    rates = {0.001, 0.01, 0.1}
    assert points == {(lr, d, f) for lr in rates for d in (1, 3) for f in ("relu2", "swiglu")}
    assert len(found.trials) == 12
    best = found.trials[found.front[0]]
    assert best.values["optim.matrix_lr"] == 0.01


@pytest.mark.slow
def test_a_sweep_goes_on_where_it_was_and_draws_the_same(tmp_path, monkeypatch):
    seen = no_runs(monkeypatch)
    path = write_sweep(tmp_path, trials=4)
    c, queues = open_sweep(path)
    assert work.work(c, queues, once=True)
    assert seen == [0] and [row.state for row in rows_now(queues)][:2] == ["finished", "waiting"]
    queues.close()
    found = swept(path)
    assert seen == [0, 1, 2, 3]
    assert swept(path) == found and seen == [0, 1, 2, 3]
    whole = swept(write_sweep(tmp_path, trials=4, name="whole"))
    assert [row.values for row in whole.trials] == [row.values for row in found.trials]
    assert len({row.values["optim.matrix_lr"] for row in found.trials}) == 4
    more = swept(path, "trials=5")
    assert len(more.trials) == 5 and more.trials[:4] == found.trials


def test_two_workers_of_a_study_never_have_the_same_trial(tmp_path):
    path = write_sweep(tmp_path, trials=3)
    _, ours = open_sweep(path)
    _, theirs = open_sweep(path)
    claimed = [queue.search.claim() for queue in (ours, theirs, ours, theirs)]
    assert [trial and trial.number for trial in claimed] == [0, 1, 2, None]
    assert len({trial.params["optim.matrix_lr"] for trial in claimed[:3]}) == 3
    ours.close()
    theirs.close()


def test_a_trial_without_a_sign_of_life_is_queued_again_with_its_values(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "known_gone", lambda holder: None)  # as on another machine
    _, queues = open_sweep(write_sweep(tmp_path, trials=1, heartbeat=0.5))
    lost = queues.search.claim()
    assert queues.search.claim() is None
    time.sleep(4)  # the database counts whole seconds
    again = queues.search.claim()
    assert (again.number, again.params) == (lost.number, lost.params)
    assert again.user_attrs["attempts"] == 2
    queues.close()


@pytest.mark.slow
def test_a_trial_that_gives_signs_of_life_is_nobody_elses(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "known_gone", lambda holder: None)
    _, queues = open_sweep(write_sweep(tmp_path, trials=1, heartbeat=0.5))
    with queues.search.heartbeat(queues.search.claim()):
        time.sleep(4)
        assert queues.search.claim() is None
    queues.close()


@pytest.mark.slow
def test_a_worker_of_this_machine_is_lost_when_it_is_gone_and_not_before(tmp_path):
    _, queues = open_sweep(write_sweep(tmp_path, trials=1, heartbeat=0.1))
    lost = queues.search.claim()
    time.sleep(3)  # silent, as where the machine is busy
    assert queues.search.claim() is None
    lost.set_user_attr("worker", lost.user_attrs["worker"] | {"pid": 2**22 + 1})  # there is none
    assert queues.search.claim().number == 0
    queues.close()


def test_a_trial_taken_for_lost_still_ends_once(tmp_path, monkeypatch):
    """Its worker, which was silent for long, ends it; the other one leaves it alone."""
    seen, path = no_runs(monkeypatch), write_sweep(tmp_path, trials=1)
    c, queues = open_sweep(path)
    mine = queues.search.claim()
    queues.search.give_back(mine)
    work.record(c, queues.search, mine, {1: {"bpb": 1.5}})
    assert rows_now(queues)[0].scores == (1.5,) and not work.work(c, queues) and seen == []
    work.record(c, queues.search, mine, {1: {"bpb": 2.5}})  # too late
    assert rows_now(queues)[0].scores == (1.5,)
    queues.close()


def test_a_run_that_another_process_holds_is_left_to_it(tmp_path, monkeypatch):
    path = write_sweep(tmp_path, trials=2)
    c, queues = open_sweep(path)
    other = myself(100.0)._replace(token="other")

    def blocked(c, values, number, prune=None):
        if number == 0:
            raise InUseError("in use by process 7", other)
        return {1: {"bpb": 1.0}}

    monkeypatch.setattr(work, "run_trial", blocked)
    monkeypatch.setattr(work, "LOOK", 0)
    assert work.work(c, queues, once=True)
    assert [row.state for row in rows_now(queues)] == ["running", "finished"]
    assert queues.search.trials()[0].user_attrs["worker"]["token"] == "other"
    queues.close()


def test_a_trial_that_kills_its_workers_fails_in_the_end(tmp_path, monkeypatch):
    no_runs(monkeypatch)
    path = write_sweep(tmp_path, trials=1)
    c, queues = open_sweep(path)
    for _ in range(MOST_ATTEMPTS):
        queues.search.give_back(queues.search.claim())
    work.work(c, queues)
    [row] = rows_now(queues)
    assert row.state == "failed" and "died 3 times" in row.note
    queues.close()


def test_an_interrupted_trial_is_queued_again_and_costs_no_attempt(tmp_path, monkeypatch):
    def interrupted(values, seed):
        raise KeyboardInterrupt

    no_runs(monkeypatch, interrupted)
    path = write_sweep(tmp_path, trials=2)
    c, queues = open_sweep(path)
    with pytest.raises(KeyboardInterrupt):
        work.work(c, queues)
    assert [row.state for row in rows_now(queues)] == ["waiting", "waiting"]
    assert queues.search.claim().user_attrs["attempts"] == 1
    queues.close()


def test_what_diverges_is_the_worst_with_its_reason_and_the_sweep_goes_on(tmp_path, monkeypatch):
    seen = []

    def second_fails(values, seed):
        seen.append(values)
        return Failed("step 3: the loss is nan") if len(seen) == 2 else bowl(values, seed)

    no_runs(monkeypatch, second_fails)
    found = swept(write_sweep(tmp_path, trials=4, sampler={"name": "tpe", "startup_trials": 1}))
    assert [row.state for row in found.trials] == ["finished", "failed", "finished", "finished"]
    assert found.trials[1].note == "step 3: the loss is nan" and found.trials[1].scores == ()
    assert found.front[0] != 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["random", "tpe", "cmaes"])
def test_samplers_learn_or_draw_and_say_so(name, tmp_path, monkeypatch):
    no_runs(monkeypatch)
    sampler = {"name": name} | ({"startup_trials": 4} if name == "tpe" else {})
    c = load_sweep(write_sweep(tmp_path, sampler=sampler, trials=16, parameters=TWO))
    assert type(make_sampler(c, 0)).__name__.lower().startswith(name[:3])
    found = swept(tmp_path / "lr.yaml")
    scores = [row.scores[0] for row in found.trials]
    assert len(set(scores)) == 16 and min(scores) < 0.2
    assert set(found.importance) == set(TWO) and sum(found.importance.values()) == pytest.approx(1)


PRUNERS = {
    "asha": {"name": "asha", "min_steps": 2, "reduction_factor": 2},
    "hyperband": {"name": "hyperband", "min_steps": 2, "max_steps": 8, "reduction_factor": 2},
    "median": {"name": "median", "startup_trials": 2},
}


@pytest.mark.quick("asha")
@pytest.mark.parametrize("name", PRUNERS)
def test_a_pruner_stops_bad_trials_and_never_the_best(name, tmp_path, monkeypatch):
    def run_trial(c, values, number, prune):
        for step in (2, 4, 8):
            score = bowl(values, 1)["bpb"] + 1 / step
            if step < 8 and prune(step, {"bpb": score}):
                return Pruned(step)
        return {1: {"bpb": score}}

    monkeypatch.setattr(work, "run_trial", run_trial)
    path = write_sweep(tmp_path, pruner=PRUNERS[name], trials=10)
    found = swept(path, "eval.every=2")
    pruned = [row for row in found.trials if row.state == "pruned"]
    scores = {row.number: bowl(row.values, 1)["bpb"] for row in found.trials}
    assert 2 <= len(pruned) < 10 and {row.note for row in pruned} <= {
        "pruned at step 2", "pruned at step 4",
    }  # fmt: skip
    assert found.front == [min(scores, key=scores.__getitem__)]


@pytest.mark.quick("nsga2")
@pytest.mark.parametrize("name", ["nsga2", "tpe"])
def test_several_objectives_have_a_pareto_front(name, tmp_path, monkeypatch):
    no_runs(monkeypatch)
    sampler = {"name": name} | ({"population_size": 4} if name == "nsga2" else {})
    goals = [{"metric": "bpb"}, {"metric": "seconds"}]
    found = swept(write_sweep(tmp_path, trials=10, objectives=goals, sampler=sampler))
    scores = {row.number: row.scores for row in found.trials}
    below = lambda a, b: a != b and all(x <= y for x, y in zip(a, b))
    best = [n for n, s in scores.items() if not any(below(t, s) for t in scores.values())]
    assert sorted(found.front) == best and 1 < len(best) < 10
    assert "Pareto front in orange" in write_sweep_report(found).read_text()


def test_points_of_a_grid_are_in_order_and_end_at_the_ends():
    lr = LogUniform.model_validate({"low": 0.001, "high": 0.1, "points": 3})
    depth = IntRange.model_validate({"low": 1, "high": 3, "step": 2})
    points = grid_points({"optim.matrix_lr": lr, "model.depth": depth})
    assert [point["optim.matrix_lr"] for point in points] == [0.001, 0.001, 0.01, 0.01, 0.1, 0.1]
    assert [point["model.depth"] for point in points] == [1, 3] * 3


def one(key, name, **fields):
    """A sweep of one parameter."""
    return {"parameters": {key: {"name": name, **fields}}}


MEDIAN = {"pruner": {"name": "median"}}
REFUSED = {
    "a wrong key": (
        one("optim.matrx_lr", "uniform", low=0.1, high=0.2),
        "optim.matrx_lr: no such field; did you mean optim.matrix_lr?",
    ),
    "another stack's key": (one("model.n_layer", "int", low=1, high=2), "model.depth"),
    "a value that the field has not": (
        one("model.ffn", "choice", values=["relu2", "cubic"]), "model.ffn: got 'cubic'",
    ),
    "an end outside": (
        one("optim.momentum", "uniform", low=0.5, high=1.5), "optim.momentum: got 1.5",
    ),
    "a key of the sweep's": (one("run.seed", "int", low=1, high=2), "run.seed: the sweep sets it"),
    "given twice": ({"overrides": ["optim.matrix_lr=0.1"]}, "overrides also sets it"),
    "a field of the sweep": ({"trails": 3}, "trails: no such field; did you mean trials?"),
    "a sampler": ({"sampler": {"name": "bayes"}}, "sampler.name: got 'bayes', allowed are"),
    "a field of the sampler": (
        {"sampler": {"name": "tpe", "sed": 1}}, "sampler.sed: no such field; did you mean seed?",
    ),
    "ends": (one("optim.matrix_lr", "uniform", low=2, high=1), "must be below high"),
    "no points": (
        {"sampler": {"name": "grid"}, "trials": None}, "parameters.optim.matrix_lr.points: ",
    ),
    "no trials": ({"trials": None}, "needs their number"),
    "a config": ({"config": "quikstart"}, "did you mean quickstart?"),
    "pruning without validations": (MEDIAN, "eval.every is null"),
    "pruning by seconds": (MEDIAN | {"objectives": [{"metric": "seconds"}]}, "seconds is not"),
    "no parameters": ({"parameters": None}, "parameters: it is missing"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_before_anything_runs(case, tmp_path, capsys):
    fields, message = REFUSED[case]
    assert main([str(write_sweep(tmp_path, **fields))]) == 2
    err = capsys.readouterr().err
    assert message in err and err.startswith("error: ") and len(err.splitlines()) == 1, err
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_another_sweep_is_not_gone_on_with(tmp_path, monkeypatch):
    no_runs(monkeypatch)
    path = write_sweep(tmp_path)
    found = swept(path)
    for override, difference in (
        ("sampler.seed=3", "sampler.seed: 0 -> 3"), ("train.steps=9", "train.steps: 6 -> 9"),
        ("seeds=2", "seeds: 1 -> 2"), ("trials=2", "trials: 3 -> 2"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=f"is another sweep: {difference}"):
            swept(path, override)
    assert swept(path, "workers=1", "heartbeat=5").trials == found.trials
    other = tmp_path / "runs" / "mine"
    other.mkdir()
    (other / "config.yaml").write_text("x: 1")
    with pytest.raises(UserError, match="is not a sweep"):
        swept(path, "name=mine")


def test_missing_packages_are_one_line(tmp_path, monkeypatch, capsys):
    from jaxtrain.sweep import command

    path = str(write_sweep(tmp_path, sampler={"name": "gp"}))
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "torch" else name)
    assert main([path]) == 2 and "needs the package torch" in capsys.readouterr().err
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert main([path]) == 2 and "uv sync --extra sweep" in capsys.readouterr().err
