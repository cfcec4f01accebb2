"""Sequence-length warm-up: short rows first, twice as long in each phase, a step's tokens the same.

Li et al. 2022 (arXiv:2108.06084) for stability, Jin et al. 2023 (GrowLength, arXiv:2310.00576) for
speed: attention costs less in short rows. Each length is a phase of the run with a program of its
own (`train/program.py`).
"""

from pydantic import Field

from jaxtrain.data.batches.mixture import Stage
from jaxtrain.settings import Settings, UserError


class LengthRamp(Settings):
    """Rows that double in length until they have train.sequence_length tokens."""

    start: int = Field(default=256, ge=2, description="Tokens of a row in the first phase")
    tokens: int = Field(
        gt=0, description="Training tokens until rows are whole, an equal part for each length"
    )


def ramp_stages(ramp: LengthRamp, sequence_length: int) -> tuple[Stage, ...]:
    """The stages of a ramp: lengths start, 2 start, ... and then sequence_length to the end.

    UserError where doubling does not lead from `start` to sequence_length.
    """
    doublings = (sequence_length // ramp.start).bit_length() - 1
    if doublings < 1 or ramp.start << doublings != sequence_length:
        raise UserError(
            f"data.length_ramp.start={ramp.start}: doubled it must become train.sequence_length "
            f"{sequence_length}; set it to {sequence_length // 2} or {sequence_length // 4}"
        )
    part = max(1, ramp.tokens // doublings)
    growing = [Stage(tokens=part, sequence_length=ramp.start << i) for i in range(doublings)]
    return (*growing, Stage())
