"""The verdict table: switches that load, losses read off a frontier, and what is refused."""

import importlib
import json
import math
import os
import queue
import threading
import time

import jax
import pytest
from machine import HereExecutor
from tiny import QUICK, assignments

from benchmarks import verdict_page, verdict_runs, verdicts
from benchmarks.verdict_runs import ExclusiveSteps, Job, Outcome
from benchmarks.verdicts import Gain, gain, jobs_of, read_table, switch_of, tokens_to
from jaxtrain.config import find_config, load_config
from jaxtrain.config.resolve import resolve
from jaxtrain.settings import UserError

main = importlib.import_module("benchmarks.__main__").main
SCALES, TECHNIQUES = read_table()
ENVIRONMENT = {"device_kind": "cpu", "versions": {}, "python": "3.12", "backend": "cpu",
               "commit": "abc", "when": "2026-01-01"}  # fmt: skip
CELLS = [(which, name) for name, one in TECHNIQUES.items() for which in one.scales]


@pytest.mark.parametrize("which, name", CELLS)
@pytest.mark.quick("d4-early-bird ticket", "d12-remat block", "d12-speed-run stack")
def test_every_switch_is_a_configuration(which, name):
    scale = SCALES[which]
    switch = switch_of(name, TECHNIQUES, scale)
    always = [*scale.overrides, f"train.steps={scale.steps}", "data.train.path=corpus"]
    c = load_config(find_config(scale.config), [*always, *switch])
    assert c != load_config(find_config(scale.config), always)
    resolve(c, 8192, jax.devices()[:1])  # what it does not go with is refused here


def record(bpbs, seconds=10.0, step_bytes=100, tokens=100):
    """A record of one technique: {seed: bits per byte}; of the baseline: {(seed, tokens): ...}"""
    keys = [key if type(key) is tuple else (key, tokens) for key in bpbs]
    rows = [{"seed": s, "tokens": n, "bpb": bpb} for (s, n), bpb in zip(keys, bpbs.values())]
    metrics = {"seconds": seconds, "step_bytes": step_bytes, "steps": 10, "tokens": tokens}
    return {"metrics": metrics, "rows": rows}


BASE = record({(0, 50): 2.0, (0, 100): 1.8, (0, 200): 1.6, (1, 50): 2.1, (1, 100): 1.9,
               (1, 200): 1.7})  # fmt: skip


def test_tokens_to_a_loss_are_read_between_runs_of_growing_length():
    frontier = [(5.0, 2.0), (10.0, 1.8), (20.0, 1.6)]
    assert tokens_to(1.8, frontier)[0] == pytest.approx(10.0)
    tokens, outside = tokens_to(1.7, frontier)
    assert (tokens, outside) == (pytest.approx(10 * math.sqrt(2)), False)
    assert tokens_to(1.5, frontier) == (pytest.approx(20 * math.sqrt(2)), True)
    assert tokens_to(2.2, frontier) == (pytest.approx(2.5), True)


def test_a_gain_is_the_baselines_tokens_to_the_same_loss_over_the_techniques():
    g = gain(record({0: 1.6, 1: 1.7}, seconds=16.0, step_bytes=50), BASE)
    assert g.tokens == pytest.approx(2)
    assert g.interval == pytest.approx((2, 2))  # both seeds say the same
    assert g.bpb == pytest.approx(-0.2)
    assert g.seconds == pytest.approx(1.6)
    assert (g.memory, g.seeds, g.outside) == (0.5, 2, False)
    low, high = gain(record({0: 1.6, 1: 1.9}), BASE).interval
    assert low < 1 < high  # twice as good on one seed, level on the other: nothing is decided
    assert gain(record({0: 1.5}), BASE).outside


def test_a_verdict_holds_for_the_fastest_and_the_slowest_baseline():
    base = BASE | {"metrics": BASE["metrics"] | {"seconds_range": [8.0, 16.0]}}
    better, same = {0: 1.6, 1: 1.7}, {0: 1.8, 1: 1.9}  # twice as good, and as good
    g = gain(record(better, seconds=10.0), base)
    assert g.seconds_range == pytest.approx((10 / 16, 10 / 8)) and g.verdict == "use"
    assert gain(record(better, seconds=17.0), base).verdict == "situational"
    assert gain(record(better, seconds=15.0), BASE).verdict == "use"
    assert gain(record(same, seconds=15.0), base).verdict == "situational"
    assert gain(record(same, seconds=15.0), BASE).verdict == "avoid"
    assert gain(record(same, seconds=17.0), base).verdict == "avoid"


