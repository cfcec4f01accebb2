"""The ladder: rungs that resolve, removals, the search for a loss, seconds to it, and the page."""

import functools
import importlib
import json
import math

import jax
import pytest
from machine import HereExecutor

from benchmarks import ladder, ladder_page, verdict_runs
from benchmarks.ladder import (
    BASELINE,
    WITHOUT,
    Asked,
    Trainer,
    climb,
    next_length,
    read_ladders,
    read_records,
    start_length,
)
from benchmarks.ladder_page import (
    Total,
    cost_of,
    costs_of,
    factors,
    make_page,
    paired_interval,
    total_of,
)
from benchmarks.verdict_runs import Outcome
from jaxtrain.config import find_config, load_config
from jaxtrain.config.resolve import resolve
from jaxtrain.runs.job import leaves
from jaxtrain.settings import UserError

main = importlib.import_module("benchmarks.__main__").main
ENVIRONMENT = {"device_kind": "cpu", "versions": {}, "python": "3.12", "backend": "cpu",
               "commit": "abc", "when": "2026-01-01"}  # fmt: skip
LADDERS = read_ladders()


def cell(which, name):
    """A case; gpt2_124m has the rungs of gpt_d12, with other sizes."""
    marks = [pytest.mark.slow] if which == "gpt2_124m" else []
    return pytest.param(which, name, marks=marks)


CELLS = [cell(which, name) for which, one in LADDERS.items() for name in one.names]
REMOVALS = [cell(which, name) for which, one in LADDERS.items() for name in one.removals]


def trainer(which, tmp_path, **changes):
    return Trainer(
        LADDERS[which], ("data.train.path=corpus",), 1, tmp_path / "done.jsonl", **changes
    )


@functools.cache
def config_of(job):
    return load_config(find_config(job.config), [*job.overrides, f"train.steps={job.steps}"])


def fields(c):
    return leaves(c.model_dump(mode="json"))


def differing(a, b):
    a, b = fields(a), fields(b)
    return {key for key in a | b if a.get(key) != b.get(key)}


@pytest.mark.parametrize("which, name", CELLS + REMOVALS)
@pytest.mark.quick(
    "quick-zero-initialized projections",
    "d4-windows",
    "gpt_d12-bfloat16",
    "gpt_d12-without batch ramp",
)
def test_every_rung_is_a_configuration(which, name, tmp_path):
    c = config_of(trainer(which, tmp_path).job(name, 0, 1.0))
    resolve(c, 8192, jax.devices()[:1])  # what does not go together is refused here


@pytest.mark.parametrize("which", LADDERS)
@pytest.mark.quick("quick", "d4")
def test_every_rung_changes_what_it_names(which, tmp_path):
    rungs, train = LADDERS[which], trainer(which, tmp_path)
    configs = [config_of(train.job(name, 0, 1.0)) for name in rungs.names]
    for rung, below, c in zip(rungs.rungs[1:], configs, configs[1:]):
        keys = [line.partition("=")[0] for line in rung.lines(which)]
        assert differing(below, c), rung.name
        for field in differing(below, c):
            assert any(f"{field}.".startswith(f"{key}.") for key in keys), (rung.name, field)


@pytest.mark.parametrize("which", LADDERS)
def test_the_shipped_rung_is_the_shipped_configuration(which, tmp_path):
    """With the sizes of the scale, and nothing else."""
    rungs, train = LADDERS[which], trainer(which, tmp_path)
    job = train.job(rungs.scale.shipped, 0, 1.0)
    size = rungs.scale.size
    given = [
        *map(size.filled, size.overrides),
        "data.train.path=corpus",
        f"train.steps={size.steps}",
    ]
    assert differing(config_of(job), load_config(find_config(size.config), given)) == set()


