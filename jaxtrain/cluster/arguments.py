"""Arguments of multi-process commands. This module does not import JAX."""

import argparse

from jaxtrain.settings import whole


def add_ray(parser: argparse.ArgumentParser) -> None:
    """Add --ray: the cluster that `ray_cluster` connects to."""
    parser.add_argument(
        "--ray", metavar="ADDRESS|local", help="a Ray cluster that does the work: HOST:PORT or auto"
    )


def add_place(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `find_place`: --coordinator, --processes and --process."""
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 is, of several")
    parser.add_argument("--processes", type=whole(1), metavar="N", help="how many there are")
    parser.add_argument("--process", type=whole(0), metavar="I", help="which this is, from 0")
