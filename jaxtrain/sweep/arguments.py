"""The command line of `sweep`, without JAX."""

import argparse

from jaxtrain.cluster.arguments import add_ray
from jaxtrain.settings import Parser, whole


def sweep_parser() -> Parser:
    """Parser of `jaxtrain sweep`: many runs with values that a sampler chooses."""
    parser = Parser(
        "jaxtrain sweep",
        description="Search values of a configuration's fields by many runs. The same command "
        "again, on this host or another, joins the sweep or goes on with it.",
    )
    parser.add_argument(
        "sweep",
        metavar="SWEEP.yaml",
        help="a sweep file, or the name of a shipped sweep",
    )
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value",
        help="override a field of the sweep (trials=40), or of its runs (train.steps=200)",
    )  # fmt: skip
    parser.add_argument(
        "--report", action="store_true", help="write report.html of the finished trials, and stop"
    )
    add_ray(parser)
    parser.add_argument(
        "--gpus",
        type=whole(0, 4096),
        help="--ray: GPUs per worker (default 1 if the cluster has GPUs)",
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)  # of `workers`
    return parser
