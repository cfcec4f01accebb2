"""The ladder's page, docs/benchmarks/ladder.md, and its plot, generated from the records."""

import itertools
import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from benchmarks.ladder import BASELINE, FOLDER, WITHOUT, Ladder, Record, read_ladders, read_records
from benchmarks.record import BENCHMARKS
from benchmarks.scales import tokens_to
from benchmarks.verdict_page import code
from benchmarks.verdicts import STUDENT

PAGE = BENCHMARKS.parent / "docs" / "benchmarks" / "ladder.md"
PICTURE = BENCHMARKS / "ladder.png"
CLAIM = 5.0  # claimed overall speed-up in seconds
NOISY = 0.1  # a larger spread between rounds is attributed to other load on the machine
PADDING = "packed rows"  # the rung whose gain depends on the lengths of the documents
Records = Mapping[tuple[str, str], Record]


class Tokens(NamedTuple):
    """Training tokens to the target, padding included; geometric mean over seeds."""

    mean: float
    interval: tuple[float, float] | None  # 95%; None for one seed
    bound: bool  # upper bound only: the shortest run is below the target already
    seeds: int


class Cost(NamedTuple):
    """Cost of a rung up to the target loss."""

    name: str
    tokens: Tokens | None  # None if no run reaches the target
    seconds_per_token: float
    step_bytes: int

    @property
    def seconds(self) -> float | None:
        return self.tokens and self.tokens.mean * self.seconds_per_token


def tokens_to_target(record: Record, target: float) -> Tokens | None:
    """Tokens to the target from a record's runs. None if the runs of a seed do not reach it."""
    rows, found, bound = record["rows"], [], False
    for seed in sorted({row["seed"] for row in rows}):
        ends = sorted((row["tokens"], row["bpb"]) for row in rows if row["seed"] == seed)
        if min(bpb for _, bpb in ends) > target:
            return None
        if ends[0][1] <= target:  # no extrapolation beyond the runs
            bound |= ends[0][1] < target
            found.append(float(ends[0][0]))
        else:
            found.append(tokens_to(target, ends)[0])
    if not found:
        return None
    interval = interval_of(found)
    return Tokens(statistics.geometric_mean(found), interval, bound, len(found))