def test_a_technique_with_fewer_tokens_is_compared_by_them():
    g = gain(record({0: 2.0}, seconds=5.0, tokens=50), BASE)  # as the baseline's run of 50
    assert (g.tokens, g.seconds) == (pytest.approx(1), pytest.approx(1))


def test_a_baseline_beside_itself_gains_nothing():
    g = gain(record({0: 1.8, 1: 1.9}), BASE)
    assert (g.tokens, g.bpb, g.memory, g.seconds) == (pytest.approx(1), pytest.approx(0), 1, 1)


def with_text(record, per_token, switch=()):
    """A record whose tokens stand for so many bytes of text."""
    text_bytes = record["metrics"]["tokens"] * per_token
    metrics = record["metrics"] | {"text_bytes": text_bytes}
    return record | {"metrics": metrics, "switch": switch, "config": "d4", "variant": "one"}


def test_another_tokenizer_is_compared_by_bytes_of_text():
    """With 1.25 times the text a token, half the tokens are 0.625 of the text."""
    base, other = with_text(BASE, 4.0), ["data.tokenizer.vocab_size=16384"]
    halved = record({0: 1.8, 1: 1.9}, seconds=6.0, tokens=50)
    same, wider = (gain(with_text(halved, 5.0, s), base) for s in ([], other))
    assert (same.tokens, same.seconds) == (pytest.approx(2), pytest.approx(1.2))
    assert (wider.tokens, wider.seconds) == (pytest.approx(1.6), pytest.approx(0.96))
    assert wider.tokens / wider.seconds == pytest.approx(same.tokens / same.seconds)  # the time
    assert wider.interval == pytest.approx((1.6, 1.6)) and wider.bpb == pytest.approx(0.0)
    for one, two in ((halved, base), (with_text(halved, 5.0), BASE)):
        named = [x | {"config": "d4", "variant": "one", "switch": other} for x in (one, two)]
        with pytest.raises(UserError, match="the record of d4 one has no text_bytes: python"):
            gain(*named)


def test_text_is_counted_from_the_rows_of_a_run():
    """3 bytes a token in 100 tokens, then 4 in 50."""
    nats = [{"tokens": 100, "loss": 6 * math.log(2), "bpb": 2.0}]
    nats += [{"tokens": 150, "loss": 4 * math.log(2), "bpb": 1.0}]
    assert verdict_runs.text_bytes_of(nats) == 500
    assert verdict_runs.text_bytes_of([{"tokens": 100, "loss": 1.0}]) is None


@pytest.fixture
def text(tmp_path):
    """The override that names a text, which nothing reads."""
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "one"}\n')
    return f"data.train.path={path}"


def test_a_baseline_without_text_is_refused_before_the_training(text, monkeypatch, capsys):
    old = record({(0, 100): 1.8}) | {"config": "d4", "variant": "baseline"}
    monkeypatch.setattr(verdicts, "read_records", lambda: {("d4", "baseline"): old})
    monkeypatch.setattr(verdicts, "train_all", lambda *_: pytest.fail("it trains"))
    assert main(["verdicts", "d4", "vocabulary of 16k", text]) == 2
    assert "the record of d4 baseline has no text_bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    "tokens, interval, seconds, memory, verdict",
    [
        (1.2, (1.1, 1.3), 1.0, 1.0, "use"),
        (1.2, (1.1, 1.3), 1.05, 1.0, "use"),
        (1.2, (1.1, 1.3), 1.2, 1.0, "situational"),  # fewer tokens, each of them dearer
        (1.2, (1.1, 1.3), 1.4, 1.0, "avoid"),
        (1.0, (0.98, 1.02), 0.9, 1.0, "use"),  # as many tokens, each of them cheaper
        (1.2, (0.9, 1.6), 1.0, 1.0, "situational"),
        (1.2, (1.1, 1.3), 1.0, 1.5, "situational"),  # faster, but memory is dear
        (1.0, (0.99, 1.01), 1.0, 0.8, "use"),  # as fast, and smaller
        (0.8, (0.7, 0.9), 1.0, 0.5, "situational"),  # memory bought with time
        (0.8, (0.7, 0.9), 1.0, 1.0, "avoid"),
        (1.02, None, 1.0, 1.0, "situational"),  # of one seed
        (1.05, None, 1.0, 1.0, "use"),
        (0.95, None, 1.0, 1.0, "avoid"),
        (1.2, (1.1, 1.3), None, 1.0, "not timed"),
        (1.2, (1.1, 1.3), 1.0, None, "not timed"),
    ],
)
def test_a_verdict_follows_from_intervals_seconds_and_memory(
    tokens, interval, seconds, memory, verdict
):
    assert Gain(tokens, interval, seconds, 0.0, memory, 3, False).verdict == verdict


