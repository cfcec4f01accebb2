"""Arguments of multi-process commands. This module does not import JAX."""

import argparse

from jaxtrain.settings import whole


def add_ray(parser: argparse.ArgumentParser) -> None:
    """Add --ray: the cluster that `ray_cluster` connects to."""
    parser.add_argument(
        "--ray", metavar="ADDRESS|local", help="run on a Ray cluster: HOST:PORT or auto"
    )


def add_place(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `find_rank`: --coordinator, --processes and --process."""
    parser.add_argument(
        "--coordinator", metavar="HOST:PORT", help="several processes: address of process 0"
    )
    parser.add_argument(
        "--processes", type=whole(1), metavar="N", help="several processes: how many"
    )
    parser.add_argument(
        "--process", type=whole(0), metavar="I", help="several processes: index of this one, from 0"
    )
