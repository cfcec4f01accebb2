"""Batch-size warm-up: steps of few rows first, twice as many in each phase.

At first the critical batch is small, and small steps learn more of a token (McCandlish et al.
2018, arXiv:1812.06162; Merrill et al. 2025, arXiv:2505.23971). Each size is a phase of the run with
a program of its own (`train/program.py`).
"""

from collections.abc import Sequence

from pydantic import Field

from jaxtrain.data.batches.mixture import Stage
from jaxtrain.settings import Settings, UserError


class BatchRamp(Settings):
    """Steps that double in size until they have train.batch_size rows."""

    start: int = Field(ge=1, description="Rows of a step in the first phase")
    tokens: int = Field(
        gt=0, description="Training tokens until steps are whole, an equal part for each size"
    )


def batch_stages(ramp: BatchRamp, batch_size: int) -> tuple[Stage, ...]:
    """The stages of a ramp: sizes start, 2 start, ... and then batch_size to the end.

    UserError where doubling does not lead from `start` to batch_size.
    """
    doublings = (batch_size // ramp.start).bit_length() - 1
    if doublings < 1 or ramp.start << doublings != batch_size:
        raise UserError(
            f"data.batch_ramp.start={ramp.start}: doubled it must become train.batch_size "
            f"{batch_size}; set data.batch_ramp.start={max(1, batch_size // 2)}"
        )
    part = max(1, ramp.tokens // doublings)
    growing = [Stage(tokens=part, batch_size=ramp.start << i) for i in range(doublings)]
    return (*growing, Stage())


def overlay(one: Sequence[Stage], other: Sequence[Stage]) -> tuple[Stage, ...]:
    """Stages that end where one of either list ends, with the fields of both."""
    found, lists = [], [list(one), list(other)]
    while all(lists):
        fields = {}
        for stage, *_ in lists:
            fields |= stage.model_dump(exclude={"tokens"}, exclude_none=True)
        tokens = min((s.tokens for s, *_ in lists if s.tokens), default=None)
        found.append(Stage(tokens=tokens, **fields))
        for stages in lists:
            first = stages.pop(0)
            if tokens and first.tokens != tokens:
                left = first.tokens and first.tokens - tokens
                stages.insert(0, first.model_copy(update={"tokens": left}))
    return tuple(found)
