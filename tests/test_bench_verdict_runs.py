"""The runs that verdicts are made of: which are trained, and how often."""

from concurrent.futures import ThreadPoolExecutor

from benchmarks import verdict_runs
from benchmarks.verdict_runs import Job, Outcome


def test_the_first_run_that_is_timed_is_trained_again(tmp_path, monkeypatch):
    """Its seconds are those of the second time; what shares the machine is trained once."""
    calls = []

    def train_job(job, folder, alone):
        calls.append((job.name, alone))
        return Outcome(1.0, float(len(calls)))

    monkeypatch.setattr(verdict_runs, "train_job", train_job)
    monkeypatch.setattr(verdict_runs, "ProcessPoolExecutor", lambda *_, **__: ThreadPoolExecutor(1))
    one, other = (Job(name, "tiny", (), 0, 1) for name in ("one", "other"))
    done = tmp_path / "done.jsonl"
    found = list(verdict_runs.train_all([one], [other, one._replace(seed=1)], 1, done))
    assert calls[0] == ("one", False) and len(calls) == 4
    again = next(name for name, alone in calls[1:] if [x for x, _ in calls[1:]].count(name) == 2)
    seconds = {job.name: outcome.seconds for job, outcome in found[1:]}
    assert len(found) == 3 and (seconds[again] or 0) > 2
    assert len(done.read_text().splitlines()) == 3
