"""The ladder from GPT-2's architecture and recipe to the full stack: docs/benchmarks/ladder.md.

    python -m benchmarks ladder --scale quick data.train.path=... --record     trains every rung
    python -m benchmarks ladder --scale quick --tune ...      tunes the rates of both ends first
    python -m benchmarks ladder --scale quick --remove ...    the top without each rung in turn
    python -m benchmarks ladder --scale quick --time-only ... renews the seconds of the records
    python -m benchmarks ladder                               makes the page from the records

The target is the baseline's held-out loss after its run. Every other rung is trained for several
lengths around the one that reaches the target, each with its full decay, until one run is below the
target and one above; the tokens to the target are interpolated (`scales.tokens_to`). Seconds are
those tokens times the seconds per token. The latter come from short runs alone on the device, in
several rounds over all rungs.
"""

import itertools
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from benchmarks.record import BENCHMARKS, RESULTS, describe, write
from benchmarks.scales import Scale, settings_of
from benchmarks.verdict_runs import Job, Outcome, train_all
from jaxtrain.settings import UserError
from jaxtrain.storage.strict_yaml import read_yaml

Record = dict[str, Any]
TABLE = BENCHMARKS / "ladder.yaml"
FOLDER = RESULTS / "ladder"
BASELINE = "baseline"
WITHOUT = "without "  # prefix of a removal's name; the rung's name follows
TUNED_SEEDS = 2
# A timed run validates on almost nothing, and logs metrics of its last steps.
TIMED = ("eval.tokens=1", "metrics.every=4")


class LadderScale(NamedTuple):
    """A model and data size of the ladder; `size.horizons` are run lengths relative to the full
    run's."""

    size: Scale
    shipped: str  # the rung at which the configuration is the shipped one
    timed_steps: int
    timed_rounds: int


class Rung(NamedTuple):
    """A rung of ladder.yaml."""

    name: str
    why: str
    source: str
    set: tuple[str, ...]
    seam: str = ""
    at: Mapping[str, tuple[str, ...]] = {}  # more overrides at a scale
    scales: tuple[str, ...] = ()  # scales that have it; default all
    needs: tuple[str, ...] = ()  # rungs that it depends on
    # scale -> key of an override -> values that `--tune` tries.
    tune: Mapping[str, Mapping[str, tuple[float, ...]]] = {}

    def lines(self, which: str) -> tuple[str, ...]:
        return (*self.set, *self.at.get(which, ()))


class Ladder(NamedTuple):
    """The rungs of one scale, the baseline first."""

    which: str
    scale: LadderScale
    rungs: tuple[Rung, ...]

    @property
    def names(self) -> list[str]:
        return [rung.name for rung in self.rungs]

    def switch(self, name: str) -> tuple[str, ...]:
        """The overrides of a rung and all below it; for a removal, those of all rungs but that one
        and the rungs that depend on it."""
        if name.startswith(WITHOUT):
            dropped = self.dropped(name.removeprefix(WITHOUT))
            kept = [rung for rung in self.rungs if rung.name not in dropped]
        else:
            kept = self.rungs[: self.names.index(name) + 1]
        return tuple(line for rung in kept for line in rung.lines(self.which))

    def dropped(self, name: str) -> set[str]:
        """A rung and all rungs that depend on it."""
        found = {name}
        for rung in self.rungs:
            if found.intersection(rung.needs):
                found.add(rung.name)
        return found

    @property
    def removals(self) -> list[str]:
        return [WITHOUT + name for name in self.names[1:]]


def read_ladders(path: Path = TABLE) -> dict[str, Ladder]:
    """The ladder of each scale. Raises UserError for an unknown name in the table."""
    tree = read_yaml(path)
    scales = TypeAdapter(dict[str, LadderScale]).validate_python(tree["scales"])
    rows = [{"name": BASELINE} | tree["baseline"]]
    rows += [{"name": name} | row for name, row in tree["rungs"].items()]
    rungs = TypeAdapter(tuple[Rung, ...]).validate_python(rows)
    names = [rung.name for rung in rungs]
    for number, rung in enumerate(rungs):
        unknown = {*rung.scales, *rung.at, *rung.tune} - scales.keys()
        unknown |= set(rung.needs) - set(names[:number])
        if unknown:
            raise UserError(f"{path.name}: {rung.name} names {', '.join(sorted(unknown))}")
    return {
        which: Ladder(which, scale, tuple(r for r in rungs if which in (r.scales or scales)))
        for which, scale in scales.items()
    }