def test_each_technique_has_one_run_that_is_timed_alone():
    scale = SCALES["d4"]._replace(seeds=(0, 1), horizons=(0.5, 1.0), steps=10)
    jobs, timed = jobs_of(scale, {"baseline": (), "ema": ("a=b",)}, ("c=d",))
    assert [(job.name, job.seed, job.steps) for job in timed] == [
        ("baseline", 0, 10),
        ("ema", 0, 10),
    ]
    assert {(job.name, job.seed, job.steps) for job in jobs} == {
        ("baseline", 0, 5), ("baseline", 1, 5), ("baseline", 1, 10), ("ema", 1, 10),
    }  # fmt: skip
    assert timed[1].overrides == (*scale.overrides, "c=d", "a=b")


def test_runs_of_two_steps_compile_what_is_timed_alone():
    """Whole runs where a phase ends later, and none where one process does everything."""
    scale = SCALES["d12"]
    switches = {"ema": ("a=b",), "stack": ("train.phases=[{until: 88, model: {depth: 6}}]",)}
    jobs, timed = jobs_of(scale, switches, ())
    assert [(job.name, job.steps) for job in jobs] == [("ema", 2), ("stack", 350)]
    assert [(job.name, job.steps) for job in timed] == [("ema", 350), ("stack", 350)]
    assert jobs_of(scale, switches, (), warm=False) == ([], timed)


def test_the_page_has_a_row_for_what_was_measured_and_names_the_rest(tmp_path):
    scale = SCALES["d4"]._replace(seeds=(0, 1), steps=100)
    outcome = lambda bpb, tokens=1000: Outcome(bpb, 10.0, 100, tokens, ENVIRONMENT)
    job = lambda name, seed, steps=100: Job(name, "gpt_d12", (), seed, steps)
    base = [
        (job("baseline", s, n), outcome(2 - n / 1000 + s / 100, n * 10))
        for s in (1, 0)
        for n in (50, 100)
    ]
    verdicts.save("d4", scale, (), base, tmp_path / "results")
    runs = [(job("ema", 1), outcome(1.88)), (job("ema", 0), outcome(1.87))]
    verdicts.save("d4", scale, ("optim.wrappers=[{name: ema}]",), runs, tmp_path / "results")
    page = verdict_page.make_page(tmp_path / "verdicts.md", tmp_path / "results").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| [ema]"))
    assert "verdict-d4-ema-cpu.json" in row and "`optim.wrappers=[{name: ema}]`" in row
    assert "~1.52x" in row and "-0.0300" in row and "| use |" in row
    assert "- lion (arXiv:2302.06675)" in page.split("## Not measured yet")[1]


