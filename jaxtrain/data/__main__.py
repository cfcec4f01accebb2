"""Look at the data of a configuration, or filter it.

jaxtrain show-data CONFIG [key=value ...] [--rows N] [--step N] [--characters N]
jaxtrain filter CONFIG [key=value ...] --out DIR [--samples N]
"""

import sys
from pathlib import Path

from rich.console import Console

from jaxtrain.config import find_config, load_config
from jaxtrain.config.overrides import check_once
from jaxtrain.config.resolve import resolve, vocab_size_of
from jaxtrain.data.filters.filtered import filter_into, report_lines
from jaxtrain.data.show import show_rows
from jaxtrain.data.store.corpus import prepare
from jaxtrain.data.store.progress import show_progress
from jaxtrain.settings import Parser, UserError, command, whole


@command
def main(argv: list[str] | None = None) -> int:
    """Prints packed rows of a run; prepares the data first if it has to."""
    parser = Parser("jaxtrain", description="Look at the data of a configuration.")
    parser.add_argument(
        "what",
        choices=["show", "filter"],
        help="show: decoded rows, as they are packed; filter: what data.train.filters leave of the "
        "text, as JSONL, and a report of what they removed",
    )
    parser.add_argument("config", help="a YAML file or the bare name of a shipped config")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="override a field")
    parser.add_argument("--rows", type=whole(1), default=4, help="rows that are shown (4)")
    parser.add_argument("--step", type=whole(0), default=0, help="step that they belong to (0)")
    parser.add_argument(
        "--characters", type=whole(0), default=400, help="of each document that are shown (400)"
    )
    parser.add_argument("--out", type=Path, help="folder that filter writes")
    parser.add_argument(
        "--samples", type=whole(0), default=1, help="removed documents shown of each reason (1)"
    )
    a = parser.parse_intermixed_args(argv)
    check_once(a.overrides)
    config = load_config(find_config(a.config), a.overrides)
    if a.what == "filter":
        if a.out is None:
            raise UserError("filter needs --out FOLDER")
        with show_progress(Console()) as progress:
            reports = filter_into(config.data, a.out, progress)
        for name, report in reports.items():
            print("\n".join(report_lines(name, report, a.samples)))
        return 0
    rows, steps = config.train.batch_size, config.train.steps
    if rows is None or (a.step and steps is None):
        resolved = resolve(config, vocab_size_of(config.data)).train
        rows, steps = resolved.batch_size, resolved.steps
    if steps is not None and a.step >= steps:
        raise UserError(f"--step {a.step}: the run has {steps} steps, 0 to {steps - 1}")
    for line in show_rows(
        prepare(config.data),
        config.data,
        batch_size=rows,
        sequence_length=config.train.sequence_length,
        step=a.step,
        rows=a.rows,
        characters=a.characters,
    ):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