class Asked(NamedTuple):
    """The scale, rungs and options that a command line asks for."""

    scale: str
    overrides: tuple[str, ...] = ()
    only: tuple[str, ...] = ()  # rungs; default all
    steps: int | None = None  # steps of the baseline, instead of the scale's
    workers: int = 1
    tune: bool = False
    remove: bool = False
    time_only: bool = False
    record: bool = False
    out: Path | None = None


# ---- training --------------------------------------------------------------------------------


def climb(asked: Asked) -> None:
    """Train the rungs of a scale, or the requested ones, and record them.

    Raises UserError for an unknown scale or rung, and for rungs without the baseline's record.
    """
    ladder = find_ladder(asked)
    out, size = asked.out or FOLDER, ladder.scale.size
    records: dict[tuple[str, str], Record] = {}
    done = Path("runs") / "ladder" / f"{ladder.which}.jsonl"
    names = chosen_names(ladder, asked)
    train = Trainer(ladder, asked.overrides, asked.workers, done)
    if asked.tune:
        train = train.tuned()
    elif BASELINE not in names or asked.time_only:
        rates = baseline_of(ladder.which, size.steps, out)["rates"]
        train = train._replace(tuned_lines={name: tuple(lines) for name, lines in rates.items()})
    found = {name: Found() for name in names}
    if asked.time_only:
        records = read_records(out)
        found = {name: one for name, one in found.items() if (ladder.which, name) in records}
    else:
        if BASELINE in names:
            jobs = [train.job(BASELINE, seed, 1.0) for seed in size.seeds]
            found[BASELINE] = Found(tuple(train.run(jobs)))
            target = mean_loss(found[BASELINE].runs)
        else:
            target = baseline_of(ladder.which, size.steps, out)["metrics"]["target"]
        train.search(found, target)
    timed = train.timed(list(found))
    for name, one in found.items():
        record = records[ladder.which, name] if asked.time_only else record_of(train, name, one)
        if record and add_seconds(record, timed[name]) and asked.record:
            write(record, out)


def find_ladder(asked: Asked) -> Ladder:
    """The ladder of the requested scale, with the requested number of steps."""
    ladders = read_ladders()
    if asked.scale not in ladders:
        raise UserError(f"ladder: there is no scale {asked.scale}; there are {', '.join(ladders)}")
    ladder = ladders[asked.scale]
    if unknown := set(asked.only) - set(ladder.names):
        raise UserError(
            f"ladder: {asked.scale} has no rung {'; '.join(sorted(unknown))}. It has: "
            f"{'; '.join(ladder.names)}"
        )
    size = ladder.scale.size
    size = size._replace(steps=asked.steps or size.steps)
    return ladder._replace(scale=ladder.scale._replace(size=size))


def chosen_names(ladder: Ladder, asked: Asked) -> list[str]:
    """Names of the rungs or removals to train."""
    if asked.remove:
        return [
            name for name in ladder.removals if not asked.only or name[len(WITHOUT) :] in asked.only
        ]
    return [name for name in ladder.names if not asked.only or name in asked.only]


def baseline_of(which: str, steps: int, out: Path) -> Record:
    """The baseline's record. Raises UserError if there is none with as many steps."""
    record = read_records(out).get((which, BASELINE))
    if record is None or record["workload"]["steps"] != steps:
        raise UserError(
            f"ladder: the target is the loss of the baseline, and {out} has no record of {which} "
            f"{BASELINE} over {steps} steps; train it first: python -m benchmarks ladder --scale "
            f"{which} --only {BASELINE} --steps {steps} --record"
        )
    return record


class Found(NamedTuple):
    """Finished runs of one rung, and the first error."""

    runs: tuple[tuple[Job, Outcome], ...] = ()
    error: str | None = None


