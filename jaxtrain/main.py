"""The command line: argv -> Config -> training. `jaxtrain --help` lists every field.

python -m jaxtrain.main --config configs/quickstart.yaml optim.matrix_lr=0.01
"""

import argparse
import sys
from pathlib import Path

from jaxtrain.cluster.processes import add_place, find_place, joined
from jaxtrain.config import find_config, help_text, load_config
from jaxtrain.config.overrides import check_once
from jaxtrain.estimate.dry_run import (
    add_preflight,
    check_dry,
    dry_overrides,
    preflight_of,
    report,
)
from jaxtrain.estimate.fit import choose, fitted
from jaxtrain.settings import Parser, command

FIRST = """
Train a language model. The same command again resumes the run. To begin with:

  --config quickstart                            a small GPT, in minutes on a CPU
  --config quickstart data.train.path=book.txt   the same on your own text
  --config lora_chat train.init_from=OWNER/NAME data.train.path=chat.jsonl
                                                 LoRA on a checkpoint, with conversations
  --config continue train.init_from=OWNER/NAME data.train.path=corpus.jsonl
                                                 go on with a checkpoint's pretraining
  ... --dry-run --device RTX-4090                what a step would need there, and stop
  ... --print-config                             the resolved configuration, and stop
  --help                                         all options and every field
"""


@command
def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0, 1 where a dry run says that it does not fit, or 2 after one line
    about what the user can fix."""
    parser = Parser(
        "jaxtrain",
        description="Train a language model. The same command again resumes the run.",
        epilog=help_text(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", help="a YAML file, or the bare name of a shipped config")
    parser.add_argument(
        "--print-config", action="store_true", help="show the resolved tree and stop"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="say what a step needs on --devices N (no accelerator, no data) and stop",
    )
    add_preflight(parser)
    add_place(parser)
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="override a field")
    if not (sys.argv[1:] if argv is None else argv):
        print(f"{parser.format_usage()}{FIRST}")
        return 2  # a script whose arguments are missing should notice
    try:
        arguments = parser.parse_intermixed_args(argv)
        check_dry(arguments)
        check_once(arguments.overrides)
        path = find_config(arguments.config) if arguments.config is not None else None
        overrides = dry_overrides(arguments)
        config = load_config(path, overrides)
        if arguments.print_config:
            from jaxtrain.config.resolve import resolved_text

            print(resolved_text(config), flush=True)
            return 0
        if arguments.dry_run or arguments.fit is not None:
            one = (lambda *asked: choose(*asked)[1]) if config.train.fit else None
            record = preflight_of(arguments, arguments.config, overrides, one)
            print(report(record))
            return 0 if record["metrics"]["fits"] else 1
        from jaxtrain.cluster.runtime import start
        from jaxtrain.runs.job import facts
        from jaxtrain.train.loop import train

        place = find_place(arguments.coordinator, arguments.processes, arguments.process)
        start(quiet=place is not None and place.index > 0)
        same, folder = facts(config) if place else {}, Path(config.run.directory)
        with joined(place, config.processes, same, folder) as group:
            if config.train.fit:
                config = fitted(arguments.config, overrides, config, group)
            train(config, group)
    except KeyboardInterrupt:  # outside the loop, which saves and stops by itself, or the second
        print("interrupted; the same command goes on from its last checkpoint", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
