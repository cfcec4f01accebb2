"""`jaxtrain train`: argv -> Config -> training. `python -m jaxtrain.main` is the same.

python -m jaxtrain.main --config configs/quickstart.yaml optim.matrix_lr=0.01
"""

import argparse
import functools
import json
import sys
from typing import TYPE_CHECKING, Any

from jaxtrain.cluster.arguments import add_place
from jaxtrain.estimate.arguments import add_json, add_preflight, check_dry, dry_overrides
from jaxtrain.settings import Parser, command
from jaxtrain.train.arguments import add_overrides
from jaxtrain.train.field_help import read_schema, section_help, sections_line

if TYPE_CHECKING:
    from jaxtrain.config import Config

FIRST = """
Train a language model. The same command again resumes the run. To begin with:

  --config quickstart               a small GPT, in minutes on a CPU
  --config quickstart data.train.path=book.txt
                                    the same on your own text
  --config lora_chat train.init_from=OWNER/NAME data.train.path=chat.jsonl
                                    LoRA on a checkpoint, with conversations
  --config continue train.init_from=OWNER/NAME data.train.path=corpus.jsonl
                                    continue a checkpoint's pretraining
  ... --dry-run --device RTX-4090   what a step would need there, and stop
  ... --print-config                the resolved configuration, and stop
  --help                            all options; --help SECTION its fields
"""


class Help(argparse.Action):
    """`--help`: the options. `--help SECTION`: the fields of a section."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        print(section_help(values) if values else parser.format_help(), end="\n" * bool(values))
        parser.exit()


def train_parser() -> Parser:
    """Parser of `jaxtrain train`."""
    parser = Parser(
        "jaxtrain train",
        usage="%(prog)s [--config NAME] [key.path=value ...]",
        description="Train a language model. The same command again resumes the run.",
        epilog=sections_line(read_schema()),
        formatter_class=functools.partial(
            argparse.RawDescriptionHelpFormatter, max_help_position=27
        ),
        add_help=False,
    )
    parser.add_argument(
        "-h",
        "--help",
        nargs="?",
        metavar="SECTION",
        action=Help,
        help="show this help, or the fields of a section",
    )
    add_config(parser)
    parser.add_argument(
        "--print-config", action="store_true", help="print the resolved configuration and stop"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print what a step needs, and stop",
    )
    add_preflight(parser)
    add_json(parser)
    add_place(parser)
    return parser


def estimate_parser() -> Parser:
    """Parser of `jaxtrain estimate`, which is `jaxtrain train --dry-run`."""
    parser = Parser(
        "jaxtrain estimate",
        description="Memory, communication and time of a training step on other devices.",
    )
    add_config(parser)
    add_preflight(parser)
    add_json(parser)
    return parser


def add_config(parser: Parser) -> None:
    """Add --config and the overrides."""
    parser.add_argument("--config", help="a YAML file, or the bare name of a shipped config")
    add_overrides(parser)


@command
def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, 1 if a dry run does not fit, or 2 after one line
    about what the user can fix."""
    parser = train_parser()
    if not (sys.argv[1:] if argv is None else argv):
        print(f"{parser.format_usage()}{FIRST}")
        return 2  # a script whose arguments are missing should notice
    try:
        return run(parser.parse_intermixed_args(argv))
    except KeyboardInterrupt:  # outside the loop (which saves and stops on one), or a second one
        print("interrupted; the same command resumes from the last checkpoint", file=sys.stderr)
        return 130


def run(a: argparse.Namespace) -> int:
    """Train, print the configuration, or do a dry run. JAX is imported here."""
    from jaxtrain.config import find_config, load_config
    from jaxtrain.config.overrides import check_once

    check_dry(a)
    check_once(a.overrides)
    path = find_config(a.config) if a.config is not None else None
    overrides = dry_overrides(a)
    config = load_config(path, overrides)
    if a.print_config:
        from jaxtrain.config.resolve import resolved_text

        print(resolved_text(config), flush=True)
        return 0
    if a.dry_run or a.fit is not None:
        from jaxtrain.estimate.dry_run import preflight_of
        from jaxtrain.estimate.dry_run_report import report
        from jaxtrain.estimate.fit import choose

        one = (lambda *asked: choose(*asked)[1]) if config.train.fit else None
        record = preflight_of(a, a.config, overrides, one)
        print(json.dumps(record) if a.json else report(record))
        return 0 if record["metrics"]["fits"] else 1
    train_as_job(a, config, overrides)
    return 0


def train_as_job(a: argparse.Namespace, config: "Config", overrides: list[str]) -> None:
    """Train in a single process, or as one process of the job that options or a launcher define."""
    from jaxtrain.cluster.processes import find_rank, joined
    from jaxtrain.cluster.runtime import start, start_devices
    from jaxtrain.runs.job import facts

    rank = find_rank(a.coordinator, a.processes, a.process)
    start(quiet=rank is not None and rank.index > 0)
    same, folder = facts(config) if rank else {}, config.run.folder
    with joined(rank, config.processes, same, folder) as coordinator:
        start_devices()
        from jaxtrain.train.loop import train

        if config.train.fit:
            from jaxtrain.estimate.fit import fitted

            config = fitted(a.config, overrides, config, coordinator)
        train(config, coordinator)


if __name__ == "__main__":
    sys.exit(main())
