"""Dry-run arguments, shared by several commands. This module does not import JAX."""

import argparse
from collections.abc import Sequence

from jaxtrain.settings import TINY, UserError, real, whole


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


def option_given(a: argparse.Namespace, *options: str) -> str | None:
    """The first of these options that the command line sets. Each defaults to an empty value."""
    for name in options:
        value = getattr(a, name)
        if value not in (None, False, []):
            return f"--{name} {value}" if type(value) in (int, str) else f"--{name}"
    return None


def has(overrides: Sequence[str], key: str) -> bool:
    return key in {line.partition("=")[0].strip() for line in overrides}


def dry_overrides(a: argparse.Namespace) -> list[str]:
    """The command line's overrides, with train.steps=1 if finetuning needs it: memory does not
    depend on the steps."""
    alone = (
        not a.config and (a.dry_run or a.fit is not None) and not has(a.overrides, "train.steps")
    )
    return [*a.overrides, *["train.steps=1"] * alone]


def check_dry(a: argparse.Namespace) -> None:
    """Raise UserError for a dry-run option without --dry-run or --fit."""
    stray = option_given(a, "devices", "device", "memory", "json")
    if stray and not a.dry_run and a.fit is None:
        raise UserError(f"{stray} is for --dry-run (or --fit N)")