def test_the_speedrun_is_on_the_ladder_of_its_size(tmp_path):
    """At gpt_d12 nothing differs from the shipped file but steps and where they change."""
    job = trainer("gpt_d12", tmp_path).job("progressive stacking", 0, 1400 / 150)
    c = load_config(find_config("gpt_d12_speedrun"), ["data.train.path=corpus"])
    assert job.steps == 1400 and differing(config_of(job), c) == set()


@pytest.mark.parametrize("which, name", REMOVALS)
@pytest.mark.quick(
    "quick-without flash attention",
    "quick-without packed rows",
    "quick-without muon",
    "d4-without bfloat16",
)
def test_a_removal_differs_from_the_top_by_its_rungs_fields(which, name, tmp_path):
    rungs, train = LADDERS[which], trainer(which, tmp_path)
    top = config_of(train.job(rungs.names[-1], 0, 1.0))
    found = differing(top, config_of(train.job(name, 0, 1.0)))
    dropped = rungs.dropped(name.removeprefix(WITHOUT))
    lines = [line for rung in rungs.rungs if rung.name in dropped for line in rung.lines(which)]
    keys = [line.partition("=")[0] for line in lines]
    assert found, name
    for field in found:
        assert any(f"{field}.".startswith(f"{key}.") for key in keys), field


def test_a_removal_takes_those_along_that_need_it():
    assert LADDERS["gpt_d12"].dropped("muon") == {"muon", "muon's extras", "fused kernels"}
    assert LADDERS["gpt_d12"].dropped("qk norm") == {"qk norm"}


# ---- the search --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "losses, length",
    [
        ({}, 0.5),
        ({0.5: 1.9}, 0.25),  # below the target: try shorter
        ({0.5: 2.1}, 1.0),
        ({0.5: 1.9, 0.25: 2.1}, None),  # on both sides
        ({0.5: 1.9, 0.25: 1.95}, None),  # there is nothing shorter
        ({0.5: 2.2, 1.0: 2.1}, None),  # nothing longer: it is not reached
        ({0.5: math.inf}, 1.0),  # it diverged
    ],
)
def test_lengths_grow_or_shrink_until_the_target_is_between(losses, length):
    assert next_length(losses, 2.0, [0.25, 0.5, 1.0], 0.5) == length


def test_the_search_begins_long_at_the_bottom_and_short_at_the_top():
    rungs, lengths = LADDERS["d4"], [0.125, 0.25, 0.5, 1.0]
    starts = [start_length(rungs, name, lengths) for name in rungs.names]
    assert starts[0] == 1.0 and starts[-1] == 0.25 and sorted(starts, reverse=True) == starts
    assert start_length(rungs, "without muon", lengths) == 0.25


def fake_training(monkeypatch, loss):
    """Runs that end at once: loss(rung, length) in bits per byte, a second a token of the rung."""
    ran = []

    def train_all(jobs, timed, workers, done):
        for job in (*jobs, *timed):
            ran.append(job)
            bpb = loss(job, job.steps / 100) + job.seed / 1000
            yield job, Outcome(bpb, 0.01 * job.steps, 50, job.steps * 10, ENVIRONMENT, fill=0.5)

    monkeypatch.setattr(ladder, "train_all", train_all)
    return ran


