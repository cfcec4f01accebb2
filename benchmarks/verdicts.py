"""The verdict table: gain of each technique over a tuned baseline, docs/verdicts.md.

    python -m benchmarks verdicts d4 NAME ... data.train.path=... --record    trains, and records
    python -m benchmarks verdicts d4 NAME ... --tune --record      tries the values of `tune` first
    python -m benchmarks verdicts d4 --time-only ...               renews the seconds of records
    python -m benchmarks verdicts                                  makes the page from the records

The baseline is trained for several lengths, each with its full decay (Kaddour et al. 2023, No
Train No Gain, arXiv:2307.06440): its tokens to a loss are interpolated between their ends. A
technique's gain in tokens is the baseline's tokens to the technique's final loss over the
technique's tokens; its gain in time also divides by the ratio of seconds per token. If a technique
changes the tokenizer, bytes of text are counted instead of tokens.
"""

import itertools
import json
import math
import re
import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from benchmarks.record import BENCHMARKS, RESULTS, describe, write
from benchmarks.scales import Scale, settings_of, tokens_to
from benchmarks.verdict_runs import Job, Outcome, train_all
from jaxtrain.config import find_config, load_config
from jaxtrain.data.batches.mixture import sources_of
from jaxtrain.data.files.sources import find_files
from jaxtrain.settings import UserError
from jaxtrain.storage.strict_yaml import read_yaml

Record = dict[str, Any]
TABLE = BENCHMARKS / "techniques.yaml"
FOLDER = RESULTS / "verdicts"
BASELINE = "baseline"
# 97.5% quantiles of Student's t with n - 1 degrees of freedom, n = 2 to 6 seeds.
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571}
OWN_STEPS = re.compile(r"\b(until|round_steps): ")  # switch settings that depend on run length
LESS_MEMORY = 0.95  # largest ratio to the baseline's bytes that counts as less memory
ONE_SEED = 1.03  # smallest speed-up of a single seed that counts: seeds differ by 0.005 bits


class Technique(NamedTuple):
    """An entry of techniques.yaml."""

    name: str
    seam: str
    paper: str
    switch: tuple[str, ...]
    scales: tuple[str, ...]
    claim: str = ""  # the paper's claim, with its scale
    tune: Mapping[str, tuple[float, ...]] = {}  # key of the switch -> values that `--tune` tries


class Gain(NamedTuple):
    """A technique's gain over the baseline at one scale. Intervals: 95%; None for one seed."""

    tokens: float  # the baseline's tokens (or bytes) to the technique's loss, over the technique's
    interval: tuple[float, float] | None
    seconds: float | None  # seconds per token over the baseline's; None if not timed alone
    bpb: float  # difference to the baseline's run with equally many steps, mean over seeds
    memory: float | None  # bytes of a compiled step over the baseline's
    seeds: int
    outside: bool  # the loss is outside the range of the baseline's runs
    seconds_range: tuple[float, float] | None = None  # over its slowest and its fastest run

    @property
    def verdict(self) -> str:
        """use: significantly faster to equal loss, or less memory at equal speed. avoid:
        significantly slower without less memory. situational: all others."""
        if self.seconds is None or self.memory is None:
            return "not timed"
        low, high = self.interval or (self.tokens / ONE_SEED, self.tokens * ONE_SEED)
        fast, slow = self.seconds_range or (self.seconds, self.seconds)
        low, high = low / slow, high / fast
        saves = self.memory <= LESS_MEMORY
        if (low > 1 and self.memory <= 1 / LESS_MEMORY) or (saves and low > 1 / ONE_SEED):
            return "use"
        return "avoid" if high < 1 and not saves else "situational"


