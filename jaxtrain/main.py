"""The command line: argv -> Config -> training. `jaxtrain --help` lists every field.

python -m jaxtrain.main --config configs/quickstart.yaml optim.matrix_lr=0.01
"""

import argparse
import sys

from jaxtrain.bench.preflight import add_preflight, check_dry, preflight_of, report
from jaxtrain.config import find_config, help_text, load_config
from jaxtrain.parallel.processes import add_place, find_place, joined
from jaxtrain.settings import command


@command
def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 after one line about what the user can fix."""
    parser = argparse.ArgumentParser(
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
    try:
        arguments = parser.parse_intermixed_args(argv)
        check_dry(arguments)
        path = find_config(arguments.config) if arguments.config else None
        config = load_config(path, arguments.overrides)
        if arguments.print_config:
            from jaxtrain.scaling import resolved_text

            print(resolved_text(config), flush=True)
            return 0
        if arguments.dry_run or arguments.fit is not None:
            print(report(preflight_of(arguments, arguments.config, arguments.overrides)))
            return 0
        from jaxtrain.parallel.runtime import start
        from jaxtrain.run import facts
        from jaxtrain.train import train

        place = find_place(arguments.coordinator, arguments.processes, arguments.process)
        start(quiet=place is not None and place.index > 0)
        with joined(place, config.processes, facts(config) if place else {}) as group:
            train(config, group)
    except KeyboardInterrupt:  # outside the loop, which saves and stops by itself, or the second
        print("interrupted; the same command goes on from its last checkpoint", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
