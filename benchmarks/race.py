"""Races: comparison of runs with the same model and data order that differ only in the optimizer.

A run is named ARM_RATE (`adamw_1e-3`, `muon_plain_0.01`): runs of one arm differ in their learning
rates, and the best of them represents the arm. Runs are compared at their lowest bits per byte on
held-out text, since over several epochs a run may overfit and end above it. The speed-up of a run
to equal loss is the baseline's time to its lowest loss over the run's time to the same loss, with
linear interpolation between validations. So always validate on the same tokens: `eval.tokens=null`.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.record import describe
from jaxtrain.config import Config, tag_of, variants_of
from jaxtrain.runs.compare import Curve, Run, read_run, tokens_of, training_seconds
from jaxtrain.runs.job import leaves
from jaxtrain.runs.metrics import Number
from jaxtrain.settings import UserError

SAME = ("model", "data", "train", "mesh", "eval")  # sections that must be equal in a race
FREE = ("data.cache_dir", "data.local_cache", "data.prefetch", "data.prepare_workers")
FREE += ("data.skip_damaged",)
RATES = ("learning_rate", "lr", "weight_decay")  # suffixes of settings that are always listed
MAX_POINTS = 200  # points of a training curve
EARLY = 0.15  # first share of the tokens, which the figure may cut off


def race(
    run_dirs: Sequence[Path],
    baseline: str | None = None,
    differ: Sequence[str] = (),
    variant: str | None = None,
) -> dict[str, Any]:
    """The record of a race. baseline: the name of a run; default the best AdamW run.

    differ: further configuration sections, besides `optim`, in which the runs may differ; the
    record's bench is then `curves`, and its default baseline the first run. Raises UserError for a
    folder that is no run, and for runs that cannot be compared.
    """
    runs = [read_run(run_dir) for run_dir in run_dirs]
    if not runs:
        raise UserError(
            "race: name the run directories, as in `race runs/adamw_1e-3 runs/lion_1e-4`"
        )
    check_comparable(runs, differ)
    entries = sorted(map(entry, runs), key=lambda e: (e["bpb"] is None, e["lowest"], e["label"]))
    base = choose(entries, baseline or (runs[0].name if differ else None))
    for e in entries:
        e["to_baseline"] = reached(e["curve"], *lowest_point(base))
    env, train = runs[0].env, runs[0].config["train"]
    workload = {key: train[key] for key in ("batch_size", "sequence_length", "steps")}
    bench = "curves" if differ else "race"
    record = describe(
        bench, config_name(runs[0]), variant or "", workload, env["device_count"], env
    )
    return record | {"baseline": base["label"], "runs": entries}


# ---- reading ---------------------------------------------------------------------------------


def check_comparable(runs: Sequence[Run], differ: Sequence[str] = ()) -> None:
    """Raise UserError unless the runs differ only in their optimizer (and the sections `differ`)
    and have different names."""
    same = [section for section in (*SAME, "env") if section not in differ]
    first, *others = runs
    machine = lambda run: {f"env.{key}": run.env[key] for key in ("device_kind", "device_count")}
    facts = lambda run: leaves(run.config) | machine(run)
    for run in others:
        a, b = facts(first), facts(run)
        for key in a | b:
            if key.split(".")[0] in same and key not in FREE and a.get(key) != b.get(key):
                raise UserError(
                    f"race: {run.name} has {key}={b.get(key)}, but {first.name} has {a.get(key)}; "
                    "runs of a race differ in `optim` alone; --differ names a section besides"
                )
    names = [run.name for run in runs]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(f"race: {', '.join(sorted(twice))} is given more than once")


def config_name(run: Run) -> str:
    """The name of the configuration that the run was started with, or its depth."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    path = parser.parse_known_args(run.env["command"])[0].config
    return Path(path).stem if path else f"d{run.config['model']['depth']}"


