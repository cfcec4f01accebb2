"""Index of the record behind each figure of README and docs, and of what was never measured.

A section with a figure names its records: in its text (`race-gpt_d12-nvidia_h200.json`), by a
generated table, or by a comment, which also applies to its subsections:

    <!-- figures: step-gpt_d12-bf16-nvidia_h200.json verdicts/*.json -->
    <!-- figures: command: jaxtrain train --config gpt_d12 --dry-run -->   computed, not measured
    <!-- figures: no record: WHY -->                                    measured, nothing was kept
    <!-- figures: not measured: WHY -->                       a definition or another's figure
"""

import json
import re
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

from benchmarks.record import BENCHMARKS, RESULTS, Record
from jaxtrain.estimate.traffic import RATES
from jaxtrain.settings import UserError

ROOT = BENCHMARKS.parent
INDEX = ROOT / "docs" / "benchmarks" / "figures.md"
NOT_MEASURED = ROOT / "docs" / "benchmarks" / "not-measured.md"
# Generated pages: from records (with their own links), or from the configuration.
GENERATED = (
    "docs/verdicts.md",
    "docs/reference/compression.md",
    "docs/reference/support-matrix.md",
    "docs/benchmarks/figures.md",
    "docs/benchmarks/not-measured.md",
)
KEPT_SINCE = "2026-11-25T13"  # records since then store their command
UNITS = r"tokens/s|ms|s|GiB|MiB|TF/s|GB/s|MB/s|bits per byte|minutes|seconds|times"
FIGURE = re.compile(rf"(?<![\w.])\d[\d,.]*\s?[kMG]?\s?(?:{UNITS})\b|(?<![\w.])\d\.\d\d+\b")
# Numbers in these are no figures: code, comments, generated tables, papers, versions.
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
NO_FIGURES = re.compile(
    r"<!-- table .*?<!-- end -->|<!--.*?-->|`[^`\n]*`|arXiv:[\d.]+|Python\s+3\.\d+"
    r"|abs/[\d.]+",
    re.DOTALL | re.MULTILINE,
)
MARKER = re.compile(r"<!-- figures: (.*?) -->", re.DOTALL)
JSON_NAME = re.compile(r"[\w{},./*-]+\.json\b")
KINDS = ("command", "no record", "not measured")
COMPUTED = (
    "preflight",
    "projection",
    "at_scale",
)  # benches whose figures are computed, not measured
# Device families that the dry run's table lacks.
OTHERS = ("TPU v4", "TPU v5e", "TPU v5p", "TPU v6e", "AMD MI300X")


INDEX_HEAD = """# Where each figure comes from

<!-- Made by `python -m benchmarks table`. Do not edit. -->

Each section of the README and the manual that has figures, with the JSON files that hold them (in
`benchmarks/results/`) and the commands that measure them again. A file without a command was
recorded before commands were kept. `python -m benchmarks check` measures the records of a CPU again
({doc}`../explanation/measuring`).
"""
NOT_MEASURED_HEAD = """# What was never measured

<!-- Made by `python -m benchmarks table` from the devices of all records. Do not edit. -->

Records exist of these devices:

"""
DEVICES_HEAD = """
More devices at once, and several hosts, were not measured. Tests run several devices and processes
on virtual CPU devices: they check numbers, not speed.

## Devices without a measurement

The dry run estimates the memory of GPUs in this list; nothing ran there:

"""


class Section(NamedTuple):
    """A page section and the sources of its figures. words: kind and text of each marker."""

    page: str
    title: str
    figures: tuple[str, ...]
    records: tuple[str, ...]  # paths under benchmarks/results
    words: tuple[tuple[str, str], ...]
    missing: tuple[str, ...]  # names in markers that match no record


def pages() -> list[Path]:
    """README, BENCHMARKS and the manual, without generated pages."""
    found = [ROOT / "README.md", ROOT / "BENCHMARKS.md", *sorted((ROOT / "docs").rglob("*.md"))]
    names = {path: path.relative_to(ROOT).as_posix() for path in found}
    return [
        path for path, name in names.items()
        if name not in GENERATED and "_build" not in path.parts and "/fields/" not in name
    ]  # fmt: skip


def sections_of(page: str, text: str) -> Iterator[Section]:
    """The sections of a page that have figures."""
    above: list[tuple[int, list[str]]] = []  # (depth, markers) of the enclosing headings
    for part in re.split(r"^(?=#{1,6} )", FENCED.sub("", text), flags=re.MULTILINE):
        heading = re.match(r"(#+) (.*)", part)
        depth, title = (len(heading[1]), heading[2]) if heading else (0, "")
        above = [(level, markers) for level, markers in above if level < depth]
        above.append((depth, MARKER.findall(part)))
        markers = [marker for _, found in above for marker in found]
        figures = tuple(FIGURE.findall(NO_FIGURES.sub(" ", part)))
        if not figures:
            continue
        words, given = [], []
        for marker in markers:
            kind, colon, rest = marker.partition(": ")
            if colon and kind in KINDS:
                words.append((kind, " ".join(rest.split())))
            else:
                given += marker.split()
        missing = tuple(name for name in given if not expand(name))
        named = [*given, *JSON_NAME.findall(MARKER.sub("", part))]
        records = dict.fromkeys(path for name in named for path in expand(name))
        yield Section(page, title, figures, tuple(records), tuple(words), missing)


