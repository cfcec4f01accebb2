"""The verdicts' page, docs/verdicts.md, generated from techniques.yaml and the records."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.record import BENCHMARKS
from benchmarks.verdicts import (
    BASELINE,
    FOLDER,
    Record,
    Scale,
    Technique,
    gain,
    read_all,
    read_table,
    timed_on,
)

PAGE = BENCHMARKS.parent / "docs" / "verdicts.md"

HEAD = """# Verdicts

<!-- Made by `python -m benchmarks verdicts` from benchmarks/techniques.yaml and
benchmarks/results/verdicts/. Do not edit. -->

Each row is one technique, compared with the same model without it (the baseline) at equal loss.
`tokens` is a ratio: the baseline's tokens to the technique's last held-out loss, divided by the
technique's tokens. At 1.10x the baseline needs 10% more tokens. The baseline's tokens are
interpolated between runs of several lengths, each with its whole decay; `~` marks extrapolation.
Each table is of one device, which its rows were timed on, and so is its baseline; a record names
the device of its losses, where that is another. Brackets hold the 95% interval over paired seeds
(Student's t). A ratio from one seed decides nothing within 3%. `seconds` is the time per
token divided by the baseline's. Where the baseline's seconds varied within a call, a verdict has to
hold for the fastest and for the slowest of them. `bits` is the difference in bits per byte at equal
steps. `memory` is the bytes of a compiled step divided by the baseline's. A technique with another
tokenizer is compared by bytes of text in place of tokens. Its held-out loss covers as many tokens
(`eval.tokens`), which are more or less text.

Techniques have the baseline's learning rates unless their switch names others. The figures hold for
the model size and the number of tokens of their table. The last column has the paper's claim and
the scale of its experiments. Each record's `command` repeats its runs.

| verdict | meaning |
| --- | --- |
| use | faster to equal loss at no more memory, or at least 5% less memory at equal speed |
| situational | neither is certain, or memory is bought with time |
| avoid | slower to equal loss, and no less memory |
| not timed | the loss is measured, the seconds are not: no verdict yet |
"""


def make_page(path: Path = PAGE, folder: Path = FOLDER) -> Path:
    """Write docs/verdicts.md from the table and the records."""
    scales, techniques = read_table()
    records = read_all(folder)
    parts = [HEAD]
    for which, scale in scales.items():
        of_scale = [one for one in records if one["config"] == which]
        for baseline in [one for one in of_scale if one["variant"] == BASELINE]:
            same = [one for one in of_scale if timed_on(one) == timed_on(baseline)]
            rows = list(verdict_rows(techniques, same, baseline))
            parts.append(section(which, scale, baseline, rows))
    missing = [one.name for one in techniques.values() if not one.scales]
    untried = [
        one.name
        for one in techniques.values()
        if one.scales and one.name not in {record["variant"] for record in records}
    ]
    for title, names in (("Not compared by loss", missing), ("Not measured yet", untried)):
        if names:
            parts.append(f"## {title}\n\n" + listed([techniques[name] for name in names]))
    path.write_text("\n".join(parts))
    return path


def listed(techniques: Sequence[Technique]) -> str:
    """The list of techniques without a measurement."""
    lines = [f"- {one.name} ({one.paper}): {code(one.switch)}. {one.claim}" for one in techniques]
    return "\n".join(lines) + "\n"


def section(which: str, scale: Scale, baseline: Record, rows: Sequence[str]) -> str:
    """The table of one scale."""
    m = baseline["metrics"]
    curve = {
        tokens: statistics.mean(r["bpb"] for r in baseline["rows"] if r["tokens"] == tokens)
        for tokens in sorted({r["tokens"] for r in baseline["rows"]})
    }
    ends = ", ".join(f"{bpb:.4f} after {tokens / 1e6:.1f}M" for tokens, bpb in curve.items())
    low, high = m.get("seconds_range") or (m["seconds"], m["seconds"])
    span = "" if low == high else f" ({low:.2f} to {high:.2f} s in one call)"
    took = f"{m['seconds']:.2f} s of training{span} and " if m["seconds"] else ""
    device = baseline["device"]
    text = f"""## {which}: {scale.depth} layers, {m["tokens"] / 1e6:.1f}M tokens, {device}

The baseline takes {took}{m["step_bytes"] / 2**30:.2f} GiB a step. Its bits
per byte by tokens, mean over seeds: {ends}.
Settings: {code([f"--config {scale.config}", *scale.overrides])}.

| technique | seam | switch | tokens | seeds | seconds | bits | memory | verdict | claim |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""
    return text + "\n".join(rows) + "\n"


def verdict_rows(
    techniques: Mapping[str, Technique], records: Sequence[Record], baseline: Record
) -> Iterator[str]:
    """Lines of a table, most tokens saved first. records: of the baseline's scale and device."""
    found = [
        (gain(record, baseline), techniques[record["variant"]], record)
        for record in records
        if record["variant"] in techniques
    ]
    for g, one, record in sorted(found, key=lambda row: -row[0].tokens):
        link = f"../benchmarks/results/verdicts/{record['file']}"
        spread = "" if g.interval is None else f" [{g.interval[0]:.2f}, {g.interval[1]:.2f}]"
        times = lambda ratio: "-" if ratio is None else f"{ratio:.2f}x"
        yield (
            f"| [{one.name}]({link}) ({one.paper}) | {one.seam} | {code(record['switch'])} "
            f"| {'~' * g.outside}{g.tokens:.2f}x{spread} | {g.seeds} | {times(g.seconds)} "
            f"| {g.bpb:+.4f} | {times(g.memory)} | {g.verdict} | {one.claim} |"
        )


def code(parts: Sequence[str]) -> str:
    return " ".join(f"`{part}`" for part in parts).replace("|", "\\|")
