"""Records as tables, on the screen and in the manual, so that prose never holds a number."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.columns import (
    AT_SCALE,
    ATTENTION,
    BESIDE,
    CASE,
    COMPRESS,
    DATA,
    DECODE,
    ENGINE,
    ENGINE_DRAFTS,
    FILTERS,
    IMPORT,
    KERNEL,
    LOADER,
    MATMUL,
    MEMORY,
    OPTIMIZER,
    PACKED,
    PLANS,
    POPULATION,
    POWER,
    PRODUCTS,
    PROJECTION,
    QUICKSTART,
    RACE,
    RECIPES,
    REMOTE_LOADER,
    SERVE_SOAK,
    SIMULATE,
    STEP,
    TASKS,
    TECHNIQUES,
    TITLES,
    Columns,
)
from benchmarks.race import best_of_arms
from benchmarks.record import BENCHMARKS, Record, peers_of, read_results

DOCS = BENCHMARKS.parent / "docs"
LISTS = ("figures.md", "not-measured.md")  # which `benchmarks.figures` makes
HOWTO = [DOCS / "howto" / name for name in ("many-models.md", "sharing.md")]
PAGES = [
    DOCS / "explanation" / "at-scale.md",
    *(path for path in sorted((DOCS / "benchmarks").glob("*.md")) if path.name not in LISTS),
    *HOWTO,
    DOCS / "tutorials" / "case-studies.md",
]
# table BENCH CONFIG [VARIANT ...]: these variants alone, in this order.
MARKERS = re.compile(r"(<!-- table (\w+) (\w+)((?: \w+)*) -->\n).*?(<!-- end -->)", re.DOTALL)
MOST_ROWS = 10


def tabulate(
    bench: str, records: Sequence[Record], peers: Sequence[Record]
) -> tuple[list[str], list[list[str]]]:
    """Header and rows of all records of one benchmark and configuration, and of its peers."""
    if bench in ("race", "race_runs", "curves"):
        return raced(records, every=bench != "race")
    if bench == "decode_rate":
        return decoded(records)
    if bench in ("step", "memory"):
        return figures(STEP if bench == "step" else MEMORY, records, peers)
    columns = {"optim": OPTIMIZER, "attention": ATTENTION, "decode": DECODE, "import": IMPORT}
    columns |= {"data": DATA, "loader": LOADER, "rows": DECODE, "tasks": TASKS, "matmul": MATMUL}
    columns |= {
        "compress_methods": COMPRESS,
        "compress_recipes": RECIPES,
        "case_study": CASE,
        "projection": PROJECTION,
        "quickstart": QUICKSTART,
        "packing": PACKED,
        "products": PRODUCTS,
        "serve_soak": SERVE_SOAK,
        "filters": FILTERS,
        "at_scale": AT_SCALE,
        "plans": PLANS,
        "population": POPULATION,
        "remote_loader": REMOTE_LOADER,
        "simulate": SIMULATE,
        "techniques": TECHNIQUES,
        "finetune": TECHNIQUES,
        "engine": ENGINE,
        "engine_drafts": ENGINE_DRAFTS,
    }
    columns = columns.get(bench, KERNEL)
    return listed(columns, records, peers)


def figures(
    columns: Columns, records: Sequence[Record], peers: Sequence[Record]
) -> tuple[list[str], list[list[str]]]:
    """One row a record, and one for its floor below the last that has the same."""
    columns = with_more(columns, [record["metrics"] for record in records])
    cells = lambda values: [show(values.get(key)) for key, show in columns.items()]
    rows, floors = [], [*(record.get("floor") for record in records), None]
    for i, record in enumerate(records):
        batch = record["workload"]["batch_size"]
        name = f"jaxtrain, {record['variant']}, batch {batch}"
        rows.append([name, device(record), *cells(record["metrics"]), source(record)])
        if (floor := floors[i]) and floor != floors[i + 1]:
            rate = f"floor: matmuls at {floor['matmul_tflops']:.3g} TF/s"
            rows.append([rate, device(record), *cells(floor), source(record)])
        for peer in record.get("beside", ()):  # measured in the same call
            name = f"{peer['peer']}, same call"
            rows.append([name, device(record), *cells(peer["metrics"]), source(record)])
    for peer in peers:
        rows.append([peer["peer"], device(peer), *cells(peer["metrics"]), "peers.json"])
    return ["stack", "device", *(TITLES.get(key, key) for key in columns), "figures"], rows


def listed(
    columns: Columns, records: Sequence[Record], peers: Sequence[Record]
) -> tuple[list[str], list[list[str]]]:
    """One row for each row of the records and peers, equal shapes together."""
    entries = [(row, record) for record in records for row in record["rows"]]
    entries += [(row | {"backend": peer["peer"]}, peer) for peer in peers for row in peer["rows"]]
    # Stable: within a name and shape ours come first, then the peers, as they were recorded.
    order = list(dict.fromkeys((row["name"], row.get("shape")) for row, _ in entries))
    columns = with_more(columns, [row for row, _ in entries])
    entries.sort(key=lambda entry: order.index((entry[0]["name"], entry[0].get("shape"))))
    header = ["name", "shape", "backend", "variant", "device"]
    rows = [
        [row["name"], row.get("shape", ""), row.get("backend", "jaxtrain")]
        + [owner.get("variant", ""), device(owner)]
        + [row["failed"] if key == "ms" and "failed" in row else show(row.get(key))
           for key, show in columns.items()]
        + [source(owner)]
        for row, owner in entries
    ]  # fmt: skip
    keep = [i for i in range(len(header)) if i == 0 or any(row[i] for row in rows)]
    keep += range(len(header), len(header) + len(columns) + 1)
    header += [*(TITLES.get(key, key) for key in columns), "figures"]
    return [header[i] for i in keep], [[row[i] for i in keep] for row in rows]


def with_more(columns: Columns, found: Sequence[Record]) -> Columns:
    """The columns, with watts, the clock and ratios to peers where any of these rows has them."""
    more = POWER | BESIDE
    return columns | {key: x for key, x in more.items() if any(key in row for row in found)}


def raced(records: Sequence[Record], every: bool) -> tuple[list[str], list[list[str]]]:
    """One row for the best run of each arm, or for every run that took part, best first."""
    rows = []
    for record in records:
        for e in record["runs"] if every else best_of_arms(record):
            values = e | (e["to_baseline"] or {}) | {"seconds": e["seconds"]}
            cells = [show(values.get(key)) for key, show in RACE.items()]
            if e["bpb"] is None:
                cells[0] = f"{e['status']} (step {e['steps']})"
            name = e["label"] + (" (baseline)" if e["label"] == record["baseline"] else "")
            rows.append([name, settings(e, record), *cells, device(record), source(record)])
    return ["run", "settings", *(TITLES[key] for key in RACE), "device", "figures"], rows


def decoded(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """One row for each variant of a record, one column for each batch, prompt and cache dtype:
    tokens/s, and their share of what the floor would be."""
    entries = [(row, record) for record in records for row in record["rows"]]
    loads = list(dict.fromkeys((row["shape"], row["backend"]) for row, _ in entries))
    rows = []
    for record in records:
        for name in dict.fromkeys(row["name"] for row in record["rows"]):
            own = {(r["shape"], r["backend"]): r for r in record["rows"] if r["name"] == name}
            cells = [decode_cell(own.get(load)) for load in loads]
            rows.append([name, *cells, device(record), source(record)])
    return ["switches", *(", ".join(load) for load in loads), "device", "figures"], rows


def decode_cell(row: Record | None) -> str:
    if row is None or "failed" in row:
        return "-" if row is None else row["failed"]
    return f"{row['tokens_per_s']:,.0f} ({row['of_floor']:.0%})"


def settings(e: Record, record: Record) -> str:
    """A run's main rate and decay, and what sets it apart from others of the same optimizer."""
    peers = [other["settings"] for other in record["runs"] if other["optimizer"] == e["optimizer"]]
    apart = [
        key
        for key, value in e["settings"].items()
        # What rates other groups have beside the main one is a long list: the JSON has it.
        if "multipliers." not in key and any(other.get(key) != value for other in peers)
    ]
    main = [k for k in ("learning_rate", "matrix_lr", "weight_decay") if k in e["settings"]]
    return ", ".join(f"{k} {plain(e['settings'][k])}" for k in dict.fromkeys(main + apart))