def expand(name: str) -> list[str]:
    """The records that match a name with {a,b} and *, as paths under benchmarks/results."""
    options = [part.split(",") for part in re.findall(r"{(.*?)}", name)]
    pattern = re.sub(r"{.*?}", "{}", name).rpartition("results/")[2].lstrip("/")
    found = []
    for chosen in product(*options):
        one = pattern.format(*chosen)
        paths = list(RESULTS.glob(one)) or list((RESULTS / "history").glob(one))
        found += sorted(path.relative_to(RESULTS).as_posix() for path in paths)
    return found


def all_sections() -> list[Section]:
    """Every section with figures."""
    return [
        section
        for path in pages()
        for section in sections_of(path.relative_to(ROOT).as_posix(), path.read_text())
    ]


def read_record(name: str) -> Record:
    """A record by its path under benchmarks/results. Raises UserError if it does not exist."""
    try:
        return json.loads((RESULTS / name).read_text()) | {"file": name}
    except FileNotFoundError:
        raise UserError(f"there is no record benchmarks/results/{name}") from None


def command_of(record: Record) -> str | None:
    """The command that measures a record again; None if it was not stored."""
    return record.get("command")


def problems(section: Section) -> list[str]:
    """Problems of a section: figures without a source, missing records, records without command."""
    where = f"{section.page}, {section.title!r}"
    found = [f"{where}: there is no record {name}" for name in section.missing]
    if not section.records and not section.words:
        found.append(f"{where}: {section.figures[0]!r} has no record; name its JSON or its command")
    for name in section.records:
        record = read_record(name)
        if not command_of(record) and record.get("when", "") >= KEPT_SINCE:
            found.append(f"{where}: {name} has no command")
    return found


# ---- the pages -------------------------------------------------------------------------------


def index_page(sections: Sequence[Section]) -> str:
    """The records and commands of every section with figures."""
    lines = [INDEX_HEAD]
    page = None
    for section in sections:
        if section.page != page:
            page = section.page
            lines += [f"## {page}", ""]
        lines += [f"**{section.title}**", ""]
        lines += [f"- {kind}: {text}" for kind, text in section.words if kind != "command"]
        lines += [f"- computed: `{text}`" for kind, text in section.words if kind == "command"]
        by_command: dict[str | None, list[str]] = {}
        for name in section.records:
            by_command.setdefault(command_of(read_record(name)), []).append(name)
        for command, names in by_command.items():
            files = ", ".join(f"`{name}`" for name in names)
            lines.append(f"- {files}" + (f": `{command}`" if command else ""))
        lines.append("")
    return "\n".join(lines)


def measured_devices(records: Sequence[Record]) -> dict[str, int]:
    """Devices that records were measured on -> the most of them in one record. Dry runs do not
    count, since their figures are computed."""
    found: dict[str, int] = {}
    for record in records:
        if record.get("bench") not in COMPUTED and "compiled" not in record["device"]:
            name = record["device"].split(",")[0]
            found[name] = max(found.get(name, 0), record.get("device_count") or 1)
    return found


def every_record() -> list[Record]:
    """All records, including those of earlier versions."""
    return [
        read_record(path.relative_to(RESULTS).as_posix())
        for path in sorted(RESULTS.rglob("*.json"))
        if not path.stem.endswith("-profile")
    ]


def not_measured_page(records: Sequence[Record], sections: Sequence[Section]) -> str:
    """The page of devices and features that no record covers."""
    devices = measured_devices(records)
    plain = lambda name: re.sub(r"[^a-z0-9]", "", name.lower())
    has = lambda kind: any(plain(kind) in plain(name) for name in devices)
    never = [kind for kind in (*RATES, *OTHERS) if not has(kind)]
    virtual = {"cpu": " (virtual devices of one CPU)"}
    listed = [
        f"- {name}, at most {count} at once{virtual.get(name, '')}"
        for name, count in sorted(devices.items())
    ]
    lost: dict[str, str] = {}  # by marker text, since subsections repeat a marker
    for section in sections:
        for kind, text in section.words:
            if kind == "no record":
                lost.setdefault(text, f"- {section.page}, {section.title}: {text}")
    text = NOT_MEASURED_HEAD + "\n".join(listed) + "\n" + DEVICES_HEAD
    text += "\n".join(f"- {kind.replace('-', ' ')}" for kind in never) + "\n"
    if lost:
        text += "\n## Figures whose record was not kept\n\n" + "\n".join(lost.values()) + "\n"
    return text


def update_figure_pages(index: Path = INDEX, not_measured: Path = NOT_MEASURED) -> list[Path]:
    """Write both pages."""
    sections = all_sections()
    index.write_text(index_page(sections))
    not_measured.write_text(not_measured_page(every_record(), sections))
    return [index, not_measured]