def settings_of(optim: dict[str, Any]) -> dict[str, Any]:
    """All rates of an optimizer, and its other settings that are not the default."""
    kind = {tag_of(c): c for c in variants_of(Config.model_fields["optim"])}[optim["name"]]
    defaults = leaves(kind.model_validate({"name": optim["name"]}).model_dump(mode="json"))
    return {
        key: value
        for key, value in leaves(optim).items()
        if key != "name" and (key.endswith(RATES) or key not in defaults or defaults[key] != value)
    }


def entry(run: Run) -> dict[str, Any]:
    """The record's entry of one run; `bpb` and `loss` are None if it did not finish."""
    train = [row for row in run.rows if row["kind"] == "train"]
    checks = [row for row in run.rows if row["kind"] == "validation"]
    if not checks or not any("tokens_per_s" in row for row in train):
        raise UserError(f"race: {run.name} has no validation, or no step after its first")
    tokens_per_step = run.config["train"]["batch_size"] * run.config["train"]["sequence_length"]
    steps, seconds = training_seconds(train, tokens_per_step)
    at = lambda step: round(float(np.interp(step, steps, seconds)), 3)
    tokens = [0, *(tokens_of(row, tokens_per_step) for row in train)]
    seen = lambda step: round(np.interp(step, steps, tokens))
    curve = [
        [row["step"], seen(row["step"]), at(row["step"]), round(row["bpb"], 6)]
        for row in checks
        if row.get("bpb") is not None
    ]
    losses = [[row["step"], round(row["loss"], 5)] for row in train if row.get("loss") is not None]
    thin = -(-len(losses) // MAX_POINTS)
    sent = [row["sent_bytes"] for row in run.rows if "sent_bytes" in row]
    plain = [row["sent_bytes_plain"] for row in run.rows if "sent_bytes_plain" in row]
    ends = [row["status"] for row in run.rows if row.get("event") == "end"]
    finished = bool(curve) and curve[-1][0] == run.config["train"]["steps"]
    loss = checks[-1].get("loss")
    peak = peak_bytes(run)
    return {
        "label": run.name,
        "arm": run.name.rpartition("_")[0] or run.name,
        "optimizer": run.config["optim"]["name"],
        "settings": settings_of(run.config["optim"]),
        "status": "finished" if finished else (ends or ["killed"])[-1],
        "steps": steps[-1],
        "tokens": tokens[-1],
        "seconds": round(seconds[-1], 3),
        "tokens_per_s": round(median(r["tokens_per_s"] for r in train if "tokens_per_s" in r)),
        "bpb": curve[-1][3] if finished else None,
        "lowest": min(bpb for *_, bpb in curve) if finished else None,
        "loss": round(loss, 6) if finished and loss is not None else None,
        **({"peak_bytes": peak} if peak else {}),
        **({"peer": run.env["peer"]["name"]} if "peer" in run.env else {}),
        # Bytes sent per step and device with replicas (train.local_sgd), and with data parallelism.
        **({"sent_bytes": sent[-1], "sent_bytes_plain": plain[-1]} if sent else {}),
        "curve": curve,
        "train": losses[::-1][::thin][::-1],
    }


def peak_bytes(run: Run) -> int | None:
    """Peak bytes of the fullest GPU, from the peer's facts or our metrics; None on a CPU."""
    if "peer" in run.env:
        return run.env["peer"].get("peak_bytes")
    rows = [row["memory_bytes"] for row in run.rows if "memory_bytes" in row]
    return max(rows) if rows and not run.env["backend"].startswith("cpu") else None


# ---- comparing -------------------------------------------------------------------------------


def choose(entries: Sequence[dict[str, Any]], name: str | None) -> dict[str, Any]:
    """The baseline among entries that are sorted by their lowest bits per byte."""
    finished = [e for e in entries if e["bpb"] is not None]
    wanted = [
        e for e in finished if e["label"] == name or (name is None and e["optimizer"] == "adamw")
    ]
    if not wanted:
        what = f"called {name}" if name else "of AdamW; name one with --baseline"
        raise UserError(
            f"race: there is no finished run {what} (finished: "
            f"{', '.join(e['label'] for e in finished) or 'none'})"
        )
    return wanted[0]


def lowest_point(e: dict[str, Any]) -> tuple[Number, Number, Number]:
    """Bits per byte, step and second at a run's lowest held-out loss."""
    step, _, second, bpb = min(e["curve"], key=lambda point: point[3])
    return bpb, step, second


def reached(
    curve: Sequence[Sequence[Number]], target: Number, base_steps: Number, base_seconds: Number
) -> dict[str, Number] | None:
    """Steps and seconds to the target, and the speed-ups over the baseline; None if not reached."""
    steps, _, seconds, losses = map(list, zip(*curve)) if curve else ([],) * 4
    found = Curve(steps, seconds, losses).reaches(target)
    return found and {
        "steps": round(found[0], 1),
        "seconds": round(found[1], 3),
        "speedup_steps": round(base_steps / found[0], 4),
        "speedup_seconds": round(base_seconds / found[1], 4),
    }


def best_of_arms(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The best run of each arm, best first. An arm without a finished run has none."""
    best: dict[str, dict[str, Any]] = {}
    for e in record["runs"]:
        if e["bpb"] is not None:
            best.setdefault(e["arm"], e)
    return list(best.values())


# ---- the figure ------------------------------------------------------------------------------


def draw(record: dict[str, Any], path: Path) -> Path:
    """Write a PNG: bits per byte over tokens and over seconds, the best run of each arm in bold.

    In a record of `curves`, all runs are bold, each in its own colour.
    """
    curves = record["bench"] == "curves"
    best, arm = (record["runs"], "label") if curves else (best_of_arms(record), "arm")
    arms = list(dict.fromkeys([e[arm] for e in best] + [e[arm] for e in record["runs"]]))
    figure = Figure(figsize=(11, 4.6), layout="constrained", dpi=150)
    by_tokens, by_seconds = figure.subplots(1, 2, sharey=True)
    for e in reversed(record["runs"]):  # draws the best last, on top
        bold = e in best
        look: dict[str, Any] = {"color": f"C{arms.index(e[arm])}"}
        look |= {"linewidth": 2.2} if bold else {"linewidth": 0.9, "alpha": 0.55}
        _, tokens, seconds, bpb = zip(*e["curve"]) if e["curve"] else [()] * 4
        by_tokens.plot([n / 1e6 for n in tokens], bpb, **look)
        label = f"{e['label']}: {min(bpb):.4f}" if bold else None
        by_seconds.plot(seconds, bpb, label=label, **look)
    shown = [p[3] for e in best for p in e["curve"] if p[1] >= EARLY * e["tokens"]]
    low, high = min(shown), max(shown)
    by_tokens.set_ylim(low - 0.04 * (high - low), high)
    target = next(e["lowest"] for e in record["runs"] if e["label"] == record["baseline"])
    for axes, label in (
        (by_tokens, "training tokens (millions)"),
        (by_seconds, "seconds of training"),
    ):
        axes.axhline(target, color="0.4", linewidth=0.9, linestyle=":", zorder=0)
        axes.set_xlabel(label, fontsize=11)
        axes.set_xlim(left=0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    by_tokens.set_ylabel("validation bits per byte", fontsize=11)
    handles, labels = by_seconds.get_legend_handles_labels()
    title = "lowest bits per byte" if curves else "best of each arm: lowest bits per byte"
    look = {"framealpha": 0.85, "edgecolor": "none", "fontsize": 10}
    by_seconds.legend(handles[::-1], labels[::-1], title=title, **look)
    figure.suptitle(f"{record['config']}, {record['device']}; dotted: best of {record['baseline']}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path