@pytest.mark.slow
def test_a_climb_records_every_rung_and_its_page(tmp_path, monkeypatch):
    """The loss falls by half a bit for each doubling, and by 0.1 for each rung."""
    names = LADDERS["quick"].names
    rung = lambda name: 5 if name.startswith(WITHOUT) else min(names.index(name), 5)
    ran = fake_training(monkeypatch, lambda job, n: 3 - math.log2(n) / 2 - 0.1 * rung(job.name))
    out = tmp_path / "results"
    asked = Asked("quick", ("data.train.path=/data/x.jsonl",), steps=100, record=True, out=out)
    climb(asked)
    records = read_records(out)
    assert set(records) == {("quick", name) for name in names}
    base = records["quick", BASELINE]
    assert base["metrics"]["target"] == pytest.approx(3.001) and len(base["rows"]) == 3
    text = "".join(path.read_text() for path in out.iterdir())
    assert "/data/" not in text and "data.train.path=x.jsonl" in base["command"]
    costs = costs_of(LADDERS["quick"], records)
    expected = [1000, *(1000 * 2 ** (-0.2 * min(n, 5)) for n in range(1, len(names)))]
    for cost, tokens in zip(costs, expected):
        assert cost.tokens.mean == pytest.approx(tokens, rel=0.01), cost.name
        assert cost.seconds == pytest.approx(tokens * 0.001, rel=0.01)
    assert costs[-1].tokens.seeds == 3 and costs[1].tokens.seeds == 1
    del ran[:]
    climb(asked._replace(remove=True, only=("muon", "windows")))
    assert {job.name for job in ran} == {"without muon", "without windows"}
    page = make_page(tmp_path / "ladder.md", out, tmp_path / "ladder.png").read_text()
    assert "**In all 2.00x" in page and "does not hold at this scale" in page
    assert "| [without" not in page and "| [muon](" in page.split("the top without one rung")[1]
    assert "Another call timed the top" not in page
    renewed = out / "ladder-quick-without_muon-cpu.json"
    other = json.loads(renewed.read_text())
    other["timed"]["commit"] = "another"
    renewed.write_text(json.dumps(other))
    page = make_page(tmp_path / "ladder.md", out, tmp_path / "ladder.png").read_text()
    assert "Another call timed the top" in page
    assert "- d4: `python -m benchmarks ladder --scale d4 --tune" in page
    assert (tmp_path / "ladder.png").stat().st_size > 10_000


def test_both_ends_are_tuned_by_one_budget_and_removals_keep_the_rates(tmp_path, monkeypatch):
    """The best of AdamW's rates is 8e-3 here, of Muon's 0.02."""

    def loss(job, length):
        rates = dict(one.split("=", 1) for one in job.overrides)
        off = abs(float(rates["optim.learning_rate"]) - 8e-3)
        return 3 + 10 * off + float(rates.get("optim.matrix_lr", 0)) - math.log2(length)

    ran = fake_training(monkeypatch, loss)
    asked = Asked("quick", steps=100, only=(BASELINE,), tune=True, record=True, out=tmp_path)
    climb(asked)
    assert [job.name for job in ran[:16]] == [BASELINE] * 8 + [LADDERS["quick"].names[-1]] * 8
    assert [job.seed for job in ran[:16]] == [0, 1] * 8
    (record,) = read_records(tmp_path).values()
    assert record["rates"] == {
        BASELINE: ["optim.learning_rate=0.008"], "muon": ["optim.matrix_lr=0.02"],
    }  # fmt: skip
    assert next(row["switch"] for row in record["tuned"]) == "optim.learning_rate=0.002"
    del ran[:]
    climb(asked._replace(tune=False, only=("muon",), remove=True))
    assert all("optim.learning_rate=0.008" in job.overrides for job in ran)
    del ran[:]
    climb(asked._replace(tune=False, only=("windows",), remove=True))
    assert all("optim.matrix_lr=0.02" in job.overrides for job in ran)


def test_seconds_are_renewed_and_losses_stay(tmp_path, monkeypatch):
    fake_training(monkeypatch, lambda job, n: 3 - math.log2(n))
    asked = Asked("quick", steps=100, only=(BASELINE, "packed rows"), record=True, out=tmp_path)
    climb(asked)
    before = read_records(tmp_path)
    ran = fake_training(monkeypatch, lambda job, n: 1.0)
    climb(asked._replace(time_only=True))
    after = read_records(tmp_path)
    assert {job.steps for job in ran} == {LADDERS["quick"].scale.timed_steps}
    for key, record in before.items():
        assert after[key]["rows"] == record["rows"]


