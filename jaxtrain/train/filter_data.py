"""`jaxtrain filter CONFIG [key=value ...] --out DIR`: write the text that the filters keep."""

import sys

from rich.console import Console

from jaxtrain.cluster.ray_cluster import ray_cluster
from jaxtrain.config import find_config, load_config
from jaxtrain.config.overrides import check_once
from jaxtrain.data.filters.filtered import filter_into, report_lines
from jaxtrain.data.store.progress import show_progress
from jaxtrain.settings import command
from jaxtrain.train.arguments import filter_parser


@command
def main(argv: list[str] | None = None) -> int:
    """Return the exit code: 0, or 2 after one line about an error that the user can fix."""
    a = filter_parser().parse_intermixed_args(argv)
    check_once(a.overrides)
    config = load_config(find_config(a.config), a.overrides)
    with ray_cluster(a.ray), show_progress(Console()) as progress:
        reports = filter_into(config.data, a.out, progress)
    for name, report in reports.items():
        print("\n".join(report_lines(name, report, a.samples)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
