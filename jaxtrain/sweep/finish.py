"""End of a sweep: write its results to a file and a page, and print tables."""

import sys

from rich.console import Console
from rich.table import Table

from jaxtrain.storage.disk import write_json
from jaxtrain.sweep.report import write_sweep_report
from jaxtrain.sweep.results import SweepResults, as_json, best_first, labels_of, results_of
from jaxtrain.sweep.transfer import TransferResults, title_of
from jaxtrain.sweep.work import Queues

SHOWN = 10  # rows of the table on the screen


def finish_sweep(queues: Queues) -> None:
    """Write results.json and report.html, and print the table."""
    found = results_of(*queues)
    c = found.config
    write_json(c.folder / "results.json", as_json(found))
    page = write_sweep_report(found)
    console = Console(soft_wrap=not sys.stdout.isatty())
    for table in sweep_tables(found):
        console.print(table, highlight=False)
    print(f"report   {page}")


def sweep_tables(found: SweepResults) -> list[Table]:
    """Tables of the best trials, and of those run again on fresh seeds, for a console."""
    c = found.config
    best = best_first(c, found.trials)
    if len(c.objectives) > 1:
        best = [row for row in best if row.number in found.front]
    title = "Pareto front" if len(c.objectives) > 1 else "best trials"
    table = Table(box=None, header_style="bold", title=title, title_justify="left")
    for head in ("trial", *(goal.metric for goal in c.objectives), *labels_of(c).values()):
        table.add_column(head, justify="right", overflow="fold")
    text = lambda x: f"{x:.5g}" if isinstance(x, float) else str(x)
    for row in best[:SHOWN]:
        cells = [*row.scores, *(row.values.get(key) for key in c.parameters)]
        table.add_row(str(row.number), *map(text, cells))
    tables = [table]
    if found.transferred is not None:
        tables.append(transfer_table(found.transferred))
    if not found.confirmed:
        return tables
    again = Table(
        box=None, header_style="bold", title="fresh seeds (95% intervals)", title_justify="left"
    )
    for head in ("trial", "in the sweep", "on fresh seeds", "too good by", "over baseline"):
        again.add_column(head, justify="right")
    for one in found.confirmed:
        name = "baseline" if one.number is None else str(one.number)
        cells = (one.searched, str(one.fresh), one.optimism, one.over_baseline)
        again.add_row(name, *("" if x is None else text(x) for x in cells))
    return [*tables, again]


def transfer_table(found: TransferResults) -> Table:
    """Table of the gains over the baseline at both sizes, for a console."""
    rank = found.rank_correlation
    title = "minus the baseline on fresh seeds (95% intervals)"
    title += "" if rank is None else f"; rank correlation {rank:.2f}"
    table = Table(box=None, header_style="bold", title=title, title_justify="left")
    for head in ("", "rank", "at the sweep's size", "at the other size"):
        table.add_column(head, justify="right" if head else "left", overflow="fold")
    for row in found.rows:
        cells = (title_of(row.of, row.only), row.rank, row.own or "", row.other or "")
        table.add_row(*map(str, cells))
    return table