def test_what_is_unknown_is_named(tmp_path, capsys):
    assert main(["ladder", "--scale", "d5"]) == 2
    assert "there is no scale d5; there are quick, d4" in capsys.readouterr().err
    assert main(["ladder", "--scale", "quick", "--only", "float8"]) == 2
    assert "quick has no rung float8. It has: baseline; flash attention" in capsys.readouterr().err
    with pytest.raises(UserError, match="has no record of quick baseline over 7 steps; train it"):
        climb(Asked("quick", only=("windows",), steps=7, out=tmp_path))
    assert main(["step", "--scale", "quick"]) == 2
    assert "--scale quick is for bench ladder" in capsys.readouterr().err


# ---- seconds to the target ---------------------------------------------------------------------


def record(name, ends, rate=1e-3, step_bytes=100):
    """A record of {(seed, tokens): bits per byte}."""
    rows = [{"seed": s, "tokens": n, "bpb": bpb} for (s, n), bpb in ends.items()]
    return {"variant": name, "rows": rows,
            "metrics": {"seconds_per_token": rate, "step_bytes": step_bytes,
                        "rounds": [rate, 2 * rate]}}  # fmt: skip


BASE = record(BASELINE, {(0, 800): 2.0, (1, 800): 2.1}, rate=4e-3, step_bytes=400)


def test_seconds_are_tokens_to_the_target_times_the_seconds_of_a_token():
    cost = cost_of(record("one", {(0, 400): 1.9, (0, 100): 2.1}), 2.0)
    assert cost.tokens == (pytest.approx(200), None, False, 1)
    assert cost.seconds == pytest.approx(0.2)
    assert cost_of(BASE, 2.05).seconds == pytest.approx(3.2)


def test_a_rung_that_does_not_reach_the_target_has_no_seconds():
    """Of one seed of two is enough."""
    cost = cost_of(record("one", {(0, 400): 1.9, (0, 100): 2.1, (1, 400): 2.05}), 2.0)
    assert cost.tokens is None and cost.seconds is None


def test_nothing_is_read_beyond_the_shortest_run():
    tokens = cost_of(record("one", {(0, 400): 1.8, (0, 100): 1.9}), 2.0).tokens
    assert tokens.mean == pytest.approx(100) and tokens.bound


def test_factors_multiply_to_the_total_and_skip_what_is_not_reached():
    failed = record("failed", {(0, 800): 2.2})
    packed = record("packed rows", {(0, 400): 2.0, (0, 200): 2.2})
    ends = {(s, n): 2.1 - s / 100 if n == 100 else 1.9 for s in (0, 1) for n in (100, 200)}
    top = record("top", ends)
    costs = [cost_of(one, 2.0) for one in (BASE, failed, packed, top)]
    found = factors(costs)
    assert found[:2] == [None, None] and found[2] == pytest.approx(3.2 / 0.4)
    total = total_of(costs, (20.0, 40.0))
    assert math.prod(f for f in found if f) == pytest.approx(total.factor)
    assert total.factor == pytest.approx(total.tokens * total.seconds_per_token)
    assert total.seconds_per_token == pytest.approx(4)
    assert total.padding == found[2] and total.interval == (20, 40)
    assert total.verdict == "holds"


def test_the_interval_pairs_the_seeds():
    """Each seed of the top has the loss of its own baseline as the target."""
    ends = {(0, 100): 2.1, (0, 200): 1.9, (1, 100): 2.2, (1, 200): 2.0}
    top = record("top", ends, rate=4e-3)
    assert paired_interval(BASE, top) == pytest.approx((4 * 2**0.5, 4 * 2**0.5))
    top["metrics"]["rounds"][1] *= 2  # the second round is half as fast beside the baseline's
    assert paired_interval(BASE, top) == pytest.approx((2 * 2**0.5, 4 * 2**0.5))
    uneven = {(0, 100): 2.0, (0, 50): 2.1, (1, 100): 2.2, (1, 200): 2.1}
    low, high = paired_interval(BASE, record("top", uneven, rate=4e-3))
    assert low < 4 < 8 < high
    assert paired_interval(BASE, record("top", {(0, 100): 2.1, (0, 200): 1.9})) is None
    assert paired_interval(BASE, record("top", ends | {(0, 200): 2.05})) is None