class Trainer(NamedTuple):
    """Trains the runs of a ladder, with their shared settings."""

    ladder: Ladder
    overrides: tuple[str, ...]
    workers: int
    done: Path  # JSON lines of the outcomes so far, from which the same command resumes
    tuned_lines: Mapping[str, tuple[str, ...]] = {}  # rung -> overrides found by tuning
    tried: Mapping[str, list[Record]] = {}  # rung -> losses of tuning

    def job(self, name: str, seed: int, length: float, *more: str) -> Job:
        """A run of a rung with `length` times the scale's steps."""
        size = self.ladder.scale.size
        steps = max(1, round(size.steps * length))
        return self._job(name, seed, steps, *more)

    def _job(self, name: str, seed: int, steps: int, *more: str) -> Job:
        size = self.ladder.scale.size._replace(steps=steps)
        lines = [*size.overrides, *self.overrides, *self.switch(name), *more]
        settings = settings_of(size._replace(overrides=()), (), tuple(map(size.filled, lines)))
        return Job(name, size.config, settings, seed, steps)

    def switch(self, name: str) -> tuple[str, ...]:
        """The rung's overrides, with tuned values after the overrides of their own rungs."""
        ladder = self.ladder
        rungs = tuple(
            r._replace(
                at={
                    **r.at,
                    ladder.which: (*r.at.get(ladder.which, ()), *self.tuned_lines.get(r.name, ())),
                }
            )
            for r in ladder.rungs
        )
        return ladder._replace(rungs=rungs).switch(name)

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Outcome]]:
        """The outcomes of jobs, several at a time."""
        yield from train_all(jobs, [], self.workers, self.done)

    def tuned(self) -> "Trainer":
        """A trainer with the best value of each tuned key.

        Each value has two runs with different seeds, since a single seed picks learning rates at
        which others diverge. The baseline's keys are tuned at the bottom of the ladder and all
        others at its top, so that both ends get the same budget.
        """
        which, top = self.ladder.which, self.ladder.names[-1]
        lines: dict[str, tuple[str, ...]] = {}
        tried: dict[str, list[Record]] = {}
        for rung in self.ladder.rungs:
            for key, values in rung.tune.get(which, {}).items():
                rows = self._tune(BASELINE if rung.name == BASELINE else top, key, values)
                best = min(rows, key=lambda row: row["bpb"] or math.inf)
                if best["bpb"] is None:
                    raise UserError(f"ladder: no value of {key} gave a finite loss on all seeds")
                lines[rung.name] = (*lines.get(rung.name, ()), best["switch"])
                tried.setdefault(rung.name, []).extend(rows)
        return self._replace(tuned_lines=lines, tried=tried)

    def _tune(self, end: str, key: str, values: Sequence[float]) -> list[Record]:
        """The mean loss of a rung for each value of a key; None if a seed has no finite loss."""
        seeds = self.ladder.scale.size.seeds[:TUNED_SEEDS]
        jobs = {
            switch: [self.job(end, seed, 1.0, switch) for seed in seeds]
            for switch in (f"{key}={value:g}" for value in values)
        }
        outcomes = dict(self.run(list(itertools.chain.from_iterable(jobs.values()))))
        rows = []
        for switch, runs in jobs.items():
            bpbs = [outcomes[job].bpb for job in runs]
            finite = [bpb for bpb in bpbs if bpb is not None and math.isfinite(bpb)]
            whole = len(finite) == len(bpbs)
            mean = round(statistics.mean(finite), 5) if whole else None
            rows.append({"switch": switch, "bpb": mean, "seeds": bpbs if whole else finite})
        return rows

    def search(self, found: dict[str, Found], target: float) -> None:
        """Train every rung but the baseline at growing or shrinking lengths around the target."""
        size, top = self.ladder.scale.size, self.ladder.names[-1]
        lengths = sorted(size.horizons)
        names = [name for name in found if name != BASELINE]
        walks = {
            (name, seed): {} for name in names
            for seed in (size.seeds if name == top else size.seeds[:1])
        }  # fmt: skip
        while True:
            jobs = {}
            for (name, seed), losses in walks.items():
                start = start_length(self.ladder, name, lengths)
                length = next_length(losses, target, lengths, start)
                if length is not None and not found[name].error:
                    jobs[self.job(name, seed, length)] = length
            if not jobs:
                return
            for job, outcome in self.run(list(jobs)):
                if outcome.error:
                    found[job.name] = found[job.name]._replace(error=outcome.error)
                    continue
                loss = outcome.bpb if finite_loss(outcome.bpb) else math.inf
                walks[job.name, job.seed][jobs[job]] = loss
                found[job.name] = Found((*found[job.name].runs, (job, outcome)))

    def timed(self, names: Sequence[str]) -> dict[str, list[Outcome]]:
        """Short runs of each rung, each alone on the device. All rungs alternate in several rounds,
        so that changes of a shared machine affect them equally."""
        scale = self.ladder.scale
        jobs = [
            self._job(name, turn, scale.timed_steps, *TIMED)
            for turn in range(scale.timed_rounds)
            for name in names
        ]
        outcomes: dict[str, list[Outcome]] = {name: [] for name in names}
        for job, outcome in train_all([], jobs, self.workers, self.done):
            if not outcome.error:
                outcomes[job.name].append(outcome)
        return outcomes


def finite_loss(bpb: float | None) -> bool:
    return bpb is not None and math.isfinite(bpb)