def test_each_device_has_a_table_with_its_own_baseline(tmp_path):
    scale, runs = (
        SCALES["d4"]._replace(seeds=(0,), steps=100),
        Job("baseline", "gpt_d12", (), 0, 100),
    )
    for device, seconds in (("NVIDIA H200", 10.0), ("NVIDIA H100", 20.0)):
        env = ENVIRONMENT | {"device_kind": device}
        ends = [(runs._replace(steps=n), Outcome(2 - n / 1000, seconds * n / 100, 100, n, env))
                for n in (50, 100)]  # fmt: skip
        verdicts.save("d4", scale, (), ends, tmp_path)
    ema = Outcome(1.87, 10.0, 100, 100, ENVIRONMENT | {"device_kind": "NVIDIA H200"})
    verdicts.save("d4", scale, (), [(runs._replace(name="ema"), ema)], tmp_path)
    timed = ema._replace(env=ENVIRONMENT | {"device_kind": "NVIDIA H100"})
    page = lambda: verdict_page.make_page(tmp_path / "verdicts.md", tmp_path).read_text()
    assert "| 1.00x | -0.0300 |" in page().split(", NVIDIA H200\n")[1]
    verdicts.save_seconds(verdicts.read_records(tmp_path)["d4", "ema"], timed, tmp_path)
    h100, h200 = page().split(", NVIDIA H100\n")[1].split(", NVIDIA H200\n")
    assert "| 0.50x | -0.0300 |" in h100 and "[ema]" not in h200


def test_the_page_is_made_of_the_records(tmp_path):
    assert (
        verdict_page.make_page(tmp_path / "verdicts.md").read_text()
        == verdict_page.PAGE.read_text()
    )


def test_a_failed_timed_run_leaves_no_record(tmp_path):
    job = Job("ema", "gpt_d12", (), 0, 100)
    verdicts.save("d4", SCALES["d4"], (), [(job, Outcome(error="out of memory"))], tmp_path)
    assert not list(tmp_path.iterdir())


def test_seconds_are_renewed_and_losses_stay(tmp_path):
    scale, job = SCALES["d4"]._replace(steps=100), Job("ema", "gpt_d12", (), 0, 100)
    verdicts.save("d4", scale, (), [(job, Outcome(1.9, 10.0, 100, 1000, ENVIRONMENT))], tmp_path)
    (before,) = verdicts.read_records(tmp_path).values()
    now = Outcome(1.8, 5.0, 90, 1000, ENVIRONMENT | {"commit": "def"})
    verdicts.save_seconds(before, now, tmp_path)
    (after,) = verdicts.read_records(tmp_path).values()
    assert after["rows"] == before["rows"] and after["commit"] == "abc"
    assert (after["metrics"]["seconds"], after["metrics"]["step_bytes"]) == (5.0, 90)
    assert (after["timed"]["commit"], after["timed"]["bpb"]) == ("def", 1.8)
    verdicts.save_seconds(after, Outcome(error="out of memory"), tmp_path)
    assert verdicts.read_records(tmp_path) == {("d4", "ema"): after}


