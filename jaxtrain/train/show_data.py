"""`jaxtrain show-data CONFIG|RUN [key=value ...]`: packed rows of a run, decoded."""

import sys
from pathlib import Path

from jaxtrain.config import find_config, load_config
from jaxtrain.config.overrides import check_once
from jaxtrain.config.resolve import resolve, vocab_size_of
from jaxtrain.data.show import show_rows
from jaxtrain.data.store.prepare import prepare
from jaxtrain.objectives import make_row_change
from jaxtrain.settings import UserError, command
from jaxtrain.train.arguments import show_data_parser


@command
def main(argv: list[str] | None = None) -> int:
    """Return the exit code: 0, or 2 after one line about an error that the user can fix."""
    a = show_data_parser().parse_intermixed_args(argv)
    check_once(a.overrides)
    saved = Path(a.config) / "config.yaml"  # of a run
    config = load_config(saved if saved.is_file() else find_config(a.config), a.overrides)
    rows, steps, ramps = config.train.batch_size, config.train.steps, config.data
    if rows is None or (a.step and steps is None) or ramps.length_ramp or ramps.batch_ramp:
        config = resolve(config, vocab_size_of(config.data))
        rows, steps = config.train.batch_size, config.train.steps
    if steps is not None and a.step >= steps:
        raise UserError(f"--step {a.step}: the run has {steps} steps, 0 to {steps - 1}")
    prepared = prepare(config.data)
    for line in show_rows(
        prepared,
        config.data,
        batch_size=rows,
        sequence_length=config.train.sequence_length,
        step=a.step,
        rows=a.rows,
        characters=a.characters,
        augment=make_row_change(config.objective, prepared.tokenizer, config.data.seed),
    ):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
