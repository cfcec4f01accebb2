"""Dry-run arguments, shared by several commands. This module does not import JAX."""

import argparse

from jaxtrain.settings import TINY, real, whole


def add_preflight(parser: argparse.ArgumentParser) -> None:
    """Add --device, --devices, --memory and --fit, which `preflight_of` reads."""
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="dry run: device, such as T4 or RTX-4090 (H200)",
    )
    parser.add_argument(
        "--devices",
        type=whole(0, 2**16),
        metavar="N",
        help="dry run: number of simulated devices (default 1)",
    )
    parser.add_argument(
        "--memory",
        type=real(TINY, "above 0"),
        metavar="GIB",
        help="dry run: memory per device; default the device's",
    )
    parser.add_argument(
        "--fit",
        type=whole(0, 2**16),
        metavar="N",
        help="dry run: find the first mesh of N devices that fits",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add --json, for the dry run as a command."""
    parser.add_argument(
        "--json", action="store_true", help="dry run: print the result as one line of JSON"
    )