def test_timed_runs_take_turns(tmp_path):
    order = []

    def take_steps(name):
        with (tmp_path / "steps.lock").open("w") as lock:
            ExclusiveSteps(lock).begin(0)
            order.append(f"{name} begins")
            time.sleep(0.1)
            order.append(f"{name} ends")

    threads = [threading.Thread(target=take_steps, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pairs = [(a.split()[0], b.split()[0]) for a, b in zip(order[::2], order[1::2])]
    assert len(order) == 6 and all(a == b for a, b in pairs)


def test_seconds_are_those_of_steady_steps():
    """Two phases at 100 and 50 tokens a second, whose first rows are ten times slower."""
    row = lambda tokens, rate, **more: {"step": tokens // 10, "tokens_per_s": rate} | more
    rows = [{"step": 1, "start_s": 3.0}, row(100, 10.0), row(200, 100.0), row(300, 100.0)]
    rows += [row(400, 5.0, start_s=1.0), row(500, 50.0), row(600, 50.0), row(700, 50.0)]
    assert verdict_runs.steady_seconds(rows, 10) == pytest.approx(300 / 100 + 400 / 50)
    assert verdict_runs.steady_seconds(rows[:3], 10) == pytest.approx(200 / 100)
    assert verdict_runs.steady_seconds(rows[:2], 10) == pytest.approx(100 / 10)


def test_workers_are_spread_over_the_gpus_that_are_named(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    monkeypatch.setattr(verdict_runs, "start", lambda quiet: None)
    assert verdict_runs.visible_gpus() == ["2", "5"]
    turns = queue.SimpleQueue()
    for gpu in ("2", "5", "2"):
        turns.put(gpu)
    seen = []
    for _ in range(3):
        verdict_runs.start_on(turns, take=True)
        seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
    assert seen == ["2", "5", "2"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    verdict_runs.start_on(turns, take=False)
    assert verdict_runs.visible_gpus() == [] and "CUDA_VISIBLE_DEVICES" not in os.environ


def test_a_text_that_is_not_there_is_one_error_before_any_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(verdicts, "train_all", lambda *_: pytest.fail("it trains"))
    monkeypatch.chdir(tmp_path)
    assert main(["verdicts", "d4"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no file or folder" in line and line.endswith(
        "data.train.path=... names the text to train on"
    )


def test_a_torn_last_line_of_outcomes_is_cut_off(tmp_path, capsys):
    """Of a process killed in the middle of a write; what is appended then is a line of its own."""
    done, job = tmp_path / "d4.jsonl", Job("ema", "gpt_d12", ("a=b",), 0, 100)
    whole = json.dumps([job._asdict(), Outcome(1.5)._asdict()]) + "\n"
    done.write_text(whole + whole[:40])
    assert verdict_runs.read_done(done) == {job: Outcome(1.5)} and done.read_text() == whole
    (line,) = capsys.readouterr().err.splitlines()
    assert "d4.jsonl: the last line is not complete" in line
    assert verdict_runs.read_done(done) == {job: Outcome(1.5)} and not capsys.readouterr().err
    done.write_text(whole[:40])
    assert verdict_runs.read_done(done) == {} and not done.read_bytes()


def test_unknown_scales_and_techniques_are_named(capsys):
    assert main(["verdicts", "d5"]) == 2
    assert "there is no scale d5; there are d4, d12" in capsys.readouterr().err
    assert main(["verdicts", "d4", "ema2"]) == 2
    assert "d4 has no technique ema2. It has: baseline; adamw" in capsys.readouterr().err


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_runs_are_trained_and_recorded(tmp_path, monkeypatch, capsys):
    scale = SCALES["d4"]._replace(
        config="quickstart",
        overrides=("model.depth=1", "model.width=32", "model.head_dim=16", "train.batch_size=8",
                   "train.sequence_length=32", "data.tokenizer={name: bytes}",
                   "eval.batch_size=256", "eval.tokens=512", "data.validation.fraction=0.01",
                   f"data.cache_dir={tmp_path / 'cache'}", *assignments(**QUICK)),
        steps=20, depth=1, seeds=(0,), horizons=(0.5, 1.0),
    )  # fmt: skip
    broken = TECHNIQUES["lion"]._replace(name="broken", switch=("model.kv_heads=3",))
    table = {"d4": scale}, {"ema": TECHNIQUES["ema"], "broken": broken}
    monkeypatch.setattr(verdicts, "read_table", lambda: table)
    monkeypatch.setattr(verdict_runs, "ProcessPoolExecutor", HereExecutor)
    monkeypatch.setattr(jax, "clear_caches", lambda: None)  # of other tests' programs
    monkeypatch.chdir(tmp_path)
    verdicts.train_verdicts(["d4"], workers=2, record=True, out=tmp_path / "out")
    found = verdicts.read_records(tmp_path / "out")
    assert found.keys() == {("d4", "baseline"), ("d4", "ema")}
    ema, base = found["d4", "ema"], found["d4", "baseline"]
    assert [(row["seed"], row["tokens"]) for row in base["rows"]] == [(0, 2560), (0, 5120)]
    assert ema["metrics"]["step_bytes"] > base["metrics"]["step_bytes"]  # the average is a copy
    assert 0.5 < gain(ema, base).memory < 3 and base["metrics"]["tokens"] == 20 * 8 * 32
    assert base["metrics"]["text_bytes"] == pytest.approx(20 * 8 * 32, rel=0.01)  # of bytes
    assert "broken seed 0, 20 steps: failed" in capsys.readouterr().out
    verdicts.train_verdicts(["d4", "ema"], workers=1, record=False, out=None)  # nothing is left
    assert not capsys.readouterr().out
    monkeypatch.setattr(verdicts, "read_records", lambda: found)
    (tmp_path / "runs/verdicts/d4.jsonl").unlink()
    verdicts.train_verdicts(["d4", "ema"], 2, record=True, out=tmp_path / "timed", time_only=True)
    (timed,) = [json.loads(p.read_text()) for p in (tmp_path / "timed").iterdir()]
    assert timed["rows"] == ema["rows"] and timed["timed"]["bpb"] == ema["rows"][0]["bpb"]


@pytest.mark.slow
def test_runs_are_trained_in_processes_of_their_own(tmp_path):
    """What fails there is an outcome here."""
    jobs = [Job(name, "quickstart", ("model.kv_heads=3",), 0, 20) for name in ("one", "other")]
    found = verdict_runs.train_all(jobs, [], 2, tmp_path / "done.jsonl")
    errors = {job.name: outcome.error or "" for job, outcome in found}
    assert errors.keys() == {"one", "other"} and all("kv_heads" in x for x in errors.values())


def test_seconds_are_those_of_the_recorded_switch(text, monkeypatch):
    """What tuning found is in the record alone."""
    switch, trained = ["optim.learning_rate=0.002"], []
    monkeypatch.setattr(verdicts, "read_records", lambda: {("d4", "adamw"): {"switch": switch}})
    monkeypatch.setattr(verdicts, "train_all", lambda _, timed, *__: trained.extend(timed) or ())
    verdicts.train_verdicts(["d4", "adamw", text], 1, record=False, out=None, time_only=True)
    assert [job.overrides[-1] for job in trained] == switch


def test_tuning_trains_all_seeds_with_the_best_value_of_the_first(text, tmp_path, monkeypatch):
    """The record has what was tried, and the switch that won."""
    trained = []

    def train_all(jobs, timed, workers, done):
        for job in (*jobs, *timed):
            trained.append(job)
            rate = float(job.overrides[-1].removeprefix("optim.learning_rate="))
            yield job, verdicts.Outcome(abs(rate - 2e-3) + 1, 1.0, 1, 100, {})

    monkeypatch.setattr(verdicts, "train_all", train_all)
    monkeypatch.setattr(verdicts, "describe", lambda *_: {"bench": "verdict", "variant": "adamw"})
    monkeypatch.setattr(verdicts, "write", lambda record, out: trained.append(record))
    verdicts.train_verdicts(["d4", "adamw", text], 1, record=True, out=tmp_path, tune=True)
    *jobs, record = trained
    rates = [job.overrides[-1].partition("=")[2] for job in jobs]
    assert rates == ["0.001", "0.002", "0.004", "0.008", *["0.002"] * 3]
    assert [job.seed for job in jobs[:4]] == [0] * 4
    assert {job.seed for job in jobs[4:]} == {0, 1, 2}
    assert record["switch"][-1] == "optim.learning_rate=0.002"
    assert [row["switch"][0] for row in record["tuned"]] == [
        f"optim.learning_rate={rate}" for rate in rates[:4]
    ]


def test_a_tuned_value_stands_behind_what_was_given_before():
    """An override of the same key, given before the optimizer, would be lost with it else."""
    given = ("optim.learning_rate=1e-3", "train.steps=5")
    tuned = ("optim={name: lion}", "optim.learning_rate=2e-3")
    settings = verdicts.settings_of(SCALES["d4"]._replace(overrides=()), given, tuned)
    assert settings == ("train.steps=5", *tuned)


def test_tuning_passes_over_losses_that_are_not_finite(text, tmp_path, monkeypatch, capsys):
    """A technique with no finite loss is left out, not trained with an untuned value."""
    saved = []

    def train_all(jobs, timed, workers, done):
        for job in (*jobs, *timed):
            good = job.name == "adamw" and job.overrides[-1].endswith("=0.004")
            yield job, verdicts.Outcome(1.0 if good else math.nan, 1.0, 1, 100, {})

    monkeypatch.setattr(verdicts, "train_all", train_all)
    monkeypatch.setattr(verdicts, "describe", lambda *_: {"bench": "verdict", "variant": "adamw"})
    monkeypatch.setattr(verdicts, "write", lambda record, out: saved.append(record["switch"][-1]))
    verdicts.train_verdicts(["d4", "adamw", "lion", text], 1, record=True, out=tmp_path, tune=True)
    assert saved == ["optim.learning_rate=0.004"]
    assert "lion: left out" in capsys.readouterr().out