def read_table(path: Path = TABLE) -> tuple[dict[str, Scale], dict[str, Technique]]:
    """The scales and the techniques. Raises UserError for a technique of an unknown scale."""
    tree = read_yaml(path)
    scales = TypeAdapter(dict[str, Scale]).validate_python(tree["scales"])
    rows = {name: {"name": name} | row for name, row in tree["techniques"].items()}
    techniques = TypeAdapter(dict[str, Technique]).validate_python(rows)
    for one in techniques.values():
        if unknown := set(one.scales) - scales.keys():
            raise UserError(f"{path.name}: {one.name} names no scale of it: {', '.join(unknown)}")
    return scales, techniques


# ---- training --------------------------------------------------------------------------------


def train_verdicts(
    arguments: Sequence[str],
    workers: int,
    record: bool,
    out: Path | None,
    time_only: bool = False,
    tune: bool = False,
) -> None:
    """Train techniques (default all) at a scale.

    arguments: the scale's name, techniques' names, key.path=value. time_only: one run of each
    technique alone; its seconds and bytes update the existing record. tune: the first seed tries
    each value of a technique's `tune`; all seeds train with the best.
    """
    scales, techniques = read_table()
    overrides = tuple(one for one in arguments if "=" in one)
    which, *names = [one for one in arguments if "=" not in one]
    if which not in scales:
        raise UserError(f"verdicts: there is no scale {which}; there are {', '.join(scales)}")
    scale, records = scales[which], read_records()
    here = [one.name for one in techniques.values() if which in one.scales]
    if unknown := set(names) - {BASELINE, *here}:
        raise UserError(
            f"verdicts: {which} has no technique {'; '.join(sorted(unknown))}. It has: "
            f"{'; '.join([BASELINE, *here])}"
        )
    check_text(scale, overrides)
    chosen = names or [BASELINE, *here]
    if time_only:
        scale = scale._replace(seeds=scale.seeds[:1], horizons=(1.0,))
        chosen = [name for name in chosen if (which, name) in records]
    switches = {name: switch_of(name, techniques, scale) for name in chosen}
    if time_only:  # a tuned technique runs with its recorded values
        switches = {name: tuple(records[which, name]["switch"]) for name in chosen}
    done = Path("runs") / "verdicts" / f"{which}.jsonl"
    tried: dict[str, list[Record]] = {}
    if tune:
        tuning = tuning_jobs(scale, techniques, switches, overrides)
        for job, outcome in train_all(tuning, [], workers, done):
            if outcome.bpb is not None and math.isfinite(outcome.bpb):
                switch = list(job.overrides[-len(techniques[job.name].tune) :])
                row = {"switch": switch, "bpb": outcome.bpb}
                tried.setdefault(job.name, []).append(row)
        for name in sorted({job.name for job in tuning} - tried.keys()):
            print(f"{name}: left out, for no value of `tune` gave a finite loss", flush=True)
            del switches[name]
        for name, rows in tried.items():
            switches[name] = (*switches[name], *min(rows, key=lambda row: row["bpb"])["switch"])
    if BASELINE not in chosen and any(map(another_tokenizer, switches.values())):
        baseline = records.get((which, BASELINE))
        if baseline is not None:
            bytes_per_token(baseline)  # raise now, not after the training
    jobs, timed = jobs_of(scale, switches, overrides, warm=workers > 1)
    found: dict[str, dict[Job, Outcome]] = {name: {} for name in chosen}
    alone = {job.name: job for job in timed}
    for job, outcome in train_all(jobs, timed, workers, done):
        if job.steps > 2:
            found[job.name].pop(job, None)  # drop the run that compiled; the last one ran alone
            found[job.name][job] = outcome
        if record and job == alone[job.name]:
            if time_only:
                save_seconds(records[which, job.name], outcome, out or FOLDER)
            else:
                runs, tuned = list(found[job.name].items()), tried.get(job.name, [])
                save(which, scale, switches[job.name], runs, out or FOLDER, tuned)