def mean_loss(runs: Sequence[tuple[Job, Outcome]]) -> float:
    """The target: the baseline's mean loss. Raises UserError if one of its runs failed."""
    for job, outcome in runs:
        if outcome.error or not finite_loss(outcome.bpb):
            raise UserError(
                f"ladder: {job.name} seed {job.seed} has no loss: {outcome.error or 'not finite'}"
            )
    return statistics.mean(outcome.bpb or 0.0 for _, outcome in runs)


def start_length(ladder: Ladder, name: str, lengths: Sequence[float]) -> float:
    """The length at which the search starts: longest for the lowest rung, medium for the top."""
    rung_index = len(ladder.names) - 1 if name.startswith(WITHOUT) else ladder.names.index(name)
    share = rung_index / (len(ladder.names) - 1)
    return lengths[round((len(lengths) - 1) * (1 - 0.6 * share))]


def next_length(
    losses: Mapping[float, float], target: float, lengths: Sequence[float], start: float
) -> float | None:
    """The length to train next; None if runs are on both sides of the target, or none is left.

    losses: length -> loss so far. lengths: all lengths, ascending.
    """
    if not losses:
        return start
    shortest, longest = min(losses), max(losses)
    if losses[shortest] <= target and shortest > lengths[0]:
        return lengths[lengths.index(shortest) - 1]
    if min(losses.values()) > target and longest < lengths[-1]:
        return lengths[lengths.index(longest) + 1]
    return None


# ---- records ---------------------------------------------------------------------------------


def record_of(train: Trainer, name: str, found: Found) -> Record | None:
    """The record of a rung's runs, without its seconds; None if no run has finished."""
    if not found.runs:
        return None
    ladder, (_, outcome) = train.ladder, found.runs[-1]
    assert outcome.env is not None
    size = ladder.scale.size
    workload = {"steps": size.steps, "data": data_name(train.overrides)}
    record = describe("ladder", ladder.which, name, workload, 1, outcome.env)
    record["command"] = command_of(train, name)
    record["switch"] = list(train.switch(name))
    record["metrics"] = {}
    if name == BASELINE:
        record["metrics"]["target"] = round(mean_loss(found.runs), 6)
        record["rates"] = {rung: list(lines) for rung, lines in train.tuned_lines.items()}
    record["rows"] = [
        {"seed": job.seed, "tokens": one.tokens, "bpb": round(one.bpb, 5), "fill": one.fill}
        for job, one in sorted(found.runs, key=lambda run: (run[0].seed, run[0].steps))
        if one.bpb is not None and finite_loss(one.bpb)
    ]
    if found.error:
        record["error"] = found.error
    for rung, rows in train.tried.items():
        if name == (BASELINE if rung == BASELINE else ladder.names[-1]):
            record["tuned"] = rows
    return record


def data_name(overrides: Sequence[str]) -> str | None:
    """The name of the training text's file or folder."""
    given = dict(one.split("=", 1) for one in overrides)
    path = given.get("data.train.path")
    return path and Path(path).name


def command_of(train: Trainer, name: str) -> str:
    """The command that trains this ladder again, given the training text in the working folder."""
    ladder, data = train.ladder, data_name(train.overrides)
    parts = ["python -m benchmarks ladder --scale", ladder.which]
    parts += ["--steps", str(ladder.scale.size.steps)]
    parts += ["--tune"] * bool(train.tried) + ["--remove"] * name.startswith(WITHOUT)
    return " ".join([*parts, "--record", *([f"data.train.path={data}"] if data else [])])


def add_seconds(record: Record, timed: Sequence[Outcome]) -> bool:
    """Add seconds per token (one value per round) and the bytes of a step to a record. Returns
    False if no run was timed."""
    rates = [o.seconds / o.tokens for o in timed if o.seconds is not None and o.tokens]
    if not rates:
        return False
    env = timed[-1].env or {}
    record.pop("file", None)
    record["metrics"] |= {
        "seconds_per_token": statistics.median(rates),
        "rounds": rates,
        "step_bytes": max(o.step_bytes or 0 for o in timed),
    }
    facts = {key: env.get(key) for key in ("device_kind", "commit", "when")}
    record["timed"] = facts | {"steady": True}  # without the start of each phase
    return True


def read_records(folder: Path = FOLDER) -> dict[tuple[str, str], Record]:
    """(scale, rung or removal) -> its record."""
    records = [json.loads(p.read_text()) | {"file": p.name} for p in sorted(folder.glob("*.json"))]
    return {(one["config"], one["variant"]): one for one in records}
