"""One plot of the runs of several `race` records: held-out loss over seconds, and memory.

    python -m benchmarks curves curves-gpt_d12-peers-nvidia_h200 --baseline nanochat

All runs must have the same device and the same validation text. The legend shows the seconds of
training (without compiling and validating) that each run needed to reach the baseline's lowest bits
per byte, and the GPU's peak memory if the record has it. Peers are dashed.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.race import EARLY, choose
from benchmarks.record import RESULTS
from jaxtrain.runs.compare import Curve
from jaxtrain.settings import UserError

ALIKE = ("config", "device", "device_count")
Entry = dict[str, Any]  # one run of a record


def draw_curves(names: Sequence[str], baseline: str | None, folder: Path) -> Path:
    """Write peers-CONFIG.png. names: records, by path or by name in results/.

    Raises UserError for a file that is no record of `race`, and for records of different devices.
    """
    if not names:
        raise UserError("curves: name the records, as in `curves curves-gpt_d12-peers-nvidia_h200`")
    records = [read(name) for name in names]
    first = records[0]
    for name, record in zip(names, records):
        for key in ALIKE:
            if record[key] != first[key]:
                raise UserError(
                    f"curves: {name} has {key} {record[key]}, but {names[0]} has {first[key]}; "
                    "runs of one picture share it"
                )
    runs = [e for record in records for e in record["runs"] if e["bpb"] is not None]
    labels = [e["label"] for e in runs]
    if twice := {label for label in labels if labels.count(label) > 1}:
        raise UserError(f"curves: {', '.join(sorted(twice))} is in two records")
    base = choose(runs, baseline or first["baseline"])
    path = folder / f"peers-{first['config']}.png"
    folder.mkdir(parents=True, exist_ok=True)
    figure_of(runs, base, f"{first['config']}, one {first['device']}").savefig(path)
    return path


def read(name: str) -> dict[str, Any]:
    """A record, by path or by its name in results/."""
    path = Path(name)
    if not path.is_file():
        path = RESULTS / f"{path.name.removesuffix('.json')}.json"
    if not path.is_file():
        raise UserError(f"curves: there is no record {name}, here or in {RESULTS}")
    record = json.loads(path.read_text("utf-8"))
    if not isinstance(record, dict) or record.get("bench") not in ("curves", "race"):
        raise UserError(f"curves: {name} is no record of `race`")
    return record


def seconds_to(e: Entry, target: float) -> float | None:
    """Seconds of training until a run reaches a loss; None if it never does."""
    steps, _, seconds, bpb = map(list, zip(*e["curve"]))
    found = Curve(steps, seconds, bpb).reaches(target)
    return found and found[1]


def described(e: Entry, seconds: float | None) -> str:
    """The legend entry of a run."""
    name = e["label"].replace("_", " ")
    came = f"{seconds:.0f} s" if seconds is not None else f"ends at {e['lowest']:.3f}"
    memory = f", {e['peak_bytes'] / 2**30:.1f} GiB" if "peak_bytes" in e else ""
    return f"{name}: {came}{memory}"


def figure_of(runs: Sequence[Entry], base: Entry, title: str) -> Figure:
    """Plot of bits per byte over seconds; the legend lists the fastest run to the target first."""
    target = base["lowest"]
    reached = {e["label"]: seconds_to(e, target) for e in runs}
    never = float("inf")
    rank = lambda e: (never if reached[e["label"]] is None else reached[e["label"]], e["lowest"])
    runs = sorted(runs, key=rank)
    figure = Figure(figsize=(9, 5), layout="constrained", dpi=150)
    axes: Axes = figure.subplots()
    for i, e in enumerate(runs):
        _, _, seconds, bpb = zip(*e["curve"])
        label = described(e, reached[e["label"]])
        look: dict[str, Any] = {"color": f"C{i}", "linewidth": 2.2, "zorder": 3 + len(runs) - i}
        look["linestyle"] = "--" if "peer" in e else "-"
        axes.plot(seconds, bpb, label=label, marker="o", markersize=3.5, **look)
        if (at := reached[e["label"]]) is not None:
            axes.plot([at], [target], "o", markersize=9, markeredgecolor="white", **look)
    shown = [p[3] for e in runs for p in e["curve"] if p[1] >= EARLY * e["tokens"]]
    low, high = min(shown), max(shown)
    axes.set_ylim(low - 0.04 * (high - low), high)
    axes.set_xlim(left=0)
    axes.axhline(target, color="0.4", linewidth=0.9, linestyle=":", zorder=0)
    axes.set_xlabel("seconds of training", fontsize=11)
    axes.set_ylabel("held-out bits per byte", fontsize=11)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    peaks = any("peak_bytes" in e for e in runs)
    heading = f"to {target:.3f} bits per byte{', peak memory' if peaks else ''}"
    axes.legend(title=heading, framealpha=0.85, edgecolor="none", fontsize=10)
    figure.suptitle(title)
    return figure