def check_text(scale: Scale, overrides: tuple[str, ...]) -> None:
    """Raise UserError if the training text is missing."""
    config = load_config(find_config(scale.config), settings_of(scale, overrides, ()))
    try:
        for source in sources_of(config.data.train).values():
            find_files(source)
    except UserError as error:
        raise UserError(f"{error}; data.train.path=... names the text to train on") from error


def switch_of(name: str, techniques: Mapping[str, Technique], scale: Scale) -> tuple[str, ...]:
    """The overrides of a technique at a scale."""
    return () if name == BASELINE else tuple(map(scale.filled, techniques[name].switch))


def tuning_jobs(
    scale: Scale,
    techniques: Mapping[str, Technique],
    switches: Mapping[str, tuple[str, ...]],
    overrides: tuple[str, ...],
) -> list[Job]:
    """A run with the first seed for each combination of a technique's values to tune."""
    jobs = []
    for name, switch in switches.items():
        values = techniques[name].tune if name != BASELINE else {}
        for chosen in itertools.product(*values.values()) if values else ():
            tuned = [f"{key}={value:g}" for key, value in zip(values, chosen)]
            settings = settings_of(scale, overrides, (*switch, *tuned))
            jobs.append(Job(name, scale.config, settings, scale.seeds[0], scale.steps))
    return jobs


def jobs_of(
    scale: Scale,
    switches: Mapping[str, tuple[str, ...]],
    overrides: tuple[str, ...],
    warm: bool = True,
) -> tuple[list[Job], list[Job]]:
    """(Runs that may share the GPU, one run of each technique that is timed alone).

    warm: at a scale with one seed, the former have two steps each and only compile, several at a
    time. A run whose switch depends on its steps (the end of a phase, a round) is full-length
    there. Otherwise a program compiled later would autotune on the GPU while another run is timed.
    """
    jobs, timed = [], []
    warm = warm and len(scale.seeds) == 1
    for name, switch in switches.items():
        settings = settings_of(scale, overrides, switch)
        for horizon in scale.horizons if name == BASELINE else (1.0,):
            for seed in scale.seeds:
                steps = round(scale.steps * horizon)
                job = Job(name, scale.config, settings, seed, steps)
                first = seed == scale.seeds[0] and steps == scale.steps
                (timed if first else jobs).append(job)
                if first and warm:
                    own = OWN_STEPS.search(" ".join(switch))
                    jobs.append(job if own else job._replace(steps=2))
    return sorted(jobs, key=lambda job: -job.seed), timed  # each program is compiled once


def save(
    which: str,
    scale: Scale,
    switch: Sequence[str],
    runs: Sequence[tuple[Job, Outcome]],
    out: Path,
    tuned: Sequence[Record] = (),
) -> None:
    """Write the record of a technique's runs; the last one ran alone on the device."""
    (last, alone), name = runs[-1], runs[-1][0].name
    if alone.error:
        return
    assert alone.env is not None
    record = describe("verdict", which, name, {"steps": scale.steps}, 1, alone.env)
    words = ["python", "-m", "benchmarks", "verdicts", which, name, "--record"]
    record["command"] = shlex.join(words)
    record["switch"] = list(switch)
    record["metrics"] = seconds_of(alone) | {
        "step_bytes": alone.step_bytes,
        "tokens": alone.tokens,
        "text_bytes": alone.text_bytes,
        "steps": last.steps,
    }
    record["rows"] = [
        {"seed": job.seed, "tokens": outcome.tokens, "bpb": round(outcome.bpb, 5)}
        for job, outcome in sorted(runs, key=lambda run: (run[0].steps, run[0].seed))
        if outcome.bpb is not None and outcome.tokens is not None
    ]
    if tuned:
        record["tuned"] = list(tuned)
    write(record, out)


def seconds_of(alone: Outcome) -> Record:
    """The seconds of a run that ran alone, and their range if it ran twice."""
    found: Record = {"seconds": round(alone.seconds or 0, 3)}
    if alone.seconds_range:
        found["seconds_range"] = [round(x, 3) for x in alone.seconds_range]
    return found


