"""Warm-up of the sequence length and of the batch size: each phase of a run doubles the one before.

Sequence length: short rows first, with the same tokens per step. Li et al. 2022 (arXiv:2108.06084)
for stability, Jin et al. 2023 (GrowLength, arXiv:2310.00576) for speed: attention costs less in
short rows. Batch size: the critical batch size is small at first, and small steps learn more per
token (McCandlish et al. 2018, arXiv:1812.06162; Merrill et al. 2025, arXiv:2505.23971). Each length
and each size is a phase with its own compiled program (`train/program.py`).
"""

from collections.abc import Sequence

from pydantic import Field

from jaxtrain.data.batches.mixture import Stage
from jaxtrain.settings import Settings, UserError


class LengthRamp(Settings):
    """Sequence length that doubles until it is train.sequence_length."""

    start: int = Field(default=256, ge=2, description="tokens per sequence in the first phase")
    tokens: int = Field(
        gt=0,
        description="training tokens until the full sequence length, divided equally among "
        "the shorter lengths",
    )


class BatchRamp(Settings):
    """Batch size that doubles until it is train.batch_size."""

    start: int = Field(ge=1, description="sequences per step in the first phase")
    tokens: int = Field(
        gt=0,
        description="training tokens until the full batch size, divided equally among the "
        "smaller sizes",
    )


def length_stages(ramp: LengthRamp, sequence_length: int) -> tuple[Stage, ...]:
    """Stages of a ramp: lengths start, 2 start, ... and then sequence_length to the end.

    Raises UserError if doubling `start` does not lead to sequence_length.
    """
    lengths = doublings("length_ramp", ramp.start, "sequence_length", sequence_length)
    part = max(1, ramp.tokens // len(lengths))
    return (*(Stage(tokens=part, sequence_length=n) for n in lengths), Stage())


def batch_stages(ramp: BatchRamp, batch_size: int) -> tuple[Stage, ...]:
    """Stages of a ramp: sizes start, 2 start, ... and then batch_size to the end.

    Raises UserError if doubling `start` does not lead to batch_size.
    """
    sizes = doublings("batch_ramp", ramp.start, "batch_size", batch_size)
    part = max(1, ramp.tokens // len(sizes))
    return (*(Stage(tokens=part, batch_size=n) for n in sizes), Stage())


def doublings(ramp: str, start: int, field: str, end: int) -> list[int]:
    """Return start, 2 start, ... below `end`. Raises UserError if doubling does not lead to it."""
    times = (end // start).bit_length() - 1
    if times < 1 or start << times != end:
        raise UserError(
            f"data.{ramp}.start={start}: doubled it must become train.{field} {end}; "
            f"set data.{ramp}.start={max(1, end // 2)}"
        )
    return [start << i for i in range(times)]


def overlay(one: Sequence[Stage], other: Sequence[Stage]) -> tuple[Stage, ...]:
    """Merge two lists of stages: a stage ends where one of either list does, with both's fields."""
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