def interval_of(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95% interval of the geometric mean (Student's t); None for one value."""
    if len(values) < 2:
        return None
    logs = list(map(math.log, values))
    half = STUDENT[len(logs)] * statistics.stdev(logs) / math.sqrt(len(logs))
    mean = statistics.mean(logs)
    return math.exp(mean - half), math.exp(mean + half)


def paired_interval(base: Record, top: Record) -> tuple[float, float] | None:
    """Interval of the baseline's seconds over the top's. None if a seed of the top does not reach
    the baseline's loss.

    Tokens are paired by seed: the target is the baseline's loss with that seed, and a shortest run
    below it counts as it is. Seconds per token are paired by round: the interval spans the smallest
    to the largest ratio, including the ratio of the medians.
    """
    ratios = []
    for row in base["rows"]:
        own = [r for r in top["rows"] if r["seed"] == row["seed"]]
        tokens = tokens_to_target(top | {"rows": own}, row["bpb"]) if own else None
        if tokens is None:
            return None
        ratios.append(row["tokens"] / tokens.mean)
    interval = interval_of(ratios)
    pairs = zip(base["metrics"]["rounds"], top["metrics"]["rounds"])
    rates = [one / other for one, other in pairs]
    rates.append(base["metrics"]["seconds_per_token"] / top["metrics"]["seconds_per_token"])
    return interval and (interval[0] * min(rates), interval[1] * max(rates))


def cost_of(record: Record, target: float) -> Cost:
    """The cost of a rung. The baseline needs all tokens of its runs, since its final loss is the
    target."""
    m = record["metrics"]
    if record["variant"] == BASELINE:
        tokens = [row["tokens"] for row in record["rows"]]
        found = Tokens(statistics.mean(tokens), None, False, len(tokens))
    else:
        found = tokens_to_target(record, target)
    return Cost(record["variant"], found, m["seconds_per_token"], m["step_bytes"])


class Total(NamedTuple):
    """The top of the ladder compared with the baseline."""

    factor: float  # the baseline's seconds over the top's
    interval: tuple[float, float] | None  # see paired_interval
    tokens: float  # the baseline's tokens over the top's
    seconds_per_token: float  # the baseline's over the top's
    padding: float | None  # the factor of the packing rung alone

    @property
    def verdict(self) -> str:
        if self.interval is None:
            return "is undecided"
        low, high = self.interval
        if low >= CLAIM:
            return "holds"
        return "does not hold" if high < CLAIM else "is undecided"


def total_of(costs: Sequence[Cost], interval: tuple[float, float] | None = None) -> Total | None:
    """The total of a ladder. None if the top does not reach the target, or is not recorded yet."""
    base, top = costs[0], costs[-1]
    if len(costs) < 2 or base.tokens is None or top.tokens is None:
        return None
    rate = base.seconds_per_token / top.seconds_per_token
    tokens = base.tokens.mean / top.tokens.mean
    steps = dict(zip([cost.name for cost in costs], factors(costs)))
    padding = steps.get(PADDING)
    return Total(tokens * rate, interval, tokens, rate, padding)


def factors(costs: Sequence[Cost]) -> list[float | None]:
    """Speed-up of each rung: seconds of the nearest rung below that reaches the target, over its
    own."""
    found, below = [], None
    for cost in costs:
        seconds = cost.seconds
        found.append(below / seconds if below and seconds else None)
        below = seconds or below
    return found


# ---- the page --------------------------------------------------------------------------------

HEAD = """# The ladder

<!-- Made by `python -m benchmarks ladder` from benchmarks/ladder.yaml and
benchmarks/results/ladder/. Do not edit. -->

<!-- figures: not measured: 5 times is the claim -->

What makes training faster, one rung at a time: from GPT-2's architecture and recipe to everything
that jaxtrain has. Each rung adds its switches to those of all rungs below it. A rung's cost is the
seconds of training to one held-out loss, the target: the loss of the baseline after its run. The
claim to prove or refute is at least {claim:g} times fewer seconds in all.

- `tokens` are training tokens to the target, padding counted. They are read between two runs, one
  that ends above the target and one that ends below. Each run has its whole decay of the learning
  rate. `<` means that the shortest run is below the target already.
- `seconds` are those tokens times the seconds of a token. Compiling and validating are left out.
  The seconds of a token come from short runs that no other run of the ladder disturbs, all rungs
  in turn, without the start of each phase; the median of the rounds counts.
- `factor` is the seconds of the rung below over those of the rung. `in all` is the seconds of the
  baseline over those of the rung.
- `memory` is what a compiled step needs. `bytes` is the baseline's memory over the rung's. From the
  rung `batch ramp` on it is that of the first steps, which have fewer rows than the others: the
  rung below it says what a whole step needs.
- Both ends have the same budget for tuning: as many values of AdamW's rate at the bottom as of
  Muon's at the top, each on two seeds. The rungs between have the rate of their end. No rung
  between is tuned by itself, and a factor depends on the order of the rungs.
- The ends have three seeds, the rungs between have one. A factor of one seed within 3% decides
  nothing. Brackets hold the 95% interval over seeds (Student's t). That of the factor in all pairs
  the seeds, and goes from the lowest to the highest round of the seconds of a token.
- The step is compiled (`jit`) in every rung. JAX without `jit` dispatches each operation by
  itself, and nobody trains that way: it is not measured here.
- The baseline has no dropout, which costs loss where each text is seen once. Its batches hold one
  document a row, as fine-tuning scripts of 2019 have them. Reproductions of GPT-2 join documents:
  so the total is also given without the rung `{padding}`.

![seconds to the target and memory of a step, by rung](../../benchmarks/{picture})
"""


def make_page(path: Path = PAGE, folder: Path = FOLDER, picture: Path = PICTURE) -> Path:
    """Write the page and its plot from the table and the records."""
    ladders, records = read_ladders(), read_records(folder)
    climbed = [one for one in ladders.values() if (one.which, BASELINE) in records]
    parts = [HEAD.format(claim=CLAIM, padding=PADDING, picture=picture.name)]
    parts += [section(one, records) for one in climbed]
    missing = [one for one in ladders.values() if one not in climbed]
    if missing:
        parts.append(not_measured(missing))
    parts.append(legend(list(ladders.values())))
    path.write_text("\n".join(parts))
    if climbed:
        draw({one.which: costs_of(one, records) for one in climbed}, picture)
    return path


def costs_of(ladder: Ladder, records: Records) -> list[Cost]:
    """Costs of the recorded rungs, the baseline first."""
    target = records[ladder.which, BASELINE]["metrics"]["target"]
    found = [records.get((ladder.which, name)) for name in ladder.names]
    return [cost_of(record, target) for record in found if record]


def section(ladder: Ladder, records: Records) -> str:
    """The tables of one scale."""
    base, costs = records[ladder.which, BASELINE], costs_of(ladder, records)
    losses = ", ".join(f"{row['bpb']:.4f}" for row in base["rows"])
    fill = base["rows"][0].get("fill")
    padded = "" if fill is None else f" {1 - fill:.0%} of its places are padding."
    steps, data = base["workload"]["steps"], base["workload"].get("data")
    size, target = ladder.scale.size, base["metrics"]["target"]
    tokens = sum(row["tokens"] for row in base["rows"]) / len(base["rows"])
    text = f"""## {ladder.which}: {size.depth} layers, {tokens / 1e6:.2f}M tokens

{base["device"]}, {f"`{data}`, " if data else ""}{steps} steps. The target is {target:.4f} bits
per byte, the mean of the baseline's seeds ({losses}).{padded}
{spread_text(ladder, records)}{edge_text(ladder, records)}

{summary(ladder, costs, records)}

| rung | tokens | seeds | seconds | factor | in all | memory | bytes |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""
    lines = list(rung_lines(ladder.which, costs, records))
    failed = [name for name in ladder.names if records.get((ladder.which, name), {}).get("error")]
    text += "\n".join(lines) + "\n"
    for name in failed:
        text += f"\nA run of `{name}` failed: {records[ladder.which, name]['error']}.\n"
    if left := [name for name in ladder.names if (ladder.which, name) not in records]:
        text += (
            f"\nNot measured: {', '.join(left)}. Their gains are in the factor of the next row.\n"
        )
    text += f"\nSettings: {code([f'--config {size.config}', *size.overrides])}.\n"
    text += f"Command: `{base['command']}`\n"
    return text + removals(ladder, costs, records)


def spread_text(ladder: Ladder, records: Records) -> str:
    """A sentence on the spread between rounds of one rung, caused by other load on the machine."""
    found = [records[ladder.which, n]["metrics"]["rounds"] for n in ladder.names
             if (ladder.which, n) in records]  # fmt: skip
    spread = max(max(rounds) / min(rounds) for rounds in found) - 1
    text = f"Rounds of one rung differ by up to {spread:.0%} in the seconds of a token"
    noisy = ": the machine had other work, and no factor of time within that decides anything"
    text = f"{text}{noisy if spread > NOISY else ''}."
    mine = {name: r for (which, name), r in records.items() if which == ladder.which}
    if started := [name for name, r in mine.items() if not r["timed"].get("steady")]:
        named = ", ".join(f"`{name}`" for name in started)
        whose = "all rungs" if len(started) == len(mine) else named
        text += (
            f" The seconds of {whose} hold the start of each phase, which fast rungs and rungs of "
            "two phases are full of: those are faster than the table says."
        )
    return text


def other_call_text(found: Sequence[Cost], top: Cost, which: str, records: Records) -> str:
    """A sentence if removals were timed at another commit than the top, so in another call."""
    commit_of = lambda cost: records[which, cost.name].get("timed", {}).get("commit")
    if all(commit_of(cost) == commit_of(top) for cost in found):
        return ""
    return (
        " Another call timed the top: up to 1.1x in the time of a token can be the difference "
        "between two machines."
    )


def edge_text(ladder: Ladder, records: Records) -> str:
    """A sentence on tuned values that are the first or last of those tried; empty without one."""
    found = []
    used = records.get((ladder.which, BASELINE), {}).get("rates", {})
    rates = set(itertools.chain.from_iterable(used.values()))
    for end in (BASELINE, ladder.names[-1]):
        rows = records.get((ladder.which, end), {}).get("tuned", [])
        for _, tried in itertools.groupby(rows, key=lambda row: row["switch"].partition("=")[0]):
            tried = sorted(tried, key=lambda row: float(row["switch"].partition("=")[2]))
            best = min(tried, key=lambda row: row["bpb"] or math.inf)
            if best in (tried[0], tried[-1]):
                where = "lowest" if best is tried[0] else "highest"
                found.append(f"`{best['switch']}` is the {where}{gain_text(best, tried, rates)}")
    if not found:
        return ""
    return f"\nOf the values tried, {' and '.join(found)}: one beyond may be better."


def gain_text(best: Record, tried: Sequence[Record], rates: Collection[str]) -> str:
    """Bits per byte between the best value tried and the value that the ladder has, if another."""
    own = [row for row in tried if row["switch"] in rates and row is not best]
    if not own or not own[0]["bpb"]:
        return ""
    gain = own[0]["bpb"] - best["bpb"]
    return f" ({gain:.4f} bits per byte below the ladder's `{own[0]['switch']}`)"


def summary(ladder: Ladder, costs: Sequence[Cost], records: Records) -> str:
    """A sentence on the overall factor and its parts."""
    top = ladder.names[-1]
    if costs[-1].name != top:
        return "The top is not measured yet."
    ends = records[ladder.which, BASELINE], records[ladder.which, top]
    total = total_of(costs, paired_interval(*ends))
    if total is None:
        return "The top does not reach the target."
    spread = f" [{total.interval[0]:.2f}, {total.interval[1]:.2f}]" if total.interval else ""
    text = (
        f"**In all {total.factor:.2f}x{spread} fewer seconds**: {total.tokens:.2f}x fewer tokens, "
        f"each {total.seconds_per_token:.2f}x faster. "
        f"The claim of at least {CLAIM:g}x {total.verdict} at this scale."
    )
    if total.padding:
        rest = total.factor / total.padding
        text += f" Without the rung `{PADDING}` ({total.padding:.2f}x) it is {rest:.2f}x."
    best = min((cost for cost in costs if cost.seconds), key=lambda cost: cost.seconds or 0.0)
    if best.name != ladder.names[-1] and best.seconds and costs[0].seconds:
        text += f" The best rung is `{best.name}`, {costs[0].seconds / best.seconds:.2f}x."
    return text


def rung_lines(which: str, costs: Sequence[Cost], records: Records) -> Iterator[str]:
    base = costs[0]
    for cost, factor in zip(costs, factors(costs)):
        link = f"../../benchmarks/results/ladder/{records[which, cost.name]['file']}"
        times = lambda value: "-" if value is None else f"{value:.2f}x"
        seconds = cost.seconds
        in_all = base.seconds / seconds if base.seconds and seconds else None
        yield (
            f"| [{cost.name}]({link}) | {tokens_text(cost.tokens)} "
            f"| {cost.tokens.seeds if cost.tokens else '-'} "
            f"| {'-' if seconds is None else f'{seconds:.1f}'} | {times(factor)} | {times(in_all)} "
            f"| {size_text(cost.step_bytes)} | {times(base.step_bytes / cost.step_bytes)} |"
        )


def tokens_text(tokens: Tokens | None) -> str:
    if tokens is None:
        return "not reached"
    spread = (
        ""
        if tokens.interval is None
        else f" [{tokens.interval[0] / 1e6:.3f}, {tokens.interval[1] / 1e6:.3f}]"
    )
    return f"{'<' * tokens.bound}{tokens.mean / 1e6:.3f}M{spread}"


def size_text(step_bytes: int) -> str:
    return (
        f"{step_bytes / 2**30:.2f} GiB" if step_bytes >= 2**29 else f"{step_bytes / 2**20:.0f} MiB"
    )


def removals(ladder: Ladder, costs: Sequence[Cost], records: Records) -> str:
    """The table of the top without each rung; the most costly removal first."""
    which, top = ladder.which, costs[-1]
    target = records[which, BASELINE]["metrics"]["target"]
    found = [
        cost_of(records[which, name], target)
        for name in ladder.removals
        if (which, name) in records
    ]
    if not found or top.name != ladder.names[-1] or top.tokens is None or top.seconds is None:
        return ""
    other = other_call_text(found, top, which, records)
    text = f"""
### {which}: the top without one rung

Above 1.00x the top needs the rung. With a rung go those that need it.{other}

| without | seconds | tokens | time of a token | memory | also without |
| --- | --- | --- | --- | --- | --- |
"""
    lines = []
    for cost in sorted(found, key=lambda cost: -(cost.seconds or math.inf)):
        name = cost.name.removeprefix(WITHOUT)
        others = [one for one in ladder.names if one in ladder.dropped(name) - {name}]
        link = f"../../benchmarks/results/ladder/{records[which, cost.name]['file']}"
        ratios = ("-", "not reached")
        if cost.tokens and cost.seconds:
            ratios = (
                f"{cost.seconds / top.seconds:.2f}x",
                f"{'<' * cost.tokens.bound}{cost.tokens.mean / top.tokens.mean:.2f}x",
            )
        lines.append(
            f"| [{name}]({link}) | {ratios[0]} | {ratios[1]} "
            f"| {cost.seconds_per_token / top.seconds_per_token:.2f}x "
            f"| {cost.step_bytes / top.step_bytes:.2f}x | {', '.join(others) or '-'} |"
        )
    return text + "\n".join(lines) + "\n"


def not_measured(ladders: Sequence[Ladder]) -> str:
    lines = [
        f"- {one.which}: `python -m benchmarks ladder --scale {one.which} --tune --record "
        "data.train.path=corpus`"
        for one in ladders
    ]
    return "## Not measured yet\n\n" + "\n".join(lines) + "\n"


def legend(ladders: Sequence[Ladder]) -> str:
    """The table that describes each rung; the longest ladder has all of them."""
    longest = max(ladders, key=lambda one: len(one.rungs))
    text = "## The rungs\n\n| rung | seam | switches | why | source |\n"
    text += "| --- | --- | --- | --- | --- |\n"
    lines = [
        f"| {rung.name} | {rung.seam or '-'} | {code(rung.set)} | {rung.why} | {rung.source} |"
        for rung in longest.rungs
    ]
    return text + "\n".join(lines) + "\n"


def draw(scales: Mapping[str, Sequence[Cost]], path: Path) -> Path:
    """Write a PNG: seconds to the target and bytes of a step by rung, one column per scale."""
    figure = Figure(figsize=(2 + 6 * len(scales), 7), layout="constrained", dpi=130)
    grid = figure.subplots(2, len(scales), squeeze=False, sharex="col")
    for column, (which, costs) in enumerate(scales.items()):
        names, places = [cost.name for cost in costs], list(range(len(costs)))
        seconds = [cost.seconds or math.nan for cost in costs]
        sizes = [cost.step_bytes / 2**20 for cost in costs]
        titles = ("seconds of training to the target", "MiB of a step")
        for axes, values, title in zip(grid[:, column], (seconds, sizes), titles):
            axes.step(places, values, where="mid", linewidth=1.8)
            axes.plot(places, values, "o", markersize=4, color="C0")
            axes.set_yscale("log")
            axes.set_ylabel(title)
            axes.grid(alpha=0.25, which="both")
            axes.spines[["top", "right"]].set_visible(False)
        grid[0, column].set_title(which)
        grid[1, column].set_xticks(places, names, rotation=90, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path