@pytest.mark.parametrize(
    "factor, interval, verdict",
    [
        (6.0, (5.0, 7.0), "holds"),
        (6.0, (4.0, 8.0), "is undecided"),
        (4.0, (3.0, 4.9), "does not hold"),
        (6.0, None, "is undecided"),
    ],
)
def test_the_claim_is_judged_by_the_interval(factor, interval, verdict):
    assert Total(factor, interval, 1.0, 1.0, None).verdict == verdict


@pytest.mark.slow
def test_the_page_is_made_of_the_records(tmp_path):
    page = make_page(tmp_path / "ladder.md", picture=tmp_path / "ladder.png")
    assert page.read_text() == ladder_page.PAGE.read_text()


@pytest.mark.slow
def test_rungs_are_trained_and_recorded(tmp_path, monkeypatch):
    """Of one layer, for a few steps: the baseline and the top, one after the other here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verdict_runs, "ProcessPoolExecutor", HereExecutor)
    monkeypatch.setattr(jax, "clear_caches", lambda: None)  # of other tests' programs
    quick = LADDERS["quick"]
    size = quick.scale.size._replace(seeds=(0,), horizons=(1,))
    scale = quick.scale._replace(size=size, timed_rounds=1, timed_steps=8)
    few = {"quick": quick._replace(scale=scale)}
    monkeypatch.setattr(ladder, "read_ladders", lambda: few)
    text = tmp_path / "text.jsonl"
    line = "to be, or not to be, that is the question: "
    lines = [{"text": f"{i}: {line * (1 + i % 7)}"} for i in range(400)]
    text.write_text("".join(json.dumps(line) + "\n" for line in lines))
    overrides = (
        f"data.train.path={text}", f"data.cache_dir={tmp_path / 'cache'}", "model.depth=1",
        "model.width=32", "model.head_dim=16", "data.tokenizer={name: bytes}",
        "train.sequence_length=128", "eval.tokens=512", "mesh.tensor=2",  # 4 rows at first
    )  # fmt: skip
    top = quick.names[-1]
    only = (BASELINE, top)
    asked = Asked("quick", overrides, only, 12, workers=2, record=True, out=tmp_path / "out")
    climb(asked)
    records = read_records(tmp_path / "out")
    assert set(records) == {("quick", name) for name in only}
    base = records["quick", BASELINE]
    assert 0 < base["rows"][0]["fill"] < 1 and records["quick", top]["rows"][0]["fill"] == 1
    assert all(one["metrics"]["seconds_per_token"] > 0 for one in records.values())
    assert str(tmp_path) not in json.dumps(list(records.values()))
    climb(asked._replace(record=False))  # nothing is left to train
    page = make_page(tmp_path / "ladder.md", tmp_path / "out", tmp_path / "ladder.png").read_text()
    assert f"| [{top}](" in page and ("In all" in page or "does not reach" in page)


def test_the_page_says_when_the_best_value_is_the_last_that_was_tried():
    ladder = read_ladders()["quick"]
    row = lambda value, bpb: {"switch": f"optim.learning_rate={value}", "bpb": bpb}
    records = {("quick", "baseline"): {"tuned": [row("2e-3", 3.5), row("4e-3", 3.4)]}}
    text = ladder_page.edge_text(ladder, records)
    assert "`optim.learning_rate=4e-3` is the highest: one beyond" in text
    records["quick", "baseline"]["rates"] = {"baseline": ["optim.learning_rate=2e-3"]}
    text = ladder_page.edge_text(ladder, records)
    assert "(0.1000 bits per byte below the ladder's `optim.learning_rate=2e-3`)" in text
    records = {
        ("quick", "baseline"): {"tuned": [row("4e-3", 3.4), row("2e-3", None), row("8e-3", 3.6)]}
    }
    assert ladder_page.edge_text(ladder, records) == ""
