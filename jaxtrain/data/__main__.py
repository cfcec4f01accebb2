"""python -m jaxtrain.data show CONFIG [key=value ...] [--rows N] [--step N] [--characters N]"""

import argparse
import sys

from jaxtrain.config import find_config, load_config
from jaxtrain.data.corpus import prepare
from jaxtrain.data.show import show
from jaxtrain.scaling import resolve, vocab_size_of
from jaxtrain.settings import UserError


def main(argv: list[str] | None = None) -> int:
    """Prints packed rows of a run; prepares the data first if it has to."""
    parser = argparse.ArgumentParser(
        "python -m jaxtrain.data", description="Look at the data of a configuration."
    )
    parser.add_argument("what", choices=["show"], help="show: decoded rows, as they are packed")
    parser.add_argument("config", help="a YAML file or the bare name of a shipped config")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="override a field")
    parser.add_argument("--rows", type=int, default=4, help="rows that are shown (4)")
    parser.add_argument("--step", type=int, default=0, help="step that they belong to (0)")
    parser.add_argument(
        "--characters", type=int, default=400, help="of each document that are shown (400)"
    )
    a = parser.parse_intermixed_args(argv)
    try:
        config = load_config(find_config(a.config), a.overrides)
        rows = config.train.batch_size
        if rows is None:
            rows = resolve(config, vocab_size_of(config.data)).train.batch_size
        for line in show(
            prepare(config.data),
            config.data,
            batch_size=rows,
            sequence_length=config.train.sequence_length,
            step=a.step,
            rows=a.rows,
            characters=a.characters,
        ):
            print(line)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