def save_seconds(record: Record, alone: Outcome, out: Path) -> None:
    """Update a record with the seconds and bytes of a run that ran alone; its losses stay."""
    if alone.error:
        return
    assert alone.env is not None and alone.bpb is not None
    record = {name: value for name, value in record.items() if name != "file"}
    record["metrics"].pop("seconds_range", None)
    record["metrics"] |= seconds_of(alone) | {"step_bytes": alone.step_bytes}
    record["metrics"]["text_bytes"] = alone.text_bytes
    of_run = {name: alone.env.get(name) for name in ("device_kind", "commit", "when")}
    record["timed"] = of_run | {"bpb": round(alone.bpb, 5)}
    write(record, out)


# ---- judging ---------------------------------------------------------------------------------


def another_tokenizer(switch: Sequence[str]) -> bool:
    return any(one.startswith("data.tokenizer") for one in switch)


def bytes_per_token(record: Record) -> float:
    """Bytes of text per token of a run. Raises UserError if the record lacks them."""
    m = record["metrics"]
    if not m.get("text_bytes"):
        which, name = record["config"], record["variant"]
        raise UserError(
            f"a technique with another tokenizer is compared by bytes of text, and the record of "
            f"{which} {name} has no text_bytes: python -m benchmarks verdicts {which} {name!r} "
            "--time-only --record adds them"
        )
    return m["text_bytes"] / m["tokens"]


def text_per_token(record: Record, baseline: Record) -> float:
    """Bytes per token of a technique over the baseline's. With the same tokenizer it is 1, since
    different bytes from another data order are no gain."""
    if not another_tokenizer(record.get("switch", ())):
        return 1.0
    return bytes_per_token(record) / bytes_per_token(baseline)


def gain(record: Record, baseline: Record) -> Gain:
    """The gain of a technique over the baseline of its scale, from pairs of equal seeds."""
    base, own, text = baseline["metrics"], record["metrics"], text_per_token(record, baseline)
    logs, differences, outside = [], [], False
    for row in record["rows"]:
        frontier = sorted(
            (r["tokens"], r["bpb"]) for r in baseline["rows"] if r["seed"] == row["seed"]
        )
        tokens, beyond = tokens_to(row["bpb"], frontier)
        logs.append(math.log(tokens / row["tokens"] / text))
        differences.append(row["bpb"] - dict(frontier)[base["tokens"]])
        outside |= beyond
    mean, n = statistics.mean(logs), len(logs)
    half = STUDENT[n] * statistics.stdev(logs) / math.sqrt(n) if n > 1 else None
    interval = None if half is None else (math.exp(mean - half), math.exp(mean + half))
    seconds = seconds_range = memory = None
    if base["seconds"] and own["seconds"]:
        seconds = own["seconds"] / own["tokens"] / (base["seconds"] / base["tokens"]) / text
        fast, slow = base.get("seconds_range") or (base["seconds"], base["seconds"])
        seconds_range = seconds * base["seconds"] / slow, seconds * base["seconds"] / fast
    if base["step_bytes"] and own["step_bytes"]:
        memory = own["step_bytes"] / base["step_bytes"]
    bits = statistics.mean(differences)
    return Gain(math.exp(mean), interval, seconds, bits, memory, n, outside, seconds_range)


def read_all(folder: Path = FOLDER) -> list[Record]:
    """All records; `file` is the file name."""
    return [json.loads(p.read_text()) | {"file": p.name} for p in sorted(folder.glob("*.json"))]


def read_records(folder: Path = FOLDER) -> dict[tuple[str, str], Record]:
    """(scale, technique) -> its record; with several devices, the newest."""
    records = sorted(read_all(folder), key=lambda one: one["when"])
    return {(one["config"], one["variant"]): one for one in records}


def timed_on(record: Record) -> str:
    """The device that the seconds of a record were measured on."""
    return record.get("timed", {}).get("device_kind") or record["device"]