def plain(x: Any) -> str:
    return f"{x:g}" if isinstance(x, float) else str(x)


def device(record: Record) -> str:
    count = record["device_count"]
    return record["device"] + (f" x{count}" if count > 1 else "")


def source(record: Record) -> str:
    """The file that the figures stand in."""
    return record.get("file", "peers.json" if "peer" in record else "this run")


def screen() -> Console:
    """Wide where the output is a file, so that tables keep their lines."""
    console = Console()
    return console if console.is_terminal else Console(width=180)


def to_rich(title: str, header: list[str], rows: list[list[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in header:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def to_markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["--"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def table_of(record: Record) -> Table:
    """One record beside its peers, for the screen."""
    title = f"{record['bench']} {record['config']}"
    bench = "race_runs" if record["bench"] == "race" else record["bench"]
    return to_rich(title, *tabulate(bench, [record], record["peers"]))


def render(page: str, results: Sequence[Record]) -> str:
    """The page with every table between its markers made anew from the records and the peers."""

    def table(match: re.Match[str]) -> str:
        begin, bench, config, variants, end = match.groups()
        name = bench.removesuffix("_runs")  # of a race there are two tables
        records = [r for r in results if (r["bench"], r["config"]) == (name, config)]
        asked = variants.split()
        if asked:
            named = {file_variant(record): record for record in records}
            records = [named[variant] for variant in asked]
        header, rows = tabulate(bench, records, peers_of(bench, config))
        body = to_markdown(header, rows[:MOST_ROWS]) if rows else "Not measured yet.\n"
        if len(rows) > MOST_ROWS:
            body += f"\n{len(rows) - MOST_ROWS} more rows are in the JSON files.\n\n"
        return begin + body + end

    return MARKERS.sub(table, page)


def file_variant(record: Record) -> str:
    """The variant as the record's file names it, with the devices where they are several."""
    count = record["device_count"]
    name = re.sub(r"\W+", "_", record["variant"])
    return name if count == 1 else f"{name}_x{count}"


def update_pages(pages: Sequence[Path] = PAGES) -> Sequence[Path]:
    """Regenerate the tables of docs/."""
    results = read_results()
    for page in pages:
        page.write_text(render(page.read_text(), results))
    return pages
